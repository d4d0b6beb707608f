//! Keeps compiled kernels, and which of several was the fastest, on disk between runs. The first step then takes
//! seconds, without compiling and measuring again.

use cubecl_runtime::config::cache::CacheConfig;
use cubecl_runtime::config::{CubeClRuntimeConfig, RuntimeConfig};

/// Turns the caches on, in `cubecl` under the user's cache folder (`XDG_CACHE_HOME`, `~/.cache`), with kernels of each
/// `compiler` apart: an older driver refuses what a newer one's NVRTC made. A `cubecl.toml` and `CubeCL`'s environment
/// variables still apply and may name another folder.
///
/// Must be called before anything is computed on a GPU; later calls have no effect.
pub(super) fn keep_between_runs(compiler: Option<String>) {
    let mut config = CubeClRuntimeConfig::from_current_dir().override_from_env();
    // Off by default.
    config.compilation.cache = true;
    // The default lies in the folder of a Cargo.toml above the current folder: arbitrary for a program that can be
    // started anywhere.
    if matches!(config.environment.path, CacheConfig::Target) {
        config.environment.path = CacheConfig::Global;
    }
    if let Some(compiler) =
        compiler.filter(|_| config.environment.name == CubeClRuntimeConfig::default().environment.name)
    {
        config.environment.name = compiler;
    }
    CubeClRuntimeConfig::try_set(config);
}
