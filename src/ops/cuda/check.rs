//! Whether kernels of our own are used: checks at the start, and a variable that switches them off.

use std::collections::BTreeMap;
use std::sync::OnceLock;

use serde::Serialize;

/// Names the kernels that are used on NVIDIA GPUs, which are not compared then: `all`, `none`, or such as are not, as in
/// `-attention,-products`.
pub const KERNELS_VARIABLE: &str = "LORA_TRAIN_CUDA_KERNELS";

/// Kernels of our own, and products by cuBLASLt.
pub const NAMES: [&str; 15] = [
    "attention",
    "attention_hopper",
    "cross_entropy",
    "decode",
    "delta_rule",
    "experts",
    "experts_hopper",
    "fp8",
    "low_rank",
    "norm",
    "optimizer",
    "products",
    "rotary",
    "short_conv",
    "swiglu",
];

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
pub(super) fn is_on(name: &str) -> bool {
    STATE.get().is_none_or(|state| state.used.contains(&name))
}

/// Whether these kernels are used: no GPU computes before that is decided.
#[cfg(feature = "cuda-llvm")]
pub(super) fn is_decided_on(name: &str) -> bool {
    STATE.get().is_some_and(|state| state.used.contains(&name))
}

/// Decided once in a process, on the first GPU that computes, of the kernels that it `has`: `try_out` launches one. Of an old GPU,
/// which cannot load the others, only the products are used, which are a library's.
#[cfg(feature = "cuda-llvm")]
pub(super) fn decided(
    has: impl Fn(&str) -> bool,
    is_new: bool,
    try_out: impl FnOnce() -> Result<(), String>,
) -> &'static KernelState {
    STATE.get_or_init(|| {
        let asked = std::env::var(KERNELS_VARIABLE).unwrap_or_default();
        let hook = if asked == "all" { Ok(()) } else { try_out() };
        let names = NAMES.into_iter().filter(|name| has(name));
        state(&asked, names, |name| match (&hook, PROBLEMS.get().and_then(|problems| problems.get(name))) {
            (Err(problem), _) | (Ok(()), Some(problem)) => Err(problem.clone()),
            (Ok(()), None) if name == "products" => crate::device::cublas_library().map(drop),
            (Ok(()), None) if !is_new => Err("for compute capability 8.0 and newer".to_owned()),
            _ => Ok(()),
        })
    })
}

/// `check` says of each kernel what is wrong with it, of those that `asked`, the variable's value, leaves.
#[cfg_attr(not(any(test, feature = "cuda-llvm")), expect(dead_code, reason = "decided on a GPU only"))]
fn state(
    asked: &str,
    names: impl IntoIterator<Item = &'static str>,
    check: impl Fn(&str) -> Result<(), String>,
) -> KernelState {
    let words: Vec<_> = asked.split(',').map(str::trim).filter(|word| !word.is_empty() && *word != "all").collect();
    let is_known = |word: &&&str| **word == "none" || word.strip_prefix('-').is_some_and(|name| NAMES.contains(&name));
    let unknown = words.iter().find(|word| !is_known(word));
    let mut state = KernelState::default();
    for name in names {
        let is_off = words.iter().any(|word| *word == "none" || word.strip_prefix('-') == Some(name));
        let checked = match unknown {
            Some(word) => Err(format!("{KERNELS_VARIABLE} has `{word}`; expected all, none, -{}", NAMES.join(", -"))),
            None if is_off => Err(format!("{KERNELS_VARIABLE} is `{asked}`")),
            None => check(name),
        };
        match checked {
            Ok(()) => state.used.push(name),
            Err(reason) => drop(state.off.insert(name, reason)),
        }
    }
    // A product of cuBLASLt's, too.
    if let Some(reason) = state.off.get("products").cloned() {
        let is_on = state.used.iter().position(|name| *name == "fp8");
        is_on.map(|index| state.off.insert(state.used.remove(index), reason));
    }
    state
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_are_off_that_the_variable_names_or_a_check_finds_wrong() {
        let used = |asked| state(asked, NAMES, |_| Ok(())).used;
        assert_eq!([used(""), used("all")], [NAMES.to_vec(), NAMES.to_vec()]);
        assert_eq!(
            used(" -attention, -products"),
            NAMES.into_iter().filter(|n| !["attention", "products", "fp8"].contains(n)).collect::<Vec<_>>()
        );
        assert!(used("none").is_empty());
        let misspelt = state("-attn", NAMES, |_| Ok(()));
        assert!(misspelt.off["attention"].contains("expected all, none, -attention, "), "{misspelt:?}");
        let found = state("", NAMES, |name| if name == "products" { Err("no library".into()) } else { Ok(()) });
        assert_eq!(found.used.len(), NAMES.len() - 2);
        assert_eq!([&found.off["products"], &found.off["fp8"]], ["no library"; 2]);
    }
}
