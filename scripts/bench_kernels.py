#!/usr/bin/env python3
"""Every operation of a step on the CPU next to PyTorch's, on this machine, in one run.

usage: bench_kernels.py [--filter TEXT] [--out benches/results]

Runs `cargo bench --bench kernels`, then the same operations on the same shapes in PyTorch, as transformers and PEFT
write them. A time is the median of runs; a backward's covers `torch.autograd.grad` alone. `plain` is our version in
plain tensor calls. In bf16, PyTorch has every tensor in bf16; ours has activations in f32 and products in bf16.
Needs Rust and PyTorch. Prints a table and writes JSON with hardware, versions and command line to --out.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import time

import benchlib

ROOT = pathlib.Path(__file__).resolve().parent.parent
TOKENS, TARGETS = 1024, 512
MODELS = {"smollm2": ("smollm2-135m.json", 16), "stories": ("stories15m.json", 8)}
SECONDS = 1.0


def median_seconds(work) -> float:
    """Median of at least five runs, after two that do not count."""
    work(), work()
    seconds, began = [], time.perf_counter()
    while len(seconds) < 5 or time.perf_counter() - began < SECONDS:
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def torch_operations(config: dict, rank: int, dtype):
    """Names and functions of PyTorch's operations. Each pair is created on demand, so that memory is freed."""
    import torch
    import torch.nn.functional as F

    hidden, ffn, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    dim = config.get("head_dim", hidden // heads)
    rand = lambda *shape, grad=False: (torch.rand(shape) * 2 - 1).to(dtype).requires_grad_(grad)

    def without_grad(work):
        def run():
            with torch.no_grad():
                return work()

        return run

    def backward(output, inputs):
        upstream = torch.rand_like(output)
        return lambda: torch.autograd.grad(output, inputs, upstream, retain_graph=True)

    shapes = {"q_proj": (heads * dim, hidden), "k_proj": (kv_heads * dim, hidden), "gate_proj": (ffn, hidden), "down_proj": (hidden, ffn)}
    for role, (rows, columns) in shapes.items():
        x, w, a, b = rand(TOKENS, columns, grad=True), rand(rows, columns), rand(rank, columns, grad=True), rand(rows, rank, grad=True)
        linear = lambda: F.linear(x, w) + F.linear(F.linear(x, a), b) * 2.0
        yield f"linear {role}", without_grad(linear)
        yield f"linear_backward {role}", backward(linear(), (x, a, b))

    h, head, targets = rand(TARGETS, hidden, grad=True), rand(vocab, hidden), torch.arange(TARGETS)

    def head_and_loss():
        loss = F.cross_entropy(F.linear(h, head).float(), targets, reduction="sum")
        return torch.autograd.grad(loss, (h,))

    yield "linear_cross_entropy", head_and_loss
    if dtype != torch.float32:
        return

    for rows, length in ((2, 512), (1, 2048)):
        q = rand(rows, length, heads, dim, grad=True)
        k, v = rand(rows, length, kv_heads, dim, grad=True), rand(rows, length, kv_heads, dim, grad=True)

        def attention():
            o = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True, enable_gqa=heads != kv_heads)
            return o.transpose(1, 2).reshape(rows * length, heads * dim)

        yield f"attention {rows}x{length}", without_grad(attention)
        yield f"attention_backward {rows}x{length}", backward(attention(), (q, k, v))

    gate, up = rand(TOKENS, ffn, grad=True), rand(TOKENS, ffn, grad=True)
    swiglu = lambda: F.silu(gate) * up
    yield "swiglu", without_grad(swiglu)
    yield "swiglu_backward", backward(swiglu(), (gate, up))

    x, weight = rand(TOKENS, hidden, grad=True), rand(hidden)
    norm = lambda: weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5))
    yield "rms_norm", without_grad(norm)
    yield "rms_norm_backward", backward(norm(), (x,))

    q = rand(1, heads, TOKENS, dim)
    cos, sin = rand(1, 1, TOKENS, dim), rand(1, 1, TOKENS, dim)
    half = dim // 2
    yield "rotate", lambda: q * cos + torch.cat((-q[..., half:], q[..., :half]), -1) * sin

    parameter = torch.nn.Parameter(rand(2048, 1024))
    parameter.grad = rand(2048, 1024)
    optimizer = torch.optim.AdamW([parameter], lr=1e-4, weight_decay=0.0)
    yield "adamw", optimizer.step


def torch_side(wanted: str) -> dict[str, float]:
    import torch

    found = {}
    for model, (file, rank) in MODELS.items():
        config = json.loads((ROOT / "configs" / file).read_text())
        for dtype, name in ((torch.float32, "f32"), (torch.bfloat16, "bf16")):
            for operation, work in torch_operations(config, rank, dtype):
                if wanted in (key := f"{model} {operation} {name}"):
                    found[key] = median_seconds(work)
    return found


def our_side(wanted: str) -> dict[str, dict[str, float]]:
    """Medians by name and version, read from criterion's files."""
    subprocess.run(["cargo", "bench", "--locked", "--bench", "kernels", "--", *([wanted] if wanted else [])], cwd=ROOT, check=True,
                   stdout=subprocess.DEVNULL)
    found: dict[str, dict[str, float]] = {}
    target = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
    for file in target.glob("criterion/*/*/new/benchmark.json"):
        names = json.loads(file.read_text())
        if wanted in names["group_id"]:
            estimates = json.loads((file.parent / "estimates.json").read_text())
            found.setdefault(names["group_id"], {})[names["function_id"]] = estimates["median"]["point_estimate"] * 1e-9
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--filter", default="", help="only operations whose name contains this")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("benches/results"))
    args = parser.parse_args()
    ours, torch = our_side(args.filter), torch_side(args.filter)
    lines, figures = [], []
    for name, peer in torch.items():
        kernel, plain = (ours.get(name, {}).get(version) for version in ("kernel", "plain"))
        if kernel is None:
            continue
        figures.append({"operation": name, "kernel_seconds": kernel, "plain_seconds": plain, "torch_seconds": peer})
        cell = lambda seconds: f"{seconds * 1e3:.3f}" if seconds else ""
        lines.append((name, cell(kernel), cell(plain), cell(peer), f"{peer / kernel:.2f}x"))
    print(benchlib.table(("operation", "ours ms", "plain ms", "PyTorch ms", "PyTorch / ours"), lines))
    result = {"machine": benchlib.machine(), "versions": benchlib.versions(benchlib.default_binary(), ("torch",)), "medians": figures}
    print(benchlib.write_result(args.out, "kernels", result))


if __name__ == "__main__":
    main()
