#!/usr/bin/env python3
"""Holds the kernels of cached_attention.cu against attention in float64.

usage: cached_attention.py [--toolkit DIR] [--driver libcuda.so.1]

The largest difference of the output is held against half of the last bit of 16 of the largest value beside 1e-5 of it, that of the
log-sum-exp against 2e-6 of the largest score. Each text alone must have the bits that it has among all, caches those of the new
tokens and nothing else, and rows with NaN beside them stay. Exits 1 otherwise.
"""
import struct
import sys

import numpy as np

import device as cuda

CHUNK, QUERIES, TEXTS = 256, 8, 64
# Head size, heads, heads of keys and values, window (0: none), soft cap (0: none), columns beside the rows, and of each text its
# tokens so far, the new ones, and how many its cache has room for beside them.
CASES = [
    (64, 9, 3, 0, 0.0, 0, [(0, 1, 5), (254, 1, 1), (255, 1, 0), (256, 1, 0), (700, 3, 9), (3, 5, 0)]),
    (128, 7, 1, 0, 0.0, 8, [(40, 1, 0), (511, 2, 255)]),
    (96, 24, 2, 40, 30.0, 0, [(300, 1, 0), (20, 1, 0), (39, 2, 4), (255, 3, 0)]),
    (256, 2, 2, 0, 50.0, 24, [(257, 1, 7), (2, 1, 0)]),
    (80, 16, 1, 300, 0.0, 0, [(1000, 1, 24), (600, 2, 6)]),
    (8, 1, 1, 1, 0.0, 0, [(9, 1, 0)] * 64),
]


def expected(q: np.ndarray, keys: np.ndarray, values: np.ndarray, window: int, scale: float, cap: float) -> tuple:
    """Of one token with all that it may see: q: [heads, head], keys and values: [heads of keys, tokens, head]."""
    group = len(q) // len(keys)
    first = max(0, keys.shape[1] - window) if window else 0
    keys, values = (np.repeat(x[:, first:], group, 0) for x in (keys, values))
    scores = np.einsum("hd,htd->ht", q, keys) * scale
    scores = np.tanh(scores / cap) * cap if cap else scores
    largest = scores.max(1, keepdims=True)
    p = np.exp(scores - largest)
    return np.einsum("ht,htd->hd", p, values) / p.sum(1, keepdims=True), largest[:, 0] + np.log(p.sum(1)), np.abs(scores).max()


def run(device: cuda.Device, case: tuple, texts: list, q, kv, caches) -> tuple:
    head, heads, kv_heads, window, cap, beside, _ = case
    held = [[device.buffer(x) for x in caches[text]] for text, *_ in texts]
    rows = sum(new for *_, new, _ in texts)
    table, first = b"", 0
    for (_, before, new, _), (keys, values) in zip(texts, held):
        table += struct.pack("<QQIIq", keys.pointer.value, values.pointer.value, keys.shape[1], first, before)
        first += new
    table += bytes(32 * TEXTS - len(table))
    of = np.concatenate([np.arange(start, start + new) for start, new in
                         ((sum(n for _, n, _ in case[6][:text]), new) for text, _, new, _ in texts)])
    beside_rows = lambda x: np.pad(x[of], ((0, 0), (0, beside)), constant_values=0xFFFF)
    q, k, v = (device.buffer(beside_rows(x)) for x in (q, *kv))
    stride = lambda x: x.shape[1]
    columns = -(-kv_heads * head // 1024)
    device.launch("append_to_caches", (rows, columns), 128, 0, k, v, table, len(texts), 0, stride(k), stride(v), kv_heads, head)
    chunks = -(-max(before + new for _, before, new, _ in texts) // CHUNK)
    sums, ends = (device.buffer(np.full((rows, heads, chunks, n), np.nan, np.float32)) for n in (head, 2))
    o, lse = device.buffer(np.full((rows, heads * head), 0xFFFF, np.uint16)), device.buffer(np.full((rows, heads), np.nan, np.float32))
    blocks = kv_heads * -(-heads // kv_heads // QUERIES)
    # In two launches, the second from a later row on.
    half = rows // 2
    for start, count in ((0, half), (half, rows - half)):
        if count:
            device.launch("attend_to_chunks", (count, blocks, chunks), 128, 0, q, sums, ends, table, len(texts), start, stride(q), heads,
                          kv_heads, head, window, float(head) ** -0.5, cap)
            device.launch("join_chunks", (count, heads), 128, 0, sums, ends, o, lse, table, len(texts), start, heads, head, chunks, window)
    results = o.read(), lse.read(), [[x.read() for x in pair] for pair in held]
    device.free()
    return results


def check(device: cuda.Device, case: tuple, seed: int) -> list[str]:
    head, heads, kv_heads, window, cap, _, lengths = case
    made = np.random.default_rng(seed)
    bits = lambda *shape, size=1: cuda.to_half(made.standard_normal(shape) * size)
    rows = sum(new for _, new, _ in lengths)
    q, kv = bits(rows, heads * head, size=3), [bits(rows, kv_heads * head) for _ in range(2)]
    caches = [[bits(kv_heads, before + new + room, head) for _ in range(2)] for before, new, room in lengths]
    texts = [(text, *of) for text, of in enumerate(lengths)]
    o, lse, held = run(device, case, texts, q, kv, caches)
    wrong, row, worst = [], 0, [0.0, 0.0]
    value = lambda x: cuda.from_half(x).astype(np.float64)
    for text, before, new, _ in texts:
        for x, cache, after in zip(kv, caches[text], held[text]):
            cache[:, before:before + new] = x[row:row + new].reshape(new, kv_heads, head).swapaxes(0, 1)
            if cache.tobytes() != after.tobytes():
                wrong.append(f"text {text}: another cache")
        alone = run(device, case, [texts[text]], q, kv, caches)
        if any(a.tobytes() != b[row:row + new].tobytes() for a, b in zip(alone, (o, lse))):
            wrong.append(f"text {text}: other bits alone")
        for i in range(new):
            seen = [value(x[:, :before + i + 1]) for x in caches[text]]
            exact, ends, score = expected(value(q[row + i]).reshape(heads, head), *seen, window, float(head) ** -0.5, cap)
            found = value(o[row + i]).reshape(heads, head)
            share = np.abs(found - exact) / (cuda.half_bit(exact) + 1e-5 * np.abs(exact).max())
            worst = [max(worst[0], share.max()), max(worst[1], np.abs(lse[row + i] - ends).max() / (2e-6 * max(score, 1)))]
        row += new
    print(f"heads {heads} on {kv_heads} of {head}, window {window}, cap {cap:g}, {len(texts)} texts: largest share of what may be off: "
          f"o {worst[0]:.2f}, lse {worst[1]:.2f}")
    return wrong + (["off"] if not max(worst) <= 1 else [])


def main() -> None:
    device = cuda.Device(cuda.arguments(__doc__).parse_args(), "cached_attention")
    wrong = [f"{case}: {what}" for seed, case in enumerate(CASES) for what in check(device, case, seed)]
    print("\n".join(wrong))
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
