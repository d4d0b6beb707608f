//! `lora-train merge`: an adapter, or several as one, folded into its base model.

mod combining;
mod rows;

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use indicatif::ProgressStyle;

use self::combining::{CombineArgs, Source};
use self::rows::RunRows;
use super::named::{ModelArgs, Named, misfit};
use super::say;
use crate::config::FileType;
use crate::data::tokenizer::Tokenizer;
use crate::device::Dtype;
use crate::hub::{self, HubSettings, Progress, Wanted};
use crate::model::weights::{Quantisation, Weights};
use crate::ops::quantised::Coding;
use crate::save::export::{
    self, Codes, Differences, ExportError, GgufOptions, MergeOptions, MergeSummary, Packing, PromptForm, Shipped,
};
use crate::schema::Problem;
use crate::spec::ModelConfig;
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

    /// Type of the weights; without it, that of the base's files, 16 bits for codes, and in a GGUF file f16 for f32. w4a16, fp8,
    /// nvfp4 and mxfp4 make a folder for vLLM and its like; but for the first two, all with fewer than 16 bits make GGUF files
    #[arg(long, value_name = "TYPE", ignore_case = true)]
    pub(crate) dtype: Option<FileType>,

    /// Write the linear layers as codes that bitsandbytes reads
    #[arg(long, value_name = "CODES", value_parser = coding)]
    pub(crate) quantize: Option<Coding>,

    /// Add the adapter to the base as it is stored, where it was trained on a quantised one
    #[arg(long)]
    pub(crate) original: bool,

    /// Quantise a GGUF file without the run's rows, which say what each weight's error costs, and what the loss of the file is
    #[arg(long)]
    pub(crate) without_rows: bool,

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
        say(&adapter_only(args, &named.base.path, &base, &adapter.folder)?);
        return Ok(());
    }
    let config = ModelConfig::from_model(&base)?;
    named.trained_with.warn_if_changed(&Weights::open(&base, &config)?);
    let coded = Coded::of(args, &named, &base, &config)?;
    // What was trained through the rounding of a file is that file.
    let shipped = if is_combined { None } else { Shipped::read(&adapter.folder)? };
    let trained_for = shipped.as_ref().map(|shipped| shipped.file_type);
    let args = &MergeArgs { dtype: args.dtype.or(trained_for.filter(|_| is_gguf)), ..args.clone() };
    let shipped = shipped.filter(|shipped| is_gguf && args.dtype == Some(shipped.file_type));
    let is_coded = args.dtype.is_some_and(|dtype| dtype.float().is_none());
    // A file that exists is refused at once.
    let uses_rows = is_coded && is_gguf && !is_combined && !args.without_rows && !args.out.exists();
    let rows = if uses_rows { rows_of(&named)? } else { None };
    let summary =
        write(args, is_gguf, (&base, &adapter.folder), (coded.decoded(args), shipped.as_ref(), rows.as_ref()))?;
    let mut text = about(args, &adapter, &summary, start.elapsed());
    let other = summary.trained_on.as_ref().filter(|base| args.model.model.is_some() && **base != named.base.path);
    if let Some(trained_on) = other {
        let _ = write!(text, "\nnote: the adapter says that it was trained on {trained_on}");
    }
    if let Some(file_type) = trained_for {
        text += &about_training(file_type, shipped.is_some());
    }
    text += &about_file(args, &summary, rows);
    if is_gguf && is_coded && shipped.is_none() && args.dtype != Some(FileType::Q8) {
        text += "\nq8_0, of 8.5 bits a weight, loses next to nothing";
    }
    text += &about_rounding(args, &summary, &coded);
    text += &if is_gguf { about_use(args, &config) } else { about_class(&args.out) };
    say(&text);
    Ok(())
}

/// The codes of the base that an adapter was trained on.
struct Coded {
    /// As which the files of the base have it.
    stored: Option<String>,
    /// As which 16 bits were quantised while they were read.
    trained_on: Option<Quantisation>,
}

impl Coded {
    /// Refuses the original of what is stored in codes.
    fn of(args: &MergeArgs, named: &Named, base: &Path, config: &ModelConfig) -> Result<Self, Problem> {
        let stored = config.quantisation.as_ref().filter(|stored| stored.is_in_codes());
        let stored = stored.map(|stored| stored.method.to_string());
        if let (Some(method), true) = (&stored, args.original) {
            let problem = Problem::new(format!("{}: --original, but the base is stored as {method}", base.display()));
            let hint = "leave it out, for the base as it was trained on; or name the model that the codes were made of: \
                        --model";
            return Err(problem.hint(hint));
        }
        let trained_on = named.base.storage(Dtype::F32, None).quantisation.filter(|_| stored.is_none());
        Ok(Self { stored, trained_on })
    }

    /// Those onto which the adapter is added.
    fn decoded(&self, args: &MergeArgs) -> Option<Quantisation> {
        self.trained_on.filter(|_| !args.original)
    }
}

/// Writes the model. The scales of a file that was trained for are those of its training; what errors cost in others, the rows say.
fn write(
    args: &MergeArgs,
    is_gguf: bool,
    (base, adapter): (&Path, &Path),
    (decoded, shipped, rows): (Option<Quantisation>, Option<&Shipped>, Option<&RunRows>),
) -> Result<MergeSummary, Failure> {
    let weighs = args.dtype.is_some_and(FileType::weighs_errors) && shipped.is_none();
    let imatrix = rows.filter(|_| weighs).map(RunRows::imatrix).transpose()?;
    let imatrix = imatrix.as_ref().or(shipped.and_then(|shipped| shipped.imatrix.as_ref()));
    let start = shipped.map(|shipped| &shipped.start);
    let options = GgufOptions { dtype: args.dtype, decoded, imatrix, start };
    let mut summary = written(args, is_gguf, base, adapter, options).map_err(|error| failure(error, adapter))?;
    if shipped.is_some() {
        // What was rounded is what was trained.
        summary.differences = Differences::default();
    }
    Ok(summary)
}

/// What was written, for people.
fn about(args: &MergeArgs, adapter: &Source, summary: &MergeSummary, time: Duration) -> String {
    format!(
        "merged {} layer{} of {} into {}: {} in {} file{}, {:.1} s",
        summary.num_modules,
        plural(summary.num_modules),
        adapter.shown,
        args.out.display(),
        bytes(summary.num_bytes as u64),
        summary.num_files,
        plural(summary.num_files),
        time.as_secs_f64(),
    )
}

/// The types of a file's tensors, its loss on `rows` and the ends of its answers, for people.
fn about_file(args: &MergeArgs, summary: &MergeSummary, rows: Option<RunRows>) -> String {
    let mut text = String::new();
    if let Some((dtype, about)) = args.dtype.zip(summary.about_types.as_ref()) {
        let _ = write!(text, "\n{}: {about}", dtype.name());
    }
    // The file is written, whatever becomes of these.
    match rows.map(|rows| rows.losses(&args.out)).transpose() {
        Ok(losses) => losses.flatten().into_iter().for_each(|losses| text += &format!("\n{losses}")),
        Err(failure) => text += &format!("\nnote: its loss was not measured: {}", failure.to_string().trim()),
    }
    summary.about_ends.iter().for_each(|about| text += &format!("\n{about}"));
    text
}

/// How a file is used.
fn about_use(args: &MergeArgs, config: &ModelConfig) -> String {
    let (out, modelfile) = (shown(&args.out), shown(&export::modelfile(&args.out)));
    let images = "\nnote: images go through the mmproj file of the base, which fits as it is: --mmproj MMPROJ.gguf";
    let images = if config.nesting.is_some() { images } else { "" };
    format!("{}{images}\n  llama-cli -m {out}\n  ollama create NAME -f {modelfile}", about_windows(config))
}

/// That transformers reads the tokenizer of a folder otherwise.
fn about_class(folder: &Path) -> String {
    let warning = Tokenizer::open(folder).ok().and_then(|tokenizer| tokenizer.class_warning());
    warning.map(|warning| format!("\nwarning: {warning}")).unwrap_or_default()
}

/// The rows of the run that the adapter comes from; where they cannot be had, it is said why.
fn rows_of(named: &Named) -> Result<Option<RunRows>, Failure> {
    match RunRows::open(named) {
        Err(Failure::Interrupted) => Err(Failure::Interrupted),
        Err(failure) => {
            say(&format!("note: the run's rows are of no help to the file: {}", failure.to_string().trim()));
            Ok(None)
        }
        rows => rows,
    }
}

/// Writes the adapter alone, and says how it is used.
fn adapter_only(args: &MergeArgs, base_name: &str, base: &Path, adapter: &Path) -> Result<String, Failure> {
    let written = export::adapter_gguf(base, adapter, &args.out);
    let num_bytes = written.map_err(|error| failure(error, adapter))?;
    let (size, out) = (bytes(num_bytes as u64), shown(&args.out));
    let mut text = format!("{size}; for {base_name} as GGUF:\n  llama-cli -m BASE.gguf --lora {out}");
    let form = PromptForm::read(adapter).map_err(|error| failure(error, adapter))?;
    if let Some(PromptForm::ChatTemplate { chat_template: Some(template), .. }) = form {
        // The base's file has another one.
        let path = args.out.with_extension("jinja");
        files::write(&path, template).map_err(ExportError::io("write", &path))?;
        text += &format!(" --jinja --chat-template-file {}", shown(&path));
    }
    text += &about_windows(&ModelConfig::from_model(base)?);
    let raw = export::about_raw(adapter).map_err(|error| failure(error, adapter))?;
    raw.iter().for_each(|warning| text += &format!("\n{warning}"));
    Ok(text)
}

/// What was rounded between training and the files, for people.
fn about_rounding(args: &MergeArgs, summary: &MergeSummary, Coded { stored, trained_on }: &Coded) -> String {
    let (mut text, differences) = (String::new(), summary.differences);
    let is_coded = args.dtype.is_some_and(|dtype| dtype.float().is_none());
    if let Some(quantisation) = *trained_on {
        text.push_str(&onto(quantisation, args.original, differences));
        if is_coded && !args.original {
            text.push_str(
                "\nwarning: it was rounded twice, for training and for the file\n  hint: --original rounds once",
            );
        }
    }
    if let Some(method) = stored {
        let _ = write!(text, "\nthe base is stored as {method}, and the adapter was added to that, decoded");
        if is_coded {
            text.push_str(
                "\nwarning: it was rounded twice\n  hint: --model with 16 bits, of which those codes were made",
            );
        }
    }
    if !args.original {
        let largest = differences.written;
        let _ = write!(text, "\nthe weights that are written differ from those in training by up to {largest:.1e}");
    }
    if differences.share_lost() > SHARE_LOST {
        let hint = match (args.quantize, args.dtype) {
            (Some(_), _) => "leave out --quantize",
            (None, Some(dtype)) if dtype.float().is_none() => "--dtype f16",
            (None, Some(_)) => "--dtype f32",
            (None, None) => "--dtype f32; or --dtype f16, which at bf16's size has finer steps",
        };
        let percent = 100.0 * differences.share_lost();
        let _ = write!(text, "\nwarning: rounding took {percent:.0} % of what the adapter changes\n  hint: {hint}");
    }
    text
}

/// That the adapter was trained through the rounding of a file, and whether this is it.
fn about_training(file_type: FileType, is_it: bool) -> String {
    let name = file_type.name();
    if is_it {
        return format!("\nthese are the weights that were trained and evaluated as {name}, bit for bit");
    }
    format!("\nwarning: the adapter was trained for a {name} file\n  hint: --out NAME.gguf without --dtype is that")
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
        (false, Some(dtype), ..) if dtype.float().is_none() && !dtype.is_for_folders() => {
            only(&format!("--dtype {}", dtype.name()), "GGUF file", "name one: --out mine.gguf")
        }
        (false, _, true, _) if !is_combined => only("--adapter-only", "GGUF file", "name one: --out mine.gguf"),
        (true, Some(dtype), ..) if !dtype.is_for_files() => only(
            &format!("--dtype {}", dtype.name()),
            "folder",
            "name one: --out DIR; GGUF files can be q8_0 or q4_k_m",
        ),
        (false, Some(dtype), _, Some(_)) if dtype.float().is_none() => {
            Err(Problem::new(format!("--dtype {} and --quantize are two forms", dtype.name())).hint("leave one out"))
        }
        (true, _, _, Some(_)) => {
            only("--quantize", "folder", "--dtype q4_k_m, or another of its types, quantises a GGUF file")
        }
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
    options: GgufOptions<'_>,
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
        export::merge_gguf(base, adapter, &args.out, options, &on_bytes)
    } else {
        let dtype = args.dtype.and_then(FileType::float);
        let quantise = packing(args.dtype, base)?.map(Codes::Packed).or(args.quantize.map(Codes::Bitsandbytes));
        export::merge(base, adapter, &args.out, MergeOptions { decoded: options.decoded, dtype, quantise }, &on_bytes)
    };
    bar.finish_and_clear();
    summary
}

/// The form of compressed-tensors that a type means for the model in `base`.
fn packing(dtype: Option<FileType>, base: &Path) -> Result<Option<Packing>, ExportError> {
    Ok(match dtype {
        Some(FileType::W4a16) => {
            let config = ModelConfig::from_model(base)?;
            let linears = config.sites().filter(|(_, site)| site.role.is_plain());
            let widths: Vec<usize> = linears.map(|(_, site)| site.shape[1]).collect();
            Some(Packing::w4a16(&widths)?)
        }
        Some(FileType::Fp8) => Some(Packing::Fp8),
        Some(FileType::Nvfp4) => Some(Packing::Nvfp4),
        Some(FileType::Mxfp4) => Some(Packing::Mxfp4),
        _ => None,
    })
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
