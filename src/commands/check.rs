//! `lora-train check`: finds every mistake that can be known before training, all at once.
//!
//! It reads only the headers of the weights. Findings go to stdout, warnings and mistakes to stderr.

mod data;
mod findings;
mod model;
mod output;

use std::io::{self, Write};
use std::num::NonZeroUsize;
use std::sync::Arc;

use crate::device;
use crate::failure::Failure;
use crate::recipe::{Purpose, Recipe, RecipeArgs};
use crate::run::device_memory::StepMemory;
use crate::run::overview;
use crate::schema::Problem;
use crate::spec::ModelConfig;
use findings::Findings;

/// Arguments of `lora-train check`.
#[derive(Clone, Debug, clap::Args)]
pub struct CheckArgs {
    /// The recipe and changes to it.
    #[command(flatten)]
    pub recipe: RecipeArgs,

    /// Rows of each file to look at [default: all]
    #[arg(long, value_name = "N")]
    pub rows: Option<NonZeroUsize>,
}

/// Checks a recipe and everything that it names.
///
/// # Errors
///
/// All mistakes found.
pub fn run(args: &CheckArgs) -> Result<(), Failure> {
    let (recipe, mut problems) = args.recipe.examine(Purpose::Training);
    let Some(recipe) = recipe else { return Err(Failure::Input(problems)) };
    let (places, max_rows) = (recipe.places.clone(), args.rows.map(NonZeroUsize::get));
    if problems.0.is_empty() {
        let findings = examine(&recipe, max_rows);
        print(&findings).map_err(Failure::running)?;
        problems = findings.problems;
    } else {
        // With a mistake in the recipe, findings about steps or rows are unreliable, but a file exists or it does not.
        let others = examine(&without_gaps(recipe), max_rows).problems.0;
        // Rows and steps can fail for the same mistakes, then without their place in the recipe.
        let is_known = |other: &Problem| problems.0.iter().any(|problem| is_same(problem, other));
        let others: Vec<Problem> = others.into_iter().filter(|other| !is_known(other)).collect();
        problems.0.extend(others);
    }
    if problems.0.is_empty() { Ok(()) } else { Err(Failure::Input(problems).located(&places)) }
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

/// Checks everything that the recipe names. A mistake hides others only where it makes looking for them impossible.
fn examine(recipe: &Recipe, max_rows: Option<usize>) -> Findings {
    let mut findings = Findings::default();
    output::examine(&recipe.output_dir, &mut findings);
    let has_model = !recipe.model.path.is_empty();
    let before = findings.problems.0.len();
    let model = if has_model { model::examine(&recipe.model, &mut findings) } else { model::Model::default() };
    for problem in &mut findings.problems.0[before..] {
        problem.message = format!("`model.path`: {}", problem.message);
    }
    if let Some(config) = &model.config {
        model::examine_adapters(&recipe.lora, config, &mut findings);
        findings.warnings.extend(overview::length_warning(recipe, config));
    }
    match model.tokenizer {
        Some(tokenizer) if !recipe.data.train.is_empty() => {
            data::examine(recipe, &Arc::new(tokenizer), max_rows, &mut findings);
        }
        _ => data::examine_paths(&recipe.data, &mut findings),
    }
    examine_device(recipe, model.config.as_ref(), &mut findings);
    findings
}

fn examine_device(recipe: &Recipe, config: Option<&ModelConfig>, findings: &mut Findings) {
    let device = match device::open(&recipe.device.name) {
        Ok(device) => device,
        Err(error) => return findings.error(&error),
    };
    findings.facts.push(overview::device(recipe, &device));
    let precision = recipe.train.precision;
    for dtype in [precision, recipe.model.dtype.unwrap_or(precision)] {
        if let Err(error) = device.require_dtype(dtype) {
            findings.error(&error);
        }
    }
    // Mistakes in the adapted layers have been reported already.
    if let Some((config, selection)) =
        config.and_then(|config| Some((config, recipe.lora.select(config.num_hidden_layers).ok()?)))
        && let Some(warning) = StepMemory::estimate(recipe, config, &selection, &device).warning
    {
        findings.warn(warning);
    }
}

fn print(findings: &Findings) -> io::Result<()> {
    let mut stdout = io::stdout().lock();
    for (subject, fact) in &findings.facts {
        writeln!(stdout, "{subject}: {fact}")?;
    }
    let mut stderr = io::stderr().lock();
    for warning in &findings.warnings {
        writeln!(stderr, "warning: {warning}")?;
    }
    if findings.problems.0.is_empty() {
        match findings.warnings.len() {
            0 => writeln!(stdout, "no mistakes found")?,
            1 => writeln!(stdout, "no mistakes found, 1 warning")?,
            more => writeln!(stdout, "no mistakes found, {more} warnings")?,
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
