#!/usr/bin/env python3
"""Golden numbers of adapters that PEFT makes with "all-linear" of mixtures: on routers too, and on what else it takes.

usage: make_golden_routers.py FAMILY...          (folders of tests/golden; writes tests/golden/routers-FAMILY)

The numbers of an adapter follow from the names and shapes in PEFT's file, which are stored with its adapter_config.json; those of
routers' B are larger, so that they decide which experts tokens have. Gradients are those of linear layers that are no experts. Where
PEFT takes no router by itself, its weight is named in `target_parameters`. Numbers as in make_golden.py.
"""

import json
import pathlib
import sys
import tempfile

import make_golden as golden
import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoConfig

TESTS = pathlib.Path(__file__).resolve().parent.parent / "tests/golden"
ROOTED = ("glm4_moe",)  # with `use_rslora`
NAMED = {"gpt_oss": ["mlp.router.weight"], "granitemoe": ["router.weight"]}
ROUTER_BOUND = 0.5
EXPERTS = ".experts."


def is_router(name: str) -> bool:
    return any(f"{end}.lora_" in name for end in (".gate", ".gate.wg", ".router", ".router.proj"))


def make(family: str) -> None:
    config = AutoConfig.from_pretrained(TESTS / family)
    golden.NUM_COLUMNS, golden.NUM_PROJECTIONS = golden.NUM_SMALL_COLUMNS, golden.NUM_SMALL_PROJECTIONS
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        golden.by_formula(config, TESTS / family, folder)
        lora = LoraConfig(task_type="CAUSAL_LM", r=3, lora_alpha=6, target_modules="all-linear", use_rslora=family in ROOTED,
                          target_parameters=NAMED.get(family), alpha_pattern={"gate.weight": 9})
        model = get_peft_model(golden.open_model(folder), lora)
        named = golden.adapter_tensors(model)
        with torch.no_grad():
            for key, tensor in named.items():
                bound = tensor.shape[-1] ** -0.5 if ".lora_A." in key else ROUTER_BOUND if is_router(key) else golden.B_BOUND
                tensor.copy_(torch.from_numpy(golden.formula(key, tuple(tensor.shape), bound)))
        tokenizer = golden.open_tokenizer(folder)
        # No padding: its tokens would have experts, too.
        rows = golden.token_rows(tokenizer, (13, 13), 0)
        masks = golden.loss_masks(rows, 0)
        linears = {key: p for key, p in named.items() if EXPERTS not in key}
        figures, arrays = golden.case(model, linears, (rows, masks), False)
        model.save_pretrained(folder / "adapter")
        written = json.loads((folder / "adapter/adapter_config.json").read_text())
        saved = load_file(folder / "adapter/adapter_model.safetensors")
    assert any(map(is_router, saved)) and set(saved) == set(named)
    written = {key: sorted(value) if key.startswith("target_") and value else value for key, value in written.items() if value}
    tensors = {key: list(value.shape) for key, value in saved.items()}
    document = {"batch": {"rows": rows, "loss_masks": masks}, "adapter_config": written | {"base_model_name_or_path": "base"},
                "router_bound": ROUTER_BOUND, "b_bound": golden.B_BOUND, "tensors": tensors, "figures": figures}
    out = TESTS / f"routers-{family}"
    out.mkdir(exist_ok=True)
    golden.write(out, golden.rounded(document), {f"adapter.{k}": np.asarray(v) for k, v in arrays.items()})


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    [make(family) for family in sys.argv[1:]]
