"""Verbs and recipe keys that reach the rooms behind them, through real processes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from serving_parts import DRAFT_VOCAB, make_state, make_target
from typer.testing import CliRunner

from eyas import cli


def eyas(*arguments: object, cwd: Path) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "eyas", *map(str, arguments)], cwd=cwd, capture_output=True, text=True, timeout=300
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory, tiny_target) -> Path:
    """A run whose answers were kept, not generated, up to its vocabulary."""
    folder = tmp_path_factory.mktemp("kept")
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"What is {i} plus {i}?"},
                {"role": "assistant", "content": f"{i} plus {i} is {2 * i}, of course."},
                {"role": "user", "content": "And one more?"},
                {"role": "assistant", "content": f"That makes {2 * i + 1}."},
            ]
        }
        for i in range(30)
    ]
    (folder / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = {
        "target": str(tiny_target),
        "run": "run",
        "conversations": {"path": "chats.jsonl", "heldout": 0.2},
        "generate": {"answers": "keep"},
        "extract": {"self_check": 0.0},
        "vocab": {"size": 200},
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    done = eyas("run", "recipe.yaml", "--until", "vocab", cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder


def test_kept_answers_are_supervised_word_for_word(run, tiny_target):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_target)
    for line in (run / "run/answers/answers.jsonl").read_text().splitlines():
        row = json.loads(line)
        said = [m["content"] for m in row["messages"] if m["role"] == "assistant"]
        texts = [tokenizer.decode(row["tokens"][start:end]) for start, end in row["spans"]]
        assert texts == [text + "<|im_end|>" for text in said]


def test_verify_against_the_target_and_against_the_answers(run, tiny_target):
    found = eyas(
        "store",
        "verify",
        "run/store",
        "--against",
        tiny_target,
        "--documents",
        "run/answers/answers.jsonl",
        "--json",
        cwd=run,
    )
    report = json.loads(found.stdout)
    assert found.returncode == 0 and report["bad"] == [] and report["against"]["samples"] == 8


def test_verify_against_another_target_fails(run, tmp_path):
    from conftest import save_tiny_target

    found = eyas(
        "store", "verify", "run/store", "--against", save_tiny_target(tmp_path / "other", seed=1), "--json", cwd=run
    )
    assert found.returncode == 1 and json.loads(found.stdout)["against"]["ok"] == 0


def test_import_brings_a_foreign_folder_in(run, tiny_target, tmp_path):
    import numpy as np
    import torch
    from safetensors.torch import save_file

    from eyas.features.store import Store
    from eyas.target import load_target

    store, target, written = Store(run / "run/store"), load_target(tiny_target), {}
    for number in range(5):
        sample = store.read(number)
        with target.capturing(store.meta["layers"]) as caught, torch.inference_mode():
            target.body(input_ids=torch.from_numpy(sample.tokens.astype(np.int64))[None])
        states = torch.stack([caught[key][0] for key in [*store.meta["layers"], "final"]], 1).bfloat16()
        written[sample.id] = states[:, :-1].contiguous().view(torch.int16).numpy().view(np.uint16)
        save_file(
            {"hidden_states": states, "token_ids": torch.from_numpy(sample.tokens.astype(np.int64))},
            tmp_path / f"hs_{number}.safetensors",
        )
    layers = ",".join(map(str, store.meta["layers"]))
    arguments = ["--target", tiny_target, "--documents", "run/answers/answers.jsonl", "--threshold", "0"]
    found = eyas("store", "import", tmp_path, tmp_path / "in", "--layers", layers, *arguments, "--json", cwd=run)
    assert found.returncode == 0, found.stdout + found.stderr
    imported = Store(tmp_path / "in")
    for number in range(5):
        sample = store.read(number)
        assert np.array_equal(imported.read(sample.id).aux, written[sample.id])
        assert np.array_equal(imported.read(sample.id).supervised, sample.supervised)


def test_layers_that_are_no_numbers_are_refused(run, tiny_target):
    found = eyas("store", "import", "run", "in", "--target", tiny_target, "--layers", "a,b", cwd=run)
    assert found.returncode == 2 and "expected numbers" in found.stderr


def test_preview_of_answers_and_of_their_store(run, monkeypatch):
    monkeypatch.chdir(run)
    shown = []
    for source in ("recipe.yaml", "run/store"):
        asked = CliRunner().invoke(cli.app, ["preview", source, "--rows", "30", "--json"])
        assert asked.exit_code == 0, asked.stderr
        shown.append({d["id"]: d["runs"] for d in json.loads(asked.stdout)["documents"]})
    assert shown[0] == shown[1]
    said = ["".join(r["text"] for r in runs if r["supervised"]) for runs in shown[0].values()]
    assert all("of course." in text and "That makes" in text and "plus" in text for text in said)


def test_export_writes_any_draft_in_another_form(tmp_path):
    from eyas.draft.config import draft_config_for
    from eyas.serving.export import export, load_draft

    target = make_target(tmp_path / "target")
    config = draft_config_for(target, DRAFT_VOCAB)
    state = make_state(config, target)
    source = export(state, config, target, tmp_path / "draft", provenance={})
    for layout in ("speculators", "eagle", "portable"):
        options = ["--target", target.path, "--layout", layout, "--dtype", "bfloat16", "--shard-gb", "0.001", "--json"]
        done = CliRunner().invoke(cli.app, ["export", str(source), "--out", str(tmp_path / layout), *map(str, options)])
        assert done.exit_code == 0, done.stderr
        assert json.loads(done.stdout)["layout"] == layout
        back = load_draft(tmp_path / layout, target)
        assert back[0] == config and all(torch.equal(back[1][name], state[name]) for name in state)


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["export", "nowhere"], ["no such recipe"]),
        (["export", "."], ["--out"]),
        (["export", ".", "--out", "new"], ["--target"]),
        (["export", ".", "--out", "."], ["exists already"]),
        (["export", ".", "--out", "new", "--target", "t"], ["no draft", "config.json"]),
        (["replay", ".", "--store", ".", "--k", "2", "--tree", "8,3,2"], ["not both"]),
        (["decode", ".", "--target", "t", "--prompts", "p", "--run", "."], ["no run folder"]),
    ],
    ids=lambda a: " ".join(a[:2]),
)
def test_wrong_use_is_one_sentence(tmp_path, arguments, words):
    done = eyas(*arguments, cwd=tmp_path)
    assert done.returncode == 2 and all(word in done.stderr for word in words), done.stderr
    assert "Traceback" not in done.stderr and done.stderr.count("\n") == 1
