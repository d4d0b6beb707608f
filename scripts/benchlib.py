"""Shared parts of the side-by-side benchmarks: measurements as processes, interleaved rounds, tables, files."""

import contextlib
import ctypes
import datetime
import json
import os
import pathlib
import platform
import resource
import shlex
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import TextIO

NUM_WARMUP_STEPS = 2
FIGURES = ("step_seconds", "tokens_per_second", "first_step_seconds", "mfu", "gflops", "gemm_peak_gflops")
RECIPE = """\
output_dir = "{output}"
seed = 1
[model]
path = "{model}"
init = "{init}"
dtype = "{dtype}"
[lora]
r = {r}
lora_alpha = {alpha}
target_modules = "all-linear"
[data]
max_length = {length}
[train]
precision = "{dtype}"
micro_batch_size = {rows}
gradient_accumulation_steps = {accumulation}
gradient_checkpointing = {checkpointing}
max_steps = {steps}
[optimizer]
learning_rate = 1e-4
[device]
name = "{device}"
"""


class Failed(Exception):
    """A measurement that failed; the text is the end of its stderr."""


def recipe(task: dict, output: pathlib.Path) -> str:
    """Our side's recipe for a task: model, init, dtype, r, length, rows, accumulation, checkpointing, steps, device."""
    checkpointing = str(task["checkpointing"]).lower()
    return RECIPE.format(**{"init": "pretrained", "device": "auto", "accumulation": 1, **task, "alpha": 2 * task["r"], "output": output,
                            "checkpointing": checkpointing if checkpointing in ("true", "false") else f'"{checkpointing}"'})


def seconds_since_start() -> float:
    """Age of this process."""
    after_command = pathlib.Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(after_command[19]) / os.sysconf("SC_CLK_TCK")


class GpuMemory:
    """Used memory of a GPU, read from NVML, whichever side uses it."""

    class _Info(ctypes.Structure):
        _fields_ = [("version", ctypes.c_uint), *((name, ctypes.c_ulonglong) for name in ("total", "reserved", "free", "used"))]

    def __init__(self, index: int | None = None):
        # The library that our own telemetry loads, so that a stand-in serves both.
        self.library = ctypes.CDLL(os.environ.get("LORA_TRAIN_NVML", "libnvidia-ml.so.1"))
        if index is None:
            visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
            index = int(visible) if visible.isdigit() else 0
        self.handle = ctypes.c_void_p()
        if self.library.nvmlInit_v2() or self.library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(self.handle)):
            raise OSError("NVML does not start")

    @classmethod
    def open(cls) -> "GpuMemory | None":
        try:
            return cls()
        except (OSError, AttributeError):
            return None

    def used_bytes(self) -> int:
        info = self._Info(version=ctypes.sizeof(self._Info) | 2 << 24)
        self.library.nvmlDeviceGetMemoryInfo_v2(self.handle, ctypes.byref(info))
        return info.used


def measure(command: list[str], gpu: GpuMemory | None = None, log: TextIO | None = None, written: pathlib.Path | None = None) -> dict:
    """The last line of a process's stdout, or of the file `written`, as JSON, and its peak memory: resident (VmHWM) and, with `gpu`, the GPU's used
    memory above what was in use before. `log` gets its stderr as it is written."""
    before = gpu.used_bytes() if gpu else 0
    cpu_before = cpu_seconds()
    peak_gpu, done = before, threading.Event()

    def watch() -> None:
        nonlocal peak_gpu
        while not done.wait(0.02):
            peak_gpu = max(peak_gpu, gpu.used_bytes())

    watcher = threading.Thread(target=watch, daemon=True)
    with tempfile.TemporaryFile("w+") as stdout, tempfile.TemporaryFile("w+") as stderr:
        process = subprocess.Popen(command, stdout=stdout, stderr=log or stderr, text=True)
        if gpu:
            watcher.start()
        peak_kib = 0
        while process.poll() is None:
            with contextlib.suppress(OSError):
                status = pathlib.Path(f"/proc/{process.pid}/status").read_text()
                peak_kib = max([peak_kib, *(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:"))])
            time.sleep(0.02)
        done.set()
        if gpu:
            watcher.join()
        stdout.seek(0)
        stderr.seek(0)
        source = written.read_text() if written and not process.returncode else stdout.read()
        lines = source.strip().splitlines()
        if process.returncode or not lines:
            raise Failed(f"{shlex.join(command)} ended with status {process.returncode}:\n{stderr.read()[-4000:]}")
    figures = json.loads(lines[-1])
    found = {key: figures[key] for key in FIGURES if figures.get(key) is not None}
    found["peak_memory_bytes"] = peak_kib * 1024
    found["cpu_seconds"] = cpu_seconds() - cpu_before
    if gpu:
        found["peak_gpu_memory_bytes"] = peak_gpu - before
    return {**figures, **found}


def cpu_seconds() -> float:
    """Of all processors, for the processes of this one that ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def peft_steps(base, task: dict, device: str = "cpu", used_bytes: Callable[[], int] | None = None) -> None:
    """PEFT's side: LoRA on all linear layers of a loaded model, steps on random tokens; prints one JSON object for each
    of the task's shapes, with the GPU's memory after it by `used_bytes`: PyTorch keeps what it once had."""
    import torch
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    base.config.use_cache = False
    if task["checkpointing"]:
        base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        base.enable_input_require_grads()
    targets = task.get("targets", {"target_modules": "all-linear"})
    model = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", r=task["r"], lora_alpha=2 * task["r"], **targets))
    model.train()
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=1e-4, weight_decay=0.0)
    warmup, first = task.get("warmup", NUM_WARMUP_STEPS), None
    for rows, length, accumulation in task.get("shapes") or [(task["rows"], task["length"], 1)]:
        seconds, value = [], 0.0
        for _ in range(warmup + task["steps"]):
            batches = torch.randint(0, base.config.vocab_size, (accumulation, rows, length)).to(device)
            began = time.perf_counter()
            for ids in batches:
                with torch.autocast(device, torch.bfloat16, enabled=task["dtype"] == "bf16"):
                    loss = model(input_ids=ids, labels=ids).loss / accumulation
                loss.backward()
            torch.nn.utils.clip_grad_norm_(trainable, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            # Waits for the device, as our side does when it reads the loss.
            value = loss.item() * accumulation
            seconds.append(time.perf_counter() - began)
            if first is None:
                if device == "cuda":
                    torch.cuda.synchronize()
                first = seconds_since_start()
        step = statistics.median(seconds[warmup:])
        memory = {"peak_gpu_memory_bytes": used_bytes()} if used_bytes else {}
        print(json.dumps({**task.get("label", {}), "rows": rows, "length": length, "accumulation": accumulation, "step_seconds": step,
                          "tokens_per_second": accumulation * rows * length / step, "first_step_seconds": first, "loss": value, **memory}),
              flush=True)


def bench_command(binary: pathlib.Path, recipe_file: pathlib.Path, settings: list[str], warmup: int = NUM_WARMUP_STEPS) -> list[str]:
    """Our side's measurement."""
    return [str(binary), "bench", str(recipe_file), "--warmup", str(warmup), *(word for setting in settings for word in ("--set", setting))]


def interleaved(num_rounds: int, rows: list[str], sides: list[str]) -> Iterator[tuple[int, str, str]]:
    """Every side once per row in each round, every second round in the opposite order, so that a machine that slows down
    slows all of them."""
    for index in range(num_rounds):
        for row in rows:
            for side in sides if index % 2 == 0 else reversed(sides):
                yield index, row, side


def medians(runs: list[dict]) -> dict:
    """The median of every number that all runs have."""
    numbers = [key for key, value in runs[0].items() if isinstance(value, (int, float))]
    return {key: statistics.median(run[key] for run in runs) for key in numbers if all(key in run for run in runs)}


def table(heads: tuple[str, ...], lines: list[tuple[str, ...]]) -> str:
    """A Markdown table."""
    widths = [max(len(line[i]) for line in [heads, *lines]) for i in range(len(heads))]
    rule = tuple("-" * width for width in widths)
    return "\n".join("| " + " | ".join(cell.ljust(w) for cell, w in zip(line, widths)) + " |" for line in [heads, rule, *lines])


def machine() -> dict:
    """Processor, cores, memory, and the GPU where there is one."""
    cpu = [line.split(":", 1)[1].strip() for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    found = {"cpu": cpu[0] if cpu else platform.processor(), "num_cores": len(os.sched_getaffinity(0)),
             "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), "system": platform.system()}
    with contextlib.suppress(OSError):
        query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
        if gpu := said(query):
            found["gpu"] = gpu
    return found


def said(command: list[str]) -> str:
    """The output of a program."""
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


def versions(binary: pathlib.Path, packages: tuple[str, ...]) -> dict:
    """Versions of both sides; a package that is not installed is left out."""
    from importlib import metadata

    found = {"lora-train": said([str(binary), "--version"]), "python": platform.python_version()}
    with contextlib.suppress(OSError):
        found["commit"] = said(["git", "rev-parse", "HEAD"])
    for package in packages:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def write_result(folder: pathlib.Path, prefix: str, result: dict) -> pathlib.Path:
    """The result with time and command, as FOLDER/PREFIX-TIME.json."""
    now = datetime.datetime.now(datetime.timezone.utc)
    command = shlex.join([pathlib.Path(word).name if word.startswith("/") else word for word in sys.argv])
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{prefix}-{now:%Y%m%d-%H%M%S}.json"
    path.write_text(json.dumps({"command": command, "time": now.isoformat(timespec="seconds"), **result}, indent=1) + "\n")
    return path


def default_binary() -> pathlib.Path:
    return pathlib.Path(os.environ.get("CARGO_TARGET_DIR", "target")) / "release/lora-train"


def rounds(order: Iterator[tuple[int, str, str]], num_rounds: int,
           run: Callable[[int, str, str], dict]) -> dict[str, dict[str, list[dict]]]:
    """Runs all measurements."""
    found = {}
    for index, row, side in order:
        figures = run(index, row, side)
        found.setdefault(row, {}).setdefault(side, []).append(figures)
        print(f"round {index + 1}/{num_rounds}  {row}  {side}  {figures['tokens_per_second']:,.0f} tokens/s", file=sys.stderr, flush=True)
    return found
