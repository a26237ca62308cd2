"""The audit: what is frozen, what is trained, where every value comes from, and whether that is so. GO or NO-GO.

Three moments: from configs alone (`audit_config`, no torch), with weights before training (`audit_before`), and after
training or export (`audit_after`). Each returns the same JSON: components, totals, verdict, reasons, and beyond that
`checks` (the findings that belong to no single component), `notes`, `policy`, `estimates` and `stage`.
"""

import itertools
import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eyas.draft.config import DraftConfig, draft_config_for
from eyas.errors import EyasError
from eyas.files import read_json
from eyas.serving.names import draft_config_from, expected_shapes
from eyas.target import Target

if TYPE_CHECKING:
    import torch
    from rich.console import RenderableType

    from eyas.draft.model import Draft

Json = dict[str, Any]
OK, FAIL, OPEN, NOTE = "ok", "fail", "not checked", "note"
TEACHER, HEAD, EMBEDDING = "verifier_lm_head", "lm_head", "embed_tokens"
TRAIN_DTYPES = ("torch.float32", "torch.float64")
SELF_CHECK = 0.9  # share of teacher positions whose argmax is the next token, where the target wrote greedily

# What each trainer freezes of a draft, and how it begins the head. Read from their released code.
CONVENTIONS: dict[str, tuple[frozenset[str], str]] = {
    "EAGLE-3 paper code": (frozenset({EMBEDDING}), "random"),
    "speculators < 0.5": (frozenset({EMBEDDING}), "the target's rows"),
    "speculators >= 0.5": (frozenset({EMBEDDING, HEAD}), "the target's rows"),
    "SpecForge 0.2": (frozenset({EMBEDDING}), "random"),
}


def component_of(tensor: str) -> str:
    """The component that a tensor (internal name) belongs to: a row of the audit's table."""
    parts = tensor.split(".")
    if parts[0] == "layers":
        kind = parts[2] if parts[2] in ("self_attn", "mlp") and "norm" not in tensor else "norms"
        return f"layers.{parts[1]}.{kind}"
    return parts[0]


def is_frozen(tensor: str, policy: Collection[str]) -> bool:
    """Whether the policy freezes a tensor: it names the tensor, its component, or a prefix. The teacher always is."""
    component = component_of(tensor)
    return component == TEACHER or any(tensor == p or component == p or tensor.startswith(p + ".") for p in policy)


def config_for_audit(target: Target, draft_config: str | Path | None = None) -> DraftConfig:
    """The draft to audit: from `draft_config`, else from draft_config.json beside the target, else EAGLE-3's own."""
    file = Path(draft_config) if draft_config else target.path / "draft_config.json"
    if draft_config or file.exists():
        return draft_config_from(read_json(file), target)
    return draft_config_for(target, min(32_000, target.vocab_size))


class _Audit:
    """Collects findings; `result` turns them into the contract's JSON. Failures become the reasons of a NO-GO."""

    def __init__(self, stage: str, config: DraftConfig, policy: Collection[str]) -> None:
        self.stage, self.config, self.policy = stage, config, set(policy)
        self.sizes: dict[str, int] = {}
        self.tensors: dict[str, list[str]] = {}
        for name, shape in all_shapes(config).items():
            component = component_of(name)
            self.sizes[component] = self.sizes.get(component, 0) + (0 if is_map(name) else math.prod(shape))
            self.tensors.setdefault(component, []).append(name)
        self.found: dict[str, list[tuple[str, str]]] = {component: [] for component in self.sizes}
        self.sources: dict[str, str] = {}
        self.checks: list[Json] = []
        self.estimates: Json = {}
        for entry in sorted(self.policy):
            if not any(is_frozen(n, {entry}) and component_of(n) != TEACHER for n in all_shapes(config)):
                self.check("policy", FAIL if entry != TEACHER else OK, f"The recipe freezes {entry!r}, which no tensor of this draft is called.")  # fmt: skip

    def say(self, component: str, result: str, detail: str) -> None:
        """A finding about one component. Sentences end without a full stop in the table."""
        self.found[component].append((result, detail))

    def check(self, name: str, result: str | bool, detail: str) -> None:
        """A finding beside the table; True and False mean ok and fail."""
        result = result if isinstance(result, str) else (OK if result else FAIL)
        self.checks.append({"name": name, "result": result, "detail": detail})

    def state(self, component: str) -> str:
        if component in ("d2t", "t2d"):
            return "buffer"
        frozen = [is_frozen(name, self.policy) for name in self.tensors[component]]
        return "frozen" if all(frozen) else "trained"

    def result(self) -> Json:
        components, reasons = [], []
        for component, size in self.sizes.items():
            found = self.found[component]
            failed = [detail for result, detail in found if result == FAIL]
            passed = [detail for result, detail in found if result == OK]
            reasons += [f"{component}: {detail}." for detail in failed]
            shown = failed or passed or [detail for _, detail in found]
            components.append(
                {
                    "name": component,
                    "params": size,
                    "state": self.state(component),
                    "source": self.sources.get(component, "not said"),
                    "check": FAIL if failed else OK if passed else OPEN,
                    "detail": "; ".join(shown),
                }
            )
        reasons += [check["detail"] for check in self.checks if check["result"] == FAIL]
        trained = sum(
            math.prod(shape)
            for name, shape in all_shapes(self.config).items()
            if not is_map(name) and not is_frozen(name, self.policy)
        )
        total = sum(self.sizes.values())
        return {
            "stage": self.stage,
            "components": components,
            "total_params": total,
            "trained_params": trained,
            "frozen_params": total - trained,
            "trained_share": trained / total,
            "verdict": "no-go" if reasons else "go",
            "reasons": reasons,
            "notes": [check["detail"] for check in self.checks if check["result"] == NOTE],
            "checks": self.checks,
            "policy": {"frozen": sorted(self.policy), "conventions": self._conventions()},
            "estimates": self.estimates,
        }

    def _conventions(self) -> list[Json]:
        """Where this policy differs from each trainer's, in words."""
        rows = []
        frozen = {c for c in self.sizes if c not in (TEACHER, "d2t", "t2d") and self.state(c) == "frozen"}
        source = self.sources.get(HEAD, "")
        start = "random" if "random" in source and "target" not in source else "the target's rows"
        for name, (theirs, head) in CONVENTIONS.items():
            differs = [f"freezes {c}, this recipe trains it" for c in sorted(theirs - frozen)]
            differs += [f"trains {c}, this recipe freezes it" for c in sorted(frozen - theirs)]
            if source and "or random" not in source and not source.startswith("checkpoint") and head != start:
                differs.append(f"begins lm_head from {head}, this recipe from {start}")
            rows.append({"name": name, "frozen": sorted(theirs), "differs": differs})
        return rows


def all_shapes(config: DraftConfig) -> dict[str, tuple[int, ...]]:
    """`expected_shapes` and the teacher's head [Vd, H], in the order in which the draft computes."""
    shapes = expected_shapes(config)
    shapes[f"{TEACHER}.weight"] = (config.draft_vocab_size, config.target_hidden_size)
    order = (EMBEDDING, TEACHER, "fc_norm", "input_norm", "fc", "layers", "norm", HEAD, "d2t", "t2d")
    return {name: shapes[name] for name in sorted(shapes, key=lambda name: order.index(name.split(".")[0]))}


def is_map(name: str) -> bool:
    return name in ("d2t", "t2d")


def norm_names(config: DraftConfig) -> list[str]:
    return [name for name, shape in expected_shapes(config).items() if len(shape) == 1 and name.endswith("weight")]


# ---- from configs alone ------------------------------------------------------------------------------------------------


def audit_config(
    target: Target, config: DraftConfig, *, frozen: Collection[str] = frozenset({EMBEDDING}), plan: Json | None = None
) -> Json:
    """The audit that needs no weights: sizes, policy, what must agree between target and draft, estimates.

    `frozen` names components or tensors. `plan` (all optional): tokens of the data set, epochs, steps (K),
    batch_tokens, flops (achieved per second), for the estimates.
    """
    audit = _Audit("config", config, frozen)
    on_disk = bool(target.tensor_files)
    embedding = (target.tensor_name("embedding") if on_disk else None) or "input embedding"
    head = (target.tensor_name("head") if on_disk else None) or "output head"
    rows = "rows of the draft vocabulary" if config.draft_vocab_size < config.vocab_size else "all rows"
    wide = config.hidden_size == config.target_hidden_size
    default = {component: "ones" if "norm" in component else "random" for component in audit.sizes}
    default |= {
        EMBEDDING: f"copied from target {embedding}" if wide else "of its own, random",
        TEACHER: f"target {head}, {rows}",
        HEAD: f"target {head}, {rows}, or random" if wide else "random",
        "d2t": "vocabulary map",
        "t2d": "vocabulary map",
    }
    audit.sources = {component: default[component] for component in audit.sizes}
    for component in audit.sizes:
        shapes = [f"{n.removesuffix('.weight')} {list(all_shapes(config)[n])}" for n in audit.tensors[component]]
        audit.say(component, OPEN, ", ".join(shapes) if len(shapes) < 4 else f"{len(shapes)} tensors")
    _config_checks(audit, target)
    audit.estimates = estimate(config, frozen, **(plan or {}))
    return audit.result()


def _config_checks(audit: _Audit, target: Target) -> None:
    c = audit.config
    pairs = (
        ("vocabulary", c.vocab_size, target.vocab_size),
        ("target hidden size", c.target_hidden_size, target.hidden_size),
        ("target layers", c.target_num_layers, target.num_layers),
    )
    for name, mine, theirs in pairs:
        text = f"The draft's config has {name} {mine:,}, the target {theirs:,}"
        audit.check(name, mine == theirs, f"{text}." if mine == theirs else f"{text}; they must be equal.")
    audit.check("fc", True, f"fc reads {len(c.aux_layers)} states of {c.target_hidden_size:,}: {c.fc_in:,} inputs, from out{c.aux_layers}.")  # fmt: skip
    reach = rope_range(c)
    audit.check(
        "context",
        OK if reach >= target.max_positions else NOTE,
        f"RoPE of the draft reaches {reach:,} positions, the target's context {target.max_positions:,}.",
    )
    if c.hidden_size != c.target_hidden_size and is_frozen(f"{EMBEDDING}.weight", audit.policy):
        audit.say(EMBEDDING, FAIL, f"frozen, but the draft's width {c.hidden_size} is not the target's {c.target_hidden_size}, so random numbers would be frozen; train it")  # fmt: skip
    if c.hidden_size == c.target_hidden_size and not is_frozen(f"{EMBEDDING}.weight", audit.policy):
        audit.check("embedding policy", NOTE, "The recipe trains embed_tokens; SGLang, OpenVINO and TensorRT-LLM put the target's in its place whatever the file holds.")  # fmt: skip


def rope_range(config: DraftConfig) -> int:
    """Positions that the draft's RoPE is meant for."""
    rope = config.rope_parameters
    original = rope.get("original_max_position_embeddings")
    if rope.get("rope_type") in ("yarn", "llama3", "longrope") and original and rope.get("factor"):
        return max(config.max_position_embeddings, int(original * rope["factor"]))
    return config.max_position_embeddings


def estimate(
    config: DraftConfig,
    frozen: Collection[str],
    *,
    tokens: int | None = None,
    epochs: float = 1,
    steps: int = 7,
    batch_tokens: int = 4096,
    flops: float | None = None,
    seconds_per_batch: float | None = None,
) -> Json:
    """Bytes and work of training, by arithmetic. An upper bound: every row supervised, every chain alive for K steps.

    Weights: float32 masters with a bf16 cast of matrices, bf16 embedding and teacher. Optimizer: two float32 moments.
    Activations: bf16 rows kept for the backward pass, logits of a chunk of 512 rows and the teacher's kept logits.
    """
    c = config
    shapes = all_shapes(c)
    trained = sum(math.prod(s) for n, s in shapes.items() if not is_map(n) and not is_frozen(n, frozen))
    still = sum(math.prod(s) for n, s in shapes.items() if not is_map(n) and is_frozen(n, frozen))
    heads, key_value = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    row = c.num_layers * (8 * c.hidden_size + 2 * heads + 2 * key_value + 3 * c.intermediate_size) + c.hidden_size
    logits = 512 * c.draft_vocab_size * 16 + min(512 << 20, batch_tokens * c.draft_vocab_size * 2)
    layer = sum(math.prod(s) for n, s in shapes.items() if n.startswith("layers."))
    fusing = c.fc_in * c.hidden_size
    head = c.hidden_size * c.draft_vocab_size
    teacher = c.target_hidden_size * c.draft_vocab_size
    work = 6 * fusing + steps * 6 * (layer + head) + 2 * teacher
    store = 2 * c.target_hidden_size * (len(c.aux_layers) + 1)
    found: Json = {
        "weights_bytes": 6 * trained + 2 * still,
        "gradients_bytes": 4 * trained,
        "optimizer_bytes": 8 * trained,
        "activations_bytes": 2 * batch_tokens * (c.fc_in + steps * row) + logits,
        "store_bytes_per_token": store,
        "flops_per_token": work,
        "batch_tokens": batch_tokens,
        "steps": steps,
    }
    if tokens:
        found |= {"tokens": tokens, "epochs": epochs, "store_bytes": store * tokens}
        if flops:
            found["train_seconds"] = work * tokens * epochs / flops
        elif seconds_per_batch:
            found["train_seconds"] = seconds_per_batch * tokens * epochs / batch_tokens
    return found


# ---- before training, with weights -------------------------------------------------------------------------------------


def audit_before(
    target: Target,
    draft: "Draft",
    *,
    teacher_head: "torch.Tensor",
    optimizer: Any = None,
    sources: Mapping[str, str],
    store_meta: Mapping[str, Any] | None,
    store_figures: Mapping[str, Any] | None,
    vocab: Mapping[str, Any] | None,
    policy_frozen: Collection[str],
    dry_step: Callable[[], Any] | None,
    plan: Json | None = None,
) -> Json:
    """The audit of a draft that is about to train.

    teacher_head [Vd, H]: what will teach, in any float dtype. optimizer: one torch optimizer or several.
    sources: component -> where its values come from ("target NAME", "random …", "checkpoint PATH").
    store_meta: Store.meta. store_figures: figures of the store's manifest, plus "longest" (tokens of the longest
    sample) where known. vocab: "always" (ids that must be in: special and end tokens), "coverage" (share of supervised
    tokens in the map), "tau_ceiling", "untrained", "d2t" (int64 [Vd], the map of the vocabulary stage); all optional.
    dry_step: runs one batch forward and backward into `.grad` and returns the loss; gradients are cleared afterwards.
    plan: as for `audit_config`; with batch_tokens the time estimate is the dry step's own.
    """
    audit = _Audit("before", draft.config, policy_frozen)
    audit.sources = {component: sources.get(component, "not said") for component in audit.sizes}
    _config_checks(audit, target)
    parameters = dict(draft.named_parameters(remove_duplicate=False))
    _check_shapes(audit, {**parameters, f"{TEACHER}.weight": teacher_head})
    _check_requires_grad(audit, parameters)
    _check_memory(audit, {**parameters, f"{TEACHER}.weight": teacher_head})
    _check_map(audit, draft.d2t, draft.t2d, target, vocab or {})
    _check_provenance(audit, target, parameters, teacher_head, draft.d2t, draft.t2d)
    _check_masters(audit, parameters, optimizer)
    if optimizer is not None:
        _check_optimizer(audit, parameters, optimizer)
    seconds = _check_dry_step(audit, parameters, dry_step, (plan or {}).get("steps")) if dry_step else None
    _check_store(audit, target, store_meta, store_figures)
    extra = {"tokens": (store_figures or {}).get("tokens"), **(plan or {})}
    if seconds and "batch_tokens" in extra and "flops" not in extra:
        extra["seconds_per_batch"] = seconds
    audit.estimates = estimate(draft.config, policy_frozen, **extra)
    return audit.result()


def _parts(audit: _Audit, parameters: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Component -> its parameters that exist."""
    for component, names in audit.tensors.items():
        there = {name: parameters[name] for name in names if name in parameters}
        if there:
            yield component, there


def _list(names: Iterable[str], most: int = 3) -> str:
    names = list(names)
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _check_shapes(audit: _Audit, parameters: Mapping[str, "torch.Tensor"]) -> None:
    for name, shape in all_shapes(audit.config).items():
        if is_map(name):
            continue
        if name not in parameters:
            audit.say(component_of(name), FAIL, f"{name} is missing from the draft")
        elif tuple(parameters[name].shape) != shape:
            audit.say(component_of(name), FAIL, f"{name} is {list(parameters[name].shape)}, its config says {list(shape)}")  # fmt: skip
    unknown = sorted(parameters.keys() - all_shapes(audit.config).keys())
    if unknown:
        audit.check("tensors", FAIL, f"The draft has parameters that its config does not know: {_list(unknown)}.")


def _check_requires_grad(audit: _Audit, parameters: Mapping[str, "torch.Tensor"]) -> None:
    for component, there in _parts(audit, parameters):
        loose = [n for n, p in there.items() if is_frozen(n, audit.policy) and p.requires_grad]
        stuck = [n for n, p in there.items() if not is_frozen(n, audit.policy) and not p.requires_grad]
        if loose:
            audit.say(component, FAIL, f"{_list(loose)} would be trained (requires_grad), the recipe freezes it")
        if stuck:
            audit.say(component, FAIL, f"{_list(stuck)} is frozen (requires_grad is off), the recipe trains it")


def _check_memory(audit: _Audit, parameters: Mapping[str, "torch.Tensor"]) -> None:
    """No two tensors may lie in the same memory: training one would move the other."""
    spans = []
    for name, tensor in parameters.items():
        if tensor.device.type != "meta" and tensor.numel():
            start = tensor.data_ptr()
            spans.append((start, start + tensor.numel() * tensor.element_size(), name, tensor.device))
    spans.sort(key=lambda span: (str(span[3]), span[0], span[2]))
    for (_, end, first, device), (start, _, second, other) in itertools.pairwise(spans):
        if device == other and start < end:
            audit.say(component_of(second), FAIL, f"{first} and {second} share memory (tied), so training one moves the other")  # fmt: skip


def _check_map(
    audit: _Audit, d2t: "torch.Tensor | None", t2d: "torch.Tensor | None", target: Target, vocab: Mapping[str, Any]
) -> None:
    import torch

    c = audit.config
    coverage = vocab.get("coverage")
    if coverage is not None:
        ceiling = vocab.get("tau_ceiling")
        limit = f"; even a perfect draft reaches tau {float(ceiling):.2f} at most" if ceiling is not None else ""
        audit.check("out of vocabulary", OK if coverage >= 0.95 else NOTE, f"{1 - coverage:.2%} of the supervised tokens are outside the draft vocabulary of {c.draft_vocab_size:,}{limit}.")  # fmt: skip
    if vocab.get("untrained"):
        audit.check("unseen rows", NOTE, f"{vocab['untrained']:,} tokens of the draft vocabulary were never supervised; their head rows get no positive example.")  # fmt: skip
    if "d2t" not in audit.sizes:
        return
    if d2t is None or t2d is None:
        audit.say("d2t", FAIL, "the draft vocabulary is reduced, but the draft has no maps")
        return
    where = d2t.cpu().long() + torch.arange(len(d2t))
    forms = (
        (d2t.dtype == torch.int64, f"its dtype is {d2t.dtype}, expected int64"),
        (len(d2t) == c.draft_vocab_size, f"{len(d2t):,} entries, expected {c.draft_vocab_size:,}"),
        (bool((where.diff() > 0).all()), "i + d2t[i] is not strictly increasing; d2t must hold offsets, not target ids"),
        (int(where.min()) >= 0 and int(where.max()) < c.vocab_size, f"i + d2t[i] reaches {int(where.max()):,}, outside the vocabulary of {c.vocab_size:,}"),
    )  # fmt: skip
    wrong = [sentence for fine, sentence in forms if not fine]
    for sentence in wrong:
        audit.say("d2t", FAIL, sentence)
    inside = t2d.cpu().bool()
    if len(inside) != c.vocab_size:
        audit.say("t2d", FAIL, f"{len(inside):,} entries, expected {c.vocab_size:,}")
        return
    if not wrong:
        same = torch.equal(torch.nonzero(inside).flatten(), where)
        audit.say("d2t", OK, f"int64 offsets, {len(d2t):,} target ids in ascending order")
        audit.say("t2d", OK if same else FAIL, f"names the same {len(d2t):,} tokens as d2t" if same else "d2t and t2d name different tokens")  # fmt: skip
        if torch.equal(where, torch.arange(len(where))):
            audit.say("d2t", FAIL, f"it names ids 0 to {len(where) - 1:,}, as a map that was never filled does")
    if vocab.get("d2t") is not None and not torch.equal(torch.as_tensor(vocab["d2t"]).long(), d2t.cpu().long()):
        audit.say("d2t", FAIL, "it is not the map of the vocabulary stage")
    needed = {int(i) for i in vocab.get("always", ())} | set(target.eos_ids)
    absent = sorted(i for i in needed if not 0 <= i < len(inside) or not inside[i])
    ends = [i for i in absent if i in target.eos_ids]
    if ends:
        audit.say("t2d", FAIL, f"the end token {_list(map(str, ends))} is not in the draft vocabulary, so the draft can never end an answer")  # fmt: skip
    if others := [i for i in absent if i not in ends]:
        audit.say("t2d", FAIL, f"special tokens {_list(map(str, others), 5)} are not in the draft vocabulary")
    if needed and not absent:
        audit.say("t2d", OK, f"all {len(needed)} special and end tokens are in")


def _check_provenance(
    audit: _Audit,
    target: Target,
    parameters: Mapping[str, "torch.Tensor"],
    teacher: "torch.Tensor",
    d2t: "torch.Tensor | None",
    t2d: "torch.Tensor | None",
) -> None:
    import torch

    c = audit.config
    for component, there in _parts(audit, {**parameters, f"{TEACHER}.weight": teacher}):
        if bad := [n for n, p in there.items() if p.device.type != "meta" and not bool(torch.isfinite(p.detach()).all())]:  # fmt: skip
            audit.say(component, FAIL, f"{_list(bad)} holds NaN or infinities")
    embedding, head = target.tensor_name("embedding"), target.tensor_name("head")
    if embedding is None or head is None:
        audit.check("target weights", NOTE, f"{target.path} holds no embedding or head, so nothing could be compared with the target.")  # fmt: skip
        return
    mine = parameters.get(f"{EMBEDDING}.weight")
    if mine is not None and c.hidden_size == c.target_hidden_size:
        equal = same_bits(mine, target.read_tensor(embedding))
        if equal:
            audit.say(EMBEDDING, OK, f"bitwise equal to the target's {embedding}")
        elif is_frozen(f"{EMBEDDING}.weight", audit.policy):
            audit.say(EMBEDDING, FAIL, f"frozen, but not the target's {embedding}: wrong or random numbers would stay for ever")  # fmt: skip
        elif audit.sources[EMBEDDING].startswith("target"):
            audit.say(EMBEDDING, FAIL, f"said to come from the target, but differs from its {embedding}")
    rows = target.read_tensor(head)
    if t2d is not None and len(t2d) == len(rows):
        rows = rows[t2d.cpu().bool()]
    elif t2d is not None:
        audit.say(TEACHER, FAIL, f"the target's {head} has {len(rows):,} rows, t2d {len(t2d):,}")
        return
    chosen = "rows named by t2d" if t2d is not None else "rows"
    equal = same_bits(teacher, rows)
    audit.say(
        TEACHER,
        OK if equal else FAIL,
        f"bitwise equal to the {chosen} of the target's {head}"
        if equal
        else f"not the {chosen} of the target's {head}, so the teacher would teach other tokens",
    )
    mine = parameters.get(f"{HEAD}.weight")
    if mine is None or c.hidden_size != c.target_hidden_size:
        return
    equal, claimed = same_bits(mine, rows), audit.sources[HEAD].startswith("target")
    if equal:
        audit.say(HEAD, OK, f"begins as the {chosen} of the target's {head}")
    elif claimed:
        audit.say(HEAD, FAIL, f"said to be the {chosen} of the target's {head}, but differs")
    elif is_frozen(f"{HEAD}.weight", audit.policy) and not audit.sources[HEAD].startswith("checkpoint"):
        audit.say(HEAD, FAIL, f"frozen, but not the {chosen} of the target's {head}")


def same_bits(mine: "torch.Tensor", theirs: "torch.Tensor", rows: int = 16_384) -> bool:
    """Bitwise equality after casting `theirs` to the dtype of `mine`, a block of rows at a time."""
    import torch

    if mine.shape != theirs.shape or mine.device.type == "meta":
        return False
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    for a, b in zip(mine.detach().split(rows), theirs.detach().split(rows), strict=True):
        a = a.cpu().contiguous()
        b = b.cpu().to(a.dtype).contiguous()
        if not torch.equal(a.view(words[a.element_size()]), b.view(words[b.element_size()])):
            return False
    return True


def _check_masters(audit: _Audit, parameters: Mapping[str, "torch.Tensor"], optimizer: Any) -> None:
    import torch

    rates = [group["lr"] for one in _optimizers(optimizer) for group in one.param_groups if group.get("lr")]
    for component, there in _parts(audit, parameters):
        narrow = [n for n, p in there.items() if p.requires_grad and str(p.dtype) not in TRAIN_DTYPES]
        if not narrow:
            continue
        dtype = there[narrow[0]].dtype
        name = str(dtype).removeprefix("torch.")
        text = f"{_list(narrow)} trains in {name}; use float32 masters"
        if any("norm" in n for n in narrow):
            rate = max(rates, default=1e-3)
            moves = bool(torch.tensor(1.0, dtype=dtype) - rate != 1.0)
            text += f" (in {name} a norm at 1.0 {'may move by whole steps only' if moves else f'cannot move: an update of {rate:g} is rounded away'})"  # fmt: skip
        audit.say(component, FAIL, text)


def _optimizers(optimizer: Any) -> list[Any]:
    if optimizer is None:
        return []
    return list(optimizer) if isinstance(optimizer, list | tuple) else [optimizer]


def _check_optimizer(audit: _Audit, parameters: Mapping[str, "torch.Tensor"], optimizer: Any) -> None:
    held = [id(p) for one in _optimizers(optimizer) for group in one.param_groups for p in group["params"]]
    for component, there in _parts(audit, parameters):
        counts = {name: held.count(id(p)) for name, p in there.items()}
        trained = [n for n in there if not is_frozen(n, audit.policy)]
        if missing := [n for n in trained if not counts[n]]:
            audit.say(component, FAIL, f"{_list(missing)} should be trained but is in no optimizer group, so it would never move")  # fmt: skip
        if twice := [n for n in trained if counts[n] > 1]:
            audit.say(component, FAIL, f"{_list(twice)} is in the optimizer more than once")
        if frozen := [n for n in there if n not in trained and counts[n]]:
            audit.say(component, FAIL, f"{_list(frozen)} is frozen but in the optimizer")
        if trained and all(counts[n] == 1 for n in trained):
            audit.say(component, OK, "in the optimizer once")


def _check_dry_step(
    audit: _Audit, parameters: Mapping[str, "torch.Tensor"], dry_step: Callable[[], Any], steps: int | None
) -> float | None:
    """Run one batch, look at every gradient, clear them. Returns the seconds it took."""
    import torch

    for parameter in parameters.values():
        parameter.grad = None
    start = time.monotonic()
    try:
        loss = dry_step()
    except RuntimeError as error:  # autograd's own refusals, such as a graph in which nothing requires a gradient
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        audit.check("dry step", FAIL, f"The one-batch dry step failed: {reason}.")
        return None
    seconds = time.monotonic() - start
    value = float(loss) if loss is not None else None
    if value is not None and not math.isfinite(value):
        audit.check("dry step", FAIL, f"The loss of the one-batch dry step is {value}.")
    else:
        audit.check("dry step", OK, "One batch went forward and backward" + (f", loss {value:.4f}." if value is not None else "."))  # fmt: skip
    uniform = (steps or 0) * math.log(audit.config.draft_vocab_size)
    if value is not None and steps and math.isfinite(value) and value > uniform:
        audit.check("first loss", NOTE, f"The first loss, {value:.1f}, is worse than a uniform guess over the draft vocabulary, {uniform:.1f} at most; a head of the target's rows expects states of the size that the target's final norm gives.")  # fmt: skip
    for component, there in _parts(audit, parameters):
        trained = {n: p for n, p in there.items() if not is_frozen(n, audit.policy)}
        bad = [n for n, p in trained.items() if p.grad is not None and not bool(torch.isfinite(p.grad).all())]
        none = [n for n, p in trained.items() if p.grad is None or not bool(p.grad.any())]
        leaked = [n for n, p in there.items() if n not in trained and p.grad is not None]
        if bad:
            audit.say(component, FAIL, f"the gradient of {_list(bad)} holds NaN or infinities")
        if none:
            audit.say(component, FAIL, f"{_list(none)} got no gradient in the dry step")
        if leaked:
            audit.say(component, FAIL, f"{_list(leaked)} is frozen but got a gradient in the dry step")
        if trained and not bad and not none:
            audit.say(component, OK, "every tensor got a gradient")
        elif not trained and not leaked:
            audit.say(component, OK, "got no gradient")
    for parameter in parameters.values():
        parameter.grad = None
    return seconds


def _check_store(
    audit: _Audit, target: Target, meta: Mapping[str, Any] | None, figures: Mapping[str, Any] | None
) -> None:
    c = audit.config
    if meta is not None:
        layers, width = list(meta["layers"]), int(meta["hidden_size"])
        audit.check("store layers", layers == list(c.aux_layers), f"The store holds the layers out{tuple(layers)}, the draft reads out{c.aux_layers}.")  # fmt: skip
        audit.check("store width", width == c.target_hidden_size, f"The store's states are {width:,} wide, the draft's target {c.target_hidden_size:,}.")  # fmt: skip
        audit.check("fc width", len(layers) * width == c.fc_in, f"fc reads {c.fc_in:,} inputs, the store gives {len(layers)} x {width:,}.")  # fmt: skip
        theirs, ours = dict(meta.get("target") or {}), target.fingerprints
        words = {"config": "config", "weights": "weights", "tokenizer": "tokenizer", "chat_template": "chat template"}
        for key, word in words.items():
            if key not in theirs:
                audit.check(f"store {word}", NOTE, f"The store does not say which {word} its target had.")
            else:
                same = theirs[key] == ours[key]
                audit.check(f"store {word}", same, f"The store was extracted with {'the same' if same else 'another'} {word} of the target.")  # fmt: skip
        stored = (meta.get("extra") or {}).get("vocab_size")
        if stored is not None and stored != c.vocab_size:
            audit.check("store vocabulary", FAIL, f"The store's target has {stored:,} tokens, the draft's {c.vocab_size:,}.")  # fmt: skip
    if figures is None:
        return
    tokens, supervised = figures.get("tokens"), figures.get("supervised_tokens")
    if tokens and supervised is not None:
        audit.check("supervised", supervised > 0, f"{supervised:,} of {tokens:,} tokens are supervised ({supervised / tokens:.1%}).")  # fmt: skip
    share = figures.get("self_check")
    if share is not None:
        state = OK if share >= SELF_CHECK else NOTE if share >= SELF_CHECK / 2 else FAIL
        audit.check("teacher self-check", state, f"The argmax of the stored final states is the next token at {share:.1%} of the teacher positions (greedy answers of this target: {SELF_CHECK:.0%} or more).")  # fmt: skip
    if figures.get("codec_error"):
        audit.check("codec", NOTE, f"The store's codec is lossy: relative error {figures['codec_error']:.2%}.")
    if longest := figures.get("longest"):
        reach = rope_range(c)
        audit.check("longest sample", longest <= reach, f"The longest sample has {longest:,} tokens, the draft's RoPE reaches {reach:,}.")  # fmt: skip


# ---- after training, and at export -------------------------------------------------------------------------------------


def audit_after(
    initial: Mapping[str, "torch.Tensor"],
    trained: Mapping[str, "torch.Tensor"],
    policy_frozen: Collection[str],
    exported: Path | None,
    target: Target,
    config: DraftConfig,
) -> Json:
    """Did training do what was agreed, and does the file hold it?

    initial, trained: state dicts by internal name; initial may leave out the embedding, which then is compared with
    the target's. exported: a folder that `serving.export` wrote, in any layout.
    """
    audit = _Audit("after", config, policy_frozen)
    audit.sources = {c: "the checkpoint, compared with the state before training" for c in audit.sizes}
    absent = {name: _Shaped(shape) for name, shape in all_shapes(config).items() if is_frozen(name, policy_frozen)}
    _check_shapes(audit, {**absent, **trained})  # type: ignore[dict-item]
    for name in ("d2t", "t2d"):
        if name in audit.sizes and name not in trained:
            audit.say(name, FAIL, f"{name} is missing from the checkpoint")
    for component, names in audit.tensors.items():
        _check_moved(audit, component, [n for n in names if n in trained], initial, trained, target)
    if exported is not None:
        _check_exported(audit, Path(exported), trained, target)
    return audit.result()


class _Shaped:
    """Stands for a frozen tensor, which a checkpoint need not hold."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape


def _check_moved(
    audit: _Audit,
    component: str,
    names: list[str],
    initial: Mapping[str, "torch.Tensor"],
    trained: Mapping[str, "torch.Tensor"],
    target: Target,
) -> None:
    import torch

    changes: dict[str, float] = {}
    for name in names:
        now, before = trained[name].detach().cpu(), initial.get(name)
        if not bool(torch.isfinite(now).all()):
            audit.say(component, FAIL, f"{name} holds NaN or infinities")
            continue
        if is_map(name) or is_frozen(name, audit.policy):
            origin = "before training"
            if before is None and name == f"{EMBEDDING}.weight" and (there := target.tensor_name("embedding")):
                before, origin = target.read_tensor(there), f"the target's {there}"
            if before is None:
                audit.say(component, OPEN, f"{name} was not kept from before training")
            elif same_bits(now, before):
                audit.say(component, OK, f"bitwise as {origin}")
            else:
                audit.say(component, FAIL, f"{name} is frozen but differs from {origin}")
            continue
        if before is None:
            audit.say(component, OPEN, f"{name} was not kept from before training")
            continue
        old = before.detach().cpu()
        if old.shape != now.shape:
            audit.say(component, FAIL, f"{name} was {list(old.shape)} before training and is {list(now.shape)}")
            continue
        changes[name] = relative_change(old, now)
        if "norm" in name:
            still = float((now == 1).float().mean())
            if still > 0.5:
                audit.say(component, FAIL, f"{name} still stands at exactly 1.0 in {still:.0%} of its entries, as norms trained in bf16 do")  # fmt: skip
    if stuck := [n for n, change in changes.items() if change == 0]:
        audit.say(component, FAIL, f"{_list(stuck)} did not move in training")
    if changes and not stuck:
        least, most = min(changes, key=changes.__getitem__), max(changes, key=changes.__getitem__)
        text = f"moved by {changes[most]:.2%}" if len(changes) == 1 else f"moved by {changes[least]:.2%} ({least}) to {changes[most]:.2%} ({most})"  # fmt: skip
        audit.say(component, OK, text)


def relative_change(before: "torch.Tensor", now: "torch.Tensor") -> float:
    """||now - before|| / ||before||, in float64; the absolute norm where before is all zeros."""
    import torch

    difference = torch.linalg.vector_norm(now.double() - before.double())
    size = torch.linalg.vector_norm(before.double())
    return float(difference / size) if size else float(difference)


def _check_exported(audit: _Audit, folder: Path, trained: Mapping[str, "torch.Tensor"], target: Target) -> None:
    from eyas.serving.export import load_draft

    try:
        config, state = load_draft(folder, target)
    except EyasError as error:
        audit.check("export", FAIL, f"The exported draft cannot be read: {error}")
        return
    served = ("hidden_size", "target_hidden_size", "vocab_size", "draft_vocab_size", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size", "aux_layers", "num_layers", "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "attention_bias", "qk_norm")  # fmt: skip
    differs = [name for name in served if getattr(config, name) != getattr(audit.config, name)]
    audit.check("export config", not differs, f"The exported config differs in {_list(differs)}." if differs else "The exported config says what was trained.")  # fmt: skip
    wanted = [name for name in trained if component_of(name) != TEACHER]
    missing = [name for name in wanted if name not in state]
    wrong = [n for n in wanted if n in state and not same_bits(state[n], trained[n])]
    if missing:
        audit.check("export tensors", FAIL, f"The exported draft in {folder} lacks {_list(missing)}.")
    if wrong:
        audit.check("export values", FAIL, f"The exported draft in {folder} differs from the checkpoint in {_list(wrong)}.")  # fmt: skip
    if not missing and not wrong:
        dtype = str(state["fc.weight"].dtype).removeprefix("torch.")
        audit.check("export values", OK, f"All {len(wanted)} exported tensors equal the checkpoint's, cast to {dtype}.")


# ---- showing -----------------------------------------------------------------------------------------------------------


def to_markdown(audit: Json) -> str:
    """The audit as a page: verdict, reasons, table, checks, conventions, estimates."""
    lines = [f"# Audit ({audit['stage']}): {audit['verdict'].upper()}", ""]
    lines += [f"- {reason}" for reason in audit["reasons"]] or ["Nothing stands against it."]
    if audit.get("accepted"):
        lines += ["", f"Accepted all the same: {audit['accepted']}"]
    lines += ["", "| component | parameters | state | source | check | detail |", "|---|--:|---|---|---|---|"]
    lines += [
        f"| `{c['name']}` | {c['params']:,} | {c['state']} | {_cell(c['source'])} | {c['check']} | {_cell(c['detail'])} |"
        for c in audit["components"]
    ]
    lines += ["", totals(audit), ""]
    if audit["checks"]:
        lines += ["## Checks", "", *[f"- {c['result']}: {c['detail']}" for c in audit["checks"]], ""]
    lines += ["## Policy", "", f"Frozen by the recipe: {', '.join(audit['policy']['frozen']) or 'nothing'}.", ""]
    for row in audit["policy"]["conventions"]:
        lines.append(f"- {row['name']}: {'; '.join(row['differs']) or 'the same'}")
    if audit["estimates"]:
        lines += ["", "## Estimates (upper bounds: every row supervised, every chain alive)", "", *[f"- {key.replace('_', ' ')}: {_figure(key, value)}" for key, value in audit["estimates"].items()]]  # fmt: skip
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _figure(key: str, value: Any) -> str:
    if "bytes" in key and value >= 1 << 20:
        return f"{value / (1 << 30):,.2f} GiB"
    if key.endswith("seconds"):
        return f"{value / 3600:,.2f} hours" if value >= 3600 else f"{value:,.1f} s"
    return f"{value:,.3g}" if isinstance(value, float) or value > 1e9 else f"{value:,}"


def totals(audit: Json) -> str:
    return (
        f"{audit['trained_params']:,} parameters trained, {audit['frozen_params']:,} frozen, "
        f"{audit['total_params']:,} in all ({audit['trained_share']:.1%} trained)."
    )


def table(audit: Json) -> "RenderableType":
    """The audit for a terminal."""
    from rich.box import SIMPLE
    from rich.console import Group
    from rich.markup import escape
    from rich.table import Table
    from rich.text import Text

    grid = Table(title="Audit", title_justify="left", box=SIMPLE, padding=(0, 1))
    for name, options in {"component": {"no_wrap": True}, "parameters": {"no_wrap": True, "justify": "right"}, "state": {"no_wrap": True}, "source": {"overflow": "fold"}, "check": {"no_wrap": True}, "detail": {"overflow": "fold"}}.items():  # fmt: skip
        grid.add_column(name, **options)  # type: ignore[arg-type]
    colours = {OK: "green", FAIL: "red", OPEN: "dim"}
    for c in audit["components"]:
        colour = colours[c["check"]]
        grid.add_row(c["name"], f"{c['params']:,}", c["state"], escape(c["source"]), f"[{colour}]{c['check']}[/]", escape(c["detail"]))  # fmt: skip
    verdict = Text(audit["verdict"].upper(), style="bold green" if audit["verdict"] == "go" else "bold red")
    reasons = [Text(f"- {reason}") for reason in audit["reasons"]]
    notes = [Text(f"note: {note}", style="dim") for note in audit["notes"]]
    return Group(grid, Text(totals(audit)), verdict, *reasons, *notes)
