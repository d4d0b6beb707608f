//! Structures of Thrift's compact protocol in a file, passed over field by field.

use std::fs::File;
use std::io;

use super::read_exact_at;

/// Structures within each other that are passed over: those of Parquet files have seven.
const MAX_DEPTH: usize = 16;
/// Bytes that are read at a time.
const BLOCK_BYTES: u64 = 4096;

/// A part of a file, byte by byte. `None` where it ends, cannot be read, or is no structure.
pub(super) struct Bytes<'a> {
    file: &'a File,
    /// The bytes from `block_at` on.
    block: Vec<u8>,
    block_at: u64,
    at: u64,
    end: u64,
    /// Something is not laid out as the format says.
    pub(super) is_odd: bool,
}

impl<'a> Bytes<'a> {
    /// Those from `start` up to `end`.
    pub(super) fn of(file: &'a File, start: u64, end: u64) -> Self {
        Self { file, block: Vec::new(), block_at: start, at: start, end, is_odd: false }
    }
}

impl Bytes<'_> {
    /// The next field of a structure, `previous` being the one before.
    pub(super) fn field(&mut self, previous: i64) -> Option<(i64, Kind)> {
        let head = self.byte()?;
        // Readers stop at this type whatever else the byte says.
        if head.is_multiple_of(16) {
            return Some((previous, Kind::Stop));
        }
        let id = match head >> 4 {
            0 => self.integer()?,
            delta => previous + i64::from(delta),
        };
        // Readers may cut longer numbers.
        if i16::try_from(id).is_err() {
            return self.odd();
        }
        Some((id, self.known(Kind::of(head & 15))?))
    }

    /// Passes over a value.
    pub(super) fn pass_over(&mut self, kind: Kind, depth: usize) -> Option<()> {
        match kind {
            Kind::Stop | Kind::Truth => Some(()),
            Kind::Byte => self.skip(1),
            Kind::Integer => self.varint().map(drop),
            Kind::Double => self.skip(8),
            Kind::Binary => {
                let len = self.varint()?;
                self.skip(len)
            }
            _ if depth == MAX_DEPTH => self.odd(),
            Kind::List => {
                let (len, kind) = self.list()?;
                self.pass_over_elements(len, &[kind], depth)
            }
            Kind::Map => {
                let len = self.varint()?;
                if len == 0 {
                    return Some(());
                }
                let kinds = self.byte()?;
                let kinds = [self.known(Kind::of(kinds >> 4))?, self.known(Kind::of(kinds & 15))?];
                self.pass_over_elements(len, &kinds, depth)
            }
            Kind::Structure => {
                let (mut id, mut kind) = self.field(0)?;
                while kind != Kind::Stop {
                    self.pass_over(kind, depth + 1)?;
                    (id, kind) = self.field(id)?;
                }
                Some(())
            }
        }
    }

    /// The head of a list: how many values of which kind.
    pub(super) fn list(&mut self) -> Option<(u64, Kind)> {
        let head = self.byte()?;
        let len = if head >> 4 == 15 { self.varint()? } else { u64::from(head >> 4) };
        Some((len, self.known(Kind::of(head & 15))?))
    }

    /// `len` times one value of each of `kinds`. Each has a byte at least, so that the end of the bytes ends this too; truth
    /// values, which have one here, have none for some readers.
    fn pass_over_elements(&mut self, len: u64, kinds: &[Kind], depth: usize) -> Option<()> {
        if len > 0 && kinds.contains(&Kind::Truth) {
            return self.odd();
        }
        if len > self.end - self.at {
            return None;
        }
        for _ in 0..len {
            for kind in kinds {
                self.pass_over(*kind, depth + 1)?;
            }
        }
        Some(())
    }

    /// Notes that something is not laid out as the format says.
    pub(super) fn odd<T>(&mut self) -> Option<T> {
        self.is_odd = true;
        None
    }

    pub(super) fn known(&mut self, kind: Option<Kind>) -> Option<Kind> {
        kind.or_else(|| self.odd())
    }

    /// A number of 32 bits that is not negative: readers cut longer ones.
    pub(super) fn size(&mut self) -> Option<u64> {
        let number = self.integer()?;
        match i32::try_from(number).map(u64::try_from) {
            Ok(Ok(size)) => Some(size),
            _ => self.odd(),
        }
    }

    /// A number in zigzag order.
    pub(super) fn integer(&mut self) -> Option<i64> {
        let number = self.varint()?;
        Some((number >> 1).cast_signed() ^ -(number & 1).cast_signed())
    }

    /// Seven bits a byte, the lowest first.
    fn varint(&mut self) -> Option<u64> {
        let mut number = 0;
        for shift in (0..64).step_by(7) {
            let byte = self.byte()?;
            number |= u64::from(byte & 127) << shift;
            if byte < 128 {
                return Some(number);
            }
        }
        self.odd()
    }

    pub(super) fn skip(&mut self, len: u64) -> Option<()> {
        self.at = self.at.checked_add(len).filter(|at| *at <= self.end)?;
        Some(())
    }

    fn byte(&mut self) -> Option<u8> {
        if self.at >= self.end {
            return None;
        }
        let is_in_block = self.at >= self.block_at && self.at - self.block_at < self.block.len() as u64;
        if !is_in_block {
            self.block_at = self.at;
            self.block.resize(usize::try_from(BLOCK_BYTES.min(self.end - self.at)).ok()?, 0);
            let read: io::Result<()> = read_exact_at(self.file, &mut self.block, self.at);
            read.ok()?;
        }
        let index = usize::try_from(self.at - self.block_at).ok()?;
        self.at += 1;
        self.block.get(index).copied()
    }
}

/// How a value is laid out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// The end of a structure.
    Stop,
    /// In a structure, where its type says which.
    Truth,
    Byte,
    Integer,
    Double,
    Binary,
    List,
    Map,
    Structure,
}

impl Kind {
    /// That of a field with type `code`.
    fn of(code: u8) -> Option<Self> {
        match code {
            1 | 2 => Some(Self::Truth),
            3 => Some(Self::Byte),
            4..=6 => Some(Self::Integer),
            7 => Some(Self::Double),
            8 => Some(Self::Binary),
            9 | 10 => Some(Self::List),
            11 => Some(Self::Map),
            12 => Some(Self::Structure),
            _ => None,
        }
    }
}
