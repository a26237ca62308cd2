"""Unroll attention: exact, without a K·T mask and without a growing key matrix.

A query of chain t at step k sees the step-0 keys of rows <= t of its document and its own keys of steps 1..k.
So it is causal attention over step-0 keys, merged by log-sum-exp with k more scores. The backward pass of flash
attention stays exact when it is given the merged output and the merged log-sum-exp (eagle3.md, "Training-time test").
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

BLOCK = 256  # queries handled at once where they are not a whole document: bounds any mask to BLOCK rows


@dataclass
class Block:
    """Queries [first, last) against step-0 keys [start, end). `causal`: square and aligned; else `mask` [q, k] adds."""

    first: int
    last: int
    start: int
    end: int
    causal: bool
    mask: torch.Tensor | None


def plan_blocks(
    rows: torch.Tensor,
    documents: Sequence[tuple[int, int]],
    dtype: torch.dtype,
    step: int = 0,
    window: int | None = None,
) -> list[Block]:
    """Cut sorted query rows [N] into blocks of one document each. `window` bounds how far back a key may lie."""
    blocks = []
    starts = torch.tensor([start for start, _ in documents], device=rows.device)
    edges = [*torch.searchsorted(rows, starts).tolist(), len(rows)]
    for (start, _end), first, last in zip(documents, edges, edges[1:], strict=False):
        if first == last:
            continue
        whole = window is None and int(rows[first]) == start and int(rows[last - 1]) == start + last - first - 1
        if whole:
            blocks.append(Block(first, last, start, start + last - first, True, None))
            continue
        for low in range(first, last, BLOCK):
            high = min(low + BLOCK, last)
            query = rows[low:high, None]
            begin = start if window is None else max(start, int(query[0]) + step - window + 1)
            stop = int(query[-1]) + 1
            key = torch.arange(begin, stop, device=rows.device)
            seen = key <= query
            if window is not None:
                seen &= key > query + step - window
            mask = torch.zeros(seen.shape, dtype=dtype, device=rows.device).masked_fill_(~seen, float("-inf"))
            blocks.append(Block(low, high, begin, stop, False, mask))
    return blocks


def _on_cpu(q: torch.Tensor) -> bool:
    return q.device.type == "cpu"


def _heads_first(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(0, 1).unsqueeze(0)  # [n, heads, d] -> [1, heads, n, d], a view


def _rows_first(x: torch.Tensor) -> torch.Tensor:
    return x.squeeze(0).transpose(0, 1)


def _forward_block(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block: Block, scale: float) -> Any:
    """Output [n, h, d] and log-sum-exp [n, h] of one block."""
    q, k, v = _heads_first(q), _heads_first(k), _heads_first(v)
    if _on_cpu(q):
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, block.causal, attn_mask=block.mask, scale=scale
        )
    else:
        scores = _scores(q, k, block, scale)
        lse = scores.logsumexp(-1)
        group = q.shape[1] // v.shape[1]
        out = ((scores - lse[..., None]).exp().to(v.dtype) @ v.repeat_interleave(group, 1)).to(q.dtype)
    return _rows_first(out), lse.squeeze(0).transpose(0, 1)


def _scores(q: torch.Tensor, k: torch.Tensor, block: Block, scale: float) -> torch.Tensor:
    """Plain masked scores in at least float32, for devices without the CPU flash kernel."""
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = (q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).transpose(-1, -2)).to(wide) * scale
    if block.causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        return scores.masked_fill(hidden, float("-inf"))
    return scores + block.mask if block.mask is not None else scores


def _backward_block(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    block: Block,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of one block for q, k, v, given the merged output and log-sum-exp."""
    grad, q, k, v, out = (_heads_first(x) for x in (grad, q, k, v, out))
    lse = lse.transpose(0, 1).unsqueeze(0)
    if _on_cpu(q):
        grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse.contiguous(), 0.0, block.causal, attn_mask=block.mask, scale=scale
        )
        return _rows_first(grads[0]), _rows_first(grads[1]), _rows_first(grads[2])
    group = q.shape[1] // k.shape[1]
    weights = (_scores(q, k, block, scale) - lse[..., None]).exp()  # [1, h, q, k]
    wide_v = v.repeat_interleave(group, 1).to(weights.dtype)
    wide_grad = grad.to(weights.dtype)
    delta = (wide_grad * out.to(weights.dtype)).sum(-1, keepdim=True)
    grad_scores = weights * (wide_grad @ wide_v.transpose(-1, -2) - delta) * scale
    grad_q = grad_scores @ k.repeat_interleave(group, 1).to(weights.dtype)
    grad_k = (grad_scores.transpose(-1, -2) @ q.to(weights.dtype)).unflatten(1, (-1, group)).sum(2)
    grad_v = (weights.transpose(-1, -2) @ wide_grad).unflatten(1, (-1, group)).sum(2)
    return _rows_first(grad_q.to(q.dtype)), _rows_first(grad_k.to(k.dtype)), _rows_first(grad_v.to(v.dtype))


class _UnrollAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        own_k: torch.Tensor | None,
        own_v: torch.Tensor | None,
        blocks: list[Block],
        scale: float,
    ) -> torch.Tensor:
        out = torch.empty_like(q)  # [N, h, d]
        lse = torch.empty(q.shape[:2], dtype=torch.promote_types(q.dtype, torch.float32), device=q.device)  # [N, h]
        for b in blocks:
            out[b.first : b.last], lse[b.first : b.last] = _forward_block(
                q[b.first : b.last], k[b.start : b.end], v[b.start : b.end], b, scale
            )
        weights = None
        if own_k is not None and own_v is not None:
            scores = _own_scores(q, own_k, scale)  # [N, kv, g, s]
            old = lse.unflatten(1, scores.shape[1:3])  # [N, kv, g]
            merged = torch.logaddexp(old, scores.logsumexp(-1))
            weights = (scores - merged[..., None]).exp_().to(q.dtype)
            own = torch.einsum("nkgs,nskd->nkgd", weights, own_v)
            out = out.unflatten(1, scores.shape[1:3]) * (old - merged).exp_()[..., None]  # in at least float32
            out = out.add_(own).flatten(1, 2).to(q.dtype)
            lse = merged.flatten(1, 2)
        ctx.save_for_backward(q, k, v, own_k, own_v, out, lse, weights)
        ctx.blocks, ctx.scale = blocks, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        q, k, v, own_k, own_v, out, lse, weights = ctx.saved_tensors
        grad = grad.contiguous()
        grad_q, grad_k, grad_v = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for b in ctx.blocks:
            rows, keys = slice(b.first, b.last), slice(b.start, b.end)
            dq, dk, dv = _backward_block(grad[rows], q[rows], k[keys], v[keys], out[rows], lse[rows], b, ctx.scale)
            grad_q[rows] = dq
            grad_k[keys] += dk
            grad_v[keys] += dv
        if own_k is None:
            return grad_q, grad_k, grad_v, None, None, None, None
        shape = weights.shape[1:3]
        grouped = grad.unflatten(1, shape)  # [N, kv, g, d]
        delta = (grouped * out.unflatten(1, shape)).sum(-1, keepdim=True)
        grad_scores = weights * (torch.einsum("nkgd,nskd->nkgs", grouped, own_v) - delta) * ctx.scale
        grad_q += torch.einsum("nkgs,nskd->nkgd", grad_scores, own_k).flatten(1, 2)
        grad_own_k = torch.einsum("nkgs,nkgd->nskd", grad_scores, q.unflatten(1, shape))
        grad_own_v = torch.einsum("nkgs,nkgd->nskd", weights, grouped)
        return grad_q, grad_k, grad_v, grad_own_k, grad_own_v, None, None


def _own_scores(q: torch.Tensor, own_k: torch.Tensor, scale: float) -> torch.Tensor:
    """q [N, h, d], own_k [N, s, kv, d] -> [N, kv, g, s] in at least float32."""
    wide = torch.promote_types(q.dtype, torch.float32)
    grouped = q.unflatten(1, (own_k.shape[2], -1)).to(wide)
    return torch.einsum("nkgd,nskd->nkgs", grouped, own_k.to(wide)) * scale


def unroll_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    blocks: list[Block],
    own_k: torch.Tensor | None = None,
    own_v: torch.Tensor | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    """q [N, h, d] over step-0 k, v [R, kv, d] as `blocks` say, and over each query's own_k, own_v [N, s, kv, d].

    Returns [N, h, d] in q's dtype; differentiable in every tensor; grouped-query heads without repeated keys.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return _UnrollAttention.apply(q, k, v, own_k, own_v, blocks, scale)
