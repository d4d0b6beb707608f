#!/usr/bin/env python3
"""Make the quickstart: tokenizer, pretrained base model, fine-tuning rows.

usage: pretrain_quickstart.py [--out quickstart] [--steps 1500] [--focus-steps 1200] [--threads 2] [--only data]

Writes OUT/model/ (a Hugging Face folder: config.json, generation_config.json, tokenizer.json, tokenizer_config.json,
model.safetensors in bf16), OUT/train.jsonl and OUT/eval.jsonl. All text comes from quickstart_text.py. About fifteen
minutes on two CPU cores with bf16 instructions; `--only data` writes the rows alone, in a second.

Pretraining has two stages: stories and chats of all kinds, then short stories and questions about them, with most of the
loss on the answers. In the second stage the model learns to copy names, animals and places from its prompt.

Needs torch, transformers, tokenizers and safetensors (scripts/setup_python.sh).
"""

import argparse
import json
import math
import pathlib
import time

from quickstart_text import END_OF_TEXT, IM_END, IM_START, World, words

VOCAB_SIZE = 1344
NUM_TOKENIZER_DOCUMENTS = 20_000
MAX_LENGTH = 512
TOKENS_PER_STEP = 2048
ANSWER_WEIGHT = 3.0
IM_END_ID = 2
MUON_LEARNING_RATE, ADAMW_LEARNING_RATE, MIN_LR_RATIO, WARMUP_STEPS = 0.02, 3e-3, 0.02, 30
TOKENIZER_SEED, PRETRAIN_SEED, HELD_OUT_SEED, ROWS_SEED = 1, 2, 3, 4
NUM_TRAIN_ROWS, NUM_EVAL_ROWS = 600, 48
FOCUS_SEED, FOCUS_ROWS, FOCUS_LEARNING_RATE, FOCUS_WARMUP_STEPS, FOCUS_PROMPT_WEIGHT = 12, 64, 2e-3, 50, 0.15

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": None,
    "eos_token_id": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "hidden_size": 128,
    "initializer_range": 0.02,
    "intermediate_size": 512,
    "max_position_embeddings": MAX_LENGTH,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
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
    "model_max_length": MAX_LENGTH,
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
    # Every word of the world becomes one token, after a space and after a quotation mark.
    documents += [f'{word} "{word}"' for word in words() for _ in range(200)]
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


def answer_weights(ids: list[int], assistant: list[int]) -> list[float]:
    """ANSWER_WEIGHT for the tokens of an assistant's turn, because answers must copy words; 1 for others."""
    weights, inside = [], False
    for at, token in enumerate(ids):
        if ids[at - len(assistant):at] == assistant:
            inside = True
        weights.append(ANSWER_WEIGHT if inside else 1.0)
        inside = inside and token != IM_END_ID
    return weights


def batches_of(world: World, tokenizer):
    """Endless batches of about TOKENS_PER_STEP tokens: documents of like length, each in a row of its own.

    Rows of several documents would be fuller. But then most words to copy are in the wrong document, and the model takes
    many times longer to learn to copy from its prompt. Yields ids, and the weight of each in the loss (0 on padding).
    """
    import torch

    assistant = tokenizer.encode(IM_START + "assistant\n", add_special_tokens=False).ids
    while True:
        documents = sorted((tokenizer.encode(world.document(), add_special_tokens=False).ids[:MAX_LENGTH] for _ in range(400)), key=len)
        groups: list[list[list[int]]] = [[]]
        for document in documents:
            if (len(groups[-1]) + 1) * len(document) > TOKENS_PER_STEP:
                groups.append([])
            groups[-1].append(document)
        world.random.shuffle(groups)
        for group in groups:
            ids = torch.zeros(len(group), max(map(len, group)), dtype=torch.long)
            weights = torch.zeros(ids.shape)
            for row, document in enumerate(group):
                ids[row, : len(document)] = torch.tensor(document)
                weights[row, : len(document)] = torch.tensor(answer_weights(document, assistant))
            yield ids, weights


def weighted_loss(model, ids, weights):
    """Weighted mean of the cross-entropy of each token given those before it."""
    import torch

    losses = torch.nn.functional.cross_entropy(model(ids).logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none")
    return (losses * weights[:, 1:]).sum() / weights[:, 1:].sum()


def learning_rate_factor(step: int, steps: int) -> float:
    """Linear warm-up, a plateau, and a straight line down to MIN_LR_RATIO over the last two fifths."""
    if step < WARMUP_STEPS:
        return (step + 1) / WARMUP_STEPS
    left = (steps - step) / (0.4 * steps)
    return min(1.0, MIN_LR_RATIO + (1 - MIN_LR_RATIO) * left)


def pretrain(out: pathlib.Path, tokenizer, steps: int, threads: int) -> None:
    """Train the base model from scratch and write it in bf16: Muon for the matrices, AdamW for embeddings and gains."""
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.set_num_threads(threads)
    torch.manual_seed(PRETRAIN_SEED)
    model = LlamaForCausalLM(LlamaConfig(**{k: v for k, v in CONFIG.items() if k not in ("architectures", "torch_dtype")}))
    matrices = [p for name, p in model.named_parameters() if p.dim() == 2 and "embed_tokens" not in name]
    others = [p for name, p in model.named_parameters() if p.dim() != 2 or "embed_tokens" in name]
    optimizers = [torch.optim.Muon(matrices, lr=MUON_LEARNING_RATE, momentum=0.95, weight_decay=0.01),
                  torch.optim.AdamW(others, lr=ADAMW_LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0)]
    peaks = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]
    source, held_out = (batches_of(World(seed), tokenizer) for seed in (PRETRAIN_SEED, HELD_OUT_SEED))
    held_out = [next(held_out) for _ in range(8)]

    started, processor = time.monotonic(), time.process_time()
    for step in range(steps):
        for optimizer, peak in zip(optimizers, peaks):
            optimizer.param_groups[0]["lr"] = peak * learning_rate_factor(step, steps)
        ids, weights = next(source)
        with torch.autocast("cpu", torch.bfloat16):
            loss = weighted_loss(model, ids, weights)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if (step + 1) % 50 == 0 or step + 1 == steps:
            with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
                held = sum(weighted_loss(model, ids, weights).item() for ids, weights in held_out) / len(held_out)
            print(f"step {step + 1}/{steps}  loss {loss.item():.4f}  held-out {held:.4f}  {time.monotonic() - started:.0f} s"
                  f"  ({time.process_time() - processor:.0f} s of processor time)", flush=True)
            state = {k: v.detach().to(torch.bfloat16).contiguous() for k, v in model.state_dict().items() if k != "lm_head.weight"}
            save_file(state, out / "model.safetensors", metadata={"format": "pt"})


def focus_batch(world: World, tokenizer):
    """FOCUS_ROWS chats of one turn, each in a row of its own: ids, and the weight of each one in the loss."""
    import torch

    rows = []
    for user, assistant in (world.focus() for _ in range(FOCUS_ROWS)):
        prompt = tokenizer.encode(f"{IM_START}user\n{user}{IM_END}\n{IM_START}assistant\n").ids
        rows.append((prompt, tokenizer.encode(f"{assistant}{IM_END}\n{END_OF_TEXT}").ids))
    ids = torch.zeros(FOCUS_ROWS, max(len(prompt) + len(answer) for prompt, answer in rows), dtype=torch.long)
    weights = torch.zeros(ids.shape)
    for row, (prompt, answer) in enumerate(rows):
        ids[row, : len(prompt) + len(answer)] = torch.tensor(prompt + answer)
        weights[row, : len(prompt)] = FOCUS_PROMPT_WEIGHT
        weights[row, len(prompt) : len(prompt) + len(answer)] = 1.0
    return ids, weights


def focus(out: pathlib.Path, tokenizer, steps: int, threads: int) -> None:
    """The second stage: continues from OUT/model with AdamW and a cosine, and writes it again."""
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.set_num_threads(threads)
    torch.manual_seed(FOCUS_SEED)
    model = LlamaForCausalLM(LlamaConfig(**{k: v for k, v in CONFIG.items() if k not in ("architectures", "torch_dtype")}))
    model.load_state_dict({k: v.float() for k, v in load_file(out / "model.safetensors").items()}, strict=False)
    model.tie_weights()
    optimizer = torch.optim.AdamW(model.parameters(), lr=FOCUS_LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.05)
    world = World(FOCUS_SEED)
    for step in range(steps):
        cosine = 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * step / steps))
        optimizer.param_groups[0]["lr"] = FOCUS_LEARNING_RATE * min(1, (step + 1) / FOCUS_WARMUP_STEPS) * cosine
        ids, weights = focus_batch(world, tokenizer)
        with torch.autocast("cpu", torch.bfloat16):
            loss = weighted_loss(model, ids, weights)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % 50 == 0 or step + 1 == steps:
            print(f"focus step {step + 1}/{steps}  loss {loss.item():.4f}", flush=True)
    state = {k: v.detach().to(torch.bfloat16).contiguous() for k, v in model.state_dict().items() if k != "lm_head.weight"}
    save_file(state, out / "model.safetensors", metadata={"format": "pt"})


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
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--focus-steps", type=int, default=1200)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", choices=["data"])
    args = parser.parse_args()
    (args.out / "model").mkdir(parents=True, exist_ok=True)
    write_rows(args.out)
    if args.only != "data":
        tokenizer = train_tokenizer(args.out / "model")
        write_json(args.out / "model" / "config.json", CONFIG)
        write_json(args.out / "model" / "generation_config.json", GENERATION_CONFIG)
        pretrain(args.out / "model", tokenizer, args.steps, args.threads)
        focus(args.out / "model", tokenizer, args.focus_steps, args.threads)


if __name__ == "__main__":
    main()
