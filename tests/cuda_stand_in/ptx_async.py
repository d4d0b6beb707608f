"""The instructions of PTX for barrier objects, asynchronous copies and clusters: calls into async.c and simt.c."""

import re

REDUCTIONS = {"f16": "REDUCE_F16", "bf16": "REDUCE_BF16", "f32": "REDUCE_F32", "f64": "REDUCE_F64", "u32": "REDUCE_U32", "s32": "REDUCE_U32",
              "u64": "REDUCE_U64", "s64": "REDUCE_U64"}


class AsyncInstructions:
    """Handlers of a function's body, beside those of ptx2c.FunctionBody."""

    # barrier objects

    def op_mbarrier(self, p, o):
        what = p[1]
        if what == "pending_count":
            self.emit(self.write(o[0], "b32", f"{self.raw(o[1])} & 0xfffff"))
            return
        site = self.meet()

        def call(name, address, count="0", tx="0"):
            return f"rt->mbarrier(t, {site}, MBARRIER_{name}, {address}, {count}, {tx})"

        if what in ("init", "inval"):
            self.emit(call(what.upper(), self.address(o[0]), self.raw(o[1], 32) if what == "init" else "0") + ";")
        elif what in ("expect_tx", "complete_tx"):
            self.emit(call(what.upper(), self.address(o[0]), "0", self.raw(o[1], 32)) + ";")
        elif what in ("arrive", "arrive_drop"):
            # The last operand is the count of arrivals, or, with expect_tx, the bytes of this one.
            last = self.raw(o[2], 32) if len(o) > 2 else "1"
            count, tx = ("1", last) if "expect_tx" in p else (last, "0")
            self.emit(self.write(o[0], "b64", call(what.upper(), self.address(o[1]), count, tx)))
        elif what in ("test_wait", "try_wait"):
            phase = f"({self.raw(o[2], 32)} & 1)" if "parity" in p else f"({self.raw(o[2])} >> 61 & 1)"
            self.emit(self.write(o[0], "pred", call(what.upper(), self.address(o[1]), phase)))
        else:
            raise self.unknown()

    # copies

    def op_cp(self, p, o):
        if p[1] == "reduce":
            if "add" not in p:
                raise self.unknown()
            return self.bulk_copy(p, o)
        if p[1] != "async":
            raise self.unknown()
        is_bulk = int(p[2] == "bulk")
        if "commit_group" in p:
            self.meet()
            self.emit(f"rt->copy_commit(t, {is_bulk});")
        elif "wait_group" in p:
            self.meet()
            self.emit(f"rt->copy_wait(t, {is_bulk}, {self.raw(o[0], 32)}, {int('read' in p)});")
        elif "wait_all" in p:
            self.meet()
            self.emit("rt->copy_wait(t, 0, ~0u, 0);")
        elif "prefetch" in p:
            pass
        elif is_bulk:
            self.bulk_copy(p, o)
        elif p[2] == "mbarrier":
            self.copy(kind="COPY_ARRIVE", mbarrier=self.address(o[0]), is_counted=int("noinc" not in p))
        else:
            self.small_copy(o)

    def copy(self, **fields):
        site = self.meet()
        inner = ", ".join(f".{name} = {value}" for name, value in fields.items())
        self.emit(f"rt->copy(t, {site}, &(FkCopy){{{inner}}});")

    def small_copy(self, o):
        """cp.async [dst], [src], bytes{, bytes that are read | predicate that nothing is}{, cache policy}"""
        dst, src, size = self.address(o[0]), self.address(o[1]), self.raw(o[2], 32)
        filled = size
        r = self.reg(o[3].strip()) if len(o) > 3 else None
        if r and r[1] == 1:
            filled = f"({r[0]} ? 0 : {size})"
        elif len(o) > 3 and not (r and r[1] == 64):
            filled = self.raw(o[3], 32)
        site = self.t.site(self.source)
        # What is not read may lie anywhere.
        self.emit(f"CHECK(t, {site}, {dst}, {size}, 1); if ({filled} == {size}) CHECK(t, {site}, {src}, {size}, 0);")
        self.copy(kind="COPY_BYTES", dst=dst, src=src, bytes=size, filled=filled)

    def bulk_copy(self, p, o):
        """cp{.reduce}.async.bulk{.tensor}: towards shared memory with a barrier object, away from it in groups."""
        fields = {"is_bulk": 1}
        if "reduce" in p:
            fields["reduce"] = "REDUCE_U32" if "tensor" in p else REDUCTIONS[self.types(p)[-1]]
        completes = "mbarrier__complete_tx__bytes" in p
        if "tensor" in p:
            if any(x in p for x in ("tile__gather4", "tile__scatter4", "im2col__w", "im2col__w__128", "im2col_no_offs")):
                raise self.unknown()
            address, coordinates = self.tensor_address(o[0] if not completes else o[1])
            fields["at"] = "{" + ", ".join(f"(s32){self.raw(x, 32)}" for x in coordinates) + "}"
            rest = o[3:] if completes else o[2:]
            if completes:
                fields.update(kind="COPY_TENSOR_LOAD", dst=self.address(o[0]), src=address, mbarrier=self.address(o[2]))
            else:
                fields.update(kind="COPY_TENSOR_STORE", dst=address, src=self.address(o[1]))
            if "im2col" in p:
                fields.update(is_im2col=1, offset="{" + ", ".join(f"(u16){self.raw(x, 16)}" for x in self.vector(rest[0])) + "}")
                rest = rest[1:]
        else:
            size = self.raw(o[2], 32)
            fields.update(kind="COPY_BYTES", dst=self.address(o[0]), src=self.address(o[1]), bytes=size, filled=size)
            if completes:
                fields["mbarrier"] = self.address(o[3])
            rest = o[4:] if completes else o[3:]
            if "cp_mask" in p:
                raise self.unknown()
        if "multicast__cluster" in p:
            fields["ctas"] = self.raw(rest[0], 16)
        self.copy(**fields)

    def tensor_address(self, op):
        """[map, {coordinates}]"""
        m = re.fullmatch(r"\[\s*(.+?)\s*,\s*\{(.*)\}\s*\]", op.strip(), flags=re.S)
        if not m:
            raise self.unknown()
        return self.address(f"[{m.group(1)}]"), [x.strip() for x in m.group(2).split(",")]

    # clusters

    def op_mapa(self, p, o):
        site = self.meet()
        bits = f"b{self.types(p)[-1][1:]}"
        self.emit(self.write(o[0], bits, f"rt->mapa(t, {site}, (u64){self.raw(o[1])}, {self.raw(o[2], 32)})"))

    def op_getctarank(self, p, o):
        site = self.meet()
        self.emit(self.write(o[0], "b32", f"rt->cta_rank(t, {site}, (u64){self.raw(o[1])})"))

    def cluster_barrier(self, p):
        site = self.meet()
        self.emit(f"rt->cluster_{'arrive' if 'arrive' in p else 'wait'}(t, {site});")

    def op_isspacep(self, p, o):
        """Shared memory of the cluster, the stack of this thread, parameters; the rest is global."""
        address = self.raw(o[1])
        shared, local = f"rt->is_shared({address}, 1)", f"rt->is_local(t, {address})"
        param = f"({address} - (u64)t->params < {max(1, self.params_bytes)})"
        space = p[1]
        if space == "shared__cta":
            site = self.meet()
            e = f"{shared} && rt->cta_rank(t, {site}, {address}) == t->cluster_rank"
        else:
            e = {"shared": shared, "shared__cluster": shared, "local": local, "param": param, "param__entry": param,
                 "global": f"!{shared} && !{local} && !{param}"}[space]
        self.emit(self.write(o[0], "pred", e))
