"""Training without extraction beforehand: a target in this process computes what the trainer reads.

Every document is computed by itself, so its states depend on nothing else: not on the batch, the number of ranks, or
where a run was cut off.
"""

from pathlib import Path
from typing import Any

from eyas.features.extract import already, check_documents, forward, open_writer, to_sample
from eyas.features.store import Sample, Store
from eyas.target import LoadedTarget


class Online:
    """Samples of `documents` (rows of answers.jsonl). With a `cache` each is computed once and kept in a store there.

    Several ranks share a cache; `writer` is this one's name in it. From a cache the states are always read back, so a
    lossy codec gives the same in every epoch.
    """

    def __init__(
        self,
        documents: list[dict[str, Any]],
        target: LoadedTarget,
        layers: list[int],
        cache: Path | None = None,
        codec: str = "bf16",
        writer: str = "0",
    ) -> None:
        check_documents(documents, target.target)
        self.documents = {document["id"]: document for document in documents}
        self.target, self.layers, self.epoch = target, layers, 0
        self.writer = None
        if cache is not None:
            self.writer = open_writer(cache, target, layers, codec, writer=writer)
            already(documents, self.writer.entries, cache)  # refuses other conversations under the same ids
            self.store = Store(cache)

    def length(self, name: str) -> int:
        return len(self.documents[name]["tokens"])

    def read(self, names: list[str], epoch: int = 0) -> list[Sample]:
        """The samples of these documents, in order."""
        if self.writer is None:
            return [self._compute(name) for name in names]
        if epoch > self.epoch:  # what other ranks have computed
            self.epoch = epoch
            self.store.refresh()
        missing = [name for name in names if name not in self.store.entries]
        if missing:
            for name in missing:
                self.writer.append(self._compute(name))
            self.writer.commit()
            self.store.entries |= {name: self.writer.entries[name] for name in missing}
        return [self.store.read(name) for name in names]

    def _compute(self, name: str) -> Sample:
        document = self.documents[name]
        return to_sample(document, *next(forward(self.target, [document], self.layers)))

    def finish(self) -> None:
        """Complete the cache as a store like any other."""
        if self.writer is not None:
            self.writer.finish()
