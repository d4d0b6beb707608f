//! Compiled kernels, and which of several was the fastest, are kept on disk between runs: the first step then takes
//! seconds instead of compiling and measuring again.

use cubecl_runtime::config::cache::CacheConfig;
use cubecl_runtime::config::{CubeClRuntimeConfig, RuntimeConfig};

/// Turns the caches on, in `cubecl` under the user's cache folder (`XDG_CACHE_HOME`, `~/.cache`). A `cubecl.toml` and
/// `CubeCL`'s environment variables are read as ever, and may name another folder.
///
/// Must come before anything is computed on a GPU; later calls change nothing.
pub(super) fn keep_between_runs() {
    let mut config = CubeClRuntimeConfig::from_current_dir().override_from_env();
    // Off by default.
    config.compilation.cache = true;
    // The default is below the folder of a Cargo.toml above the current one: an accident for a program that is
    // started anywhere.
    if matches!(config.environment.path, CacheConfig::Target) {
        config.environment.path = CacheConfig::Global;
    }
    CubeClRuntimeConfig::try_set(config);
}
