//! `lora-train check`: finds every mistake that can be known before training, all at once.
//!
//! It looks at what a run prepares, and at the rows; of the weights it reads only the headers. Findings go to stdout,
//! warnings and mistakes to stderr.

use std::fmt::Display;
use std::io::{self, Write};
use std::num::NonZeroUsize;
use std::path::Path;
use std::sync::Arc;

use serde_json::{Value, json};

use crate::config::{DataConfig, DataFormat, DataSource};
use crate::data::cache::CacheSettings;
use crate::data::dataset::{Dataset, OpenOptions, RowCounts};
use crate::data::error::DataError;
use crate::data::sources::source_files;
use crate::data::tokenizer::Tokenizer;
use crate::hub::Progress;
use crate::images::Images;
use crate::measure::metrics::SUMMARY_FILE;
use crate::recipe::{Purpose, Recipe, RecipeArgs};
use crate::run::dir::{finished, has_checkpoints, nearest_existing, not_a_folder};
use crate::run::images::{add_shown, check_tower, image_headers_of_rows};
use crate::run::inputs::{self, ModelParts, WeightsFrom};
use crate::run::next_commands::about_experts;
use crate::run::overview::{self, Fact};
use crate::run::prepare::{PreparedParts, with_rows_of};
use crate::run::shipping::require_shippable;
use crate::schema::{Problem, Problems};
use crate::train::budget::images::{ImageMemory, NO_IMAGES};
use crate::train::rollouts::{Rollouts, about_environment};
use crate::train::task::Task;
use crate::util::failure::Failure;
use crate::util::text::{counted, for_terminal, with_commas};

/// Arguments of `lora-train check`.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct CheckArgs {
    /// The recipe and changes to it.
    #[command(flatten)]
    pub(crate) recipe: RecipeArgs,

    /// Rows of each file to look at [default: all]
    #[arg(long, value_name = "N")]
    pub(crate) rows: Option<NonZeroUsize>,

    /// Print the findings as one JSON object
    #[arg(long)]
    pub(crate) json: bool,
}

/// Checks a recipe and everything that it names.
pub(crate) fn run(args: &CheckArgs) -> Result<(), Failure> {
    let (recipe, mut problems) = args.recipe.examine(Purpose::Training);
    let places = recipe.as_ref().map(|recipe| recipe.places.clone()).unwrap_or_default();
    let max_rows = args.rows.map(NonZeroUsize::get);
    let mut findings = match recipe {
        Some(recipe) if problems.0.is_empty() => examine(&recipe, max_rows),
        Some(recipe) => {
            // With a mistake in the recipe, findings about steps or rows are unreliable, but a file exists or it does not.
            let others = examine(&without_gaps(recipe), max_rows).problems.0;
            // Rows and steps can fail for the same mistakes, then without their place in the recipe.
            let is_known = |other: &Problem| problems.0.iter().any(|problem| is_same(problem, other));
            let others: Vec<Problem> = others.into_iter().filter(|other| !is_known(other)).collect();
            problems.0.extend(others);
            Findings { problems, ..Findings::default() }
        }
        None => Findings { problems, ..Findings::default() },
    };
    findings.problems.0 = findings.problems.0.into_iter().map(|problem| places.locate(problem)).collect();
    if args.json {
        super::print(&findings.json().to_string())?;
    } else {
        print(&findings).map_err(Failure::running)?;
    }
    if findings.problems.0.is_empty() { Ok(()) } else { Err(Failure::Input(findings.problems)) }
}

/// Whether two problems are the same: equal text, or about the same value of the same key.
fn is_same(one: &Problem, other: &Problem) -> bool {
    let assignment = |problem: &Problem| -> Option<String> {
        let words: Vec<&str> = problem.message.split(' ').take(3).collect();
        (words.len() == 3 && words[0].starts_with('`') && words[1] == "=").then(|| words.join(" "))
    };
    one.message == other.message || (assignment(one).is_some() && assignment(one) == assignment(other))
}

/// The recipe without the data files whose `path` could not be parsed, which are reported already.
fn without_gaps(mut recipe: Recipe) -> Recipe {
    recipe.data.train.retain(|source| !source.path.is_empty());
    recipe.data.eval.retain(|source| !source.path.is_empty());
    recipe
}

/// Facts, warnings that may be unintended, and problems that would end a training run.
#[derive(Debug, Default)]
struct Findings {
    facts: Vec<Fact>,
    warnings: Vec<String>,
    problems: Problems,
}

impl Findings {
    fn fact(&mut self, subject: &'static str, fact: String) {
        self.facts.push((subject, fact));
    }

    /// Adds an error of another module. It may name several mistakes, each at the start of a line.
    fn error(&mut self, error: &impl Display) {
        Problem::list(error).into_iter().for_each(|problem| self.problem(problem));
    }

    /// Adds the mistakes of a part that a run prepares.
    fn failure(&mut self, failure: Failure) {
        match failure {
            Failure::Input(problems) => problems.0.into_iter().for_each(|problem| self.problem(problem)),
            // The Hub cannot be reached.
            failure => self.failure(of_model(&failure)),
        }
    }

    /// Adds a problem, unless it is there already: two sources may report the same mistake.
    fn problem(&mut self, problem: Problem) {
        if !self.problems.0.contains(&problem) {
            self.problems.0.push(problem);
        }
    }
}

impl Findings {
    fn json(&self) -> Value {
        let facts = self.facts.iter().map(|(subject, fact)| json!({"subject": subject, "fact": fact}));
        let mistake = |problem: &Problem| {
            let Problem { place, message, hint, .. } = problem;
            // Errors of other modules have their hints in their message.
            let (message, hint) = match message.split_once("\n  hint: ") {
                Some((message, inside)) => (message, Some(inside)),
                None => (message.as_str(), hint.as_deref()),
            };
            json!({"place": place, "message": message, "hint": hint})
        };
        let mistakes = self.problems.0.iter().map(mistake);
        json!({
            "facts": facts.collect::<Vec<_>>(), "warnings": self.warnings, "mistakes": mistakes.collect::<Vec<_>>(),
        })
    }
}

/// Mistakes in the model's files.
fn of_model(error: &impl Display) -> Failure {
    Failure::Input(Problems(Problem::list(error))).about("model.path")
}

/// Checks everything that the recipe names. A mistake hides others only where it makes looking for them impossible.
fn examine(recipe: &Recipe, max_rows: Option<usize>) -> Findings {
    let mut findings = Findings::default();
    examine_output(&recipe.output_dir, &mut findings);
    let mut parts = PreparedParts::find(recipe, WeightsFrom::Disk, false);
    parts.failures.drain(..).for_each(|failure| findings.failure(failure));
    let data = match examine_prepared(recipe, &parts, &mut findings) {
        Some(tokenizer) if !recipe.data.train.is_empty() => {
            let model = parts.model.folder.as_ref().zip(parts.model.config.as_ref());
            let images = model.and_then(|(folder, config)| image_headers_of_rows(folder, config, &recipe.data));
            let data = examine_data(recipe, (&Arc::new(tokenizer), images.clone()), max_rows, &mut findings);
            if let (Some(images), Some((folder, config)), Some(weights)) = (images, model, &parts.model.weights) {
                let checked = check_tower((folder, weights), config, &images);
                checked.err().into_iter().for_each(|failure| findings.failure(failure.about("model.path")));
            }
            data
        }
        _ => {
            examine_paths(&recipe.data, &mut findings);
            None
        }
    };
    let memory = match data.filter(|_| max_rows.is_none()) {
        Some(data) => match ImageMemory::of(&data) {
            Ok(images) => parts.memory(&with_rows_of(recipe, &data), &images),
            Err(error) => {
                findings.error(&error);
                None
            }
        },
        None => parts.memory(recipe, &NO_IMAGES),
    };
    if let Some(memory) = memory {
        // What the rows hold may have changed it.
        let decided = findings.facts.iter_mut().find(|(subject, _)| *subject == overview::CHECKPOINTING);
        decided.into_iter().zip(&memory.checkpointing).for_each(|((_, fact), decision)| *fact = decision.to_string());
        findings.warnings.extend(memory.warning);
    }
    findings
}

/// Looks at `output_dir` without creating it.
fn examine_output(output_dir: &Path, findings: &mut Findings) {
    let shown = output_dir.display();
    if output_dir.join(SUMMARY_FILE).exists() {
        return findings.problem(finished(output_dir));
    }
    if has_checkpoints(output_dir) {
        return findings.fact("output", format!("{shown} (an unfinished run, which `--resume` continues)"));
    }
    if let Some(problem) = not_a_folder(output_dir) {
        return findings.problem(problem);
    }
    let existing = nearest_existing(output_dir);
    // An unnamed file: it disappears when its handle is closed.
    match tempfile::tempfile_in(existing) {
        Ok(_) => findings.fact("output", format!("{shown}{}", if existing == output_dir { "" } else { " (new)" })),
        Err(error) => {
            let place = existing.display();
            findings.problem(Problem::new(format!("`output_dir` = {shown}: cannot write in {place}: {error}")));
        }
    }
}

/// Looks at what a run prepares, and opens the tokenizer.
fn examine_prepared(recipe: &Recipe, parts: &PreparedParts, findings: &mut Findings) -> Option<Tokenizer> {
    let memory = parts.memory(recipe, &NO_IMAGES);
    let PreparedParts {
        model: ModelParts { folder, tokenizer_folder, config, weights, is_downloaded, .. },
        selection,
        device,
        ..
    } = parts;
    let (config, device) = (config.as_ref(), device.as_ref());
    let stored = match weights {
        Some(weights) => overview::weights(weights, config, recipe),
        None if *is_downloaded => "weights not readable".to_owned(),
        None => "weights not downloaded yet".to_owned(),
    };
    findings.facts.extend(overview::prepared_facts(
        recipe,
        device,
        config,
        &stored,
        selection.as_ref(),
        memory.as_ref(),
    ));
    findings.warnings.extend(overview::prepared_warnings(recipe, device, config));
    let experts = config.zip(selection.as_ref()).and_then(|(config, selection)| about_experts(config, selection));
    findings.facts.extend(experts.map(|about| ("servers", about)));
    let shippable = require_shippable(recipe, config.zip(selection.as_ref()), device, 1);
    shippable.err().into_iter().for_each(|problem| findings.problem(problem));
    let folder = folder.as_ref()?;
    if !is_downloaded {
        let path = &recipe.model.path;
        let warning = format!("the weights of {path} are not in the cache: training begins with their download");
        findings.warnings.push(warning);
    }
    let folder = tokenizer_folder.as_ref().unwrap_or(folder);
    let tokenizer = config.map_or_else(|| Tokenizer::open(folder), |config| inputs::tokenizer(folder, config));
    tokenizer.map_err(|error| findings.failure(of_model(&error))).ok()
}

/// Opens every file, tokenises its rows, at most `max_rows` of each file, and counts steps.
fn examine_data(
    recipe: &Recipe,
    (tokenizer, images): (&Arc<Tokenizer>, Option<Arc<Images>>),
    max_rows: Option<usize>,
    findings: &mut Findings,
) -> Option<Dataset> {
    let options = OpenOptions {
        cache: CacheSettings::from_env(),
        progress: Progress::detect(false),
        max_rows,
        images,
        ..OpenOptions::default()
    };
    let mut config = recipe.data.clone();
    if let Some(rows) = max_rows {
        // With only some of the rows, nothing is split off.
        config.eval_split = None;
        findings.fact("looked at", format!("the first {} of each file", counted(rows, "row")));
    }
    match Dataset::open(&config, Arc::clone(tokenizer), recipe.seed, &options) {
        Ok(data) => {
            examine_files(&config, &data, findings);
            examine_rows(&data, findings);
            findings.warnings.extend(overview::objective_warnings(recipe, &data));
            if let Err(failure) = add_shown(&data, &recipe.eval.generate) {
                findings.failure(failure);
            }
            match Task::open(&recipe.eval.task, &data) {
                Ok(task) => findings.facts.extend(task.map(|task| ("task", task.about()))),
                Err(error) => findings.error(&error),
            }
            match Rollouts::open(&recipe.objective, &data, recipe.data.max_length, recipe.seed) {
                Ok(_) => findings.facts.extend(about_environment(&recipe.objective, &data)),
                Err(error) => findings.error(&error),
            }
            if max_rows.is_none() {
                examine_steps(recipe, &data, findings);
            }
            return Some(data);
        }
        // This error holds the mistakes of all files.
        Err(error @ DataError::Rows(_)) => findings.error(&error),
        Err(first) => {
            // The first mistake hides those of other files, so open each file alone.
            let before = findings.problems.0.len();
            examine_paths(&recipe.data, findings);
            let is_there = |source: &&DataSource| source_files("", source, &options).is_ok();
            for source in recipe.data.train.iter().chain(&recipe.data.eval).filter(is_there) {
                // Whether other files use the system prompt is not known here.
                let (train, eval, system) = (vec![source.clone()], vec![], None);
                let alone = DataConfig { train, eval, system, eval_split: None, ..recipe.data.clone() };
                if let Err(error) = Dataset::open(&alone, Arc::clone(tokenizer), recipe.seed, &options) {
                    findings.error(&error);
                }
            }
            if findings.problems.0.len() == before {
                findings.error(&first);
            }
        }
    }
    None
}

/// Without a tokenizer rows cannot be checked, but missing files can be found.
fn examine_paths(data: &DataConfig, findings: &mut Findings) {
    let mut examine = |section: &str, sources: &[DataSource]| {
        for (index, source) in sources.iter().enumerate() {
            let options = OpenOptions { progress: Progress::detect(false), ..OpenOptions::default() };
            if let Err(error) = source_files(&format!("data.{section}[{index}].path"), source, &options) {
                findings.error(&error);
            }
        }
    };
    examine("train", &data.train);
    examine("eval", &data.eval);
}

fn examine_files(config: &DataConfig, data: &Dataset, findings: &mut Findings) {
    for file in data.files() {
        findings.facts.push(overview::file(data, file));
        if !file.unused_columns.is_empty() {
            findings.warnings.push(format!(
                "{}: columns not read: {}",
                file.path.display(),
                file.unused_columns.join(", ")
            ));
        }
    }
    if config.eval_split.is_some() {
        findings.facts.push(overview::held_out(data));
    }
    findings.facts.extend(overview::images(data));
    findings.warnings.extend(data.warnings());
}

fn examine_rows(data: &Dataset, findings: &mut Findings) {
    let counts = match data.train_counts() {
        Ok(counts) => counts,
        Err(error) => return findings.error(&error),
    };
    let RowCounts { rows, bad, without_targets, tokens, target_tokens, longest_tokens, .. } = counts;
    let mut fact = format!("{} of up to {}", counted(rows, "row"), counted(longest_tokens, "token"));
    // In prompts it is the answers that will.
    if data.files().iter().any(|file| file.format != DataFormat::Prompt) {
        fact.push_str(&format!("; {} of {} tokens carry loss", with_commas(target_tokens), with_commas(tokens)));
    }
    if bad + without_targets > 0 {
        fact.push_str(&format!("; {} left out", counted(bad + without_targets, "row")));
    }
    findings.fact("rows", fact);
}

fn examine_steps(recipe: &Recipe, data: &Dataset, findings: &mut Findings) {
    let train = &recipe.train;
    let (per_epoch, total) = (overview::steps_per_epoch(recipe, data), overview::total_steps(recipe, data));
    let rows = train.micro_batch_size * train.gradient_accumulation_steps;
    let ended_by = overview::ended_by(recipe, data);
    findings.fact("steps", format!("{total} of {}; an epoch has {per_epoch}{ended_by}", counted(rows, "row")));
    if let Some(warmup) = recipe.scheduler.warmup_steps.filter(|warmup| *warmup >= total) {
        let message =
            format!("`scheduler.warmup_steps` = {warmup} leaves none of the {} of this run", counted(total, "step"));
        findings.problem(Problem::new(message).hint("make it smaller, or use `warmup_ratio`"));
    }
    let intervals =
        [("eval.eval_steps", recipe.eval.eval_steps), ("checkpoint.save_steps", recipe.checkpoint.save_steps)];
    for (key, interval) in intervals {
        if let Some(steps) = interval.filter(|steps| *steps > total) {
            findings.warnings.push(format!("`{key}` = {steps} never comes: the run has {}", counted(total, "step")));
        }
    }
}

fn print(findings: &Findings) -> io::Result<()> {
    let mut stdout = io::stdout().lock();
    for (subject, fact) in &findings.facts {
        writeln!(stdout, "{}", for_terminal(&stdout, &format!("{subject}: {fact}")))?;
    }
    let mut stderr = io::stderr().lock();
    for warning in &findings.warnings {
        writeln!(stderr, "{}", for_terminal(&stderr, &format!("warning: {warning}")))?;
    }
    if findings.problems.0.is_empty() {
        match findings.warnings.len() {
            0 => writeln!(stdout, "no mistakes found")?,
            more => writeln!(stdout, "no mistakes found, {}", counted(more, "warning"))?,
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
