#!/usr/bin/env python3
"""Our training step next to PyTorch + transformers + PEFT, on this machine, in one run.

usage: bench_vs_peft.py [--models models] [--rounds 3] [--steps 6] [--rows NAME ...] [--sides NAME ...]
                        [--binary target/release/lora-train] [--set section.key=value ...] [--out benches/results]

Every measurement is a process of its own. In each round every side runs once per row, and every second round runs in
the opposite order, so that a machine that slows down slows both. A step is micro-batches of random tokens at full
length, LoRA on every linear layer, AdamW, clipping at 1. Reported are medians over the rounds of

  step          median step after the warm-up, in seconds, and tokens per second from it
  first step    end of the first step since the start of the process, in seconds
  memory        the process's peak resident memory, read from outside (VmHWM), the same way for both sides

and the ratios to PEFT in f32. Prints a table and writes JSON with hardware, versions and command line to --out.

Sides: ours-f32, ours-bf16, peft-f32, peft-bf16 (base in bf16, adapters in f32, autocast). --set goes to our side only.
Needs the models (scripts/get_models.py) and the Python packages of scripts/setup_python.sh.
"""

import argparse
import datetime
import json
import os
import pathlib
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile
import time

NUM_WARMUP_STEPS = 2
SIDES = ("ours-f32", "peft-f32", "ours-bf16", "peft-bf16")
ROWS = {
    "stories15M-4x256": {"model": "stories15M", "rows": 4, "length": 256, "r": 8, "checkpointing": False},
    "smollm2-2x512": {"model": "smollm2-135m", "rows": 2, "length": 512, "r": 16, "checkpointing": False},
    "smollm2-1x4096": {"model": "smollm2-135m", "rows": 1, "length": 4096, "r": 16, "checkpointing": True},
}
RECIPE = """\
output_dir = "{output}"
seed = 1
[model]
path = "{model}"
dtype = "{dtype}"
[lora]
r = {r}
lora_alpha = {alpha}
target_modules = "all-linear"
[data]
max_length = {length}
[train]
precision = "{dtype}"
micro_batch_size = {rows}
gradient_checkpointing = {checkpointing}
max_steps = {steps}
[optimizer]
learning_rate = 1e-4
"""


def seconds_since_start() -> float:
    """Age of this process."""
    after_command = pathlib.Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(after_command[19]) / os.sysconf("SC_CLK_TCK")


def peft_side(task: dict) -> None:
    """One measurement of PEFT; prints one JSON object."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(1)
    half = task["dtype"] == "bf16"
    base = AutoModelForCausalLM.from_pretrained(task["model"], dtype=torch.bfloat16 if half else torch.float32)
    base.config.use_cache = False
    if task["checkpointing"]:
        base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        base.enable_input_require_grads()
    model = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", r=task["r"], lora_alpha=2 * task["r"], target_modules="all-linear"))
    model.train()
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=1e-4, weight_decay=0.0)
    seconds, first = [], None
    for _ in range(NUM_WARMUP_STEPS + task["steps"]):
        ids = torch.randint(0, base.config.vocab_size, (task["rows"], task["length"]))
        began = time.perf_counter()
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trainable, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - began)
        first = first or seconds_since_start()
    step = statistics.median(seconds[NUM_WARMUP_STEPS:])
    print(json.dumps({"step_seconds": step, "tokens_per_second": task["rows"] * task["length"] / step, "first_step_seconds": first}))


def measure(command: list[str]) -> dict:
    """The last line of a process's stdout as JSON, and the peak of its resident memory."""
    with tempfile.TemporaryFile("w+") as stdout, tempfile.TemporaryFile("w+") as stderr:
        process = subprocess.Popen(command, stdout=stdout, stderr=stderr, text=True)
        peak_kib = 0
        while process.poll() is None:
            try:
                status = pathlib.Path(f"/proc/{process.pid}/status").read_text()
                peak_kib = max([peak_kib, *(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:"))])
            except OSError:
                pass
            time.sleep(0.02)
        stdout.seek(0)
        stderr.seek(0)
        lines = stdout.read().strip().splitlines()
        if process.returncode or not lines:
            sys.exit(f"{shlex.join(command)} ended with status {process.returncode}:\n{stderr.read()[-4000:]}")
    figures = json.loads(lines[-1])
    keys = ("step_seconds", "tokens_per_second", "first_step_seconds", "mfu", "gflops", "gemm_peak_gflops")
    return {**{k: figures[k] for k in keys if figures.get(k) is not None}, "peak_memory_bytes": peak_kib * 1024}


def run_side(side: str, row: dict, args, work: pathlib.Path) -> dict:
    """One measurement."""
    program, dtype = side.split("-")
    task = {**row, "model": str((args.models / row["model"]).resolve()), "dtype": dtype, "steps": args.steps}
    if program == "peft":
        return measure([sys.executable, __file__, "--peft-side", json.dumps(task)])
    recipe = work / f"{side}.toml"
    recipe.write_text(RECIPE.format(**{**task, "checkpointing": str(task["checkpointing"]).lower(), "alpha": 2 * task["r"],
                                       "output": work / "run"}))
    return measure([str(args.binary), "bench", str(recipe), *(word for setting in args.set for word in ("--set", setting))])


def machine() -> dict:
    """Processor, cores and memory."""
    cpu = [line.split(":", 1)[1].strip() for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {"cpu": cpu[0] if cpu else platform.processor(), "num_cores": len(os.sched_getaffinity(0)),
            "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), "system": platform.system()}


def versions(binary: pathlib.Path) -> dict:
    """Versions of both sides."""
    import peft
    import torch
    import transformers

    def said(command: list[str]) -> str:
        return subprocess.run(command, capture_output=True, text=True).stdout.strip()

    return {"lora-train": said([str(binary), "--version"]), "commit": said(["git", "rev-parse", "HEAD"]),
            "python": platform.python_version(), **{m.__name__: m.__version__ for m in (torch, transformers, peft)}}


def table(found: dict[str, dict[str, list[dict]]]) -> tuple[list[str], list[dict]]:
    """Lines to print, and the same figures for the file."""
    heads = ("row", "side", "step s", "tokens/s", "memory MiB", "first step s", "speed", "memory")
    lines, figures = [], []
    for row, sides in found.items():
        medians = {side: {key: statistics.median(m[key] for m in runs) for key in runs[0]} for side, runs in sides.items()}
        reference = medians.get("peft-f32")
        for side, m in medians.items():
            entry = {"row": row, "side": side, **m}
            if reference:
                entry["speed_ratio"] = m["tokens_per_second"] / reference["tokens_per_second"]
                entry["memory_ratio"] = m["peak_memory_bytes"] / reference["peak_memory_bytes"]
            figures.append(entry)
            ratios = [f"{entry[k]:.2f}x" if k in entry else "" for k in ("speed_ratio", "memory_ratio")]
            lines.append((row, side, f"{m['step_seconds']:.3f}", f"{m['tokens_per_second']:,.0f}", f"{m['peak_memory_bytes'] / 2**20:,.0f}",
                          f"{m['first_step_seconds']:.2f}", *ratios))
    widths = [max(len(line[i]) for line in [heads, *lines]) for i in range(len(heads))]
    rule = tuple("-" * w for w in widths)
    return ["| " + " | ".join(cell.ljust(w) for cell, w in zip(line, widths)) + " |" for line in [heads, rule, *lines]], figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", type=pathlib.Path, default=pathlib.Path("models"))
    parser.add_argument("--binary", type=pathlib.Path, default=pathlib.Path(os.environ.get("CARGO_TARGET_DIR", "target")) / "release/lora-train")
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
    found = {row: {side: [] for side in args.sides} for row in args.rows}
    with tempfile.TemporaryDirectory() as work:
        for index in range(args.rounds):
            for row in args.rows:
                for side in args.sides if index % 2 == 0 else reversed(args.sides):
                    run = run_side(side, ROWS[row], args, pathlib.Path(work))
                    found[row][side].append(run)
                    print(f"round {index + 1}/{args.rounds}  {row}  {side}  {run['tokens_per_second']:,.0f} tokens/s", file=sys.stderr, flush=True)
    lines, figures = table(found)
    print("\n".join(lines))
    now = datetime.datetime.now(datetime.timezone.utc)
    command = shlex.join([pathlib.Path(word).name if word.startswith("/") else word for word in sys.argv])
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / f"peft-{now:%Y%m%d-%H%M%S}.json"
    path.write_text(json.dumps({"command": command, "time": now.isoformat(timespec="seconds"), "machine": machine(),
                                "versions": versions(args.binary), "rows": {r: ROWS[r] for r in args.rows}, "medians": figures,
                                "runs": found}, indent=1) + "\n")
    print(path, file=sys.stderr)


if __name__ == "__main__":
    main()
