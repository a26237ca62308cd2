"""Head and loss in one: logits live for one chunk only, and their gradient is made in the forward pass."""

from typing import Any, Literal

import torch

from eyas.target import LogitRule

Loss = Literal["ce", "kl", "reverse_kl", "tv", "lk"]
CHUNK = 512  # rows whose logits exist at once


class Teacher:
    """The target's next-token distribution over the draft vocabulary, from its post-norm final states.

    head [Vd, H]: the target's own head rows of the draft vocabulary, in the compute dtype.
    """

    def __init__(self, head: torch.Tensor, rule: LogitRule, final: torch.Tensor, keep_bytes: int = 512 << 20) -> None:
        self.head, self.rule, self.final = head, rule, final
        keep = len(final) * len(head) * head.element_size() <= keep_bytes
        self.kept = final.new_empty(len(final), len(head)) if keep else None  # shared by all steps
        self.known = torch.zeros(len(final), dtype=torch.bool, device=final.device)

    def logits(self, index: torch.Tensor) -> torch.Tensor:
        """[n, Vd] logits of the teacher positions `index` [n]."""
        if self.kept is None:
            return self.rule.apply(self.final[index] @ self.head.T)
        fresh = index[~self.known[index]]
        if len(fresh):
            self.kept[fresh] = self.rule.apply(self.final[fresh] @ self.head.T)
            self.known[fresh] = True
        return self.kept[index]


def row_loss(logits: torch.Tensor, teacher: torch.Tensor, kind: Loss) -> torch.Tensor:
    """Loss of each row [n] from draft and teacher logits [n, Vd], differentiable. The definition of every `kind`.

    ce: soft cross-entropy -Σ p log q. kl: the same less the teacher's entropy. reverse_kl: KL(q‖p).
    tv: 1 - Σ min(p, q), the rejection probability. lk: -log Σ min(p, q), its log-likelihood form (LK losses).
    """
    log_q, log_p = logits.log_softmax(-1), teacher.log_softmax(-1)
    if kind == "ce":
        return -(log_p.exp() * log_q).sum(-1)
    if kind == "kl":
        return (log_p.exp() * (log_p - log_q)).sum(-1)
    if kind == "reverse_kl":
        return (log_q.exp() * (log_q - log_p)).sum(-1)
    accepted = torch.minimum(log_p, log_q).exp().sum(-1)
    return 1 - accepted if kind == "tv" else -accepted.clamp_min(1e-9).log()


def _chunk(z: torch.Tensor, zt: torch.Tensor, weight: torch.Tensor, kind: Loss) -> tuple[Any, Any, Any]:
    """Weighted loss (0-d), its gradient for z [n, Vd] in z's dtype, and the draft's greedy choice [n]."""
    wide = torch.promote_types(z.dtype, torch.float32)
    if kind not in ("ce", "kl"):
        best = z.argmax(-1)
        with torch.enable_grad():
            leaf = z.detach().to(wide).requires_grad_()
            loss = (row_loss(leaf, zt.to(wide), kind) * weight).sum()
            (grad,) = torch.autograd.grad(loss, leaf)
        return loss.detach(), grad.to(z.dtype), best
    q = z.softmax(-1, dtype=wide)
    p = zt.softmax(-1, dtype=wide)
    top, best = q.max(-1)
    log_sum = z.gather(1, best[:, None]).squeeze(1).to(wide) - top.log()
    rows = log_sum - torch.einsum("nv,nv->n", p, z.to(wide))
    if kind == "kl":
        rows = rows + torch.special.entr(p).neg().sum(-1)
    grad = q.sub_(p).mul_(weight[:, None]).to(z.dtype)
    return (rows * weight).sum(), grad, best


class GradientSink:
    """Adds up the gradient of one matrix in float32. Few rows wait for company: one product for many is far cheaper."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.waiting: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.rows = 0
        self.total: torch.Tensor | None = None

    def add(self, grad: torch.Tensor, x: torch.Tensor) -> None:
        """grad [n, out] and x [n, in] of y = x @ w.T."""
        self.waiting.append((grad, x))
        self.rows += len(grad)
        if self.rows >= CHUNK:
            self._multiply()

    def _multiply(self) -> None:
        wide = torch.promote_types(self.waiting[0][0].dtype, torch.float32)
        grads, xs = zip(*self.waiting, strict=True)
        product = torch.cat(grads).T @ torch.cat(xs) if len(grads) > 1 else grads[0].T @ xs[0]
        self.total = product.to(wide) if self.total is None else self.total.add_(product)
        self.waiting, self.rows = [], 0

    def take(self, like: torch.Tensor) -> torch.Tensor | None:
        """The sum [out, in] in the dtype of `like`, or None when nothing came; the sink is empty afterwards."""
        if self.waiting:
            self._multiply()
        total = self.total
        self.clear()
        return None if total is None else total.to(like.dtype)


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
            loss, grad, best[rows] = _chunk(
                hidden[rows] @ head.T, teacher.logits(index[rows]), weight[rows].to(total.dtype), kind
            )
            total += loss
            if grad_hidden is not None:
                grad_hidden[rows] = grad @ head
            if need_head:
                sink.add(grad, hidden[rows].detach())
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
    return torch.cat([(part @ head.T).argmax(-1) for part in hidden.split(CHUNK)])
