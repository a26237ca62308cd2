"""Many ranks as one trainer: each takes its share of every global batch, and sums are made over all of them.

The global batch is planned without regard to the number of ranks, and losses are divided by the supervised rows of the
whole of it, so the same data on 1, 2 or 4 ranks gives the same update to rounding, and a run goes on with another
number of ranks at the same document. Gradients are summed here, not by DistributedDataParallel or the hooks of FSDP2:
the matrices' gradients come from `GradientSink`s in float32, which autograd never sees.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

    from eyas.draft.model import Draft

BUCKET = 64 << 20  # elements summed in one call


@dataclass(frozen=True)
class Ranks:
    """This process among `size`; under torchrun, else alone."""

    rank: int = 0
    size: int = 1

    @property
    def first(self) -> bool:
        return self.rank == 0

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over ranks, in place."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def sum_gradients(self, parameters: list[torch.nn.Parameter]) -> None:
        """Sum every `.grad` over ranks; a rank without one (no document in this batch) gives zeros."""
        if self.size == 1:
            return
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        bucket: list[torch.Tensor] = []
        for index, parameter in enumerate(parameters):
            assert parameter.grad is not None
            bucket.append(parameter.grad)
            if sum(g.numel() for g in bucket) >= BUCKET or index + 1 == len(parameters):
                flat = self.sum(torch.cat([g.flatten() for g in bucket]))
                for grad, part in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
                    grad.copy_(part.view_as(grad))
                bucket = []

    def gather(self, value: Any) -> list[Any]:
        """The value of every rank, in their order, on every rank."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value)
        return found

    def wait(self) -> None:
        if self.size > 1:
            dist.barrier()


def ranks() -> Ranks:
    """Join the group that torchrun announces in the environment, or stand alone."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        return Ranks()
    if not dist.is_initialized():
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    return Ranks(dist.get_rank(), size)


def share(documents: list[int], lengths: list[int], rank: int, size: int) -> list[int]:
    """The documents of one rank: longest first to the rank with the fewest rows so far, kept in the batch's order."""
    if size == 1:
        return documents
    rows = [0] * size
    mine = set()
    for document in sorted(documents, key=lambda d: (-lengths[d], d)):
        least = rows.index(min(rows))
        rows[least] += lengths[document]
        if least == rank:
            mine.add(document)
    return [document for document in documents if document in mine]


class Masters:
    """The draft's parameters among ranks: copies that are equal everywhere or, with `shard`, matrices spread over ranks.

    Spread, FSDP2 (`fully_shard`) holds float32 shards, of which the optimizer makes its state, and gathers the matrices
    in the compute dtype for the time of a step. Vectors (norms, biases) and the frozen embedding stay whole.
    """

    def __init__(self, draft: "Draft", ranks: Ranks, dtype: torch.dtype, shard: bool) -> None:
        self.draft, self.ranks, self.sharded = draft, ranks, shard and ranks.size > 1
        self.trained = [p for p in draft.parameters() if p.requires_grad]
        self.sums: dict[str, torch.Tensor] = {}  # of the matrices' gradients on this rank
        if self.sharded:
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

            self.mesh = init_device_mesh("cuda" if torch.cuda.is_available() else "cpu", (ranks.size,))
            whole: set[Any] = {p for p in draft.parameters() if p.ndim == 1} | {draft.embed_tokens.weight}
            policy = MixedPrecisionPolicy(param_dtype=dtype)
            fully_shard(draft, mesh=self.mesh, mp_policy=policy, reshard_after_forward=False, ignored_params=whole)
            self.trained = [p for p in draft.parameters() if p.requires_grad]

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Within, every parameter is there in full, to compute with."""
        if not self.sharded:
            yield
            return
        module = cast("FSDPModule", self.draft)
        module.unshard()
        try:
            yield
        finally:
            module.reshard()

    def backward(self, loss: torch.Tensor) -> None:
        """The gradients of one part of the batch, added to those before."""
        if not self.sharded:
            self.draft.backward(loss)
            return
        loss.backward()
        for name, module in self._matrices():
            found = module.sink.take(torch.empty(0))  # in float32, whatever the gathered weight has
            if found is not None:
                self.sums[name] = found if name not in self.sums else self.sums[name].add_(found)

    def sum(self) -> None:
        """Sum the gradients over ranks. Each keeps all of it or, spread, its shard; outside `whole`."""
        if not self.sharded:
            self.ranks.sum_gradients(self.trained)
            return
        from torch.distributed.tensor import DTensor, Partial, Shard

        self.ranks.sum_gradients([p for p in self.trained if p.ndim == 1])
        for name, module in self._matrices():
            total = self.sums.pop(name, None)  # none: no document for this rank
            total = torch.zeros(module.weight.shape, device=module.weight.device) if total is None else total
            spread = DTensor.from_local(total, self.mesh, [Partial()]).redistribute(placements=[Shard(0)])
            module.weight.grad = spread.to(module.weight.dtype)

    @torch.no_grad()
    def clip(self, limit: float) -> float:
        """Scale the gradients down to a common norm of `limit` at most. Returns the norm before."""
        grads = [p.grad for p in self.trained if p.grad is not None]
        shards = [g.to_local() for g in grads if hasattr(g, "to_local")]
        others = [g for g in grads if not hasattr(g, "to_local")]
        square = torch.nn.utils.get_total_norm(others).square()
        if shards:
            square = square + self.ranks.sum(torch.nn.utils.get_total_norm(shards).square())
        norm = float(square.sqrt())
        if norm > limit:
            torch._foreach_mul_(shards + others, limit / norm)
        return norm

    def full(self, tensor: torch.Tensor) -> torch.Tensor:
        """The whole of a parameter or optimizer state; a call of all ranks together."""
        return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor

    def placed(self, tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """A whole tensor on `like`'s device, cut to this rank's shard where `like` is spread."""
        tensor = tensor.to(like.device)
        if not hasattr(like, "full_tensor") or tensor.shape != like.shape:
            return tensor
        from torch.distributed.tensor import Shard, distribute_tensor

        return distribute_tensor(tensor, self.mesh, [Shard(0)], src_data_rank=None)

    def _matrices(self) -> Iterator[tuple[str, Any]]:
        return ((n, m) for n, m in self.draft.named_modules() if hasattr(m, "sink") and m.weight.requires_grad)
