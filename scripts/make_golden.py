#!/usr/bin/env python3
"""Golden files: results of transformers + PEFT in f32 on the CPU, for our tests to compare with.

usage: make_golden.py model MODEL_DIR OUT_DIR [--r 8] [--whole-gradients] [--curve] [--seed N]
       make_golden.py family FOLDER [--small]
       make_golden.py optimizers MODEL_DIR OUT_DIR
       make_golden.py starts MODEL_DIR OUT_DIR
       make_golden.py eva MODEL_DIR OUT_DIR
       make_golden.py dora MODEL_DIR OUT_DIR
       make_golden.py tokens MODEL_DIR OUT_DIR [--family FOLDER]
       make_golden.py modules MODEL_DIR OUT_DIR [--family FOLDER]
       make_golden.py combinations MODEL_DIR OUT_DIR
       make_golden.py rope OUT_DIR
       make_golden.py bitsandbytes FOLDER
       make_golden.py quantised OUT_FILE
       make_golden.py gguf OUT_FILE
       make_golden.py packed OUT_FILE

`model` writes OUT_DIR/golden.json and OUT_DIR/golden.safetensors for one Hugging Face folder:

  base         the model without an adapter: loss and logits of one padded batch of three rows of unequal length
  all_linear   LoRA on every linear layer, A and B non-zero: loss, logits, and the gradient of every adapter tensor
  rslora       the same with a list of targets, rank-stabilised scale, lora_alpha unlike r
  greedy       for `family`: a prompt, continued with the adapter of all_linear
  curve        20 optimizer steps from B = 0: AdamW, clipping, cosine with warm-up, two unequal micro-batches a step
  tokenizer    texts with their token ids
  chat         conversations as rendered by the chat template, with their token ids

`family` writes them beside FOLDER/config.json for a small model of that shape, with the quickstart's tokenizer. Its
weights are not stored; they follow from the formula below and the tensor's name: norms around 1 and biases around 0 with
a bound of 0.3, others with 1.7 / sqrt(inputs of an output). Families whose files have norms less 1 have them around 0, but for
the gated one of linear attention and the last of Muse Glimmer; Gemma 3n's and 4's of queries are around 1/4, and layers' scales around 1. A_log is around -3, so that states reach over many tokens, and its rows are longer than a
chunk of 64 tokens. `--small` is for families that differ from another in little: it leaves out all but the case `all_linear`,
`greedy` and `curve`, and most of the stored numbers. Of a multimodal model, adapters are on the language model alone, and tensors are drawn under the names that they have there.

`optimizers` writes OUT_DIR/golden.json for one folder: the curve by the rule of each optimizer, of torch, transformers, bitsandbytes
(its PyTorch version of the 8-bit update, uncompiled: TORCHDYNAMO_DISABLE=1), PEFT's LoRA+, and Facebook's schedule-free
(pip install --no-deps schedulefree==1.4.1); with the adapter after it, which is the average where there is one. And one row
with NEFTune's noise.

`starts` writes OUT_DIR/golden.json for one folder: for each start that takes a part out of the base, that part (B A), the norms of
A's rows, the curve from there, and the difference that it makes to the weights (B A less the part).

`eva` writes OUT_DIR/golden.json for one folder: the ranks that initialize_lora_eva_weights gives from the rows of the curve, its
patterns, the projector on the directions of each A (A^T A), the curve from there, and B A after it. The random numbers from which
PEFT estimates singular values are those of our hash.

`dora` writes golden.json, golden.safetensors and an adapter that PEFT saved, for one folder: the cases of `model` with `use_dora`, its
curve with the adapter after it, the weights that PEFT merges, and a row with dropout, whose masks are those of our hash.

`combinations` writes OUT_DIR/golden.json for one folder: two adapters, and what add_weighted_adapter makes of them by each type: A and B,
and where their signs are free their product.

`rope` writes the rotary tables of transformers for scaled and unscaled configurations.

`bitsandbytes` does what `family` does for FOLDER/shape.json, which also has a `quantization_config`, and writes the model
as bitsandbytes quantises it beside them; some of the logits' columns are enough there. Widths are multiples of a block:
bitsandbytes 0.50.2 decodes others wrongly on a CPU, where a block crosses rows.

`quantised` writes a matrix and what bitsandbytes makes of it: codes, scales, and some of the decoded numbers.

`gguf` writes blocks of every quantised type of GGUF, and the numbers that gguf-py decodes them to.
`packed` writes a matrix as AutoGPTQ, AutoAWQ and compressed-tensors pack it and as 8-bit floats, each with what they decode it
to (pip install --no-deps auto-gptq==0.7.1 autoawq==0.2.7.post3 compressed-tensors==0.20.0 loguru; no GPU is needed).

Adapters are not stored; a test makes the same numbers by a formula (`formula` below). Its `name` is PEFT's key of the
tensor, such as `base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight`.

    bits(name, i) = splitmix64's output for the state fnv1a64(name) + (i + 1) * 0x9E3779B97F4A7C15   (mod 2^64)
    value(name, i, bound) = f32(((bits >> 40) / 2^24 * 2 - 1) * bound)          computed in f64, row-major i
    A: bound = 1 / sqrt(in_features);   B: bound = the case's `b_bound`;   magnitudes: their start, times 1 + 10 value, B's bound

Gradients are stored as their f64 norm and eight projections on sign vectors, sum_i(g_i * s_i) in f64. The lowest bit of
bits("<name>#<j>", i) is sign i of vector j: 1 is plus, 0 is minus. For a difference d of two gradients, the mean square
of the projections of d is an unbiased estimate of |d|^2. `--whole-gradients` also stores the whole gradients.

Logits are stored only for real tokens and some columns, row after row, with the norm over all columns and the
log-sum-exp. Needs torch, transformers, peft, safetensors (scripts/setup_python.sh).
"""

import argparse
import functools
import hashlib
import importlib.util
import json
import pathlib
import platform
import re
import shlex
import shutil
import sys
import tempfile
from unittest import mock

import numpy as np
import peft
import safetensors
import tokenizers
import torch
import transformers
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from safetensors.numpy import save_file
from safetensors.torch import save_file as save_torch_file
from transformers import (AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, BitsAndBytesConfig, LlamaConfig,
                          PreTrainedTokenizerFast, get_cosine_schedule_with_warmup)

from quickstart_text import World

GOLDEN_GAMMA = np.uint64(0x9E3779B97F4A7C15)
NUM_PROJECTIONS, NUM_COLUMNS = 8, 192
B_BOUND = 0.02
EVA_ROWS = 4  # of a batch
GREEDY = 12, 24  # tokens of the prompt, and behind it
NORMS_LESS_ONE = ("nemotron", "gemma", "vaultgemma", "gemma2", "gemma3_text", "gemma3", "qwen3_5_text", "qwen3_5", "qwen3_5_moe_text", "qwen3_next", "muse_glimmer")
CASE_LENGTHS = (37, 23, 30)
SMALL_LENGTHS, NUM_SMALL_COLUMNS, NUM_SMALL_PROJECTIONS = (21, 13, 18), 12, 3
CHUNKED_LENGTHS, NUM_CHUNKED_COLUMNS = (150, 23, 70), 64  # of linear attention
CURVE = {"steps": 20, "micro_batch_size": 2, "gradient_accumulation_steps": 2, "learning_rate": 1e-3, "betas": [0.9, 0.999],
         "eps": 1e-8, "weight_decay": 0.01, "max_grad_norm": 1.0, "warmup_steps": 4, "lr_scheduler": "cosine"}


# ---- numbers by formula

def bits(name: str, count: int) -> np.ndarray:
    """`count` pseudo-random 64-bit words that depend on the name alone."""
    state = 0xCBF29CE484222325
    for byte in name.encode():
        state = (state ^ byte) * 0x100000001B3 % 2**64
    with np.errstate(over="ignore"):
        z = np.uint64(state) + np.arange(1, count + 1, dtype=np.uint64) * GOLDEN_GAMMA
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


def formula(name: str, shape: tuple[int, ...], bound: float) -> np.ndarray:
    """An f32 tensor, uniform in +-bound."""
    unit = (bits(name, int(np.prod(shape))) >> np.uint64(40)).astype(np.float64) / 2**24
    return ((unit * 2 - 1) * bound).astype(np.float32).reshape(shape)


def projections(name: str, values: np.ndarray) -> list[float]:
    """Sums of the values with signs that depend on the name."""
    flat = values.astype(np.float64).ravel()
    signs = ((bits(f"{name}#{j}", flat.size) & np.uint64(1)).astype(np.float64) * 2 - 1 for j in range(NUM_PROJECTIONS))
    return [float(flat @ s) for s in signs]


# ---- model and batches

def auto_class(config):
    """What opens the whole model: some multimodal ones are no causal language models to transformers, or only a part is."""
    is_causal = type(config) in AutoModelForCausalLM._model_mapping and config.model_type not in ("qwen3_5", "llama4")
    return AutoModelForCausalLM if is_causal else AutoModelForImageTextToText


def open_model(folder: pathlib.Path):
    """The base model in f32."""
    model = auto_class(AutoConfig.from_pretrained(folder)).from_pretrained(folder, dtype=torch.float32, attn_implementation="eager", device_map="cpu")
    for parameter in model.parameters():
        if hasattr(parameter, "quant_state"):
            # Else its backward rounds to the type of the original what its forward does not round.
            parameter.quant_state.dtype = torch.float32
        if type(parameter) is torch.nn.Parameter:  # as PEFT's prepare_model_for_kbit_training does it
            parameter.data = parameter.data.float()
    # Outside of training, bitsandbytes rounds activations too. There is no dropout.
    return model.train(hasattr(model.config, "quantization_config"))


def open_tokenizer(folder: pathlib.Path) -> PreTrainedTokenizerFast:
    """The tokenizer exactly as tokenizer.json has it, with the chat template of tokenizer_config.json."""
    config = json.loads((folder / "tokenizer_config.json").read_text())
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    tokenizer.chat_template = config.get("chat_template")
    return tokenizer


def token_rows(tokenizer, lengths, seed: int) -> list[list[int]]:
    """Rows of real tokens: stories of the quickstart's world, cut to the lengths."""
    world, rows = World(seed), []
    for length in lengths:
        ids: list[int] = []
        while len(ids) < length:
            ids += tokenizer.encode(world.story(world.facts(), 6)[0] + "\n", add_special_tokens=False)
        rows.append(ids[:length])
    return rows


def loss_masks(rows, seed: int) -> list[list[int]]:
    """1 for tokens with loss: in each row an answer after a prompt, once with a gap; never the first token."""
    masks = []
    for index, row in enumerate(rows):
        prompt = 1 + int(bits(f"prompt {seed} {index}", 1)[0] % np.uint64(max(1, len(row) // 2)))
        mask = [0] * prompt + [1] * (len(row) - prompt)
        if index % 3 == 1:
            mask[-4:-2] = [0, 0]
        masks.append(mask)
    return masks


def padded(rows, masks):
    """Input ids, attention mask and labels (-100 where there is no loss), padded on the right with token 0."""
    width = max(map(len, rows))
    ids, attend, labels = torch.zeros(len(rows), width, dtype=torch.long), torch.zeros(len(rows), width, dtype=torch.long), None
    labels = torch.full((len(rows), width), -100)
    for i, (row, mask) in enumerate(zip(rows, masks)):
        ids[i, : len(row)] = torch.tensor(row)
        attend[i, : len(row)] = 1
        labels[i, : len(row)] = torch.where(torch.tensor(mask) == 1, torch.tensor(row), -100)
    return ids, attend, labels


def loss_sum(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Sum of the cross-entropy of the tokens that carry loss; the shift by one happens here."""
    return torch.nn.functional.cross_entropy(logits[:, :-1].reshape(-1, logits.shape[-1]), labels[:, 1:].reshape(-1),
                                             ignore_index=-100, reduction="sum")


def with_adapter(folder: pathlib.Path, lora: dict, b_bound: float):
    """The model with an adapter whose values follow from the formula."""
    base = open_model(folder)
    # PEFT would adapt what makes the layers' own embeddings of Gemma 3n and 4, routers, and what makes several residual streams.
    has_others = hasattr(base.config, "vision_config") or hasattr(base.config, "hidden_size_per_layer_input")
    others = r".*(vision|projector|visual|connector|per_layer_model_projection|altup|router).*" if has_others else None
    # PEFT refuses them, or it is a router.
    refused = {"nemotron_h": ("out_proj",), "falcon_h1": ("out_proj",), "hunyuan_v1_moe": ("gate.wg",)}.get(base.config.model_type, ())
    if lora["target_modules"] == "all-linear" and (refused or hasattr(base.config.get_text_config(), "num_experts_per_tok")):
        # PEFT would adapt experts and what chooses them, too.
        linears = [name for name, module in base.named_modules() if isinstance(module, torch.nn.Linear) and not name.endswith(refused)]
        lora = lora | {"target_modules": [name for name in linears if not name.endswith("lm_head") and not (others and re.match(others, name))]}
    config = LoraConfig(**{"task_type": "CAUSAL_LM", "lora_dropout": 0.0, "bias": "none", "exclude_modules": others, **lora})
    # For Qwen3-Next, PEFT 0.21 takes names of the shared expert and of dense layers for those of experts.
    with mock.patch("peft.utils.transformers_weight_conversion._convert_peft_config_moe"):
        model = get_peft_model(base, config).train(base.training)
    named = adapter_tensors(model)
    with torch.no_grad():
        for name, tensor in named.items():
            bound = tensor.shape[-1] ** -0.5 if ".lora_A." in name else b_bound
            values = torch.from_numpy(formula(name_alone(name), tuple(tensor.shape), bound))
            tensor.copy_(values if ".lora_A." in name or ".lora_B." in name else tensor * (1 + 10 * values))
    return model, named


def adapter_tensors(model) -> dict[str, torch.nn.Parameter]:
    """The trainable tensors by the keys that PEFT gives them in adapter_model.safetensors."""
    # PEFT saves magnitudes without the end of their names.
    named = {name.replace("vector.default.weight", "vector").replace("delta.default", "delta").replace(".modules_to_save", "")
             .replace(".default.weight", ".weight"): p for name, p in model.named_parameters() if p.requires_grad}
    # An embedding that is the head has both names there.
    tied = {"base_model.model.lm_head.weight"} if model.peft_config["default"].ensure_weight_tying else set()
    if set(named) != set(get_peft_model_state_dict(model)) - tied:
        sys.exit("the trainable tensors are not the ones that PEFT saves")
    return named


# ---- parts of the golden file

def logits_of(logits: torch.Tensor, rows) -> dict[str, np.ndarray]:
    """The stored part of the logits."""
    real = torch.cat([logits[i, : len(row)] for i, row in enumerate(rows)])
    stride = max(1, real.shape[1] // NUM_COLUMNS)
    columns = np.arange(0, real.shape[1], stride, dtype=np.int32)
    return {"columns": columns, "logits": real[:, torch.from_numpy(columns).long()].contiguous().numpy(),
            "logits_norm": real.double().norm(dim=1).float().numpy(), "log_sum_exp": torch.logsumexp(real, 1).numpy()}


def case(model, named, batch, whole: bool) -> tuple[dict, dict[str, np.ndarray]]:
    """Loss, logits and, with an adapter, its gradients."""
    rows, masks = batch
    ids, attend, labels = padded(rows, masks)
    num_targets = int((labels[:, 1:] != -100).sum())
    with torch.set_grad_enabled(bool(named)):
        logits = model(input_ids=ids, attention_mask=attend).logits
        loss = loss_sum(logits, labels) / num_targets
    figures = {"loss": loss.item(), "num_tokens": int(attend.sum()), "num_target_tokens": num_targets}
    arrays = logits_of(logits.detach(), rows)
    if named:
        loss.backward()
        gradients = {name: p.grad.numpy() for name, p in named.items()}
        figures["grad_norm"] = float(np.sqrt(sum(np.square(g, dtype=np.float64).sum() for g in gradients.values())))
        figures["gradients"] = {name: {"shape": list(g.shape), "norm": float(np.linalg.norm(g.astype(np.float64))),
                                       "projections": projections(name, g)} for name, g in gradients.items()}
        if whole:
            arrays |= {f"gradient.{name}": g for name, g in gradients.items()}
    return figures, arrays


def batches_of_curve(tokenizer, seed: int):
    """The rows of a curve and which tokens carry loss."""
    lengths = [12 + (7 * i) % 23 for i in range(6 * CURVE["micro_batch_size"])]
    rows = token_rows(tokenizer, lengths, seed + 1)
    return rows, loss_masks(rows, seed + 1)


def adamw(model, named, settings):
    return torch.optim.AdamW(named.values(), lr=settings["learning_rate"], betas=tuple(settings["betas"]), eps=settings["eps"],
                             weight_decay=settings["weight_decay"])


def train(model, named, batch_rows, settings, optimizer, after_step=lambda: None) -> list[dict]:
    """A short training run: its steps."""
    model.train()
    rows, masks = batch_rows
    steps, size, accumulation = CURVE["steps"], CURVE["micro_batch_size"], CURVE["gradient_accumulation_steps"]
    schedule = get_cosine_schedule_with_warmup(optimizer, CURVE["warmup_steps"], steps)
    done, cursor = [], 0
    for _ in range(steps):
        micro_batches = []
        for _ in range(accumulation):
            micro_batches.append([(cursor + j) % len(rows) for j in range(size)])
            cursor += size
        batches = [padded([rows[i] for i in chosen], [masks[i] for i in chosen]) for chosen in micro_batches]
        num_targets = sum(int((labels[:, 1:] != -100).sum()) for _, _, labels in batches)
        total = 0.0
        for ids, attend, labels in batches:
            loss = loss_sum(model(input_ids=ids, attention_mask=attend).logits, labels) / num_targets
            loss.backward()
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(named.values(), settings["max_grad_norm"]).item()
        done.append({"micro_batches": micro_batches, "loss": total, "grad_norm": norm, "num_target_tokens": num_targets,
                     "learning_rate": optimizer.param_groups[0]["lr"]})
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        after_step()
    return done


def final(named, only: str = "") -> dict:
    """Norms and projections of adapter tensors."""
    return {name: {"norm": float(p.detach().double().norm()), "projections": projections(name, p.detach().numpy())}
            for name, p in named.items() if only in name}


def curve(folder: pathlib.Path, tokenizer, lora: dict, seed: int) -> dict:
    """A short training run, and everything needed to repeat it."""
    model, named = with_adapter(folder, lora, 0.0)
    batch_rows = batches_of_curve(tokenizer, seed)
    done = train(model, named, batch_rows, CURVE, adamw(model, named, CURVE))
    others = {"final_magnitudes": "magnitude"} if lora.get("use_dora") else {}
    others |= {"final_whole": "_delta"} if lora.get("trainable_token_indices") else {}
    return {"lora": lora, "b_bound": 0.0, "settings": CURVE, "rows": batch_rows[0], "loss_masks": batch_rows[1], "steps_done": done,
            "final_b": final(named, ".lora_B."), **{name: final(named, only) for name, only in others.items()},
            **({"final_whole": final({n: p for n, p in named.items() if ".lora_" not in n})} if lora.get("modules_to_save") else {})}


def adamw_8bit(model, named, settings):
    import bitsandbytes
    from bitsandbytes.backends.triton.kernels_optim import optimizer_update_8bit_blockwise_pytorch

    def update(name, g, p, state1, state2, beta1, beta2, beta3, alpha, eps, step, lr, qmap1, qmap2, absmax1, absmax2, decay,
               gnorm_scale, skip_zeros):
        optimizer_update_8bit_blockwise_pytorch(p, g, state1, state2, beta1, beta2, beta3, alpha, eps, step, lr, qmap1, qmap2, absmax1,
                                                absmax2, decay, gnorm_scale, skip_zeros, optimizer_name=name)

    bitsandbytes.functional.optimizer_update_8bit_blockwise = update
    return bitsandbytes.optim.AdamW8bit(named.values(), lr=settings["learning_rate"], betas=tuple(settings["betas"]),
                                        eps=settings["eps"], weight_decay=settings["weight_decay"])


def lion(model, named, settings):
    import bitsandbytes

    return bitsandbytes.optim.Lion(named.values(), lr=settings["learning_rate"], betas=tuple(settings["betas"]),
                                   weight_decay=settings["weight_decay"])


def adafactor(model, named, settings):
    return transformers.Adafactor(named.values(), lr=settings["learning_rate"], weight_decay=settings["weight_decay"],
                                  scale_parameter=False, relative_step=False)


def sgd(model, named, settings):
    return torch.optim.SGD(named.values(), lr=settings["learning_rate"], momentum=settings["momentum"],
                           weight_decay=settings["weight_decay"])


def schedule_free(model, named, settings):
    from schedulefree import AdamWScheduleFree

    optimizer = AdamWScheduleFree(named.values(), lr=settings["learning_rate"], betas=tuple(settings["betas"]), eps=settings["eps"],
                                  weight_decay=settings["weight_decay"], foreach=False)
    optimizer.train()
    return optimizer


def muon(model, named, settings):
    from torch.optim import _muon

    # In f32: what rounding to bfloat16 adds is no part of the algorithm.
    rounded = _muon._zeropower_via_newtonschulz

    def exact(*args):
        with mock.patch.object(torch, "bfloat16", torch.float32):
            return rounded(*args)

    _muon._zeropower_via_newtonschulz = exact
    return torch.optim.Muon(named.values(), lr=settings["learning_rate"], weight_decay=settings["weight_decay"],
                            momentum=settings["momentum"])


def lora_plus(model, named, settings):
    from peft.optimizers import create_loraplus_optimizer

    return create_loraplus_optimizer(model, torch.optim.AdamW, lr=settings["learning_rate"],
                                     loraplus_lr_ratio=settings["loraplus_lr_ratio"], loraplus_weight_decay=settings["weight_decay"],
                                     betas=tuple(settings["betas"]), eps=settings["eps"])


# The settings that differ from those of the curve, and what makes the optimizer.
OPTIMIZERS = {
    "adamw_8bit": ({}, adamw_8bit),
    "lion": ({"learning_rate": 3e-4, "betas": [0.9, 0.99], "weight_decay": 0.1}, lion),
    "adafactor": ({}, adafactor),
    "sgd": ({"learning_rate": 0.1, "momentum": 0.0}, sgd),
    "sgd with momentum": ({"learning_rate": 0.05, "momentum": 0.9}, sgd),
    "schedule_free_adamw": ({"learning_rate": 3e-3, "betas": [0.95, 0.99]}, schedule_free),
    "muon": ({"learning_rate": 5e-3, "momentum": 0.9, "weight_decay": 0.1}, muon),
    "adamw with lora_plus": ({"learning_rate": 2e-4, "loraplus_lr_ratio": 16.0}, lora_plus),
    "adamw with ema": ({"ema_decay": 0.8}, adamw),
}


def make_starts(args) -> None:
    """The starts that take a part out of the base."""
    tokenizer, cases = open_tokenizer(args.model), {}
    batch_rows = batches_of_curve(tokenizer, args.seed)
    for init in ("pissa", "olora"):
        lora = {"r": 4, "lora_alpha": 6, "target_modules": "all-linear", "use_rslora": False, "init_lora_weights": init}
        model = get_peft_model(open_model(args.model), LoraConfig(task_type="CAUSAL_LM", lora_dropout=0.0, bias="none", **lora))
        named = adapter_tensors(model)

        def products():
            pairs = [(name.split(".lora_A.")[0], p, named[name.replace("lora_A", "lora_B")]) for name, p in named.items()
                     if ".lora_A." in name]
            return {module: (b @ a).detach().clone() for module, a, b in pairs}

        start = products()
        norms = {name.split(".lora_A.")[0]: p.detach().norm(dim=1).tolist() for name, p in named.items() if ".lora_A." in name}
        done = train(model, named, batch_rows, CURVE, adamw(model, named, CURVE))
        differences = {module: product - start[module] for module, product in products().items()}
        cases[init] = {"lora": lora, "settings": CURVE, "start": final(start), "row_norms": norms, "steps_done": done,
                       "difference": final(differences)}
    write(args.out, {"rows": batch_rows[0], "loss_masks": batch_rows[1], "cases": cases}, None)


@functools.cache
def mixed(rows: int, columns: int) -> torch.Tensor:
    """Numbers between -1 and 1."""
    numbers = [(mix(i) >> 11) / 2**52 - 1 for i in range(rows * columns)]
    return torch.tensor(numbers, dtype=torch.float32).reshape(rows, columns)


def make_eva(args) -> None:
    """The start from the rows."""
    from peft import EvaConfig, initialize_lora_eva_weights

    tokenizer, cases = open_tokenizer(args.model), {}
    rows, masks = batch_rows = batches_of_curve(tokenizer, args.seed)
    batches = []
    for first in range(0, len(rows), EVA_ROWS):
        # The loss of a first token is never counted.
        own = [[0, *mask[1:]] for mask in masks[first:first + EVA_ROWS]]
        ids, attend, labels = padded(rows[first:first + EVA_ROWS], own)
        batches.append({"input_ids": ids, "attention_mask": attend, "labels": labels})
    patterns = {"rank_pattern": {"down_proj": 6, "k_proj": 3}, "alpha_pattern": {"o_proj": 9}}
    for name, rho, more in (("shared out", 2.0, {}), ("as they are", 1.0, {}), ("patterns", 1.5, {**patterns, "use_rslora": True})):
        lora = {"r": 4, "lora_alpha": 6, "target_modules": "all-linear", "use_rslora": False, **more}
        config = LoraConfig(task_type="CAUSAL_LM", lora_dropout=0.0, bias="none", init_lora_weights="eva",
                            eva_config=EvaConfig(rho=rho), **lora)
        model = get_peft_model(open_model(args.model), config)
        with mock.patch.object(torch, "randn", lambda rows, columns, dtype, device: mixed(rows, columns).to(dtype)):
            initialize_lora_eva_weights(model, batches, show_progress_bar=False)
        named, found = adapter_tensors(model), model.peft_config["default"]
        of_a = {name.split(".lora_A.")[0]: p.detach().clone() for name, p in named.items() if ".lora_A." in name}
        done = train(model, named, batch_rows, CURVE, adamw(model, named, CURVE))
        products = {module: (named[f"{module}.lora_B.weight"] @ named[f"{module}.lora_A.weight"]).detach() for module in of_a}
        cases[name] = {"lora": lora, "rho": rho, "settings": CURVE, "ranks": {module: len(a) for module, a in of_a.items()},
                       "rank_pattern": found.rank_pattern, "alpha_pattern": found.alpha_pattern,
                       "projectors": final({module: a.T @ a for module, a in of_a.items()}), "steps_done": done,
                       "products": final(products)}
    write(args.out, {"rows": rows, "loss_masks": masks, "rows_per_batch": EVA_ROWS, "cases": cases}, None)


def mix(value: int) -> int:
    """The finaliser of SplitMix64 after its increment."""
    value = (value + 0x9E3779B97F4A7C15) % 2**64
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    value = (value ^ value >> 27) * 0x94D049BB133111EB % 2**64
    return value ^ value >> 31


def hashes(shape: tuple[int, int], seed: int) -> np.ndarray:
    """The hash of a seed and an element's place."""
    keys = [mix(mix(seed) ^ row) for row in range(shape[0])]
    low, high = (np.array([[key >> shift & 0xFFFFFFFF] for key in keys], dtype=np.uint32) for shift in (0, 32))
    with np.errstate(over="ignore"):
        h = np.arange(shape[1], dtype=np.uint32) * np.uint32(0x9E3779B9) ^ low
        h = (h ^ h >> np.uint32(16)) * np.uint32(0x7FEB352D)
        h = (h ^ high ^ h >> np.uint32(15)) * np.uint32(0x846CA68B)
        return h ^ h >> np.uint32(16)


def hashed(shape: tuple[int, int], seed: int) -> np.ndarray:
    """The same as a share of the largest, from -1 to 1."""
    return (hashes(shape, seed).view(np.int32) / 2**31).astype(np.float32)


def neftune(folder: pathlib.Path, lora: dict, batch) -> dict:
    """Loss and gradients with the noise of transformers' hook, whose random numbers are the hash's: one row alone."""
    from transformers.integrations.neftune import neftune_post_forward_hook

    model, named = with_adapter(folder, lora, B_BOUND)
    embedding = model.get_input_embeddings()
    embedding.neftune_noise_alpha = 5.0
    embedding.register_forward_hook(neftune_post_forward_hook)

    def uniform(tensor, low, high):
        return torch.from_numpy(hashed(tensor.shape[1:], mix(mix(mix(0)))))[None] * high

    with mock.patch.object(torch.Tensor, "uniform_", uniform):
        figures, _ = case(model.train(), named, batch, False)
    return {"lora": lora, "b_bound": B_BOUND, "neftune_noise_alpha": 5.0, "rows": batch[0], "loss_masks": batch[1], **figures}


SITES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def with_masks(model, probability: float) -> None:
    """Makes the dropout of every adapter that of the hash, in the first micro-batch of a run with seed 0: one row alone."""
    for name, module in model.named_modules():
        if not name.endswith(".lora_dropout.default"):
            continue
        layer, site = int(name.split(".layers.")[1].split(".")[0]), SITES.index(name.split(".")[-3])
        seed = mix(mix(mix(mix(0)) ^ mix(layer + 1)) ^ site)

        def forward(x, seed=seed):
            stays = hashes(tuple(x.shape[1:]), seed) >= np.uint32(probability * 2**32)
            return x * torch.from_numpy(stays.astype(np.float32) / np.float32(1 - probability))[None]

        module.forward = forward


def make_dora(args) -> None:
    """Weight-decomposed adapters."""
    global NUM_COLUMNS
    NUM_COLUMNS = 24
    tokenizer = open_tokenizer(args.model)
    rows = token_rows(tokenizer, CASE_LENGTHS, args.seed)
    batch = (rows, loss_masks(rows, args.seed))
    all_linear = {"r": 4, "lora_alpha": 6, "target_modules": "all-linear", "use_rslora": False, "use_dora": True}
    patterns = {"r": 4, "lora_alpha": 6, "target_modules": ["q_proj", "v_proj", "down_proj"], "use_rslora": True, "use_dora": True,
                "rank_pattern": {"v_proj": 3}, "alpha_pattern": {"down_proj": 5}}
    document, arrays = {"batch": {"rows": batch[0], "loss_masks": batch[1]}, "cases": {}}, {}
    for name, lora in (("all_linear", all_linear), ("patterns", patterns)):
        model, named = with_adapter(args.model, lora, B_BOUND)
        figures, found = case(model, named, batch, False)
        document["cases"][name] = {"lora": lora, "b_bound": B_BOUND, **figures}
        arrays.update({f"{name}.{k}": v for k, v in found.items()})
    model.peft_config["default"].base_model_name_or_path = args.model.name
    model.save_pretrained(args.out / "adapter")
    (args.out / "adapter" / "README.md").unlink(missing_ok=True)
    modules = {name.split(".lora_A.")[0] for name in named if ".lora_A." in name}
    merged = {f"base_model.model.{name}": p for name, p in model.merge_and_unload().named_parameters()}
    document["merged"] = final({module: merged[f"{module}.weight"] for module in sorted(modules)})

    document["curve"] = curve(args.model, tokenizer, all_linear, args.seed)
    model, named = with_adapter(args.model, {**all_linear, "lora_dropout": 0.25}, B_BOUND)
    with_masks(model, 0.25)
    one_row = tuple(all[:1] for all in batch)
    figures, _ = case(model.train(), named, one_row, False)
    document["dropout"] = {"lora": all_linear, "b_bound": B_BOUND, "lora_dropout": 0.25, "rows": one_row[0],
                           "loss_masks": one_row[1], **figures}
    write(args.out, document, arrays)


def make_tokens(args) -> None:
    """Adapters with rows of the embedding, of the quickstart's model or, with a config in the folder, of one by formula."""
    global NUM_COLUMNS
    NUM_COLUMNS = 24
    with tempfile.TemporaryDirectory() as folder:
        if args.family:
            by_formula(AutoConfig.from_pretrained(args.family), args.family, pathlib.Path(folder))
            args.model = pathlib.Path(folder)
        tokenizer = open_tokenizer(args.model)
        rows = token_rows(tokenizer, CASE_LENGTHS, args.seed)
        batch = (rows, loss_masks(rows, args.seed))
        tokens = sorted({rows[0][2], rows[0][20], rows[1][-1], rows[2][-2], 7})
        lora = {"r": 4, "lora_alpha": 6, "target_modules": ["q_proj", "v_proj", "down_proj"], "use_rslora": False,
                "trainable_token_indices": tokens}
        # No adapter in the first block: the gradient goes through it all the same.
        document, arrays = {"batch": {"rows": batch[0], "loss_masks": batch[1]}, "cases": {}}, {}
        for name, lora in (("all", lora), ("last_block", {**lora, "layers_to_transform": [1]})):
            model, named = with_adapter(args.model, lora, B_BOUND)
            figures, found = case(model, named, batch, False)
            document["cases"][name] = {"lora": lora, "b_bound": B_BOUND, **figures}
            arrays.update({f"{name}.{k}": v for k, v in found.items()})
        if not args.family:
            lora = document["cases"]["all"]["lora"]
            model, named = with_adapter(args.model, lora, B_BOUND)
            model.peft_config["default"].base_model_name_or_path = args.model.name
            model.save_pretrained(args.out / "adapter")
            (args.out / "adapter" / "README.md").unlink(missing_ok=True)
            merged = dict(model.merge_and_unload().named_parameters())["model.embed_tokens.weight"]
            document["merged"] = final({"model.embed_tokens.weight": merged})
            document["curve"] = curve(args.model, tokenizer, lora, args.seed)
        write(args.out, document, arrays)


def make_modules(args) -> None:
    """Adapters with modules that are trained as a whole, of the quickstart's model or, with a config in the folder, of one by formula."""
    global NUM_COLUMNS
    NUM_COLUMNS = 24
    with tempfile.TemporaryDirectory() as folder:
        if args.family:
            by_formula(AutoConfig.from_pretrained(args.family), args.family, pathlib.Path(folder))
            args.model = pathlib.Path(folder)
        tokenizer = open_tokenizer(args.model)
        rows = token_rows(tokenizer, CASE_LENGTHS, args.seed)
        batch = (rows, loss_masks(rows, args.seed))
        is_tied = AutoConfig.from_pretrained(args.model).tie_word_embeddings
        lora = {"r": 4, "lora_alpha": 6, "target_modules": ["q_proj", "v_proj", "down_proj"], "use_rslora": False,
                "ensure_weight_tying": is_tied}
        # Where only the last block has adapters, the gradient goes through the first one all the same.
        last = {**lora, "layers_to_transform": [1]}
        cases = {"embed_tokens": {**last, "modules_to_save": ["embed_tokens"]}, "norms": {**last, "modules_to_save": ["layernorm", "model.norm"]},
                 "all": {**lora, "modules_to_save": ["embed_tokens", "lm_head", "layernorm", "model.norm"]}}
        if not is_tied:
            cases["lm_head"] = {**last, "modules_to_save": ["lm_head"]}
        document, arrays = {"batch": {"rows": batch[0], "loss_masks": batch[1]}, "cases": {}}, {}
        for name, lora in cases.items():
            model, named = with_adapter(args.model, lora, B_BOUND)
            figures, found = case(model, named, batch, False)
            document["cases"][name] = {"lora": lora, "b_bound": B_BOUND, **figures}
            arrays.update({f"{name}.{k}": v for k, v in found.items()})
        lora = cases["all"]
        document["curve"] = curve(args.model, tokenizer, lora, args.seed)
        model, named = with_adapter(args.model, lora, B_BOUND)
        document["merged"] = final(dict(model.merge_and_unload().named_parameters()))
        write(args.out, document, arrays)


COMBINATIONS = {
    "linear": {}, "cat": {}, "svd": {}, "svd of rank 3": {"svd_rank": 3}, "ties": {"density": 0.4},
    "ties by frequency": {"density": 0.4, "majority_sign_method": "frequency"}, "magnitude_prune": {"density": 0.3},
    "dare_linear": {"density": 1.0}, "dare_ties": {"density": 1.0},
}


def make_combinations(args) -> None:
    """Adapters combined; those of dare keep all numbers."""
    adapters = {
        "first": {"r": 4, "lora_alpha": 6, "target_modules": ["q_proj", "v_proj", "down_proj"], "use_rslora": False},
        "second": {"r": 4, "lora_alpha": 3, "target_modules": ["k_proj", "q_proj", "down_proj"], "use_rslora": True},
    }
    weights, found = [0.7, -0.4], {}
    for name, settings in COMBINATIONS.items():
        model = None
        for adapter, lora in adapters.items():
            config = LoraConfig(task_type="CAUSAL_LM", **lora)
            if model is None:
                model = get_peft_model(open_model(args.model), config, adapter_name=adapter)
            else:
                model.add_adapter(adapter, config)
        tensors = dict(model.named_parameters())
        with torch.no_grad():
            for key, tensor in tensors.items():
                for adapter in adapters:
                    if f".{adapter}." in key:
                        tensor.copy_(torch.from_numpy(formula(key, tuple(tensor.shape), 0.2)))
        model.add_weighted_adapter(list(adapters), weights, "both", combination_type=name.split()[0], **settings)
        both = {key.replace(".both.weight", ""): p.detach() for key, p in model.named_parameters() if ".both." in key}
        if name.startswith("svd"):
            modules = [key.removesuffix(".lora_A") for key in both if key.endswith(".lora_A")]
            both = {module: both[f"{module}.lora_B"] @ both[f"{module}.lora_A"] for module in modules}
        found[name] = {"settings": settings, "r": model.peft_config["both"].r, "tensors": final(both)}
    write(args.out, {"adapters": adapters, "weights": weights, "bound": 0.2, "combinations": found}, None)


def make_optimizers(args) -> None:
    """The curves by other optimizers."""
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

    tokenizer = open_tokenizer(args.model)
    lora = {"r": 8, "lora_alpha": 16, "target_modules": "all-linear", "use_rslora": False}
    batch_rows, curves = batches_of_curve(tokenizer, args.seed), {}
    for name, (changes, make) in OPTIMIZERS.items():
        settings = {**CURVE, **changes, "name": name.split()[0]}
        model, named = with_adapter(args.model, lora, 0.0)
        optimizer = make(model, named, settings)
        average = AveragedModel(torch.nn.ParameterList(named.values()), multi_avg_fn=get_ema_multi_avg_fn(settings.get("ema_decay", 0.0)))
        done = train(model, named, batch_rows, settings, optimizer,
                     lambda: average.update_parameters(torch.nn.ParameterList(named.values())))
        if hasattr(optimizer, "eval"):
            optimizer.eval()
        found = dict(zip(named, average.module)) if "ema_decay" in settings else named
        curves[name] = {"lora": lora, "b_bound": 0.0, "settings": settings, "steps_done": done, "final": final(found)}
    rows = {"rows": batch_rows[0], "loss_masks": batch_rows[1]}
    one_row = tuple(all[:1] for all in batch_rows)
    write(args.out, {**rows, "curves": curves, "neftune": neftune(args.model, lora, one_row)}, None)


def greedy(model, prompt: list[int]) -> dict:
    """The most likely continuation of a prompt, with a cache of keys and values."""
    model.generation_config.eos_token_id = None
    ids = torch.tensor([prompt])
    found = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=GREEDY[1], do_sample=False)
    return {"prompt": prompt, "text": found[0, len(prompt):].tolist()}


def texts() -> list[str]:
    """Texts that try a tokenizer: spaces, signs, digits, other scripts, empty."""
    world = World(11)
    return [world.story(world.facts())[0], world.story(world.facts())[0], "", " ", "  two  spaces\n\nand lines\t!", "1234567890 3.14 -7",
            '{"who": "Mia", "animal": "fox"}', "Ärger über naïve Füchse — 你好, мир! 🦊", "don't you'll I'm we've", "CamelCase snake_case <b>x</b>"]


def chats(tokenizer) -> list[dict]:
    """Conversations as the chat template renders them."""
    world, found = World(12), []
    plain = [{"role": "user", "content": "Where is Mia?"}]
    systemic = [{"role": "system", "content": "Answer in one sentence."}, *plain, {"role": "assistant", "content": "Mia is at the harbour."}]
    long = [m for _ in range(3) for m in world.extraction()["messages"]]
    for messages, prompt in ((plain, True), (plain, False), (systemic, False), (long, False), (long[:-1], True)):
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
        ids = tokenizer.apply_chat_template(messages, tokenize=True, add_generation_prompt=prompt, return_dict=False)
        found.append({"messages": messages, "add_generation_prompt": prompt, "text": text, "ids": ids})
    return found


def made_by() -> dict:
    """Versions and command line, with only the last part of each path."""
    versions = {m.__name__: m.__version__ for m in (torch, transformers, peft, tokenizers, safetensors, np)}
    words = [pathlib.Path(w).name if "/" in w and not w.startswith("tests/") else w for w in sys.argv]
    return {"command": shlex.join(words), "python": platform.python_version(), "versions": versions, "dtype": "float32",
            "attention": "eager", "num_threads": torch.get_num_threads()}


def write(out: pathlib.Path, document: dict, arrays: dict[str, np.ndarray]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    (out / "golden.json").write_text(json.dumps({"made_by": made_by(), **document}, separators=(",", ":"), ensure_ascii=False) + "\n")
    if arrays:
        save_file({k: np.ascontiguousarray(v) for k, v in arrays.items()}, out / "golden.safetensors")
    size = sum(f.stat().st_size for f in out.glob("golden.*"))
    print(f"{out}: {len(arrays or [])} arrays, {size:,} bytes")


def rounded(value):
    """The same with eight digits of each number."""
    if isinstance(value, dict):
        return {key: rounded(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [rounded(inner) for inner in value]
    return float(f"{value:.8g}") if isinstance(value, float) else value


def make_model(args) -> None:
    """The golden files of one model."""
    folder, tokenizer = args.model, open_tokenizer(args.model)
    rows = token_rows(tokenizer, args.lengths, args.seed)
    batch = (rows, loss_masks(rows, args.seed))
    all_linear = {"r": args.r, "lora_alpha": 2 * args.r, "target_modules": "all-linear", "use_rslora": False}
    base = open_model(folder)
    is_fused = any(name.endswith(".qkv_proj") for name, _ in base.named_modules())
    has_experts = hasattr(base.config, "num_experts_per_tok")
    down = "w2" if base.config.model_type == "lfm2" else "down_proj"
    targets = [*(["qkv_proj"] if is_fused else ["q_proj", "v_proj"]), "o_proj" if has_experts else down]
    if any(name.endswith(".in_proj_qkv") for name, _ in base.named_modules()):
        targets += ["in_proj_qkv", "in_proj_a"]
    rslora = {"r": 4, "lora_alpha": 6, "target_modules": targets, "use_rslora": True}
    document = {
        "model": {"sha256": hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest(),
                  "num_parameters": base.num_parameters()},
        "batch": {"rows": batch[0], "loss_masks": batch[1]}, "cases": {},
    }
    arrays: dict[str, np.ndarray] = {}

    def add(name, lora, model, named, whole):
        figures, found = case(model, named, batch, whole)
        document["cases"][name] = {"lora": lora, "b_bound": B_BOUND if named else None, **figures}
        arrays.update({f"{name}.{k}": v for k, v in found.items()})

    if not args.small:
        add("base", None, base, {}, False)
    del base
    add("all_linear", all_linear, *with_adapter(folder, all_linear, B_BOUND), args.whole_gradients)
    if not args.small:
        add("rslora", rslora, *with_adapter(folder, rslora, B_BOUND), False)
    if args.greedy:
        document["greedy"] = greedy(with_adapter(folder, all_linear, B_BOUND)[0], rows[0][:GREEDY[0]])
    if args.curve:
        document["curve"] = curve(folder, tokenizer, all_linear, args.seed)
    if args.small:
        return write(args.out, rounded(document), arrays)
    document["tokenizer"] = [{"text": t, "ids": tokenizer.encode(t, add_special_tokens=False),
                              "ids_with_special_tokens": tokenizer.encode(t)} for t in texts()]
    if tokenizer.chat_template:
        document["chat"] = chats(tokenizer)
    write(args.out, document, arrays)


def name_alone(name: str) -> str:
    """The name that a tensor or module of a multimodal model has in its language model alone."""
    name = re.sub(r"language_model\.(model|lm_head)\.", r"\1.", name, count=1)
    return re.sub(r"model\.(language|text)_model\.", "model.", name, count=1).replace("gpt_neox.", "model.").replace("model.embeddings.", "model.embed_tokens.").replace("model.embed_in.", "model.embed_tokens.")


def stored(model_type: str, name: str, tensor: torch.Tensor):
    """The parts of a parameter that files have, with their names there: of experts in one tensor, each matrix."""
    if model_type in ("mixtral", "minimax_m2"):
        name = name.replace(".mlp.", ".block_sparse_moe.")
    name = name.replace(".gate.moe_statics.", ".moe_statics.").replace(".mlp.e_score_", ".mlp.gate.e_score_")
    if model_type in ("granitemoe", "granitemoeshared", "granitemoehybrid"):
        name = name.replace("router.weight", "router.layer.weight")
    if ".experts." not in name:
        return [(name, tensor)]
    experts, joined = name.rsplit(".", 1)
    parts = ["gate_proj", "up_proj"] if joined.startswith("gate_up_proj") else [joined] if joined == "up_proj" else ["down_proj"]
    if model_type == "gpt_oss":
        kind = "bias" if joined.endswith("_bias") else "weight"
        return [(f"{experts}.{index}.{part}.{kind}", expert[..., first::len(parts)].t()) for index, expert in enumerate(tensor)
                for first, part in enumerate(parts)]
    if model_type == "llama4":
        return [(f"{experts}.{index}.{part}.weight", matrix.t()) for index, expert in enumerate(tensor)
                for part, matrix in zip(parts, expert.chunk(len(parts), 1))]
    has_numbers = model_type in ("mixtral", "minimax_m2", "lfm2_moe")
    names = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"} if has_numbers else {}
    return [(f"{experts}.{index}.{names.get(part, part)}.weight", matrix) for index, expert in enumerate(tensor)
            for part, matrix in zip(parts, expert.chunk(len(parts)))]


def model_by_formula(config):
    """A model whose weights follow from the formula."""
    torch.manual_seed(0)
    model = auto_class(config).from_config(config, dtype=torch.float32)
    # Some have numbers in their files that are no parameters.
    scales = [(name, tensor) for name, tensor in model.named_buffers()
              if name.endswith(("layer_scalar", "e_score_correction_bias", "expert_bias"))]
    parts = [part for name, tensor in [*model.named_parameters(), *scales] for part in stored(config.model_type, name, tensor)]
    with torch.no_grad():
        for name, tensor in parts:
            name, less_one = name_alone(name), config.model_type in NORMS_LESS_ONE
            is_norm = name.endswith(("norm.weight", "norm_f.weight")) and not less_one or name.endswith(("linear_attn.norm.weight", "layer_scalar"))
            is_norm = is_norm or (config.model_type, name) == ("muse_glimmer", "model.norm.weight")
            centre = -3.0 if name.endswith(".A_log") else float(is_norm)
            if config.model_type.startswith(("gemma3n", "gemma4")) and name.endswith("q_norm.weight"):
                centre = 0.25  # nothing else makes its scores smaller
            bound = 0.3 if tensor.dim() == 1 else 1.7 * (tensor.numel() // tensor.shape[0]) ** -0.5
            tensor.copy_(torch.from_numpy(np.float32(centre) + formula(name, tuple(tensor.shape), bound)))
    return model


def make_family(args) -> None:
    """The golden files of a small model whose weights follow from the formula."""
    global NUM_COLUMNS, NUM_PROJECTIONS
    config = AutoConfig.from_pretrained(args.out)
    if args.small:
        args.lengths, NUM_COLUMNS, NUM_PROJECTIONS = SMALL_LENGTHS, NUM_SMALL_COLUMNS, NUM_SMALL_PROJECTIONS
    if {"linear_attention", "hybrid"} & set(getattr(config.get_text_config(), "layer_types", None) or []):
        args.lengths, NUM_COLUMNS = CHUNKED_LENGTHS, NUM_CHUNKED_COLUMNS
    with tempfile.TemporaryDirectory() as folder:
        args.model = pathlib.Path(folder)
        by_formula(config, args.out, args.model)
        make_model(args)


def by_formula(config, family: pathlib.Path, folder: pathlib.Path) -> None:
    """A small model in a folder, with the quickstart's tokenizer."""
    model_by_formula(config).save_pretrained(folder)
    shutil.copy(family / "config.json", folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(pathlib.Path("quickstart/model") / name, folder)


def make_bitsandbytes(args) -> None:
    """The golden files of a small model that bitsandbytes has quantised, and the model."""
    global NUM_COLUMNS
    NUM_COLUMNS = 24
    shape = json.loads((args.out / "shape.json").read_text())
    quantisation = BitsAndBytesConfig(**shape.pop("quantization_config"))
    with tempfile.TemporaryDirectory() as whole, tempfile.TemporaryDirectory() as folder:
        model_by_formula(AutoConfig.for_model(**shape)).save_pretrained(whole)
        model = AutoModelForCausalLM.from_pretrained(whole, quantization_config=quantisation, device_map="cpu",
                                                     dtype=torch.bfloat16)
        args.model = pathlib.Path(folder)
        model.save_pretrained(folder)
        for name in ("config.json", "model.safetensors"):
            shutil.copy(args.model / name, args.out)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(pathlib.Path("quickstart/model") / name, folder)
        make_model(args)


def make_rope(args) -> None:
    """Rotary tables, also at positions beyond 8192. cos and sin: [positions, head_dim / 2]; angles are f32 in transformers."""
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    positions = [0, 1, 17, 511, 4095, 8191, 8192, 8193, 12345, 20000, 65537, 131071]
    llama3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    kinds = {
        "default": (48, 10000.0, None, 4096),
        "linear": (64, 10000.0, {"rope_type": "linear", "factor": 4.0}, 131072),
        "llama_3_1_8b": (128, 500000.0, {**llama3, "factor": 8.0}, 131072),
        "llama_3_2_1b": (64, 500000.0, {**llama3, "factor": 32.0}, 131072),
        "yarn": (128, 1000000.0, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}, 131072),
        "yarn_mscale": (64, 150000.0, {"rope_type": "yarn", "factor": 32.0, "beta_fast": 16.0, "beta_slow": 2.0, "mscale": 1.0,
                                       "mscale_all_dim": 0.5, "truncate": False, "original_max_position_embeddings": 4096}, 131072),
        "dynamic": (64, 10000.0, {"rope_type": "dynamic", "factor": 2.0}, 8192),
        "dynamic_short": (64, 10000.0, {"rope_type": "dynamic", "factor": 2.0}, 131072),
    }
    document, arrays = {"positions": positions, "cases": {}}, {}
    for name, (head_dim, theta, scaling, longest) in kinds.items():
        parameters = {"rope_theta": theta, "rope_type": "default", **(scaling or {})}
        config = LlamaConfig(hidden_size=4 * head_dim, num_attention_heads=4, head_dim=head_dim, max_position_embeddings=longest,
                             rope_parameters=parameters)
        rope = LlamaRotaryEmbedding(config)
        cos, sin = rope(torch.zeros(1), torch.tensor([positions]))
        document["cases"][name] = {"head_dim": head_dim, "rope_theta": theta, "rope_scaling": scaling, "max_position_embeddings": longest}
        arrays |= {f"{name}.inv_freq": rope.inv_freq.numpy(), f"{name}.cos": cos[0, :, : head_dim // 2].numpy(),
                   f"{name}.sin": sin[0, :, : head_dim // 2].numpy()}
    write(args.out, document, arrays)


def make_quantised(args) -> None:
    import bitsandbytes.functional as bnb

    torch.manual_seed(7)
    weight = (torch.randn(70, 257) * 0.05).to(torch.bfloat16)
    weight[3, 5:140] = 0  # a whole block
    weight[9, 17] = 2.5
    weight[11] = 0  # a whole row
    tensors = {"weight": weight}
    for kind in ("nf4", "fp4"):
        codes, state = bnb.quantize_4bit(weight, blocksize=64, quant_type=kind)
        tensors |= {f"{kind}.codes": codes.flatten(), f"{kind}.absmax": state.absmax}
        _, state = bnb.quantize_4bit(weight, blocksize=64, quant_type=kind, compress_statistics=True)
        # Its CPU library takes a neighbour of the nearest code where the two are almost as near; its GPU kernel does not.
        outer, table = state.state2.absmax, state.state2.code
        absmax = (tensors[f"{kind}.absmax"] - state.offset) / outer.repeat_interleave(256)[: len(state.absmax)]
        state.absmax = torch.bucketize(absmax, (table[1:] + table[:-1]) / 2).to(torch.uint8)
        tensors |= {f"{kind}.nested_codes": state.absmax, f"{kind}.nested_absmax": outer}
        tensors |= {f"{kind}.offset": state.offset.reshape(1), "nested_table": table}
        state.dtype = torch.float32
        tensors[f"{kind}.decoded"] = bnb.dequantize_4bit(codes, state).flatten()[::37]
    codes, scb, _ = bnb.int8_vectorwise_quant(weight.to(torch.float16))
    tensors |= {"int8.codes": codes.flatten(), "int8.scb": scb}
    save_torch_file({name: tensor.clone().contiguous() for name, tensor in tensors.items()}, args.out)


def make_gguf(args) -> None:
    import gguf

    draw, tensors = np.random.default_rng(7), {}
    for kind, (_, num_bytes) in gguf.GGML_QUANT_SIZES.items():
        blocks = draw.integers(0, 256, (4096, num_bytes), np.uint8)
        try:
            numbers = gguf.quants.dequantize(blocks, kind)
        except NotImplementedError:
            continue
        # Any bytes are a block; the scales of some are no numbers.
        usable = np.isfinite(numbers).all(axis=1)
        if kind not in (gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.F16, gguf.GGMLQuantizationType.BF16):
            tensors |= {f"{kind.name}.blocks": blocks[usable][:3].flatten(), f"{kind.name}.numbers": numbers[usable][:3].flatten()}
    save_file(tensors, args.out)
def module_of(package: str, path: str):
    """A file of a package whose __init__ wants other versions of everything."""
    root = pathlib.Path(importlib.util.find_spec(package).submodule_search_locations[0])
    spec = importlib.util.spec_from_file_location(path.replace("/", "_"), root / f"{path}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def make_packed(args) -> None:
    gptq = module_of("auto_gptq", "nn_modules/qlinear/qlinear_cuda").QuantLinear
    awq = module_of("awq", "modules/linear/gemm")

    torch.manual_seed(8)
    out_features, in_features, group = 64, 96, 32
    linear = torch.nn.Linear(in_features, out_features, bias=False, dtype=torch.float16)
    tensors = {}

    def add(kind, packed, decoded):
        tensors.update({f"{kind}.{name}": tensor for name, tensor in packed.items() if name not in ("wf", "bias")})
        tensors[f"{kind}.decoded"] = decoded if decoded.dtype == torch.bfloat16 else decoded.half()

    def scales_and_zeros(bits, symmetric):
        most = 2**bits - 1
        groups = linear.weight.detach().float().reshape(out_features, -1, group)
        low, high = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
        if symmetric:
            high = torch.maximum(-low, high)
            return (2 * high / most).half(), torch.full_like(high, (most + 1) / 2)
        scales = (high - low) / most
        return scales.half(), torch.round(-low / scales)

    orders = {"": torch.arange(in_features) // group, "_ordered": torch.randperm(in_features) // group}
    for kind, bits, symmetric, order in [("gptq4", 4, True, ""), ("gptq4_zeros", 4, False, ""), ("gptq8", 8, False, ""),
                                         ("gptq4_ordered", 4, False, "_ordered")]:
        layer = gptq(bits, group, in_features, out_features, False, weight_dtype=torch.float16)
        layer.pack(linear, *scales_and_zeros(bits, symmetric), orders[order].to(torch.int32))
        add(kind, dict(layer.named_buffers()), layer(torch.eye(in_features, dtype=torch.float16)).t())
    scales, zeros = scales_and_zeros(4, False)
    layer = awq.WQLinear_GEMM.from_linear(linear, 4, group, scales=scales.t().contiguous(), zeros=zeros.t().contiguous())
    decoded = awq.dequantize_gemm(layer.qweight, layer.qzeros, layer.scales, 4, group).t()
    add("awq", dict(layer.named_buffers()), decoded)

    weight = linear.weight.detach().float()
    for kind, tile in [("fp8", (48, 32)), ("fp8_rows", (1, in_features)), ("fp8_all", (out_features, in_features))]:
        tiles = -(-out_features // tile[0]), -(-in_features // tile[1])
        spread = lambda x: x.repeat_interleave(tile[0], 0)[:out_features].repeat_interleave(tile[1], 1)[:, :in_features]
        padded = torch.nn.functional.pad(weight, (0, tiles[1] * tile[1] - in_features, 0, tiles[0] * tile[0] - out_features))
        scales = padded.reshape(tiles[0], tile[0], tiles[1], tile[1]).abs().amax((1, 3)) / 448
        codes = (weight / spread(scales)).to(torch.float8_e4m3fn)
        packed = {"weight": codes, "weight_scale": scales if kind != "fp8_all" else scales.reshape(())}
        add(kind, packed, codes.float() * spread(scales))
    codes = torch.arange(256, dtype=torch.uint8)
    tensors["fp8_numbers"] = codes.view(torch.float8_e4m3fn).float().nan_to_num(0.0)

    from compressed_tensors.compressors import BaseCompressor, mx_utils
    from compressed_tensors.quantization import preset_name_to_scheme
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    tensors["mxfp4_scales"] = mx_utils.decompress_mx_scale(codes).float()
    for kind, preset, form, changes in [
        ("mxfp4", "MXFP4A16", "mxfp4-pack-quantized", {}), ("nvfp4", "NVFP4A16", "nvfp4-pack-quantized", {}),
        ("int4", "W4A16", "pack-quantized", {"group_size": group}),
        ("int4_zeros", "W4A16_ASYM", "pack-quantized", {"group_size": group}),
        ("int8_rows", "W8A16", "pack-quantized", {"group_size": None, "strategy": "channel"}),
    ]:
        scheme = preset_name_to_scheme(preset, ["Linear"])
        scheme.weights = scheme.weights.model_copy(update=changes)
        packer = BaseCompressor.get_value_from_registry(form)
        groups = linear.weight.detach().bfloat16().reshape(out_features, -1, scheme.weights.group_size or in_features)
        whole = generate_gparam(groups.amin(), groups.amax()) if kind == "nvfp4" else None
        scales, zeros = calculate_qparams(groups.amin(2), groups.amax(2), scheme.weights, whole)
        packed = {"weight": groups.reshape(weight.shape), "weight_scale": scales, "weight_zero_point": zeros}
        packed = packer.compress(packed | ({} if whole is None else {"weight_global_scale": whole}), scheme)
        add(kind, packed, packer.decompress(packed, scheme)["weight"])
    save_torch_file({name: tensor.clone().contiguous() for name, tensor in tensors.items()}, args.out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    kinds = parser.add_subparsers(required=True)
    model = kinds.add_parser("model", help="the golden files of one model")
    model.add_argument("model", type=pathlib.Path)
    model.add_argument("out", type=pathlib.Path)
    model.add_argument("--r", type=int, default=8)
    model.add_argument("--whole-gradients", action="store_true")
    model.add_argument("--curve", action="store_true")
    model.add_argument("--seed", type=int, default=21)
    model.set_defaults(make=make_model, greedy=False, small=False, lengths=CASE_LENGTHS)
    family = kinds.add_parser("family", help="the golden files of a small model of a family")
    family.add_argument("out", type=pathlib.Path)
    family.add_argument("--small", action="store_true")
    family.set_defaults(make=make_family, lengths=CASE_LENGTHS, greedy=True, r=4, whole_gradients=False, curve=True, seed=31)
    optimizers = kinds.add_parser("optimizers", help="the curve by other optimizers")
    optimizers.add_argument("model", type=pathlib.Path)
    optimizers.add_argument("out", type=pathlib.Path)
    optimizers.set_defaults(make=make_optimizers, seed=21)
    starts = kinds.add_parser("starts", help="starts that take a part out of the base")
    starts.add_argument("model", type=pathlib.Path)
    starts.add_argument("out", type=pathlib.Path)
    starts.set_defaults(make=make_starts, seed=21)
    eva = kinds.add_parser("eva", help="the start from the rows")
    eva.add_argument("model", type=pathlib.Path)
    eva.add_argument("out", type=pathlib.Path)
    eva.set_defaults(make=make_eva, seed=21)
    for kind, make, what in (("tokens", make_tokens, "rows of the embedding"), ("modules", make_modules, "modules trained as a whole")):
        tokens = kinds.add_parser(kind, help=f"adapters with {what}")
        tokens.add_argument("model", type=pathlib.Path)
        tokens.add_argument("out", type=pathlib.Path)
        tokens.add_argument("--family", type=pathlib.Path, help="a folder with the config of a model by formula, in place of the model")
        tokens.set_defaults(make=make, seed=23)
    dora = kinds.add_parser("dora", help="weight-decomposed adapters")
    dora.add_argument("model", type=pathlib.Path)
    dora.add_argument("out", type=pathlib.Path)
    dora.set_defaults(make=make_dora, seed=21)
    combinations = kinds.add_parser("combinations", help="several adapters as one")
    combinations.add_argument("model", type=pathlib.Path)
    combinations.add_argument("out", type=pathlib.Path)
    combinations.set_defaults(make=make_combinations)
    rope = kinds.add_parser("rope", help="rotary tables")
    rope.add_argument("out", type=pathlib.Path)
    rope.set_defaults(make=make_rope)
    quantised = kinds.add_parser("bitsandbytes", help="the golden files of a small model that bitsandbytes has quantised")
    quantised.add_argument("out", type=pathlib.Path)
    quantised.set_defaults(make=make_bitsandbytes, small=False, lengths=CASE_LENGTHS, greedy=False, r=4, whole_gradients=False, curve=False, seed=31)
    quantised = kinds.add_parser("quantised", help="what bitsandbytes makes of a matrix")
    quantised.add_argument("out", type=pathlib.Path)
    quantised.set_defaults(make=make_quantised)
    blocks = kinds.add_parser("gguf", help="what gguf-py makes of blocks")
    blocks.add_argument("out", type=pathlib.Path)
    blocks.set_defaults(make=make_gguf)
    packed = kinds.add_parser("packed", help="a matrix as AutoGPTQ, AutoAWQ and compressed-tensors pack it")
    packed.add_argument("out", type=pathlib.Path)
    packed.set_defaults(make=make_packed)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    args.make(args)


if __name__ == "__main__":
    main()
