//! `lora-train generate`: text from a model, with or without an adapter.
//!
//! The text goes to stdout as it is generated, everything else to stderr.

use std::io::{self, ErrorKind, Read, Write};
use std::ops::ControlFlow;
use std::path::PathBuf;

use rand::Rng;

use super::{number, say};
use crate::data::template::ChatTemplate;
use crate::data::tokenizer::Tokenizer;
use crate::device::{self, Dtype, OpenDevice};
use crate::export::{PromptForm, SavedAdapter, find_adapter, read_adapter};
use crate::failure::Failure;
use crate::generate::{Ending, GenerateOptions, Generated, Generator, encode_prompt};
use crate::lora::AdapterSet;
use crate::model::ModelOptions;
use crate::model::weights::{StoredTensor, Weights};
use crate::run::inputs::{ModelSource, WeightsFrom};
use crate::schema::Problem;
use crate::train::stop::Stop;

/// Arguments of `lora-train generate`.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct GenerateArgs {
    /// The base model: a Hugging Face folder or the id of a Hub repository
    #[arg(long, value_name = "MODEL")]
    pub(crate) model: String,

    /// Branch, tag or commit of a Hub repository
    #[arg(long, value_name = "REVISION")]
    pub(crate) revision: Option<String>,

    /// An adapter: the output folder of a run, a checkpoint, or a folder that PEFT wrote
    #[arg(long, value_name = "DIR")]
    pub(crate) adapter: Option<PathBuf>,

    /// The user's message, or the text to continue where the model is asked without a chat template; - reads it from stdin
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    pub(crate) prompt: String,

    /// A system message before the prompt; needs a chat template
    #[arg(long, value_name = "TEXT", conflicts_with = "raw")]
    pub(crate) system: Option<String>,

    /// Continue the prompt as it is, without a chat template; without this or --chat, a model with an adapter is asked as it
    /// was trained, another one through its chat template
    #[arg(long)]
    pub(crate) raw: bool,

    /// Ask through the chat template, also where the adapter was trained without one
    #[arg(long, conflicts_with = "raw")]
    pub(crate) chat: bool,

    /// Tokens after which to stop, if the model does not end by itself
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = at_least_one)]
    pub(crate) max_new_tokens: usize,

    /// 0 always takes the most likely token, so that the same prompt gives the same text; 0.7 is a usual choice for
    /// varied text
    #[arg(long, value_name = "T", default_value_t = 0.0, value_parser = temperature, allow_negative_numbers = true)]
    pub(crate) temperature: f64,

    /// Draw from the most likely tokens that together reach this probability; needs a temperature
    #[arg(long, value_name = "P", value_parser = probability, requires = "temperature", allow_negative_numbers = true)]
    pub(crate) top_p: Option<f64>,

    /// Draw from this many of the most likely tokens; needs a temperature
    #[arg(long, value_name = "K", value_parser = at_least_one, requires = "temperature")]
    pub(crate) top_k: Option<usize>,

    /// Repeats a draw; without it every call draws anew, and says its seed; needs a temperature
    #[arg(long, value_name = "SEED", requires = "temperature")]
    pub(crate) seed: Option<u64>,

    /// Where to compute: auto, cpu, cuda, cuda:N
    #[arg(long, value_name = "DEVICE", default_value = "auto")]
    pub(crate) device: String,

    /// Type in which the weights are held: f32, bf16 or f16; without it, the type they have in the files. A CPU computes
    /// in f32 always
    #[arg(long, value_name = "DTYPE", value_parser = dtype)]
    pub(crate) dtype: Option<Dtype>,

    /// Show nothing but the text, warnings and errors
    #[arg(long, short)]
    pub(crate) quiet: bool,
}

fn at_least_one(text: &str) -> Result<usize, String> {
    text.parse().ok().filter(|&number| number >= 1).ok_or_else(|| "expected a whole number from 1 on".to_owned())
}

fn temperature(text: &str) -> Result<f64, String> {
    number(text, |number| number >= 0.0, "a number from 0 on")
}

fn probability(text: &str) -> Result<f64, String> {
    number(text, |number| number > 0.0 && number <= 1.0, "a number above 0, at most 1")
}

fn dtype(text: &str) -> Result<Dtype, String> {
    text.parse().map_err(|()| "expected f32, bf16 or f16".to_owned())
}

/// Writes the model's answer to stdout as it is generated.
pub(crate) fn run(args: &GenerateArgs) -> Result<(), Failure> {
    let stop = Stop::on_signals().map_err(Failure::running)?;
    let options = options(args)?;
    let prompt = prompt(&args.prompt)?;
    let adapter = args.adapter.as_deref().map(find_adapter);
    let adapter = adapter.map(|folder| read_adapter(&folder).map(|saved| (folder, saved)));
    let adapter = adapter.transpose()?;
    let form = adapter.as_ref().map_or(Ok(None), |(folder, _)| PromptForm::read(folder)).map_err(Failure::input)?;

    let source = ModelSource::open(&model_options(args), 0, WeightsFrom::Hub, args.quiet)?;
    let tokenizer = Tokenizer::open(&source.folder).map_err(Failure::input)?;
    let (template, reason) = template(args, form, &tokenizer)?;
    let prompt_ids =
        encode_prompt(&tokenizer, template.as_ref(), args.system.as_deref(), &prompt).map_err(Failure::input)?;

    let device = device::open(&args.device).map_err(Failure::input)?;
    let (storage, precision) = dtypes(args.dtype, &source, &device);
    let adapters = match adapter {
        None => AdapterSet::none(source.config.num_hidden_layers),
        Some((folder, saved)) => {
            note(args, &about(&saved, &folder.display().to_string()));
            let base = saved.base_model_name_or_path.clone();
            saved.into_set(&folder, &source.config, &device.device).map_err(|error| misfit(&error, base.as_deref()))?
        }
    };
    note(args, &reason);
    let model = source.load(Some(storage), precision.into(), &device)?;
    note(args, &format!("{}: held in {storage}, computed in {precision} on {}", args.model, device.label));
    if args.temperature > 0.0 && args.seed.is_none() {
        note(args, &format!("--seed {} repeats this draw", options.seed));
    }
    if stop.requested() {
        return Err(Failure::Interrupted);
    }

    let generator = Generator { model: &model, adapters: &adapters, tokenizer: &tokenizer };
    let mut output = Output::default();
    let on_text = |text: &str| {
        if stop.requested() || !output.write(text) { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    };
    let generated = generator.generate(&prompt_ids, &options, on_text).map_err(Failure::input)?;
    output.finish().map_err(Failure::running)?;
    report(args, &generated, prompt_ids.len(), source.config.max_position_embeddings);
    match generated.ending {
        Ending::Stopped if stop.requested() => Err(Failure::Interrupted),
        Ending::NonFiniteLogits => Err(Failure::running(
            "the model's logits are not finite numbers\n  hint: its weights or the adapter's are damaged, or their \
             numbers do not fit the type they are computed in; try --dtype f32",
        )),
        _ => Ok(()),
    }
}

/// The chat template to use, if any, and a line that names it with the reason.
fn template(
    args: &GenerateArgs,
    form: Option<PromptForm>,
    tokenizer: &Tokenizer,
) -> Result<(Option<ChatTemplate>, String), Failure> {
    let raw = |reason: &str| Ok((None, format!("the prompt is continued as it is: {reason}")));
    if args.raw {
        return raw("--raw");
    }
    if form == Some(PromptForm::Raw) && !args.chat {
        return raw("the adapter was trained so; --chat asks through the chat template");
    }
    let is_known = matches!(form, Some(PromptForm::ChatTemplate { .. }));
    let template = match form {
        Some(PromptForm::ChatTemplate { chat_template: Some(source) }) => {
            ChatTemplate::new(&source, "the adapter", tokenizer).map(Some)
        }
        _ => ChatTemplate::open("auto", tokenizer),
    };
    let Some(template) = template.map_err(Failure::input)? else {
        return match (args.chat, is_known) {
            (true, _) => Err(Problem::new("`--chat`: the model has no chat template").into()),
            (false, true) => raw("the model has no chat template, through which the adapter was trained"),
            (false, false) => raw("the model has no chat template"),
        };
    };
    let reason = match (args.chat, is_known) {
        (true, _) => "--chat",
        (false, true) => "the adapter was trained so; --raw continues it as it is",
        (false, false) => "--raw continues it as it is",
    };
    let line = format!("the prompt goes through the chat template of {}: {reason}", template.origin());
    Ok((Some(template), line))
}

fn options(args: &GenerateArgs) -> Result<GenerateOptions, Failure> {
    if args.temperature <= 0.0 {
        let drawing =
            [("--top-p", args.top_p.is_some()), ("--top-k", args.top_k.is_some()), ("--seed", args.seed.is_some())];
        if let Some((name, _)) = drawing.iter().find(|(_, given)| *given) {
            let problem = Problem::new(format!("`{name}` does nothing at temperature 0, where nothing is drawn"));
            return Err(problem.hint("give a temperature, for example --temperature 0.7").into());
        }
    }
    Ok(GenerateOptions {
        max_new_tokens: args.max_new_tokens,
        temperature: args.temperature,
        top_p: args.top_p.unwrap_or(1.0),
        top_k: args.top_k,
        // Short enough to type again.
        seed: args.seed.unwrap_or_else(|| rand::rng().random_range(0..1_000_000)),
    })
}

/// The prompt, from stdin if it is `-`, without the line end that `echo` adds.
fn prompt(text: &str) -> Result<String, Failure> {
    if text != "-" {
        return Ok(text.to_owned());
    }
    let mut bytes = Vec::new();
    io::stdin().lock().read_to_end(&mut bytes).map_err(Failure::running)?;
    let text = String::from_utf8(bytes)
        .map_err(|error| Failure::input(format!("--prompt -: stdin is not UTF-8 text: {}", error.utf8_error())))?;
    Ok(text.strip_suffix('\n').map_or(text.as_str(), |text| text.strip_suffix('\r').unwrap_or(text)).to_owned())
}

fn model_options(args: &GenerateArgs) -> ModelOptions {
    let (path, revision) = (args.model.clone(), args.revision.clone());
    ModelOptions { path, revision, dtype: args.dtype, ..ModelOptions::default() }
}

/// The types of weights and of computation: the files' own type, so that nothing is rounded, unless another is
/// requested or the device lacks it.
fn dtypes(asked_for: Option<Dtype>, source: &ModelSource, device: &OpenDevice) -> (Dtype, Dtype) {
    let stored = match &source.weights {
        Weights::Files(files) => files.tensors().values().find_map(StoredTensor::float_dtype),
        Weights::Random(_) => None,
    };
    let stored = stored.filter(|&dtype| device.supports(dtype));
    let storage = asked_for.or(stored).unwrap_or(Dtype::F32);
    (storage, if device.is_gpu() { storage } else { Dtype::F32 })
}

fn about(saved: &SavedAdapter, folder: &str) -> String {
    let base = saved.base_model_name_or_path.as_deref();
    let base = base.map(|base| format!(", trained on {base}")).unwrap_or_default();
    format!("{folder}: adapter of rank {} on {} layers{base}", saved.config.r, saved.weights.len())
}

fn misfit(error: &crate::export::ExportError, base: Option<&str>) -> Failure {
    let problem = Problem::new(error.to_string());
    match base {
        Some(base) => problem.hint(format!("the adapter was trained on {base}; give that as --model")).into(),
        None => problem.into(),
    }
}

/// The generated text on stdout.
#[derive(Debug, Default)]
struct Output {
    ends_with_newline: bool,
    error: Option<io::Error>,
}

impl Output {
    /// Writes and flushes; `false` where that failed.
    fn write(&mut self, text: &str) -> bool {
        if text.is_empty() {
            return true;
        }
        let mut stdout = io::stdout().lock();
        let written = stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush());
        self.ends_with_newline = text.ends_with('\n');
        self.error = written.err();
        self.error.is_none()
    }

    /// Ends the last line. A closed reader (`| head`) is no error.
    fn finish(mut self) -> io::Result<()> {
        if self.error.is_none() && !self.ends_with_newline {
            self.write("\n");
        }
        match self.error {
            Some(error) if error.kind() != ErrorKind::BrokenPipe => Err(error),
            _ => Ok(()),
        }
    }
}

fn report(args: &GenerateArgs, generated: &Generated, prompt_tokens: usize, max_position_embeddings: usize) {
    let mut line = format!("prompt: {prompt_tokens} tokens in {:.2} s; ", generated.prompt_seconds);
    line.push_str(&match (generated.token_ids.len(), generated.tokens_per_second()) {
        (count, Some(speed)) => format!("text: {count} tokens, {speed:.1} tokens/s"),
        (count, None) => format!("text: {count} tokens"),
    });
    if generated.ending == Ending::MaxNewTokens {
        line.push_str(", ended by --max-new-tokens");
    }
    note(args, &line);
    if generated.ending == Ending::MaxPositions {
        say(&format!("warning: the text ended at the {max_position_embeddings} positions that the model was made for"));
    }
}

fn note(args: &GenerateArgs, line: &str) {
    if !args.quiet {
        say(line);
    }
}
