"""Samples and their records: a conversation with its states, as bytes that check and name themselves.

A record is a whole safetensors file: tokens, spans, argmax, auxiliary and final states, the latter in the store's codec.
Its header carries xxh3-128 checksums of the text part and of the states, the index that of the header.
"""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import xxhash

from eyas.features.codec import codec as find_codec
from eyas.features.codec import to_float

ALIGN = 64
RECORD_START = b'{"__metadata__":{"eyas":'
PARTS = ("tokens", "spans", "argmax", "aux", "final")


@dataclass
class Sample:
    """One conversation. bf16 travels as uint16 bit patterns."""

    id: str
    tokens: np.ndarray  # int32 [T]
    supervised: np.ndarray  # bool [T]; True where the target wrote the token (its end token included)
    aux: np.ndarray  # uint16 [T, A, H]; A auxiliary layers, ascending
    final: np.ndarray  # uint16 [F, H]; after the target's own final norm, at the F teacher positions
    argmax: np.ndarray  # int32 [F]; the target's full-vocabulary argmax there
    category: str = ""


def teacher_positions(supervised: np.ndarray) -> np.ndarray:
    """int [F]: the positions t with supervised[t] and supervised[t+1], whose distribution a draft row learns from."""
    supervised = np.asarray(supervised, dtype=bool)
    return np.flatnonzero(supervised[:-1] & supervised[1:])


def spans_of(supervised: np.ndarray) -> np.ndarray:
    """bool [T] -> int32 [S, 2]: its True runs as [start, end)."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], np.asarray(supervised, dtype=np.int8), [0]])))
    return edges.reshape(-1, 2).astype(np.int32)


def mask_of(spans: np.ndarray | Iterable, length: int) -> np.ndarray:
    """int [S, 2] -> bool [T]: the inverse of `spans_of`."""
    mask = np.zeros(length, dtype=bool)
    for start, end in np.asarray(spans, dtype=np.int64).reshape(-1, 2):
        mask[start:end] = True
    return mask


def text_digest(tokens: np.ndarray, spans: np.ndarray) -> str:
    """xxh3-128 of a conversation's tokens and spans: is the conversation in the store the one we mean?"""
    digest = xxhash.xxh3_128(np.asarray(tokens, "<i4").tobytes())
    digest.update(np.asarray(spans, "<i4").tobytes())
    return digest.hexdigest()


@dataclass(frozen=True)
class Entry:
    """A row of the index: where a sample lies and what it is."""

    id: str
    category: str
    shard: str
    offset: int  # bytes
    length: int  # bytes
    tokens: int  # T
    spans: tuple[int, ...]  # start0, end0, start1, end1, ...
    teachers: int  # F
    hits: int  # teacher positions whose argmax is the next token
    error: float  # `relative_error` of the codec on this sample; 0 when lossless
    text: str  # xxh3-128 of tokens and spans
    checksum: str  # xxh3-128 of the record's header, which carries those of text and states
    status: str = "ok"  # or "dropped", by repair

    @property
    def check(self) -> str:
        """xxh3-64 of the row itself."""
        return xxhash.xxh3_64_hexdigest(json.dumps(asdict(self), sort_keys=True).encode())


def pack(sample: Sample, codec_name: str) -> tuple[list[bytes | memoryview], Entry]:
    """A sample as the parts of one safetensors record, and its index entry (shard and offset still open)."""
    method = find_codec(codec_name)
    length, layers, width = sample.aux.shape
    spans = spans_of(sample.supervised)
    states_in = [sample.aux, sample.final[:, None]]  # [T, A, H], [F, 1, H]
    coded = [method.encode(bits) for bits in states_in]
    error = 0.0
    if not method.lossless:
        back = [method.decode(memoryview(part), bits.shape) for part, bits in zip(coded, states_in, strict=True)]
        error = relative_error(states_in, back)
    raw = codec_name == "bf16"
    tensors = [
        ("tokens", "I32", [length], np.ascontiguousarray(sample.tokens, "<i4").data.cast("B")),
        ("spans", "I32", list(spans.shape), memoryview(spans.astype("<i4").tobytes())),
        ("argmax", "I32", [len(sample.argmax)], memoryview(np.asarray(sample.argmax, "<i4").tobytes())),
        ("aux", "BF16" if raw else "U8", [length, layers, width] if raw else [len(coded[0])], coded[0]),
        ("final", "BF16" if raw else "U8", list(sample.final.shape) if raw else [len(coded[1])], coded[1]),
    ]
    states = xxhash.xxh3_128()
    for _, _, _, part in tensors[2:]:
        states.update(part)
    text = text_digest(sample.tokens, spans)
    metadata = {
        "eyas": "1",
        "id": sample.id,
        "category": sample.category,
        "codec": codec_name,
        "aux": json.dumps([length, layers, width]),
        "final": json.dumps(list(sample.final.shape)),
        "error": repr(error),
        "text": text,
        "states": states.hexdigest(),
    }
    header: dict[str, Any] = {"__metadata__": metadata}
    at = 0
    for name, dtype, shape, part in tensors:
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(part)]}
        at += len(part)
    blob = json.dumps(header, separators=(",", ":")).encode()
    blob += b" " * (-(8 + len(blob)) % ALIGN)
    blob = len(blob).to_bytes(8, "little") + blob
    entry = make_entry(metadata, sample.tokens, spans, sample.argmax, blob, len(blob) + at)
    return [blob, *(part for _, _, _, part in tensors)], entry


def make_entry(
    meta: dict[str, Any], tokens: np.ndarray, spans: np.ndarray, argmax: np.ndarray, head: Any, length: int
) -> Entry:
    """The index row of a record of `length` bytes with this header, shard and offset still open."""
    at = teacher_positions(mask_of(spans, len(tokens)))
    return Entry(
        id=meta["id"],
        category=meta["category"],
        shard="",
        offset=0,
        length=length,
        tokens=len(tokens),
        spans=tuple(spans.reshape(-1).tolist()),
        teachers=len(at),
        hits=int((tokens[at + 1] == argmax).sum()),
        error=float(meta["error"]),
        text=meta["text"],
        checksum=xxhash.xxh3_128_hexdigest(head),
    )


def relative_error(true: list[np.ndarray], coded: list[np.ndarray]) -> float:
    """||coded - true|| / ||true|| of bf16 bits [N, G, H], without each layer's 8 largest channels.

    Those few channels are hundreds of times larger than the rest and would hide any error of the others.
    """
    difference = norm = 0.0
    for bits, back in zip(true, coded, strict=True):
        if len(bits):
            values, error = to_float(bits), to_float(back) - to_float(bits)
            ordinary = np.argsort(np.abs(values).max(0), axis=-1)[None, :, : -min(8, bits.shape[2] // 2) or None]
            difference += float(np.square(np.take_along_axis(error, ordinary, -1)).sum())
            norm += float(np.square(np.take_along_axis(values, ordinary, -1)).sum())
    return (difference / norm) ** 0.5 if norm else 0.0


class Damaged(Exception):
    """A record that is not what its checksums say. The message is the reason."""


@dataclass(frozen=True, slots=True)
class Layout:
    """What a record's header says of its parts. `ends` are in bytes of the record: header, tokens, spans, argmax, aux, final."""

    codec: str
    ends: tuple[int, ...]
    aux: tuple[int, int, int]  # T, A, H
    final: tuple[int, int]  # F, H

    def part(self, buffer: memoryview, name: str) -> memoryview:
        at = PARTS.index(name)
        return buffer[self.ends[at] : self.ends[at + 1]]


def to_sample(name: str, category: str, buffer: memoryview, layout: Layout) -> Sample:
    """The sample of a record; with codec bf16 its states are views of `buffer`."""
    tokens, spans, argmax, aux, final = (buffer[start:end] for start, end in pairwise(layout.ends))
    decode = find_codec(layout.codec).decode
    teachers, width = layout.final
    return Sample(
        id=name,
        category=category,
        tokens=np.frombuffer(tokens, "<i4"),
        supervised=mask_of(np.frombuffer(spans, "<i4"), layout.aux[0]),
        aux=decode(aux, layout.aux),
        final=decode(final, (teachers, 1, width)).reshape(teachers, width),
        argmax=np.frombuffer(argmax, "<i4"),
    )


class Record:
    """A record read from `buffer`; `checksum` is what the index says of its header (None: not known)."""

    def __init__(self, buffer: memoryview, checksum: str | None = None) -> None:
        size = int.from_bytes(buffer[:8], "little") if len(buffer) >= 8 else 0
        if not 0 < size <= min(len(buffer) - 8, 1 << 24):
            raise Damaged("the record's header is broken")
        if checksum and xxhash.xxh3_128_hexdigest(buffer[: 8 + size]) != checksum:
            raise Damaged("the record's header does not have its checksum")
        try:
            header = json.loads(bytes(buffer[8 : 8 + size]))
            self.meta = header["__metadata__"]
            ends = (8 + size, *(8 + size + header[name]["data_offsets"][1] for name in PARTS))
            shapes = [tuple(json.loads(self.meta[name])) for name in ("aux", "final")]
            self.layout = Layout(self.meta["codec"], ends, *shapes)
        except (ValueError, KeyError, TypeError):
            raise Damaged("the record's header is not readable") from None
        self.head, self.length = ends[0], ends[-1]
        self.buffer = buffer[: self.length]

    def part(self, name: str) -> np.ndarray:
        """int32: its tokens, spans or argmax."""
        return np.frombuffer(self.layout.part(self.buffer, name), "<i4")

    @property
    def tokens(self) -> np.ndarray:
        return self.part("tokens")

    @property
    def spans(self) -> np.ndarray:
        return self.part("spans").reshape(-1, 2)

    def check_text(self) -> None:
        if len(self.buffer) < self.layout.ends[2] or text_digest(self.tokens, self.spans) != self.meta["text"]:
            raise Damaged("its tokens do not have their checksum")

    def check(self) -> None:
        self.check_text()
        if len(self.buffer) != self.length:
            raise Damaged("the record is cut off")
        if xxhash.xxh3_128_hexdigest(self.buffer[self.layout.ends[2] :]) != self.meta["states"]:
            raise Damaged("its states do not have their checksum")

    def sample(self) -> Sample:
        return to_sample(self.meta["id"], self.meta["category"], self.buffer, self.layout)
