#!/usr/bin/env python3
"""Compares the memory that `lora-train plan` estimates with the measured peak, over recipes of several shapes.

usage: check_plan.py [--models models] [--device cpu] [--configs] [--short] [--binary target/release/lora-train]
                     [--tolerance 0.1] [--out benches/results]

Every recipe is planned, and then trains two steps on a made text of a megabyte in a process of its own, whose peak memory is read from
outside: resident on the CPU (VmHWM), on a GPU the used memory by NVML above what was in use before. The table also has
the estimated and the measured time of a step. With --configs the models are those of configs/ with random weights, from
tiny to 1B, so that nothing has to be downloaded; `bench` takes the steps of these, which have no tokenizer. With --short, only every third. Prints a table and writes JSON with
hardware, versions and command line to --out. Exit code 1 if the memory of a plan is off by more than --tolerance and by
more than 64 MiB.
"""

import argparse
import json
import pathlib
import random
import shutil
import subprocess
import sys
import tempfile

import benchlib

STORIES, SMOLLM2 = "stories15M", "smollm2-135m"
RECIPES = [
    # model, rows, length, r, checkpointing, dtype, and loss_chunk_tokens unless automatic
    (STORIES, 4, 256, 8, False, "f32"), (STORIES, 4, 256, 8, True, "f32"), (STORIES, 16, 256, 64, False, "f32"),
    (STORIES, 8, 128, 8, False, "bf16"), (STORIES, 2, 32, 8, True, "f32"),
    (SMOLLM2, 2, 512, 16, False, "f32"), (SMOLLM2, 2, 512, 16, False, "bf16"), (SMOLLM2, 1, 256, 128, True, "f32"),
    (SMOLLM2, 1, 1024, 16, True, "bf16"), (SMOLLM2, 1, 1024, 16, False, "f32"), (SMOLLM2, 4, 512, 8, True, "f32"),
    (SMOLLM2, 1, 2048, 16, True, "f32"), (SMOLLM2, 1, 64, 16, True, "f32"), (SMOLLM2, 1, 2048, 16, True, "bf16"),
    (SMOLLM2, 1, 2048, 16, "20-blocks", "bf16"),
    (SMOLLM2, 2, 512, 16, True, "f32", 1024),
]

RANDOM_RECIPES = [
    # the same columns for models of configs/, the smallest first
    ("tiny", 4, 128, 8, False, "f32"), ("stories15m", 8, 256, 16, False, "f32"), ("stories15m", 4, 256, 8, False, "f32", 256),
    ("smollm2-135m", 2, 512, 16, True, "bf16"), ("smollm2-135m", 4, 1024, 16, False, "f32"), ("tinyllama-1.1b", 2, 1024, 16, True, "bf16"),
    ("llama-3.2-1b", 4, 2048, 16, True, "bf16"), ("llama-3.2-1b", 1, 1024, 16, False, "f32"), ("qwen3.5-0.8b", 2, 512, 16, True, "bf16"),
]


def write_rows(path: pathlib.Path) -> None:
    """A megabyte of made words."""
    draw = random.Random(1)
    words = ["".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(2, 9))) for _ in range(3000)]
    path.write_text(" ".join(draw.choices(words, k=160_000)))


# What a run of any size took more on an Emerald Rapids than planned, and not on an EPYC; why is not known.
UNEXPLAINED = 64 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", type=pathlib.Path, default=pathlib.Path("models"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--configs", action="store_true", help="models of configs/ with random weights")
    parser.add_argument("--short", action="store_true", help="every third recipe")
    parser.add_argument("--binary", type=pathlib.Path, default=benchlib.default_binary())
    parser.add_argument("--tolerance", type=float, default=0.1)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("benches/results"))
    args = parser.parse_args()
    gpu = None if args.device == "cpu" else benchlib.GpuMemory.open()
    if args.device != "cpu" and gpu is None:
        sys.exit("error: NVML does not start, so the GPU's memory cannot be read")
    figures, lines = [], []
    recipes = RANDOM_RECIPES if args.configs else RECIPES
    with tempfile.TemporaryDirectory() as work:
        recipe, rows_file, run = (pathlib.Path(work) / name for name in ("recipe.toml", "rows.txt", "run"))
        write_rows(rows_file)
        for model, rows, length, r, checkpointing, dtype, *loss_chunk in recipes[2::3] if args.short else recipes:
            # As arguments of plan and bench.
            settings = [word for tokens in loss_chunk for word in ("--set", f"train.loss_chunk_tokens={tokens}")]
            path = pathlib.Path(f"configs/{model}.json") if args.configs else args.models / model
            task = {"model": path.resolve(), "init": "random" if args.configs else "pretrained", "rows": rows, "length": length, "r": r,
                    "checkpointing": checkpointing, "dtype": dtype, "steps": 2, "device": args.device}
            recipe.write_text(f'{benchlib.recipe(task, run)}[[data.train]]\npath = "{rows_file}"\n')
            command = [str(args.binary), "plan", str(recipe), "--json", *settings]
            planned = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
            if args.configs:
                found = benchlib.measure(benchlib.bench_command(args.binary, recipe, settings[1::2], 0), gpu)
                planned["peak_bytes"] = found["planned_peak_bytes"]
            else:
                shutil.rmtree(run, ignore_errors=True)
                found = benchlib.measure([str(args.binary), str(recipe), *settings], gpu, written=run / "metrics.jsonl")
            measured, step_seconds = found["peak_gpu_memory_bytes" if gpu else "peak_memory_bytes"], found["step_seconds"]
            error = planned["peak_bytes"] / measured - 1
            name = f"{model} {rows}x{length} r={r} {dtype}{' checkpointed' if checkpointing is True else f' {checkpointing}' if checkpointing else ''}"
            name += "".join(f", loss chunks of {tokens}" for tokens in loss_chunk)
            figures.append({"recipe": name, "planned_bytes": planned["peak_bytes"], "measured_bytes": measured, "error": error,
                            "planned_step_seconds": planned["step_seconds"], "measured_step_seconds": step_seconds})
            lines.append((name, f"{planned['peak_bytes'] / 2**20:,.0f}", f"{measured / 2**20:,.0f}", f"{error:+.1%}",
                          f"{planned['step_seconds']:.3f}", f"{step_seconds:.3f}", f"{planned['step_seconds'] / step_seconds:.2f}"))
            print(f"{name}  {error:+.1%}", file=sys.stderr, flush=True)
    print(benchlib.table(("recipe", "planned MiB", "measured MiB", "error", "planned s", "step s", "ratio"), lines))
    worst = max(abs(figure["error"]) for figure in figures)
    result = {"machine": benchlib.machine(), "versions": benchlib.versions(args.binary, ()), "device": args.device, "worst": worst,
              "figures": figures}
    print(benchlib.write_result(args.out, "plan", result), file=sys.stderr)
    off = [figure["error"] for figure in figures
           if abs(figure["planned_bytes"] - figure["measured_bytes"]) > max(args.tolerance * figure["measured_bytes"], UNEXPLAINED)]
    if off:
        sys.exit(f"a plan is off by {max(map(abs, off)):.1%}, more than {args.tolerance:.0%}")


if __name__ == "__main__":
    main()
