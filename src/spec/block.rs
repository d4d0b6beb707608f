//! A layer of a model as data: its sublayers and the linear layers in them. Names, shapes, counts, targets, export, merge,
//! the memory plan and FLOPs follow from it.

pub(super) mod attention;
pub(super) mod short_conv;
pub mod state_space;

use std::collections::BTreeMap;

use super::delta_net::{A_LOG, CONV, DT_BIAS, DeltaHeads, GATED_NORM};
use crate::util::stats::as_f64;
use attention::Attention;
use short_conv::ShortConv;
use state_space::StateSpace;

/// A linear layer of a block: its place in [`Block::sites`].
pub type SiteId = usize;

/// What some of a block's linear layers have, by site.
pub type PerSite<T> = BTreeMap<SiteId, T>;

/// A linear layer of a block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Site {
    /// Name within the block, as in Hugging Face's files: `self_attn.q_proj`.
    pub name: String,
    /// Shape of its weight, `[out_features, in_features]`.
    pub shape: [usize; 2],
    /// Whether it adds a bias.
    pub has_bias: bool,
    /// Which tokens pass it, and whether it takes an adapter.
    pub role: Role,
}

/// What a linear layer is in its block.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Role {
    /// All tokens pass it. It takes an adapter.
    #[default]
    Linear,
    /// Likewise, but that transformers reads its bare weight past an adapter, which PEFT refuses. It stays frozen.
    Bare,
    /// It chooses among experts. It stays frozen, unless a target names it.
    Router,
    /// It belongs to one of `num_experts` experts, of which a token passes `num_per_token`. It stays frozen.
    Expert {
        /// Experts of a token.
        num_per_token: usize,
        /// Experts of the layer.
        num_experts: usize,
    },
}

impl Role {
    /// Whether all tokens pass it, and it chooses nothing.
    #[must_use]
    pub fn is_plain(self) -> bool {
        matches!(self, Self::Linear | Self::Bare)
    }
}

impl Site {
    /// Number of its weights.
    #[must_use]
    pub fn num_weights(&self) -> usize {
        self.shape.iter().product()
    }

    /// Number of its weights that a token is multiplied by, on average over the experts.
    #[must_use]
    pub fn num_active_weights(&self) -> f64 {
        let share = match self.role {
            Role::Expert { num_per_token, num_experts } => as_f64(num_per_token) / as_f64(num_experts),
            Role::Linear | Role::Bare | Role::Router => 1.0,
        };
        as_f64(self.num_weights()) * share
    }
}

/// A layer of a model.
#[derive(Clone, Debug, PartialEq)]
pub struct Block {
    /// Its linear layers, in the order of the forward pass.
    pub sites: Vec<Site>,
    /// What it computes, in order: the output of each sublayer is added to its input.
    pub sublayers: Vec<Sublayer>,
    /// Whether its output is multiplied by a number of its own, [`BLOCK_SCALE`] (Gemma 4).
    pub has_scale: bool,
    /// The residual streams, where there are several; its last sublayer is a [`LayerInput`] then.
    pub streams: Option<Streams>,
}

/// Several residual streams (`AltUp`; Baykal et al., 2023): a block predicts all of them by all, computes what its sublayers make of the
/// first, and corrects all by that. What the last sublayer makes of the first is added to the others (Gemma 3n).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Streams {
    /// Their number.
    pub count: usize,
    /// Largest amount of the numbers of [`PREDICTION`] and [`CORRECTION`]; absent: they are what they are.
    pub clip: Option<f64>,
}

impl Streams {
    /// Floating-point operations of the forward in a block for a token.
    #[must_use]
    pub fn flops_per_token(self, hidden_size: usize) -> usize {
        // Parts twice, the prediction, the correction.
        2 * hidden_size * (2 * self.count + self.count * self.count + self.count)
    }

    /// Its tensors in a block, with their shapes.
    #[must_use]
    pub fn tensors(self, hidden_size: usize) -> [(&'static str, Vec<usize>); 5] {
        [
            (STREAM_NORM, vec![hidden_size]),
            (STREAM_ROUTER, vec![self.count, hidden_size]),
            (PREDICTION, vec![self.count * self.count, self.count]),
            (CORRECTION, vec![self.count, self.count]),
            (STREAM_SCALE, vec![hidden_size]),
        ]
    }
}

/// A sublayer with the norms around it.
#[derive(Clone, Debug, PartialEq)]
pub struct Sublayer {
    /// Name within the block of the norm of its input; absent: it takes the residual stream as it is.
    pub norm_before: Option<&'static str>,
    /// Name within the block of the norm of its output, before that is added to the residual stream.
    pub norm_after: Option<&'static str>,
    /// Factor of its normed input (Falcon-H1); absent: 1.
    pub input_scale: Option<f64>,
    /// Factor of its output, before that is added to the residual stream (Granite); absent: 1.
    pub output_scale: Option<f64>,
    /// It takes the residual stream that the sublayer in front of it takes, beside that one (Cohere).
    pub is_beside: bool,
    /// What it computes between the norms.
    pub kind: SublayerKind,
}

/// What a sublayer computes.
#[derive(Clone, Debug, PartialEq)]
pub enum SublayerKind {
    /// Causal self-attention.
    Attention(Attention),
    /// Linear attention by the gated delta rule.
    DeltaNet(DeltaNet),
    /// A gated short convolution.
    ShortConv(ShortConv),
    /// A state space.
    StateSpace(StateSpace),
    /// A gated feed-forward layer.
    Gated(Gated),
    /// A mixture of experts.
    Mixture(Mixture),
    /// A feed-forward layer with a mixture of experts beside it.
    TwoBranches(TwoBranches),
    /// What the layer makes of its own embedding of the tokens.
    LayerInput(LayerInput),
    /// A product of low rank, to which its input is added; the sum of the residual stream and both is divided by the root of 2 (Laurel;
    /// Gemma 3n).
    Laurel(Laurel),
}

impl SublayerKind {
    /// The linear layers of its input, group by group: those of a group have the same input.
    #[must_use]
    pub fn input_sites(&self) -> Vec<&[SiteId]> {
        match self {
            Self::Attention(attention) => std::iter::once(attention.qkv.sites())
                .chain(attention.gate.as_ref().map(std::slice::from_ref))
                .collect(),
            Self::DeltaNet(net) => vec![net.inputs.sites()],
            Self::ShortConv(conv) => vec![std::slice::from_ref(&conv.input)],
            Self::StateSpace(space) => vec![std::slice::from_ref(&space.input)],
            Self::Gated(gated) => vec![gated.gate_up.sites()],
            Self::Mixture(mixture) => mixture.all().map(|gated| gated.gate_up.sites()).collect(),
            Self::TwoBranches(TwoBranches { gated, mixture }) => {
                [gated].into_iter().chain(mixture.all()).map(|gated| gated.gate_up.sites()).collect()
            }
            Self::LayerInput(input) => vec![std::slice::from_ref(&input.gate)],
            Self::Laurel(laurel) => vec![std::slice::from_ref(&laurel.left)],
        }
    }
}

/// Linear layers of one input.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Projections<const N: usize> {
    /// One for each output.
    Apart([SiteId; N]),
    /// One layer for outputs of these widths, side by side.
    Fused {
        /// The layer.
        site: SiteId,
        /// Widths of the outputs.
        widths: [usize; N],
    },
    /// One layer, whose output is all of them.
    Same(SiteId),
}

impl<const N: usize> Projections<N> {
    /// The layers.
    #[must_use]
    pub fn sites(&self) -> &[SiteId] {
        match self {
            Self::Apart(sites) => sites,
            Self::Fused { site, .. } | Self::Same(site) => std::slice::from_ref(site),
        }
    }
}

/// Gated `DeltaNet` (Yang et al., 2025): short convolution, gated delta rule, gated norm.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeltaNet {
    /// Its heads.
    pub heads: DeltaHeads,
    /// Tokens that the convolution sees, the current one included.
    pub kernel_size: usize,
    /// The projections of its input: queries, keys and values side by side; the gate of the output; the strength and the decay
    /// of each value head.
    pub inputs: DeltaNetInputs,
    /// The projection of its output.
    pub output: SiteId,
}

/// The projections of the input of a gated `DeltaNet`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeltaNetInputs {
    /// One for each.
    Apart([SiteId; 4]),
    /// One to queries, keys, values and gates, and one to strengths and decays: of a key head and its value heads side by side, key
    /// head by key head (Qwen3-Next).
    ByKeyHead([SiteId; 2]),
}

impl DeltaNetInputs {
    /// The projections.
    #[must_use]
    pub fn sites(&self) -> &[SiteId] {
        match self {
            Self::Apart(sites) => sites,
            Self::ByKeyHead(sites) => sites,
        }
    }
}

impl DeltaNet {
    /// Its tensors that are no linear layers, with their shapes.
    #[must_use]
    pub fn tensors(&self) -> [(&'static str, Vec<usize>); 4] {
        let Self { heads, kernel_size, .. } = self;
        [
            (CONV, vec![heads.qkv_width(), 1, *kernel_size]),
            (A_LOG, vec![heads.num_value_heads]),
            (DT_BIAS, vec![heads.num_value_heads]),
            (GATED_NORM, vec![heads.value_head_dim]),
        ]
    }
}

/// What a gated feed-forward layer computes of the gate.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Activation {
    /// `x sigmoid(x)`
    Silu,
    /// GELU with the tangent's approximation (Hendrycks and Gimpel, 2016): `x sigmoid(sqrt(8 / pi) (x + 0.044715 x^3))`.
    GeluTanh,
    /// GELU: `x` times the share of a standard normal distribution below it.
    Gelu,
    /// `max(x, 0)`
    Relu,
    /// `x sigmoid(1.702 x)` of `x` up to 7, times one more than the other factor, which is between -7 and 7 (gpt-oss).
    Clamped,
    /// xIELU (Huang and Schlag, 2024; Apertus): `positive x^2 + beta x` above 0, and `negative (exp(x) - 1 - x) + beta x` below.
    /// Each layer has these numbers in its weights: before they are loaded, they are 0.
    Xielu(Curve),
}

/// The numbers of xIELU.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Curve {
    /// How it bends above 0.
    pub positive: f32,
    /// How it bends below 0.
    pub negative: f32,
    /// Its slope at 0.
    pub beta: f32,
}

/// Names of the tensors that the numbers of xIELU are made of: `positive` is the softplus of the first, `negative` that of the second and
/// the third, which is `beta`. The last, of `-1e-6`, is the largest `x` below 0 in transformers; it is not used here.
pub const CURVE_NAMES: [&str; 4] = ["mlp.act_fn.alpha_p", "mlp.act_fn.alpha_n", "mlp.act_fn.beta", "mlp.act_fn.eps"];

/// A gated feed-forward layer: `down(activation(gate(x)) * up(x))`. Without a gate, the square of `max(x, 0)` (So et al., 2021)
/// is `max(x, 0)` with `up` as its gate, and another activation is that of `up` alone.
#[derive(Clone, Debug, PartialEq)]
pub struct Gated {
    /// What it computes of the gate.
    pub activation: Activation,
    /// Factor of the gate before that (Falcon-H1); absent: 1.
    pub gate_scale: Option<f64>,
    /// The gate is what it has more than its mean and so many standard deviations, over a token, and 0 where it has less; absent: it is
    /// what it is (Gemma 3n).
    pub cutoff: Option<f64>,
    /// Width inside it.
    pub intermediate_size: usize,
    /// The projections of its input to the gate and to what it multiplies.
    pub gate_up: Projections<2>,
    /// The projection of its output.
    pub down: SiteId,
}

/// A mixture of experts: a router chooses some gated feed-forward layers for every token, and weights their outputs.
#[derive(Clone, Debug, PartialEq)]
pub struct Mixture {
    /// The layer that gives every expert a score.
    pub router: SiteId,
    /// The probabilities of which the largest choose and weight the experts.
    pub probabilities: Probabilities,
    /// What has a part in that beside them.
    pub choice: Choice,
    /// Experts of a token.
    pub num_per_token: usize,
    /// Weights multiply the inputs of experts and not their outputs (Llama 4).
    pub weighs_inputs: bool,
    /// The experts.
    pub experts: Vec<Gated>,
    /// The projections of their input to what is narrower, and of their sum back (Nemotron 3 Super); absent: there are none.
    pub latent: Option<[SiteId; 2]>,
    /// What every token passes beside them.
    pub shared: Option<SharedExpert>,
}

/// How the outputs of a token's experts are weighted.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Probabilities {
    /// By the softmax of all scores.
    OfAll,
    /// By the softmax of the scores of the token's experts: that of all, made to sum to 1.
    OfChosen,
    /// By the sigmoid of each score.
    Sigmoids,
    /// By the sigmoids of the scores of the token's experts, over their sum and this.
    SigmoidsOfChosen(f64),
}

/// What chooses and weights a token's experts beside their probabilities (DeepSeek-AI, 2024, equation 16).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Choice {
    /// Name within the block of what is added to each probability for the choice alone.
    pub bias: Option<&'static str>,
    /// Which experts stay.
    pub groups: Option<ExpertGroups>,
    /// Factor of the weights.
    pub factor: f64,
}

/// Experts in groups of neighbours, of which some stay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertGroups {
    /// Number of groups.
    pub count: usize,
    /// How many stay: those whose best experts have the largest sums.
    pub num_kept: usize,
    /// Number of those best experts.
    pub num_best: usize,
}

impl Choice {
    /// By the probabilities alone.
    pub const PLAIN: Self = Self { bias: None, groups: None, factor: 1.0 };
}

/// A feed-forward layer that every token passes; its output may be multiplied by the sigmoid of a number for each.
#[derive(Clone, Debug, PartialEq)]
pub struct SharedExpert {
    /// The layer.
    pub gated: Gated,
    /// What makes the number.
    pub gate: Option<SiteId>,
}

impl Mixture {
    /// The experts and the shared one.
    pub fn all(&self) -> impl Iterator<Item = &Gated> {
        self.experts.iter().chain(self.shared.iter().map(|shared| &shared.gated))
    }
}

/// A feed-forward layer with a mixture of experts beside it: both take the residual stream, through norms of their own
/// ([`BRANCH_NORMS`]), and their sum is the output (Gemma 4). The router's input is normed too, and what experts make is multiplied by
/// a number for each.
#[derive(Clone, Debug, PartialEq)]
pub struct TwoBranches {
    /// The feed-forward layer.
    pub gated: Gated,
    /// The mixture.
    pub mixture: Mixture,
}

/// Names of the norms of a feed-forward layer and of the experts beside it: of their inputs, and of their outputs.
pub const BRANCH_NORMS: [[&str; 2]; 2] = [
    ["pre_feedforward_layernorm", "pre_feedforward_layernorm_2"],
    ["post_feedforward_layernorm_1", "post_feedforward_layernorm_2"],
];
/// Weight of the norm of such experts' router, less a factor of the root of the width.
pub const ROUTER_SCALE: &str = "router.scale";
/// What such experts' outputs are multiplied by.
pub const EXPERT_SCALES: &str = "router.per_expert_scale";

/// `projection(activation(gate(x)) * e)`, where `e` is the layer's own embedding of the tokens (Gemma 4).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LayerInput {
    /// What it computes of the gate.
    pub activation: Activation,
    /// Width of the embedding.
    pub width: usize,
    /// The projection of its input.
    pub gate: SiteId,
    /// The projection of its output.
    pub projection: SiteId,
}

/// Two linear layers, one behind the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Laurel {
    /// Width between them.
    pub rank: usize,
    /// The first.
    pub left: SiteId,
    /// The second.
    pub right: SiteId,
}

impl Block {
    /// The same linear layer of every expert, of that of the first; of one that is no expert's, itself alone.
    #[must_use]
    pub fn of_experts(&self, site: SiteId) -> Vec<SiteId> {
        let experts = self.mixture().filter(|_| matches!(self.sites[site].role, Role::Expert { .. }));
        let downs = experts.into_iter().flat_map(|mixture| mixture.experts.iter().map(|expert| expert.down));
        let downs: Vec<SiteId> = downs.collect();
        // Each has them in one order.
        let first = downs.first().copied().unwrap_or_default();
        if downs.is_empty() { vec![site] } else { downs.into_iter().map(|down| site + down - first).collect() }
    }

    fn find<'a, T>(&'a self, of: impl Fn(&'a SublayerKind) -> Option<&'a T>) -> Option<&'a T> {
        self.sublayers.iter().find_map(|sublayer| of(&sublayer.kind))
    }

    /// The attention; the first one, if there were several.
    #[must_use]
    pub fn attention(&self) -> Option<&Attention> {
        self.find(|kind| if let SublayerKind::Attention(it) = kind { Some(it) } else { None })
    }

    /// The gated delta rule, likewise.
    #[must_use]
    pub fn delta_net(&self) -> Option<&DeltaNet> {
        self.find(|kind| if let SublayerKind::DeltaNet(it) = kind { Some(it) } else { None })
    }

    /// The gated short convolution, likewise.
    #[must_use]
    pub fn short_conv(&self) -> Option<&ShortConv> {
        self.find(|kind| if let SublayerKind::ShortConv(it) = kind { Some(it) } else { None })
    }

    /// The state space, likewise.
    #[must_use]
    pub fn state_space(&self) -> Option<&StateSpace> {
        self.find(|kind| if let SublayerKind::StateSpace(it) = kind { Some(it) } else { None })
    }

    /// Its tensors that are neither linear layers nor norms around sublayers or of heads, with their shapes.
    pub fn other_tensors(&self, hidden_size: usize) -> impl Iterator<Item = (&'static str, Vec<usize>)> {
        let sinks = self.attention().filter(|attention| attention.has_sinks);
        let sinks = sinks.map(|attention| (SINKS, vec![attention.heads.num_heads]));
        let of_net = self.delta_net().into_iter().flat_map(DeltaNet::tensors);
        let of_conv = self.short_conv().map(|conv| conv.tensor(hidden_size));
        let branches = self.two_branches().into_iter().flat_map(move |branches| {
            [(ROUTER_SCALE, vec![hidden_size]), (EXPERT_SCALES, vec![branches.mixture.experts.len()])]
        });
        let scale = self.has_scale.then(|| (BLOCK_SCALE, vec![1]));
        let bias = self.mixture().and_then(|mixture| Some((mixture.choice.bias?, bias_shape(mixture))));
        let scale = bias.into_iter().chain(scale);
        let of_space = self.state_space().into_iter().flat_map(StateSpace::tensors);
        let is_curved = self.gated().is_some_and(|gated| matches!(gated.activation, Activation::Xielu(_)));
        let of_curve = CURVE_NAMES.into_iter().zip([vec![1], vec![1], vec![], vec![]]).filter(move |_| is_curved);
        let of_streams = self.streams.into_iter().flat_map(move |streams| streams.tensors(hidden_size));
        let others = sinks.into_iter().chain(of_net).chain(of_space).chain(of_conv);
        others.chain(branches).chain(scale).chain(of_curve).chain(of_streams)
    }

    /// The gated feed-forward layer, likewise.
    #[must_use]
    pub fn gated(&self) -> Option<&Gated> {
        self.find(|kind| match kind {
            SublayerKind::Gated(gated) | SublayerKind::TwoBranches(TwoBranches { gated, .. }) => Some(gated),
            _ => None,
        })
    }

    /// The mixture of experts, likewise.
    #[must_use]
    pub fn mixture(&self) -> Option<&Mixture> {
        self.find(|kind| match kind {
            SublayerKind::Mixture(mixture) | SublayerKind::TwoBranches(TwoBranches { mixture, .. }) => Some(mixture),
            _ => None,
        })
    }

    /// Its feed-forward layer, or those of its experts.
    pub fn all_gated(&self) -> impl Iterator<Item = &Gated> {
        self.gated().into_iter().chain(self.mixture().into_iter().flat_map(Mixture::all))
    }

    /// Width of the widest result of its linear layers; `joined`: those of one input make one result.
    #[must_use]
    pub fn widest_activation(&self, joined: bool) -> usize {
        let width = |sites: &[SiteId]| {
            let widths = sites.iter().map(|site| self.sites[*site].shape[0]);
            if joined { widths.sum() } else { widths.max().unwrap_or_default() }
        };
        let groups = self.sublayers.iter().flat_map(|sublayer| sublayer.kind.input_sites());
        groups.map(width).max().unwrap_or_default()
    }

    /// The feed-forward layer that has a mixture of experts beside it, with that, likewise.
    #[must_use]
    pub fn two_branches(&self) -> Option<&TwoBranches> {
        self.find(|kind| if let SublayerKind::TwoBranches(it) = kind { Some(it) } else { None })
    }

    /// The norms of a block with their widths.
    pub fn norms(&self, hidden_size: usize) -> impl Iterator<Item = (&'static str, usize)> {
        let of_heads = self.attention().into_iter().flat_map(|attention| {
            // Keys of an earlier layer are normed there.
            let num_norms = if attention.key_value_layer().is_some() { 1 } else { 2 };
            attention
                .norm_widths()
                .filter(|_| attention.norms_by_head().is_none())
                .filter(|_| attention.query_key_norms != Some(attention::QueryKeyNorms::Unweighted))
                .into_iter()
                .flat_map(move |widths| attention.norm_names.into_iter().zip(widths).take(num_norms))
        });
        let around = self.sublayers.iter().enumerate().flat_map(|(index, sublayer)| {
            // Sublayers beside each other may have one.
            let is_shared = sublayer.is_beside && self.sublayers[index - 1].norm_before == sublayer.norm_before;
            [sublayer.norm_before.filter(|_| !is_shared), sublayer.norm_after]
        });
        let branches = self.two_branches().map(|_| BRANCH_NORMS).into_iter().flatten().flatten();
        let of_latents = self.attention().into_iter().flat_map(Attention::latent_norms);
        of_heads.chain(of_latents).chain(around.flatten().chain(branches).map(move |name| (name, hidden_size)))
    }
}

/// The shape in files of what a router adds for the choice: ERNIE 4.5's is a row.
fn bias_shape(mixture: &Mixture) -> Vec<usize> {
    let is_row = mixture.choice.bias.is_some_and(|name| name.contains("moe_statics"));
    is_row.then_some(1).into_iter().chain([mixture.experts.len()]).collect()
}

/// Name of the number that a layer's output is multiplied by.
pub const BLOCK_SCALE: &str = "layer_scalar";

/// Names of the projections around a layer's own embedding of the tokens.
pub const LAYER_INPUT_NAMES: [&str; 2] = ["per_layer_input_gate", "per_layer_projection"];

/// Names of the two layers of a [`Laurel`].
pub const LAUREL_NAMES: [&str; 2] = ["laurel.linear_left", "laurel.linear_right"];

/// Weight of the norm of what [`STREAM_ROUTER`] takes.
pub const STREAM_NORM: &str = "altup.router_norm.weight";
/// What makes a number for each stream of one of them.
pub const STREAM_ROUTER: &str = "altup.modality_router.weight";
/// What makes of these numbers the parts that streams have in the prediction of each.
pub const PREDICTION: &str = "altup.prediction_coefs.weight";
/// What makes of them, less 1, the part that each stream has of the correction.
pub const CORRECTION: &str = "altup.correction_coefs.weight";
/// Factors of the first stream, before the last sublayer takes it.
pub const STREAM_SCALE: &str = "altup.correct_output_scale";

/// Name of the sinks of an attention.
pub const SINKS: &str = "self_attn.sinks";

/// Names of the norms of query and key heads.
pub const HEAD_NORMS: [&str; 2] = ["self_attn.q_norm", "self_attn.k_norm"];

/// The names that linear layers have in a family, in the order of the forward pass.
pub const SITE_NAMES: [&str; 7] = [
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj",
    "mlp.down_proj",
];

/// The last four of them in LFM2.
pub const LFM2_NAMES: [&str; 4] = ["self_attn.out_proj", "feed_forward.w1", "feed_forward.w3", "feed_forward.w2"];

/// Names of the feed-forward layers of Granite 4: gate and up in one, and down.
pub const SHARED_MLP_NAMES: [&str; 2] = ["shared_mlp.input_linear", "shared_mlp.output_linear"];

/// Names of the feed-forward layers of Starcoder 2, which has no gate.
pub const PLAIN_MLP_NAMES: [&str; 2] = ["mlp.c_fc", "mlp.c_proj"];

/// Names of layers that some families have for the first three, and for the two of gate and up.
pub const FUSED_NAMES: [&str; 2] = ["self_attn.qkv_proj", "mlp.gate_up_proj"];

/// Names of those of Phi-1 and 2 that other families have not: the output of attention, and the feed-forward layers.
pub const PHI_NAMES: [&str; 3] = ["self_attn.dense", "mlp.fc1", "mlp.fc2"];

/// Names of the linear layers of GPT-NeoX.
pub const NEOX_NAMES: [&str; 4] =
    ["attention.query_key_value", "attention.dense", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h"];

/// Names of the projections around the experts of Nemotron 3 Super.
pub const LATENT_EXPERT_NAMES: [&str; 2] = ["mixer.fc1_latent_proj", "mixer.fc2_latent_proj"];

/// Name of what the sigmoid that a shared expert is multiplied by is made with.
pub const SHARED_GATE: &str = "mlp.shared_expert_gate";

/// The last component of a module's name, as used in `target_modules`.
#[must_use]
pub fn short_name(name: &str) -> &str {
    name.rsplit('.').next().unwrap_or_default()
}
