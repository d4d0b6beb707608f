//! The model's files, and the layers that the adapters match.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use super::findings::Findings;
use crate::data::tokenizer::Tokenizer;
use crate::hub::{self, HubError, HubSettings, Location, Progress, Wanted};
use crate::lora::config::LoraConfig;
use crate::model::weights::WeightFiles;
use crate::model::{Init, ModelOptions};
use crate::run::inputs::{config_alone, vocabulary_problem};
use crate::run::overview;
use crate::spec::ModelConfig;
use crate::text::with_commas;

/// The parts of a model that could be read.
#[derive(Debug, Default)]
pub(super) struct Model {
    pub(super) config: Option<ModelConfig>,
    pub(super) tokenizer: Option<Tokenizer>,
}

struct Files {
    folder: PathBuf,
    config: PathBuf,
    has_weights: bool,
}

/// Reads config, tokenizer and the headers of the weights.
pub(super) fn examine(options: &ModelOptions, findings: &mut Findings) -> Model {
    let files = match find(options) {
        Ok(files) => files,
        Err(error) => {
            findings.error(&error);
            return Model::default();
        }
    };
    let config = ModelConfig::from_file(&files.config).map_err(|error| findings.error(&error)).ok();
    let weights = match options.init {
        Init::Random => "weights drawn at random".to_owned(),
        Init::Pretrained if files.has_weights => examine_weights(&files.folder, config.as_ref(), findings),
        Init::Pretrained => {
            findings.warn(format!(
                "the weights of {} are not in the cache: training begins with their download",
                options.path
            ));
            "weights not downloaded yet".to_owned()
        }
    };
    let tokenizer = Tokenizer::open(&files.folder).map_err(|error| findings.error(&error)).ok();
    if let Some(warning) = tokenizer.as_ref().and_then(Tokenizer::class_warning) {
        findings.warn(warning);
    }
    if let Some(config) = &config {
        let ModelConfig { model_type, num_hidden_layers, hidden_size, .. } = config;
        let parameters = with_commas(config.num_parameters());
        findings.fact(
            "model",
            format!(
                "{} ({model_type}, {num_hidden_layers} layers of width {hidden_size}, {parameters} parameters, {weights})",
                options.path
            ),
        );
        let problem = tokenizer.as_ref().and_then(|tokenizer| vocabulary_problem(&files.folder, tokenizer, config));
        problem.into_iter().for_each(|problem| findings.problem(problem));
    }
    Model { config, tokenizer }
}

/// Finds the files of a model. For a repository that is not in the cache, it downloads only config and tokenizer.
fn find(options: &ModelOptions) -> Result<Files, HubError> {
    if let Some((folder, config)) = config_alone(options) {
        return Ok(Files { folder, config, has_weights: false });
    }
    let resolve = |wanted, settings: &HubSettings| {
        hub::resolve(&options.path, options.revision.as_deref(), wanted, settings, Progress::detect(false))
    };
    let settings = HubSettings::from_env();
    let offline = HubSettings { offline: true, ..settings.clone() };
    let (folder, has_weights) = match (Location::parse(&options.path)?, resolve(Wanted::Model, &offline)) {
        (_, Ok(folder)) => (folder, true),
        (Location::Repository(_), Err(_)) if !settings.offline => (resolve(Wanted::WithoutWeights, &settings)?, false),
        (_, Err(error)) => return Err(error),
    };
    Ok(Files { config: folder.join("config.json"), folder, has_weights })
}

/// Reads the headers of the weights and returns their storage types.
fn examine_weights(folder: &Path, config: Option<&ModelConfig>, findings: &mut Findings) -> String {
    let weights = match WeightFiles::open(folder) {
        Ok(weights) => weights,
        Err(error) => {
            findings.error(&error);
            return "weights not readable".to_owned();
        }
    };
    if let Some(Err(error)) = config.map(|config| weights.check(config)) {
        findings.error(&error);
    }
    let types: BTreeSet<String> =
        weights.tensors().values().map(|tensor| format!("{:?}", tensor.dtype).to_lowercase()).collect();
    format!("stored as {}", types.into_iter().collect::<Vec<_>>().join(" and "))
}

/// Looks for the layers that the adapters target.
pub(super) fn examine_adapters(lora: &LoraConfig, config: &ModelConfig, findings: &mut Findings) {
    let selection = match lora.select(config.num_hidden_layers) {
        Ok(selection) => selection,
        Err(errors) => return errors.iter().for_each(|error| findings.error(error)),
    };
    findings.facts.extend([overview::layers(&selection), overview::parameters(&selection, config)]);
}
