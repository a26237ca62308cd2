"""Files and folders that are whole or not there, also when the disk fails half-way."""

import os

import pytest

from eyas.errors import EyasError
from eyas.files import atomic_file, atomic_folder


def names(folder) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_a_folder_is_replaced_whole(tmp_path):
    for text in ("first", "second"):
        with atomic_folder(tmp_path / "a") as folder:
            (folder / "sub").mkdir()
            (folder / "sub" / text).write_text(text)
        assert names(tmp_path) == ["a", "a/sub", f"a/sub/{text}"]
    with pytest.raises(KeyError), atomic_folder(tmp_path / "a") as folder:
        (folder / "half").write_text("x")
        raise KeyError
    with pytest.raises(KeyError), atomic_file(tmp_path / "a" / "file") as file:
        file.write(b"half")
        raise KeyError
    assert names(tmp_path) == ["a", "a/sub", "a/sub/second"]


def test_the_old_folder_stays_when_the_new_one_cannot_take_its_place(tmp_path, monkeypatch):
    with atomic_folder(tmp_path / "a") as folder:
        (folder / "first").write_text("x")
    rename = os.rename

    def refuse(source, target):
        if str(source).endswith(".tmp"):
            raise PermissionError(13, "Permission denied")
        rename(source, target)

    monkeypatch.setattr(os, "rename", refuse)
    with pytest.raises(EyasError, match="not writable"), atomic_folder(tmp_path / "a") as folder:
        (folder / "second").write_text("x")
    assert names(tmp_path) == ["a", "a/first"]
