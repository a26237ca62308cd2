"""The shape of a draft, in eyas' own terms. `serving.names` writes it for engines and reads theirs."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from eyas.errors import UsageError
from eyas.target import Target, default_aux_layers

LATENT = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


@dataclass(frozen=True)
class DraftConfig:
    """Sizes and options of one EAGLE-3 draft (eagle3.md). Layers are physical outputs out(v), ascending.

    hidden_size is D, target_hidden_size H, vocab_size V, draft_vocab_size Vd.
    rope_parameters follows Transformers 5: {"rope_type", "rope_theta", ...}.
    kv_lora_rank makes it multi-head latent attention (DeepSeek-V2, arXiv:2405.04434); head_dim is then the width to which
    keys and values are laid out, and q_lora_rank None a full query matrix.
    """

    hidden_size: int
    target_hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    aux_layers: tuple[int, ...]
    target_num_layers: int
    rms_norm_eps: float = 1e-6
    rope_parameters: dict[str, Any] = field(default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0})
    max_position_embeddings: int = 2048
    num_layers: int = 1
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    attention_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None
    q_lora_rank: int | None = None
    kv_lora_rank: int | None = None
    qk_nope_head_dim: int = 0
    qk_rope_head_dim: int = 0
    v_head_dim: int = 0

    def __post_init__(self) -> None:
        if self.draft_vocab_size > self.vocab_size:
            raise UsageError(f"draft vocabulary {self.draft_vocab_size} is larger than the target's {self.vocab_size}.")
        if self.num_attention_heads % self.num_key_value_heads:
            raise UsageError(
                f"{self.num_attention_heads} heads cannot share {self.num_key_value_heads} key/value heads."
            )
        if list(self.aux_layers) != sorted(set(self.aux_layers)):
            raise UsageError(f"auxiliary layers {list(self.aux_layers)}: expected ascending, each once.")
        if self.aux_layers and not 0 <= self.aux_layers[0] <= self.aux_layers[-1] < self.target_num_layers:
            raise UsageError(
                f"auxiliary layers {list(self.aux_layers)}: the target has layers 0..{self.target_num_layers - 1}."
            )
        scaled = self.rope_parameters.get("rope_type", "default") not in ("default", "yarn")
        if self.kv_lora_rank and (self.attention_bias or self.qk_norm or self.sliding_window or scaled):
            raise UsageError(
                "latent attention: engines know it without attention_bias, qk_norm and sliding_window, and with RoPE of type default or yarn."
            )

    @property
    def fc_in(self) -> int:
        """Width of the concatenated auxiliary states."""
        return len(self.aux_layers) * self.target_hidden_size

    def attention_shapes(self, inputs: int) -> dict[str, tuple[int, ...]]:
        """Matrices [out, in] and norms of an attention that reads `inputs` channels."""
        c, heads = self, self.num_attention_heads
        if not c.kv_lora_rank:
            queries, key_value = heads * c.head_dim, c.num_key_value_heads * c.head_dim
            norms = {"q_norm": (c.head_dim,), "k_norm": (c.head_dim,)} if c.qk_norm else {}
            matrices = {"q_proj": (queries, inputs), "k_proj": (key_value, inputs), "v_proj": (key_value, inputs)}
            return {**matrices, "o_proj": (c.hidden_size, queries), **norms}
        queries, low = heads * (c.qk_nope_head_dim + c.qk_rope_head_dim), c.q_lora_rank
        shapes: dict[str, tuple[int, ...]] = {"q_proj": (queries, inputs)}
        if low:
            shapes = {"q_a_proj": (low, inputs), "q_a_layernorm": (low,), "q_b_proj": (queries, low)}
        return shapes | {
            "kv_a_proj_with_mqa": (c.kv_lora_rank + c.qk_rope_head_dim, inputs),
            "kv_a_layernorm": (c.kv_lora_rank,),
            "kv_b_proj": (heads * (c.qk_nope_head_dim + c.v_head_dim), c.kv_lora_rank),
            "o_proj": (c.hidden_size, heads * c.v_head_dim),
        }

    @property
    def softmax_scale(self) -> float:
        """What scores are multiplied by: latent attention counts YaRN's mscale here, as DeepSeek's models do."""
        if not self.kv_lora_rank:
            return self.head_dim**-0.5
        rope = self.rope_parameters
        mscale = 1.0 + 0.1 * rope.get("mscale_all_dim", 0.0) * math.log(max(1.0, rope.get("factor", 1.0)))
        return (self.qk_nope_head_dim + self.qk_rope_head_dim) ** -0.5 * mscale**2

    @property
    def step_parameters(self) -> int:
        """Matrix parameters that one draft step reads, without the head: its layers'."""
        total = self.num_layers * 3 * self.hidden_size * self.intermediate_size
        for index in range(self.num_layers):
            shapes = self.attention_shapes(self.hidden_size * (2 if index == 0 else 1)).values()
            total += sum(math.prod(shape) for shape in shapes if len(shape) == 2)
        return total

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"aux_layers": list(self.aux_layers)}

    @classmethod
    def from_dict(cls, value: dict[str, Any]) -> "DraftConfig":
        return cls(**(value | {"aux_layers": tuple(value["aux_layers"])}))


def rope_parameters(text: dict[str, Any]) -> dict[str, Any]:
    """RoPE parameters of a target's text config, from `rope_parameters` or the older `rope_theta` + `rope_scaling`."""
    found = text.get("rope_parameters")
    if isinstance(found, dict):
        if "rope_type" not in found and "full_attention" in found:  # one set per layer type: the draft attends fully
            found = found["full_attention"]
        parameters = dict(found)
    else:
        parameters = dict(text.get("rope_scaling") or {})
    kind = parameters.pop("type", None) or parameters.get("rope_type") or "default"
    parameters["rope_type"] = "longrope" if kind == "su" else kind  # Phi-3's first name for it
    parameters["rope_theta"] = parameters.get("rope_theta") or text.get("rope_theta") or 10000.0
    beside = ("partial_rotary_factor", *(["original_max_position_embeddings"] if kind != "default" else []))
    for key in beside:  # where older configs hold them
        if text.get(key) is not None:
            parameters.setdefault(key, text[key])
    return parameters


def latent_sizes(config: Mapping[str, Any]) -> dict[str, Any]:
    """The sizes of a config's latent attention, as DraftConfig has them; empty where it has none."""
    if not config.get("kv_lora_rank"):
        return {}
    sizes = {key: config.get(key) for key in LATENT}
    if missing := [key for key in LATENT[1:] if not sizes[key]]:
        raise UsageError(f"config.json: latent attention (kv_lora_rank) without {', '.join(missing)}.")
    width = max(config["qk_nope_head_dim"] + config["qk_rope_head_dim"], config["v_head_dim"])
    return sizes | {"num_key_value_heads": config["num_attention_heads"], "head_dim": width}


def draft_config_for(target: Target, draft_vocab_size: int | None = None, **options: Any) -> DraftConfig:
    """The draft that EAGLE-3 gives a target: one Llama-style layer of the target's own width and heads.

    attention="latent" takes the target's latent attention instead, or the sizes among `options`.
    """
    text = target.text
    if options.pop("attention", "llama") == "latent":
        sizes = latent_sizes({**text, **options})
        if not sizes:
            raise UsageError(f"draft.attention: latent, but {target.path} has no latent attention (kv_lora_rank).")
        options |= sizes
    heads = int(options.pop("num_attention_heads", None) or text.get("num_attention_heads") or 0)
    hidden = int(options.pop("hidden_size", None) or target.hidden_size)
    key_value = int(options.pop("num_key_value_heads", None) or text.get("num_key_value_heads") or heads)
    own = text.get("v_head_dim") if text.get("kv_lora_rank") else text.get("head_dim")  # MLA's head_dim is RoPE's part
    head_dim = int(options.pop("head_dim", None) or own or hidden // heads)
    inner = int(options.pop("intermediate_size", None) or text.get("intermediate_size") or 4 * hidden)
    layers = options.pop("aux_layers", None) or default_aux_layers(target.num_layers)
    return DraftConfig(
        hidden_size=hidden,
        target_hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        draft_vocab_size=draft_vocab_size or target.vocab_size,
        num_attention_heads=heads,
        num_key_value_heads=key_value,
        head_dim=head_dim,
        intermediate_size=inner,
        aux_layers=tuple(layers),
        target_num_layers=target.num_layers,
        rms_norm_eps=target.rms_norm_eps,
        # whole heads turn: engines differ in where they look for a share, llama.cpp's drafts know none
        rope_parameters={k: v for k, v in rope_parameters(text).items() if k != "partial_rotary_factor"},
        max_position_embeddings=target.max_positions,
        **options,
    )
