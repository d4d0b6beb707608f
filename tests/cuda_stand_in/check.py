#!/usr/bin/env python3
"""Runs a CUDA build on the stand-in and holds it against the same binary on the CPU, and against bounds.

usage: check.py [--full] [--only NAME...] [--jobs N] [--json FILE] --binary FILE --toolkit DIR --work DIR

DIR of --toolkit has NVIDIA's ptxas, headers, NVRTC and libdevice (scripts/requirements-cuda.txt); that of --work keeps
compiled kernels. NAME is the start of a row's name. Prints a table; exits with 1 if a row failed.

`LANES` at the end of this file is the table of checks.
"""

import argparse
import array
import collections
import concurrent.futures
import dataclasses
import json
import os
import pathlib
import re
import shutil
import statistics
import subprocess
import sys
import threading
import time
import traceback

from lab import BENCH, HERE, ROOT, Lab, Run, tidy

# Largest relative difference of losses and of gradient norms from the CPU's. f32: products in TF32 would be off by 3e-5
# and 1e-3. bf16: of the first step alone, since the first update of AdamW goes by the signs of gradients, and small ones
# are rounding; activations are bf16 between operations, as PyTorch's are and the CPU's are not.
TOLERANCE = {"f32": (1e-5, 3e-4), "bf16": (4e-3, 5e-2), "f16": (3e-4, 2e-2), "fp8": (3e-2, 0.4)}
# A wait between forward and backward, which a start has in its second step, lets fusion sum in another order.
RESUMED = 1e-6

ODD = ["data.packing=false", "train.micro_batch_size=3", "lora.r=16"]
PROMPT = "Mia has a green kite. She is at the lake."
EVALUATION = [f'data.eval=[{{path="{ROOT}/quickstart/eval.jsonl"}}]', "eval.max_batches=1",
              f'eval.generate=["{PROMPT}"]']
# A model of real size is not computed: launches are only counted, and every number is zero.
# Kernels are not tried out, which needs more results than one.
RECORDED = {"STAND_IN_EXEC": "trial", "STAND_IN_POISON": "0", "LORA_TRAIN_CUDA_KERNELS": "all"}
# What is planned for the driver (`GPU_CONTEXT_BYTES` in src/train/budget/memory.rs), which the stand-in takes none for, and how many times
# the rest of the plan the device's memory may be, and the reverse.
CONTEXT_BYTES = 500 << 20
PLANNED = {"over_plan": 1.05, "under_plan": 1.075}


@dataclasses.dataclass
class Verdict:
    """A row of the table that is printed."""

    what: str
    problems: list = dataclasses.field(default_factory=list)
    loss: float | None = None
    norm: float | None = None
    figures: dict = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class Check:
    """A row of the table of checks. `full`: not by default."""

    name: str
    call: collections.abc.Callable
    full: bool = False
    precision: str = "f32"


def off(found: float | None, expected: float | None) -> float:
    """The relative difference; infinite where either is no number."""
    if found is None or expected is None or found != found:
        return float("inf")
    return abs(found - expected) / max(abs(expected), 1e-30)


def ended(run: Run, rc: int = 0) -> list:
    """Problems with how a process ended, and with what the stand-in saw of it."""
    problems = []
    if run.rc != rc:
        last = [line for line in run.err.splitlines() if line.strip()][-3:]
        problems.append(f"exit code {run.rc} instead of {rc}: {' | '.join(last)[:300]}")
    if run.log and rc == 0:
        for count in ("ptx_refused", "not_translated", "refused_launches"):
            if run.log[count]:
                problems.append(f"{count}: {run.log[count]}")
        if run.log["fault"]:
            problems.append(f"fault: {run.log['fault']}")
    return problems


def compare(found: Run, expected: Run, precision: str, what: str) -> Verdict:
    """Losses and gradient norms of all steps, and losses of evaluations, against a tolerance."""
    verdict = Verdict(what, ended(found) + [f"CPU: {problem}" for problem in ended(expected)])
    if not expected.steps or found.steps.keys() != expected.steps.keys():
        verdict.problems.append(f"steps {sorted(found.steps)} instead of {sorted(expected.steps)}")
        return verdict
    compared = sorted(expected.steps)[:1 if precision in ("bf16", "fp8") else None]
    pairs = [(found.steps[step], expected.steps[step]) for step in compared]
    verdict.loss = max([off(a[0], b[0]) for a, b in pairs] + [off(a, b) for a, b in zip(found.evals, expected.evals)])
    verdict.norm = max(off(a[1], b[1]) for a, b in pairs)
    if len(found.evals) != len(expected.evals):
        verdict.problems.append(f"{len(found.evals)} evaluations instead of {len(expected.evals)}")
    for name, value, limit in zip(("loss", "gradient norm"), (verdict.loss, verdict.norm), TOLERANCE[precision]):
        if not value <= limit:
            verdict.problems.append(f"{name} off by {value:.1e}, allowed {limit:.0e}")
    verdict.figures = {"steps": {step: {"gpu": found.steps[step], "cpu": expected.steps[step]} for step in expected.steps}}
    if found.log:
        verdict.figures |= {"launches": found.launches(), "kernels": len(found.log["kernels"]),
                            **{name: found.log[name] for name in ("translate_s", "ptxas_s", "kernels_run_s", "cpu_s")}}
    return verdict


def training(precision: str, sets: list = (), what: str = "packed rows", steps: int = 2,
             environment: dict | None = None, name: str = "", tolerance: str = ""):
    """Steps on the stand-in against the CPU's, within the tolerance of `precision` or another."""
    def check(lab: Lab) -> Verdict:
        cuda = lab.train(precision, steps=steps, sets=sets, environment=environment, name=name)
        return compare(cuda, lab.train(precision, "cpu", steps=steps, sets=sets), tolerance or precision, what)
    return check


def eight_bits(lab: Lab) -> Verdict:
    """The CPU does not round what codes are multiplied with: the norm is off by 0.27. Decoded matrices would be nearer to it."""
    sets = ["model.quantization=fp8"]
    verdict = training("bf16", sets, "fp8", tolerance="fp8")(lab)
    launched = {kernel["name"] for kernel in lab.train("bf16", sets=sets).log["kernels"] if kernel["launches"]}
    verdict.problems += [f"{kernel} is not launched" for kernel in ("fp8_rounded", "fp8_transposed") if kernel not in launched]
    return verdict


def generation(precision: str):
    """Text of an evaluation, greedy, letter by letter, and what `generate` writes with the trained adapter."""
    def check(lab: Lab) -> Verdict:
        runs = {device: lab.train(precision, device, sets=EVALUATION, name=f"evaluation-{device}")
                for device in (lab.device, "cpu")}
        verdict = compare(runs[lab.device], runs["cpu"], precision, "evaluation, text")
        samples, texts = {}, {}
        for device, run in runs.items():
            folder = lab.work / "runs" / f"{lab.lane}-evaluation-{device}"
            if run.rc == 0:
                rows = map(json.loads, (folder / "samples.jsonl").read_text().splitlines())
                samples[device] = [row["text"] for row in rows]
            adapter = lab.work / "runs" / f"{lab.lane}-evaluation-cpu" / "adapter"
            written = lab.run(f"{lab.lane}-generate-{device}", [
                "generate", "--model", ROOT / "quickstart/model", "--adapter", adapter, "--device", device,
                "--max-new-tokens", "12", "--prompt", PROMPT], {})
            verdict.problems += ended(written)
            texts[device] = written.out
        if samples.get(lab.device) != samples.get("cpu") or texts[lab.device] != texts["cpu"] or not texts["cpu"]:
            verdict.problems.append(f"other texts: {samples} {texts}")
        return verdict
    return check


def same(precision: str, what: str, environment: dict, sets: list = ()):
    """Another way to run the same steps: every bit of the figures equals that of the plain run."""
    def check(lab: Lab) -> Verdict:
        plain = lab.train(precision, sets=sets)
        other = lab.train(precision, sets=sets, environment=environment, name=tidy(f"{what}-{precision}"))
        verdict = Verdict(what, ended(other))
        if other.steps != plain.steps or not plain.steps:
            verdict.problems.append(f"{other.steps} instead of {plain.steps}")
        return verdict
    return check


def in_host_memory(what: str, sets: list = ()):
    """Blocks that come from pinned memory, on a stream beside those that compute, with streams in lazy order: steps as on
    the CPU, with less memory on the device (where the lane is warm: tuning takes more than either)."""
    def check(lab: Lab) -> Verdict:
        resident = lab.train("f32", sets=sets)
        found = lab.train("f32", sets=[*sets, "model.residency=host"], environment={"STAND_IN_ORDER": "lazy"})
        verdict = compare(found, lab.train("f32", "cpu", sets=sets), "f32", what)
        names = ("device_bytes_peak", "pinned_bytes_peak")
        here, there = ([run.log[name] for name in names] for run in (resident, found))
        verdict.what += ": {:.2f} instead of {:.2f} MiB on the device, {:.2f} instead of {:.2f} pinned".format(
            *(bytes / 2**20 for pair in zip(there, here) for bytes in pair))
        if not there[0] < here[0]:
            verdict.problems.append("no less memory on the device")
        return verdict
    return check


def resumed(precision: str, what: str = "stopped and resumed"):
    """A run that is interrupted after two of four steps and resumed equals one that is not, but for the order of sums."""
    def check(lab: Lab) -> Verdict:
        whole = lab.train(precision, steps=4)
        stopped = lab.train(precision, steps=4, name="stopped", stop_after=2)
        verdict = Verdict(what, ended(stopped, 130))
        if not 2 <= len(stopped.steps) < 4:
            verdict.problems.append(f"stopped after {len(stopped.steps)} steps")
        rest = lab.train(precision, steps=4, name="stopped", resume=True)
        verdict.problems += ended(rest)
        steps = zip(rest.steps.values(), whole.steps.values())
        if rest.steps.keys() != whole.steps.keys() or any(off(*pair) > RESUMED for step in steps for pair in zip(*step)):
            verdict.problems.append(f"{rest.steps} instead of {whole.steps}")
        return verdict
    return check


def fault(setting: str, value: str, names: list, goes_on: bool = False, precision: str = "f32"):
    """A fault in the second of two steps: exit code 1 and one message, which names it and does not blame lora-train.

    `value`: where, as a part of what the undisturbed run does, and a code after a colon. `goes_on`: not fatal either."""
    def check(lab: Lab) -> Verdict:
        plain = lab.train(precision)
        part, colon, code = value.partition(":")
        total = {"STAND_IN_OOM_AT": "device_allocations", "STAND_IN_MEM": "device_bytes_peak"}.get(setting, "launches_run")
        at = max(1, round(float(part) * plain.log[total]))
        kind = setting.removeprefix("STAND_IN_").lower()
        run = lab.train(precision, name=f"{kind}-{tidy(value)}", environment={
            setting: f"{at}{colon}{code}", "STAND_IN_QUIET": "1"})
        verdict = Verdict(f"{kind} {at} of {plain.log[total]} {code}".strip())
        lines = [line for line in run.err.splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("error:")]
        verdict.figures = {"rc": run.rc, "steps": run.steps, "lines": len(lines), "message": lines[:15]}
        if goes_on and run.rc == 0:
            verdict.what += ", went on"
            verdict.problems += [] if run.steps == plain.steps else [f"{run.steps} instead of {plain.steps}"]
            return verdict
        if run.rc != 1:
            verdict.problems.append(f"exit code {run.rc}")
        if len(errors) != 1 or len(lines) > 15:
            verdict.problems.append(f"{len(errors)} errors in {len(lines)} lines")
        if "bug in lora-train" in run.err:
            verdict.problems.append("is called a bug in lora-train")
        if not any(name in run.err for name in names):
            verdict.problems.append(f"does not say {' or '.join(names)}")
        return verdict
    return check


def two_ranks(what: str, environment: dict, says: list, precision: str = "f32", sets: tuple = ()):
    """Two processes, each with a GPU of its own, train what one does, and say how gradients went."""
    def check(lab: Lab) -> Verdict:
        name, one = tidy(what), lab.train(precision, sets=sets or UNCUT, name=f"one-{precision}")
        both = lab.train(precision, sets=sets or UNCUT, name=name, environment=RANKS | environment, ranks=2)
        verdict = compare(both, one, precision, what)
        if both.rc == one.rc == 0 and precision == "f32":
            folders = [lab.work / "runs" / f"{lab.lane}-{run}" for run in (name, "one-f32")]
            # The first update goes by the signs of gradients, and some of these are rounding.
            mean = statistics.fmean(abs(a - b) for a, b in zip(*map(adapter, folders), strict=True))
            verdict.what += f": adapters within {mean:.1e} on average, {both.counted('ncclAllReduce')} sums by NCCL"
            verdict.problems += [] if mean < 1e-6 else ["adapters differ"]
            text = both.err + (folders[0] / "environment.json").read_text()
            verdict.problems += [f"does not say {word}" for word in says if word not in text]
        return verdict
    return check


def ranks_end(what: str, fails: str, word: str, seconds: int):
    """The second of two ranks fails in NCCL: both end in time, and one says why."""
    def check(lab: Lab) -> Verdict:
        run = lab.train("f32", name=tidy(what), environment=RANKS | {"STAND_IN_NCCL_FAILS": fails}, ranks=2)
        verdict = Verdict(f"{what}: {run.seconds:.0f} s", [] if run.rc else ["exit code 0"])
        verdict.problems += [f"{run.seconds:.0f} s"] * (run.seconds > seconds)
        if not re.search(f"^error: rank . of 2 on .*: NCCL, between the GPUs: .*{word}", run.err, re.M):
            verdict.problems.append(f"does not say {word}: {run.err[-300:]}")
        return verdict
    return check


def adapter(folder: pathlib.Path) -> array.array:
    data = (folder / "adapter/adapter_model.safetensors").read_bytes()
    return array.array("f", data[8 + int.from_bytes(data[:8], "little"):])


def kernels(what: str, environment: dict, least: int, names: set):
    """These kernels of ours against the CPU's: so many results at least."""
    def check(lab: Lab) -> Verdict:
        run = lab.run(f"kernels-{tidy(what)}", ["doctor", "--kernels", "--json"], environment)
        verdict = Verdict(what, ended(run))
        if run.rc == 0:
            compared = json.loads(run.out)
            verdict.figures = {"compared": compared}
            verdict.what += f": {len(compared)} results"
            verdict.problems += [f"{row['what']}: {row['problem']}" for row in compared if row["problem"]]
            found = {row["kernel"] for row in compared}
            verdict.problems += [] if len(compared) >= least and found == names else [f"too few, of {sorted(found)}"]
        return verdict
    return check


def warned(precision: str, what: str, environment: dict, names: set, word: str):
    """Steps as on the CPU where kernels are found wrong, and a warning that names them, no other, and why."""
    def check(lab: Lab) -> Verdict:
        # A cache of its own: a verdict found with a fault is no other check's, and no later check is the first to compare.
        own = lab.work / "cache" / f"{lab.lane}-{tidy(what)}"
        shutil.rmtree(own, ignore_errors=True)
        found = lab.train(precision, environment=environment | {"LORA_TRAIN_CACHE": str(own)}, name=tidy(what))
        verdict = compare(found, lab.train(precision, "cpu"), precision, what)
        said = next((line for line in found.err.splitlines() if "computes without CUDA kernels" in line), "")
        named = ", ".join(re.findall(r"((?:\w+, )*\w+) \(", said)).split(", ")
        verdict.problems += [] if set(named) == names and word in said else [f"warns {said}, not of {names}, {word}"]
        return verdict
    return check


def doctor(what: str, environment: dict, keywords: list, lacks: str = ""):
    """What `doctor` says where a part is missing: always exit code 0, and a keyword."""
    def check(lab: Lab) -> Verdict:
        if lacks:
            environment.update(incomplete_toolkit(lab, lacks))
        run = lab.run(f"doctor-{tidy(what)}", ["doctor", "--json"], environment | {"STAND_IN_QUIET": "1"})
        verdict = Verdict(what, ended(run))
        verdict.figures = {"says": [line for line in run.out.splitlines() if line][-1:]}
        verdict.problems += [f"does not say {word}" for word in keywords if word not in run.out]
        return verdict
    return check


def doctor_in_an_environment_of_python(lab: Lab) -> Verdict:
    """Nothing names the toolkit and NVRTC but the active environment, where pip has put them."""
    environment = {"CUDA_PATH": "", "LD_LIBRARY_PATH": str(HERE), "VIRTUAL_ENV": str(lab.toolkit.parents[4])}
    return doctor("an environment of Python", environment, [f'"{lab.toolkit}"', f"{lab.toolkit}/lib/libnvrtc"])(lab)


def doctor_with_another_toolkit(lab: Lab) -> Verdict:
    """The loader finds the NVRTC of an older toolkit, by the name of its development files, before that of the toolkit."""
    folder = lab.work / "toolkits" / "older"
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", folder / "libnvrtc.so"], check=True, text=True, input="""
        int nvrtcVersion(int *major, int *minor) { *major = 12; *minor = 4; return 0; }
        int nvrtcGetNumSupportedArchs(int *n) { *n = 0; return 0; }
        int nvrtcGetSupportedArchs(int *list) { (void)list; return 0; }""")
    environment = {"LD_LIBRARY_PATH": f"{HERE}:{folder}:{lab.toolkit}/lib"}
    return doctor("another toolkit", environment, [f'{lab.toolkit}/lib/libnvrtc.so.13","cuda":"13.0"'])(lab)


def doctor_with_cuda_compat(lab: Lab) -> Verdict:
    """The machine's driver is too old, and conda's cuda-compat has another: here a copy of the stand-in, of the same version, so that
    the program, which starts anew with it, could do so for ever."""
    folder = lab.work / "toolkits" / "conda" / "cuda-compat"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    shutil.copy(HERE / "libcuda.so.1", folder / "libcuda.so.580.65.06")
    (folder / "libcuda.so.1").symlink_to("libcuda.so.580.65.06")
    environment = {"STAND_IN_DRIVER": "12040", "CONDA_PREFIX": str(folder.parent)}
    return doctor("cuda-compat", environment, [f'{folder}/libcuda.so.580.65.06","', "12.4"])(lab)


def incomplete_toolkit(lab: Lab, lacks: str) -> dict:
    """A copy of the toolkit, of links, without what matches."""
    copy = lab.work / "toolkits" / tidy(lacks)
    shutil.rmtree(copy, ignore_errors=True)
    for folder in ("include", "lib", "nvvm/libdevice"):
        (copy / folder).mkdir(parents=True)
        for file in (lab.toolkit / folder).iterdir():
            if not re.search(lacks, f"{folder}/{file.name}"):
                (copy / folder / file.name).symlink_to(file)
    return {"CUDA_PATH": str(copy), "LD_LIBRARY_PATH": f"{HERE}:{copy}/lib"}


def bench(config: str, rows: int, length: int, bounds: dict, sets: list = (), layers: int | None = None):
    """What a step of a model of real size, or of its first layers, asks of the driver: the difference of two runs of one and three steps."""
    def check(lab: Lab) -> Verdict:
        path = ROOT / f"configs/{config}.json"
        if layers:
            values, path = json.loads(path.read_text()), lab.work / "runs" / f"{config}-of-{layers}-layers.json"
            path.write_text(json.dumps(values | {"num_hidden_layers": layers}))
        runs, changes = {}, [word for change in sets for word in ("--set", change)]
        # The first one compiles and tunes, and is not one of the two.
        for number, steps in enumerate((1, 1, 3)):
            name = tidy("-".join([config, *sets, str(number)]))
            recipe = lab.work / "runs" / f"{name}.toml"
            recipe.write_text(BENCH.format(output=lab.work / "runs" / name, config=path, rows=rows,
                                           length=length, steps=steps))
            runs[number] = lab.run(name, ["bench", recipe, "--warmup", "1", *changes], RECORDED)
            if problems := ended(runs[number]):
                return Verdict(f"{rows} x {length}", problems)
        cold, one, three = runs.values()
        planned = lab.run(f"{config}-plan", ["plan", recipe, "--json", *changes], RECORDED)
        printed = json.loads(three.out.splitlines()[-1])

        def a_step(call, what="count"):
            return (three.counted(call, what) - one.counted(call, what)) / 2
        waits = ("cuStreamSynchronize", "cuEventSynchronize", "cuCtxSynchronize")
        figures = {
            "launches": (three.launches() - one.launches()) / 2,
            "host_seconds": printed["step_seconds"] - (three.log["kernels_run_s"] - one.log["kernels_run_s"]) / 2,
            "cpu_seconds": (three.log["cpu_s"] - one.log["cpu_s"]) / 2,
            "syncs": sum(a_step(call) for call in waits),
            "copies_to_host": a_step("cuMemcpyDtoHAsync_v2") + a_step("cuMemcpyDtoH_v2"),
            "copies_to_device": a_step("cuMemcpyHtoDAsync_v2") + a_step("cuMemcpyHtoD_v2"),
            "bytes_to_device": a_step("cuMemcpyHtoDAsync_v2", "bytes") + a_step("cuMemcpyHtoD_v2", "bytes"),
            "device_peak_gib": three.log["device_bytes_peak"] / 2**30,
            "planned_gib": (json.loads(planned.out)["peak_bytes"] - CONTEXT_BYTES) / 2**30 if planned.rc == 0 else None,
            "kernels_cold": len(cold.log["kernels"]),
            "first_step_seconds_cold": json.loads(cold.out.splitlines()[-1])["first_step_seconds"],
            "ptxas_seconds_cold": cold.log["ptxas_s"],
            "loss": printed["loss"],
            "by_kernel": by_kernel(one.log, three.log),
        }
        over = figures["device_peak_gib"] / figures["planned_gib"] if figures["planned_gib"] else None
        figures |= {"over_plan": over, "under_plan": 1 / over if over else None}
        verdict = Verdict("{}x{}: {:.0f} launches, {:.0f} syncs, {:.2f} s host, {:.2f} of {:.2f} GiB".format(
            rows, length, *(figures[name] or 0 for name in ("launches", "syncs", "host_seconds", "device_peak_gib",
                                                           "planned_gib"))), figures=figures)
        # Were it no number, the update would be left out.
        for name, bound in {"loss": 0.0, **bounds}.items():
            if figures[name] is None or not figures[name] <= bound:
                verdict.problems.append(f"{name} {figures[name]}, at most {bound}")
        return verdict
    return check


def pass_of_texts(lab: Lab) -> Verdict:
    """What a pass of 64 texts with an adapter asks of the driver: the difference of texts of 4 and of 12 tokens."""
    prompts, adapter = lab.work / "runs" / "prompts.jsonl", lab.work / "runs" / f"{lab.lane}-texts" / "adapter"
    prompts.write_text("".join(json.dumps({"prompt": f"Mia has {count} kites."}) + "\n" for count in range(64)))
    lab.train("bf16", name="texts", steps=1)
    runs = [lab.run(f"texts-of-{tokens}", [
        "generate", "--model", lab.model("bf16"), "--adapter", adapter, "--device", "cuda", "--temperature", "1", "--prompts", prompts,
        "--max-new-tokens", tokens], {}) for tokens in (4, 12)]
    if problems := [problem for run in runs for problem in ended(run)]:
        return Verdict("64 texts", problems)
    few, more = runs
    layers = json.loads((ROOT / "quickstart/model/config.json").read_text())["num_hidden_layers"]
    counted = {"launches": lambda run: run.launches(), "copies_to_host": lambda run: run.counted("cuMemcpyDtoHAsync_v2"),
               "bytes_to_host": lambda run: run.counted("cuMemcpyDtoHAsync_v2", "bytes")}
    figures = {name: (count(more) - count(few)) / 8 for name, count in counted.items()}
    verdict = Verdict("64 texts: {launches:.0f} launches a pass, {bytes_to_host:.0f} bytes to the host".format(**figures), figures=figures)
    for name, bound in (("launches", 20 * layers + 10), ("copies_to_host", 1), ("bytes_to_host", 8 * 64)):
        if not 0 < figures[name] <= bound:
            verdict.problems.append(f"{name} {figures[name]}, at most {bound}")
    return verdict


def by_kernel(one: dict, three: dict) -> dict:
    """Launches a step of kernels of the same name but for its hash, most first."""
    launches = collections.Counter()
    for sign, log in ((1, three), (-1, one)):
        for kernel in log["kernels"]:
            launches[re.sub(r"_?[0-9a-f]{12,}|_\d+", "", kernel["name"])[:60]] += sign * kernel["launches"] / 2
    return {name: count for name, count in launches.most_common(40) if count}


def registers(work: pathlib.Path) -> list:
    """Kernels with the most bytes spilled, then registers, of all logs; what ptxas said."""
    kernels = {}
    for log in (work / "runs").glob("*.json"):
        for kernel in json.loads(log.read_text()).get("kernels", []):
            if kernel["registers"]:
                kept = ("hash", "name", "registers", "stack", "spill_stores", "spill_loads", "static_shared")
                row = kernels.setdefault(kernel["hash"], {key: kernel[key] for key in kept} | {"launches": 0})
                row["launches"] += kernel["launches"]
    return sorted(kernels.values(), key=lambda k: (-k["spill_stores"], -k["registers"]))


def report(rows: list, work: pathlib.Path, seconds: float) -> dict:
    """What --json writes."""
    return {"seconds": round(seconds, 1), "failed": [row["name"] for row in rows if row["verdict"] != "ok"], "rows": rows,
            "kernels": registers(work)}


def one_lane(lab: Lab, checks: list, tell) -> None:
    for check in checks:
        began = time.monotonic()
        try:
            verdict = check.call(lab)
        except Exception:   # of one row; the others still say something
            verdict = Verdict("", [traceback.format_exc(limit=-2)])
        tell({"name": check.name, "precision": check.precision, "seconds": round(time.monotonic() - began, 1),
              "verdict": "FAIL" if verdict.problems else "ok", **dataclasses.asdict(verdict)})


def show(row: dict) -> None:
    def number(value):
        return "-" if value is None else f"{value:.1e}"
    what = row["what"] + "".join(f"; {problem}" for problem in row["problems"])
    print(f"| {row['name']} | {row['precision']} | {number(row['loss'])} | {number(row['norm'])} | {row['seconds']:.0f} "
          f"| {row['verdict']} | {what[:400]} |", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--binary", type=pathlib.Path, required=True)
    parser.add_argument("--toolkit", type=pathlib.Path, required=True)
    parser.add_argument("--work", type=pathlib.Path, required=True)
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--only", nargs="+", default=[""])
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    given = parser.parse_args()
    began = time.monotonic()
    if not shutil.which("mpirun") and not os.environ.get("LORA_TRAIN_NO_SKIPS"):
        print("skipped: no mpirun for several ranks")
        del LANES["ranks"]
    chosen = {lane: [check for check in checks if (given.full or not check.full or given.only != [""])
                     and check.name.startswith(tuple(given.only))] for lane, checks in LANES.items()}
    for name, settings in (("plain", ""), ("strict", '[memory]\npersistent_memory = "enforced"\n')):
        folder = given.work.resolve() / "start" / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "cubecl.toml").write_text(settings)
    (given.work / "runs").mkdir(exist_ok=True)
    rows, lock = [], threading.Lock()

    def tell(row):
        with lock:
            rows.append(row)
            show(row)
            if given.json:
                given.json.write_text(json.dumps(report(rows, given.work, time.monotonic() - began), indent=1))
    print("| check | precision | loss off | norm off | seconds | verdict | what |\n|---|---|---:|---:|---:|---|---|")
    with concurrent.futures.ThreadPoolExecutor(given.jobs) as pool:
        places = (given.binary.resolve(), given.toolkit.resolve(), given.work.resolve())
        lanes = [pool.submit(one_lane, Lab(*places, lane), checks, tell) for lane, checks in chosen.items()]
        for lane in lanes:
            lane.result()
    result = report(rows, given.work, time.monotonic() - began)
    print("{num} checks, {failed} failed, {seconds:.0f} s; {kernels} kernels assembled, {spill} spill, at most {most} "
          "registers".format(num=len(rows), failed=len(result["failed"]), seconds=result["seconds"],
                             kernels=len(result["kernels"]), spill=sum(k["spill_stores"] > 0 for k in result["kernels"]),
                             most=max((k["registers"] for k in result["kernels"]), default=0)))
    return 1 if result["failed"] or not rows else 0


NO_MEMORY = ["out of memory", "out of device memory", "OUT_OF_MEMORY", "no memory left"]
STRICT = {"STAND_IN_CHECK": "1"}   # and one allocation for each tensor: see Lab.run


def on_another_gpu(cc: int, precision: str, full: bool) -> Check:
    name, claimed = f"sm_{cc}", {"STAND_IN_CC": f"{cc // 10}.{cc % 10}"}
    return Check(f"{name}-{precision}", training(precision, what=name, environment=claimed, name=name), full, precision)


def with_other_winners(seed: int, precision: str) -> Check:
    # Some candidates take more threads than the limit of the other checks.
    name, environment = f"random-{seed}", {"STAND_IN_TIME": f"random:{seed}", "STAND_IN_EXEC": "1000000"}
    steps = training(precision, what="other winners of the tuning", environment=environment, name=name)
    return Check(f"{name}-{precision}", steps, True, precision)


TABLE = dict(re.findall(r'^    [A-Z]\w+ +"(\w+)" +(\w+)', (ROOT / "src/ops/cuda/table.rs").read_text(), re.M))
KERNELS, AMPERE = set(TABLE), {name for name, gpus in TABLE.items() if gpus not in ("All", "Turing")}
# Whole micro-batches, one for each of two ranks; so many gradients that they are summed in several buckets.
UNCUT = ("train.gradient_accumulation_steps=2", "lora.r=64")
RANKS = {"STAND_IN_GPUS": "2", "LORA_TRAIN_NCCL": str(HERE / "libnccl.so.2"), "RAYON_NUM_THREADS": "1"}

# Rows of a lane run one after the other and share what was compiled; lanes run at the same time.
FULL = True
LANES = {
    "ranks": [
        Check("ranks-nccl", two_ranks("NCCL", {"STAND_IN_ORDER": "lazy"}, ["summed by NCCL 2.27.3", '"gradients_summed_by": "NCCL 2.27.3"'])),
        # Of a micro-batch that is cut, both halves have the loss scale and the dropout of the whole, whose rows are padded.
        Check("ranks-f16", two_ranks("f16, cut between rows", {"STAND_IN_ORDER": "lazy"}, [], "f16",
                                     ("lora.r=64", "data.packing=false", "lora.lora_dropout=0.5")), precision="f16"),
        Check("ranks-one-gpu", two_ranks("two ranks of one GPU", {"CUDA_VISIBLE_DEVICES": "0"}, [
            "through host memory: ranks 0 and 1 have the same GPU", '"gradients_summed_by": "Open MPI'])),
        Check("ranks-nccl-fails", ranks_end("a sum that fails", "sum", "remote process exited", 60)),
        Check("ranks-nccl-hangs", two_ranks("a rank that NCCL does not connect", {"STAND_IN_NCCL_FAILS": "init"}, [
            "through host memory: NCCL, between the GPUs: it does not connect for 6", '"gradients_summed_by": "Open MPI'])),
    ],
    "f32": [
        Check("f32", training("f32", steps=4)),
        Check("f32-resumed", resumed("f32")),
        Check("f32-no-checkpointing", training("f32", ["train.gradient_checkpointing=false"], "all kept")),
        Check("f32-offload", training("f32", ['train.gradient_checkpointing="offload"'], "offloaded")),
        Check("f32-host", in_host_memory("blocks in host memory")),
        Check("f32-host-nf4", in_host_memory("blocks in host memory, nf4", [
            "model.quantization=nf4", "model.double_quantization=true", 'train.gradient_checkpointing="offload"',
            "train.gradient_accumulation_steps=2", "train.layered_accumulation=true"]), FULL),
        Check("f32-lazy", same("f32", "streams in lazy order", {"STAND_IN_ORDER": "lazy"})),
        Check("f32-zeros", same("f32", "fresh memory is zero", {"STAND_IN_POISON": "0"}), FULL),
        Check("f32-strict", same("f32", "every access checked", STRICT)),
        # One allocation that fails is tried again, after memory that is kept for reuse was given back.
        Check("fault-oom-0", fault("STAND_IN_OOM_AT", "0", NO_MEMORY, goes_on=True), FULL),
        Check("fault-oom-0.5", fault("STAND_IN_OOM_AT", "0.5", NO_MEMORY, goes_on=True)),
        Check("fault-oom-1", fault("STAND_IN_OOM_AT", "1", NO_MEMORY, goes_on=True), FULL),
        Check("fault-memory-0.5", fault("STAND_IN_MEM", "0.5", NO_MEMORY)),
        Check("fault-memory-0.8", fault("STAND_IN_MEM", "0.8", NO_MEMORY), FULL),
        Check("fault-refused-0.1", fault("STAND_IN_REFUSE_AT", "0.1", ["LAUNCH_OUT_OF_RESOURCES"]), FULL),
        Check("fault-refused-0.7", fault("STAND_IN_REFUSE_AT", "0.7", ["LAUNCH_OUT_OF_RESOURCES"])),
        Check("fault-refused-0.95", fault("STAND_IN_REFUSE_AT", "0.95", ["LAUNCH_OUT_OF_RESOURCES"]), FULL),
        Check("fault-address", fault("STAND_IN_FAULT_AT", "0.6", ["ILLEGAL_ADDRESS"])),
        Check("fault-ecc", fault("STAND_IN_FAULT_AT", "0.7:214", ["ECC_UNCORRECTABLE"])),
        Check("fault-lost", fault("STAND_IN_FAULT_AT", "0.8:46", ["DEVICE_UNAVAILABLE"])),
    ],
    "more": [
        Check("f32-odd", training("f32", ODD, "rows of odd lengths")),
        Check("f32-evaluation", generation("f32")),
        Check("f32-dropout", training("f32", ["lora.lora_dropout=0.1"], "dropout")),
        Check("f32-nf4", training("f32", ["model.quantization=nf4", "model.double_quantization=true"], "nf4, quantised scales")),
        Check("f32-int8", training("f32", ["model.quantization=int8"], "int8")),
    ],
    "half": [
        Check("bf16-kernels", kernels("every kernel", {}, 380, KERNELS), precision="bf16"),
        Check("f16-kernels-old", kernels("those of a T4", {"STAND_IN_CC": "7.5"}, 165, KERNELS - AMPERE), precision="f16"),
        Check("bf16", training("bf16"), precision="bf16"),
        Check("bf16-texts", pass_of_texts, precision="bf16"),
        Check("bf16-dropout", training("bf16", ["lora.lora_dropout=0.1"], "dropout"), precision="bf16"),
        Check("bf16-fp8", eight_bits, precision="bf16"),
        Check("bf16-plain", training("bf16", what="without kernels of our own", environment={"LORA_TRAIN_CUDA_KERNELS": "none"},
                                     name="plain-calls"), FULL, precision="bf16"),
        Check("bf16-without-cublas", warned(
            "bf16", "no handle of cuBLASLt, and a kernel that ends its process",
            {"STAND_IN_LT_FAILS": "create", "STAND_IN_FAULT_IN": "swiglu", "STAND_IN_EXCLUSIVE": "1"},
            {"products", "fp8", "swiglu"}, "swiglu: CUDA_ERROR_ILLEGAL_ADDRESS"), precision="bf16"),
        Check("bf16-refused", training("bf16", what="no product that cuBLASLt takes", environment={"STAND_IN_LT_FAILS": "heuristic"},
                                       name="refused"), precision="bf16"),
        Check("fault-address-bf16", fault("STAND_IN_FAULT_AT", "0.6", ["ILLEGAL_ADDRESS"], precision="bf16"), precision="bf16"),
        Check("fault-refused-bf16", fault("STAND_IN_REFUSE_AT", "0.7", ["LAUNCH_OUT_OF_RESOURCES"], precision="bf16"),
              precision="bf16"),
        Check("bf16-odd", training("bf16", ODD, "rows of odd lengths"), FULL, "bf16"),
        Check("bf16-lazy", same("bf16", "streams in lazy order", {"STAND_IN_ORDER": "lazy"}), precision="bf16"),
        Check("bf16-strict", same("bf16", "every access checked", STRICT), FULL, "bf16"),
        Check("f16", training("f16"), precision="f16"),
    ],
    "bench": [
        # A step needs one wait, for its loss; in every second one CubeCL waits for copies of the step before it.
        Check("bench-qwen3-0.6b", bench("qwen3-0.6b", 4, 2048, {
            "launches": 1_700, "syncs": 2, "copies_to_host": 1, "copies_to_device": 32, **PLANNED}), precision="bf16"),
        Check("bench-llama-3.2-1b", bench("llama-3.2-1b", 4, 2048, {
            "launches": 1_000, "syncs": 2, "copies_to_host": 1, "copies_to_device": 32, **PLANNED}), precision="bf16"),
        Check("bench-nf4", bench("llama-3.2-1b", 4, 2048, {
            "launches": 2_600, "syncs": 2, "copies_to_host": 1, "copies_to_device": 32, **PLANNED},
            ["model.quantization=nf4"]), FULL, "bf16"),
        Check("bench-fp8", bench("llama-3.2-1b", 4, 2048, {
            "launches": 1_700, "syncs": 2, "copies_to_host": 1, "copies_to_device": 32, **PLANNED},
            ["model.quantization=fp8"]), FULL, "bf16"),
        # A thread of CubeCL's own waits for what another stream still uses.
        Check("bench-host", bench("llama-3.2-1b", 4, 2048, {"copies_to_host": 1, "over_plan": 1.1, "device_peak_gib": 6},
                                  ["model.residency=host"]), FULL, "bf16"),
        Check("bench-qwen3.5-4b", bench("qwen3.5-4b", 1, 4096, {"launches": 3_300, "syncs": 3, "copies_to_host": 1, **PLANNED}), FULL, "bf16"),
        # The host does not wait for what routers choose.
        Check("bench-qwen3-30b-a3b", bench("qwen3-30b-a3b", 1, 4096, {"launches": 190, "syncs": 3, "copies_to_host": 1, **PLANNED},
                                           layers=2), FULL, "bf16"),
        Check("bench-qwen3-30b-a3b-nf4", bench("qwen3-30b-a3b", 1, 4096, {"launches": 1000, "syncs": 3, "copies_to_host": 1, **PLANNED},
                                               ["model.quantization=nf4"], layers=2), FULL, "bf16"),
        Check("bench-qwen3-30b-a3b-experts", bench("qwen3-30b-a3b", 1, 4096, {"launches": 1000, "syncs": 3, "copies_to_host": 1, **PLANNED},
                                                   ['lora.target_modules="all-linear"', "lora.expert_rank=8"], layers=2), FULL, "bf16"),
        Check("bench-llama-3.1-8b", bench("llama-3.1-8b", 1, 4096, {"launches": 2_000, "copies_to_host": 1, **PLANNED}), FULL, "bf16"),
    ],
    "doctor": [
        Check("doctor", doctor("complete", {}, ["cuda", '"libnccl":{'])),
        Check("doctor-headers", doctor("no headers", {}, ["nvidia-cuda-runtime"], lacks="include/")),
        Check("doctor-nvrtc", doctor("no NVRTC", {}, ["libnvrtc cannot be loaded"], lacks="libnvrtc")),
        Check("doctor-pip", doctor_in_an_environment_of_python),
        Check("doctor-other", doctor_with_another_toolkit),
        # Only a build with LLVM needs it.
        Check("doctor-libdevice", doctor("no libdevice", {}, ["cuda"], lacks="libdevice")),
        Check("doctor-driver-11.8", doctor("driver 11.8", {"STAND_IN_DRIVER": "11080"}, ["11.8"])),
        Check("doctor-driver-12.4", doctor("driver 12.4", {"STAND_IN_DRIVER": "12040"}, ["12.4", "cuda-compat-13-0"])),
        Check("doctor-cuda-compat", doctor_with_cuda_compat),
        Check("doctor-driver-13.2", doctor("driver 13.2", {"STAND_IN_DRIVER": "13020"}, ["13.2"])),
    ],
    "sm_75": [on_another_gpu(75, "f16", False)],
    "sm_80": [on_another_gpu(80, "bf16", FULL), on_another_gpu(80, "f32", FULL)],
    "sm_120": [on_another_gpu(120, "bf16", FULL), on_another_gpu(120, "f32", FULL)],
    "random-1": [with_other_winners(1, "f32"), with_other_winners(1, "bf16")],
    "random-2": [with_other_winners(2, "f32"), with_other_winners(2, "bf16")],
}

if __name__ == "__main__":
    sys.exit(main())
