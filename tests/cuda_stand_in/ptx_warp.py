"""Barriers of a block, warp-wide instructions and tensor cores: calls into simt.c and warp.c, where threads meet."""

import re

from ptx_module import BITS


class WarpInstructions:
    """Handlers of a function's body."""

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

    SUMS_ARRIVE = "/* sums of wgmma */"

    def with_sums(self, code):
        """What wgmma sums up is there after a wait, in the registers of its accumulators and where these were moved to meanwhile."""
        while more := {to for to, source in self.moves if source in self.sums} - self.sums:
            self.sums |= more
        arrive = " ".join(f"if ({x} >> 16 == WGMMA_TAG) {x} = rt->wgmma_sum(t, {x});" for x in sorted(self.sums))
        return code.replace(self.SUMS_ARRIVE, arrive)

    def op_wgmma(self, p, o):
        if p[1] == "fence":
            self.emit("t->is_fenced = 1;")
            return
        if p[1] == "commit_group":
            self.warp_op("wgmma_commit", "~0u", [], [], (), 1)
            return
        if p[1] == "wait_group":
            self.warp_op("wgmma_wait", "~0u", [], [], (int(o[0], 0),), 1)
            self.emit(self.SUMS_ARRIVE)
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
        self.sums |= {self.raw(x, 32) for x in d}
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
