//! `lora-train eval`: the loss of a model on rows, as an evaluation of training computes it.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Instant;

use serde::Serialize;
use serde_json::{Map, Value, json};

use super::named::{ModelArgs, Named, NamedAdapter, misfit, recipe_of};
use super::{print_figures, say};
use crate::config::{DataConfig, DataSource, Metric, ModelOptions, TaskConfig};
use crate::data::cache::CacheSettings;
use crate::data::dataset::{Dataset, OpenOptions};
use crate::data::files::FileKind;
use crate::hub::Progress;
use crate::lora::AdapterSet;
use crate::measure::figures::evaluation::{EvalFigure, Group};
use crate::model::Model;
use crate::recipe::of_run::moved_paths;
use crate::recipe::{Purpose, Recipe};
use crate::run::dir::REFERENCE;
use crate::run::images::with_images;
use crate::run::inputs::{WeightsFrom, data_failure};
use crate::run::{Prepared, trainer_failure};
use crate::save::export::{PromptForm, SavedAdapter, read_adapter};
use crate::schema::{Choice, Override, Problem};
use crate::train::eval::{eval_loss, figures};
use crate::train::step::TrainStep;
use crate::train::stop::Stop;
use crate::train::task::{Score, Task};
use crate::util::failure::Failure;
use crate::util::text::{counted, with_commas};
use crate::util::{files, terminal};

/// Arguments of `lora-train eval`.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct EvalArgs {
    /// A run, whose recipe says which rows and how; an adapter's folder; or a model
    #[arg(value_name = "RUN|MODEL", required_unless_present = "model")]
    name: Option<String>,

    #[command(flatten)]
    model: ModelArgs,

    /// Measure the base model, without the adapter
    #[arg(long)]
    base: bool,

    /// Rows to measure on, instead of the run's evaluation rows
    #[arg(long, value_name = "FILE")]
    data: Option<String>,

    /// Change one key of the run's recipe, or of the default one; can be given several times
    #[arg(long, value_name = "SECTION.KEY=VALUE")]
    set: Vec<String>,

    /// Where to compute, instead of `device.name`
    #[arg(long, value_name = "DEVICE")]
    device: Option<String>,

    /// Write what the model answered to each row of the task, or how it scores the answers of each pair, to this file, as JSON
    /// lines
    #[arg(long, value_name = "FILE")]
    answers: Option<PathBuf>,

    /// Start the programs of `[[objective.reward]]` that the run's recipe names: a folder may be somebody else's
    #[arg(long)]
    allow_command: bool,

    /// Write one JSON object also on a terminal
    #[arg(long)]
    json: bool,
}

/// The last line of stdout.
#[derive(Clone, Debug, Serialize)]
struct EvalReport {
    /// Without the score.
    #[serde(flatten)]
    figures: Map<String, Value>,
    target_tokens: u64,
    rows: usize,
    /// By metric.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    tasks: BTreeMap<&'static str, TaskReport>,
}

/// The score of a task.
#[derive(Clone, Copy, Debug, Serialize)]
struct TaskReport {
    score: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    score_norm: Option<f64>,
    rows: usize,
}

impl From<Score> for TaskReport {
    fn from(Score { score, score_norm, num_rows: rows, .. }: Score) -> Self {
        Self { score, score_norm, rows }
    }
}

/// Measures, and prints the figures.
pub(crate) fn run(args: &EvalArgs) -> Result<(), Failure> {
    let stop = Stop::on_signals().map_err(Failure::running)?;
    if let Some(path) = &args.answers {
        files::try_writing(path).map_err(|error| Problem::new(format!("--answers {}: {error}", path.display())))?;
    }
    let named = Named::find(args.name.as_slice(), &args.model)?;
    let adapter = named.one_adapter()?.filter(|_| !args.base);
    let (prepared, saved) = prepare(args, &named, adapter)?;
    let Prepared { recipe, device, .. } = &prepared;

    let is_stopped = || stop.requested();
    let (cache, progress) = (CacheSettings::from_env(), Progress::detect(false));
    let options = OpenOptions { cache, progress, is_stopped: &is_stopped, ..OpenOptions::default() };
    let data = open_data(args, &prepared, &options)?;
    if recipe.objective.scores() {
        data.row_warnings().iter().for_each(|warning| say(&format!("warning: {warning}")));
    }
    let task = Task::open(&recipe.eval.task, &data).map_err(data_failure)?;
    if args.answers.is_some() && task.is_none() && !recipe.objective.scores() {
        return Err(Problem::new("--answers has nothing to write: these rows are no task, and are not scored").into());
    }
    let adapters = open_adapters(adapter.zip(saved), &prepared, args.base)?;
    let what = adapter.map_or(recipe.model.path.clone(), |adapter| adapter.folder.display().to_string());
    say(&format!("{what}: {} on {}", counted(data.num_eval_rows(), "row"), device.label));
    let source = &prepared.source;
    let model = with_images(prepared.load_model()?, (&source.folder, &source.weights), data.images(), &options)?;
    let step = open_step(args, &named, &prepared, (model, adapters))?;
    let bar = terminal::bar(0);
    let on_progress = |done: usize, total: usize| {
        bar.set_length(total as u64);
        bar.set_position(done as u64);
    };
    let mut rollouts = prepared.rollouts(&data)?;
    let total = eval_loss(&step, &data, rollouts.as_mut(), &recipe.eval, &stop, on_progress);
    let total = total.map_err(|error| trainer_failure(error.into()))?.ok_or(Failure::Interrupted)?;
    let score_of = |task: Task| {
        let count = task.count(&step, &data, is_stopped, on_progress).map_err(Failure::input)?;
        Ok::<_, Failure>(task.score(count.ok_or(Failure::Interrupted)?))
    };
    let score = task.map(score_of).transpose()?;
    bar.finish_and_clear();
    let Some(metrics) = figures((0, 0.0), &total, None, Instant::now()) else {
        return Err(Problem::new("no token of these rows carries loss").into());
    };
    let rows = data.num_eval_rows();
    if let Some(path) = &args.answers {
        let lines = match &score {
            Some(score) => score.answers.iter().map(|answer| format!("{answer}\n")).collect(),
            None => scores_of_rows(&step, &data, recipe)?,
        };
        let failed = |error| Failure::running(format!("--answers {}: {error}", path.display()));
        files::write(path, lines).map_err(failed)?;
    }
    let tasks = recipe.eval.task.metric.zip(score).map(|(metric, score)| (metric.word(), TaskReport::from(score)));
    let tasks = tasks.into_iter().collect();
    let groups = [Group::Loss, Group::Pairs, Group::Answers];
    let figures = metrics.by_name(EvalFigure::of_groups(&groups));
    let report = EvalReport { figures, target_tokens: total.target_tokens, rows, tasks };
    print_figures(&report, args.json, &report.text(&metrics.texts(&groups)))
}

/// The recipe with its model and device, and the adapter as it was saved.
fn prepare(
    args: &EvalArgs,
    named: &Named,
    adapter: Option<&NamedAdapter>,
) -> Result<(Prepared, Option<SavedAdapter>), Failure> {
    let saved = adapter.map(|adapter| read_adapter(&adapter.folder)).transpose()?;
    let scores = saved.as_ref().is_some_and(|saved| saved.weights.scores());
    let mut prepared = Prepared::new(recipe(args, named, scores)?, None, WeightsFrom::Hub, false)?;
    if let Some((saved, adapter)) = saved.as_ref().zip(adapter) {
        prepared.source.grow(saved, &adapter.folder);
        named.trained_with.warn_if_changed(&prepared.source.weights);
    }
    Ok((prepared, saved))
}

/// The adapter on its device, or none; a head that scores must be there where the recipe asks for scores, and only there.
fn open_adapters(
    saved: Option<(&NamedAdapter, SavedAdapter)>,
    prepared: &Prepared,
    is_base: bool,
) -> Result<AdapterSet, Failure> {
    let Prepared { recipe, source, device, .. } = prepared;
    let adapters = match saved {
        None => AdapterSet::none(source.config.num_layers()),
        Some((adapter, saved)) => {
            let base = saved.base_model_name_or_path.clone();
            let set = saved.into_set(&adapter.folder, &source.config, &device.device);
            set.map_err(|error| misfit(&error, base.as_deref()))?
        }
    };
    let has_head = adapters.score().is_some();
    if recipe.objective.scores() == has_head {
        return Ok(adapters);
    }
    let (what, hint) = match (has_head, is_base) {
        (true, _) => ("this adapter scores texts", "`--set objective.name=reward` measures on pairs of answers"),
        (_, true) => ("a run of \"reward\" has a head that scores, which the base lacks", "leave --base out"),
        (_, false) => ("this adapter has no head that scores", "take objective.name = \"reward\" out"),
    };
    Err(Problem::new(what).hint(hint).into())
}

/// The step that measures, with what its objective compares with.
fn open_step(
    args: &EvalArgs,
    named: &Named,
    prepared: &Prepared,
    (model, adapters): (Model, AdapterSet),
) -> Result<TrainStep, Failure> {
    let step = prepared.step_of(model, adapters);
    let kept = step.needs_reference().then(|| kept_reference(args, named)).transpose()?.flatten();
    let Some(kept) = kept else { return Ok(step) };
    let (config, device) = (&prepared.source.config, &prepared.device.device);
    let reference = read_adapter(&kept)?.into_set(&kept, config, device).map_err(|error| misfit(&error, None))?;
    Ok(step.with_reference(reference))
}

/// The scores of the answers of every evaluation row, as JSON lines.
fn scores_of_rows(step: &TrainStep, data: &Dataset, recipe: &Recipe) -> Result<String, Failure> {
    let mut lines = String::new();
    let batches = data.eval_batches(recipe.train.micro_batch_size, recipe.eval.max_batches).map_err(data_failure)?;
    for loaded in batches.until(|| false) {
        let batch = loaded.map_err(data_failure)?.batch;
        let scores = step.model().scores(&batch, step.adapters()).unwrap_or_default();
        for (scores, sources) in scores.chunks(2).zip(batch.sources.chunks(2)) {
            let file = data.files().get(sources[0].file).map(|file| file.path.display().to_string());
            let line = json!({"file": file, "row": sources[0].row + 1, "chosen": scores[0], "rejected": scores[1]});
            lines += &format!("{line}\n");
        }
    }
    Ok(lines)
}

impl EvalReport {
    fn text(&self, figures: &[String]) -> String {
        let tokens = with_commas(self.target_tokens);
        let mut text = format!("{} ({tokens} target tokens)", figures.join(", "));
        for (metric, TaskReport { score, score_norm, rows }) in &self.tasks {
            let norm = score_norm.map(|norm| format!(", by length {:.1}%", 100.0 * norm)).unwrap_or_default();
            text += &format!("\n{metric} {:.1}% of {}{norm}", 100.0 * score, counted(rows, "row"));
        }
        text
    }
}

/// The adapter with which a run of preferences compares, in the run's folder, of which an adapter may be a part; `None`: it
/// compares with the base.
fn kept_reference(args: &EvalArgs, named: &Named) -> Result<Option<PathBuf>, Failure> {
    let folder = named.adapters.first().map(|adapter| adapter.folder.as_path());
    let kept = folder.into_iter().flat_map(Path::ancestors).skip(1).take(2).map(|above| above.join(REFERENCE));
    let starts = folder.and_then(recipe_of).and_then(|path| fs::read_to_string(path).ok());
    let has_started = starts.is_some_and(|text| text.contains("\nstart_from = "));
    match kept.into_iter().find(|kept| kept.is_dir()) {
        None if has_started && !args.base => {
            let problem =
                Problem::new("the adapter that this run started from, with which it compares, is not beside it");
            Err(problem.hint("name the run's folder, which has it in `reference`").into())
        }
        kept => Ok(kept),
    }
}

/// The recipe of the run, or the default one in the form that the adapter was trained in, with the rows to measure on.
fn recipe(args: &EvalArgs, named: &Named, scores: bool) -> Result<Recipe, Failure> {
    let device = args.device.iter().map(|name| Override::argument("--device", "device.name", name));
    let of_run = named.adapters.first().and_then(|adapter| recipe_of(&adapter.folder));
    // The adapter is read; what it started from may be gone.
    let read = |path: &PathBuf| {
        fs::read_to_string(path).map_err(|error| Failure::input(format!("{}: {error}", path.display())))
    };
    let text = of_run.as_ref().map(read).transpose()?.unwrap_or_default();
    let start = text.contains("\nstart_from = ").then(|| Override::set("lora.start_from="));
    let own = of_run.as_ref().map(|path| own_changes(args, &named.adapters[0].folder, path, &text, start.as_slice()));
    let set = args.set.iter().map(Override::set);
    let overrides: Vec<Override> = own.into_iter().flatten().chain(set).chain(device).chain(start.clone()).collect();
    let mut recipe = match &of_run {
        Some(path) => {
            let recipe = Recipe::parse(path, &text, &overrides, Purpose::Benchmark)?;
            if !args.allow_command {
                recipe.refuse_programs_of(path, &text)?;
            }
            recipe
        }
        None => {
            let form = named.adapters.first().map(|adapter| PromptForm::read(&adapter.folder)).transpose()?.flatten();
            let is_raw = form == Some(PromptForm::Raw);
            let of_adapter = [(scores, "objective.name=reward"), (is_raw, "data.chat_template=none")];
            let of_adapter = of_adapter.into_iter().filter(|(holds, _)| *holds).map(|(_, key)| Override::set(key));
            let overrides: Vec<Override> = of_adapter.chain(overrides).collect();
            let text = format!("model.path = {}", toml::Value::String(named.base.path.clone()));
            Recipe::parse(Path::new("eval"), &text, &overrides, Purpose::Benchmark)?
        }
    };
    let (path, revision) = (named.base.path.clone(), named.base.revision.clone());
    recipe.model = ModelOptions { path, revision, ..recipe.model };
    let data = &mut recipe.data;
    if let Some(path) = &args.data {
        // Its columns are those of the rows whose place it takes, where all of these have the same.
        let replaced = if data.eval.is_empty() { &data.train } else { &data.eval };
        let is_table = FileKind::of(Path::new(path)) != Some(FileKind::Txt);
        let reading = |source: &DataSource| (source.format, source.columns.clone());
        let mut readings = replaced.iter().map(reading).filter(|_| is_table);
        // Without named columns they are found by themselves, also another format's.
        let first = readings.next().filter(|first| !first.1.is_empty() && readings.all(|other| other == *first));
        let (format, columns) = first.unwrap_or_default();
        data.eval = vec![DataSource { path: path.clone(), format, columns, ..DataSource::default() }];
        data.eval_split = None;
        recipe.eval.max_batches = None;
    }
    if !data.eval.is_empty() {
        // The rows that were trained on are of use only as examples, and there may be many.
        if recipe.eval.task.num_fewshot == 0 {
            data.train.clear();
        } else if data.train.is_empty() {
            data.train = data.eval[..1].to_vec();
        }
    } else if data.eval_split.is_none() {
        let hint = "--data FILE names a file of them";
        return Err(Problem::new("there are no evaluation rows").hint(hint).into());
    }
    Ok(recipe)
}

/// The rows. A file of `--data` may have other columns than those that the run names.
fn open_data(args: &EvalArgs, prepared: &Prepared, options: &OpenOptions<'_>) -> Result<Dataset, Failure> {
    let Prepared { recipe, source, .. } = prepared;
    let open = |config: &DataConfig| source.open_data(config, recipe.seed, options);
    open(&recipe.data).or_else(|failure| {
        let by_itself = |source: &DataSource| DataSource { path: source.path.clone(), ..DataSource::default() };
        let eval = recipe.data.eval.iter().map(by_itself).collect();
        let again = args.data.as_ref().and_then(|_| open(&DataConfig { eval, ..recipe.data.clone() }).ok());
        again.ok_or(failure)
    })
}

/// What changes in the recipe of a run before the command line changes it: its paths lead to where they did in training,
/// and of its task those keys go for which another metric has no use.
fn own_changes(args: &EvalArgs, adapter: &Path, recipe: &Path, text: &str, start: &[Override]) -> Vec<Override> {
    let mut changes = moved_paths(adapter, text);
    let set: Vec<(&str, &str)> = args.set.iter().filter_map(|set| set.split_once('=')).collect();
    let is_set = |key: &str| set.iter().rfind(|(other, _)| other.trim() == key);
    if let Some((_, name)) = is_set("eval.task.metric")
        && let Ok(own) = Recipe::load(recipe, start, Purpose::Benchmark)
    {
        let name = name.trim().trim_matches(['"', '\'']);
        let metric = Metric::NAMES.iter().find(|(other, _)| *other == name).map(|(_, metric)| *metric);
        let unread = TaskConfig { metric, ..own.eval.task }.unread();
        let keys = unread.map(|(key, _)| format!("eval.task.{key}")).filter(|key| is_set(key).is_none());
        changes.extend(keys.map(|key| Override::set(key + "=")));
    }
    changes
}
