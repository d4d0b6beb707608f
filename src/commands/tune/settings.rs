//! The keys that are searched.

use crate::recipe::Recipe;

/// Their values, as `--set` takes them.
fn values(recipe: &Recipe) -> [(&'static str, Option<String>); 9] {
    let Recipe { model, data, train, .. } = recipe;
    let checkpointing = serde_json::to_string(&train.gradient_checkpointing).unwrap_or_default();
    [
        ("train.gradient_checkpointing", Some(checkpointing.trim_matches('"').to_owned())),
        ("train.micro_batch_size", Some(train.micro_batch_size.to_string())),
        ("train.gradient_accumulation_steps", Some(train.gradient_accumulation_steps.to_string())),
        ("train.loss_chunk_tokens", train.loss_chunk_tokens.map(|tokens| tokens.to_string())),
        ("data.num_workers", Some(data.num_workers.to_string())),
        ("data.prefetch_batches", Some(data.prefetch_batches.to_string())),
        ("data.packing", Some(data.packing.to_string())),
        ("train.precision", Some(train.precision.to_string())),
        ("model.dtype", model.dtype.map(|dtype| dtype.to_string())),
    ]
}

/// What is to be set to come from `base` to `recipe`.
pub(super) fn changes(base: &Recipe, recipe: &Recipe) -> Vec<String> {
    let pairs = values(base).into_iter().zip(values(recipe)).filter(|(old, new)| old != new);
    pairs.filter_map(|(_, (key, value))| Some(format!("{key}={}", value?))).collect()
}

/// Rows of an update.
pub(super) fn rows_of_step(recipe: &Recipe) -> usize {
    recipe.train.micro_batch_size * recipe.train.gradient_accumulation_steps
}

/// Whether both train on the same rows, as many of them in an update, in the same arithmetic.
pub(super) fn have_same_numbers(base: &Recipe, recipe: &Recipe) -> bool {
    let numbers = |of: &Recipe| (rows_of_step(of), of.data.packing, of.train.precision, of.model.dtype);
    numbers(base) == numbers(recipe)
}
