#!/usr/bin/env python3
"""Compiles src/ops/cuda/kernels/NAME.cu to NAME.ptx beside it, for compute capability 8.0 and newer, or as `ARCHITECTURES` says.

usage: build_cuda_kernels.py [--check]

With --check nothing is written: exits 1 if a .ptx that is committed is not what its source gives. Wants libnvrtc of
nvidia-cuda-nvrtc-cu12 of requirements-kernels.txt in the Python that runs it; other versions give other PTX.
"""
import argparse
import ctypes
import pathlib
import re
import sys

import nvidia.cuda_nvrtc

KERNELS = pathlib.Path(__file__).resolve().parent.parent / "src/ops/cuda/kernels"
# By the end of the name; what it asks for is of this one alone.
ARCHITECTURES = {"_hopper": "compute_90a", "fp8": "compute_89", "twice": "compute_75"}
OPTIONS = ["--std=c++17", f"--include-path={KERNELS}"]
nvrtc = ctypes.CDLL(str(pathlib.Path(nvidia.cuda_nvrtc.__path__[0]) / "lib/libnvrtc.so.12"))


def text_of(program: ctypes.c_void_p, what: str) -> str:
    size = ctypes.c_size_t()
    getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
    text = ctypes.create_string_buffer(size.value)
    getattr(nvrtc, f"nvrtcGet{what}")(program, text)
    return text.value.decode()


def compile_ptx(source: pathlib.Path) -> str:
    program = ctypes.c_void_p()
    nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.read_bytes(), source.name.encode(), 0, None, None)
    architecture = next((name for end, name in ARCHITECTURES.items() if source.stem.endswith(end)), "compute_80")
    texts = [f"--gpu-architecture={architecture}", *OPTIONS]
    options = (ctypes.c_char_p * len(texts))(*[text.encode() for text in texts])
    if nvrtc.nvrtcCompileProgram(program, len(options), options):
        sys.exit(text_of(program, "ProgramLog"))
    # Comments name the compiler's build.
    return re.sub(r"\n\s*\n+", "\n", re.sub(r"^\s*//.*", "", text_of(program, "PTX"), flags=re.M)).lstrip()


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--check", action="store_true")
is_check = parser.parse_args().check
stale = []
for source in sorted(KERNELS.glob("*.cu")):
    target = source.with_suffix(".ptx")
    committed = target.read_text() if target.exists() else None
    # Once in a while NVRTC gives another order of the same instructions.
    if any(compile_ptx(source) == committed for _ in range(3)):
        continue
    if is_check:
        stale.append(target.name)
    else:
        target.write_text(compile_ptx(source))
if stale:
    sys.exit(f"not what the sources give: {', '.join(stale)}; run scripts/build_cuda_kernels.py")
