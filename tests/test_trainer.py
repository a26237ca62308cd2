"""The trainer's arithmetic: plans, schedules, non-finite steps, checkpoints, and what must not move."""

import os
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from draft_parts import random_sample
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode
from train_parts import log_lines, losses, newest, same_bits

from eyas.audit import audit_after
from eyas.draft.config import draft_config_for
from eyas.draft.vocab import choose
from eyas.errors import EyasError, UsageError
from eyas.features.store import Store, StoreWriter
from eyas.recipe import Recipe, Train
from eyas.run import Run, checkpoint_path
from eyas.target import read_target
from eyas.train import checkpoint
from eyas.train import trainer as trainer_module
from eyas.train.log import step_flops
from eyas.train.trainer import Stopped, Trainer, learning_rate, plan_epoch


@pytest.fixture
def make(tiny_target, tmp_path):
    """make(**settings) -> a Trainer over 12 random documents of a tiny target; the same documents every time."""
    target = read_target(tiny_target)
    counts = np.zeros(target.vocab_size, np.int64)
    counts[: target.vocab_size // 2] = 1
    vocab = choose(counts, [0, 1, 2], 128)
    config = draft_config_for(target, 128)
    rng = np.random.default_rng(0)
    samples = [random_sample(rng, f"d{i}", [False] * 3 + [True] * (8 + i), config) for i in range(12)]
    store = tmp_path / "store"
    with StoreWriter(store, layers=list(config.aux_layers), hidden_size=64, target=target.fingerprints) as writer:
        for sample in samples:
            writer.append(sample)
        writer.commit()
        writer.finish()

    def build(folder="train", inputs="same", **settings):
        known = {"steps": 3, "epochs": 2, "batch_tokens": 40, "save_every": 2, "lr": 1e-3} | settings
        ids = [f"d{i}" for i in range(10)]
        return Trainer(
            tmp_path / folder, Train(**known), config, target, vocab, Store(store), ids, ["d10", "d11"], inputs, 3
        )

    return build


def weights(trainer):
    return {name: tensor.clone() for name, tensor in trainer.draft.state_dict().items()}


@given(st.lists(st.integers(1, 50), min_size=1, max_size=40), st.integers(1, 120), st.integers(0, 9), st.integers(0, 9))
def test_an_epoch_reads_every_document_once(lengths, budget, seed, epoch):
    plan = plan_epoch(lengths, budget, seed, epoch)
    assert sorted(i for batch in plan for i in batch) == list(range(len(lengths)))
    assert all(len(batch) == 1 or sum(lengths[i] for i in batch) <= budget for batch in plan)
    assert plan == plan_epoch(lengths, budget, seed, epoch)


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd"])
def test_schedules_warm_up_and_end_near_zero(schedule):
    settings = Train(lr=1.0, warmup=0.1, schedule=schedule)
    rates = [learning_rate(settings, step, 200) for step in range(200)]
    assert rates[0] == pytest.approx(1 / 20) and max(rates) == pytest.approx(1.0)
    assert np.all(np.diff(rates[:20]) >= 0) and np.all(np.diff(rates[20:]) <= 1e-12)
    assert 0 < rates[-1] < 0.05


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_resume_in_the_middle_ends_with_the_same_bits(make, optimizer):
    straight = make("straight", optimizer=optimizer)
    straight.fit()
    cut = make("cut", optimizer=optimizer)
    updates = iter(range(5))
    real = cut.update

    def update(parts):
        if next(updates, None) is None:
            raise KeyboardInterrupt
        return real(parts)

    cut.update = update
    with pytest.raises(KeyboardInterrupt):
        cut.fit()
    again = make("cut", optimizer=optimizer)
    again.fit()
    assert 0 < checkpoint.load(checkpoint.steps(again.folder / "checkpoints")[-1], "same")[2]["step"] == again.total
    for (name, a), b in zip(weights(straight).items(), weights(again).values(), strict=True):
        assert torch.equal(a, b), name
    assert same_bits(straight.folder, again.folder) and log_lines(straight.folder) == log_lines(again.folder)


def test_training_moves_what_it_should_and_nothing_else(make):
    trainer = make()
    before = weights(trainer)
    trainer.fit()
    after = weights(trainer)
    for name in before:
        still = name in ("embed_tokens.weight", "d2t", "t2d")
        assert torch.equal(before[name], after[name]) == still, name
    assert torch.equal(after["embed_tokens.weight"], trainer.target.read_tensor("model.embed_tokens.weight"))


def test_loss_falls(make):
    trainer = make(epochs=25, lr=3e-3)
    trainer.fit()
    curve = losses(trainer.folder)
    first, last = len(trainer.plan[0]), len(trainer.plan[-1])
    assert np.mean(curve[-last:]) < 0.8 * np.mean(curve[:first])


def test_update_is_the_gradient_of_the_mean_over_supervised_rows(make):
    """One batch of two documents gives the gradient of (loss_1 + loss_2) / (rows_1 + rows_2), not a mean of means."""
    trainer = make(compute_dtype="float32", survivors=False)
    trainer.plan = [[[0, 9]]]
    trainer.dry_step()
    together = {n: p.grad.clone() for n, p in trainer.draft.named_parameters() if p.grad is not None}
    trainer.plan, total, rows = [[[0], [9]]], {}, 0
    for index in range(2):
        trainer.zero_grad()
        [batch] = trainer.read(0, index)
        trainer.draft.backward(trainer.forward(batch, batch.supervised).loss)
        rows += batch.supervised
        for name, parameter in trainer.draft.named_parameters():
            if parameter.grad is not None:
                total[name] = total.get(name, 0) + parameter.grad * batch.supervised
    for name, grad in together.items():
        torch.testing.assert_close(grad, total[name] / rows, atol=1e-6, rtol=1e-4)


def test_non_finite_steps_are_left_out_then_stop_the_run(make):
    trainer = make()
    batch = trainer.read(0, 0)
    batch[0].aux[3] = float("nan")
    before = weights(trainer)
    for _ in range(10):
        assert trainer.update(batch) is None
    assert all(torch.equal(a, b) for a, b in zip(before.values(), weights(trainer).values(), strict=True))
    with pytest.raises(EyasError, match="non-finite"):
        trainer.update(batch)


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors"])
def test_a_damaged_checkpoint_is_refused(make, name):
    trainer = make()
    trainer.fit()
    file = checkpoint.steps(trainer.folder / "checkpoints")[-1] / name
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(EyasError, match="damaged"):
        make().fit()


def test_a_foreign_checkpoint_is_refused(make):
    make().fit()
    with pytest.raises(EyasError, match="another recipe"):
        make(inputs="other").fit()


def test_parts_of_a_batch_give_the_update_of_the_whole(make):
    whole, parts = make("whole", compute_dtype="float32"), make("parts", compute_dtype="float32", micro_tokens=20)
    assert len(parts.read(0, 0)) > 1 == len(whole.read(0, 0))
    whole.fit()
    parts.fit()
    assert losses(parts.folder) == pytest.approx(losses(whole.folder), rel=1e-5)


def test_workers_give_the_update_of_one(make, monkeypatch):
    one = make("one", compute_dtype="float32")
    monkeypatch.setattr(trainer_module, "WORKER_ROWS", 20)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    two, again = (make(name, compute_dtype="float32") for name in ("two", "again"))
    assert len(two.twins) == 1 > len(one.twins)
    for trainer in (one, two, again):
        trainer.fit()
    assert losses(two.folder) == pytest.approx(losses(one.folder), rel=1e-5)
    assert same_bits(two.folder, again.folder)


def test_muon_has_the_matrices_and_adamw_the_rest(make):
    trainer = make(optimizer="muon")
    names = {p: n for n, p in trainer.draft.named_parameters()}
    adamw, muon = (sorted(names[p] for g in o.param_groups for p in g["params"]) for o in trainer.optimizers)
    assert sorted(adamw + muon) == sorted(n for p, n in names.items() if p.requires_grad)
    assert all("norm" in n or n == "lm_head.weight" for n in adamw) and "fc.weight" in muon
    before = weights(trainer)
    trainer.fit()
    assert all(torch.equal(before[n], weights(trainer)[n]) == (n not in adamw + muon) for n in before)


def test_bf16_masters_leave_norms_stuck_and_the_audit_names_them(make):
    verdicts = {}
    for masters in ("float32", "bfloat16"):
        trainer = make(masters, masters=masters, lr=1e-4, epochs=3)
        before = trainer.draft.served_state()
        trainer.fit()
        verdicts[masters] = audit_after(
            before, trainer.draft.served_state(), {"embed_tokens"}, None, trainer.target, trainer.draft.config
        )
    assert verdicts["float32"]["verdict"] == "go"
    assert verdicts["bfloat16"]["verdict"] == "no-go"
    for norm in ("norm.weight", "layers.0.hidden_norm.weight"):
        assert any(norm in reason and "at exactly 1.0" in reason for reason in verdicts["bfloat16"]["reasons"])


# checkpoints are written while training goes on


def slowly(monkeypatch, seconds=0.05):
    real = checkpoint.save

    def save(*arguments, **options):
        time.sleep(seconds)
        return real(*arguments, **options)

    monkeypatch.setattr(checkpoint, "save", save)


def test_a_slow_disk_changes_no_bit(make, monkeypatch):
    quick, slow = make("quick", save_every=1), make("slow", save_every=1)
    quick.fit()
    slowly(monkeypatch)
    slow.fit()
    assert same_bits(quick.folder, slow.folder) and len(checkpoint.steps(slow.folder / "checkpoints")) >= 2


def test_training_goes_on_while_a_checkpoint_is_written(make, monkeypatch):
    trainer, met = make(save_every=2), []

    def save(folder, step, model, *_):
        kept = model["fc.weight"].clone()
        while trainer.step == step and trainer.step < trainer.total:
            time.sleep(0.001)
        met.append(torch.equal(model["fc.weight"], kept) and trainer.step > step)

    monkeypatch.setattr(checkpoint, "save", save)
    trainer.fit()
    assert len(met) > 2 and all(met[:-1])


def test_what_the_writer_meets_stops_the_run(make, monkeypatch):
    def save(*_):
        raise EyasError("the disk is full")

    monkeypatch.setattr(checkpoint, "save", save)
    with pytest.raises(EyasError, match="disk is full"):
        make().fit()


def test_a_signal_waits_for_the_checkpoint(make, monkeypatch):
    slowly(monkeypatch)
    trainer = make(save_every=100)
    real = trainer.update

    def update(parts):
        if trainer.step == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(parts)

    trainer.update = update
    with pytest.raises(Stopped, match="stopped at step 4"):
        trainer.fit()
    assert newest(trainer.folder).name == "step-00000004"


def test_the_best_by_tau_is_kept_and_found(make):
    trainer = make(epochs=6, save_every=1000)
    taus = iter([1.1, 1.5, 1.2, 1.5, 1.3, 1.0, 1.2])
    trainer.validate = lambda: {"tau": next(taus)}
    trainer.fit()
    folder = trainer.folder / "checkpoints"
    assert checkpoint.best(folder).name == f"step-{sum(map(len, trainer.plan[:3])):08d}"  # the newer of equals
    assert checkpoint.best(folder) != newest(trainer.folder)


def test_export_and_audit_take_the_best_or_the_newest(tmp_path):
    for step, tau in ((2, 1.2), (4, 1.6), (6, 1.4)):
        checkpoint.save(tmp_path / "train" / "checkpoints", step, {}, {}, {"inputs": "", "tau": tau})
    value = {"target": "t", "run": str(tmp_path), "conversations": {"path": "c"}}
    run = Run(Recipe(**value))
    assert [checkpoint_path(run, name).name[-1] for name in (None, "best", "latest", "6")] == ["4", "4", "6", "6"]
    assert checkpoint_path(Run(Recipe(**value, export={"checkpoint": "latest"}))).name[-1] == "6"
    with pytest.raises(UsageError, match="no checkpoint 5"):
        checkpoint_path(run, "5")


# the log


def test_a_tracker_that_is_not_there_is_one_sentence(make, monkeypatch):
    monkeypatch.setitem(sys.modules, "trackio", None)
    with pytest.raises(UsageError, match="pip install trackio"):
        make(log_to=["trackio"]).fit()


def test_trackers_get_the_numbers_of_every_line(make, monkeypatch):
    got = []
    fake = SimpleNamespace(
        init=lambda **_: None,
        log=lambda values, step: got.append((step, values)),
        finish=lambda: got.append(("finished", {})),
    )
    monkeypatch.setitem(sys.modules, "wandb", fake)
    trainer = make(log_to=["wandb"])
    trainer.fit()
    assert got[0][1]["validation/tau"] >= 1 and got[-1][0] == "finished"
    assert [values["loss"] for _, values in got if "loss" in values] == losses(trainer.folder)
    assert {"acc/0", "mfu", "memory_gb", "data_wait"} <= got[1][1].keys()


def test_tensorboard_holds_the_losses(make):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    trainer = make(log_to=["tensorboard"])
    trainer.fit()
    found = EventAccumulator(str(trainer.folder / "tensorboard")).Reload().Scalars("loss")
    assert [e.value for e in found] == pytest.approx(losses(trainer.folder))


@pytest.mark.parametrize("frozen", [False, True])
def test_the_work_of_a_step_is_what_torch_counts(make, frozen):
    """torch's own counter of matrix products, over forward and backward; it has keys and values of prompt rows besides."""
    trainer = make(survivors=False, steps=3, compute_dtype="float32", freeze_head=frozen)
    [batch] = trainer.read(0, 0)
    with FlopCounterMode(display=False) as counter:
        result = trainer.forward(batch, batch.supervised)
        trainer.draft.backward(result.loss)
    config = trainer.draft.config
    prompt = len(batch.tokens) - batch.supervised
    besides = 6 * prompt * config.hidden_size * 2 * config.num_key_value_heads * config.head_dim
    ours = step_flops(config, len(batch.tokens), result.computed, len(batch.final), not frozen)
    assert ours + besides == counter.get_flop_counts()["Global"][torch.ops.aten.mm]


def test_the_work_of_a_step_is_the_same_for_several_workers(make):
    """Rows that several shares compute count once."""
    trainer = make(survivors=False, batch_tokens=1000)
    alone = trainer.update(trainer.read(0, 0))["tflop"]
    trainer.twins = [trainer.draft.twin() for _ in range(3)]
    trainer.pool = ThreadPoolExecutor(4)
    assert trainer.update(trainer.read(0, 0))["tflop"] == pytest.approx(alone, rel=1e-3)


def test_the_denominator_may_be_all_rows(make):
    """Then the loss, and with it the gradient, are smaller by the share of rows that are supervised."""
    usual, other = make(compute_dtype="float32"), make("other", compute_dtype="float32", normalise="positions")
    parts = usual.read(0, 0)
    share = sum(p.supervised for p in parts) / sum(len(p.tokens) for p in parts)
    first, second = usual.update(parts), other.update(other.read(0, 0))
    assert 0 < share < 1 and second["loss"] == pytest.approx(share * first["loss"], rel=1e-5)
    assert second["grad_norm"] == pytest.approx(share * first["grad_norm"], rel=1e-5)
