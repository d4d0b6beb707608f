//! What a file of the cache folder holds of a matrix, and the matrix over the pages of that file.

use std::cell::RefCell;
use std::sync::Arc;

use burn::tensor::Device;

use super::pages::Pages;
use crate::device::Dtype;
use crate::ops::blocks::Blocks;
use crate::ops::cpu::KINDS;
use crate::ops::linear::Matrix;
use crate::ops::quantised::{BlockScales, Coding, Quantised, bytes_tensor};

/// What the bytes of a matrix are; `None` where they are its numbers.
pub(super) fn form(matrix: &Matrix) -> Option<String> {
    let scales = |scales: &BlockScales| match scales {
        BlockScales::Plain(_) => "plain".to_owned(),
        BlockScales::Shifted { .. } => "shifted".to_owned(),
        BlockScales::Nested { offset, .. } => offset.to_bits().to_string(),
    };
    match matrix {
        Matrix::Dense(_) => None,
        Matrix::Quantised(codes) => Some(format!("{} {} {}", codes.coding, codes.block_len, scales(&codes.scales))),
        Matrix::Blocks(blocks) => Some(blocks.kind.to_string()),
    }
}

/// The matrix of that form over its bytes; `None` where they do not fit.
pub(super) fn over(form: &str, pages: Pages, shape: [usize; 2], device: &Device) -> Option<Matrix> {
    let len = pages.as_ref().len();
    match form.split(' ').collect::<Vec<_>>()[..] {
        [kind] => {
            let kind = KINDS.into_iter().find(|known| known.to_string() == kind)?;
            let is_whole =
                len.checked_mul(kind.block_size())? == (shape[0] * shape[1]).checked_mul(kind.type_size()?)?;
            is_whole.then(|| Matrix::Blocks(Arc::new(Blocks::new(shape, kind, pages.shared()))))
        }
        [coding, block_len, scales] => {
            let coding = Coding::ALL.into_iter().find(|known| known.to_string() == coding)?;
            let scales = match scales {
                "plain" => BlockScales::Plain(()),
                "shifted" => BlockScales::Shifted { scales: (), zeros: () },
                offset => {
                    let offset = f32::from_bits(offset.parse().ok()?);
                    BlockScales::Nested { codes: (), table: (), scales: (), offset }
                }
            };
            let described = Quantised { shape, coding, codes: (), block_len: block_len.parse().ok()?, scales };
            let is_whole = described.block_len > 0 && described.num_bytes() == len && pages.is_aligned(Dtype::F32);
            is_whole.then(|| Matrix::Quantised(Arc::new(codes(&described.lengths(), pages, device))))
        }
        _ => None,
    }
}

fn codes(lengths: &Quantised<usize, usize>, pages: Pages, device: &Device) -> Quantised {
    let rest = RefCell::new(pages);
    let take = |num_bytes| rest.borrow_mut().take(num_bytes);
    lengths.map(
        |len| take(size_of::<f32>() * len).tensor([*len], Dtype::F32, device),
        |len| bytes_tensor(take(*len).shared(), device),
    )
}
