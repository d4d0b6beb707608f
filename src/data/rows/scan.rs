//! Finds where the rows of a JSON, CSV or TSV file start, while reading the file in blocks.

use std::io;

use super::cells::Quotes;

/// Searches blocks of bytes for rows. In JSON, the first non-blank byte decides whether the file is an array or has one
/// object a line.
#[derive(Debug, Default)]
pub(super) struct Scan {
    /// Offset in the file.
    at: u64,
    starts: Vec<u64>,
    layout: Layout,
}

#[derive(Debug, Default)]
enum Layout {
    /// Only blanks so far.
    #[default]
    Unknown,
    Lines {
        /// Where the current line starts.
        line: u64,
        is_blank: bool,
    },
    /// Only brackets and strings are tracked: whether an element is valid shows when it is read.
    Array(Nesting),
    /// Rows of cells; lines without a character are no rows.
    Cells { quotes: Quotes, in_row: bool },
}

#[derive(Clone, Copy, Debug, Default)]
struct Nesting {
    depth: u32,
    in_string: bool,
    escaped: bool,
    /// Whether the next non-blank byte at the array's own level starts an element.
    expects_element: bool,
    end: Option<u64>,
}

const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";
/// Bytes at the start of a file that show whether it is text.
pub(in crate::data) const STARTING_BYTES: usize = 512;
/// Most bytes of a row: reading one takes several times its memory.
const MAX_ROW_BYTES: u64 = 64 << 20;

impl Scan {
    /// Searches for rows of cells, which this byte separates, from the offset `at`.
    pub(super) fn of_cells(at: u64, delimiter: u8) -> Self {
        Self { at, layout: Layout::Cells { quotes: Quotes::new(delimiter), in_row: false }, ..Self::default() }
    }

    /// Scans the next bytes of the file.
    pub(super) fn feed(&mut self, block: &[u8]) -> io::Result<()> {
        self.take(block)?;
        let (is_open, hint) = match &self.layout {
            Layout::Unknown => (false, ""),
            Layout::Lines { is_blank, .. } => {
                (!is_blank, "a row is an object on a line of its own, or one of an array")
            }
            Layout::Array(nesting) => (nesting.end.is_none(), "a row is an object of the array"),
            Layout::Cells { in_row, .. } => (*in_row, "a quote that nothing closes takes in all that follows it"),
        };
        match self.starts.last().filter(|start| is_open && self.at - **start > MAX_ROW_BYTES) {
            Some(start) => {
                let limit = MAX_ROW_BYTES >> 20;
                Err(io::Error::other(format!(
                    "the row that begins at byte {start} has more than {limit} MiB\n  hint: {hint}"
                )))
            }
            None => Ok(()),
        }
    }

    /// Finds out what the file is; returns what of its next bytes is not before the first row.
    fn begin<'a>(&mut self, mut block: &'a [u8]) -> io::Result<&'a [u8]> {
        if let Some(at) = block.iter().take(STARTING_BYTES).position(|byte| *byte == 0).filter(|_| self.at == 0) {
            let is_archive = block.starts_with(b"PK\x03\x04");
            let hint = if is_archive { " but an archive, such as .xlsx\n  hint: save the sheet as CSV" } else { "" };
            return Err(io::Error::other(format!("byte {at} is NUL: this is no text{hint}")));
        }
        if self.at == 0 && block.starts_with(BYTE_ORDER_MARK) {
            self.at = BYTE_ORDER_MARK.len() as u64;
            block = &block[BYTE_ORDER_MARK.len()..];
        }
        if matches!(self.layout, Layout::Unknown) {
            let Some(blanks) = block.iter().position(|byte| !byte.is_ascii_whitespace()) else {
                self.at += block.len() as u64;
                return Ok(&[]);
            };
            self.at += blanks as u64;
            block = &block[blanks..];
            self.layout = match block[0] {
                b'[' => Layout::Array(Nesting::default()),
                b'{' => Layout::Lines { line: self.at, is_blank: true },
                _ => {
                    return Err(io::Error::other(
                        "starts neither with `[` nor with `{`\n  hint: a .json file holds an array of objects, a .jsonl \
                         file one object a line",
                    ));
                }
            };
        }
        Ok(block)
    }

    fn take(&mut self, block: &[u8]) -> io::Result<()> {
        let block = self.begin(block)?;
        match &mut self.layout {
            Layout::Lines { line, is_blank } => {
                for part in block.split_inclusive(|byte| *byte == b'\n') {
                    if *is_blank && !part.trim_ascii().is_empty() {
                        self.starts.push(*line);
                        *is_blank = false;
                    }
                    self.at += part.len() as u64;
                    if part.ends_with(b"\n") {
                        (*line, *is_blank) = (self.at, true);
                    }
                }
            }
            Layout::Array(nesting) => {
                for byte in block {
                    if nesting.takes(*byte, self.at) {
                        self.starts.push(self.at);
                    }
                    if nesting.end.is_some_and(|end| end < self.at) && !byte.is_ascii_whitespace() {
                        let message = format!("text follows the end of the array, at byte {}", self.at);
                        return Err(io::Error::other(message));
                    }
                    self.at += 1;
                }
            }
            Layout::Cells { quotes, in_row } => {
                for byte in block {
                    let ends = quotes.take(*byte);
                    if !ends && !*in_row {
                        self.starts.push(self.at);
                    }
                    *in_row = !ends;
                    self.at += 1;
                }
            }
            Layout::Unknown => {}
        }
        Ok(())
    }

    /// Whether the file is an array, and the offsets where its rows start, followed by the offset where the last row
    /// ends.
    pub(super) fn finish(mut self) -> Result<(bool, Vec<u64>), String> {
        let (is_array, end) = match self.layout {
            Layout::Unknown | Layout::Lines { .. } | Layout::Cells { .. } => (false, self.at),
            Layout::Array(Nesting { end: Some(end), .. }) => (true, end),
            Layout::Array(Nesting { end: None, .. }) => {
                return Err(format!(
                    "the array does not end: it has {} elements and then the file stops",
                    self.starts.len()
                ));
            }
        };
        self.starts.push(end);
        Ok((is_array, self.starts))
    }
}

impl Nesting {
    /// Processes the byte at `at`. Returns whether an element of the array starts there.
    fn takes(&mut self, byte: u8, at: u64) -> bool {
        if self.in_string {
            match byte {
                _ if self.escaped => self.escaped = false,
                b'\\' => self.escaped = true,
                b'"' => self.in_string = false,
                _ => {}
            }
            return false;
        }
        if self.end.is_some() {
            return false;
        }
        let is_blank = byte.is_ascii_whitespace() || matches!(byte, b']' | b',');
        let starts = self.expects_element && self.depth == 1 && !is_blank;
        self.expects_element &= !starts;
        match byte {
            b'"' => self.in_string = true,
            b'[' | b'{' => {
                // Saturates only at a depth that no readable row reaches.
                self.depth = self.depth.saturating_add(1);
                self.expects_element |= self.depth == 1;
            }
            b']' | b'}' => {
                self.depth = self.depth.saturating_sub(1);
                if self.depth == 0 {
                    self.end = Some(at);
                }
            }
            b',' => self.expects_element |= self.depth == 1,
            _ => {}
        }
        starts
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scanned(text: &str, block: usize) -> Result<(bool, Vec<u64>), String> {
        let mut scan = Scan::default();
        // A real file has its byte order mark in the first block.
        let first = block.max(3).min(text.len());
        let mut blocks = std::iter::once(&text.as_bytes()[..first]).chain(text.as_bytes()[first..].chunks(block));
        blocks.try_for_each(|block| scan.feed(block)).map_err(|error| error.to_string())?;
        scan.finish()
    }

    #[test]
    fn a_row_that_no_text_has_and_bytes_that_are_no_text_are_refused_early() {
        let block = vec![b'a'; 1 << 20];
        for (start, mut scan) in
            [("[{}, {\"", Scan::default()), ("{\"", Scan::default()), ("a,b\n\"", Scan::of_cells(0, b','))]
        {
            scan.feed(start.as_bytes()).unwrap();
            let refused = (0..100).find_map(|_| scan.feed(&block).err()).unwrap().to_string();
            assert!(scan.at < 66 << 20 && refused.contains("has more than 64 MiB\n  hint: "), "{refused}");
            let lines = "a\n".repeat(1 << 19);
            let mut scan = Scan::of_cells(0, b',');
            assert!((0..70).all(|_| scan.feed(lines.as_bytes()).is_ok()), "short rows");
        }
        assert_eq!(scanned("{\"a\0\": 1}", 99).unwrap_err(), "byte 3 is NUL: this is no text");
        let error = scanned("PK\u{3}\u{4}\u{14}\0", 99).unwrap_err();
        assert!(error.starts_with("byte 5 is NUL: this is no text but an archive, such as .xlsx\n  hint:"), "{error}");
    }

    #[test]
    fn blocks_may_end_anywhere() {
        let lines = "\u{feff}  \n{\"a\": 1}\n\n \r\n{}\n";
        let array = " [{\"a\": \"\\\"]\"} ,[], 3,{}\n] ";
        for block in [1, 2, 3, 5, 1000] {
            assert_eq!(scanned(lines, block).unwrap(), (false, vec![6, 19, 22]), "{block}");
            assert_eq!(scanned(array, block).unwrap(), (true, vec![2, 16, 20, 22, 25]), "{block}");
            assert_eq!(scanned("[] ]", block).unwrap_err(), "text follows the end of the array, at byte 3");
            assert_eq!(scanned(" \n ", block).unwrap(), (false, vec![3]));
            let mut cells = Scan::of_cells(0, b',');
            let text = b"\r\na,b\n\n\"x\n\"\"\n\",5\" y\r\n ,\n";
            text.chunks(block).try_for_each(|block| cells.feed(block)).unwrap();
            assert_eq!(cells.finish().unwrap().1, [2, 7, 21, 24], "{block}");
        }
    }
}
