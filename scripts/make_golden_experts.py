#!/usr/bin/env python3
"""Golden numbers of adapters on experts: a pair of matrices for gate, up and down of each.

usage: make_golden_experts.py FAMILY...          (folders of tests/golden; writes tests/golden/experts-FAMILY)

transformers has a layer's experts in one tensor. Here that is computed as the base's and the updates, which autograd takes apart:
PEFT's form, in which gate and up are one adapter of twice the rank, has gradients off the diagonal of B, which no other has. The
others must be those of PEFT, which is asked with the same numbers. Of Llama 4's, which lie as `[experts, in, out]`, PEFT takes the
inputs for outputs, so that A and B have each other's places. Adapters of a layer's experts are one tensor each, row below row,
under the name of the first. The rows are such that an expert has no token, and another has one. Numbers as in make_golden.py.
"""

import functools
import pathlib
import re
import sys
import tempfile

import make_golden as golden
import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from torch.func import functional_call
from transformers import AutoConfig

TESTS = pathlib.Path(__file__).resolve().parent.parent / "tests/golden"
R, EXPERT_RANK, ALPHA = 4, 3, 6.0
ROOTED = ("glm4_moe", "granitemoe")  # with `use_rslora`
WITHOUT_CURVE = ("granitemoe", "lfm2_moe", "llama4", "qwen3_5_moe", "qwen3_vl_moe")


def parts_of(name: str) -> tuple[str, ...]:
    """What a parameter has of each expert; none: it is no such parameter."""
    if not name.endswith(("experts.gate_up_proj", "experts.up_proj", "experts.down_proj")):
        return ()
    return ("gate_proj", "up_proj") if name.endswith("gate_up_proj") else (name.rpartition(".")[2],)


class WithExperts(torch.nn.Module):
    """The model with an adapter on every linear layer, experts too."""

    def __init__(self, folder: pathlib.Path, b_bound: float, is_rooted: bool):
        super().__init__()
        self.scale = ALPHA / (R**0.5 if is_rooted else R)
        self.base = golden.open_model(folder).requires_grad_(False)
        kind = self.base.config.get_text_config().model_type
        self.parts = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"} if kind in ("mixtral", "minimax_m2", "lfm2_moe") else {}
        self.in_turn, self.is_turned = kind == "gpt_oss", kind == "llama4_text"
        self.in_first = self.in_turn or self.is_turned
        self.named, self.linears = {}, []
        for name, weight in self.base.named_parameters():
            out_first = weight.shape[1:][::-1] if self.in_first else weight.shape[1:]
            if parts := parts_of(name):
                [self.add(name, part, (out_first[0] // len(parts), out_first[1]), len(weight), b_bound) for part in parts]
            elif isinstance(self.base.get_submodule(name.rpartition(".")[0]), torch.nn.Linear) and name.endswith("weight") \
                    and not re.search("lm_head|visual|vision_|multi_modal|router|mixer.out_proj", name):
                self.linears.append(name)
                self.pair(name.removesuffix(".weight"), 1, R, weight.shape, b_bound)

    def module(self, name: str, part: str) -> str:
        experts = name.rsplit(".", 1)[0]
        if self.base.config.model_type in ("mixtral", "minimax_m2"):
            experts = experts.replace(".mlp.", ".block_sparse_moe.")
        return f"{experts}.0.{self.parts.get(part, part)}"

    def add(self, name, part, shape, count, b_bound):
        self.pair(self.module(name, part), count, EXPERT_RANK, shape, b_bound)

    def pair(self, module, count, r, shape, b_bound):
        rows, columns = shape
        for letter, size, bound in (("A", (count * r, columns), columns**-0.5), ("B", (count * rows, r), b_bound)):
            name = f"base_model.model.{module}.lora_{letter}.weight"
            self.named[name] = torch.nn.Parameter(torch.from_numpy(golden.formula(golden.name_alone(name), size, bound)))

    def update(self, module, count=1):
        a, b = (self.named[f"base_model.model.{module}.lora_{letter}.weight"] for letter in "AB")
        return self.scale * b.unflatten(0, (count, -1)) @ a.unflatten(0, (count, -1))

    def updates(self, name: str, count: int) -> torch.Tensor:
        """What is added to the experts' matrices, [experts, out_features, in_features], of a tensor."""
        both = [self.update(self.module(name, part), count) for part in parts_of(name)]
        return torch.stack(both, 2).flatten(1, 2) if self.in_turn and len(both) > 1 else torch.cat(both, 1)

    def forward(self, **inputs):
        weights = {}
        for name, weight in self.base.named_parameters():
            if parts_of(name):
                update = self.updates(name, len(weight))
                weights[name] = weight + (update.transpose(1, 2) if self.in_first else update)
            elif name in self.linears:
                weights[name] = weight + self.update(name.removesuffix(".weight"))[0]
        return functional_call(self.base, weights, kwargs=inputs)

    def compare_with_peft(self, folder: pathlib.Path, batch) -> None:
        """PEFT's logits with the same numbers, and its gradients of those that are here, where it takes one adapter for gate and up."""
        names = [name for name, _ in self.base.named_parameters() if parts_of(name)]
        lora = LoraConfig(task_type="CAUSAL_LM", r=EXPERT_RANK, lora_alpha=self.scale * EXPERT_RANK, target_parameters=names, target_modules=[],
                          rank_pattern={"experts.gate_up_proj": 2 * EXPERT_RANK}, alpha_pattern={"experts.gate_up_proj": self.scale * 2 * EXPERT_RANK})
        model = get_peft_model(golden.open_model(folder), lora)
        peft = {name.replace(".default", ""): p for name, p in model.named_parameters() if p.requires_grad}
        places = []
        for name in names:
            count, parts = len(self.base.get_parameter(name)), parts_of(name)
            at = f"base_model.model.{name.rpartition('.')[0]}{'.base_layer' * (not name.endswith('down_proj'))}"
            for i, part in enumerate(parts):
                ours = f"base_model.model.{self.module(name, part)}"
                rows = slice(i * EXPERT_RANK, (i + 1) * EXPERT_RANK)

                def of_expert(all, letter, rows=rows, rank=EXPERT_RANK * len(parts), count=count):
                    """Of A [experts, rank, in], of B [experts, out, rank]."""
                    if letter == "A":
                        return all.unflatten(0, (-1, rank))[:, rows]
                    return all.unflatten(1, (-1, count)).permute(2, 0, 1)[..., rows]

                def of_part(all, letter, of_expert=of_expert, i=i, num=len(parts)):
                    theirs = "BA"["AB".index(letter)] if self.is_turned else letter
                    all = of_expert(all, theirs)
                    all = all.transpose(1, 2) if self.is_turned else all
                    return all if letter == "A" else all[:, i::num] if self.in_turn else all.chunk(num, 1)[i]

                for letter, theirs in (("A", "AB"[self.is_turned]), ("B", "BA"[self.is_turned])):
                    of = functools.partial(of_part, letter=letter)
                    places.append((self.named[f"{ours}.lora_{letter}.weight"], peft[f"{at}.lora_{theirs}.weight"], of))
        assert {id(theirs) for _, theirs, _ in places} == {id(theirs) for theirs in peft.values()}
        with torch.no_grad():
            [theirs.zero_() for _, theirs, _ in places]
            for ours, theirs, of in places:
                of(theirs).copy_(ours.view(of(theirs).shape))
            for name in self.linears:
                model.base_model.model.get_parameter(name).add_(self.update(name.removesuffix(".weight"))[0])
        rows, masks = batch
        ids, attend, labels = golden.padded(rows, masks)
        logits = model(input_ids=ids, attention_mask=attend).logits
        (golden.loss_sum(logits, labels) / (labels[:, 1:] != -100).sum()).backward()
        worst = ((self(input_ids=ids, attention_mask=attend).logits - logits).abs().max() / logits.abs().max()).item()
        grads = [(ours.grad.view(of(theirs.grad).shape), of(theirs.grad)) for ours, theirs, of in places]
        worst_grad = max(((ours - theirs).norm() / ours.norm()).item() for ours, theirs in grads)
        print(f"{self.base.config.model_type}: PEFT's logits are {worst:.1e} from these, its gradients {worst_grad:.1e}")
        if worst > 1e-5 or worst_grad > 1e-4:
            sys.exit("PEFT computes something else")


def counts(model, rows, masks) -> set[int]:
    """Numbers of tokens that experts have."""
    found = set()

    def see(module, inputs):
        found.update(torch.bincount(inputs[1].flatten(), minlength=module.num_experts).tolist())

    def see_scores(_, __, scores_and_logits):
        found.update((scores_and_logits[0] > 0).sum(0).tolist())

    named = model.base.named_modules()
    hooks = [module.register_forward_hook(see_scores) if model.is_turned else module.register_forward_pre_hook(see)
             for name, module in named if name.endswith(".router" if model.is_turned else ".experts")]
    ids, attend, _ = golden.padded(rows, masks)
    model(input_ids=ids, attention_mask=attend)
    [hook.remove() for hook in hooks]
    return found


def make(family: str) -> None:
    config = AutoConfig.from_pretrained(TESTS / family)
    golden.NUM_COLUMNS, golden.NUM_PROJECTIONS = golden.NUM_SMALL_COLUMNS, golden.NUM_SMALL_PROJECTIONS
    lora = {"r": R, "lora_alpha": ALPHA, "expert_rank": EXPERT_RANK, "target_modules": "all-linear", "use_rslora": family in ROOTED}
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        golden.by_formula(config, TESTS / family, folder)
        tokenizer = golden.open_tokenizer(folder)
        model = WithExperts(folder, golden.B_BOUND, family in ROOTED)
        for seed in range(1000):
            # No padding: its tokens would have experts, too.
            rows = golden.token_rows(tokenizer, (5, 5), seed)
            masks = golden.loss_masks(rows, seed)
            if {0, 1} <= counts(model, rows, masks):
                break
        figures, arrays = golden.case(model, model.named, (rows, masks), False)
        model.compare_with_peft(folder, (rows, masks))
        assert any((p.grad.unflatten(0, (len(p) // EXPERT_RANK, -1)) == 0).all((1, 2)).any()
                   for n, p in model.named.items() if "experts.0." in n and "lora_A" in n)
        document = {"batch": {"rows": rows, "loss_masks": masks},
                    "cases": {"experts": {"lora": lora, "b_bound": golden.B_BOUND, **figures}}}
        if family in WITHOUT_CURVE:
            return write(family, document, arrays)
        model = WithExperts(folder, 0.0, family in ROOTED)
        batch_rows = golden.batches_of_curve(tokenizer, 7)
        done = golden.train(model, model.named, batch_rows, golden.CURVE, golden.adamw(model, model.named, golden.CURVE))
        document["curve"] = {"lora": lora, "b_bound": 0.0, "settings": golden.CURVE, "rows": batch_rows[0],
                             "loss_masks": batch_rows[1], "steps_done": done, "final_b": golden.final(model.named, ".lora_B.")}
    write(family, document, arrays)


def write(family: str, document: dict, arrays: dict) -> None:
    out = TESTS / f"experts-{family}"
    out.mkdir(exist_ok=True)
    golden.write(out, golden.rounded(document), {f"experts.{k}": np.asarray(v) for k, v in arrays.items()})


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    [make(family) for family in sys.argv[1:]]
