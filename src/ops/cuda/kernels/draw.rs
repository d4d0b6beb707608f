//! Draws of tokens by the kernel of `draw.cu`, so that no logits are read.

use burn::tensor::{DType, Int, Tensor};

use super::matrix::{dims, stride};
use super::stream::{Launch, Operand};
use crate::ops::cpu::{Draw, Drawn};
use crate::ops::custom::{Output, launch, spec};
use crate::util::faults;

const MODULE: &str = "draw";

const THREADS: usize = 1024;
/// Rows of a launch, as their table was compiled.
const TEXTS: usize = 64;
/// What stands for no token, of which vocabularies have fewer.
const NONE: u32 = u32::MAX;

/// A token for each row of `logits`, `[rows, vocab_size]` in `f32`.
pub(super) fn draw(logits: &Tensor<2>, draws: &[Draw]) -> Vec<Option<Drawn>> {
    let ([rows, vocab_size], of) = (logits.dims(), draws.to_vec());
    let output = Output::New(spec(DType::I32, [rows, 2]));
    let [drawn] = launch("draw", [logits.clone().into_dispatch()], [output], move |[x], _, [drawn]| {
        for (index, draws) in of.chunks(TEXTS).enumerate() {
            let table = draws.iter().flat_map(|draw| entries(draw, vocab_size)).map(Operand::Word);
            let launch = Launch::new(MODULE, "draw", [draws.len(), 1, 1], THREADS).read(&x).write(drawn);
            let launch = launch.table(table, 4 * TEXTS).long(stride(&x) as u64);
            launch.ints([index * TEXTS, dims(&x)[1]]).launch();
        }
    });
    let drawn = faults::read_ints(Tensor::<2, Int>::from_dispatch(drawn), "a drawn token");
    let of_row = |(drawn, draw): (&[i32], &Draw)| {
        let [id, entropy] = [drawn[0], drawn[1]].map(i32::cast_unsigned);
        let entropy = (draw.temperature > 0.0).then(|| f64::from(f32::from_bits(entropy)));
        (id != NONE).then_some(Drawn { id, entropy })
    };
    drawn.chunks(2).zip(draws).map(of_row).collect()
}

/// The words of a row of the table.
fn entries(draw: &Draw, vocab_size: usize) -> [u64; 4] {
    let [low, high] = draw.keys().map(u64::from);
    let factor = if draw.temperature > 0.0 { draw.factor() } else { 0.0 };
    let top_k = draw.top_k.map_or(0, |k| if k < vocab_size { k.max(1) } else { 0 }) as u64;
    let words = [factor, draw.least_weight()].map(|word| u64::from(word.to_bits()));
    [low | high << 32, words[0] | top_k << 32, draw.top_p.to_bits(), words[1]]
}
