//! Whether episodes can be played under a chat template, which is known before any is.

use super::Environment;
use crate::config::ObjectiveConfig;
use crate::data::dataset::Dataset;
use crate::data::template::GoesOn;
use crate::generate::calls::CallForm;

/// The environment of a recipe, if it has one. It is not started.
///
/// # Errors
/// One that is not there; a template under which conversations do not go on by their own tokens.
pub(in crate::train::rollouts) fn open(
    objective: &ObjectiveConfig,
    data: &Dataset,
) -> Result<Option<Environment>, String> {
    let config = &objective.environment;
    if !config.is_set() {
        return Ok(None);
    }
    if data.has_images() {
        return Err(
            "`objective.environment` plays episodes of text\n  hint: leave rows with images out, or the environment"
                .into(),
        );
    }
    let Some(goes_on) = goes_on(data) else {
        let text = "`objective.environment` needs a chat template, and there is none\n  hint: `data.chat_template` can name a file";
        return Err(text.into());
    };
    let why = match goes_on {
        GoesOn { tool_results: Err(tools), user_messages: Err(user) } if tools == user => Some(user),
        GoesOn { tool_results: Err(tools), user_messages: Err(user) } => Some(format!("{user}; {tools}")),
        // A class and functions reply by what tools give.
        GoesOn { tool_results: Err(tools), .. } if config.python.is_some() => Some(tools),
        _ if config.python.is_some() && !reads_calls(data) => Some(UNREAD_CALLS.to_owned()),
        _ => None,
    };
    if let Some(why) = why {
        return Err(format!(
            "`objective.environment`: a conversation does not go on behind an answer: {why}\n  hint: `data.chat_template` can name \
             another template"
        ));
    }
    Environment::new(config).map(Some)
}

/// Why a model under such a template can call no tools.
pub(in crate::train::rollouts) const UNREAD_CALLS: &str =
    "calls of tools cannot be read in the form in which the chat template writes them";

fn reads_calls(data: &Dataset) -> bool {
    data.template().is_some_and(|template| CallForm::of(template, data.tokenizer()).is_some())
}

fn goes_on(data: &Dataset) -> Option<GoesOn> {
    data.template().map(|template| template.goes_on(data.tokenizer()))
}

/// What is to be known of a recipe's environment under the chat template.
#[must_use]
pub fn environment_warnings(objective: &ObjectiveConfig, data: &Dataset) -> Vec<String> {
    let Some(goes_on) = goes_on(data).filter(|_| objective.environment.is_set()) else { return Vec::new() };
    let rewrites = [(goes_on.tool_results, "what a tool gives"), (goes_on.user_messages, "a message of the user")];
    let rewrites = rewrites.into_iter().filter(|(result, _)| *result == Ok(false)).map(|(_, reply)| {
        format!(
            "`objective.environment`: before {reply}, the chat template writes an earlier answer without its thoughts; in an episode \
             it stays as it was written, and a server that renders the conversation anew shows the model another one"
        )
    });
    rewrites.collect()
}

/// The environment of a recipe, to people, and what that is.
#[must_use]
pub fn about_environment(objective: &ObjectiveConfig, data: &Dataset) -> Option<(&'static str, String)> {
    let config = &objective.environment;
    let program = config.programs().into_iter().next_back()?.join(" ");
    let class = config.class.iter().chain(&config.tools).map(|name| format!(" {name}")).collect::<String>();
    let replies = match goes_on(data)? {
        GoesOn { tool_results: Err(why), .. } => format!("replies are messages of the user, as {why}"),
        GoesOn { user_messages: Err(why), .. } => format!("replies are what tools give, as {why}"),
        _ => "replies are what tools give and messages of the user".to_owned(),
    };
    let most = config.max_turns;
    Some(("environment", format!("{program}{class}, not started; episodes of up to {most} turns; {replies}")))
}
