#!/usr/bin/env python3
"""Write tests/golden/gguf_types.json: the type that llama.cpp's `llama-quantize` gives to each matrix of known models.

usage: make_golden_types.py LLAMA_QUANTIZE [--out tests/golden/gguf_types.json]

Files without numbers (sparse) have the shapes of MODELS; `llama-quantize --dry-run` names the types, without an importance matrix and
with one of a single entry. For each model, type of file and matrix: types of the layers in turn, each with how many follow each other.
Needs the package gguf.
"""

import argparse
import itertools
import json
import pathlib
import re
import subprocess
import tempfile

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter

ROOT = pathlib.Path(__file__).resolve().parent.parent
# Layers, width, heads of queries and of keys, size of a head, width inside, experts, vocabulary, tied; as in src/save/export/gguf/types.rs.
MODELS = {
    "llama-3.1-8b": (32, 4096, 32, 8, 128, 14336, 0, 128256, False), "llama-3.1-70b": (80, 8192, 64, 8, 128, 28672, 0, 128256, False),
    "qwen3-0.6b": (28, 1024, 16, 8, 128, 3072, 0, 151936, True), "smollm2-135m": (30, 576, 9, 3, 64, 1536, 0, 49152, True),
    "mixtral-8x7b": (32, 4096, 32, 8, 128, 14336, 8, 32000, False), "mixture-of-16": (26, 2048, 16, 4, 128, 768, 16, 32000, True),
}
TYPES = ["q8_0", "q6_k", "q5_k_m", "q5_k_s", "q5_1", "q5_0", "q4_k_m", "q4_k_s", "q4_1", "q4_0", "iq4_xs", "iq4_nl", "q3_k_l", "q3_k_m",
         "q3_k_s", "q2_k"]
LINE = re.compile(r"\] (?:blk\.\d+\.)?(\S+)\.weight +- .*\((\w+)\)$")


def write(path: pathlib.Path, model: tuple) -> None:
    """A file of a Llama with holes for numbers."""
    layers, width, heads, kv_heads, head, inner, experts, vocabulary, is_tied = model
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(layers)
    writer.add_context_length(2048)
    writer.add_embedding_length(width)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(vocabulary)
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(2)
    size, end, some = 0, "_exps" if experts else "", [experts] if experts else []
    shapes = {"token_embd": [vocabulary, width]} | ({} if is_tied else {"output": [vocabulary, width]})
    for i in range(layers):
        of_layer = {"attn_q": [heads * head, width], "attn_k": [kv_heads * head, width], "attn_v": [kv_heads * head, width],
                    "attn_output": [width, heads * head], f"ffn_gate{end}": [*some, inner, width], f"ffn_up{end}": [*some, inner, width],
                    f"ffn_down{end}": [*some, width, inner]}
        shapes |= {f"blk.{i}.{name}": shape for name, shape in of_layer.items()}
    for name, shape in shapes.items():
        num_bytes = 2 * int(np.prod(shape))
        writer.add_tensor_info(f"{name}.weight", shape, np.float16, num_bytes, raw_dtype=GGMLQuantizationType.F16)
        size += -(-num_bytes // 32) * 32
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    with path.open("ab") as file:
        file.truncate(-(-file.tell() // 32) * 32 + size)


def write_imatrix(path: pathlib.Path) -> None:
    """One entry, of a tensor that no model has."""
    writer = GGUFWriter(path, "imatrix")
    writer.add_type("imatrix")
    writer.add_array("imatrix.datasets", ["rows"])
    writer.add_uint32("imatrix.chunk_count", 1)
    writer.add_uint32("imatrix.chunk_size", 1)
    writer.add_tensor("none.weight.in_sum2", np.ones((1, 32), np.float32))
    writer.add_tensor("none.weight.counts", np.ones((1, 1), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("quantize", type=pathlib.Path)
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "tests/golden/gguf_types.json")
    args = parser.parse_args()
    golden = {}
    with tempfile.TemporaryDirectory() as scratch:
        file, imatrix = pathlib.Path(scratch) / "a.gguf", pathlib.Path(scratch) / "imatrix.gguf"
        write_imatrix(imatrix)
        for name, model in MODELS.items():
            file.unlink(missing_ok=True)
            write(file, model)
            for kind, weighed in itertools.product(TYPES + (["mxfp4_moe"] if model[6] else []), ("", " weighed")):
                options = ["--imatrix", imatrix] if weighed else []
                said = subprocess.run([args.quantize, "--dry-run", *options, file, "none.gguf", kind.upper()], capture_output=True, text=True)
                found = {}
                for line in (said.stdout + said.stderr).splitlines():
                    if match := LINE.search(line):
                        found.setdefault(match[1], []).append(match[2].upper())
                if not found:
                    raise SystemExit(f"{name} {kind}: {said.stdout[-500:]}{said.stderr[-1500:]}")
                runs = {matrix: " ".join(f"{kind} {len(list(same))}" for kind, same in itertools.groupby(kinds))
                        for matrix, kinds in found.items()}
                golden.setdefault(name, {})[kind.removesuffix("_moe") + weighed] = runs
    args.out.write_text(json.dumps(golden, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
