//! How the frozen weights are held, as `[model]` asks for it or as the base is stored.

use super::quantise::Quantisation;
use super::words::gcd;
use crate::config::{ModelOptions, Quantization, Residency};
use crate::device::Dtype;
use crate::ops::kernels::Place;
use crate::ops::quantised::{BlockScales, Coding, Quantised};
use crate::schema::Problem;
use crate::spec::{Method, ModelConfig, Words};

/// How the frozen weights are held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Storage {
    /// Type of the matrices that are not quantised.
    pub dtype: Dtype,
    /// What becomes of the linear layers.
    pub quantisation: Option<Quantisation>,
    /// Where they are.
    pub residency: Residency,
}

impl Storage {
    /// Bytes of a tensor of `config` in memory, as far as that says how it is stored.
    #[must_use]
    pub fn tensor_bytes(self, config: &ModelConfig, name: &str, shape: &[usize], place: Place) -> usize {
        let stored = config.quantisation.as_ref();
        let module = name.strip_suffix(".weight").unwrap_or(name);
        let is_whole = !name.starts_with("model.layers.") || stored.is_some_and(|stored| stored.is_whole(module));
        // A GPU has no kernel for the blocks of GGUF, so they are decoded.
        let in_blocks = stored.filter(|_| place.takes_blocks()).and_then(|stored| stored.blocks.get(name).copied());
        match (shape, self.quantisation.filter(|_| !is_whole)) {
            (&[out_features, in_features], quantisation) => in_blocks.unwrap_or_else(|| match quantisation {
                Some(quantisation) => {
                    let shape = [out_features, in_features];
                    let stored = stored.and_then(|stored| in_memory(stored.method, shape));
                    stored.unwrap_or_else(|| quantisation.form(shape)).num_bytes()
                }
                None => out_features * in_features * self.dtype.num_bytes(),
            }),
            _ => shape.iter().product::<usize>() * size_of::<f32>(),
        }
    }
}

/// What a stored matrix is in memory; `None`: numbers of the storage type.
fn in_memory(method: Method, shape: [usize; 2]) -> Option<Quantised<(), ()>> {
    let own = |coding, nested| Some(Quantisation { coding, nested }.form(shape));
    let (coding, block_len, scales) = match method {
        Method::Nf4 { nested } => return own(Coding::Nf4, nested),
        Method::Fp4 { nested } => return own(Coding::Fp4, nested),
        Method::Int8 => return own(Coding::Int8, false),
        Method::Words(Words { is_reordered: true, .. }) | Method::Gguf => return None,
        Method::Words(Words { bits, group_len, is_symmetric, .. }) => {
            let shifted = BlockScales::Shifted { scales: (), zeros: () };
            let scales = if is_symmetric { BlockScales::Plain(()) } else { shifted };
            (if bits == 4 { Coding::Int4 } else { Coding::Int8 }, group_len.unwrap_or(0), scales)
        }
        Method::Fp8 { tile } => (Coding::Fp8, tile.map_or(0, |tile| tile[1]), BlockScales::Plain(())),
        Method::Mxfp4 => (Coding::Mxfp4, 32, BlockScales::NESTED),
        Method::Nvfp4 => (Coding::Nvfp4, 16, BlockScales::NESTED),
    };
    Some(Quantised { shape, coding, codes: (), block_len: gcd(shape[1], block_len), scales })
}

impl From<Dtype> for Storage {
    fn from(dtype: Dtype) -> Self {
        Self { dtype, quantisation: None, residency: Residency::Memory }
    }
}

impl std::fmt::Display for Storage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.quantisation {
            None => write!(f, "{}", self.dtype),
            Some(quantisation) => write!(f, "{quantisation}, embeddings and head in {}", self.dtype),
        }?;
        f.write_str(match self.residency {
            Residency::Memory => "",
            Residency::Mapped => ", on disk",
            Residency::Host => ", its blocks in host memory",
        })
    }
}

impl ModelOptions {
    /// How the weights are held where the arithmetic is of type `compute`; a base that is quantised already, as stored.
    #[must_use]
    pub fn storage(&self, compute: Dtype, config: Option<&ModelConfig>) -> Storage {
        let stored = config.and_then(|config| config.quantisation.as_ref()).filter(|stored| stored.is_in_codes());
        let quantisation = stored.map_or(self.quantisation(), |stored| {
            let Quantised { coding, scales, .. } = in_memory(stored.method, [0; 2])?;
            Some(Quantisation { coding, nested: matches!(scales, BlockScales::Nested { .. }) })
        });
        Storage { dtype: self.dtype.unwrap_or(compute), quantisation, residency: self.residency }
    }

    fn quantisation(&self) -> Option<Quantisation> {
        let coding = match self.quantization {
            Quantization::None => return None,
            Quantization::Nf4 => Coding::Nf4,
            Quantization::Fp4 => Coding::Fp4,
            Quantization::Int8 => Coding::Int8,
            Quantization::Fp8 => Coding::Fp8,
        };
        Some(Quantisation { coding, nested: self.double_quantization == Some(true) })
    }

    /// Refuses to quantise a base again that is quantised already.
    ///
    /// # Errors
    /// Where the options name another quantisation than the stored one.
    pub fn fit(&self, config: &ModelConfig) -> Result<(), Problem> {
        let stored = config.quantisation.as_ref().filter(|stored| stored.is_in_codes());
        let Some(method) = stored.map(|stored| stored.method) else { return Ok(()) };
        let is_stored = |asked: &Quantisation| match (method, asked.coding) {
            (Method::Nf4 { .. }, coding) => coding == Coding::Nf4,
            (Method::Fp4 { .. }, coding) => coding == Coding::Fp4,
            (Method::Fp8 { .. }, coding) => coding == Coding::Fp8,
            (method, coding) => method == Method::Int8 && coding == Coding::Int8,
        };
        let message = match (self.quantisation().filter(|asked| !is_stored(asked)), method, self.double_quantization) {
            (Some(Quantisation { coding, .. }), ..) => {
                format!("`model.quantization` = \"{coding}\", but the base is stored as {method}")
            }
            (None, Method::Nf4 { nested } | Method::Fp4 { nested }, Some(asked)) if asked != nested => {
                let scales = if nested { "nested" } else { "plain" };
                format!(
                    "`model.double_quantization` = {asked}, but the base is stored as {method} with {scales} scales"
                )
            }
            _ => return Ok(()),
        };
        Err(Problem::new(message).hint("leave the key out: the base is used as stored; it is not quantised twice"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_asked_of_a_base_in_codes_is_what_it_is_stored_as_or_refused() {
        let fit = |double: &str, coding, asked| {
            let text = format!(
                r#"{{"model_type": "llama", "vocab_size": 8, "hidden_size": 64, "intermediate_size": 64,
                    "num_hidden_layers": 1, "num_attention_heads": 4, "quantization_config": {{"load_in_4bit": true,
                    "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": {double}}}}}"#
            );
            let options = ModelOptions { quantization: coding, double_quantization: asked, ..ModelOptions::default() };
            let fit = options.fit(&ModelConfig::from_json(&text).unwrap());
            fit.err().map(|problem| problem.message.split(", but").next().unwrap_or_default().to_owned())
        };
        for (nested, asked) in [("true", false), ("false", true)] {
            let refused = Some(format!("`model.double_quantization` = {asked}"));
            for coding in [Quantization::None, Quantization::Nf4] {
                assert_eq!(fit(nested, coding, None), None);
                assert_eq!(fit(nested, coding, Some(!asked)), None);
                assert_eq!(fit(nested, coding, Some(asked)), refused);
            }
            let other = fit(nested, Quantization::Fp4, Some(asked));
            assert_eq!(other.as_deref(), Some("`model.quantization` = \"fp4\""));
        }
    }
}
