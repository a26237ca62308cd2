"""What a document supervises, in colour in the terminal; the report shows the same runs."""

from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from eyas.features.store import Store

STYLES = {
    "prompt": "dim",
    "supervised": "black on green",
    "special": "bold magenta",
    "supervised special": "white on magenta",
}
CONTEXT = 8  # tokens decoded together, since some tokenizers decode the first one of a text otherwise


def pieces(tokenizer: "PreTrainedTokenizerBase", tokens: list[int]) -> list[str]:
    """The text that each token adds; of a character made of several tokens the last one carries it."""
    texts, start, shown = [], 0, ""
    for i in range(len(tokens)):
        text = _decode(tokenizer, tokens[start : i + 1])
        if text.endswith("�") and i + 1 < len(tokens) and i - start < 2 * CONTEXT:
            texts.append("")
            continue
        texts.append(text[len(shown) :])
        if i + 1 - start >= CONTEXT:
            start = i
            text = _decode(tokenizer, tokens[start : i + 1])
        shown = text
    return texts


def _decode(tokenizer: "PreTrainedTokenizerBase", tokens: list[int]) -> str:
    return str(tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def runs(tokenizer: "PreTrainedTokenizerBase", document: dict[str, Any]) -> Iterator[tuple[str, bool, bool]]:
    """(text, supervised, special) of maximal runs; each special token is a run of its own."""
    added = set(tokenizer.added_tokens_decoder) | set(tokenizer.all_special_ids)
    tokens = [int(token) for token in document["tokens"]]
    supervised = [False] * len(tokens)
    for start, end in document["spans"]:
        supervised[start:end] = [True] * (end - start)
    pending, state = "", False
    for token, text, now in zip(tokens, pieces(tokenizer, tokens), supervised, strict=True):
        special = token in added
        if pending and (special or now != state):
            yield pending, state, False
            pending = ""
        if special:
            yield str(tokenizer.convert_ids_to_tokens(token)), now, True
        else:
            pending += text
        state = now
    if pending:
        yield pending, state, False


def coloured(tokenizer: "PreTrainedTokenizerBase", document: dict[str, Any]) -> "Text":
    """The document as rich text: prompt dim, supervised on green, special tokens magenta, line ends shown as ⏎."""
    text = Text()
    for part, supervised, special in runs(tokenizer, document):
        style = " ".join(["supervised"] * supervised + ["special"] * special) or "prompt"
        text.append(part if special else part.replace("\n", "⏎\n"), STYLES[style])
    return text


def heading(document: dict[str, Any]) -> str:
    """One line: id, category, sizes, how the answers ended."""
    supervised = sum(end - start for start, end in document["spans"])
    total = len(document["tokens"])
    finish = ", ".join(document.get("finish") or [])
    parts = [document["id"], document.get("category") or "", f"{total} tokens"]
    parts += [f"{supervised} supervised ({supervised / max(total, 1):.0%})", finish]
    return " · ".join(part for part in parts if part)


def preview(
    documents: Iterable[dict[str, Any]],
    tokenizer: "PreTrainedTokenizerBase",
    console: "Console | None" = None,
    limit: int = 3,
) -> int:
    """Print up to `limit` documents in colour; returns how many. `documents` as from `read_documents` or `of_store`."""
    console = console or Console()
    shown = 0
    for document in islice(documents, limit):
        console.rule(Text(heading(document)))
        console.print(coloured(tokenizer, document), soft_wrap=True)
        shown += 1
    if shown:
        legend = "  ".join(f"[{style}]{name}[/]" for name, style in STYLES.items())
        console.print(f"\n{legend}")
    return shown


def of_store(path: str | Path) -> Iterator[dict[str, Any]]:
    """The documents of a feature store; their states are not read."""
    store = Store(path)
    for name in store.ids:
        entry = store.entry(name)
        spans = list(zip(entry.spans[::2], entry.spans[1::2], strict=True))
        yield {"id": name, "category": entry.category, "tokens": store.tokens(name), "spans": spans}
