//! Sizes that the headers of a Parquet file's pages name.
//!
//! The reader of Parquet files allocates what a page says that it has unpacked, up to 2 GiB, before it unpacks it. The
//! headers are structures of Thrift's compact protocol; of theirs, three numbers are read and the rest passed over. A
//! field whose type is not that of the format is refused: the reader goes by numbers of fields alone, and would read
//! something else than what is passed over here.

use std::fs::File;

use super::thrift::{Bytes, Kind};

/// The type of a page that holds a dictionary.
const DICTIONARY_PAGE: u64 = 2;

/// Types of the fields of a page's header, from number 1 on: type, sizes unpacked and packed, checksum, and a structure
/// for each type of page.
const PAGE_HEADER: [Field; 8] = [
    Field::Plain(Kind::Integer),
    Field::Plain(Kind::Integer),
    Field::Plain(Kind::Integer),
    Field::Plain(Kind::Integer),
    Field::Structure(&DATA_PAGE),
    Field::Structure(&[]),
    Field::Structure(&[Field::Plain(Kind::Integer), Field::Plain(Kind::Integer), Field::Plain(Kind::Truth)]),
    Field::Structure(&DATA_PAGE_V2),
];
/// Number of values, encodings of values and levels, statistics.
const DATA_PAGE: [Field; 5] = [
    Field::Plain(Kind::Integer),
    Field::Plain(Kind::Integer),
    Field::Plain(Kind::Integer),
    Field::Plain(Kind::Integer),
    Field::Structure(&STATISTICS),
];
/// Numbers of values, nulls and rows, encoding, bytes of levels, whether it is packed, statistics.
const DATA_PAGE_V2: [Field; 8] = [
    Field::Plain(Kind::Integer),
    Field::Plain(Kind::Integer),
    Field::Plain(Kind::Integer),
    Field::Plain(Kind::Integer),
    Field::Plain(Kind::Integer),
    Field::Plain(Kind::Integer),
    Field::Plain(Kind::Truth),
    Field::Structure(&STATISTICS),
];
/// Largest and smallest value as they were, numbers of nulls and of different values, both values as they are now, whether
/// these are exact.
const STATISTICS: [Field; 8] = [
    Field::Plain(Kind::Binary),
    Field::Plain(Kind::Binary),
    Field::Plain(Kind::Integer),
    Field::Plain(Kind::Integer),
    Field::Plain(Kind::Binary),
    Field::Plain(Kind::Binary),
    Field::Plain(Kind::Truth),
    Field::Plain(Kind::Truth),
];

/// What a field is.
#[derive(Clone, Copy, Debug)]
enum Field {
    Plain(Kind),
    Structure(&'static [Field]),
}

/// The largest sizes unpacked of one column's pages in a row group, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct PageSizes {
    /// Of its dictionary, 0 where there is none.
    pub(super) largest_dictionary: u64,
    /// Of its other pages.
    pub(super) largest_page: u64,
}

impl PageSizes {
    /// Of the pages from `start` on, `len` bytes; `None` where a header is not laid out as the format says: what the reader
    /// would make of it is not known. What is cut short by the end of the bytes is not looked at: nobody can read it.
    pub(super) fn of(file: &File, start: u64, len: u64) -> Option<Self> {
        let mut sizes = Self::default();
        let end = start.saturating_add(len);
        let mut bytes = Bytes::of(file, start, end);
        while let Some(header) = bytes.page_header() {
            let largest = match header.page_type {
                DICTIONARY_PAGE => &mut sizes.largest_dictionary,
                _ => &mut sizes.largest_page,
            };
            *largest = header.unpacked_bytes.max(*largest);
            if bytes.skip(header.packed_bytes).is_none() {
                break;
            }
        }
        (!bytes.is_odd).then_some(sizes)
    }
}

/// What is read of a header.
#[derive(Clone, Copy, Debug, Default)]
struct PageHeader {
    page_type: u64,
    unpacked_bytes: u64,
    packed_bytes: u64,
}

impl Bytes<'_> {
    fn page_header(&mut self) -> Option<PageHeader> {
        let mut header = PageHeader::default();
        let (mut id, mut kind) = self.field(0)?;
        while kind != Kind::Stop {
            match (id, kind) {
                (1, Kind::Integer) => header.page_type = self.size()?,
                (2, Kind::Integer) => header.unpacked_bytes = self.size()?,
                (3, Kind::Integer) => header.packed_bytes = self.size()?,
                _ => self.known_field(id, kind, &PAGE_HEADER)?,
            }
            (id, kind) = self.field(id)?;
        }
        Some(header)
    }

    /// Passes over field `id` of a structure with `fields`.
    fn known_field(&mut self, id: i64, kind: Kind, fields: &[Field]) -> Option<()> {
        let known = usize::try_from(id).ok().and_then(|id| fields.get(id.checked_sub(1)?));
        match known {
            Some(Field::Structure(fields)) if kind == Kind::Structure => {
                let (mut id, mut kind) = self.field(0)?;
                while kind != Kind::Stop {
                    self.known_field(id, kind, fields)?;
                    (id, kind) = self.field(id)?;
                }
                Some(())
            }
            Some(Field::Plain(expected)) if kind == *expected => self.pass_over(kind, 0),
            None => self.pass_over(kind, 0),
            Some(_) => self.odd(),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;
    use std::sync::Arc;

    use parquet::basic::{Compression, ZstdLevel};
    use parquet::column::page::Page;
    use parquet::data_type::{ByteArray, ByteArrayType};
    use parquet::file::properties::{WriterProperties, WriterVersion};
    use parquet::file::reader::{FileReader as _, SerializedFileReader};
    use parquet::file::writer::SerializedFileWriter;
    use parquet::schema::parser::parse_message_type;

    use super::*;

    /// One column of text, packed, in pages of some kilobytes with statistics, in two row groups.
    fn texts(version: WriterVersion, compression: Compression, with_dictionary: bool) -> File {
        let schema = Arc::new(parse_message_type("message rows { optional binary text (UTF8); }").unwrap());
        let properties = WriterProperties::builder()
            .set_writer_version(version)
            .set_compression(compression)
            .set_dictionary_enabled(with_dictionary)
            .set_data_page_size_limit(4096)
            .set_write_batch_size(10)
            .set_write_page_header_statistics(true);
        let file = tempfile::tempfile().unwrap();
        let mut writer =
            SerializedFileWriter::new(file.try_clone().unwrap(), schema, Arc::new(properties.build())).unwrap();
        for group in 0..2 {
            let texts: Vec<_> =
                (0..400).map(|i| ByteArray::from(format!("{group} a frog {} ", i % 50).repeat(9).as_str())).collect();
            let mut columns = writer.next_row_group().unwrap();
            let mut column = columns.next_column().unwrap().unwrap();
            column.typed::<ByteArrayType>().write_batch(&texts, Some(&[1; 400]), None).unwrap();
            column.close().unwrap();
            columns.close().unwrap();
        }
        writer.close().unwrap();
        file
    }

    #[test]
    fn sizes_are_those_that_the_pages_have_once_they_are_read() {
        let mut num_pages = 0;
        for version in [WriterVersion::PARQUET_1_0, WriterVersion::PARQUET_2_0] {
            for compression in [Compression::SNAPPY, Compression::ZSTD(ZstdLevel::default()), Compression::UNCOMPRESSED]
            {
                for with_dictionary in [false, true] {
                    let file = texts(version, compression, with_dictionary);
                    let reader = SerializedFileReader::new(file.try_clone().unwrap()).unwrap();
                    for group in 0..2 {
                        let mut expected = PageSizes::default();
                        let mut pages = reader.get_row_group(group).unwrap().get_column_page_reader(0).unwrap();
                        while let Some(page) = pages.get_next_page().unwrap() {
                            let is_dictionary = matches!(page, Page::DictionaryPage { .. });
                            let largest = if is_dictionary {
                                &mut expected.largest_dictionary
                            } else {
                                &mut expected.largest_page
                            };
                            *largest = (*largest).max(page.buffer().len() as u64);
                            num_pages += 1;
                        }
                        let (start, len) = reader.metadata().row_group(group).column(0).byte_range();
                        assert_eq!(PageSizes::of(&file, start, len), Some(expected), "{version:?} {compression:?}");
                        assert_eq!(expected.largest_dictionary > 0, with_dictionary);
                    }
                }
            }
        }
        assert!(num_pages > 100, "{num_pages}");
    }

    fn of_bytes(bytes: &[u8]) -> Option<PageSizes> {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(bytes).unwrap();
        PageSizes::of(&file, 0, bytes.len() as u64)
    }

    #[test]
    fn unknown_fields_are_passed_over_and_what_readers_may_take_otherwise_is_refused() {
        let size = |sizes: Option<PageSizes>| sizes.map(|sizes| sizes.largest_page);
        // Type 0, unpacked 1 GiB, packed 3.
        let head = [0x15, 0, 0x15, 0x80, 0x80, 0x80, 0x80, 8, 0x15, 6];
        let whole = |more: &[u8]| [&head[..], more, &[0, 1, 2, 3]].concat();
        assert_eq!(size(of_bytes(&whole(&[]))), Some(1 << 30));
        // Fields 13 and on: truth, byte, double, binary, list of structures, long list of bytes, map, empty map, structure.
        let unknown = [
            &[0xa1, 0x13, 7, 0x17][..],
            &[0; 8],
            &[0x18, 2, 9, 9, 0x19, 0x2c, 0x15, 2, 0, 0, 0x19, 0xf3, 3, 1, 2, 1],
            &[0x1b, 1, 0x58, 2, 1, 9, 0x1b, 0, 0x1c, 0x11, 0, 0x05, 0x80, 1, 4],
        ];
        let two_pages = [whole(&unknown.concat()), whole(&[])].concat();
        assert_eq!(size(of_bytes(&two_pages)), Some(1 << 30));
        // The second page alone has a size of note.
        let mut later = two_pages.clone();
        later[3..8].copy_from_slice(&[0x82, 0x80, 0x80, 0x80, 0]);
        assert_eq!(size(of_bytes(&later)), Some(1 << 30));
        // A structure ends with the type that says so, whatever its byte says else.
        let mut ended = whole(&[]);
        ended[head.len()] = 0x10;
        assert_eq!(size(of_bytes(&ended)), Some(1 << 30));
        for odd in [
            // Known fields of another type, at the top and within.
            &[0x18, 1, 9][..],
            &[0x25, 0],
            &[0x2c, 0x18, 1, 9, 0, 0],
            &[0x2c, 0x5c, 0x15, 0, 0, 0],
            // A list of truths, a type that is none, a field whose number has more than 16 bits.
            &[0xa9, 0x21, 1, 1],
            &[0xad],
            &[0x05, 0x84, 0x80, 8, 0],
            // A size of more than 32 bits, a negative one, a number of eleven bytes.
            &[0x05, 4, 0x80, 0x80, 0x80, 0x80, 0x40],
            &[0x05, 4, 1],
            &[0xa5, 0x81, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0],
            // Structures in structures in structures.
            &[0xac; 60],
        ] {
            assert_eq!(of_bytes(&whole(odd)), None, "{odd:?}");
        }
        // Lists and numbers that the end of the file cuts short cost nothing.
        for end in [[&[0xa9, 0xfc][..], &[0xff; 4], &[7]].concat(), vec![0xa5, 0xff, 0xff]] {
            assert_eq!(of_bytes(&[&head[..], &end].concat()), Some(PageSizes::default()), "{end:?}");
        }
    }
}
