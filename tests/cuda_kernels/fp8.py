#!/usr/bin/env python3
"""Holds the kernels of fp8.cu against numpy: codes, what 1 stands for, and transposes, to the bit.

usage: fp8.py [--toolkit DIR] [--driver libcuda.so.1] [--time]

Exits 1 where one differs, a second run does, or a byte changes beside the results. With --time, on a card, prints GB/s.
"""
import sys

import numpy as np

import device as cuda

# Rows, columns, columns beside the rows.
ROUNDED = [(1, 16, 0), (3, 48, 8), (64, 256, 0), (37, 1032, 24), (700, 4096, 0)]
TRANSPOSED = [(16, 16), (64, 128), (80, 48), (272, 4112), (1024, 336)]
# E4M3: eighths of powers of two from 2^-6 to 2^8, below them multiples of 2^-9; the last code is no number.
NUMBERS = np.array([np.ldexp(8 + (c & 7), (c >> 3) - 10) if c > 7 else np.ldexp(c, -9) for c in range(127)], np.float32)


def codes_of(x: np.ndarray) -> np.ndarray:
    """The nearest code to each number, even of two; the largest beyond them."""
    size = np.abs(x)
    above = np.searchsorted(NUMBERS, size).clip(1, 126)
    below, halves = above - 1, (NUMBERS[above - 1].astype(np.float64) + NUMBERS[above]) / 2
    code = np.where((size > halves) | ((size == halves) & (above % 2 == 0)), above, below)
    return np.where(np.isnan(x), 0x7F, code | np.signbit(x) * 128).astype(np.uint8)


def rounded(device: cuda.Device, x: np.ndarray, width: int) -> tuple[np.ndarray, np.float32]:
    rows, stride = x.shape
    blocks = min(-(-rows * width // 2048), 1024)
    held, of_blocks = device.buffer(x), device.buffer(np.full(blocks, 0xFFFFFFFF, np.uint32))
    codes, scale = device.buffer(np.full(rows * width + 8, 0xAA, np.uint8)), device.buffer(np.full(2, np.nan, np.float32))
    device.launch("fp8_largest", (blocks,), 256, 0, held, of_blocks, stride, rows, width)
    device.launch("fp8_rounded", (blocks,), 256, 0, held, of_blocks, codes, scale, blocks, stride, rows, width)
    found = codes.read(), scale.read()
    device.free()
    return found


def check_rounded(device: cuda.Device, case: tuple, seed: int, special: str) -> list[str]:
    rows, width, beside = case
    made = np.random.default_rng(seed)
    bits = np.full((rows, width + beside), 0x7F80, np.uint16)   # infinity beside them
    # Of many powers of two, and halfway between codes where the largest is one.
    numbers = made.standard_normal((rows, width)) * np.exp2(made.integers(-12, 3, (rows, width)))
    if special == "halves":
        numbers = made.choice((NUMBERS[:-1] + NUMBERS[1:]) / 2, (rows, width)) * made.choice([-1, 1], (rows, width))
        numbers[0, 0] = 448
    elif special:
        numbers = {"zeros": numbers * 0, "tiny": numbers * 1e-36}.get(special, numbers)
        numbers[-1, -1] = {"nan": np.nan, "infinity": np.inf, "zeros": 0, "tiny": 1e-36}[special]
    bits[:, :width] = cuda.to_half(numbers)
    if special == "nan":
        bits[-1, width - 1] = 0x7FC0
    x = cuda.from_half(bits[:, :width])
    most = np.float32(np.nan if np.isnan(x).any() else np.abs(x).max())
    with np.errstate(invalid="ignore"):
        factor = np.float32(0) if most < np.float32(1e-30) else np.float32(448) / most
        expected = codes_of(x * factor)
    found, again = rounded(device, bits, width), rounded(device, bits, width)
    wrong = []
    if not np.array_equal(found[0][:-8].reshape(rows, width), expected):
        wrong.append(f"{np.count_nonzero(found[0][:-8].reshape(rows, width) != expected)} codes differ")
    if found[1][0].tobytes() != (most / np.float32(448)).tobytes() and not np.isnan([found[1][0], most]).all():
        wrong.append(f"1 stands for {found[1][0]}, expected {most / 448}")
    if (found[0][-8:] != 0xAA).any() or not np.isnan(found[1][1]):
        wrong.append("written beside the results")
    if any(a.tobytes() != b.tobytes() for a, b in zip(found, again)):
        wrong.append("a second run differs")
    return wrong


def check_transposed(device: cuda.Device, shape: tuple[int, int], seed: int) -> list[str]:
    rows, columns = shape
    x = np.random.default_rng(seed).integers(0, 256, shape).astype(np.uint8)
    held, y = device.buffer(x), device.buffer(np.full(rows * columns + 16, 0xAA, np.uint8))
    device.launch("fp8_transposed", (-(-columns // 64), -(-rows // 64)), 256, 0, held, y, rows, columns)
    found = y.read()
    device.free()
    is_right = np.array_equal(found[:-16].reshape(columns, rows), x.T) and (found[-16:] == 0xAA).all()
    return [] if is_right else ["not the transpose"]


def time(device: cuda.Device) -> None:
    rows, columns = 4096, 14336
    x, of_blocks, scale = (device.buffer(np.zeros(size, of)) for size, of in (
        ((rows, columns), np.uint16), (1024, np.uint32), (1, np.float32)))
    codes, y = (device.buffer(np.zeros((rows, columns), np.uint8)) for _ in range(2))
    launches = {
        "fp8_largest": (2, (1024,), x, of_blocks, columns, rows, columns),
        "fp8_rounded": (3, (1024,), x, of_blocks, codes, scale, 1024, columns, rows, columns),
        "fp8_transposed": (2, (columns // 64, rows // 64), codes, y, rows, columns)}
    for name, (num_bytes, grid, *arguments) in launches.items():
        seconds = device.seconds(lambda: device.launch(name, grid, 256, 0, *arguments))
        print(f"{name}, {rows} x {columns}: {seconds * 1e6:.0f} us, {num_bytes * rows * columns / seconds / 1e9:.0f} GB/s")


def main() -> int:
    parser = cuda.arguments(__doc__)
    parser.add_argument("--time", action="store_true")
    options = parser.parse_args()
    device, wrong = cuda.Device(options, "fp8"), []
    for seed, case in enumerate(ROUNDED):
        for special in ("", "halves", "zeros", "tiny", "nan", "infinity"):
            wrong += [f"{case} {special}: {what}" for what in check_rounded(device, case, seed, special)]
    for seed, shape in enumerate(TRANSPOSED):
        wrong += [f"transpose of {shape}: {what}" for what in check_transposed(device, shape, seed)]
    if options.time:
        time(device)
    print("\n".join(wrong) or f"ok, {6 * len(ROUNDED) + len(TRANSPOSED)} cases")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
