#!/usr/bin/env python3
"""Holds the kernels of attention.cu and attention_capped.cu, and on sm_90 those of attention_hopper.cu, against attention in float64.

usage: attention.py [--toolkit DIR] [--driver libcuda.so.1] [--full] [--only all|hopper] [--heads N...] [--time]

An error is the root mean square of the difference to float64 over that of the values. It is held against the error of the same
float64 computation with only the roundings to 16 bits that the kernels are to make: of the probabilities and their gradients as
operands, and of what is written. More than 1.15 of it (sums in f32, the exponential's approximation, values that round the other
way), or a largest difference of more than twice its own, is a failure; so is a bit that differs in a second run, or that changes
beside the rows. Exits 1 then.
"""
import pathlib
import re
import subprocess
import sys
import tempfile

import numpy as np

import device as cuda

def entry_points() -> dict:
    """By kernel and head size: rows of a tile, columns of a tile, warps, and what is particular to the kernel."""
    ampere, turing = (cuda.KERNELS / "attention.cu").read_text().split("#else")
    found = re.findall(r"^(\w+)\((\d+), (\d+), (\d+), (\d+), (\w+).*\)$", turing if cuda.is_turing() else ampere, re.M)
    return {(kind.lower(), int(head)): (int(rows), int(columns), int(warps), last) for kind, head, rows, columns, warps, last in found}


# By kernel and head size: rows of a tile that is loaded, and how many are loaded at a time.
HOPPER_ENTRY_POINTS = {
    (kind.lower(), int(head)): (int(columns), int(slots))
    for kind, head, columns, slots in
    re.findall(r"^(\w+)\((\d+), (\d+), (\d+)\)$", (cuda.KERNELS / "attention_hopper.cu").read_text(), re.M)
}

# Head size, heads, heads of keys and values, lengths of documents, window (0: none), tokens of padding, columns beside the rows.
CASES = [
    (64, 9, 3, (65, 1, 64), 0, 0, 0),
    (64, 4, 1, (200,), 50, 0, 8),
    (64, 1, 1, (5,), 0, 0, 0),
    (64, 2, 2, (63, 130), 0, 3, 24),
    (96, 3, 1, (64, 5, 63), 0, 6, 8),
    (96, 2, 2, (130,), 33, 0, 0),
    (128, 7, 1, (65,), 0, 0, 0),
    (128, 2, 2, (200,), 0, 0, 8),
    (128, 4, 1, (1, 130, 5), 64, 2, 0),
    # More tiles than are loaded at a time.
    (64, 2, 1, (390, 300), 0, 0, 8),
    (128, 1, 1, (33, 620), 300, 1, 0),
    # The half of a block leaves out more tiles than are loaded at a time.
    (64, 2, 1, (192, 450), 0, 0, 0),
    (256, 4, 1, (65,), 0, 0, 8),
    (256, 1, 1, (130, 1), 20, 3, 0),
]
# Likewise, with scores under a cap.
CAP = 5.0
CAPPED = [
    (32, 2, 1, (70,), 0, 0, 8),
    (64, 4, 1, (200, 65), 50, 0, 0),
    (96, 3, 1, (64, 5, 63), 0, 6, 8),
    (128, 4, 1, (1, 130, 5), 64, 2, 0),
    (128, 2, 2, (200,), 0, 0, 8),
    (256, 2, 1, (130, 1), 20, 3, 0),
    (256, 1, 1, (65,), 0, 0, 8),
]
FULL = [
    (head, heads, kv_heads, lengths, window, padding, 8 * (head % 3))
    for head in (32, 64, 96, 128, 256) for heads, kv_heads in ((1, 1), (9, 3), (4, 1), (7, 1))
    for lengths, window, padding in (((1,), 0, 0), ((5, 63), 0, 0), ((64, 64), 0, 1), ((200, 65, 130), 0, 7), ((300, 200), 70, 0))
]

# Of training: Llama 3.1 8B, 3.2 1B, Qwen3 0.6B, and packed short documents.
TIMED = [
    (128, 32, 8, (4096,), 0, 0, 0),
    (128, 32, 8, (16384,), 0, 0, 0),
    (64, 32, 8, (2048,) * 4, 0, 0, 0),
    (128, 16, 8, (2048,) * 4, 0, 0, 0),
    (128, 32, 8, (300, 500, 800, 200, 1000, 600, 696), 0, 0, 0),
    # Few heads of keys: SmolLM3, Qwen2.5 7B, Qwen3 30B-A3B, Qwen2.5 1.5B; and rows of 2048 of Llama 3.1 8B.
    (128, 16, 4, (2048,) * 2, 0, 0, 0),
    (128, 28, 4, (4096,), 0, 0, 0),
    (128, 32, 4, (4096,), 0, 0, 0),
    (128, 12, 2, (2048,) * 4, 0, 0, 0),
    (128, 32, 8, (2048,) * 2, 0, 0, 0),
    (128, 32, 8, (2048,), 0, 0, 0),
]


def first_keys(lengths: tuple, window: int, padding: int) -> np.ndarray:
    starts, keys = 0, []
    for length in lengths:
        at = np.arange(starts, starts + length)
        keys.append(np.maximum(starts, at - window + 1) if window else np.full(length, starts))
        starts += length
    return np.concatenate([*keys, np.arange(starts, starts + padding)]).astype(np.int32)


def last_queries(first_key: np.ndarray) -> np.ndarray:
    return (np.searchsorted(first_key, np.arange(len(first_key)), side="right") - 1).astype(np.int32)


def rounded(x: np.ndarray) -> np.ndarray:
    return cuda.from_half(cuda.to_half(x)).astype(np.float64)


def reference(q, k, v, d_o, first_key, scale, cap, is_rounded):
    """Attention of [tokens, heads, head] and its gradients in float64, with the kernels' roundings to 16 bits or with none; `cap` 0 is none."""
    to = rounded if is_rounded else lambda x: x
    tokens, heads, _ = q.shape
    group = heads // k.shape[1]
    at = np.arange(tokens)
    is_seen = (at[None] <= at[:, None]) & (at[None] >= first_key[:, None])
    o, dq, dk, dv, lse = np.zeros_like(q), np.zeros_like(q), np.zeros_like(k), np.zeros_like(v), np.zeros((heads, tokens))
    for h in range(heads):
        qh, kh, vh, doh = q[:, h], k[:, h // group], v[:, h // group], d_o[:, h]
        scores = qh @ kh.T * scale
        slope = 1.0
        if cap:
            scores = cap * np.tanh(scores / cap)
            slope = 1 - (scores / cap) ** 2
        scores = np.where(is_seen, scores, -np.inf)
        largest = scores.max(1, keepdims=True)
        p = np.exp(scores - largest)
        o[:, h] = to(to(p) @ vh / p.sum(1, keepdims=True))
        lse[h] = largest[:, 0] + np.log(p.sum(1))
        p /= p.sum(1, keepdims=True)
        ds = to(p * (doh @ vh.T - (doh * o[:, h]).sum(1, keepdims=True)) * slope)
        dq[:, h] = to(ds @ kh * scale)
        dk[:, h // group] += ds.T @ qh * scale
        dv[:, h // group] += to(p).T @ doh
    return {"o": o, "lse": lse, "dq": dq, "dk": to(dk), "dv": to(dv)}


class Attention:
    """The kernels over one case's tensors."""

    def __init__(self, device: cuda.Device, case: tuple, seed: int, cap: float = 0.0):
        self.device, self.seed, self.cap = device, seed, cap
        self.head, self.heads, self.kv_heads, lengths, window, padding, self.beside = case
        self.first_key = first_keys(lengths, window, padding)
        self.tokens, self.scale = len(self.first_key), float(self.head) ** -0.5
        self.group = self.heads // self.kv_heads
        # Gradients of keys and values by all heads of a group at once, and by each, of which `*_parts` has the sums.
        of_keys = ("k", "v", "dk", "dv", "dk_joined", "dv_joined")
        self.heads_of = dict.fromkeys(("q", "do", "o", "o_small", "dq"), self.heads) | dict.fromkeys(of_keys, self.kv_heads)
        made = np.random.default_rng(seed)
        # Scores of a few units, and, in every other case, of some tens.
        sizes = (("q", self.heads, 8 if seed % 2 else 2), ("k", self.kv_heads, 1), ("v", self.kv_heads, 1), ("do", self.heads, 1))
        self.inputs = {name: rounded(made.standard_normal((self.tokens, n, self.head)) * size) for name, n, size in sizes}

    def rows(self, x: np.ndarray | None, heads: int) -> np.ndarray:
        """Rows with NaN beside them, and as a whole where there is no `x`."""
        out = np.full((self.tokens, heads * self.head + self.beside), 0xFFFF, np.uint16)
        if x is not None:
            out[:, :heads * self.head] = cuda.to_half(x.reshape(self.tokens, -1))
        return out

    def tensors(self) -> dict[str, cuda.Buffer]:
        per_head = lambda: self.device.buffer(np.full((self.heads, self.tokens), np.nan, np.float32))
        x = {name: self.device.buffer(self.rows(self.inputs.get(name), n)) for name, n in self.heads_of.items()}
        parts = lambda: self.device.buffer(np.full((self.group * self.tokens, self.kv_heads * self.head), np.nan, np.float32))
        order, key_order = (self.device.buffer(order) for order in self.orders())
        return x | {"lse": per_head(), "delta": per_head(), "first_key": self.device.buffer(self.first_key), "order": order,
                    "last_query": self.device.buffer(last_queries(self.first_key)), "key_order": key_order, "dk_parts": parts(),
                    "dv_parts": parts(), "lse_small": per_head()}

    def orders(self) -> tuple[np.ndarray, np.ndarray]:
        """Tiles of 128 queries, from those that see most tiles of keys on, and of 128 keys, from those that most tiles see on."""
        starts = np.arange(0, self.tokens, 128)
        lasts = np.minimum(starts + 128, self.tokens) - 1
        seen = lasts // 128 - self.first_key[starts] // 128
        seen_by = last_queries(self.first_key)[lasts] // 128 - starts // 128
        return tuple(np.argsort(-counts, kind="stable").astype(np.int32) for counts in (seen, seen_by))

    def launches(self, x: dict[str, cuda.Buffer], is_hopper: bool, num_blocks: int) -> dict:
        """What launches each kernel, in order; those of attention_hopper.cu, by queries of `num_blocks`, where there are any."""
        device, tokens, heads_of = self.device, self.tokens, self.heads_of

        def launch_hopper(name, heads, names):
            columns, slots = HOPPER_ENTRY_POINTS[name, self.head]
            is_mapped = lambda n: n in ("q", "k", "v", "do")
            box = (32 if self.head % 64 else 64, 64)
            values = [device.tensor_map(x[n], heads_of[n] * self.head, box) if is_mapped(n) else x[n] for n in names]
            strides = [x[n].shape[1] for n in names if is_strided(n) and not is_mapped(n)]
            num_tiles = -(-tokens // 128)
            if name == "backward_kv":
                grid, shared_bytes = (heads, num_tiles), 2 * self.head * (256 + 2 * slots * columns) + (16 + 8 * columns) * slots + 8
            else:
                grid = (min(num_blocks, heads * num_tiles),)
                shared_bytes = 2 * self.head * ((256 if name == "forward" else 384) + slots * columns) + 16 * slots + 32
            device.launch(f"attention_hopper_{name}_{self.head}", grid, 384, shared_bytes,
                          *values, *strides, tokens, self.heads, self.kv_heads, self.scale)

        def launch(name, heads, names):
            if is_hopper and (name, self.head) in HOPPER_ENTRY_POINTS:
                return launch_hopper(name, heads, names)
            rows, columns, warps, last = entry_points()[name, self.head]
            if name.endswith("forward"):
                shared_bytes = 2 * self.head * (rows + int(last) * columns)
            else:
                shared_bytes = 4 * self.head * (rows + 2 * columns) + 16 * columns * (name == "backward_kv")
            strides = [x[n].shape[1] for n in names if is_strided(n)]
            device.launch(f"{kernels}_{name}_{self.head}", (heads, -(-tokens // 128) * (128 // rows)), 32 * warps, shared_bytes,
                          *[x[n] for n in names], *strides, tokens, self.heads, self.kv_heads, self.scale, self.cap)

        def by_parts():
            launch("backward_kv", self.heads, (*inputs, "key_order", "last_query", "dk_parts", "dv_parts"))
            width = self.kv_heads * self.head
            for d in ("dk", "dv"):
                to = x[f"{d}_joined"]
                device.launch(f"{kernels}_join_parts", (-(-tokens * width // 512),), 128, 0, x[f"{d}_parts"], to, to.shape[1], tokens, width,
                              self.group)

        inputs, kernels = ("q", "k", "v", "do", "lse", "delta"), "attention_capped" if self.cap else "attention"
        is_strided = lambda n: n in heads_of or n.endswith("_parts")
        launches = {
            "forward": lambda: launch("forward", self.heads, ("q", "k", "v", "order", "first_key", "o", "lse")),
            "delta": lambda: device.launch(f"{kernels}_delta", (tokens, -(-self.heads // 4)), 128, 0, x["do"], x["o"], x["delta"],
                                           x["do"].shape[1], x["o"].shape[1], tokens, self.heads, self.head),
            "backward_q": lambda: launch("backward_q", self.heads, (*inputs, "order", "first_key", "dq")),
            "backward_kv": lambda: launch("backward_kv", self.kv_heads, (*inputs, "key_order", "last_query", "dk", "dv")),
        }
        if ("small_forward", self.head) in entry_points():
            launches["small_forward"] = lambda: launch("small_forward", self.heads, ("q", "k", "v", "order", "first_key", "o_small", "lse_small"))
        return launches | ({"backward_kv by parts": by_parts} if self.group > 1 else {})

    def run(self, is_hopper: bool) -> dict[str, np.ndarray]:
        """All kernels: the bits of what they write."""
        x = self.tensors()
        for launch in self.launches(x, is_hopper, 1 + self.seed * 5 % (self.heads * -(-self.tokens // 128))).values():
            launch()
        others = ("dk_joined", "dv_joined") * (self.group > 1) + ("o_small", "lse_small") * (("small_forward", self.head) in entry_points())
        results = {name: x[name].read() for name in ("o", "lse", "dq", "dk", "dv", *others)}
        self.device.free()
        return results

    def time(self, is_hopper: bool) -> None:
        """Prints what the kernels take, and TFLOP/s: of the products that are needed, two forward and five backward."""
        x = self.tensors()
        launches = self.launches(x, is_hopper, self.device.attribute(cuda.MULTIPROCESSOR_COUNT))
        seconds = {name: self.device.seconds(launch) for name, launch in launches.items()}
        seen = int((np.arange(self.tokens) - self.first_key + 1).sum())
        flops = 2 * seen * self.head * self.heads
        forward, backward = seconds["forward"], sum(seconds[name] for name in ("delta", "backward_q", "backward_kv"))
        told = ", ".join(f"{name} {value * 1e6:.0f} us" for name, value in seconds.items())
        print(f"{'hopper' if is_hopper else 'all':6} {self.head:4} {self.heads}/{self.kv_heads} {self.tokens} tokens: {told}; TFLOP/s "
              f"forward {2 * flops / forward / 1e12:.0f}, backward {5 * flops / backward / 1e12:.0f}", flush=True)
        self.device.free()

    def check(self, is_hopper: bool = False) -> list[str]:
        """Prints the errors; gives what is wrong."""
        results, again = self.run(is_hopper), self.run(is_hopper)
        wrong = [f"{name}: a second run differs" for name in results if results[name].tobytes() != again[name].tobytes()]
        values = [self.inputs[name] for name in ("q", "k", "v", "do")]
        exact, with_rounding = (reference(*values, self.first_key, self.scale, self.cap, is_rounded) for is_rounded in (False, True))
        for of in (exact, with_rounding):
            of |= {f"{name}_joined": of[name] for name in ("dk", "dv")} | {f"{name}_small": of[name] for name in ("o", "lse")}
        told = []
        for name, bits in results.items():
            width = exact[name].size // self.tokens
            if name.startswith("lse"):
                x = bits
            else:
                x = cuda.from_half(bits[:, :width]).reshape(exact[name].shape)
                if (bits[:, width:] != 0xFFFF).any():
                    wrong.append(f"{name}: written beside the rows")
            # Rows that see one key have no gradient of scores; inputs are of size 1.
            size = max(np.sqrt(np.mean(exact[name] ** 2)), 0.1)
            differences = (x - exact[name], with_rounding[name] - exact[name])
            error, expected = (np.sqrt(np.mean(d ** 2)) / size for d in differences)
            largest, expected_largest = (np.abs(d).max() / size for d in differences)
            told.append(f"{name} {error:.1e} ({expected:.1e})")
            # lse is not rounded, and gradients of scores can cancel: what is left then are errors of sums in f32.
            if not (error <= expected * 1.15 + 1e-4 and largest <= expected_largest * 2 + 1e-3):
                wrong.append(f"{name}: error {error:.2e} ({expected:.2e}), largest {largest:.2e} ({expected_largest:.2e})")
        kernels = "hopper" if is_hopper else "capped" if self.cap else "all"
        print(f"{kernels:6} {self.head:4} {self.heads}/{self.kv_heads} {self.tokens:4} tokens: {', '.join(told)}", flush=True)
        return wrong


def assembled(toolkit: str) -> list[str]:
    """What is wrong with the code that ptxas makes of attention_hopper.cu: spills, or products that wait for each other."""
    with tempfile.NamedTemporaryFile(suffix=".ptx") as file:
        pathlib.Path(file.name).write_bytes(cuda.ptx("attention_hopper"))
        command = [f"{toolkit}/bin/ptxas", "-v", "-arch", "sm_90a", file.name, "-o", "/dev/null"]
        told = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=True).stderr
    return [line.strip() for line in told.splitlines() if "serialized" in line or re.search(r"[1-9]\d* bytes spill", line)]


def main() -> None:
    parser = cuda.arguments(__doc__)
    parser.add_argument("--only", choices=("all", "hopper"), help="the kernels of attention.cu, or of attention_hopper.cu")
    parser.add_argument("--heads", type=int, nargs="*", help="only these head sizes")
    parser.add_argument("--full", action="store_true", help="all head sizes with all groups and lengths")
    parser.add_argument("--time", action="store_true", help="only what the kernels take at sizes of training, on a GPU")
    options = parser.parse_args()
    device = cuda.Device(options, "attention", "attention_capped")
    failures, kinds = 0, [False] if options.only != "hopper" else []
    if device.is_hopper() and cuda.numbers == "bf16" and options.only != "all":
        device.load("attention_hopper")
        for text in assembled(options.toolkit) if options.toolkit else []:
            failures += 1
            print(f"FAIL {text}", flush=True)
        kinds.append(True)
    if options.time:
        for case in TIMED:
            for is_hopper in kinds:
                Attention(device, case, 0).time(is_hopper)
        return
    print("errors (by rounding alone)")
    cases = [(is_hopper, seed, case, 0.0) for is_hopper in kinds for seed, case in enumerate(FULL if options.full else CASES)]
    cases += [(False, seed, case, CAP) for seed, case in enumerate(CAPPED) if False in kinds]
    for is_hopper, seed, case, cap in cases:
        if options.heads and case[0] not in options.heads or is_hopper and ("forward", case[0]) not in HOPPER_ENTRY_POINTS:
            continue
        for text in Attention(device, case, seed, cap).check(is_hopper):
            failures += 1
            print(f"FAIL {case}, cap {cap}: {text}", flush=True)
    sys.exit(failures > 0)


if __name__ == "__main__":
    main()
