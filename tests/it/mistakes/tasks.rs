//! Mistakes in `[eval.task]`.

use super::table::Wrong::{self, Set};

/// As `MISTAKES`, which they follow.
pub(crate) const TASK_MISTAKES: &[(&str, Wrong<'static>, &[&str])] = &[
    (
        "a task without evaluation rows",
        Set(&["eval.task.metric=exact_match"]),
        &[
            "`eval.task.metric` needs evaluation data, and there is none",
            "add [[data.eval]], or `eval_split` in [data]",
        ],
    ),
    (
        "the harness's metric",
        Set(&["data.eval_split=2", "eval.task.metric=acc"]),
        &["`eval.task.metric` = \"acc\", expected one of \"exact_match\"", "this trainer calls it `multiple_choice`"],
    ),
    (
        "stops of no task",
        Set(&["data.eval_split=2", "eval.task.stop=[\"a\"]"]),
        &["`eval.task.stop` does nothing here", "`metric` = \"exact_match\" and \"json\" read it"],
    ),
    (
        "a pattern that is no regular expression",
        Set(&["data.eval_split=2", "eval.task.metric=exact_match", "eval.task.regex_pattern=\"#### (\""]),
        &["`eval.task.regex_pattern` has `#### (`, which is no regular expression", "unclosed group"],
    ),
    (
        "a pattern that the rows do not have",
        Set(&["data.eval_split=2", "eval.task.metric=exact_match", "eval.task.regex_pattern=\"#### (.*)\""]),
        &["rows.jsonl:line ", "`eval.task.regex_pattern` finds nothing in its answer, which ends with \"c d\""],
    ),
    (
        "multiple choice without choices",
        Set(&["data.eval_split=2", "eval.task.metric=multiple_choice"]),
        &["rows.jsonl:line ", "multiple choice needs `choices`, a list of texts", "it has `prompt`, `completion`"],
    ),
    (
        "examples without a prompt",
        Set(&["data.eval_split=2", "eval.task.metric=exact_match", "eval.task.num_fewshot=5"]),
        &["`eval.task.num_fewshot` does nothing here", "it needs `prompt`"],
    ),
    (
        "a prompt without the row's",
        Set(&["data.eval_split=2", "eval.task.metric=exact_match", "eval.task.prompt=Question:"]),
        &["`eval.task.prompt` = \"Question:\", expected a text with {prompt} in it"],
    ),
    (
        "the best by a score of nothing",
        Set(&["data.eval_split=2", "eval.metric_for_best=score"]),
        &["`eval.metric_for_best` = \"score\" needs a task, and there is none", "set `metric` in [eval.task]"],
    ),
];
