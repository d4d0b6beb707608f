#!/usr/bin/env python3
"""The README's pictures, from a fresh quickstart run.

usage: screenshots.py [--binary target/release/lora-train] [--chromium PROGRAM] [--out docs]
       screenshots.py --path MODEL [--binary target/release/lora-train] [--out docs]

Trains recipes/quickstart.toml with --tui on a pseudo-terminal of 80 x 24, saves its screen at three fifths of the steps
as dashboard.svg, and takes report-light.png and report-dark.png of the run's final report. That report is then opened as on
a phone of 390 points and printed, also without scripts. Exit code 1 if it would need sideways scrolling, or if it prints
no page or too many. --keep DIR keeps these pictures and the PDF for inspection.

--path draws path.svg instead: four commands from a CSV file of the quickstart's rows to a chat with an adapter of MODEL, a
folder, each with the seconds that it took.

Needs Chromium (not for --path), and the Python packages pyte and pillow.
"""

import argparse
import csv
import fcntl
import io
import json
import os
import pathlib
import pty
import re
import struct
import subprocess
import sys
import tempfile
import termios
import time
from html import escape

try:
    import pyte
    from PIL import Image
except ImportError as missing:
    sys.exit(f"error: {missing}\n  hint: pip install pyte pillow")

from chromium import Chromium

ROOT = pathlib.Path(__file__).resolve().parent.parent
COLUMNS, LINES = 80, 24
# --path: of a terminal on which nothing scrolls, and rows of the CSV file.
PATH_COLUMNS, PATH_LINES, PATH_ROWS = 118, 200, 200
# A cell of the terminal in the picture.
WIDTH, HEIGHT = 9, 18
COLORS = {
    "default": "#d8dee6", "black": "#14171b", "red": "#ff8f85", "green": "#59d3a2", "brown": "#f0c05a",
    "blue": "#3d83c4", "magenta": "#d9a0f0", "cyan": "#6db6f5", "white": "#ffffff",
}
# Colours that a program selects by number.
COLORS |= {"0000ee": COLORS["blue"], "00cdcd": COLORS["cyan"], "cdcd00": COLORS["brown"], "00cd00": COLORS["green"],
           "cd00cd": COLORS["magenta"], "cd0000": COLORS["red"]}
BACKGROUND = "#14171b"
# Points of a phone's window, and the most A4 sheets that a report should take.
PHONE_WIDTH, MAX_SHEETS = 390, 12
# Filled eighths of a cell, from below and from the left.
LOWER = "▁▂▃▄▅▆▇█"
LEFT = "▏▎▍▌▋▊▉█"
# Directions of a line from the middle of the cell: up, down, left, right.
BOX = {"─": "lr", "│": "ud", "┌": "dr", "┐": "dl", "└": "ur", "┘": "ul", "├": "udr", "┤": "udl", "┬": "dlr", "┴": "ulr",
       "┼": "udlr"}
# Bits of a braille character by place: column, row.
BRAILLE = [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (0, 3), (1, 3)]


def run(command: list, folder: pathlib.Path, screen: pyte.Screen, watch=lambda terminal: None) -> float:
    """Runs a program on a terminal of the screen's size; `watch` is called whenever it has written. Returns the seconds."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", screen.lines, screen.columns, 0, 0))
    environment = {**os.environ, "TERM": "xterm-256color"}
    environment.pop("NO_COLOR", None)
    began = time.monotonic()
    process = subprocess.Popen(command, cwd=folder, env=environment, stdin=slave, stdout=slave, stderr=slave,
                               start_new_session=True)
    os.close(slave)
    stream = pyte.ByteStream(screen)
    while True:
        try:
            shown = os.read(master, 1 << 16)
        except OSError:  # the last user of the terminal has exited
            break
        if not shown:
            break
        stream.feed(shown)
        watch(master)
    if process.wait() != 0:
        sys.exit(f"error: {command} ended with {process.returncode}\n" + "\n".join(screen.display))
    os.close(master)
    return time.monotonic() - began


def train(binary: pathlib.Path, folder: pathlib.Path) -> str:
    """Trains with the dashboard; returns its screen at three fifths of the steps, as SVG."""
    for name in ("quickstart", "recipes"):
        (folder / name).symlink_to(ROOT / name)
    screen, kept = pyte.Screen(COLUMNS, LINES), []

    def watch(_):
        done = re.search(r"step (\d+)/(\d+)", "\n".join(screen.display))
        if not kept and done and 5 * int(done[1]) >= 3 * int(done[2]):
            # Until the whole picture has arrived.
            time.sleep(0.05)
            kept.append(draw(screen, "The dashboard of a training run in a terminal"))
    run([binary.resolve(), "recipes/quickstart.toml", "--tui"], folder, screen, watch)
    return kept[0]


def first_hour(binary: pathlib.Path, model: pathlib.Path, folder: pathlib.Path) -> str:
    """From rows in CSV to a chat with the adapter, as SVG."""
    (folder / "model").symlink_to(model.resolve())
    rows = [json.loads(line)["messages"] for line in (ROOT / "quickstart/train.jsonl").read_text().splitlines()]
    with (folder / "rows.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("question", "answer"), *([turn["content"] for turn in row] for row in rows[:PATH_ROWS])])
    screen = pyte.Screen(PATH_COLUMNS, PATH_LINES)
    stream, typed = pyte.Stream(screen), [f"{rows[-1][0]['content']}\r", "\x04"]

    def talk(terminal):
        if typed and screen.display[screen.cursor.y].rstrip() == ">":
            os.write(terminal, typed.pop(0).encode())
    for arguments in ("init --model model --data rows.csv", "check recipe.toml", "recipe.toml", "chat runs/recipe"):
        stream.feed(f"\x1b[1;32m$\x1b[0;1m lora-train {arguments}\x1b[0m\r\n")
        line = screen.cursor.y - 1
        seconds = run([binary.resolve(), *arguments.split()], folder, screen, talk)
        end = (screen.cursor.y, screen.cursor.x)
        took = f"{seconds:.1f} s" if seconds < 60 else f"{seconds // 60:.0f} min {seconds % 60:.0f} s"
        if not arguments.startswith("chat"):
            stream.feed(f"\x1b[{line + 1};{PATH_COLUMNS - len(took)}H\x1b[36m{took}\x1b[0m\x1b[{end[0] + 1};{end[1] + 1}H")
    # The lines of most steps say the same.
    steps = [y for y in range(screen.cursor.y) if screen.display[y].startswith("step ")]
    gone = steps[-1] - steps[2] - 2
    for y in range(steps[2] + 2, screen.cursor.y - gone):
        screen.buffer[y] = screen.buffer[y + gone]
    screen.buffer[steps[2] + 1].clear()
    screen.buffer[steps[2] + 1][0] = screen.default_char._replace(data="⋮")
    screen.lines = screen.cursor.y - gone
    return draw(screen, "Four commands from a CSV file to a chat with the trained adapter")


def draw(screen: pyte.Screen, label: str) -> str:
    """The screen as SVG. It draws the terminal font's special shapes, because a viewer's font may lack them."""
    texts, shapes = [], []
    for y in range(screen.lines):
        run_end = None
        for x in range(screen.columns):
            cell = screen.buffer[y][x]
            color, ground = (COLORS.get(name, f"#{name}") for name in (cell.fg, cell.bg))
            if cell.bg == "default":
                ground = BACKGROUND
            if cell.reverse:
                color, ground = ground, color
            left, top = x * WIDTH, y * HEIGHT
            if ground != BACKGROUND:
                shapes.append(f'<rect x="{left}" y="{top}" width="{WIDTH}" height="{HEIGHT}" fill="{ground}"/>')
            shape = glyph(cell.data, left, top, color)
            if shape is not None:
                shapes.append(shape)
            elif cell.data.strip():
                style = (color, cell.bold)
                if run_end != (x, style):
                    texts.append([left, top + 14, style, ""])
                texts[-1][3] += cell.data
                run_end = (x + 1, style)
    weight = {True: ' font-weight="bold"', False: ""}
    letters = "".join(
        f'<text x="{left}" y="{top}" fill="{color}" textLength="{len(text) * WIDTH}"{weight[bold]}>{escape(text)}</text>'
        for left, top, (color, bold), text in texts)
    width, height = screen.columns * WIDTH, screen.lines * HEIGHT
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-12 -12 {width + 24} {height + 24}" width="{width + 24}" '
        f'font-family="ui-monospace, DejaVu Sans Mono, Menlo, Consolas, monospace" font-size="15" role="img" '
        f'aria-label="{label}">'
        f'<rect x="-12" y="-12" width="{width + 24}" height="{height + 24}" rx="8" fill="{BACKGROUND}"/>'
        + "".join(shapes) + letters + "</svg>\n"
    )


def glyph(character: str, left: int, top: int, color: str) -> str | None:
    """A block, a box line or braille as shapes; None for a letter."""
    code = ord(character[0]) if character else 32
    if character and character in LOWER:
        height = HEIGHT * (LOWER.index(character) + 1) / 8
        return f'<rect x="{left}" y="{top + HEIGHT - height:g}" width="{WIDTH}" height="{height:g}" fill="{color}"/>'
    if character and character in LEFT:
        width = WIDTH * (LEFT.index(character) + 1) / 8
        return f'<rect x="{left}" y="{top}" width="{width:g}" height="{HEIGHT}" fill="{color}"/>'
    if character in BOX:
        x, y = left + WIDTH / 2, top + HEIGHT / 2
        ends = {"u": f"V{top}", "d": f"V{top + HEIGHT}", "l": f"H{left}", "r": f"H{left + WIDTH}"}
        path = "".join(f"M{x:g} {y:g}{ends[way]}" for way in BOX[character])
        return f'<path d="{path}" stroke="#6b7580" fill="none"/>'
    if 0x2800 < code < 0x2900:
        dots = (place for bit, place in enumerate(BRAILLE) if (code - 0x2800) >> bit & 1)
        path = "".join(f"M{left + 2.4 + 4.2 * x:g} {top + 2.5 + 4.4 * y:g}h.01" for x, y in dots)
        return f'<path d="{path}" stroke="{color}" stroke-width="2.4" stroke-linecap="round"/>'
    return None


def shrink(path: pathlib.Path) -> None:
    """Fewer colours: a page of lines and text needs no more."""
    image = Image.open(io.BytesIO(path.read_bytes())).convert("RGB")
    image.quantize(colors=160, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE).save(path, optimize=True)


def check(browser: Chromium, report: pathlib.Path, folder: pathlib.Path) -> None:
    """The report on a phone and on paper; the pictures go to `folder`."""
    for script in (True, False):
        name = "with-scripts" if script else "without-scripts"
        for scheme in ("light", "dark"):
            browser.open(report, width=PHONE_WIDTH, height=844, scale=2, dark=scheme == "dark", script=script)
            beyond, what = browser.beyond(PHONE_WIDTH)
            if beyond > 0:
                sys.exit(f"error: on a phone of {PHONE_WIDTH} points the report reaches {beyond} points beyond the window: {what}")
            if problems := browser.problems():
                sys.exit(f"error: the page has problems on a phone: {problems}")
            browser.screenshot(folder / f"phone-{scheme}-{name}.png")
            for control, choice in {"x": "time", "y": "log", "smoothing": 5}.items() if script else ():
                browser.evaluate(f"form.elements.{control}.value = '{choice}'; drawAll()")
            if browser.problems() or browser.evaluate("/NaN|undefined/.test(document.querySelector('main').innerHTML)"):
                sys.exit(f"error: a chart cannot be drawn anew: {browser.problems()}")
        browser.open(report, script=script)
        pdf = folder / f"report-{name}.pdf"
        sheets = browser.pdf(pdf)
        print(f"{name}: {sheets} sheets of paper, {pdf.stat().st_size / 1024:.0f} KB")
        if not 1 <= sheets <= MAX_SHEETS:
            sys.exit(f"error: the report prints to {sheets} sheets, expected 1 to {MAX_SHEETS}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", type=pathlib.Path, default=ROOT / "target/release/lora-train")
    parser.add_argument("--chromium", help="the browser, where it is not on the path")
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "docs")
    parser.add_argument("--report", type=pathlib.Path, help="only check this report.html on a phone and on paper")
    parser.add_argument("--path", type=pathlib.Path, metavar="MODEL", help="only draw path.svg, with this model")
    parser.add_argument("--keep", type=pathlib.Path, help="the folder for its pictures")
    arguments = parser.parse_args()
    if arguments.keep:
        arguments.keep.mkdir(parents=True, exist_ok=True)
    if arguments.report:
        with tempfile.TemporaryDirectory() as name, Chromium(arguments.chromium) as browser:
            check(browser, arguments.report, arguments.keep or pathlib.Path(name))
        return
    if not arguments.binary.is_file():
        sys.exit(f"error: {arguments.binary} is not there\n  hint: cargo build --release")
    arguments.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        if arguments.path:
            (arguments.out / "path.svg").write_text(first_hour(arguments.binary, arguments.path, folder))
            return
        (arguments.out / "dashboard.svg").write_text(train(arguments.binary, folder))
        with Chromium(arguments.chromium) as browser:
            for scheme in ("light", "dark"):
                browser.open(folder / "runs/quickstart/report.html", width=1100, dark=scheme == "dark")
                problems = browser.problems()
                if problems:
                    sys.exit(f"error: the page has problems: {problems}")
                picture = arguments.out / f"report-{scheme}.png"
                browser.screenshot(picture, height=1940)
                shrink(picture)
            check(browser, folder / "runs/quickstart/report.html", arguments.keep or folder)
    for picture in sorted(arguments.out.iterdir()):
        print(f"{picture}: {picture.stat().st_size / 1024:.0f} KB")


if __name__ == "__main__":
    main()
