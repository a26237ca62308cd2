"""Documents (answers.jsonl) from imported conversations whose answers are kept as they are, and how to read them.

Better drafts come from answers that the target wrote itself; this is for when it did, elsewhere.
"""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from eyas.data.conversations import Policy, Report, Row, _refuse, batched, to_json
from eyas.data.template import ChatTemplate, Masked
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
    example = ""
    with atomic_file(out) as file:
        for document in masked(conversations, template, report, max_tokens, policy):
            tokens += len(document["tokens"])
            supervised += sum(end - start for start, end in document["spans"])
            example = example or template.decode(document["tokens"])
            file.write(to_json(document).encode() + b"\n")
        share = supervised / max(tokens, 1)
        if not report.kept or not SANE[0] <= share <= SANE[1]:
            raise EyasError(
                f"{out}: {report.kept:,} documents with {share:.1%} of their tokens supervised, expected "
                f"{SANE[0]:.0%} to {SANE[1]:.0%}; nothing was written. Do template and conversations belong together?\n"
                f"{report}\nchat template begins: {template.text[:300]!r}\nfirst document begins: {example[:300]!r}"
            )
    return report


def masked(
    conversations: Iterable[Row], template: ChatTemplate, report: Report, max_tokens: int | None, policy: Policy
) -> Iterator[dict[str, Any]]:
    """Documents of the conversations whose mask is proved, in order; the report counts the others."""

    def mask(part: list[Row]) -> list[Masked | str]:
        plain = iter(template.mask_conversations([row["messages"] for row in part if not row.get("tools")]))
        return [
            template.mask_conversation(row["messages"], row["tools"]) if row.get("tools") else next(plain)
            for row in part
        ]

    for part, results in batched(conversations, mask):
        for row, result in zip(part, results, strict=True):
            report.read += 1
            if isinstance(result, str):
                kind = (
                    "boundaries not proved" if result.startswith("assistant turn") else "refused by the chat template"
                )
                _refuse(report, policy, row["id"], kind, result)
                continue
            ids, spans = result
            turns = sum(message["role"] == "assistant" for message in row["messages"])
            if max_tokens is not None and len(ids) > max_tokens:
                spans = [span for span in spans if span[1] <= max_tokens]
                if not spans:
                    report.drop("too long", row["id"], f"no whole answer within {max_tokens:,} of {len(ids):,} tokens")
                    continue
                ids = ids[: spans[-1][1]]
                report.notes["documents cut after a whole answer"] += 1
            report.kept += 1
            report.notes["assistant turns"] += turns
            report.notes["assistant turns not supervised"] += turns - len(spans)
            report.categories[row.get("category") or ""] += 1
            yield {
                "id": row["id"],
                "category": row.get("category") or "",
                "tokens": ids,
                "spans": [list(span) for span in spans],
                "finish": ["stop" if ids[end - 1] in template.end_ids else "length" for _, end in spans],
                "messages": row["messages"],
            }
