"""Trains in cells of a notebook, and stops one of them as Jupyter does.

    scripts/check_notebook.py --binary target/release/lora-train --out FOLDER

The lines of a run must be in the notebook afterwards, and a stopped run must go on from its last step.
"""

import argparse
import asyncio
import json
import time
from pathlib import Path

import nbformat
from jupyter_client.utils import ensure_async
from nbclient import NotebookClient

RECIPE = Path(__file__).resolve().parent.parent / "recipes" / "quickstart.toml"


def check(condition, what):
    if not condition:
        raise SystemExit(f"error: {what}")


def wait_for(what, condition):
    end = time.monotonic() + 120
    while not condition():
        check(time.monotonic() < end, f"waited two minutes for {what}")
        time.sleep(0.05)


def shown(cell):
    """The text of a cell's outputs, of which Jupyter draws over what stands before a carriage return in a line."""
    text = "".join(output.get("text", "") for output in cell.outputs)
    lines = text.replace("\r\n", "\n").split("\n")
    return "\n".join(line.split("\r")[-1] for line in lines)


def num_steps(run):
    metrics = run / "metrics.jsonl"
    return metrics.read_text().count('"learning_rate"') if metrics.exists() else 0


async def main(binary, out):
    whole, cut = out / "whole", out / "cut"
    train = f"!{binary} {RECIPE} --set train.max_steps=40"
    cells = [
        f"{train} --set output_dir={whole}",
        f"!{binary} {RECIPE} --set train.max_steps=100000 --set output_dir={cut}",
        f"!{binary} {cut} --resume --set train.max_steps=$STEPS",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    resources = {"metadata": {"path": str(RECIPE.parent.parent)}}
    client = NotebookClient(notebook, timeout=300, allow_errors=True, resources=resources)
    async with client.async_setup_kernel():
        first, second, third = notebook.cells
        await client.async_execute_cell(first, 0)
        text = shown(first)
        for part in ["device: ", "trainable params:", "step 20/40", "step 40/40", "eval at step 40", "sample at step 40", "report: "]:
            check(part in text, f"`{part}` is lost in the notebook:\n{text}")
        check("\x1b[" not in text.replace("\x1b[33m", "").replace("\x1b[0m", ""), f"codes of a terminal:\n{text!r}")

        task = asyncio.create_task(client.async_execute_cell(second, 1))
        while num_steps(cut) < 3 and not task.done():
            await asyncio.sleep(0.05)
        await ensure_async(client.km.interrupt_kernel())
        await task
        wait_for("the end of the stopped run", (cut / "unfinished.json").exists)
        wait_for("its report", (cut / "report.html").exists)
        step = max(int(folder.name[5:]) for folder in (cut / "checkpoints").glob("step-*"))
        check(step >= 3, f"only step {step} is saved:\n{shown(second)}")
        check("stopping the cell saves a checkpoint" in shown(second), shown(second))

        third.source = third.source.replace("$STEPS", str(step + 20))
        await client.async_execute_cell(third, 2)
        check(f"resuming after step {step}" in shown(third), shown(third))
        check(num_steps(cut) == step + 20 and (cut / "summary.json").exists(), shown(third))
    print(json.dumps({"stopped_after": step, "lines": len(text.splitlines())}))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    asyncio.run(main(arguments.binary.resolve(), arguments.out.resolve()))
