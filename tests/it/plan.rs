//! `lora-train plan` as users see it. `scripts/check_plan.py` compares its sizes with measured ones.

use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;

fn plan(args: &[&str]) -> Output {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    Command::new(env!("CARGO_BIN_EXE_lora-train")).arg("plan").args(args).current_dir(root).output().unwrap()
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).unwrap()
}

fn json(args: &[&str]) -> Value {
    let output = plan(&[args, &["--json"]].concat());
    assert!(output.status.success(), "{}", text(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

const LLAMA_8B: [&str; 3] = ["recipes/llama.toml", "--set", "model.path=configs/llama-3.1-8b.json"];

#[test]
fn a_recipe_is_planned_for_a_gpu_that_is_not_there() {
    let on = |device: &str, more: &[&str]| json(&[&LLAMA_8B[..], &["--device", device], more].concat());
    let h100 = on("H100-80GB", &["--set", "train.max_steps=100", "--price-per-hour", "3"]);
    assert_eq!(h100["fits"], true);
    let sum: u64 = h100["components"].as_array().unwrap().iter().map(|part| part["bytes"].as_u64().unwrap()).sum();
    assert_eq!(h100["peak_bytes"], sum);
    let (seconds, step) = (h100["seconds"].as_f64().unwrap(), h100["step_seconds"].as_f64().unwrap());
    assert!((seconds - 100.0 * step).abs() < 1e-6 * seconds);
    // The rows of the recipe do not exist here.
    assert_eq!((&h100["is_at_most"], &h100["rows"]), (&Value::Bool(true), &Value::Null));
    assert_eq!(h100["total_tokens"].as_u64().unwrap(), 100 * h100["tokens_per_step"].as_u64().unwrap());
    let table = plan(&[&LLAMA_8B[..], &["--device", "H100-80GB", "--set", "train.max_steps=100"]].concat());
    let told = text(&table.stdout);
    assert!(told.contains("estimated: at most ") && told.contains(" kWh at the board's full power"), "{told}");
    assert!(told.contains("since the rows cannot be looked at: "), "{told}");
    assert!((h100["cost"].as_f64().unwrap() - 3.0 * seconds / 3600.0).abs() < 1e-9);
    assert!((h100["energy_kwh"].as_f64().unwrap() - 0.7 * seconds / 3600.0).abs() < 1e-9);

    let l4 = on("l4", &["--set", "train.micro_batch_size=16"]);
    assert_eq!(l4["fits"], false);
    let memory = l4["memory_bytes"].as_u64().unwrap();
    let suggestions = l4["suggestions"].as_array().unwrap();
    assert!(!suggestions.is_empty());
    for suggestion in suggestions {
        // A suggestion fits when it is planned in turn; of what it leaves, "auto" takes some.
        let settings = suggestion["settings"].as_str().unwrap().split(' ').flat_map(|setting| ["--set", setting]);
        let again = on("l4", &settings.collect::<Vec<_>>());
        assert!(again["fits"] == true && again["peak_bytes"].as_u64().unwrap() < memory, "{suggestion}: {again}");
    }
}

#[test]
fn the_recipes_prices_are_used_and_one_that_is_typed_goes_before() {
    let priced = |device: &'static str, more: &[&'static str]| {
        let prices = ["cost.price_per_hour=2", "cost.price_per_kwh=0.5", "cost.currency=EUR", "train.max_steps=9000"];
        let set: Vec<&str> = prices.iter().flat_map(|price| ["--set", price]).collect();
        [&LLAMA_8B[..], &["--device", device], &set, more].concat()
    };
    let h100 = json(&priced("H100-80GB", &[]));
    let (hours, kwh) = (h100["seconds"].as_f64().unwrap() / 3600.0, h100["energy_kwh"].as_f64().unwrap());
    let cost = h100["cost"].as_f64().unwrap();
    assert!((cost - (2.0 * hours + 0.5 * kwh)).abs() < 1e-9 * cost && h100["currency"] == "EUR", "{h100}");
    let typed = json(&priced("H100-80GB", &["--price-per-hour", "3"]));
    assert!((typed["cost"].as_f64().unwrap() - (3.0 * hours + 0.5 * kwh)).abs() < 1e-9 * cost, "{typed}");
    let table = plan(&priced("H100-80GB", &[]));
    let line = format!("estimated: at most {cost:.2} EUR at 2 an hour and 0.5 a kWh\n");
    assert!(text(&table.stdout).contains(&line), "{}", text(&table.stdout));

    // The power of a processor is not known.
    let table = plan(&priced("cpu", &[]));
    let told = text(&table.stdout);
    assert!(told.contains(" EUR at 2 an hour\n") && told.contains("its energy is in no cost"), "{told}");
    let free = json(&[&LLAMA_8B[..], &["--device", "H100-80GB", "--set", "train.max_steps=9000"]].concat());
    assert!(free["cost"].is_null() && free["currency"].is_null() && !free["energy_kwh"].is_null(), "{free}");
}

#[test]
fn the_table_names_every_part_and_says_whether_it_fits() {
    let output = plan(&["recipes/quickstart.toml", "--device", "cpu", "--memory", "8"]);
    let stdout = text(&output.stdout);
    assert!(output.status.success());
    for part in ["base weights", "adapters", "gradients", "optimizer state", "kept for the backward", "peak", "fits: "]
    {
        assert!(stdout.contains(part), "{part}: {stdout}");
    }
    assert!(stdout.contains("tokens/s"), "{stdout}");
}

#[test]
fn a_device_that_nobody_knows_is_refused_with_those_that_are() {
    let output = plan(&["recipes/quickstart.toml", "--device", "H1000"]);
    assert_eq!(output.status.code(), Some(2));
    let stderr = text(&output.stderr);
    assert!(
        stderr.contains("--device H1000") && stderr.contains("H100-80GB") && stderr.contains("--memory"),
        "{stderr}"
    );
}

#[test]
fn the_gpus_are_listed_and_one_is_found_by_a_part_of_its_name() {
    let listed = plan(&["--device", "list"]);
    assert!(listed.status.success() && text(&listed.stdout).contains("\nRTX-4090-24GB "), "{}", text(&listed.stdout));
    assert_eq!(json(&["recipes/quickstart.toml", "--device", "4090"])["device"], "RTX-4090-24GB");
    let several = plan(&["recipes/quickstart.toml", "--device", "RTX 30"]);
    assert_eq!(several.status.code(), Some(2));
    let said =
        "--device RTX 30: several GPUs have that in their name\n  hint: name one of RTX-3090-24GB, RTX-3080-10GB, ";
    assert!(text(&several.stderr).contains(said), "{}", text(&several.stderr));
    let alone = plan(&["--device", "H100"]);
    assert_eq!(alone.status.code(), Some(2));
    assert!(text(&alone.stderr).contains("the recipe is missing"), "{}", text(&alone.stderr));
}

#[test]
fn a_well_known_model_is_planned_by_its_shape_where_the_hub_does_not_give_it() {
    let folder = tempfile::tempdir().unwrap();
    let rows = folder.path().join("rows.jsonl");
    std::fs::write(&rows, "{\"prompt\": \"a\", \"completion\": \"b\"}\n".repeat(100) + "\n").unwrap();
    let offline = |more: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_lora-train"));
        command.args(["plan", "recipes/llama.toml", "--device", "H100"]).args(more);
        command.current_dir(env!("CARGO_MANIFEST_DIR")).env("HF_HUB_OFFLINE", "1").env("HF_HOME", folder.path());
        command.output().unwrap()
    };
    let output = offline(&["--json"]);
    let said = text(&output.stderr);
    assert!(output.status.success() && said.contains("HF_HUB_OFFLINE is set"), "{said}");
    assert!(
        said.contains("the shape of meta-llama/Llama-3.2-1B-Instruct is the one that this program knows"),
        "{said}"
    );
    let shape = ["--set", "model.path=configs/llama-3.2-1b.json"];
    let planned: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(planned, json(&[&["recipes/llama.toml", "--device", "H100"][..], &shape].concat()));
    let table = offline(&[]);
    assert!(text(&table.stdout).contains("\nestimated: at most ") && text(&table.stdout).contains(" for 1,000 rows\n"));

    // Rows that nobody can tokenise are still counted: 25 steps of 4 rows each, in two epochs of 7 updates.
    let set = format!("data.train.0.path={}", rows.display());
    let counted: Value = serde_json::from_slice(&offline(&["--json", "--set", &set]).stdout).unwrap();
    assert_eq!((&counted["rows"]["per_epoch"], &counted["steps"]), (&100.into(), &14.into()), "{counted}");
    assert_eq!(counted["is_at_most"], true);
    let unknown = offline(&["--set", "model.path=org/model"]);
    assert_eq!(unknown.status.code(), Some(2), "{}", text(&unknown.stdout));
}

#[test]
fn checkpointing_is_left_off_where_the_memory_holds_what_it_saves() {
    let on = |device: &str, more: &[&str]| json(&[&LLAMA_8B[..], &["--device", device], more].concat());
    let choice = |planned: &Value| planned["gradient_checkpointing"].clone();
    let one_row = ["--set", "train.micro_batch_size=1"];
    assert_eq!((choice(&on("B200", &one_row)), choice(&on("L4", &one_row))), (false.into(), "16-blocks".into()));
    // What is proposed names it, so that it fits as it was planned.
    let fitting = on("B200", &["--fit"]);
    let suggestion = &fitting["suggestions"][0];
    let settings = suggestion["settings"].as_str().unwrap();
    assert!(settings.contains("train.gradient_checkpointing=false"), "{settings}");
    let again = on("B200", &settings.split(' ').flat_map(|setting| ["--set", setting]).collect::<Vec<_>>());
    assert_eq!((&again["fits"], &again["peak_bytes"]), (&true.into(), &suggestion["peak_bytes"]));
    let said = |more: &[&str]| text(&plan(&[&LLAMA_8B[..], &["--device", "L4"], more].concat()).stdout).to_owned();
    assert!(said(&[]).contains("\ngradient checkpointing: on: without it "), "{}", said(&[]));
    assert!(said(&one_row).contains(
        "\ngradient checkpointing: on for 16 blocks, whose attention is kept: without it a step takes up to "
    ));
    assert!(
        !text(&plan(&[&LLAMA_8B[..], &["--set", "train.gradient_checkpointing=true"]].concat()).stdout)
            .contains("\ngradient checkpointing: ")
    );
}

#[test]
fn steps_are_counted_from_the_rows_and_timed_where_asked() {
    let quickstart = |more: &[&str]| json(&[&["recipes/quickstart.toml", "--device", "cpu"], more].concat());
    // 600 rows in micro-batches of 8 are 75 steps an epoch.
    let two_epochs = ["--set", "train.max_steps=", "--set", "train.num_epochs=2"];
    let planned = quickstart(&two_epochs);
    assert_eq!((planned["steps"].as_u64(), planned["is_calibrated"].as_bool()), (Some(150), Some(false)));
    let measured = quickstart(&[&two_epochs[..], &["--calibrate"]].concat());
    assert_eq!(measured["is_calibrated"], true);
    let [seconds, step, evaluations] =
        ["seconds", "mean_step_seconds", "evaluation_seconds"].map(|key| measured[key].as_f64().unwrap());
    assert!((seconds - 150.0 * step - evaluations).abs() < 1e-6 * seconds && step > 1e-4, "{measured}");
    assert!(step < 0.5 * measured["step_seconds"].as_f64().unwrap(), "rows are short: {measured}");

    let elsewhere = plan(&["recipes/quickstart.toml", "--device", "l4", "--calibrate"]);
    assert_eq!(elsewhere.status.code(), Some(2));
    assert!(text(&elsewhere.stderr).contains("the device is not there"), "{}", text(&elsewhere.stderr));
}

#[test]
fn the_run_is_planned_by_the_lengths_of_its_rows() {
    const ALL_ROWS: &str = "train.micro_batch_size=600";

    let quickstart = |more: &[&str]| json(&[&["recipes/quickstart.toml", "--device", "cpu"], more].concat());
    let number = |planned: &Value, key: &str| planned[key].as_f64().unwrap();
    let planned = quickstart(&[]);
    assert_eq!(planned["rows"], serde_json::json!({"per_epoch": 600}));
    // `inspect` counts 27,653 tokens, in 75 steps; padding is left out on the CPU.
    let tokens = number(&planned, "mean_step_tokens");
    assert!((tokens / (27_653.0 / 75.0) - 1.0).abs() < 0.01, "{planned}");
    assert!((number(&planned, "total_tokens") / (200.0 * tokens) - 1.0).abs() < 1e-3, "{planned}");
    assert_eq!((&planned["steps"], &planned["is_at_most"]), (&200.into(), &Value::Bool(false)));
    // Short rows take even less time than their tokens suggest: attention is cheaper still.
    let share = number(&planned, "mean_step_seconds") / number(&planned, "step_seconds");
    assert!(share < tokens / 2048.0 && share > 0.5 * tokens / 2048.0, "{planned}");
    // An evaluation at the start and every 50 steps: forwards of 48 rows, as 6 steps have.
    let of_evaluations = number(&planned, "evaluation_seconds");
    assert_eq!(planned["evaluations"], 5);
    let in_steps = of_evaluations / 5.0 / number(&planned, "mean_step_seconds");
    assert!((0.3 * 6.0..0.5 * 6.0).contains(&in_steps), "{planned}");
    let table = plan(&["recipes/quickstart.toml", "--device", "cpu", "--set", "eval.eval_on_start=false"]);
    assert!(text(&table.stdout).contains(" of it for 4 evaluations"), "{}", text(&table.stdout));
    assert_eq!(number(&planned, "seconds"), 200.0 * number(&planned, "mean_step_seconds") + of_evaluations);

    // As many tokens, in fewer steps of full rows.
    let packed =
        quickstart(&["--set", "data.packing=true", "--set", "train.max_steps=", "--set", "train.num_epochs=3"]);
    let steps = packed["steps"].as_u64().unwrap();
    assert!((41..=46).contains(&steps), "{packed}");
    assert!((number(&packed, "total_tokens") / (3.0 * 75.0 * tokens) - 1.0).abs() < 0.05, "{packed}");

    // A GPU computes padding.
    let on_gpu = json(&["recipes/quickstart.toml", "--device", "A100-80GB"]);
    assert_eq!(on_gpu["mean_step_tokens"], planned["mean_step_tokens"]);
    // Launching a model as small as this takes longer than its kernels, whatever the rows.
    assert_eq!(on_gpu["mean_step_seconds"], on_gpu["step_seconds"]);
    let of_length = |length: &str, device: &str| {
        let length = format!("data.max_length={length}");
        json(&["recipes/quickstart.toml", "--device", device, "--set", &length, "--set", ALL_ROWS])
    };
    let many = of_length("256", "A100-80GB");
    let padded = number(&many, "mean_step_seconds") / number(&many, "step_seconds");
    assert!(padded > 1.05 * share && padded < 1.0, "{many}");
    let [odd, whole] = ["100", "128"].map(|length| of_length(length, "A100-80GB"));
    assert_eq!(odd["peak_bytes"], whole["peak_bytes"]);
    assert_eq!((&odd["tokens_per_step"], &whole["tokens_per_step"]), (&60_000.into(), &76_800.into()));
    let ratio = number(&odd, "step_seconds") / number(&whole, "step_seconds");
    assert!((0.85..1.0).contains(&ratio), "only attention and the head leave padding out: {ratio}");
    assert!(number(&of_length("100", "cpu"), "peak_bytes") < number(&of_length("128", "cpu"), "peak_bytes"));
}

#[test]
fn a_step_takes_as_long_as_the_gpu_needs_in_its_precision() {
    let planned = |device: &str, precision: &str| {
        let precision = format!("train.precision={precision}");
        // A V100 has tensor cores for f16 only.
        let dtype = if device.starts_with('V') { "model.dtype=f16" } else { "model.dtype=bf16" };
        let fixed = ["--set", dtype, "--set", "train.gradient_checkpointing=true", "--set", &precision];
        json(&[&LLAMA_8B[..], &["--device", device], &fixed].concat())
    };
    let seconds = |device: &str, precision: &str| planned(device, precision)["step_seconds"].as_f64();
    let ratio = |device| seconds(device, "tf32").unwrap() / seconds(device, "bf16").unwrap();
    // Products take twice as long, and what is beside them, in tensor calls, several times as long.
    assert!((2.5..5.5).contains(&ratio("H100-80GB")), "{}", ratio("H100-80GB"));
    assert!((2.0..3.5).contains(&ratio("NVIDIA GeForce RTX 3090")), "{}", ratio("NVIDIA GeForce RTX 3090"));
    for device in ["H100-80GB", "RTX 3090"] {
        let [f32, tf32, f16, bf16] =
            ["f32", "tf32", "f16", "bf16"].map(|precision| seconds(device, precision).unwrap());
        assert!(f32 > 1.5 * tf32 && tf32 > 1.3 * f16 && f16 >= bf16, "{device} {f32} {tf32} {f16} {bf16}");
    }
    assert!(seconds("V100-32GB", "f16").unwrap() < 0.4 * seconds("V100-32GB", "f32").unwrap());
    let refused = plan(&[&LLAMA_8B[..], &["--device", "T4", "--set", "train.precision=bf16"]].concat());
    assert_eq!(refused.status.code(), Some(2));
    let said = text(&refused.stderr);
    assert!(said.contains("T4-16GB does not compute in `bf16`\n  hint: use `f32` or `f16`"), "{said}");
}

#[cfg(target_os = "linux")]
#[test]
fn what_fits_is_judged_by_what_is_free_as_a_start_judges_it() {
    let available = |field: &str| {
        let text = std::fs::read_to_string("/proc/meminfo").unwrap();
        let line = text.lines().find_map(|line| line.strip_prefix(field)).unwrap().trim().to_owned();
        1024.0 * line.strip_suffix(" kB").unwrap().parse::<f64>().unwrap()
    };
    let planned = json(&["recipes/quickstart.toml", "--device", "cpu"]);
    let (memory, free) = (planned["memory_bytes"].as_f64().unwrap(), planned["free_memory_bytes"].as_f64().unwrap());
    assert!(free < memory && free < available("MemTotal:"), "{planned}");
    // Other tests allocate and free memory meanwhile, and a control group may leave less.
    assert!(free < 1.5 * available("MemAvailable:"), "{planned}");
    let table = plan(&["recipes/quickstart.toml", "--device", "cpu"]);
    let told = text(&table.stdout);
    assert!(told.contains(" that are free now would be left (") && told.contains(" in all)"), "{told}");
    // A given memory size is used as it is.
    let typed = json(&["recipes/quickstart.toml", "--device", "cpu", "--memory", "8"]);
    assert_eq!((&typed["memory_bytes"], &typed["free_memory_bytes"]), (&(8_u64 << 30).into(), &Value::Null));
}

#[test]
fn a_plan_for_a_gpu_has_a_host_side_of_its_own() {
    let planned = |checkpointing: &str| {
        let set = format!("train.gradient_checkpointing={checkpointing}");
        json(&[&LLAMA_8B[..], &["--device", "A100-40GB", "--set", &set]].concat())
    };
    let bytes = |plan: &Value, name: &str| {
        let parts = plan["components"].as_array().unwrap();
        parts.iter().find(|part| part["name"] == name).unwrap()["bytes"].as_u64().unwrap()
    };
    let [on, offload] = ["true", "offload"].map(planned);
    let parked = bytes(&offload["host"], "parked for the backward");
    assert_eq!(bytes(&on["host"], "parked for the backward"), 0);
    // Inputs of the 32 blocks are on the device, or on the host; those of two blocks are in transfer.
    let input = parked / 32;
    let kept = [&on, &offload].map(|plan| bytes(plan, "kept for the backward"));
    assert_eq!(kept, [32 * input, 2 * input]);
    assert!(offload["host"]["peak_bytes"].as_u64().unwrap() > parked);
    // The GPU is on another machine, whose host is not known.
    assert!(offload["host"]["fits"].is_null() && offload["fits"] == true, "{offload}");
    let table = plan(&[&LLAMA_8B[..], &["--device", "A100-40GB"]].concat());
    assert!(text(&table.stdout).contains("\nhost:\n  process and driver "), "{}", text(&table.stdout));
    assert!(json(&["recipes/quickstart.toml", "--device", "cpu"])["host"].is_null());
}
