"""Where training starts from: an existing draft, or least squares, which predicts before the first step.

What step 0 has to learn first is nearly linear: the target's final state at t+1 from the auxiliary states of t and the
embedding of x_{t+1}. Ridge regression finds that map in one pass over the data, and the EAGLE-3 layer has room for it:
`fc` takes the part of the auxiliary states; the part of the embedding goes through the values of heads that begin by
looking at their own row (their queries are a multiple of their keys), cut to the rank that the value heads have.
Everything is trained from there as usual, and the file that engines read is the same.
"""

from collections.abc import Iterable

import numpy as np
import torch

from eyas.draft.batch import Batch
from eyas.draft.config import DraftConfig
from eyas.draft.model import Attention, Draft, Layer
from eyas.draft.vocab import DraftVocab
from eyas.errors import EyasError, UsageError
from eyas.recipe import Train
from eyas.serving.export import load_draft
from eyas.target import Target

RIDGE = 1e-2  # added to the diagonal, in units of a standardised channel's variance
SELF_SCORE = 18.0  # of a row's query and its own key, where unlike rows score near zero
QUIET = 0.1  # what else writes to the residual begins at this part of its size, so as not to drown the start


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


def check_fits(config: DraftConfig) -> None:
    """Raises UsageError where the draft has no linear way from fc to its head."""
    for wrong, what in (
        (config.hidden_size != config.target_hidden_size, "a draft narrower or wider than its target"),
        (config.norm_before_residual, "norm_before_residual"),
        (config.fc_norm or config.norm_before_fc, "norms before fc"),
        (config.kv_lora_rank, "latent attention"),
    ):
        if wrong:
            raise UsageError(f"train.start: least_squares does not go with {what}. Use train.start: random.")


def least_squares_start(draft: Draft, batches: Iterable[Batch], rows: int) -> int:
    """Set fc, the first layer's attention and the norm from at most about `rows` chain starts; returns how many.

    Batches hold float32 or bfloat16 auxiliary and final states. Memory: a float32 Gram matrix [A*H + D, A*H + D].
    """
    c = draft.config
    width, size = c.fc_in, c.fc_in + c.hidden_size
    scale = torch.ones(width) if draft.aux_scale is None else draft.aux_scale.cpu()
    gram, moment = torch.zeros(size, size), torch.zeros(size, c.hidden_size)
    seen, total = 0, 0.0
    for batch in batches:
        starts = torch.nonzero(batch.depth > 0).squeeze(1)
        e = draft.embed_tokens.weight[batch.tokens[starts]].float()
        e = e * torch.rsqrt(e.square().mean(-1, keepdim=True) + c.rms_norm_eps)  # as input_layernorm will give it
        x = torch.cat([batch.aux[starts].float() * scale, e], 1)  # [n, A*H + D]
        y = batch.final[batch.teacher[starts]].float()  # [n, H]
        gram.addmm_(x.T, x)
        moment.addmm_(x.T, y)
        total += float(y.square().mean(-1).sqrt().sum())
        seen += len(starts)
        if seen >= rows:
            break
    if not seen:
        raise UsageError("train.start: least_squares found no supervised row to start from.")
    wide = gram.double()
    solved = torch.linalg.solve(wide + RIDGE * seen * torch.eye(size, dtype=torch.float64), moment.double())
    with torch.no_grad():
        draft.fc.weight.copy_(solved[:width].T)
        draft.norm.weight.fill_(total / seen)  # the head expects states of the size of the target's
        for layer in draft.stack:
            layer.self_attn.o_proj.weight.mul_(QUIET)
            layer.mlp.down_proj.weight.mul_(QUIET)
        _through_attention(draft.stack[0], solved[width:], wide[width:, width:] / seen, c)
    return seen


def _through_attention(layer: Layer, wanted: torch.Tensor, covariance: torch.Tensor, c: DraftConfig) -> None:
    """Let the layer's attention add `e @ wanted` [D, D] for its own row's embedding e, as far as its rank goes.

    Reduced-rank regression: of all maps of that rank, the one nearest in the covariance of e.
    """
    a, dim = layer.self_attn, c.head_dim
    assert isinstance(a, Attention)  # check_fits
    rank = min(c.num_key_value_heads * dim, c.hidden_size)
    values, vectors = torch.linalg.eigh(covariance)
    roots = values.clamp_min(1e-8).sqrt()
    u, s, v = torch.linalg.svd((vectors * roots) @ vectors.T @ wanted, full_matrices=False)
    into = ((vectors / roots) @ vectors.T @ u[:, :rank] * s[:rank].sqrt()).T  # [rank, D]
    out = (s[:rank].sqrt()[:, None] * v[:rank]).T  # [D, rank]
    # every value head gets strong and weak directions alike
    order = torch.arange(rank).view(-1, c.num_key_value_heads).T.flatten() if rank % c.num_key_value_heads == 0 else torch.arange(rank)  # fmt: skip
    a.v_proj.weight[:rank, : c.hidden_size] = into[order].float()
    a.v_proj.weight[:, c.hidden_size :].mul_(QUIET)
    group = c.num_attention_heads // c.num_key_value_heads
    own = max(1, group * 2 // 3)  # heads of a group that begin with their own row; the others look around
    factor = SELF_SCORE * dim**0.5 / float(a.k_proj.weight.square().sum() / c.num_key_value_heads)
    for head in range(c.num_attention_heads):
        shared, place = divmod(head, group)
        if place < own:
            rows, source = slice(head * dim, (head + 1) * dim), slice(shared * dim, (shared + 1) * dim)
            a.q_proj.weight[rows] = factor * a.k_proj.weight[source]
            part = out[:, order][:, source]
            a.o_proj.weight[:, rows] = 0
            a.o_proj.weight[:, head * dim : head * dim + part.shape[1]] = part.float() / own


def warm_start(draft: Draft, folder: str, target: Target, remap: bool = False) -> int:
    """Go on from an existing draft of any layout (ours, EAGLE/SGLang, speculators); returns the head rows taken over.

    Its vocabulary map must be this draft's, or with `remap` the rows of shared tokens are moved and the others keep
    their first values. Raises UsageError where shapes, options, map or embedding differ.
    """
    theirs, state = load_draft(folder, target)
    ours = draft.config
    free = ("draft_vocab_size", "max_position_embeddings", "rope_parameters")
    differs = [
        f"{key} {getattr(theirs, key)} (here {value})"
        for key, value in vars(ours).items()
        if key not in free and getattr(theirs, key) != value
    ]
    if differs:
        raise UsageError(f"train.warm: {folder} has another shape: {', '.join(differs)}. Set `draft` to its shape.")
    embedding = state.pop("embed_tokens.weight", None)
    kept = draft.embed_tokens.weight
    if embedding is not None and not torch.equal(embedding, kept.to(embedding.dtype)):
        raise UsageError(
            f"train.warm: {folder} holds an embedding of its own, not the target's, which eyas keeps frozen."
        )
    mine, others = _targets(draft.d2t, ours.draft_vocab_size), _targets(state.get("d2t"), theirs.draft_vocab_size)
    taken = len(mine)
    if not torch.equal(mine, others):
        shared = torch.isin(mine, others)
        taken = int(shared.sum())
        if not remap:
            raise UsageError(
                f"train.warm: the vocabulary of {folder} ({len(others):,} tokens, {taken:,} shared) is not this run's "
                f"({len(mine):,}). Keep its map with `vocab.like: {folder}`, or move the shared rows with `train.remap: true`."
            )
        head = draft.lm_head.weight.detach().clone()
        head[shared] = state["lm_head.weight"].float()[torch.searchsorted(others, mine[shared])]
        state["lm_head.weight"] = head
    if draft.aux_scale is not None:
        state["fc.weight"] = state["fc.weight"].float() / draft.aux_scale.to(state["fc.weight"].device)
    draft.load_state_dict({n: t for n, t in state.items() if n not in ("d2t", "t2d")}, strict=False)
    return taken


def _targets(d2t: torch.Tensor | None, size: int) -> torch.Tensor:
    """Target ids [Vd] of a map of offsets; the identity where there is none."""
    ids = torch.arange(size)
    return ids if d2t is None else ids + d2t.cpu()
