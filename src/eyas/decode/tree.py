"""EAGLE-2's dynamic tree (Li et al. 2024, arXiv:2406.16858), as EAGLE-3 uses it.

Each level continues the `topk` nodes of the greatest cumulative log-probability by their `topk` best tokens; of all
nodes seen the best `total - 1` are verified together with the last known token, in one target pass in which a node
sees the conversation and its own ancestors.
"""

from dataclasses import dataclass

import torch

from eyas.decode.chain import Drafter, Guess
from eyas.errors import UsageError
from eyas.target import LoadedTarget


@dataclass(frozen=True)
class Tree:
    """total: tokens verified at once, the last known one included (SGLang's num-draft-tokens); depth: its steps."""

    total: int
    depth: int
    topk: int

    @classmethod
    def parse(cls, text: str) -> "Tree":
        """ "TOTAL,DEPTH,TOPK"; raises UsageError for anything else."""
        parts = text.split(",")
        if len(parts) != 3 or not all(part.strip().isdigit() for part in parts):
            raise UsageError(f"--tree {text}: expected TOTAL,DEPTH,TOPK, for instance 16,5,4.")
        tree = cls(*(int(part) for part in parts))
        if tree.total < 2 or tree.depth < 1 or tree.topk < 1:
            raise UsageError(f"--tree {text}: expected at least 2 tokens, 1 level and 1 branch.")
        return tree

    def __call__(
        self,
        drafter: Drafter,
        output: torch.Tensor,
        last: int,
        temperature: float = 0.0,
        generator: torch.Generator | None = None,
    ) -> Guess:
        """output [1, D]: of the drafter's newest row. Temperature and generator are not used: branches are fixed."""
        draft, rows, device = drafter.draft, len(drafter), output.device
        nodes = torch.zeros(1, dtype=torch.int64, device=device)  # this level's places among all nodes seen
        scores = torch.zeros(1, device=device)
        own = torch.zeros(1, 0, dtype=torch.bool, device=device)  # which drafted rows each of them sees
        tokens, parents, totals = [torch.tensor([last], device=device)], [nodes - 1], [scores]
        for level in range(1, self.depth + 1):
            logp = drafter.logits(output).float().log_softmax(-1)
            best, ids = logp.topk(min(self.topk, logp.shape[1]))  # [nodes, topk]
            score, found = (scores[:, None] + best).flatten(), draft.target_ids(ids).flatten()
            first = sum(len(part) for part in tokens)
            tokens.append(found)
            totals.append(score)
            parents.append(nodes.repeat_interleave(best.shape[1]))
            if level == self.depth:
                break
            scores, chosen = score.topk(min(self.topk, len(score)))
            nodes, above = first + chosen, chosen // best.shape[1]
            own = torch.cat([own[above], torch.eye(len(nodes), dtype=torch.bool, device=device)], 1)
            at = torch.full_like(nodes, rows - 1 + level)
            output = drafter.run(found[chosen], draft.next_hidden(output)[above], at, own)
        drafter.crop(rows)
        # a parent's score is never below its child's and it comes first: a stable order keeps every node's ancestors
        order = torch.cat(totals)[1:].argsort(descending=True, stable=True)[: self.total - 1]
        kept = [0, *(order + 1).sort().values.tolist()]
        place = {node: index for index, node in enumerate(kept)}
        every, above_all = torch.cat(tokens).tolist(), torch.cat(parents).tolist()
        return Guess([every[node] for node in kept], [-1, *(place[above_all[node]] for node in kept[1:])])


def depths(parents: list[int]) -> list[int]:
    """How far below node 0 each node lies."""
    found = [0]
    for parent in parents[1:]:
        found.append(found[parent] + 1)
    return found


def tree_mask(parents: list[int], past: int, target: LoadedTarget) -> torch.Tensor | dict[str, torch.Tensor]:
    """Additive mask [1, 1, N, past + N]: a node sees what is cached, itself and its ancestors.

    Where layers see a window only, keys further back than that are hidden; where some do and some do not, one mask
    for each kind. Raises UsageError for layers of another kind.
    """
    config = target.body.config
    window = getattr(config, "sliding_window", None) or 0
    kinds = set(getattr(config, "layer_types", None) or ["sliding_attention" if window else "full_attention"])
    if not kinds <= {"full_attention", "sliding_attention"}:
        raise UsageError(f"{target.target.path}: layers of kind {', '.join(sorted(kinds))}. Decode it with a chain.")
    seen = torch.eye(len(parents), dtype=torch.bool)
    for node, parent in enumerate(parents[1:], 1):
        seen[node] |= seen[parent]
    seen = torch.cat([torch.ones(len(parents), past, dtype=torch.bool), seen], 1)
    at = torch.tensor([*range(past), *(past + depth for depth in depths(parents))])
    masks = {}
    for kind in kinds:
        allowed = seen & (at > at[past:, None] - window) if kind == "sliding_attention" else seen
        mask = torch.zeros(seen.shape, dtype=target.dtype).masked_fill_(~allowed, torch.finfo(target.dtype).min)
        masks[kind] = mask[None, None].to(target.device)
    return masks if len(masks) > 1 else next(iter(masks.values()))
