"""Parts of the trainer's tests: processes that train and may be killed, forked from one that has imported everything."""

import json
import multiprocessing
import os
import socket
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from eyas.recipe import read_recipe
from eyas.run import Run
from eyas.train import checkpoint

SERVER = multiprocessing.get_context(
    "forkserver"
)  # a fork of the test's own process would take its threads' locks along
SERVER.set_forkserver_preload(["eyas.train.trainer", "eyas.run", "torch.distributed.fsdp", "transformers"])
TIMING = ("tokens_per_s", "data_wait", "mfu", "memory_gb")


def train(recipe: str, out: str, change: dict[str, Any], rank: int, size: int, port: int) -> None:
    """Train as the recipe says, with some settings changed, into the folder `out`; one rank of `size`."""
    if size > 1:
        names = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in names.items()})
    torch.set_num_threads(1)
    os.chdir(Path(recipe).parent)
    run = Run(read_recipe(recipe))
    run.trainer(Path(out), run.recipe.train.model_copy(update=change), inputs="same").fit()


def start(recipe: Path, out: Path, ranks: int = 1, **change: Any) -> list[BaseProcess]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    jobs = [
        SERVER.Process(target=train, args=(str(recipe), str(out), change, rank, ranks, port)) for rank in range(ranks)
    ]
    for job in jobs:
        job.start()
    return jobs


def finish(jobs: list[BaseProcess]) -> None:
    for job in jobs:
        job.join(timeout=240)
    assert [job.exitcode for job in jobs] == [0] * len(jobs)


def kill(jobs: list[BaseProcess]) -> None:
    for job in jobs:
        job.kill()
    for job in jobs:
        job.join()


def log_lines(out: Path) -> list[dict[str, Any]]:
    """The log without what a clock wrote."""
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key not in TIMING} for line in lines]


def losses(out: Path) -> list[float]:
    lines = [line for line in log_lines(out) if "loss" in line]
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    return [line["loss"] for line in lines]


def newest(out: Path) -> Path:
    return checkpoint.steps(out / "checkpoints")[-1]


def state(out: Path) -> dict[str, torch.Tensor]:
    """Weights and optimizer state of the newest checkpoint."""
    files = ("model.safetensors", "optimizer.safetensors")
    return {f"{file} {name}": tensor for file in files for name, tensor in load_file(newest(out) / file).items()}


def same_bits(a: Path, b: Path) -> bool:
    one, other = state(a), state(b)
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())
