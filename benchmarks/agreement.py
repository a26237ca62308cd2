"""Does replay tell what decoding does? The same held-out conversations, counted both ways, and how long each takes.

    python benchmarks/agreement.py runs/smollm2 [--limit 24] [--k 4] [--dtype float32] [--out FILE]

The target answers the held-out prompts of a run plainly and speculatively (`eyas decode`), in one process. Replay then
walks the plain answers, with the target's states of these very answers kept in memory in the same dtype, and has to
give the same rounds: where each begins and what it keeps, integer for integer. In float32 any difference is a fault
(the exit code says so). In bfloat16 sums in another order decide some ties otherwise; how many is what is reported.
The last line replays the run's own store, which was written in the run's dtype, by other kernels, in batches.
"""

import argparse
import sys
import time
from pathlib import Path

import numpy as np
import torch

from eyas.data.generate import Limits
from eyas.data.prompts import read_prompts
from eyas.data.template import ChatTemplate
from eyas.decode.chain import Chain
from eyas.decode.compare import acceptance, both_ways
from eyas.decode.replay import Acceptance, accept, draft_ids, read_draft, replay
from eyas.features.store import Sample, Store, teacher_positions
from eyas.files import write_json
from eyas.recipe import read_recipe
from eyas.target import LoadedTarget, load_target, read_target


@torch.inference_mode()
def sample(target: LoadedTarget, name: str, tokens: list[int], spans: list, layers: list[int]) -> Sample:
    """A document with the target's states of one pass over it, float32 arrays whatever the dtype of the pass."""
    ids, mask = torch.tensor([tokens]), np.zeros(len(tokens), dtype=bool)
    for start, end in spans:
        mask[start:end] = True
    with target.capturing(layers) as caught:
        target.body(input_ids=ids, use_cache=False)
    aux = torch.stack([caught[layer][0] for layer in layers], 1)
    return Sample(
        id=name,
        tokens=np.array(tokens, dtype=np.int32),
        supervised=mask,
        aux=aux.float().numpy(),
        final=np.zeros((len(teacher_positions(mask)), 1), dtype=np.float32),  # replay reads no teacher
        argmax=np.zeros(len(teacher_positions(mask)), dtype=np.int32),
    )


def row(name: str, found: Acceptance, drafted: int, seconds: float) -> str:
    kept = [sum(a > i for c in found.conversations for a in c.accepted) for i in range(found.k)]
    return (
        f"{name:<34}{found.rounds:>8,}{drafted:>9,}{found.accepted:>10,}  {kept!s:<28}{found.tau:.4f} {seconds:>8.1f} s"
    )


def main() -> int:
    options = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    options.add_argument("run", type=Path)
    options.add_argument("--limit", type=int)
    options.add_argument("--k", type=int, default=4)
    options.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    options.add_argument("--out", type=Path)
    given = options.parse_args()
    recipe, k, dtype = read_recipe(given.run / "recipe.yaml"), given.k, getattr(torch, given.dtype)
    known = read_target(recipe.target)
    draft, _ = read_draft(given.run / "draft", known)
    prompts = read_prompts(given.run / "conversations" / "conversations.jsonl", given.limit)
    target = load_target(known, given.dtype)
    template = ChatTemplate(target.tokenizer)
    limits = Limits(recipe.generate.max_new_tokens, known.max_positions, frozenset(template.end_ids))

    pairs = both_ways(prompts.rows, target, draft, Chain(k), template, limits)
    answers = [(a.seconds, b.seconds) for p in pairs for a, b in zip(p.plain_answers, p.fast_answers, strict=True)]
    plain_seconds, fast_seconds = (sum(each) for each in zip(*answers, strict=True))
    decoded = acceptance(pairs, k)
    drafted = sum(answer.drafted for pair in pairs for answer in pair.fast_answers)
    samples = [
        sample(target, p.plain.conversation["id"], p.plain.tokens, p.plain.spans, list(draft.config.aux_layers))
        for p in pairs
    ]
    start = time.perf_counter()
    replayed = accept(draft.to(dtype), samples, k, draft_ids(draft), dtype)
    took = time.perf_counter() - start

    same = [
        (a.starts, a.accepted) == (b.starts, b.accepted)
        for a, b in zip(decoded.conversations, replayed.conversations, strict=True)
    ]
    texts = sum(p.plain.tokens == p.fast.tokens for p in pairs)
    start = time.perf_counter()
    ids = [p.plain.conversation["id"] for p in pairs]
    stored, _ = replay(given.run / "draft", known, Store(given.run / "store"), k, ids, "held-out conversations")
    store_took = time.perf_counter() - start
    print(
        f"{len(pairs)} held-out conversations, chain, K = {k}, temperature 0, {given.dtype}, {torch.get_num_threads()} threads"
    )
    print(f"{'':<34}{'rounds':>8}{'drafted':>9}{'accepted':>10}  {'kept at position':<28}tau         time")
    print(row(f"decoded, {given.dtype}", decoded, drafted, fast_seconds))
    print(row(f"replayed, {given.dtype}", replayed, replayed.rounds * k, took))
    print(row("replayed from the run's store", stored, stored.rounds * k, store_took))
    print(f"plain decoding: {plain_seconds:.1f} s; speculative ×{plain_seconds / fast_seconds:.2f} of its speed")
    print(
        f"replay (store, draft read from disk): ×{fast_seconds / store_took:.0f} of the speed of decoding with the target"
    )
    print(f"same rounds in {sum(same)} of {len(same)} conversations, same text as plain decoding in {texts}")
    if given.out:
        figures = {"rounds": decoded.rounds, "accepted": decoded.accepted, "drafted": drafted, "same": sum(same)}
        write_json(given.out, figures | {"conversations": len(same), "speedup": plain_seconds / fast_seconds})
    return 0 if all(same) or given.dtype != "float32" else 1


if __name__ == "__main__":
    sys.exit(main())
