use super::*;

fn row(prompt: Value) -> PromptRow {
    let value = json!({"prompt": prompt, "answer": "so 1,002", "n": 3});
    PromptRow { value, prompt, tools: None, prompt_column: "prompt".into() }
}

fn started(config: RewardConfig) -> Result<Reward, String> {
    let objective = ObjectiveConfig { reward: vec![config], max_completion_length: 8, ..ObjectiveConfig::default() };
    let mut reward = Reward::all(&objective)?.remove(0);
    reward.start(None, &|| false)?;
    Ok(reward)
}

/// The scores of texts, times their factors.
fn judge(reward: &mut Reward, texts: &[&str]) -> Result<(Vec<ByAnswer>, Said), Failure> {
    judge_at(3, reward, texts)
}

fn judge_at(global_step: u64, reward: &mut Reward, texts: &[&str]) -> Result<(Vec<ByAnswer>, Said), Failure> {
    let (row, ids) = (row("1 + 1?".into()), vec![7; 99]);
    let answers: Vec<_> =
        texts.iter().map(|text| Judged { row: &row, text, ids: &ids[..text.chars().count()], played: None }).collect();
    let state = JudgeState { global_step, max_steps: 9, epoch: 0.5 };
    let (scores, said) = reward.judge(&answers, &state, &|| false)?;
    let weighed = |of: Scores| of.by_answer.into_iter().map(|score| Some(score? * of.weight)).collect();
    Ok((scores.into_iter().map(weighed).collect(), said))
}

fn reward(config: RewardConfig, text: &str) -> Result<Option<f64>, String> {
    let (scores, _) = judge(&mut started(config)?, &[text]).map_err(|failure| failure.reason)?;
    Ok(scores[0][0])
}

#[test]
fn answers_get_what_the_rules_say() {
    let of = |kind: RewardKind| RewardConfig { kind: Some(kind), ..RewardConfig::default() };
    let any_case = |kind: RewardKind| RewardConfig { ignore_case: true, ..of(kind) };
    let number = RewardConfig { column: "n".into(), weight: 0.5, ..of(RewardKind::Number) };
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(&file, r#"{"type": "array", "items": {"type": "integer"}, "minItems": 1}"#).unwrap();
    let schema = RewardConfig { schema: Some(file.path().to_owned()), ..of(RewardKind::Json) };
    let regex = RewardConfig { regex_pattern: Some("^a+$".into()), ..of(RewardKind::Regex) };
    for (config, text, expected) in [
        (of(RewardKind::Exact), " so 1,002\n", 1.0),
        (of(RewardKind::Exact), "1,002", 0.0),
        (of(RewardKind::Contains), "well, so 1,002!", 1.0),
        (of(RewardKind::Contains), "So 1,002", 0.0),
        (any_case(RewardKind::Contains), "Well, SO 1,002!", 1.0),
        (any_case(RewardKind::Exact), "So 1,002", 1.0),
        (RewardConfig { weight: -1.0, ..of(RewardKind::Exact) }, "so 1,002", -1.0),
        (of(RewardKind::Similarity), "so 1,002", 1.0),
        // 6 of 7 and 8 characters in order.
        (of(RewardKind::Similarity), "So 1002", 12.0 / 15.0),
        (any_case(RewardKind::Similarity), "So 1002", 14.0 / 15.0),
        (of(RewardKind::Similarity), "x", 0.0),
        (of(RewardKind::Number), "it is 5, or 1002.", 1.0),
        (of(RewardKind::Number), "1002 or 5", 0.0),
        (number.clone(), "three is 3", 0.5),
        (number, "none", 0.0),
        (regex.clone(), "aaa", 1.0),
        (regex, "aab", 0.0),
        (of(RewardKind::Json), "{\"a\": 1}", 1.0),
        (of(RewardKind::Json), "{\"a\": 1", 0.0),
        (of(RewardKind::Json), "1", 0.0),
        (schema.clone(), " [1, 2]\n", 1.0),
        (schema.clone(), "[]", 0.0),
        (schema.clone(), "[1, 2", 0.0),
        (schema, "{}", 0.0),
        (of(RewardKind::Length), "sixsix", 0.0),
        (of(RewardKind::Length), "sevenx7", -0.5),
        (of(RewardKind::Length), "eight888", -1.0),
    ] {
        assert_eq!(reward(config.clone(), text), Ok(Some(expected)), "{config:?} of {text}");
    }
    let absent = RewardConfig { column: "solution".into(), ..of(RewardKind::Exact) };
    assert!(reward(absent, "x").unwrap_err().starts_with("there is no text in `solution`"));
}

#[test]
fn a_program_judges_line_by_line_and_its_failures_are_reported() {
    let program = |script: &str| RewardConfig {
        kind: Some(RewardKind::Command),
        command: ["sh", "-c", script].map(str::to_owned).to_vec(),
        max_seconds: Some(60.0),
        ..RewardConfig::default()
    };
    let judge = "while read -r line; do case $line in *good*) echo 1.5;; *none*) echo null;; *) echo 0;; esac; done";
    let (scores, _) = self::judge(&mut started(program(judge)).unwrap(), &["good", "none", "bad"]).unwrap();
    assert_eq!(scores, [[Some(1.5), None, Some(0.0)]]);
    for (script, message) in [
        ("read -r line; echo no", "expected a number or null"),
        ("exit 3", "sh -c has ended (exit status: 3)"),
        ("read -r line; echo 1e300", "is beyond 1e15"),
    ] {
        let error = reward(program(script), "x").unwrap_err();
        assert!(error.contains(message), "{error}");
    }
    let silent = RewardConfig { max_seconds: Some(2.0), ..program("sleep 9") };
    assert!(reward(silent, "x").unwrap_err().contains("has not answered within 2 s"));
    let missing = RewardConfig { command: vec!["no-such-program".into()], ..program("") };
    assert!(reward(missing, "x").unwrap_err().contains("there is no no-such-program"));
}

/// A file of functions, and the reward by them.
fn python(text: &str, functions: &[&str]) -> (tempfile::TempDir, RewardConfig) {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("rewards.py");
    std::fs::write(&file, text).unwrap();
    let functions = functions.iter().map(|name| (*name).to_owned()).collect();
    (folder, RewardConfig { kind: Some(RewardKind::Python), file: Some(file), functions, ..RewardConfig::default() })
}

#[test]
fn functions_of_a_python_file_judge_a_round_as_trl_calls_them() {
    let text = r#"
import asyncio, os, signal, sys
print("imported", flush=True)
os.write(1, b"not an answer\n")
calls = 0

def length(prompts, completions, answer, n, completion_ids, trainer_state, **kwargs):
    global calls
    calls += 1
    assert prompts == ["1 + 1?"] * len(completions) and answer == ["so 1,002"] * len(completions) and n[0] == 3
    assert [len(ids) for ids in completion_ids] == [len(text) for text in completions]
    assert (trainer_state.global_step, trainer_state.max_steps, trainer_state.epoch) == (3, 9, 0.5)
    signal.setitimer(signal.ITIMER_REAL, 0)
    os.system("echo printed by a child")
    kwargs["log_metric"]("calls", calls)
    kwargs["log_extra"]("shout", [text.upper() for text in completions])
    return [float(len(text)) for text in completions]

async def later(completions, **kwargs):
    await asyncio.sleep(0.01)
    return [None if text == " é" else float("nan") if text == "bb" else True for text in completions]

def secrets(completions, **kwargs):
    found = [name for name in os.environ if "TOKEN" in name or "CARGO" in name]
    return [float(len(found))] * len(completions)
"#;
    let (_folder, config) = python(text, &["length", "later", "secrets"]);
    let config = RewardConfig { weights: Some(vec![1.0, 2.0, 1.0]), weight: 0.5, ..config };
    let mut reward = started(config).unwrap();
    for calls in 1..3 {
        let (scores, said) = judge(&mut reward, &["a", "bb", "\u{2028}é"]).unwrap();
        assert_eq!(scores[..2], [[Some(0.5), Some(1.0), Some(1.0)], [Some(1.0), None, None]]);
        assert_eq!(scores[2], [Some(0.0); 3], "`cargo test` sets variables that it does not get");
        assert_eq!(said.metrics, std::collections::BTreeMap::from([("calls".to_owned(), f64::from(calls))]));
        assert_eq!(said.extra["shout"], ["A", "BB", "\u{2028}É"]);
    }
}

#[test]
fn messages_are_judged_as_messages() {
    let text = "def f(prompts, completions, **kwargs):\n    return [len(c[0]['content']) + (c[0]['role'] == 'assistant') + len(p) \
                for p, c in zip(prompts, completions)]\n";
    let (_folder, config) = python(text, &["f"]);
    let row = row(json!([{"role": "user", "content": "Hi"}]));
    let judged = Judged { row: &row, text: "you", ids: &[1], played: None };
    let (scores, _) = started(config).unwrap().judge(&[judged], &JudgeState::default(), &|| false).unwrap();
    assert_eq!(scores[0].by_answer, [Some(5.0)]);
}

#[test]
fn functions_that_fail_end_the_round_with_their_name_their_traceback_and_the_answer() {
    let cases = [
        (
            "[1 / (text != 'bad') for text in c]",
            Some(1),
            &["`f` of ", "ZeroDivisionError: division by zero\n", "rewards.py\", line "][..],
        ),
        ("[1.0]", None, &["1 rewards for 3 completions"]),
        ("1.0", None, &["TypeError"]),
        ("[1.0, 'high', 2.0]", Some(1), &["could not convert string to float: 'high'"]),
        ("[1.0, 2.0, float('inf')]", Some(2), &["a reward of inf"]),
        ("[1.0, 2.0, -1e16]", Some(2), &["a reward of -1e16 is beyond 1e15"]),
        ("sys.exit(3)", None, &["SystemExit: 3"]),
        ("exec('raise ValueError(chr(27) + \"[2J\")')", Some(0), &["ValueError: \\u{1b}[2J"]),
        ("k['log_extra']('x', [1]) or [1.0] * 3", None, &["not one value for each answer in \"x\""]),
        // A child that comes back answers nothing.
        ("os.fork() and [1.0]", None, &["1 rewards"]),
        ("os._exit(4)", None, &["has ended (exit status: 4)"]),
        ("os.kill(os.getpid(), 9)", None, &["has ended (signal: 9 (SIGKILL))"]),
        // What it has started may keep its output open.
        ("os.fork() and os._exit(5) or time.sleep(99)", None, &["has ended (exit status: 5)"]),
        ("time.sleep(99)", None, &["has not answered within 0.7 s"]),
    ];
    let bodies: String = cases.iter().map(|(body, ..)| format!("    lambda c, k: {body},\n")).collect();
    let text = format!(
        "import os, sys, time\ncases = [\n{bodies}]\ndef f(completions, trainer_state, **kwargs):\n    \
         return cases[trainer_state.global_step](completions, kwargs)\n"
    );
    let (_folder, config) = python(&text, &["f"]);
    let mut running = started(config.clone()).unwrap();
    for (number, (body, index, messages)) in (0..).zip(cases) {
        let max_seconds = Some(if body == "time.sleep(99)" { 0.7 } else { 60.0 });
        running.config.max_seconds = max_seconds;
        let failure = judge_at(number, &mut running, &["good", "bad", "worse"]).unwrap_err();
        assert!(messages.iter().all(|message| failure.reason.contains(message)), "{body}: {}", failure.reason);
        assert_eq!(failure.index, index, "{body}: {}", failure.reason);
        if failure.reason.contains("has ended") {
            running = started(config.clone()).unwrap();
        }
    }
}

#[test]
fn a_file_that_cannot_be_used_is_refused_and_none_is_imported_before_the_first_round() {
    for (text, functions, message) in [
        ("def correct(**kwargs): pass", &["corect"][..], "has no `corect`\n  hint: did you mean `correct`?"),
        ("import no_such_module\ndef f(): pass", &["f"], "ModuleNotFoundError: No module named 'no_such_module'"),
        ("# f", &["f"], "has no attribute 'f'"),
        ("f = 1", &["f"], "f is int, and no function"),
        ("import os; os._exit(2)  # f", &["f"], "has ended (exit status: 2)"),
        ("import time; time.sleep(99)  # f", &["f"], "has not answered within 0.5 s"),
    ] {
        let (_folder, config) = python(text, functions);
        let start_seconds = if text.contains("sleep") { 0.5 } else { 60.0 };
        let error = started(RewardConfig { start_seconds, ..config }).unwrap_err();
        assert!(error.contains(message), "{text}: {error}");
    }
    let (folder, config) = python("open(__file__ + '.imported', 'w')\ndef f(**kwargs): pass", &["f"]);
    let all =
        |reward: RewardConfig| Reward::all(&ObjectiveConfig { reward: vec![reward], ..ObjectiveConfig::default() });
    let mut rewards = all(config.clone()).unwrap();
    let imported = folder.path().join("rewards.py.imported");
    assert!(!imported.exists());
    rewards[0].start(None, &|| false).unwrap();
    assert!(imported.exists());
    let absent = |config| all(config).unwrap_err();
    assert!(absent(RewardConfig { python: "no-python".into(), ..config.clone() }).contains("there is no no-python"));
    assert!(absent(RewardConfig { file: Some("absent.py".into()), ..config.clone() }).contains("absent.py: No such"));
    let env = vec!["NO_SUCH_KEY".to_owned()];
    assert!(absent(RewardConfig { env, ..config }).contains("`env` names NO_SUCH_KEY, which is not set"));
}

#[test]
fn what_a_program_writes_to_stderr_is_in_a_file_whose_end_is_shown_with_its_failure() {
    let folder = tempfile::tempdir().unwrap();
    let log = folder.path().join("rewards.log");
    std::fs::write(&log, "of an earlier start\n").unwrap();
    let script = "for i in 1 2 3 4 5 6 7 8 9 10 11; do echo line $i >&2; done; read -r line; exit 3";
    let command = ["sh", "-c", script].map(str::to_owned).to_vec();
    let config = RewardConfig { kind: Some(RewardKind::Command), command, ..RewardConfig::default() };
    let objective = ObjectiveConfig { reward: vec![config], ..ObjectiveConfig::default() };
    let mut rewards = Reward::all(&objective).unwrap();
    rewards[0].start(Some(&log), &|| false).unwrap();
    let reason = judge(&mut rewards[0], &["x"]).unwrap_err().reason;
    assert!(
        reason.contains("(exit status: 3)\n  line 2\n  line 3") && reason.contains("rewards.log has all"),
        "{reason}"
    );
    assert!(std::fs::read_to_string(&log).unwrap().starts_with("of an earlier start\nline 1\n"));
}

#[test]
fn what_a_program_has_started_ends_with_it() {
    let folder = tempfile::tempdir().unwrap();
    let pid = folder.path().join("pid");
    let text = format!(
        "import os, subprocess\ndef f(completions, **kwargs):\n    child = subprocess.Popen(['sleep', '99'])\n    \
         open({pid:?}, 'w').write(str(child.pid))\n    return [0.0] * len(completions)\n"
    );
    let (_folder, config) = python(&text, &["f"]);
    let mut reward = started(config).unwrap();
    judge(&mut reward, &["x"]).unwrap();
    drop(reward);
    let is_there = || {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", std::fs::read_to_string(&pid).unwrap()));
        stat.is_ok_and(|stat| !stat.contains(") Z "))
    };
    let has_ended = (0..100).any(|_| {
        std::thread::sleep(std::time::Duration::from_millis(20));
        !is_there()
    });
    assert!(has_ended || !cfg!(target_os = "linux"));
}
