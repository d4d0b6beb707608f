//! Episodes: the model and an environment take turns. What they come to is trained on, and no failure of the environment changes it.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use serde_json::{Value, json as value};

use crate::common::{Bench, lora_train, metrics, run, signal, stderr, steps, train, wait, wait_until};
use crate::golden::quickstart;

/// Rewards a verb in both of two answers. With `trouble` it ends, hangs or fails at some questions, the first time that they come.
const AGAIN: &str = r#"
import json, os, sys, time
trouble = sys.argv[1] if len(sys.argv) > 1 else None
say = lambda **reply: print(json.dumps(reply), flush=True)
say(hello=1, name="met", max_parallel=2)
rows = {}
for line in sys.stdin:
    question = json.loads(line)
    number = question["id"]
    if question["do"] == "close":
        rows.pop(number, None)
        continue
    row = rows.setdefault(number, question.get("row"))
    mark = trouble and os.path.join(trouble, "%s %s" % (row["n"], question["do"]))
    if mark and row["n"] in (1, 4, 6) and not os.path.exists(mark):
        open(mark, "w").close()
        if row["n"] == 1: os._exit(3)
        if row["n"] == 4: time.sleep(99)
        say(id=number, failed="no luck")
    elif question["do"] == "reset":
        say(id=number, observation=" (%d)" % (question["seed"] % 7))
    else:
        text = question["message"]["content"]
        say(id=number, observation=[{"role": "user", "content": "Again."}], reward=float(" met " in text), done=question["turn"] == 2,
            metrics={"words": len(text.split())})
"#;

fn recipe(bench: &Bench, output: &str, arguments: &str) -> PathBuf {
    let animals = ["frog", "pig", "seal", "fox", "snail", "horse", "goat", "duck"];
    let row = |(n, animal): (usize, &&str)| {
        format!("{}\n", value!({"prompt": format!("At the beach, Clara met a big {animal}."), "n": n}))
    };
    fs::write(bench.path("train.jsonl"), animals.iter().enumerate().map(row).collect::<String>()).unwrap();
    fs::write(bench.path("again.py"), AGAIN).unwrap();
    let text = format!(
        "output_dir = '{}'\n[model]\npath = '{}'\n[lora]\nr = 4\n[objective]\nname = 'grpo'\nnum_generations = 4\n\
         max_completion_length = 60\n[objective.environment]\ncommand = ['python3', '{}'{arguments}]\nmax_seconds = 5\n\
         [data]\nmax_length = 128\n[[data.train]]\npath = '{}'\n[train]\nmicro_batch_size = 4\nmax_steps = 8\n[optimizer]\n\
         learning_rate = 1e-2\n[checkpoint]\nsave_steps = 2\n",
        bench.path(output).display(),
        quickstart().model_dir.display(),
        bench.path("again.py").display(),
        bench.path("train.jsonl").display(),
    );
    let path = bench.path(&format!("{output}.toml"));
    fs::write(&path, text).unwrap();
    path
}

fn rollouts(folder: &Path) -> Vec<Value> {
    let text = fs::read_to_string(folder.join("rollouts.jsonl")).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn episodes_are_trained_on_and_failures_kills_and_a_resumed_run_change_nothing() {
    let bench = Bench::new();
    train(&recipe(&bench, "whole", ""), &[]);
    let lines = metrics(&bench.path("whole"));
    let rewards: Vec<f64> = lines.iter().filter_map(|line| line["reward"].as_f64()).collect();
    assert!(rewards.len() == 8 && rewards[7] > rewards[0] + 0.3, "{rewards:?}");
    for line in lines.iter().filter(|line| line["reward"].is_f64()) {
        assert!(line["turns"].as_f64().unwrap() > 1.0 && line["failed_episodes"] == 0.0, "{line}");
        assert!(line["environment_seconds"].as_f64().unwrap() <= line["rollout_seconds"].as_f64().unwrap(), "{line}");
        assert_eq!((&line["reward_means"]["met"], &line["tool_calls"]), (&line["reward"], &value!(0.0)), "{line}");
        assert!(line["reward_metrics"]["words"].as_f64().unwrap() > 1.0, "{line}");
    }
    let all = rollouts(&bench.path("whole"));
    assert_eq!(all.len(), 8 * 16);
    for group in all.chunks(4) {
        // All of a group face the same.
        assert!(group.iter().all(|other| other["prompt"] == group[0]["prompt"]), "{group:?}");
        let prompt = group[0]["prompt"].as_str().unwrap();
        assert!(prompt.contains("Clara met a big") && prompt.contains(" ("), "{prompt}");
    }
    let turns = all.iter().find(|answer| answer["turns"] == 2 && answer["ending"] == "stop").unwrap();
    let roles: Vec<_> = turns["messages"].as_array().unwrap().iter().map(|message| &message["role"]).collect();
    assert_eq!(roles, ["assistant", "user", "assistant"]);
    let counted = turns["messages"]
        .as_array()
        .unwrap()
        .iter()
        .filter(|message| message["role"] == "assistant" && message["content"].as_str().unwrap().contains(" met "));
    assert_eq!(turns["reward"], counted.count() as f64);
    assert!(turns["completion"].as_str().unwrap().contains("Again."), "{turns}");

    let adapter = |run: &str| fs::read(bench.path(run).join("adapter/adapter_model.safetensors")).unwrap();
    let whole = adapter("whole");
    let trouble = bench.path("trouble");
    fs::create_dir(&trouble).unwrap();
    let disturbed = recipe(&bench, "disturbed", &format!(", {trouble:?}"));
    train(&disturbed, &["--set", "objective.environment.retries=9"]);
    assert!(adapter("disturbed") == whole);
    assert_eq!(fs::read_dir(&trouble).unwrap().count(), 6);
    let log = fs::read_to_string(bench.path("disturbed/episodes.log")).unwrap();
    for what in ["(exit status: 3)", "it has not replied within 5 s", "no luck; it begins anew"] {
        assert!(log.contains(what), "{what}: {log}");
    }
    let retries: f64 =
        metrics(&bench.path("disturbed")).iter().filter_map(|line| line["episode_retries"].as_f64()).sum();
    assert!(retries > 0.0);

    let checkpoint = bench.path("whole/checkpoints/step-000002");
    train(&recipe(&bench, "resumed", ""), &["--resume", checkpoint.to_str().unwrap()]);
    assert!(adapter("resumed") == whole);
    let killed = recipe(&bench, "killed", "");
    let mut child =
        lora_train(&[killed.to_str().unwrap()]).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    wait_until("a few steps", || steps(&bench.path("killed")).len() > 2);
    signal(&child, libc::SIGKILL);
    wait(&mut child);
    if !bench.path("killed/summary.json").exists() {
        train(&killed, &["--resume"]);
    }
    assert!(adapter("killed") == whole);
}

#[test]
fn episodes_that_fail_for_good_are_masked_and_where_all_fail_the_run_ends() {
    let bench = Bench::new();
    let few = ["--set=train.max_steps=2", "--set=objective.environment.retries=0", "--set=train.micro_batch_size=8"];
    let trouble = bench.path("trouble");
    fs::create_dir(&trouble).unwrap();
    let masked = recipe(&bench, "masked", &format!(", {trouble:?}"));
    let output = run(&[&[masked.to_str().unwrap()], &few[..]].concat());
    assert!(output.status.success(), "{}", stderr(&output));
    assert!(stderr(&output).contains("episodes have failed, such as: "), "{}", stderr(&output));
    let failed: Vec<Value> =
        rollouts(&bench.path("masked")).into_iter().filter(|answer| answer["ending"] == "failed").collect();
    let share = metrics(&bench.path("masked"))[0]["failed_episodes"].as_f64().unwrap();
    assert!(!failed.is_empty() && (0.0..0.5).contains(&share) && share > 0.0, "{share} {failed:?}");
    for answer in &failed {
        let got = (&answer["reward"], &answer["advantage"], answer["failure"].is_string());
        assert_eq!(got, (&Value::Null, &value!(0.0), true), "{answer}");
    }
    let ended = recipe(&bench, "ended", "");
    fs::write(bench.path("again.py"), AGAIN.replace("    row = rows", "    os._exit(4)\n    row = rows")).unwrap();
    let output = run(&[ended.to_str().unwrap()]);
    assert!(output.status.code() == Some(2) && stderr(&output).contains("(exit status: 4)"), "{}", stderr(&output));
}

#[test]
fn evaluation_rows_are_played_and_a_folder_starts_nothing_unasked() {
    let bench = Bench::new();
    let recipe = recipe(&bench, "run", "");
    let settings = ["--set=data.eval_split=2", "--set=eval.eval_steps=1", "--set=train.max_steps=1"];
    train(&recipe, &settings);
    let evals: Vec<f64> = metrics(&bench.path("run")).iter().filter_map(|line| line["eval_reward"].as_f64()).collect();
    assert_eq!(evals.len(), 2);
    let folder = bench.path("run");
    let folder = folder.to_str().unwrap();
    let refused = run(&["eval", folder, "--json"]);
    assert!(refused.status.code() == Some(2) && stderr(&refused).contains("again.py"), "{}", stderr(&refused));
    let allowed = run(&["eval", folder, "--json", "--allow-command"]);
    let found: Value = serde_json::from_slice(&allowed.stdout).unwrap();
    assert_eq!(found["eval_reward"], evals[1], "{}", stderr(&allowed));
}

#[test]
fn check_starts_nothing_and_says_how_a_conversation_goes_on() {
    let bench = Bench::new();
    let recipe = recipe(&bench, "run", "");
    fs::write(bench.path("again.py"), "open(__file__ + '.started', 'w')\nclass Game: pass\n").unwrap();
    let check = |more: &[&str]| run(&[&["check", recipe.to_str().unwrap()], more].concat());
    let output = check(&[]);
    assert!(output.status.success(), "{}", stderr(&output));
    let said = String::from_utf8(output.stdout.clone()).unwrap();
    assert!(
        said.contains("again.py, not started; episodes of up to 8 turns; replies are messages of the user, as"),
        "{said}"
    );
    assert!(!bench.path("again.py.started").exists());
    let file = format!("--set=objective.environment.python={}", bench.path("again.py").display());
    let once = bench.path("once.jinja");
    fs::write(
        &once,
        "{% if messages | length > 1 %}{{ raise_exception('one turn') }}{% endif %}{{ messages[0].content }}",
    )
    .unwrap();
    let (file, once) = (&*file, &*format!("--set=data.chat_template={}", once.display()));
    for (settings, message) in [
        (&["--set=data.chat_template=none"][..], "`objective.environment` needs a chat template"),
        (&["--set=objective.environment.class=Game"], "is of a `python` file: name that, too"),
        (&[file], "`objective.environment.class` is missing: the class of the `python` file, or `tools`"),
        // A class replies by what tools give.
        (&[file, "--set=objective.environment.class=Game"], "leaves no trace"),
        (&[once], "one turn"),
        (&["--set=objective.environment.command=['no-such-program']"], "there is no no-such-program"),
    ] {
        let output = check(settings);
        assert!(
            output.status.code() == Some(2) && stderr(&output).contains(message),
            "{settings:?}: {}",
            stderr(&output)
        );
    }
}
