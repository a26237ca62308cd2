"""What the start of training is worth: tau by epoch for a random and a least-squares start, on a finished run's store.

    .venv/bin/python benchmarks/start.py examples/smollm2.yaml [--epochs 2] [--documents 280] [--seeds 1]

Needs the recipe's store and vocabulary (`eyas run RECIPE --until vocab`). Every variant trains on the same documents in
the same order and is replayed on the same held-out conversations.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path

from eyas.draft import vocab
from eyas.features.store import Store
from eyas.recipe import read_recipe
from eyas.run import Run
from eyas.train.trainer import Trainer

VARIANTS = {
    "random, raw states": {"start": "random", "standardise": False},
    "random, standardised states": {"start": "random", "standardise": True},
    "least squares, standardised states": {"start": "least_squares", "standardise": True},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--documents", type=int, default=280)
    parser.add_argument("--seeds", type=int, default=1)
    options = parser.parse_args()
    run = Run(read_recipe(options.recipe))
    parts, chosen = run.parts(), vocab.load(run.folder / "vocab")
    best: dict[str, list[float]] = {}
    for seed in range(options.seeds):
        for name, change in VARIANTS.items():
            settings = run.recipe.train.model_copy(update=change | {"epochs": options.epochs, "seed": seed})
            with tempfile.TemporaryDirectory() as folder:
                trainer = Trainer(
                    Path(folder),
                    settings,
                    run.draft_config(),
                    run.target,
                    chosen,
                    Store(run.folder / "store"),
                    parts["train"][: options.documents],
                    parts["heldout"],
                    "benchmark",
                    run.recipe.replay.k,
                )
                begin = time.monotonic()
                trainer.fit()
                seconds = time.monotonic() - begin
                lines = [json.loads(line) for line in (Path(folder) / "log.jsonl").read_text().splitlines()]
            taus = [line["validation"]["tau"] for line in lines if "validation" in line]
            best.setdefault(name, []).append(taus[-1])
            by_epoch = " ".join(f"{tau:.3f}" for tau in taus)
            print(f"seed {seed}  {name:<36} tau before and after each epoch: {by_epoch}  ({seconds:.0f} s)", flush=True)
    base = sum(best["random, raw states"]) / options.seeds
    for name, taus in best.items():
        mean = sum(taus) / len(taus)
        print(
            f"{name:<36} tau {mean:.3f}, accepted drafted tokens {(mean - 1) / max(base - 1, 1e-9):.2f}x the first row"
        )


if __name__ == "__main__":
    main()
