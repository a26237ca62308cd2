"""Training without extraction beforehand, against training from the store, on the same answers."""

import json
import shutil
from pathlib import Path

import pytest
import yaml
from train_parts import finish, log_lines, losses, same_bits, start, write_recipe

from eyas.errors import UsageError
from eyas.features.store import Store
from eyas.recipe import read_recipe
from eyas.run import Run, run_all
from eyas.train import checkpoint
from eyas.train.online import Online


def run_of(folder: Path, **train) -> Run:
    value = yaml.safe_load((folder / "recipe.yaml").read_text())
    path = folder / f"{train.get('online', 'offline')}.yaml"
    path.write_text(yaml.safe_dump(value | {"train": value["train"] | train}))
    return Run(read_recipe(path))


@pytest.fixture(scope="module")
def offline(tmp_path_factory, tiny_target) -> Path:
    """A run that trained from the store."""
    folder = tmp_path_factory.mktemp("offline")
    # Survivors are chosen one by one, so the target's rounding may choose others; without them a curve is comparable.
    write_recipe(folder, tiny_target, 30, {"survivors": False})
    run_all(run_of(folder), until="train")
    return folder


def again(offline: Path, folder: Path) -> Path:
    """The same answers and vocabulary in another folder, before the store."""
    for name in ("conversations", "answers", "vocab"):
        shutil.copytree(offline / "run" / name, folder / "run" / name)
    value = yaml.safe_load((offline / "recipe.yaml").read_text()) | {"run": str(folder / "run")}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(value))
    return folder


@pytest.fixture(scope="module")
def online(offline, tmp_path_factory) -> Path:
    folder = again(offline, tmp_path_factory.mktemp("online"))
    run_all(run_of(folder, online=True))
    return folder


def test_online_has_the_losses_of_offline(offline, online):
    """The target's own rounding differs a little between batch shapes; the curve does not."""
    theirs, ours = losses(offline / "run" / "train"), losses(online / "run" / "train")
    assert len(ours) > 6 and ours == pytest.approx(theirs, rel=1e-3)


def test_online_extracts_what_validation_and_replay_need_and_no_more(online):
    parts = json.loads((online / "run" / "conversations" / "split.json").read_text())
    assert Store(online / "run" / "store").ids == sorted(parts["heldout"])
    assert not (online / "run" / "states").exists()
    assert json.loads((online / "run" / "replay" / "replay.json").read_text())["tau"] >= 1


def test_the_exported_draft_is_the_best_checkpoint(online):
    run = online / "run"
    made = json.loads((run / "draft" / "eyas.json").read_text())["provenance"]
    best = checkpoint.best(run / "train" / "checkpoints")
    assert made["checkpoint"] == best.name
    assert made["tau"] == json.loads((best / "state.json").read_text())["tau"]


def test_a_cache_is_filled_once_and_gives_the_same_bits(offline, online, tmp_path, monkeypatch):
    computed = []
    real = Online._compute
    monkeypatch.setattr(Online, "_compute", lambda self, name: computed.append(name) or real(self, name))
    folder = again(offline, tmp_path)
    run = run_of(folder, online="cache")
    run_all(run, until="audit")
    # cut off in the middle of the first epoch, then gone on with
    trainer = run.trainer()
    update, steps = trainer.update, iter(range(3))

    def cut(parts):
        if next(steps, None) is None:
            raise KeyboardInterrupt
        return update(parts)

    trainer.update = cut
    with pytest.raises(KeyboardInterrupt):
        trainer.fit()
    run_all(run, until="train")
    assert sorted(computed) == sorted(run.parts()["train"])
    assert log_lines(folder / "run" / "train") == log_lines(online / "run" / "train")
    assert same_bits(folder / "run" / "train", online / "run" / "train")
    cache, store = Store(folder / "run" / "states"), Store(offline / "run" / "store")
    assert cache.ids == sorted(computed) and (folder / "run" / "states" / "manifest.json").exists()
    for name in cache.ids:
        assert cache.entry(name).text == store.entry(name).text
    with pytest.raises(UsageError, match=r"train\.online differ"):
        run_all(run_of(folder), until="store")


def test_two_ranks_fill_one_cache(offline, tmp_path):
    folder = again(offline, tmp_path)
    run = run_of(folder, online="cache", standardise=False)
    run_all(run, until="audit")
    run.online.writer.close()
    cached = len(Store(folder / "run" / "states"))
    finish(start(folder / "cache.yaml", tmp_path / "two", 2))
    finish(start(folder / "cache.yaml", tmp_path / "one", 1))
    store = Store(folder / "run" / "states")
    assert 0 < cached < len(store) and store.ids == sorted(run.parts()["train"])
    assert {entry.shard.split("-")[1] for entry in store.entries.values()} == {"0", "1"}
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=2e-5)


def test_another_conversation_in_the_cache_is_refused(offline, tmp_path):
    run = run_of(again(offline, tmp_path), online="cache")
    documents = [d for d in run.documents() if d["spans"]][:2]
    target = run.load()
    cached = Online(documents, target, run.layers, tmp_path / "states")
    cached.read([d["id"] for d in documents])
    cached.finish()
    other = [documents[0], documents[1] | {"tokens": documents[1]["tokens"][::-1]}]
    with pytest.raises(UsageError, match="another conversation"):
        Online(other, target, run.layers, tmp_path / "states")
