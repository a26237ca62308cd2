"""Head and loss in one: logits live for one chunk only, and their gradient is made in the forward pass."""

from typing import Any, Literal

import torch

from eyas.target import LogitRule

Loss = Literal["ce", "kl", "reverse_kl", "tv", "lk", "lk_lambda"]
SOFT = ("ce", "kl")  # losses whose gradient is q - p
ETA = 3.0  # how fast "lk_lambda" leaves KL for TV as acceptance grows, as its authors chose it
CHUNK = 256  # rows whose logits exist at once: a few MB, which the allocator hands out again without new pages
PART = 256  # logits among which a maximum is looked for at once
ENOUGH = 512  # rows that make a product for a matrix's gradient worth its while


class Teacher:
    """The target's next-token distribution over the draft vocabulary, from its post-norm final states.

    head [Vd, H]: the target's own head rows of the draft vocabulary, in the compute dtype. What `read` gives is made
    once for each position and kept for all steps, as far as `keep_bytes` reach.
    """

    def __init__(
        self, head: torch.Tensor, rule: LogitRule, final: torch.Tensor, kind: Loss, keep_bytes: int = 512 << 20
    ) -> None:
        self.head, self.rule, self.final, self.soft = head, rule, final, kind in SOFT
        keep = len(final) * len(head) * head.element_size() <= keep_bytes
        self.kept = final.new_empty(len(final), len(head)) if keep else None
        self.known = torch.zeros(len(final), dtype=torch.bool, device=final.device)

    def _make(self, index: torch.Tensor) -> torch.Tensor:
        logits = self.rule.apply(self.final[index] @ self.head.T)
        return logits.softmax(-1) if self.soft else logits

    def read(self, index: torch.Tensor) -> torch.Tensor:
        """[n, Vd] of the teacher positions `index` [n], the caller's own: probabilities for "ce" and "kl", else logits."""
        if self.kept is None:
            return self._make(index)
        fresh = index[~self.known[index]]
        if len(fresh):
            self.kept[fresh] = self._make(fresh)
            self.known[fresh] = True
        return self.kept.index_select(0, index)


def row_loss(logits: torch.Tensor, teacher: torch.Tensor, kind: Loss) -> torch.Tensor:
    """Loss of each row [n] from draft and teacher logits [n, Vd], differentiable. The definition of every `kind`.

    ce: soft cross-entropy -Σ p log q. kl: the same less the teacher's entropy. reverse_kl: KL(q‖p).
    LK losses (arXiv:2602.23881), with α = Σ min(p, q), the probability that a token drawn from q is accepted (among the
    tokens of the draft vocabulary): tv: 1 - α. lk: -log α. lk_lambda: λ KL + (1 - λ) TV, where λ = exp(-ETA α) has no
    gradient and is each row's own, as in speculators (SpecForge takes one λ for a step, from the mean of its α).
    """
    log_q, log_p = logits.log_softmax(-1), teacher.log_softmax(-1)
    if kind == "ce":
        return -(log_p.exp() * log_q).sum(-1)
    if kind == "reverse_kl":
        return (log_q.exp() * (log_q - log_p)).sum(-1)
    divergence = (log_p.exp() * (log_p - log_q)).sum(-1)
    if kind == "kl":
        return divergence
    log_accepted = torch.minimum(log_p, log_q).logsumexp(-1)
    if kind == "lk":
        return -log_accepted
    accepted = log_accepted.exp()
    if kind == "tv":
        return 1 - accepted
    share = torch.exp(-ETA * accepted.detach())
    return share * divergence + (1 - share) * (1 - accepted)


def _largest(z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """z.max(-1) of z [n, Vd] in half its time: PyTorch finds where a maximum is far more slowly than how large it is."""
    if z.shape[-1] % PART:
        return z.max(-1)
    parts = z.unflatten(-1, (-1, PART))
    part = parts.amax(-1).max(-1).indices  # [n]
    top, place = parts[torch.arange(len(z), device=z.device), part].max(-1)
    return top, part * PART + place


def _chunk(z: torch.Tensor, teacher: torch.Tensor, kind: Loss) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Loss of each row [n], its gradient for z [n, Vd] in z's dtype, and the draft's greedy choice [n].

    teacher as `Teacher.read` gives it. For "ce" and "kl" the gradient is q - p: softmax, difference and z * teacher,
    which overwrites z, are the only passes over [n, Vd] that write, all in z's dtype.
    """
    wide = torch.promote_types(z.dtype, torch.float32)
    top, best = _largest(z)
    if kind not in SOFT:
        with torch.enable_grad():
            leaf = z.detach().to(wide).requires_grad_()
            rows = row_loss(leaf, teacher.to(wide), kind)
            (grad,) = torch.autograd.grad(rows.sum(), leaf)
        return rows.detach(), grad.to(z.dtype), best
    q = z.softmax(-1)
    log_sum = top.to(wide) - q.gather(1, best[:, None]).squeeze(1).to(wide).log()
    mass = teacher.sum(-1, dtype=wide)  # one, to rounding
    rows = log_sum * mass - z.mul_(teacher).sum(-1, dtype=wide)
    if kind == "kl":
        rows = rows - torch.special.entr(teacher.to(wide)).sum(-1)
    return rows, q.sub_(teacher), best


class GradientSink:
    """Adds up the gradient of one matrix in float32. Few rows wait for company: one product for many is far cheaper."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.waiting: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}  # by the first of their columns
        self.total: dict[int, torch.Tensor] = {}

    def add(self, grad: torch.Tensor, x: torch.Tensor, first: int = 0) -> None:
        """grad [n, out] and x [n, in] of y = x @ w.T, where w are the matrix's columns from `first` on."""
        waiting = self.waiting.setdefault(first, [])
        waiting.append((grad, x))
        if sum(len(rows) for rows, _ in waiting) >= ENOUGH:
            self._multiply(first)

    def _multiply(self, first: int) -> None:
        grads, xs = zip(*self.waiting.pop(first), strict=True)
        product = torch.cat(grads).T @ torch.cat(xs) if len(grads) > 1 else grads[0].T @ xs[0]
        if first in self.total:
            self.total[first].add_(product)
        else:
            self.total[first] = product.to(torch.promote_types(product.dtype, torch.float32))

    def take(self, like: torch.Tensor) -> torch.Tensor | None:
        """The sum [out, in] in the dtype of `like`, or None when nothing came; the sink is empty afterwards."""
        for first in list(self.waiting):
            self._multiply(first)
        parts = [self.total[first] for first in sorted(self.total)]
        self.clear()
        if not parts:
            return None
        return (torch.cat(parts, 1) if len(parts) > 1 else parts[0]).to(like.dtype)


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        master: torch.Tensor,
        head: torch.Tensor,
        sink: GradientSink,
        teacher: Teacher,
        index: torch.Tensor,
        weight: torch.Tensor,
        kind: Loss,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        need_hidden, need_head = ctx.needs_input_grad[:2]
        total = torch.zeros((), dtype=torch.promote_types(hidden.dtype, torch.float32), device=hidden.device)
        best = torch.empty(len(hidden), dtype=torch.int64, device=hidden.device)
        grad_hidden = torch.empty_like(hidden) if need_hidden else None
        for low in range(0, len(hidden), CHUNK):
            rows = slice(low, low + CHUNK)
            x, w = hidden[rows].detach(), weight[rows].to(total.dtype)
            loss, grad, best[rows] = _chunk(x @ head.T, teacher.read(index[rows]), kind)
            total += (loss * w).sum()
            if grad_hidden is not None:
                grad_hidden[rows] = (grad @ head) * w[:, None]
            if need_head:
                sink.add(grad, (x * w[:, None]).to(x.dtype))
        ctx.save_for_backward(grad_hidden)
        ctx.mark_non_differentiable(best)
        return total, best

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, _best: Any) -> Any:
        (grad_hidden,) = ctx.saved_tensors
        return grad_hidden, *[None] * 7  # the loss is handed to backward as it is: `grad` is one


def head_loss(
    hidden: torch.Tensor,
    master: torch.Tensor,
    head: torch.Tensor,
    sink: GradientSink,
    teacher: Teacher,
    index: torch.Tensor,
    weight: torch.Tensor,
    kind: Loss = "ce",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weighted sum of row losses (0-d, float32 or wider) and the draft's greedy choice [n] (draft ids).

    hidden [n, D] (after the draft's norm) and head [Vd, D] in the compute dtype; master [Vd, D] is the head's
    float32 parameter, whose gradient goes to `sink`; index [n] teacher positions; weight [n] (0 leaves a row out).
    Gradients are those of this sum itself: scale by `weight`, not afterwards.
    """
    return _HeadLoss.apply(hidden, master, head, sink, teacher, index, weight, kind)


def greedy(hidden: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
    """The draft's greedy choice [n] (draft ids) from normed hidden states [n, D], chunk by chunk."""
    return torch.cat([_largest(part @ head.T)[1] for part in hidden.split(CHUNK)])
