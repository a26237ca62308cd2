"""What eyas writes, served by the real llama-server: the same tokens, drafted and accepted counts as the slow reference.

Also: our GGUF holds what llama.cpp's own converter writes, and the converter's verdicts are those that check predicts.
"""

import json
import os

import numpy as np
import pytest
import torch
from engines import faults, llamacpp, reference
from engines.pair import DRAFT_VOCAB, PROMPTS, VOCAB, Pair
from serving_parts import make_state

from eyas.draft.config import draft_config_for
from eyas.errors import EyasError, UsageError
from eyas.serving import canary as c
from eyas.serving.check import check
from eyas.serving.export import export
from eyas.serving.llamacpp import export_gguf

pytestmark = [
    pytest.mark.engines,
    pytest.mark.skipif(llamacpp.server() is None, reason="no .venv-llamacpp: run `python tools/engines.py llamacpp`"),
]
NEW = 120
SILENT = "wire: hidden_norm was not loaded"  # its first drafted token is always right


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    torch.set_num_threads(1)
    with llamacpp.Converter() as convert:
        pair = Pair(tmp_path_factory.mktemp("pair"))
        pair.convert = convert
        assert convert(pair.target.path, pair.folder / "target.gguf") == ""
        yield pair


@pytest.mark.parametrize(
    ("options", "k"),
    [
        ({}, 3),
        ({"vocab": VOCAB}, 1),
        ({"norm_before_residual": True}, 5),
        ({"aux_layers": [0, 4, 9], "norm_before_fc": True}, 4),
        ({"num_key_value_heads": 4, "head_dim": 64}, 3),
    ],
    ids=["plain", "full vocabulary", "norm before residual", "other layers, norm before fc", "own heads"],
)
def test_the_server_gives_the_references_integers(pair, options, k, request):
    name = request.node.callspec.id.replace(" ", "-")
    config, state, _ = pair.draft(name, **options)
    assert check(pair.folder / name, pair.target, ["llamacpp"])["verdicts"]["llamacpp"]["verdict"] == "pass"
    gguf = export_gguf(state, config, pair.target, pair.folder / f"{name}-gguf", provenance={}, vocabulary=pair.folder / "target.gguf", dtype="float32")  # fmt: skip
    expected = [reference.speculate(pair.model, state, config.to_dict(), list(p), NEW, k) for p in PROMPTS]
    with llamacpp.serving(pair.folder / "target.gguf", gguf, k) as url:
        served = [llamacpp.complete(url, list(p), NEW, k) for p in PROMPTS]
    for got, wanted in zip(served, expected, strict=True):
        assert got == {key: wanted[key] for key in ("tokens", "drafted", "accepted", "per_position")}
    assert sum(e["accepted"] for e in expected) > 20  # it drafts well enough for the comparison to mean something


def test_the_pair_would_notice_a_wrong_wire(pair):
    """The comparison above has power: with one wire changed, the reference itself counts something else."""
    config, state, _ = pair.draft("power")

    def counts(**wire):
        runs = [reference.speculate(pair.model, state, config.to_dict() | wire, list(p), NEW, 3) for p in PROMPTS]
        return [(run["drafted"], run["accepted"]) for run in runs]

    right = counts()
    assert counts(aux_layers=(2, 6, 9)) != right and counts(aux_layers=(8, 5, 1)) != right
    assert counts(norm_before_residual=True) != right and counts(rope_parameters={"rope_theta": 1e4}) != right


def values(file):
    from gguf import GGUFReader

    reader = GGUFReader(file)
    keys = {k: (f.types, f.contents()) for k, f in reader.fields.items() if not k.startswith("GGUF.")}
    return keys, {t.name: (t.tensor_type, list(t.shape), np.array(t.data)) for t in reader.tensors}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 20000.0},
        {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 256},
        {"rope_type": "yarn", "rope_theta": 5e4, "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0, "original_max_position_embeddings": 256},
    ],
    ids=lambda rope: rope["rope_type"],
)  # fmt: skip
def test_our_gguf_holds_what_the_converter_writes(pair, tmp_path, dtype, rope):
    config = draft_config_for(pair.target, DRAFT_VOCAB)
    config = type(config).from_dict(config.to_dict() | {"rope_parameters": rope})
    cast = getattr(torch, dtype)
    state = {n: t.to(cast) if t.is_floating_point() else t for n, t in make_state(config, pair.target).items()}
    folder = export(state, config, pair.target, tmp_path / "d", provenance={}, dtype=dtype)
    outtype = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}[dtype]
    assert pair.convert(folder, tmp_path / "theirs.gguf", pair.target.path, outtype) == ""
    ours = export_gguf(state, config, pair.target, tmp_path / "g", provenance={}, vocabulary=pair.folder / "target.gguf", dtype=dtype)  # fmt: skip
    (keys, tensors), (their_keys, their_tensors) = values(ours), values(tmp_path / "theirs.gguf")
    told = ("general.name", "general.size_label", "general.basename", "general.finetune")  # descriptions of the folder
    assert {k: v for k, v in keys.items() if k not in told} == {k: v for k, v in their_keys.items() if k not in told}
    assert tensors.keys() == their_tensors.keys()
    for name, (kind, shape, data) in tensors.items():
        assert (kind, shape) == their_tensors[name][:2]
        if name == "rope_freqs.weight":  # computed in another order: equal but for the last bits
            np.testing.assert_allclose(data, their_tensors[name][2], rtol=1e-5)
        else:
            assert np.array_equal(data, their_tensors[name][2]), name


@pytest.fixture(scope="module")
def canary(tmp_path_factory):
    with faults.bench("llamacpp", tmp_path_factory.mktemp("canary")) as bench:
        bench.right = bench.row("nothing")["seen"]
        yield bench


@pytest.mark.parametrize("name", faults.CASES if os.environ.get("EYAS_ENGINES") == "all" else faults.QUICK)
def test_what_was_predicted_is_what_llamacpp_does(canary, name):
    """Raised or served, with the very counts that load_as gives; and the canary names the wire."""
    row = canary.row(name)
    assert faults.judge(row, canary.right) == "", row
    assert faults.well_named(row), faults.named(row)


def test_the_canary_starts_asks_and_stops_a_real_server(canary, tmp_path):
    """What eyas canary --run does with llama-server, round by round from its stream: whole, and with broken wires."""
    said = json.loads((canary.folder / "canary.json").read_text())
    with llamacpp.Converter() as convert:
        for name, wire in (("nothing", "right"), ("ids in descending order", "order"), (SILENT, "norms")):
            assert convert(canary.broken(name), canary.folder / "draft.gguf", canary.folder / "target") == ""
            with c.serving(said, f"{llamacpp.server()} -fa off -ctk f32 -ctv f32", tmp_path / "log") as url:
                rates = c.ask("llamacpp", url, said["prompt"])
            assert len(rates) == 3 and c.diagnose(rates, [1, 5, 8])[0].name == wire
    with pytest.raises(EyasError, match="ended before it answered"), c.serving(said, "false", tmp_path / "log"):
        pass
    with pytest.raises(UsageError, match="cannot be started"), c.serving(said, "no-such-program", tmp_path / "log"):
        pass
