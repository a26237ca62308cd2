"""A target with many slots: each holds one growing document, all are continued by one token in one forward.

Keys and values lie in one preallocated buffer a layer, [slots, kv_heads, capacity, head_dim]; a slot is written in
place at its own length and its document can be replaced at any time. The model's own modules and masks do the work:
we hand Transformers a cache, an attention function and a mask function, nothing of a model is written anew here.

The number of rows of a forward never depends on who shares it (idle slots compute rows that nobody reads, a prompt
is read alone), so what a document gets does not depend on its neighbours.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.masking_utils import AttentionMaskInterface

from eyas.errors import UsageError
from eyas.target import LoadedTarget

NAME = "eyas_slots"
VIEW = 32  # lengths of cache views are multiples of this, so that vector lanes do not depend on the neighbours
READ = 512  # tokens of a prompt that one forward reads
PAD = 32  # a shorter piece is padded to a multiple of this: fewer shapes, hence fewer kernels to prepare
GROUP = 8  # slots whose attention shares one cache view
PACK_AT_MOST = 4 << 30  # bytes of weights of which a second copy is kept


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@dataclass
class Step:
    """What one forward touches: `rows` of the cache at `positions` [B, q]; attention goes `groups` by groups."""

    rows: torch.Tensor  # [B]
    positions: torch.Tensor  # [B, q]
    view: int
    groups: list[tuple[int, int, int]]  # first row, last row + 1, length of their view


_step: ContextVar[Step] = ContextVar("eyas_step")


class SlotLayer(CacheLayerMixin):
    """One layer's keys and values of every slot."""

    keys: torch.Tensor
    values: torch.Tensor
    is_sliding = False  # a sliding window is a matter of the mask: every slot keeps all it has

    def __init__(self, slots: int, capacity: int) -> None:
        super().__init__()
        self.slots, self.capacity = slots, capacity

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        def empty(like: torch.Tensor) -> torch.Tensor:  # zeros, since what is masked is multiplied by zero
            return like.new_zeros(self.slots, like.shape[1], self.capacity, like.shape[3])

        self.keys, self.values = empty(key_states), empty(value_states)
        self.is_initialized = True

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any) -> Any:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        step = _step.get()
        if step.positions.shape[1] == 1:  # every slot by one token
            self.keys[step.rows, :, step.positions[:, 0]] = key_states[:, :, 0]
            self.values[step.rows, :, step.positions[:, 0]] = value_states[:, :, 0]
            return self.keys[:, :, : step.view], self.values[:, :, : step.view]
        slot, start = int(step.rows[0]), int(step.positions[0, 0])
        end = start + key_states.shape[2]
        self.keys[slot, :, start:end] = key_states[0]
        self.values[slot, :, start:end] = value_states[0]
        return self.keys[slot : slot + 1, :, : step.view], self.values[slot : slot + 1, :, : step.view]

    def grow(self, capacity: int) -> None:
        if self.is_initialized:
            more = capacity - self.capacity
            self.keys, self.values = F.pad(self.keys, (0, 0, 0, more)), F.pad(self.values, (0, 0, 0, more))
        self.capacity = capacity

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return _step.get().view, 0

    def get_seq_length(self) -> int:
        return 0  # slots have no common length; positions are always given

    def get_max_length(self) -> int:
        return self.capacity

    get_max_cache_shape = get_max_length  # its name in earlier versions of Transformers


def slot_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    mask_function: Callable,
    dtype: torch.dtype = torch.float32,
    use_vmap: bool = False,
    **_: Any,
) -> torch.Tensor:
    """The model's own mask rule (causal, sliding, chunked) at each slot's own positions, additive: [B, 1, q, kv]."""
    if use_vmap:
        raise NotImplementedError("this model's mask is not a rule over positions")
    positions = _step.get().positions
    rows = torch.arange(batch_size, device=positions.device)[:, None, None, None]
    keys = torch.arange(kv_length, device=positions.device)[None, None, None]
    allowed = mask_function(rows, torch.zeros_like(keys[..., :1]), positions[:, None, :, None], keys)
    allowed = allowed.expand(batch_size, 1, q_length, kv_length)
    return torch.zeros(allowed.shape, dtype=dtype, device=positions.device).masked_fill_(~allowed, float("-inf"))


def slot_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """query [B, heads, q, d], key and value [B, kv_heads, view, d]; returns [B, q, heads, d_v]."""
    if attention_mask is None or position_bias is not None:
        raise NotImplementedError("this model does not take its mask from Transformers' mask functions")
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    output = query.new_zeros(*query.shape[:3], value.shape[-1])
    for first, last, length in _step.get().groups:
        part = (query[first:last], key[first:last, :, :length], value[first:last, :, :length])
        mask = attention_mask[first:last, :, :, :length]
        if softcap is None and s_aux is None:
            output[first:last] = _attend_folded(*part, mask, scaling)
        else:
            output[first:last] = _attend_plainly(*part, mask, scaling, softcap, s_aux)
    return output.transpose(1, 2).contiguous(), None


def _attend_folded(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, scaling: float
) -> torch.Tensor:
    """Fused attention; heads that share a key head stand as more queries of it.

    The kernel's own sharing (enable_gqa) does one query a head at a time: six times slower on a CPU, for one new token.
    """
    batch, heads, length, width = query.shape
    share = heads // key.shape[1]
    query = query.reshape(batch, key.shape[1], share * length, width)
    mask = mask.repeat(1, 1, share, 1) if length > 1 else mask
    output = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling)
    return output.reshape(batch, heads, length, -1)


def _attend_plainly(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    scaling: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """For what no fused kernel offers: capped scores (Gemma 2) and attention sinks (gpt-oss)."""
    batch, heads, length, width = query.shape
    grouped = query.reshape(batch, key.shape[1], -1, width)  # [B, kv_heads, share * q, d]
    scores = (grouped @ key.transpose(2, 3) * scaling).view(batch, heads, length, -1)
    if softcap is not None:
        scores = (scores / softcap).tanh() * softcap
    scores = scores + mask
    if sinks is not None:
        scores = torch.cat([scores, sinks.view(1, -1, 1, 1).expand(batch, heads, length, 1).to(scores)], dim=-1)
    weights = scores.softmax(-1, dtype=torch.float32).to(query.dtype)[..., : key.shape[2]]
    return (weights.view(batch, key.shape[1], -1, key.shape[2]) @ value).view(batch, heads, length, -1)


AttentionInterface.register(NAME, slot_attention)
AttentionMaskInterface.register(NAME, slot_mask)


class Slots:
    """Documents in slots 0 ... count - 1, continued together. Only within `opened`, which readies the model."""

    def __init__(self, target: LoadedTarget, count: int, limit: int) -> None:
        self.target, self.count, self.limit = target, count, round_up(limit, READ)
        self.capacity = min(READ, self.limit)
        self.layers = [SlotLayer(count, self.capacity) for _ in range(target.target.num_layers)]
        self.cache = Cache(layers=list(self.layers))
        self.all_rows = torch.arange(count, device=target.device)
        self.cache_name = _cache_name(target)

    def read(self, slot: int, ids: Sequence[int], past: int) -> torch.Tensor:
        """Append `ids` to the `past` tokens of a slot (past = 0: a new document); the logits [V] after the last."""
        for start in range(0, len(ids), READ):
            piece = list(ids[start : start + READ])
            padded = piece + piece[-1:] * (round_up(len(piece), PAD) - len(piece))  # overwritten by what comes next
            first, end = past + start, past + start + len(padded)
            positions = torch.arange(first, end, device=self.target.device)[None]
            view = round_up(end, VIEW)
            final = self._forward(torch.tensor([padded]), Step(torch.tensor([slot]), positions, view, [(0, 1, view)]))
        return self.target.logits(final[0, len(piece) - 1])

    def step(self, tokens: dict[int, int], past: dict[int, int]) -> torch.Tensor:
        """One more token for each slot named, which holds `past` tokens; logits [count, V], idle rows meaningless."""
        ids, positions = [0] * self.count, [0] * self.count
        for slot in tokens:
            ids[slot], positions[slot] = tokens[slot], past[slot]
        groups = []
        for first in range(0, self.count, GROUP):
            lengths = [past[slot] + 1 for slot in range(first, min(first + GROUP, self.count)) if slot in tokens]
            if lengths:
                groups.append((first, min(first + GROUP, self.count), round_up(max(lengths), VIEW)))
        view = max(length for _, _, length in groups)
        at = torch.tensor(positions, device=self.target.device)[:, None]
        final = self._forward(torch.tensor(ids)[:, None], Step(self.all_rows, at, view, groups))
        return self.target.logits(final[:, 0])

    @torch.inference_mode()
    def _forward(self, ids: torch.Tensor, step: Step) -> torch.Tensor:
        """Post-norm final states [B, q, H]."""
        if step.view > self.capacity:
            self.capacity = min(max(step.view, round_up(self.capacity * 3 // 2, VIEW)), max(self.limit, step.view))
            for layer in self.layers:
                layer.grow(self.capacity)
        token = _step.set(step)
        try:
            return self.target.body(
                input_ids=ids.to(self.target.device),
                position_ids=step.positions,
                use_cache=True,
                **{self.cache_name: self.cache},
            ).last_hidden_state
        finally:
            _step.reset(token)


class OneByOne:
    """The ordinary way, for models that cannot be continued in slots: each document has its own cache and forward."""

    def __init__(self, target: LoadedTarget, count: int, limit: int) -> None:
        self.target, self.count, self.cache_name = target, count, _cache_name(target)
        self.caches: list[Any] = [None] * count

    @torch.inference_mode()
    def read(self, slot: int, ids: Sequence[int], past: int) -> torch.Tensor:
        cache = self.caches[slot] if past else None
        new = torch.tensor([list(ids)], device=self.target.device)
        output = self.target.body(input_ids=new, use_cache=True, **{self.cache_name: cache})
        self.caches[slot] = output.get("cache") or output.get("past_key_values")
        return self.target.logits(output.last_hidden_state[0, -1])

    def step(self, tokens: dict[int, int], past: dict[int, int]) -> torch.Tensor:
        rows = {slot: self.read(slot, [token], past[slot]) for slot, token in tokens.items()}
        idle = torch.zeros_like(next(iter(rows.values())))
        return torch.stack([rows.get(slot, idle) for slot in range(self.count)])


Engine = Slots | OneByOne


@contextmanager
def opened(target: LoadedTarget, count: int, limit: int, workers: int = 1) -> Iterator[tuple[list[Engine], str]]:
    """`workers` engines of `count` slots over the one model, for documents of at most `limit` tokens.

    Slots where the model gives in them what it gives in one plain forward (tried on a short document), else the
    ordinary way, one slot each, with the reason as the second value. The model is restored at the end.
    """
    _check_rotary(target, limit)
    reason = _refusal(target)
    with ExitStack() as stack:
        if not reason:
            try:
                wanted = _plain_logits(target)
                stack.enter_context(_attention(target))
                stack.enter_context(_packed_linears(target, count))
                likeness = F.cosine_similarity(_slot_logits(Slots(target, min(count, 3), READ)), wanted, dim=-1).min()
                if not likeness > (0.9999 if target.dtype == torch.float32 else 0.98):
                    reason = f"its logits in slots differ from a plain forward (cosine {likeness:.4f})"
            except Exception as error:  # whatever goes wrong in a model that we do not know, the ordinary way remains
                reason = (str(error) or type(error).__name__).splitlines()[0]
            if reason:
                stack.close()
        engine: type[Engine] = OneByOne if reason else Slots
        yield [engine(target, 1 if reason else count, limit) for _ in range(workers)], reason


def _refusal(target: LoadedTarget) -> str:
    """Why this model must be continued the ordinary way, or nothing."""
    config = target.body.config
    if not getattr(type(target.body), "_supports_attention_backend", False):
        return "it does not use Transformers' attention interface"
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if not kinds <= {"full_attention", "sliding_attention", "chunked_attention"}:
        return f"it has layers of kind {', '.join(sorted(kinds))}"
    return ""


def _check_rotary(target: LoadedTarget, limit: int) -> None:
    """A rotary embedding that changes with the length gives a long document no single meaning, cached or not."""
    config = target.body.config
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kinds = {
        str(value.get("rope_type", value.get("type"))) for value in (rope, *rope.values()) if isinstance(value, dict)
    }
    names = ", ".join(sorted(kinds & {"dynamic", "longrope"}))
    original = rope.get("original_max_position_embeddings") or getattr(config, "original_max_position_embeddings", None)
    original = original or config.max_position_embeddings
    if names and limit > original:
        raise UsageError(
            f"{target.target.path}: its rotary embedding changes beyond {original} tokens ({names}), so that a longer "
            f"document has no single meaning. Set max_length to at most {original}."
        )


def _cache_name(target: LoadedTarget) -> str:
    """What the model calls its cache: the name changed between versions of Transformers."""
    return "cache" if "cache" in inspect.signature(target.body.forward).parameters else "past_key_values"


def _trial_ids(target: LoadedTarget) -> list[int]:
    return [(7919 * i + 11) % min(target.target.vocab_size, 1000) for i in range(44)]


@torch.inference_mode()
def _plain_logits(target: LoadedTarget) -> torch.Tensor:
    ids = torch.tensor([_trial_ids(target)], device=target.device)
    final = target.body(input_ids=ids, use_cache=False).last_hidden_state[0]
    return target.logits(final[[4, 39, 40, 41, 42, 43]]).float()


def _slot_logits(slots: Slots) -> torch.Tensor:
    """The same, read in two pieces and continued by four tokens in the last slot."""
    ids, slot = _trial_ids(slots.target), slots.count - 1
    given = [slots.read(slot, ids[:5], 0), slots.read(slot, ids[5:40], 5)]
    given += [slots.step({slot: ids[i]}, {slot: i})[slot] for i in range(40, 44)]
    return torch.stack(given).float()


@contextmanager
def _attention(target: LoadedTarget) -> Iterator[None]:
    config = target.body.config
    before = config._attn_implementation
    config._attn_implementation = NAME
    try:
        yield
    finally:
        config._attn_implementation = before


@contextmanager
def _packed_linears(target: LoadedTarget, rows: int) -> Iterator[None]:
    """On a CPU that multiplies bf16, linear layers keep a copy of their weight in oneDNN's own layout.

    Without it oneDNN lays out every weight anew in every forward, a third of the work at few rows. Same sums.
    """
    layers = [m for m in (*target.body.modules(), target.model.get_output_embeddings()) if type(m) is torch.nn.Linear]
    if not (
        target.device.type == "cpu"
        and target.dtype == torch.bfloat16
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()
        and sum(layer.weight.nbytes for layer in layers) <= PACK_AT_MOST
    ):
        yield
        return
    try:
        for layer in layers:
            packed = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach(), rows)
            layer.forward = partial(_packed_linear, packed, layer.bias)  # type: ignore[method-assign]
        yield
    finally:
        for layer in layers:
            layer.__dict__.pop("forward", None)


def _packed_linear(packed: torch.Tensor, bias: torch.Tensor | None, states: torch.Tensor) -> torch.Tensor:
    return torch.ops.mkldnn._linear_pointwise(states, packed, bias, "none", [], "")
