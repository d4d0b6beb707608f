//! `lora-train merge`: an adapter, or several as one, folded into its base model.

mod combining;

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::time::Instant;

use indicatif::ProgressStyle;

use self::combining::{CombineArgs, Source};
use super::named::{ModelArgs, Named, misfit};
use super::say;
use crate::data::tokenizer::Tokenizer;
use crate::device::Dtype;
use crate::hub::{self, HubSettings, Progress, Wanted};
use crate::model::weights::{Quantisation, Weights};
use crate::ops::quantised::Coding;
use crate::save::export::{self, Differences, ExportError, GgufType, MergeOptions, MergeSummary, PromptForm};
use crate::schema::Problem;
use crate::spec::{ModelConfig, StoredQuantisation};
use crate::util::failure::Failure;
use crate::util::text::{bytes, quoted};
use crate::util::{files, terminal};

/// Arguments of `lora-train merge`.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct MergeArgs {
    /// A run, or an adapter's folder that names its base model; several are combined
    #[arg(value_name = "RUN", required_unless_present = "adapter")]
    pub(crate) names: Vec<String>,

    #[command(flatten)]
    pub(crate) model: ModelArgs,

    #[command(flatten)]
    pub(crate) combine: CombineArgs,

    /// Folder to write, or with a name like mine.gguf a file for llama.cpp and Ollama; nothing is overwritten
    #[arg(long, value_name = "DIR|FILE.gguf")]
    pub(crate) out: PathBuf,

    /// Type of the weights; without it, that of the base's files, 16 bits for codes, and in a GGUF file f16 for f32
    #[arg(long, value_name = "TYPE")]
    pub(crate) dtype: Option<GgufType>,

    /// Write the linear layers as codes that bitsandbytes reads
    #[arg(long, value_name = "CODES", value_parser = coding)]
    pub(crate) quantize: Option<Coding>,

    /// Add the adapter to the base as it is stored, where it was trained on a quantised one
    #[arg(long)]
    pub(crate) original: bool,

    /// Write the adapter alone: as GGUF, for llama.cpp to load beside its base, or several combined in a folder for PEFT
    #[arg(long, conflicts_with_all = ["dtype", "quantize", "original"])]
    pub(crate) adapter_only: bool,
}

/// Writes a Hugging Face folder whose weights contain the adapter, or a GGUF file.
pub(crate) fn run(args: &MergeArgs) -> Result<(), Failure> {
    let start = Instant::now();
    let named = Named::find(&args.names, &args.model)?;
    let is_combined = args.combine.is_asked(named.adapters.len());
    let is_gguf = is_gguf(args, is_combined)?;
    let Some(adapter) = named.adapters.first() else {
        let problem = Problem::new(format!("{}: a model without an adapter", named.base.path));
        return Err(problem.hint("name a run, or an adapter with --adapter DIR").into());
    };
    let (settings, progress) = (HubSettings::from_env(), Progress::detect(false));
    let wanted = if args.adapter_only { Wanted::WithoutWeights } else { Wanted::Model };
    let base = hub::resolve(&named.base.path, named.base.revision.as_deref(), wanted, &settings, progress)?;
    let out = Some(&*args.out).filter(|_| args.adapter_only && !is_gguf);
    let adapter =
        if is_combined { Source::combined(&args.combine, &named, &base, out)? } else { Source::one(&adapter.folder) };
    if out.is_some() {
        say(&format!("wrote {} to {}: an adapter of {}", adapter.shown, args.out.display(), named.base.path));
        return Ok(());
    }
    if args.adapter_only {
        return write_adapter(args, &named.base.path, &base, &adapter.folder);
    }
    let config = ModelConfig::from_model(&base)?;
    named.trained_with.warn_if_changed(&Weights::open(&base, &config)?);
    let about_windows = if is_gguf { about_windows(&config) } else { String::new() };
    let stored = config.quantisation.filter(StoredQuantisation::is_in_codes);
    let stored = stored.map(|stored| stored.method);
    if let (Some(method), true) = (stored, args.original) {
        let problem = Problem::new(format!("{}: --original, but the base is stored as {method}", base.display()));
        let hint =
            "leave it out, for the base as it was trained on; or name the model that the codes were made of: --model";
        return Err(problem.hint(hint).into());
    }
    let trained_on = named.base.storage(Dtype::F32, None).quantisation.filter(|_| stored.is_none());
    let decoded = trained_on.filter(|_| !args.original);
    let summary =
        written(args, is_gguf, &base, &adapter.folder, decoded).map_err(|error| failure(error, &adapter.folder))?;
    let mut text = format!(
        "merged {} layer{} of {} into {}: {} in {} file{}, {:.1} s",
        summary.num_modules,
        plural(summary.num_modules),
        adapter.shown,
        args.out.display(),
        bytes(summary.num_bytes as u64),
        summary.num_files,
        plural(summary.num_files),
        start.elapsed().as_secs_f64(),
    );
    if let Some(trained_on) = summary.trained_on.filter(|_| args.model.model.is_some())
        && trained_on != named.base.path
    {
        let _ = write!(text, "\nnote: the adapter says that it was trained on {trained_on}");
    }
    if let Some(about) = &summary.about_ends {
        let _ = write!(text, "\n{about}");
    }
    if let Some(quantisation) = trained_on {
        text.push_str(&onto(quantisation, args.original, summary.differences));
    }
    if let Some(method) = stored {
        let _ = write!(text, "\nthe base is stored as {method}, and the adapter was added to that, decoded");
    }
    let differences = summary.differences;
    if !args.original {
        let _ = write!(
            text,
            "\nthe weights that are written differ from those in training by up to {:.1e}",
            differences.written
        );
    }
    if differences.share_lost() > SHARE_LOST {
        let hint = match (args.quantize, args.dtype) {
            (Some(_), _) => "leave out --quantize",
            (None, Some(GgufType::Q8)) => "--dtype f16",
            (None, Some(_)) => "--dtype f32",
            (None, None) => "--dtype f32; or --dtype f16, which at bf16's size has finer steps",
        };
        let percent = 100.0 * differences.share_lost();
        let _ = write!(text, "\nwarning: rounding took {percent:.0} % of what the adapter changes\n  hint: {hint}");
    }
    if !is_gguf && let Some(warning) = Tokenizer::open(&args.out).ok().and_then(|tokenizer| tokenizer.class_warning()) {
        let _ = write!(text, "\nwarning: {warning}");
    }
    if is_gguf {
        text += &about_windows;
        let (out, modelfile) = (shown(&args.out), shown(&export::modelfile(&args.out)));
        let _ = write!(text, "\n  llama-cli -m {out}\n  ollama create NAME -f {modelfile}");
    }
    say(&text);
    Ok(())
}

/// Writes the adapter alone as a GGUF file; `model` is the base as the user named it.
fn write_adapter(args: &MergeArgs, model: &str, base: &Path, adapter: &Path) -> Result<(), Failure> {
    let num_bytes = export::adapter_gguf(base, adapter, &args.out).map_err(|error| failure(error, adapter))?;
    let (size, out) = (bytes(num_bytes as u64), shown(&args.out));
    let mut text = format!("{size}; for {model} as GGUF:\n  llama-cli -m BASE.gguf --lora {out}");
    let form = PromptForm::read(adapter).map_err(|error| failure(error, adapter))?;
    if let Some(PromptForm::ChatTemplate { chat_template: Some(template), .. }) = form {
        // The base's file has another one.
        let path = args.out.with_extension("jinja");
        files::write(&path, template).map_err(ExportError::io("write", &path))?;
        text += &format!(" --jinja --chat-template-file {}", shown(&path));
    }
    text += &about_windows(&ModelConfig::from_model(base)?);
    say(&text);
    Ok(())
}

/// Share of an adapter that rounding may take before a warning.
const SHARE_LOST: f64 = 0.1;

/// Onto which base an adapter was merged that was trained on a quantised one, and what that does to the weights.
fn onto(quantisation: Quantisation, is_original: bool, differences: Differences) -> String {
    let text = format!("\nthe adapter was trained on a base in {quantisation}, and was added to ");
    if is_original {
        return text + "the base as it is stored";
    }
    text + &format!("that, decoded; --original would be up to {:.1e} from it", differences.decoded)
}

/// That llama.cpp does not compute the model's windows.
fn about_windows(config: &ModelConfig) -> String {
    export::lost_windows(config).map(|warning| format!("\nwarning: {warning}")).unwrap_or_default()
}

/// Whether `--out` names a GGUF file; the options for one are refused where it does not.
fn is_gguf(args: &MergeArgs, is_combined: bool) -> Result<bool, Problem> {
    let is_gguf = args.out.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("gguf"));
    let only = |option: &str, kind: &str, hint: &str| {
        let out = args.out.display();
        Err(Problem::new(format!("{option} is for a {kind}, and {out} is none")).hint(hint))
    };
    match (is_gguf, args.dtype, args.adapter_only, args.quantize) {
        (false, Some(GgufType::Q8), ..) => only("--dtype q8_0", "GGUF file", "name one: --out mine.gguf"),
        (false, _, true, _) if !is_combined => only("--adapter-only", "GGUF file", "name one: --out mine.gguf"),
        (true, _, _, Some(_)) => only("--quantize", "folder", "--dtype q8_0 quantises a GGUF file"),
        _ => Ok(is_gguf),
    }
}

fn coding(name: &str) -> Result<Coding, String> {
    [Coding::Nf4, Coding::Fp4, Coding::Int8]
        .into_iter()
        .find(|coding| coding.to_string() == name)
        .ok_or_else(|| "expected nf4, fp4 or int8".to_owned())
}

/// Merges, and shows how far it is.
fn written(
    args: &MergeArgs,
    is_gguf: bool,
    base: &Path,
    adapter: &Path,
    decoded: Option<Quantisation>,
) -> Result<MergeSummary, ExportError> {
    let bar = terminal::bar(0);
    if let Ok(style) = ProgressStyle::with_template("merging [{bar:24}] {binary_bytes}/{binary_total_bytes} {eta}") {
        bar.set_style(style.progress_chars("=> "));
    }
    let on_bytes = |written: usize, all: usize| {
        bar.set_length(all as u64);
        bar.inc(written as u64);
    };
    let summary = if is_gguf {
        export::merge_gguf(base, adapter, &args.out, args.dtype, decoded, &on_bytes)
    } else {
        let dtype = args.dtype.and_then(GgufType::float);
        export::merge(base, adapter, &args.out, MergeOptions { decoded, dtype, quantise: args.quantize }, &on_bytes)
    };
    bar.finish_and_clear();
    summary
}

fn shown(path: &Path) -> String {
    quoted(&path.display().to_string())
}

/// Names the base that an adapter was trained on, if known, where it does not fit.
fn failure(error: ExportError, adapter: &Path) -> Failure {
    match &error {
        ExportError::AdapterTensors { .. } => misfit(
            &error,
            export::read_adapter(adapter).ok().and_then(|saved| saved.base_model_name_or_path).as_deref(),
        ),
        _ => error.into(),
    }
}

fn plural(count: usize) -> &'static str {
    if count == 1 { "" } else { "s" }
}
