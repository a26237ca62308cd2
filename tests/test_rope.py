"""RoPE against Transformers' own rotary embedding, of every kind, from both spellings of a config."""

import pytest
import torch
from transformers import GlmConfig, LlamaConfig
from transformers.models.glm.modeling_glm import GlmRotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from eyas.draft.config import rope_parameters
from eyas.draft.rope import Rope

HEAD, LONGEST = 16, 4096
LONG = {"long_factor": [1.0 + i for i in range(8)], "short_factor": [1.0 + i / 10 for i in range(8)]}
KINDS = [
    {"rope_type": "default"},
    {"rope_type": "default", "partial_rotary_factor": 0.5},
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "dynamic", "factor": 4.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024, "beta_fast": 16.0, "mscale": 0.7},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
     "original_max_position_embeddings": 512},
    {"rope_type": "longrope", "original_max_position_embeddings": 1024, **LONG},
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "-".join(map(str, kind.values()))[:40])
def test_rotation_is_that_of_transformers(kind):
    parameters = {"rope_theta": 5000.0, **kind}
    # Llama's own class turns whole heads, GLM's the share that the config says
    config, embedding = (
        (GlmConfig, GlmRotaryEmbedding) if "partial_rotary_factor" in kind else (LlamaConfig, LlamaRotaryEmbedding)
    )
    sizes = {"hidden_size": HEAD, "num_attention_heads": 1, "head_dim": HEAD, "max_position_embeddings": LONGEST}
    positions = torch.tensor([*range(40), 1000, LONGEST - 1])  # the last one takes longrope's long set
    x = torch.randn(len(positions), 3, HEAD)
    cos, sin = embedding(config(**sizes, rope_parameters=parameters))(x, positions[None])
    r = cos.shape[-1]
    turned = apply_rotary_pos_emb(x[..., :r].transpose(0, 1)[None], x[..., :r].transpose(0, 1)[None], cos, sin)[0]
    expected = torch.cat([turned[0].transpose(0, 1), x[..., r:]], -1)
    assert r == HEAD * kind.get("partial_rotary_factor", 1)
    torch.testing.assert_close(Rope(parameters, HEAD, LONGEST).rotate(x, positions), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "-".join(map(str, kind.values()))[:40])
def test_the_old_spelling_says_the_same(kind):
    """rope_theta, partial_rotary_factor and the original length beside a rope_scaling with `type`; Phi-3 said "su"."""
    beside = {k: v for k, v in kind.items() if k in ("partial_rotary_factor", "original_max_position_embeddings")}
    name = "su" if kind["rope_type"] == "longrope" else kind["rope_type"]
    scaling = {"type": name, **{k: v for k, v in kind.items() if k not in ("rope_type", *beside)}}
    old = {"rope_theta": 5000.0, "rope_scaling": scaling, **beside}
    assert rope_parameters(old) == {"rope_theta": 5000.0, **kind}


def test_what_a_config_leaves_out_is_the_default():
    plain = {"rope_type": "default", "rope_theta": 10000.0}
    assert rope_parameters({}) == rope_parameters({"rope_theta": None, "rope_scaling": None}) == plain
    assert rope_parameters({"original_max_position_embeddings": 4096}) == plain
