//! Messages as they are typed, pasted or piped: mostly a line each.

use std::io;

/// What a terminal puts around a pasted text, once it is asked to.
const PASTED: [&str; 2] = ["\x1b[200~", "\x1b[201~"];
/// What stands before and behind a message of several lines.
const QUOTES: &str = r#"""""#;
/// A terminal that hands over whole lines leaves out what is beyond these bytes of one.
const LONGEST_LINE: usize = 4095;

/// A message, and whether its terminal may have cut a line of it.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Message {
    pub(super) text: String,
    pub(super) may_be_cut: bool,
}

/// The next message: a line, all lines that were pasted together, or those between two `"""`. `None` at the end.
pub(super) fn next_message(lines: &mut impl Iterator<Item = io::Result<String>>) -> Option<io::Result<Message>> {
    let (mut text, mut may_be_cut) = (None::<String>, false);
    for line in lines {
        let line = match line {
            Ok(line) => line,
            Err(error) => return Some(Err(error)),
        };
        may_be_cut |= line.len() >= LONGEST_LINE;
        let whole = text.map_or_else(|| line.clone(), |text| format!("{text}\n{line}"));
        let is_whole = is_whole(&whole);
        text = Some(whole);
        if is_whole {
            break;
        }
    }
    let typed = PASTED.iter().fold(text?, |text, mark| text.replace(mark, ""));
    let quoted = typed.trim().strip_prefix(QUOTES).map(|rest| rest.strip_suffix(QUOTES).unwrap_or(rest));
    let text = quoted.map_or_else(|| typed.clone(), |quoted| quoted.trim().to_owned());
    Some(Ok(Message { text, may_be_cut }))
}

fn is_whole(text: &str) -> bool {
    let [start, end] = PASTED.map(|mark| text.rfind(mark));
    let is_pasted = start.is_none_or(|start| end.is_some_and(|end| end > start));
    is_pasted && text.trim().strip_prefix(QUOTES).is_none_or(|rest| rest.ends_with(QUOTES))
}

/// A terminal that says what is pasted, until this is given back.
#[cfg(unix)]
#[derive(Clone, Copy)]
pub(super) struct Pasting {
    before: libc::termios,
}

#[cfg(unix)]
#[expect(unsafe_code, reason = "terminals are set with system calls")]
impl Pasting {
    /// Asks the terminal of standard input and standard error, if they are one.
    pub(super) fn start() -> Option<Self> {
        use std::io::IsTerminal as _;

        let mut settings = std::mem::MaybeUninit::<libc::termios>::uninit();
        if !io::stdin().is_terminal() || !io::stderr().is_terminal() {
            return None;
        }
        // SAFETY: `settings` outlives the call, which fills it where it returns 0.
        let before = unsafe {
            if libc::tcgetattr(libc::STDIN_FILENO, settings.as_mut_ptr()) != 0 {
                return None;
            }
            settings.assume_init()
        };
        let mut settings = before;
        // The marks are echoed as they are, for which a terminal shows nothing.
        settings.c_lflag &= !libc::ECHOCTL;
        set(&settings, b"\x1b[?2004h");
        Some(Self { before })
    }

    /// Makes only system calls that are allowed in a signal handler.
    pub(super) fn give_back(self) {
        set(&self.before, b"\x1b[?2004l");
    }
}

#[cfg(unix)]
#[expect(unsafe_code, reason = "terminals are set with system calls")]
fn set(settings: &libc::termios, code: &[u8]) {
    // SAFETY: system calls on memory that outlives them. If they fail, the terminal stays as it is.
    unsafe {
        libc::tcsetattr(libc::STDIN_FILENO, libc::TCSADRAIN, settings);
        libc::write(libc::STDERR_FILENO, code.as_ptr().cast(), code.len());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pasted_letter_is_one_message_and_so_is_what_stands_between_quotes() {
        let read = |text: &str| {
            let mut lines = text.lines().map(|line| Ok(line.to_owned()));
            let mut messages = Vec::new();
            while let Some(message) = next_message(&mut lines) {
                messages.push(message.unwrap().text);
            }
            messages
        };
        assert_eq!(read("one\n\ntwo\n"), ["one", "", "two"]);
        let letter = "Dear Sir,\n\nmy dryer broke.";
        let pasted = format!("\x1b[200~{letter}\x1b[201~");
        assert_eq!(read(&format!("{pasted}\nthanks\n")), [letter, "thanks"]);
        assert_eq!(read(&format!("Read: {pasted} Well?\n")), [format!("Read: {letter} Well?")]);
        assert_eq!(read(&format!("{pasted} and {pasted}\nx\n")), [format!("{letter} and {letter}"), "x".to_owned()]);
        assert_eq!(read(&format!("\x1b[200~{letter}\n\x1b[201~\nx\n")), [format!("{letter}\n"), "x".to_owned()]);
        for quoted in [format!("\"\"\"{letter}\"\"\"\nx\n"), format!("\"\"\"\n{letter}\n\"\"\"\nx\n")] {
            assert_eq!(read(&quoted), [letter, "x"]);
        }
        assert_eq!(read("\"\"\"one\"\"\"\ntwo \"\"\" three\n"), ["one", "two \"\"\" three"]);
        assert_eq!(read(&format!("\x1b[200~{letter}")), [letter], "the input ends within it");
    }

    #[test]
    fn a_line_that_a_terminal_may_have_cut_is_known() {
        let mut lines = ["short".to_owned(), "x".repeat(LONGEST_LINE)].into_iter().map(Ok);
        let cut: Vec<bool> = (0..2).map(|_| next_message(&mut lines).unwrap().unwrap().may_be_cut).collect();
        assert_eq!(cut, [false, true]);
    }
}
