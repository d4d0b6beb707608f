use std::fs;

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::*;

/// A run's folder with steps of a length that scatters by a hundredth.
fn run(folder: &Path, name: &str, step_seconds: f64, eval_loss: f64, recipe: &str) -> PathBuf {
    let path = folder.join(name);
    fs::create_dir(&path).unwrap();
    let mut random = ChaCha8Rng::seed_from_u64(name.bytes().map(u64::from).sum());
    let mut metrics = String::from("{\"step\":0,\"eval_loss\":4.0}\n");
    for step in 1..=100_u32 {
        let seconds = step_seconds * random.random_range(0.99..1.01);
        metrics.push_str(&format!(
            "{{\"step\":{step},\"loss\":2.0,\"learning_rate\":1e-3,\"tokens\":1000,\"step_seconds\":{seconds},\
             \"tokens_per_second\":{},\"host_memory_bytes\":1000000}}\n",
            1000.0 / seconds
        ));
    }
    metrics.push_str(&format!("{{\"step\":100,\"eval_loss\":{eval_loss}}}\n"));
    fs::write(path.join("metrics.jsonl"), metrics).unwrap();
    fs::write(path.join("resolved.toml"), recipe).unwrap();
    path
}

fn limit(text: &str) -> Limit {
    text.parse().unwrap()
}

#[test]
fn a_faster_run_is_called_faster_by_how_much_and_an_equal_one_equal() {
    let folder = tempfile::tempdir().unwrap();
    let recipe = "seed = 1\noutput_dir = \"a\"\n[lora]\nr = 8\n";
    let base = run(folder.path(), "base", 1.0, 2.0, recipe);
    let fast = run(folder.path(), "fast", 0.8, 1.9, &recipe.replace("r = 8", "r = 4").replace("\"a\"", "\"b\""));
    let same = run(folder.path(), "same", 1.0, 2.0, recipe);
    let comparison = Comparison::of(&[base, fast, same]).unwrap();
    assert_eq!(comparison.recipe_differences.len(), 1, "where a run is written is no difference");
    let difference = &comparison.recipe_differences[0];
    let values: Vec<_> = difference.values.iter().map(|value| value.as_deref().unwrap()).collect();
    assert_eq!((difference.key.as_str(), values), ("lora.r", vec!["8", "4", "8"]));

    let faster = comparison.runs[1].figure("tokens_per_second").unwrap();
    assert!((faster.change_percent.unwrap() - 25.0).abs() < 0.5, "{faster:?}");
    assert_eq!(faster.is_noise, Some(false));
    let texts: Vec<&str> = comparison.verdicts.iter().map(|verdict| verdict.text.as_str()).collect();
    assert!(texts[0].starts_with("25.") || texts[0].starts_with("24."), "{}", texts[0]);
    assert!(texts[0].contains("% faster") && texts[0].contains("an evaluation loss 0.1000 lower (2.0000 -> 1.9000)"));
    assert!(texts[1].contains("as fast, within the noise") && texts[1].contains("the same memory"), "{}", texts[1]);
    assert!(comparison.verdicts[1].notes[0].contains("the recipes are the same"));
    let text = comparison.text();
    assert!(text.contains("lora.r") && text.contains("tokens/s, median"), "{text}");
}

#[test]
fn a_limit_names_what_became_worse_and_lets_chance_pass() {
    let folder = tempfile::tempdir().unwrap();
    let base = run(folder.path(), "base", 1.0, 2.0, "");
    let slow = run(folder.path(), "slow", 1.25, 2.1, "");
    let comparison = Comparison::of(&[base.clone(), slow]).unwrap();
    let found = |limits: &[&str]| {
        let limits: Vec<Limit> = limits.iter().map(|text| limit(text)).collect();
        let regressions = comparison.check(&limits).unwrap().regressions;
        regressions
            .into_iter()
            .map(|regression| (regression.figure.name(), regression.percent.unwrap().round()))
            .collect::<Vec<_>>()
    };
    assert_eq!(found(&["4"]), [("tokens_per_second", 20.0), ("eval_loss", 5.0)]);
    assert_eq!(found(&["10"]), [("tokens_per_second", 20.0)]);
    assert_eq!(found(&["30"]), []);
    assert_eq!(found(&["eval_loss=1"]), [("eval_loss", 5.0)]);
    assert_eq!(found(&["4", "tokens_per_second=50"]), [("eval_loss", 5.0)]);
    let chance = Comparison::of(&[base, run(folder.path(), "same", 1.001, 2.0, "")]).unwrap();
    assert_eq!(chance.check(&[limit("0")]).unwrap().regressions, []);
}

#[test]
fn limits_are_percentages_of_known_figures() {
    assert_eq!(limit("5%"), Limit { figure: None, percent: 5.0 });
    assert_eq!(limit("peak_memory=2.5"), Limit { figure: Some(LimitedFigure::PeakMemory), percent: 2.5 });
    assert!("-1".parse::<Limit>().is_err() && "nan".parse::<Limit>().is_err());
    let error = "speed=1".parse::<Limit>().unwrap_err();
    assert!(error.contains("`speed`: expected one of tokens_per_second, peak_memory, eval_loss"), "{error}");
}

#[test]
fn a_limit_on_a_figure_that_is_not_there_is_a_mistake() {
    let folder = tempfile::tempdir().unwrap();
    let base = run(folder.path(), "base", 1.0, 2.0, "");
    let other = run(folder.path(), "other", 1.0, 2.0, "");
    for path in [&base, &other] {
        let metrics = fs::read_to_string(path.join("metrics.jsonl")).unwrap();
        let without: String =
            metrics.lines().filter(|line| !line.contains("eval_loss")).map(|l| format!("{l}\n")).collect();
        fs::write(path.join("metrics.jsonl"), without).unwrap();
    }
    let comparison = Comparison::of(&[base, other]).unwrap();
    assert!(comparison.check(&[limit("eval_loss=1")]).unwrap_err().contains("eval_loss"));
    let checked = comparison.check(&[limit("1")]).unwrap();
    assert_eq!(
        (checked.regressions, checked.not_checked),
        (vec![], vec!["`eval_loss` of other: base has none to compare it with".to_owned()])
    );
}

#[test]
fn evaluation_losses_over_different_rows_are_called_so() {
    let folder = tempfile::tempdir().unwrap();
    let base = run(folder.path(), "base", 1.0, 2.0, "[[data.eval]]\npath = \"a\"\n");
    let other = run(folder.path(), "other", 1.0, 1.0, "[[data.eval]]\npath = \"b\"\n");
    let comparison = Comparison::of(&[base, other]).unwrap();
    let note = &comparison.verdicts[0].notes[0];
    assert!(note.contains("over different tokens") && note.contains("data.eval"), "{note}");
}

/// Says over how many target tokens the evaluations of a run are.
fn over_tokens(run: &Path, num_tokens: u64) {
    let metrics = fs::read_to_string(run.join("metrics.jsonl")).unwrap();
    let counted = metrics.replace("\"eval_loss\"", &format!("\"eval_target_tokens\":{num_tokens},\"eval_loss\""));
    fs::write(run.join("metrics.jsonl"), counted).unwrap();
}

#[test]
fn evaluation_losses_over_different_numbers_of_tokens_are_not_compared() {
    let folder = tempfile::tempdir().unwrap();
    let base = run(folder.path(), "base", 1.0, 2.0, "seed = 1\n");
    let grown = run(folder.path(), "grown", 1.0, 2.5, "seed = 1\n");
    let lengths = run(folder.path(), "lengths", 1.0, 2.5, "seed = 1\n[data]\nmax_length = 64\n");
    let same = run(folder.path(), "same", 1.0, 2.5, "seed = 1\n");
    for (path, num_tokens) in [(&base, 1700), (&grown, 1800), (&lengths, 1500), (&same, 1700)] {
        over_tokens(path, num_tokens);
    }
    let comparison = Comparison::of(&[base, grown, lengths, same]).unwrap();
    let [grown, lengths, same] = &comparison.verdicts[..] else { panic!("three verdicts") };
    let text = "evaluation losses that cannot be compared (2.0000 over 1,700 target tokens, 2.5000 over 1,800)";
    assert!(grown.text.contains(text), "{}", grown.text);
    assert!(grown.notes[0].contains("though the recipes ask for the same: the rows"), "{:?}", grown.notes);
    assert!(lengths.notes[0].contains("cannot be compared, since data.max_length differs"), "{:?}", lengths.notes);
    assert!(same.text.contains("an evaluation loss 0.5000 higher"), "{}", same.text);
    let changes = |key: &str| -> Vec<bool> {
        comparison.runs.iter().map(|run| run.figure(key).unwrap().change_percent.is_some()).collect()
    };
    assert_eq!(
        (changes("final_eval_loss"), changes("best_eval_loss")),
        (vec![false, false, false, true], vec![false, false, false, true])
    );
    // A check of everything says what it left out; one of this figure alone is a mistake.
    let checked = comparison.check(&[limit("5")]).unwrap();
    let found: Vec<_> = checked.regressions.iter().map(|one| (one.run.as_str(), one.figure)).collect();
    assert_eq!(found, [("same", LimitedFigure::EvalLoss)]);
    assert_eq!(checked.not_checked.len(), 2);
    assert!(checked.not_checked[0].contains("`eval_loss` of grown: base evaluates other tokens"), "{checked:?}");
    assert!(comparison.check(&[limit("eval_loss=5")]).unwrap_err().contains("cannot be compared"));
}

#[test]
fn the_lowest_of_more_evaluations_is_called_so() {
    let folder = tempfile::tempdir().unwrap();
    let base = run(folder.path(), "base", 1.0, 2.0, "");
    let often = run(folder.path(), "often", 1.0, 2.0, "");
    let metrics = fs::read_to_string(often.join("metrics.jsonl")).unwrap();
    fs::write(often.join("metrics.jsonl"), format!("{metrics}{{\"step\":100,\"eval_loss\":1.9}}\n")).unwrap();
    let notes = &Comparison::of(&[base, often]).unwrap().verdicts[0].notes;
    assert!(notes[0].contains("the lowest of 2 and of 3"), "{notes:?}");
}

#[test]
fn losses_after_different_numbers_of_steps_are_called_so() {
    let folder = tempfile::tempdir().unwrap();
    let base = run(folder.path(), "base", 1.0, 2.0, "");
    let short = run(folder.path(), "short", 1.0, 2.5, "");
    let metrics = fs::read_to_string(short.join("metrics.jsonl")).unwrap();
    let kept: Vec<&str> = metrics.lines().take(61).collect();
    fs::write(short.join("metrics.jsonl"), kept.join("\n")).unwrap();
    let comparison = Comparison::of(&[base, short]).unwrap();
    assert!(comparison.verdicts[0].notes[0].contains("took 100 and 60 steps"), "{:?}", comparison.verdicts[0].notes);
}

/// Puts another last evaluation in place of that of a run; without text, none.
fn end_with(run: &Path, last: &str) {
    let metrics = fs::read_to_string(run.join("metrics.jsonl")).unwrap();
    let steps: Vec<&str> =
        metrics.lines().take(101).filter(|line| !last.is_empty() || !line.contains("eval")).collect();
    fs::write(run.join("metrics.jsonl"), format!("{}\n{last}\n", steps.join("\n"))).unwrap();
}

#[test]
fn a_run_whose_last_evaluation_is_lost_fails_the_check_and_is_said_to() {
    let folder = tempfile::tempdir().unwrap();
    let base = run(folder.path(), "base", 1.0, 2.0, "");
    let diverged = run(folder.path(), "diverged", 1.0, 2.0, "");
    end_with(&diverged, "{\"step\":100,\"eval_loss\":null}");
    let without = run(folder.path(), "without", 1.0, 2.0, "");
    end_with(&without, "");
    let comparison = Comparison::of(&[base.clone(), diverged.clone(), without]).unwrap();
    for text in ["5", "eval_loss=5"] {
        let regressions = comparison.check(&[limit(text)]).unwrap().regressions;
        let found: Vec<_> = regressions.iter().map(|one| (one.run.as_str(), one.figure, one.percent)).collect();
        assert_eq!(found, ["diverged", "without"].map(|run| (run, LimitedFigure::EvalLoss, None)), "{text}");
        assert_eq!(regressions[0].text, "diverged: eval_loss is missing or no number, in base it is 2");
    }
    for verdict in &comparison.verdicts {
        assert!(verdict.text.contains("no evaluation loss at the end"), "{}", verdict.text);
    }
    assert_eq!(comparison.runs[1].value("best_eval_loss"), Some(4.0));
    // The other way round there is nothing to compare with.
    let comparison = Comparison::of(&[diverged, base]).unwrap();
    assert_eq!(comparison.check(&[limit("5")]).unwrap().not_checked.len(), 1);
}

#[test]
fn a_baseline_of_nothing_is_compared_without_percentages() {
    let folder = tempfile::tempdir().unwrap();
    let paths =
        [("base", 0.0), ("same", 0.0), ("worse", 0.5)].map(|(name, loss)| run(folder.path(), name, 1.0, loss, ""));
    let regressions = Comparison::of(&paths).unwrap().check(&[limit("eval_loss=5")]).unwrap().regressions;
    assert_eq!(regressions.len(), 1, "{regressions:?}");
    assert_eq!(regressions[0].text, "worse: eval_loss is worse than in base (0 -> 0.5)");
}

/// Whether a comparison of runs with these recipes warns of evaluations over different rows, and of which keys.
fn warns(base: &str, other: &str) -> Option<String> {
    let folder = tempfile::tempdir().unwrap();
    let paths = [("base", base), ("other", other)].map(|(name, recipe)| run(folder.path(), name, 1.0, 2.0, recipe));
    let comparison = Comparison::of(&paths).unwrap();
    comparison.verdicts[0].notes.iter().find(|note| note.contains("over different tokens")).cloned()
}

#[test]
fn training_rows_and_seed_decide_the_evaluation_only_where_its_rows_are_held_out_of_them() {
    let common = "seed = SEED\n[[data.train]]\npath = \"a\"\n[[data.train]]\npath = \"FILE\"\n";
    let recipe =
        |seed: &str, file: &str, rest: &str| format!("{}{rest}", common.replace("SEED", seed).replace("FILE", file));
    let eval = "[[data.eval]]\npath = \"e\"\n";
    assert_eq!(warns(&recipe("1", "b", eval), &recipe("2", "c", eval)), None);
    let split = |rest: &str, seed: &str, file: &str| {
        format!("seed = {seed}\n[data]\neval_split = {rest}\n{}", recipe("1", file, "").replace("seed = 1\n", ""))
    };
    let note = |base: &str, other: &str| warns(base, other).unwrap();
    assert!(note(&split("0.1", "1", "b"), &split("0.1", "2", "b")).contains("since seed differs"));
    assert!(note(&split("0.1", "1", "b"), &split("0.1", "1", "c")).contains("since data.train differs"));
    assert!(note(&split("0.1", "1", "b"), &split("0.2", "1", "b")).contains("since data.eval_split differs"));
}

#[test]
fn recipes_that_cannot_be_read_are_not_called_the_same() {
    let folder = tempfile::tempdir().unwrap();
    let paths =
        [("base", "seed = 1\n"), ("other", "seed = ")].map(|(name, recipe)| run(folder.path(), name, 1.0, 2.0, recipe));
    for runs in [vec![paths[0].clone(), paths[1].clone()], vec![paths[1].clone(), paths[1].clone()]] {
        let comparison = Comparison::of(&runs).unwrap();
        let text = comparison.text();
        assert!(
            !text.contains("the recipes are the same") && text.contains("no resolved.toml can be read of "),
            "{text}"
        );
        assert_eq!(
            comparison.verdicts[0].notes,
            ["the recipes cannot be compared: a resolved.toml is missing or cannot be read"]
        );
        let page = folder.path().join("compare.html");
        comparison.write_html(&page).unwrap();
        let page = fs::read_to_string(page).unwrap();
        assert!(!page.contains("The recipes are the same") && page.contains("no resolved.toml can be read of"));
    }
}
