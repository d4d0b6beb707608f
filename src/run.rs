//! A training run, as a straight line.

pub mod args;
mod changes;
pub mod clock;
pub mod dir;
mod ending;
pub mod environment;
mod facts;
pub mod inputs;
mod opening;
mod resume;
pub mod room;
mod verify;

pub use args::{Resume, TrainArgs};

use std::cell::OnceCell;
use std::convert::Infallible;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

use crate::checkpoint::Checkpoints;
use crate::data::cache::CacheSettings;
use crate::data::pipeline::{DataPipeline, OpenOptions};
use crate::data::template::ChatTemplate;
use crate::device::{self, OpenDevice};
use crate::export::{PromptForm, adapter_set, read_adapter};
use crate::failure::Failure;
use crate::hub::Progress;
use crate::lora::AdapterSet;
use crate::lora::targets::Selection;
use crate::metrics::{SinkOptions, Sinks};
use crate::model::Model;
use crate::recipe::{Purpose, Recipe};
use crate::schema::Places;
use crate::telemetry::Telemetry;
use crate::train::flops::StepFlops;
use crate::train::recorder::Recorder;
use crate::train::saver::{AdapterFiles, Saver};
use crate::train::schedule::{Schedule, total_steps};
use crate::train::state::{Inputs, RowOrder, TrainerState};
use crate::train::step::TrainStep;
use crate::train::stop::Stop;
use crate::train::trainer::Trainer;

use clock::process_start;
use dir::{RunDir, RunDirError, Start};
use ending::Ending;
use environment::Environment;
use facts::facts;
use inputs::{ModelSource, nvml_selector};
use opening::Opening;
use resume::{Resumed, refuse_finished};
use room::{Room, told_when_it_runs_out};

/// Said where there was nothing to save.
const STOPPED: &str = "stopped before the first step";
/// How long rows that are being tokenised may take once the run is to stop.
const GRACE: Duration = Duration::from_secs(1);
/// How often the wish to stop is looked at while rows are read.
const STOP_CHECK: Duration = Duration::from_millis(50);

/// Trains.
///
/// # Errors
///
/// Mistakes in the recipe or its inputs, failures on the way, an interruption.
pub fn train(args: &TrainArgs) -> Result<(), Failure> {
    let (advice, places) = (OnceCell::new(), OnceCell::new());
    told_when_it_runs_out(&advice, || train_within(args, &advice, &places))
        .map_err(|failure| failure.located(places.get_or_init(Places::default)))
}

/// The same; `advice` becomes what to say if memory runs out, `places` where the recipe's keys were written.
fn train_within(args: &TrainArgs, advice: &OnceCell<String>, places: &OnceCell<Places>) -> Result<(), Failure> {
    let process_start = process_start();
    let stop = Stop::on_signals().map_err(Failure::running)?;
    let (recipe, given) = args.recipe.load_with_text(Purpose::Training)?;
    let _ = places.set(recipe.places.clone());
    let resolved = recipe.to_toml();

    // What fails cheaply comes first: no weight and no row is read before all this is known to be there.
    let checkpoints = Checkpoints::new(&recipe.output_dir, &recipe.checkpoint);
    let existing = RunDir::open(&recipe.output_dir).map_err(run_dir_failure)?;
    let find = |resume| Resumed::find(resume, &checkpoints, &resolved);
    let resumed = args.resume.as_ref().map(find).transpose()?.flatten();
    if let (Some(resume), Some(dir)) = (&args.resume, &existing) {
        refuse_finished(resume, resumed.as_ref(), dir, &resolved)?;
    }
    existing
        .as_ref()
        .map_or(Ok(()), |dir| dir.refuse_other_runs(start_of(resumed.as_ref())))
        .map_err(run_dir_failure)?;
    let source =
        ModelSource::open(&recipe.model, recipe.seed, args.quiet).map_err(|failure| failure.about("model.path"))?;
    let selection = source.select(&recipe.lora)?;
    let device = device::open(&recipe.device.name).map_err(Failure::input)?;
    let room = Room::look(&recipe, &source.config, &selection, &device);
    stop.on_abort(&room.advice);
    let _ = advice.set(room.advice);
    let dir = existing.map_or_else(|| RunDir::create(&recipe.output_dir), Ok).map_err(run_dir_failure)?;

    let (data, model) = read_inputs(args, &recipe, &source, &device, &stop)?;

    let schedule = schedule(&recipe, &data);
    if let (Some(resume), Some(resumed)) = (&args.resume, &resumed) {
        resumed.refuse_if_done(resume, &dir, schedule.total_steps())?;
    }
    let adapters = adapters(&recipe, &source, &selection, resumed.as_ref(), &device)?;
    let num_trainable = adapters.num_parameters();
    let mut facts = facts(&recipe, &source.config, &selection, &data, &device, model.has_kernels());
    let (order, inputs) = (row_order(&recipe, &data), inputs(&source, &data));
    let mut earlier = resumed.as_ref().map(|resumed| resumed.state.totals).unwrap_or_default();
    // Starts that ended without a checkpoint are counted too.
    earlier.figures.num_starts = earlier.figures.num_starts.max(dir.num_starts());
    let restored = resumed.is_some().then(|| adapters.clone());
    let loraplus_lr_ratio = recipe.lora.loraplus_lr_ratio;
    let mut step = TrainStep::new(model, adapters, &recipe.train, &recipe.optimizer, loraplus_lr_ratio, recipe.seed);
    if let (Some(resumed), Some(adapters)) = (&resumed, restored) {
        resumed.restore(&mut step, adapters, &order)?;
    }

    // From here on the folder is written to, and a signal waits for a checkpoint.
    stop.defer();
    let mut sinks = open_run(
        args,
        &recipe,
        &dir,
        &device,
        resumed.as_ref(),
        earlier.figures.num_starts + 1,
        schedule.total_steps(),
        &stop,
    )?;
    keep_recipe(args, &given, &resolved, &dir)?;
    let (config, selection) = (&source.config, &selection);
    dir.write_memory_plan(&room.plan).map_err(Failure::running)?;
    let opening = Opening { recipe: &recipe, config, selection, num_trainable, data: &data, device: &device, schedule };
    opening.tell(&mut sinks);
    for warning in room.warning.iter().map(String::as_str).chain(dir.warning()) {
        sinks.warn(warning);
    }
    let telemetry = start_telemetry(&recipe, &device, &mut sinks);
    tell_resumption(args, resumed.as_ref(), &inputs, &checkpoints, &recipe, &mut sinks)?;

    facts.max_sm_clock_mhz = telemetry.max_sm_clock_mhz();
    facts.power_limit_watts = telemetry.power_limit_watts();
    facts.default_power_limit_watts = telemetry.default_power_limit_watts();
    let adapter_files = AdapterFiles {
        lora: recipe.lora.clone(),
        base_model_name_or_path: recipe.model.path.clone(),
        prompt_form: prompt_form(&recipe, &data),
    };
    let mut saver = Saver::new(recipe.checkpoint.clone(), checkpoints, adapter_files, resolved);
    let mut state = TrainerState::new(order, inputs, step.counters());
    if let Some(Resumed { state: resumed, sound, .. }) = resumed {
        state = TrainerState { order, inputs: state.inputs, trouble: None, ..resumed };
        saver = saver.resumed(sound);
    }
    let flops = StepFlops::new(config, num_trainable);
    let recorder = Recorder::new(flops, &device, telemetry, recipe.train.precision, facts, earlier, process_start);
    let mut trainer = Trainer {
        step,
        state,
        train: recipe.train.clone(),
        eval: recipe.eval.clone(),
        watchdog: recipe.watchdog,
        schedule,
        data: &data,
        stop: &stop,
        recorder,
        saver,
        sinks,
    };
    let ending = Ending {
        args,
        recipe: &recipe,
        dir: &dir,
        data: &data,
        device: &device,
        stop: &stop,
        advice: advice.get().map(String::as_str),
        num_trainable,
        num_parameters: opening.num_parameters(),
        total_steps: schedule.total_steps(),
    };
    ending.train(&mut trainer)
}

/// Rows and weights. The tokenizer takes as long to parse as a small model to load, so they are read at the same time.
fn read_inputs(
    args: &TrainArgs,
    recipe: &Recipe,
    source: &ModelSource,
    device: &OpenDevice,
    stop: &Stop,
) -> Result<(DataPipeline, Model), Failure> {
    let is_stopped = || stop.requested();
    let progress = Progress::detect(args.quiet);
    let options = OpenOptions { cache: CacheSettings::from_env(), progress, max_rows: None, is_stopped: &is_stopped };
    // Dropped once the rows are read.
    let (reading, is_read) = mpsc::channel::<Infallible>();
    let (data, model) = std::thread::scope(|scope| {
        let data = scope.spawn(|| {
            let _reading = reading;
            // A signal waits for the rows at hand, so that no file is left half written; not for the model.
            stop.defer();
            let data = source.open_data(&recipe.data, recipe.seed, &options);
            stop.at_once();
            if stop.requested() {
                Stop::end(STOPPED);
            }
            data
        });
        scope.spawn(move || {
            while is_read.recv_timeout(STOP_CHECK) == Err(RecvTimeoutError::Timeout) {
                if stop.requested() {
                    // The threads that make tokens may be busy with weights. What is kept bears an end at any moment.
                    let _ = is_read.recv_timeout(GRACE);
                    Stop::end(STOPPED);
                }
            }
        });
        let model = source.load(recipe.model.dtype, recipe.train.precision, device);
        (data.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)), model)
    });
    Ok((data?, model?))
}

/// Starts to sample the machine; says what is sampled, and what is not.
fn start_telemetry(recipe: &Recipe, device: &OpenDevice, sinks: &mut Sinks) -> Telemetry {
    let telemetry = Telemetry::start(recipe.logging.gpu_sample_ms, nvml_selector(device));
    if let Some(gpu) = telemetry.gpu() {
        sinks.note(&format!("GPU figures are those of {gpu}"));
    }
    if let Some(notice) = telemetry.notice() {
        sinks.note(notice);
    }
    telemetry
}

/// Says where a resumed run goes on.
fn tell_resumption(
    args: &TrainArgs,
    resumed: Option<&Resumed>,
    inputs: &Inputs,
    checkpoints: &Checkpoints,
    recipe: &Recipe,
    sinks: &mut Sinks,
) -> Result<(), Failure> {
    if let Some(resumed) = resumed {
        return resumed.tell(inputs, checkpoints, &recipe.output_dir, sinks);
    }
    if args.resume.is_some() {
        let folder = checkpoints.folder().display();
        sinks.note(&format!("--resume: there is no checkpoint in {folder} yet, so training starts at the beginning"));
    }
    Ok(())
}

fn start_of(resumed: Option<&Resumed>) -> Start {
    if resumed.is_some() { Start::Resume } else { Start::Fresh }
}

/// Steps and their learning rates.
fn schedule(recipe: &Recipe, data: &DataPipeline) -> Schedule {
    let train = &recipe.train;
    let batches = usize::try_from(data.batches_per_epoch(train.micro_batch_size)).unwrap_or(usize::MAX);
    let total = total_steps(batches, train.gradient_accumulation_steps, train.num_epochs, train.max_steps);
    Schedule::new(&recipe.scheduler, recipe.optimizer.learning_rate, total)
}

/// Fresh adapters, or those of a checkpoint.
fn adapters(
    recipe: &Recipe,
    source: &ModelSource,
    selection: &Selection,
    resumed: Option<&Resumed>,
    device: &OpenDevice,
) -> Result<AdapterSet, Failure> {
    let Some(Resumed { checkpoint, .. }) = resumed else {
        return Ok(source.new_adapters(selection, &recipe.lora, recipe.seed, device));
    };
    let saved = read_adapter(checkpoint).map_err(Failure::input)?;
    let dropout = recipe.lora.lora_dropout;
    adapter_set(checkpoint, saved.weights, selection, &source.config, dropout, &device.device).map_err(Failure::input)
}

/// Writes what is known before the first step, and opens the sinks.
fn open_run(
    args: &TrainArgs,
    recipe: &Recipe,
    dir: &RunDir,
    device: &OpenDevice,
    resumed: Option<&Resumed>,
    starts: u64,
    total_steps: u64,
    stop: &Stop,
) -> Result<Sinks, Failure> {
    let aside = match start_of(resumed) {
        Start::Fresh => dir.set_aside_killed().map_err(Failure::running)?,
        Start::Resume => None,
    };
    dir.reopen(start_of(resumed)).map_err(Failure::running)?;
    let environment = Environment { starts, gpu: device.cuda.clone(), ..Environment::of_this_process(&device.label) };
    dir.write_environment(&environment).map_err(Failure::running)?;
    let options = SinkOptions {
        run_dir: dir.path(),
        resume_step: resumed.map(|resumed| resumed.state.step),
        has_evaluated: resumed.is_some_and(|resumed| resumed.state.evaluations.last_step == Some(resumed.state.step)),
        total_steps,
        quiet: args.quiet,
        tui: args.tui,
        interrupter: stop.interrupter().clone(),
    };
    let mut sinks = Sinks::open(&recipe.logging, options).map_err(Failure::running)?;
    if let Some(aside) = aside {
        let shown = aside.display();
        sinks.warn(&format!("an earlier start that left no checkpoint was here; its files are now in {shown}"));
    }
    sinks.delete_with_first_step(dir.earlier_end());
    sinks.recipe(resumed.map_or(0, |resumed| resumed.state.step), &recipe.to_toml());
    Ok(sinks)
}

/// Writes the recipe into the run's folder: as it was read, since its file may have changed while the model was loaded.
fn keep_recipe(args: &TrainArgs, given: &str, resolved: &str, dir: &RunDir) -> Result<(), Failure> {
    let device_argument = args.recipe.device.iter().map(|name| format!("--device {name}"));
    let changes: Vec<String> =
        args.recipe.set.iter().map(|change| format!("--set {change}")).chain(device_argument).collect();
    dir.write_recipe(given, &changes, resolved).map_err(Failure::running)
}

/// What fixes which rows are in which micro-batch.
fn row_order(recipe: &Recipe, data: &DataPipeline) -> RowOrder {
    RowOrder {
        seed: recipe.seed,
        micro_batch_size: recipe.train.micro_batch_size,
        shuffle: recipe.data.shuffle,
        packed_length: recipe.data.packing.then_some(recipe.data.max_length),
        rows_per_epoch: data.rows_per_epoch(),
    }
}

/// In which form the rows are put before the model, so that it can be asked in the same.
fn prompt_form(recipe: &Recipe, data: &DataPipeline) -> PromptForm {
    // The model's own template is found beside the model.
    let is_own = recipe.data.chat_template == "auto";
    data.template().map_or(PromptForm::Raw, |template| PromptForm::ChatTemplate {
        chat_template: (!is_own).then(|| template.source().to_owned()),
    })
}

/// What is read, to be known again by a resumed run.
fn inputs(source: &ModelSource, data: &DataPipeline) -> Inputs {
    let hexadecimal = |digest: [u8; 32]| digest.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    Inputs {
        train_rows: Some(hexadecimal(data.train_digest())),
        tokenizer: Some(hexadecimal(data.tokenizer().digest())),
        chat_template: data.template().and_then(ChatTemplate::identity).map(hexadecimal),
        weights: source.weights.digest().map(hexadecimal),
    }
}

/// A folder that must not be used is a mistake in the recipe; a disk that fails is not.
fn run_dir_failure(error: RunDirError) -> Failure {
    match error {
        RunDirError::Io { .. } => Failure::running(error),
        error => Failure::input(error),
    }
}
