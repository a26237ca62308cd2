"""Extraction by Ray actors on a local cluster, one of which is killed: nothing lost, nothing doubled, the same bits."""

import os
import random
import signal
from pathlib import Path

import pytest
import torch
from test_extract import LAYERS, contents, make_documents

from eyas.errors import EyasError
from eyas.features import cluster, health
from eyas.features.extract import extract
from eyas.features.store import Store
from eyas.target import load_target, read_target

ray = pytest.importorskip("ray", reason="no Ray: pip install 'eyas[ray]'")


class Fragile(cluster.Extractor):
    """The actor ray0 is killed in its second batch, when a part of it is committed."""

    def __init__(self, name: str, *settings: object) -> None:
        super().__init__(name, *settings)
        self.name, self.calls = name, 0
        torch.set_num_threads(1)

    def work(self, documents: list[dict], done: set[str]) -> int:
        self.calls += 1
        if self.name == "ray0" and self.calls == 2:
            super().work(documents, {document["id"] for document in documents[1:]} | done)
            os.kill(os.getpid(), signal.SIGKILL)
        return super().work(documents, done)


class Doomed(Fragile):
    def work(self, documents: list[dict], done: set[str]) -> int:
        os.kill(os.getpid(), signal.SIGKILL)
        return 0


@pytest.fixture(scope="module", autouse=True)
def local_cluster():
    here = {"PYTHONPATH": f"{Path(__file__).parent}:{Path(cluster.__file__).parents[2]}", "OMP_NUM_THREADS": "1"}
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, runtime_env={"env_vars": here})
    yield
    ray.shutdown()


def test_a_dead_actors_samples_go_to_others(tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    documents = make_documents(40, 300, seed=random.Random(1).randrange(99))
    options = {"layers": LAYERS, "codec": "bf16z", "token_budget": 256, "threshold": 0}
    torch.set_num_threads(1)
    extract(documents, load_target(tiny_target), tmp_path / "one", **options)
    monkeypatch.setattr(cluster, "Extractor", Fragile)
    figures = cluster.extract(documents, read_target(tiny_target), tmp_path / "many", 2, **options)
    assert figures["samples"] == 40 and figures["complete"] and health.verify(tmp_path / "many", deep=True, threshold=0)
    assert contents(tmp_path / "many") == contents(tmp_path / "one")
    writers = {entry.shard.split("-")[1] for entry in Store(tmp_path / "many").entries.values()}
    assert writers == {"ray0", "ray1"}
    again = cluster.extract(documents, read_target(tiny_target), tmp_path / "many", 2, **options)
    assert again["tokens_per_s"] == 0 and contents(tmp_path / "many") == contents(tmp_path / "one")


def test_when_all_die_it_says_so_and_goes_on_later(
    tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    documents = make_documents(12, 300)
    with monkeypatch.context() as patch:
        patch.setattr(cluster, "Extractor", Doomed)
        with pytest.raises(EyasError, match="all 2 Ray actors have died"):
            cluster.extract(documents, read_target(tiny_target), tmp_path, 2, token_budget=256, threshold=0)
    figures = cluster.extract(documents, read_target(tiny_target), tmp_path, 2, token_budget=256, threshold=0)
    assert figures["samples"] == 12 and figures["complete"]


def test_what_the_work_itself_raises_comes_through(tiny_target: Path, tmp_path: Path) -> None:
    with pytest.raises(EyasError, match="Self-check failed"):
        cluster.extract(make_documents(12, 300), read_target(tiny_target), tmp_path / "a", 1, threshold=0.9)
    with pytest.raises(EyasError, match=r"actors have died.*Unknown codec 'zip'"):
        cluster.extract(make_documents(2, 300), read_target(tiny_target), tmp_path / "b", 1, codec="zip")
