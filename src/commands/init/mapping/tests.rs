//! Configurations of every trainer, mapped.

use std::collections::BTreeSet;
use std::path::PathBuf;

use super::*;

const ARGS: InitArgs =
    InitArgs { model: None, data: None, out: PathBuf::new(), from: None, set: Vec::new(), device: None };

fn read(name: &str, text: &str) -> Foreign {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(name);
    std::fs::write(&path, text).unwrap();
    Foreign::read(&path).unwrap()
}

/// The keys that a configuration has, counted without the program's walk.
fn num_keys(value: &Value) -> usize {
    match value {
        Value::Object(table) if !table.is_empty() => table.values().map(num_keys).sum(),
        Value::Array(items) if items.first().is_some_and(Value::is_object) => items.iter().map(num_keys).sum(),
        _ => 1,
    }
}

/// The settings of a configuration, and the keys that were not taken over. No key vanishes, and no setting is refused.
fn mapped(name: &str, text: &str) -> (toml::Table, Vec<String>) {
    let foreign = read(name, text);
    assert_eq!(objective::refusal(&foreign), None, "{text}");
    let mapping = Mapping::of(&foreign, &ARGS);
    let paths: BTreeSet<&str> = mapping.keys.iter().map(|key| key.0.as_str()).collect();
    let num_keys = num_keys(&Value::Object(foreign.root.clone()));
    assert_eq!((mapping.keys.len(), paths.len()), (num_keys, num_keys), "{text}");
    assert_eq!(mapping.draft.refused().0, []);
    let settings = mapping.draft.settings.iter().map(|setting| (setting.key.clone(), setting.value.clone())).collect();
    let lost = mapping.keys.iter().filter(|key| matches!(key.1, Fate::Lost(_))).map(|key| key.0.clone()).collect();
    (settings, lost)
}

/// Holds settings against those of a text, as on a command line.
fn assert_settings(found: &toml::Table, expected: &str) {
    for (key, value) in expected.split_whitespace().filter_map(|setting| setting.split_once('=')) {
        let value: toml::Value = value.parse().unwrap();
        assert_eq!(found.get(key), Some(&value), "{key} in {found}");
    }
}

#[test]
fn what_is_said_of_images_is_taken_over_and_a_tower_that_is_trained_is_named() {
    let (found, lost) = mapped(
        "vl.yaml",
        "model_name_or_path: Qwen/Qwen2.5-VL-7B-Instruct\nimage_max_pixels: 262144\nvideo_max_pixels: 16384\nstage: \
         sft\nfinetuning_type: lora\nlora_target: all\ndataset: demo\nmedia_dir: photos\nfreeze_vision_tower: \
         true\nfreeze_multi_modal_projector: false\n",
    );
    assert_settings(&found, r#"data.image_max_pixels=262144 data.image_folder="photos""#);
    assert_eq!(lost, ["video_max_pixels", "freeze_multi_modal_projector"]);
    let (found, _) = mapped("vl.yaml", "model_name_or_path: m/x\nstage: sft\ndataset: demo\ntemplate: qwen2_vl\n");
    assert_settings(&found, "data.image_max_pixels=589824");
    let (found, _) = mapped("text.yaml", "model_name_or_path: m/x\nstage: sft\ndataset: demo\ntemplate: qwen3\n");
    assert_eq!(found.get("data.image_max_pixels"), None);
    let swift = |flags: &str| mapped("vl.sh", &format!("swift sft --model m/x --dataset d/e {flags}")).1;
    assert_eq!(swift("--freeze_vit true --freeze_aligner true --freeze_llm false"), Vec::<String>::new());
    assert_eq!(
        swift("--freeze_vit false --freeze_aligner false --freeze_llm true"),
        ["freeze_vit", "freeze_aligner", "freeze_llm"]
    );
    let unsloth = |layers: &str| {
        let program = format!(
            "model, tokenizer = FastVisionModel.from_pretrained('org/vl')\nmodel = FastVisionModel.get_peft_model(model, {layers}, \
             r=8)\n"
        );
        let (found, lost) = mapped("vl.py", &program);
        assert_settings(&found, r#"model.path="org/vl" lora.r=8"#);
        (found.get("lora.target_modules").map(ToString::to_string), lost)
    };
    let all = "finetune_vision_layers=True, finetune_language_layers=True, finetune_attention_modules=True, \
               finetune_mlp_modules=True";
    assert_eq!(unsloth(all), (None, vec!["finetune_vision_layers".to_owned()]));
    let mlp = r#"["gate_proj", "up_proj", "down_proj"]"#.to_owned();
    assert_eq!(unsloth("finetune_attention_modules=False"), (Some(mlp), Vec::new()));
    let attention = r#"["q_proj", "k_proj", "v_proj", "o_proj"]"#.to_owned();
    assert_eq!(unsloth("finetune_mlp_modules=False"), (Some(attention), Vec::new()));
    let none = ["finetune_attention_modules", "finetune_language_layers", "finetune_mlp_modules"];
    let off = none.map(|key| format!("{key}=False"));
    assert_eq!(unsloth(&off.join(", ")), (None, none.map(str::to_owned).to_vec()));
    let listed = format!("{}, target_modules=['q_proj']", off[0]);
    assert_eq!(unsloth(&listed), (Some(r#"["q_proj"]"#.to_owned()), Vec::new()));
}

#[test]
fn llama_factory_s_names_and_defaults_are_taken_over() {
    let (found, lost) = mapped(
        "sft.yaml",
        "model_name_or_path: m/x\nstage: sft\ndo_train: true\nfinetuning_type: lora\nlora_rank: 4\nlora_target: \
         all\ndataset: identity,demo\ntemplate: qwen3\ncutoff_len: 512\noutput_dir: saves/x\nlogging_steps: \
         10\nplot_loss: true\nreport_to: none\nper_device_train_batch_size: 1\ngradient_accumulation_steps: \
         8\nlearning_rate: 1.0e-4\nnum_train_epochs: 3.0\nlr_scheduler_type: cosine\nwarmup_ratio: 0.1\nbf16: \
         true\nval_size: 0.1\neval_strategy: steps\neval_steps: 500\n",
    );
    let expected = r#"model.path="m/x" lora.r=4 lora.lora_alpha=8 lora.target_modules="all-linear" data.train.1.path="demo"
        data.eval_split=0.1 train.precision="bf16" train.micro_batch_size=1 train.num_epochs=3.0
        scheduler.lr_scheduler="cosine" eval.eval_steps=500"#;
    assert_settings(&found, expected);
    assert_eq!(lost, ["template"]);
}

#[test]
fn components_of_torchtune_are_looked_into() {
    let (found, lost) = mapped(
        "1B.yaml",
        "output_dir: /tmp/t\nmodel:\n  _component_: torchtune.models.llama3_2.lora_llama3_2_1b\n  lora_attn_modules: \
         [q_proj, output_proj]\n  apply_lora_to_mlp: true\n  lora_rank: 64\n  lora_alpha: \
         128\ntokenizer:\n  path: t\n  max_seq_len: null\ncheckpointer:\n  _component_: x.Y\n  checkpoint_dir: \
         ${output_dir}/m\n  checkpoint_files: [a]\n  output_dir: x\ndataset:\n  _component_: \
         torchtune.datasets.alpaca_cleaned_dataset\n  packed: false\nseed: null\nbatch_size: \
         4\noptimizer:\n  _component_: torch.optim.AdamW\n  fused: true\n  lr: 3e-4\nlr_scheduler:\n  _component_: \
         a.get_cosine_schedule_with_warmup\n  num_warmup_steps: 100\nepochs: 1\nclip_grad_norm: null\n",
    );
    let expected = r#"model.path="/tmp/t/m" lora.target_modules=["q_proj","o_proj","gate_proj","up_proj","down_proj"] lora.r=64
        data.train.0.path="yahma/alpaca-cleaned" data.train_on_inputs=true train.max_grad_norm=0.0
        optimizer.name="adamw" optimizer.learning_rate=3e-4 scheduler.lr_scheduler="cosine"
        scheduler.warmup_steps=100"#;
    assert_settings(&found, expected);
    assert_eq!((lost, found.get("seed")), (vec![], None));
}

#[test]
fn litgpt_s_rows_of_a_step_and_rates_are_converted() {
    let (found, lost) = mapped(
        "lora.yaml",
        "checkpoint_dir: c/m\nprecision: bf16-true\nlora_r: 32\nlora_query: true\nlora_key: false\nlora_value: \
         true\nlora_head: true\ndata:\n  class_path: litgpt.data.JSON\n  init_args:\n    json_path: \
         r.json\n    mask_prompt: true\n    val_split_fraction: 0.1\ntrain:\n  global_batch_size: \
         8\n  micro_batch_size: 2\n  lr_warmup_steps: 10\n  epochs: 3\n  max_seq_length: 512\n  min_lr: \
         1e-5\neval:\n  interval: 100\noptimizer:\n  class_path: torch.optim.AdamW\n  init_args:\n    lr: \
         0.0001\n    betas: [0.9, 0.95]\n",
    );
    let expected = r#"model.path="c/m" lora.target_modules=["q_proj","v_proj"] data.train.0.path="r.json"
        data.train_on_inputs=false data.max_length=512 train.gradient_accumulation_steps=4 train.num_epochs=3
        optimizer.betas=[0.9,0.95] scheduler.warmup_steps=10 eval.eval_steps=100"#;
    assert_settings(&found, expected);
    assert_eq!(lost, ["lora_head"]);
}

#[test]
fn mlx_lm_s_scale_becomes_alpha_and_its_schedule_ours() {
    let (found, lost) = mapped(
        "lora.yaml",
        "model: m/x\ntrain: true\nfine_tune_type: lora\noptimizer: adamw\ndata: d/x\nseed: 0\nnum_layers: \
         16\nbatch_size: 4\niters: 100\nlearning_rate: 1e-5\nadapter_path: out\nsave_every: 100\nlora_parameters:\n  \
         keys: [self_attn.q_proj]\n  rank: 4\n  scale: 20.0\n  dropout: 0.0\nlr_schedule:\n  name: \
         cosine_decay\n  warmup: 10\n  arguments: [1e-5, 100, 1e-6]\n",
    );
    let expected = r#"lora.r=4 lora.lora_alpha=80.0 data.train_on_inputs=true train.max_steps=100 optimizer.learning_rate=1e-5
        scheduler.lr_scheduler="cosine" scheduler.warmup_steps=10 output_dir="out""#;
    assert_settings(&found, expected);
    assert_eq!(lost, ["num_layers"]);
}

#[test]
fn parameters_of_experts_become_their_rank_and_targets() {
    let peft = r#"{"peft_type": "LORA", "base_model_name_or_path": "m/x", "r": 16, "lora_alpha": 32,
        "target_modules": ["q_proj"], "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}"#;
    let axolotl = "base_model: m/x\nadapter: lora\nlora_r: 16\nlora_alpha: 32\nlora_target_modules: [q_proj]\n\
        lora_target_parameters: [mlp.experts.gate_up_proj, mlp.experts.down_proj]\ndatasets: [{path: a, type: alpaca}]\n";
    for (name, text) in [("adapter_config.json", peft), ("a.yaml", axolotl)] {
        let (found, lost) = mapped(name, text);
        let expected = r#"lora.r=16 lora.expert_rank=16
            lora.target_modules=["q_proj","mlp.experts.gate_up_proj","mlp.experts.down_proj"]"#;
        assert_settings(&found, expected);
        assert_eq!(lost, Vec::<String>::new(), "{name}");
    }
    let (found, _) = mapped("adapter_config.json", &peft.replace(r#""target_modules": ["q_proj"], "#, ""));
    assert_settings(&found, r#"lora.target_modules=["mlp.experts.gate_up_proj","mlp.experts.down_proj"]"#);
    let (_, lost) = mapped(
        "adapter_config.json",
        &peft.replace("mlp.experts.gate_up_proj", "mlp.gate.weight").replace("mlp.experts.down_proj", "x"),
    );
    assert_eq!(lost, ["target_parameters"]);
}

#[test]
fn an_adapter_of_peft_gives_its_settings() {
    let (found, lost) = mapped(
        "adapter_config.json",
        r#"{"peft_type": "LORA", "base_model_name_or_path": "m/x", "r": 16, "lora_alpha": 32, "lora_dropout": 0.05,
            "bias": "none", "target_modules": ["q_proj", "v_proj"], "use_rslora": true, "modules_to_save": null,
            "init_lora_weights": true, "task_type": "CAUSAL_LM", "rank_pattern": {}}"#,
    );
    let expected = r#"lora.r=16 lora.use_rslora=true model.path="m/x""#;
    assert_settings(&found, expected);
    assert_eq!(lost, Vec::<String>::new());
}

#[test]
fn four_bits_are_of_the_kind_and_with_the_scales_that_the_configuration_says_or_its_trainer_defaults_to() {
    let axolotl = "base_model: m/x\nadapter: qlora\nload_in_4bit: true\n";
    let factory = "model_name_or_path: m/x\nstage: sft\nquantization_bit: 4\n";
    let trl = "model_name_or_path: m/x\nload_in_4bit: true\n";
    for (text, more, kind, is_double) in [
        (axolotl, "", "nf4", Some(true)),
        (axolotl, "bnb_4bit_quant_type: fp4\nbnb_4bit_use_double_quant: false\n", "fp4", Some(false)),
        (axolotl, "bnb_config_kwargs:\n  bnb_4bit_quant_type: fp4\n", "fp4", Some(true)),
        (axolotl, "bnb_config_kwargs:\n  bnb_4bit_use_double_quant: false\n", "nf4", Some(false)),
        (factory, "", "nf4", Some(true)),
        (factory, "quantization_type: fp4\ndouble_quantization: false\n", "fp4", Some(false)),
        (trl, "bnb_4bit_quant_type: fp4\n", "fp4", None),
        (trl, "use_bnb_nested_quant: true\n", "nf4", Some(true)),
    ] {
        for text in [format!("{text}{more}"), format!("{more}{text}")] {
            let (found, lost) = mapped("q.yaml", &text);
            let double = found.get("model.double_quantization").and_then(toml::Value::as_bool);
            assert_eq!((found["model.quantization"].as_str(), double), (Some(kind), is_double), "{text}");
            assert_eq!(lost, Vec::<String>::new(), "{text}");
        }
    }
    for text in ["stage: sft\nquantization_bit: 8\nquantization_type: fp4\n", "load_in_8bit: true\n"] {
        let (found, _) = mapped("q.yaml", &format!("model_name_or_path: m/x\n{text}"));
        assert_eq!(
            (found["model.quantization"].as_str(), found.get("model.double_quantization")),
            (Some("int8"), None)
        );
    }
}

#[test]
fn configurations_of_other_objectives_are_refused_and_name_the_key() {
    let torchtune = "model:\n  _component_: t.lora_llama3_2_1b\nloss:\n  _component_: t.rlhf.loss.DPOLoss\n";
    let full = "model:\n  _component_: t.llama3_2_1b\nloss:\n  _component_: t.loss.LinearCrossEntropyLoss\n";
    for (text, key) in [
        ("base_model: m/x\nadapter: lora\nrl: ppo\n", "`rl: ppo`: this is PPO"),
        ("base_model: m/x\nadapter: lora\nprocess_reward_model: true\n", "`process_reward_model: true`"),
        ("peft_type: LORA\ntask_type: SEQ_CLS\n", "`task_type: SEQ_CLS`"),
        ("base_model: m/x\nadapter:\n", "without `adapter` axolotl"),
        ("model_name_or_path: m/x\nstage: ppo\n", "`stage: ppo`"),
        ("model_name_or_path: m/x\nstage: sft\nfinetuning_type: full\n", "`finetuning_type: full`"),
        ("model: m/x\nmodel_class: llm\ncutoff_len: 512\n", "without `peft_config` LLaMA-Factory"),
        ("model_name_or_path: m/x\nstage: sft\ndo_predict: true\n", "without `do_train` LLaMA-Factory"),
        ("model_name_or_path: m/x\nreward_funcs: [length]\n", "without `use_peft: true` TRL"),
        ("model_name_or_path: m/x\nstage: sft\nreward_funcs: [length]\n", "`reward_funcs`"),
        ("model_name_or_path: m/x\nuse_peft: false\n", "without `use_peft: true` TRL"),
        ("model: m/x\niters: 10\nfine_tune_type: full\n", "`fine_tune_type: full`"),
        ("checkpoint_dir: m/x\ntrain:\n  epochs: 1\n", "without `lora_r` litgpt"),
        ("initial_checkpoint_dir: m/x\n", "`initial_checkpoint_dir: m/x`"),
        (torchtune, "`loss: DPOLoss`"),
        (full, "`model: llama3_2_1b`"),
    ] {
        let message = objective::refusal(&read("c.yaml", text)).map(|problem| problem.message).unwrap_or_default();
        assert!(message.starts_with(key), "{message} of {text}");
    }
}

#[test]
fn configurations_of_preferences_become_objectives() {
    let axolotl = "base_model: m/x\nadapter: lora\nlearning_rate: 1e-5\n";
    let factory = "model_name_or_path: m/x\nfinetuning_type: lora\ndataset: a\n";
    let trl = "model_name_or_path: m/x\nuse_peft: true\ndataset_name: a.jsonl\n";
    for (trainer, text, settings) in [
        (axolotl, "rl: dpo\nrl_beta: 0.2\n", &[("name", "'dpo'"), ("beta", "0.2")][..]),
        (axolotl, "rl: ipo\n", &[("name", "'dpo'"), ("loss_type", "'ipo'")]),
        (axolotl, "rl: kto\nkto_undesirable_weight: 2.0\n", &[("name", "'kto'"), ("undesirable_weight", "2.0")]),
        (axolotl, "rl: orpo\norpo_alpha: 0.3\n", &[("name", "'orpo'"), ("beta", "0.3")]),
        (factory, "stage: dpo\npref_loss: simpo\nsimpo_gamma: 0.5\n", &[("name", "'simpo'"), ("simpo_gamma", "0.5")]),
        (factory, "stage: dpo\npref_ftx: 0.5\n", &[("name", "'dpo'"), ("loss_weights", "[1.0, 0.5]")]),
        (
            factory,
            "stage: dpo\npref_loss: simpo\npref_beta: 2.5\n",
            &[("name", "'simpo'"), ("beta", "2.5"), ("simpo_gamma", "0.5")],
        ),
        (axolotl, "rl: simpo\n", &[("beta", "0.1"), ("simpo_gamma", "0.5"), ("cpo_alpha", "1.0")]),
        (factory, "stage: dpo\npref_loss: orpo\n", &[("name", "'orpo'"), ("orpo_nll", "'completion'")]),
        (factory, "stage: rm\n", &[("name", "'reward'")]),
        (trl, "loss_type: simpo\nbeta: 0.4\n", &[("name", "'simpo'"), ("beta", "0.4"), ("cpo_alpha", "1.0")]),
        (trl, "beta: 0.2\ndesirable_weight: 2.0\n", &[("name", "'kto'"), ("desirable_weight", "2.0"), ("beta", "0.2")]),
        (trl, "center_rewards_coefficient: 0.01\n", &[("name", "'reward'")]),
        (trl, "beta: 0.3\nmax_prompt_length: 512\n", &[("name", "'dpo'"), ("beta", "0.3")]),
        (
            axolotl,
            "reward_model: true\ncenter_rewards_coefficient: 0.01\n",
            &[("name", "'reward'"), ("center_rewards_coefficient", "0.01")],
        ),
        (trl, "lora_task_type: SEQ_CLS\n", &[("name", "'reward'")]),
        (trl, "beta: 0.3\nloss_type: hinge\n", &[("name", "'dpo'"), ("beta", "0.3"), ("loss_type", "'hinge'")]),
    ] {
        let (found, lost) = mapped("c.yaml", &format!("{trainer}{text}"));
        for (key, value) in settings {
            let found = found.get(&format!("objective.{key}")).map(ToString::to_string).unwrap_or_default();
            assert_eq!(found.replace('"', "'"), *value, "{key} of {text}; lost: {lost:?}");
        }
    }
}

#[test]
fn trls_learning_rates_are_those_of_its_objectives() {
    for (text, rate) in [("beta: 0.1\n", 1e-6), ("center_rewards_coefficient: 0.01\n", 1e-4)] {
        let text = format!("model_name_or_path: m/x\nuse_peft: true\ndataset_name: a.jsonl\n{text}");
        let found = mapped("c.yaml", &text).0.get("optimizer.learning_rate").and_then(toml::Value::as_float);
        assert_eq!(found, Some(rate), "{text}");
    }
}

#[test]
fn configurations_of_grpo_become_objectives_with_their_reward_functions() {
    let trl = "model_name_or_path: m/x\nuse_peft: true\ndataset_name: a.jsonl\n";
    let axolotl = "base_model: m/x\nadapter: lora\nlearning_rate: 1e-5\nrl: grpo\n";
    for (trainer, text, settings, lost) in [
        (
            trl,
            "reward_funcs: [accuracy_reward, mine.format]\nreward_weights: [1.0, 0.5]\nnum_generations: 4\nbeta: \
             0.04\nper_device_train_batch_size: 2\ngradient_accumulation_steps: 4\nsteps_per_generation: 8\nepsilon: \
             0.1\ntop_p: 0.9\nmin_p: 0.1\nscale_rewards: false\nuse_vllm: true\nvllm_mode: colocate\nloss_type: \
             dr_grpo\nmax_prompt_length: 256\ntop_k: -1\n",
            // Eight answers a step are two prompts, and four are written together.
            "objective.name='grpo' objective.num_generations=4 objective.beta=0.04 objective.loss_type='dr_grpo' \
             objective.epsilon=0.1 objective.top_p=0.9 objective.min_p=0.1 objective.scale_rewards='none' \
             objective.max_completion_length=512 objective.reward.0.kind='python' \
             objective.reward.0.file='rewards.py' objective.reward.0.functions=['accuracy_reward'] \
             objective.reward.0.weights=[1.0] objective.reward.1.file='mine.py' objective.reward.1.functions=['format'] \
             objective.reward.1.weights=[0.5] train.micro_batch_size=1 \
             train.gradient_accumulation_steps=2 objective.steps_per_generation=4 optimizer.learning_rate=1e-6 \
             data.max_length=768",
            &[][..],
        ),
        // One answer is used once: nothing is clipped.
        (
            trl,
            "num_generations: 4\nepsilon: 0.1\nvespo_k_neg: 2\nsteps_per_generation: 1\nloss_type: vespo\n",
            "train.micro_batch_size=2 objective.reward.0.functions=['reward_func_1'] objective.loss_type='vespo'",
            &[],
        ),
        (
            axolotl,
            "micro_batch_size: 16\ntrl:\n  beta: 0.001\n  use_vllm: true\n  reward_funcs: [rewards.a]\n  reward_weights: \
             [2.0]\n  num_generations: 8\n  max_completion_length: 128\n  temperature: 0.7\n  sync_ref_model: \
             true\n  no_key: 1\nvllm:\n  host: a\n",
            r"objective.name='grpo' objective.beta=0.001 objective.temperature=0.7
                objective.max_completion_length=128 objective.reward.0.file='rewards.py'
                objective.reward.0.functions=['a'] objective.reward.0.weights=[2.0] train.micro_batch_size=2 optimizer.learning_rate=1e-5",
            &["trl.sync_ref_model", "trl.no_key"],
        ),
    ] {
        let (found, missed) = mapped("c.yaml", &format!("{trainer}{text}"));
        assert_settings(&found, settings);
        assert_eq!(missed, lost, "{text}");
        assert_eq!(found.get("objective.epsilon").is_some(), text.contains("steps_per_generation: 8"), "{text}");
    }
}

#[test]
fn environments_of_a_program_are_played_and_judged_by_what_judges_them() {
    let program = "class Game:\n    def reset(self, **row):\n        self.points = 0.0\n\ndef add(a: int, b: int):\n    return a + b\n\n\
                   def won(environments, **_):\n    return [game.points for game in environments]\n\n\
                   def brief(completions, **_):\n    return [0.0 for _ in completions]\n\n";
    let trainer = "GRPOTrainer('org/m', args=GRPOConfig(reward_weights=[2.0, 0.5], max_tool_calling_iterations=3), \
                   reward_funcs=[won, brief], environment_factory=Game, tools=[add], peft_config=LoraConfig(r=8))\n";
    let (found, lost) = mapped("game.py", &format!("{program}{trainer}"));
    assert_settings(
        &found,
        "objective.environment.python='rewards.py' objective.environment.class='JudgedGame' objective.environment.tools=['add'] \
         objective.environment.max_turns=4 objective.reward.0.functions=['brief'] objective.reward.0.weights=[0.5]",
    );
    assert_eq!((lost, found.get("objective.reward.1.kind")), (Vec::new(), None));
    let written = |trainer: &str| {
        let foreign = read("game.py", &format!("{program}{trainer}"));
        Mapping::of(&foreign, &ARGS).draft.files
    };
    let judged = "class JudgedGame(Game):\n    def get_reward(self):\n        weighed = [(2.0, won(environments=[self])[0])]\n        \
         return sum(weight * score for weight, score in weighed if score is not None)\n";
    let expected = format!("{}\n\n\n{judged}", program.trim_end());
    assert_eq!(written(trainer), [("rewards.py".to_owned(), expected)]);

    // What they take beside environments and do not use is not there.
    let unused = program.replace("won(environments,", "won(completions: list[str], environments,");
    let foreign = read("game.py", &format!("{unused}{trainer}"));
    let files = Mapping::of(&foreign, &ARGS).draft.files;
    assert!(files[0].1.contains("(2.0, won(environments=[self], completions=[None])[0])"), "{files:?}");
    // No class can call these.
    for (from, to) in [
        ("won(environments,", "won(completions, environments,"),
        ("game.points", "game.get_reward()"),
        ("class Game:\n    def reset(self, **row):\n        self.points = 0.0", "def Game():\n    return 1"),
    ] {
        let changed = program.replace(from, to).replace("environments]", "zip(environments, completions)]");
        let foreign = read("game.py", &format!("{changed}{trainer}"));
        let draft = Mapping::of(&foreign, &ARGS).draft;
        let class = draft.settings.iter().find(|setting| setting.key == "objective.environment.class").unwrap();
        assert!(class.value.as_str() == Some("Game") && draft.has_mistakes, "{to}");
        assert!(class.comment.contains("get_reward(), from what won say"), "{}", class.comment);
        assert!(!draft.files[0].1.contains("Judged"), "{to}");
    }
    // What a function holds cannot be taken from it.
    let within = program.lines().map(|line| format!("    {line}\n")).collect::<String>();
    let draft = Mapping::of(&read("game.py", &format!("def main():\n{within}    {trainer}main()\n")), &ARGS).draft;
    assert!(draft.files.is_empty() && draft.has_mistakes);

    let alone = "GRPOTrainer('org/m', environment_factory=Game, peft_config=LoraConfig(r=8))\n";
    let (found, lost) = mapped("game.py", &format!("{program}{alone}"));
    assert_settings(&found, "objective.environment.class='Game' objective.environment.max_turns=1024");
    assert_eq!((lost, found.get("objective.reward.0.kind")), (Vec::new(), None));
    let expected = "class Game:\n    def reset(self, **row):\n        self.points = 0.0\n";
    assert_eq!(written(alone), [("rewards.py".to_owned(), expected.to_owned())]);
}

#[test]
fn keys_that_would_be_missed_are_taken_or_named() {
    let (found, lost) = mapped(
        "sft.yaml",
        "model_name_or_path: m/x\nstage: sft\ndataset: a,b\nmax_samples: 1000\ninterleave_probs: 0.5,0.5\nmask_history: \
         true\nadam_beta1: 0.8\n",
    );
    let expected =
        r#"data.train.0.rows=1000 data.train.1.rows=1000 data.train_on_turns="last" optimizer.betas=[0.8,0.999]"#;
    assert_settings(&found, expected);
    assert_eq!(lost, ["interleave_probs"]);

    let (found, lost) = mapped(
        "lora.yaml",
        "base_model: m/x\nadapter: lora\ndatasets:\n  - path: a/b\n    data_files: [c.jsonl]\n    split: train[:5%]\n    \
         type:\n      field_instruction: q\n      field_output: a\n      format: '[{instruction}]'\n  - path: d.jsonl\n    \
         type: chat_template\n    split: train[5%:]\n    shards: 4\nchat_template: jinja\nchat_template_jinja: \"{% for m in \
         messages %}\"\ntokens: ['<x>']\nspecial_tokens:\n  pad_token: '<p>'\n  eos_token: '<e>'\nloss_watchdog_threshold: \
         5.0\noptimizer: lion_8bit\n",
    );
    let expected = r#"data.train.0.path="hf://datasets/a/b/c.jsonl" data.train.0.rows="5%"
        data.train.0.columns={instruction="q",output="a"} data.train.1.path="d.jsonl" train.precision="bf16"
        optimizer.name="lion""#;
    assert_settings(&found, expected);
    let expected = [
        "chat_template_jinja", "datasets.0.type.format", "datasets.1.shards", "datasets.1.split",
        "loss_watchdog_threshold", "special_tokens.eos_token", "tokens",
    ];
    assert_eq!(BTreeSet::from_iter(lost), expected.map(str::to_owned).into());

    let qlora = "model:\n  _component_: t.qlora_llama3_2_1b\n  lora_attn_modules: [q_proj]\ndataset:\n  _component_: \
                 t.chat_dataset\n  source: r.jsonl\n  split: train[:95%]\n  column_map: {input: q}\nloss:\n  _component_: \
                 t.loss.LinearCrossEntropyLoss\nprofiler:\n  enabled: true\n";
    let (found, lost) = mapped("8B.yaml", qlora);
    let expected = r#"model.quantization="nf4" data.train.0.rows="95%" optimizer.weight_decay=0.01"#;
    assert_settings(&found, expected);
    assert_eq!(lost, ["dataset.column_map.input"]);

    let litgpt = "checkpoint_dir: c/m\nlora_r: 8\nquantize: bnb.nf4-dq\ndata: Alpaca2k\n";
    let (found, lost) = mapped("lora.yaml", litgpt);
    let expected = r#"model.quantization="nf4" model.double_quantization=true lora.target_modules=["q_proj","v_proj"]
        train.num_epochs=5"#;
    assert_settings(&found, expected);
    assert_eq!(lost, Vec::<String>::new());
}

#[test]
fn trl_s_data_set_is_a_source_and_its_defaults_are_taken() {
    let (found, lost) = mapped(
        "sft.yaml",
        "model_name_or_path: m/x\ndataset_name: a/b\ndataset_config: main\ndataset_train_split: \
         train\ndataset_test_split: test\neval_strategy: steps\neval_steps: 100\nuse_peft: true\nreport_to: \
         [wandb]\npacking: true\n",
    );
    let expected = r#"data.train.0.path="a/b" data.train.0.name="main" data.eval.0.split="test" data.packing=true lora.r=16
        lora.lora_alpha=32 lora.target_modules=["q_proj","v_proj"] optimizer.learning_rate=2e-5"#;
    assert_settings(&found, expected);
    assert_eq!(lost, ["report_to"]);

    let (found, lost) = mapped(
        "mixed.yaml",
        "model_name_or_path: m/x\nlora_r: 4\ndataset_mixture:\n  datasets:\n    - path: a/b\n      split: \
         train[:10]\n    - path: c/d\n      weight: 0.5\n      columns: [messages]\n  test_split_size: 100\n",
    );
    let expected = r#"data.train.0.rows=10 data.train.1.path="c/d" data.eval_split=100"#;
    assert_settings(&found, expected);
    assert_eq!(lost, ["dataset_mixture.datasets.1.weight"]);
}

#[test]
fn mlx_lm_s_defaults_are_taken_whole() {
    let model = concat!(env!("CARGO_MANIFEST_DIR"), "/quickstart/model");
    let config: Value = serde_json::from_slice(&std::fs::read(format!("{model}/config.json")).unwrap()).unwrap();
    let num_layers = config["num_hidden_layers"].as_u64().unwrap();
    let schedule = "lr_schedule:\n  name: linear_schedule\n  arguments: [2e-5, 2e-7, 50]\n";
    let text = format!(
        "model: {model}\nnum_layers: 1\niters: 50\nhf_dataset:\n  path: a/b\n  prompt_feature: q\n  valid_split: \
         test\noptimizer: adamw\noptimizer_config:\n  adamw:\n    eps: 1e-6\n  muon: {{}}\n{schedule}"
    );
    let (found, lost) = mapped("lora.yaml", &text);
    let expected = r#"lora.r=8 lora.lora_alpha=160 data.train.0.columns={prompt="q"} data.eval.0.split="test"
        optimizer.eps=1e-6 optimizer.weight_decay=0.01 optimizer.learning_rate=2e-5 scheduler.min_lr_ratio=0.01
        eval.eval_steps=200 checkpoint.save_steps=100"#;
    assert_settings(&found, expected);
    assert_settings(&found, &format!("lora.layers_to_transform=[{}]", num_layers - 1));
    assert_eq!(lost, Vec::<String>::new());
}

/// Configurations of one key more than a trainer needs: what becomes of it.
#[test]
fn keys_mean_what_they_mean_to_their_trainer() {
    let axolotl = "base_model: m/x\nadapter: lora\n";
    let factory = "model_name_or_path: m/x\nstage: sft\n";
    let litgpt = "checkpoint_dir: m/x\nlora_r: 4\n";
    let trl = "model_name_or_path: m/x\nuse_peft: true\n";
    let peft = "peft_type: LORA\n";
    let torchtune = "model:\n  _component_: t.lora_x\n";
    let set = |text: &'static str| toml::Value::try_from(text.parse::<toml::Table>().unwrap()).unwrap();
    for (trainer, text, expected) in [
        // Steps alone count where both are given, but not where the earlier does.
        (axolotl, "num_epochs: 1\nmax_steps: 9\n", "'train.max_steps' = 9"),
        (factory, "num_train_epochs: 1\nmax_steps: 9\n", "'train.max_steps' = 9"),
        (trl, "num_train_epochs: 1\nmax_steps: 9\n", "'train.max_steps' = 9"),
        (trl, "num_train_epochs: 2\nmax_steps: -1\n", "'train.num_epochs' = 2"),
        (litgpt, "train:\n  epochs: 2\n  max_steps: 9\n", "'train.num_epochs' = 2\n'train.max_steps' = 9"),
        (trl, "warmup_steps: 0.1\n", "'scheduler.warmup_ratio' = 0.1"),
        (trl, "warmup_steps: 5\n", "'scheduler.warmup_steps' = 5"),
        ("", "model_name: m/x\nmax_seq_length: 64\nr: 4\n", "'model.path' = 'm/x'\n'lora.r' = 4"),
        (peft, "rank_pattern: {q_proj: 4, v_proj: 2}\n", "'lora.rank_pattern' = {q_proj = 4, v_proj = 2}"),
        (
            axolotl,
            "optimizer: adamw_bnb_8bit\nneftune_noise_alpha: 5\n",
            "'optimizer.name' = 'adamw_8bit'\n'train.neftune_noise_alpha' = 5",
        ),
        (
            torchtune,
            "optimizer: {_component_: torch.optim.SGD, momentum: 0.9}\n",
            "'optimizer.name' = 'sgd'\n'optimizer.momentum' = 0.9",
        ),
        (
            trl,
            "optim: schedule_free_adamw\nlr_scheduler_type: cosine_with_restarts\nlr_scheduler_kwargs: {num_cycles: 3}\n",
            "'optimizer.name' = 'schedule_free_adamw'\n'scheduler.lr_scheduler' = 'cosine_with_restarts'\n'scheduler.num_cycles' = 3",
        ),
        (peft, "alpha_pattern: {q_proj: 4}\n", "'lora.alpha_pattern' = {q_proj = 4}"),
        ("", "model: m/x\ntrain: true\ndata: a/b\n", "'train.max_steps' = 1000\n'data.train.0.path' = 'a/b'"),
        (
            torchtune,
            "checkpointer: {output_dir: o}\ndataset: {conversation_column: c, conversation_style: openai}\n",
            "output_dir = 'o'\n'data.train.0.columns' = {messages = 'c'}",
        ),
        (
            axolotl,
            "rl: dpo\ndatasets: [{path: a.jsonl, field_messages: talk, field_chosen: good, field_rejected: rejected}]\n",
            "'data.train.0.columns' = {prompt = 'talk', chosen = 'good'}",
        ),
        (
            "",
            "task: llm-orpo\nbase_model: m/x\ndata: {path: a/b}\nparams: {peft: true, quantization: int4, \
             epochs: 2, lr: 1e-5}\n",
            "'model.path' = 'm/x'\n'data.train.0.path' = 'a/b'\n'model.quantization' = 'nf4'\n'train.num_epochs' = 2\n\
             'objective.name' = 'orpo'",
        ),
        // Files have no splits.
        (trl, "dataset_name: a.jsonl\ndataset_train_split: train\n", "'data.train.0.path' = 'a.jsonl'"),
        (axolotl, "datasets: [{path: src, data_files: a.jsonl}]\n", "'data.train.0.path' = 'src/a.jsonl'"),
        (axolotl, "datasets: [{path: json, data_files: a.jsonl}]\n", "'data.train.0.path' = 'a.jsonl'"),
        (axolotl, "datasets: [{path: a.csv, type: alpaca_chat.load_qa}]\n", "'data.train.0.path' = 'a.csv'"),
        // Alpaca's prompt is in no chat template.
        (axolotl, "datasets: [{path: a.csv, type: alpaca}]\n", "'data.chat_template' = 'none'"),
        (litgpt, "data: Alpaca2k\n", "'data.chat_template' = 'none'\n'data.eval_split' = 0.05"),
        (litgpt, "data: {class_path: JSON, init_args: {json_path: a.json}}\n", "'data.eval_split' = 0.05"),
        // Pre-training.
        (
            axolotl,
            "pretraining_dataset: [{path: a/b, text_column: t}]\n",
            "'data.train.0.format' = 'text'\n'data.train.0.columns' = {text = 't'}",
        ),
        (axolotl, "pretraining_dataset: a/b\n", "'data.train.0.path' = 'a/b'\n'data.train.0.format' = 'text'"),
        (
            "model_name_or_path: m/x\nstage: pt\n",
            "dataset: a/b\n",
            "'data.train.0.format' = 'text'\n'data.packing' = true",
        ),
    ] {
        let (found, lost) = mapped("c.yaml", &format!("{trainer}{text}"));
        for (key, value) in set(expected).as_table().unwrap() {
            assert_eq!(found.get(key), Some(value), "{text}: {found}");
        }
        assert_eq!(lost, Vec::<String>::new(), "{text}");
        let is_both = text.contains("epochs: 1\n") && found.contains_key("train.num_epochs");
        let has_split = found.contains_key("data.train.0.split")
            || text.contains("load_qa") && found.contains_key("data.train.0.format");
        assert!(!is_both && !has_split, "{text}: {found}");
    }
}

#[test]
fn what_is_lost_says_what_is_done_instead() {
    let axolotl = "base_model: m/x\nadapter: lora\ndatasets: [{path: a.jsonl, type: alpaca}, {path: b.jsonl}]\n";
    let factory = "model_name_or_path: m/x\nstage: sft\ndataset: a,b/c\n";
    let trl = "model_name_or_path: m/x\nuse_peft: true\ndataset_name: a.jsonl\neval_strategy: steps\n";
    for (text, more, expected) in [
        (axolotl, "learnign_rate: 1e-4\n", "learnign_rate: there is no such key here; did you mean `learning_rate`?"),
        (axolotl, "excess_length_strategy: drop\n", "rows longer than `max_length` are cut, and counted, not dropped"),
        (axolotl, "unfrozen_parameters: [x]\n", "unfrozen_parameters: only adapters are trained here"),
        (axolotl, "seed: 1\ndata_seed: 2\n", "data_seed: there is one seed here: `seed`"),
        (axolotl, "", "differs: datasets.0.type: Alpaca's prompt there; here the model's chat template"),
        (factory, "create_new_adapter: true\n", "create_new_adapter: training goes on in the adapter"),
        (factory, "quantization_method: hqq\n", "quantization_method: `model.quantization` has bitsandbytes'"),
        (factory, "save_only_model: true\n", "save_only_model: checkpoints hold the optimizer's state too"),
        (factory, "additional_target: embed_tokens,lm_head\n", "of 4 keys, 3 are taken over, 0 lost, 1 without effect"),
        (factory, "use_unsloth: true\n", "of 4 keys, 2 are taken over, 0 lost, 2 without effect"),
        (factory, "", "differs: dataset: `a`: there is no data/dataset_info.json"),
        (trl, "num_generations: 8\n", "of 5 keys, 3 are taken over, 0 lost"),
        (trl, "reward_funcs: [a]\n", "differs: reward_funcs: `file` in [[objective.reward]] is imported for them"),
        (
            trl,
            "num_generations: 4\nper_device_train_batch_size: 8\n",
            "differs: per_device_train_batch_size: answers there, prompts here",
        ),
        (trl, "dataset_test_split: test\n", "dataset_test_split: a.jsonl is a file, which has no splits"),
    ] {
        let foreign = read("c.yaml", &format!("{text}{more}"));
        let footer = Mapping::of(&foreign, &ARGS).footer().join("\n");
        assert!(footer.contains(expected), "{expected}: {footer}");
    }
}
