//! The base model and the adapters that the user named: a run, a folder with an adapter, or a model.

mod form;
mod seen;
mod trained_with;

use std::path::{Path, PathBuf};

use super::say;
use crate::config::{Init, ModelOptions};
use crate::data::tokenizer::Tokenizer;
use crate::device::{Dtype, OpenDevice};
use crate::hub::{self, HubError, HubSettings, Progress};
use crate::lora::AdapterSet;
use crate::measure::metrics::SUMMARY_FILE;
use crate::model::weights::{StoredTensor, Weights};
use crate::model::{Model, Storage};
use crate::recipe::of_run::{RESOLVED_FILE, path_of_run};
use crate::run::device_memory::Resources;
use crate::run::inputs::{ModelSource, WeightsFrom};
use crate::run::kernel_check;
use crate::run::overview::{held, multiplies_eight_bits};
use crate::save::checkpoint::Checkpoints;
use crate::save::export::{ExportError, PromptForm, SavedAdapter, about_raw, is_adapter, read_adapter};
use crate::schema::{Problem, Section, read_json};
use crate::util::failure::Failure;
use crate::util::text::counted;

pub(crate) use form::{Asked, stops, template, warn_of};
pub(crate) use seen::{fetched_images_for, images_for, message};
use trained_with::TrainedWith;

/// The name of the model without an adapter.
pub(crate) const BASE: &str = "base";

/// Arguments that name a base model and its adapters.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct ModelArgs {
    /// The base model: a Hugging Face folder, a GGUF file or the id of a Hub repository; a run knows its own
    #[arg(long, value_name = "MODEL")]
    pub(crate) model: Option<String>,

    /// Branch, tag or commit of a Hub repository
    #[arg(long, value_name = "REVISION", requires = "model")]
    pub(crate) revision: Option<String>,

    /// An adapter: the output folder of a run, a checkpoint, a folder that PEFT wrote, or the id of a Hub repository; NAME=DIR
    /// names it
    #[arg(long, value_name = "DIR")]
    pub(crate) adapter: Vec<String>,
}

/// Arguments that say where and in which type a model is held.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct LoadArgs {
    /// Where to compute: auto, cpu, cuda, cuda:N
    #[arg(long, value_name = "DEVICE", default_value = "auto")]
    pub(crate) device: String,

    /// Type in which the weights are held: f32, bf16 or f16; without it, that of the run, or of the files. A CPU computes
    /// in f32, but with bf16 given here or by the run it rounds what it multiplies, as in training
    #[arg(long, value_name = "DTYPE", value_parser = dtype)]
    pub(crate) dtype: Option<Dtype>,

    /// Show nothing but the result, warnings and errors
    #[arg(long, short)]
    pub(crate) quiet: bool,
}

fn dtype(text: &str) -> Result<Dtype, String> {
    text.parse().map_err(|()| "expected f32, bf16 or f16".to_owned())
}

impl LoadArgs {
    /// A line for the user, unless `--quiet`.
    pub(crate) fn note(&self, line: &str) {
        if !self.quiet {
            say(line);
        }
    }
}

/// A folder with an adapter, and its name.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct NamedAdapter {
    pub(crate) name: String,
    pub(crate) folder: PathBuf,
    /// What is to be known about the choice of this folder.
    pub(crate) note: Option<String>,
}

/// What the user named, before anything large is read.
#[derive(Clone, Debug)]
pub(crate) struct Named {
    pub(crate) base: ModelOptions,
    pub(crate) adapters: Vec<NamedAdapter>,
    /// The training settings of the runs that name the base.
    pub(crate) trained_with: TrainedWith,
}

impl Named {
    /// Finds what `names` (runs, adapters or one model) and the arguments name.
    ///
    /// # Errors
    /// No model; several models; a run without an adapter; two adapters of one name.
    pub(crate) fn find(names: &[String], args: &ModelArgs) -> Result<Self, Failure> {
        Self::find_with(names, args, &|name, revision| {
            hub::resolve_adapter(name, revision, &HubSettings::from_env(), Progress::detect(false))
        })
    }

    /// The same of what is on this machine: names of other adapters and models stay names.
    pub(crate) fn find_here(names: &[String], args: &ModelArgs) -> Result<Self, Failure> {
        Self::find_with(names, args, &|_, _| Ok(None))
    }

    /// The same; `on_hub` finds the adapter in a repository.
    fn find_with(names: &[String], args: &ModelArgs, on_hub: &OnHub<'_>) -> Result<Self, Failure> {
        let (mut adapters, mut bases) = (Vec::new(), Vec::new());
        let find = |name: &str, revision: Option<&str>| match adapter_of(name)? {
            Some(adapter) => Ok(Some(adapter)),
            None => NamedAdapter::of_hub(name, revision, on_hub),
        };
        for name in names {
            match find(name, None)? {
                Some(adapter) => adapters.push(adapter),
                None => bases.push(named(name.clone())),
            }
        }
        for name in &args.adapter {
            // Whatever is wrong with the folder is said when it is read.
            adapters.push(find(name, None)?.unwrap_or_else(|| NamedAdapter::new(name)));
        }
        if let Some(path) = &args.model {
            let revision = args.revision.clone();
            let is_model = Path::new(path).join("config.json").is_file();
            match if is_model { None } else { find(path, revision.as_deref())? } {
                Some(adapter) => adapters.push(adapter),
                None => bases.push(ModelOptions { revision, ..named(path.clone()) }),
            }
        }
        let trained_with = TrainedWith::of(if bases.is_empty() { &adapters } else { &[] });
        let base = if bases.is_empty() { base_of(&adapters)? } else { one_of(&bases)? };
        if let Some((index, twice)) =
            adapters.iter().enumerate().find(|(index, one)| adapters[..*index].iter().any(|two| two.name == one.name))
        {
            let problem = Problem::new(format!("two adapters are called `{}`", twice.name));
            let hint = format!("give one another name: --adapter {}{index}={}", twice.name, twice.folder.display());
            return Err(problem.hint(hint).into());
        }
        Ok(Self { base, adapters, trained_with })
    }

    /// The one adapter; `None` for the base model alone.
    ///
    /// # Errors
    /// Several adapters.
    pub(crate) fn one_adapter(&self) -> Result<Option<&NamedAdapter>, Failure> {
        if let [_, second, ..] = &self.adapters[..] {
            let problem = Problem::new(format!("{}: this command takes one adapter", second.folder.display()));
            return Err(problem.hint("`lora-train chat` and `serve` take several").into());
        }
        Ok(self.adapters.first())
    }

    /// Reads the adapters, and of the model everything but its weights.
    pub(crate) fn read(self, quiet: bool) -> Result<ModelFiles, Failure> {
        let read = |adapter: NamedAdapter| {
            let form = PromptForm::read(&adapter.folder).map_err(Failure::input)?;
            Ok::<_, Failure>((read_adapter(&adapter.folder)?, form, adapter))
        };
        let adapters = self.adapters.into_iter().map(read).collect::<Result<Vec<_>, _>>()?;
        let mut source = ModelSource::open(&self.base, 0, WeightsFrom::Hub, quiet)?;
        for (saved, _, adapter) in &adapters {
            source.grow(saved, &adapter.folder);
        }
        self.trained_with.warn_if_changed(&source.weights);
        let tokenizer = source.tokenizer()?;
        Ok(ModelFiles { base: self.base, source, tokenizer, adapters })
    }
}

/// Finds the adapter in a repository of the Hub at a revision.
type OnHub<'a> = dyn Fn(&str, Option<&str>) -> Result<Option<PathBuf>, HubError> + 'a;

impl NamedAdapter {
    /// An adapter on the Hub, called after its repository, or `NAME=OWNER/NAME`; `None` where there is none.
    fn of_hub(text: &str, revision: Option<&str>, on_hub: &OnHub<'_>) -> Result<Option<Self>, Failure> {
        let Self { name, folder, .. } = Self::new(text);
        let id = folder.display().to_string();
        if folder.exists() {
            return Ok(None);
        }
        Ok(on_hub(&id, revision)?.map(|folder| Self { name, folder, note: None }))
    }

    /// `NAME=DIR`, or a folder, which is called after the run that it belongs to.
    fn new(text: &str) -> Self {
        let named = text.split_once('=').filter(|(name, _)| !name.contains('/') && !Path::new(text).exists());
        let folder = PathBuf::from(named.map_or(text, |(_, folder)| folder));
        let in_full = folder.canonicalize().unwrap_or_else(|_| folder.clone());
        let parts = in_full.iter().rev().map(|part| part.to_string_lossy().into_owned());
        let mut parts = parts.filter(|part| part != "adapter" && part != "checkpoints");
        let last = parts.next().unwrap_or_default();
        let mut of_run = |last: String| match parts.next() {
            Some(run) if last.starts_with("step-") || last == "adapter-best" => format!("{run}-{last}"),
            _ => last,
        };
        Self { name: named.map_or_else(|| of_run(last), |(name, _)| name.to_owned()), folder, note: None }
    }
}

/// The adapter in a folder: an adapter's own, or that of a run. `None` where it holds none.
fn adapter_of(text: &str) -> Result<Option<NamedAdapter>, Failure> {
    let adapter = NamedAdapter::new(text);
    let folder = &adapter.folder;
    if is_adapter(folder) {
        return Ok(Some(adapter));
    }
    let last = folder.join("adapter");
    let is_run = folder.join(RESOLVED_FILE).is_file();
    if is_adapter(&last) && (!is_run || folder.join(SUMMARY_FILE).is_file()) {
        return Ok(Some(NamedAdapter { folder: last, ..adapter }));
    }
    if !is_run {
        return Ok(None);
    }
    let newest = Checkpoints::of_folder(&folder.join("checkpoints")).newest_good().map_err(Failure::input)?;
    match newest.checkpoint {
        Some(checkpoint) => {
            let note = format!("{} has not finished: this is {}", folder.display(), checkpoint.display());
            Ok(Some(NamedAdapter { folder: checkpoint, note: Some(note), ..adapter }))
        }
        None if is_adapter(&last) => Ok(Some(NamedAdapter { folder: last, ..adapter })),
        None => {
            let problem = Problem::new(format!("{}: this run has no adapter and no checkpoint yet", folder.display()));
            let best = folder.join("adapter-best");
            let hint = if is_adapter(&best) {
                format!("{} is that of its best evaluation so far: name it", best.display())
            } else {
                "`checkpoint.save_steps` saves one while it trains".to_owned()
            };
            Err(problem.hint(hint).into())
        }
    }
}

/// The base of an adapter: from the recipe of its run, or else from its own config.
fn base_of_adapter(adapter: &Path) -> Result<ModelOptions, Failure> {
    let mut base = match recipe_of(adapter) {
        Some(recipe) => base_of_run(&recipe)?,
        None => named(read_adapter(adapter)?.base_model_name_or_path.unwrap_or_default()),
    };
    let is_elsewhere = !base.path.is_empty() && !Path::new(&base.path).exists();
    if let Some(moved) = path_of_run(adapter, &base.path).filter(|_| is_elsewhere) {
        base.path = moved;
    }
    Ok(base)
}

/// The base as its run held it; other versions may have other keys in their recipes. Weights of a run in `f32` stay in the
/// type of the files, which loses nothing.
fn base_of_run(recipe: &Path) -> Result<ModelOptions, Failure> {
    let file = recipe.display().to_string();
    let failed = |error: &dyn std::fmt::Display| Failure::input(format!("{file}: {error}"));
    let text = std::fs::read_to_string(recipe).map_err(|error| failed(&error))?;
    let table: serde_json::Value = toml::from_str(&text).map_err(|error| failed(&error.message()))?;
    let model = |root: &mut Section| Some(root.section("model", ModelOptions::default()));
    let model = read_json(&file, &table.to_string(), model)?;
    let precision = table["train"]["precision"].as_str().and_then(|name| name.parse::<Dtype>().ok());
    let dtype = model.dtype.or(precision.filter(|dtype| *dtype != Dtype::F32));
    // Random weights are for benchmarks: an adapter belongs to what is in the files.
    Ok(ModelOptions { dtype, init: Init::Pretrained, ..model })
}

/// A base of which no more than its name is known.
fn named(path: String) -> ModelOptions {
    ModelOptions { path, ..ModelOptions::default() }
}

/// The recipe, every default filled in, of the run that an adapter belongs to.
pub(crate) fn recipe_of(adapter: &Path) -> Option<PathBuf> {
    let in_full = adapter.canonicalize().ok()?;
    in_full.ancestors().take(2).map(|folder| folder.join(RESOLVED_FILE)).find(|recipe| recipe.is_file())
}

/// The base of all adapters.
fn base_of(adapters: &[NamedAdapter]) -> Result<ModelOptions, Failure> {
    let bases = adapters.iter().map(|adapter| base_of_adapter(&adapter.folder)).collect::<Result<Vec<_>, _>>()?;
    match adapters {
        [] => {
            Err(Problem::new("no model").hint("name a run, or a model: a folder or the id of a Hub repository").into())
        }
        [first, ..] if bases[0].path.is_empty() => {
            let problem = Problem::new(format!("{}: the adapter does not name its base model", first.folder.display()));
            Err(problem.hint("give it with --model").into())
        }
        _ => one_of(&bases),
    }
}

/// The one base of all of these.
fn one_of(bases: &[ModelOptions]) -> Result<ModelOptions, Failure> {
    let (first, rest) = bases.split_first().map(|(first, rest)| (first.clone(), rest)).unwrap_or_default();
    match rest.iter().find(|other| (&other.path, &other.revision) != (&first.path, &first.revision)) {
        Some(other) => {
            let problem = Problem::new(format!("two base models: {} and {}", first.path, other.path));
            Err(problem.hint("one model can be open at a time; --model BASE takes one for all adapters").into())
        }
        None => Ok(first),
    }
}

/// A model whose weights have not been read yet, with its adapters.
pub(crate) struct ModelFiles {
    base: ModelOptions,
    pub(crate) source: ModelSource,
    pub(crate) tokenizer: Tokenizer,
    adapters: Vec<(SavedAdapter, Option<PromptForm>, NamedAdapter)>,
}

/// A model on its device. The first adapter is the one that was named first, the last is the base.
pub(crate) struct OpenedModel {
    pub(crate) source: ModelSource,
    pub(crate) tokenizer: Tokenizer,
    pub(crate) model: Model,
    pub(crate) adapters: Vec<OpenedAdapter>,
    /// Memory for texts in the making: half of what is left beside the model.
    pub(crate) text_bytes: Option<u64>,
}

/// An adapter on its device.
pub(crate) struct OpenedAdapter {
    pub(crate) name: String,
    /// Its weights; of the base its config.json or GGUF file.
    pub(crate) file: PathBuf,
    pub(crate) set: AdapterSet,
    pub(crate) form: Option<PromptForm>,
}

impl OpenedModel {
    /// The adapter of this name.
    pub(crate) fn adapter(&self, name: &str) -> Option<usize> {
        self.adapters.iter().position(|adapter| adapter.name == name)
    }

    /// The names of the adapters, the base last.
    pub(crate) fn names(&self) -> String {
        let names: Vec<&str> = self.adapters.iter().map(|adapter| adapter.name.as_str()).collect();
        names.join(", ")
    }
}

impl ModelFiles {
    /// How prompts were formatted in the training of the first adapter, where that is known.
    pub(crate) fn form(&self) -> Option<&PromptForm> {
        self.adapters.first().and_then(|(_, form, _)| form.as_ref())
    }

    /// The same where all adapters write text.
    pub(crate) fn that_write(mut self) -> Result<Self, Failure> {
        for (saved, _, NamedAdapter { folder, .. }) in &mut self.adapters {
            *saved = saved.clone().that_writes(folder)?;
        }
        Ok(self)
    }

    pub(crate) fn load(self, args: &LoadArgs) -> Result<OpenedModel, Failure> {
        let Self { base, source, tokenizer, adapters } = self;
        let asked_for = args.dtype.or(base.dtype);
        let expected = asked_for.or(float_dtype(&source)).unwrap_or(Dtype::Bf16);
        let device = kernel_check::open(&args.device, expected).map_err(Failure::input)?;
        let (dtype, precision) = dtypes(asked_for, &source, &device);
        let mut opened = Vec::new();
        for (saved, form, NamedAdapter { name, folder, note }) in adapters {
            note.iter().for_each(|note| args.note(note));
            args.note(&about(&saved, &folder));
            about_raw(&folder)?.iter().for_each(|warning| say(warning));
            let trained_on = saved.base_model_name_or_path.clone();
            let set = saved.into_set(&folder, &source.config, &device.device);
            let set = set.map_err(|error| misfit(&error, trained_on.as_deref()))?;
            opened.push(OpenedAdapter { name, file: folder.join("adapter_model.safetensors"), set, form });
        }
        let none = AdapterSet::none(source.config.num_layers());
        let folder = &source.folder;
        let file = if folder.is_file() { folder.clone() } else { folder.join("config.json") };
        opened.push(OpenedAdapter { name: BASE.to_owned(), file, set: none, form: None });
        let storage = Storage { dtype, ..base.storage(dtype, Some(&source.config)) };
        let model = source.load(storage, precision.into(), &device)?;
        let held = held(storage, Some(&source.config), device.is_gpu());
        let is_rounded = precision == Dtype::Bf16 && multiplies_eight_bits(&base, Some(&source.config), &device);
        let rounding = if is_rounded { " and fp8" } else { "" };
        args.note(&format!("{}: held in {held}, computed in {precision}{rounding} on {}", base.path, device.label));
        let text_bytes = Resources::of(&device).usable_bytes().map(|bytes| bytes / 2);
        Ok(OpenedModel { source, tokenizer, model, adapters: opened, text_bytes })
    }
}

/// The type of the first weights in files that are no codes.
fn float_dtype(source: &ModelSource) -> Option<Dtype> {
    match &source.weights {
        Weights::Files(files) => files.tensors().values().find_map(StoredTensor::float_dtype),
        Weights::Gguf(file) => file.float_dtype(),
        Weights::Random(_) => None,
    }
}

/// The types of weights and of computation: the files' own type, so that nothing is rounded, unless another is
/// requested or the device lacks it. A CPU computes in bf16 where it is requested.
fn dtypes(asked_for: Option<Dtype>, source: &ModelSource, device: &OpenDevice) -> (Dtype, Dtype) {
    // On a GPU, what is quantised is decoded.
    let decoded = (device.is_gpu() && matches!(source.weights, Weights::Gguf(_))).then_some(Dtype::Bf16);
    let stored = float_dtype(source).or(decoded).filter(|&dtype| device.supports(dtype));
    let storage = asked_for.or(stored).unwrap_or(Dtype::F32);
    let has_arithmetic = device.is_gpu() || asked_for == Some(Dtype::Bf16);
    (storage, if has_arithmetic { storage } else { Dtype::F32 })
}

fn about(saved: &SavedAdapter, folder: &Path) -> String {
    let base = saved.base_model_name_or_path.as_deref();
    let base = base.map(|base| format!(", trained on {base}")).unwrap_or_default();
    {
        let layers = counted(saved.weights.len(), "layer");
        format!("{}: adapter of rank {} on {layers}{base}", folder.display(), saved.config.r)
    }
}

/// Names the base that an adapter was trained on, if known, where it does not fit.
pub(crate) fn misfit(error: &ExportError, base: Option<&str>) -> Failure {
    let problem = Problem::new(error.to_string());
    match base {
        Some(base) => problem.hint(format!("the adapter was trained on {base}: it fits that model alone")).into(),
        None => problem.into(),
    }
}

#[cfg(test)]
mod tests;
