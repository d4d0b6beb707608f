//! What a configuration of GRPO asks for: keys of TRL, which axolotl has in its table `trl`.

use std::path::Path;

use serde_json::Value;

use super::draft::Draft;
use super::foreign::Meaning::{self, Lost, Near, Nothing, Set};
use super::foreign::{Foreign, READ, is_off, one};
use super::program::{JudgeOfEnvironments, functions as functions_of, judge_of_environments};
use super::trainer::Trainer;

/// Whether it is one.
pub(super) fn is_asked(from: &Foreign) -> bool {
    let has = |key: &str| from.get(key).is_some_and(|value| !is_off(value));
    match from.trainer {
        Trainer::Axolotl => from.get("rl").is_some_and(|name| name == "grpo"),
        _ if from.said.objective.is_some() => from.said.objective == Some("grpo"),
        trainer if trainer.is_of_trl() => ["num_generations", "reward_funcs"].into_iter().any(has),
        _ => false,
    }
}

/// Keys that only GRPO has, or that it counts otherwise.
pub(super) fn of_key(from: &Foreign, path: &str, value: &Value) -> Option<Meaning> {
    let key = path.strip_prefix("trl.").unwrap_or(path);
    let (sizes, lost) = (Sizes::of(from), |why: &str| if is_off(value) { Nothing } else { Lost(why.into()) });
    let is_default = |default: f64| value.as_f64().is_none_or(|number| number.to_bits() == default.to_bits());
    Some(match key {
        "rl" => one(NAME, value, from),
        "reward_funcs" if !is_off(value) && from_own_file(from).is_none() => Near(
            Vec::new(),
            "`file` in [[objective.reward]] is imported for them: it has the functions and what they use, and neither loads nor \
             trains a model"
                .into(),
        ),
        "reward_funcs" | "environment_factory" | "tools" if !is_off(value) => READ,
        // Answers that follow one; here all are counted.
        "max_tool_calling_iterations" if value.is_u64() && Wanted::of(from).plays() => {
            Set(vec![("objective.environment.max_turns".into(), value.as_i64().map_or(MAX_TURNS, |turns| MAX_TURNS.min(turns + 1)).into())])
        }
        "reward_model_name_or_path" if !is_off(value) => {
            Lost("a function that asks the model gives its scores; `lora-train help preferences` has both".into())
        }
        "reward_weights" => READ,
        "per_device_train_batch_size" | "micro_batch_size" => {
            sizes.counted(value, "train.micro_batch_size", sizes.micro_batch)
        }
        "gradient_accumulation_steps" => {
            sizes.counted(value, "train.gradient_accumulation_steps", sizes.accumulation)
        }
        "steps_per_generation" | "generation_batch_size" if !is_off(value) => match sizes.reuse {
            Some(1) => Nothing,
            Some(times) => Set(vec![("objective.steps_per_generation".into(), (times * sizes.accumulation).into())]),
            None => Lost("here it is a multiple of train.gradient_accumulation_steps".into()),
        },
        // Without such use a token is as likely as when it was written.
        "epsilon" | "epsilon_high" | "delta" | "vespo_k_pos" | "vespo_lambda_pos" | "vespo_k_neg" | "vespo_lambda_neg"
        | "off_policy_mask_threshold"
            if !sizes.reuses(from) =>
        {
            Nothing
        }
        "scale_rewards" if value.is_boolean() => {
            Set(vec![("objective.scale_rewards".into(), if value == true { "group" } else { "none" }.into())])
        }
        "max_prompt_length" if value.is_u64() => {
            let answer = number(from, "max_completion_length").unwrap_or(MAX_COMPLETION_LENGTH);
            let length = value.as_i64().unwrap_or(0) + answer;
            let difference = "a longer prompt is cut at its start there; here it shortens its answer, or is left out";
            Near(vec![("data.max_length".into(), length.into())], difference.into())
        }
        "repetition_penalty" if is_default(1.0) => Nothing,
        "repetition_penalty" => Lost("answers are drawn from what the model says; this changes it".into()),
        "top_k" if is_off(value) || is_default(-1.0) => Nothing,
        "use_bias_correction_kl" if value == false => Lost("the divergence counts by the ratio here".into()),
        "sync_ref_model" => lost("the reference stays the base"),
        "use_bias_correction_kl"
        | "max_tool_calling_iterations"
        | "ref_model_mixup_alpha"
        | "ref_model_sync_steps"
        | "log_completions"
        | "num_completions_to_print"
        | "shuffle_dataset"
        | "use_liger_kernel"
        | "use_liger_loss"
        | "ds3_gather_for_generation" => Nothing,
        // Answers are written by the model in training.
        key if key == "use_vllm" || key.starts_with("vllm") => Nothing,
        "generation_kwargs" | "chat_template_kwargs" | "rollout_func" | "reward_processing_classes" => {
            lost("there is no such key here")
        }
        _ => return None,
    })
}

const NAME: &str = "objective.name";

/// The file of functions that are in none.
const REWARDS_FILE: &str = "rewards.py";

/// Most answers of an episode here.
const MAX_TURNS: i64 = 1024;

/// TRL's default.
const MAX_COMPLETION_LENGTH: i64 = 512;

/// What TRL does by default, and rewards in place of its functions.
pub(super) fn fill(from: &Foreign, draft: &mut Draft) {
    let (sizes, comment) = (Sizes::of(from), "TRL's default");
    if draft.get(NAME).is_none() {
        draft.set(NAME, "grpo", "a configuration with rewards is taken for one of it");
    }
    if from.trainer != Trainer::Axolotl && draft.get("train.micro_batch_size").is_none() {
        draft.set("train.micro_batch_size", sizes.micro_batch, format!("{comment}, in prompts"));
    }
    if draft.get("objective.max_completion_length").is_none() {
        draft.set("objective.max_completion_length", MAX_COMPLETION_LENGTH, comment);
    }
    let own = from_own_file(from);
    let wanted = Wanted::of(from);
    // Functions that judge environments are called where these are.
    let file = own.filter(|_| wanted.scores.is_empty()).unwrap_or_else(|| REWARDS_FILE.into());
    let of_module =
        |module: &str| if module.is_empty() { file.clone() } else { format!("{}.py", module.replace('.', "/")) };
    // Those of one file are one section.
    let mut sections: Vec<(String, Vec<toml::Value>, Vec<toml::Value>)> = Vec::new();
    for (name, weight) in &wanted.rewards {
        let (module, function) = name.rsplit_once(['.', '/']).unwrap_or(("", name));
        let file = of_module(module);
        let at = sections.iter().position(|(other, ..)| *other == file).unwrap_or_else(|| {
            sections.push((file, Vec::new(), Vec::new()));
            sections.len() - 1
        });
        sections[at].1.push(function.into());
        sections[at].2.extend(weight.map(toml::Value::Float));
    }
    let of_file = sections.iter().find(|(name, ..)| *name == file).map_or(&[][..], |(_, functions, _)| functions);
    let to_write = "TO WRITE: these functions, or choose a rule in place of them";
    let (text, judged) = wanted.written(from, of_file.iter().filter_map(toml::Value::as_str)).unzip();
    let comment = match text {
        _ if Path::new(&file).exists() => "",
        Some(text) if file == REWARDS_FILE => {
            draft.files.push((file.clone(), text));
            "the functions of the program, with what they use: look it over"
        }
        _ => to_write,
    };
    for (index, (of_section, functions, weights)) in sections.into_iter().enumerate() {
        let key = |key: &str| format!("objective.reward.{index}.{key}");
        let comment = match &of_section {
            own if *own == file => comment,
            other if Path::new(other).exists() => "",
            _ => to_write,
        };
        draft.set(key("kind"), "python", "");
        draft.set(key("file"), of_section, comment);
        if weights.len() == functions.len() {
            draft.set(key("weights"), toml::Value::Array(weights), "reward_weights");
        }
        draft.set(key("functions"), toml::Value::Array(functions), "reward_funcs");
    }
    let comment = if comment == to_write { "TO WRITE: the class and the tools" } else { comment };
    wanted.play((file, comment), judged.flatten(), draft);
}

/// What a program gives its trainer of its own.
struct Wanted<'f> {
    /// Functions that judge answers, with weights.
    rewards: Vec<(String, Option<f64>)>,
    /// Those that judge environments.
    scores: Vec<(String, Option<f64>, JudgeOfEnvironments)>,
    /// The class of these.
    class: Option<&'f str>,
    tools: Vec<&'f str>,
}

impl<'f> Wanted<'f> {
    fn of(from: &'f Foreign) -> Self {
        let names = |key: &str| match value(from, key) {
            Some(Value::String(name)) => vec![name.as_str()],
            Some(Value::Array(names)) => names.iter().filter_map(Value::as_str).collect(),
            _ => Vec::new(),
        };
        let (class, functions) = (names("environment_factory").first().copied(), names("reward_funcs"));
        let weights = value(from, "reward_weights").and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
        let name = |index: usize| {
            functions.get(index).map_or_else(|| format!("reward_func_{}", index + 1), |name| (*name).to_owned())
        };
        let num_rewards = functions.len().max(weights.len()).max(usize::from(class.is_none()));
        let mut wanted = Self { rewards: Vec::new(), scores: Vec::new(), class, tools: names("tools") };
        let program = class.and(from.said.program.as_deref());
        for (index, name) in (0..num_rewards).map(|index| (index, name(index))) {
            let weight = weights.get(index).and_then(Value::as_f64);
            match program.and_then(|program| judge_of_environments(program, &name)) {
                Some(judge) => wanted.scores.push((name, weight, judge)),
                None => wanted.rewards.push((name, weight)),
            }
        }
        wanted
    }

    /// Whether there are episodes.
    fn plays(&self) -> bool {
        self.class.is_some() || !self.tools.is_empty()
    }

    /// A file of these and of functions that judge answers, with what they use, and the class in it that calls what judges
    /// environments, if all of that can be called.
    fn written<'n>(
        &'n self,
        from: &Foreign,
        functions: impl Iterator<Item = &'n str>,
    ) -> Option<(String, Option<String>)> {
        let scores = self.scores.iter().map(|(name, ..)| name.as_str());
        let names: Vec<&str> = functions.chain(scores).chain(self.class).chain(self.tools.iter().copied()).collect();
        let (text, absent) = functions_of(from.said.program.as_ref()?, &names)?;
        let absent = absent
            .iter()
            .map(|name| format!("# TO WRITE: {name}, which something made that loads or trains a model.\n"));
        let text = absent.collect::<String>() + &text;
        let own = text.contains("def get_reward(").then(|| Some("(1.0, super().get_reward())".to_owned()));
        let weighed = |(_, weight, judge): &(String, Option<f64>, JudgeOfEnvironments)| match judge {
            JudgeOfEnvironments::Called(call) => Some(format!("({:?}, {call})", weight.unwrap_or(1.0))),
            JudgeOfEnvironments::NotCalled => None,
        };
        let weighed: Option<Vec<String>> = own.into_iter().chain(self.scores.iter().map(weighed)).collect();
        let is_class = |class: &&str| text.lines().any(|line| line.starts_with(&format!("class {class}")));
        let judged = weighed.filter(|_| !self.scores.is_empty()).zip(self.class.filter(is_class));
        let Some((weighed, class)) = judged else { return Some((text, None)) };
        let (name, weighed) = (format!("Judged{class}"), weighed.join(", "));
        let class = format!(
            "\n\nclass {name}({class}):\n    def get_reward(self):\n        weighed = [{weighed}]\n        \
             return sum(weight * score for weight, score in weighed if score is not None)\n"
        );
        Some((text + &class, Some(name)))
    }

    /// Episodes with the class, or the one that calls what judges it, and the tools of a file.
    fn play(&self, (file, comment): (String, &str), judged: Option<String>, draft: &mut Draft) {
        if !self.plays() {
            return;
        }
        let key = |key: &str| format!("objective.environment.{key}");
        draft.set(key("python"), file, comment);
        let is_judged = judged.is_some() || self.scores.is_empty();
        if let Some(class) = judged.or(self.class.map(str::to_owned)) {
            let names: Vec<_> = self.scores.iter().map(|(name, ..)| name.as_str()).collect();
            let to_write = format!("TO WRITE: its get_reward(), from what {} say of it", names.join(" and "));
            draft.set(key("class"), class, if is_judged { "environment_factory" } else { &to_write });
        }
        draft.has_mistakes |= !is_judged;
        if !self.tools.is_empty() {
            draft.set(
                key("tools"),
                self.tools.iter().map(|name| (*name).into()).collect::<Vec<toml::Value>>(),
                "tools",
            );
        }
        if draft.get(&key("max_turns")).is_none() {
            draft.set(key("max_turns"), MAX_TURNS, "TRL's default is no limit");
        }
    }
}

/// The program itself, where it has the functions and does nothing more when it is imported.
fn from_own_file(from: &Foreign) -> Option<String> {
    let is_program = from.path.extension().is_some_and(|extension| extension == "py");
    let text = is_program.then(|| std::fs::read_to_string(&from.path).ok()).flatten()?;
    let is_guarded = text.lines().any(|line| line.starts_with("if __name__ =="));
    is_guarded.then(|| from.path.display().to_string())
}

fn value<'f>(from: &'f Foreign, key: &str) -> Option<&'f Value> {
    from.get(key).or_else(|| from.get(&format!("trl.{key}"))).filter(|value| !value.is_null())
}

fn number(from: &Foreign, key: &str) -> Option<i64> {
    value(from, key)?.as_i64().filter(|number| *number > 0)
}

/// Sizes of a step: answers there, prompts here.
struct Sizes {
    micro_batch: i64,
    accumulation: i64,
    /// Whether their answers are those of whole prompts.
    is_whole: bool,
    /// For how many steps answers are written together, if that is whole steps.
    reuse: Option<i64>,
}

impl Sizes {
    fn of(from: &Foreign) -> Self {
        let default = if from.trainer == Trainer::Axolotl { 1 } else { 8 };
        let answers = number(from, "per_device_train_batch_size").or_else(|| number(from, "micro_batch_size"));
        let (answers, accumulation) =
            (answers.unwrap_or(default), number(from, "gradient_accumulation_steps").unwrap_or(1));
        let group = number(from, "num_generations").unwrap_or(8);
        let of_step = answers * accumulation;
        let micro_batch = if answers % group == 0 { answers / group } else { 1 };
        let (together, of_one) = match (number(from, "steps_per_generation"), number(from, "generation_batch_size")) {
            (Some(steps), _) => (steps, accumulation),
            (None, Some(together)) => (together, of_step),
            (None, None) => (1, 1),
        };
        Self {
            micro_batch,
            accumulation: (of_step / (micro_batch * group)).max(1),
            is_whole: of_step % group == 0,
            // Answers that are written in the middle of a step are those of the same model.
            reuse: if of_one % together == 0 {
                Some(1)
            } else {
                Some(together / of_one).filter(|_| together % of_one == 0)
            },
        }
    }

    fn reuses(&self, from: &Foreign) -> bool {
        self.reuse != Some(1) || number(from, "num_iterations").is_some_and(|iterations| iterations > 1)
    }

    /// A size, where `theirs` counts answers.
    fn counted(&self, theirs: &Value, key: &str, ours: i64) -> Meaning {
        let settings = vec![(key.to_owned(), ours.into())];
        match self.is_whole {
            _ if theirs.is_null() => Nothing,
            true if theirs.as_i64() == Some(ours) => Set(settings),
            true => Near(settings, "answers there, prompts here".into()),
            false => {
                Near(settings, "answers there, on several devices; prompts here: what a step has may differ".into())
            }
        }
    }
}
