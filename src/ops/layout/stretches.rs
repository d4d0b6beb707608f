//! The stretches of tokens that attention takes as they lie.

use std::ops::Range;

/// Tokens of which each sees those of a prefix, and itself and those before it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stretch {
    /// Its first token.
    pub start: usize,
    /// Number of its tokens.
    pub len: usize,
    /// Tokens from its first on that see it: its own, and of a prefix those of all that continue it.
    pub reach: usize,
    /// The tokens that it continues, which lie before it; empty where it continues none. Its own, where they see each other both ways.
    pub prefix: Range<usize>,
}

impl Stretch {
    /// Tokens that all see each other.
    #[must_use]
    pub fn both_ways(start: usize, len: usize) -> Self {
        Self { start, len, reach: len, prefix: start..start + len }
    }

    /// Whether its tokens all see each other.
    #[must_use]
    pub fn is_both_ways(&self) -> bool {
        self.prefix == (self.start..self.start + self.len)
    }

    /// Whether others continue it, or it continues another.
    #[must_use]
    pub fn is_shared(&self) -> bool {
        self.reach > self.len || !self.prefix.is_empty()
    }

    /// Those of documents (start, length), each of which continues its own of `prefixes`, if any does: the beginning of the last
    /// one before that continues none. Documents that begin alike lie one after the other.
    ///
    /// # Panics
    /// If documents that continue one prefix do not lie so.
    #[must_use]
    pub fn of(documents: &[(usize, usize)], prefixes: &[Range<usize>]) -> Vec<Self> {
        let mut stretches: Vec<Self> = Vec::with_capacity(documents.len());
        // Index of the stretch that is continued.
        let mut shared: Option<usize> = None;
        for (index, &(start, len)) in documents.iter().enumerate() {
            let prefix = prefixes.get(index).cloned().unwrap_or_default();
            if prefix.is_empty() {
                shared = None;
            } else if shared.is_none()
                && let Some(first) = stretches.pop()
            {
                let rest = first.len.saturating_sub(prefix.len());
                shared = Some(stretches.len());
                stretches.push(Self { len: prefix.len(), ..first });
                let rest = Self { start: prefix.end, len: rest, reach: rest, prefix: prefix.clone() };
                stretches.extend((rest.len > 0).then_some(rest));
            }
            assert!(prefix.is_empty() || shared.is_some(), "a document continues one before it");
            if let Some(shared) = shared {
                let shared = &mut stretches[shared];
                assert!(
                    start == shared.start + shared.reach && prefix == (shared.start..shared.start + shared.len),
                    "documents that begin alike follow one another"
                );
                shared.reach += len;
            }
            stretches.push(Self { start, len, reach: len, prefix });
        }
        stretches
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prefix_is_seen_by_all_that_continue_it() {
        let stretch = |start, len, reach, prefix| Stretch { start, len, reach, prefix };
        assert_eq!(Stretch::of(&[(1, 2), (4, 3)], &[]), [stretch(1, 2, 2, 0..0), stretch(4, 3, 3, 0..0)]);
        let documents = [(0, 2), (2, 5), (7, 2), (9, 4), (13, 4), (17, 1)];
        let prefixes = [0..0, 0..0, 2..5, 2..5, 0..0, 13..17];
        assert_eq!(
            Stretch::of(&documents, &prefixes),
            [
                stretch(0, 2, 2, 0..0),
                stretch(2, 3, 11, 0..0),
                stretch(5, 2, 2, 2..5),
                stretch(7, 2, 2, 2..5),
                stretch(9, 4, 4, 2..5),
                // Nothing of its own is left of the first.
                stretch(13, 4, 5, 0..0),
                stretch(17, 1, 1, 13..17),
            ]
        );
    }
}
