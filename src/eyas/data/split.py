"""Train and held-out conversations: whole conversations, near-duplicates on one side, every category in both.

Near-duplicates are conversations whose user turns share about 70 % of their word triples (minhash of 32 permutations
in 8 bands, confirmed by the estimate of the whole signature) or whose first user turn is the same but for case and
white space. Numbers count as equal: the same exercise with other figures would make a held-out tau too good. The
estimate is a sample: at 70 % about nine pairs in ten are found, at 80 % nearly all.
"""

import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from eyas.data.conversations import draw
from eyas.errors import UsageError
from eyas.files import read_json, write_json

PERMUTATIONS, BANDS, SIMILAR = 32, 8, 0.7
NUMBER = re.compile(r"\W*\d[\d.,:/]*\W*")
_RANDOM = np.random.default_rng(20_240_601)
_FACTORS = _RANDOM.integers(1, 2**63, (PERMUTATIONS, 1), np.uint64) | np.uint64(1)
_TERMS = _RANDOM.integers(0, 2**63, (PERMUTATIONS, 1), np.uint64)


def signature(turns: list[str], numbers: bool = False) -> np.ndarray:
    """uint64 [32]: minhash of the word triples of all user turns; equal entries estimate the Jaccard similarity.

    `numbers`: whether numbers tell texts apart.
    """
    words = " ".join(turns).casefold().split()
    if not numbers:
        words = ["0" if NUMBER.fullmatch(word) else word for word in words]
    triples = {" ".join(words[i : i + 3]) for i in range(max(1, len(words) - 2))}
    hashes = np.fromiter((xxhash.xxh3_64_intdigest(t.encode()) for t in triples), np.uint64, len(triples))
    with np.errstate(over="ignore"):
        mixed = hashes[None, :] * _FACTORS + _TERMS  # [32, triples]
    return (mixed ^ (mixed >> np.uint64(29))).min(axis=1)


def clusters(conversations: Iterable[dict[str, Any]], numbers: bool = False) -> list[list[int]]:
    """Positions of the conversations, grouped by near-duplicate (transitively), in order of the first member."""
    parent: list[int] = []

    def root(i: int) -> int:
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    first_turns: dict[int, int] = {}
    bands: dict[tuple[int, bytes], int] = {}
    signatures: list[np.ndarray] = []
    for i, conversation in enumerate(conversations):
        parent.append(i)
        signatures.append(signature(conversation["turns"], numbers))
        opening = " ".join(conversation["turns"][0].casefold().split())
        alike = {first_turns.setdefault(xxhash.xxh3_64_intdigest(opening.encode()), i)}
        for band, rows in enumerate(signatures[i].reshape(BANDS, -1)):
            other = bands.setdefault((band, rows.tobytes()), i)
            if other != i and (signatures[other] == signatures[i]).mean() >= SIMILAR:
                alike.add(other)
        for other in alike:
            a, b = sorted((root(other), root(i)))
            parent[b] = a
    groups: dict[int, list[int]] = defaultdict(list)
    for i in range(len(parent)):
        groups[root(i)].append(i)
    return list(groups.values())


def split(conversations: list[dict[str, Any]], heldout: float = 0.1, seed: int = 0) -> dict[str, list[str]]:
    """{"train": ids, "heldout": ids}, each in the order given; together all ids, never one twice.

    Each category (a cluster counts for that of its first conversation) gives `heldout` of its conversations,
    rounded, and at least one where it has two clusters. Where nothing but numbers tells the conversations apart, numbers
    count. Depends on ids, texts and seed, not on the order of the rest.
    Raises UsageError when nothing would be left on either side.
    """
    if not 0 < heldout < 1:
        raise UsageError(f"held-out share {heldout}: expected a number between 0 and 1.")
    ids = [conversation["id"] for conversation in conversations]
    if len(set(ids)) != len(ids):
        twice = next(i for n, i in enumerate(ids) if i in ids[:n])
        raise UsageError(f"the conversation id {twice!r} is used twice; ids must be unique to split by them.")
    chosen = _held(conversations, ids, heldout, seed, numbers=False)
    if not 0 < len(chosen) < len(ids):
        chosen = _held(conversations, ids, heldout, seed, numbers=True)
    result = {
        "train": [name for i, name in enumerate(ids) if i not in chosen],
        "heldout": [name for i, name in enumerate(ids) if i in chosen],
    }
    if not result["train"] or not result["heldout"]:
        raise UsageError(
            f"{len(ids)} conversations cannot be split into training and held-out ones without near-duplicates on both "
            "sides. Bring more, or more varied, conversations."
        )
    return result


def _held(conversations: list[dict[str, Any]], ids: list[str], heldout: float, seed: int, numbers: bool) -> set[int]:
    """Positions of the held-out conversations."""
    by_category: dict[str, list[list[int]]] = defaultdict(list)
    for group in clusters(conversations, numbers):
        leader = min(group, key=lambda i: ids[i])
        by_category[conversations[leader].get("category") or ""].append(group)
    chosen: set[int] = set()
    for groups in by_category.values():
        groups.sort(key=lambda group: draw(min(ids[i] for i in group), seed))
        total = sum(len(group) for group in groups)
        wanted = max(round(heldout * total), 1 if len(groups) > 1 else 0)
        taken = 0
        for group in groups:
            if taken + len(group) <= wanted:
                chosen.update(group)
                taken += len(group)
        if not taken and wanted:  # every cluster is larger than the share: the smallest one then
            chosen.update(sorted(groups, key=len)[0])
    return chosen


def save_split(parts: dict[str, list[str]], path: str | Path) -> None:
    write_json(path, parts)


def load_split(path: str | Path) -> dict[str, list[str]]:
    """Read split.json. Raises UsageError where it is damaged."""
    parts = read_json(path)
    if not isinstance(parts, dict) or any(not isinstance(parts.get(side), list) for side in ("train", "heldout")):
        raise UsageError(f"{path}: expected the lists 'train' and 'heldout'. Remove it and run again.")
    both = set(parts["train"]) & set(parts["heldout"])
    if both:
        raise UsageError(f"{path}: {len(both)} ids are on both sides, {min(both)!r} for one. Remove it and run again.")
    return parts
