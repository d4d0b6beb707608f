//! How long a step takes on a GPU: its products at the rate at which the card makes them, attention at shares of that rate, and what
//! is beside them as bytes over the bandwidth of its memory; or as long as the host takes to launch all that.
//!
//! What is counted follows from the kernels (`ops/cuda/kernels`); the shares and numbers of passes that do not are fitted to the
//! records of an H200 in `benches/results`, which a test holds against this, and for other cards assumed.

use super::workload::Workload;
use crate::ops::quantised::Coding;
use crate::spec::{Role, Site};
use crate::util::stats::as_f64;

/// What a GPU does in a second, and with which kernels.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GpuRates {
    /// Floating-point operations of the products of a step, in its precision.
    pub product_flops: f64,
    /// Bytes read and written by kernels that do little else.
    pub memory_bytes: f64,
    /// Whether attention has kernels for these tensor cores: those of Hopper.
    pub is_hopper: bool,
    /// Whether it takes the kernels of this program, which compute in `bf16` and `f16`.
    pub has_kernels: bool,
}

/// Numbers that are read and written beside products for each output of a block's linear layers: adapters, activation, rotary
/// embedding; in the forward and in the backward.
const PASSES: [f64; 2] = [3.8, 6.5];
/// Likewise for each number of a norm's input.
const PASSES_OF_NORM: [f64; 2] = [2.0, 5.0];
/// Reads and writes of logits.
const PASSES_OF_LOGITS: f64 = 3.0;
/// Without kernels of this program: how many times as many, in tensor calls.
const PASSES_OF_CALLS: f64 = 3.7;
/// And how often the scores of attention are read or written, in `f32`, in a forward or a backward.
const PASSES_OF_SCORES: f64 = 9.5;
/// Bytes that decode a number, by our kernel, which writes it, and by tensor calls.
const DECODED_BYTES: [f64; 2] = [2.7, 20.0];

/// Time of a FLOP of attention's forward and backward, in those of products: of kernels for Hopper, and for other cards.
const OF_ATTENTION: [[f64; 2]; 2] = [[1.16, 1.9], [1.5, 2.7]];
/// Heads from which on the backward has small tiles, and no kernel for Hopper.
const WIDE_HEAD: usize = 256;
const OF_WIDE_HEADS: f64 = 4.0;

/// Launches of a block, and those that compute its forward again; and of what is around the blocks.
const LAUNCHES: [f64; 2] = [43.0, 14.0];
const LAUNCHES_AROUND: f64 = 40.0;
/// How many times as many, in tensor calls.
const LAUNCHES_OF_CALLS: f64 = 6.4;
/// Seconds of the host for a launch.
const LAUNCH_SECONDS: f64 = 30e-6;
/// Seconds between two steps.
const BETWEEN_STEPS: f64 = 5e-3;

impl Workload<'_> {
    /// Seconds of a step that needs a share of one of full rows, which has so many FLOPs with those that are computed again. What is
    /// launched and decoded is the same for all.
    #[must_use]
    pub fn seconds_on(&self, rates: &GpuRates, flops: f64, share: f64) -> f64 {
        let micro_batches = as_f64(self.gradient_accumulation_steps);
        let compute = self.attention(rates).iter().fold(flops / micro_batches, |sum, (flops, cost)| {
            // Among the others it is counted once.
            sum + flops * (cost - 1.0)
        });
        let bytes = share * self.bytes_beside(rates.has_kernels) + self.decoded_bytes(rates.has_kernels);
        let device = share * compute / rates.product_flops + bytes / rates.memory_bytes;
        let [of_block, again] = LAUNCHES;
        let blocks = as_f64(self.config.num_layers()) * (of_block + again * self.share_recomputed());
        let of_calls = if rates.has_kernels { 1.0 } else { LAUNCHES_OF_CALLS };
        let host = (blocks + LAUNCHES_AROUND) * of_calls * LAUNCH_SECONDS;
        micro_batches * device.max(host) + BETWEEN_STEPS
    }

    /// FLOPs of a micro-batch's attention, forward and backward, and the time of one in those of products.
    fn attention(&self, rates: &GpuRates) -> [(f64, f64); 2] {
        if !rates.has_kernels {
            return [(0.0, 1.0); 2];
        }
        let [forward, backward] = OF_ATTENTION[usize::from(!rates.is_hopper)];
        let is_wide =
            self.config.blocks.iter().filter_map(|block| block.attention()).any(|it| it.heads.head_dim >= WIDE_HEAD);
        let wide = if is_wide { OF_WIDE_HEADS } else { 1.0 };
        let once = as_f64(self.sequences()) * self.flops().of_attention(self.row_length) / 3.0;
        let again = if self.gradient_checkpointing.keeps_attention() { 0.0 } else { self.share_recomputed() };
        [((1.0 + again) * once, forward), (2.0 * once, backward * wide)]
    }

    /// Bytes that are read and written beside products in a micro-batch.
    fn bytes_beside(&self, has_kernels: bool) -> f64 {
        let [forward, backward] = [0, 1].map(|pass| {
            let outputs = self.config.blocks.iter().flat_map(|block| &block.sites).map(|site| {
                let share = match site.role {
                    Role::Expert { num_per_token, num_experts } => as_f64(num_per_token) / as_f64(num_experts),
                    Role::Linear | Role::Bare | Role::Router => 1.0,
                };
                share * as_f64(site.shape[0])
            });
            // What comes after a sublayer is added by a pass of its own.
            let norms = self.config.blocks.iter().flat_map(|block| &block.sublayers);
            let norms =
                norms.map(|it| usize::from(it.norm_before.is_some()) + 2 * usize::from(it.norm_after.is_some()));
            PASSES[pass] * outputs.sum::<f64>()
                + PASSES_OF_NORM[pass] * as_f64(norms.sum::<usize>() * self.config.hidden_size)
        });
        let forwards = 1.0 + self.share_recomputed();
        let of_calls = if has_kernels { 1.0 } else { PASSES_OF_CALLS };
        let of_token = of_calls * (forwards * forward + backward) + PASSES_OF_LOGITS * as_f64(self.config.vocab_size);
        let scores = if has_kernels { 0.0 } else { PASSES_OF_SCORES * (forwards + 1.0) * self.num_scores() };
        of_token * as_f64(self.tokens() * self.precision.dtype().num_bytes()) + 4.0 * scores
    }

    /// Scores of all attentions of a micro-batch.
    fn num_scores(&self) -> f64 {
        let attentions = self.config.blocks.iter().filter_map(|block| block.attention());
        let heads = attentions.map(|attention| attention.heads.num_heads).sum::<usize>();
        as_f64(heads * self.tokens()) * as_f64(self.row_length)
    }

    /// Bytes that are read and written to decode the base for a micro-batch.
    fn decoded_bytes(&self, has_kernels: bool) -> f64 {
        let Some(quantisation) = self.storage.quantisation else { return 0.0 };
        let code = match quantisation.coding {
            // Multiplied as it is.
            Coding::Fp8 if has_kernels => return 0.0,
            Coding::Fp8 | Coding::Int8 => 1.0,
            Coding::Nf4 | Coding::Fp4 | Coding::Int4 | Coding::Mxfp4 | Coding::Nvfp4 => 0.5,
        };
        let weights = self.config.blocks.iter().flat_map(|block| &block.sites).map(Site::num_weights);
        let decoded = DECODED_BYTES[usize::from(!has_kernels)];
        as_f64(weights.sum::<usize>()) * (code + decoded) * (2.0 + self.share_recomputed())
    }
}
