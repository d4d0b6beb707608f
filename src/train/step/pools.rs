//! Memory that a step asks for once.

use std::cell::OnceCell;

use burn::tensor::Tensor;

use crate::model::Model;
use crate::ops::cross_entropy::LossChunk;
use crate::train::offload::HostParking;

/// Larger logits would take memory that a small micro-batch does not need.
const MOST_LOGITS_BYTES: usize = 256 << 20;

/// What of it is there.
#[derive(Debug, Default)]
pub(super) struct Pools {
    first_page: OnceCell<()>,
    /// Started when the first block input is moved to host memory.
    parking: OnceCell<HostParking>,
}

impl Pools {
    /// Before a micro-batch of so many tokens. The pools of a GPU make pages as large as the largest tensor so far: were that one of
    /// a later block or the logits, the pages until then would be of no use to it.
    pub(super) fn make_first_page(&self, model: &Model, chunk: LossChunk, tokens: usize) {
        if model.place().is_host() {
            return;
        }
        self.first_page.get_or_init(|| {
            let (place, head) = (model.place(), model.lm_head.dims());
            let rows = chunk.most_tokens(place, head).min(LossChunk::Auto.most_tokens(place, head));
            let logits = Some(rows * head[0]).filter(|numbers| numbers * model.compute.size() <= MOST_LOGITS_BYTES);
            let widest = model.config.blocks.iter().map(|block| block.widest_activation(place.stacks_weights())).max();
            let numbers = (tokens * widest.unwrap_or_default()).max(logits.unwrap_or_default());
            let largest = Tensor::<1>::zeros([numbers], (&model.device(), model.compute));
            // Else it is dropped before it is made. What fails here fails again where a result is read.
            drop(model.device().sync());
            drop(largest);
        });
    }

    /// The host memory in which block inputs wait.
    pub(super) fn parking(&self, model: &Model) -> &HostParking {
        self.parking.get_or_init(|| HostParking::new(model.device()))
    }
}
