//! The last part before the first step: opens the folder's files, sinks and telemetry, makes the trainer and restores
//! its state.

use burn::tensor::{DType, Device, Tensor};

use super::Run;
use super::dir::{REWARDS_LOG, Start};
use super::environment::environment;
use super::inputs::{data_failure, nvml_selector, workload};
use super::load::row_order;
use super::overview;
use super::prepare::Prepared;
use super::ranks::{MeasuredSum, busiest, sent_bytes};
use super::resume::Resumed;
use super::shipping::shipping;
use crate::config::{GradientCheckpointing, ObjectiveName};
use crate::data::dataset::Dataset;
use crate::data::files::FileInfo;
use crate::data::template::ChatTemplate;
use crate::device::num_cpu_threads;
use crate::insight::diagnosis::Facts;
use crate::measure::metrics::{Shows, SinkOptions, Sinks, Totals};
use crate::measure::telemetry::{Telemetry, total_host_memory_bytes};
use crate::ops::place::place_on;
use crate::recipe::Recipe;
use crate::recipe::of_run::ENVIRONMENT_FILE;
use crate::save::checkpoint::Checkpoints;
use crate::save::export::{PromptForm, Shipped, find_adapter};
use crate::train::budget::workload::Workload;
use crate::train::ranks::Ranks;
use crate::train::recorder::Recorder;
use crate::train::saver::{AdapterFiles, Saver};
use crate::train::schedule::Schedule;
use crate::train::state::{Inputs, TrainerState};
use crate::train::step::TrainStep;
use crate::train::task::Task;
use crate::train::trainer::{Evaluator, Trainer};
use crate::util::failure::Failure;
use crate::util::stats::{as_f64, as_u64};

/// How long the exchange of gradients is measured at the start.
const MEASURED_SECONDS: f64 = 1.0;

/// A run that is ready for its first step.
pub(super) struct Started<'a> {
    pub(super) run: &'a Run<'a>,
    pub(super) trainer: Trainer<'a>,
}

impl<'a> Started<'a> {
    /// Writes the files that are known before the first step, opens the sinks and starts sampling the machine.
    pub(super) fn new(
        run: &'a Run<'a>,
        data: &'a Dataset,
        mut step: TrainStep,
        hosts: &[String],
        resumed: Option<Resumed>,
    ) -> Result<Self, Failure> {
        let Run { args, prepared, dir, place, stop, process_start, .. } = run;
        let Prepared { recipe, device, .. } = prepared;
        let checkpoints = Checkpoints::new(&recipe.output_dir, &recipe.checkpoint);
        let task = Task::open(&recipe.eval.task, data).map_err(data_failure)?;
        let rollouts = prepared.rollouts(data)?.map(|rollouts| rollouts.with_log(dir.path().join(REWARDS_LOG)));
        let inputs = inputs(prepared, data)?;
        let earlier = earlier(run, resumed.as_ref());
        let (rate, total_steps) = (recipe.optimizer.learning_rate, overview::total_steps(recipe, data));
        let schedule = Schedule::new(&recipe.scheduler, rate, total_steps);

        let gpu = device.cuda.as_ref().filter(|_| place.size > 1);
        let connected = gpu.map(|gpu| step.ranks().connect_gpus(gpu.ordinal)).transpose();
        let between_gpus = connected.as_ref().ok().and_then(Option::as_deref);

        // From here on this writes to the folder, so a signal waits for a checkpoint.
        stop.defer();
        if !args.tui && place.size == 1 {
            stop.answer();
        }
        let mut sinks =
            open_sinks(run, resumed.as_ref(), earlier.num_starts + 1, schedule.total_steps(), between_gpus)?;
        write_files(run, &step, resumed.is_some())?;
        overview::note(prepared, data, &schedule, &mut sinks);
        note_ranks(run, &mut step, hosts, connected.as_ref().map(Option::as_deref), &mut sinks);
        dir.warning().into_iter().for_each(|warning| sinks.warn(warning));
        let telemetry = start_telemetry(prepared, &mut sinks);
        // The first one reports, and changes what is in the folder.
        if place.is_first() {
            report_resumed(run, resumed.as_ref(), (&inputs, &checkpoints), (&schedule, data), &mut sinks)?;
        }

        let facts = facts(prepared, data, &telemetry, !step.model().place().pads_rows());
        let (flops, precision) = (prepared.flops(step.model()), recipe.train.precision.dtype());
        let recorder = Recorder::new(flops, device, telemetry, precision, facts, earlier, *process_start);
        let state = TrainerState::new(row_order(recipe, data), inputs, step.counters());
        let begun = resumed.as_ref().map(|resumed| Shipped::read(&resumed.checkpoint)).transpose()?.flatten();
        let done = resumed.as_ref().map_or(0, |resumed| resumed.state.step);
        let shipping = shipping(prepared, schedule.total_steps(), done, begun);
        let (state, saver) = continued(run, data, state, checkpoints, resumed);
        let evaluator = Evaluator { config: recipe.eval.clone(), task, best_by: recipe.best_by() };
        let trainer = Trainer {
            step,
            state,
            evaluator,
            watchdog: recipe.watchdog,
            schedule,
            shipping,
            rollouts,
            data,
            stop,
            recorder,
            saver,
            sinks,
        };
        Ok(Self { run, trainer })
    }
}

/// The totals of the starts before this one.
fn earlier(Run { args, dir, .. }: &Run<'_>, resumed: Option<&Resumed>) -> Totals {
    let mut earlier = resumed.map(|resumed| resumed.state.totals).unwrap_or_default();
    // Count starts that ended without a checkpoint too.
    if !args.overwrite {
        earlier.num_starts = earlier.num_starts.max(dir.num_starts());
    }
    earlier
}

/// Writes what is known before the first step.
fn write_files(run: &Run<'_>, step: &TrainStep, is_resumed: bool) -> Result<(), Failure> {
    let Run { prepared: Prepared { recipe, memory, .. }, dir, .. } = run;
    dir.write_recipe(&run.given, &recipe.to_toml())?;
    if let Some(folder) = recipe.lora.start_from.as_deref().filter(|_| !is_resumed && step.needs_reference()) {
        dir.keep_reference(&find_adapter(folder))?;
    }
    dir.write_json("memory_plan.json", &memory.plan)
}

/// Says between which ranks gradients go, and how.
fn note_ranks(
    Run { prepared, place, .. }: &Run<'_>,
    step: &mut TrainStep,
    hosts: &[String],
    between_gpus: Result<Option<&str>, &String>,
    sinks: &mut Sinks,
) {
    if place.size > 1 {
        let device = step.model().device();
        let measured = measure(step.ranks(), prepared.num_trainable(), &device);
        sinks.note(&place.about(hosts, between_gpus.ok().flatten(), &measured));
    }
    if let Err(reason) = between_gpus {
        sinks.warn(&format!("gradients go from GPU to GPU through host memory: {reason}"));
    }
}

/// The state that training goes on from, and what saves it.
fn continued(
    run: &Run<'_>,
    data: &Dataset,
    state: TrainerState,
    checkpoints: Checkpoints,
    resumed: Option<Resumed>,
) -> (TrainerState, Saver) {
    let recipe = &run.prepared.recipe;
    let files = adapter_files(&run.prepared, data);
    let mut saver = Saver::new(recipe.checkpoint.clone(), checkpoints, files, recipe.to_toml());
    if !run.place.is_first() {
        saver = saver.silent();
    }
    match resumed {
        None => (state, saver),
        Some(Resumed { state: resumed, sound, .. }) => {
            (TrainerState { order: state.order, inputs: state.inputs, trouble: None, ..resumed }, saver.resumed(sound))
        }
    }
}

/// Moves the files of a killed start into a folder of their own, and opens the sinks.
/// `between_gpus`: what sums gradients there.
fn open_sinks(
    run: &Run<'_>,
    resumed: Option<&Resumed>,
    starts: u64,
    total_steps: u64,
    between_gpus: Option<&str>,
) -> Result<Sinks, Failure> {
    let Run { args, prepared: Prepared { recipe, device, .. }, dir, place, stop, .. } = run;
    let start = if resumed.is_some() { Start::Resume } else { Start::Fresh };
    if args.overwrite && place.is_first() {
        dir.clear()?;
    }
    let superseded = match start {
        Start::Fresh => dir.supersede_killed()?,
        Start::Resume => None,
    };
    dir.reopen(start)?;
    let exchange = between_gpus.or((place.size > 1).then_some(&place.library));
    dir.write_json(ENVIRONMENT_FILE, &environment(device, starts, exchange))?;
    let options = SinkOptions {
        run_dir: dir.path(),
        resume_step: resumed.map(|resumed| resumed.state.step),
        has_evaluated: resumed.is_some_and(|resumed| resumed.state.evaluations.last_step == Some(resumed.state.step)),
        total_steps,
        eval_steps: recipe.eval.eval_steps,
        shows: match args {
            _ if !place.is_first() => Shows::Nothing,
            args if args.quiet => Shows::Warnings,
            args if args.tui => Shows::Dashboard,
            _ => Shows::All,
        },
        has_rollouts: recipe.objective.name == ObjectiveName::Grpo && recipe.logging.rollouts.number() > 0,
        interrupter: stop.interrupter().clone(),
    };
    let mut sinks = Sinks::open(&recipe.logging, options).map_err(Failure::running)?;
    if let Some(folder) = superseded {
        let shown = folder.display();
        sinks.warn(&format!("an earlier start that left no checkpoint was here; its files are now in {shown}"));
    }
    sinks.delete_with_first_step(dir.earlier_end());
    sinks.recipe(resumed.map_or(0, |resumed| resumed.state.step), &recipe.to_toml());
    if run.is_in_notebook {
        let command = args.resume_command(dir.path());
        sinks.note(&format!("stopping the cell saves a checkpoint, from which this goes on: {command}"));
    }
    Ok(sinks)
}

/// Reports from where the run goes on, if it was asked to.
fn report_resumed(
    run: &Run<'_>,
    resumed: Option<&Resumed>,
    (inputs, checkpoints): (&Inputs, &Checkpoints),
    (schedule, data): (&Schedule, &Dataset),
    sinks: &mut Sinks,
) -> Result<(), Failure> {
    if let Some(resumed) = resumed {
        resumed.report(inputs, checkpoints, &run.prepared.recipe.output_dir, sinks)?;
        resumed.jump(schedule, data).iter().for_each(|jump| sinks.warn(jump));
        let (done, asked) = (resumed.state.step, schedule.total_steps());
        if done >= asked {
            sinks.warn(&format!(
                "{done} steps are made and the recipe asks for {asked}: the adapter is written as it is"
            ));
        }
    } else if run.args.resume.is_some() {
        let folder = checkpoints.folder().display();
        sinks.warn(&format!("--resume: there is no checkpoint in {folder} yet, so training starts at the beginning"));
    }
    Ok(())
}

/// What is written beside the numbers of an adapter.
fn adapter_files(prepared: &Prepared, data: &Dataset) -> AdapterFiles {
    let Prepared { recipe, source, lora, .. } = prepared;
    AdapterFiles {
        lora: lora.written(),
        base_model_name_or_path: recipe.model.path.clone(),
        prompt_form: prompt_form(recipe, data),
        tokenizer: Some(source.tokenizer_source().to_owned()).filter(|folder| folder.is_dir()),
    }
}

/// Starts sampling the machine; reports what is sampled and what is not.
fn start_telemetry(prepared: &Prepared, sinks: &mut Sinks) -> Telemetry {
    let interval = prepared.recipe.logging.gpu_sample_ms;
    let telemetry = Telemetry::start(interval, nvml_selector(&prepared.device));
    if let Some(gpu) = telemetry.gpu() {
        sinks.note(&format!("GPU figures are those of {gpu}"));
    }
    if let Some(notice) = telemetry.notice() {
        sinks.note(notice);
    }
    telemetry
}

/// The form in which rows are passed to the model, so that prompts can use the same form.
fn prompt_form(recipe: &Recipe, data: &Dataset) -> PromptForm {
    // The model's own template is stored with the model.
    let is_own = recipe.data.chat_template == "auto";
    data.template().map_or(PromptForm::Raw, |template| PromptForm::ChatTemplate {
        chat_template: (!is_own).then(|| template.source().to_owned()),
        system: recipe.data.system.clone(),
    })
}

/// Digests of the inputs, so that a resumed run can compare them.
fn inputs(prepared: &Prepared, data: &Dataset) -> Result<Inputs, Failure> {
    Ok(Inputs {
        train_rows: Some(Inputs::hexadecimal(data.train_digest().map_err(data_failure)?)),
        tokenizer: Some(Inputs::hexadecimal(data.tokenizer().digest())),
        chat_template: data.template().and_then(ChatTemplate::identity).map(Inputs::hexadecimal),
        weights: prepared.source.weights.digest().map(Inputs::hexadecimal),
    })
}

/// Sums the gradients of so many parameters over the ranks.
fn measure(ranks: &mut dyn Ranks, num_parameters: usize, device: &Device) -> MeasuredSum {
    let mut seconds = |times: u32| {
        let mut gradients = Tensor::zeros([num_parameters], (device, DType::F32));
        ranks.wait_long();
        ranks.agree(false);
        ranks.take_seconds();
        for _ in 0..times {
            gradients = ranks.sum_all(gradients, &mut []).swap_remove(0);
        }
        let mut mean = [ranks.take_seconds() / f64::from(times)];
        ranks.sum(&mut [], &mut mean);
        mean[0] / as_f64(ranks.size())
    };
    // The first one connects the ranks.
    seconds(1);
    let one = seconds(1);
    let times = as_u64((MEASURED_SECONDS / one).clamp(1.0, 20.0));
    let (bytes, before) = (4 * num_parameters as u64, sent_bytes());
    let seconds = seconds(u32::try_from(times).unwrap_or(1));
    MeasuredSum { bytes, seconds, interface: busiest(&before, sent_bytes(), times * bytes / 2) }
}

/// The facts about recipe and machine that the diagnosis rules use.
fn facts(prepared: &Prepared, data: &Dataset, telemetry: &Telemetry, leaves_padding_out: bool) -> Facts {
    let Prepared { recipe, source, selection, device, images, memory, .. } = prepared;
    let config = &source.config;
    let host_memory_bytes = total_host_memory_bytes();
    let workload = workload(recipe, config, selection, images, place_on(device.kind));
    let peak = |gradient_checkpointing| Workload { gradient_checkpointing, ..workload.clone() }.plan().peak_bytes;
    let own = workload.plan();
    let doubled_peak = Workload { rows: 2 * workload.rows, ..workload.clone() }.plan().peak_bytes;
    // If checkpointing is off, the memory with checkpointing; otherwise the memory of the chosen kind.
    let least = match recipe.train.gradient_checkpointing {
        GradientCheckpointing::Off | GradientCheckpointing::Blocks(_) => peak(GradientCheckpointing::On),
        _ => own.peak_bytes,
    };
    // Rows are read from the tokenised copy of a file, where there is one.
    let size = |file: &FileInfo| match file.kept_tokens {
        Some(kept) => Some(kept.bytes),
        None => std::fs::metadata(&file.path).map(|metadata| metadata.len()).ok(),
    };
    let sizes = data.files().iter().filter(|file| !file.is_eval).map(size);
    let eval_batches = data.num_eval_batches(recipe.train.micro_batch_size, recipe.eval.max_batches) as u64;
    Facts {
        data: recipe.data.clone(),
        train: recipe.train.clone(),
        eval: recipe.eval.clone(),
        checkpoint: recipe.checkpoint.clone(),
        logging: recipe.logging.clone(),
        is_gpu: device.is_gpu(),
        leaves_padding_out,
        num_cpu_threads: num_cpu_threads() as u64,
        total_steps: Some(overview::total_steps(recipe, data)),
        max_positions: config.max_position_embeddings as u64,
        data_bytes: sizes.sum(),
        weights_read_bytes: own.read_bytes_per_step.map(|bytes| bytes as u64),
        decides_checkpointing: memory.checkpointing.is_some(),
        eval_batches: (eval_batches > 0).then_some(eval_batches),
        gradient_bytes: Some(4 * prepared.num_trainable() as u64),
        max_sm_clock_mhz: telemetry.max_sm_clock_mhz(),
        power_limit_watts: telemetry.power_limit_watts(),
        default_power_limit_watts: telemetry.default_power_limit_watts(),
        device_memory_bytes: if device.is_gpu() {
            device.cuda.as_ref().map(|gpu| gpu.memory_bytes)
        } else {
            host_memory_bytes
        },
        host_memory_bytes,
        activation_bytes: peak(GradientCheckpointing::Off).checked_sub(least).map(|bytes| bytes as u64),
        doubling_bytes: doubled_peak.checked_sub(own.peak_bytes).map(|bytes| bytes as u64),
        block_parameters: config.num_block_weights() as u64,
        head_parameters: (config.vocab_size * config.hidden_size) as u64,
    }
}
