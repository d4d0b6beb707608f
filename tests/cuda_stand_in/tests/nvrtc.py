#!/usr/bin/env python3
"""Compiles tests/NAME.cu to tests/NAME.ptx as CubeCL compiles its kernels: nvrtc.py NAME ...

Wants CUDA_PATH, .../nvidia/cu13 of PyPI's nvidia-cuda-nvrtc, -runtime and -cccl 13.0, and LD_LIBRARY_PATH=$CUDA_PATH/lib. The .ptx files
are kept, so that the tests need none of these.
"""
import ctypes
import os
import re
import sys

cuda = os.environ["CUDA_PATH"]
nvrtc = ctypes.CDLL(f"{cuda}/lib/libnvrtc.so.13")


def text_of(program, what):
    size = ctypes.c_size_t()
    getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
    text = ctypes.create_string_buffer(size.value)
    getattr(nvrtc, f"nvrtcGet{what}")(program, text)
    return text.value.decode()


def compile_ptx(name):
    here = os.path.dirname(os.path.abspath(__file__))
    program = ctypes.c_void_p()
    with open(f"{here}/{name}.cu", "rb") as source:
        nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.read(), None, 0, None, None)
    options = ["--gpu-architecture=sm_90a", f"--include-path={cuda}/include", f"--include-path={cuda}/include/cccl"]
    failed = nvrtc.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*[o.encode() for o in options]))
    if failed:
        sys.exit(text_of(program, "ProgramLog"))
    # The library's constants, thousands of lines, are not used.
    ptx = re.sub(r"^\.global [^\n]* _ZN[^\n]*\n", "", text_of(program, "PTX"), flags=re.M)
    with open(f"{here}/{name}.ptx", "w") as out:
        out.write(re.sub(r"\n\s*\n+", "\n", ptx))


for each in sys.argv[1:]:
    compile_ptx(each)
