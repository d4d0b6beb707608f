//! Answers in the making: texts, or episodes with an environment.

use std::ops::ControlFlow;
use std::time::Duration;

use super::episodes::{Episodes, Rules, Start, Turn};
use super::played::{Ended, Played};
use super::reward::PromptRow;
use super::{Draw, RolloutError, Rollouts};
use crate::data::batch::{Batch, RowSource};
use crate::data::dataset::Dataset;
use crate::generate::{Ending, GenerateError, GenerateOptions, NewText, TextBatch, TextRequest};
use crate::lora::AdapterSet;
use crate::measure::figures::Mean;
use crate::ops::cpu::MOST_TEXTS;
use crate::ops::dropout::mix;
use crate::train::step::TrainStep;

/// An answer in the making.
#[derive(Clone, Debug, Default)]
pub(super) struct WrittenAnswer {
    pub(super) source: RowSource,
    /// Tokens behind the prompt, those of replies among them.
    pub(super) ids: Vec<u32>,
    pub(super) text: String,
    pub(super) ending: Option<Ending>,
    /// Of its tokens.
    pub(super) entropy: Mean,
    /// Its turns, where it has several.
    pub(super) played: Option<Box<Played>>,
}

/// Answers, those to one prompt after another.
#[derive(Debug, Default)]
pub(super) struct Written {
    pub(super) answers: Vec<WrittenAnswer>,
    /// How long nothing could be written, as all waited for the environment.
    pub(super) waited: Option<Duration>,
}

/// Where an answer comes from, and how it is drawn.
#[derive(Clone, Copy, Debug)]
struct Asked<'a> {
    prompts: &'a Batch,
    draw: Draw,
    /// Its index among the answers of the micro-batch, and that of its prompt.
    index: usize,
    prompt: usize,
}

impl Asked<'_> {
    fn source(&self) -> RowSource {
        self.prompts.sources[self.prompt]
    }

    fn prompt_ids(&self) -> &[u32] {
        let document = self.prompts.documents[self.prompt];
        &self.prompts.input_ids[document.start..][..document.len]
    }

    fn adapters<'s>(&self, step: &'s TrainStep) -> &'s AdapterSet {
        match self.draw {
            Draw::Training(_) => step.trained_adapters(),
            Draw::Evaluation(_) => step.adapters(),
        }
    }

    /// A seed of the `number`th draws of this micro-batch.
    fn seed(&self, seed: u64, number: u64) -> u64 {
        let of_batch = match self.draw {
            Draw::Training(number) => number,
            // From the other end: no answer is drawn as one in training.
            Draw::Evaluation(number) => u64::MAX - number,
        };
        mix(seed ^ mix(of_batch) ^ mix(number))
    }
}

impl WrittenAnswer {
    /// Whether it did not end by itself.
    pub(super) fn is_clipped(&self) -> bool {
        self.ending != Some(Ending::EndOfText)
    }

    /// How it has ended.
    pub(super) fn ending_word(&self) -> &'static str {
        match self.played.as_ref().map(|played| played.ended) {
            Some(ended @ (Ended::Turns | Ended::Failed)) => ended.word(),
            _ if self.is_clipped() => "length",
            _ => "stop",
        }
    }

    /// Why its environment has failed, if it has.
    pub(super) fn failure(&self) -> Option<&str> {
        self.played.as_ref().and_then(|played| played.failure.as_deref())
    }

    /// Which of its tokens the model has drawn: all, but those of replies.
    pub(super) fn is_drawn(&self, at: usize) -> bool {
        self.played.as_ref().is_none_or(|played| played.is_drawn[at])
    }

    /// Number of tokens that the model has drawn.
    pub(super) fn num_drawn(&self) -> usize {
        (0..self.ids.len()).filter(|at| self.is_drawn(*at)).count()
    }

    /// The last text of the model.
    pub(super) fn answer(&self) -> &str {
        self.played.as_ref().map_or(&self.text, |played| &played.answer)
    }
}

impl Rollouts {
    /// Writes the answers. `None` where it was stopped.
    pub(super) fn write(
        &mut self,
        step: &TrainStep,
        data: &Dataset,
        prompts: &[(Draw, Batch)],
        is_stopped: &dyn Fn() -> bool,
    ) -> Result<Option<Written>, RolloutError> {
        let of_prompts = |(draw, prompts): &'_ (Draw, Batch)| {
            let size = self.num_answers(*draw);
            (0..prompts.documents.len() * size).map(|index| (*draw, index, index / size)).collect::<Vec<_>>()
        };
        let asked = prompts.iter().flat_map(|of| {
            let asked = |(draw, index, prompt)| Asked { prompts: &of.1, draw, index, prompt };
            of_prompts(of).into_iter().map(asked)
        });
        let asked: Vec<Asked<'_>> = asked.collect();
        if self.environment.is_some() {
            return self.play(step, data, &asked, is_stopped);
        }
        let answers = self.write_texts(step, data, &asked, is_stopped)?;
        Ok(answers.map(|answers| Written { answers, waited: None }))
    }

    fn options(&self, max_new_tokens: usize, seed: u64) -> GenerateOptions {
        let temperature = self.objective.temperature;
        let (top_p, top_k, min_p) = (self.objective.top_p, self.objective.top_k, self.objective.min_p);
        GenerateOptions { max_new_tokens, temperature, top_p, top_k, min_p, seed }
    }

    fn write_texts(
        &self,
        step: &TrainStep,
        data: &Dataset,
        asked: &[Asked<'_>],
        is_stopped: &dyn Fn() -> bool,
    ) -> Result<Option<Vec<WrittenAnswer>>, GenerateError> {
        let empty = |asked: &Asked<'_>| WrittenAnswer { source: asked.source(), ..WrittenAnswer::default() };
        let mut written: Vec<_> = asked.iter().map(empty).collect();
        let mut on_text = |id: u64, new: NewText| {
            if let Some(written) = usize::try_from(id).ok().and_then(|id| written.get_mut(id)) {
                written.ids.extend(new.token.or(new.end_token));
                written.text.push_str(&new.text);
                written.entropy += new.entropy.map(Mean::of).unwrap_or_default();
                written.ending = new.ending;
            }
            ControlFlow::Continue(())
        };
        // The answers to a prompt share what the model has computed of it. Their memory is a part of the plan.
        let mut texts = TextBatch::new(step.model(), data.tokenizer()).of_equal_starts().within(Some(u64::MAX));
        let stops = data.stops();
        let mut next = (0..).zip(asked).peekable();
        while next.peek().is_some() || !texts.is_empty() {
            while let Some((id, asked)) = next.next_if(|_| texts.has_room()) {
                let prompt_ids = asked.prompt_ids().to_vec();
                let room = self.max_length.saturating_sub(prompt_ids.len()).max(1);
                let seed = asked.seed(self.seed, asked.index as u64 + 1);
                let options = self.options(self.objective.max_completion_length.min(room), seed);
                let request = TextRequest::new(prompt_ids, asked.adapters(step), options, &stops);
                texts.add(id, request, &mut on_text)?;
            }
            if is_stopped() {
                return Ok(None);
            }
            texts.step(&mut on_text)?;
        }
        Ok(Some(written))
    }

    /// Plays episodes: while some wait for the environment, others are written.
    fn play(
        &mut self,
        step: &TrainStep,
        data: &Dataset,
        asked: &[Asked<'_>],
        is_stopped: &dyn Fn() -> bool,
    ) -> Result<Option<Written>, RolloutError> {
        let Some((mut environment, template)) = self.environment.take().zip(data.template()) else { return Ok(None) };
        let rules = Rules {
            objective: &self.objective,
            tokenizer: data.tokenizer(),
            template,
            max_length: self.max_length,
            // What the model has seen of those that wait is kept.
            max_open: 2 * MOST_TEXTS,
            state: self.state,
        };
        let none = PromptRow::default();
        let start = |asked: &Asked<'_>| Start {
            row: self.rows.get(&asked.source()).unwrap_or(&none),
            environment_seed: asked.seed(self.seed, u64::MAX - asked.prompt as u64),
            seed: asked.seed(self.seed, asked.index as u64 + 1),
        };
        let starts: Vec<Start<'_>> = asked.iter().map(start).collect();
        let mut episodes = Episodes::new(&mut environment, rules, &starts);
        let ended = self.play_all(&mut episodes, (step, data), asked, is_stopped);
        let (waited, played) = (episodes.waited, episodes.into_played());
        self.environment = Some(environment);
        if is_stopped() || !ended? {
            return Ok(None);
        }
        let mut answers = Vec::with_capacity(played.len());
        for (played, asked) in played.into_iter().zip(asked) {
            let ending = if played.ended == Ended::Length { Ending::MaxNewTokens } else { Ending::EndOfText };
            // What a tokenizer cannot decode it has not encoded.
            let text = data.tokenizer().decode(&played.ids, true).unwrap_or_default();
            let (source, ids, entropy) = (asked.source(), played.ids.clone(), played.entropy);
            let (ending, played) = (Some(ending), Some(Box::new(played)));
            answers.push(WrittenAnswer { source, ids, text, ending, entropy, played });
        }
        Ok(Some(Written { answers, waited: Some(waited) }))
    }

    /// `false` where it was stopped.
    fn play_all(
        &self,
        episodes: &mut Episodes<'_>,
        (step, data): (&TrainStep, &Dataset),
        asked: &[Asked<'_>],
        is_stopped: &dyn Fn() -> bool,
    ) -> Result<bool, RolloutError> {
        let mut texts =
            TextBatch::new(step.model(), data.tokenizer()).of_equal_starts().of_turns().within(Some(u64::MAX));
        let stops = data.stops();
        while !episodes.are_over() {
            let advanced = episodes.advance(!texts.is_empty(), is_stopped);
            if is_stopped() {
                return Ok(false);
            }
            advanced.map_err(|(index, reason)| match index {
                Some(index) => {
                    let RowSource { file, row } = asked[index].source();
                    RolloutError::Reward { path: data.files()[file].path.clone(), row, reason }
                }
                None => RolloutError::Judge(reason),
            })?;
            let mut on_text = |id: u64, new: NewText| episodes.take_text(id, &new);
            texts.step(&mut on_text)?;
            while texts.has_room()
                && let Some(turn) = episodes.next_turn()
            {
                let Turn { id, index, ids, max_new_tokens, seed, special_tokens, seen } = turn;
                let options = self.options(max_new_tokens, seed);
                let request = TextRequest::new(ids, asked[index].adapters(step), options, &stops);
                let request = TextRequest { special_tokens, ..request };
                texts.go_on(id, request, seen, |id, new| episodes.take_text(id, &new))?;
            }
            for (id, seen) in texts.take_ended() {
                episodes.end_turn(id, Some(seen));
            }
        }
        Ok(true)
    }
}
