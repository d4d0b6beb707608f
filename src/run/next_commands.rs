//! What to do with a run that has finished: commands to paste into a shell.

use super::dir::RunDir;
use crate::util::text::quoted;

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
