#!/usr/bin/env python3
"""Sums up logs of the driver stand-in (STAND_IN_LOG).

usage: report.py LOG.json              kernels, calls, what ptxas said
       report.py LONG.json SHORT.json STEPS     what one step does: the difference of two runs over STEPS
"""

import collections
import json
import math
import re
import sys


def short(name):
    if name.startswith("cublasLt"):   # a product, with its sizes
        return name
    return re.sub(r"[0-9a-f]{12,}", "#", name)[:70]


def operations(kernel):
    """Of one launch, where it is a product of cuBLASLt."""
    sizes = re.match(r"cublasLt .* m (\d+) n (\d+) k (\d+) .*?(?: x (\d+))?$", kernel["name"])
    return 2 * math.prod(int(x or 1) for x in sizes.groups()) if sizes else 0


def load(path):
    with open(path) as file:
        return json.load(file)


def one(log):
    kernels = log["kernels"]
    run = [k for k in kernels if k["launches"]]
    print(f"sm_{log['compute_capability'].replace('.', '')}, driver {log['driver']}, order {log['order']}: {log['wall_s']:.1f} s, of that "
          f"kernels {log['kernels_run_s']:.1f}, ptx2c and cc {log['translate_s']:.1f}, ptxas {log['ptxas_s']:.1f}")
    print(f"modules {log['modules']} ({len({k['hash'] for k in kernels})} distinct texts), {sum(k['ptx_bytes'] for k in kernels) / 1024:.0f} KiB of PTX; "
          f"refused by ptxas {log['ptx_refused']}, not translated {log['not_translated']}, launches refused {log['refused_launches']}, "
          f"cut short {sum(k['cut_short'] for k in kernels)}")
    print(f"kernels launched {len(run)}, launches {sum(k['launches'] for k in run)}, blocks {sum(k['blocks'] for k in run)}")
    print(f"device memory peak {log['device_bytes_peak'] / 2**20:.1f} MiB in {log['device_allocations']} allocations, pinned {log['pinned_bytes_peak'] / 2**20:.1f} MiB; fault: {log['fault'] or 'none'}")
    for name, c in sorted(log["calls"].items(), key=lambda x: -x[1]["count"]):
        print(f"  {c['count']:8} {name} {c['bytes'] / 2**20:.2f} MiB" if c["bytes"] else f"  {c['count']:8} {name}")
    for note in log["notes"]:
        print(f"  note x{note['count']}: {note['what'][:200]}")
    spilled = [k for k in kernels if k["spill_stores"] or k["stack"]]
    print(f"with a stack frame or spills: {len(spilled)}; most registers {max((k['registers'] for k in kernels), default=0)}; "
          f"most shared memory {max((k['dynamic_shared'] + k['static_shared'] for k in run), default=0)} bytes")
    for k in sorted(spilled, key=lambda k: -k["spill_stores"])[:12]:
        print(f"  {k['hash']} {k['registers']} registers, stack {k['stack']}, spills {k['spill_stores']}/{k['spill_loads']}  {short(k['name'])}  launches {k['launches']}")
    errors = collections.Counter(k["error"].strip()[:160] for k in kernels if k["error"])
    for text, n in errors.most_common(20):
        print(f"  error x{n}: {text}")
    products = [k for k in run if operations(k)]
    if products:
        work = sum(k["launches"] * operations(k) for k in products)
        print(f"products of cuBLASLt: {sum(k['launches'] for k in products)} of {len(products)} kinds, {work / 1e9:.1f} GFLOP asked for")
    print("  launches  blocks  threads/block  registers  shared  name")
    for k in sorted(run, key=lambda k: -k["launches"])[:40]:
        x, y, z = k["block"]
        print(f"  {k['launches']:8} {k['blocks']:8} {x * y * z:6} {k['registers']:6} {k['dynamic_shared']:8}  {short(k['name'])}")


def difference(long, short_log, steps):
    a = {k["hash"] + k["name"]: k for k in long["kernels"]}
    b = {k["hash"] + k["name"]: k for k in short_log["kernels"]}
    rows = []
    for key, k in a.items():
        n = (k["launches"] - b.get(key, {}).get("launches", 0)) / steps
        blocks = (k["blocks"] - b.get(key, {}).get("blocks", 0)) / steps
        if n:
            rows.append((n, blocks, k))
    print(f"a step: {sum(r[0] for r in rows):.1f} launches of {len(rows)} kernels, {sum(r[1] for r in rows):.0f} blocks")
    one_block = sum(n for n, blocks, _ in rows if blocks <= n * 1.01)
    print(f"launches of one block: {one_block:.1f}; of fewer than 132 blocks: {sum(n for n, blocks, _ in rows if blocks < 132 * n):.1f}")
    print(f"products of cuBLASLt: {sum(n for n, _, k in rows if operations(k)):.1f}, {sum(n * operations(k) for n, _, k in rows) / 1e9:.1f} GFLOP")
    names = set(long["calls"]) | set(short_log["calls"])
    none = {"count": 0, "bytes": 0}
    for name in sorted(names):
        x, y = long["calls"].get(name, none), short_log["calls"].get(name, none)
        if x["count"] != y["count"]:
            print(f"  {(x['count'] - y['count']) / steps:8.1f} {name}, {(x['bytes'] - y['bytes']) / steps:.0f} bytes")
    for n, blocks, k in sorted(rows, key=lambda r: -r[0]):
        print(f"  {n:7.1f} x {blocks / n:7.1f} blocks of {k['block'][0] * k['block'][1] * k['block'][2]:4}, {k['registers']:3} registers  {k['hash']} {short(k['name'])}")


if len(sys.argv) == 2:
    one(load(sys.argv[1]))
elif len(sys.argv) == 4:
    difference(load(sys.argv[1]), load(sys.argv[2]), int(sys.argv[3]))
else:
    sys.exit(__doc__)
