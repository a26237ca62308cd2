"""The draft network of EAGLE-3 (eagle3.md, "The network"), and its K-step unroll (training-time test).

Parameters are float32 masters; matrices are cast once per unroll to the compute dtype and every gradient is added up in
float32.
"""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from eyas.draft.attention import Block, plan_blocks, unroll_attention
from eyas.draft.batch import Batch
from eyas.draft.config import DraftConfig
from eyas.draft.loss import GradientSink, Loss, Teacher, greedy, head_loss
from eyas.draft.rope import Rope
from eyas.errors import UsageError
from eyas.target import LogitRule

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
# (right before step k, right with it, normed hidden [n, D], teacher positions) of the n running chains -> factors [n]
Survive = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class _Matmul(torch.autograd.Function):
    """x @ w.T with w in the compute dtype, columns of a matrix from `first` on; its gradient goes to `sink`."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, master: torch.Tensor, w: torch.Tensor, sink: GradientSink, first: int
    ) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        ctx.sink, ctx.first = sink, first
        return F.linear(x, w)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, w = ctx.saved_tensors
        if ctx.needs_input_grad[1]:
            ctx.sink.add(grad, x, ctx.first)
        return grad @ w if ctx.needs_input_grad[0] else None, None, None, None, None


@dataclass
class Joined:
    """cat[e, h] for matrices that have met e already: `done` is what each made of it, `h` is the half that is left."""

    done: "dict[Linear, torch.Tensor]"
    h: torch.Tensor

    def index_select(self, dim: int, rows: torch.Tensor) -> "Joined":
        return Joined({m: y.index_select(dim, rows) for m, y in self.done.items()}, self.h.index_select(dim, rows))


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

    def part(self, x: torch.Tensor, first: int = 0) -> torch.Tensor:
        """x [n, some] times as many columns from `first` on, without bias."""
        w = self.cast(x.dtype)[:, first : first + x.shape[-1]]
        return _Matmul.apply(x, self.weight, w, self.sink, first)

    def forward(self, x: torch.Tensor | Joined) -> torch.Tensor:
        y = (
            x.done[self] + self.part(x.h, self.weight.shape[1] - x.h.shape[-1])
            if isinstance(x, Joined)
            else self.part(x)
        )
        return y if self.bias is None else y + self.bias.to(y.dtype)


class _Norm(torch.autograd.Function):
    """RMSNorm with its gradient by hand: x is all that is kept, and a pass in float32 overwrites the one before."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32), copy=True)
        inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, inverse)
        return wide.mul_(inverse).mul_(weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight, inverse = ctx.saved_tensors
        unit = x * inverse  # [..., D], in at least float32
        product = unit * grad
        grad_x = None
        if ctx.needs_input_grad[0]:  # not of the frozen embedding
            along = (product @ weight.to(unit.dtype))[..., None] / x.shape[-1]
            grad_x = (grad * weight).sub_(unit.mul_(along)).mul_(inverse).to(x.dtype)
        return grad_x, product.flatten(0, -2).sum(0).to(weight.dtype), None


class _SwiGLU(torch.autograd.Function):
    """silu(gate) * up, which keeps nothing beside the two."""

    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        gate, up = ctx.saved_tensors
        return torch.ops.aten.silu_backward(grad * up, gate), F.silu(gate).mul_(grad)


class RMSNorm(nn.Module):
    """x / rms(x) * weight, all of it in at least float32, rounded once."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Norm.apply(x, self.weight, self.eps)


class Attention(nn.Module):
    def __init__(self, config: DraftConfig, inputs: int) -> None:
        super().__init__()
        self.heads, self.kv, self.dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self.value = self.dim
        bias = config.attention_bias
        self.q_proj = Linear(inputs, self.heads * self.dim, bias)
        self.k_proj = Linear(inputs, self.kv * self.dim, bias)
        self.v_proj = Linear(inputs, self.kv * self.dim, bias)
        self.o_proj = Linear(self.heads * self.dim, config.hidden_size)
        self.q_norm = RMSNorm(self.dim, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(self.dim, config.rms_norm_eps) if config.qk_norm else None

    def readers(self) -> list[Linear]:
        """The matrices that read the layer's input."""
        return [self.q_proj, self.k_proj, self.v_proj]

    def queries(self, x: torch.Tensor | Joined) -> torch.Tensor:
        q = self.q_proj(x).unflatten(-1, (self.heads, self.dim))  # [n, h, d]
        return self.q_norm(q) if self.q_norm is not None else q

    def keys_values(self, x: torch.Tensor | Joined) -> tuple[torch.Tensor, torch.Tensor]:
        k = self.k_proj(x).unflatten(-1, (self.kv, self.dim))  # [n, kv, d]
        k = self.k_norm(k) if self.k_norm is not None else k
        return k, self.v_proj(x).unflatten(-1, (self.kv, self.dim))


class LatentAttention(nn.Module):
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434) with every head's keys and values laid out.

    Files hold a head's query and key as [rest | RoPE's part] and that part in pairs of neighbours. Here they are
    [RoPE's part in halves | rest | zeros], which leaves every score the same and lets RoPE turn the first channels as it
    does everywhere. Values are filled with zeros to the same width; only their first `value` channels come out.
    """

    q_proj: Linear
    q_a_proj: Linear
    q_a_layernorm: RMSNorm
    q_b_proj: Linear
    kv_a_proj_with_mqa: Linear
    kv_a_layernorm: RMSNorm
    kv_b_proj: Linear
    o_proj: Linear

    def __init__(self, config: DraftConfig, inputs: int) -> None:
        super().__init__()
        c, self.heads, self.dim, self.value = config, config.num_attention_heads, config.head_dim, config.v_head_dim
        self.latent, self.nope, self.rope = int(c.kv_lora_rank or 0), c.qk_nope_head_dim, c.qk_rope_head_dim
        for name, (rows, *width) in c.attention_shapes(inputs).items():
            self.add_module(name, Linear(width[0], rows) if width else RMSNorm(rows, c.rms_norm_eps))

    def readers(self) -> list[Linear]:
        return [self.q_a_proj if hasattr(self, "q_a_proj") else self.q_proj, self.kv_a_proj_with_mqa]

    def queries(self, x: torch.Tensor | Joined) -> torch.Tensor:
        low = hasattr(self, "q_a_proj")
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))) if low else self.q_proj(x)
        nope, rope = q.unflatten(-1, (self.heads, -1)).split([self.nope, self.rope], -1)
        return self._laid_out(rope, nope)  # [n, h, d]

    def keys_values(self, x: torch.Tensor | Joined) -> tuple[torch.Tensor, torch.Tensor]:
        latent, rope = self.kv_a_proj_with_mqa(x).split([self.latent, self.rope], -1)
        heads = self.kv_b_proj(self.kv_a_layernorm(latent)).unflatten(-1, (self.heads, -1))
        nope, v = heads.split([self.nope, self.value], -1)
        k = self._laid_out(rope[:, None].expand(-1, self.heads, -1), nope)
        return k, F.pad(v, (0, self.dim - self.value))  # [n, h, d] both

    def _laid_out(self, rope: torch.Tensor, nope: torch.Tensor) -> torch.Tensor:
        halves = rope.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
        return F.pad(torch.cat([halves, nope], -1), (0, self.dim - self.rope - self.nope))


class MLP(nn.Module):
    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.gate_proj = Linear(config.hidden_size, config.intermediate_size)
        self.up_proj = Linear(config.hidden_size, config.intermediate_size)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(_SwiGLU.apply(self.gate_proj(x), self.up_proj(x)))


class Layer(nn.Module):
    """One decoder layer. The first reads cat[embedding, hidden]; further ones are ordinary."""

    def __init__(self, config: DraftConfig, first: bool) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.first = first
        self.norm_before_residual = config.norm_before_residual and first
        self.input_layernorm = RMSNorm(size, eps)
        self.hidden_norm = RMSNorm(size, eps) if first else None
        kind = LatentAttention if config.kv_lora_rank else Attention
        self.self_attn: Attention | LatentAttention = kind(config, 2 * size if first else size)
        self.post_attention_layernorm = RMSNorm(size, eps)
        self.mlp = MLP(config)

    def embedded(self, e: torch.Tensor) -> dict[Linear, torch.Tensor]:
        """What the first layer's readers make of embeddings [n, D]; it depends on nothing else."""
        normed = self.input_layernorm(e)
        return {reader: reader.part(normed) for reader in self.self_attn.readers()}

    def inputs(
        self, e: torch.Tensor | dict[Linear, torch.Tensor], h: torch.Tensor
    ) -> tuple[torch.Tensor | Joined, torch.Tensor]:
        """What attention reads, and the residual. e: embeddings, or what `embedded` made of them."""
        if self.hidden_norm is None:
            return self.input_layernorm(h), h
        normed = self.hidden_norm(h)
        residual = normed if self.norm_before_residual else h
        if isinstance(e, dict):
            return Joined(e, normed), residual
        return torch.cat([self.input_layernorm(e), normed], -1), residual

    def finish(self, residual: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        h = residual + self.self_attn.o_proj(attended[..., : self.self_attn.value].flatten(1))
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
        turned = config.qk_rope_head_dim if config.kv_lora_rank else config.head_dim
        self.rope = Rope(config.rope_parameters, turned, config.max_position_embeddings)
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

    def twin(self) -> "Draft":
        """The same weights in the same memory, with gradients of its own: a second thread computes with it."""
        memo = {id(p): nn.Parameter(p.detach(), p.requires_grad) for p in self.parameters()}
        return copy.deepcopy(self, memo)

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

    def qkv(self, layer: Layer, x: torch.Tensor | Joined, positions: torch.Tensor) -> tuple[torch.Tensor, ...]:
        k, v = layer.self_attn.keys_values(x)
        return self.rope.rotate(layer.self_attn.queries(x), positions), self.rope.rotate(k, positions), v

    def next_hidden(self, h: torch.Tensor) -> torch.Tensor:
        return self.norm(h) if self.config.norm_output else h

    def target_ids(self, best: torch.Tensor) -> torch.Tensor:
        """Draft ids -> target ids."""
        return best if self.d2t is None else best + self.d2t[best]

    def step(
        self,
        e: torch.Tensor | dict[Linear, torch.Tensor],
        h: torch.Tensor,
        positions: torch.Tensor,
        attend: list[Attend],
    ) -> torch.Tensor:
        """One pass of all layers over rows [n]; `attend[l]` sees that layer's rotated q and k, and v."""
        for layer, attention in zip(self.stack, attend, strict=True):
            x, residual = layer.inputs(e, h)
            h = layer.finish(residual, attention(*self.qkv(layer, x, positions)))
        return h

    # the unroll

    def _first_step(
        self, batch: Batch, e: dict[Linear, torch.Tensor], rows: torch.Tensor
    ) -> tuple[torch.Tensor, list[Any]]:
        """Step 0. Every row gives keys and values; only `rows` (chain starts) go through the rest of the last layer."""
        h = self.fuse(batch.aux)
        everything = torch.arange(len(batch.tokens), device=h.device)
        memory = []
        for index, layer in enumerate(self.stack):
            wanted = rows if index == len(self.layers) - 1 else everything
            x, residual = layer.inputs(e, h)
            k, v = layer.self_attn.keys_values(x)
            k = self.rope.rotate(k, batch.positions)
            if len(wanted) < len(everything):
                x, residual = x.index_select(0, wanted), residual.index_select(0, wanted)
            q = self.rope.rotate(layer.self_attn.queries(x), batch.positions[wanted])
            blocks = plan_blocks(wanted, batch.documents, 0, self.config.sliding_window)
            h = layer.finish(residual, unroll_attention(q, k, v, blocks, scale=self.config.softmax_scale))
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
        survivors: bool | Survive = True,
        decay: float = 0.8,
        scale: float = 1.0,
        kind: Loss = "ce",
        keep_unknown: bool = False,
        on_logits: Callable[[int, torch.Tensor, torch.Tensor], None] | None = None,
    ) -> Unrolled:
        """K steps of training-time test over a batch whose floats have the compute dtype.

        teacher_head [Vd, H] (None: greedy choices only, loss stays 0); to_draft int64 [V]: target id -> draft id, -1 outside the vocabulary.
        survivors: step k runs only the chains whose steps < k were right (what inference reaches); each keeps the
        weight it has in the full unroll. A function gives factors of the weights from the next step on; 0 ends a chain.
        keep_unknown: rows whose teacher argmax is outside the vocabulary stay in the loss, renormalised; they are a
        miss in every figure all the same.
        The loss is scale * Σ decay**k * row loss: scale is one over the supervised rows of the whole batch, on all
        ranks. Hand it to `backward` as it is: the head's gradient is made here, not there.
        on_logits(k, rows, hidden) sees the normed hidden of step k.
        """
        window = self.config.sliding_window
        if window is not None and window < steps:
            raise UsageError(f"sliding window of {window} tokens: expected at least the {steps} steps of the unroll.")
        dtype = batch.aux.dtype
        for module in self.linears():
            module.stale()
            module.sink.clear()
        teacher = None if teacher_head is None else Teacher(teacher_head, rule, batch.final, kind)
        rows = torch.nonzero(batch.depth > 0).squeeze(1)  # chains still running, as rows of the batch
        chain = torch.arange(len(rows), device=rows.device)  # their index among all chains
        alive = torch.ones(len(rows), dtype=torch.bool, device=rows.device)
        result = Unrolled(torch.zeros((), dtype=torch.promote_types(dtype, torch.float32), device=rows.device))
        share = alive.to(result.loss.dtype)  # what a chain counts
        result.rows, result.accepted = rows, torch.zeros_like(rows)
        embedded = self.stack[0].embedded(self.embed(batch.tokens, dtype))  # of every row, for all steps
        h, memory = self._first_step(batch, embedded, rows)
        own: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in self.layers]
        for k in range(steps):
            if k > 0:
                keep = torch.nonzero((batch.depth[rows] > k) & (share > 0)).squeeze(1)
                rows, chain, alive, share, h = (x.index_select(0, keep) for x in (rows, chain, alive, share, h))
                own = [[(a.index_select(0, keep), b.index_select(0, keep)) for a, b in layer] for layer in own]
                if len(rows):
                    blocks = plan_blocks(rows, batch.documents, k, window)
                    attend = [self._attend(blocks, *layers) for layers in zip(memory, own, strict=True)]
                    e = {reader: y.index_select(0, rows + k) for reader, y in embedded.items()}
                    h = self.step(e, h, batch.positions[rows] + k, attend)
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
                weight = share * (scale * decay**k)
                if batch.weight is not None:
                    weight = weight * batch.weight[rows + k]
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
            before, alive = alive, alive & right
            if survivors:
                share = share * (survivors(before, alive, normed, index) if callable(survivors) else alive)
            result.right.append(int(alive.sum()))
            result.accepted[chain[alive]] += 1
            h = normed if self.config.norm_output else h
        return result

    def _attend(
        self,
        blocks: list[Block],
        memory: tuple[torch.Tensor, torch.Tensor],
        own: list[tuple[torch.Tensor, torch.Tensor]],
    ) -> Attend:
        def attend(q: torch.Tensor, new_k: torch.Tensor, new_v: torch.Tensor) -> torch.Tensor:
            own.append((new_k, new_v))
            own_k = torch.stack([pair[0] for pair in own], 1)  # [N, s, kv, d]
            own_v = torch.stack([pair[1] for pair in own], 1)
            return unroll_attention(q, *memory, blocks, own_k, own_v, self.config.softmax_scale)

        return attend
