//! The queue of requests: they are written together, and each gets its text as it is written.

use std::collections::HashMap;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, TryRecvError};

use tokio::sync::mpsc::UnboundedSender;
use tokio::sync::oneshot;

use super::sight::Sight;
use crate::commands::named::OpenedModel;
use crate::data::template::Stops;
use crate::generate::{GenerateError, GenerateOptions, Grammar, NewText, TextBatch, TextRequest};
use crate::images::Image;
use crate::util::failure::Failure;

/// What a text has got: its place among the prompts of its request, and what is new.
pub(super) type NewOf = (usize, Result<NewText, GenerateError>);

/// A text to write, and who gets it.
#[derive(Debug)]
pub(super) struct TextJob {
    pub(super) adapter: usize,
    pub(super) prompt_ids: Vec<u32>,
    pub(super) images: Vec<Arc<Image>>,
    pub(super) options: GenerateOptions,
    pub(super) stop: Vec<String>,
    pub(super) top_logprobs: Option<usize>,
    pub(super) special_tokens: bool,
    pub(super) grammar: Option<Grammar>,
    /// Its place among the prompts of its request.
    pub(super) index: usize,
    pub(super) events: UnboundedSender<NewOf>,
}

/// Who gets a text that is being written.
struct Reader {
    /// The place of the text among the prompts of its request.
    index: usize,
    events: UnboundedSender<NewOf>,
    /// Those in the prompt, so that they are not forgotten.
    _images: Vec<Arc<Image>>,
}

/// Texts to score, as tokens, and who gets the scores.
#[derive(Debug)]
pub(super) struct ToScore {
    pub(super) adapter: usize,
    pub(super) texts: Vec<Vec<u32>>,
    pub(super) reply: oneshot::Sender<Vec<f32>>,
}

/// What the model is to do.
#[derive(Debug)]
pub(super) enum Work {
    Write(TextJob),
    Score(ToScore),
}

/// Writes and scores texts until nobody can ask for one any more. A text whose reader has gone is dropped.
pub(super) fn write_texts(
    opened: &OpenedModel,
    stops: &[Stops],
    sight: Option<&Sight>,
    queue: &Receiver<Work>,
) -> Result<(), Failure> {
    let mut batch = TextBatch::new(&opened.model, &opened.tokenizer).within(opened.text_bytes);
    let (mut readers, mut tower) = (HashMap::new(), None);
    for id in 0.. {
        match next_job(queue, &batch) {
            Ok(Work::Score(ToScore { adapter, texts, reply })) => {
                let adapters = &opened.adapters[adapter].set;
                let scores = texts.iter().filter_map(|ids| opened.model.score(ids, adapters)).collect();
                // Where nobody listens, nobody has to know.
                drop(reply.send(scores));
            }
            Ok(Work::Write(job)) => {
                let TextJob {
                    adapter,
                    prompt_ids,
                    images,
                    options,
                    stop,
                    top_logprobs,
                    special_tokens,
                    grammar,
                    index,
                    events,
                } = job;
                let (adapters, stop_ids) = (&opened.adapters[adapter].set, &stops[adapter].ids);
                let request = TextRequest {
                    prompt_ids,
                    adapters,
                    options,
                    stop_ids,
                    stop,
                    top_logprobs,
                    special_tokens,
                    grammar,
                };
                let seen = sight.map_or(Ok(()), |sight| sight.see(&images, &mut tower, opened));
                readers.insert(id, Reader { index, events, _images: images });
                let added = seen.and_then(|()| batch.add(id, request, |id, text| pass_on(&mut readers, id, text)));
                if let Err(error) = added
                    && let Some(Reader { index, events, .. }) = readers.remove(&id)
                {
                    // Where nobody listens, nobody has to know.
                    drop(events.send((index, Err(error))));
                }
            }
            Err(TryRecvError::Empty) => {
                batch.step(|id, text| pass_on(&mut readers, id, text)).map_err(Failure::running)?;
            }
            Err(TryRecvError::Disconnected) => break,
        }
    }
    Ok(())
}

/// The next request to begin; waits for a request if there is nothing else to do.
fn next_job(queue: &Receiver<Work>, batch: &TextBatch<'_>) -> Result<Work, TryRecvError> {
    if batch.is_empty() {
        queue.recv().map_err(|_| TryRecvError::Disconnected)
    } else if batch.has_room() {
        queue.try_recv().map_err(|_| TryRecvError::Empty)
    } else {
        Err(TryRecvError::Empty)
    }
}

/// Sends new text to its reader; breaks it off where nobody reads.
fn pass_on(readers: &mut HashMap<u64, Reader>, id: u64, text: NewText) -> ControlFlow<()> {
    let has_ended = text.ending.is_some();
    let is_read = readers.get(&id).is_some_and(|reader| reader.events.send((reader.index, Ok(text))).is_ok());
    if has_ended || !is_read {
        readers.remove(&id);
    }
    if is_read { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
}
