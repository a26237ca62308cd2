"""The one state-dict adapter: tensor names and config.json between eyas and the layouts on disk.

Layouts: "portable" (engines.md §6: midlayer.*, explicit config), "eagle" (the same names in pytorch_model.bin),
"speculators" (layers.0.*, nested config). Internal names are those of the draft model: layers.{l}.*, fc, norm, ...
No torch here.
"""

import re

from eyas.draft.config import LATENT, DraftConfig, latent_sizes, rope_parameters
from eyas.errors import UsageError
from eyas.serving import contract
from eyas.serving.contract import FLAGSHIP, Json
from eyas.target import Target

# what wrappers leave in names: anywhere in the name, and at its beginning
_INSIDE = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
_LEADING = ("module.", "base_model.model.", "draft_model.", "eagle_module.", "model.")

_SAME = (  # keys of a Llama config that DraftConfig calls the same
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "vocab_size",
    "max_position_embeddings", "rms_norm_eps", "attention_bias",
)  # fmt: skip
_MLP = ("gate_proj", "up_proj", "down_proj")
_NORMS = ("input_layernorm", "hidden_norm", "post_attention_layernorm")


def from_any(name: str) -> str:
    """The internal name of a tensor stored under any known layout or wrapper; an unknown name is kept."""
    for part in _INSIDE:
        name = name.replace(part, "")
    while prefix := next((p for p in _LEADING if name.startswith(p)), None):
        name = name.removeprefix(prefix)
    for old, new in contract.FC_NORM.items():
        name = name.replace(old, new)
    name = re.sub(r"^midlayer\.(\d+)\.", r"layers.\1.", name)
    return re.sub(r"^midlayer\.", "layers.0.", name)


def to_portable(name: str, num_layers: int = 1) -> str:
    """The portable name of an internal one. Only a draft of one layer has a midlayer."""
    return name.replace("layers.0.", "midlayer.", 1) if num_layers == 1 else name


def teacher_only(name: str) -> bool:
    """The frozen copies of the target's head and norm that train a draft and are never exported."""
    return from_any(name).startswith("verifier_")


def expected_shapes(config: DraftConfig) -> dict[str, tuple[int, ...]]:
    """Internal name -> shape of every tensor of a complete draft; d2t and t2d only with a reduced vocabulary."""
    c = config
    shapes: dict[str, tuple[int, ...]] = {
        "embed_tokens.weight": (c.vocab_size, c.hidden_size),
        "fc.weight": (c.hidden_size, c.fc_in),
        "norm.weight": (c.hidden_size,),
        "lm_head.weight": (c.draft_vocab_size, c.hidden_size),
    }
    if c.fc_norm:
        shapes |= {f"fc_norm.{i}.weight": (c.target_hidden_size,) for i in range(len(c.aux_layers))}
    if c.norm_before_fc:
        shapes["input_norm.weight"] = (c.fc_in,)
    for layer in range(c.num_layers):
        prefix, width = f"layers.{layer}.", c.hidden_size * (2 if layer == 0 else 1)
        shapes |= {f"{prefix}{norm}.weight": (c.hidden_size,) for norm in _NORMS if layer == 0 or norm != "hidden_norm"}
        for part, shape in DraftConfig.attention_shapes(c, width).items():
            shapes[f"{prefix}self_attn.{part}.weight"] = shape
            if c.attention_bias and part in ("q_proj", "k_proj", "v_proj"):
                shapes[f"{prefix}self_attn.{part}.bias"] = shape[:1]
        for part in _MLP:
            inner, outer = c.intermediate_size, c.hidden_size
            shapes[f"{prefix}mlp.{part}.weight"] = (outer, inner) if part == "down_proj" else (inner, outer)
    if c.draft_vocab_size < c.vocab_size:
        shapes |= {"d2t": (c.draft_vocab_size,), "t2d": (c.vocab_size,)}
    return shapes


def file_twins(config: DraftConfig) -> dict[str, str]:
    """Tensor that files carry and the draft does not -> the tensor that it repeats, "" for zeros.

    Beyond the first layer vLLM reads input_layernorm and SGLang hidden_norm, so the one norm is written under both
    names. With attention_bias engines also build a bias for o_proj and would leave it uninitialised.
    """
    later = range(1, config.num_layers)
    twins = {f"layers.{layer}.hidden_norm.weight": f"layers.{layer}.input_layernorm.weight" for layer in later}
    if config.attention_bias:
        twins |= {f"layers.{layer}.self_attn.o_proj.bias": "" for layer in range(config.num_layers)}
    return twins


# ---- writing a config --------------------------------------------------------------------------------------------------


def _rope_keys(config: DraftConfig) -> Json:
    """Both spellings: `rope_parameters` (Transformers 5) and `rope_theta` + `rope_scaling` (before it).

    The draft rotates by one position per token, so the multimodal split of a target's RoPE is left out.
    """
    rope = {k: v for k, v in config.rope_parameters.items() if not k.startswith("mrope")}
    if rope.get("rope_type") == "mrope":
        rope["rope_type"] = "default"
    keys: Json = {"rope_theta": rope.get("rope_theta", 10000.0), "rope_parameters": rope}
    if "partial_rotary_factor" in rope:  # SGLang reads it here alone
        keys["partial_rotary_factor"] = rope["partial_rotary_factor"]
    if rope.get("rope_type", "default") != "default":
        keys["rope_scaling"] = {k: v for k, v in rope.items() if k != "rope_theta"}
    return keys


def _llama_keys(config: DraftConfig) -> Json:
    window: Json = {"sliding_window": config.sliding_window, "layer_types": ["sliding_attention"] * config.num_layers}
    heads: Json = {"head_dim": config.head_dim}
    if config.kv_lora_rank:
        heads = {key: getattr(config, key) for key in LATENT} | {"rope_interleave": True}
    return {  # kimi_k2, which both engines read as DeepSeek's: vLLM takes a draft of deepseek_v3 for its MTP module
        "model_type": "kimi_k2" if config.kv_lora_rank else "qwen3" if config.qk_norm else "llama",
        **{key: getattr(config, key) for key in _SAME},
        "num_hidden_layers": config.num_layers,
        **heads,
        "hidden_act": "silu",
        "mlp_bias": False,
        **_rope_keys(config),
        **(window if config.sliding_window else {}),
    }


def _draft_keys(config: DraftConfig, dtype: str) -> Json:
    same = ("draft_vocab_size", "target_hidden_size", "norm_before_residual")
    fixed = {"tie_word_embeddings": False, "dtype": dtype, "torch_dtype": dtype}
    return {key: getattr(config, key) for key in same} | fixed


def layer_keys(layers: list[int], target: Target) -> Json:
    """Ids in each engine's own numbering, or none at all when the layers are every engine's default.

    Nested: SGLang, out(v). Top level: vLLM and llama.cpp, in(v + 1). A target so shallow that its defaults coincide
    always gets its ids: engines drop the double and fc would find one state too few.
    """
    sglang_shifts = target.architecture.startswith("MiniMaxM3VL")  # its default lies one layer later
    if layers == contract.usual_layers(target.num_layers) and not sglang_shifts:
        return {}
    return {
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": contract.nested_ids(layers, target),
            "use_aux_hidden_state": True,
        },
        "eagle_aux_hidden_state_layer_ids": [layer + 1 for layer in layers],
        "num_aux_hidden_states": len(layers),
    }


def portable_config(config: DraftConfig, *, dtype: str = "bfloat16", target: Target) -> Json:
    """config.json in the portable safe form. Flags of EAGLE-3.1 appear only when they are on; norm_before_residual
    always, because its default differs between formats."""
    architecture = "Eagle3Qwen3ForCausalLM" if config.qk_norm else FLAGSHIP
    keys: Json = {
        "architectures": ["Eagle3DeepseekV2ForCausalLM" if config.kv_lora_rank else architecture],
        **_llama_keys(config),
        **_draft_keys(config, dtype),
        "bias": False,
        "use_cache": True,
        **layer_keys(list(config.aux_layers), target),
    }
    ends = ("bos_token_id", "eos_token_id")
    keys |= {name: target.text[name] for name in ends if target.text.get(name) is not None}
    if config.norm_before_fc:
        keys["norm_before_fc"] = True
        keys["eagle_config"] = keys.get("eagle_config", {"use_aux_hidden_state": True}) | {"norm_before_fc": True}
    return keys | {name: True for name in ("fc_norm", "norm_output") if getattr(config, name)}


def speculators_config(config: DraftConfig, *, dtype: str = "bfloat16", target: Target, tokens: int = 3) -> Json:
    """config.json of the speculators format; `tokens` is what its one proposal method drafts per round."""
    method = {"proposal_type": "greedy", "speculative_tokens": tokens, "accept_tolerance": 0.0, "verifier_accept_k": 1}
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        **_draft_keys(config, dtype),
        "norm_before_fc": config.norm_before_fc,
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
        "eagle_aux_hidden_state_layer_ids": [layer + 1 for layer in config.aux_layers],
        "num_aux_hidden_states": len(config.aux_layers),
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [method],
            "verifier": {"architectures": target.config.get("architectures") or [], "name_or_path": str(target.path)},
        },
        "transformer_layer_config": _llama_keys(config),
    }


# ---- reading a config --------------------------------------------------------------------------------------------------


def is_speculators(config_json: Json) -> bool:
    return "speculators_config" in config_json or "speculators_model_type" in config_json


def flatten(config_json: Json) -> Json:
    """A speculators config as a plain one, with that format's defaults; a plain config as it is."""
    if not is_speculators(config_json):
        return config_json
    inner = config_json.get("transformer_layer_config") or {}
    flat = {**inner, **{k: v for k, v in config_json.items() if k != "transformer_layer_config"}}
    flat.setdefault("norm_before_residual", True)
    for key in ("model_type", "vocab_size"):
        flat[key] = inner.get(key, flat.get(key))
    return flat


def flag(config: Json, name: str) -> bool:
    """A norm flag, wherever it stands."""
    return bool(config.get(name) or (config.get("eagle_config") or {}).get(name))


def intended_layers(config: Json, target: Target) -> tuple[list[int] | None, str]:
    """(physical layers, why) that the writer of this config meant; (None, why) when it contradicts itself."""
    nested, top = contract.layer_ids(config)
    from_nested = contract.physical_from_nested(nested, target) if nested else None
    from_top = [i - 1 for i in top] if top else None
    if from_nested and from_top and from_nested != from_top:
        text = f"the nested ids {nested} mean out{tuple(from_nested)}"
        return None, f"{text}, the top-level ids {top} out{tuple(from_top)}"
    if from_top:
        return from_top, f"top-level ids {top}"
    if from_nested:
        return from_nested, f"nested ids {nested}"
    return contract.usual_layers(target.num_layers), "no ids, so the usual default"


def _number(config: Json, name: str, default: int | None = None) -> int:
    value = config.get(name)
    if value is None:
        value = default
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise UsageError(f"config.json: {name} is {value!r}, expected a positive whole number. Run eyas check on it.")
    return value


def draft_config_from(config_json: Json, target: Target | None) -> DraftConfig:
    """The DraftConfig of a config.json in the portable, EAGLE or speculators form.

    Without ids the layers are the usual default, which takes the target to know. Raises UsageError where the config
    lacks a size or contradicts itself.
    """
    c = flatten(config_json)
    c = {**c, **latent_sizes(c)}
    nested, top = contract.layer_ids(c)
    if target is not None:
        layers, why = intended_layers(c, target)
        if layers is None:
            raise UsageError(f"config.json: {why}. Only one can be right; correct the other.")
        num_layers = target.num_layers
    elif nested or top:
        layers = [i - 1 for i in top] if top else contract.physical_from_nested(nested or [], None)
        num_layers = max(layers) + 1
    else:
        raise UsageError("config.json names no auxiliary layers, so they follow from the target: give --target.")
    hidden, vocab = _number(c, "hidden_size"), _number(c, "vocab_size")
    heads = _number(c, "num_attention_heads")
    return DraftConfig(
        hidden_size=hidden,
        target_hidden_size=_number(c, "target_hidden_size", hidden),
        vocab_size=vocab,
        draft_vocab_size=_number(c, "draft_vocab_size", vocab),
        num_attention_heads=heads,
        num_key_value_heads=_number(c, "num_key_value_heads", heads),
        head_dim=_number(c, "head_dim", hidden // heads),
        intermediate_size=_number(c, "intermediate_size"),
        aux_layers=tuple(layers),
        target_num_layers=num_layers,
        rms_norm_eps=float(c.get("rms_norm_eps") or 1e-6),
        rope_parameters=rope_parameters(c),
        max_position_embeddings=_number(c, "max_position_embeddings", 2048),
        num_layers=_number(c, "num_hidden_layers", 1),
        norm_before_residual=bool(c.get("norm_before_residual")),
        norm_before_fc=flag(c, "norm_before_fc"),
        fc_norm=flag(c, "fc_norm") or bool(c.get("use_aux_norm")),
        norm_output=bool(c.get("norm_output")),
        attention_bias=bool(c.get("attention_bias")),
        qk_norm=c.get("model_type") == "qwen3" or "Qwen3" in str(c.get("architectures")),
        sliding_window=c.get("sliding_window") if "sliding_attention" in str(c.get("layer_types")) else None,
        **({key: c[key] for key in LATENT} if c.get("kv_lora_rank") else {}),
    )
