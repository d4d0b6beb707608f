#!/usr/bin/env python3
"""Packs a built program as a Python wheel; scripts/release.sh does it with what it builds.

usage: scripts/wheel.py [--cuda] PROGRAM FOLDER

`lora-train` has the program for the CPU. `lora-train[cuda]` also brings `lora-train-cuda` (--cuda): the program for NVIDIA
GPUs, which the first starts in its place, and NVIDIA's packages, which that one finds in the same environment; with
`lora-train[cuda12]` these are for older drivers. The same program gives the same bytes. Prints the wheel's path.
"""

import base64
import hashlib
import pathlib
import platform
import re
import subprocess
import sys
import tomllib
import zipfile

root = pathlib.Path(__file__).parents[1]
package = tomllib.loads((root / "Cargo.toml").read_text())["package"]
version = package["version"]
is_cuda = "--cuda" in sys.argv
program, folder = (pathlib.Path(argument) for argument in sys.argv[1:] if argument != "--cuda")

name = "lora-train-cuda" if is_cuda else "lora-train"
headers = [f"Name: {name}", f"Version: {version}", f"Summary: {package['description']}", f"License: {package['license']}"]
if is_cuda:
    # pip then says so if one of the two is upgraded without the other.
    requires = [f"lora-train=={version}"]
else:
    # Drivers from 580 on load what CUDA 13.0 compiles, those from 570 on what 12.8 does; cuBLAS 13.1 is CUDA 13.0's too. Parts:
    # src/device/toolkit.rs and pip.rs.
    extras = {"cuda": ["nvidia-cublas>=13.0,<13.2", *(f"nvidia-cuda-{part}==13.0.*" for part in ("nvrtc", "runtime", "crt", "cccl"))],
              "cuda12": ["nvidia-cublas-cu12==12.8.*",
                         *(f"nvidia-cuda-{part}-cu12==12.8.*" for part in ("nvrtc", "runtime", "nvcc", "cccl"))]}
    headers += [f"Provides-Extra: {extra}" for extra in extras]
    requires = [f'{needed}; extra == "{extra}"' for extra, parts in extras.items() for needed in (f"lora-train-cuda=={version}", *parts)]
headers += [f"Requires-Dist: {required}" for required in requires]
readme = (root / "README.md").read_text()

# The newest glibc whose symbols it takes. libstdc++ of the same distribution is older than that.
symbols = subprocess.run(["objdump", "-T", program], check=True, capture_output=True, text=True).stdout
major, minor = max((int(a), int(b)) for a, b in re.findall(r"GLIBC_(\d+)\.(\d+)", symbols))
tag = f"py3-none-manylinux_{major}_{minor}_{platform.machine()}"

stem = f"{name.replace('-', '_')}-{version}"
info = f"{stem}.dist-info"
files = {
    f"{stem}.data/scripts/{name}": program.read_bytes(),
    f"{info}/licenses/LICENSE": (root / "LICENSE").read_bytes(),
    f"{info}/METADATA": "\n".join(
        ["Metadata-Version: 2.1", *headers, "Description-Content-Type: text/markdown", "", readme]
    ).encode(),
    f"{info}/WHEEL": f"Wheel-Version: 1.0\nGenerator: scripts/wheel.py\nRoot-Is-Purelib: false\nTag: {tag}\n".encode(),
}
record = f"{info}/RECORD"
hashes = {path: base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=") for path, data in files.items()}
lines = [f"{path},sha256={hashes[path]},{len(data)}" for path, data in files.items()]
files[record] = "\n".join([*lines, f"{record},,", ""]).encode()

wheel = folder / f"{stem}-{tag}.whl"
with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
    for path, data in files.items():
        entry = zipfile.ZipInfo(path)
        entry.compress_type = zipfile.ZIP_DEFLATED
        entry.external_attr = (0o100755 if "/scripts/" in path else 0o100644) << 16
        archive.writestr(entry, data)
print(wheel)
