"""Checkpoints that are whole or not there, checksummed, and refused when damaged or foreign."""

import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from eyas.errors import EyasError
from eyas.files import atomic_folder, fingerprint_file, read_json, write_json

State = dict[str, torch.Tensor]


def save(folder: Path, step: int, model: State, optimizer: State, state: dict[str, Any], keep: int = 2) -> Path:
    """Write `folder/step-N` atomically: weights, optimizer, state.json with checksums. Older ones beyond `keep` go."""
    path = folder / f"step-{step:08d}"
    with atomic_folder(path) as temporary:
        save_file(model, temporary / "model.safetensors")
        save_file(optimizer, temporary / "optimizer.safetensors")
        sums = {name: fingerprint_file(temporary / name) for name in ("model.safetensors", "optimizer.safetensors")}
        write_json(temporary / "state.json", state | {"step": step, "sha256": sums})
    for old in steps(folder)[:-keep]:
        shutil.rmtree(old, ignore_errors=True)
    return path


def steps(folder: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    return sorted(path for path in folder.glob("step-*") if (path / "state.json").exists())


def load(path: Path, inputs: str) -> tuple[State, State, dict[str, Any]]:
    """Weights, optimizer and state. Raises EyasError when damaged, or when made by a run with other inputs."""
    state = read_json(path / "state.json")
    if state.get("inputs") != inputs:
        raise EyasError(
            f"{path}: belongs to a run with another recipe or data. Use another run folder, or `--redo train`."
        )
    for name, expected in state["sha256"].items():
        if not (path / name).exists() or fingerprint_file(path / name) != expected:
            raise EyasError(
                f"{path / name}: damaged (its checksum differs). Remove {path} to go on from the one before."
            )
    try:
        return load_file(path / "model.safetensors"), load_file(path / "optimizer.safetensors"), state
    except SafetensorError as error:
        raise EyasError(f"{path}: cannot be read ({error}). Remove it to go on from the one before.") from None
