"""EAGLE-3 drafting and greedy verification the slow way: no cache, everything recomputed, float32.

Written from the definition, with nothing taken from eyas' own model or decoder, so that both can be held to it.
"""

import torch
from torch import Tensor


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def rotate(x: Tensor, theta: float) -> Tensor:
    """RoPE of [T, heads, head_dim] at positions 0..T-1, halves of a head rotating together."""
    half = x.shape[-1] // 2
    inverse = theta ** (-torch.arange(half, dtype=torch.float32) / half)
    angles = torch.arange(len(x), dtype=torch.float32)[:, None] * inverse
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def draft_layer(s: dict[str, Tensor], c: dict, tokens: Tensor, hidden: Tensor) -> Tensor:
    """Rows of (next token, hidden) at positions 0..T-1 -> the layer's un-normed output [T, D]."""
    eps, d, count = c["rms_norm_eps"], c["head_dim"], len(tokens)
    at = "layers.0."
    normed = rms(hidden, s[at + "hidden_norm.weight"], eps)
    both = torch.cat([rms(s["embed_tokens.weight"][tokens], s[at + "input_layernorm.weight"], eps), normed], -1)
    q, k, v = ((both @ s[f"{at}self_attn.{n}_proj.weight"].T).view(count, -1, d) for n in "qkv")
    theta = c["rope_parameters"]["rope_theta"]
    q, k = rotate(q, theta), rotate(k, theta)
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) / d**0.5
    scores = scores.masked_fill(torch.ones(count, count, dtype=torch.bool).triu(1), float("-inf"))
    mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).reshape(count, -1)
    h = (normed if c["norm_before_residual"] else hidden) + mixed @ s[at + "self_attn.o_proj.weight"].T
    x = rms(h, s[at + "post_attention_layernorm.weight"], eps)
    gate, up = (x @ s[f"{at}mlp.{n}_proj.weight"].T for n in ("gate", "up"))
    return h + (torch.nn.functional.silu(gate) * up) @ s[at + "mlp.down_proj.weight"].T


def features(s: dict[str, Tensor], c: dict, aux: Tensor) -> Tensor:
    """Auxiliary states [T, A*H] -> the hidden that enters the draft [T, D]."""
    if c["norm_before_fc"]:
        aux = rms(aux, s["input_norm.weight"], c["rms_norm_eps"])
    return aux @ s["fc.weight"].T


def head(s: dict[str, Tensor], c: dict, hidden: Tensor) -> Tensor:
    """Draft logits [..., Vd]."""
    return rms(hidden, s["norm.weight"], c["rms_norm_eps"]) @ s["lm_head.weight"].T


def target_states(model, tokens: Tensor, layers: list[int]) -> tuple[Tensor, Tensor]:
    """(auxiliary states [T, A*H], logits [T, V]) of a Hugging Face target, by its own hidden_states."""
    with torch.no_grad():
        out = model(tokens[None], output_hidden_states=True)
    return torch.cat([out.hidden_states[layer + 1][0] for layer in layers], -1), out.logits[0]


def speculate(model, s: dict[str, Tensor], c: dict, prompt: list[int], new: int, k: int, last: str = "short") -> dict:
    """Greedy speculative decoding of `new` tokens with chains of k.

    last: at the end "short" drafts what is left minus one (llama.cpp), "whole" k as ever (vLLM, SGLang), and "left out"
    is short and does not count the last round (OpenVINO GenAI).

    {"tokens": the new ids, "drafted": int, "accepted": int, "per_position": [rounds that kept the first i+1]}
    """
    tokens = list(prompt)
    layers = list(c["aux_layers"])
    _, logits = target_states(model, torch.tensor(tokens), layers)
    tokens.append(int(logits[-1].argmax()))
    drafted = accepted = 0
    per_position = [0] * k
    while len(tokens) - len(prompt) < new:
        want = min(k, new - (len(tokens) - len(prompt)) - 1) if last != "whole" else k
        aux, _ = target_states(model, torch.tensor(tokens[:-1]), layers)
        hidden, chain = features(s, c, aux), []
        for _ in range(want):
            rows = torch.tensor(tokens[1:] + chain)
            out = draft_layer(s, c, rows, hidden)[-1]
            best = int(head(s, c, out).argmax())
            chain.append(best + int(s["d2t"][best]) if "d2t" in s else best)
            hidden = torch.cat([hidden, out[None]])
        _, logits = target_states(model, torch.tensor(tokens + chain), layers)
        truth = logits[len(tokens) - 1 :].argmax(-1).tolist()
        right = 0
        while right < len(chain) and chain[right] == truth[right]:
            right += 1
        tokens += [*chain[:right], truth[right]]
        if last == "left out" and len(tokens) - len(prompt) >= new:
            break
        drafted, accepted = drafted + len(chain), accepted + right
        per_position = [n + (i < right) for i, n in enumerate(per_position)]
    return {
        "tokens": tokens[len(prompt) :][:new], "drafted": drafted, "accepted": accepted, "per_position": per_position
    }  # fmt: skip


def teach(model, s: dict[str, Tensor], c: dict, texts: list[list[int]], steps: int = 100) -> dict[str, Tensor]:
    """A second of training on the target's own texts: some drafts come right, with margins so small that any wire shows."""
    layers = list(c["aux_layers"])
    frozen = ("embed_tokens.weight", "d2t", "t2d")
    s = {n: t.clone().requires_grad_(n not in frozen) if t.is_floating_point() else t for n, t in s.items()}
    trained = [t for n, t in s.items() if n not in frozen]
    optimizer = torch.optim.Adam(trained, 3e-3)
    data = [(torch.tensor(text), target_states(model, torch.tensor(text), layers)[0]) for text in texts]
    known = s["t2d"] if "t2d" in s else torch.ones(c["vocab_size"], dtype=torch.bool)
    place = known.long().cumsum(0) - 1
    for step in range(steps):
        text, aux = data[step % len(data)]
        out = draft_layer(s, c, text[1:-1], features(s, c, aux[:-2]))
        goal = text[2:]
        usable = known[goal]
        loss = torch.nn.functional.cross_entropy(head(s, c, out)[usable], place[goal[usable]])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return {n: t.detach() for n, t in s.items()}
