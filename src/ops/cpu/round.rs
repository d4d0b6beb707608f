//! Rounding to bfloat16.

/// The nearest bfloat16, ties to even; a NaN stays a NaN.
#[inline(always)]
pub(super) fn round(x: f32) -> u16 {
    let bits = x.to_bits();
    let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1));
    (if x.is_nan() { bits | 0x0040_0000 } else { rounded } >> 16) as u16
}
