#!/usr/bin/env python3
"""Tokens per second of 1, 8, 16 and 64 texts at once: lora-train serve, llama.cpp and transformers, in one run.

usage: bench_generate.py --model models/smollm2-135m [--gguf FILE.gguf] [--binary target/release/lora-train]
                         [--before OLDER_PROGRAM] [--temperature 0] [--tokens 128] [--rounds 5] [--out benches/results]

llama.cpp is the server of PyPI's xllamacpp, asked over HTTP as ours is; FILE.gguf is the model as llama.cpp's own
convert_hf_to_gguf.py writes it. transformers generates in this process: texts are one batch. All servers are up for
the whole run; in a round each side is measured once. At temperature 0 texts are greedy. Needs openai, torch and transformers; prints a table and writes JSON
with hardware, versions and command line to --out.
"""

import argparse
import contextlib
import pathlib
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor

import openai
import torch
import transformers

import benchlib

PROMPT = "Once upon a time there was a small dog who lived at the edge of a forest"
COUNTS = (1, 8, 16, 64)
LLAMA = """
import sys, time, xllamacpp
params = xllamacpp.CommonParams()
params.model.path, params.hostnames, params.port = sys.argv[1], ["127.0.0.1"], int(sys.argv[2])
params.n_ctx, params.n_parallel, params.cpuparams.n_threads = 64 * 512, 64, int(sys.argv[3])
server = xllamacpp.Server(params)
time.sleep(1e6)
"""


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@contextlib.contextmanager
def served(command: list, port: int, log: pathlib.Path):
    """A client of a server that this starts and ends."""
    with log.open("wb") as out, subprocess.Popen([str(word) for word in command], stdout=out, stderr=out) as server:
        try:
            client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
            for _ in range(240):
                if server.poll() is not None:
                    raise benchlib.Failed(log.read_text()[-800:])
                with contextlib.suppress(openai.APIError):
                    client.models.list()
                    break
                time.sleep(0.5)
            yield client
        finally:
            server.terminate()


def over_http(client, temperature: float, **extra):
    def measure(count: int, tokens: int) -> float:
        def one(number: int) -> int:
            answer = client.completions.create(model="base", prompt=f"{number}. {PROMPT}", temperature=temperature,
                                               seed=number, max_tokens=tokens, extra_body=extra)
            return answer.usage.completion_tokens
        began = time.monotonic()
        with ThreadPoolExecutor(count) as pool:
            written = sum(pool.map(one, range(count)))
        return written / (time.monotonic() - began)
    return measure


def by_transformers(model: pathlib.Path, dtype: torch.dtype, temperature: float):
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    drawing = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
    network = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=dtype).eval()

    def measure(count: int, tokens: int) -> float:
        ids = tokenizer([f"{number}. {PROMPT}" for number in range(count)], return_tensors="pt")
        began = time.monotonic()
        with torch.inference_mode():
            written = network.generate(**ids, max_new_tokens=tokens, min_new_tokens=tokens, **drawing)
        return count * (written.shape[1] - ids["input_ids"].shape[1]) / (time.monotonic() - began)
    return measure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=pathlib.Path, required=True)
    parser.add_argument("--gguf", type=pathlib.Path)
    parser.add_argument("--binary", type=pathlib.Path, default=benchlib.default_binary())
    parser.add_argument("--before", type=pathlib.Path, help="an older program, to be measured beside this one")
    parser.add_argument("--temperature", type=float, default=0)
    parser.add_argument("--python", default=sys.executable, help="the Python that has xllamacpp")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("benches/results"))
    given = parser.parse_args()
    threads = torch.get_num_threads()
    ask = "import importlib.metadata; print(importlib.metadata.version('xllamacpp'))"
    given.llama_version = benchlib.said([given.python, "-c", ask]) if given.gguf else None
    with contextlib.ExitStack() as stack:
        logs = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
        sides = {}
        binaries = {"lora-train": given.binary, "before": given.before}
        for name, dtype in ((name, dtype) for name in binaries if binaries[name] for dtype in ("f32", "bf16")):
            port = free_port()
            command = [binaries[name], "serve", given.model, "--dtype", dtype, "--port", port]
            client = stack.enter_context(served(command, port, logs / f"{name}-{dtype}"))
            sides[f"{name} {dtype}"] = over_http(client, given.temperature)
        if given.gguf:
            port = free_port()
            command = [given.python, "-c", LLAMA, given.gguf, port, threads]
            client = stack.enter_context(served(command, port, logs / "llama"))
            sides[f"llama.cpp {given.gguf.stem}"] = over_http(client, given.temperature, ignore_eos=True)
        for name, dtype in (("f32", torch.float32), ("bf16", torch.bfloat16)):
            sides[f"transformers {name}"] = by_transformers(given.model, dtype, given.temperature)
        figures = {name: {count: [] for count in COUNTS} for name in sides}
        for measure in sides.values():
            measure(1, 8)
        for _ in range(given.rounds):
            for name, measure in sides.items():
                for count in COUNTS:
                    figures[name][count].append(measure(count, given.tokens))
                    print(name, count, round(figures[name][count][-1], 1), file=sys.stderr, flush=True)
    result = [{"side": name, **{f"texts_{count}": statistics.median(counts[count]) for count in COUNTS}, "runs": counts}
              for name, counts in figures.items()]
    lines = [(row["side"], *(f"{row[f'texts_{count}']:.1f}" for count in COUNTS)) for row in result]
    print(benchlib.table(("tokens/s", *(f"{count} at once" for count in COUNTS)), lines))
    versions = benchlib.versions(given.binary, ("torch", "transformers")) | {
        "llama.cpp": f"xllamacpp {given.llama_version}" if given.gguf else None}
    print(benchlib.write_result(given.out, "generate", {
        "machine": benchlib.machine(), "versions": versions, "model": given.model.name, "tokens": given.tokens,
        "temperature": given.temperature, "figures": result}), file=sys.stderr)


if __name__ == "__main__":
    main()
