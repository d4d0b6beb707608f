//! The kernels in CUDA C++ as `scripts/build_cuda_kernels.py` compiles and packs them.

use std::collections::HashMap;
use std::ffi::CStr;
use std::iter;
use std::sync::LazyLock;

/// PTX of all files, compressed by zstd: the name of each and its text, each with a zero behind it.
pub(super) static ARCHIVE: &[u8] = include_bytes!("kernels.zst");

/// By name; unpacked when the first kernel is launched.
static TEXTS: LazyLock<HashMap<&[u8], &CStr>> = LazyLock::new(|| {
    let unpacked: &[u8] = zstd::decode_all(ARCHIVE).unwrap_or_default().leak();
    let mut parts = unpacked.split_inclusive(|byte| *byte == 0).filter_map(|part| CStr::from_bytes_with_nul(part).ok());
    iter::from_fn(|| Some((parts.next()?.to_bytes(), parts.next()?))).collect()
});

/// The PTX of a file for numbers of 16 bits of this type, and for compute capability 7.5 or from 8.0 on, as the driver takes it.
/// There is one alone of a file that is for other GPUs only.
pub(super) fn text(module: &str, is_f16: bool, is_turing: bool) -> Option<&'static CStr> {
    let variant = match (is_f16, is_turing) {
        (_, true) => ".f16.75",
        (true, false) => ".f16",
        (false, false) => "",
    };
    let texts = [format!("{module}{variant}"), module.to_owned()];
    texts.iter().find_map(|name| TEXTS.get(name.as_bytes()).copied())
}

/// The names of the files.
#[cfg(test)]
pub(super) fn names() -> Vec<&'static str> {
    let mut names: Vec<_> = TEXTS.keys().map(|name| std::str::from_utf8(name).unwrap()).collect();
    names.sort_unstable();
    names
}
