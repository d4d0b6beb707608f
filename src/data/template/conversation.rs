//! A conversation as text, and where in it the assistant's answers are.

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::ops::Range;

use serde_json::{Value, json};

use super::{ChatTemplate, Prompt, Rendered, TemplateError};

/// Keys of a message whose text is part of the conversation.
pub(super) const TEXT_KEYS: [&str; 2] = ["content", "reasoning_content"];

/// A conversation and the text that a template writes for it.
pub(super) struct Conversation<'a> {
    pub(super) template: &'a ChatTemplate,
    pub(super) messages: &'a [Value],
    /// `messages` as the template gets them.
    values: Vec<minijinja::Value>,
    pub(super) tools: Option<&'a Value>,
    pub(super) text: String,
    /// Keys of messages that leave no trace in `text`.
    pub(super) unread: BTreeSet<String>,
}

impl<'a> Conversation<'a> {
    /// Renders a conversation.
    pub(super) fn new(
        template: &'a ChatTemplate,
        messages: &'a [Value],
        tools: Option<&'a Value>,
    ) -> Result<Self, TemplateError> {
        let values = template.values(messages);
        let text = template.render_values(&values, tools, Prompt::None)?;
        Ok(Self { template, messages, values, tools, text, unread: BTreeSet::new() })
    }

    /// The text with what the template's `{% generation %}` tags enclose, where it has such tags. Of messages that carry no
    /// loss, or only a part of which does, it counts where the answers carry loss.
    pub(super) fn with_marks(self) -> Result<Rendered, TemplateError> {
        let (template, origin) = (self.template, &self.template.origin);
        let variables = template.variables(&self.values, self.tools, Prompt::None);
        let marked = template.jinja.render_marked(variables).map_err(|reason| template.failed(&reason))?;
        let Some((text, marks)) = marked else { return self.with_answers() };
        if text != self.text {
            let what =
                format!("the chat template of {origin} changes what its `{{% generation %}}` tags enclose afterwards");
            return Err(TemplateError(format!("{what}, or reads it\n  hint: put them where the text is written")));
        }
        let answers = || self.messages.iter().filter(|message| message["role"] == "assistant");
        let is_whole =
            |message: &Value| message["weight"] != 0 && message["train_detail"].is_null() && !is_empty(message);
        if marks.is_empty() && answers().any(is_whole) {
            return Err(TemplateError(format!(
                "the chat template of {origin} has `{{% generation %}}` tags, which say what carries loss, and writes none of \
                 them here\n  hint: give a template without them, or with others, in `data.chat_template`"
            )));
        }
        if answers().all(is_whole) {
            // The marks say what carries loss: no end is added that the template does not write.
            return Ok(Rendered { text, answers: marks, unwritten_end: None, empty_answer: None, unread: self.unread });
        }
        let rendered = self.with_answers()?;
        let both = |mark: &Range<usize>| {
            let mark = mark.clone();
            rendered.answers.iter().map(move |answer| mark.start.max(answer.start)..mark.end.min(answer.end))
        };
        let answers = marks.iter().flat_map(both).filter(|part| part.start < part.end).collect();
        Ok(Rendered { answers, unwritten_end: None, ..rendered })
    }

    /// The text with the byte ranges of the answers.
    pub(super) fn with_answers(self) -> Result<Rendered, TemplateError> {
        let (mut answers, mut unwritten_end, mut empty_answer) = (Vec::new(), None, None);
        for (index, message) in self.messages.iter().enumerate() {
            if message["role"] != "assistant" || message["weight"] == 0 {
                continue;
            }
            if is_empty(message) {
                empty_answer = empty_answer.or(Some(index));
                continue;
            }
            let start = self.answer_start(index)?;
            if answers.last().is_some_and(|last: &Range<usize>| start < last.end) {
                return Err(self.not_found(index));
            }
            let end = self.answer_end(start, index)?;
            unwritten_end = self.unwritten_end(&self.text[start..end]).filter(|_| index + 1 == self.messages.len());
            let parts = self.with_loss(start..end, index)?;
            answers.extend(parts.into_iter().filter(|part| part.start < part.end));
        }
        Ok(Rendered { text: self.text, answers, unwritten_end, empty_answer, unread: self.unread })
    }

    /// The token that ends the last answer, which ends with `text`, where the template does not write it.
    pub(super) fn unwritten_end(&self, text: &str) -> Option<String> {
        let last = self.messages.last().filter(|last| last["role"] == "assistant" && !is_empty(last))?;
        let ends = self.template.ends();
        ends.unwritten(last).filter(|_| !ends.is_ended(text)).map(ToOwned::to_owned)
    }

    /// The parts of answer `index` that carry loss: all of it, or of its content the characters that `train_detail`
    /// names, and what follows the content.
    fn with_loss(&self, answer: Range<usize>, index: usize) -> Result<Vec<Range<usize>>, TemplateError> {
        let message = &self.messages[index];
        let Some(detail) = message["train_detail"].as_array() else { return Ok(vec![answer]) };
        let content = message["content"].as_str().unwrap_or_default();
        let (said, text) = (content.trim(), &self.text[answer.clone()]);
        let found = text.find(said).filter(|at| text.rfind(said) == Some(*at));
        let start = answer.start + found.ok_or_else(|| {
            TemplateError(format!(
                "message {}: the chat template of {} does not write its `content` as it is, so `train_detail` names no \
                 characters of the text",
                index + 1,
                self.template.origin
            ))
        })?;
        let blank = content.len() - content.trim_start().len();
        let place = |character: &Value| {
            let character = character.as_u64().and_then(|at| usize::try_from(at).ok()).unwrap_or(usize::MAX);
            let byte = content.char_indices().nth(character).map_or(content.len(), |(byte, _)| byte);
            start + byte.saturating_sub(blank).min(said.len())
        };
        let parts = detail.iter().map(|part| place(&part[0])..place(&part[1]));
        Ok(parts.chain(std::iter::once(start + said.len()..answer.end)).collect())
    }

    /// Offset in `text` where answer `index` of the conversation starts: after what a generation prompt supplies.
    fn answer_start(&self, index: usize) -> Result<usize, TemplateError> {
        let text = self.text.as_str();
        let render = |kind: Prompt| self.template.render_values(&self.values[..index], self.tools, kind);
        let kinds = self.prompt_kinds();
        let prompts = || kinds.iter().map(|kind| render(*kind)).collect::<Result<Vec<_>, _>>().ok();
        // What a template writes of no messages lacks what it puts before the first one, and some refuse conversations
        // without a user's message.
        let Some(prompts) = (index > 0).then(prompts).flatten() else { return self.start_by_words(index) };
        let asked = || render(Prompt::None);
        if let Some(start) = self.start_behind(0, &prompts, asked, index)? {
            return Ok(start);
        }
        // An earlier part of the text depends on later messages. The part between the previous message and the answer
        // does not.
        let (altered, altered_text) = self.altered(index - 1);
        let behind = |prompt: &str, kind: Prompt| {
            let other = self.template.render_values(&altered[..index], self.tools, kind)?;
            Ok::<_, TemplateError>(prompt[prompt.len() - common_suffix(prompt, &other)..].to_owned())
        };
        let ends = kinds.iter().zip(&prompts).map(|(kind, prompt)| behind(prompt, *kind));
        let ends = ends.collect::<Result<Vec<_>, _>>()?;
        if altered_text != text && ends.iter().zip(&prompts).all(|(end, prompt)| end.len() < prompt.len()) {
            let from = text.len() - common_suffix(text, &altered_text);
            if let Some(start) = self.start_behind(from, &ends, || behind(&asked()?, Prompt::None), index)? {
                return Ok(start);
            }
        }
        Err(self.not_a_prefix(&prompts[prompts.len() - 1], index))
    }

    /// Where answer `index` starts if what is in `text` at `from` begins with one of `prompts`, or with what they ask, `asked`,
    /// and the token that starts the assistant's turn.
    fn start_behind(
        &self,
        from: usize,
        prompts: &[String],
        asked: impl FnOnce() -> Result<String, TemplateError>,
        index: usize,
    ) -> Result<Option<usize>, TemplateError> {
        let text = &self.text[from..];
        if let Some(prompt) = prompts.iter().find(|prompt| text.starts_with(prompt.as_str())) {
            return Ok(Some(from + prompt.len()));
        }
        // The prompt may open a thought that the text does not have. Their common start then has the token that starts the
        // assistant's turn.
        let asked = asked()?;
        Ok(prompts.iter().find_map(|prompt| {
            let common = &text[..common_prefix(text, prompt)];
            let end = last_end(&self.template.vocabulary.special, common)?;
            let has_start = common.starts_with(&asked) && end > asked.len();
            has_start.then(|| self.first_word(index).map_or(from + end, |word| word.min(from + common.len())))
        }))
    }

    /// The start of answer `index`, from the place of its first word and the generation prompt of another conversation.
    fn start_by_words(&self, index: usize) -> Result<usize, TemplateError> {
        let text = self.text.as_str();
        let after = |index: usize| text.len() - common_suffix(text, &self.altered(index).1);
        let from = index.checked_sub(1).map_or(0, after);
        // Where the template refuses a change, nothing is found.
        let word = self.first_word(index).filter(|word| (index == 0 || from > 0) && from <= *word);
        let word = word.ok_or_else(|| self.not_found(index))?;
        let question = self.template.values(&[json!({"role": "user", "content": "x"})]);
        let render = |kind: Prompt| self.template.render_values(&question, self.tools, kind);
        let asked = render(Prompt::None).unwrap_or_default();
        let ends = self.prompt_kinds().iter().filter_map(|kind| {
            let prompt = render(*kind).ok()?;
            let prompt = &prompt[common_prefix(&prompt, &asked)..];
            Some(from + text[from..word].rfind(prompt)? + prompt.len())
        });
        Ok(ends.max().unwrap_or(word))
    }

    /// Offset in `text` of the first word of message `index`.
    fn first_word(&self, index: usize) -> Option<usize> {
        let (_, altered) = self.altered(index);
        (altered != self.text).then(|| common_prefix(&self.text, &altered))
    }

    /// Some templates write an empty thought into answers without a thought; `WithoutThinking` prompts include it.
    fn prompt_kinds(&self) -> &'static [Prompt] {
        if self.template.mentions("enable_thinking") {
            &[Prompt::WithoutThinking, Prompt::Answer]
        } else {
            &[Prompt::Answer]
        }
    }

    /// Offset in `text` where answer `index`, which starts at `start`, ends: after what ends the turn.
    fn answer_end(&self, start: usize, index: usize) -> Result<usize, TemplateError> {
        let (template, text, ends) = (self.template, self.text.as_str(), self.template.ends());
        if index + 1 == self.messages.len() {
            return Ok(start + ends.turn_length(&text[start..]));
        }
        let answered = template.render_values(&self.values[..=index], self.tools, Prompt::None);
        if let Ok(answered) = &answered
            && text.starts_with(answered)
            && start <= answered.len()
        {
            let end = start + ends.turn_length(&text[start..answered.len()]);
            let next = if ends.is_ended(&text[start..end]) { 0 } else { ends.length_in(&text[answered.len()..]) };
            return Ok(if next > 0 { answered.len() + next } else { end });
        }
        // The template adds something to the last answer only. This answer ends at the last end of a turn before the
        // content of the next message.
        let (_, altered) = self.altered(index + 1);
        let upto = text.get(start..common_prefix(text, &altered)).filter(|_| altered != text).unwrap_or_default();
        let end = last_end(&ends.marks, upto)
            .ok_or_else(|| answered.map_or_else(|error| error, |answered| self.not_a_prefix(&answered, index)))?;
        Ok(start + ends.turn_length(&upto[..end]))
    }

    /// The messages and their text with the words of message `index` replaced: the content by one with another first and
    /// last character.
    fn altered(&self, index: usize) -> (Vec<minijinja::Value>, String) {
        let content = text_of(&self.messages[index]["content"]);
        let content = content.trim();
        let other = ["x", "y", "z"].into_iter().find(|other| !content.starts_with(other) && !content.ends_with(other));
        let values = self.changed(index, |message| {
            message["content"] = other.unwrap_or_default().into();
            for path in ["/reasoning_content", "/thinking", "/tool_calls/0/function/name"] {
                message.pointer_mut(path).into_iter().for_each(|words| *words = other.unwrap_or_default().into());
            }
        });
        // If the template refuses the change, use the unchanged text: callers see that nothing was altered.
        let text = self.template.render_values(&values, self.tools, Prompt::None);
        (values, text.unwrap_or_else(|_| self.text.clone()))
    }

    /// Whether the text stays the same after a change to message `index`. An error of the template counts as a
    /// difference.
    pub(super) fn is_same_after(&self, index: usize, change: impl FnOnce(&mut Value)) -> bool {
        let values = self.changed(index, change);
        self.template.render_values(&values, self.tools, Prompt::None).is_ok_and(|altered| altered == self.text)
    }

    fn changed(&self, index: usize, change: impl FnOnce(&mut Value)) -> Vec<minijinja::Value> {
        let mut message = self.messages[index].clone();
        change(&mut message);
        let mut values = self.values.clone();
        values[index] = self.template.value(&message);
        values
    }

    /// The error for an answer that is not in its place in the text.
    fn not_found(&self, index: usize) -> TemplateError {
        TemplateError(format!(
            "answer {index} cannot be found in the text that the chat template of {} writes\n  hint: set \
             `data.train_on_inputs = true`, which needs no mask, or give another template in `data.chat_template`",
            self.template.origin
        ))
    }

    /// The error for a `prefix`, the text of the messages up to `last`, that the text does not start with.
    fn not_a_prefix(&self, prefix: &str, last: usize) -> TemplateError {
        let at = common_prefix(&self.text, prefix);
        let excerpt = |text: &str| text[at..].chars().take(30).collect::<String>();
        TemplateError(format!(
            "the chat template of {} writes the start up to message {last} differently once more messages follow \
             (…{:?} against …{:?}), so answer {last} cannot be separated from the rest\n  hint: give a template that \
             only appends in `data.chat_template`, or set `data.train_on_inputs = true`, which needs no mask",
            self.template.origin,
            excerpt(prefix),
            excerpt(&self.text),
        ))
    }
}

/// The text of a content: a string, or the text parts of a list.
pub(super) fn text_of(content: &Value) -> Cow<'_, str> {
    match content {
        Value::String(text) => text.into(),
        Value::Array(parts) => {
            parts.iter().filter_map(|part| part["text"].as_str()).collect::<Vec<_>>().join("\n").into()
        }
        _ => "".into(),
    }
}

/// The text without an empty thought, which templates may add or remove.
pub(super) fn without_empty_thought(text: &str) -> Cow<'_, str> {
    let thought = text.split_once("<think>").and_then(|(before, rest)| Some((before, rest.split_once("</think>")?)));
    match thought {
        Some((before, (thought, after))) if thought.trim().is_empty() => format!("{before}\n{after}").into(),
        _ => text.into(),
    }
}

/// Where the last of `marks` in `text` ends.
fn last_end(marks: &[String], text: &str) -> Option<usize> {
    marks.iter().filter_map(|mark| Some(text.rfind(mark)? + mark.len())).max()
}

/// Whether an assistant's message has neither text nor calls.
fn is_empty(message: &Value) -> bool {
    message["tool_calls"].is_null()
        && TEXT_KEYS.iter().all(|key| {
            let text = text_of(&message[*key]);
            without_empty_thought(&text).trim().is_empty()
        })
}

/// Number of bytes, in whole characters, that two texts have in common at the start.
pub(super) fn common_prefix(one: &str, other: &str) -> usize {
    let differs = one.char_indices().zip(other.chars()).find(|((_, a), b)| a != b);
    differs.map_or(one.len().min(other.len()), |((at, _), _)| at)
}

/// Number of bytes, in whole characters, that two texts have in common at the end.
fn common_suffix(one: &str, other: &str) -> usize {
    let pairs = one.chars().rev().zip(other.chars().rev());
    pairs.take_while(|(a, b)| a == b).map(|(a, _)| a.len_utf8()).sum()
}
