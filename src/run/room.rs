//! Whether there is room for a run: told before it starts, and when it turns out that there was none.

use std::any::Any;
use std::cell::OnceCell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use super::inputs;
use crate::device::{DeviceKind, OpenDevice};
use crate::failure::Failure;
use crate::lora::targets::Selection;
use crate::model::config::LlamaConfig;
use crate::recipe::Recipe;
use crate::telemetry::available_host_memory_bytes;
use crate::train::fit;
use crate::train::memory::MemoryPlan;

/// A step's memory beside what the device has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Room {
    /// The memory of a step, part by part.
    pub plan: MemoryPlan,
    /// Why it may be too little; absent where it should do.
    pub warning: Option<String>,
    /// What to say if it was too little.
    pub advice: String,
}

impl Room {
    /// Reckons the memory of a recipe's step and asks the device for its own. Nothing is loaded.
    #[must_use]
    pub fn look(recipe: &Recipe, config: &LlamaConfig, selection: &Selection, device: &OpenDevice) -> Self {
        let on_cpu = device.kind == DeviceKind::Cpu;
        let workload = inputs::workload(recipe, config, selection, on_cpu);
        let (memory_bytes, place) = if on_cpu {
            (available_host_memory_bytes(), "this process")
        } else {
            (device.cuda.as_ref().map(|gpu| gpu.memory_bytes), device.label.as_str())
        };
        Self {
            plan: workload.plan(),
            warning: memory_bytes.and_then(|bytes| fit::shortage(&workload, bytes, place)),
            advice: fit::advice(&workload, memory_bytes, place),
        }
    }
}

/// Runs `work`. Should the device's memory run out, which burn's backends report by a panic, that becomes a failure with
/// the advice that has been given by then.
///
/// # Errors
///
/// Those of `work`, and memory that has run out.
pub(super) fn told_when_it_runs_out<T>(
    advice: &OnceCell<String>,
    work: impl FnOnce() -> Result<T, Failure>,
) -> Result<T, Failure> {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|panic| match advice.get() {
        Some(advice) if is_out_of_memory(&*panic) => Err(Failure::running(advice.as_str())),
        _ => resume_unwind(panic),
    })
}

/// Why training ended by a panic: the advice where memory has run out, else what the panic says.
pub(super) fn panic_reason(panic: &(dyn Any + Send), advice: Option<&str>) -> String {
    let said = || Some(text_of(panic)).filter(|text| !text.is_empty()).unwrap_or("a panic");
    advice.filter(|_| is_out_of_memory(panic)).unwrap_or_else(said).to_owned()
}

/// Whether a panic says that memory has run out, in the words of CubeCL, CUDA or wgpu.
fn is_out_of_memory(panic: &(dyn Any + Send)) -> bool {
    let text = text_of(panic).to_lowercase();
    ["out of memory", "out-of-memory", "outofmemory", "out_of_memory"].iter().any(|words| text.contains(words))
}

fn text_of(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str).or_else(|| panic.downcast_ref::<&str>().copied());
    text.unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outcome(text: &'static str) -> Result<(), Failure> {
        let advice = OnceCell::from("take less".to_owned());
        told_when_it_runs_out(&advice, || panic!("{text}"))
    }

    #[test]
    fn a_panic_about_memory_becomes_the_advice() {
        for text in [
            "An out-of-memory error happened during launch\nCaused by:\n  x",
            "called `Result::unwrap()` on an `Err` value: OutOfMemory { size: 5 }",
            "DriverError(CUDA_ERROR_OUT_OF_MEMORY, \"out of memory\")",
        ] {
            assert_eq!(outcome(text).unwrap_err().messages(), ["take less"]);
        }
    }

    #[test]
    fn another_panic_stays_one() {
        let panic = catch_unwind(|| outcome("index out of bounds")).unwrap_err();
        assert_eq!(panic.downcast_ref::<String>().unwrap(), "index out of bounds");
        assert_eq!(panic_reason(&*panic, Some("take less")), "index out of bounds");
        assert_eq!(panic_reason(&"CUDA out of memory", Some("take less")), "take less");
        assert_eq!(panic_reason(&5, None), "a panic");
    }
}
