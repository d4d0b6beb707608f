//! Text for a page.

use minijinja::{AutoEscape, Environment};
use serde::Serialize;

use super::ReportError;

/// The style of all pages.
const STYLE: &str = include_str!("style.css");
/// Shows numbers under the pointer; pages are complete without it.
const SCRIPT: &str = include_str!("hover.js");

/// Escapes text for an element or a quoted attribute.
pub(super) fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            '\'' => escaped.push_str("&#39;"),
            other => escaped.push(other),
        }
    }
    escaped
}

/// JSON that is safe inside a `<script>`: nothing in it ends the element.
pub(super) fn script_json(value: &impl Serialize) -> String {
    let json = serde_json::to_string(value).unwrap_or_default();
    json.replace('<', "\\u003c").replace('>', "\\u003e").replace('&', "\\u0026")
}

/// Fills a template and escapes every text that is not marked as HTML.
pub(super) fn fill(template: &str, context: &impl Serialize) -> Result<String, ReportError> {
    let mut environment = Environment::new();
    environment.set_auto_escape_callback(|_| AutoEscape::Html);
    environment.set_trim_blocks(true);
    environment.set_lstrip_blocks(true);
    environment.add_global("style", minijinja::Value::from_safe_string(STYLE.to_owned()));
    environment.add_global("script", minijinja::Value::from_safe_string(SCRIPT.to_owned()));
    Ok(environment.render_str(template, context)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOSTILE: &str = "</script><img src=x onerror=\"alert('1')\">&amp;";

    #[test]
    fn no_text_can_end_its_element_or_attribute() {
        let escaped = escape(HOSTILE);
        assert!(!escaped.contains(['<', '>', '"', '\'']), "{escaped}");
        let json = script_json(&[HOSTILE]);
        assert!(!json.contains(['<', '>', '&']), "{json}");
        assert_eq!(serde_json::from_str::<Vec<String>>(&json).unwrap(), [HOSTILE]);
    }

    #[test]
    fn a_template_escapes_what_it_is_given() {
        let filled = fill("<p title=\"{{ text }}\">{{ text }}</p>", &serde_json::json!({ "text": HOSTILE })).unwrap();
        assert!(!filled.contains("<img") && !filled.contains("</script"), "{filled}");
    }
}
