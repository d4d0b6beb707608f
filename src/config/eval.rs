//! Sections `[eval]` and `[eval.task]` of a recipe.

use regex::Regex;

use super::last_line;
use crate::schema::{Problem, Section, choice, section};

section! {
    /// Section `[eval]`.
    #[derive(Eq)]
    pub struct EvalConfig {
        /// Steps between evaluations. One also runs before the first step and after the last; that is the default.
        eval_steps: Option<u64> = None => optional_count(1..) like 100,
            ["eval_interval", "evals_per_epoch", "steps_per_eval", "run_val_every_n_steps", "evaluation_strategy",
             "eval_strategy", "val_check_interval", "eval_every", "steps", "every", "interval", "every_n_steps"];
        /// Evaluate before the first step; false leaves that evaluation out.
        eval_on_start: bool = true => boolean(), ["val_at_start", "val_before_train"];
        /// Micro-batches in an evaluation. Default: the whole set.
        max_batches: Option<usize> = None => optional_count(1..) like 50,
            ["val_batches", "eval_max_batches", "max_iters", "limit_val_batches", "eval_iters", "batches", "max_steps"];
        /// What makes an evaluation better than another, for adapter-best/ and early stopping: "loss"; "score", that of
        /// [eval.task]; of preferences "accuracy" or "margin"; of "grpo" "reward". Default: "loss", of "grpo" "reward".
        metric_for_best: Option<BestBy> = None => optional_choice() like "loss", ["metric_for_best_model"];
        /// Stop after so many evaluations that were no better; adapter/ is then the best one. Default: never.
        early_stopping_patience: Option<usize> = None => optional_count(1..) like 3,
            ["early_stopping", "patience", "early_stop_patience", "early_stopping_rounds"];
        /// Prompts answered at every evaluation, into samples.jsonl. `![](a.png)` in one shows an image to a model that sees.
        generate: Vec<String> = Vec::new() => strings(),
            ["prompts", "sample_prompts", "eval_prompts", "samples", "do_sample_eval"];
        /// A score of the model's answers at every evaluation, before the first step that of the base.
        task: TaskConfig = TaskConfig::default() => section() of TaskConfig, ["eval_task", "tasks"];
    }
}

/// Evaluations of a run of `total` steps behind its step `after`: one every `eval_steps`, and one at the end.
#[must_use]
pub fn num_evaluations(eval_steps: Option<u64>, after: u64, total: u64) -> u64 {
    let between = eval_steps.map_or(0, |every| total / every - after.min(total) / every);
    between + u64::from(after < total && eval_steps.is_none_or(|every| !total.is_multiple_of(every)))
}

choice! {
    /// What makes an evaluation better than another.
    pub enum BestBy {
        /// A lower loss.
        Loss = "loss", ["eval_loss"];
        /// A higher score.
        Score = "score", ["eval_score"];
        /// More pairs whose chosen answer has the higher reward.
        Accuracy = "accuracy", ["eval_rewards/accuracies"];
        /// A higher reward of the chosen answers over the rejected ones.
        Margin = "margin", ["eval_rewards/margins"];
        /// A higher reward of what the model writes.
        Reward = "reward", ["eval_reward"];
    }
}

section! {
    /// Section `[eval.task]`. Without a metric there is no task.
    #[derive(Eq)]
    pub struct TaskConfig then check {
        /// What a score counts, as a share of the evaluation rows. `"exact_match"`: answers that are the row's; "json":
        /// answers that are JSON; `"multiple_choice"`: rows whose right one of `choices` is the likeliest;
        /// `"token_accuracy"`: tokens of the rows' answers that are the likeliest. Default: no score.
        metric: Option<Metric> = None => optional_choice() like "exact_match",
            ["metrics", "metric_list", "score", "output_type"];
        /// Rows that are scored, the first ones.
        rows: usize = 100 => count(1..), ["limit", "num_samples", "max_samples"];
        /// Seconds after which no other row is begun; the score is that of the rows before.
        max_seconds: u64 = 300 => count(1..), ["timeout", "max_time"];
        /// Tokens of an answer, where the model does not end it earlier.
        max_new_tokens: usize = 256 => count(1..),
            ["max_gen_toks", "max_tokens", "max_length", "generation_max_length"];
        /// Texts before which an answer ends.
        stop: Vec<String> = Vec::new() => strings(), ["until", "stop_sequences", "stop_strings"];
        /// Compare what this finds in the two answers: its first group that took part, or all of it where it has none.
        regex_pattern: Option<String> = None => optional_string() like "#### (-?[0-9.,]+)",
            ["regex", "pattern", "answer_pattern"];
        /// Which of its finds: "first" or "last".
        take: Take = Take::First => choice(), ["group_select"; "0 is \"first\", -1 is \"last\""];
        /// Take what these find out of both answers before they are compared.
        regexes_to_ignore: Vec<String> = Vec::new() => strings(), ["ignore_patterns"];
        /// Compare without the difference of upper and lower case.
        ignore_case: bool = false => boolean();
        /// Compare without ASCII punctuation.
        ignore_punctuation: bool = false => boolean();
        /// Ask in plain text instead of the form that rows have in training: {prompt} stands for the prompt of a row.
        prompt: Option<String> = None => optional_string() like "Question: {prompt}\nAnswer:",
            ["doc_to_text", "prompt_template"];
        /// Training rows with their answers before each question; needs `prompt`.
        num_fewshot: usize = 0 => count(0..), ["fewshot", "n_shot", "num_shots", "fewshot_k"];
    }
}

impl TaskConfig {
    fn check(self, section: &mut Section) -> Self {
        let is_wrong = section.is_wrong("metric");
        for (key, reader) in self.unread().filter(|_| !is_wrong) {
            section.reject(key, Problem::new(format!("`eval.task.{key}` does nothing here")).hint(reader));
        }
        let patterns = self.regexes_to_ignore.iter().map(|pattern| ("regexes_to_ignore", pattern));
        for (key, pattern) in self.regex_pattern.iter().map(|pattern| ("regex_pattern", pattern)).chain(patterns) {
            if let Err(error) = Regex::new(pattern) {
                let message = format!("`eval.task.{key}` has `{pattern}`, which is no regular expression");
                section.reject(key, Problem::new(message).hint(last_line(&error)));
            }
        }
        if let Some(prompt) = self.prompt.as_ref().filter(|prompt| !prompt.contains("{prompt}")) {
            let message = format!("`eval.task.prompt` = {prompt:?}, expected a text with {{prompt}} in it");
            section.reject("prompt", Problem::new(message).hint("{prompt} stands for the prompt of a row"));
        }
        self
    }

    /// The keys that have been set and that nothing reads, and what would.
    pub(crate) fn unread(&self) -> impl Iterator<Item = (&'static str, &'static str)> + use<> {
        let keys = self.keys().into_iter().filter(|(_, is_set, is_read, _)| *is_set && !is_read);
        keys.map(|(key, _, _, reader)| (key, reader))
    }

    /// Keys, whether they have been set, whether anything reads them, and what does. Every key is in the recipe that a
    /// run writes, so its default counts as not set.
    fn keys(&self) -> [(&'static str, bool, bool, &'static str); 11] {
        const ANY: &str = "set `metric` in [eval.task]";
        const WRITTEN: &str = "`metric` = \"exact_match\" and \"json\" read it";
        const COMPARED: &str = "`metric` = \"exact_match\" reads it";
        let (metric, default) = (self.metric, Self::default());
        let is_compared = metric == Some(Metric::ExactMatch);
        let is_written = is_compared || metric == Some(Metric::Json);
        let is_asked = is_written || metric == Some(Metric::MultipleChoice);
        [
            ("rows", self.rows != default.rows, metric.is_some(), ANY),
            ("max_seconds", self.max_seconds != default.max_seconds, metric.is_some(), ANY),
            ("max_new_tokens", self.max_new_tokens != default.max_new_tokens, is_written, WRITTEN),
            ("stop", !self.stop.is_empty(), is_written, WRITTEN),
            ("regex_pattern", self.regex_pattern.is_some(), is_compared, COMPARED),
            (
                "take",
                self.take != default.take,
                is_compared && self.regex_pattern.is_some(),
                "`metric` = \"exact_match\" with `regex_pattern` reads it",
            ),
            ("regexes_to_ignore", !self.regexes_to_ignore.is_empty(), is_compared, COMPARED),
            ("ignore_case", self.ignore_case, is_compared, COMPARED),
            ("ignore_punctuation", self.ignore_punctuation, is_compared, COMPARED),
            ("prompt", self.prompt.is_some(), is_asked, "every `metric` but \"token_accuracy\" reads it"),
            (
                "num_fewshot",
                self.num_fewshot > 0,
                is_asked && self.prompt.is_some(),
                "it needs `prompt`, in which {prompt} stands for a row's",
            ),
        ]
    }
}

choice! {
    /// What a score counts.
    pub enum Metric {
        /// Answers that are those of the rows.
        ExactMatch = "exact_match", ["regex", "em", "accuracy", "generate_until"];
        /// Rows whose right choice is the likeliest.
        MultipleChoice = "multiple_choice", ["acc", "acc_norm"];
        /// Answers that are JSON.
        Json = "json", ["json_valid"];
        /// Tokens of the rows' answers that are the likeliest.
        TokenAccuracy = "token_accuracy", ["mean_token_accuracy"];
    }
}

choice! {
    /// Which find of a pattern is compared.
    pub enum Take {
        /// The first.
        First = "first";
        /// The last.
        Last = "last";
    }
}
