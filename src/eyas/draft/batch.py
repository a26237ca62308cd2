"""A batch: documents packed row after row, with what the unroll needs to know about each row.

Row t of a document reads the pair (x_{t+1}, g_t) at RoPE position t and predicts x_{t+2} (eagle3.md, "The shift").
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from eyas.features.store import Sample, teacher_positions


@dataclass
class Batch:
    """R rows of packed documents and the F teacher positions they refer to.

    aux [R, A*H] float; tokens [R] int64, x_{t+1} of row t; positions [R] int64, t;
    depth [R] int64, how many steps of the chain that starts at this row are supervised (0: no chain starts here);
    teacher [R] int64, where p_{t+1} lies among the F teacher positions (the teacher of step k is teacher + k);
    final [F, H] float and argmax [F] int64 of the target; documents: (first row, end row) of each;
    weight [R] float, what the loss on token x_{t+2} of row t counts, in whatever step it is drafted (None: one).
    """

    aux: torch.Tensor
    tokens: torch.Tensor
    positions: torch.Tensor
    depth: torch.Tensor
    teacher: torch.Tensor
    final: torch.Tensor
    argmax: torch.Tensor
    documents: list[tuple[int, int]]
    weight: torch.Tensor | None = None

    @property
    def supervised(self) -> int:
        """The loss's denominator: rows whose first step is supervised."""
        return int((self.depth > 0).sum())

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> "Batch":
        """Move to a device; floats also to `dtype`."""
        moved = {
            name: value.to(device, dtype if value.is_floating_point() else None)
            for name, value in vars(self).items()
            if isinstance(value, torch.Tensor)
        }
        return Batch(documents=self.documents, **moved)

    def split(self, parts: int, steps: int) -> list["Batch"]:
        """The same chains of `steps` steps dealt out to batches of about equally many; views where that is possible.

        Rows before a part's first chain in its document come along and give keys and values, as a prompt's do. There
        are fewer parts where there are fewer chains.
        """
        chains = torch.nonzero(self.depth > 0).squeeze(1)
        if parts == 1 or len(chains) < 2:
            return [self]
        found = []
        for part in chains.tensor_split(min(parts, len(chains))):
            first, last = int(part[0]), int(part[-1])
            documents = [(start, end) for start, end in self.documents if start <= last and end > first]
            low, high = documents[0][0], min(last + steps, documents[-1][1])  # chains read the tokens that they draft
            depth = self.depth[low:high].clone()
            depth[: first - low] = 0
            depth[last - low + 1 :] = 0
            given = slice(int(self.teacher[first]), int(self.teacher[last]) + steps)
            found.append(
                Batch(
                    aux=self.aux[low:high],
                    tokens=self.tokens[low:high],
                    positions=self.positions[low:high],
                    depth=depth,
                    teacher=(self.teacher[low:high] - given.start).clamp_min(0),
                    final=self.final[given],
                    argmax=self.argmax[given],
                    documents=[(start - low, min(end, high) - low) for start, end in documents],
                    weight=None if self.weight is None else self.weight[low:high],
                )
            )
        return found


def chain_depth(supervised: np.ndarray) -> np.ndarray:
    """int64 [T-1]: for row t, the length of x_{t+2}, x_{t+3}, … inside the supervised span that holds x_{t+1}."""
    run = np.zeros(len(supervised) + 1, dtype=np.int64)  # run[t]: supervised tokens from t to the end of its span
    ends = np.flatnonzero(np.diff(np.concatenate([supervised, [False]]).astype(np.int8)) == -1) + 1
    inside = np.flatnonzero(supervised)
    if len(inside):
        run[inside] = ends[np.searchsorted(ends, inside, side="right")] - inside
    return np.maximum(run[1 : len(supervised)] - 1, 0)


def as_floats(bits: np.ndarray) -> torch.Tensor:
    """States as a tensor of the same shape: uint16 bit patterns as bfloat16 (a store's), float32 as it is (in memory)."""
    if bits.dtype == np.float32:
        return torch.from_numpy(bits)
    return torch.from_numpy(np.ascontiguousarray(bits).view(np.int16)).view(torch.bfloat16)


def pack(samples: Sequence[Sample], weights: Mapping[str, np.ndarray] | None = None) -> Batch:
    """Pack whole documents; nothing is padded, and rows never look across a document's border.

    weights: document id -> [T-1] float, as in Batch.weight; documents that are not there count one.
    """
    aux, tokens, positions, depth, teacher, documents = [], [], [], [], [], []
    row = offset = 0
    for sample in samples:
        rows = len(sample.tokens) - 1
        where = teacher_positions(sample.supervised)
        depths = chain_depth(sample.supervised)
        index = np.searchsorted(where, np.arange(1, rows + 1))  # of position t+1; meaningless where depth is 0
        aux.append(as_floats(sample.aux[:rows]).flatten(1))
        tokens.append(sample.tokens[1:])
        positions.append(np.arange(rows))
        depth.append(depths)
        teacher.append(np.where(depths > 0, index + offset, 0))
        documents.append((row, row + rows))
        row, offset = row + rows, offset + len(where)

    def integers(parts: list[np.ndarray]) -> torch.Tensor:
        return torch.from_numpy(np.concatenate(parts).astype(np.int64))

    return Batch(
        aux=torch.cat(aux),
        tokens=integers(tokens),
        positions=integers(positions),
        depth=integers(depth),
        teacher=integers(teacher),
        final=torch.cat([as_floats(sample.final) for sample in samples]),
        argmax=integers([sample.argmax for sample in samples]),
        documents=documents,
        weight=None if weights is None else torch.cat([_weight(sample, weights) for sample in samples]),
    )


def _weight(sample: Sample, weights: Mapping[str, np.ndarray]) -> torch.Tensor:
    return torch.as_tensor(weights.get(sample.id, np.ones(len(sample.tokens) - 1)), dtype=torch.float32)
