//! What each CPU kernel reaches on the shapes of stories15M and SmolLM2-135M: `cargo bench --bench kernels [FILTER]`.
//!
//! One line a kernel and shape: best and median time of the runs of about a second, the least processor time that a
//! run took over all threads, and the rate at the best. On a busy machine, `RAYON_NUM_THREADS=1` and the processor
//! time tell what a kernel costs.

#![allow(clippy::print_stdout, reason = "the console is the job")]
#![allow(clippy::cast_precision_loss, clippy::cast_possible_truncation, reason = "sizes and times of a few seconds")]

use std::time::{Duration, Instant};

use half::bf16;
use lora_train::ops::cpu::{
    AdamW, AttentionShape, Lora, LoraGradients, Weight, adamw, add, attention, attention_backward, linear,
    linear_backward_input, linear_cross_entropy, lora_linear, lora_linear_backward, rms_norm, rms_norm_backward, rope,
    sum_of_squares, swiglu, swiglu_backward,
};

/// Runs for about this long, after one run that warms up.
const BUDGET: Duration = Duration::from_millis(700);

struct Bench {
    filter: String,
}

impl Bench {
    /// Times `work`; `amount` is what one run does, in units of 1e9 a second named `unit`.
    fn run(&self, name: &str, amount: f64, unit: &str, mut work: impl FnMut()) {
        if !name.contains(&self.filter) {
            return;
        }
        work();
        let mut seconds = Vec::new();
        let mut least_processor_seconds = f64::INFINITY;
        let begin = Instant::now();
        while seconds.len() < 5 || begin.elapsed() < BUDGET {
            let (start, processor_start) = (Instant::now(), processor_seconds());
            work();
            seconds.push(start.elapsed().as_secs_f64());
            least_processor_seconds = least_processor_seconds.min(processor_seconds() - processor_start);
        }
        seconds.sort_by(f64::total_cmp);
        let (best, median) = (seconds[0], seconds[seconds.len() / 2]);
        println!(
            "{name:<48} best {:>9.3} ms  median {:>9.3} ms  processor {:>9.3} ms  {:>7.1} {unit}",
            best * 1e3,
            median * 1e3,
            least_processor_seconds * 1e3,
            amount / best * 1e-9
        );
    }
}

/// Processor time of this process so far, over all its threads.
fn processor_seconds() -> f64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is a valid place to write to; the clock exists on every Unix.
    unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &raw mut time) };
    time.tv_sec as f64 + time.tv_nsec as f64 * 1e-9
}

/// Values that are neither special nor equal.
fn filled(len: usize, seed: u32) -> Vec<f32> {
    let mut state = seed.wrapping_mul(747_796_405).wrapping_add(1);
    let next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1u32 << 23) as f32 - 1.0
    };
    std::iter::repeat_with(next).take(len).collect()
}

struct Model {
    name: &'static str,
    hidden: usize,
    kv: usize,
    ffn: usize,
    vocab: usize,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    rank: usize,
}

const MODELS: [Model; 2] = [
    Model {
        name: "smollm2",
        hidden: 576,
        kv: 192,
        ffn: 1536,
        vocab: 49_152,
        heads: 9,
        kv_heads: 3,
        head_dim: 64,
        rank: 16,
    },
    Model {
        name: "stories",
        hidden: 288,
        kv: 288,
        ffn: 768,
        vocab: 32_000,
        heads: 6,
        kv_heads: 6,
        head_dim: 48,
        rank: 8,
    },
];

const TOKENS: usize = 1024;

fn main() {
    // `cargo bench` passes `--bench`.
    let filter = std::env::args().skip(1).find(|a| !a.starts_with("--")).unwrap_or_default();
    let bench = Bench { filter };
    for model in &MODELS {
        linear_layers(&bench, model);
        attention_layers(&bench, model);
        element_wise(&bench, model);
    }
}

fn linear_layers(bench: &Bench, model: &Model) {
    let rank = model.rank;
    let shapes = [
        ("q", model.hidden, model.hidden),
        ("kv", model.hidden, model.kv),
        ("gate", model.hidden, model.ffn),
        ("down", model.ffn, model.hidden),
        ("head", model.hidden, model.vocab / 4),
    ];
    for (role, i, o) in shapes {
        let name = |what: &str| format!("{}/{what} {role} {i}->{o}", model.name);
        let (x, dy, w) = (filled(TOKENS * i, 1), filled(TOKENS * o, 2), filled(i * o, 3));
        let w_bf16: Vec<bf16> = w.iter().map(|w| bf16::from_f32(*w)).collect();
        let (mut y, mut dx) = (vec![0.0; TOKENS * o], vec![0.0; TOKENS * i]);
        let flops = 2.0 * (TOKENS * i * o) as f64;
        let weights = [
            ("f32", Weight::f32(&w)),
            ("bf16", Weight::bf16(&w_bf16)),
            ("rounded", Weight::bf16(&w_bf16).rounding(true)),
        ];
        for (dtype, w) in weights {
            bench.run(&name(&format!("linear {dtype}")), flops, "GFLOP/s", || linear(&x, w, i, o, &mut y, false));
            bench.run(&name(&format!("linear_backward_input {dtype}")), flops, "GFLOP/s", || {
                linear_backward_input(&dy, w, i, o, &mut dx, false);
            });
        }
        bench.run(&name("gemm crate, linear f32"), flops, "GFLOP/s", || {
            gemm_crate([TOKENS, o, i], &x, &w, [1, i], &mut y);
        });
        bench.run(&name("gemm crate, linear_backward_input f32"), flops, "GFLOP/s", || {
            gemm_crate([TOKENS, i, o], &dy, &w, [i, 1], &mut dx);
        });
        if role == "head" {
            continue;
        }
        let (a, b) = (filled(rank * i, 4), filled(rank * o, 5));
        let lora = Lora { a: &a, b: &b, rank, scale: 2.0, dropout: None };
        let mut xa = vec![0.0; TOKENS * rank];
        let (mut da, mut db) = (vec![0.0; a.len()], vec![0.0; b.len()]);
        let low_rank = 2.0 * (TOKENS * rank * (i + o)) as f64;
        for (dtype, w) in weights {
            bench.run(&name(&format!("lora_linear {dtype}")), flops + low_rank, "GFLOP/s", || {
                lora_linear(&x, w, &lora, i, o, &mut y, false, &mut xa);
            });
            bench.run(&name(&format!("lora_linear_backward {dtype}")), flops + 2.0 * low_rank, "GFLOP/s", || {
                let mut gradients = LoraGradients { a: &mut da, b: &mut db };
                lora_linear_backward(&dy, &x, &xa, w, &lora, i, o, Some(&mut dx), false, &mut gradients);
            });
        }
    }
}

/// The same product by the gemm crate, to compare with: `b_strides` are those of rows and columns.
fn gemm_crate([m, n, k]: [usize; 3], a: &[f32], b: &[f32], b_strides: [usize; 2], c: &mut [f32]) {
    assert!(a.len() == m * k && b.len() == k * n && c.len() == m * n);
    let [n_stride, k_stride, row, column] = [n, k, b_strides[0], b_strides[1]].map(usize::cast_signed);
    let (c, a, b) = (c.as_mut_ptr(), a.as_ptr(), b.as_ptr());
    let parallelism = gemm::Parallelism::Rayon(0);
    // SAFETY: by the assertion all elements that the strides reach lie inside the slices.
    unsafe {
        gemm::gemm(
            m,
            n,
            k,
            c,
            1,
            n_stride,
            false,
            a,
            1,
            k_stride,
            b,
            column,
            row,
            0.0,
            1.0,
            false,
            false,
            false,
            parallelism,
        );
    }
}

fn attention_layers(bench: &Bench, model: &Model) {
    let shape = AttentionShape {
        num_heads: model.heads,
        num_kv_heads: model.kv_heads,
        head_dim: model.head_dim,
        scale: 1.0 / (model.head_dim as f32).sqrt(),
        window: None,
    };
    for (len, documents) in [(256, 4), (512, 2), (1024, 1), (4096, 1)] {
        let tokens = len * documents;
        let (q_width, kv_width) = (model.heads * model.head_dim, model.kv_heads * model.head_dim);
        let (q, k, v) = (filled(tokens * q_width, 1), filled(tokens * kv_width, 2), filled(tokens * kv_width, 3));
        let d_o = filled(tokens * q_width, 4);
        let documents: Vec<(usize, usize)> = (0..documents).map(|d| (d * len, len)).collect();
        let (mut o, mut lse) = (vec![0.0; q.len()], vec![0.0; tokens * model.heads]);
        let (mut dq, mut dk, mut dv) = (vec![0.0; q.len()], vec![0.0; k.len()], vec![0.0; v.len()]);
        // Unmasked pairs of query and key, times the multiply-adds of one product.
        let product = (documents.len() * len * (len + 1) * q_width) as f64;
        let name = |what: &str| format!("{}/{what} {}x{len}", model.name, documents.len());
        bench.run(&name("attention"), 2.0 * product, "GFLOP/s", || {
            attention(&q, &k, &v, &documents, &shape, &mut o, &mut lse);
        });
        bench.run(&name("attention_backward"), 5.0 * product, "GFLOP/s", || {
            attention_backward(&d_o, &q, &k, &v, &o, &lse, &documents, &shape, &mut dq, &mut dk, &mut dv);
        });
    }
}

fn element_wise(bench: &Bench, model: &Model) {
    let name = |what: &str| format!("{}/{what}", model.name);
    let bytes = |floats: usize| 4.0 * floats as f64;
    {
        let len = TOKENS * model.ffn;
        let (gate, up, dh) = (filled(len, 1), filled(len, 2), filled(len, 3));
        let (mut x, mut y) = (vec![0.0; len], vec![0.0; len]);
        bench.run(&name("swiglu"), bytes(3 * len), "GB/s", || swiglu(&gate, &up, &mut x));
        bench.run(&name("swiglu_backward"), bytes(5 * len), "GB/s", || {
            swiglu_backward(&dh, &gate, &up, &mut x, &mut y);
        });
    }
    let len = TOKENS * model.hidden;
    let (x, dy, weight) = (filled(len, 1), filled(len, 2), filled(model.hidden, 3));
    let (mut y, mut rstd) = (vec![0.0; len], vec![1.0; TOKENS]);
    bench.run(&name("add"), bytes(3 * len), "GB/s", || add(&x, &dy, &mut y));
    bench.run(&name("rms_norm"), bytes(2 * len), "GB/s", || rms_norm(&x, &weight, 1e-5, &mut y, &mut rstd));
    bench.run(&name("rms_norm_backward"), bytes(4 * len), "GB/s", || {
        rms_norm_backward(&dy, &x, &weight, &rstd, &mut y, true);
    });
    let (cos, sin) = (filled(TOKENS * model.head_dim / 2, 4), filled(TOKENS * model.head_dim / 2, 5));
    let positions: Vec<u32> = (0..TOKENS as u32).collect();
    bench.run(&name("rope"), bytes(2 * len), "GB/s", || {
        rope(&mut y, &cos, &sin, &positions, model.heads, model.head_dim, false);
    });
    {
        let rows = 512;
        let (hidden, head) = (filled(rows * model.hidden, 6), filled(model.vocab * model.hidden, 7));
        let head_bf16: Vec<bf16> = head.iter().map(|w| bf16::from_f32(*w)).collect();
        let targets: Vec<u32> = (0..rows as u32).collect();
        let (mut losses, mut dhidden) = (vec![0.0; rows], vec![0.0; hidden.len()]);
        let flops = 4.0 * (rows * head.len()) as f64;
        for (dtype, head) in [("f32", Weight::f32(&head)), ("rounded", Weight::bf16(&head_bf16).rounding(true))] {
            bench.run(&name(&format!("linear_cross_entropy {dtype}")), flops, "GFLOP/s", || {
                linear_cross_entropy(&hidden, head, model.hidden, &targets, &mut losses, Some((&mut dhidden, 1.0)));
            });
        }
    }
    let len = 4 << 20;
    let (grad, mut param, mut m, mut v) = (filled(len, 7), filled(len, 8), vec![0.0; len], vec![0.0; len]);
    let settings =
        AdamW { learning_rate: 1e-4, betas: [0.9, 0.999], eps: 1e-8, weight_decay: 0.0, step: 3, grad_scale: 1.0 };
    bench.run(&name("adamw"), bytes(7 * len), "GB/s", || adamw(&mut param, &grad, &mut m, &mut v, &settings));
    bench.run(&name("sum_of_squares"), bytes(len), "GB/s", || {
        std::hint::black_box(sum_of_squares(&grad));
    });
}
