"""Speculative decoding against plain decoding, an engine without a cache, and replay; chains and trees."""

import itertools
import json
from dataclasses import dataclass

import pytest
import torch
from decode_parts import Pair, as_draft, prompts, sample_of
from draft_parts import to_draft_ids
from engine_parts import serve
from engines import reference
from test_families import FAMILIES, MOE, causal, save
from test_verify import chi_square
from typer.testing import CliRunner

from eyas import cli
from eyas.data.generate import Limits, generate, prepare
from eyas.data.prompts import read_prompts
from eyas.data.template import ChatTemplate
from eyas.decode.chain import Chain, Decoder, Drafter, Guess
from eyas.decode.compare import acceptance, both_ways, converse, difference
from eyas.decode.replay import accept, accept_trees
from eyas.decode.tree import Tree, depths, tree_mask
from eyas.draft.config import draft_config_for
from eyas.draft.model import Draft
from eyas.errors import UsageError
from eyas.serving.export import export
from eyas.target import LoadedTarget, load_target, read_target

NEW, K = 12, 4
TREE = Tree(12, 4, 3)


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> Pair:
    return Pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def limits(pair) -> Limits:
    return Limits(NEW, 1024, frozenset(pair.template.end_ids))


@pytest.fixture(scope="module")
def written(pair, tmp_path_factory) -> list[dict]:
    """200 conversations answered by `eyas generate`, which knows nothing of drafts."""
    out = tmp_path_factory.mktemp("written") / "answers.jsonl"
    generate(prompts(200), pair.loaded, out, max_new_tokens=NEW, slots=16)
    return [json.loads(line) for line in out.read_text("utf-8").splitlines()]


@pytest.fixture(scope="module")
def taught(pair, written) -> Draft:
    samples = [sample_of(pair.loaded, document, (0, 2, 4)) for document in written]
    return pair.teach(pair.random_draft(), samples)


@pytest.fixture(scope="module")
def chains(pair, taught, limits):
    return both_ways(prompts(200), pair.loaded, taught, Chain(K), pair.template, limits)


# lossless


def test_greedy_chains_give_the_targets_own_text(chains, written):
    """200 conversations, several turns among them, token for token, and as `eyas generate` wrote them."""
    found = acceptance(chains, K)
    assert found.accepted > 300 and found.per_position[0] < 0.9, "all right or all wrong would prove nothing"
    assert sum(len(document["spans"]) > 1 for document in written) > 10
    assert sum(finish == "stop" for document in written for finish in document["finish"]) > 20
    for both, document in zip(chains, written, strict=True):
        assert both.plain.tokens == document["tokens"]
        assert both.fast.record() == both.plain.record()


def test_greedy_trees_give_the_targets_own_text(pair, taught, limits, chains, written):
    """The same 200; the tree keeps more than the chain."""
    accepted = rounds = 0
    documents, _ = prepare(prompts(200), pair.template, limits, "", "error")
    for document, expected in zip(documents, written, strict=True):
        answers = converse(Decoder(pair.loaded, taught, TREE), document, pair.template, limits)
        assert document.tokens == expected["tokens"]
        accepted += sum(sum(answer.accepted) for answer in answers)
        rounds += sum(len(answer.accepted) for answer in answers)
    assert 1 + accepted / rounds > acceptance(chains, K).tau + 0.1


def test_the_real_target(smollm2):
    """SmolLM2-135M in float32 and a draft taught for a moment on its answers: chain and tree."""
    loaded = load_target(smollm2, "float32")
    template = ChatTemplate(loaded.tokenizer)
    rows, limits = prompts(2), Limits(12, 2048, frozenset(template.end_ids))
    documents, _ = prepare(rows, template, limits, "", "error")
    for document in documents:
        converse(Decoder(loaded), document, template, limits)
    config = draft_config_for(loaded.target, 400, aux_layers=(1, 14, 26), intermediate_size=256)
    draft = Draft(config)
    draft.initialise(0)
    ids = sorted({token for document in documents for token in document.tokens[document.spans[0][0] :]})
    ids = torch.tensor(sorted({*ids, *range(20_000, 20_400 - len(ids))}))[:400]
    draft.d2t.copy_(ids - torch.arange(400))
    draft.t2d[ids] = True
    draft.embed_tokens.weight.data.copy_(loaded.embedding)
    draft.lm_head.weight.data.copy_(loaded.head[ids])
    texts = [document.tokens for document in documents]
    draft = as_draft(config, reference.teach(loaded.model, draft.state_dict(), config.to_dict(), texts, 25))
    for propose in (Chain(3), Tree(8, 3, 2)):
        pairs = both_ways(rows, loaded, draft, propose, template, limits)
        assert [both.fast.tokens for both in pairs] == [both.plain.tokens for both in pairs] == texts
        assert acceptance(pairs, 3).accepted > 2


# the same integers as others count


OPTIONS = [{}, {"norm_before_residual": True}, {"norm_before_fc": True}, {"num_key_value_heads": 4, "head_dim": 16}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_rounds_equal_an_engine_without_a_cache(pair, written, options):
    """Rounds and text of the reference engine, which computes everything anew in every step."""
    samples = [sample_of(pair.loaded, document, (0, 2, 4)) for document in written[:8]]
    draft = pair.teach(pair.random_draft(**options), samples, 40)
    state, config, kept = draft.state_dict(), draft.config.to_dict(), 0
    for document in written[:5]:
        prompt = document["tokens"][: document["spans"][0][0]]
        for k in (1, 3):
            expected = reference.speculate(pair.loaded.model, state, config, prompt, 14, k, last="whole")
            found = Decoder(pair.loaded, draft, Chain(k)).answer(list(prompt), 14 + k, frozenset())
            before = list(itertools.accumulate(found.accepted, lambda n, kept: n + kept + 1, initial=1))
            rounds = [kept for n, kept in zip(before, found.accepted, strict=False) if n < 14]
            assert found.tokens[:14] == expected["tokens"]
            assert (k * len(rounds), sum(rounds)) == (expected["drafted"], expected["accepted"])
            assert [sum(kept > i for kept in rounds) for i in range(k)] == expected["per_position"]
            kept += sum(found.accepted)
    assert kept > 15


@pytest.mark.parametrize("shape", [1, 3, 6, TREE], ids=["1", "3", "6", "tree"])
def test_rounds_equal_replay_and_a_slow_engine(pair, written, taught, limits, shape):
    """Starts and kept tokens of every round, through all turns, up to an end token or the limit."""
    chain = isinstance(shape, int)
    pairs = both_ways(prompts(40), pair.loaded, taught, Chain(shape) if chain else shape, pair.template, limits)
    decoded = acceptance(pairs, shape if chain else shape.depth)
    samples = [sample_of(pair.loaded, document, (0, 2, 4), exact=True) for document in written[:40]]
    if chain:
        replayed = accept(taught, samples, shape, to_draft_ids(taught), torch.float32)
    else:
        replayed = accept_trees(taught, samples, shape, torch.float32)
    for one, other in zip(decoded.conversations, replayed.conversations, strict=True):
        assert (one.id, one.tokens, one.starts, one.accepted) == (other.id, other.tokens, other.starts, other.accepted)
    assert decoded.accepted > 50 and decoded.per_position == replayed.per_position
    for at in (0, 1, 7) if chain else ():
        one = decoded.conversations[at]
        rounds = serve(taught.state_dict(), taught.config, samples[at], shape)
        assert list(zip(one.starts, one.accepted, strict=True)) == rounds


# trees


@dataclass
class Watched:
    """Keeps every guess, with the tokens known before it."""

    propose: Tree
    guesses: list

    def __call__(self, drafter, output, last, *rest):
        guess = self.propose(drafter, output, last, *rest)
        self.guesses.append((len(drafter), guess))
        return guess


def test_top_k_one_is_the_chain(pair, taught, limits, chains):
    pairs = both_ways(prompts(40), pair.loaded, taught, Tree(K + 1, K, 1), pair.template, limits)
    for one, other in zip(pairs, chains, strict=False):
        assert [a.accepted for a in one.fast_answers] == [a.accepted for a in other.fast_answers]
        assert [a.starts for a in one.fast_answers] == [a.starts for a in other.fast_answers]
        assert one.fast.tokens == other.fast.tokens


def test_a_tree_accepts_if_any_path_matches(pair, taught, written):
    """Each round against the text: the longest path, among all paths of the guess, that is what came."""
    beside = 0
    for document in written[:12]:
        watched = Watched(TREE, [])
        decoder = Decoder(pair.loaded, taught, watched)
        answer = decoder.answer(document["tokens"][: document["spans"][0][0]], NEW, frozenset())
        for (row, guess), start, kept in zip(watched.guesses, answer.starts, answer.accepted, strict=True):
            truth = decoder.tokens[start + 2 :]
            paths = []
            for node in range(len(guess.tokens)):
                path, at = [], node
                while at:
                    path.append(guess.tokens[at])
                    at = guess.parents[at]
                paths.append(path[::-1])
            right = [len(path) for path in paths if path == truth[: len(path)]]
            assert row == start + 1 and guess.tokens[0] == decoder.tokens[start + 1]
            assert kept == max(right)
            beside += kept > 0 and guess.tokens[1] != truth[0]  # node 1 is the draft's first choice
    assert beside > 3, "branches beside the first choice must have mattered"


def slow_tree(state, config, tokens, aux, tree: Tree):
    """The tree by its definition: no cache, each node's log-probabilities from a pass over its whole path."""

    def logp(path: tuple[int, ...]) -> torch.Tensor:
        hidden = reference.features(state, config, aux)
        for step in range(len(path) + 1):
            out = reference.draft_layer(state, config, torch.tensor(tokens[1:] + list(path[:step])), hidden)[-1]
            hidden = torch.cat([hidden, out[None]])
        return reference.head(state, config, out).log_softmax(-1)

    ids = torch.arange(config["draft_vocab_size"]) + state["d2t"]
    pool: dict[tuple[int, ...], float] = {}
    level = {(): 0.0}
    for _ in range(tree.depth):
        grown = {}
        for path, score in level.items():
            best, at = logp(path).topk(tree.topk)
            grown |= {(*path, int(ids[i])): score + float(b) for b, i in zip(best, at, strict=True)}
        pool |= grown
        level = dict(sorted(grown.items(), key=lambda item: -item[1])[: tree.topk])
    return {path for path, _ in sorted(pool.items(), key=lambda item: -item[1])[: tree.total - 1]}


@pytest.mark.parametrize("tree", [TREE, Tree(30, 3, 4), Tree(5, 5, 2)], ids=str)
def test_the_tree_is_eagle_2s(pair, taught, written, tree):
    for document in written[:3]:
        tokens = document["tokens"][:20]
        aux, _ = reference.target_states(pair.loaded.model, torch.tensor(tokens[:-1]), [0, 2, 4])
        with torch.inference_mode():
            drafter = Drafter(taught, torch.device("cpu"), torch.float32)
            drafter.extend(torch.tensor(tokens[1:11]), aux[:10])
            output = drafter.extend(torch.tensor(tokens[11:]), aux[10:])
            guess = tree(drafter, output, tokens[-1], 0.0, torch.Generator())
        assert len(drafter) == len(tokens) - 1 and len(drafter.cache[0][0]) == len(tokens) - 1
        found = set()
        for node in range(1, len(guess.tokens)):
            path, at = [], node
            while at:
                path.append(guess.tokens[at])
                at = guess.parents[at]
            found.add(tuple(path[::-1]))
        assert all(parent < node for node, parent in enumerate(guess.parents))
        assert found == slow_tree(taught.state_dict(), taught.config.to_dict(), tokens, aux, tree)


def test_a_drafter_reads_the_weights_of_its_moment(pair, written):
    """Not the casts that an earlier one made; and replaying trees leaves the draft as it was."""
    draft = pair.random_draft()
    sample = sample_of(pair.loaded, written[0], (0, 2, 4))
    aux = torch.randn(5, draft.config.fc_in, generator=torch.Generator().manual_seed(0)).bfloat16()

    def output(draft):
        with torch.inference_mode():
            return Drafter(draft, torch.device("cpu"), torch.bfloat16).extend(torch.arange(5), aux)

    before = output(draft)
    with torch.no_grad():
        draft.fc.weight.mul_(-1)
    fresh = Draft(draft.config)
    fresh.load_state_dict(draft.state_dict())
    assert torch.equal(output(draft), output(fresh)) and not torch.equal(output(draft), before)
    accept_trees(draft, [sample], TREE, torch.bfloat16)
    assert draft.fc.weight.dtype == torch.float32


def test_tree_mask_shows_ancestors_only(pair):
    parents = [-1, 0, 0, 1, 3, 2]
    seen = tree_mask(parents, 2, pair.loaded)[0, 0] == 0
    rows = ["".join("x" if cell else "." for cell in row) for row in seen.tolist()]
    assert rows == ["xxx.....", "xxxx....", "xxx.x...", "xxxx.x..", "xxxx.xx.", "xxx.x..x"]
    assert depths(parents) == [0, 1, 1, 2, 3, 2]


# every family


WINDOWS = {
    "mistral-window": causal("Mistral", sliding_window=6),
    "gemma2-window": causal("Gemma2", sliding_window=6),
    "gpt-oss-window": causal("GptOss", sliding_window=6, **MOE),
}


@dataclass
class Knowing:
    """Guesses from the text that will come: right for some steps, then wrong; with a tree, wrong branches beside."""

    text: list[int]
    tree: bool
    calls: int = 0

    def __call__(self, drafter, output, last, *_):
        at = len(drafter) + 1
        right = self.text[at : at + self.calls % 4]
        self.calls += 1
        wrong = [(token + 1) % 300 for token in self.text[at : at + len(right) + 1]]
        if not self.tree:
            return Guess([last, *right, wrong[-1]], list(range(-1, len(right) + 1)))
        tokens, parents, above = [last], [-1], 0
        for step, token in enumerate(wrong):  # the wrong branch first, with a child of its own
            tokens += [token, 7, *right[step : step + 1]]
            parents += [above, len(parents), *[above] * (step < len(right))]
            above = len(tokens) - 1
        return Guess(tokens, parents)


@pytest.fixture(scope="module", params=[*FAMILIES, *WINDOWS])
def member(request, tmp_path_factory, tiny_target) -> LoadedTarget:
    torch.manual_seed(0)
    model = (FAMILIES | WINDOWS)[request.param]()
    return load_target(save(model, tmp_path_factory.mktemp("family") / request.param, tiny_target), "float32")


def test_every_family_decodes_its_own_text(member):
    """Kept and dropped cache rows, masks and windows of each architecture, against passes without any cache."""
    text, length = [5, 17, 40, 3, 250, 9, 33], 26
    with torch.inference_mode():
        while len(text) < length + 8:
            with member.capturing([]) as caught:
                member.body(input_ids=torch.tensor([text]), use_cache=False)
            text.append(int(member.logits(caught["final"][0, -1]).argmax()))
    draft = Draft(draft_config_for(member.target, member.target.vocab_size, num_key_value_heads=2, head_dim=8))
    draft.initialise(0)
    for tree in (False, True):
        answer = Decoder(member, draft, Knowing(text, tree)).answer(text[:7], length - 7, frozenset())
        assert answer.tokens == text[7:length]
        assert set(answer.accepted[:-1]) >= {1, 2, 3}


# sampling


@pytest.fixture(scope="module")
def little(tmp_path_factory):
    """A target of five tokens and a random draft that can say four of them."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=5, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1, max_position_embeddings=32, initializer_range=0.6, tie_word_embeddings=False,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("little")
    LlamaForCausalLM(config).save_pretrained(folder)
    known = read_target(folder)
    loaded = LoadedTarget(known, LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(), None)
    shape = draft_config_for(known, 4, aux_layers=(0,))
    draft = Draft(shape)
    draft.initialise(1, 0.7)
    ids = torch.tensor([0, 1, 3, 4])
    draft.d2t.copy_(ids - torch.arange(4))
    draft.t2d[ids] = True
    draft.embed_tokens.weight.data.copy_(loaded.embedding)
    return loaded, draft.requires_grad_(False)


@pytest.mark.parametrize("propose", [Chain(2), Tree(6, 2, 2)], ids=str)
def test_sampled_text_has_the_targets_distribution(little, propose):
    """All 125 continuations of three tokens, enumerated with the target alone, at a temperature of its own."""
    loaded, draft = little
    prompt, temperature, draws = [1, 3, 0], 1.3, 1500
    expected = {}
    with torch.no_grad():
        for cell in itertools.product(range(5), repeat=3):
            logits = loaded.model(torch.tensor([prompt + list(cell)])).logits[0, 2:-1] / temperature
            expected[cell] = float(logits.softmax(-1).gather(1, torch.tensor(cell)[:, None]).prod())
    rare = {cell for cell, p in expected.items() if p * draws < 5}
    counts, kept = {}, 0
    for seed in range(draws):
        answer = Decoder(loaded, draft, propose, temperature, seed).answer(list(prompt), 3, frozenset())
        kept += sum(answer.accepted)
        cell = "rare" if tuple(answer.tokens) in rare else tuple(answer.tokens)
        counts[cell] = counts.get(cell, 0) + 1
    cells = {cell: p for cell, p in expected.items() if cell not in rare}
    if rare:
        cells["rare"] = sum(expected[cell] for cell in rare)
    found, bound = chi_square(counts, cells, draws)
    assert found < bound and kept > draws / 10 and len(cells) > 30


# what a user sees


@pytest.fixture(scope="module")
def folder(pair, taught, tmp_path_factory):
    """A target folder, a draft folder and a file of prompts on disk."""
    place = tmp_path_factory.mktemp("disk")
    pair.loaded.model.save_pretrained(place / "target")
    pair.loaded.tokenizer.save_pretrained(place / "target")
    known = read_target(place / "target")
    export(taught.state_dict(), taught.config, known, place / "run" / "draft", provenance={}, dtype="float32")
    (place / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts(12)))
    return place


def call(*arguments):
    return CliRunner().invoke(cli.app, list(map(str, arguments)), catch_exceptions=False)


@pytest.mark.parametrize("shape", [("--k", "3"), ("--tree", "8,3,2"), ("--temperature", "0.8")], ids=str)
def test_decode_prints_its_contract(folder, shape):
    common = (
        "--target",
        folder / "target",
        "--prompts",
        folder / "prompts.jsonl",
        "--max-new-tokens",
        "8",
        "--limit",
        "6",
    )
    result = call("decode", folder / "run" / "draft", *common, *shape, "--json")
    found = json.loads(result.stdout)
    assert result.exit_code == 0
    assert {"tau", "accept_rate", "per_position", "protocol", "speedup", "lossless"} <= set(found)
    protocol = found["protocol"]
    assert protocol["shape"] == ("tree" if "--tree" in shape else "chain") and protocol["prompts"] == 6
    assert found["lossless"] is (None if "--temperature" in shape else True)
    assert found["tau"] == pytest.approx(1 + sum(found["per_position"]))
    assert sum(found["share"].values()) == pytest.approx(1) and found["speedup"] > 0
    said = call("decode", folder / "run" / "draft", *common, *shape).stdout
    assert "tau" in said and ("lossless: 6 of 6" in said or "--temperature" in shape)


def test_wrong_use_is_one_sentence(folder):
    draft, common = folder / "run" / "draft", ("--target", folder / "target", "--prompts", folder / "prompts.jsonl")
    for arguments, match in (
        ((draft, *common, "--tree", "8,3"), "TOTAL,DEPTH,TOPK"),
        ((draft, *common, "--tree", "1,3,2"), "at least 2 tokens"),
        ((draft, *common, "--tree", "8,3,2", "--k", "3"), "not both"),
        ((draft, *common, "--dtype", "int8"), "float32 or bfloat16"),
        ((folder, *common), "no draft"),
        ((draft, *common[:2], "--prompts", folder / "none.jsonl"), "no such file"),
    ):
        with pytest.raises(UsageError, match=match):
            call("decode", *arguments)


def test_a_draft_of_another_target_is_refused(folder, tiny_target):
    with pytest.raises(UsageError, match="hidden_size"):
        call("decode", folder / "run" / "draft", "--target", tiny_target, "--prompts", folder / "prompts.jsonl")


def test_prompts_of_a_run_are_its_held_out_ones(folder):
    place = folder / "run" / "conversations"
    place.mkdir(exist_ok=True)
    rows = prompts(12)
    (place / "conversations.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    names = [row["id"] for row in rows]
    (place / "split.json").write_text(json.dumps({"train": names[:8], "heldout": names[8:]}))
    own = read_prompts(place / "conversations.jsonl")
    assert [row["id"] for row in own.rows] == names[8:] and own.trained == []
    other = read_prompts(folder / "prompts.jsonl", 10, folder / "run" / "draft")
    assert other.trained == names[:8] and len(other.rows) == 10
    assert read_prompts(folder / "prompts.jsonl").trained is None
    (folder / "twice.jsonl").write_text(2 * (json.dumps(rows[0]) + "\n"))
    assert len(read_prompts(folder / "twice.jsonl").rows) == 1
    (folder / "bad.jsonl").write_text(json.dumps(rows[0]) + '\n{"text": "x"}\n')
    with pytest.raises(UsageError, match=r"bad\.jsonl.*unknown form"):
        read_prompts(folder / "bad.jsonl")


def test_a_difference_says_where_and_how_near(pair, chains):
    """A text changed by hand parts where it was changed, by the target's own margin there."""
    from copy import deepcopy

    both = deepcopy(next(p for p in chains if len(p.plain_answers[0].tokens) > 4))
    assert difference(both, pair.loaded) is None
    at = len(both.plain.tokens) - 2
    both.fast.tokens[at] = (both.fast.tokens[at] + 1) % 300
    _, logits = reference.target_states(pair.loaded.model, torch.tensor(both.plain.tokens), [0])
    found = difference(both, pair.loaded)
    margin = logits[at - 1, both.plain.tokens[at]] - logits[at - 1, both.fast.tokens[at]]
    assert found["position"] == at and found["margin"] == pytest.approx(float(margin), abs=1e-4)
