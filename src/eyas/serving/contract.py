"""What each serving engine does with an EAGLE-3 draft: one table of facts, for the engine releases named here.

Nothing about an engine stands anywhere else. A draft's layers are physical outputs out(v), 0-based; `in(k) = out(k-1)`.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyas.target import Target

Json = dict[str, Any]

FLAGSHIP = "LlamaForCausalLMEagle3"
LLAMA_LAYERS = 32  # LlamaConfig's default for num_hidden_layers


@dataclass(frozen=True)
class Engine:
    """An engine release. `architectures`: the strings it serves as an EAGLE-3 draft."""

    name: str
    title: str
    release: str
    architectures: frozenset[str]
    speculators: bool  # reads the speculators format
    default_layers: Callable[[int], list[int]]
    three_layers: bool = False  # exactly three auxiliary layers
    own_embedding: bool = False  # keeps the draft's embedding where it differs from the target's
    fc_norm: bool = False
    norm_before_fc: str = ""  # where the flag is read: "either" | "top" | "nested" | "" (nowhere)
    norm_output: bool = False
    norm_before_residual: bool = False
    zero_bias: bool = False  # a bias that no tensor fills is zeros, not uninitialised
    later_norm: str = "hidden_norm"  # what normalises the input of decoder layers beyond the first

    def __str__(self) -> str:
        return f"{self.title} {self.release}"


def usual_layers(n: int) -> list[int]:
    """out(1), out(n//2 - 1), out(n - 4): the default of everybody but OpenVINO, even where two of them coincide."""
    return [1, n // 2 - 1, n - 4]


def openvino_layers(n: int) -> list[int]:
    return [2, n // 2, n - 3]


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_LLAMA = frozenset({FLAGSHIP, "Eagle3LlamaForCausalLM"})
_VLLM = _LLAMA.union(
    ("Eagle3MiniMaxM2ForCausalLM", "Eagle3Qwen2_5vlForCausalLM", "Eagle3Qwen3vlForCausalLM", "MiniMaxM2ForCausalLM"),
    ("LlamaForCausalLM", "Eagle3Qwen3ForCausalLM"),  # the first becomes Eagle3LlamaForCausalLM
    ("Eagle3DeepseekV2ForCausalLM", "Eagle3DeepseekV3ForCausalLM", "DeepseekV3ForCausalLM"),  # latent attention
)
SPECULATORS = frozenset({"Eagle3Speculator", "Eagle3DraftModel"})

ENGINES: dict[str, Engine] = {
    engine.name: engine
    for engine in (
        Engine(
            "sglang", "SGLang", "0.5.23", frozenset({FLAGSHIP}), False, usual_layers,
            fc_norm=True, norm_before_fc="either", norm_output=True, zero_bias=True,
        ),
        Engine(
            "vllm", "vLLM", "0.32.0", _VLLM, True, usual_layers,
            own_embedding=True, fc_norm=True, norm_before_fc="either", norm_output=True, norm_before_residual=True,
            later_norm="input_layernorm",
        ),
        Engine(
            "llamacpp", "llama.cpp", "b11434", _LLAMA | {"LlamaForCausalLM"}, True, usual_layers,
            three_layers=True, own_embedding=True, norm_before_fc="top", norm_before_residual=True,
        ),
        Engine(
            "openvino", "OpenVINO GenAI", "2026.4.1", _LLAMA, False, openvino_layers, three_layers=True,
        ),
        Engine(
            "trtllm", "TensorRT-LLM", "1.4rc (by reading)", frozenset(), False, usual_layers,
            fc_norm=True, norm_before_fc="nested", norm_output=True,
        ),
    )
}  # fmt: skip
ALL = ("sglang", "vllm", "llamacpp", "openvino")  # what "all" means; "trtllm" was never run and must be named


PROGRAMS = {"sglang": "python -m sglang.launch_server", "vllm": "vllm serve", "llamacpp": "llama-server"}


def speculative_flags(engine: str, draft: str, k: int, topk: int = 1, total: int | None = None) -> str:
    """How a server is told to draft K tokens a round: a chain, or (SGLang) a tree of `total` tokens; "" without server."""
    config = json.dumps({"method": "eagle3", "model": draft, "num_speculative_tokens": k})
    flags = {
        "sglang": f"--speculative-algorithm EAGLE3 --speculative-draft-model-path {draft} --speculative-num-steps {k} "
        f"--speculative-eagle-topk {topk} --speculative-num-draft-tokens {total or k + 1}",
        "vllm": f"--speculative-config '{config}'",
        "llamacpp": f"--spec-type draft-eagle3 --spec-draft-n-max {k} --spec-draft-p-min 0",
    }
    return flags.get(engine, "")


def serve_command(engine: str, target: str, draft: str, k: int) -> str:
    """The command that serves a target with its draft, K tokens a round (llama.cpp: both converted); "" without server."""
    if engine not in PROGRAMS:
        return ""
    pair = {"sglang": f"--model-path {target}", "vllm": target, "llamacpp": f"-m {target}.gguf -md {draft}.gguf"}
    return f"{PROGRAMS[engine]} {pair[engine]} {speculative_flags(engine, draft, k)}"


# ---- auxiliary layers ------------------------------------------------------------------------------------------------

_SGLANG_DEEPSEEK = ("DeepseekV2", "DeepseekV3", "KimiK25", "MistralLarge3", "GlmMoeDsa", "Glm4MoeLite")
_SGLANG_LAST_LAYER = ("GptOss", "Gemma4", "MiniMaxM3")  # can capture out(n-1)


def nested_ids(layers: list[int], target: Target) -> list[int]:
    """Physical layers in SGLang's numbering for this target, as `eagle_config.eagle_aux_hidden_state_layer_ids`.

    Most targets: the layers themselves. DeepSeek relatives read the list as in(k) unless it begins with 1, and
    gpt-oss does when its largest id is n; SGLang captures by membership, so the order of the list is free.
    """
    if target.architecture.startswith(_SGLANG_DEEPSEEK) and layers[0] != 1:
        ids = [layer + 1 for layer in layers]
        return ids if ids[0] != 1 else ids[1:] + ids[:1]
    if target.architecture.startswith("GptOss") and layers[-1] == target.num_layers - 1:
        return [layer + 1 for layer in layers]
    return list(layers)


def physical_from_nested(ids: list[int], target: Target | None) -> list[int]:
    """What SGLang captures for nested ids: the inverse of `nested_ids`."""
    entering = False
    if target is not None and target.architecture.startswith(_SGLANG_DEEPSEEK):
        entering = ids[0] != 1
    elif target is not None and target.architecture.startswith("GptOss"):
        entering = max(ids) == target.num_layers
    return sorted({i - entering for i in ids})


def layer_ids(config: Json) -> tuple[list[int] | None, list[int] | None]:
    """(nested ids, top-level ids) of a config; None where absent or null."""
    nested = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    return nested or None, config.get("eagle_aux_hidden_state_layer_ids") or None


def captured(engine: Engine, config: Json, target: Target) -> list[int] | str:
    """The physical layers, in the order of their concatenation, that the engine gives this draft; or why it fails."""
    n = target.num_layers
    nested, top = layer_ids(config)
    layers = engine.default_layers(n)
    if engine.name == "sglang" and nested:
        layers = physical_from_nested(nested, target)
        if not target.architecture.startswith(_SGLANG_LAST_LAYER) and layers[-1] >= n - 1:
            return f"out({layers[-1]}) cannot be captured on {target.architecture}: one state too few reaches fc"
    elif engine.name == "sglang" and target.architecture.startswith("MiniMaxM3VL"):
        layers = [layer + 1 for layer in layers]
    elif engine.name == "vllm" and (top or nested):
        layers = sorted({i - 1 for i in top or nested or []})
    elif engine.name == "llamacpp" and top:
        layers = [i - 1 for i in top]
        if layers[-1] == n - 1 and target.model_type == "llama":
            return f"id {n} (the last layer) gives no usable state on a Llama target, and nothing is said"
    if engine.name == "openvino" and n < 10:
        return f"the target has {n} layers; at least 10 are needed"
    if min(layers) < -1 or max(layers) >= n:
        return f"layer out({max(layers)}) does not exist in a target of {n} layers"
    if engine.name != "llamacpp":  # everybody else captures in ascending order, each layer once
        layers = sorted(set(layers))
    return layers


# ---- targets each engine can take auxiliary states from ---------------------------------------------------------------


_SGLANG_TARGETS = _words(
    "Apertus Bailing Cosmos3 Deepseek ExaoneMoe ExaoneMoE Gemma3 Gemma4 Glm4Moe Glm5Next GlmMoeDsa GptOss IQuestCoder "
    "InternLM3 InternS1Pro InternS2 KimiK25 KimiK2 Llama Longcat Mellum MindSpore MiniMaxM2 MiniMaxM3 Ministral3 "
    "Mistral MistralLarge3 Phi3 Qwen2 Qwen3 Qwen4 SarvamMoE TeleFLM"
)
_SGLANG_NOT = ("Mistral3", "MistralForSequence", "Qwen2VL", "Qwen2Audio", "Qwen3Omni")
_LLAMACPP_TYPES = _words(
    "bailing_moe_v3 deepseek_v4 gemma4 gemma4_text hunyuan_vl lfm2 llama smollm mistral mimo2 mimo_v2 minimax_text_01 "
    "minimax_m2 nanbeige nemotron_h gpt_oss qwen3 qwen3_5 qwen3_5_text qwen3_5_moe qwen3_5_moe_text qwen3_moe "
    "qwen3_next qwen4_exp"
)
_LLAMACPP_NOT = _words(
    "qwen2 qwen2_moe qwen2_vl qwen2_5_vl qwen3_vl llama4 llama4_text gemma2 gemma3 gemma3_text deepseek_v2 deepseek_v3 "
    "kimi_k2 kimi_k25 mistral3 phi3 granite granitemoe"
)


def target_problem(engine: Engine, target: Target) -> tuple[str, str] | None:
    """(severity, sentence) when the engine cannot, or perhaps cannot, take auxiliary states from this target."""
    name, kind = target.architecture, target.model_type
    if engine.name == "sglang":
        if name.startswith(_SGLANG_NOT) or not name.startswith(_SGLANG_TARGETS):
            return "error", "this target class has no set_eagle3_layers_to_capture: ValueError at start"
    elif engine.name == "vllm" and name.startswith("Gemma3"):
        return "error", "RuntimeError at start: the model does not support the EAGLE-3 interface"
    elif engine.name == "llamacpp":
        if kind in _LLAMACPP_NOT:
            return "error", "its graph has no layer inputs to read: the server aborts ('layer input tensor is null')"
        if kind not in _LLAMACPP_TYPES:
            return "warn", "not among the targets whose graph is known to expose layer inputs; the server may abort"
    elif engine.name == "openvino" and any(
        target.text.get(key) for key in ("num_experts", "num_local_experts", "n_routed_experts")
    ):
        return "error", "mixture-of-experts targets expose no last hidden state: the first generate() fails"
    return None


# ---- where each engine puts a tensor ----------------------------------------------------------------------------------

RAISES, DROPS = "!raises", "!drops"
# SGLang's older names
FC_NORM = {"aux_norm_low": "fc_norm.0", "aux_norm_mid": "fc_norm.1", "aux_norm_high": "fc_norm.2"}


def place(engine: Engine, name: str, places: set[str]) -> str:
    """The parameter (internal name) that a stored tensor fills, or RAISES, or DROPS (nothing is said).

    `places` holds the internal names of the parameters that the engine builds for this config, "d2t" included.
    """
    if engine.name == "sglang":
        for old, new in {"midlayer": "layers.0", **FC_NORM}.items():
            name = name.replace(old, new)
        if maps := [part for part in ("d2t", "t2d") if part in name]:
            return maps[0]
        bare = name.removeprefix("model.")
        return bare if bare in places and (name == bare or bare != "lm_head.weight") else DROPS
    if engine.name == "vllm":
        if "t2d" in name:
            return "t2d"
        if "d2t" in name:
            return "d2t" if name == "d2t" and "d2t" in places else RAISES
        bare = name.replace("midlayer.", "layers.0.", 1)
        if bare in places:
            return bare
        quiet = name.endswith((".bias", "inv_freq", "cos_cached", "sin_cached")) or "mask_hidden" in name
        return DROPS if quiet or "input_norm." in name or ("fc." in name and "fc.weight" not in places) else RAISES
    if engine.name == "llamacpp":
        bare = name
        for old in ("model.layers.0.", "midlayer."):
            bare = "layers.0." + bare.removeprefix(old) if bare.startswith(old) else bare
        if bare in ("model.norm.weight", "model.embed_tokens.weight", "model.fc.weight"):
            bare = bare.removeprefix("model.")
        if bare.endswith(".rotary_emb.inv_freq"):
            return DROPS
        return bare if bare in places or bare == "t2d" else RAISES
    if engine.name == "openvino":
        name = name.removeprefix("model.")
        if name.startswith("layers."):
            return DROPS
    bare = name.replace("midlayer.", "layers.0.", 1)
    return bare if bare in places or bare == "t2d" else DROPS


# ---- what a fault does -------------------------------------------------------------------------------------------------

_LOST = "acceptance falls to about 1.0, with no message"
_PAST = "an index error (on a GPU an assertion of the device) as soon as it is drafted"
Effect = tuple[str, str, str]


def _effects() -> dict[str, dict[str, Effect]]:
    """rule -> engine -> (severity, outcome, what will happen), from effects.txt, which explains itself."""
    found: dict[str, dict[str, Effect]] = {}
    rules: list[str] = []
    for line in Path(__file__).with_name("effects.txt").read_text("utf-8").splitlines():
        if line.startswith("#"):
            continue
        names, engines, kind, happens = (part.strip() for part in line.split("|"))
        rules = names.split() or rules
        severity, outcome = kind.split(" ", 1)
        effect = severity, outcome, happens.format(lost=_LOST, past=_PAST)
        for rule in rules:
            found.setdefault(rule, {}).update(dict.fromkeys(ENGINES if engines == "all" else engines.split(), effect))
    return found


EFFECTS = _effects()
