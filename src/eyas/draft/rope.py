"""Rotary position embedding, of every kind Transformers knows, always built in float32."""

from typing import Any

import torch

from eyas.errors import UsageError


class _Rotate(torch.autograd.Function):
    """x [n, heads, d] turned by cos and sin [n, 1, r / 2]: channel i with channel i + r / 2. Backward turns back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        half = cos.shape[-1]
        left, right = x[..., : 2 * half].to(cos.dtype).chunk(2, -1)
        turned = torch.cat([left * cos - right * sin, right * cos + left * sin], -1).to(x.dtype)
        return torch.cat([turned, x[..., 2 * half :]], -1) if x.shape[-1] > 2 * half else turned

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        cos, sin = ctx.saved_tensors
        return _Rotate.apply(grad, cos, -sin), None, None


class Rope:
    """cos and sin tables [P, r / 2] in float32 for a head dimension of which the first r = partial * head_dim rotate.

    Multimodal RoPE (mrope) equals the plain kind on text, where its three position sections agree. Of longrope's two
    sets the long one is taken wherever `max_positions` is more than the original length: engines choose by the length that
    they serve, not by each text's as Transformers does.
    """

    def __init__(self, parameters: dict[str, Any], head_dim: int, max_positions: int) -> None:
        kind = parameters.get("rope_type", "default")
        theta = float(parameters.get("rope_theta", 10000.0))
        rotated = int(head_dim * float(parameters.get("partial_rotary_factor", 1.0)))
        self.scaling = 1.0
        if kind in ("default", "mrope"):
            exponent = torch.arange(0, rotated, 2, dtype=torch.int64).float() / rotated
            self.inverse = 1.0 / (theta**exponent)
        else:
            from transformers import LlamaConfig
            from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

            if kind not in ROPE_INIT_FUNCTIONS:
                raise UsageError(
                    f"rope_type {kind!r}: expected default, mrope or one of {sorted(ROPE_INIT_FUNCTIONS)}."
                )
            config = LlamaConfig(
                hidden_size=head_dim,
                num_attention_heads=1,
                head_dim=head_dim,
                max_position_embeddings=max_positions,
                rope_parameters={**parameters, "rope_theta": theta},
            )
            self.inverse, self.scaling = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), seq_len=max_positions)
        self.cos, self.sin = torch.empty(0), torch.empty(0)

    def _grow(self, length: int, device: torch.device) -> None:
        if self.cos.shape[0] >= length and self.cos.device == device:
            return
        length = max(1024, 1 << (length - 1).bit_length())
        angles = torch.outer(torch.arange(length, dtype=torch.float32), self.inverse.float()).to(device)  # [P, r / 2]
        self.cos, self.sin = angles.cos() * self.scaling, angles.sin() * self.scaling

    def rotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """x [n, heads, d] rotated at positions [n] (rotate-half pairing, as Llama); computed in at least float32."""
        self._grow(int(positions.max()) + 1 if len(positions) else 1, x.device)
        wide = torch.promote_types(x.dtype, torch.float32)
        return _Rotate.apply(x, self.cos[positions, None].to(wide), self.sin[positions, None].to(wide))
