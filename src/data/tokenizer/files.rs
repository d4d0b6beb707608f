//! Reads `tokenizer.json` and the small files beside it, or what a GGUF file has in their place.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use super::{TokenizerError, gguf};
use crate::util::gguf::{GgufFile, is_gguf};

/// Name of the template to use where there are several.
const DEFAULT_TEMPLATE: &str = "default";
/// Name of the template for conversations with tools.
const TOOL_TEMPLATE: &str = "tool_use";

/// What describes a tokenizer.
pub(super) struct Files {
    /// `tokenizer.json`, for messages.
    pub(super) path: PathBuf,
    pub(super) content: Vec<u8>,
    /// `tokenizer_config.json`.
    pub(super) config: (PathBuf, Value),
    /// `special_tokens_map.json`.
    pub(super) map: (PathBuf, Value),
    /// `added_tokens.json`.
    pub(super) added: Value,
    pub(super) generation_config: Value,
    pub(super) model_config: Value,
    pub(super) templates: Templates,
}

/// The chat templates of a model.
#[derive(Clone, Debug, Default)]
pub(super) struct Templates {
    pub(super) default: Option<String>,
    /// That for conversations with tools, where it is one of its own.
    pub(super) with_tools: Option<String>,
}

impl Files {
    /// Of a model folder, or of a GGUF file, beside which a `tokenizer.json` goes before the file's own.
    pub(super) fn read(model: &Path) -> Result<Self, TokenizerError> {
        if !is_gguf(model) || model.is_dir() {
            return Self::of_folder(model);
        }
        let file = GgufFile::open(model).map_err(|problem| TokenizerError(problem.to_string()))?;
        let folder = model.parent().unwrap_or(Path::new(""));
        if folder.join("tokenizer.json").is_file() {
            return Self::of_folder(folder).map(|files| files.completed(&file));
        }
        let gguf::Described { tokenizer, config } = gguf::describe(&file)?;
        Ok(Self {
            path: model.to_owned(),
            content: tokenizer.to_string().into_bytes(),
            templates: match Templates::of_gguf(&config) {
                Templates { default: None, .. } => Templates::of_folder(folder, &Value::Null)?,
                templates => templates,
            },
            config: (model.to_owned(), config),
            map: (model.to_owned(), Value::Null),
            added: Value::Null,
            generation_config: ends(&file),
            model_config: Value::Null,
        })
    }

    /// What the folder does not say, from the metadata.
    fn completed(mut self, file: &GgufFile) -> Self {
        if self.config.1.is_null() {
            let config = gguf::config(file, false);
            if self.templates.default.is_none() {
                self.templates = Templates::of_gguf(&config);
            }
            self.config = (file.path().to_owned(), config);
        }
        if self.generation_config.is_null() {
            self.generation_config = ends(file);
        }
        self
    }

    fn of_folder(folder: &Path) -> Result<Self, TokenizerError> {
        let path = folder.join("tokenizer.json");
        if !path.is_file() {
            return Err(TokenizerError::of_file(
                folder,
                "no tokenizer.json\n  hint: a model folder needs a fast tokenizer; \
                 `AutoTokenizer.from_pretrained(...).save_pretrained(...)` of transformers writes one",
            ));
        }
        let content = std::fs::read(&path).map_err(|error| TokenizerError::of_file(&path, error))?;
        let read = |name: &str| {
            let path = folder.join(name);
            read_json(&path).map(|json| (path, json.unwrap_or(Value::Null)))
        };
        let config = read("tokenizer_config.json")?;
        Ok(Self {
            path,
            content,
            map: read("special_tokens_map.json")?,
            added: read("added_tokens.json")?.1,
            generation_config: read("generation_config.json")?.1,
            model_config: read("config.json")?.1,
            templates: Templates::of_folder(folder, &config.1)?,
            config,
        })
    }
}

/// The tokens at which a GGUF file's model stops, as `generation_config.json` has them.
fn ends(file: &GgufFile) -> Value {
    json!({"eos_token_id": file.end_ids().unwrap_or_default()})
}

/// Contents of a JSON file; `None` where there is no such file.
pub(super) fn read_json(path: &Path) -> Result<Option<Value>, TokenizerError> {
    let Some(text) = read_text(path)? else { return Ok(None) };
    serde_json::from_str(&text).map(Some).map_err(|error| TokenizerError::of_file(path, error))
}

/// Contents of a text file; `None` where there is no such file.
fn read_text(path: &Path) -> Result<Option<String>, TokenizerError> {
    match std::fs::read_to_string(path) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(TokenizerError::of_file(path, error)),
    }
}

/// The text of a special token, which is written as a string or as an object with `content`.
pub(super) fn token_text(value: &Value) -> Option<String> {
    value.as_str().or_else(|| value["content"].as_str()).map(str::to_owned)
}

/// Token ids, which are written as a number or a list of numbers.
pub(crate) fn token_ids(value: &Value) -> impl Iterator<Item = u32> {
    let list = value.as_array().map_or(std::slice::from_ref(value), Vec::as_slice);
    list.iter().filter_map(|id| id.as_u64().and_then(|id| u32::try_from(id).ok()))
}

const CHAT_TEMPLATE: &str = "chat_template.jinja";
/// Where the processors of older models have it, under `chat_template`.
const PROCESSOR_FILES: [&str; 2] = ["chat_template.json", "processor_config.json"];
/// Where the templates are that have names.
const NAMED_TEMPLATES: &str = "additional_chat_templates";

impl Templates {
    /// Those of a folder's own files if there are any, else those of the processor, in files of transformers 4, else those of
    /// `config`, its `tokenizer_config.json`.
    fn of_folder(folder: &Path, config: &Value) -> Result<Self, TokenizerError> {
        let mut templates = Self::of_files(folder)?;
        for file in PROCESSOR_FILES {
            if templates.default.is_none() {
                templates = templates.or_of(&read_json(&folder.join(file))?.unwrap_or_default(), folder, file)?;
            }
        }
        templates.or_of(config, folder, "tokenizer_config.json")
    }

    /// Those of this `file`, which is `config`, where there are none: a string, a list of `{name, template}` or an object of names.
    /// Where none is `default`, that raises.
    fn or_of(self, config: &Value, folder: &Path, file: &str) -> Result<Self, TokenizerError> {
        if self.default.is_some() {
            return Ok(self);
        }
        let named: BTreeMap<&str, &Value> = match &config["chat_template"] {
            Value::Null => return Ok(self),
            Value::String(template) => return Ok(Self { default: Some(template.clone()), ..self }),
            Value::Array(named) => {
                named.iter().filter_map(|entry| Some((entry["name"].as_str()?, &entry["template"]))).collect()
            }
            Value::Object(named) => named.iter().map(|(name, template)| (name.as_str(), template)).collect(),
            _ => {
                let reason = "`chat_template` must be a string, a list of {name, template} or an object of names";
                return Err(TokenizerError::of_file(&folder.join(file), reason));
            }
        };
        let template = |name: &str| Some((*named.get(name)?).as_str()?.to_owned());
        // Which rows need it shows when they are read.
        let missing = || {
            let found: Vec<&&str> = named.keys().collect();
            let reason = format!(
                "`chat_template` of {file} has {found:?}, and none is \"{DEFAULT_TEMPLATE}\"\n  hint: write \
                 the one to use to a file and set `data.chat_template` to its path"
            );
            format!("{{{{ raise_exception({}) }}}}", Value::from(reason))
        };
        Ok(Self {
            default: Some(template(DEFAULT_TEMPLATE).unwrap_or_else(missing)),
            with_tools: self.with_tools.or_else(|| template(TOOL_TEMPLATE)),
        })
    }

    /// `chat_template.jinja`, and in the folder beside it `tool_use.jinja`.
    fn of_files(folder: &Path) -> Result<Self, TokenizerError> {
        let named = |name: &str| read_text(&folder.join(NAMED_TEMPLATES).join(format!("{name}.jinja")));
        let default = match named(DEFAULT_TEMPLATE)? {
            None => read_text(&folder.join(CHAT_TEMPLATE))?,
            template => template,
        };
        Ok(Self { default, with_tools: named(TOOL_TEMPLATE)? })
    }

    /// Those that the metadata of a GGUF file have.
    fn of_gguf(config: &Value) -> Self {
        let template = |key: &str| config[key].as_str().map(ToOwned::to_owned);
        Self { default: template("chat_template"), with_tools: template("tool_template") }
    }
}
