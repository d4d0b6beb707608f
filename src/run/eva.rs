//! Adapters that start from the rows: the directions of their inputs, and the ranks that these give them.

use std::collections::BTreeMap;
use std::time::Instant;

use super::Run;
use super::inputs::data_failure;
use crate::config::LoraConfig;
use crate::data::dataset::{Cursor, Dataset};
use crate::data::progress::{Meter, Work};
use crate::hub::Progress;
use crate::lora::Directions;
use crate::model::Model;
use crate::schema::Problem;
use crate::spec::SiteId;
use crate::train::ranks::Ranks;
use crate::train::stop::Stop;
use crate::train::trainer::TrainerError;
use crate::util::failure::Failure;
use crate::util::stats::{as_f64, as_u64};
use crate::util::text::with_commas;

/// Message when a run stops before there is anything to save.
pub(super) const STOPPED: &str = "stopped before the first step";

/// Directions that have not come to rest by then never will: there are fewer of them than are looked for.
const MOST_MICRO_BATCHES: usize = 1000;

/// How adapters start.
pub(super) struct Found {
    /// Their section, with the ranks that they have.
    pub(super) lora: LoraConfig,
    /// Their A, one after the other.
    pub(super) values: Vec<f32>,
    /// What it took, for people.
    pub(super) about: String,
}

/// Reads micro-batches in the order of training until the directions are found: the first rank does, for all.
///
/// # Errors
/// Rows that cannot be read, or in which there are not as many directions.
pub(super) fn find(run: &Run<'_>, data: &Dataset, model: &Model, ranks: &mut dyn Ranks) -> Result<Found, Failure> {
    let selection = &run.prepared.selection;
    let own = run.place.is_first().then(|| search(run, data, model)).transpose();
    ranks.wait_long();
    if ranks.agree(own.is_err()) {
        return Err(own.err().unwrap_or_else(|| Failure::running(TrainerError::OtherRank)));
    }
    let (found, about) = own?.unwrap_or_default();
    let width = |(layer, site): (usize, SiteId)| model.config.blocks[layer].sites[site].shape[1];
    let places: Vec<_> = selection.iter().map(|(layer, site, _)| (layer, site)).collect();
    let rank = |place| found.get(place).map_or(0.0, |a: &Vec<f32>| as_f64(a.len() / width(*place)));
    let mut of_each: Vec<f64> = places.iter().map(rank).collect();
    ranks.sum(&mut [], &mut of_each);
    let of_each: Vec<usize> = of_each.iter().filter_map(|rank| usize::try_from(as_u64(*rank)).ok()).collect();
    let num_values = places.iter().zip(&of_each).map(|(place, rank)| rank * width(*place)).sum();
    let mut values: Vec<f32> = found.into_values().flatten().collect();
    values.resize(num_values, 0.0);
    ranks.sum(&mut values, &mut []);
    let lora = run.prepared.recipe.lora.with_ranks(&model.config, selection, &of_each);
    Ok(Found { lora, values, about })
}

/// The A that are found, by block and layer, and what that took.
type Searched = (BTreeMap<(usize, SiteId), Vec<f32>>, String);

fn search(run: &Run<'_>, data: &Dataset, model: &Model) -> Result<Searched, Failure> {
    let Run { args, prepared, stop, .. } = run;
    let (recipe, selection, start) = (&prepared.recipe, &prepared.selection, Instant::now());
    let mut directions = Directions::new(selection, recipe.lora.rho());
    let mut loader = data.loader(Cursor::default(), recipe.train.micro_batch_size).map_err(data_failure)?;
    let (progress, what) = (Progress::detect(args.quiet), "the inputs of the adapted layers".to_owned());
    let mut meter = Meter::start(progress, Work::Decomposing, what, selection.iter().count());
    let (mut num_micro_batches, mut num_tokens) = (0, 0);
    while directions.last_wanted().is_some() {
        let loaded = loader.next_batch_unless(&|| stop.requested()).map_err(data_failure)?;
        let Some(loaded) = loaded.filter(|_| !stop.requested()) else { Stop::end(STOPPED) };
        model.show(&loaded.batch, &mut directions);
        num_micro_batches += 1;
        num_tokens += loaded.batch.targets.len();
        meter.advance(directions.num_found());
        let missing = directions.missing_tokens().filter(|_| loaded.last_of_epoch);
        let reason = match missing {
            Some(tokens) => format!("no micro-batch has the {tokens} tokens with loss that {tokens} directions need"),
            None if num_micro_batches == MOST_MICRO_BATCHES => {
                format!("after {} micro-batches, directions still change", with_commas(num_micro_batches))
            }
            None => continue,
        };
        let problem = Problem::new(format!("`lora.init_lora_weights` = \"eva\": {reason}"));
        return Err(problem.hint("lower `lora.r` or `lora.eva_rho`, or raise `train.micro_batch_size`").into());
    }
    meter.finish();
    let found = directions.found();
    let (count, tokens, seconds) = (with_commas(num_micro_batches), with_commas(num_tokens), start.elapsed());
    let ranks = found.iter().map(|((layer, site), a)| a.len() / model.config.blocks[*layer].sites[*site].shape[1]);
    let (least, most) = (ranks.clone().min().unwrap_or_default(), ranks.max().unwrap_or_default());
    let seconds = seconds.as_secs_f64();
    let of =
        format!("{tokens} tokens with loss in {count} micro-batches, {seconds:.1} s; ranks from {least} to {most}");
    Ok((found, of))
}
