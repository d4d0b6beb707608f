//! `lora-train inspect`: shows what the model will see, or what a model is.

use std::io::{self, BufWriter, Write};
use std::sync::Arc;

use super::say;
use crate::data::cache::CacheSettings;
use crate::data::dataset::{Dataset, OpenOptions};
use crate::data::tokenizer::Tokenizer;
use crate::hub::Progress;
use crate::images::is_of_image;
use crate::recipe::{Purpose, Recipe, RecipeArgs};
use crate::run::images::image_headers_of_rows;
use crate::run::inputs::{self, FoundModel, WeightsFrom, data_failure, find_model};
use crate::run::overview;
use crate::save::export::grow;
use crate::spec::ModelConfig;
use crate::util::failure::Failure;
use crate::util::text::{counted, has_colors};

mod model;
mod row;
mod summary;

use row::Marks;
use summary::Summary;

/// Arguments of `lora-train inspect`.
#[derive(Clone, Debug, clap::Args)]
#[command(mut_arg("recipe", |arg| arg.value_name("RECIPE.toml|MODEL").help(
    "A recipe, whose rows are shown; or a model: a Hugging Face folder, a GGUF file or the id of a Hub repository"
)))]
pub(crate) struct InspectArgs {
    /// The recipe and changes to it.
    #[command(flatten)]
    pub(crate) recipe: RecipeArgs,

    /// Rows to show, spread evenly over the data [default: 3]
    #[arg(long, value_name = "N")]
    pub(crate) rows: Option<usize>,

    /// Write one JSON object a row, and a last one with the summary; of a model, one object
    #[arg(long)]
    pub(crate) json: bool,
}

/// Rows that are shown unless another number is given.
const NUM_ROWS: usize = 3;

#[derive(Debug, thiserror::Error)]
enum InspectError {
    #[error(transparent)]
    Data(#[from] crate::data::error::DataError),
    #[error(transparent)]
    Tokenizer(#[from] crate::data::tokenizer::TokenizerError),
    #[error("cannot write to stdout: {0}")]
    Write(#[from] io::Error),
}

/// Shows the tokens of some rows, which of them carry loss, lengths and truncations; or a model.
pub(crate) fn run(args: &InspectArgs) -> Result<(), Failure> {
    if let Some(name) = model::named(&args.recipe.recipe) {
        return model::run(name, args);
    }
    let recipe = args.recipe.load(Purpose::Training)?;
    run_recipe(args, &recipe).map_err(|failure| failure.located(&recipe.places))
}

fn run_recipe(args: &InspectArgs, recipe: &Recipe) -> Result<(), Failure> {
    // The tokenizer is beside the model's config.
    let (tokenizer, images) = find_model(&recipe.model, WeightsFrom::Nowhere, false)
        .map_err(Failure::input)
        .and_then(|FoundModel { folder, config, .. }| {
            // What is wrong with the config is another command's to say.
            let config = ModelConfig::from_file(&config).ok().map(|mut config| {
                let beside = grow(&mut config, &folder, &recipe.lora);
                (beside.unwrap_or_else(|| folder.clone()), config)
            });
            let images = config.as_ref().and_then(|(_, config)| image_headers_of_rows(&folder, config, &recipe.data));
            let opened =
                config.map_or_else(|| Tokenizer::open(&folder), |(folder, config)| inputs::tokenizer(&folder, &config));
            Ok((opened.map_err(Failure::input)?, images))
        })
        .map_err(|failure| failure.about("model.path"))?;
    let tokenizer = Arc::new(tokenizer);
    let (cache, progress) = (CacheSettings::from_env(), Progress::detect(false));
    let options = OpenOptions { cache, progress, images, ..OpenOptions::default() };
    let data = Dataset::open(&recipe.data, Arc::clone(&tokenizer), recipe.seed, &options).map_err(data_failure)?;
    let stdout = io::stdout();
    let marks = if has_colors(&stdout) { Marks::Color } else { Marks::Brackets };
    let marks = (!args.json).then_some(marks);
    match inspect(recipe, &data, &tokenizer, args.rows.unwrap_or(NUM_ROWS), marks, &mut BufWriter::new(stdout.lock())) {
        Ok(warnings) => {
            warnings.iter().for_each(|warning| say(&format!("warning: {warning}")));
            Ok(())
        }
        // The reader, such as `head`, has stopped reading.
        Err(InspectError::Write(error)) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        Err(InspectError::Write(error)) => Err(Failure::running(error)),
        Err(InspectError::Data(error)) => Err(data_failure(error)),
        Err(error) => Err(Failure::input(error)),
    }
}

/// Writes everything to `out`, as JSON without `marks`; returns the warnings.
fn inspect(
    recipe: &Recipe,
    data: &Dataset,
    tokenizer: &Tokenizer,
    num_shown: usize,
    marks: Option<Marks>,
    out: &mut dyn Write,
) -> Result<Vec<String>, InspectError> {
    if marks.is_some() {
        write_files(recipe, data, out)?;
    }
    let num_rows = data.num_file_rows();
    let num_shown = num_shown.min(num_rows);
    for shown in 0..num_shown {
        let (source, mut row) = data.file_row(shown * num_rows / num_shown)?;
        // Of images, what they are in the vocabulary.
        if let Some(images) = data.images() {
            row.ids.iter_mut().filter(|id| is_of_image(**id)).for_each(|id| *id = images.image_token_id());
        }
        let path = &data.files()[source.file].path;
        match marks {
            Some(marks) => {
                writeln!(out)?;
                row::write(out, path, source.row, &row, tokenizer, marks)?;
            }
            None => writeln!(out, "{}", row::json(path, source.row, &row))?,
        }
    }
    let summary = Summary::measure(data, &recipe.data, recipe.train.micro_batch_size)?;
    if marks.is_some() {
        writeln!(out)?;
        summary.write(out)?;
    } else {
        writeln!(out, "{}", summary.json())?;
    }
    out.flush()?;
    Ok(data.warnings())
}

fn write_files(recipe: &Recipe, data: &Dataset, out: &mut dyn Write) -> io::Result<()> {
    for file in data.files() {
        let role = if file.is_eval { "evaluation" } else { "training" };
        let (path, rows) = (file.path.display(), counted(file.num_rows, "row"));
        write!(out, "{role} data: {path} ({rows}, {}, format {})", file.kind.name(), file.format.name())?;
        writeln!(out, "{}{}", data.form_of(file), overview::file_notes(file))?;
    }
    if recipe.data.eval_split.is_some() {
        let (subject, fact) = overview::held_out(data);
        writeln!(out, "{subject}: {fact}")?;
    }
    Ok(())
}

#[cfg(test)]
mod tests;
