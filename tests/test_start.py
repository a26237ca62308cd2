"""The least-squares start against NumPy's own least squares, and against a random start on the same data."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from draft_parts import random_sample

from eyas.draft.batch import pack
from eyas.draft.config import draft_config_for
from eyas.draft.model import Draft
from eyas.errors import UsageError
from eyas.serving.export import export
from eyas.target import read_target
from eyas.train.start import RIDGE, check_fits, least_squares_start, warm_start


@pytest.fixture
def parts(tiny_target):
    """A draft of full value rank over random documents whose channels differ in size a thousandfold."""
    target = read_target(tiny_target)
    config = draft_config_for(target, 128, num_key_value_heads=4)
    rng = np.random.default_rng(0)
    samples = [random_sample(rng, f"d{i}", [False] * 3 + [True] * 40, config) for i in range(12)]
    batch = pack(samples)
    sizes = torch.from_numpy(10.0 ** rng.uniform(-1, 2, config.fc_in)).bfloat16()
    batch.aux = batch.aux * sizes
    draft = Draft(config)
    draft.initialise(0)
    draft.embed_tokens.weight = torch.nn.Parameter(
        target.read_tensor("model.embed_tokens.weight").clone(), requires_grad=False
    )
    return draft, batch, config


def rows_of(draft, batch):
    """float64 inputs [n, A*H + D] and outputs [n, H] of the regression, made plainly."""
    starts = [t for t in range(len(batch.tokens)) if batch.depth[t] > 0]
    e = draft.embed_tokens.weight.double()[batch.tokens[starts]]
    e = e / (e.square().mean(-1, keepdim=True) + draft.config.rms_norm_eps).sqrt()
    scale = (1 / batch.aux.double().square().mean(0).sqrt()).log2().round().exp2()
    return torch.cat([batch.aux[starts].double() * scale, e], 1), batch.final[batch.teacher[starts]].double()


def test_it_solves_the_ridge_regression_of_numpy(parts):
    draft, batch, config = parts
    draft.standardise(batch.aux)
    x, y = rows_of(draft, batch)
    seen = least_squares_start(draft, [batch], 10**9)
    assert seen == len(x)
    draft.requires_grad_(False)
    augmented = np.concatenate([x.numpy(), np.sqrt(RIDGE * len(x)) * np.eye(x.shape[1])])
    wanted, *_ = np.linalg.lstsq(augmented, np.concatenate([y.numpy(), np.zeros((x.shape[1], y.shape[1]))]), rcond=None)
    found = draft.fc.weight.double().T.numpy()
    assert np.abs(found - wanted[: config.fc_in]).max() < 1e-3 * np.abs(wanted).max()
    # the embedding's part: what attention adds for a row that sees only itself
    a = draft.layers[0].self_attn
    group = config.num_attention_heads // config.num_key_value_heads
    values = a.v_proj.weight[:, : config.hidden_size].double().view(config.num_key_value_heads, config.head_dim, -1)
    through = torch.cat([values[head // group] for head in range(config.num_attention_heads)])
    added = (a.o_proj.weight.double() @ through).T.numpy()
    assert np.abs(added - wanted[config.fc_in :]).max() < 1e-3 * np.abs(wanted).max()


def test_a_row_begins_by_looking_at_itself(parts):
    draft, batch, config = parts
    draft.standardise(batch.aux)
    least_squares_start(draft, [batch], 10**9)
    layer = draft.layers[0]
    first, end = batch.documents[0]
    h = draft.fuse(batch.aux[first:end].float())
    x, _ = layer.inputs(draft.embed(batch.tokens[first:end], torch.float32), h)
    q, k, _ = draft.qkv(layer, x, batch.positions[first:end])
    group = config.num_attention_heads // config.num_key_value_heads
    scores = torch.einsum("qhd,khd->hqk", q, k.repeat_interleave(group, 1)) / config.head_dim**0.5
    weights = scores.masked_fill(torch.ones(scores.shape[1:], dtype=torch.bool).triu(1), -torch.inf).softmax(-1)
    assert weights.diagonal(dim1=1, dim2=2)[0].median() > 0.8


def test_folding_the_scale_into_fc_changes_no_bit(parts):
    draft, batch, config = parts
    draft.initialise(1)
    plain = Draft(config)
    draft.standardise(batch.aux)
    plain.load_state_dict(draft.served_state())
    for dtype in (torch.bfloat16, torch.float32):
        assert torch.equal(plain.fuse(batch.aux.to(dtype)), draft.fuse(batch.aux.to(dtype)))


def test_what_has_no_linear_way_is_refused(parts):
    config = parts[2]
    for option in ("norm_before_residual", "fc_norm", "norm_before_fc"):
        with pytest.raises(UsageError, match="least_squares"):
            check_fits(replace(config, **{option: True}))


def mapped(draft: Draft, first: int) -> Draft:
    """The draft with the 128 tokens from `first` on as its vocabulary."""
    draft.d2t.fill_(first)
    draft.t2d.fill_(False)
    draft.t2d[first : first + 128] = True
    return draft


@pytest.mark.parametrize("layout", ["portable", "eagle", "speculators"])
def test_a_warm_start_goes_on_from_the_very_draft(parts, tiny_target, tmp_path, layout):
    draft, batch, config = parts
    target = read_target(tiny_target)
    trained = mapped(draft, 40).state_dict()
    export(trained, config, target, tmp_path / "draft", layout=layout, provenance={})
    again = Draft(config)
    again.initialise(5)
    again.embed_tokens.weight = draft.embed_tokens.weight
    mapped(again, 40).standardise(batch.aux)
    assert warm_start(again, str(tmp_path / "draft"), target) == 128
    for name, tensor in again.served_state().items():
        assert torch.equal(tensor, trained[name].to(torch.bfloat16).to(tensor.dtype)) or "embed" in name, name


def test_another_map_is_refused_until_told_to_move_rows(parts, tiny_target, tmp_path):
    draft, _, config = parts
    target = read_target(tiny_target)
    trained = mapped(draft, 40).state_dict()
    export(trained, config, target, tmp_path / "draft", provenance={})
    again = Draft(config)
    again.initialise(5)
    again.embed_tokens.weight = draft.embed_tokens.weight
    fresh = mapped(again, 100).lm_head.weight.detach().clone()
    with pytest.raises(UsageError, match=r"vocab\.like"):
        warm_start(again, str(tmp_path / "draft"), target)
    assert warm_start(again, str(tmp_path / "draft"), target, remap=True) == 68
    theirs = trained["lm_head.weight"].bfloat16().float()
    assert torch.equal(again.lm_head.weight[:68], theirs[60:])  # tokens 100 to 167
    assert torch.equal(again.lm_head.weight[68:], fresh[68:])
    assert int(again.d2t[0]) == 100


def test_a_draft_of_another_shape_is_refused(parts, tiny_target, tmp_path):
    draft, _, config = parts
    export(mapped(draft, 0).state_dict(), config, read_target(tiny_target), tmp_path / "draft", provenance={})
    other = Draft(replace(config, intermediate_size=96))
    with pytest.raises(UsageError, match="intermediate_size"):
        warm_start(other, str(tmp_path / "draft"), read_target(tiny_target))
