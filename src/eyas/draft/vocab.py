"""The draft vocabulary: which target tokens the draft may say, chosen from what the target was seen to write.

numpy only. Special and end tokens are always in; the rest follow by frequency among supervised tokens, then lowest id.
The vocabulary of a smaller size is therefore always part of that of a larger one.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from eyas.artifact import Manifest, read_manifest
from eyas.errors import UsageError

if TYPE_CHECKING:
    from eyas.target import Target

FILE = "vocab.safetensors"
AUTO_STEP, AUTO_OUTSIDE, AUTO_FALLBACK = 1024, 0.005, 32_768
Spans = list[np.ndarray]  # int32 [n] each: the tokens of one supervised span


@dataclass(frozen=True)
class DraftVocab:
    """targets int64 [Vd]: target ids, strictly increasing. counts int64 [V]: supervised tokens seen of each id."""

    targets: np.ndarray
    counts: np.ndarray

    def __len__(self) -> int:
        return len(self.targets)

    @property
    def vocab_size(self) -> int:
        return len(self.counts)

    @cached_property
    def d2t(self) -> np.ndarray:
        """int64 [Vd], an offset: target id = i + d2t[i]."""
        return self.targets - np.arange(len(self.targets), dtype=np.int64)

    @cached_property
    def t2d(self) -> np.ndarray:
        """bool [V]: whether a target id is in the draft vocabulary."""
        mask = np.zeros(self.vocab_size, bool)
        mask[self.targets] = True
        return mask

    @property
    def untrained(self) -> int:
        """Rows whose token was never seen supervised: they keep the target's own row."""
        return int((self.counts[self.targets] == 0).sum())

    @property
    def coverage(self) -> float:
        """Share of the supervised tokens that the draft can say."""
        return float(self.counts[self.targets].sum() / max(int(self.counts.sum()), 1))


@dataclass(frozen=True)
class Size:
    """One point of the coverage curve; see `curve`."""

    size: int
    coverage: float
    unseen_coverage: float
    tau_ceiling: float
    untrained: int
    head_share: float | None


def supervised_spans(documents: Iterable[dict[str, Any]], vocab_size: int) -> Spans:
    """The supervised spans of documents ("id", "tokens", "spans"). Raises UsageError for ids outside the vocabulary."""
    spans = []
    for document in documents:
        tokens = np.asarray(document["tokens"], np.int64)
        for start, end in document["spans"]:
            if not 0 <= start < end <= len(tokens):
                raise UsageError(f"document {document['id']}: span [{start}, {end}) of {len(tokens)} tokens.")
            span = tokens[start:end]
            if span.min() < 0 or span.max() >= vocab_size:
                raise UsageError(
                    f"document {document['id']}: token id {int(span.max())} in a vocabulary of {vocab_size:,}. "
                    "The answers come from another tokenizer; generate them with this target."
                )
            spans.append(span.astype(np.int32))
    return spans


def mix(documents: Iterable[dict[str, Any]], vocab: DraftVocab) -> list[dict[str, Any]]:
    """What each category brings, largest first: documents, supervised tokens, their share of all, and their coverage."""
    spans: dict[str, Spans] = defaultdict(list)
    count: Counter[str] = Counter()
    for document in documents:
        name = document.get("category") or ""
        count[name] += 1
        spans[name] += supervised_spans([document], vocab.vocab_size)
    tokens = {name: np.concatenate([np.empty(0, np.int32), *parts]) for name, parts in spans.items()}
    total = max(sum(map(len, tokens.values())), 1)
    return [
        {
            "category": name,
            "documents": count[name],
            "supervised_tokens": len(tokens[name]),
            "share": round(len(tokens[name]) / total, 4),
            "coverage": round(float(vocab.t2d[tokens[name]].mean()), 4) if len(tokens[name]) else 1.0,
        }
        for name in sorted(count, key=lambda name: -len(tokens[name]))
    ]


def count_tokens(spans: Spans, vocab_size: int) -> np.ndarray:
    """int64 [V]: how often each id is supervised."""
    return np.bincount(np.concatenate([np.empty(0, np.int32), *spans]), minlength=vocab_size).astype(np.int64)


def ranking(counts: np.ndarray, always: Iterable[int]) -> np.ndarray:
    """int64 [V]: target ids in the order they enter the vocabulary: `always` by id, then by count, then by id."""
    first = np.zeros(len(counts), bool)
    keep = sorted(set(always))
    if keep and not 0 <= keep[0] <= keep[-1] < len(counts):
        raise UsageError(f"special token id {keep[-1]} lies outside the target's vocabulary of {len(counts):,}.")
    first[keep] = True
    return np.lexsort((np.arange(len(counts)), -counts, ~first))


def like(folder: str, target: "Target", counts: np.ndarray) -> DraftVocab:
    """The map of an existing draft, with the counts of this data."""
    from eyas.serving.export import load_draft

    config, state = load_draft(folder, target)
    ids = np.arange(config.draft_vocab_size, dtype=np.int64)
    return DraftVocab(ids + state["d2t"].numpy() if "d2t" in state else ids, counts)


def choose(counts: np.ndarray, always: Iterable[int], size: int) -> DraftVocab:
    """The draft vocabulary of `size` tokens. `always`: specials and end tokens, in whatever they count."""
    always = set(always)
    if not max(len(always), 1) <= size <= len(counts):
        raise UsageError(
            f"draft vocabulary size {size:,}: expected at least the {len(always)} special tokens and at most the "
            f"target's {len(counts):,}."
        )
    return DraftVocab(np.sort(ranking(counts, always)[:size]).astype(np.int64), counts)


def _ceilings(spans: Spans, rank: np.ndarray, k: int, sizes: np.ndarray) -> np.ndarray:
    """tau of a perfect draft that can say only {id: rank[id] < size}, for each size [S]; no independence assumed.

    A chain may start after any supervised token but a span's last; its step j says the token j + 1 further on, and
    exists where that lies in the same span. tau = 1 + sum over j of P(the tokens of steps 0..j are all inside),
    each P over the chains that have step j: counted on the real sequences.
    """
    tau = np.ones(len(sizes))
    highest = [rank[span][1:] for span in spans if len(span) > 1]
    steps = highest
    for j in range(k):
        if j:  # the highest rank among the tokens of steps 0..j
            highest = [np.maximum(h[:-1], s[j:]) for h, s in zip(highest, steps, strict=True) if len(h) > 1]
            steps = [s for s in steps if len(s) > j]
        if not highest:
            break
        flat = np.sort(np.concatenate(highest))
        tau += np.searchsorted(flat, sizes, side="left") / len(flat)
    return tau


def curve(
    spans: Spans,
    counts: np.ndarray,
    always: Iterable[int],
    sizes: Sequence[int] | None = None,
    k: int = 4,
    head: tuple[int, int] | None = None,
) -> list[Size]:
    """Coverage by size. `head` = (D, parameters of the draft read per token without its head) gives the head's cost.

    coverage: share of supervised tokens inside. unseen_coverage: the same, with tokens seen once counted as outside
    (leave-one-out: what to expect on new text). tau_ceiling: of a perfect draft, for a chain of k.
    head_share: the head's share of the parameters that one draft step reads, about its share of the time.
    """
    always = set(always)
    v = len(counts)
    if sizes is None:
        sizes = sorted({s for s in (1024, 2048, 4096, 8192, 16_384, 24_576, 32_768, 49_152, 65_536, 131_072) if s < v})
        sizes = [s for s in sizes if s >= len(always)] + [v]
    order = ranking(counts, always)
    rank = np.empty(v, np.int64)
    rank[order] = np.arange(v)
    at = np.asarray(sizes)
    total = max(int(counts.sum()), 1)
    seen, repeated = np.cumsum(counts[order]), np.cumsum(np.where(counts[order] > 1, counts[order], 0))
    unseen = np.cumsum(counts[order] == 0)
    ceilings = _ceilings(spans, rank, k, at)
    return [
        Size(
            size=int(s),
            coverage=float(seen[s - 1] / total),
            unseen_coverage=1.0 if s == v else float(repeated[s - 1] / total),
            tau_ceiling=float(ceiling),
            untrained=int(unseen[s - 1]),
            head_share=head[0] * s / (head[0] * s + head[1]) if head else None,
        )
        for s, ceiling in zip(at.tolist(), ceilings, strict=True)
    ]


def auto_size(counts: np.ndarray, always: Iterable[int]) -> tuple[int, str]:
    """The size that `auto` stands for, and the rule in words.

    The smallest multiple of 1,024 that leaves at most 0.5 % of the supervised tokens outside, tokens seen once
    counted as outside. Where the data are too few to get there, 32,768. A size within a fifth of the target's
    vocabulary saves nothing worth a map: then all of it.
    """
    v, always = len(counts), set(always)
    order = ranking(counts, always)
    repeated = np.cumsum(np.where(counts[order] > 1, counts[order], 0)) / max(int(counts.sum()), 1)
    enough = int(np.searchsorted(repeated, 1 - AUTO_OUTSIDE)) + 1
    if enough <= v:
        size, reason = max(enough, len(always)), f"at most {AUTO_OUTSIDE:.1%} of supervised tokens outside"
    else:
        size, reason = max(AUTO_FALLBACK, len(always)), "too few answers for a rule by coverage, so the usual size"
    size = -(-size // AUTO_STEP) * AUTO_STEP
    return (
        (v, f"{reason}; {size:,} is so near the target's {v:,} that all of it is kept")
        if size > 0.8 * v
        else (size, reason)
    )


def save(vocab: DraftVocab, folder: str | Path, inputs: dict[str, str], figures: dict[str, Any] | None = None) -> None:
    """Write d2t int64 [Vd], t2d bool [V] and counts int64 [V] into `folder`, then its manifest."""
    from safetensors.numpy import save as to_bytes

    from eyas.files import atomic_file

    with atomic_file(Path(folder) / FILE) as file:
        file.write(to_bytes({"d2t": vocab.d2t, "t2d": vocab.t2d, "counts": vocab.counts}))
    size = {"size": len(vocab), "coverage": vocab.coverage, "untrained": vocab.untrained}
    Manifest("vocab", inputs, size | (figures or {})).write(folder)


def load(folder: str | Path) -> DraftVocab:
    """Read what `save` wrote. Raises UsageError when it is unfinished, damaged or contradicts itself."""
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    path = Path(folder) / FILE
    if read_manifest(folder, "vocab") is None:
        raise UsageError(f"{folder}: holds no finished draft vocabulary. Run `eyas vocab`.")
    try:
        tensors = load_file(path)
        d2t, t2d, counts = (tensors[name] for name in ("d2t", "t2d", "counts"))
    except (OSError, SafetensorError, KeyError) as error:
        raise UsageError(f"{path}: missing or damaged ({error}). Run `eyas vocab` again.") from None
    targets = d2t + np.arange(len(d2t))
    if len(t2d) != len(counts) or not np.array_equal(np.flatnonzero(t2d), targets):
        raise UsageError(f"{path}: d2t and t2d name different tokens. Run `eyas vocab` again.")
    return DraftVocab(targets, counts)
