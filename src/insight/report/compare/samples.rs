//! What the runs wrote for the same prompts at their last evaluations.

use serde::Serialize;

use super::super::record::Record;

/// Lines of a text that the comparison shows people.
const MAX_LINES: usize = 12;

/// A prompt that several sides wrote a text for.
#[derive(Debug, Serialize)]
pub(super) struct PromptSamples {
    prompt: String,
    /// One per side, of its first run; absent where that run did not have the prompt.
    texts: Vec<Option<SampleText>>,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
struct SampleText {
    step: u64,
    text: String,
}

/// The prompts of the first run that another one has, too.
pub(super) fn of(runs: &[&Record]) -> Vec<PromptSamples> {
    let of_first = runs.first().map_or(&[][..], |run| &run.samples);
    let last = of_first.last().map(|sample| sample.step);
    let prompts = of_first.iter().filter(|sample| Some(sample.step) == last).map(|sample| sample.prompt.as_str());
    let samples = prompts.map(|prompt| PromptSamples {
        prompt: prompt.to_owned(),
        texts: runs.iter().map(|run| last_text(run, prompt)).collect(),
    });
    samples.filter(|samples| samples.texts.iter().flatten().count() > 1).collect()
}

fn last_text(run: &Record, prompt: &str) -> Option<SampleText> {
    let last = run.samples.last()?.step;
    let sample = run.samples.iter().find(|sample| sample.step == last && sample.prompt == prompt)?;
    Some(SampleText { step: last, text: sample.text.clone() })
}

impl PromptSamples {
    /// The prompt, and below it each side's text.
    pub(super) fn lines(&self, names: &[&str]) -> Vec<String> {
        let mut lines = vec![String::new(), format!("> {}", self.prompt.replace('\n', "\n  "))];
        for (name, text) in names.iter().zip(&self.texts) {
            let Some(SampleText { step, text }) = text else { continue };
            lines.push(format!("  {name}, step {step}"));
            lines.extend(text.trim().lines().take(MAX_LINES).map(|line| format!("    {line}")));
            lines.extend((text.trim().lines().count() > MAX_LINES).then(|| "    ...".to_owned()));
        }
        lines
    }
}
