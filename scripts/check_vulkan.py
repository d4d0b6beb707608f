#!/usr/bin/env python3
"""Holds a build with `--features vulkan` against itself on the CPU, on a software driver (Debian's mesa-vulkan-drivers).

usage: check_vulkan.py [--only NAME...] --binary FILE --work DIR

Losses and gradient norms of a few steps of the quickstart's model, texts, what a run reports, and what it says without a
driver. DIR keeps compiled kernels. Prints a table; exits with 1 if a row failed.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "tests/cuda_stand_in"))
from check import ODD, Check, Verdict, ended, generation, one_lane, resumed, same, show, training  # noqa: E402
from lab import ROOT, Lab  # noqa: E402

NO_DRIVER = {"VK_DRIVER_FILES": "/nonexistent", "VK_ICD_FILENAMES": "/nonexistent"}
LAYER = "VK_LAYER_lora_train_mend"


class Vulkan(Lab):
    """The binary on the first Vulkan device."""

    device = "vulkan"

    def __init__(self, binary: pathlib.Path, work: pathlib.Path):
        super().__init__(binary, pathlib.Path(), work, "vulkan")
        for folder in ("runs", "start/plain", "layer"):
            (work / folder).mkdir(parents=True, exist_ok=True)
        subprocess.run(["cc", "-O1", "-Wall", "-Wextra", "-shared", "-fPIC", "-o", work / "layer/liblayer.so",
                        ROOT / "tests/vulkan_layer/layer.c"], check=True)
        (work / "layer/layer.json").write_text(json.dumps({"file_format_version": "1.1.2", "layer": {
            "name": LAYER, "type": "INSTANCE", "library_path": "./liblayer.so", "api_version": "1.3.230",
            "implementation_version": "1", "description": "mends shaders"}}))

    def environment(self, extra: dict) -> dict:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("CUBECL_", "LORA_TRAIN_"))}
        return kept | {
            "XDG_CACHE_HOME": str(self.work / "cache"), "RUST_BACKTRACE": "0", "HF_HUB_OFFLINE": "1",
            "LORA_TRAIN_SOFTWARE_VULKAN": "1", "VK_LAYER_PATH": str(self.work / "layer"), "VK_INSTANCE_LAYERS": LAYER,
            # Another layer of Mesa's complains on stderr where there is no desktop.
            "NODEVICE_SELECT": "1",
        } | extra


def doctor(lab: Lab) -> Verdict:
    """The device is there, is called what it is, and computes in what it says."""
    run = lab.run("doctor", ["doctor", "--json"], {})
    device = json.loads(run.out)["device vulkan"] if run.rc == 0 else {}
    verdict = Verdict(device.get("name", ""), ended(run))
    if not device.get("usable") or not device["name"].endswith(", software)") or device["f32_product_error"] != 0:
        verdict.problems.append(str(device))
    return verdict


def telemetry(lab: Lab) -> Verdict:
    """A step has the memory of burn's pools, and no figure that only a card has."""
    run = lab.train("f32", sets=["logging.gpu_sample_ms=100"], name="telemetry")
    steps = (lab.work / "runs/vulkan-telemetry/metrics.jsonl").read_text().splitlines() if run.rc == 0 else []
    last = json.loads(steps[-1]) if steps else {}
    found = sorted(name for name in last if name.startswith("gpu_") or name in ("mfu", "energy_joules"))
    verdict = Verdict("reports " + ", ".join(found), ended(run))
    pools = ["gpu_memory_allocated_bytes", "gpu_memory_peak_bytes", "gpu_memory_reserved_bytes"]
    if found != pools or not 0 < last[pools[0]] <= last[pools[1]] <= last[pools[2]] or not last["host_memory_bytes"]:
        verdict.problems.append(str(last))
    return verdict


def without(what: str, device: str, rc: int, keywords: list, environment: dict):
    """What a user is told who asks for a device; exit code `rc`."""
    def check(lab: Lab) -> Verdict:
        run = lab.train("f32", device, steps=1, name=f"{device}-{what}", environment=environment)
        verdict = Verdict(what, ended(run, rc))
        verdict.problems += [f"does not say {word}: {run.err}" for word in keywords if word not in run.err]
        return verdict
    return check


CHECKS = [
    Check("doctor", doctor),
    Check("f32", training("f32", steps=4)),
    Check("f32-again", same("f32", "a second run", {})),
    Check("f32-resumed", resumed("f32")),
    Check("f32-odd", training("f32", ODD, "rows of odd lengths")),
    Check("f32-dropout", training("f32", ["lora.lora_dropout=0.1"], "dropout")),
    Check("f32-no-checkpointing", training("f32", ["train.gradient_checkpointing=false"], "all kept")),
    Check("f32-offload", training("f32", ['train.gradient_checkpointing="offload"'], "offloaded")),
    Check("f32-nf4", training("f32", ["model.quantization=nf4", "model.double_quantization=true"], "nf4")),
    Check("f32-evaluation", generation("f32")),
    Check("f16", training("f16"), precision="f16"),
    Check("telemetry", telemetry),
    Check("no-driver", without("no driver", "vulkan", 2, ["lists no GPU", "mesa-vulkan-drivers"], NO_DRIVER)),
    Check("not-allowed", without("not allowed", "vulkan", 2, ["llvmpipe", "use `--device cpu`"],
                                 {"LORA_TRAIN_SOFTWARE_VULKAN": ""})),
    Check("no-driver-auto", without("auto, no driver", "auto", 0, [], NO_DRIVER)),
    Check("auto", without("auto, a software driver", "auto", 0, [], {})),
]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--binary", type=pathlib.Path, required=True)
    parser.add_argument("--work", type=pathlib.Path, required=True)
    parser.add_argument("--only", nargs="+", default=[""])
    given = parser.parse_args()
    rows = []
    print("| check | precision | loss off | norm off | seconds | verdict | what |\n|---|---|---:|---:|---:|---|---|")
    one_lane(Vulkan(given.binary.resolve(), given.work.resolve()),
             [check for check in CHECKS if check.name.startswith(tuple(given.only))],
             lambda row: (rows.append(row), show(row)))
    return 1 if not rows or any(row["verdict"] != "ok" for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
