//! Evaluation rows as questions: what a model is asked, and the answer to compare its own with. They are read from
//! their files again, since only their tokens are kept.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde_json::Value;

use super::{Dataset, read_row};
use crate::data::batch::{Batch, RowSource};
use crate::data::data_file::DataFile;
use crate::data::encode::{EncodedRow, InText, taken_out};
use crate::data::error::DataError;
use crate::data::files::FileKind;
use crate::data::formats::{RowFormat, Sample};
use crate::data::rows::RowFile;
use crate::data::template::{ChatTemplate, Rendered};
use crate::data::tokenizer::Tokenizer;
use crate::images::Images;

/// What stands for the prompt of a row in [`Asking::prompt`].
const PROMPT: &str = "{prompt}";

/// How rows become questions.
#[derive(Clone, Copy, Debug, Default)]
pub struct Asking<'a> {
    /// The first rows alone.
    pub max_rows: usize,
    /// A plain text that asks, in which `{prompt}` stands for that of the row; absent: as in training.
    pub prompt: Option<&'a str>,
    /// Training rows with their answers that stand before each question; only with `prompt`.
    pub num_fewshot: usize,
    /// Whether rows must have choices.
    pub needs_choices: bool,
}

/// A row as a question.
#[derive(Clone, Debug, Default)]
pub struct Question {
    /// What the model continues.
    pub prompt: String,
    /// Whether the prompt is plain text, before which the tokenizer may put BOS; a template writes its own.
    is_plain: bool,
    /// Its images.
    in_text: InText,
    /// What stands between the prompt and an answer.
    delimiter: String,
    /// The answer of the row, without white space around it.
    pub answer: String,
    /// The texts to choose the answer from.
    pub choices: Vec<String>,
}

impl Question {
    /// Token ids of the prompt.
    ///
    /// # Errors
    /// A text that the tokenizer refuses, or that makes the token of an image by itself.
    pub fn prompt_ids(&self, tokenizer: &Tokenizer, images: Option<&Images>) -> Result<Vec<u32>, DataError> {
        if self.is_plain {
            return Ok(tokenizer.encode(&self.prompt, true)?);
        }
        self.in_text.clone().prompt_ids(images, tokenizer, self.prompt.clone())
    }

    /// The prompt and an answer, whose tokens are the targets.
    ///
    /// # Errors
    /// As [`prompt_ids`](Self::prompt_ids).
    pub fn answered(&self, answer: &str, tokenizer: &Tokenizer, images: Option<&Images>) -> Result<Batch, DataError> {
        let Self { prompt, is_plain, delimiter, .. } = self;
        let (mut text, mut in_text) = (format!("{prompt}{delimiter}{answer}"), self.in_text.clone());
        let mut place = prompt.len()..text.len();
        in_text.write(images, &mut text, std::slice::from_mut(&mut place))?;
        let tokens = tokenizer.encode_tokens(&text, *is_plain)?;
        let mut is_target: Vec<bool> = tokens.iter().map(|token| token.end > place.start).collect();
        let ids = in_text.number(images, &tokens, &mut is_target)?;
        let row = EncodedRow::of_parts(ids, is_target);
        Ok(Batch::of_rows(&[vec![(RowSource { file: 0, row: 0 }, row)]]))
    }

    /// Which of the choices is the answer: the one that it is, or that a letter from A or a number from 0 names.
    #[must_use]
    pub fn right_choice(&self) -> Option<usize> {
        let is_answer = |choice: &String| *choice == self.answer;
        let named = || match self.answer.as_bytes() {
            [letter @ b'A'..=b'Z'] => Some(usize::from(letter - b'A')),
            _ => self.answer.parse().ok(),
        };
        self.choices.iter().position(is_answer).or_else(named).filter(|index| *index < self.choices.len())
    }
}

impl Dataset {
    /// The first evaluation rows as questions, in the order of an evaluation, each made into something by `make`.
    ///
    /// # Errors
    /// A file that has changed; a row without an answer or choices; a row that `make` refuses.
    pub fn questions<T>(
        &self,
        asking: &Asking<'_>,
        make: impl Fn(Question) -> Result<T, String>,
    ) -> Result<Vec<T>, DataError> {
        // One more: a row is no example for itself.
        let num_examples = if asking.num_fewshot > 0 { asking.num_fewshot + 1 } else { 0 };
        let examples = &self.train_rows[..num_examples.min(self.train_rows.len())];
        let examples = self.read_again(examples, |format, row| self.question(format, row, asking))?;
        let mut rows = self.eval_visits();
        rows.truncate(asking.max_rows);
        self.read_again(&rows, |format, row| {
            let mut question = self.question(format, row, asking)?;
            if asking.needs_choices {
                question.choices = format.choices(row)?;
            }
            let others = examples.iter().filter(|example| example.prompt != question.prompt);
            let before = others.take(asking.num_fewshot);
            let before =
                before.map(|Question { prompt, delimiter, answer, .. }| format!("{prompt}{delimiter}{answer}\n\n"));
            question.prompt.insert_str(0, &before.collect::<String>());
            make(question)
        })
    }

    /// What `read` makes of the rows to train and to evaluate on, as they are written in their files, by their place.
    ///
    /// # Errors
    /// A file that has changed; a row that `read` refuses.
    pub fn values<T>(
        &self,
        read: impl Fn(&RowFormat, &Value) -> Result<T, String>,
    ) -> Result<BTreeMap<RowSource, T>, DataError> {
        let rows = [&self.train_rows[..], &self.eval_rows].concat();
        let values = self.read_again(&rows, read)?;
        let source = |row: u32| {
            let file = self.files.partition_point(|file| file.first_row <= row) - 1;
            RowSource { file, row: (row - self.files[file].first_row) as usize }
        };
        Ok(rows.into_iter().map(source).zip(values).collect())
    }

    /// The first evaluation rows as they are trained on, in the order of an evaluation.
    ///
    /// # Errors
    /// A row that cannot be read.
    pub fn first_eval_rows(&self, max_rows: usize) -> Result<Vec<Batch>, DataError> {
        let rows = self.eval_visits().into_iter().take(max_rows);
        let first = |row: u32| {
            let (source, row) = read_row(&self.files, row)?;
            // Of a pair the chosen answer.
            let place = row.sequences().swap_remove(0);
            let row = EncodedRow::of_parts(row.ids[place.clone()].to_vec(), row.carries_loss[place].to_vec());
            Ok(Batch::of_rows(&[vec![(source, row)]]))
        };
        rows.map(first).collect()
    }

    fn question(&self, format: &RowFormat, row: &Value, asking: &Asking<'_>) -> Result<Question, String> {
        let template = self.template.as_ref().filter(|_| asking.prompt.is_none());
        self.question_of(format.read(row, template)?, asking)
    }

    fn question_of(&self, sample: Sample, asking: &Asking<'_>) -> Result<Question, String> {
        let template = self.template.as_ref().filter(|_| asking.prompt.is_none());
        match (sample, template) {
            (Sample::Chat { messages, tools }, Some(template)) => {
                let (messages, in_text) =
                    taken_out(self.images().map(Arc::as_ref), &messages).map_err(|error| error.to_string())?;
                let rendered = template.render_with_answers(&messages, tools.as_ref());
                let question = last_answer(template, &rendered.map_err(|error| error.to_string())?)?;
                Ok(Question { in_text, ..question })
            }
            (Sample::Completion { prompt, completion }, _) => {
                let answer = completion.trim();
                let own = &completion[..completion.len() - completion.trim_start().len()];
                let delimiter = if asking.prompt.is_some() { " " } else { own };
                let prompt = asking.prompt.map_or(prompt.clone(), |text| text.replace(PROMPT, &prompt));
                let (delimiter, answer) = (delimiter.to_owned(), answer.to_owned());
                Ok(Question { prompt, is_plain: true, delimiter, answer, ..Question::default() })
            }
            (Sample::Chat { .. }, None) => {
                Err("is a conversation, and a prompt of plain text needs a question with its \
                                                answer\n  hint: leave out `eval.task.prompt`"
                    .to_owned())
            }
            (Sample::Pair(chosen, ..), _) => self.question_of(*chosen, asking),
            (Sample::Labelled(sample, true), _) => self.question_of(*sample, asking),
            (Sample::Labelled(_, false), _) => Err("is a bad answer, with which none is compared".to_owned()),
            (Sample::Prompt(_), _) => Err("is a prompt without an answer to compare with".to_owned()),
            (Sample::Text(_), _) => Err("is plain text, without an answer to compare with".to_owned()),
        }
    }

    /// Reads rows as they are written in their files.
    fn read_again<T>(
        &self,
        rows: &[u32],
        read: impl Fn(&RowFormat, &Value) -> Result<T, String>,
    ) -> Result<Vec<T>, DataError> {
        let file_of = |row: u32| &self.files[self.files.partition_point(|file| file.first_row <= row) - 1];
        let mut all = Vec::with_capacity(rows.len());
        for rows in rows.chunk_by(|a, b| file_of(*a).first_row == file_of(*b).first_row) {
            let file = file_of(rows[0]);
            let (row_file, format) = self.open_again(file)?;
            for row in rows {
                let index = (row - file.first_row) as usize;
                let value = row_file.parse(&row_file.bytes(index)?);
                let made = value.and_then(|value| read(&format, &value));
                all.push(made.map_err(|reason| row_file.row_error(index, reason))?);
            }
        }
        Ok(all)
    }

    fn open_again(&self, file: &DataFile) -> Result<(RowFile, RowFormat), DataError> {
        let failed = |reason: &str| DataError::File { path: file.info.path.clone(), reason: reason.to_owned() };
        if file.info.kind == FileKind::Txt {
            return Err(failed("is plain text, without answers to compare with"));
        }
        let rows = RowFile::open(&file.info.path, file.info.kind)?;
        if rows.num_rows() < file.info.num_rows {
            return Err(failed("has changed since it was read\n  hint: start again once it is complete"));
        }
        let sources = self.config.train.iter().chain(&self.config.eval).zip(&self.entries);
        let source = sources.into_iter().find(|(_, rows)| rows.contains(&file.first_row)).map(|(source, _)| source);
        let Some(source) = source else { return Err(failed("belongs to no section")) };
        let format = RowFormat::detect(source.format, &source.columns, &rows.first_row()?, self.config.row_kind);
        let images = self.images().map(|images| images.folder_for(&file.info.path));
        Ok((rows, format.map_err(|reason| failed(&reason))?.under(&self.config).with_images(images)))
    }
}

/// A conversation up to its last answer.
fn last_answer(template: &ChatTemplate, conversation: &Rendered) -> Result<Question, String> {
    let Rendered { text, answers, .. } = conversation;
    let place = answers.last().ok_or("has no answer")?;
    let answer = template.ends().without_end(&text[place.clone()]).to_owned();
    Ok(Question { prompt: text[..place.start].to_owned(), answer, ..Question::default() })
}
