//! Section `[logging]` of a recipe.

use serde::{Serialize, Serializer};

use crate::schema::{Problem, Section, Value, section};

/// The variable that names the server where the recipe does not.
const URI_VARIABLE: &str = "MLFLOW_TRACKING_URI";

section! {
    /// Section `[logging]` of a recipe.
    #[derive(Eq)]
    pub struct LoggingConfig then check {
        /// Steps between two lines on the console. metrics.jsonl and TensorBoard get every step.
        logging_steps: u64 = 1 => count(1..),
            ["log_steps", "steps_per_report", "log_every_n_steps", "log_interval", "log_every", "logging_strategy",
             "steps", "every", "interval", "every_n_steps"];
        /// Write TensorBoard event files.
        tensorboard: bool = true => boolean(), ["use_tensorboard", "report_to", "use_tb", "log_with"];
        /// Write answers of "grpo" to rollouts.jsonl, with their rewards: `true`, `false`, or at most this many of those that are written
        /// together.
        rollouts: MostRollouts = MostRollouts::All => any("true, false or a whole number", MostRollouts::accept), ["log_completions"];
        /// Milliseconds between two samples of the GPU and the host, from 10; 0 turns them off.
        gpu_sample_ms: u64 = 100 => count(0..=60_000),
            ["sample_ms", "gpu_sample_interval_ms", "log_peak_memory_stats"];
        /// An MLflow server that gets the figures too. With one of the next two keys, `MLFLOW_TRACKING_URI` can name it.
        /// "none" turns it off.
        mlflow_tracking_uri: Option<String> = None => optional_string() like "http://127.0.0.1:5000";
        /// The experiment there; made where there is none of this name. By default the one named Default.
        mlflow_experiment_name: Option<String> = None => optional_string() like "my-experiment";
        /// The name of the run there. By default that of its folder.
        mlflow_run_name: Option<String> = None => optional_string() like "my-run";
    }
}

/// How many answers are recorded of those that are written together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MostRollouts {
    /// All of them.
    All,
    /// At most so many.
    Of(usize),
}

impl MostRollouts {
    fn accept(value: &Value) -> Result<Self, Option<String>> {
        match value {
            Value::Boolean(true) => Ok(Self::All),
            Value::Boolean(false) => Ok(Self::Of(0)),
            Value::Integer(number) => usize::try_from(*number).map(Self::Of).map_err(|_| None),
            _ => Err(None),
        }
    }

    /// The number.
    #[must_use]
    pub fn number(self) -> usize {
        match self {
            Self::All => usize::MAX,
            Self::Of(number) => number,
        }
    }
}

impl Serialize for MostRollouts {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::All => serializer.serialize_bool(true),
            Self::Of(0) => serializer.serialize_bool(false),
            Self::Of(number) => serializer.serialize_u64(*number as u64),
        }
    }
}

impl LoggingConfig {
    fn check(mut self, section: &mut Section) -> Self {
        self.check_mlflow(section);
        if (1..10).contains(&self.gpu_sample_ms) {
            let message = format!("`logging.gpu_sample_ms` = {}, expected 0 or 10 to 60000", self.gpu_sample_ms);
            section.reject("gpu_sample_ms", Problem::new(message).hint("0 turns sampling off"));
        }
        self
    }

    fn check_mlflow(&mut self, section: &mut Section) {
        if self.mlflow_tracking_uri.as_deref() == Some("none") {
            (self.mlflow_tracking_uri, self.mlflow_experiment_name, self.mlflow_run_name) = (None, None, None);
        }
        if self.mlflow_experiment_name.is_some() || self.mlflow_run_name.is_some() {
            let uri = self.mlflow_tracking_uri.take();
            self.mlflow_tracking_uri = uri.or_else(|| std::env::var(URI_VARIABLE).ok());
            if self.mlflow_tracking_uri.is_none() {
                let problem = Problem::new("an MLflow run without `logging.mlflow_tracking_uri`");
                let hint = "give the server's address there or in MLFLOW_TRACKING_URI";
                section.reject("mlflow_tracking_uri", problem.hint(hint));
            }
        }
        if let Some(uri) = self.mlflow_tracking_uri.as_ref().filter(|uri| !uri.starts_with("http")) {
            let message = format!("`logging.mlflow_tracking_uri` = {uri:?}, expected the http(s) address of a server");
            let problem = Problem::new(message).hint("`mlflow server` makes one of a file or a database");
            section.reject("mlflow_tracking_uri", problem);
        }
    }
}
