//! Adapter folders: `adapter_model.safetensors` and `adapter_config.json`.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use safetensors::SafeTensors;
use safetensors::tensor::TensorView;

use super::adapter_config;
use super::experts::has_three_dimensions;
use super::{AdapterWeights, ExportError, HostMatrix};
use crate::config::LoraConfig;
use crate::lora::Matrices;
use crate::model::weights::{convert, layout};
use crate::schema::Problem;
use crate::spec::{name_alone, nested_name, nesting_of};
use crate::util::files;

pub(super) const WEIGHTS: &str = "adapter_model.safetensors";
pub(super) const CONFIG: &str = "adapter_config.json";
/// PEFT's prefix of module names.
const PREFIX: &str = "base_model.model.";
/// Name of the head of a model that scores texts.
pub(super) const SCORE: &str = "score.weight";
/// Name in a language model alone of rows of the embedding.
pub(super) const TOKENS: &str = "model.embed_tokens.token_adapter.trainable_tokens_delta";
/// Names in a language model alone of the embedding and the head.
pub(super) const EMBEDDING: &str = "model.embed_tokens.weight";
pub(super) const HEAD: &str = "lm_head.weight";
/// In place of `.weight`, where rows of it are trained.
const BEHIND_TOKENS: &str = ".token_adapter.base_layer.weight";

/// An adapter from disk.
#[derive(Clone, Debug, PartialEq)]
pub struct SavedAdapter {
    /// The matrices by module, converted to `f32` from the file's type.
    pub weights: AdapterWeights,
    /// Rank, scale and target modules.
    pub config: LoraConfig,
    /// The model that it was trained on, as named in the adapter's config.
    pub base_model_name_or_path: Option<String>,
}

impl SavedAdapter {
    /// The same where it writes text.
    ///
    /// # Errors
    /// An adapter with a head that scores.
    pub fn that_writes(self, folder: &Path) -> Result<Self, Problem> {
        if !self.weights.scores() {
            return Ok(self);
        }
        let problem = Problem::new("this adapter scores texts, and writes none").at(folder.display());
        Err(problem
            .hint("`lora-train eval` and `serve` score with it; PEFT loads it over AutoModelForSequenceClassification"))
    }
}

/// Writes an adapter as PEFT does, in `f32`; each of the two files is written completely or not at all.
///
/// # Errors
/// Where a file cannot be written.
pub fn write_adapter(
    folder: &Path,
    weights: &AdapterWeights,
    config: &LoraConfig,
    base_model_name_or_path: &str,
) -> Result<(), ExportError> {
    std::fs::create_dir_all(folder).map_err(ExportError::io("create", folder))?;
    write_tensors(&folder.join(WEIGHTS), weights, &BTreeMap::new(), ("format", "pt"))?;
    let path = folder.join(CONFIG);
    let json = adapter_config::to_json(config, weights, base_model_name_or_path);
    files::write(&path, format!("{json:#}\n")).map_err(ExportError::io("write", &path))
}

/// Writes the numbers of an adapter, vectors `beside` it, and one entry of metadata: the library would write several in an order that
/// differs each time.
pub(super) fn write_tensors(
    path: &Path,
    weights: &AdapterWeights,
    beside: &BTreeMap<String, Vec<f32>>,
    (key, value): (&str, &str),
) -> Result<(), ExportError> {
    let in_file = weights.in_file();
    let mut views = Vec::with_capacity(2 * in_file.len());
    let of_adapters = in_file.iter().flat_map(|(module, pair)| {
        let named = pair.as_ref().named();
        named.map(move |(name, matrix)| (tensor_name(module, name), shape_in_file(name, matrix), matrix))
    });
    let nesting = weights.keys().find_map(|module| nesting_of(module));
    let has_rows = weights.full.contains_key(TOKENS);
    let of_full = weights.full.iter().chain(&weights.beside).flat_map(|(name, values)| {
        // As PEFT does it, of one that is two it has both.
        let head = (weights.is_tied && name == EMBEDDING).then_some(HEAD);
        let is_vector = values.num_rows == 1 && ![SCORE, TOKENS].contains(&name.as_str());
        let shape = if is_vector { vec![values.num_columns] } else { values.shape().to_vec() };
        // Where rows of it are trained, PEFT has it behind them.
        let is_behind = has_rows && name == EMBEDDING;
        let name = if is_behind { format!("{}{BEHIND_TOKENS}", module_of_weight(name)) } else { name.clone() };
        let in_file = move |name: String| {
            format!(
                "{PREFIX}{}",
                match nesting {
                    Some(nesting) => nested_name(nesting, &name),
                    None => name,
                }
            )
        };
        [name].into_iter().chain(head.map(str::to_owned)).map(move |name| (in_file(name), shape.clone(), values))
    });
    let of_adapters = of_adapters.chain(of_full).map(|(name, shape, matrix)| (name, shape, &matrix.values));
    let beside = beside.iter().map(|(name, numbers)| (name.clone(), vec![numbers.len()], numbers));
    for (name, shape, numbers) in of_adapters.chain(beside) {
        let view = TensorView::new(safetensors::Dtype::F32, shape, bytemuck::cast_slice(numbers))
            .map_err(|error| ExportError::io("write", path)(std::io::Error::other(error)))?;
        views.push((name, view));
    }
    let metadata = [(key.to_owned(), value.to_owned())].into();
    files::write_with(path, |path| {
        safetensors::serialize_to_file(views, Some(metadata), path).map_err(std::io::Error::other)
    })
    .map_err(ExportError::io("write", path))
}

pub(super) fn tensor_name(module: &str, matrix: &str) -> String {
    let suffix = if is_vector(matrix) { "" } else { ".weight" };
    format!("{PREFIX}{module}.{matrix}{suffix}")
}

/// Whether PEFT has it as a vector, whose name is without a suffix.
fn is_vector(matrix: &str) -> bool {
    Matrices::NAMES.magnitude == Some(matrix)
}

fn shape_in_file(name: &str, matrix: &HostMatrix) -> Vec<usize> {
    if is_vector(name) { vec![matrix.num_columns] } else { matrix.shape().to_vec() }
}

/// Whether a folder holds an adapter: this one, not a folder in it.
#[must_use]
pub fn is_adapter(folder: &Path) -> bool {
    folder.join(CONFIG).is_file()
}

/// Where the adapter is: `folder` itself, such as a checkpoint, or `folder/adapter`, where `folder` is the `output_dir`
/// of a run. Where neither holds an adapter, returns `folder`, and [`read_adapter`] reports the error.
#[must_use]
pub fn find_adapter(folder: &Path) -> PathBuf {
    let inner = folder.join("adapter");
    if !is_adapter(folder) && is_adapter(&inner) { inner } else { folder.to_owned() }
}

/// Reads an adapter folder written by this program or by PEFT.
///
/// # Errors
/// Where a file is missing or damaged, or where the adapter has what has no place here. All
/// reasons are reported at once.
pub fn read_adapter(folder: &Path) -> Result<SavedAdapter, ExportError> {
    let (config_path, weights_path) = (folder.join(CONFIG), folder.join(WEIGHTS));
    for (path, missing) in [(&config_path, CONFIG), (&weights_path, WEIGHTS)] {
        if !path.is_file() {
            let problem = Problem::new(format!("no {missing}")).at(folder.display());
            return Err(problem.hint(no_adapter_hint(folder)).into());
        }
    }
    let text = std::fs::read_to_string(&config_path).map_err(ExportError::io("read", &config_path))?;
    let weights = read_tensors(&weights_path, |_| false);
    // Problems of the config come first: its method explains unexpected tensors better than their names do.
    let has_score = weights.as_ref().is_ok_and(AdapterWeights::scores);
    let modules = weights.iter().flat_map(|weights| weights.keys());
    let adapter_config::Read { config, base_model_name_or_path, is_tied, peft_version } =
        adapter_config::from_json(&config_path.display().to_string(), &text, modules, has_score)?;
    let mut weights = weights?;
    weights.peft_version = peft_version;
    let named = config.modules_to_save.as_deref().unwrap_or_default();
    // PEFT's names are ends, of names within the whole of a multimodal model.
    let is_named = |module: &str| {
        named.iter().any(|name| module.ends_with(name) || name_alone(name).is_some_and(|name| module.ends_with(&name)))
    };
    for table in [EMBEDDING, HEAD].into_iter().filter(|table| !is_tied && !is_named(module_of_weight(table))) {
        weights.beside.extend(weights.full.remove_entry(table));
    }
    weights.is_tied = is_tied && weights.full.contains_key(EMBEDDING);
    if weights.is_tied {
        // The embedding by its other name.
        let head = weights.full.remove(HEAD);
        if head.is_some_and(|head| Some(&head) != weights.full.get(EMBEDDING)) {
            let message = "`lm_head` differs from the embedding that `ensure_weight_tying` makes it";
            return Err(Problem::new(message).at(weights_path.display()).into());
        }
    }
    Ok(SavedAdapter { weights, config, base_model_name_or_path })
}

/// Reads the numbers of an adapter, and nothing of what `is_beside` it.
pub(super) fn read_tensors(path: &Path, is_beside: impl Fn(&str) -> bool) -> Result<AdapterWeights, ExportError> {
    let content = std::fs::read(path).map_err(ExportError::io("read", path))?;
    let tensors = SafeTensors::deserialize(&content).map_err(|error| layout::damaged(path, &content, &error))?;
    let mut problems = Vec::new();
    let mut matrices: BTreeMap<String, [Option<HostMatrix>; 3]> = BTreeMap::new();
    let mut weights = AdapterWeights::default();
    for (name, view) in tensors.iter().filter(|(name, _)| !is_copy(&tensors, name) && !is_beside(name)) {
        if let Some(((name, [num_rows, num_columns]), dtype)) =
            full_tensor(name, view.shape()).zip(convert::float_dtype(view.dtype()))
        {
            let values = convert::to_f32(view.data(), dtype);
            weights.full.insert(name, HostMatrix { num_rows, num_columns, values });
            continue;
        }
        let found = module_of(name, view.shape().len() == 3);
        let Some((module, index)) = found.map(|(module, index)| (current_name(module), index)) else {
            problems.push(format!("unexpected: `{name}` {:?}{}", view.shape(), unexpected_reason(name)));
            continue;
        };
        let shape = match *view.shape() {
            [rows, columns] if index < 2 => Some([rows, columns]),
            [experts, rows, columns] if has_three_dimensions(&module) => Some([experts * rows, columns]),
            [columns] if index == 2 => Some([1, columns]),
            _ => None,
        };
        match (convert::float_dtype(view.dtype()), shape) {
            (Some(dtype), Some([num_rows, num_columns])) if num_rows > 0 && num_columns > 0 => {
                let values = convert::to_f32(view.data(), dtype);
                matrices.entry(module).or_default()[index] = Some(HostMatrix { num_rows, num_columns, values });
            }
            (Some(_), _) => {
                let expected = if index < 2 { "two dimensions" } else { "one dimension" };
                problems.push(format!("misshapen: `{name}` is {:?}, expected {expected}", view.shape()));
            }
            (None, _) => problems.push(format!("type: `{name}` is {:?}, expected F32, BF16 or F16", view.dtype())),
        }
    }
    pair(matrices, &mut weights, &mut problems);
    if weights.is_empty() && problems.is_empty() {
        problems.push("there are none".to_owned());
    }
    if problems.is_empty() {
        return Ok(weights);
    }
    problems.sort();
    Err(ExportError::AdapterTensors { path: path.to_owned(), expected_by: "the format of LoRA adapters", problems })
}

/// Puts A and B of each module together, or says what is wrong with them.
fn pair(matrices: BTreeMap<String, [Option<HostMatrix>; 3]>, weights: &mut AdapterWeights, problems: &mut Vec<String>) {
    for (module, pair) in matrices {
        match pair {
            [Some(lora_a), Some(lora_b), magnitude]
                if lora_a.num_rows == lora_b.num_columns
                    || (has_three_dimensions(&module) && lora_a.num_rows.is_multiple_of(lora_b.num_columns)) =>
            {
                weights.insert(module, Matrices { a: lora_a, b: lora_b, magnitude });
            }
            [Some(lora_a), Some(lora_b), _] => problems.push(format!(
                "misshapen: `{module}` has A {:?} and B {:?}, which do not share a rank",
                lora_a.shape(),
                lora_b.shape()
            )),
            [None, Some(_), _] => problems.push(format!("missing: `{}`", tensor_name(&module, Matrices::NAMES.a))),
            _ => problems.push(format!("missing: `{}`", tensor_name(&module, Matrices::NAMES.b))),
        }
    }
}

/// Whether PEFT reads over it: what a module that is trained as a whole was before, and that module by a second name. With
/// `save_embedding_layers` it writes both; and of a head that is tied to an embedding with trained rows, the same rows again.
fn is_copy(tensors: &SafeTensors<'_>, name: &str) -> bool {
    let ends = [".original_module.weight", ".modules_to_save.weight"];
    let of_module = ends.iter().find_map(|end| name.strip_suffix(end));
    let of_head = || {
        let rows = name.strip_prefix(PREFIX)?.strip_prefix(module_of_weight(HEAD))?;
        let names = ["model", "model.language_model", "model.text_model"]
            .map(|model| format!("{PREFIX}{model}.embed_tokens{rows}"));
        let embedding = names.iter().find_map(|name| tensors.tensor(name).ok())?;
        let same = || tensors.tensor(name).is_ok_and(|head| head.data() == embedding.data());
        (rows.starts_with(".token_adapter.") && same()).then_some(())
    };
    of_module.is_some_and(|module| tensors.tensor(&format!("{module}.weight")).is_ok()) || of_head().is_some()
}

/// The module of a weight, by the weight's name.
pub(super) fn module_of_weight(name: &str) -> &str {
    name.strip_suffix(".weight").unwrap_or(name)
}

/// The name that a language model alone has for a tensor that may be trained in full, and its shape; of a vector, a row.
fn full_tensor(name: &str, shape: &[usize]) -> Option<(String, [usize; 2])> {
    let name = name.strip_prefix(PREFIX)?;
    let alone = name_alone(name).unwrap_or_else(|| name.to_owned());
    let alone = alone.strip_suffix(BEHIND_TOKENS).map_or(alone.clone(), |module| format!("{module}.weight"));
    let is_module = [EMBEDDING, HEAD].contains(&&*alone) || alone.ends_with("norm.weight");
    let shape = match *shape {
        [1, width] if name == SCORE => [1, width],
        [rows, width] if alone == TOKENS => [rows, width],
        [width] if is_module && width > 0 => [1, width],
        [rows, width] if is_module && rows > 1 && width > 0 => [rows, width],
        _ => return None,
    };
    Some((alone, shape))
}

/// Module name, and 0 for A, 1 for B or 2 for magnitudes.
fn module_of(name: &str, has_three_dimensions: bool) -> Option<(&str, usize)> {
    let name = name.strip_prefix(PREFIX)?;
    let (module, matrix) = name.strip_suffix(".weight").unwrap_or(name).rsplit_once('.')?;
    let index = Matrices::NAMES.values().position(|name| name == matrix)?;
    (has_three_dimensions || is_vector(matrix) != name.ends_with(".weight")).then_some((module, index))
}

/// The module's name in a multimodal model as transformers has had it since 4.52.
fn current_name(module: &str) -> String {
    match module.strip_prefix("language_model.model.") {
        Some(rest) => format!("model.language_model.{rest}"),
        None => module.to_owned(),
    }
}

/// Why this trainer cannot use a tensor of an adapter file.
fn unexpected_reason(name: &str) -> &'static str {
    if name.contains("lora_embedding_") {
        ": adapters of embeddings are not supported"
    } else if name.ends_with("trainable_tokens_delta") {
        ": only the embedding's rows are supported, and those of a head tied to it"
    } else if !name.contains("lora_") {
        ": of modules trained as a whole, embedding, head and norms are supported"
    } else {
        ""
    }
}

fn no_adapter_hint(folder: &Path) -> &'static str {
    if !folder.is_dir() {
        "there is no such folder"
    } else if folder.join("adapter").join(CONFIG).is_file() {
        "this is the folder of a run; its adapter is in `adapter`"
    } else if folder.join("checkpoints").is_dir() {
        "this is the folder of a run that has not finished; its checkpoints are in `checkpoints`"
    } else if folder.join("adapter_model.bin").is_file() {
        "adapter_model.bin is a PyTorch pickle, which is not read; save it again with `safe_serialization=True`"
    } else if folder.join("config.json").is_file() {
        "this is a model, not an adapter"
    } else {
        "an adapter folder has adapter_config.json and adapter_model.safetensors, as PEFT writes them"
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::config::TargetModules;
    use crate::model::weights::fixture::tiny_config;
    use crate::spec::in_layer;

    /// Adapters on `q_proj` and `down_proj` of both layers of the tiny model.
    pub(in crate::save::export) fn adapter() -> SavedAdapter {
        let shape_of = |site: usize| tiny_config().blocks[0].sites[site].shape;
        let [mut query, down] =
            [("self_attn.q_proj", 0), ("mlp.down_proj", 6)].map(|(name, site)| adapter_on(name, shape_of(site)));
        query.weights.extend(down.weights.adapters);
        query.config.target_modules = TargetModules::Names(vec!["down_proj".into(), "q_proj".into()]);
        query
    }

    /// Adapters on one linear layer of two blocks.
    pub(in crate::save::export) fn adapter_on(site: &str, [num_out, num_in]: [usize; 2]) -> SavedAdapter {
        let config =
            LoraConfig { r: 3, target_modules: TargetModules::Names(vec![site.into()]), ..LoraConfig::default() };
        let matrix = |num_rows: usize, num_columns: usize| {
            #[allow(clippy::cast_precision_loss)]
            let values = (0..num_rows * num_columns).map(|i| (i * 37 % 101) as f32 / 64.0 - 0.7).collect();
            HostMatrix { num_rows, num_columns, values }
        };
        let pair = Matrices { a: matrix(3, num_in), b: matrix(num_out, 3), magnitude: None };
        let weights = [0, 1].map(|layer| (in_layer(layer, site), pair.clone())).into_iter().collect();
        SavedAdapter { weights, config, base_model_name_or_path: Some("org/base".into()) }
    }

    fn write(folder: &Path, adapter: &SavedAdapter) {
        write_adapter(folder, &adapter.weights, &adapter.config, "org/base").unwrap();
    }

    /// Writes tensors under any names, as another program might.
    fn write_tensors(folder: &Path, tensors: &[(&str, &[usize], safetensors::Dtype)]) {
        let bytes: Vec<Vec<u8>> = tensors
            .iter()
            .map(|(_, shape, dtype)| vec![0; shape.iter().product::<usize>() * (dtype.bitsize() / 8)])
            .collect();
        let views = tensors
            .iter()
            .zip(&bytes)
            .map(|((name, shape, dtype), bytes)| (*name, TensorView::new(*dtype, shape.to_vec(), bytes).unwrap()));
        safetensors::serialize_to_file(views, None, &folder.join(WEIGHTS)).unwrap();
    }

    #[test]
    fn an_adapter_comes_back_as_it_was_written_in_pefts_names() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path().join("new");
        let adapter = adapter();
        write(&folder, &adapter);
        assert_eq!(read_adapter(&folder).unwrap(), adapter);

        let content = std::fs::read(folder.join(WEIGHTS)).unwrap();
        let (_, header) = SafeTensors::read_metadata(&content).unwrap();
        assert_eq!(header.metadata().as_ref().unwrap()["format"], "pt");
        let name = "base_model.model.model.layers.1.mlp.down_proj.lora_A.weight";
        assert_eq!(header.info(name).unwrap().shape, [3, 176]);
        assert_eq!(header.info(&name.replace("lora_A", "lora_B")).unwrap().shape, [64, 3]);
        assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 2);
    }

    #[test]
    fn what_peft_writes_of_embedding_and_head_beside_an_adapter_is_told_apart() {
        let folder = tempfile::tempdir().unwrap();
        let model = tiny_config();
        let mut adapter = adapter();
        let table = |value: f32| HostMatrix {
            num_rows: model.vocab_size,
            num_columns: model.hidden_size,
            values: vec![value; model.vocab_size * model.hidden_size],
        };
        adapter.config.modules_to_save = Some(vec!["lm_head".to_owned()]);
        adapter.weights.full = [(HEAD.to_owned(), table(1.0))].into();
        adapter.weights.beside = [(EMBEDDING.to_owned(), table(2.0))].into();
        write(folder.path(), &adapter);
        assert_eq!(read_adapter(folder.path()).unwrap(), adapter);

        // The embedding behind rows of tokens, and copies of what is trained as a whole.
        let path = folder.path().join(WEIGHTS);
        let content = std::fs::read(&path).unwrap();
        let tensors = SafeTensors::deserialize(&content).unwrap();
        let behind = |name: &str| name.replace("embed_tokens.weight", &format!("embed_tokens{BEHIND_TOKENS}"));
        let head = tensors.tensor("base_model.model.lm_head.weight").unwrap();
        let copies = ["original_module", "modules_to_save"];
        let copies = copies.map(|copy| (format!("base_model.model.lm_head.{copy}.weight"), head.clone()));
        let all = tensors.iter().map(|(name, view)| (behind(name), view)).chain(copies);
        safetensors::serialize_to_file(all, None, &path).unwrap();
        assert_eq!(read_adapter(folder.path()).unwrap(), adapter);

        // So it is written beside such rows.
        adapter.config.trainable_token_indices = Some(vec![3]);
        let rows = HostMatrix { num_rows: 1, num_columns: 2, values: vec![5.0, 6.0] };
        adapter.weights.full.insert(TOKENS.to_owned(), rows);
        write(folder.path(), &adapter);
        let content = std::fs::read(&path).unwrap();
        let name = format!("base_model.model.model.embed_tokens{BEHIND_TOKENS}");
        assert!(SafeTensors::deserialize(&content).unwrap().tensor(&name).is_ok());
        assert_eq!(read_adapter(folder.path()).unwrap(), adapter);
    }

    #[test]
    fn half_precision_adapters_are_read_as_f32() {
        let folder = tempfile::tempdir().unwrap();
        let adapter = adapter();
        write(folder.path(), &adapter);
        let bytes: Vec<(String, [usize; 2], Vec<u8>)> = adapter
            .weights
            .iter()
            .flat_map(|(module, pair)| {
                pair.as_ref().named().map(move |(name, matrix)| (tensor_name(module, name), matrix))
            })
            .map(|(name, matrix)| {
                let bytes = convert::from_f32(&matrix.values, crate::device::Dtype::Bf16).unwrap();
                (name, matrix.shape(), bytes)
            })
            .collect();
        let views = bytes.iter().map(|(name, shape, bytes)| {
            (name, TensorView::new(safetensors::Dtype::BF16, shape.to_vec(), bytes).unwrap())
        });
        safetensors::serialize_to_file(views, None, &folder.path().join(WEIGHTS)).unwrap();
        let read = read_adapter(folder.path()).unwrap();
        let pairs = |adapter: &SavedAdapter| -> Vec<f32> {
            adapter.weights.values().flat_map(|pair| pair.b.values.clone()).collect()
        };
        // bf16 keeps 8 bits.
        assert!(pairs(&read).iter().zip(pairs(&adapter)).all(|(a, b)| (a - b).abs() <= b.abs() / 256.0));
    }

    #[test]
    fn every_tensor_that_is_no_low_rank_update_is_listed_at_once() {
        use safetensors::Dtype::{F32, I32};
        let folder = tempfile::tempdir().unwrap();
        write(folder.path(), &adapter());
        let module = "base_model.model.model.layers.0.self_attn";
        write_tensors(
            folder.path(),
            &[
                (&format!("{module}.q_proj.lora_A.weight"), &[2, 64], F32),
                (&format!("{module}.q_proj.lora_B.weight"), &[64, 3], F32),
                (&format!("{module}.k_proj.lora_A.weight"), &[2, 64], F32),
                (&format!("{module}.v_proj.lora_A.weight"), &[128], F32),
                (&format!("{module}.o_proj.lora_A.weight"), &[2, 64], I32),
                (&format!("{module}.o_proj.lora_A.default.weight"), &[2, 64], F32),
                (&format!("{module}.q_proj.lora_magnitude_vector"), &[1, 64], F32),
                ("base_model.model.model.embed_tokens.lora_embedding_A", &[2, 256], F32),
                ("base_model.model.model.layers.0.mlp.up_proj.weight", &[2, 2], F32),
            ],
        );
        let error = read_adapter(folder.path()).unwrap_err().to_string();
        for part in [
            "A [2, 64] and B [64, 3], which do not share a rank",
            "missing: `base_model.model.model.layers.0.self_attn.k_proj.lora_B.weight`",
            "v_proj.lora_A.weight` is [128], expected two dimensions",
            "o_proj.lora_A.weight` is I32",
            "unexpected: `base_model.model.model.layers.0.self_attn.o_proj.lora_A.default.weight`",
            "q_proj.lora_magnitude_vector` is [1, 64], expected one dimension",
            "adapters of embeddings are not supported",
            "embedding, head and norms are supported",
        ] {
            assert!(error.contains(part), "{part}: {error}");
        }
    }

    #[test]
    fn folders_without_an_adapter_say_what_they_are() {
        let folder = tempfile::tempdir().unwrap();
        let error = || read_adapter(folder.path()).unwrap_err().to_string();
        assert!(error().contains("no adapter_config.json") && error().contains("as PEFT writes them"));
        std::fs::write(folder.path().join("config.json"), "{}").unwrap();
        assert!(error().contains("a model, not an adapter"));
        std::fs::write(folder.path().join("adapter_model.bin"), "").unwrap();
        assert!(error().contains("pickle"));
        assert!(read_adapter(Path::new("nowhere")).unwrap_err().to_string().contains("no such folder"));

        write(&folder.path().join("adapter"), &adapter());
        assert!(error().contains("its adapter is in `adapter`"));
        let path = folder.path().join("adapter").join(WEIGHTS);
        let content = std::fs::read(&path).unwrap();
        std::fs::write(&path, &content[..content.len() - 9]).unwrap();
        let error = read_adapter(&folder.path().join("adapter")).unwrap_err().to_string();
        assert!(error.contains("half-downloaded"), "{error}");
    }
}
