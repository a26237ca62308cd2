"""The whole pipeline on a tiny target: from prompts to report, killed anywhere, and every kind of bad input."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from eyas import cli

ROOT = Path(__file__).parents[1]
ENV = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def recipe(folder: Path, tiny: Path, **changes) -> Path:
    """A recipe for 24 short conversations, some of several turns; `changes` replace whole sections or add keys."""
    lines = (ROOT / "examples" / "prompts.jsonl").read_text("utf-8").splitlines()
    prompts = folder / "prompts.jsonl"
    if not prompts.exists():
        rows = [line for line in lines if sum(map(len, json.loads(line)["turns"])) < 250]
        prompts.write_text("\n".join(rows[:24]) + "\n", "utf-8")
    value = {
        "target": str(tiny),
        "run": str(folder / "run"),
        "conversations": {"path": str(prompts), "heldout": 0.2},
        "generate": {"max_new_tokens": 24, "slots": 8},
        "extract": {"token_budget": 512},
        "vocab": {"size": 200},
        "train": {"steps": 3, "epochs": 2, "batch_tokens": 400, "save_every": 3},
        "replay": {"k": 3},
    }
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(value | changes), "utf-8")
    return path


def eyas(*arguments, **options) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "eyas", *map(str, arguments)],
        capture_output=True,
        text=True,
        env=ENV,
        timeout=300,
        **options,
    )


@pytest.fixture(scope="module")
def straight(tmp_path_factory, tiny_target) -> Path:
    """A finished, undisturbed run."""
    folder = tmp_path_factory.mktemp("straight")
    done = eyas("run", recipe(folder, tiny_target))
    assert done.returncode == 0, done.stderr
    return folder


def test_a_run_leaves_every_artifact(straight):
    run = straight / "run"
    for stage in ("conversations", "answers", "store", "vocab", "audit", "train", "draft", "check", "replay"):
        assert json.loads((run / stage / "manifest.json").read_text())["kind"] == stage
    replayed = json.loads((run / "replay" / "replay.json").read_text())
    assert 1 <= replayed["tau"] <= 4
    assert replayed["protocol"] | {"prompts": 0, "tokens": 0} == {
        "shape": "chain", "k": 3, "temperature": 0.0, "loaded_as": "own", "prompts": 0, "tokens": 0,
        "data": "held-out conversations",
    }  # fmt: skip
    assert json.loads((run / "audit" / "audit.json").read_text())["verdict"] == "go"
    assert json.loads((run / "audit" / "after.json").read_text())["verdict"] == "go"
    checked = json.loads((run / "check" / "check.json").read_text())
    assert {name: v["verdict"] != "error" for name, v in checked["verdicts"].items()} == dict.fromkeys(
        ("sglang", "vllm", "llamacpp", "openvino"), True
    )
    assert "</html>" in (run / "report.html").read_text()


def test_split_is_by_conversation_and_supervision_is_what_was_generated(straight):
    run = straight / "run"
    parts = json.loads((run / "conversations" / "split.json").read_text())
    assert not set(parts["train"]) & set(parts["heldout"])
    for line in (run / "answers" / "answers.jsonl").read_text().splitlines():
        document = json.loads(line)
        assert all(0 < start < end <= len(document["tokens"]) for start, end in document["spans"])
        assert sum(end - start for start, end in document["spans"]) <= 24 * len(document["spans"])


def test_a_finished_run_repeats_nothing(straight):
    before = {path: path.stat().st_mtime_ns for path in (straight / "run").rglob("manifest.json")}
    again = eyas("run", straight / "recipe.yaml")
    assert again.returncode == 0 and again.stderr.count("stands") == 9 and "done" not in again.stderr
    assert before == {path: path.stat().st_mtime_ns for path in (straight / "run").rglob("manifest.json")}
    loaded = eyas("run", straight / "recipe.yaml", "--json")
    assert json.loads(loaded.stdout)["stages"]["replay"]["tau"] >= 1


def test_nothing_to_do_needs_no_torch(straight):
    code = f"import sys; sys.argv = ['eyas', 'run', {str(straight / 'recipe.yaml')!r}]\n"
    code += "from eyas import cli\ntry: cli.main()\nexcept SystemExit as e: assert not e.code\nassert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], env=ENV, capture_output=True).returncode == 0


def test_killed_anywhere_it_ends_with_the_same_draft(straight, tmp_path, tiny_target):
    """SIGKILL at random instants, again and again, until a run gets through; and SIGINT, SIGTERM on the way."""
    path = recipe(tmp_path, tiny_target, conversations={"path": str(straight / "prompts.jsonl"), "heldout": 0.2})
    chance = random.Random(4)
    kinds = [signal.SIGKILL, signal.SIGKILL, signal.SIGINT, signal.SIGTERM, signal.SIGKILL]
    wait = 2.5
    for attempt in range(40):
        with open(tmp_path / "log", "ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "eyas", "run", str(path)], env=ENV, stderr=log, stdout=log
            )
        try:
            code = process.wait(timeout=wait + chance.uniform(0, 2) if attempt < 12 else 300)
        except subprocess.TimeoutExpired:
            process.send_signal(kinds[attempt % len(kinds)])
            code = process.wait(timeout=60)
            wait += 0.7
            assert "Traceback" not in (tmp_path / "log").read_text()
            continue
        assert code == 0, (tmp_path / "log").read_text()
        if (tmp_path / "run" / "report.html").exists():
            break
    else:
        raise AssertionError("never finished")
    assert attempt > 2, "it was never interrupted"
    for name in ("answers/answers.jsonl", "vocab/vocab.safetensors", "draft/model.safetensors", "draft/config.json"):
        mine, theirs = tmp_path / "run" / name, straight / "run" / name
        assert mine.read_bytes() == theirs.read_bytes(), name
    assert (tmp_path / "run/replay/replay.json").read_bytes() == (straight / "run/replay/replay.json").read_bytes()


def test_other_inputs_are_refused_until_told(straight, tmp_path):
    shutil.copytree(straight / "run", tmp_path / "run")
    value = yaml.safe_load((straight / "recipe.yaml").read_text()) | {
        "run": str(tmp_path / "run"),
        "vocab": {"size": 180},
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(value))
    refused = eyas("run", tmp_path / "recipe.yaml")
    assert refused.returncode == 2 and "recipe.vocab differ" in refused.stderr and "--redo vocab" in refused.stderr
    done = eyas("run", tmp_path / "recipe.yaml", "--redo", "vocab", "--until", "vocab")
    assert done.returncode == 0 and "answers: stands" in done.stderr and "vocab: done" in done.stderr
    assert not (tmp_path / "run" / "train").exists()


def test_no_go_stops_the_run_unless_accepted(straight, tmp_path):
    """A store whose manifest says other figures than its config allows is simulated by a map without EOS."""
    import numpy as np
    from safetensors.numpy import load_file, save_file

    shutil.copytree(straight / "run", tmp_path / "run")
    file = tmp_path / "run" / "vocab" / "vocab.safetensors"
    tensors = load_file(file)
    targets = tensors["d2t"] + np.arange(len(tensors["d2t"]))
    spare = next(i for i in range(len(tensors["t2d"])) if not tensors["t2d"][i])
    targets = np.sort(np.where(targets == 2, spare, targets))  # 2 is the end token
    tensors["d2t"], tensors["t2d"] = targets - np.arange(len(targets)), np.isin(np.arange(len(tensors["t2d"])), targets)
    save_file(tensors, file)
    value = yaml.safe_load((straight / "recipe.yaml").read_text()) | {"run": str(tmp_path / "run")}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(value))
    stopped = eyas("run", tmp_path / "recipe.yaml", "--redo", "audit")
    assert stopped.returncode == 1 and "NO-GO" in stopped.stderr and not (tmp_path / "run" / "train").exists()
    passed = eyas("run", tmp_path / "recipe.yaml", "--accept", "a trial", "--until", "audit")
    assert passed.returncode == 0, passed.stderr
    assert json.loads((tmp_path / "run" / "audit" / "audit.json").read_text())["accepted"] == "a trial"


# Bad input: one sentence, an exit code, nothing half-written.


def fails(capsys, monkeypatch, *arguments) -> tuple[int, str]:
    monkeypatch.setattr(sys, "argv", ["eyas", *map(str, arguments)])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    error = capsys.readouterr().err
    assert "Traceback" not in error
    lines = [line for line in error.splitlines() if line.startswith("eyas:")]
    assert len(lines) == 1, error
    return stop.value.code, lines[0]


def cases(tmp_path: Path, tiny: Path) -> dict[str, tuple[dict, int, str]]:
    plain = tmp_path / "no-template"
    shutil.copytree(tiny, plain)
    (plain / "chat_template.jinja").unlink()
    broken = tmp_path / "broken"
    shutil.copytree(tiny, broken)
    (broken / "config.json").write_text("{")
    words = tmp_path / "words.jsonl"
    words.write_text("this is no JSON\nnor this\n")
    long = tmp_path / "long.jsonl"
    rows = [{"id": f"r{i}", "category": "a", "turns": [f"word{i} " * (900 if i == 3 else 3)]} for i in range(9)]
    long.write_text("\n".join(map(json.dumps, rows)))
    return {
        "no target": ({"target": str(tmp_path / "absent")}, 2, "no such folder"),
        "no template": ({"target": str(plain)}, 2, "no chat template"),
        "broken config": ({"target": str(broken)}, 2, "not valid JSON"),
        "no JSONL": ({"conversations": {"path": str(words)}}, 2, "words.jsonl"),
        "no prompts": ({"conversations": {"path": str(tmp_path / "none.jsonl")}}, 2, "no such file"),
        "too long": ({"conversations": {"path": str(long), "heldout": 0.2}}, 2, "r3"),
        "unknown key": ({"trian": {}}, 2, "unknown key 'trian'"),
        "unknown inner key": ({"train": {"epoch": 3}}, 2, "train.epoch"),
        "wrong type": ({"train": {"epochs": "many"}}, 2, "train.epochs"),
        "no number": ({"vocab": {"size": "big"}}, 2, "vocab.size"),
        "layers": ({"extract": {"layers": [1, 99]}}, 2, "99"),
        "vocabulary": ({"vocab": {"size": 10_000}}, 2, "10,000"),
    }


@pytest.mark.parametrize("name", [
    "no target", "no template", "broken config", "no JSONL", "no prompts", "too long",
    "unknown key", "unknown inner key", "wrong type", "no number", "layers", "vocabulary",
])  # fmt: skip
def test_bad_input_is_one_sentence(name, tmp_path, tiny_target, capsys, monkeypatch):
    changes, code, words = cases(tmp_path, tiny_target)[name]
    found, sentence = fails(capsys, monkeypatch, "run", recipe(tmp_path, tiny_target, **changes))
    assert found == code and words in sentence
    assert not list(tmp_path.rglob("*.tmp"))


def test_a_full_disk_is_one_sentence_and_nothing_is_lost(tmp_path, tiny_target, capsys, monkeypatch):
    disk = tmp_path / "disk"
    disk.mkdir()
    if os.geteuid() or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1200k", "eyas", str(disk)]).returncode:
        pytest.skip("mounting a small tmpfs needs root")
    try:
        path = recipe(tmp_path, tiny_target, run=str(disk / "run"))
        code, sentence = fails(capsys, monkeypatch, "run", path)
        assert code == 1 and "disk is full" in sentence
        assert not list(disk.rglob("*.tmp"))
        subprocess.run(["mount", "-o", "remount,size=200m", str(disk)], check=True)
        done = eyas("run", path)
        assert done.returncode == 0 and "conversations: stands" in done.stderr, done.stderr
    finally:
        time.sleep(0.2)
        subprocess.run(["umount", "-l", str(disk)])


def test_missing_earlier_stage_is_named(tmp_path, tiny_target, capsys, monkeypatch):
    code, sentence = fails(capsys, monkeypatch, "train", recipe(tmp_path, tiny_target))
    assert code == 2 and "eyas extract" in sentence
    code, sentence = fails(capsys, monkeypatch, "run", tmp_path / "absent.yaml")
    assert code == 2 and "no such recipe" in sentence


def test_check_needs_no_torch(straight):
    code = f"import sys; sys.argv = ['eyas', 'check', {str(straight / 'run/draft')!r}, '--json']\n"
    code += "from eyas import cli\ntry: cli.main()\nexcept SystemExit as e: assert e.code == 0, e.code\nassert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], env=ENV, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["verdicts"].keys() == {"sglang", "vllm", "llamacpp", "openvino"}


def test_replay_command_gives_the_figures_of_the_run(straight):
    done = eyas("replay", straight / "run/draft", "--store", straight / "run/store", "--k", "3", "--json")
    assert done.returncode == 0, done.stderr
    found, stored = json.loads(done.stdout), json.loads((straight / "run/replay/replay.json").read_text())
    assert {k: stored[k] for k in found} == found


def test_init_writes_a_recipe_that_reads_back(tiny_target, tmp_path):
    out = tmp_path / "new.yaml"
    assert eyas("init", "--target", tiny_target, "--out", out).returncode == 0
    from eyas.recipe import read_recipe

    assert read_recipe(out).target == str(tiny_target)
    again = eyas("init", "--target", tiny_target, "--out", out)
    assert again.returncode == 2 and "exists already" in again.stderr
