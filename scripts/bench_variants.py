#!/usr/bin/env python3
"""What a variant of a recipe costs beside the plain one: families of models of one size beside Llama's, and kinds of adapters,
optimizers and noise beside LoRA with AdamW.

usage: bench_variants.py families|adapters [--rounds 3] [--seconds 10] [--only NAME...] [--binary PATH] [--out benches/results]

Every round measures each with `bench`, beside the plain one, every second one in the opposite order. `families` have random
weights: 6 layers 768 wide, 12 heads of 64 with 4 of keys and values, 2,048 inside the feed-forward layers (experts: 8 of 64 of width 256,
beside a dense Llama of their 2,048), 32,000 tokens. `adapters` take SmolLM2-135M's shape, also with random weights, on one
row of 512 tokens. The share of the peak is that of the processor's largest product (`mfu`). Medians, also of the ratios of pairs;
prints a table and writes JSON with hardware and command.
"""

import argparse
import json
import pathlib
import statistics
import tempfile

import benchlib

ROOT = pathlib.Path(__file__).resolve().parent.parent
SIZE = {"vocab_size": 32000, "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 6, "num_attention_heads": 12,
        "num_key_value_heads": 4, "head_dim": 64, "max_position_embeddings": 2048, "tie_word_embeddings": True,
        "bos_token_id": 1, "eos_token_id": 2}
EXPERTS = {"num_experts": 64, "num_local_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 256,
           "shared_expert_intermediate_size": 256}
DELTA = {"linear_num_key_heads": 6, "linear_num_value_heads": 6, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
         "full_attention_interval": 3}
# Architecture, and what else the family needs. The first is what others are held against.
FAMILIES = {
    "llama": ("Llama", {}), "qwen2": ("Qwen2", {}), "qwen3": ("Qwen3", {}), "mistral": ("Mistral", {"sliding_window": 256}),
    "gemma2": ("Gemma2", {"sliding_window": 256}), "gemma3_text": ("Gemma3", {"sliding_window": 256}),
    "smollm3": ("SmolLM3", {}), "olmo2": ("Olmo2", {}), "granite": ("Granite", {}), "phi3": ("Phi3", {}), "glm4": ("Glm4", {}),
    "ernie4_5": ("Ernie4_5", {}), "nemotron": ("Nemotron", {"hidden_act": "relu2", "intermediate_size": 3072}),
    "lfm2": ("Lfm2", {"block_auto_adjust_ff_dim": False, "full_attn_idxs": [2, 5]}),
    "qwen3_5_text": ("Qwen3_5", DELTA), "qwen3_moe": ("Qwen3Moe", EXPERTS | {"norm_topk_prob": True}),
    "qwen2_moe": ("Qwen2Moe", EXPERTS | {"moe_intermediate_size": 224}),
}
# Settings beside those of LoRA with AdamW.
ADAPTERS = {
    "lora": [], "rslora": ["lora.use_rslora=true"], "dora": ["lora.use_dora=true"], "r = 64": ["lora.r=64"],
    "olora": ['lora.init_lora_weights="olora"'], "pissa": ['lora.init_lora_weights="pissa"'],
    "pissa_niter_4": ['lora.init_lora_weights="pissa_niter_4"'], "orthogonal": ['lora.init_lora_weights="orthogonal"'],
    "loraplus": ["lora.loraplus_lr_ratio=16"], "neftune": ["train.neftune_noise_alpha=5"], "dropout": ["lora.lora_dropout=0.05"],
    "ema": ["optimizer.ema_decay=0.999"], "tokens": ["lora.trainable_token_indices=[0,1,2,3]"],
    **{name: [f'optimizer.name="{name}"'] for name in ("adamw_8bit", "lion", "adafactor", "sgd", "muon")},
    "schedule_free": ['optimizer.name="schedule_free_adamw"', 'scheduler.lr_scheduler="constant"'],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=("families", "adapters"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=int, default=10)
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--binary", type=pathlib.Path, default=benchlib.default_binary())
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "benches/results")
    args = parser.parse_args()
    variants = FAMILIES if args.kind == "families" else ADAPTERS
    first = next(iter(variants))
    names = [name for name in variants if name != first and (not args.only or name in args.only)]
    with tempfile.TemporaryDirectory() as scratch:
        folder = pathlib.Path(scratch)

        def run(_: int, row: str, side: str) -> dict:
            name = first if side == "plain" else row
            model, settings = folder / "model", ADAPTERS.get(name, [])
            model.mkdir(exist_ok=True)
            if args.kind == "families":
                architecture, changes = FAMILIES[name]
                config = SIZE | {"model_type": name, "architectures": [f"{architecture}ForCausalLM"]} | changes
                (model / "config.json").write_text(json.dumps(config))
            else:
                (model / "config.json").write_text((ROOT / "configs/smollm2-135m.json").read_text())
            task = {"model": model, "init": "random", "dtype": "f32", "r": 16, "length": 512,
                    "rows": 2 if args.kind == "families" else 1, "checkpointing": False, "steps": 1000, "device": "cpu"}
            (folder / "recipe.toml").write_text(benchlib.recipe(task, folder / "out"))
            command = benchlib.bench_command(args.binary, folder / "recipe.toml", settings)
            return benchlib.measure([*command, "--seconds", str(args.seconds)])

        found = benchlib.rounds(benchlib.interleaved(args.rounds, names, ["plain", "itself"]), args.rounds, run)
    medians = {first: benchlib.medians([run for sides in found.values() for run in sides["plain"]])}
    for name, sides in found.items():
        medians[name] = benchlib.medians(sides["itself"])
        for key in ("step_seconds", "peak_memory_bytes"):
            pairs = zip(sides["itself"], sides["plain"], strict=True)
            medians[name][f"{key}_ratio"] = statistics.median(itself[key] / plain[key] for itself, plain in pairs)
    lines = [(name, f"{of['step_seconds']:.2f} s", f"{of.get('step_seconds_ratio', 1):.2f}", f"{of['mfu']:.0%}",
              f"{of['peak_memory_bytes'] / 2**20:,.0f} MiB", f"{of.get('peak_memory_bytes_ratio', 1):.2f}") for name, of in medians.items()]
    print(benchlib.table(("", "a step", "of the first", "of the peak", "memory", "of the first"), lines))
    result = {"machine": benchlib.machine(), "versions": benchlib.versions(args.binary, ()), "medians": medians, "runs": found}
    print(benchlib.write_result(args.out, f"variants-{args.kind}", result))


if __name__ == "__main__":
    main()
