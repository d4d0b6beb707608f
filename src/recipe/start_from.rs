//! The adapter that training starts from, and what a recipe may say beside it.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use crate::config::{LoraConfig, ModelOptions, ObjectiveConfig, TargetModules};
use crate::hub::{self, HubSettings, Progress};
use crate::lora::FullTensor;
use crate::lora::targets::AdapterShape;
use crate::save::checkpoint::Checkpoints;
use crate::save::export::{SavedAdapter, find_adapter, read_adapter};
use crate::schema::{Problem, Section};
use crate::spec::{ModelConfig, PerSite};

/// Copies the value of a key.
type Copy = fn(&mut LoraConfig, &LoraConfig);

/// The keys that decide which matrices an adapter has, and their scale.
const SHAPE: [(&str, Copy); 13] = [
    ("r", |to, from| to.r = from.r),
    ("lora_alpha", |to, from| to.lora_alpha = from.lora_alpha),
    ("target_modules", |to, from| to.target_modules = from.target_modules.clone()),
    ("exclude_modules", |to, from| to.exclude_modules.clone_from(&from.exclude_modules)),
    ("layers_pattern", |to, from| to.layers_pattern.clone_from(&from.layers_pattern)),
    ("use_rslora", |to, from| to.use_rslora = from.use_rslora),
    ("use_dora", |to, from| to.use_dora = from.use_dora),
    ("layers_to_transform", |to, from| to.layers_to_transform.clone_from(&from.layers_to_transform)),
    ("rank_pattern", |to, from| to.rank_pattern.clone_from(&from.rank_pattern)),
    ("trainable_token_indices", |to, from| to.trainable_token_indices.clone_from(&from.trainable_token_indices)),
    ("modules_to_save", |to, from| to.modules_to_save.clone_from(&from.modules_to_save)),
    ("expert_rank", |to, from| to.expert_rank = from.expert_rank),
    ("alpha_pattern", |to, from| to.alpha_pattern.clone_from(&from.alpha_pattern)),
];

/// More layers than any model has: a saved adapter does not say how many its model has.
const MANY_LAYERS: usize = 512;

/// Takes rank, scale and layers of `lora.start_from`, and its dropout where the recipe has none. A key that says
/// otherwise is a mistake. Where that folder is gone, the checkpoints of the run in `resumed` say the same.
pub(super) fn take_over(
    lora: &mut LoraConfig,
    model: &ModelOptions,
    objective: &ObjectiveConfig,
    root: &mut Section<'_>,
    resumed: Option<&Path>,
) {
    let Some((folder, read)) = read(lora, objective, root, resumed) else { return };
    let path = Path::new(&model.path);
    let mut model = path.exists().then(|| ModelConfig::from_model(path).ok()).flatten();
    let read = model.as_ref().map_or_else(|| read.clone(), |model| read.clone().named_for(model));
    model.iter_mut().for_each(|model| drop(read.grow(model, path, &folder)));
    let saved = model.as_ref().map_or_else(|| read.config.clone(), |model| read.config.known_in(model));
    let of_saved = shapes(&saved, model.as_ref());
    let whole = |lora: &LoraConfig| {
        // Which modules these are, only the model says.
        let names = lora.modules_to_save.iter().flatten().filter(|_| model.is_none()).cloned();
        let tokens = lora.trainable_token_indices.iter().flatten().copied();
        (tokens.collect::<BTreeSet<_>>(), names.collect::<BTreeSet<_>>())
    };
    for (name, copy) in SHAPE {
        let key = format!("lora.{name}");
        let mut asked_for = saved.clone();
        copy(&mut asked_for, lora);
        // Which layers these are, only the model says.
        let is_unknown = model.is_none() && name == "target_modules" && lora.target_modules == TargetModules::AllLinear;
        let is_same = shapes(&asked_for, model.as_ref()) == of_saved && whole(&asked_for) == whole(&saved);
        if root.has(&key) && !is_unknown && !is_same {
            let message = format!("`{key}` contradicts the adapter of `lora.start_from`{}", shown(&saved, name));
            root.reject(&key, Problem::new(message).hint("take it out: the adapter's own is used"));
        }
        copy(lora, &saved);
    }
    if !root.has("lora.lora_dropout") {
        lora.lora_dropout = saved.lora_dropout;
    }
}

/// The adapter of `lora.start_from`, which is found first where it is on the Hub, and its folder.
fn read(
    lora: &mut LoraConfig,
    objective: &ObjectiveConfig,
    root: &mut Section<'_>,
    resumed: Option<&Path>,
) -> Option<(PathBuf, SavedAdapter)> {
    let of_checkpoint = resumed.and_then(of_checkpoint);
    if let Some(name) = lora.start_from.clone().filter(|folder| !folder.exists()) {
        let settings = HubSettings::from_env();
        match hub::resolve_adapter(&name.display().to_string(), None, &settings, Progress::detect(true)) {
            Ok(found) => lora.start_from = Some(found.unwrap_or(name)),
            // The checkpoint has everything.
            Err(_) if of_checkpoint.is_some() => {}
            Err(error) => {
                root.reject("lora.start_from", Problem::new(format!("`lora.start_from`: {error}")));
                return None;
            }
        }
    }
    let folder = lora.start_from.as_deref().map(find_adapter)?;
    let read = read_adapter(&folder).or_else(|error| of_checkpoint.ok_or(error));
    let read = read.and_then(|saved| if objective.scores() { Ok(saved) } else { Ok(saved.that_writes(&folder)?) });
    match read {
        Ok(read) => Some((folder, read)),
        Err(error) => {
            for problem in Problem::list(&error) {
                let message = format!("`lora.start_from`: {}", problem.message);
                root.reject("lora.start_from", Problem { message, ..problem });
            }
            None
        }
    }
}

/// The adapter in the newest checkpoint of a run.
fn of_checkpoint(run: &Path) -> Option<SavedAdapter> {
    let newest = Checkpoints::of_folder(&run.join("checkpoints")).newest_good().ok()?;
    read_adapter(&newest.checkpoint?).ok()
}

/// What a section selects in the model, or in some model where it is not on this machine; `None` where it is wrong, which is
/// reported elsewhere.
fn shapes(lora: &LoraConfig, model: Option<&ModelConfig>) -> Option<(Vec<PerSite<AdapterShape>>, Vec<FullTensor>)> {
    let selection = match model {
        Some(model) => lora.select(model),
        None => lora.select_of_any(MANY_LAYERS),
    };
    selection.ok().map(|selection| (selection.shapes, selection.full.into_keys().collect()))
}

/// The value of a key, as TOML.
fn shown(lora: &LoraConfig, key: &str) -> String {
    let value = toml::Value::try_from(lora).ok().and_then(|table| Some(table.get(key)?.to_string()));
    value.map(|value| format!(", which has {value}")).unwrap_or_default()
}
