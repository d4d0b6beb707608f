//! Converts between storage types, in parallel, directly into the buffer that becomes a tensor.

use burn::tensor::{Bytes, bf16, f16};
use half::slice::HalfFloatSliceExt;
use rayon::prelude::*;

use crate::device::Dtype;

/// Elements that a thread converts per task: 1 MiB of `f32`.
const CHUNK_ELEMENTS: usize = 1 << 18;
/// Elements converted at a time: they fit into the first-level cache.
pub(super) const BLOCK_ELEMENTS: usize = 1 << 11;

/// A finite number became infinite in the target type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Overflow;

/// The float type of a safetensors type; `None` where it is no floating-point type that can be loaded.
#[must_use]
pub fn float_dtype(stored: safetensors::Dtype) -> Option<Dtype> {
    match stored {
        safetensors::Dtype::F32 => Some(Dtype::F32),
        safetensors::Dtype::BF16 => Some(Dtype::Bf16),
        safetensors::Dtype::F16 => Some(Dtype::F16),
        _ => None,
    }
}

/// The safetensors type of a storage type.
#[must_use]
pub fn stored_dtype(dtype: Dtype) -> safetensors::Dtype {
    match dtype {
        Dtype::F32 => safetensors::Dtype::F32,
        Dtype::Bf16 => safetensors::Dtype::BF16,
        Dtype::F16 => safetensors::Dtype::F16,
    }
}

/// Converts little-endian numbers of type `from` into a fresh buffer of type `to`.
///
/// # Errors
/// Where a number is too large for `to`, which only happens with `f16`.
pub fn into_buffer(source: &[u8], from: Dtype, to: Dtype) -> Result<Bytes, Overflow> {
    buffer(source.len() / from.num_bytes(), to, |target| fill(source, from, target, to))
}

/// A new buffer of numbers of type `to`. `block` writes them as `f32`, starting at the element that it gets.
///
/// # Errors
/// Where a number is too large for `to`, which only happens with `f16`.
pub fn generate(num_elements: usize, to: Dtype, block: impl Fn(usize, &mut [f32]) + Sync) -> Result<Bytes, Overflow> {
    buffer(num_elements, to, |target| fill_blocks(target, to, block))
}

/// Converts little-endian numbers of type `from` to `f32`.
#[must_use]
pub fn to_f32(source: &[u8], from: Dtype) -> Vec<f32> {
    let mut target = vec![0f32; source.len() / from.num_bytes()];
    let filled = fill(source, from, bytemuck::cast_slice_mut(&mut target), Dtype::F32);
    debug_assert_eq!(filled, Ok(()), "every type fits f32");
    target
}

/// Converts `f32` numbers to little-endian numbers of type `to`.
///
/// # Errors
/// Where a number is too large for `to`, which only happens with `f16`.
pub fn from_f32(source: &[f32], to: Dtype) -> Result<Vec<u8>, Overflow> {
    let mut target = vec![0; source.len() * to.num_bytes()];
    fill(bytemuck::cast_slice(source), Dtype::F32, &mut target, to)?;
    Ok(target)
}

/// A buffer aligned for its type. A zeroed vector of this size is fresh system pages: nothing is written twice.
fn buffer(
    num_elements: usize,
    to: Dtype,
    fill: impl FnOnce(&mut [u8]) -> Result<(), Overflow>,
) -> Result<Bytes, Overflow> {
    match to {
        Dtype::F32 => {
            let mut target = vec![0u32; num_elements];
            fill(bytemuck::cast_slice_mut(&mut target))?;
            Ok(Bytes::from_elems(target))
        }
        Dtype::Bf16 | Dtype::F16 => {
            let mut target = vec![0u16; num_elements];
            fill(bytemuck::cast_slice_mut(&mut target))?;
            Ok(Bytes::from_elems(target))
        }
    }
}

fn fill(source: &[u8], from: Dtype, target: &mut [u8], to: Dtype) -> Result<(), Overflow> {
    if from == to {
        let chunk_bytes = CHUNK_ELEMENTS * to.num_bytes();
        let chunks = target.par_chunks_mut(chunk_bytes).zip(source.par_chunks(chunk_bytes));
        chunks.for_each(|(target, source)| target.copy_from_slice(source));
        return Ok(());
    }
    let width = from.num_bytes();
    fill_blocks(target, to, |first, wide| widen(&source[first * width..(first + wide.len()) * width], from, wide))
}

/// Writes `target` block by block, each from `f32` numbers that `block` provides.
fn fill_blocks(target: &mut [u8], to: Dtype, block: impl Fn(usize, &mut [f32]) + Sync) -> Result<(), Overflow> {
    let width = to.num_bytes();
    target.par_chunks_mut(CHUNK_ELEMENTS * width).enumerate().try_for_each(|(chunk, target)| {
        let mut wide = [0f32; BLOCK_ELEMENTS];
        for (index, target) in target.chunks_mut(BLOCK_ELEMENTS * width).enumerate() {
            let wide = &mut wide[..target.len() / width];
            block(chunk * CHUNK_ELEMENTS + index * BLOCK_ELEMENTS, wide);
            narrow(wide, target, to)?;
        }
        Ok(())
    })
}

/// Data in files may be unaligned, so every block is copied through aligned memory.
pub(super) fn widen(source: &[u8], from: Dtype, wide: &mut [f32]) {
    let mut bits = [0u16; BLOCK_ELEMENTS];
    let bits = &mut bits[..wide.len()];
    match from {
        Dtype::F32 => bytemuck::cast_slice_mut(wide).copy_from_slice(source),
        Dtype::Bf16 => {
            bytemuck::cast_slice_mut(bits).copy_from_slice(source);
            for (wide, bits) in wide.iter_mut().zip(&*bits) {
                *wide = f32::from_bits(u32::from(*bits) << 16);
            }
        }
        Dtype::F16 => {
            bytemuck::cast_slice_mut(bits).copy_from_slice(source);
            bytemuck::cast_slice::<u16, f16>(bits).convert_to_f32_slice(wide);
        }
    }
}

fn narrow(wide: &[f32], target: &mut [u8], to: Dtype) -> Result<(), Overflow> {
    let mut bits = [0u16; BLOCK_ELEMENTS];
    let bits = &mut bits[..wide.len()];
    match to {
        Dtype::F32 => target.copy_from_slice(bytemuck::cast_slice(wide)),
        Dtype::Bf16 => {
            bytemuck::cast_slice_mut::<u16, bf16>(bits).convert_from_f32_slice(wide);
            target.copy_from_slice(bytemuck::cast_slice(bits));
        }
        Dtype::F16 => {
            bytemuck::cast_slice_mut::<u16, f16>(bits).convert_from_f32_slice(wide);
            if bits.iter().zip(wide).any(|(bits, wide)| bits & 0x7fff == 0x7c00 && wide.is_finite()) {
                return Err(Overflow);
            }
            target.copy_from_slice(bytemuck::cast_slice(bits));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// More than one chunk, and not a whole number of blocks.
    const NUM_ELEMENTS: usize = CHUNK_ELEMENTS + BLOCK_ELEMENTS + 3;

    fn numbers() -> Vec<f32> {
        #[allow(clippy::cast_precision_loss)]
        let numbers = (0..NUM_ELEMENTS).map(|i| ((i * 7919) % 100_003) as f32 * 1.37e-3 - 60.0).collect();
        numbers
    }

    #[test]
    fn conversions_are_those_of_the_half_crate_at_any_alignment() {
        let numbers = numbers();
        let as_bf16: Vec<bf16> = numbers.iter().copied().map(bf16::from_f32).collect();
        let as_f16: Vec<f16> = numbers.iter().copied().map(f16::from_f32).collect();
        let bytes = |dtype| from_f32(&numbers, dtype).unwrap();
        assert_eq!(bytes(Dtype::F32), bytemuck::cast_slice::<f32, u8>(&numbers));
        assert_eq!(bytes(Dtype::Bf16), bytemuck::cast_slice::<bf16, u8>(&as_bf16));
        assert_eq!(bytes(Dtype::F16), bytemuck::cast_slice::<f16, u8>(&as_f16));

        let shifted: Vec<u8> = std::iter::once(0).chain(bytes(Dtype::Bf16)).collect();
        let expected: Vec<f32> = as_bf16.iter().map(|number| number.to_f32()).collect();
        assert_eq!(to_f32(&shifted[1..], Dtype::Bf16), expected);
        let expected: Vec<f32> = as_f16.iter().map(|number| number.to_f32()).collect();
        assert_eq!(to_f32(&bytes(Dtype::F16), Dtype::F16), expected);

        let through = into_buffer(&bytes(Dtype::Bf16), Dtype::Bf16, Dtype::F16).unwrap();
        let expected: Vec<f16> = as_bf16.iter().map(|number| f16::from_f32(number.to_f32())).collect();
        assert_eq!(&through[..], bytemuck::cast_slice::<f16, u8>(&expected));
    }

    #[test]
    fn special_values_survive_and_f16_overflow_is_an_error() {
        let special = [f32::INFINITY, f32::NEG_INFINITY, 0.0, -0.0, f32::NAN, 65504.0];
        for dtype in Dtype::ALL {
            let back = to_f32(&from_f32(&special, dtype).unwrap(), dtype);
            assert_eq!((back[0], back[1]), (f32::INFINITY, f32::NEG_INFINITY));
            assert!(back[3].is_sign_negative() && back[4].is_nan());
        }
        assert_eq!(from_f32(&[1.0, 65536.0], Dtype::F16), Err(Overflow));
        assert!(into_buffer(&from_f32(&[1e30], Dtype::Bf16).unwrap(), Dtype::Bf16, Dtype::F16).is_err());
    }
}
