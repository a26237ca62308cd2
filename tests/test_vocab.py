"""The draft vocabulary against slow counting in plain Python."""

import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.draft import vocab
from eyas.errors import UsageError

V = 40
SPANS = st.lists(st.lists(st.integers(0, V - 1), min_size=1, max_size=15), min_size=1, max_size=8)
ALWAYS = st.sets(st.integers(0, V - 1), max_size=4)


def spans_of(lists):
    documents = [{"id": str(i), "tokens": [0, *span, 1], "spans": [[1, 1 + len(span)]]} for i, span in enumerate(lists)]
    return vocab.supervised_spans(documents, V)


def slow_ceiling(lists, inside, k):
    tau = 1.0
    for step in range(k):
        alive = right = 0
        for span in lists:
            for last in range(len(span) - 1 - step):  # the chain starts after span[last]
                alive += 1
                right += all(token in inside for token in span[last + 1 : last + 2 + step])
        tau += right / alive if alive else 0.0
    return tau


@settings(max_examples=200, deadline=None)
@given(lists=SPANS, always=ALWAYS, data=st.data())
def test_vocabulary_is_what_slow_counting_gives(lists, always, data):
    size = data.draw(st.integers(max(len(always), 1), V))
    spans = spans_of(lists)
    counts = vocab.count_tokens(spans, V)
    slow = Counter(token for span in lists for token in span)
    assert counts.dtype == np.int64 and {i: int(c) for i, c in enumerate(counts) if c} == dict(slow)
    made = vocab.choose(counts, always, size)
    rest = sorted(set(range(V)) - always, key=lambda token: (-slow[token], token))
    assert made.targets.tolist() == sorted([*always, *rest[: size - len(always)]])
    # the maps of the contract
    targets = np.arange(size) + made.d2t
    assert (np.diff(targets) > 0).all() and np.array_equal(np.flatnonzero(made.t2d), targets)
    assert made.d2t.dtype == np.int64 and made.t2d.dtype == bool and made.t2d.shape == (V,)
    assert always <= set(targets.tolist()) and len(made) == size
    assert (made.d2t == 0).all() if size == V else True
    # the figures
    assert made.untrained == sum(slow[token] == 0 for token in targets.tolist())
    assert made.coverage == pytest.approx(sum(slow[t] for t in targets.tolist()) / sum(slow.values()))


@given(lists=SPANS, always=ALWAYS)
def test_the_mix_says_what_each_category_brings(lists, always):
    size = max(len(always), 5)
    documents = [
        {"id": str(i), "category": "ab"[i % 2], "tokens": span, "spans": [[0, len(span)]]}
        for i, span in enumerate(lists)
    ]
    made = vocab.choose(vocab.count_tokens(spans_of(lists), V), always, size)
    inside, rows = set(made.targets.tolist()), vocab.mix(documents, made)
    assert sum(row["share"] for row in rows) == pytest.approx(1, abs=1e-3)
    for row in rows:
        tokens = [t for d in documents if d["category"] == row["category"] for t in d["tokens"]]
        assert row["documents"] == sum(d["category"] == row["category"] for d in documents)
        assert row["supervised_tokens"] == len(tokens)
        assert row["coverage"] == pytest.approx(sum(t in inside for t in tokens) / len(tokens), abs=1e-4)


def ceiling(spans, inside, k):
    return vocab._ceilings(spans, np.where(inside, 0, 1), k, np.array([1]))[0]


@settings(max_examples=200, deadline=None)
@given(lists=SPANS, always=ALWAYS, k=st.integers(1, 6))
def test_curve_and_ceiling_are_counted_on_the_real_sequences(lists, always, k):
    spans = spans_of(lists)
    counts = vocab.count_tokens(spans, V)
    slow = Counter(token for span in lists for token in span)
    sizes = list(range(max(len(always), 1), V + 1, 3))
    points = vocab.curve(spans, counts, always, sizes, k, head=(8, 320))
    for size, point in zip(sizes, points, strict=True):
        made = vocab.choose(counts, always, size)
        inside = set(made.targets.tolist())
        assert point.size == size and point.coverage == pytest.approx(made.coverage)
        assert point.untrained == made.untrained
        assert point.tau_ceiling == pytest.approx(slow_ceiling(lists, inside, k))
        assert ceiling(spans, made.t2d, k) == pytest.approx(point.tau_ceiling)
        if size < V:
            repeated = sum(c for token, c in slow.items() if token in inside and c > 1)
            assert point.unseen_coverage == pytest.approx(repeated / sum(slow.values()))
        assert point.head_share == pytest.approx(8 * size / (8 * size + 320))
    longest = max(map(len, lists))
    assert ceiling(spans, np.ones(V, bool), k) == 1 + min(k, longest - 1)


def test_ceiling_does_not_assume_independence():
    """Misses that come together cost less than the same number spread out."""
    together, apart = [0] * 6 + [9] * 4, [0, 0, 9, 0, 9, 0, 9, 0, 9, 0]
    inside = np.arange(V) != 9
    assert ceiling(spans_of([together]), inside, 3) > ceiling(spans_of([apart]), inside, 3)


def test_default_sizes_end_with_the_whole_vocabulary():
    counts = np.ones(5000, np.int64)
    points = vocab.curve([np.arange(5000, dtype=np.int32)], counts, [0])
    assert [point.size for point in points] == [1024, 2048, 4096, 5000]
    assert points[-1].coverage == points[-1].unseen_coverage == 1.0 and points[-1].tau_ceiling == 5.0
    assert points[0].head_share is None


def test_auto_size_follows_its_rule():
    counts = np.zeros(100_000, np.int64)
    counts[:3000] = 1000
    counts[3000:4000] = 2  # 2,000 of 3,002,000 tokens: within the half per cent
    size, reason = vocab.auto_size(counts, [99_999])
    assert size == 3072 and "0.5%" in reason
    made = vocab.choose(counts, [99_999], size)
    assert 1 - made.coverage <= 0.005
    counts[50_000:90_000] = 1  # 40,000 tokens seen once: text like this will bring others
    assert vocab.auto_size(counts, [99_999]) == (32_768, "too few answers for a rule by coverage, so the usual size")
    assert vocab.auto_size(counts[:36_000], [0])[0] == 36_000 or vocab.auto_size(counts[:36_000], [0])[0] == 3072
    small = np.ones(2000, np.int64)
    size, reason = vocab.auto_size(small, [0])
    assert size == 2000 and "all of it" in reason


@pytest.mark.parametrize("size", [-1, 0, 2, V + 1])
def test_sizes_that_mean_nothing_are_refused(size):
    with pytest.raises(UsageError, match=f"size {size}: expected at least the 3 special tokens and at most .* {V}"):
        vocab.choose(np.zeros(V, np.int64), [1, 2, 3], size)


def test_tokens_of_another_tokenizer_are_refused():
    with pytest.raises(UsageError, match="token id 40 in a vocabulary of 40"):
        vocab.supervised_spans([{"id": "a", "tokens": [1, 40], "spans": [[0, 2]]}], V)
    with pytest.raises(UsageError, match=r"span \[1, 3\) of 2 tokens"):
        vocab.supervised_spans([{"id": "a", "tokens": [1, 2], "spans": [[1, 3]]}], V)
    with pytest.raises(UsageError, match="special token id 40"):
        vocab.choose(np.zeros(V, np.int64), [40], 4)


def test_only_supervised_tokens_count():
    spans = vocab.supervised_spans([{"id": "a", "tokens": [7, 7, 7, 5, 6], "spans": [[3, 5]]}], V)
    assert np.flatnonzero(vocab.count_tokens(spans, V)).tolist() == [5, 6]
    assert vocab.count_tokens([], V).tolist() == [0] * V


@settings(max_examples=25, deadline=None)
@given(lists=SPANS, always=ALWAYS)
def test_round_trip(tmp_path_factory, lists, always):
    folder = tmp_path_factory.mktemp("vocab")
    made = vocab.choose(vocab.count_tokens(spans_of(lists), V), always, 20)
    vocab.save(made, folder, {"answers": "abc"}, {"rule": "given"})
    back = vocab.load(folder)
    assert np.array_equal(back.targets, made.targets) and np.array_equal(back.counts, made.counts)
    assert back.d2t.dtype == np.int64 and back.t2d.dtype == bool


def test_unfinished_or_contradictory_files_are_refused(tmp_path):
    from safetensors.numpy import load_file, save_file

    with pytest.raises(UsageError, match="no finished draft vocabulary"):
        vocab.load(tmp_path)
    vocab.save(vocab.choose(np.arange(V), [0], 8), tmp_path, {})
    tensors = load_file(tmp_path / vocab.FILE)
    tensors["d2t"][2] += 1
    save_file(tensors, tmp_path / vocab.FILE)
    with pytest.raises(UsageError, match="name different tokens"):
        vocab.load(tmp_path)
    (tmp_path / vocab.FILE).write_bytes(b"short")
    with pytest.raises(UsageError, match="missing or damaged"):
        vocab.load(tmp_path)


def test_torch_is_not_imported():
    code = "import sys, eyas.draft.vocab, eyas.data.split, eyas.data.conversations; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
