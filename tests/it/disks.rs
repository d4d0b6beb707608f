//! Full disks, missing or read-only folders, damaged checkpoints, two runs in one folder.

#![cfg(unix)]
#![allow(clippy::print_stderr, reason = "what was skipped, and what was done")]

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use crate::common::{
    Bench, can_unshare, json, lora_train, metrics, run, signal, stderr, steps, train, wait, wait_until,
};

fn adapter(run_dir: &Path) -> Vec<u8> {
    fs::read(run_dir.join("adapter/adapter_model.safetensors")).unwrap()
}

fn step_numbers(run_dir: &Path) -> Vec<u64> {
    steps(run_dir).iter().map(|line| line["step"].as_u64().unwrap()).collect()
}

/// Flips a bit in the middle of a file.
fn damage(path: &Path) {
    let mut bytes = fs::read(path).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(path, bytes).unwrap();
}

#[test]
fn a_damaged_newest_checkpoint_is_told_and_the_one_before_it_taken_to_the_same_end() {
    let bench = Bench::new();
    let (steps, save) = ("train.max_steps=9", "checkpoint.save_steps=3");
    train(&bench.recipe("whole", ""), &["--set", steps, "--set", save]);
    let recipe = bench.recipe("run", "");
    train(&recipe, &["--set", steps, "--set", save]);
    let dir = bench.path("run");
    fs::remove_file(dir.join("summary.json")).unwrap();
    for (file, last) in [("optimizer.safetensors", "step-000009"), ("trainer_state.json", "step-000006")] {
        damage(&dir.join("checkpoints").join(last).join(file));
    }
    let output = train(&recipe, &["--set", steps, "--set", save, "--resume"]);
    let said = stderr(&output);
    for expected in [
        "step-000009: optimizer.safetensors is damaged",
        "step-000006: trainer_state.json is damaged",
        "resuming after step 3 from",
    ] {
        assert!(said.contains(expected), "`{expected}` is missing in:\n{said}");
    }
    assert_eq!(adapter(&dir), adapter(&bench.path("whole")));
    assert_eq!(step_numbers(&dir), (1..=9).collect::<Vec<_>>());
}

#[test]
fn where_no_checkpoint_is_whole_the_run_is_refused_and_a_named_one_is_never_replaced_by_another() {
    let bench = Bench::new();
    let recipe = bench.recipe("run", "");
    let set = ["--set", "train.max_steps=4", "--set", "checkpoint.save_steps=2"];
    train(&recipe, &set);
    let dir = bench.path("run");
    fs::remove_file(dir.join("summary.json")).unwrap();
    damage(&dir.join("checkpoints/step-000004/adapter_model.safetensors"));
    let mut args = vec![recipe.to_str().unwrap()];
    args.extend(set);
    let named = dir.join("checkpoints/step-000004");
    args.extend(["--resume", named.to_str().unwrap()]);
    let refused = run(&args);
    assert_eq!(refused.status.code(), Some(2));
    let said = stderr(&refused);
    assert!(said.contains("adapter_model.safetensors is damaged") && said.contains("step-000002 is whole"), "{said}");

    damage(&dir.join("checkpoints/step-000002/optimizer.safetensors"));
    args.pop();
    let refused = run(&args);
    assert_eq!(refused.status.code(), Some(2));
    let (said, on) = (stderr(&refused), format!("--set lora.start_from={}", dir.display()));
    assert!(said.contains("no checkpoint in") && said.contains("is whole") && said.contains(&on), "{said}");
}

#[test]
fn resume_before_the_first_checkpoint_starts_at_the_beginning_and_says_so() {
    let bench = Bench::new();
    let recipe = bench.recipe("run", "");
    let mut child =
        lora_train(&[recipe.to_str().unwrap(), "--set", "train.max_steps=5000"]).stderr(Stdio::null()).spawn().unwrap();
    let dir = bench.path("run");
    wait_until("three steps", || step_count(&dir) > 3);
    signal(&child, libc::SIGKILL);
    wait(&mut child);
    let output = train(&recipe, &["--set", "train.max_steps=6", "--resume", "--quiet"]);
    assert!(stderr(&output).contains("there is no checkpoint in"), "{}", stderr(&output));
    assert_eq!(step_numbers(&dir), (1..=6).collect::<Vec<_>>());
    assert_eq!(crate::common::events::losses(&dir).len(), 6, "one curve in TensorBoard");
    // The figures of the killed run are kept.
    assert!(stderr(&output).contains("an earlier start that left no checkpoint"), "{}", stderr(&output));
    assert!(step_count(&dir.join("superseded-1")) > 3);
}

/// The contents of all files below a folder, except the lock.
fn content(folder: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut found = BTreeMap::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            found.extend(content(&path));
        } else if path.file_name().unwrap() != ".lock" {
            found.insert(path.clone(), fs::read(&path).unwrap());
        }
    }
    found
}

#[test]
fn a_resumption_that_is_refused_changes_no_file_and_edited_rows_are_told() {
    let bench = Bench::new();
    let recipe = bench.recipe("run", "");
    // 24 rows are 6 steps: step 4 lies within an epoch.
    let settings = ["--set", "train.max_steps=10", "--set", "checkpoint.save_steps=2"];
    train(&recipe, &settings);
    let dir = bench.path("run");
    let checkpoint = dir.join("checkpoints/step-000004");
    let resume = || {
        let given = ["--resume", checkpoint.to_str().unwrap()];
        run(&[&[recipe.to_str().unwrap()], &settings[..], &given].concat())
    };
    let before = content(&dir);
    let rows = fs::read_to_string(bench.path("train.jsonl")).unwrap();
    let more = format!("{rows}{}\n", rows.lines().next().unwrap());
    fs::write(bench.path("train.jsonl"), more).unwrap();
    let refused = resume();
    assert_eq!(refused.status.code(), Some(2), "{}", stderr(&refused));
    assert!(stderr(&refused).contains("it lies within an epoch of 24 rows"), "{}", stderr(&refused));
    assert!(content(&dir) == before, "files: {:?}", content(&dir).keys());

    let told = "the training rows are no longer what the checkpoint was trained with";
    fs::write(bench.path("train.jsonl"), rows.replace("cat", "cow")).unwrap();
    let output = resume();
    assert!(output.status.success() && stderr(&output).contains(told), "{}", stderr(&output));
    fs::remove_file(dir.join("summary.json")).unwrap();
    fs::write(bench.path("train.jsonl"), rows).unwrap();
    let output = resume();
    assert!(output.status.success() && !stderr(&output).contains("no longer"), "{}", stderr(&output));
    assert_eq!(step_numbers(&dir), (1..=10).collect::<Vec<_>>());
}

#[test]
fn checkpoints_come_by_the_clock_where_no_number_of_steps_is_given() {
    let bench = Bench::new();
    let recipe = bench.recipe("run", "");
    let limit = ["--set", "checkpoint.save_minutes=0.0005", "--set", "checkpoint.save_total_limit=2"];
    let mut child = lora_train(&[&[recipe.to_str().unwrap(), "--set", "train.max_steps=5000"], &limit[..]].concat())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let dir = bench.path("run");
    let checkpoints = || {
        let entries = fs::read_dir(dir.join("checkpoints")).into_iter().flatten().flatten();
        let names = entries.map(|entry| entry.file_name().into_string().unwrap());
        names.filter(|name| name.starts_with("step-")).collect::<Vec<_>>()
    };
    wait_until("a checkpoint", || !checkpoints().is_empty());
    wait_until("another one", || step_count(&dir) > 50);
    signal(&child, libc::SIGKILL);
    wait(&mut child);
    // One more may be there, not deleted yet.
    assert!((1..=3).contains(&checkpoints().len()), "{:?}", checkpoints());
    let more = format!("train.max_steps={}", step_count(&dir) + 2);
    let output = train(&recipe, &["--set", &more, "--resume"]);
    assert!(stderr(&output).contains("resuming after step "), "{}", stderr(&output));
    let resolved = fs::read_to_string(dir.join("resolved.toml")).unwrap();
    assert!(resolved.contains("save_minutes = 15.0\nsave_total_limit = 2"), "{resolved}");
}

/// Number of lines so far; the last one may be torn.
fn step_count(run_dir: &Path) -> usize {
    fs::read_to_string(run_dir.join("metrics.jsonl")).unwrap_or_default().lines().count()
}

#[test]
fn a_changed_recipe_is_continued_where_that_is_sound_and_refused_by_key_where_it_is_not() {
    let bench = Bench::new();
    let recipe = bench.recipe("run", "");
    // 24 rows are 6 steps: step 4 lies within an epoch, step 6 between two.
    train(&recipe, &["--set", "train.max_steps=6", "--set", "checkpoint.save_steps=2"]);
    let dir = bench.path("run");
    let resume = |checkpoint: &str, changes: &[&str], output: &str| -> Output {
        let checkpoint = dir.join("checkpoints").join(checkpoint);
        let out = format!("output_dir={}", bench.path(output).display());
        let mut args = vec![recipe.to_str().unwrap(), "--set", "train.max_steps=8", "--set", &out];
        args.extend(["--set", "checkpoint.save_steps=2", "--resume", checkpoint.to_str().unwrap()]);
        args.extend(changes.iter().flat_map(|change| ["--set", change]));
        run(&args)
    };
    for (change, told) in [
        ("lora.r=8", "`lora.r` was 4 for checkpoint"),
        ("lora.lora_alpha=4", "`lora.lora_alpha` was 16.0 for checkpoint"),
        ("lora.target_modules=[\"q_proj\"]", "`lora.target_modules` was \"all-linear\" for checkpoint"),
        ("train.micro_batch_size=4", "`train.micro_batch_size` was 2 for checkpoint"),
        ("data.max_length=32", "`data.max_length` was 64 for checkpoint"),
        ("seed=8", "`seed` was 7 for checkpoint"),
    ] {
        let refused = resume("step-000004", &[change], "refused");
        assert_eq!(refused.status.code(), Some(2), "{change}: {}", stderr(&refused));
        assert!(stderr(&refused).contains(told), "{change}: {}", stderr(&refused));
    }
    let both = resume("step-000004", &["lora.r=8", "seed=8"], "refused");
    assert_eq!(stderr(&both).matches("error: --resume: ").count(), 2, "{}", stderr(&both));
    assert!(!bench.path("refused").exists());

    let sound = ["logging.logging_steps=2", "optimizer.learning_rate=5e-4", "data.num_workers=2", "eval.max_batches=1"];
    let output = resume("step-000004", &sound, "sound");
    assert!(output.status.success(), "{}", stderr(&output));
    for told in [
        "train.max_steps: 6 -> 8\n",
        "logging.logging_steps: 1 -> 2\n",
        "eval.max_batches: none -> 1\n",
        "warning: the recipe has changed: optimizer.learning_rate: 0.001 -> 0.0005; this holds for the steps from here on",
    ] {
        assert!(stderr(&output).contains(told), "`{told}` is missing in:\n{}", stderr(&output));
    }
    assert_eq!(step_numbers(&bench.path("sound")), [5, 6, 7, 8]);

    // The rows may change between two epochs.
    let output = resume("step-000006", &["train.micro_batch_size=4", "seed=8"], "between");
    assert!(output.status.success(), "{}", stderr(&output));
    // So may the precision; the loss scale is then searched anew.
    let output = resume("step-000004", &["train.precision=f16"], "f16");
    assert!(output.status.success(), "{}", stderr(&output));
    assert!(steps(&bench.path("f16"))[0]["loss_scale"].as_f64().is_some_and(|scale| scale >= 16384.0));
}

#[test]
fn two_runs_do_not_write_into_one_folder_and_a_killed_one_does_not_block_the_next() {
    let bench = Bench::new();
    let recipe = bench.recipe("run", "");
    let args = [recipe.to_str().unwrap(), "--set", "train.max_steps=5000", "--set", "checkpoint.save_steps=2"];
    let mut first = lora_train(&args).stderr(Stdio::null()).spawn().unwrap();
    let dir = bench.path("run");
    wait_until("a checkpoint", || dir.join("checkpoints/step-000004").is_dir());
    for extra in [&["--resume"][..], &[]] {
        let mut second = args.to_vec();
        second.extend(extra);
        let refused = run(&second);
        assert_eq!(refused.status.code(), Some(2), "{}", stderr(&refused));
        let told = format!("another run (process {}) is writing into it", first.id());
        assert!(stderr(&refused).contains(&told), "{}", stderr(&refused));
    }
    assert!(first.try_wait().unwrap().is_none(), "the first one is not disturbed");
    signal(&first, libc::SIGKILL);
    wait(&mut first);
    let more = format!("train.max_steps={}", step_count(&dir) + 2);
    train(&recipe, &["--set", &more, "--resume"]);
}

#[test]
fn an_output_folder_that_is_deleted_while_training_is_made_anew_and_the_adapter_is_there_at_the_end() {
    let bench = Bench::new();
    train(&bench.recipe("whole", ""), &["--set", "train.max_steps=120"]);
    let recipe = bench.recipe("run", "");
    let log = fs::File::create(bench.path("log")).unwrap();
    let args = [recipe.to_str().unwrap(), "--set", "train.max_steps=120", "--set", "checkpoint.save_steps=10"];
    let mut child = lora_train(&args).stderr(log).spawn().unwrap();
    let dir = bench.path("run");
    wait_until("a checkpoint", || dir.join("checkpoints/step-000010").is_dir());
    // A file may be written while the folder is being emptied.
    wait_until("the folder to be gone", || fs::remove_dir_all(&dir).is_ok() || !dir.exists());
    assert!(wait(&mut child).success(), "{}", fs::read_to_string(bench.path("log")).unwrap());
    let said = fs::read_to_string(bench.path("log")).unwrap();
    assert!(said.contains("metrics.jsonl was deleted while training"), "{said}");
    assert!(
        said.contains("deleted while training, and written again: environment.json, recipe.toml, resolved.toml"),
        "{said}"
    );
    assert_eq!(adapter(&dir), adapter(&bench.path("whole")));
    let seen = step_numbers(&dir);
    assert!(seen.len() < 120 && seen.ends_with(&[118, 119, 120]), "{seen:?}");
    assert!(dir.join("checkpoints/step-000120").is_dir() && dir.join("summary.json").is_file());
    let warnings = json(&dir.join("summary.json"))["warnings"].to_string();
    assert!(warnings.contains("tensorboard was deleted while training"), "{warnings}");
}

/// Runs bash in its own mount namespace, where `$DISK` is a small private disk. `None` where that is not permitted.
fn on_a_small_disk(bench: &Bench, kilobytes: u32, script: &str) -> Option<Output> {
    let disk = bench.path("disk");
    fs::create_dir(&disk).unwrap();
    if !can_unshare(&["-m", "mount", "-t", "tmpfs", "none", disk.to_str().unwrap()]) {
        return None;
    }
    let script = format!("set -u; mount -t tmpfs -o size={kilobytes}k none \"$DISK\"\n{script}");
    let mut command = Command::new("unshare");
    command.args(["-m", "bash", "-c", &script]).env("DISK", &disk).env("BENCH", bench.folder.path());
    command.env("LORA_TRAIN", env!("CARGO_BIN_EXE_lora-train")).env("NO_COLOR", "1").env("RAYON_NUM_THREADS", "2");
    Some(command.stdin(Stdio::null()).output().unwrap())
}

fn recipe_on_disk(bench: &Bench) -> PathBuf {
    let recipe = bench.recipe("run", "");
    let text = fs::read_to_string(&recipe).unwrap();
    let place = bench.path("run").display().to_string();
    fs::write(&recipe, text.replace(&place, &bench.path("disk/run").display().to_string())).unwrap();
    recipe
}

#[test]
fn a_full_disk_neither_ends_a_run_nor_tears_a_file_and_with_room_again_nothing_is_missing() {
    let bench = Bench::new();
    recipe_on_disk(&bench);
    let set = "--set train.max_steps=400 --set checkpoint.save_steps=20 --set checkpoint.save_total_limit=2";
    // A file fills the disk once a checkpoint exists. It is deleted after both warnings.
    let script = format!(
        r#"
        "$LORA_TRAIN" "$BENCH/run.toml" {set} 2> "$BENCH/log" & run=$!
        until [ -d "$DISK/run/checkpoints/step-000020" ]; do sleep 0.01; done
        cat /dev/zero > "$DISK/filler" 2> /dev/null
        until grep -q "no checkpoint was saved" "$BENCH/log" && grep -q "metrics.jsonl cannot" "$BENCH/log"; do
            kill -0 $run || break
            sleep 0.01
        done
        ls -A "$DISK/run/checkpoints" > "$BENCH/while_full"
        rm "$DISK/filler"
        wait $run; code=$?
        cp -r "$DISK/run" "$BENCH/copy"
        exit $code"#
    );
    let Some(output) = on_a_small_disk(&bench, 16_000, &script) else { return };
    let said = fs::read_to_string(bench.path("log")).unwrap();
    assert_eq!(output.status.code(), Some(0), "{}\n{said}", stderr(&output));
    assert!(said.contains("No space left on device"), "{said}");
    assert!(said.contains("metrics.jsonl can be written again; nothing is missing in it"), "{said}");
    let while_full = fs::read_to_string(bench.path("while_full")).unwrap();
    assert!(while_full.contains("step-0000"), "the older checkpoint is still there: {while_full}");
    let copy = bench.path("copy");
    assert_eq!(step_numbers(&copy), (1..=400).collect::<Vec<_>>());
    assert_eq!(crate::common::events::losses(&copy).len(), 400);
    train(&bench.recipe("whole", ""), &["--set", "train.max_steps=400"]);
    assert_eq!(adapter(&copy), adapter(&bench.path("whole")));
    assert!(copy.join("checkpoints/step-000400").is_dir());
}

#[test]
fn a_disk_that_stays_full_ends_a_run_with_1_and_the_adapter_elsewhere() {
    let bench = Bench::new();
    recipe_on_disk(&bench);
    fs::create_dir(bench.path("elsewhere")).unwrap();
    // A read-only disk also refuses everything.
    for (name, refuse) in
        [("full", "cat /dev/zero > $DISK/filler 2> /dev/null"), ("read-only", "mount -t tmpfs -o ro none $DISK/run")]
    {
        let script = format!(
            r#"
            export TMPDIR="$BENCH/elsewhere"
            "$LORA_TRAIN" "$BENCH/run.toml" --set train.max_steps=200 --set checkpoint.save_steps=10 2> "$BENCH/log" & run=$!
            until [ -d "$DISK/run/checkpoints/step-000010" ]; do sleep 0.01; done
            {refuse}
            wait $run; code=$?
            "$LORA_TRAIN" "$BENCH/run.toml" --set train.max_steps=200 --resume 2> "$BENCH/again"
            umount "$DISK/run" 2> /dev/null
            ls -A "$DISK/run" "$DISK/run/checkpoints" > "$BENCH/left"
            exit $code"#
        );
        let Some(output) = on_a_small_disk(&bench, 60_000, &script) else { return };
        let said = fs::read_to_string(bench.path("log")).unwrap();
        assert_eq!(output.status.code(), Some(1), "{name}: {}\n{said}", stderr(&output));
        let left = fs::read_to_string(bench.path("left")).unwrap();
        assert!(
            left.contains("step-000010") && !left.contains("partial") && !left.contains("summary"),
            "{name}: {left}"
        );
        assert!(said.contains("failed at step 200 of 200") && said.contains("warning: no report: "), "{name}: {said}");
        let place =
            said.split("the trained adapter was written to ").nth(1).expect("a place").split(' ').next().unwrap();
        assert!(Path::new(place).starts_with(bench.path("elsewhere")), "{name}: {said}");
        train(&bench.recipe(&format!("whole-{name}"), ""), &["--set", "train.max_steps=200"]);
        let whole = adapter(&bench.path(&format!("whole-{name}")));
        assert_eq!(fs::read(Path::new(place).join("adapter_model.safetensors")).unwrap(), whole, "{name}");
        let again = fs::read_to_string(bench.path("again")).unwrap();
        assert!(again.starts_with("error: "), "it says what the disk refuses: {again}");
        fs::remove_dir(bench.path("disk")).unwrap();
    }
}

#[test]
fn a_limit_of_file_sizes_is_met_as_a_full_disk_is() {
    let bench = Bench::new();
    let recipe = bench.recipe("run", "");
    let mut command = Command::new("bash");
    // In blocks of 1024 bytes: enough for figures, too small for adapters.
    command.args([
        "-c",
        "ulimit -f 100; exec \"$@\"",
        "bash",
        env!("CARGO_BIN_EXE_lora-train"),
        recipe.to_str().unwrap(),
    ]);
    command.args(["--set", "train.max_steps=8", "--set", "checkpoint.save_steps=4"]).stdin(Stdio::null());
    let output = command.output().unwrap();
    let said = stderr(&output);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert_eq!(said.matches("no checkpoint was saved").count(), 2, "{said}");
    assert!(said.contains("it is tried again after step 8"), "{said}");
    assert!(said.contains("File too large") && said.contains("nor could it be written elsewhere"), "{said}");
    let dir = bench.path("run");
    assert_eq!(step_numbers(&dir), (1..=8).collect::<Vec<_>>());
    assert_eq!(fs::read_dir(dir.join("checkpoints")).unwrap().count(), 0, "nothing half");
    assert!(!dir.join("summary.json").exists(), "summary.json means finished");
    assert!(metrics(&dir).len() > 8);
    // The page is smaller than the limit.
    let page = fs::read_to_string(dir.join("report.html")).unwrap();
    assert!(page.contains("failed at step 8 of 8") && page.contains("File too large"), "{page}");
    assert!(said.contains("failed at step 8 of 8, after "), "{said}");
}

#[test]
fn an_interrupt_whose_checkpoint_cannot_be_written_ends_with_1_and_says_where_to_go_on() {
    let bench = Bench::new();
    let recipe = bench.recipe("run", "");
    let log = fs::File::create(bench.path("log")).unwrap();
    let args = [recipe.to_str().unwrap(), "--set", "train.max_steps=5000", "--set", "checkpoint.save_steps=4"];
    let mut child = lora_train(&args).stderr(log).spawn().unwrap();
    let dir = bench.path("run");
    wait_until("a checkpoint", || dir.join("checkpoints/step-000004").is_dir());
    // A file in place of a folder fails even for root.
    let aside = bench.path("aside");
    fs::rename(dir.join("checkpoints"), &aside).unwrap();
    fs::write(dir.join("checkpoints"), "").unwrap();
    wait_until("a save that fails", || {
        fs::read_to_string(bench.path("log")).unwrap().contains("no checkpoint was saved")
    });
    signal(&child, libc::SIGINT);
    assert_eq!(wait(&mut child).code(), Some(1));
    let said = fs::read_to_string(bench.path("log")).unwrap();
    assert!(said.contains("error: stopped after step") && said.contains("which is not saved"), "{said}");
    let page = fs::read_to_string(dir.join("report.html")).unwrap();
    assert!(page.contains("<p><span>failed at step ") && page.contains("which is not saved"), "{page}");
    fs::remove_file(dir.join("checkpoints")).unwrap();
    fs::rename(&aside, dir.join("checkpoints")).unwrap();
    let more = format!("train.max_steps={}", step_count(&dir) + 2);
    train(&recipe, &["--set", &more, "--resume"]);
}
