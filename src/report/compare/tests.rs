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
        let regressions = comparison.regressions(&limits).unwrap();
        regressions
            .into_iter()
            .map(|regression| (regression.figure.name(), regression.percent.round()))
            .collect::<Vec<_>>()
    };
    assert_eq!(found(&["4"]), [("tokens_per_second", 20.0), ("eval_loss", 5.0)]);
    assert_eq!(found(&["10"]), [("tokens_per_second", 20.0)]);
    assert_eq!(found(&["30"]), []);
    assert_eq!(found(&["eval_loss=1"]), [("eval_loss", 5.0)]);
    assert_eq!(found(&["4", "tokens_per_second=50"]), [("eval_loss", 5.0)]);
    let chance = Comparison::of(&[base, run(folder.path(), "same", 1.001, 2.0, "")]).unwrap();
    assert_eq!(chance.regressions(&[limit("0")]).unwrap(), []);
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
    assert!(comparison.regressions(&[limit("eval_loss=1")]).unwrap_err().contains("eval_loss"));
    assert_eq!(comparison.regressions(&[limit("1")]).unwrap(), []);
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
