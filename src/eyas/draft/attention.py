"""Unroll attention: exact, without a K·T mask and without a growing key matrix.

A query of chain t at step k sees the step-0 keys of rows <= t of its document and its own keys of steps 1..k.
So it is causal attention over step-0 keys, merged by log-sum-exp with k more scores. The backward pass makes the weights
again block by block, as flash attention does (arXiv:2205.14135), which stays exact when it is given the merged output
and the merged log-sum-exp.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

BLOCK = 256  # queries handled at once: bounds scores and masks to BLOCK rows


@dataclass
class Block:
    """Queries [first, last) of one document against step-0 keys [start, end).

    rows [n]: the queries' own rows. Each sees the keys up to its row, no further back than `reach`; all see the first
    `free` keys. square: the rows are the keys' own, from the first to the last.
    """

    first: int
    last: int
    start: int
    end: int
    rows: torch.Tensor
    reach: int | None = None
    free: int = 0
    square: bool = False

    def hidden(self, free: int = 0) -> torch.Tensor:
        """bool [n, keys]: what each query does not see of the keys but the first `free`."""
        own, key = self.rows[:, None], torch.arange(self.start + free, self.end, device=self.rows.device)
        return key > own if self.reach is None else (key > own) | (key < own - self.reach)


def plan_blocks(
    rows: torch.Tensor, documents: Sequence[tuple[int, int]], step: int = 0, window: int | None = None
) -> list[Block]:
    """Cut sorted query rows [N] into blocks of one document each. `window` bounds how far back a key may lie.

    Masks are made where they are needed and not kept, so that memory stays linear in rows.
    """
    blocks = []
    starts = torch.tensor([start for start, _ in documents], device=rows.device)
    edges = [*torch.searchsorted(rows, starts).tolist(), len(rows)]
    reach = None if window is None else window - step - 1  # rows back from a query's own
    for (start, _end), first, last in zip(documents, edges, edges[1:], strict=False):
        if first == last:
            continue
        end = start + last - first
        if reach is None and int(rows[first]) == start and int(rows[last - 1]) == end - 1:
            blocks.append(Block(first, last, start, end, rows[first:last], free=1, square=True))
            continue
        for low in range(first, last, BLOCK):
            some = rows[low : min(low + BLOCK, last)]
            lowest, end = int(some[0]), int(some[-1]) + 1
            begin, free = (start, lowest + 1 - start) if reach is None else (max(start, lowest - reach), 0)
            blocks.append(Block(low, low + len(some), begin, end, some, reach, free))
    return blocks


def _pieces(block: Block) -> Iterator[Block]:
    """The block in parts of at most BLOCK queries, none of them square."""
    if not block.square:
        yield block
        return
    for low in range(block.first, block.last, BLOCK):
        high = min(low + BLOCK, block.last)
        before, end = low - block.first, high - block.first
        yield Block(low, high, block.start, block.start + end, block.rows[before:end], free=before + 1)


def _grouped(x: torch.Tensor, kv: int) -> torch.Tensor:
    """[n, h, d] -> [kv, n, g, d]: the queries of one key head are rows of one matrix."""
    return x.unflatten(1, (kv, -1)).transpose(0, 1).contiguous()


def _hide(scores: torch.Tensor, piece: Block) -> torch.Tensor:
    """-inf for what a query must not see, in place; scores [kv, n * g, keys]."""
    hidden = piece.hidden(piece.free)
    scores.unflatten(1, (len(hidden), -1))[..., piece.free :].masked_fill_(hidden[:, None], float("-inf"))
    return scores


def _forward_block(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block: Block, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [n, h, d] and log-sum-exp [n, h] of one block, by PyTorch's flash attention for CPUs."""
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))  # [1, heads, n, d], views
    mask = None
    if not block.square:
        hidden = block.hidden()
        mask = torch.zeros(hidden.shape, dtype=q.dtype).masked_fill_(hidden, float("-inf"))
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, mask is None, attn_mask=mask, scale=scale
    )
    return out.squeeze(0).transpose(0, 1), lse.squeeze(0).transpose(0, 1)


def _forward_plain(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block: Block, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same by products and a softmax in at least float32, for other devices; at most BLOCK rows of scores exist."""
    wide, kv = torch.promote_types(q.dtype, torch.float32), k.shape[1]
    outs, sums = [], []
    for piece in _pieces(block):
        rows, keys = slice(piece.first - block.first, piece.last - block.first), slice(piece.end - piece.start)
        x = _grouped(q[rows], kv).flatten(1, 2)  # [kv, n * g, d]
        scores = _hide((x @ k[keys].permute(1, 2, 0)).to(wide) * scale, piece)
        lse = scores.logsumexp(-1, keepdim=True)
        out = (scores - lse).exp_().to(v.dtype) @ v[keys].transpose(0, 1)
        ungrouped = (len(q[rows]), -1)
        outs.append(out.unflatten(1, ungrouped).transpose(0, 1).flatten(1, 2))
        sums.append(lse.squeeze(-1).unflatten(1, ungrouped).transpose(0, 1).flatten(1, 2))
    return torch.cat(outs), torch.cat(sums)


def _columns(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x [...] as two columns of the dtype, which add up to it: in bfloat16 to 16 bits."""
    high = x.to(dtype)
    return torch.stack([high, (x - high).to(dtype)], -1)


def _backward_blocks(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lse: torch.Tensor,
    delta: torch.Tensor,
    blocks: list[Block],
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients for q [N, h, d] and step-0 k, v [R, kv, d], given the merged log-sum-exp and delta = Σ grad * out [N, h].

    Five products, which run at the machine's rate, and two passes over the weights. Two more columns of q and k
    subtract the log-sum-exp in the product itself, in float32: what is rounded is the logarithm of a weight, which is
    near nothing where the weight counts. The scale is applied there too: q * scale would be rounded otherwise than the
    q that the log-sum-exp was made of. Delta goes the same way as the log-sum-exp. (On CPUs about 0.8 of the time of
    PyTorch's flash backward, docs/benchmarks.md.)
    """
    kv, d = k.shape[1], q.shape[-1]
    xs = _grouped(torch.cat([q, _columns(-lse / scale, q.dtype)], -1), kv)  # [kv, N, g, d + 2]
    ys = _grouped(torch.cat([grad, _columns(-delta, q.dtype)], -1), kv)
    keys, values = (F.pad(x, (0, 2), value=1.0).transpose(0, 1) for x in (k, v))  # [kv, R, d + 2]
    grad_q = xs.new_empty(*xs.shape[:-1], d)
    grad_k, grad_v = (lse.new_zeros(*keys.shape[:-1], d) for _ in range(2))
    nothing = xs.new_empty(1)
    for block in blocks:
        for piece in _pieces(block):
            rows, seen = slice(piece.first, piece.last), slice(piece.start, piece.end)
            x, y = xs[:, rows].flatten(1, 2), ys[:, rows].flatten(1, 2)  # [kv, n * g, d + 2]
            key, value = keys[:, seen].contiguous(), values[:, seen].contiguous()  # bmm would copy them, more slowly
            scores = torch.baddbmm(nothing, x, key.mT, beta=0, alpha=scale)  # [kv, n * g, keys]
            weights = _hide(scores, piece).exp_()
            grad_v[:, seen] += weights.mT @ y[..., :d]
            grad_scores = (y @ value.mT).mul_(weights)
            grad_k[:, seen] += grad_scores.mT @ x[..., :d]
            grad_q[:, rows] = (grad_scores @ key[..., :d]).unflatten(1, (piece.last - piece.first, -1))
    grad_q = grad_q.mul_(scale).transpose(0, 1).flatten(1, 2)
    return grad_q, grad_k.mul_(scale).transpose(0, 1).to(k.dtype), grad_v.transpose(0, 1).to(v.dtype)


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
        forward = _forward_block if q.device.type == "cpu" else _forward_plain
        for b in blocks:
            out[b.first : b.last], lse[b.first : b.last] = forward(
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
        delta = (grad.to(lse.dtype) * out).sum(-1)  # [N, h]
        grad_q, grad_k, grad_v = _backward_blocks(grad, q, k, v, lse, delta, ctx.blocks, ctx.scale)
        if own_k is None:
            return grad_q, grad_k, grad_v, None, None, None, None
        shape = weights.shape[1:3]
        grouped = grad.unflatten(1, shape)  # [N, kv, g, d]
        slope = torch.einsum("nkgd,nskd->nkgs", grouped, own_v) - delta.unflatten(1, shape)[..., None]
        grad_scores = (weights * slope).mul_(ctx.scale).to(q.dtype)
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
