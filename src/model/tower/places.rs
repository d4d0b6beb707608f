//! Where the patches of an image are: what is added to them there, how they turn queries and keys, and which see each other.

use std::sync::Arc;

use burn::tensor::{Device, Tensor};

use crate::ops::host;
use crate::ops::layout::{Layout, RotaryTable, indices};
use crate::spec::{Encoder, EncoderKind, Grid, Windows};

/// Patches that see each other alone: so many groups of so many follow one another.
pub(super) type Groups = Vec<[usize; 2]>;

/// The patches of an image in the order in which an encoder has them: by row and column, or by window.
#[derive(Debug)]
pub(super) struct Places {
    grid: Grid,
    /// Numbers of the patches, row by row.
    order: Vec<usize>,
    /// In layers with windows.
    windows: Groups,
}

impl Places {
    pub(super) fn new(grid: Grid, windows: Option<&Windows>) -> Self {
        let mut order: Vec<usize> = (0..grid.count()).collect();
        let Some(Windows { side, .. }) = windows else { return Self { grid, order, windows: Vec::new() } };
        // Of a patch: that of its window, whose columns and rows are together.
        let window = |patch: &usize| [patch / grid.columns / side, patch % grid.columns / side];
        let size = |[row, column]: [usize; 2]| {
            let sides = [grid.rows - row * side, grid.columns - column * side];
            sides.map(|rest| rest.min(*side)).iter().product::<usize>()
        };
        order.sort_by_key(|patch| (size(window(patch)), window(patch)));
        let lengths = order.chunk_by(|a, b| window(a) == window(b)).map(<[usize]>::len);
        let lengths: Vec<usize> = lengths.collect();
        let windows = lengths.chunk_by(|a, b| a == b).map(|equal| [equal.len(), equal[0]]).collect();
        Self { grid, order, windows }
    }

    /// Which see each other in a layer; `None`: all.
    pub(super) fn groups(&self, windows: Option<&Windows>, layer: usize) -> Option<Groups> {
        windows.filter(|windows| !windows.except.contains(&layer)).map(|_| self.windows.clone())
    }

    /// Patches that are row by row in this order.
    pub(super) fn ordered(&self, x: Tensor<2>) -> Tensor<2> {
        if self.windows.is_empty() { x } else { x.clone().select(0, indices(self.order.iter().copied(), &x.device())) }
    }

    /// Patches in this order row by row.
    pub(super) fn by_row(&self, x: &Tensor<2>) -> Tensor<2> {
        if self.windows.is_empty() {
            return x.clone();
        }
        let mut places = vec![0; self.order.len()];
        self.order.iter().enumerate().for_each(|(at, patch)| places[*patch] = at);
        x.clone().select(0, indices(places, &x.device()))
    }

    /// Patches as tokens, whose positions turn with their row and column.
    pub(super) fn layout(&self, encoder: &Encoder) -> Option<Layout> {
        let table = match encoder.kind {
            EncoderKind::Pixtral { rope_theta } => self.table(encoder.head_dim(), rope_theta, true),
            EncoderKind::Qwen3 { rope_theta, .. }
            | EncoderKind::Qwen2_5 { rope_theta }
            | EncoderKind::Qwen2 { rope_theta }
            | EncoderKind::Glm { rope_theta, .. }
            | EncoderKind::Gemma4 { rope_theta, .. }
            | EncoderKind::PaddleOcr { rope_theta, .. } => self.table(encoder.head_dim(), rope_theta, false),
            EncoderKind::Siglip { .. }
            | EncoderKind::Siglip2 { .. }
            | EncoderKind::InternVit { .. }
            | EncoderKind::Gemma4Unified { .. } => return None,
        };
        let num_patches = self.order.len();
        let positions = (0..u32::try_from(num_patches).unwrap_or(u32::MAX)).collect();
        Some(Layout::new(1, vec![(0, num_patches)], positions, Arc::from([table])))
    }

    /// The angles of every patch, half of them of its row and half of its column: frequencies are dealt to them by turns, or both have
    /// all those of half a head.
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_precision_loss,
        reason = "in f32, as transformers has them"
    )]
    fn table(&self, head_dim: usize, theta: f64, are_dealt: bool) -> RotaryTable {
        let frequency = |pair: usize| 1.0 / (theta as f32).powf((2 * pair) as f32 / head_dim as f32);
        let of = |first: usize| (first..head_dim / 2).step_by(2).map(frequency).collect::<Vec<f32>>();
        let [of_row, of_column] = [of(0), of(usize::from(are_dealt))];
        let of_patch = |patch: &usize| {
            let [row, column] = [patch / self.grid.columns, patch % self.grid.columns].map(|place| place as f32);
            let of_row = of_row.iter().map(move |frequency| row * frequency);
            of_row.chain(of_column.iter().map(move |frequency| column * frequency))
        };
        let angles: Vec<f32> = self.order.iter().flat_map(of_patch).collect();
        let [cos, sin] = [f32::cos, f32::sin].map(|of: fn(f32) -> f32| angles.iter().map(|angle| of(*angle)).collect());
        RotaryTable::new(cos, sin, head_dim / 2)
    }

    /// The vectors of the patches' places, `[patches, width]`, in this order: they lie between those of a square of places, `[side^2,
    /// width]`.
    pub(super) fn between(
        &self,
        of_square: &Tensor<2>,
        (side, between): (usize, Between),
        device: &Device,
    ) -> Tensor<2> {
        let of_length = |length: usize| -> Vec<_> { (0..length).map(|at| between.shares(at, length, side)).collect() };
        let [by_row, by_column] = [self.grid.rows, self.grid.columns].map(of_length);
        let most = |of: &[Vec<(usize, f32)>]| of.iter().map(Vec::len).max().unwrap_or(0);
        let share = |of: &[Vec<(usize, f32)>], at: usize, which: usize| of[at].get(which).copied().unwrap_or((0, 0.0));
        let part = |(of_row, of_column): (usize, usize)| {
            let found = self.order.iter().map(|patch| {
                let (row, by_row) = share(&by_row, patch / self.grid.columns, of_row);
                let (column, by_column) = share(&by_column, patch % self.grid.columns, of_column);
                (row * side + column, by_row * by_column)
            });
            let (places, shares): (Vec<usize>, Vec<f32>) = found.unzip();
            let shares: Tensor<2> = host::tensor(shares, [self.order.len(), 1], device);
            of_square.clone().select(0, indices(places, device)) * shares
        };
        let mut parts = (0..most(&by_row)).flat_map(|row| (0..most(&by_column)).map(move |column| (row, column)));
        let first = part(parts.next().unwrap_or((0, 0)));
        parts.fold(first, |sum, at| sum + part(at))
    }

    /// The vectors of the patches' columns and rows, `[patches, width]`: each of the first half of `[2 * num_places, width]`, and of the
    /// second.
    pub(super) fn of_columns_and_rows(&self, places: &Tensor<2>, num_places: usize) -> Tensor<2> {
        let of = |place: &dyn Fn(usize) -> usize| {
            places.clone().select(0, indices(self.order.iter().map(|patch| place(*patch)), &places.device()))
        };
        of(&|patch| patch % self.grid.columns) + of(&|patch| num_places + patch / self.grid.columns)
    }
}

/// How the places of patches lie between those that have vectors.
#[derive(Clone, Copy, Debug)]
pub(super) enum Between {
    /// The outer ones are the outer patches', and what is between is linear.
    Corners,
    /// Both cover the same, and what is between is linear.
    Edges,
    /// The same, over as many as a patch covers where there are fewer patches.
    Smoothed,
    /// Both cover the same, and what is between is cubic (Keys, 1981, with a = -0.75).
    Cubic,
}

impl Between {
    /// Which of `side` places a patch has a share of, and the shares, in one direction, in which there are `length` patches.
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_precision_loss,
        clippy::cast_sign_loss,
        clippy::cast_possible_wrap,
        reason = "in f32, as transformers has them"
    )]
    fn shares(self, index: usize, length: usize, side: usize) -> Vec<(usize, f32)> {
        let (of_patch, last) = (side as f32 / length as f32, side - 1);
        let place = match self {
            Self::Corners => (index * last) as f32 / (length.max(2) - 1) as f32,
            Self::Edges => ((index as f32 + 0.5) * of_patch - 0.5).clamp(0.0, last as f32),
            Self::Smoothed | Self::Cubic => (index as f32 + 0.5) * of_patch - 0.5,
        };
        let before = place.floor();
        let share = place - before;
        match self {
            Self::Corners | Self::Edges => {
                vec![(before as usize, 1.0 - share), ((before as usize + 1).min(last), share)]
            }
            Self::Smoothed => {
                let reach = of_patch.max(1.0);
                let of = |at: usize| (at, (1.0 - (at as f32 - place).abs() / reach).max(0.0));
                let shares: Vec<_> = (0..side).map(of).filter(|(_, share)| *share > 0.0).collect();
                let sum: f32 = shares.iter().map(|(_, share)| share).sum();
                shares.into_iter().map(|(at, share)| (at, share / sum)).collect()
            }
            Self::Cubic => {
                let near = |x: f32| (1.25 * x - 2.25) * x * x + 1.0;
                let far = |x: f32| ((-0.75 * x + 3.75) * x - 6.0) * x + 3.0;
                let shares = [far(share + 1.0), near(share), near(1.0 - share), far(2.0 - share)];
                let at = |which: usize| (before as isize - 1 + which as isize).clamp(0, last as isize) as usize;
                shares.into_iter().enumerate().map(|(which, share)| (at(which), share)).collect()
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_are_together_those_of_one_size_after_another() {
        let places = Places::new(Grid { rows: 3, columns: 5 }, Some(&Windows { side: 2, except: vec![7] }));
        assert_eq!(places.order, [14, 4, 9, 10, 11, 12, 13, 0, 1, 5, 6, 2, 3, 7, 8]);
        assert_eq!(places.windows, [[1, 1], [3, 2], [2, 4]]);
        let windows = Some(&Windows { side: 2, except: vec![7] });
        assert_eq!([6, 7].map(|layer| places.groups(windows, layer).is_some()), [true, false]);
    }
}
