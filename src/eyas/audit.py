"""The audit: what is frozen, what is trained, where every value comes from, and whether that is so. GO or NO-GO.

Three moments: from configs alone (`audit_config`, no torch), with weights before training (`audit_before`), and after
training or export (`audit_after`). Each returns the same JSON: components, totals, verdict, reasons, and beyond that
`checks` (the findings that belong to no single component), `notes`, `policy`, `estimates` and `stage`.
"""

import itertools
import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eyas.draft.config import DraftConfig, draft_config_for
from eyas.errors import EyasError, first_line, listing
from eyas.files import read_json
from eyas.serving.names import draft_config_from, expected_shapes
from eyas.target import Target

if TYPE_CHECKING:
    import torch
    from rich.console import RenderableType

    from eyas.draft.model import Draft

Json = dict[str, Any]
Tensors = Mapping[str, "torch.Tensor"]
Faults = dict[str, Callable[[str], bool]]  # words -> whether the tensor of that name has the fault
OK, FAIL, OPEN, NOTE = "ok", "fail", "not checked", "note"
TEACHER, HEAD, EMBEDDING = "verifier_lm_head", "lm_head", "embed_tokens"
MAPS = ("d2t", "t2d")
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


def _names(entry: str, tensor: str) -> bool:
    """Whether an entry of the policy is a tensor, its component, or a prefix of it."""
    return entry in (tensor, component_of(tensor)) or tensor.startswith(entry + ".")


def is_frozen(tensor: str, policy: Collection[str]) -> bool:
    """Whether the policy freezes a tensor. The teacher always is frozen."""
    return component_of(tensor) == TEACHER or any(_names(entry, tensor) for entry in policy)


def config_for_audit(target: Target, draft_config: str | Path | None = None) -> DraftConfig:
    """The draft to audit: from `draft_config`, else from draft_config.json beside the target, else EAGLE-3's own."""
    file = Path(draft_config) if draft_config else target.path / "draft_config.json"
    if draft_config or file.exists():
        return draft_config_from(read_json(file), target)
    return draft_config_for(target, min(32_000, target.vocab_size))


def all_shapes(config: DraftConfig) -> dict[str, tuple[int, ...]]:
    """`expected_shapes` and the teacher's head [Vd, H], in the order in which the draft computes."""
    shapes = expected_shapes(config) | {f"{TEACHER}.weight": (config.draft_vocab_size, config.target_hidden_size)}
    order = (EMBEDDING, TEACHER, "fc_norm", "input_norm", "fc", "layers", "norm", HEAD, *MAPS)
    return {name: shapes[name] for name in sorted(shapes, key=lambda name: order.index(name.split(".")[0]))}


class _Audit:
    """Collects findings; `result` turns them into the contract's JSON. Failures become the reasons of a NO-GO."""

    def __init__(self, stage: str, config: DraftConfig, policy: Collection[str]) -> None:
        self.stage, self.config, self.policy = stage, config, set(policy)
        self.shapes = all_shapes(config)
        self.tensors: dict[str, list[str]] = {}
        for name in self.shapes:
            self.tensors.setdefault(component_of(name), []).append(name)
        self.found: dict[str, list[tuple[str, str]]] = {component: [] for component in self.tensors}
        self.sources = dict.fromkeys(self.tensors, "not said")
        self.checks: list[Json] = []
        self.estimates: Json = {}
        for entry in sorted(self.policy):
            if not any(_names(entry, name) for name in self.shapes):
                self.check("policy", FAIL, f"The recipe freezes {entry!r}, which no tensor of this draft is called.")

    def say(self, component: str, result: str | bool, detail: str) -> None:
        """A finding about one component; True and False mean ok and fail. No full stop: it ends in the table."""
        self.found[component].append((_state(result), detail))

    def blame(self, component: str, names: Iterable[str], faults: Faults) -> bool:
        """Say of each fault which of the tensors have it, in the place of {}; whether there was any."""
        found = {text: [name for name in names if wrong(name)] for text, wrong in faults.items()}
        for text, bad in found.items():
            if bad:
                self.say(component, FAIL, text.format(listing(bad)))
        return any(found.values())

    def check(self, name: str, result: str | bool, detail: str) -> None:
        """A finding beside the table, a whole sentence."""
        self.checks.append({"name": name, "result": _state(result), "detail": detail})

    def frozen(self, tensor: str) -> bool:
        """Whether training must leave it alone: the policy freezes it, or it is a map."""
        return tensor in MAPS or is_frozen(tensor, self.policy)

    def parts(self, tensors: Tensors) -> Iterator[tuple[str, list[str]]]:
        """Component -> those of its tensors that are there, for components that have any."""
        for component, names in self.tensors.items():
            if there := [name for name in names if name in tensors]:
                yield component, there

    def count(self, names: Iterable[str]) -> int:
        """Parameters of these tensors; maps have none."""
        return sum(math.prod(self.shapes[name]) for name in names if name not in MAPS)

    @property
    def trained_params(self) -> int:
        return self.count(name for name in self.shapes if not self.frozen(name))

    def state(self, component: str) -> str:
        if component in MAPS:
            return "buffer"
        return "frozen" if all(map(self.frozen, self.tensors[component])) else "trained"

    def result(self) -> Json:
        components, reasons = [], []
        for component, names in self.tensors.items():
            by_result: dict[str, list[str]] = {}
            for result, detail in self.found[component]:
                by_result.setdefault(result, []).append(detail)
            check = next((result for result in (FAIL, OK) if result in by_result), OPEN)
            reasons += [f"{component}: {detail}." for detail in by_result.get(FAIL, [])]
            row = {"name": component, "params": self.count(names), "state": self.state(component)}
            row |= {"source": self.sources[component], "check": check, "detail": "; ".join(by_result.get(check, []))}
            components.append(row)
        reasons += [check["detail"] for check in self.checks if check["result"] == FAIL]
        total, trained = self.count(self.shapes), self.trained_params
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
        frozen = {c for c in self.tensors if c != TEACHER and self.state(c) == "frozen"}
        first = self.sources[HEAD].replace(",", "").split()  # "target ROWS", "random", or another origin of the head
        start = {"target": "the target's rows", "random": "random"}.get(first[0]) if "or" not in first else None
        rows = []
        for name, (theirs, head) in CONVENTIONS.items():
            differs = [f"freezes {c}, this recipe trains it" for c in sorted(theirs - frozen)]
            differs += [f"trains {c}, this recipe freezes it" for c in sorted(frozen - theirs)]
            if start and start != head:
                differs.append(f"begins lm_head from {head}, this recipe from {start}")
            rows.append({"name": name, "frozen": sorted(theirs), "differs": differs})
        return rows


def _state(result: str | bool) -> str:
    return result if isinstance(result, str) else OK if result else FAIL


# ---- from configs alone ----------------------------------------------------------------------------------------------


def audit_config(target: Target, config: DraftConfig, *, frozen: Collection[str] = frozenset({EMBEDDING})) -> Json:
    """The audit that needs no weights: sizes, policy (`frozen` names components or tensors), what must agree between
    target and draft, estimates."""
    audit = _Audit("config", config, frozen)
    embedding = target.tensor_name("embedding") or "input embedding"
    head = target.tensor_name("head") or "output head"
    rows = "rows of the draft vocabulary" if config.draft_vocab_size < config.vocab_size else "all rows"
    wide = config.hidden_size == config.target_hidden_size
    known = {
        EMBEDDING: f"copied from target {embedding}" if wide else "of its own, random",
        TEACHER: f"target {head}, {rows}",
        HEAD: f"target {head}, {rows}, or random" if wide else "random",
    } | dict.fromkeys(MAPS, "vocabulary map")
    for component, names in audit.tensors.items():
        audit.sources[component] = known.get(component, "ones" if "norm" in component else "random")
        shapes = [f"{name.removesuffix('.weight')} {list(audit.shapes[name])}" for name in names]
        audit.say(component, OPEN, ", ".join(shapes) if len(shapes) < 4 else f"{len(shapes)} tensors")
    _config_checks(audit, target)
    audit.estimates = _estimate(audit)
    return audit.result()


def _config_checks(audit: _Audit, target: Target) -> None:
    c = audit.config
    for name, mine, theirs in (
        ("vocabulary", c.vocab_size, target.vocab_size),
        ("target hidden size", c.target_hidden_size, target.hidden_size),
        ("target layers", c.target_num_layers, target.num_layers),
    ):
        audit.check(name, mine == theirs, f"The draft's config has {name} {mine:,}, the target {theirs:,}.")
    audit.check("fc", OK, f"fc reads {c.fc_in:,} inputs, the target's states from out{c.aux_layers}.")
    reach = rope_range(c)
    text = f"RoPE of the draft reaches {reach:,} positions, the target's context {target.max_positions:,}."
    audit.check("context", OK if reach >= target.max_positions else NOTE, text)
    frozen, wide = audit.frozen(f"{EMBEDDING}.weight"), c.hidden_size == c.target_hidden_size
    if frozen and not wide:
        text = f"frozen, but {c.hidden_size} wide, the target's {c.target_hidden_size}"
        audit.say(EMBEDDING, FAIL, f"{text}, so random numbers would be frozen; train it")
    if wide and not frozen:
        text = "SGLang, OpenVINO and TensorRT-LLM put the target's in its place whatever the file holds."
        audit.check("embedding policy", NOTE, f"The recipe trains embed_tokens; {text}")


def rope_range(config: DraftConfig) -> int:
    """Positions that the draft's RoPE is meant for."""
    rope = config.rope_parameters
    original = rope.get("original_max_position_embeddings")
    if rope.get("rope_type") in ("yarn", "llama3", "longrope") and original and rope.get("factor"):
        return max(config.max_position_embeddings, int(original * rope["factor"]))
    return config.max_position_embeddings


def _estimate(audit: _Audit, plan: Json | None = None) -> Json:
    """Bytes and work of training, by arithmetic. An upper bound: every row supervised, every chain alive for K steps.

    plan: tokens of the store, epochs, steps (K), batch_tokens and the seconds that such a batch takes, all optional.
    Weights: float32 masters with a bf16 cast of matrices, bf16 embedding and teacher. Optimizer: two float32 moments.
    Activations: bf16 rows kept for the backward pass, logits of a chunk of 512 rows and the teacher's kept logits.
    """
    c, trained, plan = audit.config, audit.trained_params, plan or {}
    steps, batch_tokens = plan.get("steps", 7), plan.get("batch_tokens", 4096)
    heads, key_value = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    row = c.num_layers * (8 * c.hidden_size + 2 * heads + 2 * key_value + 3 * c.intermediate_size) + c.hidden_size
    logits = 512 * c.draft_vocab_size * 16 + min(512 << 20, batch_tokens * c.draft_vocab_size * 2)
    layers = audit.count(name for name in audit.shapes if name.startswith("layers."))
    fusing, head = c.fc_in * c.hidden_size, c.hidden_size * c.draft_vocab_size
    store = 2 * c.target_hidden_size * (len(c.aux_layers) + 1)
    found: Json = {
        "weights_bytes": 6 * trained + 2 * (audit.count(audit.shapes) - trained),
        "gradients_bytes": 4 * trained,
        "optimizer_bytes": 8 * trained,
        "activations_bytes": 2 * batch_tokens * (c.fc_in + steps * row) + logits,
        "store_bytes_per_token": store,
        "flops_per_token": 6 * fusing + steps * 6 * (layers + head) + 2 * audit.count(audit.tensors[TEACHER]),
        "batch_tokens": batch_tokens,
        "steps": steps,
    }
    if tokens := plan.get("tokens"):
        found |= {"tokens": tokens, "epochs": plan.get("epochs", 1), "store_bytes": store * tokens}
        if seconds := plan.get("seconds_per_batch"):
            found["train_seconds"] = seconds * tokens * found["epochs"] / batch_tokens
    return found


# ---- before training, with weights -----------------------------------------------------------------------------------


def audit_before(
    target: Target,
    draft: "Draft",
    *,
    teacher_head: "torch.Tensor",
    optimizer: Any,
    sources: Mapping[str, str],
    store_meta: Mapping[str, Any],
    store_figures: Mapping[str, Any],
    vocab: Mapping[str, Any],
    policy_frozen: Collection[str],
    dry_step: Callable[[], Any] | None,
    plan: Json | None = None,
) -> Json:
    """The audit of a draft that is about to train.

    teacher_head [Vd, H]: what will teach, in any float dtype. optimizer: one torch optimizer or several.
    sources: component -> where its values come from ("target NAME", "random …", "checkpoint PATH").
    store_meta: Store.meta. store_figures: those of its manifest, and "longest" (tokens of the longest sample).
    vocab: what vocab.json holds, "always" (ids that must be in: special and end tokens) and "d2t" (int64 [Vd], the map
    of the vocabulary stage). dry_step: runs one batch forward and backward into `.grad` and returns the loss; gradients
    are cleared afterwards. plan: epochs, steps (K) and batch_tokens (of the dry step too), for the estimates.
    """
    audit = _Audit("before", draft.config, policy_frozen)
    audit.sources |= {component: sources[component] for component in audit.tensors if component in sources}
    parameters = dict(draft.named_parameters(remove_duplicate=False))
    tensors = parameters | {f"{TEACHER}.weight": teacher_head}
    maps = {name: value for name, value in zip(MAPS, (draft.d2t, draft.t2d), strict=True) if value is not None}
    groups = [g for one in (optimizer if isinstance(optimizer, list) else [optimizer]) for g in one.param_groups]
    plan = {"tokens": store_figures["tokens"], **(plan or {})}
    _config_checks(audit, target)
    _check_shapes(audit, tensors | maps)
    _check_memory(audit, tensors)
    _check_vocabulary(audit, vocab)
    if len(maps) == 2:
        _check_map(audit, maps["d2t"].cpu().long(), maps["t2d"].cpu().bool(), target, vocab)
    _check_origins(audit, target, tensors, maps.get("t2d"))
    _check_training(audit, parameters, groups)
    if dry_step:
        plan["seconds_per_batch"] = _check_dry_step(audit, parameters, dry_step, plan.get("steps", 7))
    _check_store(audit, target, store_meta, store_figures)
    audit.estimates = _estimate(audit, plan)
    return audit.result()


def _check_shapes(audit: _Audit, found: Tensors, absent: Collection[str] = ()) -> None:
    for name, shape in audit.shapes.items():
        if name in found and tuple(found[name].shape) != shape:
            audit.say(component_of(name), FAIL, f"{name} is {list(found[name].shape)}, its config says {list(shape)}")
        elif name not in found and name not in absent:
            audit.say(component_of(name), FAIL, f"{name} is missing from the draft")
    if unknown := sorted(found.keys() - audit.shapes.keys()):
        audit.check("tensors", FAIL, f"The draft has parameters that its config does not know: {listing(unknown)}.")


def _check_memory(audit: _Audit, tensors: Tensors) -> None:
    """No two tensors may lie in the same memory: training one would move the other."""
    spans = sorted((str(t.device), t.data_ptr(), name) for name, t in tensors.items() if t.numel())
    for (device, start, first), (other, behind, second) in itertools.pairwise(spans):
        if device == other and behind < start + tensors[first].nbytes:
            audit.say(component_of(second), FAIL, f"{first} and {second} share memory: training one moves the other")


def _check_vocabulary(audit: _Audit, vocab: Mapping[str, Any]) -> None:
    if (coverage := vocab.get("coverage")) is not None:
        ceiling, size = vocab.get("tau_ceiling"), audit.config.draft_vocab_size
        limit = f"; even a perfect draft reaches tau {ceiling:.2f} at most" if ceiling is not None else ""
        text = f"{1 - coverage:.2%} of the supervised tokens are outside the draft vocabulary of {size:,}{limit}."
        audit.check("out of vocabulary", OK if coverage >= 0.95 else NOTE, text)
    if unseen := vocab.get("untrained_rows"):
        audit.check("unseen rows", NOTE, f"{unseen:,} tokens of the draft vocabulary were never supervised.")


def _check_map(
    audit: _Audit, d2t: "torch.Tensor", inside: "torch.Tensor", target: Target, vocab: Mapping[str, Any]
) -> None:
    """d2t int64 [Vd] offsets, inside bool [V]."""
    import torch

    where = d2t + torch.arange(len(d2t))
    low, high = int(where.min()), int(where.max())
    ascending, within = bool((where.diff() > 0).all()), 0 <= low <= high < len(inside)
    if not ascending:
        audit.say("d2t", FAIL, "i + d2t[i] is not strictly increasing; d2t must hold offsets, not target ids")
    if not within:
        audit.say("d2t", FAIL, f"i + d2t[i] reaches {low:,} to {high:,}, outside the vocabulary of {len(inside):,}")
    if ascending and within:
        same = torch.equal(torch.nonzero(inside).flatten(), where)
        audit.say("d2t", OK, f"int64 offsets, {len(d2t):,} target ids in ascending order")
        audit.say("t2d", same, f"names {'the same' if same else 'other'} tokens {'as' if same else 'than'} d2t")
    known = vocab.get("d2t")
    if known is not None and not torch.equal(torch.as_tensor(known).long(), d2t):
        audit.say("d2t", FAIL, "it is not the map of the vocabulary stage")
    elif known is None and not bool(d2t.any()):
        audit.say("d2t", FAIL, f"it names ids 0 to {len(d2t) - 1:,}, as a map that was never filled does")
    needed = {int(i) for i in vocab.get("always", ())} | set(target.eos_ids)
    absent = sorted(i for i in needed if not 0 <= i < len(inside) or not inside[i])
    if ends := [str(i) for i in absent if i in target.eos_ids]:
        audit.say("t2d", FAIL, f"the end token {listing(ends)} is not in it, so the draft can never end an answer")
    if others := [str(i) for i in absent if i not in target.eos_ids]:
        audit.say("t2d", FAIL, f"special tokens {listing(others)} are not in it")
    if needed and not absent:
        audit.say("t2d", OK, f"all {len(needed)} special and end tokens are in")


def _check_origins(audit: _Audit, target: Target, tensors: Tensors, t2d: "torch.Tensor | None") -> None:
    """Embedding, teacher and head against the target's own values."""
    embedding, head = target.tensor_name("embedding"), target.tensor_name("head")
    if embedding is None or head is None:
        audit.check("target weights", NOTE, f"{target.path} holds no embedding or head to compare with.")
        return
    rows, words = target.read_tensor(head), f"the target's {head}"
    if t2d is not None and len(t2d) != len(rows):
        audit.say(TEACHER, FAIL, f"{words} has {len(rows):,} rows, t2d {len(t2d):,}")
        return
    if t2d is not None:
        rows, words = rows[t2d.cpu().bool()], f"the rows named by t2d of {words}"
    wanted = {TEACHER: (rows, words)}
    if audit.config.hidden_size == audit.config.target_hidden_size:
        wanted |= {EMBEDDING: (target.read_tensor(embedding), f"the target's {embedding}"), HEAD: (rows, words)}
    for component, (values, words) in wanted.items():
        source = audit.sources[component]
        if same_bits(tensors[f"{component}.weight"], values):
            audit.say(component, OK, f"bitwise equal to {words}")
        elif audit.frozen(f"{component}.weight") and not source.startswith("checkpoint"):
            audit.say(component, FAIL, f"frozen, but not {words}: wrong or random numbers would stay for ever")
        elif source.startswith("target"):
            audit.say(component, FAIL, f"said to be {words}, but differs")


def same_bits(mine: "torch.Tensor", theirs: "torch.Tensor", rows: int = 16_384) -> bool:
    """Bitwise equality after casting `theirs` to the dtype of `mine`, a block of rows at a time."""
    import torch

    if mine.shape != theirs.shape:
        return False
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[mine.element_size()]
    return all(
        torch.equal(a.cpu().contiguous().view(words), b.cpu().to(a.dtype).contiguous().view(words))
        for a, b in zip(mine.detach().split(rows), theirs.detach().split(rows), strict=True)
    )


def _check_training(audit: _Audit, parameters: Tensors, groups: list[Json]) -> None:
    """What the optimizer's groups hold must be what the recipe trains, in a dtype that can train it."""
    import torch

    held = Counter(id(parameter) for group in groups for parameter in group["params"])
    counts = {name: held[id(parameter)] for name, parameter in parameters.items()}
    grad = {name: parameter.requires_grad for name, parameter in parameters.items()}
    frozen = audit.frozen
    faults: Faults = {
        "{} holds NaN or infinities": lambda n: not bool(torch.isfinite(parameters[n].detach()).all()),
        "{} would be trained (requires_grad), the recipe freezes it": lambda n: frozen(n) and grad[n],
        "{} is frozen (requires_grad is off), the recipe trains it": lambda n: not frozen(n) and not grad[n],
        "{} should be trained but is in no optimizer group": lambda n: not frozen(n) and not counts[n],
        "{} is in the optimizer more than once": lambda n: counts[n] > 1,
        "{} is frozen but in the optimizer": lambda n: frozen(n) and counts[n] > 0,
    }
    rate = max((group["lr"] for group in groups if group["lr"]), default=1e-3)
    for component, names in audit.parts(parameters):
        if not audit.blame(component, names, faults) and audit.state(component) == "trained":
            audit.say(component, OK, "in the optimizer once")
        narrow = [n for n in names if grad[n] and parameters[n].dtype not in (torch.float32, torch.float64)]
        if narrow:
            dtype = parameters[narrow[-1]].dtype
            text = f"{listing(narrow)} trains in {str(dtype).removeprefix('torch.')}; use float32 masters"
            if "norm" in component and float(torch.tensor(1.0, dtype=dtype) - rate) == 1.0:
                text += f" (a norm at 1.0 cannot move: an update of {rate:g} is rounded away)"
            audit.say(component, FAIL, text)


def _check_dry_step(audit: _Audit, parameters: Tensors, dry_step: Callable[[], Any], steps: int) -> float | None:
    """Run one batch, look at every gradient, clear them. Returns the seconds it took, None where it failed."""
    import torch

    start = time.monotonic()
    try:
        loss = float(dry_step())
    except RuntimeError as error:  # autograd's own refusals, such as a graph in which nothing requires a gradient
        audit.check("dry step", FAIL, f"The one-batch dry step failed: {first_line(error)}.")
        return None
    seconds = time.monotonic() - start
    fine = math.isfinite(loss)
    text = f"One batch went forward and backward, loss {loss:.4f}." if fine else f"The loss of the dry step is {loss}."
    audit.check("dry step", fine, text)
    if fine and loss > (uniform := steps * math.log(audit.config.draft_vocab_size)):
        text = f"The first loss, {loss:.1f}, is worse than a uniform guess ({uniform:.1f} at most)"
        audit.check("first loss", NOTE, f"{text}: are the states of the size that the head expects?")
    frozen, grads = audit.frozen, {name: parameter.grad for name, parameter in parameters.items()}
    seen = {name for name, grad in grads.items() if grad is not None and bool(grad.any())}
    broken = {name for name, grad in grads.items() if grad is not None and not bool(torch.isfinite(grad).all())}
    faults: Faults = {
        "the gradient of {} holds NaN or infinities": lambda n: n in broken,
        "{} got no gradient in the dry step": lambda n: not frozen(n) and n not in seen,
        "{} is frozen but got a gradient in the dry step": lambda n: frozen(n) and grads[n] is not None,
    }
    for component, names in audit.parts(parameters):
        if not audit.blame(component, names, faults):
            trained = audit.state(component) == "trained"
            audit.say(component, OK, "every tensor got a gradient" if trained else "got no gradient")
    for parameter in parameters.values():
        parameter.grad = None
    return seconds


def _check_store(audit: _Audit, target: Target, meta: Mapping[str, Any], figures: Mapping[str, Any]) -> None:
    c, check = audit.config, audit.check
    layers, width = tuple(meta["layers"]), int(meta["hidden_size"])
    text = f"The store holds the layers out{layers}, the draft reads out{c.aux_layers}."
    check("store layers", layers == c.aux_layers, text)
    text = f"fc reads {c.fc_in:,} inputs, the store gives {len(layers)} x {width:,}."
    check("fc width", len(layers) * width == c.fc_in, text)
    for key in ("config", "weights", "tokenizer", "chat_template"):
        same, word = meta["target"].get(key) == target.fingerprints[key], key.replace("_", " ")
        text = f"The store was extracted with {'the same' if same else 'another'} {word} of the target."
        check(f"store {word}", same, text)
    tokens, supervised = figures["tokens"], figures["supervised_tokens"]
    text = f"{supervised:,} of {tokens:,} tokens are supervised ({supervised / max(tokens, 1):.1%})."
    check("supervised", supervised > 0, text)
    if (hits := figures.get("self_check")) is not None:
        state = OK if hits >= SELF_CHECK else NOTE if hits >= SELF_CHECK / 2 else FAIL
        text = f"The argmax of the stored final states is the next token at {hits:.1%} of the teacher positions"
        check("teacher self-check", state, f"{text} (greedy answers of this target: {SELF_CHECK:.0%} or more).")
    if error := figures.get("codec_error"):
        check("codec", NOTE, f"The store's codec is lossy: relative error {error:.2%}.")
    longest, reach = figures.get("longest", 0), rope_range(c)
    text = f"The longest sample has {longest:,} tokens, the draft's RoPE reaches {reach:,}."
    check("longest sample", longest <= reach, text)


# ---- after training, and at export -----------------------------------------------------------------------------------


def audit_after(
    initial: Tensors,
    trained: Tensors,
    policy_frozen: Collection[str],
    exported: Path | None,
    target: Target,
    config: DraftConfig,
) -> Json:
    """Did training do what was agreed, and does the file hold it?

    initial, trained: state dicts by internal name; trained may leave out what is frozen, initial the embedding, which
    then is compared with the target's. exported: a folder that `serving.export` wrote, in any layout.
    """
    audit = _Audit("after", config, policy_frozen)
    audit.sources = dict.fromkeys(audit.tensors, "the checkpoint, compared with the state before training")
    _check_shapes(audit, trained, absent=[name for name in audit.shapes if is_frozen(name, audit.policy)])
    embedding, name = f"{EMBEDDING}.weight", target.tensor_name("embedding")
    if embedding not in initial and name:
        _check_moved(audit, {embedding: target.read_tensor(name)}, trained, f"the target's {name}")
    _check_moved(audit, initial, trained, "before training")
    if exported is not None:
        _check_exported(audit, Path(exported), trained, target)
    return audit.result()


def _check_moved(audit: _Audit, before: Tensors, now: Tensors, origin: str) -> None:
    """Every tensor that both hold: frozen ones to the bit, trained ones moved."""
    import torch

    frozen = audit.frozen
    changes = {name: relative_change(before[name], now[name]) for name in before if name in now and not frozen(name)}
    faults: Faults = {
        "{} holds NaN or infinities": lambda n: not bool(torch.isfinite(now[n]).all()),
        f"{{}} is frozen but differs from {origin}": lambda n: frozen(n) and not same_bits(now[n], before[n]),
        "{} did not move in training": lambda n: changes.get(n) == 0,
        "{} still stands at exactly 1.0 in most of its entries, as norms trained in bf16 do": lambda n: (
            n in changes and "norm" in n and float((now[n] == 1).float().mean()) > 0.5
        ),
    }
    for component, names in audit.parts({name: now[name] for name in before if name in now}):
        moved = sorted((changes[name], name) for name in names if name in changes)
        if audit.blame(component, names, faults):
            continue
        text = f"bitwise as {origin}" if not moved else f"moved by {moved[-1][0]:.2%}"
        if len(moved) > 1:
            text = "moved by " + " to ".join(f"{change:.2%} ({name})" for change, name in (moved[0], moved[-1]))
        audit.say(component, OK, text)


def relative_change(before: "torch.Tensor", now: "torch.Tensor") -> float:
    """||now - before|| / ||before||, in float64; the absolute norm where before is all zeros."""
    import torch

    before, now = before.detach().cpu().double(), now.detach().cpu().double()
    difference, size = torch.linalg.vector_norm(now - before), torch.linalg.vector_norm(before)
    return float(difference / size) if size else float(difference)


def _check_exported(audit: _Audit, folder: Path, trained: Tensors, target: Target) -> None:
    from eyas.serving.export import load_draft

    try:
        config, state = load_draft(folder, target)
    except EyasError as error:
        audit.check("export", FAIL, f"The exported draft cannot be read: {error}")
        return
    ours, theirs = _as_written(audit.config), _as_written(config)
    differs = [name for name in ours if ours[name] != theirs[name]]
    text = f"differs in {listing(differs)}." if differs else "says what was trained."
    audit.check("export config", not differs, f"The exported config {text}")
    wanted = [name for name in trained if component_of(name) != TEACHER]
    wrong = [name for name in wanted if name not in state or not same_bits(state[name], trained[name])]
    dtype = str(state["fc.weight"].dtype).removeprefix("torch.")
    text = f"All {len(wanted)} exported tensors equal the checkpoint's, cast to {dtype}."
    if wrong:
        text = f"The exported draft in {folder} differs from the checkpoint in {listing(wrong)}."
    audit.check("export values", not wrong, text)


def _as_written(config: DraftConfig) -> Json:
    """What a file must say of a draft: all but the split of a multimodal RoPE, which a draft has no use for."""
    rope = {k: v for k, v in config.rope_parameters.items() if not k.startswith("mrope") and v != "mrope"}
    return asdict(config) | {"rope_parameters": {"rope_type": "default"} | rope}


# ---- showing ---------------------------------------------------------------------------------------------------------


def to_markdown(audit: Json) -> str:
    """The audit as a page: verdict, reasons, table, checks, conventions, estimates."""
    from eyas.report.words import label, value

    lines = [f"# Audit ({audit['stage']}): {audit['verdict'].upper()}", ""]
    lines += [f"- {reason}" for reason in audit["reasons"]] or ["Nothing stands against it."]
    if audit.get("accepted"):
        lines += ["", f"Accepted all the same: {audit['accepted']}"]
    lines += ["", "| component | parameters | state | source | check | detail |", "|---|--:|---|---|---|---|"]
    for c in audit["components"]:
        cells = (f"`{c['name']}`", f"{c['params']:,}", c["state"], c["source"], c["check"], c["detail"])
        lines.append(f"| {' | '.join(map(_cell, cells))} |")
    total, trained, frozen = (audit[f"{name}_params"] for name in ("total", "trained", "frozen"))
    share = f"{total:,} in all ({audit['trained_share']:.1%} trained)."
    lines += ["", f"{trained:,} parameters trained, {frozen:,} frozen, {share}", ""]
    if audit["checks"]:
        lines += ["## Checks", "", *[f"- {c['result']}: {c['detail']}" for c in audit["checks"]], ""]
    lines += ["## Policy", "", f"Frozen by the recipe: {', '.join(audit['policy']['frozen']) or 'nothing'}.", ""]
    for row in audit["policy"]["conventions"]:
        lines.append(f"- {row['name']}: {'; '.join(row['differs']) or 'the same'}")
    if audit["estimates"]:
        lines += ["", "## Estimates (upper bounds: every row supervised, every chain alive)", ""]
        lines += [f"- {label(key)}: {value(key, found)}" for key, found in audit["estimates"].items()]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def table(audit: Json) -> "RenderableType":
    """The same for a terminal."""
    from rich.markdown import Markdown

    return Markdown(to_markdown(audit))
