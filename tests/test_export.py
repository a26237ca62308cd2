"""Export writes what it was given, whole or not at all, and every layout comes back bit for bit."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from serving_parts import DRAFT_VOCAB, HIDDEN, VOCAB, edit, make_draft, make_state, make_target

from eyas.draft.config import draft_config_for
from eyas.errors import EyasError, UsageError
from eyas.serving.check import check
from eyas.serving.export import LAYOUTS, export, load_draft, not_for


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return make_target(tmp_path_factory.mktemp("target"))


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) and a[n].dtype == b[n].dtype for n in a)


OPTIONS = [
    {},
    {"vocab": VOCAB},
    {"aux_layers": [0, 4, 9]},
    {"norm_before_residual": True},
    {"norm_before_fc": True, "norm_output": True},
    {"fc_norm": True, "aux_layers": [1, 3, 5, 7]},
    {"attention_bias": True, "num_layers": 2},
    {"qk_norm": True, "hidden_size": 16, "num_attention_heads": 2, "head_dim": 8},
]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "-".join(o) or "plain")
def test_every_layout_comes_back_bit_for_bit(target, tmp_path, layout, options):
    options = dict(options)
    config = draft_config_for(target, options.pop("vocab", DRAFT_VOCAB), **options)
    state = make_state(config, target)
    out = export(
        state | {"verifier_lm_head.weight": torch.ones(3)}, config, target, tmp_path / "d", provenance={}, layout=layout
    )
    back_config, back = load_draft(out, target)
    assert back_config == config and same(back, state)
    again = export(back, back_config, target, tmp_path / "e", provenance={}, layout="portable")
    assert same(load_draft(again, target)[1], state)


def test_the_file_holds_the_portable_names_and_no_teacher(target, tmp_path):
    config = draft_config_for(target, DRAFT_VOCAB)
    state = make_state(config, target) | {
        "verifier_lm_head.weight": torch.ones(3),
        "verifier_norm.weight": torch.ones(3),
    }
    stored = load_file(export(state, config, target, tmp_path / "d", provenance={"tau": 2.5}) / "model.safetensors")
    layer = [f"midlayer.self_attn.{n}_proj.weight" for n in "qkvo"] + [
        f"midlayer.mlp.{n}_proj.weight" for n in ("gate", "up", "down")
    ]
    norms = [f"midlayer.{n}.weight" for n in ("input_layernorm", "hidden_norm", "post_attention_layernorm")]
    assert set(stored) == {"fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d", *layer, *norms}
    assert stored["d2t"].dtype == torch.int64 and stored["t2d"].dtype == torch.bool
    assert stored["fc.weight"].dtype == torch.bfloat16
    record = json.loads((tmp_path / "d" / "eyas.json").read_text())
    assert record["provenance"] == {"tau": 2.5} and record["aux_layers"] == [1, 5, 8]
    assert record["target"]["fingerprint"] == target.fingerprint and list(record["not_for"]) == ["openvino"]


def test_the_embedding_is_left_out_only_when_proven_equal(target, tmp_path):
    config = draft_config_for(target, DRAFT_VOCAB)
    state = make_state(config, target)

    def stored(name, **options):
        return "embed_tokens.weight" in load_file(
            export(state, config, target, tmp_path / name, provenance={}, **options) / "model.safetensors"
        )

    assert not stored("equal") and stored("asked", embed=True)
    state["embed_tokens.weight"] = state["embed_tokens.weight"].float()  # a training copy in float32 is still the same
    assert not stored("float32", dtype="float32")
    state["embed_tokens.weight"] = state["embed_tokens.weight"] * 1.01
    assert stored("trained")
    bare = make_target(tmp_path / "bare")
    (bare.path / "model.safetensors").unlink()
    assert "embed_tokens.weight" in load_file(
        export(state, config, bare, tmp_path / "x", provenance={}) / "model.safetensors"
    )
    narrow = draft_config_for(target, DRAFT_VOCAB, hidden_size=16, num_attention_heads=2, head_dim=8)
    kept = make_state(narrow, target)
    out = export(kept, narrow, target, tmp_path / "narrow", provenance={})
    assert load_file(out / "model.safetensors")["embed_tokens.weight"].shape == (VOCAB, 16)
    del kept["embed_tokens.weight"]
    with pytest.raises(UsageError, match="embed_tokens of its own"):
        export(kept, narrow, target, tmp_path / "narrow2", provenance={})


def test_shards_are_indexed_and_come_back(target, tmp_path):
    config = draft_config_for(target, DRAFT_VOCAB)
    state = make_state(config, target)
    out = export(state, config, target, tmp_path / "d", provenance={}, shard_bytes=8000)
    assert len(list(out.glob("model-*.safetensors"))) > 2 and (out / "model.safetensors.index.json").exists()
    assert same(load_draft(out, target)[1], state)
    assert check(out, target, ["sglang"])["verdicts"]["sglang"]["verdict"] == "pass"
    next(out.glob("model-*.safetensors")).unlink()
    with pytest.raises(UsageError):
        load_draft(out, target)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop("fc.weight"), "missing: fc.weight"),
        (lambda s: s.update({"layers.0.extra": torch.ones(1)}), "not in the config: layers.0.extra"),
        (lambda s: s.update({"norm.weight": torch.ones(3)}), "another shape"),
        (lambda s: s.pop("d2t"), "missing: d2t"),
        (lambda s: s.update({"t2d": ~s["t2d"]}), "different tokens"),
    ],
)
def test_a_wrong_state_is_refused_and_nothing_is_left(target, tmp_path, change, message):
    config = draft_config_for(target, DRAFT_VOCAB)
    state = make_state(config, target)
    change(state)
    with pytest.raises(UsageError, match=message):
        export(state, config, target, tmp_path / "d", provenance={})
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_keeps_the_draft_that_stood_there(target, tmp_path, monkeypatch):
    make_draft(tmp_path / "d", target)
    before = (tmp_path / "d" / "model.safetensors").read_bytes()
    config = draft_config_for(target, DRAFT_VOCAB)
    monkeypatch.setattr("eyas.serving.export._write_weights", lambda *_: {"fc.weight"})
    with pytest.raises(EyasError, match="wrote 1 tensors of"):
        export(make_state(config, target, 1), config, target, tmp_path / "d", provenance={})
    assert (tmp_path / "d" / "model.safetensors").read_bytes() == before and len(list(tmp_path.iterdir())) == 1


def test_what_no_engine_file_can_serve_is_refused_by_name(target, tmp_path):
    config = draft_config_for(target, DRAFT_VOCAB, norm_before_residual=True)
    assert set(not_for(config, target)) == {"sglang", "openvino", "trtllm"}
    one_layer = not_for(draft_config_for(target, DRAFT_VOCAB, aux_layers=[1]), target)
    assert "skips fc" in one_layer["sglang"][0] and "vllm" not in one_layer
    with pytest.raises(EyasError, match=r"SGLang 0\.5\.23 cannot serve this draft: ignores norm_before_residual"):
        export(make_state(config, target), config, target, tmp_path / "d", provenance={}, engine="sglang")
    assert not (tmp_path / "d").exists()
    export(make_state(config, target), config, target, tmp_path / "d", provenance={}, engine="vllm")


def test_the_openvino_file_has_a_map_of_zeros_and_wants_its_own_layers(target, tmp_path):
    usual = draft_config_for(target, VOCAB)
    with pytest.raises(EyasError, match=r"here it gets out\(2, 6, 9\)"):
        export(make_state(usual, target), usual, target, tmp_path / "u", provenance={}, engine="openvino")
    config = draft_config_for(target, VOCAB, aux_layers=[2, 6, 9])
    state = make_state(config, target)
    portable = export(state, config, target, tmp_path / "p", provenance={})
    special = export(state, config, target, tmp_path / "o", provenance={}, engine="openvino")
    assert "d2t" not in load_file(portable / "model.safetensors")
    assert not load_file(special / "model.safetensors")["d2t"].any()
    verdicts = {
        out.name: {e: v["verdict"] for e, v in check(out, target, ["all"])["verdicts"].items()}
        for out in (portable, special)
    }
    assert verdicts["p"] == {"sglang": "pass", "vllm": "pass", "llamacpp": "pass", "openvino": "error"}
    assert verdicts["o"] == {"sglang": "pass", "vllm": "error", "llamacpp": "pass", "openvino": "pass"}
    assert same(load_draft(special, target)[1], state)


def test_a_damaged_file_is_one_sentence(target, tmp_path):
    out = make_draft(tmp_path / "d", target)
    whole = (out / "model.safetensors").read_bytes()
    for damage in (whole[: len(whole) // 2], b"", b"\xff" * 64):
        (out / "model.safetensors").write_bytes(damage)
        with pytest.raises(UsageError, match="cannot be read"):
            load_draft(out, target)
    (out / "model.safetensors").unlink()
    with pytest.raises(UsageError, match="holds neither"):
        load_draft(out, target)
    torch.save({"fc.weight": print}, out / "pytorch_model.bin")
    with pytest.raises(UsageError, match="cannot be read"):
        load_draft(out, target)


def test_a_draft_that_does_not_fit_its_config_is_refused(target, tmp_path):
    out = make_draft(tmp_path / "d", target)
    edit(out, tensors=lambda s: s.pop("midlayer.mlp.up_proj.weight"))
    with pytest.raises(UsageError, match=r"tensors missing: layers\.0\.mlp\.up_proj\.weight"):
        load_draft(out, target)
    out = make_draft(tmp_path / "e", target)
    edit(out, config=lambda c: c.update(num_key_value_heads=4))
    with pytest.raises(UsageError, match="of another shape"):
        load_draft(out, target)


def test_safetensors_of_other_dtypes_are_kept_as_stored(target, tmp_path):
    config = draft_config_for(target, DRAFT_VOCAB)
    state = {n: t.float() if t.is_floating_point() else t for n, t in make_state(config, target).items()}
    out = export(state, config, target, tmp_path / "d", provenance={}, dtype="float32")
    assert json.loads((out / "config.json").read_text())["torch_dtype"] == "float32"
    with safe_open(str(out / "model.safetensors"), "pt") as file:
        assert file.get_tensor("fc.weight").dtype == torch.float32
    save_file(
        {
            n: t.half() if t.is_floating_point() else t.int() if n == "d2t" else t
            for n, t in load_file(out / "model.safetensors").items()
        },
        out / "model.safetensors",
    )
    back = load_draft(out, target)[1]
    assert back["fc.weight"].dtype == torch.float16 and back["d2t"].dtype == torch.int64
    assert back["lm_head.weight"].shape == (DRAFT_VOCAB, HIDDEN)


def test_a_second_layers_norm_is_written_under_the_names_of_both_engines(target, tmp_path):
    config = draft_config_for(target, DRAFT_VOCAB, num_layers=2, attention_bias=True)
    out = export(make_state(config, target), config, target, tmp_path / "d", provenance={})
    stored = load_file(out / "model.safetensors")
    assert torch.equal(stored["layers.1.hidden_norm.weight"], stored["layers.1.input_layernorm.weight"])
    assert (
        stored["layers.1.self_attn.o_proj.bias"].shape == (HIDDEN,)
        and not stored["layers.0.self_attn.o_proj.bias"].any()
    )
    assert check(out, target, ["vllm"])["verdicts"]["vllm"]["verdict"] == "pass"
    edit(out, tensors=lambda s: s["layers.1.hidden_norm.weight"].add_(1))
    with pytest.raises(UsageError, match="holds values of its own"):
        load_draft(out, target)
