//! Episodes: the model and the environment take turns, many of them at a time. What was written before is never rendered again: an
//! episode is the tokens of its prompt, those that were drawn, and those that stand between two answers.

use std::collections::HashMap;
use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::environment::opening::UNREAD_CALLS;
use super::environment::{Environment, Heard, Reply, question};
use super::played::{Ended, Played};
use super::reward::{JudgeState, MAX_REWARD, PromptRow};
use crate::config::{ObjectiveConfig, OnFailure};
use crate::data::formats::conversation;
use crate::data::template::ChatTemplate;
use crate::data::tokenizer::Tokenizer;
use crate::generate::calls::{Call, CallForm};
use crate::generate::{Ending, NewText};
use crate::measure::figures::Mean;
use crate::model::decode::Sequence;
use crate::ops::dropout::mix;

/// What episodes are played with.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rules<'a> {
    pub(super) objective: &'a ObjectiveConfig,
    pub(super) tokenizer: &'a Tokenizer,
    pub(super) template: &'a ChatTemplate,
    /// Most tokens of an episode, its prompt among them.
    pub(super) max_length: usize,
    /// Most episodes that are begun and not over.
    pub(super) max_open: usize,
    pub(super) state: JudgeState,
}

/// An episode to play.
#[derive(Clone, Copy, Debug)]
pub(super) struct Start<'a> {
    pub(super) row: &'a PromptRow,
    /// Of the environment's draws: those of the answers to one prompt are alike.
    pub(super) environment_seed: u64,
    /// Of the model's draws.
    pub(super) seed: u64,
}

/// A question to the environment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Question {
    Reset,
    Step,
    Close,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum State {
    /// To be asked.
    Ask(Question),
    Asked(Question, Instant),
    /// The model is to write.
    Ready,
    Writing,
    Over,
}

#[derive(Debug)]
struct Episode<'a> {
    start: Start<'a>,
    id: u64,
    state: State,
    played: Played,
    tools: Option<Value>,
    /// Text and tokens of the answer in the making.
    said: String,
    drawn: Vec<u32>,
    ending: Option<Ending>,
    /// What the model has seen of it.
    seen: Option<Sequence>,
    /// The question during which the environment has ended, with the answers before it, where others were asked beside it.
    suspected: Option<(usize, Question)>,
}

/// A turn for the model.
#[derive(Debug)]
pub(super) struct Turn {
    /// Number of the episode.
    pub(super) id: u64,
    /// Its index.
    pub(super) index: usize,
    pub(super) ids: Vec<u32>,
    pub(super) max_new_tokens: usize,
    pub(super) seed: u64,
    /// Whether special tokens are part of the text, as calls may have some.
    pub(super) special_tokens: bool,
    pub(super) seen: Option<Sequence>,
}

/// An episode that ends the run, and why.
pub(super) type EndsRun = (Option<usize>, String);

/// Episodes that are played together.
#[derive(Debug)]
pub(super) struct Episodes<'a> {
    environment: &'a mut Environment,
    rules: Rules<'a>,
    form: Option<CallForm>,
    all: Vec<Episode<'a>>,
    by_id: HashMap<u64, usize>,
    /// How long nothing could be written, as all waited for the environment.
    pub(super) waited: Duration,
}

impl<'a> Episodes<'a> {
    pub(super) fn new(environment: &'a mut Environment, rules: Rules<'a>, starts: &[Start<'a>]) -> Self {
        let mut by_id = HashMap::new();
        let mut begin = |(index, start): (usize, &Start<'a>)| {
            let id = environment.next_id();
            by_id.insert(id, index);
            Episode::new(*start, id)
        };
        let all = starts.iter().enumerate().map(&mut begin).collect();
        let form = CallForm::of(rules.template, rules.tokenizer);
        Self { environment, rules, form, all, by_id, waited: Duration::ZERO }
    }

    pub(super) fn are_over(&self) -> bool {
        self.all.iter().all(|episode| episode.state == State::Over)
    }

    /// What they have come to.
    pub(super) fn into_played(self) -> Vec<Played> {
        self.all.into_iter().map(|episode| episode.played).collect()
    }

    /// Takes the environment's replies and asks what is to be asked. Where the model has nothing to write it waits a moment.
    ///
    /// # Errors
    /// A failure that ends the run.
    pub(super) fn advance(&mut self, is_writing: bool, is_stopped: &dyn Fn() -> bool) -> Result<(), EndsRun> {
        let start = Instant::now();
        self.ask();
        let is_idle = !is_writing && !self.all.iter().any(|episode| episode.state == State::Ready);
        let mut patience = if is_idle { Duration::MAX } else { Duration::ZERO };
        loop {
            let asked = self.all.iter().filter_map(Episode::asked_at);
            match self.environment.heard(patience, asked.min()) {
                Heard::Nothing => break,
                Heard::Reply(id, reply) => self.take(id, reply)?,
                Heard::Ended(reason) => self.begin_all_again(&reason, is_stopped)?,
            }
            self.ask();
            patience = Duration::ZERO;
        }
        let is_late = |episode: &Episode<'_>| episode.asked_at().is_some_and(|asked| self.environment.is_late(asked));
        let late: Vec<usize> = (0..self.all.len()).filter(|index| is_late(&self.all[*index])).collect();
        for index in late {
            self.fail(index, &self.environment.too_late(), true)?;
        }
        if is_idle {
            self.waited += start.elapsed();
        }
        Ok(())
    }

    /// The next turn of the model.
    pub(super) fn next_turn(&mut self) -> Option<Turn> {
        let index = self.all.iter().position(|episode| episode.state == State::Ready)?;
        let room = self.room(index);
        let episode = &mut self.all[index];
        episode.state = State::Writing;
        let Played { prompt_ids, ids, turns, .. } = &episode.played;
        let seed = episode.start.seed;
        Some(Turn {
            id: episode.id,
            index,
            ids: [&prompt_ids[..], ids].concat(),
            max_new_tokens: room,
            seed: if *turns == 0 { seed } else { mix(seed ^ mix(*turns as u64)) },
            special_tokens: episode.tools.is_some(),
            seen: episode.seen.take(),
        })
    }

    /// Takes what has been written of a turn; breaks it off where the episode has begun anew.
    pub(super) fn take_text(&mut self, id: u64, new: &NewText) -> ControlFlow<()> {
        let Some(episode) = self.by_id.get(&id).map(|index| &mut self.all[*index]) else {
            return ControlFlow::Break(());
        };
        episode.drawn.extend(new.token.or(new.end_token));
        episode.said.push_str(&new.text);
        episode.played.entropy += new.entropy.map(Mean::of).unwrap_or_default();
        episode.ending = new.ending;
        ControlFlow::Continue(())
    }

    /// Reads a finished text as a message, and queues it for the environment.
    pub(super) fn end_turn(&mut self, id: u64, seen: Option<Sequence>) {
        let Some(episode) = self.by_id.get(&id).map(|index| &mut self.all[*index]) else { return };
        let (text, drawn) = (std::mem::take(&mut episode.said), &episode.drawn);
        let played = &mut episode.played;
        played.ids.extend(drawn);
        played.is_drawn.resize(played.ids.len(), true);
        played.turns += 1;
        let read = |tools: &Value| self.form.as_ref().and_then(|form| Some((form, form.read(&text, tools)?)));
        let mut message = json!({"role": "assistant", "content": text});
        played.answer = match episode.tools.as_ref().and_then(read) {
            Some((form, (end, calls))) => {
                let content = form.without_special(&text[..end]);
                message["content"] = content.clone().into();
                message["tool_calls"] = calls.iter().map(|call| numbered(call, &mut played.calls)).collect();
                content
            }
            None => text.clone(),
        };
        played.messages.push(message);
        (episode.state, episode.seen) = (State::Ask(Question::Step), seen);
    }

    /// Tokens that an episode may still have.
    fn room(&self, index: usize) -> usize {
        let Played { prompt_ids, ids, .. } = &self.all[index].played;
        let of_answers = self.rules.objective.max_completion_length;
        of_answers.min(self.rules.max_length.saturating_sub(prompt_ids.len())).saturating_sub(ids.len())
    }

    /// Asks what may be asked now.
    fn ask(&mut self) {
        let is_alone = |episode: &Episode<'_>| match episode.state {
            State::Ask(question) | State::Asked(question, _) => {
                episode.suspected == Some((episode.played.turns, question))
            }
            _ => false,
        };
        let is_asked = |episode: &&Episode<'_>| episode.asked_at().is_some();
        if self.all.iter().filter(is_asked).any(is_alone) {
            return;
        }
        let (mut num_asked, most) = (self.all.iter().filter(is_asked).count(), self.environment.max_parallel());
        let mut num_open = self.all.iter().filter(|episode| episode.is_open()).count();
        for index in 0..self.all.len() {
            let State::Ask(question) = self.all[index].state else { continue };
            let has_room = question != Question::Reset || num_open < self.rules.max_open;
            let alone = is_alone(&self.all[index]);
            if num_asked >= most || !has_room || alone && num_asked > 0 {
                continue;
            }
            let text = self.question(index, question);
            self.environment.tell(&text);
            self.all[index].state = State::Asked(question, Instant::now());
            (num_asked, num_open) = (num_asked + 1, num_open + usize::from(question == Question::Reset));
            if alone {
                return;
            }
        }
    }

    fn question(&self, index: usize, what: Question) -> Value {
        let Episode { id, start, played, drawn, ending, .. } = &self.all[index];
        match what {
            Question::Reset => {
                // What JSON has exactly, everywhere.
                let seed = start.environment_seed >> 11;
                question(*id, "reset", json!({"seed": seed, "row": start.row.value, "state": self.rules.state}))
            }
            Question::Step => {
                let max_turns = self.rules.objective.environment.max_turns;
                let truncated = *ending != Some(Ending::EndOfText);
                let step = json!({"turn": played.turns, "max_turns": max_turns, "message": played.messages.last(), "ids": drawn,
                                  "truncated": truncated});
                question(*id, "step", step)
            }
            Question::Close => question(*id, "close", json!({"ended": played.ended.word()})),
        }
    }

    /// Takes a reply; one to nothing that was asked is let go.
    fn take(&mut self, id: u64, reply: Reply) -> Result<(), EndsRun> {
        let Some(&index) = self.by_id.get(&id) else { return Ok(()) };
        let State::Asked(question, _) = self.all[index].state else { return Ok(()) };
        if let Some(reason) = &reply.failed {
            return self.fail(index, reason, reply.retry.unwrap_or(true));
        }
        let played = &mut self.all[index].played;
        if let Some(reward) = reply.reward {
            let sum = played.reward.unwrap_or(0.0) + reward;
            if sum.abs() > MAX_REWARD {
                return self.fail(index, &format!("a reward of {sum:e} is beyond {MAX_REWARD:e}"), false);
            }
            played.reward = Some(sum);
        }
        played.failed_calls += reply.failed_calls;
        played.metrics.extend(reply.metrics);
        match question {
            Question::Reset => self.begin(index, &reply.observation),
            Question::Step => self.go_on(index, &reply.observation, reply.done),
            Question::Close => {
                self.over(index);
                Ok(())
            }
        }
    }

    /// The prompt of an episode: that of its row, and what the environment shows.
    fn begin(&mut self, index: usize, observation: &Value) -> Result<(), EndsRun> {
        let Rules { tokenizer, template, .. } = self.rules;
        let row = self.all[index].start.row;
        let mut messages = row.prompt.as_array().cloned().unwrap_or_default();
        match (observation, messages.last_mut()) {
            // As TRL has it.
            (Value::String(more), Some(Value::Object(last))) if last["content"].is_string() => {
                let text = format!("{}{more}", last["content"].as_str().unwrap_or_default());
                last.insert("content".into(), text.into());
            }
            _ => match replies(observation) {
                Ok(more) => messages.extend(more),
                Err(reason) => return self.fail(index, &reason, false),
            },
        }
        let tools = self.environment.tools(row.tools.as_ref());
        if tools.is_some() && self.form.is_none() {
            return Err((Some(index), UNREAD_CALLS.into()));
        }
        let ids = conversation(&messages, tools.as_ref(), None, (template, false)).and_then(|(messages, tools)| {
            let text = template.render_prompt(&messages, tools.as_ref()).map_err(|error| error.to_string())?;
            let ids = tokenizer.encode(&text, false).map_err(|error| error.to_string())?;
            Ok((ids, messages, tools))
        });
        let (prompt_ids, prompt, tools) = ids.map_err(|reason| (Some(index), reason))?;
        let episode = &mut self.all[index];
        (episode.played.prompt, episode.played.prompt_ids, episode.tools) = (prompt, prompt_ids, tools);
        episode.state = State::Ready;
        if self.room(index) == 0 {
            let (length, most) = (self.all[index].played.prompt_ids.len(), self.rules.max_length);
            let reason = format!("its prompt has {length} tokens, with tools, and `data.max_length` is {most}");
            return self.fail(index, &reason, false);
        }
        Ok(())
    }

    /// Goes on behind an answer, or ends the episode.
    fn go_on(&mut self, index: usize, observation: &Value, is_done: bool) -> Result<(), EndsRun> {
        let Rules { tokenizer, template, objective, .. } = self.rules;
        let replies = match replies(observation) {
            Ok(replies) => replies,
            Err(reason) => return self.fail(index, &reason, false),
        };
        let Episode { played, ending, tools, .. } = &self.all[index];
        let ended = match ending {
            Some(Ending::EndOfText) if is_done || replies.is_empty() => Some(Ended::Done),
            Some(Ending::EndOfText) => (played.turns >= objective.environment.max_turns).then_some(Ended::Turns),
            _ => Some(Ended::Length),
        };
        if let Some(ended) = ended {
            self.end(index, ended);
            return Ok(());
        }
        let calls = played.messages.last().and_then(|last| last["tool_calls"].as_array()).cloned().unwrap_or_default();
        let between = match template.between(&calls, &replies, tools.as_ref(), tokenizer) {
            Ok(between) => between,
            Err(error) => return self.fail(index, &error.to_string(), false),
        };
        // As in TRL, what does not fit is left out.
        if between.len() >= self.room(index) {
            self.end(index, Ended::Length);
            return Ok(());
        }
        let Episode { played, drawn, state, .. } = &mut self.all[index];
        played.ids.extend(between);
        played.is_drawn.resize(played.ids.len(), false);
        played.messages.extend(replies);
        drawn.clear();
        *state = State::Ready;
        Ok(())
    }

    fn end(&mut self, index: usize, ended: Ended) {
        self.all[index].played.ended = ended;
        if self.environment.hello().is_some_and(|hello| hello.scores_at_close) {
            self.all[index].state = State::Ask(Question::Close);
        } else {
            let close = self.question(index, Question::Close);
            self.environment.tell(&close);
            self.over(index);
        }
    }

    fn over(&mut self, index: usize) {
        let episode = &mut self.all[index];
        (episode.state, episode.seen) = (State::Over, None);
        self.by_id.remove(&episode.id);
    }

    /// The environment has failed in an episode, which begins anew if it may.
    fn fail(&mut self, index: usize, reason: &str, may_begin: bool) -> Result<(), EndsRun> {
        let config = self.environment.config();
        let (begins, on_failure) = (may_begin && self.all[index].played.retries < config.retries, config.on_failure);
        self.all[index].played.ended = Ended::Failed;
        let close = self.question(index, Question::Close);
        self.environment.tell(&close);
        let then = if begins { "it begins anew" } else { "it has failed" };
        let (step, turn) = (self.rules.state.global_step + 1, self.all[index].played.turns);
        self.environment.note(format_args!("step {step}, episode {index}, turn {turn}: {reason}; {then}"));
        if begins {
            self.all[index].played.retries += 1;
            self.begin_again(index);
        } else if on_failure == OnFailure::Stop {
            return Err((Some(index), format!("its environment has failed: {reason}")));
        } else {
            self.all[index].played.failure = Some(reason.to_owned());
            self.over(index);
        }
        Ok(())
    }

    /// The environment has ended. One that was asked alone has failed; who else was asked, is asked alone where it may have been the
    /// reason.
    fn begin_all_again(&mut self, reason: &str, is_stopped: &dyn Fn() -> bool) -> Result<(), EndsRun> {
        let asked: Vec<usize> = (0..self.all.len()).filter(|index| self.all[*index].asked_at().is_some()).collect();
        if let [one] = asked[..] {
            self.fail(one, reason, true)?;
        } else {
            self.environment.note(format_args!("{reason}; all episodes begin anew"));
        }
        for index in 0..self.all.len() {
            let episode = &mut self.all[index];
            if let State::Asked(question, _) = episode.state {
                episode.suspected = Some((episode.played.turns, question));
            }
            if episode.is_open() {
                self.begin_again(index);
            }
        }
        self.environment.start_again(reason, is_stopped).map_err(|reason| (None, reason))
    }

    fn begin_again(&mut self, index: usize) {
        let Episode { start, id, played: Played { retries, .. }, suspected, .. } = self.all[index];
        self.by_id.remove(&id);
        let id = self.environment.next_id();
        self.by_id.insert(id, index);
        let new = Episode::new(start, id);
        self.all[index] = Episode { suspected, played: Played { retries, ..Played::default() }, ..new };
    }
}

impl<'a> Episode<'a> {
    fn new(start: Start<'a>, id: u64) -> Self {
        Self {
            start,
            id,
            state: State::Ask(Question::Reset),
            played: Played::default(),
            tools: None,
            said: String::new(),
            drawn: Vec::new(),
            ending: None,
            seen: None,
            suspected: None,
        }
    }

    fn asked_at(&self) -> Option<Instant> {
        if let State::Asked(_, at) = self.state { Some(at) } else { None }
    }

    /// Whether it is begun and not over.
    fn is_open(&self) -> bool {
        !matches!(self.state, State::Over | State::Ask(Question::Reset))
    }
}

/// The messages of an observation; text is one of the user.
fn replies(observation: &Value) -> Result<Vec<Value>, String> {
    match observation {
        Value::Null => Ok(Vec::new()),
        Value::String(text) if text.is_empty() => Ok(Vec::new()),
        Value::String(text) => Ok(vec![json!({"role": "user", "content": text})]),
        Value::Array(messages) if messages.iter().all(Value::is_object) => Ok(messages.clone()),
        other => Err(format!(
            "its observation is neither text nor messages: {}",
            other.to_string().chars().take(60).collect::<String>()
        )),
    }
}

/// A call as a message has it, with the next number as its id.
fn numbered(call: &Call, num_calls: &mut usize) -> Value {
    let id = format!("call{num_calls:05}");
    *num_calls += 1;
    json!({"id": id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}})
}

#[cfg(test)]
mod tests;
