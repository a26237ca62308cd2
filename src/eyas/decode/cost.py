"""What each setting of speculation is worth: acceptance replayed from the store, times measured here or given.

The draft's rank of the target's own token at each step (rank 0: its first choice) gives the acceptance of every chain
and of every fixed tree, over the same walk as `replay`. The tree of N tokens is the one whose paths are right most
often over the store; an engine's dynamic tree, which adapts to each context, should do at least as well.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pydantic.dataclasses
import torch
from pydantic import Field

from eyas.data.slots import _packed_linears
from eyas.data.split import load_split
from eyas.decode.chain import Decoder, Drafter
from eyas.decode.replay import BATCH, draft_ids, walk, with_stored_tokens
from eyas.draft.batch import chain_depth, pack
from eyas.draft.loss import CHUNK
from eyas.draft.model import Draft
from eyas.errors import UsageError
from eyas.features.store import Sample, Store
from eyas.files import read_json
from eyas.serving.contract import PROGRAMS, speculative_flags
from eyas.target import LoadedTarget, LogitRule

TOTALS, TOPKS, DEPTHS = (8, 16, 32, 64), (2, 4, 8), (2, 3, 5, 8)  # the trees that are tried
WORTH = 1.02  # a speed-up below this is not worth the memory of a draft


@dataclass
class Ranks:
    """Of one document, for each row [T-1]: how deep a chain may go, and the rank [T-1, K] of the true token."""

    depth: np.ndarray
    ranks: np.ndarray


def ranks(
    draft: Draft, samples: Iterable[Sample], k: int, cap: int, table: torch.Tensor, dtype: torch.dtype
) -> list[Ranks]:
    """Ranks up to `cap` (that or worse, outside the vocabulary, or beyond the span: `cap`), every chain fed true tokens.

    table int64 [V]: target id -> draft id, -1 outside.
    """
    iterator, found = iter(samples), []
    while group := list(islice(iterator, BATCH)):
        batch = with_stored_tokens(pack(group), group).to("cpu", dtype)
        rank = torch.full((len(batch.tokens), k), cap)

        def keep(step: int, rows: torch.Tensor, hidden: torch.Tensor, batch: Any = batch, rank: Any = rank) -> None:
            labels = table[batch.argmax[batch.teacher[rows] + step]]
            for part, label, row in zip(hidden.split(CHUNK), labels.split(CHUNK), rows.split(CHUNK), strict=True):
                logits = draft.lm_head(part)
                own = logits.gather(1, label.clamp(min=0)[:, None])
                first = torch.arange(logits.shape[1]) < label[:, None]  # of equals the first is the choice
                better = ((logits > own) | ((logits == own) & first)).sum(1)
                rank[row, step] = torch.where(label < 0, cap, better.clamp(max=cap))

        with torch.no_grad():
            draft.unroll(batch, k, None, LogitRule(), table, survivors=False, on_logits=keep)
        for sample, (first, end) in zip(group, batch.documents, strict=True):
            found.append(Ranks(chain_depth(sample.supervised), rank[first:end].numpy()))
    return found


def tau_of(documents: list[Ranks], kept: list[np.ndarray]) -> tuple[float, list[int]]:
    """tau of an engine's walk where a round at a row keeps `kept` of it, and what each round kept."""
    rounds = [each for one, k in zip(documents, kept, strict=True) for each in walk(one.depth, k)[1]]
    return 1 + sum(rounds) / max(len(rounds), 1), rounds


def chain_kept(documents: list[Ranks], k: int) -> list[np.ndarray]:
    return [(one.ranks[:, :k] == 0).cumprod(1).sum(1) for one in documents]


def likely_paths(documents: list[Ranks], topk: int) -> list[tuple[int, ...]]:
    """Paths of ranks below topk, those first that are right most often over all rows; a path comes after its beginning."""
    every = np.concatenate([one.ranks[one.depth > 0] for one in documents])
    counted: list[tuple[int, int, tuple[int, ...]]] = []
    for length in range(1, every.shape[1] + 1):
        alive = every[(every[:, :length] < topk).all(1), :length]
        paths, counts = np.unique(alive, axis=0, return_counts=True)
        counted += [(-int(n), length, tuple(map(int, path))) for path, n in zip(paths, counts, strict=True)]
    return [path for _, _, path in sorted(counted)]


def tree_kept(documents: list[Ranks], tree: list[tuple[int, ...]]) -> list[np.ndarray]:
    """For each row the longest beginning of its ranks that is a path of the tree."""

    def code(path: Any) -> Any:  # ranks as the digits of one number
        return sum((rank + 1) << (8 * i) for i, rank in enumerate(path))

    kept, depth = [], max(map(len, tree), default=0)
    for one in documents:
        alive, found = np.ones(len(one.depth), bool), np.zeros(len(one.depth), dtype=np.int64)
        for length in range(1, depth + 1):
            known = [code(path) for path in tree if len(path) == length]
            alive &= np.isin(code(one.ranks[:, :length].T), known)
            found += alive
        kept.append(found)
    return kept


# costs


Size = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Times = Annotated[dict[Size, Seconds], Field(min_length=1)]


@pydantic.dataclasses.dataclass(frozen=True)
class Costs:
    """Seconds. draft_step: rows at once -> one step; verify: conversations at once -> tokens of each -> one pass.

    As JSON, keys are strings: {"device": "…", "draft_step": {"1": 4e-4, "64": 6e-4},
    "verify": {"1": {"1": 0.0061, "8": 0.0063, "64": 0.0088}, "32": {"1": …}}}. Between the sizes given, times are
    interpolated; beyond the last they go on with its slope.
    """

    device: str
    draft_step: Times
    verify: Annotated[dict[Size, Times], Field(min_length=1)]
    note: str = ""

    def __post_init__(self) -> None:
        if any(1 not in each or len(each) < 2 for each in self.verify.values()):
            raise ValueError("times for 1 token and for more are needed at each batch size")

    def draft(self, rows: float) -> float:
        return _between(self.draft_step, rows)

    def round(self, batch: int, tau: float, steps: int, branches: int, tokens: int) -> float:
        """One round: the draft reads tau known tokens, takes steps - 1 more with `branches` each, the target verifies."""
        drafting = self.draft(batch * tau) + (steps - 1) * self.draft(batch * branches)
        return drafting + _between(self.verify[batch], tokens)


def _between(points: dict[int, float], at: float) -> float:
    x = sorted(points)
    if at > x[-1] and len(x) > 1:
        return points[x[-1]] + (at - x[-1]) * max(points[x[-1]] - points[x[-2]], 0.0) / (x[-1] - x[-2])
    return float(np.interp(at, x, [points[i] for i in x]))


def read_costs(path: str | Path) -> Costs:
    """Raises UsageError for a file that does not hold what `Costs` says."""
    value = read_json(path)
    try:
        return pydantic.TypeAdapter(Costs).validate_python({"device": Path(path).name} | value)
    except (pydantic.ValidationError, TypeError) as error:
        reason = "; ".join(e["msg"] for e in error.errors()) if isinstance(error, pydantic.ValidationError) else error
        example = '{"device": "H200", "draft_step": {"1": 4e-4}, "verify": {"1": {"1": 0.0061, "8": 0.0063}}}'
        raise UsageError(f"{path}: not costs of speculation ({reason}). Expected seconds, as in {example}.") from None


def measure_costs(
    target: LoadedTarget,
    draft: Draft,
    batches: tuple[int, ...] = (1, 4, 16),
    tokens: tuple[int, ...] = (1, 2, 4, 8, 16, 32),
    context: int = 256,
) -> Costs:
    """Times of this machine: passes over `tokens` behind `context` known ones, and draft steps of 1 ... 64 rows."""
    with torch.inference_mode(), _packed_linears(target, max(tokens)):
        verify = {batch: _passes(target, batch, tokens, context) for batch in batches}
        steps = _steps(target, draft.to(target.device, target.dtype), context)
    device = target.device
    kind = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    return Costs(f"{kind}, {str(target.dtype).removeprefix('torch.')}, Transformers", steps, verify, "measured here")


def _passes(target: LoadedTarget, batch: int, tokens: tuple[int, ...], context: int) -> dict[int, float]:
    decoder = Decoder(target)
    ids = torch.randint(0, target.target.vocab_size, (batch, context + max(tokens))).to(target.device)

    def read(part: torch.Tensor) -> None:
        states = target.body(input_ids=part, use_cache=True, **{decoder.cache_name: decoder.cache})
        target.logits(states.last_hidden_state[:, -max(tokens) :])

    read(ids[:, :context])
    passes = {n: partial(read, ids[:, context : context + n]) for n in tokens}
    return {n: _clock(target, work, partial(decoder.cache.crop, -n)) for n, work in passes.items()}


def _steps(target: LoadedTarget, draft: Draft, context: int) -> dict[int, float]:
    drafter = Drafter(draft, target.device, target.dtype)
    tokens = torch.randint(0, target.target.vocab_size, (context,)).to(target.device)
    drafter.extend(tokens, torch.randn(context, draft.config.fc_in).to(target.device, target.dtype))

    def step(rows: int) -> None:
        hidden = torch.ones(rows, draft.config.hidden_size, device=target.device, dtype=target.dtype)
        own = torch.eye(rows, dtype=torch.bool, device=target.device)
        output = drafter.run(tokens[:1].expand(rows), hidden, torch.full_like(own[0], context, dtype=torch.int64), own)
        drafter.logits(output).argmax(-1).tolist()

    return {rows: _clock(target, partial(step, rows), partial(drafter.crop, context)) for rows in (1, 4, 16, 64)}


def _clock(target: LoadedTarget, work: Callable[[], Any], undo: Callable[[], Any]) -> float:
    """Median seconds of some runs of `work`, each taken back by `undo`."""
    found: list[float] = []
    while len(found) < 3 or (len(found) < 9 and sum(found) < 0.5):
        start = time.perf_counter()
        work()
        if target.device.type == "cuda":
            torch.cuda.synchronize(target.device)
        found.append(time.perf_counter() - start)
        undo()
    return float(np.median(found[1:]))  # the first prepares kernels


# the plan


@dataclass(frozen=True)
class Setting:
    """One way to speculate. total: tokens verified at once, the last known one included (as SGLang counts them)."""

    shape: str
    k: int
    total: int
    topk: int
    tau: float
    tokens_per_s: float = 0.0
    speedup: float = 0.0

    def __str__(self) -> str:
        chain = self.shape == "chain"
        return f"chain of {self.k}" if chain else f"tree of {self.total}, depth {self.k}, top-k {self.topk}"


def shapes(documents: list[Ranks], k: int) -> list[Setting]:
    """Chains of 1 ... k and trees up to k deep, with their replayed tau."""
    found = [Setting("chain", n, n + 1, 1, tau_of(documents, chain_kept(documents, n))[0]) for n in range(1, k + 1)]
    for topk in TOPKS:
        paths = likely_paths(documents, topk)
        for depth in sorted({min(d, k) for d in DEPTHS}):
            most = sum(topk ** min(level, 2) for level in range(1, depth + 1))  # what a dynamic tree has to choose from
            reach = [path for path in paths if len(path) <= depth]
            for total in TOTALS:
                if depth < total <= 1 + most:
                    tau = tau_of(documents, tree_kept(documents, reach[: total - 1]))[0]
                    found.append(Setting("tree", depth, total, topk, tau))
    return found


def weigh(setting: Setting, costs: Costs, batch: int) -> Setting:
    """The setting with its expected speed at a batch size."""
    seconds = costs.round(batch, setting.tau, setting.k, setting.topk, setting.total)
    speedup = setting.tau * costs.verify[batch][1] / seconds
    return replace(setting, tokens_per_s=batch * setting.tau / seconds, speedup=speedup)


def plan(documents: list[Ranks], costs: Costs, k: int, draft: str) -> dict[str, Any]:
    """`eyas plan` as JSON: for every batch size of the costs all settings, the best one, and whether it pays."""
    kept, worth, batches = np.array(tau_of(documents, chain_kept(documents, k))[1]), shapes(documents, k), []
    for batch, times in sorted(costs.verify.items()):
        plain = batch / times[1]
        settings = sorted((weigh(one, costs, batch) for one in worth), key=lambda one: -one.speedup)
        best, chain = settings[0], next(one for one in settings if one.shape == "chain")
        pays = best.speedup >= WORTH
        verdict = (
            f"{best}, tau {best.tau:.2f}, {best.tokens_per_s:,.0f} tokens/s, ×{best.speedup:.2f} of plain decoding"
        )
        if not pays:
            verdict = f"speculation does not pay; the best setting ({best}) gives ×{best.speedup:.2f} of plain decoding"
        found: dict[str, Any] = {"batch": batch, "plain_tokens_per_s": plain, "pays": pays, "flags": None}
        found |= {
            "verdict": f"batch {batch}: {verdict} ({plain:,.0f})",
            "best": asdict(best),
            "best_chain": asdict(chain),
        }
        if pays:
            found["flags"] = flags(best, chain, draft)
        batches.append(found | {"settings": [asdict(one) for one in settings]})
    shares = [float((kept > i).mean()) if len(kept) else 0.0 for i in range(k)]
    return {"draft": draft, "per_position": shares, "costs": asdict(costs), "batches": batches}


def flags(best: Setting, chain: Setting, draft: str) -> dict[str, str]:
    """Command-line flags for the best setting (SGLang), and for the best chain where an engine's trees are not tried."""
    found = {engine: speculative_flags(engine, draft, chain.k) for engine in PROGRAMS}
    return found | {"sglang": speculative_flags("sglang", draft, best.k, best.topk, best.total)}


def heldout_of(store: Store) -> tuple[list[str], str]:
    """The held-out documents of a run's store (those of split.json), or all of a store that stands alone."""
    split = Path(store.place.path).parent / "conversations" / "split.json"
    if not split.exists():
        return list(store.ids), "all conversations of the store"
    have = set(store.ids)
    return [name for name in load_split(split)["heldout"] if name in have], "held-out conversations"


def ranks_in(store: Store, draft: Draft, k: int, ids: list[str]) -> list[Ranks]:
    """Ranks over documents of a store, in bfloat16 as they are stored. Raises UsageError for other layers."""
    layers, wanted = store.meta["layers"], list(draft.config.aux_layers)
    if layers != wanted:
        text = f"holds layers {layers}, the draft reads {wanted}. Extract a store with the draft's layers."
        raise UsageError(f"{store.place.path}: {text}")
    return ranks(draft, map(store.read, ids), k, max(TOPKS), draft_ids(draft), torch.bfloat16)
