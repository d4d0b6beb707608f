//! Whether kernels of our own are used: checks at the start, and a variable that switches them off.

use std::collections::BTreeMap;
use std::sync::OnceLock;

use serde::Serialize;

use super::table::{self, Kernel};

/// Names the kernels that are used on NVIDIA GPUs, which are not compared then: `all`, `none`, or such as are not, as in
/// `-attention,-products`.
pub const KERNELS_VARIABLE: &str = "LORA_TRAIN_CUDA_KERNELS";

/// Which kernels are used in this process.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct KernelState {
    /// These are.
    pub used: Vec<&'static str>,
    /// These are not, for these reasons.
    pub off: BTreeMap<&'static str, String>,
}

static STATE: OnceLock<KernelState> = OnceLock::new();
static PROBLEMS: OnceLock<BTreeMap<String, String>> = OnceLock::new();

/// Has kernels left alone that were found wrong, by name; before the first GPU computes.
pub fn leave_alone(problems: BTreeMap<String, String>) {
    drop(PROBLEMS.set(problems));
}

/// Whether these kernels are used on a GPU that has them; as long as none computes, they are expected to be.
pub(super) fn is_on(kernel: Kernel) -> bool {
    STATE.get().is_none_or(|state| state.used.contains(&kernel.name()))
}

/// Whether these kernels are used: no GPU computes before that is decided.
#[cfg(feature = "cuda-llvm")]
pub(super) fn is_decided_on(kernel: Kernel) -> bool {
    STATE.get().is_some_and(|state| state.used.contains(&kernel.name()))
}

/// Decided once in a process, on the first GPU that computes, of the kernels that there are for it: `try_out` launches one, and
/// `multiplies` says whether cuBLASLt can be used.
#[cfg(feature = "cuda-llvm")]
pub(super) fn decided(
    capability: [i32; 2],
    try_out: impl FnOnce() -> Result<(), String>,
    multiplies: impl Fn() -> Result<(), String>,
) -> &'static KernelState {
    STATE.get_or_init(|| {
        let asked = std::env::var(KERNELS_VARIABLE).unwrap_or_default();
        let hook = if asked == "all" { Ok(()) } else { try_out() };
        let is_there = |kernel: &Kernel| kernel.row().gpus.include(capability);
        state(&asked, Kernel::by_name().into_iter().filter(is_there).collect(), |kernel| {
            match (&hook, PROBLEMS.get().and_then(|problems| problems.get(kernel.name()))) {
                (Err(problem), _) | (Ok(()), Some(problem)) => Err(problem.clone()),
                (Ok(()), None) if kernel == Kernel::Products => multiplies(),
                (Ok(()), None) => {
                    let least @ [major, minor] = kernel.row().gpus.least();
                    let problem = || format!("for compute capability {major}.{minor} and newer");
                    (capability >= least).then_some(()).ok_or_else(problem)
                }
            }
        })
    })
}

/// `check` says of each kernel what is wrong with it, of those that `asked`, the variable's value, leaves.
#[cfg_attr(not(any(test, feature = "cuda-llvm")), expect(dead_code, reason = "decided on a GPU only"))]
fn state(asked: &str, kernels: Vec<Kernel>, check: impl Fn(Kernel) -> Result<(), String>) -> KernelState {
    let names = table::names();
    let words: Vec<_> = asked.split(',').map(str::trim).filter(|word| !word.is_empty() && *word != "all").collect();
    let is_known = |word: &&&str| **word == "none" || word.strip_prefix('-').is_some_and(|name| names.contains(&name));
    let unknown = words.iter().find(|word| !is_known(word));
    let mut state = KernelState::default();
    for kernel in kernels {
        let name = kernel.name();
        let is_off = words.iter().any(|word| *word == "none" || word.strip_prefix('-') == Some(name));
        let checked = match unknown {
            Some(word) => Err(format!("{KERNELS_VARIABLE} has `{word}`; expected all, none, -{}", names.join(", -"))),
            None if is_off => Err(format!("{KERNELS_VARIABLE} is `{asked}`")),
            None => check(kernel),
        };
        match checked {
            Ok(()) => state.used.push(name),
            Err(reason) => drop(state.off.insert(name, reason)),
        }
    }
    // A product of cuBLASLt's, too.
    if let Some(reason) = state.off.get(Kernel::Products.name()).cloned() {
        let is_on = state.used.iter().position(|name| *name == Kernel::Fp8.name());
        is_on.map(|index| state.off.insert(state.used.remove(index), reason));
    }
    state
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_are_off_that_the_variable_names_or_a_check_finds_wrong() {
        let (names, used) = (table::names(), |asked| state(asked, Kernel::by_name(), |_| Ok(())).used);
        assert_eq!([used(""), used("all")], [names.clone(), names.clone()]);
        assert_eq!(
            used(" -attention, -products"),
            names.iter().copied().filter(|n| !["attention", "products", "fp8"].contains(n)).collect::<Vec<_>>()
        );
        assert!(used("none").is_empty());
        let misspelt = state("-attn", Kernel::by_name(), |_| Ok(()));
        assert!(misspelt.off["attention"].contains("expected all, none, -attention, "), "{misspelt:?}");
        let check = |kernel| if kernel == Kernel::Products { Err("no library".into()) } else { Ok(()) };
        let found = state("", Kernel::by_name(), check);
        assert_eq!(found.used.len(), names.len() - 2);
        assert_eq!([&found.off["products"], &found.off["fp8"]], ["no library"; 2]);
    }
}
