"""The trainer's arithmetic: plans, schedules, non-finite steps, checkpoints, and what must not move."""

import json

import numpy as np
import pytest
import torch
from draft_parts import random_sample
from hypothesis import given
from hypothesis import strategies as st

from eyas.draft.config import draft_config_for
from eyas.draft.vocab import choose
from eyas.errors import EyasError
from eyas.features.store import Store, StoreWriter
from eyas.recipe import Train
from eyas.target import read_target
from eyas.train import checkpoint
from eyas.train.trainer import Trainer, learning_rate, plan_epoch


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


def read_log(trainer):
    return [json.loads(line) for line in (trainer.folder / "log.jsonl").read_text().splitlines()]


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


def test_resume_in_the_middle_ends_with_the_same_bits(make):
    straight = make("straight")
    straight.fit()
    cut = make("cut")
    updates = iter(range(5))
    real = cut.update

    def update(batch):
        if next(updates, None) is None:
            raise KeyboardInterrupt
        return real(batch)

    cut.update = update
    with pytest.raises(KeyboardInterrupt):
        cut.fit()
    again = make("cut")
    again.fit()
    assert 0 < checkpoint.load(checkpoint.steps(again.folder / "checkpoints")[-1], "same")[2]["step"] == again.total
    for (name, a), b in zip(weights(straight).items(), weights(again).values(), strict=True):
        assert torch.equal(a, b), name
    timing = ("tokens_per_s", "data_wait")
    plain = [[{k: v for k, v in line.items() if k not in timing} for line in read_log(t)] for t in (straight, again)]
    assert plain[0] == plain[1]


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
    losses = [line["loss"] for line in read_log(trainer) if "loss" in line]
    first, last = len(trainer.plan[0]), len(trainer.plan[-1])
    assert np.mean(losses[-last:]) < 0.8 * np.mean(losses[:first])


def test_update_is_the_gradient_of_the_mean_over_supervised_rows(make):
    """One batch of two documents gives the gradient of (loss_1 + loss_2) / (rows_1 + rows_2), not a mean of means."""
    trainer = make(compute_dtype="float32", survivors=False)
    trainer.plan = [[[0, 9]]]
    trainer.dry_step()
    together = {n: p.grad.clone() for n, p in trainer.draft.named_parameters() if p.grad is not None}
    trainer.plan, total, rows = [[[0], [9]]], {}, 0
    for index in range(2):
        trainer.optimizer.zero_grad()
        batch = trainer.read(0, index)
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
    batch.aux[3] = float("nan")
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
