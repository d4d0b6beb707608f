//! What the commands of a shell say of a training: the flags of the one that has the most.

use std::collections::BTreeMap;

use serde_json::{Number, Value};

use super::said::Said;
use super::trainer::Trainer;

/// Programs that train nothing, and sub-commands of those that do.
const OTHERS: &[&str] = &[
    "pip", "pip3", "uv", "apt", "apt-get", "conda", "git", "wget", "curl", "vllm", "hf", "huggingface-cli", "docker",
    "echo", "infer", "export", "deploy", "app", "eval", "chat", "api", "webchat", "merge",
];
/// Names of llama.cpp with those that others have.
const LLAMA_CPP: &[(&str, &str)] = &[
    ("model_base", "model"),
    ("m", "model"),
    ("f", "train_file"),
    ("file", "train_file"),
    ("c", "max_length"),
    ("ctx", "max_length"),
    ("ctx_size", "max_length"),
    ("b", "batch_size"),
    ("batch", "batch_size"),
    ("adam_iter", "max_steps"),
    ("adam_alpha", "learning_rate"),
    ("lora_out", "output_dir"),
];

/// The trainer whose program has this name.
fn started_by(name: &str) -> Option<Trainer> {
    match name.trim_end_matches(".lora") {
        "swift" => Some(Trainer::Swift),
        "llamafactory-cli" | "llamafactory" => Some(Trainer::LlamaFactory),
        "trl" => Some(Trainer::Trl),
        "mlx_lm" => Some(Trainer::MlxLm),
        "axolotl" => Some(Trainer::Axolotl),
        "litgpt" => Some(Trainer::Litgpt),
        _ => None,
    }
}

/// What the commands of a script say, and the configuration that they name.
pub(super) fn of_commands(text: &str) -> Option<(Said, Option<String>)> {
    let is_training = |words: &&Vec<String>| {
        let names: Vec<&str> = words.iter().take(2).map(|word| word.rsplit('/').next().unwrap_or(word)).collect();
        !names.iter().any(|name| OTHERS.contains(name))
    };
    let is_flag = |word: &&String| word.starts_with("--");
    let commands = commands(text);
    let words = commands.iter().filter(is_training).rev().max_by_key(|words| words.iter().filter(is_flag).count())?;
    let mut said = Said::default();
    let others =
        commands.iter().filter(is_training).filter(|other| *other != words && other.iter().any(|word| is_flag(&word)));
    let begin = |words: &Vec<String>| format!("`{} ...`", words[..words.len().min(3)].join(" "));
    let others: Vec<String> = others.map(begin).collect();
    if !others.is_empty() {
        let text = format!("of several commands this one, with the most options, is taken, not {}", others.join(", "));
        said.aside(&begin(words), text);
    }
    let mut config = None;
    let mut is_llama_cpp = false;
    let mut flag: Option<(String, Vec<Value>)> = None;
    for word in words {
        let is_number = word.parse::<f64>().is_ok();
        // Elsewhere one dash is of what starts the program: `python -m`.
        let short = word.strip_prefix('-').filter(|_| is_llama_cpp);
        let flags = word.strip_prefix("--").or(short).filter(|name| !is_number && !name.is_empty());
        if let Some(name) = flags {
            take(&mut said, flag.take());
            let (name, value) = name.split_once('=').map_or((name, None), |(name, value)| (name, Some(value)));
            flag = Some((name.replace('-', "_"), value.map(literal).into_iter().collect()));
        } else if let Some((_, values)) = flag.as_mut().filter(|_| !word.ends_with(".py")) {
            values.push(literal(word));
        } else {
            take(&mut said, flag.take());
            let name = word.rsplit('/').next().unwrap_or(word);
            said.objective_of(name);
            is_llama_cpp |= name.ends_with("finetune");
            said.trainer = said.trainer.or(started_by(name));
            if [".yaml", ".yml", ".json"].iter().any(|end| name.ends_with(end)) {
                config = Some(word.clone());
            }
        }
    }
    take(&mut said, flag);
    if let Some(Value::String(file)) = said.root.remove("config") {
        config = Some(file);
    }
    if is_llama_cpp {
        let names = |(name, value): (String, Value)| {
            let ours = LLAMA_CPP.iter().find(|(theirs, _)| *theirs == name).map(|(_, ours)| (*ours).to_owned());
            (ours.unwrap_or(name), value)
        };
        said.root = std::mem::take(&mut said.root).into_iter().map(names).collect();
    }
    (!said.root.is_empty() || config.is_some()).then_some((said, config))
}

/// Takes a flag: alone it is true, with several values their list.
fn take(said: &mut Said, flag: Option<(String, Vec<Value>)>) {
    let Some((name, mut values)) = flag else { return };
    let value = match values.len() {
        0 => Value::Bool(true),
        1 => values.remove(0),
        _ => Value::Array(values),
    };
    said.root.insert(name, value);
}

fn literal(word: &str) -> Value {
    match word {
        "true" | "True" => return Value::Bool(true),
        "false" | "False" => return Value::Bool(false),
        "None" | "null" => return Value::Null,
        _ => {}
    }
    let whole = word.parse::<i64>().ok().map(Number::from);
    let number = whole.or_else(|| word.parse().ok().and_then(Number::from_f64));
    let list = || serde_json::from_str(word).ok().filter(|_| word.starts_with(['[', '{']));
    number.map(Value::Number).or_else(list).unwrap_or_else(|| word.into())
}

/// The words of each command, with variables replaced that the script sets, without those that it sets for a command.
fn commands(text: &str) -> Vec<Vec<String>> {
    let mut known: BTreeMap<String, String> = BTreeMap::new();
    let (mut commands, mut words) = (Vec::new(), Vec::<String>::new());
    let mut word: Option<String> = None;
    let mut characters = text.chars().peekable();
    let mut quote = None;
    loop {
        let character = characters.next();
        match (quote, character) {
            (None, Some('#')) if word.is_none() => {
                while characters.next_if(|character| *character != '\n').is_some() {}
            }
            (None | Some('"'), Some('\\')) => match characters.next() {
                Some('\n') | None => {}
                Some('\r') => drop(characters.next_if_eq(&'\n')),
                Some(other) => word.get_or_insert_default().push(other),
            },
            (Some(open), Some(character)) if open == character => quote = None,
            (None, Some(open @ ('"' | '\''))) => {
                quote = Some(open);
                word.get_or_insert_default();
            }
            (None | Some('"'), Some('$')) => {
                let is_braced = characters.next_if_eq(&'{').is_some();
                let mut name = String::new();
                while let Some(part) =
                    characters.next_if(|c| c.is_alphanumeric() || *c == '_' || (is_braced && *c != '}'))
                {
                    name.push(part);
                }
                if is_braced {
                    characters.next();
                }
                let (name, default) = name.split_once(":-").unwrap_or((&name, ""));
                word.get_or_insert_default().push_str(known.get(name).map_or(default, String::as_str));
            }
            (None, None | Some('\n' | ';' | '|' | '&' | ' ' | '\t' | '\r')) | (Some(_), None) => {
                words.extend(word.take());
                if !matches!(character, Some(' ' | '\t' | '\r')) {
                    let is_set = |word: &String| {
                        let (name, _) = word.split_once('=')?;
                        name.chars().all(|c| c.is_alphanumeric() || c == '_').then_some(())
                    };
                    let num_set = words.iter().take_while(|word| *word == "export" || is_set(word).is_some()).count();
                    let set = words.drain(..num_set).filter_map(|word| {
                        word.split_once('=').map(|(name, value)| (name.to_owned(), value.to_owned()))
                    });
                    known.extend(set);
                    commands.push(std::mem::take(&mut words));
                }
                if character.is_none() {
                    break;
                }
            }
            (_, Some(character)) => word.get_or_insert_default().push(character),
        }
    }
    commands.retain(|words| !words.is_empty());
    commands
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn flags_are_keys_whatever_form_they_have() {
        let script = "#!/bin/bash\n# --no flag\nexport MODEL=org/base  # a comment\nRATE='1e-4'\npip install --upgrade --no-deps --pre --quiet \
                      trl\nCUDA_VISIBLE_DEVICES=0,1 \\\n  python -m train.sft \\\n  --model_name_or_path $MODEL \\\n  \
                      --learning-rate=${RATE} --bf16 --lora_target q_proj v_proj \\\n  --note \"a # b\" --steps -1 \
                      --out \"runs/${NAME:-x}\" --on False && echo --done\n";
        let (said, config) = of_commands(script).unwrap();
        let expected = json!({
            "model_name_or_path": "org/base", "learning_rate": 1e-4, "bf16": true, "lora_target": ["q_proj", "v_proj"],
            "note": "a # b", "steps": -1, "out": "runs/x", "on": false,
        });
        assert_eq!((Value::Object(said.root), config, said.objective), (expected, None, None));

        let (said, config) =
            of_commands("accelerate launch --multi_gpu train_dpo.py --config c.yaml --beta 0.2").unwrap();
        let expected = json!({"multi_gpu": true, "beta": 0.2});
        assert_eq!(
            (Value::Object(said.root), config.as_deref(), said.objective),
            (expected, Some("c.yaml"), Some("dpo"))
        );
        let (said, config) = of_commands("llamafactory-cli train sft.yaml").unwrap();
        assert_eq!((said.trainer, config.as_deref()), (Some(Trainer::LlamaFactory), Some("sft.yaml")));
        let (said, _) =
            of_commands("./llama-finetune --model-base b.gguf --train-data a.txt --lora-r 4 --ctx 64 --adam-iter 30")
                .unwrap();
        let expected =
            json!({"model": "b.gguf", "train_data": "a.txt", "lora_r": 4, "max_length": 64, "max_steps": 30});
        assert_eq!(Value::Object(said.root), expected);
        let (said, _) =
            of_commands("swift sft --model m --seed 1\nswift rlhf --model m\nswift infer --adapters a --stream\n")
                .unwrap();
        let expected = "of several commands this one, with the most options, is taken, not `swift rlhf --model ...`";
        assert_eq!(said.asides, [("`swift sft --model ...`".to_owned(), expected.to_owned())]);
        assert!(of_commands("ls\npip install --upgrade x\nswift export --model y").is_none());
    }
}
