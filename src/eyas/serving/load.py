"""A draft folder as an engine loads it: what it drops, leaves random, replaces or reads otherwise, in our own draft.

What an engine does stands in `contract`; what a folder holds and which rows of the contract it meets, `check` says.
"""

from pathlib import Path

import numpy as np
import torch

from eyas.draft.config import LATENT, DraftConfig, latent_sizes, rope_parameters
from eyas.errors import EyasError, UsageError
from eyas.serving import contract, names
from eyas.serving.check import check, places, read_draft
from eyas.serving.contract import ENGINES, Engine, Json
from eyas.serving.export import State
from eyas.target import Target


def load_as(folder: str | Path, target: Target, engine: str) -> tuple[DraftConfig, "State", list[str]]:
    """(config, state, notes) of the draft that `engine` really runs from this folder beside this target.

    state: internal names, float32 (d2t int64, t2d bool), complete for draft.model.Draft; random weights stand in for
    memory that the engine leaves uninitialised. config.aux_layers are the layers that the engine captures. notes:
    sentences on what is lost or differs. Raises EyasError with the engine's own failure where it would fail, and where
    it would run something that our draft has no place for.
    """
    if engine not in ENGINES:
        raise UsageError(f"--as {engine}: expected one of {', '.join(ENGINES)}.")
    kind, folder = ENGINES[engine], Path(folder)
    findings = check(folder, target, [engine])["verdicts"][engine]["findings"]
    for finding in findings:
        if finding["severity"] == "error" and finding["outcome"].startswith("raises"):
            raise EyasError(f"{folder}: {finding['message']}")
    met = {finding["rule"]: finding["outcome"] for finding in findings}
    draft, _ = read_draft(folder)
    assert draft is not None  # check would have raised
    if draft.config.get("num_hidden_layers") is None:
        draft.config["num_hidden_layers"] = contract.LLAMA_LAYERS
    if met.get("USE_AUX_FALSE") == "drops":
        raise EyasError(f"{folder}: {kind.title} would feed it the target's final states instead of auxiliary ones.")
    shapes = places(draft, target, kind)
    shapes["embed_tokens.weight"] = (target.vocab_size, *shapes["embed_tokens.weight"][1:])
    found: State = {}
    for name in sorted(draft.tensors):  # the order of reading: of two tensors for one place the last one stays
        tensor, put = draft.tensors[name], contract.place(kind, name, set(shapes))
        if put in shapes and put != "d2t":
            found[put] = _cut(tensor.floats().reshape(tensor.shape), put, shapes[put])
    _shared(found, met, target, kind, draft.draft_vocab)
    random = _fill(found, shapes, kind)
    layers = contract.captured(kind, draft.config, target)
    if isinstance(layers, str):
        raise EyasError(f"{folder}: {kind.title}: {layers}; no store holds what it feeds.")
    if min(layers) < 0:
        raise EyasError(f"{folder}: {kind.title} would feed it the target's embeddings, which no store holds.")
    _in_ascending_order(found, layers)
    if "NAUX_BYPASS" in met:
        found = {n: t for n, t in found.items() if not n.startswith(("input_norm", "fc_norm"))}
        found["fc.weight"] = torch.eye(draft.size("hidden_size"))
    config = _config(draft.config, found, target, kind, tuple(sorted(layers)), "WINDOW" not in met)
    for layer in range(1, config.num_layers):  # ours has one norm before attention there, under this name
        norm = found[f"layers.{layer}.{kind.later_norm}.weight"]
        found[f"layers.{layer}.input_layernorm.weight"] = norm
        del found[f"layers.{layer}.hidden_norm.weight"]
    _map(found, draft.map if "d2t" in shapes else None, config)
    expected = names.expected_shapes(config)
    if strange := [name for name in found if name not in expected and bool(found[name].any())]:
        raise EyasError(f"{folder}: {kind.title} uses {', '.join(strange)}, for which eyas' draft has no place.")
    notes = [finding["message"] for finding in findings if finding["outcome"] != "harmless"]
    if random:
        text = "uninitialised; random values stand in, so figures are rough."
        notes.append(f"{kind.title} leaves {', '.join(random)} {text}")
    return config, {name: found[name] for name in expected}, notes


def _cut(stored: np.ndarray, name: str, shape: tuple[int, ...]) -> "torch.Tensor":
    """What a place takes of a stored tensor of another size, where the engine does not mind: its first part, or zeros."""
    tensor = torch.from_numpy(np.ascontiguousarray(stored)).float()
    if name == "lm_head.weight" or tensor.shape == shape:
        return tensor
    part = tuple(slice(0, min(pair)) for pair in zip(tensor.shape, shape, strict=True))
    out = tensor.new_zeros(shape)
    out[part] = tensor[part]
    return out


def _shared(found: "State", met: Json, target: Target, kind: Engine, rows: int) -> None:
    """Embedding and head, where the engine takes the target's."""
    own = found.get("embed_tokens.weight")
    narrow = own is not None and own.shape[1] != target.hidden_size
    embedding, head = (target.tensor_name(part) for part in ("embedding", "head"))
    if embedding is None or head is None:
        raise UsageError(f"{target.path}: its weights are needed, for the embedding that the draft shares.")
    null = met.get("DVOCAB_NULL") == "replaced"
    if not narrow and (own is None or not kind.own_embedding or null):
        found["embed_tokens.weight"] = target.read_tensor(embedding).float()
    if met.get("TIE") == "replaced":
        found["lm_head.weight"] = found["embed_tokens.weight"][:rows]
    elif null or ("lm_head.weight" not in found and met.get("LMHEAD_MISSING") == "replaced"):
        found["lm_head.weight"] = target.read_tensor(head).float()[:rows]


def _fill(found: "State", shapes: dict[str, tuple[int, ...]], kind: Engine) -> list[str]:
    """Places that no tensor fills: norms are ones, and anything stands in for the rest, which is returned."""
    generator = torch.Generator().manual_seed(0)
    for name in shapes.keys() - found.keys() - {"d2t"}:
        if "norm" in name:
            found[name] = torch.ones(shapes[name])
        elif kind.zero_bias and name.endswith(".bias"):
            found[name] = torch.zeros(shapes[name])
    random = [name for name in shapes if name not in found and name != "d2t"]
    for name in random:
        found[name] = torch.randn(shapes[name], generator=generator) * 0.02
    return random


def _in_ascending_order(found: "State", layers: list[int]) -> None:
    """Blocks of the inputs to fc as they stand when the layers are concatenated in ascending order."""
    order = sorted(range(len(layers)), key=layers.__getitem__)
    for name in ("fc.weight", "input_norm.weight"):
        if name in found:
            blocks = found[name].chunk(len(layers), -1)
            found[name] = torch.cat([blocks[i] for i in order], -1)


def _map(found: "State", offsets: "np.ndarray | None", config: DraftConfig) -> None:
    """d2t and t2d; without a map draft ids are target ids. Entries that lead nowhere lead past the vocabulary."""
    rows, vocab = config.draft_vocab_size, config.vocab_size
    offsets = np.zeros(rows, np.int64) if offsets is None else offsets[:rows]
    offsets = np.concatenate([offsets, np.full(rows - len(offsets), vocab)])
    if rows == vocab and offsets.any():
        raise EyasError("a full vocabulary with a map that is not the identity, for which eyas' draft has no place.")
    ids = offsets + np.arange(rows)
    if len(np.unique(ids)) < rows:
        raise EyasError("a map that leads two draft tokens to one target token, for which eyas' draft has no place.")
    if rows < vocab:
        found["d2t"], found["t2d"] = torch.from_numpy(offsets), torch.zeros(vocab, dtype=torch.bool)
        found["t2d"][ids[(ids >= 0) & (ids < vocab)]] = True


def _config(
    c: Json, found: "State", target: Target, kind: Engine, layers: tuple[int, ...], window: bool
) -> DraftConfig:
    at, hidden = "layers.0.self_attn.", len(found["fc.weight"])
    heads = int(c.get("num_attention_heads") or 32)
    head_dim = int(c.get("head_dim") or hidden // heads)
    sliding = c.get("sliding_window") if window and "sliding_attention" in str(c.get("layer_types")) else None
    if latent := latent_sizes(c):
        head_dim = latent["head_dim"]
    rope = rope_parameters(c)
    if kind.name == "sglang" and c.get("partial_rotary_factor") is None:
        rope.pop("partial_rotary_factor", None)  # it looks beside rope_parameters, not into them
    return DraftConfig(
        hidden_size=hidden,
        target_hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        draft_vocab_size=len(found["lm_head.weight"]),
        num_attention_heads=heads,
        num_key_value_heads=heads if latent else len(found[at + "k_proj.weight"]) // head_dim,
        head_dim=head_dim,
        intermediate_size=len(found["layers.0.mlp.up_proj.weight"]),
        aux_layers=layers,
        target_num_layers=target.num_layers,
        rms_norm_eps=float(c.get("rms_norm_eps") or 1e-6),
        rope_parameters=rope,
        max_position_embeddings=int(c.get("max_position_embeddings") or 2048),
        num_layers=1 + max(int(name.split(".")[1]) for name in found if name.startswith("layers.")),
        norm_before_residual=kind.norm_before_residual and bool(c.get("norm_before_residual")),
        norm_before_fc="input_norm.weight" in found,
        fc_norm="fc_norm.0.weight" in found,
        norm_output=kind.norm_output and bool(c.get("norm_output")),
        attention_bias=at + "q_proj.bias" in found,
        qk_norm=at + "q_norm.weight" in found,
        sliding_window=sliding,
        **{key: latent[key] for key in LATENT if latent},
    )
