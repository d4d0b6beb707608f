//! What to do with a run that has finished: commands to paste into a shell.

use std::collections::BTreeSet;

use super::dir::RunDir;
use crate::config::LoraConfig;
use crate::lora::targets::{AdapterShape, Selection, expert_parameter};
use crate::spec::{ExpertForm, ModelConfig};
use crate::util::text::quoted;

/// Beginnings of the types of models whose experts vLLM has joined, and whose adapters it takes so.
const JOINED_IN_VLLM: [&str; 3] = ["gpt_oss", "qwen3_5_moe", "qwen3_vl_moe"];

/// Ranks that vLLM serves.
const VLLM_RANKS: [usize; 8] = [8, 16, 32, 64, 128, 256, 320, 512];
/// The highest rank that vLLM serves unless it is asked for more.
const VLLM_DEFAULT_RANK: usize = 16;

/// The adapter of a finished run, the options with which vLLM serves it, if it does, and the commands that use it. `base` is
/// the user's name of the model; `is_gguf`: it is a GGUF file, or the run trained for one; `is_plain`: its layers have one rank and
/// one scale; `longer` continues the run with more steps, if it can be continued.
pub(super) fn next_commands(
    dir: &RunDir,
    base: &str,
    is_gguf: bool,
    (vllm, is_plain): (Option<&str>, bool),
    longer: Option<&str>,
) -> String {
    let path = dir.path().display().to_string();
    let path = path.trim_end_matches('/');
    let [run, adapter, merged, gguf] =
        [path, &format!("{path}/adapter"), &format!("{path}-merged"), &format!("{path}.gguf")].map(quoted);
    let name = dir.path().file_name().map_or_else(|| "mine".into(), |name| name.to_string_lossy());
    let plain = format!("{path}-plain");
    let served = if is_plain { format!("{path}/adapter") } else { plain.clone() };
    let module = quoted(&format!("{name}={served}"));
    // vLLM, SGLang and Ollama multiply all by `lora_alpha / r`.
    let export = format!("\n            lora-train export --plain {run} {}   # of one rank and scale", quoted(&plain));
    let export = if is_plain { String::new() } else { export };
    let base = quoted(base);
    let whole = format!("lora-train merge {run} --out {gguf} && llama-cli -m {gguf}");
    let elsewhere = match vllm {
        Some(_) if is_gguf => {
            format!("\n            lora-train merge {run} --adapter-only --out {gguf}   # llama-cli --lora {gguf}")
        }
        None if is_gguf => format!("\n  merge it  {whole}"),
        _ => {
            let serve =
                |more| format!("{export}\n            vllm serve {base} --enable-lora{more} --lora-modules {module}");
            let serve = vllm.map(serve).unwrap_or_default();
            format!("{serve}\n  merge it  lora-train merge {run} --out {merged}\n            {whole}")
        }
    };
    let train_on = train_on(longer);
    format!(
        "adapter: {adapter}\n  try it    lora-train chat {run}\n  serve it  lora-train serve {run}{elsewhere}{train_on}"
    )
}

/// The same of a run whose model scores texts.
pub(super) fn next_scores(dir: &RunDir, longer: Option<&str>) -> String {
    let path = dir.path().display().to_string();
    let [run, adapter] = [path.trim_end_matches('/'), &format!("{path}/adapter")].map(quoted);
    let train_on = train_on(longer);
    format!(
        "adapter: {adapter}\n  try it    lora-train eval {run} --data PAIRS.jsonl --answers scores.jsonl\n  \
         serve it  lora-train serve {run}   # POST /v1/score{train_on}"
    )
}

/// The highest rank of a matrix in an adapter's file, where gate and up of joined experts are one.
pub(crate) fn highest_rank(config: &ModelConfig, selection: &Selection) -> usize {
    let of = |shape: AdapterShape| {
        let form = config.expert_form();
        let has_both = form.is_joined() && form != ExpertForm::Ungated;
        let is_joined = shape.num_experts.is_some() && has_both;
        if is_joined { 2 * shape.r } else { shape.r }
    };
    selection.iter().map(|(.., shape)| of(shape)).max().unwrap_or_default()
}

/// What servers do with adapters on experts that are joined in the file, where they do not take them as they are. vLLM has joined
/// experts in its classes of some models, and then needs both of their parameters.
pub(crate) fn about_experts(config: &ModelConfig, selection: &Selection) -> Option<String> {
    if !selection.adapts_experts() || !config.expert_form().is_joined() {
        return None;
    }
    let adapted: Vec<String> = selection.adapted_modules(config).map(|(module, ..)| module).collect();
    let parameters: BTreeSet<String> = adapted.iter().filter_map(|module| expert_parameter(module)).collect();
    let has = |name: &str| parameters.iter().any(|parameter| parameter.ends_with(name));
    let takes_joined = JOINED_IN_VLLM.iter().any(|model_type| config.model_type.starts_with(model_type));
    let vllm = match (takes_joined, has("gate_up_proj") && has("down_proj")) {
        (true, true) => "",
        (true, false) => "vLLM stops at experts with an adapter on gate and up or on down alone; ",
        (false, _) => "vLLM leaves them out, and does not say so, where its class has experts one by one; ",
    };
    Some(format!(
        "adapters on experts are joined in the file: {vllm}SGLang leaves them out, and says so with `--lora-strict-loading` \
         alone; llama.cpp's converter does not know them, `merge --adapter-only` writes them for it"
    ))
}

/// What servers refuse of an adapter, or read otherwise than it was trained, each with the way out. `run` is its name on the command
/// line; `has_more`: it has trained more than A and B; `experts`: [`about_experts`].
pub(crate) fn about_servers(lora: &LoraConfig, run: &str, has_more: bool, experts: Option<String>) -> Vec<String> {
    let run = quoted(run);
    let plain = format!("`lora-train export --plain {run} DIR` writes one that all of them read right");
    let mut lines = Vec::new();
    if lora.use_dora || has_more {
        let what = if lora.use_dora { "with `use_dora`" } else { "with weights that were trained as a whole" };
        lines.push(format!("vLLM and llama.cpp refuse an adapter {what}\n  hint: `lora-train merge {run} --out DIR`"));
    } else if !lora.has_one_scale() {
        lines.push(format!(
            "vLLM and Ollama give all layers one scale, and this adapter has several, which they do not say\n  hint: {plain}"
        ));
    } else if lora.use_rslora {
        lines.push(format!(
            "Ollama and llama.cpp's converter do not read `use_rslora`, and do not say so\n  hint: {plain}"
        ));
    }
    lines.extend(experts.map(|about| format!("{about}\n  hint: `lora-train merge {run} --out DIR`")));
    lines.into_iter().map(|line| format!("note: {line}")).collect()
}

fn train_on(longer: Option<&str>) -> String {
    longer.map(|longer| format!("\n  train on  {longer}")).unwrap_or_default()
}

/// The options with which vLLM serves an adapter of this rank; `None` for one with more than A and B, which it does not serve.
pub(crate) fn vllm_options(rank: usize, has_more: bool) -> Option<String> {
    let more = VLLM_RANKS.iter().find(|&&served| served >= rank && rank > VLLM_DEFAULT_RANK);
    (!has_more).then(|| more.map(|rank| format!(" --max-lora-rank {rank}")).unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::TargetModules;

    #[test]
    fn of_what_servers_refuse_or_misread_only_that_is_said_which_an_adapter_has() {
        let said = |lora: LoraConfig, has_more| about_servers(&lora, "a b", has_more, None).join("\n");
        assert_eq!(said(LoraConfig::default(), false), "");
        let rooted = LoraConfig { use_rslora: true, ..LoraConfig::default() };
        let text = said(rooted.clone(), false);
        assert!(text.contains("do not read `use_rslora`") && text.contains("export --plain 'a b' DIR"), "{text}");
        let text = said(LoraConfig { use_dora: true, ..rooted.clone() }, false);
        assert!(text.contains("refuse an adapter with `use_dora`\n  hint: `lora-train merge 'a b'"), "{text}");
        assert!(!text.contains("rslora"));
        assert!(said(rooted, true).contains("trained as a whole"));
    }

    #[test]
    fn of_joined_experts_it_is_said_which_server_leaves_them_out() {
        let about = |json: &str, targets: &[&str]| {
            let config = ModelConfig::from_json(json).unwrap();
            let names = targets.iter().map(ToString::to_string).collect();
            let target_modules = TargetModules::Names(names);
            let lora = LoraConfig { target_modules, expert_rank: Some(3), ..LoraConfig::default() };
            let selection = lora.select(&config).unwrap();
            (about_experts(&config, &selection).unwrap_or_default(), highest_rank(&config, &selection))
        };
        let gpt_oss = include_str!("../../tests/golden/gpt_oss/config.json");
        let both = ["experts.gate_up_proj", "experts.down_proj"];
        let (text, rank) = about(gpt_oss, &both);
        assert!(!text.contains("vLLM") && text.contains("SGLang leaves them out") && rank == 6, "{text}");
        assert!(about(gpt_oss, &both[1..]).0.contains(": vLLM stops at experts"));
        let (text, _) = about(include_str!("../../tests/golden/qwen2_moe/config.json"), &both);
        assert!(text.contains(": vLLM leaves them out"), "{text}");
        assert_eq!(about(include_str!("../../tests/golden/qwen3_moe/config.json"), &both), (String::new(), 3));
        // One scale of several ranks is what servers read.
        let ranks = [("q_proj".to_owned(), 4)].into_iter().collect();
        let lora = LoraConfig { r: 2, lora_alpha: 3.0, rank_pattern: ranks, ..LoraConfig::default() };
        assert!(!lora.has_one_scale());
        let alpha_pattern = [("q_proj".to_owned(), 6.0)].into_iter().collect();
        assert!(LoraConfig { alpha_pattern, ..lora }.has_one_scale());
    }

    #[test]
    fn the_next_commands_can_be_pasted_and_name_what_was_trained() {
        let folder = tempfile::tempdir().unwrap();
        let dir = RunDir::create(&folder.path().join("my run")).unwrap();
        let path = dir.path().display().to_string();
        let commands = |longer| next_commands(&dir, "owner/base", false, (Some(""), true), longer);
        assert!(!commands(None).contains("train on"));
        let text = commands(Some("lora-train r.toml --resume"));
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[0], format!("adapter: '{path}/adapter'"));
        assert_eq!(lines[1], format!("  try it    lora-train chat '{path}'"));
        let vllm = "vllm serve owner/base --enable-lora --lora-modules";
        assert_eq!(lines[3].trim(), format!("{vllm} 'my run={path}/adapter'"));
        assert_eq!(lines[4], format!("  merge it  lora-train merge '{path}' --out '{path}-merged'"));
        assert_eq!(
            lines[5].trim(),
            format!("lora-train merge '{path}' --out '{path}.gguf' && llama-cli -m '{path}.gguf'")
        );
        assert_eq!(lines[6], "  train on  lora-train r.toml --resume");
        let text = next_commands(&dir, "owner/base:Q4_0", true, (Some(""), true), None);
        assert!(text.contains("--adapter-only --out") && !text.contains("vllm") && !text.contains("merged"), "{text}");
        let of_rank =
            |rank, has_more| next_commands(&dir, "b", false, (vllm_options(rank, has_more).as_deref(), true), None);
        assert!(of_rank(17, false).contains("--enable-lora --max-lora-rank 32 --lora-modules"));
        assert!(!of_rank(17, true).contains("vllm") && of_rank(17, true).contains("-merged"));
        let text = next_commands(&dir, "b", false, (Some(""), false), None);
        assert!(text.contains(&format!("export --plain '{path}' '{path}-plain' ")), "{text}");
        assert!(text.contains(&format!("--lora-modules 'my run={path}-plain'\n")), "{text}");
        let text = next_commands(&dir, "owner/base:Q4_0", true, (None, true), None);
        assert!(!text.contains("--adapter-only") && text.contains("&& llama-cli -m"), "{text}");
    }
}
