//! What configs are read as, and which are refused.

use super::*;
use crate::spec::{
    Block, Choice, DeltaHeads, ExpertGroups, HEAD_BIAS, LayerInputs, NormKind, Probabilities, Projections,
    QueryKeyNorms, Role, RopePairs, RopeScaling, StateHeads, name_alone, short_name,
};

const BASE: &str = r#"{"model_type": "llama", "vocab_size": 100, "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 2, "num_attention_heads": 4"#;

fn with(more: &str) -> Result<ModelConfig, Problems> {
    ModelConfig::from_json(&format!("{BASE}{more}}}"))
}

fn refusal(more: &str) -> String {
    with(more).unwrap_err().to_string()
}

fn windows_of(config: &ModelConfig) -> Vec<Option<usize>> {
    config.blocks.iter().map(|block| block.attention().unwrap().heads.window).collect()
}

fn num_kv_heads(config: &ModelConfig) -> usize {
    config.blocks[0].attention().unwrap().heads.num_kv_heads
}

/// The linear layers of the first block that add a bias.
fn biases_of(config: &ModelConfig) -> Vec<&str> {
    config.blocks[0].sites.iter().filter(|site| site.has_bias).map(|site| &*site.name).collect()
}

#[test]
fn a_silent_config_has_the_defaults_of_transformers() {
    let config = with("").unwrap();
    let heads = config.blocks[0].attention().unwrap().heads;
    assert_eq!((heads.num_kv_heads, heads.head_dim, config.max_position_embeddings), (4, 16, 2048));
    assert_eq!((config.ropes[0].theta, config.rms_norm_eps, config.initializer_range), (10_000.0, 1e-6, 0.02));
    assert_eq!((config.bos_token_id, &config.eos_token_ids[..]), (Some(1), &[2][..]));
    assert_eq!((&config.ropes[0].scaling, config.tie_word_embeddings), (&None, false));
    assert_eq!((windows_of(&config), biases_of(&config)), (vec![None; 2], vec![]));
    assert_eq!(config.blocks[0].attention().unwrap().query_key_norms, None);
}

#[test]
fn mistral_has_its_own_defaults_and_null_turns_the_window_off() {
    let mistral = |more: &str| {
        let text = format!("{BASE}{more}}}").replace("\"llama\"", "\"mistral\"").replace("heads\": 4", "heads\": 16");
        ModelConfig::from_json(&text).unwrap()
    };
    let config = mistral("");
    assert_eq!((num_kv_heads(&config), windows_of(&config)), (8, vec![Some(4096); 2]));
    assert_eq!(config.max_position_embeddings, 131_072);
    let config = mistral(r#", "sliding_window": null, "num_key_value_heads": null"#);
    assert_eq!((num_kv_heads(&config), windows_of(&config)), (16, vec![None; 2]));
}

#[test]
fn qwen_has_biases_norms_of_heads_and_windows_where_its_config_says() {
    let qwen = |kind: &str, more: &str| {
        let text = format!("{BASE}, \"num_key_value_heads\": 2{more}}}").replace("\"llama\"", &format!("\"{kind}\""));
        ModelConfig::from_json(&text)
    };
    let config = qwen("qwen2", "").unwrap();
    assert_eq!(biases_of(&config), ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]);
    let attention = config.blocks[0].attention().unwrap();
    assert_eq!((attention.query_key_norms, attention.heads.head_dim, windows_of(&config)), (None, 16, vec![None; 2]));
    assert_eq!((config.bos_token_id, config.eos_token_ids), (None, vec![]));
    let config = qwen("qwen3", "").unwrap();
    let attention = config.blocks[0].attention().unwrap();
    assert_eq!((biases_of(&config), attention.heads.head_dim), (vec![], 128));
    assert_eq!(attention.query_key_norms, Some(QueryKeyNorms::Heads));
    let windows = |more: &str| windows_of(&qwen("qwen2", &format!(r#", "use_sliding_window": true{more}"#)).unwrap());
    assert_eq!(windows(""), [None, None]);
    assert_eq!(windows(r#", "max_window_layers": 1"#), [None, Some(4096)]);
    assert_eq!(
        windows(r#", "sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"]"#),
        [Some(7), None]
    );
    let refused = qwen("qwen2", r#", "attention_bias": true"#).unwrap_err().to_string();
    assert!(refused.contains("`attention_bias` = true is not supported for `qwen2`"), "{refused}");
}

#[test]
fn rope_of_transformers_4_and_5_read_the_same() {
    let inner = r#""factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192"#;
    let old = with(&format!(r#", "rope_theta": 5e5, "rope_scaling": {{"type": "llama3", {inner}}}"#)).unwrap();
    let new = with(&format!(r#", "rope_parameters": {{"rope_theta": 5e5, "rope_type": "llama3", {inner}}}"#)).unwrap();
    assert_eq!(old, new);
    assert_eq!(old.ropes[0].theta, 5e5);
    let expected = RopeScaling::Llama3 {
        factor: 32.0,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_max_position_embeddings: 8192,
    };
    assert_eq!(old.ropes[0].scaling, Some(expected));
    let plain = with(r#", "rope_parameters": {"rope_theta": 2e4, "rope_type": "default"}"#).unwrap();
    assert_eq!((plain.ropes[0].theta, &plain.ropes[0].scaling), (2e4, &None));
    let linear = with(r#", "rope_scaling": {"type": "linear", "factor": 2}"#).unwrap();
    assert_eq!(linear.ropes[0].scaling, Some(RopeScaling::Linear { factor: 2.0 }));
}

#[test]
fn rope_kinds_that_are_not_implemented_are_refused_by_name() {
    for kind in ["ntk", "proportional"] {
        let message = refusal(&format!(r#", "rope_scaling": {{"rope_type": "{kind}", "factor": 2.0}}"#));
        assert!(message.contains(&format!("`rope_scaling.rope_type` = \"{kind}\" is not supported")), "{message}");
    }
    assert!(refusal(r#", "rope_scaling": {"rope_type": "linear", "type": "llama3"}"#).contains("differ"));
    assert!(refusal(r#", "rope_theta": 1e4, "rope_parameters": {"rope_theta": 5e5}"#).contains("differ"));
    assert!(refusal(r#", "rope_scaling": {"type": "linear"}"#).contains("`rope_scaling.factor` is missing"));
}

#[test]
fn end_tokens_are_a_number_a_list_or_null() {
    assert_eq!(with(r#", "eos_token_id": [7, 9]"#).unwrap().eos_token_ids, [7, 9]);
    let config = with(r#", "eos_token_id": null, "bos_token_id": null"#).unwrap();
    assert_eq!((config.eos_token_ids, config.bos_token_id), (vec![], None));
    assert!(refusal(r#", "eos_token_id": 100"#).contains("`eos_token_id` = 100, expected a token id below"));
}

#[test]
fn mixtures_of_experts_are_read_by_the_keys_of_their_families() {
    let read = |text: &str| {
        let common = r#""vocab_size": 9, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
                        "num_attention_heads": 4, "num_key_value_heads": 2"#;
        ModelConfig::from_json(&format!("{{{common}, {text}}}"))
    };
    let qwen = |more: &str| {
        read(&format!(r#""model_type": "qwen3_moe", "num_experts": 6, "num_experts_per_tok": 2{more}"#)).unwrap()
    };
    let widths = |config: &ModelConfig| -> Vec<usize> {
        let width = |block: &Block| block.gated().map_or(0, |gated| gated.intermediate_size);
        config.blocks.iter().map(width).collect()
    };
    // Mixtures have no dense layer; the others are as wide as `intermediate_size`.
    assert_eq!(widths(&qwen("")), [0; 4]);
    let some = qwen(r#", "mlp_only_layers": [1], "moe_intermediate_size": 24, "norm_topk_prob": true"#);
    assert_eq!(widths(&some), [0, 96, 0, 0]);
    assert_eq!(widths(&qwen(r#", "decoder_sparse_step": 2"#)), [96, 0, 96, 0]);
    let mixture = some.blocks[0].mixture().unwrap();
    assert_eq!((mixture.experts.len(), mixture.num_per_token), (6, 2));
    assert_eq!(mixture.probabilities, Probabilities::OfChosen);
    assert_eq!(qwen("").blocks[0].mixture().unwrap().probabilities, Probabilities::OfAll);
    let site = |name: &str| some.blocks[0].sites.iter().find(|site| site.name == name).unwrap();
    assert_eq!(site("mlp.experts.5.down_proj").shape, [64, 24]);
    assert_eq!(site("mlp.experts.5.down_proj").num_active_weights(), 64.0 * 24.0 / 3.0);
    assert_eq!((site("mlp.gate").shape, site("mlp.gate").role), ([6, 64], Role::Router));

    let mixtral = read(r#""model_type": "mixtral", "num_local_experts": 3"#).unwrap();
    let mixture = mixtral.blocks[3].mixture().unwrap();
    assert_eq!((mixture.experts.len(), mixture.probabilities), (3, Probabilities::OfChosen));
    assert_eq!(mixtral.blocks[3].sites[mixture.experts[2].down].name, "block_sparse_moe.experts.2.w2");
    let shared = read(r#""model_type": "qwen2_moe", "shared_expert_intermediate_size": 40"#).unwrap();
    let shared = (shared.blocks[0].mixture().unwrap().shared.clone().unwrap(), shared);
    assert_eq!(
        (shared.0.gated.intermediate_size, shared.1.blocks[0].sites[shared.0.gate.unwrap()].shape),
        (40, [1, 64])
    );

    let refused = |text: &str| read(text).unwrap_err().to_string();
    let more = refused(r#""model_type": "qwen3_moe", "num_experts": 2, "num_experts_per_tok": 3"#);
    assert!(more.contains("`num_experts_per_tok` = 3, but there are 2 experts"), "{more}");
    // The family's default is 8.
    assert!(refused(r#""model_type": "qwen3_moe", "num_experts": 4"#).contains("but there are 4 experts"));
    assert!(refused(r#""model_type": "gpt_oss""#).contains("`rope_parameters` is missing"));
    let ignored = r#""model_type": "qwen3_moe", "qkv_bias": false, "shared_expert_intermediate_size": 0"#;
    assert!(read(ignored).is_ok());
    for key in [r#""output_router_logits": true"#, r#""use_sliding_window": true"#, r#""mlp_only_layers": ["a"]"#] {
        let found = refused(&format!(r#""model_type": "qwen3_moe", {key}"#));
        assert!(found.contains(key.split('"').nth(1).unwrap()), "{found}");
    }
}

#[test]
fn other_families_and_heads_are_refused_with_the_list_of_known_ones() {
    let refused =
        |name: &str| ModelConfig::from_json(&format!(r#"{{"model_type": "{name}"}}"#)).unwrap_err().to_string();
    let expected =
        "= \"new\" is not supported, expected one of `llama`, `mistral`, `ministral3`, `qwen2`, `qwen3`, `qwen2_moe`";
    assert!(refused("new").contains(expected), "{}", refused("new"));
    for (name, lacking) in [
        ("kimi_linear", "it needs linear attention of another kind"),
        ("dbrx", "it needs a mixture of experts of another kind"),
        ("jamba", "it needs state spaces of another kind and a mixture of experts"),
        ("deepseek_v32", "it needs latent attention to chosen tokens"),
        ("falcon_mamba", "it needs state spaces of another kind"),
        ("mpt", "it needs LayerNorm and scores that fall with distance"),
        ("aya_vision", "it reads images; of such models only the text part is trained here"),
        ("bert", "it is an encoder, for embeddings and labels"),
        ("xglm", "it needs LayerNorm, and positions added to its embeddings"),
    ] {
        let expected = format!("= \"{name}\" is not supported: {lacking}");
        assert!(refused(name).contains(&expected), "{}", refused(name));
    }
    let around = |name: &str, text: &str| {
        let config = format!(r#"{{"model_type": "{name}", "text_config": {{"model_type": "{text}"}}}}"#);
        ModelConfig::from_json(&config).unwrap_err().to_string()
    };
    for name in ["aya_vision", "unknown_vl"] {
        let expected = "not supported: it stands around `cohere2`, which is trained here where that is saved by itself";
        assert!(around(name, "cohere2").contains(expected), "{}", around(name, "cohere2"));
    }
    assert!(around("paligemma", "gemma").contains("its answers see all of the image"));
    let nested = refusal(r#", "rope_parameters": {"full_attention": {"rope_type": "yarn", "factor": 4.0}}"#);
    assert!(nested.contains("`rope_parameters` differ by kind of layer"), "{nested}");
    assert!(ModelConfig::from_json("{}").unwrap_err().to_string().contains("`model_type` is missing"));
    assert!(ModelConfig::from_json("[]").unwrap_err().to_string().contains("not a JSON object"));
    assert!(ModelConfig::from_json("{").unwrap_err().to_string().contains("not valid JSON"));
    assert!(refusal(r#", "architectures": ["LlamaForSequenceClassification"]"#).contains("LlamaForCausalLM"));
}

#[test]
fn a_language_model_among_others_is_of_the_type_that_its_config_names_and_may_lie_beside_their_keys() {
    let shape = BASE.trim_start_matches(r#"{"model_type": "llama", "#);
    let read = |text: &str| ModelConfig::from_json(&format!("{{{text}}}"));
    let around = |kind: &str, inner: &str| {
        read(&format!(r#""model_type": "{kind}", "text_config": {{{inner}{shape}}}, "vision_config": {{}}"#))
    };
    let llava = around("llava", r#""model_type": "mistral", "num_key_value_heads": 2, "#).unwrap();
    assert_eq!((llava.model_type.as_str(), llava.nesting), ("mistral", Some("model.language_model.")));
    let smol = around("smolvlm", "").unwrap();
    assert_eq!(smol.module_name(1, 0), "model.text_model.layers.1.self_attn.q_proj");
    let flat = r#""rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}, "use_sliding_window": false"#;
    let flat = read(&format!(r#""model_type": "qwen2_vl", {shape}, "num_key_value_heads": 2, {flat}"#)).unwrap();
    assert_eq!((flat.model_type.as_str(), &flat.ropes[0].scaling), ("qwen2_vl_text", &None));
    assert_eq!(flat.module_name(0, 6), "model.language_model.layers.0.mlp.down_proj");
    let refused = around("llava", r#""model_type": "mamba", "#).unwrap_err().to_string();
    assert!(
        refused.contains("`text_config.model_type` = \"mamba\" is not supported: it needs state spaces"),
        "{refused}"
    );
}

#[test]
fn routers_have_sigmoids_biases_groups_and_shared_experts_and_first_layers_are_dense() {
    let read = |kind: &str, more: &str| {
        let text = format!("{BASE}, \"num_key_value_heads\": 2, {more}}}").replace("\"llama\"", &format!("\"{kind}\""));
        ModelConfig::from_json(&text)
    };
    let glm = r#""n_routed_experts": 6, "num_experts_per_tok": 2, "n_shared_experts": 2, "moe_intermediate_size": 24, "n_group": 3,
                 "topk_group": 2, "routed_scaling_factor": 2.5"#;
    let config = read("glm4_moe", glm).unwrap();
    let mixture = config.blocks[1].mixture().unwrap();
    assert!(config.blocks[0].mixture().is_none() && config.blocks[1].attention().unwrap().query_key_norms.is_none());
    let bias = Some("mlp.gate.e_score_correction_bias");
    assert_eq!(
        mixture.choice,
        Choice { bias, groups: Some(ExpertGroups { count: 3, num_kept: 2, num_best: 2 }), factor: 2.5 }
    );
    assert_eq!(mixture.probabilities, Probabilities::SigmoidsOfChosen(1e-20));
    let shared = mixture.shared.as_ref().unwrap();
    assert_eq!((shared.gate, shared.gated.intermediate_size), (None, 48));
    assert_eq!(config.blocks[1].sites[shared.gated.down].name, "mlp.shared_experts.down_proj");
    assert!(config.is_unused("model.layers.2.eh_proj.weight") && !config.is_unused("model.layers.1.mlp.gate.weight"));
    let ocr = ModelConfig::from_json(include_str!("../../../tests/golden/glm_ocr/config.json")).unwrap();
    assert!(ocr.is_unused("model.layers.2.eh_proj.weight"));
    let refused = read("glm4_moe", &glm.replace("\"n_group\": 3", "\"n_group\": 4")).unwrap_err().to_string();
    assert!(refused.contains("`n_group` = 4, of which 2 stay, does not divide 6 experts"), "{refused}");
    let ernie = r#""moe_num_experts": 4, "moe_k": 2, "moe_layer_start_index": 0, "moe_layer_end_index": 0"#;
    let ernie = read("ernie4_5_moe", ernie).unwrap();
    assert_eq!(ernie.blocks[0].mixture().unwrap().probabilities, Probabilities::OfChosen);
    assert!(ernie.blocks[1].mixture().is_none());
    let minimax = read("minimax_m2", r#""num_local_experts": 9, "rotary_dim": 8, "head_dim": 16"#).unwrap();
    assert_eq!((minimax.ropes[0].width, minimax.blocks[0].mixture().unwrap().experts.len()), (8, 9));
}

#[test]
fn latents_have_widths_norms_and_a_yarns_scale_and_flops_of_keys_and_values() {
    let read = |kind: &str, more: &str| {
        let text = format!("{BASE}, {more}}}").replace("\"llama\"", &format!("\"{kind}\""));
        ModelConfig::from_json(&text)
    };
    let experts = r#""n_routed_experts": 8, "n_shared_experts": 1, "moe_intermediate_size": 24"#;
    let yarn = r#""rope_scaling": {"type": "yarn", "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 64}"#;
    let config =
        read("deepseek_v3", &format!("{experts}, {yarn}, \"head_dim\": 7, \"num_key_value_heads\": null")).unwrap();
    let attention = config.blocks[0].attention().unwrap();
    let growth = 0.1 * 40_f64.ln() + 1.0;
    assert!((attention.heads.scale - growth * growth / 192_f64.sqrt()).abs() < 1e-12);
    let widths = (attention.heads.num_kv_heads, attention.heads.head_dim, attention.mean_heads().head_dim);
    assert_eq!(widths, (attention.heads.num_heads, 192, 160));
    assert_eq!((config.ropes[0].head_dim, config.ropes[0].pairs), (64, RopePairs::Neighbours));
    let names: Vec<_> = config.blocks[0].norms(64).collect();
    assert!(names.contains(&("self_attn.q_a_layernorm", 1536)) && names.contains(&("self_attn.kv_a_layernorm", 512)));
    assert!(config.blocks[0].mixture().is_none() && config.num_layers() < 4);
    let direct = read("youtu", r#""q_lora_rank": null, "rope_interleave": false"#).unwrap();
    let names: Vec<&str> = direct.blocks[0].sites.iter().map(|site| short_name(&site.name)).take(4).collect();
    assert_eq!(names, ["q_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]);
    assert_eq!(direct.ropes[0].pairs, RopePairs::Halves);
    let v2 = |more: &str| read("deepseek_v2", &format!("{experts}, \"n_group\": 4, \"topk_group\": 2{more}"));
    let choice = |config: ModelConfig| config.blocks[0].mixture().unwrap().choice.groups;
    assert_eq!(choice(v2("").unwrap()), None);
    let groups = Some(ExpertGroups { count: 4, num_kept: 2, num_best: 1 });
    assert_eq!(choice(v2(r#", "topk_method": "group_limited_greedy""#).unwrap()), groups);
    for (kind, more, expected) in [
        (
            "youtu",
            r#""v_head_dim": 193"#,
            "`v_head_dim` = 193, expected at most `qk_nope_head_dim` + `qk_rope_head_dim` = 192",
        ),
        ("youtu", r#""qk_rope_head_dim": 63"#, "`qk_rope_head_dim` = 63 is odd"),
        ("youtu", r#""num_key_value_heads": 1"#, "as many as of queries"),
        ("deepseek_v2", r#""topk_method": "noaux_tc""#, "`topk_method` = \"noaux_tc\" is not supported"),
        ("deepseek_v2", r#""norm_topk_prob": true"#, "`norm_topk_prob` = true is not supported"),
        ("glm4_moe_lite", r#""mlp_layer_types": ["dense"]"#, "\"dense\" or \"sparse\" for each of the"),
    ] {
        let refused = read(kind, more).unwrap_err().to_string();
        assert!(refused.contains(expected), "{refused}");
    }
}

/// [`BASE`] as a model of this type, and more.
fn read_as(kind: &str, more: &str) -> Result<ModelConfig, Problems> {
    let text = format!(r#"{BASE}, "num_key_value_heads": 2{more}}}"#).replace("\"llama\"", &format!("\"{kind}\""));
    ModelConfig::from_json(&text)
}

#[test]
fn what_families_have_beside_llamas_is_read() {
    let read = read_as;
    let ropes =
        |config: &ModelConfig| config.blocks.iter().map(|block| block.attention().unwrap().rope).collect::<Vec<_>>();
    // The biases of InternLM 3 and Seed-OSS go by keys of their own.
    let biases = biases_of(&read("internlm3", r#", "qkv_bias": true"#).unwrap()).len();
    assert_eq!((biases, biases_of(&read("internlm3", r#", "bias": true"#).unwrap()).len()), (3, 4));
    assert_eq!(biases_of(&read("seed_oss", r#", "attention_dropout": 0.1"#).unwrap()).len(), 3);
    assert!(read("qwen3", r#", "attention_dropout": 0.1"#).is_err());
    // The first of CWM's layers has no window.
    assert_eq!(windows_of(&read("cwm", r#", "rope_scaling": {"rope_type": "default"}"#).unwrap()), [None, Some(8192)]);
    let mixed = r#", "layer_types": ["sliding_attention", "full_attention"]"#;
    // OLMo 3 scales those of layers without a window.
    let yarn = r#", "rope_scaling": {"rope_type": "yarn", "factor": 4.0}, "rope_theta": 3e4"#;
    let olmo = read("olmo3", &format!("{yarn}{mixed}")).unwrap();
    assert_eq!((ropes(&olmo), olmo.ropes[1].theta), (vec![Some(1), Some(0)], 3e4));
    assert!(olmo.ropes[0].scaling.is_some() && olmo.ropes[1].scaling.is_none());
    let gemma = read("gemma", r#", "hidden_act": "gelu""#).unwrap();
    assert_eq!(gemma.blocks[0].gated().unwrap().activation, Activation::GeluTanh);
    let hybrid =
        r#", "num_local_experts": 0, "shared_intermediate_size": 40, "layer_types": ["attention", "attention"]"#;
    let granite = read("granitemoehybrid", hybrid).unwrap();
    assert_eq!((ropes(&granite), granite.blocks[0].gated().unwrap().intermediate_size), (vec![None; 2], 40));
    assert_eq!(granite.blocks[1].sites[4].name, "shared_mlp.input_linear");
    let experts = hybrid.replace("\"num_local_experts\": 0", "\"num_local_experts\": 4");
    let granite = read("granitemoehybrid", &experts).unwrap();
    let mixture = granite.blocks[0].mixture().unwrap();
    let shared = &mixture.shared.as_ref().unwrap().gated;
    assert_eq!((mixture.experts[3].intermediate_size, shared.intermediate_size), (96, 40));
    let mamba = |more: &str| read("granitemoehybrid", &(hybrid.replacen("\"attention\"", "\"mamba\"", 1) + more));
    let granite = mamba(r#", "mamba_n_heads": 8, "time_step_limit": [0.0, {"__float__": "Infinity"}]"#).unwrap();
    let space = granite.blocks[0].state_space().unwrap();
    let heads = StateHeads { num_heads: 8, num_groups: 1, head_dim: 16, state_dim: 256 };
    assert_eq!((space.heads, space.bounds, granite.blocks[1].state_space()), (heads, [0.0, f64::INFINITY], None));
    assert_eq!(granite.blocks[0].sites[space.input].shape, [2 * 128 + 2 * 256 + 8, 64]);
    for (more, expected) in [
        (r#", "mamba_n_heads": 8, "mamba_d_head": 8"#, "expected `mamba_expand` * `hidden_size` = 128 in all"),
        (r#", "mamba_n_heads": 8, "mamba_n_groups": 3"#, "`mamba_n_groups` = 3 does not divide"),
        (r#", "time_step_limit": [1.0]"#, "expected two numbers, the smaller one first"),
    ] {
        let refused = mamba(more).unwrap_err().to_string();
        assert!(refused.contains(expected), "{refused}");
    }
    assert!(read("olmoe", r#", "clip_qkv": 8.0"#).unwrap_err().to_string().contains("`clip_qkv` = 8"));
}

#[test]
fn sublayers_follow_each_other_as_families_have_it() {
    let read = read_as;
    let mixed = r#", "layer_types": ["sliding_attention", "full_attention"]"#;
    let ropes =
        |config: &ModelConfig| config.blocks.iter().map(|block| block.attention().unwrap().rope).collect::<Vec<_>>();
    let nemotron = |more: &str| {
        read("nemotron_h", &format!(r#", "head_dim": 16, "n_routed_experts": 4, "mamba_num_heads": 8{more}"#))
    };
    let nemotron_h = nemotron(r#", "hybrid_override_pattern": "ME*-""#).unwrap();
    let of_blocks = nemotron_h.blocks.iter().map(|block| (block.sublayers.len(), &*block.sites[0].name));
    assert_eq!(
        of_blocks.collect::<Vec<_>>(),
        [(1, "mixer.in_proj"), (1, "mixer.gate"), (1, "mixer.q_proj"), (1, "mixer.up_proj")]
    );
    assert_eq!(nemotron_h.blocks[0].state_space().unwrap().bounds, [0.001, f64::INFINITY]);
    let mixture = nemotron_h.blocks[1].mixture().unwrap();
    assert!(mixture.all().all(|gated| matches!(gated.gate_up, Projections::Same(_))));
    let narrow = nemotron(r#", "layers_block_type": ["moe"], "moe_latent_size": 24"#).unwrap();
    let (block, mixture) = (&narrow.blocks[0], narrow.blocks[0].mixture().unwrap());
    let [inwards, outwards] = mixture.latent.unwrap().map(|site| block.sites[site].shape);
    assert_eq!((inwards, outwards, block.sites[mixture.experts[0].down].shape[0]), ([24, 64], [64, 24], 24));
    for (more, expected) in [
        (r#", "hybrid_override_pattern": "MX""#, "expected letters M, E, * and -"),
        (r#", "layers_block_type": ["conv"]"#, "expected \"mamba\", \"attention\", \"mlp\" or \"moe\""),
        ("", "`layers_block_type` is missing"),
    ] {
        let refused = nemotron(more).unwrap_err().to_string();
        assert!(refused.contains(expected), "{refused}");
    }
    let falcon = read(
        "falcon_h1",
        r#", "mamba_n_heads": 8, "mamba_d_ssm": 96, "mlp_multipliers": [0.5, 0.25], "lm_head_multiplier": 0.5"#,
    );
    let falcon = falcon.unwrap();
    let [space, attention, gated] = &falcon.blocks[0].sublayers[..] else { panic!("it has three") };
    assert_eq!([space, attention, gated].map(|it| it.is_beside), [false, true, false]);
    assert_eq!((gated.output_scale, falcon.blocks[0].gated().unwrap().gate_scale), (Some(0.25), Some(0.5)));
    assert_eq!((falcon.logit_divisor, falcon.blocks[0].state_space().unwrap().heads.head_dim), (2.0, 12));
    assert_eq!(
        falcon.blocks[0].norms(64).map(|(name, _)| name).collect::<Vec<_>>(),
        ["input_layernorm", "pre_ff_layernorm"]
    );
    let cohere = read("cohere2", &format!(r#", "sliding_window": 9, "logit_scale": 0.25{mixed}"#)).unwrap();
    assert_eq!((ropes(&cohere), cohere.logit_divisor), (vec![Some(0), None], 4.0));
    assert!(cohere.blocks[0].sublayers[1].is_beside && cohere.norm_kind == NormKind::LayerWithoutBias);
    let is_beside = |config: &ModelConfig| config.blocks[0].sublayers[1].is_beside;
    let stablelm = |more: &str| read("stablelm", more);
    let [in_turn, beside] = ["", r#", "use_parallel_residual": true"#].map(|more| is_beside(&stablelm(more).unwrap()));
    assert!(beside && !in_turn);
    let neox = |more: &str| {
        let text = format!("{}{more}}}", BASE.replace("\"llama\"", "\"gpt_neox\""));
        ModelConfig::from_json(&text).unwrap()
    };
    let [beside, in_turn] = ["", r#", "use_parallel_residual": false"#].map(|more| is_beside(&neox(more)));
    assert!(beside && !in_turn);
    let neox = neox(r#", "rotary_pct": 0.5, "rotary_emb_base": 5e4, "hidden_act": "gelu""#);
    assert_eq!((neox.ropes[0].width, neox.ropes[0].theta, neox.blocks[0].sites[0].shape), (8, 5e4, [192, 64]));
    assert_eq!(neox.blocks[0].norms(64).count(), 2);
    assert_eq!(neox.module_of("model.embed_tokens.weight"), "gpt_neox.embed_in.weight");
    assert_eq!(neox.module_name(1, 1), "gpt_neox.layers.1.attention.dense");
    assert!(neox.is_unused("model.layers.0.attention.masked_bias"));
    for (name, alone) in [
        ("gpt_neox.layers.1.attention.dense.bias", "model.layers.1.attention.dense.bias"),
        ("gpt_neox.embed_in.weight", "model.embed_tokens.weight"),
        ("embed_out.weight", "lm_head.weight"),
        ("backbone.embeddings.weight", "model.embed_tokens.weight"),
        ("model.embeddings.weight", "model.embed_tokens.weight"),
        ("backbone.layers.0.mixer.A_log", "model.layers.0.mixer.A_log"),
    ] {
        assert_eq!(name_alone(name).as_deref(), Some(alone));
    }
    let hunyuan = read("hunyuan_v1_dense", r#", "rope_scaling": {"type": "dynamic", "alpha": 8.0}"#).unwrap();
    assert_eq!((hunyuan.ropes[0].theta, &hunyuan.ropes[0].scaling), (10_000.0 * 8_f64.powf(16.0 / 14.0), &None));
    for (kind, more, expected) in [
        (
            "falcon_h1",
            r#", "mamba_n_heads": 8, "mamba_d_ssm": 96, "mamba_rms_norm": true"#,
            "`mamba_norm_before_gate` is missing",
        ),
        (
            "falcon_h1",
            r#", "mamba_n_heads": 8, "mamba_d_head": 4, "mamba_d_ssm": 96"#,
            "expected `mamba_d_ssm` = 96 in all",
        ),
        ("cohere2", r#", "use_qk_norm": true"#, "LayerNorms of heads are not computed here"),
    ] {
        let refused = read(kind, more).unwrap_err().to_string();
        assert!(refused.contains(expected), "{refused}");
    }
}

#[test]
fn phi_has_biases_everywhere_and_exaone_no_rotary_embedding_beside_windows() {
    let ropes =
        |config: &ModelConfig| config.blocks.iter().map(|block| block.attention().unwrap().rope).collect::<Vec<_>>();
    let phi = read_as("phi", "").unwrap();
    assert!(phi.blocks[0].sites.iter().all(|site| site.has_bias) && phi.blocks[0].sublayers[1].is_beside);
    assert!(phi.expected_tensors().iter().any(|(name, _)| name == HEAD_BIAS));
    let tied = read_as("phi", r#", "tie_word_embeddings": true"#).unwrap_err().to_string();
    assert!(tied.contains("`tie_word_embeddings` = true is not supported"), "{tied}");
    let exaone = |more: &str| ropes(&read_as("exaone4", more).unwrap());
    let letters = r#", "sliding_window_pattern": "LG", "layer_types": ["sliding_attention", "full_attention"]"#;
    assert_eq!(exaone(&format!(r#", "sliding_window": 9{letters}"#)), [Some(0), None]);
    assert_eq!(exaone(r#", "sliding_window": null"#), [Some(0), Some(0)]);
    assert!(read_as("exaone4", r#", "sliding_window_pattern": "LG""#).is_err());
}

#[test]
fn heads_whose_width_is_said_need_not_divide_that_of_the_model() {
    let glm =
        BASE.replace("\"llama\"", "\"glm4_moe\"").replace("\"num_attention_heads\": 4", "\"num_attention_heads\": 6");
    let glm = format!("{glm}, \"num_key_value_heads\": 2");
    let named = r#", "architectures": ["LlamaForCausalLM"]"#;
    let said = ModelConfig::from_json(&format!("{glm}, \"head_dim\": 16{named}}}")).unwrap();
    assert_eq!(said.blocks[0].attention().unwrap().heads.query_width(), 96);
    let refused = ModelConfig::from_json(&format!("{glm}}}")).unwrap_err().to_string();
    assert!(refused.contains("`hidden_size` = 64 is not a multiple of `num_attention_heads` = 6"), "{refused}");
}

#[test]
fn layers_of_llama_4_see_chunks_or_grow_their_queries() {
    let llama4 = |more: &str| {
        let text = format!(r#", "num_key_value_heads": 2, "intermediate_size_mlp": 96, "intermediate_size": 40{more}"#);
        let text = format!(
            "{}{text}}}",
            BASE.replace("\"llama\"", "\"llama4_text\"").replace("\"intermediate_size\": 96,", "")
        );
        ModelConfig::from_json(&text).unwrap()
    };
    let config = llama4(r#", "no_rope_layers": [0, 1], "moe_layers": [1], "floor_scale": 4"#);
    let of = |layer: usize| config.blocks[layer].attention().unwrap();
    assert_eq!([of(0).rope, of(1).rope], [None, Some(0)]);
    assert_eq!([of(0).query_key_norms, of(1).query_key_norms], [None, Some(QueryKeyNorms::Unweighted)]);
    assert!(config.blocks.iter().all(|block| block.norms(64).count() == 2));
    assert_eq!([of(0).heads.chunk, of(1).heads.chunk], [None, Some(8192)]);
    assert_eq!([of(0).query_growth, of(1).query_growth].map(|growth| growth.map(|it| it.factor(2))), [Some(1.0), None]);
    assert_eq!(of(0).query_growth.unwrap().factor(3), (1.0 + 0.1 * 2_f64.ln()) as f32);
    assert_eq!((config.longest_sharing(), config.blocks[0].gated().unwrap().intermediate_size), (8192, 96));
    let mixture = config.blocks[1].mixture().unwrap();
    assert!(mixture.weighs_inputs && mixture.all().all(|gated| gated.intermediate_size == 40));
    assert_eq!((mixture.experts.len(), mixture.probabilities), (16, Probabilities::Sigmoids));
    let by_step = llama4(r#", "interleave_moe_layer_step": 2, "no_rope_layers": [], "use_qk_norm": false"#);
    assert!(by_step.blocks[0].mixture().is_none() && by_step.blocks[1].mixture().is_some());
    assert!(by_step.blocks.iter().all(|block| block.attention().unwrap().query_key_norms.is_none()));
    let open = llama4(r#", "attention_chunk_size": null, "attn_temperature_tuning": false, "no_rope_layers": [0, 1]"#);
    let attentions = open.blocks.iter().filter_map(Block::attention);
    assert!(attentions.map(|it| (it.heads.chunk, it.query_growth)).all(|it| it == (None, None)));
    let listed = llama4(r#", "layer_types": ["chunked_attention", "full_attention"], "no_rope_layers": [0, 1]"#);
    assert_eq!(listed.blocks.iter().filter_map(|it| it.attention()?.heads.chunk).collect::<Vec<_>>(), [8192]);
}

#[test]
fn settings_that_change_the_computation_are_refused() {
    for (more, part) in [
        (r#", "hidden_act": "quick_gelu""#, "`hidden_act` = \"quick_gelu\", expected \"silu\", \"gelu\""),
        (r#", "attention_dropout": 0.1"#, "`attention_dropout` = 0.1"),
        (r#", "partial_rotary_factor": 0.5"#, "`partial_rotary_factor` = 0.5"),
        (r#", "layer_types": ["full_attention", "sliding_attention"]"#, "names \"sliding_attention\" for layer 1"),
        (r#", "layer_types": ["full_attention"]"#, "must name one type for each of the 2 layers"),
    ] {
        assert!(refusal(more).contains(part), "{}", refusal(more));
    }
}

#[test]
fn every_impossible_shape_is_listed_at_once() {
    let text = r#"{"model_type": "llama", "vocab_size": 0, "hidden_size": -3, "intermediate_size": 1e30,
        "num_hidden_layers": "two", "tie_word_embeddings": 1}"#;
    let problems = ModelConfig::from_json(text).unwrap_err().to_string();
    for key in [
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "tie_word_embeddings",
    ] {
        assert!(problems.contains(&format!("config.json: `{key}` ")), "{key}: {problems}");
    }
    let heads = refusal(r#", "num_key_value_heads": 3, "head_dim": 7"#);
    assert!(heads.contains("`num_attention_heads` = 4 is not a multiple of `num_key_value_heads` = 3"), "{heads}");
    assert!(heads.contains("`head_dim` = 7 is odd"), "{heads}");
    let text = format!("{BASE}}}").replace("64", "66");
    assert!(ModelConfig::from_json(&text).unwrap_err().to_string().contains("`hidden_size` = 66 is not a multiple"));
}

#[test]
fn sizes_whose_product_is_no_number_are_refused() {
    let huge = r#"{"model_type": "llama", "vocab_size": 100, "hidden_size": 65536, "intermediate_size": 96,
        "num_hidden_layers": 4096, "num_attention_heads": 65536, "head_dim": 65536}"#;
    let error = ModelConfig::from_json(huge).unwrap_err().to_string();
    assert!(error.contains("65536 heads of `head_dim` = 65536, expected at most 4194304 in all"), "{error}");
}

const GEMMA: &str = r#""vocab_size": 100, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
    "num_attention_heads": 4"#;

#[test]
fn gemma_has_windows_caps_and_scales_where_its_config_says() {
    let gemma2 = |more: &str| {
        ModelConfig::from_json(&format!(r#"{{"model_type": "gemma2", {GEMMA}, "sliding_window": 7{more}}}"#)).unwrap()
    };
    let config = gemma2("");
    assert_eq!(windows_of(&config), [Some(7), None, Some(7), None]);
    let heads = config.blocks[0].attention().unwrap().heads;
    assert_eq!((heads.num_kv_heads, heads.head_dim, heads.scale, heads.soft_cap), (4, 256, 1.0 / 16.0, Some(50.0)));
    assert_eq!((config.logit_soft_cap, config.embedding_scale), (Some(30.0), Some(8.0)));
    assert!(config.has_norms_less_one && config.tie_word_embeddings);
    let config =
        gemma2(r#", "attn_logit_softcapping": null, "final_logit_softcapping": 5, "query_pre_attn_scalar": 4"#);
    let heads = config.blocks[0].attention().unwrap().heads;
    assert_eq!((heads.soft_cap, config.logit_soft_cap, heads.scale), (None, Some(5.0), 0.5));
}

#[test]
fn gemma_3_of_transformers_4_and_5_read_the_same_also_within_a_multimodal_model() {
    let text = |more: &str| format!(r#""model_type": "gemma3_text", {GEMMA}, "sliding_window": 7{more}"#);
    let old = text(
        r#", "rope_theta": 2e6, "rope_local_base_freq": 5e3, "rope_scaling": {"rope_type": "linear",
        "factor": 8}, "sliding_window_pattern": 3"#,
    );
    let new = text(
        r#", "rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 8, "rope_theta": 2e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 5e3}}, "layer_types": ["sliding_attention",
        "sliding_attention", "full_attention", "sliding_attention"]"#,
    );
    let [old, new] = [old, new].map(|text| ModelConfig::from_json(&format!("{{{text}}}")).unwrap());
    assert_eq!(old, new);
    assert_eq!(windows_of(&old), [Some(7), Some(7), None, Some(7)]);
    let ropes: Vec<_> = old.blocks.iter().map(|block| &old.ropes[block.attention().unwrap().rope.unwrap()]).collect();
    assert_eq!([ropes[1].theta, ropes[2].theta], [5e3, 2e6]);
    let linear = Some(RopeScaling::Linear { factor: 8.0 });
    assert_eq!([&ropes[1].scaling, &ropes[2].scaling], [&None, &linear]);
    let around = r#"{"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"],
        "vision_config": {}, "eos_token_id": [1, 6]"#;
    let nested = ModelConfig::from_json(&format!(r#"{around}, "text_config": {{{}}}}}"#, text(""))).unwrap();
    assert!(nested.nesting.is_some() && old.nesting.is_none());
    assert_eq!(
        (nested.eos_token_ids.as_slice(), nested.ropes[0].theta, nested.ropes[1].theta),
        (&[1, 6][..], 1e6, 1e4)
    );
    assert_eq!(nested.module_name(3, 1), "model.language_model.layers.3.self_attn.k_proj");
    assert_eq!(nested.expected_tensors()[0].0, "model.embed_tokens.weight");
    let refused = ModelConfig::from_json(&format!(r#"{around}, "text_config": {{"vocab_size": 0}}}}"#)).unwrap_err();
    assert!(refused.to_string().contains("`text_config.vocab_size` = 0"), "{refused}");
    // As transformers has it: the language model alone caps its logits, and scores of attention are not capped in either.
    assert_eq!(ModelConfig::from_json(&format!("{{{}}}", text(CAP))).unwrap().logit_soft_cap, Some(2.0));
    let capped = ModelConfig::from_json(&format!(r#"{around}, "text_config": {{{}}}}}"#, text(CAP))).unwrap_err();
    assert!(capped.to_string().contains("`text_config.final_logit_softcapping` = 2.0 is not supported"), "{capped}");
    let capped = ModelConfig::from_json(&format!("{{{}}}", text(r#", "attn_logit_softcapping": 3.0"#))).unwrap_err();
    assert!(capped.to_string().contains("`attn_logit_softcapping` = 3.0 is not supported"), "{capped}");
}

const CAP: &str = r#", "final_logit_softcapping": 2.0, "attn_logit_softcapping": null"#;

#[test]
fn gemma_4_has_heads_keys_and_embeddings_by_layer_where_its_config_says() {
    let read = |more: &str| {
        ModelConfig::from_json(&format!(
            r#"{{"model_type": "gemma4", "text_config": {{{GEMMA}, "sliding_window": 7, "num_hidden_layers": 6,
                "vocab_size_per_layer_input": 100, "head_dim": 16, "num_key_value_heads": 2{more}}}}}"#
        ))
    };
    let types = r#", "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention",
        "full_attention", "sliding_attention"]"#;
    let shared = format!(r#"{types}, "num_kv_shared_layers": 3, "use_double_wide_mlp": true, "global_head_dim": 24"#);
    let config = read(&shared).unwrap();
    // The last layer has no window.
    assert_eq!(windows_of(&config), [Some(7), None, Some(7), Some(7), None, None]);
    let attentions: Vec<_> = config.blocks.iter().map(|block| block.attention().unwrap()).collect();
    let earlier: Vec<_> = attentions.iter().map(|attention| attention.key_value_layer()).collect();
    assert_eq!(earlier, [None, None, None, Some(2), Some(1), Some(1)]);
    assert_eq!([0, 1, 2, 3, 4].map(|layer| config.shares_key_values(layer)), [false, true, true, false, false]);
    assert!(attentions.iter().all(|it| (it.heads.scale - 1.0).abs() < 1e-12 && it.has_value_norm));
    let names: Vec<_> = config.blocks[4].sites.iter().map(|site| (&*site.name, site.shape)).collect();
    assert_eq!(names[0], ("self_attn.q_proj", [96, 64]));
    assert_eq!(names[1], ("self_attn.o_proj", [64, 96]));
    assert_eq!(names[2], ("mlp.gate_proj", [192, 64]));
    assert_eq!(names[5..], [("per_layer_input_gate", [256, 64]), ("per_layer_projection", [64, 256])]);
    assert_eq!(config.layer_inputs, Some(LayerInputs { vocab_size: 100, width: 256 }));
    let inputs = config.expected_tensors();
    assert!(inputs.contains(&("model.embed_tokens_per_layer.weight".into(), vec![100, 6 * 256])));
    assert!(inputs.contains(&("model.layers.5.layer_scalar".into(), vec![1])));
    assert!(!inputs.iter().any(|(name, _)| name == "model.layers.5.self_attn.k_norm.weight"));
    assert!(config.is_unused("model.layers.3.self_attn.k_norm.weight"));
    assert!(!config.is_unused("model.layers.2.self_attn.k_norm.weight") && !config.is_unused("model.norm.weight"));
    let [full, local] = [&config.ropes[0], &config.ropes[1]];
    assert_eq!((full.head_dim, full.width, local.head_dim, full.theta, local.theta), (24, 24, 16, 1e6, 1e4));
    assert_eq!(full.scaling, Some(RopeScaling::Proportional { num_turning: 3, factor: 1.0 }));

    let keys_as_values = format!(r#"{types}, "attention_k_eq_v": true, "hidden_size_per_layer_input": 0"#);
    let published = r#", "global_head_dim": 24, "num_global_key_value_heads": 1"#;
    let config = read(&format!("{keys_as_values}{published}")).unwrap();
    let names: Vec<_> = config.blocks[1].sites.iter().map(|site| (&*site.name, site.shape)).collect();
    assert_eq!(names[1..3], [("self_attn.k_proj", [24, 64]), ("self_attn.o_proj", [64, 96])]);
    assert_eq!((config.layer_inputs, config.blocks[0].sites[2].shape), (None, [32, 64]));
    // As transformers 5.23 writes it.
    let heads = r#"{"head_dim": 24, "num_key_value_heads": 1}"#;
    let written =
        |of_last| format!(r#"{keys_as_values}, "per_layer_config": {{"1": {heads}, "4": {heads}, "5": {of_last}}}"#);
    assert_eq!(read(&written(heads)).unwrap(), config);
    assert!(read(&written("{}")).unwrap_err().to_string().contains("per_layer_config` has other heads"));

    let refused = |more: &str| read(more).unwrap_err().to_string();
    assert!(refused(r#", "num_kv_shared_layers": 1"#).contains("num_kv_shared_layers` = 1 leaves no layer"));
    let experts = r#", "enable_moe_block": true, "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 20"#;
    let config = read(experts).unwrap();
    let branches = config.blocks[0].two_branches().unwrap();
    assert_eq!((branches.gated.intermediate_size, branches.mixture.experts.len()), (96, 6));
    assert_eq!(config.blocks[0].sites[branches.mixture.experts[5].down].name, "experts.5.down_proj");
    assert!(config.expected_tensors().contains(&("model.layers.0.router.per_expert_scale".into(), vec![6])));
    assert!(refused(&experts.replace("2,", "7,")).contains("`text_config.top_k_experts` = 7"));
    assert!(refused(r#", "vocab_size_per_layer_input": 99"#).contains("vocab_size_per_layer_input"));
    assert!(refused(r#", "use_bidirectional_attention": "all""#).contains("use_bidirectional_attention"));
}

#[test]
fn yarn_dynamic_and_longrope_have_the_defaults_of_transformers() {
    let scaling = |more: &str| with(more).unwrap().ropes[0].scaling.clone().unwrap();
    let yarn = scaling(
        r#", "max_position_embeddings": 131072, "rope_scaling": {"type": "yarn", "factor": 4.0,
        "original_max_position_embeddings": 32768}"#,
    );
    let RopeScaling::Yarn { beta_fast, beta_slow, truncate, attention_factor, .. } = yarn else { panic!("{yarn:?}") };
    assert_eq!((beta_fast, beta_slow, truncate), (32.0, 1.0, true));
    assert!((attention_factor - 1.138_629_436_111_989).abs() < 1e-12, "{attention_factor}");
    let dynamic = scaling(r#", "rope_scaling": {"type": "dynamic", "factor": 2.0}"#);
    assert_eq!(dynamic, RopeScaling::Dynamic { factor: 2.0, original_max_position_embeddings: 2048 });
    let phi = |more: &str| {
        let text = format!("{BASE}, \"max_position_embeddings\": 64{more}}}").replace("\"llama\"", "\"phi3\"");
        ModelConfig::from_json(&text)
    };
    let factors = |len: usize| format!("[{}1.0]", "1.5, ".repeat(len - 1));
    let longrope = |len: usize| {
        format!(
            r#", "original_max_position_embeddings": 16, "rope_scaling": {{"type": "su", "short_factor": {0},
            "long_factor": {0}}}"#,
            factors(len)
        )
    };
    let config = phi(&longrope(8)).unwrap();
    let rope = &config.ropes[0];
    assert_eq!((rope.reach(16), rope.reach(17), rope.reach(40)), (0, 17, 17));
    assert!((rope.attention_factor() - 1.5_f64.sqrt()).abs() < 1e-12, "{}", rope.attention_factor());
    let refused = phi(&longrope(7)).unwrap_err().to_string();
    assert!(refused.contains("expected a list of 8 numbers above 0"), "{refused}");
    assert!(phi(r#", "rope_scaling": {"type": "longrope"}"#).unwrap_err().to_string().contains("are needed"));
}

#[test]
fn fused_layers_and_layers_without_rope_are_where_the_family_has_them() {
    let of = |kind: &str, more: &str| {
        ModelConfig::from_json(&format!("{BASE}{more}}}").replace("\"llama\"", &format!("\"{kind}\"")))
    };
    let names = |config: &ModelConfig| {
        config.blocks[0].sites.iter().map(|site| (site.name.clone(), site.shape)).collect::<Vec<_>>()
    };
    let phi = of("phi3", r#", "num_key_value_heads": 2"#).unwrap();
    let expected = [
        ("self_attn.qkv_proj", [128, 64]),
        ("self_attn.o_proj", [64, 64]),
        ("mlp.gate_up_proj", [192, 64]),
        ("mlp.down_proj", [64, 96]),
    ];
    assert_eq!(names(&phi), expected.map(|(name, shape)| (name.to_owned(), shape)));
    let glm = of("glm4", "").unwrap();
    assert_eq!((glm.ropes[0].width, glm.ropes[0].head_dim, biases_of(&glm).len()), (64, 128, 3));
    let smol = of("smollm3", r#", "no_rope_layers": [0, 1]"#).unwrap();
    let ropes: Vec<_> = smol.blocks.iter().map(|block| block.attention().unwrap().rope).collect();
    assert_eq!((ropes, smol.ropes[0].theta), (vec![None, Some(0)], 2e6));
    let refused = of("smollm3", r#", "use_sliding_window": true"#).unwrap_err().to_string();
    assert!(refused.contains("`use_sliding_window` = true is not supported"), "{refused}");
    let granite = of("granite", r#", "residual_multiplier": 0.2, "attention_multiplier": 0.1"#).unwrap();
    assert_eq!(granite.blocks[0].sublayers[1].output_scale, Some(0.2));
    assert_eq!((granite.embedding_scale, granite.logit_divisor), (None, 1.0));
    let odd = of("glm4", r#", "partial_rotary_factor": 0.01"#).unwrap_err().to_string();
    assert!(odd.contains("makes 1 numbers turn"), "{odd}");
}

#[test]
fn qwen3_5_has_linear_attention_where_its_config_says() {
    let read = |more: &str| {
        ModelConfig::from_json(&format!(
            r#"{{"model_type": "qwen3_5", "text_config": {{"hidden_size": 5120, "intermediate_size": 64, "num_hidden_layers": 8{more}}}}}"#
        ))
    };
    let linear =
        |config: &ModelConfig| config.blocks.iter().map(|block| block.delta_net().is_some()).collect::<Vec<_>>();
    let config = read(r#", "num_attention_heads": 24"#).unwrap();
    assert!(config.nesting.is_some() && config.has_norms_less_one && !config.tie_word_embeddings);
    assert_eq!(linear(&config), [true, true, true, false, true, true, true, false]);
    let net = config.blocks[0].delta_net().unwrap();
    let heads = DeltaHeads { num_key_heads: 16, num_value_heads: 32, key_head_dim: 128, value_head_dim: 128 };
    assert_eq!((net.heads, net.kernel_size), (heads, 4));
    let shapes: Vec<_> = config.blocks[0].sites.iter().map(|site| (&*site.name, site.shape)).collect();
    assert_eq!(shapes[0], ("linear_attn.in_proj_qkv", [8192, 5120]));
    assert_eq!(
        shapes[3..6],
        [("linear_attn.in_proj_a", [32, 5120]), ("linear_attn.out_proj", [5120, 4096]), ("mlp.gate_proj", [64, 5120])]
    );
    let attention = config.blocks[3].attention().unwrap();
    assert!(attention.has_output_gate && attention.query_key_norms == Some(QueryKeyNorms::Heads));
    // Queries and their gates.
    assert_eq!(config.blocks[3].sites[0].shape, [2 * 24 * 256, 5120]);
    assert_eq!((config.ropes[0].width, config.ropes[0].head_dim), (64, 256));
    let names: Vec<String> = config.expected_tensors().into_iter().map(|(name, _)| name).collect();
    for name in ["conv1d.weight", "A_log", "dt_bias", "norm.weight"] {
        assert!(names.contains(&format!("model.layers.6.linear_attn.{name}")), "{name}");
    }
    assert_eq!(linear(&read(r#", "full_attention_interval": 3"#).unwrap())[..3], [true, true, false]);
    let types = r#", "layer_types": ["full_attention", "linear_attention", "full_attention", "full_attention",
        "full_attention", "full_attention", "full_attention", "linear_attention"]"#;
    assert_eq!(linear(&read(types).unwrap()), [false, true, false, false, false, false, false, true]);
    let refused = |more: &str| read(more).unwrap_err().to_string();
    let message = refused(r#", "linear_num_value_heads": 24"#);
    assert!(message.contains("`text_config.linear_num_value_heads` = 24 is not a multiple of"), "{message}");
    assert!(refused(r#", "attn_output_gate": false"#).contains("attn_output_gate"));
    let message = refused(r#", "hidden_act": "gelu_pytorch_tanh""#);
    assert!(message.contains("expected \"silu\", which linear attention has behind its convolution"), "{message}");
    assert!(read(r#", "hidden_act": "silu""#).is_ok());
    assert!(refused(&types.replacen("full_attention", "sliding_attention", 1)).contains("names \"sliding_attention\""));
    let others = r#", "layer_types": ["linear_attention", "full_attention"]"#;
    assert!(refusal(others).contains("names \"linear_attention\" for layer 0"), "{}", refusal(others));
}
