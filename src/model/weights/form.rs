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

#[cfg(test)]
mod tests {
    use std::fs::File;

    use memmap2::Mmap;

    use super::*;

    #[test]
    #[expect(unsafe_code, reason = "a file can only be mapped so")]
    fn bytes_that_do_not_fit_their_form_are_refused() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), vec![0; 4 * (4 + 1 + 256) + 8 + 256]).unwrap();
        // SAFETY: nothing else writes to the file.
        let map = Arc::new(unsafe { Mmap::map(&File::open(file.path()).unwrap()) }.unwrap());
        let shape = [8, 64];
        for (form, start, num_bytes) in [
            ("nf4 64 plain", 0, 256 + 4 * 8),
            ("nf4 128 shifted", 4, 256 + 8 * 4),
            ("nf4 64 1065353216", 0, 256 + 8 + 4 * (1 + 256)),
            ("fp8 64 plain", 0, 512 + 4 * 8),
            ("Q4_0", 1, 16 * 18),
        ] {
            let open = |form: &str, start: usize, num_bytes: usize| {
                over(form, Pages::new(&map, start..start + num_bytes), shape, &Device::flex())
            };
            let matrix = open(form, start, num_bytes).unwrap();
            assert_eq!((matrix.dims(), super::form(&matrix)), (shape, Some(form.to_owned())));
            let parts: usize = matrix.parts().iter().map(|part| part.len()).sum();
            assert_eq!(parts, num_bytes, "{form}");
            assert!(open(form, start, num_bytes - 1).is_none() && open(form, start, num_bytes + 1).is_none(), "{form}");
            assert_eq!(open(form, start + 2, num_bytes).is_none(), form.contains(' '), "{form}: not aligned");
        }
        for form in ["nf4 0 plain", "nf4 64 ", "nf5 64 plain", "nf4 64", "Q4_9", ""] {
            assert!(over(form, Pages::new(&map, 0..256 + 4 * 8), shape, &Device::flex()).is_none(), "{form}");
        }
    }
}
