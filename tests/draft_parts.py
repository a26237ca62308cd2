"""Parts for the draft's tests: random samples, and an independent slow draft (dense mask over K·T keys, float64)."""

import json
from functools import cache

import numpy as np
import torch

from eyas.draft.config import DraftConfig
from eyas.draft.model import Draft
from eyas.features.store import Sample, teacher_positions


def to_bits(x: torch.Tensor) -> np.ndarray:
    return x.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)


def random_sample(rng: np.random.Generator, name: str, mask: list[bool], config: DraftConfig) -> Sample:
    supervised = np.array(mask, dtype=bool)
    generator = torch.Generator().manual_seed(int(rng.integers(1 << 30)))
    count = len(teacher_positions(supervised))
    aux = torch.randn(len(mask), len(config.aux_layers), config.target_hidden_size, generator=generator)
    return Sample(
        id=name,
        tokens=rng.integers(0, config.vocab_size, len(mask)).astype(np.int32),
        supervised=supervised,
        aux=to_bits(aux),
        final=to_bits(torch.randn(count, config.target_hidden_size, generator=generator)),
        argmax=rng.integers(0, config.vocab_size, count).astype(np.int32),
    )


def small_config(**options) -> DraftConfig:
    values = dict(
        hidden_size=16, target_hidden_size=12, vocab_size=40, draft_vocab_size=24, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, intermediate_size=20, aux_layers=(1, 3, 5), target_num_layers=8,
    )  # fmt: skip
    return DraftConfig(**(values | options))


def small_draft(config: DraftConfig, seed: int = 0, dtype: torch.dtype = torch.float64) -> Draft:
    torch.manual_seed(seed)
    draft = Draft(config)
    with torch.no_grad():
        for name, parameter in draft.named_parameters():
            norm = "norm" in name
            parameter.copy_(torch.rand_like(parameter) + 0.5 if norm else torch.randn_like(parameter) * 0.3)
        if draft.t2d is not None:
            chosen = torch.randperm(config.vocab_size)[: config.draft_vocab_size].sort().values
            draft.t2d[chosen] = True
            draft.d2t.copy_(chosen - torch.arange(config.draft_vocab_size))
    return draft.to(dtype)


def to_draft_ids(draft: Draft) -> torch.Tensor:
    config = draft.config
    table = torch.full((config.vocab_size,), -1)
    table[torch.arange(config.draft_vocab_size) + (0 if draft.d2t is None else draft.d2t)] = torch.arange(
        config.draft_vocab_size
    )
    return table


def rms(x, w, eps):
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * w


def rotate(x, positions, theta, partial=1.0):
    """Rotary embedding pair by pair, as complex numbers. x [n, heads, d]."""
    d = int(x.shape[-1] * partial)
    frequencies = torch.tensor([theta ** (-2 * i / d) for i in range(d // 2)], dtype=torch.float32)
    angles = positions.float()[:, None, None] * frequencies  # tables are float32 by definition
    z = torch.complex(x[..., : d // 2], x[..., d // 2 : d]) * torch.complex(
        angles.cos().double(), angles.sin().double()
    )
    return torch.cat([z.real, z.imag, x[..., d:]], -1)


@cache
def deepseek_angles(size: int, longest: int, rope: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Transformers' own cos and sin [longest, size / 2] for DeepSeek, YaRN's scaling included."""
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RotaryEmbedding

    config = DeepseekV3Config(qk_rope_head_dim=size, max_position_embeddings=longest, rope_parameters=json.loads(rope))
    cos, sin = DeepseekV3RotaryEmbedding(config)(torch.zeros(1), torch.arange(longest)[None])
    return cos[0, :, : size // 2].double(), sin[0, :, : size // 2].double()


def turn_pairs(x, positions, c):
    """DeepSeek's rotary embedding: neighbours (x0, x1) as one complex number. x [n, heads, r]."""
    cos, sin = deepseek_angles(c.qk_rope_head_dim, c.max_position_embeddings, json.dumps(c.rope_parameters))
    z = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(z * torch.complex(cos, sin)[positions][:, None]).flatten(-2)


def latent_scale(c):
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import yarn_apply_mscale

    return yarn_apply_mscale(c.rope_parameters, (c.qk_nope_head_dim + c.qk_rope_head_dim) ** -0.5)


def latent_parts(w, p, c, x, positions):
    """Latent attention's queries [n, heads, nope + rope], normed latents [n, r] and turned shared keys [n, rope]."""
    nope, rank, eps = c.qk_nope_head_dim, c.kv_lora_rank, c.rms_norm_eps
    if c.q_lora_rank:
        low = rms(x @ w[p + "self_attn.q_a_proj.weight"].T, w[p + "self_attn.q_a_layernorm.weight"], eps)
        q = low @ w[p + "self_attn.q_b_proj.weight"].T
    else:
        q = x @ w[p + "self_attn.q_proj.weight"].T
    q = q.view(len(x), c.num_attention_heads, -1)
    q = torch.cat([q[..., :nope], turn_pairs(q[..., nope:], positions, c)], -1)
    both = x @ w[p + "self_attn.kv_a_proj_with_mqa.weight"].T
    latent = rms(both[:, :rank], w[p + "self_attn.kv_a_layernorm.weight"], eps)
    return q, latent, turn_pairs(both[:, None, rank:], positions, c)[:, 0]


def latent_qkv(w, p, c, x, positions):
    """The same with the keys and values [n, heads, ...] of every head."""
    q, latent, shared = latent_parts(w, p, c, x, positions)
    heads = (latent @ w[p + "self_attn.kv_b_proj.weight"].T).view(len(x), c.num_attention_heads, -1)
    nope, v = heads[..., : c.qk_nope_head_dim], heads[..., c.qk_nope_head_dim :]
    return q, torch.cat([nope, shared[:, None].expand(-1, c.num_attention_heads, -1)], -1), v


def llama_qkv(w, p, c, x, positions):
    """Rotated queries and keys, and values, [n, heads, d] and [n, kv, d]."""
    proj = {}
    for n in "qkv":
        y = x @ w[p + f"self_attn.{n}_proj.weight"].T
        if c.attention_bias:
            y = y + w[p + f"self_attn.{n}_proj.bias"]
        proj[n] = y.view(len(x), -1, c.head_dim)
        if c.qk_norm and n != "v":
            proj[n] = rms(proj[n], w[p + f"self_attn.{n}_norm.weight"], c.rms_norm_eps)
    partial, theta = c.rope_parameters.get("partial_rotary_factor", 1.0), c.rope_parameters["rope_theta"]
    return rotate(proj["q"], positions, theta, partial), rotate(proj["k"], positions, theta, partial), proj["v"]


def slow_unroll(w, c: DraftConfig, sample: Sample, steps: int, head, kind="ce", decay=0.8, survivors=False, keep=False):
    """One document in float64: every row runs every step, K·T keys in one dense mask, loss summed over allowed pairs.

    Returns loss, {(row, step): normed hidden}, accepted length per chain row.
    """
    tokens = torch.tensor(sample.tokens.astype(np.int64))
    mask = sample.supervised
    T = len(tokens) - 1
    bits = torch.from_numpy(sample.aux[:T].reshape(T, -1).view(np.int16)).view(torch.bfloat16).double()
    final = torch.from_numpy(sample.final.view(np.int16)).view(torch.bfloat16).double()
    teacher_at = {int(p): i for i, p in enumerate(teacher_positions(mask))}
    ids = torch.arange(c.draft_vocab_size) + w.get("d2t", 0)
    eps, heads, kv = c.rms_norm_eps, c.num_attention_heads, c.num_key_value_heads
    scale = latent_scale(c) if c.kv_lora_rank else c.head_dim**-0.5
    aux = bits
    if c.fc_norm:
        aux = torch.cat(
            [rms(part, w[f"fc_norm.{i}.weight"], eps) for i, part in enumerate(aux.chunk(len(c.aux_layers), -1))], -1
        )
    if c.norm_before_fc:
        aux = rms(aux, w["input_norm.weight"], eps)
    h = aux @ w["fc.weight"].T
    memory = [([], []) for _ in range(c.num_layers)]
    loss, outputs = torch.zeros((), dtype=torch.float64), {}
    alive = {t: True for t in range(T)}
    accepted = {t: 0 for t in range(T) if mask[t + 1] and t + 2 <= T and mask[t + 2]}
    for k in range(steps):
        token = torch.tensor([int(tokens[t + 1 + k]) if t + 1 + k <= T else 0 for t in range(T)])
        e = w["embed_tokens.weight"][token]
        positions = torch.arange(T) + k
        for index in range(c.num_layers):
            p = f"layers.{index}."
            if index == 0:
                normed = rms(h, w[p + "hidden_norm.weight"], eps)
                residual = normed if c.norm_before_residual else h
                x = torch.cat([rms(e, w[p + "input_layernorm.weight"], eps), normed], -1)
            else:
                residual, x = h, rms(h, w[p + "input_layernorm.weight"], eps)
            q, key, value = (latent_qkv if c.kv_lora_rank else llama_qkv)(w, p, c, x, positions)
            memory[index][0].append(key)
            memory[index][1].append(value)
            keys, values = torch.cat(memory[index][0]), torch.cat(memory[index][1])  # [(k+1)*T, kv, d]
            seen = torch.zeros(T, (k + 1) * T, dtype=torch.bool)
            for t in range(T):
                for s in range(t + 1):
                    seen[t, s] = c.sliding_window is None or s > t + k - c.sliding_window
                for j in range(1, k + 1):
                    seen[t, j * T + t] = True
            keys, values = keys.repeat_interleave(heads // kv, 1), values.repeat_interleave(heads // kv, 1)
            scores = torch.einsum("qhd,khd->hqk", q, keys) * scale
            attended = torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), values)
            a = residual + attended.reshape(T, -1) @ w[p + "self_attn.o_proj.weight"].T
            m = rms(a, w[p + "post_attention_layernorm.weight"], eps)
            gate = m @ w[p + "mlp.gate_proj.weight"].T
            h = a + (gate * gate.sigmoid() * (m @ w[p + "mlp.up_proj.weight"].T)) @ w[p + "mlp.down_proj.weight"].T
        normed = rms(h, w["norm.weight"], eps)
        logits = normed @ w["lm_head.weight"].T
        for t in range(T):
            span = range(t + 1, t + 3 + k)
            if t + 2 + k > T or not all(mask[i] for i in span):
                alive[t] = False
                continue
            if survivors and not alive[t]:
                continue
            at = teacher_at[t + 1 + k]
            outputs[t, k] = normed[t]
            best = int(sample.argmax[at])
            known = bool((ids == best).any())
            pt, qt = (final[at] @ head.T).softmax(-1), logits[t].softmax(-1)
            overlap = torch.minimum(pt, qt).sum()
            kl, blend = (pt * (pt / qt).log()).sum(), torch.exp(-3 * overlap).detach()
            row = {
                "ce": -(pt * qt.log()).sum(),
                "kl": kl,
                "reverse_kl": (qt * (qt / pt).log()).sum(),
                "tv": 1 - overlap,
                "lk": -overlap.log(),
                "lk_lambda": blend * kl + (1 - blend) * (1 - overlap),
            }[kind]
            if known or keep:
                loss = loss + decay**k * row
            right = int(ids[logits[t].argmax()]) == best
            alive[t] = alive[t] and right
            accepted[t] += alive[t]
        if c.norm_output:
            h = normed
    return loss, outputs, accepted
