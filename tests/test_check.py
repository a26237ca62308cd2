"""The serving contract: every fault is found, with the right verdict in each engine, and healthy drafts pass."""

import json
import re
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from serving_parts import (
    DRAFT_VOCAB,
    HIDDEN,
    LAYERS,
    VOCAB,
    absolute,
    edit,
    make_draft,
    make_state,
    make_target,
    rename,
)

from eyas.draft.config import draft_config_for
from eyas.errors import EyasError, UsageError
from eyas.serving import contract
from eyas.serving.check import check
from eyas.serving.export import export, load_draft
from eyas.serving.fix import fix

ENGINES = ("sglang", "vllm", "llamacpp", "openvino")


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return make_target(tmp_path_factory.mktemp("target"))


def rules(report):
    """engine -> {(rule, severity)} of findings above info, leaving out OpenVINO's own layers, which every draft hears."""
    return {
        engine: {
            (f["rule"], f["severity"]) for f in v["findings"] if f["severity"] != "info" and f["rule"] != "AUX_RUNTIME"
        }
        for engine, v in report["verdicts"].items()
    }


# ---- healthy drafts ----------------------------------------------------------------------------------------------------


def as_speculators(draft, target):
    config, state = load_draft(draft, target)
    return export(state, config, target, draft, provenance={}, layout="speculators")


HEALTHY = {
    "reduced": ({}, None, ENGINES),
    "full vocabulary without a map": ({"vocab": VOCAB}, None, ("sglang", "vllm", "llamacpp")),
    "other layers, both keys": ({"aux_layers": [0, 4, 9]}, None, ("sglang", "vllm", "llamacpp")),
    "rope_parameters only": ({}, lambda d: edit(d, lambda c: c.pop("rope_theta")), ENGINES),
    "rope_theta only": ({}, lambda d: edit(d, lambda c: c.pop("rope_parameters")), ENGINES),
    "layers.0 names": ({}, lambda d: edit(d, tensors=rename("midlayer.", "layers.0.")), ("sglang", "vllm", "llamacpp")),
    "d2t int32": ({}, lambda d: edit(d, tensors=lambda s: s.update(d2t=s["d2t"].int())), ("sglang", "vllm", "llamacpp")),
    "no t2d": ({}, lambda d: edit(d, tensors=lambda s: s.pop("t2d")), ENGINES),
    "two layers": ({"num_layers": 2}, lambda d: edit(d, tensors=lambda s: s.update({"layers.1.hidden_norm.weight": s["layers.1.input_layernorm.weight"].clone()})), ("sglang", "vllm")),
    "four layers": ({"aux_layers": [1, 3, 5, 7]}, None, ("sglang", "vllm")),
    "EAGLE-3.1": ({"fc_norm": True, "norm_output": True}, None, ("sglang", "vllm")),
    "norm before fc": ({"norm_before_fc": True}, None, ("sglang", "vllm", "llamacpp")),
    "norm before residual": ({"norm_before_residual": True}, None, ("vllm", "llamacpp")),
    "own width": ({"hidden_size": 16, "num_attention_heads": 2, "head_dim": 8}, None, ("sglang", "vllm", "llamacpp")),
    "other key/value heads": ({"num_key_value_heads": 1}, None, ENGINES),
    "longer context": ({}, lambda d: edit(d, lambda c: c.update(max_position_embeddings=4096)), ENGINES),
    "null rope_scaling and layer ids": ({}, lambda d: edit(d, lambda c: c.update(rope_scaling=None, eagle_aux_hidden_state_layer_ids=None)), ENGINES),
}  # fmt: skip


@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_drafts_raise_no_alarm(target, tmp_path, name):
    options, change, engines = HEALTHY[name]
    draft = make_draft(tmp_path / "d", target, **{"vocab": DRAFT_VOCAB} | options)
    if change:
        change(draft)
    found = rules(check(draft, target, list(engines)))
    assert found == {engine: set() for engine in engines}
    alone = rules(check(draft, None, list(engines)))
    assert alone == {engine: set() for engine in engines}


def test_an_identity_map_beside_a_full_vocabulary_is_right_except_in_vllm(target, tmp_path):
    draft = make_draft(tmp_path / "d", target, VOCAB)
    edit(
        draft,
        tensors=lambda s: s.update(d2t=torch.zeros(VOCAB, dtype=torch.int64), t2d=torch.ones(VOCAB, dtype=torch.bool)),
    )
    found = rules(check(draft, target, ["all"]))
    assert found == {"sglang": set(), "vllm": {("D2T_EXTRA", "error")}, "llamacpp": set(), "openvino": set()}


def test_an_embedding_equal_to_the_targets_is_only_told(target, tmp_path):
    config = draft_config_for(target, DRAFT_VOCAB)
    draft = export(make_state(config, target), config, target, tmp_path / "d", provenance={}, embed=True)
    for verdict in check(draft, target, ["all"])["verdicts"].values():
        assert [(f["rule"], f["severity"]) for f in verdict["findings"] if f["rule"].startswith("EMBED")] == [
            ("EMBED_SAME", "info")
        ]


def test_speculators_and_eagle_layouts(target, tmp_path):
    config = draft_config_for(target, DRAFT_VOCAB)
    state = make_state(config, target)
    plain = export(state, config, target, tmp_path / "s", provenance={}, layout="speculators")
    found = rules(check(plain, target, ["all"]))
    assert found["vllm"] == found["llamacpp"] == set() and ("SPECULATORS", "error") in found["sglang"]
    assert {("SPECULATORS", "error"), ("NAME_LAYERS", "error")} <= found["openvino"]
    edit(plain, lambda c: c.pop("norm_before_residual"))  # the default of that format is true
    assert ("NBR", "error") in rules(check(plain, target, ["sglang"]))["sglang"]
    eagle = export(state, config, target, tmp_path / "e", provenance={}, layout="eagle")
    assert rules(check(eagle, target, ["all"])) == {engine: set() for engine in ENGINES}


# ---- one fault at a time -----------------------------------------------------------------------------------------------

E, W, OK = "error", "warn", None


def put(**keys):
    return lambda d: edit(d, lambda c: c.update(keys))


def drop(*keys):
    return lambda d: edit(d, lambda c: [c.pop(key, None) for key in keys])


def weights(change):
    return lambda d: edit(d, tensors=change)


def lose(*found):
    return weights(lambda s: [s.pop(name) for name in found])


def nested(*ids):
    return put(eagle_config={"eagle_aux_hidden_state_layer_ids": list(ids)})


def offsets(values):
    return weights(
        lambda s: s.update(d2t=torch.tensor(values, dtype=torch.int64) if isinstance(values, list) else values)
    )


def scrambled(state):
    state["d2t"][:2] = state["d2t"][[1, 0]] + torch.tensor([1, -1])


def own_embedding(scale):
    def change(state):
        noise = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(5))
        state["embed_tokens.weight"] = noise.to(torch.bfloat16) * scale

    return change


Q = "midlayer.self_attn.q_proj"
# (what, breakage, rule, verdict in SGLang, vLLM, llama.cpp, OpenVINO)
FAULTS = [
    ("target's class", put(architectures=["Qwen3ForCausalLM"]), "ARCH", E, E, E, E),
    ("plain Llama", put(architectures=["LlamaForCausalLM"]), "ARCH", E, OK, OK, E),
    ("vLLM's name", put(architectures=["Eagle3LlamaForCausalLM"]), "ARCH", E, OK, OK, OK),
    ("no class", drop("architectures"), "ARCH_MISSING", E, E, E, E),
    ("no draft_vocab_size", drop("draft_vocab_size"), "DVOCAB_MISSING", E, OK, E, E),
    ("no draft_vocab_size, shape", drop("draft_vocab_size"), "LMHEAD_SHAPE", E, E, OK, E),
    ("null draft_vocab_size", put(draft_vocab_size=None), "DVOCAB_NULL", W, OK, OK, E),
    ("negative draft_vocab_size", put(draft_vocab_size=-1), "DVOCAB_RANGE", E, E, E, E),
    ("head of another size", put(draft_vocab_size=DRAFT_VOCAB - 1), "LMHEAD_SHAPE", E, E, OK, E),
    ("no head", lose("lm_head.weight"), "LMHEAD_MISSING", E, E, E, E),
    ("vocabulary not the target's", put(vocab_size=VOCAB + 1), "VOCAB", W, W, W, E),
    ("vocabulary too small", put(vocab_size=VOCAB - 1), "VOCAB", W, E, W, E),
    ("no model_type", drop("model_type"), "MODEL_TYPE", E, E, OK, E),
    ("fc_norm, flag off", weights(lambda s: s.update({f"fc_norm.{i}.weight": torch.ones(HIDDEN) for i in range(3)})), "FLAG_TENSOR", E, E, E, E),
    ("null width", put(target_hidden_size=None), "NULL", E, E, OK, E),
    ("null use_cache", put(use_cache=None), "NULL", E, E, OK, E),
    ("no num_hidden_layers", drop("num_hidden_layers"), "NHL_MISSING", E, E, E, E),
    ("40 layers in the config", put(num_hidden_layers=40), "MISSING", E, E, E, E),
    ("heads do not divide", put(num_attention_heads=5), "HEADS", E, E, OK, E),
    ("head_dim", put(head_dim=16), "SHAPE", E, E, E, E),
    ("too few key/value heads", put(num_key_value_heads=1), "SHAPE", E, E, E, E),
    ("context of the training run", put(max_position_embeddings=128), "MAXPOS", E, W, W, W),
    ("no context", drop("max_position_embeddings"), "MAXPOS", OK, OK, OK, OK),
    ("no dtype", drop("dtype", "torch_dtype"), "DTYPE", W, OK, OK, OK),
    ("float32 beside bfloat16", put(dtype="float32", torch_dtype="float32"), "DTYPE", W, OK, OK, OK),
    ("tied head", put(tie_word_embeddings=True), "TIE", E, W, OK, W),
    ("norm_before_residual", put(norm_before_residual=True), "NBR", E, OK, OK, E),
    ("norm_output", put(norm_output=True), "NORMOUT", OK, OK, E, E),
    ("no aux states", put(eagle_config={"use_aux_hidden_state": False}), "USE_AUX_FALSE", E, E, E, E),
    ("window", put(sliding_window=64, layer_types=["sliding_attention"]), "WINDOW", W, OK, W, W),
    ("gelu", put(hidden_act="gelu"), "ACT", E, E, E, OK),
    # the map
    ("absolute map", weights(absolute), "D2T_ABSOLUTE", E, E, E, E),
    ("absolute map, no t2d", weights(lambda s: (absolute(s), s.pop("t2d"))), "D2T_ABSOLUTE", E, E, E, E),
    ("arange", offsets(list(range(DRAFT_VOCAB))), "D2T_ABSOLUTE", E, E, E, E),
    ("zeros", offsets([0] * DRAFT_VOCAB), "D2T_PREFIX", E, E, E, E),
    ("no map", lose("d2t", "t2d"), "D2T_MISSING", E, E, E, E),
    ("float map", weights(lambda s: s.update(d2t=s["d2t"].float())), "D2T_FORM", W, W, W, E),
    ("short map", weights(lambda s: s.update(d2t=s["d2t"][:-1])), "D2T_FORM", E, E, E, E),
    ("out of range", weights(lambda s: s["d2t"].__setitem__(-1, 99)), "D2T_FORM", E, E, E, E),
    ("doubled", weights(lambda s: s["d2t"].__setitem__(1, s["d2t"][0] - 1)), "D2T_FORM", E, E, E, E),
    ("unsorted", weights(scrambled), "D2T_FORM", E, E, E, E),
    ("stale t2d", weights(lambda s: s.update(t2d=~s["t2d"])), "D2T_T2D", W, W, W, W),
    # tensors and names
    ("no norm", lose("norm.weight"), "MISSING", E, E, E, E),
    ("no fc", lose("fc.weight"), "MISSING", E, E, E, E),
    ("no down_proj", lose("midlayer.mlp.down_proj.weight"), "MISSING", E, E, E, E),
    ("whole layer lost", weights(lambda s: [s.pop(n) for n in list(s) if n.startswith("midlayer.") and "hidden_norm" not in n]), "MISSING", E, E, E, E),
    ("layer.0 names", weights(rename("midlayer.", "layer.0.")), "MISSING", E, E, E, E),
    ("layers.1 names", weights(rename("midlayer.", "layers.1.")), "MISSING", E, E, E, E),
    ("model. before fc", weights(rename("fc.", "model.fc.")), "NAME_MODEL_PREFIX", OK, E, OK, OK),
    ("model. before all", weights(rename("", "model.")), "NAME_MODEL_PREFIX", OK, E, E, OK),
    ("model. before the head", weights(rename("lm_head.", "model.lm_head.")), "NAME_UNKNOWN", E, OK, OK, OK),
    ("layers.0 names", weights(rename("midlayer.", "layers.0.")), "NAME_LAYERS", OK, OK, OK, E),
    ("compiled", weights(rename("", "_orig_mod.")), "NAME_WRAPPER", E, E, E, E),
    ("module.", weights(rename("", "module.")), "NAME_WRAPPER", E, E, E, E),
    ("FSDP", weights(rename("midlayer.", "midlayer._fsdp_wrapped_module.")), "NAME_WRAPPER", E, E, E, E),
    ("PEFT", weights(rename("", "base_model.model.")), "NAME_WRAPPER", E, E, E, E),
    ("adapter", weights(lambda s: s.update({f"{Q}.lora_A.weight": torch.ones(2, 2)})), "ADAPTER", E, E, E, E),
    ("unknown tensor", weights(lambda s: s.update({"extra.weight": torch.ones(2)})), "NAME_UNKNOWN", W, E, E, W),
    ("teacher's head", weights(lambda s: s.update({"verifier_lm_head.weight": torch.ones(2, 2)})), "NAME_UNKNOWN", OK, E, E, OK),
    ("fc transposed", weights(lambda s: s.update({"fc.weight": s["fc.weight"].T})), "NAUX_KEYS", E, E, E, E),
    ("q bias", weights(lambda s: s.update({f"{Q}.bias": torch.ones(HIDDEN)})), "QKV_BIAS", E, E, E, E),
    ("fc bias", weights(lambda s: s.update({"fc.bias": torch.ones(HIDDEN)})), "FC_BIAS", E, E, E, E),
    ("query norm", weights(lambda s: s.update({"midlayer.self_attn.q_norm.weight": torch.ones(8)})), "QK_NORM", E, E, E, E),
    ("input_norm, flag off", weights(lambda s: s.update({"input_norm.weight": torch.ones(3 * HIDDEN)})), "FLAG_TENSOR", E, E, E, E),
    ("NaN in fc", weights(lambda s: s["fc.weight"].__setitem__((0, 0), float("nan"))), "NONFINITE", E, E, E, E),
    ("zeros in fc", weights(lambda s: s["fc.weight"].zero_()), "ZERO", W, W, W, W),
    ("two names", weights(lambda s: s.update({"layers.0.mlp.up_proj.weight": s["midlayer.mlp.up_proj.weight"].clone()})), "TWICE", W, W, W, W),
    # the embedding
    ("random embedding", weights(own_embedding(0.02)), "EMBED_RANDOM", OK, E, E, OK),
    ("embedding of another vocabulary", weights(lambda s: s.update({"embed_tokens.weight": torch.ones(VOCAB + 3, HIDDEN)})), "EMBED_SHAPE", E, E, W, E),
    # RoPE
    ("library default theta", put(rope_theta=10000.0, rope_parameters={"rope_type": "default", "rope_theta": 10000.0}), "ROPE", W, W, W, W),
    ("no theta", drop("rope_theta", "rope_parameters"), "ROPE_MISSING", W, W, W, W),
    ("one per attention type", put(rope_parameters={"full_attention": {"rope_type": "default", "rope_theta": 5e4}, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}), "ROPE_NESTED", W, W, W, W),
    ("mrope", put(rope_parameters={"rope_type": "default", "rope_theta": 5e4, "mrope_section": [1, 1, 2]}), "MROPE", OK, E, OK, OK),
    # auxiliary layers: out(1), out(5), out(8) by default
    ("ids nested only", nested(0, 4, 9), "AUX_KEY", OK, W, E, OK),
    ("ids at the top only", put(eagle_aux_hidden_state_layer_ids=[1, 5, 10]), "AUX_KEY2", E, OK, OK, OK),
    ("the same ids in both", lambda d: (nested(0, 4, 9)(d), put(eagle_aux_hidden_state_layer_ids=[0, 4, 9])(d)), "AUX_CONV", E, E, E, E),
    ("not ascending", put(eagle_aux_hidden_state_layer_ids=[9, 6, 2]), "AUX_ORDER", OK, W, W, OK),
    ("the last layer", nested(1, 5, LAYERS - 1), "AUX_LAST", E, OK, OK, OK),
    ("beyond the last layer", put(eagle_aux_hidden_state_layer_ids=[2, 6, 13]), "AUX_LAST", OK, E, E, OK),
    ("four ids, fc of three", put(eagle_aux_hidden_state_layer_ids=[2, 4, 6, 9]), "AUX_COUNT", OK, E, E, OK),
]  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS, ids=[f"{f[0]}: {f[2]}" for f in FAULTS])
def test_each_fault_is_found_where_it_matters(target, tmp_path, fault):
    _, breakage, rule, *expected = fault
    draft = make_draft(tmp_path / "d", target)
    breakage(draft)
    report = check(draft, target, ["all"])
    found = {}
    for engine in ENGINES:
        severities = [f["severity"] for f in report["verdicts"][engine]["findings"] if f["rule"] == rule]
        found[engine] = next((s for s in (E, W) if s in severities), None)
    assert found == dict(zip(ENGINES, expected, strict=True))
    for engine in ENGINES:  # the verdict is the worst finding, and every finding says what happens in this engine
        verdict = report["verdicts"][engine]
        worst = {f["severity"] for f in verdict["findings"]}
        assert verdict["verdict"] == (E if E in worst else W if W in worst else "pass")
        assert all(contract.ENGINES[engine].title in f["message"] and f["outcome"] for f in verdict["findings"])


def test_a_full_vocabulary_head_that_is_missing(target, tmp_path):
    draft = make_draft(tmp_path / "d", target, VOCAB)
    edit(draft, tensors=lambda s: s.pop("lm_head.weight"))
    found = rules(check(draft, target, ["all"]))
    assert ("LMHEAD_MISSING", "error") in found["sglang"] and found["vllm"] == {("LMHEAD_MISSING", "warn")}


def test_a_trained_embedding_is_kept_or_replaced(target, tmp_path):
    draft = make_draft(tmp_path / "d", target)
    edit(
        draft,
        tensors=lambda s: s.update({"embed_tokens.weight": target.read_tensor("model.embed_tokens.weight") * 1.05}),
    )
    found = rules(check(draft, target, ["all"]))
    assert found["sglang"] == {("EMBED_OWN", "warn")} and found["vllm"] == set()


def test_a_narrow_draft_needs_its_embedding(target, tmp_path):
    draft = make_draft(tmp_path / "d", target, hidden_size=16, num_attention_heads=2, head_dim=8)
    edit(draft, tensors=lambda s: s.pop("embed_tokens.weight"))
    assert all(("EMBED_MISSING_NARROW", "error") in found for found in rules(check(draft, target, ["all"])).values())


@pytest.mark.parametrize(
    ("options", "rule", "engines"),
    [
        ({"fc_norm": True}, "FCNORM", ("llamacpp", "openvino")),
        ({"norm_before_fc": True}, "NBFC", ("openvino",)),
        ({"num_layers": 2}, "LAYERS", ("llamacpp", "openvino")),
        ({"aux_layers": [1, 3, 5, 7]}, "NAUX", ("llamacpp", "openvino")),
        ({"attention_bias": True}, "QKV_BIAS", ("sglang", "llamacpp", "openvino")),
        ({"aux_layers": [5]}, "NAUX_BYPASS", ("sglang",)),
    ],
)
def test_options_that_some_engines_do_not_serve(target, tmp_path, options, rule, engines):
    report = check(make_draft(tmp_path / "d", target, **options), target, ["all"])
    found = {
        e
        for e, v in report["verdicts"].items()
        if (rule, "error") in {(f["rule"], f["severity"]) for f in v["findings"]}
    }
    assert found == set(engines)


def test_norm_before_fc_written_nested_only(target, tmp_path):
    draft = edit(make_draft(tmp_path / "d", target, norm_before_fc=True), lambda c: c.pop("norm_before_fc"))
    assert ("NBFC_PLACE", "error") in rules(check(draft, target, ["llamacpp"]))["llamacpp"]
    assert rules(check(draft, target, ["sglang", "vllm"])) == {"sglang": set(), "vllm": set()}


def test_a_shallow_target_loses_a_default_layer(tmp_path):
    target = make_target(tmp_path / "t")
    raw = json.loads((target.path / "config.json").read_text())
    (target.path / "config.json").write_text(json.dumps(raw | {"num_hidden_layers": 6}))
    from eyas.target import read_target

    shallow = read_target(target.path)
    draft = make_draft(tmp_path / "d", shallow, aux_layers=[1, 2, 3])
    assert rules(check(draft, shallow, ["vllm"]))["vllm"] == set()
    edit(
        draft,
        lambda c: [c.pop(k) for k in ("eagle_config", "eagle_aux_hidden_state_layer_ids", "num_aux_hidden_states")],
    )
    assert ("AUX_COUNT", "error") in rules(check(draft, shallow, ["vllm"]))["vllm"]


def test_targets_that_an_engine_cannot_read(tmp_path):
    target = make_target(tmp_path / "t", model_type="gemma3_text", architectures=["Gemma3ForCausalLM"])
    draft = make_draft(tmp_path / "d", target)
    found = rules(check(draft, target, ["all"]))
    assert {engine for engine in ENGINES if ("TARGET_ARCH", "error") in found[engine]} == {"vllm", "llamacpp"}
    moe = make_target(tmp_path / "m", architectures=["Qwen3MoeForCausalLM"], num_experts=8)
    assert ("TARGET_ARCH", "error") in rules(check(make_draft(tmp_path / "e", moe), moe, ["openvino"]))["openvino"]
    rotated = make_target(tmp_path / "r", quantization_config={"quant_method": "quarot"})
    assert ("TARGET_ROTATED", "warn") in rules(check(make_draft(tmp_path / "f", rotated), rotated, ["vllm"]))["vllm"]


def test_a_deepseek_target_reads_nested_ids_its_own_way(tmp_path):
    target = make_target(tmp_path / "t", architectures=["DeepseekV3ForCausalLM"], model_type="deepseek_v3")
    draft = make_draft(tmp_path / "d", target, aux_layers=[2, 5, 8])
    assert rules(check(draft, target, ["sglang", "vllm"])) == {"sglang": set(), "vllm": set()}
    edit(draft, lambda c: c["eagle_config"].update(eagle_aux_hidden_state_layer_ids=[2, 5, 8]))  # read as in(v) here
    assert ("AUX_CONV", "error") in rules(check(draft, target, ["sglang"]))["sglang"]


def test_the_drafts_own_record_settles_which_layers_are_right(target, tmp_path):
    draft = make_draft(tmp_path / "d", target, keep_record=True, aux_layers=[0, 4, 9])
    edit(draft, lambda c: c["eagle_config"].update(eagle_aux_hidden_state_layer_ids=[1, 5, 10]))
    found = rules(check(draft, target, ["sglang", "vllm"]))
    assert found == {"sglang": {("AUX_OTHER", "error")}, "vllm": set()}


def test_a_latent_attention_draft(target, tmp_path):
    sizes = {"q_lora_rank": 6, "kv_lora_rank": 10, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
    draft = make_draft(tmp_path / "d", target)
    attention = {
        "q_a_proj": (6, 2 * HIDDEN), "q_a_layernorm": (6,), "q_b_proj": (4 * 12, 6), "kv_a_proj_with_mqa": (14, 2 * HIDDEN),
        "kv_a_layernorm": (10,), "kv_b_proj": (4 * 16, 10), "o_proj": (HIDDEN, 32),
    }  # fmt: skip

    def latent(state):
        for name in [name for name in state if "self_attn" in name]:
            del state[name]
        state.update(
            {f"midlayer.self_attn.{n}.weight": torch.ones(s, dtype=torch.bfloat16) for n, s in attention.items()}
        )

    edit(draft, lambda c: c.update(sizes | {"architectures": ["Eagle3DeepseekV2ForCausalLM"]}), latent)
    found = rules(check(draft, target, ["all"]))
    assert found["sglang"] == found["vllm"] == set() and ("MLA", "error") in found["llamacpp"]
    edit(draft, tensors=lambda s: s.pop("midlayer.self_attn.kv_b_proj.weight"))
    assert {("MISSING", "error")} == rules(check(draft, target, ["sglang"]))["sglang"]


# ---- files -------------------------------------------------------------------------------------------------------------


def header_of(file, change):
    data = file.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda f: f.write_bytes(f.read_bytes()[:-1000]), "cut off"),
        (lambda f: f.write_bytes(f.read_bytes()[:20]), "cut off in its header"),
        (lambda f: f.write_bytes(b""), "not a safetensors file"),
        (lambda f: f.write_bytes(f.read_bytes() + b"x"), "foreign bytes"),
        (lambda f: f.write_bytes(struct.pack("<Q", 12) + b"not json at all"), "header is not valid"),
        (lambda f: header_of(f, lambda h: h["fc.weight"].update(shape=[1, 1])), "fc.weight takes"),
        (lambda f: header_of(f, lambda h: h["fc.weight"].update(dtype="F31")), "unknown dtype F31"),
        (lambda f: f.unlink(), "neither model.safetensors nor pytorch_model.bin"),
        (lambda f: (f.unlink(), (f.parent / "__0_0.distcp").write_bytes(b"")), "consolidate it first"),
        (lambda f: (f.parent / "config.json").unlink(), "config.json is not there"),
        (lambda f: (f.parent / "config.json").write_text("{"), "config.json is not valid JSON"),
    ],
)
def test_damaged_files_are_errors_everywhere(target, tmp_path, damage, told):
    draft = make_draft(tmp_path / "d", target)
    damage(draft / "model.safetensors")
    for verdict in check(draft, target, ["all"])["verdicts"].values():
        assert verdict["verdict"] == "error" and told in verdict["findings"][0]["message"]


def test_an_index_that_leaves_its_folder_is_a_finding(target, tmp_path):
    draft = make_draft(tmp_path / "d", target)
    index = {"weight_map": {"fc.weight": "../../other.safetensors"}}
    (draft / "model.safetensors.index.json").write_text(json.dumps(index))
    for verdict in check(draft, target, ["all"])["verdicts"].values():
        assert verdict["verdict"] == "error" and "points outside its folder" in verdict["findings"][0]["message"]


def test_something_else_than_a_draft(target):
    report = check(target.path, target, ["vllm"])
    assert [f["rule"] for f in report["verdicts"]["vllm"]["findings"]] == ["NOT_A_DRAFT"]
    with pytest.raises(UsageError, match="no such folder"):
        check("/nowhere/at/all", None, ["all"])
    with pytest.raises(UsageError, match="expected one of sglang"):
        check(target.path, None, ["tgi"])


def test_a_bin_is_read_without_running_its_pickle(target, tmp_path):
    config = draft_config_for(target, DRAFT_VOCAB)
    state = make_state(config, target)
    draft = export(state, config, target, tmp_path / "d", provenance={}, layout="eagle")
    stored = torch.load(draft / "pytorch_model.bin", weights_only=True)
    absolute(stored)  # the map's values are read from the archive, bit for bit
    torch.save(stored, draft / "pytorch_model.bin")
    assert ("D2T_ABSOLUTE", "error") in rules(check(draft, target, ["sglang"]))["sglang"]

    class Bomb:
        def __reduce__(self):
            return (open, (str(tmp_path / "exploded"), "w"))

    torch.save({"fc.weight": Bomb()}, draft / "pytorch_model.bin")
    message = check(draft, target, ["vllm"])["verdicts"]["vllm"]["findings"][0]["message"]
    assert "only plain tensors are read" in message and not (tmp_path / "exploded").exists()
    (draft / "pytorch_model.bin").write_bytes((draft / "pytorch_model.bin").read_bytes()[:200])
    assert "cut off" in check(draft, target, ["vllm"])["verdicts"]["vllm"]["findings"][0]["message"]


def test_a_file_of_two_gigabytes_is_judged_by_its_header(tmp_path):
    """A sparse file of 2 GB: the check stays below 200 MB of memory and never imports torch."""
    draft = tmp_path / "big"
    draft.mkdir()
    hidden, vocab = 4096, 128000
    config = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": hidden, "num_hidden_layers": 1,
        "intermediate_size": 4 * hidden, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "vocab_size": vocab, "draft_vocab_size": vocab, "dtype": "bfloat16", "max_position_embeddings": 8192,
    }  # fmt: skip
    (draft / "config.json").write_text(json.dumps(config))
    from eyas.draft.config import DraftConfig
    from eyas.serving import names

    shapes = names.expected_shapes(DraftConfig(hidden, hidden, vocab, vocab, 32, 8, 128, 4 * hidden, (1, 15, 28), 32))
    header, place = {}, 0
    for name, shape in shapes.items():
        size = 2 * int(torch.tensor(shape).prod())
        header[names.to_portable(name)] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [place, place + size]}
        place += size
    text = json.dumps(header).encode()
    with open(draft / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + place)
    assert place > 2e9
    code = (
        "import sys, json; from eyas.serving.check import check; r = check(sys.argv[1], None, ['all']);"
        "assert 'torch' not in sys.modules; peak = open('/proc/self/status').read().split('VmHWM:')[1].split()[0];"
        "print(json.dumps([r['verdicts']['sglang']['verdict'], int(peak)]))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(draft)], capture_output=True, text=True, check=True)
    verdict, kilobytes = json.loads(done.stdout)
    assert verdict == "warn" and kilobytes < 200_000  # warn: the sparse weights are zeros


# ---- repair ------------------------------------------------------------------------------------------------------------

REPAIRS = [
    "target's class", "plain Llama", "vLLM's name", "no class", "no draft_vocab_size", "null draft_vocab_size",
    "head of another size", "vocabulary not the target's", "null width", "null use_cache", "no num_hidden_layers",
    "40 layers in the config", "head_dim", "too few key/value heads", "context of the training run", "no dtype",
    "tied head", "absolute map", "absolute map, no t2d", "float map", "model. before all", "model. before the head",
    "layers.0 names", "compiled", "module.", "FSDP", "PEFT", "teacher's head", "ids at the top only",
]  # fmt: skip


@pytest.mark.parametrize("name", REPAIRS)
def test_certain_faults_are_repaired_to_the_same_draft(target, tmp_path, name):
    breakage = next(f[1] for f in FAULTS if f[0] == name)
    options = {"aux_layers": [0, 4, 9]} if name == "ids at the top only" else {}
    draft = make_draft(tmp_path / "d", target, **options)
    before_config, before = load_draft(draft, target)
    if options:
        edit(draft, lambda c: (c.pop("eagle_config"), c.pop("num_aux_hidden_states")))
    else:
        breakage(draft)
    report = fix(draft, tmp_path / "fixed", target)
    assert report["changed"] and report["left"] == []
    config, state = load_draft(tmp_path / "fixed", target)
    assert (
        config == before_config
        and all(torch.equal(state[n], before[n]) for n in before)
        and state.keys() == before.keys()
    )
    assert not any(rules(check(tmp_path / "fixed", target, ["all"])).values())


def test_layouts_become_portable_and_a_map_is_rebuilt_from_its_mask(target, tmp_path):
    config = draft_config_for(target, DRAFT_VOCAB)
    state = make_state(config, target)
    for layout in ("eagle", "speculators"):
        draft = export(state, config, target, tmp_path / layout, provenance={}, layout=layout)
        assert fix(draft, tmp_path / f"{layout}-fixed", target)["left"] == []
        back = load_draft(tmp_path / f"{layout}-fixed", target)[1]
        assert all(torch.equal(back[n], state[n]) for n in state)
    edit(tmp_path / "speculators", tensors=lambda s: s.pop("d2t"))
    fix(tmp_path / "speculators", tmp_path / "again", target)
    assert torch.equal(load_file(tmp_path / "again" / "model.safetensors")["d2t"], state["d2t"])


def test_an_identity_map_beside_a_full_vocabulary_goes(target, tmp_path):
    draft = make_draft(tmp_path / "d", target, VOCAB)
    edit(draft, tensors=lambda s: s.update(d2t=torch.zeros(VOCAB, dtype=torch.int64)))
    fix(draft, tmp_path / "f", target)
    assert rules(check(tmp_path / "f", target, ["vllm"]))["vllm"] == set()


@pytest.mark.parametrize(
    "name", ["no fc", "zeros", "stale t2d", "NaN in fc", "the same ids in both", "norm_before_residual"]
)
def test_what_is_in_doubt_is_left_and_told(target, tmp_path, name):
    draft = make_draft(tmp_path / "d", target)
    next(f[1] for f in FAULTS if f[0] == name)(draft)
    report = fix(draft, tmp_path / "f", target)
    again = rules(check(tmp_path / "f", target, ["all"]))
    assert any(again.values()) and (report["left"] or name == "stale t2d")


def test_a_draft_that_cannot_be_read_is_not_repaired(target, tmp_path):
    draft = make_draft(tmp_path / "d", target)
    file = draft / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(EyasError, match="cut off"):
        fix(draft, tmp_path / "f", target)
    assert not (tmp_path / "f").exists()
    save_file({"fc.weight": torch.ones(1), "model.fc.weight": torch.ones(1)}, file)
    with pytest.raises(EyasError, match="two tensors are called"):
        fix(draft, tmp_path / "f", target)


def test_the_table_of_effects_is_whole():
    """Every row names known engines, severities and outcomes, and every condition that check finds has a row."""
    outcomes = {"raises", "raises late", "random", "drops", "replaced", "differs", "harmless"}
    for rule, effects in contract.EFFECTS.items():
        assert effects.keys() <= contract.ENGINES.keys(), rule
        assert all(
            kind in ("error", "warn", "info") and outcome in outcomes for kind, outcome, _ in effects.values()
        ), rule
    source = Path(contract.__file__).with_name("check.py").read_text("utf-8")
    keys = set(re.findall(r'(?:Hit\(|key = |key, fix = )"([A-Z0-9_]+(?::\w+)?)"', source))
    assert len(keys) > 50 and keys <= contract.EFFECTS.keys()
