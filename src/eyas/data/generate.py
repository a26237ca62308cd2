"""On-policy answers: each assistant turn is written by the target itself, in order, on its own earlier answers.

Token ids are kept as the target read and wrote them, never made again from text. What a conversation gets does not
depend on which others are generated beside it, nor on an interruption.
"""

import contextlib
import json
import os
import time
from collections import Counter, deque
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from random import Random
from threading import Event, Lock, Thread
from typing import TYPE_CHECKING, Any, Literal

from eyas.data.template import ChatTemplate, TemplateRefusal
from eyas.errors import UsageError
from eyas.files import atomic_file, disk_errors, fingerprint
from eyas.progress import progress
from eyas.target import LoadedTarget

if TYPE_CHECKING:
    import torch

    from eyas.data.slots import Engine

SYNC_EVERY = 16  # documents between two fsyncs of the journal,
SYNC_SECONDS = 5.0  # or this long, if that is sooner
MAX_WORKERS = 4
_text = Lock()  # tokenizers are not made for several threads


@dataclass
class Document:
    """One conversation on its way. The target's cache holds the first `cached` tokens."""

    conversation: dict[str, Any]
    key: str
    messages: list[dict[str, str]]
    tokens: list[int]
    spans: list[tuple[int, int]] = field(default_factory=list)
    finish: list[str] = field(default_factory=list)
    cached: int = 0
    start: int = 0  # of the turn being written
    done: bool = False
    marks: dict[str, Any] = field(default_factory=dict)  # what a reader must know of where its ids come from

    @property
    def pending(self) -> list[int]:
        return self.tokens[self.cached :]

    def record(self) -> dict[str, Any]:
        return {
            "id": self.conversation["id"],
            "category": self.conversation.get("category") or "",
            "tokens": self.tokens,
            "spans": self.spans,
            "finish": self.finish,
            "messages": self.messages,
            **self.marks,
        }


@dataclass(frozen=True)
class Sampling:
    temperature: float
    seed: int


@dataclass(frozen=True)
class Limits:
    max_new_tokens: int  # of one turn
    length: int  # of a document in tokens
    end_ids: frozenset[int]


def generate(
    conversations: list[dict[str, Any]],
    target: LoadedTarget,
    out: str | Path,
    *,
    max_new_tokens: int = 256,
    slots: int = 64,
    max_length: int | None = None,
    temperature: float = 0.0,
    seed: int = 0,
    on_long: Literal["error", "skip"] = "error",
    template: ChatTemplate | None = None,
) -> dict[str, Any]:
    """Write the target's answers to `conversations` (id, category, system, turns) into `out`, one document a line.

    `temperature` 0 is greedy; else each token is drawn by (seed, id, position) alone. A turn ends with an end token
    ("stop") or after `max_new_tokens` ("length"), a document at min(context of the target, `max_length`) tokens.
    Finished documents wait in `out`.part, so that a run which was cut off goes on where it stood; both end in the
    same file. `slots` documents are written at a time (a part of the settings: it may show in the last bit of a sum).

    Returns figures: documents, turns, prompt_tokens, generated_tokens, finish {stop, length}, skipped, cut (documents
    that ended before their last turn), resumed, seconds, tokens_per_second of this run, engine, engine_reason.
    Raises UsageError for a bad setting, for an id that is given twice, and for a prompt that does not fit.
    """
    out = Path(out)
    if max_new_tokens < 1 or slots < 1 or temperature < 0 or on_long not in ("error", "skip"):
        raise UsageError(
            f"generate: max_new_tokens={max_new_tokens}, slots={slots}, temperature={temperature}, on_long={on_long!r}. "
            "Expected at least 1, at least 1, at least 0, and 'error' or 'skip'."
        )
    template = template or ChatTemplate(target.tokenizer)  # type: ignore[arg-type]
    length = min(target.target.max_positions, max_length or target.target.max_positions)
    limits = Limits(max_new_tokens, length, frozenset(template.end_ids))
    settings = {
        "target": target.target.fingerprint,
        "dtype": str(target.dtype),
        "template": [template.text, template.options],
        "limits": [max_new_tokens, length],
        "slots": slots,
        "sampling": [temperature, seed] if temperature else None,
    }
    documents, skipped = prepare(conversations, template, limits, fingerprint(settings), on_long)
    begin, written, engine, reason = time.monotonic(), 0, "", ""
    with Journal(out, {document.key for document in documents}) as journal:
        todo, resumed = journal.todo(documents, max_new_tokens), len(journal.lines)
        if todo:
            from eyas.data.slots import opened

            with (
                opened(target, slots, length, _workers(target)) as (engines, reason),
                progress("generate", len(documents), "documents", done=resumed) as advance,
                contextlib.closing(_run(engines, todo, template, limits, Sampling(temperature, seed))) as finished,
            ):
                engine = type(engines[0]).__name__
                for document in finished:
                    journal.add(document)
                    written += sum(end - start for start, end in document.spans)
                    advance(1, f"{written / (time.monotonic() - begin):,.0f} tokens/s")
        figures = journal.finish(documents, time.monotonic() - begin, written)
    return figures | {"skipped": skipped, "resumed": resumed, "engine": engine, "engine_reason": reason}


def _workers(target: LoadedTarget) -> int:
    """Engines side by side: small layers do not feed many cores, so a small target on a CPU gets several."""
    import torch

    if target.device.type != "cpu" or target.target.hidden_size > 2048:
        return 1
    return min(MAX_WORKERS, torch.get_num_threads())


def prepare(
    conversations: list[dict[str, Any]], template: ChatTemplate, limits: Limits, settings: str, on_long: str
) -> tuple[list[Document], int]:
    """Documents that hold their first prompt, in the order given, and how many were skipped as too long."""
    documents, skipped = [], 0
    seen: set[str] = set()
    for conversation in conversations:
        name, turns = conversation["id"], conversation["turns"]
        if name in seen:
            raise UsageError(f"generate: the id {name!r} is given twice. Give every conversation its own id.")
        seen.add(name)
        if not turns:
            raise UsageError(f"generate: conversation {name!r} has no user turn. Give it one or leave it out.")
        messages = [{"role": "system", "content": conversation["system"]}] if conversation.get("system") else []
        messages.append({"role": "user", "content": turns[0]})
        try:
            prompt = template.prompt_ids(messages)
        except TemplateRefusal as refusal:
            raise UsageError(f"generate: conversation {name!r}: {refusal}") from None
        if len(prompt) + 1 > limits.length:
            if on_long == "skip":
                skipped += 1
                continue
            raise UsageError(
                f"generate: the prompt of conversation {name!r} is {len(prompt):,} tokens long and leaves no room for an "
                f"answer within {limits.length:,} tokens. Shorten it, raise max_length where the target's context "
                "allows, or skip such prompts (on_long: skip)."
            )
        key = fingerprint([settings, conversation])[:32]
        documents.append(Document(conversation, key, messages, prompt, start=len(prompt)))
    return documents, skipped


def expected_length(document: Document, max_new_tokens: int) -> int:
    """Longest first: documents in the slots are of like length, and the last ones to finish are short."""
    turns = document.conversation["turns"]
    return len(document.tokens) + sum(len(turn) // 4 for turn in turns[1:]) + max_new_tokens * len(turns)


def _run(
    engines: list["Engine"], todo: list[Document], template: ChatTemplate, limits: Limits, sampling: Sampling
) -> Generator[Document, None, None]:
    """Documents as they are finished, from one thread an engine, each with its share of the cores."""
    import torch

    threads = torch.get_num_threads()
    waiting, finished, stop = deque(todo), SimpleQueue[Document | BaseException | None](), Event()
    share = -(-len(todo) // len(engines))  # few documents are spread over all engines

    def work(engine: "Engine") -> None:
        try:
            torch.set_num_threads(max(1, threads // len(engines)))  # holds for this thread
            for document in _continue(engine, waiting, min(share, engine.count), template, limits, sampling, stop):
                finished.put(document)
            finished.put(None)
        except BaseException as error:
            finished.put(error)

    workers = [Thread(target=work, args=(engine,), daemon=True) for engine in engines]
    for worker in workers:
        worker.start()
    running = len(workers)
    try:
        while running:
            item = finished.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                running -= 1
            else:
                yield item
    finally:
        stop.set()
        for worker in workers:
            worker.join()
        torch.set_num_threads(threads)


def _continue(
    engine: "Engine",
    waiting: deque[Document],
    slots: int,
    template: ChatTemplate,
    limits: Limits,
    sampling: Sampling,
    stop: Event,
) -> Iterator[Document]:
    """One engine's loop. A slot whose document is finished takes the next one at once."""
    busy: dict[int, Document] = {}
    while not stop.is_set():
        for slot in range(slots):
            while not stop.is_set():
                if slot not in busy:
                    try:
                        busy[slot] = waiting.popleft()
                    except IndexError:
                        break
                document = busy[slot]
                if not document.done and (len(document.pending) > 1 or not document.cached):
                    logits = engine.read(slot, document.pending, document.cached)
                    document.cached = len(document.tokens)
                    _write(document, _choose(logits[None], [document], sampling)[0], template, limits)
                elif not document.done:
                    break  # one token to go on with: that is for the common step
                if document.done:
                    yield busy.pop(slot)
        if not busy:
            return
        logits = engine.step(
            {slot: document.tokens[-1] for slot, document in busy.items()},
            {slot: document.cached for slot, document in busy.items()},
        )
        tokens = _choose(logits, [busy.get(slot) for slot in range(engine.count)], sampling)
        for slot, document in busy.items():
            document.cached += 1
            _write(document, tokens[slot], template, limits)


def _choose(logits: "torch.Tensor", documents: Sequence[Document | None], sampling: Sampling) -> list[int]:
    """The next token of each row of logits [B, V]. A draw depends on seed, id and position alone."""
    if not sampling.temperature:  # NumPy is many times faster on a CPU; both take the first of equals
        return (logits.float().numpy() if logits.device.type == "cpu" else logits).argmax(-1).tolist()
    tokens = []
    for row, document in zip(logits, documents, strict=True):
        if document is None:
            tokens.append(0)
            continue
        shares = (row.float() / sampling.temperature).softmax(-1).double().cumsum(-1)
        draw = Random(f"{sampling.seed} {len(document.tokens)} {document.conversation['id']}").random()
        tokens.append(int((shares > draw * shares[-1]).int().argmax()))
    return tokens


def _write(document: Document, token: int, template: ChatTemplate, limits: Limits) -> None:
    """Append the target's token; where it ends a turn, go on with the next user turn or end the document."""
    document.tokens.append(token)
    end = len(document.tokens)
    full = end >= limits.length
    stopped = token in limits.end_ids
    if not (stopped or full or end - document.start >= limits.max_new_tokens):
        return
    with _text:
        end_turn(document, stopped, full, template, limits)


def end_turn(document: Document, stopped: bool, full: bool, template: ChatTemplate, limits: Limits) -> None:
    """Close the answer that ends the document's tokens; append what leads to the next one, or end the document."""
    answer, end = document.tokens[document.start :], len(document.tokens)
    document.spans.append((document.start, end))
    document.finish.append("stop" if stopped else "length")
    written = answer[:-1] if stopped else answer
    text = str(template.tokenizer.decode(written, skip_special_tokens=False, clean_up_tokenization_spaces=False))
    document.messages.append({"role": "assistant", "content": text})
    turns = document.conversation["turns"]
    document.done = True
    if len(document.spans) == len(turns) or full:
        return
    user = turns[len(document.spans)]
    try:
        glue = template.next_turn_ids(document.messages, user, answer)
    except TemplateRefusal:
        return
    if glue and end + len(glue) + 1 <= limits.length:
        document.messages.append({"role": "user", "content": user})
        document.tokens += glue
        document.start = len(document.tokens)
        document.done = False


class Journal:
    """Finished documents on their way to `out`: one line each, "key JSON", appended to `out`.part and synced in groups.

    A line counts when it is whole and its key is wanted; keys cover settings and conversation, so answers made under
    other settings are never taken for these.
    """

    def __init__(self, out: Path, wanted: set[str]) -> None:
        self.out, self.part, self.wanted = out, out.with_name(out.name + ".part"), wanted
        self.lines: dict[str, bytes] = {}
        self.unsynced, self.synced = 0, time.monotonic()

    def __enter__(self) -> "Journal":
        with disk_errors(self.part):
            self.part.parent.mkdir(parents=True, exist_ok=True)
            whole = 0
            if self.part.exists():
                for line in self.part.read_bytes().splitlines(keepends=True):
                    if not line.endswith(b"\n"):
                        break  # torn by a kill
                    whole += len(line)
                    key, _, text = line.decode("utf-8", "replace").partition(" ")
                    with contextlib.suppress(ValueError):
                        if key in self.wanted and json.loads(text):
                            self.lines[key] = text.encode()
            self.file = open(self.part, "ab")
            self.file.truncate(whole)
        return self

    def __exit__(self, *_: Any) -> None:
        self.sync()
        self.file.close()

    def add(self, document: Document) -> None:
        text = json.dumps(document.record(), ensure_ascii=False) + "\n"
        self.lines[document.key] = text.encode()
        with disk_errors(self.part):
            self.file.write(f"{document.key} {text}".encode())
        self.unsynced += 1
        if self.unsynced >= SYNC_EVERY or time.monotonic() - self.synced > SYNC_SECONDS:
            self.sync()

    def sync(self) -> None:
        with disk_errors(self.part):
            self.file.flush()
            os.fsync(self.file.fileno())
        self.unsynced, self.synced = 0, time.monotonic()

    def todo(self, documents: list[Document], max_new_tokens: int) -> list[Document]:
        """Those not finished, longest first."""
        left = [document for document in documents if document.key not in self.lines]
        return sorted(left, key=lambda document: expected_length(document, max_new_tokens), reverse=True)

    def finish(self, documents: list[Document], seconds: float, written: int) -> dict[str, Any]:
        """Write `out` whole, in the order of the input, and drop the journal. Returns what the file holds, and the
        speed at which `written` tokens came."""
        counts: Counter[str] = Counter()
        finish: Counter[str] = Counter({"stop": 0, "length": 0})
        with atomic_file(self.out) as file:
            for each in documents:
                file.write(self.lines[each.key])
                document = json.loads(self.lines[each.key])
                generated = sum(end - start for start, end in document["spans"])
                counts.update(
                    documents=1,
                    turns=len(document["spans"]),
                    generated_tokens=generated,
                    prompt_tokens=len(document["tokens"]) - generated,
                )
                finish.update(document["finish"])
        self.part.unlink()
        names = ("documents", "turns", "prompt_tokens", "generated_tokens")
        return {name: counts[name] for name in names} | {
            "finish": dict(finish),
            "cut": sum(len(each.conversation["turns"]) for each in documents) - counts["turns"],
            "seconds": round(seconds, 3),
            "tokens_per_second": round(written / seconds, 1),
        }
