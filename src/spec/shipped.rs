//! Shapes of well-known models, for a plan where the Hub cannot be asked.

/// The names of a shape on the Hub, after the owner, and its config.json.
type Shape = (&'static [&'static str], &'static str);

const SHAPES: &[Shape] = &[
    (&["Llama-3.1-8B", "Llama-3.1-8B-Instruct"], include_str!("../../configs/llama-3.1-8b.json")),
    (
        &["Llama-3.1-70B", "Llama-3.1-70B-Instruct", "Llama-3.3-70B-Instruct"],
        include_str!("../../configs/llama-3.1-70b.json"),
    ),
    (&["Llama-3.2-1B", "Llama-3.2-1B-Instruct"], include_str!("../../configs/llama-3.2-1b.json")),
    (&["Llama-3.2-3B", "Llama-3.2-3B-Instruct"], include_str!("../../configs/llama-3.2-3b.json")),
    (&["Mistral-7B-v0.1", "Mistral-7B-Instruct-v0.1"], include_str!("../../configs/mistral-7b-v0.1.json")),
    (&["Qwen2.5-0.5B", "Qwen2.5-0.5B-Instruct"], include_str!("../../configs/qwen2.5-0.5b.json")),
    (&["Qwen2.5-7B", "Qwen2.5-7B-Instruct"], include_str!("../../configs/qwen2.5-7b.json")),
    (&["Qwen3-0.6B", "Qwen3-0.6B-Base"], include_str!("../../configs/qwen3-0.6b.json")),
    (&["Qwen3-8B", "Qwen3-8B-Base"], include_str!("../../configs/qwen3-8b.json")),
    (&["Qwen3.5-0.8B", "Qwen3.5-0.8B-Base"], include_str!("../../configs/qwen3.5-0.8b.json")),
    (&["Qwen3.5-4B", "Qwen3.5-4B-Base"], include_str!("../../configs/qwen3.5-4b.json")),
    (&["gemma-2-2b", "gemma-2-2b-it"], include_str!("../../configs/gemma-2-2b.json")),
    (&["gemma-2-9b", "gemma-2-9b-it"], include_str!("../../configs/gemma-2-9b.json")),
    (&["gemma-3-1b-pt", "gemma-3-1b-it"], include_str!("../../configs/gemma-3-1b.json")),
    (&["gemma-3-4b-pt", "gemma-3-4b-it"], include_str!("../../configs/gemma-3-4b.json")),
    (&["gemma-4-E2B", "gemma-4-E2B-it"], include_str!("../../configs/gemma-4-e2b.json")),
    (&["gemma-4-E4B", "gemma-4-E4B-it"], include_str!("../../configs/gemma-4-e4b.json")),
    (&["gemma-4-26B-A4B", "gemma-4-26B-A4B-it"], include_str!("../../configs/gemma-4-26b-a4b.json")),
    (&["gemma-4-31B", "gemma-4-31B-it"], include_str!("../../configs/gemma-4-31b.json")),
    (&["SmolLM3-3B", "SmolLM3-3B-Base"], include_str!("../../configs/smollm3-3b.json")),
    (&["OLMo-2-1124-7B", "OLMo-2-1124-7B-Instruct"], include_str!("../../configs/olmo-2-7b.json")),
    (&["granite-3.3-2b-base", "granite-3.3-2b-instruct"], include_str!("../../configs/granite-3.3-2b.json")),
    (&["Mistral-Nemo-Base-2407", "Mistral-Nemo-Instruct-2407"], include_str!("../../configs/mistral-nemo-12b.json")),
    (
        &["Mistral-Small-24B-Base-2501", "Mistral-Small-24B-Instruct-2501"],
        include_str!("../../configs/mistral-small-24b-2501.json"),
    ),
    (&["Ministral-3-3B-Base-2512", "Ministral-3-3B-Instruct-2512"], include_str!("../../configs/ministral-3-3b.json")),
    (&["Phi-3-mini-4k-instruct"], include_str!("../../configs/phi-3-mini-4k.json")),
    (&["Nemotron-Mini-4B-Instruct"], include_str!("../../configs/nemotron-mini-4b.json")),
    (&["LFM2-1.2B"], include_str!("../../configs/lfm2-1.2b.json")),
    (&["glm-4-9b-hf", "glm-4-9b-chat-hf"], include_str!("../../configs/glm-4-9b.json")),
    (&["Phi-3.5-mini-instruct"], include_str!("../../configs/phi-3.5-mini.json")),
    (&["Phi-4-mini-instruct"], include_str!("../../configs/phi-4-mini.json")),
    (&["phi-4"], include_str!("../../configs/phi-4.json")),
    (&["GLM-4-9B-0414"], include_str!("../../configs/glm-4-9b-0414.json")),
    (
        &["Qwen3-30B-A3B", "Qwen3-30B-A3B-Base", "Qwen3-30B-A3B-Instruct-2507", "Qwen3-Coder-30B-A3B-Instruct"],
        include_str!("../../configs/qwen3-30b-a3b.json"),
    ),
    (&["Qwen1.5-MoE-A2.7B", "Qwen1.5-MoE-A2.7B-Chat"], include_str!("../../configs/qwen1.5-moe-a2.7b.json")),
    (&["Mixtral-8x7B-v0.1", "Mixtral-8x7B-Instruct-v0.1"], include_str!("../../configs/mixtral-8x7b.json")),
    (&["gpt-oss-20b"], include_str!("../../configs/gpt-oss-20b.json")),
    (&["Qwen3.5-35B-A3B", "Qwen3.5-35B-A3B-Base"], include_str!("../../configs/qwen3.5-35b-a3b.json")),
    (
        &["Qwen3-Next-80B-A3B-Instruct", "Qwen3-Next-80B-A3B-Thinking", "Qwen3-Coder-Next"],
        include_str!("../../configs/qwen3-next-80b-a3b.json"),
    ),
    (&["SmolLM2-135M", "SmolLM2-135M-Instruct"], include_str!("../../configs/smollm2-135m.json")),
    (&["TinyLlama-1.1B-Chat-v1.0"], include_str!("../../configs/tinyllama-1.1b.json")),
];

/// The config.json of a repository of the Hub, by its name alone: copies by other owners have the same shape.
#[must_use]
pub fn shipped_config(repository: &str) -> Option<&'static str> {
    let (_, name) = repository.split_once('/')?;
    let is_named = |names: &[&str]| names.iter().any(|known| known.eq_ignore_ascii_case(name));
    SHAPES.iter().find(|(names, _)| is_named(names)).map(|(_, json)| *json)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::ModelConfig;

    #[test]
    fn every_shipped_shape_is_a_model_found_by_its_name_on_the_hub() {
        for (names, json) in SHAPES {
            assert!(ModelConfig::from_json(json).is_ok(), "{names:?}");
            assert!(names.iter().all(|name| shipped_config(&format!("owner/{name}")) == Some(*json)), "{names:?}");
        }
        let parameters = |id: &str| ModelConfig::from_json(shipped_config(id).unwrap()).unwrap().num_parameters();
        // As on the models' pages.
        assert_eq!(parameters("meta-llama/Llama-3.2-1B-Instruct"), 1_235_814_400);
        assert_eq!(parameters("qwen/qwen3-0.6b"), 596_049_920);
        assert_eq!(parameters("meta-llama/Llama-3.1-70B"), 70_553_706_496);
        for id in ["Llama-3.2-1B", "meta-llama/Llama-3.2-1B-Vision", "meta-llama/Llama-3.2"] {
            assert_eq!(shipped_config(id), None, "{id}");
        }
    }
}
