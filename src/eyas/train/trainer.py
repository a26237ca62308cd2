"""The trainer: training-time test over packed documents, with exact resume.

Deterministic by (seed, epoch, position): the batches of every epoch are planned before it starts, so a resumed run
continues at the same document and ends with the same bits.
"""

import math
import signal
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from eyas.decode.replay import Acceptance, accept, protocol
from eyas.draft.batch import Batch, as_floats, pack
from eyas.draft.config import DraftConfig
from eyas.draft.model import Draft, Unrolled
from eyas.draft.vocab import DraftVocab
from eyas.errors import EyasError, UsageError
from eyas.features.store import Sample, Store
from eyas.progress import progress
from eyas.recipe import Train
from eyas.signals import on_signals
from eyas.target import Target
from eyas.train import checkpoint
from eyas.train.log import Log, peak_flops, peak_memory, step_flops
from eyas.train.parallel import Masters, ranks, share
from eyas.train.start import check_fits, initial_draft, least_squares_start, warm_start

if TYPE_CHECKING:
    from eyas.train.online import Online

START_ROWS = 1 << 17  # of the least-squares start
START_GROUP = 16  # documents a product
START_PARTS = ("fc.", "norm.", "layers.")
STANDARD_DOCUMENTS = 64  # whose rows give each auxiliary channel its scale
WORKER_ROWS = 256  # of a global batch, for each worker
SKIPS_ALLOWED = 10  # non-finite steps before the run is stopped


class Stopped(EyasError):
    """A signal ended the run after a saved step."""

    exit_code = 0


def cut(documents: Sequence[int], lengths: Sequence[int], budget: int | None) -> list[list[int]]:
    """Documents in their order, in parts of at most `budget` rows, or one document where that is longer."""
    parts: list[list[int]] = []
    rows = 0
    for index in documents:
        if not parts or (budget is not None and rows + lengths[index] > budget):
            parts.append([])
            rows = 0
        parts[-1].append(index)
        rows += lengths[index]
    return parts


def plan_epoch(lengths: list[int], budget: int, seed: int, epoch: int) -> list[list[int]]:
    """Documents of each batch: a shuffle by (seed, epoch), cut where the rows would pass the budget."""
    return cut(np.random.default_rng([seed, epoch]).permutation(len(lengths)).tolist(), lengths, budget)


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


def make_optimizers(draft: Draft, settings: Train) -> list[torch.optim.Optimizer]:
    """AdamW; or Muon for the matrices and AdamW for head, norms and biases. One rate fits both (Moonshot's scaling)."""
    trained = {name: p for name, p in draft.named_parameters() if p.requires_grad}
    inner = [n for n, p in trained.items() if settings.optimizer == "muon" and p.ndim == 2 and n != "lm_head.weight"]
    rest = [p for n, p in trained.items() if n not in inner]
    # matrices may be spread over ranks and vectors are not; a group holds one kind
    groups = [{"params": part} for n in (1, 2) if (part := [p for p in rest if p.ndim == n])]
    decay = settings.weight_decay
    found: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(groups, lr=settings.lr, betas=(0.9, 0.95), weight_decay=decay, fused=True)
    ]
    if inner:
        if not hasattr(torch.optim, "Muon"):
            raise UsageError(f"train.optimizer: muon needs torch 2.9 or newer, this is {torch.__version__}. Use adamw.")
        matrices = [trained[n] for n in inner]
        found.append(torch.optim.Muon(matrices, settings.lr, decay, adjust_lr_fn="match_rms_adamw"))
    return found


class Trainer:
    """One run of training. `folder` holds log.jsonl and checkpoints/; `inputs` says what it belongs to.

    `store` holds the held-out conversations, and those of training too unless `online` computes them. `weights`:
    document id -> what each drafted token's loss counts.
    """

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
        weights: Mapping[str, np.ndarray] | None = None,
        online: "Online | None" = None,
    ) -> None:
        self.folder, self.settings, self.target, self.store, self.inputs = folder, settings, target, store, inputs
        self.train_ids, self.heldout_ids, self.replay_k = train_ids, heldout_ids, replay_k
        self.weights, self.online = weights, online
        self.ranks = ranks()
        cuda = torch.cuda.is_available()
        self.device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
        self.dtype = getattr(torch, settings.compute_dtype)
        self.draft, teacher, self.to_draft = initial_draft(config, target, vocab, settings)
        if settings.standardise and not (config.fc_norm or config.norm_before_fc):  # those standardise by themselves
            rows = [sample.aux for sample in self.samples(train_ids[:STANDARD_DOCUMENTS])]
            self.draft.standardise(as_floats(np.concatenate(rows)).flatten(1))
        if settings.warm:
            warm_start(self.draft, settings.warm, target, settings.remap)
        elif settings.start == "least_squares":
            self._start()
        self.draft.to(self.device)
        self.to_draft = self.to_draft.to(self.device)
        self.teacher_head = teacher.to(self.device, self.dtype)
        for parameter in self.draft.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.to(getattr(torch, settings.masters))
        self.masters = Masters(self.draft, self.ranks, self.dtype, settings.shard)
        self.optimizers = make_optimizers(self.draft, settings)
        self.twins = [self.draft.twin() for _ in range(self._workers() - 1)]
        self.threads = torch.get_num_threads() // (1 + len(self.twins))
        self.pool = ThreadPoolExecutor(1 + len(self.twins), "worker", torch.set_num_threads, (self.threads,))
        size = online.length if online else lambda name: store.entry(name).tokens
        self.lengths = [size(name) - 1 for name in train_ids]
        self.plan = [plan_epoch(self.lengths, settings.batch_tokens, settings.seed, e) for e in range(settings.epochs)]
        self.total = sum(map(len, self.plan))
        self.step = self.skipped = 0
        self.saver = ThreadPoolExecutor(1, "saver")
        self.saving: Future[Path] | None = None

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
                batches = (pack(self.samples(group)) for group in groups if not advance(len(group)))
                seen = least_squares_start(self.draft, batches, START_ROWS)
            found = {name: t for name, t in self.draft.state_dict().items() if name.startswith(START_PARTS)}
            if self.ranks.first:
                checkpoint.save_tensors(file, found, {"inputs": self.inputs, "rows": str(seen)})
        self.draft.load_state_dict(found, strict=False)

    # one step

    def samples(self, names: list[str], epoch: int = 0) -> list[Sample]:
        return self.online.read(names, epoch) if self.online else [self.store.read(name) for name in names]

    def read(self, epoch: int, index: int) -> list[Batch]:
        """This rank's part of a global batch, in parts that go through the draft one after the other.

        None at all where the batch has fewer documents than there are ranks.
        """
        mine = share(self.plan[epoch][index], self.lengths, self.ranks.rank, self.ranks.size)
        samples = dict(zip(mine, self.samples([self.train_ids[i] for i in mine], epoch), strict=True))
        parts = cut(mine, self.lengths, self.settings.micro_tokens)
        return [pack([samples[i] for i in part], self.weights).to(self.device, self.dtype) for part in parts]

    def _workers(self) -> int:
        """Threads that each take a share of a part's chains: small products do not feed several cores together."""
        if self.device.type != "cpu" or self.masters.sharded:
            return 1
        return max(1, min(torch.get_num_threads(), self.settings.batch_tokens // WORKER_ROWS))

    def forward(
        self, batch: Batch, count: float, survivors: bool | None = None, draft: Draft | None = None
    ) -> Unrolled:
        """The unroll of a batch; `count` rows are the loss's denominator, on all ranks together."""
        s = self.settings
        return (draft or self.draft).unroll(
            batch,
            s.steps,
            self.teacher_head,
            self.target.logit_rule,
            self.to_draft,
            survivors=s.survivors if survivors is None else survivors,
            decay=s.decay,
            scale=1 / count,
            kind=s.loss,
            keep_unknown=s.keep_unknown,
        )

    def dry_step(self) -> float:
        """Forward and full backward of the first batch with a supervised row; gradients stay, nothing is updated."""
        self.zero_grad()
        for index in range(len(self.plan[0])):
            for batch in self.read(0, index):
                if batch.supervised:
                    loss = self.forward(batch, batch.supervised, survivors=False).loss
                    self.draft.backward(loss)
                    return float(loss.detach())
        raise EyasError("training: no batch holds a supervised token. Look at `eyas preview`.")

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def update(self, parts: list[Batch]) -> dict[str, Any] | None:
        """One optimizer step; None when loss or gradient were not finite and the step was left out."""
        rate, steps = learning_rate(self.settings, self.step, self.total), self.settings.steps
        self.zero_grad()
        for group in (group for optimizer in self.optimizers for group in optimizer.param_groups):
            group["lr"] = rate
        sizes = [
            sum(p.supervised for p in parts),
            sum(len(p.tokens) for p in parts),
        ]  # none on a rank without documents
        supervised, positions = self.ranks.sum(torch.tensor(sizes, device=self.device)).tolist()
        if not supervised:
            return {"loss": 0.0, "lr": rate, "grad_norm": 0.0, "acc": [], "oov": 0.0}
        figures = torch.zeros(5 + 2 * steps, dtype=torch.float64, device=self.device)
        count = supervised if self.settings.normalise == "supervised" else positions
        with self.masters.whole():
            for batch in parts:
                if batch.supervised:
                    found = self._pass(batch, count)
                    figures += torch.tensor(found, dtype=torch.float64, device=self.device).sum(0)
        loss, rows, computed, teachers, unknown, *counts = self.ranks.sum(figures).tolist()
        chains, right = counts[:steps], counts[steps:]
        self.masters.sum()
        norm = self.masters.clip(self.settings.clip)
        if not (math.isfinite(loss) and math.isfinite(norm)):
            self.skipped += 1
            if self.skipped > SKIPS_ALLOWED:
                raise EyasError(
                    f"training: {self.skipped} steps had a non-finite loss or gradient. Lower train.lr (now {self.settings.lr})."
                )
            return None
        for optimizer in self.optimizers:
            optimizer.step()
        work = step_flops(self.draft.config, rows, computed, teachers, not self.settings.freeze_head)
        return {
            "loss": loss,
            "acc": [round(r / c, 4) if c else None for r, c in zip(right, chains, strict=True)],
            "lr": rate,
            "grad_norm": norm,
            "oov": unknown / max(chains[0], 1),
            "chain_steps": round(computed / supervised, 3),
            "tflop": round(work / 1e12, 6),
        }

    def _pass(self, batch: Batch, count: int) -> list[list[float]]:
        """Forward and backward of a part; gradients are added to those before. Each worker's counts, as `update` sums them."""

        def work(draft: Draft, share: Batch) -> list[float]:
            result = self.forward(share, count, draft=draft)
            self.masters.backward(result.loss) if draft is self.draft else draft.backward(result.loss)
            # a prompt's rows, which several shares compute, count once
            sizes = [len(batch.tokens) if draft is self.draft else 0, result.computed, len(share.final)]
            return [float(result.loss.detach()), *sizes, result.unknown[0], *result.chains, *result.right]

        if not self.twins:
            return [work(self.draft, batch)]
        shares = batch.split(1 + len(self.twins), self.settings.steps)
        counts = list(self.pool.map(work, [self.draft, *self.twins], shares))
        for twin in self.twins:
            for own, other in zip(self.draft.parameters(), twin.parameters(), strict=True):
                if other.grad is not None:
                    own.grad = other.grad if own.grad is None else own.grad.add_(other.grad)
                    other.grad = None
        return counts

    # the loop

    def fit(self) -> dict[str, Any]:
        """Train to the end, or on from the newest complete checkpoint. Returns figures."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.resume()
        first, settings = self.ranks.first, self.settings
        order = [(e, i) for e, epoch in enumerate(self.plan) for i in range(len(epoch))]
        peak = peak_flops(self.device, self.dtype) * self.ranks.size / 1e12
        start = seconds = time.monotonic()
        waited = flops = 0.0
        tokens = 0
        last: dict[str, Any] = {}
        stop: list[int] = []  # signals that came
        with (
            closing(Log(self.folder, settings.log_to, self.step)) if first else nullcontext() as log,
            ThreadPoolExecutor(1, "reader") as reader,
            progress("train", self.total, "step", done=self.step) if first else nullcontext(_silent) as advance,
            on_signals((signal.SIGINT, signal.SIGTERM), stop.append),
        ):
            write = log.write if log else _silent
            if self.step == 0:
                write({"step": 0, "epoch": 0.0, "validation": self.validate()})
            ahead: Future[list[Batch]] | None = None
            while self.step < self.total:
                epoch, index = order[self.step]
                asked = time.monotonic()
                parts = (ahead or reader.submit(self.read, epoch, index)).result()
                wait = time.monotonic() - asked
                ahead = reader.submit(self.read, *order[self.step + 1]) if self.step + 1 < self.total else None
                figures = self.update(parts)
                self.step += 1
                took, seconds = time.monotonic() - seconds, time.monotonic()
                rows = sum(self.lengths[i] for i in self.plan[epoch][index])
                work = (figures or {}).get("tflop", 0.0)
                waited, tokens, flops = waited + wait, tokens + rows, flops + work
                line = {"step": self.step, "epoch": round(epoch + (index + 1) / len(self.plan[epoch]), 4)}
                timing = {"tokens_per_s": round(rows / took, 1), "data_wait": round(wait / took, 5)}
                timing |= {"mfu": round(work / took / peak, 4), "memory_gb": round(peak_memory(self.device) / 1e9, 3)}
                write(line | (figures or {"skipped": True}) | timing)
                if figures and figures["acc"]:
                    last = figures
                advance(1, f"loss {last['loss']:.3f} acc {last['acc'][0]:.2f}" if last else "")
                every = settings.validate_every
                tau = None
                if self.step % every == 0 if every else index + 1 == len(self.plan[epoch]):
                    validation = self.validate()
                    tau = validation["tau"]
                    write(line | {"validation": validation})
                    seconds = time.monotonic()
                stopping = bool(self.ranks.sum(torch.tensor(len(stop), device=self.device)))
                if self.step % settings.save_every == 0 or self.step == self.total or tau is not None or stopping:
                    if log:
                        log.sync()
                    self.save(tau)
                    seconds = time.monotonic()
                if stopping and self.step < self.total:
                    self.saved()
                    raise Stopped(
                        f"training stopped at step {self.step} of {self.total}; resume with the same command."
                    )
            self.saved()
        if self.online:
            self.online.finish()
        self.ranks.wait()  # nobody leaves before the last checkpoint stands
        spent = max(time.monotonic() - start, 1e-9)
        return {
            "steps": self.total,
            "epochs": settings.epochs,
            "documents": len(self.train_ids),
            "tokens_seen": tokens,
            "tokens_per_s": tokens / spent,
            "data_wait_share": waited / spent,
            "mfu": flops / spent / peak,
            "peak_tflops": peak,
            "peak_memory_bytes": peak_memory(self.device),
            "skipped_steps": self.skipped,
            "ranks": self.ranks.size,
            "loss": last.get("loss"),
            "trained_parameters": sum(p.numel() for p in self.masters.trained),
        }

    def validate(self) -> dict[str, Any]:
        """Replay on the held-out conversations: the figure that counts, from joint prefixes."""
        mine = self.heldout_ids[self.ranks.rank :: self.ranks.size]
        with self.masters.whole():
            part = accept(self.draft, map(self.store.read, mine), self.replay_k, self.to_draft, self.dtype)
        parts = {c.id: c for found in self.ranks.gather(part.conversations) for c in found}
        found = Acceptance(self.replay_k, [parts[name] for name in self.heldout_ids])
        return brief(found) | {"protocol": protocol(found, self.replay_k, "own", "held-out conversations")}

    # state

    def save(self, tau: float | None = None) -> None:
        """Checkpoint of this step, with its validation tau where there is one.

        The state is copied and training goes on while the first rank writes it; the one before must stand first.
        """
        self.saved()
        model = {n: self._copy(t) for n, t in self.draft.state_dict().items() if n != "embed_tokens.weight"}
        optimizer = {
            f"{name}.{key}": self._copy(value)
            for name, parameter in self.draft.named_parameters()
            for one in self.optimizers
            for key, value in one.state.get(parameter, {}).items()
        }
        if self.ranks.first:
            state = {"inputs": self.inputs, "skipped": self.skipped, "tau": tau}
            folder = self.folder / "checkpoints"
            self.saving = self.saver.submit(checkpoint.save, folder, self.step, model, optimizer, state)

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        whole = self.masters.full(tensor)  # all ranks together
        return whole.detach().to("cpu", copy=True) if self.ranks.first else torch.empty(0)

    def saved(self) -> None:
        """Wait until the checkpoint in writing stands. Raises what its writer met."""
        if self.saving is not None:
            self.saving.result()
            self.saving = None

    def load(self, path: Path) -> None:
        """Weights, optimizer state and position of a checkpoint."""
        model, optimizer, state = checkpoint.load(path, self.inputs)
        model["embed_tokens.weight"] = self.draft.embed_tokens.weight.data
        like = self.draft.state_dict()
        self.draft.load_state_dict({name: self.masters.placed(t, like[name]) for name, t in model.items()})
        named = dict(self.draft.named_parameters())
        for one in self.optimizers:
            for parameter in (p for group in one.param_groups for p in group["params"]):
                name = next(n for n, p in named.items() if p is parameter)
                own = {k.removeprefix(name + "."): v for k, v in optimizer.items() if k.rpartition(".")[0] == name}
                if own:
                    one.state[parameter] = {key: self.masters.placed(value, parameter) for key, value in own.items()}
        self.step, self.skipped = state["step"], state["skipped"]

    def resume(self) -> None:
        """Go on from the newest complete checkpoint."""
        folder = self.folder / "checkpoints"
        found = checkpoint.steps(folder)
        if found:
            self.load(found[-1])
        self.ranks.wait()  # nobody looks for checkpoints any more when the first rank begins to write
        if self.ranks.first:
            checkpoint.sweep(folder)


def brief(found: Acceptance) -> dict[str, Any]:
    """What the log keeps of a validation."""
    return {
        "tau": round(found.tau, 4),
        "per_position": [round(x, 4) for x in found.per_position],
        "acc": [round(x, 4) for x in found.per_position],
        "by_category": {name: round(part.tau, 4) for name, part in found.by_category().items()},
    }


def _silent(*_: Any) -> None:
    """The log and progress of ranks that show none."""
