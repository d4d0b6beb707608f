#!/usr/bin/env python3
"""How far the gradients of bf16 are from those of f32, at equal adapters: PEFT's bf16 beside bf16 products alone.

usage: bf16_error.py [--steps 20]

The quickstart model with adapters after some steps in f32; then, for 24 micro-batches of two rows, the distance of the
gradient of all adapters from f32's, relative to its norm, in three ways:

  peft bf16            base and activations in bf16, adapters in f32, as PEFT loads them
  autocast             weights in f32, torch.autocast in bf16, as transformers' Trainer does with bf16=True
  bf16 products        activations in f32, operands of the base's products rounded to bf16, as lora-train does on the CPU

Needs torch, transformers and PEFT (scripts/setup_python.sh).
"""

import argparse
import json
import pathlib
import statistics

import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import Linear
from transformers import AutoModelForCausalLM, AutoTokenizer

QUICKSTART = pathlib.Path(__file__).resolve().parent.parent / "quickstart"
LENGTH = 64


class RoundedProduct(torch.autograd.Function):
    """x W^T and dy W with x and dy rounded to bf16; the quickstart model's weights are bf16 already."""

    @staticmethod
    def forward(context, x, weight):
        context.save_for_backward(weight)
        return x.bfloat16().float() @ weight.t()

    @staticmethod
    def backward(context, dy):
        (weight,) = context.saved_tensors
        return dy.bfloat16().float() @ weight, None


def rows(tokenizer) -> list:
    """Ids and labels of the rows whose answer begins within the first tokens."""
    found = []
    for line in (QUICKSTART / "train.jsonl").read_text().splitlines():
        messages = json.loads(line)["messages"]
        ids = tokenizer.apply_chat_template(messages, return_dict=False)
        prompt = tokenizer.apply_chat_template(messages[:-1], add_generation_prompt=True, return_dict=False)
        if len(prompt) < LENGTH:
            found.append((ids[:LENGTH], ([-100] * len(prompt) + ids[len(prompt):])[:LENGTH]))
    return found


def batch(two: list) -> dict:
    width = max(len(ids) for ids, _ in two)
    padded = {name: torch.tensor([row + [fill] * (width - len(row)) for row in values]) for name, fill, values in (
        ("input_ids", 0, [ids for ids, _ in two]), ("labels", -100, [labels for _, labels in two]),
        ("attention_mask", 0, [[1] * len(ids) for ids, _ in two]))}
    return padded


def peft_model(dtype):
    model = AutoModelForCausalLM.from_pretrained(QUICKSTART / "model", dtype=dtype)
    return get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules="all-linear"))


def adapters(model) -> dict:
    return {name: value for name, value in model.named_parameters() if value.requires_grad}


def gradient(model, inputs: dict, autocast: bool = False):
    model.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        model(**inputs).loss.backward()
    return torch.cat([value.grad.float().flatten() for _, value in sorted(adapters(model).items())])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20, help="steps in f32 before the comparison")
    steps = parser.parse_args().steps
    torch.manual_seed(0)
    found = rows(AutoTokenizer.from_pretrained(QUICKSTART / "model"))
    batches = [batch(found[2 * index:2 * index + 2]) for index in range(24 + steps)]
    exact, half, autocast, rounded = (peft_model(dtype) for dtype in (None, torch.bfloat16, None, None))
    exact, autocast, rounded = exact.float(), autocast.float(), rounded.float()
    optimizer = torch.optim.AdamW(adapters(exact).values(), lr=1e-3, weight_decay=0)
    for inputs in batches[24:]:
        exact(**inputs).loss.backward()
        torch.nn.utils.clip_grad_norm_(adapters(exact).values(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    for model in (half, autocast, rounded):
        for name, value in adapters(model).items():
            value.data.copy_(adapters(exact)[name])
    for layer in (module.base_layer for module in rounded.modules() if isinstance(module, Linear)):
        layer.forward = lambda x, layer=layer: RoundedProduct.apply(x, layer.weight)
    for name, model, is_autocast in (("peft bf16", half, False), ("autocast", autocast, True),
                                     ("bf16 products", rounded, False)):
        errors = []
        for inputs in batches[:24]:
            expected = gradient(exact, inputs)
            errors.append(((gradient(model, inputs, is_autocast) - expected).norm() / expected.norm()).item())
        print(f"{name:16} median {statistics.median(errors):.1%}, largest {max(errors):.1%}")


if __name__ == "__main__":
    main()
