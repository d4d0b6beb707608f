//! The adapter that training starts from, and what a recipe may say beside it.

use std::path::Path;

use crate::config::LoraConfig;
use crate::lora::targets::AdapterShape;
use crate::save::checkpoint::Checkpoints;
use crate::save::export::{SavedAdapter, find_adapter, read_adapter};
use crate::schema::{Problem, Section};
use crate::spec::{DELTA_NET_NAMES, FUSED_NAMES, PerSite, SITE_NAMES, SiteId};

/// Copies the value of a key.
type Copy = fn(&mut LoraConfig, &LoraConfig);

/// The keys that decide which matrices an adapter has, and their scale.
const SHAPE: [(&str, Copy); 10] = [
    ("r", |to, from| to.r = from.r),
    ("lora_alpha", |to, from| to.lora_alpha = from.lora_alpha),
    ("target_modules", |to, from| to.target_modules = from.target_modules.clone()),
    ("exclude_modules", |to, from| to.exclude_modules.clone_from(&from.exclude_modules)),
    ("layers_pattern", |to, from| to.layers_pattern.clone_from(&from.layers_pattern)),
    ("use_rslora", |to, from| to.use_rslora = from.use_rslora),
    ("use_dora", |to, from| to.use_dora = from.use_dora),
    ("layers_to_transform", |to, from| to.layers_to_transform.clone_from(&from.layers_to_transform)),
    ("rank_pattern", |to, from| to.rank_pattern.clone_from(&from.rank_pattern)),
    ("alpha_pattern", |to, from| to.alpha_pattern.clone_from(&from.alpha_pattern)),
];

/// More layers than any model has: a saved adapter does not say how many its model has.
const MANY_LAYERS: usize = 512;

/// The layers of [`SITE_NAMES`] that some families have fused.
const SPLIT: [SiteId; 5] = [0, 1, 2, 4, 5];

/// The first layer of linear attention, which some families have beside the others.
const LINEAR: SiteId = SITE_NAMES.len() + FUSED_NAMES.len();
/// The layer behind them, of a shared expert.
const SHARED: SiteId = LINEAR + DELTA_NET_NAMES.len();

/// Takes rank, scale and layers of `lora.start_from`, and its dropout where the recipe has none. A key that says
/// otherwise is a mistake. Where that folder is gone, the checkpoints of the run in `resumed` say the same.
pub(super) fn take_over(lora: &mut LoraConfig, root: &mut Section<'_>, resumed: Option<&Path>) {
    let Some(folder) = lora.start_from.as_deref().map(find_adapter) else { return };
    let read = read_adapter(&folder).or_else(|error| resumed.and_then(of_checkpoint).ok_or(error));
    let saved = match read {
        Ok(saved) => saved.config,
        Err(error) => {
            for problem in Problem::list(&error) {
                let message = format!("`lora.start_from`: {}", problem.message);
                root.reject("lora.start_from", Problem { message, ..problem });
            }
            return;
        }
    };
    let of_saved = shapes(&saved);
    let has =
        |is_such: &dyn Fn(SiteId) -> bool| of_saved.iter().flatten().flat_map(PerSite::keys).any(|site| is_such(*site));
    let (has_split, has_shared) = (has(&|site| SPLIT.contains(&site)), has(&|site| site == SHARED));
    let has_linear = has(&|site| (LINEAR..SHARED).contains(&site));
    // A model has layers for queries, keys and values, gate and up, or one for each group of them.
    let exists = |site: SiteId| match site {
        SHARED => has_shared,
        LINEAR.. => has_linear,
        _ if has_split => site < SITE_NAMES.len(),
        _ => !SPLIT.contains(&site),
    };
    let in_model = |mut shapes: Option<Vec<PerSite<AdapterShape>>>| {
        shapes.iter_mut().flatten().for_each(|shapes| shapes.retain(|site, _| exists(*site)));
        shapes
    };
    let of_saved = in_model(of_saved);
    for (name, copy) in SHAPE {
        let key = format!("lora.{name}");
        let mut asked_for = saved.clone();
        copy(&mut asked_for, lora);
        if root.has(&key) && in_model(shapes(&asked_for)) != of_saved {
            let message = format!("`{key}` contradicts the adapter of `lora.start_from`{}", shown(&saved, name));
            root.reject(&key, Problem::new(message).hint("take it out: the adapter's own is used"));
        }
        copy(lora, &saved);
    }
    if !root.has("lora.lora_dropout") {
        lora.lora_dropout = saved.lora_dropout;
    }
}

/// The adapter in the newest checkpoint of a run.
fn of_checkpoint(run: &Path) -> Option<SavedAdapter> {
    let newest = Checkpoints::of_folder(&run.join("checkpoints")).newest_good().ok()?;
    read_adapter(&newest.checkpoint?).ok()
}

/// The matrices that a section selects; `None` where it is wrong, which is reported elsewhere.
fn shapes(lora: &LoraConfig) -> Option<Vec<PerSite<AdapterShape>>> {
    lora.select_of_any(MANY_LAYERS).ok().map(|selection| selection.shapes)
}

/// The value of a key, as TOML.
fn shown(lora: &LoraConfig, key: &str) -> String {
    let value = toml::Value::try_from(lora).ok().and_then(|table| Some(table.get(key)?.to_string()));
    value.map(|value| format!(", which has {value}")).unwrap_or_default()
}
