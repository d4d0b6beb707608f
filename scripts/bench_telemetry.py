#!/usr/bin/env python3
"""What sampling the machine costs a step: the same run with it on and off, in turn; or on and off in turn within one run.

usage: bench_telemetry.py [--recipe recipes/quickstart.toml] [--steps 150] [--pairs 8] [--sample-ms 100] [--stand-in]
                          [--set section.key=value]... [--binary target/release/lora-train] [--out FILE.json]
       bench_telemetry.py --within [--seconds 200] [--slice 50] [--sample-ms 100] [--stand-in] ...

`--within` resolves a thousandth of a step on a quiet machine, which two runs do not, since they differ by more. One run trains
for so many seconds; every SLICE steps its sampler is stopped or started again (LORA_TRAIN_TELEMETRY_SLICE): then no thread
wakes up, no window is made, and the step's line has no figures of the machine, all of which is in the difference. Not in it is
the watch that divides a step into its parts, without which there would be no time of a step: eleven readings of the clock a
step, and five more for every further micro-batch (`cargo test --release --lib a_lap_costs -- --nocapture` says what one
takes). A pair is the half slice before a switch and that after it, on first and off first by turns, so that drift favours
neither; its figure is the mean time of a step, since a sample falls into few steps and a median would not see it. The first
step after a switch is left out: it still writes the line before. The result is the Hodges-Lehmann estimate over the pairs' log
ratios with its 95 % interval (of Wilcoxon's signed-rank test), which a few hiccups do not move. Beside it stands the same over
the halves of one slice, between which nothing is switched: that interval should hold zero, and is as wide as what can be
resolved.

Without `--within`:
A pair is two runs right after one another, in turn on first and off first, so that a machine that gets slower or faster
meanwhile favours neither. Off is `logging.gpu_sample_ms = 0`. A run's figure is the median of its steps' `step_seconds`,
the first five left out; a pair's is on over off; the result is the median of the pairs, with its quartiles. Beside it
stands the processor time of the sampler thread over the run's wall time, which other work on the machine does not move.
`--stand-in` compiles the library of the tests that stands in for NVML, so that a machine without a GPU takes the GPU's
path, but for what a real driver takes. No evaluations, checkpoints and TensorBoard, which are measured elsewhere. The
model has to be at hand. Only the standard library is needed.
"""

import argparse
import json
import math
import os
import pathlib
import signal
import statistics
import subprocess
import sys
import tempfile

NUM_WARMUP_STEPS = 5
INTERRUPTED = 130
ROOT = pathlib.Path(__file__).resolve().parent.parent


def run(sample_ms: int, args, work: pathlib.Path, environment: dict, number: int, seconds: float | None = None) -> dict:
    """A run of so many steps, or of so many seconds."""
    output = work / f"run-{number}"
    settings = [f"output_dir={json.dumps(str(output))}", f"train.max_steps={args.steps}", "eval.max_batches=1", "eval.generate=[]",
                "logging.tensorboard=false", f"logging.gpu_sample_ms={sample_ms}", *args.set]
    command = [str(args.binary), str(args.recipe), "--quiet", *(part for setting in settings for part in ("--set", setting))]
    process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
    try:
        status = process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        status = process.wait()
    if status not in ((0,) if seconds is None else (0, INTERRUPTED)):
        raise SystemExit(f"exit code {status}: {' '.join(command)}")
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    step_seconds = [line["step_seconds"] for line in lines if "learning_rate" in line][NUM_WARMUP_STEPS:]
    # A run that is interrupted has no summary.
    summary = json.loads((output / "summary.json").read_text()) if status == 0 else {}
    environment = json.loads((output / "environment.json").read_text())
    return {"step_seconds": statistics.median(step_seconds), "telemetry_seconds": summary.get("telemetry_seconds"),
            "wall_seconds": summary.get("wall_seconds"), "steps": len(step_seconds), "device": environment["device"],
            "lines": [line for line in lines if "learning_rate" in line]}


def hodges_lehmann(values: list) -> tuple:
    """The estimate and its 95 % interval: median and quantiles of the means of all pairs of values."""
    count = len(values)
    means = sorted((values[i] + values[j]) / 2 for i in range(count) for j in range(i, count))
    spread = 1.959964 * math.sqrt(count * (count + 1) * (2 * count + 1) / 24)
    low = max(0, round(len(means) / 2 - spread))
    return statistics.median(means), means[low], means[len(means) - 1 - low]


def half_slices(lines: list, slice_steps: int) -> list:
    """Of each whole slice: whether it was sampled, and the mean step time of its halves without the first step."""
    slices = []
    for line in lines:
        is_on = "host_memory_bytes" in line
        if not slices or slices[-1][0] != is_on:
            slices.append((is_on, []))
        slices[-1][1].append(line["step_seconds"])
    half = slice_steps // 2
    # The first one has the start of training in it, the last one is cut off.
    return [(is_on, statistics.fmean(seconds[1:half]), statistics.fmean(seconds[half:])) for is_on, seconds in slices[1:-1]
            if len(seconds) == slice_steps]


def within(args, work: pathlib.Path, environment: dict) -> dict:
    args.steps = 100_000_000
    args.set += ["train.num_epochs=1000000", "watchdog.patience=0", "eval.eval_steps=100000000", "checkpoint.save_steps=1000000000"]
    environment = environment | {"LORA_TRAIN_TELEMETRY_SLICE": str(args.slice)}
    result = run(args.sample_ms, args, work, environment, 0, args.seconds)
    slices = half_slices(result.pop("lines"), args.slice)
    pairs = [math.log(after[1] / before[2]) * (1 if after[0] else -1) for before, after in zip(slices, slices[1:]) if before[0] != after[0]]
    control = [math.log(second / first) * (1 if number % 4 < 2 else -1) for number, (_, first, second) in enumerate(slices)]
    if len(pairs) < 10:
        raise SystemExit("too few slices: give more --seconds or a smaller --slice")
    percent = [[100 * math.expm1(value) for value in hodges_lehmann(ratios)] for ratios in (pairs, control)]
    (cost, low, high), (nothing, nothing_low, nothing_high) = percent
    print(f"sampling every {args.sample_ms} ms costs {cost:+.3f} % of a step of {1e3 * result['step_seconds']:.1f} ms "
          f"(95 %: {low:+.3f} to {high:+.3f}; {len(pairs)} pairs of {args.slice // 2} steps); "
          f"control {nothing:+.3f} % ({nothing_low:+.3f} to {nothing_high:+.3f})")
    return {"cost_percent": cost, "interval_percent": [low, high], "control_percent": nothing,
            "control_interval_percent": [nothing_low, nothing_high], "pairs": len(pairs), "slice": args.slice,
            "median_pair_percent": 100 * math.expm1(statistics.median(pairs)),
            "deviation_of_pairs_percent": 100 * statistics.stdev(pairs), "step_seconds": result["step_seconds"],
            "seconds": args.seconds, "steps": result["steps"],
            "sample_ms": args.sample_ms, "stand_in": args.stand_in, "device": result["device"]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", type=pathlib.Path, default=ROOT / "recipes/quickstart.toml")
    parser.add_argument("--binary", type=pathlib.Path, default=ROOT / "target/release/lora-train")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--sample-ms", type=int, default=100)
    parser.add_argument("--within", action="store_true")
    parser.add_argument("--seconds", type=float, default=200.0)
    parser.add_argument("--slice", type=int, default=50)
    parser.add_argument("--stand-in", action="store_true")
    parser.add_argument("--set", action="append", default=[], metavar="section.key=value")
    parser.add_argument("--out", type=pathlib.Path)
    args = parser.parse_args()
    if args.steps <= NUM_WARMUP_STEPS or args.pairs < 1:
        parser.error(f"--steps must be more than {NUM_WARMUP_STEPS}, --pairs at least 1")

    if args.slice < 4 or args.slice % 2:
        parser.error("--slice must be even, and at least 4")

    environment = dict(os.environ)
    pairs = []
    with tempfile.TemporaryDirectory() as folder:
        work = pathlib.Path(folder)
        if args.stand_in:
            library = work / "libnvml-stand-in.so"
            source = ROOT / "tests/fixtures/nvml_stand_in.c"
            subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", str(library), str(source)], check=True)
            environment["LORA_TRAIN_NVML"] = str(library)
        if args.within:
            result = within(args, work, environment)
            if args.out:
                args.out.write_text(json.dumps(result, indent=1) + "\n")
            return 0
        for number in range(args.pairs):
            order = (args.sample_ms, 0) if number % 2 == 0 else (0, args.sample_ms)
            pair = {("on" if ms else "off"): run(ms, args, work, environment, 2 * number + (ms > 0)) for ms in order}
            for side in pair.values():
                del side["lines"]
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
