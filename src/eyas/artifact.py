"""An artifact is a folder with a manifest: what it is, what it was made from, its figures, what wrote it."""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from eyas import __version__
from eyas.errors import UsageError
from eyas.files import fingerprint, read_json, write_json

SCHEMA = 1


@dataclass
class Manifest:
    """`inputs` maps a name to a sha256; two artifacts belong together when their inputs agree."""

    kind: str
    inputs: dict[str, str]
    figures: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    schema: int = SCHEMA
    written_by: str = f"eyas {__version__}"

    def write(self, folder: str | Path) -> None:
        """The manifest is written last: an artifact without one is unfinished."""
        write_json(Path(folder) / "manifest.json", asdict(self))

    @property
    def id(self) -> str:
        """The fingerprint that later stages name as their input."""
        return fingerprint({"kind": self.kind, "inputs": self.inputs, "schema": self.schema})


def read_manifest(folder: str | Path, kind: str) -> Manifest | None:
    """The manifest of a finished artifact, or None when the folder holds none."""
    path = Path(folder) / "manifest.json"
    if not path.exists():
        return None
    value = read_json(path)
    found = value.get("kind") if isinstance(value, dict) else type(value).__name__
    if found != kind:
        raise UsageError(f"{path}: holds {found!r}, expected an artifact of kind {kind!r}. Point to another folder.")
    if value.get("schema") != SCHEMA:
        raise UsageError(
            f"{path}: schema {value.get('schema')}, this eyas reads {SCHEMA}. Remove the folder and run again."
        )
    known = Manifest.__dataclass_fields__
    return Manifest(**{name: value[name] for name in known if name in value})


def differences(expected: dict[str, str], found: dict[str, str]) -> list[str]:
    """Names of the inputs that differ, for a message that says what does not belong together."""
    return sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
