"""Where a store lies: a local folder or an fsspec address, with the few verbs that a store needs."""

import contextlib
import fcntl
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import fsspec

from eyas.errors import UsageError
from eyas.features.record import Damaged, Entry
from eyas.files import atomic_file, disk_errors


class Place:
    """A folder that is local or behind fsspec, with the few verbs a store needs."""

    def __init__(self, path: str | Path) -> None:
        self.path = str(path)
        self.fs, self.root = fsspec.core.url_to_fs(self.path, use_listings_cache=False)
        self.local, self.folder = "file" in self.fs.protocol, Path(self.root)

    def __str__(self) -> str:
        return self.path

    def sizes(self) -> dict[str, int]:
        """File name -> bytes."""
        if self.local:
            found = {}
            with contextlib.suppress(FileNotFoundError), os.scandir(self.folder) as files:
                for file in files:
                    with contextlib.suppress(FileNotFoundError):
                        if file.is_file():
                            found[file.name] = file.stat().st_size
            return found
        try:
            rows = self.fs.ls(self.root, detail=True, refresh=True)
        except FileNotFoundError:
            return {}
        return {row["name"].rsplit("/", 1)[-1]: row["size"] for row in rows if row["type"] == "file"}

    def read(self, name: str, start: int | None = None, end: int | None = None) -> bytes:
        return self.fs.cat_file(f"{self.root}/{name}", start=start, end=end)

    def write(self, name: str, data: bytes) -> None:
        """Whole or not at all, on disk when it returns."""
        if self.local:
            with atomic_file(self.folder / name) as file:
                file.write(data)
        else:
            self.fs.pipe_file(f"{self.root}/{name}", data)

    def remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self.fs.rm_file(f"{self.root}/{name}")

    def clear(self) -> None:
        """Remove a store's files, and no others."""
        for name in self.sizes():
            if name.startswith(("shard-", "journal-", "store.json", "index.parquet", "manifest.json")):
                self.remove(name)


@contextlib.contextmanager
def locked(place: Place, name: str, wait: bool = True) -> Iterator[None]:
    """Hold an flock on `.NAME.lock` beside the data; it dies with its process. Nothing to hold where the place is not local."""
    if not place.local:
        yield
        return
    path = place.folder / f".{name}.lock"
    with disk_errors(path), open(path, "a+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            raise UsageError(
                f"{place}: another process is writing here as {name!r}. Wait for it, or use another writer name."
            ) from None
        yield


def is_locked(place: Place, file_name: str) -> bool:
    with open(place.folder / file_name, "a+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


class Shards:
    """The bytes of records: mapped where the store is local, fetched by range elsewhere."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self._maps: dict[str, mmap.mmap] = {}

    def read(self, entry: Entry, states: bool = True) -> memoryview:
        """The record of `entry`; its beginning, up to the end of its text part, is enough where `states` is False."""
        if not self.place.local:
            end = entry.length if states else min(entry.length, 4096 + 8 * entry.tokens)
            try:
                return memoryview(self.place.read(entry.shard, entry.offset, entry.offset + end))
            except (FileNotFoundError, ValueError):
                raise Damaged(f"its shard {entry.shard} is missing or cut off") from None
        path = f"{self.place.root}/{entry.shard}"
        end = entry.offset + entry.length
        try:
            # A shard may have grown since it was mapped; one that shrank must not be touched through the map.
            size = os.stat(path).st_size
            if size < end:
                raise Damaged(f"its shard {entry.shard} is cut off ({size} bytes, it ends at {end})")
            if entry.shard not in self._maps or len(self._maps[entry.shard]) < end:
                with open(path, "rb") as file:
                    self._maps[entry.shard] = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY)
        except FileNotFoundError:
            raise Damaged(f"its shard {entry.shard} is missing") from None
        return memoryview(self._maps[entry.shard])[entry.offset : end]
