#!/usr/bin/env python3
"""Whole files of `merge --dtype` beside those that llama.cpp's own `llama-quantize` makes of the same numbers.

usage: check_quantise.py LLAMA_QUANTIZE [MODEL...] [--mixtures qwen3_moe mixtral] [--types q4_k_m ...] [--binary target/release/lora-train]
                         [--golden tests/golden/gguf_types.json]

Each MODEL, and small random mixtures of experts (256 wide, so that their rows are blocks of every type), are trained for two steps;
`merge` writes the sum in f32 and in each type, without an importance matrix and with that of the run's rows, and `llama-quantize` makes
that type of the file in f32, with `--imatrix` of our file where there is one. Every tensor must have its type and its bytes. Prints a
line for each file; exit status 1 where one differs. Equal files have equal perplexities; where one differs, `eval` says both losses.
`--golden` writes which types `llama-quantize` chose.
"""

import argparse
import json
import pathlib
import shutil
import subprocess
import sys
import tempfile

import check_gguf
from gguf import GGUFReader

TYPES = ["q8_0", "q6_k", "q5_k_m", "q5_k_s", "q5_1", "q5_0", "q4_k_m", "q4_k_s", "q4_1", "q4_0", "iq4_xs", "iq4_nl", "q3_k_l", "q3_k_m",
         "q3_k_s", "q2_k"]
THEIRS = {"mxfp4": "MXFP4_MOE"}
RECIPE = """\
output_dir = "{folder}/run"
[model]
path = "{model}"
[lora]
r = 4
[[data.train]]
path = "{folder}/rows.jsonl"
[data]
max_length = 64
[train]
max_steps = 2
micro_batch_size = 4
[optimizer]
learning_rate = 1e-2
"""
ROWS = ["Once upon a time, in a small town, there was a clever fox.", "The  quick brown dogs\njumped over 12345 lazy cats, and slept.",
        "Mia's étude: déjà vu!", "It rained. Tom and Lily played inside, with blocks of every colour, until it was dark."] * 4


def run(*command: object) -> str:
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))} ended with status {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.stdout


def tensors(path: pathlib.Path) -> dict:
    return {tensor.name: (tensor.tensor_type.name, tensor.data.tobytes()) for tensor in GGUFReader(path).tensors}


def described(path: pathlib.Path) -> dict:
    """Names and shapes of all tensors, rows first, and the counts that types depend on."""
    reader = GGUFReader(path)
    counts = ("block_count", "attention.head_count", "attention.head_count_kv", "expert_count")
    return {"keys": {name.partition(".")[2]: int(field.contents()) for name, field in reader.fields.items() if name.endswith(counts)},
            "tensors": [(tensor.name, [int(size) for size in reversed(tensor.shape)]) for tensor in reader.tensors]}


def loss(args, path: pathlib.Path, rows: pathlib.Path) -> float:
    return json.loads(run(args.binary, "eval", "--model", path, "--data", rows, "--json"))["eval_loss"]


def check(args, model: pathlib.Path, folder: pathlib.Path) -> bool:
    """All types of one model."""
    rows = folder / "rows.jsonl"
    rows.write_text("\n".join(json.dumps({"text": row}) for row in ROWS))
    (folder / "recipe.toml").write_text(RECIPE.format(folder=folder, model=model.resolve()))
    run(args.binary, folder / "recipe.toml")
    run(args.binary, "merge", folder / "run", "--out", folder / "f32.gguf", "--dtype", "f32")
    is_mixture = "_exps" in " ".join(tensors(folder / "f32.gguf"))
    golden = args.found.setdefault(model.name, {**described(folder / "f32.gguf"), "types": {}})
    passed = True
    for kind in args.types + (["mxfp4"] if is_mixture else []):
        for is_weighed in (False, True):
            ours, theirs = folder / "ours/a.gguf", folder / "theirs.gguf"
            run(args.binary, "merge", folder / "run", "--out", ours, "--dtype", kind, *([] if is_weighed else ["--without-rows"]))
            imatrix = ours.with_suffix(".imatrix.gguf")
            options = ["--imatrix", imatrix] if imatrix.exists() else []
            run(args.quantize, *options, folder / "f32.gguf", theirs, THEIRS.get(kind, kind.upper()), 2)
            found, expected = tensors(ours), tensors(theirs)
            name = kind + (" weighed" if is_weighed else "")
            golden["types"][name] = " ".join(expected[name][0] for name, _ in golden["tensors"])
            types = [name for name in expected if found.get(name, ("none",))[0] != expected[name][0]]
            names = [name for name in expected if name not in types and found[name][1] != expected[name][1]]
            is_equal = not types and not names and found.keys() == expected.keys()
            weighed = "with imatrix" if options else "without imatrix"
            print(f"{'ok    ' if is_equal else 'WRONG '} {model.name} {kind}, {weighed}: {len(expected)} tensors", flush=True)
            for name in types:
                print(f"    {name}: {found.get(name, ('none',))[0]}, expected {expected[name][0]}")
            for name in names:
                pairs = list(zip(found[name][1], expected[name][1]))
                print(f"    {name} ({expected[name][0]}): {sum(a != b for a, b in pairs)} of {len(pairs)} bytes differ")
            if not is_equal:
                passed = False
                print(f"    loss {loss(args, ours, rows):.5f}, of theirs {loss(args, theirs, rows):.5f}")
            shutil.rmtree(ours.parent)
    return passed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("quantize", type=pathlib.Path)
    parser.add_argument("models", nargs="*", type=pathlib.Path)
    parser.add_argument("--mixtures", nargs="*", default=["qwen3_moe", "mixtral"])
    parser.add_argument("--types", nargs="+", default=TYPES)
    parser.add_argument("--binary", type=pathlib.Path, default=pathlib.Path("target/release/lora-train"))
    parser.add_argument("--golden", type=pathlib.Path)
    args = parser.parse_args()
    wide = {"hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 256, "num_hidden_layers": 8, "num_attention_heads": 8,
            "num_key_value_heads": 2, "head_dim": 32}
    passed, args.found = True, {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = pathlib.Path(scratch)
        mixtures = [check_gguf.random_model(name, folder / name, **wide) for name in args.mixtures]
        for model in mixtures + args.models:
            (folder / "files").mkdir()
            passed &= check(args, model, folder / "files")
            shutil.rmtree(folder / "files")
    if args.golden:
        args.golden.write_text(json.dumps(args.found) + "\n")
    sys.exit(not passed)


if __name__ == "__main__":
    main()
