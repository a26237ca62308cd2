"""The plan: acceptance by rank against replay and a slow draft, trees against brute force, costs by hand."""

import itertools
import json

import numpy as np
import pytest
import torch
from decode_parts import Pair, prompts, sample_of
from draft_parts import to_draft_ids
from engines import reference
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from eyas import cli
from eyas.data.generate import generate
from eyas.decode.cost import (
    Costs,
    Ranks,
    Setting,
    chain_kept,
    flags,
    likely_paths,
    measure_costs,
    plan,
    ranks,
    read_costs,
    shapes,
    tau_of,
    tree_kept,
)
from eyas.decode.replay import accept
from eyas.errors import UsageError
from eyas.features.extract import extract
from eyas.serving.export import export

K, CAP = 4, 3


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> Pair:
    return Pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def written(pair, tmp_path_factory) -> list[dict]:
    out = tmp_path_factory.mktemp("written") / "answers.jsonl"
    generate(prompts(24), pair.loaded, out, max_new_tokens=12, slots=8)
    return [json.loads(line) for line in out.read_text("utf-8").splitlines()]


@pytest.fixture(scope="module")
def samples(pair, written):
    return [sample_of(pair.loaded, document, (0, 2, 4)) for document in written]


@pytest.fixture(scope="module")
def draft(pair, samples):
    return pair.teach(pair.random_draft(), samples, 100)


@pytest.fixture(scope="module")
def documents(draft, samples) -> list[Ranks]:
    return ranks(draft, samples, K, CAP, to_draft_ids(draft), torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_chains_are_replayed_exactly(draft, samples, dtype):
    """One table of ranks gives the rounds that replay gives for every K; in bfloat16 many logits are equal."""
    documents = ranks(draft, samples, K, CAP, to_draft_ids(draft), dtype)
    for k in range(1, K + 1):
        found = accept(draft, samples, k, to_draft_ids(draft), dtype)
        tau, rounds = tau_of(documents, chain_kept(documents, k))
        assert rounds == [each for c in found.conversations for each in c.accepted] and sum(rounds) > 20
        assert tau == pytest.approx(found.tau)


def test_ranks_by_their_definition(draft, samples, documents):
    """Every chain of some documents, from passes over the whole of it: no cache, no batch."""
    state, config = draft.state_dict(), draft.config.to_dict()
    ids = (torch.arange(draft.config.draft_vocab_size) + state["d2t"]).tolist()
    for sample, found in list(zip(samples, documents, strict=True))[:2]:
        tokens = sample.tokens.tolist()
        aux = torch.from_numpy(sample.aux.view(np.int16)).view(torch.bfloat16).float().flatten(1)
        for row in np.flatnonzero(found.depth):
            hidden = reference.features(state, config, aux[: row + 1])
            for step in range(K):
                if step >= found.depth[row]:
                    assert found.ranks[row, step] == CAP
                    continue
                out = reference.draft_layer(state, config, torch.tensor(tokens[1 : row + 2 + step]), hidden)[-1]
                hidden = torch.cat([hidden, out[None]])
                order = reference.head(state, config, out).argsort(descending=True).tolist()
                truth = tokens[row + 2 + step]
                rank = next((i for i, at in enumerate(order) if ids[at] == truth), CAP)
                assert found.ranks[row, step] == min(rank, CAP)


tables = st.lists(st.lists(st.integers(0, 2), min_size=3, max_size=3), min_size=1, max_size=12)


@settings(max_examples=40, deadline=None)
@given(tables, st.integers(1, 4))
def test_the_likely_tree_is_the_best_one(table, nodes):
    """Against every tree of that many nodes, ranks 0 and 1, depth 3, over rows that all count once."""
    one = Ranks(np.ones(len(table), dtype=np.int64), np.array(table))
    every = [path for length in (1, 2, 3) for path in itertools.product(range(2), repeat=length)]
    best = 0
    for tree in itertools.combinations(every, nodes):
        if all(path[:-1] in tree or len(path) == 1 for path in tree):
            best = max(best, sum(tuple(row[: len(path)]) == path for row in table for path in tree))
    tree = likely_paths([one], 2)[:nodes]
    assert all(len(path) == 1 or path[:-1] in tree for path in tree)
    assert int(tree_kept([one], tree)[0].sum()) == best


@settings(max_examples=60, deadline=None)
@given(tables, st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=3).map(tuple), max_size=6))
def test_what_a_tree_keeps(table, paths):
    """The longest beginning of a row's ranks that is in the tree, walked node by node."""
    tree = [path for path in dict.fromkeys(paths) if all(path[:n] in paths for n in range(1, len(path)))]
    found = tree_kept([Ranks(np.ones(len(table), dtype=np.int64), np.array(table))], tree)[0]
    for row, kept in zip(table, found, strict=True):
        node = 0
        while node < 3 and tuple(row[: node + 1]) in tree:
            node += 1
        assert kept == node


def test_trees_keep_more_the_larger_they_are(documents):
    found = shapes(documents, K)
    chains = {one.k: one.tau for one in found if one.shape == "chain"}
    assert sorted(chains) == [1, 2, 3, 4] and chains[4] >= chains[3] >= chains[1] > 1
    trees = [one for one in found if one.shape == "tree"]
    assert all(one.k < one.total for one in trees) and len(trees) > 5
    assert max(one.tau for one in trees) > chains[4] + 0.1


# costs


COSTS = {
    "device": "a device",
    "draft_step": {"1": 0.001, "11": 0.002},
    "verify": {"1": {"1": 0.010, "5": 0.012}, "8": {"1": 0.010, "5": 0.050}},
}


def written_costs(folder, **changes):
    file = folder / "costs.json"
    file.write_text(json.dumps(COSTS | changes))
    return file


def test_costs_of_a_round_by_hand(tmp_path):
    costs = read_costs(written_costs(tmp_path))
    # the draft reads 2 rows (1.1 ms) and takes two steps of one row; the target verifies 3 tokens
    assert costs.round(1, 2.0, 3, 1, 3) == pytest.approx(0.0011 + 2 * 0.001 + 0.011)
    # eight conversations: 16 rows (2.5 ms, beyond the table), one step of 8 * 4 rows (4.1 ms), 7 tokens (70 ms)
    assert costs.round(8, 2.0, 2, 4, 7) == pytest.approx(0.0025 + 0.0041 + 0.070)
    assert costs.draft(0.5) == pytest.approx(0.001)


@pytest.mark.parametrize(
    "changes",
    [
        {"draft_step": {}}, {"verify": {"1": {"1": 0.01}}}, {"verify": {"1": {"2": 0.01, "3": 0.01}}},
        {"draft_step": {"one": 1}}, {"draft_step": [1]}, {"draft_step": {"1": -1}}, {"verify": {}},
    ],
    ids=str,
)  # fmt: skip
def test_wrong_costs_are_refused(tmp_path, changes):
    with pytest.raises(UsageError, match=r"costs\.json: not costs of speculation .* Expected seconds"):
        read_costs(written_costs(tmp_path, **changes))


def test_the_plan_weighs_acceptance_against_cost(tmp_path, documents):
    costs = read_costs(written_costs(tmp_path))
    found = plan(documents, costs, K, "d")
    one, eight = found["batches"]
    assert one["plain_tokens_per_s"] == pytest.approx(100) and eight["plain_tokens_per_s"] == pytest.approx(800)
    for s in one["settings"]:
        seconds = costs.round(1, s["tau"], s["k"], s["topk"], s["total"])
        assert s["tokens_per_s"] == pytest.approx(s["tau"] / seconds)
        assert s["speedup"] == pytest.approx(s["tokens_per_s"] / 100)
    assert one["best"]["speedup"] == max(s["speedup"] for s in one["settings"]) > 1.1
    assert one["best_chain"]["shape"] == "chain" and one["pays"] and "of plain" in one["verdict"]
    assert not eight["pays"] and "speculation does not pay" in eight["verdict"]  # five tokens cost it five times one
    chain = tau_of(documents, chain_kept(documents, K))[0]
    assert chain == pytest.approx(1 + sum(found["per_position"]))


def test_flags_say_the_setting():
    tree, chain = Setting("tree", 5, 32, 4, 3.0), Setting("chain", 3, 4, 1, 2.0)
    said = flags(tree, chain, "runs/x/draft")
    assert "--speculative-num-steps 5 --speculative-eagle-topk 4 --speculative-num-draft-tokens 32" in said["sglang"]
    assert json.loads(said["vllm"].split("'")[1]) == {
        "method": "eagle3", "model": "runs/x/draft", "num_speculative_tokens": 3,
    }  # fmt: skip
    assert said["llamacpp"].endswith("--spec-draft-n-max 3 --spec-draft-p-min 0")


def test_costs_are_measured_here(pair, draft):
    found = measure_costs(pair.loaded, draft, (1, 2), (1, 4), context=16)
    assert set(found.verify) == {1, 2} and set(found.verify[1]) == {1, 4} and len(found.draft_step) > 2
    assert min([*found.draft_step.values(), *found.verify[2].values()]) > 0
    assert isinstance(found, Costs) and "float32" in found.device


# the command


@pytest.fixture(scope="module")
def run(pair, draft, written, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    pair.loaded.model.save_pretrained(folder / "target")
    pair.loaded.tokenizer.save_pretrained(folder / "target")
    extract(written, pair.loaded, folder / "store", layers=[0, 2, 4])
    export(draft.state_dict(), draft.config, pair.loaded.target, folder / "draft", provenance={}, dtype="float32")
    names = [document["id"] for document in written]
    (folder / "conversations").mkdir()
    (folder / "conversations" / "split.json").write_text(json.dumps({"train": names[:4], "heldout": names[4:]}))
    return folder


def call(*arguments):
    return CliRunner().invoke(cli.app, ["plan", *map(str, arguments)], catch_exceptions=False)


def test_plan_prints_its_contract(run, tmp_path, pair):
    common = ("--store", run / "store", "--draft", run / "draft", "--target", run / "target", "--k", K)
    costs = ("--costs", written_costs(tmp_path, device="an H200"))
    found = json.loads(call(*common, *costs, "--json").stdout)
    assert found["prompts"] == 20 and found["data"] == "held-out conversations" and len(found["per_position"]) == K
    assert [each["batch"] for each in found["batches"]] == [1, 8]
    assert found["batches"][0]["flags"]["sglang"].startswith("--speculative-algorithm EAGLE3")
    assert found["batches"][1]["pays"] is False and found["batches"][1]["flags"] is None
    said = call(*common, *costs).stdout
    assert said.startswith("an H200") and "does not pay" in said and "--speculative-config" in said


def test_plan_needs_a_store_of_the_drafts_layers(run, pair, written, tmp_path):
    extract(written[:2], pair.loaded, tmp_path / "store", layers=[1, 2, 4])
    with pytest.raises(UsageError, match="reads"):
        call("--store", tmp_path / "store", "--draft", run / "draft", "--target", run / "target")
    with pytest.raises(UsageError, match=r"recipe\.yaml"):
        call("--store", tmp_path / "store", "--draft", run / "draft")
