#!/usr/bin/env python3
"""A quantised base: our loss and the gradients of the adapters against PEFT + bitsandbytes, of fp8 against PyTorch's float8_e4m3fn;
and folders of `merge --dtype` read by compressed-tensors, which servers read them with.

usage: check_quantised.py BASE ROWS.jsonl [--binary target/release/lora-train] [--rows 4] [--kinds nf4 ...]

Both sides quantise BASE while they load it, start from one adapter whose B is not zero, and take one step in f32 on the
same tokens. Our gradients are read from the first moments in the checkpoint. bitsandbytes' own int8 product also rounds
the activations, so for int8 its decoded weights are multiplied instead. Its CPU library takes a neighbour of the nearest
scale where two are almost as near, its GPU kernel and we do not: nested scales differ by more. Prints a line for each kind;
exit status 1 where the loss differs by more than 1e-5 or a gradient by more than 1e-3 of its norm, ten times that if nested.

Of a folder that is written, all matrices must be, to the bit, those of the bf16 folder that `merge` makes of it again, through our
own reader, and as near PEFT's merge as the type rounds.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, CompressedTensorsConfig

import benchlib

# What a written matrix may be off by from PyTorch's merge, as a share of its norm: half a step of the type's codes, and some.
WRITTEN = {"written-fp8": 0.03, "written-w4a16": 0.16, "written-nvfp4": 0.11, "written-mxfp4": 0.16}
KINDS = ("nf4", "nf4-nested", "fp4", "int8", "fp8", *WRITTEN)
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def base_model(folder: str, kind: str):
    """The base as bitsandbytes quantises it from f32, or with matrices rounded to E4M3."""
    name, _, nested = kind.partition("-")
    if name == "fp8":
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        for layer in model.model.layers.modules():
            if isinstance(layer, torch.nn.Linear):
                # A number divided by a tensor would be multiplied by its reciprocal.
                most, largest = layer.weight.data.abs().max(), torch.tensor(448.0)
                codes = (layer.weight.data * (largest / most)).to(torch.float8_e4m3fn)
                layer.weight.data = codes.float() * (most / largest)
        return model
    config = BitsAndBytesConfig(load_in_8bit=True) if name == "int8" else BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type=name, bnb_4bit_use_double_quant=bool(nested), bnb_4bit_compute_dtype=torch.float32)
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, device_map="cpu", dtype=torch.float32)
    return with_decoded_int8(model) if name == "int8" else model


def with_decoded_int8(model):
    """The model with its int8 layers decoded to dense ones."""
    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            if type(layer).__name__ == "Linear8bitLt":
                scb = layer.weight.SCB if layer.weight.SCB is not None else layer.state.SCB
                dense = torch.nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None)
                dense.weight.data = layer.weight.data.float() * scb[:, None] / 127
                if layer.bias is not None:
                    dense.bias.data = layer.bias.data.float()
                setattr(parent, name, dense)
    model.is_quantized = False
    for attribute in ("hf_quantizer", "quantization_method"):
        if hasattr(model, attribute):
            delattr(model, attribute)
    return model


def make_adapter(folder: str, out: pathlib.Path, std: float = 0.02) -> None:
    """An adapter whose two matrices are both random, or B zero."""
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules=TARGETS))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=std)
    model.save_pretrained(out)


def is_written_wrong(args, kind: str, adapter: pathlib.Path, work: pathlib.Path) -> bool:
    """Whether compressed-tensors reads other matrices from a folder than we do, or than were merged."""
    def merge(adapter, base, name: str, dtype: str) -> pathlib.Path:
        subprocess.run([args.binary, "merge", adapter, "--model", base, "--out", work / name, "--dtype", dtype], check=True, capture_output=True)
        return work / name

    def matrices(folder, **options) -> dict:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **options)
        return {name: layer.weight.data.float() for name, layer in model.model.layers.named_modules() if isinstance(layer, torch.nn.Linear)}

    folder = merge(adapter, args.base, kind, kind.removeprefix("written-"))
    read = matrices(folder, quantization_config=CompressedTensorsConfig(dequantize=True))
    ours = matrices(merge(work / "nothing", folder, f"{kind}-decoded", "bf16"))
    merged = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(args.base, dtype=torch.float32), adapter).merge_and_unload()
    exact = {name: merged.model.layers.get_submodule(name).weight.data for name in read}
    differ = max(((ours[name] - value).norm() / value.norm()).item() for name, value in read.items())
    rounded = max(((value - exact[name]).norm() / exact[name].norm()).item() for name, value in read.items())
    print(f"{kind:14} {len(read)} matrices, of compressed-tensors and of ours {differ:.1e} apart, off by {rounded:.3f} from the merged at most")
    return not (differ == 0 and rounded <= WRITTEN[kind])


def ours(args, kind: str, adapter: pathlib.Path, work: pathlib.Path) -> tuple[float, dict]:
    """Our loss, and the gradients by the adapters' names in PEFT."""
    name, _, nested = kind.partition("-")
    recipe = work / f"{kind}.toml"
    recipe.write_text(f"""
output_dir = "{work / kind}"
[model]
path = "{os.path.abspath(args.base)}"
quantization = "{name}"
double_quantization = {str(bool(nested)).lower()}
[lora]
r = 8
lora_alpha = 16
target_modules = "all-linear"
start_from = "{adapter}"
[[data.train]]
path = "{work / 'rows.jsonl'}"
[data]
shuffle = false
max_length = 512
[train]
micro_batch_size = {args.rows}
max_steps = 1
max_grad_norm = 1e9
[optimizer]
betas = [0.9, 0.999]
[checkpoint]
save_steps = 1
""")
    subprocess.run([args.binary, recipe, "--device", "cpu", "--quiet"], check=True)
    step = json.loads((work / kind / "metrics.jsonl").read_text().splitlines()[0])
    moments = load_file(work / kind / "checkpoints/step-000001/optimizer.safetensors")
    grads = {name.removesuffix(".exp_avg"): value / 0.1 for name, value in moments.items() if name.endswith(".exp_avg")}
    return step["loss"], grads


def theirs(args, kind: str, adapter: pathlib.Path, work: pathlib.Path) -> tuple[float, dict]:
    """PEFT's loss and gradients on the tokens and targets that we use."""
    model = PeftModel.from_pretrained(base_model(args.base, kind), adapter, is_trainable=True).train()
    shown = subprocess.run([args.binary, "inspect", work / f"{kind}.toml", "--json", "--rows", str(args.rows)], capture_output=True, text=True, check=True)
    rows = [row for row in map(json.loads, shown.stdout.splitlines()) if "ids" in row]
    longest = max(len(row["ids"]) for row in rows)
    pad = lambda values, filler: values + [filler] * (longest - len(values))
    ids = torch.tensor([pad(row["ids"], 0) for row in rows])
    labels = torch.tensor([pad([i if loss else -100 for i, loss in zip(row["ids"], row["carries_loss"])], -100) for row in rows])
    mask = torch.tensor([pad([1] * len(row["ids"]), 0) for row in rows])
    loss = model(input_ids=ids, attention_mask=mask, labels=labels).loss
    loss.backward()
    prefix = "base_model.model."
    return loss.item(), {name.removeprefix(prefix).replace(".default.weight", ""): p.grad for name, p in model.named_parameters() if p.grad is not None}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("base")
    parser.add_argument("data", type=pathlib.Path)
    parser.add_argument("--binary", type=pathlib.Path, default=benchlib.default_binary())
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    args = parser.parse_args()
    is_wrong = False
    with tempfile.TemporaryDirectory() as work:
        work = pathlib.Path(work)
        (work / "rows.jsonl").write_text("".join(args.data.read_text().splitlines(keepends=True)[: args.rows]))
        make_adapter(args.base, work / "adapter")
        make_adapter(args.base, work / "nothing", std=0)
        for kind in args.kinds:
            if kind in WRITTEN:
                is_wrong |= is_written_wrong(args, kind, work / "adapter", work)
                continue
            (loss, grads), (expected_loss, expected) = (side(args, kind, work / "adapter", work) for side in (ours, theirs))
            assert grads.keys() == expected.keys(), grads.keys() ^ expected.keys()
            errors = [((grads[name] - grad).norm() / grad.norm()).item() for name, grad in expected.items()]
            loss_error = abs(loss - expected_loss) / expected_loss
            print(f"{kind:10}  loss {loss:.6f} {expected_loss:.6f} ({loss_error:.1e})  gradients of {len(errors)} matrices: at most {max(errors):.1e}")
            factor = 10 if "nested" in kind else 1
            is_wrong |= not (loss_error <= factor * 1e-5 and max(errors) <= factor * 1e-3)
    sys.exit(is_wrong)


if __name__ == "__main__":
    main()
