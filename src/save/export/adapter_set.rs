//! Copies adapters between a device and host memory.

use std::path::Path;

use burn::tensor::{Device, Tensor};

use super::adapter_check::{check_adapter, matrix_problems};
use super::adapter_file::{EMBEDDING, HEAD, SavedAdapter};
use super::{AdapterWeights, ExportError, HostMatrix};
use crate::config::TargetModules;
use crate::lora::targets::{AdapterShape, FIRST_EXPERT, Selection};
use crate::lora::{Adapter, AdapterSet, FullTensor, FullTensors, RowNorms};
use crate::model::weights::Weights;
use crate::ops::host;
use crate::spec::{ModelConfig, is_router, name_alone, nesting_of};
use crate::util::faults;

/// The matrices of an adapter, copied from its device.
#[must_use]
pub fn adapter_weights(adapters: &AdapterSet) -> AdapterWeights {
    let by_module = adapters.iter().flat_map(|adapter| {
        let all = adapter.matrices.as_ref().map(host_matrix);
        match adapter.num_experts {
            None => vec![(adapter.module.clone(), all)],
            Some(num_experts) => {
                let of = |expert| {
                    (of_expert(&adapter.module, expert), all.as_ref().map(|all| all.part(expert, num_experts)))
                };
                (0..num_experts).map(of).collect()
            }
        }
    });
    AdapterWeights {
        adapters: by_module.collect(),
        full: adapters.full.iter().map(|(full, values)| (full.name(), host_matrix(values))).collect(),
        is_tied: adapters.full.iter().any(|(full, _)| full == FullTensor::Tied),
        beside: adapters.full.beside().map(|(full, values)| (full.name(), host_matrix(values))).collect(),
        experts: adapters.expert_form,
        ..AdapterWeights::default()
    }
}

/// Puts the matrices read from `folder` on a device. They must be exactly those of `selection`, which gives the scales, and of the
/// tokens `ids`.
///
/// # Errors
/// Every matrix that is missing, has another shape, or is not in `selection`.
pub fn adapter_set(
    folder: &Path,
    mut weights: AdapterWeights,
    (selection, ids): (&Selection, Option<&[usize]>),
    config: &ModelConfig,
    dropout: f64,
    device: &Device,
) -> Result<AdapterSet, ExportError> {
    let problems = matrix_problems(&weights, selection, config);
    if !problems.is_empty() {
        return Err(ExportError::AdapterTensors {
            path: folder.to_owned(),
            expected_by: "the `[lora]` section",
            problems,
        });
    }
    let mut blocks = AdapterSet::none(selection.shapes.len()).blocks;
    for (layer, site, shape) in selection.iter() {
        let module = config.module_name(layer, site);
        let sites = config.blocks[layer].of_experts(site).into_iter();
        let parts = sites.filter_map(|site| weights.remove(&config.module_name(layer, site)));
        let Some(all) = parts.reduce(|all, part| all.zip(part).map(|(all, part)| all.above(part))) else { continue };
        let matrices = all.map(|matrix| on_device(matrix, device));
        let AdapterShape { kind, scale, num_experts, .. } = shape;
        let adapter = Adapter { module, kind, matrices, scale, num_experts, norms: RowNorms::default() };
        blocks[layer].insert(site, adapter);
    }
    let full = selection.full.keys().copied().chain([FullTensor::Score]);
    let full = full.filter_map(|full| Some((full, on_device(weights.full.remove(&full.name())?, device)))).collect();
    let beside = weights.beside.into_iter().map(|(name, values)| {
        let full = match (config.tie_word_embeddings, &*name) {
            (true, _) => FullTensor::Tied,
            (false, HEAD) => FullTensor::Head,
            (false, _) => FullTensor::Embedding,
        };
        (full, on_device(values, device))
    });
    let full = FullTensors::new(full, ids.unwrap_or_default(), beside.collect());
    Ok(AdapterSet { blocks, dropout, full, expert_form: config.expert_form() })
}

/// The module of an expert, by that of the first.
fn of_expert(module: &str, expert: usize) -> String {
    module.replacen(FIRST_EXPERT, &format!(".experts.{expert}."), 1)
}

fn on_device(matrix: HostMatrix, device: &Device) -> Tensor<2> {
    let shape = matrix.shape();
    host::tensor(matrix.values, shape, device)
}

impl SavedAdapter {
    /// Loads the adapter, read from `folder`, onto a device, for a model of this shape. Dropout is off.
    ///
    /// # Errors
    /// As [`check_adapter`].
    pub fn into_set(self, folder: &Path, config: &ModelConfig, device: &Device) -> Result<AdapterSet, ExportError> {
        let this = self.named_for(config);
        let selection = check_adapter(folder, &this, config)?;
        let ids = this.config.trainable_token_indices.as_deref();
        adapter_set(folder, this.weights, (&selection, ids), config, 0.0, device)
    }

    /// The adapter under the names that modules have in this model. `AutoModelForCausalLM` makes the language model alone of some
    /// multimodal models, and PEFT then writes the names that it has alone; before transformers 4.52 the decoder was elsewhere.
    /// A head that is the embedding goes by the embedding's name, and adapters of all experts are one by one.
    #[must_use]
    pub fn named_for(mut self, config: &ModelConfig) -> Self {
        let named = |name: String| match nesting_of(&name) {
            // In Llama 4 the decoder is where it was in others before, and a GGUF file has the language model alone.
            Some(nesting) if config.nesting != Some(nesting) => {
                name_alone(&name).map_or(name, |alone| config.module_of(&alone))
            }
            Some(_) => name,
            None => config.module_of(&name),
        };
        let named = |name: String| if is_router(&name) { config.router_as_in_files(&named(name)) } else { named(name) };
        self.weights.adapters = self.weights.adapters.into_iter().map(|(name, pair)| (named(name), pair)).collect();
        // Names, which may begin within the nesting, and beginnings of expressions.
        let current = |name: &String| {
            let (start, name) = name.strip_prefix('^').map_or(("", &**name), |rest| ("^", rest));
            let behind =
                |start: &str| name.strip_prefix(start).or_else(|| name.strip_prefix(&start.replace('.', r"\.")));
            let plain = name.replace(r"\.", ".");
            let direct = nesting_of(&plain).map(|nesting| (nesting, nesting));
            let within = || nesting_of(&format!("model.{plain}")).map(|nesting| (nesting, &nesting["model.".len()..]));
            let other = direct.or_else(within).filter(|(nesting, _)| config.nesting != Some(nesting));
            let nested = other.and_then(|(_, start)| behind(start));
            let in_layer = || Some(format!("layers.{}", config.nesting.and_then(|_| behind("model.layers."))?));
            let rest = nested.map(str::to_owned).or_else(in_layer);
            let own = config.nesting.unwrap_or("model.");
            let name = rest.map_or_else(|| format!("{start}{name}"), |rest| format!("{start}{own}{rest}"));
            config.router_as_in_files(&name)
        };
        match &mut self.config.target_modules {
            TargetModules::AllLinear => {}
            TargetModules::Names(names) => names.iter_mut().for_each(|name| *name = current(name)),
            TargetModules::Regex(expression) => *expression = current(expression),
        }
        self.config.modules_to_save.iter_mut().flatten().for_each(|name| *name = current(name));
        self.config.rank_pattern = self.config.rank_pattern.renamed(current);
        self.config.alpha_pattern = self.config.alpha_pattern.renamed(current);
        if let Some(head) = self.weights.beside.remove(HEAD) {
            let embedding = self.weights.beside.get(EMBEDDING);
            let is_one = config.tie_word_embeddings && embedding.is_none_or(|embedding| *embedding == head);
            self.weights.beside.insert(if is_one { EMBEDDING } else { HEAD }.to_owned(), head);
        }
        self.with_experts_apart(config)
    }

    /// The same without an embedding or a head beside it that are the base's own.
    #[must_use]
    pub fn without_equal_tables(mut self, base: &Weights, config: &ModelConfig) -> Self {
        let Weights::Files(files) = base else { return self };
        self.weights.beside.retain(|name, values| {
            let own = files.load_f32(name, &values.shape());
            values.shape() != [config.vocab_size, config.hidden_size] || own.map_or(true, |own| own != values.values)
        });
        self
    }
}

fn host_matrix(tensor: &Tensor<2>) -> HostMatrix {
    let [num_rows, num_columns] = tensor.dims();
    HostMatrix { num_rows, num_columns, values: faults::read(tensor.clone(), "an adapter") }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::LoraConfig;
    use crate::model::weights::fixture::tiny_config;

    fn fresh(lora: &LoraConfig) -> AdapterSet {
        let config = tiny_config();
        let selection = lora.select(&config).unwrap();
        AdapterSet::new(&config, &selection, lora.init_lora_weights, 0.1, 3, &Device::flex())
    }

    #[test]
    fn adapters_come_back_from_host_memory_bit_for_bit() {
        let config = tiny_config();
        let lora = LoraConfig { use_rslora: true, ..LoraConfig::default() };
        let selection = lora.select(&config).unwrap();
        let weights = adapter_weights(&fresh(&lora));
        let set =
            adapter_set(Path::new("x"), weights.clone(), (&selection, None), &config, 0.1, &Device::flex()).unwrap();
        assert_eq!(adapter_weights(&set), weights);
        assert_eq!(weights.len(), 7 * config.num_layers());
        assert!((set.dropout - 0.1).abs() < 1e-12);
        for adapter in set.iter() {
            assert!((adapter.scale - 16.0 / 8.0_f64.sqrt()).abs() < 1e-12);
        }
    }

    #[test]
    fn an_adapter_of_the_language_model_alone_fits_the_multimodal_model() {
        let json = include_str!("../../../tests/golden/qwen3_5-multimodal/config.json");
        let (config, lora) = (ModelConfig::from_json(json).unwrap(), LoraConfig::default());
        let selection = lora.select(&config).unwrap();
        let whole =
            adapter_weights(&AdapterSet::new(&config, &selection, lora.init_lora_weights, 0.0, 3, &Device::flex()));
        let name = "model.language_model.layers.0.linear_attn.in_proj_qkv";
        assert!(whole.contains_key(name), "{:?}", whole.keys());
        let alone = whole.iter().map(|(name, pair)| (name_alone(name).unwrap(), pair.clone())).collect();
        for weights in [alone, whole.clone()] {
            let saved = SavedAdapter { weights, config: lora.clone(), base_model_name_or_path: None };
            let set = saved.into_set(Path::new("x"), &config, &Device::flex()).unwrap();
            assert_eq!(adapter_weights(&set), whole);
        }
    }

    #[test]
    fn an_adapter_of_a_multimodal_model_fits_its_language_model_alone_with_the_scales_it_has() {
        let json = include_str!("../../../tests/golden/qwen3_5-multimodal/config.json");
        let whole = ModelConfig::from_json(json).unwrap();
        let json: serde_json::Value = serde_json::from_str(json).unwrap();
        let alone = ModelConfig::from_json(&json["text_config"].to_string()).unwrap();
        let names = [
            "^model.language_model.layers.0.mlp.up_proj",
            "language_model.layers.1.mlp.up_proj",
            r"language_model\.layers\.0\.mlp\.down_proj",
        ];
        let alphas = [3.0, 5.0, 7.0];
        let lora = LoraConfig {
            target_modules: TargetModules::Regex(r"model\.language_model\.(?:.*\.)?(?:up_proj|down_proj)".to_owned()),
            alpha_pattern: names.map(str::to_owned).into_iter().zip(alphas).collect(),
            modules_to_save: Some(vec!["model.language_model.norm".to_owned()]),
            ..LoraConfig::default()
        };
        let selection = lora.select(&whole).unwrap();
        let made = AdapterSet::new(&whole, &selection, lora.init_lora_weights, 0.0, 3, &Device::flex());
        let scales = |set: &AdapterSet| set.iter().map(|adapter| adapter.scale).collect::<Vec<_>>();
        assert!(alphas.iter().all(|alpha| scales(&made).contains(&(alpha / 8.0))), "{:?}", scales(&made));
        let saved = SavedAdapter { weights: adapter_weights(&made), config: lora, base_model_name_or_path: None };
        let saved = saved.named_for(&alone);
        assert_eq!(saved.config.modules_to_save, Some(vec!["model.norm".to_owned()]));
        let config = LoraConfig { modules_to_save: None, ..saved.config.clone() };
        let set = SavedAdapter { config, ..saved }.into_set(Path::new("x"), &alone, &Device::flex()).unwrap();
        assert_eq!(scales(&set), scales(&made));
    }

    #[test]
    fn every_matrix_that_does_not_fit_is_named() {
        let config = tiny_config();
        let weights = adapter_weights(&fresh(&LoraConfig::default()));
        let other = LoraConfig { r: 4, layers_to_transform: Some(vec![0]), ..LoraConfig::default() };
        let selection = other.select(&config).unwrap();
        let error =
            adapter_set(Path::new("x"), weights, (&selection, None), &config, 0.0, &Device::flex()).unwrap_err();
        let text = error.to_string();
        assert!(text.contains("`model.layers.0.self_attn.q_proj.lora_A` is [8, 64], expected [4, 64]"), "{text}");
        assert!(text.contains("unexpected: `model.layers.1.mlp.down_proj.lora_A`"), "{text}");
    }
}
