//! The next tokens of texts, from what sublayers without attention keep of those before them: text by text.

use std::ops::Range;

use burn::tensor::Tensor;

use super::short_conv::ConvWeights;
use crate::ops::layout::Layout;

/// The new tokens of a text.
#[derive(Debug)]
pub struct TextRows {
    /// Their rows.
    pub rows: Range<usize>,
    /// Of them alone.
    pub own: Layout,
    /// With the last inputs of the convolution before them.
    pub with_before: Layout,
}

impl TextRows {
    /// Of texts with so many new tokens each, one behind the other, and `num_before` inputs of a convolution.
    #[must_use]
    pub fn of(lengths: &[usize], num_before: usize) -> Vec<Self> {
        let layout = |len: usize| {
            let positions = (0..len).map(|position| u32::try_from(position).unwrap_or(u32::MAX)).collect();
            Layout::new(1, vec![(0, len)], positions, [].into())
        };
        let texts = lengths.iter().scan(0, |end, len| {
            *end += len;
            Some(Self { rows: *end - len..*end, own: layout(*len), with_before: layout(len + num_before) })
        });
        texts.collect()
    }

    /// The rows of `x`.
    #[must_use]
    pub fn part(&self, x: &Tensor<2>) -> Tensor<2> {
        x.clone().slice([self.rows.clone()])
    }
}

/// A convolution, as in [`short_conv`](crate::ops::short_conv).
#[derive(Clone, Copy, Debug)]
pub enum Convolution<'a> {
    /// With `SiLU`.
    Short(ConvWeights<'a>),
    /// Between two gates, with this weight.
    Gated(&'a Tensor<2>),
}

/// What `convolve` makes of the new tokens of each text behind the last inputs, `[kernel_size - 1, width]`, and these of the tokens.
pub(in crate::ops) fn plain_convolve_next(
    last: Vec<Tensor<2>>,
    texts: &[TextRows],
    x: &Tensor<2>,
    convolve: impl Fn(&Tensor<2>, &Layout) -> Tensor<2>,
) -> (Tensor<2>, Vec<Tensor<2>>) {
    let of_text = |(last, text): (Tensor<2>, &TextRows)| {
        let (next, [num_before, width]) = (text.part(x), last.dims());
        if num_before == 0 {
            return (convolve(&next, &text.own), last);
        }
        let num_tokens = text.rows.len();
        let all = Tensor::cat(vec![last.clone(), next], 0);
        // A copy: a view would hold all tokens.
        let inputs = all.clone().narrow(0, num_tokens, num_before);
        let inputs = last.zeros_like().slice_assign([0..num_before, 0..width], inputs);
        (convolve(&all, &text.with_before).narrow(0, num_before, num_tokens), inputs)
    };
    let (y, last) = last.into_iter().zip(texts).map(of_text).unzip();
    (Tensor::cat(y, 0), last)
}

/// What `read` makes of each text and the state before it, and the states.
pub(in crate::ops) fn plain_states_next(
    memories: Vec<Tensor<3>>,
    texts: &[TextRows],
    read: impl Fn(&TextRows, Tensor<3>) -> (Tensor<2>, Option<Tensor<3>>),
) -> (Tensor<2>, Vec<Tensor<3>>) {
    let of_text = |(memory, text)| {
        let (y, memory) = read(text, memory);
        (y, memory.unwrap_or_else(|| unreachable!("a state gives a state")))
    };
    let (y, memories) = memories.into_iter().zip(texts).map(of_text).unzip();
    (Tensor::cat(y, 0), memories)
}
