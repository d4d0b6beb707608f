#!/usr/bin/env python3
"""Holds the kernels of experts.cu, grouped.cu, grouped_hopper.cu and expert_rank.cu against float64.

usage: experts.py [--toolkit DIR] [--driver libcuda.so.1] [--time]

What has 16 bits may be off by half of its last bit, and by 1e-6 of the sum of its terms' sizes, roundings of f32; what is f32 by 1e-6 of
that. Which experts are chosen, and where rows lie, is exact. A bit that differs in a second run, or that changes beside the rows, is
a failure, too. Exits 1 then.
"""
import struct
import sys

import numpy as np

import device as cuda
from rows import Rows, share

# Tokens, experts, experts of a token, width, columns beside the rows.
ROUTES = [(5, 3, 2, 8, 8), (40, 7, 3, 1032, 0), (9, 512, 10, 16, 0), (300, 130, 8, 16, 8), (3, 32, 32, 8, 0)]
# What scores become, whether there are a bias and scales, groups, how many stay, by how many of their best, the factor.
KINDS_OF_ROUTERS = [("all", False, False, 0, 0, 0, 1), ("chosen", False, True, 0, 0, 0, 1), ("all", True, True, 0, 0, 0, 2.5),
                    ("sigmoids", False, False, 0, 0, 0, 1), ("sigmoids", True, True, 0, 0, 0, 1.5), ("sigmoids of chosen", True, False, 0, 0, 0, 2.5),
                    ("chosen", False, False, 4, 2, 1, 16), ("sigmoids of chosen", True, True, 4, 3, 2, 1)]
KINDS_IN_ORDER, MORE = ("all", "chosen", "sigmoids", "sigmoids of chosen"), 1e-20
# Rows of the experts, in, out, rank, columns beside the rows.
RANKS = [([1, 0, 129, 3, 260], 72, 40, 3, 8), ([64], 264, 520, 16, 0), ([0, 70, 0], 136, 296, 40, 16), ([5, 200], 520, 264, 100, 8)]
# Rows of the experts in each table, layers, width, depth, columns beside the rows, whether there are biases.
GROUPS = [([[1, 0, 129, 3]], 2, 136, 40, 8, True), ([[0, 0, 40], [200, 0]], 1, 8, 264, 0, False), ([[128, 256]], 1, 520, 32, 0, True), ([[70, 30]], 2, 64, 456, 0, False),
          ([[0] * 40 + [5] + [0] * 20 + [70]], 2, 72, 96, 0, False)]
# Experts, rows of each, layers, width, depth.
TIMES = [(128, 256, 2, 768, 2048), (128, 256, 1, 2048, 768), (32, 512, 2, 2880, 2880), (8, 1024, 2, 14336, 4096)]
MOST_EXPERTS, MOST_BIASES, SIZE = 64, 240, 128
# Of a block: columns of its results, threads, bytes of shared memory.
KINDS = {"grouped": (128, 128, 3 * 2 * 128 * 32 * 2), "grouped_hopper": (256, 256, 4 * (128 + 256) * 64 * 2)}


def check_routes(device: cuda.Device, case: tuple, seed: int) -> list[str]:
    (tokens, num_experts, per_token, width, beside), (kind, has_bias, has_scales, groups, kept_groups, best, factor) = case
    if num_experts % (groups or 1) or kept_groups * num_experts < per_token * (groups or 0):
        return []
    made = np.random.default_rng(seed)
    # Many are equal.
    scores = np.round(made.standard_normal((tokens, num_experts)) * 4).astype(np.float32) / 2 + 0
    if tokens > 4:
        scores[3], scores[4] = -np.inf, 0
        scores[3, -per_token:] = -1
    scales = made.uniform(0.5, 2, num_experts).astype(np.float32)
    router_bias = np.arange(num_experts)[::-1].astype(np.float32) / 1024
    wide = scores.astype(np.float64)
    softmax = lambda x: np.exp(x - x.max(1, keepdims=True)) / np.exp(x - x.max(1, keepdims=True)).sum(1, keepdims=True)
    sigmoids, is_sigmoid = 1 / (1 + np.exp(-wide)), kind.startswith("sigmoids")
    by = (sigmoids if is_sigmoid else softmax(wide)) + has_bias * router_bias if has_bias or groups else wide
    if groups:
        of_group = np.sort(by.reshape(tokens, groups, -1), 2)[:, :, ::-1][:, :, :best].sum(2)
        stay = np.argsort(-of_group.astype(np.float32), 1, kind="stable")[:, :kept_groups]
        mask = np.full((tokens, groups), -np.inf)
        np.put_along_axis(mask, stay, 0, 1)
        by = by + np.repeat(mask, num_experts // groups, 1)
    chosen = np.argsort(-by.astype(np.float32), 1, kind="stable")[:, :per_token]
    slots = np.argsort(chosen.ravel(), kind="stable")
    rows = len(slots)
    places = np.empty(rows, np.int64)
    places[slots] = np.arange(rows)
    first = np.searchsorted(chosen.ravel()[slots], np.arange(num_experts + 1))
    x, y, sums = (Rows(made, n, width, beside + 8 * i) for i, n in enumerate((tokens, rows, tokens)))
    of_rows = made.standard_normal(rows).astype(np.float32)
    biases = made.standard_normal((num_experts, width)).astype(np.float32)
    by_token, wrong = places.reshape(tokens, per_token), []
    weighted, mask = has_scales, np.full(scores.shape, "chosen" not in kind)
    np.put_along_axis(mask, chosen, True, 1)
    probabilities = sigmoids * mask if is_sigmoid else softmax(np.where(mask, wide, -np.inf))
    if kind == "sigmoids of chosen":
        probabilities = probabilities / (probabilities.sum(1, keepdims=True) + MORE)

    def run() -> list[np.ndarray]:
        empty = lambda *shape, dtype=np.int32: device.buffer(np.full(shape, -7 if dtype == np.int32 else np.nan, dtype))
        of_all, weights = empty(tokens, num_experts, dtype=np.float32), empty(rows, dtype=np.float32)
        found, starts, table, back = empty(rows), empty(num_experts + 1), empty(rows), empty(rows)
        warps, across = lambda rows: (-(-rows // 8),), -(-width // 1024)
        numbers = [device.buffer(of) if is_there else np.uint64(0) for of, is_there in ((router_bias, has_bias), (scales, weighted))]
        device.launch("experts_route", warps(tokens), 256, 0, device.buffer(scores), *numbers, of_all, found, weights, tokens, num_experts,
                      per_token, KINDS_IN_ORDER.index(kind), groups, kept_groups, best, MORE * (kind == "sigmoids of chosen"), float(factor))
        device.launch("experts_sort", (num_experts,), 256, 0, found, starts, table, back, rows)
        held, ys, sum_, gathered = (device.buffer(r.bits) for r in (x, y, sums, Rows(None, rows, width, beside)))
        of_slots = weights if weighted else np.uint64(0)
        device.launch("experts_gather", (rows, across), 128, 0, held, table, of_slots, gathered, held.shape[1], gathered.shape[1], width, per_token)
        device.launch("experts_combine", (tokens, across), 128, 0, ys, back, of_slots, sum_, ys.shape[1], sum_.shape[1], width, per_token)
        products, scores_ = empty(rows, dtype=np.float32), empty(tokens, num_experts, dtype=np.float32)
        device.launch("experts_products", warps(rows), 256, 0, gathered, ys, products, gathered.shape[1], ys.shape[1], rows, width)
        held_biases = [device.buffer(bias) for bias in biases]
        for at in range(0, num_experts if weighted else 0, MOST_BIASES):
            of = [bias.pointer.value for bias in held_biases[at:at + MOST_BIASES]]
            device.launch("experts_bias_products", warps(rows), 256, 0, struct.pack(f"{MOST_BIASES}Q", *of, *[0] * (MOST_BIASES - len(of))),
                          ys, table, found, products, at, len(of), ys.shape[1], rows, width)
        device.launch("experts_scores", warps(tokens), 256, 0, of_all, device.buffer(of_rows), back, found, scores_, tokens, num_experts,
                      per_token, int(kind != "sigmoids"))
        results = [a.read() for a in (of_all, weights, found, starts, table, back, gathered, sum_, products, scores_)]
        device.free()
        return results

    results, again = run(), run()
    of_all, weights, found, starts, table, back, gathered, sum_, products, of_scores = results
    if any((a != b).any() for a, b in ((found, chosen.ravel()), (starts, first), (table, slots), (back, places))):
        return ["other experts, or another order"]
    expected_weights = np.take_along_axis(probabilities * (scales if weighted else 1) * factor, chosen, 1)
    weight = weights.astype(np.float64) if weighted else np.ones(rows)
    of_gathered = x.values[slots // per_token] * weight[slots][:, None]
    terms = y.values[by_token] * weight.reshape(tokens, per_token, 1)
    of_products = cuda.from_half(gathered[:, :width]) * y.values
    of_biases = y.values * biases[chosen.ravel()[slots]] * weighted
    of_slots = of_rows[places].reshape(tokens, per_token).astype(np.float64)
    expected_scores = -of_all * of_slots.sum(1, keepdims=True) * (kind != "sigmoids")
    np.put_along_axis(expected_scores, chosen, np.take_along_axis(expected_scores, chosen, 1) + of_slots, 1)
    f32 = lambda found, value, size: float((np.abs(found - value) / (1e-6 * size + 1e-30)).max())
    shares = {"probabilities": f32(of_all, probabilities, probabilities), "weights": f32(weights.reshape(chosen.shape), expected_weights, expected_weights),
              "gathered": share(gathered[:, :width], of_gathered, np.abs(of_gathered) + 1e-30),
              "combined": share(sum_[:, :width], sums.values + terms.sum(1), np.abs(sums.values) + np.abs(terms).sum(1)),
              "products": f32(products, (of_products + of_biases).sum(1), (np.abs(of_products) + np.abs(of_biases)).sum(1)),
              "scores": f32(of_scores, expected_scores, np.abs(of_slots).sum(1).max())}
    print(f"experts, {tokens} x {per_token} of {num_experts} by {kind}, {width} wide: largest share of what may be off: "
          + ", ".join(f"{what} {of:.2f}" for what, of in shares.items()))
    if not max(shares.values()) <= 1:
        wrong.append("off")
    if any(a.tobytes() != b.tobytes() for a, b in zip(results, again)):
        wrong.append("a second run differs")
    if (gathered[:, width:] != 0xFFFF).any() or (sum_[:, width:] != 0xFFFF).any():
        wrong.append("written beside the rows")
    return wrong


class Grouped:
    """Layers of experts, [layer][expert], and their rows."""

    def __init__(self, device: cuda.Device, kind: str, tables: list[list[int]], num_layers: int, width: int, depth: int, beside: int,
                 made: np.random.Generator):
        self.device, self.kind, self.tables, self.layers, self.width, self.depth, self.beside = device, kind, tables, range(num_layers), width, depth, beside
        self.counts = [count for table in tables for count in table]
        self.first = np.concatenate([[0], np.cumsum(self.counts)]).astype(np.int32)
        self.x = Rows(made, self.first[-1], depth, beside)
        self.dys = [Rows(made, self.first[-1], width, beside) for _ in self.layers]
        self.weights = [[Rows(made, width, depth, 8) for _ in self.counts] for _ in self.layers]
        self.biases = made.standard_normal((num_layers, len(self.counts), width)).astype(np.float32)

    def launches(self, has_bias: bool):
        """What launches each kernel, and where it writes."""
        device, depth = self.device, self.depth
        x, first = device.buffer(self.x.bits), device.buffer(self.first)
        weights = [[device.buffer(weight.bits) for weight in of_layer] for of_layer in self.weights]
        biases = [[device.buffer(bias) for bias in of_layer] for of_layer in self.biases]
        empty = lambda width: device.buffer(Rows(None, self.first[-1], width, self.beside).bits)
        ys, dys, dx = [empty(self.width) for _ in self.layers], [device.buffer(dy.bits) for dy in self.dys], empty(depth)
        pair = lambda held, absent=None: [*held, absent][:2]

        def launch(name: str, before: list, after: list, width: int, layers: int, arguments) -> None:
            at = 0
            for counts in self.tables:
                pointers = lambda held: [of[at + i].pointer.value if of and i < len(counts) else 0 for i in range(MOST_EXPERTS) for of in pair(held)]
                table = struct.pack(f"{4 * MOST_EXPERTS}Q", *pointers(weights), *pointers(biases if has_bias else [None]))
                columns, threads, shared_bytes = KINDS[self.kind]
                shared_bytes = shared_bytes * 2 // 3 if cuda.is_turing() else shared_bytes
                # Some tiles, or all of them, have a block of their own.
                down = -(-int(self.first[-1]) // SIZE) + len(counts) if len(self.tables) > 1 else 2
                grid = (layers * -(-width // columns), down)
                device.launch(f"{self.kind}_{name}", grid, threads, shared_bytes, table, *before, first, *after, at, len(counts), *arguments)
                at += len(counts)

        stride = lambda buffer: buffer.shape[1]
        forward = lambda: launch("forward", [x], pair(ys, np.uint64(0)), self.width, len(ys),
                                 [stride(x), depth + 8, stride(ys[0]), self.width, depth])
        backward = lambda: launch("backward", pair(dys, np.uint64(0)), [dx], depth, 1,
                                  [len(dys), stride(dys[0]), depth + 8, stride(dx), depth, self.width])
        return {"forward": (forward, ys), "backward": (backward, [dx])}


def check_groups(device: cuda.Device, case: tuple, seed: int) -> list[str]:
    kind, (tables, num_layers, width, depth, beside, has_bias) = case
    grouped, wrong = Grouped(device, kind, tables, num_layers, width, depth, beside, np.random.default_rng(seed)), []

    def run() -> list[np.ndarray]:
        results = []
        for launch, outputs in grouped.launches(has_bias).values():
            launch()
            results += [out.read() for out in outputs]
        device.free()
        return results

    found, again = run(), run()
    expected = [[np.zeros((grouped.first[-1], n)) for _ in range(2)] for n in [width] * num_layers + [depth]]
    for expert, (begin, end) in enumerate(zip(grouped.first, grouped.first[1:])):
        for layer in grouped.layers:
            weight, bias = grouped.weights[layer][expert].values, grouped.biases[layer][expert] * has_bias
            for sized, (value, dx) in enumerate(zip(expected[layer], expected[-1])):
                size = np.abs if sized else lambda x: x
                value[begin:end] = size(grouped.x.values[begin:end]) @ size(weight).T + size(bias)
                dx[begin:end] += size(grouped.dys[layer].values[begin:end]) @ size(weight)
    shares = [share(out[:, :value.shape[1]], value, size) for out, (value, size) in zip(found, expected)]
    print(f"{kind}, {tables}, {num_layers} x {width} of {depth}: largest share of what may be off: "
          + ", ".join(f"{of:.2f}" for of in shares))
    if not max(shares) <= 1:
        wrong.append("off")
    if any(a.tobytes() != b.tobytes() for a, b in zip(found, again)):
        wrong.append("a second run differs")
    if any((out[:, value.shape[1]:] != 0xFFFF).any() for out, (value, _) in zip(found, expected)):
        wrong.append("written beside the rows")
    return wrong


def check_ranks(device: cuda.Device, case: tuple, seed: int) -> list[str]:
    counts, inputs, outputs, rank, beside = case
    made, num_experts, scale, wrong = np.random.default_rng(seed), len(counts), 0.75, []
    first = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    rows, padded = int(first[-1]), -(-rank // 8) * 8
    x, dy, y, dx = (Rows(made, rows, width, beside) for width in (inputs, outputs, outputs, inputs))
    a = made.standard_normal((num_experts, rank, inputs)).astype(np.float32) / 8
    b = made.standard_normal((num_experts, outputs, rank)).astype(np.float32) / 8
    tiles, stages = -(-rows // SIZE) + num_experts, 1 if cuda.is_turing() else 2

    def run() -> list[np.ndarray]:
        starts, of_a, of_b = (device.buffer(held) for held in (first, a, b))
        held_x, held_dy, held_y, held_dx = (device.buffer(r.bits) for r in (x, dy, y, dx))
        xa, dxa = (device.buffer(Rows(None, rows, padded, 0).bits) for _ in range(2))
        da, db = (device.buffer(np.full(of.shape, np.nan, np.float32)) for of in (a, b))
        layout = {inputs: (inputs, 1, rank * inputs), outputs: (1, rank, outputs * rank)}
        stride = lambda buffer: buffer.shape[1]

        def product(x, factor, out, width: int, scale: float) -> None:
            device.launch("expert_rank_product", (tiles, -(-padded // 64)), 256, stages * 24 * 1024, x, factor, starts, out, stride(x), padded,
                          *layout[width], num_experts, width, rank, padded, scale)

        def gradient(x, left, out, width: int, scale: float) -> None:
            device.launch("expert_rank_gradient", (-(-width // 256), -(-padded // 64), num_experts), 256, stages * 40 * 1024, x, left, starts, out,
                          stride(x), padded, *layout[width], width, rank, padded, scale)

        def add(left, factor, out, width: int, scale: float) -> None:
            most, columns = (64, 256) if padded <= 64 else (256, 128)
            device.launch(f"expert_rank_add_{most}", (-(-width // columns), tiles), 256, 0, left, factor, starts, out, padded, stride(out),
                          *layout[width], num_experts, width, rank, padded, scale)

        product(held_x, of_a, xa, inputs, 1.0)
        add(xa, of_b, held_y, outputs, scale)
        product(held_dy, of_b, dxa, outputs, scale)
        gradient(held_dy, xa, db, outputs, scale)
        gradient(held_x, dxa, da, inputs, 1.0)
        add(dxa, of_a, held_dx, inputs, 1.0)
        results = [buffer.read() for buffer in (xa, held_y, dxa, db, da, held_dx)]
        device.free()
        return results

    found, again = run(), run()
    xa, found_y, dxa, db, da, found_dx = found
    rounded = lambda x: cuda.from_half(cuda.to_half(x)).astype(np.float64)
    wide = lambda bits: cuda.from_half(bits).astype(np.float64)[:, :rank]
    expert = np.repeat(np.arange(num_experts), counts)
    by_row = lambda left, factor: np.einsum("ij,ijk->ik", left, factor)
    of_a, of_b = rounded(a), rounded(b)
    expected = [(xa, by_row(x.values, of_a[expert].swapaxes(1, 2)), by_row(np.abs(x.values), np.abs(of_a[expert]).swapaxes(1, 2)), 1),
                (found_y, by_row(wide(xa), of_b[expert].swapaxes(1, 2)), by_row(np.abs(wide(xa)), np.abs(of_b[expert]).swapaxes(1, 2)), scale, y),
                (dxa, by_row(dy.values, of_b[expert]), by_row(np.abs(dy.values), np.abs(of_b[expert])), scale),
                (found_dx, by_row(wide(dxa), of_a[expert]), by_row(np.abs(wide(dxa)), np.abs(of_a[expert])), 1, dx)]
    shares = []
    for bits, value, size, by, *before in expected:
        more = before[0].values if before else 0
        shares.append(share(bits[:, :value.shape[1]], more + by * value, np.abs(more) + by * size))
        if before and (bits[:, value.shape[1]:] != 0xFFFF).any():
            wrong.append("written beside the rows")
    if (xa[:, rank:] != 0).any() or (dxa[:, rank:] != 0).any():
        wrong.append("the padding of a rank is not zero")
    for index, (begin, end) in enumerate(zip(first, first[1:])):
        for found_gradient, left, right, by in ((db[index], dy.values[begin:end].T, wide(xa)[begin:end], scale),
                                                (da[index], wide(dxa)[begin:end].T, x.values[begin:end], 1)):
            size = by * np.abs(left) @ np.abs(right)
            shares.append(float((np.abs(found_gradient - by * (left @ right)) / (1e-6 * size + 1e-30)).max()))
    print(f"expert_rank, {counts}, {inputs} to {outputs}, rank {rank}: largest share of what may be off: {max(shares):.2f}")
    if not max(shares) <= 1:
        wrong.append("off")
    if any(one.tobytes() != other.tobytes() for one, other in zip(found, again)):
        wrong.append("a second run differs")
    return wrong


def time(device: cuda.Device, kind: str, case: tuple) -> None:
    num_experts, rows, num_layers, width, depth = case
    tables = [[rows] * min(MOST_EXPERTS, num_experts - at) for at in range(0, num_experts, MOST_EXPERTS)]
    grouped = Grouped(device, kind, tables, num_layers, width, depth, 0, np.random.default_rng(0))
    flops = 2 * num_experts * rows * num_layers * width * depth
    seconds = {name: device.seconds(launch) for name, (launch, _) in grouped.launches(False).items()}
    print(f"{kind}: {num_experts} x {rows} rows, {num_layers} x {width} of {depth}: "
          + ", ".join(f"{name} {of * 1e6:.0f} us, {flops / of / 1e12:.0f} TFLOP/s" for name, of in seconds.items()), flush=True)
    device.free()


def main() -> None:
    parser = cuda.arguments(__doc__)
    parser.add_argument("--time", action="store_true", help="only what products take at sizes of training, on a GPU")
    options = parser.parse_args()
    device = cuda.Device(options, "experts")
    kinds = [kind for kind in KINDS if kind == "grouped" or device.is_hopper() and cuda.numbers == "bf16"]
    for kind in [*kinds, "expert_rank"]:
        device.load(kind)
    if options.time:
        for case in TIMES:
            for kind in kinds:
                time(device, kind, case)
        return
    failures = 0
    for module, check, cases in (("experts", check_routes, [(case, kind) for case in ROUTES for kind in KINDS_OF_ROUTERS]),
                                  ("expert_rank", check_ranks, RANKS), *((kind, check_groups, [(kind, case) for case in GROUPS]) for kind in kinds)):
        for seed, case in enumerate(cases):
            for text in check(device, case, seed):
                failures += 1
                print(f"FAIL {module} {case}: {text}", flush=True)
    sys.exit(failures > 0)


if __name__ == "__main__":
    main()
