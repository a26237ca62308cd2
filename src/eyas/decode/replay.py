"""Replay: exact greedy acceptance from the store, without the target.

An engine drafts K tokens from a row, keeps the longest prefix that equals the target's own greedy tokens, adds the
target's next token, and drafts again behind it. On greedy on-policy data those tokens are stored. As long as a chain
is right its inputs are the stored tokens too, so one unroll from every row gives each row's accepted length, and the
engine's walk is a jump from row to row.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import numpy as np
import torch

from eyas.draft.batch import Batch, chain_depth, pack
from eyas.draft.model import Draft
from eyas.features.store import Sample, teacher_positions
from eyas.target import LogitRule

BATCH = 16  # documents replayed at once


@dataclass
class Conversation:
    """The walk through one document: `starts` [rounds] rows, `accepted` [rounds] drafted tokens kept."""

    id: str
    category: str
    tokens: int
    starts: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)


@dataclass
class Acceptance:
    """Acceptance of chains of `k` over conversations; tau counts the bonus token."""

    k: int
    conversations: list[Conversation]

    @property
    def rounds(self) -> int:
        return sum(len(c.accepted) for c in self.conversations)

    @property
    def tokens(self) -> int:
        return sum(c.tokens for c in self.conversations)

    @property
    def accepted(self) -> int:
        return sum(sum(c.accepted) for c in self.conversations)

    @property
    def tau(self) -> float:
        """1 + accepted drafted tokens per round."""
        return 1 + self.accepted / max(self.rounds, 1)

    @property
    def per_position(self) -> list[float]:
        """[k]: share of rounds in which the first i+1 drafted tokens were all kept; tau is 1 + their sum."""
        kept = np.array([a for c in self.conversations for a in c.accepted])
        return [float((kept > i).sum()) / max(self.rounds, 1) for i in range(self.k)]

    def by_category(self) -> dict[str, "Acceptance"]:
        names = sorted({c.category for c in self.conversations})
        return {name: Acceptance(self.k, [c for c in self.conversations if c.category == name]) for name in names}

    def interval(self, draws: int = 1000, seed: int = 0) -> tuple[float, float]:
        """95 % bootstrap interval of tau over conversations."""
        rounds = np.array([len(c.accepted) for c in self.conversations])
        accepted = np.array([sum(c.accepted) for c in self.conversations])
        if not rounds.sum():
            return 1.0, 1.0
        pick = np.random.default_rng(seed).integers(0, len(rounds), (draws, len(rounds)))
        taus = 1 + accepted[pick].sum(1) / np.maximum(rounds[pick].sum(1), 1)
        return float(np.quantile(taus, 0.025)), float(np.quantile(taus, 0.975))


def with_stored_tokens(batch: Batch, samples: list[Sample]) -> Batch:
    """The batch with the stored next token in the place of the target's argmax."""
    following = [sample.tokens[teacher_positions(sample.supervised) + 1] for sample in samples]
    return replace(batch, argmax=torch.from_numpy(np.concatenate(following).astype(np.int64)))


def walk(depth: np.ndarray, kept: np.ndarray) -> tuple[list[int], list[int]]:
    """Rows where rounds start and what each keeps, over one document's rows (depth and kept [T-1])."""
    starts, accepted = [], []
    row = 0
    while row < len(depth):
        if depth[row] == 0:
            row += 1
            continue
        starts.append(row)
        accepted.append(int(kept[row]))
        row += int(kept[row]) + 1
    return starts, accepted


def accept(draft: Draft, samples: Iterable[Sample], k: int, to_draft: torch.Tensor, dtype: torch.dtype) -> Acceptance:
    """Replay chains of `k` over samples. to_draft int64 [V]: target id -> draft id, -1 outside (a miss)."""
    conversations: list[Conversation] = []
    with torch.no_grad():
        for group in _groups(samples, BATCH):
            batch = with_stored_tokens(pack(group), group).to("cpu", dtype)
            result = draft.unroll(batch, k, None, LogitRule(), to_draft, survivors=True)
            kept = torch.zeros(len(batch.tokens), dtype=torch.int64)
            kept[result.rows] = result.accepted
            for sample, (first, end) in zip(group, batch.documents, strict=True):
                starts, accepted = walk(chain_depth(sample.supervised), kept[first:end].numpy())
                conversations.append(
                    Conversation(sample.id, sample.category, int(sample.supervised.sum()), starts, accepted)
                )
    return Acceptance(k, conversations)


def _groups(samples: Iterable[Sample], size: int) -> Iterator[list[Sample]]:
    iterator = iter(samples)
    while group := list(islice(iterator, size)):
        yield group


def protocol(found: Acceptance, k: int, loaded_as: str, data: str) -> dict[str, Any]:
    """How the figures were made; goes wherever they go."""
    return {
        "shape": "chain",
        "k": k,
        "temperature": 0.0,
        "loaded_as": loaded_as,
        "prompts": len(found.conversations),
        "tokens": found.tokens,
        "data": data,
    }


def expected_speedup(tau: float, k: int, draft_share: float) -> float:
    """tau over the cost of a round, in units of one target step: a verification plus k draft steps.

    draft_share: a draft step's parameters over a target step's, which is the cost ratio where decoding is bound by
    memory; verification of k+1 tokens is taken as one step.
    """
    return tau / (1 + k * draft_share)


def tokens_by_state(found: Conversation, sample: Sample, texts: list[str], k: int) -> list[dict[str, str]]:
    """Each token with what became of it: prompt, accepted, rejected (the draft was wrong here), bonus."""
    state = np.where(sample.supervised, "bonus", "prompt").astype(object)
    depth = chain_depth(sample.supervised)
    for row, kept in zip(found.starts, found.accepted, strict=True):
        state[row + 2 : row + 2 + kept] = "accepted"
        if kept < min(k, depth[row]):  # after a whole chain the next token is a bonus; here the draft was wrong
            state[row + 2 + kept] = "rejected"
    return [{"text": text, "state": str(s)} for text, s in zip(texts, state, strict=True)]
