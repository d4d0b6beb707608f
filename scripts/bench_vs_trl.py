#!/usr/bin/env python3
"""Our steps of preferences next to TRL's, on this machine, in one run.

usage: bench_vs_trl.py [--models models] [--rounds 3] [--steps 4] [--sides NAME ...] [--binary target/release/lora-train]
                       [--pairs 2] [--length 256] [--answers 4] [--rows FILE] [--checkpointing] [--out benches/results]
                       (pip install trl==1.16.0)

Every measurement is a process of its own, as in bench_vs_peft.py: pairs of random tokens at full length, LoRA r = 16 on every linear
layer of SmolLM2-135M, AdamW, clipping at 1, f32, no checkpointing unless asked for. Sides: ours-dpo, trl-dpo, ours-orpo, trl-orpo, and ours-sft, which is
supervised fine-tuning on the same tokens. Not among the default ones: ours-grpo and trl-grpo, whole steps that write `answers` to each of
`pairs` prompts, at most `length` tokens each, at temperature 1, judge them and train on them; tokens are those that are written.

With --rows, DPO and ORPO train on the first rows of a JSON Lines file with `prompt`, `chosen` and `rejected`, in order, through both sides'
whole loops; tokens are those of both answers with their prompt. TRL pads, and computes the prompt twice. GRPO answers its prompts, in any
order.
"""
import argparse
import itertools
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

import benchlib

SIDES = ("ours-sft", "ours-dpo", "trl-dpo", "ours-orpo", "trl-orpo")
REWARDED = ("ours-grpo", "trl-grpo")
PROMPTS = [f"{number}. Once upon a time, far away from here, there was" for number in range(64)]


def prompts(rows: str | pathlib.Path | None) -> list[dict]:
    """The rows of GRPO."""
    if not rows:
        return [{"prompt": prompt} for prompt in PROMPTS]
    with open(rows) as file:
        return [{"prompt": json.loads(line)["prompt"]} for line in itertools.islice(file, len(PROMPTS))]


def of_steps(seconds: list[float], tokens: list[float]) -> dict:
    """The median step behind the warm-up, and its tokens in a second."""
    seconds, tokens = seconds[benchlib.NUM_WARMUP_STEPS:], tokens[benchlib.NUM_WARMUP_STEPS:]
    return {"step_seconds": statistics.median(seconds), "tokens_per_second": sum(tokens) / sum(seconds)}


def ours_trained(args, recipe: pathlib.Path, run: pathlib.Path, objective: str) -> dict:
    """One measurement of a run of ours."""
    rows, length = args.rows, args.length
    settings = []
    if objective == "grpo":
        rows, length = recipe.with_suffix(".jsonl"), args.length + 256
        rows.write_text("".join(json.dumps(row) + "\n" for row in prompts(args.rows)))
        settings = [f"objective.num_generations={args.answers}", f"objective.max_completion_length={args.length}",
                    "objective.reward=[{kind='regex', regex_pattern='[a-m]$'}]"]
    settings += [f"objective.name={objective}", f"data.train=[{{path='{rows}'}}]", "data.chat_template=none", "data.shuffle=false",
                 f"data.max_length={length}", f"train.micro_batch_size={args.pairs}",
                 f"train.max_steps={benchlib.NUM_WARMUP_STEPS + args.steps}", "eval.eval_on_start=false"]
    command = [str(args.binary), str(recipe), "--quiet", "--overwrite", *(word for setting in settings for word in ("--set", setting))]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise benchlib.Failed(done.stderr[-4000:])
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    tokens = [step["completion_length"] * args.pairs * args.answers if objective == "grpo" else step["tokens"] for step in steps]
    peak = json.loads((run / "summary.json").read_text())["peak_host_memory_bytes"]
    return {**of_steps([step["step_seconds"] for step in steps], tokens), "loss": steps[0]["loss"], "peak_memory_bytes": peak}


def trl_trained(task: dict) -> None:
    """One measurement of a run of TRL; prints one JSON object."""
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer
    from trl.experimental.orpo import ORPOConfig, ORPOTrainer

    class Clock(TrainerCallback):
        seconds: list[float] = []

        def on_step_begin(self, *_, **__):
            self.began = time.perf_counter()

        def on_step_end(self, *_, **__):
            self.seconds.append(time.perf_counter() - self.began)

    tokenizer = AutoTokenizer.from_pretrained(task["model"])
    tokenizer.chat_template = None
    clock = Clock()
    num_steps = benchlib.NUM_WARMUP_STEPS + task["steps"]
    if task["objective"] == "grpo":
        config, trainer, rows = GRPOConfig, GRPOTrainer, prompts(task["rows_file"])
        own = {"num_generations": task["answers"], "max_completion_length": task["length"],
               "per_device_train_batch_size": task["pairs"] * task["answers"]}
        given = {"reward_funcs": lambda completions, **_: [float("a" <= text[-1:] <= "m") for text in completions]}
    else:
        config, trainer = (DPOConfig, DPOTrainer) if task["objective"] == "dpo" else (ORPOConfig, ORPOTrainer)
        with open(task["rows_file"]) as file:
            rows = [json.loads(line) for line in itertools.islice(file, num_steps * task["pairs"])]
        own, given = {"max_length": task["length"], "per_device_train_batch_size": task["pairs"]}, {}
    with tempfile.TemporaryDirectory() as directory:
        made = trainer(
            model=AutoModelForCausalLM.from_pretrained(task["model"], dtype=torch.float32), processing_class=tokenizer, callbacks=[clock],
            train_dataset=Dataset.from_list(rows), **given,
            args=config(output_dir=directory, report_to="none", bf16=False, use_cpu=True, gradient_checkpointing=task["checkpointing"], logging_steps=1,
                        max_steps=num_steps, learning_rate=1e-4, save_strategy="no", disable_tqdm=True, **own),
            peft_config=LoraConfig(task_type="CAUSAL_LM", r=16, lora_alpha=32, target_modules="all-linear"))
        tokens = []
        if task["objective"] != "grpo":
            # In order, as ours; the loader of a step's rows asks for the next ones before it.
            made._get_train_sampler = lambda *_: torch.utils.data.SequentialSampler(made.train_dataset)
            collate = made.data_collator

            def counted(examples):
                batch = collate(examples)
                masks = [value for name, value in batch.items() if name in ("attention_mask", "chosen_attention_mask", "rejected_attention_mask")]
                tokens.append(sum(int(mask.sum()) for mask in masks))
                return batch

            made.data_collator = counted
        made.train()
    if task["objective"] == "grpo":
        lengths = [line["completions/mean_length"] for line in made.state.log_history if "completions/mean_length" in line]
        tokens = [length * task["pairs"] * task["answers"] for length in lengths]
    print(json.dumps({**of_steps(clock.seconds, tokens[:num_steps]), "loss": made.state.log_history[0]["loss"]}))


def trl_side(task: dict) -> None:
    """One measurement of TRL; prints one JSON object."""
    import os

    os.environ.update(CUDA_VISIBLE_DEVICES="", HF_HUB_OFFLINE="1", TRL_EXPERIMENTAL_SILENCE="1", TQDM_DISABLE="1")
    if task["objective"] == "grpo" or task["rows_file"]:
        return trl_trained(task)
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import DPOConfig, DPOTrainer
    from trl.experimental.orpo import ORPOConfig, ORPOTrainer

    torch.manual_seed(1)
    pairs, length = task["pairs"], task["length"]
    config, trainer = (DPOConfig, DPOTrainer) if task["objective"] == "dpo" else (ORPOConfig, ORPOTrainer)
    tokenizer = AutoTokenizer.from_pretrained(task["model"])
    base = AutoModelForCausalLM.from_pretrained(task["model"], dtype=torch.float32)
    if task["checkpointing"]:
        base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    with tempfile.TemporaryDirectory() as directory:
        made = trainer(model=base, processing_class=tokenizer, train_dataset=Dataset.from_list([{"prompt": "a", "chosen": "b", "rejected": "c"}]),
                       args=config(output_dir=directory, report_to="none", bf16=False, use_cpu=True, gradient_checkpointing=False,
                                   max_length=length, per_device_train_batch_size=pairs),
                       peft_config=LoraConfig(task_type="CAUSAL_LM", r=16, lora_alpha=32, target_modules="all-linear"))
        made.model.train()
        made.current_gradient_accumulation_steps = 1
        trained = [p for p in made.model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-4, weight_decay=0.0)
        seconds, first = [], None
        for _ in range(benchlib.NUM_WARMUP_STEPS + task["steps"]):
            ids = torch.randint(0, base.config.vocab_size, (2 * pairs, length))
            mask = torch.ones_like(ids)
            mask[:, 0] = 0
            if task["objective"] == "dpo":
                batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "completion_mask": mask}
            else:
                batch = {}
                for name, part in (("chosen", ids[:pairs]), ("rejected", ids[pairs:])):
                    labels = part.masked_fill(mask[:pairs] == 0, -100)
                    batch |= {f"{name}_input_ids": part, f"{name}_attention_mask": torch.ones_like(part), f"{name}_labels": labels}
                batch |= {"prompt_input_ids": ids[:pairs, :1], "prompt_attention_mask": torch.ones_like(ids[:pairs, :1])}
            began = time.perf_counter()
            loss = made.compute_loss(made.model, batch)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            value = loss.item()
            seconds.append(time.perf_counter() - began)
            first = first or benchlib.seconds_since_start()
    step = statistics.median(seconds[benchlib.NUM_WARMUP_STEPS:])
    print(json.dumps({"step_seconds": step, "tokens_per_second": 2 * pairs * length / step, "first_step_seconds": first, "loss": value}))


def run_side(side: str, args, work: pathlib.Path) -> dict:
    """One measurement."""
    program, objective = side.split("-")
    model = str((args.models / "smollm2-135m").resolve())
    task = {"model": model, "dtype": "f32", "r": 16, "rows": args.pairs * (2 if objective == "sft" else 1), "length": args.length,
            "steps": args.steps, "checkpointing": args.checkpointing, "device": "cpu", "pairs": args.pairs, "objective": objective,
            "answers": args.answers, "rows_file": args.rows and str(args.rows.resolve())}
    if program == "trl":
        return benchlib.measure([sys.executable, __file__, "--trl-side", json.dumps(task)])
    recipe = work / f"{side}.toml"
    recipe.write_text(benchlib.recipe(task, work / "run"))
    if objective == "grpo" or args.rows:
        return ours_trained(args, recipe, work / "run", objective)
    settings = [] if objective == "sft" else [f"objective.name={objective}"]
    return benchlib.measure(benchlib.bench_command(args.binary, recipe, settings))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", type=pathlib.Path, default=pathlib.Path("models"))
    parser.add_argument("--binary", type=pathlib.Path, default=benchlib.default_binary())
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--pairs", type=int, default=2)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--answers", type=int, default=4)
    parser.add_argument("--rows", type=pathlib.Path)
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--sides", nargs="+", choices=SIDES + REWARDED, default=list(SIDES))
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("benches/results"))
    parser.add_argument("--trl-side", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.trl_side:
        return trl_side(args.trl_side)
    row = f"smollm2-{args.pairs}x2x{args.length}"
    with tempfile.TemporaryDirectory() as work:
        run = lambda _, __, side: run_side(side, args, pathlib.Path(work))
        try:
            found = benchlib.rounds(benchlib.interleaved(args.rounds, [row], args.sides), args.rounds, run)[row]
        except benchlib.Failed as failure:
            sys.exit(str(failure))
    medians = {side: benchlib.medians(runs) for side, runs in found.items()}
    lines = []
    for side, m in medians.items():
        reference = medians.get(f"trl-{side.split('-')[1]}")
        ratios = ["", ""]
        if reference and reference is not m:
            ratios = [f"{m['tokens_per_second'] / reference['tokens_per_second']:.2f}x", f"{m['peak_memory_bytes'] / reference['peak_memory_bytes']:.2f}x"]
        lines.append((side, f"{m['step_seconds']:.3f}", f"{m['tokens_per_second']:,.0f}", f"{m['peak_memory_bytes'] / 2**20:,.0f}", *ratios))
    print(benchlib.table(("side", "step s", "tokens/s", "memory MiB", "speed", "memory"), lines))
    result = {"machine": benchlib.machine(), "versions": benchlib.versions(args.binary, ("torch", "transformers", "peft", "trl")),
              "medians": medians, "runs": found}
    print(benchlib.write_result(args.out, "trl", result), file=sys.stderr)


if __name__ == "__main__":
    main()
