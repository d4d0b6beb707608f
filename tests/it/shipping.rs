//! `train.ship_as`: a run whose last part is trained as the file that is served.

use std::fs;

use crate::common::{Bench, json, run, stderr, train};

/// In the middle of ten steps; those that are wide enough for it have blocks whose scales are searched for.
const SHIP: [&str; 10] = [
    "--set",
    "train.ship_as=q2_k",
    "--set",
    "train.ship_from=0.5",
    "--set",
    "train.max_steps=10",
    "--set",
    "scheduler.lr_scheduler=constant",
    "--set",
    "checkpoint.save_steps=1000",
];

#[test]
fn the_file_has_the_loss_of_the_last_evaluation_and_a_resumed_run_ends_in_the_same_one() {
    let bench = Bench::new();
    let output = train(&bench.recipe("whole", ""), &SHIP);
    let said = stderr(&output);
    assert!(said.contains("step 5: from here on weights are those of a q2_k file ("), "{said}");
    assert!(said.contains("loss of the q2_k file: ") && said.contains("% of the gain is in the file"), "{said}");
    let loss = json(&bench.path("whole/summary.json"))["final_eval_loss"].as_f64().unwrap();

    let [whole, file] = [bench.path("whole"), bench.path("whole.gguf")].map(|path| path.display().to_string());
    let output = run(&["merge", &whole, "--out", &file]);
    let said = stderr(&output);
    assert!(output.status.success() && said.contains("trained and evaluated as q2_k, bit for bit"), "{said}");
    assert!(said.contains(&format!("loss on 6 evaluation rows: {loss:.4},")), "{loss}: {said}");
    assert!(!said.contains("rounding took"), "{said}");
    assert!(bench.path("whole.imatrix.gguf").is_file(), "what inputs weighed when that part began");
    let other = bench.path("other.gguf").display().to_string();
    let output = run(&["merge", &whole, "--out", &other, "--dtype", "q4_0", "--without-rows"]);
    let said = stderr(&output);
    assert!(said.contains("the adapter was trained for a q2_k file\n  hint: --out NAME.gguf"), "{said}");

    // The same steps in two parts, the second of which begins within the rounded ones.
    let parts = bench.recipe("parts", "");
    train(&parts, &[&SHIP[..], &["--set", "train.max_steps=8", "--set", "train.ship_from=0.625"]].concat());
    let output = train(&parts, &[&SHIP[..], &["--resume"]].concat());
    assert!(stderr(&output).contains("resuming after step 8"), "{}", stderr(&output));
    for name in ["adapter_model.safetensors", "shipped_as.safetensors"] {
        let [one, two] = ["whole", "parts"].map(|run| fs::read(bench.path(run).join("adapter").join(name)).unwrap());
        assert!(one == two, "{name}");
    }
}

#[test]
fn what_cannot_be_trained_as_a_file_is_refused_with_the_way_out() {
    let bench = Bench::new();
    let recipe = bench.recipe("run", "");
    let ship = "train.ship_as=q4_k_m";
    for (changes, message) in [
        (&["lora.use_dora=true"][..], "`lora.use_dora` does not go with `train.ship_as`"),
        (&["lora.modules_to_save=[\"lm_head\"]"], "`lora.modules_to_save` does not go with `train.ship_as`"),
        (&["model.quantization=nf4"], "weights are rounded once, from 16 bits\n  hint: take it out; with"),
        (&["optimizer.ema_decay=0.9"], "`optimizer.ema_decay` does not go with"),
        (&["eval.eval_steps=2", "eval.early_stopping_patience=1"], "the run could end before that part"),
        (&["lora.init_lora_weights=pissa"], "`lora.init_lora_weights` does not go with"),
        (&["train.ship_as=bf16"], "nothing is lost there that training could make up for"),
        (&["train.ship_as=", "train.ship_from=0.5"], "is of no use without `ship_as`"),
    ] {
        let sets = [ship].into_iter().chain(changes.iter().copied()).flat_map(|change| ["--set", change]);
        let output = run(&["check", recipe.to_str().unwrap()].into_iter().chain(sets).collect::<Vec<_>>());
        assert_eq!(output.status.code(), Some(2), "{changes:?}: {}", stderr(&output));
        assert!(stderr(&output).contains(message), "{changes:?}: {}", stderr(&output));
    }
}
