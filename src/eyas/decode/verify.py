"""The verification rule: which drafted tokens are kept, and which token the target adds. Lossless in every case.

Greedy: keep what equals the target's own choice. Sampling, chain: keep a token drawn from q with probability
min(1, p/q), and after the first one that is refused draw from the normalised max(0, p - q) (Leviathan et al. 2023,
arXiv:2211.17192). Sampling, tree: its branches are fixed, not drawn, so the target draws from p at each node and
the walk goes on as long as a branch holds what was drawn.
"""

import torch

Generator = torch.Generator | None


def distribution(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """What is sampled from at a temperature above 0: float32 shares of logits [..., V]."""
    return (logits.float() / temperature).softmax(-1)


def choose(logits: torch.Tensor, temperature: float = 0.0, generator: Generator = None) -> torch.Tensor:
    """One token [n] for each row of logits [n, V]: the greatest at temperature 0, else a draw."""
    if not temperature:
        return logits.argmax(-1)
    return torch.multinomial(distribution(logits, temperature), 1, generator=generator).squeeze(1)


def on_target_vocabulary(q: torch.Tensor, ids: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Draft shares [K, Vd] as shares of the target's vocabulary [K, V]; ids int64 [Vd] are the draft's target ids."""
    return q.new_zeros(len(q), vocab_size).index_copy_(1, ids, q)


def verify_walk(tokens: list[int], parents: list[int], chosen: list[int]) -> tuple[list[int], int]:
    """Keep the path that agrees with the target's choice `chosen` at every node, then add its next one.

    Node 0 is the last known token; parents[i] < i; the children of a node hold different tokens. Returns the nodes
    of the path (0 first) and the added token.
    """
    path = [0]
    for node in range(1, len(tokens)):
        if parents[node] == path[-1] and tokens[node] == chosen[path[-1]]:
            path.append(node)
    return path, chosen[path[-1]]


def verify_drawn_chain(
    drafted: list[int], q: torch.Tensor, p: torch.Tensor, generator: Generator = None
) -> tuple[list[int], int]:
    """The rule for a chain whose tokens were drawn from q [K, V]; p [K+1, V] is the target's, both float32 shares.

    Returns as `verify_walk`: nodes 0 ... number of kept tokens, and the added token.
    """
    lots = torch.rand(len(drafted), generator=generator, device=p.device)
    for i, token in enumerate(drafted):
        if lots[i] * q[i, token] >= p[i, token]:
            rest = (p[i] - q[i]).clamp(min=0)
            rest = rest if rest.any() else p[i]  # p and q alike but for rounding
            return list(range(i + 1)), int(torch.multinomial(rest, 1, generator=generator))
    return list(range(len(drafted) + 1)), int(torch.multinomial(p[-1], 1, generator=generator))
