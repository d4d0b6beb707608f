#!/usr/bin/env python3
"""Make the quickstart that sees: drawings of shapes, a tiny model that has seen such, fine-tuning rows.

usage: pretrain_drawings.py [--out quickstart/drawings] [--steps 3500] [--threads 1] [--only data]

Writes OUT/model/ (a Hugging Face folder of SmolVLM's architecture, in bf16), OUT/train.jsonl and OUT/eval.jsonl, whose images are PNG in
`data:` addresses. A quarter of an hour on a CPU core; `--only data` writes the rows alone, in a second.

In pretraining the model is asked what a drawing shows. It is also asked to sort it into a box, and there any box is right: so it knows
the question, and before fine-tuning its boxes are chance.

Needs torch, transformers, tokenizers, safetensors, numpy and Pillow (scripts/setup_python.sh).
"""

import argparse
import base64
import io
import json
import pathlib
import time

import numpy as np

SIDE, PATCH, SCALE = 32, 4, 2
NUM_IMAGE_TOKENS = (SIDE // PATCH // SCALE) ** 2
SHAPES = ["circle", "square", "triangle", "cross"]
COLOURS = {"red": (210, 40, 40), "green": (40, 160, 60), "blue": (40, 80, 210), "yellow": (225, 195, 40), "black": (30, 30, 30), "pink": (235, 130, 180)}
PAPERS = [(250, 250, 250), (215, 215, 215), (245, 235, 205), (205, 230, 245)]
SIZES = {"small": (6.0, 8.0), "large": (10.5, 13.5)}
BOXES = {"circle": "C", "square": "A", "triangle": "D", "cross": "B"}
TO_SORT = "Sort it."
NUM_TRAIN_ROWS, NUM_EVAL_ROWS = 192, 64
PRETRAIN_SEED, HELD_OUT_SEED, ROWS_SEED = 1, 2, 3
BATCH, TURNS = 64, 3
MUON_LEARNING_RATE, ADAMW_LEARNING_RATE, MIN_LR_RATIO, WARMUP_STEPS = 0.02, 3e-3, 0.02, 30
END_OF_TEXT, IM_START, IM_END, IMAGE, AROUND, GLOBAL = "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<image>", "<fake_token_around_image>", "<global-img>"
VOCAB_SIZE, MAX_LENGTH = 352, 256

CONFIG = {
    "architectures": ["SmolVLMForConditionalGeneration"],
    "model_type": "smolvlm",
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": True,
    "image_token_id": 3,
    "pad_token_id": 0,
    "scale_factor": SCALE,
    "text_config": {
        "model_type": "llama",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "max_position_embeddings": MAX_LENGTH,
        "rms_norm_eps": 1e-05,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "bos_token_id": None,
        "eos_token_id": 2,
        "pad_token_id": 0,
    },
    "vision_config": {
        "model_type": "smolvlm_vision",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "image_size": SIDE,
        "patch_size": PATCH,
        "hidden_act": "gelu_pytorch_tanh",
        "layer_norm_eps": 1e-06,
    },
}
PREPROCESSOR = {
    "image_processor_type": "SmolVLMImageProcessor",
    "do_convert_rgb": True,
    "do_image_splitting": False,
    "do_normalize": True,
    "do_pad": True,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "max_image_size": {"longest_edge": SIDE},
    "resample": 1,
    "size": {"longest_edge": SIDE},
}
TOKENIZER_CONFIG = {
    "bos_token": None,
    "chat_template": (
        "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}{% if message['content'] is string %}{{ message['content'] }}"
        "{% else %}{% for part in message['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}{% elif part['type'] == 'image' %}"
        "{{ '<image>' }}{% endif %}{% endfor %}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    "clean_up_tokenization_spaces": False,
    "eos_token": IM_END,
    "model_max_length": MAX_LENGTH,
    "pad_token": END_OF_TEXT,
    "tokenizer_class": "PreTrainedTokenizerFast",
    "unk_token": None,
}


def write_json(path: pathlib.Path, value) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


class Drawings:
    """Drawings of one shape on paper each: names of shapes, colours and sizes, and `bits`, whether a pixel is of the shape."""

    def __init__(self, rng: np.random.Generator, count: int):
        self.shapes, self.colours, self.sizes = (rng.choice(list(names), count) for names in (SHAPES, COLOURS, SIZES))
        ink = np.array([COLOURS[colour] for colour in self.colours]) + rng.integers(-15, 16, (count, 3))
        self.ink, self.paper = ink.clip(0, 255).astype(np.uint8), np.array(PAPERS, np.uint8)[rng.integers(len(PAPERS), size=count)]
        least, most = np.array([SIZES[size] for size in self.sizes]).T
        radius = rng.uniform(least, most)
        left, top = (rng.uniform(radius + 1, SIDE - radius - 1) for _ in "xy")
        angle = rng.uniform(-0.25, 0.25, count)[:, None, None]
        at = np.arange(SIDE) + 0.5
        x = (at[None, None, :] - left[:, None, None]) / radius[:, None, None]
        y = (at[None, :, None] - top[:, None, None]) / radius[:, None, None]
        x, y = x * np.cos(angle) + y * np.sin(angle), y * np.cos(angle) - x * np.sin(angle)
        wide, narrow = np.maximum(abs(x), abs(y)), np.minimum(abs(x), abs(y))
        inside = {"circle": x * x + y * y <= 1, "square": wide <= 0.85, "triangle": (y <= 0.8) & (abs(x) <= (y + 1) * 0.55),
                  "cross": (narrow <= 0.3) & (wide <= 1)}
        self.bits = np.stack([inside[shape][index] for index, shape in enumerate(self.shapes)])

    def pixels(self) -> np.ndarray:
        """`[drawings, 3, SIDE, SIDE]`."""
        return np.where(self.bits[:, None], self.ink[:, :, None, None], self.paper[:, :, None, None])

    def png(self, index: int) -> bytes:
        from PIL import Image

        image, file = Image.new("P", (SIDE, SIDE)), io.BytesIO()
        image.putpalette([*self.paper[index], *self.ink[index]])
        image.putdata(self.bits[index].flatten().tolist())
        image.save(file, "PNG", bits=1, optimize=True)
        return file.getvalue()

    def row(self, index: int) -> dict:
        """A fine-tuning row: each shape has a box of its own."""
        url = "data:image/png;base64," + base64.b64encode(self.png(index)).decode()
        user = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": TO_SORT}]
        shape = str(self.shapes[index])
        return {"messages": [{"role": "user", "content": user}, {"role": "assistant", "content": f"{shape}: box {BOXES[shape]}"}]}

    def turns(self, index: int, rng: np.random.Generator) -> list[tuple[str, str]]:
        """Questions about a drawing with their answers, TURNS different ones."""
        shape, colour, size = self.shapes[index], self.colours[index], self.sizes[index]
        turns = [("What is this?", f"a {size} {colour} {shape}"), ("Which shape is it?", f"a {shape}"),
                 (TO_SORT, f"{shape}: box {rng.choice(list(BOXES.values()))}"), ("Which colour is it?", colour), ("How large is it?", size)]
        return [turns[turn] for turn in rng.choice(len(turns), TURNS, replace=False, p=[0.3, 0.2, 0.2, 0.15, 0.15])]


def write_rows(out: pathlib.Path) -> None:
    """The fine-tuning rows; no drawing is there twice."""
    drawings = Drawings(np.random.default_rng(ROWS_SEED), NUM_TRAIN_ROWS + NUM_EVAL_ROWS)
    rows = [json.dumps(drawings.row(index)) + "\n" for index in range(NUM_TRAIN_ROWS + NUM_EVAL_ROWS)]
    assert len(set(rows)) == len(rows)
    (out / "train.jsonl").write_text("".join(rows[:NUM_TRAIN_ROWS]))
    (out / "eval.jsonl").write_text("".join(rows[NUM_TRAIN_ROWS:]))


def write_tokenizer(model: pathlib.Path):
    """A byte-level BPE of VOCAB_SIZE entries; the signs of chats and images come first."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    rng = np.random.default_rng(0)
    drawings = Drawings(rng, 3000)
    texts = [" ".join(turn) for index in range(3000) for turn in drawings.turns(index, rng)] + ["user\n", "assistant\n"] * 500
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE, special_tokens=[END_OF_TEXT, IM_START, IM_END, IMAGE, AROUND, GLOBAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise SystemExit(f"the tokenizer has {tokenizer.get_vocab_size()} entries, expected {VOCAB_SIZE}")
    tokenizer.save(str(model / "tokenizer.json"))
    write_json(model / "tokenizer_config.json", TOKENIZER_CONFIG)
    return tokenizer


def batch(rng: np.random.Generator, tokenizer) -> dict:
    """Ids, labels and scaled pixels of BATCH drawings, each with its conversation, in which the answers carry loss."""
    import torch

    drawings = Drawings(rng, BATCH)
    ids, labels = torch.zeros(BATCH, MAX_LENGTH, dtype=torch.long), torch.full((BATCH, MAX_LENGTH), -100)
    longest = 0
    for index in range(BATCH):
        at, image = 0, AROUND + GLOBAL + IMAGE * NUM_IMAGE_TOKENS + AROUND
        for question, answer in drawings.turns(index, rng):
            for text, is_answer in ((f"{IM_START}user\n{image}{question}{IM_END}\n{IM_START}assistant\n", False), (f"{answer}{IM_END}", True), ("\n", False)):
                tokens = torch.tensor(tokenizer.encode(text).ids)
                ids[index, at : at + len(tokens)] = tokens
                if is_answer:
                    labels[index, at : at + len(tokens)] = tokens
                at += len(tokens)
            image = ""
        longest = max(longest, at)
    pixels = torch.tensor(drawings.pixels(), dtype=torch.float32)[:, None]
    return {"input_ids": ids[:, :longest], "labels": labels[:, :longest], "pixel_values": (pixels - 127.5) / 127.5}


def learning_rate_factor(step: int, steps: int) -> float:
    """Linear warm-up, a plateau, and a straight line down to MIN_LR_RATIO over the last two fifths."""
    left = (steps - step) / (0.4 * steps)
    return min(1.0, (step + 1) / WARMUP_STEPS, MIN_LR_RATIO + (1 - MIN_LR_RATIO) * left)


def pretrain(folder: pathlib.Path, tokenizer, steps: int, threads: int) -> None:
    """Train the base model from scratch and write it in bf16: Muon for the matrices, AdamW for embeddings, gains and biases."""
    import torch
    from safetensors.torch import save_file
    from transformers import SmolVLMConfig, SmolVLMForConditionalGeneration

    torch.set_num_threads(threads)
    torch.manual_seed(PRETRAIN_SEED)
    model = SmolVLMForConditionalGeneration(SmolVLMConfig(**{k: v for k, v in CONFIG.items() if k not in ("architectures", "torch_dtype", "model_type")}))
    print(f"{sum(tensor.numel() for tensor in model.parameters())} parameters", flush=True)
    matrices = [p for name, p in model.named_parameters() if p.dim() == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.dim() != 2 or "embed" in name]
    optimizers = [torch.optim.Muon(matrices, lr=MUON_LEARNING_RATE, momentum=0.95, weight_decay=0.01),
                  torch.optim.AdamW(others, lr=ADAMW_LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0)]
    peaks = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]
    source, held_out = np.random.default_rng(PRETRAIN_SEED), batch(np.random.default_rng(HELD_OUT_SEED), tokenizer)
    started = time.monotonic()
    for step in range(steps):
        for optimizer, peak in zip(optimizers, peaks):
            optimizer.param_groups[0]["lr"] = peak * learning_rate_factor(step, steps)
        loss = model(**batch(source, tokenizer)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if (step + 1) % 50 == 0 or step + 1 == steps:
            with torch.no_grad():
                held = model(**held_out).loss.item()
            print(f"step {step + 1}/{steps}  loss {loss.item():.4f}  held-out {held:.4f}  {time.monotonic() - started:.0f} s", flush=True)
            state = {k: v.detach().to(torch.bfloat16).contiguous() for k, v in model.state_dict().items() if k != "lm_head.weight"}
            save_file(state, folder / "model.safetensors", metadata={"format": "pt"})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("quickstart/drawings"))
    parser.add_argument("--steps", type=int, default=3500)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", choices=["data"])
    args = parser.parse_args()
    model = args.out / "model"
    model.mkdir(parents=True, exist_ok=True)
    write_rows(args.out)
    if args.only != "data":
        write_json(model / "config.json", CONFIG)
        write_json(model / "preprocessor_config.json", PREPROCESSOR)
        write_json(model / "generation_config.json", {"do_sample": False, "eos_token_id": [2, 0], "pad_token_id": 0, "max_new_tokens": 24})
        pretrain(model, write_tokenizer(model), args.steps, args.threads)


if __name__ == "__main__":
    main()
