//! What ends the assistant's turns, found by rendering short conversations: the one place that loss masks, generation,
//! exports and warnings ask.

use std::collections::BTreeSet;
use std::iter;

use serde_json::{Value, json};

use super::ChatTemplate;
use super::conversation::common_prefix;
use crate::data::tokenizer::{SpecialToken, Tokenizer};

/// Words that no template has, of a question, an answer and a function.
const QUESTION: &str = "qxqu";
const ANSWER: &str = "qxan";
const FUNCTION: &str = "qxfu";
/// Characters of a text at which generation may stop; answers have shorter ones inside.
const MIN_END_TEXT: usize = 2;

/// Where a text that a model writes ends.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Stops {
    /// Tokens, ascending.
    pub ids: Vec<u32>,
    /// Texts.
    pub texts: Vec<String>,
}

impl Stops {
    /// The ends of texts, and those of answers through `template`.
    #[must_use]
    pub fn of(tokenizer: &Tokenizer, template: Option<&ChatTemplate>) -> Self {
        let templates =
            template.into_iter().flat_map(|template| iter::once(template).chain(template.with_tools.as_deref()));
        let ends: Vec<&TurnEnds> = templates.map(ChatTemplate::ends).collect();
        let tokens = ends.iter().flat_map(|ends| &ends.tokens).map(|token| token.id);
        let ids: BTreeSet<u32> = tokens.chain(tokenizer.eos_ids().iter().copied()).collect();
        let texts: BTreeSet<String> = ends.iter().filter_map(|ends| ends.text.clone()).collect();
        Self { ids: ids.into_iter().collect(), texts: texts.into_iter().collect() }
    }
}

/// The tokens of a model among which the ends of turns are found.
#[derive(Debug)]
pub(super) struct Vocabulary {
    /// Added tokens, but for white space, which ends nothing.
    added: Vec<SpecialToken>,
    /// Texts of the tokens that are marked as special.
    pub(super) special: Vec<String>,
    /// Texts of the tokens that end turns by the model's files and by their names.
    turn_ends: Vec<String>,
    /// Texts of those at which generation stops.
    stops: Vec<String>,
}

impl Vocabulary {
    pub(super) fn of(tokenizer: &Tokenizer) -> Self {
        let added = tokenizer.added_tokens().into_iter().filter(|token| !token.text.trim().is_empty());
        Self {
            added: added.collect(),
            special: tokenizer.special_texts(),
            turn_ends: tokenizer.turn_ends(),
            stops: tokenizer.eos_ids().iter().filter_map(|id| tokenizer.token_text(*id)).collect(),
        }
    }

    /// The longest token with which `text` begins.
    fn first(&self, text: &str) -> Option<&SpecialToken> {
        self.added.iter().filter(|token| text.starts_with(&token.text)).max_by_key(|token| token.text.len())
    }

    fn is_special(&self, token: &str) -> bool {
        self.special.iter().any(|special| special == token)
    }

    /// The token that ends an answer in `tail`, which a template writes behind it, and where: the first that is known to end
    /// turns, or else the first.
    fn end_in(&self, tail: &str) -> Option<(usize, &SpecialToken)> {
        let places = tail.char_indices().filter_map(|(at, _)| self.first(&tail[at..]).map(|token| (at, token)));
        let places: Vec<_> = places.map(|(at, token)| (at + token.text.len(), token)).collect();
        let is_alone = |token: &SpecialToken| self.is_special(&token.text) || tail.trim() == token.text;
        let known = places.iter().find(|(_, token)| self.turn_ends.contains(&token.text));
        known.or_else(|| places.first().filter(|(_, token)| is_alone(token))).copied()
    }

    /// The token that ends a turn which ends with `text`: one that is known to end turns, or else a special one that `may_end`
    /// it.
    fn end_of(&self, text: &str, may_end: impl Fn(&str) -> bool) -> Option<SpecialToken> {
        let may_end = |token: &&SpecialToken| {
            self.turn_ends.contains(&token.text) || self.is_special(&token.text) && may_end(&token.text)
        };
        let tokens: Vec<&str> = self.added.iter().filter(may_end).map(|token| &*token.text).collect();
        let text = &text[..closing(text, &tokens, &self.turn_ends)?];
        let last = self.added.iter().filter(|token| text.ends_with(&token.text)).filter(may_end);
        last.max_by_key(|token| token.text.len()).cloned()
    }

    /// The token that ends an answer of which `followed` is what follows: one at which generation stops, or one that a
    /// conversation does not begin with, as `head` does.
    fn start_of(&self, followed: &str, head: &str) -> Option<SpecialToken> {
        let first = self.first(followed.trim_start());
        first.filter(|token| self.stops.contains(&token.text) || !head.contains(&token.text)).cloned()
    }
}

/// Where in `text` the token ends that ends the turn. `tokens` and white space follow an answer's own text: the first of them
/// that is one of `ends`, or else the last.
fn closing<T: AsRef<str>>(text: &str, tokens: &[T], ends: &[String]) -> Option<usize> {
    let (mut rest, mut found) = (text, None);
    loop {
        let trimmed = rest.trim_end();
        let last =
            tokens.iter().map(AsRef::as_ref).filter(|token| trimmed.ends_with(token)).max_by_key(|token| token.len());
        let Some(last) = last.filter(|last| !last.is_empty()) else { return found };
        if found.is_none() || ends.iter().any(|end| end == last) {
            found = Some(trimmed.len());
        }
        rest = &trimmed[..trimmed.len() - last.len()];
    }
}

/// Short conversations under a template; what it refuses is `None`.
struct Conversations<'a> {
    template: &'a ChatTemplate,
}

impl Conversations<'_> {
    fn render(&self, messages: &[Value], prompt: bool) -> Option<String> {
        self.template.render(messages, None, prompt).ok()
    }

    /// A question.
    fn asked(&self, prompt: bool) -> Option<String> {
        self.render(&[message("user", QUESTION)], prompt)
    }

    /// With its answer, and a question behind it or not.
    fn with_answer(&self, is_followed: bool) -> Option<String> {
        let mut messages = vec![message("user", QUESTION), message("assistant", ANSWER)];
        messages.extend(is_followed.then(|| message("user", QUESTION)));
        self.render(&messages, false)
    }

    /// With an answer of so many calls of a function, and what the first gives behind it or not.
    fn with_calls(&self, count: usize, is_followed: bool) -> Option<String> {
        let function = json!({"name": FUNCTION, "arguments": {}});
        let calls: Vec<Value> = (0..count)
            .map(|index| json!({"id": format!("call0000{index}"), "type": "function", "function": function}))
            .collect();
        let mut call = message("assistant", "");
        call["tool_calls"] = calls.into();
        let result = json!({"role": "tool", "content": "1", "tool_call_id": "call00000", "name": FUNCTION});
        let mut messages = vec![message("user", QUESTION), call];
        messages.extend(is_followed.then_some(result));
        self.render(&messages, false)
    }
}

fn message(role: &str, word: &str) -> Value {
    json!({"role": role, "content": word})
}

/// What ends the assistant's turns under a template.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TurnEnds {
    /// The tokens that end an answer, and one that calls a function; generation stops there.
    pub tokens: Vec<SpecialToken>,
    /// The text that ends an answer where no token does; generation stops there.
    pub text: Option<String>,
    /// What the template writes behind an answer and behind a call only where a message follows, often as its start.
    unwritten: [Option<SpecialToken>; 2],
    /// What the template writes behind a last answer, and the length of its part that is learned.
    tail: Option<(String, usize)>,
    /// Texts of all tokens that may follow an answer, its end among them.
    closers: Vec<String>,
    /// All that ends a turn.
    pub(super) marks: Vec<String>,
    /// Why a model does not learn to end an answer.
    pub without_end: Option<String>,
    /// Why a prompt is not what an answer follows.
    pub bad_prompt: Option<String>,
}

impl TurnEnds {
    /// Renders short conversations. What the template refuses stays unknown.
    pub(super) fn of(template: &ChatTemplate) -> Self {
        let vocabulary = &template.vocabulary;
        let conversations = Conversations { template };
        let of_template = format!("the chat template of {}", template.origin);
        let mut ends = Self::default();
        let asked = conversations.asked(false).unwrap_or_default();
        let head = asked.split(QUESTION).next().unwrap_or_default();
        let answered = conversations.with_answer(false).filter(|text| text.contains(ANSWER));
        if let Some(answered) = &answered {
            ends.of_answer(answered, head, &conversations);
            if ends.tail.is_none() && ends.unwritten[0].is_none() {
                ends.without_end = Some(format!(
                    "{of_template} writes nothing behind an answer at which generation stops: the model does not learn where \
                     an answer ends\n  hint: `data.chat_template` can name one that ends answers, such as with \
                     {{{{ eos_token }}}}"
                ));
            }
        }
        if let Some(called) = conversations.with_calls(1, false).filter(|text| text.contains(FUNCTION)) {
            ends.of_call(&called, head, &conversations);
        }
        for token in ends.unwritten.iter().flatten() {
            if !ends.tokens.contains(token) {
                ends.tokens.push(token.clone());
            }
        }
        ends.tokens.dedup();

        let own = ends.tokens.iter().map(|token| &token.text).chain(&ends.text);
        ends.marks = vocabulary.turn_ends.iter().chain(own).cloned().collect();
        ends.closers = vocabulary.special.iter().chain(&ends.marks).cloned().collect();
        if let (Some(prompt), Some(answered)) = (conversations.asked(true), answered) {
            let problem = ends.problem_of(&asked, &prompt, &answered);
            let hint = "\n  hint: `data.chat_template` can name one that begins the answer for `add_generation_prompt`";
            ends.bad_prompt = problem.map(|problem| format!("{of_template} {problem}{hint}"));
        }
        ends
    }

    /// What ends an answer, which `answered` has as the last one.
    fn of_answer(&mut self, answered: &str, head: &str, conversations: &Conversations<'_>) {
        let vocabulary = &conversations.template.vocabulary;
        let behind = |text: &str| text.rfind(ANSWER).map(|at| text[at + ANSWER.len()..].to_owned());
        let tail = behind(answered).unwrap_or_default();
        let followed = conversations.with_answer(true).and_then(|text| behind(&text)).unwrap_or_default();
        // What stands behind every answer goes before what stands behind the last one alone.
        let every = &tail[..common_prefix(&tail, &followed)];
        if let Some((end, token)) = vocabulary.end_in(every).or_else(|| vocabulary.end_in(&tail)) {
            self.tokens.push(token.clone());
            self.tail = Some((tail, end));
        } else if tail.trim().is_empty() {
            self.unwritten[0] = vocabulary.start_of(&followed, head);
        } else if tail.trim().chars().count() >= MIN_END_TEXT {
            let text = tail.trim_end().to_owned();
            self.tail = Some((tail, text.len()));
            self.text = Some(text);
        }
    }

    /// What ends an answer that calls a function, which `called` has as the last one.
    fn of_call(&mut self, called: &str, head: &str, conversations: &Conversations<'_>) {
        let vocabulary = &conversations.template.vocabulary;
        // A token that each call has closes the call.
        let twice = conversations.with_calls(2, false).unwrap_or_default();
        let own = vocabulary.end_of(called, |token| twice.matches(token).count() <= called.matches(token).count());
        let followed = conversations.with_calls(1, true).unwrap_or_default();
        let followed = followed.strip_prefix(called.trim_end()).unwrap_or_default();
        if own.is_none() && self.text.as_ref().is_none_or(|text| !called.trim_end().ends_with(text)) {
            self.unwritten[1] = vocabulary.start_of(followed, head);
        }
        self.tokens.extend(own);
    }

    /// Why `prompt` is not what an answer follows: the question alone is `asked`, with an answer `answered`.
    fn problem_of(&self, asked: &str, prompt: &str, answered: &str) -> Option<String> {
        let header = answered.strip_prefix(asked).and_then(|rest| rest.split(ANSWER).next()).unwrap_or_default();
        if asked == prompt && !header.trim().is_empty() {
            return Some(format!(
                "has no generation prompt: {header:?}, which it writes before answers, is in no prompt, so the model learns to \
                 write it and shows it"
            ));
        }
        let end = self.marks.iter().find(|end| prompt.trim_end().ends_with(end.as_str()))?;
        Some(format!("ends prompts with {end:?}, at which texts end: answers begin behind an end"))
    }

    /// Length of an answer up to the end of what ends the turn; whatever follows is never generated. An answer without an end
    /// is taken whole.
    pub(super) fn turn_length(&self, answer: &str) -> usize {
        let tail = self.tail.as_ref().filter(|(tail, _)| answer.ends_with(tail));
        let answer = tail.map_or(answer, |(tail, end)| &answer[..answer.len() - tail.len() + end]);
        // An answer's own text may end with an end, too.
        closing(answer, &self.closers, &self.marks).unwrap_or(answer.len())
    }

    /// An answer without what ends it, and without white space around it.
    #[must_use]
    pub fn without_end<'a>(&self, answer: &'a str) -> &'a str {
        let mut rest = answer.trim();
        let closers = || self.closers.iter().map(|closer| closer.trim()).filter(|closer| !closer.is_empty());
        while let Some(before) = closers().find_map(|closer| rest.strip_suffix(closer)) {
            rest = before.trim_end();
        }
        rest
    }

    /// Whether an answer has its end.
    pub(super) fn is_ended(&self, answer: &str) -> bool {
        self.marks.iter().any(|mark| answer.trim_end().ends_with(mark.as_str()))
    }

    /// Length of the token that ends an answer without an end, in what follows it.
    pub(super) fn length_in(&self, followed: &str) -> usize {
        let rest = followed.trim_start();
        let longest =
            self.closers.iter().filter(|closer| rest.starts_with(closer.as_str())).max_by_key(|closer| closer.len());
        let end = longest.filter(|closer| self.marks.contains(closer));
        end.map_or(0, |end| followed.len() - rest.len() + end.len())
    }

    /// What ends a last answer, where the template does not write it.
    pub(super) fn unwritten(&self, message: &Value) -> Option<&str> {
        self.unwritten[usize::from(!message["tool_calls"].is_null())].as_ref().map(|token| token.text.as_str())
    }
}
