//! Starts that are a part of the base: training changes that part, and the rest stays as it is.

use rand::SeedableRng as _;
use rand_chacha::ChaCha8Rng;

use super::decomposition::Singular;
use super::rows::{StartRows, as_f32};
use crate::config::InitLoraWeights;
use crate::lora::AdapterSet;
use crate::ops::host;
use crate::spec::SiteId;

impl AdapterSet {
    /// Starts the adapters as a part of the weights `[out_features, in_features]` that `weight` reads. Returns what takes
    /// that part out of the base: the same with the opposite sign, so that the model's output stays. `on_part` is called with
    /// the number of adapters that have started.
    ///
    /// Source: `LoraLayer.pissa_init` and `olora_init` of PEFT 0.21.
    #[must_use]
    pub fn take_from_base(
        &mut self,
        init: InitLoraWeights,
        seed: u64,
        weight: impl Fn(usize, SiteId) -> Vec<f32>,
        mut on_part: impl FnMut(usize),
    ) -> Self {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let (mut negated, mut num_parts) = (self.clone(), 0);
        for (layer, (block, negated)) in self.blocks.iter_mut().zip(&mut negated.blocks).enumerate() {
            for ((&site, adapter), negated) in block.iter_mut().zip(negated.values_mut()) {
                let ([r, in_features], device) = (adapter.matrices.a.dims(), adapter.matrices.a.device());
                let w = StartRows { values: weight(layer, site), length: in_features };
                let (a, b) = part(&w, r, init, adapter.scale, &mut rng);
                adapter.matrices.a = host::tensor(a.values, [r, in_features], &device);
                adapter.matrices.b = host::tensor(b.transposed().values, [w.count(), r], &device);
                negated.matrices.a = adapter.matrices.a.clone();
                negated.matrices.b = -adapter.matrices.b.clone();
                num_parts += 1;
                on_part(num_parts);
            }
        }
        negated
    }
}

/// A, `[r, in_features]`, and the transpose of B, `[r, out_features]`.
fn part(w: &StartRows, r: usize, init: InitLoraWeights, scale: f64, rng: &mut ChaCha8Rng) -> (StartRows, StartRows) {
    let singular = match init {
        InitLoraWeights::Pissa => Singular::largest(w, r, rng),
        InitLoraWeights::PissaNiter(num_iterations) => {
            Singular::estimated(w, &StartRows::normal(r, w.length, rng), num_iterations)
        }
        _ => {
            // OLoRA: the first columns of Q and rows of R.
            let b = w.transposed().first(r).orthonormal();
            return (b.times(w), b);
        }
    };
    let roots: Vec<f32> = singular.values.iter().map(|value| as_f32((f64::from(*value) / scale).sqrt())).collect();
    (singular.right.scaled(&roots), singular.left.scaled(&roots))
}
