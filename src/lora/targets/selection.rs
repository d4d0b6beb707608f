//! The layers that a `[lora]` section selects, with what it trains in full.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use super::AdapterShape;
use crate::lora::matrices::Matrices;
use crate::lora::trained::{FullTensor, TensorId};
use crate::spec::{ModelConfig, PerSite, Role, Site, SiteId};
use crate::util::stats::{as_f64, as_u64};

/// How often a target matched.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TargetHits {
    /// The target as written in the recipe.
    pub target: String,
    /// Number of linear layers that it matched.
    pub num_hits: usize,
}

/// The layers that a `[lora]` section selects in a model.
#[derive(Clone, Debug, PartialEq)]
pub struct Selection {
    /// By block: the adapted linear layers.
    pub shapes: Vec<PerSite<AdapterShape>>,
    /// Every target with its number of hits.
    pub hits: Vec<TargetHits>,
    /// What is trained in full in a model whose shape is known, but for the head that scores, with their shapes.
    pub full: BTreeMap<FullTensor, [usize; 2]>,
}

impl Selection {
    /// Every adapted linear layer with its block, in the order of the forward pass.
    pub fn iter(&self) -> impl Iterator<Item = (usize, SiteId, AdapterShape)> {
        let blocks = self.shapes.iter().enumerate();
        blocks.flat_map(|(layer, shapes)| shapes.iter().map(move |(&site, &shape)| (layer, site, shape)))
    }

    /// The same with the ranks shared out so that they have the most parameters, where a layer may get `rho` times its rank.
    #[must_use]
    pub fn with_most_parameters(&self, config: &ModelConfig, rho: f64) -> Self {
        let mut largest = self.clone();
        let mut all: Vec<_> = self.iter().collect();
        all.sort_by_key(|(layer, site, _)| Reverse(config.blocks[*layer].sites[*site].shape.iter().sum::<usize>()));
        let mut left: usize = all.iter().map(|(_, _, shape)| shape.r).sum();
        for (layer, site, _) in all {
            // Of layers that read one input, each may have as many ranks as the others.
            let of_block = self.shapes[layer].values().map(|shape| shape.r).max().unwrap_or_default();
            let most = usize::try_from(as_u64((as_f64(of_block) * rho).ceil())).unwrap_or(of_block);
            largest.shapes[layer].entry(site).and_modify(|shape| shape.r = most.min(left));
            left -= most.min(left);
        }
        largest
    }

    /// Every tensor that is trained, but for the head that scores, with its shape.
    pub fn tensors(&self, config: &ModelConfig) -> impl Iterator<Item = (TensorId, [usize; 2])> {
        let of_adapters = self
            .iter()
            .flat_map(|(layer, site, shape)| shape.shapes(config.blocks[layer].sites[site].shape).tensors(layer, site));
        of_adapters.chain(self.full.iter().map(|(&full, &shape)| (full.into(), shape)))
    }

    /// The modules that are trained in full, with their shapes.
    pub fn modules(&self) -> impl Iterator<Item = (FullTensor, [usize; 2])> {
        self.full.iter().filter(|(full, _)| full.is_module()).map(|(&full, &shape)| (full, shape))
    }

    /// Number of their parameters.
    #[must_use]
    pub fn num_module_parameters(&self) -> usize {
        self.modules().map(|(_, [rows, columns])| rows * columns).sum()
    }

    /// Tokens whose rows of the embedding are trained.
    #[must_use]
    pub fn num_tokens(&self) -> usize {
        self.full.get(&FullTensor::Tokens).map_or(0, |[tokens, _]| *tokens)
    }

    /// The first layer whose backward something needs; the number of layers where nothing does.
    #[must_use]
    pub fn first_trained(&self) -> usize {
        let adapters = self.iter().map(|(layer, site, _)| TensorId::Adapter(layer, site, Matrices::NAMES.a));
        TensorId::first_trained(adapters.chain(self.full.keys().map(|&full| full.into())), self.shapes.len())
    }

    /// Whether the head is trained in full.
    #[must_use]
    pub fn trains_head(&self) -> bool {
        self.full.keys().any(|full| full.is_head())
    }

    /// Every module with an adapter, and its shape: of the layers of experts each.
    pub fn adapted_modules(&self, config: &ModelConfig) -> impl Iterator<Item = (String, [usize; 2], AdapterShape)> {
        self.iter().flat_map(move |(layer, site, shape)| {
            let block = &config.blocks[layer];
            let sites = block.of_experts(site).into_iter();
            sites.map(move |site| (config.module_name(layer, site), block.sites[site].shape, shape))
        })
    }

    /// Whether experts have adapters.
    #[must_use]
    pub fn adapts_experts(&self) -> bool {
        self.iter().any(|(.., shape)| shape.num_experts.is_some())
    }

    /// Number of the adapters' parameters that a token is multiplied by.
    #[must_use]
    pub fn num_active_parameters(&self, config: &ModelConfig) -> usize {
        let of_adapter = |(layer, site, shape): (usize, SiteId, AdapterShape)| -> usize {
            let Site { shape: weight, role, .. } = config.blocks[layer].sites[site];
            let all: usize = shape.shapes(weight).values().map(|[rows, columns]| rows * columns).sum();
            match role {
                Role::Expert { num_per_token, num_experts } => all / num_experts * num_per_token,
                Role::Linear | Role::Bare | Role::Router => all,
            }
        };
        let others = self.full.iter().filter(|(full, _)| !full.is_module()).map(|(_, [rows, columns])| rows * columns);
        self.iter().map(of_adapter).chain(others).sum()
    }

    /// Number of trained parameters in a model of this shape.
    #[must_use]
    pub fn num_parameters(&self, config: &ModelConfig) -> usize {
        self.tensors(config).map(|(_, [rows, columns])| rows * columns).sum()
    }
}
