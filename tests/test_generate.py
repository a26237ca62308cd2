"""Generation in slots against Transformers' own `generate`, one prompt at a time, and against killed processes."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

from eyas.data import slots as slots_module
from eyas.data.generate import Document, Journal, Sampling, _choose, generate
from eyas.data.slots import Slots, opened
from eyas.data.template import ChatTemplate
from eyas.errors import UsageError
from eyas.target import LoadedTarget, load_target

TURNS = [
    ["Name three rivers."],
    ["What is 12 times 12?", "And half of that?", "Write it as a word."],
    ["Translate 'good morning' into French, please, and say how it is pronounced by most speakers."],
    ["Tell me about owls. " * 8, "Shorter."],
    ["Hi"],
    ["List the colours of the rainbow in order.", "Backwards?"],
    ["Why is the sky blue? Answer as a pirate would, with many a nautical word and no science at all."],
]
TALKS = [{"id": f"talk-{i}", "category": "test", "system": None, "turns": turns} for i, turns in enumerate(TURNS)]

COMMON = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2)
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [4.0] * 8, "rope_theta": 10000.0}
HEADS = dict(head_dim=16, max_position_embeddings=2048, initializer_range=0.15)
FAMILIES = {
    "llama": ("Llama", {}),
    "qwen3": ("Qwen3", {}),
    "mistral with a sliding window": ("Mistral", {"sliding_window": 24}),
    "gemma2": ("Gemma2", {"sliding_window": 24, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 2.0}),
    "gemma3": ("Gemma3Text", {"sliding_window": 24, "query_pre_attn_scalar": 16, "_sliding_window_pattern": 2}),
    "gpt-oss": ("GptOss", {"sliding_window": 24, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "deepseek": (
        "DeepseekV3",
        {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 12}
        | {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
        | {"num_key_value_heads": 4, "head_dim": 8},
    ),
    "phi3 with longrope": (
        "Phi3",
        {"rope_parameters": LONGROPE | {"partial_rotary_factor": 1.0}, "original_max_position_embeddings": 256},
    ),
    "qwen3-next": (
        "Qwen3Next",
        {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16}
        | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "num_hidden_layers": 4}
        | {"shared_expert_intermediate_size": 32},
    ),
}


def make_target(folder: Path, tokenizer_of: Path, family: str) -> LoadedTarget:
    """A tiny random model of a real Transformers class in float32, saved and loaded as a user's would be."""
    name, options = FAMILIES[family]
    tokenizer = transformers.AutoTokenizer.from_pretrained(tokenizer_of)
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": 1}
    config = getattr(transformers, f"{name}Config")(vocab_size=len(tokenizer), **(COMMON | HEADS | ids | options))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for parameter in model.parameters():  # biases, sinks and norms that begin at a constant count, too
            if parameter.dim() == 1:
                parameter.data += 0.3 * torch.randn_like(parameter)
    model.get_output_embeddings().weight.data[tokenizer.eos_token_id] *= 2  # some answers end, others are cut off
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return load_target(folder)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors are small here: more threads would only wait for one another."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def assert_plainly_generated(target: LoadedTarget, documents: list[dict], max_new_tokens: int) -> None:
    """Every span is what `model.generate` writes after the tokens before it."""
    end_ids = ChatTemplate(target.tokenizer).end_ids
    for document in documents:
        for (start, end), finish in zip(document["spans"], document["finish"], strict=True):
            prompt = torch.tensor([document["tokens"][:start]])
            plain = target.model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                do_sample=False,
                max_new_tokens=max_new_tokens,
                eos_token_id=sorted(end_ids),
                pad_token_id=0,
            )[0, start:].tolist()
            assert document["tokens"][start:end] == plain, document["id"]
            assert finish == ("stop" if plain[-1] in end_ids else "length")


@pytest.mark.parametrize("family", [family for family in FAMILIES if "longrope" not in family])
def test_answers_are_those_of_plain_generate(family: str, tiny_target: Path, tmp_path: Path) -> None:
    target = make_target(tmp_path / "target", tiny_target, family)
    before = target.body.config._attn_implementation
    figures = generate(TALKS, target, tmp_path / "answers.jsonl", max_new_tokens=20, slots=3)
    assert figures["engine"] == ("OneByOne" if family == "qwen3-next" else "Slots"), figures["engine_reason"]
    assert target.body.config._attn_implementation == before
    documents = read(tmp_path / "answers.jsonl")
    assert [document["id"] for document in documents] == [talk["id"] for talk in TALKS]
    assert_plainly_generated(target, documents, 20)
    assert figures["documents"] == len(TALKS)
    assert figures["turns"] == sum(len(document["spans"]) for document in documents)
    assert sum(figures["finish"].values()) == figures["turns"] and figures["finish"]["length"]
    assert figures["finish"]["stop"] or family.startswith("gemma")
    generated = sum(end - start for document in documents for start, end in document["spans"])
    assert figures["generated_tokens"] == generated
    assert figures["prompt_tokens"] + generated == sum(len(document["tokens"]) for document in documents)
    if figures["engine"] == "Slots":
        assert figures["cut"] == 0 and figures["turns"] == sum(map(len, TURNS))


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_one_plain_forward(family: str, tiny_target: Path, tmp_path: Path) -> None:
    """Read in two pieces and continued beyond every sliding window, among documents of other lengths."""
    target = make_target(tmp_path / "target", tiny_target, family)
    ids = torch.randint(3, target.target.vocab_size, (90,), generator=torch.Generator().manual_seed(1)).tolist()
    with torch.inference_mode():
        wanted = target.model(torch.tensor([ids])).logits[0]
    with opened(target, 3, 256) as ([engine], _):
        last = engine.count - 1
        given = {29: engine.read(last, ids[:30], 0), 69: engine.read(last, ids[30:70], 30)}
        if last:
            engine.read(0, ids[:80], 0)
        for i in range(70, 90):
            neighbour = {0: (5, 10 + i)} if last else {}
            both = {last: (ids[i], i)} | neighbour
            tokens, past = ({slot: pair[k] for slot, pair in both.items()} for k in (0, 1))
            given[i] = engine.step(tokens, past)[last].clone()
    for position, logits in given.items():
        torch.testing.assert_close(logits, wanted[position], atol=2e-4, rtol=2e-4)


def test_the_real_target_in_float32(smollm2: Path, tmp_path: Path) -> None:
    target = load_target(smollm2, dtype="float32")
    generate(TALKS[:2], target, tmp_path / "answers.jsonl", max_new_tokens=10, slots=2)
    documents = read(tmp_path / "answers.jsonl")
    assert len(documents[1]["spans"]) == 3
    assert_plainly_generated(target, documents, 10)


def test_what_lies_between_spans_is_the_template(smollm2: Path, tmp_path: Path) -> None:
    """A finished document, decoded, is the template's own rendering; only a cut-off answer lacks what follows it."""
    target = load_target(smollm2)
    generate(TALKS[4:6], target, tmp_path / "answers.jsonl", max_new_tokens=12, slots=2)
    template = ChatTemplate(target.tokenizer)
    for document in read(tmp_path / "answers.jsonl"):
        text = target.tokenizer.decode(document["tokens"])
        rendered = template.render(document["messages"], generation_prompt=False)
        assert rendered.startswith(text) and len(rendered) - len(text) <= len("<|im_end|>\n")
        for (start, end), finish in zip(document["spans"], document["finish"], strict=True):
            ends = [token in template.end_ids for token in document["tokens"][start:end]]
            assert sum(ends) == (finish == "stop") and (finish == "length" or ends[-1])


def test_neighbours_do_not_show_in_a_single_bit(smollm2: Path) -> None:
    """bf16 logits of one document: alone, and in another slot among long and short neighbours that come and go."""
    target = load_target(smollm2)
    template = ChatTemplate(target.tokenizer)
    prompts = [template.prompt_ids([{"role": "user", "content": turns[0]}]) for turns in TURNS]
    long = (prompts[3] * 9)[:520]  # grows the cache on the way, too
    with opened(target, 10, 2048) as ([engine], reason):
        assert isinstance(engine, Slots), reason
        alone, ids = [engine.read(0, prompts[0], 0)], list(prompts[0])
        for _ in range(6):
            ids.append(int(alone[-1].argmax()))
            alone.append(engine.step({0: ids[-1]}, {0: len(ids) - 1})[0].clone())
    with opened(target, 10, 2048) as ([engine], _):
        engine.read(2, long, 0)
        engine.read(9, prompts[1], 0)
        among = [engine.read(7, ids[: len(prompts[0])], 0)]
        past = {2: len(long), 9: len(prompts[1]), 7: len(prompts[0])}
        for step in range(6):
            if step == 3:
                engine.read(4, prompts[2], 0)
                past[4] = len(prompts[2])
            if step == 4:
                del past[2]
            tokens = {slot: ids[past[7]] if slot == 7 else 300 + step for slot in past}
            among.append(engine.step(tokens, past)[7].clone())
            past = {slot: length + 1 for slot, length in past.items()}
    for first, second in zip(alone, among, strict=True):
        assert torch.equal(first, second)


def test_order_and_number_of_conversations_and_threads_do_not_matter(
    tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = load_target(tiny_target, dtype="bfloat16")
    options = {"max_new_tokens": 12, "slots": 4}
    monkeypatch.setattr("eyas.data.generate._workers", lambda _: 3)
    generate(TALKS, target, tmp_path / "all", **options)
    generate(TALKS[::-1], target, tmp_path / "reversed", **options)
    assert read(tmp_path / "reversed") == read(tmp_path / "all")[::-1]
    monkeypatch.undo()
    for i, talk in enumerate(TALKS[:4]):
        generate([talk], target, tmp_path / "alone", **options)
        assert read(tmp_path / "alone") == [read(tmp_path / "all")[i]]


def test_long_prompts_are_read_in_pieces(tiny_target: Path, tmp_path: Path) -> None:
    target = make_target(tmp_path / "target", tiny_target, "mistral with a sliding window")
    talk = {"id": "long", "turns": ["one two three four five six seven. " * 36, "And?"]}
    generate([talk, *TALKS[:2]], target, tmp_path / "answers", max_new_tokens=20, slots=2)
    documents = read(tmp_path / "answers")
    assert documents[0]["spans"][0][0] > slots_module.READ and len(documents[0]["spans"]) == 2
    assert_plainly_generated(target, documents, 20)


def test_a_document_ends_at_its_limit(tiny_target: Path, tmp_path: Path) -> None:
    target = load_target(tiny_target, dtype="float32")
    generate(TALKS, target, tmp_path / "free", max_new_tokens=16, slots=4)
    free = {document["id"]: document["tokens"] for document in read(tmp_path / "free")}
    limit = max(document["spans"][0][0] for document in read(tmp_path / "free")) + 1
    figures = generate(TALKS, target, tmp_path / "limited", max_new_tokens=16, slots=4, max_length=limit)
    documents = read(tmp_path / "limited")
    assert max(len(document["tokens"]) for document in documents) == limit
    for document in documents:
        assert document["tokens"] == free[document["id"]][: len(document["tokens"])]
        assert document["messages"][-1]["role"] == "assistant"
    assert figures["cut"] == sum(map(len, TURNS)) - figures["turns"] > 0

    with pytest.raises(UsageError, match=rf"'talk-\d'.*{limit - 1:,} tokens long.*within {limit - 1:,} tokens"):
        generate(TALKS, target, tmp_path / "refused", slots=4, max_length=limit - 1)
    assert not (tmp_path / "refused").exists()
    figures = generate(
        TALKS, target, tmp_path / "skipped", slots=4, max_new_tokens=4, max_length=limit - 1, on_long="skip"
    )
    assert figures["skipped"] == len(TALKS) - figures["documents"] >= 1


def test_bad_input_is_one_sentence(tiny_target: Path, tmp_path: Path) -> None:
    target = load_target(tiny_target)
    with pytest.raises(UsageError, match="'a' is given twice"):
        generate([{"id": "a", "turns": ["x"]}, {"id": "a", "turns": ["y"]}], target, tmp_path / "out")
    with pytest.raises(UsageError, match="'a' has no user turn"):
        generate([{"id": "a", "turns": []}], target, tmp_path / "out")
    for bad in ({"slots": 0}, {"max_new_tokens": 0}, {"temperature": -1.0}, {"on_long": "drop"}):
        with pytest.raises(UsageError, match="Expected at least 1"):
            generate(TALKS, target, tmp_path / "out", **bad)
    assert list(tmp_path.iterdir()) == []


def test_a_rotary_embedding_that_changes_with_the_length_is_refused_beyond_it(
    tiny_target: Path, tmp_path: Path
) -> None:
    target = make_target(tmp_path / "target", tiny_target, "phi3 with longrope")
    with pytest.raises(UsageError, match=r"changes beyond 256 tokens .*longrope.*Set max_length to at most 256"):
        generate(TALKS, target, tmp_path / "answers", slots=2)
    generate(TALKS[:1], target, tmp_path / "answers", slots=2, max_length=256, max_new_tokens=10)
    assert_plainly_generated(target, read(tmp_path / "answers"), 10)


def test_sampling_is_repeatable_and_each_by_itself(tiny_target: Path, tmp_path: Path) -> None:
    target = load_target(tiny_target, dtype="float32")
    options = {"max_new_tokens": 16, "slots": 3, "temperature": 1.0}
    generate(TALKS, target, tmp_path / "a", seed=1, **options)
    generate(TALKS[::-1], target, tmp_path / "b", seed=1, **options)
    generate(TALKS, target, tmp_path / "c", seed=2, **options)
    assert read(tmp_path / "b") == read(tmp_path / "a")[::-1]
    assert read(tmp_path / "c") != read(tmp_path / "a")


def test_draws_follow_the_distribution() -> None:
    logits, temperature, draws = torch.tensor([0.0, 1.0, -1.0, 2.0, float("-inf")]), 0.7, 6000
    rows = [Document({"id": f"{i}"}, "", [], [1] * (i % 7)) for i in range(draws)]
    counts = Counter(_choose(logits.expand(draws, -1), rows, Sampling(temperature, 5)))
    shares = torch.tensor([counts[i] / draws for i in range(5)])
    assert counts[4] == 0
    torch.testing.assert_close(shares, (logits / temperature).softmax(-1), atol=0.02, rtol=0)


@given(st.data())
def test_shared_heads_are_the_same_folded_and_repeated(data: st.DataObject) -> None:
    share, length, view = (data.draw(st.integers(1, n)) for n in (4, 5, 40))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    query = torch.randn(2, 2 * share, length, 8, generator=generator)
    key, value = torch.randn(2, 2, view, 8, generator=generator), torch.randn(2, 2, view, 6, generator=generator)
    mask = torch.zeros(2, 1, length, view).masked_fill(
        torch.rand(2, 1, length, view, generator=generator) < 0.4, float("-inf")
    )
    mask[..., 0] = 0
    repeated_key, repeated_value = key.repeat_interleave(share, 1), value.repeat_interleave(share, 1)
    wanted = (query @ repeated_key.transpose(2, 3) * 0.3 + mask).softmax(-1) @ repeated_value
    arguments = (query, key, value, mask, 0.3)
    torch.testing.assert_close(slots_module._attend_folded(*arguments), wanted)
    torch.testing.assert_close(slots_module._attend_plainly(*arguments, None, None), wanted)


# the journal

CHILD = """
import json, sys
from eyas.data.generate import generate
from eyas.target import load_target
target, talks, out = sys.argv[1:]
generate(json.load(open(talks)), load_target(target), out, max_new_tokens=24, slots=4)
"""


def test_killed_and_resumed_gives_the_same_file(tiny_target: Path, tmp_path: Path) -> None:
    talks = [
        talk | {"id": f"{talk['id']}-{i}", "turns": [f"{i}: {talk['turns'][0]}"]} for i in range(12) for talk in TALKS
    ]
    (tmp_path / "talks.json").write_text(json.dumps(talks))
    out, part = tmp_path / "answers.jsonl", tmp_path / "answers.jsonl.part"
    command = [sys.executable, "-c", CHILD, str(tiny_target), str(tmp_path / "talks.json"), str(out)]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, env=os.environ | {"OMP_NUM_THREADS": "1"})
    try:
        until = time.monotonic() + 120
        while not (part.exists() and part.stat().st_size) and process.poll() is None and time.monotonic() < until:
            time.sleep(0.002)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert process.returncode == -signal.SIGKILL and not out.exists()
    finished = part.read_bytes().count(b"\n")
    assert 0 < finished < len(talks)

    target = load_target(tiny_target)
    figures = generate(talks, target, out, max_new_tokens=24, slots=4)
    assert figures["resumed"] == finished and figures["documents"] == len(talks)
    assert not part.exists()
    generate(talks, target, tmp_path / "undisturbed.jsonl", max_new_tokens=24, slots=4)
    assert out.read_bytes() == (tmp_path / "undisturbed.jsonl").read_bytes()


def test_answers_under_other_settings_are_not_taken(tiny_target: Path, tmp_path: Path) -> None:
    target, out, part = load_target(tiny_target), tmp_path / "answers", tmp_path / "answers.part"
    generate(TALKS, target, out, max_new_tokens=5, slots=2)
    first = read(out)

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Journal, "finish", stop)
        generate(TALKS, target, out, max_new_tokens=5, slots=2)
    kept = part.read_bytes()
    assert kept.count(b"\n") == len(TALKS)
    changed = [TALKS[0] | {"turns": ["Something else"]}, *TALKS[1:]]
    assert generate(changed, target, out, max_new_tokens=5, slots=2)["resumed"] == len(TALKS) - 1
    assert read(out)[0] != first[0] and read(out)[1:] == first[1:]
    part.write_bytes(kept)
    assert generate(TALKS, target, out, max_new_tokens=6, slots=2)["resumed"] == 0


LINES = [f'key{i} {{"id": "é{i}", "tokens": [{i}]}}\n'.encode() for i in range(5)]


@given(st.integers(0, sum(map(len, LINES))))
def test_a_torn_line_is_dropped(tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
    out = tmp_path_factory.mktemp("journal") / "answers"
    out.with_name("answers.part").write_bytes(b"".join(LINES)[:cut])
    whole = b"".join(LINES)[:cut].count(b"\n")
    with Journal(out, {f"key{i}" for i in range(5)}) as journal:
        assert list(journal.lines) == [f"key{i}" for i in range(whole)]
        journal.add(Document({"id": "new"}, "key9", [], [7]))
    lines = out.with_name("answers.part").read_bytes().splitlines(keepends=True)
    assert lines[:-1] == LINES[:whole] and json.loads(lines[-1].partition(b" ")[2])["tokens"] == [7]


def test_a_failure_in_a_worker_is_raised_and_keeps_what_is_finished(tiny_target: Path, tmp_path: Path) -> None:
    target, out = load_target(tiny_target), tmp_path / "answers"

    class Failing(ChatTemplate):
        def next_turn_ids(self, *_: object) -> list[int] | None:
            raise RuntimeError("out of order")

    talks = [*TALKS[:1], *TALKS[2:3], TALKS[1] | {"turns": ["x" * 700, "y"]}]
    with pytest.raises(RuntimeError, match="out of order"):
        generate(talks, target, out, max_new_tokens=8, slots=1, template=Failing(target.tokenizer))
    assert not out.exists() and (tmp_path / "answers.part").exists()
    assert target.body.config._attn_implementation != slots_module.NAME
