"""Write a repaired copy of a draft, where the repair is certain. Weights are copied, never computed; no torch."""

from pathlib import Path

import numpy as np

from eyas.errors import EyasError
from eyas.files import atomic_folder, write_json
from eyas.serving import contract, names
from eyas.serving.check import Draft, check, read_draft
from eyas.serving.contract import Json
from eyas.serving.tensors import FLOATS, Array, StoredTensor, write_file
from eyas.target import Target, read_target

_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
Tensors = dict[str, StoredTensor | Array]


def fix(draft: str | Path, out: str | Path, target: str | Path | Target | None) -> Json:
    """Repair into folder `out`: {"changed": [sentence], "left": [sentence]}; `left` are errors that need a decision.

    Certain repairs: names, wrappers and layouts; architecture, sizes that the tensors themselves tell, flags whose
    tensors are there; a map whose form is wrong but whose tokens are known; .bin to safetensors; with a target, its
    vocabulary, width and context. Never: a trained weight, RoPE, a norm flag without tensors, layers that are in doubt.
    Raises EyasError when the files cannot be read or two tensors claim one name.
    """
    known = target if isinstance(target, Target) or target is None else read_target(target)
    found, hits = read_draft(Path(draft))
    if found is None or any(hit.key == "FILE" and hit.severity is None for hit in hits):
        raise EyasError(f"{draft}: cannot be repaired. {hits[0].found} {hits[0].fix or ''}")
    changed: list[str] = []
    tensors = _tensors(found, changed)
    config = _config(found, known, changed)
    _map(found, known, tensors, config, changed)
    with atomic_folder(out) as folder:
        write_file(folder / "model.safetensors", tensors)
        write_json(folder / "config.json", config)
        if found.eyas:
            write_json(folder / "eyas.json", found.eyas | {"repaired": changed})
    verdicts = check(out, known, ["all"])["verdicts"]
    left = {f["message"] for verdict in verdicts.values() for f in verdict["findings"] if f["severity"] == "error"}
    return {"changed": changed, "left": sorted(left)}


def _tensors(d: Draft, changed: list[str]) -> Tensors:
    tensors: Tensors = {}
    dropped = []
    for name, tensor in d.tensors.items():
        if names.teacher_only(name) or "rotary_emb." in name or name.endswith("inv_freq"):
            dropped.append(name)
            continue
        if not tensor.contiguous:
            raise EyasError(f"{d.folder}: {name} is stored transposed; save it contiguous.")
        new = names.to_portable(names.from_any(name), d.layers_stored)
        if new in tensors:
            raise EyasError(f"{d.folder}: two tensors are called {new}; remove one.")
        tensors[new] = tensor
    renamed = sum(new != tensor.name for new, tensor in tensors.items() if isinstance(tensor, StoredTensor))
    if renamed:
        changed.append(f"renamed {renamed} tensors to the portable layout")
    if dropped:
        changed.append(f"left out {', '.join(dropped)}, which only training uses")
    if any(tensor.file.suffix == ".bin" for tensor in d.tensors.values()):
        changed.append("wrote the weights as safetensors")
    return tensors


def _config(d: Draft, t: Target | None, changed: list[str]) -> Json:
    """The config in the portable form; every key that changes its meaning is told."""
    drop = ("speculators_config", "speculators_model_type", "speculators_version", "use_aux_norm", "auto_map")
    new = {k: v for k, v in d.config.items() if k not in drop and not (v is None and k != "rope_scaling")}
    if names.is_speculators(d.raw):
        changed.append("wrote the speculators config as a plain one")
    llama = not d.mla and not any(name.endswith("q_norm.weight") for name in d.internal)
    if llama:
        new |= {"architectures": [contract.FLAGSHIP], "model_type": "llama"} | _sizes(d)
    head = d.internal.get("lm_head.weight")
    if head is not None:
        new |= {"draft_vocab_size": head.shape[0], "tie_word_embeddings": False}
    new["norm_before_residual"] = bool(d.config.get("norm_before_residual"))
    if "input_norm.weight" in d.internal:
        new["norm_before_fc"] = True
        new["eagle_config"] = (new.get("eagle_config") or {}) | {"norm_before_fc": True}
    if "fc_norm.0.weight" in d.internal:
        new["fc_norm"] = True
    if any(name.endswith("q_proj.bias") for name in d.internal):
        new["attention_bias"] = True
    stored = {tensor.dtype for tensor in d.internal.values() if tensor.dtype in FLOATS}
    if len(stored) == 1 and (dtype := _DTYPES.get(stored.pop())):
        new |= {"dtype": dtype, "torch_dtype": dtype}
    if t is not None:
        new |= {"vocab_size": t.vocab_size}
        if (fc := d.internal.get("fc.weight")) is not None and fc.shape[1] % t.hidden_size == 0:
            new["target_hidden_size"] = t.hidden_size
        new["max_position_embeddings"] = max(t.max_positions, int(new.get("max_position_embeddings") or 0))
        new |= _layers(d, t)
    new.setdefault("target_hidden_size", new.get("hidden_size"))
    for key in sorted(new.keys() | d.config.keys()):
        if key not in drop and (new.get(key) != d.config.get(key) or (key in d.config) > (key in new)):
            changed.append(f"config.json: {key} {d.config.get(key)!r} -> {new.get(key)!r}")
    return new


def _sizes(d: Draft) -> Json:
    """Sizes that the tensors tell by themselves."""
    shapes = {name: tensor.shape for name, tensor in d.internal.items()}
    sizes: Json = {"num_hidden_layers": d.layers_stored} if d.layers_stored else {}
    norm, gate = shapes.get("norm.weight"), shapes.get("layers.0.mlp.gate_proj.weight")
    queries, keys = (shapes.get(f"layers.0.self_attn.{n}_proj.weight") for n in ("q", "k"))
    heads = d.size("num_attention_heads")
    if norm:
        sizes["hidden_size"] = norm[0]
    if gate:
        sizes["intermediate_size"] = gate[0]
    if queries and keys and heads and queries[0] % heads == 0 and keys[0] % (queries[0] // heads) == 0:
        head_dim = queries[0] // heads
        sizes |= {"head_dim": head_dim, "num_key_value_heads": keys[0] // head_dim}
    return sizes


def _layers(d: Draft, t: Target) -> Json:
    """Both spellings of the layers, when there is no doubt which they are: eyas' own record, or top-level ids."""
    record, (_, top) = d.eyas.get("aux_layers"), contract.layer_ids(d.config)
    meant = record or names.intended_layers(d.config, t)[0] if record or top else None
    if meant is None or len(meant) != d.num_aux:
        return {}
    keys = names.layer_keys(list(meant), t)
    if "eagle_config" in keys:
        keys["eagle_config"] = (d.config.get("eagle_config") or {}) | keys["eagle_config"]
    return keys


def _map(d: Draft, t: Target | None, tensors: Tensors, config: Json, changed: list[str]) -> None:
    """The map as int64 offsets with its t2d, where the tokens are known for certain."""
    vocab = t.vocab_size if t else d.size("vocab_size")
    head = d.internal.get("lm_head.weight")
    if head is None:
        return
    rows, offsets = head.shape[0], d.map
    mask = d.internal.get("t2d")
    chosen = np.flatnonzero(mask.read()) if mask is not None and mask.count == vocab else None
    if offsets is None and chosen is not None and len(chosen) == rows < vocab:
        offsets = chosen - np.arange(rows)
        changed.append("wrote d2t from t2d")
    if offsets is None or len(offsets) != rows:
        return
    ids = offsets + np.arange(rows)
    sound = _sound(ids, vocab)
    absolute = chosen is not None and np.array_equal(chosen, offsets) and not np.array_equal(chosen, ids)
    if absolute or (not sound and chosen is None and _sound(offsets, vocab)):
        ids, sound = offsets, True
        changed.append("d2t held target ids; wrote offsets")
    if not sound:
        return
    if rows == vocab:  # the identity: no map belongs beside a full vocabulary
        changed.append("left out the map, since the vocabulary is full")
        tensors.pop("d2t", None), tensors.pop("t2d", None)
        return
    if chosen is not None and not np.array_equal(chosen, ids):
        return  # one of the two is stale, and nothing here says which
    if (stored := d.internal.get("d2t")) is not None and stored.dtype in FLOATS:
        changed.append("wrote d2t as whole numbers")
    if "t2d" not in tensors:
        changed.append("wrote t2d from d2t")
    present = np.zeros(vocab, dtype=bool)
    present[ids] = True
    tensors["d2t"], tensors["t2d"] = (ids - np.arange(rows)).astype(np.int64), present


def _sound(ids: Array, vocab: int) -> bool:
    return bool(len(ids) and ids[0] >= 0 and ids[-1] < vocab and (np.diff(ids) > 0).all())
