"""Drafts with latent attention (MLA) beside the real parts: Transformers' DeepSeek, what engines read, decoding.

That unroll and replay are exact with it is among the options of test_unroll and test_replay.
"""

import itertools
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from decode_parts import Pair, prompts, sample_of
from draft_parts import small_config, small_draft, to_draft_ids
from engine_parts import serve
from engines.pair import PROMPTS, VOCAB
from engines.vllm import PYTHON, Vllm
from serving_parts import DRAFT_VOCAB, edit, make_draft, make_state, make_target
from test_unroll import LATENT, YARN

from eyas import audit
from eyas.data.generate import Limits
from eyas.decode.chain import Chain, Decoder
from eyas.decode.compare import acceptance, both_ways
from eyas.decode.replay import accept
from eyas.draft.attention import plan_blocks, unroll_attention
from eyas.draft.config import DraftConfig, draft_config_for
from eyas.draft.model import Draft
from eyas.errors import UsageError
from eyas.serving import names
from eyas.serving.canary import words_tokenizer
from eyas.serving.check import check
from eyas.serving.export import LAYOUTS, export, load_draft, not_for
from eyas.serving.load import load_as
from eyas.target import load_target, read_target

SIZES = {key: LATENT[key] for key in ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")}  # fmt: skip
KIMI = Path(__file__).parents[1] / "examples" / "kimi-k2.5"


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return make_target(tmp_path_factory.mktemp("target"))


@pytest.mark.parametrize("rank", [6, None])
@pytest.mark.parametrize("rope", [YARN, YARN | {"mscale_all_dim": 1.0}, {"rope_type": "default", "rope_theta": 500.0}])
def test_attention_equals_transformers(rank, rope, monkeypatch):
    """A second layer reads D channels, so it is exactly DeepSeek's attention, by the same names."""
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as real_thing

    def wide(norm, x):  # its norms compute in float32
        return torch.nn.functional.rms_norm(x, x.shape[-1:], norm.weight, norm.variance_epsilon)

    monkeypatch.setattr(real_thing.DeepseekV3RMSNorm, "forward", wide)

    config = small_config(**LATENT | {"q_lora_rank": rank, "rope_parameters": rope, "num_layers": 2})
    draft, count = small_draft(config), 9
    ours = draft.stack[1].self_attn
    theirs = DeepseekV3Config(
        hidden_size=config.hidden_size, num_attention_heads=4, num_key_value_heads=4, rope_parameters=dict(rope),
        max_position_embeddings=2048, attn_implementation="sdpa", **SIZES | {"q_lora_rank": rank},
    )  # fmt: skip
    real = real_thing.DeepseekV3Attention(theirs, 0).double()
    real.load_state_dict(ours.state_dict())
    x, at = torch.randn(count, config.hidden_size, dtype=torch.float64), torch.arange(count)
    angles = [t.double() for t in real_thing.DeepseekV3RotaryEmbedding(theirs)(torch.zeros(1), at[None])]
    mask = torch.full((count, count), float("-inf"), dtype=torch.float64).triu(1)[None, None]
    expected = real(x[None], angles, mask)[0][0]
    q, k, v = draft.qkv(draft.stack[1], x, at)
    blocks = plan_blocks(at, [(0, count)])
    out = unroll_attention(q, k, v, blocks, scale=config.softmax_scale)
    found = ours.o_proj(out[..., : ours.value].flatten(1))
    torch.testing.assert_close(found, expected, atol=1e-9, rtol=1e-9)


def test_decoding_equals_replay_and_a_slow_engine(tmp_path):
    """A cache of laid-out heads against one of latents; the text is the target's own."""
    pair = Pair(tmp_path)
    rows, limits = prompts(12), Limits(10, 1024, frozenset(pair.template.end_ids))
    start = pair.random_draft(attention="latent", **SIZES)
    plain = both_ways(rows, pair.loaded, start, Chain(1), pair.template, limits)
    written = [both.plain.record() for both in plain]
    samples = [sample_of(pair.loaded, document, (0, 2, 4), exact=True) for document in written]
    draft = pair.teach(start, samples, 60)
    pairs = both_ways(rows, pair.loaded, draft, Chain(3), pair.template, limits)
    decoded, replayed = acceptance(pairs, 3), accept(draft, samples, 3, to_draft_ids(draft), torch.float32)
    assert all(both.fast.tokens == both.plain.tokens for both in pairs) and decoded.accepted > 20
    for one, other in zip(decoded.conversations, replayed.conversations, strict=True):
        assert (one.starts, one.accepted) == (other.starts, other.accepted)
    one = decoded.conversations[0]
    assert list(zip(one.starts, one.accepted, strict=True)) == serve(draft.state_dict(), draft.config, samples[0], 3)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("options", [{}, {"q_lora_rank": None}, {"fc_norm": True, "norm_output": True}], ids=str)
def test_every_layout_comes_back_bit_for_bit(target, tmp_path, layout, options):
    config = draft_config_for(target, DRAFT_VOCAB, attention="latent", **SIZES | options)
    state = make_state(config, target)
    out = export(state, config, target, tmp_path / "d", provenance={}, layout=layout)
    back_config, back = load_draft(out, target)
    assert back_config == config and DraftConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert back.keys() == state.keys() and all(torch.equal(back[name], state[name]) for name in state)


def test_engines_that_know_it_and_those_that_do_not(target, tmp_path):
    folder = make_draft(tmp_path / "d", target, attention="latent", **SIZES)
    verdicts = check(folder, target, ["all"])["verdicts"]
    serious = {name: [f["rule"] for f in v["findings"] if f["severity"] != "info"] for name, v in verdicts.items()}
    assert serious["sglang"] == serious["vllm"] == [] and "MLA" in serious["llamacpp"] and "MLA" in serious["openvino"]
    for engine in ("sglang", "vllm"):
        config, state, notes = load_as(folder, target, engine)
        known, stored = load_draft(folder, target)
        assert config == known and notes == []
        assert all(torch.equal(state[name], stored[name].to(state[name].dtype)) for name in stored)

    def refused(**options):
        return set(not_for(draft_config_for(target, DRAFT_VOCAB, attention="latent", **SIZES | options), target))

    assert refused() == {"llamacpp", "openvino"}
    assert refused(q_lora_rank=None) == refused(num_layers=2) == {"llamacpp", "openvino", "sglang"}
    assert {"sglang", "vllm"} <= refused(norm_before_fc=True)
    for at, options in enumerate(({"q_lora_rank": None}, {"num_layers": 2}, {"norm_before_fc": True})):
        folder = make_draft(tmp_path / str(at), target, attention="latent", **SIZES | options)
        verdicts = check(folder, target, ["sglang", "vllm"])["verdicts"]
        rule = "MLA_NBFC" if "norm_before_fc" in options else "MLA_SHAPE"
        found = {engine: rule in [f["rule"] for f in verdicts[engine]["findings"]] for engine in verdicts}
        assert found == {"sglang": True, "vllm": rule == "MLA_NBFC"}
    edit(folder, lambda c: c.update(model_type="deepseek_v3"))
    assert "MLA_TYPE" in [f["rule"] for f in check(folder, target, ["vllm"])["verdicts"]["vllm"]["findings"]]


def test_transformers_reads_the_config_as_it_was_meant(target):
    from transformers import DeepseekV3Config

    config = draft_config_for(target, DRAFT_VOCAB, attention="latent", **SIZES)
    config = DraftConfig.from_dict(config.to_dict() | {"rope_parameters": YARN})
    written = names.portable_config(config, target=target)
    assert written["architectures"] == ["Eagle3DeepseekV2ForCausalLM"] and written["model_type"] == "kimi_k2"
    read = DeepseekV3Config(**written)
    assert {key: getattr(read, key) for key in SIZES} == SIZES and read.rope_interleave
    assert {key: value for key, value in read.rope_parameters.items() if key in YARN} == YARN


def test_kimis_own_attention_by_arithmetic():
    kimi = read_target(KIMI)
    config = draft_config_for(kimi, 32_000, attention="latent")
    found = {c["name"]: c["params"] for c in audit.audit_config(kimi, config)["components"]}
    low, latent, out = (1536 + 512 + 64) * 2 * 7168, 1536 * 64 * 192 + 512 * 64 * 256, 64 * 128 * 7168
    assert found["layers.0.self_attn"] == low + latent + out == 116_260_864
    assert config.step_parameters == low + latent + out + 3 * 7168 * 18_432
    assert config.softmax_scale == pytest.approx(192**-0.5 * (0.1 * 4.158883083359672 + 1) ** 2)


def test_sizes_that_are_missing_are_named(target):
    with pytest.raises(UsageError, match="no latent attention"):
        draft_config_for(target, DRAFT_VOCAB, attention="latent")
    with pytest.raises(UsageError, match="without qk_nope_head_dim, v_head_dim"):
        draft_config_for(target, DRAFT_VOCAB, attention="latent", kv_lora_rank=8, qk_rope_head_dim=4)
    with pytest.raises(UsageError, match="attention_bias"):
        draft_config_for(target, DRAFT_VOCAB, attention="latent", attention_bias=True, **SIZES)


@pytest.mark.engines
@pytest.mark.skipif(not PYTHON.exists(), reason="no .venv-vllm: run `python tools/engines.py vllm`")
def test_vllm_gives_our_decoders_integers(tmp_path):
    """The real vLLM, latent attention in target and draft, with YaRN (its CPU kernel takes 512 + 64 channels only)."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    torch.manual_seed(3)
    config = DeepseekV3Config(
        hidden_size=64, intermediate_size=128, num_hidden_layers=12, num_attention_heads=4, num_key_value_heads=4,
        q_lora_rank=48, kv_lora_rank=512, qk_nope_head_dim=32, qk_rope_head_dim=64, v_head_dim=32, first_k_dense_replace=12,
        n_routed_experts=8, num_experts_per_tok=2, n_group=1, topk_group=1, vocab_size=VOCAB, max_position_embeddings=1024,
        eos_token_id=2, bos_token_id=1, initializer_range=0.12, rope_parameters=YARN | {"mscale_all_dim": 1.0}, dtype="float32",
    )  # fmt: skip
    model = DeepseekV3ForCausalLM(config).eval()
    model.lm_head.weight.data[2] = 0  # never an end token
    for layer in model.model.layers:
        layer.mlp.down_proj.weight.data *= 4
    model.save_pretrained(tmp_path / "target")
    words_tokenizer(tmp_path / "target", VOCAB)
    loaded, new, k = load_target(tmp_path / "target", "float32"), 60, 3
    samples = []
    for prompt in PROMPTS:
        text = Decoder(loaded).answer(list(prompt), 90, frozenset()).tokens
        document = {"id": "", "tokens": [*prompt, *text], "spans": [[len(prompt), len(prompt) + len(text)]]}
        samples.append(sample_of(loaded, document, (1, 5, 8), exact=True))
    draft = Draft(draft_config_for(loaded.target, VOCAB - 20, attention="latent", q_lora_rank=40))
    draft.initialise(0, 0.1)
    draft.embed_tokens.weight.data.copy_(loaded.embedding)
    draft.lm_head.weight.data.copy_(loaded.head[20:])
    draft.d2t.fill_(20)
    draft.t2d[20:] = True
    Pair.teach(SimpleNamespace(loaded=loaded), draft, samples, 60, k)
    export(draft.served_state(), draft.config, loaded.target, tmp_path / "d", provenance={}, dtype="float32")
    expected = []
    for prompt in PROMPTS:
        found = Decoder(loaded, draft, Chain(k)).answer(list(prompt), new + k, frozenset())
        before = itertools.accumulate(found.accepted, lambda n, kept: n + kept + 1, initial=1)
        rounds = [kept for n, kept in zip(before, found.accepted, strict=False) if n < new]
        counts = {"drafted": k * len(rounds), "accepted": sum(rounds)}
        expected.append(counts | {"tokens": found.tokens[:new], "per_position": [sum(kept > i for kept in rounds) for i in range(k)]})  # fmt: skip
    assert sum(answer["accepted"] for answer in expected) > 20
    with Vllm() as vllm:
        served = vllm(loaded.target.path, tmp_path / "d", [list(p) for p in PROMPTS], new, k, tmp_path / "log")
    assert served == {"answers": expected}
