"""Replay against an engine-like decoder: the same rounds, the same accepted tokens, integer for integer."""

import numpy as np
import pytest
import torch
from draft_parts import random_sample, small_config, small_draft, to_draft_ids
from engine_parts import serve
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_unroll import OPTIONS

from eyas.decode.replay import Acceptance, Conversation, accept, tokens_by_state, walk

SPANS = [False] * 4 + [True] * 12 + [False] * 3 + [True] * 7


def easy(sample, draft, rng):
    """Rewrite the stored tokens so that the draft is often right: its own guess, most of the time."""
    weights = {n: t.detach() for n, t in draft.state_dict().items()}
    for _ in range(25):
        changed = False
        for row, kept in serve(weights, draft.config, sample, 3):
            at = row + 2 + kept
            if kept < 3 and at < len(sample.tokens) and sample.supervised[at] and rng.random() < 0.4:
                guess = guess_at(weights, draft.config, sample, row, kept)
                changed |= sample.tokens[at] != guess
                sample.tokens[at] = guess
        if not changed:
            break
    return sample


def guess_at(weights, config, sample, row, index):
    from engine_parts import Engine

    w = {name: t.double() if t.is_floating_point() else t for name, t in weights.items()}
    engine = Engine(w, config)
    aux = torch.from_numpy(sample.aux.reshape(len(sample.tokens), -1).view(np.int16)).view(torch.bfloat16).double()
    for t in range(row + 1):
        h, first = engine.extend(int(sample.tokens[t + 1]), aux[t], t)
    return engine.draft(h, first, row, 3)[index]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_replay_equals_an_engine(options):
    config = small_config(**options)
    draft = small_draft(config, seed=3)
    rng = np.random.default_rng(5)
    samples = [easy(random_sample(rng, str(i), SPANS[i:], config), draft, rng) for i in range(3)]
    found = accept(draft, samples, 3, to_draft_ids(draft), torch.float64)
    weights = {n: t.detach() for n, t in draft.state_dict().items()}
    expected = [serve(weights, config, sample, 3) for sample in samples]
    assert [list(zip(c.starts, c.accepted, strict=True)) for c in found.conversations] == expected
    assert sum(kept for rounds in expected for _, kept in rounds) > 5, "the case proves nothing when all is rejected"


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 4)), max_size=40))
def test_walk_jumps_over_what_was_kept(rows):
    depth, kept = np.array([d for d, _ in rows]), np.array([min(d, k) for d, k in rows])
    starts, accepted = walk(depth, kept)
    covered = [row + i for row, a in zip(starts, accepted, strict=True) for i in range(a + 1)]
    assert len(covered) == len(set(covered))
    assert all(depth[row] > 0 for row in starts)
    assert all(row in covered for row in range(len(rows)) if depth[row] > 0)


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=9), min_size=1, max_size=6))
def test_figures_agree_with_counting(rounds):
    found = Acceptance(4, [Conversation(str(i), "a", 50, list(range(len(r))), r) for i, r in enumerate(rounds)])
    flat = [a for r in rounds for a in r]
    assert found.tau == pytest.approx(1 + sum(flat) / len(flat))
    assert found.tau == pytest.approx(1 + sum(found.per_position))
    assert found.per_position[1] == sum(a >= 2 for a in flat) / len(flat)
    low, high = found.interval()
    assert 1 <= low <= high <= 5


def test_token_states_mark_where_the_draft_was_wrong():
    config = small_config()
    sample = random_sample(np.random.default_rng(0), "a", [False] * 2 + [True] * 8, config)
    # rounds at rows 1 (2 kept, then wrong), 4 (all 3 kept, then a bonus), 8 has no room left
    found = Conversation("a", "", 8, [1, 4], [2, 3])
    states = [t["state"] for t in tokens_by_state(found, sample, [str(i) for i in range(10)], 3)]
    assert states == ["prompt"] * 2 + [
        "bonus",
        "accepted",
        "accepted",
        "rejected",
        "accepted",
        "accepted",
        "accepted",
        "bonus",
    ]
