#!/usr/bin/env python3
"""Holds `lora-train plan --ranks 2 --nodes 2` against steps between two hosts: network namespaces with a limited link between them.

usage: check_ranks.py [--models models] [--rounds 3] [--steps 6] [--binary target/release/lora-train] [--tolerance 0.15]
                      [--out benches/results]

Needs root, iproute2 (ip, tc), Open MPI's mpirun and two cores, of which each host has one. A round plans both rates at once with
`--calibrate`, a core each, since cores slow one another down, and then trains over each; the medians of the rounds are compared.
Prints a table and writes JSON with hardware, versions and command line to --out. Exit code 1 if a step is off by more than
--tolerance, or if less than 0.9 of a link is used.
"""

import argparse
import json
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile

import benchlib

RATES = {"1G": 1e9, "100M": 1e8}
ACCUMULATIONS, ROWS, LENGTH = [1, 4], 2, 128
LEAST_OF_LINK = 0.9
HOSTS = {"ltr1": "10.77.0.1", "ltr2": "10.77.0.2"}


def ip(command: str) -> None:
    subprocess.run(["ip", *command.split()], check=True)


def down() -> None:
    for host in HOSTS:
        subprocess.run(["ip", "netns", "del", host], stderr=subprocess.DEVNULL)


def up() -> None:
    down()
    for host in HOSTS:
        ip(f"netns add {host}")
    ip("link add eth0 netns ltr1 type veth peer name eth0 netns ltr2")
    for host, address in HOSTS.items():
        ip(f"-n {host} addr add {address}/24 dev eth0")
        ip(f"-n {host} link set eth0 up")
        ip(f"-n {host} link set lo up")


def limit(rate: float) -> None:
    for host in HOSTS:
        subprocess.run(["tc", "-n", host, *f"qdisc replace dev eth0 root tbf rate {rate:.0f}bit burst 1mb latency 50ms".split()], check=True)


def plans(binary: pathlib.Path, recipe: pathlib.Path) -> dict:
    """What is planned for each rate, by processes of a core each, at once."""
    running = {rate: subprocess.Popen(
        ["taskset", "-c", str(core), binary, "plan", recipe, "--calibrate", "--ranks", "2", "--nodes", "2", "--network", rate, "--json"],
        stdout=subprocess.PIPE) for core, rate in enumerate(RATES)}
    return {rate: json.loads(process.communicate()[0])["ranks"] for rate, process in running.items()}


def train(binary: pathlib.Path, recipe: pathlib.Path, work: pathlib.Path) -> dict:
    """Medians of a step and of what it waits for, and the rate of a sum alone."""
    agent = work / "agent.sh"
    agent.write_text('#!/bin/sh\nhost=$1\nshift\nexec ip netns exec "$host" sh -c "$*"\n')
    agent.chmod(0o755)
    networks = " ".join(f"--mca {layer}_tcp_if_include 10.77.0.0/24" for layer in ("btl", "oob"))
    command = ["ip", "netns", "exec", "ltr1", "mpirun", "--allow-run-as-root", "--bind-to", "none", "--mca", "plm_rsh_agent", str(agent),
               "--mca", "btl", "tcp,self", "--mca", "rtc", "^hwloc", *networks.split()]   # Debian's rtc/hwloc crashes now and then
    for core, host in enumerate(HOSTS):
        command += [":"] * (core > 0) + ["-H", f"{host}:1", "-n", "1", "taskset", "-c", str(core), str(binary), str(recipe), "--overwrite"]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        raise benchlib.Failed(done.stderr)
    lines = [json.loads(line) for line in (work / "run/metrics.jsonl").read_text().splitlines()]
    lines = [line for line in lines if "grad_norm" in line][1:]
    megabytes, milliseconds = map(float, re.search(r"([\d.]+) MB, are summed in ([\d.]+) ms", done.stderr).groups())
    # Of two ranks, each sends the gradients once.
    return {"bits_per_second": 8e9 * megabytes / milliseconds, "exchange_alone_seconds": milliseconds / 1e3,
            **{name: statistics.median(line[name] for line in lines) for name in ("step_seconds", "exchange_seconds")}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", type=pathlib.Path, default=pathlib.Path("models"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--binary", type=pathlib.Path, default=benchlib.default_binary())
    parser.add_argument("--tolerance", type=float, default=0.15)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("benches/results"))
    args = parser.parse_args()
    found: dict[tuple[int, str], list[dict]] = {}
    up()
    try:
        with tempfile.TemporaryDirectory() as folder:
            work = pathlib.Path(folder)
            (work / "rows.jsonl").write_text((json.dumps({"text": "The cat sat on the mat. " * 40}) + "\n") * 200)
            recipe = work / "recipe.toml"
            for accumulation in ACCUMULATIONS * args.rounds:
                task = {"model": (args.models / "smollm2-135m").resolve(), "rows": ROWS, "length": LENGTH, "r": 16, "accumulation": accumulation,
                        "checkpointing": False, "dtype": "f32", "steps": args.steps, "device": "cpu"}
                data = f'[data]\npacking = true\ntrain = [{{path = "{work}/rows.jsonl"}}]'
                recipe.write_text(benchlib.recipe(task, work / "run").replace("[data]", data))
                for rate, planned in plans(args.binary, recipe).items():
                    limit(RATES[rate])
                    figures = {f"planned_{name}": value for name, value in planned.items() if name.endswith("_seconds")}
                    figures |= train(args.binary, recipe, work)
                    found.setdefault((accumulation, rate), []).append(figures)
                    print(accumulation, rate, figures, file=sys.stderr, flush=True)
    finally:
        down()
    rows, lines = [], []
    for (accumulation, rate), runs in sorted(found.items()):
        row = {"accumulation": accumulation, "rate": rate, **benchlib.medians(runs)}
        row |= {"error": row["planned_step_seconds"] / row["step_seconds"] - 1, "of_link": row["bits_per_second"] / RATES[rate]}
        rows.append(row)
        waits = row["planned_exchange_seconds"] - row["planned_hidden_seconds"]
        lines.append((f"{rate}bit/s", f"{accumulation} x {ROWS} x {LENGTH}", f"{row['planned_step_seconds']:.2f}", f"{row['step_seconds']:.2f}",
                      f"{row['error']:+.0%}", f"{waits:.3f}", f"{row['exchange_seconds']:.3f}", f"{row['of_link']:.2f}"))
    heads = ("link", "tokens of a step", "planned s", "step s", "error", "planned wait s", "wait s", "of the link")
    print(benchlib.table(heads, lines))
    result = {"machine": benchlib.machine(), "versions": benchlib.versions(args.binary, ()), "rows": rows}
    print(benchlib.write_result(args.out, "ranks", result), file=sys.stderr)
    sys.exit(any(abs(row["error"]) > args.tolerance or row["of_link"] < LEAST_OF_LINK for row in rows))


if __name__ == "__main__":
    main()
