//! Keeps the matrices of a model's blocks in host memory, and on a GPU those of the block in use and of the one after it.
//!
//! `CubeCL` gives every stream of work a queue of the device's own, and memory. What waits for a tensor of another stream
//! waits for all that was queued there by then; so the computation is made to wait for a block before the copies of the next
//! are queued. It also holds that tensor's memory until it is done: at most one more block, since no more than eight
//! operations with tensors of other streams are queued at a time (cubecl-server, `stream/event.rs`).

use std::sync::{Mutex, PoisonError};

use burn::tensor::{Device, StreamId};

use super::block::Block;
use crate::ops::linear::Matrix;
use crate::ops::travel::Way;
use crate::util::faults;

/// What is copied, to people.
const WHAT: &str = "a block of the model";

/// The way of blocks from host memory to the device.
#[derive(Debug)]
pub(super) struct HostBlocks {
    device: Device,
    /// On which copies are queued.
    stream: StreamId,
    /// The blocks that are on the device, by layer.
    held: Mutex<Vec<(usize, Block)>>,
}

impl HostBlocks {
    /// For blocks that are used on this device.
    pub(super) fn new(device: &Device) -> Self {
        Self { device: device.clone(), stream: StreamId::allocate(), held: Mutex::default() }
    }

    /// A block with its matrices in the memory from which they are copied.
    pub(super) fn parked(&self, block: &Block) -> Block {
        with(block, moved(block, Way::Pinned(&self.device)))
    }

    /// Block `layer` on the device. `next` is the block after it, which is copied while this one is used.
    pub(super) fn turn_to(&self, blocks: &[Block], layer: usize, next: Option<usize>) -> Block {
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        held.retain(|(of, _)| *of == layer || Some(*of) == next);
        let find = |held: &[(usize, Block)], layer| held.iter().position(|(of, _)| *of == layer);
        let at = find(&held, layer).unwrap_or_else(|| {
            held.push((layer, self.brought(&blocks[layer])));
            held.len() - 1
        });
        let block = held[at].1.clone();
        if let Some(next) = next.filter(|next| find(&held, *next).is_none()) {
            self.wait_for(&block);
            held.push((next, self.brought(&blocks[next])));
        }
        block
    }

    /// A block on the device, once its copies are done. They are queued here.
    fn brought(&self, block: &Block) -> Block {
        let way = Way::To(&self.device, StreamId::current());
        // Memory of exactly its size, which the same matrix of a later block takes over.
        let copy = || self.device.memory_persistent_allocations((), |()| moved(block, way));
        with(block, self.stream.executes(copy))
    }

    /// Queues the computation's wait for the copies of a block.
    fn wait_for(&self, block: &Block) {
        let touched = block.linears[0].values.touched();
        if let Err(error) = self.device.flush() {
            faults::throw(&error.to_string(), WHAT);
        }
        drop(touched);
    }
}

fn moved(block: &Block, way: Way<'_>) -> Vec<Matrix> {
    block.linears.iter().map(|weight| weight.values.moved(way)).collect()
}

fn with(block: &Block, matrices: Vec<Matrix>) -> Block {
    let mut block = block.clone();
    for (weight, values) in block.linears.iter_mut().zip(matrices) {
        weight.values = values;
    }
    block
}
