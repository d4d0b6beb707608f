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

/// The PTX of a file, as the driver takes it.
pub(super) fn text(module: &str) -> Option<&'static CStr> {
    TEXTS.get(module.as_bytes()).copied()
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use super::*;

    #[test]
    fn the_archive_has_a_text_for_every_source_and_no_other() {
        let sources = fs::read_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("src/ops/cuda/kernels")).unwrap();
        let sources = sources.map(|entry| entry.unwrap().path());
        let sources: Vec<_> = sources.filter(|path| path.extension().is_some_and(|end| end == "cu")).collect();
        for source in &sources {
            let text = text(source.file_stem().unwrap().to_str().unwrap()).map(|text| text.to_str().unwrap());
            assert!(text.is_some_and(|text| text.starts_with(".version ") && text.contains(".entry ")), "{source:?}");
        }
        assert_eq!(TEXTS.len(), sources.len());
    }
}
