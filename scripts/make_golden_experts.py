#!/usr/bin/env python3
"""Golden numbers of adapters on experts: a pair of matrices for gate, up and down of each.

usage: make_golden_experts.py FAMILY...          (folders of tests/golden; writes tests/golden/experts-FAMILY)

transformers has a layer's experts in one tensor. Here that is computed as the base's and the updates, which autograd takes apart:
PEFT's form, in which gate and up are one adapter of twice the rank, has gradients off the diagonal of B, which no other has.
Adapters of a layer's experts are one tensor each, row below row, under the name of the first. The rows are such that an expert has
no token, and another has one. Numbers as in make_golden.py.
"""

import pathlib
import sys
import tempfile

import make_golden as golden
import numpy as np
import torch
from torch.func import functional_call
from transformers import AutoConfig

TESTS = pathlib.Path(__file__).resolve().parent.parent / "tests/golden"
R, EXPERT_RANK, ALPHA = 4, 3, 6.0


class WithExperts(torch.nn.Module):
    """The model with an adapter on every linear layer, experts too."""

    def __init__(self, folder: pathlib.Path, b_bound: float):
        super().__init__()
        self.base = golden.open_model(folder).requires_grad_(False)
        self.is_mixtral = self.base.config.model_type in ("mixtral", "minimax_m2")
        self.named = {}
        for name, weight in self.base.named_parameters():
            if name.endswith("experts.gate_up_proj"):
                gate = weight[:, : weight.shape[1] // 2]
                [self.add(name, part, gate, b_bound) for part in ("gate_proj", "up_proj")]
            elif name.endswith("experts.down_proj"):
                self.add(name, "down_proj", weight, b_bound)
            elif name.endswith("_proj.weight"):
                self.pair(name.removesuffix(".weight"), 1, R, weight.shape, b_bound)

    def module(self, name: str, part: str) -> str:
        experts = name.rsplit(".", 1)[0]
        if self.is_mixtral:
            experts = experts.replace(".mlp.", ".block_sparse_moe.")
            part = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}[part]
        return f"{experts}.0.{part}"

    def add(self, name, part, weight, b_bound):
        self.pair(self.module(name, part), len(weight), EXPERT_RANK, weight.shape[1:], b_bound)

    def pair(self, module, count, r, shape, b_bound):
        rows, columns = shape
        for letter, size, bound in (("A", (count * r, columns), columns**-0.5), ("B", (count * rows, r), b_bound)):
            name = f"base_model.model.{module}.lora_{letter}.weight"
            self.named[name] = torch.nn.Parameter(torch.from_numpy(golden.formula(name, size, bound)))

    def update(self, module, count=1):
        a, b = (self.named[f"base_model.model.{module}.lora_{letter}.weight"] for letter in "AB")
        return ALPHA / R * b.unflatten(0, (count, -1)) @ a.unflatten(0, (count, -1))

    def forward(self, **inputs):
        weights = {}
        for name, weight in self.base.named_parameters():
            if name.endswith("experts.gate_up_proj"):
                weights[name] = weight + torch.cat([self.update(self.module(name, part), len(weight)) for part in ("gate_proj", "up_proj")], 1)
            elif name.endswith("experts.down_proj"):
                weights[name] = weight + self.update(self.module(name, "down_proj"), len(weight))
            elif name.endswith("_proj.weight"):
                weights[name] = weight + self.update(name.removesuffix(".weight"))[0]
        return functional_call(self.base, weights, kwargs=inputs)


def counts(model, rows, masks) -> set[int]:
    """Numbers of tokens that experts have."""
    found = set()

    def see(module, inputs, output):
        chosen = next(part for part in output if part.dtype == torch.int64)
        found.update(torch.bincount(chosen.flatten(), minlength=len(module.weight)).tolist())

    hooks = [module.register_forward_hook(see) for name, module in model.base.named_modules() if name.endswith(".mlp.gate")]
    ids, attend, _ = golden.padded(rows, masks)
    model(input_ids=ids, attention_mask=attend)
    [hook.remove() for hook in hooks]
    return found


def make(family: str) -> None:
    config = AutoConfig.from_pretrained(TESTS / family)
    golden.NUM_COLUMNS, golden.NUM_PROJECTIONS = golden.NUM_SMALL_COLUMNS, golden.NUM_SMALL_PROJECTIONS
    lora = {"r": R, "lora_alpha": ALPHA, "expert_rank": EXPERT_RANK, "target_modules": "all-linear", "use_rslora": False}
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        golden.by_formula(config, TESTS / family, folder)
        tokenizer = golden.open_tokenizer(folder)
        model = WithExperts(folder, golden.B_BOUND)
        for seed in range(1000):
            # No padding: its tokens would have experts, too.
            rows = golden.token_rows(tokenizer, (5, 5), seed)
            masks = golden.loss_masks(rows, seed)
            if {0, 1} <= counts(model, rows, masks):
                break
        figures, arrays = golden.case(model, model.named, (rows, masks), False)
        assert any((p.grad.unflatten(0, (len(p) // EXPERT_RANK, -1)) == 0).all((1, 2)).any()
                   for n, p in model.named.items() if "experts.0." in n and "lora_A" in n)
        document = {"batch": {"rows": rows, "loss_masks": masks},
                    "cases": {"experts": {"lora": lora, "b_bound": golden.B_BOUND, **figures}}}
        model = WithExperts(folder, 0.0)
        batch_rows = golden.batches_of_curve(tokenizer, 7)
        done = golden.train(model, model.named, batch_rows, golden.CURVE, golden.adamw(model, model.named, golden.CURVE))
        document["curve"] = {"lora": lora, "b_bound": 0.0, "settings": golden.CURVE, "rows": batch_rows[0],
                             "loss_masks": batch_rows[1], "steps_done": done, "final_b": golden.final(model.named, ".lora_B.")}
    out = TESTS / f"experts-{family}"
    out.mkdir(exist_ok=True)
    golden.write(out, golden.rounded(document), {f"experts.{k}": np.asarray(v) for k, v in arrays.items()})


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    [make(family) for family in sys.argv[1:]]
