"""Several ranks train as one: the same curve to rounding, the same bits after a kill, and on with another number of ranks."""

import json
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from train_parts import finish, kill, log_lines, losses, newest, same_bits, start, state, train_by_torch, write_recipe

from eyas.recipe import read_recipe
from eyas.run import Run, run_all
from eyas.train import checkpoint
from eyas.train.parallel import share

WAYS = {"1": (1, False), "2": (2, False), "4": (4, False), "2 sharded": (2, True), "4 sharded": (4, True)}


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
def recipe(tmp_path_factory, tiny_target) -> Path:
    """The recipe of a run that stands before its training."""
    folder = tmp_path_factory.mktemp("ranks")
    path = write_recipe(folder, tiny_target, 40, {"lr": 1e-3})
    run_all(Run(read_recipe(path)), until="audit")
    return path


@pytest.fixture(scope="module")
def trained(recipe, tmp_path_factory) -> dict[str, Path]:
    """Where each way of training left its log and checkpoints."""
    folder = tmp_path_factory.mktemp("trained")
    for name, (ranks, shard) in WAYS.items():
        finish(start(recipe, folder / name, ranks, shard=shard))
    return {name: folder / name for name in WAYS}


def test_any_number_of_ranks_gives_the_same_curve_whole_or_sharded(trained):
    curves = {name: losses(out) for name, out in trained.items()}
    print("\n| step | " + " | ".join(curves) + " |\n|--:|" + "--:|" * len(curves))
    for step, row in enumerate(zip(*curves.values(), strict=True), 1):
        print(f"| {step} | " + " | ".join(f"{loss:.6f}" for loss in row) + " |")
    alone = curves["1"]
    print("largest difference:", {n: max(abs(a / b - 1) for a, b in zip(c, alone, strict=True)) for n, c in curves.items()})  # fmt: skip
    assert len(alone) > 8 and alone[-1] < alone[0]
    for name, out in trained.items():
        assert curves[name] == pytest.approx(alone, rel=2e-5)
        for key, tensor in state(trained["1"]).items():
            if key.startswith("model"):
                torch.testing.assert_close(state(out)[key], tensor, rtol=2e-3, atol=2e-4)


def test_the_curve_is_that_of_torchs_own_data_parallel(recipe, trained, tmp_path):
    """DistributedDataParallel, plain autograd, torch's clipping: none of the sums is ours."""
    finish(start(recipe, tmp_path / "ddp", 2, train_by_torch))
    assert json.loads((tmp_path / "ddp/losses.json").read_text()) == pytest.approx(losses(trained["2"]), rel=2e-5)


def test_a_rank_without_documents_takes_part(recipe, tmp_path):
    """Batches of one document each: the second rank has none, and the curve is the first one's alone."""
    for ranks in (1, 2):
        finish(start(recipe, tmp_path / str(ranks), ranks, batch_tokens=1, epochs=1))
    assert losses(tmp_path / "2") == pytest.approx(losses(tmp_path / "1"), rel=2e-5)


@pytest.mark.parametrize("shard", [False, True])
def test_two_killed_ranks_resume_with_the_same_bits(recipe, trained, tmp_path, shard):
    log = tmp_path / "log.jsonl"
    for after in (3, 7):
        jobs = start(recipe, tmp_path, 2, shard=shard)
        while any(job.is_alive() for job in jobs) and not (log.exists() and len(log.read_text().splitlines()) > after):
            time.sleep(0.005)
        kill(jobs)
    finish(start(recipe, tmp_path, 2, shard=shard))
    straight = trained["2 sharded" if shard else "2"]
    assert log_lines(tmp_path) == log_lines(straight) and same_bits(tmp_path, straight)


def test_other_ranks_go_on_where_these_stood(recipe, trained, tmp_path):
    """Four that share their masters, then one, then two that share: every step once, on the same documents."""
    for ranks, count in ((4, 4), (1, 8)):
        jobs = start(recipe, tmp_path, ranks, shard=True)
        while any(job.is_alive() for job in jobs) and not (
            (found := checkpoint.steps(tmp_path / "checkpoints")) and int(found[-1].name[-8:]) >= count
        ):
            time.sleep(0.005)
        kill(jobs)
    finish(start(recipe, tmp_path, 2, shard=True))
    assert losses(tmp_path) == pytest.approx(losses(trained["1"]), rel=2e-5)


@pytest.mark.parametrize(
    ("change", "rounding"),
    [({"compute_dtype": "bfloat16", "clip": 1e9}, 0), ({"optimizer": "muon"}, 2e-3)],
)
def test_shards_train_as_copies_do(recipe, tmp_path, change, rounding):
    """In bfloat16 to the bit where nothing is clipped: a norm of shards rounds otherwise, and one bit of difference in a
    master can turn over a rounding of its cast. Muon's products are bfloat16 and cut differently."""
    for name, shard in (("whole", False), ("sharded", True)):
        finish(start(recipe, tmp_path / name, 2, shard=shard, epochs=1, **change))
    assert losses(tmp_path / "sharded") == pytest.approx(losses(tmp_path / "whole"), rel=rounding)


def test_killed_at_twenty_random_instants_nothing_is_lost(recipe, tmp_path):
    """SIGKILL, often while a checkpoint is being written: each start goes on from the newest complete one."""
    chance = random.Random(8)
    straight, out, stood, saving = tmp_path / "straight", tmp_path / "out", 0, 0
    long = {"save_every": 1, "epochs": 14}
    finish(start(recipe, straight, **long))
    folder = out / "checkpoints"
    for number in range(1, 21):
        jobs = start(recipe, out, **long)
        goal = stood + chance.randint(1, 3)
        while jobs[0].is_alive() and _newest(folder) < goal:
            time.sleep(0.001)
        if number % 2:  # in the middle of the next one
            while jobs[0].is_alive() and not [*folder.glob(".step-*")]:
                pass
        time.sleep(chance.uniform(0, 0.02))
        assert jobs[0].is_alive(), "it ended before the last kill"
        kill(jobs)
        half, newest_now = len([*folder.glob(".step-*")]), _newest(folder)
        print(f"kill {number:2}: began at step {stood:2}, newest complete {newest_now:2}, half-written {half}")
        assert newest_now >= goal, "a checkpoint that stood is gone"
        stood, saving = newest_now, saving + (half > 0)
    finish(start(recipe, out, **long))
    assert saving >= 3
    assert log_lines(out) == log_lines(straight) and same_bits(out, straight)
    assert not [*folder.glob(".step-*")] and newest(out).name == newest(straight).name


def _newest(folder: Path) -> int:
    return max((int(path.name[-8:]) for path in checkpoint.steps(folder)), default=0)


def test_the_kimi_draft_spread_over_ranks_holds_what_arithmetic_says():
    """Counted on the meta device by the code that trains, against figures made by hand from the config."""
    root = Path(__file__).parents[1]
    command = [sys.executable, str(root / "benchmarks" / "scale.py"), str(root / "examples" / "kimi-k2.5")]
    done = subprocess.run([*command, "--ranks", "1", "32"], capture_output=True, text=True, timeout=300, env=quiet())
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    inner, heads, width, vocab = 18432, 64 * 128, 7168, 32000
    fc, attention, mlp, head = 3 * width**2, 3 * 2 * width * heads + heads * width, 3 * width * inner, vocab * width
    matrices, vectors = fc + attention + mlp + head, 4 * width
    trained = matrices + vectors
    assert trained == 1_190_948_864
    alone, spread = found["1 whole"], found["32 sharded"]
    assert alone["masters"] == 4 * trained and alone["optimizer"] == 8 * trained
    assert spread["masters"] == 4 * (matrices // 32 + vectors) and spread["optimizer"] == 2 * spread["masters"]
    assert alone["bf16"] == spread["bf16"] == 2 * (matrices + vocab * width + 163840 * width)
    assert found["32 whole"] == alone and spread["together"] < 0.6 * alone["together"]


def test_torchrun_trains_the_stage(recipe, trained, tmp_path):
    shutil.copytree(recipe.parent, tmp_path / "copy")
    path = tmp_path / "copy" / "recipe.yaml"
    path.write_text(yaml.safe_dump(yaml.safe_load(recipe.read_text()) | {"run": str(tmp_path / "copy" / "run")}))
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "eyas", "train", str(path)]
    done = subprocess.run([sys.executable, *launch], capture_output=True, text=True, timeout=300, env=quiet())
    assert done.returncode == 0, done.stderr[-3000:]
    assert losses(tmp_path / "copy" / "run" / "train") == losses(trained["2"])


def quiet() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1"}


def test_other_stages_refuse_several_ranks(recipe):
    done = subprocess.run(
        [sys.executable, "-m", "eyas", "vocab", str(recipe)],
        capture_output=True,
        text=True,
        env=quiet() | {"WORLD_SIZE": "2", "RANK": "0"},
    )
    assert done.returncode == 2 and "one process" in done.stderr
