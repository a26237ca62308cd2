"""The unroll against an independent slow one: dense mask over K·T keys, float64, one document at a time."""

from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from draft_parts import random_sample, slow_unroll, small_config, small_draft, to_draft_ids
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eyas.draft import attention, loss
from eyas.draft.attention import plan_blocks, unroll_attention
from eyas.draft.batch import chain_depth, pack
from eyas.draft.loss import _largest, row_loss
from eyas.errors import UsageError
from eyas.target import LogitRule

LATENT = {
    "num_key_value_heads": 4, "head_dim": 12, "q_lora_rank": 6, "kv_lora_rank": 10, "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4, "v_head_dim": 6,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 512, "beta_fast": 32.0,
    "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 0.7,
}  # fmt: skip
OPTIONS = [
    {},
    {"norm_before_residual": True},
    {"norm_before_fc": True},
    {"fc_norm": True, "norm_output": True},
    {"num_layers": 2},
    {"attention_bias": True, "qk_norm": True},
    {"sliding_window": 6},
    {"draft_vocab_size": 40},
    {"aux_layers": (0, 2, 4, 6), "hidden_size": 8},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}},
    {**LATENT, "num_layers": 2},
    {**LATENT, "q_lora_rank": None, "v_head_dim": 14, "head_dim": 14, "rope_parameters": YARN, "norm_output": True},
]
sizes = st.integers(1, 9)
masks = st.lists(st.lists(st.booleans(), min_size=2, max_size=14), min_size=1, max_size=4)


def unroll(draft, samples, steps, head, **options):
    return draft.unroll(pack(samples).to("cpu", head.dtype), steps, head, LogitRule(), to_draft_ids(draft), **options)


def compare(masks, steps, options, seed, **kwargs):
    config = small_config(**options)
    draft = small_draft(config, seed)
    rng = np.random.default_rng(seed)
    samples = [random_sample(rng, str(i), mask, config) for i, mask in enumerate(masks)]
    head = torch.randn(config.draft_vocab_size, config.target_hidden_size, dtype=torch.float64)
    seen = {}
    fast = unroll(
        draft, samples, steps, head, on_logits=lambda k, rows, h: seen.update({k: (rows, h.detach())}), **kwargs
    )
    weights = {n: t.detach().clone().requires_grad_(t.is_floating_point()) for n, t in draft.state_dict().items()}
    loss, offset, accepted, outputs = torch.zeros((), dtype=torch.float64), 0, {}, {}
    names = {"survivors": "survivors", "kind": "kind", "keep_unknown": "keep"}
    for sample in samples:
        one, out, right = slow_unroll(weights, config, sample, steps, head, **{names[k]: v for k, v in kwargs.items()})
        loss = loss + one
        outputs |= {(row + offset, k): value for (row, k), value in out.items()}
        accepted |= {row + offset: value for row, value in right.items()}
        offset += len(sample.tokens) - 1
    assert accepted == dict(zip(fast.rows.tolist(), fast.accepted.tolist(), strict=True))
    found = {(int(row), k): h[i] for k, (rows, h) in seen.items() for i, row in enumerate(rows)}
    assert found.keys() == outputs.keys()
    for key, value in outputs.items():
        torch.testing.assert_close(found[key], value, atol=1e-9, rtol=1e-9)
    torch.testing.assert_close(fast.loss, loss, atol=1e-9, rtol=1e-9)
    if not loss.requires_grad:  # nothing to learn from
        return
    draft.backward(fast.loss)
    loss.backward()
    for name, parameter in draft.named_parameters():
        if not parameter.requires_grad:
            continue
        expected = weights[name].grad
        if parameter.grad is None:
            assert expected is None or expected.abs().max() == 0, name
        else:
            torch.testing.assert_close(
                parameter.grad,
                torch.zeros_like(parameter) if expected is None else expected,
                atol=1e-9,
                rtol=1e-9,
                msg=lambda m, n=name: f"{n}: {m}",
            )


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(masks, st.integers(1, 5), st.sampled_from(OPTIONS), st.integers(0, 1000), st.booleans(), sizes, sizes, sizes)
def test_unroll_equals_dense_mask(masks, steps, options, seed, survivors, block, chunk, enough):
    """At any size of what is handled at once: queries, rows whose logits exist, rows of a product for a gradient."""
    with patch.object(attention, "BLOCK", block), patch.multiple(loss, CHUNK=chunk, ENOUGH=enough):
        compare(masks, steps, options, seed, survivors=survivors)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("survivors", [False, True])
def test_every_option_equals_dense_mask(options, survivors):
    mask = [False] * 3 + [True] * 9 + [False] * 2 + [True] * 4
    compare([mask, [False, True, True, True], [True] * 5], 4, options, 7, survivors=survivors)


@pytest.mark.parametrize("kind", ["ce", "kl", "reverse_kl", "tv", "lk", "lk_lambda"])
def test_every_loss_equals_its_definition(kind):
    compare([[False] * 2 + [True] * 8, [True] * 6], 3, {}, 3, survivors=False, kind=kind, keep_unknown=True)


@pytest.mark.parametrize("kind", ["lk", "tv", "lk_lambda"])
def test_rows_that_agree_on_nothing_still_learn_where_the_loss_says_so(kind):
    """Draft and teacher 60 nats apart: lk's gradient is of the order of one, tv's is nothing, the blend's is KL's."""
    teacher = torch.tensor([[30.0, 0.0, -30.0]])
    logits = torch.tensor([[-30.0, 0.0, 30.0]], requires_grad=True)
    row_loss(logits, teacher, kind).sum().backward()
    assert torch.isfinite(logits.grad).all()
    assert logits.grad.norm() < 1e-9 if kind == "tv" else logits.grad.norm() > 0.5


def test_a_window_shorter_than_the_unroll_is_refused():
    config = small_config(sliding_window=3)
    sample = random_sample(np.random.default_rng(0), "a", [True] * 9, config)
    head = torch.randn(config.draft_vocab_size, config.target_hidden_size, dtype=torch.float64)
    unroll(small_draft(config), [sample], 3, head)
    with pytest.raises(UsageError, match="sliding window of 3 tokens: expected at least the 4 steps"):
        unroll(small_draft(config), [sample], 4, head)


def test_a_document_of_one_token_gives_no_rows():
    config, rng = small_config(), np.random.default_rng(0)
    one, more = (random_sample(rng, name, mask, config) for name, mask in (("a", [True]), ("b", [True] * 5)))
    assert pack([one, more]).documents == [(0, 0), (0, 4)] and len(pack([one, more]).aux) == 4
    draft, head = small_draft(config), torch.randn(config.draft_vocab_size, config.target_hidden_size).double()
    both, alone = (unroll(draft, samples, 3, head) for samples in ([one, more], [more]))
    assert both.accepted.tolist() == alone.accepted.tolist() and torch.allclose(both.loss, alone.loss)


def test_a_rule_of_ones_own_weighs_and_ends_chains():
    config = small_config()
    draft, rng = small_draft(config), np.random.default_rng(2)
    samples = [random_sample(rng, "a", [False] * 2 + [True] * 12, config)]
    head = torch.randn(config.draft_vocab_size, config.target_hidden_size, dtype=torch.float64)
    halves = unroll(
        draft, samples, 4, head, survivors=lambda before, after, normed, index: torch.full((len(index),), 0.5)
    )
    torch.testing.assert_close(halves.loss, unroll(draft, samples, 4, head, survivors=False, decay=0.4).loss)
    right = unroll(draft, samples, 4, head, survivors=lambda before, after, normed, index: after.double())
    usual = unroll(draft, samples, 4, head, survivors=True)
    assert right.computed == usual.computed < halves.computed and torch.equal(right.loss, usual.loss)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(masks, st.integers(2, 4), st.integers(1, 5), st.sampled_from(OPTIONS), st.integers(0, 99), st.booleans())
def test_shares_of_a_batch_add_up_to_it(masks, parts, steps, options, seed, survivors):
    config = small_config(**options)
    draft, rng = small_draft(config, seed), np.random.default_rng(seed)
    batch = pack([random_sample(rng, str(i), mask, config) for i, mask in enumerate(masks)]).to("cpu", torch.float64)
    head = torch.randn(config.draft_vocab_size, config.target_hidden_size, dtype=torch.float64)
    shares = batch.split(parts, steps)
    assert sum(share.supervised for share in shares) == batch.supervised
    rest = (steps, head, LogitRule(), to_draft_ids(draft))
    twins = [draft.twin() for _ in shares]
    found = [twin.unroll(share, *rest, survivors=survivors) for twin, share in zip(twins, shares, strict=True)]
    whole = draft.unroll(batch, *rest, survivors=survivors)
    assert torch.equal(torch.cat([f.accepted for f in found]), whole.accepted)
    for name in ("chains", "right", "possible", "unknown"):
        assert [sum(counts) for counts in zip(*(getattr(f, name) for f in found), strict=True)] == getattr(whole, name)
    torch.testing.assert_close(sum(f.loss for f in found), whole.loss, atol=1e-9, rtol=1e-9)
    if not whole.loss.requires_grad:
        return
    draft.backward(whole.loss)
    for twin, result in zip(twins, found, strict=True):
        if result.loss.requires_grad:
            twin.backward(result.loss)
    for own, *others in zip(draft.parameters(), *(twin.parameters() for twin in twins), strict=True):
        assert all(other.data_ptr() == own.data_ptr() for other in others)
        grads = [other.grad for other in others if other.grad is not None]
        assert (own.grad is None) == (not grads)
        if grads:
            torch.testing.assert_close(sum(grads), own.grad, atol=1e-9, rtol=1e-9)


@given(st.lists(st.booleans(), min_size=2, max_size=30))
def test_chain_depth_counts_supervised_tokens(mask):
    expected = []
    for t in range(len(mask) - 1):
        depth = 0
        while mask[t + 1] and t + 2 + depth < len(mask) and all(mask[t + 2 : t + 3 + depth]):
            depth += 1
        expected.append(depth)
    assert chain_depth(np.array(mask)).tolist() == expected


def test_other_documents_change_nothing():
    config = small_config()
    draft = small_draft(config)
    rng = np.random.default_rng(1)
    mask = [False] * 4 + [True] * 10
    samples = [random_sample(rng, str(i), mask[i:], config) for i in range(3)]
    head = torch.randn(config.draft_vocab_size, config.target_hidden_size, dtype=torch.float64)

    def hidden(order):
        seen = {}
        result = unroll(
            draft, order, 4, head, survivors=False, on_logits=lambda k, rows, h: seen.update({k: (rows, h)})
        )
        first, end = next(d for d, sample in zip(pack(order).documents, order, strict=True) if sample.id == "0")
        return [h[(rows >= first) & (rows < end)] for rows, h in seen.values()], result

    alone, _ = hidden([samples[0]])
    for order in ([samples[0], samples[1]], [samples[2], samples[0], samples[1]]):
        packed, _ = hidden(order)
        for a, b in zip(alone, packed, strict=True):
            torch.testing.assert_close(a, b, atol=1e-13, rtol=0)


def test_attention_without_the_flash_kernel_agrees(monkeypatch):
    """The plain forward (any device) against the CPU flash kernel, values and gradients, blocks and windows included."""
    monkeypatch.setattr(attention, "BLOCK", 3)
    torch.manual_seed(0)
    documents, rows = [(0, 7), (7, 20)], torch.tensor([0, 1, 2, 5, 8, 9, 12, 13, 14, 19])

    def run(flash):
        torch.manual_seed(1)
        leaves = [torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in
                  ((10, 4, 8), (20, 2, 8), (20, 2, 8), (10, 3, 2, 8), (10, 3, 2, 8))]  # fmt: skip
        q, k, v, own_k, own_v = leaves
        blocks = plan_blocks(rows, documents, step=3, window=9)
        assert len(blocks) > 3
        if not flash:
            monkeypatch.setattr(attention, "_forward_block", attention._forward_plain)
        out = unroll_attention(q, k, v, blocks, own_k, own_v)
        (out * torch.arange(out.numel()).reshape(out.shape)).sum().backward()
        return [out, *(leaf.grad for leaf in leaves)]

    for a, b in zip(run(True), run(False), strict=True):
        torch.testing.assert_close(a, b, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("size", [1, 30])
@pytest.mark.parametrize("dim", [40, 64, 80, 128])
def test_gradients_of_bfloat16_attention_are_as_good_as_pytorchs(dim, size, offset):
    """Also where scores of ±100 make almost every weight nothing, and where all keys have a part in common."""
    torch.manual_seed(0)
    rows = torch.arange(600)
    q, k, v, grad = (torch.randn(600, heads, dim).bfloat16() for heads in (4, 2, 2, 4))
    inputs = q * size, k + offset * torch.randn(dim).bfloat16(), v

    def gradients(attend, dtype):
        leaves = [x.detach().to(dtype).requires_grad_() for x in inputs]
        attend(*leaves).backward(grad.to(dtype))
        return [leaf.grad.double() for leaf in leaves]

    def dense(q, k, v):
        weights = torch.einsum("qkgd,tkd->kgqt", q.unflatten(1, (2, 2)), k) * dim**-0.5
        weights = weights.masked_fill(rows[:, None] < rows, float("-inf")).softmax(-1)
        return torch.einsum("kgqt,tkd->qkgd", weights, v).flatten(1, 2)

    def pytorch(q, k, v):
        k, v = (x.repeat_interleave(2, 1) for x in (k, v))
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)[0].transpose(0, 1)

    exact, theirs = gradients(dense, torch.float64), gradients(pytorch, torch.bfloat16)
    ours = gradients(lambda *leaves: unroll_attention(*leaves, plan_blocks(rows, [(0, 600)])), torch.bfloat16)
    for name, found, other, expected in zip("qkv", ours, theirs, exact, strict=True):
        error, usual = ((x - expected).norm() / expected.norm() for x in (found, other))
        assert error < 1.3 * usual + 0.006, (name, error, usual)


def test_attention_keeps_no_masks():
    """What a step keeps for the backward pass grows with the rows, not with their square: also where a prompt stands before."""

    def kept(count):
        blocks = plan_blocks(torch.arange(count // 2, count), [(0, count)])
        return sum(x.nbytes for block in blocks for x in vars(block).values() if isinstance(x, torch.Tensor))

    assert kept(4096) == 2 * kept(2048) == 8 * 2048


@given(st.integers(1, 5), st.integers(1, 12), st.sampled_from([torch.bfloat16, torch.float64]), st.data())
def test_largest_is_max(rows, width, dtype, data):
    """Values and places, the first of equals included."""
    z = torch.tensor(data.draw(st.lists(st.integers(-3, 3), min_size=rows * width, max_size=rows * width)), dtype=dtype)
    with patch("eyas.draft.loss.PART", 4):
        found = _largest(z.view(rows, width))
    expected = [max(range(width), key=row.__getitem__) for row in z.view(rows, width).tolist()]
    assert found[1].tolist() == expected
    assert found[0].tolist() == [row[i] for row, i in zip(z.view(rows, width).tolist(), expected, strict=True)]


def test_bfloat16_stays_close_to_float64():
    """Loss and every gradient, rounded to 8 bits in each of some twenty products on the way."""
    config = small_config(hidden_size=64, head_dim=16, target_hidden_size=64, intermediate_size=128)
    draft = small_draft(config)
    with torch.no_grad():
        for linear in draft.linears():
            linear.weight.mul_(0.3)  # as in a draft at its start; wilder ones blow every rounding up
    rng = np.random.default_rng(0)
    samples = [random_sample(rng, "a", [False] * 5 + [True] * 40, config)]
    head = torch.randn(24, 64, dtype=torch.float64) * 0.1

    def run(head):
        result = unroll(draft, samples, 3, head, survivors=False)
        draft.zero_grad()
        draft.backward(result.loss)
        return result.loss.detach().double(), {
            n: p.grad.double() for n, p in draft.named_parameters() if p.requires_grad
        }

    exact, exact_grads = run(head)
    draft.float()
    rough, rough_grads = run(head.bfloat16())
    torch.testing.assert_close(rough, exact, rtol=0.02, atol=0)
    for name, grad in exact_grads.items():
        assert (rough_grads[name] - grad).norm() < 0.03 * grad.norm(), name
