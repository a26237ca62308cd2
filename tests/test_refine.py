"""Refinement: the tokens that are found rejected, what a weight does to the loss, and the command on a real run."""

import json

import numpy as np
import torch
import yaml
from draft_parts import random_sample, small_config, small_draft, to_draft_ids
from hypothesis import given, settings
from hypothesis import strategies as st
from test_doctor import run as train_run
from typer.testing import CliRunner

from eyas import cli
from eyas.decode.replay import Conversation, tokens_by_state, walk
from eyas.draft.batch import chain_depth, pack
from eyas.draft.loss import row_loss
from eyas.target import LogitRule
from eyas.train.refine import rejections, weights

CONFIG = small_config()


@given(st.lists(st.booleans(), min_size=3, max_size=30), st.lists(st.integers(0, 4), min_size=30), st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_rejected_tokens_are_those_that_the_report_marks(mask, kept, k):
    sample = random_sample(np.random.default_rng(0), "a", mask, CONFIG)
    depth = chain_depth(sample.supervised)
    found = Conversation("a", "", 0, *walk(depth, np.minimum(kept[: len(depth)], np.minimum(k, depth))))
    marked = [each["state"] == "rejected" for each in tokens_by_state(found, sample, [""] * len(mask), k)]
    assert rejections(found, sample, k).tolist() == [*marked[2:], False]


def test_weights_keep_the_size_of_the_loss():
    wrong = {"a": np.array([True, False, False]), "b": np.array([False])}
    found = weights(wrong, extra=3.0, share=0.25)
    assert np.allclose(found["a"], np.array([4, 1, 1]) / 1.75) and np.allclose(found["b"], 1 / 1.75)
    assert np.isclose(np.concatenate(list(found.values())).mean(), 1)


def test_a_weight_scales_the_loss_of_its_token_in_every_step():
    """Against the loss of every (row, step) by its definition, from the unroll's own hidden states."""
    rng, draft, k = np.random.default_rng(1), small_draft(CONFIG, 2), 3
    samples = [random_sample(rng, name, [False] * 3 + [True] * 9, CONFIG) for name in "ab"]
    given = {"b": rng.random(11) * 3}  # the other one counts one everywhere
    batch = pack(samples, given).to("cpu", torch.float64)
    head, table = torch.randn(CONFIG.draft_vocab_size, CONFIG.target_hidden_size).double(), to_draft_ids(draft)
    expected = []

    def keep(step, rows, hidden):
        index = batch.teacher[rows] + step
        each = row_loss(draft.lm_head(hidden), batch.final[index] @ head.T, "ce") * 0.8**step
        known = table[batch.argmax[index]] >= 0
        token = [np.concatenate([np.ones(11), given["b"]])[row + step] for row in rows.tolist()]
        expected.append((each * known * torch.tensor(token)).sum())

    with torch.no_grad():
        found = draft.unroll(batch, k, head, LogitRule(), table, survivors=False, on_logits=keep)
    assert torch.allclose(found.loss, torch.stack(expected).sum(), rtol=1e-6)  # weights are stored in float32


def test_the_command_refines_a_run(tmp_path, tiny_target):
    made = train_run(tmp_path, tiny_target)
    recipe = tmp_path / "refine.yaml"
    recipe.write_text(yaml.safe_dump(yaml.safe_load((made / "recipe.yaml").read_text()) | {"refine": {"epochs": 2}}))
    before = (made / "draft" / "model.safetensors").read_bytes()
    asked = CliRunner().invoke(cli.app, ["train", str(recipe), "--refine", "--json"])
    assert asked.exit_code == 0, asked.stderr
    found = json.loads(asked.stdout)
    assert 0 < found["rejected_share"] < 1 and found["steps"] > 0
    assert (made / "draft" / "model.safetensors").read_bytes() == before
    checked = CliRunner().invoke(cli.app, ["replay", found["draft"], "--store", str(made / "store"), "--json"])
    assert json.loads(checked.stdout)["tau"] == found["tau"] > 1
