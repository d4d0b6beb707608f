//! Rotary frequencies in GGUF files: the keys of their scaling, and tensors with what each of them is divided by.

use serde_json::json;

use super::latent::YARN_GROWTH;
use crate::schema::Problem;
use crate::spec::family::{AttentionExtra, Family, OwnRopes};
use crate::spec::{ModelConfig, Rope, RopeScaling};
use crate::util::gguf::{GgufFile, ROPE_FACTORS, ROPE_FREQS, ROPE_LONG, ROPE_SHORT, decimal};

/// What the frequency of a pair that does not turn is divided by.
const STILL: f32 = 1e30;

/// The tensors with what each rotary frequency is divided by.
#[must_use]
#[expect(clippy::cast_possible_truncation, reason = "the file has f32")]
pub fn rope_factors(config: &ModelConfig) -> Vec<(&'static str, Vec<f32>)> {
    let rope = &config.ropes[0];
    match &rope.scaling {
        Some(RopeScaling::Llama3 { .. } | RopeScaling::Proportional { .. }) => vec![(ROPE_FREQS, divisors(rope))],
        Some(RopeScaling::LongRope { short_factor, long_factor, .. }) => {
            let in_f32 = |factors: &[f64]| factors.iter().map(|factor| *factor as f32).collect();
            vec![(ROPE_LONG, in_f32(long_factor)), (ROPE_SHORT, in_f32(short_factor))]
        }
        _ => Vec::new(),
    }
}

fn divisors(rope: &Rope) -> Vec<f32> {
    let plain = Rope { scaling: None, ..rope.clone() }.inverse_frequencies(0);
    plain.iter().zip(rope.inverse_frequencies(0)).map(|(plain, scaled)| (plain / scaled).min(STILL)).collect()
}

/// Further numbers of yarn that a file may have, and what is taken for granted.
const YARN: [(&str, f64); 5] = [
    ("rope.scaling.attn_factor", 1.0),
    ("rope.scaling.yarn_ext_factor", 1.0),
    ("rope.scaling.yarn_attn_factor", 1.0),
    ("rope.scaling.yarn_beta_fast", 32.0),
    ("rope.scaling.yarn_beta_slow", 1.0),
];

/// Those of a Ministral 3, in its `config.json` and in GGUF.
pub const MINISTRAL_YARN: [(&str, &str); 4] = [
    ("beta_fast", "rope.scaling.yarn_beta_fast"),
    ("beta_slow", "rope.scaling.yarn_beta_slow"),
    ("mscale_all_dim", "rope.scaling.yarn_log_multiplier"),
    ("llama_4_scaling_beta", "attention.temperature_scale"),
];

/// What positions or frequencies are divided by.
pub(super) fn scaling(
    file: &GgufFile,
    family: &Family,
    key: &dyn Fn(&str) -> String,
) -> Result<Option<serde_json::Value>, Problem> {
    let old = file.number(&key("rope.scale_linear"));
    let factor = file.number(&key("rope.scaling.factor")).or(old);
    let linear = |factor| json!({"rope_type": "linear", "factor": factor});
    match file.text(&key("rope.scaling.type")) {
        None => Ok(old.filter(|factor| *factor != 1.0).map(linear)),
        // What it divides by is in tensors.
        Some("longrope") if file.tensors().contains_key(ROPE_LONG) => Ok(None),
        Some("none") => Ok(None),
        Some("linear") => Ok(factor.map(linear)),
        Some("yarn") => {
            let is_ministral = family.own_ropes == OwnRopes::Ministral;
            let is_latent = matches!(family.attention_extra, AttentionExtra::Latent(_));
            let is_read = |name: &str| is_ministral && MINISTRAL_YARN.iter().any(|(_, read)| *read == name);
            for (name, usual) in YARN.into_iter().filter(|(name, _)| !is_read(name)) {
                let found = file.number(&key(name)).filter(|found| (found - usual).abs() > 1e-4);
                if let Some(found) = found {
                    let message = format!("`{}` = {found} is not supported, expected {usual}", key(name));
                    return Err(file.problem(message).hint("use the model's original safetensors"));
                }
            }
            let original = file.integer(&key("rope.scaling.original_context_length"))?;
            let mut yarn = json!({"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original});
            if family.own_ropes == OwnRopes::GptOss {
                // Its makers' ramp is between fractions, which llama.cpp rounds.
                yarn["truncate"] = json!(false);
            }
            if is_latent && let Some(tenth) = file.number(&key(YARN_GROWTH)) {
                yarn["mscale"] = json!(10.0 * tenth);
                yarn["mscale_all_dim"] = json!(10.0 * tenth);
                let growth = file.number(&key("attention.temperature_scale")).filter(|beta| *beta != 0.0);
                yarn["llama_4_scaling_beta"] = json!(growth);
            }
            if is_ministral && !is_latent {
                yarn["mscale"] = json!(1.0);
                for (ours, theirs) in MINISTRAL_YARN {
                    let missing = || file.problem(format!("`{}` is missing", key(theirs)));
                    let number = file.number(&key(theirs)).ok_or_else(missing)?;
                    // Queries that do not grow.
                    if number != 0.0 {
                        yarn[ours] = json!(number);
                    }
                }
            }
            Ok(factor.map(|_| yarn))
        }
        Some(other) => {
            let of_file = key("rope.scaling.type");
            Err(file
                .problem(format!("`{of_file}` = \"{other}\" is not supported, expected `none`, `linear` or `yarn`")))
        }
    }
}

/// The tensors of a file with what each rotary frequency is divided by.
#[must_use]
pub fn stored_rope_factors(file: &GgufFile) -> Vec<(&'static str, Vec<f32>)> {
    let stored = |name| {
        let bytes = file.bytes(file.tensors().get(name)?).as_chunks::<4>().0;
        Some((name, bytes.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()))
    };
    ROPE_FACTORS.into_iter().filter_map(stored).collect()
}

/// The scaling that is in these tensors.
pub(super) fn scaling_of_factors(
    file: &GgufFile,
    family: &Family,
    rope: &Rope,
) -> Result<Option<RopeScaling>, Problem> {
    let architecture = file.text("general.architecture").unwrap_or_default();
    let scaling = match &stored_rope_factors(file)[..] {
        [] => return Ok(None),
        [(ROPE_FREQS, factors)] if family.is_gemma4() => Some(RopeScaling::Proportional {
            num_turning: factors.iter().take_while(|factor| **factor < STILL).count(),
            factor: factors.first().copied().filter(|factor| *factor < STILL).map_or(1.0, decimal),
        }),
        [(ROPE_FREQS, factors)] if factors.iter().all(|factor| *factor == 1.0) => return Ok(None),
        [(ROPE_FREQS, factors)] => llama3(factors, rope),
        [(ROPE_LONG, long), (ROPE_SHORT, short)] if family.has_long_ropes() => {
            longrope(file, architecture, [long, short])?
                .filter(|_| [long, short].iter().all(|it| it.len() == rope.width / 2))
        }
        _ => None,
    };
    let problem = || {
        let message =
            "has rotary factors that are neither those of a Llama nor for long and short texts of llama and phi3";
        let problem = file.problem(message);
        problem.hint("use the model's original safetensors")
    };
    scaling.map(Some).ok_or_else(problem)
}

/// The scaling of Llama 3.1 and 3.2, or of Llama 4, if it has these factors: only the first of its four numbers differs within each.
fn llama3(factors: &[f32], rope: &Rope) -> Option<RopeScaling> {
    [4.0, 1.0].into_iter().find_map(|high_freq_factor| {
        let scaling = RopeScaling::Llama3 {
            factor: factors.last().copied().unwrap_or(1.0).into(),
            low_freq_factor: 1.0,
            high_freq_factor,
            original_max_position_embeddings: 8192,
        };
        let expected = divisors(&Rope { scaling: Some(scaling.clone()), ..rope.clone() });
        let is_close = |(found, expected): (&f32, &f32)| (found - expected).abs() <= 1e-4 * expected.abs();
        (factors.len() == expected.len() && factors.iter().zip(&expected).all(is_close)).then_some(scaling)
    })
}

/// Phi 3's.
fn longrope(file: &GgufFile, architecture: &str, factors: [&[f32]; 2]) -> Result<Option<RopeScaling>, Problem> {
    let [long_factor, short_factor] = factors.map(|factors| factors.iter().copied().map(decimal).collect());
    let attention_factor = file.number(&format!("{architecture}.rope.scaling.attn_factor")).unwrap_or(1.0);
    let original = file.integer(&format!("{architecture}.rope.scaling.original_context_length"))?;
    // The converter leaves it out for MiniCPM 3, whose two lengths are the same.
    let longest = file.integer(&format!("{architecture}.context_length"))?;
    let original = original.or(longest).and_then(|original| usize::try_from(original).ok());
    Ok(original.map(|original_max_position_embeddings| RopeScaling::LongRope {
        short_factor,
        long_factor,
        attention_factor,
        original_max_position_embeddings,
    }))
}
