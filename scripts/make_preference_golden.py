#!/usr/bin/env python3
"""Golden file of preferences: what TRL's own trainers make of the same rows, in f32 on the CPU.

usage: make_preference_golden.py MODEL_DIR OUT_DIR [--curves-only] [--learning-rate 1e-3]     (pip install trl==1.16.0)

Writes OUT_DIR/golden.json: rows of text, their token ids and masks as TRL has them, for every case one micro-batch of four rows with
the loss, TRL's figures and the norm of every adapter tensor's gradient; and for each objective the losses of 20 steps from B = 0 (AdamW,
clipping, cosine with warm-up). Adapters follow from the formula of make_golden.py and their names.
"""
import argparse
import json
import os
import pathlib
import tempfile

os.environ.update(CUDA_VISIBLE_DEVICES="", HF_HUB_OFFLINE="1", TRL_EXPERIMENTAL_SILENCE="1", TQDM_DISABLE="1")

import torch
import trl
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoTokenizer, get_cosine_schedule_with_warmup
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

from make_golden import formula, made_by, open_model

LORA = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"], "use_rslora": False}
SETTINGS = {"steps": 20, "micro_batch_size": 4, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0, "max_grad_norm": 1.0,
            "warmup_steps": 4}
B_BOUND = 0.05
MAX_LENGTH = 96

PAIRS = [
    ("Name a color.\n", "Blue.", "I do not know what you mean by that."),
    ("2 + 2 = ", "4", "five, or six on a good day"),
    ("Write one line about the sea. ", "The sea is wide and keeps its own time.", "No."),
    ("Say good night.\n", "Good night, sleep well.", "Good morning."),
    ("Is ice cold? ", "Yes, it is frozen water.", "Ice is a kind of bird that lives in the north."),
    ("Tom has a dog. What does Tom have? ", "A dog.", "A cat."),
    ("Count to three: ", "one, two, three", "three, nine"),
    ("Why do we sleep?\n", "To rest.", "Because the moon is made of cheese and cheese makes people tired."),
]
D, O, C, K = "dpo", "orpo", "cpo", "kto"
CASES = {f"dpo {name}": (D, {"loss_type": name}) for name in (
    "sigmoid", "hinge", "ipo", "nca_pair", "bco_pair", "sppo_hard", "aot", "aot_unpaired", "apo_zero", "apo_down", "discopop",
    "sft", "sigmoid_norm")}
CASES |= {
    "dpo exo_pair": (D, {"loss_type": "exo_pair", "label_smoothing": 1e-3}),
    "dpo robust": (D, {"loss_type": "robust", "label_smoothing": 0.1}),
    "dpo aot smoothed": (D, {"loss_type": "aot", "label_smoothing": 0.1}),
    "dpo sigmoid and sft": (D, {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5]}),
    "dpo mpo": (D, {"loss_type": ["sigmoid", "bco_pair", "sft"], "loss_weights": [0.8, 0.2, 1.0], "beta": 0.3}),
    "dpo forward_kl": (D, {"f_divergence_type": "forward_kl"}),
    "dpo js": (D, {"f_divergence_type": "js_divergence"}),
    "dpo alpha": (D, {"f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": 0.3}),
    "dpo ld": (D, {"ld_alpha": 0.5}),
    "dpo weighted": (D, {"use_weighting": True}),
    "orpo": (O, {}),
    "cpo": (C, {}),
    "cpo hinge": (C, {"loss_type": "hinge"}),
    "cpo ipo": (C, {"loss_type": "ipo", "cpo_alpha": 0.0}),
    "cpo smoothed": (C, {"label_smoothing": 0.1, "cpo_alpha": 0.5}),
    "simpo": (C, {"loss_type": "simpo", "cpo_alpha": 0.0, "beta": 2.0, "simpo_gamma": 1.0}),
    "alphapo": (C, {"loss_type": "simpo", "cpo_alpha": 0.0, "beta": 2.0, "simpo_gamma": 0.5, "alpha": 0.25}),
    "kto": (K, {"desirable_weight": 1.0, "undesirable_weight": 1.5}),
    "kto apo": (K, {"loss_type": "apo_zero_unpaired"}),
}
REWARDED = {f"{loss} {beta}": {"loss_type": loss, "beta": beta} for loss in ("dapo", "grpo", "bnpo", "dr_grpo") for beta in (0.0, 0.1)}
SEQUENCE = {"importance_sampling_level": "sequence"}
AGAIN = {
    "clipped": {},
    "clipped grpo": {"loss_type": "grpo", "beta": 0.1, "epsilon": 0.1, "epsilon_high": 0.28},
    "clipped on two sides": {"delta": 1.5},
    "clipped at a temperature": {"temperature": 0.7, "beta": 0.1},
    "sequence": {**SEQUENCE, "loss_type": "grpo", "beta": 0.1},
    "sequence clipped on two sides": {**SEQUENCE, "delta": 1.5},
    "luspo": {**SEQUENCE, "loss_type": "luspo"},
    "cispo": {"loss_type": "cispo", "epsilon_high": 1.3, "beta": 0.1},
    "cispo at a temperature": {"loss_type": "cispo", "epsilon_high": 1.3, "temperature": 0.7},
    "sapo": {"loss_type": "sapo"},
    "sapo sequence": {**SEQUENCE, "loss_type": "sapo", "sapo_temperature_pos": 2.0},
    "vespo": {"loss_type": "vespo", "beta": 0.1},
    "vespo of other weights": {"loss_type": "vespo", "vespo_k_pos": 1.0, "vespo_lambda_pos": 0.5, "vespo_k_neg": 0.2,
                               "vespo_lambda_neg": 0.01},
    "worse answers left": {"off_policy_mask_threshold": 0.2, "beta": 0.1},
    "least sure tokens of a sequence": {**SEQUENCE, "top_entropy_quantile": 0.4, "loss_type": "luspo", "beta": 0.1},
    "least sure tokens of cispo": {**SEQUENCE, "top_entropy_quantile": 0.4, "loss_type": "cispo", "epsilon_high": 1.3},
}
REWARDED |= {
    "temperature": {"temperature": 0.7, "beta": 0.1},
    "temperature above 1": {"temperature": 1.5},
    "least sure tokens": {"top_entropy_quantile": 0.4, "beta": 0.1},
    "least sure tokens at a temperature": {"top_entropy_quantile": 0.2, "temperature": 0.7, "loss_type": "grpo"},
    **{name: {"num_iterations": 2, **options} for name, options in AGAIN.items()},
}
ADVANTAGES = [1.0, -0.5, 0.25, -0.75]
LOG_RATIOS = [0.3, -0.35, 0.05, 0.6]  # by how much each answer has become likelier since it was written, a token of it in the mean
CURVES = {"dpo": (D, {}), "orpo": (O, {}), "simpo": CASES["simpo"], "kto": (K, {})}
FIGURES = ("rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins", "logps/chosen", "logps/rejected", "nll_loss",
           "log_odds_ratio", "log_odds_chosen", "kl", "clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean",
           "cispo_clip_ratio")


def rows(kind: str) -> list[dict]:
    pairs = [{"prompt": p, "chosen": c, "rejected": r} for p, c, r in PAIRS]
    if kind in (O, C):
        # These trainers tokenise prompt and answer apart, which makes a difference where a space would join the answer.
        return [row | {"prompt": row["prompt"].strip() + "\n"} for row in pairs]
    if kind != K:
        return pairs
    return [{"prompt": row["prompt"], "completion": row["rejected" if i % 3 == 1 else "chosen"], "label": i % 3 != 1}
            for i, row in enumerate(pairs)]


def fill(model, b_bound: float) -> dict:
    """Gives the adapter the numbers of the formula; its tensors by PEFT's keys."""
    named = {name.replace(".default.weight", ".weight"): p for name, p in model.named_parameters() if p.requires_grad}
    with torch.no_grad():
        for name, tensor in named.items():
            bound = tensor.shape[1] ** -0.5 if ".lora_A." in name else b_bound
            tensor.copy_(torch.from_numpy(formula(name, tuple(tensor.shape), bound)))
    return named


def trainer(folder: pathlib.Path, kind: str, options: dict, b_bound: float, directory: str):
    """TRL's trainer with the adapter of the formula, and its adapter tensors by PEFT's keys."""
    config, trained = {D: (trl.DPOConfig, trl.DPOTrainer), O: (ORPOConfig, ORPOTrainer), C: (CPOConfig, CPOTrainer),
                       K: (trl.KTOConfig, trl.KTOTrainer)}[kind]
    common = {"output_dir": directory, "per_device_train_batch_size": SETTINGS["micro_batch_size"], "max_length": MAX_LENGTH,
              "report_to": "none", "bf16": False, "use_cpu": True, "gradient_checkpointing": False, "seed": 0}
    lora = LoraConfig(task_type="CAUSAL_LM", lora_dropout=0.0, **LORA)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if kind in (O, C):
        tokenizer.bos_token = None  # else these trainers put it before prompts where the tokenizer does not
    made = trained(model=open_model(folder), args=config(**common, **options), train_dataset=Dataset.from_list(rows(kind)),
                   processing_class=tokenizer, peft_config=lora)
    named = fill(made.model, b_bound)
    made.model.train()
    made.current_gradient_accumulation_steps = 1
    return made, named


def batch_of(made, first: int):
    size = SETTINGS["micro_batch_size"]
    return made._prepare_inputs(made.data_collator([made.train_dataset[(first + i) % len(PAIRS)] for i in range(size)]))


def figures(made, kind: str) -> dict:
    logged = made._metrics["train"] if kind in (D, K) else made._stored_metrics["train"]
    return {name: logged[name][-1] for name in FIGURES if name in logged}


def tokens(kind: str, batch) -> list[dict]:
    """Token ids of the sequences of a batch, and how many of them are the prompt's."""
    attend, mask = batch["attention_mask"].bool(), batch["completion_mask"].bool()
    sequences = [{"ids": ids[a].tolist(), "prompt": int((~m[a]).sum())} for ids, a, m in zip(batch["input_ids"], attend, mask)]
    return sequences


def rewarded(folder: pathlib.Path) -> dict:
    """GRPO's losses of four answers whose advantages are given."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = [(tokenizer.encode(p), tokenizer.encode(c) + [tokenizer.eos_token_id]) for p, c, _ in PAIRS[:4]]
    longest = [max(len(row[i]) for row in rows) for i in range(2)]
    prompt = torch.tensor([[0] * (longest[0] - len(p)) + p for p, _ in rows])
    prompt_mask = torch.tensor([[0] * (longest[0] - len(p)) + [1] * len(p) for p, _ in rows])
    answer = torch.tensor([c + [0] * (longest[1] - len(c)) for _, c in rows])
    answer_mask = torch.tensor([[1] * len(c) + [0] * (longest[1] - len(c)) for _, c in rows])
    found = {}
    for name, options in REWARDED.items():
        with tempfile.TemporaryDirectory() as directory:
            config = trl.GRPOConfig(output_dir=directory, per_device_train_batch_size=4, num_generations=2, max_completion_length=32,
                                    report_to="none", bf16=False, use_cpu=True, gradient_checkpointing=False, **options)
            made = trl.GRPOTrainer(model=open_model(folder), reward_funcs=lambda completions, **_: [0.0] * len(completions), args=config,
                                   train_dataset=Dataset.from_list([{"prompt": "a"}]), processing_class=tokenizer,
                                   peft_config=LoraConfig(task_type="CAUSAL_LM", lora_dropout=0.0, **LORA))
        named = fill(made.model, B_BOUND)
        made.model.train()
        made.current_gradient_accumulation_steps = 1
        inputs = {"prompt_ids": prompt, "prompt_mask": prompt_mask, "completion_ids": answer, "completion_mask": answer_mask,
                  "advantages": torch.tensor(ADVANTAGES), "num_items_in_batch": answer_mask.sum()}
        logps = lambda: made._get_per_token_logps_and_entropies(
            made.model, torch.cat([prompt, answer], 1), torch.cat([prompt_mask, answer_mask], 1), longest[1])[0]
        written = []
        with torch.no_grad():
            if options.get("beta"):
                with made.model.disable_adapter():
                    inputs["ref_per_token_logps"] = logps()
            if name in AGAIN:
                wave = torch.sin(1.7 * torch.arange(longest[1]) + torch.arange(len(rows))[:, None])
                old = logps() - torch.tensor(LOG_RATIOS)[:, None] - 0.3 * wave
                inputs["old_per_token_logps"] = old
                written = [old[i, :len(c)].tolist() for i, (_, c) in enumerate(rows)]
        loss = made._compute_loss(made.model, inputs)
        loss.backward()
        norms = {key: p.grad.double().norm().item() for key, p in named.items()}
        found[name] = {"options": options, "written": written, "loss": loss.item(), "figures": figures(made, D), "gradient_norms": norms,
                       "grad_norm": sum(norm**2 for norm in norms.values()) ** 0.5}
        print("grpo", name, loss.item())
    return {"rows": [{"prompt": p, "answer": c} for p, c in rows], "advantages": ADVANTAGES, "cases": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", type=pathlib.Path)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--curves-only", action="store_true")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    cases, encoded = {}, {}
    for name, (kind, options) in {} if args.curves_only else CASES.items():
        with tempfile.TemporaryDirectory() as directory:
            made, named = trainer(args.model, kind, options, B_BOUND, directory)
            batch = batch_of(made, 0)
            loss = made.compute_loss(made.model, batch)
            loss.backward()
        norms = {key: p.grad.double().norm().item() for key, p in named.items() if p.grad is not None}
        cases[name] = {"kind": kind, "options": options, "loss": loss.item(), "figures": figures(made, kind), "gradient_norms": norms,
                       "grad_norm": sum(norm**2 for norm in norms.values()) ** 0.5}
        if kind in (D, K):
            encoded[kind] = tokens(kind, batch)
        print(name, loss.item())
    curves = {}
    for name, (kind, options) in CURVES.items():
        with tempfile.TemporaryDirectory() as directory:
            made, named = trainer(args.model, kind, options, 0.0, directory)
            optimizer = torch.optim.AdamW(named.values(), lr=args.learning_rate, betas=tuple(SETTINGS["betas"]), eps=SETTINGS["eps"],
                                          weight_decay=SETTINGS["weight_decay"])
            schedule = get_cosine_schedule_with_warmup(optimizer, SETTINGS["warmup_steps"], SETTINGS["steps"])
            done = []
            for step in range(SETTINGS["steps"]):
                loss = made.compute_loss(made.model, batch_of(made, step * SETTINGS["micro_batch_size"]))
                loss.backward()
                norm = torch.nn.utils.clip_grad_norm_(named.values(), SETTINGS["max_grad_norm"]).item()
                done.append({"loss": loss.item(), "grad_norm": norm, "figures": figures(made, kind)})
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
        curves[name] = {"kind": kind, "options": options, "steps": done}
        print(name, [round(step["loss"], 4) for step in done])
    by = made_by()
    by["versions"]["trl"] = trl.__version__
    document = {"made_by": by, "lora": LORA, "b_bound": B_BOUND, "max_length": MAX_LENGTH,
                "settings": {**SETTINGS, "learning_rate": args.learning_rate}, "dpo": rows(D), "orpo": rows(O), "cpo": rows(C), "kto": rows(K), "tokens": encoded,
                "cases": cases, "curves": curves, "rewarded": {} if args.curves_only else rewarded(args.model)}
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "golden.json").write_text(json.dumps(document, separators=(",", ":"), ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
