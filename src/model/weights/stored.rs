//! Matrices that are stored quantised, in the formats of config.json's `quantization_config`.

use std::sync::Arc;

use burn::tensor::Device;

use super::bitsandbytes::{self, StoredCodes};
use super::convert::Overflow;
use super::files::WeightFiles;
use super::float8::{self, StoredFloats};
use super::words::{self, StoredWords};
use crate::device::Dtype;
use crate::ops::linear::Matrix;
use crate::spec::Method;

/// A quantised matrix that was found in the files and is sound.
pub(super) enum StoredMatrix<'a> {
    Codes(StoredCodes<'a>),
    Words(StoredWords<'a>),
    Floats(StoredFloats<'a>),
}

/// Names of the tensors that a quantised matrix `name` may have beside itself.
pub(super) fn tensors_beside(name: &str, method: Method) -> Vec<String> {
    let module = name.strip_suffix(".weight").unwrap_or(name);
    match method {
        Method::Words(_) => words::tensors_of(module),
        Method::Fp8 { .. } => float8::tensors_of(module),
        Method::Nf4 { .. } | Method::Fp4 { .. } | Method::Int8 => bitsandbytes::tensors_beside(name, method),
        Method::Gguf => Vec::new(),
    }
}

impl<'a> StoredMatrix<'a> {
    /// Finds the matrix `name` and the tensors beside it.
    pub(super) fn find(files: &'a WeightFiles, name: &str, shape: [usize; 2], method: Method) -> Result<Self, String> {
        let module = name.strip_suffix(".weight").unwrap_or(name);
        match method {
            Method::Words(words) => words::find(files, module, shape, words).map(Self::Words),
            Method::Fp8 { tile } => float8::find(files, name, shape, tile).map(Self::Floats),
            Method::Nf4 { .. } | Method::Fp4 { .. } | Method::Int8 => {
                bitsandbytes::find(files, name, shape, method).map(Self::Codes)
            }
            Method::Gguf => Err("its file is GGUF".to_owned()),
        }
    }

    /// Copies the matrix to a device: as codes, or in `dtype` where its order leaves no blocks.
    pub(super) fn read(self, files: &WeightFiles, dtype: Dtype, device: &Device) -> Result<Matrix, Overflow> {
        match self {
            Self::Codes(codes) => Ok(Matrix::Quantised(Arc::new(codes.read(files, device)))),
            Self::Words(words) => words.read(files, dtype, device),
            Self::Floats(floats) => Ok(floats.read(files, device)),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use burn::tensor::{Tensor, f16};
    use safetensors::SafeTensors;
    use safetensors::tensor::TensorView;

    use super::*;
    use crate::model::weights::convert;
    use crate::ops::quantised::{BlockScales, Coding, FP8};
    use crate::schema::Problem;
    use crate::spec::Words;

    const SHAPE: [usize; 2] = [64, 96];
    const WORDS: Words =
        Words { bits: 4, group_len: Some(32), is_awq: false, zeros_less_one: true, is_reordered: false };
    const GPTQ: Method = Method::Words(WORDS);
    const AWQ: Method = Method::Words(Words { is_awq: true, zeros_less_one: false, ..WORDS });
    const TILES: Method = Method::Fp8 { tile: [48, 32] };

    type Tensors = BTreeMap<String, (safetensors::Dtype, Vec<usize>, Vec<u8>)>;

    fn golden() -> SafeTensors<'static> {
        SafeTensors::deserialize(include_bytes!("../../../tests/golden/packed.safetensors")).unwrap()
    }

    /// The tensors of a case of the golden file, as those of `lm_head`.
    fn tensors(case: &str) -> Tensors {
        let parts = golden().tensors().into_iter().filter_map(|(name, view)| {
            let part = name.strip_prefix(case)?.strip_prefix('.').filter(|part| *part != "decoded")?;
            Some((format!("lm_head.{part}"), (view.dtype(), view.shape().to_vec(), view.data().to_vec())))
        });
        parts.collect()
    }

    fn load(tensors: &Tensors, method: Method) -> Result<Matrix, Problem> {
        let folder = tempfile::tempdir().unwrap();
        let views = tensors
            .iter()
            .map(|(name, (dtype, shape, bytes))| (name, TensorView::new(*dtype, shape.clone(), bytes).unwrap()));
        safetensors::serialize_to_file(views, None, &folder.path().join("model.safetensors")).unwrap();
        let files = WeightFiles::open(folder.path()).unwrap();
        files.stored_matrix("lm_head.weight", SHAPE, method, Dtype::F32, &Device::flex())
    }

    /// Numbers as the packers decode them: rounded to f16.
    fn rounded(values: &Tensor<2>) -> Vec<f16> {
        let values: Vec<f32> = values.to_data().try_to_vec().unwrap();
        values.into_iter().map(f16::from_f32).collect()
    }

    #[test]
    fn words_and_floats_decode_to_the_numbers_of_their_packers_to_the_bit() {
        let eight = Method::Words(Words { bits: 8, ..WORDS });
        for (case, method, block_len, is_plain) in [
            ("gptq4", GPTQ, Some(32), true),
            ("gptq4_zeros", GPTQ, Some(32), false),
            ("gptq4_ordered", GPTQ, None, false),
            ("gptq8", eight, Some(32), false),
            ("awq", AWQ, Some(32), false),
            ("fp8", TILES, Some(32), true),
            ("fp8_rows", TILES, Some(96), true),
            ("fp8_all", TILES, Some(96), true),
        ] {
            let matrix = load(&tensors(case), method).unwrap();
            let expected = convert::to_f32(golden().tensor(&format!("{case}.decoded")).unwrap().data(), Dtype::F16);
            let expected: Vec<f16> = expected.into_iter().map(f16::from_f32).collect();
            assert!(rounded(&matrix.dense()) == expected, "{case}");
            let found = match &matrix {
                Matrix::Quantised(codes) => Some((codes.block_len, matches!(codes.scales, BlockScales::Plain(_)))),
                Matrix::Dense(_) | Matrix::Blocks(_) => None,
            };
            assert_eq!(found, block_len.map(|len| (len, is_plain)), "{case}");
        }
    }

    #[test]
    fn floats_of_eight_bits_are_those_of_pytorch() {
        let expected = convert::to_f32(golden().tensor("fp8_numbers").unwrap().data(), Dtype::F32);
        let found = FP8.map(|x| if x.is_nan() { 0.0 } else { x });
        assert_eq!(found.map(f32::to_bits)[..], expected.iter().map(|x| x.to_bits()).collect::<Vec<_>>());
        assert_eq!(Coding::Fp8.table(), None);
    }

    #[test]
    fn zeros_of_the_second_version_of_gptq_are_stored_as_they_are() {
        let second = Method::Words(Words { zeros_less_one: false, ..WORDS });
        let mut changed = tensors("gptq4_zeros");
        for zeros in changed.get_mut("lm_head.qzeros").unwrap().2.as_chunks_mut::<4>().0 {
            // No stored zero is 15, so that nothing is carried.
            *zeros = (u32::from_le_bytes(*zeros) + 0x1111_1111).to_le_bytes();
        }
        let [first, second] = [(tensors("gptq4_zeros"), GPTQ), (changed, second)]
            .map(|(tensors, method)| rounded(&load(&tensors, method).unwrap().dense()));
        assert!(first == second);
    }

    #[test]
    fn every_damage_is_named() {
        let cases: [(&str, Method, &str, &[usize], &str); 8] = [
            ("gptq4", GPTQ, "qweight", &[11, 64], "`lm_head.qweight` is [11, 64], expected [12, 64]"),
            ("gptq4", GPTQ, "qzeros", &[2, 8], "`lm_head.qzeros` is [2, 8], expected [3, 8]"),
            ("gptq4", GPTQ, "scales", &[], "missing: `lm_head.scales` [3, 64]"),
            ("gptq4", GPTQ, "g_idx", &[96], "`lm_head.g_idx` names group 16843009 of 3"),
            ("awq", AWQ, "qweight", &[96, 7], "`lm_head.qweight` is [96, 7], expected [96, 8]"),
            ("awq", GPTQ, "", &[], "`lm_head.qweight` is [96, 8], expected [12, 64]"),
            ("fp8", TILES, "weight_scale", &[], "missing: `lm_head.weight_scale_inv` [2, 3]"),
            ("fp8_rows", TILES, "weight_scale", &[63], "`lm_head.weight_scale` is [63], expected [2, 3]"),
        ];
        for (case, method, part, shape, expected) in cases {
            let mut tensors = tensors(case);
            if let Some((dtype, _, _)) = tensors.remove(&format!("lm_head.{part}"))
                && !shape.is_empty()
            {
                let bytes = vec![1; shape.iter().product::<usize>() * dtype.bitsize() / 8];
                tensors.insert(format!("lm_head.{part}"), (dtype, shape.to_vec(), bytes));
            }
            let found = load(&tensors, method).unwrap_err().to_string();
            assert!(found.contains(expected), "{found}\nexpected: {expected}");
        }
    }
}
