//! Rows of preferences: two answers to a prompt, or one with a label.

use std::borrow::Cow;

use serde_json::{Value, json};

use super::images::RowImages;
use super::{Prompt, RowFormat, Sample, chat, kind_of, list_of, user};
use crate::data::template::ChatTemplate;

/// What a column of a prompt or an answer holds.
enum Said {
    Text(String),
    /// Messages for the chat template.
    Messages(Vec<Value>),
}

/// A row with its images, and the template that it is written with.
#[derive(Clone, Copy)]
struct Given<'a> {
    row: &'a Value,
    images: &'a RowImages<'a>,
    template: Option<&'a ChatTemplate>,
}

impl RowFormat {
    /// A chosen and a rejected answer to one prompt.
    pub(super) fn pair(&self, row: &Value, template: Option<&ChatTemplate>) -> Result<Sample, String> {
        let given = Given { row, images: &self.images_of(row, template)?, template };
        let [chosen, rejected] = ["chosen", "rejected"];
        let (good, bad) = (self.said(given, chosen)?, self.said(given, rejected)?);
        let (Some(good), Some(bad)) = (good, bad) else {
            let [chosen, rejected] = [chosen, rejected].map(|name| self.name_of(name));
            return Err(format!("`{chosen}` and `{rejected}` must both be there"));
        };
        let prompt = self.prompt(given)?;
        let samples = match (good, bad) {
            (Said::Text(good), Said::Text(bad)) => {
                if good == bad {
                    return Err(format!("`{chosen}` and `{rejected}` are equal"));
                }
                match prompt {
                    Some(prompt) => [good, bad].map(|answer| self.answered(&prompt, answer, given)),
                    None if !given.images.is_empty() => {
                        let prompt = self.name_of("prompt");
                        return Err(format!("has images, and no `{prompt}` for them to stand in"));
                    }
                    None => texts_with_common_start(&good, &bad).map(Ok),
                }
            }
            (Said::Messages(good), Said::Messages(bad)) => {
                if good == bad {
                    return Err(format!("`{chosen}` and `{rejected}` are equal"));
                }
                let [prompt, good, bad] = self.common_messages(prompt, good, bad, given.images)?;
                [good, bad].map(|answer| self.conversation(prompt.clone(), answer, given))
            }
            _ => return Err(format!("`{chosen}` and `{rejected}` must both be text or both be messages")),
        };
        let [chosen, rejected] = samples;
        let margin = if self.has_margins { self.margin(row)? } else { 0.0 };
        Ok(Sample::Pair(Box::new(chosen?), Box::new(rejected?), margin))
    }

    /// By how much the scores of a pair shall differ, more than at all.
    #[expect(clippy::cast_possible_truncation, reason = "scores are computed in f32")]
    fn margin(&self, row: &Value) -> Result<f32, String> {
        let name = self.name_of("margin");
        let number = match &row[name] {
            Value::Null => return Ok(0.0),
            // A cell of CSV.
            Value::String(text) if text.trim().is_empty() => return Ok(0.0),
            Value::String(text) => text.trim().parse().ok(),
            value => value.as_f64(),
        };
        let margin = number.map(|number: f64| number as f32).filter(|margin| margin.is_finite());
        margin.ok_or_else(|| format!("`{name}` must be a number, not {}", row[name]))
    }

    /// An answer, good or bad.
    pub(super) fn labelled(&self, row: &Value, template: Option<&ChatTemplate>) -> Result<Sample, String> {
        let given = Given { row, images: &self.images_of(row, template)?, template };
        let label = self.column(row, "label")?;
        let is_good = match label {
            Value::Bool(label) => *label,
            Value::String(text) if text.eq_ignore_ascii_case("true") || text == "1" => true,
            Value::String(text) if text.eq_ignore_ascii_case("false") || text == "0" => false,
            number if number.as_f64() == Some(1.0) => true,
            number if number.as_f64() == Some(0.0) => false,
            other => {
                return Err(format!("`{}` must be true or false, not {}", self.name_of("label"), kind_of(other)));
            }
        };
        let sample = match self.said(given, "completion")? {
            Some(answer) => self.after_prompt(answer, given)?,
            None => match self.said(given, "messages")? {
                Some(Said::Messages(mut messages)) => {
                    let answer = messages.pop().into_iter().collect();
                    self.conversation(messages, answer, given)?
                }
                _ => {
                    let [completion, messages] = ["completion", "messages"].map(|name| self.name_of(name));
                    return Err(format!("needs a column `{completion}` or `{messages}` beside its label"));
                }
            },
        };
        Ok(Sample::Labelled(Box::new(sample), is_good))
    }

    /// Whether a prompt and its completion are not both texts.
    pub(super) fn has_messages(&self, row: &Value) -> bool {
        let is_filled_list = |value: &Value| value.as_array().is_some_and(|items| !items.is_empty());
        ["prompt", "completion"].iter().any(|name| is_filled_list(&row[self.name_of(name)]))
    }

    /// A prompt and its completion, of which one is messages at least.
    pub(super) fn completed(&self, row: &Value, template: Option<&ChatTemplate>) -> Result<Sample, String> {
        let given = Given { row, images: &self.images_of(row, template)?, template };
        let answer = self.said(given, "completion")?;
        let answer = answer.ok_or_else(|| format!("`{}` is null", self.name_of("completion")))?;
        match self.after_prompt(answer, given)? {
            Sample::Chat { messages, tools: beside_prompt } => Ok(match self.chat(messages, row)? {
                Sample::Chat { messages, tools } => Sample::Chat { messages, tools: tools.or(beside_prompt) },
                other => other,
            }),
            text => Ok(text),
        }
    }

    /// An answer behind the prompt of its row.
    fn after_prompt(&self, answer: Said, given: Given<'_>) -> Result<Sample, String> {
        let prompt = self.prompt(given)?;
        let answer = match answer {
            Said::Text(answer) => {
                return self.answered(&prompt.unwrap_or(Said::Text(String::new())), answer, given);
            }
            Said::Messages(answer) => answer,
        };
        let prompt = match prompt {
            Some(Said::Text(text)) => vec![user(&text, given.images)?],
            Some(Said::Messages(messages)) => messages,
            None => Vec::new(),
        };
        self.conversation(prompt, answer, given)
    }

    /// A prompt, whose answers the model writes.
    pub(super) fn question(&self, row: &Value, template: Option<&ChatTemplate>) -> Result<Sample, String> {
        let given = Given { row, images: &self.images_of(row, template)?, template };
        let name = self.name_of("prompt");
        let prompt = self.prompt(given)?.ok_or_else(|| format!("`{name}` is null"))?;
        let mut messages = match prompt {
            Said::Text(text) if template.is_none() => return Ok(Sample::Prompt(Prompt::Text(text))),
            Said::Text(text) => vec![user(&text, given.images)?],
            Said::Messages(messages) => messages,
        };
        given.images.place(&mut messages)?;
        if messages.last().is_none_or(|message| message["role"] == "assistant") {
            return Err(format!("`{name}` must end with what the model is to answer"));
        }
        let tools = self.complete(&mut messages, row)?;
        Ok(Sample::Prompt(Prompt::Chat { messages, tools }))
    }

    /// Puts the system prompt in front, if the row or the recipe has one and the messages have none; returns the row's tools.
    fn complete(&self, messages: &mut Vec<Value>, row: &Value) -> Result<Option<Value>, String> {
        let system = self.optional_text(row, "system")?.filter(|system| !system.is_empty());
        let system = system.or(self.system.as_deref().map(Cow::from));
        if let Some(system) = system.filter(|_| !messages.iter().any(|message| message["role"] == "system")) {
            messages.insert(0, json!({"role": "system", "content": system}));
        }
        chat::number_calls(messages);
        // OpenAI's rows have them beside the messages of the prompt.
        let tools = [&row[self.name_of("tools")], &row[self.name_of("prompt")]["tools"]];
        let tools = tools.into_iter().find(|tools| !tools.is_null());
        let mut tools = chat::tools(tools).map_err(|reason| format!("`tools` {reason}"))?;
        chat::drop_nulls_of_arrow(messages, &mut tools);
        Ok(tools)
    }

    /// The prompt, if there is one; an `input` follows its instruction.
    fn prompt(&self, given: Given<'_>) -> Result<Option<Said>, String> {
        let prompt = self.said(given, "prompt")?;
        let is_instruction = self.name_of("prompt") == "instruction";
        let input = if is_instruction { self.optional_text(given.row, "input")? } else { None };
        Ok(match (prompt, input.filter(|input| !input.is_empty())) {
            (Some(Said::Text(prompt)), Some(input)) => Some(Said::Text(format!("{prompt}\n{input}"))),
            (prompt, _) => prompt,
        })
    }

    fn said(&self, Given { row, images, template }: Given<'_>, name: &str) -> Result<Option<Said>, String> {
        let column = self.name_of(name);
        let Some(value) = row.get(column).filter(|value| !value.is_null()) else { return Ok(None) };
        // OpenAI's prompts have tools beside their messages.
        let value = if value["messages"].is_array() { &value["messages"] } else { value };
        let list = list_of(value).map_err(|reason| format!("`{column}` {reason}"))?;
        let one;
        let items = match &*list {
            Value::String(text) => return Ok(Some(Said::Text(text.clone()))),
            Value::Number(_) | Value::Bool(_) => return Ok(Some(Said::Text(list.to_string()))),
            Value::Array(items) => items,
            object @ Value::Object(_) => {
                one = vec![object.clone()];
                &one
            }
            other => return Err(format!("`{column}` must be text or messages, not {}", kind_of(other))),
        };
        let message = |(index, item): (usize, &Value)| {
            let read = if item["from"].is_string() { chat::turn } else { chat::message };
            let read = images.read(item, |item| read(item, template));
            read.map_err(|reason| format!("`{column}`, message {}: {reason}", index + 1))
        };
        items.iter().enumerate().map(message).collect::<Result<_, _>>().map(|messages| Some(Said::Messages(messages)))
    }

    /// A prompt and an answer that is text.
    fn answered(&self, prompt: &Said, answer: String, given: Given<'_>) -> Result<Sample, String> {
        let said = || vec![json!({"role": "assistant", "content": answer})];
        match prompt {
            Said::Messages(messages) => self.conversation(messages.clone(), said(), given),
            Said::Text(text) if given.template.is_some() => {
                self.conversation(vec![user(text, given.images)?], said(), given)
            }
            Said::Text(text) => Ok(Sample::Completion { prompt: text.clone(), completion: answer }),
        }
    }

    /// A conversation of which only `answer` carries loss.
    fn conversation(
        &self,
        mut prompt: Vec<Value>,
        answer: Vec<Value>,
        Given { row, images, .. }: Given<'_>,
    ) -> Result<Sample, String> {
        if !answer.iter().any(|message| message["role"] == "assistant") {
            return Err("an answer has no message of the assistant".into());
        }
        let earlier = prompt.iter_mut().filter(|message| message["role"] == "assistant");
        earlier.for_each(|message| message["weight"] = json!(0));
        prompt.extend(answer);
        images.place(&mut prompt)?;
        let tools = self.complete(&mut prompt, row)?;
        Ok(Sample::Chat { messages: prompt, tools })
    }

    /// The messages before the first one that differs, and the rest of both conversations. `prompt` stands before them, or
    /// is in them already.
    fn common_messages(
        &self,
        prompt: Option<Said>,
        good: Vec<Value>,
        bad: Vec<Value>,
        images: &RowImages<'_>,
    ) -> Result<[Vec<Value>; 3], String> {
        let num_common = good.iter().zip(&bad).take_while(|(good, bad)| good == bad).count();
        let common = &good[..num_common];
        let before = match prompt {
            Some(Said::Messages(messages)) if !good.starts_with(&messages) || !bad.starts_with(&messages) => messages,
            Some(Said::Text(text)) => {
                let asking = user(&text, images)?;
                let is_it = |message: &&Value| text_of(message).trim() == text_of(&asking).trim();
                let asked = |message: &&Value| message["role"] == "user";
                match (common.iter().any(|message| is_it(&message)), common.iter().any(|message| asked(&message))) {
                    (true, _) => Vec::new(),
                    (false, false) => vec![asking],
                    (false, true) => {
                        let column = self.name_of("prompt");
                        return Err(format!(
                            "`{column}` is not what the messages of the two answers have in common\n  hint: leave the column \
                             out where they contain the prompt"
                        ));
                    }
                }
            }
            _ => Vec::new(),
        };
        let rest = |messages: Vec<Value>| messages.into_iter().skip(num_common).collect();
        let prompt = before.into_iter().chain(common.iter().cloned()).collect();
        Ok([prompt, rest(good), rest(bad)])
    }
}

/// The text of a message, without its images.
fn text_of(message: &Value) -> String {
    let content = &message["content"];
    let parts = content.as_array().into_iter().flatten().filter_map(|part| part["text"].as_str());
    content.as_str().into_iter().chain(parts).collect()
}

/// Two texts, whose common start is the prompt; a space at its end belongs to the answers.
fn texts_with_common_start(good: &str, bad: &str) -> [Sample; 2] {
    let differs = good.char_indices().zip(bad.chars()).find(|((_, good), bad)| good != bad);
    let common = differs.map_or(good.len().min(bad.len()), |((at, _), _)| at);
    let common = if good[..common].ends_with(' ') { common - 1 } else { common };
    [good, bad]
        .map(|text| Sample::Completion { prompt: text[..common].to_owned(), completion: text[common..].to_owned() })
}
