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
import json
import os
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from eyas.errors import EyasError, UsageError
from eyas.features.codec import codec as find_codec
from eyas.features.index import (
    FORMAT,
    held_entries,
    journal_entries,
    load_entries,
    read_description,
    write_description,
    write_index,
    write_manifest,
)
from eyas.features.place import Place, Shards, is_locked, locked
from eyas.features.record import (
    ALIGN,
    Damaged,
    Entry,
    Layout,
    Record,
    Sample,
    pack,
    teacher_positions,
    to_sample,
)
from eyas.files import disk_errors, fsync_folder

WRITER_NAME = re.compile(r"[A-Za-z0-9_.]{1,64}")


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


class Store:
    """Reads a store, also while writers run (`refresh` sees what was committed since). `ids` are in sorted order.

    Local shards are memory-mapped: with codec bf16 the states of a sample are views of the file (copy-on-write, so
    writing to them changes no file). The checksums of a sample are verified the first time this object reads it.
    """

    def __init__(self, path: str | Path) -> None:
        self.place = Place(path)
        self.description = read_description(self.place)
        self.entries: dict[str, Entry] = {}
        self._shards = Shards(self.place)
        self._layouts: dict[str, Layout] = {}  # of samples whose every byte was found to be right
        self.refresh()

    def __reduce__(self) -> tuple:
        return Store, (self.place.path,)

    def refresh(self) -> None:
        """Look again for committed samples."""
        entries, before = load_entries(self.place), self.entries
        self.entries = {name: entries[name] for name in sorted(entries) if entries[name].status == "ok"}
        self.ids = list(self.entries)
        self._layouts = {n: layout for n, layout in self._layouts.items() if self.entries.get(n) == before[n]}

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

    def entry(self, sample: str | int) -> Entry:
        name = sample if isinstance(sample, str) else self.ids[sample]
        if name not in self.entries:
            raise UsageError(f"{self.place}: no sample {name!r} among its {len(self)}.")
        return self.entries[name]

    def read(self, sample: str | int) -> Sample:
        """The sample with this id, or at this place in `ids`. Raises EyasError when it is damaged."""
        entry = self.entry(sample)
        try:
            buffer = self._shards.read(entry)
            if entry.id not in self._layouts:
                record = Record(buffer, entry.checksum)
                record.check()
                self._layouts[entry.id] = record.layout
        except Damaged as damage:
            raise self._damage(entry, damage) from None
        return to_sample(entry.id, entry.category, buffer, self._layouts[entry.id])

    def tokens(self, sample: str | int) -> np.ndarray:
        """int32 [T], without reading states."""
        entry = self.entry(sample)
        try:
            record = Record(self._shards.read(entry, states=False), entry.checksum)
            record.check_text()
        except Damaged as damage:
            raise self._damage(entry, damage) from None
        return record.tokens

    def _damage(self, entry: Entry, damage: Damaged) -> EyasError:
        return EyasError(
            f"{self.place}: sample {entry.id!r} is damaged: {damage}. "
            f"Run `eyas store repair {self.place}`, then extract again."
        )
