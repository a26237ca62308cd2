"""What eyas writes, served by the real vLLM on the CPU: the reference's integers, and check's predictions held to it."""

import os

import pytest
import torch
from engines import faults, reference
from engines.pair import PROMPTS, VOCAB, Pair
from engines.vllm import PYTHON, Vllm

from eyas.serving.export import export

pytestmark = [
    pytest.mark.engines,
    pytest.mark.skipif(not PYTHON.exists(), reason="no .venv-vllm: run `python tools/engines.py vllm`"),
]
NEW, K = 60, 3


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    torch.set_num_threads(1)
    with Vllm() as vllm:
        pair = Pair(tmp_path_factory.mktemp("pair"))
        pair.vllm = vllm
        yield pair


def reference_counts(pair, state, config):
    runs = [reference.speculate(pair.model, state, config.to_dict(), list(p), NEW, K, "whole") for p in PROMPTS]
    return [{key: run[key] for key in ("tokens", "drafted", "accepted", "per_position")} for run in runs]


CASES = {
    "plain": ({}, "portable"),
    "speculators": ({}, "speculators"),
    "full vocabulary": ({"vocab": VOCAB}, "portable"),
    "norm before residual": ({"norm_before_residual": True}, "speculators"),
    "EAGLE-3.1": ({"norm_before_fc": True, "aux_layers": [0, 4, 9]}, "portable"),
    "eagle": ({"num_key_value_heads": 4, "head_dim": 64}, "eagle"),
}


@pytest.mark.parametrize("name", CASES)
def test_vllm_gives_the_references_integers(pair, tmp_path, name):
    options, layout = CASES[name]
    config, state, _ = pair.draft(name.replace(" ", "-"), **options)
    folder = export(state, config, pair.target, tmp_path / "d", provenance={}, dtype="float32", layout=layout)
    served = pair.vllm(pair.target.path, folder, [list(p) for p in PROMPTS], NEW, K, tmp_path / "log")
    assert served == {"answers": reference_counts(pair, state, config)}


@pytest.fixture(scope="module")
def canary(tmp_path_factory):
    with faults.bench("vllm", tmp_path_factory.mktemp("canary")) as bench:
        bench.right = bench.row("nothing")["seen"]
        yield bench


@pytest.mark.parametrize("name", faults.CASES if os.environ.get("EYAS_ENGINES") == "all" else faults.QUICK)
def test_what_was_predicted_is_what_vllm_does(canary, name):
    """Raised or served, with the very counts that load_as gives; and the canary names the wire."""
    row = canary.row(name)
    assert faults.judge(row, canary.right) == "", row
    assert faults.well_named(row), faults.named(row)
