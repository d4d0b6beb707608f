#!/usr/bin/env python3
"""How fast `merge` writes files of few bits: million weights a second, from reading the base to the file on disk.

usage: bench_quantise.py [--types q4_0 q4_k_m ...] [--rounds 2] [--binary PATH] [--out benches/results]

The base is a Llama of one layer 2,048 wide with random weights in bf16 (48 M of them, of which every row is whole blocks) and the
quickstart's tokenizer; a run of one step makes the adapter. Each type is written without an importance matrix and with one, which 24
rows make in a second. The fastest of the rounds counts. Prints a table and writes JSON with hardware and command.
"""

import argparse
import json
import pathlib
import re
import shutil
import subprocess
import tempfile

import benchlib
import torch
from transformers import LlamaConfig, LlamaForCausalLM

ROOT = pathlib.Path(__file__).resolve().parent.parent
TYPES = ["q8_0", "q6_k", "q5_k_s", "q5_1", "q5_0", "q4_k_s", "q4_1", "q4_0", "iq4_xs", "iq4_nl", "q3_k_s", "q2_k", "nvfp4"]
RECIPE = """\
output_dir = "{folder}/run"
[model]
path = "{folder}/model"
dtype = "bf16"
[[data.train]]
path = "{folder}/rows.jsonl"
[data]
max_length = 32
[train]
max_steps = 1
micro_batch_size = 8
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--types", nargs="+", default=TYPES)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--binary", type=pathlib.Path, default=benchlib.default_binary())
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "benches/results")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = pathlib.Path(scratch)
        torch.manual_seed(1)
        config = LlamaConfig(vocab_size=1344, hidden_size=2048, intermediate_size=5632, num_hidden_layers=1, num_attention_heads=32,
                             num_key_value_heads=8, head_dim=64, max_position_embeddings=256, tie_word_embeddings=True)
        model = LlamaForCausalLM(config).to(torch.bfloat16)
        model.save_pretrained(folder / "model")
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(ROOT / "quickstart/model" / name, folder / "model")
        num_weights = sum(weight.numel() for weight in model.parameters())
        rows = [json.dumps({"text": f"Row {i} has a few words, and is as long as others."}) for i in range(24)]
        (folder / "rows.jsonl").write_text("\n".join(rows))
        (folder / "recipe.toml").write_text(RECIPE.format(folder=folder))
        subprocess.run([args.binary, folder / "recipe.toml"], check=True, capture_output=True)

        def seconds(*options: str) -> float:
            shutil.rmtree(folder / "file", ignore_errors=True)
            command = [args.binary, "merge", folder / "run", "--out", folder / "file/a.gguf", *options]
            said = subprocess.run(command, check=True, capture_output=True, text=True).stderr
            return float(re.search(r"in 1 file, ([0-9.]+) s", said)[1])

        found = {}
        for _ in range(args.rounds):
            for kind in args.types:
                for name, options in (("plain", ["--without-rows"]), ("weighed", [])):
                    found.setdefault(kind, {}).setdefault(name, []).append(seconds("--dtype", kind, *options))
    rates = {kind: {name: num_weights / min(times) / 1e6 for name, times in sides.items()} for kind, sides in found.items()}
    print(benchlib.table(("million weights/s", "without imatrix", "with imatrix"),
                         [(kind, f"{of['plain']:.1f}", f"{of['weighed']:.1f}") for kind, of in rates.items()]))
    result = {"machine": benchlib.machine(), "versions": benchlib.versions(args.binary, ()), "num_weights": num_weights, "seconds": found,
              "million_weights_per_second": rates}
    print(benchlib.write_result(args.out, "quantise", result))


if __name__ == "__main__":
    main()
