#!/usr/bin/env python3
"""Adapters cross over between lora-train and PEFT, in both directions.

usage: check_peft.py load [--tolerance 1e-4] BASE ADAPTER LOGITS.safetensors [BASE ADAPTER LOGITS.safetensors]...
       check_peft.py score BASE ADAPTER PAIRS.jsonl SCORES.jsonl
       check_peft.py train BASE ROWS.jsonl OUT_DIR [--r 4] [--steps 30]

`load`: PEFT loads an adapter that we exported and must give our logits. LOGITS.safetensors holds `input_ids` [rows,
length] (unpadded, any integer type), `logits` f32 [rows, length, columns] and, where only some columns are stored,
`columns` [columns]. The difference is the largest absolute difference over the largest absolute logit. Prints one JSON
object for each; exit status 1 when a difference is above the tolerance. Beside LOGITS.safetensors, peft/adapter becomes the
adapter as PEFT saves it, peft/merged.safetensors the weights of the linear layers after `merge_and_unload`.

`score`: PEFT loads an adapter with a head that scores and must give our scores, those of `lora-train eval --answers`, of pairs of text.

`train`: PEFT trains a small adapter on rows of messages and saves it in its own way in OUT_DIR/adapter.
OUT_DIR/logits.safetensors, with the layout above, holds the logits that we must get after loading the adapter, and as
`base_logits` those without it.

Everything in f32 on the CPU. Needs torch, transformers, peft, safetensors (scripts/setup_python.sh).
"""

import argparse
import json
import pathlib
import sys

import numpy as np
import peft
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.numpy import load_file, save_file
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer, PreTrainedTokenizerFast

from make_golden import auto_class

NUM_COLUMNS, NUM_ROWS, LENGTH = 128, 2, 32


def base_model(folder: pathlib.Path):
    """The base model in f32."""
    auto = auto_class(AutoConfig.from_pretrained(folder))
    return auto.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def load(args) -> None:
    """Our adapters in PEFT."""
    triples = list(zip(*[iter(args.paths)] * 3, strict=True))
    if not all([fits(*triple, args.tolerance) for triple in triples]):
        sys.exit(1)


def fits(base: pathlib.Path, adapter: pathlib.Path, logits: pathlib.Path, tolerance: float) -> bool:
    """Whether PEFT gives these logits; then it saves what it has."""
    stored = load_file(logits)
    model = PeftModel.from_pretrained(base_model(base), adapter, torch_device="cpu").eval()
    with torch.no_grad():
        found = model(input_ids=torch.from_numpy(stored["input_ids"].astype(np.int64))).logits
        with model.disable_adapter():
            without = model(input_ids=torch.from_numpy(stored["input_ids"].astype(np.int64))).logits
    if "columns" in stored:
        chosen = torch.from_numpy(stored["columns"].astype(np.int64))
        found, without = found[..., chosen], without[..., chosen]
    expected = torch.from_numpy(stored["logits"])
    if found.shape != expected.shape:
        sys.exit(f"{base}: the stored logits are {tuple(expected.shape)}, PEFT's are {tuple(found.shape)}")
    scale = expected.abs().max()
    difference = ((found - expected).abs().max() / scale).item()
    print(json.dumps({"model_type": model.config.model_type, "difference": difference, "tolerance": tolerance, "largest_logit": scale.item(),
                      "effect_of_the_adapter": ((found - without).abs().max() / scale).item(),
                      "versions": {m.__name__: m.__version__ for m in (torch, transformers, peft)}}))
    if not difference <= tolerance:
        return False
    out = logits.parent / "peft"
    model.save_pretrained(out / "adapter")
    merged = model.merge_and_unload().state_dict()
    linear = {name: tensor.contiguous().numpy() for name, tensor in merged.items() if ".layers." in name and tensor.dim() in (2, 3)}
    save_file(linear, out / "merged.safetensors")
    return True


def score(args) -> None:
    """Our adapter with a head that scores in PEFT."""
    base = AutoModelForSequenceClassification.from_pretrained(args.base, num_labels=1, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, args.adapter, torch_device="cpu").eval()
    tokenizer = AutoTokenizer.from_pretrained(args.base)
    model.config.pad_token_id = base.config.pad_token_id = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    pairs, ours = ([json.loads(line) for line in path.read_text().splitlines()] for path in (args.rows, args.scores))
    difference = 0.0
    for line in ours:
        pair = pairs[line["row"] - 1]
        for side in ("chosen", "rejected"):
            ids = tokenizer(pair["prompt"] + pair[side] + tokenizer.eos_token, return_tensors="pt")["input_ids"]
            with torch.no_grad():
                difference = max(difference, abs(model(input_ids=ids).logits.item() - line[side]))
    print(json.dumps({"difference": difference, "pairs": len(ours)}))
    if not (ours and difference <= args.tolerance):
        sys.exit(1)


def train(args) -> None:
    """An adapter made by PEFT, and its logits."""
    torch.manual_seed(5)
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(args.base / "tokenizer.json"))
    tokenizer.chat_template = json.loads((args.base / "tokenizer_config.json").read_text())["chat_template"]
    rows = [json.loads(line)["messages"] for line in args.rows.read_text().splitlines()]
    ids = [torch.tensor([tokenizer.apply_chat_template(row, return_dict=False)]) for row in rows]
    model = get_peft_model(base_model(args.base), LoraConfig(task_type="CAUSAL_LM", r=args.r, lora_alpha=3 * args.r, target_modules="all-linear"))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-3)
    for step in range(args.steps):
        loss = model(input_ids=ids[step % len(ids)], labels=ids[step % len(ids)]).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    model.peft_config["default"].base_model_name_or_path = str(args.base)
    model.save_pretrained(args.out / "adapter")
    (args.out / "adapter" / "README.md").unlink(missing_ok=True)
    text = torch.cat([i[0] for i in ids])[: NUM_ROWS * LENGTH].reshape(NUM_ROWS, LENGTH)
    with torch.no_grad():
        logits = model(input_ids=text).logits
        with model.disable_adapter():
            base_logits = model(input_ids=text).logits
    columns = torch.arange(0, logits.shape[-1], max(1, logits.shape[-1] // NUM_COLUMNS))
    arrays = {"input_ids": text.int(), "columns": columns.int(), "logits": logits[..., columns], "base_logits": base_logits[..., columns]}
    save_file({name: np.ascontiguousarray(value.numpy()) for name, value in arrays.items()}, args.out / "logits.safetensors",
              metadata={m.__name__: m.__version__ for m in (torch, transformers, peft)})
    print(f"{args.out}: loss of the last row {loss.item():.4f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    kinds = parser.add_subparsers(required=True)
    ours = kinds.add_parser("load", help="PEFT loads our adapters")
    ours.add_argument("paths", type=pathlib.Path, nargs="+", metavar="BASE ADAPTER LOGITS")
    ours.add_argument("--tolerance", type=float, default=1e-4)
    ours.set_defaults(do=load)
    scores = kinds.add_parser("score", help="PEFT scores with our adapter")
    for name in ("base", "adapter", "rows", "scores"):
        scores.add_argument(name, type=pathlib.Path)
    scores.add_argument("--tolerance", type=float, default=1e-4)
    scores.set_defaults(do=score)
    theirs = kinds.add_parser("train", help="PEFT writes an adapter for us")
    theirs.add_argument("base", type=pathlib.Path)
    theirs.add_argument("rows", type=pathlib.Path)
    theirs.add_argument("out", type=pathlib.Path)
    theirs.add_argument("--r", type=int, default=4)
    theirs.add_argument("--steps", type=int, default=30)
    theirs.set_defaults(do=train)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    args.do(args)


if __name__ == "__main__":
    main()
