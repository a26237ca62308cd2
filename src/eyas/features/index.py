"""What a store holds: its description, the journals of its writers, and the index that takes them over."""

import io
import json
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

import pyarrow
import xxhash
from pyarrow import parquet

from eyas.artifact import Manifest
from eyas.errors import EyasError, UsageError
from eyas.features.place import Place
from eyas.features.record import Entry
from eyas.files import fingerprint

FORMAT = "eyas-store-1"


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
