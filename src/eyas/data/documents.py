"""Documents (answers.jsonl) from imported conversations whose answers are kept as they are, and how to read them.

Better drafts come from answers that the target wrote itself; this is for when it did, elsewhere.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from eyas.data.conversations import Policy, Report, Row, _refuse, batched, to_json
from eyas.data.template import ChatTemplate
from eyas.errors import EyasError, UsageError
from eyas.files import atomic_file

SANE = (0.02, 0.98)  # share of supervised tokens over a whole set


def read_lines(path: str | Path, keys: tuple[str, ...] = ("id",)) -> Iterator[dict[str, Any]]:
    """The objects of a JSON lines file that eyas wrote. Raises UsageError for a line that lacks one of `keys`."""
    try:
        with open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                try:
                    value = json.loads(line)
                    _ = [value[key] for key in keys]
                except (ValueError, KeyError, TypeError):
                    raise UsageError(
                        f"{path}:{number}: no object with {', '.join(keys)}. Make the file again with eyas."
                    ) from None
                yield value
    except FileNotFoundError:
        raise UsageError(f"{path}: no such file.") from None


def read_documents(path: str | Path) -> Iterator[dict[str, Any]]:
    """The documents of an answers.jsonl: {"id", "category", "tokens", "spans", "finish", "messages"}."""
    return read_lines(path, ("id", "tokens", "spans"))


def import_documents(
    conversations: Iterable[Row],
    template: ChatTemplate,
    out: str | Path,
    *,
    max_tokens: int | None = None,
    policy: Policy = "skip",
) -> Report:
    """Write conversations with "messages" as documents with a proved mask into the file `out`.

    Assistant turns whose boundaries are not proved are context only and counted in `report.notes`; conversations
    without a proved turn are dropped, counted and shown. Documents longer than `max_tokens` are cut after the last
    whole answer that fits (counted in `report.notes`), or dropped when there is none.
    Raises EyasError when no document is left, or when the share of supervised tokens lies outside 2 % to 98 %.
    """
    report = Report()
    tokens = supervised = 0
    example = b""
    with atomic_file(out) as file:
        for part, results in batched(conversations, partial(_documents, template, max_tokens)):
            for row, made in zip(part, results, strict=True):
                report.read += 1
                if isinstance(made, str):
                    proof = made.startswith("assistant turn")
                    kind = "boundaries not proved" if proof else "refused by the chat template"
                    _refuse(report, policy, row["id"], kind, made)
                elif not made.line:
                    detail = f"no whole answer within {max_tokens:,} of {made.tokens:,} tokens"
                    report.drop("too long", row["id"], detail)
                else:
                    report.kept += 1
                    report.notes["assistant turns"] += made.turns
                    report.notes["assistant turns not supervised"] += made.turns - made.spans
                    if made.cut:
                        report.notes["documents cut after a whole answer"] += 1
                    report.categories[row.get("category") or ""] += 1
                    tokens += made.tokens
                    supervised += made.supervised
                    example = example or made.line
                    file.write(made.line)
        share = supervised / max(tokens, 1)
        if not report.kept or not SANE[0] <= share <= SANE[1]:
            shown = template.decode(json.loads(example)["tokens"])[:300] if example else ""
            raise EyasError(
                f"{out}: {report.kept:,} documents with {share:.1%} of their tokens supervised, expected "
                f"{SANE[0]:.0%} to {SANE[1]:.0%}; nothing was written. Do template and conversations belong together?\n"
                f"{report}\nchat template begins: {template.text[:300]!r}\nfirst document begins: {shown!r}"
            )
    return report


@dataclass
class _Made:
    """A document as its line of answers.jsonl, none where no whole answer fits."""

    line: bytes
    tokens: int
    supervised: int
    turns: int
    spans: int
    cut: bool


def _documents(template: ChatTemplate, max_tokens: int | None, rows: list[Row]) -> list[_Made | str]:
    """The documents of some conversations, or the reasons why there is none."""
    plain = iter(template.mask_conversations([row["messages"] for row in rows if not row.get("tools")]))
    made: list[_Made | str] = []
    for row in rows:
        result = template.mask_conversation(row["messages"], row["tools"]) if row.get("tools") else next(plain)
        made.append(result if isinstance(result, str) else _document(template, max_tokens, row, *result))
    return made


def _document(
    template: ChatTemplate, max_tokens: int | None, row: Row, ids: list[int], spans: list[tuple[int, int]]
) -> _Made:
    length, line = len(ids), b""
    limit = length if max_tokens is None else max_tokens
    if cut := length > limit:
        spans = [span for span in spans if span[1] <= limit]
        ids = ids[: spans[-1][1]] if spans else []
    if spans:
        document = {
            "id": row["id"],
            "category": row.get("category") or "",
            "tokens": ids,
            "spans": spans,
            "finish": ["stop" if ids[end - 1] in template.end_ids else "length" for _, end in spans],
            "messages": row["messages"],
        }
        line, length = to_json(document).encode() + b"\n", len(ids)
    turns = sum(message["role"] == "assistant" for message in row["messages"])
    return _Made(line, length, sum(end - start for start, end in spans), turns, len(spans), cut)
