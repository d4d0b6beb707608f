//! `adamw` in the place of `adamw_8bit`, where that saves next to nothing: the moments of an adapter are small beside its base.

use std::path::Path;

use super::draft::Draft;
use crate::recipe::{Purpose, Recipe};
use crate::spec::{ModelConfig, shipped_config};
use crate::util::text::bytes;

const KEY: &str = "optimizer.name";

/// What eight bits must save of the moments, in bytes.
const WORTH_IT: u64 = 1 << 30;

/// Bytes of a parameter's moments: in `f32`, and in codes of eight bits.
const MOMENTS: [u64; 2] = [8, 2];

/// Sets `adamw` where a draft says `adamw_8bit` and has an adapter whose moments are known to be small: returns the key, and why.
pub(super) fn in_full(draft: &mut Draft) -> Option<(String, String)> {
    if draft.get(KEY)?.as_str() != Some("adamw_8bit") || draft.is_given(KEY) {
        return None;
    }
    let [full, eight] = MOMENTS.map(|of_parameter| num_trained(draft).map(|number| number * of_parameter));
    let (full, eight) = full.zip(eight).filter(|(full, eight)| full - eight <= WORTH_IT)?;
    let setting = draft.settings.iter_mut().find(|setting| setting.key == KEY)?;
    setting.value = "adamw".into();
    let [full, eight] = [full, eight].map(bytes);
    let why = format!(
        "adamw_8bit is adamw here: the moments of this adapter are {full}, in eight bits {eight}, at the price of time and digits"
    );
    Some((KEY.into(), why))
}

/// Parameters of the adapter; `None` where the shape of the model, or what is adapted, is not known.
fn num_trained(draft: &Draft) -> Option<u64> {
    let recipe = Recipe::parse(Path::new("recipe.toml"), &draft.text(), &[], Purpose::Benchmark).ok()?;
    let path = &recipe.model.path;
    // A copy whose weights are quantised has the shape of the model that it is named after.
    let named = path.strip_suffix("-bnb-4bit").unwrap_or(path);
    let named = named.strip_suffix("-unsloth").unwrap_or(named);
    let own = std::fs::read_to_string(Path::new(path).join("config.json")).ok();
    let config = ModelConfig::from_json(own.as_deref().or_else(|| shipped_config(named))?).ok()?;
    let selection = recipe.lora.select(&config).ok()?;
    u64::try_from(selection.num_parameters(&config)).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn draft(model: &str, r: i64) -> Draft {
        let mut draft = Draft::default();
        draft.set("model.path", model, "");
        draft.set("lora.r", r, "");
        draft.set(KEY, "adamw_8bit", "optim");
        draft
    }

    #[test]
    fn eight_bits_stay_where_they_save_much_or_nobody_knows_what() {
        let name = |draft: &Draft| draft.get(KEY).and_then(toml::Value::as_str).map(str::to_owned);
        let mut small = draft("unsloth/Llama-3.1-8B-Instruct-unsloth-bnb-4bit", 16);
        let (key, why) = in_full(&mut small).unwrap();
        // 41,943,040 parameters.
        assert!(key == KEY && why.contains("are 320 MiB, in eight bits 80 MiB"), "{why}");
        assert_eq!(name(&small).unwrap(), "adamw");
        for (model, r) in [("meta-llama/Llama-3.1-70B", 64), ("somebody/something", 8)] {
            let mut draft = draft(model, r);
            assert_eq!(in_full(&mut draft), None, "{model}");
            assert_eq!(name(&draft).unwrap(), "adamw_8bit");
        }
        let mut other = draft("meta-llama/Llama-3.1-8B", 16);
        other.set(KEY, "lion", "");
        assert_eq!(in_full(&mut other), None);
    }
}
