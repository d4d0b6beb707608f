//! The command line: arguments, sub-commands and exit codes.

use std::any::Any;
use std::ffi::OsString;
use std::io::{self, Write};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::process::ExitCode;

use clap::error::ErrorKind;
use clap::{Args, FromArgMatches, Subcommand};

use crate::commands::{
    bench, chat, check, compare, demo, doctor, eval, export, generate, init, inspect, merge, plan, push, report, serve,
    tune,
};
use crate::recipe::of_run::run_of;
use crate::run::{self, TrainArgs};
use crate::schema::Problem;
#[cfg(unix)]
use crate::train::ranks;
use crate::util::failure::Failure;
use crate::util::faults::{Fault, backend_log, panic_text};
use crate::util::panics;
use crate::util::text::has_colors;
use help::CompletionsArgs;
use topics::HelpArgs;

#[cfg(all(unix, not(feature = "cuda-llvm")))]
mod cuda_build;
mod help;
mod mistakes;
mod topics;

/// What can be done.
#[derive(Debug, Subcommand)]
enum Command {
    /// Train, which the recipe alone does too
    Train(TrainArgs),
    /// Train a small model that comes with this program, in seconds
    Demo(demo::DemoArgs),
    /// Write a recipe: for a model and rows, or from another trainer's configuration
    Init(init::InitArgs),
    /// Find every mistake that can be known before training, all at once
    Check(check::CheckArgs),
    /// Show what the model will really see: tokens, loss masks, lengths, truncations; or a model's shape and tensors
    Inspect(inspect::InspectArgs),
    /// Estimate memory and time of a recipe, here or on a GPU elsewhere
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
    /// Write an adapter in the form that every server reads right
    Export(export::ExportArgs),
    /// Publish an adapter or a merged model on the Hub, with a card
    Push(push::PushArgs),
    /// Measure speed and memory of a recipe's steps on synthetic batches
    Bench(bench::BenchArgs),
    /// Write report.html of a run anew, also of one that was killed
    Report(report::ReportArgs),
    /// Put runs side by side, with a verdict and an exit code for checks
    Compare(compare::CompareArgs),
    /// Try likely faster settings in short measured runs; write the fastest recipe
    Tune(tune::TuneArgs),
    /// Show what this machine offers for training, and what it lacks
    Doctor(doctor::DoctorArgs),
    /// Print completions for bash, zsh or fish, or the manual page (man)
    Completions(CompletionsArgs),
    /// Show options of a command, a key of a recipe, all keys (reference), or a page of the documentation
    Help(HelpArgs),
}

/// Parses the command line, does what it asks for and reports how that ended.
#[must_use]
pub fn main() -> ExitCode {
    #[cfg(all(unix, not(feature = "cuda-llvm")))]
    cuda_build::take_over();
    crate::util::allocator::keep_freed_memory();
    // Which toolkit fits depends on the driver.
    #[cfg(all(unix, feature = "cuda-llvm"))]
    crate::device::take_newer_driver();
    #[cfg(feature = "cuda-llvm")]
    #[expect(unsafe_code, reason = "nothing else runs yet")]
    // SAFETY: the program has a single thread here.
    unsafe {
        crate::device::name_toolkit();
    }
    #[cfg(all(unix, feature = "cuda-llvm"))]
    crate::device::take_own_libraries();
    match parse(std::env::args_os()) {
        Ok(command) => {
            let code = ended(|| dispatch(&command));
            #[cfg(unix)]
            ranks::leave(code);
            ExitCode::from(code)
        }
        Err(Refusal::Mistake(problem)) => ExitCode::from(ended(|| Err((*problem).into()))),
        // A usage error ends the process with exit code 2, `--help` and `--version` with 0.
        Err(Refusal::Usage(error)) => error.exit(),
    }
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

/// What to say where a thread cannot be started.
const TOO_FEW_THREADS: &str = "the system allows this process no more threads\n  hint: raise `ulimit -u`, or the limit of the \
                               container (--pids-limit), or end what else runs there";

/// What to say after a panic. A bug has already printed where it was.
fn of_panic(panic: &(dyn Any + Send)) -> String {
    match Fault::of_panic(panic) {
        Some(fault) if fault.is_out_of_memory() => {
            return "the device has no memory left\n  hint: `lora-train plan` shows what takes how much; lower \
                    `train.micro_batch_size` or `data.max_length`"
                .to_owned();
        }
        Some(fault) => return fault.to_string(),
        None if panics::is_for_want_of_threads(panic_text(panic)) => return TOO_FEW_THREADS.to_owned(),
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
    help::grouped(Command::augment_subcommands(TrainArgs::augment_args(clap::Command::new("lora-train"))))
        .version(env!("CARGO_PKG_VERSION"))
        .about(env!("CARGO_PKG_DESCRIPTION"))
        .long_about(None)
        .max_term_width(100)
        .override_usage("lora-train [train] [OPTIONS] <RECIPE.toml>\n       lora-train <COMMAND>")
        .args_conflicts_with_subcommands(true)
        .subcommand_required(false)
        .subcommand_negates_reqs(true)
        .arg_required_else_help(true)
        .disable_help_subcommand(true)
}

/// Why there is nothing to do.
#[derive(Debug)]
enum Refusal {
    /// A question such as `--help`, or a mistake that clap explains.
    Usage(clap::Error),
    Mistake(Box<Problem>),
}

fn parse(args: impl Iterator<Item = OsString>) -> Result<Command, Refusal> {
    let mut definition = definition();
    let args = with_command(resume_before_recipe(args), &definition)?;
    let matches = definition.try_get_matches_from_mut(&args).or_else(|error| match resumed_run(&error, &args) {
        Some(args) => definition.try_get_matches_from_mut(args),
        None => Err(error),
    });
    let matches = matches.map_err(|error| {
        let mistake = mistakes::unknown_argument(&error, &args, &definition);
        match mistake.or_else(|| mistakes::missing_argument(&error, &args, &definition)) {
            Some(problem) => Refusal::Mistake(Box::new(problem)),
            None => Refusal::Usage(error),
        }
    })?;
    Command::from_arg_matches(&matches).map_err(|error| Refusal::Usage(error.format(&mut definition)))
}

/// Puts `train` before arguments without a command.
fn with_command(mut args: Vec<OsString>, definition: &clap::Command) -> Result<Vec<OsString>, Refusal> {
    let word = |index: usize| args.get(index).map(|word| word.to_string_lossy().into_owned());
    let is_question = |word: &String| ["--help", "-h", "--version", "-V"].contains(&word.as_str());
    let Some(first) = word(1).filter(|word| !is_question(word) && definition.find_subcommand(word).is_none()) else {
        return Ok(args);
    };
    if let Some(problem) = mistakes::unknown_command(&first, definition) {
        return Err(Refusal::Mistake(Box::new(problem)));
    }
    args.insert(1, "train".into());
    Ok(args)
}

fn dispatch(command: &Command) -> Result<(), Failure> {
    match command {
        Command::Train(args) => run::train(args),
        Command::Demo(args) => demo::run(args),
        Command::Init(args) => init::run(args),
        Command::Check(args) => check::run(args),
        Command::Inspect(args) => inspect::run(args),
        Command::Plan(args) => plan::run(args),
        Command::Generate(args) => generate::run(args),
        Command::Chat(args) => chat::run(args),
        Command::Serve(args) => serve::run(args),
        Command::Eval(args) => eval::run(args),
        Command::Merge(args) => merge::run(args),
        Command::Export(args) => export::run(args),
        Command::Push(args) => push::run(args),
        Command::Bench(args) => bench::run(args),
        Command::Report(args) => report::run(args),
        Command::Compare(args) => compare::run(args),
        Command::Tune(args) => tune::run(args),
        Command::Doctor(args) => doctor::run(args),
        Command::Completions(args) => help::print(definition(), args.format),
        Command::Help(args) => topics::show(args, definition()),
    }
}

/// The arguments of `--resume runs/mine` alone, with that folder as the recipe too.
fn resumed_run(error: &clap::Error, args: &[OsString]) -> Option<Vec<OsString>> {
    let is_train = args.get(1).is_some_and(|word| word == "train");
    if error.kind() != ErrorKind::MissingRequiredArgument || !is_train {
        return None;
    }
    let at = args.iter().position(|word| word.to_string_lossy().starts_with("--resume"))?;
    let after = |word: &OsString| word.to_str()?.strip_prefix("--resume=").map(OsString::from);
    let folder = after(&args[at]).or_else(|| args.get(at + 1).cloned()).filter(|it| run_of(Path::new(it)).is_some())?;
    Some([&args[..2], &[folder], &args[2..]].concat())
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

/// Writes what went wrong to stderr; in colour on a terminal, unless `NO_COLOR` is set.
fn report_failure(failure: &Failure) {
    let mut stderr = io::stderr().lock();
    let is_plain = !has_colors(&stderr);
    let (error, hint) =
        if is_plain { ("error:", "hint:") } else { ("\x1b[1;31merror:\x1b[0m", "\x1b[36mhint:\x1b[0m") };
    #[cfg(unix)]
    let rank = ranks::reporter().map(|name| format!("{name}: ")).unwrap_or_default();
    #[cfg(not(unix))]
    let rank = "";
    let resume = "\n  hint: after a checkpoint, `--resume` continues, on any number of ranks";
    let resume = if rank.is_empty() || failure.exit_code() != 1 { "" } else { resume };
    for mut message in failure.shown(!is_plain) {
        // As the C library says it of a thread or a process.
        if message.contains("Resource temporarily unavailable") {
            message += &format!(": {TOO_FEW_THREADS}");
        }
        let message = message + resume;
        let message = message.replace("\n  hint:", &format!("\n  {hint}"));
        // With stderr closed there is nobody to report to.
        let _ = stderr.write_all(format!("{error} {rank}{message}\n").as_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recipe::of_run::{ENVIRONMENT_FILE, RESOLVED_FILE};
    use crate::run::args::Resume;

    fn parsed(line: &str) -> Result<Command, Refusal> {
        parse(line.split(' ').map(OsString::from))
    }

    fn train_args(line: &str) -> TrainArgs {
        match parsed(line).unwrap() {
            Command::Train(args) => args,
            command => panic!("{line}: {command:?}"),
        }
    }

    /// What is said about a wrong command line, without `lora-train`.
    fn mistake(line: &str) -> String {
        match parsed(&format!("lora-train {line}")).unwrap_err() {
            Refusal::Mistake(problem) => problem.to_string(),
            Refusal::Usage(error) => panic!("{line}: {error}"),
        }
    }

    #[test]
    fn the_definition_of_the_command_line_is_consistent() {
        definition().debug_assert();
    }

    #[test]
    fn a_recipe_without_a_command_trains() {
        let words = "r.toml --set lora.r=4 --set seed=1 --device cpu --quiet";
        let args = train_args(&format!("lora-train {words}"));
        assert_eq!(format!("{:?}", train_args(&format!("lora-train train {words}"))), format!("{args:?}"));
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
    fn a_run_is_trained_and_resumed_by_its_folder() {
        let folder = tempfile::tempdir().unwrap();
        let run = folder.path().join("mine");
        let checkpoint = run.join("checkpoints/step-000010");
        std::fs::create_dir_all(&checkpoint).unwrap();
        for name in [RESOLVED_FILE, ENVIRONMENT_FILE] {
            std::fs::write(run.join(name), "").unwrap();
        }
        for (folder, resume) in [(&run, "--resume "), (&run, "--resume="), (&checkpoint, "--resume ")] {
            let args = train_args(&format!("lora-train {resume}{} --set seed=1", folder.display()));
            assert_eq!((&args.recipe.recipe, args.resume), (folder, Some(Resume::Checkpoint(folder.clone()))));
        }
        assert_eq!(train_args(&format!("lora-train {} --resume", run.display())).resume, Some(Resume::Latest));
        let lost = "RECIPE.toml is missing\n  hint: lora-train RECIPE.toml; `lora-train train --help` lists its options, and \
                    --set changes any key of the recipe";
        assert_eq!(mistake("--resume absent"), lost);
    }

    #[test]
    fn a_recipe_named_like_a_command_is_reached_by_its_folder() {
        assert_eq!(train_args("lora-train ./check").recipe.recipe, Path::new("./check"));
        assert!(matches!(parsed("lora-train check r.toml"), Ok(Command::Check(_))));
    }

    #[test]
    fn a_dash_is_a_recipe_on_standard_input() {
        assert_eq!(train_args("lora-train - --quiet").recipe.recipe, Path::new("-"));
        assert!(matches!(parsed("lora-train check - --json"), Ok(Command::Check(_))));
    }

    #[test]
    fn a_mistyped_command_is_recognised_whatever_follows_it() {
        for (line, hint) in [
            ("inspec", "did you mean `inspect`?"),
            ("inspec r.toml --rows 5", "did you mean `inspect`?"),
            ("chekc r.toml", "did you mean `check`?"),
            ("gen", "did you mean `generate`?"),
            ("version", "`lora-train --version` does that"),
            ("resume runs/x", "`lora-train RUN --resume` does that, or RECIPE.toml --resume"),
            ("dry-run r.toml", "this trainer calls it `check`"),
            ("finetune x.yml", "this trainer calls it `train`"),
            ("quickstart", "did you mean the recipe recipes/quickstart.toml?"),
            ("tutorial", "this trainer calls it `demo`"),
            ("explain lora.r", "this trainer calls it `help`"),
            ("xyz", "a recipe is a TOML file: `lora-train init` writes one; `lora-train --help` lists the commands"),
        ] {
            let word = line.split(' ').next().unwrap();
            assert_eq!(mistake(line), format!("no command `{word}`\n  hint: {hint}"));
        }
        assert_eq!(train_args("lora-train absent.toml").recipe.recipe, Path::new("absent.toml"));
    }

    #[test]
    fn what_other_trainers_users_type_is_answered_with_what_does_it_here() {
        for (line, message, hint) in [
            ("r.toml --lr 1e-4", "no option `--lr`", "`--set optimizer.learning_rate=1e-4` does that"),
            (
                "r.toml --learning_rate=1e-4",
                "no option `--learning_rate`",
                "`--set optimizer.learning_rate=1e-4` does that",
            ),
            ("--bf16 r.toml", "no option `--bf16`", "`--set train.precision=bf16` does that"),
            ("r.toml --bf16", "no option `--bf16`", "`--set train.precision=bf16` does that"),
            ("r.toml --dry-run", "no option `--dry-run`", "`lora-train check r.toml` does that"),
            ("--dry-run r.toml", "no option `--dry-run`", "`lora-train check r.toml` does that"),
            ("r.toml --merge-lora", "no option `--merge-lora`", "`lora-train merge ...` does that"),
            ("--config r.toml", "no option `--config`", "the recipe is a bare argument: lora-train r.toml"),
            ("check -c r.toml", "no option `-c`", "the recipe is a bare argument: lora-train check r.toml"),
            (
                "train --config x.yml",
                "no option `--config`",
                "the recipe is a bare argument, and a TOML file: lora-train RECIPE.toml; `lora-train help \
                 reference` shows every key",
            ),
            ("r.toml --sett a=b", "no option `--sett`", "did you mean `--set`?"),
            ("r.toml --cpu", "no option `--cpu`", "`--device cpu` does that"),
            ("r.toml --load-in-4bit", "no option `--load-in-4bit`", "`--set model.quantization=nf4` does that"),
            (
                "r.toml --optim adamw_torch",
                "no option `--optim`; in the recipe: `optimizer.name` = \"adamw_torch\", expected one of \"adamw\", \"adamw_8bit\", \"lion\", \"adafactor\", \"sgd\", \"schedule_free_adamw\", \"muon\"",
                "this trainer calls it `adamw`",
            ),
            ("plan r.toml --price_per_hour 2", "no option `--price_per_hour`", "did you mean `--price-per-hour`?"),
            ("merge --adapter_path x", "no option `--adapter_path`", "did you mean `--adapter`?"),
            ("merge --adapter-dir x", "no option `--adapter-dir`", "did you mean `--adapter`?"),
            ("generate --max_new_token 5", "no option `--max_new_token`", "did you mean `--max-new-tokens`?"),
            (
                "generate",
                "RUN|MODEL and PROMPT are missing",
                "lora-train generate RUN|MODEL PROMPT; `lora-train generate --help` lists its options",
            ),
            ("chat", "RUN|MODEL is missing", "lora-train chat RUN|MODEL; `lora-train chat --help` lists its options"),
            (
                "merge runs/a",
                "--out DIR|FILE.gguf is missing",
                "lora-train merge RUN --out DIR|FILE.gguf; `lora-train merge --help` lists its options",
            ),
            ("r.toml check", "unexpected argument `check`", "the command comes first: lora-train check ..."),
            ("r.toml lora.r=16", "unexpected argument `lora.r=16`", "to change a key of the recipe: --set lora.r=16"),
        ] {
            assert_eq!(mistake(line), format!("{message}\n  hint: {hint}"), "{line}");
        }
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
        let threads = of_panic(&"failed to spawn thread: Os { code: 11, kind: WouldBlock }");
        assert!(threads.contains("`ulimit -u`"), "{threads}");
        let fault = of_panic(&"DriverError(CUDA_ERROR_LAUNCH_FAILED, \"x\")");
        assert!(fault.starts_with("the GPU stopped: CUDA_ERROR_LAUNCH_FAILED, x\n"), "{fault}");
    }

    #[test]
    fn wrong_arguments_end_with_2_and_questions_with_0() {
        let code = |line: &str| match parsed(line).unwrap_err() {
            Refusal::Usage(error) => error.exit_code(),
            Refusal::Mistake(problem) => i32::from(Failure::from(*problem).exit_code()),
        };
        for line in [
            "",
            " r.toml --sett a=b",
            " r.toml --tui --quiet",
            " check",
            " --set a=b",
            " completions ksh",
            " push runs/a",
            " bench r.toml --seconds 0",
            " bench r.toml --steps 3 --seconds 5",
        ] {
            assert_eq!(code(&format!("lora-train{line}")), 2, "{line}");
        }
        for line in ["--help", "--version", "help --help", "train --help", "r.toml --help"] {
            assert_eq!(code(&format!("lora-train {line}")), 0, "{line}");
        }
    }
}
