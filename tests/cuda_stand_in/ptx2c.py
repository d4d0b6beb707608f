#!/usr/bin/env python3
"""Translates a PTX module into C that runs its kernels on the processor, one thread at a time.

usage: ptx2c.py KERNEL.ptx OUT.c

Each entry becomes a function `void run(Thr *t)`. Barriers and warp-wide instructions call into the driver stand-in, which runs
threads as fibers and meets them there. Registers are plain unsigned integers of their width; types are those of the instructions.
Device addresses are host addresses, in every state space. An instruction that is not known ends the translation with its text.
"""

import re
import sys

from ptx_async import AsyncInstructions


class Unknown(Exception):
    pass


REG_BITS = {"pred": 1, "b8": 8, "b16": 16, "b32": 32, "b64": 64, "u16": 16, "u32": 32, "u64": 64, "s16": 16, "s32": 32, "s64": 64,
            "f16": 16, "bf16": 16, "f32": 32, "f64": 64, "f16x2": 32, "b128": 128}
CTYPE = {"u8": "u8", "u16": "u16", "u32": "u32", "u64": "u64", "s8": "s8", "s16": "s16", "s32": "s32", "s64": "s64",
         "b8": "u8", "b16": "u16", "b32": "u32", "b64": "u64", "b128": "u128"}
BITS = {"u8": 8, "s8": 8, "b8": 8, "u16": 16, "s16": 16, "b16": 16, "f16": 16, "bf16": 16, "u32": 32, "s32": 32, "b32": 32, "f32": 32,
        "f16x2": 32, "bf16x2": 32, "tf32": 32, "u64": 64, "s64": 64, "b64": 64, "f64": 64, "b128": 128, "pred": 1}
FLOATS = {"f16", "bf16", "f32", "f64"}
SREG = {"%tid.x": "t->tid[0]", "%tid.y": "t->tid[1]", "%tid.z": "t->tid[2]",
        "%ntid.x": "t->ntid[0]", "%ntid.y": "t->ntid[1]", "%ntid.z": "t->ntid[2]",
        "%ctaid.x": "t->ctaid[0]", "%ctaid.y": "t->ctaid[1]", "%ctaid.z": "t->ctaid[2]",
        "%nctaid.x": "t->nctaid[0]", "%nctaid.y": "t->nctaid[1]", "%nctaid.z": "t->nctaid[2]",
        "%laneid": "t->lane", "%warpid": "t->warp", "%lanemask_lt": "((1u << t->lane) - 1)",
        "%lanemask_le": "(u32)((2ull << t->lane) - 1)", "%lanemask_eq": "(1u << t->lane)",
        "%lanemask_ge": "~((1u << t->lane) - 1)", "%lanemask_gt": "~(u32)((2ull << t->lane) - 1)",
        "%clock": "0u", "%clock64": "0ull", "%globaltimer": "0ull", "%smid": "0u", "WARP_SZ": "32u",
        "%cluster_ctaid.x": "t->cluster_ctaid[0]", "%cluster_ctaid.y": "t->cluster_ctaid[1]", "%cluster_ctaid.z": "t->cluster_ctaid[2]",
        "%cluster_nctaid.x": "t->cluster_nctaid[0]", "%cluster_nctaid.y": "t->cluster_nctaid[1]", "%cluster_nctaid.z": "t->cluster_nctaid[2]",
        "%cluster_ctarank": "t->cluster_rank", "%cluster_nctarank": "(t->cluster_nctaid[0] * t->cluster_nctaid[1] * t->cluster_nctaid[2])",
        "%clusterid.x": "(t->ctaid[0] / t->cluster_nctaid[0])", "%clusterid.y": "(t->ctaid[1] / t->cluster_nctaid[1])",
        "%clusterid.z": "(t->ctaid[2] / t->cluster_nctaid[2])", "%nclusterid.x": "(t->nctaid[0] / t->cluster_nctaid[0])",
        "%nclusterid.y": "(t->nctaid[1] / t->cluster_nctaid[1])", "%nclusterid.z": "(t->nctaid[2] / t->cluster_nctaid[2])",
        "%globaltimer_lo": "0u", "%nwarpid": "64u", "%nsmid": "132u", "%gridid": "0u", "%dynamic_smem_size": "0u"}


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


class Translator:
    def __init__(self, module):
        self.m = module
        self.out = []
        self.static_shared = 0
        self.globals = {}
        self.unused = {}
        for d in module.variables:
            if d.space != "shared":
                self.unused[d.name] = d
            elif d.extern or d.size == 0:
                self.globals[d.name] = "(u64)t->dyn_shared"
            else:
                self.place_shared(d)

    def place_shared(self, d):
        self.static_shared = -(-self.static_shared // d.align) * d.align
        self.globals[d.name] = f"((u64)t->stat_shared + {self.static_shared})"
        self.static_shared += d.size

    def symbol(self, name):
        """The address of a variable, or None. NVRTC declares thousands, of which a kernel uses few: those become C."""
        if name in self.unused:
            self.out.append(self.variable(self.unused.pop(name)))
            self.globals[name] = f"((u64)V_{mangle(name)})"
        return self.globals.get(name)

    def variable(self, d):
        name = f"V_{mangle(d.name)}"
        init = ""
        if d.init:
            items = split_top(d.init.strip("{} \n\t")) if d.init.startswith("{") else [d.init]
            items = [self.const(x, d.elem) for x in items]
            init = " = {" + ",".join(items) + "}"
        return f"static {CTYPE.get(d.elem, 'u' + str(BITS[d.elem]))} {name}[{max(1, d.count)}] __attribute__((aligned({max(16, d.align)}))){init};"

    def const(self, x, elem):
        x = x.strip()
        if x.startswith(("0f", "0F", "0d", "0D")):
            return "0x" + x[2:] + "ull"
        return x

    def site(self, text):
        self.m.sites.append(text)
        return len(self.m.sites) - 1

    def run(self):
        for f in self.m.functions:
            if not f.is_entry:
                args = "".join(f", u8 *A{i}" for i in range(len(f.returns) + len(f.params)))
                self.out.append(f"static void F_{mangle(f.name)}(Thr *t{args});")
        entries = []
        for f in self.m.functions:
            body = FunctionBody(self, f)
            code = body.translate()
            self.out.append(code)
            if f.is_entry:
                entries.append((f, body))
        out = ['#include "ptx_runtime.h"', "static const FkRt *rt;"] + self.out
        table = []
        for f, body in entries:
            n = mangle(f.name)
            sizes = ",".join(str(p.size) for p in f.params) or "0"
            offsets = ",".join(str(o) for o in body.param_offsets) or "0"
            out.append(f"static const u32 PS_{n}[] = {{{sizes}}}; static const u32 PO_{n}[] = {{{offsets}}};")
            req = ",".join(map(str, f.reqntid))
            cluster = ",".join(map(str, f.cluster))
            sync = any(b.uses_sync for b in [body]) or self.any_sync
            table.append(f'{{"{f.name}", E_{n}, {len(f.params)}, PS_{n}, PO_{n}, {body.params_bytes}, {self.static_shared}, {int(sync)}, {{{req}}}, {{{cluster}}}}}')
        out.append("static const FkEntry entries[] = {" + ",\n".join(table) + "};")
        quoted = ",\n".join('"' + s.replace("\\", "\\\\").replace('"', '\\"').replace("\n", " ").replace("\t", " ") + '"' for s in self.m.sites)
        out.append("static const char *const sites[] = {" + (quoted or '""') + "};")
        out.append(f"static const FkModule module = {{{len(table)}, entries, sites, {len(self.m.sites)}}};")
        out.append("const FkModule *si_module(const FkRt *given) { rt = given; return &module; }")
        return "\n".join(out) + "\n"

    any_sync = False


class Scope:
    """What a block of braces declares: inline assembly has registers and labels of its own, under names that are used again."""

    def __init__(self, parent, number):
        self.parent, self.number = parent, number
        self.regs, self.families, self.labels = {}, {}, {}

    def prefix(self, letter):
        return f"{letter}{self.number or ''}_"


class FunctionBody(AsyncInstructions):
    def __init__(self, translator, function):
        self.t = translator
        self.f = function
        self.scopes = []
        self.scope = None
        self.used = {}
        self.code = []
        self.locals = {}
        self.uses_sync = False
        self.branch_targets = {}
        self.carry = False
        self.params = {}
        self.param_offsets = []
        offset = 0
        for i, p in enumerate(function.params):
            if function.is_entry:
                offset = -(-offset // p.align) * p.align
                self.params[p.name] = f"((u64)t->params + {offset})"
                self.param_offsets.append(offset)
                offset += p.size
            else:
                self.params[p.name] = f"(u64)A{i + len(function.returns)}"
        for i, p in enumerate(function.returns):
            self.params[p.name] = f"(u64)A{i}"
        self.params_bytes = offset

    # -- statements

    def statements(self, text):
        buf = ""
        i, n = 0, len(text)
        while i < n:
            c = text[i]
            if c == "{" and not buf.strip():
                yield "{"
                buf = ""
            elif c == "}" and not buf.strip():
                yield "}"
                buf = ""
            elif c == "{":
                j = text.index("}", i)
                buf += text[i:j + 1]
                i = j
            elif c == ";":
                yield buf.strip()
                buf = ""
            elif c == ":" and re.fullmatch(r"\s*[$%\w]+", buf):
                yield buf.strip() + ":"
                buf = ""
            else:
                buf += c
            i += 1
        if buf.strip():
            raise Unknown(f"rest of a body: {buf}")

    def find_labels(self, statements):
        scope = Scope(None, 0)
        self.scopes = [scope]
        for s in statements:
            if s == "{":
                scope = Scope(scope, len(self.scopes))
                self.scopes.append(scope)
            elif s == "}":
                scope = scope.parent
            elif s.endswith(":"):
                scope.labels[s[:-1]] = scope.prefix("L") + mangle(s[:-1])

    def label(self, name):
        scope = self.scope
        while scope:
            if name in scope.labels:
                return scope.labels[name]
            scope = scope.parent
        raise Unknown(f"label {name}")

    def translate(self):
        pending_label = None
        statements = [s for s in self.statements(self.f.body) if s]
        self.find_labels(statements)
        following = iter(self.scopes)
        self.scope = next(following)
        for s in statements:
            if s.endswith(":"):
                pending_label = s[:-1]
                self.code.append(f"{self.label(pending_label)}:;")
            elif s in "{}":
                self.code.append(s)
                self.scope = next(following) if s == "{" else self.scope.parent
            elif s.startswith("."):
                self.directive(s, pending_label)
            else:
                self.instruction(s)
        n = mangle(self.f.name)
        if self.f.is_entry:
            head = f"static void E_{n}(Thr *t) {{"
        else:
            args = "".join(f", u8 *A{i}" for i in range(len(self.f.returns) + len(self.f.params)))
            head = f"static void F_{n}(Thr *t{args}) {{"
        decls = []
        for name, bits in sorted(self.used.items()):
            ctype = "u8" if bits == 1 else f"u{bits}"
            decls.append(f"{ctype} {name} = 0;")
        if self.carry:
            decls.append("u32 CARRY = 0;")
        for name, d in self.locals.items():
            decls.append(f"u8 D_{mangle(name)}[{max(d.size, 1)}] __attribute__((aligned({max(16, d.align)})));")
        body = "\n".join(self.code)
        # A label that ends a block needs a statement; every label has an empty one.
        return head + "\n" + " ".join(decls) + "\n" + body + "\n}"

    def directive(self, s, label):
        if s.startswith(".reg"):
            m = re.match(r"\.reg\s*\.(\w+)\s+(.*)$", s, flags=re.S)
            bits = REG_BITS[m.group(1)]
            for part in m.group(2).split(","):
                part = part.strip()
                family = re.fullmatch(r"(%?[\w$]+)<(\d+)>", part)
                if family:
                    self.scope.families[family.group(1)] = bits
                else:
                    self.scope.regs[part] = (self.scope.prefix("R") + mangle(part.lstrip("%")), bits)
        elif s.startswith(".local"):
            d = Decl(s)
            self.locals[d.name] = d
        elif s.startswith(".shared"):
            self.t.place_shared(Decl(s))
        elif s.startswith(".param"):
            d = Decl(s)
            self.code.append(f"u8 B_{mangle(d.name)}[{max(16, d.size)}] __attribute__((aligned(16)));")
            self.params[d.name] = f"(u64)B_{mangle(d.name)}"
        elif s.startswith(".branchtargets"):
            self.branch_targets[label] = [x.strip() for x in s[len(".branchtargets"):].split(",")]
        elif s.startswith((".loc", ".pragma", ".callprototype", ".file")):
            pass
        else:
            raise Unknown(f"directive: {s}")

    # -- operands

    def reg(self, name):
        scope = self.scope
        while scope:
            found = scope.regs.get(name)
            if found is None:
                m = re.fullmatch(r"(%?[A-Za-z_$]+?)(\d+)", name)
                if m and m.group(1) in scope.families:
                    found = scope.regs[name] = (scope.prefix("R") + mangle(name.lstrip("%")), scope.families[m.group(1)])
            if found:
                self.used[found[0]] = found[1]
                return found
            scope = scope.parent
        return None

    def raw(self, op, bits=64):
        """An operand as unsigned bits, as wide as it is; immediates in `bits`."""
        op = op.strip()
        r = self.reg(op)
        if r:
            return r[0]
        if op in SREG:
            return SREG[op]
        if op in ("true", "false"):
            return "1" if op == "true" else "0"
        if re.fullmatch(r"0[fF][0-9a-fA-F]{8}", op):
            return "0x" + op[2:] + "u"
        if re.fullmatch(r"0[dD][0-9a-fA-F]{16}", op):
            return "0x" + op[2:] + "ull"
        if re.fullmatch(r"-?(0[xX][0-9a-fA-F]+|\d+)U?", op):
            value = int(op.rstrip("U"), 0)
            return f"{value & ((1 << 64) - 1)}ull" if bits == 64 else f"{value & ((1 << max(bits, 8)) - 1)}u"
        if op in self.params:
            return self.params[op]
        if op in self.locals:
            return f"((u64)D_{mangle(op)})"
        symbol = self.t.symbol(op)
        if symbol:
            return symbol
        m = re.fullmatch(r"(.+?)\s*\+\s*(-?\d+)", op)
        if m:
            return f"({self.raw(m.group(1))} + {m.group(2)})"
        raise Unknown(f"operand `{op}`")

    def read(self, op, ty):
        """An operand as a C value of its type."""
        if ty in ("f16x2", "bf16x2", "tf32"):
            return f"(u32){self.raw(op, 32)}"
        bits = BITS[ty]
        x = self.raw(op, bits)
        if ty == "f32":
            return f"asf({x})"
        if ty == "f64":
            return f"asd({x})"
        if ty == "f16":
            return f"h2f({x})"
        if ty == "bf16":
            return f"b2f({x})"
        if ty == "pred":
            return x
        return f"({CTYPE[ty]})({x})"

    def write(self, op, ty, value):
        op = op.strip()
        if op == "_":
            return f"(void)({value});"
        r = self.reg(op)
        if not r:
            raise Unknown(f"destination `{op}`")
        name, bits = r
        if ty == "f32":
            value = f"fas({value})"
        elif ty == "f64":
            value = f"das({value})"
        elif ty == "f16":
            value = f"f2h({value})"
        elif ty == "bf16":
            value = f"f2b({value})"
        elif ty == "pred":
            value = f"!!({value})"
        elif ty in CTYPE:
            value = f"({CTYPE[ty]})({value})"
        return f"{name} = {value};"

    def address(self, op):
        inner = op.strip()
        if not inner.startswith("["):
            raise Unknown(f"address `{op}`")
        inner = inner[1:-1].strip()
        m = re.fullmatch(r"(.+?)\s*\+\s*(-?\d+)", inner)
        if m:
            return f"((u64){self.raw(m.group(1))} + ({m.group(2)}))"
        return f"((u64){self.raw(inner)})"

    @staticmethod
    def vector(op):
        op = op.strip()
        return split_top(op[1:-1]) if op.startswith("{") else [op]

    # -- instructions

    def emit(self, text):
        self.code.append(text)

    def instruction(self, s):
        source = " ".join(s.split())
        guard = None
        m = re.match(r"@(!?)([%\w$]+)\s+(.*)$", s, flags=re.S)
        if m:
            guard = f"{'!' if m.group(1) else ''}{self.raw(m.group(2))}"
            s = m.group(3)
        m = re.match(r"([\w.:]+)\s*(.*)$", s, flags=re.S)
        opcode, rest = m.group(1), m.group(2).strip()
        parts = [p for p in opcode.replace("::", "__").split(".")]
        ops = split_top(rest)
        mark = len(self.code)
        handler = getattr(self, "op_" + parts[0], None)
        if handler is None:
            raise Unknown(f"instruction: {source}")
        self.source = source
        try:
            handler(parts, ops)
        except (IndexError, KeyError, StopIteration, ValueError) as error:   # a form that the handler does not expect
            raise self.unknown() from error
        if guard:
            body = " ".join(self.code[mark:])
            del self.code[mark:]
            self.code.append(f"if ({guard}) {{ {body} }}")

    def unknown(self):
        return Unknown(f"instruction: {self.source}")

    @staticmethod
    def types(parts):
        return [p for p in parts[1:] if p in BITS]

    # moves

    def op_mov(self, p, o):
        ty = self.types(p)[-1]
        if o[0].startswith("{") and not o[1].startswith("{"):
            dst = self.vector(o[0])
            each = BITS[ty] // len(dst)
            src = self.raw(o[1], BITS[ty])
            self.emit("{ u%d X = %s; " % (max(BITS[ty], 8), src) + " ".join(
                self.write(d, f"b{each}", f"X >> {i * each}") for i, d in enumerate(dst) if d != "_") + " }")
            return
        if o[1].startswith("{"):
            src = self.vector(o[1])
            each = BITS[ty] // len(src)
            wide = f"u{BITS[ty]}"
            value = " | ".join(f"(({wide})(u{each}){self.raw(x, each)} << {i * each})" for i, x in enumerate(src))
            self.emit(self.write(o[0], ty, value))
            return
        if ty == "pred":
            self.emit(self.write(o[0], "pred", self.raw(o[1])))
            return
        bits = f"b{BITS[ty]}"
        self.emit(self.write(o[0], bits, self.raw(o[1], BITS[ty])))

    def op_cvta(self, p, o):
        self.emit(self.write(o[0], "b64", self.raw(o[1])))

    def op_ld(self, p, o):
        self.memory(p, o, load=True)

    op_ldu = op_ld

    def op_st(self, p, o):
        self.memory(p, o, load=False)

    def memory(self, p, o, load):
        ty = self.types(p)[-1]
        space = next((x for x in p if x.split("__")[0] in ("global", "shared", "local", "param", "const")), "")
        count = next((int(x[1:]) for x in p if re.fullmatch(r"v[248]", x)), 1)
        width = BITS[ty] // 8
        reg, mem = (o[0], o[1]) if load else (o[1], o[0])
        regs = self.vector(reg)
        address = self.address(mem)
        c = CTYPE.get(ty) or f"u{BITS[ty]}"
        code = f"{{ u64 AD = {address}; "
        if space.split("__")[0] not in ("param", "local", "const"):
            site = self.t.site(self.source)
            code += f"CHECK(t, {site}, AD, {width * count}, {int(not load)}); "
        values = []
        for i, r in enumerate(regs):
            at = f"*({c} *)(AD + {i * width})"
            if load:
                values.append(at)
            else:
                code += f"{at} = ({c})({self.raw(r, BITS[ty])}); "
        if load:
            for i, v in enumerate(values):
                code += f"{c} X{i} = {v}; "
            for i, r in enumerate(regs):
                if r.strip() != "_":
                    code += self.write(r, ty if ty in CTYPE else f"b{BITS[ty]}", f"X{i}") + " "
        self.emit(code + "}")

    # arithmetic

    def float_op(self, p, dst, srcs, make, ty):
        """`make(values)` gives a C expression in float (or double for f64)."""
        if ty in ("f16x2", "bf16x2"):
            half = "f16" if ty == "f16x2" else "bf16"
            get = "h2f" if half == "f16" else "b2f"
            put = "f2h" if half == "f16" else "f2b"
            halves = []
            for shift in (0, 16):
                values = [f"{get}((u16)((u32){self.raw(x, 32)} >> {shift}))" for x in srcs]
                e = make(values, half)
                if "relu" in p:
                    e = f"maxf_nan({e}, 0.0f)"
                halves.append(f"((u32){put}({e}) << {shift})")
            self.emit(self.write(dst, "b32", " | ".join(halves)))
            return
        values = [self.read(x, ty) for x in srcs]
        if ty == "f32" and "ftz" in p:
            values = [f"ftz({v})" for v in values]
        e = make(values, ty)
        if ty == "f32" and "ftz" in p:
            e = f"ftz({e})"
        if "sat" in p:
            e = f"satd({e})" if ty == "f64" else f"satf({e})"
        if "relu" in p:
            e = f"maxf_nan({e}, 0.0f)"
        self.emit(self.write(dst, ty, e))

    def directed(self, p, ty):
        """How the result is rounded, if not to the nearest: m(inus infinity), p(lus infinity), z(ero)."""
        way = next((x[1] for x in p if x in ("rm", "rp", "rz")), None)
        if way and ty != "f32":
            raise self.unknown()
        return way

    def is_float(self, ty):
        return ty in FLOATS or ty in ("f16x2", "bf16x2")

    def binary(self, p, o, sym):
        ty = self.types(p)[-1]
        if self.is_float(ty):
            way = self.directed(p, ty)
            self.float_op(p, o[0], o[1:], lambda v, _: f"add_directed({v[0]}, {sym}{v[1]}, '{way}')" if way else f"({v[0]} {sym} {v[1]})", ty)
            return
        a, b = self.read(o[1], ty), self.read(o[2], ty)
        if "cc" in p:
            self.carry = True
            u = f"u{BITS[ty]}"
            if sym == "+":
                self.emit(f"{{ {u} X = ({u})({a}), Y = ({u})({b}), Z = X + Y; CARRY = Z < X; {self.write(o[0], 'b' + str(BITS[ty]), 'Z')} }}")
            else:
                self.emit(f"{{ {u} X = ({u})({a}), Y = ({u})({b}), Z = X - Y; CARRY = X < Y; {self.write(o[0], 'b' + str(BITS[ty]), 'Z')} }}")
            return
        u = f"u{BITS[ty]}"
        if "sat" in p and ty == "s32":
            self.emit(self.write(o[0], ty, f"sat_int((double)({a}) {sym} (double)({b}), -2147483648.0, 2147483647.0, -2147483648LL, 2147483647u, 1)"))
            return
        self.emit(self.write(o[0], ty, f"({u})({a}) {sym} ({u})({b})"))

    def op_add(self, p, o):
        self.binary(p, o, "+")

    def op_sub(self, p, o):
        self.binary(p, o, "-")

    def op_addc(self, p, o):
        ty = self.types(p)[-1]
        u = f"u{BITS[ty]}"
        self.carry = True
        out = "CARRY = (Z < X) | (CARRY & (Z == X));" if "cc" in p else ""
        self.emit(f"{{ {u} X = {self.read(o[1], ty)}, Y = {self.read(o[2], ty)}, Z = X + Y + CARRY; {out} {self.write(o[0], 'b' + str(BITS[ty]), 'Z')} }}")

    def op_subc(self, p, o):
        ty = self.types(p)[-1]
        u = f"u{BITS[ty]}"
        self.carry = True
        out = "CARRY = (X < Y) | (CARRY & (X == Y));" if "cc" in p else ""
        self.emit(f"{{ {u} X = {self.read(o[1], ty)}, Y = {self.read(o[2], ty)}, Z = X - Y - CARRY; {out} {self.write(o[0], 'b' + str(BITS[ty]), 'Z')} }}")

    def product(self, p, ty, a, b):
        bits = BITS[ty]
        signed = ty.startswith("s")
        wide = {8: "s16", 16: "s32", 32: "s64", 64: "__int128"}[bits] if signed else {8: "u16", 16: "u32", 32: "u64", 64: "u128"}[bits]
        if "wide" in p:
            return f"(({wide})({a}) * ({wide})({b}))", ("s" if signed else "u") + str(bits * 2)
        if "hi" in p:
            return f"((({wide})({a}) * ({wide})({b})) >> {bits})", ty
        if "24" in "".join(p[0]):
            raise self.unknown()
        return f"((u{max(bits, 32)})({a}) * (u{max(bits, 32)})({b}))", ty

    def op_mul(self, p, o):
        ty = self.types(p)[-1]
        if self.is_float(ty):
            way = self.directed(p, ty)
            self.float_op(p, o[0], o[1:], lambda v, _: f"round_directed((double){v[0]} * {v[1]}, 0, '{way}')" if way else f"({v[0]} * {v[1]})", ty)
            return
        e, out = self.product(p, ty, self.read(o[1], ty), self.read(o[2], ty))
        self.emit(self.write(o[0], out, e))

    def op_mad(self, p, o):
        ty = self.types(p)[-1]
        if self.is_float(ty):
            return self.op_fma(p, o)
        e, out = self.product(p, ty, self.read(o[1], ty), self.read(o[2], ty))
        u = f"u{BITS[out]}"
        if "cc" in p:
            self.carry = True
            self.emit(f"{{ {u} X = ({u})({e}), Y = ({u}){self.read(o[3], out)}, Z = X + Y; CARRY = Z < X; {self.write(o[0], out, 'Z')} }}")
            return
        self.emit(self.write(o[0], out, f"({u})({e}) + ({u})({self.read(o[3], out)})"))

    def op_madc(self, p, o):
        ty = self.types(p)[-1]
        e, out = self.product(p, ty, self.read(o[1], ty), self.read(o[2], ty))
        u = f"u{BITS[out]}"
        self.carry = True
        cc = "CARRY = (Z < X) | (CARRY & (Z == X));" if "cc" in p else ""
        self.emit(f"{{ {u} X = ({u})({e}), Y = ({u}){self.read(o[3], out)}, Z = X + Y + CARRY; {cc} {self.write(o[0], out, 'Z')} }}")

    def op_fma(self, p, o):
        ty = self.types(p)[-1]
        way = self.directed(p, ty)

        def make(v, each):
            if way:
                return f"add_directed((double){v[0]} * {v[1]}, {v[2]}, '{way}')"
            if each == "f64":
                return f"fma({v[0]}, {v[1]}, {v[2]})"
            if each == "f32":
                return f"fmaf({v[0]}, {v[1]}, {v[2]})"
            # The product of two halves is exact in a double; an odd float keeps the second rounding right.
            return f"d2f_odd((double){v[0]} * (double){v[1]} + (double){v[2]})"
        self.float_op(p, o[0], o[1:], make, ty)

    def op_div(self, p, o):
        ty = self.types(p)[-1]
        if self.is_float(ty):
            if self.directed(p, ty):
                raise self.unknown()
            self.float_op(p, o[0], o[1:], lambda v, _: f"({v[0]} / {v[1]})", ty)
            return
        u = f"u{BITS[ty]}"
        a, b = self.read(o[1], ty), self.read(o[2], ty)
        c = CTYPE[ty]
        self.emit(f"{{ {c} X = {a}, Y = {b}; " + self.write(o[0], ty, f"Y == 0 ? ({c})~0ull : ({c})(Y == ({c})-1 && (({c})-1 < 0) ? ({u})0 - ({u})X : ({u})(X / Y))") + " }")

    def op_rem(self, p, o):
        ty = self.types(p)[-1]
        c = CTYPE[ty]
        a, b = self.read(o[1], ty), self.read(o[2], ty)
        self.emit(f"{{ {c} X = {a}, Y = {b}; " + self.write(o[0], ty, f"Y == 0 ? X : (Y == ({c})-1 && (({c})-1 < 0)) ? ({c})0 : ({c})(X % Y)") + " }")

    def op_neg(self, p, o):
        ty = self.types(p)[-1]
        if ty in ("f16x2", "bf16x2"):
            self.emit(self.write(o[0], "b32", f"{self.raw(o[1], 32)} ^ 0x80008000u"))
        elif ty in ("f16", "bf16"):
            self.emit(self.write(o[0], "b16", f"{self.raw(o[1], 16)} ^ 0x8000u"))
        elif ty == "f32":
            self.emit(self.write(o[0], "b32", f"{self.raw(o[1], 32)} ^ 0x80000000u"))
        elif ty == "f64":
            self.emit(self.write(o[0], "b64", f"{self.raw(o[1], 64)} ^ 0x8000000000000000ull"))
        else:
            self.emit(self.write(o[0], ty, f"(u{BITS[ty]})0 - (u{BITS[ty]}){self.read(o[1], ty)}"))

    def op_abs(self, p, o):
        ty = self.types(p)[-1]
        if ty in ("f16x2", "bf16x2"):
            self.emit(self.write(o[0], "b32", f"{self.raw(o[1], 32)} & 0x7fff7fffu"))
        elif ty in ("f16", "bf16"):
            self.emit(self.write(o[0], "b16", f"{self.raw(o[1], 16)} & 0x7fffu"))
        elif ty == "f32":
            self.emit(self.write(o[0], "b32", f"{self.raw(o[1], 32)} & 0x7fffffffu"))
        elif ty == "f64":
            self.emit(self.write(o[0], "b64", f"{self.raw(o[1], 64)} & 0x7fffffffffffffffull"))
        else:
            a = self.read(o[1], ty)
            self.emit(self.write(o[0], ty, f"({a}) < 0 ? (u{BITS[ty]})0 - (u{BITS[ty]})({a}) : (u{BITS[ty]})({a})"))

    def extreme(self, p, o, which):
        ty = self.types(p)[-1]
        if "xorsign" in p or "abs" in p:
            raise self.unknown()
        if self.is_float(ty):
            def make(v, each):
                if each == "f64":
                    return f"{which}d_({v[0]}, {v[1]})"
                fn = f"{which}f_nan" if "NaN" in p else f"{which}f_"
                e = f"{fn}({v[0]}, {v[1]})"
                return f"{fn}({e}, {v[2]})" if len(v) == 3 else e
            self.float_op([x for x in p if x != "relu"], o[0], o[1:], make, ty)
            if "relu" in p:
                raise self.unknown()
            return
        if ty in ("u16x2", "s16x2"):
            raise self.unknown()
        a, b = self.read(o[1], ty), self.read(o[2], ty)
        self.emit(self.write(o[0], ty, f"({a}) {'<' if which == 'min' else '>'} ({b}) ? ({a}) : ({b})"))

    def op_min(self, p, o):
        self.extreme(p, o, "min")

    def op_max(self, p, o):
        self.extreme(p, o, "max")

    def function(self, p, o, f32, f64=None):
        ty = self.types(p)[-1]
        if self.directed(p, ty):
            raise self.unknown()
        self.float_op(p, o[0], o[1:], lambda v, each: (f64 or f32).format(v[0]) if each == "f64" else f32.format(v[0]), ty)

    def op_sqrt(self, p, o):
        self.function(p, o, "sqrtf({})", "sqrt({})")

    def op_rsqrt(self, p, o):
        self.function(p, o, "(float)(1.0 / sqrt((double){}))", "(1.0 / sqrt({}))")

    def op_rcp(self, p, o):
        self.function(p, o, "(1.0f / {})", "(1.0 / {})")

    def op_sin(self, p, o):
        self.function(p, o, "sinf({})")

    def op_cos(self, p, o):
        self.function(p, o, "cosf({})")

    def op_ex2(self, p, o):
        self.function(p, o, "exp2f({})")

    def op_lg2(self, p, o):
        self.function(p, o, "log2f({})")

    def op_tanh(self, p, o):
        self.function(p, o, "tanhf({})")

    def op_copysign(self, p, o):
        ty = self.types(p)[-1]
        # copysign d, a, b: the sign of a, the rest of b.
        fn = "copysign" if ty == "f64" else "copysignf"
        self.emit(self.write(o[0], ty, f"{fn}({self.read(o[2], ty)}, {self.read(o[1], ty)})"))

    def op_testp(self, p, o):
        ty = self.types(p)[-1]
        v = self.read(o[1], ty)
        test = {"finite": f"isfinite({v})", "infinite": f"isinf({v})", "number": f"!isnan({v})", "notanumber": f"isnan({v})",
                "normal": f"isnormal({v})", "subnormal": f"(fpclassify({v}) == FP_SUBNORMAL)"}[p[1]]
        self.emit(self.write(o[0], "pred", test))

    # comparisons

    COMPARE = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "lo": "<", "ls": "<=", "hi": ">", "hs": ">="}

    def comparison(self, cmp, ty, a, b):
        if self.is_float(ty):
            if cmp == "num":
                return f"(!isnan({a}) && !isnan({b}))"
            if cmp == "nan":
                return f"(isnan({a}) || isnan({b}))"
            if cmp == "ne":  # ordered
                return f"(!isnan({a}) && !isnan({b}) && {a} != {b})"
            if cmp.endswith("u") and cmp[:-1] in self.COMPARE:
                return f"(isnan({a}) || isnan({b}) || {a} {self.COMPARE[cmp[:-1]]} {b})"
            return f"({a} {self.COMPARE[cmp]} {b})"
        if cmp in ("lo", "ls", "hi", "hs"):
            u = f"u{BITS[ty]}"
            return f"(({u}){a} {self.COMPARE[cmp]} ({u}){b})"
        return f"({a} {self.COMPARE[cmp]} {b})"

    def op_setp(self, p, o):
        ty = self.types(p)[-1]
        cmp = p[1]
        boolean = next((x for x in p[2:] if x in ("and", "or", "xor")), None)
        if ty in ("f16x2", "bf16x2"):
            get = "h2f" if ty == "f16x2" else "b2f"
            first, second = [x.strip() for x in o[0].split("|")]
            code = ""
            for i, dst in enumerate((first, second)):
                a, b = (f"{get}((u16)((u32){self.raw(x, 32)} >> {16 * i}))" for x in o[1:3])
                e = self.comparison(cmp, ty, a, b)
                if boolean:
                    e = f"({e} {({'and': '&', 'or': '|', 'xor': '^'})[boolean]} {self.predicate(o[3])})"
                code += f"u8 Q{i} = {e}; "
            self.emit("{ " + code + self.write(first, "pred", "Q0") + self.write(second, "pred", "Q1") + " }")
            return
        a, b = self.read(o[1], ty), self.read(o[2], ty)
        e = self.comparison(cmp, ty, a, b)
        dests = [x.strip() for x in o[0].split("|")]
        if boolean:
            c = self.predicate(o[3])
            sym = {"and": "&", "or": "|", "xor": "^"}[boolean]
            code = f"{{ u8 Q = {e}, C = {c}; " + self.write(dests[0], "pred", f"Q {sym} C")
            if len(dests) > 1:
                code += self.write(dests[1], "pred", f"!Q {sym} C")
            self.emit(code + " }")
            return
        self.emit(f"{{ u8 Q = {e}; " + self.write(dests[0], "pred", "Q") + (self.write(dests[1], "pred", "!Q") if len(dests) > 1 else "") + " }")

    def predicate(self, op):
        op = op.strip()
        return f"!{self.raw(op[1:])}" if op.startswith("!") else self.raw(op)

    def op_set(self, p, o):
        out, ty = self.types(p)[-2:]
        if len(o) > 3:
            raise self.unknown()
        if ty in ("f16x2", "bf16x2"):
            get = "h2f" if ty == "f16x2" else "b2f"
            yes = {"f16x2": "0x3c00u", "bf16x2": "0x3f80u"}.get(out, "0xffffu")
            halves = []
            for shift in (0, 16):
                a, b = (f"{get}((u16)((u32){self.raw(x, 32)} >> {shift}))" for x in o[1:3])
                halves.append(f"({self.comparison(p[1], ty, a, b)} ? {yes} << {shift} : 0)")
            self.emit(self.write(o[0], "b32", " | ".join(halves)))
            return
        e = self.comparison(p[1], ty, self.read(o[1], ty), self.read(o[2], ty))
        if out in FLOATS:
            self.emit(self.write(o[0], out, f"{e} ? 1.0f : 0.0f"))
        else:
            self.emit(self.write(o[0], out, f"{e} ? ~0ull : 0ull"))

    def op_selp(self, p, o):
        bits = f"b{BITS[self.types(p)[-1]]}"
        self.emit(self.write(o[0], bits, f"{self.raw(o[3])} ? {self.read(o[1], bits)} : {self.read(o[2], bits)}"))

    def op_slct(self, p, o):
        ty, by = self.types(p)[-2:]
        bits = f"b{BITS[ty]}"
        self.emit(self.write(o[0], bits, f"{self.read(o[3], by)} >= 0 ? {self.read(o[1], bits)} : {self.read(o[2], bits)}"))

    # bits

    def logic(self, p, o, sym):
        ty = self.types(p)[-1]
        self.emit(self.write(o[0], ty, f"{self.read(o[1], ty)} {sym} {self.read(o[2], ty)}"))

    def op_and(self, p, o):
        self.logic(p, o, "&")

    def op_or(self, p, o):
        self.logic(p, o, "|")

    def op_xor(self, p, o):
        self.logic(p, o, "^")

    def op_not(self, p, o):
        ty = self.types(p)[-1]
        self.emit(self.write(o[0], ty, f"!{self.raw(o[1])}" if ty == "pred" else f"~{self.read(o[1], ty)}"))

    def op_lop3(self, p, o):
        self.emit(self.write(o[0], "b32", f"lop3_({self.raw(o[1], 32)}, {self.raw(o[2], 32)}, {self.raw(o[3], 32)}, {self.raw(o[4], 32)})"))

    def op_shl(self, p, o):
        ty = self.types(p)[-1]
        n = BITS[ty]
        self.emit(f"{{ u32 S = {self.read(o[2], 'u32')}; " + self.write(o[0], ty, f"S >= {n} ? 0 : (u{n})((u{n}){self.read(o[1], ty)} << S)") + " }")

    def op_shr(self, p, o):
        ty = self.types(p)[-1]
        n = BITS[ty]
        a = self.read(o[1], ty)
        over = f"({a} < 0 ? -1 : 0)" if ty.startswith("s") else "0"
        self.emit(f"{{ u32 S = {self.read(o[2], 'u32')}; " + self.write(o[0], ty, f"S >= {n} ? {over} : ({a} >> S)") + " }")

    def op_shf(self, p, o):
        amount = f"({self.read(o[3], 'u32')} & 31)" if "wrap" in p else f"({self.read(o[3], 'u32')} > 32 ? 32 : {self.read(o[3], 'u32')})"
        both = f"(((u64){self.read(o[2], 'u32')} << 32) | {self.read(o[1], 'u32')})"
        if p[1] == "l":
            self.emit(self.write(o[0], "b32", f"({both} << {amount}) >> 32"))
        else:
            self.emit(self.write(o[0], "b32", f"{both} >> {amount}"))

    def op_bfe(self, p, o):
        ty = self.types(p)[-1]
        a, pos, n = self.read(o[1], ty), self.read(o[2], "u32"), self.read(o[3], "u32")
        if ty == "u32":
            e = f"bfe_u({a}, {pos}, {n}, 32)"
        elif ty == "u64":
            e = f"bfe_u64({a}, {pos}, {n})"
        else:
            e = f"bfe_s({a}, {pos}, {n}, {BITS[ty]})"
        self.emit(self.write(o[0], ty, e))

    def op_bfi(self, p, o):
        ty = self.types(p)[-1]
        self.emit(self.write(o[0], ty, f"bfi_({self.read(o[1], ty)}, {self.read(o[2], ty)}, {self.read(o[3], 'u32')}, {self.read(o[4], 'u32')}, {BITS[ty]})"))

    def op_prmt(self, p, o):
        if len(p) > 2:
            raise self.unknown()
        self.emit(self.write(o[0], "b32", f"prmt_({self.read(o[1], 'u32')}, {self.read(o[2], 'u32')}, {self.read(o[3], 'u32')})"))

    def op_popc(self, p, o):
        ty = self.types(p)[-1]
        self.emit(self.write(o[0], "u32", f"__builtin_popcountll({self.read(o[1], ty)})"))

    def op_clz(self, p, o):
        ty = self.types(p)[-1]
        a = self.read(o[1], ty)
        n = BITS[ty]
        self.emit(self.write(o[0], "u32", f"({a}) ? __builtin_clzll((u64){a}) - {64 - n} : {n}"))

    def op_brev(self, p, o):
        ty = self.types(p)[-1]
        self.emit(self.write(o[0], ty, f"brev{BITS[ty]}({self.read(o[1], ty)})"))

    def op_bfind(self, p, o):
        ty = self.types(p)[-1]
        if ty.startswith("s"):
            raise self.unknown()
        a = self.read(o[1], ty)
        e = f"(({a}) ? 63 - __builtin_clzll((u64){a}) : 0xffffffffu)"
        if "shiftamt" in p:
            e = f"(({a}) ? {BITS[ty] - 1} - (63 - __builtin_clzll((u64){a})) : 0xffffffffu)"
        self.emit(self.write(o[0], "u32", e))

    def op_dp4a(self, p, o):
        ta, tb = ("s8" if x == "s32" else "u8" for x in self.types(p)[-2:])
        a, b = self.read(o[1], "u32"), self.read(o[2], "u32")
        e = " + ".join(f"(s32)({ta})({a} >> {8 * i}) * (s32)({tb})({b} >> {8 * i})" for i in range(4))
        self.emit(self.write(o[0], "b32", f"{e} + (s32){self.read(o[3], 'u32')}"))

    # conversions

    def op_cvt(self, p, o):
        types = self.types(p)
        out, src = types[-2], types[-1]
        mods = [x for x in p[1:] if x not in BITS]
        if out in ("bf16x2", "f16x2"):
            fn = "f2b" if out == "bf16x2" else "f2h"
            if "rz" in mods:
                if fn != "f2b":
                    raise self.unknown()
                fn = "f2b_rz"
            a, b = (self.read(x, "f32") for x in o[1:3])
            if "relu" in mods:
                a, b = (f"maxf_nan({x}, 0.0f)" for x in (a, b))
            # The first source is the upper half.
            self.emit(self.write(o[0], "b32", f"((u32){fn}({a}) << 16) | {fn}({b})"))
            return
        if out == "tf32":
            self.emit(self.write(o[0], "b32", f"f2tf32({self.read(o[1], 'f32')})"))
            return
        v = self.read(o[1], src)
        if src in FLOATS and out in FLOATS:
            if "ftz" in mods and src == "f32":
                v = f"ftz({v})"
            rounding = next((x for x in mods if x in ("rni", "rzi", "rmi", "rpi")), None)
            if rounding:
                base = {"rni": "nearbyint", "rzi": "trunc", "rmi": "floor", "rpi": "ceil"}[rounding]
                v = f"{base}({v})" if src == "f64" else f"{base}f({v})"
            elif BITS[out] < BITS[src] and "rn" not in mods:
                if out == "bf16" and "rz" in mods:
                    self.emit(self.write(o[0], "b16", f"f2b_rz({v})"))
                    return
                raise self.unknown()
            if src == "f64" and out in ("f16", "bf16"):
                v = f"d2f_odd({v})"
            elif src == "f64" and out == "f32":
                v = f"(float)({v})"
            if "sat" in mods:
                v = f"satd({v})" if out == "f64" else f"satf({v})"
            if "relu" in mods:
                v = f"maxf_nan({v}, 0.0f)"
            if "ftz" in mods and out == "f32":
                v = f"ftz({v})"
            self.emit(self.write(o[0], out, v))
            return
        if src in FLOATS:
            base = {"rni": "nearbyint", "rzi": "trunc", "rmi": "floor", "rpi": "ceil"}[next(x for x in mods if x in ("rni", "rzi", "rmi", "rpi"))]
            bits, signed = BITS[out], out.startswith("s")
            lo, hi = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if signed else (0, 2 ** bits - 1)
            nan = "0" if bits < 64 else "0x8000000000000000ull"
            lo_c = f"(s64)0x{lo & (2 ** 64 - 1):x}ull"
            e = f"isnan(V) ? {nan} : sat_int({base}(V), {float(lo)!r}, {float(hi)!r}, {lo_c}, 0x{hi:x}ull, {int(signed)})"
            self.emit(f"{{ double V = (double)({v}); " + self.write(o[0], out, e) + " }")
            return
        if out in FLOATS:
            if out == "f64":
                e = f"(double)({v})"
            elif out == "f32":
                e = f"(float)({v})"
            elif BITS[src] <= 32:
                e = f"d2f_odd((double)({v}))"
            else:
                e = f"d2f_odd((double)({v}))"
            if "rz" in mods or "rm" in mods or "rp" in mods:
                raise self.unknown()
            self.emit(self.write(o[0], out, e))
            return
        if "sat" in mods:
            bits, signed = BITS[out], out.startswith("s")
            lo, hi = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if signed else (0, 2 ** bits - 1)
            self.emit(f"{{ __int128 V = ({v}), LO = {lo}, HI = {hi}{'ull' if hi > 2**31 else ''}; " + self.write(o[0], out, "V < LO ? LO : V > HI ? HI : V") + " }")
            return
        # A register may be wider than the destination type: it is extended by its sign.
        r = self.reg(o[0].strip())
        if r and r[1] > BITS[out] and out.startswith("s"):
            self.emit(f"{r[0]} = (u{r[1]})(s{r[1]})({CTYPE[out]})({v});")
        else:
            self.emit(self.write(o[0], out, v))

    # control

    def op_bra(self, p, o):
        self.emit(f"goto {self.label(o[0])};")

    def op_brx(self, p, o):
        targets = self.branch_targets.get(o[1].strip())
        if targets is None:
            raise self.unknown()
        cases = " ".join(f"case {i}: goto {self.label(x)};" for i, x in enumerate(targets))
        self.emit(f"switch ({self.raw(o[0])}) {{ {cases} default: __builtin_unreachable(); }}")

    def op_ret(self, p, o):
        self.emit("return;")

    def op_exit(self, p, o):
        if not self.f.is_entry:
            raise Unknown("exit in a function")
        self.emit("return;")

    def op_trap(self, p, o):
        self.emit(f"rt->trap(t, {self.t.site(self.f.name + ': ' + self.source)});")

    op_brkpt = op_trap

    def op_call(self, p, o):
        returns = []
        if o[0].startswith("("):
            returns = split_top(o[0][1:-1])
            o = o[1:]
        name = o[0]
        args = split_top(o[1][1:-1]) if len(o) > 1 and o[1].startswith("(") else []
        if name == "__assertfail":
            return self.op_trap(p, o)
        if not any(f.name == name and not f.is_entry for f in self.t.m.functions):
            raise Unknown(f"call of {name}, which has no body here")
        values = "".join(f", (u8 *){self.params[x]}" for x in returns + args)
        self.emit(f"F_{mangle(name)}(t{values});")

    def op_membar(self, p, o):
        pass

    # Memory is in order here, a grid follows the one before it, registers are not counted.
    op_fence = op_prefetch = op_prefetchu = op_discard = op_applypriority = op_griddepcontrol = op_pmevent = op_setmaxnreg = op_membar
    op_createpolicy = op_membar

    def op_nanosleep(self, p, o):
        self.emit("rt->pause(t);")

    # meeting points

    def meet(self):
        self.uses_sync = True
        self.t.any_sync = True
        return self.t.site(self.source)

    def op_bar(self, p, o):
        if "cluster" in p:
            return self.cluster_barrier(p)
        site = self.meet()
        if p[1] == "warp":
            self.emit(f"rt->warp(t, {site}, {self.raw(o[0], 32)}, 0, rt->nop, 0);")
            return
        aligned = int(p[0] == "bar" or "aligned" in p)
        result = predicate = None
        if "red" in p:
            result, o, predicate = o[0], o[1:-1], self.predicate(o[-1])
        name, count = self.raw(o[0], 32) if o else "0", self.raw(o[1], 32) if len(o) > 1 else "0"
        if "arrive" in p:
            self.emit(f"rt->bar_arrive(t, {site}, {name}, {count});")
            return
        self.emit(f"t->a[0] = {predicate or 0}; rt->bar(t, {site}, {name}, {count}, {aligned});")
        if result:
            which = 0 if "popc" in p else 1 if "and" in p else 2
            self.emit(self.write(result, "pred" if which else "b32", f"t->o[{which}]"))

    op_barrier = op_bar

    def warp_op(self, fn, mask, operands, results, imm=(), aligned=0, address=None):
        site = self.meet()
        code = "{ "
        for i, x in enumerate(operands):
            code += f"t->a[{i}] = {x}; "
        if address:
            code += f"t->addr = {address}; "
        imm_name = "0"
        if imm:
            code += f"static const int IMM[] = {{{','.join(str(int(x)) for x in imm)}}}; "
            imm_name = "IMM"
        code += f"rt->warp(t, {site}, {mask}, {aligned}, rt->{fn}, {imm_name}); "
        for dst, ty, x in results:
            code += self.write(dst, ty, x) + " "
        self.emit(code + "}")

    def op_activemask(self, p, o):
        self.warp_op("activemask", "0u", [], [(o[0], "b32", "t->o[0]")])

    def op_shfl(self, p, o):
        mode = {"up": 0, "down": 1, "bfly": 2, "idx": 3}[p[2]]
        dests = [x.strip() for x in o[0].split("|")]
        results = [(dests[0], "b32", "t->o[0]")]
        if len(dests) > 1:
            results.append((dests[1], "pred", "t->o[1]"))
        self.warp_op("shfl", self.raw(o[4], 32), [self.raw(x, 32) for x in o[1:4]], results, (mode,))

    def op_vote(self, p, o):
        mode = {"all": 0, "any": 1, "uni": 2, "ballot": 3}[p[2]]
        ty = "b32" if mode == 3 else "pred"
        self.warp_op("vote", self.raw(o[2], 32), [self.predicate(o[1])], [(o[0], ty, "t->o[0]")], (mode,))

    def op_match(self, p, o):
        ty = self.types(p)[-1]
        wide = BITS[ty] == 64
        x = self.raw(o[1], BITS[ty])
        dests = [d.strip() for d in o[0].split("|")]
        results = [(dests[0], "b32", "t->o[0]")]
        if len(dests) > 1:
            results.append((dests[1], "pred", "t->o[1]"))
        self.warp_op("match", self.raw(o[2], 32), [f"(u32)({x})", f"(u32)((u64)({x}) >> 32)" if wide else "0"], results, ({"any": 0, "all": 1}[p[1]],))

    def op_redux(self, p, o):
        mode = {"add": 0, "min": 1, "max": 2, "and": 3, "or": 4, "xor": 5}[p[2]]
        ty = self.types(p)[-1]
        if ty == "f32":
            raise self.unknown()
        self.warp_op("redux", self.raw(o[2], 32), [self.raw(o[1], 32)], [(o[0], "b32", "t->o[0]")], (mode, ty.startswith("s")))

    def op_elect(self, p, o):
        dests = [x.strip() for x in o[0].split("|")]
        self.warp_op("elect", self.raw(o[1], 32), [], [(dests[0], "b32", "t->o[0]"), (dests[1], "pred", "t->o[1]")])

    def op_ldmatrix(self, p, o):
        if "m8n8" not in p or "b16" not in p:
            raise self.unknown()
        count = next(int(x[1:]) for x in p if re.fullmatch(r"x[124]", x))
        dst = self.vector(o[0])
        self.warp_op("ldmatrix", "~0u", [], [(d, "b32", f"t->o[{i}]") for i, d in enumerate(dst)], (count, "trans" in p), 1, self.address(o[1]))

    def op_stmatrix(self, p, o):
        if "m8n8" not in p or "b16" not in p:
            raise self.unknown()
        count = next(int(x[1:]) for x in p if re.fullmatch(r"x[124]", x))
        src = self.vector(o[1])
        self.warp_op("stmatrix", "~0u", [self.raw(x, 32) for x in src], [], (count, "trans" in p), 1, self.address(o[0]))

    TYPE_CODE = {"f16": 0, "bf16": 1, "tf32": 2, "f32": 3, "s8": 4, "u8": 5, "s32": 6, "e4m3": 7, "e5m2": 8}
    # What the tensor cores know: bytes of a row of A, and the types.
    MMA_ROWS = {"f16": (16, 32), "bf16": (16, 32), "tf32": (16, 32), "s8": (16, 32), "u8": (16, 32), "e4m3": (32,), "e5m2": (32,)}

    @staticmethod
    def shape(p):
        return next(tuple(int(x) for x in m.groups()) for m in (re.fullmatch(r"m(\d+)n(\d+)k(\d+)", x) for x in p) if m)

    def matrix_types(self, k, d_type, a_type, b_type, c_type):
        bytes_of = 4 if a_type == "tf32" else 2 if a_type in ("f16", "bf16") else 1
        sums = {"f16": ("f16", "f32"), "s8": ("s32",), "u8": ("s32",)}.get(a_type, ("f32",))
        mixes = ({"s8", "u8"}, {"e4m3", "e5m2"})
        if (k * bytes_of not in self.MMA_ROWS[a_type] or d_type not in sums or c_type != d_type
                or (a_type != b_type and not any({a_type, b_type} <= x for x in mixes))):
            raise self.unknown()
        return [self.TYPE_CODE[x] for x in (a_type, b_type, d_type)]

    def op_mma(self, p, o):
        m, n, k = self.shape(p)
        rest = p[p.index(f"m{m}n{n}k{k}") + 1:]
        if (m, n) != (16, 8) or rest[:2] != ["row", "col"] or len(rest) != 6:
            raise self.unknown()
        d_type, a_type, b_type, c_type = rest[2:]
        d, a, b, c = (self.vector(x) for x in o)
        imm = (k, *self.matrix_types(k, d_type, a_type, b_type, c_type), len(a), len(b))
        self.warp_op("mma", "~0u", [self.raw(x, 32) for x in a + b + c], [(x, "b32", f"t->o[{i}]") for i, x in enumerate(d)], imm, 1)

    def op_wgmma(self, p, o):
        if p[1] != "mma_async":   # fence, commit_group, wait_group: sums are there at once
            return
        m, n, k = self.shape(p)
        d_type, a_type, b_type = p[p.index(f"m{m}n{n}k{k}") + 1:][:3]
        types = self.matrix_types(k, d_type, a_type, b_type, d_type)
        is_float = d_type != "s32"
        d, a, b, scale = self.vector(o[0]), o[1], self.raw(o[2]), self.predicate(o[3]) if o[3].strip()[0] in "%!pP" else self.raw(o[3], 32)
        signs = [int(x, 0) for x in o[4:6]] if is_float else [1, 1]
        from_registers = a.startswith("{")
        transposed = [int(x, 0) for x in o[6:]]   # of A, unless it is in registers, and of B
        transposed = [0] * (2 - len(transposed)) + transposed
        words = [self.raw(x, 32) for x in self.vector(a)] if from_registers else [f"(u32){self.raw(a)}", f"(u32)((u64){self.raw(a)} >> 32)"]
        imm = (n, k, types[0], types[1], types[2], len(words) if from_registers else 0, *transposed, int(signs[0] < 0), int(signs[1] < 0))
        self.emit("{ u32 SUMS[] = {" + ", ".join(self.raw(x, 32) for x in d) + "};")
        self.warp_op("wgmma", "~0u", [scale, f"(u32){b}", f"(u32)((u64){b} >> 32)"] + words,
                     [(x, "b32", f"SUMS[{i}]") for i, x in enumerate(d)], imm, 1, "(u64)SUMS")
        self.emit("}")

    def op_wmma(self, p, o):
        m, n, k = self.shape(p)
        kind = p[1]
        if kind == "mma":
            layouts = [x for x in p if x in ("row", "col")]
            tail = p[p.index(f"m{m}n{n}k{k}") + 1:]
            tail = [x for x in tail if x in self.TYPE_CODE]
            if len(tail) == 2:  # f16: types of D and C
                d_type, c_type = tail
                a_type = "f16"
            else:
                d_type, a_type, _, c_type = tail
            d, a, b, c = (self.vector(x) for x in o)
            imm = (m, n, k, self.TYPE_CODE[a_type], self.TYPE_CODE[d_type], self.TYPE_CODE[c_type], len(a), len(b), len(c), len(d))
            self.warp_op("wmma_mma", "~0u", [self.raw(x, 32) for x in a + b + c], [(x, "b32", f"t->o[{i}]") for i, x in enumerate(d)], imm, 1)
            return
        which = {"a": 0, "b": 1, "c": 2, "d": 2}[p[2]]
        rows, cols = ((m, k), (k, n), (m, n))[which]
        ty = p[-1]
        col_major = int("col" in p)
        if kind == "load":
            regs, mem = self.vector(o[0]), o[1]
        else:
            regs, mem = self.vector(o[1]), o[0]
        stride = self.read(o[2], "u32") if len(o) > 2 else str(rows if col_major else cols)
        imm = (rows, cols, self.TYPE_CODE[ty], len(regs), col_major)
        if kind == "load":
            self.warp_op("wmma_load", "~0u", [stride], [(x, "b32", f"t->o[{i}]") for i, x in enumerate(regs)], imm, 1, self.address(mem))
        else:
            self.warp_op("wmma_store", "~0u", [stride] + [self.raw(x, 32) for x in regs], [], imm, 1, self.address(mem))

    # atomics: threads run one at a time, so plain reads and writes are atomic

    def op_atom(self, p, o, returns=True):
        ty = self.types(p)[-1]
        op = next(x for x in p if x in ("add", "min", "max", "and", "or", "xor", "exch", "cas", "inc", "dec"))
        if not returns:
            o = ["_"] + o
        n = BITS[ty]
        site = self.t.site(self.source)
        values = [self.vector(x) for x in o[2:4 if op == "cas" else 3]]
        count = len(values[0])
        code = f"{{ u64 AD = {self.address(o[1])}; CHECK(t, {site}, AD, {n // 8 * count}, 1); u{n} *PT = (u{n} *)AD, OLD[{count}]; "
        # All are read before any is written: a destination may be an operand too.
        for i in range(count):
            code += f"OLD[{i}] = PT[{i}]; "
        for i in range(count):
            code += f"PT[{i}] = {self.updated(op, ty, f'OLD[{i}]', *[v[i] for v in values])}; "
        for i, x in enumerate(self.vector(o[0])):
            if x.strip() != "_":
                code += self.write(x, f"b{n}", f"OLD[{i}]")
        self.emit(code + " }")

    def updated(self, op, ty, old, a, b=None):
        """What an atomic operation leaves in memory, as bits."""
        n, bits = BITS[ty], f"b{BITS[ty]}"
        if op == "cas":
            return f"{old} == {self.read(a, bits)} ? {self.read(b, bits)} : {old}"
        if op == "exch":
            return self.read(a, bits)
        if ty in ("f16x2", "bf16x2"):
            get, put = ("h2f", "f2h") if ty == "f16x2" else ("b2f", "f2b")
            halves = [(f"{get}((u16)({old} >> {s}))", f"{get}((u16)({self.raw(a, 32)} >> {s}))") for s in (0, 16)]
            return " | ".join(f"(u32){put}({self.combined(op, *x)}) << {s}" for x, s in zip(halves, (0, 16)))
        if self.is_float(ty):
            get, put = {"f32": ("asf", "fas"), "f64": ("asd", "das"), "f16": ("h2f", "f2h"), "bf16": ("b2f", "f2b")}[ty]
            return f"{put}({self.combined(op, f'{get}({old})', self.read(a, ty))})"
        c, v = CTYPE[ty], self.read(a, ty)
        return {"add": f"(u{n})({old} + {v})", "and": f"{old} & {v}", "or": f"{old} | {v}", "xor": f"{old} ^ {v}",
                "min": f"({c}){old} < {v} ? {old} : (u{n}){v}", "max": f"({c}){old} > {v} ? {old} : (u{n}){v}",
                "inc": f"{old} >= {v} ? 0 : {old} + 1", "dec": f"({old} == 0 || {old} > {v}) ? {v} : {old} - 1"}[op]

    def combined(self, op, a, b):
        return {"add": f"{a} + {b}", "min": f"minf_({a}, {b})", "max": f"maxf_({a}, {b})"}[op]

    def op_red(self, p, o):
        self.op_atom(p, o, returns=False)


def translate(text):
    return Translator(Module(text)).run()


HEAD = """#ifdef FK_CHECK
#define CHECK(t, site, ad, n, w) rt->check(t, site, ad, n, w)
#else
#define CHECK(t, site, ad, n, w) ((void)0)
#endif
"""


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    try:
        code = translate(open(sys.argv[1]).read())
    except Unknown as error:
        sys.exit(f"ptx2c: {error}")
    with open(sys.argv[2], "w") as out:
        out.write(code.replace('#include "ptx_runtime.h"\n', '#include "ptx_runtime.h"\n' + HEAD, 1))


if __name__ == "__main__":
    main()
