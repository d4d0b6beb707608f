#!/usr/bin/env python3
"""Holds the kernels of optimizer.cu against float64.

usage: optimizer.py [--toolkit DIR] [--driver libcuda.so.1]

The sum of squares may be off by one rounding of f32, 6e-8 of it. Of AdamW's results, after three steps, an element may be off by
a few roundings of f32 (6e-8) of the sizes of the terms that it is the sum of: 4e-7. A bit that differs in a second run is a
failure, too. Exits 1 then.
"""
import struct
import sys

import numpy as np

import device as cuda

SIZES = [1, 3, 4, 5, 1023, 4096, 16384, 16385, 70001, 8]
BLOCKS = 16
STEPS, RATE, BETAS, EPS, DECAY, SCALE = 3, 1e-2, (0.9, 0.999), 1e-8, 0.1, 0.5


def table(entries: list, num_entries: int) -> bytes:
    """Pointers and a size each, as many as the parameter holds."""
    held = [struct.pack(f"<{len(entry)}q", *[x.pointer.value if isinstance(x, cuda.Buffer) else x for x in entry]) for entry in entries]
    return b"".join(held).ljust(num_entries * len(held[0]), b"\xff")


def norm(device: cuda.Device, gradients: list[np.ndarray], per_launch: int) -> np.ndarray:
    buffers = [device.buffer(x) for x in gradients]
    sums, out = device.buffer(np.full(BLOCKS * len(buffers), np.nan)), device.buffer(np.full(1, np.nan, np.float32))
    for first in range(0, len(buffers), per_launch):
        part = buffers[first:first + per_launch]
        device.launch("sum_of_squares", (BLOCKS, len(part)), 256, 0, table([(x, x.shape[0]) for x in part], 240),
                      np.uint64(sums.pointer.value + 8 * BLOCKS * first))
    device.launch("sum_of_sums", (1,), 256, 0, sums, out, BLOCKS * len(buffers))
    result = out.read()
    device.free()
    return result


def steps(device: cuda.Device, state: list[list[np.ndarray]], gradients: list[list[np.ndarray]]) -> list[list[np.ndarray]]:
    held = [[device.buffer(x) for x in matrix] for matrix in state]
    for step, of_step in enumerate(gradients, 1):
        entries = [(p, device.buffer(g), m, v, p.shape[0]) for (p, m, v), g in zip(held, of_step)]
        corrections = [1 - beta**step for beta in BETAS]
        device.launch("adamw", (BLOCKS, len(entries)), 256, 0, table(entries, 100), 1 - RATE * DECAY, 1 - BETAS[0], BETAS[1], 1 - BETAS[1],
                      RATE / corrections[0], corrections[1]**-0.5, EPS, SCALE)
    results = [[x.read() for x in matrix] for matrix in held]
    device.free()
    return results


def reference(state: list[np.ndarray], gradients: list[np.ndarray]) -> list[tuple[np.ndarray, np.ndarray]]:
    """The state after all steps in float64, and the sum of its terms' sizes."""
    parameter, m, v = (x.astype(np.float64) for x in state)
    sizes = [np.abs(x) for x in (parameter, m, v)]
    for step, gradient in enumerate(gradients, 1):
        gradient = gradient.astype(np.float64) * SCALE
        m = m * BETAS[0] + gradient * (1 - BETAS[0])
        v = v * BETAS[1] + gradient**2 * (1 - BETAS[1])
        update = RATE * m / (1 - BETAS[0]**step) / (np.sqrt(v / (1 - BETAS[1]**step)) + EPS)
        parameter = parameter * (1 - RATE * DECAY) - update
        # (gradient - m) is rounded before it is made smaller.
        sizes[1] = sizes[1] * BETAS[0] + np.abs(gradient) * (1 - BETAS[0])
        sizes[2] = v
        sizes[0] = sizes[0] + np.abs(update) + RATE * sizes[1] / (1 - BETAS[0]**step) / (np.sqrt(v / (1 - BETAS[1]**step)) + EPS)
    return list(zip((parameter, m, v), sizes))


def main() -> None:
    device = cuda.Device(cuda.arguments(__doc__).parse_args(), "optimizer")
    made = np.random.default_rng(0)
    normal = lambda size: made.standard_normal(size).astype(np.float32)
    gradients = [[normal(size) * 10.0**made.integers(-3, 3) for size in SIZES] for _ in range(STEPS)]
    gradients = [[x.astype(np.float32) for x in of_step] for of_step in gradients]
    wrong = []

    exact = sum((x.astype(np.float64)**2).sum() for x in gradients[0])
    found = [norm(device, gradients[0], per_launch) for per_launch in (240, 3, 240)]
    error = abs(float(found[0][0]) / exact - 1)
    print(f"sum of squares: {error:.1e}")
    if error > 6e-8 or len({x.tobytes() for x in found}) > 1:
        wrong.append(f"sum of squares: {found}, {exact}")

    state = [[normal(size), normal(size) / 10, normal(size)**2] for size in SIZES]
    found, again = steps(device, state, gradients), steps(device, state, gradients)
    worst = dict.fromkeys(("parameter", "m", "v"), 0.0)
    for i, size in enumerate(SIZES):
        for name, x, same, (value, terms) in zip(worst, found[i], again[i], reference(state[i], [of_step[i] for of_step in gradients])):
            share = (np.abs(x - value) / (4e-7 * terms)).max()
            worst[name] = max(worst[name], share)
            if not share <= 1 or x.tobytes() != same.tobytes():
                wrong.append(f"{name} of {size}: {share:.2f} of what may be")
    print("AdamW, largest share of what may be off: " + ", ".join(f"{name} {share:.2f}" for name, share in worst.items()))
    for text in wrong:
        print(f"FAIL {text}")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
