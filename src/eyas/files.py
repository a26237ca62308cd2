"""Files that are either whole or not there: atomic writing, fingerprints, paths that stay inside their folder."""

import contextlib
import errno
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from eyas.errors import EyasError, UsageError


def fsync_folder(folder: Path) -> None:
    """Make a rename inside `folder`, or a file's bytes, survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn a full disk or a missing permission into one clear sentence."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            text = "the disk is full. Nothing half-written was kept; free space and run again."
            raise EyasError(f"{path}: {text}") from None
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise EyasError(f"{path}: not writable ({os.strerror(error.errno)}). Choose another folder.") from None
        raise


@contextlib.contextmanager
def atomic_file(path: str | Path) -> Iterator[BinaryIO]:
    """Write a file whole or not at all: temp file beside it, fsync, rename."""
    path = Path(path)
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
        try:
            with os.fdopen(descriptor, "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.chmod(temporary, 0o644)
            os.replace(temporary, path)
            fsync_folder(path.parent)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
            raise


@contextlib.contextmanager
def atomic_folder(path: str | Path) -> Iterator[Path]:
    """Fill a temporary folder, then rename it to `path`, replacing what stood there."""
    path = Path(path)
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent))
        old = temporary.with_suffix(".old")
        try:
            yield temporary
            os.chmod(temporary, 0o755)
            for written in (*temporary.rglob("*"), temporary):
                fsync_folder(written)
            if path.exists():  # a folder cannot be replaced in one rename, so the old one steps aside first
                os.rename(path, old)
            os.rename(temporary, path)
            fsync_folder(path.parent)
            shutil.rmtree(old, ignore_errors=True)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            if old.exists() and not path.exists():
                os.rename(old, path)
            raise


def write_text(path: str | Path, text: str) -> None:
    with atomic_file(path) as file:
        file.write(text.encode("utf-8"))


def write_json(path: str | Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def read_json(path: str | Path) -> Any:
    """Read a JSON file, or raise one clear sentence."""
    path = Path(path)
    try:
        return json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise UsageError(f"{path}: no such file.") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: not valid JSON ({error}).") from None


def fingerprint(value: Any) -> str:
    """sha256 of a JSON value in canonical form (sorted keys, no spaces)."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":"), default=str).encode()).hexdigest()


def fingerprint_file(path: str | Path) -> str:
    """sha256 of a file's bytes."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def inside(folder: str | Path, name: str) -> Path:
    """The path of `name` below `folder`; a name that would leave the folder is refused."""
    root = Path(folder).resolve()
    path = (root / name).resolve()
    if not path.is_relative_to(root):
        raise UsageError(f"{folder}: the name {name!r} points outside its folder; the manifest is damaged or hostile.")
    return path
