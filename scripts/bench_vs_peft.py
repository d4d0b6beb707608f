#!/usr/bin/env python3
"""Our training step next to PyTorch + transformers + PEFT, on this machine, in one run.

usage: bench_vs_peft.py [--models models] [--rounds 3] [--steps 6] [--rows NAME ...] [--sides NAME ...]
                        [--binary target/release/lora-train] [--set section.key=value ...] [--out benches/results]

Every measurement is a process of its own. In each round every side runs once per row, and every second round runs in
the opposite order, so that a machine that slows down slows both. A step is micro-batches of random tokens at full
length, LoRA on every linear layer, AdamW, clipping at 1. Reported are medians over the rounds of

  step          median step after the warm-up, in seconds, and tokens per second from it
  first step    time from process start to the end of the first step, in seconds
  CPU s         processors' time of the whole process, from its start, which other work on the machine does not lengthen
  memory        the process's peak resident memory, read from outside (VmHWM), in the same way for both sides

and the ratios to PEFT in f32. Prints a table and writes JSON with hardware, versions and command line to --out.

Sides: ours-f32, ours-bf16, peft-f32, peft-bf16 (base in bf16, adapters in f32, autocast), and ours-nf4, peft-nf4 (the
same with the base in nf4, on PEFT's side by bitsandbytes). --set goes to our side only.
Needs the models (scripts/get_models.py) and the Python packages of scripts/setup_python.sh.
"""

import argparse
import json
import pathlib
import sys
import tempfile

import benchlib

SIDES = ("ours-f32", "peft-f32", "ours-bf16", "peft-bf16", "ours-nf4", "peft-nf4")
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
ROWS = {
    "stories15M-4x256": {"model": "stories15M", "rows": 4, "length": 256, "r": 8, "checkpointing": False},
    "smollm2-2x512": {"model": "smollm2-135m", "rows": 2, "length": 512, "r": 16, "checkpointing": False},
    "smollm2-1x4096": {"model": "smollm2-135m", "rows": 1, "length": 4096, "r": 16, "checkpointing": True},
    "mixture-2x512": {"model": "random-mixture", "rows": 2, "length": 512, "r": 4, "checkpointing": False, "targets": {"target_modules": ATTENTION}},
    # PEFT has gate and up in one, which holds the adapters of both with twice the rank.
    "experts-2x512": {"model": "random-mixture", "rows": 2, "length": 512, "r": 4, "checkpointing": False, "expert_rank": 4, "targets": {
        "target_modules": ATTENTION, "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        "rank_pattern": {"experts.gate_up_proj": 8}, "alpha_pattern": {"experts.gate_up_proj": 16}}},
}
# A Qwen3-MoE of 227 million random parameters, made where it is not among the models.
MIXTURE = {"num_hidden_layers": 4, "hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64, "num_experts": 32,
           "num_experts_per_tok": 4, "moe_intermediate_size": 384, "intermediate_size": 1024, "vocab_size": 32000, "max_position_embeddings": 2048,
           "norm_topk_prob": True}


def peft_side(task: dict) -> None:
    """One measurement of PEFT; prints one JSON object."""
    import torch
    from transformers import AutoModelForCausalLM

    options = {"dtype": torch.bfloat16 if task["dtype"] == "bf16" else torch.float32}
    if task["is_quantised"]:
        from transformers import BitsAndBytesConfig

        config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)
        options |= {"quantization_config": config, "device_map": "cpu"}
    benchlib.peft_steps(AutoModelForCausalLM.from_pretrained(task["model"], **options), task)


def make_mixture(folder: pathlib.Path, tokenizer: pathlib.Path) -> None:
    """That of `MIXTURE`, with the tokenizer of another model."""
    import shutil

    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(1)
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**MIXTURE)).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / name, folder)


def run_side(side: str, row: dict, args, work: pathlib.Path) -> dict:
    """One measurement."""
    program, dtype = side.split("-")
    is_quantised = dtype == "nf4"
    task = {**row, "model": str((args.models / row["model"]).resolve()), "dtype": "bf16" if is_quantised else dtype,
            "is_quantised": is_quantised, "steps": args.steps, "device": "cpu"}
    if program == "peft":
        return benchlib.measure([sys.executable, __file__, "--peft-side", json.dumps(task)])
    recipe = work / f"{side}.toml"
    recipe.write_text(benchlib.recipe(task, work / "run"))
    settings = args.set + ["model.quantization=nf4"] * is_quantised
    settings += [f"lora.expert_rank={row['expert_rank']}"] if "expert_rank" in row else []
    return benchlib.measure(benchlib.bench_command(args.binary, recipe, settings, row.get("warmup", benchlib.NUM_WARMUP_STEPS)))


def table(found: dict[str, dict[str, list[dict]]]) -> tuple[str, list[dict]]:
    """The table to print, and its figures for the file."""
    lines, figures = [], []
    for row, sides in found.items():
        medians = {side: benchlib.medians(runs) for side, runs in sides.items()}
        reference = medians.get("peft-f32")
        for side, m in medians.items():
            entry = {"row": row, "side": side, **m}
            if reference:
                entry["speed_ratio"] = m["tokens_per_second"] / reference["tokens_per_second"]
                entry["memory_ratio"] = m["peak_memory_bytes"] / reference["peak_memory_bytes"]
            figures.append(entry)
            ratios = [f"{entry[k]:.2f}x" if k in entry else "" for k in ("speed_ratio", "memory_ratio")]
            lines.append((row, side, f"{m['step_seconds']:.3f}", f"{m['tokens_per_second']:,.0f}", f"{m['peak_memory_bytes'] / 2**20:,.0f}",
                          f"{m['first_step_seconds']:.2f}", f"{m['cpu_seconds']:.0f}", *ratios))
    return benchlib.table(("row", "side", "step s", "tokens/s", "memory MiB", "first step s", "CPU s", "speed", "memory"), lines), figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", type=pathlib.Path, default=pathlib.Path("models"))
    parser.add_argument("--binary", type=pathlib.Path, default=benchlib.default_binary())
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6, help="measured steps, after a warm-up")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES[:2]))
    parser.add_argument("--set", action="append", default=[], metavar="section.key=value", help="for our side's recipe")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("benches/results"))
    parser.add_argument("--peft-side", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.peft_side:
        return peft_side(args.peft_side)
    mixture = args.models / "random-mixture"
    if any(ROWS[row]["model"] == mixture.name for row in args.rows) and not mixture.exists():
        make_mixture(mixture, args.models / "stories15M")
    with tempfile.TemporaryDirectory() as work:
        run = lambda _, row, side: run_side(side, ROWS[row], args, pathlib.Path(work))
        try:
            found = benchlib.rounds(benchlib.interleaved(args.rounds, args.rows, args.sides), args.rounds, run)
        except benchlib.Failed as failure:
            sys.exit(str(failure))
    text, figures = table(found)
    print(text)
    result = {"machine": benchlib.machine(), "versions": benchlib.versions(args.binary, ("torch", "transformers", "peft")),
              "rows": {row: ROWS[row] for row in args.rows}, "medians": figures, "runs": found}
    print(benchlib.write_result(args.out, "peft", result), file=sys.stderr)


if __name__ == "__main__":
    main()
