//! The build for CUDA that `pip install lora-train[cuda]` puts beside this one, which is for the CPU.

use std::os::unix::process::CommandExt as _;
use std::process::Command;

use crate::commands::say;

/// Goes on as the build for CUDA, where there is one, with the same arguments.
pub(super) fn take_over() {
    // The program itself where a link was called, such as pipx's and uv's.
    let Ok(program) = std::env::current_exe() else { return };
    let program = program.with_file_name("lora-train-cuda");
    if program.is_file() {
        // Returns only if that failed.
        let error = Command::new(&program).arg0("lora-train").args(std::env::args_os().skip(1)).exec();
        say(&format!("warning: {} cannot be started ({error}); this build is for the CPU", program.display()));
    }
}
