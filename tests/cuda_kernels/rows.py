#!/usr/bin/env python3
"""Holds the kernels of bias.cu, norm.cu, rotary.cu and swiglu.cu against float64.

usage: rows.py [--toolkit DIR] [--driver libcuda.so.1]

What has 16 bits may be off by half of its last bit, and by 1e-6 of the sum of its terms' sizes, roundings of f32 (of swiglu 4e-6: the
exponential's argument is rounded); rstd by 1e-6. A bit that differs in a second run, that changes beside the rows, or in the
normed input from the forward's, is a failure, too. Exits 1 then.
"""
import sys

import numpy as np

import device as cuda

# Tokens, heads, width, columns beside the rows, whether there is a residual.
NORMS = [(3, 1, 8, 0, True), (5, 1, 576, 8, True), (2, 1, 4096, 0, True), (3, 1, 8200, 16, False), (7, 5, 128, 64, False),
         (9, 1, 512, 0, True), (4, 3, 72, 8, True)]
# Tokens, heads, head size, pairs that turn, whether they are neighbours, columns beside the rows.
ROTARIES = [(5, 1, 16, 8, 0, 0), (7, 9, 64, 32, 0, 24), (3, 4, 96, 48, 0, 0), (6, 40, 128, 64, 0, 8), (2, 3, 256, 128, 0, 0),
            (65537, 1, 16, 8, 0, 0), (5, 6, 256, 32, 0, 8), (4, 3, 128, 48, 0, 0), (7, 5, 64, 16, 1, 16), (3, 40, 128, 64, 1, 0)]
# Tokens, heads of q and of k, head size, columns beside the rows.
HEADS = [(7, 4, 2, 64, 64), (5, 3, 1, 80, 24), (3, 2, 2, 96, 0), (6, 32, 8, 128, 8), (2, 3, 1, 256, 16), (70000, 1, 1, 16, 0),
         (4, 2, 1, 32, 8), (3, 5, 0, 144, 8)]
# Tokens, widths, columns beside the rows.
BIASES = [(3, (8,), 8), (5, (1000, 64, 64), 0), (2, (24, 8), 16)]
# Tokens, width, columns beside the rows.
SWIGLUS = [(3, 8, 0), (5, 1032, 16), (2, 4096, 8)]
EPS = 1e-5


def share(x: np.ndarray, value: np.ndarray, size: np.ndarray) -> float:
    """Largest share of what the bits of 16 may be off."""
    return float((np.abs(cuda.from_half(x) - value) / (cuda.half_bit(value) + 1e-6 * size)).max())


class Rows:
    """Numbers in rows with NaN beside them."""

    def __init__(self, made: np.random.Generator | None, tokens: int, width: int, beside: int):
        self.bits, self.width = np.full((tokens, width + beside), 0xFFFF, np.uint16), width
        if made:
            self.bits[:, :width] = cuda.to_half(made.standard_normal((tokens, width)) * 2)
        self.values = cuda.from_half(self.bits[:, :width]).astype(np.float64)


def check_norm(device: cuda.Device, case: tuple, seed: int) -> list[str]:
    tokens, heads, width, beside, has_residual = case
    made = np.random.default_rng(seed)
    x, dy, residual = (Rows(made, tokens, heads * width, beside + 8 * i) for i in range(3))
    weight = made.standard_normal(width).astype(np.float32)
    rows, stride = tokens * heads, lambda x: x.shape[1]

    def run(name: str, rows_of_block: int) -> list[np.ndarray]:
        grid = (-(-rows // rows_of_block),)
        empty = lambda: device.buffer(Rows(None, tokens, heads * width, beside).bits)
        held, w = [device.buffer(r.bits) for r in (x, dy, residual)], device.buffer(weight)
        rstd = device.buffer(np.full(rows, np.nan, np.float32))
        y, again, dx = empty(), empty(), held[2] if has_residual else held[1]
        device.launch(f"rms_norm_{name}", grid, 256, 0, held[0], w, y, rstd, stride(held[0]), stride(y), rows, width, heads, EPS)
        device.launch(f"rms_norm_backward_{name}", grid, 256, 0, held[1], held[0], w, rstd, held[2] if has_residual else np.uint64(0),
                      dx, again, *map(stride, (held[1], held[0], held[2], dx, again)), rows, width, heads)
        results = [b.read() for b in (y, rstd, dx, again)]
        device.free()
        return results

    split = lambda x: x.reshape(tokens, heads, width)
    xs, dys = split(x.values), split(dy.values)
    rstd = 1 / np.sqrt((xs**2).mean(2, keepdims=True) + np.float64(np.float32(EPS)))
    y = xs * rstd * weight
    mean = (dys * weight * xs * rstd).mean(2, keepdims=True)
    sizes = (np.abs(dys * weight) + np.abs(xs * rstd) * np.abs(dys * weight * xs * rstd).mean(2, keepdims=True)) * rstd
    dx = (dys * weight - xs * rstd * mean) * rstd
    flat = lambda x: x.reshape(tokens, -1)
    dx, sizes = (flat(dx) + residual.values, flat(sizes) + np.abs(residual.values)) if has_residual else (flat(dx), flat(sizes))
    wrong = []
    for name, rows_of_block in (("wide", 1), ("narrow", 8)):
        found, again = run(name, rows_of_block), run(name, rows_of_block)
        shares = [share(found[0][:, :heads * width], flat(y), flat(np.abs(y))), float(np.abs(found[1] / rstd.ravel() - 1).max() / 1e-6),
                  share(found[2][:, :heads * width], dx, sizes)]
        told = ", ".join(f"{what} {of:.2f}" for what, of in zip(("y", "rstd", "dx"), shares))
        print(f"norm {name}, {tokens} x {heads} x {width}: largest share of what may be off: {told}")
        if not max(shares) <= 1:
            wrong.append(f"{name}: off")
        if any(a.tobytes() != b.tobytes() for a, b in zip(found, again)):
            wrong.append(f"{name}: a second run differs")
        if found[3].tobytes() != found[0].tobytes():
            wrong.append(f"{name}: the normed input differs from the forward's")
        if any((x[:, heads * width:] != 0xFFFF).any() for x in (found[0], found[2])):
            wrong.append(f"{name}: written beside the rows")
    return wrong


def angles(made: np.random.Generator, tokens: int, head: int) -> tuple[np.ndarray, ...]:
    """Cosines and sines of positions, and the tokens' positions."""
    of = np.arange(50)[:, None] / 10000.0**(np.arange(head // 2) / (head // 2))
    return np.cos(of).astype(np.float32), np.sin(of).astype(np.float32), made.integers(0, 50, tokens).astype(np.int32)


def turned(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """x, [tokens, heads, head size], by a token's angles, and the sum of the terms' sizes."""
    low, high = np.split(x, 2, 2)
    c, s = cos[:, None].astype(np.float64), sin[:, None].astype(np.float64)
    joined = lambda low, high: np.concatenate([low, high], 2)
    return (joined(low * c - high * s, high * c + low * s),
            joined(np.abs(low * c) + np.abs(high * s), np.abs(high * c) + np.abs(low * s)))


def check_rotary(device: cuda.Device, case: tuple, seed: int) -> list[str]:
    tokens, heads, head, half, neighbours, beside = case
    made = np.random.default_rng(seed)
    x, (cos, sin, positions) = Rows(made, tokens, heads * head, beside), angles(made, tokens, 2 * half)
    wrong = []
    for inverse in (0, 1):
        results = []
        for _ in range(2):
            held = device.buffer(x.bits)
            device.launch("rotary", (tokens, -(-heads * half // 1024)), 128, 0, held, *map(device.buffer, (cos, sin, positions)),
                          x.bits.shape[1], heads, head, half, neighbours, inverse)
            results.append(held.read())
            device.free()
        all_of, kept = np.split(x.values.reshape(tokens, heads, head), [2 * half], 2)
        order = np.arange(2 * half).reshape(half, 2).T.ravel() if neighbours else np.arange(2 * half)
        value, size = turned(all_of[..., order], cos[positions], -sin[positions] if inverse else sin[positions])
        back = np.argsort(order)
        value, size = (np.concatenate([of[..., back], rest], 2) for of, rest in ((value, kept), (size, np.abs(kept))))
        worst = share(results[0][:, :heads * head], value.reshape(tokens, -1), size.reshape(tokens, -1))
        print(f"rotary, {tokens} x {heads} x {head}{' back' * inverse}: largest share of what may be off {worst:.2f}")
        if not worst <= 1:
            wrong.append("off")
        if results[0].tobytes() != results[1].tobytes():
            wrong.append("a second run differs")
        if (results[0][:, heads * head:] != 0xFFFF).any():
            wrong.append("written beside the rows")
    return wrong


def check_heads(device: cuda.Device, case: tuple, seed: int) -> list[str]:
    """The norm of heads with the rotary embedding."""
    tokens, *of_each, head, beside = case
    made, heads, eps = np.random.default_rng(seed), sum(of_each), 0.125
    width = heads * head
    x, dy = (Rows(made, tokens, width, beside + 8 * i) for i in range(2))
    (cos, sin, positions), weights = angles(made, tokens, head), made.standard_normal((2, head)).astype(np.float32)
    grid = (-(-tokens * heads * 2**int(np.ceil(np.log2(head // 16))) // 128),)

    def run(is_in_place: bool) -> list[np.ndarray]:
        held, gradient, wq, wk = map(device.buffer, (x.bits, dy.bits, *weights))
        turn = [device.buffer(of) for of in (cos, sin, positions)]
        y = device.buffer(x.bits if is_in_place else Rows(None, tokens, width, beside + 16).bits)
        dx = gradient if is_in_place else device.buffer(Rows(None, tokens, width, beside + 24).bits)
        device.launch("head_norm_rotary", grid, 128, 0, y if is_in_place else held, wq, wk, *turn, y, held.shape[1], y.shape[1],
                      tokens, *of_each, head, eps)
        device.launch("head_norm_rotary_backward", grid, 128, 0, gradient, held, wq, wk, *turn, dx, gradient.shape[1],
                      held.shape[1], dx.shape[1], tokens, *of_each, head, eps)
        results = [b.read() for b in (y, dx)]
        device.free()
        return results

    split = lambda x: x.reshape(tokens, heads, head)
    flat = lambda x: x.reshape(tokens, -1)
    xs, weight = split(x.values), np.repeat(weights, of_each, 0).astype(np.float64)
    rstd = 1 / np.sqrt((xs**2).mean(2, keepdims=True) + eps)
    y, size_of_y = turned(xs * rstd * weight, cos[positions], sin[positions])
    back, size = turned(split(dy.values), cos[positions], -sin[positions])
    back, size = back * weight, size * np.abs(weight)
    mean = lambda x: x.mean(2, keepdims=True)
    dx = (back - xs * rstd * mean(back * xs * rstd)) * rstd
    size_of_dx = (size + np.abs(xs * rstd) * mean(size * np.abs(xs * rstd))) * rstd
    found, again = run(False), run(True)
    shares = [share(found[0][:, :width], flat(y), flat(size_of_y)), share(found[1][:, :width], flat(dx), flat(size_of_dx))]
    told = ", ".join(f"{what} {of:.2f}" for what, of in zip(("y", "dx"), shares))
    print(f"norm of heads and rotary, {tokens} x {of_each} x {head}: largest share of what may be off: {told}")
    wrong = ["off"] if not max(shares) <= 1 else []
    if any(a[:, :width].tobytes() != b[:, :width].tobytes() for a, b in zip(found, again)):
        wrong.append("a second run, in place, differs")
    if any((x[:, width:] != 0xFFFF).any() for x in (*found, *again)):
        wrong.append("written beside the rows")
    return wrong


def check_gate(device: cuda.Device, case: tuple, seed: int) -> list[str]:
    *case, name = case
    tokens, width, beside = case
    made = np.random.default_rng(seed)
    gate, up, dh = (Rows(made, tokens, width, beside + 8 * i) for i in range(3))
    gate.bits[:, :2] = cuda.to_half([[90, -90]])
    gate.values[:, :2] = 90, -90

    def run() -> list[np.ndarray]:
        grid = (tokens, -(-width // 1024))
        g, u, d = (device.buffer(r.bits) for r in (gate, up, dh))
        h = device.buffer(Rows(None, tokens, width, beside).bits)
        strides = [x.shape[1] for x in (d, g, u)]
        device.launch(name, grid, 128, 0, g, u, h, *strides[1:], h.shape[1], width)
        device.launch(f"{name}_backward", grid, 128, 0, d, g, u, g, u, d, *strides, *strides[1:], strides[0], width)
        results = [b.read() for b in (h, g, u, d)]
        device.free()
        return results

    found, again = run(), run()
    x, scale, cube = gate.values, *((np.sqrt(8 / np.pi), 0.044715) if name == "geglu" else (1, 0))
    sigmoid = 1 / (1 + np.exp(np.minimum(-scale * (x + cube * x**3), 700)))
    steep = np.abs(x * scale * (1 + 3 * cube * x**2)) * sigmoid * (1 - sigmoid)
    slope = sigmoid + np.sign(x) * steep
    expected = [gate.values * sigmoid * up.values, dh.values * up.values * slope, dh.values * gate.values * sigmoid]
    sizes = [np.abs(x) for x in expected]
    sizes[1] = np.abs(dh.values * up.values) * (sigmoid + steep)
    # Of -90 the sigmoid is less than what f32 has.
    shares = [share(x[:, :width], value, 4 * size + 1e-29) for x, value, size in zip(found, expected, sizes)]
    told = ", ".join(f"{what} {of:.2f}" for what, of in zip(("h", "dgate", "dup"), shares))
    print(f"{name}, {tokens} x {width}: largest share of what may be off: {told}")
    wrong = ["off"] if not max(shares) <= 1 else []
    if any(a.tobytes() != b.tobytes() for a, b in zip(found, again)):
        wrong.append("a second run differs")
    if found[3][:, :width].tobytes() != found[0][:, :width].tobytes():
        wrong.append("h differs from the forward's")
    if any((x[:, width:] != 0xFFFF).any() for x in found):
        wrong.append("written beside the rows")
    return wrong


def check_bias(device: cuda.Device, case: tuple, seed: int) -> list[str]:
    tokens, widths, beside = case
    made, width = np.random.default_rng(seed), sum(widths)
    y, biases = Rows(made, tokens, width, beside), [made.standard_normal(width).astype(np.float32) for width in widths]
    held, absent = device.buffer(y.bits), 3 - len(widths)
    device.launch("add_bias", (tokens, -(-width // 1024)), 128, 0, held, *map(device.buffer, biases), *[np.uint64(0)] * absent,
                  held.shape[1], *widths, *[0] * absent)
    found = held.read()
    device.free()
    expected = cuda.to_half(y.values.astype(np.float32) + np.concatenate(biases))
    wrong = [] if (found[:, :width] == expected).all() else ["off"]
    print(f"bias, {tokens} x {widths}: {'wrong' if wrong else 'equal'}")
    return wrong + ["written beside the rows"] * bool((found[:, width:] != 0xFFFF).any())


def main() -> None:
    options = cuda.arguments(__doc__).parse_args()
    failures = 0
    for module, check, cases in (("bias", check_bias, BIASES), ("norm", check_norm, NORMS), ("rotary", check_rotary, ROTARIES), ("rotary", check_heads, HEADS),
                                 ("swiglu", check_gate, [(*case, name) for case in SWIGLUS for name in ("swiglu", "geglu")])):
        device = cuda.Device(options, module)
        for seed, case in enumerate(cases):
            for text in check(device, case, seed):
                failures += 1
                print(f"FAIL {module} {case}: {text}", flush=True)
    sys.exit(failures > 0)


if __name__ == "__main__":
    main()
