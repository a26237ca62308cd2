"""Figures in words: units for people, and a tau that never goes without its protocol."""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eyas import files
from eyas.report.figures import number, percent
from eyas.serving.contract import ENGINES

STAGES = {  # folder -> the verb that fills it
    "conversations": "prepare",
    "answers": "generate",
    "store": "extract",
    "vocab": "vocab",
    "audit": "audit",
    "train": "train",
    "draft": "export",
    "check": "check",
    "replay": "replay",
}
SHARE = re.compile(r"(share|coverage|rate|fraction|acc|accuracy|oov|data_wait)(_\d+)?$")
WITHHELD = "not shown: its protocol was not recorded"


def duration(seconds: float) -> str:
    if not math.isfinite(seconds):
        return "not known"
    if seconds < 59.5:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60:,} h {minutes % 60:02d} min"


def size(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.3g} {unit}" if unit != "B" else f"{count:.0f} B"
        count /= 1024
    return f"{count:.3g} TiB"


def label(key: str) -> str:
    return re.sub("_per_s$", " per second", key).replace("_", " ")


def engine(name: str) -> str:
    return ENGINES[name].title if name in ENGINES else name


def value(key: str, found: Any) -> str:
    """A figure with the unit that its key tells: bytes, seconds, shares, `a_per_b`; small dicts are written out."""
    if isinstance(found, Mapping) and found.keys() >= {"category", "share"}:  # a row of the mix
        return f"{found['category']} {percent(found['share'])}"
    if isinstance(found, Mapping):
        return ", ".join(f"{label(str(name))} {value(str(name), entry)}" for name, entry in found.items()) or "none"
    if isinstance(found, list | tuple):
        return ", ".join(value(key, entry) for entry in found) or "none"
    if found is None:
        return "–"
    if isinstance(found, bool):
        return "yes" if found else "no"
    if not isinstance(found, int | float):
        text = str(found)
        return text[:12] + "…" if re.fullmatch(r"[0-9a-f]{40,64}", text) else text
    if not math.isfinite(found):
        return "not a number"
    if per := re.fullmatch(r"(?:.*_)?([a-z]+)_per_([a-z]+)", key):
        top = "" if per[1] in key.split("_per_")[0].split("_")[:-1] else per[1]
        return f"{number(found)} {top}/{per[2]}"
    if re.search(r"(^|_)(bytes|disk|memory)$", key):
        return size(found)
    if re.search(r"(^|_)(seconds|time)$", key):
        return duration(found)
    if SHARE.search(key) and 0 <= found <= 1:
        return percent(found)
    if key == "speedup":
        return f"×{found:.2f}"
    if re.search(r"(^|_)tau(_|$)", key):
        return f"{found:.2f}"
    return f"{found:,}" if isinstance(found, int) else number(found)


def protocol_text(protocol: Mapping[str, Any] | str | None) -> str:
    """`chain, K = 4, temperature 0, held-out (62 prompts, 13,204 tokens), loaded as own`; what is not stated is said."""
    if isinstance(protocol, str) or not protocol:
        return str(protocol or "")
    said = {key: entry for key, entry in protocol.items() if entry is not None}
    counts = [f"{said[key]:,} {key}" for key in ("prompts", "tokens") if isinstance(said.get(key), int | float)]
    data = str(said["data"]) if said.get("data") else "data not stated"
    parts = [
        str(said.get("shape", "shape not stated")),
        f"K = {said['k']}" if "k" in said else "K not stated",
        f"temperature {said['temperature']:g}" if "temperature" in said else "temperature not stated",
        f"{data} ({', '.join(counts)})" if counts else f"{data} (prompts and tokens not stated)",
        f"loaded as {said['loaded_as']}" if "loaded_as" in said else "loader not stated",
    ]
    known = {"shape", "k", "temperature", "data", "prompts", "tokens", "loaded_as"}
    parts += [f"{label(key)} {value(key, entry)}" for key, entry in said.items() if key not in known]
    return ", ".join(parts)


def read_json(path: Path, empty: Any) -> Any:
    """The JSON at `path` without its nulls, or `empty` where there is no file or another type of value.

    A damaged file raises UsageError: it is never passed over.
    """
    found = _present(files.read_json(path)) if path.exists() else empty
    return found if isinstance(found, type(empty)) else empty


def _present(found: Any) -> Any:
    """A JSON value with every null taken away: from here on there is one way for a figure to be missing."""
    if isinstance(found, dict):
        return {key: _present(entry) for key, entry in found.items() if entry is not None}
    return [_present(entry) for entry in found if entry is not None] if isinstance(found, list) else found


def read_audit(run: Path) -> dict[str, Any]:
    """The audit before training. One after it that says NO-GO adds its reasons; a NO-GO that was accepted is told."""
    before, after = (read_json(run / "audit" / name, {}) for name in ("audit.json", "after.json"))
    if before and after.get("verdict") == "no-go":
        reasons = [*before.get("reasons", []), *(f"after training: {reason}" for reason in after.get("reasons", []))]
        before |= {"verdict": "no-go", "reasons": reasons}
    if accepted := before.get("accepted"):
        before["reasons"] = [*before.get("reasons", []), f"Accepted all the same: {accepted}."]
    return before


def continued(command: str) -> str:
    """A shell command with a line for each flag, still one command: breaks only between arguments, each escaped."""
    quoted = r"""'[^']*'|"(?:\\.|[^"\\])*\""""
    arguments = re.findall(rf"""(?:\\.|[^\s'"\\]|{quoted}|['"])+""", command.replace("\\\n", " "))
    return "".join(f" \\\n  {each}" if each.startswith("--") else f" {each}" for each in arguments)[1:]
