//! A model's shape and tensors as llama.cpp names them.

use super::file::{list, refused, text};
use super::{FileType, gemma3n, gemma4, latent};
use crate::schema::Problem;
use crate::spec::family::{Arrangement, GgufWindows, NoRope, OwnRopes, Router, Scales};
use crate::spec::gguf::{self, Order};
use crate::spec::{
    Attention, Block, Choice, ExpertGroups, Heads, Mixture, ModelConfig, NormKind, Probabilities, Projections,
    RopeAxes, RopeScaling, SharedExpert,
};
use crate::util::gguf::{List, Value};
use crate::util::text::with_commas;

/// The metadata that every file starts with; `kind` is `model` or `adapter`.
///
/// # Errors
/// A model that llama.cpp has no architecture for.
pub(super) fn general(
    config: &ModelConfig,
    kind: &str,
    name: &str,
    num_parameters: usize,
) -> Result<Vec<(String, Value)>, Problem> {
    Ok([
        ("general.architecture", text(architecture(config)?)),
        ("general.type", text(kind)),
        ("general.name", text(name)),
        ("general.size_label", text(&size_label(num_parameters))),
        ("general.quantization_version", Value::U32(2)),
    ]
    .map(|(key, value)| (key.to_owned(), value))
    .into())
}

fn architecture(config: &ModelConfig) -> Result<&'static str, Problem> {
    config.gguf_architecture().ok_or_else(|| {
        let problem = Problem::new(format!("GGUF files of `{}` are not written here", config.model_type));
        problem.hint("merge into a folder: --out DIR")
    })
}

/// `135M`, `1.1B`: two digits at least.
#[expect(clippy::cast_precision_loss, reason = "rounded to a few digits")]
fn size_label(num_parameters: usize) -> String {
    let (unit, suffix) = match num_parameters {
        1_000_000_001.. => (1e9, "B"),
        1_000_001.. => (1e6, "M"),
        _ => (1e3, "K"),
    };
    let scaled = num_parameters as f64 / unit;
    let digits = 2usize.saturating_sub(format!("{scaled:.0}").trim_start_matches('0').len());
    format!("{scaled:.digits$}{suffix}")
}

/// Shape and constants of the model.
#[expect(clippy::cast_possible_truncation, reason = "the file has f32, and counts below 2^32")]
pub(super) fn shape(config: &ModelConfig, dtype: FileType) -> Result<Vec<(String, Value)>, Problem> {
    let family = config.family();
    let count = |value: usize| Value::U32(value as u32);
    let rope = &config.ropes[0];
    let (attention, gated) = (config.blocks.iter().find_map(Block::attention), config.blocks[0].all_gated().next());
    let turns = Order::of(config, "q_proj").is_some();
    let heads = |of: fn(&Heads) -> usize| count(attention.map_or(0, |attention| of(&attention.heads)));
    let first_gated = |block: &Block| block.all_gated().next().map_or(0, |gated| gated.intermediate_size);
    // Of layers with a mixture there are other keys.
    let has_dense = config.blocks.iter().any(|block| block.mixture().is_none());
    let is_one_each = family.arrangement == Arrangement::OneEach;
    let of_width = config.blocks.iter().filter(|block| is_one_each || !has_dense || block.mixture().is_none());
    let widths: Vec<usize> = of_width.map(first_gated).collect();
    let conv = config.blocks.iter().find_map(Block::short_conv);
    let kv_heads = |block: &Block| match block.attention() {
        // The cache has one for all.
        Some(attention) if attention.latent().is_some() && family.gguf.splits_latents => Some(1),
        Some(attention) => Some(attention.heads.num_kv_heads),
        // Says which layers have convolutions or states.
        None => block.delta_net().is_none().then_some(0),
    };
    let of_latent = attention.and_then(|attention| {
        let latent = attention.latent()?;
        let of_cache = [latent.rank + latent.num_turning, latent.rank];
        Some(if family.gguf.splits_latents { of_cache } else { [attention.heads.head_dim, latent.value_dim] })
    });
    let [key_width, value_width] = of_latent.unwrap_or([rope.head_dim; 2]).map(count);
    let num_kv_heads: Vec<usize> = config.blocks.iter().filter_map(kv_heads).collect();
    let mut keys = vec![
        ("block_count", count(config.num_layers())),
        ("context_length", count(config.max_position_embeddings)),
        ("embedding_length", count(config.hidden_size)),
        ("feed_forward_length", of_layers(&widths)),
        ("attention.head_count", heads(|heads| heads.num_heads)),
        ("attention.head_count_kv", of_layers(&num_kv_heads)),
        (gguf::norm_key(config.norm_kind), Value::F32(config.rms_norm_eps as f32)),
        ("attention.key_length", key_width),
        ("attention.value_length", value_width),
        ("rope.freq_base", Value::F32(rope.theta as f32)),
    ];
    if turns {
        keys.push(("vocab_size", count(config.vocab_size)));
    }
    if turns
        || of_latent.is_some()
        || rope.width < rope.head_dim
        || gated.is_some_and(|gated| matches!(gated.gate_up, Projections::Fused { .. }))
    {
        keys.push(("rope.dimension_count", count(rope.width)));
    }
    if family.gguf.windows == GgufWindows::Everywhere {
        let window = attention.and_then(|attention| attention.heads.window);
        keys.push(("attention.sliding_window", count(window.unwrap_or(0))));
    }
    keys.extend(scaling(config));
    if let Some(RopeAxes { sections: [first, rows, columns], .. }) = rope.axes {
        let sections = [first, rows, columns, 0].map(|pairs| i32::try_from(pairs).unwrap_or(i32::MAX));
        keys.push((gguf::ROPE_SECTIONS, list(List::I32(sections.into()))));
    }
    if config.num_deepstack_layers > 0 {
        keys.push(("n_deepstack_layers", count(config.num_deepstack_layers)));
    }
    if is_one_each {
        // It has one norm under two names.
        keys.push((gguf::norm_key(NormKind::Layer), Value::F32(config.rms_norm_eps as f32)));
    }
    if let Arrangement::BesideIf(key) | Arrangement::NormedApartIf(key) = family.arrangement {
        keys.push((key, Value::Bool(config.blocks[0].sublayers[1].is_beside)));
    }
    keys.extend(conv.map(|conv| (gguf::CONV_KERNEL, count(conv.kernel_size))));
    keys.extend(delta_nets(config)?);
    keys.extend(state_spaces(config)?);
    keys.extend(latent::keys(config)?);
    keys.extend(experts(config)?);
    keys.extend(windows_and_caps(config)?);
    keys.extend(gemma4::keys(config)?);
    keys.extend(gemma3n::keys(config)?);
    keys.extend(multipliers(config));
    check_ropes(config)?;
    check_implied(config)?;
    let architecture = architecture(config)?;
    let named = keys.into_iter().map(|(key, value)| (format!("{architecture}.{key}"), value));
    Ok(named.chain([("general.file_type".to_owned(), Value::U32(dtype.code()))]).collect())
}

/// How rotary frequencies are scaled.
#[expect(clippy::cast_possible_truncation, reason = "the file has f32, and counts below 2^32")]
fn scaling(config: &ModelConfig) -> Vec<(&'static str, Value)> {
    let (family, rope) = (config.family(), &config.ropes[0]);
    let count = |value: usize| Value::U32(value as u32);
    let mut keys = Vec::new();
    if let Some(RopeScaling::Linear { factor }) = &rope.scaling {
        keys.extend([("rope.scaling.type", text("linear")), ("rope.scaling.factor", Value::F32(*factor as f32))]);
    }
    if let Some(RopeScaling::Yarn { factor, beta_fast, beta_slow, original_max_position_embeddings, .. }) =
        &rope.scaling
    {
        keys.extend([
            ("rope.scaling.type", text("yarn")),
            ("rope.scaling.factor", Value::F32(*factor as f32)),
            ("rope.scaling.original_context_length", count(*original_max_position_embeddings)),
        ]);
        if let Some(growth) = latent::yarn_growth(config) {
            keys.push((gguf::YARN_GROWTH, Value::F32(0.1 * growth as f32)));
        } else if family.own_ropes == OwnRopes::Ministral {
            let growth = rope.query_growth.map_or(0.0, |growth| growth.beta);
            // The third: cosines and sines have no factor.
            let numbers = gguf::MINISTRAL_YARN.iter().zip([*beta_fast, *beta_slow, 1.0, growth]);
            keys.extend(numbers.map(|((_, key), number)| (*key, Value::F32(number as f32))));
        }
    }
    if let Some(RopeScaling::LongRope { attention_factor, original_max_position_embeddings: original, .. }) =
        &rope.scaling
    {
        // Phi-3's goes without saying.
        keys.extend((family.own_ropes != OwnRopes::Phi).then(|| ("rope.scaling.type", text("longrope"))));
        keys.push(("rope.scaling.original_context_length", count(*original)));
        keys.push(("rope.scaling.attn_factor", Value::F32(*attention_factor as f32)));
    }
    keys
}

/// What goes without saying there.
fn check_implied(config: &ModelConfig) -> Result<(), Problem> {
    let (_, implied) = config.family().activation;
    let convs = || config.blocks.iter().filter_map(Block::short_conv);
    let what = if config.blocks.iter().flat_map(Block::all_gated).any(|gated| gated.activation != implied) {
        "this activation"
    } else if config.tie_word_embeddings && config.family().gguf.tied_head == Some(false) {
        "a head that is the embedding"
    } else if !config.tie_word_embeddings && config.family().gguf.tied_head == Some(true) {
        "a head of its own"
    } else if config.family().gguf.architecture == Some("dots1") && shares_keys(config) {
        "fewer heads of keys than of queries"
    } else if ([Scales::Logits, Scales::Parts].contains(&config.family().scales)
        || config.family().gguf.architecture == Some("hy_v3"))
        && config.blocks[0].sites.iter().any(|site| site.has_bias)
    {
        "biases of attention"
    } else if matches!(config.family().gguf.architecture, Some("exaone4" | "phi2"))
        && config.blocks[0].attention().is_some_and(|it| it.heads.query_width() != config.hidden_size)
    {
        "heads that are not as wide together as the model"
    } else if config.family().scales == Scales::Depth && !has_usual_depth(config) {
        "this `scale_emb`, `scale_depth` or `dim_model_base`"
    } else if config.post_norm_eps.is_some_and(|eps| (eps * 1e8 - 1.0).abs() > 1e-6) {
        "this `post_norm_eps`"
    } else if config.blocks[0].attention().is_some_and(|it| it.norms_by_head().is_some()) {
        let problem = Problem::new("GGUF files with LayerNorms of heads are not written here");
        return Err(problem.hint("merge into a folder: --out DIR"));
    } else if config.family().no_rope == NoRope::Full
        && config.blocks[0].attention().is_none_or(|it| it.heads.window.is_none())
    {
        "no window"
    } else if convs().any(|conv| conv.kernel_size == 1) {
        "convolutions over one token"
    } else if convs().count() == config.num_layers() {
        "no attention"
    } else {
        return Ok(());
    };
    refused(config, what)
}

/// Whether the factors are those of the published `MiniCPM` 3.
#[expect(clippy::cast_precision_loss, reason = "a width and a number of layers")]
fn has_usual_depth(config: &ModelConfig) -> bool {
    let of_outputs = 1.4 / (config.num_layers() as f64).sqrt();
    let found = [config.embedding_scale, config.blocks[0].sublayers[0].output_scale, Some(config.logit_divisor)];
    let usual = [12.0, of_outputs, config.hidden_size as f64 / 256.0];
    found.into_iter().zip(usual).all(|(found, usual)| (found.unwrap_or(1.0) / usual - 1.0).abs() < 1e-6)
}

fn shares_keys(config: &ModelConfig) -> bool {
    let mut heads = config.blocks.iter().filter_map(|block| Some(block.attention()?.heads));
    heads.any(|heads| heads.num_kv_heads < heads.num_heads)
}

/// What layers have: one number where it is that of all.
#[expect(clippy::cast_possible_truncation, clippy::cast_possible_wrap, reason = "counts below 2^31")]
fn of_layers(counts: &[usize]) -> Value {
    match counts.first() {
        Some(first) if counts.iter().all(|count| count == first) => Value::U32(*first as u32),
        _ => list(List::I32(counts.iter().map(|count| *count as i32).collect())),
    }
}

/// The delta rules, and where attention is between them.
///
/// # Errors
/// What llama.cpp computes otherwise, whatever the file says.
#[expect(clippy::cast_possible_truncation, reason = "counts below 2^32")]
fn delta_nets(config: &ModelConfig) -> Result<Vec<(&'static str, Value)>, Problem> {
    let Some(net) = config.blocks.iter().find_map(Block::delta_net) else { return Ok(Vec::new()) };
    let interval = config.blocks.iter().position(|block| block.attention().is_some()).map_or(0, |first| first + 1);
    let is_attention = |layer: usize| interval > 0 && (layer + 1).is_multiple_of(interval);
    if !config.blocks.iter().enumerate().all(|(layer, block)| block.attention().is_some() == is_attention(layer)) {
        return refused(config, "attention in other layers than every so many");
    }
    let heads = net.heads;
    if heads.key_head_dim != heads.value_head_dim {
        return refused(config, "heads of keys and values of different widths");
    }
    let counts = [
        ("ssm.conv_kernel", net.kernel_size),
        ("ssm.state_size", heads.key_head_dim),
        ("ssm.group_count", heads.num_key_heads),
        ("ssm.time_step_rank", heads.num_value_heads),
        ("ssm.inner_size", heads.value_width()),
        ("full_attention_interval", interval),
    ];
    Ok(counts.map(|(key, count)| (key, Value::U32(count as u32))).into())
}

/// The state spaces.
///
/// # Errors
/// What llama.cpp computes otherwise, whatever the file says.
#[expect(clippy::cast_possible_truncation, reason = "counts below 2^32")]
fn state_spaces(config: &ModelConfig) -> Result<Vec<(&'static str, Value)>, Problem> {
    let attentions = || config.blocks.iter().filter_map(Block::attention);
    let is_hybrid = config.family().gguf.without_states.is_some();
    let rope = is_hybrid.then(|| Value::Bool(attentions().any(|it| it.rope.is_some())));
    let rope = rope.map(|has_rope| (gguf::HAS_ROPE, has_rope));
    let Some(space) = config.blocks.iter().find_map(Block::state_space) else { return Ok(rope.into_iter().collect()) };
    let has_mixture = config.blocks.iter().any(|block| block.mixture().is_some());
    let is_alone = |block: &Block| block.sublayers.len() == 1 && block.gated().is_some();
    let what = if space.bounds[0] > config.family().least_strength() || space.bounds[1].is_finite() {
        "this `time_step_limit`"
    } else if !space.has_conv_bias {
        "convolutions without biases"
    } else if config
        .blocks
        .iter()
        .flat_map(|block| &block.sites)
        .any(|site| site.name.contains("in_proj") && site.has_bias)
    {
        "biases of state spaces' projections"
    } else if has_mixture && config.blocks.iter().any(is_alone) {
        "feed-forward layers among mixtures"
    } else if attentions().next().is_none() {
        "no attention"
    } else {
        let heads = space.heads;
        let counts = [space.kernel_size, heads.state_dim, heads.num_groups, heads.num_heads, heads.inner_width()]
            .map(|count| count as u32);
        let keys = gguf::STATE_COUNTS.into_iter().zip(counts.map(Value::U32));
        return Ok(keys.chain(rope).collect());
    };
    refused(config, what)
}

/// The mixtures of experts.
///
/// # Errors
/// What llama.cpp computes otherwise, whatever the file says.
#[expect(clippy::cast_possible_truncation, reason = "counts below 2^32")]
fn experts(config: &ModelConfig) -> Result<Vec<(&'static str, Value)>, Problem> {
    let mixtures: Vec<&Mixture> = config.blocks.iter().filter_map(Block::mixture).collect();
    let Some(mixture) = mixtures.first() else { return Ok(Vec::new()) };
    let of_family = config.family().gguf;
    let router = config.family().experts.and_then(|experts| experts.router);
    let dense = config.blocks.iter().take_while(|block| block.mixture().is_none()).count();
    let is_sum = !matches!(mixture.probabilities, Probabilities::OfAll | Probabilities::Sigmoids);
    let is_one_each = config.family().arrangement == Arrangement::OneEach;
    if config.family().has_chunks() {
        return of_chunked(config, mixture);
    }
    if !is_one_each && mixtures.len() + router.and(Some(dense)).unwrap_or(0) < config.num_layers() {
        return refused(config, "layers without experts");
    }
    if (router.is_none() || !of_family.expert_factor) && of_family.experts_sum_to_one != is_sum {
        return refused(config, "this `norm_topk_prob`");
    }
    let mut keys = vec![("expert_count", mixture.experts.len()), ("expert_used_count", mixture.num_per_token)];
    if of_family.expert_width {
        keys.extend(mixture.experts.first().map(|gated| ("expert_feed_forward_length", gated.intermediate_size)));
    }
    let shared = mixture.shared.as_ref();
    keys.extend(shared.map(|shared| ("expert_shared_feed_forward_length", shared.gated.intermediate_size)));
    if let Some([down, _]) = mixture.latent {
        let sites = config.blocks.iter().find(|block| block.mixture().is_some()).map(|block| &block.sites);
        keys.extend(sites.map(|sites| (gguf::LATENT_EXPERTS, sites[down].shape[0])));
    }
    let of_router = router.map(|router| of_router(config, mixture, (router, dense))).transpose()?;
    let keys = keys.into_iter().map(|(key, value)| (key, Value::U32(value as u32)));
    Ok(keys.chain(of_router.into_iter().flatten()).collect())
}

/// The same of Llama 4, and what goes without saying in its attention.
///
/// # Errors
/// What llama.cpp computes otherwise, whatever the file says.
#[expect(clippy::cast_possible_truncation, reason = "counts below 2^32")]
fn of_chunked(config: &ModelConfig, mixture: &Mixture) -> Result<Vec<(&'static str, Value)>, Problem> {
    let step = config.blocks.iter().take_while(|block| block.mixture().is_none()).count() + 1;
    let is_mixture = |layer: usize| (layer + 1).is_multiple_of(step);
    let attentions = || config.blocks.iter().filter_map(Block::attention);
    // They go by the number of experts.
    let has_norms = mixture.experts.len() != 128;
    let what = if config.blocks.iter().enumerate().any(|(layer, block)| block.mixture().is_some() != is_mixture(layer))
    {
        "mixtures in other layers than every so many"
    } else if attentions().any(|it| it.heads.chunk != it.rope.map(|_| gguf::CHUNK)) {
        "an `attention_chunk_size` other than 8192"
    } else if attentions().any(|it| it.query_growth != it.rope.is_none().then_some(gguf::QUERY_GROWTH)) {
        "this `floor_scale` or `attn_scale`"
    } else if attentions().any(|it| it.query_key_norms.is_some() != (has_norms && it.rope.is_some())) {
        "this `use_qk_norm`"
    } else {
        let width = mixture.experts[0].intermediate_size;
        let counts = [
            ("expert_count", mixture.experts.len()),
            ("expert_used_count", mixture.num_per_token),
            ("expert_feed_forward_length", width),
            (gguf::MIXTURE_STEP, step),
        ];
        return Ok(counts.map(|(key, count)| (key, Value::U32(count as u32))).into());
    };
    refused(config, what)
}

/// What a router has beside its probabilities, and the `dense` layers before the first mixture.
///
/// # Errors
/// What llama.cpp computes otherwise, whatever the file says.
#[expect(clippy::cast_possible_truncation, reason = "counts below 2^32, and the file has f32")]
fn of_router(
    config: &ModelConfig,
    mixture: &Mixture,
    (router, dense): (Router, usize),
) -> Result<Vec<(&'static str, Value)>, Problem> {
    let count = |value: usize| Value::U32(value as u32);
    let Choice { bias, groups, factor } = mixture.choice;
    let width = mixture.experts[0].intermediate_size;
    let is_count = router.shared.is_some_and(|(_, key)| !key.ends_with("_size"));
    let of_shared = |shared: &SharedExpert| if is_count { shared.gated.intermediate_size / width } else { 1 };
    let num_shared = mixture.shared.as_ref().map(of_shared);
    if router.bias.is_some() && bias.is_none() {
        return refused(config, "a router without a bias");
    }
    let has_factor = config.family().gguf.expert_factor;
    if !has_factor && (factor - 1.0).abs() > 1e-9 {
        return refused(config, "this `routed_scaling_factor`");
    }
    if has_factor && num_shared.is_none() {
        return refused(config, "experts without shared ones");
    }
    if groups.is_some_and(|groups| groups.num_best != 2) {
        return refused(config, "groups of experts that are chosen by their best one (`topk_method`)");
    }
    let is_sum = !matches!(mixture.probabilities, Probabilities::OfAll | Probabilities::Sigmoids);
    let gate = if router.sigmoid.is_some() { 2 } else { 1 };
    let mut keys = vec![(gguf::EXPERT_GATE, count(gate))];
    keys.extend(router.first.map(|_| (gguf::DENSE_LAYERS, count(dense))));
    keys.extend(num_shared.map(|num_shared| ("expert_shared_count", count(num_shared))));
    // ERNIE 4.5's could be every so many layers.
    let is_ernie = router.sigmoid.is_none() && router.groups.is_none();
    keys.extend(is_ernie.then(|| (gguf::MIXTURE_STEP, count(1))));
    if has_factor {
        keys.extend(gguf::EXPERT_WEIGHTS.into_iter().zip([Value::F32(factor as f32), Value::Bool(is_sum)]));
    }
    let of_groups =
        |groups: ExpertGroups| gguf::EXPERT_GROUPS.into_iter().zip([groups.count, groups.num_kept].map(count));
    keys.extend(groups.into_iter().flat_map(of_groups));
    Ok(keys)
}

/// The multipliers of Granite and of Cohere.
#[expect(clippy::cast_possible_truncation, reason = "the file has f32")]
fn multipliers(config: &ModelConfig) -> Vec<(&'static str, Value)> {
    if [Scales::Logits, Scales::Normed].contains(&config.family().scales) {
        return vec![(gguf::LOGIT_SCALE, Value::F32((1.0 / config.logit_divisor) as f32))];
    }
    if config.family().scales != Scales::Multipliers {
        return Vec::new();
    }
    let scale = config.blocks.iter().find_map(Block::attention).map_or(1.0, |attention| attention.heads.scale);
    let of_outputs = config.blocks[0].sublayers[0].output_scale.unwrap_or(1.0);
    let found = [scale, config.embedding_scale.unwrap_or(1.0), of_outputs, config.logit_divisor];
    gguf::MULTIPLIERS.iter().zip(found).map(|((_, key), number)| (*key, Value::F32(number as f32))).collect()
}

/// Layers without a rotary embedding are where llama.cpp expects them, and frequencies have no scaling that is not written.
fn check_ropes(config: &ModelConfig) -> Result<(), Problem> {
    let family = config.family();
    let is_ministral = family.own_ropes == OwnRopes::Ministral;
    let is_written = |scaling: &RopeScaling| match scaling {
        RopeScaling::Linear { .. } => true,
        RopeScaling::Llama3 { .. } => family.gguf.rope_factors,
        RopeScaling::Proportional { .. } => family.is_gemma4(),
        RopeScaling::LongRope { .. } => family.has_long_ropes(),
        // What llama.cpp takes for granted.
        RopeScaling::Yarn { factor, beta_fast, beta_slow, truncate, attention_factor, .. } => {
            let has_usual_ramp = is_ministral || [*beta_fast, *beta_slow] == [32.0, 1.0];
            let usual =
                if is_ministral || latent::yarn_growth(config).is_some() { 1.0 } else { 1.0 + 0.1 * factor.ln() };
            // A file does not say it.
            let truncates = *truncate != (family.own_ropes == OwnRopes::GptOss);
            has_usual_ramp && truncates && (attention_factor - usual).abs() < 1e-4
        }
        RopeScaling::Dynamic { .. } => false,
    };
    let mut scalings = config.ropes.iter().map(|rope| rope.scaling.as_ref());
    let is_written = scalings.next().flatten().is_none_or(is_written) && scalings.all(|local| local.is_none());
    if !is_written {
        return refused(config, "this `rope_scaling`");
    }
    let has_rope = |block: &Block| block.attention().is_none_or(|attention| attention.rope.is_some());
    let has_window = |block: &Block| block.attention().is_some_and(|it| it.heads.window.is_some());
    let expected = |layer: usize| match family.no_rope {
        NoRope::LastOf(every) => !(layer + 1).is_multiple_of(every),
        NoRope::Bases if !family.is_muse() => has_rope(&config.blocks[layer]),
        NoRope::Full | NoRope::Bases => has_window(&config.blocks[layer]),
        NoRope::FullUnlessNull => has_window(&config.blocks[layer]) || !config.blocks.iter().any(has_window),
        NoRope::All => config.blocks[layer].attention().is_none(),
        NoRope::UnlessNamed => has_rope(&config.blocks[layer]),
        NoRope::Never => true,
    };
    if config.blocks.iter().enumerate().all(|(layer, block)| has_rope(block) == expected(layer)) {
        return Ok(());
    }
    let problem = Problem::new("GGUF has no place for `no_rope_layers` other than every fourth");
    Err(problem.hint("merge into a folder: --out DIR"))
}

/// Windows and caps, in families that have them in a file.
///
/// # Errors
/// What llama.cpp computes otherwise, whatever the file says.
#[expect(clippy::cast_possible_truncation, reason = "the file has f32, and counts below 2^32")]
fn windows_and_caps(config: &ModelConfig) -> Result<Vec<(&'static str, Value)>, Problem> {
    let attentions: Vec<_> = config.blocks.iter().filter_map(Block::attention).collect();
    let Some(first) = attentions.first() else { return Ok(Vec::new()) };
    let Heads { num_heads, head_dim, scale, soft_cap, .. } = first.heads;
    let family = config.family();
    let implied = gguf::implied(family, config.num_layers(), config.hidden_size, num_heads, head_dim);
    let window = first.heads.window;
    if family.gguf.windows == GgufWindows::Listed {
        return listed_windows(config, &attentions);
    }
    let Some(implied) = implied else {
        let is_lost = matches!(family.gguf.windows, GgufWindows::OfLayers { .. }) && window.is_some();
        return if is_lost { refused(config, "windows in other than 64 layers") } else { Ok(Vec::new()) };
    };
    let has_window = |layer: usize| !(layer + 1).is_multiple_of(implied.pattern);
    let as_implied = |(layer, attention): (usize, &&Attention)| {
        attention.heads.window == window.filter(|_| has_window(layer))
            && attention.rope.is_none_or(|rope| rope == usize::from(has_window(layer) && config.ropes.len() > 1))
    };
    if !attentions.iter().enumerate().all(as_implied) {
        return refused(config, "windows in other layers than the family's");
    }
    if (scale * implied.query_scalar.sqrt() - 1.0).abs() > 1e-6 {
        return refused(config, "this `query_pre_attn_scalar`");
    }
    let is_tied = family.gguf.tied_head == Some(true);
    if !is_tied && window.is_none() {
        return refused(config, "no window");
    }
    let has_caps = family.soft_caps.is_none_or(|caps| caps.iter().any(Option::is_some));
    if !has_caps && (soft_cap.is_some() || config.logit_soft_cap.is_some()) {
        return refused(config, "caps of scores and logits");
    }
    let caps = [("attn_logit_softcapping", soft_cap), ("final_logit_softcapping", config.logit_soft_cap)];
    let caps = caps.into_iter().filter_map(|(key, cap)| Some((key, Value::F32(cap? as f32))));
    let window = window.map(|window| ("attention.sliding_window", Value::U32(window as u32)));
    let local = config.ropes.get(1).map(|rope| ("rope.freq_base_swa", Value::F32(rope.theta as f32)));
    Ok(caps.chain(window).chain(local).collect())
}

/// The same where a file says which layers have a window, and which a rotary embedding.
#[expect(clippy::cast_possible_truncation, reason = "the file has f32, and counts below 2^32")]
fn listed_windows(config: &ModelConfig, attentions: &[&Attention]) -> Result<Vec<(&'static str, Value)>, Problem> {
    let Some(window) = attentions.iter().find_map(|attention| attention.heads.window) else {
        return refused(config, "no window");
    };
    if config.ropes.iter().any(|rope| rope.theta != config.ropes[0].theta) {
        return refused(config, "another base of the rotary embedding in layers with a window");
    }
    let of_layers = |has: fn(&Attention) -> bool| list(List::Bool(attentions.iter().map(|it| has(it)).collect()));
    let mut keys = vec![
        (gguf::WINDOW, Value::U32(window as u32)),
        (gguf::WINDOW_PATTERN, of_layers(|attention| attention.heads.window.is_some())),
    ];
    if !config.family().is_muse() && attentions.iter().any(|attention| attention.rope.is_none()) {
        keys.push((gguf::ROPE_PATTERN, of_layers(|attention| attention.rope.is_some())));
    }
    keys.extend(config.logit_soft_cap.map(|cap| ("final_logit_softcapping", Value::F32(cap as f32))));
    Ok(keys)
}

/// What to say of a model whose windows get lost: llama.cpp computes those of Gemma and gpt-oss alone, whatever a file says.
#[must_use]
pub fn lost_windows(config: &ModelConfig) -> Option<String> {
    let family = config.family();
    if !matches!(family.gguf.windows, GgufWindows::Never | GgufWindows::Everywhere)
        || family.is_gemma4()
        || family.is_gemma3n()
    {
        return None;
    }
    let window = config.blocks.iter().filter_map(|block| block.attention()?.heads.window).min()?;
    (window < config.max_position_embeddings).then(|| {
        format!(
            "llama.cpp does not compute this model's sliding window: beyond {} tokens it writes other texts than the \
             model does here\n  hint: keep it within them: llama-cli -c {window}",
            with_commas(window)
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::weights::fixture::tiny_config;
    use crate::spec::{QueryKeyNorms, SublayerKind};

    #[test]
    fn every_tensor_of_every_family_has_a_name_of_its_own() {
        let mut config = tiny_config();
        for block in &mut config.blocks {
            block.sites.iter_mut().for_each(|site| site.has_bias = true);
            for sublayer in &mut block.sublayers {
                if let SublayerKind::Attention(attention) = &mut sublayer.kind {
                    attention.query_key_norms = Some(QueryKeyNorms::Heads);
                }
            }
        }
        let name = |(name, _): &(String, Vec<usize>)| gguf::tensor_name(&config, name).unwrap();
        let names: Vec<String> = config.expected_tensors().iter().map(name).collect();
        assert_eq!(names.iter().collect::<std::collections::HashSet<_>>().len(), names.len());
        for name in ["token_embd.weight", "blk.1.attn_k.bias", "blk.0.attn_q_norm.weight", "blk.0.ffn_norm.weight"] {
            assert!(names.contains(&name.to_owned()), "{name}");
        }
        assert_eq!(gguf::tensor_name(&config, "model.layers.0.self_attn.rotary_emb.inv_freq"), None);
    }

    #[test]
    fn llama_31s_factors_are_what_the_frequencies_are_divided_by() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/configs/llama-3.1-8b.json");
        let config = ModelConfig::from_file(path.as_ref()).unwrap();
        let [(_, factors)] = &gguf::rope_factors(&config)[..] else { panic!("one tensor") };
        assert_eq!((factors.len(), factors[0], factors[63]), (64, 1.0, 8.0));
        assert!(factors.is_sorted() && factors.iter().any(|factor| (1.1..7.9).contains(factor)));
        assert!(gguf::rope_factors(&tiny_config()).is_empty() && check_ropes(&config).is_ok());
        assert!(check_ropes(&ModelConfig { model_type: "qwen3".into(), ..config }).is_err());
    }

    #[test]
    fn a_window_that_llama_cpp_does_not_compute_is_told_where_texts_can_be_longer() {
        let warning = |kind: &str, more: &str| {
            let json = format!(
                r#"{{"model_type": "{kind}", "vocab_size": 8, "hidden_size": 16, "intermediate_size": 16,
                "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8,
                "max_position_embeddings": 64{more}}}"#
            );
            lost_windows(&ModelConfig::from_json(&json).unwrap())
        };
        let window = r#", "sliding_window": 7"#;
        for (kind, more) in
            [("mistral", ""), ("mixtral", ""), ("phi3", ""), ("qwen2", r#", "use_sliding_window": true"#)]
        {
            let more = format!(r#"{more}{window}, "max_window_layers": 1"#);
            let warning = warning(kind, &more).unwrap_or_else(|| panic!("{kind}"));
            assert!(warning.contains("beyond 7 tokens") && warning.ends_with("llama-cli -c 7"), "{warning}");
        }
        for (kind, more) in [
            ("qwen2", window),
            ("mistral", r#", "sliding_window": null"#),
            ("mistral", r#", "sliding_window": 64"#),
            ("gemma2", window),
            ("llama", ""),
        ] {
            assert_eq!(warning(kind, more), None, "{kind}{more}");
        }
    }

    #[test]
    fn sizes_have_two_digits_at_least() {
        let sizes =
            [(134_515_008, "135M"), (1_100_048_384, "1.1B"), (15_191_712, "15M"), (579_000, "579K"), (9, "0.01K")];
        for (size, label) in sizes {
            assert_eq!(size_label(size), label);
        }
    }
}
