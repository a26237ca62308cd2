"""Prompts to measure acceptance with, and whether a draft has been trained on them."""

import json
from dataclasses import dataclass
from pathlib import Path

from eyas.data.conversations import Malformed, Row, normalised, parse_row, read_rows
from eyas.data.split import load_split
from eyas.errors import UsageError


@dataclass(frozen=True)
class Prompts:
    """Conversations (id, category, system, turns), what they are in words, and the ids that the draft was trained on.

    trained is None where that is not known.
    """

    rows: list[Row]
    data: str
    trained: list[str] | None


def read_prompts(path: str | Path, limit: int | None = None, draft: str | Path | None = None) -> Prompts:
    """Conversations of any file that `eyas prepare` reads; duplicates are left out.

    Of a run's own conversations (split.json beside the file) the held-out ones. For other files, those of the run
    that made the draft, where its folder is still beside the draft, tell which prompts it was trained on.
    Raises UsageError for a row that cannot be used, and when none is left.
    """
    path, seen = Path(path), set[str]()
    rows: list[Row] = []
    trained: list[str] | None = None
    for where, value, _ in read_rows(path):
        try:
            if isinstance(value, Malformed):
                raise value
            row = parse_row(value)
        except Malformed as error:
            raise UsageError(f"{where}: {error}. Correct the row or leave it out.") from None
        if normalised(row) not in seen:
            seen.add(normalised(row))
            rows.append(row)
    data = path.name
    if (path.parent / "split.json").exists():
        heldout = set(load_split(path.parent / "split.json")["heldout"])
        rows, data, trained = [row for row in rows if row["id"] in heldout], "held-out conversations", []
    rows = rows[:limit]
    if not rows:
        raise UsageError(f"{path}: no prompts in it. Expected rows with turns, messages, conversations or prompt.")
    if trained is None and draft is not None:
        texts = _training_texts(Path(draft).resolve().parent / "conversations")
        trained = None if texts is None else [row["id"] for row in rows if normalised(row) in texts]
    return Prompts(rows, data, trained)


def _training_texts(folder: Path) -> set[str] | None:
    file = folder / "conversations.jsonl"
    if not (file.exists() and (folder / "split.json").exists()):
        return None
    train = set(load_split(folder / "split.json")["train"])
    with open(file, encoding="utf-8") as lines:
        return {normalised(row) for row in map(json.loads, lines) if row["id"] in train}
