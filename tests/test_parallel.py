"""Several ranks train as one: the same curve to rounding, the same bits after a kill, and on with another number of ranks."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from eyas.train import checkpoint
from eyas.train.parallel import share


@given(st.lists(st.integers(1, 99), min_size=1, max_size=30), st.integers(1, 6), st.randoms())
def test_ranks_share_a_batch_without_loss_or_repeat(lengths, size, random):
    documents = list(range(len(lengths)))
    random.shuffle(documents)
    parts = [share(documents, lengths, rank, size) for rank in range(size)]
    assert sorted(d for part in parts for d in part) == list(range(len(lengths)))
    assert all(sorted(part, key=documents.index) == part for part in parts)
    rows = [sum(lengths[d] for d in part) for part in parts]
    assert max(rows) - min(rows) <= max(lengths)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory, tiny_target) -> Path:
    """A folder with recipe.yaml and a run that stands before its training."""
    folder = tmp_path_factory.mktemp("ranks")
    prompts = [{"id": f"p{i}", "category": "a", "turns": [f"Say {i} words about number {i * 7}."]} for i in range(40)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(p) + "\n" for p in prompts))
    recipe = {
        "target": str(tiny_target),
        "run": "run",
        "conversations": {"path": "prompts.jsonl", "heldout": 0.2},
        "generate": {"max_new_tokens": 24, "slots": 8},
        "vocab": {"size": 200},
        "train": {
            "steps": 3,
            "epochs": 2,
            "batch_tokens": 300,
            "save_every": 2,
            "compute_dtype": "float32",
            "lr": 1e-3,
        },
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    run([sys.executable, "-m", "eyas", "run", "recipe.yaml", "--until", "audit"], folder)
    return folder


def run(command: list[str], folder: Path) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, env=quiet())
    assert done.returncode == 0, done.stderr[-3000:]


def quiet() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1"}


def training(ranks: int) -> list[str]:
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    return [sys.executable, *launch, "-m", "eyas", "train", "recipe.yaml"]


def kill(process: subprocess.Popen) -> None:
    """All ranks at once; on a fast machine they may have ended already."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def copy(prepared: Path, to: Path) -> Path:
    shutil.copytree(prepared, to)
    return to


def losses(folder: Path) -> list[float]:
    lines = [json.loads(line) for line in (folder / "run" / "train" / "log.jsonl").read_text().splitlines()]
    steps = [line["step"] for line in lines if "loss" in line]
    assert steps == list(range(1, len(steps) + 1))
    return [line["loss"] for line in lines if "loss" in line]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(checkpoint.steps(folder / "run" / "train" / "checkpoints")[-1] / "model.safetensors")


@pytest.fixture(scope="module")
def trained(prepared, tmp_path_factory) -> dict[int, Path]:
    """Number of ranks -> a copy of `prepared` trained by them."""
    found = {}
    for ranks in (1, 2, 4):
        found[ranks] = copy(prepared, tmp_path_factory.mktemp("trained") / str(ranks))
        run(training(ranks), found[ranks])
    return found


def test_any_number_of_ranks_gives_the_same_curve(trained):
    alone = losses(trained[1])
    assert len(alone) > 8 and alone[-1] < alone[0]
    for ranks in (2, 4):
        assert losses(trained[ranks]) == pytest.approx(alone, rel=2e-5)
        for name, tensor in weights(trained[1]).items():
            torch.testing.assert_close(weights(trained[ranks])[name], tensor, rtol=2e-3, atol=2e-4)


def test_two_killed_ranks_resume_with_the_same_bits(prepared, trained, tmp_path):
    folder = copy(prepared, tmp_path / "killed")
    for after in (3, 7):
        process = subprocess.Popen(
            training(2),
            cwd=folder,
            env=quiet(),
            stderr=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        log = folder / "run" / "train" / "log.jsonl"
        while process.poll() is None and not (log.exists() and len(log.read_text().splitlines()) > after):
            time.sleep(0.01)
        kill(process)
    run(training(2), folder)
    assert losses(folder) == losses(trained[2])
    assert all(torch.equal(tensor, weights(trained[2])[name]) for name, tensor in weights(folder).items())


def test_one_rank_goes_on_where_two_stood(prepared, trained, tmp_path):
    folder = copy(prepared, tmp_path / "elastic")
    process = subprocess.Popen(training(2), cwd=folder, env=quiet(), stderr=subprocess.DEVNULL, start_new_session=True)
    saved = folder / "run" / "train" / "checkpoints"
    while process.poll() is None and not checkpoint.steps(saved):
        time.sleep(0.01)
    kill(process)
    run(training(1), folder)
    assert losses(folder) == pytest.approx(losses(trained[1]), rel=2e-5)


def test_other_stages_refuse_several_ranks(prepared):
    done = subprocess.run(
        [sys.executable, "-m", "eyas", "vocab", "recipe.yaml"],
        cwd=prepared,
        capture_output=True,
        text=True,
        env=quiet() | {"WORLD_SIZE": "2", "RANK": "0"},
    )
    assert done.returncode == 2 and "one process" in done.stderr
