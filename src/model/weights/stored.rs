//! Matrices that are stored quantised, in the formats of config.json's `quantization_config`.

use std::sync::Arc;

use burn::tensor::Device;

use super::bitsandbytes::{self, StoredCodes};
use super::convert::Overflow;
use super::files::{WeightFiles, overflow};
use super::floats::{self, PackedFloats, StoredFloats};
use super::words::{self, StoredWords};
use crate::device::Dtype;
use crate::ops::linear::Matrix;
use crate::schema::Problem;
use crate::spec::Method;

/// A quantised matrix that was found in the files and is sound.
pub(super) enum StoredMatrix<'a> {
    Codes(StoredCodes<'a>),
    Words(StoredWords<'a>),
    Floats(StoredFloats<'a>),
    PackedFloats(PackedFloats<'a>),
}

/// One matrix that is stored quantised; in `dtype` where its order leaves no blocks. The error names a tensor of it that is
/// missing or does not fit the others, or a number that does not fit `dtype`.
pub(super) fn load(
    files: &WeightFiles,
    name: &str,
    shape: [usize; 2],
    method: Method,
    dtype: Dtype,
    device: &Device,
) -> Result<Matrix, Problem> {
    let found = StoredMatrix::find(files, name, shape, method).map_err(|problem| files.mismatch(&[problem]))?;
    found.read(files, dtype, device).map_err(|_| overflow(&files.folder, name, dtype))
}

/// Names of the tensors that a quantised matrix `name` may have beside itself.
pub(super) fn tensors_beside(name: &str, method: Method) -> Vec<String> {
    let module = name.strip_suffix(".weight").unwrap_or(name);
    match method {
        Method::Words(words) => words::tensors_of(module, words.packer),
        Method::Fp8 { .. } | Method::Mxfp4 | Method::Nvfp4 => floats::tensors_of(module),
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
            Method::Fp8 { tile } => floats::find(files, name, shape, tile).map(Self::Floats),
            Method::Mxfp4 | Method::Nvfp4 => floats::find_packed(files, module, shape, method).map(Self::PackedFloats),
            Method::Nf4 { .. } | Method::Fp4 { .. } | Method::Int8 => {
                bitsandbytes::find(files, name, shape, method).map(Self::Codes)
            }
            Method::Gguf => Err("its file is GGUF".to_owned()),
        }
    }

    /// Copies the matrix to a device: as codes, or in `dtype` where its order leaves no blocks.
    fn read(self, files: &WeightFiles, dtype: Dtype, device: &Device) -> Result<Matrix, Overflow> {
        match self {
            Self::Codes(codes) => Ok(Matrix::Quantised(Arc::new(codes.read(files, device)))),
            Self::Words(words) => words.read(files, dtype, device),
            Self::Floats(floats) => Ok(floats.read(files, device)),
            Self::PackedFloats(floats) => Ok(Matrix::Quantised(Arc::new(floats.read(files, device)))),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use burn::tensor::Tensor;
    use safetensors::SafeTensors;
    use safetensors::tensor::TensorView;

    use super::*;
    use crate::config::ModelOptions;
    use crate::device::DeviceKind;
    use crate::model::weights::convert;
    use crate::model::weights::fixture::tiny_config;
    use crate::ops::place::place_on;
    use crate::ops::quantised::{BlockScales, Coding, FP8};
    use crate::spec::{ModelConfig, Packer, StoredQuantisation, Words};

    const SHAPE: [usize; 2] = [64, 96];
    const WORDS: Words = Words {
        bits: 4,
        group_len: Some(32),
        packer: Packer::Gptq,
        is_symmetric: false,
        zeros_less_one: true,
        is_reordered: false,
    };
    const GPTQ: Method = Method::Words(WORDS);
    const AWQ: Method = Method::Words(Words { packer: Packer::Awq, zeros_less_one: false, ..WORDS });
    const INT: Words = Words { packer: Packer::CompressedTensors, zeros_less_one: false, ..WORDS };
    const TILES: Method = Method::Fp8 { tile: Some([48, 32]) };

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
        super::load(&files, "lm_head.weight", SHAPE, method, Dtype::F32, &Device::flex())
    }

    /// Numbers as the packers decode them: rounded to `dtype`.
    fn rounded(values: &Tensor<2>, dtype: Dtype) -> Vec<f32> {
        let values: Vec<f32> = values.to_data().try_to_vec().unwrap();
        convert::to_f32(&convert::from_f32(&values, dtype).unwrap(), dtype)
    }

    #[test]
    fn words_and_floats_decode_to_the_numbers_of_their_packers_to_the_bit_and_take_the_memory_that_is_planned() {
        let [symmetric, ordered, eight] =
            [Words { is_symmetric: true, ..WORDS }, Words { is_reordered: true, ..WORDS }, Words { bits: 8, ..WORDS }]
                .map(Method::Words);
        for (case, method, block_len, is_plain) in [
            ("gptq4", symmetric, Some(32), true),
            ("gptq4_zeros", GPTQ, Some(32), false),
            ("gptq4_ordered", ordered, None, false),
            ("gptq8", eight, Some(32), false),
            ("awq", AWQ, Some(32), false),
            ("int4", Method::Words(Words { is_symmetric: true, ..INT }), Some(32), true),
            ("int4_zeros", Method::Words(INT), Some(32), false),
            ("int8_rows", Method::Words(Words { bits: 8, group_len: None, is_symmetric: true, ..INT }), Some(96), true),
            ("fp8", TILES, Some(32), true),
            ("fp8_rows", Method::Fp8 { tile: None }, Some(96), true),
            ("fp8_all", Method::Fp8 { tile: None }, Some(96), true),
            ("mxfp4", Method::Mxfp4, Some(32), false),
            ("nvfp4", Method::Nvfp4, Some(16), false),
        ] {
            let matrix = load(&tensors(case), method).unwrap();
            let golden = golden();
            let expected = golden.tensor(&format!("{case}.decoded")).unwrap();
            let dtype = convert::float_dtype(expected.dtype()).unwrap();
            assert!(rounded(&matrix.dense(), dtype) == convert::to_f32(expected.data(), dtype), "{case}");
            let found = match &matrix {
                Matrix::Quantised(codes) => {
                    assert!(
                        codes.to_f32() == codes.decoded(Dtype::F32.into()).to_data().try_to_vec::<f32>().unwrap(),
                        "{case}"
                    );
                    Some((codes.block_len, matches!(codes.scales, BlockScales::Plain(_))))
                }
                Matrix::Dense(_) | Matrix::Blocks(_) => None,
            };
            assert_eq!(found, block_len.map(|len| (len, is_plain)), "{case}");
            let quantisation = StoredQuantisation { method, whole: Vec::new(), blocks: BTreeMap::new() };
            let config = ModelConfig { quantisation: Some(quantisation), ..tiny_config() };
            let storage = ModelOptions::default().storage(Dtype::F32, Some(&config));
            let planned =
                storage.tensor_bytes(&config, "model.layers.0.mlp.up_proj.weight", &SHAPE, place_on(DeviceKind::Cpu));
            assert_eq!(matrix.parts().iter().map(|part| part.len()).sum::<usize>(), planned, "{case}");
        }
    }

    #[test]
    fn floats_of_eight_bits_and_scales_of_mxfp4_are_those_of_pytorch() {
        let bits = |numbers: Vec<f32>| numbers.into_iter().map(f32::to_bits).collect::<Vec<_>>();
        let expected = |name| bits(convert::to_f32(golden().tensor(name).unwrap().data(), Dtype::F32));
        assert_eq!(bits(FP8.map(|x| if x.is_nan() { 0.0 } else { x }).to_vec()), expected("fp8_numbers"));
        assert_eq!(bits(floats::powers()), expected("mxfp4_scales"));
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
            .map(|(tensors, method)| rounded(&load(&tensors, method).unwrap().dense(), Dtype::F16));
        assert!(first == second);
    }

    #[test]
    fn every_damage_is_named() {
        let cases: [(&str, Method, &str, &[usize], &str); 13] = [
            ("gptq4", GPTQ, "qweight", &[11, 64], "`lm_head.qweight` is [11, 64], expected [12, 64]"),
            ("gptq4", GPTQ, "qzeros", &[2, 8], "`lm_head.qzeros` is [2, 8], expected [3, 8]"),
            ("gptq4", GPTQ, "scales", &[], "missing: `lm_head.scales` [3, 64]"),
            ("gptq4", GPTQ, "g_idx", &[96], "`lm_head.g_idx` names group 16843009 of 3"),
            ("awq", AWQ, "qweight", &[96, 7], "`lm_head.qweight` is [96, 7], expected [96, 8]"),
            ("awq", GPTQ, "", &[], "`lm_head.qweight` is [96, 8], expected [12, 64]"),
            ("fp8", TILES, "weight_scale", &[], "missing: `lm_head.weight_scale_inv` [2, 3]"),
            ("fp8_rows", TILES, "weight_scale", &[63], "`lm_head.weight_scale` is [63], expected [2, 3]"),
            ("int4", Method::Words(INT), "", &[], "missing: `lm_head.weight_zero_point` [8, 3]"),
            ("int4", Method::Words(INT), "weight_packed", &[12, 64], "is [12, 64], expected [64, 12]"),
            ("mxfp4", Method::Nvfp4, "", &[], "`lm_head.weight_scale` is [64, 3], expected [64, 6]"),
            ("mxfp4", Method::Mxfp4, "weight_packed", &[64, 47], "is [64, 47], expected [64, 48]"),
            ("nvfp4", Method::Nvfp4, "weight_global_scale", &[], "missing: `lm_head.weight_global_scale` [1]"),
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
