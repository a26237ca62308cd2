"""Measuring live servers: against imitations that report a real decoder's rounds in each engine's documented format."""

import itertools
import json
import socket
from contextlib import ExitStack

import pytest
import torch
from decode_parts import Pair, prompts, sample_of
from engine_imitation import Imitation, serving
from engines import llamacpp
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from eyas import cli
from eyas.data.generate import Limits, prepare
from eyas.decode.chain import Decoder
from eyas.decode.compare import converse
from eyas.errors import EyasError, UsageError
from eyas.measure import measure, own_reuse, read_metrics
from eyas.serving.export import export
from eyas.target import read_target

NEW, COUNT, K = 10, 16, 3


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> Pair:
    return Pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def draft(pair):
    limits = Limits(NEW, 1024, frozenset(pair.template.end_ids))
    documents, _ = prepare(prompts(COUNT), pair.template, limits, "", "error")
    for document in documents:
        converse(Decoder(pair.loaded), document, pair.template, limits)
    samples = [sample_of(pair.loaded, document.record(), (0, 2, 4)) for document in documents]
    return pair.teach(pair.random_draft(), samples, 120)


@pytest.fixture(scope="module")
def place(pair, draft, tmp_path_factory):
    """On disk: the target, a run with its draft and split, held-out prompts in a file of their own."""
    folder = tmp_path_factory.mktemp("measure")
    pair.loaded.model.save_pretrained(folder / "target")
    pair.loaded.tokenizer.save_pretrained(folder / "target")
    known = read_target(folder / "target")
    export(draft.state_dict(), draft.config, known, folder / "run" / "draft", provenance={}, dtype="float32")
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts(COUNT)))
    other = folder / "run" / "conversations"
    other.mkdir()
    train = [{**row, "id": f"t{i}"} for i, row in enumerate(prompts(60)[40:])]
    (other / "conversations.jsonl").write_text("".join(json.dumps(row) + "\n" for row in train))
    (other / "split.json").write_text(json.dumps({"train": [row["id"] for row in train], "heldout": []}))
    (folder / "training.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*prompts(8), *train[:4]]))
    return folder


@pytest.fixture
def serve(pair, draft, place):
    """serve(kind, **options) starts an imitation and gives (its address, itself)."""
    with ExitStack() as stack:

        def start(kind, **options):
            made = Imitation(kind, pair, place / "target", **({"draft": draft, "k": K} | options))
            return stack.enter_context(serving(made)), made

        yield start


def ask(kind, url, place, **options):
    options = {"max_new_tokens": NEW, "target": str(place / "target")} | options
    return measure(kind, url, options.pop("prompts", place / "prompts.jsonl"), **options)


@pytest.mark.parametrize("kind", ["vllm", "sglang", "llamacpp"])
def test_figures_are_the_rounds_that_were_run(serve, place, kind):
    url, server = serve(kind)
    found = ask(kind, url, place, k=K, draft=place / "run" / "draft", concurrency=4)
    answers = server.answers[1:]  # the first one only warms up
    kept = [each for answer in answers for each in answer.accepted]
    assert len(answers) == COUNT + 2 and sum(kept) > 20  # two of the conversations have two turns
    assert (found["rounds"], found["accepted"]) == (len(kept), sum(kept))
    assert found["drafted"] == sum(answer.drafted for answer in answers)
    assert found["tau"] == pytest.approx(1 + sum(kept) / len(kept))
    assert found["accept_rate"] == pytest.approx(sum(kept) / found["drafted"])
    if kind != "llamacpp":
        assert found["per_position"] == pytest.approx([sum(k > i for k in kept) / len(kept) for i in range(K)])
    protocol = found["protocol"]
    assert (protocol["shape"], protocol["k"], protocol["prompts"], protocol["loaded_as"]) == ("chain", K, COUNT, kind)
    assert protocol["tokens"] == sum(len(answer.tokens) for answer in answers)
    assert found["speedup"] is None and found["lossless"] is None and found["not_checked"] == []


@pytest.mark.parametrize("kind", ["vllm", "sglang", "llamacpp"])
def test_beside_a_plain_server(serve, place, kind):
    url, _ = serve(kind)
    plain, _ = serve(kind, draft=None)
    found = ask(kind, url, place, plain_url=plain, k=K)
    assert found["lossless"] is True and found["same_texts"] == COUNT
    assert found["speedup"] == pytest.approx(found["tokens_per_s"]["speculative"] / found["tokens_per_s"]["plain"])
    assert "prompts of the training set (--draft)" in found["not_checked"]
    with pytest.raises(UsageError, match="without speculation"):
        ask(kind, url, place, plain_url=url, k=K)


def test_the_target_is_the_one_that_the_server_names(serve, place):
    for kind in ("vllm", "sglang"):
        assert ask(kind, serve(kind)[0], place, target=None)["rounds"] > 0
    with pytest.raises(UsageError, match="--target"):
        ask("llamacpp", serve("llamacpp")[0], place, target=None)


REFUSED = {
    "one request": ({}, {"limit": 1}, "fewer than 8"),
    "training prompts": ({}, {"prompts": "training.jsonl", "draft": "run/draft"}, "4 of 12 prompts.*training set"),
    "warm cache": ({"warm": 0.95}, {}, r"9\d% of the prompt tokens came from a warm prefix cache"),
    "ignored end": ({"ignore_eos": True}, {}, "ignore_eos"),
    "another K": ({}, {"k": K + 1}, "drafts 3 tokens a round, --k says 4"),
}


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
@pytest.mark.parametrize("case", REFUSED)
def test_misleading_set_ups_are_refused(serve, place, kind, case):
    server, options, match = REFUSED[case]
    options = {name: place / value if isinstance(value, str) else value for name, value in options.items()}
    with pytest.raises(UsageError, match=match):
        ask(kind, serve(kind, **server)[0], place, **options)


def test_raw_completions_are_refused(serve, place, pair, tmp_path):
    """Prompts go through the target's chat template; a target without one cannot be asked as it was trained."""
    pair.loaded.model.save_pretrained(tmp_path / "base")
    pair.loaded.tokenizer.save_pretrained(tmp_path / "base")
    (tmp_path / "base" / "chat_template.jinja").unlink()
    with pytest.raises(UsageError, match="chat"):
        ask("vllm", serve("vllm")[0], place, target=str(tmp_path / "base"))


def test_llama_server_does_not_tell_its_rounds(serve, place):
    with pytest.raises(UsageError, match=r"--k.*--metrics"):
        ask("llamacpp", serve("llamacpp")[0], place)


def test_other_clients_are_noticed(serve, place):
    with pytest.raises(UsageError, match="other clients"):
        ask("vllm", serve("vllm", others=50)[0], place)


@pytest.mark.parametrize("kind", ["vllm", "sglang", "llamacpp"])
@pytest.mark.parametrize("options", [{"draft": None}, {"silent": True}], ids=str)
def test_no_speculation_is_said(serve, place, kind, options):
    with pytest.raises(EyasError, match="none was drafted"):
        ask(kind, serve(kind, **options)[0], place)


def test_servers_that_fail(serve, place):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        nobody = f"http://127.0.0.1:{probe.getsockname()[1]}"
    with pytest.raises(EyasError, match=r"no answer.*running"):
        ask("vllm", nobody, place)
    with pytest.raises(EyasError, match=r"metrics: no answer.*running"):
        ask("vllm", serve("vllm", dies=True)[0], place)
    with pytest.raises(EyasError, match=r"503.*concurrency"):
        ask("vllm", serve("vllm", status=503)[0], place)
    with pytest.raises(EyasError, match=r"404.*--engine"):
        ask("sglang", serve("vllm")[0], place)
    with pytest.raises(UsageError, match="vllm, sglang or llamacpp"):
        ask("triton", nobody, place)


def test_the_command_prints_its_contract(serve, place):
    url, _ = serve("vllm")
    arguments = [
        "measure",
        "--engine",
        "vllm",
        "--url",
        url,
        "--prompts",
        place / "prompts.jsonl",
        "--max-new-tokens",
        6,
    ]
    result = CliRunner().invoke(cli.app, [*map(str, arguments), "--json"], catch_exceptions=False)
    found = json.loads(result.stdout)
    assert {"tau", "accept_rate", "per_position", "protocol", "speedup", "lossless"} <= set(found)
    said = CliRunner().invoke(cli.app, list(map(str, arguments)), catch_exceptions=False).stdout
    assert "tau" in said and "loaded as vllm" in said and "not checked" in said


def test_prometheus_text():
    text = (
        "# HELP a_total x\n# TYPE a_total counter\n"
        'a_total{engine="0",model_name="m {x}"} 3.0\na_total{engine="1",model_name="m"} 1e2\n'
        'b_total{engine="0",position="0"} 5.0\nb_total{position="1",engine="0"} 2\nplain 7\nbad{le="+Inf"} NaN\n'
    )
    found = read_metrics(text)
    assert {name: found[name] for name in ("a", "b[0]", "b[1]", "plain")} == {
        "a": 103,
        "b[0]": 5,
        "b[1]": 2,
        "plain": 7,
    }


@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=5), st.lists(st.integers(0, 1), max_size=3)),
        max_size=6,
    )
)
def test_own_reuse_is_what_prompts_share(requests):
    """Against all pairs."""

    def shared(a, b):
        return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))

    expected = 0
    for i, (prompt, ids) in enumerate(requests):
        most = max((shared(prompt + ids, p + d) for j, (p, d) in enumerate(requests) if j != i), default=0)
        expected += min(most, len(prompt))
    assert own_reuse(requests) == expected


@pytest.mark.engines
@pytest.mark.skipif(llamacpp.server() is None, reason="no .venv-llamacpp: run `python tools/engines.py llamacpp`")
def test_the_real_llama_server(smollm2, tmp_path):
    """The real server and the real target with a random draft: rounds, refusals and texts are those of our decoder."""
    from eyas.data.template import ChatTemplate
    from eyas.decode.chain import Chain
    from eyas.draft.config import draft_config_for
    from eyas.draft.model import Draft
    from eyas.target import load_target

    loaded = load_target(smollm2, "float32")
    template, known = ChatTemplate(loaded.tokenizer), loaded.target
    config = draft_config_for(known, known.vocab_size, intermediate_size=256)
    draft = Draft(config)
    draft.initialise(0)
    draft.embed_tokens.weight.data.copy_(loaded.embedding)
    draft.lm_head.weight.data.copy_(loaded.head)
    export(draft.state_dict(), config, known, tmp_path / "draft", provenance={}, dtype="float32")
    with llamacpp.Converter() as convert:
        assert convert(smollm2, tmp_path / "t.gguf") == ""
        assert convert(tmp_path / "draft", tmp_path / "d.gguf", smollm2) == ""
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts(8)))
    with llamacpp.serving(tmp_path / "t.gguf", tmp_path / "d.gguf", 2) as url:
        found = measure(
            "llamacpp", url, tmp_path / "prompts.jsonl", target=str(smollm2), k=2, max_new_tokens=8, concurrency=1
        )
    limits, rounds, tokens = Limits(8, 1024, frozenset(template.end_ids)), 0, 0
    documents, _ = prepare(prompts(8), template, limits, "", "error")
    torch.manual_seed(0)
    for document in documents:
        answers = converse(Decoder(loaded, draft.requires_grad_(False), Chain(2)), document, template, limits)
        for answer in answers:  # it does not draft for an answer's last token
            done = itertools.accumulate(answer.accepted, lambda n, kept: n + kept + 1, initial=1)
            rounds += sum(n < 7 for n, _ in zip(done, answer.accepted, strict=False))
        tokens += sum(len(answer.tokens) for answer in answers)
    assert (found["rounds"], found["protocol"]["tokens"]) == (rounds, tokens)
