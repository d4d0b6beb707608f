#!/usr/bin/env python3
"""Figures in MLflow, read back with its own client.

usage: check_mlflow.py [--binary target/release/lora-train]

Starts `mlflow server` (pip install mlflow), trains the quickstart for some steps, interrupts and resumes it, and holds what
the server has against metrics.jsonl and the recipe. Then trains a little without a server: one warning, exit code 0.
"""

import argparse
import json
import math
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parent.parent
STEPS = 30


def train(binary: pathlib.Path, folder: pathlib.Path, uri: str, *more: str) -> subprocess.Popen:
    keys = {"output_dir": folder, "train.max_steps": STEPS, "eval.eval_steps": 10, "checkpoint.save_steps": 5,
            "eval.generate": "[]", "logging.mlflow_tracking_uri": uri, "logging.mlflow_experiment_name": "check"}
    changes = [part for key, value in keys.items() for part in ("--set", f"{key}={value}")]
    return subprocess.Popen([binary, "recipes/quickstart.toml", *changes, *more], cwd=ROOT, text=True, stderr=subprocess.PIPE)


def lines(folder: pathlib.Path) -> list[dict]:
    path = folder / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def check(uri: str, folder: pathlib.Path) -> None:
    from mlflow.tracking import MlflowClient
    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name("check")
    runs = client.search_runs([experiment.experiment_id])
    assert len(runs) == 1, f"{len(runs)} runs, expected 1: the resumed one continues its own"
    run = runs[0]
    assert (run.info.status, run.info.run_name) == ("FINISHED", folder.name), run.info
    assert (run.data.params["lora.r"], run.data.params["data.train.0.format"]) == ("16", "messages"), run.data.params
    names = {"train/loss": "loss", "train/grad_norm": "grad_norm", "memory/host": "host_memory_bytes", "eval/loss": "eval_loss"}
    for tag, name in names.items():
        # Steps that were made again after the interruption are there twice; the later ones count.
        history = sorted(client.get_metric_history(run.info.run_id, tag), key=lambda metric: metric.timestamp)
        found = {metric.step: metric.value for metric in history}
        expected = {line["step"]: line[name] for line in lines(folder) if name in line}
        assert found.keys() == expected.keys(), f"{tag}: steps {sorted(found)}, expected {sorted(expected)}"
        assert all(math.isclose(found[step], expected[step]) for step in found), tag
        print(f"{tag}: {len(found)} values are those of metrics.jsonl")
    print(f"{len(run.data.params)} parameters, {len(run.data.metrics)} figures")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", type=pathlib.Path, default=ROOT / "target/release/lora-train")
    binary = parser.parse_args().binary.resolve()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    uri = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        run = train(binary, folder / "alone", uri)
        said = run.communicate()[1]
        assert run.returncode == 0 and said.count("MLflow at") == 1 and "MLflow lacks" in said, said
        print("without a server: one warning, and what it lacks")
        command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", f"sqlite:///{folder}/mlflow.db",
                   "--port", str(port), "--workers", "1"]
        with open(folder / "server.log", "w") as log:
            server = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log, start_new_session=True)
        try:
            for _ in range(120):
                try:
                    urllib.request.urlopen(f"{uri}/health", timeout=2)
                    break
                except OSError:
                    time.sleep(0.5)
            run = train(binary, folder / "run", uri)
            while run.poll() is None and len(lines(folder / "run")) < 12:
                time.sleep(0.02)
            run.send_signal(signal.SIGINT)
            assert run.wait() == 130, run.stderr.read()
            run = train(binary, folder / "run", uri, "--resume")
            said = run.communicate()[1]
            assert run.returncode == 0 and "MLflow" not in said, said
            check(uri, folder / "run")
        finally:
            os.killpg(server.pid, signal.SIGTERM)
            server.wait()


if __name__ == "__main__":
    main()
