"""Conversations of whatever form become rows {"id", "category", "system", "turns"}; what is dropped is counted and shown.

Reads JSON lines, JSON arrays, text lines (each plain or .gz, .bz2, .xz), Parquet and folders that a datasets library
saved, as a stream. Row forms: `messages` (OpenAI), `conversations` (ShareGPT), `turns`, `prompt`, `instruction` with
`input` (Alpaca). Text only: images are refused.
"""

import bz2
import codecs
import ctypes
import gc
import gzip
import heapq
import json
import lzma
import os
import re
import signal
import unicodedata
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
import xxhash

from eyas.data.template import ChatTemplate, TemplateRefusal
from eyas.errors import EyasError, UsageError
from eyas.files import atomic_file, inside, read_json
from eyas.progress import progress

Row = dict[str, Any]
Policy = Literal["skip", "stop"]

ROLES = {role: "user" for role in ("user", "human", "prompter")}
ROLES |= {role: "assistant" for role in ("assistant", "gpt", "chatgpt", "bot", "model")}
ROLES |= {"system": "system", "developer": "system"}
ROLES |= {role: "tool" for role in ("tool", "function", "observation", "ipython")}
FORMS = ("messages", "conversations", "turns", "prompt", "instruction")
OTHER_KEYS = ("id", "category", "system", "system_prompt", "input", "tools", "images", "image")
ANSWERS = ("output", "response", "completion", "answer")
OPENERS = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
EXAMPLES = 3  # of each reason kept in a report
to_json = json.JSONEncoder(ensure_ascii=False).encode
SEPARATORS = re.compile(r"[\s,]*")
MANY = 4096  # rows from which on forking workers is worth its while
_work: Callable[[list[Any]], list[Any]] | None = None  # what a forked worker does
PROBE = 10  # a file whose first lines are all broken is not what its name says


class Malformed(Exception):
    """One row cannot be used: `kind` is counted, `detail` shown."""

    def __init__(self, kind: str, detail: str = "") -> None:
        super().__init__(f"{kind} ({detail})" if detail else kind)
        self.kind = kind


@dataclass
class Report:
    """What was read, what was kept, what was dropped and why, with the first examples of each reason."""

    read: int = 0
    kept: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[str]] = field(default_factory=dict)
    forms: Counter[str] = field(default_factory=Counter)
    categories: Counter[str] = field(default_factory=Counter)
    scripts: Counter[str] = field(default_factory=Counter)
    notes: Counter[str] = field(default_factory=Counter)

    def drop(self, kind: str, where: str, detail: str = "") -> None:
        self.dropped[kind] += 1
        shown = self.examples.setdefault(kind, [])
        if len(shown) < EXAMPLES:
            shown.append(f"{where}: {detail or kind}")

    def to_dict(self) -> dict[str, Any]:
        return {name: dict(value) if isinstance(value, dict) else value for name, value in vars(self).items()}

    def __str__(self) -> str:
        lines = [f"{self.read:,} read, {self.kept:,} kept, {sum(self.dropped.values()):,} dropped"]
        for kind, count in self.dropped.most_common():
            lines += [f"  {count:,} {kind}", *(f"      {example}" for example in self.examples[kind])]
        return "\n".join(lines + [f"  {count:,} {note}" for note, count in self.notes.items()])


# rows of a file


def read_rows(path: str | Path) -> Iterator[tuple[str, Any, float]]:
    """(where, value or Malformed, bytes of the file or folder consumed so far), one at a time.

    Raises UsageError when the file is missing or is not at all what its name says, EyasError when it is damaged.
    """
    path = Path(path)
    if path.is_dir():
        yield from _read_folder(path)
        return
    if not path.is_file():
        raise UsageError(f"{path}: no such file or folder.")
    suffixes = [suffix.lower() for suffix in path.suffixes]
    opener = OPENERS.get(suffixes[-1]) if suffixes else None
    kind = (suffixes[:-1] if opener else suffixes)[-1:]
    try:
        if kind == [".parquet"] and not opener:
            yield from _read_parquet(path)
        elif kind in ([".jsonl"], [".ndjson"], [".json"], [".txt"]):
            with open(path, "rb") as raw, opener(raw) if opener else raw as stream:  # type: ignore[operator]
                if kind == [".txt"]:
                    yield from _read_text(path, raw, stream)
                else:
                    yield from _read_json(path, raw, stream)
        else:
            raise UsageError(
                f"{path}: unknown kind of file. Expected .jsonl, .json or .txt (also .gz, .bz2, .xz), .parquet, "
                "or a folder of a saved data set."
            )
    except (EOFError, gzip.BadGzipFile, lzma.LZMAError) as error:
        raise EyasError(f"{path}: the compressed file is damaged or cut off ({error}). Fetch it again.") from None
    except PermissionError:
        raise UsageError(f"{path}: not readable (permission denied).") from None


def _read_folder(folder: Path) -> Iterator[tuple[str, Any, float]]:
    if (folder / "dataset_dict.json").exists():  # several splits: only the training one is for training
        splits = read_json(folder / "dataset_dict.json").get("splits") or []
        if "train" not in splits and len(splits) != 1:
            raise UsageError(f"{folder}: holds the splits {splits}; point to one of them.")
        yield from _read_folder(inside(folder, "train" if "train" in splits else splits[0]))
        return
    if (folder / "state.json").exists():
        files = [inside(folder, f["filename"]) for f in read_json(folder / "state.json").get("_data_files", [])]
        read = _read_arrow
    else:
        known = (".jsonl", ".ndjson", ".parquet", ".txt", ".gz", ".bz2", ".xz")
        files = sorted(f for f in folder.rglob("*") if f.is_file() and f.suffix in known and f.name[0] != ".")
        read = read_rows
    if not files:
        raise UsageError(f"{folder}: holds no data set (no state.json of a saved one, no .jsonl or .parquet files).")
    before = 0.0
    for file in files:
        consumed = 0.0
        for where, value, consumed in read(file):
            yield where, value, before + consumed
        before += file.stat().st_size


def _lines(path: Path, raw: BinaryIO, stream: Any) -> Iterator[tuple[str, Any, float]]:
    """Lines as text, or Malformed."""
    for number, line in enumerate(stream, 1):
        where = f"{path}:{number}"
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8").strip()
        except UnicodeDecodeError as error:
            yield where, Malformed("not UTF-8", f"byte {error.start} of the line"), raw.tell()
            continue
        if text:
            yield where, text, raw.tell()


def _read_text(path: Path, raw: BinaryIO, stream: Any) -> Iterator[tuple[str, Any, float]]:
    for where, text, consumed in _lines(path, raw, stream):
        yield where, text if isinstance(text, Malformed) else {"prompt": text}, consumed


def _read_json(path: Path, raw: BinaryIO, stream: Any) -> Iterator[tuple[str, Any, float]]:
    """Rows of a JSON array or of JSON lines; a file whose first rows are all broken is neither."""
    head = stream.peek(64)[:64].removeprefix(b"\xef\xbb\xbf").lstrip()
    rows = (_read_array if head.startswith(b"[") else _read_json_lines)(path, raw, stream)
    held = []
    for row in rows:
        held.append(row)
        if not isinstance(row[1], Malformed):
            break
        if len(held) == PROBE:
            rows = iter(())
            break
    if held and isinstance(held[-1][1], Malformed):
        raise UsageError(
            f"{held[0][0]}: {held[0][1]}. Expected JSON lines, one object a line, or a JSON array of objects."
        )
    yield from held
    yield from rows


def _read_json_lines(path: Path, raw: BinaryIO, stream: Any) -> Iterator[tuple[str, Any, float]]:
    for where, text, consumed in _lines(path, raw, stream):
        value: Any = text
        if not isinstance(text, Malformed):
            try:
                value = json.loads(text)
            except (ValueError, RecursionError) as error:
                value = Malformed("not JSON", str(error))
        yield where, value, consumed


def _read_array(path: Path, raw: BinaryIO, stream: Any) -> Iterator[tuple[str, Any, float]]:
    """Items of one JSON array, in memory one at a time."""
    decoder, utf8 = json.JSONDecoder(), codecs.getincrementaldecoder("utf-8-sig")()
    buffer, at, number = "", 0, 1
    try:
        while True:
            at = SEPARATORS.match(buffer, at).end()  # type: ignore[union-attr]
            if buffer.startswith("]", at):
                return
            try:
                value, at = decoder.raw_decode(buffer, at)
            except ValueError as error:  # cut off at the end of what was read, or broken
                chunk = stream.read(max(1 << 16, len(buffer) - at))
                if not chunk:
                    yield f"{path}: item {number}", Malformed("not JSON", f"{error}; nothing after it is readable"), 0
                    return
                buffer, at = buffer[at:] + utf8.decode(chunk), 0
                if number == 1 and not buffer.isspace():
                    buffer = buffer.lstrip().removeprefix("[")
                continue
            yield f"{path}: item {number}", value, raw.tell()
            number += 1
    except UnicodeDecodeError:
        yield f"{path}: item {number}", Malformed("not UTF-8", "nothing after it is readable"), 0


def _read_parquet(path: Path) -> Iterator[tuple[str, Any, float]]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            known = [name for name in file.schema_arrow.names if name in (*FORMS, *OTHER_KEYS, *ANSWERS)]
            if not set(known) & set(FORMS):
                raise UsageError(f"{path}: has the columns {file.schema_arrow.names}, expected one of {list(FORMS)}.")
            yield from _batches(path, file.iter_batches(256, columns=known), max(file.metadata.num_rows, 1))
    except pyarrow.ArrowInvalid as error:
        raise UsageError(f"{path}: not a Parquet file, or damaged ({str(error).splitlines()[0]}).") from None


def _read_arrow(path: Path) -> Iterator[tuple[str, Any, float]]:
    import pyarrow

    try:
        with pyarrow.memory_map(str(path)) as source, pyarrow.ipc.open_stream(source) as stream:
            yield from _batches(path, (part.slice(i, 256) for part in stream for i in range(0, len(part), 256)), None)
    except (pyarrow.ArrowInvalid, FileNotFoundError) as error:
        raise UsageError(f"{path}: not an Arrow stream, or damaged ({str(error).splitlines()[0]}).") from None


def _batches(path: Path, batches: Iterable[Any], rows: int | None) -> Iterator[tuple[str, Any, float]]:
    size, number = path.stat().st_size, 0
    for batch in batches:
        for value in batch.to_pylist():
            number += 1
            yield f"{path}: row {number}", value, size * number / rows if rows else 0


# one row


def parse_row(value: Any, answers: bool = False) -> Row:
    """{"id", "category", "system", "turns"} of one row in any known form; raises Malformed.

    With `answers` the row keeps its whole conversation in "messages" (and "tools"), tool results included.
    """
    if not isinstance(value, dict):
        raise Malformed("not an object", f"a JSON {type(value).__name__}")
    if value.get("images") or value.get("image"):
        raise Malformed("images are not supported, text only")
    form = next((name for name in FORMS if value.get(name) is not None), None)
    if form is None:
        raise Malformed("unknown form", f"keys {sorted(map(str, value))[:8]}, expected one of {', '.join(FORMS)}")
    messages = _messages(value, form)
    _check_order(messages, answers, listed=form == "turns")
    system = messages[0]["content"] if messages[0]["role"] == "system" else None
    row: Row = {
        "id": value.get("id"),
        "category": str(value.get("category") or ""),
        "system": system,
        "turns": [message["content"] for message in messages if message["role"] == "user"],
    }
    if answers:
        row["messages"] = messages
        if value.get("tools"):
            row["tools"] = value["tools"]
    plain = row["id"] not in (None, "") and not value.get("tools") and all(len(message) == 2 for message in messages)
    try:  # what cannot be written must not get further
        whole = row.get("messages") or [system, row["turns"]]
        content = ("".join(m["content"] for m in messages) if plain else to_json([whole])).encode()
    except UnicodeEncodeError:
        raise Malformed("not valid Unicode", "half of a surrogate pair") from None
    if isinstance(row["id"], bool) or not isinstance(row["id"], (str, int, type(None))):
        raise Malformed("unusable id", f"a {type(row['id']).__name__}")
    row["id"] = xxhash.xxh3_128_hexdigest(content)[:20] if row["id"] in (None, "") else str(row["id"])
    row["form"] = form
    return row


def _messages(value: Row, form: str) -> list[dict[str, Any]]:
    body = value[form]
    if form == "instruction":
        extra = value.get("input")
        body = f"{_text(body)}\n\n{_text(extra)}" if extra else body
    if form in ("prompt", "instruction") and not isinstance(body, list):
        messages = [{"role": "user", "content": _text(body)}]
        answer = next((value[key] for key in ANSWERS if value.get(key)), None)
        if answer is not None:
            messages.append({"role": "assistant", "content": _text(answer)})
    elif not isinstance(body, list):
        raise Malformed(f"{form!r} is no list", f"a {type(body).__name__}")
    elif form == "turns" and not any(isinstance(turn, dict) for turn in body):
        messages = [{"role": "user", "content": _text(turn)} for turn in body]
    else:
        messages = [_message(item) for item in body]
    system = value.get("system") or value.get("system_prompt")
    if system:
        messages.insert(0, {"role": "system", "content": _text(system)})
    return messages


def _message(item: Any) -> dict[str, Any]:
    if not isinstance(item, dict):
        raise Malformed("a turn is no object", f"a {type(item).__name__}")
    name = item.get("role") if item.get("role") is not None else item.get("from")
    role = ROLES.get(name.lower()) if isinstance(name, str) else None
    if role is None:
        raise Malformed("unknown role", repr(name))
    content = item.get("content") if item.get("content") is not None else item.get("value")
    message: dict[str, Any] = {"role": role, "content": "" if content is None else _text(content)}
    kept = ("tool_calls", "tool_call_id", "name", "reasoning_content", "thinking")
    return message | {key: item[key] for key in kept if item.get(key) and (role != "user" or key == "name")}


def _text(content: Any) -> str:
    if isinstance(content, list):  # parts, as in the OpenAI form
        for part in content:
            kind = part.get("type") if isinstance(part, dict) else None
            if kind is not None and kind != "text":
                raise Malformed("images are not supported, text only", f"a part of type {kind!r}")
        content = "".join(part.get("text") or "" if isinstance(part, dict) else str(part) for part in content)
    if not isinstance(content, str):
        raise Malformed("a turn is no text", f"a {type(content).__name__}")
    return content


def _check_order(messages: list[dict[str, Any]], answers: bool, listed: bool) -> None:
    """Raise Malformed unless the turns come in an order that a target can be asked in; `listed`: user turns alone."""
    before = "start"
    allowed = {"system": ("start",), "user": ("start", "system", "assistant"), "assistant": ("user", "tool")}
    if listed:
        allowed["user"] += ("user",)
    for number, message in enumerate(messages, 1):
        role = message["role"]
        if role == "tool" and not answers:
            raise Malformed("tool results", "they cannot be generated anew; import the conversation with its answers")
        if not message["content"].strip() and not (answers and message.get("tool_calls")):
            raise Malformed("empty turn", f"turn {number}, {role}")
        if before not in allowed.get(role, ("assistant", "tool")):
            if role == before:
                raise Malformed(f"two {role} turns in a row", f"turn {number}")
            raise Malformed(f"{role} turn after {before}", f"turn {number}")
        before = role
    if not any(message["role"] == "user" for message in messages):
        raise Malformed("no user turn")
    if answers and not any(message["role"] == "assistant" for message in messages):
        raise Malformed("no answer", "imported conversations need assistant turns")


# many rows


class Seen:
    """64-bit hashes already met, 8 bytes each: a sorted array and a small set of the newest."""

    def __init__(self) -> None:
        self.old, self.new = np.empty(0, np.uint64), set[int]()

    def add(self, text: str) -> bool:
        """Whether `text` is new."""
        value = xxhash.xxh3_64_intdigest(text.encode())
        if value in self.new:
            return False
        at = int(np.searchsorted(self.old, np.uint64(value)))
        if at < len(self.old) and self.old[at] == value:
            return False
        self.new.add(value)
        if len(self.new) > 1 << 18:
            self.old = np.union1d(self.old, np.fromiter(self.new, np.uint64, len(self.new)))
            self.new.clear()
        return True


def prepare_conversations(
    sources: Sequence[str | Path],
    out: str | Path,
    *,
    weights: dict[str, float] | None = None,
    answers: bool = False,
    policy: Policy = "skip",
    limit: int | None = None,
    seed: int = 0,
    template: ChatTemplate | None = None,
) -> Report:
    """Write the usable conversations of all sources into the file `out`, one JSON object a line.

    Duplicates (the same text but for case and white space) are dropped. `weights` name categories, or sources, and the
    share of their rows to keep (a category's counts before its source's); `limit` keeps a random choice over all
    sources; both draw by id and seed. With a template, conversations are dropped whose first prompt it refuses. With policy "stop" the first malformed row raises UsageError; with "skip" it is counted.
    A run that keeps nothing raises UsageError.
    """
    weights = weights or {}
    if wrong := [name for name, weight in weights.items() if not 0 <= weight <= 1]:
        raise UsageError(f"weights: {wrong[0]!r} is {weights[wrong[0]]}, expected a share from 0 to 1.")
    report = Report()
    rows = _parsed(sources, weights, report, answers, policy, seed)
    if template is not None:
        rows = _fitting(rows, report, template, policy)
    if limit is not None:
        rows = _chosen(rows, report, limit, seed)
    with atomic_file(out) as file:
        for _, row in rows:
            report.forms[row.pop("form")] += 1
            report.categories[row["category"]] += 1
            report.scripts[script(row["turns"][0])] += 1
            report.kept += 1
            file.write(to_json(row).encode() + b"\n")
        if not report.kept:
            raise UsageError(f"{', '.join(map(str, sources))}: no usable conversation. {report}")
    return report


def _parsed(
    sources: Sequence[str | Path], weights: dict[str, float], report: Report, answers: bool, policy: Policy, seed: int
) -> Iterator[tuple[str, Row]]:
    texts, ids, unmet = Seen(), Seen(), set(weights) - set(map(str, sources))
    sizes = [_size(Path(source)) for source in sources]
    with progress("conversations", sum(sizes), "B") as advance:
        for source, size in zip(sources, sizes, strict=True):
            before = 0.0
            for where, value, consumed in read_rows(source):
                report.read += 1
                if consumed > before and report.read % 256 == 0:
                    advance(consumed - before)
                    before = consumed
                try:
                    if isinstance(value, Malformed):
                        raise value
                    row = parse_row(value, answers)
                except Malformed as error:
                    _refuse(report, policy, where, error.kind, str(error))
                    continue
                unmet.discard(row["category"])
                if not texts.add(normalised(row)):
                    report.drop("duplicate", where)
                elif not ids.add(row["id"]):
                    report.drop("id used twice", where, f"the id {row['id']!r} stands for another conversation already")
                elif draw(row["id"], seed) >= weights.get(row["category"], weights.get(str(source), 1)):
                    report.drop("left out by weight", where)
                else:
                    yield where, row
            advance(max(size - before, 0))
    if unmet:
        raise UsageError(f"weights: {min(unmet)!r} is neither a category of these rows nor one of the paths.")


def _size(path: Path) -> int:
    return sum(f.stat().st_size for f in ([path] if path.is_file() else path.rglob("*")) if f.is_file())


def script(text: str) -> str:
    """The writing that most letters at the beginning of a text belong to: LATIN, CJK, CYRILLIC, ..."""
    beginning = text[:60]
    if beginning.isascii():
        return "LATIN"
    names = Counter(unicodedata.name(letter, "unknown").split()[0] for letter in beginning if letter.isalpha())
    return max(names, key=names.__getitem__, default="none")


def normalised(row: Row) -> str:
    """What makes two conversations the same: their texts but for case and white space."""
    texts = [message["content"] for message in row.get("messages") or ()] or [row["system"] or "", *row["turns"]]
    return "\0".join(" ".join(text.casefold().split()) for text in texts)


def _refuse(report: Report, policy: Policy, where: str, kind: str, detail: str) -> None:
    if policy == "stop":
        raise UsageError(f"{where}: {detail}. Correct the row, or skip such rows.")
    report.drop(kind, where, detail)


def draw(text: str, seed: int) -> float:
    """A number in [0, 1) that depends on the text and the seed alone."""
    return xxhash.xxh3_64_intdigest(text.encode(), seed) / 2**64


def batched(
    rows: Iterable[Any], work: Callable[[list[Any]], list[Any]], size: int = 256
) -> Iterator[tuple[list[Any], list[Any]]]:
    """(rows, work(rows)) of each batch in order; many rows are worked on by a process a core, forked from this one."""
    global _work
    iterator, waiting, _work = iter(rows), deque[tuple[list[Any], Future]](), work
    head, cores = list(islice(iterator, MANY)), os.cpu_count() or 1
    everything = chain(head, iterator)
    batches = iter(lambda: list(islice(everything, size)), [])
    if len(head) < MANY or cores == 1:
        yield from ((part, work(part)) for part in batches)
        return
    with ProcessPoolExecutor(cores, get_context("fork"), _begin) as pool:
        for part in batches:
            waiting.append((part, pool.submit(_do, part)))
            if len(waiting) > 2 * cores:
                part, future = waiting.popleft()
                yield part, future.result()
        yield from ((part, future.result()) for part, future in waiting)


def _begin() -> None:
    """In a forked worker: one core's worth, and no life after the parent's death."""
    gc.freeze()  # what the parent had is not looked through again and again
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _do(part: list[Any]) -> list[Any]:
    assert _work is not None
    return _work(part)


def first_prompt(row: Row) -> list[dict[str, str]]:
    """The messages that the first answer of a conversation is asked with."""
    system = [{"role": "system", "content": row["system"]}] if row.get("system") else []
    return [*system, {"role": "user", "content": row["turns"][0]}]


def _fitting(
    rows: Iterable[tuple[str, Row]], report: Report, template: ChatTemplate, policy: Policy
) -> Iterator[tuple[str, Row]]:
    for part, refusals in batched(rows, partial(_refusals, template)):
        for (where, row), refusal in zip(part, refusals, strict=True):
            if refusal:
                _refuse(report, policy, where, "refused by the chat template", refusal)
            else:
                yield where, row


def _refusals(template: ChatTemplate, rows: list[tuple[str, Row]]) -> list[str]:
    """Why the template refuses each first prompt; "" where it takes it."""
    found = template.renderings([first_prompt(row) for _, row in rows])
    return [str(prompt) if isinstance(prompt, TemplateRefusal) else "" for prompt in found]


def _chosen(rows: Iterable[tuple[str, Row]], report: Report, limit: int, seed: int) -> Iterator[tuple[str, Row]]:
    """`limit` rows with the smallest draws, in the order read; no more than these are held."""
    heap: list[tuple[float, int, str, Row]] = []
    for number, (where, row) in enumerate(rows):
        entry = (-draw(row["id"], seed), number, where, row)
        heapq.heappush(heap, entry)
        if len(heap) > limit:
            report.drop("beyond the limit", heapq.heappop(heap)[2])
    yield from ((where, row) for _, _, where, row in sorted(heap, key=lambda entry: entry[1]))
