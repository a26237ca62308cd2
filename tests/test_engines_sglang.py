"""What eyas writes, in SGLang's own classes: the reference's integers, and every prediction held to them."""

import os

import pytest
import torch
from engines import faults, reference
from engines.pair import PROMPTS, VOCAB, Pair
from engines.sglang import PYTHON, Sglang

from eyas.serving.export import export

pytestmark = [
    pytest.mark.engines,
    pytest.mark.skipif(not PYTHON.exists(), reason="no .venv-sglang: run `python tools/engines.py sglang`"),
]
NEW, K = 60, 3
CASES = {
    "plain": {},
    "full vocabulary": {"vocab": VOCAB},
    "other layers, norm before fc": {"norm_before_fc": True, "aux_layers": [0, 4, 9]},
    "own heads": {"num_key_value_heads": 4, "head_dim": 64},
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    torch.set_num_threads(1)
    return Pair(tmp_path_factory.mktemp("pair"))


@pytest.mark.parametrize("name", CASES)
def test_sglang_gives_the_references_integers(pair, tmp_path, name):
    config, state, _ = pair.draft(name.replace(" ", "-"), **CASES[name])
    folder = export(state, config, pair.target, tmp_path / "d", provenance={}, dtype="float32")
    runs = [reference.speculate(pair.model, state, config.to_dict(), list(p), NEW, K, "whole") for p in PROMPTS]
    with Sglang() as sglang:
        served = sglang(pair.target.path, folder, [list(p) for p in PROMPTS], NEW, K, tmp_path)
    assert served == {"answers": runs}


@pytest.fixture(scope="module")
def canary(tmp_path_factory):
    with faults.bench("sglang", tmp_path_factory.mktemp("canary")) as bench:
        bench.right = bench.row("nothing")["seen"]
        yield bench


@pytest.mark.parametrize("name", faults.CASES if os.environ.get("EYAS_ENGINES") == "all" else faults.QUICK)
def test_what_was_predicted_is_what_sglang_does(canary, name):
    """Raised or served, with the very counts that load_as gives; and the canary names the wire."""
    row = canary.row(name)
    assert faults.judge(row, canary.right) == "", row
    assert faults.well_named(row), faults.named(row)
