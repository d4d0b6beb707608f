use serde_json::json;

use super::*;

#[test]
fn literals_of_a_training_are_found_by_name() {
    let program = r#"
from unsloth import FastLanguageModel  # FastLanguageModel.from_pretrained("no/model")
max_seq_length = 2048
dtype = None # None for auto detection
rank: int = 8
NAME = f"org/{max_seq_length}-model"
"""
model = FastLanguageModel.from_pretrained("no/model", load_in_8bit = True)
"""
model, tokenizer = FastLanguageModel.from_pretrained(
    model_name = "unsloth/Llama-3.2-1B", max_seq_length = max_seq_length,
    dtype = dtype,
    load_in_4bit = True, # 4 bits
    token = "hf_x",
)
model = FastLanguageModel.get_peft_model(
    model, r = rank,
    target_modules = ["q_proj", 'k_proj',
                      "v_proj",],
    lora_alpha = 16, use_gradient_checkpointing = "unsloth", random_state = 3_407, loftq_config = None)
tokenizer = get_chat_template(tokenizer, chat_template = "llama-3.1")
dataset = load_dataset("json", data_files = {"train": "rows.jsonl", "test": ["held.jsonl"]}, split = "train")
trainer = SFTTrainer(
    model = model, tokenizer = tokenizer, train_dataset = dataset,
    args = TrainingArguments(
        per_device_train_batch_size = 2, learning_rate = 2e-4, weight_decay = -.01,
        fp16 = not is_bfloat16_supported(), bf16 = is_bfloat16_supported(),
        warmup_steps = compute(5), report_to = ("none"), betas = (0.9, 0.95,),
        run_name = "a" "b", num_train_epochs == 3, output_dir = args.output_dir),
    packing = False, max_length = max_seq_length - 2 * 256, note = "x = 1, r = 99 # no",
)
trainer = train_on_responses_only(trainer, instruction_part = "<|user|>", response_part = "<|assistant|>")
model.generate(input_ids, temperature = 1.5, max_new_tokens = 64)
config = GenerationConfig(temperature = 2)
if False: model.save_pretrained_gguf("m", tokenizer, quantization_method = "q8_0")
if False:
    model.push_to_hub_merged("x/y", tokenizer)
model.save_pretrained_gguf("m", tokenizer, quantization_method = "q4_k_m")
FastLanguageModel.from_pretrained(model_name = "lora_model", load_in_4bit = False)
"#;
    let said = of_program(program);
    let expected = json!({
        "model_name": "unsloth/Llama-3.2-1B", "max_seq_length": 2048, "dtype": null, "load_in_4bit": true,
        "r": 8, "target_modules": ["q_proj", "k_proj", "v_proj"], "lora_alpha": 16, "use_gradient_checkpointing": "unsloth",
        "random_state": 3407, "loftq_config": null, "chat_template": "llama-3.1", "train_file": "rows.jsonl",
        "eval_file": "held.jsonl", "packing": false, "max_length": 1536, "note": "x = 1, r = 99 # no", "per_device_train_batch_size": 2,
        "learning_rate": 2e-4, "weight_decay": -0.01, "fp16": false, "bf16": true, "report_to": "none", "betas": [0.9, 0.95],
        "run_name": "ab", "train_on_responses_only": true,
    });
    assert_eq!(Value::Object(said.root), expected);
    assert_eq!(said.unknown, ["warmup_steps", "output_dir"]);
    assert!(said.is_unsloth && said.has_lora && said.objective.is_none());
    let [(name, text)] = &said.asides[..] else { panic!("{:?}", said.asides) };
    assert!(
        name == "save_pretrained_gguf" && text.contains("llama-quantize model.gguf model-q4_k_m.gguf Q4_K_M"),
        "{text}"
    );
}

#[test]
fn other_programs_say_objectives_models_and_rows() {
    let said = of_program(
        "parser.add_argument(\"--beta\", type=float, default=0.3)\nargs = parser.parse_args()\nmodel_id = 'org/m'\n\
         model = AutoModelForCausalLM.from_pretrained(model_id, torch_dtype=torch.bfloat16, quantization_config=BitsAndBytesConfig(\
         load_in_4bit=True, bnb_4bit_quant_type='nf4'))\ntokenizer = AutoTokenizer.from_pretrained('org/t', padding_side='left')\n\
         rows = load_dataset('org/rows', 'main', split='train[:10%]')\nheld = load_dataset('org/rows', split='test')\n\
         peft = LoraConfig(r=4, task_type='CAUSAL_LM')\nDPOTrainer(model, args=DPOConfig(beta=args.beta, max_length=512))\n",
    );
    let expected = json!({
        "model_name": "org/m", "torch_dtype": "bfloat16", "load_in_4bit": true, "bnb_4bit_quant_type": "nf4",
        "dataset_name": "org/rows", "dataset_config": "main", "dataset_train_split": "train[:10%]", "dataset_test_split": "test",
        "r": 4, "task_type": "CAUSAL_LM", "beta": 0.3, "max_length": 512,
    });
    assert_eq!((Value::Object(said.root), said.objective, said.is_unsloth), (expected, Some("dpo"), false));

    let said =
        of_program("GRPOTrainer(model='org/m', reward_funcs=[exact, mine.form], args=GRPOConfig(num_generations=4))");
    let expected = json!({"model": "org/m", "reward_funcs": ["exact", "form"], "num_generations": 4});
    assert_eq!((Value::Object(said.root), said.objective), (expected, Some("grpo")));
    let said = of_program(
        "fs = [form, mine.exact]\nGRPOTrainer('org/m', reward_funcs=fs, environment_factory=games.Game, tools=[add, f(x)])",
    );
    let expected = json!({"reward_funcs": ["form", "exact"], "environment_factory": "Game"});
    assert_eq!((Value::Object(said.root), said.unknown), (expected, vec!["tools".to_owned()]));
    let said = of_program("model, processor = FastVisionModel.from_pretrained('org/vl')");
    assert_eq!(Value::Object(said.root), json!({"model_name": "org/vl"}));
    assert!(of_program("print('a', end='b')\nopen('x', encoding='y'").root.is_empty());
}

#[test]
fn the_code_of_a_notebook_is_apart_from_its_commands() {
    let notebook = json!({"cells": [
        {"cell_type": "markdown", "source": ["LoraConfig(r=1)"]},
        {"cell_type": "code", "source": ["%%capture\n", "!pip install \\\n", "  trl\n", "x = 1\n"]},
        {"cell_type": "code", "source": "%%bash\nswift sft --model m\n"},
    ]});
    assert_eq!(
        of_notebook(&notebook),
        ("x = 1\n".to_owned(), "pip install \\\ntrl\n%%bash\nswift sft --model m\n".to_owned())
    );
}

#[test]
fn what_a_dict_gives_is_read_or_named_and_what_is_said_twice_is_told() {
    let said = of_program(
        "common = dict(lora_alpha=32, bias='none')\nlora = LoraConfig(**{'r': 24}, **common, **kwargs)\n\
         args = SFTConfig(learning_rate=1e-4, max_steps=5)\nargs.learning_rate = 1e-3\nother = SFTConfig(max_steps=7)\n",
    );
    assert_eq!((&said.root["r"], &said.root["lora_alpha"]), (&json!(24), &json!(32)));
    assert_eq!(said.unknown, ["**kwargs"]);
    let asides: Vec<_> = said.asides.iter().map(|(name, text)| format!("{name}: {text}")).collect();
    assert_eq!(
        asides,
        [
            "learning_rate: said more than once: 0.0001 is taken, not 0.001",
            "max_steps: said more than once: 5 is taken, not 7"
        ]
    );
}
