//! The schema that the footer of a Parquet file describes, before it is believed.
//!
//! The reader makes room for as many columns in a group as the group names, and reads groups within groups by calling
//! itself: a footer of some bytes could fill the memory, one of some hundred kilobytes the stack.

use std::fs::File;

use super::read_exact_at;
use super::thrift::{Bytes, Kind};

/// Groups within each other.
const MAX_DEPTH: usize = 64;

/// Holds that the groups of a schema have the columns that follow them, and lie in each other not too deep. What is cut
/// short is left to the reader, which tells it better.
///
/// # Errors
///
/// A schema that cannot be a tree, one that is too deep, or a footer that is not laid out as the format says.
pub(super) fn check_schema(file: &File) -> Result<(), String> {
    let Some((start, end)) = footer(file) else { return Ok(()) };
    let mut bytes = Bytes::of(file, start, end);
    match bytes.schema_is_sound() {
        Some(false) => Err("damaged, or made to fill memory: its schema names columns that are not there".into()),
        _ if bytes.is_odd => Err("damaged: its footer is not laid out as the format says".into()),
        _ => Ok(()),
    }
}

/// Where the footer begins and ends.
fn footer(file: &File) -> Option<(u64, u64)> {
    // Behind it are its length and the format's name, of four bytes each.
    let end = file.metadata().ok()?.len().checked_sub(8)?;
    let mut len = [0; 4];
    read_exact_at(file, &mut len, end).ok()?;
    Some((end.checked_sub(u64::from(u32::from_le_bytes(len)))?, end))
}

impl Bytes<'_> {
    /// Passes over a file's metadata; whether its schema is a tree.
    fn schema_is_sound(&mut self) -> Option<bool> {
        let (mut id, mut kind) = self.field(0)?;
        while kind != Kind::Stop {
            match (id, kind) {
                (2, Kind::List) => {
                    if !self.elements_are_a_tree()? {
                        return Some(false);
                    }
                }
                (2, _) => return self.odd(),
                _ => self.pass_over(kind, 0)?,
            }
            (id, kind) = self.field(id)?;
        }
        Some(true)
    }

    /// Passes over the elements of a schema, each group before its columns.
    fn elements_are_a_tree(&mut self) -> Option<bool> {
        let (num_elements, kind) = self.list()?;
        if kind != Kind::Structure {
            return self.odd();
        }
        // Columns that are still to come, of each group that is not complete.
        let mut open: Vec<u64> = Vec::new();
        let mut num_columns: u64 = 0;
        for _ in 0..num_elements {
            let columns = self.columns_of_element()?;
            num_columns = num_columns.saturating_add(columns);
            if let Some(left) = open.last_mut() {
                *left -= 1;
            }
            if columns > 0 {
                open.push(columns);
            }
            // With its last column a group is complete, and so may be the one that it lies in.
            while columns == 0 && open.last() == Some(&0) {
                open.pop();
            }
            if num_columns >= num_elements || open.len() > MAX_DEPTH {
                return Some(false);
            }
        }
        Some(true)
    }

    /// Passes over an element; how many columns it names as its own.
    fn columns_of_element(&mut self) -> Option<u64> {
        let mut columns = 0;
        let (mut id, mut kind) = self.field(0)?;
        while kind != Kind::Stop {
            match (id, kind) {
                (5, Kind::Integer) => columns = self.size()?,
                (5, _) => return self.odd(),
                _ => self.pass_over(kind, 0)?,
            }
            (id, kind) = self.field(id)?;
        }
        Some(columns)
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;
    use std::sync::Arc;

    use parquet::file::properties::WriterProperties;
    use parquet::file::writer::SerializedFileWriter;
    use parquet::schema::parser::parse_message_type;

    use super::*;

    /// A file that is nothing but a footer, with a schema of groups that name so many columns.
    fn footer_of(groups: &[u8]) -> File {
        // Version, then a list of structures; each has a name, and its number of columns as a number in zigzag order.
        let mut footer = vec![0x15, 2, 0x19, 0xfc];
        let len = u16::try_from(groups.len()).unwrap();
        footer.extend([(len & 127) as u8 | 128, (len >> 7) as u8]);
        for columns in groups {
            footer.extend([0x48, 1, b'g', 0x15]);
            let zigzag = 2 * u16::from(*columns);
            footer.extend([(zigzag & 127) as u8 | 128, (zigzag >> 7) as u8, 0]);
        }
        footer.push(0);
        let mut file = tempfile::tempfile().unwrap();
        let len = u32::try_from(footer.len()).unwrap();
        file.write_all(&[&b"PAR1"[..], &footer, &len.to_le_bytes(), b"PAR1"].concat()).unwrap();
        file
    }

    #[test]
    fn groups_have_the_columns_that_follow_them_and_are_not_too_deep() {
        let is_sound = |groups: &[u8]| check_schema(&footer_of(groups)).is_ok();
        assert!(is_sound(&[2, 0, 0]) && is_sound(&[2, 1, 0, 0]) && is_sound(&[1, 1, 1, 0]));
        for odd in [&[2, 0][..], &[255, 0, 0], &[1, 1, 1], &[1, 255, 0]] {
            assert!(!is_sound(odd), "{odd:?}");
        }
        let chain = |depth: usize| [vec![1; depth], vec![0]].concat();
        assert!(is_sound(&chain(MAX_DEPTH)) && !is_sound(&chain(MAX_DEPTH + 1)) && !is_sound(&chain(16_000)));
        let error = check_schema(&footer_of(&[255, 0, 0])).unwrap_err();
        assert!(error.contains("its schema names columns that are not there"), "{error}");
    }

    #[test]
    fn a_schema_of_lists_maps_and_groups_is_sound_and_what_is_cut_short_is_not_judged() {
        let schema = "message rows { required binary id (UTF8); optional group messages (LIST) { repeated group list { \
                      optional group element { optional binary role (UTF8); optional binary content (UTF8); } } } \
                      optional group tags (MAP) { repeated group key_value { required binary key (UTF8); optional int32 \
                      value; } } }";
        let schema = Arc::new(parse_message_type(schema).unwrap());
        let mut file = tempfile::tempfile().unwrap();
        let properties = Arc::new(WriterProperties::builder().build());
        SerializedFileWriter::new(file.try_clone().unwrap(), schema, properties).unwrap().close().unwrap();
        assert_eq!(check_schema(&file), Ok(()));
        let whole = file.metadata().unwrap().len();
        for len in [0, 3, 8, 20, whole - 9] {
            file.set_len(len).unwrap();
            assert_eq!(check_schema(&file), Ok(()), "{len}");
        }
        // A schema that is no list.
        file = tempfile::tempfile().unwrap();
        file.write_all(&[&[0x25, 2, 0][..], &3_u32.to_le_bytes(), b"PAR1"].concat()).unwrap();
        assert!(check_schema(&file).unwrap_err().contains("not laid out as the format says"));
    }
}
