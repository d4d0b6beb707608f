#!/usr/bin/env python3
"""Holds the kernels of optimizer.cu against float64.

usage: optimizer.py [--toolkit DIR] [--driver libcuda.so.1]

The sum of squares may be off by one rounding of f32, 6e-8 of it. Of AdamW's results, after three steps, an element may be off by
a few roundings of f32 (6e-8) of the sizes of the terms that it is the sum of: 4e-7. Moments in codes of eight bits are compared after one
step: scales likewise, and codes with the nearest ones, of which those of numbers in the middle of two may be the other. A bit that differs in a second run is a
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


def steps(device: cuda.Device, state: list[list[np.ndarray]], gradients: list[list[np.ndarray]],
          factor: float | None = None) -> list[list[np.ndarray]]:
    """The state after all steps; with `factor`, that is where the kernel reads it, and SCALE is not to be used."""
    scale = [SCALE, np.uint64(0)] if factor is None else [1e9, device.buffer(np.full(1, factor, np.float32))]
    held = [[device.buffer(x) for x in matrix] for matrix in state]
    for step, of_step in enumerate(gradients, 1):
        entries = [(p, device.buffer(g), m, v, p.shape[0]) for (p, m, v), g in zip(held, of_step)]
        corrections = [1 - beta**step for beta in BETAS]
        device.launch("adamw", (BLOCKS, len(entries)), 256, 0, table(entries, 100), 1 - RATE * DECAY, 1 - BETAS[0], BETAS[1], 1 - BETAS[1],
                      RATE / corrections[0], corrections[1]**-0.5, EPS, *scale)
    results = [[x.read() for x in matrix] for matrix in held]
    device.free()
    return results


def factor_of(device: cuda.Device, losses: list[float], squares: float, max_norm: float, count: float) -> np.float32:
    out = device.buffer(np.zeros(1, np.float32))
    device.launch("grad_factor", (1,), 256, 0, device.buffer(np.float32([*losses, squares])), out, len(losses), np.float64(max_norm),
                  np.float64(count))
    result = out.read()[0]
    device.free()
    return result


def check_factors(device: cuda.Device) -> list[str]:
    """Factors that clip as PyTorch does, and none where a number is not finite."""
    wrong = []
    for losses, squares, max_norm, count in [([2.5], 9.0, 1.0, 2.0), ([2.5, 1.0], 9.0, 1.0, 3000.0), ([0.0], 0.0, 1.0, 7.0), ([1.0], 1e20, 0.0, 3.0)]:
        norm = np.sqrt(np.float64(np.float32(squares))) / count
        expected = np.float32((min(max_norm / (norm + 1e-6), 1.0) if max_norm > 0 else 1.0) / count)
        found = factor_of(device, losses, squares, max_norm, count)
        if found != expected:
            wrong.append(f"factor of {losses}, {squares}: {found}, not {expected}")
    many = np.linspace(0, 9, 3001)
    if factor_of(device, many, 9.0, 1.0, 3001.0) != np.float32(1 / 3001):
        wrong.append("another factor of many")
    of_others = [(np.where(np.arange(3001) == i, x, many), 1.0) for i, x in [(0, np.nan), (255, np.inf), (1700, np.nan), (3000, -np.inf)]]
    for losses, squares in [*of_others, ([1.0], np.inf), ([1.0], np.nan)]:
        if not np.isnan(factor_of(device, losses, squares, 1.0, 2.0)):
            wrong.append(f"a factor of {losses}, {squares}")
    if np.isfinite(factor_of(device, [1.0], 1.0, 0.0, 0.0)):
        wrong.append("a factor of a count of none")
    return wrong


def joined(device: cuda.Device, parts: list[np.ndarray]) -> np.ndarray:
    firsts = np.cumsum([0] + [len(x) for x in parts])
    out = device.buffer(np.full(firsts[-1], np.nan, np.float32))
    for i in range(0, len(parts), 4):
        entries = [(device.buffer(x), len(x), int(first)) for x, first in zip(parts[i:i + 4], firsts[i:])]
        device.launch("join", (BLOCKS, len(entries)), 256, 0, table(entries, 160), out)
    result = out.read()
    device.free()
    return result


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


def dynamic_table(is_signed: bool) -> np.ndarray:
    """The numbers of codes with a dynamic exponent, ascending."""
    numbers = [0.0, 1.0]
    for exponent in range(7):
        ends = np.linspace(0.1, 1, (1 if is_signed else 2) * 2**exponent + 1)
        middles = 10.0**(exponent - 6) * (ends[1:] + ends[:-1]) / 2
        numbers += [*middles, *(-middles if is_signed else [])]
    return np.sort(np.float32(numbers))


def check_codes(device: cuda.Device, made: np.random.Generator, size: int) -> list[str]:
    """One step of moments in codes."""
    blocks = -(-size // 256)
    tables = [dynamic_table(True), dynamic_table(False)]
    parameter, gradient = made.standard_normal(size).astype(np.float32), made.standard_normal(size).astype(np.float32)
    gradient[:300] = 0
    codes = [made.integers(0, 256, size).astype(np.uint8) for _ in range(2)]
    scales = [made.uniform(0, 1, blocks).astype(np.float32) for _ in range(2)]
    codes[0][:256], codes[1][:256] = np.flatnonzero(tables[0] == 0)[0], 0   # a block of zeros
    moments = [t[c].astype(np.float64) * np.repeat(s, 256)[:size] for t, c, s in zip(tables, codes, scales)]
    expected = reference_step(parameter, gradient, *moments)
    results = []
    for factor in (None, SCALE, np.nan):
        scale = [SCALE, np.uint64(0)] if factor is None else [1e9, device.buffer(np.full(1, factor, np.float32))]
        held = [device.buffer(x) for x in (parameter, gradient, *codes, *scales)]
        device.launch("adamw_8bit", (min(blocks, 3),), 256, 0, *held, np.concatenate(tables).tobytes(), np.uint64(size), 1 - RATE * DECAY,
                      1 - BETAS[0], BETAS[1], 1 - BETAS[1], RATE / (1 - BETAS[0]), (1 - BETAS[1])**-0.5, EPS, *scale)
        results.append([held[i].read() for i in (0, 2, 3, 4, 5)])
        device.free()
    found, wrong = results[0], []
    if any(a.tobytes() != b.tobytes() for a, b in zip(results[2], (parameter, *codes, *scales))):
        wrong.append("codes: a factor that is none changes something")
    if any(a.tobytes() != b.tobytes() for a, b in zip(*results[:2])):
        wrong.append("codes: a second run differs")
    error = float(np.abs(found[0] - expected[0]).max())
    padded = [np.pad(np.abs(x), (0, blocks * 256 - size)).reshape(blocks, 256).max(1) for x in expected[1:]]
    wanted = [np.where(x == 0, 1, x) for x in padded]
    of_scales = max(float(np.abs(a / b - 1).max()) for a, b in zip(found[3:], wanted))
    others = 0
    for t, c, x, s in zip(tables, found[1:3], expected[1:], wanted):
        scaled = x / np.repeat(s, 256)[:size]
        middles = (t[1:].astype(np.float64) + t[:-1]) / 2
        nearest, distance = np.searchsorted(middles, scaled), np.abs(scaled[:, None] - middles).min(1)
        is_other = c != nearest
        others += int(is_other.sum())
        if (np.abs(c.astype(int) - nearest)[is_other] > 1).any() or (distance[is_other] > 1e-6 * np.maximum(np.abs(scaled[is_other]), 1e-6)).any():
            wrong.append("codes: not the nearest")
    print(f"AdamW of codes, {size}: parameters off by {error:.1e}, scales by {of_scales:.1e}, {others} codes others")
    if not error <= 1e-5 or not of_scales <= 1e-6 or others > size // 100:
        wrong.append("codes: off")
    return wrong


def reference_step(parameter: np.ndarray, gradient: np.ndarray, m: np.ndarray, v: np.ndarray) -> list[np.ndarray]:
    gradient = gradient.astype(np.float64) * SCALE
    m, v = m * BETAS[0] + gradient * (1 - BETAS[0]), v * BETAS[1] + gradient**2 * (1 - BETAS[1])
    update = RATE * m / (1 - BETAS[0]) / (np.sqrt(v / (1 - BETAS[1])) + EPS)
    return [parameter * (1 - RATE * DECAY) - update, m, v]


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

    if joined(device, gradients[0]).tobytes() != np.concatenate(gradients[0]).tobytes():
        wrong.append("joined: other numbers")
    state = [[normal(size), normal(size) / 10, normal(size)**2] for size in SIZES]
    found, again = steps(device, state, gradients), steps(device, state, gradients, SCALE)
    left = steps(device, state, gradients, np.nan)
    if any(x.tobytes() != y.tobytes() for xs, ys in zip(left, state) for x, y in zip(xs, ys)):
        wrong.append("a factor that is none changes something")
    wrong += check_factors(device)
    worst = dict.fromkeys(("parameter", "m", "v"), 0.0)
    for i, size in enumerate(SIZES):
        for name, x, same, (value, terms) in zip(worst, found[i], again[i], reference(state[i], [of_step[i] for of_step in gradients])):
            share = (np.abs(x - value) / (4e-7 * terms)).max()
            worst[name] = max(worst[name], share)
            if not share <= 1 or x.tobytes() != same.tobytes():
                wrong.append(f"{name} of {size}: {share:.2f} of what may be")
    print("AdamW, largest share of what may be off: " + ", ".join(f"{name} {share:.2f}" for name, share in worst.items()))
    for size in (300, 5 * 256, 1111):
        wrong += check_codes(device, made, size)
    for text in wrong:
        print(f"FAIL {text}")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
