//! `lora-train chat`: a conversation with a model, in a terminal or, one message a line, in a pipe.
//!
//! Answers go to stdout as they are generated, everything else to stderr. Lines are edited by the terminal itself.

mod input;

use std::io::{self, BufRead as _, IsTerminal as _, Write as _};
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use serde_json::{Value, json};
use signal_hook::consts::SIGINT;
use signal_hook::flag;

#[cfg(unix)]
use self::input::Pasting;
use self::input::{Message, next_message};
use super::generate::{NON_FINITE, Output, SamplingArgs};
use super::named::{Asked, LoadArgs, ModelArgs, Named, OpenedModel, images_for, message, stops, template, warn_of};
use super::say;
use crate::data::cache::CacheSettings;
use crate::data::files::OpenOptions;
use crate::data::template::{ChatTemplate, Stops};
use crate::generate::{Ending, GenerateError, GenerateOptions, Generator, encode_messages};
use crate::images::Images;
use crate::model::Model;
use crate::model::decode::Sequence;
use crate::run::images::with_images;
use crate::save::export::PromptForm;
use crate::schema::Problem;
use crate::train::stop::EXIT_INTERRUPTED;
use crate::util::failure::Failure;
use crate::util::terminal::is_notebook;

const HELP: &str = "  /reset          forget the conversation
  /system TEXT    set the system message and forget the conversation; without TEXT, take it away
  /adapter NAME   go on with another adapter; without NAME, list them
  /image FILE     show an image with the next message; several come in this order
  /quit           end; so does Ctrl-D. Ctrl-C ends an answer
  \"\"\"             begins and ends a message of several lines; a pasted text is one message";

/// What to say where there was no message.
const NOTHING_READ: &str = "warning: standard input is no terminal and has no message\n  hint: a line is one: `echo \"...\" | \
                            lora-train chat RUN`; a container has a terminal by `docker run -it`";

/// Arguments of `lora-train chat`.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct ChatArgs {
    /// Runs, adapters' folders, or a model
    #[arg(value_name = "RUN|MODEL", required_unless_present_any = ["model", "adapter"])]
    names: Vec<String>,

    #[command(flatten)]
    model: ModelArgs,

    /// A system message; needs a chat template
    #[arg(long, value_name = "TEXT", conflicts_with = "raw")]
    system: Option<String>,

    /// Continue the text of the conversation as it is, without a chat template
    #[arg(long)]
    raw: bool,

    /// Use the chat template, also where the adapter was trained without one
    #[arg(long, conflicts_with = "raw")]
    chat: bool,

    #[command(flatten)]
    sampling: SamplingArgs,

    #[command(flatten)]
    load: LoadArgs,
}

/// Reads messages and writes answers until the input ends.
pub(crate) fn run(args: &ChatArgs) -> Result<(), Failure> {
    if is_notebook() && io::stdin().is_terminal() {
        let problem = Problem::new("a cell of a notebook gives chat nothing to read");
        return Err(problem
            .hint("ask by `lora-train generate RUN \"...\"`, or `!echo \"...\" | lora-train chat RUN`")
            .into());
    }
    let options = args.sampling.options(1024)?;
    let named = Named::find(&args.names, &args.model)?;
    let opened = named.read(args.load.quiet)?.that_write()?.load(&args.load)?;
    let mut templates = Vec::new();
    for adapter in &opened.adapters {
        templates.push(template(Asked::by(args.raw, args.chat), adapter.form.as_ref(), &opened.tokenizer)?);
    }
    args.load.note(&templates[0].1);
    let templates: Vec<Option<ChatTemplate>> = templates.into_iter().map(|(template, _)| template).collect();
    warn_of(templates[0].as_ref());
    let adapters = opened.adapters.iter().zip(&templates);
    let stops = adapters.map(|(adapter, template)| stops(template.as_ref(), adapter.form.as_ref(), &opened.tokenizer));
    let stops = stops.collect();
    let mut chat = Chat {
        opened: &opened,
        stops,
        templates,
        active: 0,
        options,
        system: None,
        messages: Vec::new(),
        shown: Vec::new(),
        images: None,
        model: opened.model.clone(),
        text: String::new(),
        sequence: Sequence::new(&opened.model),
        interrupt: Interrupt::install().map_err(Failure::running)?,
    };
    let trained_with = opened.adapters[0].form.as_ref().and_then(PromptForm::system);
    let trained_with = trained_with.filter(|_| chat.templates[0].is_some());
    chat.set_system(args.system.as_deref().or(trained_with).unwrap_or_default()).map_err(Failure::input)?;
    let is_terminal = io::stdin().is_terminal();
    if is_terminal {
        args.load
            .note(&format!("adapters: {} (the first is used); /help lists what else can be typed", opened.names()));
    }
    converse(&mut chat, is_terminal)
}

/// Answers what is typed, or piped in, until it ends.
fn converse(chat: &mut Chat<'_>, is_terminal: bool) -> Result<(), Failure> {
    let mut lines = io::stdin().lock().lines();
    let mut is_first = true;
    loop {
        if is_terminal {
            drop(write!(io::stderr(), "> "));
        }
        let Some(message) = next_message(&mut lines) else {
            if is_first && !is_terminal {
                say(NOTHING_READ);
            }
            return Ok(());
        };
        is_first = false;
        let Message { text, may_be_cut } = message.map_err(Failure::input)?;
        if is_terminal && may_be_cut {
            say(
                "warning: a terminal hands over 4,095 bytes of a line, and the rest is lost\n  hint: break the line, or \
                 pipe the text: `lora-train chat RUN < letter.txt`",
            );
        }
        if chat.take(&text)?.is_break() {
            return Ok(());
        }
    }
}

struct Chat<'a> {
    opened: &'a OpenedModel,
    /// By adapter.
    templates: Vec<Option<ChatTemplate>>,
    /// Where answers end, by adapter.
    stops: Vec<Stops>,
    /// The adapter that answers.
    active: usize,
    options: GenerateOptions,
    system: Option<Value>,
    messages: Vec<Value>,
    /// Paths of the images that come with the next message.
    shown: Vec<String>,
    /// What reads images, once there is one.
    images: Option<Arc<Images>>,
    /// That which is open, with what it sees of images.
    model: Model,
    /// The conversation where there is no template.
    text: String,
    /// What the model has seen, so that nothing is computed again.
    sequence: Sequence,
    interrupt: Interrupt,
}

impl Chat<'_> {
    /// A command or a message.
    fn take(&mut self, line: &str) -> Result<ControlFlow<()>, Failure> {
        let (word, rest) = line.trim().split_once(char::is_whitespace).unwrap_or((line.trim(), ""));
        match word {
            // A command is a line of its own.
            _ if line.trim().contains('\n') => return self.answer(line.trim()),
            "" => {}
            "/quit" | "/exit" => return Ok(ControlFlow::Break(())),
            "/help" => say(HELP),
            "/reset" => self.reset(),
            "/system" => self.set_system(rest.trim()).unwrap_or_else(|error| say(&format!("error: {error}"))),
            "/adapter" => self.switch(rest.trim()),
            // Terminals quote the path of a file that is dropped on them.
            "/image" => self
                .show(rest.trim().trim_matches(['\'', '"']))
                .unwrap_or_else(|reason| say(&format!("error: {reason}"))),
            _ if line.starts_with('/') => {
                say(&format!("there is no {word}; /help lists what there is, and a message can begin with a space"));
            }
            _ => return self.answer(line.trim()),
        }
        Ok(ControlFlow::Continue(()))
    }

    fn reset(&mut self) {
        self.messages.clear();
        self.shown.clear();
        self.text.clear();
    }

    /// Shows an image with the next message.
    fn show(&mut self, path: &str) -> Result<(), String> {
        if path.is_empty() {
            return Err("/image is followed by the path of a file".to_owned());
        }
        let reader = images_for(&self.opened.source, self.templates[self.active].as_ref())?;
        let images = self.images.get_or_insert(reader);
        let image = images.add(path)?;
        // A file whose header is whole may be damaged behind it.
        images.pieces(&image).map_err(|reason| format!("the image {path:?} {reason}"))?;
        say(&format!("{path}: {} tokens, with the next message", image.num_tokens()));
        self.shown.push(path.to_owned());
        Ok(())
    }

    /// Sets the system message, or takes it away.
    fn set_system(&mut self, text: &str) -> Result<(), GenerateError> {
        if self.templates[self.active].is_none() && !text.is_empty() {
            return Err(GenerateError::SystemWithoutTemplate);
        }
        self.system = (!text.is_empty()).then(|| json!({"role": "system", "content": text}));
        self.reset();
        Ok(())
    }

    fn switch(&mut self, name: &str) {
        match self.opened.adapter(name) {
            Some(index) if index != self.active => {
                self.active = index;
                // Keys and values of another adapter are of no use.
                self.sequence = Sequence::new(&self.opened.model);
                say(&format!("{name} answers now"));
            }
            Some(_) => say(&format!("{name} answers already")),
            None => say(&format!("adapters: {}; {} answers", self.opened.names(), self.name())),
        }
    }

    fn name(&self) -> &str {
        &self.opened.adapters[self.active].name
    }

    /// Token ids of the conversation with one more message.
    fn prompt(&self, text: &str) -> Result<Vec<u32>, GenerateError> {
        match &self.templates[self.active] {
            Some(template) => {
                let user = message(text, &self.shown);
                let messages: Vec<Value> = self.system.iter().chain(&self.messages).cloned().chain([user]).collect();
                encode_messages(&self.opened.tokenizer, (template, self.images.as_deref()), &messages, None)
            }
            None if !self.shown.is_empty() => Err(GenerateError::Conversation(format!(
                "{} is asked without a chat template, which images need",
                self.name()
            ))),
            None => Ok(self.opened.tokenizer.encode(&format!("{}{text}", self.text), true)?),
        }
    }

    /// Lets the model see the images that come with the next message.
    fn see(&mut self) -> Result<(), Failure> {
        if self.shown.is_empty() {
            return Ok(());
        }
        let source = &self.opened.source;
        let options = OpenOptions { cache: CacheSettings::from_env(), ..OpenOptions::default() };
        let (model, images) = (self.model.clone(), self.images.as_ref());
        self.model = with_images(model, (&source.folder, &source.weights), images, &options)?;
        Ok(())
    }

    /// Writes the answer to a message. One that does not fit is refused, and the conversation goes on.
    fn answer(&mut self, text: &str) -> Result<ControlFlow<()>, Failure> {
        self.see()?;
        let OpenedModel { tokenizer, adapters, .. } = self.opened;
        let (adapters, stops) = (&adapters[self.active].set, &self.stops[self.active]);
        let generator = Generator { model: &self.model, adapters, tokenizer, stops };
        let mut output = Output::default();
        let interrupt = &self.interrupt;
        let on_text = |text: &str| {
            if interrupt.requested() || !output.write(text) {
                ControlFlow::Break(())
            } else {
                ControlFlow::Continue(())
            }
        };
        interrupt.wait_for_answer();
        let generated = self
            .prompt(text)
            .and_then(|prompt_ids| generator.go_on(&mut self.sequence, &prompt_ids, &self.options, on_text));
        self.interrupt.end_at_once();
        let generated = match generated {
            Ok(generated) => generated,
            Err(error) => {
                say(&format!("error: {error}\n  hint: /reset forgets the conversation"));
                return Ok(ControlFlow::Continue(()));
            }
        };
        let is_closed = output.is_closed();
        output.finish().map_err(Failure::running)?;
        match generated.ending {
            Ending::NonFiniteLogits | Ending::OutOfGrammar => return Err(Failure::running(NON_FINITE)),
            Ending::MaxNewTokens => {
                say("(--max-new-tokens N sets more)");
            }
            Ending::MaxPositions => say("(this is as much as the model can read; /reset begins anew)"),
            Ending::Stopped if is_closed => return Ok(ControlFlow::Break(())),
            Ending::EndOfText | Ending::Stopped => {}
        }
        self.messages.push(message(text, &std::mem::take(&mut self.shown)));
        self.messages.push(json!({"role": "assistant", "content": generated.text}));
        self.text.push_str(&format!("{text}{}", generated.text));
        // The next answer is drawn anew, and a seed repeats the conversation.
        self.options.seed = self.options.seed.wrapping_add(1);
        Ok(ControlFlow::Continue(()))
    }
}

/// Ctrl-C: ends an answer, or the program while it waits for a message.
struct Interrupt {
    requested: Arc<AtomicBool>,
    is_waiting: Arc<AtomicBool>,
    #[cfg(unix)]
    pasting: Option<Pasting>,
}

#[cfg(unix)]
impl Drop for Interrupt {
    fn drop(&mut self) {
        self.pasting.into_iter().for_each(Pasting::give_back);
    }
}

impl Interrupt {
    #[cfg_attr(unix, expect(unsafe_code, reason = "a signal handler gives the terminal back"))]
    fn install() -> io::Result<Self> {
        let (requested, is_waiting) = (Arc::default(), Arc::new(AtomicBool::new(true)));
        #[cfg(unix)]
        let pasting = Pasting::start();
        #[cfg(unix)]
        if let Some(pasting) = pasting {
            let is_waiting = Arc::clone(&is_waiting);
            let give_back = move || {
                if is_waiting.load(Ordering::Relaxed) {
                    pasting.give_back();
                }
            };
            // SAFETY: the action reads an atomic and makes only system calls that are allowed in a handler. The next one ends
            // the program.
            unsafe { signal_hook::low_level::register(SIGINT, give_back) }?;
        }
        flag::register_conditional_shutdown(SIGINT, i32::from(EXIT_INTERRUPTED), Arc::clone(&is_waiting))?;
        flag::register(SIGINT, Arc::clone(&requested))?;
        Ok(Self {
            requested,
            is_waiting,
            #[cfg(unix)]
            pasting,
        })
    }

    fn wait_for_answer(&self) {
        self.requested.store(false, Ordering::Relaxed);
        self.is_waiting.store(false, Ordering::Relaxed);
    }

    fn end_at_once(&self) {
        self.is_waiting.store(true, Ordering::Relaxed);
    }

    fn requested(&self) -> bool {
        self.requested.load(Ordering::Relaxed)
    }
}
