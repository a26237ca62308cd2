"""A draft as one GGUF file for llama.cpp: the keys and tensors that llama.cpp's own converter writes.

The `gguf` package (eyas[gguf]) gives the container; what an EAGLE-3 draft is in it stands here.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from eyas.draft.config import DraftConfig
from eyas.draft.rope import Rope
from eyas.errors import EyasError, UsageError
from eyas.files import atomic_folder, write_json
from eyas.serving.contract import ENGINES
from eyas.serving.export import State, checked, embedding_is_targets, not_for, record
from eyas.target import Target

_LAYER = {
    "input_layernorm": "attn_norm", "hidden_norm": "attn_norm_2", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
_NAMES = {
    "embed_tokens.weight": "token_embd.weight", "fc.weight": "fc.weight", "input_norm.weight": "enc.output_norm.weight",
    "norm.weight": "output_norm.weight", "lm_head.weight": "output.weight",
} | {f"layers.0.{ours}.weight": f"blk.0.{theirs}.weight" for ours, theirs in _LAYER.items()}  # fmt: skip
_FILE_TYPES = {"float32": 0, "float16": 1, "bfloat16": 32}


def export_gguf(
    state: State,
    config: DraftConfig,
    target: Target,
    out: Path,
    *,
    provenance: dict[str, Any],
    vocabulary: Path,
    dtype: str = "bfloat16",
    name: str = "EAGLE-3 draft",
) -> Path:
    """Write folder `out` with draft.gguf and eyas.json, whole or not at all; returns the path of the GGUF.

    `vocabulary` is the target's GGUF, which llama-server needs anyway: its tokenizer keys are copied, so that draft and
    target cannot disagree. Matrices are stored in `dtype`, norms in float32, the map as absolute ids (int64).
    Raises EyasError for options that llama.cpp does not serve.
    """
    try:
        import gguf
    except ImportError:
        raise UsageError("GGUF export needs the gguf package: pip install 'eyas[gguf]'.") from None
    if reasons := not_for(config, target).get("llamacpp"):
        raise EyasError(f"{ENGINES['llamacpp']} cannot serve this draft: {'; '.join(reasons)}.")
    tensors = checked(state, config)
    if embedding_is_targets(tensors.get("embed_tokens.weight"), config, target):
        tensors.pop("embed_tokens.weight", None)
    with atomic_folder(out) as folder:
        writer = gguf.GGUFWriter(folder / "draft.gguf", "eagle3")
        _write_keys(writer, config, name, dtype)
        _copy_tokenizer(gguf, writer, Path(vocabulary), target)
        written = set()
        for inner, tensor in tensors.items():
            if inner == "t2d":
                continue
            if inner == "d2t":
                ids = tensor.cpu().numpy().astype(np.int64) + np.arange(len(tensor))
                writer.add_tensor("d2t", ids, raw_dtype=gguf.GGMLQuantizationType.I64)
            else:
                _add(gguf, writer, _NAMES[inner], _paired(inner, tensor, config), dtype)
            written.add(inner)
        if (factors := _llama3_factors(config)) is not None:
            writer.add_tensor("rope_freqs.weight", factors)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        if lost := set(tensors) - written - {"t2d"}:
            raise EyasError(f"{out}: tensors {', '.join(sorted(lost))} have no place in a GGUF; nothing was kept.")
        write_json(folder / "eyas.json", record(config, target, provenance, "gguf", "llamacpp"))
    return Path(out) / "draft.gguf"


def _write_keys(writer: Any, config: DraftConfig, name: str, dtype: str) -> None:
    c, rope = config, config.rope_parameters
    kind = rope.get("rope_type", "default")
    if kind not in ("default", "linear", "yarn", "llama3") or rope.get("partial_rotary_factor", 1.0) != 1.0:
        partial = f" on {rope['partial_rotary_factor']} of a head" if "partial_rotary_factor" in rope else ""
        raise UsageError(f"RoPE of type {kind!r}{partial} has no GGUF form for an EAGLE-3 draft.")
    writer.add_array("eagle3.target_layers", [layer + 1 for layer in c.aux_layers])
    writer.add_uint32("eagle3.target_hidden_size", c.target_hidden_size)
    writer.add_bool("eagle3.norm_before_residual", c.norm_before_residual)
    writer.add_bool("eagle3.norm_before_fc", c.norm_before_fc)
    keys: dict[str, Any] = {
        "type": "model", "name": name, "block_count": 1, "context_length": c.max_position_embeddings,
        "embedding_length": c.hidden_size, "feed_forward_length": c.intermediate_size,
        "head_count": c.num_attention_heads, "head_count_kv": c.num_key_value_heads, "key_length": c.head_dim,
        "value_length": c.head_dim, "rope_dimension_count": c.head_dim, "rope_freq_base": rope["rope_theta"],
        "layer_norm_rms_eps": c.rms_norm_eps, "vocab_size": c.vocab_size, "file_type": _FILE_TYPES[dtype],
        "quantization_version": 2,
    }  # fmt: skip
    if kind in ("linear", "yarn"):
        writer.add_string("eagle3.rope.scaling.type", kind)
        keys["rope_scaling_factor"] = rope["factor"]
    if kind == "yarn":
        keys["rope_scaling_orig_ctx_len"] = rope["original_max_position_embeddings"]
        yarn = {"attention_factor": "attn_factor", "beta_fast": "beta_fast", "beta_slow": "beta_slow"}
        keys |= {f"rope_scaling_yarn_{yarn[key]}": rope[key] for key in yarn if rope.get(key) is not None}
    for key, value in keys.items():
        getattr(writer, f"add_{key}")(value)


def _copy_tokenizer(gguf: Any, writer: Any, source: Path, target: Target) -> None:
    if not source.is_file():
        raise UsageError(f"{source}: no such file. Expected the target's GGUF, whose tokenizer the draft shares.")
    try:
        fields = gguf.GGUFReader(source).fields
    except Exception as error:  # the reader raises many kinds for damaged files
        raise UsageError(f"{source}: not a readable GGUF ({error}).") from None
    tokens = fields.get("tokenizer.ggml.tokens")
    if tokens is None or len(tokens.data) != target.vocab_size:
        found = 0 if tokens is None else len(tokens.data)
        raise UsageError(f"{source}: {found} tokens, the target has {target.vocab_size}. Give the GGUF of this target.")
    for key, field in fields.items():
        if key.startswith("tokenizer."):
            kinds = field.types
            sub = kinds[1] if kinds[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(key, field.contents(), kinds[0], sub)


def _paired(name: str, tensor: "torch.Tensor", config: DraftConfig) -> "torch.Tensor":
    """Queries and keys in GGUF's order of rotation: neighbours rotate together, not the halves of a head."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    count = next((n for part, n in heads.items() if part in name), None)
    if count is None:
        return tensor
    return tensor.view(count, 2, config.head_dim // 2, -1).transpose(1, 2).reshape(tensor.shape)


def _add(gguf: Any, writer: Any, name: str, tensor: "torch.Tensor", dtype: str) -> None:
    kinds = gguf.GGMLQuantizationType
    if tensor.dim() == 1 or dtype == "float32":
        writer.add_tensor(name, tensor.float().cpu().contiguous().numpy())
    elif dtype == "float16":
        writer.add_tensor(name, tensor.half().cpu().contiguous().numpy())
    else:  # numpy has no bfloat16: its bytes are handed over with their type beside them
        raw = tensor.bfloat16().cpu().contiguous().view(torch.uint8).numpy()
        writer.add_tensor(name, raw, raw_dtype=kinds.BF16)


def _llama3_factors(config: DraftConfig) -> "np.ndarray[Any, np.dtype[np.float32]] | None":
    """By what llama.cpp divides each frequency, [head_dim / 2] float32; None unless the RoPE is of type llama3."""
    rope = config.rope_parameters
    if rope.get("rope_type") != "llama3":
        return None
    plain = {"rope_theta": rope["rope_theta"]}
    usual, scaled = (Rope(kind, config.head_dim, config.max_position_embeddings).inverse for kind in (plain, rope))
    return (usual / scaled).numpy()
