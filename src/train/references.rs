//! What the reference makes of answers. It does not change while a model is trained, so each answer is computed once.

use std::cell::RefCell;
use std::collections::BTreeMap;

use crate::data::batch::{Batch, Document};
use crate::save::checkpoint::{HostTensor, HostValues};
use crate::util::stats::digest;

/// Name of the tensor in a checkpoint.
const NAME: &str = "reference_log_probabilities";

/// Log-probabilities in nats of the answers that the reference has seen, by the digest of the answer and its prompt.
#[derive(Debug, Default)]
pub struct References(RefCell<BTreeMap<u64, f64>>);

/// The digest of every document of a micro-batch: of its tokens, and of which of them carry loss.
pub(super) fn digests(batch: &Batch) -> Vec<u64> {
    let mut targets = batch.targets.iter().peekable();
    let of_document = |(index, document): (usize, &Document)| {
        let (tokens, before) = (document.start..document.start + document.len, batch.prefix(index));
        let mut positions = Vec::new();
        while let Some(target) = targets.next_if(|target| target.position < tokens.end) {
            positions.push(u32::try_from(before.len() + target.position - tokens.start).unwrap_or(u32::MAX));
        }
        let tokens = batch.input_ids[before].iter().chain(&batch.input_ids[tokens]).copied();
        digest(tokens.chain([u32::MAX]).chain(positions))
    };
    batch.documents.iter().enumerate().map(of_document).collect()
}

impl References {
    /// Those of documents with these digests; `None` unless all are known.
    pub(super) fn of(&self, digests: &[u64]) -> Option<Vec<f64>> {
        let known = self.0.borrow();
        digests.iter().map(|digest| known.get(digest).copied()).collect()
    }

    /// Keeps those of documents with these digests.
    pub(super) fn keep(&self, digests: &[u64], log_probabilities: &[f64]) {
        self.0.borrow_mut().extend(digests.iter().copied().zip(log_probabilities.iter().copied()));
    }

    /// All of them for a checkpoint; `None` where there are none.
    pub(super) fn state(&self) -> Option<HostTensor> {
        let known = self.0.borrow();
        let bytes = known.iter().flat_map(|(digest, value)| [digest.to_le_bytes(), value.to_le_bytes()]).flatten();
        let shape = vec![known.len(), 16];
        (!known.is_empty()).then(|| HostTensor { name: NAME.into(), shape, values: HostValues::U8(bytes.collect()) })
    }

    /// Takes those of a checkpoint out of its tensors.
    pub(super) fn restored(tensors: &mut Vec<HostTensor>) -> Self {
        let known = tensors.extract_if(.., |tensor| tensor.name == NAME).flat_map(|tensor| match tensor.values {
            HostValues::U8(bytes) => bytes,
            HostValues::F32(_) => Vec::new(),
        });
        let known: Vec<u8> = known.collect();
        let (words, _) = known.as_chunks::<8>();
        let (pairs, _) = words.as_chunks::<2>();
        let pairs = pairs.iter().map(|&[digest, value]| (u64::from_le_bytes(digest), f64::from_le_bytes(value)));
        Self(RefCell::new(pairs.collect()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::batch::{RowSource, Target};

    #[test]
    fn a_checkpoint_keeps_what_is_known() {
        let known = References::default();
        assert_eq!(known.state(), None);
        known.keep(&[7, 3], &[-0.5, -0.000_000_1]);
        let mut tensors = vec![known.state().unwrap()];
        let restored = References::restored(&mut tensors);
        assert_eq!((restored.of(&[3, 7, 3]), tensors.len()), (Some(vec![-0.000_000_1, -0.5, -0.000_000_1]), 0));
        assert_eq!(restored.of(&[3, 4]), None);
        assert_eq!(References::restored(&mut tensors).of(&[3]), None);
    }

    #[test]
    fn a_document_is_known_by_its_tokens_and_where_its_answer_begins_wherever_it_lies() {
        let batch = |documents: &[(&[u32], usize)]| {
            let mut batch = Batch::default();
            for (ids, first) in documents {
                let carries_loss: Vec<bool> = (0..ids.len()).map(|at| at >= *first).collect();
                batch.push(RowSource { file: 0, row: 0 }, ids, &carries_loss);
            }
            digests(&batch)
        };
        let [long, short, later] = [(&[1, 2, 3][..], 1), (&[1, 2][..], 1), (&[1, 2, 3][..], 2)];
        let all = batch(&[long, short, later]);
        assert!(all[0] != all[1] && all[0] != all[2] && all[1] != all[2]);
        assert_eq!(batch(&[later, short, long]), [all[2], all[1], all[0]]);
        let padded = Batch {
            input_ids: vec![1, 2, 0, 0, 1, 2, 3],
            documents: vec![Document { start: 0, len: 2 }, Document { start: 4, len: 3 }],
            targets: [0, 4, 5].map(|position| Target { position, token: 9 }).to_vec(),
            ..Batch::default()
        };
        assert_eq!(digests(&padded), [all[1], all[0]]);
    }
}
