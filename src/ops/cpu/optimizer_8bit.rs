//! The AdamW update whose moments are codes of eight bits, block by block.

use std::sync::LazyLock;

use rayon::prelude::*;

use super::dynamic::{Nearest, dynamic_table};
use super::optimizer::{AdamW, Constants, adamw_chunk};

/// Numbers that share a scale.
pub const BLOCK_LEN: usize = 256;

/// Numbers by code of the first moment and of the second, which has no sign, and their middles.
static TABLES: LazyLock<[([f32; 256], Nearest<256>); 2]> = LazyLock::new(|| {
    [true, false].map(|is_signed| {
        let table = dynamic_table(is_signed);
        (table, Nearest::new(&table))
    })
});

/// A moment: a code for each number, and the largest absolute number of each block.
#[derive(Debug)]
pub struct Coded<'a> {
    /// The codes.
    pub codes: &'a mut [u8],
    /// The scales.
    pub scales: &'a mut [f32],
}

impl<'a> Coded<'a> {
    fn blocks(self) -> impl IndexedParallelIterator<Item = (&'a mut [u8], &'a mut f32)> {
        self.codes.par_chunks_mut(BLOCK_LEN).zip(self.scales)
    }
}

/// One step of [`adamw`](super::adamw) on `param`, whose moments are decoded and coded again.
pub fn adamw_8bit(param: &mut [f32], grad: &[f32], [m, v]: [Coded<'_>; 2], settings: &AdamW) {
    let len = param.len();
    assert!([grad.len(), m.codes.len(), v.codes.len()] == [len; 3], "adamw_8bit: lengths");
    assert!([m.scales.len(), v.scales.len()] == [len.div_ceil(BLOCK_LEN); 2], "adamw_8bit: scales");
    let constants = Constants::new(settings);
    let blocks = param.par_chunks_mut(BLOCK_LEN).zip(grad.par_chunks(BLOCK_LEN)).zip(m.blocks()).zip(v.blocks());
    blocks.with_min_len(64).for_each(|(((param, grad), m), v)| {
        let mut wide = [[0f32; BLOCK_LEN]; 2];
        let mut moments = [m, v];
        for ((wide, (codes, scale)), (table, _)) in wide.iter_mut().zip(&moments).zip(&*TABLES) {
            wide.iter_mut().zip(&**codes).for_each(|(wide, code)| *wide = table[usize::from(*code)] * **scale);
        }
        let [m, v] = &mut wide;
        adamw_chunk(param, grad, &mut m[..grad.len()], &mut v[..grad.len()], constants);
        for ((wide, (codes, scale)), (_, nearest)) in wide.iter().zip(&mut moments).zip(&*TABLES) {
            let most = wide[..grad.len()].iter().fold(0f32, |most, x| x.abs().max(most));
            **scale = if most > 0.0 { most } else { 1.0 };
            codes.iter_mut().zip(wide).for_each(|(code, x)| *code = nearest.code(x / **scale));
        }
    });
}
