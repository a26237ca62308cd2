"""Refinement: train on for a while with more weight where the draft was rejected.

The trained draft is replayed over its own training conversations. A token at which a round ended, because the draft
had guessed another one, is a token that an engine had to compute by itself; its loss counts `extra` times more, in
whatever step of the unroll it is drafted.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from eyas.decode.replay import Conversation, accept, draft_ids, read_draft, replay
from eyas.draft.batch import chain_depth
from eyas.features.store import Sample, Store
from eyas.files import fingerprint, fingerprint_file, write_json
from eyas.run import Run
from eyas.serving.export import export


def rejections(found: Conversation, sample: Sample, k: int) -> np.ndarray:
    """bool [T-1]: whether token x_{t+2} of row t was guessed wrongly, which ended a round before its K tokens."""
    depth = chain_depth(sample.supervised)
    wrong = np.zeros(len(depth), dtype=bool)
    for row, kept in zip(found.starts, found.accepted, strict=True):
        if kept < min(k, depth[row]):
            wrong[row + kept] = True
    return wrong


def weights(wrong: Mapping[str, np.ndarray], extra: float, share: float) -> dict[str, np.ndarray]:
    """Document id -> float32 [T-1]: 1 + extra at rejected tokens and 1 elsewhere, over the mean of it.

    share: of the supervised tokens, how many were rejected.
    """
    return {name: (1 + extra * rows.astype(np.float32)) / (1 + extra * share) for name, rows in wrong.items()}


def refine(run: "Run") -> dict[str, Any]:
    """`eyas train --refine`: RUN/draft trains on as the recipe's `refine` says; the result is RUN/refine/draft.

    Returns tau before and after, replayed over the held-out conversations, and the share of rejected training tokens.
    """
    folder, settings, k = run.folder / "refine", run.recipe.refine, run.recipe.replay.k
    store, parts, base = Store(run.store), run.parts(), run.folder / "draft"
    draft, _ = read_draft(base, run.target)
    found = accept(draft, map(store.read, parts["train"]), k, draft_ids(draft), torch.bfloat16)
    wrong = {c.id: rejections(c, store.read(c.id), k) for c in found.conversations}
    rejected = sum(int(rows.sum()) for rows in wrong.values()) / max(found.tokens, 1)
    changed = {"warm": str(base), "epochs": settings.epochs, "lr": settings.lr}
    trainer = run.trainer(
        folder / "train",
        run.recipe.train.model_copy(update=changed),
        inputs=fingerprint([run.recipe.section("refine"), fingerprint_file(base / "model.safetensors")]),
        weights=weights(wrong, settings.extra, rejected),
    )
    steps = trainer.fit()["steps"]
    provenance = {"target": run.target.fingerprints, "refined_from": str(base), "refine": settings.model_dump()}
    export(trainer.draft.served_state(), trainer.draft.config, run.target, folder / "draft", provenance=provenance)
    before, after = (
        replay(path, run.target, store, k, parts["heldout"], "held-out conversations")[1]
        for path in (base, folder / "draft")
    )
    kept = {name: after[name] for name in ("tau", "interval", "protocol")}
    result = {"draft": str(folder / "draft"), "steps": steps, "rejected_share": rejected, "tau_before": before["tau"]}
    write_json(folder / "refine.json", result | kept)
    return result | kept
