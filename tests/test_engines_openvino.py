"""What eyas writes, exported and served by the real OpenVINO GenAI: the reference's integers, and check's predictions."""

import os

import pytest
import torch
from engines import faults, reference
from engines.openvino import PYTHON, Openvino
from engines.pair import PROMPTS, VOCAB, Pair

from eyas.serving.check import check
from eyas.serving.export import export

pytestmark = [
    pytest.mark.engines,
    pytest.mark.skipif(not PYTHON.exists(), reason="no .venv-openvino: run `python tools/engines.py openvino`"),
]
NEW, K, LAYERS = 60, 3, [2, 6, 9]
CASES = {"plain": {}, "full vocabulary": {"vocab": VOCAB}, "own heads": {"num_key_value_heads": 4, "head_dim": 64}}


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    torch.set_num_threads(1)
    with Openvino() as engine:
        pair = Pair(tmp_path_factory.mktemp("pair"))
        pair.engine = engine
        yield pair


@pytest.mark.parametrize("name", CASES)
def test_openvino_gives_the_references_integers(pair, tmp_path, name):
    """A draft of the layers that it captures, written for it: with a map even beside a full vocabulary."""
    config, state, _ = pair.draft(name.replace(" ", "-"), aux_layers=LAYERS, **CASES[name])
    folder = export(state, config, pair.target, tmp_path / "d", provenance={}, dtype="float32", engine="openvino")
    assert check(folder, pair.target, ["openvino"])["verdicts"]["openvino"]["verdict"] == "pass"
    runs = [reference.speculate(pair.model, state, config.to_dict(), list(p), NEW, K, "left out") for p in PROMPTS]
    served = pair.engine(pair.target.path, folder, [list(p) for p in PROMPTS], NEW, K, pair.folder / "exported")
    assert served == {"answers": [{key: run[key] for key in ("tokens", "drafted", "accepted")} for run in runs]}
    assert sum(run["accepted"] for run in runs) > 20


@pytest.fixture(scope="module")
def canary(tmp_path_factory):
    with faults.bench("openvino", tmp_path_factory.mktemp("canary")) as bench:
        bench.right = bench.row("nothing")["seen"]
        yield bench


@pytest.mark.parametrize("name", faults.OPENVINO if os.environ.get("EYAS_ENGINES") == "all" else ["no map"])
def test_what_was_predicted_is_what_openvino_does(canary, name):
    row = canary.row(name)
    assert faults.judge(row, canary.right) == "", row
