//! The text that a template writes, with a limit on its length.

use std::io;

/// Longest text of one rendering; a conversation of a million tokens has some megabytes.
const MAX_RENDERED_BYTES: usize = 64_000_000;

#[derive(Debug, Default)]
pub(in crate::data) struct BoundedText(Vec<u8>);

impl BoundedText {
    pub(in crate::data) fn into_text(self) -> Result<String, String> {
        String::from_utf8(self.0).map_err(|error| error.to_string())
    }
}

impl io::Write for BoundedText {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.0.len() + bytes.len() > MAX_RENDERED_BYTES {
            return Err(io::Error::other(format!("it writes more than {} MB", MAX_RENDERED_BYTES / 1_000_000)));
        }
        self.0.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use crate::data::fixture::tokenizer;
    use crate::data::template::ChatTemplate;

    #[test]
    fn a_template_that_writes_without_end_is_stopped() {
        let text = "a frog ".repeat(2_000);
        let source =
            format!("{{% for a in range(9999) %}}{{% for b in range(99) %}}{text}{{% endfor %}}{{% endfor %}}");
        let template = ChatTemplate::new(&source, "the test", &tokenizer()).unwrap();
        let error = template.render(&[], None, false).unwrap_err().to_string();
        assert!(error.contains("it writes more than 64 MB"), "{error}");
    }
}
