#!/usr/bin/env python3
"""What a file of few bits loses, with and without training through its rounding (`train.ship_as`).

usage: bench_shipping.py --model DIR --rows FILE.jsonl [--types q4_0 q4_k_m nvfp4 q2_k] [--seeds 1 2 3] [--steps 100] [--from 0.8]
                         [--length 192] [--learning-rate 2e-3] [--num-eval 80] [--work DIR] [--binary PATH] [--out benches/results]

For each seed one run of LoRA (r = 16, all linear layers, 4 rows a step, f32), which `merge` then writes in each type, with the
importance of inputs and without. Another goes on from its checkpoint at the share `--from` of the steps with `train.ship_as`, so that
both have the same steps, rows and learning rates. The last rows of FILE are for evaluation. Losses are those of `eval`, of the
unrounded model and of each file as it decodes. Prints a table of means over the seeds and writes JSON with hardware and command.
What is in `--work` already is not measured again.
"""

import argparse
import json
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable

import benchlib

ROOT = pathlib.Path(__file__).resolve().parent.parent
RECIPE = """\
output_dir = "{output}"
seed = {seed}
[model]
path = "{model}"
dtype = "f32"
[lora]
r = 16
[[data.train]]
path = "{train}"
[[data.eval]]
path = "{eval}"
[data]
max_length = {length}
[train]
max_steps = {steps}
micro_batch_size = 4
{ship}
[optimizer]
learning_rate = {rate}
[eval]
eval_steps = 1000000
[checkpoint]
save_steps = {first}
"""


def called(binary: pathlib.Path, *words: object) -> str:
    done = subprocess.run([binary, *map(str, words)], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{words} ended with status {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.stdout


class Seed:
    """The runs of one seed, in a folder, and the losses that were measured."""

    def __init__(self, args: argparse.Namespace, seed: int):
        self.args, self.seed, self.folder = args, seed, args.work / str(seed)
        self.first = round(args.share * args.steps)
        self.folder.mkdir(parents=True, exist_ok=True)
        rows = args.rows.read_text().splitlines(keepends=True)
        (self.folder / "train.jsonl").write_text("".join(rows[:-args.num_eval]))
        (self.folder / "eval.jsonl").write_text("".join(rows[-args.num_eval:]))
        self.kept = self.folder / "losses.json"
        self.losses = json.loads(self.kept.read_text()) if self.kept.exists() else {}

    def train(self, name: str, ship: str, *options: str) -> pathlib.Path:
        run, args = self.folder / name, self.args
        if not (run / "summary.json").exists():
            text = RECIPE.format(output=run, seed=self.seed, model=args.model.resolve(), train=self.folder / "train.jsonl",
                                 eval=self.folder / "eval.jsonl", length=args.length, steps=args.steps, rate=args.learning_rate,
                                 first=self.first, ship=ship)
            (self.folder / f"{name}.toml").write_text(text)
            called(args.binary, self.folder / f"{name}.toml", *options)
        return run

    def ship(self, kind: str) -> pathlib.Path:
        """Goes on from the plain run as it was at the first step of the last part."""
        run = self.folder / kind
        if not run.exists():
            shutil.copytree(self.train("plain", ""), run)
            (run / "summary.json").unlink()
            for step in (run / "checkpoints").iterdir():
                if int(step.name.rpartition("-")[2]) > self.first:
                    shutil.rmtree(step)
        return self.train(kind, f'ship_as = "{kind}"\nship_from = {self.args.share}', "--resume")

    def loss(self, name: str, model: Callable[[], list[object]]) -> None:
        """Of a run or a model, which is made where it is needed."""
        if name not in self.losses:
            settings = ["--data", self.folder / "eval.jsonl", "--set", f"data.max_length={self.args.length}", "--json"]
            self.losses[name] = json.loads(called(self.args.binary, "eval", *model(), *settings))["eval_loss"]
            self.kept.write_text(json.dumps(self.losses, indent=1))
            print(self.seed, name, round(self.losses[name], 4), file=sys.stderr, flush=True)

    def file(self, run: pathlib.Path, *options: str) -> list[object]:
        shutil.rmtree(self.folder / "file", ignore_errors=True)
        path = self.folder / "file/a.gguf"
        called(self.args.binary, "merge", run, "--out", path, *options)
        return ["--model", path]

    def measure(self) -> None:
        plain = self.train("plain", "")
        self.loss("base", lambda: ["--model", self.args.model])
        self.loss("unrounded", lambda: [plain])
        for kind in self.args.types:
            self.loss(f"{kind}: plain, without importance", lambda: self.file(plain, "--dtype", kind, "--without-rows"))
            self.loss(f"{kind}: plain", lambda: self.file(plain, "--dtype", kind))
            self.loss(f"{kind}: shipped", lambda: self.file(self.ship(kind), "--without-rows"))
            self.loss(f"{kind}: shipped, unrounded", lambda: [self.ship(kind)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=pathlib.Path, required=True)
    parser.add_argument("--rows", type=pathlib.Path, required=True)
    parser.add_argument("--types", nargs="+", default=["q4_0", "q4_k_m", "nvfp4", "q2_k"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--from", type=float, default=0.8, dest="share")
    parser.add_argument("--length", type=int, default=192)
    parser.add_argument("--learning-rate", default="2e-3")
    parser.add_argument("--num-eval", type=int, default=80)
    parser.add_argument("--work", type=pathlib.Path)
    parser.add_argument("--binary", type=pathlib.Path, default=benchlib.default_binary())
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "benches/results")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        args.work = args.work or pathlib.Path(scratch)
        seeds = [Seed(args, seed) for seed in args.seeds]
        for seed in seeds:
            seed.measure()
    losses = {name: [seed.losses[name] for seed in seeds] for name in seeds[0].losses}
    print(benchlib.table(("", "mean", "each"), [
        (name, f"{statistics.mean(each):.4f}", " ".join(f"{loss:.4f}" for loss in each)) for name, each in losses.items()]))
    result = {"machine": benchlib.machine(), "versions": benchlib.versions(args.binary, ()), "losses": losses}
    print(benchlib.write_result(args.out, "shipping", result))


if __name__ == "__main__":
    main()
