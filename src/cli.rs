//! The command line: arguments, sub-commands and exit codes.

use std::any::Any;
use std::ffi::OsString;
use std::io::{self, IsTerminal, Write};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;

use clap::{Args, FromArgMatches, Subcommand};

use crate::commands::{bench, chat, check, compare, doctor, eval, generate, inspect, merge, plan, report, serve, tune};
use crate::failure::Failure;
use crate::faults::{Fault, backend_log};
use crate::panics;
use crate::run::{self, TrainArgs};

/// What the command line asks for.
#[derive(Debug)]
enum Request {
    Train(TrainArgs),
    Command(Command),
}

/// What can be done besides training.
#[derive(Debug, Subcommand)]
enum Command {
    /// Find every mistake that can be known before training, all at once
    Check(check::CheckArgs),
    /// Show what the model will really see: tokens, which of them carry loss, lengths, truncations
    Inspect(inspect::InspectArgs),
    /// Show the memory and time that a recipe will take, component by component, before any weight is loaded
    Plan(plan::PlanArgs),
    /// Write text with a model, with or without an adapter
    Generate(generate::GenerateArgs),
    /// Talk with a model, with one adapter or several to switch between
    Chat(chat::ChatArgs),
    /// Answer HTTP requests as OpenAI's servers do, with a page to compare adapters
    Serve(serve::ServeArgs),
    /// Measure loss and perplexity on rows, without training
    Eval(eval::EvalArgs),
    /// Fold an adapter into its base model, as a Hugging Face folder
    Merge(merge::MergeArgs),
    /// Measure speed and memory of a recipe's steps on synthetic batches; prints one line of JSON
    Bench(bench::BenchArgs),
    /// Make report.html of a run anew from its files, also of one that was killed
    Report(report::ReportArgs),
    /// Put runs side by side: recipes, losses, speed, memory, a verdict, and an exit code for checks
    Compare(compare::CompareArgs),
    /// Try the changes that are likely to make a recipe faster, in short measured runs; write the fastest recipe
    Tune(tune::TuneArgs),
    /// Show what this machine offers for training, what is wrong with it, and how to fix that
    Doctor(doctor::DoctorArgs),
}

const EXAMPLES: &str = "\
Examples:
  lora-train recipes/quickstart.toml                       train
  lora-train recipes/llama.toml --set lora.r=32 --set output_dir=runs/r32
  lora-train recipes/llama.toml --resume                   continue an interrupted run
  lora-train check recipes/llama.toml                      find mistakes before any weight is read
  lora-train doctor                                        what this machine offers, and what it lacks
  lora-train chat runs/llama                               talk with what was trained

Exit codes:
  0 done   1 failed while running   2 wrong recipe, arguments or input files
  130 stopped by SIGINT or SIGTERM after saving a checkpoint

A recipe with the name of a command is given with its folder: lora-train ./check";

/// Parses the command line, does what it asks for and reports how that ended.
#[must_use]
pub fn main() -> ExitCode {
    crate::allocator::keep_freed_memory();
    // A usage error ends the process here with exit code 2, `--help` and `--version` with 0.
    let request = parse(std::env::args_os()).unwrap_or_else(|error| error.exit());
    ExitCode::from(ended(|| dispatch(&request)))
}

/// Runs `work`, reports its error and returns the exit code. A panic is a bug or a fault of the device; it ends with 1
/// like other failures.
#[must_use]
pub fn ended(work: impl FnOnce() -> Result<(), Failure>) -> u8 {
    panics::install();
    backend_log::install();
    // Nothing that `work` left half done is used after this.
    let result = catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|panic| Err(Failure::running(of_panic(&*panic))));
    result.map_or_else(
        |failure| {
            report_failure(&failure);
            failure.exit_code()
        },
        |()| 0,
    )
}

/// What to say after a panic. A bug has already printed where it was.
fn of_panic(panic: &(dyn Any + Send)) -> String {
    match Fault::of_panic(panic) {
        Some(fault) if fault.is_out_of_memory() => {
            return "the device has no memory left\n  hint: `lora-train plan` shows what takes how much; lower \
                    `train.micro_batch_size` or `data.max_length`"
                .to_owned();
        }
        Some(fault) => return fault.to_string(),
        None => {}
    }
    let commit = option_env!("LORA_TRAIN_GIT_COMMIT").map(|commit| format!(", commit {commit}")).unwrap_or_default();
    let version = env!("CARGO_PKG_VERSION");
    format!(
        "this is a bug in lora-train {version}{commit}, not a mistake of yours\n  hint: report it with the lines above, \
         the command and its recipe, and what `lora-train doctor` says; with RUST_BACKTRACE=1 the lines above say \
         more\n  hint: a run that has a checkpoint continues with `--resume`"
    )
}

/// The command line: sub-commands, or the arguments of training.
fn definition() -> clap::Command {
    Command::augment_subcommands(TrainArgs::augment_args(clap::Command::new("lora-train")))
        .version(env!("CARGO_PKG_VERSION"))
        .about(env!("CARGO_PKG_DESCRIPTION"))
        .long_about(None)
        .after_help(EXAMPLES)
        .max_term_width(100)
        .override_usage("lora-train [OPTIONS] <RECIPE.toml>\n       lora-train <COMMAND>")
        .args_conflicts_with_subcommands(true)
        .subcommand_required(false)
        .subcommand_negates_reqs(true)
        .arg_required_else_help(true)
        .disable_help_subcommand(true)
}

fn parse(args: impl Iterator<Item = OsString>) -> Result<Request, clap::Error> {
    let mut definition = definition();
    let matches = definition.try_get_matches_from_mut(resume_before_recipe(args))?;
    let request = match matches.subcommand() {
        Some(_) => Command::from_arg_matches(&matches).map(Request::Command),
        None => TrainArgs::from_arg_matches(&matches).map(Request::Train),
    };
    request.map_err(|error| error.format(&mut definition))
}

fn dispatch(request: &Request) -> Result<(), Failure> {
    match request {
        Request::Train(args) => run::train(args).map_err(|failure| with_command_hint(failure, args)),
        Request::Command(Command::Check(args)) => check::run(args),
        Request::Command(Command::Inspect(args)) => inspect::run(args),
        Request::Command(Command::Plan(args)) => plan::run(args),
        Request::Command(Command::Generate(args)) => generate::run(args),
        Request::Command(Command::Chat(args)) => chat::run(args),
        Request::Command(Command::Serve(args)) => serve::run(args),
        Request::Command(Command::Eval(args)) => eval::run(args),
        Request::Command(Command::Merge(args)) => merge::run(args),
        Request::Command(Command::Bench(args)) => bench::run(args),
        Request::Command(Command::Report(args)) => report::run(args),
        Request::Command(Command::Compare(args)) => compare::run(args),
        Request::Command(Command::Tune(args)) => tune::run(args),
        Request::Command(Command::Doctor(args)) => doctor::run(args),
    }
}

/// `--resume recipe.toml` means the recipe, not a checkpoint of that name.
fn resume_before_recipe(args: impl Iterator<Item = OsString>) -> Vec<OsString> {
    let mut args: Vec<OsString> = args.collect();
    for index in 1..args.len() {
        if args[index - 1] == "--resume" && args[index].to_string_lossy().ends_with(".toml") {
            args[index - 1] = "--resume=latest".into();
        }
    }
    args
}

/// A recipe that does not exist may be a misspelt sub-command: suggests the nearest one.
fn with_command_hint(mut failure: Failure, args: &TrainArgs) -> Failure {
    let typed = &args.recipe.recipe;
    let is_missing_word = typed.extension().is_none() && typed.components().count() == 1 && !typed.exists();
    if let (Failure::Input(problems), Some(word), true) = (&mut failure, typed.to_str(), is_missing_word) {
        let commands = definition();
        let names = commands.get_subcommands().map(clap::Command::get_name);
        let near = names.map(|name| (strsim::damerau_levenshtein(name, word), name)).min();
        let hint = match near {
            Some((distance, name)) if distance <= 2 => format!("did you mean the command `{name}`?"),
            _ => "a recipe is a TOML file, such as recipes/quickstart.toml; `lora-train --help` lists the commands"
                .into(),
        };
        for problem in problems.0.iter_mut().filter(|problem| problem.hint.is_none()) {
            problem.hint = Some(hint.clone());
        }
    }
    failure
}

/// Writes what went wrong to stderr; in colour on a terminal, unless `NO_COLOR` is set.
fn report_failure(failure: &Failure) {
    let mut stderr = io::stderr().lock();
    let is_plain = !stderr.is_terminal() || std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    let (error, hint) =
        if is_plain { ("error:", "hint:") } else { ("\x1b[1;31merror:\x1b[0m", "\x1b[36mhint:\x1b[0m") };
    for message in failure.shown(!is_plain) {
        let message = message.replace("\n  hint:", &format!("\n  {hint}"));
        // With stderr closed there is nobody to report to.
        let _ = writeln!(stderr, "{error} {message}");
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::run::args::Resume;

    fn request(line: &str) -> Request {
        parse(line.split(' ').map(OsString::from)).unwrap()
    }

    fn train_args(line: &str) -> TrainArgs {
        match request(line) {
            Request::Train(args) => args,
            Request::Command(command) => panic!("{line}: {command:?}"),
        }
    }

    #[test]
    fn the_definition_of_the_command_line_is_consistent() {
        definition().debug_assert();
    }

    #[test]
    fn a_recipe_without_a_command_trains() {
        let args = train_args("lora-train r.toml --set lora.r=4 --set seed=1 --device cpu --quiet");
        assert!(args.quiet && !args.tui && args.resume.is_none());
        assert_eq!(args.recipe.recipe, Path::new("r.toml"));
        assert_eq!(args.recipe.set, ["lora.r=4", "seed=1"]);
        assert_eq!(args.recipe.overrides().len(), 3);
    }

    #[test]
    fn resume_takes_a_checkpoint_or_none_on_either_side_of_the_recipe() {
        let resume = |line: &str| train_args(line).resume.unwrap();
        assert_eq!(resume("lora-train r.toml --resume"), Resume::Latest);
        assert_eq!(resume("lora-train --resume r.toml"), Resume::Latest);
        assert_eq!(resume("lora-train r.toml --resume --quiet"), Resume::Latest);
        assert_eq!(resume("lora-train r.toml --resume a/step-000010"), Resume::Checkpoint("a/step-000010".into()));
        assert_eq!(resume("lora-train --resume=a r.toml"), Resume::Checkpoint("a".into()));
    }

    #[test]
    fn a_recipe_named_like_a_command_is_reached_by_its_folder() {
        assert_eq!(train_args("lora-train ./check").recipe.recipe, Path::new("./check"));
        assert!(matches!(request("lora-train check r.toml"), Request::Command(Command::Check(_))));
    }

    #[test]
    fn a_misspelt_command_is_recognised_where_there_is_no_such_recipe() {
        let args = train_args("lora-train chekc");
        let failure = Failure::from(args.recipe.load(crate::recipe::Purpose::Training).unwrap_err());
        let messages = with_command_hint(failure, &args).messages();
        assert_eq!(messages, ["chekc: there is no such file\n  hint: did you mean the command `check`?"]);
    }

    #[test]
    fn a_panic_ends_with_1_and_is_called_a_bug_unless_memory_has_run_out() {
        assert_eq!(ended(|| panic!("index out of bounds")), 1);
        assert_eq!(ended(|| Err(Failure::input("a mistake"))), 2);
        assert_eq!(ended(|| Ok(())), 0);
        let bug = of_panic(&"index out of bounds");
        for part in ["this is a bug in lora-train ", "report it with the lines above", "`--resume`"] {
            assert!(bug.contains(part), "{bug}");
        }
        let memory = of_panic(&"DriverError(CUDA_ERROR_OUT_OF_MEMORY, \"out of memory\")");
        assert!(memory.contains("no memory left") && memory.contains("`train.micro_batch_size`"), "{memory}");
        let fault = of_panic(&"DriverError(CUDA_ERROR_LAUNCH_FAILED, \"x\")");
        assert!(fault.starts_with("the GPU stopped: CUDA_ERROR_LAUNCH_FAILED, x\n"), "{fault}");
    }

    #[test]
    fn wrong_arguments_end_with_2_and_questions_with_0() {
        let code = |line: &str| parse(line.split(' ').map(OsString::from)).unwrap_err().exit_code();
        assert_eq!(code("lora-train"), 2);
        assert_eq!(code("lora-train r.toml --sett a=b"), 2);
        assert_eq!(code("lora-train r.toml --tui --quiet"), 2);
        assert_eq!(code("lora-train check"), 2);
        assert_eq!(code("lora-train --set a=b"), 2);
        assert_eq!(code("lora-train --help"), 0);
        assert_eq!(code("lora-train --version"), 0);
    }
}
