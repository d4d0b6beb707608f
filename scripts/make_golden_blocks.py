#!/usr/bin/env python3
"""Golden blocks: what llama.cpp encodes numbers to, for our encoders to compare with.

usage: make_golden_blocks.py OUT_FILE

Writes `numbers` [rows, 512] of many kinds, `importance` [512], and for each type T `T.blocks` and, where the type has a use for an
importance matrix, `T.weighted`: the bytes of ggml_quantize_chunk. Ours are made of

    pip install xllamacpp==2026.10.11549 numpy safetensors

whose shared library has llama.cpp's C functions.
"""

import ctypes
import importlib.util
import pathlib
import sys

import numpy as np
from safetensors.numpy import save_file

WIDTH = 512
# ggml's number of the type, numbers of a block, bytes of a block.
TYPES = {
    "Q4_0": (2, 32, 18), "Q4_1": (3, 32, 20), "Q5_0": (6, 32, 22), "Q5_1": (7, 32, 24), "Q8_0": (8, 32, 34),
    "Q2_K": (10, 256, 84), "Q3_K": (11, 256, 110), "Q4_K": (12, 256, 144), "Q5_K": (13, 256, 176), "Q6_K": (14, 256, 210),
    "IQ4_NL": (20, 32, 18), "IQ4_XS": (23, 256, 136), "MXFP4": (39, 32, 17), "NVFP4": (40, 64, 36),
}
UNWEIGHTED = ("Q8_0", "MXFP4", "NVFP4")
FLOATS = ctypes.POINTER(ctypes.c_float)


def library() -> ctypes.CDLL:
    folder = pathlib.Path(importlib.util.find_spec("xllamacpp").origin).parent
    found = ctypes.CDLL(str(next(folder.glob("xllamacpp*.so"))))
    found.ggml_quantize_chunk.argtypes = [ctypes.c_int, FLOATS, ctypes.c_void_p, *[ctypes.c_int64] * 3, FLOATS]
    found.ggml_quantize_chunk.restype = ctypes.c_size_t
    return found


def rows(draw: np.random.Generator, importance: np.ndarray) -> np.ndarray:
    """A row of each kind."""

    def normal(scale=1.0):
        return draw.normal(size=WIDTH) * scale

    def by_groups(of, length):
        return np.repeat(of, length)

    def by_columns(small):
        made = np.full((16, 32), -0.0)
        for group, weights in zip(made, importance.reshape(16, 32)):
            some, none = np.flatnonzero(weights), np.flatnonzero(weights == 0)
            group[draw.choice(none, 1)] = -draw.uniform(1, 2)
            group[draw.choice(some, min(1, len(some)))] = small * draw.uniform(0.5, 2)
        return made.reshape(-1)

    some = draw.random(WIDTH)
    kinds = [
        normal(0.02), normal(0.02), draw.standard_t(2, WIDTH) * 0.02, draw.uniform(-1, 1, WIDTH),
        # Few large numbers, few numbers, groups of zeros, zeros of either sign, nothing.
        np.where(some < 0.01, normal(50.0), normal(0.02)), np.where(some < 0.05, normal(), 0.0),
        normal() * by_groups(draw.random(32) < 0.5, 16), np.where(some < 0.5, -0.0, np.where(some > 0.99, normal(), 0.0)), np.zeros(WIDTH),
        # Zeros below 0, a small number, and a large one in a column without importance.
        by_columns(-0.002), by_columns(-0.03), np.where(some < 0.04, -np.abs(normal()) * 10.0 ** draw.uniform(-5, 1, WIDTH), -0.0),
        # Of one sign, nearly constant, constant.
        -np.abs(normal()), np.abs(normal()), -1 - normal(1e-6) ** 2, by_groups(normal()[:16], 32) + normal(1e-6), by_groups(normal()[:16], 32),
        # Ties.
        np.round(normal(2.0)) / 4, draw.integers(-16, 17, WIDTH) / 2, np.sign(normal()) * 2.0 ** draw.integers(-4, 5, WIDTH),
        np.nextafter((np.sign(normal()) * 2.0 ** draw.integers(-30, 5, WIDTH)).astype(np.float32), np.float32(0)),
        # Scales that underflow in f16 or f32, and large ones.
        normal(3e-6), normal(1e-8), normal(1e-12), normal(1e-16), normal(1e-39), draw.integers(-3, 4, WIDTH) * 1.4e-45, normal(1e3), normal(1e4),
        # Groups and numbers of all sizes.
        normal() * by_groups(10.0 ** draw.uniform(-8, 2, 32), 16), normal() * by_groups(10.0 ** draw.uniform(-8, 2, 2), 256),
        normal() * 10.0 ** draw.uniform(-6, 2, WIDTH),
    ]
    return np.stack(kinds).astype(np.float32)


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    draw, ggml = np.random.default_rng(7), library()
    importance = (np.exp(draw.normal(size=WIDTH)) * (draw.random(WIDTH) < 0.7)).astype(np.float32)
    # A group of columns that no input reaches.
    importance[96:128] = 0
    numbers = rows(draw, importance)

    def encoded(kind, weights):
        code, length, size = TYPES[kind]
        blocks = np.zeros(numbers.size // length * size, np.uint8)
        weights = None if weights is None else weights.ctypes.data_as(FLOATS)
        num = ggml.ggml_quantize_chunk(code, numbers.ctypes.data_as(FLOATS), blocks.ctypes.data, 0, *numbers.shape, weights)
        assert num == blocks.size
        return blocks

    tensors = {"numbers": numbers, "importance": importance}
    for kind in TYPES:
        tensors[f"{kind}.blocks"] = encoded(kind, None)
        if kind not in UNWEIGHTED:
            tensors[f"{kind}.weighted"] = encoded(kind, importance)
    save_file(tensors, sys.argv[1])


if __name__ == "__main__":
    main()
