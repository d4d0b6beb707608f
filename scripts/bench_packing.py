#!/usr/bin/env python3
"""Target tokens per second on real rows, packed and padded, next to PEFT, on this machine, in one run.

usage: bench_packing.py --data ROWS.jsonl [--columns '{ instruction = "question", output = "answer" }'] [--models models]
                        [--length 1024] [--steps 4] [--binary target/release/lora-train] [--out benches/results]

SmolLM2-135M, LoRA r=16 on every linear layer, f32, micro-batches of four rows, gradient checkpointing. Sides:

  ours-packed     packing = true: documents packed into rows of --length
  ours            packing = false; on the CPU, micro-batches have no padding
  peft-longest    padded to the longest row of the micro-batch
  peft-length     padded to --length

Target tokens carry loss. A side's figure is the target tokens of all measured steps over their time, without the first
two steps. PEFT gets the same rows in the same order, with the tokens that `lora-train inspect` would show: the chat
template's, with loss on the answer. Prints a table and writes JSON to --out.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile
import time

import benchlib

SIDES = ("ours-packed", "ours", "peft-longest", "peft-length")
ROWS_IN_BATCH = 4
RECIPE = """\
output_dir = "{output}"
[model]
path = "{model}"
[lora]
r = 16
[data]
max_length = {length}
packing = {packing}
shuffle = false
[[data.train]]
path = "{data}"
{columns}
[train]
precision = "f32"
micro_batch_size = {rows}
gradient_checkpointing = true
max_steps = {steps}
[logging]
tensorboard = false
[device]
name = "cpu"
"""


def rate(steps: list[tuple[float, int, int]]) -> dict:
    """Rates over steps of (seconds, tokens, target tokens), without the warm-up."""
    steps = steps[benchlib.NUM_WARMUP_STEPS:]
    seconds, tokens, targets = (sum(step[i] for step in steps) for i in range(3))
    return {"target_tokens_per_second": targets / seconds, "tokens_per_second": tokens / seconds, "seconds": seconds,
            "target_tokens": targets, "steps": len(steps)}


def our_side(packing: bool, args, work: pathlib.Path) -> dict:
    output = work / f"run-{packing}"
    recipe = work / "recipe.toml"
    columns = f"columns = {args.columns}" if args.columns else ""
    recipe.write_text(RECIPE.format(output=output, model=(args.models / "smollm2-135m").resolve(), length=args.length, columns=columns,
                                    packing=str(packing).lower(), data=args.data.resolve(), rows=ROWS_IN_BATCH,
                                    steps=args.steps + benchlib.NUM_WARMUP_STEPS))
    done = subprocess.run([str(args.binary), str(recipe), "--quiet"], capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return rate([(l["step_seconds"], l["tokens"], l["target_tokens"]) for l in lines if "loss" in l])


def peft_side(task: dict) -> None:
    """PEFT on the same rows; prints one JSON object."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(task["model"])
    rows = [json.loads(line) for line in pathlib.Path(task["data"]).read_text().splitlines()]
    question, answer = task["question"], task["answer"]

    def encode(row: dict) -> tuple[list[int], list[int]]:
        turns = [{"role": "user", "content": row[question]}, {"role": "assistant", "content": row[answer]}]
        text = lambda messages, **more: tokenizer.apply_chat_template(messages, tokenize=False, **more)
        prompt = tokenizer(text(turns[:1], add_generation_prompt=True), add_special_tokens=False)["input_ids"]
        ids = tokenizer(text(turns), add_special_tokens=False)["input_ids"][: task["length"]]
        return ids, [-100] * min(len(prompt), len(ids)) + ids[len(prompt):]

    base = AutoModelForCausalLM.from_pretrained(task["model"], dtype=torch.float32)
    base.config.use_cache = False
    base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    base.enable_input_require_grads()
    model = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", r=16, lora_alpha=16, target_modules="all-linear"))
    model.train()
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=2e-4, weight_decay=0.0)
    steps = []
    for step in range(task["steps"] + benchlib.NUM_WARMUP_STEPS):
        batch = [encode(row) for row in rows[step * ROWS_IN_BATCH:(step + 1) * ROWS_IN_BATCH]]
        width = task["length"] if task["pad"] == "length" else max(len(ids) for ids, _ in batch)
        pad = lambda rows, value: torch.tensor([row + [value] * (width - len(row)) for row in rows])
        ids, labels = pad([ids for ids, _ in batch], tokenizer.pad_token_id or 0), pad([labels for _, labels in batch], -100)
        mask = pad([[1] * len(ids) for ids, _ in batch], 0)
        began = time.perf_counter()
        model(input_ids=ids, attention_mask=mask, labels=labels).loss.backward()
        torch.nn.utils.clip_grad_norm_(trainable, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        steps.append((time.perf_counter() - began, int(mask.sum()), int((labels != -100).sum())))
    print(json.dumps(rate(steps)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=pathlib.Path)
    parser.add_argument("--columns", help="the recipe's `columns`, as an inline table")
    parser.add_argument("--models", type=pathlib.Path, default=pathlib.Path("models"))
    parser.add_argument("--binary", type=pathlib.Path, default=benchlib.default_binary())
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=4, help="measured steps, after a warm-up")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("benches/results"))
    parser.add_argument("--peft-side", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.peft_side:
        return peft_side(args.peft_side)
    if not args.data:
        parser.error("--data is needed")
    import tomllib

    columns = tomllib.loads(f"c = {args.columns or '{}'}")["c"]
    names = {"question": columns.get("instruction", "instruction"), "answer": columns.get("output", "output")}
    figures = []
    with tempfile.TemporaryDirectory() as work:
        for side in args.sides:
            program, _, kind = side.partition("-")
            if program == "ours":
                found = our_side(kind == "packed", args, pathlib.Path(work))
            else:
                task = {"model": str((args.models / "smollm2-135m").resolve()), "data": str(args.data.resolve()), "length": args.length,
                        "steps": args.steps, "pad": kind, **names}
                found = benchlib.measure([sys.executable, __file__, "--peft-side", json.dumps(task)])
            figures.append({"side": side, **found})
            print(f"{side}  {found['target_tokens_per_second']:.1f} target tokens/s", file=sys.stderr, flush=True)
    slowest = figures[-1]["target_tokens_per_second"]
    lines = [(f["side"], f"{f['target_tokens_per_second']:,.1f}", f"{f['tokens_per_second']:,.0f}", f"{f['target_tokens_per_second'] / slowest:.2f}x") for f in figures]
    print(benchlib.table(("side", "target tokens/s", "tokens/s", f"to {figures[-1]['side']}"), lines))
    versions = benchlib.versions(args.binary, ("torch", "transformers", "peft"))
    print(benchlib.write_result(args.out, "packing", {"machine": benchlib.machine(), "versions": versions, "figures": figures}), file=sys.stderr)


if __name__ == "__main__":
    main()
