//! What a merged model can be written as.

use serde::Serialize;

use crate::device::Dtype;
use crate::schema::Choice;

/// Types of files: most of their matrices have the type of that name, and some, by their place in the model, one with more bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
#[value(rename_all = "snake_case")]
pub enum FileType {
    /// IEEE single precision.
    F32,
    /// IEEE half precision.
    F16,
    /// bfloat16.
    Bf16,
    /// 8-bit integers, 32 of which share a scale.
    #[value(name = "q8_0")]
    Q8,
    /// 4-bit integers, 32 of which share a scale.
    #[value(name = "q4_0")]
    Q4,
    /// The same with an offset.
    #[value(name = "q4_1")]
    Q4Offset,
    /// 5-bit integers, 32 of which share a scale.
    #[value(name = "q5_0")]
    Q5,
    /// The same with an offset.
    #[value(name = "q5_1")]
    Q5Offset,
    /// Blocks of 256 with 2-bit integers.
    #[value(name = "q2_k")]
    Q2K,
    /// Blocks of 256 with 3-bit integers, and few with more.
    #[value(name = "q3_k_s")]
    Q3KS,
    /// The same with more of those.
    #[value(name = "q3_k_m")]
    Q3KM,
    /// The same with the most of those.
    #[value(name = "q3_k_l")]
    Q3KL,
    /// Blocks of 256 with 4-bit integers, and few with more.
    #[value(name = "q4_k_s")]
    Q4KS,
    /// The same with more of those.
    #[value(name = "q4_k_m")]
    Q4KM,
    /// Blocks of 256 with 5-bit integers, and few with more.
    #[value(name = "q5_k_s")]
    Q5KS,
    /// The same with more of those.
    #[value(name = "q5_k_m")]
    Q5KM,
    /// Blocks of 256 with 6-bit integers.
    #[value(name = "q6_k")]
    Q6K,
    /// 4-bit indices into a table, 32 of which share a scale.
    #[value(name = "iq4_nl")]
    Iq4Nl,
    /// The same in blocks of 256.
    #[value(name = "iq4_xs")]
    Iq4Xs,
    /// 4-bit floats, 32 of which share an exponent: for experts, and 8-bit integers for the rest.
    #[value(name = "mxfp4")]
    Mxfp4,
    /// 4-bit floats, 16 of which share an 8-bit scale.
    #[value(name = "nvfp4")]
    Nvfp4,
    /// 4-bit integers in a folder of compressed-tensors.
    #[value(name = "w4a16")]
    W4a16,
    /// 8-bit floats in such a folder.
    #[value(name = "fp8")]
    Fp8,
}

impl FileType {
    /// The type of the same numbers in other files.
    pub(crate) fn float(self) -> Option<Dtype> {
        match self {
            Self::F32 => Some(Dtype::F32),
            Self::F16 => Some(Dtype::F16),
            Self::Bf16 => Some(Dtype::Bf16),
            _ => None,
        }
    }

    /// Its name on the command line.
    pub(crate) fn name(self) -> String {
        clap::ValueEnum::to_possible_value(&self).map_or_else(String::new, |value| value.get_name().to_owned())
    }

    /// Whether it is a form of compressed-tensors, of which a folder is made.
    pub(crate) fn is_for_folders(self) -> bool {
        matches!(self, Self::W4a16 | Self::Fp8 | Self::Nvfp4 | Self::Mxfp4)
    }

    /// Whether there are GGUF files of it.
    pub(crate) fn is_for_files(self) -> bool {
        !matches!(self, Self::W4a16 | Self::Fp8)
    }

    /// Whether a matrix of it is another where some inputs weigh more.
    pub(crate) fn weighs_errors(self) -> bool {
        !matches!(self, Self::F32 | Self::F16 | Self::Bf16 | Self::Q8 | Self::Mxfp4 | Self::Nvfp4)
    }
}

/// Those that are trained for.
impl Choice for FileType {
    const NAMES: &'static [(&'static str, Self)] = &[
        ("q8_0", Self::Q8),
        ("q6_k", Self::Q6K),
        ("q5_k_m", Self::Q5KM),
        ("q5_k_s", Self::Q5KS),
        ("q5_1", Self::Q5Offset),
        ("q5_0", Self::Q5),
        ("q4_k_m", Self::Q4KM),
        ("q4_k_s", Self::Q4KS),
        ("q4_1", Self::Q4Offset),
        ("q4_0", Self::Q4),
        ("iq4_xs", Self::Iq4Xs),
        ("iq4_nl", Self::Iq4Nl),
        ("nvfp4", Self::Nvfp4),
        ("q3_k_l", Self::Q3KL),
        ("q3_k_m", Self::Q3KM),
        ("q3_k_s", Self::Q3KS),
        ("q2_k", Self::Q2K),
    ];
    const NOTES: &'static [(&'static [&'static str], &'static str)] = &[
        (&["f32", "f16", "bf16"], "nothing is lost there that training could make up for: leave it out"),
        (&["mxfp4"], "that is for experts alone: nvfp4 has 4 bits as well"),
        (&["w4a16", "fp8"], "only GGUF files are trained for"),
    ];
}

impl Serialize for FileType {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(&self.name())
    }
}
