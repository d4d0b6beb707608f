//! Rows of CSV and TSV files (RFC 4180): cells are text, the first row names them.

use std::collections::HashSet;
use std::io::Read as _;

use csv::{ErrorKind, ReaderBuilder, StringRecord};
use serde_json::Value;

const OPEN_QUOTE: &str = "opens a quote that nothing closes";

/// Follows the quotes of a file, byte by byte: only they tell a line end inside a cell from the end of a row.
#[derive(Clone, Copy, Debug)]
pub(super) struct Quotes {
    delimiter: u8,
    at: At,
}

/// What the last byte was.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum At {
    /// The end of a cell.
    Start,
    Plain,
    Quoted,
    /// A quote in a quoted cell: it closes the cell, or is the first of a doubled one.
    Closed,
}

impl Quotes {
    pub(super) fn new(delimiter: u8) -> Self {
        Self { delimiter, at: At::Start }
    }

    /// Takes the next byte. Returns whether it ends the row.
    pub(super) fn take(&mut self, byte: u8) -> bool {
        let is_line_end = matches!(byte, b'\n' | b'\r');
        let before = self.at;
        self.at = match (before, byte) {
            (At::Quoted, b'"') => At::Closed,
            (At::Start | At::Closed, b'"') | (At::Quoted, _) => At::Quoted,
            _ if is_line_end || byte == self.delimiter => At::Start,
            _ => At::Plain,
        };
        is_line_end && before != At::Quoted
    }
}

/// How the rows of a file are divided.
#[derive(Debug)]
pub(super) struct Cells {
    delimiter: u8,
    columns: Vec<String>,
}

impl Cells {
    /// Reads the first row of a file, which names the columns; one without a name gets its number.
    pub(super) fn of_header(header: &[u8], delimiter: u8) -> Result<Self, String> {
        let mut cells = Self { delimiter, columns: Vec::new() };
        cells.check_quotes(header)?;
        let names = cells.split(header)?;
        let name = |(index, name): (usize, &str)| match name.trim() {
            "" => format!("column {}", index + 1),
            name => name.to_owned(),
        };
        cells.columns = names.iter().enumerate().map(name).collect();
        let mut seen = HashSet::new();
        match cells.columns.iter().find(|name| !seen.insert(name.as_str())) {
            Some(name) => Err(format!(
                "its first line names `{name}` twice\n  hint: if that line is a row, write a line of names above it, such as \
                 `prompt,completion`"
            )),
            None => Ok(cells),
        }
    }

    /// The row that `bytes` are, as an object of texts.
    pub(super) fn row(&self, bytes: &[u8]) -> Result<Value, String> {
        self.check_quotes(bytes)?;
        let cells = self.split(bytes)?;
        let (found, expected) = (cells.len(), self.columns.len());
        if found != expected {
            return Err(format!(
                "has {found} cells, and the first line names {expected} columns\n  hint: a cell with a {} or a line end in it \
                 stands in quotes, a quote in it is doubled",
                name_of(self.delimiter)
            ));
        }
        Ok(self.columns.iter().cloned().zip(cells.iter().map(Value::from)).collect())
    }

    /// The cells of one row.
    fn split(&self, bytes: &[u8]) -> Result<StringRecord, String> {
        let mut builder = ReaderBuilder::new();
        builder.has_headers(false).flexible(true).delimiter(self.delimiter).buffer_capacity(bytes.len() + 1);
        let mut cells = StringRecord::new();
        // Behind an empty line, a byte order mark is text: the reader takes one at its start away.
        match builder.from_reader(b"\n".chain(bytes)).read_record(&mut cells) {
            Ok(_) => Ok(cells),
            Err(error) if matches!(error.kind(), ErrorKind::Utf8 { .. }) => {
                Err("not UTF-8\n  hint: `iconv` converts other encodings".to_owned())
            }
            Err(error) => Err(error.to_string()),
        }
    }

    /// Refuses what readers of CSV differ in: text after a closing quote, a quote that nothing closes.
    fn check_quotes(&self, bytes: &[u8]) -> Result<(), String> {
        let mut quotes = Quotes::new(self.delimiter);
        for byte in bytes {
            let was_closed = quotes.at == At::Closed;
            quotes.take(*byte);
            if was_closed && quotes.at == At::Plain {
                return Err("has text after a closing quote\n  hint: a quote in a quoted cell is doubled".to_owned());
            }
        }
        if quotes.at == At::Quoted { Err(OPEN_QUOTE.to_owned()) } else { Ok(()) }
    }

    /// Refuses a last row whose quote has swallowed all that follows it.
    pub(super) fn refuse_open_quote(&self, last: &[u8]) -> Result<(), String> {
        self.check_quotes(last).or_else(|reason| if reason == OPEN_QUOTE { Err(reason) } else { Ok(()) })
    }
}

/// What separates cells; a first line of `sep=;` is Excel's, and says it.
const DELIMITERS: &[u8] = b",;\t|";

/// Where the rows begin in a file that starts with these bytes, and what separates their cells: what divides the most of
/// the first rows into as many cells as the first line has, the `usual` one where several do.
pub(super) fn separators(start: &[u8], usual: u8) -> (u64, u8) {
    let marked = start.strip_prefix(b"\xef\xbb\xbf").unwrap_or(start);
    if let Some([delimiter, b'\r' | b'\n', ..]) = marked.strip_prefix(b"sep=") {
        return ((start.len() - marked.len() + b"sep=;".len()) as u64, *delimiter);
    }
    let num_alike = |delimiter: u8| {
        let mut builder = ReaderBuilder::new();
        let reader = builder.has_headers(false).flexible(true).delimiter(delimiter).from_reader(marked);
        let mut lengths = reader.into_byte_records().map_while(Result::ok).map(|cells| cells.len());
        let columns = lengths.next().filter(|columns| *columns > 1)?;
        Some((lengths.filter(|length| *length == columns).count(), delimiter == usual))
    };
    let best = DELIMITERS.iter().copied().filter_map(|delimiter| Some((num_alike(delimiter)?, delimiter))).max();
    (0, best.map_or(usual, |(_, delimiter)| delimiter))
}

fn name_of(delimiter: u8) -> &'static str {
    match delimiter {
        b',' => "comma",
        b'\t' => "tab",
        b';' => "semicolon",
        _ => "bar",
    }
}
