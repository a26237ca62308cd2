"""Extraction against Transformers' own output_hidden_states, one conversation at a time; and under real kills."""

import json
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eyas.errors import EyasError, UsageError
from eyas.features import health
from eyas.features.codec import to_float
from eyas.features.extract import batches, compare, extract
from eyas.features.record import mask_of, teacher_positions
from eyas.features.store import Store
from eyas.target import LoadedTarget, load_target

LAYERS = [1, 4, 6]


def make_documents(count: int, vocabulary: int, seed: int = 0) -> list[dict]:
    chance = random.Random(seed)
    documents = []
    for number in range(count):
        length = chance.randint(12, 90)
        cut = chance.randint(3, length - 6)
        spans = [[cut, length]] if number % 3 else [[2, 5], [cut + 3, length]]
        tokens = [chance.randrange(vocabulary) for _ in range(length)]
        documents.append({"id": f"d{number:03d}", "category": "maths", "tokens": tokens, "spans": spans})
    return documents


@pytest.fixture(scope="module")
def target(tiny_target: Path) -> LoadedTarget:
    return load_target(tiny_target)


@pytest.fixture(scope="module")
def documents(target: LoadedTarget) -> list[dict]:
    return make_documents(24, target.target.vocab_size)


@pytest.fixture(scope="module")
def greedy(target: LoadedTarget) -> list[dict]:
    """Conversations that this target wrote itself, token by token without a cache."""
    chance, result = random.Random(5), []
    for number in range(6):
        tokens = [chance.randrange(300) for _ in range(6)]
        for _ in range(40):
            with torch.inference_mode():
                tokens.append(int(target.model(torch.tensor([tokens])).logits[0, -1].argmax()))
        result.append({"id": f"g{number}", "category": "", "tokens": tokens, "spans": [[6, 46]]})
    return result


def reference(target: LoadedTarget, document: dict) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The slow version: one conversation, all hidden states, all logits."""
    with torch.inference_mode():
        out = target.model(torch.tensor([document["tokens"]]), output_hidden_states=True)
    at = teacher_positions(mask_of(document["spans"], len(document["tokens"])))
    aux = torch.stack([out.hidden_states[layer + 1][0] for layer in LAYERS], 1)
    return aux, out.hidden_states[-1][0, at], out.logits[0, at].argmax(-1)


def close(bits: np.ndarray, wanted: torch.Tensor) -> bool:
    got, scale = to_float(bits), wanted.float().abs().max().item()
    return np.abs(got - wanted.float().numpy()).max() <= 0.01 * scale


@pytest.mark.parametrize("codec", ["bf16", "bf16z"])
def test_states_are_those_of_transformers(
    target: LoadedTarget, documents: list[dict], tmp_path: Path, codec: str
) -> None:
    figures = extract(documents, target, tmp_path, layers=LAYERS, codec=codec, token_budget=256, threshold=0)
    store = Store(tmp_path)
    assert store.ids == [document["id"] for document in documents]
    for document in documents:
        sample = store.read(document["id"])
        aux, final, argmax = reference(target, document)
        assert sample.tokens.tolist() == document["tokens"]
        assert np.array_equal(sample.supervised, mask_of(document["spans"], len(document["tokens"])))
        assert sample.aux.shape == aux.shape and close(sample.aux, aux)
        assert sample.final.shape == final.shape and close(sample.final, final)
        assert sample.argmax.tolist() == argmax.tolist()
    assert figures["tokens"] == sum(len(document["tokens"]) for document in documents)
    assert figures["supervised_tokens"] == sum(b - a for document in documents for a, b in document["spans"])
    assert health.verify(tmp_path, deep=True, threshold=0)["samples"] == 24


def test_padding_never_reaches_a_real_position(target: LoadedTarget, documents: list[dict], tmp_path: Path) -> None:
    """The same batch shape with other neighbours gives the same bits."""
    short, other = documents[0], [dict(d, id=f"x{d['id']}") for d in make_documents(8, 300, seed=9)]
    longest = max([short, *other], key=lambda d: len(d["tokens"]))
    longer = dict(longest, id="longer", tokens=(longest["tokens"] * 2)[:100], spans=[[90, 100]])
    changed = [dict(d, tokens=d["tokens"][::-1]) for d in [longer, *other]]
    for name, neighbours in (("a", [longer, *other]), ("b", changed)):
        extract([short, *neighbours], target, tmp_path / name, layers=LAYERS, token_budget=10_000, threshold=0)
    a, b = (Store(tmp_path / name).read(short["id"]) for name in "ab")
    assert np.array_equal(a.aux, b.aux) and np.array_equal(a.final, b.final)


@given(lengths=st.lists(st.integers(1, 500), max_size=60), budget=st.integers(1, 2000))
def test_batches_hold_every_document_once_within_the_budget(lengths: list[int], budget: int) -> None:
    made = batches(lengths, budget)
    assert sorted(i for batch in made for i in batch) == list(range(len(lengths)))
    assert all(len(batch) * max(lengths[i] for i in batch) <= budget or len(batch) == 1 for batch in made)


def test_a_partly_filled_store_ends_bit_for_bit_the_same(
    target: LoadedTarget, documents: list[dict], tmp_path: Path
) -> None:
    options = {"layers": LAYERS, "token_budget": 300, "threshold": 0}
    extract(documents, target, tmp_path / "whole", **options)
    import eyas.features.extract as module

    calls = 0
    original = module.check_finite

    def stop(sample: object) -> None:
        nonlocal calls
        calls += 1
        if calls == 9:
            raise KeyboardInterrupt
        original(sample)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "check_finite", stop)
        with pytest.raises(KeyboardInterrupt):
            extract(documents, target, tmp_path / "s", **options)
    assert 0 < len(Store(tmp_path / "s")) < 9 and not health.info(tmp_path / "s")["complete"]
    extract(documents, target, tmp_path / "s", **options)
    assert contents(tmp_path / "s") == contents(tmp_path / "whole")


def test_a_dropped_sample_comes_back_bit_for_bit(target: LoadedTarget, documents: list[dict], tmp_path: Path) -> None:
    """Its batch is computed again as a whole, and only the missing sample is appended."""
    options = {"layers": LAYERS, "token_budget": 300, "threshold": 0}
    extract(documents, target, tmp_path, **options)
    before, entry = contents(tmp_path), Store(tmp_path).entry("d007")
    shard = tmp_path / entry.shard
    data = bytearray(shard.read_bytes())
    data[entry.offset + entry.length - 9] ^= 1
    shard.write_bytes(data)
    assert [row["sample"] for row in health.repair(tmp_path)["dropped"]] == ["d007"]
    extract(documents, target, tmp_path, **options)
    assert contents(tmp_path) == before and health.info(tmp_path)["complete"]


def contents(path: Path) -> dict[str, tuple[str, str]]:
    store = Store(path)
    assert health.verify(path)["bad"] == []
    return {name: (entry.checksum, entry.text) for name, entry in store.entries.items()}


KILLED = """
import json, os, random, signal, sys, time
import torch
from eyas.features.extract import extract
from eyas.features.store import Store, StoreWriter
from eyas.target import load_target
torch.set_num_threads(1)
folder, path, rows = sys.argv[1:]
documents, target = json.load(open(rows)), load_target(folder)

def run(folder):
    extract(documents, target, folder, layers=[1, 4, 6], codec="bf16z", token_budget=128, threshold=0)

def child(folder):
    process = os.fork()
    if process == 0:
        sys.stderr = open(os.devnull, "w")
        try:
            run(folder)
        except BaseException as error:
            print("child failed:", error, flush=True)
            os._exit(1)
        os._exit(0)
    return process

start = time.monotonic()
os.waitpid(child(path + "-whole"), 0)
whole = time.monotonic() - start
chance, alive, kept = random.Random(0), 0, set()
for number in range(30):
    process = child(path)
    time.sleep(chance.random() * whole * 0.3)
    os.kill(process, signal.SIGKILL)
    alive += os.waitpid(process, 0)[1] == signal.SIGKILL
    if os.path.exists(path + "/store.json"):
        ids = set(Store(path).ids)
        assert kept <= ids, "committed samples were lost"
        kept = ids
assert os.waitstatus_to_exitcode(os.waitpid(child(path), 0)[1]) == 0
print(json.dumps({"alive": alive, "kept": len(kept)}))
"""


def test_sigkill_at_thirty_random_instants(tiny_target: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.json"
    rows.write_text(json.dumps(make_documents(120, 300, seed=2)))
    done = subprocess.run(
        [sys.executable, "-c", KILLED, tiny_target, tmp_path / "s", rows], capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr + done.stdout
    assert json.loads(done.stdout.splitlines()[-1])["alive"] >= 5, done.stdout
    assert contents(tmp_path / "s") == contents(tmp_path / "s-whole")
    assert len(contents(tmp_path / "s")) == 120 and health.info(tmp_path / "s")["complete"]


def test_the_self_check_is_one_on_greedy_answers(target: LoadedTarget, greedy: list[dict], tmp_path: Path) -> None:
    figures = extract(greedy, target, tmp_path, layers=LAYERS)
    assert figures["self_check"] == figures["self_check_min"] == 1.0 and figures["complete"]
    assert health.verify(tmp_path, deep=True)["bad"] == []


def test_the_self_check_fails_on_swapped_answers(target: LoadedTarget, greedy: list[dict], tmp_path: Path) -> None:
    swapped = [
        dict(d, tokens=d["tokens"][:6] + other["tokens"][6:][::-1])
        for d, other in zip(greedy, greedy[1:] + greedy[:1], strict=True)
    ]
    with pytest.raises(EyasError, match=r"Self-check failed.*Likely causes.*final norm"):
        extract(swapped, target, tmp_path, layers=LAYERS)
    assert not health.info(tmp_path)["complete"]


def test_the_self_check_sees_a_missing_norm(tiny_target: Path, greedy: list[dict], tmp_path: Path) -> None:
    broken = load_target(tiny_target)
    with torch.no_grad():  # as if the norm had been skipped for one part of the channels
        broken.body.norm.weight[::2] = 0
    with pytest.raises(EyasError, match="Self-check failed"):
        extract(greedy, broken, tmp_path, layers=LAYERS)


def test_a_fresh_look_at_the_target_agrees_or_names_the_layer(
    target: LoadedTarget, documents: list[dict], tmp_path: Path
) -> None:
    extract(documents, target, tmp_path / "s", layers=LAYERS, threshold=0)
    assert compare(tmp_path / "s", target, samples=5) == {
        "samples": 5,
        "ok": 5,
        "bad": [],
        "worst": pytest.approx(0, abs=0.02),
    }
    # a store that says out(1), out(4), out(6) and holds out(2), out(4), out(6)
    extract(documents, target, tmp_path / "wrong", layers=[2, 4, 6], threshold=0)
    from eyas.features.index import read_description, write_description
    from eyas.features.place import Place

    place = Place(tmp_path / "wrong")
    write_description(place, {**read_description(place), "layers": LAYERS})
    found = compare(tmp_path / "wrong", target, samples=3)
    assert found["ok"] == 0 and all(
        "state 1 differs" in row["reason"] and "it is out(2)" in row["reason"] for row in found["bad"]
    )


def test_another_target_layers_or_answers_are_refused(
    target: LoadedTarget, tiny_target: Path, documents: list[dict], tmp_path: Path
) -> None:
    extract(documents[:3], target, tmp_path, layers=LAYERS, threshold=0)
    with pytest.raises(UsageError, match="layers"):
        extract(documents[:3], target, tmp_path, layers=[1, 4, 7], threshold=0)
    with pytest.raises(UsageError, match="dtype"):
        extract(documents[:3], load_target(tiny_target, dtype="bfloat16"), tmp_path, layers=LAYERS, threshold=0)
    changed = [dict(documents[0], tokens=documents[0]["tokens"][::-1])]
    with pytest.raises(UsageError, match="another conversation under the id 'd000'"):
        extract(changed, target, tmp_path, layers=LAYERS, threshold=0)
    assert len(Store(tmp_path)) == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": [1, 300]}, "outside the vocabulary of 300"),
        ({"tokens": []}, "not empty"),
        ({"tokens": [0] * 1025}, "context holds 1024"),
        ({"spans": [[3, 5], [5, 8]]}, "none touching"),
        ({"spans": [[5, 3]]}, "ascending"),
        ({"spans": [[1, 99]]}, "within"),
        ({"spans": "x"}, "expected a row"),
        ({"id": 7}, "must be a string"),
        ({"id": "d001"}, "occurs twice"),
    ],
)
def test_documents_that_do_not_fit_are_named(
    target: LoadedTarget, documents: list[dict], tmp_path: Path, change: dict, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        extract(
            [documents[1], {**documents[0], "tokens": [1] * 12, "spans": [[3, 9]], **change}],
            target,
            tmp_path / "s",
            layers=LAYERS,
        )
    assert not (tmp_path / "s").exists()


def test_states_that_overflow_are_refused(tiny_target: Path, documents: list[dict], tmp_path: Path) -> None:
    broken = load_target(tiny_target)
    with torch.no_grad():
        broken.body.layers[4].mlp.down_proj.weight[:] = 1e38
    with pytest.raises(EyasError, match="infinities or NaN"):
        extract(documents[:2], broken, tmp_path, layers=LAYERS, threshold=0)


@pytest.mark.target
def test_the_real_target_agrees_with_itself(smollm2: Path, tmp_path: Path) -> None:
    """A greedy answer of the real SmolLM2: self-check close to 1, lossless codec within its promised size."""
    target = load_target(smollm2)
    assert target.tokenizer is not None
    text = target.tokenizer.apply_chat_template(
        [{"role": "user", "content": "Tell me about the sea."}], add_generation_prompt=True, tokenize=False
    )
    prompt = target.tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
    with torch.inference_mode():
        tokens = target.model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=32, do_sample=False
        )[0].tolist()
    rows = [{"id": "sea", "category": "", "tokens": tokens, "spans": [[prompt.shape[1], len(tokens)]]}]
    figures = {codec: extract(rows, target, tmp_path / codec, codec=codec) for codec in ("bf16", "bf16z")}
    assert figures["bf16z"]["self_check"] >= 0.9
    assert figures["bf16z"]["bytes"] <= 0.72 * figures["bf16"]["bytes"]
    a, b = (Store(tmp_path / codec).read("sea") for codec in ("bf16", "bf16z"))
    assert np.array_equal(a.aux, b.aux) and np.array_equal(a.final, b.final)
    assert compare(tmp_path / "bf16z", target)["ok"] == 1
