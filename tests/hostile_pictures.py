"""Broken and hostile files as pictures."""

from __future__ import annotations

import struct
import zlib
from typing import Any

import numpy as np
from PIL import Image

from tests.hostile_files import BIG, Make, cuts, noise, put, riff, riff_chunk
from tests.vision_models import as_file, picture

SIDE, RGB = 4900, picture(64, 48, 1)
FILES = {name: as_file(RGB, name) for name in ("PNG", "JPEG", "GIF", "WEBP", "BMP")}
PNG, JPEG, GIF, WEBP, BMP = FILES.values()
PALETTE, CMYK = RGB.quantize(16), as_file(RGB.convert("CMYK"), "JPEG")
PROGRESSIVE = as_file(RGB, "JPEG", progressive=True)
SOF, DHT, DQT, SOS = (JPEG.find(bytes([255, kind])) for kind in (0xC0, 0xC4, 0xDB, 0xDA))
IMAGE = b"\x2c\0\0\0\0\x40\0\x30\0"
#: Messages of files that are refused.
NO, BROKEN, LARGE, MOVES, PARTS = (
    "is not a picture of one of the formats", "is broken", "pixels", "is animated",
    "has too many parts",
)  # fmt: skip
#: A file, or its maker, with its message, "" if it is read; without one where releases of Pillow
#: differ.
Case = bytes | Make | tuple[bytes | Make, str]


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, *, depth: int = 8, colour: int = 2, pixels: bytes = b"") -> bytes:
    """Returns a PNG with any header."""
    head = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    body = chunk(b"IDAT", zlib.compress(pixels))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + body + chunk(b"IEND", b"")


def bmp(width: int, height: int) -> bytes:
    """Returns a BMP without pixels."""
    numbers = 54, 0, 0, 54, 40, width, height, 1, 24, 0, 0, 0, 0, 0, 0
    return b"BM" + struct.pack("<IHHIIiiHHIIiiII", *numbers)


def frames(format: str) -> bytes:
    others = [picture(32, 32, seed) for seed in (2, 3)]
    return as_file(picture(32, 32, 1), format, save_all=True, append_images=others)


def bomb(mebibytes: int = 64) -> bytes:
    return zlib.compress(bytes(mebibytes * 2**20))


def more(kind: bytes, data: bytes = b"", at: int = 33, count: int = 1) -> bytes:
    """Returns a PNG with more chunks, by default behind its head."""
    return PNG[:at] + chunk(kind, data) * count + PNG[at:]


def head(place: int, value: int) -> bytes:
    """Returns a PNG with another byte in its head, whose sum is right."""
    return PNG[:8] + chunk(b"IHDR", put(PNG[16:29], place, value)) + PNG[33:]


def segment(kind: int, data: bytes = b"", count: int = 1) -> bytes:
    """Returns a JPEG with more segments at its beginning."""
    one = bytes([255, kind]) + struct.pack(">H", len(data) + 2) + data
    return JPEG[:2] + one * count + JPEG[2:]


def exif(*entries: tuple[int, int, int, int], following: int = 0) -> bytes:
    """Returns EXIF data, of (tag, type, count, value), and where more is."""
    packed = b"".join(struct.pack("<HHII", *entry) for entry in entries)
    count, end = struct.pack("<H", len(entries)), struct.pack("<I", following)
    return b"II*\0\x08\0\0\0" + count + packed + end


def in_exif(data: bytes) -> bytes:
    return segment(0xE1, b"Exif\0\0" + data)


def sized(whole: bytes, width: int, height: int) -> bytes:
    """Returns a JPEG of any size, by its head."""
    return put(whole, SOF + 5, *struct.pack(">HH", height, width))


def scans(side: int, count: int) -> bytes:
    """Returns a progressive JPEG with its last scan many times."""
    whole = as_file(Image.new("L", (side, side), 9), "JPEG", progressive=True)
    return whole[:-2] + whole[whole.rfind(b"\xff\xda") : -2] * count + whole[-2:]


def gif(blocks: bytes) -> bytes:
    """Returns a GIF with more blocks before its picture."""
    at = 13 + 3 * 2 ** ((GIF[10] & 7) + 1)
    return GIF[:at] + blocks + GIF[at:]


def webp(*chunks: bytes, flags: int = 0, side: int = 64, height: int = 48) -> bytes:
    """Returns a WebP in its extended form."""
    sizes = (side - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    found = riff_chunk(b"VP8X", bytes([flags, 0, 0, 0]) + sizes) + b"".join(chunks)
    return riff(found, form=b"WEBP", size=len(found) + 4)


def rle(width: int, height: int, data: bytes, kind: int = 1) -> bytes:
    """Returns a BMP of runs, of bytes or half bytes."""
    fields = 99, 0, 62, 40, width, height, 1, 8 // kind, kind, len(data), 0, 0, 2, 0
    return b"BM" + struct.pack("<IIIIiiHHIIiiII", *fields) + b"\0\0\0\0\1\2\3\0" + data


def all_of(mode: str, format: str = "PNG", side: int = SIDE, **options: Any) -> Make:
    return lambda: as_file(Image.new(mode, (side, side)), format, **options)


OTHERS: dict[str, bytes] = {
    "a space": b" ", "zeros": bytes(5000), "noise": noise(5000), "html": b"<img src=x>",
    "svg": b"<svg xmlns='http://www.w3.org/2000/svg'/>",
    "xml": b"<!DOCTYPE a [<!ENTITY b SYSTEM 'file:///etc/passwd'>]><svg>&b;</svg>",
    "postscript": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n",
    "xbm": b"#define a_width 9\n", "heic": b"\0\0\0\x18ftypheic" + bytes(99),
    "avif": b"\0\0\0\x18ftypavif" + bytes(99), "fli": b"\0\1\0\0\x11\xaf\1\0" + bytes(200),
    "psd": b"8BPS\0\1" + bytes(99), "an icon of a png": b"\0\0\1\0\1\0" + bytes(16) + PNG,
    "tiffs": frames("TIFF"),
}  # fmt: skip
FOREIGN = ["TIFF", "PDF", "EPS", "ICO", "ICNS", "PCX", "PPM", "TGA", "SGI", "DDS", "SPIDER", "DIB"]
EMPTY = "pHYs gAMA cHRM sRGB tRNS acTL fcTL eXIf iCCP iTXt"
PNGS: dict[str, Case] = {
    "two heads": PNG[:33] + PNG[8:], "no end": PNG[:-12],
    "the end first": PNG[:33] + PNG[-12:] + PNG[33:], "no data": (PNG[:33] + PNG[-12:], BROKEN),
    "no width": png(0, 5), "no height": png(5, 0), "2**31 wide": png(2**31, 2**31),
    "40000 wide": (png(40_000, 40_000), LARGE), "a line": (png(30_000_000, 1), LARGE),
    "too few": (png(99, 99, pixels=b"a"), BROKEN), "too many": (png(2, 2, pixels=bytes(999)), ""),
    "a ribbon": (png(3000, 1, pixels=bytes(9001)), "cannot be read by this model"),
    **{f"byte {at} of the head": head(at, 9) for at in (8, 9, 10, 11, 12)},
    "interlaced": head(12, 1), "16 bits": (png(2, 2, depth=16, pixels=bytes(26)), ""),
    "clear colours": (as_file(PALETTE, transparency=b"\0\5"), ""),
    "no colours": png(2, 2, colour=3, pixels=bytes(6)), "1000 colours": more(b"PLTE", bytes(3000)),
    "a wrong sum": put(PNG, 29, 0, 0, 0, 0),
    "a wrong sum of data": put(PNG, len(PNG) - 16, 1, 2, 3, 4),
    "a bomb": (lambda: png(9000, 9000, pixels=bytes(2**26)), LARGE),
    "a bomb of few pixels": (lambda: png(2, 2, pixels=bytes(2**26)), ""),
    "iCCP: a bomb": lambda: more(b"iCCP", b"a\0\0" + bomb()),
    "iCCP: noise": more(b"iCCP", b"a\0\0" + noise(99)),
    "zTXt: a bomb": lambda: more(b"zTXt", b"a\0\0" + bomb()),
    "zTXt: 99 of a MB": lambda: more(b"zTXt", b"a\0\0" + bomb(1), count=99),
    "iTXt: a bomb": lambda: more(b"iTXt", b"a\0\1\0\0\0" + bomb()),
    "tEXt: a megabyte": more(b"tEXt", b"a\0" + bytes(2**20)),
    "260000 chunks": (lambda: more(b"abCd", count=260_000), PARTS),
    "260000 of no data": (lambda: more(b"IDAT", count=260_000), PARTS),
    "a chunk of controls": more(b"\0\1\2\3"),
    **{f"{kind}: empty": more(kind.encode()) for kind in EMPTY.split()},
    "frames": (frames("PNG"), MOVES), "2**32 frames": more(b"acTL", struct.pack(">II", BIG, 0)),
    "more behind": (PNG + noise(9999), ""), "twice": (PNG * 2, ""),
    "a page behind": (PNG + b"<script>alert(1)</script>", ""),
}  # fmt: skip
JPEGS: dict[str, Case] = {
    "noise": JPEG[:4] + noise(500), "no height": sized(JPEG, 9, 0),
    "65535 wide": (sized(JPEG, 65_535, 65_535), LARGE),
    "24 million pixels of 3000": sized(JPEG, SIDE, SIDE),
    "progressive ones": sized(PROGRESSIVE, SIDE, SIDE), "CMYK": (CMYK, ""),
    "YCCK": (put(CMYK, CMYK.find(b"Adobe") + 11, 2), ""), "2 colours": put(JPEG, SOF + 9, 2),
    "12 bits": put(JPEG, SOF + 4, 12),
    **{f"process {kind}": put(JPEG, SOF + 1, 0xC0 + kind) for kind in (1, 3, 5, 9, 10, 15)},
    "wide samples": put(JPEG, SOF + 11, 0x44), "no tables": put(JPEG, DQT + 1, 0xE5),
    "no codes": put(JPEG, DHT + 1, 0xE5), "codes of noise": put(JPEG, DHT + 5, *noise(30)),
    "no scan": JPEG[:SOS] + JPEG[-2:], "a restart each block": segment(0xDD, b"\0\1"),
    "5000 scans": (lambda: scans(2500, 5000), "has too many scans"),
    "100 scans": (lambda: scans(500, 100), ""),
    "an empty segment": JPEG[:2] + b"\xff\xe5\0\0" + JPEG[2:],
    "260000 segments": (lambda: segment(0xE5, count=260_000), PARTS),
    "a MB of fill": (JPEG[:2] + b"\xff" * 2**20 + JPEG[2:], PARTS),
    "a profile of noise": (segment(0xE2, b"ICC_PROFILE\0\1\1" + noise(99)), ""),
    "a profile of 255 parts": (segment(0xE2, b"ICC_PROFILE\0\x09\xff", 99), ""),
    "Photoshop's": segment(0xED, b"Photoshop 3.0\x008BIM\1\1\xff\0\0\xff\xff"),
    "several pictures": frames("MPO"),
    "a lie of them": segment(0xE2, b"MPF\0" + exif((0xB001, 4, 1, BIG), (0xB002, 7, BIG, 0))),
    **{f"turned by {turn}": (in_exif(exif((0x0112, 3, 1, turn))), "") for turn in (0, 5, 9, 999)},
    "turned by a text": in_exif(exif((0x0112, 2, 9, 26)) + b"sideways"),
    "EXIF of noise": in_exif(noise(200)),
    "EXIF in a circle": (in_exif(exif((0x8769, 4, 1, 8), (0x8825, 4, 1, 8), following=8)), ""),
    "EXIF of 4 GB": in_exif(exif((0x0112, 3, BIG, 9), (0x927C, 7, BIG, BIG))),
    "65535 entries": in_exif(put(exif(), 8, 255, 255)), "more behind": (JPEG + noise(9999), ""),
    "a GIF first": b"GIF89a" + JPEG,
}  # fmt: skip
GIFS: dict[str, Case] = {
    "no size": put(GIF, 6, 0, 0, 0, 0), "a wide screen": (put(GIF, 6, 255, 255, 255, 255), LARGE),
    "frames": (frames("GIF"), MOVES),
    "10000 frames": (gif((IMAGE + b"\0\2\1\x44\0") * 10_000), MOVES),
    **{f"codes of {bits}": gif(IMAGE + bytes([0, bits, 255]) + noise(256)) for bits in (0, 1, 13)},
    "a wide frame": gif(b"\x2c\0\0\0\0\xff\xff\xff\xff\0\x08\1a\0"),
    "500000 comments": (lambda: gif(b"\x21\xfe" + b"\1a" * 500_000 + b"\0"), PARTS),
    "500000 extensions": lambda: gif(b"\x21\xf9\0" * 500_000), "more behind": GIF + noise(99),
}  # fmt: skip
WEBPS: dict[str, Case] = {
    "no chunks": webp(), "a wide lie": webp(WEBP[12:], side=4000),
    "2**24 wide": webp(WEBP[12:], side=2**24, height=2**24),
    "16383 wide": put(WEBP, 26, 255, 63, 255, 63), "a chunk of 4 GB": put(WEBP, 16, *b"\xff" * 4),
    "lossless noise": riff(riff_chunk(b"VP8L", b"\x2f" + noise(99)), form=b"WEBP", size=112),
    "alpha of noise": webp(riff_chunk(b"ALPH", b"\1" + noise(99)), WEBP[12:], flags=16),
    "frames": (frames("WEBP"), MOVES),
    "a profile of noise": webp(riff_chunk(b"ICCP", noise(98)), WEBP[12:], flags=32),
    "EXIF of noise": webp(WEBP[12:], riff_chunk(b"EXIF", noise(98)), flags=8),
    "100000 chunks": webp(riff_chunk(b"ABCD") * 100_000, WEBP[12:]),
    "more behind": WEBP + noise(98),
}  # fmt: skip
BMPS: dict[str, Case] = {
    "negative": bmp(-5, -5), "60000 wide": (bmp(60_000, 60_000), LARGE),
    "24 million pixels of none": (bmp(SIDE, SIDE), BROKEN),
    **{f"a head of {size}": put(BMP, 14, *struct.pack("<I", size)) for size in (0, 12, 124, BIG)},
    **{f"{bits} bits": put(BMP, 28, bits, 0) for bits in (0, 1, 3, 8, 16, 32, 255)},
    **{f"compression {kind}": put(BMP, 30, kind) for kind in (1, 2, 3, 4, 255)},
    "pixels elsewhere": put(BMP, 10, *b"\xff" * 4), "runs": (rle(9, 9, b"\x09\1\0\0" * 9), ""),
    "runs of half bytes": (rle(9, 9, b"\x09\1\0\0" * 9, 2), ""),
    "empty runs": (rle(SIDE, SIDE, b"\1\0" + bytes(2**20)), PARTS),
    "a long way": rle(24_000_000, 1, b"\0\2\xff\xff" * 99),
}  # fmt: skip
LARGEST: dict[str, tuple[bytes | Make, str]] = {
    "colours": (all_of("P", transparency=b"\0\5"), ""),
    "RGBA": (all_of("RGBA", compress_level=1), ""),
    "16 bits": (lambda: as_file(Image.fromarray(np.zeros((SIDE, SIDE), np.uint16))), ""),
    "gif": (all_of("P", "GIF"), ""), "webp": (all_of("L", "WEBP", method=0), LARGE),
    "a large webp": (all_of("L", "WEBP", 3950, method=0), ""),
    "CMYK": (all_of("CMYK", "JPEG"), LARGE),
    "progressive": (all_of("RGB", "JPEG", progressive=True, subsampling=0), ""),
    "large CMYK": (all_of("CMYK", "JPEG", 3950, progressive=True), ""),
}  # fmt: skip
CASES: dict[str, Case] = {
    **{name: (data, NO) for name, data in OTHERS.items()},
    **{format: (lambda format=format: as_file(RGB, format), NO) for format in FOREIGN},
    **{
        f"{format}: {name}": case
        for format, cases in {
            "png": PNGS, "jpeg": JPEGS, "gif": GIFS, "webp": WEBPS, "bmp": BMPS,
        }.items()
        for name, case in cases.items()
    },
    **cuts({name: lambda data=data: data for name, data in FILES.items()}, 1, 5, 20, 50, 80, 99),
}  # fmt: skip
