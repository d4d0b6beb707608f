//! The same steps on a processor without AVX-512 and on one without AVX, as QEMU has them.
#![cfg(all(target_arch = "x86_64", target_os = "linux"))]

use std::process::Command;

use super::common::{Bench, lora_train, stderr, steps};

/// Loss and gradient norm of two steps on a processor, and what the program calls its device.
fn trained(bench: &Bench, processor: Option<&str>) -> (Vec<[f64; 2]>, String) {
    let output = processor.unwrap_or("native");
    let recipe = bench.recipe(output, "");
    // A row takes a quarter of a minute where instructions are emulated.
    let settings = [
        "--set=train.max_steps=2",
        "--set=scheduler.warmup_steps=0",
        "--set=train.gradient_accumulation_steps=1",
        "--set=data.eval=[]",
    ];
    let mut command = lora_train(&[&[recipe.to_str().unwrap()], &settings[..]].concat());
    if let Some(processor) = processor {
        let mut emulated = Command::new("qemu-x86_64");
        emulated.args(["-cpu", processor]).arg(command.get_program()).args(command.get_args());
        // The rate of an emulated processor is not this machine's.
        emulated.env("XDG_CACHE_HOME", bench.path("cache")).env("RAYON_NUM_THREADS", "2");
        command = emulated;
    }
    let ended = command.output().expect("qemu-x86_64 (Debian: qemu-user)");
    assert!(ended.status.success(), "{}", stderr(&ended));
    let environment = std::fs::read_to_string(bench.path(output).join("environment.json")).unwrap();
    let figures = |line: &serde_json::Value| ["loss", "grad_norm"].map(|name| line[name].as_f64().unwrap());
    (steps(&bench.path(output)).iter().map(figures).collect(), environment)
}

#[test]
#[ignore = "needs qemu-x86_64 (Debian: qemu-user)"]
fn a_processor_without_avx_512_computes_the_same_steps() {
    let bench = Bench::new();
    let (native, _) = trained(&bench, None);
    for (processor, has_avx2) in [("Haswell", true), ("Nehalem", false)] {
        let (emulated, environment) = trained(&bench, Some(processor));
        assert!(!environment.contains("AVX-512") && environment.contains("AVX2") == has_avx2, "{environment}");
        assert_eq!((native.len(), emulated.len()), (2, 2));
        for (expected, found) in native.iter().flatten().zip(emulated.iter().flatten()) {
            let off = (found - expected).abs() / expected;
            // Sums have another order.
            assert!(off < 3e-5, "{processor}: {found} instead of {expected}");
        }
    }
}
