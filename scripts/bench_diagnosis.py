#!/usr/bin/env python3
"""Runs with one deliberate fault each, and a healthy one: checks the diagnosis, and what following its advice gains.

usage: bench_diagnosis.py [--model models/stories15M] [--binary target/release/lora-train] [--out benches/results]

This script makes the rows of each run. The table shows its diagnosis, the first proposed change and the expected gain,
beside the gain of a second run with that change, measured in target tokens over the time of the loop. Prints the table and
writes JSON with hardware, versions and command line to --out. Exit code 1 if the diagnosis misses the fault of a run.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile

import benchlib

SENTENCE = "Once there was a little cat in the garden. "
# name, sentences per row (cycled), number of rows, settings, the rule to find
RUNS = [
    ("rows of very different lengths", (1, 1, 1, 24), 400, {"train.gradient_checkpointing": "false"}, "padding"),
    ("a checkpoint at every step", (10,), 400, {"checkpoint.save_steps": 1, "lora.r": 64, "train.micro_batch_size": 1,
                                                "data.max_length": 32, "train.gradient_checkpointing": "false"}, "checkpoint"),
    ("an evaluation at every second step", (10,), 400, {"eval.eval_steps": 2, "data.eval_split": 0.1, "train.gradient_checkpointing": "false"},
     "evaluation"),
    ("recomputation with memory to spare", (20,), 400, {"train.gradient_checkpointing": "true"}, "recomputation_not_needed"),
    ("nothing", (20,), 400, {"train.gradient_checkpointing": "false"}, None),
]
RECIPE = """output_dir = "{run}"
[model]
path = "{model}"
[lora]
r = 8
[data]
max_length = 256
[[data.train]]
path = "{rows}"
[train]
micro_batch_size = 4
max_steps = {steps}
[eval]
[checkpoint]
[logging]
tensorboard = false
[device]
name = "cpu"
"""


def train(args, work: pathlib.Path, name: str, settings: dict) -> tuple[float, list]:
    """Target tokens a second of the loop, evaluations and checkpoints included, and the findings."""
    run = work / name
    (work / "recipe.toml").write_text(RECIPE.format(run=run, model=args.model.resolve(), rows=work / "rows.jsonl", steps=args.steps))
    sets = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    subprocess.run([str(args.binary), str(work / "recipe.toml"), "--quiet", *sets], check=True, capture_output=True)
    summary = json.loads((run / "summary.json").read_text())
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line][1:]
    seconds = sum(line["wall_seconds"] for line in steps)
    return sum(line["target_tokens"] for line in steps) / seconds, summary["diagnosis"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=pathlib.Path, default=pathlib.Path("models/stories15M"))
    parser.add_argument("--binary", type=pathlib.Path, default=benchlib.default_binary())
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("benches/results"))
    args = parser.parse_args()
    figures, lines, wrong = [], [], []
    for index, (ailment, lengths, rows, settings, rule) in enumerate(RUNS):
        with tempfile.TemporaryDirectory() as folder:
            work = pathlib.Path(folder)
            row = lambda number: json.dumps({"prompt": f"{number}: ", "completion": SENTENCE * lengths[number % len(lengths)]})
            (work / "rows.jsonl").write_text("".join(row(number) + "\n" for number in range(rows)))
            before, findings = train(args, work, "before", settings)
            found = [finding["rule"] for finding in findings]
            problems = [finding for finding in findings if finding["severity"] in ("problem", "advice")]
            if (rule is None and problems) or (rule is not None and rule not in found):
                wrong.append(f"{ailment}: found {found}")
            finding = next((finding for finding in findings if finding["rule"] == rule), None)
            change = next(iter(finding["changes"]), None) if finding and finding.get("changes") else None
            after = train(args, work, "after", {**settings, change["key"]: change["to"]})[0] if change else None
            gain = after / before if after else None
            verdict = finding["verdict"] if finding else "-"
            told = f"{change['key']} {change['from']} -> {change['to']}" if change else "-"
            figures.append({"run": ailment, "found": found, "finding": finding, "target_tokens_per_second": before, "after": after, "gain": gain})
            lines.append((ailment, verdict, told, change["expected"] if change else "-", f"{gain:.2f}x" if gain else "-"))
            print(f"{ailment}: {verdict}", file=sys.stderr, flush=True)
    print(benchlib.table(("run", "verdict", "change", "expected", "measured"), lines))
    result = {"machine": benchlib.machine(), "versions": benchlib.versions(args.binary, ()), "figures": figures}
    print(benchlib.write_result(args.out, "diagnosis", result), file=sys.stderr)
    if wrong:
        sys.exit("\n".join(wrong))


if __name__ == "__main__":
    main()
