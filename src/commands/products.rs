//! `lora-train products`: how fast a device multiplies matrices of a model's shapes, and how exactly. For developers:
//! `scripts/gpu_check.sh` and `scripts/bench_gpu_vs_peft.py` put it beside cuBLAS.

use std::io::{self, Write};
use std::path::PathBuf;

use serde::Serialize;

use crate::device::{self, Dtype, Product};
use crate::failure::Failure;
use crate::ops::cross_entropy::LossChunk;
use crate::spec::{Linear, ModelConfig};

/// Arguments of `lora-train products`.
#[derive(Clone, Debug, clap::Args)]
pub struct ProductsArgs {
    /// A model's config.json
    #[arg(value_name = "CONFIG.json")]
    pub config: PathBuf,

    /// Tokens of a micro-batch
    #[arg(long, value_name = "TOKENS", default_value_t = 4096)]
    pub tokens: usize,

    /// Rank of the adapters
    #[arg(long, value_name = "R", default_value_t = 16)]
    pub r: usize,

    /// Type of the numbers: f32, bf16 or f16
    #[arg(long, value_name = "TYPE", default_value = "bf16", value_parser = read_dtype)]
    pub precision: Dtype,

    /// Where to compute: auto, cpu, cuda, cuda:N, or what else is compiled in
    #[arg(long, value_name = "DEVICE", default_value = "auto")]
    pub device: String,
}

/// The line on stdout.
#[derive(Debug, Serialize)]
struct ProductsReport {
    device: String,
    precision: &'static str,
    /// Sum of 65,536 numbers of 2^-8, each a product: 256 where sums are kept in `f32`, far less in a narrower type.
    sum_of_small: f64,
    products: Vec<Timed>,
}

#[derive(Debug, Serialize)]
struct Timed {
    name: &'static str,
    #[serde(flatten)]
    product: Product,
    seconds: f64,
    tflops: f64,
}

fn read_dtype(name: &str) -> Result<Dtype, String> {
    name.parse().map_err(|()| "expected f32, bf16 or f16".to_owned())
}

/// Multiplies and prints the figures as one line of JSON.
///
/// # Errors
///
/// A config that cannot be read, a device that is not there or fails.
pub fn run(args: &ProductsArgs) -> Result<(), Failure> {
    let config = ModelConfig::from_file(&args.config).map_err(Failure::input)?;
    let device = device::open(&args.device).map_err(Failure::input)?;
    device.require_dtype(args.precision).map_err(Failure::input)?;
    let failed = || Failure::running(format!("{}: a matrix product failed", device.label));
    let sum_of_small = device.sum_of_small_products(args.precision).ok_or_else(failed)?;
    let mut timed = Vec::new();
    for (name, product) in products(&config, args.tokens, args.r) {
        let seconds = device.time_product(args.precision, product).ok_or_else(failed)?;
        timed.push(Timed { name, product, seconds, tflops: product.flops() / seconds / 1e12 });
    }
    let (device, precision) = (device.label.clone(), args.precision.name());
    let report = ProductsReport { device, precision, sum_of_small, products: timed };
    let json = serde_json::to_string(&report).map_err(Failure::running)?;
    writeln!(io::stdout(), "{json}").map_err(Failure::running)
}

/// The products of a step, each of its own shape: layers forward and backward, an adapter's, the head's.
fn products(config: &ModelConfig, tokens: usize, r: usize) -> Vec<(&'static str, Product)> {
    let [query, key, _, output, gate, _, down] = Linear::ALL.map(|linear| (linear.name(), config.linear(linear)));
    let mut products = Vec::new();
    for (forward, backward, (_, [out_features, in_features])) in [
        ("q_proj", "q_proj, backward", query),
        ("k_proj", "k_proj, backward", key),
        ("o_proj", "o_proj, backward", output),
        ("gate_proj", "gate_proj, backward", gate),
        ("down_proj", "down_proj, backward", down),
    ] {
        products.push((forward, Product { m: tokens, k: in_features, n: out_features, transposed: true }));
        products.push((backward, Product { m: tokens, k: out_features, n: in_features, transposed: false }));
    }
    let (hidden, vocab) = (config.hidden_size, config.vocab_size);
    let targets = LossChunk::Auto.tokens(vocab, tokens);
    products.push(("lora_A", Product { m: tokens, k: hidden, n: r, transposed: true }));
    products.push(("lora_B", Product { m: tokens, k: r, n: hidden, transposed: true }));
    products.push(("lm_head", Product { m: targets, k: hidden, n: vocab, transposed: true }));
    products.push(("lm_head, backward", Product { m: targets, k: vocab, n: hidden, transposed: false }));
    products
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_products_are_those_of_the_models_layers() {
        let config = ModelConfig::from_json(include_str!("../../configs/llama-3.1-8b.json")).unwrap();
        let products = products(&config, 4096, 16);
        let find = |name: &str| products.iter().find(|(found, _)| *found == name).unwrap().1;
        assert_eq!(find("k_proj"), Product { m: 4096, k: 4096, n: 1024, transposed: true });
        assert_eq!(find("down_proj, backward"), Product { m: 4096, k: 4096, n: 14336, transposed: false });
        assert_eq!(find("lm_head").n, 128_256);
        // 2 m k n.
        assert!((find("gate_proj").flops() - 481_036_337_152.0).abs() < 1.0);
    }
}
