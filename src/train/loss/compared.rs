//! What the loss of a micro-batch is compared with.

use std::ops::Range;

use super::targets::Targets;
use crate::train::objective::LossRows;
use crate::train::references::References;

/// What the log-probabilities of a micro-batch are compared with, as far as the objective needs it.
#[derive(Debug, Default)]
pub struct Compared {
    /// Log-probability of every target token by the reference; empty where all its documents are known.
    pub(super) tokens: Vec<f32>,
    /// Of every document by the reference, where these are kept.
    pub(super) documents: Vec<f64>,
    /// By how much answers to other prompts are likelier than by the reference.
    pub(super) divergence: f64,
}

impl Compared {
    /// Of documents that `references` know, only these; of others, those that `compute` finds for tokens, and where they are to
    /// be kept, of documents.
    pub(super) fn new(
        targets: &Targets,
        references: Option<&References>,
        divergence: f64,
        compute: impl FnOnce() -> Vec<f32>,
    ) -> Self {
        let Some(references) = references else { return Self { tokens: compute(), documents: Vec::new(), divergence } };
        if let Some(documents) = references.of(&targets.digests) {
            return Self { tokens: Vec::new(), documents, divergence };
        }
        let tokens = compute();
        let sum = |range: &Range<usize>| tokens[range.clone()].iter().map(|&p| f64::from(p)).sum::<f64>();
        let documents: Vec<f64> = targets.by_row.iter().map(sum).collect();
        references.keep(&targets.digests, &documents);
        Self { tokens, documents, divergence }
    }

    /// The targets as an objective sees them, without what the head makes of them.
    pub(super) fn rows<'a>(&'a self, targets: &'a Targets) -> LossRows<'a> {
        LossRows {
            targets: &targets.by_row,
            answers: &targets.answers,
            written: &targets.written,
            reference: &self.tokens,
            reference_answers: &self.documents,
            divergence: self.divergence,
            ..LossRows::default()
        }
    }
}
