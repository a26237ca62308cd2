"""Many ranks as one trainer: each takes its share of every global batch, and sums are made over all of them.

The global batch is planned without regard to the number of ranks, and losses are divided by the supervised rows of the
whole of it, so the same data on 1, 2 or 4 ranks gives the same update to rounding, and a run goes on with another
number of ranks at the same document. Gradients are summed here, not by DistributedDataParallel: the matrices' gradients
come from `GradientSink`s, which autograd's hooks never see.
"""

import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

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
