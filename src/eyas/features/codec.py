"""How states lie on disk. A codec turns bf16 bit patterns, uint16 [N, G, H] (N tokens, G layers), into bytes and back.

bf16   the bits as they are
bf16z  lossless, about two thirds: byte planes; sign and mantissa raw, exponents less their channel's usual value by zstd
int8o  lossy, about half: int8 with one scale per token and layer, the 8 largest channels of a layer kept in bf16
fp8    lossy, half: float8 e4m3 with one scale per token and layer
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np

from eyas.errors import UsageError

Bits = np.ndarray  # uint16 bf16 bit patterns
Shape = tuple[int, int, int]  # N, G, H
OUTLIERS = 8  # channels of a layer that int8o keeps in bf16
BLOCK = 1 << 16  # values put together at a time, so that they stay in cache
MIDDLE = np.uint8(64)  # where bf16z puts a channel's usual exponent, away from the wrap at 0


@dataclass(frozen=True)
class Codec:
    """`encode(bits [N, G, H])` gives a bytes-like object, `decode(buffer, (N, G, H))` uint16 [N, G, H].

    A lossless codec gives every bit back; a lossy one needs finite values.
    """

    name: str
    lossless: bool
    encode: Callable[[Bits], bytes | memoryview]
    decode: Callable[[memoryview, Shape], Bits]


def to_float(bits: Bits) -> np.ndarray:
    """uint16 bf16 bits -> float32, exact."""
    return (np.asarray(bits).astype(np.uint32) << 16).view(np.float32)


def to_bits(values: np.ndarray) -> Bits:
    """float32 -> uint16 bf16 bits, round to nearest even (NaN stays NaN)."""
    raw = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = ((raw + (0x7FFF + ((raw >> 16) & 1))) >> 16).astype(np.uint16)
    nan = (raw & 0x7FFFFFFF) > 0x7F800000
    return np.where(nan, (raw >> 16).astype(np.uint16) | np.uint16(0x40), rounded)


def _raw_encode(bits: Bits) -> memoryview:
    return np.ascontiguousarray(bits, dtype="<u2").reshape(-1).data.cast("B")


def _raw_decode(buffer: memoryview, shape: Shape) -> Bits:
    return np.frombuffer(buffer, "<u2").reshape(shape)


@cache
def _zstd() -> Any:
    import pyarrow

    return pyarrow.Codec("zstd", compression_level=1)


def _planes_encode(bits: Bits) -> bytes:
    """A channel's exponents vary little around a value of its own: taking that away leaves 2.7 bits of 3.2."""
    rows = len(bits)
    if not rows:
        return b""
    flat = np.ascontiguousarray(bits, "<u2").reshape(rows, -1)  # [N, W]
    planes = ((flat << 1) | (flat >> 15)).view(np.uint8).reshape(rows, -1, 2)  # low: mantissa, sign; high: exponent
    usual = np.rint(planes[:: max(1, rows // 64), :, 1].mean(0)).astype(np.uint8)  # [W]
    centred = planes[:, :, 1] - usual + MIDDLE  # modulo 256
    return usual.tobytes() + planes[:, :, 0].tobytes() + _zstd().compress(centred.data, asbytes=True)


def _planes_decode(buffer: memoryview, shape: Shape) -> Bits:
    rows, width = shape[0], shape[1] * shape[2]
    out = np.empty((rows, width), "<u2")
    if not rows:
        return out.reshape(shape)
    usual = np.frombuffer(buffer, np.uint8, width) - MIDDLE
    low = np.frombuffer(buffer, np.uint8, rows * width, offset=width).reshape(rows, width)
    centred = np.frombuffer(_zstd().decompress(buffer[width * (rows + 1) :], rows * width), np.uint8).reshape(
        rows, width
    )
    planes = out.view(np.uint8).reshape(rows, width, 2)
    step = max(1, BLOCK // width)
    spare = np.empty((step, width), "<u2")
    for at in range(0, rows, step):
        block = out[at : at + step]
        np.add(centred[at : at + step], usual, out=planes[at : at + step, :, 1])
        planes[at : at + step, :, 0] = low[at : at + step]
        sign = np.left_shift(block, 15, out=spare[: len(block)])
        np.right_shift(block, 1, out=block)
        np.bitwise_or(block, sign, out=block)
    return out.reshape(shape)


def _scaled(values: np.ndarray, top: float) -> tuple[np.ndarray, np.ndarray]:
    """float32 [N, G, H] divided by a float32 scale [N, G], so that the largest of each row is `top`."""
    scale = np.abs(values).max(-1) / np.float32(top)
    return values / np.where(scale > 0, scale, 1)[..., None], scale.astype("<f4")


def _int8_encode(bits: Bits) -> bytes:
    count = min(OUTLIERS, bits.shape[2])
    if not len(bits):
        return b""
    values = to_float(bits)  # [N, G, H]
    largest = np.sort(np.argsort(-np.abs(values).max(0), axis=-1, kind="stable")[:, :count])  # [G, count]
    kept = np.take_along_axis(bits, largest[None], axis=-1)  # [N, G, count]
    np.put_along_axis(values, largest[None], 0, axis=-1)
    values, scale = _scaled(values, 127)
    return b"".join(
        x.tobytes() for x in (largest.astype("<u4"), scale, kept.astype("<u2"), np.rint(values).astype(np.int8))
    )


def _int8_decode(buffer: memoryview, shape: Shape) -> Bits:
    rows, groups, width = shape
    count = min(OUTLIERS, width)
    if not rows:
        return np.empty(shape, np.uint16)
    at = np.cumsum([0, groups * count * 4, rows * groups * 4, rows * groups * count * 2, rows * groups * width])
    parts = [buffer[start:end] for start, end in pairwise(at)]
    largest = np.frombuffer(parts[0], "<u4").reshape(1, groups, count)
    scale = np.frombuffer(parts[1], "<f4").reshape(rows, groups, 1)
    kept = np.frombuffer(parts[2], "<u2").reshape(rows, groups, count)
    out = to_bits(np.frombuffer(parts[3], np.int8).reshape(shape) * scale)
    np.put_along_axis(out, largest.astype(np.int64), kept, axis=-1)
    return out


@cache
def _e4m3() -> tuple[np.ndarray, np.ndarray]:
    """The values of the 256 codes, float32, and the code of each bf16 pattern (nearest, ties to the even code)."""
    code = np.arange(127)  # 127 is NaN
    exponent, mantissa = code >> 3, code & 7
    positive = np.where(exponent > 0, (1 + mantissa / 8) * 2.0 ** (exponent - 7), mantissa / 8 * 2.0**-6)
    values = np.concatenate([positive, [np.nan], -positive, [np.nan]]).astype(np.float32)
    magnitude = to_float(np.arange(0x7F80, dtype=np.uint16)).astype(np.float64)
    above = np.clip(np.searchsorted(positive, magnitude), 1, 126)
    low, high = magnitude - positive[above - 1], positive[above] - magnitude
    nearest = np.where((high < low) | ((high == low) & (above % 2 == 0)), above, above - 1).astype(np.uint8)
    codes = np.full(0x8000, 127, np.uint8)
    codes[:0x7F80] = nearest
    return values, np.concatenate([codes, codes | 0x80])


def _fp8_encode(bits: Bits) -> bytes:
    if not len(bits):
        return b""
    values, scale = _scaled(to_float(bits), 448)
    return scale.tobytes() + _e4m3()[1][to_bits(values)].tobytes()


def _fp8_decode(buffer: memoryview, shape: Shape) -> Bits:
    rows, groups, _ = shape
    if not rows:
        return np.empty(shape, np.uint16)
    scale = np.frombuffer(buffer, "<f4", rows * groups).reshape(rows, groups, 1)
    codes = np.frombuffer(buffer, np.uint8, offset=scale.nbytes).reshape(shape)
    return to_bits(_e4m3()[0][codes] * scale)


CODECS = {
    name: Codec(name, lossless, encode, decode)
    for name, lossless, encode, decode in (
        ("bf16", True, _raw_encode, _raw_decode),
        ("bf16z", True, _planes_encode, _planes_decode),
        ("int8o", False, _int8_encode, _int8_decode),
        ("fp8", False, _fp8_encode, _fp8_decode),
    )
}


def codec(name: str) -> Codec:
    if name not in CODECS:
        raise UsageError(f"Unknown codec {name!r}. Expected one of {', '.join(CODECS)}.")
    return CODECS[name]
