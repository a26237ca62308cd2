"""Replay: exact greedy acceptance from the store, without the target.

An engine drafts K tokens from a row, keeps the longest prefix that equals the target's own greedy tokens, adds the
target's next token, and drafts again behind it. On greedy on-policy data those tokens are stored. As long as a chain
is right its inputs are the stored tokens too, so one unroll from every row gives each row's accepted length, and the
engine's walk is a jump from row to row.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from eyas.decode.chain import Drafter
from eyas.decode.tree import Tree, depths
from eyas.decode.verify import verify_walk
from eyas.draft.batch import Batch, as_floats, chain_depth, pack
from eyas.draft.model import Draft
from eyas.errors import UsageError
from eyas.features.store import Sample, Store, teacher_positions
from eyas.serving.contract import ENGINES
from eyas.serving.export import load_draft
from eyas.serving.load import load_as
from eyas.target import LogitRule, Target

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


def draft_ids(draft: Draft) -> torch.Tensor:
    """int64 [V]: target id -> draft id, -1 outside the draft vocabulary."""
    ids = torch.arange(draft.config.draft_vocab_size)
    table = torch.full((draft.config.vocab_size,), -1, dtype=torch.int64)
    reached = draft.target_ids(ids)
    known = (reached >= 0) & (reached < len(table))  # an engine may read a map that leads out of the vocabulary
    table[reached[known]] = ids[known]
    return table


def accept(draft: Draft, samples: Iterable[Sample], k: int, to_draft: torch.Tensor, dtype: torch.dtype) -> Acceptance:
    """Replay chains of `k` over samples. to_draft int64 [V]: target id -> draft id, -1 outside (a miss)."""
    conversations: list[Conversation] = []
    with torch.no_grad():
        for group in _groups(samples, BATCH):
            batch = with_stored_tokens(pack(group), group).to(to_draft.device, dtype)
            result = draft.unroll(batch, k, None, LogitRule(), to_draft, survivors=True)
            kept = torch.zeros(len(batch.tokens), dtype=torch.int64)
            kept[result.rows.cpu()] = result.accepted.cpu()
            for sample, (first, end) in zip(group, batch.documents, strict=True):
                conversations.append(
                    _conversation(sample, *walk(chain_depth(sample.supervised), kept[first:end].numpy()))
                )
    return Acceptance(k, conversations)


@torch.inference_mode()
def accept_trees(draft: Draft, samples: Iterable[Sample], tree: "Tree", dtype: torch.dtype) -> Acceptance:
    """Replay dynamic trees, round by round, with the draft's cache: a tree keeps the path that the stored tokens take."""
    conversations: list[Conversation] = []
    drafter = Drafter(draft, torch.device("cpu"), dtype)
    for sample in samples:
        drafter.crop(0)
        row = 0
        tokens, aux = torch.from_numpy(sample.tokens).long(), as_floats(sample.aux).flatten(1).to(dtype)
        room, starts, accepted = chain_depth(sample.supervised), [], []
        while row < len(room):
            if not room[row]:
                row += 1
                continue
            read = len(drafter)
            output = drafter.extend(tokens[read + 1 : row + 2], aux[read : row + 1])
            guess = tree(drafter, output, int(tokens[row + 1]))
            truth = tokens[row + 2 : row + 2 + int(room[row])].tolist() + [-1] * (tree.depth + 1)
            path, _ = verify_walk(guess.tokens, guess.parents, [truth[depth] for depth in depths(guess.parents)])
            starts.append(row)
            accepted.append(len(path) - 1)
            row += len(path)
        conversations.append(_conversation(sample, starts, accepted))
    return Acceptance(tree.depth, conversations)


def _conversation(sample: Sample, starts: list[int], accepted: list[int]) -> Conversation:
    return Conversation(sample.id, sample.category, int(sample.supervised.sum()), starts, accepted)


def _groups(samples: Iterable[Sample], size: int) -> Iterator[list[Sample]]:
    iterator = iter(samples)
    while group := list(islice(iterator, size)):
        yield group


def read_draft(folder: str | Path, target: Target, engine: str | None = None) -> tuple[Draft, list[str]]:
    """A draft from disk in whatever layout, whole or as `engine` loads it, and what that engine loses.

    Raises UsageError when it is none, or not one of this target.
    """
    if not Path(folder, "config.json").is_file():
        raise UsageError(f"{folder}: no draft. Expected a folder with config.json and model.safetensors.")
    config, state, *notes = load_as(folder, target, engine) if engine else load_draft(folder, target)
    ours = {"hidden_size": config.target_hidden_size, "vocab_size": config.vocab_size}
    for name, size in ours.items():
        if getattr(target, name) != size:
            raise UsageError(
                f"{folder}: made for a target of {name} {size}, {target.path} has {getattr(target, name)}. "
                "Name the draft's own target."
            )
    draft = Draft(config)
    draft.load_state_dict(state)
    return draft.requires_grad_(False), notes[0] if notes else []


def loaded_as(engine: str | None) -> str:
    return f"as {ENGINES[engine].title}" if engine else "own"


def replay(
    folder: str | Path,
    target: Target,
    store: Store,
    shape: "int | Tree",
    ids: list[str],
    data: str,
    engine: str | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[Acceptance, dict[str, Any]]:
    """Load a draft from disk, whole or as `engine` loads it, and replay chains of `shape` tokens, or trees, over
    documents of a store. `data` says in words what they are. Returns the walk and the figures of the JSON contract.
    """
    draft, notes = read_draft(folder, target, engine)
    layers, stored = list(draft.config.aux_layers), store.meta["layers"]
    if missing := [layer for layer in layers if layer not in stored]:
        who = f"{ENGINES[engine].title} gives it layers" if engine else "reads layers"
        raise UsageError(
            f"{folder}: {who} {layers}, the store holds {stored} and lacks {missing}. Extract a store with those layers."
        )
    columns = [stored.index(layer) for layer in layers]
    samples = (s if layers == stored else replace(s, aux=s.aux[:, columns]) for s in map(store.read, ids))
    if isinstance(shape, int):
        found = accept(draft, samples, shape, draft_ids(draft), dtype)
    else:
        found = accept_trees(draft, samples, shape, dtype)
    step = sum(p.numel() for name, p in draft.named_parameters() if not name.startswith(("embed_tokens", "fc")))
    share = step / max(target.step_parameters, 1)
    result = figures(found) | {
        "accept_rate": found.accepted / max(found.rounds * found.k, 1),
        "protocol": protocol(found, shape, loaded_as(engine), data),
        "notes": notes,
        "speedup": expected_speedup(found.tau, found.k, share),
        "speedup_note": f"expected, from parameters read: a draft step is {share:.1%} of a target step, verification one step",
        "lossless": None,
    }
    return found, result


def figures(found: Acceptance) -> dict[str, Any]:
    """What replay and decode report alike."""
    return {
        "tau": found.tau,
        "interval": list(found.interval()),
        "per_position": found.per_position,
        "rounds": found.rounds,
        "accepted": found.accepted,
        "by_category": {
            name: dict(zip(("low", "high"), part.interval(), strict=True))
            | {"tau": part.tau, "rounds": part.rounds, "tokens": part.tokens}
            for name, part in found.by_category().items()
        },
    }


def protocol(found: Acceptance, shape: "int | Tree", loaded_as: str, data: str) -> dict[str, Any]:
    """How the figures were made; goes wherever they go."""
    return {
        "shape": "chain" if isinstance(shape, int) else "tree",
        "k": found.k,
        "temperature": 0.0,
        "loaded_as": loaded_as,
        "prompts": len(found.conversations),
        "tokens": found.tokens,
        "data": data,
    } | ({} if isinstance(shape, int) else {"tree": vars(shape)})


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
