"""What eyas writes, served by the real llama-server: the same tokens, drafted and accepted counts as the slow reference.

Also: our GGUF holds what llama.cpp's own converter writes, and the converter's verdicts are those that check predicts.
"""

import numpy as np
import pytest
import torch
from engines import llamacpp, reference
from engines.pair import DRAFT_VOCAB, PROMPTS, VOCAB, Pair
from serving_parts import edit, make_state, rename

from eyas.draft.config import draft_config_for
from eyas.serving.check import check
from eyas.serving.export import export
from eyas.serving.llamacpp import export_gguf

pytestmark = [
    pytest.mark.engines,
    pytest.mark.skipif(llamacpp.server() is None, reason="no .venv-llamacpp: run `python tools/engines.py llamacpp`"),
]
NEW = 120


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
        served = [llamacpp.complete(url, list(p), NEW) for p in PROMPTS]
    for got, wanted in zip(served, expected, strict=True):
        assert got == {key: wanted[key] for key in ("tokens", "drafted", "accepted")}
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


BROKEN = {
    "missing layer tensor": (None, lambda s: s.pop("midlayer.mlp.up_proj.weight")),
    "missing norm": (None, lambda s: s.pop("norm.weight")),
    "missing fc": (None, lambda s: s.pop("fc.weight")),
    "missing map": (None, lambda s: (s.pop("d2t"), s.pop("t2d"))),
    "missing head": (None, lambda s: s.pop("lm_head.weight")),
    "absolute map": (None, lambda s: s.update(d2t=s["d2t"] + torch.arange(len(s["d2t"])))),
    "unknown tensor": (None, lambda s: s.update({"extra.weight": torch.ones(3)})),
    "model. prefix": (None, rename("fc.", "model.fc.")),
    "compiled": (None, rename("", "_orig_mod.")),
    "fc bias": (None, lambda s: s.update({"fc.bias": torch.ones(64)})),
    "q bias": (None, lambda s: s.update({"midlayer.self_attn.q_proj.bias": torch.ones(128)})),
    "q norm": (None, lambda s: s.update({"midlayer.self_attn.q_norm.weight": torch.ones(32)})),
    "no draft_vocab_size": (lambda c: c.pop("draft_vocab_size"), None),
    "two layers in the config": (lambda c: c.update(num_hidden_layers=2), None),
    "four ids": (lambda c: c.update(eagle_aux_hidden_state_layer_ids=[2, 4, 6, 9]), None),
    "another architecture": (lambda c: c.update(architectures=["Eagle3ForCausalLM"]), None),
    "wrong head rows": (lambda c: c.update(draft_vocab_size=DRAFT_VOCAB - 1), None),
    "layers.0 names": (None, rename("midlayer.", "layers.0.")),
    "no t2d": (None, lambda s: s.pop("t2d")),
    "d2t int32": (None, lambda s: s.update(d2t=s["d2t"].int())),
    "null width": (lambda c: c.update(target_hidden_size=None), None),
    "null use_cache": (lambda c: c.update(use_cache=None), None),
    "larger vocab_size": (lambda c: c.update(vocab_size=VOCAB + 1), None),
    "tied": (lambda c: c.update(tie_word_embeddings=True), None),
    "no dtype": (lambda c: (c.pop("dtype"), c.pop("torch_dtype")), None),
    "speculators": ("speculators", None),
    "model. before the layer": (None, rename("midlayer.", "model.midlayer.")),
    "model.layers.0": (None, rename("midlayer.", "model.layers.0.")),
    "model. before the map": (None, rename("d2t", "model.d2t")),
    "model. before the head": (None, rename("lm_head", "model.lm_head")),
    "model. before the norm": (None, rename("norm", "model.norm")),
    "layers.1": (None, rename("midlayer.", "layers.1.")),
    "context of 64": (lambda c: c.update(max_position_embeddings=64), None),
    "one key/value head": (lambda c: c.update(num_key_value_heads=1), None),
    "five heads": (lambda c: c.update(num_attention_heads=5), None),
    "head_dim 8": (lambda c: c.update(head_dim=8), None),
    "gelu": (lambda c: c.update(hidden_act="gelu"), None),
    "norm_output": (lambda c: c.update(norm_output=True), None),
    "fc_norm": (
        lambda c: c.update(fc_norm=True),
        lambda s: s.update({f"fc_norm.{i}.weight": torch.ones(64) for i in range(3)}),
    ),
    "NaN": (None, lambda s: s["fc.weight"].fill_(float("nan"))),
    "no hidden_norm": (None, lambda s: s.pop("midlayer.hidden_norm.weight")),
    "short map": (None, lambda s: s.update(d2t=s["d2t"][:-1])),
    "map out of range": (None, lambda s: s["d2t"].__setitem__(-1, 999)),
    "map of zeros": (None, lambda s: s["d2t"].zero_()),
    "doubled map": (None, lambda s: s["d2t"].__setitem__(1, s["d2t"][0] - 1)),
    "unsorted map": (None, lambda s: s["d2t"].__setitem__(slice(0, 2), s["d2t"][[1, 0]] + torch.tensor([1, -1]))),
    "float map": (None, lambda s: s.update(d2t=s["d2t"].float())),
    "no theta": (lambda c: (c.pop("rope_theta"), c.pop("rope_parameters")), None),
    "null draft_vocab_size": (lambda c: c.update(draft_vocab_size=None), None),
    "no num_hidden_layers": (lambda c: c.pop("num_hidden_layers"), None),
    "smaller vocab_size": (lambda c: c.update(vocab_size=VOCAB - 1), None),
    "an id beyond the last layer": (lambda c: c.update(eagle_aux_hidden_state_layer_ids=[2, 6, 13]), None),
    "fc transposed": (None, lambda s: s.update({"fc.weight": s["fc.weight"].T})),
    "inv_freq": (None, lambda s: s.update({"midlayer.self_attn.rotary_emb.inv_freq": torch.ones(16)})),
    "teacher's head": (None, lambda s: s.update({"verifier_lm_head.weight": torch.ones(200, 64)})),
    "nested ids only": (lambda c: c.update(eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 4, 9]}), None),
    "own embedding of another size": (None, lambda s: s.update({"embed_tokens.weight": torch.ones(VOCAB + 5, 64)})),
    "own embedding too small": (None, lambda s: s.update({"embed_tokens.weight": torch.ones(VOCAB - 5, 64)})),
    "own embedding too wide": (None, lambda s: s.update({"embed_tokens.weight": torch.ones(VOCAB, 65)})),
    "mrope": (lambda c: c["rope_parameters"].update(mrope_section=[2, 3, 3]), None),
    "null rope_theta": (lambda c: c.update(rope_theta=None), None),
    "no architectures": (lambda c: c.pop("architectures"), None),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_check_predicts_is_what_llamacpp_does(pair, tmp_path, name):
    """Predicted "raises" or not, against the real converter and server: the two must agree."""
    config_change, tensor_change = BROKEN[name]
    config = draft_config_for(pair.target, DRAFT_VOCAB)
    state = make_state(config, pair.target)
    layout = "speculators" if config_change == "speculators" else "portable"
    folder = export(state, config, pair.target, tmp_path / "d", provenance={}, dtype="float32", layout=layout)
    (folder / "eyas.json").unlink()
    edit(folder, config_change if callable(config_change) else None, tensor_change)
    findings = check(folder, pair.target, ["llamacpp"])["verdicts"]["llamacpp"]["findings"]
    predicted = any(f["outcome"].startswith("raises") and f["severity"] == "error" for f in findings)
    seen = pair.convert(folder, tmp_path / "d.gguf", pair.target.path)
    if not seen:
        try:
            with llamacpp.serving(pair.folder / "target.gguf", tmp_path / "d.gguf") as url:
                llamacpp.complete(url, [5, 6, 7], 8)
        except (RuntimeError, OSError) as error:
            seen = str(error) or type(error).__name__
    assert bool(seen) == predicted, (seen, findings)
