"""Which chains to unroll: tau and CPU time of six rules, on a finished run's store.

    .venv/bin/python benchmarks/survivor.py [--run runs/smollm2] [--out docs/survivor.jsonl] [--minutes 60] [--workers 2]

Needs the run's store and vocabulary. Every run trains a fresh draft on some of the run's maths conversations (chosen by
the seed, the same for every rule) and replays it on all held-out ones of that category. A finished run is one JSON line
in --out and is never repeated; --minutes is the time after which no further run begins. Ends with a table of all lines.
"""

import argparse
import json
import time
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from itertools import product
from math import sqrt
from multiprocessing import get_context
from pathlib import Path
from statistics import mean, stdev
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from eyas.decode.replay import accept
from eyas.draft import vocab
from eyas.draft.batch import Batch
from eyas.draft.model import Unrolled
from eyas.features.store import Store
from eyas.recipe import read_recipe
from eyas.run import Run
from eyas.train.trainer import Trainer

EPOCHS, LONGER = 3, 5  # LONGER: about what the time of the full unroll's epochs buys
SHARE, WARM = 0.1, 0.25  # SHARE: of dead chains kept; WARM: part of the steps with the full unroll
SIZES = [40, 80]  # conversations to train on
RULES = {
    "full": "every chain",
    "survivors": "chains that were right so far",
    "longer": f"the same for {LONGER} epochs instead of {EPOCHS}, which takes about the time of full",
    "share": f"those, and {SHARE:.0%} of the dead with weight {1 / SHARE:.0f}",
    "warm": f"every chain in the first {WARM:.0%} of the steps, then survivors",
    "sampled": "each chain with its acceptance probability, Σ min(p, q)",
}
T975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)  # Student's t by degrees of freedom, 1..9


class Trial(Trainer):
    """A trainer with a rule; it keeps no checkpoints and is not validated on the way."""

    rule = "full"
    computed = possible = 0

    def forward(self, batch: Batch, supervised: float, survivors: Any = None, draft: Any = None) -> Unrolled:
        rules = {
            "full": False,
            "survivors": True,
            "longer": True,
            "share": self._keep_share,
            "warm": self.step >= WARM * self.total,
            "sampled": lambda _before, _after, normed, index: self._sample(batch, normed, index),
        }
        found = super().forward(batch, supervised, survivors=rules[self.rule], draft=draft)
        self.computed += found.computed
        self.possible += batch.supervised
        return found

    def _keep_share(self, before: torch.Tensor, after: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        """A chain that dies stays for all its steps with probability SHARE, weighted so that the expectation is full."""
        lucky = torch.rand(len(after)) < SHARE
        return torch.where(before & ~after, lucky / SHARE, torch.ones(len(after)))

    @torch.no_grad()
    def _sample(self, batch: Batch, normed: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        head, accepted = self.draft.lm_head.cast(normed.dtype), []
        for rows, at in zip(normed.split(512), index.split(512), strict=True):
            p = self.target.logit_rule.apply(batch.final[at] @ self.teacher_head.T).softmax(-1, dtype=torch.float32)
            accepted.append(torch.minimum(p, (rows @ head.T).softmax(-1, dtype=torch.float32)).sum(-1))
        return (torch.rand(len(index)) < torch.cat(accepted)).float()

    def validate(self) -> dict[str, Any]:
        return {"tau": None}

    def save(self, tau: float | None = None) -> None:
        pass


def train(folder: str, job: dict[str, Any], threads: int) -> dict[str, Any]:
    """One run; the figures beside its settings. minutes: CPU time of training alone."""
    torch.set_num_threads(threads)
    run = Run(read_recipe(Path(folder) / "recipe.yaml").model_copy(update={"run": folder}))
    store, parts = Store(run.folder / "store"), run.parts()
    maths = {part: [name for name in parts[part] if store.read(name).category == "maths"] for part in parts}
    order = np.random.default_rng(job["seed"]).permutation(len(maths["train"]))[: job["documents"]]
    epochs = LONGER if job["rule"] == "longer" else EPOCHS
    change = {"steps": job["k"], "epochs": epochs, "seed": job["seed"], "validate_every": 10**9}
    with TemporaryDirectory() as work:
        trial = Trial(
            Path(work),
            run.recipe.train.model_copy(update=change),
            run.draft_config(),
            run.target,
            vocab.load(run.folder / "vocab"),
            store,
            [maths["train"][i] for i in order],
            maths["heldout"],
            "survivor",
            job["k"],
        )
        trial.rule = job["rule"]
        torch.manual_seed(job["seed"])
        begin = time.process_time()
        trial.fit()
        minutes = (time.process_time() - begin) / 60
    found = accept(trial.draft, map(store.read, maths["heldout"]), job["k"], trial.to_draft, trial.dtype)
    return job | {
        "tau": round(found.tau, 4),
        "minutes": round(minutes, 3),
        "chain_steps": round(trial.computed / trial.possible, 3),
        "rows": epochs * sum(trial.lengths),
        "heldout": len(maths["heldout"]),
        "threads": threads,
    }


def jobs(seeds: int) -> list[dict[str, Any]]:
    """All runs: the comparison that matters most first, and of it what is quickest."""
    main, others = ["full", "survivors", "longer"], ["share", "warm", "sampled"]
    few, many = SIZES[:1], SIZES[1:]
    parts = [
        (main, SIZES, [5]),
        (main, few, [3, 7]),
        (main, many, [3]),
        (others, few, [5]),
        (main, many, [7]),
        (others, few, [3, 7]),
        (others, many, [5, 3, 7]),
    ]
    return [
        {"rule": rule, "documents": documents, "k": k, "seed": seed}
        for rules, sizes, steps in parts
        for documents, k, seed, rule in product(sizes, steps, range(seeds), rules)
    ]


def interval(values: list[float]) -> str:
    """Mean and the half-width of its 95 % confidence interval (Student's t)."""
    if len(values) < 2:
        return f"{mean(values):.3f}"
    return f"{mean(values):.3f} ± {T975[len(values) - 2] * stdev(values) / sqrt(len(values)):.3f}"


def table(lines: list[dict[str, Any]]) -> str:
    """Markdown. The difference is paired by seed: same conversations, same order, same first weights."""
    rows = [
        "| documents | K | chains unrolled | seeds | tau | less full's, paired | chain-steps a position | CPU min | tau - 1 per CPU min |",
        "|--:|--:|---|--:|--:|--:|--:|--:|--:|",
    ]
    for documents, k in sorted({(line["documents"], line["k"]) for line in lines}, reverse=True):
        of = {
            rule: {x["seed"]: x for x in lines if (x["documents"], x["k"], x["rule"]) == (documents, k, rule)}
            for rule in RULES
        }
        for rule, found in of.items():
            if not found:
                continue
            runs = list(found.values())
            both = sorted(found.keys() & of["full"].keys()) if rule != "full" else []
            cells = [
                interval([x["tau"] for x in runs]),
                interval([found[s]["tau"] - of["full"][s]["tau"] for s in both]) if both else "",
                f"{mean(x['chain_steps'] for x in runs):.2f}",
                f"{mean(x['minutes'] for x in runs):.2f}",
                interval([(x["tau"] - 1) / x["minutes"] for x in runs]),
            ]
            rows.append(f"| {documents} | {k} | {rule} | {len(runs)} | " + " | ".join(cells) + " |")
    return "\n".join(rows)


def over_settings(lines: list[dict[str, Any]]) -> str:
    """Markdown: differences of tau over all settings (mean per seed first: a seed's settings share conversations)."""
    tau = {(x["rule"], x["documents"], x["k"], x["seed"]): x["tau"] for x in lines}
    minutes = {(x["rule"], x["documents"], x["k"], x["seed"]): x["minutes"] for x in lines}
    settings = sorted({key[1:3] for key in tau})
    rows = ["| | against | tau, over all settings | of its CPU time |", "|---|---|--:|--:|"]
    for one, other in [
        *((rule, "full") for rule in RULES if rule != "full"),
        ("warm", "survivors"),
        ("longer", "warm"),
    ]:
        both = [s for s in settings if {(rule, *s, 0) for rule in (one, other)} <= tau.keys()]
        seeds = sorted({key[3] for key in tau if all((rule, *s, key[3]) in tau for rule in (one, other) for s in both)})
        if not both or not seeds:
            continue
        differences = [mean(tau[one, *s, seed] - tau[other, *s, seed] for s in both) for seed in seeds]
        shares = [sum(minutes[one, *s, x] for x in seeds) / sum(minutes[other, *s, x] for x in seeds) for s in both]
        rows.append(f"| {one} | {other} | {interval(differences)} | {min(shares):.2f} to {max(shares):.2f} |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", default="runs/smollm2")
    parser.add_argument("--out", type=Path, default=Path("docs/survivor.jsonl"))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--workers", type=int, default=1, help="runs at a time")
    parser.add_argument("--threads", type=int, default=1, help="threads of each")
    options = parser.parse_args()
    lines = [json.loads(line) for line in options.out.read_text().splitlines()] if options.out.exists() else []
    done = {tuple(line[key] for key in ("rule", "documents", "k", "seed")) for line in lines}
    left = [job for job in jobs(options.seeds) if tuple(job.values()) not in done]
    end, running = time.monotonic() + 60 * options.minutes, set()
    with ProcessPoolExecutor(options.workers, get_context("spawn")) as pool, open(options.out, "a") as out:
        while running or (left and time.monotonic() < end):
            while left and len(running) < options.workers and time.monotonic() < end:
                running.add(pool.submit(train, options.run, left.pop(0), options.threads))
            finished, running = wait(running, return_when=FIRST_COMPLETED)
            for future in finished:
                lines.append(future.result())
                print(json.dumps(lines[-1]), file=out, flush=True)
    print("\n".join(f"{rule}: {text}" for rule, text in RULES.items()), table(lines), over_settings(lines), sep="\n\n")


if __name__ == "__main__":
    main()
