"""What each serving engine does with an EAGLE-3 draft: one table of facts, for the engine releases named here.

Nothing about an engine stands anywhere else. A draft's layers are physical outputs out(v), 0-based; `in(k) = out(k-1)`.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from eyas.target import Target

Json = dict[str, Any]

FLAGSHIP = "LlamaForCausalLMEagle3"
LLAMA_LAYERS = 32  # LlamaConfig's default for num_hidden_layers


@dataclass(frozen=True)
class Engine:
    """An engine release. `architectures`: the strings it serves as an EAGLE-3 draft of the Llama shape.

    `unknown` and `missing` say what it does with a tensor it has no place for, and with a place that gets no tensor.
    """

    name: str
    title: str
    release: str
    architectures: frozenset[str]
    speculators: bool  # reads the speculators format
    unknown: str  # "drops" | "raises" | "warns"
    missing: str  # "random" (nothing is said, weights stay uninitialised) | "raises" | "warns" (and random)
    default_layers: Callable[[int], list[int]]
    three_layers: bool = False  # exactly three auxiliary layers
    one_layer: bool = False  # exactly one decoder layer
    own_embedding: bool = False  # keeps the draft's embedding where it differs from the target's
    fc_norm: bool = False
    norm_before_fc: str = ""  # where the flag is read: "either" | "top" | "nested" | "" (nowhere)
    norm_output: bool = False
    norm_before_residual: bool = False
    zero_bias: bool = False  # a bias that no tensor fills is zeros, not uninitialised
    later_norm: str = "hidden_norm"  # what normalises the input of decoder layers beyond the first


def usual_layers(n: int) -> list[int]:
    """out(1), out(n//2 - 1), out(n - 4): the default of everybody but OpenVINO, even where two of them coincide."""
    return [1, n // 2 - 1, n - 4]


def openvino_layers(n: int) -> list[int]:
    return [2, n // 2, n - 3]


_LLAMA = frozenset({FLAGSHIP, "Eagle3LlamaForCausalLM"})
_VLLM_LLAMA = _LLAMA | {
    "Eagle3MiniMaxM2ForCausalLM",
    "Eagle3Qwen2_5vlForCausalLM",
    "Eagle3Qwen3vlForCausalLM",
    "LlamaForCausalLM",  # becomes Eagle3LlamaForCausalLM
    "MiniMaxM2ForCausalLM",
}
MLA = frozenset({"Eagle3DeepseekV2ForCausalLM", "Eagle3DeepseekV3ForCausalLM", "DeepseekV3ForCausalLM"})
QWEN3 = frozenset({"Eagle3Qwen3ForCausalLM"})
SPECULATORS = frozenset({"Eagle3Speculator", "Eagle3DraftModel"})

ENGINES: dict[str, Engine] = {
    engine.name: engine
    for engine in (
        Engine(
            "sglang", "SGLang", "0.5.23", frozenset({FLAGSHIP}), False, "drops", "random", usual_layers,
            fc_norm=True, norm_before_fc="either", norm_output=True, zero_bias=True,
        ),
        Engine(
            "vllm", "vLLM", "0.32.0", _VLLM_LLAMA, True, "raises", "random", usual_layers,
            own_embedding=True, fc_norm=True, norm_before_fc="either", norm_output=True, norm_before_residual=True,
            later_norm="input_layernorm",
        ),
        Engine(
            "llamacpp", "llama.cpp", "b11434", _LLAMA, True, "raises", "raises", usual_layers,
            three_layers=True, one_layer=True, own_embedding=True, norm_before_fc="top", norm_before_residual=True,
        ),
        Engine(
            "openvino", "OpenVINO GenAI", "2026.4.1", _LLAMA, False, "warns", "warns", openvino_layers,
            three_layers=True, one_layer=True,
        ),
        Engine(
            "trtllm", "TensorRT-LLM", "1.4rc (by reading)", frozenset(), False, "drops", "random", usual_layers,
            fc_norm=True, norm_before_fc="nested", norm_output=True,
        ),
    )
}  # fmt: skip
ALL = ("sglang", "vllm", "llamacpp", "openvino")  # what "all" means; "trtllm" was never run and must be named


PROGRAMS = {"sglang": "python -m sglang.launch_server", "vllm": "vllm serve", "llamacpp": "llama-server"}


def serve_command(engine: str, target: str, draft: str, k: int) -> str:
    """The command that serves a target with its draft, K tokens a round (llama.cpp: both converted); "" without server."""
    speculative = json.dumps({"method": "eagle3", "model": draft, "num_speculative_tokens": k})
    arguments = {
        "sglang": f"--model-path {target} --speculative-algorithm EAGLE3 --speculative-draft-model-path {draft} "
        f"--speculative-num-steps {k} --speculative-eagle-topk 1 --speculative-num-draft-tokens {k + 1}",
        "vllm": f"{target} --speculative-config '{speculative}'",
        "llamacpp": f"-m {target}.gguf -md {draft}.gguf --spec-type draft-eagle3 --spec-draft-n-max {k} "
        "--spec-draft-p-min 0",
    }
    return f"{PROGRAMS[engine]} {arguments[engine]}" if engine in arguments else ""


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
            return f"id {n} (the last layer) gives no usable state on a Llama target: 0 of 222 drafted tokens accepted"
    if engine.name == "openvino" and n < 10:
        return f"the target has {n} layers; at least 10 are needed"
    if min(layers) < -1 or max(layers) >= n:
        return f"layer out({max(layers)}) does not exist in a target of {n} layers"
    if engine.name != "llamacpp":  # everybody else captures in ascending order, each layer once
        layers = sorted(set(layers))
    return layers


# ---- targets each engine can take auxiliary states from ---------------------------------------------------------------


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


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
_FC_NORM_NAMES = (("aux_norm_low", "fc_norm.0"), ("aux_norm_mid", "fc_norm.1"), ("aux_norm_high", "fc_norm.2"))


def place(engine: Engine, name: str, places: set[str]) -> str:
    """The parameter (internal name) that a stored tensor fills, or RAISES, or DROPS (nothing is said).

    `places` holds the internal names of the parameters that the engine builds for this config, "d2t" included.
    """
    if engine.name == "sglang":
        name = name.replace("midlayer", "layers.0")
        for old, new in _FC_NORM_NAMES:
            name = name.replace(old, new)
        if "d2t" in name:
            return "d2t"
        if "t2d" in name:
            return "t2d"
        bare = name.removeprefix("model.")
        known = name == "lm_head.weight" or bare != "lm_head.weight"
        return bare if known and bare in places else DROPS
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
        bare = name.removeprefix("model.")
        if bare.startswith("layers."):
            return DROPS
        bare = bare.replace("midlayer.", "layers.0.", 1)
        return bare if bare in places or bare == "t2d" else DROPS
    bare = name.replace("midlayer.", "layers.0.", 1)
    return bare if bare in places or bare == "t2d" else DROPS


# ---- what a fault does -------------------------------------------------------------------------------------------------

# The columns: rule | engines ("all", or by name, which overrides it) | severity and outcome | what will happen there.
# A rule says nothing of an engine that it does not name: nothing happens there. Outcomes: "raises" at load, "raises late"
# at the first token, "random" weights, "drops", "replaced", "differs", "harmless".
_LOST = "acceptance falls to about 1.0, with no message"
_PAST = "an index error (on a GPU an assertion of the device) as soon as it is drafted"
_TABLE = """
# files
FILE | all | error raises | the draft cannot be loaded
FORMAT_BIN | sglang vllm | info harmless | loads it; safetensors starts faster and cannot run code
  | llamacpp | info harmless | the converter reads it
NONFINITE | all | error differs | loads it; {lost}
ZERO | all | warn differs | loads it; a weight of zeros usually means that saving lost it
DTYPE_STORED | all | info harmless | casts to the dtype it serves in
# the config
ARCH | sglang | error raises | ValueError: 'is not a registered model'
  | vllm | error raises | no EAGLE-3 class of that name: ValueError
  | llamacpp | error raises | the converter does not take it for an EAGLE-3 draft and fails
  | openvino | error raises | the exporter does not take it for an EAGLE-3 draft
ARCH_MISSING | all | error raises | no architecture, so no class to load: raises at start
MODEL_TYPE | sglang vllm openvino | error raises | AutoConfig finds no model_type: ValueError
SPECULATORS | sglang openvino trtllm | error raises | has no reader for the speculators format: ValueError
SPECULATORS_KEYS | vllm | error raises | KeyError or ValueError while it reads the config
MLA | llamacpp openvino | error raises | knows no draft with latent attention
MLA_SHAPE | sglang | error raises | ValueError: its class for latent attention takes q_lora_rank and one layer
MLA_TYPE | vllm | error raises | takes it for DeepSeek's MTP module: 'Eagle3DeepSeekMTPModel' is not supported
MLA_NBFC | sglang | error drops | its class for latent attention has no norm before fc and skips it with a warning
  | vllm | error raises | its class for latent attention has no norm before fc: ValueError
DVOCAB_MISSING | sglang | error raises | AttributeError: no attribute 'draft_vocab_size'
  | vllm | info harmless | takes vocab_size
  | llamacpp | error raises | the converter does not take it for an EAGLE-3 draft
  | openvino | error raises | the exporter needs it
  | trtllm | warn differs | takes vocab_size, with a warning
DVOCAB_NULL | sglang | warn replaced | replaces the draft's head and embedding by the target's, unchecked
  | vllm | info harmless | takes vocab_size
  | openvino | error raises | the exporter needs a number
DVOCAB_RANGE | all | error raises | a draft vocabulary must lie in 1..vocab_size
VOCAB | sglang trtllm | warn differs | replaces the embedding by the target's; the sizes are not checked
  | vllm | error raises late | scatters its logits over too few ids: an index error as soon as it is drafted
  | llamacpp | warn harmless | takes the vocabulary from the target
  | openvino | error raises | the shared embedding has another shape
VOCAB:larger | sglang trtllm | warn differs | replaces the embedding by the target's; the sizes are not checked
  | vllm | warn harmless | serves it; ids beyond the target's are never drafted
  | llamacpp | warn harmless | takes the vocabulary from the target
  | openvino | error raises | the shared embedding has another shape
NULL | sglang vllm openvino trtllm | error raises | TypeError or a config validation error
NHL_MISSING | all | error random | builds 32 layers (LlamaConfig's default) and fills what it finds; {lost}
  | llamacpp | error raises | the converter does not take it for an EAGLE-3 draft
LAYERS | llamacpp openvino | error raises | serves drafts of one decoder layer only
LAYERS_NORM | sglang trtllm | warn differs | normalises layers beyond the first with hidden_norm, never input_layernorm
  | vllm | warn differs | normalises layers beyond the first with input_layernorm, never hidden_norm
HEADS | sglang vllm openvino | error raises | config validation: hidden_size must be a multiple of num_attention_heads
ACT | sglang vllm | error raises | ValueError: unsupported activation, only silu
  | llamacpp | error differs | computes SiLU whatever the config says; {lost}
MAXPOS | sglang | error raises | ValueError at start (context length), unless SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN=1
  | vllm | warn differs | past that position the whole batch may lose acceptance
  | llamacpp | warn differs | clips the draft's context; nothing is drafted beyond it
  | openvino | warn differs | positions beyond it were never seen
DTYPE | sglang | warn differs | '--dtype auto' serves it in float16 beside a bfloat16 target
  | trtllm | error raises | torch_dtype is required
TIE | sglang | error replaced | its head becomes the target's embedding; {lost}, or ids out of range
  | vllm | warn harmless | ignores the flag and keeps the draft's own head
  | openvino | warn harmless | forces the flag to false
# vocabulary map
D2T_FORM | all | error differs | the map leads to wrong or absent tokens
  | llamacpp | error raises | the converter checks range and uniqueness: ValueError
D2T_FORM:range | all | error raises late | drafts a token that does not exist: {past}
  | llamacpp | error raises | the converter checks range and uniqueness: ValueError
  | openvino trtllm | error differs | drafts a token that does not exist; {lost}
D2T_FORM:length | all | error raises | asserts that the map has one entry per output row
  | sglang | error raises late | drafts a token past the end of the map: {past}
  | openvino trtllm | error differs | the map does not cover the draft vocabulary
D2T_FORM:dtype | all | warn harmless | casts it, or the ids it gives, to whole numbers
  | llamacpp | warn harmless | the converter rounds it to whole numbers
  | openvino trtllm | error differs | indexes with a float, which fails or leads astray
D2T_FORM:config | all | error differs | sizes the map by the config, not by the file
  | vllm | error raises | asserts that the map has draft_vocab_size entries
  | llamacpp | info harmless | takes the sizes of the file
D2T_FORM:order | all | error differs | pairs row i with token i + d2t[i]; training pairs them in order
D2T_ABSOLUTE | all | error raises late | adds the draft id once more: {past}
  | llamacpp | error raises | the converter checks the range of the absolute ids: ValueError
  | openvino trtllm | error differs | adds the draft id once more; {lost}
D2T_ABSOLUTE:inside | all | error differs | adds the draft id once more; {lost}
  | llamacpp | error raises | the converter checks that the absolute ids are unique and in range: ValueError
D2T_T2D | all | warn harmless | reads d2t only; t2d and d2t contradict each other, one is stale
D2T_MISSING | all | error differs | takes draft ids for target ids; {lost}
  | llamacpp | error raises | the number of output rows is not the vocabulary's: fails at load
  | openvino | error random | uses uninitialised memory as the map; 5-15 % of the acceptance is left
D2T_PREFIX | all | error differs | drafts only the first ids of the vocabulary; text needs the others
D2T_EXTRA | vllm | error raises | ValueError: no parameter for a map beside a full vocabulary
D2T_WANTED | openvino | error random | without d2t, even of zeros, uninitialised memory is the map; 5-15 % is left
EOS | all | info differs | the draft can never propose the end of an answer; one round more for each
# head and embedding
LMHEAD_MISSING | all | warn replaced | uses the target's head
  | sglang openvino | error random | leaves the head uninitialised; {lost}
LMHEAD_MISSING:reduced | all | error replaced | uses the first rows of the target's head, which are other tokens; {lost}
  | sglang openvino | error random | leaves the head uninitialised; {lost}
  | llamacpp | error raises | asserts that the map has one entry per output row
EMBED_OWN | all | warn replaced | replaces it by the target's: whatever was trained into it is lost
  | vllm llamacpp | info harmless | keeps the draft's own
EMBED_RANDOM | all | info replaced | replaces it by the target's, so nothing is lost here
  | vllm llamacpp | error differs | keeps it; {lost}
EMBED_SAME | all | info harmless | would use the target's anyway: the copy only costs disk
EMBED_MISSING_NARROW | all | error random | has no embedding of the draft's width; {lost}
# names and tensors
NAME_UNKNOWN:dropped | sglang | error drops | drops it without a word
  | vllm trtllm | warn drops | drops it without a word
  | openvino | error drops | drops it with a warning among many
NAME_LAYERS | openvino | error random | knows midlayer.* only and leaves the layer random; {lost}
NAME_MODEL_PREFIX | vllm | error raises | ValueError: adds 'model.' itself, so 'model.model...' is unknown
  | llamacpp | error raises | the converter raises: 'Can not map tensor'
  | trtllm | error drops | adds 'model.' itself
NAME_WRAPPER | sglang trtllm | error drops | drops every tensor with such a prefix; {lost}
  | vllm | error raises | ValueError: 'There is no module or parameter named ...'
  | llamacpp | error raises | the converter raises: 'Can not map tensor'
  | openvino | error random | leaves these weights random; {lost}
NOT_A_DRAFT | all | error raises | nothing here is an EAGLE-3 draft
NAME_UNKNOWN | vllm | error raises | ValueError: 'There is no module or parameter named ...'
  | llamacpp | error raises | the converter raises: 'Can not map tensor'
MISSING | all | error random | leaves it uninitialised; {lost}
  | llamacpp | error raises | fails at load: missing tensor
  | openvino | error random | leaves it random, with a warning among many; {lost}
MISSING:norm | all | error differs | leaves the norm at ones; acceptance falls, with no message
  | llamacpp | error raises | fails at load: missing tensor
  | openvino | error differs | leaves the norm at ones, with a warning among many
LMHEAD_SHAPE | all | error raises | the shape is asserted at load
  | llamacpp | info harmless | takes the rows of the file
EMBED_SHAPE | all | error raises | the shape is asserted at load
EMBED_SHAPE:few | all | error raises | the shape is asserted at load
  | llamacpp | error differs | loads it unchecked; tokens past its rows have no embedding
EMBED_SHAPE:rows | all | error raises | the shape is asserted at load
  | llamacpp | warn harmless | the converter cuts it to the target's vocabulary
SHAPE | all | error raises | the shape is asserted at load
SHAPE:part | all | error raises | the shape is asserted at load
  | sglang vllm | error differs | takes the first part of it, with no message; {lost}
SHAPE:pad | all | error raises | the shape is asserted at load
  | sglang | error differs | fills it up with zeros, with no message; {lost}
TWICE | all | warn differs | two stored tensors fill one place; the last one read wins
ADAPTER | all | error drops | adapters are not applied; merge them into the weights
# flags
NBR | sglang openvino trtllm | error differs | ignores norm_before_residual; acceptance falls
NBFC_PLACE | llamacpp | error raises | reads norm_before_fc at the top level only: input_norm is unexpected
NBFC | openvino | error drops | exports it without input_norm, with a warning among many; acceptance falls
FCNORM | llamacpp | error raises | knows no fc_norm: 'Can not map tensor'
  | openvino | error drops | exports it without fc_norm, with a warning among many; acceptance falls
FCNORM:name | vllm | error raises | knows fc_norm only, not use_aux_norm or aux_norm_*: ValueError
NORMOUT | llamacpp openvino | error differs | ignores norm_output: only the first position stays right
FLAG_TENSOR | all | error drops | drops the norm's tensor, since its flag is off; acceptance falls
  | llamacpp | error raises | has no place for the norm's tensor while its flag is off: fails at load
FLAG_TENSOR:fc_norm | all | error drops | drops the norm's tensor, since its flag is off; acceptance falls
  | vllm | error raises | ValueError: 'There is no module or parameter named fc_norm'
  | llamacpp | error raises | the converter raises: 'Can not map tensor'
QKV_BIAS | sglang | error drops | builds q, k and v without bias and drops the tensors
  | llamacpp | error raises | has no place for biases: fails at load
  | openvino | error drops | drops the biases
QKV_BIAS:flag | vllm | error drops | drops the biases unless attention_bias is true
FC_BIAS | all | error drops | drops fc.bias, since bias is not true
  | llamacpp | error raises | the converter raises: 'Can not map tensor'
FC_BIAS:flag | vllm openvino | error drops | drops fc.bias
  | llamacpp | error raises | the converter raises: 'Can not map tensor'
QK_NORM | sglang | error drops | drops q_norm and k_norm without a word; acceptance falls
  | vllm | error raises | the Llama class has no q_norm: ValueError (Eagle3Qwen3ForCausalLM has)
  | llamacpp | error raises | the converter raises: 'Can not map tensor'
  | openvino | error drops | drops q_norm and k_norm
WINDOW | sglang | warn differs | ignores it; give --speculative-draft-window-size
  | llamacpp openvino | warn differs | attends without a window
# auxiliary layers
NAUX | llamacpp openvino | error raises | takes exactly three auxiliary layers
NAUX_BYPASS | sglang trtllm | error drops | skips fc, since its input is as wide as the draft; {lost}
NAUX_KEYS | all | error raises | sizes fc for another number of layers than the checkpoint's
AUX_KEY2 | sglang | error differs | ignores top-level ids and captures its default layers; {lost}
AUX_KEY:ignored | llamacpp | error differs | ignores nested ids and captures its default layers; {lost}
AUX_CONV | all | error differs | one of the two numberings must be wrong for it
AUX_DS | sglang | info harmless | reads nested ids that do not begin with 1 as layer inputs on this target, in(v)
AUX_COUNT | all | error raises late | fc gets another number of states than it was built for
AUX_OTHER | all | error differs | captures other layers than the draft was trained on; acceptance falls
AUX_RUNTIME | openvino | warn differs | never reads a draft's layers and captures one layer later than everybody else; acceptance falls. Its hidden_layers_list property (C++ only) sets them, or train on its layers
  | trtllm | warn differs | never reads a draft's layers: set eagle3_layers_to_capture
AUX_KEY | all | warn differs | captures other layers than another engine does from this same file
AUX_KEY:v2 | vllm | warn differs | its GPU (V2) runner reads the top-level key only, and uses its defaults
AUX_LAST | all | error raises late | cannot capture these layers
AUX_ORDER | sglang vllm | warn differs | concatenates in ascending order, each layer once, whatever the list says
  | llamacpp | warn differs | concatenates in the order of the list
USE_AUX_FALSE | sglang | error drops | captures no auxiliary states and skips fc
  | vllm | error drops | drops fc (V1), or raises (V2)
  | llamacpp openvino | error differs | feeds auxiliary states anyway
TARGET_ARCH | all | error raises | cannot take auxiliary states from this target
TARGET_QUANT | sglang | info differs | a --quantization given for the target is applied to the draft too: add --speculative-draft-model-quantization unquant
TARGET_ROTATED | all | warn differs | feeds rotated states, which a draft of the plain model cannot read
# RoPE
ROPE | all | warn differs | rotates as the draft's config says; wrong unless it was trained so
ROPE_MISSING | all | warn differs | rotates with base 10000; wrong unless it was trained so
ROPE_SCHEMA | all | info harmless | reads rope_parameters; releases before Transformers 5 read rope_scaling only
ROPE_NESTED | all | warn differs | may not understand one set of RoPE parameters per attention type
MROPE | vllm | error raises | sees mrope_section, expects three rows of positions and fails
"""
Effect = tuple[str, str, str]


def _effects(table: str) -> dict[str, dict[str, Effect]]:
    """rule -> engine -> (severity, outcome, what will happen)."""
    found: dict[str, dict[str, Effect]] = {}
    rule = ""
    for line in table.strip().splitlines():
        if line.startswith("#"):
            continue
        name, engines, kind, happens = (part.strip() for part in line.split("|"))
        rule = name or rule
        severity, outcome = kind.split(" ", 1)
        for engine in ENGINES if engines == "all" else engines.split():
            found.setdefault(rule, {})[engine] = severity, outcome, happens.format(lost=_LOST, past=_PAST)
    return found


EFFECTS = _effects(_TABLE)
