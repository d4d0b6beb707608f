//! `lora-train init`: a commented recipe that runs here, from a model and rows, or from another trainer's configuration.

mod choices;
mod columns;
mod command_line;
mod draft;
mod experts;
mod foreign;
mod grpo;
mod mapping;
mod mlx;
mod moments;
mod objective;
mod openai;
mod program;
mod rows;
mod rules;
mod said;
mod sources;
mod swift;
mod trainer;
mod values;

use std::fs::File;
use std::io::{ErrorKind, IsTerminal as _, Write as _, stdin, stdout};
use std::path::{Path, PathBuf};

use super::say;
use crate::device::num_cuda_gpus;
use crate::schema::Problem;
use crate::util::failure::Failure;
use draft::Draft;

/// Arguments of `lora-train init`.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct InitArgs {
    /// The base model: a Hugging Face folder, a GGUF file or the id of a Hub repository
    #[arg(long, value_name = "MODEL")]
    pub(crate) model: Option<String>,

    /// Rows to train on: a file, or a glob of files
    #[arg(long, value_name = "FILE")]
    pub(crate) data: Option<String>,

    /// The recipe to write; a file that is there already is never overwritten
    #[arg(long, value_name = "RECIPE.toml", default_value = "recipe.toml")]
    pub(crate) out: PathBuf,

    /// Take over a configuration of axolotl, LLaMA-Factory, torchtune, litgpt, mlx-lm, TRL or ms-swift, PEFT's
    /// `adapter_config.json`, a notebook, a program, a command line, or a job of OpenAI's
    #[arg(long, value_name = "CONFIG")]
    pub(crate) from: Option<PathBuf>,

    /// Set a key of the recipe; can be given several times
    #[arg(long, value_name = "SECTION.KEY=VALUE")]
    pub(crate) set: Vec<String>,

    /// Where it will be computed: auto, cpu, cuda, cuda:N
    #[arg(long, value_name = "DEVICE")]
    pub(crate) device: Option<String>,
}

/// Writes a recipe and says what to do with it.
pub(crate) fn run(args: &InitArgs) -> Result<(), Failure> {
    if args.out.exists() {
        return Err(exists(&args.out));
    }
    let draft = match &args.from {
        Some(file) => mapping::draft(file, args)?,
        None => {
            let model = asked(args.model.as_deref(), "--model", "Model (a folder, or the id of a Hub repository)")?;
            let data = asked(args.data.as_deref(), "--data", "Rows to train on (a file, or a glob of files)")?;
            choices::draft(&model, &data, args)?
        }
    };
    write(&args.out, &draft.text())?;
    for (name, text) in &draft.files {
        write(Path::new(name), text)?;
        say(&format!("{name} is written"));
    }
    report(&args.out, &draft);
    Ok(())
}

/// What an argument says, or, on a terminal, what the user answers.
fn asked(given: Option<&str>, flag: &str, question: &str) -> Result<String, Failure> {
    if let Some(given) = given {
        return Ok(given.to_owned());
    }
    let missing = || Failure::from(Problem::new(format!("{flag} is missing")).hint(USAGE));
    if !stdin().is_terminal() || !stdout().is_terminal() {
        return Err(missing());
    }
    print(&format!("{question}: "))?;
    let mut answer = String::new();
    stdin().read_line(&mut answer).map_err(Failure::running)?;
    let answer = answer.trim();
    if answer.is_empty() { Err(missing()) } else { Ok(answer.to_owned()) }
}

const USAGE: &str = "lora-train init --model MODEL --data FILE, or --from CONFIG of another trainer";

fn print(question: &str) -> Result<(), Failure> {
    let mut stdout = stdout().lock();
    stdout.write_all(question.as_bytes()).and_then(|()| stdout.flush()).map_err(Failure::running)
}

fn exists(path: &Path) -> Failure {
    let problem = Problem::new("there is such a file already, and it is never overwritten").at(path.display());
    problem.hint("name another with --out").into()
}

/// Writes a new file.
fn write(path: &Path, text: &str) -> Result<(), Failure> {
    let failed = |error: std::io::Error| match error.kind() {
        ErrorKind::AlreadyExists => exists(path),
        _ => {
            let problem = Problem::new(format!("cannot be written: {error}")).at(path.display());
            problem.hint("name another with --out").into()
        }
    };
    let mut file = File::create_new(path).map_err(failed)?;
    file.write_all(text.as_bytes()).map_err(failed)
}

/// What was written, what is missing, and the next commands.
fn report(path: &Path, draft: &Draft) {
    say(&format!("{} is written", path.display()));
    draft.footer.iter().for_each(|line| say(&format!("  {line}")));
    let path = path.display();
    let (_, missing) = draft.refused();
    for problem in &missing {
        say(&format!(
            "missing: {}{}",
            problem.message,
            problem.hint.iter().map(|hint| format!("; {hint}")).collect::<String>()
        ));
    }
    say(&format!("next: lora-train check {path}   finds every mistake in recipe and rows"));
    if missing.is_empty() && !draft.has_mistakes {
        say(&format!("      lora-train {path}         trains"));
        if let gpus @ 2.. = num_cuda_gpus() {
            say(&format!("      mpirun -n {gpus} lora-train {path}   trains on {gpus} GPUs: lora-train help cluster"));
        }
    }
}
