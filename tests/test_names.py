"""The adapter between layouts: names and configs go out and come back unchanged, ids mean what each engine reads."""

import itertools
import json
import subprocess
import sys

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from serving_parts import make_target

from eyas.draft.config import DraftConfig, draft_config_for
from eyas.errors import UsageError
from eyas.serving import contract, names
from eyas.serving.contract import ENGINES
from eyas.target import Target


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return make_target(tmp_path_factory.mktemp("target"))


def fake(architecture="LlamaForCausalLM", layers=32, model_type="llama", tmp="."):
    text = {
        "hidden_size": 64, "num_hidden_layers": layers, "vocab_size": 100, "num_attention_heads": 4, "model_type": model_type,
        "intermediate_size": 128, "max_position_embeddings": 4096,
    }  # fmt: skip
    return Target(tmp, {"architectures": [architecture], **text}, text)


internal = st.builds(
    lambda draft: draft,
    st.sampled_from(
        sorted(names.expected_shapes(draft_config_for(fake(), 50, num_layers=3, qk_norm=True, attention_bias=True)))
    ),
)
wrappers = st.lists(st.sampled_from(["module.", "model.", "base_model.model.", "draft_model."]), max_size=3)


@given(internal, wrappers, st.booleans(), st.sampled_from([1, 3]))
def test_every_layout_and_wrapper_leads_back_to_the_internal_name(name, leading, compiled, num_layers):
    if num_layers == 1 and name.startswith(("layers.1.", "layers.2.")):
        return
    stored = "".join(leading) + names.to_portable(name, num_layers)
    if compiled:
        stored = "_orig_mod." + stored.replace("self_attn.", "self_attn._fsdp_wrapped_module.")
    assert names.from_any(stored) == name


def test_a_midlayer_exists_only_in_a_draft_of_one_layer():
    assert names.to_portable("layers.0.mlp.up_proj.weight") == "midlayer.mlp.up_proj.weight"
    assert names.to_portable("layers.0.mlp.up_proj.weight", 2) == "layers.0.mlp.up_proj.weight"
    assert names.from_any("aux_norm_mid.weight") == "fc_norm.1.weight"


options = st.fixed_dictionaries(
    {
        "norm_before_residual": st.booleans(), "norm_before_fc": st.booleans(), "fc_norm": st.booleans(),
        "norm_output": st.booleans(), "attention_bias": st.booleans(), "num_layers": st.integers(1, 3),
        "qk_norm": st.booleans(), "sliding_window": st.sampled_from([None, 64]),
    }
)  # fmt: skip
ROPES = [
    {"rope_type": "default", "rope_theta": 1e6},
    {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
    {"rope_type": "yarn", "rope_theta": 5e4, "factor": 64.0, "beta_fast": 32.0, "original_max_position_embeddings": 4096},
]  # fmt: skip
architectures = st.sampled_from(
    [
        "LlamaForCausalLM",
        "DeepseekV3ForCausalLM",
        "GptOssForCausalLM",
        "KimiK25ForConditionalGeneration",
        "MiniMaxM3VLForConditionalGeneration",
    ]
)


@settings(deadline=None)
@given(
    options,
    st.sampled_from(ROPES),
    architectures,
    st.sets(st.integers(0, 30), min_size=1, max_size=4),
    st.sampled_from([50, 100]),
)
def test_a_config_comes_back_from_every_form(flags, rope, architecture, layers, vocab):
    target = fake(architecture)
    assume(layers != {0})  # SGLang's DeepSeek classes read the lone id 1 as out(1): out(0) alone has no spelling there
    config = draft_config_for(target, vocab, aux_layers=sorted(layers), **flags)
    config = DraftConfig.from_dict(config.to_dict() | {"rope_parameters": rope})
    for make in (names.portable_config, names.speculators_config):
        written = json.loads(json.dumps(make(config, target=target)))
        assert names.draft_config_from(written, target) == config


@pytest.mark.parametrize("rope", ROPES, ids=lambda rope: rope["rope_type"])
def test_both_spellings_of_rope_say_the_same_to_transformers(rope):
    from transformers import LlamaConfig

    from eyas.draft.config import rope_parameters

    target = fake()
    config = DraftConfig.from_dict(draft_config_for(target).to_dict() | {"rope_parameters": rope})
    written = names.portable_config(config, target=target)
    loaded = LlamaConfig(**written).rope_parameters
    assert {k: v for k, v in loaded.items() if k in rope} == rope
    old = {k: v for k, v in written.items() if k != "rope_parameters"}
    assert rope_parameters(old) == rope


def test_multimodal_rope_is_left_out_of_a_text_draft():
    config = DraftConfig.from_dict(
        draft_config_for(fake()).to_dict()
        | {"rope_parameters": {"rope_type": "mrope", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}}
    )
    written = names.portable_config(config, target=fake())
    assert written["rope_parameters"] == {"rope_type": "default", "rope_theta": 1e6} and "rope_scaling" not in written


def sglang_captures(architecture, ids, n):
    """What SGLang does with nested ids, written down a second time: a set of layers to enter, tested in a loop."""
    if architecture.startswith(("Deepseek", "KimiK25", "GlmMoeDsa")):
        enter = [i + 1 for i in ids] if ids[0] == 1 else list(ids)
    elif architecture.startswith("GptOss"):
        enter = list(ids) if max(ids) == n else [i + 1 for i in ids]
    else:
        enter = [i + 1 for i in ids]
    seen = []
    for step in range(n + 1):  # in(step) is out(step - 1); step n exists only where the class captures the last stream
        if step in enter and (step < n or architecture.startswith("GptOss")):
            seen.append(step - 1)
    return seen


@pytest.mark.parametrize(
    "architecture",
    ["LlamaForCausalLM", "DeepseekV3ForCausalLM", "KimiK25ForConditionalGeneration", "GptOssForCausalLM"],
)
def test_ids_lead_every_engine_to_the_same_physical_layers(architecture):
    n = 8
    target = fake(architecture, n)
    top = n if architecture.startswith("GptOss") else n - 1
    for layers in itertools.combinations(range(top), 3):
        config = draft_config_for(target, 50, aux_layers=list(layers))
        written = names.portable_config(config, target=target)
        nested, listed = contract.layer_ids(written)
        if list(layers) == contract.usual_layers(n):
            assert nested is None and listed is None
            nested = None
        else:
            assert sglang_captures(architecture, nested, n) == list(layers)
            assert [i - 1 for i in listed] == list(layers) and written["num_aux_hidden_states"] == 3
        for engine in ("sglang", "vllm", "llamacpp"):
            assert contract.captured(ENGINES[engine], written, target) == list(layers) or (
                engine == "llamacpp" and target.model_type == "llama" and layers[-1] == n - 1
            )


def test_a_shallow_target_always_gets_its_ids():
    target = fake(layers=6)
    config = draft_config_for(target, 50, aux_layers=[0, 2, 4])
    assert contract.layer_ids(names.portable_config(config, target=target)) == ([0, 2, 4], [1, 3, 5])
    assert contract.usual_layers(6) == [1, 2, 2]  # the engines' own default loses a layer here


def test_a_config_without_ids_needs_its_target_and_a_contradiction_is_refused():
    written = names.portable_config(draft_config_for(fake(), 50), target=fake())
    with pytest.raises(UsageError, match="--target"):
        names.draft_config_from(written, None)
    written |= {
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 9, 20]},
        "eagle_aux_hidden_state_layer_ids": [2, 9, 20],
    }
    with pytest.raises(UsageError, match="Only one can be right"):
        names.draft_config_from(written, fake())
    with pytest.raises(UsageError, match="hidden_size is None"):
        names.draft_config_from({"eagle_aux_hidden_state_layer_ids": [2]}, fake())


def test_the_portable_config_is_safe_for_every_engine(target):
    written = names.portable_config(draft_config_for(target, 40), target=target)
    assert written["architectures"] == ["LlamaForCausalLMEagle3"] and written["num_hidden_layers"] == 1
    assert written["draft_vocab_size"] == 40 and written["vocab_size"] == target.vocab_size
    assert written["target_hidden_size"] == target.hidden_size and written["max_position_embeddings"] == 512
    assert written["norm_before_residual"] is False and written["tie_word_embeddings"] is False
    assert not {"norm_before_fc", "fc_norm", "norm_output", "eagle_config", "eagle_aux_hidden_state_layer_ids"} & set(
        written
    )
    assert None not in written.values()


def test_names_contract_and_check_do_not_import_torch():
    code = "import sys, eyas.serving.names, eyas.serving.contract, eyas.serving.check, eyas.serving.fix; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
