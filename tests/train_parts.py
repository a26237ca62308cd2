"""Parts of the trainer's tests: processes that train and may be killed, forked from one that has imported everything."""

import json
import multiprocessing
import os
import socket
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
import yaml
from safetensors.torch import load_file
from torch.nn.parallel import DistributedDataParallel

from eyas.draft import model
from eyas.draft.batch import Batch
from eyas.draft.loss import GradientSink, Teacher
from eyas.recipe import read_recipe
from eyas.run import Run
from eyas.train import checkpoint
from eyas.train.trainer import Trainer, learning_rate

SERVER = multiprocessing.get_context(
    "forkserver"
)  # a fork of the test's own process would take its threads' locks along
SERVER.set_forkserver_preload(["eyas.train.trainer", "eyas.run", "torch.distributed.fsdp", "transformers"])
TIMING = ("tokens_per_s", "data_wait", "mfu", "memory_gb")


def write_recipe(folder: Path, target: Path, prompts: int, train: dict[str, Any]) -> Path:
    """A recipe of a small run in `folder`, with that many prompts of its own."""
    rows = [{"id": f"p{i}", "category": "a", "turns": [f"Say {i} words about number {i * 7}."]} for i in range(prompts)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    value = {
        "target": str(target),
        "run": str(folder / "run"),
        "conversations": {"path": str(folder / "prompts.jsonl"), "heldout": 0.2},
        "generate": {"max_new_tokens": 24, "slots": 8},
        "vocab": {"size": 200},
        "train": {"steps": 3, "epochs": 2, "batch_tokens": 300, "save_every": 2, "compute_dtype": "float32"} | train,
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(value))
    return folder / "recipe.yaml"


def train(recipe: str, out: str, change: dict[str, Any], rank: int, size: int, port: int) -> None:
    """Train as the recipe says, with some settings changed, into the folder `out`; one rank of `size`."""
    _trainer(recipe, out, change, rank, size, port).fit()


def _trainer(recipe: str, out: str, change: dict[str, Any], rank: int, size: int, port: int) -> Trainer:
    if size > 1:
        names = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in names.items()})
    torch.set_num_threads(1)
    os.chdir(Path(recipe).parent)
    run = Run(read_recipe(recipe))
    return run.trainer(Path(out), run.recipe.train.model_copy(update=change), inputs="same")


def plain_head_loss(
    hidden: torch.Tensor,
    master: torch.Tensor,
    head: torch.Tensor,
    sink: GradientSink,
    teacher: Teacher,
    index: torch.Tensor,
    weight: torch.Tensor,
    kind: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Soft cross-entropy and greedy choice by autograd, for `head_loss`."""
    logits = hidden @ master.T
    return (-(teacher.read(index) * logits.log_softmax(-1)).sum(-1) * weight).sum(), logits.argmax(-1)


class Step(torch.nn.Module):
    def __init__(self, trainer: Trainer) -> None:
        super().__init__()
        self.draft, self.loss = trainer.draft, trainer.forward

    def forward(self, batch: Batch, supervised: float) -> torch.Tensor:
        return self.loss(batch, supervised).loss


def train_by_torch(recipe: str, out: str, change: dict[str, Any], rank: int, size: int, port: int) -> None:
    """The same batches and schedule by DistributedDataParallel, autograd and torch's own clipping and AdamW."""
    trainer = _trainer(recipe, out, change, rank, size, port)
    with patch.object(model.Linear, "part", plain_part), patch.object(model, "head_loss", plain_head_loss):
        found = _by_torch(trainer, size)
    if rank == 0:
        Path(out).mkdir(parents=True)
        (Path(out) / "losses.json").write_text(json.dumps(found))


def plain_part(self: model.Linear, x: torch.Tensor, first: int = 0) -> torch.Tensor:
    """By autograd, for the products whose gradients go to a sink."""
    return F.linear(x, self.weight[:, first : first + x.shape[-1]])


def _by_torch(trainer: Trainer, size: int) -> list[float]:
    step = DistributedDataParallel(Step(trainer))
    trained = [p for p in trainer.draft.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, betas=(0.9, 0.95), weight_decay=trainer.settings.weight_decay)
    found: list[float] = []
    for epoch, plan in enumerate(trainer.plan):
        for index in range(len(plan)):
            (batch,) = trainer.read(epoch, index)
            counts = torch.tensor(float(batch.supervised))
            dist.all_reduce(counts)
            loss = step(batch, float(counts) / size)  # the wrapper takes the mean of the ranks' gradients
            optimizer.param_groups[0]["lr"] = learning_rate(trainer.settings, len(found), trainer.total)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(trained, trainer.settings.clip)
            optimizer.step()
            whole = loss.detach() / size
            dist.all_reduce(whole)
            found.append(float(whole))
    return found


def start(recipe: Path, out: Path, ranks: int = 1, work: Callable = train, **change: Any) -> list[BaseProcess]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    jobs = [
        SERVER.Process(target=work, args=(str(recipe), str(out), change, rank, ranks, port)) for rank in range(ranks)
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
