"""A draft served as an engine serves it: KV cache, one token at a time, greedy. Slow, float64, independent of the unroll."""

import torch
from draft_parts import latent_parts, latent_scale, rms, rotate

from eyas.draft.config import DraftConfig
from eyas.features.store import Sample


class Engine:
    """One request. `extend` fills the cache from the target's states; `draft` proposes k tokens and rolls back."""

    def __init__(self, w: dict, c: DraftConfig) -> None:
        self.w, self.c = w, c
        self.cache = [([], []) for _ in range(c.num_layers)]

    def _fuse(self, aux: torch.Tensor) -> torch.Tensor:
        w, c = self.w, self.c
        if c.fc_norm:
            parts = aux.chunk(len(c.aux_layers))
            aux = torch.cat([rms(part, w[f"fc_norm.{i}.weight"], c.rms_norm_eps) for i, part in enumerate(parts)])
        if c.norm_before_fc:
            aux = rms(aux, w["input_norm.weight"], c.rms_norm_eps)
        return w["fc.weight"] @ aux

    def _row(self, token: int, h: torch.Tensor, position: int) -> tuple[torch.Tensor, int]:
        """One row through all layers; returns the next hidden state and the greedy target token."""
        w, c, eps = self.w, self.c, self.c.rms_norm_eps
        e = w["embed_tokens.weight"][token]
        for index, (keys, values) in enumerate(self.cache):
            p = f"layers.{index}."
            x, residual = rms(h, w[p + "input_layernorm.weight"], eps), h
            if index == 0:
                normed = rms(h, w[p + "hidden_norm.weight"], eps)
                x = torch.cat([rms(e, w[p + "input_layernorm.weight"], eps), normed])
                residual = normed if c.norm_before_residual else h
            a = residual + w[p + "self_attn.o_proj.weight"] @ self._attend(p, x, position, keys, values)
            m = rms(a, w[p + "post_attention_layernorm.weight"], eps)
            gate = w[p + "mlp.gate_proj.weight"] @ m
            h = a + w[p + "mlp.down_proj.weight"] @ (gate * gate.sigmoid() * (w[p + "mlp.up_proj.weight"] @ m))
        normed = rms(h, w["norm.weight"], eps)
        best = int((w["lm_head.weight"] @ normed).argmax())
        return normed if c.norm_output else h, best + (int(w["d2t"][best]) if "d2t" in w else 0)

    def _attend(self, p: str, x: torch.Tensor, position: int, keys: list, values: list) -> torch.Tensor:
        """Heads' outputs for one row, which joins the cache."""
        w, c, eps = self.w, self.c, self.c.rms_norm_eps
        if c.kv_lora_rank:
            return self._attend_latent(p, x, position, keys, values)
        heads = {}
        for n in "qkv":
            y = w[p + f"self_attn.{n}_proj.weight"] @ x
            y = y + w[p + f"self_attn.{n}_proj.bias"] if c.attention_bias else y
            y = y.view(1, -1, c.head_dim)
            if c.qk_norm and n != "v":
                y = rms(y, w[p + f"self_attn.{n}_norm.weight"], eps)
            if n != "v":
                partial = c.rope_parameters.get("partial_rotary_factor", 1.0)
                y = rotate(y, torch.tensor([position]), c.rope_parameters["rope_theta"], partial)
            heads[n] = y[0]
        keys.append(heads["k"])
        values.append(heads["v"])
        first = 0 if c.sliding_window is None else max(0, len(keys) - c.sliding_window)
        group = c.num_attention_heads // c.num_key_value_heads
        out = []
        for head in range(c.num_attention_heads):
            k = torch.stack([key[head // group] for key in keys[first:]])
            v = torch.stack([value[head // group] for value in values[first:]])
            out.append(((k @ heads["q"][head]) / c.head_dim**0.5).softmax(0) @ v)
        return torch.cat(out)

    def _attend_latent(self, p: str, x: torch.Tensor, position: int, latents: list, shared: list) -> torch.Tensor:
        """As engines decode it: latents are what is cached and attended to, kv_b goes into queries and outputs."""
        w, c = self.w, self.c
        q, latent, key = latent_parts(w, p, c, x[None], torch.tensor([position]))
        latents.append(latent[0])
        shared.append(key[0])
        up = w[p + "self_attn.kv_b_proj.weight"].view(c.num_attention_heads, -1, c.kv_lora_rank)
        cached, turned, out = torch.stack(latents), torch.stack(shared), []
        for head in range(c.num_attention_heads):
            nope, rope = q[0, head, : c.qk_nope_head_dim], q[0, head, c.qk_nope_head_dim :]
            scores = cached @ (nope @ up[head, : c.qk_nope_head_dim]) + turned @ rope
            out.append(up[head, c.qk_nope_head_dim :] @ ((scores * latent_scale(c)).softmax(0) @ cached))
        return torch.cat(out)

    def extend(self, token: int, aux: torch.Tensor, position: int) -> tuple[torch.Tensor, int]:
        return self._row(token, self._fuse(aux), position)

    def draft(self, h: torch.Tensor, token: int, position: int, k: int) -> list[int]:
        """`token` is the first proposal (from the last extended row at `position`); k - 1 more follow."""
        found, size = [token], len(self.cache[0][0])
        for step in range(1, k):
            h, token = self._row(token, h, position + step)
            found.append(token)
        for keys, values in self.cache:
            del keys[size:], values[size:]
        return found


def serve(w: dict, c: DraftConfig, sample: Sample, k: int) -> list[tuple[int, int]]:
    """Rounds (row, accepted) over one stored greedy conversation, span by span, as an engine would go through it."""
    w = {name: t.double() if t.is_floating_point() else t for name, t in w.items()}
    tokens = sample.tokens.tolist()
    aux = torch.from_numpy(sample.aux.reshape(len(tokens), -1))
    if aux.dtype == torch.uint16:  # bit patterns of bfloat16
        aux = aux.view(torch.bfloat16)
    aux = aux.double()
    mask = sample.supervised
    rounds, engine, done = [], Engine(w, c), 0
    starts = [t for t in range(1, len(mask)) if mask[t] and not mask[t - 1]]
    for start in starts:
        end = next((t for t in range(start, len(mask)) if not mask[t]), len(mask))
        row = start - 1  # the target has just written x_{row+1}
        while row + 2 < end:
            while done <= row:
                h, first = engine.extend(tokens[done + 1], aux[done], done)
                done += 1
            accepted = 0
            for guess in engine.draft(h, first, row, k):
                if row + 2 + accepted < end and guess == tokens[row + 2 + accepted]:
                    accepted += 1
                else:
                    break
            rounds.append((row, accepted))
            row += accepted + 1
    return rounds
