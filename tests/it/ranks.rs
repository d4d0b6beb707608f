//! Several processes as one run, under the launchers of Open MPI and MPICH (Debian: openmpi-bin and mpich).

#![cfg(target_os = "linux")]
#![allow(clippy::print_stderr, reason = "what was skipped, and what was done")]

use std::fs;
use std::io::{Read as _, Write as _};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use crate::common::{Bench, lora_train, metrics, run, signal, stderr, steps, train, wait, wait_until};
use crate::images;
use crate::rollouts::answering;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use safetensors::SafeTensors;
use serde_json::{Value, json};

const OPEN_MPI: &str = "mpirun.openmpi";
const MPICH: &str = "mpirun.mpich";

/// The usual libraries of the two.
const LIBRARIES: [(&str, &str); 2] = [(OPEN_MPI, "libmpi.so.40"), (MPICH, "libmpich.so.12")];

/// Whether there is this launcher. If not, the test that asks is skipped, or fails where `LORA_TRAIN_NO_SKIPS` is set.
fn has(launcher: &str) -> bool {
    let has = Command::new(launcher).arg("--version").output().is_ok();
    assert!(has || std::env::var_os("LORA_TRAIN_NO_SKIPS").is_none(), "no {launcher}");
    if !has {
        eprintln!("skipped: no {launcher}");
    }
    has
}

/// The program with these arguments on so many ranks.
fn launched(launcher: &str, ranks: usize, args: &[&str]) -> Command {
    let program = lora_train(args);
    let mut command = Command::new(launcher);
    command.args(["-n", &ranks.to_string()]);
    if launcher == OPEN_MPI {
        command.args(["--oversubscribe", "--allow-run-as-root"]);
    }
    command.arg(program.get_program()).args(program.get_args());
    for (name, value) in program.get_envs() {
        match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        };
    }
    // Each rank would take both cores, and the tests beside it too.
    command.env("RAYON_NUM_THREADS", "1").stdin(Stdio::null());
    command
}

fn train_on(launcher: &str, ranks: usize, recipe: &Path, args: &[&str]) -> Output {
    let mut all = vec![recipe.to_str().unwrap()];
    all.extend(args);
    let output = launched(launcher, ranks, &all).output().unwrap();
    assert!(output.status.success(), "{ranks} ranks: {}", stderr(&output));
    output
}

/// The adapter's numbers, by the order of their names.
fn adapter(run_dir: &Path) -> Vec<f32> {
    let bytes = fs::read(run_dir.join("adapter/adapter_model.safetensors")).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let mut names = tensors.names();
    names.sort_unstable();
    let numbers = names.iter().flat_map(|name| {
        let numbers = tensors.tensor(name).unwrap().data().to_vec();
        numbers.chunks(4).map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap())).collect::<Vec<_>>()
    });
    numbers.collect()
}

/// Asserts the same losses and the same adapter but for the order of sums.
fn assert_same(found: &Path, expected: &Path, what: &str) {
    let of = |run_dir: &Path, name: &str| -> Vec<f64> {
        metrics(run_dir).iter().filter_map(|line| line[name].as_f64()).collect()
    };
    for name in ["loss", "eval_loss", "grad_norm", "tokens", "target_tokens", "rows", "epoch"] {
        let (found, expected) = (of(found, name), of(expected, name));
        assert_eq!(found.len(), expected.len(), "{what}: {name}");
        for (step, (found, expected)) in found.iter().zip(expected).enumerate() {
            // The losses begin at 10 nats; norms of gradients are less exact than they.
            let bound = if name == "grad_norm" { 1e-4 } else { 1e-6 };
            assert!((found - expected).abs() < bound * expected.max(1.0), "{what}, {step}: {name} {found} {expected}");
        }
    }
    let differences =
        adapter(found).into_iter().zip(adapter(expected)).map(|(found, expected)| (found - expected).abs());
    let most = differences.fold(0.0, f32::max);
    assert!(most < 1e-5, "{what}: adapters differ by {most}");
}

/// Settings under which rounding does not grow over the steps, and with which gradients are summed in several buckets.
const EVEN: [&str; 12] = [
    "--set", "lora.r=64", "--set", "optimizer.learning_rate=2e-4", "--set", "train.precision=f32", "--set",
    "train.max_steps=50", "--set", "eval.eval_steps=20", "--set", "eval.generate=[\"Once\"]",
];

/// So many that a signal comes before the last, at rates that do not depend on their number.
const MANY_STEPS: [&str; 4] = ["--set", "train.max_steps=5000", "--set", "scheduler.lr_scheduler=constant"];

fn with<'a>(args: &[&'a str], more: &[&'a str]) -> Vec<&'a str> {
    args.iter().chain(more).copied().collect()
}

#[test]
fn one_two_and_four_ranks_train_the_same() {
    if !has(OPEN_MPI) {
        return;
    }
    for (name, steps, settings) in [
        ("dropout and accumulation", 50, &["--set", "train.gradient_accumulation_steps=4"][..]),
        (
            "micro-batches cut between rows",
            25,
            &["--set", "train.micro_batch_size=6", "--set", "train.gradient_accumulation_steps=1"],
        ),
        ("packing", 25, &["--set", "data.packing=true", "--set", "train.gradient_accumulation_steps=3"]),
        (
            "layer by layer, with noise",
            25,
            &["--set", "train.layered_accumulation=true", "--set", "train.neftune_noise_alpha=5"],
        ),
        ("a start from the rows", 25, &["--set", "lora.r=4", "--set", "lora.init_lora_weights=\"eva\""]),
    ] {
        let bench = Bench::new();
        let steps = format!("train.max_steps={steps}");
        let args = [&EVEN[..], settings, &["--set", &steps]].concat();
        train(&bench.recipe("alone", ""), &args);
        for ranks in [2, 4] {
            let run_dir = bench.path(&ranks.to_string());
            let output = train_on(OPEN_MPI, ranks, &bench.recipe(&ranks.to_string(), ""), &args);
            assert!(stderr(&output).contains(&format!("ranks: {ranks} ({ranks} on ")), "{}", stderr(&output));
            assert_same(&run_dir, &bench.path("alone"), &format!("{name}, {ranks} ranks"));
        }
    }
}

#[test]
fn ranks_see_images_as_one_does() {
    if !has(OPEN_MPI) {
        return;
    }
    let bench = Bench::new();
    let folder = bench.path("");
    images::write_model(images::QWEN3_VL, &folder);
    let of = |run_dir: &str| {
        let recipe = images::RECIPE.replace("\"run\"", &format!("{:?}", folder.join(run_dir)));
        let recipe = recipe
            .replace("\".\"", &format!("{folder:?}"))
            .replace("\"rows.jsonl\"", &format!("{:?}", folder.join("rows.jsonl")));
        let path = folder.join(format!("{run_dir}.toml"));
        fs::write(&path, recipe).unwrap();
        path
    };
    train(&of("one"), &["--set=train.max_steps=6"]);
    train_on(OPEN_MPI, 2, &of("two"), &["--set=train.max_steps=6"]);
    assert_same(&folder.join("two"), &folder.join("one"), "two ranks");
}

#[test]
fn ranks_that_answer_their_own_prompts_train_as_one() {
    if !has(OPEN_MPI) {
        return;
    }
    let bench = Bench::new();
    let reward = "kind = 'regex'\nregex_pattern = 'She|He |e'";
    let eval = format!("--set=data.eval=[{{path={:?}}}]", bench.path("train.jsonl"));
    let settings = [
        "--set=optimizer.learning_rate=2e-4",
        "--set=train.micro_batch_size=3",
        "--set=train.gradient_accumulation_steps=3",
        "--set=train.max_steps=4",
        "--set=lora.lora_dropout=0.1",
        "--set=objective.num_iterations=2",
        "--set=checkpoint.save_steps=3",
        &eval,
    ];
    train(&answering(&bench, "one", reward), &settings);
    train_on(OPEN_MPI, 2, &answering(&bench, "two", reward), &settings);
    assert_same(&bench.path("two"), &bench.path("one"), "two ranks");
    let of = |run_dir: &str| -> Vec<f64> {
        let names = ["reward", "reward_std", "completion_length", "eval_reward"];
        let lines = metrics(&bench.path(run_dir));
        lines.iter().flat_map(|line| names.map(|name| line[name].as_f64().unwrap_or(-1.0))).collect()
    };
    let is_near = |(one, two): (&f64, &f64)| (one - two).abs() < 1e-9;
    assert!(of("one").iter().zip(&of("two")).all(is_near), "{:?} {:?}", of("one"), of("two"));
    // Between two uses of the same answers, another number of ranks.
    let checkpoint = bench.path("one/checkpoints/step-000003");
    let resume = [&settings[..], &["--resume", checkpoint.to_str().unwrap()]].concat();
    train_on(OPEN_MPI, 2, &answering(&bench, "resumed", reward), &resume);
    let differences = adapter(&bench.path("resumed")).into_iter().zip(adapter(&bench.path("one")));
    assert!(differences.map(|(two, one)| (two - one).abs()).fold(0.0, f32::max) < 1e-5);
}

#[test]
fn scores_are_those_of_the_rows_of_all_ranks() {
    if !has(OPEN_MPI) {
        return;
    }
    let bench = Bench::new();
    let choices = ["cat", "dog", "bird", "fox"];
    let row = |index: usize| {
        let prompt = format!("{index}: Once there was a little");
        format!("{}\n", json!({"prompt": prompt, "completion": choices[index * 7 % 4], "choices": choices}))
    };
    fs::write(bench.path("eval.jsonl"), (0..7).map(row).collect::<String>()).unwrap();
    for task in [
        &["--set=eval.task.metric=multiple_choice", "--set=eval.task.prompt=\"{prompt}\""][..],
        &["--set=eval.task.metric=token_accuracy"],
        &["--set=eval.task.metric=json", "--set=eval.task.max_new_tokens=4"],
    ] {
        let settings =
            with(&EVEN, &with(task, &["--set=train.max_steps=2", "--set=train.gradient_accumulation_steps=3"]));
        let scores = |name: &str| -> Vec<Value> {
            let lines = metrics(&bench.path(name));
            lines.iter().map(|line| json!([line["eval_score"], line["eval_score_norm"]])).collect()
        };
        let run = |ranks: usize| format!("{ranks}-{}", task[0].rsplit('=').next().unwrap());
        train(&bench.recipe(&run(1), ""), &settings);
        train_on(OPEN_MPI, 3, &bench.recipe(&run(3), ""), &settings);
        assert_eq!(scores(&run(1)), scores(&run(3)), "{task:?}");
        assert!(scores(&run(1)).iter().any(|score| score[0].is_number()), "{:?}", scores(&run(1)));
        let samples = [1, 3].map(|ranks| fs::read_to_string(bench.path(&run(ranks)).join("samples.jsonl")).unwrap());
        assert_eq!(samples[0].lines().count(), samples[1].lines().count());
    }
}

#[test]
fn as_many_ranks_twice_give_the_same_bytes_under_either_launcher() {
    for launcher in [OPEN_MPI, MPICH] {
        if !has(launcher) {
            continue;
        }
        let bench = Bench::new();
        let args = with(&EVEN, &["--set", "train.max_steps=12"]);
        for name in ["once", "twice"] {
            train_on(launcher, 3, &bench.recipe(name, ""), &args);
        }
        let bytes = |name: &str| fs::read(bench.path(name).join("adapter/adapter_model.safetensors")).unwrap();
        assert!(bytes("once") == bytes("twice"), "{launcher}");
        let line = &steps(&bench.path("once"))[0];
        assert_eq!((&line["ranks"], line["rank_seconds"].as_array().unwrap().len()), (&3.into(), 3), "{line}");
        assert!(line["exchange_seconds"].as_f64().unwrap() >= 0.0);
        let rank_tokens: f64 =
            line["rank_tokens"].as_array().unwrap().iter().map(|tokens| tokens.as_f64().unwrap()).sum();
        assert_eq!(Some(rank_tokens), line["tokens"].as_f64());
    }
}

#[test]
fn launcher_and_library_that_do_not_belong_together_are_refused() {
    if !has(OPEN_MPI) || !has(MPICH) {
        return;
    }
    let bench = Bench::new();
    let recipe = bench.recipe("run", "");
    for (launcher, library, text) in [
        (OPEN_MPI, LIBRARIES[1].1, "Open MPI's mpirun started 2 ranks, and MPICH 4"),
        (MPICH, LIBRARIES[0].1, "MPICH's mpirun started 2 ranks, and Open MPI v4"),
        (OPEN_MPI, "libnone.so.1", "there is no MPI library to connect them"),
        (MPICH, "libm.so.6", "libm.so.6: no MPI_Init_thread"),
    ] {
        let output =
            launched(launcher, 2, &[recipe.to_str().unwrap()]).env("LORA_TRAIN_MPI", library).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{}", stderr(&output));
        assert!(stderr(&output).contains(text), "{}", stderr(&output));
    }
    assert!(!bench.path("run").exists());
    // Processes of torchrun would train the same thing side by side.
    let torchrun = [("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "2")];
    let output = lora_train(&[recipe.to_str().unwrap()]).envs(torchrun).output().unwrap();
    assert!(output.status.code() == Some(2) && stderr(&output).contains("torchrun"), "{}", stderr(&output));
}

#[test]
fn a_mistake_is_told_once_and_ranks_with_other_recipes_are_refused() {
    if !has(OPEN_MPI) {
        return;
    }
    let bench = Bench::new();
    let recipe = bench.recipe("run", "");
    let output = launched(OPEN_MPI, 3, &[recipe.to_str().unwrap(), "--set", "lora.r=0"]).output().unwrap();
    assert_eq!((output.status.code(), stderr(&output).matches("error: ").count()), (Some(2), 1), "{}", stderr(&output));
    // mpirun starts other arguments after a colon.
    let mut command = launched(OPEN_MPI, 2, &[recipe.to_str().unwrap()]);
    let other = lora_train(&[recipe.to_str().unwrap(), "--set", "seed=8"]);
    command.args([":", "-n", "1"]).arg(other.get_program()).args(other.get_args());
    let output = command.output().unwrap();
    let text = stderr(&output);
    assert!(text.contains("the ranks have different recipes: ") && text.contains(" for rank 2 on "), "{text}");
    assert!(steps(&bench.path("run")).is_empty());
}

/// A server that answers every request after some seconds, with the Hub's message for gated models.
fn slow_hub(seconds: u64) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint = format!("http://{}", listener.local_addr().unwrap());
    std::thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            let _ = stream.read(&mut [0; 8192]);
            std::thread::sleep(Duration::from_secs(seconds));
            let head =
                "HTTP/1.1 403 Forbidden\r\nX-Error-Code: GatedRepo\r\nContent-Length: 0\r\nConnection: close\r\n\r\n";
            // Ignore a client that disconnects early.
            let _ = stream.write_all(head.as_bytes());
        }
    });
    endpoint
}

#[test]
fn ranks_wait_longer_than_their_deadline_for_one_that_is_still_at_it() {
    for launcher in [OPEN_MPI, MPICH] {
        if !has(launcher) {
            continue;
        }
        let bench = Bench::new();
        let recipe = bench.recipe("run", "");
        let mut command = launched(launcher, 2, &[recipe.to_str().unwrap(), "--set", "model.path=org/model"]);
        command.env("HF_ENDPOINT", slow_hub(8)).env("HF_HOME", bench.path("hub"));
        command.env_remove("HF_HUB_OFFLINE").env_remove("HF_TOKEN").env("HF_HUB_DISABLE_IMPLICIT_TOKEN", "1");
        let output = command.env("LORA_TRAIN_LONG_WAIT_SECONDS", "3").output().unwrap();
        let text = stderr(&output);
        assert!(text.contains("org/model is gated") && !text.contains("no answer"), "{launcher}: {text}");
    }
}

/// A run in the background, whose messages go to a file.
fn start(bench: &Bench, launcher: &str, ranks: usize, args: &[&str]) -> Child {
    let log = fs::OpenOptions::new().create(true).append(true).open(bench.path("log")).unwrap();
    let mut command = launched(launcher, ranks, args);
    command.stdout(Stdio::null()).stderr(log).spawn().unwrap()
}

/// The processes of ranks that write nothing into the run's folder are recognised by their environment.
fn rank_process(launcher: &Child, rank: usize) -> Option<u32> {
    let is_below = |pid: u32| {
        let mut pid = pid;
        for _ in 0..4 {
            let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
            let parent = stat.rsplit(')').next().unwrap_or_default().split_whitespace().nth(1).map(str::to_owned);
            pid = parent.and_then(|parent| parent.parse().ok()).unwrap_or(0);
            if pid == launcher.id() {
                return true;
            }
        }
        false
    };
    let pids = fs::read_dir("/proc").unwrap().filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    pids.filter(|pid| is_below(*pid)).find(|pid| {
        let environment = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        let names = [format!("OMPI_COMM_WORLD_RANK={rank}"), format!("PMI_RANK={rank}")];
        environment.split(|byte| *byte == 0).any(|entry| names.iter().any(|name| name.as_bytes() == entry))
    })
}

fn log(bench: &Bench) -> String {
    fs::read_to_string(bench.path("log")).unwrap_or_default()
}

fn checkpoints(run_dir: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(run_dir.join("checkpoints")).into_iter().flatten().flatten();
    // A kill may leave one that is being written, under a hidden name.
    let is_whole = |path: &PathBuf| path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("step-"));
    entries.map(|entry| entry.path()).filter(is_whole).collect()
}

#[test]
fn a_killed_rank_ends_all_and_the_run_continues_on_another_number_of_ranks() {
    if !has(OPEN_MPI) || !has(MPICH) {
        return;
    }
    let bench = Bench::new();
    let kills = std::env::var("LORA_TRAIN_SOAK_KILLS").ok().and_then(|kills| kills.parse().ok()).unwrap_or(4);
    let steps_of_run = format!("train.max_steps={}", 50.max(5 * kills));
    let more = ["--set", "checkpoint.save_steps=3", "--set", "train.gradient_accumulation_steps=4", "--quiet"];
    let args = with(&with(&EVEN, &more), &["--set", &steps_of_run]);
    train(&bench.recipe("alone", ""), &args);
    let recipe = bench.recipe("run", "");
    let mut all = vec![recipe.to_str().unwrap()];
    all.extend(&args);
    let mut random = ChaCha8Rng::seed_from_u64(3);
    let run_dir = bench.path("run");
    let mut killed_ranks = Vec::new();
    for (launcher, ranks) in [(OPEN_MPI, 4), (MPICH, 2), (OPEN_MPI, 3), (MPICH, 4)].into_iter().cycle().take(kills) {
        let before = steps(&run_dir).len();
        let mut child = start(&bench, launcher, ranks, &all);
        if !all.contains(&"--resume") {
            all.push("--resume");
        }
        let goal = before + random.random_range(2..6);
        wait_until("steps", || steps(&run_dir).len() >= goal || child.try_wait().unwrap().is_some());
        if child.try_wait().unwrap().is_some() {
            break;
        }
        let victim = random.random_range(0..ranks);
        killed_ranks.push(victim);
        let pid = rank_process(&child, victim).unwrap();
        let killed = Instant::now();
        Command::new("kill").args(["-9", &pid.to_string()]).status().unwrap();
        assert!(!wait(&mut child).success(), "{}", log(&bench));
        // Before the deadline of a minute, after which the others end by themselves.
        assert!(killed.elapsed() < Duration::from_secs(50), "{launcher}: {:?}", killed.elapsed());
        wait_until("the end of the others", || (0..ranks).all(|rank| rank_process(&child, rank).is_none()));
        checkpoints(&run_dir).iter().for_each(|path| lora_train::save::checkpoint::verify(path).unwrap());
    }
    eprintln!("killed ranks {killed_ranks:?}");
    let output = run(&all);
    assert!(output.status.success(), "{}", stderr(&output));
    assert_same(&run_dir, &bench.path("alone"), "killed and resumed");
}

#[test]
fn a_stop_of_any_rank_saves_the_same_step_on_all_and_one_rank_continues_from_it() {
    if !has(OPEN_MPI) {
        return;
    }
    let bench = Bench::new();
    let recipe = bench.recipe("run", "");
    let mut all = vec![recipe.to_str().unwrap()];
    all.extend(EVEN);
    all.extend(MANY_STEPS);
    let mut child = start(&bench, OPEN_MPI, 3, &all);
    wait_until("steps", || steps(&bench.path("run")).len() > 3);
    let pid = rank_process(&child, 2).unwrap();
    // Launchers and SLURM send it twice.
    for _ in 0..2 {
        Command::new("kill").args(["-TERM", &pid.to_string()]).status().unwrap();
    }
    assert_eq!(wait(&mut child).code(), Some(130), "{}", log(&bench));
    assert!(log(&bench).contains("with a checkpoint; to continue (on any number of ranks): "), "{}", log(&bench));
    assert_eq!(checkpoints(&bench.path("run")).len(), 1);
    let end = format!("train.max_steps={}", steps(&bench.path("run")).len() + 20);
    let to_its_end = with(&with(&EVEN, &MANY_STEPS), &["--set", &end]);
    train(&bench.recipe("alone", ""), &to_its_end);
    train(&recipe, &with(&to_its_end, &["--resume"]));
    assert_same(&bench.path("run"), &bench.path("alone"), "stopped and resumed");
}

#[test]
fn a_stop_of_the_launcher_is_a_stop_of_all() {
    if !has(MPICH) {
        return;
    }
    let bench = Bench::new();
    let recipe = bench.recipe("run", "");
    let mut all = vec![recipe.to_str().unwrap()];
    all.extend(EVEN);
    all.extend(MANY_STEPS);
    let mut child = start(&bench, MPICH, 2, &all);
    wait_until("steps", || steps(&bench.path("run")).len() > 3);
    signal(&child, libc::SIGTERM);
    wait(&mut child);
    wait_until("the end of the ranks", || (0..2).all(|rank| rank_process(&child, rank).is_none()));
    assert_eq!(checkpoints(&bench.path("run")).len(), 1, "{}", log(&bench));
}
