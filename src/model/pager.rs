//! Keeps no more of a mapped model in memory than is in use: what comes next is read ahead, what was left is released.
//! Which experts come next is not known: those are read when they are used.

use std::sync::mpsc::{self, Receiver, SyncSender};
use std::sync::{Mutex, PoisonError};
use std::thread::JoinHandle;

use super::weights::{Pages, Weights};
use crate::spec::{ModelConfig, is_of_expert};

/// Turns that the model may be ahead of the thread; each holds at most one more part in memory.
const MAX_AHEAD: usize = 1;

/// The pages of a part of a model.
#[derive(Clone, Debug, Default)]
struct PagedPart {
    /// Those of which it is known that they will be used.
    read: Vec<Pages>,
    /// Those of experts.
    experts: Vec<Pages>,
}

/// The pages of a model, part by part: its blocks, then the head, then the embedding unless it is the head.
#[derive(Debug)]
pub(super) struct Pager {
    num_blocks: usize,
    num_parts: usize,
    /// Parts that were asked for last.
    held: Mutex<Vec<usize>>,
    /// Dropped to end the thread.
    turns: Option<SyncSender<Turn>>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Turn {
    release: Vec<usize>,
    read: Vec<usize>,
}

impl Pager {
    /// Starts the thread for the weights of these files.
    pub(super) fn new(config: &ModelConfig, weights: &Weights) -> Self {
        let num_blocks = config.num_layers();
        let mut parts = vec![PagedPart::default(); num_blocks + 1 + usize::from(!config.tie_word_embeddings)];
        let num_parts = parts.len();
        for (name, _) in config.expected_tensors() {
            let of_block = name.strip_prefix("model.layers.").and_then(|rest| rest.split('.').next()?.parse().ok());
            let part = match (of_block, name.as_str()) {
                (Some(layer), _) => layer,
                (None, "lm_head.weight") => num_blocks,
                (None, "model.embed_tokens.weight") => num_parts - 1,
                _ => continue,
            };
            let PagedPart { read, experts } = &mut parts[part];
            if is_of_expert(&name) { experts } else { read }.extend(weights.pages(&name));
        }
        let (turns, queue) = mpsc::sync_channel(MAX_AHEAD);
        let thread = std::thread::Builder::new().name("pager".into()).spawn(move || work(&queue, &parts));
        Self { num_blocks, num_parts, held: Mutex::default(), turns: Some(turns), thread: thread.ok() }
    }

    /// Called before block `layer` is used. `next` is the block after it; after the last block comes the head.
    pub(super) fn turn_to(&self, layer: usize, next: Option<usize>) {
        let next = next.or((layer + 1 == self.num_blocks).then_some(self.num_blocks));
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        // The embedding has been used by now.
        if layer == 0 {
            held.push(self.num_parts - 1);
        }
        let wanted: Vec<usize> = [layer].into_iter().chain(next).collect();
        let without = |parts: &[usize], others: &[usize]| {
            parts.iter().copied().filter(|part| !others.contains(part)).collect::<Vec<_>>()
        };
        let turn = Turn { release: without(&held, &wanted), read: without(&wanted, &held) };
        *held = wanted;
        if let Some(turns) = &self.turns {
            // Without the thread, pages are read when they are used, and the system releases them when it needs memory.
            let _ = turns.send(turn);
        }
    }
}

impl Drop for Pager {
    fn drop(&mut self) {
        self.turns = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn work(turns: &Receiver<Turn>, parts: &[PagedPart]) {
    for Turn { release, read } in turns {
        let release = release.into_iter().map(|part| &parts[part]);
        release.flat_map(|part| part.read.iter().chain(&part.experts)).for_each(Pages::release);
        read.into_iter().flat_map(|part| &parts[part].read).for_each(Pages::read);
    }
}
