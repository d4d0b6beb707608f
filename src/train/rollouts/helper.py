"""What a process of ours has in common that runs a Python file of the user's: lines of JSON in, and lines out."""
import asyncio
import importlib.util
import inspect
import json
import math
import os
import queue
import re
import signal
import sys
import threading
import time
import traceback
import types
import typing


def pipes():
    """The lines to read and a function that writes one: what the file and its children print goes to stderr instead."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8", errors="replace", newline="\n")
    inbox = os.fdopen(os.dup(0), "r", encoding="utf-8", newline="\n")
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    pid = os.getpid()

    def say(answer):
        if os.getpid() != pid:  # A function has forked, and its child came back.
            os._exit(1)
        out.write(json.dumps(answer, ensure_ascii=False, allow_nan=False) + "\n")
        out.flush()

    return inbox, say


def read_ahead(inbox, put):
    """Passes lines on. Where they end nobody waits for an answer, and a function that does not return is stopped."""
    for line in inbox:
        put(line)
    put(None)
    time.sleep(5)
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)


def described(error):
    """What an error says, and where in the file it was raised."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename.startswith("<"):
        frames = frames.tb_next
    text = "".join(traceback.format_exception(type(error), error, frames)) if frames else ""
    return {"error": "".join(traceback.format_exception_only(type(error), error)).strip(), "traceback": text}


def loaded(path, names):
    """What the file calls by these names, which can be called."""
    name = os.path.splitext(os.path.basename(path))[0]
    sys.argv, sys.path[0] = [path], os.path.dirname(os.path.abspath(path))
    spec = importlib.util.spec_from_file_location(name, path)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    functions = {name: getattr(module, name) for name in names}
    for name, function in functions.items():
        if not callable(function):
            raise TypeError(f"{name} is {type(function).__name__}, and no function")
    return functions
