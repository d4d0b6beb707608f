#!/usr/bin/env python3
"""Holds the kernels of low_rank.cu against float64.

usage: low_rank.py [--toolkit DIR] [--driver libcuda.so.1]

Each kernel's operands are what the kernels before it wrote, rounded to bf16 where the kernels are to round operands. What is f32 may be off
by 4e-7 of the sum of its terms' sizes, a few roundings of f32 (6e-8; 1.1e-7 is reached). What is bf16 may be off by that and by half of its
last bit. So an element that is rounded twice, or whose mask is another, is a failure; so is a bit that differs in a second run, or one
that changes beside the rows. Exits 1 then.
"""
import sys

import numpy as np

import device as cuda

# Tokens, in, out, rank, parts, probability of dropout, shares of the tokens, tiles across, columns beside the rows.
CASES = [
    (70, 72, 40, 1, 1, 0.0, 1, 1, 8),
    (1, 8, 8, 3, 1, 0.3, 1, 2, 0),
    (130, 264, 24, 3, 3, 0.0, 2, 2, 16),
    (193, 520, 304, 8, 1, 0.1, 3, 3, 0),
    (257, 600, 272, 16, 1, 0.0, 4, 2, 24),
    (600, 1112, 520, 16, 1, 0.05, 5, 4, 8),
    (100, 320, 48, 16, 3, 0.0, 5, 1, 8),
    (65, 264, 40, 20, 2, 0.0, 1, 1, 0),
    (129, 296, 264, 64, 1, 0.5, 2, 1, 8),
    (66, 264, 40, 100, 1, 0.05, 1, 1, 0),
    (33, 136, 264, 256, 1, 0.0, 1, 1, 8),
]
FACTORS = np.array([0x9E3779B9, 0x7FEB352D, 0x846CA68B], np.uint32)


def mix(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) % 2**64
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    value = (value ^ value >> 27) * 0x94D049BB133111EB % 2**64
    return value ^ value >> 31


def kept(seed: int, rows: int, width: int, threshold: int) -> np.ndarray:
    """What stays, as src/ops/cpu/dropout.rs has it."""
    keys = np.array([mix(mix(seed) ^ row) for row in range(rows)], np.uint64)[:, None]
    low, high = keys.astype(np.uint32), (keys >> np.uint64(32)).astype(np.uint32)
    h = np.arange(width, dtype=np.uint32) * FACTORS[0] ^ low
    h = (h ^ h >> 16) * FACTORS[1]
    h = (h ^ high ^ h >> 15) * FACTORS[2]
    return (h ^ h >> 16) >= threshold


def rounded(x: np.ndarray) -> np.ndarray:
    return cuda.from_bf16(cuda.to_bf16(x)).astype(np.float64)


class Layer:
    """The kernels over one case's tensors."""

    def __init__(self, device: cuda.Device, case: tuple, seed: int):
        self.device, self.seed = device, 2**40 + seed
        self.tokens, self.inputs, self.outputs, self.rank, self.parts, p, self.shares, self.across, self.beside = case
        self.padded = -(-self.rank // 8) * 8
        self.columns, self.scale = self.padded * self.parts, 0.75
        p = np.float32(p)
        self.dropout = (np.uint64(mix(self.seed)), np.uint32(int(float(p) * 2**32)), float(np.float32(1) / (np.float32(1) - p)))
        made = np.random.default_rng(seed)
        normal = lambda *shape: made.standard_normal(shape).astype(np.float32)
        self.x, self.dx = normal(self.tokens, self.inputs), normal(self.tokens, self.inputs)
        self.a = [normal(self.rank, self.inputs) / 8 for _ in range(self.parts)]
        self.b = [normal(self.outputs, self.rank) / 8 for _ in range(self.parts)]
        self.y = [normal(self.tokens, self.outputs) for _ in range(self.parts)]
        self.dy = [normal(self.tokens, self.outputs) for _ in range(self.parts)]
        self.da, self.db = [normal(*a.shape) for a in self.a], [normal(*b.shape) for b in self.b]

    def rows(self, x: np.ndarray) -> cuda.Buffer:
        """Rows with NaN beside them."""
        out = np.full((len(x), x.shape[1] + self.beside), 0xFFFF, np.uint16)
        out[:, :x.shape[1]] = cuda.to_bf16(x)
        return self.device.buffer(out)

    def run(self, adds: bool) -> dict[str, np.ndarray]:
        """All kernels: the bits of what they write."""
        device, tokens, rank, columns = self.device, self.tokens, self.rank, self.columns
        made = {}
        off = (np.uint64(0), np.uint32(0), 1.0)
        stride_of = lambda x: x.shape[1]
        three = lambda x: [x[min(i, len(x) - 1)] for i in range(3)]
        x, dx = self.rows(self.x), self.rows(self.dx)
        a, b, y, dy, da, db = ([device.buffer(x) for x in xs] if name not in ("y", "dy") else [self.rows(x) for x in xs] for name, xs in
                               (("a", self.a), ("b", self.b), ("y", self.y), ("dy", self.dy), ("da", self.da), ("db", self.db)))
        xa, dxa = (device.buffer(np.full((tokens, columns + self.beside), 0xFFFF, np.uint16)) for _ in range(2))
        at = lambda rows, part: np.uint64(rows.pointer.value + 2 * part * self.padded)
        fresh = lambda *shape: device.buffer(np.full(shape, np.nan, np.float32))
        blocks = lambda size, each: -(-size // each)

        def product(x, factors, strides, width, columns, out, scale, dropout):
            across = max(1, min(self.across, 64 // min(columns, 64)))
            grid = (blocks(width, 256 * across), self.shares, blocks(columns, 64))
            sums = fresh(grid[0], tokens, columns)
            device.launch("low_rank_product", grid, 256, 65536 + 512 * min(columns, 64) * across, x, *three(factors), sums, stride_of(x), *strides,
                          tokens, width, rank, columns, across, *dropout)
            sum_rows(sums, out, columns, scale)

        def sum_rows(sums, out, columns, scale):
            device.launch("low_rank_sum_rows", (blocks(tokens * columns, 512),), 256, 0, sums, out, stride_of(xa), tokens, columns, sums.shape[0], scale)

        def gradient(x, left, width, columns, dropout):
            grid = (blocks(width, 256), self.shares, blocks(columns, 64))
            sums = fresh(grid[1], width, columns)
            device.launch("low_rank_gradient", grid, 256, 81920, x, left, sums, stride_of(x), stride_of(xa), tokens, width, columns, *dropout)
            return sums

        def sum_gradient(sums, gradients, strides, width, columns, scale):
            device.launch("low_rank_sum_gradient", (blocks(width, 32), columns // 8), 256, 0, sums, *three(gradients), *strides, width, rank, columns,
                          sums.shape[0], scale, int(adds))

        def add(left, factors, strides, y, width, columns, scale, dropout):
            name, across = ("low_rank_add_64", 256) if columns <= 64 else ("low_rank_add_256", 128)
            device.launch(name, (blocks(width, across), self.shares), 256, 0, left, *three(factors), y, stride_of(xa), stride_of(y), *strides,
                          tokens, width, rank, columns, scale, *dropout)

        product(x, a, (self.inputs, 1), self.inputs, columns, xa, 1.0, self.dropout)
        made["xa"] = xa.read()
        for i in range(self.parts):
            add(at(xa, i), [b[i]], (1, rank), y[i], self.outputs, self.padded, self.scale, off)
            made[f"y{i}"] = y[i].read()
        for i in range(self.parts):
            if rank <= 32:
                sums, sums_b = fresh(blocks(self.outputs, 256), tokens, self.padded), fresh(self.shares, self.outputs, self.padded)
                device.launch("low_rank_both", (blocks(self.outputs, 256), self.shares), 256, 73728 + 512 * self.padded, dy[i], b[i], at(xa, i), sums,
                              sums_b, stride_of(dy[i]), stride_of(xa), tokens, self.outputs, rank, self.padded)
                sum_rows(sums, at(dxa, i), self.padded, self.scale)
            else:
                product(dy[i], [b[i]], (1, rank), self.outputs, self.padded, at(dxa, i), self.scale, off)
                sums_b = gradient(dy[i], at(xa, i), self.outputs, self.padded, off)
            sum_gradient(sums_b, [db[i]], (1, rank), self.outputs, self.padded, self.scale)
            made[f"db{i}"] = db[i].read()
        made["dxa"] = dxa.read()
        sum_gradient(gradient(x, dxa, self.inputs, columns, self.dropout), da, (self.inputs, 1), self.inputs, columns, 1.0)
        made |= {f"da{i}": da[i].read() for i in range(self.parts)}
        add(dxa, a, (self.inputs, 1), dx, self.inputs, columns, 1.0, self.dropout)
        made["dx"] = dx.read()
        device.free()
        return made

    def expected(self, made: dict[str, np.ndarray], adds: bool) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """In float64 from operands that the kernels made: what is to come out, and the sum of its terms' sizes."""
        _, threshold, factor = self.dropout
        kept_factor = np.where(kept(self.seed, self.tokens, self.inputs, threshold), np.float32(factor), np.float32(0))
        x = rounded(cuda.from_bf16(cuda.to_bf16(self.x)) * kept_factor)
        read = lambda name: cuda.from_bf16(made[name][:, :self.columns]).astype(np.float64).reshape(self.tokens, self.parts, self.padded)
        xa, dxa = read("xa"), read("dxa")
        padded = lambda products: np.concatenate([np.pad(p, ((0, 0), (0, self.padded - self.rank))) for p in products], 1)
        product = lambda x, y, scale=1.0: (x @ y * scale, np.abs(x) @ np.abs(y) * scale)
        a, b, dy = [rounded(a) for a in self.a], [rounded(b) for b in self.b], [rounded(dy) for dy in self.dy]
        out = {"xa": tuple(padded(p) for p in zip(*(product(x, a.T) for a in a))),
               "dxa": tuple(padded(p) for p in zip(*(product(dy[i], b[i], self.scale) for i in range(self.parts))))}
        dx = rounded(self.dx), np.abs(rounded(self.dx))
        for i in range(self.parts):
            own, own_d = xa[:, i, :self.rank], dxa[:, i, :self.rank]
            y = product(own, b[i].T, self.scale)
            out[f"y{i}"] = rounded(self.y[i]) + y[0], np.abs(rounded(self.y[i])) + y[1]
            for name, before, (value, size) in (("db", self.db[i], product(dy[i].T, own, self.scale)), ("da", self.da[i], product(own_d.T, x))):
                out[f"{name}{i}"] = value + before * adds, size + np.abs(before) * adds
            update = product(own_d, a[i])
            dx = dx[0] + update[0] * kept_factor, dx[1] + update[1] * kept_factor
        return out | {"dx": dx}

    def check(self) -> list[str]:
        """Prints the errors; gives what is wrong."""
        wrong, told = [], []
        for adds in (False, True):
            made = self.run(adds)
            if adds:
                again = self.run(adds)
                wrong += [f"{name}: a second run differs" for name in made if made[name].tobytes() != again[name].tobytes()]
            for name, (value, size) in self.expected(made, adds).items():
                x, is_half = made[name], made[name].dtype == np.uint16
                if is_half:
                    if (x[:, value.shape[1]:] != 0xFFFF).any():
                        wrong.append(f"{name}: written beside the rows")
                    x = cuda.from_bf16(x[:, :value.shape[1]])
                half_bit = np.ldexp(1.0, np.frexp(value)[1] - 9) if is_half else 0
                off = np.abs(x - value)
                share = off / (4e-7 * size + half_bit + 1e-30)
                if not share.max() <= 1:
                    wrong.append(f"{name}: {(~(share <= 1)).sum()} of {x.size} are off, the worst by {share.max():.2f} of what may be")
                if adds:
                    told.append(f"{name} {np.sqrt((off**2).mean() / (value**2).mean()):.1e} {share.max():.2f}")
        print(f"{self.tokens:4} {self.inputs} -> {self.parts} x {self.rank} -> {self.outputs}: {', '.join(told)}", flush=True)
        return wrong


def main() -> None:
    device = cuda.Device(cuda.arguments(__doc__).parse_args(), "low_rank")
    print("errors, and their largest share of what they may be")
    failures = 0
    for seed, case in enumerate(CASES):
        for text in Layer(device, case, seed).check():
            failures += 1
            print(f"FAIL {case}: {text}", flush=True)
    sys.exit(failures > 0)


if __name__ == "__main__":
    main()
