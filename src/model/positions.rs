//! The three positions of tokens (Wang et al., 2024): equal in a text; in an image, those of the image, of a row and of a column. And
//! images whose tokens see each other both ways.

use std::collections::BTreeMap;

use super::Model;
use crate::images::{Features, is_of_image};
use crate::ops::layout::Blocks;
use crate::spec::SeenBothWays;

/// A token of a batch that continues a text which begins with other tokens, and these.
pub type Continued<'a> = (usize, &'a [u32]);

impl Model {
    /// The three positions of tokens whose numbers in their texts are `numbers`, `[tokens]` both; `None` where tokens have one
    /// position, which is their number: in other models, and without images.
    pub(super) fn three_positions(
        &self,
        ids: &[u32],
        numbers: &[u32],
        continued: &[Continued<'_>],
    ) -> Option<Vec<[usize; 3]>> {
        let features = self.features.as_ref().filter(|_| self.config.ropes.iter().any(|rope| rope.axes.is_some()))?;
        let mut texts = std::iter::once(ids).chain(continued.iter().map(|(_, before)| *before));
        texts.any(|ids| ids.iter().any(|id| is_of_image(*id))).then(|| of_tokens(features, ids, numbers, continued))
    }

    /// The images among tokens, where their tokens see each other both ways: each is among them as a whole. Those of as many tokens
    /// are together.
    pub(super) fn image_blocks(&self, ids: &[u32]) -> Vec<Blocks> {
        let seen = self.features.as_ref().filter(|features| features.seen_both_ways != SeenBothWays::Nowhere);
        let Some(features) = seen else { return Vec::new() };
        let mut by_length: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
        for (at, id) in ids.iter().enumerate() {
            if let Some((tokens, 0)) = features.place_of(*id) {
                by_length.entry(tokens.count()).or_default().push(at);
            }
        }
        let are_in_windows = features.seen_both_ways == SeenBothWays::InWindows;
        let blocks = |(length, starts): (usize, Vec<usize>)| {
            Blocks::new(&starts, length, ids.len(), &self.device()).in_windows(are_in_windows)
        };
        by_length.into_iter().map(blocks).collect()
    }

    /// Whether some of the tokens see others behind them.
    pub(super) fn sees_ahead(&self, ids: &[u32]) -> bool {
        let is_seen = self.features.as_ref().is_some_and(|features| features.seen_both_ways != SeenBothWays::Nowhere);
        is_seen && ids.iter().any(|id| is_of_image(*id))
    }
}

fn of_tokens(features: &Features, ids: &[u32], numbers: &[u32], continued: &[Continued<'_>]) -> Vec<[usize; 3]> {
    let (mut saved, mut continued) = (0, continued.iter().peekable());
    let of_token = |(at, (id, number)): (usize, (&u32, &u32))| {
        let number = *number as usize;
        if number == 0 {
            saved = 0;
        }
        while let Some((_, before)) = continued.next_if(|(start, _)| *start <= at) {
            saved = before.iter().map(|id| saved_by(features, *id)).sum();
        }
        let position = number - saved;
        saved += saved_by(features, *id);
        match features.place_of(*id) {
            Some((tokens, index)) => {
                let start = position - index;
                [start, start + index / tokens.columns, start + index % tokens.columns]
            }
            None => [position; 3],
        }
    };
    ids.iter().zip(numbers).enumerate().map(of_token).collect()
}

/// What the positions behind a token are less than its number in the text: at the last of an image, which takes as many positions as
/// its longer side has tokens.
fn saved_by(features: &Features, id: u32) -> usize {
    let last = features.place_of(id).filter(|(tokens, index)| index + 1 == tokens.count());
    last.map_or(0, |(tokens, _)| tokens.count() - tokens.rows.max(tokens.columns))
}
