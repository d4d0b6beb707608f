"""Runs the kernels of src/ops/cuda/kernels by the driver API: on the stand-in for libcuda (../cuda_stand_in), at its strictest,
or on a GPU."""

import argparse
import ctypes
import os
import pathlib

import numpy as np
import zstandard

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
KERNELS = ROOT / "src/ops/cuda/kernels"
STAND_IN = ROOT / "tests/cuda_stand_in/libcuda.so.1"
MAX_DYNAMIC_SHARED_BYTES = 8   # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
COMPUTE_CAPABILITY_MAJOR, MULTIPROCESSOR_COUNT = 75, 16   # CU_DEVICE_ATTRIBUTE_..
TENSOR_MAP_BF16 = 9   # CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
# What is behind the names of modules, and the bits behind the first of a number.
NUMBERS = {"bf16": ("", 7), "f16": (".f16", 10), "f16.75": (".f16.75", 10)}
numbers = "bf16"


def arguments(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--toolkit", help="folder with bin/ptxas, .../nvidia/cu13 of PyPI's nvidia-cuda-nvcc, for the stand-in")
    parser.add_argument("--driver", default=str(STAND_IN), help="libcuda.so.1 of a GPU instead of the stand-in's")
    parser.add_argument("--order", default="lazy", choices=("lazy", "issue"), help="issue: the stand-in's copies happen at once, which "
                        "shows what they overwrite too early")
    parser.add_argument("--numbers", default="bf16", choices=NUMBERS, help="f16.75: f16 on compute capability 7.5")
    return parser


def ptx(module: str) -> bytes:
    """What scripts/build_cuda_kernels.py has packed."""
    parts = zstandard.ZstdDecompressor().decompress(KERNELS.with_suffix(".zst").read_bytes()).split(b"\0")
    texts = dict(zip(parts[::2], parts[1::2]))
    return texts.get((module + NUMBERS[numbers][0]).encode()) or texts[module.encode()]


def is_turing() -> bool:
    return numbers.endswith(".75")


def to_half(x: np.ndarray) -> np.ndarray:
    """Bits of `x` rounded to nearest even, as numbers of 16 bits."""
    x = np.asarray(x, np.float32)
    if numbers != "bf16":
        with np.errstate(over="ignore"):
            return x.astype(np.float16).view(np.uint16)
    bits = x.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def from_half(bits: np.ndarray) -> np.ndarray:
    if numbers != "bf16":
        return np.ascontiguousarray(bits).view(np.float16).astype(np.float32)
    return (bits.astype(np.uint32) << 16).view(np.float32)


def half_bit(x: np.ndarray) -> np.ndarray:
    """Half of the last bit of a number of 16 bits of this size."""
    exponents = np.frexp(x)[1]
    return np.ldexp(1.0, (exponents if numbers == "bf16" else np.maximum(exponents, -13)) - NUMBERS[numbers][1] - 2)


class Buffer:
    """Device memory with the shape and the type of an array."""

    def __init__(self, device: "Device", like: np.ndarray):
        self.device, self.shape, self.dtype, self.bytes = device, like.shape, like.dtype, like.nbytes
        self.pointer = ctypes.c_uint64()
        device.call("cuMemAlloc_v2", ctypes.byref(self.pointer), ctypes.c_size_t(self.bytes))
        like = np.ascontiguousarray(like)
        device.call("cuMemcpyHtoD_v2", self.pointer, like.ctypes.data_as(ctypes.c_void_p), ctypes.c_size_t(self.bytes))

    def read(self) -> np.ndarray:
        out = np.empty(self.shape, self.dtype)
        self.device.call("cuMemcpyDtoH_v2", out.ctypes.data_as(ctypes.c_void_p), self.pointer, ctypes.c_size_t(self.bytes))
        return out


class Device:
    """The first GPU, with modules."""

    waits = True   # for each launch

    def __init__(self, options: argparse.Namespace, *modules: str):
        global numbers
        numbers = options.numbers
        if options.driver == str(STAND_IN):
            if is_turing():
                os.environ["STAND_IN_CC"] = "7.5"
            # Copies happen no earlier than they are waited for, unless `--order issue`; every access is checked; what nothing wrote is NaN.
            os.environ |= {"STAND_IN_ORDER": options.order, "STAND_IN_CHECK": "1", "STAND_IN_POISON": "1"}
            if options.toolkit:
                os.environ["STAND_IN_PTXAS"] = f"{options.toolkit}/bin/ptxas"
        self.driver = ctypes.CDLL(options.driver)
        self.call("cuInit", 0)
        context, self.modules, self.functions, self.buffers = ctypes.c_void_p(), [], {}, []
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
        self.call("cuCtxSetCurrent", context)
        for module in modules:
            self.load(module)

    def load(self, module: str) -> None:
        self.modules.append(ctypes.c_void_p())
        self.call("cuModuleLoadData", ctypes.byref(self.modules[-1]), ptx(module) + b"\0")

    def is_hopper(self) -> bool:
        return self.attribute(COMPUTE_CAPABILITY_MAJOR) == 9

    def tensor_map(self, buffer: Buffer, columns: int, box: tuple[int, int]) -> bytes:
        """The map of the first `columns` of a matrix of bf16, for boxes of (columns, rows); a box's rows are its swizzle."""
        out = (ctypes.c_char * 192)()
        at = -ctypes.addressof(out) % 64
        stride_bytes = buffer.shape[1] * 2
        self.call("cuTensorMapEncodeTiled", ctypes.byref(out, at), TENSOR_MAP_BF16, 2, buffer.pointer,
                  (ctypes.c_uint64 * 2)(columns, buffer.shape[0]), (ctypes.c_uint64 * 1)(stride_bytes), (ctypes.c_uint32 * 2)(*box),
                  (ctypes.c_uint32 * 2)(1, 1), 0, {128: 3, 64: 2}[box[0] * 2], 3, 0)
        return out[at:at + 128]

    def call(self, name: str, *values) -> None:
        code = getattr(self.driver, name)(*values)
        if code:
            raise RuntimeError(f"{name} gives {code}")

    def buffer(self, like: np.ndarray) -> Buffer:
        self.buffers.append(Buffer(self, like))
        return self.buffers[-1]

    def free(self) -> None:
        for buffer in self.buffers:
            self.call("cuMemFree_v2", buffer.pointer)
        self.buffers = []

    def attribute(self, number: int) -> int:
        value = ctypes.c_int()
        self.call("cuDeviceGetAttribute", ctypes.byref(value), number, 0)
        return value.value

    def seconds(self, run, repeats: int = 10) -> float:
        """What `run`, which launches, takes: the mean of some, after one."""
        self.waits = False
        events = [ctypes.c_void_p(), ctypes.c_void_p()]
        for event in events:
            self.call("cuEventCreate", ctypes.byref(event), 0)
        run()
        self.call("cuEventRecord", events[0], None)
        for _ in range(repeats):
            run()
        self.call("cuEventRecord", events[1], None)
        self.call("cuCtxSynchronize")
        self.waits = True
        milliseconds = ctypes.c_float()
        self.call("cuEventElapsedTime", ctypes.byref(milliseconds), *events)
        return milliseconds.value / 1000 / repeats

    def launch(self, name: str, grid: tuple, threads: int, shared_bytes: int, *values) -> None:
        """`values`: a Buffer's pointer, an int as int32, a float as f32, an unsigned or a float64 of numpy as it is, bytes as a struct."""
        if name not in self.functions:
            self.functions[name] = ctypes.c_void_p()
            get = self.driver.cuModuleGetFunction
            if all(get(ctypes.byref(self.functions[name]), module, name.encode()) for module in self.modules):
                raise RuntimeError(f"no {name}")
        self.call("cuFuncSetAttribute", self.functions[name], MAX_DYNAMIC_SHARED_BYTES, shared_bytes)
        kinds = {Buffer: lambda x: x.pointer, int: ctypes.c_int32, float: ctypes.c_float, bytes: ctypes.create_string_buffer,
                 np.uint32: ctypes.c_uint32, np.uint64: ctypes.c_uint64, np.float64: ctypes.c_double}
        held = [kinds[type(x)](x) for x in values]
        pointers = (ctypes.c_void_p * len(held))(*[ctypes.cast(ctypes.byref(x), ctypes.c_void_p) for x in held])
        self.call("cuLaunchKernel", self.functions[name], *(*grid, 1, 1)[:3], threads, 1, 1, shared_bytes, None, pointers, None)
        if self.waits:
            self.call("cuCtxSynchronize")
