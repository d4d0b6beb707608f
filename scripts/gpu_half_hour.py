#!/usr/bin/env python3
"""Runs the items of one part of scripts/gpu_half_hour.sh, which is the way to start it, and says what came out.

Every item is a process of its own with its own limit. After each, OUT/half_hour.json is replaced by one that has it: its
commands, seconds, exit code, outcome, figures, and the end of its stderr. What is there is not run again, except items that
were left out, for which no time was left, or that --again names.
"""

import argparse
import contextlib
import json
import lzma
import os
import pathlib
import signal
import subprocess
import sys
import time

import benchlib
from gpu_items import ITEMS, Item, Kit, LeftOut

# Exit code of an item that cannot be run here.
LEFT_OUT = 3
NO_TIME = "no time left"
PACKAGES = ("torch", "transformers", "peft", "liger_kernel", "triton")


def run(item: Item, kit: Kit, limit: float) -> dict:
    """Runs an item for so many seconds at most."""
    logs = kit.out / "logs"
    logs.mkdir(exist_ok=True)
    told, log = logs / f"{item.name}.json", logs / f"{item.name}.log"
    began, status = time.monotonic(), None
    with told.open("w") as stdout, log.open("w") as stderr:
        process = subprocess.Popen([sys.executable, *sys.argv, "--item", item.name], stdout=stdout, stderr=stderr, process_group=0)
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = process.wait(limit)
        finally:
            # Also what the item has started, and if this script is ended.
            for number, patience in ((signal.SIGTERM, 3), (signal.SIGKILL, 10)):
                with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                    os.killpg(process.pid, number)
                    process.wait(patience)
    lines = []
    for line in told.read_text().splitlines():
        # The last may be torn, and libraries may print something.
        with contextlib.suppress(json.JSONDecodeError):
            lines.append(json.loads(line))
    failed = [line["what"] for line in lines if line.get("held") is False]
    tail = log.read_text(errors="replace")[-3000:]
    outcome = {0: f"failed: {', '.join(failed)}" if failed else "ok", None: f"stopped after {limit:.0f} s", LEFT_OUT: tail.strip()}
    return {"seconds": round(time.monotonic() - began, 1), "rc": status, "outcome": outcome.get(status, "failed"),
            "commands": [line["command"] for line in lines if "command" in line],
            "figures": [line for line in lines if "command" not in line], "stderr": tail}


def report(results: dict) -> str:
    """Speeds beside each other, checks that failed, and the figures by which benches/notes-cuda.md decides what comes next."""
    items = results["items"]
    figures = [(name, line) for name, item in items.items() for line in item["figures"]]
    speeds = [(name, line) for name, line in figures if "tokens_per_second" in line]
    place = lambda line: (line["model"], line.get("layers"), line["rows"], line["length"], line["accumulation"])
    lines = []
    for name, line in sorted(speeds, key=lambda one: [str(part) for part in place(one[1])]):
        peers = [other for _, other in speeds if place(other) == place(line) and other["side"].startswith("peft")]
        best = max(peers, key=lambda one: one["tokens_per_second"], default={})
        speed, memory = line["tokens_per_second"], line.get("peak_gpu_memory_bytes")
        ratio = lambda ours, key: f"{ours / best[key]:.2f}x" if ours and best.get(key) else ""
        shape = f"{line['rows']}x{line['length']}x{line['accumulation']}"
        lines.append((name, shape, f"{line['step_seconds']:.3f}", f"{speed:,.0f}", f"{memory / 2**30:.1f}" if memory else "",
                      f"{line['first_step_seconds']:.1f}", ratio(speed, "tokens_per_second"), ratio(memory, "peak_gpu_memory_bytes")))
    heads = ("item", "rows", "step s", "tokens/s", "GPU GiB", "first step s", "of the best peer", "memory")
    text = benchlib.table(heads, lines) if lines else ""
    for name, line in figures:
        if line.get("held") is False:
            text += f"\nFAIL  {name}: {line['what']}: {line['found']} (expected {line['expected']})"
    for what, found in decisions(figures):
        text += f"\n{what}: {found}"
    return text


def decisions(figures: list[tuple[str, dict]]) -> list[tuple[str, str]]:
    """The figures of the table in benches/notes-cuda.md that the items have given."""
    found = [(f"first step, {name}", f"{line['first_step_seconds']:.0f} s") for name, line in figures
             if name.startswith("cold") and "first_step_seconds" in line]
    torch = {(line["product"], line["shape"]): line["flops_per_second"] for _, line in figures if "flops_per_second" in line}
    for name, line in figures:
        rows = line.get("profile", [])
        products = [row for row in rows if (row["operation"], row["shape"]) in torch]
        if seconds := sum(row["seconds"] for row in products):
            theirs = sum(row["flops"] / torch[row["operation"], row["shape"]] for row in products)
            found.append((f"products against PyTorch's rate, {name}", f"{theirs / seconds:.0%}"))
        if rows:
            attention = sum(row["seconds"] for row in rows if row["operation"].startswith("attention"))
            found.append((f"attention's share of the operations, {name}", f"{attention / sum(row['seconds'] for row in rows):.0%}"))
        if "kernel_seconds" in line:
            found.append((f"kernels of a step, {name}", f"{line['launches']:,} launches, {line['kernel_seconds']:.3f} s"))
            families = [f"{row['family']} {row['seconds'] / line['kernel_seconds']:.0%}" for row in line["families"][:8]]
            found.append(("their families", ", ".join(families)))
    return found


def unpacked(binary: pathlib.Path | None, out: pathlib.Path) -> pathlib.Path | None:
    """The binary; an .xz is unpacked into `out`."""
    if binary is None or binary.suffix != ".xz":
        return binary and binary.resolve()
    path = out / binary.stem
    if not path.exists() or path.stat().st_mtime < binary.stat().st_mtime:
        path.write_bytes(lzma.decompress(binary.read_bytes()))
        path.chmod(0o755)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("part", type=int, choices=(1, 2, 3, 4))
    parser.add_argument("binary", type=pathlib.Path)
    parser.add_argument("model", type=pathlib.Path)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--llvm-binary", type=pathlib.Path)
    parser.add_argument("--work", type=pathlib.Path, required=True, help="the folder of logs, runs and caches")
    parser.add_argument("--again", nargs="*", metavar="ITEM", help="run these again, or all of the part")
    parser.add_argument("--seconds", type=float, help="for the whole part: 460, for part 4 840")
    parser.add_argument("--rehearse", metavar="DEVICE", help="tiny models on this device, to test the script")
    parser.add_argument("--item", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.seconds = args.seconds or (840.0 if args.part == 4 else 460.0)
    if unknown := {*(args.again or ())} - {item.name for item in ITEMS if item.part == args.part}:
        parser.error(f"part {args.part} has no item {', '.join(sorted(unknown))}")
    out, work = args.out.resolve(), args.work.resolve()
    (work / "runs").mkdir(exist_ok=True)
    kit = Kit(unpacked(args.binary, work), unpacked(args.llvm_binary, work), args.model.resolve(), work,
              device=args.rehearse or "cuda", is_rehearsal=bool(args.rehearse))
    if args.item:
        try:
            return next(item for item in ITEMS if item.name == args.item).work(kit)
        except LeftOut as why:
            print(f"left out: {why}", file=sys.stderr)
            sys.exit(LEFT_OUT)
        except (subprocess.CalledProcessError, benchlib.Failed) as failure:
            sys.exit(f"failed: {failure}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    paths = [folder / "half_hour.json" for folder in (work, out)]
    results = next((json.loads(path.read_text()) for path in paths if path.exists()), {"items": {}})
    results |= {"machine": benchlib.machine(), "versions": benchlib.versions(kit.binary, PACKAGES), "device": kit.device}
    for item in ITEMS:
        if item.part != args.part or args.again and item.name not in args.again:
            continue
        before = results["items"].get(item.name)
        if args.again is None and before and not before["outcome"].startswith(("left out", NO_TIME)):
            continue
        left = args.seconds - benchlib.seconds_since_start()
        # Half of the limit is mostly enough.
        if left < item.limit_seconds / 2:
            found = {"seconds": 0, "rc": None, "outcome": NO_TIME, "commands": [], "figures": [], "stderr": ""}
        else:
            found = run(item, kit, min(item.limit_seconds, left))
        results["items"][item.name] = {"part": item.part, **found}
        for folder in (work, out):
            part = folder / "half_hour.part"
            part.write_text(json.dumps(results, indent=1) + "\n")
            part.replace(folder / "half_hour.json")
        print(f"{found['seconds']:6.1f} s  {item.name}: {found['outcome']}", file=sys.stderr, flush=True)
    print(report(results))


if __name__ == "__main__":
    main()
