//! `train.ship_as`: what it needs, and what the last part of a run gets for it.

use super::prepare::Prepared;
use crate::device::OpenDevice;
use crate::lora::targets::Selection;
use crate::recipe::Recipe;
use crate::save::export::Shipped;
use crate::schema::{Choice as _, Problem};
use crate::spec::gguf::Order;
use crate::spec::{ModelConfig, Role, StoredQuantisation, in_layer};
use crate::train::shipping::Shipping;
use crate::util::stats::{as_f64, as_u64};

/// Refuses a model, layers or a device that cannot be trained as a file, as far as they are known.
pub(crate) fn require_shippable(
    recipe: &Recipe,
    model: Option<(&ModelConfig, &Selection)>,
    device: Option<&OpenDevice>,
    num_ranks: usize,
) -> Result<(), Problem> {
    let Some(file_type) = recipe.train.ship_as else { return Ok(()) };
    let refused = |message: &str, hint: &str| {
        let message = format!("`train.ship_as` = \"{}\": {message}", file_type.word());
        Err(Problem::new(message).hint(hint.to_owned()))
    };
    if let Some(device) = device.filter(|device| device.is_gpu()) {
        let message = format!("weights are rounded on the CPU, and {} computes", device.label);
        return refused(&message, "`device.name` = \"cpu\"; or take it out, and `merge --dtype` rounds after training");
    }
    if num_ranks > 1 {
        return refused("weights are rounded by one process, and there are several", "train on one");
    }
    let Some((config, selection)) = model else { return Ok(()) };
    if config.quantisation.as_ref().is_some_and(StoredQuantisation::is_in_codes) {
        return refused(
            "weights are rounded once, from 16 bits, and those of the base are codes already",
            "name the model with 16 bits, of which they were made, in `model.path`",
        );
    }
    if selection.adapts_experts() {
        return refused("experts with adapters are not rounded", "leave `lora.expert_rank` out");
    }
    for (layer, site, _) in selection.iter() {
        let of = &config.blocks[layer].sites[site];
        let (name, width) = (in_layer(layer, &of.name), of.shape[1]);
        if of.role == Role::Router {
            return refused(
                &format!("`{name}`, a router, is not rounded"),
                "leave it out of `lora.target_modules`, or start from an adapter without it",
            );
        }
        let is_mixed = Order::of(config, &format!("{name}.weight")).is_some_and(|order| order.is_of_columns);
        if is_mixed || !file_type.has_blocks_for(width) {
            let message = if is_mixed {
                format!("columns of `{name}` have another order in a file")
            } else {
                format!("rows of `{name}`, {width} wide, are no whole blocks, and would be f16")
            };
            return refused(&message, "leave that layer out of `lora.target_modules`, or name another type");
        }
    }
    Ok(())
}

/// What times of steps leave out of a recipe, for people.
pub(crate) fn not_measured(recipe: &Recipe) -> Option<String> {
    let file_type = recipe.train.ship_as?.word();
    Some(format!(
        "note: steps are measured as they are before `train.ship_from`; with `train.ship_as` = \"{file_type}\" each later one encodes \
         the adapted weights, too"
    ))
}

/// What the recipe wants the last of all steps to train for. `begun`: how a resumed run had begun with that.
pub(super) fn shipping(prepared: &Prepared, total_steps: u64, done: u64, begun: Option<Shipped>) -> Option<Shipping> {
    let Prepared { recipe, source, .. } = prepared;
    let file_type = recipe.train.ship_as?;
    let first_step = first_step(recipe.train.ship_from, total_steps);
    let begun = begun.filter(|_| done >= first_step);
    Some(Shipping {
        file_type,
        first_step,
        base: source.folder.clone(),
        weights: source.weights.clone(),
        storage: recipe.storage(Some(&source.config)),
        compute: recipe.train.precision.dtype(),
        folder: recipe.output_dir.clone(),
        begun,
    })
}

/// Steps before that part, which has at least one.
fn first_step(ship_from: f64, total_steps: u64) -> u64 {
    as_u64((ship_from * as_f64(total_steps)).round()).min(total_steps.saturating_sub(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_part_begins_after_its_share_of_the_steps_and_has_one_at_least() {
        let steps = [(0.8, 100), (0.8, 1), (0.99, 10), (0.0, 7), (0.5, 3)].map(|(from, all)| first_step(from, all));
        assert_eq!(steps, [80, 0, 9, 0, 2]);
    }
}
