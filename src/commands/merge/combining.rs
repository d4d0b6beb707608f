//! Several adapters combined to the one that is merged, or written.

use std::path::{Path, PathBuf};

use tempfile::TempDir;

use crate::commands::named::Named;
use crate::commands::say;
use crate::lora::combine::{Combination, CombinationType, MajoritySign};
use crate::save::export::{self, Combined};
use crate::schema::Problem;
use crate::util::failure::Failure;

/// Arguments about several adapters, with the words of PEFT's `add_weighted_adapter`.
#[derive(Clone, Debug, Default, clap::Args)]
pub(crate) struct CombineArgs {
    /// Weights of several adapters, or of one, in the order in which they are named
    #[arg(long, value_name = "W,W", value_delimiter = ',', allow_hyphen_values = true)]
    pub(crate) weights: Vec<f64>,

    /// How several adapters become one; without it svd
    #[arg(long, value_name = "TYPE")]
    pub(crate) combination_type: Option<CombinationType>,

    /// Share of an adapter's numbers that stays, above 0 and at most 1: for ties, dare and `magnitude_prune`
    #[arg(long, value_name = "SHARE")]
    pub(crate) density: Option<f64>,

    /// Which sign wins, for ties and `dare_ties`: that of the sum, or the more frequent; without it total
    #[arg(long, value_name = "METHOD")]
    pub(crate) majority_sign_method: Option<MajoritySign>,

    /// Rank of what svd makes; without it the largest of the adapters
    #[arg(long, value_name = "RANK")]
    pub(crate) svd_rank: Option<usize>,

    /// Seed of the numbers that dare draws; without it 0
    #[arg(long, value_name = "SEED")]
    pub(crate) seed: Option<u64>,
}

impl CombineArgs {
    /// Whether there is something to combine.
    pub(super) fn is_asked(&self, num_adapters: usize) -> bool {
        num_adapters > 1 || !self.weights.is_empty() || self.combination_type.is_some()
    }

    /// The combination of this number of adapters. What an option has no meaning for is refused.
    pub(super) fn combination(&self, num_adapters: usize) -> Result<Combination, Problem> {
        let example = vec!["0.5"; num_adapters].join(",");
        let hint = format!("one for each adapter, in their order: --weights {example}");
        if self.weights.len() != num_adapters {
            let message = match self.weights.len() {
                0 => format!("{num_adapters} adapters need --weights"),
                found => format!("--weights has {found}, and there {}", are(num_adapters)),
            };
            return Err(Problem::new(message).hint(hint));
        }
        if let Some(weight) = self.weights.iter().find(|weight| !weight.is_finite()) {
            return Err(Problem::new(format!("--weights: {weight} is no weight")).hint(hint));
        }
        let kind = self.combination_type.unwrap_or(CombinationType::Svd);
        let name = word(kind);
        for (option, is_set, has_meaning) in [
            ("--density", self.density.is_some(), kind.has_density()),
            ("--majority-sign-method", self.majority_sign_method.is_some(), kind.elects_signs()),
            ("--svd-rank", self.svd_rank.is_some(), kind == CombinationType::Svd),
            ("--seed", self.seed.is_some(), kind.is_random()),
        ] {
            if is_set && !has_meaning {
                let message = format!("{option} has no meaning with --combination-type {name}");
                return Err(Problem::new(message).hint("leave it out, or choose another type"));
            }
        }
        let density = match self.density {
            None if kind.has_density() => {
                let message = format!("--combination-type {name} needs --density, the share of the numbers that stays");
                return Err(Problem::new(message).hint("--density 0.5"));
            }
            Some(density) if !(density > 0.0 && density <= 1.0) => {
                return Err(Problem::new(format!("--density {density}, expected a number above 0 and at most 1")));
            }
            density => density.unwrap_or(1.0),
        };
        if self.svd_rank == Some(0) {
            return Err(Problem::new("--svd-rank 0, expected a rank of at least 1"));
        }
        Ok(Combination {
            kind,
            density,
            majority_sign: self.majority_sign_method.unwrap_or_default(),
            svd_rank: self.svd_rank,
            seed: self.seed.unwrap_or_default(),
        })
    }
}

fn are(count: usize) -> String {
    if count == 1 { "is 1 adapter".to_owned() } else { format!("are {count} adapters") }
}

/// PEFT's word.
fn word(kind: CombinationType) -> String {
    let value = clap::ValueEnum::to_possible_value(&kind);
    value.map(|value| value.get_name().to_owned()).unwrap_or_default()
}

/// The adapter to be merged: the one that is named, or a combination in a folder that lasts as long as this.
pub(super) struct Source {
    pub(super) folder: PathBuf,
    /// What it is called in messages.
    pub(super) shown: String,
    /// Deleted at the end.
    _temporary: Option<TempDir>,
}

impl Source {
    /// That of one adapter.
    pub(super) fn one(folder: &Path) -> Self {
        Self { folder: folder.to_owned(), shown: folder.display().to_string(), _temporary: None }
    }

    /// A combination of the adapters named, which belong to the model in `model`; written to `out`, if it is given.
    pub(super) fn combined(
        args: &CombineArgs,
        named: &Named,
        model: &Path,
        out: Option<&Path>,
    ) -> Result<Self, Failure> {
        let combination = args.combination(named.adapters.len())?;
        let weighted = named.adapters.iter().map(|adapter| adapter.folder.clone()).zip(args.weights.iter().copied());
        let combined = export::combine(&weighted.collect::<Vec<_>>(), &combination, model)?;
        if combined.has_forms {
            say("warning: these adapters were trained with different prompts; how theirs look is not written");
        }
        let temporary = if out.is_some() { None } else { Some(tempfile::tempdir().map_err(Failure::running)?) };
        let folder = out.or(temporary.as_ref().map(TempDir::path)).unwrap_or(Path::new("."));
        export::write_combined(folder, &combined, &named.base.path)?;
        let shown = shown(named, &args.weights, &combination, &combined);
        Ok(Self { folder: folder.to_owned(), shown, _temporary: temporary })
    }
}

/// Such as `0.5 first + -0.5 second (ties, density 0.4, rank 8)`.
fn shown(named: &Named, weights: &[f64], combination: &Combination, combined: &Combined) -> String {
    let parts = named.adapters.iter().zip(weights).map(|(adapter, weight)| format!("{weight} {}", adapter.name));
    let mut how = vec![word(combination.kind)];
    if combination.kind.has_density() {
        how.push(format!("density {}", combination.density));
    }
    if combination.kind.is_random() {
        how.push(format!("seed {}", combination.seed));
    }
    how.push(format!("rank {}", combined.adapter.config.r));
    format!("{} ({})", parts.collect::<Vec<_>>().join(" + "), how.join(", "))
}
