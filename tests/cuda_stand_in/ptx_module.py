"""A PTX module taken apart: its variables, its functions and their headers; the tables of types that all of the translation uses."""

import re


class Unknown(Exception):
    """Something in the PTX that is not translated."""


REG_BITS = {"pred": 1, "b8": 8, "b16": 16, "b32": 32, "b64": 64, "u16": 16, "u32": 32, "u64": 64, "s16": 16, "s32": 32, "s64": 64,
            "f16": 16, "bf16": 16, "f32": 32, "f64": 64, "f16x2": 32, "b128": 128}
CTYPE = {"u8": "u8", "u16": "u16", "u32": "u32", "u64": "u64", "s8": "s8", "s16": "s16", "s32": "s32", "s64": "s64",
         "b8": "u8", "b16": "u16", "b32": "u32", "b64": "u64", "b128": "u128"}
BITS = {"u8": 8, "s8": 8, "b8": 8, "u16": 16, "s16": 16, "b16": 16, "f16": 16, "bf16": 16, "e4m3x2": 16, "u32": 32, "s32": 32, "b32": 32, "f32": 32,
        "f16x2": 32, "bf16x2": 32, "tf32": 32, "u64": 64, "s64": 64, "b64": 64, "f64": 64, "b128": 128, "pred": 1}
FLOATS = {"f16", "bf16", "f32", "f64"}


def strip_comments(text):
    """Without comments, and without what debuggers read (NVRTC's -lineinfo)."""
    text = re.sub(r"^\s*\.(loc|file)\s[^\n]*", "", text, flags=re.M)
    text = re.sub(r"/\*.*?\*/", "", text, flags=re.S)
    text = re.sub(r"//[^\n]*", "", text)
    return re.sub(r"\.section\s+\S+\s*\{[^}]*\}", "", text)


def split_top(text, sep=","):
    out, depth, part = [], 0, ""
    for c in text:
        if c in "{[(":
            depth += 1
        elif c in "}])":
            depth -= 1
        if c == sep and depth == 0:
            out.append(part.strip())
            part = ""
        else:
            part += c
    if part.strip():
        out.append(part.strip())
    return out


def mangle(name):
    return re.sub(r"[^A-Za-z0-9_]", "_", name)


class Decl:
    """A variable: `.align 4 .b8 name[24] = {..}`."""

    def __init__(self, text):
        body, _, init = text.partition("=")
        # In `.param .u64 .ptr .global .align 4 name` the alignment is that of what is pointed at.
        m = None if ".ptr" in body else re.search(r"\.align\s+(\d+)", body)
        self.align = int(m.group(1)) if m else None
        m = re.search(r"\.(b8|b16|b32|b64|u8|u16|u32|u64|s8|s16|s32|s64|f16|f32|f64|b128)\b.*?([%$\w]+)\s*(\[\s*(\d*)\s*\])?\s*$", body, flags=re.S)
        if not m:
            raise Unknown(f"declaration: {text}")
        self.elem = m.group(1)
        self.name = m.group(2)
        width = BITS[self.elem] // 8
        self.is_array = m.group(3) is not None
        self.count = int(m.group(4) or 0) if self.is_array else 1
        self.size = width * self.count
        self.align = self.align or width
        self.init = init.strip()
        self.width = width


class Function:
    def __init__(self, header, body, is_entry):
        self.is_entry = is_entry
        m = re.search(r"\.(?:entry|func)\s*(\(([^)]*)\))?\s*([%$\w.]+)\s*(\((.*?)\))?\s*(\..*)?$", header, flags=re.S)
        if not m:
            raise Unknown(f"header: {header}")
        self.name = m.group(3)
        self.returns = [Decl(p) for p in split_top(m.group(2) or "")]
        self.params = [Decl(p) for p in split_top(m.group(5) or "")]
        self.reqntid = [0, 0, 0]
        r = re.search(r"\.reqntid\s+([\d,\s]+)", header)
        if r:
            dims = [int(x) for x in r.group(1).split(",") if x.strip()]
            self.reqntid = (dims + [1, 1, 1])[:3]
        r = re.search(r"\.reqnctapercluster\s+([\d,\s]+)", header)
        self.cluster = ([int(x) for x in r.group(1).split(",") if x.strip()] + [1, 1, 1])[:3] if r else [1, 1, 1]
        self.body = body


class Module:
    def __init__(self, text):
        self.functions, self.variables = [], []
        self.sites = []
        text = strip_comments(text)
        i, n = 0, len(text)
        buf = ""
        while i < n:
            c = text[i]
            if c == "{":
                depth, j = 1, i + 1
                while depth:
                    depth += {"{": 1, "}": -1}.get(text[j], 0)
                    j += 1
                inner = text[i + 1:j - 1]
                if re.search(r"\.(entry|func)\b", buf):
                    self.functions.append(Function(self.clean(buf), inner, ".entry" in buf))
                    buf = ""
                else:
                    buf += "{" + inner + "}"
                i = j
                continue
            if c == ";":
                self.top(self.clean(buf))
                buf = ""
            else:
                buf += c
            i += 1

    @staticmethod
    def clean(buf):
        buf = re.sub(r"\.(version|target|address_size)\s+[^\n]*", "", buf)
        return buf.strip()

    def top(self, text):
        if not text or text.startswith((".file", ".section", ".pragma")):
            return
        if re.search(r"\.(func|entry)\b", text):
            return
        space = re.search(r"\.(global|const|shared)\b", text)
        if space:
            d = Decl(text)
            d.space = space.group(1)
            d.extern = ".extern" in text
            self.variables.append(d)
            return
        raise Unknown(f"top level: {text}")
