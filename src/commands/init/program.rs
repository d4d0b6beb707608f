//! What a Python program or a notebook says of a training: the literals of its calls, by name. It is no parser of Python:
//! it finds calls that trainers have, reads what is literal in them, and says of which names it is not.

use serde_json::{Map, Number, Value};

use super::said::{Said, is_of_training};

mod functions;
mod tokens;

pub(super) use functions::{JudgeOfEnvironments, functions, judge_of_environments};
use tokens::{Token, tokens};

/// Arguments that are objects of a program: they say nothing that a recipe has.
const OBJECTS: &[&str] = &[
    "model", "tokenizer", "processing_class", "train_dataset", "eval_dataset", "args", "peft_config", "data_collator",
    "callbacks", "formatting_func", "quantization_config", "compute_metrics", "optimizers", "ref_model", "model_init",
    "preprocess_logits_for_metrics", "token", "config", "model_init_kwargs", "features",
];

/// Arguments that are functions and classes of a program, by their names.
const FUNCTIONS: &[&str] = &["reward_funcs", "environment_factory", "tools"];

/// What is said in a program.
pub(super) fn of_program(text: &str) -> Said {
    let mut reader = Reader { tokens: tokens(text), known: Map::new(), listed: Map::new(), said: Said::default() };
    reader.read();
    reader.said.program = Some(text.to_owned());
    reader.said
}

/// The code of a notebook, without the commands of its shell; and these.
pub(super) fn of_notebook(notebook: &Value) -> (String, String) {
    let cells = notebook["cells"].as_array().into_iter().flatten().filter(|cell| cell["cell_type"] == "code");
    let text = |cell: &Value| match &cell["source"] {
        Value::Array(lines) => lines.iter().filter_map(Value::as_str).collect::<String>(),
        source => source.as_str().unwrap_or_default().to_owned(),
    };
    let (mut code, mut shell) = (String::new(), String::new());
    for cell in cells.map(text) {
        let is_shell = cell.trim_start().starts_with("%%bash") || cell.trim_start().starts_with("%%sh");
        // A command goes on where its line ends in a backslash.
        let mut is_continued = false;
        for line in cell.lines() {
            let start = line.trim_start();
            let is_command = is_shell || is_continued || start.starts_with('!');
            is_continued = is_command && line.trim_end().ends_with('\\');
            if is_command {
                shell.extend([start.trim_start_matches('!'), "\n"]);
            } else if !start.starts_with('%') {
                code.extend([line, "\n"]);
            }
        }
    }
    (code, shell)
}

struct Reader {
    tokens: Vec<Token>,
    /// Values of names that were assigned to.
    known: Map<String, Value>,
    /// Names in lists that were assigned to a name.
    listed: Map<String, Value>,
    said: Said,
}

impl Reader {
    fn read(&mut self) {
        let tokens = std::mem::take(&mut self.tokens);
        let (mut at, mut is_start) = (0, true);
        while at < tokens.len() {
            let (path, after) = path_at(&tokens[at..]);
            let rest = &tokens[at + after..];
            if is_start && path == ["if"] && rest.first().is_some_and(|token| token.is_name("False")) {
                // What a notebook offers and does not do.
                let end = |from: usize| {
                    tokens[from..].iter().position(|token| *token == Token::End).map_or(from + 1, |end| from + end)
                };
                let line = end(at);
                at = if tokens[line - 1] == Token::Sign(':') { end((line + 1).min(tokens.len())) } else { line };
            } else if is_start && let ([name], Some(value)) = (&path[..], assigned(rest)) {
                if let Some(value) = self.literal(value) {
                    self.known.insert((*name).to_owned(), value);
                } else if let Some(names) = names(value) {
                    self.listed.insert((*name).to_owned(), names);
                }
                at += after;
            } else if is_start
                && let ([_, name], Some(value)) = (&path[..], assigned(rest))
                && self.said.root.contains_key(*name)
            {
                // What an object of settings is given later.
                self.keys(&[(*name, value)], &[]);
                at += after;
            } else if !path.is_empty() && rest.first() == Some(&Token::Sign('(')) {
                self.call(&path, arguments(&rest[1..]));
                at += after + 1;
            } else {
                at += after.max(1);
            }
            is_start = tokens.get(at.saturating_sub(1)) == Some(&Token::End);
        }
    }

    fn call(&mut self, path: &[&str], arguments: Vec<&[Token]>) {
        let (function, class) = (path[path.len() - 1], if path.len() > 1 { path[path.len() - 2] } else { "" });
        let (mut named, mut unnamed) = (Vec::new(), Vec::new());
        for argument in arguments {
            match argument {
                [Token::Name(name), Token::Sign('='), value @ ..] => named.push((name.as_str(), value)),
                value => unnamed.push(value),
            }
        }
        let first = unnamed.first().and_then(|value| self.literal(value));
        let argument = |name: &str| named.iter().find(|(own, _)| *own == name).map(|(_, value)| *value);
        match function {
            "from_pretrained" => self.loaded(class, first, &named),
            "get_peft_model" | "LoraConfig" => {
                self.said.is_unsloth |= class.starts_with("Fast");
                self.said.has_lora |= function == "LoraConfig" || class.starts_with("Fast");
                self.keys(&named, &[]);
                self.spread(&unnamed);
            }
            "load_dataset" => self.rows(first, unnamed.get(1).and_then(|value| self.literal(value)), &named),
            "from_json" | "from_csv" | "from_parquet" | "read_csv" | "read_json" | "read_parquet" => {
                first.into_iter().for_each(|file| self.said.key("train_file", file));
            }
            "train_test_split" => {
                let share = argument("test_size").and_then(|value| self.literal(value));
                share.into_iter().for_each(|share| self.said.key("test_size", share));
            }
            "train_on_responses_only" => self.said.key("train_on_responses_only", Value::Bool(true)),
            "get_chat_template" => {
                let name = argument("chat_template").and_then(|value| self.literal(value));
                let name = name.or_else(|| unnamed.get(1).and_then(|value| self.literal(value)));
                self.said.key("chat_template", name.unwrap_or_else(|| "a template".into()));
            }
            "save_pretrained_gguf" | "push_to_hub_gguf" => {
                let method = argument("quantization_method").and_then(|value| self.literal(value));
                let method = method.as_ref().and_then(Value::as_str).unwrap_or("q8_0");
                self.said.aside(function, of_gguf(method));
            }
            "save_pretrained_merged" | "push_to_hub_merged" | "merge_and_unload" => {
                self.said.aside(function, "after the run: `lora-train merge RUN --out DIR`".into());
            }
            "push_to_hub" => self.said.aside(function, "after the run: `lora-train push RUN OWNER/NAME`".into()),
            // The defaults of a program's own options.
            "add_argument" => {
                let default = argument("default").and_then(|value| self.literal(value));
                let name = first.as_ref().and_then(Value::as_str).and_then(|name| name.strip_prefix("--"));
                if let (Some(name), Some(default)) = (name, default) {
                    self.known.insert(name.replace('-', "_"), default);
                }
            }
            _ if is_of_training(function) => {
                self.said.objective_of(function);
                self.said.is_sft_config |= function == "SFTConfig";
                self.keys(&named, &[]);
                self.spread(&unnamed);
            }
            _ => {}
        }
    }

    /// What is loaded as an object of `class`: a model, or what is beside it.
    fn loaded(&mut self, class: &str, first: Option<Value>, named: &[(&str, &[Token])]) {
        let has = |parts: &[&str]| parts.iter().any(|part| class.contains(part));
        if has(&["Tokenizer", "Processor", "Config", "Extractor", "Peft"]) {
            return;
        }
        if class.contains("SequenceClassification") {
            self.said.objective_of(class);
        }
        self.said.is_unsloth |= class.starts_with("Fast");
        // Programs load again what they have trained.
        if !self.said.root.contains_key("model_name") {
            let name = "pretrained_model_name_or_path";
            let path = named.iter().find(|(own, _)| *own == name).and_then(|(_, value)| self.literal(value));
            if let Some(model) = first.or(path) {
                self.said.key("model_name", model);
            }
            self.keys(named, &[name]);
        }
    }

    /// Takes the arguments of a call, but for those that are objects.
    fn keys(&mut self, named: &[(&str, &[Token])], read: &[&str]) {
        for (name, value) in named.iter().filter(|(name, _)| !read.contains(name) && *name != "token") {
            let known = || {
                last_name(value)
                    .map(|name| name.as_str().and_then(|name| self.listed.get(name).cloned()).unwrap_or(name))
            };
            match self.literal(value) {
                Some(literal) => self.said.key(name, literal),
                None if FUNCTIONS.contains(name)
                    && let Some(names) = names(value).or_else(known) =>
                {
                    self.said.key(name, names);
                }
                None if OBJECTS.contains(name) => {}
                None => self.said.unknown.push((*name).to_owned()),
            }
        }
    }

    /// Takes the arguments that a dict gives by `**`.
    fn spread(&mut self, unnamed: &[&[Token]]) {
        for value in unnamed.iter().filter_map(|value| value.strip_prefix(&[Token::Sign('*'), Token::Sign('*')])) {
            match (self.literal(value), value) {
                (Some(Value::Object(keys)), _) => {
                    keys.iter().for_each(|(name, value)| self.said.key(name, value.clone()));
                }
                (_, [Token::Name(name), ..]) => self.said.unknown.push(format!("**{name}")),
                _ => self.said.unknown.push("**".to_owned()),
            }
        }
    }

    /// The rows of `load_dataset`: those of the Hub, or files.
    fn rows(&mut self, path: Option<Value>, name: Option<Value>, named: &[(&str, &[Token])]) {
        let argument = |key: &str| {
            let (_, value) = named.iter().find(|(own, _)| *own == key)?;
            self.literal(value)
        };
        let split = argument("split");
        let is_eval = split
            .as_ref()
            .and_then(Value::as_str)
            .is_some_and(|split| split.starts_with("test") || split.starts_with("val"));
        let path = path.or_else(|| argument("path"));
        let file = |value: &Value| value.get(0).unwrap_or(value).as_str().map(Value::from);
        if let Some(files) = argument("data_files") {
            let of = |names: &[&str]| names.iter().find_map(|name| file(files.get(*name)?));
            let train = if files.is_object() { of(&["train"]) } else { file(&files) };
            let eval = of(&["validation", "test", "eval", "valid"]);
            train.into_iter().for_each(|train| self.said.key(if is_eval { "eval_file" } else { "train_file" }, train));
            eval.into_iter().for_each(|eval| self.said.key("eval_file", eval));
        } else if let Some(path) = path.filter(|_| !is_eval) {
            let name = name.or_else(|| argument("name"));
            self.said.key("dataset_name", path);
            name.into_iter().for_each(|name| self.said.key("dataset_config", name));
            split.into_iter().for_each(|split| self.said.key("dataset_train_split", split));
        } else if is_eval {
            split.into_iter().for_each(|split| self.said.key("dataset_test_split", split));
        }
    }

    /// The value of an expression that is a literal, a name of one, or what is often written in its place.
    fn literal(&self, tokens: &[Token]) -> Option<Value> {
        match tokens {
            [Token::Text(text)] => Some(text.as_str().into()),
            [Token::Text(_), ..] if tokens.iter().all(|token| matches!(token, Token::Text(_))) => {
                let parts =
                    tokens.iter().filter_map(|token| if let Token::Text(text) = token { Some(&**text) } else { None });
                Some(parts.collect::<String>().into())
            }
            [Token::Format(text)] => self.formatted(text).map(Value::from),
            [Token::Number(text)] => number(text),
            [Token::Sign('-'), Token::Number(text)] => number(&format!("-{text}")),
            [Token::Name(name)] => match name.as_str() {
                "True" => Some(Value::Bool(true)),
                "False" => Some(Value::Bool(false)),
                "None" => Some(Value::Null),
                name => self.known.get(name).cloned(),
            },
            // Whether a GPU computes in bf16, as the machine for this recipe is taken to do.
            [Token::Name(name), rest @ ..] if name == "not" => {
                self.literal(rest)?.as_bool().map(|value| Value::Bool(!value))
            }
            [.., Token::Sign('('), Token::Sign(')')] => {
                let (path, after) = path_at(tokens);
                let asks =
                    path.last().is_some_and(|name| matches!(*name, "is_bfloat16_supported" | "is_bf16_supported"));
                (asks && after + 2 == tokens.len()).then_some(Value::Bool(true))
            }
            [Token::Name(name), Token::Sign('('), items @ .., Token::Sign(')')] if name == "dict" => {
                let pair = |item: &[Token]| match item {
                    [Token::Name(name), Token::Sign('='), value @ ..] => Some((name.clone(), self.literal(value)?)),
                    _ => None,
                };
                let items = [items, &[Token::Sign(')')]].concat();
                arguments(&items).into_iter().map(pair).collect::<Option<_>>().map(Value::Object)
            }
            [Token::Sign('{'), .., Token::Sign('}')] => {
                let pair = |item: &[Token]| {
                    let at = item.iter().position(|token| *token == Token::Sign(':'))?;
                    let name = self.literal(&item[..at])?;
                    Some((name.as_str()?.to_owned(), self.literal(&item[at + 1..])?))
                };
                elements(tokens)?.into_iter().map(pair).collect::<Option<_>>().map(Value::Object)
            }
            [Token::Sign('[' | '('), .., Token::Sign(']' | ')')] => {
                let items = elements(tokens)?;
                match &items[..] {
                    // A group, and no tuple.
                    [item] if tokens[0] == Token::Sign('(') && tokens[tokens.len() - 2] != Token::Sign(',') => {
                        self.literal(item)
                    }
                    _ => items.iter().map(|item| self.literal(item)).collect(),
                }
            }
            _ if tokens.len() > 2 && self.whole(tokens).is_some() => self.whole(tokens).map(Value::from),
            _ => self.named(tokens),
        }
    }

    /// The value of a name behind others: a type of torch's, or what that name is known for.
    fn named(&self, tokens: &[Token]) -> Option<Value> {
        let (path, after) = path_at(tokens);
        let last = path.last().filter(|_| after == tokens.len() && path.len() > 1)?;
        match *last {
            "bfloat16" | "float16" | "float32" | "half" if path[0] == "torch" => Some((*last).into()),
            last => self.known.get(last).cloned(),
        }
    }

    /// A sum, difference or product of whole numbers, without brackets: `max_seq_length - max_prompt_length`.
    fn whole(&self, tokens: &[Token]) -> Option<i64> {
        let at = |signs: [char; 2]| {
            tokens.iter().rposition(|token| matches!(token, Token::Sign(sign) if signs.contains(sign)))
        };
        let Some(at) = at(['+', '-']).or_else(|| at(['*', '*'])) else {
            return self.literal(tokens.get(..1).filter(|one| one.len() == tokens.len())?)?.as_i64();
        };
        let (left, right) = (self.whole(&tokens[..at])?, self.whole(&tokens[at + 1..])?);
        match tokens[at] {
            Token::Sign('+') => left.checked_add(right),
            Token::Sign('-') => left.checked_sub(right),
            _ => left.checked_mul(right),
        }
    }

    /// A text with names in braces, all of which are known.
    fn formatted(&self, text: &str) -> Option<String> {
        let mut parts = text.split('{');
        let mut whole = parts.next()?.to_owned();
        for part in parts {
            let (name, rest) = part.split_once('}')?;
            match self.known.get(name)? {
                Value::String(text) => whole.push_str(text),
                value => whole.push_str(&value.to_string()),
            }
            whole.push_str(rest);
        }
        Some(whole)
    }
}

/// How a model of llama.cpp is written that a program asks for.
fn of_gguf(method: &str) -> String {
    match method {
        "f16" | "bf16" | "f32" | "q8_0" => {
            format!("after the run: `lora-train merge RUN --out model.gguf --dtype {method}`")
        }
        _ => format!(
            "after the run: `lora-train merge RUN --out model.gguf --dtype f16`, then llama.cpp's `llama-quantize model.gguf \
             model-{method}.gguf {}`",
            method.to_uppercase()
        ),
    }
}

/// The dotted name that tokens begin with, and how many tokens it has.
fn path_at(tokens: &[Token]) -> (Vec<&str>, usize) {
    let mut path = Vec::new();
    let mut at = 0;
    while let Some(Token::Name(name)) = tokens.get(at) {
        path.push(name.as_str());
        at += 1;
        if tokens.get(at) != Some(&Token::Sign('.')) {
            break;
        }
        at += 1;
    }
    (path, at)
}

/// What a statement assigns to the name before these tokens, with an annotation or without.
fn assigned(rest: &[Token]) -> Option<&[Token]> {
    let end = rest.iter().position(|token| *token == Token::End)?;
    let statement = &rest[..end];
    let at = match statement.first()? {
        Token::Sign('=') => 0,
        Token::Sign(':') => statement.iter().position(|token| *token == Token::Sign('='))?,
        _ => return None,
    };
    Some(&statement[at + 1..])
}

/// The arguments of a call, from the tokens behind its bracket.
fn arguments(tokens: &[Token]) -> Vec<&[Token]> {
    let mut depth = 0;
    let is_end = |token: &Token| {
        match token {
            Token::Sign('(' | '[' | '{') => depth += 1,
            Token::Sign(')' | ']' | '}') => depth -= 1,
            _ => {}
        }
        depth < 0
    };
    let end = tokens.iter().position(is_end).unwrap_or(tokens.len());
    split(&tokens[..end])
}

/// What stands in brackets, if the first bracket is closed by the last.
fn elements(tokens: &[Token]) -> Option<Vec<&[Token]>> {
    let inside = tokens.get(1..tokens.len().checked_sub(1)?)?;
    let mut depth = 0;
    for token in inside {
        match token {
            Token::Sign('(' | '[' | '{') => depth += 1,
            Token::Sign(')' | ']' | '}') => depth -= 1,
            _ => {}
        }
        if depth < 0 {
            return None;
        }
    }
    matches!(tokens[0], Token::Sign('[' | '(' | '{')).then(|| split(inside))
}

/// The parts between the commas that are in no bracket.
fn split(tokens: &[Token]) -> Vec<&[Token]> {
    let (mut depth, mut parts, mut from) = (0, Vec::new(), 0);
    for (at, token) in tokens.iter().enumerate() {
        match token {
            Token::Sign('(' | '[' | '{') => depth += 1,
            Token::Sign(')' | ']' | '}') => depth -= 1,
            Token::Sign(',') if depth == 0 => {
                parts.push(&tokens[from..at]);
                from = at + 1;
            }
            _ => {}
        }
    }
    parts.push(&tokens[from..]);
    parts.retain(|part| !part.is_empty());
    parts
}

/// The names in a list of functions.
fn names(tokens: &[Token]) -> Option<Value> {
    elements(tokens)?.into_iter().map(last_name).collect::<Option<_>>().map(Value::Array)
}

/// The name of a function.
fn last_name(tokens: &[Token]) -> Option<Value> {
    let (path, after) = path_at(tokens);
    path.last().filter(|_| after == tokens.len()).map(|name| (*name).into())
}

/// A number as Python writes it.
fn number(text: &str) -> Option<Value> {
    let text = text.replace('_', "");
    let whole = text.parse::<i64>().ok().map(Number::from);
    whole.or_else(|| Number::from_f64(text.parse().ok()?)).map(Value::Number)
}

#[cfg(test)]
mod tests;
