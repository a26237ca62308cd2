"""Write a draft for engines, and read it back from any layout. The set of tensors is compared before and after."""

from pathlib import Path
from typing import TYPE_CHECKING

from eyas import __version__
from eyas.draft.config import DraftConfig
from eyas.errors import EyasError, UsageError
from eyas.files import atomic_folder, inside, read_json, write_json
from eyas.serving import contract, names
from eyas.serving.contract import ENGINES, Engine, Json
from eyas.target import Target, read_header

if TYPE_CHECKING:
    import torch

LAYOUTS = ("portable", "eagle", "speculators")
State = dict[str, "torch.Tensor"]


def not_for(config: DraftConfig, target: Target) -> dict[str, list[str]]:
    """Engines that cannot serve this draft from a portable file, each with the reasons (facts, not tensors)."""
    reasons: dict[str, list[str]] = {}
    full = config.draft_vocab_size == config.vocab_size
    for engine in ENGINES.values():
        found = _unsupported(config, engine)
        layers = contract.captured(engine, names.portable_config(config, target=target), target)
        if isinstance(layers, str):
            found.append(layers)
        elif layers != list(config.aux_layers) and engine.name != "trtllm":
            found.append(f"captures out{tuple(layers)}, the draft was trained on out{config.aux_layers}")
        if engine.name == "openvino" and full:
            found.append("needs a d2t of zeros beside a full vocabulary (eyas export --engine openvino)")
        problem = contract.target_problem(engine, target)
        if problem and problem[0] == "error":
            found.append(problem[1])
        if found:
            reasons[engine.name] = found
    return reasons


def _unsupported(config: DraftConfig, engine: Engine) -> list[str]:
    """Options of the draft that the engine has no means to honour, whatever the file looks like."""
    c, name, layers = config, engine.name, f"the draft has {config.num_layers}"
    latent, simple = bool(c.kv_lora_rank), name in ("llamacpp", "openvino")
    reasons = {
        "ignores norm_before_residual": c.norm_before_residual and not engine.norm_before_residual,
        "has no norm_before_fc": c.norm_before_fc and not engine.norm_before_fc,
        "has no fc_norm": c.fc_norm and not engine.fc_norm,
        "ignores norm_output": c.norm_output and not engine.norm_output,
        f"serves one decoder layer, {layers}": c.num_layers > 1 and engine.one_layer,
        f"takes three auxiliary layers, the draft has {len(c.aux_layers)}": len(c.aux_layers) != 3
        and engine.three_layers,
        "has no attention biases": c.attention_bias and (simple or name == "sglang"),
        "has no query and key norms": c.qk_norm and name != "vllm",
        "has no sliding window": c.sliding_window and simple,
        "knows no draft with latent attention": latent and simple,
        "has no norm_before_fc beside latent attention": latent and c.norm_before_fc and name in ("sglang", "vllm"),
        "needs q_lora_rank in latent attention": latent and name == "sglang" and not c.q_lora_rank,
        f"serves one decoder layer of latent attention, {layers}": latent and name == "sglang" and c.num_layers > 1,
    }
    return [reason for reason, met in reasons.items() if met]


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
    import torch

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
    limits = not_for(config, target)
    if engine and (reasons := [r for r in limits.get(engine, []) if "d2t of zeros" not in r]):
        raise EyasError(
            f"{ENGINES[engine].title} {ENGINES[engine].release} cannot serve this draft: {'; '.join(reasons)}."
        )

    cast = getattr(torch, dtype)
    rename = names.to_layout(layout)
    written = {
        rename(name, config.num_layers): (t.to(cast) if t.is_floating_point() else t).contiguous().cpu()
        for name, t in tensors.items()
    }
    make = names.speculators_config if layout == "speculators" else names.portable_config
    with atomic_folder(out) as folder:
        write_json(folder / "config.json", make(config, dtype=dtype, target=target))
        found = _write_weights(written, folder, layout, shard_bytes)
        if found != set(written):
            raise EyasError(
                f"{out}: wrote {len(found)} tensors of {len(written)}; nothing was kept. Please report this."
            )
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
    import torch

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
            raise UsageError(
                "draft to export: d2t and t2d name different tokens; d2t must hold offsets in ascending order."
            )
    return tensors


def _unlike(state: State, expected: dict[str, tuple[int, ...]]) -> str:
    """What in a state differs from the shapes of its config; the embedding may be the target's."""
    wrong = [
        f"{name} {tuple(state[name].shape)}, expected {shape}"
        for name, shape in expected.items()
        if name in state and tuple(state[name].shape) != shape
    ]
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
    name = target.tensor_name("embedding") if target.tensor_files else None
    if name is None:
        return False
    import torch

    return torch.equal(target.read_tensor(name).to(embedding.dtype), embedding.cpu())


def _write_weights(written: State, folder: Path, layout: str, shard_bytes: int | None) -> set[str]:
    """Write the tensors and return the names that the files really hold."""
    import torch
    from safetensors.torch import save_file

    if layout == "eagle":
        torch.save(written, folder / "pytorch_model.bin")
        return set(torch.load(folder / "pytorch_model.bin", weights_only=True, mmap=True))
    if shard_bytes is None:
        save_file(written, folder / "model.safetensors", metadata={"format": "pt"})
        return set(read_header(folder / "model.safetensors")) - {"__metadata__"}
    from huggingface_hub import split_torch_state_dict_into_shards

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
    import torch

    path = Path(path)
    config = names.draft_config_from(read_json(path / "config.json"), target)
    state = {
        names.from_any(name): tensor for name, tensor in _read_weights(path).items() if not names.teacher_only(name)
    }
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
        name = target.tensor_name("embedding") if target.tensor_files else None
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


def _read_weights(path: Path) -> State:
    import torch
    from safetensors.torch import load_file

    index = path / "model.safetensors.index.json"
    if index.exists():
        files = [inside(path, name) for name in sorted(set(read_json(index)["weight_map"].values()))]
    else:
        files = sorted(path.glob("*.safetensors"))
    state: State = {}
    try:
        if files:
            for file in files:
                state |= load_file(file)
        elif (path / "pytorch_model.bin").exists():
            state = torch.load(path / "pytorch_model.bin", map_location="cpu", weights_only=True, mmap=True)
        else:
            raise UsageError(f"{path}: no weights. Expected model.safetensors or pytorch_model.bin.")
    except UsageError:
        raise
    except Exception as error:  # safetensors and torch raise many kinds; all mean the same to the user
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UsageError(f"{path}: the weights cannot be read ({reason}). Copy or save them again.") from None
    return state
