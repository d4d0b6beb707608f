//! A model's shape, tensors and tokenizer, without its weights.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use indicatif::HumanBytes;
use serde_json::{Value, json};

use super::InspectArgs;
use crate::commands::{print, print_text};
use crate::config::ModelOptions;
use crate::data::template::{ChatTemplate, Stops};
use crate::data::tokenizer::Tokenizer;
use crate::hub::Location;
use crate::model::weights::Weights;
use crate::run::inputs::{ModelParts, WeightsFrom, tokenizer};
use crate::schema::Problem;
use crate::spec::{Block, DeltaHeads, Heads, Method, Mixture, ModelConfig, Rope, StateHeads};
use crate::util::failure::Failure;
use crate::util::gguf::{GgufFile, is_gguf, only_gguf};
use crate::util::stats::as_f64;
use crate::util::text::{aligned, with_commas};

/// The model that an argument names in the place of a recipe: a folder, a GGUF file, a repository of the Hub.
pub(super) fn named(recipe: &Path) -> Option<&str> {
    let is_folder = recipe.join("config.json").is_file() || !matches!(only_gguf(recipe), Ok(None));
    let is_file = recipe.is_file() && is_gguf(recipe);
    let is_on_hub = || match Location::parse(recipe.to_str()?).ok()? {
        Location::Repository { id, .. } => Some(id.contains('/') && recipe.extension().is_none_or(|end| end != "toml")),
        Location::Folder(_) => None,
    };
    recipe.to_str().filter(|_| is_folder || is_file || is_on_hub() == Some(true))
}

/// Shows a model, and what is wrong with it.
pub(super) fn run(name: &str, args: &InspectArgs) -> Result<(), Failure> {
    if args.rows.is_some() || !args.recipe.set.is_empty() || args.recipe.device.is_some() {
        let problem = Problem::new("--rows, --set and --device belong to a recipe").at(name);
        return Err(problem.hint("a model is shown without them").into());
    }
    let options = ModelOptions { path: name.to_owned(), ..ModelOptions::default() };
    let (parts, failure) = ModelParts::read(&options, 0, WeightsFrom::Disk, false);
    let ModelParts { folder: Some(folder), config: Some(config), weights, is_downloaded, .. } = parts else {
        return Err(failure.unwrap_or_else(|| Failure::input("no model")));
    };
    let mut failures: Vec<Failure> = failure.into_iter().collect();
    let tokenizer = tokenizer(&folder, &config).map_err(|error| failures.push(Failure::input(error))).ok();
    let model = Shown { name, types: types(&folder, weights.as_ref()), is_downloaded, folder, config, tokenizer };
    if args.json {
        print(&model.json().to_string())?;
    } else {
        print_text(&model.text())?;
    }
    failures.into_iter().reduce(Failure::and).map_or(Ok(()), Err)
}

/// Tensors of a type, and their bytes.
type Types = BTreeMap<String, (usize, usize)>;

/// What is stored in each type; `None` for safetensors that are not downloaded.
fn types(folder: &Path, weights: Option<&Weights>) -> Option<Types> {
    let mut types = Types::new();
    let mut add = |kind: String, num_bytes| {
        let (tensors, bytes) = types.entry(kind.to_lowercase()).or_default();
        (*tensors, *bytes) = (*tensors + 1, *bytes + num_bytes);
    };
    match weights {
        Some(Weights::Files(files)) => files.tensors().values().for_each(|tensor| {
            let numbers: usize = tensor.shape.iter().product();
            add(format!("{:?}", tensor.dtype), numbers * tensor.dtype.bitsize() / 8);
        }),
        // If the file is not downloaded yet, its head is.
        _ if is_gguf(folder) => {
            let file = GgufFile::open(folder).ok()?;
            file.tensors().values().for_each(|tensor| add(tensor.kind.to_string(), tensor.num_bytes()));
        }
        _ => return None,
    }
    Some(types)
}

struct Shown<'a> {
    name: &'a str,
    folder: PathBuf,
    is_downloaded: bool,
    config: ModelConfig,
    types: Option<Types>,
    tokenizer: Option<Tokenizer>,
}

impl Shown<'_> {
    /// The coding of safetensors; the types of a GGUF file are its coding.
    fn coding(&self) -> Option<String> {
        let method = self.config.quantisation.as_ref()?.method;
        (method != Method::Gguf).then(|| method.to_string())
    }

    fn text(&self) -> String {
        let mut text = format!("model: {}", self.name);
        if !self.is_downloaded {
            text.push_str(" (its weights are not downloaded yet)");
        } else if Path::new(self.name) != self.folder {
            let _ = write!(text, " ({})", self.folder.display());
        }
        let _ = write!(text, "\n{}", self.shape());
        text.extend(self.types.as_ref().map(|types| self.weights(types)));
        if let Some(coding) = self.coding() {
            let _ = write!(text, "\nquantised: {coding}");
        }
        if let Some(tokenizer) = &self.tokenizer {
            let _ = write!(text, "\n{}", about(tokenizer));
        }
        text
    }

    fn shape(&self) -> String {
        let ModelConfig { model_type, hidden_size, .. } = &self.config;
        let (num_layers, Rope { theta, scaling, .. }) = (self.config.num_layers(), &self.config.ropes[0]);
        let (Heads { num_heads, num_kv_heads, head_dim, .. }, inside) = self.first_block();
        let inside = match self.config.blocks.iter().find_map(Block::mixture) {
            None => inside.to_string(),
            Some(Mixture { experts, num_per_token, .. }) => {
                let width = experts.first().map_or(0, |expert| expert.intermediate_size);
                format!("{num_per_token} of {} experts of width {width}", experts.len())
            }
        };
        let head = if self.config.tie_word_embeddings { "the embedding is the head" } else { "a head of its own" };
        let scaling = scaling.as_ref().map(|scaling| format!(", scaled: {}", json!(scaling)));
        let local = self.config.ropes.get(1).map(|local| format!("; in layers with a window {}", local.theta));
        let (local, linear) =
            (local.unwrap_or_default(), self.latents() + &self.state_spaces() + &self.linear_attention());
        format!(
            "architecture: {model_type}, {}\nlayers: {num_layers} of width {hidden_size}, {inside} in \
             the feed-forward; {num_heads} heads of {head_dim}, {num_kv_heads} for keys and values{linear}\nvocabulary: {}, \
             {head}\npositions: up to {}, rotary base {theta}{}{local}",
            self.config.parameters(),
            with_commas(self.config.vocab_size),
            with_commas(self.config.max_position_embeddings),
            scaling.unwrap_or_default(),
        )
    }

    /// Widths of what queries, keys and values come from.
    fn latents(&self) -> String {
        let latent = self.config.blocks.iter().find_map(|block| block.attention()?.latent());
        latent.map_or_else(String::new, |latent| {
            let queries = latent.queries.map(|(_, rank)| format!(", {rank} for queries")).unwrap_or_default();
            let (rank, turning, values) = (latent.rank, latent.num_turning, latent.value_dim);
            format!("\nlatents: {rank} wide for keys and values{queries}; of a head {turning} turn, and values have {values}")
        })
    }

    /// How many layers have state spaces, and with which heads.
    fn state_spaces(&self) -> String {
        let mut spaces = self.config.blocks.iter().filter_map(Block::state_space).peekable();
        let Some(StateHeads { num_heads, num_groups, head_dim, state_dim }) = spaces.peek().map(|space| space.heads)
        else {
            return String::new();
        };
        let count = spaces.count();
        format!(
            "\nstate spaces: {count} of the layers; {num_heads} states of {state_dim} x {head_dim}, in {num_groups} groups"
        )
    }

    /// How many layers have linear attention, and with which heads, or convolutions.
    fn linear_attention(&self) -> String {
        let convs: Vec<_> = self.config.blocks.iter().filter_map(Block::short_conv).collect();
        if let Some(conv) = convs.first() {
            return format!("\nconvolutions: in {} of the layers, over {} tokens", convs.len(), conv.kernel_size);
        }
        let mut nets = self.config.blocks.iter().filter_map(Block::delta_net).peekable();
        let Some(heads) = nets.peek().map(|net| net.heads) else { return String::new() };
        let DeltaHeads { num_key_heads, num_value_heads, key_head_dim, value_head_dim } = heads;
        format!(
            "\nlinear attention: {} of the layers; {num_value_heads} states of {key_head_dim} x {value_head_dim}, \
             {num_key_heads} heads for queries and keys",
            nets.count()
        )
    }

    /// Heads of the first attention, and inner width of the first block.
    fn first_block(&self) -> (Heads, usize) {
        let block = &self.config.blocks[0];
        let heads = self.config.blocks.iter().find_map(Block::attention).map(|attention| attention.heads);
        let none =
            Heads { num_heads: 0, num_kv_heads: 0, head_dim: 0, scale: 0.0, window: None, chunk: None, soft_cap: None };
        (heads.unwrap_or(none), block.all_gated().next().map_or(0, |gated| gated.intermediate_size))
    }

    /// Shape and constants, under the names of config.json.
    fn config(&self) -> Value {
        let (config, Rope { theta, scaling, .. }) = (&self.config, &self.config.ropes[0]);
        let (Heads { num_heads, num_kv_heads, head_dim, .. }, inside) = self.first_block();
        let attentions = || config.blocks.iter().filter_map(Block::attention);
        let mixture = config.blocks.iter().find_map(Block::mixture);
        let biases = config.blocks[0].sites.iter().filter(|site| site.role.is_plain());
        json!({
            "model_type": config.model_type,
            "vocab_size": config.vocab_size,
            "hidden_size": config.hidden_size,
            "intermediate_size": inside,
            "num_experts": mixture.map(|mixture| mixture.experts.len()),
            "num_experts_per_tok": mixture.map(|mixture| mixture.num_per_token),
            "num_hidden_layers": config.num_layers(),
            "num_attention_heads": num_heads,
            "num_key_value_heads": num_kv_heads,
            "head_dim": head_dim,
            "max_position_embeddings": config.max_position_embeddings,
            "rms_norm_eps": config.rms_norm_eps,
            "rope_theta": theta,
            "rope_scaling": scaling,
            "local_rope_theta": config.ropes.get(1).map(|local| local.theta),
            "attn_logit_softcapping": attentions().find_map(|attention| attention.heads.soft_cap),
            "final_logit_softcapping": config.logit_soft_cap,
            "tie_word_embeddings": config.tie_word_embeddings,
            "windows": attentions().map(|attention| attention.heads.window).collect::<Vec<_>>(),
            "biases": biases.map(|site| site.has_bias).collect::<Vec<_>>(),
            "latents": attentions().map(|attention| attention.latent().map(|latent| latent.rank)).collect::<Vec<_>>(),
            "convolutions": config.blocks.iter().map(|block| block.short_conv().is_some()).collect::<Vec<_>>(),
            "state_spaces": config.blocks.iter().map(|block| block.state_space().is_some()).collect::<Vec<_>>(),
            "linear_attention": config.blocks.iter().map(|block| block.delta_net().is_some()).collect::<Vec<_>>(),
            "qk_norm": attentions().any(|attention| attention.query_key_norms.is_some()),
            "bos_token_id": config.bos_token_id,
            "eos_token_ids": config.eos_token_ids,
            "initializer_range": config.initializer_range,
            "quantisation": config.quantisation,
        })
    }

    fn weights(&self, types: &Types) -> String {
        let total = |count: fn(&(usize, usize)) -> usize| types.values().map(count).sum::<usize>();
        let (tensors, num_bytes) = (total(|(tensors, _)| *tensors), total(|(_, bytes)| *bytes));
        let bits = 8.0 * as_f64(num_bytes) / as_f64(self.config.num_parameters());
        let row = |(kind, (tensors, num_bytes)): (&String, &(usize, usize))| {
            vec![format!("  {kind}"), format!("{tensors} tensors"), HumanBytes(*num_bytes as u64).to_string()]
        };
        let rows = aligned(&types.iter().map(row).collect::<Vec<_>>()).join("\n");
        format!("\nweights: {tensors} tensors, {}, {bits:.2} bits a parameter\n{rows}", HumanBytes(num_bytes as u64))
    }

    fn json(&self) -> Value {
        let types = self.types.iter().flatten();
        let types: BTreeMap<_, _> =
            types.map(|(kind, (tensors, bytes))| (kind, json!({"tensors": tensors, "bytes": bytes}))).collect();
        json!({
            "model": self.name,
            "path": self.is_downloaded.then_some(&self.folder),
            "config": self.config(),
            "parameters": self.config.num_parameters(),
            "types": self.types.is_some().then_some(types),
            "tokenizer": self.tokenizer.as_ref().map(|tokenizer| json!({
                "tokens": tokenizer.max_id() + 1,
                "special_tokens": special(tokenizer).into_iter().collect::<BTreeMap<_, _>>(),
                "eos_token_ids": stops(tokenizer).ids,
                "chat_template": tokenizer.chat_template(),
                "tool_template": tokenizer.tool_template(),
            })),
        })
    }
}

/// The special tokens that there are.
fn special(tokenizer: &Tokenizer) -> Vec<(&'static str, &str)> {
    let tokens =
        [("bos", tokenizer.bos()), ("eos", tokenizer.eos()), ("pad", tokenizer.pad()), ("unk", tokenizer.unk())];
    tokens.into_iter().filter_map(|(name, token)| Some((name, token?.text.as_str()))).collect()
}

/// Where texts end, answers through the model's template among them.
fn stops(tokenizer: &Tokenizer) -> Stops {
    Stops::of(tokenizer, ChatTemplate::open("auto", tokenizer).ok().flatten().as_ref())
}

fn about(tokenizer: &Tokenizer) -> String {
    let mut text = format!("tokenizer: {} tokens", with_commas(tokenizer.max_id() + 1));
    for (name, token) in special(tokenizer) {
        let _ = write!(text, ", {name} {token:?}");
    }
    let Stops { ids, texts } = stops(tokenizer);
    let texts = texts.iter().map(|text| format!("{text:?}"));
    let ends: Vec<String> = ids.iter().filter_map(|id| tokenizer.token_text(*id)).chain(texts).collect();
    let characters = |template: &str| format!("{} characters", with_commas(template.chars().count()));
    let mut template = tokenizer.chat_template().map_or("none".to_owned(), characters);
    if let Some(with_tools) = tokenizer.tool_template() {
        let _ = write!(template, ", with tools {}", characters(with_tools));
    }
    let _ = write!(text, "; a text ends with {}\nchat template: {template}", ends.join(" or "));
    text
}
