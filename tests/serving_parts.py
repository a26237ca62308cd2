"""A small target and a healthy draft of it on disk, and ways to break the draft, for the tests of serving."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from eyas.draft.config import DraftConfig, draft_config_for
from eyas.serving import names
from eyas.serving.export import export
from eyas.target import Target, read_target

LAYERS, HIDDEN, VOCAB, DRAFT_VOCAB = 12, 32, 96, 40


def make_target(folder: Path, **changes: Any) -> Target:
    """A random Llama of the real class, 12 layers, saved as Hugging Face does."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=HIDDEN, intermediate_size=64, num_hidden_layers=LAYERS, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, vocab_size=VOCAB, max_position_embeddings=512, eos_token_id=2, bos_token_id=1,
        rope_parameters={"rope_type": "default", "rope_theta": 50000.0}, dtype="bfloat16",
    )  # fmt: skip
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    if changes:
        raw = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(raw | changes))
    return read_target(folder)


def make_state(config: DraftConfig, target: Target, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random weights by internal name; the embedding is the target's, ids 0..2 and others are in the vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    state: dict[str, torch.Tensor] = {}
    for name, shape in names.expected_shapes(config).items():
        if name not in ("d2t", "t2d"):
            state[name] = torch.randn(shape, generator=generator).to(torch.bfloat16)
    if config.hidden_size == target.hidden_size:
        state["embed_tokens.weight"] = target.read_tensor(target.tensor_name("embedding") or "")
    if config.draft_vocab_size < config.vocab_size:
        ids = torch.cat([torch.arange(3), 3 + torch.randperm(config.vocab_size - 3, generator=generator)])
        ids = ids[: config.draft_vocab_size].sort().values
        state["d2t"] = ids - torch.arange(config.draft_vocab_size)
        state["t2d"] = torch.zeros(config.vocab_size, dtype=torch.bool).index_fill_(0, ids, True)
    return state


def make_draft(
    folder: Path, target: Target, vocab: int | None = DRAFT_VOCAB, keep_record: bool = False, **options: Any
) -> Path:
    """A healthy draft in the portable layout. Without eyas.json, as a stranger's would be."""
    config = draft_config_for(target, vocab, **options)
    export(make_state(config, target), config, target, folder, provenance={})
    if not keep_record:
        (folder / "eyas.json").unlink()
    return folder


def edit(
    draft: Path,
    config: Callable[[dict[str, Any]], Any] | None = None,
    tensors: Callable[[dict[str, torch.Tensor]], Any] | None = None,
) -> Path:
    """Change the config or the tensors of a draft in place; each function edits the dict it is given."""
    if config:
        raw = json.loads((draft / "config.json").read_text())
        config(raw)
        (draft / "config.json").write_text(json.dumps(raw))
    if tensors:
        state = load_file(draft / "model.safetensors")
        tensors(state)
        save_file({name: tensor.contiguous() for name, tensor in state.items()}, draft / "model.safetensors")
    return draft


def rename(old: str, new: str) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(state: dict[str, torch.Tensor]) -> None:
        for name in [name for name in state if name.startswith(old)]:
            state[new + name.removeprefix(old)] = state.pop(name)

    return change


def absolute(state: dict[str, torch.Tensor]) -> None:
    state["d2t"] = state["d2t"] + torch.arange(len(state["d2t"]))


def numpy_state(draft: Path) -> dict[str, np.ndarray]:
    return {name: tensor.float().numpy() for name, tensor in load_file(draft / "model.safetensors").items()}
