#!/usr/bin/env python3
"""Three epochs on rows with images next to PyTorch + transformers + PEFT, on this machine, in one run.

usage: bench_images.py [--rounds 3] [--rows 2] [--epochs 3] [--side 448] [--binary target/release/lora-train] [--out benches/results]

A model of Qwen3-VL's kind with random weights: a language model of 24 layers 896 wide (358 M parameters) and a tower of 12 layers 768 wide
(deepstack behind three of them), which stays as it is. A row has an image of SIDE x SIDE pixels, a question of 160 bytes and an answer of 80,
a token each. LoRA r = 16 on the linear layers of the language model, AdamW, a row a step, f32, no checkpointing. Ours encodes each image
once, before the first step; PEFT's model encodes it in each step, as its users' does. Every measurement is a whole process of its own, from
reading the weights on, and every second round runs in the opposite order. Reported are medians over the rounds of

  cpu        processor time of the process, on all threads: what a machine with other work measures best
  steps      the same of PEFT's steps alone, without what loads the model
  tower      the same of the tower in them
  wall       from start to end
  memory     peak resident memory

Needs the packages of scripts/make_image_golden.py. Prints a table and writes JSON to --out.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

import benchlib

SIDES = ("ours", "peft")
TARGETS = r".*language_model.*\.(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)"
CONFIG = {
    "architectures": ["Qwen3VLForConditionalGeneration"], "model_type": "qwen3_vl", "tie_word_embeddings": False, "image_token_id": 4,
    "vision_start_token_id": 5, "vision_end_token_id": 6, "video_token_id": 7,
    "text_config": {
        "model_type": "qwen3_vl_text", "vocab_size": 264, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
        "num_attention_heads": 14, "num_key_value_heads": 2, "head_dim": 64, "hidden_act": "silu", "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [12, 10, 10], "mrope_interleaved": True}},
    "vision_config": {
        "model_type": "qwen3_vl_vision", "depth": 12, "hidden_size": 768, "intermediate_size": 3072, "num_heads": 12, "in_channels": 3,
        "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 896, "num_position_embeddings": 2304,
        "hidden_act": "gelu_pytorch_tanh", "deepstack_visual_indexes": [3, 6, 9]}}
PREPROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessorFast", "do_resize": True, "do_rescale": True, "do_normalize": True, "do_convert_rgb": True,
    "resample": 3, "size": {"shortest_edge": 65536, "longest_edge": 16777216}, "patch_size": 16, "temporal_patch_size": 2, "merge_size": 2,
    "image_mean": [0.5] * 3, "image_std": [0.5] * 3}


def make(folder: pathlib.Path, num_rows: int, side: int) -> None:
    """Writes the model, the images and the rows."""
    import torch
    from PIL import Image
    from transformers import AutoConfig, AutoModelForImageTextToText

    from make_image_golden import pixels, write_tokenizer

    (folder / "config.json").write_text(json.dumps(CONFIG))
    torch.manual_seed(1)
    AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(folder)).float().save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR))
    write_tokenizer(folder, "qwen3_vl")
    with (folder / "rows.jsonl").open("w") as rows:
        for row in range(num_rows):
            image = pixels(side + row, side)[:, :side]
            Image.fromarray(image).save(folder / f"{row}.png")
            said = [{"role": "user", "content": f"<image>{row:0160}"}, {"role": "assistant", "content": f"{row:080}"}]
            rows.write(json.dumps({"images": [f"{row}.png"], "messages": said}) + "\n")


def peft_side(task: dict) -> None:
    """One measurement of PEFT; prints one JSON object."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedTokenizerFast

    from make_image_golden import NAMED, encoded, processor_of

    folder, config = pathlib.Path(task["folder"]), AutoConfig.from_pretrained(task["folder"])
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), bos_token="<s>", eos_token="</s>",
                                        extra_special_tokens=NAMED.get("qwen3_vl", {}))
    tokenizer.chat_template = settings["chat_template"]
    processor, _ = processor_of(folder, config, tokenizer)
    torch.manual_seed(1)
    base = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    base.config.text_config.use_cache = False
    model = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", r=16, lora_alpha=32, target_modules=TARGETS))
    model.train()
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=1e-4, weight_decay=0.0)
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    entered, spent = [], []
    model.get_base_model().model.visual.register_forward_pre_hook(lambda *_: entered.append(time.process_time()))
    model.get_base_model().model.visual.register_forward_hook(lambda *_: spent.append(time.process_time() - entered[-1]))
    began, losses, tokens = time.process_time(), [], 0
    for _ in range(task["epochs"]):
        for row in rows:
            batch, labels = encoded(row, folder, tokenizer, processor, config)
            loss = model(**batch, labels=labels).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(trainable, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            tokens += labels.shape[1]
    print(json.dumps({"tokens": tokens, "first_loss": losses[0], "last_loss": losses[-1], "steps_cpu_seconds": time.process_time() - began,
                      "tower_cpu_seconds": sum(spent)}))


def measured(command: list[str], env: dict) -> tuple[dict, str]:
    """Processor time, wall time and memory of a process, and what it writes to stdout."""
    with tempfile.TemporaryFile("w+") as stdout, tempfile.TemporaryFile("w+") as stderr:
        began = time.perf_counter()
        process = subprocess.Popen(command, stdout=stdout, stderr=stderr, env=os.environ | env)
        _, status, used = os.wait4(process.pid, 0)
        wall = time.perf_counter() - began
        [file.seek(0) for file in (stdout, stderr)]
        if status:
            raise benchlib.Failed(f"{command} ended with status {status}:\n{stderr.read()[-4000:]}")
        figures = {"cpu_seconds": used.ru_utime + used.ru_stime, "wall_seconds": wall, "peak_memory_bytes": used.ru_maxrss * 1024}
        return figures, stdout.read()


def ours(args, folder: pathlib.Path) -> dict:
    """One measurement of ours."""
    with tempfile.TemporaryDirectory() as work:
        task = {"model": folder, "dtype": "f32", "r": 16, "length": 4096, "rows": 1, "checkpointing": False, "device": "cpu",
                "steps": args.rows * args.epochs}
        recipe, run = pathlib.Path(work) / "recipe.toml", pathlib.Path(work) / "run"
        recipe.write_text(benchlib.recipe(task, run))
        settings = [f"data.train=[{{path='{folder / 'rows.jsonl'}'}}]", "data.shuffle=false", "optimizer.weight_decay=0",
                    "scheduler.lr_scheduler=constant", "scheduler.warmup_steps=0"]
        command = [str(args.binary), str(recipe), "--quiet", *(word for setting in settings for word in ("--set", setting))]
        figures, _ = measured(command, {"LORA_TRAIN_CACHE": work + "/cache"})
        steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        return {"tokens": sum(step["tokens"] for step in steps), "first_loss": steps[0]["loss"], "last_loss": steps[-1]["loss"],
                "steps_wall_seconds": sum(step["step_seconds"] for step in steps), **figures}


def run_side(side: str, args, folder: pathlib.Path) -> dict:
    """One measurement."""
    if side == "ours":
        figures = ours(args, folder)
    else:
        task = {"folder": str(folder), "epochs": args.epochs}
        figures, said = measured([sys.executable, __file__, "--peft-side", json.dumps(task)], {})
        figures = {**figures, **json.loads(said.splitlines()[-1])}
    return {**figures, "tokens_per_second": figures["tokens"] / figures["cpu_seconds"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--binary", type=pathlib.Path, default=benchlib.default_binary())
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--side", type=int, default=448, help="pixels of an image's width and height")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("benches/results"))
    parser.add_argument("--make", type=pathlib.Path, help=argparse.SUPPRESS)
    parser.add_argument("--peft-side", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.peft_side:
        return peft_side(args.peft_side)
    if args.make:
        return make(args.make, args.rows, args.side)
    with tempfile.TemporaryDirectory() as work:
        try:
            measured([sys.executable, __file__, "--make", work, "--rows", str(args.rows), "--side", str(args.side)], {})
            run = lambda _, row, side: run_side(side, args, pathlib.Path(work))
            found = benchlib.rounds(benchlib.interleaved(args.rounds, ["qwen3-vl"], SIDES), args.rounds, run)["qwen3-vl"]
        except benchlib.Failed as failure:
            sys.exit(str(failure))
    medians = {side: benchlib.medians(runs) for side, runs in found.items()}
    # The adapters change nothing yet.
    assert abs(medians["ours"]["first_loss"] - medians["peft"]["first_loss"]) < 1e-3, medians
    seconds = ("cpu_seconds", "steps_cpu_seconds", "tower_cpu_seconds", "wall_seconds")
    lines = [(side, *(f"{m[key]:.0f}" if key in m else "" for key in seconds), f"{m['peak_memory_bytes'] / 2**20:,.0f}",
              f"{m['tokens_per_second']:.0f}") for side, m in medians.items()]
    print(benchlib.table(("side", "cpu s", "steps s", "tower s", "wall s", "memory MiB", "tokens per cpu s"), lines))
    result = {"machine": benchlib.machine(), "versions": benchlib.versions(args.binary, ("torch", "torchvision", "transformers", "peft")),
              "model": CONFIG, "rows": args.rows, "epochs": args.epochs, "side": args.side, "medians": medians, "runs": found}
    print(benchlib.write_result(args.out, "images", result), file=sys.stderr)


if __name__ == "__main__":
    main()
