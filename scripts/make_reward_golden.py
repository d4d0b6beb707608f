#!/usr/bin/env python3
"""Golden file of scores: what TRL's reward trainer makes of the same pairs, in f32 on the CPU.

usage: make_reward_golden.py MODEL_DIR OUT_DIR     (pip install trl==1.16.0)

Writes OUT_DIR/golden.json: pairs of text and their token ids, for every case one micro-batch of four pairs with the loss, TRL's figures
and the norm of every trained tensor's gradient, and a curve of 20 steps from B = 0 (AdamW, clipping, cosine with warm-up). Adapters and
the head follow from the formula of make_golden.py and their names.
"""
import argparse
import json
import pathlib
import tempfile

from make_preference_golden import B_BOUND, D, LORA, MAX_LENGTH, PAIRS, SETTINGS, rows

import torch
import trl
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForSequenceClassification, AutoTokenizer, get_cosine_schedule_with_warmup

from make_golden import formula, made_by

CASES = {"plain": {}, "centered": {"center_rewards_coefficient": 0.01}, "margins": {"center_rewards_coefficient": 0.01}}
MARGINS = [0.5, 0.0, -0.25, 2.0, 1.0, 0.125, 0.75, 3.0]  # of the rows of "margins"
LEARNING_RATE = 1e-3


def trainer(folder: pathlib.Path, options: dict, b_bound: float, directory: str, margins: list[float] | None = None):
    """TRL's trainer with the numbers of the formula, and what it trains by PEFT's keys."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1, dtype=torch.float32)
    model.config.pad_token_id = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    config = trl.RewardConfig(output_dir=directory, per_device_train_batch_size=SETTINGS["micro_batch_size"], max_length=MAX_LENGTH,
                              report_to="none", bf16=False, use_cpu=True, gradient_checkpointing=False, seed=0, **options)
    lora = LoraConfig(task_type="SEQ_CLS", lora_dropout=0.0, modules_to_save=["score"], **LORA)
    pairs = rows(D) if margins is None else [row | {"margin": margin} for row, margin in zip(rows(D), margins)]
    made = trl.RewardTrainer(model=model, args=config, train_dataset=Dataset.from_list(pairs), processing_class=tokenizer,
                             peft_config=lora)
    named = {name.replace("modules_to_save.", "").replace(".default.weight", ".weight"): p
             for name, p in made.model.named_parameters() if p.requires_grad}
    with torch.no_grad():
        for name, tensor in named.items():
            bound = tensor.shape[1] ** -0.5 if ".lora_A." in name else b_bound if ".lora_B." in name else B_BOUND
            tensor.copy_(torch.from_numpy(formula(name, tuple(tensor.shape), bound)))
    made.model.train()
    return made, named


def batch_of(made, first: int):
    size = SETTINGS["micro_batch_size"]
    return made._prepare_inputs(made.data_collator([made.train_dataset[(first + i) % len(PAIRS)] for i in range(size)]))


def figures(made) -> dict:
    logged = made._metrics["train"]
    return {"rewards/accuracies": logged["accuracy"][-1], "rewards/margins": logged["margin"][-1]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", type=pathlib.Path)
    parser.add_argument("out", type=pathlib.Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    cases = {}
    for name, options in CASES.items():
        with tempfile.TemporaryDirectory() as directory:
            made, named = trainer(args.model, options, B_BOUND, directory, MARGINS if name == "margins" else None)
            batch = batch_of(made, 0)
            loss = made.compute_loss(made.model, batch)
            loss.backward()
        norms = {key: p.grad.double().norm().item() for key, p in named.items()}
        cases[name] = {"kind": "reward", "options": options, "loss": loss.item(), "figures": figures(made),
                       "mean": made._metrics["train"]["mean_reward"][-1], "gradient_norms": norms,
                       "grad_norm": sum(norm**2 for norm in norms.values()) ** 0.5}
        print(name, loss.item())
    ids, attend = batch["input_ids"], batch["attention_mask"].bool()
    tokens = [sequence[a].tolist() for sequence, a in zip(ids, attend)]
    with tempfile.TemporaryDirectory() as directory:
        made, named = trainer(args.model, {}, 0.0, directory)
        optimizer = torch.optim.AdamW(named.values(), lr=LEARNING_RATE, betas=tuple(SETTINGS["betas"]), eps=SETTINGS["eps"],
                                      weight_decay=SETTINGS["weight_decay"])
        schedule = get_cosine_schedule_with_warmup(optimizer, SETTINGS["warmup_steps"], SETTINGS["steps"])
        steps = []
        for step in range(SETTINGS["steps"]):
            loss = made.compute_loss(made.model, batch_of(made, step * SETTINGS["micro_batch_size"]))
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(named.values(), SETTINGS["max_grad_norm"]).item()
            steps.append({"loss": loss.item(), "grad_norm": norm, "figures": figures(made)})
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
    print([round(step["loss"], 4) for step in steps])
    by = made_by()
    by["versions"]["trl"] = trl.__version__
    document = {"made_by": by, "lora": LORA, "b_bound": B_BOUND, "score_bound": B_BOUND, "max_length": MAX_LENGTH, "reward": rows(D), "margins": MARGINS, "tokens": tokens, "cases": cases,
                "settings": {**SETTINGS, "learning_rate": LEARNING_RATE}, "curves": {"reward": {"kind": "reward", "options": {}, "steps": steps}}}
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "golden.json").write_text(json.dumps(document, separators=(",", ":"), ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
