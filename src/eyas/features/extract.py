"""Extraction: run the target over finished conversations and keep the states a draft learns from.

The target's body runs once over each batch of conversations of similar length, hooks keep the wanted layers only, and
the head runs at teacher positions alone. Batches follow from the work list, so a resumed run computes what is missing
exactly as the undisturbed run would have.
"""

import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from eyas.errors import EyasError, UsageError
from eyas.features.index import summary
from eyas.features.record import Entry, Sample, mask_of, relative_error, spans_of, teacher_positions, text_digest
from eyas.features.store import Store, StoreWriter
from eyas.progress import progress
from eyas.target import LoadedTarget, Target, default_aux_layers

if TYPE_CHECKING:
    import torch

HEAD_ROWS = 1024  # rows of logits at a time: [1024, V]
OBJECT_BYTES = 64 << 20  # what is uploaded at once, where a store is not local
EARLY = 4000  # teacher positions after which a hopeless self-check ends the run at once
CAUSES = (
    "Likely causes: the conversations were not written greedily by this target; another chat template or tokenizer wrote "
    "them; the stored final state lacks the target's final norm or its logit rule; states of one conversation were "
    "stored under another"
)


State = tuple["torch.Tensor", "torch.Tensor", "torch.Tensor"]  # aux bf16 [T, A, H], final bf16 [F, H], argmax int32 [F]
Source = Callable[[list[dict[str, Any]]], Iterable[State]]  # the states of some documents, in order


def extract(
    documents: list[dict[str, Any]],
    target: LoadedTarget,
    path: str | Path,
    *,
    layers: list[int] | None = None,
    codec: str = "bf16",
    token_budget: int = 4096,
    threshold: float = 0.9,
    inputs: dict[str, str] | None = None,
    source: Source | None = None,
    shard_bytes: int = 256 << 20,
) -> dict[str, Any]:
    """Fill the store at `path` with the states of `documents` (rows of answers.jsonl) and return the figures.

    `layers` are physical outputs out(v) (the default layers when None). `token_budget` bounds the tokens of a batch,
    padding included. `threshold` is the least share of teacher positions whose argmax is the next token (0 switches
    the check off, for conversations that were sampled or not written by the target). `inputs` go to the manifest.
    `source` gives the states in place of a forward pass here (`eyas.features.engines`).
    A store that is partly filled is gone on with. Raises UsageError for documents that do not fit the target or the
    store, EyasError when the disk is full or the self-check fails.
    """
    layers = wanted_layers(layers, target.target)
    check_documents(documents, target.target)
    work = source or (lambda batch: forward(target, batch, layers))
    start = time.monotonic()
    with open_writer(path, target, layers, codec, shard_bytes=shard_bytes) as store:
        done = already(documents, store.entries, path)
        total, before = tokens_of(documents), tokens_of(documents[i] for i in done)
        with progress("extract", total, "tok", done=before) as advance, _Thread(store, advance, threshold) as thread:
            for batch in batches([len(document["tokens"]) for document in documents], token_budget):
                if not done.issuperset(batch):
                    thread.put(samples([documents[i] for i in batch], work, {documents[i]["id"] for i in done}))
        return conclude(store, documents, total - before, time.monotonic() - start, threshold, inputs)


def wanted_layers(layers: list[int] | None, target: Target) -> list[int]:
    layers = sorted(layers) if layers else default_aux_layers(target.num_layers)
    if layers[-1] >= target.num_layers or layers[0] < 0:
        raise UsageError(f"Auxiliary layers {layers}: the target has layers 0 to {target.num_layers - 1}.")
    return layers


def open_writer(
    path: str | Path, target: LoadedTarget, layers: list[int], codec: str, *, source: str = "", **options: Any
) -> StoreWriter:
    """A writer for this target's states; `source` names another program that computed them."""
    extra = {"dtype": str(target.dtype).removeprefix("torch."), "vocab_size": target.target.vocab_size}
    return StoreWriter(
        path,
        layers=layers,
        hidden_size=target.target.hidden_size,
        target=target.target.fingerprints,
        codec=codec,
        extra=extra | ({"source": source} if source else {}),
        **options,
    )


def tokens_of(documents: Iterable[dict[str, Any]]) -> int:
    return sum(len(document["tokens"]) for document in documents)


def samples(documents: list[dict[str, Any]], work: Source, done: set[str]) -> list[Sample]:
    """The samples of one batch that are not `done`. The batch is computed whole, so that a sample's bits do not depend
    on what was there before."""
    found = zip(documents, work(documents), strict=True)
    return [to_sample(document, *state) for document, state in found if document["id"] not in done]


def conclude(
    store: StoreWriter,
    documents: list[dict[str, Any]],
    fresh: int,
    seconds: float,
    threshold: float,
    inputs: dict[str, str] | None,
) -> dict[str, Any]:
    """Commit, judge and complete the store; returns the figures. `fresh` tokens were extracted in this run."""
    store.commit()
    mine = [store.entries[document["id"]] for document in documents]
    size = sum(entry.length for entry in mine)
    shown = {"threshold": threshold, "seconds": seconds, "tokens_per_s": fresh / seconds if fresh else 0.0}
    figures = summary(mine) | {"bytes": size, "bytes_per_token": size / max(tokens_of(documents), 1)} | shown
    _judge(mine, figures, threshold)
    return figures | {"complete": store.finish(inputs, shown)}


def check_documents(documents: list[dict[str, Any]], target: Target) -> None:
    """Raises UsageError naming the first document that is not a row of answers.jsonl this target could have written."""
    seen: set[str] = set()
    vocabulary, context = target.vocab_size, target.max_positions
    for number, document in enumerate(documents):
        try:
            name, tokens, spans = document["id"], np.asarray(document["tokens"]), document["spans"]
            flat = [int(edge) for span in spans for edge in span]
            pairs = all(len(span) == 2 for span in spans)
        except (KeyError, TypeError, ValueError):
            raise UsageError(
                f"Document {number}: expected a row with id, tokens and spans, as `eyas generate` writes."
            ) from None
        problem = ""
        if not isinstance(name, str) or name in seen:
            problem = "this id occurs twice" if name in seen else "the id must be a string"
        elif tokens.ndim != 1 or not len(tokens) or tokens.dtype.kind != "i":
            problem = "tokens must be a list of token ids that is not empty"
        elif tokens.min() < 0 or tokens.max() >= vocabulary:
            problem = (
                f"token id {tokens.max() if tokens.min() >= 0 else tokens.min()} outside the vocabulary of {vocabulary}"
            )
        elif len(tokens) > context:
            problem = f"{len(tokens)} tokens, the target's context holds {context}; leave it out or cut it at a turn"
        elif not pairs or flat != sorted(set(flat)) or (flat and (flat[0] < 0 or flat[-1] > len(tokens))):
            problem = f"spans {spans} must be ascending [start, end) pairs within {len(tokens)} tokens, none touching the next"
        if problem:
            raise UsageError(f"Document {name!r}: {problem}.")
        seen.add(name)


def already(documents: list[dict[str, Any]], entries: dict[str, Entry], path: str | Path) -> set[int]:
    """Places in the work list that the store holds; refuses when it holds another conversation under the same id."""
    done = set()
    for i, document in enumerate(documents):
        entry = entries.get(document["id"])
        if entry is None:
            continue
        if entry.text != text_digest(np.asarray(document["tokens"]), np.asarray(document["spans"])):
            raise UsageError(
                f"{path}: holds another conversation under the id {document['id']!r} (tokens or spans differ). "
                "The answers were written anew; extract into another folder, or remove this one."
            )
        done.add(i)
    return done


def batches(lengths: list[int], token_budget: int) -> list[list[int]]:
    """Places of documents of similar length, longest first, each batch padded within `token_budget` where possible."""
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    result, at = [], 0
    while at < len(order):
        size = max(1, token_budget // lengths[order[at]])
        result.append(order[at : at + size])
        at += size
    return result


def forward(target: LoadedTarget, documents: list[dict[str, Any]], layers: list[int]) -> Iterator[State]:
    """The states of some documents, computed as one batch, as bf16 tensors on the CPU, in order."""
    import torch

    lengths = [len(document["tokens"]) for document in documents]
    ids = torch.zeros(len(documents), max(lengths), dtype=torch.long)  # [B, T]
    for row, document in enumerate(documents):
        ids[row, : lengths[row]] = torch.as_tensor(document["tokens"])
    with torch.inference_mode():
        # Padding is on the right, so causal attention hides it from every real position without any mask.
        with target.capturing(layers) as caught:
            target.body(input_ids=ids.to(target.device), use_cache=False)
        aux = [caught[layer].to("cpu", torch.bfloat16, non_blocking=True) for layer in layers]  # A x [B, T, H]
        teachers = [teacher_positions(mask_of(doc["spans"], n)) for doc, n in zip(documents, lengths, strict=True)]
        rows = torch.cat([torch.full((len(t),), row) for row, t in enumerate(teachers)])
        columns = torch.cat([torch.from_numpy(t) for t in teachers])
        states = caught["final"]
        states = states[rows.to(states.device), columns.to(states.device)]  # [F_total, H]
        best, final = argmax(target, states), states.to("cpu", torch.bfloat16)
        if target.device.type == "cuda":
            torch.cuda.synchronize(target.device)
    counts = [len(t) for t in teachers]
    for row, (f, a) in enumerate(zip(final.split(counts), best.split(counts), strict=True)):
        yield torch.stack([layer[row, : lengths[row]] for layer in aux], 1), f, a


def argmax(target: LoadedTarget, final: "torch.Tensor") -> "torch.Tensor":
    """The target's full-vocabulary argmax, int32 [F] on the CPU, from its post-norm final states [F, H]."""
    import torch

    best = [target.logits(chunk).max(-1).indices for chunk in final.split(HEAD_ROWS) if len(chunk)]
    return torch.cat([torch.zeros(0, dtype=torch.long, device=final.device), *best]).to("cpu", torch.int32)


def to_sample(document: dict[str, Any], aux: "torch.Tensor", final: "torch.Tensor", argmax: "torch.Tensor") -> Sample:
    tokens = np.asarray(document["tokens"], dtype=np.int32)
    return Sample(
        id=document["id"],
        category=document.get("category") or "",
        tokens=tokens,
        supervised=mask_of(document["spans"], len(tokens)),
        aux=_bits(aux),
        final=_bits(final),
        argmax=argmax.numpy(),
    )


class _Thread:
    """Writes batches while the target computes. At most two wait, so memory stays bounded."""

    def __init__(self, store: StoreWriter, advance: Callable[..., None], threshold: float) -> None:
        self._store, self._advance, self._threshold = store, advance, threshold
        self._queue: queue.Queue[list[Sample] | None] = queue.Queue(2)
        self._failure: BaseException | None = None
        self._unsure = True  # until the self-check has been looked at early
        self._thread = threading.Thread(target=self._run, name="store writer", daemon=True)

    def put(self, batch: list[Sample]) -> None:
        """Hand over a batch. Raises what the writer met."""
        self._queue.put(batch)
        self._raise()

    def _raise(self) -> None:
        if self._failure:
            raise self._failure

    def _run(self) -> None:
        try:
            while batch := self._queue.get():
                for sample in batch:
                    check_finite(sample)
                    self._store.append(sample)
                if self._store.place.local or self._store.pending_bytes >= OBJECT_BYTES:
                    self._store.commit()
                self._advance(sum(len(sample.tokens) for sample in batch))
                if self._unsure:
                    self._early()
        except BaseException as failure:
            self._failure = failure
            while self._queue.get():  # the target's side must not block on a full queue
                pass

    def _early(self) -> None:
        """A run that cannot succeed ends now rather than after days."""
        figures = summary(self._store.entries.values())
        if figures["teacher_positions"] >= EARLY:
            self._unsure = False
            if figures["self_check"] < self._threshold / 2:
                _judge(list(self._store.entries.values()), figures, self._threshold)

    def __enter__(self) -> "_Thread":
        self._thread.start()
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        self._queue.put(None)
        self._thread.join()
        if kind is None:
            self._raise()


def check_finite(sample: Sample) -> None:
    for name, bits in (("auxiliary", sample.aux), ("final", sample.final)):
        if (bits & 0x7F80 == 0x7F80).any():
            raise EyasError(
                f"Document {sample.id!r}: the target's {name} states hold infinities or NaN. "
                "Load the target in bfloat16 or float32 (float16 overflows in some models)."
            )


def _judge(entries: list, figures: dict[str, Any], threshold: float) -> None:
    share = figures["self_check"]
    if share is not None and share < threshold:
        worst = min((entry for entry in entries if entry.teachers), key=lambda entry: entry.hits / entry.teachers)
        raise EyasError(
            f"Self-check failed: the argmax of the stored final states is the next token at {share:.1%} of "
            f"{figures['teacher_positions']} positions, expected at least {threshold:.0%} (worst: {worst.id!r}, "
            f"{worst.hits / worst.teachers:.1%}). {CAUSES}. For sampled or foreign answers lower the threshold."
        )


SAME = 0.15  # relative error on ordinary channels; bf16 noise between batch shapes gives 0.02, another layer about 1


def compare(path: str | Path, target: LoadedTarget, samples: int = 8, seed: int = 0) -> dict[str, Any]:
    """Extract some random samples of a store anew, one by one, and compare: the proof that its layers are what it says.

    Returns samples, ok, bad [{sample, reason}], worst (the largest relative error on ordinary channels). Where a layer
    differs the reason names the target's layer that fits best.
    """
    store = Store(path)
    layers, count = store.meta["layers"], target.target.num_layers
    if store.meta["hidden_size"] != target.target.hidden_size or layers[-1] >= count:
        raise UsageError(
            f"{path}: layers {layers} of width {store.meta['hidden_size']} do not fit {target.target.path}."
        )
    chosen = np.random.default_rng(seed).choice(len(store), min(samples, len(store)), replace=False)
    bad, worst = [], 0.0
    for number in sorted(int(i) for i in chosen):
        sample = store.read(number)
        document = {"tokens": sample.tokens, "spans": spans_of(sample.supervised)}
        aux, final, _ = (_bits(x) for x in next(forward(target, [document], list(range(count)))))
        errors = [_error(sample.aux[:, slot], aux[:, layer]) for slot, layer in enumerate(layers)]
        errors.append(_error(sample.final, final))
        worst = max(worst, *errors)
        reasons = []
        for slot, (layer, error) in enumerate(zip([*layers, "final"], errors, strict=True)):
            if error > SAME:
                reason = f"state {layer} differs by {error:.0%}"
                if layer != "final":
                    others = [_error(sample.aux[:, slot], aux[:, other]) for other in range(count)]
                    best = int(np.argmin(others))
                    if others[best] <= SAME:
                        reason += f"; it is out({best})"
                reasons.append(reason)
        if reasons:
            bad.append({"sample": sample.id, "reason": ", ".join(reasons)})
    return {"samples": len(chosen), "ok": len(chosen) - len(bad), "bad": bad, "worst": worst}


def _error(stored: np.ndarray, fresh: np.ndarray) -> float:
    return relative_error([fresh[:, None]], [stored[:, None]])


def _bits(tensor: "torch.Tensor") -> np.ndarray:
    import torch

    return (
        tensor.contiguous().view(torch.int16).numpy().view(np.uint16) if tensor.is_floating_point() else tensor.numpy()
    )
