"""Compares a run's GPU figures with nvidia-smi's, for scripts/gpu_half_hour.sh."""

import json
import os
import pathlib
import re
import shlex
import signal
import statistics
import subprocess
import time

# Earlier steps are left out: they compile kernels, clocks rise, and the first samples come in.
NUM_WARMUP_STEPS = 20
INTERRUPTED = 130
MIB = 2**20
PARTS = tuple(f"{part}_seconds" for part in ("data_wait", "host_to_device", "forward_backward", "optimizer", "logging", "evaluation",
                                             "checkpoint", "other"))
# Ours, nvidia-smi's, whether means or maxima are compared, the tolerance in the unit and as a share, the unit. Two samplers
# see different moments: the more a figure varies, the wider its tolerance.
COMPARED = (
    ("gpu_utilization_percent", "utilization.gpu", "mean", 15, 0, "%"),
    ("gpu_memory_used_bytes", "memory.used", "max", 64 * MIB, 0.02, "B"),
    ("gpu_power_watts", "power.draw", "mean", 10, 0.15, "W"),
    ("gpu_temperature_celsius", "temperature.gpu", "max", 4, 0, "°C"),
    ("gpu_sm_clock_mhz", "clocks.sm", "mean", 0, 0.05, "MHz"),
    ("gpu_memory_clock_mhz", "clocks.mem", "mean", 0, 0.05, "MHz"),
)
# Figures of every card that trains, and of those from Hopper on.
ALWAYS = ("energy_joules", "gpu_other_processes_memory_bytes", "gpu_utilization_max_percent", "gpu_pcie_received_bytes_per_second",
          "gpu_pcie_sent_bytes_per_second")
POOLS = ("gpu_memory_allocated_bytes", "gpu_memory_reserved_bytes")
GPM_SINCE, GPM_FIELD = 9.0, "gpu_sm_activity_percent"
OF_THE_RUN = ("peak_gpu_memory_bytes", "mean_gpu_utilization_percent", "energy_joules", "telemetry_seconds")


def steps(folder: pathlib.Path) -> list[dict]:
    """The step lines of metrics.jsonl, without a torn last line."""
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    rows = [json.loads(line) for line in lines if line.endswith("\n")]
    return [row for row in rows if "loss" in row]


def check(what: str, found: str, expected: str, held: bool) -> dict:
    return {"what": what, "found": found, "expected": expected, "held": bool(held)}


def sample(uuid: str) -> dict:
    """nvidia-smi's figures as numbers, without those that the card lacks. GPU_HALF_HOUR_SMI names a program to ask instead."""
    fields = ("compute_cap", *(row[1] for row in COMPARED))
    command = [*shlex.split(os.environ.get("GPU_HALF_HOUR_SMI", "nvidia-smi")), f"--id={uuid}", f"--query-gpu={','.join(fields)}",
               "--format=csv,noheader,nounits"]
    said = subprocess.run(command, capture_output=True, text=True, timeout=30).stdout.split(",")
    found = {field: float(value) for field, value in zip(fields, said) if re.fullmatch(r"\s*\d+(\.\d+)?\s*", value)}
    if "memory.used" in found:
        found["memory.used"] *= MIB
    return found


def train(binary: str, recipe: pathlib.Path, folder: pathlib.Path, seconds: float) -> tuple[int, str, list[dict]]:
    """Trains for that time after the warm-up, then interrupts: the exit code, the sampled GPU's UUID, nvidia-smi's figures."""
    log = folder.with_suffix(".stderr")
    with log.open("w") as stderr:
        process = subprocess.Popen([binary, str(recipe)], stderr=stderr)
    uuid, samples, until = "", [], None
    while process.poll() is None:
        if label := re.search(r"GPU figures are those of .*(GPU-\S+)", log.read_text()):
            uuid = label[1]
        if (num_steps := len(steps(folder))) > NUM_WARMUP_STEPS:
            until = until or time.monotonic() + seconds
            if uuid:
                samples.append({"step": num_steps, **sample(uuid)})
        if until and time.monotonic() > until:
            process.send_signal(signal.SIGINT)
            until = float("inf")
        time.sleep(0.2)
    return process.returncode, uuid, samples


def mean(rows: list[dict], field: str) -> float:
    """Mean over time: a long step counts for more."""
    return sum(row[field] * row["wall_seconds"] for row in rows) / sum(row["wall_seconds"] for row in rows)


def checks(folder: pathlib.Path, status: int, uuid: str, samples: list[dict]) -> list[dict]:
    """What was found in the run's folder, what is expected, and whether it holds."""
    rows = steps(folder)[NUM_WARMUP_STEPS:]
    held = [check("the run", f"exit code {status}, {len(rows)} steps after {NUM_WARMUP_STEPS}", "130 or 0, at least 20 steps",
                  status in (0, INTERRUPTED) and len(rows) >= 20)]
    if not held[0]["held"]:
        return held
    environment = json.loads((folder / "environment.json").read_text())
    on_gpu, trains = environment["device"].startswith("cuda"), environment.get("gpu", {}).get("uuid")
    held.append(check("UUID of the sampled GPU", uuid or "none", f"that of CUDA's GPU, {trains}" if on_gpu else "one",
                      uuid and (not on_gpu or uuid[4:] == trains)))
    held.append(check("answers of nvidia-smi", f"{len(samples)}", "at least 5", len(samples) >= 5))
    offered = {field for one in samples for field in one}
    wanted = [*ALWAYS, *(ours for ours, theirs, *_ in COMPARED if theirs in offered), *(POOLS if on_gpu else ())]
    wanted += [GPM_FIELD] if any(one.get("compute_cap", 0) >= GPM_SINCE for one in samples) else []
    missing = [field for field in wanted if any(field not in row for row in rows)]
    held.append(check("figures that are missing", ", ".join(missing) or "none", f"none of {len(wanted)}", not missing))
    return held + of_steps(rows) + beside_smi(rows, samples) + of_the_run(folder, rows)


def of_steps(rows: list[dict]) -> list[dict]:
    """The parts of each step add up to its wall time, forward and backward to their joint time; memory stays flat."""
    worst = max(abs(sum(row[part] for part in PARTS) - row["wall_seconds"]) / row["wall_seconds"] for row in rows)
    held = [check("parts of a step against its wall time", f"off by {worst:.2%} at most", "0.1 %", worst <= 1e-3)]
    split = [row for row in rows if row.get("forward_seconds") is not None]
    worst = max((abs(row["forward_seconds"] + row["backward_seconds"] - row["forward_backward_seconds"]) / row["wall_seconds"]
                 for row in split), default=1.0)
    held.append(check("forward and backward against both", f"off by {worst:.2%} of a step at most, in {len(split)} steps",
                      "1 %, in at least one step", worst <= 1e-2))
    for field in ("gpu_memory_used_bytes", "gpu_memory_reserved_bytes", "host_memory_bytes"):
        early, late = ([row[field] for row in part if field in row] for part in (rows[:len(rows) // 3], rows[-len(rows) // 3:]))
        if early and late:
            growth = max(late) / max(early) - 1
            held.append(check(f"{field}: the last third of the steps against the first", f"{growth:+.2%}", "at most +2 %", growth <= 0.02))
    return held


def beside_smi(rows: list[dict], samples: list[dict]) -> list[dict]:
    """Our figures, over the steps at which nvidia-smi was asked, against its figures; energy against power."""
    rows = [row for row in rows if samples and samples[0]["step"] <= row["step"] <= samples[-1]["step"]]
    held = []
    for field, theirs, of, tolerance, share, unit in COMPARED:
        said = [one[theirs] for one in samples if theirs in one]
        if rows and said and all(field in row for row in rows):
            ours, smi = (mean(rows, field), statistics.fmean(said)) if of == "mean" else (max(row[field] for row in rows), max(said))
            within = tolerance + share * smi
            held.append(check(f"{of} of {field}", f"{ours:,.1f} {unit}", f"{smi:,.1f} {unit} by nvidia-smi, within {within:,.1f}",
                              abs(ours - smi) <= within))
    if len(rows) > 2 and all("gpu_power_watts" in row and "energy_joules" in row for row in rows):
        energy = rows[-1]["energy_joules"] - rows[0]["energy_joules"]
        integral = sum(row["gpu_power_watts"] * row["wall_seconds"] for row in rows[1:])
        held.append(check("energy against the integral of power", f"{energy:.0f} J", f"{integral:.0f} J, within 10 %",
                          abs(energy - integral) <= 0.1 * integral + 1))
    return held


def of_the_run(folder: pathlib.Path, rows: list[dict]) -> list[dict]:
    """The figures of the whole run agree with those of its steps."""
    path = next(folder / name for name in ("summary.json", "unfinished.json") if (folder / name).exists())
    summary = json.loads(path.read_text())
    split, wall = sum(summary["time"].values()), summary["wall_seconds"]
    held = [check("the split of the run's time", f"{split:.2f} s", f"{wall:.2f} s, within 1 %", abs(split - wall) <= 0.01 * wall)]
    missing = [name for name in OF_THE_RUN if summary.get(name) is None]
    held.append(check(f"figures of {path.name} that are missing", ", ".join(missing) or "none", "none", not missing))
    if not missing:
        peak, most = summary["peak_gpu_memory_bytes"], max(row.get("gpu_memory_used_bytes", 0) for row in rows)
        held.append(check("peak memory of the run", f"{peak:,}", f"at least {most:,}, the most of a step", peak >= most))
        busy = summary["telemetry_seconds"] / wall
        held.append(check("time of the sampling thread", f"{busy:.2%}", "less than 10 %, in a thread of its own", busy < 0.1))
    return held
