#!/usr/bin/env python3
"""Reads what scripts/gpu_check.sh left in OUT_DIR, prints a table and writes OUT_DIR/gpu_check.json.

usage: gpu_check.py OUT_DIR
"""

import json
import pathlib
import statistics
import sys

# The contract's figures that a machine with a GPU must have.
GPU_FIELDS = ("gpu_utilization_percent", "gpu_utilization_max_percent", "gpu_memory_used_bytes",
              "gpu_memory_allocated_bytes", "gpu_memory_reserved_bytes", "gpu_power_watts", "energy_joules",
              "gpu_temperature_celsius")


def steps(folder: pathlib.Path) -> list[dict]:
    """The lines of metrics.jsonl that hold a training step."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "loss" in row]


def largest_difference(ours: list[dict], reference: list[dict], key: str) -> float:
    return max(abs(a[key] - b[key]) / abs(b[key]) for a, b in zip(ours, reference, strict=True))


def correctness(out: pathlib.Path, checks: list) -> None:
    if not (out / "cpu-f32" / "metrics.jsonl").exists():
        return
    reference = steps(out / "cpu-f32")
    # f32 sums in another order; bf16 rounds to 2^-9 and the curve drifts apart with the steps.
    for run, loss_tolerance, norm_tolerance in (("gpu-f32", 1e-3, 1e-2), ("gpu-bf16", 3e-2, 1.5e-1), ("tiled-bf16", 3e-2, 1.5e-1)):
        if not (out / run / "metrics.jsonl").exists():
            continue
        ours = steps(out / run)
        for key, tolerance in (("loss", loss_tolerance), ("grad_norm", norm_tolerance)):
            difference = largest_difference(ours, reference, key)
            checks.append((f"{run}: {key} of 8 steps against the CPU's f32", f"{difference:.2e}",
                           f"at most {tolerance:.1e}", difference <= tolerance))


def products(out: pathlib.Path, checks: list) -> None:
    for precision in ("f32", "bf16", "f16"):
        path = out / f"products-{precision}.json"
        if not path.exists():
            continue
        found = json.loads(path.read_text())
        total = found["sum_of_small"]
        checks.append((f"{precision}: 65,536 times 2^-8, added by a matrix product", f"{total:g}", "256, as sums in f32 give", total == 256))
        for product in found["products"]:
            print(f"{precision}  {product['name']:<20} {product['m']} x {product['k']} x {product['n']}: {product['tflops']:.1f} TFLOP/s")


def offload(out: pathlib.Path, checks: list) -> None:
    if not (out / "offload" / "metrics.jsonl").exists():
        return
    ours, reference = steps(out / "offload"), steps(out / "kept")
    for key in ("loss", "grad_norm"):
        difference = largest_difference(ours, reference, key)
        # The same kernels on the same numbers; only sums that a GPU adds in an order of its own may differ.
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


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    out = pathlib.Path(sys.argv[1])
    checks: list[tuple[str, str, str, bool]] = []
    correctness(out, checks)
    products(out, checks)
    offload(out, checks)
    memory(out, checks)
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
