"""Extraction by many machines: Ray actors take batches from one work list and fill one store.

Each actor loads the target and writes a shard series of its own into the store, which all machines must reach (a shared
disk, or an address such as s3://). What an actor had in hand when it died goes to the others; what it had committed stays.
"""

import contextlib
import os
import time
from collections import deque
from pathlib import Path
from typing import Any

from eyas.errors import EyasError, UsageError
from eyas.features import extract as e
from eyas.features.index import held_entries, load_entries, read_description
from eyas.features.place import Place
from eyas.features.store import StoreWriter
from eyas.progress import progress
from eyas.target import Target, load_target, read_target


class Extractor:
    """One actor: a loaded target and a writer."""

    def __init__(self, name: str, target: Path, dtype: str, trust: bool, path: str, layers: list[int], codec: str):
        self.target, self.layers = load_target(read_target(target), dtype, trust_remote_code=trust), layers
        self.writer = e.open_writer(path, self.target, layers, codec, writer=name)

    def work(self, documents: list[dict[str, Any]], done: set[str]) -> int:
        """Commit the samples of a batch that are not `done`; returns its tokens."""
        for sample in e.samples(documents, lambda batch: e.forward(self.target, batch, self.layers), done):
            e.check_finite(sample)
            self.writer.append(sample)
        self.writer.commit()
        return e.tokens_of(documents)

    def close(self) -> None:
        self.writer.close()


def extract(
    documents: list[dict[str, Any]],
    target: Target,
    path: str | Path,
    actors: int,
    *,
    dtype: str = "auto",
    trust_remote_code: bool = False,
    layers: list[int] | None = None,
    codec: str = "bf16",
    token_budget: int = 4096,
    threshold: float = 0.9,
    inputs: dict[str, str] | None = None,
) -> dict[str, Any]:
    """As `eyas.features.extract.extract`, by `actors` on the cluster of RAY_ADDRESS (none: on this machine).

    An actor takes a GPU where the cluster has any. Raises EyasError when no actor is left alive.
    """
    try:
        import ray
    except ImportError:
        raise UsageError("extract.actors: needs Ray. Install it with `pip install 'eyas[ray]'`.") from None
    layers, path = e.wanted_layers(layers, target), str(path)
    e.check_documents(documents, target)
    if not ray.is_initialized():
        ray.init(address=os.environ.get("RAY_ADDRESS"), log_to_driver=False)
    start, place, fresh = time.monotonic(), Place(path), 0
    kind: Any = ray.remote(num_gpus=1 if ray.cluster_resources().get("GPU") else 0)(Extractor)
    settings = (target.path.resolve(), dtype, trust_remote_code, path, layers, codec)
    held = _held(documents, place)
    work = e.batches([len(document["tokens"]) for document in documents], token_budget)
    todo = deque(batch for batch in work if not held.issuperset(batch))
    alive = [kind.remote(f"ray{number}", *settings) for number in range(min(actors, len(todo)))]
    idle, running, reason = deque(alive), dict[Any, Any](), ""
    with progress("extract", e.tokens_of(documents), "tok", done=e.tokens_of(documents[i] for i in held)) as advance:
        while todo or running:
            while todo and idle:
                batch = todo.popleft()
                if not held.issuperset(batch):
                    actor = idle.popleft()
                    done = {documents[i]["id"] for i in held.intersection(batch)}
                    running[actor.work.remote([documents[i] for i in batch], done)] = (actor, batch)
            if not running:
                if todo:
                    raise EyasError(
                        f"{path}: all {actors} Ray actors have died ({reason}). Run the same command again."
                    )
                break
            (ready,), _ = ray.wait(list(running), num_returns=1)
            actor, batch = running.pop(ready)
            try:
                count = ray.get(ready)
                idle.append(actor)
                fresh += count
                advance(count)
            except ray.exceptions.RayTaskError as error:  # the work itself failed: so would the others
                raise error.cause if isinstance(error.cause, EyasError) else error from None
            except ray.exceptions.RayActorError as error:  # the actor is gone; it may have committed
                alive.remove(actor)
                reason = str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__
                held = _held(documents, place)
                todo.appendleft(batch)
    for actor in alive:
        with contextlib.suppress(ray.exceptions.RayActorError):
            ray.get(actor.close.remote())
            ray.kill(actor)
    made = read_description(place)
    form = {name: made[name] for name in ("layers", "hidden_size", "target", "codec", "extra")}
    with StoreWriter(path, **form, writer="ray") as store:
        return e.conclude(store, documents, fresh, time.monotonic() - start, threshold, inputs)


def _held(documents: list[dict[str, Any]], place: Place) -> set[int]:
    return e.already(documents, held_entries(load_entries(place), place.sizes()), place.path)
