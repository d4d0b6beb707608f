#!/usr/bin/env python3
"""Compiles src/ops/cuda/kernels/NAME.cu to PTX and packs all of it into src/ops/cuda/kernels.zst, from which the program loads it: zstd
over every name and its text, each with a zero behind it. NAME is for numbers of bf16 and compute capability 8.0 and newer, NAME.f16
for f16 there, NAME.f16.75 for f16 from 7.5 on; those that `ARCHITECTURES` names are for what it says alone.

usage: build_cuda_kernels.py [--check | --unpack FOLDER]

With --check nothing is written: exits 1 if the archive that is committed is not what the sources give. With --unpack its texts are
written to FOLDER, and nothing is compiled. Wants libnvrtc of nvidia-cuda-nvrtc-cu12 and zstandard of
requirements-kernels.txt in the Python that runs it; other versions give other PTX, and other bytes of it.
"""
import argparse
import ctypes
import multiprocessing
import pathlib
import re
import sys

import nvidia.cuda_nvrtc
import zstandard

KERNELS = pathlib.Path(__file__).resolve().parent.parent / "src/ops/cuda/kernels"
ARCHIVE = KERNELS.with_suffix(".zst")
LEVEL = 19
TRIES = 40
# By the end of the name; what it asks for is of this one alone.
ARCHITECTURES = {"_hopper": "compute_90a", "fp8": "compute_89", "draw": "compute_75", "product": "compute_75", "twice": "compute_75"}
# What is behind the name, and what the others are compiled with.
VARIANTS = {"": ["compute_80"], ".f16": ["compute_80", "IS_F16"], ".f16.75": ["compute_75", "IS_F16"]}
OPTIONS = ["--std=c++17", f"--include-path={KERNELS}"]
nvrtc = ctypes.CDLL(str(pathlib.Path(nvidia.cuda_nvrtc.__path__[0]) / "lib/libnvrtc.so.12"))


def text_of(program: ctypes.c_void_p, what: str) -> bytes:
    size = ctypes.c_size_t()
    getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
    text = ctypes.create_string_buffer(size.value)
    getattr(nvrtc, f"nvrtcGet{what}")(program, text)
    return text.value


def variants(source: pathlib.Path) -> dict[str, list[str]]:
    """By name: for which architecture it is compiled, and with which macros."""
    alone = [architecture for end, architecture in ARCHITECTURES.items() if source.stem.endswith(end)]
    return {source.stem: alone} if alone else {source.stem + end: of for end, of in VARIANTS.items()}


def compile_ptx(source: pathlib.Path, architecture: str, *macros: str) -> bytes:
    program = ctypes.c_void_p()
    nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.read_bytes(), source.name.encode(), 0, None, None)
    texts = [f"--gpu-architecture={architecture}", *OPTIONS, *(f"--define-macro={macro}" for macro in macros)]
    options = (ctypes.c_char_p * len(texts))(*[text.encode() for text in texts])
    if nvrtc.nvrtcCompileProgram(program, len(options), options):
        raise RuntimeError(text_of(program, "ProgramLog").decode())
    # Comments name the compiler's build.
    return re.sub(rb"\n\s*\n+", b"\n", re.sub(rb"^\s*//.*", b"", text_of(program, "PTX"), flags=re.M)).lstrip()


def compiled(source: pathlib.Path, of: list[str], committed: bytes | None) -> bytes:
    """The PTX, as it is committed if NVRTC gives that: with where its memory lies it gives the same instructions in another order and
    in other registers, on some machines and in some processes nearly always."""
    for _ in range(1 if committed is None else TRIES):
        if (text := compile_ptx(source, *of)) == committed:
            break
    return text


def packed(texts: dict[str, bytes]) -> bytes:
    return zstandard.ZstdCompressor(level=LEVEL).compress(b"".join(b"%b\0%b\0" % (name.encode(), texts[name]) for name in sorted(texts)))


def unpacked(archive: bytes) -> dict[str, bytes]:
    parts = zstandard.ZstdDecompressor().decompress(archive).split(b"\0")
    return {name.decode(): text for name, text in zip(parts[::2], parts[1::2])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument("--check", action="store_true")
    choice.add_argument("--unpack", type=pathlib.Path)
    options = parser.parse_args()
    archive = ARCHIVE.read_bytes() if ARCHIVE.exists() else b""
    committed = unpacked(archive) if archive else {}
    if options.unpack:
        options.unpack.mkdir(parents=True, exist_ok=True)
        for name, text in committed.items():
            (options.unpack / f"{name}.ptx").write_bytes(text)
        return
    all_variants = [(source, of, name) for source in sorted(KERNELS.glob("*.cu")) for name, of in variants(source).items()]
    # Each in a process of its own, whose memory no other has filled.
    with multiprocessing.get_context("spawn").Pool(maxtasksperchild=1) as pool:
        found = pool.starmap(compiled, [(source, of, committed.get(name)) for source, of, name in all_variants], chunksize=1)
    texts = {name: text for (_, _, name), text in zip(all_variants, found, strict=True)}
    stale = [name for name, text in texts.items() if text != committed.get(name)]
    stale += committed.keys() - texts.keys()
    if packed(texts) == archive:
        return
    if options.check:
        sys.exit(f"{ARCHIVE.name} is not what the sources give: {', '.join(sorted(stale)) or 'it is packed otherwise'}; run scripts/build_cuda_kernels.py")
    ARCHIVE.write_bytes(packed(texts))


if __name__ == "__main__":
    main()
