#!/usr/bin/env python3
"""Compares a run's GPU figures with nvidia-smi, for scripts/gpu_check.sh.

usage: gpu_telemetry.py BINARY RECIPE OUT_DIR [SECONDS]

Trains RECIPE, whose output goes to OUT_DIR/telemetry, for SECONDS (default 40), polls nvidia-smi meanwhile, and ends the run
by SIGINT. OUT_DIR/telemetry.json gets nvidia-smi's figures with their steps. scripts/gpu_check.py calls `checks`.
GPU_CHECK_SMI names a program to run instead of nvidia-smi.
"""

import json
import os
import pathlib
import re
import shlex
import signal
import statistics
import subprocess
import sys
import time

# Earlier steps are left out: they compile kernels, clocks rise, and the first samples come in.
NUM_WARMUP_STEPS = 20
INTERRUPTED = 130
MIB = 2**20
PARTS = tuple(f"{part}_seconds" for part in ("data_wait", "host_to_device", "forward_backward", "optimizer", "logging", "evaluation",
                                             "checkpoint", "other"))
THROTTLE = ("clocks_event_reasons.active", "clocks_throttle_reasons.active")  # the new name, and the name in older drivers
QUERY = ("uuid", "compute_cap", "utilization.gpu", "utilization.memory", "memory.used", "power.draw", "temperature.gpu", "clocks.sm",
         "clocks.mem")
# Figures of every card, and figures for which nvidia-smi shows whether this card has them.
ALWAYS = ("energy_joules", "gpu_other_processes_memory_bytes", "gpu_pcie_received_bytes_per_second", "gpu_pcie_sent_bytes_per_second")
POOLS = ("gpu_memory_allocated_bytes", "gpu_memory_reserved_bytes")
OFFERED = {
    "utilization.gpu": ("gpu_utilization_percent", "gpu_utilization_max_percent"),
    "utilization.memory": ("gpu_memory_activity_percent",),
    "memory.used": ("gpu_memory_used_bytes",),
    "power.draw": ("gpu_power_watts",),
    "temperature.gpu": ("gpu_temperature_celsius",),
    "clocks.sm": ("gpu_sm_clock_mhz",),
    "clocks.mem": ("gpu_memory_clock_mhz",),
}
# For a MIG slice, NVML gives only the memory; its other figures are those of the whole card.
OF_A_SLICE = ("gpu_memory_used_bytes", "gpu_other_processes_memory_bytes")
# Counters from Hopper on.
GPM_SINCE, GPM_FIELD = 9.0, "gpu_sm_activity_percent"
# Reasons for throttled clocks, except an idle GPU, set clocks, and waiting for another GPU of its group.
HELD_DOWN = ~(0x1 | 0x2 | 0x10)


def steps(folder: pathlib.Path) -> list[dict]:
    """The step lines of metrics.jsonl, without a torn last line."""
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    rows = []
    for line in lines:
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return [row for row in rows if "loss" in row]


class Smi:
    """nvidia-smi on one GPU."""

    def __init__(self, uuid: str):
        self.program = shlex.split(os.environ.get("GPU_CHECK_SMI", "nvidia-smi")) + [f"--id={uuid}"]
        self.throttle = next((name for name in THROTTLE if self.ask((name,))), None)

    def ask(self, fields: tuple[str, ...]) -> list[str] | None:
        command = [*self.program, f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
        try:
            said = subprocess.run(command, capture_output=True, text=True, timeout=30)
        except OSError:
            return None
        values = [value.strip() for value in said.stdout.strip().split(",")]
        return values if said.returncode == 0 and len(values) == len(fields) else None

    def sample(self) -> dict | None:
        """Numbers, and texts of other values; figures that the card lacks are left out."""
        fields = QUERY + ((self.throttle,) if self.throttle else ())
        values = self.ask(fields)
        if values is None:
            return None
        found = {}
        for field, value in zip(fields, values):
            if field in THROTTLE:
                field, value = "throttle", int(value, 16) if value.startswith("0x") else None
            elif re.fullmatch(r"-?\d+(\.\d+)?", value):
                value = float(value)
            elif value.startswith("["):  # [N/A], [Not Supported]
                continue
            found[field] = value
        return found


def run(binary: str, recipe: pathlib.Path, out: pathlib.Path, seconds: float) -> dict:
    """Trains for that time and polls nvidia-smi meanwhile."""
    folder, said = out / "telemetry", out / "telemetry.stderr"
    found = {"uuid": None, "samples": []}
    with said.open("w") as stderr:
        process = subprocess.Popen([binary, str(recipe)], stderr=stderr)
    smi, until = None, None
    while process.poll() is None:
        label = re.search(r"GPU figures are those of .*((?:GPU|MIG)-\S+)", said.read_text())
        if label and not smi:
            found["uuid"], smi = label[1], Smi(label[1])
        num_steps = len(steps(folder))
        if num_steps > NUM_WARMUP_STEPS:
            until = until or time.monotonic() + seconds
            sample = smi.sample() if smi and smi.throttle else None
            if sample:
                found["samples"].append({"step": num_steps, **sample})
        if until and time.monotonic() > until:
            process.send_signal(signal.SIGINT)
            until = float("inf")
        time.sleep(0.2)
    found["status"] = process.returncode
    return found


def mean(rows: list[dict], field: str) -> float:
    """Mean over time: a long step counts for more."""
    return sum(row[field] * row["wall_seconds"] for row in rows) / sum(row["wall_seconds"] for row in rows)


def checks(out: pathlib.Path) -> list[tuple[str, str, str, bool]]:
    """The checks: what was found, what is expected, and whether it holds."""
    if not (out / "telemetry.json").exists():
        return []
    found = json.loads((out / "telemetry.json").read_text())
    folder = out / "telemetry"
    rows = steps(folder)[NUM_WARMUP_STEPS:]
    held = [("telemetry: the run", f"exit code {found['status']}, {len(rows)} steps after {NUM_WARMUP_STEPS}",
             f"{INTERRUPTED} or 0, at least 20 steps", found["status"] in (0, INTERRUPTED) and len(rows) >= 20)]
    if len(rows) < 20:
        return held
    environment = json.loads((folder / "environment.json").read_text())
    uuid, samples = found["uuid"] or "", found["samples"]
    on_gpu = environment["device"].startswith("cuda")
    held += identity(uuid, environment, on_gpu)
    held += fields(rows, samples, uuid.startswith("MIG-"), on_gpu)
    held += parts(rows)
    held += values(rows, samples, uuid)
    held += whole_run(folder, rows)
    return held


def identity(uuid: str, environment: dict, on_gpu: bool) -> list:
    """The sampled GPU is the GPU that trains."""
    trains = environment.get("gpu", {}).get("uuid")
    expected = f"that of CUDA's GPU, {trains}" if on_gpu else "one"
    return [("telemetry: UUID of the sampled GPU", uuid or "none", expected, bool(uuid) and (not on_gpu or uuid[4:] == trains))]


def fields(rows: list, samples: list, is_slice: bool, on_gpu: bool) -> list:
    """Every step has all figures that this card offers, and no others."""
    has_gpm = any(sample.get("compute_cap", 0) >= GPM_SINCE for sample in samples)
    offered = {field for sample in samples for field in sample}
    expected = [*OF_A_SLICE] if is_slice else [*ALWAYS, *(ours for theirs, all_ours in OFFERED.items() if theirs in offered for ours in all_ours)]
    expected += [GPM_FIELD] if has_gpm and not is_slice else []
    expected += POOLS if on_gpu else ()
    missing = [f"{field} in {count} of {len(rows)} steps" for field in expected if (count := sum(field not in row for row in rows))]
    held = [("telemetry: figures that are missing", "; ".join(missing) or "none", f"none of {len(expected)}", not missing)]
    if not is_slice:
        held.append(("telemetry: nvidia-smi was asked", f"{len(samples)} times, and knows {len(offered & {*OFFERED})} figures",
                     f"5 times, {len(OFFERED)} figures", len(samples) >= 5 and offered >= {*OFFERED}))
    if not has_gpm:
        surplus = any(GPM_FIELD in row for row in rows)
        held.append((f"telemetry: {GPM_FIELD} before Hopper", "there" if surplus else "absent", "absent", not surplus))
    return held


def parts(rows: list) -> list:
    """The parts of each step add up to its wall time; forward and backward are at most their joint time."""
    lacking = sorted({field for row in rows for field in (*PARTS, "wall_seconds") if field not in row})
    if lacking:
        return [("telemetry: parts of a step", f"without {', '.join(lacking)}", "all there", False)]
    worst = max(abs(sum(row[part] for part in PARTS) - row["wall_seconds"]) / row["wall_seconds"] for row in rows)
    held = [("telemetry: parts of a step against its wall time", f"off by {worst:.2%} at most", "0.1 %", worst <= 1e-3)]
    split = [row for row in rows if row.get("forward_seconds") is not None and row.get("backward_seconds") is not None]
    worst = max((abs(row["forward_seconds"] + row["backward_seconds"] - row["forward_backward_seconds"]) / row["wall_seconds"]
                 for row in split), default=0)
    return [*held, ("telemetry: forward and backward against both", f"off by {worst:.2%} of a step at most, in {len(split)} steps",
                    "1 %, in at least one step", bool(split) and worst <= 1e-2)]


def values(rows: list, samples: list, uuid: str) -> list:
    """Our figures, over the steps at which nvidia-smi was polled, against its figures."""
    if len(samples) < 2 or uuid.startswith("MIG-"):
        return []
    rows = [row for row in rows if samples[0]["step"] <= row["step"] <= samples[-1]["step"]]
    held = []

    def compare(name: str, ours: float, theirs: float, tolerance: float, unit: str) -> None:
        held.append((f"telemetry: {name}", f"{ours:.1f} {unit}", f"{theirs:.1f} {unit} by nvidia-smi, within {tolerance:.1f}",
                     abs(ours - theirs) <= tolerance))

    def both(field: str, theirs: str, of: str = "mean") -> tuple[float, float] | None:
        said = [sample[theirs] for sample in samples if theirs in sample]
        if not rows or not said or any(field not in row for row in rows):
            return None
        return (mean(rows, field), statistics.fmean(said)) if of == "mean" else (max(row[field] for row in rows), max(said))

    # Two samplers see different moments: the more a figure varies, the wider its tolerance.
    if pair := both("gpu_utilization_percent", "utilization.gpu"):
        compare("mean utilization", *pair, 15, "%")
    if (pair := both("gpu_memory_activity_percent", "utilization.memory")) and not any(GPM_FIELD in row for row in rows):
        compare("mean memory activity", *pair, 15, "%")
    if pair := both("gpu_memory_used_bytes", "memory.used", "max"):
        compare("most memory in use", pair[0] / MIB, pair[1], 64 + 0.02 * pair[1], "MiB")
    if pair := both("gpu_power_watts", "power.draw"):
        compare("mean power", *pair, 10 + 0.15 * pair[1], "W")
    if pair := both("gpu_temperature_celsius", "temperature.gpu", "max"):
        compare("highest temperature", *pair, 4, "°C")
    for field, theirs in (("gpu_sm_clock_mhz", "clocks.sm"), ("gpu_memory_clock_mhz", "clocks.mem")):
        if pair := both(field, theirs):
            compare(theirs, *pair, 0.05 * pair[1], "MHz")
    down = [bool(sample["throttle"] & HELD_DOWN) for sample in samples if sample.get("throttle") is not None]
    if down:
        ours = statistics.fmean("gpu_throttle_reasons" in row and bool(row["gpu_throttle_reasons"]) for row in rows)
        theirs = statistics.fmean(down)
        # With flicker, a single sample marks our whole step.
        agrees = (ours >= 0.5) if theirs > 0.9 else (ours <= 0.5 if theirs < 0.02 else True)
        held.append(("telemetry: steps with clocks held down", f"{ours:.0%}", f"{theirs:.0%} of the samples by nvidia-smi", agrees))
    if all("gpu_power_watts" in row and "energy_joules" in row for row in rows) and len(rows) > 2:
        energy = rows[-1]["energy_joules"] - rows[0]["energy_joules"]
        integral = sum(row["gpu_power_watts"] * row["wall_seconds"] for row in rows[1:])
        held.append(("telemetry: energy against the integral of power", f"{energy:.0f} J", f"{integral:.0f} J, within 10 %",
                     abs(energy - integral) <= 0.1 * integral + 1))
    return held


def whole_run(folder: pathlib.Path, rows: list) -> list:
    """The figures of the whole run agree with those of its steps."""
    path = next((folder / name for name in ("summary.json", "unfinished.json") if (folder / name).exists()), None)
    if path is None:
        return [("telemetry: figures of the whole run", "none", "summary.json or unfinished.json", False)]
    summary = json.loads(path.read_text())
    held = []
    split, wall = sum(summary["time"].values()), summary["wall_seconds"]
    held.append(("telemetry: the split of the run's time", f"{split:.2f} s", f"{wall:.2f} s, within 1 %", abs(split - wall) <= 0.01 * wall))
    names = ("peak_gpu_memory_bytes", "mean_gpu_utilization_percent", "energy_joules", "telemetry_seconds")
    missing = [name for name in names if summary.get(name) is None]
    held.append((f"telemetry: figures of {path.name} that are missing", ", ".join(missing) or "none", "none", not missing))
    if not missing and all("gpu_memory_used_bytes" in row for row in rows):
        peak, most = summary["peak_gpu_memory_bytes"], max(row["gpu_memory_used_bytes"] for row in rows)
        held.append(("telemetry: peak memory of the run", f"{peak / MIB:.0f} MiB", f"at least {most / MIB:.0f} MiB, the most of a step",
                     peak >= most))
        busy = summary["telemetry_seconds"] / wall
        held.append(("telemetry: time of the sampling thread", f"{busy:.2%}", "less than 0.5 %", busy < 0.005))
    return held


def main() -> None:
    if len(sys.argv) not in (4, 5):
        sys.exit(__doc__)
    binary, recipe, out = sys.argv[1], pathlib.Path(sys.argv[2]), pathlib.Path(sys.argv[3])
    found = run(binary, recipe, out, float(sys.argv[4]) if len(sys.argv) == 5 else 40.0)
    (out / "telemetry.json").write_text(json.dumps(found, indent=1) + "\n")
    if found["status"] not in (0, INTERRUPTED):
        print((out / "telemetry.stderr").read_text()[-2000:], file=sys.stderr)


if __name__ == "__main__":
    main()
