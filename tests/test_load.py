"""A draft as each engine loads it, against a second loading written from the engines' own rules."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from serving_parts import DRAFT_VOCAB, HIDDEN, VOCAB, edit, make_draft, make_state, make_target, rename
from test_check import FAULTS

from eyas.draft.config import draft_config_for, rope_parameters
from eyas.draft.model import Draft
from eyas.errors import EyasError, UsageError
from eyas.serving.export import export, load_draft
from eyas.serving.llamacpp import export_gguf
from eyas.serving.load import load_as

ENGINES = ("sglang", "vllm", "llamacpp", "openvino", "trtllm")


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return make_target(tmp_path_factory.mktemp("target"))


# ---- the second loading: names and shapes as the engines' own code has them (SGLang 0.5.23, vLLM 0.32.0) ---------------


def parameters(c, engine):
    """name -> shape of the engine's module tree, fused projections included; NaN is what nobody has set yet."""
    h, heads, kv, d = (c[k] for k in ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim"))
    inner, layers = c["intermediate_size"], c.get("num_hidden_layers", 32)
    eagle = c.get("eagle_config") or {}
    aux = c.get("num_aux_hidden_states") or len(eagle.get("eagle_aux_hidden_state_layer_ids") or []) or 3
    shapes = {"embed_tokens": (c["vocab_size"], h), "fc": (h, aux * c["target_hidden_size"]), "norm": (h,)}
    if eagle.get("norm_before_fc") or c.get("norm_before_fc"):
        shapes["input_norm"] = (aux * c["target_hidden_size"],)
    if c.get("fc_norm") or (engine == "sglang" and c.get("use_aux_norm")):
        shapes |= {f"fc_norm.{i}": (c["target_hidden_size"],) for i in range(aux)}
    for i in range(layers):
        at = f"layers.{i}."
        shapes |= {at + n: (h,) for n in ("input_layernorm", "hidden_norm", "post_attention_layernorm")}
        shapes[at + "self_attn.qkv_proj"] = ((heads + 2 * kv) * d, h * (2 if i == 0 else 1))
        shapes[at + "self_attn.o_proj"] = (h, heads * d)
        shapes[at + "mlp.gate_up_proj"], shapes[at + "mlp.down_proj"] = (2 * inner, h), (h, inner)
    made = {f"model.{n}.weight": torch.full(s, float("nan")) for n, s in shapes.items()}
    for name, tensor in made.items():
        if "norm" in name:
            tensor.fill_(1)
    if not (engine == "sglang" and c.get("tie_word_embeddings")):
        made["lm_head.weight"] = torch.full((c.get("draft_vocab_size") or c["vocab_size"], h), float("nan"))
    return made


def fill(made, name, tensor, c):
    """Put a stored tensor into its place, or its part of a fused one; False when there is no such place."""
    heads, kv, d = (c[k] for k in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    sizes = {"q_proj": heads * d, "k_proj": kv * d, "v_proj": kv * d}
    inner = c["intermediate_size"]
    fused = {"q_proj": (0, "qkv_proj"), "k_proj": (heads * d, "qkv_proj"), "v_proj": ((heads + kv) * d, "qkv_proj")}
    fused |= {"gate_proj": (0, "gate_up_proj"), "up_proj": (inner, "gate_up_proj")}
    for part, (first, whole) in fused.items():
        if f".{part}." in name:
            place = made.get(name.replace(part, whole))
            if place is None:
                return False
            rows = sizes.get(part, inner)
            place[first : first + rows] = tensor[:rows]  # vLLM takes the rows that its config asks for
            return True
    if name not in made:
        return False
    made[name].copy_(tensor)
    return True


def sglang(folder, target):
    c, stored = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    made, ids = parameters(c, "sglang"), None
    for name, tensor in sorted(stored.items()):
        name = name.replace("midlayer", "layers.0")
        if "d2t" in name:
            ids = tensor.long() + torch.arange(len(tensor))
        elif "t2d" not in name and not fill(made, name, tensor, c):
            fill(made, f"model.{name}", tensor, c)
    made["model.embed_tokens.weight"] = target.read_tensor("model.embed_tokens.weight").float()
    if "draft_vocab_size" in c and c["draft_vocab_size"] is None:
        made["lm_head.weight"] = target.read_tensor("lm_head.weight").float()
    return made, ids


def vllm(folder, target):
    c, stored = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    made = parameters(c, "vllm")
    ids = torch.zeros(c.get("draft_vocab_size") or c["vocab_size"], dtype=torch.int64)
    for name, tensor in sorted(stored.items()):
        if "t2d" in name or name.endswith(".bias"):
            continue
        if "d2t" in name:
            ids = tensor.long()
        elif "lm_head" in name:
            fill(made, name, tensor, c)
        elif "input_norm" not in name or "model.input_norm.weight" in made:
            fill(made, f"model.{name}".replace("midlayer.", "layers.0.", 1), tensor, c)
    if "embed_tokens.weight" not in stored:
        made["model.embed_tokens.weight"] = target.read_tensor("model.embed_tokens.weight").float()
    if "lm_head.weight" not in stored:
        made["lm_head.weight"] = target.read_tensor("lm_head.weight").float()[: len(ids)]
    return made, ids + torch.arange(len(ids))


def fused(state):
    """Our state under the engine's fused names."""
    out = {}
    for name, tensor in state.items():
        if any(f".{n}_proj" in name for n in ("k", "v", "up")) or name in ("d2t", "t2d"):
            continue
        for first, rest, whole in (("q_proj", ("k_proj", "v_proj"), "qkv_proj"), ("gate_proj", ("up_proj",), "gate_up_proj")):  # fmt: skip
            if first in name:
                tensor = torch.cat([tensor, *(state[name.replace(first, part)] for part in rest)])
                name = name.replace(first, whole)
        out[name if name == "lm_head.weight" else f"model.{name}"] = tensor
    return out


@pytest.mark.parametrize("second", [sglang, vllm], ids=lambda f: f.__name__)
@pytest.mark.parametrize("fault", FAULTS, ids=[f"{f[0]}: {f[2]}" for f in FAULTS])
def test_the_engines_own_loading_gives_the_same_weights(target, tmp_path, fault, second):
    """Every fault that the engine loads: bit for bit where a tensor was set, anything but NaN where none was."""
    folder = make_draft(tmp_path / "d", target)
    fault[1](folder)
    try:
        config, state, _ = load_as(folder, target, second.__name__)
    except EyasError:
        return  # held to the real engines in test_engines_*
    made, ids = second(folder, target)
    ours = fused(state)
    assert "model.layers.1.hidden_norm.weight" not in ours
    for name in set(made) - set(ours):  # norms that ours leaves out: never read, or skipped
        assert "layers." in name and ("hidden_norm" in name or "input_layernorm" in name), name
    for name, tensor in ours.items():
        if name not in made:  # sglang's tied head, of which its logits processor keeps the first rows
            assert name == "lm_head.weight"
            assert torch.equal(tensor, made["model.embed_tokens.weight"][: len(tensor)])
            continue
        theirs = made[name][: len(tensor)]
        unset = theirs.isnan() & ~tensor.isnan()
        assert torch.equal(theirs[~unset].nan_to_num(), tensor[~unset].nan_to_num()), name
        assert tensor[unset].isfinite().all()
    if config.draft_vocab_size < VOCAB:
        expected = torch.arange(config.draft_vocab_size) if ids is None else ids
        mapped = torch.arange(config.draft_vocab_size) + state["d2t"]
        assert torch.equal(mapped[: len(expected)], expected[: len(mapped)])


# ---- what each engine makes of it --------------------------------------------------------------------------------------


def network(config, state):
    draft = Draft(config)
    draft.load_state_dict(state)
    return draft


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("options", [{}, {"norm_before_residual": True}, {"num_key_value_heads": 1}], ids=str)
def test_a_healthy_draft_is_the_same_everywhere(target, tmp_path, engine, options):
    folder = make_draft(tmp_path / "d", target, **options)
    config, state, notes = load_as(folder, target, engine)
    known, stored = load_draft(folder, target)
    network(config, state)
    assert state.keys() == stored.keys() and all(torch.equal(state[n], stored[n].to(state[n].dtype)) for n in state)
    ignored = "norm_before_residual" in options and engine in ("sglang", "openvino", "trtllm")
    layers = (2, 6, 9) if engine == "openvino" else (1, 5, 8)
    assert config.aux_layers == layers
    same = config.to_dict() | {
        "aux_layers": [1, 5, 8],
        "norm_before_residual": bool(options.get("norm_before_residual")),
    }
    assert same == known.to_dict() and config.norm_before_residual == (same["norm_before_residual"] and not ignored)
    assert bool(notes) == (ignored or engine == "openvino" or (engine == "trtllm" and bool(notes)))


def test_options_are_honoured_where_the_engine_knows_them(target, tmp_path):
    folder = make_draft(tmp_path / "d", target, fc_norm=True, norm_output=True, num_layers=2)
    for engine in ("sglang", "vllm"):
        config, state, _ = load_as(folder, target, engine)
        assert (config, state.keys()) == (load_draft(folder, target)[0], load_draft(folder, target)[1].keys())
    for engine in ("llamacpp", "openvino"):
        with pytest.raises(EyasError, match="one decoder layer only"):
            load_as(folder, target, engine)
    folder = make_draft(tmp_path / "e", target, norm_output=True)
    assert not load_as(folder, target, "llamacpp")[0].norm_output


def test_norms_beyond_the_first_layer(target, tmp_path):
    folder = make_draft(tmp_path / "d", target, num_layers=2)
    edit(folder, tensors=lambda s: s["layers.1.hidden_norm.weight"].fill_(7))
    own = load_file(folder / "model.safetensors")["layers.1.input_layernorm.weight"].float()
    assert torch.equal(load_as(folder, target, "vllm")[1]["layers.1.input_layernorm.weight"], own)
    assert (load_as(folder, target, "sglang")[1]["layers.1.input_layernorm.weight"] == 7).all()


def test_layers_that_each_engine_captures(target, tmp_path):
    folder = make_draft(tmp_path / "d", target, aux_layers=[0, 4, 9])
    assert [load_as(folder, target, e)[0].aux_layers for e in ("sglang", "vllm", "llamacpp")] == [(0, 4, 9)] * 3
    edit(folder, lambda c: [c.pop(k) for k in ("eagle_aux_hidden_state_layer_ids", "num_aux_hidden_states")])
    (folder / "eyas.json").unlink(missing_ok=True)
    assert load_as(folder, target, "sglang")[0].aux_layers == (0, 4, 9)
    config, _, notes = load_as(folder, target, "llamacpp")
    assert config.aux_layers == (1, 5, 8) and "ignores nested ids" in notes[0]
    edit(folder, lambda c: c.update(eagle_aux_hidden_state_layer_ids=[0, 5, 10]))
    with pytest.raises(EyasError, match="embeddings, which no store holds"):
        load_as(folder, target, "llamacpp")


def test_llamacpp_keeps_the_order_of_the_list(target, tmp_path):
    folder = make_draft(tmp_path / "d", target, norm_before_fc=True)
    config, state, _ = load_as(folder, target, "llamacpp")
    edit(folder, lambda c: c.update(eagle_aux_hidden_state_layer_ids=[9, 2, 6]))
    other_config, other, _ = load_as(folder, target, "llamacpp")
    assert other_config == config
    aux = torch.randn(5, 3 * HIDDEN)
    low, mid, high = aux.chunk(3, -1)
    served = network(config, state).fuse(torch.cat([high, low, mid], -1))  # what the engine feeds
    torch.testing.assert_close(network(config, other).fuse(aux), served)


def test_fc_that_is_skipped_and_states_that_are_not_captured(target, tmp_path):
    folder = make_draft(tmp_path / "d", target, aux_layers=[5], norm_before_fc=True)
    config, state, notes = load_as(folder, target, "sglang")
    aux = torch.randn(3, HIDDEN)
    assert torch.equal(network(config, state).fuse(aux), aux) and any("skips fc" in note for note in notes)
    folder = edit(make_draft(tmp_path / "e", target), lambda c: c.update(eagle_config={"use_aux_hidden_state": False}))
    with pytest.raises(EyasError, match="final states instead of auxiliary"):
        load_as(folder, target, "sglang")


def test_embedding_and_head(target, tmp_path):
    embedding, head = (target.read_tensor(n).float() for n in ("model.embed_tokens.weight", "lm_head.weight"))
    folder = make_draft(tmp_path / "d", target)
    edit(folder, tensors=lambda s: s.update({"embed_tokens.weight": torch.full((VOCAB, HIDDEN), 0.5)}))
    for engine in ENGINES:
        own = engine in ("vllm", "llamacpp")
        expected = torch.full((VOCAB, HIDDEN), 0.5) if own else embedding
        assert torch.equal(load_as(folder, target, engine)[1]["embed_tokens.weight"], expected), engine
    folder = edit(make_draft(tmp_path / "h", target), tensors=lambda s: s.pop("lm_head.weight"))
    assert torch.equal(load_as(folder, target, "vllm")[1]["lm_head.weight"], head[:DRAFT_VOCAB])
    assert not torch.equal(load_as(folder, target, "sglang")[1]["lm_head.weight"], head[:DRAFT_VOCAB])
    folder = make_draft(tmp_path / "n", target, hidden_size=16, num_attention_heads=2, head_dim=8)
    stored = load_draft(folder, target)[1]["embed_tokens.weight"].float()
    assert torch.equal(load_as(folder, target, "sglang")[1]["embed_tokens.weight"], stored)


def test_matrices_of_another_size_are_cut_or_filled_up(target, tmp_path):
    """As the engines' tensor-parallel loaders do, without a word; the others assert the shape."""
    folder = make_draft(tmp_path / "d", target)
    stored = {n: t.float() for n, t in load_draft(folder, target)[1].items()}
    up, down = "layers.0.mlp.up_proj.weight", "layers.0.mlp.down_proj.weight"
    edit(folder, lambda c: c.update(intermediate_size=24))
    for engine in ("sglang", "vllm"):
        _, state, notes = load_as(folder, target, engine)
        assert torch.equal(state[up], stored[up][:24]) and torch.equal(state[down], stored[down][:, :24])
        assert any("takes the first part of it" in note for note in notes)
    with pytest.raises(EyasError, match="the shape is asserted"):
        load_as(folder, target, "llamacpp")
    edit(folder, lambda c: c.update(intermediate_size=96))
    state = load_as(folder, target, "sglang")[1]
    assert torch.equal(state[up][:64], stored[up]) and not state[up][64:].any()
    with pytest.raises(EyasError, match="the shape is asserted"):
        load_as(folder, target, "vllm")


def test_other_layouts_and_wrappers(target, tmp_path):
    config = draft_config_for(target, DRAFT_VOCAB)
    state = make_state(config, target)
    speculators = export(state, config, target, tmp_path / "s", provenance={}, layout="speculators")
    edit(speculators, lambda c: c.pop("norm_before_residual"))
    assert load_as(speculators, target, "vllm")[0].norm_before_residual  # that format's default
    with pytest.raises(EyasError, match="no reader for the speculators format"):
        load_as(speculators, target, "sglang")
    eagle = export(state, config, target, tmp_path / "e", provenance={}, layout="eagle")
    assert torch.equal(load_as(eagle, target, "sglang")[1]["fc.weight"], state["fc.weight"].float())
    lost = edit(make_draft(tmp_path / "c", target), tensors=rename("fc.", "_orig_mod.fc."))
    assert not torch.equal(load_as(lost, target, "sglang")[1]["fc.weight"], state["fc.weight"].float())
    with pytest.raises(EyasError, match="no module or parameter"):
        load_as(lost, target, "vllm")
    with pytest.raises(UsageError, match="expected one of sglang"):
        load_as(lost, target, "tgi")


def test_what_our_draft_has_no_place_for_is_told(target, tmp_path):
    folder = edit(make_draft(tmp_path / "d", target), lambda c: c.update(bias=True), lambda s: s.update({"fc.bias": torch.ones(HIDDEN)}))  # fmt: skip
    with pytest.raises(EyasError, match="no place"):
        load_as(folder, target, "sglang")
    with pytest.raises(EyasError, match=r"o_proj\.bias"):
        load_as(folder, target, "vllm")  # which builds that one too and leaves it uninitialised
    edit(folder, lambda c: c.pop("bias"))
    assert any("drops fc.bias" in note for note in load_as(folder, target, "vllm")[2])


def test_a_map_that_leads_nowhere_is_never_right(target, tmp_path):
    folder = edit(make_draft(tmp_path / "d", target), tensors=lambda s: s.update(d2t=s["d2t"][:-3]))
    state = load_as(folder, target, "trtllm")[1]
    ids = state["d2t"] + torch.arange(DRAFT_VOCAB)
    assert (ids[-3:] >= VOCAB).all() and (ids[:-3] < VOCAB).all()


# ---- replay as an engine -----------------------------------------------------------------------------------------------


class Store:
    def __init__(self, layers, width, vocab):
        from draft_parts import random_sample, small_config

        config = small_config(
            target_hidden_size=width, vocab_size=vocab, aux_layers=tuple(layers), target_num_layers=12
        )
        self.meta = {"layers": layers}
        random = np.random.default_rng(0)
        self.samples = {str(i): random_sample(random, str(i), [False] * 4 + [True] * 30, config) for i in range(3)}

    def read(self, name):
        return self.samples[name]


def test_rope_on_a_part_of_each_head(target, tmp_path):
    """SGLang looks for the share beside rope_parameters, vLLM in it; eyas writes both, and turns whole heads by itself."""
    share = {"partial_rotary_factor": 0.5}
    text = {"rope_theta": 5e3, **share}
    assert rope_parameters(text) == {"rope_type": "default", **text}
    config = draft_config_for(make_target(tmp_path / "target", **share), DRAFT_VOCAB)
    assert "partial_rotary_factor" not in config.rope_parameters
    config = replace(config, rope_parameters=config.rope_parameters | share)
    folder = export(make_state(config, target), config, target, tmp_path / "d", provenance={})

    def turned(engine):
        return load_as(folder, target, engine)[0].rope_parameters.get("partial_rotary_factor")

    assert turned("vllm") == turned("sglang") == 0.5
    edit(folder, lambda c: c.pop("partial_rotary_factor"))
    assert (turned("vllm"), turned("sglang")) == (0.5, None)
    with pytest.raises(UsageError, match=r"RoPE of type 'default' on 0.5 of a head has no GGUF form"):
        export_gguf(
            make_state(config, target), config, target, tmp_path / "g", provenance={}, vocabulary=tmp_path / "v"
        )


def test_replay_as_an_engine(target, tmp_path):
    from eyas.decode.replay import replay

    folder = make_draft(tmp_path / "d", target)
    narrow, wide = Store([1, 5, 8], HIDDEN, VOCAB), Store([1, 2, 5, 6, 8, 9], HIDDEN, VOCAB)
    for name, sample in narrow.samples.items():  # the wide store holds the narrow one's layers among others
        wide.samples[name].tokens[:] = sample.tokens
        wide.samples[name].aux[:, [0, 2, 4]] = sample.aux
    own = replay(folder, target, narrow, 3, ["0", "1", "2"], "three")[1]
    found = replay(folder, target, narrow, 3, ["0", "1", "2"], "three", "sglang")[1]
    assert found["protocol"]["loaded_as"] == "as SGLang" and own["protocol"]["loaded_as"] == "own"
    assert replay(folder, target, wide, 3, ["0", "1", "2"], "three", "vllm")[1]["rounds"] == own["rounds"]
    assert found["tau"] == own["tau"] and found["notes"] == []
    with pytest.raises(UsageError, match=r"OpenVINO GenAI gives it layers \[2, 6, 9\].*lacks \[2, 6, 9\]"):
        replay(folder, target, narrow, 3, ["0"], "one", "openvino")
    assert replay(folder, target, wide, 3, ["0", "1", "2"], "three", "openvino")[1]["notes"]
    edit(folder, tensors=lambda s: s["d2t"].__setitem__(-1, 999))  # leads out of the vocabulary: never right
    replay(folder, target, narrow, 3, ["0"], "one", "trtllm")
