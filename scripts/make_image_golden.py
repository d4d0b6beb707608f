#!/usr/bin/env python3
"""Golden files of models that see: what transformers + PEFT make of images, in f32 on the CPU, for our tests to compare with.

usage: make_image_golden.py FOLDER [--pairs]      (tests/golden/images-*: config.json and preprocessor_config.json are there already)

Beside the packages of `requirements.txt` it needs torchvision, of the version that fits torch.

FOLDER gets three images of odd sizes (PNG), tokenizer.json and tokenizer_config.json of a small vocabulary with the tokens of images,
rows.jsonl, and golden.json: of each image SHA-256 of the scaled pixels (f32, little-endian, piece by piece and channel by channel); names, shapes and
bounds of the model's tensors, whose numbers follow from their names as in make_golden.py; token ids of the rows and which carry loss;
loss and, for every tensor of the adapters, norm and projections of its gradient; the losses of 20 steps on all rows. golden.safetensors: features of all images, and logits
of the first row. pairs.jsonl: rows of preferences, and pairs.json: their token ids, DPO's loss (sigmoid, beta 0.1, the model without
adapters as the reference) and the norm of its gradient in every tensor of the adapters; under `rewards` the same for scores of the answers,
which a head gives the last token; `--pairs` writes these alone. resize.json (Mistral 3): SHA-256 of an image resized to several sizes by each filter. counts.json: by size, how many tokens
the processor makes of what stands for an image.
"""

import hashlib
import json
import pathlib
import sys

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from PIL import Image
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torchvision.transforms.v2 import functional as resizing
from transformers import (AutoConfig, AutoModelForImageTextToText, Gemma3ImageProcessor, Gemma3Processor, Gemma4AudioFeatureExtractor, Gemma4ImageProcessor,
                          Gemma4Processor, Gemma4UnifiedAudioFeatureExtractor, Gemma4UnifiedForConditionalGeneration, Gemma4UnifiedImageProcessor,
                          Gemma4UnifiedProcessor, Gemma4UnifiedVideoProcessor, Gemma4VideoProcessor, Glm46VImageProcessor, Glm46VProcessor, Glm46VVideoProcessor,
                          Glm4vImageProcessor, Glm4vProcessor, Glm4vVideoProcessor, GotOcr2ImageProcessor,
                          Idefics3Processor, InternVLProcessor, InternVLVideoProcessor, Lfm2VlImageProcessor, Lfm2VlProcessor, PaddleOCRVLImageProcessor, PaddleOCRVLProcessor, PixtralImageProcessor, PixtralProcessor, PreTrainedTokenizerFast, Qwen2VLImageProcessor,
                          Qwen2VLProcessor, Qwen2VLVideoProcessor, Qwen2_5_VLProcessor, Qwen3VLProcessor, Qwen3VLVideoProcessor, SmolVLMImageProcessor)

from transformers.models.gemma4 import image_processing_gemma4
from transformers.models.gemma4_unified import image_processing_gemma4_unified

from make_golden import B_BOUND, adapter_tensors, formula, loss_sum, name_alone, projections

SIZES = {"a.png": (75, 50), "b.png": (37, 90), "c.png": (32, 32)}
SPECIAL = {
    "mistral3": ["<s>", "</s>", "[INST]", "[/INST]", "[IMG]", "[IMG_BREAK]", "[IMG_END]"],
    "smolvlm": ["<s>", "</s>", "[INST]", "[/INST]", "<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"]
    + [f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)],
    "internvl": ["<s>", "</s>", "[INST]", "[/INST]", "<IMG_CONTEXT>", "<img>", "</img>", "<video>"],
    "gemma3": ["<s>", "</s>", "[INST]", "[/INST]", "<image_soft_token>", "<start_of_image>", "<end_of_image>"],
}
MARKERS = {"mistral3": "[IMG]", "smolvlm": "<image>", "internvl": "<IMG_CONTEXT>", "gemma3": "<start_of_image>"}
QWEN = ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5"]
SPECIAL |= dict.fromkeys(QWEN, ["<s>", "</s>", "[INST]", "[/INST]", "<|image_pad|>", "<|vision_start|>", "<|vision_end|>", "<|video_pad|>"])
MARKERS |= dict.fromkeys(QWEN, "<|vision_start|><|image_pad|><|vision_end|>")
SPECIAL["paddleocr_vl"] = ["<s>", "</s>", "[INST]", "[/INST]", "<|IMAGE_PLACEHOLDER|>", "<|IMAGE_START|>", "<|IMAGE_END|>"]
MARKERS["paddleocr_vl"] = "<|IMAGE_PLACEHOLDER|>"
SPECIAL["glm46v"] = ["<s>", "</s>", "[INST]", "[/INST]", "<|image|>", "<|begin_of_image|>", "<|end_of_image|>", "<|video|>", "<|begin_of_video|>",
                     "<|end_of_video|>"]
SPECIAL["glm4v_moe"] = SPECIAL["glm46v"]
SPECIAL["gemma4"] = ["<s>", "</s>", "[INST]", "[/INST]", "<|image|>", "<|image>", "<image|>", "<|video|>", "<|audio|>", "<|audio>", "<audio|>"]
SPECIAL["gemma4_unified"] = SPECIAL["gemma4"]
SPECIAL["lfm2_vl"] = ["<s>", "</s>", "[INST]", "[/INST]", "<image>", "<|image_start|>", "<|image_end|>", "<|img_thumbnail|>"] + [
    f"<|img_row_{row}_col_{column}|>" for row in range(1, 7) for column in range(1, 7) if row * column <= 6]
MARKERS |= {"glm46v": "<|image|>", "glm4v_moe": "<|image|>", "gemma4": "<|image|>", "gemma4_unified": "<|image|>", "lfm2_vl": "<image>"}
# What templates write, where processors replace a part of that.
AROUND = {"paddleocr_vl": "<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>", "glm46v": "<|begin_of_image|><|image|><|end_of_image|>"}
AROUND["glm4v_moe"] = AROUND["glm46v"]
# Their tokens have three positions.
THREE = [*QWEN, "paddleocr_vl", "glm46v", "glm4v_moe"]
# What processors ask their tokenizers for.
NAMED = {
    "internvl": {"start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>", "video_token": "<video>"},
    "gemma3": {"boi_token": "<start_of_image>", "image_token": "<image_soft_token>", "eoi_token": "<end_of_image>"},
    "paddleocr_vl": {"image_token": "<|IMAGE_PLACEHOLDER|>"},
    "gemma4": {"image_token": "<|image|>", "boi_token": "<|image>", "eoi_token": "<image|>", "audio_token": "<|audio|>", "boa_token": "<|audio>",
               "eoa_token": "<audio|>"},
}
NAMED["gemma4_unified"] = NAMED["gemma4"]
TEMPLATE = ("{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}[INST]{% if message['content'] is string %}"
            "{{ message['content'] }}{% else %}{% for part in message['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}"
            "{% elif part['type'] in ['image', 'image_url'] %}MARKER{% endif %}{% endfor %}{% endif %}[/INST]{% else %}"
            "{{ message['content'] }}{{ eos_token }}{% endif %}{% endfor %}")
ROWS = [
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "First "}, {"type": "image_url", "image_url": {"url": "a.png"}},
                                               {"type": "text", "text": " then "}, {"type": "image", "path": "b.png"},
                                               {"type": "text", "text": ": what?"}]}, {"role": "assistant", "content": "Two things."}]},
    {"messages": [{"role": "user", "content": "Which color?"}, {"role": "assistant", "content": "Blue, with noise."}], "images": ["c.png"]},
    {"messages": [{"role": "user", "content": "No image here."}, {"role": "assistant", "content": "None at all."}]},
    {"messages": [{"role": "user", "content": "Is <image> like <image>?"}, {"role": "assistant", "content": "Not much."}],
     "images": ["c.png", {"path": "a.png", "bytes": None}]},
]

def said(role: str, *content) -> dict:
    """A message of images and texts."""
    parts = [{"type": "image", "path": part} if part.endswith(".png") else {"type": "text", "text": part} for part in content]
    return {"role": role, "content": parts if role == "user" else content[0]}


# As people write them, and what all of them are: the conversations of a chosen and of a rejected answer.
PAIRS = [
    ({"images": ["a.png"], "prompt": [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What?"}]}],
      "chosen": [said("assistant", "Noise.")], "rejected": [said("assistant", "A cat, I think.")]},
     [said("user", "a.png", "What?"), said("assistant", "Noise.")], [said("user", "a.png", "What?"), said("assistant", "A cat, I think.")]),
    ({"image": "b.png", "prompt": "Is <image> tall?", "chosen": "Yes.", "rejected": "It is wide."},
     [said("user", "Is ", "b.png", " tall?"), said("assistant", "Yes.")], [said("user", "Is ", "b.png", " tall?"), said("assistant", "It is wide.")]),
    ({"chosen": [said("user", "c.png", "Or ", "a.png"), said("assistant", "The first.")],
      "rejected": [said("user", "c.png", "Or ", "a.png"), said("assistant", "The second one.")]},
     [said("user", "c.png", "Or ", "a.png"), said("assistant", "The first.")], [said("user", "c.png", "Or ", "a.png"), said("assistant", "The second one.")]),
    ({"prompt": "No image.", "chosen": "None.", "rejected": "One."},
     [said("user", "No image."), said("assistant", "None.")], [said("user", "No image."), said("assistant", "One.")]),
]
BETA = 0.1
LORA = {"r": 4, "lora_alpha": 8}
LEARNING_RATE = 1e-3
CASES = [("a.png", 96, 64), ("a.png", 30, 20), ("b.png", 32, 80), ("b.png", 60, 45), ("c.png", 48, 17), ("c.png", 32, 64)]
FILTERS = {"bicubic": resizing.InterpolationMode.BICUBIC, "bilinear": resizing.InterpolationMode.BILINEAR, "lanczos": resizing.InterpolationMode.LANCZOS}


def pixels(width: int, height: int) -> np.ndarray:
    """A gradient with noise, which depends on the size alone."""
    rng = np.random.default_rng(width * 1000 + height)
    y, x = np.mgrid[:height, :width]
    base = np.stack([255 * x / width, 255 * y / height, 255 * (x + y) / (width + height)], axis=-1)
    return (base + rng.integers(-40, 41, base.shape)).clip(0, 255).astype(np.uint8)


def sha(array) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()


def write_tokenizer(folder: pathlib.Path, family: str) -> PreTrainedTokenizerFast:
    special, template = SPECIAL[family], TEMPLATE.replace("MARKER", AROUND.get(family, MARKERS[family]))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={text: i for i, text in enumerate(special + alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": template, "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")
    fast = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), bos_token="<s>", eos_token="</s>", pad_token="</s>",
                                   extra_special_tokens=NAMED.get(family, {}))
    fast.chat_template = template
    return fast


def fill(model) -> dict:
    """Gives every tensor the numbers of its name; returns how."""
    made = {}
    for name, tensor in model.state_dict().items():
        centre = 1.0 if tensor.dim() == 1 and not name.endswith(".bias") else 0.0
        # States that reach over many tokens, and norms that files have less 1.
        if model.config.model_type in ["qwen3_5", "gemma3"] and ("language_model" in name or "mm_soft" in name):
            centre = -3.0 if name.endswith("A_log") else 0.0 if name.endswith("norm.weight") and "linear_attn" not in name else centre
        inputs = tensor.shape[-1] if ".experts." in name else int(np.prod(tensor.shape[1:]))
        # Outputs of a size at which a mistake in what is before shows; of two tables of places, and bounds that some numbers pass.
        bound = 0.3 if tensor.dim() < 2 else 0.5 if name.endswith("position_embedding_table") else 2.5 / inputs**0.5
        centre = -1.5 if name.endswith("put_min") else 1.5 if name.endswith("put_max") else centre
        with torch.no_grad():
            tensor.copy_(torch.from_numpy(np.asarray(centre + formula(name, tuple(tensor.shape), bound))))
        made[name] = {"shape": list(tensor.shape), "bound": bound, "centre": centre}
    return made


def messages_of(row):
    """A row as transformers takes it."""
    images, messages = list(row.get("images", [])), []
    for message in row["messages"]:
        content, parts = message["content"], []
        if isinstance(content, str) and message["role"] == "user" and images and "<image>" not in content:
            parts = [{"type": "image"} for _ in images] + [{"type": "text", "text": content}]
        elif isinstance(content, str) and "<image>" in content:
            for index, text in enumerate(content.split("<image>")):
                parts += ([{"type": "image"}] if index else []) + ([{"type": "text", "text": text}] if text else [])
        elif isinstance(content, list):
            for part in content:
                is_image = part["type"] != "text"
                if is_image:
                    images.append(part["path"] if "path" in part else part["image_url"]["url"])
                parts.append({"type": "image"} if is_image else part)
        messages.append({"role": message["role"], "content": parts or content})
    return messages, [image["path"] if isinstance(image, dict) else image for image in images]


def processor_of(folder: pathlib.Path, config, tokenizer):
    """What makes tensors of texts with images, and what makes pixels of an image."""
    given, vision = json.loads((folder / "preprocessor_config.json").read_text()), config.vision_config
    if config.model_type == "mistral3":
        images, side = PixtralImageProcessor(**given), vision.patch_size * config.spatial_merge_size
        processor = PixtralProcessor(images, tokenizer, patch_size=vision.patch_size, spatial_merge_size=config.spatial_merge_size)
        return processor, lambda image: images(image, patch_size=side, return_tensors="pt")
    if config.model_type == "internvl":
        images = GotOcr2ImageProcessor(**given)
        num_tokens = (vision.image_size[0] // vision.patch_size[0] // 2) ** 2
        processor = InternVLProcessor(images, tokenizer, InternVLVideoProcessor(), image_seq_length=num_tokens)
        return processor, lambda image: images(image, crop_to_patches=True, return_tensors="pt")
    if config.model_type == "gemma3":
        images = Gemma3ImageProcessor(**given)
        return Gemma3Processor(images, tokenizer, image_seq_length=config.mm_tokens_per_image), lambda image: images(image, return_tensors="pt")
    if config.model_type in QWEN:
        images = Qwen2VLImageProcessor(**given)
        of_family, video = {"qwen2_vl": (Qwen2VLProcessor, Qwen2VLVideoProcessor), "qwen2_5_vl": (Qwen2_5_VLProcessor, Qwen2VLVideoProcessor)}.get(
            config.model_type, (Qwen3VLProcessor, Qwen3VLVideoProcessor))
        return of_family(images, tokenizer, video()), lambda image: images(image, return_tensors="pt")
    if config.model_type == "gemma4":
        # Fewer tokens than it allows.
        image_processing_gemma4._SUPPORTED_SOFT_TOKENS += (given["max_soft_tokens"],)
        images = Gemma4ImageProcessor(**given)
        processor = Gemma4Processor(Gemma4AudioFeatureExtractor(), images, tokenizer, Gemma4VideoProcessor())
        return processor, lambda image: images(image, return_tensors="pt")
    if config.model_type == "gemma4_unified":
        image_processing_gemma4_unified._SUPPORTED_SOFT_TOKENS += (given["max_soft_tokens"],)
        images = Gemma4UnifiedImageProcessor(**given)
        processor = Gemma4UnifiedProcessor(Gemma4UnifiedAudioFeatureExtractor(), images, tokenizer, Gemma4UnifiedVideoProcessor())
        return processor, lambda image: images(image, return_tensors="pt")
    if config.model_type == "lfm2_vl":
        images = Lfm2VlImageProcessor(**given)
        return Lfm2VlProcessor(images, tokenizer), lambda image: images(image, return_tensors="pt")
    if config.model_type == "glm46v":
        images = Glm46VImageProcessor(**given)
        return Glm46VProcessor(images, tokenizer, Glm46VVideoProcessor()), lambda image: images(image, return_tensors="pt")
    if config.model_type == "glm4v_moe":
        images = Glm4vImageProcessor(**given)
        return Glm4vProcessor(images, tokenizer, Glm4vVideoProcessor()), lambda image: images(image, return_tensors="pt")
    if config.model_type == "paddleocr_vl":
        images = PaddleOCRVLImageProcessor(**given)
        return PaddleOCRVLProcessor(images, tokenizer), lambda image: images(image, return_tensors="pt")
    images = SmolVLMImageProcessor(**given)
    num_tokens = (vision.image_size // vision.patch_size // config.scale_factor) ** 2
    # That of SmolVLM does the same, and speaks of videos too.
    return Idefics3Processor(images, tokenizer, image_seq_len=num_tokens), lambda image: images([image], return_tensors="pt")


def unpatched(patches, rows: int, columns: int) -> np.ndarray:
    """An image of patches with their colors last, `[3, height, width]`."""
    side = int((patches.shape[1] // 3) ** 0.5)
    image = patches[:rows * columns].reshape(rows, columns, side, side, 3)
    return image.permute(4, 0, 2, 1, 3).reshape(3, rows * side, columns * side).numpy()


def pieces(out, config) -> list:
    """The pixels of an image's pieces, `[3, height, width]` each, also of those that come in patches."""
    if config.model_type in ["gemma4", "gemma4_unified"]:
        columns, rows = (out["image_position_ids"][0].max(0).values + 1).tolist()
        return [unpatched(out["pixel_values"][0], rows, columns)]
    if config.model_type == "lfm2_vl":
        return [unpatched(patches, *shape.tolist()) for patches, shape in zip(out["pixel_values"], out["spatial_shapes"])]
    return list(whole(out, config))


def whole(out, config) -> np.ndarray:
    """The same in one array, of families whose pieces have one size."""
    if config.model_type not in THREE:
        return out["pixel_values"].numpy()
    (_, rows, columns), side, merge = out["image_grid_thw"][0].tolist(), config.vision_config.patch_size, config.vision_config.spatial_merge_size
    if config.model_type == "paddleocr_vl":
        return out["pixel_values"].reshape(rows, columns, 3, side, side).permute(2, 0, 3, 1, 4).reshape(1, 3, rows * side, columns * side).numpy()
    patches = out["pixel_values"].reshape(rows // merge, columns // merge, merge, merge, 3, 2, side, side)
    assert torch.equal(patches[..., 0, :, :], patches[..., 1, :, :])
    return patches[..., 0, :, :].permute(4, 0, 2, 5, 1, 3, 6).reshape(1, 3, rows * side, columns * side).numpy()


def features_of(model, out) -> np.ndarray:
    """What is in place of the tokens of an image, and, behind it, what is added to them later."""
    with torch.no_grad():
        found = model.get_image_features(**{key: value for key, value in out.items() if key != "num_soft_tokens_per_image"}, return_dict=True)
    later = getattr(found, "deepstack_features", None) or []
    parts = [torch.cat(list(part)) if isinstance(part, (list, tuple)) else part for part in [found.pooler_output, *later]]
    return torch.cat([part.reshape(-1, part.shape[-1]) for part in parts], -1).numpy()


def without(model, config, batch) -> list:
    """Logits of a row where a part of what is special about its images is missing."""
    if config.model_type == "gemma3":
        # Its images are seen from the left to the right then.
        return [model(**{key: value for key, value in batch.items() if key != "token_type_ids"}).logits[0].detach()]
    if config.model_type == "gemma4":
        cases = [model(**{key: value for key, value in batch.items() if key != "mm_token_type_ids"})]
        text = model.base_model.model.config.text_config
        # The rows of their own token in the tables of layers.
        text.pad_token_id, pad = config.image_token_id, text.pad_token_id
        cases.append(model(**batch))
        text.pad_token_id = pad
        return [case.logits[0].detach() for case in cases]
    if config.model_type == "gemma4_unified":
        # Its images are seen from the left to the right then; or both ways in all layers, as `forward` has it without these masks.
        plain = torch.ones_like(batch["input_ids"])
        one_way = {key: value for key, value in batch.items() if key != "mm_token_type_ids"} | {"attention_mask": plain}
        return [model(**case).logits[0].detach() for case in [one_way, batch | {"attention_mask": plain}]]
    if config.model_type not in THREE:
        return []
    positions = torch.arange(batch["input_ids"].shape[1]).expand(3, 1, -1)
    cases = [model(**{**batch, "position_ids": positions})]
    # Of rows or of columns alone.
    found, _ = model.base_model.model.model.get_rope_index(**{key: batch[key] for key in ["input_ids", "mm_token_type_ids", "image_grid_thw"]})
    for axis in [1, 2]:
        positions = found.clone()
        positions[axis] = found[0]
        cases.append(model(**{**batch, "position_ids": positions}))
    return [case.logits[0].detach() for case in cases]


def encoded(row, folder: pathlib.Path, tokenizer, processor, config):
    """What a model gets of a row, and its labels: those of the last message."""
    messages, names = messages_of(row)
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    prompt = tokenizer.apply_chat_template(messages[:-1], tokenize=False)
    opened = [Image.open(folder / name).convert("RGB") for name in names]
    batch = processor(text=text, images=opened or None, add_special_tokens=False, return_tensors="pt")
    before = processor(text=prompt, images=opened or None, add_special_tokens=False, return_tensors="pt")["input_ids"].shape[1]
    labels = batch["input_ids"].clone()
    labels[:, :before] = -100
    if config.model_type == "gemma4_unified":
        # `forward` alone lets images see both ways in full layers too; `generate`, and so whoever serves it, makes these masks.
        shape = batch["input_ids"].shape
        batch["attention_mask"] = Gemma4UnifiedForConditionalGeneration.create_masks_for_generate(
            config, torch.zeros(*shape, config.text_config.hidden_size), batch["attention_mask"], None, torch.arange(shape[1])[None],
            batch["mm_token_type_ids"])
    return {key: value for key, value in batch.items() if key != "token_type_ids" or config.model_type == "gemma3"}, labels


def norms(named: dict) -> dict:
    return {name: float(np.linalg.norm(tensor.grad.numpy().astype(np.float64))) for name, tensor in named.items()}


def scored(adapted, named: dict, encode) -> dict:
    """As TRL's reward trainer: a score of the last token behind the last norm; the logarithm of how likely the chosen answer is the better one."""
    width = adapted.get_base_model().config.get_text_config().hidden_size
    score = torch.from_numpy(formula("base_model.model.score.weight", (1, width), B_BOUND)).requires_grad_()
    named, losses = named | {"base_model.model.score.weight": score}, []
    for tensor in named.values():
        tensor.grad = None
    for _, *answers in PAIRS:
        last = [adapted.get_base_model().model(**encode({"messages": messages})[0]).last_hidden_state[0, -1] for messages in answers]
        loss = -torch.nn.functional.logsigmoid((score @ (last[0] - last[1]))[0])
        (loss / len(PAIRS)).backward()
        losses.append(loss.item())
    return {"score_bound": B_BOUND, "losses": losses, "gradient_norms": norms(named)}


def write_pairs(folder: pathlib.Path, adapted, named: dict, encode) -> None:
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row, _, _ in PAIRS))
    golden = {"ids": [], "losses": []}
    for tensor in named.values():
        tensor.grad = None
    for _, *answers in PAIRS:
        ratios = []
        for messages in answers:
            batch, labels = encode({"messages": messages})
            golden["ids"].append(batch["input_ids"][0].tolist())
            with torch.no_grad(), adapted.disable_adapter():
                reference = loss_sum(adapted(**batch).logits, labels)
            ratios.append(reference - loss_sum(adapted(**batch).logits, labels))
        loss = -torch.nn.functional.logsigmoid(BETA * (ratios[0] - ratios[1]))
        (loss / len(PAIRS)).backward()
        golden["losses"].append(loss.item())
    golden["gradient_norms"] = norms(named)
    golden["rewards"] = scored(adapted, named, encode)
    (folder / "pairs.json").write_text(json.dumps(golden, separators=(",", ":")) + "\n")
    print("pairs", golden["losses"])


def write_resized(folder: pathlib.Path):
    resized = []
    for source, to_width, to_height in CASES:
        image = torch.from_numpy(pixels(*SIZES[source])).permute(2, 0, 1).contiguous()
        for name, mode in FILTERS.items():
            out = resizing.resize(image, [to_height, to_width], interpolation=mode, antialias=True)
            resized.append({"image": source, "to": [to_width, to_height], "filter": name, "sha256": sha(out.permute(1, 2, 0).numpy())})
    (folder / "resize.json").write_text(json.dumps(resized, separators=(",", ":")) + "\n")


def main():
    folder = pathlib.Path(sys.argv[1])
    for name, size in SIZES.items():
        Image.fromarray(pixels(*size)).save(folder / name)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    config = AutoConfig.from_pretrained(folder)
    tokenizer = write_tokenizer(folder, config.model_type)
    processor, pixels_of = processor_of(folder, config, tokenizer)
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="eager").float().eval()
    golden = {"lora": {"target_modules": "all-linear", "use_rslora": False, **LORA}, "b_bound": B_BOUND, "tensors": fill(model),
              "images": {}, "rows": [], "gradients": {}, "curve": []}
    arrays = {}
    for name in SIZES:
        out = pixels_of(Image.open(folder / name).convert("RGB"))
        [out.pop(key, None) for key in ["num_patches", "num_crops"]]
        seen = pieces(out, config)
        golden["images"][name] = {"size": [seen[0].shape[-1], seen[0].shape[-2]], "pixels": sha(np.concatenate([piece.ravel() for piece in seen]))}
        arrays[f"features.{name}"] = features_of(model, out)

    # As our "all-linear": the language model alone. Experts are no modules in transformers, so attention alone is adapted beside them.
    target = (r".*(language_model|text_model).*\.(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|gate_up_proj|down_proj|in_proj\w*|out_proj|w1|w2|w3"
              r"|per_layer_input_gate|per_layer_projection)")
    if hasattr(config.get_text_config(), "n_routed_experts"):
        golden["lora"]["target_modules"] = ["q_proj", "k_proj", "v_proj", "o_proj"]
        target = r".*language_model.*\.(q_proj|k_proj|v_proj|o_proj)"
    adapted = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", target_modules=target, **LORA))
    named = adapter_tensors(adapted)
    with torch.no_grad():
        for name, tensor in named.items():
            bound = tensor.shape[-1] ** -0.5 if ".lora_A." in name else B_BOUND
            tensor.copy_(torch.from_numpy(formula(name_alone(name), tuple(tensor.shape), bound)))
    batches, num_targets, total = [], 0, 0.0
    def encode(row):
        return encoded(row, folder, tokenizer, processor, model.config)

    write_pairs(folder, adapted, named, encode)
    if "--pairs" in sys.argv:
        return
    for tensor in named.values():
        tensor.grad = None
    for index, row in enumerate(ROWS):
        batches.append(encode(row))
        ids, labels = batches[-1][0]["input_ids"], batches[-1][1]
        out = adapted(**batches[-1][0])
        loss = loss_sum(out.logits, labels)
        loss.backward()
        total, num_targets = total + loss.item(), num_targets + int((labels[:, 1:] != -100).sum())
        golden["rows"].append({"ids": ids[0].tolist(), "carries_loss": [int(label != -100) for label in labels[0].tolist()]})
        if index == 0:
            arrays["logits"] = out.logits[0].detach().numpy()
            apart = [float((case - out.logits[0].detach()).abs().max() / case.abs().max()) for case in without(adapted, config, batches[0][0])]
            assert all(difference > 0.03 for difference in apart), apart
    golden["loss"] = total / num_targets
    for name, tensor in named.items():
        gradient = tensor.grad.numpy() / num_targets
        golden["gradients"][name] = {"shape": list(gradient.shape), "norm": float(np.linalg.norm(gradient.astype(np.float64))),
                                     "projections": projections(name, gradient)}
    optimizer = torch.optim.AdamW(named.values(), lr=LEARNING_RATE, weight_decay=0.0)
    for _ in range(20):
        optimizer.zero_grad()
        losses = [loss_sum(adapted(**batch).logits, labels) / num_targets for batch, labels in batches]
        sum(losses).backward()
        torch.nn.utils.clip_grad_norm_(named.values(), 1.0)
        optimizer.step()
        golden["curve"].append(sum(losses).item())
    (folder / "golden.json").write_text(json.dumps(golden, separators=(",", ":")) + "\n")
    save_file(arrays, folder / "golden.safetensors")

    if config.model_type == "mistral3":
        write_resized(folder)
    rng = np.random.default_rng(1)
    # LFM2-VL's does not pad thinner ones.
    longest, thinnest = (900, 8) if config.model_type == "lfm2_vl" else (9000, 100)
    # transformers takes a side of 1 or 3 for the colors.
    sizes = [(longest, 150), (150, longest), (64, 64), (65, 64)]
    while len(sizes) < 200:
        size = tuple(int(x) for x in rng.integers(4, 400, 2))
        sizes += [size] if max(size) <= thinnest * min(size) else []
    counts = []
    for width, height in sizes:
        out = processor(text=MARKERS[config.model_type], images=[Image.new("RGB", (width, height))], add_special_tokens=False)
        counts.append([width, height, len(out["input_ids"][0])])
    (folder / "counts.json").write_text(json.dumps(counts, separators=(",", ":")) + "\n")
    print("apart", apart, "loss", golden["loss"], "rows", [len(row["ids"]) for row in golden["rows"]])


if __name__ == "__main__":
    main()
