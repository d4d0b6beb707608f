#!/usr/bin/env python3
"""Our training step on a GPU next to transformers + PEFT, with and without Liger kernels, in one run.

usage: bench_gpu_vs_peft.py [--binary lora-train[.xz]] [--nvrtc-binary FILE] [--rows NAME ...] [--sides NAME ...]
                            [--rounds 3] [--steps 6] [--budget SECONDS] [--device cuda]
                            [--set section.key=value ...] [--cache DIR] [--peak-tflops X] [--out benches/results]

Models have random weights in the shape of configs/*.json: nothing is downloaded. bf16, LoRA r = 16 on every linear layer,
AdamW, clipping at 1, random tokens at full length, gradient checkpointing. Every measurement is a process of its own;
each round runs every side once per row, every second round in the opposite order. Reported are medians over the rounds:

  tokens/s      from the median step after the warm-up; both sides read the loss once a step and wait nowhere else
  memory        peak of the GPU's used memory above what was in use before, from outside by NVML every 20 ms
  MFU           4 N FLOPs a token over the GPU's dense bf16 rate (its data sheet's, or --peak-tflops)
  first step    time from process start to the end of the first step; ours: the first run with an empty kernel cache
                (cold), and the median of the later runs with the cache that it left (warm)

Targets: at least 1.2 times the tokens/s of the better peer at 0.7 times its memory or less; first step within 30 s cold and
5 s warm.

Rows: 8b-1x4096, 1b-4x2048 (default); 8b-max-4096 doubles the micro-batch until it fails and reports the fastest for each
side; tiny is for testing this script. Sides: ours, ours-offload (gradient_checkpointing = "offload"), ours-nvrtc (the
binary built with cuda-nvrtc), peft-sdpa, peft-flash, peft-liger; a peer without its package is skipped with a message.
--budget skips what would end later than that, for machines lent by the minute: run the script several times with other
--rows and --sides then, and keep --cache.
"""

import argparse
import json
import os
import pathlib
import sys
import tempfile

import benchlib

ROWS = {
    "8b-1x4096": {"config": "llama-3.1-8b", "rows": 1, "length": 4096},
    "1b-4x2048": {"config": "llama-3.2-1b", "rows": 4, "length": 2048},
    "8b-max-4096": {"config": "llama-3.1-8b", "rows": 1, "length": 4096, "until_it_fails": 64},
    "tiny": {"config": "tiny", "rows": 2, "length": 64},
    "tiny-max": {"config": "tiny", "rows": 1, "length": 64, "until_it_fails": 4},
}
SIDES = ("ours", "ours-offload", "ours-nvrtc", "peft-sdpa", "peft-flash", "peft-liger")
# The package that a side needs, and its attention implementation in transformers.
PEERS = {"peft-sdpa": ("peft", "sdpa"), "peft-flash": ("flash_attn", "flash_attention_2"), "peft-liger": ("liger_kernel", "sdpa")}
# Dense bf16 rates in TFLOP/s, from the makers' data sheets.
PEAKS = {"H200": 989.4, "H100 PCIe": 756.0, "H100": 989.4, "B200": 2250.0, "A100": 312.0, "L40S": 362.0, "4090": 165.2}
CONFIGS = pathlib.Path(__file__).resolve().parent.parent / "configs"
SPEED_TARGET, MEMORY_TARGET, COLD_TARGET, WARM_TARGET = 1.2, 0.7, 30.0, 5.0


def peer_side(task: dict) -> None:
    """One measurement of a peer; prints one JSON object."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    if task["side"] == "peft-liger":
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        apply_liger_kernel_to_llama()
    config = LlamaConfig.from_json_file(task["model"])
    with torch.device(task["device"]):
        base = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=PEERS[task["side"]][1])
    benchlib.peft_steps(base, task, task["device"])


class Bench:
    """Settings shared by all measurements."""

    def __init__(self, args, work: pathlib.Path):
        self.args, self.work = args, work
        self.binaries = {"ours": benchlib.unpacked(args.binary, work)}
        self.binaries["ours-offload"] = self.binaries["ours"]
        if args.nvrtc_binary:
            (work / "nvrtc").mkdir()
            self.binaries["ours-nvrtc"] = benchlib.unpacked(args.nvrtc_binary, work / "nvrtc")
        self.cache = args.cache or work / "cache"
        self.gpu = benchlib.GpuMemory.open()
        self.failures: list[str] = []

    def kernel_cache(self, side: str, of: str) -> pathlib.Path:
        """A separate kernel cache for each model and side, so that the first run finds none."""
        return self.cache / side / of

    def once(self, side: str, row: dict, rows: int) -> dict:
        """One measurement."""
        task = {"model": str(CONFIGS / f"{row['config']}.json"), "init": "random", "dtype": "bf16", "r": 16, "rows": rows,
                "length": row["length"], "steps": self.args.steps, "device": self.args.device, "side": side,
                "checkpointing": "offload" if side == "ours-offload" else True}
        if side in PEERS:
            command = [sys.executable, __file__, "--peer-side", json.dumps(task)]
        else:
            recipe = self.work / f"{side}.toml"
            recipe.write_text(benchlib.recipe(task, self.work / "run"))
            command = benchlib.bench_command(self.binaries[side], recipe, self.args.set)
        cache = self.kernel_cache(side, row["config"])
        cold = side not in PEERS and not cache.exists()
        figures = benchlib.measure(command, self.gpu, self.args.timeout, {"XDG_CACHE_HOME": str(cache)})
        n = parameters(row["config"])
        figures.update(rows=rows, cold=cold, tflops_4n=4 * n * figures["tokens_per_second"] / 1e12)
        return figures

    def run(self, _: int, name: str, side: str) -> dict | None:
        """One measurement, or the fastest of several micro-batches; None where none ran."""
        row = ROWS[name]
        best, rows = None, row["rows"]
        while True:
            try:
                found = self.once(side, row, rows)
            except benchlib.Failed as failure:
                lines = str(failure).strip().splitlines()
                self.failures.append(f"{name} {side}, {rows} rows: {lines[0]} ... {lines[-1]}")
                print(self.failures[-1], file=sys.stderr, flush=True)
                return best
            if best is None or found["tokens_per_second"] > best["tokens_per_second"]:
                best = found
            rows *= 2
            if rows > row.get("until_it_fails", 0):
                return best


def parameters(config: str) -> int:
    """All parameters of the model of a config.json; a tied head counts once."""
    c = json.loads((CONFIGS / f"{config}.json").read_text())
    hidden, heads = c["hidden_size"], c["num_attention_heads"]
    head = c.get("head_dim") or hidden // heads
    block = 2 * hidden * heads * head + 2 * hidden * c.get("num_key_value_heads", heads) * head + 3 * hidden * c["intermediate_size"] + 2 * hidden
    embeddings = c["vocab_size"] * hidden * (1 if c.get("tie_word_embeddings") else 2)
    return c["num_hidden_layers"] * block + embeddings + hidden


def available(side: str) -> bool:
    """Whether a side can run here; prints a message if not."""
    import importlib.util

    if side not in PEERS:
        return True
    missing = [package for package in dict.fromkeys(("torch", "transformers", "peft", PEERS[side][0])) if importlib.util.find_spec(package) is None]
    if missing:
        print(f"{side}: left out, {', '.join(missing)} cannot be imported", file=sys.stderr)
    return not missing


def step_report(found: dict, peak_tflops: float | None) -> tuple[str, list[dict], list[str]]:
    """The table, the same figures for the file, and the targets met or missed."""
    lines, figures, targets = [], [], []
    for row, sides in found.items():
        entries = {}
        for side, runs in sides.items():
            entry = {"row": row, "side": side, **benchlib.medians(runs)}
            # A cold run's first step includes building its kernels, so it is a separate figure; later steps are not slower.
            warm = [run["first_step_seconds"] for run in runs if not run["cold"]]
            entry["first_step_cold_seconds"] = next((run["first_step_seconds"] for run in runs if run["cold"]), None)
            entry["first_step_warm_seconds"] = sorted(warm)[len(warm) // 2] if warm else None
            if peak_tflops:
                entry["mfu_4n"] = entry["tflops_4n"] / peak_tflops
            entries[side] = entry
        peers = [entry for side, entry in entries.items() if side in PEERS]
        best = max(peers, key=lambda entry: entry["tokens_per_second"], default=None)
        for side, entry in entries.items():
            memory = entry.get("peak_gpu_memory_bytes")
            if best:
                entry["speed_ratio"] = entry["tokens_per_second"] / best["tokens_per_second"]
                if memory and best.get("peak_gpu_memory_bytes"):
                    entry["memory_ratio"] = memory / best["peak_gpu_memory_bytes"]
            seconds = [f"{entry[key]:.1f}" if entry[key] else "" for key in ("first_step_cold_seconds", "first_step_warm_seconds")]
            lines.append((row, side, f"{entry['rows']:.0f}", f"{entry['step_seconds']:.3f}", f"{entry['tokens_per_second']:,.0f}",
                          f"{100 * entry['mfu_4n']:.1f} %" if peak_tflops else "", f"{memory / 2**30:.2f}" if memory else "", *seconds,
                          *(f"{entry[key]:.2f}x" if key in entry else "" for key in ("speed_ratio", "memory_ratio"))))
            if side not in PEERS:
                def judge(what: str, value: float | None, target: float, at_least: bool) -> None:
                    if value is not None:
                        met = value >= target if at_least else value <= target
                        sign = ">=" if at_least else "<="
                        targets.append(f"{'met   ' if met else 'MISSED'}  {row} {side}: {what} {value:.2f} (target {sign} {target})")

                judge(f"speed against {best and best['side']}", entry.get("speed_ratio"), SPEED_TARGET, True)
                judge(f"memory against {best and best['side']}", entry.get("memory_ratio"), MEMORY_TARGET, False)
                judge("first step, cold, seconds", entry["first_step_cold_seconds"], COLD_TARGET, False)
                judge("first step, warm, seconds", entry["first_step_warm_seconds"], WARM_TARGET, False)
            figures.append(entry)
    heads = ("row", "side", "rows", "step s", "tokens/s", "MFU", "GPU GiB", "first s, cold", "warm", "speed", "memory")
    return benchlib.table(heads, lines), figures, targets


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--binary", type=pathlib.Path, default=benchlib.default_binary())
    parser.add_argument("--nvrtc-binary", type=pathlib.Path)
    parser.add_argument("--rows", nargs="*", choices=ROWS, default=["8b-1x4096", "1b-4x2048"])
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=["ours", "peft-sdpa", "peft-flash", "peft-liger"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6, help="measured steps, after a warm-up")
    parser.add_argument("--budget", type=float, help="seconds for all measurements")
    parser.add_argument("--timeout", type=float, default=400.0, help="seconds for one measurement")
    parser.add_argument("--device", default="cuda", help="cuda, or cpu to try the script out")
    parser.add_argument("--set", action="append", default=[], metavar="section.key=value", help="for our side's recipe")
    parser.add_argument("--cache", type=pathlib.Path, help="where our kernel caches stay between runs of this script")
    parser.add_argument("--peak-tflops", type=float, help="the GPU's dense bf16 rate, where its name is not known here")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("benches/results"))
    parser.add_argument("--peer-side", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.peer_side:
        return peer_side(args.peer_side)
    sides = [side for side in args.sides if available(side)]
    if "ours-nvrtc" in sides and not args.nvrtc_binary:
        parser.error("the side ours-nvrtc needs --nvrtc-binary")
    machine = benchlib.machine()
    peak = args.peak_tflops or next((rate for name, rate in PEAKS.items() if name in machine.get("gpu", "")), None)
    with tempfile.TemporaryDirectory() as work:
        bench = Bench(args, pathlib.Path(work))
        if bench.gpu is None:
            print("no GPU memory: NVML does not load", file=sys.stderr)
        order = benchlib.interleaved(args.rounds, args.rows, sides)
        found = benchlib.rounds(order, args.rounds, bench.run, args.budget)
        versions = benchlib.versions(bench.binaries["ours"], ("torch", "transformers", "peft", "liger_kernel", "flash_attn", "triton"))
    text, figures, targets = step_report(found, peak)
    if figures:
        print(text)
    for line in [*targets, *(f"failed  {failure}" for failure in bench.failures)]:
        print(line)
    result = {"machine": machine, "versions": versions, "peak_tflops": peak, "rows": {row: ROWS[row] for row in args.rows},
              "medians": figures, "targets": targets, "failures": bench.failures, "runs": found}
    print(benchlib.write_result(args.out, "gpu", result), file=sys.stderr)
    if not figures:
        sys.exit("nothing ran")


if __name__ == "__main__":
    main()
