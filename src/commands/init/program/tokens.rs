//! The words of a Python program, without comments, so that neither these nor texts are taken for code.

/// A word.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Token {
    Name(String),
    Number(String),
    Text(String),
    /// A text with names in braces.
    Format(String),
    /// A sign of one character. Of those with several, such as `==`, none is `=`.
    Sign(char),
    Other,
    /// The end of a statement.
    End,
}

impl Token {
    pub(super) fn is_name(&self, name: &str) -> bool {
        matches!(self, Self::Name(own) if own == name)
    }
}

/// Where a number ends that begins at `at`.
fn number_end(characters: &[char], at: usize) -> usize {
    let is_sign = |index: usize| matches!(characters[index], '-' | '+') && matches!(characters[index - 1], 'e' | 'E');
    let is_part = |index: usize| {
        characters[index].is_ascii_alphanumeric() || matches!(characters[index], '.' | '_') || is_sign(index)
    };
    (at + 1..characters.len()).find(|index| !is_part(*index)).unwrap_or(characters.len())
}

/// The words of a program. What is no Python has words, too.
pub(super) fn tokens(text: &str) -> Vec<Token> {
    let characters: Vec<char> = text.chars().collect();
    let (mut tokens, mut at, mut depth) = (Vec::new(), 0, 0_usize);
    while let Some(character) = characters.get(at).copied() {
        let next = characters.get(at + 1).copied().unwrap_or(' ');
        match character {
            '#' => at += line_end(&characters[at..]),
            '\\' if next == '\n' => at += 2,
            '\n' | ';' => {
                if depth == 0 && tokens.last().is_some_and(|last| *last != Token::End) {
                    tokens.push(Token::End);
                }
                at += 1;
            }
            _ if character.is_whitespace() => at += 1,
            '"' | '\'' => {
                let (text, length) = quoted(&characters[at..], false);
                tokens.push(Token::Text(text));
                at += length;
            }
            _ if character.is_ascii_digit() || character == '.' && next.is_ascii_digit() => {
                let end = number_end(&characters, at);
                tokens.push(Token::Number(characters[at..end].iter().collect()));
                at = end;
            }
            _ if character.is_alphabetic() || character == '_' => {
                let is_part = |character: &char| character.is_alphanumeric() || *character == '_';
                let length = characters[at..].iter().take_while(|character| is_part(character)).count();
                let word: String = characters[at..at + length].iter().collect();
                at += length;
                let is_prefix = length <= 2 && word.chars().all(|c| "rbfuRBFU".contains(c));
                if is_prefix && matches!(characters.get(at), Some('"' | '\'')) {
                    let (text, length) = quoted(&characters[at..], word.contains(['r', 'R']));
                    let is_format = word.contains(['f', 'F']) && text.contains('{');
                    tokens.push(if is_format { Token::Format(text) } else { Token::Text(text) });
                    at += length;
                } else {
                    tokens.push(Token::Name(word));
                }
            }
            '=' | '!' | '<' | '>' | '+' | '-' | '*' | '/' | '%' | '&' | '|' | '^' | ':' | '@' if next == '=' => {
                tokens.push(Token::Other);
                at += 2;
            }
            _ => {
                match character {
                    '(' | '[' | '{' => depth += 1,
                    ')' | ']' | '}' => depth = depth.saturating_sub(1),
                    _ => {}
                }
                tokens.push(Token::Sign(character));
                at += 1;
            }
        }
    }
    tokens.push(Token::End);
    tokens
}

/// Characters until a line ends.
fn line_end(characters: &[char]) -> usize {
    characters.iter().position(|character| *character == '\n').unwrap_or(characters.len())
}

/// The text that a quote opens, and the characters that it takes with its quotes. A text in one quote ends with its line.
fn quoted(characters: &[char], is_raw: bool) -> (String, usize) {
    let quote = characters[0];
    let is_long = characters.get(..3).is_some_and(|start| start.iter().all(|character| *character == quote));
    let width = if is_long { 3 } else { 1 };
    let (mut text, mut at) = (String::new(), width);
    while let Some(character) = characters.get(at).copied() {
        let closes = characters[at..].iter().take(width).filter(|character| **character == quote).count() == width;
        match character {
            _ if closes => return (text, at + width),
            '\n' if !is_long => return (text, at),
            '\\' if !is_raw => {
                match characters.get(at + 1) {
                    Some('n') => text.push('\n'),
                    Some('t') => text.push('\t'),
                    Some('\n') | None => {}
                    Some(other) => text.push(*other),
                }
                at += 2;
            }
            _ => {
                text.push(character);
                at += 1;
            }
        }
    }
    (text, at.min(characters.len()))
}
