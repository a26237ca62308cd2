"""The trainer: training-time test over packed documents, with exact resume.

Deterministic by (seed, epoch, position): the batches of every epoch are planned before it starts, so a resumed run
continues at the same document and ends with the same bits.
"""

import json
import math
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch

from eyas.decode.replay import Acceptance, accept, protocol
from eyas.draft.batch import Batch, as_bfloat16, pack
from eyas.draft.config import DraftConfig
from eyas.draft.model import Draft, Unrolled
from eyas.draft.vocab import DraftVocab
from eyas.errors import EyasError
from eyas.features.store import Store
from eyas.progress import progress
from eyas.recipe import Train
from eyas.target import Target
from eyas.train import checkpoint
from eyas.train.parallel import ranks, share
from eyas.train.start import check_fits, least_squares_start, warm_start

START_ROWS = 1 << 17  # of the least-squares start
START_GROUP = 16  # documents a product
START_PARTS = ("fc.", "norm.", "layers.")
STANDARD_DOCUMENTS = 64  # whose rows give each auxiliary channel its scale
SKIPS_ALLOWED = 10  # non-finite steps before the run is stopped


class Stopped(EyasError):
    """A signal ended the run after a saved step."""

    exit_code = 0


def plan_epoch(lengths: list[int], budget: int, seed: int, epoch: int) -> list[list[int]]:
    """Documents of each batch: a shuffle by (seed, epoch), cut where the rows would pass the budget."""
    batches: list[list[int]] = [[]]
    rows = 0
    for index in np.random.default_rng([seed, epoch]).permutation(len(lengths)).tolist():
        if batches[-1] and rows + lengths[index] > budget:
            batches.append([])
            rows = 0
        batches[-1].append(index)
        rows += lengths[index]
    return batches


def learning_rate(settings: Train, step: int, total: int) -> float:
    """Rate of step `step` (0-based) of `total`: linear warm-up, then the schedule down to zero."""
    warm = max(1, round(settings.warmup * total))
    if step < warm:
        return settings.lr * (step + 1) / warm
    left = (total - step) / max(1, total - warm)  # 1 → 0
    if settings.schedule == "linear":
        return settings.lr * left
    if settings.schedule == "wsd":
        return settings.lr * min(1.0, left / 0.2)
    return settings.lr * 0.5 * (1 - math.cos(math.pi * left))


def initial_draft(
    config: DraftConfig, target: Target, vocab: DraftVocab, settings: Train
) -> tuple[Draft, torch.Tensor, torch.Tensor]:
    """A fresh draft, the teacher's head rows [Vd, H], and the table target id -> draft id [V] (-1: outside).

    The embedding is the target's; the head starts from the target's own rows where widths agree and it is asked for.
    """
    names = {part: target.tensor_name(part) for part in ("embedding", "head")}
    for part, name in names.items():
        if name is None:
            raise EyasError(f"{target.path}: no {part} tensor was found in its safetensors files.")
    draft = Draft(config)
    draft.initialise(settings.seed)
    embedding = target.read_tensor(str(names["embedding"]))
    head = embedding if names["head"] == names["embedding"] else target.read_tensor(str(names["head"]))
    targets = torch.from_numpy(vocab.d2t.astype(np.int64)) + torch.arange(len(vocab))
    rows = head[targets].clone()
    if embedding.shape[1] != config.hidden_size:
        raise EyasError(
            f"draft.hidden_size {config.hidden_size}: the target's embedding is {embedding.shape[1]} wide; they must agree."
        )
    draft.embed_tokens.weight = torch.nn.Parameter(embedding.clone(), requires_grad=False)
    if settings.head_from_target and rows.shape[1] == config.hidden_size:
        draft.lm_head.weight.data.copy_(rows)
    draft.lm_head.weight.requires_grad_(not settings.freeze_head)
    if draft.d2t is not None and draft.t2d is not None:
        draft.d2t.copy_(targets - torch.arange(len(vocab)))
        draft.t2d[targets] = True
    table = torch.full((config.vocab_size,), -1, dtype=torch.int64)
    table[targets] = torch.arange(len(vocab))
    return draft, rows, table


class Trainer:
    """One run of training. `folder` holds log.jsonl and checkpoints/; `inputs` says what it belongs to."""

    def __init__(
        self,
        folder: Path,
        settings: Train,
        config: DraftConfig,
        target: Target,
        vocab: DraftVocab,
        store: Store,
        train_ids: list[str],
        heldout_ids: list[str],
        inputs: str,
        replay_k: int = 4,
    ) -> None:
        self.folder, self.settings, self.target, self.store, self.inputs = folder, settings, target, store, inputs
        self.train_ids, self.heldout_ids, self.replay_k = train_ids, heldout_ids, replay_k
        self.ranks = ranks()
        cuda = torch.cuda.is_available()
        self.device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
        self.dtype = getattr(torch, settings.compute_dtype)
        self.draft, teacher, self.to_draft = initial_draft(config, target, vocab, settings)
        if settings.standardise and not (config.fc_norm or config.norm_before_fc):  # those standardise by themselves
            rows = [store.read(name).aux for name in train_ids[:STANDARD_DOCUMENTS]]
            self.draft.standardise(as_bfloat16(np.concatenate(rows)).flatten(1))
        if settings.warm:
            warm_start(self.draft, settings.warm, target, settings.remap)
        elif settings.start == "least_squares":
            self._start()
        self.draft.to(self.device)
        self.to_draft = self.to_draft.to(self.device)
        self.teacher_head = teacher.to(self.device, self.dtype)
        self.optimizer = torch.optim.AdamW(
            [p for p in self.draft.parameters() if p.requires_grad],
            lr=settings.lr,
            betas=(0.9, 0.95),
            weight_decay=settings.weight_decay,
            fused=True,
        )
        self.lengths = [len(store.tokens(name)) - 1 for name in train_ids]
        self.plan = [plan_epoch(self.lengths, settings.batch_tokens, settings.seed, e) for e in range(settings.epochs)]
        self.total = sum(map(len, self.plan))
        self.step = self.skipped = 0

    def _start(self) -> None:
        """The least-squares start, kept beside the checkpoints: a pass over the data is made once."""
        check_fits(self.draft.config)
        file = self.folder / "start.safetensors"
        try:
            found, metadata = checkpoint.load_tensors(file)
        except FileNotFoundError:
            found, metadata = {}, {}
        if metadata.get("inputs") != self.inputs:
            with progress("start", len(self.train_ids), "documents") as advance:
                groups = (self.train_ids[at : at + START_GROUP] for at in range(0, len(self.train_ids), START_GROUP))
                batches = (pack([self.store.read(n) for n in group]) for group in groups if not advance(len(group)))
                seen = least_squares_start(self.draft, batches, START_ROWS)
            found = {name: t for name, t in self.draft.state_dict().items() if name.startswith(START_PARTS)}
            if self.ranks.first:
                checkpoint.save_tensors(file, found, {"inputs": self.inputs, "rows": str(seen)})
        self.draft.load_state_dict(found, strict=False)

    # one step

    def read(self, epoch: int, index: int) -> Batch | None:
        """This rank's part of a global batch; None when it has fewer documents than there are ranks."""
        mine = share(self.plan[epoch][index], self.lengths, self.ranks.rank, self.ranks.size)
        if not mine:
            return None
        return pack([self.store.read(self.train_ids[i]) for i in mine]).to(self.device, self.dtype)

    def forward(self, batch: Batch, supervised: int, survivors: bool | None = None) -> Unrolled:
        """The unroll of this rank's batch; `supervised` rows are the loss's denominator, on all ranks together."""
        s = self.settings
        return self.draft.unroll(
            batch,
            s.steps,
            self.teacher_head,
            self.target.logit_rule,
            self.to_draft,
            survivors=s.survivors if survivors is None else survivors,
            decay=s.decay,
            scale=1 / supervised,
            kind=s.loss,
            keep_unknown=s.keep_unknown,
        )

    def dry_step(self) -> float:
        """Forward and full backward of the first batch with a supervised row; gradients stay, nothing is updated."""
        self.optimizer.zero_grad()
        for index in range(len(self.plan[0])):
            batch = self.read(0, index)
            if batch is not None and batch.supervised:
                loss = self.forward(batch, batch.supervised, survivors=False).loss
                self.draft.backward(loss)
                return float(loss.detach())
        raise EyasError("training: no batch holds a supervised token. Look at `eyas preview`.")

    def update(self, batch: Batch | None) -> dict[str, Any] | None:
        """One optimizer step; None when loss or gradient were not finite and the step was left out."""
        rate = learning_rate(self.settings, self.step, self.total)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.zero_grad()
        supervised = int(self.ranks.sum(torch.tensor(batch.supervised if batch else 0, device=self.device)))
        if not supervised:
            return {"loss": 0.0, "lr": rate, "grad_norm": 0.0, "acc": [], "oov": 0.0}
        figures = torch.zeros(3 + 2 * self.settings.steps, dtype=torch.float64, device=self.device)
        if batch is not None and batch.supervised:
            result = self.forward(batch, supervised)
            self.draft.backward(result.loss)
            counts = [result.computed, result.unknown[0], *result.chains, *result.right]
            figures += torch.tensor([float(result.loss.detach()), *counts], dtype=torch.float64, device=self.device)
        loss, computed, unknown, *counts = self.ranks.sum(figures).tolist()
        chains, right = counts[: self.settings.steps], counts[self.settings.steps :]
        parameters = [p for p in self.draft.parameters() if p.requires_grad]
        self.ranks.sum_gradients(parameters)
        norm = float(torch.nn.utils.clip_grad_norm_(parameters, self.settings.clip))
        if not (math.isfinite(loss) and math.isfinite(norm)):
            self.skipped += 1
            if self.skipped > SKIPS_ALLOWED:
                raise EyasError(
                    f"training: {self.skipped} steps had a non-finite loss or gradient. Lower train.lr (now {self.settings.lr})."
                )
            return None
        self.optimizer.step()
        return {
            "loss": loss,
            "acc": [round(r / c, 4) if c else None for r, c in zip(right, chains, strict=True)],
            "lr": rate,
            "grad_norm": norm,
            "oov": unknown / max(chains[0], 1),
            "chain_steps": round(computed / supervised, 3),
        }

    # the loop

    def fit(self) -> dict[str, Any]:
        """Train to the end, or on from the newest complete checkpoint. Returns figures."""
        self.folder.mkdir(parents=True, exist_ok=True)
        first = self.ranks.first
        self.resume()
        start, waited, seconds = time.monotonic(), 0.0, time.monotonic()
        tokens = 0
        last: dict[str, Any] = {}
        order = [(e, i) for e, epoch in enumerate(self.plan) for i in range(len(epoch))]
        with (
            open(self.folder / "log.jsonl" if first else os.devnull, "a", encoding="utf-8") as log,
            ThreadPoolExecutor(1, "reader") as reader,
            progress("train", self.total, "step", done=self.step) if first else nullcontext(_silent) as advance,
            _signals() as stop,
        ):

            def write(line: dict[str, Any]) -> None:
                log.write(json.dumps(line) + "\n")
                log.flush()

            if self.step == 0:
                write({"step": 0, "epoch": 0.0, "validation": self.validate()})
            ahead: Future[Batch | None] | None = None
            while self.step < self.total:
                epoch, index = order[self.step]
                asked = time.monotonic()
                batch = (ahead or reader.submit(self.read, epoch, index)).result()
                wait = time.monotonic() - asked
                ahead = reader.submit(self.read, *order[self.step + 1]) if self.step + 1 < self.total else None
                figures = self.update(batch)
                self.step += 1
                took, seconds = time.monotonic() - seconds, time.monotonic()
                rows = sum(self.lengths[i] for i in self.plan[epoch][index])
                waited, tokens = waited + wait, tokens + rows
                line = {"step": self.step, "epoch": round(epoch + (index + 1) / len(self.plan[epoch]), 4)}
                timing = {"tokens_per_s": round(rows / took, 1), "data_wait": round(wait / took, 5)}
                write(line | (figures or {"skipped": True}) | timing)
                if figures and figures["acc"]:
                    last = figures
                    advance(1, f"loss {figures['loss']:.3f} acc {figures['acc'][0]:.2f}")
                else:
                    advance(1)
                every = self.settings.validate_every
                ended = index + 1 == len(self.plan[epoch])
                tau = None
                if (self.step % every == 0) if every else ended:
                    validation = self.validate()
                    tau = validation["tau"]
                    write(line | {"validation": validation})
                    seconds = time.monotonic()
                stopping = any(self.ranks.gather(bool(stop)))
                if self.step % self.settings.save_every == 0 or self.step == self.total or tau is not None or stopping:
                    log.flush()
                    if first:
                        os.fsync(log.fileno())
                    self.save(tau)
                    seconds = time.monotonic()
                if stopping and self.step < self.total:
                    raise Stopped(
                        f"training stopped at step {self.step} of {self.total}; resume with the same command."
                    )
        spent = time.monotonic() - start
        return {
            "steps": self.total,
            "epochs": self.settings.epochs,
            "documents": len(self.train_ids),
            "tokens_seen": tokens,
            "tokens_per_s": tokens / max(spent, 1e-9),
            "data_wait_share": waited / max(spent, 1e-9),
            "skipped_steps": self.skipped,
            "ranks": self.ranks.size,
            "loss": last.get("loss"),
            "trained_parameters": sum(p.numel() for p in self.draft.parameters() if p.requires_grad),
        }

    def validate(self) -> dict[str, Any]:
        """Replay on the held-out conversations: the figure that counts, from joint prefixes."""
        mine = self.heldout_ids[self.ranks.rank :: self.ranks.size]
        part = accept(self.draft, map(self.store.read, mine), self.replay_k, self.to_draft, self.dtype)
        parts = {c.id: c for found in self.ranks.gather(part.conversations) for c in found}
        found = Acceptance(self.replay_k, [parts[name] for name in self.heldout_ids])
        return brief(found) | {"protocol": protocol(found, self.replay_k, "own", "held-out conversations")}

    # state

    def save(self, tau: float | None = None) -> None:
        """Checkpoint of this step, with its validation tau where there is one. Every rank holds the same; the first writes."""
        if self.ranks.first:
            model = {n: t.cpu() for n, t in self.draft.state_dict().items() if n != "embed_tokens.weight"}
            optimizer = {
                f"{name}.{key}": value.cpu()
                for name, parameter in self.draft.named_parameters()
                if parameter in self.optimizer.state
                for key, value in self.optimizer.state[parameter].items()
            }
            state = {"inputs": self.inputs, "skipped": self.skipped, "tau": tau}
            checkpoint.save(self.folder / "checkpoints", self.step, model, optimizer, state)
        self.ranks.wait()

    def load(self, path: Path) -> None:
        """Weights, optimizer state and position of a checkpoint."""
        model, optimizer, state = checkpoint.load(path, self.inputs)
        self.draft.load_state_dict(model | {"embed_tokens.weight": self.draft.embed_tokens.weight.data})
        for name, parameter in self.draft.named_parameters():
            own = {k.removeprefix(name + "."): v for k, v in optimizer.items() if k.rpartition(".")[0] == name}
            if own:
                self.optimizer.state[parameter] = {key: value.to(parameter.device) for key, value in own.items()}
        self.step, self.skipped = state["step"], state["skipped"]

    def resume(self) -> None:
        """Go on from the newest complete checkpoint; the log is cut back to it."""
        found = checkpoint.steps(self.folder / "checkpoints")
        if found:
            self.load(found[-1])
        log = self.folder / "log.jsonl"
        self.ranks.wait()  # nobody looks for checkpoints any more when the first rank begins to write
        if self.ranks.first and log.exists():
            kept = [line for line in _lines(log) if self.step and line["step"] <= self.step]
            log.write_text("".join(json.dumps(line) + "\n" for line in kept), "utf-8")


def brief(found: Acceptance) -> dict[str, Any]:
    """What the log keeps of a validation."""
    return {
        "tau": round(found.tau, 4),
        "per_position": [round(x, 4) for x in found.per_position],
        "acc": [round(x, 4) for x in found.per_position],
        "by_category": {name: round(part.tau, 4) for name, part in found.by_category().items()},
    }


def _silent(*_: Any) -> None:
    """The progress of ranks that show none."""


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    for text in path.read_text("utf-8").splitlines():
        try:
            yield json.loads(text)
        except ValueError:  # a line torn by a kill
            return


@contextmanager
def _signals() -> Iterator[list[int]]:
    """A list that fills when SIGINT or SIGTERM asks to stop; a second signal ends the process at once."""
    asked: list[int] = []
    previous: dict[int, Any] = {}

    def handle(number: int, _frame: Any) -> None:
        asked.append(number)
        for each, handler in previous.items():
            signal.signal(each, handler)

    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            previous[number] = signal.signal(number, handle)
    except ValueError:  # not in the main thread
        previous.clear()
    try:
        yield asked
    finally:
        for each, handler in previous.items():
            signal.signal(each, handler)
