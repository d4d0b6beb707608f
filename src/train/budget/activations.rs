//! What a step computes: what it keeps for the backward, and what it takes besides at its peak.

use super::workload::{F32, Workload};
use crate::config::GradientCheckpointing;
use crate::model::budget::SublayerSizes;
use crate::spec::Heads;
use crate::train::objective::needs;

/// What a step takes beside what it holds and keeps, in bytes.
pub(super) struct Working {
    /// Inside a block or, where that is the peak, inside the loss.
    pub(super) inside: usize,
    /// The logits that exist then.
    pub(super) logits: usize,
    /// What the pools of a GPU keep from use.
    pub(super) pools: usize,
}

impl Workload<'_> {
    /// Bytes of an activation of every token, `[tokens]`.
    fn column_bytes(&self) -> usize {
        self.tokens() * self.activation_bytes()
    }

    /// Bytes of hidden states, `[tokens, hidden_size]`, of all residual streams.
    fn hidden_bytes(&self) -> usize {
        self.column_bytes() * self.config.streams_width()
    }

    /// Whether what blocks keep of their inputs is in host memory.
    fn is_offloaded(&self) -> bool {
        self.gradient_checkpointing == GradientCheckpointing::Offload && !self.place.is_host()
    }

    /// Bytes of the inputs that blocks keep on the device. Of those before the first that is trained, which have no backward,
    /// nothing is kept.
    fn input_bytes(&self) -> usize {
        let num_inputs = self.num_recomputed().saturating_sub(self.selection.first_trained());
        if self.is_offloaded() { 0 } else { num_inputs * self.hidden_bytes() }
    }

    fn blocks_with_adapters(&self) -> impl Iterator<Item = SublayerSizes> {
        self.blocks(self.most_ranks())
    }

    /// The first block that keeps all that its backward needs.
    fn first_whole(&self) -> usize {
        self.num_recomputed().max(self.selection.first_trained())
    }

    /// Numbers per token that the blocks from there on keep.
    fn whole(&self) -> usize {
        self.blocks_with_adapters().skip(self.first_whole()).map(|block| block.kept).sum()
    }

    /// Bytes that a step keeps for its backward.
    pub(super) fn kept_bytes(&self) -> usize {
        let (column, hidden, layered) = (self.column_bytes(), self.hidden_bytes(), self.layered());
        let [outputs, scores] = self.attended();
        let of_blocks = if self.is_offloaded() { 0 } else { (self.whole() + outputs) * column };
        let of_blocks = self.input_bytes() + of_blocks + scores * self.tokens() * F32;
        let of_one = of_blocks + self.config.between_blocks_size(self.first_whole()) * column + self.image_bytes();
        // The inputs of two blocks are in transfer at a time.
        let in_transfer = if self.is_offloaded() { 2 * hidden } else { 0 };
        // Micro-batches wait between two blocks as hidden states, or their gradient.
        let of_reference = if needs(self.objective).reference.is_some() { layered * hidden } else { 0 };
        layered * of_one + in_transfer + (layered - 1) * hidden + of_reference
    }

    /// Bytes inside the block that takes most, in its forward or its backward.
    fn in_blocks_bytes(&self) -> usize {
        let (first, first_whole, whole) = (self.selection.first_trained(), self.first_whole(), self.whole());
        // When the first block is computed again, those that kept everything have freed it.
        let recomputed = self.blocks_with_adapters().take(self.num_recomputed()).skip(first).map(|block| block.kept);
        let recomputed = recomputed.max().unwrap_or(0).saturating_sub(whole);
        let backward = self.blocks_with_adapters().skip(first).map(|block| block.backward).max().unwrap_or(0);
        // In its forward, what a block keeps is already among what is kept, unless that is freed again; then what the later blocks
        // will keep is not there yet.
        let in_forward = self.blocks_with_adapters().enumerate().map(|(layer, block)| {
            let freed = if layer < first_whole { (block.kept + block.forward).saturating_sub(whole) } else { 0 };
            freed.max(block.forward)
        });
        let in_backward = (recomputed + backward) * self.column_bytes()
            + self.score_bytes()
            + self.operand_bytes()
            + self.decomposed_bytes()
            + self.token_row_bytes();
        in_backward.max(in_forward.max().unwrap_or(0) * self.column_bytes())
    }

    pub(super) fn working(&self) -> Working {
        let (in_blocks, logits, modules) = (self.in_blocks_bytes(), self.logits_bytes(), self.module_grad_bytes());
        let in_loss = 5 * self.hidden_bytes() + self.copied_head_bytes();
        if self.place.is_host() {
            let widest = self.config.sites().map(|(_, site)| site.shape[1]).max().unwrap_or(0);
            let rounded = self.place.rounded_bytes(self.tokens() * widest, self.precision.dtype());
            // The logits' memory is kept between steps; elsewhere it returns to the pool.
            return Working { inside: in_blocks.max(in_loss) + rounded + modules, logits, pools: 0 };
        }
        // Pools keep what the loss or a block has freed, in sizes of which the other uses only some: of the smaller of the
        // two 0.5 for Qwen3 0.6B, 1.0 for Llama 3.1 8B and 1.3 for Llama 3.2 1B, on the stand-in for the driver.
        let freed = (logits + in_loss).min(in_blocks) * 8 / 10;
        // Sums of gradients outlive a micro-batch, it seems in pages that lack room for the largest tensors then. Half of
        // the inputs that are kept fits four models of 0.6B to 8B on an H200; without such inputs it was not measured.
        let stranded = if self.passes() > 1 { self.input_bytes() / 2 } else { 0 };
        let (logits, inside) = if logits + in_loss > in_blocks { (logits, in_loss) } else { (0, in_blocks) };
        Working { inside: inside + modules, logits, pools: freed + stranded }
    }

    /// Numbers per token that attention gives, its output's and, in `f32`, of its scores, of blocks that are computed again and
    /// keep it.
    fn attended(&self) -> [usize; 2] {
        let kept = if self.gradient_checkpointing.keeps_attention() { self.num_recomputed() } else { 0 };
        let blocks = self.config.blocks.iter().take(kept).skip(self.selection.first_trained());
        let attentions = blocks.filter_map(|block| block.attention());
        attentions.fold([0, 0], |[outputs, scores], attention| {
            [outputs + attention.heads.query_width(), scores + attention.heads.num_heads]
        })
    }

    /// Bytes of which token has which trained row, as truths, integers and `f32`.
    fn token_row_bytes(&self) -> usize {
        self.tokens() * self.selection.num_tokens() * (1 + 2 * F32)
    }

    /// Bytes of the gradient of the largest module that is trained as a whole, of a micro-batch: of every one that goes through a
    /// block before the next, and of the sum over the chunks of targets beside it.
    fn module_grad_bytes(&self) -> usize {
        let largest = self.selection.modules().map(|(_, [rows, columns])| rows * columns * F32).max().unwrap_or(0);
        let of_chunks = usize::from(!self.place.is_host());
        largest * if self.selection.trains_head() { self.layered() + of_chunks } else { 1 }
    }

    /// Bytes of the attention scores in plain tensor calls: a chunk, its exponentials and their gradients.
    fn score_bytes(&self) -> usize {
        let of =
            |heads: Heads| self.place.score_bytes([self.sequences(), self.row_length], heads, self.precision.dtype());
        self.config.blocks.iter().filter_map(|block| Some(of(block.attention()?.heads))).max().unwrap_or(0)
    }

    /// Bytes of the logits of a chunk of target tokens.
    pub(super) fn logits_bytes(&self) -> usize {
        if self.objective.scores() {
            return 0;
        }
        let rows = self.loss_chunk.tokens(self.place, self.head(), self.tokens());
        // In plain tensor calls, capped logits are kept for the slope of the cap.
        let is_kept = self.config.logit_soft_cap.is_some() && !self.place.is_host();
        let kept = if is_kept { self.activation_bytes() } else { 0 };
        let width = self.place.bytes_per_logit(self.place.activation_dtype(self.precision.dtype())) + kept;
        rows * self.config.vocab_size * width
    }
}
