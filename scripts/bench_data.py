#!/usr/bin/env python3
"""Tokenising many short rows next to Hugging Face datasets + tokenizers, on this machine, in one run.

usage: bench_data.py [--model models/smollm2-135m] [--rows 1000000] [--sentences 4] [--kinds completion chat]
                     [--num-proc 2] [--binary target/release/lora-train] [--sides ours hf] [--work FOLDER]
                     [--out benches/results]

This script makes the rows, equal on every machine: sentences of words from a fixed list, drawn with a fixed seed. An
answer has up to --sentences of them (35: a kilobyte a row). For each kind of rows and each side, in a process of its own:

  cold          the first start: from the file to tokens on disk, nothing cached, from process start to end; its rows/s,
                and the processor time of all processes, which a busy machine changes less
  cached        the second start: ours until model, data and data workers are ready to step, with the rows of the first
                epoch shuffled; theirs until the first rows of the shuffled set are loaded, without a model
  killed        ours only: a start after another was killed half-way; its tokens must equal those of the cold start, byte
                for byte
  memory        peak resident memory: of the process (VmHWM), or, where there are several, of their largest sum

Ours: `lora-train inspect` cold; cached, a training run of one step, from its summary.json (`startup_seconds`).
Theirs: `load_dataset("json")`, `map(batched=True, num_proc=N)` with the fast tokenizer, one pass over the text without
loss masks, `shuffle(seed)`, and the first 8 rows. Ours also finds which tokens carry loss.

Prints a table and writes JSON with hardware, versions and command line to --out. Needs `datasets` and `transformers`.
"""

import argparse
import datetime
import hashlib
import json
import os
import pathlib
import platform
import random
import resource
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import time

WORDS = """about after again air all along also always animal another answer around away back because before began
below between book both boy build call came car carry change children city close cold come could country cut day did
different does down draw each early earth eat end enough even every example eye face family far father feet few find
first follow food form found four friend from garden girl give good great green group grow half hand hard head hear
help high home horse house idea important inside island keep kind know land large last later learn leave letter life
light line list little live long look made make many mean might mile more morning mother mountain move much music name
near need never next night north number often old once only open order other over page paper part people picture place
plan plant play point quick read really right river road room round said same school sea second see seem sentence set
several ship should show side simple small song soon sound south spell stand start state still stop story street study
such sun table take talk tell thing think those thought three through time together took town travel tree try turn
under until use very voice walk want warm watch water week well went west where which while white whole wind window
without woman wood word work world would write year young""".split()
BATCH_ROWS = 8
POLL_SECONDS = 0.05


def write_rows(path, kind, num_rows, max_sentences):
    """Writes `num_rows` rows of a kind, equal in every run."""
    draw = random.Random(20_26)
    def sentence(low, high):
        words = draw.choices(WORDS, k=draw.randint(low, high))
        return " ".join(words).capitalize() + draw.choice(".?!")
    with open(path, "w") as file:
        for index in range(num_rows):
            question = f"Question {index}: " + sentence(6, 20)
            answer = " ".join(sentence(4, 14) for _ in range(draw.randint(1, max_sentences)))
            if kind == "completion":
                row = {"prompt": question + " ", "completion": answer}
            else:
                row = {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
            file.write(json.dumps(row) + "\n")


def memory_of(pid):
    """Resident bytes now, and their peak, of one process."""
    try:
        lines = pathlib.Path(f"/proc/{pid}/status").read_text().splitlines()
        values = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.startswith(("VmHWM", "VmRSS"))}
        return values.get("VmRSS", 0), values.get("VmHWM", 0)
    except (OSError, ValueError):
        return 0, 0


def children_of(pid):
    """A process and all its descendants."""
    found = [pid]
    for parent in found:
        try:
            for task in pathlib.Path(f"/proc/{parent}/task").iterdir():
                found += [int(child) for child in (task / "children").read_text().split()]
        except OSError:
            pass
    return found


def measure(command, env):
    """Seconds, processor seconds of the process and its children, peak memory, and output of a process."""
    start, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    peak = {"sum": 0, "single": 0}
    def watch():
        while process.poll() is None:
            memory = [memory_of(pid) for pid in children_of(process.pid)]
            peak["sum"] = max(peak["sum"], sum(resident for resident, _ in memory))
            peak["single"] = max([peak["single"], *(high for _, high in memory[:1])])
            time.sleep(POLL_SECONDS)
    watcher = threading.Thread(target=watch)
    watcher.start()
    stdout, stderr = process.communicate()
    watcher.join()
    seconds = time.monotonic() - start
    if process.returncode != 0:
        sys.exit(f"{shlex.join(command)} ended with {process.returncode}:\n{stdout[-2000:]}\n{stderr[-4000:]}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    processor_seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return seconds, processor_seconds, max(peak["sum"], peak["single"]), stdout


RECIPE = """\
output_dir = "{output}"
[model]
path = "{model}"
[data]
max_length = 1024
[[data.train]]
path = "{rows}"
[train]
micro_batch_size = {batch}
max_steps = 1
[optimizer]
learning_rate = 1e-4
[logging]
tensorboard = false
[device]
name = "cpu"
"""


def ours(args, work, rows_path):
    """The cold and cached measurements of lora-train."""
    recipe, output, cache = work / "recipe.toml", work / "run", work / "cache-ours"
    recipe.write_text(RECIPE.format(output=output, model=args.model.resolve(), rows=rows_path, batch=BATCH_ROWS))
    shutil.rmtree(cache, ignore_errors=True)
    env = os.environ | {"LORA_TRAIN_CACHE": str(cache)}
    cold_seconds, cold_processor, cold_memory, _ = measure([args.binary, "inspect", str(recipe), "--rows", "1"], env)
    shutil.rmtree(output, ignore_errors=True)
    total, _, cached_memory, _ = measure([args.binary, str(recipe), "--quiet"], env)
    startup = json.loads((output / "summary.json").read_text())["time"]["startup_seconds"]
    cache_bytes = sum(file.stat().st_size for file in cache.rglob("*") if file.is_file())
    tokens = tokens_in(cache)
    shutil.rmtree(cache)
    process = subprocess.Popen([args.binary, "inspect", str(recipe), "--rows", "1"], env=env, stdout=subprocess.DEVNULL,
                               stderr=subprocess.DEVNULL)
    time.sleep(cold_seconds / 2)
    process.kill()
    process.wait()
    if tokens_in(cache):
        sys.exit("it was done before it could be killed: more rows are needed")
    killed_seconds, _, killed_memory, _ = measure([args.binary, "inspect", str(recipe), "--rows", "1"], env)
    if tokens_in(cache) != tokens:
        sys.exit("the tokens of the start after a killed one differ")
    return {"killed_half_way_seconds": killed_seconds, "killed_half_way_peak_memory_bytes": killed_memory,
            "cold_seconds": cold_seconds, "cold_processor_seconds": cold_processor,
            "cold_peak_memory_bytes": cold_memory, "cached_start_seconds": startup,
            "one_step_run_seconds": total, "cached_peak_memory_bytes": cached_memory, "cache_bytes": cache_bytes}


def tokens_in(cache):
    """Hashes of the finished token files, by name."""
    found = {}
    for path in cache.rglob("*.tokens"):
        with open(path, "rb") as file:
            found[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def hf(args, work, rows_path, kind):
    """The cold and cached measurements of datasets, each in a process that runs `hf_process`."""
    cache = work / "cache-hf"
    shutil.rmtree(cache, ignore_errors=True)
    env = os.environ | {"HF_HOME": str(cache), "HF_DATASETS_CACHE": str(cache), "HF_HUB_OFFLINE": "1",
                        "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, __file__, "--hf-process", str(rows_path), "--kinds", kind, "--model", str(args.model.resolve()),
               "--num-proc", str(args.num_proc)]
    cold_seconds, cold_processor, cold_memory, stdout = measure(command, env)
    cached_seconds, _, cached_memory, _ = measure(command, env)
    inside = json.loads(stdout.splitlines()[-1])
    return {"cold_seconds": cold_seconds, "cold_processor_seconds": cold_processor,
            "cold_peak_memory_bytes": cold_memory, "cached_start_seconds": cached_seconds,
            "cached_peak_memory_bytes": cached_memory, **inside,
            "cache_bytes": sum(file.stat().st_size for file in cache.rglob("*") if file.is_file())}


def hf_process(args):
    """The process of the Hugging Face side."""
    import datasets
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(args.model)
    start = time.monotonic()
    rows = datasets.load_dataset("json", data_files=args.hf_process, split="train")
    load_seconds = time.monotonic() - start

    def completion(batch):
        texts = [p + c + tokenizer.eos_token for p, c in zip(batch["prompt"], batch["completion"])]
        return {"input_ids": tokenizer(texts, truncation=True, max_length=1024, return_attention_mask=False)["input_ids"]}

    def chat(batch):
        texts = tokenizer.apply_chat_template(batch["messages"], tokenize=False)
        ids = tokenizer(texts, truncation=True, max_length=1024, add_special_tokens=False, return_attention_mask=False)
        return {"input_ids": ids["input_ids"]}

    start = time.monotonic()
    tokens = rows.map(completion if args.kinds[0] == "completion" else chat, batched=True, num_proc=args.num_proc,
                      remove_columns=rows.column_names)
    map_seconds = time.monotonic() - start
    first = tokens.shuffle(seed=1)[:BATCH_ROWS]["input_ids"]
    print(json.dumps({"load_seconds": load_seconds, "map_seconds": map_seconds, "first_batch_tokens": sum(map(len, first))}))


def versions(binary):
    """Versions of the measured programs."""
    found = {"lora-train": subprocess.run([binary, "--version"], capture_output=True, text=True).stdout.strip(),
             "commit": subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=pathlib.Path(__file__).parent).stdout.strip(),
             "python": platform.python_version()}
    try:
        import datasets
        import tokenizers
        import transformers
        found |= {"datasets": datasets.__version__, "tokenizers": tokenizers.__version__, "transformers": transformers.__version__}
    except ImportError:
        pass
    return found


def machine():
    """Processor, cores and memory."""
    names = [line.split(":")[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")]
    return {"cpu": names[0] if names else platform.processor(), "num_cores": os.cpu_count(),
            "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), "system": platform.system()}


def table(results):
    """The figures as lines of text."""
    heads = ("rows", "side", "cold s", "rows/s", "processor s", "memory MiB", "cached start s", "memory MiB", "killed s", "speed", "by processor")
    lines = [heads]
    for kind, sides in results.items():
        for side, m in sides.items():
            keys = ("rows_per_second", "rows_per_processor_second")
            ratios = [f"{m[key] / sides['hf'][key]:.2f}x" if "hf" in sides else "" for key in keys]
            lines.append((kind, side, f"{m['cold_seconds']:.1f}", f"{m['rows_per_second']:,.0f}",
                          f"{m['cold_processor_seconds']:.1f}",
                          f"{m['cold_peak_memory_bytes'] / 2**20:,.0f}", f"{m['cached_start_seconds']:.2f}",
                          f"{m['cached_peak_memory_bytes'] / 2**20:,.0f}",
                          f"{m['killed_half_way_seconds']:.1f}" if "killed_half_way_seconds" in m else "", *ratios))
    widths = [max(len(line[i]) for line in lines) for i in range(len(heads))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths)) for line in lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=pathlib.Path, default="models/smollm2-135m")
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--sentences", type=int, default=4)
    parser.add_argument("--kinds", nargs="+", default=["completion", "chat"], choices=["completion", "chat"])
    parser.add_argument("--sides", nargs="+", default=["ours", "hf"], choices=["ours", "hf"])
    parser.add_argument("--num-proc", type=int, default=os.cpu_count())
    parser.add_argument("--binary", default="target/release/lora-train")
    parser.add_argument("--work", type=pathlib.Path, help="where rows and caches go; default: a temporary folder")
    parser.add_argument("--out", type=pathlib.Path, default="benches/results")
    parser.add_argument("--hf-process", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.hf_process:
        return hf_process(args)

    results = {}
    with tempfile.TemporaryDirectory() as temporary:
        work = args.work or pathlib.Path(temporary)
        work.mkdir(parents=True, exist_ok=True)
        for kind in args.kinds:
            rows_path = work / f"{kind}-{args.rows}-{args.sentences}.jsonl"
            if not rows_path.exists():
                write_rows(rows_path, kind, args.rows, args.sentences)
            results[kind] = {}
            for side in args.sides:
                figures = ours(args, work, rows_path) if side == "ours" else hf(args, work, rows_path, kind)
                figures |= {"rows": args.rows, "file_bytes": rows_path.stat().st_size,
                            "rows_per_second": args.rows / figures["cold_seconds"],
                            "rows_per_processor_second": args.rows / figures["cold_processor_seconds"]}
                results[kind][side] = figures
                print(f"{kind} {side}: {figures}", file=sys.stderr, flush=True)
    print(table(results))
    now = datetime.datetime.now(datetime.timezone.utc)
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / f"data-{now:%Y%m%d-%H%M%S}.json"
    command = shlex.join(["scripts/bench_data.py", *sys.argv[1:]])
    path.write_text(json.dumps({"command": command, "time": now.isoformat(timespec="seconds"), "machine": machine(),
                                "versions": versions(args.binary), "results": results}, indent=1) + "\n")
    print(path)


if __name__ == "__main__":
    main()
