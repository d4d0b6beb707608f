#!/usr/bin/env python3
"""Tokens per second and peak memory by sequence length, next to PEFT, on this machine, in one run; and the plot.

usage: bench_lengths.py [--models models] [--lengths 256 512 ...] [--sides NAME ...] [--binary target/release/lora-train]
                        [--plot FILE.svg] [--out benches/results]
       bench_lengths.py --draw RESULT.json --plot FILE.svg

One row of each length through SmolLM2-135M, LoRA r=16 on every linear layer, gradient checkpointing on both sides. Each
measures the second step of its own process. Memory is the peak of resident memory (VmHWM). Prints a table and writes JSON
with hardware, versions and command line to --out; --plot needs matplotlib. --draw plots an existing result.
"""

import argparse
import json
import pathlib
import sys
import tempfile

import bench_vs_peft
import benchlib

LENGTHS = (256, 512, 1024, 2048, 4096, 8192)
NAMES = {"ours-f32": "lora-train, f32", "ours-bf16": "lora-train, bf16", "peft-f32": "PEFT, f32", "peft-bf16": "PEFT, bf16"}


def plot(figures: list[dict], path: pathlib.Path) -> None:
    """Two panels, side by side, on logarithmic axes."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    matplotlib.rcParams["svg.hashsalt"] = "lora-train"
    figure, panels = pyplot.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    sides = list(dict.fromkeys(entry["side"] for entry in figures))
    for panel, key, unit, title in ((panels[0], "tokens_per_second", 1, "tokens per second"),
                                    (panels[1], "peak_memory_bytes", 2**30, "peak memory, GiB")):
        for side in sides:
            points = sorted((entry["length"], entry[key] / unit) for entry in figures if entry["side"] == side)
            ours = side.startswith("ours")
            panel.plot(*zip(*points), "o-" if ours else "s--", label=NAMES[side], color="tab:blue" if ours else "tab:orange",
                       alpha=0.55 if side.endswith("bf16") else 1.0)
        lengths = sorted({entry["length"] for entry in figures})
        panel.set(xscale="log", yscale="log", title=title, xlabel="tokens in a row")
        panel.set_xticks(lengths, [str(length) for length in lengths])
        panel.minorticks_off()
        panel.grid(alpha=0.3, which="both")
        panel.yaxis.set_major_formatter(matplotlib.ticker.FormatStrFormatter("%g"))
    ticks = {"tokens_per_second": (50, 100, 200, 500, 1000), "peak_memory_bytes": (0.5, 1, 2, 4, 8, 16)}
    for panel, values in zip(panels, ticks.values()):
        low, high = panel.get_ylim()
        panel.set_yticks([value for value in values if low <= value <= high])
    panels[1].legend(frameon=False)
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", type=pathlib.Path, default=pathlib.Path("models"))
    parser.add_argument("--binary", type=pathlib.Path, default=benchlib.default_binary())
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS))
    parser.add_argument("--sides", nargs="+", choices=NAMES, default=list(NAMES))
    parser.add_argument("--plot", type=pathlib.Path)
    parser.add_argument("--draw", type=pathlib.Path, metavar="RESULT.json", help="plot a result instead of measuring")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("benches/results"))
    args = parser.parse_args()
    if args.draw:
        return plot(json.loads(args.draw.read_text())["figures"], args.plot)
    args.set, args.steps, figures = [], 1, []
    with tempfile.TemporaryDirectory() as work:
        for length in args.lengths:
            row = {"model": "smollm2-135m", "rows": 1, "length": length, "r": 16, "checkpointing": True, "warmup": 1}
            for side in args.sides:
                try:
                    run = bench_vs_peft.run_side(side, row, args, pathlib.Path(work))
                except benchlib.Failed as failure:
                    print(f"{length}  {side}  failed: {str(failure).splitlines()[-1]}", file=sys.stderr, flush=True)
                    continue
                keys = ("tokens_per_second", "step_seconds", "peak_memory_bytes")
                figures.append({"length": length, "side": side, **{key: run[key] for key in keys}})
                print(f"{length}  {side}  {run['tokens_per_second']:,.0f} tokens/s  {run['peak_memory_bytes'] / 2**20:,.0f} MiB",
                      file=sys.stderr, flush=True)
    lines = [(f"{f['length']:,}", f["side"], f"{f['tokens_per_second']:,.0f}", f"{f['peak_memory_bytes'] / 2**20:,.0f}") for f in figures]
    print(benchlib.table(("length", "side", "tokens/s", "memory MiB"), lines))
    versions = benchlib.versions(args.binary, ("torch", "transformers", "peft"))
    print(benchlib.write_result(args.out, "lengths", {"machine": benchlib.machine(), "versions": versions, "figures": figures}), file=sys.stderr)
    if args.plot:
        plot(figures, args.plot)


if __name__ == "__main__":
    main()
