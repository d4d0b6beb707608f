#!/usr/bin/env python3
"""Holds the kernel of cross_entropy.cu against float64.

usage: cross_entropy.py [--toolkit DIR] [--driver libcuda.so.1]

A loss may be off by 1e-6 of 1 and the size of its terms: roundings of f32, and the approximate exponential (2^-22) of terms of
one sum. An element of the gradient may be off by half of its last bit and 2e-6 of it. A bit that differs in a second run, that
changes beside the rows, or in logits whose gradient is not asked for, is a failure, too. Exits 1 then.
"""
import sys

import numpy as np

import device as cuda

# Rows, vocabulary, columns beside the rows, size of the logits.
CASES = [(3, 8, 0, 1), (4, 1, 2, 1), (5, 37, 0, 3), (3, 1000, 24, 10), (2, 32001, 0, 5), (3, 50257, 6, 30), (2, 128256, 0, 4),
         (2, 262144, 8, 4)]


def run(device: cuda.Device, logits: np.ndarray, vocab: int, targets: np.ndarray, has_grad: int) -> tuple[np.ndarray, np.ndarray]:
    x, losses = device.buffer(logits), device.buffer(np.full(len(logits), np.nan, np.float32))
    device.launch("cross_entropy", (len(logits),), 1024, 0, x, device.buffer(targets), losses, np.uint64(logits.shape[1]), vocab,
                  0.3, has_grad)
    results = losses.read(), x.read()
    device.free()
    return results


def check(device: cuda.Device, case: tuple, seed: int) -> list[str]:
    rows, vocab, beside, size = case
    made = np.random.default_rng(seed)
    logits = np.full((rows, vocab + beside), 0xFFFF, np.uint16)
    logits[:, :vocab] = cuda.to_half(made.standard_normal((rows, vocab)) * size)
    if vocab > 30:
        # Logits that are masked; a row of which all but one are, whatever thread has them.
        logits[0, 3:20] = cuda.to_half(-np.inf)
        logits[1, :vocab] = cuda.to_half(-np.inf)
    targets = made.integers(0, vocab, rows).astype(np.int32)
    targets[0], targets[-1] = 0, vocab - 1
    if vocab > 30:
        logits[1, targets[1]] = cuda.to_half(2)

    losses, grad = run(device, logits, vocab, targets, 1)
    again, only = run(device, logits, vocab, targets, 1), run(device, logits, vocab, targets, 0)
    wrong = []
    if losses.tobytes() != again[0].tobytes() or grad.tobytes() != again[1].tobytes():
        wrong.append("a second run differs")
    if losses.tobytes() != only[0].tobytes() or only[1].tobytes() != logits.tobytes():
        wrong.append("without the gradient it differs")
    if (grad[:, vocab:] != 0xFFFF).any():
        wrong.append("written beside the rows")
    x = cuda.from_half(logits[:, :vocab]).astype(np.float64)
    largest, at = x.max(1), np.arange(rows)
    sums = np.exp(x - largest[:, None]).sum(1)
    expected = largest + np.log(sums) - x[at, targets]
    of_loss = np.abs(losses - expected) / (1e-6 * (1 + np.abs(largest) + np.abs(x[at, targets]).clip(max=1e6)))
    p = np.exp(x - largest[:, None]) / sums[:, None]
    p[at, targets] -= 1
    p *= np.float64(np.float32(0.3))
    # What is below the smallest normal bf16 is flushed to zero.
    of_grad = np.abs(cuda.from_half(grad[:, :vocab]) - p) / (cuda.half_bit(p) + 2e-6 * np.abs(p) + 1.2e-38)
    print(f"{rows} x {vocab:6}: largest share of what may be off: loss {of_loss.max():.2f}, gradient {of_grad.max():.2f}", flush=True)
    if not of_loss.max() <= 1:
        wrong.append(f"losses {losses}, expected {expected}")
    if not of_grad.max() <= 1:
        wrong.append(f"{(~(of_grad <= 1)).sum()} of the gradient's {p.size} elements are off")
    return wrong


def main() -> None:
    device = cuda.Device(cuda.arguments(__doc__).parse_args(), "cross_entropy")
    failures = 0
    for seed, case in enumerate(CASES):
        for text in check(device, case, seed):
            failures += 1
            print(f"FAIL {case}: {text}", flush=True)
    sys.exit(failures > 0)


if __name__ == "__main__":
    main()
