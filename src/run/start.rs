//! Makes a trainer of rows and weights: opens the folder's files, sinks and telemetry, and restores the state.

use super::Run;
use super::dir::Start;
use super::environment::Environment;
use super::facts::facts;
use super::inputs::nvml_selector;
use super::load::row_order;
use super::overview;
use super::prepare::Prepared;
use super::resume::Resumed;
use crate::checkpoint::Checkpoints;
use crate::data::pipeline::DataPipeline;
use crate::data::template::ChatTemplate;
use crate::export::PromptForm;
use crate::failure::Failure;
use crate::metrics::{SinkOptions, Sinks};
use crate::recipe::Recipe;
use crate::telemetry::Telemetry;
use crate::train::flops::StepFlops;
use crate::train::recorder::Recorder;
use crate::train::saver::{AdapterFiles, Saver};
use crate::train::schedule::Schedule;
use crate::train::state::{Inputs, TrainerState};
use crate::train::step::TrainStep;
use crate::train::trainer::Trainer;

impl<'a> Run<'a> {
    /// Writes the files that are known before the first step, opens the sinks and starts sampling the machine. `given`
    /// is the text of the recipe's file.
    ///
    /// # Errors
    ///
    /// Files that cannot be written.
    pub(super) fn start(&self, step: TrainStep, resumed: Option<Resumed>, given: &str) -> Result<Trainer<'a>, Failure> {
        let Self { args, prepared, dir, data, stop, process_start } = *self;
        let Prepared { recipe, source, device, memory, .. } = prepared;
        let checkpoints = Checkpoints::new(&recipe.output_dir, &recipe.checkpoint);
        let mut facts = facts(prepared, data, step.model().place() == crate::ops::place::Place::Cpu);
        let inputs = inputs(self);
        let mut earlier = resumed.as_ref().map(|resumed| resumed.state.totals).unwrap_or_default();
        // Count starts that ended without a checkpoint too.
        earlier.num_starts = earlier.num_starts.max(dir.num_starts());
        let rate = recipe.optimizer.learning_rate;
        let schedule = Schedule::new(&recipe.scheduler, rate, overview::total_steps(recipe, data));

        // From here on this writes to the folder, so a signal waits for a checkpoint.
        stop.defer();
        let mut sinks = self.open_sinks(resumed.as_ref(), earlier.num_starts + 1, schedule.total_steps())?;
        self.write_recipe(given)?;
        dir.write_memory_plan(&memory.plan).map_err(Failure::running)?;
        overview::note(prepared, data, &schedule, &mut sinks);
        for warning in memory.warning.iter().map(String::as_str).chain(dir.warning()) {
            sinks.warn(warning);
        }
        let telemetry = self.start_telemetry(&mut sinks);
        if let Some(resumed) = &resumed {
            resumed.report(&inputs, &checkpoints, &recipe.output_dir, &mut sinks)?;
        } else if args.resume.is_some() {
            let folder = checkpoints.folder().display();
            sinks.note(&format!(
                "--resume: there is no checkpoint in {folder} yet, so training starts at the beginning"
            ));
        }

        facts.max_sm_clock_mhz = telemetry.max_sm_clock_mhz();
        facts.power_limit_watts = telemetry.power_limit_watts();
        facts.default_power_limit_watts = telemetry.default_power_limit_watts();
        let flops = StepFlops::new(&source.config, prepared.num_trainable());
        let precision = recipe.train.precision;
        let recorder = Recorder::new(flops, device, telemetry, precision, facts, earlier, process_start);
        let adapter_files = AdapterFiles {
            lora: recipe.lora.clone(),
            base_model_name_or_path: recipe.model.path.clone(),
            prompt_form: prompt_form(recipe, data),
        };
        let mut saver = Saver::new(recipe.checkpoint.clone(), checkpoints, adapter_files, recipe.to_toml());
        let mut state = TrainerState::new(row_order(recipe, data), inputs, step.counters());
        if let Some(Resumed { state: resumed, sound, .. }) = resumed {
            state = TrainerState { order: state.order, inputs: state.inputs, trouble: None, ..resumed };
            saver = saver.resumed(sound);
        }
        let (train, eval, watchdog) = (recipe.train.clone(), recipe.eval.clone(), recipe.watchdog);
        Ok(Trainer { step, state, train, eval, watchdog, schedule, data, stop, recorder, saver, sinks })
    }

    /// Moves the files of a killed start aside, and opens the sinks.
    fn open_sinks(&self, resumed: Option<&Resumed>, starts: u64, total_steps: u64) -> Result<Sinks, Failure> {
        let (recipe, device, dir) = (&self.prepared.recipe, &self.prepared.device, self.dir);
        let start = if resumed.is_some() { Start::Resume } else { Start::Fresh };
        let superseded = match start {
            Start::Fresh => dir.supersede_killed().map_err(Failure::running)?,
            Start::Resume => None,
        };
        dir.reopen(start).map_err(Failure::running)?;
        let environment =
            Environment { starts, gpu: device.cuda.clone(), ..Environment::of_this_process(&device.label) };
        dir.write_environment(&environment).map_err(Failure::running)?;
        let options = SinkOptions {
            run_dir: dir.path(),
            resume_step: resumed.map(|resumed| resumed.state.step),
            has_evaluated: resumed
                .is_some_and(|resumed| resumed.state.evaluations.last_step == Some(resumed.state.step)),
            total_steps,
            quiet: self.args.quiet,
            tui: self.args.tui,
            interrupter: self.stop.interrupter().clone(),
        };
        let mut sinks = Sinks::open(&recipe.logging, options).map_err(Failure::running)?;
        if let Some(folder) = superseded {
            let shown = folder.display();
            sinks.warn(&format!("an earlier start that left no checkpoint was here; its files are now in {shown}"));
        }
        sinks.delete_with_first_step(dir.earlier_end());
        sinks.recipe(resumed.map_or(0, |resumed| resumed.state.step), &recipe.to_toml());
        Ok(sinks)
    }

    /// Writes the recipe into the run's folder as it was read: its file may have changed while the model was loaded.
    fn write_recipe(&self, given: &str) -> Result<(), Failure> {
        let args = &self.args.recipe;
        let device = args.device.iter().map(|name| format!("--device {name}"));
        let changes: Vec<String> = args.set.iter().map(|change| format!("--set {change}")).chain(device).collect();
        self.dir.write_recipe(given, &changes, &self.prepared.recipe.to_toml()).map_err(Failure::running)
    }

    /// Starts sampling the machine; reports what is sampled and what is not.
    fn start_telemetry(&self, sinks: &mut Sinks) -> Telemetry {
        let Prepared { recipe, device, .. } = self.prepared;
        let telemetry = Telemetry::start(recipe.logging.gpu_sample_ms, nvml_selector(device));
        if let Some(gpu) = telemetry.gpu() {
            sinks.note(&format!("GPU figures are those of {gpu}"));
        }
        if let Some(notice) = telemetry.notice() {
            sinks.note(notice);
        }
        telemetry
    }
}

/// The form in which rows are passed to the model, so that prompts can use the same form.
fn prompt_form(recipe: &Recipe, data: &DataPipeline) -> PromptForm {
    // The model's own template is stored with the model.
    let is_own = recipe.data.chat_template == "auto";
    data.template().map_or(PromptForm::Raw, |template| PromptForm::ChatTemplate {
        chat_template: (!is_own).then(|| template.source().to_owned()),
    })
}

/// Digests of the inputs, so that a resumed run can compare them.
fn inputs(run: &Run<'_>) -> Inputs {
    let (source, data) = (&run.prepared.source, run.data);
    let hexadecimal = |digest: [u8; 32]| digest.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    Inputs {
        train_rows: Some(hexadecimal(data.train_digest())),
        tokenizer: Some(hexadecimal(data.tokenizer().digest())),
        chat_template: data.template().and_then(ChatTemplate::identity).map(hexadecimal),
        weights: source.weights.digest().map(hexadecimal),
    }
}
