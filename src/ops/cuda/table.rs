//! The kernels of NVIDIA GPUs, a row each.

/// GPUs that kernels are compiled for.
#[cfg(any(test, feature = "cuda-llvm"))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Gpus {
    /// All that the program runs on: they are a library's, or need nothing of these.
    All,
    /// Compute capability 7.5, which has no `bf16`, and newer.
    Turing,
    /// 8.9 and newer.
    Ada,
    /// 9.0 alone.
    Hopper,
}

#[cfg(feature = "cuda-llvm")]
impl Gpus {
    /// Whether the kernels are for such a GPU, or are said to be off there.
    pub(super) fn include(self, capability: [i32; 2]) -> bool {
        match self {
            Self::All | Self::Turing => true,
            Self::Ada => capability >= [8, 9],
            Self::Hopper => capability[0] == 9,
        }
    }

    /// The least compute capability of those that are said to be off below it.
    pub(super) fn least(self) -> [i32; 2] {
        match self {
            Self::Turing => [7, 5],
            Self::All | Self::Ada | Self::Hopper => [0, 0],
        }
    }
}

/// What the table says of kernels.
pub(super) struct KernelRow {
    /// The name by which they are switched off.
    pub(super) name: &'static str,
    #[cfg(any(test, feature = "cuda-llvm"))]
    pub(super) gpus: Gpus,
    /// Their files of CUDA C++, and the program in `tests/cuda_kernels` that holds these against `float64`.
    #[cfg(test)]
    files: (&'static [&'static str], Option<&'static str>),
}

macro_rules! kernels {
    ($($kernel:ident $name:literal $gpus:ident $files:tt $tested:expr;)+) => {
        /// Kernels that are switched off together, in the order in which they are compared with the CPU's.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub(super) enum Kernel { $($kernel),+ }

        impl Kernel {
            pub(super) const ALL: &[Self] = &[$(Self::$kernel),+];

            pub(super) const fn row(self) -> KernelRow {
                match self {
                    $(Self::$kernel => KernelRow {
                        name: $name,
                        #[cfg(any(test, feature = "cuda-llvm"))]
                        gpus: Gpus::$gpus,
                        #[cfg(test)]
                        files: (&$files, $tested),
                    },)+
                }
            }
        }
    };
}

kernels! {
    Products         "products"         All    ["product"]            Some("product");
    AttentionHopper  "attention_hopper" Hopper ["attention_hopper"]   Some("attention");
    ExpertsHopper    "experts_hopper"   Hopper ["grouped_hopper"]     Some("experts");
    Attention        "attention"        Turing ["attention", "attention_capped"] Some("attention");
    Bias             "bias"             Turing ["bias"]               Some("rows");
    CachedAttention  "cached_attention" Turing ["cached_attention"]   Some("cached_attention");
    Experts          "experts"          Turing ["experts", "grouped", "expert_rank"] Some("experts");
    Fp8              "fp8"              Ada    ["fp8"]                Some("fp8");
    Decode           "decode"           Turing ["decode"]             None;
    DeltaRule        "delta_rule"       Turing ["delta_rule"]         Some("delta_rule");
    LowRank          "low_rank"         Turing ["low_rank"]           Some("low_rank");
    Draw             "draw"             All    ["draw"]               Some("draw");
    Next             "next"             Turing ["next"]               Some("next");
    Norm             "norm"             Turing ["norm"]               Some("rows");
    Rotary           "rotary"           Turing ["rotary"]             Some("rows");
    ShortConv        "short_conv"       Turing ["short_conv"]         Some("delta_rule");
    Swiglu           "swiglu"           Turing ["swiglu"]             Some("rows");
    CrossEntropy     "cross_entropy"    Turing ["cross_entropy"]      Some("cross_entropy");
    Optimizer        "optimizer"        Turing ["optimizer"]          Some("optimizer");
}

impl Kernel {
    pub(super) fn name(self) -> &'static str {
        self.row().name
    }

    /// All, by name.
    pub(super) fn by_name() -> Vec<Self> {
        let mut all = Self::ALL.to_vec();
        all.sort_unstable_by_key(|kernel| kernel.name());
        all
    }
}

/// The names of all kernels.
#[must_use]
pub fn names() -> Vec<&'static str> {
    Kernel::by_name().into_iter().map(Kernel::name).collect()
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use super::*;
    use crate::ops::cuda::ptx;

    const ROOT: &str = env!("CARGO_MANIFEST_DIR");

    #[test]
    fn every_source_is_of_one_row_and_compiled_for_its_gpus() {
        let files = |kernel: Kernel| kernel.row().files.0.iter().map(move |file| (kernel.row().gpus, *file));
        // That of the check at the start is no row's.
        let mut files: Vec<_> = Kernel::ALL.iter().copied().flat_map(files).chain([(Gpus::All, "twice")]).collect();
        files.sort_unstable_by_key(|(_, file)| *file);
        let mut names = Vec::new();
        for (gpus, file) in files {
            assert!(Path::new(ROOT).join(format!("src/ops/cuda/kernels/{file}.cu")).is_file(), "{file}");
            let variants: &[_] = match gpus {
                Gpus::All => &[("", [false, true], "sm_75")],
                Gpus::Turing => &[
                    ("", [false, false], "sm_80"),
                    (".f16", [true, false], "sm_80"),
                    (".f16.75", [true, true], "sm_75"),
                ],
                Gpus::Ada => &[("", [false, false], "sm_89")],
                Gpus::Hopper => &[("", [false, false], "sm_90a")],
            };
            for (end, [is_f16, is_turing], target) in variants {
                let text = ptx::text(file, *is_f16, *is_turing).unwrap().to_str().unwrap();
                let is_for = text.contains(&format!(".target {target}\n"));
                assert!(text.starts_with(".version ") && is_for, "{file}{end}: {}", &text[..80]);
                names.push(format!("{file}{end}"));
            }
        }
        assert_eq!(ptx::names(), names);
    }

    #[test]
    fn every_row_is_documented_and_held_against_float64_by_the_program_that_it_names() {
        let docs = fs::read_to_string(Path::new(ROOT).join("docs/cuda.md")).unwrap();
        for KernelRow { name, gpus, files: (files, tested) } in Kernel::ALL.iter().map(|kernel| kernel.row()) {
            let row = docs
                .lines()
                .find(|line| line.split('|').nth(1).is_some_and(|names| names.contains(&format!("`{name}`"))));
            let least = match gpus {
                Gpus::All | Gpus::Turing => "| 7.5 | 8.0 |",
                Gpus::Ada => "|  | 8.9 |",
                Gpus::Hopper => "",
            };
            let is_documented = match row {
                Some(row) => row.contains(least),
                None => gpus == Gpus::Hopper && docs.contains(&format!("`-{name}`")),
            };
            assert!(is_documented, "{name}: {row:?}, expected {least}");
            let Some(program) = tested else { continue };
            let text = fs::read_to_string(Path::new(ROOT).join(format!("tests/cuda_kernels/{program}.py"))).unwrap();
            assert!(files.iter().all(|file| text.contains(&format!("\"{file}\""))), "{files:?} in {program}.py");
        }
    }
}
