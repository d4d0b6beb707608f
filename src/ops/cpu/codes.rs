//! Frozen weights as codes: small integers that stand for numbers of a table, in blocks that share a scale.
//!
//! Nothing decodes a whole matrix. The products ask for the stretch that they pack next.

#[cfg(target_arch = "x86_64")]
mod x86;

/// A matrix of codes, row after row. A number is `(table[code] - zero of its block) * scale of its block`.
#[derive(Clone, Copy, Debug)]
pub struct Codes<'a> {
    /// The codes in the order of the matrix.
    pub packed: Packed<'a>,
    /// Numbers that share a scale.
    pub block_len: usize,
    /// The scale of every block; the last block may be shorter.
    pub scales: Scales<&'a [f32], &'a [u8]>,
    /// Numbers of the matrix.
    pub len: usize,
}

/// How codes lie in memory, and what they stand for.
#[derive(Clone, Copy, Debug)]
pub enum Packed<'a> {
    /// Two to a byte, the first in the upper half. Each is an index of the table.
    Four(&'a [u8], &'a [f32; 16]),
    /// One to a byte: an integer from -128 to 127 that stands for itself.
    Eight(&'a [i8]),
    /// One to a byte: an index of the table.
    Table(&'a [u8], &'a [f32; 256]),
}

/// The scales of the blocks, as floats `F` and bytes `B`.
#[derive(Clone, Copy, Debug)]
pub enum Scales<F, B> {
    /// One number for each block.
    Plain(F),
    /// Also a zero for each block, which is subtracted from the value of a code; elsewhere it is 0.
    Shifted {
        /// One for each block.
        scales: F,
        /// One for each block.
        zeros: F,
    },
    /// The scales are codes themselves: `table[code] * scale of 256 blocks + offset`.
    Nested {
        /// One for each block.
        codes: B,
        /// 256 numbers.
        table: F,
        /// One for every [`NESTED_LEN`] blocks, rounded up.
        scales: F,
        /// Added to every scale.
        offset: f32,
    },
}

/// Blocks whose nested scales share a scale.
pub const NESTED_LEN: usize = 256;

/// Turns the value of a code into a number.
#[derive(Clone, Copy)]
struct Scale {
    scale: f32,
    zero: f32,
}

impl Scale {
    #[inline(always)]
    fn of(self, x: f32) -> f32 {
        (x - self.zero) * self.scale
    }
}

impl Scales<(), ()> {
    /// Nested scales without numbers.
    pub const NESTED: Self = Self::Nested { codes: (), table: (), scales: (), offset: 0.0 };
}

impl<F, B> Scales<F, B> {
    /// These scales with each part replaced; floats come first.
    pub fn map<'a, G, C>(
        &'a self,
        mut floats: impl FnMut(&'a F) -> G,
        mut bytes: impl FnMut(&'a B) -> C,
    ) -> Scales<G, C> {
        match self {
            Self::Plain(scales) => Scales::Plain(floats(scales)),
            Self::Shifted { scales, zeros } => Scales::Shifted { scales: floats(scales), zeros: floats(zeros) },
            Self::Nested { codes, table, scales, offset } => {
                let (table, scales) = (floats(table), floats(scales));
                Scales::Nested { codes: bytes(codes), table, scales, offset: *offset }
            }
        }
    }
}

impl Scales<&[f32], &[u8]> {
    #[inline(always)]
    fn of(&self, block: usize) -> Scale {
        match *self {
            Self::Plain(scales) => Scale { scale: scales[block], zero: 0.0 },
            Self::Shifted { scales, zeros } => Scale { scale: scales[block], zero: zeros[block] },
            Self::Nested { codes, table, scales, offset } => {
                Scale { scale: table[usize::from(codes[block])] * scales[block / NESTED_LEN] + offset, zero: 0.0 }
            }
        }
    }
}

impl Codes<'_> {
    /// Decodes the numbers from `first` on.
    pub fn decode(&self, first: usize, to: &mut [f32]) {
        self.for_each_block(first, to.len(), |at, scale, range| match self.packed {
            Packed::Four(bytes, table) => decode_four(bytes, at, &table.map(|x| scale.of(x)), &mut to[range]),
            Packed::Eight(codes) => {
                for (to, code) in to[range.clone()].iter_mut().zip(&codes[at..]) {
                    *to = scale.of(f32::from(*code));
                }
            }
            Packed::Table(codes, table) => {
                for (to, code) in to[range.clone()].iter_mut().zip(&codes[at..]) {
                    *to = scale.of(table[usize::from(*code)]);
                }
            }
        });
    }

    /// Runs `work` for each piece of `first..first + len` that lies in one block, with the piece's first number, its scale,
    /// and its place in the stretch.
    #[inline(always)]
    fn for_each_block(&self, first: usize, len: usize, mut work: impl FnMut(usize, Scale, std::ops::Range<usize>)) {
        let mut done = 0;
        while done < len {
            let at = first + done;
            let block = at / self.block_len;
            let piece = (self.block_len - at % self.block_len).min(len - done);
            work(at, self.scales.of(block), done..done + piece);
            done += piece;
        }
    }

    /// Decodes to pairs of neighbours, rounded to bfloat16, the first in the low half; `false` where these codes have no
    /// short cut, and nothing was written. `len` is even.
    #[cfg(target_arch = "x86_64")]
    pub(super) fn decode_pairs(&self, first: usize, len: usize, words: &mut [u32]) -> bool {
        let Packed::Four(bytes, table) = self.packed else { return false };
        let is_whole = first.is_multiple_of(2) && len.is_multiple_of(2) && self.block_len.is_multiple_of(2);
        if !is_whole || !x86::has_words() {
            return false;
        }
        self.for_each_block(first, len, |at, scale, range| {
            let bytes = &bytes[at / 2..][..range.len() / 2];
            // SAFETY: the machine has AVX-512.
            unsafe { x86::pairs(bytes, table, scale, &mut words[range.start / 2..range.end / 2]) };
        });
        true
    }

    /// Words of the numbers from `low` on and, in the upper halves, those from `high` on, each rounded to bfloat16; `false`
    /// as above.
    #[cfg(target_arch = "x86_64")]
    pub(super) fn decode_rows(&self, low: usize, high: Option<usize>, words: &mut [u32]) -> bool {
        let Packed::Four(bytes, table) = self.packed else { return false };
        let starts = [Some(low), high];
        let is_whole = starts.iter().flatten().all(|first| first.is_multiple_of(2)) && self.block_len.is_multiple_of(2);
        if !is_whole || !x86::has_words() {
            return false;
        }
        for (half, first) in starts.into_iter().enumerate() {
            let Some(first) = first else { continue };
            self.for_each_block(first, words.len(), |at, scale, range| {
                let bytes = &bytes[at / 2..][..range.len().div_ceil(2)];
                // SAFETY: the machine has AVX-512.
                unsafe { x86::halves(bytes, table, scale, half == 1, &mut words[range]) };
            });
        }
        true
    }
}

/// Numbers of `table` for codes two to a byte, from number `at` on.
fn decode_four(bytes: &[u8], at: usize, table: &[f32; 16], to: &mut [f32]) {
    let (mut to, mut at) = (to, at);
    if !at.is_multiple_of(2) && !to.is_empty() {
        to[0] = table[usize::from(bytes[at / 2] & 15)];
        (to, at) = (&mut to[1..], at + 1);
    }
    let bytes = &bytes[at / 2..(at + to.len()).div_ceil(2)];
    #[cfg(target_arch = "x86_64")]
    if x86::has_words() {
        // SAFETY: the machine has AVX-512.
        return unsafe { x86::numbers(bytes, table, to) };
    }
    numbers(bytes, table, to);
}

/// Numbers of `table` for the codes in `bytes`.
fn numbers<T: Copy>(bytes: &[u8], table: &[T; 16], to: &mut [T]) {
    for (to, byte) in to.chunks_mut(2).zip(bytes) {
        to[0] = table[usize::from(byte >> 4)];
        if let Some(to) = to.get_mut(1) {
            *to = table[usize::from(byte & 15)];
        }
    }
}

#[cfg(test)]
mod tests;
