//! Turns samples into tokens: rendering, masking, tokenising, truncation.

use std::collections::BTreeSet;
use std::ops::Range;

use serde_json::Value;

use super::error::DataError;
use super::formats::{Prompt, Sample};
use super::template::{ChatTemplate, Rendered, TemplateError};
use super::tokenizer::{Token, Tokenizer, TokenizerError};
use crate::images::Images;

mod images;
mod row;

pub(crate) use images::{InText, taken_out};
pub use row::EncodedRow;

const NO_TEMPLATE: &str = "a conversation needs a chat template and the model has none\n  hint: set `data.chat_template` to a \
                           Jinja file";

/// Why a conversation carries no loss.
pub(super) const NO_ANSWER: &str = "no message is an answer of the assistant";

const IMAGE_ALONE: &str = "answers with an image and no text, and images carry no loss\n  hint: models write text: add what is to be \
                           answered, or show the image in a message of the user";

/// What is unusual about a row but not wrong.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Notes {
    /// What is empty, or why nothing carries loss: for the user, one sentence each.
    pub empty: Vec<String>,
    /// Whatever else, one sentence each.
    pub odd: Vec<String>,
    /// Keys of messages that the template does not read.
    pub unread: BTreeSet<String>,
    /// Letters beyond ASCII, the tokens that stand for them or for parts of them, and all tokens.
    pub(super) letters: [u64; 3],
}

/// Turns samples into tokens, with the settings that all rows share.
///
/// A text is tokenised once, as a whole, so that training sees the ids that the model sees in use. Each token stands
/// for a range of bytes: **a token carries loss if any of its bytes are part of an answer**. A token that is half
/// prompt and half answer therefore carries loss.
#[derive(Debug)]
pub struct Encoder<'a> {
    /// The model's tokenizer.
    pub tokenizer: &'a Tokenizer,
    /// The chat template for conversations.
    pub template: Option<&'a ChatTemplate>,
    /// Whether every token carries loss.
    pub train_on_inputs: bool,
    /// Whether not answers are marked, but the ends of sequences, where a score is read.
    pub scores: bool,
    /// What reads the images of conversations; absent: there may be none.
    pub images: Option<&'a Images>,
}

/// Renders a conversation and finds what carries loss in it.
type Render = fn(&ChatTemplate, &[Value], Option<&Value>) -> Result<Rendered, TemplateError>;

impl Encoder<'_> {
    /// All tokens of a sample, untruncated.
    ///
    /// - A conversation is rendered by the chat template and tokenised with nothing added: the template writes BOS
    ///   itself. The assistant's messages carry loss, including what ends their turn: also where a last answer lacks it. Or
    ///   what the template marks as generated does; in preference data, always the messages.
    /// - A prompt and its completion are joined as they are and tokenised together. BOS goes in front where the
    ///   tokenizer adds it, EOS goes behind; the completion and EOS carry loss.
    /// - A text gets BOS and EOS in the same way; all of it carries loss.
    ///
    /// A BOS or EOS that the text already has is not doubled. An empty answer carries no loss.
    ///
    /// # Errors
    /// A conversation without a template; an error of the template or the tokenizer.
    pub fn encode(&self, sample: &Sample) -> Result<EncodedRow, DataError> {
        self.encode_with_notes(sample).map(|(row, _)| row)
    }

    /// As [`encode`](Self::encode), with notes.
    ///
    /// # Errors
    /// As [`encode`](Self::encode).
    pub fn encode_with_notes(&self, sample: &Sample) -> Result<(EncodedRow, Notes), DataError> {
        let (row, mut notes) = self.encode_by(ChatTemplate::render_with_marks, sample)?;
        // The prompt of a pair may be what its answers have in common, which ends anywhere.
        let whole: &Sample = if let Sample::Labelled(answered, _) = sample { answered } else { sample };
        if let Sample::Completion { prompt, completion } = whole {
            notes.odd.extend(run_together(prompt, completion));
        }
        Ok((row, notes))
    }

    fn encode_by(&self, with_answers: Render, sample: &Sample) -> Result<(EncodedRow, Notes), DataError> {
        let mut notes = Notes::default();
        let (tokens, answers) = match sample {
            Sample::Pair(chosen, rejected, margin) => {
                let (pair, notes) = self.encode_pair(chosen, rejected)?;
                return Ok((EncodedRow { margin: *margin, ..pair }, notes));
            }
            Sample::Prompt(prompt) => return Ok((self.encode_prompt(prompt)?, notes)),
            Sample::Labelled(sample, is_good) => {
                let (row, notes) = self.encode_by(ChatTemplate::render_with_answers, sample)?;
                return Ok((EncodedRow { is_bad_answer: !is_good, ..row }, notes));
            }
            Sample::Chat { messages, tools } => return self.encode_chat(with_answers, messages, tools.as_ref()),
            Sample::Completion { prompt, completion } => {
                let text = format!("{prompt}{completion}");
                // One byte more than the text, for EOS.
                let answer = prompt.len()..text.len() + 1;
                let answers = if completion.is_empty() { vec![] } else { vec![answer] };
                if prompt.is_empty() {
                    notes.empty.push("the prompt is empty".to_owned());
                }
                if completion.is_empty() && !self.train_on_inputs {
                    notes.empty.push("the completion is empty".to_owned());
                }
                let tokens = self.with_special_tokens(&text)?;
                notes.letters = letters(&text, &tokens);
                (tokens, answers)
            }
            Sample::Text(text) => {
                let everything = 0..text.len() + 1;
                let tokens = self.with_special_tokens(text)?;
                notes.letters = letters(text, &tokens);
                (tokens, vec![everything])
            }
        };
        Ok((self.row(&tokens, &answers), notes))
    }

    /// A row of tokens, of which those in these parts of the text are answers.
    fn row(&self, tokens: &[Token], answers: &[Range<usize>]) -> EncodedRow {
        let carries_loss = loss_mask(tokens, answers, self.train_on_inputs);
        EncodedRow::of_parts(tokens.iter().map(|token| token.id).collect(), carries_loss)
    }

    fn encode_chat(
        &self,
        with_answers: Render,
        given: &[Value],
        tools: Option<&Value>,
    ) -> Result<(EncodedRow, Notes), DataError> {
        let template = self.template.ok_or_else(|| DataError::Config(NO_TEMPLATE.to_owned()))?;
        let (messages, mut in_text) = taken_out(self.images, given)?;
        let messages = &messages[..];
        let Rendered { mut text, mut answers, unwritten_end, empty_answer, unread } = if self.train_on_inputs {
            refuse_masks(messages)?;
            template.render_traced(messages, tools)?
        } else {
            with_answers(template, messages, tools)?
        };
        let is_answer = |message: &Value| message["role"] == "assistant";
        let empty = empty_answer.map(|index| {
            let mut parts = messages[index]["content"].as_array().into_iter().flatten();
            let what = if parts.any(|part| part["type"] == "image") { IMAGE_ALONE } else { "is an empty answer" };
            format!("message {} {what}", index + 1)
        });
        let without_loss = || {
            let is_asked = messages.iter().any(is_answer);
            if is_asked { "all answers have weight 0".to_owned() } else { NO_ANSWER.to_owned() }
        };
        let empty = empty.or_else(|| answers.is_empty().then(without_loss)).filter(|_| !self.train_on_inputs);
        // A score is read behind what the template writes.
        if let Some(end) = unwritten_end.filter(|_| !self.scores) {
            answers.push(text.len()..text.len() + end.len());
            text.push_str(&end);
        }
        let special = template.special_token_in(messages).map(|(index, token)| {
            format!("message {} has {token:?} in its text, which becomes the special token", index + 1)
        });
        let is_blank = |message: &Value| message["role"] == "user" && message["content"] == "";
        let blank = messages.iter().position(is_blank).map(|index| format!("message {} is empty", index + 1));
        let is_open = !self.train_on_inputs && messages.last().is_some_and(|message| message["role"] == "user");
        let open = is_open.then(|| "it ends with a message of the user, which nothing answers".to_owned());
        let empty = blank.into_iter().chain(empty).collect();
        in_text.write(self.images, &mut text, &mut answers)?;
        let tokens = self.tokenizer.encode_tokens(&text, false)?;
        let odd = special.into_iter().chain(open).collect();
        let notes = Notes { empty, odd, unread, letters: letters(&text, &tokens) };
        let mut carries_loss = loss_mask(&tokens, &answers, self.train_on_inputs);
        let ids = in_text.number(self.images, &tokens, &mut carries_loss)?;
        Ok((EncodedRow::of_parts(ids, carries_loss), notes))
    }

    /// A prompt up to where the answer starts. Its last token is marked: behind it, the answer carries loss.
    fn encode_prompt(&self, prompt: &Prompt) -> Result<EncodedRow, DataError> {
        let ids = match prompt {
            Prompt::Text(text) => self.tokenizer.encode(text, true)?,
            Prompt::Chat { messages, tools } => {
                let template = self.template.ok_or_else(|| DataError::Config(NO_TEMPLATE.to_owned()))?;
                let (messages, in_text) = taken_out(self.images, messages)?;
                let text = template.render_prompt(&messages, tools.as_ref())?;
                in_text.prompt_ids(self.images, self.tokenizer, text)?
            }
        };
        if ids.len() < 2 {
            return Err(DataError::Config("the prompt is empty".into()));
        }
        let carries_loss = (1..=ids.len()).map(|at| at == ids.len()).collect();
        Ok(EncodedRow::of_parts(ids, carries_loss))
    }

    /// The sequences of two answers, which differ and both carry loss. They begin at the same token: where the last of the
    /// prompt is merged with the start of one answer, it carries loss before the other, too.
    fn encode_pair(&self, chosen: &Sample, rejected: &Sample) -> Result<(EncodedRow, Notes), DataError> {
        let (mut chosen, mut notes) = self.encode_by(ChatTemplate::render_with_answers, chosen)?;
        let (mut rejected, more) = self.encode_by(ChatTemplate::render_with_answers, rejected)?;
        let empty = |name: &str| {
            DataError::Config(format!("`{name}` has nothing of its own behind the prompt: there is nothing to compare"))
        };
        let first = chosen.first_target().ok_or_else(|| empty("chosen"))?;
        let first = first.min(rejected.first_target().ok_or_else(|| empty("rejected"))?);
        if chosen.ids[..first] == rejected.ids[..first] {
            chosen.begin_loss_at(first);
            rejected.begin_loss_at(first);
        }
        if chosen.ids == rejected.ids {
            return Err(DataError::Config("`chosen` and `rejected` are the same tokens".into()));
        }
        for (notes, more) in [(&mut notes.empty, more.empty), (&mut notes.odd, more.odd)] {
            more.into_iter().for_each(|note| {
                if !notes.contains(&note) {
                    notes.push(note);
                }
            });
        }
        notes.unread.extend(more.unread);
        notes.letters.iter_mut().zip(more.letters).for_each(|(sum, count)| *sum += count);
        let pair = EncodedRow::pair(chosen, rejected);
        Ok((if self.scores { pair.marked_at_ends() } else { pair }, notes))
    }

    /// Tokens of `text` with one BOS in front, if the tokenizer adds one, and one EOS behind.
    fn with_special_tokens(&self, text: &str) -> Result<Vec<Token>, TokenizerError> {
        let mut tokens = self.tokenizer.encode_tokens(text, true)?;
        if let Some(bos) = self.tokenizer.bos()
            && tokens.len() >= 2
            && tokens[..2].iter().all(|token| token.id == bos.id)
        {
            tokens.remove(0);
        }
        if let Some(eos) = self.tokenizer.eos()
            && tokens.last().is_none_or(|token| token.id != eos.id)
        {
            tokens.push(Token::behind(eos.id, text.len()));
        }
        Ok(tokens)
    }
}

/// Says that words of a prompt and its completion become one, since nothing is put between them. Of scripts that separate
/// words by spaces.
fn run_together(prompt: &str, completion: &str) -> Option<String> {
    let is_of_word = |c: char| c.is_alphanumeric() && c < '\u{e00}';
    let is_end = |c: char| is_of_word(c) || matches!(c, '.' | ',' | ';' | '?' | '!');
    let is_joined = prompt.chars().next_back().is_some_and(is_end) && completion.chars().next().is_some_and(is_of_word);
    let is_shown = |c: &char| !c.is_whitespace() && !matches!(c, '"' | '`');
    let before: Vec<char> = prompt.chars().rev().take_while(is_shown).take(12).collect();
    let before = before.into_iter().rev();
    let joined: String = before.chain(completion.chars().take_while(is_shown).take(12)).collect();
    is_joined.then(|| {
        format!("prompt and completion run together, \"{joined}\": neither has a blank or line end where they meet")
    })
}

/// Letters of a text beyond ASCII, its tokens that stand for them or for parts of them, and all its tokens.
fn letters(text: &str, tokens: &[Token]) -> [u64; 3] {
    let is_letter = |c: char| !c.is_ascii() && c.is_alphabetic();
    let has_letter = |token: &&Token| text.get(token.start..token.end).is_some_and(|part| part.contains(is_letter));
    let letters = if text.is_ascii() { 0 } else { text.chars().filter(|c| is_letter(*c)).count() };
    let of_letters = if letters == 0 { 0 } else { tokens.iter().filter(has_letter).count() };
    [letters, of_letters, tokens.len()].map(|count| count as u64)
}

/// Refuses a conversation with a loss mask where every token carries loss.
fn refuse_masks(messages: &[Value]) -> Result<(), DataError> {
    let is_masked = |message: &Value| message["weight"] == 0 || !message["train_detail"].is_null();
    messages.iter().position(is_masked).map_or(Ok(()), |index| {
        Err(DataError::Config(format!(
            "message {} is to carry no loss, and `data.train_on_inputs` = true puts loss on every token\n  hint: keep one \
             of the two",
            index + 1
        )))
    })
}

/// Whether each token carries loss, that is, shares a byte with one of `answers` (ascending).
fn loss_mask(tokens: &[Token], answers: &[Range<usize>], everything: bool) -> Vec<bool> {
    let mut answers = answers.iter().peekable();
    let carries_loss = |token: &Token| {
        // The range of a token made only of spaces may have lost its start, see `Token`.
        let start = if token.start == token.end { token.end.saturating_sub(1) } else { token.start };
        while answers.next_if(|answer| answer.end <= start).is_some() {}
        answers.peek().is_some_and(|answer| answer.start < token.end && start < answer.end)
    };
    if everything { vec![true; tokens.len()] } else { tokens.iter().map(carries_loss).collect() }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::data::fixture::{AB, BOS, EOS, IM_END, IM_START, chat_tokenizer, tokenizer};

    fn encoder(tokenizer: &Tokenizer) -> Encoder<'_> {
        Encoder { tokenizer, template: None, train_on_inputs: false, scores: false, images: None }
    }

    fn completion(prompt: &str, completion: &str) -> Sample {
        Sample::Completion { prompt: prompt.into(), completion: completion.into() }
    }

    /// All ids of a row, and the ids that carry loss.
    fn ids(row: &EncodedRow) -> (Vec<u32>, Vec<u32>) {
        let with_loss = row.ids.iter().zip(&row.carries_loss).filter(|(_, loss)| **loss).map(|(id, _)| *id);
        (row.ids.clone(), with_loss.collect())
    }

    fn bytes(text: &str) -> impl Iterator<Item = u32> {
        text.bytes().map(u32::from)
    }

    #[test]
    fn a_completion_carries_loss_with_one_eos_and_its_prompt_does_not() {
        let tokenizer = tokenizer();
        let row = encoder(&tokenizer).encode(&completion("xy: ", "z\n")).unwrap();
        let all: Vec<u32> = [BOS].into_iter().chain(bytes("xy: z\n")).chain([EOS]).collect();
        assert_eq!(ids(&row), (all, bytes("z\n").chain([EOS]).collect()));
        assert_eq!((row.full_length, row.full_target_tokens), (8, 3));
    }

    #[test]
    fn words_of_a_prompt_and_its_completion_that_become_one_are_told() {
        let tokenizer = tokenizer();
        let odd = |prompt: &str, answer: &str| {
            encoder(&tokenizer).encode_with_notes(&completion(prompt, answer)).unwrap().1.odd
        };
        for (prompt, answer, joined) in [("2 + 2 is", "four", "isfour"), ("Why \"so\"?", "It is.", "?It")] {
            let odd = odd(prompt, answer);
            assert!(odd.len() == 1 && odd[0].contains(&format!("\"{joined}\"")), "{odd:?}");
        }
        for (prompt, answer) in
            [("is", " four"), ("is\n", "four"), ("Response:", "four"), ("", "four"), ("是", "四"), ("is", "")]
        {
            assert_eq!(odd(prompt, answer), [""; 0], "{prompt}{answer}");
        }
    }

    #[test]
    fn a_token_across_the_boundary_carries_loss() {
        let tokenizer = tokenizer();
        let row = encoder(&tokenizer).encode(&completion("xa", "by")).unwrap();
        assert_eq!(ids(&row), (vec![BOS, 120, AB, 121, EOS], vec![AB, 121, EOS]));
    }

    #[test]
    fn a_completion_of_spaces_alone_carries_loss() {
        // The byte range that the tokenizer reports for a token leaves out spaces.
        let tokenizer = tokenizer();
        let row = encoder(&tokenizer).encode(&completion("x", "  ")).unwrap();
        assert_eq!(ids(&row).1, [32, 32, EOS]);
        let row = encoder(&tokenizer).encode(&completion("x ", " y")).unwrap();
        assert_eq!(ids(&row).1, [32, 121, EOS]);
    }

    #[test]
    fn every_byte_of_a_character_is_on_its_side_of_the_boundary() {
        let tokenizer = tokenizer();
        let row = encoder(&tokenizer).encode(&completion("é", "😀")).unwrap();
        assert_eq!(ids(&row).1, bytes("😀").chain([EOS]).collect::<Vec<_>>());
    }

    #[test]
    fn bos_and_eos_that_the_text_has_are_not_doubled() {
        let tokenizer = tokenizer();
        let row = |text: &str| encoder(&tokenizer).encode(&Sample::Text(text.into())).unwrap();
        assert_eq!(ids(&row("x")), (vec![BOS, 120, EOS], vec![120, EOS]));
        assert_eq!(row("<s>x</s>"), row("x"));
        assert_eq!(ids(&row("")), (vec![BOS, EOS], vec![EOS]));
    }

    #[test]
    fn a_rendered_conversation_gets_no_second_bos_and_its_turn_ends_carry_loss() {
        let tokenizer = chat_tokenizer();
        let source = "{{ '<s>' }}{% for m in messages %}{{ m.role[0] + m.content + '<|im_end|>' }}{% endfor %}\
                      {% if add_generation_prompt %}a{% endif %}";
        let template = ChatTemplate::new(source, "the test", &tokenizer).unwrap();
        let encoder = Encoder { template: Some(&template), ..encoder(&tokenizer) };
        let messages = [("user", "x"), ("assistant", "yz"), ("user", "w"), ("assistant", "v")];
        let messages = messages.iter().map(|(role, content)| json!({"role": role, "content": content})).collect();
        let sample = Sample::Chat { messages, tools: None };
        let row = encoder.encode(&sample).unwrap();
        let turn = |text: &str| bytes(text).chain([IM_END]).collect::<Vec<u32>>();
        let all = [vec![BOS], turn("ux"), turn("ayz"), turn("uw"), turn("av")].concat();
        assert_eq!(ids(&row), (all, [turn("yz"), turn("v")].concat()));

        let everything = Encoder { train_on_inputs: true, ..encoder }.encode(&sample).unwrap();
        assert_eq!(everything.ids, row.ids);
        assert_eq!(everything.num_target_tokens(), row.ids.len() - 1, "all but the first");
    }

    #[test]
    fn the_padding_token_at_the_end_of_a_turn_carries_loss() {
        let tokenizer = chat_tokenizer();
        let template = ChatTemplate::open("auto", &tokenizer).unwrap();
        let encoder = Encoder { template: template.as_ref(), ..encoder(&tokenizer) };
        let messages = vec![json!({"role": "user", "content": "x"}), json!({"role": "assistant", "content": "y"})];
        let row = encoder.encode(&Sample::Chat { messages, tools: None }).unwrap();
        assert_eq!(ids(&row).1, [121, IM_END], "the line end behind it does not");
        assert_eq!(row.ids[0], IM_START);
    }

    #[test]
    fn a_last_answer_has_the_end_that_its_template_writes_before_another_message_alone() {
        let tokenizer = chat_tokenizer();
        let source = "{% for m in messages %}{{ m.role[0] + m.content }}{{ '' if loop.last and m.role == 'assistant' else '<|im_end|>' }}\
                      {% endfor %}";
        let template = ChatTemplate::new(source, "the test", &tokenizer).unwrap();
        let plain = Encoder { template: Some(&template), ..encoder(&tokenizer) };
        let chat = |answer: &str| {
            let turns = [("user", "x"), ("assistant", "y"), ("user", "z"), ("assistant", answer)];
            let messages = turns.map(|(role, content)| json!({"role": role, "content": content})).to_vec();
            Sample::Chat { messages, tools: None }
        };
        // The template has no generation prompt, so that the role is a part of the answer.
        let answers = [vec![97, 121, IM_END, 97, 119, IM_END], vec![97, 121, IM_END, 97, 118, IM_END]];
        assert_eq!(ids(&plain.encode(&chat("w")).unwrap()).1, answers[0]);
        let everything = Encoder { train_on_inputs: true, ..plain }.encode(&chat("w")).unwrap();
        assert_eq!(everything.ids[everything.ids.len() - 2..], [119, IM_END]);
        let plain = Encoder { train_on_inputs: false, ..plain };
        let pair = Sample::Pair(Box::new(chat("w")), Box::new(chat("v")), 0.0);
        assert_eq!(ids(&plain.encode(&pair).unwrap()).1, answers.concat());
        // Scores are read behind what the template writes.
        let scored = Encoder { scores: true, ..plain }.encode(&pair).unwrap();
        assert_eq!(ids(&scored).1, [119, 118]);
    }

    #[test]
    fn a_prompt_whose_tools_leave_no_trace_is_refused() {
        let tokenizer = chat_tokenizer();
        let template = ChatTemplate::open("auto", &tokenizer).unwrap();
        let encoder = Encoder { template: template.as_ref(), ..encoder(&tokenizer) };
        let prompt = |tools: Option<Value>| {
            let messages = vec![json!({"role": "user", "content": "x"})];
            encoder.encode(&Sample::Prompt(Prompt::Chat { messages, tools }))
        };
        assert!(prompt(None).unwrap().ids.contains(&120));
        let error = prompt(Some(json!([{"type": "function", "function": {"name": "tide"}}]))).unwrap_err().to_string();
        assert!(error.contains("tool `tide` leaves no trace"), "{error}");
    }

    #[test]
    fn truncation_knows_what_it_cut() {
        let tokenizer = tokenizer();
        let row = |max_length: usize| encoder(&tokenizer).encode(&completion("xyz", "vw")).unwrap().cut(max_length);
        let facts =
            |row: &EncodedRow| (row.ids.len(), row.num_target_tokens(), row.is_truncated(), row.is_answer_cut());
        assert_eq!(facts(&row(7)), (7, 3, false, false));
        assert_eq!(facts(&row(5)), (5, 1, true, false));
        assert_eq!(facts(&row(4)), (4, 0, true, true));
        assert_eq!(row(4).full_length, 7);
    }

    #[test]
    fn both_answers_of_a_pair_begin_at_the_same_token_and_are_cut_each() {
        let tokenizer = tokenizer();
        // "ab" is one token.
        let pair = |good: &str, bad: &str| {
            Sample::Pair(Box::new(completion("xa", good)), Box::new(completion("xa", bad)), 0.5)
        };
        let row = encoder(&tokenizer).encode(&pair("by", "zw")).unwrap();
        assert_eq!(row.ids, [vec![BOS, 120, AB, 121, EOS], vec![BOS, 120, 97, 122, 119, EOS]].concat());
        assert_eq!((row.second, row.first_target(), row.full_length, row.margin), (5, Some(2), 6, 0.5));
        assert_eq!(row.carries_loss, [false, false, true, true, true, false, false, true, true, true, true]);
        let cut = row.clone().cut(3);
        assert_eq!((cut.ids, cut.second), (vec![BOS, 120, AB, BOS, 120, 97], 3));
        assert!(row.clone().cut(5).is_truncated() && !row.clone().cut(6).is_truncated());
        assert!(row.cut(2).is_answer_cut());
        // They differ at the sixth token.
        let row = encoder(&tokenizer).encode(&pair("yzw", "yzv")).unwrap();
        assert!(row.clone().cut(5).is_answer_cut() && row.first_target() == Some(5) && !row.cut(6).is_answer_cut());
        for (good, bad, reason) in [("b", "", "`rejected` has nothing"), ("b", "b", "the same tokens")] {
            let error = encoder(&tokenizer).encode(&pair(good, bad)).unwrap_err().to_string();
            assert!(error.contains(reason), "{error}");
        }
    }
}
