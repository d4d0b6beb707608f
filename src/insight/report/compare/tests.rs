use std::fs;
use std::path::Path;

use serde_json::json;

use super::*;

const RECIPE: &str = "seed = 1\noutput_dir = \"a\"\n[lora]\nr = 8\n";

/// A run's folder, whose steps all take the same time except a few.
fn run(folder: &Path, name: &str, step_seconds: f64, eval_loss: f64, recipe: &str) -> PathBuf {
    let path = folder.join(name);
    fs::create_dir(&path).unwrap();
    let mut metrics = String::from("{\"step\":0,\"eval_loss\":4.0,\"eval_target_tokens\":1700}\n");
    for step in 1..=100_u32 {
        let seconds = if step < 9 || step % 10 == 0 { 3.0 * step_seconds } else { step_seconds };
        metrics.push_str(&format!(
            "{{\"step\":{step},\"loss\":2.0,\"learning_rate\":1e-3,\"tokens\":1000,\"step_seconds\":{seconds},\
             \"tokens_per_second\":{},\"host_memory_bytes\":1000000}}\n",
            1000.0 / seconds
        ));
    }
    metrics.push_str(&format!("{{\"step\":100,\"eval_loss\":{eval_loss},\"eval_target_tokens\":1700}}\n"));
    fs::write(path.join("metrics.jsonl"), metrics).unwrap();
    fs::write(path.join("resolved.toml"), recipe).unwrap();
    fs::write(path.join("summary.json"), r#"{"outcome":"finished"}"#).unwrap();
    path
}

/// Replaces text in the metrics of a run.
fn edit(run: &Path, from: &str, to: &str) {
    let metrics = fs::read_to_string(run.join("metrics.jsonl")).unwrap();
    assert!(metrics.contains(from), "{from}");
    fs::write(run.join("metrics.jsonl"), metrics.replace(from, to)).unwrap();
}

fn one_a_side(paths: &[&PathBuf]) -> Comparison {
    Comparison::of(&paths.iter().map(|path| vec![(*path).clone()]).collect::<Vec<_>>()).unwrap().0
}

fn limit(text: &str) -> Limit {
    text.parse().unwrap()
}

fn found(comparison: &Comparison, limits: &[&str]) -> Vec<(&'static str, Option<f64>)> {
    let limits: Vec<Limit> = limits.iter().map(|text| limit(text)).collect();
    let regressions = comparison.check(&limits).unwrap().regressions;
    regressions.iter().map(|one| (one.figure, one.percent.map(f64::round))).collect()
}

#[test]
fn a_run_without_a_recipe_differs_in_no_key() {
    let folder = tempfile::tempdir().unwrap();
    let base = run(folder.path(), "base", 1.0, 2.0, RECIPE);
    let other = run(folder.path(), "other", 1.0, 1.9, &RECIPE.replace("r = 8", "r = 4"));
    let lost = run(folder.path(), "lost", 1.0, 1.8, "");
    let comparison = one_a_side(&[&lost, &base]);
    assert!(comparison.recipe_differences.is_empty(), "{comparison:?}");
    assert!(comparison.text().contains("no recipe to compare: no resolved.toml can be read of lost"));
    let comparison = one_a_side(&[&base, &lost, &other]);
    let [Difference { key, values }] = &comparison.recipe_differences[..] else { panic!("{comparison:?}") };
    assert_eq!((key.as_str(), values), ("lora.r", &vec![Some("8".to_owned()), None, Some("4".to_owned())]));
}

#[test]
fn one_run_a_side_gives_percentages_and_is_not_called_faster() {
    let folder = tempfile::tempdir().unwrap();
    let base = run(folder.path(), "base", 1.0, 2.0, RECIPE);
    let other = run(folder.path(), "other", 0.8, 1.9, &RECIPE.replace("r = 8", "r = 4").replace("\"a\"", "\"b\""));
    let comparison = one_a_side(&[&base, &other]);
    let [Difference { key, values }] = &comparison.recipe_differences[..] else { panic!("{comparison:?}") };
    assert_eq!((key.as_str(), values), ("lora.r", &vec![Some("8".to_owned()), Some("4".to_owned())]));
    let Verdict { text, notes, .. } = &comparison.verdicts[0];
    let expected = "tokens/s 1,000 -> 1,250 (+25.0 %); peak memory 977 KiB -> 977 KiB (+0.0 %); \
                    evaluation loss 2.0000 -> 1.9000, 5.0 % lower";
    assert_eq!(text, expected);
    assert!(notes.len() == 1 && notes[0].starts_with("speed: one run each"), "{notes:?}");
    let table = comparison.text();
    assert!(table.contains("lora.r") && table.contains("1,250 (+25.0 %)") && !table.contains("faster"), "{table}");
}

#[test]
fn several_runs_a_side_differ_where_their_ranges_do_not_overlap() {
    let folder = tempfile::tempdir().unwrap();
    let side = |name: &str, seconds: [f64; 3]| {
        let one = |index: usize| run(folder.path(), &format!("{name}-{index}"), seconds[index], 2.0, RECIPE);
        [0, 1, 2].map(one).to_vec()
    };
    let sides = [side("base", [1.0, 1.1, 1.2]), side("fast", [0.8, 0.9, 0.7]), side("like", [1.3, 1.19, 1.4])];
    let comparison = Comparison::of(&sides).unwrap().0;
    let [fast, like] = &comparison.verdicts[..] else { panic!("{comparison:?}") };
    assert_eq!((fast.run.as_str(), fast.notes.len()), ("fast-0 and 2 more", 0));
    assert!(fast.text.starts_with("tokens/s 909 -> 1,250, 37.5 % faster; "), "{}", fast.text);
    assert!(like.text.contains("909 -> 769 (-15.4 %; the ranges of the runs overlap)"), "{}", like.text);
    assert!(comparison.text().contains("769 (~-15.4 %)"), "{}", comparison.text());
    assert_eq!(found(&comparison, &["5"]), []);
    let reversed = Comparison::of(&[sides[1].clone(), sides[0].clone()]).unwrap().0;
    assert_eq!(found(&reversed, &["5"]), [("tokens_per_second", Some(27.0))]);
    fs::write(sides[0][2].join("resolved.toml"), RECIPE.replace('8', "2")).unwrap();
    let notes = &Comparison::of(&sides).unwrap().0.verdicts[0].notes;
    assert_eq!(notes, &["the runs of base-0 and 2 more are of different recipes"]);
}

#[test]
fn a_limit_names_what_became_worse() {
    let folder = tempfile::tempdir().unwrap();
    let base = run(folder.path(), "base", 1.0, 2.0, "");
    let slow = run(folder.path(), "slow", 1.25, 2.1, "");
    let comparison = one_a_side(&[&base, &slow]);
    let (speed, loss) = (("tokens_per_second", Some(20.0)), ("eval_loss", Some(5.0)));
    assert_eq!(found(&comparison, &["4"]), [speed, loss]);
    assert_eq!(found(&comparison, &["10"]), [speed]);
    assert_eq!(found(&comparison, &["30"]), []);
    assert_eq!(found(&comparison, &["eval_loss=1"]), [loss]);
    assert_eq!(found(&comparison, &["4", "tokens_per_second=50"]), [loss]);
    assert_eq!(limit("5%"), Limit { figure: None, percent: 5.0 });
    assert!("-1".parse::<Limit>().is_err() && "nan".parse::<Limit>().is_err());
    let error = "speed=1".parse::<Limit>().unwrap_err();
    assert!(error.contains("`speed`: expected one of tokens_per_second, peak_memory, eval_loss"), "{error}");
}

#[test]
fn evaluation_losses_over_different_numbers_of_tokens_are_not_compared() {
    let folder = tempfile::tempdir().unwrap();
    let base = run(folder.path(), "base", 1.0, 2.0, "");
    let grown = run(folder.path(), "grown", 1.0, 2.5, "");
    edit(&grown, "1700", "1800");
    let comparison = one_a_side(&[&base, &grown]);
    let Verdict { text, notes, .. } = &comparison.verdicts[0];
    assert!(!text.contains("loss") && notes[0].contains("(1,700 and 1,800 target tokens)"), "{text} {notes:?}");
    assert_eq!(comparison.sides[1].figure("best_eval_loss").unwrap().change_percent, None);
    // A check of all figures lists what it left out; a limit on just this figure is a mistake.
    let checked = comparison.check(&[limit("5")]).unwrap();
    assert!(checked.regressions.is_empty(), "{checked:?}");
    let expected = "`eval_loss` of grown: base evaluates other tokens, so the two cannot be compared";
    assert_eq!(checked.not_checked, [expected]);
    assert_eq!(comparison.check(&[limit("eval_loss=5")]), Err(expected.to_owned()));
}

#[test]
fn a_run_whose_last_evaluation_is_lost_fails_the_check_and_is_said_to() {
    let folder = tempfile::tempdir().unwrap();
    let base = run(folder.path(), "base", 1.0, 2.0, "");
    let diverged = run(folder.path(), "diverged", 1.0, 2.0, "");
    edit(&diverged, "\"eval_loss\":2", "\"eval_loss\":null");
    let comparison = one_a_side(&[&base, &diverged]);
    assert_eq!(found(&comparison, &["5"]), [("eval_loss", None)]);
    assert!(comparison.verdicts[0].notes[0].contains("no evaluation loss at the end"));
    assert_eq!(comparison.sides[1].value("best_eval_loss"), Some(4.0));
    // In the other direction there is nothing to compare with.
    let comparison = one_a_side(&[&diverged, &base]);
    let text = "`eval_loss` of base: diverged has none to compare it with";
    assert_eq!(comparison.check(&[limit("5")]).unwrap().not_checked, [text]);
}

#[test]
fn recipes_that_cannot_be_read_are_not_called_the_same() {
    let folder = tempfile::tempdir().unwrap();
    let base = run(folder.path(), "base", 1.0, 2.0, "seed = 1\n");
    let other = run(folder.path(), "other", 1.0, 2.0, "seed = ");
    for runs in [[&base, &other], [&other, &other]] {
        let text = one_a_side(&runs).text();
        let is_named = text.contains("no resolved.toml can be read of ");
        assert!(is_named && !text.contains("the recipes are the same"), "{text}");
    }
}

#[test]
fn the_texts_for_a_prompt_at_the_last_evaluations_stand_below_it() {
    let folder = tempfile::tempdir().unwrap();
    let [base, other, silent] = ["base", "other", "silent"].map(|name| run(folder.path(), name, 1.0, 2.0, RECIPE));
    let sample =
        |step: u64, prompt: &str, text: &str| format!("{}\n", json!({"step": step, "prompt": prompt, "text": text}));
    let texts = sample(0, "Hi", "old") + &sample(100, "Hi", " there\nyou") + &sample(100, "Mine", "alone");
    fs::write(base.join("samples.jsonl"), texts).unwrap();
    fs::write(other.join("samples.jsonl"), sample(0, "Hi", "old") + &sample(60, "Hi", "new")).unwrap();
    let comparison = one_a_side(&[&base, &other, &silent]);
    assert!(comparison.text().ends_with("\n> Hi\n  base, step 100\n    there\n    you\n  other, step 60\n    new"));
    let samples = serde_json::to_value(&comparison).unwrap()["samples"].take();
    let texts = [json!({"step": 100, "text": " there\nyou"}), json!({"step": 60, "text": "new"}), json!(null)];
    assert_eq!(samples, json!([{"prompt": "Hi", "texts": texts}]));
    assert!(!one_a_side(&[&base, &silent]).text().contains("alone"));
}

#[test]
fn losses_of_different_objectives_are_not_compared() {
    let folder = tempfile::tempdir().unwrap();
    let recipe = |beta: f64| format!("{RECIPE}[objective]\nname = \"dpo\"\nbeta = {beta}\n");
    let [base, same, other] = [("base", 0.1), ("same", 0.1), ("other", 0.3)]
        .map(|(name, beta)| run(folder.path(), name, 1.0, 2.0, &recipe(beta)));
    let comparison = one_a_side(&[&base, &same, &other]);
    assert_eq!(comparison.sides[2].figure("final_loss").unwrap().change_percent, None);
    let [same, other] = &comparison.verdicts[..] else { panic!("{comparison:?}") };
    assert!(same.text.contains("evaluation loss"), "{}", same.text);
    assert!(
        !other.text.contains("evaluation loss") && other.notes[0].starts_with("the objectives differ"),
        "{other:?}"
    );
    let older = run(folder.path(), "older", 1.0, 2.0, RECIPE);
    let newer = run(folder.path(), "newer", 1.0, 2.0, &format!("{RECIPE}[objective]\nname = \"cross_entropy\"\n"));
    assert!(one_a_side(&[&older, &newer]).verdicts[0].text.contains("evaluation loss"));
    let error = comparison.check(&[limit("eval_loss=5")]).unwrap_err();
    assert!(error.contains("has another objective"), "{error}");
}

#[test]
fn many_runs_are_ranked_by_their_best_evaluation_with_the_keys_that_differ_and_one_warning() {
    let folder = tempfile::tempdir().unwrap();
    let of = |name: &str, loss: f64, r: u32| {
        run(folder.path(), name, 1.0, loss, &RECIPE.replace("r = 8", &format!("r = {r}")))
    };
    let runs = [("a", 3.0, 8), ("b", 2.0, 16), ("c", 2.5, 4), ("d", 5.0, 2), ("e", 1.0, 32)]
        .map(|(name, loss, r)| of(name, loss, r));
    // Of other rows, so that its loss says nothing here.
    edit(&runs[4], "1700", "900");
    let comparison = one_a_side(&runs.each_ref());
    let text = comparison.text();
    let lines: Vec<Vec<&str>> = text.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(lines[0][..8], ["rank", "run", "eval", "loss", "best", "at", "r", "tokens/s"]);
    let ranked: Vec<_> = lines[1..6].iter().map(|line| (line[0], line[1], line[2], line[4], line[5])).collect();
    let expected = [
        ("1", "b", "2.0000", "100", "16"),
        ("2", "c", "2.5000", "100", "4"),
        ("3", "a", "3.0000", "100", "8"),
        // The one before the first step.
        ("4", "d", "4.0000", "0", "2"),
        ("-", "e", "1.0000", "100", "32"),
    ];
    assert_eq!(ranked, expected);
    assert_eq!((text.matches("one run each").count(), text.contains("against")), (1, false), "{text}");
    let json = serde_json::to_value(&comparison).unwrap();
    assert_eq!(json["ranking"][0], json!({"rank": 1, "run": "b", "figure": "eval_loss", "value": 2.0, "step": 100.0}));
    assert_eq!((&json["ranking"][4]["rank"], json["runs"].as_array().unwrap().len()), (&json!(null), 5));
}

#[test]
fn runs_are_ranked_by_what_they_keep_their_best_adapter_by() {
    let folder = tempfile::tempdir().unwrap();
    let scored = |name: &str, score: f64, loss: f64| {
        let path = run(folder.path(), name, 1.0, loss, "[eval]\nmetric_for_best = \"score\"\n");
        edit(&path, &format!("\"eval_loss\":{loss}"), &format!("\"eval_loss\":{loss},\"eval_score\":{score}"));
        path
    };
    let [low, high] = [scored("low", 0.25, 1.5), scored("high", 0.75, 2.5)];
    fs::write(high.join("summary.json"), r#"{"outcome":"interrupted"}"#).unwrap();
    let text = one_a_side(&[&low, &high]).text();
    let first: Vec<&str> = text.lines().nth(1).unwrap().split_whitespace().collect();
    assert!(text.starts_with("rank") && text.contains("eval score"), "{text}");
    assert_eq!(first[..4], ["1", "high", "(unfinished)", "0.7500"], "{text}");
}
