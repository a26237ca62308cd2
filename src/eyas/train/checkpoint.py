"""Checkpoints that are whole or not there, checksummed, and refused when damaged or foreign."""

import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from safetensors.torch import save as to_bytes

from eyas.errors import EyasError
from eyas.files import atomic_file, atomic_folder, fingerprint_file, read_json, write_json

State = dict[str, torch.Tensor]


def save(folder: Path, step: int, model: State, optimizer: State, state: dict[str, Any], keep: int = 2) -> Path:
    """Write `folder/step-N` atomically: weights, optimizer, state.json with checksums.

    Older ones beyond the newest `keep` go, except the best by validation tau (state's "tau").
    """
    path = folder / f"step-{step:08d}"
    with atomic_folder(path) as temporary:
        save_file(model, temporary / "model.safetensors")
        save_file(optimizer, temporary / "optimizer.safetensors")
        sums = {name: fingerprint_file(temporary / name) for name in ("model.safetensors", "optimizer.safetensors")}
        write_json(temporary / "state.json", state | {"step": step, "sha256": sums})
    kept = best(folder)
    for old in steps(folder)[:-keep]:
        if old != kept:
            shutil.rmtree(old, ignore_errors=True)
    return path


def save_tensors(file: Path, tensors: State, metadata: dict[str, str]) -> None:
    """One safetensors file, whole or not there."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(file) as handle:
        handle.write(to_bytes({name: tensor.contiguous() for name, tensor in tensors.items()}, metadata))


def load_tensors(file: Path) -> tuple[State, dict[str, str]]:
    """Tensors and metadata of one safetensors file. Raises FileNotFoundError when it is not there."""
    with safe_open(str(file), framework="pt") as handle:
        return {name: handle.get_tensor(name) for name in handle.keys()}, handle.metadata() or {}  # noqa: SIM118


def sweep(folder: Path) -> None:
    """Remove what a kill left half-written."""
    for path in folder.glob(".step-*"):
        shutil.rmtree(path, ignore_errors=True)


def steps(folder: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    return sorted(path for path in folder.glob("step-*") if (path / "state.json").exists())


def best(folder: Path) -> Path | None:
    """The checkpoint with the highest validation tau, the newest of equals; None where none was validated."""
    taus = [(read_json(path / "state.json").get("tau"), path) for path in steps(folder)]
    return max(((tau, path) for tau, path in taus if tau is not None), default=(None, None))[1]


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
