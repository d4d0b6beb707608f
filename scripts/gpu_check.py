#!/usr/bin/env python3
"""Reads the results of scripts/gpu_check.sh in OUT_DIR, prints a table and writes OUT_DIR/gpu_check.json.

usage: gpu_check.py OUT_DIR
"""

import json
import pathlib
import statistics
import sys

import gpu_telemetry
from gpu_telemetry import steps

# Figures of the metrics contract that a machine with a GPU must have.
GPU_FIELDS = ("gpu_utilization_percent", "gpu_utilization_max_percent", "gpu_memory_used_bytes",
              "gpu_memory_allocated_bytes", "gpu_memory_reserved_bytes", "gpu_power_watts", "energy_joules",
              "gpu_temperature_celsius")


def largest_difference(ours: list[dict], reference: list[dict], key: str) -> float:
    return max(abs(a[key] - b[key]) / abs(b[key]) for a, b in zip(ours, reference, strict=True))


def correctness(out: pathlib.Path, checks: list) -> None:
    if not (out / "cpu-f32" / "metrics.jsonl").exists():
        return
    reference = steps(out / "cpu-f32")
    # f32 adds in another order; bf16 rounds to 2^-9, and the curves drift apart over the steps.
    for run, loss_tolerance, norm_tolerance in (("gpu-f32", 1e-3, 1e-2), ("gpu-bf16", 3e-2, 1.5e-1)):
        if not (out / run / "metrics.jsonl").exists():
            continue
        ours = steps(out / run)
        for key, tolerance in (("loss", loss_tolerance), ("grad_norm", norm_tolerance)):
            difference = largest_difference(ours, reference, key)
            checks.append((f"{run}: {key} of 8 steps against the CPU's f32", f"{difference:.2e}",
                           f"at most {tolerance:.1e}", difference <= tolerance))


def offload(out: pathlib.Path, checks: list) -> None:
    if not (out / "offload" / "metrics.jsonl").exists():
        return
    ours, reference = steps(out / "offload"), steps(out / "kept")
    for key in ("loss", "grad_norm"):
        difference = largest_difference(ours, reference, key)
        # Equal kernels on equal numbers: only sums whose order a GPU may change can differ.
        checks.append((f"offload: {key} of 8 steps against inputs kept on the device", f"{difference:.2e}", "at most 1e-5", difference <= 1e-5))


def memory(out: pathlib.Path, checks: list) -> None:
    if not (out / "memory" / "metrics.jsonl").exists():
        return
    rows = steps(out / "memory")
    missing = [field for field in GPU_FIELDS if field not in rows[-1]]
    checks.append(("telemetry: fields of the last step", ", ".join(missing) or "all there", "all there", not missing))
    if missing:
        return
    utilization = statistics.mean(row["gpu_utilization_percent"] for row in rows[20:])
    checks.append(("telemetry: mean utilization", f"{utilization:.0f} %", "1 to 100 %", 1 <= utilization <= 100))
    power = statistics.mean(row["gpu_power_watts"] for row in rows[20:])
    checks.append(("telemetry: mean power", f"{power:.0f} W", "20 to 1500 W", 20 <= power <= 1500))
    energy = rows[-1]["energy_joules"] - rows[20]["energy_joules"]
    checks.append(("telemetry: energy rises", f"{energy:.0f} J", "more than 0", energy > 0))
    for field in ("gpu_memory_used_bytes", "gpu_memory_reserved_bytes", "host_memory_bytes"):
        early = max(row[field] for row in rows[20:60])
        late = max(row[field] for row in rows[-40:])
        growth = late / early - 1
        checks.append((f"{field}: steps 160-200 against 20-60", f"{growth:+.2%}", "at most +2 %", growth <= 0.02))


def plan(out: pathlib.Path, checks: list) -> None:
    path = out / "plan.json"
    if not path.exists():
        return
    found = json.loads(path.read_text())
    for figure in found["figures"]:
        planned, measured = figure["planned_bytes"], figure["measured_bytes"]
        # CUDA's own memory differs between drivers, and is most of a tiny model's.
        slack = max(0.1 * measured, 128 * 2**20 if found["device"].startswith("cuda") else 0)
        checks.append((f"plan: {figure['recipe']}", f"{planned / 2**20:.0f} MiB", f"{measured / 2**20:.0f} MiB measured, within 10 %",
                       abs(planned - measured) <= slack))


def commands(out: pathlib.Path, checks: list) -> None:
    if not (out / "tune.toml").exists():
        return
    reports = {}
    for name in ("doctor", "calibrated", "tune"):
        try:
            reports[name] = json.loads((out / f"{name}.json").read_text())
        except (OSError, json.JSONDecodeError) as error:
            checks.append((f"commands: {name}.json", str(error), "one JSON object", False))
    device = "cuda" if 'name = "cuda' in (out / "tune.toml").read_text() else "cpu"
    if doctor := reports.get("doctor"):
        found = doctor.get(f"device {device}", {})
        checks.append((f"doctor: device {device}", f"usable: {found.get('usable')}, {', '.join(found.get('dtypes', []))}",
                       "usable, with bf16", found.get("usable") is True and "bf16" in found.get("dtypes", ())))
        gpus = doctor.get("nvidia driver", {}).get("gpus", [])
        checks.append(("doctor: GPUs that NVML lists", ", ".join(gpu["name"] for gpu in gpus) or "none", "at least one, with UUID and memory",
                       bool(gpus) and all(gpu.get("uuid") and gpu.get("memory_bytes") for gpu in gpus)))
        if device == "cuda":
            rates = [found.get(name, 0) for name in ("bf16_gemm_flops", "memory_bandwidth_bytes_per_second")]
            checks.append(("doctor: measured rates", f"{rates[0] / 1e12:.0f} TFLOP/s, {rates[1] / 1e9:.0f} GB/s",
                           "at least 1 TFLOP/s and 50 GB/s", rates[0] >= 1e12 and rates[1] >= 5e10))
            libraries = doctor.get("cuda libraries", {})
            checks.append(("doctor: libcuda", str(libraries.get("libcuda")), "a path", bool((libraries.get("libcuda") or {}).get("path"))))
    if calibrated := reports.get("calibrated"):
        seconds = calibrated.get("step_seconds") or 0
        checks.append(("plan --calibrate: a step", f"{seconds:.3f} s, measured: {calibrated.get('is_calibrated')}", "more than 0, measured",
                       seconds > 0 and calibrated.get("is_calibrated") is True))
    if tune := reports.get("tune"):
        measured = [trial for trial in tune["trials"] if "left_out" not in trial]
        figures = ("target_tokens_per_second", "step_seconds", "peak_memory_bytes", "run_seconds")
        lacking = [trial["settings"] for trial in measured if not all(trial.get(name, 0) > 0 for name in figures)]
        checks.append(("tune: settings that were measured", f"{len(measured)} of {len(tune['trials'])}", "at least the recipe and a candidate",
                       len(measured) >= 2))
        checks.append(("tune: trials without a figure", str(lacking or "none"), "none", not lacking))
        reasons = [trial["left_out"] for trial in tune["trials"] if "left_out" in trial]
        failed = [why for why in reasons if not ("--max-minutes" in why or "does not fit" in why or "slower" in why)]
        checks.append(("tune: trials that failed", "; ".join(failed) or "none", "none", not failed))


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    out = pathlib.Path(sys.argv[1])
    checks: list[tuple[str, str, str, bool]] = []
    correctness(out, checks)
    offload(out, checks)
    memory(out, checks)
    checks += gpu_telemetry.checks(out)
    plan(out, checks)
    commands(out, checks)
    benches = {path.stem: json.loads(path.read_text()) for path in sorted(out.glob("bench-*.json"))}
    for name, figures in benches.items():
        print(f"{name}: {figures['tokens_per_second']:.0f} tokens/s, median step {figures['step_seconds']:.3f} s, "
              f"first step after {figures['first_step_seconds']:.1f} s, MFU {100 * (figures.get('mfu') or 0):.1f} %, "
              f"peak GPU memory {figures.get('peak_gpu_memory_bytes', 0) / 2**30:.2f} GiB, {figures['device']}")
    for what, found, expected, held in checks:
        print(f"{'ok  ' if held else 'FAIL'}  {what}: {found} (expected {expected})")
    if not checks and not benches:
        sys.exit("nothing was run")
    gpu = out / "gpu.txt"
    result = {
        "gpu": gpu.read_text().strip() if gpu.exists() else None,
        "checks": [{"what": w, "found": f, "expected": e, "held": h} for w, f, e, h in checks],
        "benches": benches,
    }
    (out / "gpu_check.json").write_text(json.dumps(result, indent=1) + "\n")
    sys.exit(0 if all(held for *_, held in checks) else 1)


main()
