"""Know before you deploy what each engine will do with a draft folder. Headers, config and numpy only: no torch.

`check` finds conditions once and asks the contract's table what each engine does about each of them.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from eyas.draft.config import LATENT, DraftConfig, rope_parameters
from eyas.errors import UsageError, listing
from eyas.files import inside
from eyas.serving import contract, names
from eyas.serving.contract import DROPS, EFFECTS, ENGINES, FLAGSHIP, RAISES, Engine, Json
from eyas.serving.tensors import FLOATS, StoredTensor, read_file, read_folder
from eyas.target import Target, read_target

_DEFAULTS = {"hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32, "vocab_size": 32000}
_ANOTHER = {"target_hidden_size": "hidden_size", "num_key_value_heads": "num_attention_heads"}
_NOT_NULL = (
    "use_cache", "rope_theta", "target_hidden_size", "hidden_size", "vocab_size", "intermediate_size",
    "num_attention_heads", "num_hidden_layers", "rms_norm_eps", "max_position_embeddings",
)  # fmt: skip
_SIZES = (
    "vocab_size", "hidden_size", "target_hidden_size", "intermediate_size", "num_attention_heads",
    "num_key_value_heads", "head_dim",
)  # fmt: skip
_WRAPPERS = (
    "_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "module.", "base_model.", "draft_model.",
    "eagle_module.",
)  # fmt: skip
_HARMLESS = ("rotary_emb.", "inv_freq", "verifier_", "mask_hidden")
_SEVERITIES = ("error", "warn", "info")
Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Hit:
    """A condition found in a draft. `key` finds the effects in the contract; the part before ':' is the rule's name."""

    key: str
    found: str
    fix: str | None = None
    tensors: tuple[str, ...] = ()
    severity: str | None = None  # overrides the contract's
    happens: str | None = None


@dataclass
class Draft:
    """What the folder says, before anybody interprets it."""

    folder: Path
    raw: Json
    tensors: dict[str, StoredTensor]
    eyas: Json = field(default_factory=dict)

    @cached_property
    def config(self) -> Json:
        return names.flatten(self.raw)

    @cached_property
    def internal(self) -> dict[str, StoredTensor]:
        """Tensors by internal name, whatever layout or wrapper they are stored under."""
        return {names.from_any(name): tensor for name, tensor in self.tensors.items()}

    def stored(self, *ends: str) -> tuple[str, ...]:
        """Stored names of the tensors whose internal name ends so."""
        return tuple(tensor.name for name, tensor in self.internal.items() if name.endswith(ends))

    def size(self, name: str) -> int:
        """A size as LlamaConfig reads it: its own default when the key is absent or null."""
        value = self.config.get(name)
        if value is not None:
            return int(value)
        if name == "num_hidden_layers":
            return self.layers_stored or 1
        if name == "head_dim":
            return self.size("hidden_size") // max(1, self.size("num_attention_heads"))
        return self.size(_ANOTHER[name]) if name in _ANOTHER else _DEFAULTS.get(name, 0)

    @property
    def draft_vocab(self) -> int:
        value = self.config.get("draft_vocab_size")
        return int(value) if value is not None else self.size("vocab_size")

    @property
    def head_rows(self) -> int:
        head = self.internal.get("lm_head.weight")
        return head.shape[0] if head is not None and head.shape else self.draft_vocab

    @cached_property
    def layers_stored(self) -> int:
        numbers = [name.split(".")[1] for name in self.internal if name.startswith("layers.")]
        return max((int(number) for number in numbers if number.isdigit()), default=-1) + 1

    @property
    def architecture(self) -> str:
        value = self.raw.get("architectures")
        return str(value[0]) if isinstance(value, list) and value else ""

    @property
    def mla(self) -> bool:
        return bool(self.config.get("kv_lora_rank")) or any("kv_a_proj" in name for name in self.internal)

    @property
    def num_aux(self) -> int:
        """Auxiliary layers that fc was made for, by its width."""
        fc, width = self.internal.get("fc.weight"), self.size("target_hidden_size")
        return fc.shape[1] // width if fc is not None and len(fc.shape) == 2 and width else 3

    @cached_property
    def map(self) -> np.ndarray | None:
        """d2t as int64, or None when absent."""
        tensor = self.internal.get("d2t")
        if tensor is None:
            return None
        values = tensor.floats() if tensor.dtype in FLOATS else tensor.read()
        return values.astype(np.int64).reshape(-1)


def check(draft: str | Path, target: str | Path | Target | None, engines: list[str]) -> Json:
    """The serving contract of a draft folder, per engine (the JSON contract `check`).

    `engines`: names of contract.ENGINES, or ["all"]. Findings also carry "outcome": what the engine will do in a word.
    Raises UsageError only for a wrong argument; every fault of the draft is a finding.
    """
    if "all" in engines:
        engines = list(contract.ALL)
    if unknown := [name for name in engines if name not in ENGINES]:
        raise UsageError(f"engine {unknown[0]!r}: expected one of {', '.join(ENGINES)} or all.")
    folder = Path(draft)
    if not folder.is_dir():
        raise UsageError(f"{folder}: no such folder. Expected a draft: config.json and weights.")
    known = target if isinstance(target, Target) or target is None else read_target(target)
    found, hits = read_draft(folder)
    if found is not None:
        for part in (_files, _config, _vocabulary, _embedding, _options, _rope):
            hits += part(found, known)
    verdicts: Json = {}
    for name in engines:
        own = _engine(found, known, ENGINES[name]) if found is not None else iter(())
        findings = [finding for hit in (*hits, *own) if (finding := _finding(hit, ENGINES[name]))]
        findings.sort(key=lambda finding: _SEVERITIES.index(finding["severity"]))
        worst = findings[0]["severity"] if findings else "info"
        verdicts[name] = {"verdict": "pass" if worst == "info" else worst, "findings": findings}
    return {"draft": str(folder), "target": str(known.path) if known else None, "verdicts": verdicts}


def not_for(config: DraftConfig, target: Target) -> dict[str, list[str]]:
    """Engines that cannot serve this draft from a portable file, each with the reasons; needs no weights."""
    shapes = names.expected_shapes(config) | dict.fromkeys(names.file_twins(config), (config.hidden_size,))
    stored = {names.to_portable(name, config.num_layers): shape for name, shape in shapes.items()}
    tensors = {name: StoredTensor(name, "BF16", shape, Path(), 0) for name, shape in stored.items()}
    record = {"aux_layers": list(config.aux_layers)}
    draft, reasons = Draft(Path(), names.portable_config(config, target=target), tensors, record), {}
    for engine in ENGINES.values():
        found = []
        for hit in (*_options(draft, target), *_engine(draft, target, engine)):
            severity, _, happens = EFFECTS[hit.key].get(engine.name, ("info", "", ""))
            runtime = hit.key == "AUX_RUNTIME" and engine.name in contract.ALL  # these cannot be told from outside
            if (hit.severity or severity) == "error" or runtime:
                found.append(f"{hit.happens or happens} ({hit.found.rstrip('.')})")
        if engine.name == "openvino" and config.draft_vocab_size == config.vocab_size:
            found.append("needs a d2t of zeros beside a full vocabulary (eyas export --engine openvino)")
        if found:
            reasons[engine.name] = found
    return reasons


def _finding(hit: Hit, engine: Engine) -> Json | None:
    effect = EFFECTS[hit.key].get(engine.name)
    if effect is None:
        return None
    severity, outcome, happens = effect
    return {
        "rule": hit.key.partition(":")[0],
        "severity": hit.severity or severity,
        "outcome": outcome,
        "message": f"{hit.found} {engine}: {hit.happens or happens}.",
        "fix": hit.fix,
        "tensors": list(hit.tensors),
    }


def read_draft(folder: Path) -> tuple[Draft | None, list[Hit]]:
    """(the draft, faults of its files); no draft when there is nothing to judge."""
    tensors, faults = read_folder(folder)
    hits = [Hit("FILE", _sentence(fault), "Copy or save the weights again.") for fault in faults]
    try:
        raw = json.loads((folder / "config.json").read_text("utf-8"))
        if not isinstance(raw, dict):
            raise ValueError("not an object")
    except OSError:
        hits.append(Hit("FILE", "config.json is not there.", "Put the config.json of the draft beside the weights."))
        return None, hits
    except ValueError as error:
        return None, [*hits, Hit("FILE", f"config.json is not valid JSON ({error}).", "Save the config again.")]
    if faults:
        return None, hits
    extra: Json = {}
    if (folder / "eyas.json").exists():
        try:
            extra = json.loads((folder / "eyas.json").read_text("utf-8"))
        except ValueError:
            hits.append(Hit("FILE", "eyas.json is not valid JSON.", "Remove it or export again.", severity="warn"))
    draft = Draft(folder, raw, tensors, extra if isinstance(extra, dict) else {})
    inner = any("hidden_norm" in name or "kv_a_proj" in name for name in draft.internal)
    if "fc.weight" not in draft.internal and not inner:
        few = ", ".join(list(tensors)[:3]) or "nothing"
        found = f"No fc.weight and no hidden_norm: the weights ({few} ...) are not those of an EAGLE-3 draft."
        return None, [*hits, Hit("NOT_A_DRAFT", found, "Point to the draft's folder.")]
    return draft, hits


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:].rstrip(".") + "."


# ---- conditions of the file, the same for every engine -----------------------------------------------------------------


def _files(d: Draft, _: Target | None) -> Iterator[Hit]:
    if any(tensor.file.suffix == ".bin" for tensor in d.tensors.values()):
        fix = "Export again as safetensors, or eyas check --fix OUT."
        yield Hit("FORMAT_BIN", "The weights are a torch .bin file.", fix)
    bad, zero = [], []
    stored: set[str] = set()
    for name, tensor in d.tensors.items():
        if tensor.dtype not in FLOATS or not tensor.contiguous or not tensor.count:
            continue
        stored.add(tensor.dtype)
        with np.errstate(all="ignore"):
            values = tensor.sample(64, 4096)
        if not np.isfinite(values).all():
            bad.append(name)
        elif len(tensor.shape) == 2 and not values.any():
            zero.append(name)
    if bad:
        yield Hit("NONFINITE", f"{listing(bad)} holds NaN or infinity.", "Take an earlier checkpoint.", tuple(bad))
    if zero:
        found = f"{listing(zero)} is all zeros where sampled."
        yield Hit("ZERO", found, "Save the draft again and compare.", tuple(zero))
    declared = d.config.get("dtype") or d.config.get("torch_dtype")
    short = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}.get(str(declared))
    if short and stored and short not in stored:
        found = f"config.json says {declared}, the tensors are {', '.join(sorted(stored))}."
        yield Hit("DTYPE_STORED", found, "Make the config say what is stored.")
    fillers: dict[str, list[str]] = {}
    for name in d.tensors:
        fillers.setdefault(names.from_any(name), []).append(name)
    for twice in (group for group in fillers.values() if len(group) > 1):
        found = f"{' and '.join(twice)} are one and the same tensor of the draft."
        yield Hit("TWICE", found, "Keep one.", tuple(twice))
    if lora := [name for name in d.tensors if "lora_" in name]:
        yield Hit("ADAPTER", f"{listing(lora)}: adapter weights.", "Merge the adapter, then export.", tuple(lora))


def _config(d: Draft, t: Target | None) -> Iterator[Hit]:
    c, raw = d.config, d.raw
    if names.is_speculators(raw):
        fix = "Export the portable layout: eyas check --fix OUT."
        yield Hit("SPECULATORS", "The config is in the speculators format.", fix)
        wanted = ("speculators_model_type", "speculators_config", "transformer_layer_config")
        lacking = [key for key in wanted if not raw.get(key)]
        methods = (raw.get("speculators_config") or {}).get("proposal_methods") or [{}]
        lacking += ["proposal_methods[0].speculative_tokens"] if "speculative_tokens" not in methods[0] else []
        if c.get("model_type") not in ("llama", "qwen3"):
            lacking.append("transformer_layer_config.model_type of llama or qwen3")
        if lacking:
            yield Hit("SPECULATORS_KEYS", f"The speculators config lacks {', '.join(lacking)}.", "Export it again.")
    elif not d.architecture:
        yield Hit("ARCH_MISSING", "config.json names no architectures.", f'Write "architectures": ["{FLAGSHIP}"].')
    if not c.get("model_type"):
        yield Hit("MODEL_TYPE", "config.json has no model_type.", 'Write "model_type": "llama".')
    allowed = "target_hidden_size" if names.is_speculators(raw) else ""
    if nulls := [key for key in _NOT_NULL if key in c and c[key] is None and key != allowed]:
        yield Hit("NULL", f"config.json has null for {', '.join(nulls)}.", "Give the number, or remove the key.")
    if c.get("num_hidden_layers") is None:
        fix = f'Write "num_hidden_layers": {d.layers_stored or 1}.'
        yield Hit("NHL_MISSING", "config.json has no num_hidden_layers.", fix)
    for layer in range(1, d.layers_stored):
        pair = [d.internal.get(f"layers.{layer}.{n}.weight") for n in ("input_layernorm", "hidden_norm")]
        if pair[0] and pair[1] and not np.array_equal(pair[0].read(), pair[1].read()):
            fix = "Serve it in the engine it was trained for, or train with both norms equal."
            yield Hit("LAYERS_NORM", f"Layer {layer} has two different norms.", fix, (pair[0].name, pair[1].name))
    heads, hidden, few = d.size("num_attention_heads"), d.size("hidden_size"), d.size("num_key_value_heads")
    if heads <= 0 or hidden % heads or heads % max(1, few):
        found = f"hidden_size {hidden}, {heads} heads and {few} key/value heads do not divide."
        yield Hit("HEADS", found, "Correct the numbers of heads.")
    if c.get("hidden_act", "silu") != "silu":
        yield Hit("ACT", f"hidden_act is {c['hidden_act']!r}.", "EAGLE-3 drafts use silu.")
    dtype = c.get("dtype") or c.get("torch_dtype")
    wanted_dtype = str(t.text.get("dtype") or t.text.get("torch_dtype") or t.config.get("dtype")) if t else ""
    if dtype is None or (dtype == "float32" and wanted_dtype == "bfloat16"):
        yield Hit("DTYPE", f"config.json says dtype {dtype!r}.", 'Write "dtype" and "torch_dtype": "bfloat16".')
    if c.get("tie_word_embeddings") is True:
        head = "lm_head.weight" in d.internal or d.head_rows < d.size("vocab_size")
        fix = 'Write "tie_word_embeddings": false; the draft has a head of its own.'
        yield Hit("TIE", "tie_word_embeddings is true.", fix if head else None, severity=None if head else "info")
    if (c.get("eagle_config") or {}).get("use_aux_hidden_state") is False:
        yield Hit("USE_AUX_FALSE", "eagle_config.use_aux_hidden_state is false.", "Remove it or write true.")
    if t is not None:
        yield from _beside(d, t)


def _beside(d: Draft, t: Target) -> Iterator[Hit]:
    """What the config says beside its target's."""
    c, vocab = d.config, d.size("vocab_size")
    if t.vocab_size != vocab:
        key = "VOCAB:larger" if vocab > t.vocab_size else "VOCAB"
        found = f"vocab_size is {vocab}, the target's is {t.vocab_size}."
        yield Hit(key, found, f'Write "vocab_size": {t.vocab_size}.')
    if c.get("target_hidden_size") not in (None, t.hidden_size):
        found = f"target_hidden_size is {c['target_hidden_size']}, the target's hidden size is {t.hidden_size}."
        yield Hit("SHAPE", found, f'Write "target_hidden_size": {t.hidden_size}, or take the right target.')
    if (reach := _reach(c)) < t.max_positions:
        found = f"The draft's context is {reach} positions, the target's {t.max_positions}."
        yield Hit("MAXPOS", found, f'Write "max_position_embeddings": {t.max_positions}.')
    quant = json.dumps(t.config.get("quantization_config") or t.text.get("quantization_config") or {}).lower()
    if any(word in quant for word in ("quarot", "spinquant", "rotation", "hadamard")):
        fix = "Train on states of this very target, or fold the inverse rotation into fc and embed_tokens."
        yield Hit("TARGET_ROTATED", "The target's quantisation rotates its residual stream.", fix)
    elif quant != "{}":
        yield Hit("TARGET_QUANT", "The target is quantised, the draft is not.")


def _reach(c: Json) -> int:
    """The context length that SGLang derives: positions times a linear scaling factor."""
    positions = int(c.get("max_position_embeddings") or 2048)
    scaling = c.get("rope_scaling") or c.get("rope_parameters") or {}
    kind = scaling.get("rope_type") or scaling.get("type")
    factor = scaling.get("factor") or 1
    return positions if "original_max_position_embeddings" in scaling or kind == "llama3" else int(positions * factor)


def _vocabulary(d: Draft, t: Target | None) -> Iterator[Hit]:
    c, vocab = d.config, t.vocab_size if t else d.size("vocab_size")
    write = f'Write "draft_vocab_size": {d.head_rows}.'
    if "draft_vocab_size" not in c:
        yield Hit("DVOCAB_MISSING", "config.json has no draft_vocab_size.", write)
    elif c["draft_vocab_size"] is None:
        yield Hit("DVOCAB_NULL", "draft_vocab_size is null.", write)
    elif not 0 < d.draft_vocab <= d.size("vocab_size"):
        yield Hit("DVOCAB_RANGE", f"draft_vocab_size is {d.draft_vocab}, vocab_size {d.size('vocab_size')}.", write)
    size = d.draft_vocab if c.get("draft_vocab_size") else d.head_rows
    own_head = "lm_head.weight" in d.internal or c.get("tie_word_embeddings")
    if not own_head and c.get("draft_vocab_size") is not None:
        key = "LMHEAD_MISSING:reduced" if size < vocab else "LMHEAD_MISSING"
        yield Hit(key, "There is no lm_head.weight.", "Export the trained head.", ("lm_head.weight",))
    stored = d.internal.get("d2t")
    if stored is not None and d.map is not None:
        if size == vocab:
            yield Hit("D2T_EXTRA", "There is a d2t beside a full vocabulary.", "Leave d2t and t2d out.", (stored.name,))
        yield from _map(d, stored, d.map, size, vocab, t)
    elif size < vocab:
        found = [p.name for p in d.folder.iterdir() if p.name.endswith("_meta.pt") or p.name in ("d2t.npy", "t2d.npy")]
        hint = f" ({', '.join(found)} beside the weights may hold it)" if found else ""
        fix = f"Write d2t (int64, offsets) into the weights{hint}."
        yield Hit("D2T_MISSING", f"The draft knows {size} of {vocab} tokens and has no d2t.", fix, ("d2t",))
    else:
        fix = "eyas export --engine openvino writes zeros."
        yield Hit("D2T_WANTED", "The vocabulary is full and there is no d2t.", fix)


def _map(d: Draft, stored: StoredTensor, offsets: np.ndarray, size: int, vocab: int, t: Target | None) -> Iterator[Hit]:
    here = (stored.name,)
    fix = "Write d2t as int64 offsets: target id = draft id + d2t[draft id], in ascending order."
    if stored.dtype in (*FLOATS, "BOOL"):
        yield Hit("D2T_FORM:dtype", f"d2t has dtype {stored.dtype}, expected whole numbers.", fix, here)
    if len(offsets) != size:
        key = "D2T_FORM:config" if len(offsets) == d.head_rows else "D2T_FORM:length"
        yield Hit(key, f"d2t has {len(offsets)} entries, the draft vocabulary {size}.", fix, here)
        return
    if not len(offsets):
        return
    places = np.arange(len(offsets))
    ids = offsets + places
    mask = d.internal.get("t2d")
    chosen = np.flatnonzero(mask.read()) if mask is not None else None
    agrees = chosen is not None and np.array_equal(chosen, ids)
    rising = bool((np.diff(offsets) > 0).all()) and len(offsets) > 1
    outside = ids.min() < 0 or ids.max() >= vocab
    by_mask = chosen is not None and not agrees and np.array_equal(chosen, offsets)
    arange = len(offsets) > 2 and np.array_equal(offsets, places) and not agrees
    if by_mask or arange or (rising and outside):
        key = "D2T_ABSOLUTE" if outside else "D2T_ABSOLUTE:inside"
        yield Hit(key, "d2t holds target ids, not offsets.", "Write d2t[i] = target id - i.", here)
        return
    if outside:
        bad = int(ids.max() if ids.max() >= vocab else ids.min())
        yield Hit("D2T_FORM:range", f"d2t leads to token {bad}, outside the vocabulary of {vocab}.", fix, here)
    elif len(np.unique(ids)) != len(ids):
        yield Hit("D2T_FORM", "d2t leads two draft tokens to one target token.", fix, here)
    elif (np.diff(ids) <= 0).any():
        yield Hit("D2T_FORM:order", "d2t is not in ascending order, so its rows and t2d's do not match.", fix, here)
    elif size < vocab and np.array_equal(ids, places):
        found = f"d2t is zeros: the map is the first {size} ids of {vocab}."
        yield Hit("D2T_PREFIX", found, "Build the map from counts.", here)
    if mask is not None and chosen is not None and not agrees and not outside:
        found = f"t2d marks {len(chosen)} tokens of {mask.count}, other ones than d2t leads to."
        yield Hit("D2T_T2D", found, "Rebuild t2d from d2t, if d2t is the map the head was trained with.", (mask.name,))
    if t is not None and t.eos_ids and not outside and not np.isin(t.eos_ids, ids).any():
        found = f"No end token ({t.eos_ids}) is in the draft vocabulary."
        yield Hit("EOS", found, "Rebuild the vocabulary with it.", here)


def _embedding(d: Draft, t: Target | None) -> Iterator[Hit]:
    own = d.internal.get("embed_tokens.weight")
    hidden = d.size("hidden_size")
    narrow = hidden != (t.hidden_size if t else d.size("target_hidden_size"))
    if own is None:
        if narrow:
            found = f"The draft is {hidden} wide, its target another width, and there is no embed_tokens."
            yield Hit("EMBED_MISSING_NARROW", found, "Export with the embedding.", ("embed_tokens.weight",))
        return
    if len(own.shape) != 2 or own.dtype not in FLOATS or own.shape[1] != hidden:
        return  # the shape is reported per engine
    rows = np.linspace(0, own.shape[0] - 1, min(own.shape[0], 64)).astype(np.int64)
    mine = np.stack([own.floats(int(row) * hidden, hidden) for row in rows])
    name = t.tensor_name("embedding") if t and not narrow else None
    if t is None or name is None:
        norms = np.linalg.norm(mine, axis=1)
        if hidden >= 64 and norms.std() < 1.5 * norms.mean() / np.sqrt(2 * hidden) and norms.mean() > 0:
            found = "embed_tokens looks freshly initialised (all rows of one length)."
            fix = "Check with --target, which compares it with the target's."
            yield Hit("EMBED_RANDOM", found, fix, (own.name,), severity="info")
        return
    theirs = read_file(inside(t.path, t.tensor_files[name]))[name]
    if theirs.shape != own.shape or theirs.dtype not in FLOATS:
        return
    other = np.stack([theirs.floats(int(row) * hidden, hidden) for row in rows])
    if np.allclose(mine, other, rtol=2**-7, atol=1e-8):
        found = f"embed_tokens ({own.bytes / 1e6:,.0f} MB) equals the target's."
        yield Hit("EMBED_SAME", found, "Leave it out.", (own.name,))
        return
    length = np.linalg.norm(mine, axis=1) * np.linalg.norm(other, axis=1)
    cosine = float(((mine * other).sum(1) / np.maximum(length, 1e-12)).mean())
    found = f"embed_tokens differs from the target's (mean cosine {cosine:.2f} over {len(rows)} rows)."
    if cosine < 0.9:
        yield Hit("EMBED_RANDOM", found, "Leave it out, unless it was trained from scratch.", (own.name,))
    else:
        fix = "Serve it where it is kept, or train with the target's embedding frozen."
        yield Hit("EMBED_OWN", found, fix, (own.name,))


def _options(d: Draft, _: Target | None) -> Iterator[Hit]:
    """What the draft is, by its config and the shapes of its tensors."""
    c = d.config
    if d.mla:
        yield Hit("MLA", "The draft uses latent attention (MLA).", "Serve it with SGLang or vLLM.")
        if not c.get("q_lora_rank") or d.size("num_hidden_layers") > 1:
            yield Hit("MLA_SHAPE", "Latent attention without q_lora_rank, or in several layers.", "Serve it with vLLM.")
        if str(c.get("model_type")).startswith("deepseek_v3"):
            yield Hit("MLA_TYPE", f"model_type is {c['model_type']!r}.", 'Write "model_type": "kimi_k2".')
        if names.flag(c, "norm_before_fc"):
            yield Hit("MLA_NBFC", "Latent attention and norm_before_fc.", "Train with fc_norm or without.")
    if (layers := c.get("num_hidden_layers") or 1) > 1:
        fix = "Serve it with SGLang or vLLM, or train one layer."
        yield Hit("LAYERS", f"The draft has {layers} decoder layers.", fix)
    window = c.get("sliding_window") if "sliding_attention" in str(c.get("layer_types", "sliding_attention")) else None
    if window:
        yield Hit("WINDOW", f"The draft attends through a window of {window}.", "Serve it with the same window.")
    fc_norm = bool(c.get("fc_norm") or c.get("use_aux_norm"))
    if c.get("norm_before_residual"):
        by = " (the speculators default)" if "norm_before_residual" not in d.raw else ""
        yield Hit("NBR", f"norm_before_residual is true{by}.", "Train with norm_before_residual false for this engine.")
    if names.flag(c, "norm_before_fc"):
        yield Hit("NBFC", "norm_before_fc is true.", "Train without it for this engine.")
        if not c.get("norm_before_fc"):
            yield Hit("NBFC_PLACE", "norm_before_fc stands in eagle_config only.", "Write it at the top level as well.")
    if fc_norm:
        yield Hit("FCNORM", "fc_norm is on.", "Train without it for this engine.")
    if c.get("use_aux_norm") or any("aux_norm_" in name for name in d.tensors):
        found = "The norms are named use_aux_norm, aux_norm_*."
        yield Hit("FCNORM:name", found, "Name them fc_norm, fc_norm.0.weight ...")
    if c.get("norm_output"):
        yield Hit("NORMOUT", "norm_output is true.", "Train without it for this engine.")
    for prefix, flag, on in (
        ("input_norm.", "norm_before_fc", names.flag(c, "norm_before_fc")),
        ("fc_norm.", "fc_norm", fc_norm),
    ):
        stray = tuple(tensor.name for name, tensor in d.internal.items() if name.startswith(prefix))
        if stray and not on:
            key = "FLAG_TENSOR" if flag == "norm_before_fc" else "FLAG_TENSOR:fc_norm"
            yield Hit(key, f"{listing(stray)} is stored while {flag} is off.", f'Write "{flag}": true.', stray)
    if bias := d.stored("q_proj.bias", "k_proj.bias", "v_proj.bias"):
        yield Hit("QKV_BIAS", "The attention has biases.", "Train without attention_bias for this engine.", bias)
        if not c.get("attention_bias"):
            found = "Biases are stored while attention_bias is off."
            yield Hit("QKV_BIAS:flag", found, 'Write "attention_bias": true.', bias)
    if "fc.bias" in d.internal:
        key = "FC_BIAS:flag" if c.get("bias") else "FC_BIAS"
        yield Hit(key, "There is an fc.bias.", "Train fc without bias.", (d.internal["fc.bias"].name,))
    qwen3 = c.get("model_type") == "qwen3" or "Qwen3" in d.architecture
    if not qwen3 and (norms := d.stored("q_norm.weight", "k_norm.weight")):
        fix = "Serve it with vLLM as Eagle3Qwen3ForCausalLM."
        yield Hit("QK_NORM", "The attention normalises queries and keys.", fix, norms)


def _rope(d: Draft, t: Target | None) -> Iterator[Hit]:
    c = d.config
    both = (c.get("rope_parameters"), c.get("rope_scaling"))
    parameters, scaling = (rope if isinstance(rope, dict) else {} for rope in both)
    if any(isinstance(value, dict) for value in parameters.values()):
        yield Hit("ROPE_NESTED", "rope_parameters holds one set per attention type.", "Write one flat set.")
    if "mrope_section" in parameters or "mrope_section" in scaling:
        if not d.architecture.lower().endswith("vlforcausallm"):
            fix = "Remove it: a text draft has one row of positions."
            yield Hit("MROPE", "The draft's RoPE has an mrope_section.", fix)
    elif parameters.get("rope_type", "default") != "default" and not scaling:
        fix = "Write rope_scaling too for older releases."
        yield Hit("ROPE_SCHEMA", "Scaled RoPE stands in rope_parameters only.", fix)
    if t is None or d.mla:
        return
    trained = (d.eyas.get("draft") or {}).get("rope_parameters")
    theirs, mine = _plain_rope(rope_parameters(t.text)), _plain_rope(rope_parameters(c))
    if trained is not None and _plain_rope(trained) == mine:
        return
    stated = any("rope_theta" in source for source in (c, parameters, scaling))
    if not stated and theirs.get("rope_theta") != 10000.0:
        fix = f"Write rope_theta {theirs.get('rope_theta')} if the draft was trained with it."
        yield Hit("ROPE_MISSING", "config.json has no rope_theta.", fix)
    elif mine != theirs:
        keys = sorted(key for key in mine.keys() | theirs.keys() if mine.get(key) != theirs.get(key))
        told = ", ".join(f"{key} {mine.get(key)} (target {theirs.get(key)})" for key in keys)
        fix = "Make the config say what the draft was trained with."
        yield Hit("ROPE", f"RoPE differs from the target's: {told}.", fix)


def _plain_rope(rope: Json) -> Json:
    kept = {k: v for k, v in rope.items() if not k.startswith("mrope") and k != "type" and v is not None}
    if kept.get("rope_type") == "mrope":
        kept["rope_type"] = "default"
    return {k: float(v) if isinstance(v, int) and not isinstance(v, bool) else v for k, v in kept.items()}


# ---- what one engine makes of it ---------------------------------------------------------------------------------------


def _engine(d: Draft, t: Target | None, engine: Engine) -> Iterator[Hit]:
    yield from _architecture(d, engine)
    if d.mla and engine.name in ("llamacpp", "openvino"):
        return
    yield from _names(d, t, engine)
    yield from _layers(d, t, engine)
    problem = contract.target_problem(engine, t) if t else None
    if t is not None and problem:
        yield Hit("TARGET_ARCH", f"The target is {t.architecture}.", "Choose another engine or target.", (), *problem)


def _architecture(d: Draft, engine: Engine) -> Iterator[Hit]:
    arch, speculators = d.architecture, names.is_speculators(d.raw)
    if not arch or not engine.architectures or (speculators and not engine.speculators):
        return  # reported for every engine already, or taken whatever it says
    accepted = set(engine.architectures) | (contract.SPECULATORS if engine.speculators else set())
    if engine.name == "sglang" and d.mla:
        accepted = {"Eagle3DeepseekV2ForCausalLM"}
    if arch not in accepted:
        write = "Eagle3DeepseekV2ForCausalLM" if d.mla else FLAGSHIP
        yield Hit("ARCH", f"architectures is [{arch!r}].", f'Write "architectures": ["{write}"].')


def places(d: Draft, t: Target | None, engine: Engine) -> Shapes:
    """Internal name -> shape of every parameter that the engine builds from this config, optional ones included."""
    c, name, aux, wide = d.config, engine.name, num_aux(d, engine), d.size("target_hidden_size")
    top, nested = (bool(keys.get("norm_before_fc")) for keys in (c, c.get("eagle_config") or {}))
    sizes: Any = SimpleNamespace(
        **{key: d.size(key) for key in _SIZES},
        **{key: int(c.get(key) or 0) for key in LATENT},
        num_layers=d.size("num_hidden_layers"),
        draft_vocab_size=d.draft_vocab,
        fc_in=aux * wide,
        aux_layers=range(aux),
        norm_before_fc={"either": top or nested, "top": top, "nested": nested}.get(engine.norm_before_fc),
        fc_norm=engine.fc_norm and (c.get("fc_norm") or (c.get("use_aux_norm") and name == "sglang")),
        attention_bias=not d.mla and c.get("attention_bias") and name in ("vllm", "trtllm"),
        qk_norm=name == "vllm" and (c.get("model_type") == "qwen3" or "Qwen3ForCausalLM" in d.architecture),
    )
    shapes = names.expected_shapes(sizes)
    for twin in names.file_twins(sizes):
        shapes[twin] = (sizes.hidden_size,)
    if not d.mla and name in ("sglang", "vllm") and (c.get("attention_bias") or c.get("bias")):
        shapes |= {f"layers.{layer}.self_attn.o_proj.bias": (sizes.hidden_size,) for layer in range(sizes.num_layers)}
    if c.get("bias") and name in ("sglang", "trtllm"):
        shapes["fc.bias"] = (sizes.hidden_size,)
    if c.get("tie_word_embeddings") is True and name == "sglang":
        del shapes["lm_head.weight"]
    shapes.pop("t2d", None)
    shapes["d2t"] = (d.draft_vocab,)
    if name == "vllm" and d.draft_vocab == (t.vocab_size if t else sizes.vocab_size):
        del shapes["d2t"]
    return shapes


def num_aux(d: Draft, engine: Engine) -> int:
    """How many auxiliary layers the engine sizes fc for."""
    c = d.config
    nested, top = contract.layer_ids(c)
    if engine.three_layers:
        return 3
    if engine.name == "vllm" and names.is_speculators(d.raw):
        return 3  # neither eagle_config nor num_aux_hidden_states survives the translation of the format
    if engine.name == "trtllm":
        return d.num_aux
    counts = [c.get("num_aux_hidden_states"), len(nested or [])]
    if engine.name == "vllm" and "Qwen3ForCausalLM" in d.architecture:
        counts = [c.get("num_aux_layers"), c.get("num_aux_hidden_states"), len(top or []), len(nested or [])]
    if engine.name == "sglang" and d.mla:
        counts = [len(nested or []), len(top or [])]
    return next((int(count) for count in counts if count), 3)


def _names(d: Draft, t: Target | None, engine: Engine) -> Iterator[Hit]:
    shapes = places(d, t, engine)
    known, filled = set(shapes), set()
    groups: dict[str, list[str]] = {}
    for name, tensor in d.tensors.items():
        inner, put = names.from_any(name), contract.place(engine, name, known)
        if engine.name == "sglang" and d.mla and name.startswith("model."):
            put = DROPS
        if put not in (RAISES, DROPS):
            filled.add(put)
            if put in shapes and put != "d2t" and tensor.shape != shapes[put]:
                yield _shape(name, put, tensor, shapes[put])
            continue
        filled.add(inner)  # its absence is this finding, not another
        if name in ("d2t", "t2d") or inner.startswith(("input_norm.", "fc_norm.")) or "lora_" in name:
            continue  # these have rules of their own
        if inner.endswith((".bias", "q_norm.weight", "k_norm.weight")):
            continue
        key = "NAME_UNKNOWN:dropped" if inner in known else "NAME_UNKNOWN:junk"
        key = "NAME_UNKNOWN" if put == RAISES else key
        if inner not in known and any(word in name for word in _HARMLESS):
            key = key.replace("junk", "harmless")
        elif any(word in name for word in _WRAPPERS):
            key = "NAME_WRAPPER"
        elif name.startswith("model.") and (put == RAISES or engine.name == "trtllm"):
            key = "NAME_MODEL_PREFIX"
        elif engine.name == "openvino" and inner in known and not name.startswith("model."):
            key = "NAME_LAYERS"
        groups.setdefault(key, []).append(name)
    for key, found in groups.items():
        fix = "eyas check --fix OUT renames them." if all(names.from_any(n) in known for n in found) else "Remove them."
        severity = {"NAME_UNKNOWN:junk": "warn", "NAME_UNKNOWN:harmless": "info"}.get(key)
        table = "NAME_UNKNOWN:dropped" if severity else key
        yield Hit(table, f"{listing(found)}: not a name that it knows.", fix, tuple(found), severity)
    yield from _missing(d, shapes, filled, engine)


def _shape(name: str, put: str, tensor: StoredTensor, expected: tuple[int, ...]) -> Hit:
    shape, key, fix = tensor.shape, "SHAPE", "Correct the sizes in config.json."
    if put == "lm_head.weight":
        key, fix = "LMHEAD_SHAPE", f'Write "draft_vocab_size": {shape[0]}, if d2t has as many entries.'
    elif put == "embed_tokens.weight":
        key, fix = "EMBED_SHAPE", "Write the vocab_size and hidden_size of the embedding, or leave it out."
        if shape[1:] == expected[1:]:
            key += ":rows" if shape[0] > expected[0] else ":few"
    elif put == "fc.weight":
        key, fix = "NAUX_KEYS", 'Write "num_aux_hidden_states" and the layer ids.'
    elif put.endswith("_proj.weight") and len(shape) == 2:
        split = 1 if put.endswith(("o_proj.weight", "down_proj.weight")) else 0  # the side that is split over GPUs
        if shape[1 - split] == expected[1 - split]:
            grows = split or "mlp." in put
            key = "SHAPE:part" if shape[split] > expected[split] else "SHAPE:pad" if grows else "SHAPE"
            fix = "Correct heads, head_dim and intermediate_size in config.json."
    return Hit(key, f"{name} is {list(shape)}, the config means {list(expected)}.", fix, (name,))


def _missing(d: Draft, shapes: Shapes, filled: set[str], engine: Engine) -> Iterator[Hit]:
    optional = {"embed_tokens.weight", "lm_head.weight", "d2t"}
    if engine.name == "vllm" and (d.config.get("eagle_config") or {}).get("use_aux_hidden_state") is False:
        optional.add("fc.weight")
    unused = {"input_layernorm", "hidden_norm"} - {engine.later_norm}  # of layers beyond the first
    lost = {
        name
        for name in shapes.keys() - filled - optional
        if name.startswith("layers.0.") or not unused & {*name.split(".")}
    }
    lost -= {name for name in lost if engine.zero_bias and name.endswith(".bias")}
    norms = {name for name in lost if name.endswith(("norm.weight", "layernorm.weight")) or "fc_norm" in name}
    for key, group in (("MISSING", sorted(lost - norms)), ("MISSING:norm", sorted(norms))):
        if group:
            fix = "Export the draft again; these tensors were lost."
            yield Hit(key, f"There is no {listing(group)}.", fix, tuple(group))


def _layers(d: Draft, t: Target | None, engine: Engine) -> Iterator[Hit]:
    c, count = d.config, d.num_aux
    nested, top = contract.layer_ids(c)
    if count != 3 and engine.three_layers:
        yield Hit("NAUX", f"The draft reads {count} auxiliary layers.", "Train on three, or choose another engine.")
        return
    if count * d.size("target_hidden_size") == d.size("hidden_size"):
        found = f"fc has {count} auxiliary layer(s), as wide as the draft itself."
        yield Hit("NAUX_BYPASS", found, "Train on three layers.")
    if top and len(top) != 3 and not c.get("num_aux_hidden_states") and not nested and engine.name == "sglang":
        found = f"{len(top)} top-level layer ids and no num_aux_hidden_states."
        yield Hit("NAUX_KEYS", found, f'Write "num_aux_hidden_states": {len(top)}.')
    listed = nested if engine.name == "sglang" else top
    rotated = t and listed and nested == contract.nested_ids(contract.physical_from_nested(listed, t), t)
    if listed and list(listed) != sorted(set(listed)) and not rotated:
        found = f"The layer ids {listed} are not ascending, each once."
        yield Hit("AUX_ORDER", found, "Write them ascending; fc's blocks follow.")
    if t is None:
        return
    record = d.eyas.get("aux_layers")
    meant, why = (list(record), "eyas.json") if isinstance(record, list) else names.intended_layers(c, t)
    layers = contract.captured(engine, c, t)
    if isinstance(layers, str):
        fix = "Train on layers that it can capture."
        key = "AUX_LAST:unusable" if "no usable state" in layers else "AUX_LAST"
        yield Hit(key, f"Layers, by this config: {why}.", fix, happens=layers)
    elif meant is None:
        yield Hit("AUX_CONV", _sentence(why), "Correct the wrong one: top-level id = nested id + 1.")
    elif len(layers) != count:
        found = f"fc was made for {count} layers, the target gives out{tuple(layers)}."
        yield Hit("AUX_COUNT", found, "Write the ids of the layers it was trained on, in both places.")
    elif layers != meant:
        fix = "Write both: eagle_config.eagle_aux_hidden_state_layer_ids and, one higher, the top-level key."
        if engine.name in ("openvino", "trtllm"):
            key, fix = "AUX_RUNTIME", "Set the layers where the engine lets you, or train on its layers."
        elif record:
            key = "AUX_OTHER"
        elif nested and not top:
            key = "AUX_KEY" if engine.name == "vllm" else "AUX_KEY:ignored"
        else:
            key = "AUX_KEY2" if engine.name == "sglang" else "AUX_OTHER"
        yield Hit(key, f"The draft was trained on out{tuple(meant)} ({why}), here it gets out{tuple(layers)}.", fix)
    if nested and not top and engine.name == "vllm" and meant != contract.usual_layers(t.num_layers):
        found = f"The layer ids {nested} stand in eagle_config only."
        yield Hit("AUX_KEY:v2", found, "Write the top-level key too, one higher.")
    deepseek = t.architecture.startswith(contract._SGLANG_DEEPSEEK)
    if engine.name == "sglang" and nested and not top and deepseek and nested[0] != 1 and not record:
        yield Hit("AUX_DS", f"The layer ids {nested} on {t.architecture}.", "Make sure that they were meant so.")
