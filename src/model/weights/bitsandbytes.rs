//! Matrices that bitsandbytes has quantised, as its checkpoints hold them: their codes are ours, byte for byte.

use burn::tensor::{Bytes, Device, Tensor};
use safetensors::Dtype::{F32, I8, U8};
use serde::Deserialize;

use super::convert;
use super::files::{StoredTensor, WeightFiles};
use crate::device::Dtype;
use crate::ops::cpu::NESTED_LEN;
use crate::ops::host;
use crate::ops::quantised::{BlockScales, Coding, Quantised, bytes_tensor};
use crate::spec::Method;

/// Block lengths that bitsandbytes has kernels for.
const BLOCK_LENS: [usize; 8] = [32, 64, 128, 256, 512, 1024, 2048, 4096];
/// Most bytes of a [`QuantState`].
const STATE_BYTES: usize = 4096;

/// A matrix of codes that was found in the files and is sound.
pub(super) struct StoredCodes<'a> {
    shape: [usize; 2],
    coding: Coding,
    block_len: usize,
    codes: &'a StoredTensor,
    scales: &'a StoredTensor,
    nested: Option<NestedScales<'a>>,
}

struct NestedScales<'a> {
    table: &'a StoredTensor,
    scales: &'a StoredTensor,
    offset: f32,
}

/// What bitsandbytes writes of a matrix beside its tensors, as JSON.
#[derive(Deserialize)]
struct QuantState {
    quant_type: String,
    blocksize: usize,
    shape: Vec<usize>,
    nested_blocksize: Option<usize>,
    nested_offset: Option<f32>,
}

/// Names of the tensors that may belong to the matrix `name` beside itself.
pub(super) fn tensors_beside(name: &str, method: Method) -> Vec<String> {
    let module = name.strip_suffix(".weight").unwrap_or(name);
    match method {
        Method::Int8 => vec![format!("{module}.SCB"), format!("{module}.weight_format")],
        _ => {
            let parts = ["absmax", "quant_map", "nested_absmax", "nested_quant_map"];
            parts.map(|part| format!("{name}.{part}")).into_iter().chain([state_name(name, method)]).collect()
        }
    }
}

fn state_name(name: &str, method: Method) -> String {
    format!("{name}.quant_state.bitsandbytes__{}", if matches!(method, Method::Fp4 { .. }) { "fp4" } else { "nf4" })
}

/// Finds the matrix `name` and the tensors beside it.
pub(super) fn find<'a>(
    files: &'a WeightFiles,
    name: &str,
    shape: [usize; 2],
    method: Method,
) -> Result<StoredCodes<'a>, String> {
    match method {
        Method::Nf4 { .. } => four_bits(files, name, shape, Coding::Nf4, &state_name(name, method)),
        Method::Fp4 { .. } => four_bits(files, name, shape, Coding::Fp4, &state_name(name, method)),
        _ => eight_bits(files, name, shape),
    }
}

fn four_bits<'a>(
    files: &'a WeightFiles,
    name: &str,
    shape: [usize; 2],
    coding: Coding,
    state_name: &str,
) -> Result<StoredCodes<'a>, String> {
    let part = |part: &str| format!("{name}.{part}");
    let codes = files.tensors().get(name).ok_or_else(|| format!("missing: `{name}` {shape:?}"))?;
    let state = QuantState::read(files, state_name, shape, coding)?;
    let len = shape[0] * shape[1];
    // Four-bit codes lie in tensors of any type, which say nothing about them but their number.
    let num_bytes = files.bytes(codes).len();
    if num_bytes != len.div_ceil(2) {
        return Err(format!("misshapen: `{name}` has {num_bytes} bytes, expected {} for {shape:?}", len.div_ceil(2)));
    }
    let table = files.part(&part("quant_map"), &[16], F32)?;
    let table = convert::to_f32(&files.bytes(table), Dtype::F32);
    if coding.table().is_some_and(|known| table.iter().zip(known).any(|(x, known)| (x - known).abs() > 1e-6)) {
        return Err(format!("`{}` has other numbers than bitsandbytes decodes with", part("quant_map")));
    }
    let num_blocks = len.div_ceil(state.blocksize);
    let nested = state.nested_offset.map(|offset| {
        let scales = files.part(&part("nested_absmax"), &[num_blocks.div_ceil(NESTED_LEN)], F32)?;
        Ok::<_, String>(NestedScales { table: files.part(&part("nested_quant_map"), &[256], F32)?, scales, offset })
    });
    let scales = files.part(&part("absmax"), &[num_blocks], if nested.is_some() { U8 } else { F32 })?;
    Ok(StoredCodes { shape, coding, block_len: state.blocksize, codes, scales, nested: nested.transpose()? })
}

fn eight_bits<'a>(files: &'a WeightFiles, name: &str, shape: [usize; 2]) -> Result<StoredCodes<'a>, String> {
    let module = name.strip_suffix(".weight").unwrap_or(name);
    let codes = files.part(name, &shape, I8)?;
    let scales = files.part(&format!("{module}.SCB"), &[shape[0]], F32)?;
    // Other formats have the layout that old GPUs need.
    if let Some(format) = files.tensors().get(&format!("{module}.weight_format"))
        && *files.bytes(format) != [0]
    {
        return Err(format!("`{module}.weight_format` is {:?}, expected 0: rows", files.bytes(format)));
    }
    Ok(StoredCodes { shape, coding: Coding::Int8, block_len: shape[1], codes, scales, nested: None })
}

impl QuantState {
    fn read(files: &WeightFiles, name: &str, shape: [usize; 2], coding: Coding) -> Result<Self, String> {
        let stored = files.tensors().get(name).ok_or_else(|| format!("missing: `{name}`"))?;
        let bytes = files.bytes(stored);
        let state: Self = serde_json::from_slice(&bytes[..bytes.len().min(STATE_BYTES)])
            .map_err(|error| format!("`{name}` is not what bitsandbytes writes: {error}"))?;
        let wrong = |what: &str, found: &dyn std::fmt::Debug, expected: &dyn std::fmt::Debug| {
            Err(format!("`{name}` says `{what}` = {found:?}, expected {expected:?}"))
        };
        let quant_type = if coding == Coding::Fp4 { "fp4" } else { "nf4" };
        if state.quant_type != quant_type {
            return wrong("quant_type", &state.quant_type, &quant_type);
        }
        if state.shape != shape {
            return wrong("shape", &state.shape, &shape);
        }
        if !BLOCK_LENS.contains(&state.blocksize) {
            return wrong("blocksize", &state.blocksize, &BLOCK_LENS);
        }
        let nested_len = state.nested_blocksize.unwrap_or_default();
        if state.nested_offset.is_some() && nested_len != NESTED_LEN {
            return wrong("nested_blocksize", &nested_len, &NESTED_LEN);
        }
        Ok(state)
    }
}

impl StoredCodes<'_> {
    /// Copies the codes and scales to a device.
    pub(super) fn read(self, files: &WeightFiles, device: &Device) -> Quantised {
        let bytes = |stored: &StoredTensor| {
            let bytes = bytes_tensor(Bytes::from_elems(files.bytes(stored).to_vec()), device);
            files.release(stored);
            bytes
        };
        let numbers = |stored: &StoredTensor| -> Tensor<1> {
            let mut numbers = convert::to_f32(&files.bytes(stored), Dtype::F32);
            if self.coding == Coding::Int8 {
                numbers.iter_mut().for_each(|most| *most /= 127.0);
            }
            let shape = [numbers.len()];
            host::tensor(numbers, shape, device)
        };
        let scales = match &self.nested {
            None => BlockScales::Plain(numbers(self.scales)),
            Some(NestedScales { table, scales, offset }) => BlockScales::Nested {
                codes: bytes(self.scales),
                table: numbers(table),
                scales: numbers(scales),
                offset: *offset,
            },
        };
        let Self { shape, coding, block_len, codes, .. } = self;
        Quantised { shape, coding, codes: bytes(codes), block_len, scales }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::path::Path;

    use safetensors::SafeTensors;
    use safetensors::tensor::TensorView;

    use super::super::stored;
    use super::*;

    const SHAPE: [usize; 2] = [70, 257];
    const NAME: &str = "lm_head.weight";
    const NF4_TABLE: [f32; 16] = crate::ops::quantised::NF4;
    const NF4: Method = Method::Nf4 { nested: false };

    type Tensors = BTreeMap<String, (safetensors::Dtype, Vec<usize>, Vec<u8>)>;

    /// A method, a change of its checkpoint, and a part of the refusal.
    type Case<'a> = (Method, &'a dyn Fn(&mut Tensors), &'static str);

    /// The matrix of the golden file as bitsandbytes writes it in `method`.
    fn checkpoint(method: Method) -> Tensors {
        let golden = SafeTensors::deserialize(include_bytes!("../../../tests/golden/quantised.safetensors")).unwrap();
        let part = |name: &str| {
            let view = golden.tensor(name).unwrap();
            (view.dtype(), view.shape().to_vec(), view.data().to_vec())
        };
        let mut tensors = Tensors::new();
        let mut add = |name: &str, part| tensors.insert(name.replace('*', NAME), part);
        let (kind, nested, coding) = match method {
            Method::Int8 => {
                add("*", (I8, SHAPE.to_vec(), part("int8.codes").2));
                add("lm_head.SCB", part("int8.scb"));
                add("lm_head.weight_format", (U8, vec![], vec![0]));
                return tensors;
            }
            Method::Nf4 { nested } => ("nf4", nested, Coding::Nf4),
            Method::Fp4 { nested } => ("fp4", nested, Coding::Fp4),
            _ => unreachable!(),
        };
        let offset = f32::from_le_bytes(part(&format!("{kind}.offset")).2.try_into().unwrap());
        let state = format!(r#"{{"quant_type": "{kind}", "blocksize": 64, "dtype": "bfloat16", "shape": [70, 257]"#);
        let more =
            if nested { format!(r#", "nested_blocksize": 256, "nested_offset": {offset}}}"#) } else { "}".into() };
        let state = (state + &more).into_bytes();
        add(&format!("*.quant_state.bitsandbytes__{kind}"), (U8, vec![state.len()], state));
        let table = coding.table().unwrap().iter().flat_map(|x| x.to_le_bytes()).collect();
        add("*.quant_map", (F32, vec![16], table));
        let codes = part(&format!("{kind}.codes"));
        add("*", (U8, vec![codes.2.len(), 1], codes.2));
        if nested {
            add("*.absmax", part(&format!("{kind}.nested_codes")));
            add("*.nested_absmax", part(&format!("{kind}.nested_absmax")));
            add("*.nested_quant_map", part("nested_table"));
        } else {
            add("*.absmax", part(&format!("{kind}.absmax")));
        }
        tensors
    }

    fn open(folder: &Path, tensors: &Tensors) -> WeightFiles {
        let views = tensors
            .iter()
            .map(|(name, (dtype, shape, bytes))| (name, TensorView::new(*dtype, shape.clone(), bytes).unwrap()));
        safetensors::serialize_to_file(views, None, &folder.join("model.safetensors")).unwrap();
        WeightFiles::open(folder).unwrap()
    }

    fn decoded(tensors: &Tensors, method: Method) -> Vec<f32> {
        let folder = tempfile::tempdir().unwrap();
        let files = open(folder.path(), tensors);
        let matrix = stored::load(&files, NAME, SHAPE, method, Dtype::F32, &Device::flex()).unwrap();
        matrix.dense().into_owned().into_data().try_to_vec().unwrap()
    }

    #[test]
    fn a_checkpoint_decodes_to_the_numbers_of_bitsandbytes() {
        let golden = SafeTensors::deserialize(include_bytes!("../../../tests/golden/quantised.safetensors")).unwrap();
        let numbers = |name: &str| convert::to_f32(golden.tensor(name).unwrap().data(), Dtype::F32);
        for (method, kind) in [(Method::Nf4 { nested: true }, "nf4"), (Method::Fp4 { nested: true }, "fp4")] {
            let some: Vec<f32> = decoded(&checkpoint(method), method).into_iter().step_by(37).collect();
            assert_eq!(some, numbers(&format!("{kind}.decoded")), "{kind}");
        }
        let scales = numbers("int8.scb");
        let expected = golden.tensor("int8.codes").unwrap().data().iter().enumerate();
        let expected: Vec<f32> =
            expected.map(|(i, code)| f32::from(code.cast_signed()) * (scales[i / SHAPE[1]] / 127.0)).collect();
        assert_eq!(decoded(&checkpoint(Method::Int8), Method::Int8), expected);
    }

    #[test]
    fn blocks_may_have_any_legal_length() {
        let codes = checkpoint(NF4)[NAME].2.clone();
        let expected: Vec<f32> =
            codes.iter().flat_map(|byte| [byte >> 4, byte & 15]).map(|code| NF4_TABLE[usize::from(code)]).collect();
        for block_len in BLOCK_LENS {
            let mut tensors = checkpoint(NF4);
            let ones = vec![1f32; (SHAPE[0] * SHAPE[1]).div_ceil(block_len)];
            let absmax = (F32, vec![ones.len()], bytemuck::cast_slice(&ones).to_vec());
            tensors.insert(format!("{NAME}.absmax"), absmax);
            edit_state(&mut tensors, "64", &block_len.to_string());
            assert_eq!(decoded(&tensors, NF4), expected, "{block_len}");
        }
    }

    fn edit_state(tensors: &mut Tensors, from: &str, to: &str) {
        let name = tensors.keys().find(|name| name.contains("quant_state")).unwrap().clone();
        let (_, shape, bytes) = tensors.get_mut(&name).unwrap();
        *bytes = String::from_utf8(bytes.clone()).unwrap().replace(from, to).into_bytes();
        *shape = vec![bytes.len()];
    }

    #[test]
    fn every_damage_of_a_checkpoint_is_named() {
        let nested = Method::Nf4 { nested: true };
        let refusal = |method: Method, change: &dyn Fn(&mut Tensors)| {
            let (mut tensors, folder) = (checkpoint(method), tempfile::tempdir().unwrap());
            change(&mut tensors);
            let files = open(folder.path(), &tensors);
            stored::load(&files, NAME, SHAPE, method, Dtype::F32, &Device::flex()).unwrap_err().to_string()
        };
        let without = |part: &'static str| {
            move |tensors: &mut Tensors| tensors.retain(|name, _| name.strip_prefix("lm_head.").unwrap() != part)
        };
        let state = |from: &'static str, to: &'static str| move |tensors: &mut Tensors| edit_state(tensors, from, to);
        let part = |name: &'static str, dtype, shape: &'static [usize]| {
            move |tensors: &mut Tensors| {
                let bytes = vec![1; shape.iter().product::<usize>() * (if dtype == F32 { 4 } else { 1 })];
                tensors.insert(format!("lm_head.{name}"), (dtype, shape.to_vec(), bytes));
            }
        };
        let cases: [Case; 19] = [
            (NF4, &without("weight"), "missing: `lm_head.weight`"),
            (NF4, &without("weight.absmax"), "missing: `lm_head.weight.absmax` [282]"),
            (NF4, &without("weight.quant_map"), "missing: `lm_head.weight.quant_map`"),
            (NF4, &without("weight.quant_state.bitsandbytes__nf4"), "missing: `lm_head.weight.quant_state"),
            (nested, &without("weight.nested_absmax"), "missing: `lm_head.weight.nested_absmax` [2]"),
            (nested, &without("weight.nested_quant_map"), "missing: `lm_head.weight.nested_quant_map` [256]"),
            (Method::Int8, &without("SCB"), "missing: `lm_head.SCB` [70]"),
            (NF4, &part("weight", U8, &[8994, 1]), "has 8994 bytes, expected 8995 for [70, 257]"),
            (NF4, &part("weight.absmax", U8, &[282]), "`lm_head.weight.absmax` is U8, expected F32"),
            (NF4, &part("weight.quant_map", F32, &[16]), "has other numbers than bitsandbytes decodes with"),
            (nested, &part("weight.nested_quant_map", F32, &[255]), "is [255], expected [256]"),
            (Method::Int8, &part("weight_format", U8, &[1]), "is [1], expected 0: rows"),
            (Method::Int8, &part("weight", I8, &[70, 256]), "is [70, 256], expected [70, 257]"),
            (NF4, &state("64", "65"), "says `blocksize` = 65, expected [32, 64,"),
            (NF4, &state("64", "32"), "`lm_head.weight.absmax` is [282], expected [563]"),
            (NF4, &state("[70, 257]", "[257, 70]"), "says `shape` = [257, 70], expected [70, 257]"),
            (NF4, &state("nf4", "fp4"), "says `quant_type` = \"fp4\", expected \"nf4\""),
            (NF4, &state("}", ""), "is not what bitsandbytes writes: EOF"),
            (nested, &state("256", "128"), "says `nested_blocksize` = 128, expected 256"),
        ];
        for (method, change, expected) in cases {
            let found = refusal(method, change);
            assert!(found.contains(expected), "{found}\nexpected: {expected}");
        }
    }
}
