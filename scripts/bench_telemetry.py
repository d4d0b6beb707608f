#!/usr/bin/env python3
"""The cost of sampling the machine per step: one run with it on and off, in turn.

usage: bench_telemetry.py [--recipe recipes/quickstart.toml] [--steps 150] [--pairs 8] [--sample-ms 100] [--stand-in]
                          [--set section.key=value]... [--binary target/release/lora-train] [--out FILE.json]

A pair is two consecutive runs, with on and off first by turns, so that a machine that becomes slower or faster favours
neither. Off is `logging.gpu_sample_ms = 0`. A run's figure is the median `step_seconds` of its steps, without the first
five; a pair's is on over off; the result is the median of the pairs, with its quartiles. Also printed is the processor
time of the sampler thread over the run's wall time, which does not depend on other work on the machine. `--stand-in`
compiles the tests' stand-in for NVML, so that a machine without a GPU takes the GPU's path, except for the time of a real
driver. Without evaluations, checkpoints and TensorBoard, which are measured elsewhere. The model must be on this machine.
Needs only the standard library.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile

NUM_WARMUP_STEPS = 5
ROOT = pathlib.Path(__file__).resolve().parent.parent


def run(sample_ms: int, args, work: pathlib.Path, environment: dict, number: int) -> dict:
    """A run of `args.steps` steps."""
    output = work / f"run-{number}"
    settings = [f"output_dir={json.dumps(str(output))}", f"train.max_steps={args.steps}", "eval.max_batches=1", "eval.generate=[]",
                "logging.tensorboard=false", f"logging.gpu_sample_ms={sample_ms}", *args.set]
    command = [str(args.binary), str(args.recipe), "--quiet", *(part for setting in settings for part in ("--set", setting))]
    status = subprocess.run(command, env=environment, stderr=subprocess.DEVNULL).returncode
    if status:
        raise SystemExit(f"exit code {status}: {' '.join(command)}")
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    step_seconds = [line["step_seconds"] for line in lines if "learning_rate" in line][NUM_WARMUP_STEPS:]
    summary = json.loads((output / "summary.json").read_text())
    environment = json.loads((output / "environment.json").read_text())
    return {"step_seconds": statistics.median(step_seconds), "telemetry_seconds": summary["telemetry_seconds"],
            "wall_seconds": summary["wall_seconds"], "steps": len(step_seconds), "device": environment["device"]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", type=pathlib.Path, default=ROOT / "recipes/quickstart.toml")
    parser.add_argument("--binary", type=pathlib.Path, default=ROOT / "target/release/lora-train")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--sample-ms", type=int, default=100)
    parser.add_argument("--stand-in", action="store_true")
    parser.add_argument("--set", action="append", default=[], metavar="section.key=value")
    parser.add_argument("--out", type=pathlib.Path)
    args = parser.parse_args()
    if args.steps <= NUM_WARMUP_STEPS or args.pairs < 1:
        parser.error(f"--steps must be more than {NUM_WARMUP_STEPS}, --pairs at least 1")

    environment = dict(os.environ)
    pairs = []
    with tempfile.TemporaryDirectory() as folder:
        work = pathlib.Path(folder)
        if args.stand_in:
            library = work / "libnvml-stand-in.so"
            source = ROOT / "tests/fixtures/nvml_stand_in.c"
            subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", str(library), str(source)], check=True)
            environment["LORA_TRAIN_NVML"] = str(library)
        for number in range(args.pairs):
            order = (args.sample_ms, 0) if number % 2 == 0 else (0, args.sample_ms)
            pair = {("on" if ms else "off"): run(ms, args, work, environment, 2 * number + (ms > 0)) for ms in order}
            pair["ratio"] = pair["on"]["step_seconds"] / pair["off"]["step_seconds"]
            pair["sampler_share"] = pair["on"]["telemetry_seconds"] / pair["on"]["wall_seconds"]
            pairs.append(pair)
            print(f"pair {number + 1}: on {1e3 * pair['on']['step_seconds']:.3f} ms, off {1e3 * pair['off']['step_seconds']:.3f} ms, "
                  f"{100 * (pair['ratio'] - 1):+.2f} %; the sampler ran {100 * pair['sampler_share']:.3f} % of the time",
                  file=sys.stderr, flush=True)
    ratios = sorted(pair["ratio"] for pair in pairs)
    low, middle, high = (ratios[0], ratios[0], ratios[0]) if len(ratios) < 2 else statistics.quantiles(ratios, n=4, method="inclusive")
    result = {"cost_percent": 100 * (middle - 1), "quartiles_percent": [100 * (low - 1), 100 * (high - 1)],
              "sampler_percent": 100 * statistics.median(pair["sampler_share"] for pair in pairs), "sample_ms": args.sample_ms,
              "stand_in": args.stand_in, "device": pairs[0]["on"]["device"], "steps": args.steps, "pairs": pairs}
    print(f"sampling every {args.sample_ms} ms costs {result['cost_percent']:+.2f} % of a step (quartiles {100 * (low - 1):+.2f} % and "
          f"{100 * (high - 1):+.2f} %, {len(pairs)} pairs); its thread runs {result['sampler_percent']:.3f} % of the time")
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
