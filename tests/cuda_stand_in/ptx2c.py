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
from ptx_module import BITS, CTYPE, REG_BITS, Decl, Module, Unknown, mangle, split_top
from ptx_numbers import NumberInstructions
from ptx_warp import WarpInstructions

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


class FunctionBody(NumberInstructions, WarpInstructions, AsyncInstructions):
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
        self.sums, self.moves = set(), []   # C names of the accumulators of wgmma; of moves, where to and from
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
        body = self.with_sums("\n".join(self.code))
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
        if BITS[ty] == 32 and self.reg(o[1].strip()):
            self.moves.append((self.raw(o[0]), self.raw(o[1])))
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

    def op_fence(self, p, o):
        if p[1:3] == ["proxy", "async"] and p[3:] != ["global"]:
            self.emit("rt->proxy_fence(t);")

    # Memory is in order here, a grid follows the one before it, registers are not counted.
    op_prefetch = op_prefetchu = op_discard = op_applypriority = op_griddepcontrol = op_pmevent = op_setmaxnreg = op_membar
    op_createpolicy = op_membar

    def op_nanosleep(self, p, o):
        self.emit("rt->pause(t);")

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
