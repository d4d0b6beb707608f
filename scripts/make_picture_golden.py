#!/usr/bin/env python3
"""tests/golden/pictures.json: image files of every kind, small, with the pixels that Pillow (13.0) makes of them.

usage: make_picture_golden.py

Of each: the file and its red, green and blue bytes as they are seen (base64), width, height, and by how much a byte may differ: nothing,
but 1 where something is half transparent, and what decoders of JPEG and WebP differ by where colors are stored in less detail. PNGs are
written here, since Pillow writes neither interlaced ones nor all depths. Of 16 bits the upper 8 are expected, where Pillow clips grey.
"""

import base64
import io
import json
import pathlib
import struct
import zlib

import numpy as np
from PIL import Image, ImageOps

WIDTH, HEIGHT = 21, 13
CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}
PASSES = [(0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2)]
rng = np.random.default_rng(0)


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def filtered(samples: np.ndarray, depth: int) -> bytes:
    """Rows of samples as a PNG has them, each with another filter."""
    if depth == 16:
        rows = samples.astype(">u2").reshape(len(samples), -1).view(np.uint8)
    else:
        flat = samples.astype(np.uint8).reshape(len(samples), -1)
        bits = np.unpackbits(flat[:, :, None], axis=2)[:, :, 8 - depth:].reshape(len(samples), -1)
        rows = np.packbits(bits, axis=1)
    step = max(1, samples.shape[2] * depth // 8)
    out, above = b"", np.zeros(rows.shape[1], int)
    for y, row in enumerate(rows.astype(int)):
        left = np.concatenate([np.zeros(step, int), row])[: len(row)]
        corner = np.concatenate([np.zeros(step, int), above])[: len(row)]
        guess = left + above - corner
        near = [abs(guess - x) for x in (left, above, corner)]
        paeth = np.where((near[0] <= near[1]) & (near[0] <= near[2]), left, np.where(near[1] <= near[2], above, corner))
        kind = y % 5
        out += bytes([kind]) + ((row - [0 * row, left, above, (left + above) // 2, paeth][kind]) % 256).astype(np.uint8).tobytes()
        above = row
    return out


def png(color: int, depth: int, samples: np.ndarray, interlaced: bool, extra: bytes = b"") -> bytes:
    if interlaced:
        parts = [samples[y::dy, x::dx] for x, y, dx, dy in PASSES]
        data = b"".join(filtered(part, depth) for part in parts if part.size)
    else:
        data = filtered(samples, depth)
    header = struct.pack(">IIBBBBB", samples.shape[1], samples.shape[0], depth, color, 0, 0, int(interlaced))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + extra + chunk(b"IDAT", zlib.compress(data)) + chunk(b"IEND", b"")


def on_white(image: Image.Image) -> np.ndarray:
    image = ImageOps.exif_transpose(image)
    if image.mode in ("P", "LA", "PA", "L", "RGB", "1") and (image.mode.endswith("A") or "transparency" in image.info):
        image = image.convert("RGBA")
    if image.mode == "RGBA":
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return np.asarray(image.convert("RGB"))


def smooth(channels: int) -> np.ndarray:
    y, x = np.mgrid[:HEIGHT, :WIDTH]
    base = np.stack([255 * x / WIDTH, 255 * y / HEIGHT, 255 * (x + y) / (WIDTH + HEIGHT), 200 - 5 * x], axis=-1)
    return base[..., :channels].clip(0, 255).astype(np.uint8)


def saved(image: Image.Image, form: str, **options) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


cases = []


def add(name: str, file: bytes, bound: int, expected: np.ndarray | None = None):
    expected = on_white(Image.open(io.BytesIO(file))) if expected is None else expected
    encoded = [base64.b64encode(data).decode() for data in (file, np.ascontiguousarray(expected).tobytes())]
    size = [expected.shape[1], expected.shape[0]]
    cases.append({"name": name, "size": size, "bound": bound, "file": encoded[0], "pixels": encoded[1]})


def add_pngs():
    palette = rng.integers(0, 256, (16, 3), dtype=np.uint8)
    for color, depths in [(0, [1, 2, 4, 8, 16]), (2, [8, 16]), (3, [1, 2, 4, 8]), (4, [8, 16]), (6, [8, 16])]:
        for depth in depths:
            most = min(1 << depth, 16 if color == 3 else 1 << 16)
            samples = rng.integers(0, most, (HEIGHT, WIDTH, CHANNELS[color]))
            upper = (samples >> 8 if depth == 16 else samples).astype(np.uint8)
            grey = np.repeat(upper, 3, axis=2) if color == 0 and depth == 16 else None
            if color == 4 and depth == 16:
                # Pillow has no such mode.
                two = Image.merge("LA", [Image.fromarray(upper[..., channel]) for channel in (0, 1)])
                grey = on_white(two)
            extra = chunk(b"PLTE", palette[:most].tobytes()) if color == 3 else b""
            for interlaced in (False, True):
                name = f"png, color {color}, {depth} bits{', interlaced' if interlaced else ''}"
                add(name, png(color, depth, samples, interlaced, extra), int(color >= 4), grey)
            if color == 3:
                half = chunk(b"tRNS", bytes([0, 128]))
                add(f"png, palette of {depth} bits, transparent", png(color, depth, samples, False, extra + half), 1)
            if color in (0, 2) and depth == 8:
                clear = chunk(b"tRNS", struct.pack(f">{CHANNELS[color]}H", *samples[3, 4]))
                add(f"png, color {color}, one of which is transparent", png(color, depth, samples, False, clear), 0)
    turned = Image.Exif()
    turned[0x0112] = 5
    add("png, turned", saved(Image.fromarray(smooth(3)), "PNG", exif=turned), 0)


def add_others():
    image = Image.fromarray(smooth(3))
    for name, options in [("4:4:4", {"subsampling": 0}), ("4:2:2", {"subsampling": 1}), ("4:2:0", {"subsampling": 2}),
                          ("progressive", {"subsampling": 0, "progressive": True})]:
        add(f"jpeg, {name}", saved(image, "JPEG", quality=90, **options), 4)
    add("jpeg, grey", saved(image.convert("L"), "JPEG"), 2)
    add("jpeg, cmyk", saved(Image.fromarray(smooth(4), "CMYK"), "JPEG", quality=95), 6)
    for orientation in range(1, 9):
        exif = Image.Exif()
        exif[0x0112] = orientation
        add(f"jpeg, orientation {orientation}", saved(image, "JPEG", exif=exif, subsampling=0), 4)
    drawn = [Image.fromarray(rng.integers(0, 9, (HEIGHT, WIDTH), dtype=np.uint8), "P") for _ in range(2)]
    for part in drawn:
        part.putpalette(rng.integers(0, 256, 27, dtype=np.uint8).tobytes())
    add("gif", saved(drawn[0], "GIF"), 0)
    add("gif, moving and transparent", saved(drawn[0], "GIF", save_all=True, append_images=drawn[1:], transparency=3), 0)
    clear = Image.fromarray(np.concatenate([smooth(3), rng.integers(0, 256, (HEIGHT, WIDTH, 1), dtype=np.uint8)], axis=2))
    add("webp, transparent", saved(clear, "WEBP", lossless=True, exact=True), 1)
    add("webp, lossy", saved(image, "WEBP", quality=90), 3)
    add("webp, moving", saved(image, "WEBP", lossless=True, save_all=True, append_images=[clear.convert("RGB")]), 1)
    # The same numbers, of which the first three are brightness and two colors: Adobe's mark says so.
    ycck = bytearray(saved(Image.fromarray(smooth(4), "CMYK"), "JPEG", quality=95))
    ycck[ycck.index(b"Adobe") + 11] = 2
    add("jpeg, ycck", bytes(ycck), 6)


add_pngs()
add_others()
path = pathlib.Path(__file__).parents[1] / "tests/golden/pictures.json"
path.write_text("[\n" + ",\n".join(json.dumps(case) for case in cases) + "\n]\n")
