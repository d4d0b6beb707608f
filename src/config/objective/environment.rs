//! Section `[objective.environment]` of a recipe.

use std::path::PathBuf;

use crate::schema::{Section, choice, section};

section! {
    /// Section `[objective.environment]`. Without a program there is no environment.
    pub struct EnvironmentConfig then check {
        /// Program that answers what the model writes in several turns: it runs as long as training does, and reads and writes one
        /// JSON object a line, such as "python3", "env.py". With `python`, what runs that file in place of "python3".
        command: Vec<String> = Vec::new() => strings();
        /// Python file with a class or functions that the model may call: a process of its own imports it, and nothing but
        /// training and evaluation starts that.
        python: Option<PathBuf> = None => optional_path() like "env.py";
        /// Class of that file, as TRL's `environment_factory` takes it: `reset`, public methods, which are the tools, and perhaps
        /// `get_reward`. Every episode has an instance.
        class: Option<String> = None => optional_string() like "Wordle", ["environment_factory"];
        /// Functions of that file that are tools without a state, as TRL's `tools`.
        tools: Vec<String> = Vec::new() => strings();
        /// Most answers of the model in an episode.
        max_turns: usize = 8 => count(1..=1024), ["max_tool_calling_iterations"];
        /// Seconds that a reply may take.
        max_seconds: f64 = 60.0 => number(0.001..=1e6);
        /// Replies that are waited for at the same time, if the environment allows as many.
        max_parallel: usize = 256 => count(1..=65_536);
        /// How often an episode begins anew, with the same draws, after its environment has failed.
        retries: usize = 1 => count(0..=100);
        /// An episode whose environment has failed for good: "mask" learns nothing from it and leaves it out of the group's mean,
        /// "zero" gives it a reward of 0, "stop" ends the run.
        on_failure: OnFailure = OnFailure::Mask => choice();
        /// Variables of the environment that the process gets beside PATH, HOME, LANG, TMPDIR, `VIRTUAL_ENV` and those of Python.
        env: Vec<String> = Vec::new() => strings();
    }
}

impl EnvironmentConfig {
    /// Whether there is one.
    #[must_use]
    pub fn is_set(&self) -> bool {
        !self.command.is_empty() || self.python.is_some()
    }

    fn check(self, section: &mut Section) -> Self {
        if !self.is_set() && self != Self::default() && !section.is_wrong("command") && !section.is_wrong("python") {
            section.problem("command", "is missing: the program that is the environment, or a `python` file");
        }
        let (has_file, names) = (self.python.is_some(), !self.tools.is_empty());
        if !has_file && self.class.is_some() {
            section.problem("class", "is of a `python` file: name that, too");
        }
        if !has_file && names {
            section.problem("tools", "are of a `python` file: name that, too");
        }
        if has_file && self.class.is_none() && !names {
            section.problem("class", "is missing: the class of the `python` file, or `tools`");
        }
        self
    }

    /// The programs that it starts, each with its arguments; a file that Python imports is one.
    #[must_use]
    pub fn programs(&self) -> Vec<Vec<String>> {
        let file = self.python.as_ref().map(|file| vec![file.display().to_string()]);
        [Some(self.command.clone()).filter(|command| !command.is_empty()), file].into_iter().flatten().collect()
    }
}

choice! {
    /// What becomes of an episode whose environment has failed.
    pub enum OnFailure {
        /// It carries no loss, and no other answer is compared with it.
        Mask = "mask";
        /// Its reward is 0.
        Zero = "zero";
        /// The run ends.
        Stop = "stop";
    }
}
