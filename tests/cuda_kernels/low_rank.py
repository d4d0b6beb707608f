#!/usr/bin/env python3
"""Holds the kernels of low_rank.cu against float64.

usage: low_rank.py [--toolkit DIR] [--driver libcuda.so.1]

Each kernel's operands are what the kernels before it wrote, rounded to 16 bits where the kernels are to round operands. What is f32
may be off by 4e-7 of the sum of its terms' sizes, a few roundings of f32 (6e-8; 1.1e-7 is reached). What has 16 bits may be off by
that and by half of its last bit. So an element that is rounded twice, or whose mask is another, is a failure; so is a bit that
differs in a second run, or one that changes beside the rows. Exits 1 then.
"""
import sys

import numpy as np

import device as cuda

# Tokens, in, out of each projection, rank, probability of dropout, shares of the tokens, tiles across, columns beside the rows, most
# blocks that add up.
CASES = [
    (70, 72, (40,), 1, 0.0, 1, 1, 8, 1),
    (1, 8, (8,), 3, 0.3, 1, 2, 0, 1),
    (130, 264, (24, 264, 8), 3, 0.0, 2, 2, 16, 1),
    (193, 520, (304,), 8, 0.1, 3, 3, 0, 2),
    (257, 600, (272, 64), 16, 0.0, 4, 2, 24, 3),
    (600, 1112, (520,), 16, 0.05, 5, 2, 8, 7),
    (100, 320, (48, 16, 16), 16, 0.0, 2, 1, 8, 1),
    (70, 264, (40, 24), 16, 0.2, 1, 2, 8, 2),
    (65, 264, (40, 296), 20, 0.0, 1, 1, 0, 66),
    (129, 296, (264,), 64, 0.5, 2, 1, 8, 3),
    (66, 264, (40,), 100, 0.05, 1, 1, 0, 2),
    (65, 136, (264, 8, 48), 40, 0.0, 2, 1, 8, 5),
    (33, 136, (264,), 256, 0.0, 1, 1, 8, 66),
    (1100, 136, (72,), 8, 0.0, 18, 1, 8, 2),
    (70, 4616, (4360,), 8, 0.0, 2, 1, 0, 9),
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
    return cuda.from_half(cuda.to_half(x)).astype(np.float64)


class Layer:
    """The kernels over one case's tensors: projections of one input."""

    def __init__(self, device: cuda.Device, case: tuple, seed: int):
        self.device, self.seed = device, 2**40 + seed
        self.tokens, self.inputs, self.outputs, self.rank, p, self.shares, self.across, self.beside, self.num_sums = case
        self.parts = len(self.outputs)
        self.padded = -(-self.rank // 8) * 8
        self.columns, self.scale = self.padded * self.parts, 0.75
        p = np.float32(p)
        # Each projection has its mask.
        self.dropouts = [(np.uint64(mix(self.seed + i)), np.uint32(int(float(p) * 2**32)), float(np.float32(1) / (np.float32(1) - p)))
                         for i in range(self.parts)]
        made = np.random.default_rng(seed)
        normal = lambda *shape: made.standard_normal(shape).astype(np.float32)
        self.x, self.dx = normal(self.tokens, self.inputs), normal(self.tokens, self.inputs)
        self.y, self.dy = normal(self.tokens, sum(self.outputs)), normal(self.tokens, sum(self.outputs))
        self.a = [normal(self.rank, self.inputs) / 8 for _ in range(self.parts)]
        self.b = [normal(width, self.rank) / 8 for width in self.outputs]
        self.da, self.db = [normal(*a.shape) for a in self.a], [normal(*b.shape) for b in self.b]

    def rows(self, x: np.ndarray) -> cuda.Buffer:
        """Rows with NaN beside them."""
        out = np.full((len(x), x.shape[1] + self.beside), 0xFFFF, np.uint16)
        out[:, :x.shape[1]] = cuda.to_half(x)
        return self.device.buffer(out)

    def run(self, adds: bool) -> dict[str, np.ndarray]:
        """All kernels: the bits of what they write."""
        device, tokens, rank, in_flight = self.device, self.tokens, self.rank, 1 if cuda.is_turing() else 2
        off, null = (np.uint64(0), np.uint32(0), 1.0), np.uint64(0)
        x, dx, y, dy = (self.rows(x) for x in (self.x, self.dx, self.y, self.dy))
        a, b, da, db = ([device.buffer(x) for x in of] for of in (self.a, self.b, self.da, self.db))
        xa, dxa = (device.buffer(np.full((tokens, self.columns + self.beside), 0xFFFF, np.uint16)) for _ in range(2))
        stride = lambda rows: rows.shape[1]
        three = lambda x, fill: (*x, *[fill] * (3 - len(x)))
        blocks = lambda size, each: -(-size // each)
        fresh = lambda *shape: device.buffer(np.full(shape, np.nan, np.float32))
        of_a, of_b = ((self.inputs, 1), (self.inputs,)), ((1, rank), self.outputs)

        # Launches find the counters as those before have left them.
        counters = device.buffer(np.zeros(2, np.uint32))
        # Scratch of what is summed up, and the numbers that blocks are to sum up.
        products_of = lambda counts, columns: fresh(sum(counts), tokens, columns) if max(counts) > 1 else null
        gradients_of = lambda widths, columns: fresh(self.shares, sum(widths), columns) if self.shares > 1 else null

        def launch(name, across, deep, summed, *values):
            num_sums = min(self.num_sums, blocks(sum(int(np.prod(x.shape[1:])) for x in summed if x is not null), 1024))
            device.launch(name, (across * self.shares * deep + num_sums,), 256, *values)

        def product(x, factors, like, columns, scale, out, dropout):
            strides, widths = like
            across = max(1, min(self.across, 64 // min(columns, 64)))
            counts = [blocks(width, 256 * across) for width in widths]
            products = products_of(counts, columns)
            launch("low_rank_product", sum(counts), blocks(columns, 64), [products], 32768 * in_flight + 512 * min(columns, 64) * across, x,
                   *three(factors, null), products, out, counters, stride(x), stride(xa), *strides, tokens, *three(widths, 0), rank,
                   columns, across, self.shares, scale, *dropout)

        def gradient(x, left, to, like, columns, scale, dropout):
            strides, widths = like
            gradients = gradients_of(widths, columns)
            launch("low_rank_gradient", sum(blocks(width, 256) for width in widths), blocks(columns, 64), [gradients], 40960 * in_flight, x, left,
                   gradients, *three(to, null), counters, stride(x), stride(xa), *strides, tokens, *three(widths, 0), rank, columns,
                   self.shares, scale, int(adds), *dropout)

        def add(left, factors, like, y, columns, scale, dropout):
            strides, widths = like
            name, each = ("low_rank_add_64", 256) if columns <= 64 else ("low_rank_add_256", 128)
            device.launch(name, (sum(blocks(width, each) for width in widths), self.shares), 256, 0, left, *three(factors, null), y,
                          stride(xa), stride(y), *strides, tokens, *three(widths, 0), rank, columns, scale, *dropout)

        # With dropout by projection, on its columns; else all at once.
        has_dropout = self.dropouts[0][1] > 0
        if has_dropout:
            launches = [(2 * i * self.padded, a[i:i + 1], da[i:i + 1], self.padded, self.dropouts[i]) for i in range(self.parts)]
        else:
            launches = [(0, a, da, self.columns, off)]
        at = lambda rows, offset: np.uint64(rows.pointer.value + offset)
        for offset, factors, _, columns, dropout in launches:
            product(x, factors, of_a, columns, 1.0, at(xa, offset), dropout)
        add(xa, b, of_b, y, self.padded, self.scale, off)
        if self.padded <= 32:
            counts = [blocks(width, 256) for width in self.outputs]
            products, gradients = products_of(counts, self.padded), gradients_of(self.outputs, self.padded)
            launch("low_rank_both", sum(counts), 1, [products, gradients], 36864 * in_flight + 512 * self.padded, dy, *three(b, null), xa, products,
                   dxa, gradients, *three(db, null), counters, stride(dy), stride(xa), stride(dxa), tokens, *three(self.outputs, 0),
                   rank, self.padded, self.shares, self.scale, int(adds))
        else:
            product(dy, b, of_b, self.padded, self.scale, dxa, off)
            gradient(dy, xa, db, of_b, self.padded, self.scale, off)
        for offset, _, to, columns, dropout in launches:
            gradient(x, at(dxa, offset), to, of_a, columns, 1.0, dropout)
        # Rounded once by projection: the last is looked at.
        for offset, factors, _, columns, dropout in launches:
            before = dx.read()
            add(at(dxa, offset), factors, of_a, dx, columns, 1.0, dropout)
        made = {"xa": xa.read(), "y": y.read(), "dxa": dxa.read(), "before": before, "dx": dx.read(), "counters": counters.read()}
        made |= {f"da{i}": da[i].read() for i in range(self.parts)} | {f"db{i}": db[i].read() for i in range(self.parts)}
        device.free()
        return made

    def expected(self, made: dict[str, np.ndarray], adds: bool) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """In float64 from operands that the kernels made: what is to come out, and the sum of its terms' sizes."""
        has_dropout = self.dropouts[0][1] > 0
        factors = [np.where(kept(self.seed + i, self.tokens, self.inputs, threshold), np.float32(factor), np.float32(0))
                   for i, (_, threshold, factor) in enumerate(self.dropouts)]
        x = [rounded(cuda.from_half(cuda.to_half(self.x)) * factor) for factor in factors]
        xa, dxa = (cuda.from_half(made[name][:, :self.columns]).astype(np.float64).reshape(self.tokens, self.parts, self.padded)
                   [:, :, :self.rank] for name in ("xa", "dxa"))
        padded = lambda p: np.pad(p, ((0, 0), (0, self.padded - self.rank)))
        product = lambda x, y, scale=1.0: (x @ y * scale, np.abs(x) @ np.abs(y) * scale)
        sized = lambda x: (x, np.abs(x))
        joined = lambda parts: tuple(np.concatenate(p, 1) for p in zip(*parts))
        plus = lambda x, y, factor: tuple(x + y * factor for x, y in zip(x, y))
        a, b, dy = [rounded(a) for a in self.a], [rounded(b) for b in self.b], np.split(rounded(self.dy), np.cumsum(self.outputs)[:-1], 1)
        parts = range(self.parts)
        out = {"xa": joined([map(padded, product(x[i], a[i].T)) for i in parts]),
               "dxa": joined([map(padded, product(dy[i], b[i], self.scale)) for i in parts]),
               "y": plus(sized(rounded(self.y)), joined([product(xa[:, i], b[i].T, self.scale) for i in parts]), 1)}
        dx = sized(cuda.from_half(made["before"][:, :self.inputs]).astype(np.float64))
        for i in parts[-1:] if has_dropout else parts:
            dx = plus(dx, product(dxa[:, i], a[i]), factors[i])
        for i in parts:
            out[f"da{i}"] = plus(product(dxa[:, i].T, x[i]), sized(self.da[i]), adds)
            out[f"db{i}"] = plus(product(dy[i].T, xa[:, i], self.scale), sized(self.db[i]), adds)
        return out | {"dx": dx}

    def check(self) -> list[str]:
        """Prints the errors; gives what is wrong."""
        wrong, told = [], []
        for adds in (False, True):
            made = self.run(adds)
            if adds:
                again = self.run(adds)
                wrong += [f"{name}: a second run differs" for name in made if made[name].tobytes() != again[name].tobytes()]
            if made["counters"].any():
                wrong.append(f"counters: left at {made['counters']}")
            for name, (value, size) in self.expected(made, adds).items():
                x, is_half = made[name], made[name].dtype == np.uint16
                if is_half:
                    if (x[:, value.shape[1]:] != 0xFFFF).any():
                        wrong.append(f"{name}: written beside the rows")
                    x = cuda.from_half(x[:, :value.shape[1]])
                half_bit = cuda.half_bit(value) if is_half else 0
                off = np.abs(x - value)
                share = off / (4e-7 * size + half_bit + 1e-30)
                if not share.max() <= 1:
                    wrong.append(f"{name}: {(~(share <= 1)).sum()} of {x.size} are off, the worst by {share.max():.2f} of what may be")
                if adds:
                    told.append(f"{name} {np.sqrt((off**2).mean() / (value**2).mean()):.1e} {share.max():.2f}")
        print(f"{self.tokens:4} {self.inputs} -> {self.rank} -> {self.outputs}: {', '.join(told)}", flush=True)
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
