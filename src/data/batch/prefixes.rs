//! Documents that begin alike, as answers to one prompt or chats with one system prompt: their beginning is computed once.

use std::borrow::Cow;

use super::{Batch, Document, Target};

/// Fewer common tokens are not worth it.
const LEAST_TOKENS: usize = 8;

/// Documents share a beginning within so many tokens: the attention's backward keeps all queries that see it at hand.
const MOST_TOKENS: usize = 8192;

impl Batch {
    /// The batch with the common beginning of documents that follow one another once: it stays in the first of them, and the
    /// others [continue it](Self::prefixes). Documents of more than `longest` tokens are left as they are.
    ///
    /// A token that a document predicts from stays its own, and so does its last one.
    #[must_use]
    pub fn sharing_prefixes(&self, longest: usize) -> Cow<'_, Self> {
        let common = if self.prefixes.is_empty() { self.common_beginnings(longest) } else { Vec::new() };
        if common.iter().all(|len| *len == 0) {
            return Cow::Borrowed(self);
        }
        let mut shared = Self {
            sources: self.sources.clone(),
            answers: self.answers.clone(),
            written: self.written.clone(),
            mismatched: self.mismatched.clone(),
            ..Self::default()
        };
        let (mut targets, mut documents) =
            (self.targets.iter().peekable(), self.documents.iter().zip(common).peekable());
        let (mut row_end, mut first) = (0, 0);
        for row_length in &self.row_lengths {
            let row_start = shared.input_ids.len();
            row_end += row_length;
            while let Some((document, len)) = documents.next_if(|(document, _)| document.start < row_end) {
                let start = shared.input_ids.len();
                first = if len == 0 { start } else { first };
                let own = document.start + len..document.start + document.len;
                while let Some(target) = targets.next_if(|target| target.position < own.end) {
                    shared.targets.push(Target { position: target.position - own.start + start, ..*target });
                }
                shared.documents.push(Document { start, len: own.len() });
                shared.prefixes.push(first..first + len);
                shared.input_ids.extend(&self.input_ids[own]);
            }
            shared.row_lengths.push(shared.input_ids.len() - row_start);
        }
        Cow::Owned(shared)
    }

    /// Number of tokens that each document has in common with one before it and all between; none where documents do not
    /// follow one another.
    fn common_beginnings(&self, longest: usize) -> Vec<usize> {
        let mut targets = self.targets.iter().peekable();
        // The first of the documents that begin alike, and its index.
        let (mut first, mut index_of_first, mut end) = (Document { start: 0, len: 0 }, 0, 0);
        let mut found: Vec<usize> = Vec::new();
        for (index, &document) in self.documents.iter().enumerate() {
            if document.start != end {
                return Vec::new();
            }
            end += document.len;
            let target = targets.peek().map_or(end, |target| target.position.min(end)) - document.start;
            while targets.next_if(|target| target.position < end).is_some() {}
            let most = target.min(first.len).min(document.len.saturating_sub(1));
            let [one, other] = [first, document].map(|document| &self.input_ids[document.start..][..most]);
            let equal = one.iter().zip(other).take_while(|(one, other)| one == other).count();
            let others = &mut found[index_of_first..];
            let others = others.get_mut(1..).unwrap_or_default();
            let len = others.first().map_or(equal, |len| equal.min(*len));
            // All of them have as many in common: more of them less each, where that is more in all.
            let before: usize = others.iter().sum();
            let is_near = first.len.max(document.len) <= longest && end - first.start <= MOST_TOKENS;
            if is_near && len >= LEAST_TOKENS && len * (others.len() + 1) > before {
                others.fill(len);
                found.push(len);
            } else {
                (first, index_of_first) = (document, index);
                found.push(0);
            }
        }
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::batch::{Answer, RowSource};

    fn batch(documents: &[(&[u32], usize)]) -> Batch {
        let mut batch = Batch::default();
        for (row, (ids, first)) in documents.iter().enumerate() {
            let carries_loss: Vec<bool> = (0..ids.len()).map(|at| at >= *first).collect();
            batch.push(RowSource { file: 0, row }, ids, &carries_loss);
            batch.answers.push(Answer { is_good: row == 0, prompt_targets: 0, advantage: 0.0, margin: 0.0 });
            batch.row_lengths.push(ids.len());
        }
        batch
    }

    fn text(prompt: u32, answer: &[u32]) -> Vec<u32> {
        (prompt..prompt + 10).chain(answer.iter().copied()).collect()
    }

    #[test]
    fn answers_to_one_prompt_continue_it_and_predict_the_same_tokens_at_the_same_positions() {
        let texts = [text(20, &[1, 2]), text(20, &[1, 3, 4]), text(20, &[5]), text(40, &[6]), text(40, &[7])];
        let raw = batch(&texts.each_ref().map(|text| (&text[..], 10)));
        let shared = raw.sharing_prefixes(20);
        // The last token of a prompt predicts another in each answer, so each has its own.
        assert_eq!(shared.prefixes, [0..0, 0..9, 0..9, 18..18, 18..27]);
        assert_eq!(shared.row_lengths, [12, 4, 2, 11, 2]);
        assert_eq!(shared.input_ids[..20], [&texts[0][..], &[29, 1, 3, 4], &[29, 5], &[40, 41]].concat());
        assert_eq!(shared.num_tokens(), raw.num_tokens() - 27);
        let [before, after] = [&raw, &*shared].map(|batch| {
            let positions = batch.positions();
            let seen = |target: &Target| (positions[target.position], batch.input_ids[target.position], target.token);
            batch.targets.iter().map(seen).collect::<Vec<_>>()
        });
        assert_eq!(before, after);
        assert_eq!(shared.sharing_prefixes(20), shared);
    }

    #[test]
    fn more_documents_share_less_each_where_that_is_more_in_all() {
        let text = |common: usize, own: u32| (0..20).map(|at| if at < common { 7 } else { own }).collect::<Vec<_>>();
        let common = |texts: &[Vec<u32>]| {
            batch(&texts.iter().map(|text| (&text[..], 18)).collect::<Vec<_>>()).common_beginnings(20)
        };
        assert_eq!(common(&[text(20, 7), text(14, 1), text(12, 2), text(11, 3)]), [0, 11, 11, 11]);
        assert_eq!(common(&[text(20, 7), text(17, 1), text(8, 2), text(8, 2)]), [0, 17, 0, 17]);
    }

    #[test]
    fn what_does_not_begin_alike_long_enough_or_is_too_long_is_left_alone() {
        let (one, other) = (text(20, &[1, 2]), text(21, &[1, 2]));
        for (documents, longest) in [
            (vec![(&one[..], 10), (&other[..], 10)], 20),
            (vec![(&one[..7], 6), (&one[..8], 6)], 20),
            (vec![(&one[..], 10), (&one[..11], 10)], 11),
            (vec![(&one[..], 10), (&one[..], 1)], 20),
        ] {
            assert!(matches!(batch(&documents).sharing_prefixes(longest), Cow::Borrowed(_)), "{documents:?}");
        }
        let equal = batch(&[(&one, 12), (&one, 12)]);
        let shared = equal.sharing_prefixes(20);
        assert_eq!((shared.documents[1].len, &shared.prefixes[1]), (1, &(0..11)));
    }
}
