//! report.html: one run on one page, in one file.

use std::collections::BTreeMap;
use std::fs;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use minijinja::{AutoEscape, Environment, context};
use serde_json::Value;

use super::axis::Unit;
use super::bars;
use super::charts::Charts;
use super::record::Record;
use crate::data::formats::images_in_prompt;
use crate::images::is_image;
use crate::measure::figures::Rollout;
use crate::measure::figures::evaluation::{EvalFigure, Group, ShownAs};
use crate::util::stats::quantile;
use crate::util::text::{duration, quoted, thousands};

/// Number of prompts with texts on the page, and of texts per prompt.
const MAX_PROMPTS: usize = 12;
const MAX_TEXTS: usize = 12;
/// Bytes of an image on the page.
const MAX_IMAGE_BYTES: u64 = 1 << 20;
/// Characters shown of a text.
const MAX_TEXT: usize = 4000;
/// Characters shown of a recipe: more than anyone writes by hand.
const MAX_RECIPE: usize = 60_000;

/// The page of a run.
///
/// # Errors
/// A template that does not fit, which would be a bug in this program.
pub(super) fn render(record: &Record, is_watched: bool) -> Result<String, minijinja::Error> {
    let (memory_bars, memory_notes) = bars::memory(record).unwrap_or_default();
    let (samples, num_samples_left_out) = texts(record);
    let recipe = |text: &Option<String>| text.as_deref().map(|text| shortened(text, MAX_RECIPE));
    let page = context! {
        name => record.name(),
        status => status(record),
        // Why the run ended early, and what to do.
        reason => shortened(record.text("reason"), MAX_TEXT).lines().collect::<Vec<_>>(),
        about => about(record),
        tiles => tiles(record),
        findings => record.list("diagnosis"),
        findings_of => if num_starts(record).is_some() { "of the last start" } else { "" },
        // Earlier versions call them so.
        reported => [record.list("reported"), record.list("told")].concat(),
        charts => Charts::of(record),
        time_bars => bars::time(record),
        memory_bars,
        memory_notes,
        samples,
        num_samples_left_out,
        answers => answers(record),
        answers_step => record.answers.first().map(|answer| answer.step),
        given_recipe => recipe(&record.given_recipe),
        resolved_recipe => recipe(&record.resolved_recipe),
        warnings => record.list("warnings").iter().map(plain).collect::<Vec<_>>(),
        environment => environment(record),
        scores => record.setting("objective.name").and_then(toml::Value::as_str) == Some("reward"),
        // For commands that use what a finished run has made.
        run => record.outcome().filter(|outcome| outcome.is_finished()).map(|_| quoted(&record.folder.to_string_lossy())),
        version => env!("CARGO_PKG_VERSION"),
        style => minijinja::Value::from_safe_string(include_str!("style.css").to_owned()),
        // Numbers under the pointer, other axes, smoothing; the page is complete without it.
        script => minijinja::Value::from_safe_string(include_str!("page.js").to_owned()),
        // Fetches the page again.
        watch_script => is_watched.then(|| minijinja::Value::from_safe_string(include_str!("watch.js").to_owned())),
    };
    fill(include_str!("page.html"), page)
}

/// Fills a template and escapes every text that is not marked as HTML.
fn fill(template: &str, context: minijinja::Value) -> Result<String, minijinja::Error> {
    let mut environment = Environment::new();
    environment.set_auto_escape_callback(|_| AutoEscape::Html);
    environment.set_trim_blocks(true);
    environment.set_lstrip_blocks(true);
    environment.render_str(template, context)
}

fn status(record: &Record) -> String {
    match record.outcome() {
        Some(outcome) if outcome.is_finished() => outcome.name().to_owned(),
        Some(outcome) => {
            let steps = record.figure("steps").or_else(|| record.steps.last("step")).unwrap_or(0.0);
            let of = record.figure("total_steps").map(|total| format!(" of {}", thousands(total))).unwrap_or_default();
            format!("{} at step {}{of}", outcome.name(), thousands(steps))
        }
        None if record.steps.len() + record.evaluations.len() == 0 => "waiting for the first step".to_owned(),
        None => "not finished: killed, or still training".to_owned(),
    }
}

/// Starts of the process, if it was resumed.
fn num_starts(record: &Record) -> Option<f64> {
    record.figure("starts").filter(|starts| *starts > 1.0)
}

/// Model, device, precision and time.
fn about(record: &Record) -> Vec<String> {
    let setting = |key| record.setting(key).and_then(toml::Value::as_str).map(ToOwned::to_owned);
    let started = record.environment.get("started_at").and_then(Value::as_str);
    let started = started.map(|time| time.split('.').next().unwrap_or(time).trim_end_matches('Z').replace('T', " "));
    let about = [
        setting("model.path"),
        record.device().map(ToOwned::to_owned),
        setting("train.precision"),
        started.map(|time| format!("started {time} UTC")),
    ];
    about.into_iter().flatten().collect()
}

/// The headline figures: label, value, note. Figures that were not measured have no tile.
fn tiles(record: &Record) -> Vec<(String, String, String)> {
    let mut tiles = Vec::new();
    let mut tile = |label: &str, value: Option<String>, note: Option<String>| {
        tiles.extend(value.map(|value| (label.to_owned(), value, note.unwrap_or_default())));
    };
    let loss_text = |loss: f64| if loss.is_finite() { Unit::Plain.text(loss) } else { "not a number".to_owned() };
    let evaluated = |figure: &EvalFigure, value: f64| match figure.shown {
        ShownAs::Percent => Unit::Percent.text(100.0 * value),
        ShownAs::Decimals(_) => loss_text(value),
    };
    for figure in EvalFigure::headlines(&[Group::Loss, Group::Answers, Group::Score]) {
        let values = record.evaluations.get(figure.name).unwrap_or_default();
        let first = values.first().filter(|first| values.len() > 1 && first.is_finite());
        let from =
            first.filter(|_| figure.group != Group::Answers).map(|first| format!("from {}", evaluated(figure, *first)));
        let last = record.evaluations.latest(figure.name).map(|last| evaluated(figure, last));
        let label = figure.label("evaluation ");
        tile(&(label[..1].to_uppercase() + &label[1..]), last, from);
    }
    // The last step alone is noise, unless it has no number.
    let loss = record.steps.latest("loss").map(|last| if last.is_finite() { record.final_loss() } else { Some(last) });
    tile("Training loss", loss.flatten().map(loss_text), Some("mean of the last tenth".to_owned()));

    tile("Steps", record.steps.last("step").map(thousands), record.epochs_text());
    tile("Throughput", rate(record).map(thousands), Some("tokens/s".to_owned()));
    let step_seconds =
        |share| quantile(record.steps.steady("step_seconds"), share).map(|value| Unit::Seconds.text(value));
    tile("Step, median", step_seconds(0.5), step_seconds(0.95).map(|p95| format!("95 % below {p95}")));
    let mfu = record.figure("mfu").or_else(|| record.median("mfu"));
    tile("MFU", mfu.map(|mfu| format!("{:.1} %", 100.0 * mfu)), Some("of the measured peak".to_owned()));
    let gpu = record.figure("mean_gpu_utilization_percent").or_else(|| record.median("gpu_utilization_percent"));
    tile("GPU utilization", gpu.map(|percent| format!("{percent:.0} %")), None);
    let (peak, of) = record.peak_memory().unzip();
    tile("Peak memory", peak.map(|bytes| Unit::Bytes.text(bytes)), of.map(ToOwned::to_owned));

    let tokens = record.figure("tokens").filter(|tokens| *tokens > 0.0).or_else(|| record.steps.sum("tokens"));
    let targets = record.steps.sum("target_tokens").zip(record.steps.sum("tokens"));
    let targets = targets.map(|(targets, tokens)| format!("{:.0} % carry loss", 100.0 * targets / tokens));
    tile("Tokens", tokens.map(large_count), targets);
    let per_million = |name: &str| record.summary.get("per_million_tokens")?.get(name)?.as_f64();
    let of_million = |text: String| format!("{text} a million tokens");
    let wall = [
        num_starts(record).map(|starts| format!("{} starts", thousands(starts))),
        per_million("seconds").map(duration).map(of_million),
    ];
    let wall: Vec<String> = wall.into_iter().flatten().collect();
    tile("Wall time", record.wall_seconds().map(duration), Some(wall.join(", ")));
    let kwh = |kwh: f64| format!("{} kWh", Unit::Plain.text(kwh));
    tile("Energy", record.energy_kwh().map(kwh), per_million("energy_kwh").map(kwh).map(of_million));
    let cost = |cost: f64| format!("{} {}", Unit::Plain.text(cost), record.text("currency")).trim_end().to_owned();
    tile("Cost", record.figure("cost").map(cost), per_million("cost").map(cost).map(of_million));
    tiles
}

/// `73,670`, `12.3 million`, `1.50 billion`.
fn large_count(count: f64) -> String {
    match count {
        count if count >= 1e9 => format!("{:.2} billion", count / 1e9),
        count if count >= 1e7 => format!("{:.1} million", count / 1e6),
        count => thousands(count),
    }
}

/// Tokens a second over all steps.
fn rate(record: &Record) -> Option<f64> {
    let seconds = record.steps.sum("step_seconds").filter(|seconds| *seconds > 0.0)?;
    record.figure("tokens_per_second").or_else(|| Some(record.steps.sum("tokens")? / seconds))
}

/// Texts of the model by prompt, each with its step: the first and the last, and those between; and the number of texts
/// left out.
fn texts(record: &Record) -> (Vec<minijinja::Value>, usize) {
    let mut prompts: Vec<(&str, Vec<(u64, String)>)> = Vec::new();
    for sample in &record.samples {
        let text = (sample.step, shortened(&sample.text, MAX_TEXT));
        match prompts.iter_mut().find(|(prompt, _)| *prompt == sample.prompt) {
            Some((_, texts)) => texts.push(text),
            None => prompts.push((&sample.prompt, vec![text])),
        }
    }
    let mut num_left_out = record.samples.len();
    let texts = prompts.into_iter().take(MAX_PROMPTS).map(|(prompt, mut texts)| {
        let last = if texts.len() > 1 { texts.pop() } else { None };
        let first = texts.remove(0);
        let every = texts.len().div_ceil(MAX_TEXTS).max(1);
        let between: Vec<_> = texts.into_iter().step_by(every).collect();
        let shown: Vec<_> = std::iter::once(first).chain(last).collect();
        num_left_out -= shown.len() + between.len();
        let images: Vec<_> = images_in_prompt(prompt).iter().filter_map(|name| inlined(name)).collect();
        context! { prompt => shortened(prompt, MAX_TEXT), images, shown, between }
    });
    (texts.collect(), num_left_out)
}

/// The answers of the last step by prompt, the best first, each with what it got.
fn answers(record: &Record) -> Vec<minijinja::Value> {
    let mut groups: BTreeMap<usize, Vec<&Rollout>> = BTreeMap::new();
    record.answers.iter().for_each(|answer| groups.entry(answer.group).or_default().push(answer));
    let of_group = |mut answers: Vec<&Rollout>| {
        answers.sort_by(|one, other| other.advantage.total_cmp(&one.advantage));
        let got = |answer: &Rollout| {
            let number =
                |reward: Option<f64>| reward.map_or("not judged".to_owned(), |reward| Unit::Plain.text(reward));
            let each = answer.rewards.iter().map(|(name, reward)| format!("{name} {}", number(*reward)));
            let all = each.collect::<Vec<_>>().join(", ");
            let (reward, advantage, tokens) = (number(answer.reward), answer.advantage, answer.tokens);
            let is_cut = if answer.ending == "length" { ", cut" } else { "" };
            format!("reward {reward} ({all}), advantage {advantage:+.2}, {tokens} tokens{is_cut}")
        };
        let shown: Vec<_> = answers
            .iter()
            .take(MAX_TEXTS)
            .map(|answer| (got(answer), shortened(&answer.completion, MAX_TEXT)))
            .collect();
        context! { prompt => shortened(&answers[0].prompt, MAX_TEXT), num_left_out => answers.len() - shown.len(), shown }
    };
    groups.into_values().take(MAX_PROMPTS).map(of_group).collect()
}

/// An image as an address that holds it. One that is not a small file any more is named in its prompt alone.
fn inlined(name: &str) -> Option<minijinja::Value> {
    let is_small = fs::metadata(name).is_ok_and(|file| file.is_file() && file.len() <= MAX_IMAGE_BYTES);
    let bytes = is_small.then(|| fs::read(name).ok())??;
    // Browsers go by the content.
    let address = || minijinja::Value::from_safe_string(format!("data:image/png;base64,{}", STANDARD.encode(&bytes)));
    is_image(&bytes).then(address)
}

fn shortened(text: &str, most: usize) -> String {
    match text.char_indices().nth(most) {
        Some((end, _)) => format!("{} […]", &text[..end]),
        None => text.to_owned(),
    }
}

/// Names in environment.json, for people; in others, `_` is a space.
const NAMES: [(&str, &str); 7] = [
    ("lora_train_version", "lora-train"),
    ("git_commit", "commit"),
    ("burn_version", "burn"),
    ("f32_products_are_tf32", "TF32 for f32 products"),
    ("num_cpu_threads", "CPU threads"),
    ("cpu_features", "CPU features"),
    ("host_memory_bytes", "memory"),
];
/// Characters shown of a commit.
const MAX_COMMIT: usize = 12;

/// Names and values.
fn environment(record: &Record) -> Vec<(String, String)> {
    let row = |(name, value): (&String, &Value)| {
        let value = match value {
            Value::Array(values) => values.iter().map(plain).collect::<Vec<_>>().join(" "),
            Value::Object(fields) => {
                let pairs = fields.iter().map(|(name, value)| format!("{name}={}", plain(value)));
                pairs.collect::<Vec<_>>().join(" ")
            }
            Value::Number(number) if name.ends_with("_bytes") => Unit::Bytes.text(number.as_f64().unwrap_or(f64::NAN)),
            Value::Bool(is_so) => if *is_so { "yes" } else { "no" }.to_owned(),
            other if name == "git_commit" => plain(other).chars().take(MAX_COMMIT).collect(),
            other => plain(other),
        };
        let known = NAMES.iter().find(|(raw, _)| raw == name).map(|(_, known)| (*known).to_owned());
        (!value.is_empty()).then(|| (known.unwrap_or_else(|| name.replace('_', " ")), shortened(&value, MAX_TEXT)))
    };
    record.environment.iter().filter_map(row).collect()
}

fn plain(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), ToOwned::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_loss_that_is_no_number_at_the_end_is_shown_as_that_and_not_as_the_one_before() {
        let mut record = Record::default();
        for (step, loss) in [(1, Some(2.5)), (2, None)] {
            let fields = |name: &str| [("step", step.into()), (name, loss.into())].map(|(n, v)| (n.to_owned(), v));
            record.steps.push(&fields("loss").into_iter().collect());
            record.evaluations.push(&fields("eval_loss").into_iter().collect());
        }
        let tiles = tiles(&record);
        let value = |label: &str| tiles.iter().find(|tile| tile.0 == label).unwrap().1.as_str();
        assert_eq!((value("Evaluation loss"), value("Training loss")), ("not a number", "not a number"));
    }

    #[test]
    fn a_finished_run_names_commands_to_go_on_with_and_its_environment_in_words() {
        let mut record = Record { folder: "my runs/a".into(), ..Record::default() };
        record.environment.insert("git_commit".to_owned(), "0123456789abcdef0123456789abcdef01234567".into());
        record.environment.insert("f32_products_are_tf32".to_owned(), false.into());
        let rows = environment(&record);
        for row in [("commit", "0123456789ab"), ("TF32 for f32 products", "no")] {
            assert!(rows.iter().any(|(name, value)| (name.as_str(), value.as_str()) == row), "{rows:?}");
        }
        assert!(!render(&record, false).unwrap().contains("lora-train chat"));
        record.summary.insert("outcome".to_owned(), "finished".into());
        let page = render(&record, false).unwrap();
        assert!(page.contains("<code>lora-train chat &#x27;my runs&#x2f;a&#x27;</code>"), "{page}");
    }

    #[test]
    fn answers_of_the_last_step_stand_side_by_side_by_prompt_the_best_first() {
        let answer = |group, reward: Option<f64>, advantage, completion: &str| Rollout {
            step: 3,
            group,
            prompt: format!("prompt {group}"),
            completion: completion.into(),
            tokens: 5,
            ending: "length".into(),
            rewards: BTreeMap::from([("exact".to_owned(), reward)]),
            reward,
            advantage,
            ..Rollout::default()
        };
        let answers = vec![
            answer(1, Some(0.0), -1.0, "worse <b>"),
            answer(2, None, 0.0, "other"),
            answer(1, Some(1.0), 1.0, "better"),
        ];
        let page = render(&Record { answers, ..Record::default() }, false).unwrap();
        let places =
            ["Answers of step 3", "better", "worse &lt;b&gt;", "not judged"].map(|text| page.find(text).unwrap());
        assert!(places.is_sorted(), "{places:?}");
        assert!(page.contains("reward 1 (exact 1), advantage +1.00, 5 tokens, cut"), "{page}");
    }

    #[test]
    fn a_template_escapes_what_it_is_given_in_text_attributes_and_scripts() {
        let hostile = "</script><img src=x onerror=\"alert('1')\">&amp;";
        let template = "<p title=\"{{ text }}\">{{ text }}</p><script>{{ [text]|tojson }}</script>";
        let filled = fill(template, context! { text => hostile }).unwrap();
        assert!(!filled.contains("<img") && filled.matches("</script").count() == 1, "{filled}");
        let json = filled.split_once("<script>").unwrap().1.strip_suffix("</script>").unwrap();
        assert_eq!(serde_json::from_str::<Vec<String>>(json).unwrap(), [hostile]);
    }
}
