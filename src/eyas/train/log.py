"""What training says of itself: log.jsonl always, TensorBoard, trackio or wandb when asked; and how busy the machine is."""

import importlib
import json
import os
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from eyas.draft.config import DraftConfig
from eyas.errors import UsageError
from eyas.files import write_text

Tracker = tuple[Callable[[dict[str, float], int], None], Callable[[], None]]  # log(values, step), close()

# Dense bf16 products of a GPU per second, from its maker's data sheet.
PEAKS = {"B200": 2250e12, "H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "RTX 4090": 165e12}


class Log:
    """log.jsonl of a run, cut back to `step` where the run goes on, and the trackers that the recipe names."""

    def __init__(self, folder: Path, trackers: Sequence[str], step: int) -> None:
        path = folder / "log.jsonl"
        if path.exists():
            kept = [line for line in _lines(path) if step and line["step"] <= step]
            write_text(path, "".join(json.dumps(line) + "\n" for line in kept))
        self.trackers = [open_tracker(name, folder, step) for name in trackers]
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115 (closed by close)

    def write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        for track, _ in self.trackers:
            track(dict(flat({k: v for k, v in line.items() if k != "step"})), line["step"])

    def sync(self) -> None:
        """To disk: what a checkpoint's resume will look for."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()
        for _, close in self.trackers:
            close()


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    for text in path.read_text("utf-8").splitlines():
        try:
            yield json.loads(text)
        except ValueError:  # a line torn by a kill
            return


def flat(value: Any, name: str = "") -> Iterator[tuple[str, float]]:
    """The numbers of a nested line as (path, number): validation/by_category/maths, acc/0."""
    if isinstance(value, dict | list):
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield from flat(part, f"{name}/{key}" if name else str(key))
    elif isinstance(value, int | float):
        yield name, float(value)


def open_tracker(name: str, folder: Path, step: int) -> Tracker:
    """`name` is tensorboard, trackio or wandb. Raises UsageError where its package is missing."""
    try:
        if name == "tensorboard":
            from torch.utils.tensorboard import SummaryWriter

            writer: Any = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)

            def track(values: dict[str, float], at: int) -> None:
                for key, value in values.items():
                    writer.add_scalar(key, value, at)

            return track, writer.close
        module = importlib.import_module(name)
    except ImportError:
        raise UsageError(
            f"train.log_to: {name} is not installed. Install it (pip install {name}), or leave it out of the recipe."
        ) from None
    run = folder.resolve().parent.name
    module.init(project="eyas", name=run, resume="allow", **({"id": run} if name == "wandb" else {}))
    return lambda values, at: module.log(values, step=at), module.finish


def step_flops(config: DraftConfig, rows: float, computed: float, teachers: float, head: bool) -> float:
    """Floating-point operations of a step's products with weights; attention scores are not counted.

    rows read by fc and by the first layer's embedding half, once for all steps; `computed` rows over all steps of the
    unroll; teachers: positions whose teacher was made; head: whether the head is trained. A product of the forward
    pass is counted with its gradient for the weights, where they are trained, and for its inputs, where anything
    trained lies before.
    """
    readers = sum(shape[0] for shape in config.attention_shapes(0).values() if shape[-1] == 0)
    embedded = readers * config.hidden_size
    fc, normed = config.fc_in * config.hidden_size, config.fc_norm or config.norm_before_fc
    row = (6.0 if normed else 4.0) * fc + 6.0 * embedded
    step = 6.0 * (config.step_parameters - embedded)
    step += (6.0 if head else 4.0) * config.draft_vocab_size * config.hidden_size
    return row * rows + step * computed + 2.0 * config.draft_vocab_size * config.target_hidden_size * teachers


def peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Operations per second that the device can reach: by its name, else the best of some products of its own."""
    if device.type == "cuda":
        for name, peak in PEAKS.items():
            if name in torch.cuda.get_device_name(device):
                return peak
    size, best = 8192 if device.type == "cuda" else 768, float("inf")
    a = torch.ones(size, size, dtype=dtype, device=device)
    for _ in range(4):
        start = time.perf_counter()
        float((a @ a)[0, 0])  # reading one number waits for the product
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best


def peak_memory(device: torch.device) -> int:
    """Bytes that this process had in use at most: of the GPU, else of the machine."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
