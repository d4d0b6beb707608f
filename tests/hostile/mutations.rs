//! What happens to a file on a bad disk, in a careless editor, or in an attacker's hands.

use proptest::prelude::*;

/// One change to a file.
#[derive(Clone, Debug)]
pub(crate) enum Mutation {
    /// Flips a bit, at a position given as a share of the file.
    FlipBit(f64, u8),
    /// Cuts the file off here.
    Truncate(f64),
    /// Copies a piece over another one.
    Copy { from: f64, to: f64, len: usize },
    /// Repeats a piece.
    Repeat { at: f64, len: usize, times: usize },
    /// Removes a piece.
    Remove { at: f64, len: usize },
    /// Replaces the first digits after this place by another number.
    Number(f64, &'static str),
    /// Replaces eight bytes by another length.
    Length(f64, u64),
    /// Repeats the first bracket after this place many times.
    Nest(f64, usize),
    /// Inserts some text.
    Insert(f64, Vec<u8>),
}

const NUMBERS: [&str; 10] = [
    "0",
    "-1",
    "1e308",
    "1e999",
    "18446744073709551615",
    "18446744073709551616",
    "9223372036854775807",
    "4294967296",
    "0.5",
    "99999999999999999999999999999999999999999",
];

/// One change.
pub(crate) fn mutation() -> impl Strategy<Value = Mutation> {
    let place = || 0.0..1.0_f64;
    let lengths = prop_oneof![Just(u64::MAX), Just(u64::MAX / 2), Just(1 << 32), Just(1 << 40), 0..4096_u64];
    let texts = prop_oneof![
        Just(b"\"".to_vec()),
        Just(b"null".to_vec()),
        Just(b"{}".to_vec()),
        Just(b"../../../../x".to_vec()),
        Just(b"/x".to_vec()),
        Just(b"\xff\xfe".to_vec()),
        Just(b"\n".to_vec()),
        Just(b"<hostile>".to_vec()),
        Just(b"\0".to_vec()),
        Just(b"{{ 'a' * 100000000 }}".to_vec()),
        Just(b"{% for a in range(9999) %}".to_vec()),
        proptest::collection::vec(any::<u8>(), 1..16),
    ];
    prop_oneof![
        (place(), 0..8_u8).prop_map(|(at, bit)| Mutation::FlipBit(at, bit)),
        place().prop_map(Mutation::Truncate),
        (place(), place(), 1..64_usize).prop_map(|(from, to, len)| Mutation::Copy { from, to, len }),
        (place(), 1..64_usize, 2..40_usize).prop_map(|(at, len, times)| Mutation::Repeat { at, len, times }),
        (place(), 1..64_usize).prop_map(|(at, len)| Mutation::Remove { at, len }),
        (place(), proptest::sample::select(&NUMBERS[..])).prop_map(|(at, number)| Mutation::Number(at, number)),
        (prop_oneof![Just(0.0), place()], lengths).prop_map(|(at, length)| Mutation::Length(at, length)),
        (place(), 2..3000_usize).prop_map(|(at, depth)| Mutation::Nest(at, depth)),
        (place(), texts).prop_map(|(at, text)| Mutation::Insert(at, text)),
    ]
}

impl Mutation {
    pub(crate) fn apply(&self, bytes: &mut Vec<u8>) {
        let len = bytes.len();
        let place = |share: f64| ((share * len as f64) as usize).min(len.saturating_sub(1));
        let range = |share: f64, count: usize| place(share)..(place(share) + count).min(len);
        if len == 0 && !matches!(self, Self::Insert(..)) {
            return;
        }
        match self {
            Self::FlipBit(at, bit) => bytes[place(*at)] ^= 1 << bit,
            Self::Truncate(at) => bytes.truncate(place(*at)),
            Self::Copy { from, to, len } => {
                let piece = bytes[range(*from, *len)].to_vec();
                let to = range(*to, piece.len());
                let piece = &piece[..to.len()];
                bytes[to].copy_from_slice(piece);
            }
            Self::Repeat { at, len, times } => {
                let piece = bytes[range(*at, *len)].repeat(*times);
                let at = place(*at);
                bytes.splice(at..at, piece);
            }
            Self::Remove { at, len } => drop(bytes.drain(range(*at, *len))),
            Self::Number(at, number) => {
                let at = place(*at);
                let Some(start) = bytes[at..].iter().position(u8::is_ascii_digit).map(|found| at + found) else {
                    return;
                };
                let digits = bytes[start..].iter().take_while(|byte| byte.is_ascii_digit()).count();
                bytes.splice(start..start + digits, number.bytes());
            }
            Self::Length(at, length) => {
                let range = range(*at, 8);
                let length = length.to_le_bytes();
                bytes[range.clone()].copy_from_slice(&length[..range.len()]);
            }
            Self::Nest(at, depth) => {
                let at = place(*at);
                let bracket = bytes[at..].iter().position(|byte| matches!(byte, b'[' | b'{' | b'('));
                let Some(start) = bracket.map(|found| at + found) else { return };
                let brackets = vec![bytes[start]; *depth];
                bytes.splice(start..start, brackets);
            }
            Self::Insert(at, text) => {
                let at = place(*at);
                bytes.splice(at..at, text.iter().copied());
            }
        }
    }
}
