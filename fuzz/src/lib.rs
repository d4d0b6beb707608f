//! The targets of `tests/hostile`, for libFuzzer.

#![allow(dead_code, reason = "the tests use more of these modules")]

#[path = "../../tests/hostile/folder.rs"]
mod folder;
#[path = "../../tests/hostile/hub.rs"]
mod hub;
#[path = "../../tests/hostile/limits.rs"]
mod limits;
#[path = "../../tests/hostile/targets.rs"]
mod targets;
#[path = "../../tests/hostile/token_store.rs"]
mod token_store;

#[global_allocator]
static ALLOCATOR: limits::Limited = limits::Limited;

/// A panic that is caught is none: libFuzzer's own hook ends the process at each. One that is not caught ends it too.
pub fn keep_caught_panics() {
    let shown = std::panic::take_hook();
    drop(shown);
    std::panic::set_hook(Box::new(|info| {
        let is_known = info.location().is_some_and(|place| {
            ["/tokenizers-", "/onig-", "/spm_precompiled-"].iter().any(|name| place.file().contains(name))
        });
        if !is_known {
            eprintln!("{info}\n{}", std::backtrace::Backtrace::force_capture());
        }
    }));
}

/// Runs a target on an input.
pub fn run(name: &str, data: &[u8]) {
    let (_, target) = targets::TARGETS.iter().find(|(target, _)| *target == name).expect("a target");
    target(data);
}

/// The fuzz target of a name.
#[macro_export]
macro_rules! target {
    ($name:literal) => {
        libfuzzer_sys::fuzz_target!(init: $crate::keep_caught_panics(), |data: &[u8]| { $crate::run($name, data) });
    };
}
