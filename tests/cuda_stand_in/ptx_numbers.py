"""Arithmetic, comparisons, bits and conversions."""

from ptx_module import BITS, CTYPE, FLOATS


class NumberInstructions:
    """Handlers of a function's body. A handler gets the parts of the opcode and the operands, and emits C."""

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
        if out == "e4m3x2" and src == "f32" and {"rn", "satfinite"} == set(mods):
            a, b = (self.read(x, "f32") for x in o[1:3])
            self.emit(self.write(o[0], "b16", f"((u16)f2e4m3({a}) << 8) | f2e4m3({b})"))
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
            way = self.directed(p, out if BITS[src] <= 32 else None)
            self.emit(self.write(o[0], out, f"round_directed((double)({v}), 0, '{way}')" if way else e))
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
