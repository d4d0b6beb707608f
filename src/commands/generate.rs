//! `lora-train generate`: text from a model, with or without an adapter.
//!
//! The text goes to stdout as it is generated, everything else to stderr.

mod prompts;

use std::io::{self, ErrorKind, Read, Write};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rand::Rng;

use super::named::{
    Asked, LoadArgs, ModelArgs, Named, OpenedModel, fetched_images_for, message, stops, template, warn_of,
};
use super::{number, print, say};
use crate::data::cache::CacheSettings;
use crate::data::files::OpenOptions;
use crate::generate::{Ending, GenerateOptions, Generated, Generator, encode_messages, encode_prompt};
use crate::hub::Progress;
use crate::images::Images;
use crate::recipe::of_run::RESOLVED_FILE;
use crate::run::images::with_images;
use crate::save::export::{PromptForm, find_adapter, is_adapter};
use crate::schema::Problem;
use crate::train::stop::Stop;
use crate::util::failure::Failure;
use crate::util::gguf::is_gguf;
use crate::util::text::quoted;

/// Arguments of `lora-train generate`.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct GenerateArgs {
    /// A run, an adapter's folder or a model
    #[arg(value_name = "RUN|MODEL", required_unless_present_any = ["model", "adapter"])]
    pub(crate) name: Option<String>,

    /// The user's message, or the text to continue where the model is asked without a chat template; - reads it from stdin
    #[arg(
        value_name = "PROMPT",
        conflicts_with = "prompt",
        required_unless_present_any = ["prompt", "prompts", "model", "adapter"]
    )]
    pub(crate) text: Option<String>,

    /// The same, for any prompt
    #[arg(long, value_name = "TEXT", allow_hyphen_values = true)]
    pub(crate) prompt: Option<String>,

    /// A file of prompts, a line each in a .txt file, else JSON lines with `prompt` or `messages`, and `images` as in
    /// training; the texts go to stdout as JSON lines, in the file's order
    #[arg(long, value_name = "FILE", conflicts_with_all = ["text", "prompt"])]
    pub(crate) prompts: Option<PathBuf>,

    /// An image that the prompt is about, a file or an https address; several come in this order, before the text
    #[arg(long = "image", value_name = "FILE", conflicts_with_all = ["raw", "prompts"])]
    pub(crate) images: Vec<String>,

    #[command(flatten)]
    pub(crate) model: ModelArgs,

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

    #[command(flatten)]
    pub(crate) sampling: SamplingArgs,

    #[command(flatten)]
    pub(crate) load: LoadArgs,
}

impl GenerateArgs {
    /// The run or model, and the prompt. Where options name the model, the only word is the prompt.
    fn named(&self) -> Result<(&[String], &str), Failure> {
        let names = self.name.as_slice();
        if let (Some(name), Some(text)) = (&self.name, &self.text)
            && is_swapped(name, text)
        {
            let hint = format!("lora-train generate {} {}", quoted(text), quoted(name));
            return Err(Problem::new("the run or model comes first, then the prompt").hint(hint).into());
        }
        match (self.prompt.as_deref().or(self.text.as_deref()), names) {
            (Some(text), _) => Ok((names, text)),
            (None, _) if self.prompts.is_some() => Ok((names, "")),
            (None, [text]) if !is_name(text) => Ok((&[], text)),
            _ => Err(Problem::new("there is no prompt").hint("--prompt \"A question\"").into()),
        }
    }
}

/// Whether this is rather the name of a run or a model than a prompt.
fn is_name(text: &str) -> bool {
    Path::new(text).exists() || text.contains('/') && !text.contains(char::is_whitespace)
}

/// Whether what stands for the name is the prompt, and what stands for the prompt the name.
fn is_swapped(name: &str, text: &str) -> bool {
    let path = Path::new(text);
    let has = |file: &str| path.join(file).is_file();
    let is_found = is_gguf(path) || is_adapter(&find_adapter(path)) || has("config.json") || has(RESOLVED_FILE);
    !is_name(name) && (is_found || name.contains(char::is_whitespace) && is_name(text))
}

/// Arguments that say how tokens are chosen.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct SamplingArgs {
    /// Tokens after which to stop, if the model does not end by itself: without it 256, in a chat 1024
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    pub(crate) max_new_tokens: Option<usize>,

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

    /// Draw from tokens at least this share as likely as the most likely one; needs a temperature
    #[arg(long, value_name = "P", value_parser = share, requires = "temperature", allow_negative_numbers = true)]
    pub(crate) min_p: Option<f64>,

    /// Repeats a draw; without it every call draws anew, and says its seed; needs a temperature
    #[arg(long, value_name = "SEED", requires = "temperature")]
    pub(crate) seed: Option<u64>,
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

fn share(text: &str) -> Result<f64, String> {
    number(text, |number| (0.0..=1.0).contains(&number), "a number from 0 to 1")
}

/// Writes the model's answer to stdout as it is generated.
pub(crate) fn run(args: &GenerateArgs) -> Result<(), Failure> {
    let stop = Stop::on_signals().map_err(Failure::running)?;
    let options = args.sampling.options(256)?;
    let (name, text) = args.named()?;
    let prompt = prompt(text)?;
    let named = Named::find(name, &args.model)?;
    named.one_adapter()?;
    let files = named.read(args.load.quiet)?.that_write()?;
    let (template, reason) = template(Asked::by(args.raw, args.chat), files.form(), &files.tokenizer)?;
    let stops = stops(template.as_ref(), files.form(), &files.tokenizer);
    warn_of(template.as_ref());
    let trained_with = files.form().and_then(PromptForm::system).filter(|_| template.is_some());
    let system = args.system.as_deref().or(trained_with);
    let images = fetched_images_for(&files.source, template.as_ref());
    if let Some(path) = &args.prompts {
        let asked = (template.as_ref(), images.as_deref().map_err(Clone::clone));
        let rows = prompts::read(path, system, &asked, &files.tokenizer)?;
        let opened = with_features(files.load(&args.load)?, images.as_ref().ok(), &args.load)?;
        args.load.note(&reason);
        return prompts::write(rows, &opened, options, &stops, &args.load);
    }
    let read = |path: &String| images.map_err(|reason| Failure::input(format!("--image {path}: {reason}")));
    let seen = args.images.first().map(read).transpose()?;
    let prompt_ids = match (&seen, &template) {
        (Some(images), Some(template)) => {
            let message = message(&prompt, &args.images);
            encode_messages(&files.tokenizer, (template, Some(images)), &[message], system)
        }
        _ => encode_prompt(&files.tokenizer, template.as_ref(), system, &prompt),
    };
    let prompt_ids = prompt_ids.map_err(Failure::input)?;
    let opened = with_features(files.load(&args.load)?, seen.as_ref(), &args.load)?;
    args.load.note(&reason);
    if args.sampling.temperature > 0.0 && args.sampling.seed.is_none() {
        args.load.note(&format!("--seed {} repeats this draw", options.seed));
    }
    if stop.requested() {
        return Err(Failure::Interrupted);
    }

    let (model, adapters, tokenizer) = (&opened.model, &opened.adapters[0].set, &opened.tokenizer);
    let generator = Generator { model, adapters, tokenizer, stops: &stops };
    let mut output = Output::default();
    let on_text = |text: &str| {
        if stop.requested() || !output.write(text) { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    };
    let generated = generator.generate(&prompt_ids, &options, on_text).map_err(Failure::input)?;
    output.finish().map_err(Failure::running)?;
    report(&args.load, &generated, prompt_ids.len(), opened.source.config.max_position_embeddings);
    match generated.ending {
        Ending::Stopped if stop.requested() => Err(Failure::Interrupted),
        Ending::NonFiniteLogits => Err(Failure::running(NON_FINITE)),
        _ => Ok(()),
    }
}

/// The model with what it sees in place of images.
fn with_features(
    mut opened: OpenedModel,
    images: Option<&Arc<Images>>,
    args: &LoadArgs,
) -> Result<OpenedModel, Failure> {
    let options = OpenOptions {
        cache: CacheSettings::from_env(),
        progress: Progress::detect(args.quiet),
        ..OpenOptions::default()
    };
    opened.model = with_images(opened.model, (&opened.source.folder, &opened.source.weights), images, &options)?;
    Ok(opened)
}

/// Why there is no text where the logits are no numbers.
pub(crate) const NON_FINITE: &str = "the model's logits are not finite numbers\n  hint: its weights or the adapter's are \
                                     damaged, or their numbers do not fit the type they are computed in; try --dtype f32";

impl SamplingArgs {
    /// The options; a seed is drawn where none is given.
    pub(crate) fn options(&self, max_new_tokens: usize) -> Result<GenerateOptions, Failure> {
        if self.temperature <= 0.0 {
            let drawing = [
                ("--top-p", self.top_p.is_some()),
                ("--top-k", self.top_k.is_some()),
                ("--min-p", self.min_p.is_some()),
                ("--seed", self.seed.is_some()),
            ];
            if let Some((name, _)) = drawing.iter().find(|(_, given)| *given) {
                let problem = Problem::new(format!("`{name}` does nothing at temperature 0, where nothing is drawn"));
                return Err(problem.hint("give a temperature, for example --temperature 0.7").into());
            }
        }
        Ok(GenerateOptions {
            max_new_tokens: self.max_new_tokens.unwrap_or(max_new_tokens),
            temperature: self.temperature,
            top_p: self.top_p.unwrap_or(1.0),
            top_k: self.top_k,
            min_p: self.min_p,
            // Short enough to type again.
            seed: self.seed.unwrap_or_else(|| rand::rng().random_range(0..1_000_000)),
        })
    }
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

/// The generated text on stdout.
#[derive(Debug, Default)]
pub(crate) struct Output {
    ends_with_newline: bool,
    error: Option<io::Error>,
}

impl Output {
    /// Writes and flushes; `false` where that failed.
    pub(crate) fn write(&mut self, text: &str) -> bool {
        if text.is_empty() {
            return true;
        }
        let mut stdout = io::stdout().lock();
        let written = stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush());
        self.ends_with_newline = text.ends_with('\n');
        self.error = written.err();
        self.error.is_none()
    }

    /// Whether nobody reads any more.
    pub(crate) fn is_closed(&self) -> bool {
        self.error.is_some()
    }

    /// Ends the last line. A closed reader (`| head`) is no error.
    pub(crate) fn finish(mut self) -> io::Result<()> {
        if self.error.is_none() && !self.ends_with_newline {
            self.write("\n");
        }
        match self.error {
            Some(error) if error.kind() != ErrorKind::BrokenPipe => Err(error),
            _ => Ok(()),
        }
    }
}

/// How fast an answer came, and why it ended where it did not end by itself.
pub(crate) fn report(args: &LoadArgs, generated: &Generated, prompt_tokens: usize, max_position_embeddings: usize) {
    let mut line = format!("prompt: {prompt_tokens} tokens in {:.2} s; ", generated.prompt_seconds);
    line.push_str(&match (generated.token_ids.len(), generated.tokens_per_second()) {
        (count, Some(speed)) => format!("text: {count} tokens, {speed:.1} tokens/s"),
        (count, None) => format!("text: {count} tokens"),
    });
    if generated.ending == Ending::MaxNewTokens {
        line.push_str(", ended by --max-new-tokens");
    }
    args.note(&line);
    if generated.ending == Ending::MaxPositions {
        say(&format!("warning: the text ended at the {max_position_embeddings} positions that the model was made for"));
    }
}
