#!/usr/bin/env python3
"""Holds the kernel of draw.cu against the same draws by sorting, in float64.

usage: draw.py [--toolkit DIR] [--driver libcuda.so.1]

Tokens must be equal but where the times of two are so close that float32 decides, entropies within 1e-5. Rows with one NaN or an
infinity, and of -infinity alone, have no token. Exits 1 otherwise.
"""
import struct
import sys

import numpy as np

import device as cuda

NONE, TEXTS, ALL = 2**32 - 1, 64, (1.0, 0, 1.0, 0.0)
# Logits of a row, columns beside them, the size of the logits, and of each row temperature, top-k, top-p, min-p.
CASES = [
    (1000, 0, 3.0, [ALL, (0.0, 0, 1.0, 0.0), (0.7, 5, 1.0, 0.0), (1.3, 0, 0.9, 0.0), (1.0, 0, 1.0, 0.05), (0.9, 40, 0.8, 0.02)]),
    (5, 3, 1.0, [ALL, (1.0, 1, 1.0, 0.0), (1.0, 9, 0.5, 0.0), (1.0, 0, 0.999999, 1.0)]),
    (1, 0, 1.0, [ALL]),
    (49152, 0, 2.0, [ALL, (0.6, 20, 0.95, 0.0), (1.5, 0, 0.99, 0.0)]),
    (151937, 7, 0.01, [ALL, (1.0, 50000, 1.0, 0.0), (1.0, 0, 0.3, 0.0)]),
    # Many equal logits, of which all stay that are as likely as the last; more rows than threads of a warp.
    (3000, 0, -4.0, [(1.0, k, 1.0, 0.0) for k in (1, 2, 7, 100, 2999)] + [(0.5, 0, p, 0.0) for p in (0.1, 0.5, 0.9)] + [ALL] * 40),
]


def hashes(keys: int, count: int) -> np.ndarray:
    h = np.arange(count, dtype=np.uint32) * np.uint32(0x9E3779B9) ^ np.uint32(keys & 0xFFFFFFFF)
    h = (h ^ h >> np.uint32(16)) * np.uint32(0x7FEB352D)
    h = (h ^ np.uint32(keys >> 32) ^ h >> np.uint32(15)) * np.uint32(0x846CA68B)
    return h ^ h >> np.uint32(16)


def expected(logits: np.ndarray, setting: tuple, keys: int) -> tuple[set[int], float]:
    """The tokens that may come, and the entropy."""
    temperature, top_k, top_p, min_p = setting
    if not np.isfinite(logits.max()):
        return {NONE}, np.nan
    if not temperature:
        return {int(logits.argmax())}, np.nan
    logs = (logits.astype(np.float64) - logits.max()) / temperature
    weights = np.exp(logs)
    share = weights / weights.sum()
    entropy = -(share * np.where(share > 0, np.log(np.maximum(share, 1e-300)), 0)).sum()
    kept = weights >= max(min_p, 2.0**-40)
    order = np.sort(logits)[::-1]
    last = order[min(top_k or len(order), len(order)) - 1]
    if top_p < 1:
        of = np.exp((order[order >= last].astype(np.float64) - logits.max()) / temperature)
        last = order[np.argmax(np.cumsum(of) >= top_p * of.sum() * (1 - 1e-12))]
    waits = -np.log1p(-(hashes(keys, len(logits)) + 0.5) / 2.0**32)
    times = np.where(kept & (logits >= last), waits / np.maximum(weights, 2.0**-40), np.inf)
    return set(np.flatnonzero(times <= times.min() * (1 + 1e-5)).tolist()), entropy


def check(device: cuda.Device, case: tuple, seed: int) -> list[str]:
    size, beside, scale, settings = case
    made = np.random.default_rng(seed)
    logits = made.standard_normal((len(settings), size + beside)).astype(np.float32) * np.float32(abs(scale))
    logits = np.round(logits) if scale < 0 else logits
    if len(settings) > 40:
        logits[10, 3], logits[11, 2999], logits[12], logits[13, 1::2] = np.nan, np.inf, -np.inf, -np.inf
    if size < logits.shape[1]:
        logits[:, size:] = np.nan
    keys = made.integers(0, 2**63, len(settings))
    table = b"".join(struct.pack("<QfIdfI", int(key), 1 / t if t else 0, k if k < size else 0, p, max(min_p, 2.0**-40), 0)
                     for key, (t, k, p, min_p) in zip(keys, settings))
    drawn = device.buffer(np.zeros((len(settings) + 1, 2), np.uint32))
    # From the second row of the tensors on.
    x = device.buffer(np.concatenate([np.full((1, size + beside), np.nan, np.float32), logits]))
    device.launch("draw", (len(settings),), 1024, 0, x, drawn, table + bytes(32 * TEXTS - len(table)), np.uint64(size + beside), 1, size)
    found, wrong, doubtful = drawn.read(), [], 0
    if found[0].any():
        wrong.append("another row was written")
    for row, (setting, (token, bits)) in enumerate(zip(settings, found[1:])):
        tokens, entropy = expected(logits[row, :size], setting, int(keys[row]))
        doubtful += len(tokens) > 1
        if int(token) not in tokens:
            wrong.append(f"row {row} with {setting}: {token}, expected {tokens}")
        off = abs(struct.unpack("<f", struct.pack("<I", bits))[0] - entropy)
        if off > 1e-5 * max(entropy, 1):
            wrong.append(f"row {row} with {setting}: the entropy is off by {off}")
    print(f"{len(settings)} x {size}: {len(settings) - len(wrong)} as expected, {doubtful} of them of tokens that come together", flush=True)
    device.free()
    return wrong


def main() -> None:
    device = cuda.Device(cuda.arguments(__doc__).parse_args(), "draw")
    wrong = [f"{case[:3]}: {what}" for seed, case in enumerate(CASES) for what in check(device, case, seed)]
    print("\n".join(wrong))
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
