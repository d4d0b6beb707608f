//! `lora-train push`: an adapter, or a merged model, on the Hub, with a card that says how it was made.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::slice;

use indicatif::HumanBytes;
use serde_json::Value;

use super::named::{ModelArgs, Named};
use super::report::failure;
use super::{print, say};
use crate::hub::{self, Content, HubSettings, Location, Progress, Upload};
use crate::insight::report::{Published, model_card};
use crate::run::next_commands::{about_experts, about_servers, highest_rank, vllm_options};
use crate::save::export::{PROMPT_FORM_FILE, SHIPPED_FILE, SavedAdapter, TOKENIZER_FILES, about_raw, read_adapter};
use crate::schema::Problem;
use crate::spec::ModelConfig;
use crate::util::failure::Failure;

/// The card, and its picture.
const CARD: &str = "README.md";
const CURVE: &str = "loss.svg";
const ADAPTER_CONFIG: &str = "adapter_config.json";
const BASE_KEY: &str = "base_model_name_or_path";

/// Arguments of `lora-train push`.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct PushArgs {
    /// A run
    #[arg(value_name = "RUN")]
    run: String,

    /// The repository to write to; it is made where there is none
    #[arg(value_name = "OWNER/NAME")]
    repository: String,

    /// The best adapter by evaluation, instead of the last
    #[arg(long)]
    best: bool,

    /// A folder that `merge` wrote for this run: the whole model, instead of the adapter
    #[arg(long, value_name = "DIR", conflicts_with = "best")]
    merged: Option<PathBuf>,

    /// The base model's id on the Hub, where the run has it in a folder
    #[arg(long, value_name = "OWNER/NAME")]
    base: Option<String>,

    /// Let everybody read the repository, where it is made
    #[arg(long)]
    public: bool,

    /// Show the files, their sizes and the card, and send nothing
    #[arg(long)]
    dry_run: bool,
}

/// Uploads, and prints the address.
pub(crate) fn run(args: &PushArgs) -> Result<(), Failure> {
    hub::check_target(&args.repository)?;
    let files = files(args)?;
    if args.dry_run {
        return print(&shown(args, &files));
    }
    let message = "Upload with lora-train";
    let settings = HubSettings::from_env();
    let address = hub::upload(&args.repository, args.public, &files, message, &settings, Progress::detect(false))?;
    print(&address)
}

/// The files that belong into the repository.
fn files(args: &PushArgs) -> Result<Vec<Upload>, Failure> {
    let name =
        if args.best { Path::new(&args.run).join("adapter-best").display().to_string() } else { args.run.clone() };
    let model = ModelArgs { model: args.base.clone(), revision: None, adapter: Vec::new() };
    let named = Named::find_here(slice::from_ref(&name), &model)?;
    let Some(adapter) = named.one_adapter()? else {
        let problem = Problem::new(format!("{name}: there is no adapter"));
        return Err(problem.hint("name the output folder of a run").into());
    };
    adapter.note.iter().for_each(|note| say(note));
    let saved = read_adapter(&adapter.folder)?;
    let in_full = adapter.folder.canonicalize().map_err(Failure::input)?;
    let Some(run) = in_full.ancestors().take(3).find(|folder| folder.join("metrics.jsonl").is_file()) else {
        let problem =
            Problem::new(format!("{name}: the adapter belongs to no run, so there is nothing to say on its card"));
        return Err(problem.hint("`hf upload` of the package huggingface_hub uploads a folder as it is").into());
    };
    let (base, is_base_on_hub) = shared_base(&named.base.path);
    if is_base_on_hub && base != named.base.path {
        say(&format!(
            "PEFT and vLLM do not read the GGUF files of {base}: --base OWNER/NAME says what they were made of"
        ));
    }
    let scores = saved.weights.scores();
    let (about_experts, highest_rank) = known_of(&saved, &named.base.path);
    let is_plain = saved.config.has_one_scale();
    if args.merged.is_none() && !scores {
        let has_more = saved.weights.replaces_weights();
        about_servers(&saved.config, &args.run, has_more, about_experts).iter().for_each(|line| say(line));
    }
    if args.merged.is_none() {
        about_raw(&adapter.folder)?.iter().for_each(|warning| say(warning));
    }
    let replaces = saved.config.use_dora || saved.weights.replaces_weights();
    let vllm_options = vllm_options(highest_rank, replaces).filter(|_| !scores && is_plain);
    let published = Published {
        repository: &args.repository,
        base: &base,
        is_base_on_hub,
        is_merged: args.merged.is_some(),
        scores,
        vllm_options: vllm_options.as_deref(),
    };
    if !is_base_on_hub {
        let lost = if args.merged.is_some() { "" } else { ": nobody else can load the adapter" };
        say(&format!(
            "warning: the base model is the folder {base} of this machine{lost}\n  hint: --base OWNER/NAME says where \
             others find it"
        ));
    }
    let (card, curve) = model_card(run, &published).map_err(failure)?;
    let mut files = match &args.merged {
        Some(folder) => merged_files(folder)?,
        None => adapter_files(&adapter.folder, &base)?,
    };
    let text = |name: &str, text| Upload { name: name.to_owned(), content: Content::Text(text) };
    files.extend(curve.map(|curve| text(CURVE, curve)));
    files.push(text(CARD, card));
    Ok(files)
}

/// What servers do with its experts, if it has such, and its highest rank.
fn known_of(saved: &SavedAdapter, base: &str) -> (Option<String>, usize) {
    // Only the model says what its experts are; where it is not on this machine, nothing is said of them.
    let model = ModelConfig::from_model(Path::new(base)).ok();
    let of_model = model.and_then(|config| {
        let of_experts = saved.clone().named_for(&config).config;
        let selection = of_experts.known_in(&config).select(&config).ok()?;
        Some((about_experts(&config, &selection), highest_rank(&config, &selection)))
    });
    of_model.unwrap_or_else(|| (None, saved.config.rank_pattern.values().copied().fold(saved.config.r, usize::max)))
}

/// The base as others find it: its id on the Hub, or else the name of its folder; and whether it is on the Hub.
fn shared_base(path: &str) -> (String, bool) {
    let name = || Path::new(path).file_name().map(|name| name.to_string_lossy().into_owned());
    match Location::parse(path) {
        Ok(Location::Repository { id, .. }) => (id, true),
        _ => (name().unwrap_or_else(|| path.to_owned()), false),
    }
}

/// An adapter's files, its base named as others find it.
fn adapter_files(folder: &Path, base: &str) -> Result<Vec<Upload>, Failure> {
    let weights = "adapter_model.safetensors";
    let path = folder.join(ADAPTER_CONFIG);
    let config = fs::read(&path).map_err(Failure::input)?;
    let mut config: Value = serde_json::from_slice(&config).map_err(Failure::input)?;
    config[BASE_KEY] = base.into();
    let config = serde_json::to_string_pretty(&config).map_err(Failure::running)? + "\n";
    let names = [weights, PROMPT_FORM_FILE, SHIPPED_FILE].into_iter().chain(TOKENIZER_FILES);
    let as_it_is = names.filter(|name| folder.join(name).is_file());
    let file = |name: &str| Upload { name: name.to_owned(), content: Content::File(folder.join(name)) };
    let config = Upload { name: ADAPTER_CONFIG.to_owned(), content: Content::Text(config) };
    Ok(as_it_is.map(file).chain([config]).collect())
}

/// The files of a merged model.
fn merged_files(folder: &Path) -> Result<Vec<Upload>, Failure> {
    if !folder.join("config.json").is_file() {
        let problem = Problem::new(format!("--merged {}: no model, there is no config.json in it", folder.display()));
        return Err(problem.hint("`lora-train merge RUN --out DIR` writes one").into());
    }
    let entries = fs::read_dir(folder).map_err(Failure::input)?;
    let files = entries.flatten().map(|entry| entry.path()).filter(|path| path.is_file());
    let file =
        |path: PathBuf| Some(Upload { name: path.file_name()?.to_str()?.to_owned(), content: Content::File(path) });
    let mut files: Vec<Upload> = files.filter_map(file).collect();
    files.retain(|file| !file.name.starts_with('.') && file.name != CARD);
    files.sort_by(|one, other| one.name.cmp(&other.name));
    Ok(files)
}

/// What `--dry-run` prints.
fn shown(args: &PushArgs, files: &[Upload]) -> String {
    let access = if args.public { "public" } else { "private" };
    let mut text = format!("would write to {}, {access} where it is made:\n", args.repository);
    for file in files {
        let size = file.num_bytes().map_or_else(|error| error.to_string(), |bytes| HumanBytes(bytes).to_string());
        let _ = writeln!(text, "{size:>12}  {}", file.name);
    }
    let card = files.iter().find(|file| file.name == CARD);
    if let Some(Content::Text(card)) = card.map(|card| &card.content) {
        let _ = write!(text, "\n{}", card.trim_end());
    }
    text
}
