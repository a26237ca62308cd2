"""The draft network of EAGLE-3 (eagle3.md, "The network"), and its K-step unroll (training-time test).

Parameters are float32 masters; matrices are cast once per optimizer step to the compute dtype and every gradient
is added up in float32.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from eyas.draft.attention import plan_blocks, unroll_attention
from eyas.draft.batch import Batch
from eyas.draft.config import DraftConfig
from eyas.draft.loss import GradientSink, Loss, Teacher, greedy, head_loss
from eyas.draft.rope import Rope
from eyas.target import LogitRule

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class _Matmul(torch.autograd.Function):
    """x @ w.T with w in the compute dtype; the master's gradient goes to `sink`, not through autograd."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, master: torch.Tensor, cast: torch.Tensor, sink: GradientSink
    ) -> torch.Tensor:
        ctx.save_for_backward(x, cast)
        ctx.sink = sink
        return F.linear(x, cast)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, cast = ctx.saved_tensors
        if ctx.needs_input_grad[1]:
            ctx.sink.add(grad, x)
        return grad @ cast if ctx.needs_input_grad[0] else None, None, None, None


class Linear(nn.Module):
    """A matrix [out, in] (float32 master) with its cast in the compute dtype, made once per unroll."""

    def __init__(self, inputs: int, outputs: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.bias = nn.Parameter(torch.zeros(outputs)) if bias else None
        self.sink = GradientSink()
        self.stale()

    def stale(self) -> None:
        """Forget the cast. A master's version counter does not tell: fused optimizers leave it alone."""
        self._cast: torch.Tensor | None = None

    def cast(self, dtype: torch.dtype) -> torch.Tensor:
        if self.weight.dtype == dtype:
            return self.weight.detach()
        if self._cast is None or self._cast.dtype != dtype:
            self._cast = self.weight.detach().to(dtype)
        return self._cast

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = _Matmul.apply(x, self.weight, self.cast(x.dtype), self.sink)
        return y if self.bias is None else y + self.bias.to(y.dtype)


class RMSNorm(nn.Module):
    """x / rms(x) * weight, computed in at least float32 (Llama's form: the weight is applied after the cast back)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (normed * self.weight).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, config: DraftConfig, inputs: int) -> None:
        super().__init__()
        self.heads, self.kv, self.dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        bias = config.attention_bias
        self.q_proj = Linear(inputs, self.heads * self.dim, bias)
        self.k_proj = Linear(inputs, self.kv * self.dim, bias)
        self.v_proj = Linear(inputs, self.kv * self.dim, bias)
        self.o_proj = Linear(self.heads * self.dim, config.hidden_size)
        self.q_norm = RMSNorm(self.dim, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(self.dim, config.rms_norm_eps) if config.qk_norm else None

    def queries(self, x: torch.Tensor) -> torch.Tensor:
        q = self.q_proj(x).unflatten(-1, (self.heads, self.dim))  # [n, h, d]
        return self.q_norm(q) if self.q_norm is not None else q

    def keys(self, x: torch.Tensor) -> torch.Tensor:
        k = self.k_proj(x).unflatten(-1, (self.kv, self.dim))  # [n, kv, d]
        return self.k_norm(k) if self.k_norm is not None else k

    def values(self, x: torch.Tensor) -> torch.Tensor:
        return self.v_proj(x).unflatten(-1, (self.kv, self.dim))  # [n, kv, d]


class MLP(nn.Module):
    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.gate_proj = Linear(config.hidden_size, config.intermediate_size)
        self.up_proj = Linear(config.hidden_size, config.intermediate_size)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """One decoder layer. The first reads cat[embedding, hidden]; further ones are ordinary."""

    def __init__(self, config: DraftConfig, first: bool) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.first = first
        self.norm_before_residual = config.norm_before_residual and first
        self.input_layernorm = RMSNorm(size, eps)
        self.hidden_norm = RMSNorm(size, eps) if first else None
        self.self_attn = Attention(config, 2 * size if first else size)
        self.post_attention_layernorm = RMSNorm(size, eps)
        self.mlp = MLP(config)

    def inputs(self, e: torch.Tensor, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What attention reads, and the residual."""
        if self.hidden_norm is None:
            return self.input_layernorm(h), h
        normed = self.hidden_norm(h)
        return torch.cat([self.input_layernorm(e), normed], -1), normed if self.norm_before_residual else h

    def finish(self, residual: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        h = residual + self.self_attn.o_proj(attended.flatten(1))
        return h + self.mlp(self.post_attention_layernorm(h))


@dataclass
class Unrolled:
    """What K steps gave. loss is the weighted sum over chains (0-d). Counts are per step, [K] int64:

    chains: chains whose step k is supervised and whose earlier steps were all right; right: of those, step k right too;
    possible: chains whose step k is supervised at all; unknown: of `chains`, teacher's argmax outside the vocabulary.
    accepted [C]: for every chain (row in `rows` [C]) how many leading steps were right.
    """

    loss: torch.Tensor
    chains: list[int] = field(default_factory=list)
    right: list[int] = field(default_factory=list)
    possible: list[int] = field(default_factory=list)
    unknown: list[int] = field(default_factory=list)
    rows: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    accepted: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    computed: int = 0


class Draft(nn.Module):
    """State-dict names are eyas' internal ones; `serving.names` converts. Embedding [V, D] is frozen."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.config = config
        size, eps = config.hidden_size, config.rms_norm_eps
        self.embed_tokens = nn.Embedding(config.vocab_size, size)
        self.embed_tokens.weight.requires_grad_(False)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(RMSNorm(config.target_hidden_size, eps) for _ in config.aux_layers)
        if config.norm_before_fc:
            self.input_norm = RMSNorm(config.fc_in, eps)
        self.fc = Linear(config.fc_in, size)
        self.layers = nn.ModuleList(Layer(config, first=i == 0) for i in range(config.num_layers))
        self.norm = RMSNorm(size, eps)
        self.lm_head = Linear(size, config.draft_vocab_size)
        self.d2t: torch.Tensor | None
        self.t2d: torch.Tensor | None
        reduced = config.draft_vocab_size < config.vocab_size
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64) if reduced else None)
        self.register_buffer("t2d", torch.zeros(config.vocab_size, dtype=torch.bool) if reduced else None)
        self.rope = Rope(config.rope_parameters, config.head_dim, config.max_position_embeddings)
        self.aux_scale: torch.Tensor | None = None

    def initialise(self, seed: int, std: float = 0.02) -> None:
        """Random matrices N(0, std²), norms at one, biases at zero; embedding, head and maps are copied by the caller."""
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in sorted(self.named_parameters()):
            if parameter.ndim == 2 and name != "embed_tokens.weight":
                parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * std)

    @property
    def stack(self) -> list[Layer]:
        return [layer for layer in self.layers if isinstance(layer, Layer)]

    def linears(self) -> Iterator[Linear]:
        return (module for module in self.modules() if isinstance(module, Linear))

    def backward(self, loss: torch.Tensor) -> None:
        """loss.backward(), and the matrices' gradients from their sinks into `.grad` (added to what is there)."""
        loss.backward()
        for module in self.linears():
            found = module.sink.take(module.weight)
            if found is not None:
                module.weight.grad = found if module.weight.grad is None else module.weight.grad + found

    def standardise(self, aux: torch.Tensor) -> None:
        """Let fc read auxiliary states [n, A*H] divided by each channel's rms on these rows, to the nearest power of two.

        Some channels of some layers are hundreds of times larger than others ("massive activations"). Read raw they
        rule h0, beside which what attention brings, the next token above all, is nothing, and under Adam they rule every
        step of fc as well. The scale belongs to training: `served_state` folds it into fc, engines see an ordinary fc,
        and powers of two keep every product the same, bit for bit.
        """
        rms = aux.double().square().mean(0).sqrt().clamp_min(1e-6)  # [A*H]
        self.aux_scale = rms.log2().round().neg().exp2().float()

    def served_state(self) -> dict[str, torch.Tensor]:
        """The state dict as engines read it: fc takes raw auxiliary states."""
        state = {name: tensor.clone() for name, tensor in self.state_dict().items()}
        if self.aux_scale is not None:
            state["fc.weight"] *= self.aux_scale
        return state

    # pieces shared by the unroll and the decoder

    def fuse(self, aux: torch.Tensor) -> torch.Tensor:
        """aux [n, A*H] -> h0 [n, D]."""
        if self.aux_scale is not None:
            aux = aux * self.aux_scale.to(aux)
        if self.config.fc_norm:
            chunks = aux.chunk(len(self.config.aux_layers), -1)
            aux = torch.cat([norm(chunk) for norm, chunk in zip(self.fc_norm, chunks, strict=True)], -1)
        if self.config.norm_before_fc:
            aux = self.input_norm(aux)
        return self.fc(aux)

    def embed(self, tokens: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return self.embed_tokens(tokens).to(dtype)

    def qkv(self, layer: Layer, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, ...]:
        a = layer.self_attn
        return self.rope.rotate(a.queries(x), positions), self.rope.rotate(a.keys(x), positions), a.values(x)

    def next_hidden(self, h: torch.Tensor) -> torch.Tensor:
        return self.norm(h) if self.config.norm_output else h

    def target_ids(self, best: torch.Tensor) -> torch.Tensor:
        """Draft ids -> target ids."""
        return best if self.d2t is None else best + self.d2t[best]

    def step(self, e: torch.Tensor, h: torch.Tensor, positions: torch.Tensor, attend: list[Attend]) -> torch.Tensor:
        """One pass of all layers over rows [n]; `attend[l]` sees that layer's rotated q and k, and v."""
        for layer, attention in zip(self.stack, attend, strict=True):
            x, residual = layer.inputs(e, h)
            h = layer.finish(residual, attention(*self.qkv(layer, x, positions)))
        return h

    # the unroll

    def _first_step(self, batch: Batch, rows: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, list[Any]]:
        """Step 0. Every row gives keys and values; only `rows` (chain starts) go through the rest of the last layer."""
        h = self.fuse(batch.aux)
        e = self.embed(batch.tokens, dtype)
        everything = torch.arange(len(batch.tokens), device=h.device)
        memory = []
        for index, layer in enumerate(self.stack):
            wanted = rows if index == len(self.layers) - 1 else everything
            x, residual = layer.inputs(e, h)
            k = self.rope.rotate(layer.self_attn.keys(x), batch.positions)
            v = layer.self_attn.values(x)
            if len(wanted) < len(everything):
                x, residual = x[wanted], residual[wanted]
            q = self.rope.rotate(layer.self_attn.queries(x), batch.positions[wanted])
            blocks = plan_blocks(wanted, batch.documents, dtype, 0, self.config.sliding_window)
            h = layer.finish(residual, unroll_attention(q, k, v, blocks))
            memory.append((k, v))
        return h, memory

    def unroll(
        self,
        batch: Batch,
        steps: int,
        teacher_head: torch.Tensor | None,
        rule: LogitRule,
        to_draft: torch.Tensor,
        *,
        survivors: bool = True,
        decay: float = 0.8,
        scale: float = 1.0,
        kind: Loss = "ce",
        keep_unknown: bool = False,
        on_logits: Callable[[int, torch.Tensor, torch.Tensor], None] | None = None,
    ) -> Unrolled:
        """K steps of training-time test over a batch whose floats have the compute dtype.

        teacher_head [Vd, H] (None: greedy choices only, loss stays 0); to_draft int64 [V]: target id -> draft id, -1 outside the vocabulary.
        survivors: step k runs only the chains whose steps < k were right (what inference reaches); each keeps the
        weight it has in the full unroll. keep_unknown: rows whose teacher argmax is outside the vocabulary stay in
        the loss, renormalised; they are a miss in every figure all the same.
        The loss is scale * Σ decay**k * row loss: scale is one over the supervised rows of the whole batch, on all
        ranks. Hand it to `backward` as it is: the head's gradient is made here, not there.
        on_logits(k, rows, hidden) sees the normed hidden of step k, for tests.
        """
        dtype = batch.aux.dtype
        for module in self.linears():
            module.stale()
            module.sink.clear()
        teacher = None if teacher_head is None else Teacher(teacher_head, rule, batch.final)
        rows = torch.nonzero(batch.depth > 0).squeeze(1)  # chains still running, as rows of the batch
        chain = torch.arange(len(rows), device=rows.device)  # their index among all chains
        alive = torch.ones(len(rows), dtype=torch.bool, device=rows.device)
        result = Unrolled(torch.zeros((), dtype=torch.promote_types(dtype, torch.float32), device=rows.device))
        result.rows, result.accepted = rows, torch.zeros_like(rows)
        h, memory = self._first_step(batch, rows, dtype)
        own: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in self.layers]
        for k in range(steps):
            if k > 0:
                keep = torch.nonzero((batch.depth[rows] > k) & (alive if survivors else True)).squeeze(1)
                rows, chain, alive, h = rows[keep], chain[keep], alive[keep], h[keep]
                own = [[(a[keep], b[keep]) for a, b in layer] for layer in own]
                if len(rows):
                    attend = [self._attend(batch, rows, k, memory[i], own[i], dtype) for i in range(len(self.layers))]
                    h = self.step(self.embed(batch.tokens[rows + k], dtype), h, batch.positions[rows] + k, attend)
            result.possible.append(int((batch.depth[result.rows] > k).sum()))
            if not len(rows):
                for counts in (result.chains, result.right, result.unknown):
                    counts.append(0)
                continue
            index = batch.teacher[rows] + k
            label = to_draft[batch.argmax[index]]
            normed = self.norm(h)
            if on_logits is not None:
                on_logits(k, rows, normed)
            head = self.lm_head.cast(dtype)
            if teacher is None:
                best = greedy(normed, head)
            else:
                weight = torch.full((len(rows),), scale * decay**k, dtype=result.loss.dtype, device=rows.device)
                if not keep_unknown:
                    weight = weight.masked_fill(label < 0, 0.0)
                loss, best = head_loss(
                    normed, self.lm_head.weight, head, self.lm_head.sink, teacher, index, weight, kind
                )
                result.loss = result.loss + loss
            result.computed += len(rows)
            right = best == label
            result.chains.append(int(alive.sum()))
            result.unknown.append(int((alive & (label < 0)).sum()))
            alive = alive & right
            result.right.append(int(alive.sum()))
            result.accepted[chain[alive]] += 1
            h = normed if self.config.norm_output else h
        return result

    def _attend(
        self,
        batch: Batch,
        rows: torch.Tensor,
        k: int,
        memory: tuple[torch.Tensor, torch.Tensor],
        own: list[tuple[torch.Tensor, torch.Tensor]],
        dtype: torch.dtype,
    ) -> Attend:
        blocks = plan_blocks(rows, batch.documents, dtype, k, self.config.sliding_window)

        def attend(q: torch.Tensor, new_k: torch.Tensor, new_v: torch.Tensor) -> torch.Tensor:
            own.append((new_k, new_v))
            own_k = torch.stack([pair[0] for pair in own], 1)  # [N, s, kv, d]
            own_v = torch.stack([pair[1] for pair in own], 1)
            return unroll_attention(q, *memory, blocks, own_k, own_v)

        return attend
