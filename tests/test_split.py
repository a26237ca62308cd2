"""The split against what it promises: disjoint, whole, by cluster, by category, by seed, independent of order."""

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.data.split import clusters, load_split, save_split, signature, split
from eyas.errors import UsageError

WORDS = [f"word{i}" for i in range(500)]


def conversation(name, text, category=""):
    return {"id": name, "category": category, "turns": [text]}


def some(n, seed=0, categories=("a", "b")):
    rng = random.Random(seed)
    return [conversation(f"c{i}", " ".join(rng.choices(WORDS, k=20)), rng.choice(categories)) for i in range(n)]


@settings(max_examples=30, deadline=None)
@given(n=st.integers(10, 120), share=st.floats(0.05, 0.5), seed=st.integers(0, 99), data=st.data())
def test_split_is_disjoint_whole_stratified_and_independent_of_order(n, share, seed, data):
    conversations = some(n, seed)
    parts = split(conversations, share, seed)
    ids = [c["id"] for c in conversations]
    assert sorted(parts["train"] + parts["heldout"]) == sorted(ids)
    assert parts["train"] == [i for i in ids if i in set(parts["train"])]
    for category in ("a", "b"):
        members = {c["id"] for c in conversations if c["category"] == category}
        got = len(members & set(parts["heldout"]))
        if len(members) > 1:
            assert got == max(1, round(share * len(members)))
    shuffled = data.draw(st.permutations(conversations))
    assert set(split(shuffled, share, seed)["heldout"]) == set(parts["heldout"])


def test_the_seed_matters():
    conversations = some(100)
    assert split(conversations, 0.2, 1) == split(conversations, 0.2, 1) != split(conversations, 0.2, 2)


def test_near_duplicates_stay_on_one_side():
    rng = random.Random(5)
    conversations = some(60, 5)
    twins = []
    for original in list(conversations):
        words = original["turns"][0].split()
        words.append(rng.choice(WORDS))  # 18 of 19 triples shared
        twins.append(conversation(original["id"] + "-twin", " ".join(words), "twins"))
    groups = clusters(conversations + twins)
    assert sorted(map(len, groups)) == [2] * 60
    parts = split(conversations + twins, 0.2)
    for side in parts.values():
        assert {name.removesuffix("-twin") + "-twin" for name in side} | {n.removesuffix("-twin") for n in side} == set(
            side
        )


def test_the_same_first_turn_is_one_cluster_whatever_follows():
    rows = [
        {"id": str(i), "turns": ["Tell me a  Story", f"about {' '.join(WORDS[20 * i : 20 * i + 20])}"]}
        for i in range(3)
    ]
    rows[1]["turns"][0] = "tell me a story"
    assert clusters(rows) == [[0, 1, 2]]


def test_the_signature_estimates_jaccard_similarity():
    rng = random.Random(0)
    errors = []
    for n in range(200):  # other words each time, so that the errors are independent
        shared, own = rng.randint(0, 60), rng.randint(1, 60)
        text = [[f"s{n}-{i}" for i in range(shared)] + [f"{side}{n}-{i}" for i in range(own)] for side in "xy"]
        triples = [{tuple(words[i : i + 3]) for i in range(max(1, len(words) - 2))} for words in text]
        true = len(triples[0] & triples[1]) / len(triples[0] | triples[1])
        errors.append((signature([" ".join(text[0])]) == signature([" ".join(text[1])])).mean() - true)
    assert abs(sum(errors) / len(errors)) < 0.02 and max(map(abs, errors)) < 0.35


def test_unlike_short_prompts_are_not_joined():
    rows = [conversation(str(i), f"What is word{i} plus word{i + 7}?") for i in range(50)]
    assert len(clusters(rows)) == 50


def test_the_same_exercise_with_other_figures_is_a_near_duplicate():
    rows = [
        conversation(str(i), f"A rope of {i + 40} m is cut into {i} pieces. How long, in {i}.5 cm?") for i in range(20)
    ]
    other = conversation("other", "A rope of silk is cut in two. Which half is longer, and why is that so?")
    assert [len(group) for group in clusters([*rows, other])] == [20, 1]


def test_what_cannot_be_split_is_refused():
    with pytest.raises(UsageError, match="cannot be split"):
        split([conversation("a", "same"), conversation("b", "same")], 0.5)
    with pytest.raises(UsageError, match="'a' is used twice"):
        split([conversation("a", "one"), conversation("a", "two")], 0.5)
    with pytest.raises(UsageError, match="between 0 and 1"):
        split(some(4), 1.0)


def test_a_category_of_large_clusters_gives_its_smallest_one():
    rows = [conversation(f"a{i}", "same text for all") for i in range(9)] + [
        conversation(f"b{i}", "other") for i in range(4)
    ]
    assert split(rows, 0.1)["heldout"] == ["b0", "b1", "b2", "b3"]


def test_stored_by_id_and_checked(tmp_path):
    parts, path = split(some(20), 0.2), tmp_path / "split.json"
    save_split(parts, path)
    assert load_split(path) == parts == json.loads(path.read_text())
    save_split({"train": ["a", "b"], "heldout": ["b"]}, path)
    with pytest.raises(UsageError, match="'b' for one"):
        load_split(path)
    path.write_text("[]")
    with pytest.raises(UsageError, match="expected the lists"):
        load_split(path)


def test_where_only_numbers_differ_they_count():
    rows = [conversation(str(i), f"What is {i} plus {i * i}?") for i in range(40)]
    parts = split(rows, 0.2, 0)
    assert len(parts["heldout"]) == 8 and len(parts["train"]) == 32
