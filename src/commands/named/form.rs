//! The form in which prompts are passed to the model: as it was trained, unless the user wants another one.

use crate::commands::say;
use crate::data::template::{ChatTemplate, Stops};
use crate::data::tokenizer::Tokenizer;
use crate::save::export::PromptForm;
use crate::schema::Problem;
use crate::util::failure::Failure;

/// Whether the user has asked for a form of the prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Asked {
    /// As the adapter was trained.
    AsTrained,
    Raw,
    Chat,
}

impl Asked {
    /// By the two arguments, of which at most one is given.
    pub(crate) fn by(raw: bool, chat: bool) -> Self {
        match (raw, chat) {
            (true, _) => Self::Raw,
            (_, true) => Self::Chat,
            _ => Self::AsTrained,
        }
    }
}

/// The chat template to use, if any, and a line that names it with the reason.
///
/// # Errors
/// A template that is not valid; `--chat` where there is none.
pub(crate) fn template(
    asked: Asked,
    form: Option<&PromptForm>,
    tokenizer: &Tokenizer,
) -> Result<(Option<ChatTemplate>, String), Failure> {
    let raw = |reason: &str| Ok((None, format!("the prompt is continued as it is: {reason}")));
    match (asked, form) {
        (Asked::Raw, _) => return raw("--raw"),
        (Asked::AsTrained, Some(PromptForm::Raw)) => {
            return raw("the adapter was trained so; --chat asks through the chat template");
        }
        _ => {}
    }
    let is_known = matches!(form, Some(PromptForm::ChatTemplate { .. }));
    // Asked for, the chat template is the model's own where the adapter was trained without one.
    let template = PromptForm::template(form.filter(|_| is_known), tokenizer);
    let Some(template) = template.map_err(Failure::input)? else {
        return match (asked, is_known) {
            (Asked::Chat, _) => Err(Problem::new("`--chat`: the model has no chat template").into()),
            (_, true) => raw("the model has no chat template, through which the adapter was trained"),
            (_, false) => raw("the model has no chat template"),
        };
    };
    let reason = match (asked, is_known) {
        (Asked::Chat, _) => "--chat",
        (_, true) => "the adapter was trained so; --raw continues it as it is",
        (_, false) => "--raw continues it as it is",
    };
    let line = format!("the prompt goes through the chat template of {}: {reason}", template.origin());
    Ok((Some(template), line))
}

/// Where the texts of an adapter end: those through `template`, or others, of which the tokens that end its answers are known.
pub(crate) fn stops(template: Option<&ChatTemplate>, form: Option<&PromptForm>, tokenizer: &Tokenizer) -> Stops {
    if template.is_some() {
        return Stops::of(tokenizer, template);
    }
    // A template that cannot be used is not used.
    let own = PromptForm::template(form, tokenizer).ok().flatten();
    Stops { texts: Vec::new(), ..Stops::of(tokenizer, own.as_ref()) }
}

/// Says what is wrong with the prompts of a template.
pub(crate) fn warn_of(template: Option<&ChatTemplate>) {
    if let Some(problem) = template.and_then(|template| template.ends().bad_prompt.as_ref()) {
        say(&format!("warning: {problem}"));
    }
}
