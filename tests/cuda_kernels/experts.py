#!/usr/bin/env python3
"""Holds the kernels of experts.cu, grouped.cu and grouped_hopper.cu against float64.

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
# Rows of the experts in each table, layers, width, depth, columns beside the rows, whether there are biases.
GROUPS = [([[1, 0, 129, 3]], 2, 136, 40, 8, True), ([[0, 0, 40], [200, 0]], 1, 8, 264, 0, False), ([[128, 256]], 1, 520, 32, 0, True), ([[70, 30]], 2, 64, 456, 0, False),
          ([[0] * 40 + [5] + [0] * 20 + [70]], 2, 72, 96, 0, False)]
# Experts, rows of each, layers, width, depth.
TIMES = [(128, 256, 2, 768, 2048), (128, 256, 1, 2048, 768), (32, 512, 2, 2880, 2880), (8, 1024, 2, 14336, 4096)]
MOST_EXPERTS, MOST_BIASES, SIZE = 64, 240, 128
# Of a block: columns of its results, threads, bytes of shared memory.
KINDS = {"grouped": (128, 128, 3 * 2 * 128 * 32 * 2), "grouped_hopper": (256, 256, 4 * (128 + 256) * 64 * 2)}


def check_routes(device: cuda.Device, case: tuple, seed: int) -> list[str]:
    tokens, num_experts, per_token, width, beside = case
    made = np.random.default_rng(seed)
    # Many are equal.
    scores = np.round(made.standard_normal((tokens, num_experts)) * 4).astype(np.float32) / 2 + 0
    if tokens > 4:
        scores[3], scores[4] = -np.inf, 0
        scores[3, -per_token:] = -1
    scales = made.uniform(0.5, 2, num_experts).astype(np.float32)
    chosen = np.argsort(-scores, 1, kind="stable")[:, :per_token]
    slots = np.argsort(chosen.ravel(), kind="stable")
    rows = len(slots)
    places = np.empty(rows, np.int64)
    places[slots] = np.arange(rows)
    first = np.searchsorted(chosen.ravel()[slots], np.arange(num_experts + 1))
    x, y, sums = (Rows(made, n, width, beside + 8 * i) for i, n in enumerate((tokens, rows, tokens)))
    of_rows = made.standard_normal(rows).astype(np.float32)
    biases = made.standard_normal((num_experts, width)).astype(np.float32)
    by_token, wrong = places.reshape(tokens, per_token), []
    for is_of_chosen in (0, 1):
        weighted, mask = bool(is_of_chosen), np.full(scores.shape, not is_of_chosen)
        np.put_along_axis(mask, chosen, True, 1)
        exponents = np.exp(scores.astype(np.float64) - scores.max(1, keepdims=True)) * mask
        probabilities = exponents / exponents.sum(1, keepdims=True)

        def run() -> list[np.ndarray]:
            empty = lambda *shape, dtype=np.int32: device.buffer(np.full(shape, -7 if dtype == np.int32 else np.nan, dtype))
            of_all, weights = empty(tokens, num_experts, dtype=np.float32), empty(rows, dtype=np.float32)
            found, starts, table, back = empty(rows), empty(num_experts + 1), empty(rows), empty(rows)
            warps, across = lambda rows: (-(-rows // 8),), -(-width // 1024)
            device.launch("experts_route", warps(tokens), 256, 0, device.buffer(scores), device.buffer(scales) if weighted else np.uint64(0),
                          of_all, found, weights, tokens, num_experts, per_token, is_of_chosen)
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
                          per_token)
            results = [a.read() for a in (of_all, weights, found, starts, table, back, gathered, sum_, products, scores_)]
            device.free()
            return results

        results, again = run(), run()
        of_all, weights, found, starts, table, back, gathered, sum_, products, of_scores = results
        if any((a != b).any() for a, b in ((found, chosen.ravel()), (starts, first), (table, slots), (back, places))):
            wrong.append("other experts, or another order")
            continue
        expected_weights = np.take_along_axis(probabilities * (scales if weighted else 1), chosen, 1)
        weight = weights.astype(np.float64) if weighted else np.ones(rows)
        of_gathered = x.values[slots // per_token] * weight[slots][:, None]
        terms = y.values[by_token] * weight.reshape(tokens, per_token, 1)
        of_products = cuda.from_half(gathered[:, :width]) * y.values
        of_biases = y.values * biases[chosen.ravel()[slots]] * weighted
        of_slots = of_rows[places].reshape(tokens, per_token).astype(np.float64)
        expected_scores = -of_all * of_slots.sum(1, keepdims=True)
        np.put_along_axis(expected_scores, chosen, np.take_along_axis(expected_scores, chosen, 1) + of_slots, 1)
        f32 = lambda found, value, size: float((np.abs(found - value) / (1e-6 * size + 1e-30)).max())
        shares = {"probabilities": f32(of_all, probabilities, probabilities), "weights": f32(weights.reshape(chosen.shape), expected_weights, expected_weights),
                  "gathered": share(gathered[:, :width], of_gathered, np.abs(of_gathered) + 1e-30),
                  "combined": share(sum_[:, :width], sums.values + terms.sum(1), np.abs(sums.values) + np.abs(terms).sum(1)),
                  "products": f32(products, (of_products + of_biases).sum(1), (np.abs(of_products) + np.abs(of_biases)).sum(1)),
                  "scores": f32(of_scores, expected_scores, np.abs(of_slots).sum(1).max())}
        print(f"experts, {tokens} x {per_token} of {num_experts}, {width} wide: largest share of what may be off: "
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
                grid = (layers * -(-width // columns), -(-int(self.first[-1]) // SIZE) + len(counts))
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
    for kind in kinds:
        device.load(kind)
    if options.time:
        for case in TIMES:
            for kind in kinds:
                time(device, kind, case)
        return
    failures = 0
    for module, check, cases in (("experts", check_routes, ROUTES), *((kind, check_groups, [(kind, case) for case in GROUPS]) for kind in kinds)):
        for seed, case in enumerate(cases):
            for text in check(device, case, seed):
                failures += 1
                print(f"FAIL {module} {case}: {text}", flush=True)
    sys.exit(failures > 0)


if __name__ == "__main__":
    main()
