#!/usr/bin/env python3
"""Holds the kernels of next.cu against the same sums in float64.

usage: next.py [--toolkit DIR] [--driver libcuda.so.1] [--numbers f16.75]

The largest difference of outputs is held against half of the last bit of 16 of the largest value beside 1e-5 of it, that of states
against 1e-5 of the largest; the last inputs of convolutions must be those of the tokens. Each text alone must have the bits that it
has among all, and what is beside rows stays. Exits 1 otherwise.
"""
import struct
import sys

import numpy as np

import device as cuda

TEXTS, TAPS, COLUMNS = 64, 4, 32
LENGTHS = [[1] * 64, [1, 40, 2, 16, 17, 1], [3]]
# Channels, taps, whether there is a bias, whether it is gated, columns beside the rows.
CONVOLUTIONS = [(1032, 4, False, False, 0), (72, 4, True, False, 8), (2048, 3, False, True, 0), (40, 3, True, False, 0), (8, 1, False, False, 8)]
# Heads, heads of queries and keys, rows and columns of a state, whether the delta rule, columns beside the rows.
STATES = [(4, 2, 128, 64, True, 0), (2, 2, 128, 128, True, 8), (6, 2, 64, 32, False, 0), (2, 1, 256, 64, False, 24), (3, 3, 64, 96, True, 0)]


def table(texts: list, states: list) -> bytes:
    entries = b"".join(struct.pack("<QII", state.pointer.value, first, count) for (first, count), state in zip(texts, states))
    return entries + bytes(16 * TEXTS - len(entries))


def spans(lengths: list) -> list:
    return [(sum(lengths[:text]), count) for text, count in enumerate(lengths)]


def beside(device: cuda.Device, x: np.ndarray, columns: int) -> cuda.Buffer:
    return device.buffer(np.pad(x, ((0, 0), (0, columns)), constant_values=0xFFFF))


def value(x: np.ndarray) -> np.ndarray:
    return cuda.from_half(x).astype(np.float64)


def convolve(device: cuda.Device, case: tuple, texts: list, x, weight, bias, states) -> tuple:
    channels, taps, _, gated, columns = case
    held = [device.buffer(states[text]) for text, _ in texts]
    y, x = device.buffer(np.full((len(x), channels + columns), 0xFFFF, np.uint16)), beside(device, x, columns)
    padded = np.pad(weight, ((TAPS - taps, 0), (0, 0)))
    device.launch("convolve_next", (len(texts), -(-channels // 1024)), 128, 0, x, device.buffer(padded),
                  np.uint64(0) if bias is None else device.buffer(bias), y, table([span for _, span in texts], held), x.shape[1],
                  y.shape[1], channels, taps, int(gated))
    results = y.read(), [state.read() for state in held]
    device.free()
    return results


def check_convolution(device: cuda.Device, case: tuple, lengths: list, seed: int) -> list[str]:
    channels, taps, has_bias, gated, columns = case
    made, wrong, worst = np.random.default_rng(seed), [], 0.0
    tokens, width = sum(lengths), channels * (3 if gated else 1)
    x, weight = cuda.to_half(made.standard_normal((tokens, width))), made.standard_normal((taps, channels)).astype(np.float32)
    bias = made.standard_normal(channels).astype(np.float32) if has_bias else None
    states = [cuda.to_half(made.standard_normal((max(taps - 1, 1), width))) for _ in lengths]
    texts = list(enumerate(spans(lengths)))
    y, held = convolve(device, case, texts, x, weight, bias, states)
    for text, (first, count) in texts:
        rows = slice(first, first + count)
        all_rows = np.concatenate([states[text][:taps - 1], x[rows]])
        if taps > 1 and all_rows[-(taps - 1):].tobytes() != held[text].tobytes():
            wrong.append(f"text {text}: other inputs are kept")
        alone = convolve(device, case, [texts[text]], x, weight, bias, states)
        if alone[0][rows].tobytes() != y[rows].tobytes():
            wrong.append(f"text {text}: other bits alone")
        b, c, of = (value(all_rows[:, part * channels:(part + 1) * channels]) if gated else value(all_rows) for part in (0, 1, 2))
        inputs = b * of if gated else of
        u = sum(weight[j].astype(np.float64) * inputs[j:j + count] for j in range(taps)) + (0 if bias is None else bias)
        exact = c[taps - 1:] * u if gated else u / (1 + np.exp(-u))
        share = np.abs(value(y[rows, :channels]) - exact) / (cuda.half_bit(exact) + 1e-5 * np.abs(exact).max())
        worst = max(worst, share.max())
    wrong += ["what is beside the rows was written"] if (y[:, channels:] != 0xFFFF).any() else []
    print(f"{channels} channels of {taps}, gated {gated}, {len(lengths)} texts: largest share of what may be off {worst:.2f}", flush=True)
    return wrong + (["off"] if not worst <= 1 else [])


def run_states(device: cuda.Device, case: tuple, texts: list, x, gates, states) -> tuple:
    heads, key_heads, rows, width, is_delta, columns = case
    held = [device.buffer(states[text]) for text, _ in texts]
    x, gates = beside(device, x, columns), [device.buffer(gate) for gate in gates]
    o = device.buffer(np.full((x.shape[0], heads * width + columns), 0xFFFF, np.uint16))
    of_keys = key_heads * rows
    starts = (0, of_keys, 2 * of_keys) if is_delta else (heads * width + of_keys, heads * width, 0)
    device.launch(f"states_next_{rows}", (len(texts), heads, width // COLUMNS), 256 if rows == 256 else 128, 0, x, *gates, o, table([span for _, span in texts], held),
                  *starts, heads // key_heads, width, x.shape[1], o.shape[1], heads, heads, int(is_delta), float(rows) ** -0.5)
    results = o.read(), [state.read() for state in held]
    device.free()
    return results


def expected(case: tuple, x: np.ndarray, decay: np.ndarray, strength: np.ndarray, state: np.ndarray) -> tuple:
    """Of one text: what its tokens read, and its state after them."""
    heads, key_heads, rows, width, is_delta, _ = case
    state, outputs, of_keys = state.astype(np.float64), [], key_heads * rows
    widths = [of_keys, of_keys, heads * width] if is_delta else [heads * width, of_keys, of_keys]
    for token, a, b in zip(value(x), decay, strength):
        parts = np.split(token, np.cumsum(widths)[:-1])
        q, k, v = parts if is_delta else parts[::-1]
        q, k = (np.repeat(of.reshape(key_heads, rows), heads // key_heads, 0) for of in (q, k))
        v = v.reshape(heads, width)
        if is_delta:
            q, k = (of / np.sqrt((of * of).sum(1, keepdims=True) + 1e-6) for of in (q * 1, k * 1))
            q = q * rows ** -0.5
        state = state * np.exp(a.astype(np.float64))[:, None, None]
        known = np.einsum("hkv,hk->hv", state, k) if is_delta else 0
        state = state + np.einsum("hk,hv->hkv", k, b[:, None] * (v - known))
        outputs.append(np.einsum("hkv,hk->hv", state, q).reshape(-1))
    return np.array(outputs), state


def check_states(device: cuda.Device, case: tuple, lengths: list, seed: int) -> list[str]:
    heads, key_heads, rows, width, is_delta, columns = case
    made, wrong, worst = np.random.default_rng(seed), [], [0.0, 0.0]
    tokens = sum(lengths)
    x = cuda.to_half(made.standard_normal((tokens, 2 * key_heads * rows + heads * width)))
    gates = [(-made.random((tokens, heads))).astype(np.float32), made.random((tokens, heads)).astype(np.float32)]
    states = [made.standard_normal((heads, rows, width)).astype(np.float32) for _ in lengths]
    texts = list(enumerate(spans(lengths)))
    o, held = run_states(device, case, texts, x, gates, states)
    for text, (first, count) in texts:
        of = slice(first, first + count)
        alone = run_states(device, case, [texts[text]], x, gates, states)
        if alone[0][of].tobytes() != o[of].tobytes() or alone[1][0].tobytes() != held[text].tobytes():
            wrong.append(f"text {text}: other bits alone")
        exact, state = expected(case, x[of], gates[0][of], gates[1][of], states[text])
        share = np.abs(value(o[of, :heads * width]) - exact) / (cuda.half_bit(exact) + 1e-5 * np.abs(exact).max())
        worst = [max(worst[0], share.max()), max(worst[1], np.abs(held[text] - state).max() / (1e-5 * np.abs(state).max()))]
    wrong += ["what is beside the rows was written"] if (o[:, heads * width:] != 0xFFFF).any() else []
    print(f"{heads} heads on {key_heads} of {rows} x {width}, delta rule {is_delta}, {len(lengths)} texts: largest share of what may be off: "
          f"o {worst[0]:.2f}, state {worst[1]:.2f}", flush=True)
    return wrong + (["off"] if not max(worst) <= 1 else [])


def main() -> None:
    device = cuda.Device(cuda.arguments(__doc__).parse_args(), "next")
    wrong = []
    for check, cases in ((check_convolution, CONVOLUTIONS), (check_states, STATES)):
        # All texts with the first case, and few with the others.
        for seed, case in enumerate(cases):
            for lengths in LENGTHS if seed == 0 else LENGTHS[1:]:
                wrong += [f"{case}, {len(lengths)} texts: {what}" for what in check(device, case, lengths, seed)]
    print("\n".join(wrong))
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
