"""The health of a store: what it holds, whether every byte is what was written, and how to set it right."""

import io
import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
from pyarrow import parquet

from eyas.errors import EyasError, UsageError
from eyas.features.codec import to_float
from eyas.features.index import (
    FORMAT,
    Problems,
    load_entries,
    read_description,
    summary,
    write_description,
    write_index,
)
from eyas.features.place import Place, Shards, is_locked, locked
from eyas.features.record import (
    ALIGN,
    RECORD_START,
    Damaged,
    Entry,
    Record,
    Sample,
    make_entry,
    teacher_positions,
    text_digest,
)
from eyas.files import fingerprint
from eyas.progress import progress

LARGEST = 1e8  # no target's states reach this; an uninitialised tail does
THRESHOLD = 0.9  # least share of teacher positions whose argmax is the next token, where the manifest says nothing
SAMPLE_THRESHOLD, SAMPLE_POSITIONS = 0.5, 16  # the same for one sample that has at least so many positions


def info(path: str | Path) -> dict[str, Any]:
    """samples, tokens, bytes (all files), bytes_per_token, codec, layers, target (fingerprint), complete, and figures."""
    place = Place(path)
    description = read_description(place)
    live = [entry for entry in load_entries(place).values() if entry.status == "ok"]
    sizes = place.sizes()
    figures = summary(live)
    size = sum(sizes.values())
    return {
        "samples": figures["samples"],
        "tokens": figures["tokens"],
        "bytes": size,
        "bytes_per_token": size / figures["tokens"] if figures["tokens"] else 0.0,
        "codec": description["codec"],
        "layers": description["layers"],
        "target": fingerprint(description["target"]),
        "complete": "manifest.json" in sizes,
        "hidden_size": description["hidden_size"],
        "supervised_tokens": figures["supervised_tokens"],
        "self_check": figures["self_check"],
        "codec_error": figures["codec_error"],
    }


def verify(
    path: str | Path, deep: bool = False, documents: Iterable[dict] | None = None, threshold: float | None = None
) -> dict[str, Any]:
    """Check every checksum of a store; `deep` also decodes: finite, in range, shapes, mask, tokens, the self-check.

    With `documents` (rows of answers.jsonl) also whether every conversation is there, with the same tokens and spans.
    A folder of another program's states is verified too (eyas.features.foreign). Returns the contract's object:
    samples, ok, bad [{sample, reason}] (a file's name where a file is bad), bytes, format.
    """
    place = Place(path)
    sizes = place.sizes()
    if not any(name == "store.json" or name.startswith("shard-") for name in sizes):
        from eyas.features.foreign import verify as verify_foreign  # which imports this module

        return verify_foreign(path, deep=deep, documents=documents)
    problems: Problems = []
    description = None
    try:
        description = read_description(place)
    except UsageError:
        problems.append(("store.json", "missing, or of another format"))
    except EyasError:
        problems.append(("store.json", "damaged"))
    threshold = _manifest_threshold(place, sizes, problems) if threshold is None else threshold
    entries = load_entries(place, problems)
    live = [entry for entry in entries.values() if entry.status == "ok"]
    files = len(problems)
    problems += [
        (entry.id, "dropped by an earlier repair; extract again") for entry in entries.values() if entry.status != "ok"
    ]
    problems += _check_samples(place, live, description if deep else None)
    if deep:
        figures = summary(live)
        if figures["self_check"] is not None and figures["self_check"] < threshold:
            reason = (
                f"the stored argmax is the next token at {figures['self_check']:.1%}, expected at least {threshold:.0%}"
            )
            problems.append(
                (str(path), f"{reason}: wrong template, missing final norm, or states of other conversations")
            )
    if documents is not None:
        problems += _against_documents(entries, documents)
    bad = {name for name, _ in problems[files:]}
    report = {
        "samples": len(entries),
        "ok": sum(entry.id not in bad for entry in live),
        "bad": [{"sample": name, "reason": reason} for name, reason in problems],
        "bytes": sum(sizes.values()),
        "format": FORMAT,
    }
    if deep:
        report["self_check"] = summary(live)["self_check"]
    return report


def _manifest_threshold(place: Place, sizes: dict[str, int], problems: Problems) -> float:
    if "manifest.json" not in sizes:
        return THRESHOLD
    try:
        return float(json.loads(place.read("manifest.json")).get("figures", {}).get("threshold", THRESHOLD))
    except (ValueError, AttributeError, TypeError):
        problems.append(("manifest.json", "not valid JSON"))
        return THRESHOLD


def _check_samples(place: Place, entries: list[Entry], description: dict[str, Any] | None) -> Problems:
    """Checksums of all entries; with `description` their contents too. Reads shard by shard, in order."""
    problems: Problems = []
    shards = Shards(place)
    total = sum(entry.length for entry in entries)
    with progress("verify", total / 1e6, "MB") as advance:
        for entry in sorted(entries, key=lambda entry: (entry.shard, entry.offset)):
            try:
                record = Record(shards.read(entry), entry.checksum)
                record.check()
                if record.meta["id"] != entry.id:
                    raise Damaged(f"the record there belongs to {record.meta['id']!r}")
                if description:
                    inspect(record.sample(), entry, description)
            except Damaged as damage:
                problems.append((entry.id, str(damage)))
            advance(entry.length / 1e6)
    return problems


def inspect(sample: Sample, entry: Entry, description: dict[str, Any]) -> None:
    """Raise Damaged when the contents of a sample cannot be what a target computed."""
    shape = (entry.tokens, len(description["layers"]), description["hidden_size"])
    teachers = teacher_positions(sample.supervised)
    if sample.aux.shape != shape or sample.final.shape != (len(teachers), shape[2]):
        raise Damaged(f"states {list(sample.aux.shape)} and {list(sample.final.shape)}, expected {list(shape)}")
    if len(sample.argmax) != len(teachers) or len(teachers) != entry.teachers:
        raise Damaged(f"{len(sample.argmax)} argmax for {len(teachers)} teacher positions of the mask")
    vocabulary = description["extra"].get("vocab_size")
    for name, ids in (("token", sample.tokens), ("argmax", sample.argmax)):
        if len(ids) and (ids.min() < 0 or (vocabulary and ids.max() >= vocabulary)):
            raise Damaged(f"{name} id outside the vocabulary of {vocabulary}")
    if reason := implausible(sample.aux) or implausible(sample.final[:, None]):
        raise Damaged(reason)
    hits = int((sample.tokens[teachers + 1] == sample.argmax).sum())
    if hits != entry.hits:
        raise Damaged(f"{hits} positions agree with the next token, the index says {entry.hits}")
    if len(teachers) >= SAMPLE_POSITIONS and hits < SAMPLE_THRESHOLD * len(teachers):
        share = f"the argmax of its final states is the next token at only {hits / len(teachers):.0%}"
        raise Damaged(f"{share}: likely the states of another conversation, or another template")


def implausible(bits: np.ndarray) -> str:
    """Why bf16 bits [N, G, H] cannot be states: not finite, absurdly large, or rows of zeros. "" when they can."""
    if (bits & 0x7F80 == 0x7F80).any():
        at = np.argwhere(bits & 0x7F80 == 0x7F80)[0]
        return f"infinite or NaN at position {at[0]}, layer slot {at[1]}, channel {at[2]}"
    if (bits & 0x7FFF).max(initial=0) > int(np.float32(LARGEST).view(np.uint32) >> 16):
        return f"values beyond {LARGEST:.0e} (up to {np.abs(to_float(bits)).max():.1e}): memory that was never written"
    empty = (bits & 0x7FFF).max(-1, initial=0) == 0  # [N, G]
    # A token whose embedding is zero may leave a row of zeros in every slot; one in some slots only, or at the end, was lost.
    lost = np.argwhere(empty & (~empty.all(1, keepdims=True) | (np.arange(len(bits)) == len(bits) - 1)[:, None]))
    if len(lost):
        return f"all zeros at position {lost[0][0]}, layer slot {lost[0][1]} ({len(lost)} rows)"
    return ""


def _against_documents(entries: dict[str, Entry], documents: Iterable[dict]) -> Iterator[tuple[str, str]]:
    for document in documents:
        entry = entries.get(document["id"])
        if entry is None:
            yield document["id"], "in the work list, not in the store"
        elif entry.text != text_digest(np.asarray(document["tokens"]), np.asarray(document["spans"])):
            yield document["id"], "tokens or spans differ from the work list's"


def repair(path: str | Path) -> dict[str, Any]:
    """Make a damaged store usable: bad samples are dropped from the index (extract again to get them back), a lost
    index is rebuilt from the shards. No shard is changed. Raises UsageError while a writer is alive.

    Returns kept, dropped [{sample, reason}], recovered (samples that only the shards knew), files (that were bad).
    """
    place = Place(path)
    if not any(name == "store.json" or name.startswith("shard-") for name in place.sizes()):
        raise UsageError(f"{path}: no feature store to repair.")
    with locked(place, "store"):
        sizes = place.sizes()
        if any(name.startswith(".writer-") and is_locked(place, name) for name in sizes):
            raise UsageError(f"{path}: a writer is alive. Wait for it or stop it, then repair.")
        description = _description(place)
        problems: Problems = []
        entries = load_entries(place, problems)
        recovered = 0
        if problems:
            for entry in (entry for name in sorted(sizes) if name.startswith("shard-") for entry in scan(place, name)):
                if entry.id not in entries:
                    recovered += 1
                    entries[entry.id] = entry
        live = [entry for entry in entries.values() if entry.status == "ok"]
        bad = dict(_check_samples(place, live, None))
        # What is already dropped stays so, unless its record came back in another place.
        kept = {name: replace(e, status="dropped") if name in bad else e for name, e in entries.items()}
        if bad or problems:
            place.remove("manifest.json")
        write_index(place, kept.values(), description)
        for name in sizes:
            if name.startswith("journal-"):
                place.remove(name)
    return {
        "kept": sum(entry.status == "ok" for entry in kept.values()),
        "dropped": [{"sample": name, "reason": reason} for name, reason in bad.items()],
        "recovered": recovered,
        "files": [name for name, _ in problems],
    }


def _description(place: Place) -> dict[str, Any]:
    """store.json, restored from the index's copy where it is damaged."""
    try:
        return read_description(place)
    except EyasError as error:
        try:
            schema = parquet.read_schema(io.BytesIO(place.read("index.parquet")))
            description = json.loads(schema.metadata[b"eyas"])
        except (OSError, pyarrow.ArrowException, KeyError, ValueError, TypeError):
            raise EyasError(f"{error} The index holds no copy of it either: extract again into a new folder.") from None
        write_description(place, description)
        return description


def scan(place: Place, shard: str) -> Iterator[Entry]:
    """The whole and healthy records of a shard, found without an index, as entries."""
    data = memoryview(place.read(shard))
    at = 0
    while at < len(data):
        try:
            record = Record(data[at:])
            record.check()
        except Damaged:
            at = _next_start(data, at + ALIGN)
            continue
        head = data[at : at + record.head]
        entry = make_entry(record.meta, record.tokens, record.spans, record.part("argmax"), head, record.length)
        yield replace(entry, shard=shard, offset=at)
        at = -(-(at + record.length) // ALIGN) * ALIGN


def _next_start(data: memoryview, at: int) -> int:
    """The next aligned place from `at` on that looks like the beginning of a record."""
    while at < len(data):
        if data[at + 8 : at + 8 + len(RECORD_START)] == RECORD_START:
            return at
        at += ALIGN
    return at
