"""What scripts/gpu_half_hour.sh measures: its items (ITEMS, at the end), in each part the most important first.

An item is a function that runs in a process of its own, which may be killed at any moment, and tells each figure as soon as
it is known (`Kit.tell`).
"""

import collections
import csv
import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import re
import shlex
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import benchlib
import gpu_telemetry

ROOT = pathlib.Path(__file__).resolve().parent.parent
# Rows, length, accumulation. The first is the setting of published figures: packed rows of 2048, 2 x 4.
Shape = tuple[int, int, int]
PUBLISHED, ROWS_OF_2048, ONE_4096, ONE_8192 = (2, 2048, 4), (2, 2048, 1), (1, 4096, 1), (1, 8192, 1)
LLAMA_8B, QWEN_8B, LLAMA_1B, QWEN_06B = "llama-3.1-8b", "qwen3-8b", "llama-3.2-1b", "qwen3-0.6b"
# Linear attention, and mixtures of experts.
OTHERS = ("qwen3.5-4b", "qwen3-30b-a3b", "gpt-oss-20b", "qwen3.5-35b-a3b")
# For a rehearsal: what of a model's config.json is made small, and by how much rows are shortened.
TINY = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 176, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 16, "vocab_size": 256, "bos_token_id": 1, "eos_token_id": 2}
TINY_ROWS = 32


@dataclasses.dataclass
class Kit:
    """What all items share."""
    binary: pathlib.Path
    llvm_binary: pathlib.Path | None
    model: pathlib.Path
    out: pathlib.Path
    device: str
    is_rehearsal: bool

    def tell(self, **figures) -> None:
        print(json.dumps(figures, default=str), flush=True)

    def run(self, *command, **options) -> subprocess.CompletedProcess:
        """Runs a program; what it writes to stderr is the item's."""
        words = [str(word) for word in command]
        self.tell(command=shlex.join(words))
        return subprocess.run(words, check=True, text=True, **options)

    def shape(self, shape: Shape) -> Shape:
        return (shape[0], shape[1] // TINY_ROWS, shape[2]) if self.is_rehearsal else shape

    def bench_recipe(self, model: str, shape: Shape, layers: int | None, steps: int) -> pathlib.Path:
        rows, length, accumulation = self.shape(shape)
        task = {"model": self.config(model, layers), "init": "random", "dtype": "bf16", "r": 16, "rows": rows, "length": length,
                "accumulation": accumulation, "checkpointing": True, "steps": steps, "device": self.device}
        path = self.out / "runs/bench.toml"
        path.write_text(benchlib.recipe(task, path.with_suffix("")))
        return path

    def config(self, model: str, layers: int | None) -> pathlib.Path:
        """The config.json of a model: with so many layers, and small in a rehearsal."""
        config = json.loads((ROOT / f"configs/{model}.json").read_text())
        of_text = config.get("text_config", config)
        of_text |= {"num_hidden_layers": layers} if layers else {}
        if self.is_rehearsal:
            of_text |= TINY | ({"layer_types": of_text["layer_types"][:2]} if "layer_types" in of_text else {})
        path = self.out / "runs" / f"{model}{f'-{layers}-layers' if layers else ''}.json"
        path.write_text(json.dumps(config))
        return path


class LeftOut(Exception):
    """An item that cannot be run here; the text says what is missing."""


def needs(*packages: str) -> None:
    for package in packages:
        if importlib.util.find_spec(package) is None:
            raise LeftOut(f"the Python package {package} is not installed")


def shape_name(shape: Shape) -> str:
    """Such as 2x2048, or 2x2048x4 with accumulation."""
    return "x".join(map(str, shape if shape[2] > 1 else shape[:2]))


# Part 1: is it sound.

def machine(kit: Kit) -> None:
    """What is installed, and where the driver, NVRTC, its headers and libdevice lie."""
    wanted = ("libcuda.so*", "libnvrtc.so*", "libnvrtc-builtins.so*", "cuda_bf16.h", "libdevice.10.bc", "libcublasLt.so*", "libnccl.so*",
              "ptxas", "ncu", "nsys")
    names = " -o ".join(f"-name '{name}'" for name in wanted)
    commands = {
        "nvidia-smi": "nvidia-smi",
        "clocks": "nvidia-smi --query-gpu=name,uuid,driver_version,compute_cap,memory.total,power.limit,clocks.max.sm,clocks.max.mem,"
                  "clocks_event_reasons.active,mig.mode.current --format=csv",
        "libraries": f"ldd {shlex.quote(str(kit.binary))}", "nvcc": "nvcc --version", "ncu": "ncu --version", "nsys": "nsys --version",
        "environment": "env | grep -E '^(CUDA|LD_LIBRARY|NVIDIA|HF_)'", "system": "uname -a; cat /etc/os-release; nproc; free -g; df -h /",
        "files": f"find / -path /proc -prune -o -path /sys -prune -o \\( {names} \\) -print 2>/dev/null",
    }
    for name, command in commands.items():
        said = subprocess.run(command, shell=True, capture_output=True, text=True)
        kit.tell(asked=name, said=(said.stdout or said.stderr).strip()[:6000])
    packages = {d.metadata["Name"]: d.version for d in importlib.metadata.distributions()}
    wanted = re.compile(r"torch|triton|peft|transformers|accelerate|liger|nvidia|flash|cuda", re.IGNORECASE)
    kit.tell(packages={name: version for name, version in sorted(packages.items()) if wanted.match(name)})


def doctor(kit: Kit) -> None:
    """The binary's own view of the machine, and its measured rates."""
    said = kit.run(kit.binary, "doctor", "--json", stdout=subprocess.PIPE).stdout
    found = json.loads(said)
    kit.tell(doctor=found)
    device = found.get(f"device {kit.device}", {})
    kit.tell(**gpu_telemetry.check("the device", f"usable: {device.get('usable')}, {device.get('dtypes')}", "usable, with bf16",
                                   device.get("usable") is True and "bf16" in device.get("dtypes", ())))


RECIPE = """\
output_dir = {run}
[model]
path = {model}
quantization = {quantization}
[lora]
r = 8
[data]
max_length = 256
packing = {packing}
shuffle = false
[[data.train]]
path = {rows}
[train]
precision = {precision}
micro_batch_size = 4
gradient_checkpointing = {checkpointing}
max_steps = {steps}
num_epochs = 1000000
[optimizer]
learning_rate = 1e-3
[watchdog]
patience = 0
[device]
name = {device}
"""


def own_kernels(kit: Kit) -> None:
    """Each kernel of ours against the CPU's."""
    found = subprocess.run([kit.binary, "doctor", "--json", "--kernels", kit.device], text=True, stdout=subprocess.PIPE)
    compared = json.loads(found.stdout) if found.returncode == 0 else []
    kit.tell(rc=found.returncode, compared=compared, wrong=[row for row in compared if row["problem"]])
    if found.returncode or any(row["problem"] for row in compared):
        sys.exit("a kernel differs from the CPU's")


def kernel_tests(kit: Kit) -> None:
    """The kernels by themselves, over ragged shapes, against float64."""
    needs("numpy", "zstandard")
    in_bf16 = ("cached_attention", "next", "draw", "experts", "delta_rule", "fp8", "rows", "optimizer", "attention", "low_rank", "cross_entropy", "product")
    for name, numbers in [(name, "bf16") for name in in_bf16] + [(name, "f16") for name in ("rows", "attention", "low_rank", "delta_rule")]:
        command = [sys.executable, ROOT / f"tests/cuda_kernels/{name}.py", "--driver", "libcuda.so.1", "--numbers", numbers]
        try:
            found = subprocess.run(command, text=True, timeout=60, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
            rc, said = found.returncode, found.stdout
        except subprocess.TimeoutExpired as late:
            rc, said = None, (late.stdout or b"").decode()
        wrong = [line for line in said.splitlines() if line.startswith("FAIL")]
        kit.tell(**gpu_telemetry.check(f"kernels of {name}, {numbers}", f"{rc}: {wrong[:5] or said[-300:] if rc != 0 else ''}", "0", rc == 0), said=said[-6000:])


def rates(kit: Kit) -> None:
    """What the kernels of attention, and the products of experts, take at sizes of training."""
    needs("numpy", "zstandard")
    for name in ("attention", "experts"):
        kit.tell(said=kit.run(sys.executable, ROOT / f"tests/cuda_kernels/{name}.py", "--driver", "libcuda.so.1", "--time",
                              stdout=subprocess.PIPE).stdout)


def quickstart(kit: Kit, run: pathlib.Path, **changes) -> pathlib.Path:
    """A recipe for the quickstart's model. Its rows are as long as max_length, so that a step has one shape only; or, packed,
    the quickstart's own."""
    shutil.rmtree(run, ignore_errors=True)
    rows = ROOT / "quickstart/train.jsonl"
    if not changes.get("packing"):
        texts = ["".join(message["content"] for message in json.loads(line)["messages"]) for line in rows.read_text().splitlines()]
        rows = kit.out / "runs/rows.jsonl"
        rows.write_text("".join(json.dumps({"text": " ".join(texts[at:at + 15])}) + "\n" for at in range(0, len(texts), 15)))
    values = {"run": run, "model": kit.model, "rows": rows, "precision": "f32", "device": kit.device, "steps": 8, "packing": False,
              "checkpointing": True, "quantization": "none", **changes}
    recipe = run.with_suffix(".toml")
    # JSON's strings, numbers and booleans are TOML's too.
    recipe.write_text(RECIPE.format(**{key: json.dumps(value, default=str) for key, value in values.items()}))
    return recipe


def losses(kit: Kit, name: str, **changes) -> dict[str, list[float]]:
    """Losses and gradient norms of 8 steps."""
    run = kit.out / "runs" / name
    kit.run(kit.binary, quickstart(kit, run, **changes), "--quiet")
    return losses_of(kit, run)


def losses_of(kit: Kit, run: pathlib.Path) -> dict[str, list[float]]:
    rows = gpu_telemetry.steps(run)
    found = {key: [row[key] for row in rows] for key in ("loss", "grad_norm")}
    kit.tell(run=run.name, seconds=[row["wall_seconds"] for row in rows], **found)
    return found


def sound(kit: Kit, name: str, **changes) -> None:
    """Losses and gradient norms against the CPU's in f32. f32 may differ by another order of sums; bf16 keeps activations in
    bf16, and from the second step on its adapters are others too."""
    reference = losses(kit, f"{name}-cpu-f32", **changes | {"device": "cpu", "checkpointing": True, "precision": "f32"})
    compare(kit, losses(kit, f"{name}-{kit.device}", **changes), reference, in_bf16=changes.get("precision") == "bf16")


def compare(kit: Kit, ours: dict, reference: dict, in_bf16: bool) -> None:
    for key, first, later in (("loss", 1e-3, 1e-2 if in_bf16 else 1e-3), ("grad_norm", 1e-2, 5e-2 if in_bf16 else 1e-2)):
        off = [abs(a - b) / abs(b) for a, b in zip(ours[key], reference[key], strict=True)]
        kit.tell(**gpu_telemetry.check(f"{key} of 8 steps against the CPU's in f32", f"{off[0]:.2e}, then at most {max(off):.2e}",
                                       f"at most {first:.0e}, then {later:.0e}", off[0] <= first and max(off) <= later))


def images(kit: Kit) -> None:
    """The same of rows with images. Each device encodes them for itself."""
    def on(device: str) -> dict[str, list[float]]:
        run, cache = (kit.out / "runs" / f"{name}-{device}" for name in ("images", "encoded"))
        for folder in (run, cache):
            shutil.rmtree(folder, ignore_errors=True)
        settings = {"output_dir": run, "device.name": device, "train.max_steps": 8, "train.precision": "f32", "eval.eval_steps": 8,
                    "logging.logging_steps": 1, "scheduler.warmup_steps": 0, "optimizer.learning_rate": 1e-3}
        words = (word for key, value in settings.items() for word in ("--set", f"{key}={value}"))
        kit.run(kit.binary, "recipes/drawings.toml", "--quiet", *words, cwd=ROOT, env=os.environ | {"LORA_TRAIN_CACHE": str(cache)})
        return losses_of(kit, run)

    compare(kit, on(kit.device), on("cpu"), in_bf16=False)


def telemetry(kit: Kit) -> None:
    """20 seconds of training beside nvidia-smi."""
    folder = kit.out / "runs/telemetry"
    recipe = quickstart(kit, folder, precision="bf16", steps=1000000)
    status, uuid, samples = gpu_telemetry.train(str(kit.binary), recipe, folder, 20.0)
    kit.tell(samples=samples)
    for check in gpu_telemetry.checks(folder, status, uuid, samples):
        kit.tell(**check)


# Part 2: how fast.

def ours(kit: Kit, model: str, shape: Shape, side: str = "ours", layers: int | None = None, steps: int = 3,
         options: tuple[str, ...] = (), settings: tuple[str, ...] = ()) -> None:
    """Steps of ours, and the memory that `plan` expects."""
    binary = kit.binary
    if side == "llvm":
        if kit.llvm_binary is None:
            raise LeftOut("no --llvm-binary was given")
        # Its own cache: what one backend found to be fastest says nothing about the other.
        binary, os.environ["XDG_CACHE_HOME"] = kit.llvm_binary, str(kit.out / "cache/llvm")
    recipe = kit.bench_recipe(model, shape, layers, steps)
    changes = [word for setting in settings for word in ("--set", setting)]
    plan = json.loads(kit.run(binary, "plan", recipe, "--json", *changes, stdout=subprocess.PIPE).stdout)
    command = [*benchlib.bench_command(binary, recipe, list(settings), 1), *options]
    kit.tell(command=shlex.join(command))
    gpu = None if kit.device == "cpu" else benchlib.GpuMemory.open()
    found = benchlib.measure(command, gpu, sys.stderr)
    rows, length, accumulation = kit.shape(shape)
    planned, measured = plan["peak_bytes"], found["peak_gpu_memory_bytes" if gpu else "peak_memory_bytes"]
    kit.tell(side=side, model=model, layers=layers, settings=settings, rows=rows, length=length, accumulation=accumulation, planned_bytes=planned, **found)
    # The driver's own memory is most of a small model's.
    slack = max(0.1 * measured, 128 * 2**20)
    kit.tell(**gpu_telemetry.check("peak memory by plan", f"{planned / 2**20:,.0f} MiB",
                                   f"{measured / 2**20:,.0f} MiB measured, within 10 %", abs(planned - measured) <= slack))


def peer(kit: Kit, model: str, side: str, shapes: tuple[Shape, ...]) -> None:
    """Steps of transformers + PEFT with SDPA, with or without Liger's kernels, at several shapes."""
    needs("torch", "transformers", "peft", *(["liger_kernel"] if side == "peft-liger" else []))
    gpu = None if kit.device == "cpu" else benchlib.GpuMemory.open()
    before = gpu.used_bytes() if gpu else 0
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**json.loads(kit.config(model, None).read_text()))
    if side == "peft-liger":
        import liger_kernel.transformers

        getattr(liger_kernel.transformers, f"apply_liger_kernel_to_{config.model_type}")()
    with torch.device(kit.device):
        base = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    task = {"dtype": "bf16", "r": 16, "checkpointing": True, "steps": 3, "shapes": [kit.shape(shape) for shape in shapes],
            "label": {"side": side, "model": model}}
    benchlib.peft_steps(base, task, kit.device, (lambda: gpu.used_bytes() - before) if gpu else None)


# Part 3: where the time goes. `ours` with --profile splits a step by operation.

def products(kit: Kit) -> None:
    """PyTorch's products and attention at the 8B model's shapes: what `linear` and `attention` of a profile are held against."""
    needs("torch")
    import torch

    config = json.loads(kit.config(LLAMA_8B, None).read_text())
    _, tokens, _ = kit.shape(ONE_4096)
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    hidden, ffn, dim = config["hidden_size"], config["intermediate_size"], config.get("head_dim") or config["hidden_size"] // heads
    rand = lambda *shape: torch.randn(shape, device=kit.device, dtype=torch.bfloat16)
    wait = torch.cuda.synchronize if kit.device == "cuda" else lambda: None

    def seconds(work) -> float:
        """Of one call: the median of rounds of 10, after one that does not count."""
        took = []
        for _ in range(6):
            wait()
            began = time.perf_counter()
            for _ in range(10):
                work()
            wait()
            took.append((time.perf_counter() - began) / 10)
        return statistics.median(took[1:])

    for columns, width in ((hidden, heads * dim), (hidden, kv_heads * dim), (heads * dim, hidden), (hidden, ffn), (ffn, hidden)):
        x, w, dy = rand(tokens, columns), rand(width, columns), rand(tokens, width)
        flops = 2 * tokens * columns * width
        for name, work in (("linear", lambda: x @ w.T), ("linear_backward", lambda: dy @ w)):
            kit.tell(product=name, shape=f"{columns} -> {width}", flops_per_second=flops / seconds(work))
    q, k, v = (rand(1, count, tokens, dim).requires_grad_() for count in (heads, kv_heads, kv_heads))
    attention = lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    o = attention()
    kit.tell(product="attention", seconds=seconds(attention))
    kit.tell(product="attention_backward", seconds=seconds(lambda: torch.autograd.grad(o, (q, k, v), o, retain_graph=True)))


NUM_STEPS = 3


def one_step(launches: list[tuple[str, float]]) -> list[tuple[str, float]]:
    """The launches of the last step of NUM_STEPS: a kernel that runs once a step tells where it begins and ends."""
    places = collections.defaultdict(list)
    for place, (name, _) in enumerate(launches):
        places[name].append(place)
    once = [found[-2:] for found in places.values() if len(found) == NUM_STEPS]
    if not once:
        raise ValueError(f"no kernel was launched {NUM_STEPS} times in {len(launches)} launches")
    period = statistics.mode(last - first for first, last in once)
    first = next(first for first, last in once if last - first == period)
    return launches[first:first + period]


def generation(kit: Kit) -> None:
    """Greedy texts of a random model of Qwen3 0.6B's shape, one and sixteen together: tokens a second. The tokenizer is the
    quickstart's, whose tokens are some of the model's."""
    needs("torch", "transformers")
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = kit.out / "runs/generation"
    if not (folder / "model.safetensors").exists():
        # A rehearsal's has fewer tokens than the tokenizer.
        config = json.loads(kit.config(QWEN_06B, None).read_text())
        config = AutoConfig.for_model(**config | {"vocab_size": max(config["vocab_size"], 2048)})
        with torch.device(kit.device):
            AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(kit.model / name, folder / name)
    for count in (1, 16, 64):
        prompts = folder / f"{count}.txt"
        prompts.write_text("".join(f"Tell me about the number {i}.\n" for i in range(count)))
        began = time.monotonic()
        said = subprocess.run([kit.binary, "generate", folder, "--raw", "--prompts", prompts, "--max-new-tokens", "64", "--dtype", "bf16",
                               "--device", kit.device], text=True, capture_output=True, check=True)
        kit.tell(generation=count, seconds=time.monotonic() - began, said=said.stderr[-400:])


def kernels(kit: Kit, model: str, shape: Shape, layers: int | None = None) -> None:
    """Every launch of a step as `ncu` times it, burn's, cuBLASLt's and ours: launches wait for each other, so their sum is the
    time of a step whose kernels come without gaps. By kernel, and the longest launches with their grids."""
    if shutil.which("ncu") is None:
        raise LeftOut("ncu is not installed")
    table, recipe = kit.out / f"runs/ncu-{model}.csv", kit.bench_recipe(model, shape, layers, NUM_STEPS)
    # Clocks stay as they are: others may use the card. Caches too: a step's own launches fill them.
    kit.run("ncu", "--metrics", "gpu__time_duration.sum", "--clock-control", "none", "--cache-control", "none", "--csv", "--page", "raw",
            "--print-units", "base", "--print-kernel-base", "function", "--log-file", table,
            *benchlib.bench_command(kit.binary, recipe, [], 0), stdout=subprocess.DEVNULL)
    rows = list(csv.DictReader(line for line in table.read_text().splitlines() if line.startswith('"')))
    # The first row has the units.
    launches = [(row["Kernel Name"] + " " + row["Grid Size"], float(row["gpu__time_duration.sum"].replace(",", "")) * 1e-9)
                for row in rows if row["ID"]]
    step = one_step(launches)
    totals, families, calls = collections.Counter(), collections.Counter(), collections.Counter(name for name, _ in step)
    for name, seconds in step:
        totals[name] += seconds
        # Without its grid, and the hash of its settings if it is burn's.
        families[re.sub(r"(_[0-9a-f]{8})? \(.*", "", name)] += seconds
    kit.tell(launches=len(step), kernel_seconds=sum(totals.values()), model=model, layers=layers,
             kernels=[{"kernel": name, "calls": calls[name], "seconds": seconds} for name, seconds in totals.most_common(50)],
             families=[{"family": name, "seconds": seconds} for name, seconds in families.most_common()])


class Item(NamedTuple):
    part: int
    name: str
    limit_seconds: int
    work: Callable[[Kit], None]


def ours_at(part: int, name: str, limit_seconds: int, model: str, shape: Shape, **settings) -> Item:
    return Item(part, f"{name}-{model}-{shape_name(shape)}", limit_seconds, lambda kit: ours(kit, model, shape, **settings))


def peer_at(part: int, side: str, limit_seconds: int, model: str, *shapes: Shape) -> Item:
    return Item(part, f"{side}-{model}", limit_seconds, lambda kit: peer(kit, model, side, shapes))


ITEMS = (
    Item(1, "machine", 30, machine),
    Item(1, "own-kernels", 60, own_kernels),
    Item(1, "kernel-tests", 120, kernel_tests),
    Item(1, "doctor", 90, doctor),
    Item(1, "sound-f32", 150, lambda kit: sound(kit, "f32")),
    Item(1, "sound-bf16", 120, lambda kit: sound(kit, "bf16", precision="bf16")),
    Item(1, "sound-images", 60, images),
    Item(1, "sound-nf4", 60, lambda kit: sound(kit, "nf4", precision="bf16", quantization="nf4")),
    Item(1, "telemetry", 60, telemetry),
    Item(1, "sound-packed", 90, lambda kit: sound(kit, "packed", packing=True)),
    Item(1, "sound-offload", 60, lambda kit: sound(kit, "offload", checkpointing="offload")),
    # Caches of a model that did not run yet are empty: the first step includes compiling and choosing kernels. Two layers have all kernels of 32.
    ours_at(1, "cold", 150, LLAMA_1B, ROWS_OF_2048, steps=1),
    ours_at(1, "cold-2-layers", 200, LLAMA_8B, ROWS_OF_2048, steps=1, layers=2),

    ours_at(2, "ours", 120, LLAMA_8B, PUBLISHED),
    peer_at(2, "peft-liger", 90, LLAMA_8B, PUBLISHED, ONE_4096, ONE_8192),
    ours_at(2, "ours", 60, LLAMA_1B, PUBLISHED),
    peer_at(2, "peft-liger", 60, LLAMA_1B, PUBLISHED),
    ours_at(2, "ours", 60, QWEN_06B, PUBLISHED),
    peer_at(2, "peft-liger", 60, QWEN_06B, PUBLISHED),
    *(ours_at(2, "ours", 90, model, ONE_4096) for model in OTHERS),
    ours_at(2, "ours", 90, LLAMA_8B, ONE_4096),
    ours_at(2, "ours", 120, QWEN_8B, PUBLISHED),
    peer_at(2, "peft-liger", 90, QWEN_8B, PUBLISHED, ONE_4096, ONE_8192),
    peer_at(2, "peft-sdpa", 90, LLAMA_8B, PUBLISHED, ONE_4096, ONE_8192),
    peer_at(2, "peft-sdpa", 90, QWEN_8B, PUBLISHED, ONE_4096, ONE_8192),
    ours_at(2, "ours", 90, QWEN_8B, ONE_4096),
    *(ours_at(2, "ours", 90, model, ONE_8192) for model in (LLAMA_8B, QWEN_8B)),
    peer_at(2, "peft-sdpa", 60, LLAMA_1B, PUBLISHED),
    peer_at(2, "peft-sdpa", 60, QWEN_06B, PUBLISHED),

    Item(3, "kernels-1b", 120, lambda kit: kernels(kit, LLAMA_1B, ROWS_OF_2048)),
    Item(3, "kernels-8b", 120, lambda kit: kernels(kit, LLAMA_8B, ONE_4096, layers=4)),
    Item(3, "rates", 40, rates),
    Item(3, "products", 60, products),
    ours_at(3, "operations", 120, LLAMA_8B, ONE_4096, steps=2, options=("--profile",)),
    ours_at(3, "operations", 60, LLAMA_1B, ROWS_OF_2048, options=("--profile",)),
    ours_at(3, "llvm", 150, LLAMA_1B, ROWS_OF_2048, side="llvm"),
    ours_at(3, "llvm-2-layers", 150, LLAMA_8B, ONE_4096, side="llvm", steps=2, layers=2, options=("--profile",)),

    # Fifteen minutes on a card: what none has run, or has run another way, the most telling first.
    Item(4, "own-kernels", 60, own_kernels),
    ours_at(4, "kept", 40, LLAMA_8B, ONE_4096, steps=8, settings=('train.gradient_checkpointing="auto"',)),
    ours_at(4, "checkpointed", 40, LLAMA_8B, ONE_4096, steps=8),
    ours_at(4, "fp8", 50, LLAMA_8B, ONE_4096, steps=8, settings=("model.quantization=fp8", 'train.gradient_checkpointing="auto"')),
    Item(4, "sound-fp8", 40, lambda kit: sound(kit, "fp8", precision="bf16", quantization="fp8")),
    ours_at(4, "8-layers", 60, "qwen3-30b-a3b", ONE_4096, layers=8),
    ours_at(4, "8-layers-nf4", 60, "qwen3-30b-a3b", ONE_4096, layers=8, settings=("model.quantization=nf4",)),
    Item(4, "generation", 90, generation),
    ours_at(4, "delta", 50, "qwen3.5-4b", ONE_4096),
    ours_at(4, "6-layers", 50, "gpt-oss-20b", ONE_4096, layers=6),
    ours_at(4, "small", 20, QWEN_06B, (1, 1024, 1), steps=20),
    ours_at(4, "packed", 40, LLAMA_1B, PUBLISHED, steps=5),
    ours_at(4, "f16", 30, LLAMA_1B, ROWS_OF_2048, settings=("train.precision=f16", "model.dtype=f16")),
    ours_at(4, "adamw-8bit", 30, LLAMA_1B, ROWS_OF_2048, settings=("optimizer.name=adamw_8bit",)),
    Item(4, "rates", 40, rates),
    # More than 2^31 numbers in an output.
    ours_at(4, "long", 110, LLAMA_8B, (1, 81920, 1), steps=1),
    Item(4, "kernel-tests", 120, kernel_tests),
    Item(4, "kernels-mixture", 90, lambda kit: kernels(kit, "qwen3-30b-a3b", ONE_4096, layers=2)),
    Item(4, "kernels-8b", 90, lambda kit: kernels(kit, LLAMA_8B, ONE_4096, layers=4)),
)
