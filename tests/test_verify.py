"""The verification rule against enumeration: the target's own text, the target's own distribution."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.decode.verify import choose, distribution, on_target_vocabulary, verify_drawn_chain, verify_walk

K, V = 2, 4


def chi_square(found: dict, expected: dict, draws: int) -> tuple[float, float]:
    """The statistic and the bound that it passes once in about ten thousand times; every cell expects at least 5."""
    assert set(found) <= set(expected) and min(expected.values()) * draws >= 5
    statistic = sum((found.get(cell, 0) - p * draws) ** 2 / (p * draws) for cell, p in expected.items())
    freedom = len(expected) - 1
    bound = freedom * (1 - 2 / (9 * freedom) + 3.72 * (2 / (9 * freedom)) ** 0.5) ** 3  # Wilson and Hilferty
    return statistic, bound


def paths_of(tokens, parents):
    """Every root-to-node path, the long way."""
    for node in range(len(tokens)):
        path = [node]
        while path[-1]:
            path.append(parents[path[-1]])
        yield path[::-1]


trees = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 2)), max_size=14)


@given(trees, st.lists(st.integers(0, 2), min_size=15, max_size=15))
def test_a_tree_keeps_the_longest_path_that_matches(drawn, text):
    """`text` is the target's continuation; brute force over all paths."""
    tokens, parents = [9], [-1]
    for place, token in drawn:
        parent = place % len(tokens)
        if not any(p == parent and t == token for p, t in zip(parents, tokens, strict=True)):
            tokens.append(token)
            parents.append(parent)
    depth = {0: 0}
    for node in range(1, len(tokens)):
        depth[node] = depth[parents[node]] + 1
    right = [p for p in paths_of(tokens, parents) if [tokens[n] for n in p[1:]] == text[: len(p) - 1]]
    chosen = [text[depth[node]] for node in range(len(tokens))]
    path, added = verify_walk(tokens, parents, chosen)
    assert path == max(right, key=len)
    assert added == text[len(path) - 1]


@given(st.lists(st.integers(0, 2), max_size=6), st.lists(st.integers(0, 2), min_size=7, max_size=7))
def test_a_chain_keeps_its_longest_right_prefix(drafted, text):
    path, added = verify_walk([9, *drafted], list(range(-1, len(drafted))), text[: len(drafted) + 1])
    kept = next((i for i, token in enumerate(drafted) if token != text[i]), len(drafted))
    assert (path, added) == (list(range(kept + 1)), text[kept])


def random_shares(rows: int, seed: int, sharpness: float) -> torch.Tensor:
    return (torch.randn(rows, V, generator=torch.Generator().manual_seed(seed)) * sharpness).softmax(-1)


def drawn(p: torch.Tensor, q: torch.Tensor, generator: torch.Generator, rule) -> tuple[int, ...]:
    """A text of K + 1 tokens from p [K+1, V] that does not depend on its past, by rounds of chains of K from q."""
    text: list[int] = []
    while len(text) < K + 1:
        left = K + 1 - len(text)
        at = p[len(text) :]
        size = min(K, left - 1) if left > 1 else 0
        guess = torch.multinomial(q[len(text) : len(text) + size], 1, generator=generator).flatten().tolist()
        path, added = rule(guess, q[len(text) : len(text) + size], at[: size + 1], generator)
        text += [*guess[: len(path) - 1], added]
    return tuple(text)


def always_keep(guess, q, p, generator):
    return list(range(len(guess) + 1)), int(torch.multinomial(p[-1], 1, generator=generator))


def refuse_without_residual(guess, q, p, generator):
    """A common mistake: after a refusal draw from p, not from the residual."""
    lots = torch.rand(len(guess), generator=generator)
    for i, token in enumerate(guess):
        if lots[i] * q[i, token] >= p[i, token]:
            return list(range(i + 1)), int(torch.multinomial(p[i], 1, generator=generator))
    return always_keep(guess, q, p, generator)


def statistic(rule, draws: int = 4000) -> tuple[float, float]:
    p, q = random_shares(K + 1, 1, 0.5), random_shares(K + 1, 2, 0.7)
    generator = torch.Generator().manual_seed(3)
    counts: dict[tuple[int, ...], int] = {}
    for _ in range(draws):
        text = drawn(p, q, generator, rule)
        counts[text] = counts.get(text, 0) + 1
    cells = itertools.product(range(V), repeat=K + 1)
    return chi_square(counts, {c: float(p[0, c[0]] * p[1, c[1]] * p[2, c[2]]) for c in cells}, draws)


def test_a_drawn_chain_has_the_targets_distribution():
    found, bound = statistic(verify_drawn_chain)
    assert found < bound


@pytest.mark.parametrize("rule", [always_keep, refuse_without_residual])
def test_the_chi_square_test_sees_wrong_rules(rule):
    found, bound = statistic(rule)
    assert found > bound


def test_a_chain_keeps_as_often_as_the_overlap_of_p_and_q():
    """P(first token kept) is the sum of min(p, q): the rule is not only right but as generous as it can be."""
    p, q = random_shares(2, 5, 1.0), random_shares(1, 6, 1.0)
    generator = torch.Generator().manual_seed(7)
    guesses = torch.multinomial(q[0], 4000, replacement=True, generator=generator).tolist()
    kept = sum(len(verify_drawn_chain([guess], q, p, generator)[0]) - 1 for guess in guesses)
    expected = float(torch.minimum(p[0], q[0]).sum())
    assert abs(kept / 4000 - expected) < 4 * (expected * (1 - expected) / 4000) ** 0.5


def test_equal_shares_keep_everything():
    p = random_shares(3, 8, 1.0)
    guess = p[:2].argmax(-1).tolist()
    assert all(len(verify_drawn_chain(guess, p[:2], p)[0]) == 3 for _ in range(50))


@settings(max_examples=25)
@given(st.integers(1, 9), st.integers(0, 100))
def test_shares_on_the_targets_vocabulary(size, seed):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randperm(12, generator=generator)[:size].sort().values
    q = torch.rand(3, size, generator=generator).softmax(-1)
    wide = on_target_vocabulary(q, ids, 12)
    for row in range(3):
        for token in range(12):
            at = (ids == token).nonzero().flatten().tolist()
            assert wide[row, token] == (q[row, at[0]] if at else 0)


def test_choose():
    logits = torch.tensor([[0.0, 3.0, 1.0], [2.0, 2.0, -9.0]])
    assert choose(logits).tolist() == [1, 0]
    half = distribution(logits, 0.5)
    assert torch.allclose(half[0], torch.tensor([0.0, 6.0, 2.0]).softmax(-1))
    generator = torch.Generator().manual_seed(0)
    draws = torch.stack([choose(logits, 0.5, generator) for _ in range(600)])
    assert abs(float((draws[:, 1] == 0).float().mean()) - 0.5) < 0.1 and int((draws[:, 1] == 2).sum()) == 0
