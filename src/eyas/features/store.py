"""The feature store: what a target computed on its own conversations, kept so that a crash costs nothing.

A store is a folder (local, or any fsspec address such as s3://bucket/store):

    store.json                    what the store holds (layers, width, codec, target); written first, never changed
    shard-WRITER-N.safetensors    records, one a sample, appended; each record by itself is a whole safetensors file
    journal-WRITER.jsonl          one line per committed sample, until the index takes it over
    index.parquet                 one row a sample, written by `finish`
    manifest.json                 written last: the store is complete

A sample counts once its record and then its journal line are on disk. Every record carries xxh3-128 checksums of its
text part and of its states, and the index carries the checksum of the record's header, so each byte is covered.
Records name themselves, hence a lost index is rebuilt from the shards. This module needs no torch.
"""

import contextlib
import fcntl
import json
import mmap
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from eyas.artifact import Manifest
from eyas.errors import EyasError, UsageError
from eyas.features.codec import codec as find_codec
from eyas.features.codec import to_float
from eyas.files import atomic_file, disk_errors, fingerprint, fsync_folder

FORMAT = "eyas-store-1"
ALIGN = 64
RECORD_START = b'{"__metadata__":{"eyas":'
WRITER_NAME = re.compile(r"[A-Za-z0-9_.]{1,64}")


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


# Records


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


class Record:
    """A record read from `buffer`; `checksum` is what the index says of its header (None: not known)."""

    def __init__(self, buffer: memoryview, checksum: str | None = None) -> None:
        size = int.from_bytes(buffer[:8], "little") if len(buffer) >= 8 else 0
        if not 0 < size <= min(len(buffer) - 8, 1 << 24):
            raise Damaged("the record's header is broken")
        if checksum and xxhash.xxh3_128_hexdigest(buffer[: 8 + size]) != checksum:
            raise Damaged("the record's header does not have its checksum")
        try:
            self.header = json.loads(bytes(buffer[8 : 8 + size]))
            self.meta = self.header["__metadata__"]
            self.aux_shape = tuple(json.loads(self.meta["aux"]))
            self.final_shape = tuple(json.loads(self.meta["final"]))
            ends = [self.header[name]["data_offsets"] for name in ("tokens", "spans", "argmax", "aux", "final")]
        except (ValueError, KeyError, TypeError):
            raise Damaged("the record's header is not readable") from None
        self.head = 8 + size
        self.length = self.head + ends[-1][1]
        self._data = buffer[8 + size : self.length]
        self._starts = [*(start for start, _ in ends), ends[-1][1]]

    def part(self, name: str) -> memoryview:
        start, end = self.header[name]["data_offsets"]
        return self._data[start:end]

    @property
    def tokens(self) -> np.ndarray:
        return np.frombuffer(self.part("tokens"), "<i4")

    @property
    def spans(self) -> np.ndarray:
        return np.frombuffer(self.part("spans"), "<i4").reshape(-1, 2)

    def check_text(self) -> None:
        if len(self._data) < self._starts[2] or text_digest(self.tokens, self.spans) != self.meta["text"]:
            raise Damaged("its tokens do not have their checksum")

    def check(self) -> None:
        self.check_text()
        if len(self._data) != self._starts[-1]:
            raise Damaged("the record is cut off")
        if xxhash.xxh3_128_hexdigest(self._data[self._starts[2] :]) != self.meta["states"]:
            raise Damaged("its states do not have their checksum")

    def sample(self) -> Sample:
        method = find_codec(self.meta["codec"])
        teachers, width = self.final_shape
        return Sample(
            id=self.meta["id"],
            category=self.meta["category"],
            tokens=self.tokens,
            supervised=mask_of(self.spans, self.aux_shape[0]),
            aux=method.decode(self.part("aux"), self.aux_shape),
            final=method.decode(self.part("final"), (teachers, 1, width)).reshape(teachers, width),
            argmax=np.frombuffer(self.part("argmax"), "<i4"),
        )


# Places: a local folder or an fsspec address


class Place:
    """A folder that is local or behind fsspec, with the few verbs a store needs."""

    def __init__(self, path: str | Path) -> None:
        import fsspec

        self.path = str(path)
        self.fs, self.root = fsspec.core.url_to_fs(self.path, use_listings_cache=False)
        self.local, self.folder = "file" in self.fs.protocol, Path(self.root)

    def __str__(self) -> str:
        return self.path

    def sizes(self) -> dict[str, int]:
        """File name -> bytes."""
        if self.local:
            found = {}
            with contextlib.suppress(FileNotFoundError), os.scandir(self.folder) as files:
                for file in files:
                    with contextlib.suppress(FileNotFoundError):
                        if file.is_file():
                            found[file.name] = file.stat().st_size
            return found
        try:
            rows = self.fs.ls(self.root, detail=True, refresh=True)
        except FileNotFoundError:
            return {}
        return {row["name"].rsplit("/", 1)[-1]: row["size"] for row in rows if row["type"] == "file"}

    def read(self, name: str, start: int | None = None, end: int | None = None) -> bytes:
        return self.fs.cat_file(f"{self.root}/{name}", start=start, end=end)

    def write(self, name: str, data: bytes) -> None:
        """Whole or not at all, on disk when it returns."""
        if self.local:
            with atomic_file(self.folder / name) as file:
                file.write(data)
        else:
            self.fs.pipe_file(f"{self.root}/{name}", data)

    def remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self.fs.rm_file(f"{self.root}/{name}")

    def clear(self) -> None:
        """Remove a store's files, and no others."""
        for name in self.sizes():
            if name.startswith(("shard-", "journal-", "store.json", "index.parquet", "manifest.json")):
                self.remove(name)


def read_description(place: Place) -> dict[str, Any]:
    """store.json, checked."""
    try:
        value = json.loads(place.read("store.json"))
        if value.pop("checksum") != fingerprint(value):
            raise ValueError
    except FileNotFoundError:
        raise UsageError(
            f"{place}: no feature store (no store.json). Give the folder that `eyas extract` wrote."
        ) from None
    except (ValueError, KeyError, AttributeError):
        raise EyasError(f"{place}/store.json: damaged. Run `eyas store repair {place}`.") from None
    if value["format"] != FORMAT:
        raise UsageError(f"{place}: format {value['format']!r}, this eyas reads {FORMAT!r}.")
    return value


def write_description(place: Place, value: dict[str, Any]) -> None:
    place.write("store.json", (json.dumps({**value, "checksum": fingerprint(value)}, indent=2) + "\n").encode())


Problems = list[tuple[str, str]]  # (file or sample, reason)


def _damaged(place: Place, name: str, reason: str, problems: Problems | None) -> None:
    """Raise, or note when the caller collects problems."""
    if problems is None:
        raise EyasError(f"{place}/{name}: {reason}. Run `eyas store repair {place}`.")
    problems.append((name, reason))


def journal_entries(place: Place, name: str, problems: Problems | None = None) -> tuple[list[Entry], int]:
    """The committed entries of a journal, and how many of its bytes whole lines take. What follows is a torn tail."""
    data = place.read(name)
    entries, at = [], 0
    while (end := data.find(b"\n", at)) >= 0:
        check, _, row = data[at:end].partition(b" ")
        if xxhash.xxh3_64_hexdigest(row).encode() == check:
            value = json.loads(row)
            entries.append(Entry(**{**value, "spans": tuple(value["spans"])}))
        else:  # a kill leaves half a line, never a whole wrong one
            _damaged(place, name, "a line does not have its checksum", problems)
        at = end + 1
    return entries, at


def index_entries(place: Place, problems: Problems | None = None) -> list[Entry]:
    """The rows of index.parquet, each checked. None are returned from a damaged one."""
    import io

    import pyarrow
    from pyarrow import parquet

    try:
        table = parquet.read_table(io.BytesIO(place.read("index.parquet")), page_checksum_verification=True)
        checks = table.column("check").to_pylist()
        rows = table.drop_columns(["check"]).to_pylist()
        entries = [Entry(**{**row, "spans": tuple(row["spans"])}) for row in rows]
        if checks == [entry.check for entry in entries]:
            return entries
    except FileNotFoundError:
        return []
    except (pyarrow.ArrowException, OSError, KeyError, TypeError, ValueError):
        pass
    _damaged(place, "index.parquet", "damaged or cut off", problems)
    return []


def write_index(place: Place, entries: Iterable[Entry], description: dict[str, Any]) -> None:
    import io

    import pyarrow
    from pyarrow import parquet

    rows = [{**asdict(entry), "check": entry.check} for entry in sorted(entries, key=lambda entry: entry.id)]
    types: dict[Any, Any] = {int: pyarrow.int64(), float: pyarrow.float64(), str: pyarrow.string()}
    fields = Entry.__dataclass_fields__.items()
    schema = pyarrow.schema(
        [(name, types.get(item.type, pyarrow.list_(pyarrow.int32()))) for name, item in fields]
        + [("check", pyarrow.string())],
        metadata={"eyas": json.dumps(description)},
    )
    buffer = io.BytesIO()
    table = pyarrow.Table.from_pylist(rows, schema=schema)
    parquet.write_table(table, buffer, compression="zstd", write_page_checksum=True)
    place.write("index.parquet", buffer.getvalue())


def load_entries(place: Place, problems: Problems | None = None) -> dict[str, Entry]:
    """Every committed entry by id. Journals are read before the index, so that an entry on its way into it is not missed."""
    for _ in range(5):
        sizes = place.sizes()
        journals = sorted(name for name in sizes if name.startswith("journal-"))
        try:
            written = [entry for name in journals for entry in journal_entries(place, name, problems)[0]]
            break
        except FileNotFoundError:  # a writer finished between the listing and the reading
            continue
    else:
        raise EyasError(f"{place}: its journals vanish while they are read. Is another program cleaning the folder?")
    if "index.parquet" not in sizes:  # a writer opens its journal before its first shard
        if "manifest.json" in sizes:
            _damaged(place, "index.parquet", "missing, while the manifest says that the store is complete", problems)
            sizes = {}
        for name in sorted(name for name in sizes if place.local and name.startswith("shard-") and sizes[name]):
            writer = name.split("-")[1]
            if not any(journal.startswith((f"journal-{writer}.", f"journal-{writer}-")) for journal in journals):
                _damaged(place, "index.parquet", f"missing, while {name} holds data", problems)
                break
    return {entry.id: entry for entry in [*index_entries(place, problems), *written]}


def held_entries(entries: dict[str, Entry], sizes: dict[str, int]) -> dict[str, Entry]:
    """Those neither dropped nor beyond their shard's end (a disk that lied, a deleted shard)."""
    return {e.id: e for e in entries.values() if e.status == "ok" and sizes.get(e.shard, 0) >= e.offset + e.length}


def summary(entries: Iterable[Entry]) -> dict[str, Any]:
    """Figures that follow from index rows alone; `self_check` is the share of teacher positions whose argmax is the next token."""
    entries = list(entries)
    teachers = sum(entry.teachers for entry in entries)
    shares = [entry.hits / entry.teachers for entry in entries if entry.teachers]
    tokens = sum(entry.tokens for entry in entries)
    return {
        "samples": len(entries),
        "tokens": tokens,
        "supervised_tokens": sum(sum(entry.spans[1::2]) - sum(entry.spans[::2]) for entry in entries),
        "teacher_positions": teachers,
        "self_check": sum(entry.hits for entry in entries) / teachers if teachers else None,
        "self_check_min": min(shares, default=None),
        "codec_error": sum(entry.error * entry.tokens for entry in entries) / tokens if tokens else 0.0,
    }


# Writing


class StoreWriter:
    """Appends samples to a store, or goes on with one. One shard series per `writer` name; several writers may run at once.

    `layers` are physical outputs, ascending; `target` maps names to fingerprints (LoadedTarget.target.fingerprints).
    Raises UsageError when the store there was made with something else, or when a writer of this name is alive.
    On a local disk a sample is durable after `commit`. Elsewhere (fsspec) each commit uploads one shard object, so
    commit in large steps; names cannot be locked there, so give each writer its own.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        layers: list[int],
        hidden_size: int,
        target: dict[str, str],
        codec: str = "bf16",
        extra: dict[str, Any] | None = None,
        shard_bytes: int = 256 << 20,
        writer: str = "0",
    ) -> None:
        find_codec(codec)
        if not WRITER_NAME.fullmatch(writer):
            raise UsageError(f"Writer name {writer!r}: use letters, digits, '.' and '_' only.")
        if not layers or sorted(set(layers)) != list(layers):
            raise UsageError(f"Auxiliary layers {layers}: expected distinct physical outputs in ascending order.")
        self.place, self.codec, self.writer, self.shard_bytes = Place(path), codec, writer, shard_bytes
        self.layers, self.hidden_size = list(layers), hidden_size
        self.journal = f"journal-{writer}.jsonl"
        self.description: dict[str, Any] = {
            "format": FORMAT,
            "layers": self.layers,
            "hidden_size": hidden_size,
            "codec": codec,
            "target": target,
            "extra": extra or {},
        }
        self._files = contextlib.ExitStack()
        self._pending: list[Entry] = []
        self._buffer: list[bytes | memoryview] = []  # only where files cannot be appended to
        try:
            self._open()
        except BaseException:
            self._files.close()
            raise

    def _open(self) -> None:
        if self.place.local:
            with disk_errors(self.place.folder):
                self.place.folder.mkdir(parents=True, exist_ok=True)
        with locked(self.place, "store"):
            self._agree()
            self._files.enter_context(locked(self.place, f"writer-{self.writer}", wait=False))
        known = load_entries(self.place)
        sizes = self.place.sizes()
        self.entries = held_entries(known, sizes)
        # Nothing is appended to a shard that is not what the index says: new records must not lie where old rows point.
        self._spoilt = {e.shard for e in known.values() if e.status == "ok" and e.id not in self.entries}
        names = [*sizes, *self._spoilt]
        series = re.compile(rf"(?:shard|journal)-{re.escape(self.writer)}-(\d+)\.")
        number = max((int(match[1]) for match in map(series.match, names) if match), default=0)
        if not self.place.local:
            self._begin_object(number + 1)
            return
        self._journal = self._files.enter_context(open(self.place.folder / self.journal, "ab", 0))  # noqa: SIM115
        if (self.place.folder / self.journal).stat().st_size:
            os.truncate(self.place.folder / self.journal, journal_entries(self.place, self.journal)[1])
        self._data: Any = None
        self._use_shard(number)

    def _agree(self) -> None:
        if "store.json" not in self.place.sizes():
            write_description(self.place, self.description)
            return
        there = read_description(self.place)
        for key in ("layers", "hidden_size", "codec"):
            if there[key] != self.description[key]:
                self._refuse(key.replace("_", " "), there[key], self.description[key])
        for key in ("target", "extra"):
            old, new = there[key], self.description[key]
            for name in sorted(old.keys() | new.keys()):
                if old.get(name) != new.get(name):
                    self._refuse(f"target's {name}" if key == "target" else name, old.get(name), new.get(name))

    def _refuse(self, what: str, there: Any, here: Any) -> None:
        raise UsageError(
            f"{self.place}: this store was made with another {what} ({there}, now {here}). "
            "Write to another folder, or remove this one."
        )

    def _begin_object(self, number: int) -> None:
        """Collect records for the object `number`, which `commit` uploads whole."""
        self._number, self._end, self._buffer = number, 0, []
        self.shard = f"shard-{self.writer}-{number:05d}.safetensors"

    def _use_shard(self, number: int) -> None:
        """Append to shard `number`: cut off what was never committed, or begin a new one where it is full or spoilt."""
        if self._data is not None:
            self._data.close()
        self._number = number
        self.shard = f"shard-{self.writer}-{number:05d}.safetensors"
        if self.shard in self._spoilt:
            self._use_shard(number + 1)
            return
        path = self.place.folder / self.shard
        with disk_errors(path):
            self._data = open(path, "ab", 0)  # noqa: SIM115 (kept open across calls)
            self._files.callback(self._data.close)
            self._end = max((e.offset + e.length for e in self.entries.values() if e.shard == self.shard), default=0)
            if os.path.getsize(path) > self._end:
                os.truncate(path, self._end)
            fsync_folder(self.place.folder)
        if self._end >= self.shard_bytes:
            self._use_shard(number + 1)

    @property
    def committed(self) -> set[str]:
        """Ids that are on disk for good."""
        return set(self.entries)

    @property
    def pending_bytes(self) -> int:
        """Bytes appended since the last commit."""
        return sum(entry.length for entry in self._pending)

    def append(self, sample: Sample) -> None:
        """Write a sample. It counts after the next `commit`. Raises UsageError when its shapes are not the store's."""
        self._check(sample)
        parts, entry = pack(sample, self.codec)
        if self._end >= self.shard_bytes:
            self.commit()
            if self.place.local:
                self._use_shard(self._number + 1)
        offset = -(-self._end // ALIGN) * ALIGN
        parts = [bytes(offset - self._end), *parts]
        if self.place.local:
            try:
                with disk_errors(self.place.folder / self.shard):
                    for part in parts:
                        _write(self._data, part)
            except BaseException:
                self._drop_tail()
                raise
        else:
            self._buffer += [bytes(part) for part in parts]
        self._end = offset + entry.length
        self._pending.append(replace(entry, shard=self.shard, offset=offset))

    def _check(self, sample: Sample) -> None:
        length, width = len(sample.tokens), self.hidden_size
        found = teacher_positions(sample.supervised) if len(sample.supervised) == length else np.zeros(0)
        wanted = {
            "supervised": (sample.supervised, (length,)),
            "aux": (sample.aux, (length, len(self.layers), width)),
            "final": (sample.final, (len(found), width)),
            "argmax": (sample.argmax, (len(found),)),
        }
        for name, (array, shape) in wanted.items():
            if array.shape != shape:
                raise UsageError(f"Sample {sample.id!r}: {name} is {list(array.shape)}, expected {list(shape)}.")
        if sample.aux.dtype != np.uint16 or sample.final.dtype != np.uint16:
            raise UsageError(f"Sample {sample.id!r}: states must be bf16 bit patterns (uint16).")
        if not length or sample.id in self.entries or any(entry.id == sample.id for entry in self._pending):
            raise UsageError(f"Sample {sample.id!r}: {'already in the store' if length else 'no tokens'}.")

    def _drop_tail(self) -> None:
        """After a failed write: forget what was not committed and cut the shard back, freeing its space."""
        self._pending = []
        with contextlib.suppress(OSError):
            self._data.close()
        self._use_shard(self._number)

    def commit(self) -> None:
        """Data to disk, then the journal lines. Afterwards the samples appended so far survive a power cut."""
        if not self._pending:
            return
        self.place.remove("manifest.json")  # a store that grows is not complete
        rows = [json.dumps(asdict(entry), sort_keys=True).encode() for entry in self._pending]
        lines = b"".join(xxhash.xxh3_64_hexdigest(row).encode() + b" " + row + b"\n" for row in rows)
        if self.place.local:
            try:
                with disk_errors(self.place.folder):
                    os.fsync(self._data.fileno())
                    start = os.path.getsize(self.place.folder / self.journal)
                    try:
                        _write(self._journal, lines)
                    except OSError:
                        os.truncate(self.place.folder / self.journal, start)
                        raise
                    os.fsync(self._journal.fileno())
            except BaseException:
                self._drop_tail()
                raise
        else:
            self.place.write(self.shard, b"".join(self._buffer))
            self.place.write(f"journal-{self.writer}-{self._number:05d}.jsonl", lines)
            self._begin_object(self._number + 1)
        self.entries.update({entry.id: entry for entry in self._pending})
        self._pending = []

    def finish(self, inputs: dict[str, str] | None = None, figures: dict[str, Any] | None = None) -> bool:
        """Commit, fold every journal into index.parquet and write manifest.json, the sign that the store is complete.

        While other writers are alive this only commits and closes, and returns False: the last one completes the store.
        `inputs` are the manifest's (the target's fingerprints when None); `figures` are added to the manifest.
        """
        self.commit()
        with locked(self.place, "store"):
            self.close()
            sizes = self.place.sizes()
            others = [name for name in sizes if name.startswith(".writer-") and is_locked(self.place, name)]
            if others:
                return False
            entries = load_entries(self.place)
            write_index(self.place, entries.values(), self.description)
            for name in sizes:
                if name.startswith("journal-") or (name.startswith("shard-") and not sizes[name]):
                    self.place.remove(name)
            write_manifest(self.place, self.description, entries, inputs, figures)
        return True

    def close(self) -> None:
        """Let go of the store. What was not committed is lost."""
        self._files.close()

    def __enter__(self) -> "StoreWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _write(file: Any, data: bytes | memoryview) -> None:
    """Write all of `data` to an unbuffered file, so that nothing lingers after a failure."""
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]


def write_manifest(
    place: Place, description: dict, entries: dict[str, Entry], inputs: dict | None = None, figures: dict | None = None
) -> None:
    live = [entry for entry in entries.values() if entry.status == "ok"]
    size = sum(entry.length for entry in live)
    shown = {key: description[key] for key in ("format", "codec", "layers", "hidden_size")}
    manifest = Manifest(
        kind="store",
        inputs=inputs or description["target"],
        figures={**shown, **summary(live), "bytes": size, "complete": True, **(figures or {})},
    )
    place.write("manifest.json", (json.dumps(asdict(manifest), indent=2) + "\n").encode())


@contextlib.contextmanager
def locked(place: Place, name: str, wait: bool = True) -> Iterator[None]:
    """Hold an flock on `.NAME.lock` beside the data; it dies with its process. Nothing to hold where the place is not local."""
    if not place.local:
        yield
        return
    path = place.folder / f".{name}.lock"
    with disk_errors(path), open(path, "a+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            raise UsageError(
                f"{place}: another process is writing here as {name!r}. Wait for it, or use another writer name."
            ) from None
        yield


def is_locked(place: Place, file_name: str) -> bool:
    with open(place.folder / file_name, "a+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


# Reading


class Shards:
    """The bytes of records: mapped where the store is local, fetched by range elsewhere."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self._maps: dict[str, mmap.mmap] = {}

    def read(self, entry: Entry, states: bool = True) -> memoryview:
        """The record of `entry`; its beginning, up to the end of its text part, is enough where `states` is False."""
        if not self.place.local:
            end = entry.length if states else min(entry.length, 4096 + 8 * entry.tokens)
            try:
                return memoryview(self.place.read(entry.shard, entry.offset, entry.offset + end))
            except (FileNotFoundError, ValueError):
                raise Damaged(f"its shard {entry.shard} is missing or cut off") from None
        path = self.place.folder / entry.shard
        end = entry.offset + entry.length
        try:
            # A shard may have grown since it was mapped; one that shrank must not be touched through the map.
            size = os.stat(path).st_size
            if size < end:
                raise Damaged(f"its shard {entry.shard} is cut off ({size} bytes, it ends at {end})")
            if entry.shard not in self._maps or len(self._maps[entry.shard]) < end:
                with open(path, "rb") as file:
                    self._maps[entry.shard] = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY)
        except FileNotFoundError:
            raise Damaged(f"its shard {entry.shard} is missing") from None
        return memoryview(self._maps[entry.shard])[entry.offset : end]


class Store:
    """Reads a store, also while writers run (`refresh` sees what was committed since). `ids` are in sorted order.

    Local shards are memory-mapped: with codec bf16 the states of a sample are views of the file (copy-on-write, so
    writing to them changes no file). The checksums of a sample are verified the first time this object reads it.
    """

    def __init__(self, path: str | Path) -> None:
        self.place = Place(path)
        self.description = read_description(self.place)
        self._shards = Shards(self.place)
        self._verified: set[tuple[str, bool]] = set()
        self.refresh()

    def __reduce__(self) -> tuple:
        return Store, (self.place.path,)

    def refresh(self) -> None:
        """Look again for committed samples."""
        entries = load_entries(self.place)
        self.entries = {name: entries[name] for name in sorted(entries) if entries[name].status == "ok"}
        self.ids = list(self.entries)

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def meta(self) -> dict[str, Any]:
        """Codec, layers (physical outputs), hidden_size, target (fingerprints) and extra, as the writer gave them."""
        return self.description

    @property
    def lengths(self) -> np.ndarray:
        """int64 [N]: tokens per sample, in the order of `ids`."""
        return np.array([entry.tokens for entry in self.entries.values()], dtype=np.int64)

    @property
    def categories(self) -> list[str]:
        return [entry.category for entry in self.entries.values()]

    def entry(self, sample: str | int) -> Entry:
        name = sample if isinstance(sample, str) else self.ids[sample]
        if name not in self.entries:
            raise UsageError(f"{self.place}: no sample {name!r} among its {len(self)}.")
        return self.entries[name]

    def read(self, sample: str | int) -> Sample:
        """The sample with this id, or at this place in `ids`. Raises EyasError when it is damaged."""
        return self._record(self.entry(sample)).sample()

    def tokens(self, sample: str | int) -> np.ndarray:
        """int32 [T], without reading states."""
        return self._record(self.entry(sample), states=False).tokens

    def supervised(self, sample: str | int) -> np.ndarray:
        """bool [T], from the index alone."""
        entry = self.entry(sample)
        return mask_of(entry.spans, entry.tokens)

    def _record(self, entry: Entry, states: bool = True) -> Record:
        fresh = (entry.id, states) not in self._verified
        try:
            record = Record(self._shards.read(entry, states), entry.checksum if fresh else None)
            if fresh:
                record.check() if states else record.check_text()
                self._verified.add((entry.id, states))
            return record
        except Damaged as damage:
            raise EyasError(
                f"{self.place}: sample {entry.id!r} is damaged: {damage}. "
                f"Run `eyas store repair {self.place}`, then extract again."
            ) from None
