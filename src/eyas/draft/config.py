"""The shape of a draft, in eyas' own terms. `serving.names` writes it for engines and reads theirs."""

from dataclasses import asdict, dataclass, field
from typing import Any

from eyas.errors import UsageError
from eyas.target import Target, default_aux_layers


@dataclass(frozen=True)
class DraftConfig:
    """Sizes and options of one EAGLE-3 draft (eagle3.md). Layers are physical outputs out(v), ascending.

    hidden_size is D, target_hidden_size H, vocab_size V, draft_vocab_size Vd.
    rope_parameters follows Transformers 5: {"rope_type", "rope_theta", ...}.
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

    @property
    def fc_in(self) -> int:
        """Width of the concatenated auxiliary states."""
        return len(self.aux_layers) * self.target_hidden_size

    @property
    def step_parameters(self) -> int:
        """Matrix parameters that one draft step reads, without the head: its layers'."""
        heads, key_value = self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        total = 0
        for index in range(self.num_layers):
            inputs = self.hidden_size * (2 if index == 0 else 1)
            total += inputs * (heads + 2 * key_value) + heads * self.hidden_size
            total += 3 * self.hidden_size * self.intermediate_size
        return total

    @property
    def default_layers(self) -> bool:
        return list(self.aux_layers) == default_aux_layers(self.target_num_layers)

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
        parameters["rope_theta"] = text.get("rope_theta", 10000.0)
    parameters["rope_type"] = parameters.pop("type", None) or parameters.get("rope_type") or "default"
    parameters.setdefault("rope_theta", text.get("rope_theta", 10000.0))
    return parameters


def draft_config_for(target: Target, draft_vocab_size: int | None = None, **options: Any) -> DraftConfig:
    """The draft that EAGLE-3 gives a target: one Llama-style layer of the target's own width and heads."""
    text = target.text
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
        rope_parameters=rope_parameters(text),
        max_position_embeddings=target.max_positions,
        **options,
    )
