"""Runs the binary on the stand-in, or on the CPU, and keeps what it left."""

import array
import dataclasses
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
RECIPE = """\
output_dir = "{output}"
[model]
path = "{model}"
[lora]
r = 4
[data]
max_length = 64
packing = true
shuffle = false
[[data.train]]
path = "{root}/quickstart/train.jsonl"
[train]
precision = "{precision}"
gradient_checkpointing = true
micro_batch_size = 2
max_steps = {steps}
[optimizer]
learning_rate = 1e-3
[logging]
tensorboard = false
gpu_sample_ms = 0
[checkpoint]
save_minutes = 0
[device]
name = "{device}"
"""
BENCH = """\
output_dir = "{output}"
[model]
path = "{config}"
init = "random"
dtype = "bf16"
[lora]
r = 16
[data]
max_length = {length}
[train]
precision = "bf16"
gradient_checkpointing = true
micro_batch_size = {rows}
max_steps = {steps}
[device]
name = "cuda"
"""


@dataclasses.dataclass
class Run:
    """What a process left: the steps it took, what it printed, and what the stand-in counted."""

    rc: int
    seconds: float
    out: str
    err: str
    steps: dict          # step: (loss, gradient norm)
    evals: list
    log: dict

    def counted(self, call: str, what: str = "count") -> int:
        return self.log["calls"].get(call, {"count": 0, "bytes": 0})[what]

    def launches(self) -> int:
        return self.counted("cuLaunchKernel") + self.counted("cuLaunchKernelEx")


class Lab:
    """The binary, and the folders in which it runs. A lane has CubeCL's cache to itself: its database is not shared."""

    device = "cuda"

    def __init__(self, binary: pathlib.Path, toolkit: pathlib.Path, work: pathlib.Path, lane: str):
        self.binary, self.toolkit, self.work, self.lane = binary, toolkit, work, lane
        self.done: dict[str, Run] = {}

    def environment(self, extra: dict) -> dict:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("STAND_IN_", "CUBECL_", "LORA_TRAIN_"))}
        return kept | {
            # The translator's Python, without a wrapper that would choose one.
            "PATH": f"{pathlib.Path(sys.executable).resolve().parent}:{os.environ['PATH']}",
            "LD_LIBRARY_PATH": f"{HERE}:{self.toolkit}/lib", "CUDA_PATH": str(self.toolkit),
            "STAND_IN_PTXAS": f"{self.toolkit}/bin/ptxas", "STAND_IN_DIR": str(self.work / "kernels"),
            # The first candidate of each round of tuning wins: few kernels to compile, the same ones in every run.
            "STAND_IN_TIME": "first", "CUBECL_AUTOTUNE_LEVEL": "0",
            # Above this are only measurements of the device's rates, whose results nobody reads.
            "STAND_IN_EXEC": "200000",
            "XDG_CACHE_HOME": str(self.work / "cache" / self.lane), "RUST_BACKTRACE": "0", "HF_HUB_OFFLINE": "1",
        } | extra

    def run(self, name: str, arguments: list, environment: dict, stop_after: int | None = None, ranks: int = 1) -> Run:
        """Runs the binary to its end, or until so many steps are in its metrics. Of several ranks, the first one's log is kept."""
        folder = self.work / "runs" / name
        # CubeCL looks for its cubecl.toml here.
        start = self.work / "start" / ("strict" if "STAND_IN_CHECK" in environment else "plain")
        log = self.work / "runs" / f"{name}.json"
        log.unlink(missing_ok=True)
        began = time.monotonic()
        process = subprocess.Popen(
            ["nice", "-n", os.environ.get("CHECK_NICE", "0"), *self.command(arguments, ranks)], cwd=start,
            env=self.environment(environment | {"STAND_IN_LOG": str(log)}), stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True, errors="replace")
        while stop_after and process.poll() is None:
            if len(read_metrics(folder)[0]) >= stop_after:
                process.send_signal(signal.SIGINT)
                break
            time.sleep(0.02)
        try:
            out, err = process.communicate(timeout=3600)
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
        (self.work / "runs" / f"{name}.err").write_text(err)
        steps, evals = read_metrics(folder)
        counted = json.loads(log.read_text()) if log.exists() else {}
        return Run(process.returncode, time.monotonic() - began, out, err, steps, evals, counted)

    def command(self, arguments: list, ranks: int) -> list:
        own = [self.binary, *map(str, arguments)]
        if ranks == 1:
            return own
        mpirun = shutil.which("mpirun.openmpi") or "mpirun"
        others = [":", "-n", str(ranks - 1), "env", "-u", "STAND_IN_LOG", *own]
        return [mpirun, "--allow-run-as-root", "--oversubscribe", "-n", "1", *own, *others]

    def model(self, precision: str) -> pathlib.Path:
        """Quickstart's model. Its gradients overflow f16, on the CPU too: there with its embedding and head divided by 4."""
        model, copy = ROOT / "quickstart/model", self.work / "damped"
        if precision != "f16":
            return model
        shutil.copytree(model, copy, dirs_exist_ok=True)
        data = bytearray((model / "model.safetensors").read_bytes())
        start = 8 + int.from_bytes(data[:8], "little")
        first, last = json.loads(data[8:start])["model.embed_tokens.weight"]["data_offsets"]
        words = array.array("H", data[start + first:start + last])
        quarter = array.array("H", (word - (2 << 7) if (word >> 7 & 255) > 2 else 0 for word in words))   # bf16
        data[start + first:start + last] = quarter.tobytes()
        (copy / "model.safetensors").write_bytes(data)
        return copy

    def train(self, precision: str, device: str | None = None, *, steps: int = 2, sets: list = (), name: str = "",
              environment: dict | None = None, stop_after: int | None = None, resume: bool = False, ranks: int = 1) -> Run:
        """Trains quickstart's model; a run that was done before is not done again."""
        device = device or self.device
        key = "-".join([self.lane, name or "plain", precision, device, str(steps), *map(tidy, sets), *["again"] * resume])
        if key in self.done:
            return self.done[key]
        output = self.work / "runs" / (f"{self.lane}-{name}" if name else key[:150])
        if not resume:
            shutil.rmtree(output, ignore_errors=True)
        recipe = output.with_suffix(".toml")
        recipe.write_text(RECIPE.format(root=ROOT, model=self.model(precision), output=output, precision=precision, steps=steps, device=device))
        arguments = [recipe, *["--quiet"] * (ranks == 1), *(word for change in sets for word in ("--set", change))]
        self.done[key] = self.run(output.name, arguments + ["--resume"] * resume, environment or {}, stop_after, ranks)
        return self.done[key]


def tidy(text: str) -> str:
    return re.sub(r"[^\w.=-]+", "_", text)


def read_metrics(folder: pathlib.Path) -> tuple[dict, list]:
    """Loss and gradient norm of every step, and the losses of evaluations."""
    steps, evals = {}, []
    try:
        lines = (folder / "metrics.jsonl").read_text().splitlines()
    except FileNotFoundError:
        return steps, evals
    for line in lines:
        try:
            row = json.loads(line)
        except json.JSONDecodeError:   # half written
            continue
        if "grad_norm" in row:
            steps[row["step"]] = (row["loss"], row["grad_norm"])
        elif "eval_loss" in row:
            evals.append(row["eval_loss"])
    return steps, evals
