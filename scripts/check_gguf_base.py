#!/usr/bin/env python3
"""Training on GGUF files beside training on the numbers that transformers decodes from them.

usage: check_gguf_base.py MODEL --converter LLAMA_CPP --ggml LIBRARY [--binary target/release/lora-train] [--only q8_0 ...]

llama.cpp's own converter makes an f32, f16 and bf16 file of the Hugging Face folder MODEL; of the first, ggml makes one of
each quantised type (rows that are no whole blocks get q8_0, as `llama-quantize` has it for the smallest types). transformers
decodes each file (gguf_file=...) to f32, which are written as safetensors beside MODEL's config.json. lora-train then trains
three steps of f32 on both, the file without anything beside it, in memory and from disk: losses, norms of gradients and
adapters must be equal to the bit. Rows are texts in several languages, whose token ids must be those of MODEL's own
tokenizer.json, with and without a chat template around them.
LLAMA_CPP is a checkout with convert_hf_to_gguf.py and gguf-py; LIBRARY is a shared library with ggml_quantize_chunk (that of
xllamacpp from PyPI is one). Prints a line for each file; exit status 1 where one differs.
"""

import argparse
import ctypes
import json
import logging
import os
import pathlib
import random
import runpy
import shutil
import subprocess
import sys
import tempfile

import numpy as np
import rows_made
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

KINDS = ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS"]
TRAIN = ["train.max_steps=3", "train.precision=f32", "train.micro_batch_size=2", "data.max_length=128", "data.shuffle=false",
         "logging.logging_steps=1", "optimizer.learning_rate=1e-3", "data.packing=false"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=pathlib.Path)
    parser.add_argument("--converter", type=pathlib.Path, required=True)
    parser.add_argument("--ggml", type=pathlib.Path, required=True)
    parser.add_argument("--binary", default="target/release/lora-train")
    parser.add_argument("--only", nargs="*", default=["f32", "f16", "bf16", *KINDS])
    args = parser.parse_args()
    sys.path[:0] = [str(args.converter), str(args.converter / "gguf-py")]
    logging.disable()
    passed = True
    with tempfile.TemporaryDirectory() as scratch:
        scratch = pathlib.Path(scratch)
        os.environ["LORA_TRAIN_CACHE"] = str(scratch / "cache")
        rows(scratch)
        for kind in args.only:
            folder = scratch / kind
            folder.mkdir()
            file = made(args, scratch, kind, folder / "model.gguf")
            passed &= compare(args, kind, file, folder)
            shutil.rmtree(folder)
    sys.exit(not passed)


def rows(scratch: pathlib.Path) -> None:
    """Rows of text, and of messages."""
    made_rows = rows_made.Made(7, "</s>")
    (scratch / "text.jsonl").write_text("".join(json.dumps(made_rows.text_row()) + "\n" for _ in range(300)))
    (scratch / "messages.jsonl").write_text("".join(json.dumps(made_rows.messages()) + "\n" for _ in range(100)))


def made(args, scratch: pathlib.Path, kind: str, out: pathlib.Path) -> pathlib.Path:
    """A GGUF file of the model."""
    is_dense = kind in ("f32", "f16", "bf16")
    whole = scratch / f"{kind if is_dense else 'f32'}-whole.gguf"
    if not whole.exists():
        sys.argv = ["convert_hf_to_gguf.py", str(args.model), "--outtype", whole.name.split("-")[0], "--outfile", str(whole)]
        runpy.run_path(str(args.converter / "convert_hf_to_gguf.py"), run_name="__main__")
    write(args, whole, None if is_dense else kind, out)
    return out


def scores(args, field) -> list[float]:
    """Scores as in a tokenizer.model, which the converter makes all equal where there is none: by the first merge."""
    ranks = {}
    for merge in json.loads((args.model / "tokenizer.json").read_text())["model"]["merges"]:
        ranks.setdefault("".join(merge.split(" ") if isinstance(merge, str) else merge), len(ranks))
    return [-float(ranks.get(token, len(ranks))) for token in field.contents()]


def write(args, source: pathlib.Path, kind: str | None, out: pathlib.Path) -> None:
    """The file with its matrices quantised by ggml, if a kind is given."""
    import gguf

    library = ctypes.CDLL(str(args.ggml))
    library.ggml_quantize_chunk.restype = ctypes.c_size_t
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(out, reader.fields["general.architecture"].contents())
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            content = field.contents()
            if key == "tokenizer.ggml.scores" and len(set(content)) <= 2:
                content = scores(args, reader.fields["tokenizer.ggml.tokens"])
            writer.add_key_value(key, content, field.types[0], field.types[1] if len(field.types) > 1 else None)
    for tensor in reader.tensors:
        if len(tensor.shape) == 1 or kind is None:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
            continue
        width, num_rows = map(int, tensor.shape)
        of_tensor = gguf.GGMLQuantizationType[kind]
        if width % gguf.GGML_QUANT_SIZES[of_tensor][0]:
            of_tensor = gguf.GGMLQuantizationType.Q8_0
        block, num_bytes = gguf.GGML_QUANT_SIZES[of_tensor]
        numbers = np.ascontiguousarray(tensor.data, np.float32)
        codes = np.empty((num_rows, width // block * num_bytes), np.uint8)
        library.ggml_quantize_chunk(ctypes.c_int(of_tensor.value), numbers.ctypes.data_as(ctypes.c_void_p),
                                    codes.ctypes.data_as(ctypes.c_void_p), ctypes.c_int64(0), ctypes.c_int64(num_rows),
                                    ctypes.c_int64(width), None)
        writer.add_tensor(tensor.name, codes, raw_dtype=of_tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def compare(args, kind: str, file: pathlib.Path, folder: pathlib.Path) -> bool:
    """Trains on the file and on what transformers reads of it."""
    decoded = folder / "decoded"
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype="float32")
    decoded.mkdir()
    is_tied = json.loads((args.model / "config.json").read_text()).get("tie_word_embeddings", False)
    save_file({name: tensor.contiguous() for name, tensor in model.state_dict().items()
               if not (is_tied and name == "lm_head.weight")}, decoded / "model.safetensors", {"format": "pt"})
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"):
        if (args.model / name).exists():
            shutil.copy(args.model / name, decoded)
    if not json.loads((decoded / "tokenizer_config.json").read_text()).get("chat_template"):
        has_template = (decoded / "chat_template.jinja").exists()
    else:
        has_template = True
    runs = [train(args, file, folder), train(args, decoded, folder), train(args, file, folder, "model.residency=mapped")]
    losses = [[(step["loss"], step["grad_norm"]) for step in steps] for steps, _ in runs]
    checks = {"losses": losses[0] == losses[1] == losses[2], "adapters": runs[0][1] == runs[1][1] == runs[2][1]}
    for name in ["text", "messages"][: 1 + has_template]:
        ids = [inspected(args, model, folder, name) for model in (file, decoded)]
        checks[f"ids of {len(ids[1])} {name} rows"] = ids[0] == ids[1]
    wrong = [name for name, is_equal in checks.items() if not is_equal]
    print(f"{kind}: loss {losses[0][0][0]:.6f} {losses[0][-1][0]:.6f}, {file.stat().st_size / 1e6:.0f} MB;",
          f"{', '.join(checks)} compared:", f"DIFFERENT: {wrong} {losses}" if wrong else "equal", flush=True)
    return not wrong


def recipe(model: pathlib.Path, folder: pathlib.Path, name: str) -> pathlib.Path:
    text = f'output_dir = "{folder}/run-{random.randrange(1 << 40)}"\n[model]\npath = "{model}"\n'
    path = folder / "recipe.toml"
    path.write_text(f'{text}[[data.train]]\npath = "{folder.parent}/{name}.jsonl"\nformat = "{name}"\n')
    return path


def lora_train(args, *command) -> str:
    done = subprocess.run(list(map(str, [args.binary, *command])), capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    return done.stdout


def train(args, model: pathlib.Path, folder: pathlib.Path, *more: str):
    """The figures of the steps, and the adapter."""
    path = recipe(model, folder, "text")
    lora_train(args, path, *(argument for setting in [*TRAIN, *more] for argument in ("--set", setting)))
    out = pathlib.Path(path.read_text().split('"')[1])
    steps = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [step for step in steps if "loss" in step], (out / "adapter/adapter_model.safetensors").read_bytes()


def inspected(args, model: pathlib.Path, folder: pathlib.Path, name: str) -> list:
    out = lora_train(args, "inspect", recipe(model, folder, name), "--json", "--rows", 300, "--set", "data.max_length=100000",
                     "--set", "data.shuffle=false", "--set", "data.on_bad_row=skip")
    rows = [json.loads(line) for line in out.splitlines()]
    return [row["ids"] for row in rows if "row" in row]


if __name__ == "__main__":
    main()
