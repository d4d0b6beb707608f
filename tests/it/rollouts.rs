//! Answers that the model writes itself: their rewards, how often they are used, and what a resumed run makes of them.

use std::fs;
use std::path::PathBuf;
use std::process::Stdio;

use serde_json::{Value, json as value};

use crate::common::{Bench, json, lora_train, metrics, run, signal, stderr, steps, train, wait, wait_until};
use crate::golden::quickstart;

/// A recipe of GRPO on a model that seldom writes what is asked for.
pub(crate) fn answering(bench: &Bench, output: &str, reward: &str) -> PathBuf {
    let rows: String = (0..24).map(|i| format!("{}\n", value!({"prompt": format!("{i}: ")}))).collect();
    fs::write(bench.path("train.jsonl"), rows).unwrap();
    let text = format!(
        "output_dir = '{}'\n[model]\npath = '{}'\n[lora]\nr = 4\n[objective]\nname = 'grpo'\nnum_generations = 4\n\
         max_completion_length = 12\n[[objective.reward]]\n{reward}\n[data]\nmax_length = 64\nchat_template = 'none'\n\
         [[data.train]]\npath = '{}'\n[train]\nmicro_batch_size = 6\nmax_steps = 16\n[optimizer]\nlearning_rate = 5e-3\n\
         [checkpoint]\nsave_steps = 8\n",
        bench.path(output).display(),
        quickstart().model_dir.display(),
        bench.path("train.jsonl").display(),
    );
    let path = bench.path(&format!("{output}.toml"));
    fs::write(&path, text).unwrap();
    path
}

#[test]
fn answers_that_are_rewarded_become_the_rule_and_a_resumed_run_gives_the_same_bytes() {
    let bench = Bench::new();
    let reward = "kind = 'regex'\nregex_pattern = 'She|He '";
    train(&answering(&bench, "whole", reward), &[]);
    let checkpoint = bench.path("whole/checkpoints/step-000008");
    train(&answering(&bench, "resumed", reward), &["--resume", checkpoint.to_str().unwrap()]);
    let [whole, resumed] =
        ["whole", "resumed"].map(|run| fs::read(bench.path(run).join("adapter/adapter_model.safetensors")).unwrap());
    assert!(whole == resumed);
    let lines = metrics(&bench.path("whole"));
    let rewards: Vec<f64> = lines.iter().filter_map(|line| line["reward"].as_f64()).collect();
    assert!(rewards.len() == 16 && rewards[0] < 0.2 && rewards[15] > 0.9, "{rewards:?}");
    let first = &lines[0];
    assert!(first["rollout_seconds"].as_f64().unwrap() > 0.0 && first["reward_std"].as_f64().unwrap() > 0.0, "{first}");
    assert!(
        first["completion_length"].as_f64().unwrap() <= 12.0 && first["tokens"].as_u64().unwrap() > 24 * 4,
        "{first}"
    );
    // Who follows the rule begins in fewer ways.
    let entropy: Vec<f64> = [first, &lines[15]].iter().filter_map(|line| line["entropy"].as_f64()).collect();
    assert!(entropy.len() == 2 && entropy[1] < entropy[0] && entropy[0] < f64::ln(1344.0), "{entropy:?}");
    let of_ended = |line: &Value| line["terminated_length"].is_f64() == (line["clipped_ratio"] != 1.0);
    assert!(lines.iter().all(of_ended), "{first}");
    let samples = fs::read_to_string(bench.path("whole/samples.jsonl")).unwrap();
    assert!(samples.lines().all(|line| line.contains("\"reward\"")) && samples.lines().count() == 2, "{samples}");
}

#[test]
fn a_run_that_is_resumed_between_two_uses_of_the_same_answers_gives_the_same_bytes() {
    let bench = Bench::new();
    let reward = "kind = 'regex'\nregex_pattern = 'She|He | her'";
    let more = [
        "--set=objective.num_iterations=2",
        "--set=objective.steps_per_generation=4",
        "--set=objective.temperature=0.8",
        "--set=objective.top_k=500",
        "--set=objective.min_p=0.001",
        "--set=objective.epsilon=0.02",
        "--set=train.micro_batch_size=4",
        "--set=train.gradient_accumulation_steps=2",
        "--set=train.max_steps=9",
        "--set=checkpoint.save_steps=1",
    ];
    train(&answering(&bench, "whole", reward), &more);
    // For four micro-batches, two steps, each made twice; the last two of the six in an epoch are one step.
    let lines = metrics(&bench.path("whole"));
    let with = |name: &str| -> Vec<u64> {
        lines.iter().filter(|line| line[name].is_number()).map(|line| line["step"].as_u64().unwrap()).collect()
    };
    assert_eq!(with("rollout_seconds"), [1, 5, 7]);
    assert_eq!(with("reward"), (1..=9).collect::<Vec<_>>());
    let clipped: Vec<_> = lines.iter().map(|line| line["clip_ratio_region_mean"].as_f64().unwrap()).collect();
    assert!(clipped[0] <= 0.0 && clipped[1..4].iter().any(|share| *share > 0.0), "{clipped:?}");
    let assert_same = |run: &str| {
        for file in ["adapter/adapter_model.safetensors", "checkpoints/step-000009/optimizer.safetensors"] {
            let [whole, resumed] = ["whole", run].map(|run| fs::read(bench.path(run).join(file)).unwrap());
            assert!(whole == resumed, "{run}: {file}");
        }
    };
    for step in [1, 3, 5, 8] {
        let run = format!("resumed-{step}");
        let checkpoint = bench.path(&format!("whole/checkpoints/step-{step:06}"));
        train(&answering(&bench, &run, reward), &[&more[..], &["--resume", checkpoint.to_str().unwrap()]].concat());
        assert_same(&run);
    }
    // Answers in use are those of the recipe that they were written by.
    let checkpoint = bench.path("whole/checkpoints/step-000003");
    let changed = ["--set=objective.num_iterations=1", "--resume", checkpoint.to_str().unwrap()];
    train(&answering(&bench, "changed", reward), &[&more[..], &changed].concat());
    assert!(
        metrics(&bench.path("changed")).iter().any(|line| line["step"] == 4 && line["rollout_seconds"].is_number())
    );
    // Also where a signal decides when.
    for (name, which) in [("stopped", libc::SIGTERM), ("killed", libc::SIGKILL)] {
        let recipe = answering(&bench, name, reward);
        let mut started = lora_train(&[&[recipe.to_str().unwrap()], &more[..]].concat());
        let mut child = started.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        wait_until("a few steps", || steps(&bench.path(name)).len() > 2);
        signal(&child, which);
        wait(&mut child);
        // On a loaded machine the signal may come after the last step.
        if !bench.path(name).join("summary.json").exists() {
            train(&recipe, &[&more[..], &["--resume"]].concat());
        }
        assert_same(name);
    }
}

#[test]
fn evaluation_rows_are_answered_and_the_best_adapter_has_the_highest_reward() {
    let bench = Bench::new();
    let rows: String = (24..30).map(|i| format!("{}\n", value!({"prompt": format!("{i}: ")}))).collect();
    let recipe = answering(&bench, "run", "kind = 'regex'\nregex_pattern = 'She|He '");
    fs::write(bench.path("eval.jsonl"), rows).unwrap();
    let eval = format!("--set=data.eval=[{{path={:?}}}]", bench.path("eval.jsonl"));
    let settings = [&eval, "--set=eval.eval_steps=4", "--set=eval.early_stopping_patience=9"];
    train(&recipe, &settings);
    let lines = metrics(&bench.path("run"));
    let rewards: Vec<f64> = lines.iter().filter_map(|line| line["eval_reward"].as_f64()).collect();
    assert!(rewards.len() == 5 && rewards[0] < 0.4 && rewards[4] > 0.8, "{rewards:?}");
    let highest = rewards.iter().copied().fold(0.0, f64::max);
    let (summary, best) = (json(&bench.path("run/summary.json")), json(&bench.path("run/adapter-best/best.json")));
    assert_eq!((&summary["best_eval_reward"], &summary["final_eval_reward"]), (&value!(highest), &value!(rewards[4])));
    assert_eq!((&summary["initial_eval_reward"], &summary["final_eval_loss"]), (&value!(rewards[0]), &Value::Null));
    let first_best = rewards.iter().position(|reward| reward.to_bits() == highest.to_bits()).unwrap();
    assert_eq!((&best["step"], &summary["best_eval_step"]), (&value!(4 * first_best), &value!(4 * first_best)));
    // The same answers are drawn again.
    let evaluated = run(&["eval", bench.path("run").to_str().unwrap(), "--json"]);
    let evaluated: Value = serde_json::from_slice(&evaluated.stdout).unwrap();
    assert_eq!(evaluated["eval_reward"], summary["final_eval_reward"]);
    for (setting, message) in [
        ("eval.metric_for_best=loss", "whose loss is about 0"),
        ("objective.epsilon=0.1", "does nothing while every answer is used once"),
        ("objective.loss_type=luspo", "must be \"sequence\" for \"luspo\""),
        ("objective.steps_per_generation=3", "is no multiple of `train.gradient_accumulation_steps` = 2"),
    ] {
        let settings =
            ["check", recipe.to_str().unwrap(), "--set", setting, "--set=train.gradient_accumulation_steps=2"];
        let output = run(&[&settings[..], &[&eval]].concat());
        assert!(output.status.code() == Some(2) && stderr(&output).contains(message), "{setting}: {}", stderr(&output));
    }
}

#[test]
fn a_program_that_judges_is_asked_with_the_row_and_its_failure_names_the_row() {
    let bench = Bench::new();
    let judge = "kind = 'command'\ncommand = ['sh', '-c', 'while read -r line; do case $line in *prompt*completion*She*) echo 1;; \
                 *prompt*completion*) echo 0;; *) exit 1;; esac; done']";
    train(&answering(&bench, "judged", judge), &["--set", "train.max_steps=2"]);
    // A folder may be somebody else's: what it names is started once it is allowed.
    let (folder, rows) = (bench.path("judged"), bench.path("train.jsonl"));
    let folder = folder.to_str().unwrap();
    for command in [
        &["eval", folder, "--data", rows.to_str().unwrap(), "--json"][..],
        &[folder, "--resume", "--set", "train.max_steps=3"],
    ] {
        let refused = run(command);
        let said = stderr(&refused);
        assert!(refused.status.code() == Some(2) && said.contains("sh -c 'while read"), "{said}");
        let allowed = run(&[command, &["--allow-command"]].concat());
        assert!(allowed.status.success(), "{}", stderr(&allowed));
    }
    let recipe = answering(&bench, "alike", "kind = 'regex'\nregex_pattern = '[ -~]'");
    let output = run(&[recipe.to_str().unwrap()]);
    let text = stderr(&output);
    assert!(
        output.status.code() == Some(1) && text.contains("answers to each of its prompts have the same reward"),
        "{text}"
    );
    let recipe = answering(&bench, "ended", "kind = 'command'\ncommand = ['sh', '-c', 'exit 3']");
    let output = run(&[recipe.to_str().unwrap()]);
    assert!(output.status.code() == Some(2) && stderr(&output).contains("train.jsonl, row "), "{}", stderr(&output));
}

#[test]
fn functions_in_python_train_and_their_figures_and_answers_are_recorded() {
    let bench = Bench::new();
    let file = bench.path("rewards.py");
    let text = "import os\nasync def named(prompts, completions, **kwargs):\n    assert len(prompts) == 24 and prompts[0] == prompts[3]\n    \
                print('judged', os.environ.get('HF_TOKEN'))\n    kwargs['log_metric']('at', kwargs['trainer_state'].global_step)\n    \
                kwargs['log_extra']('first', [text[:1] for text in completions])\n    \
                return [float('She' in text or 'He ' in text) for text in completions]\n\
                def short(completion_ids, **kwargs):\n    return [None if len(ids) < 12 else -len(ids) for ids in completion_ids]\n";
    fs::write(&file, text).unwrap();
    let reward =
        format!("kind = 'python'\nfile = '{}'\nfunctions = ['named', 'short']\nweights = [1.0, 0.0]", file.display());
    let recipe = answering(&bench, "python", &reward);
    let train = |more: &[&str]| {
        let output = lora_train(&[&[recipe.to_str().unwrap()], more].concat()).env("HF_TOKEN", "hf_secret").output();
        let output = output.unwrap();
        assert!(output.status.success(), "{}", stderr(&output));
        stderr(&output)
    };
    let said = train(&[]);
    assert!(!said.contains("judged"), "{said}");
    let log = fs::read_to_string(bench.path("python/rewards.log")).unwrap();
    assert_eq!(log, "judged None\n".repeat(16));
    let lines = metrics(&bench.path("python"));
    let last = &lines[15];
    assert!(last["reward_means"]["named"].as_f64().unwrap() > 0.9 && last["reward_stds"]["short"] == 0.0, "{last}");
    assert!(last["reward_metrics"]["at"] == 15.0 && last["reward_seconds"].as_f64().unwrap() > 0.0, "{last}");
    // All count, also those that are not computed again, as all answers to their prompt are alike.
    assert!(lines.iter().all(|line| line["target_tokens"].as_u64() > Some(24 * 6)), "{last}");
    let rollouts = |run: &str| -> Vec<Value> {
        let text = fs::read_to_string(bench.path(run).join("rollouts.jsonl")).unwrap();
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    };
    let all = rollouts("python");
    assert_eq!(all.len(), 16 * 24);
    for (index, answer) in all.iter().enumerate() {
        assert_eq!(
            (&answer["step"], &answer["group"]),
            (&value!(index / 24 + 1), &value!(index % 24 / 4 + 1)),
            "{answer}"
        );
        let text = answer["completion"].as_str().unwrap();
        let reward = f64::from(u8::from(text.contains("She") || text.contains("He ")));
        assert_eq!((&answer["rewards"]["named"], &answer["reward"]), (&value!(reward), &value!(reward)), "{answer}");
        assert_eq!(answer["extra"]["first"], text.chars().take(1).collect::<String>(), "{answer}");
        let row = answer["row"].as_u64().unwrap();
        assert_eq!(answer["prompt"].as_str().unwrap().trim(), format!("{}:", row - 1), "{answer}");
    }
    for group in all.chunks(4) {
        let sum: f64 = group.iter().map(|answer| answer["advantage"].as_f64().unwrap()).sum();
        assert!(sum.abs() < 1e-9, "{group:?}");
    }
    let output = bench.path("resumed");
    let output = format!("--set=output_dir={}", output.display());
    train(&[
        "--resume",
        bench.path("python/checkpoints/step-000008").to_str().unwrap(),
        &output,
        "--set=logging.rollouts=5",
    ]);
    assert_eq!(rollouts("resumed").len(), 8 * 5);
    // `check` does not import what a folder names, and training from the folder does so once it is allowed.
    let refused = run(&[bench.path("python").to_str().unwrap(), "--resume", "--set=train.max_steps=17"]);
    assert!(refused.status.code() == Some(2) && stderr(&refused).contains("rewards.py"), "{}", stderr(&refused));
    fs::write(&file, "def named(completions, **kwargs):\n    return [1 / 0]\nshort = named\n").unwrap();
    let failing = answering(&bench, "failed", &reward);
    let checked = run(&["check", failing.to_str().unwrap()]);
    assert!(checked.status.success(), "{}", stderr(&checked));
    let failed = run(&[failing.to_str().unwrap()]);
    let text = stderr(&failed);
    assert!(
        text.contains("train.jsonl, row ") && text.contains("`named` of ") && text.contains("line 2, in named"),
        "{text}"
    );
    fs::write(&file, "raise ImportError('none')  # named short\n").unwrap();
    let failed = run(&[answering(&bench, "absent", &reward).to_str().unwrap()]);
    assert!(failed.status.code() == Some(2) && stderr(&failed).contains("ImportError: none"), "{}", stderr(&failed));
}

#[test]
fn what_a_reward_does_not_find_is_a_mistake_before_the_model_answers() {
    let bench = Bench::new();
    let schema = bench.path("schema.json");
    fs::write(&schema, r#"{"type": "objekt"}"#).unwrap();
    let of_json = |path: PathBuf| format!("kind = 'json'\nschema = '{}'", path.display());
    for (reward, message) in [
        ("kind = 'exact'".to_owned(), "train.jsonl:line 1: there is no text in `answer`"),
        ("kind = 'number'\ncolumn = 'prompt'\n[[objective.reward]]\nkind = 'contains'".to_owned(), "in `answer`"),
        (of_json(schema.clone()), "schema.json: no JSON Schema"),
        (of_json(bench.path("absent.json")), "absent.json: cannot be read"),
        (format!("kind = 'length'\nschema = '{}'", schema.display()), "is of \"json\" alone"),
    ] {
        let recipe = answering(&bench, "run", &reward);
        for command in [&["check", recipe.to_str().unwrap()][..], &[recipe.to_str().unwrap()]] {
            let output = run(command);
            assert!(
                output.status.code() == Some(2) && stderr(&output).contains(message),
                "{reward}: {}",
                stderr(&output)
            );
        }
    }
}

#[test]
fn prompts_without_room_for_an_answer_are_left_out_and_those_with_little_counted() {
    let bench = Bench::new();
    let recipe = answering(&bench, "run", "kind = 'length'");
    for (max_length, message) in
        [("4", "`data.max_length` is 4: no answer has room"), ("15", "14 of 24 prompts leave an answer")]
    {
        let output = run(&["check", recipe.to_str().unwrap(), "--set", &format!("data.max_length={max_length}")]);
        assert!(stderr(&output).contains(message), "{max_length}: {}", stderr(&output));
    }
}

#[test]
fn a_plan_counts_the_answers_and_says_that_writing_them_is_not_in_its_time() {
    let bench = Bench::new();
    let recipe = answering(&bench, "run", "kind = 'length'");
    let recipe = recipe.to_str().unwrap();
    let plan: Value = serde_json::from_slice(&run(&["plan", recipe, "--json"]).stdout).unwrap();
    // Six prompts of a few tokens, four answers of twelve to each.
    let tokens = plan["mean_step_tokens"].as_f64().unwrap() / 24.0 - 12.0;
    assert!(plan["answer_tokens"] == 12 && (2.0..8.0).contains(&tokens), "{plan}");
    let text = String::from_utf8(run(&["plan", recipe]).stdout).unwrap();
    assert!(text.contains("without writing the answers, each taken to be of 12 tokens"), "{text}");
}
