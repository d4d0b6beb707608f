#!/usr/bin/env python3
"""Compares the scores of `lora-train eval` with those of lm-evaluation-harness, on rows of GSM8K.

usage: check_scores.py --binary target/release/lora-train --model FOLDER --data gsm8k_train.jsonl [--rows 100]
       check_scores.py --golden tests/golden/answers.json

GSM8K as the harness has it (its prompt, stops and both filters), with the first five rows as examples, and the same
questions with choices by likelihood, both in plain text. What must be equal: the answer that is found in each of our texts
and whether it is right, by our comparison and by the harness's filters and metric; the choices' likelihoods within 1e-3, and
acc and acc_norm. The harness's own texts, of transformers in f32, are counted where they differ: of two equally likely
tokens either may be taken. Exit status 1 where something differs that must be equal.

--golden writes what the harness finds in texts that are made here, for the unit tests.

Needs lm_eval, torch and transformers; no network.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile

os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TOKENIZERS_PARALLELISM="false")

from lm_eval import __version__ as harness_version
from lm_eval import simple_evaluate
from lm_eval.api.metrics import exact_match_hf_evaluate
from lm_eval.filters.extraction import RegexFilter
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

PROMPT = "Question: {prompt}\nAnswer:"
STOPS = ["Question:", "</s>", "<|im_end|>"]
IGNORED = [",", "\\$", "(?s).*#### ", "\\.$"]
PATTERNS = {"first": "#### (\\-?[0-9\\.\\,]+)", "last": "(-?[$0-9.,]{2,})|(-?[0-9]+)"}
TASK = {
    "dataset_path": "json", "training_split": "train", "fewshot_split": "train", "test_split": "test", "num_fewshot": 5,
    "fewshot_config": {"sampler": "first_n"}, "doc_to_text": "Question: {{question}}\nAnswer:",
}


def filters(take):
    return RegexFilter(regex_pattern=PATTERNS[take], group_select={"first": 0, "last": -1}[take])


def found(take, text):
    """What the harness finds in a text."""
    return filters(take).apply([[text]], [{}])[0][0]


def is_right(found_text, answer):
    metric = exact_match_hf_evaluate([found_text], [answer], regexes_to_ignore=IGNORED, ignore_case=True)
    return bool(metric["exact_match"])


def golden(path):
    texts = [
        " She has 3 + 4 = 7 apples.\n#### 7", "#### 1,234", "#### -5.", "#### $12", "#### 12 dollars", "####7", "no number",
        "#### 1\n#### 2", "It costs $3.50 or 4 euros.", "The answer is 42", "-7", "1.", "a 5", "5 - 3", ".,", "####  9",
        "#### 08", "#### ", "$1,000.", "#### 3,\n", "", "\n\n", "Zahl: \u0663", "#### \u22125", "2/3", "#### 1e5", "100%",
    ]
    answers = ["#### 7", "so\n#### 1,234", "#### -5", "#### 12", "#### 3.50", "#### 42.", "#### 9", "#### 1000"]
    rows = [{"take": take, "text": text, "found": found(take, text),
             "right": [index for index, answer in enumerate(answers) if is_right(found(take, text), answer)]}
            for take in PATTERNS for text in texts]
    document = {"made_by": f"scripts/check_scores.py --golden, lm_eval {harness_version}", "patterns": PATTERNS,
                "regexes_to_ignore": IGNORED, "answers": answers}
    head, rows = json.dumps(document, indent=1).removesuffix("\n}"), ",\n".join(map(json.dumps, rows))
    pathlib.Path(path).write_text(f'{head},\n "rows": [\n{rows}\n]}}\n')


def ours(args, folder, test, task):
    """What `lora-train eval` says of a task, and its answers."""
    settings = {
        "data.chat_template": "none", "data.max_length": 4096, "data.train.0.path": str(folder / "train.jsonl"),
        "data.eval.0.path": str(folder / test), "train.micro_batch_size": 1, "eval.max_batches": 1,
        **{f"eval.task.{key}": value for key, value in task.items()},
    }
    # These values are the same in JSON and TOML.
    sets = [part for key, value in settings.items() for part in ("--set", f"{key}={json.dumps(value)}")]
    answers = folder / "answers.jsonl"
    command = [args.binary, "eval", "--model", args.model, "--answers", str(answers), "--json", *sets]
    report = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
    return report["tasks"][task["metric"]], [json.loads(line) for line in answers.read_text().splitlines()]


def theirs(args, folder, test, model, task):
    """What the harness says of a task, and its samples in the order of the rows."""
    # The splits of a data set have the same columns.
    train = "train.jsonl" if task.get("num_fewshot") != 0 else test
    files = {"train": str(folder / train), "test": str(folder / test)}
    config = {"task": "check", **TASK, "dataset_kwargs": {"data_files": files, "cache_dir": str(folder / "cache")}, **task}
    result = simple_evaluate(model=model, tasks=[config], task_manager=TaskManager(), log_samples=True, bootstrap_iters=0)
    return result["results"]["check"], sorted(result["samples"]["check"], key=lambda sample: sample["doc_id"])


def generation(args, folder, model):
    task = {
        "output_type": "generate_until", "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": STOPS, "do_sample": False, "temperature": 0.0},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True, "ignore_case": True,
                         "ignore_punctuation": False, "regexes_to_ignore": IGNORED}],
        "filter_list": [{"name": take, "filter": [
            {"function": "regex", "regex_pattern": pattern, "group_select": {"first": 0, "last": -1}[take]},
            {"function": "take_first"}]} for take, pattern in PATTERNS.items()],
    }
    result, samples = theirs(args, folder, "test.jsonl", model, task)
    mistakes = 0
    for take, pattern in PATTERNS.items():
        score, answers = ours(args, folder, "test.jsonl", {
            "metric": "exact_match", "rows": args.rows, "max_seconds": 100_000, "prompt": PROMPT, "num_fewshot": 5,
            "stop": STOPS, "regex_pattern": pattern, "take": take, "regexes_to_ignore": IGNORED, "ignore_case": True})
        own = [sample for sample in samples if sample["filter"] == take]
        equal = [answer["text"] == sample["resps"][0][0] for answer, sample in zip(answers, own, strict=True)]
        rights = [is_right(found(take, answer["text"]), sample["doc"]["answer"]) for answer, sample in zip(answers, own)]
        wrong = sum(right != answer["is_right"] for right, answer in zip(rights, answers))
        # Without a find there is none to normalise.
        finds = [None if found(take, answer["text"]) == "[invalid]" else found(take, answer["text"]) for answer in answers]
        others = sum((find is None) != (answer["found"] is None) for find, answer in zip(finds, answers))
        mistakes += wrong + others + (abs(score["score"] - sum(rights) / args.rows) > 1e-12)
        print(json.dumps({
            "take": take, "rows": len(answers), "score": score["score"], "of the harness": result[f"exact_match,{take}"],
            "found": sum(find is not None for find in finds), "finds that differ": others, "verdicts that differ": wrong,
            "texts equal to those of transformers": sum(equal)}), flush=True)
    return mistakes


def choice(args, folder, model):
    task = {"output_type": "multiple_choice", "doc_to_choice": "{{choices}}", "doc_to_target": "{{answer}}",
            "metric_list": [{"metric": metric, "aggregation": "mean", "higher_is_better": True} for metric in ("acc", "acc_norm")]}
    result, samples = theirs(args, folder, "choices.jsonl", model, task | {"num_fewshot": 0})
    score, answers = ours(args, folder, "choices.jsonl", {
        "metric": "multiple_choice", "rows": args.rows, "max_seconds": 100_000, "prompt": PROMPT})
    worst = max(abs(likelihood - response[0]) for answer, sample in zip(answers, samples, strict=True)
                for likelihood, response in zip(answer["loglikelihoods"], sample["filtered_resps"], strict=True))
    print(json.dumps({"rows": len(answers), "acc": score["score"], "of the harness": result["acc,none"],
                      "acc_norm": score["score_norm"], "acc_norm of the harness": result["acc_norm,none"],
                      "largest difference of likelihoods": worst}), flush=True)
    return (worst > 1e-3) + (score["score"] != result["acc,none"]) + (score["score_norm"] != result["acc_norm,none"])


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for name in ("--binary", "--model", "--data", "--golden"):
        parser.add_argument(name)
    parser.add_argument("--rows", type=int, default=100)
    args = parser.parse_args()
    if args.golden:
        return golden(args.golden)
    rows = [json.loads(line) for line in open(args.data)]
    test = rows[-args.rows:]
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)

        def write(file, rows):
            (folder / file).write_text("".join(json.dumps(row) + "\n" for row in rows))

        write("train.jsonl", rows[:6])
        write("test.jsonl", test)
        choices = []
        for index, row in enumerate(test):
            number = row["answer"].rsplit("#### ", 1)[1].replace(",", "")
            texts = [f"{int(number) + 7} of them", f"{number}", f"{number}1 in all", f"about {int(number) + 1}"]
            right = index % 4
            texts[1], texts[right] = texts[right], texts[1]
            choices.append({"question": row["question"], "choices": texts, "answer": right})
        write("choices.jsonl", choices)
        model = HFLM(pretrained=args.model, dtype="float32", batch_size=1, device="cpu")
        mistakes = choice(args, folder, model) + generation(args, folder, model)
    sys.exit(1 if mistakes else 0)


if __name__ == "__main__":
    main()
