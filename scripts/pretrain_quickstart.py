#!/usr/bin/env python3
"""Make the quickstart: tokenizer, pretrained base model, fine-tuning rows.

usage: pretrain_quickstart.py [--out quickstart] [--steps 4000] [--threads 2] [--only data]

Writes OUT/model/ (a Hugging Face folder: config.json, generation_config.json, tokenizer.json, tokenizer_config.json,
model.safetensors in bf16), OUT/train.jsonl and OUT/eval.jsonl. All text comes from quickstart_text.py. About fifteen
minutes on two CPU cores with bf16 instructions; `--only data` writes the rows alone, in a second.

Needs torch, transformers, tokenizers and safetensors (scripts/setup_python.sh).
"""

import argparse
import json
import math
import pathlib
import time

from quickstart_text import END_OF_TEXT, IM_END, IM_START, World

VOCAB_SIZE = 2048
NUM_TOKENIZER_DOCUMENTS = 20_000
SHORT, LONG = 256, 512
TOKENS_PER_STEP = 2048
LONG_FROM = 0.9  # the last tenth of the steps sees rows of LONG tokens
LEARNING_RATE, MIN_LR_RATIO, WARMUP_STEPS, WEIGHT_DECAY = 2.5e-3, 0.05, 100, 0.1
TOKENIZER_SEED, PRETRAIN_SEED, HELD_OUT_SEED, ROWS_SEED = 1, 2, 3, 4
NUM_TRAIN_ROWS, NUM_EVAL_ROWS = 600, 48

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": None,
    "eos_token_id": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "hidden_size": 192,
    "initializer_range": 0.02,
    "intermediate_size": 512,
    "max_position_embeddings": 512,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 6,
    "num_hidden_layers": 6,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": VOCAB_SIZE,
}
GENERATION_CONFIG = {"do_sample": False, "eos_token_id": [2, 0], "pad_token_id": 0, "max_new_tokens": 48}
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TOKENIZER_CONFIG = {
    "add_bos_token": False,
    "add_prefix_space": False,
    "bos_token": None,
    "chat_template": CHAT_TEMPLATE,
    "clean_up_tokenization_spaces": False,
    "eos_token": IM_END,
    "model_max_length": LONG,
    "pad_token": END_OF_TEXT,
    "tokenizer_class": "PreTrainedTokenizerFast",
    "unk_token": None,
}


def write_json(path: pathlib.Path, value) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def train_tokenizer(out: pathlib.Path):
    """A byte-level BPE of VOCAB_SIZE entries; the three signs of the chat come first."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    world = World(TOKENIZER_SEED)
    documents = [world.document() for _ in range(NUM_TOKENIZER_DOCUMENTS)]
    documents += [m["content"] for _ in range(NUM_TOKENIZER_DOCUMENTS // 10) for m in world.extraction()["messages"]]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(documents, trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE, special_tokens=[END_OF_TEXT, IM_START, IM_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise SystemExit(f"the tokenizer has {tokenizer.get_vocab_size()} entries, expected {VOCAB_SIZE}")
    tokenizer.save(str(out / "tokenizer.json"))
    write_json(out / "tokenizer_config.json", TOKENIZER_CONFIG)
    return tokenizer


def rows_of(world: World, tokenizer, length: int):
    """Endless rows of `length` tokens: whole documents one after the other, the last one cut."""
    while True:
        row: list[int] = []
        while len(row) < length:
            row += tokenizer.encode(world.document(), add_special_tokens=False).ids
        yield row[:length]


def learning_rate(step: int, steps: int) -> float:
    """Linear warm-up, then a cosine down to MIN_LR_RATIO."""
    if step < WARMUP_STEPS:
        return LEARNING_RATE * (step + 1) / WARMUP_STEPS
    done = (step - WARMUP_STEPS) / max(1, steps - WARMUP_STEPS)
    return LEARNING_RATE * (MIN_LR_RATIO + (1 - MIN_LR_RATIO) * 0.5 * (1 + math.cos(math.pi * done)))


def pretrain(out: pathlib.Path, tokenizer, steps: int, threads: int) -> None:
    """Train the base model from scratch and write it in bf16."""
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.set_num_threads(threads)
    torch.manual_seed(PRETRAIN_SEED)
    model = LlamaForCausalLM(LlamaConfig(**{k: v for k, v in CONFIG.items() if k not in ("architectures", "torch_dtype")}))
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    gains = [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW([{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": gains, "weight_decay": 0.0}],
                                  lr=LEARNING_RATE, betas=(0.9, 0.95))
    world = World(PRETRAIN_SEED)
    sources = {length: rows_of(world, tokenizer, length) for length in (SHORT, LONG)}
    held_out = rows_of(World(HELD_OUT_SEED), tokenizer, SHORT)
    held_out = torch.tensor([next(held_out) for _ in range(32)])

    def save() -> None:
        state = {k: v.detach().to(torch.bfloat16).contiguous() for k, v in model.state_dict().items() if k != "lm_head.weight"}
        save_file(state, out / "model.safetensors", metadata={"format": "pt"})

    started = time.monotonic()
    for step in range(steps):
        length = LONG if step >= LONG_FROM * steps else SHORT
        batch = torch.tensor([next(sources[length]) for _ in range(TOKENS_PER_STEP // length)])
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps)
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % 100 == 0 or step + 1 == steps:
            with torch.no_grad():
                held = model(held_out, labels=held_out).loss.item()
            print(f"step {step + 1}/{steps}  loss {loss.item():.4f}  held-out {held:.4f}  {time.monotonic() - started:.0f} s", flush=True)
            save()
    write_json(out / "config.json", CONFIG)
    write_json(out / "generation_config.json", GENERATION_CONFIG)


def write_rows(out: pathlib.Path) -> None:
    """The fine-tuning rows; no story of the evaluation set is in the training set."""
    world, seen = World(ROWS_SEED), set()
    for name, count in (("train.jsonl", NUM_TRAIN_ROWS), ("eval.jsonl", NUM_EVAL_ROWS)):
        with open(out / name, "w") as file:
            while count:
                row = world.extraction()
                if (story := row["messages"][0]["content"]) not in seen:
                    seen.add(story)
                    file.write(json.dumps(row) + "\n")
                    count -= 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("quickstart"))
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", choices=["data"])
    args = parser.parse_args()
    (args.out / "model").mkdir(parents=True, exist_ok=True)
    write_rows(args.out)
    if args.only != "data":
        tokenizer = train_tokenizer(args.out / "model")
        write_json(args.out / "model" / "config.json", CONFIG)
        pretrain(args.out / "model", tokenizer, args.steps, args.threads)


if __name__ == "__main__":
    main()
