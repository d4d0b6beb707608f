//! What a command says when the device's own threads fail, and how it ends.
//!
//! A fault is kept for the rest of a process, so each test starts its own executable again as the program under test.
//! The threads are those of CubeCL; only the messages of their panics are made up.

use std::process::Command;
use std::sync::Arc;

use cubecl_common::device::{DeviceId, DeviceService, ServerUtilitiesHandle};
use cubecl_common::device_handle::{CallResultExt, DeviceHandle};
use lora_train::commands::cli;
use lora_train::util::failure::Failure;

use crate::engine;

/// Environment variable of the program under test: what happens in it.
const CHILD: &str = "LORA_TRAIN_FAULTS_CHILD";

/// As CubeCL's CUDA server panics at every task after a fault.
const PANIC: &str = "called `Result::unwrap()` on an `Err` value: DriverError(CUDA_ERROR_ILLEGAL_ADDRESS, \"an illegal \
                     memory access was encountered\")";

const STOPPED: &str = "error: the GPU stopped: CUDA_ERROR_ILLEGAL_ADDRESS, an illegal memory access was encountered \
                       (found when the loss was read)\n";

const LITTLE_MEMORY: &str =
    "warning: cubecl_server: device allocation of 100 B failed (out of device memory allocating 100 bytes\n";

const HINT: &str = "  hint: a run that has a checkpoint continues with `--resume`; if the GPU stops again, see \
                    `lora-train doctor`, and the lines with `Xid` in `dmesg`\n";

const OUT_OF_MEMORY: &str = "error: the device has no memory left\n  hint: `lora-train plan` shows what takes how much; \
                             lower `train.micro_batch_size` or `data.max_length`\n";

/// The server of a device that computes nothing.
struct Server;

impl DeviceService for Server {
    fn init(_: DeviceId) -> Self {
        Self
    }

    fn utilities(&self) -> ServerUtilitiesHandle {
        Arc::new(())
    }
}

fn device() -> DeviceHandle<Server> {
    DeviceHandle::new(DeviceId::new(0, 0))
}

/// Work that nobody waits for panics on the device's thread, first with `first` and then again and again.
fn lose_work_by(first: &'static str) {
    let device = device();
    device.submit(move |_| panic!("{first}"));
    for _ in 0..50 {
        device.submit(|_| panic!("{PANIC}"));
    }
    // The thread goes on, and has done all of it now.
    let name = device.submit_blocking(|_| std::thread::current().name().map(str::to_owned)).unwrap();
    assert_eq!(name.as_deref(), Some("DSD-0-0"));
}

pub(crate) fn lose_work() {
    lose_work_by(PANIC);
}

/// As CubeCL logs it, with a backtrace; and what it logs of kernels that tuning tries, and what others log.
pub(crate) fn warn_of_little_memory() {
    for size in [100, 200] {
        let error = format!("out of device memory allocating {size} bytes\n   0: a backtrace");
        log::warn!(target: "cubecl_server::command::base", "device allocation of {size} B failed ({error}); retrying");
    }
    log::warn!(target: "cubecl_runtime::logging::server", "A compilation error happened during launch");
    log::warn!(target: "hyper::client", "not about the device");
    log::info!(target: "cubecl_server::command::base", "no warning");
}

fn end_as(mode: &str) -> Result<(), Failure> {
    match mode {
        "training" => {
            let (mut step, batch) = engine::step_and_batch();
            step.forward_backward(&batch);
            assert!(step.update(1e-3).loss.is_finite());
            warn_of_little_memory();
            lose_work();
            step.forward_backward(&batch);
            let _ = step.update(1e-3);
        }
        "memory" => {
            lose_work_by("out of device memory allocating 4194304 bytes");
            let _ = engine::step_and_batch().0.adapters_digest();
        }
        // The thread that waits gets the panic, whatever it is about.
        "waiting" => device().submit_blocking(|_| panic!("no such kernel")).unwrap_or_resume(),
        // Where a wait of the GPU's own finds the fault, nothing panics before a later task does.
        "log" => {
            log::error!(target: "cubecl_server::drop_queue", "a wait failed: cuEventSynchronize failed with status 700");
            lose_work();
            let _ = engine::step_and_batch().0.state();
        }
        _ => {}
    }
    Err(Failure::running("went on"))
}

#[test]
fn a_fault_ends_a_command_with_one_message_that_names_it() {
    if let Ok(mode) = std::env::var(CHILD) {
        std::process::exit(i32::from(cli::ended(|| end_as(&mode))));
    }
    let of_status = "error: the GPU stopped: CUDA_ERROR_ILLEGAL_ADDRESS (a wait failed: cuEventSynchronize failed with \
                     status 700) (found when model.layers.0.self_attn.q_proj.lora_A.exp_avg was read)\n";
    for (mode, expected) in [
        ("training", [LITTLE_MEMORY, STOPPED, HINT].concat()),
        ("memory", OUT_OF_MEMORY.to_owned()),
        ("waiting", ["error: the GPU stopped: no such kernel\n", HINT].concat()),
        ("log", [of_status, HINT].concat()),
    ] {
        let mut program = Command::new(std::env::current_exe().unwrap());
        program.args(["--exact", "faults::a_fault_ends_a_command_with_one_message_that_names_it", "--nocapture"]);
        let output = program.env(CHILD, mode).env_remove("RUST_BACKTRACE").output().unwrap();
        assert_eq!(String::from_utf8_lossy(&output.stderr), expected, "{mode}");
        assert_eq!(output.status.code(), Some(1), "{mode}");
    }
}
