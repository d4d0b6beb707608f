#!/usr/bin/env python3
"""Holds the kernel of product.cu, for products that cuBLASLt refuses, against float64.

usage: product.py [--toolkit DIR] [--driver libcuda.so.1]

A result may be off by half of the last bit of its type and by 2^-20 of the sum of its terms' sizes: roundings of f32. A bit that differs in
a second run, or that changes beside the rows, is a failure, too. Exits 1 then.
"""
import struct
import sys

import numpy as np

import device as cuda

F32, BF16, F16, E4M3 = range(4)
# Types of factors and result, rows, columns, depth, whether each factor lies by columns, matrices of a batch, whether there is a sum.
CASES = [(F32, F32, 5, 7, 24, False, False, 6, False), (F32, F32, 70, 65, 33, True, False, 1, True), (BF16, BF16, 65, 130, 40, False, True, 1, True),
         (BF16, BF16, 3, 1, 1, True, True, 2, False), (F16, F16, 66, 9, 100, False, True, 1, True), (E4M3, BF16, 17, 70, 48, False, True, 1, True)]
NAMES = {F32: "f32", BF16: "bf16", F16: "f16", E4M3: "e4m3"}


def bits(x: np.ndarray, kind: int) -> np.ndarray:
    if kind == E4M3:
        return (np.abs(x) * 1000 % 256).astype(np.uint8) & 0xF7   # none that is no number
    if kind == F16:
        return x.astype(np.float16).view(np.uint16)
    x = x.astype(np.float32)
    return x if kind == F32 else ((x.view(np.uint32) + 0x7FFF + (x.view(np.uint32) >> 16 & 1)) >> 16).astype(np.uint16)


def numbers(x: np.ndarray, kind: int) -> np.ndarray:
    if kind == E4M3:
        exponent, mantissa = (x >> 3 & 15).astype(int), (x & 7).astype(float)
        return np.where(x & 128, -1, 1) * np.where(exponent, np.ldexp(1 + mantissa / 8, exponent - 7), np.ldexp(mantissa / 8, -6))
    if kind == F16:
        return x.view(np.float16).astype(np.float64)
    return x.astype(np.float64) if kind == F32 else (x.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def check(device: cuda.Device, case: tuple, seed: int) -> list[str]:
    kind, of_result, rows, columns, depth, is_a_turned, is_b_turned, batch, has_sum = case
    made = np.random.default_rng(seed)

    def stored(shape: tuple, is_turned: bool, kind: int) -> tuple:
        """Numbers by rows, with some beside them, and steps of rows, columns and matrices."""
        across = shape[::-1] if is_turned else shape
        whole = bits(made.standard_normal((batch, across[0], across[1] + 3)), kind)
        x, stride = numbers(whole[:, :, :across[1]], kind), across[1] + 3
        return whole, x.swapaxes(1, 2) if is_turned else x, ((1, stride) if is_turned else (stride, 1)) + (across[0] * stride,)

    a, b = stored((rows, depth), is_a_turned, kind), stored((depth, columns), is_b_turned, kind)
    total, y = stored((rows, columns), False, of_result), stored((rows, columns), False, of_result)
    factors = np.array([0.5, 0.75], np.float32) if kind == E4M3 else None

    def run() -> np.ndarray:
        held = [device.buffer(x[0]) for x in (a, b, total, y)]
        held[2] = held[2] if has_sum else None
        words = [struct.pack("<Qqqq", x.pointer.value if x else 0, *of[2]) for x, of in zip(held, (a, b, total, y))]
        of = device.buffer(factors).pointer.value if kind == E4M3 else 0
        words.append(struct.pack("<QQ5i4x", of, of + 4 * bool(of), rows, columns, depth, kind, of_result))
        device.launch("product", (-(-columns // 64), -(-rows // 64), batch), 256, 0, b"".join(words))
        result = held[3].read()
        device.free()
        return result

    found, again = run(), run()
    factor = 0.375 if kind == E4M3 else 1
    expected, size = factor * (a[1] @ b[1]), factor * (np.abs(a[1]) @ np.abs(b[1]))
    if has_sum:
        expected, size = expected + total[1], size + np.abs(total[1])
    last = {F32: 24, BF16: 8, F16: 11}[of_result]
    allowed = np.abs(expected) * 2.0**-last * 1.01 + size * 2.0**-20 + 2.0**-25
    share = float((np.abs(numbers(found[:, :, :columns], of_result) - expected) / allowed).max())
    print(f"product of {NAMES[kind]} in {NAMES[of_result]}, {batch} x {rows} x {columns} over {depth}: largest share of what may be off {share:.2f}")
    wrong = [] if share <= 1 else ["off"]
    wrong += ["a second run differs"] * (found.tobytes() != again.tobytes())
    return wrong + ["written beside the rows"] * bool((found[:, :, columns:] != y[0][:, :, columns:]).any())


def main() -> None:
    options = cuda.arguments(__doc__).parse_args()
    device, failures = cuda.Device(options, "product"), 0
    for seed, case in enumerate(CASES):
        for text in check(device, case, seed):
            failures += 1
            print(f"FAIL {case}: {text}", flush=True)
    sys.exit(failures > 0)


if __name__ == "__main__":
    main()
