#!/usr/bin/env python3
"""Holds the kernels of delta_rule.cu and short_conv.cu against float64: the rule token by token, as its definition has it.

usage: delta_rule.py [--toolkit DIR] [--driver libcuda.so.1]

The rule's errors are norms over those of the result, of operands that are rounded to 16 bits on the way: at most 0.6 %. The
convolution's may be off by half of the last bit of 16, and by 1e-5 of the sum of the terms' sizes (the exponential's argument is rounded). A bit that differs in a second run is a failure, and what is not zero outside of all documents. Exits 1 then.
"""
import sys

import numpy as np

import device as cuda

CHUNK, KEY, SLICE, EPS = 64, 128, 32, 1e-6
# Documents (first, tokens), tokens, heads of keys and of values, numbers of a value, columns beside the rows.
RULES = [([(0, 150), (150, 1), (151, 64), (215, 70)], 290, 1, 2, 64, 8), ([(3, 130)], 133, 2, 2, 128, 0),
         ([(0, 40), (100, 20)], 130, 1, 3, 32, 16)]
# Documents, tokens, channels, columns beside the rows.
CONVOLUTIONS = [([(0, 5), (5, 1), (6, 2), (8, 62)], 75, 1032, 8), ([(0, 33)], 33, 8, 0)]


def documents_of(documents: list, tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """First and last token of the document of every token; itself outside."""
    first, last = np.arange(tokens, dtype=np.int32), np.arange(tokens, dtype=np.int32)
    for start, length in documents:
        first[start:start + length], last[start:start + length] = start, start + length - 1
    return first, last


def tables(documents: list, tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Chunks, and the first of every document and how many it has, gaps between documents as well."""
    starts, ends = [start for start, _ in documents], [start + length for start, length in documents]
    gaps = [(end, end - start) for end, start in zip([0, *ends], [*starts, tokens]) if end < start]
    chunks, by_document = [], []
    for start, length in [*documents, *gaps]:
        count = -(-abs(length) // CHUNK)
        by_document.append((len(chunks), count))
        chunks += [(start + i * CHUNK, min(CHUNK, length - i * CHUNK) if length > 0 else length) for i in range(count)]
    return np.array(chunks, np.int32), np.array(by_document, np.int32)


def unit(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    factor = 1 / np.sqrt((x**2).sum(-1, keepdims=True) + EPS)
    return x * factor, factor


def rule(q, k, v, decay, strength, documents: list, d_o) -> list[np.ndarray]:
    """Output and gradients, [tokens, heads, ..]; of the logarithms of strengths."""
    o, dq, dk, dv, dg, db = (np.zeros_like(x) for x in (v, q, k, v, decay, strength))
    (qn, fq), (kn, fk) = unit(q), unit(k)
    qn = qn / np.sqrt(KEY)
    outer = lambda a, b: a[:, :, None] * b[:, None, :]
    for start, length in documents:
        states = [np.zeros((q.shape[1], KEY, v.shape[2]))]
        for t in range(start, start + length):
            faded = states[-1] * np.exp(decay[t])[:, None, None]
            u = v[t] - np.einsum("hkv,hk->hv", faded, kn[t])
            states.append(faded + outer(kn[t] * strength[t][:, None], u))
            o[t] = np.einsum("hkv,hk->hv", states[-1], qn[t])
        d_state = np.zeros_like(states[0])
        for t in reversed(range(start, start + length)):
            before, after = states[t - start], states[t - start + 1]
            factor = np.exp(decay[t])[:, None, None]
            u = v[t] - np.einsum("hkv,hk->hv", before * factor, kn[t])
            dq[t] = np.einsum("hkv,hv->hk", after, d_o[t])
            d_state += outer(qn[t], d_o[t])
            b = strength[t][:, None]
            du = b * np.einsum("hkv,hk->hv", d_state, kn[t])
            db[t] = strength[t] * np.einsum("hkv,hk,hv->h", d_state, kn[t], u)
            dk[t] = b * np.einsum("hkv,hv->hk", d_state, u) - np.einsum("hkv,hv->hk", before * factor, du)
            dv[t] = du
            d_faded = d_state - outer(kn[t], du)
            dg[t] = (d_faded * before * factor).sum((1, 2))
            d_state = d_faded * factor
    back = lambda d, x, f: (d - x * (x * d).sum(-1, keepdims=True)) * f
    return [o, back(dq / np.sqrt(KEY), qn * np.sqrt(KEY), fq), back(dk, kn, fk), dv, dg, db]


def check_rule(device: cuda.Device, case: tuple, seed: int) -> list[str]:
    documents, tokens, num_keys, num_values, width, beside = case
    made = np.random.default_rng(seed)
    group, key_width, value_width = num_values // num_keys, num_keys * KEY, num_values * width
    # Keys of a head are alike, so that a token overwrites much of what those before have written.
    parts = [made.standard_normal((tokens, key_width)), made.standard_normal((tokens, key_width)) + 0.7 * made.standard_normal(key_width),
             made.standard_normal((tokens, value_width)), np.full((tokens, beside), np.nan)]
    qkv = cuda.to_half(np.concatenate(parts, 1))
    decay, strength = -made.uniform(0, 0.3, (tokens, num_values)).astype(np.float32), made.uniform(0, 1, (tokens, num_values)).astype(np.float32)
    # Tokens that forget all, write nothing, or have no key.
    some = lambda: made.integers(0, tokens, tokens // 16)
    decay[some()], strength[some()], qkv[some(), key_width:2 * key_width] = -1e4, 0, 0
    first, last = documents_of(documents, tokens)
    is_in = np.zeros(tokens, bool)
    for start, length in documents:
        is_in[start:start + length] = True
    d_o = cuda.to_half(made.standard_normal((tokens, value_width)) * is_in[:, None])
    chunks, by_document = tables(documents, tokens)
    num_chunks, empty = len(chunks), lambda shape, dtype: np.full(shape, np.nan if dtype == np.float32 else 0xFFFF, dtype)

    def run() -> list[np.ndarray]:
        held, g, b, d = (device.buffer(x) for x in (qkv, decay, strength, d_o))
        of_chunks, of_documents = device.buffer(chunks), device.buffer(by_document)
        scratch = lambda *shape, dtype=np.uint16: device.buffer(empty(shape, dtype))
        sums, factors = scratch(num_chunks, num_values, CHUNK, dtype=np.float32), scratch(num_chunks, num_keys, 2, CHUNK, dtype=np.float32)
        inverse, weights = (scratch(num_chunks, num_values, CHUNK, CHUNK) for _ in range(2))
        stride, heads = qkv.shape[1], (num_keys, num_values)
        device.launch("delta_rule_prepare", (num_chunks, num_keys), 128, 33280, held, g, b, of_chunks, sums, factors, inverse, weights,
                      stride, *heads)
        grid, o = (num_values * width // SLICE, len(by_document)), scratch(tokens, value_width)
        along = (b, of_chunks, of_documents, sums, factors, inverse)
        device.launch("delta_rule_forward", grid, 128, 61440 if cuda.is_turing() else 69632, held, *along, weights, o, stride, *heads, width)
        written, known = scratch(tokens, value_width), scratch(tokens, value_width)
        states, d_states = (scratch(num_chunks, num_values, KEY, width) for _ in range(2))
        device.launch("delta_rule_states", grid, 128, 40960, held, *along, written, states, stride, *heads, width)
        dqkv = scratch(tokens, 2 * key_width + value_width)
        dv = np.uint64(dqkv.pointer.value + 2 * 2 * key_width)
        device.launch("delta_rule_backward_states", grid, 128, 57344 if cuda.is_turing() else 65536, d, held, *along, weights, known, d_states, dv, d_o.shape[1], stride,
                      dqkv.shape[1], *heads, width)
        d_queries, d_keys = (scratch(tokens, num_values, KEY, dtype=np.float32) for _ in range(2))
        d_decay, d_strength = (scratch(tokens, num_values, dtype=np.float32) for _ in range(2))
        device.launch("delta_rule_backward_chunks", (num_chunks, num_values), 256, 61440, d, held, b, of_chunks, sums, factors, written,
                      known, states, d_states, d_queries, d_keys, d_decay, d_strength, d_o.shape[1], stride, *heads, width)
        device.launch("delta_rule_backward_keys", (-(-tokens * num_keys // 4),), 256, 0, held, d_queries, d_keys, dqkv, stride, dqkv.shape[1],
                      tokens, *heads)
        results = [x.read() for x in (o, dqkv, d_decay, d_strength)]
        device.free()
        return results

    x = cuda.from_half(qkv).astype(np.float64)
    split = lambda x, width: x.reshape(tokens, -1, width)
    q, k = (np.repeat(split(x[:, i * key_width:][:, :key_width], KEY), group, 1) for i in (0, 1))
    v, gradient = split(x[:, 2 * key_width:][:, :value_width], width), split(cuda.from_half(d_o).astype(np.float64), width)
    o, dq, dk, dv, dg, db = rule(q, k, v, decay.astype(np.float64), strength.astype(np.float64), documents, gradient)
    dq, dk = (x.reshape(tokens, num_keys, group, KEY).sum(2) for x in (dq, dk))
    found, again = run(), run()
    dqkv = cuda.from_half(found[1])
    pairs = [("o", cuda.from_half(found[0]), o), ("dq", dqkv[:, :key_width], dq), ("dk", dqkv[:, key_width:2 * key_width], dk),
             ("dv", dqkv[:, 2 * key_width:], dv), ("d decay", found[2], dg), ("d strength", found[3], db)]
    errors = {name: float(np.linalg.norm(a - e.reshape(tokens, -1)) / np.linalg.norm(e)) for name, a, e in pairs}
    print(f"delta rule, {tokens} x {num_keys}, {num_values} x {width}: " + ", ".join(f"{name} {of:.2e}" for name, of in errors.items()))
    wrong = [f"{name} off by {of:.1e}" for name, of in errors.items() if not of <= 0.006]
    if any(a.tobytes() != b.tobytes() for a, b in zip(found, again)):
        wrong.append("a second run differs")
    if any(a[~is_in].any() for _, a, _ in pairs):
        wrong.append("not zero outside of all documents")
    return wrong


def check_convolution(device: cuda.Device, case: tuple, seed: int) -> list[str]:
    documents, tokens, channels, beside = case
    made, taps = np.random.default_rng(seed), 4
    padded = lambda x: np.concatenate([cuda.to_half(x), np.full((tokens, beside), 0xFFFF, np.uint16)], 1)
    x, dy = (padded(made.standard_normal((tokens, channels)) * 2) for _ in range(2))
    weight, (first, last) = made.standard_normal((taps, channels)).astype(np.float32), documents_of(documents, tokens)
    xs, dys = (cuda.from_half(a[:, :channels]).astype(np.float64) for a in (x, dy))

    def run() -> list[np.ndarray]:
        held, w, f, l, d = (device.buffer(a) for a in (x, weight, first, last, dy))
        y, dx = (device.buffer(np.full_like(x, 0xFFFF)) for _ in range(2))
        grid, strides = (-(-channels // 1024), -(-tokens // 32)), (x.shape[1],) * 2
        device.launch("short_conv", grid, 128, 0, held, w, f, y, *strides, tokens, channels)
        device.launch("short_conv_backward", grid, 128, 0, d, held, w, f, l, dx, *strides, x.shape[1], tokens, channels)
        results = [a.read() for a in (y, dx)]
        device.free()
        return results

    u, size = np.zeros_like(xs), np.zeros_like(xs)
    for shift in range(taps):
        is_seen = (np.arange(tokens) - shift >= first)[:, None]
        term = np.roll(xs, shift, 0) * weight[taps - 1 - shift] * is_seen
        u, size = u + term, size + np.abs(term)
    sigmoid = 1 / (1 + np.exp(-u))
    slope = sigmoid * (1 + u * (1 - sigmoid))
    du, dx, size_of_dx = dys * slope, np.zeros_like(xs), np.zeros_like(xs)
    # An error of u reaches the slope, which is at most as steep as 1/2.
    size_of_du = np.abs(du) + np.abs(dys) * size
    for shift in range(taps):
        is_read = (np.arange(tokens) + shift <= last)[:, None]
        dx += np.roll(du, -shift, 0) * weight[taps - 1 - shift] * is_read
        size_of_dx += np.roll(size_of_du, -shift, 0) * np.abs(weight[taps - 1 - shift]) * is_read
    found, again = run(), run()
    share = lambda a, value, size: float((np.abs(cuda.from_half(a[:, :channels]) - value) / (cuda.half_bit(value) + 1e-5 * size + 1e-30)).max())
    shares = [share(found[0], u * sigmoid, size), share(found[1], dx, size_of_dx)]
    print(f"convolution, {tokens} x {channels}: largest share of what may be off: y {shares[0]:.2f}, dx {shares[1]:.2f}")
    wrong = ["off"] if not max(shares) <= 1 else []
    if any(a.tobytes() != b.tobytes() for a, b in zip(found, again)):
        wrong.append("a second run differs")
    return wrong + ["written beside the rows"] * any((a[:, channels:] != 0xFFFF).any() for a in found)


def check_gated(device: cuda.Device, case: tuple, seed: int) -> list[str]:
    """Against the definition: c times the convolution of b x."""
    documents, tokens, channels, beside = case
    draw, taps = np.random.default_rng(seed), 4
    first, last = documents_of(documents, tokens)
    bcx = cuda.to_half(draw.uniform(-2, 2, (tokens, 3 * channels + beside)).astype(np.float32))
    dy = cuda.to_half(draw.uniform(-2, 2, (tokens, channels + beside)).astype(np.float32))
    weight = draw.uniform(-1, 1, (taps, channels)).astype(np.float32)
    weight[0] = 0  # as of LFM2's three taps
    b, c, x = np.split(cuda.from_half(bcx[:, :3 * channels]).astype(np.float64), 3, axis=1)
    dys = cuda.from_half(dy[:, :channels]).astype(np.float64)

    def run() -> list:
        held, w, f, l, d = (device.buffer(a) for a in (bcx, weight, first, last, dy))
        y, d_bcx = device.buffer(np.full_like(dy, 0xFFFF)), device.buffer(np.full_like(bcx, 0xFFFF))
        grid = -(-channels // 1024), -(-tokens // 32)
        device.launch("gated_conv", grid, 128, 0, held, w, f, y, bcx.shape[1], dy.shape[1], tokens, channels)
        device.launch("gated_conv_backward", grid, 128, 0, d, held, w, f, l, d_bcx, dy.shape[1], bcx.shape[1], bcx.shape[1], tokens, channels)
        results = [a.read() for a in (y, d_bcx)]
        device.free()
        return results

    u, size, dbx, size_of_dbx = (np.zeros_like(b) for _ in range(4))
    for shift in range(taps):
        is_seen = (np.arange(tokens) - shift >= first)[:, None]
        term = np.roll(b * x, shift, 0) * weight[taps - 1 - shift] * is_seen
        u, size = u + term, size + np.abs(term)
        is_read = (np.arange(tokens) + shift <= last)[:, None]
        term = np.roll(dys * c, -shift, 0) * weight[taps - 1 - shift] * is_read
        dbx, size_of_dbx = dbx + term, size_of_dbx + np.abs(term)
    expected = [(c * u, np.abs(c) * size), (np.hstack([dbx * x, dys * u, dbx * b]),
                np.hstack([size_of_dbx * np.abs(x), np.abs(dys) * size, size_of_dbx * np.abs(b)]))]
    found, again = run(), run()
    share = lambda a, value, size: float((np.abs(cuda.from_half(a[:, :value.shape[1]]) - value) / (cuda.half_bit(value) + 1e-5 * size + 1e-30)).max())
    shares = [share(a, *of) for a, of in zip(found, expected)]
    print(f"gated convolution, {tokens} x {channels}: largest share of what may be off: y {shares[0]:.2f}, d_bcx {shares[1]:.2f}")
    wrong = ["off"] if not max(shares) <= 1 else []
    if any(a.tobytes() != b.tobytes() for a, b in zip(found, again)):
        wrong.append("a second run differs")
    beside = [a[:, of[0].shape[1]:] for a, of in zip(found, expected)]
    return wrong + ["written beside the rows"] * any((a != 0xFFFF).any() for a in beside)


def main() -> None:
    options = cuda.arguments(__doc__).parse_args()
    failures = 0
    for module, check, cases in (("short_conv", check_convolution, CONVOLUTIONS), ("short_conv", check_gated, CONVOLUTIONS), ("delta_rule", check_rule, RULES)):
        device = cuda.Device(options, module)
        for seed, case in enumerate(cases):
            for text in check(device, case, seed):
                failures += 1
                print(f"FAIL {module} {case}: {text}", flush=True)
    sys.exit(failures > 0)


if __name__ == "__main__":
    main()
