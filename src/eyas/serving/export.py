"""Write a draft for engines, and read it back from any layout. The set of tensors is compared before and after."""

from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file

from eyas import __version__
from eyas.draft.config import DraftConfig
from eyas.errors import EyasError, UsageError
from eyas.files import atomic_folder, read_json, write_json
from eyas.serving import names
from eyas.serving.check import not_for
from eyas.serving.contract import ENGINES, Json
from eyas.serving.tensors import read_folder
from eyas.target import Target, read_header, read_target

LAYOUTS = ("portable", "eagle", "speculators")
State = dict[str, torch.Tensor]


def export(
    state: State,
    config: DraftConfig,
    target: Target,
    out: Path,
    *,
    provenance: Json,
    layout: str = "portable",
    dtype: str = "bfloat16",
    embed: bool = False,
    engine: str | None = None,
    shard_bytes: int | None = None,
) -> Path:
    """Write the draft to folder `out`, whole or not at all: weights, config.json, eyas.json. Returns `out`.

    state: internal names (names.expected_shapes), floats of any dtype, d2t int64 [Vd] (offsets) and t2d bool [V] when
    the vocabulary is reduced. Floats are cast to `dtype`; the maps are left out when Vd == V. The teacher's head is
    never written. `engine` writes the one file that serves that engine where the portable one does not, and refuses
    (EyasError) what it cannot serve. `shard_bytes` splits the weights into files of at most that size.

    embed_tokens, often half of the file, is left out when it is proven equal to the target's, which every engine then
    puts in its place. It is written when the draft has its own width, when it was trained, when the target's weights are
    not at hand to prove it, and with `embed=True` (vLLM under pipeline parallelism, tools that load a draft alone).

    Raises UsageError when a tensor is missing, unexpected or of another shape than the config says.
    """
    if layout not in LAYOUTS:
        raise UsageError(f"layout {layout!r}: expected one of {', '.join(LAYOUTS)}.")
    if engine is not None and engine not in ENGINES:
        raise UsageError(f"engine {engine!r}: expected one of {', '.join(ENGINES)}.")
    tensors = checked(state, config)
    if not embed and embedding_is_targets(tensors.get("embed_tokens.weight"), config, target):
        tensors.pop("embed_tokens.weight", None)
    full = config.draft_vocab_size == config.vocab_size
    if full and (engine == "openvino" or layout == "eagle"):
        tensors["d2t"] = torch.zeros(config.vocab_size, dtype=torch.int64)
        tensors["t2d"] = torch.ones(config.vocab_size, dtype=torch.bool)
    for twin, source in names.file_twins(config).items():
        tensors[twin] = tensors[source].clone() if source else torch.zeros(config.hidden_size)
    reasons = not_for(config, target).get(engine or "", [])
    if reasons := [reason for reason in reasons if "d2t of zeros" not in reason]:
        raise EyasError(f"{ENGINES[engine or '']} cannot serve this draft: {'; '.join(reasons)}.")

    if layout != "speculators":
        tensors = {names.to_portable(name, config.num_layers): tensor for name, tensor in tensors.items()}
    cast = getattr(torch, dtype)
    floats = {name: tensor.to(cast) for name, tensor in tensors.items() if tensor.is_floating_point()}
    written = {name: tensor.contiguous().cpu() for name, tensor in (tensors | floats).items()}
    make = names.speculators_config if layout == "speculators" else names.portable_config
    with atomic_folder(out) as folder:
        write_json(folder / "config.json", make(config, dtype=dtype, target=target))
        found = _write_weights(written, folder, layout, shard_bytes)
        if found != set(written):
            text = f"wrote {len(found)} tensors of {len(written)}; nothing was kept. Please report this."
            raise EyasError(f"{out}: {text}")
        write_json(folder / "eyas.json", record(config, target, provenance, layout, engine))
    return Path(out)


def record(config: DraftConfig, target: Target, provenance: Json, layout: str, engine: str | None) -> Json:
    """eyas.json: what the draft is, for which target, which engines a portable file of it does not serve, and why."""
    return {
        "written_by": f"eyas {__version__}",
        "layout": layout,
        "engine": engine,
        "target": {"architecture": target.architecture, "fingerprint": target.fingerprint},
        "aux_layers": list(config.aux_layers),
        "draft": config.to_dict(),
        "not_for": not_for(config, target),
        "provenance": provenance,
    }


def checked(state: State, config: DraftConfig) -> State:
    """The state that will be written: checked against the config, without the teacher's tensors."""
    tensors = {name: tensor.detach() for name, tensor in state.items() if not names.teacher_only(name)}
    expected = names.expected_shapes(config)
    if config.draft_vocab_size == config.vocab_size:
        tensors = {name: tensor for name, tensor in tensors.items() if name not in ("d2t", "t2d")}
    elif "d2t" in tensors and "t2d" not in tensors:
        chosen = torch.zeros(config.vocab_size, dtype=torch.bool)
        chosen[tensors["d2t"].long().cpu() + torch.arange(len(tensors["d2t"]))] = True
        tensors["t2d"] = chosen
    if wrong := _unlike(tensors, expected):
        raise UsageError(f"draft to export: {wrong}. The config and the state differ.")
    if "d2t" in tensors:
        tensors["d2t"], tensors["t2d"] = tensors["d2t"].long(), tensors["t2d"].bool()
        chosen = tensors["t2d"].nonzero().flatten().cpu()
        ids = tensors["d2t"].cpu() + torch.arange(config.draft_vocab_size)
        if not torch.equal(chosen, ids):
            text = "d2t and t2d name different tokens; d2t must hold offsets in ascending order."
            raise UsageError(f"draft to export: {text}")
    return tensors


def _unlike(state: State, expected: dict[str, tuple[int, ...]]) -> str:
    """What in a state differs from the shapes of its config; the embedding may be the target's."""
    shapes = {name: tuple(state[name].shape) for name in expected if name in state}
    wrong = [f"{name} {shape}, expected {expected[name]}" for name, shape in shapes.items() if shape != expected[name]]
    missing, extra = expected.keys() - state.keys() - {"embed_tokens.weight"}, state.keys() - expected.keys()
    groups = {"missing": sorted(missing), "not in the config": sorted(extra), "of another shape": wrong}
    return next((f"tensors {what}: {', '.join(found[:5])}" for what, found in groups.items() if found), "")


def embedding_is_targets(embedding: "torch.Tensor | None", config: DraftConfig, target: Target) -> bool:
    if config.hidden_size != config.target_hidden_size:
        if embedding is None:
            raise UsageError("draft to export: narrower than its target, so it needs embed_tokens of its own.")
        return False
    if embedding is None:
        return True
    name = target.tensor_name("embedding")
    if name is None:
        return False
    return torch.equal(target.read_tensor(name).to(embedding.dtype), embedding.cpu())


def _write_weights(written: State, folder: Path, layout: str, shard_bytes: int | None) -> set[str]:
    """Write the tensors and return the names that the files really hold."""
    if layout == "eagle":
        torch.save(written, folder / "pytorch_model.bin")
        return set(torch.load(folder / "pytorch_model.bin", weights_only=True, mmap=True))
    if shard_bytes is None:
        save_file(written, folder / "model.safetensors", metadata={"format": "pt"})
        return set(read_header(folder / "model.safetensors")) - {"__metadata__"}
    split = split_torch_state_dict_into_shards(written, max_shard_size=shard_bytes)
    for file, members in split.filename_to_tensors.items():
        save_file({name: written[name] for name in members}, folder / file, metadata={"format": "pt"})
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        write_json(folder / "model.safetensors.index.json", index)
    return {n for file in split.filename_to_tensors for n in read_header(folder / file) if n != "__metadata__"}


def load_draft(path: str | Path, target: Target | None) -> tuple[DraftConfig, State]:
    """A draft of any layout back in internal names and its stored dtypes; teacher's tensors are left out.

    The embedding is read from the target where the draft has none, and a missing or stale t2d is rebuilt from d2t.
    Raises UsageError when a tensor is missing, unknown or of another shape; `eyas check` then says what and why.
    """
    path = Path(path)
    config = names.draft_config_from(read_json(path / "config.json"), target)
    stored, faults = read_folder(path)
    if faults:
        raise UsageError(f"{path}: the weights cannot be read ({'; '.join(faults)}). Copy or save them again.")
    state = {names.from_any(name): t.torch() for name, t in stored.items() if not names.teacher_only(name)}
    if config.draft_vocab_size == config.vocab_size:
        if "d2t" in state and state["d2t"].any():
            raise UsageError(f"{path}: a full vocabulary with a map that is not the identity. Run eyas check on it.")
        state.pop("d2t", None), state.pop("t2d", None)
    elif "d2t" in state:
        ids = state["d2t"].long() + torch.arange(len(state["d2t"]))
        if not (int(ids.min()) >= 0 and int(ids.max()) < config.vocab_size):
            raise UsageError(f"{path}: d2t leads outside the vocabulary; it must hold offsets. Run eyas check on it.")
        state["d2t"] = state["d2t"].long()
        state["t2d"] = torch.zeros(config.vocab_size, dtype=torch.bool).index_fill_(0, ids, True)
    if "embed_tokens.weight" not in state and target is not None and config.hidden_size == target.hidden_size:
        name = target.tensor_name("embedding")
        if name is not None:
            state["embed_tokens.weight"] = target.read_tensor(name)
    for twin, source in names.file_twins(config).items():
        repeated = state.pop(twin, None)
        if repeated is None:
            continue
        other = state.setdefault(source, repeated) if source else torch.zeros_like(repeated)
        if not torch.equal(repeated, other):
            raise UsageError(f"{path}: {twin} holds values of its own, for which eyas' draft has no place.")
    expected = names.expected_shapes(config)
    if wrong := _unlike(state, expected):
        raise UsageError(f"{path}: {wrong}. Run eyas check on it.")
    return config, {name: state[name] for name in expected if name in state}


def convert(folder: Path, target: str | None, out: Path, *, layout: str, vocabulary: Path | None, **form: Any) -> Json:
    """Write the draft in `folder` in another form (`export`'s options, and layout "gguf" with the target's GGUF as
    `vocabulary`); returns the engines that it is not for. Raises UsageError where `out` exists already."""
    if out.exists():
        raise UsageError(f"{out}: exists already. Name another folder with --out, or remove it.")
    if form["dtype"] not in ("bfloat16", "float16", "float32"):
        raise UsageError(f"--dtype {form['dtype']}: expected bfloat16, float16 or float32.")
    if target is None:
        raise UsageError(f"eyas export {folder}: name the draft's target with --target.")
    if not (folder / "config.json").exists():
        raise UsageError(f"{folder}: no draft. Expected config.json and its weights.")
    known = read_target(target)
    config, state = load_draft(folder, known)
    provenance = {"exported_from": str(folder)}
    if layout != "gguf":
        export(state, config, known, out, provenance=provenance, layout=layout, **form)
    elif vocabulary is None:
        raise UsageError("--layout gguf: give --vocabulary, the target's GGUF, whose tokenizer the draft shares.")
    else:
        from eyas.serving.llamacpp import export_gguf  # which imports this module

        export_gguf(state, config, known, out, provenance=provenance, vocabulary=vocabulary, dtype=form["dtype"])
    return {} if form["engine"] else not_for(config, known)
