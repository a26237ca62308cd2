"""A tiny target and draft whose right acceptance is known: every token. What is missing names the broken wire.

The target's greedy text is a cycle of N tokens, whatever stands before: its attention writes nothing, and the stream of a
token holds a constant, the token's place in the cycle (one of N coordinates, "bus") and the same place once more in a slot
that moves on by one in every layer: `out(v)` can be told from every other layer. The draft carries one register of N
coordinates for each way by which that place can reach it; fc fills them, attention adds the token's own, the MLP moves
them on by one. Each token of the cycle belongs to a class, and its row of the head asks one question about the wiring:
it reads one register, or reads one and lets another veto. So each fault makes its own classes wrong.
"""

import json
import os
import shlex
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from eyas.decode.replay import accept
from eyas.draft.config import DraftConfig, rope_parameters
from eyas.draft.model import Draft
from eyas.errors import EyasError, UsageError, first_line
from eyas.features.store import Sample, teacher_positions
from eyas.files import read_json, write_json
from eyas.measure import COUNTERS, Asked, Served, read_metrics
from eyas.serving.contract import ENGINES, PROGRAMS, Json, serve_command
from eyas.serving.export import State, export
from eyas.signals import on_signals
from eyas.target import TEXT_CONFIG_KEYS, read_target

LAYERS, WIDTH, HEADS, KV, HEAD, VOCAB = 12, 704, 4, 2, 32, 128
# amplitudes: the constant, a place, SiLU where it is linear, attention to the own position
CONSTANT, CODE, GATE, PEAK = 17.0, 6.0, 16.0, 12.0
REGISTERS = ("low", "mid", "high", "bus", "token", "swapped", "later", "earlier", "stale")
# class -> (tokens in the cycle, {(register, places behind the answer): weight}). A right answer reads CODE in its registers
# and needs more than the dummy's CODE; a veto reads a register that is empty there while the wiring is right.
QUESTIONS: dict[str, tuple[int, dict[tuple[str, int], float]]] = {
    "low": (2, {("low", 0): 5}),
    "mid": (3, {("mid", 0): 5}),
    "high": (5, {("high", 0): 5}),
    "bus": (4, {("bus", 0): 5}),  # any auxiliary state at all, through fc
    "fc": (6, {("bus", 0): 5, ("token", 1): 2}),  # without fc's constant the MLP moves nothing on
    "token": (4, {("token", 0): 4}),  # the embedding, through attention
    "order": (2, {("token", 0): 4, ("swapped", 0): -8}),  # another block's layer in this block
    "later": (4, {("token", 0): 4, ("later", 0): -8}),  # out(v + 1) instead of out(v)
    "earlier": (2, {("token", 0): 4, ("earlier", 0): -8}),
    "states in step": (4, {("token", 0): 4, ("bus", 1): -6, ("bus", -1): -6}),
    "tokens in step": (3, {("bus", 0): 5, ("token", 1): -6, ("token", -1): -6}),
    "residual": (2, {("token", 0): 4, ("bus", 1): -12}),
    "sign": (2, {("bus", 0): 2, ("token", 0): 4}),
    "layer": (4, {("token", 0): 3, ("stale", 1): 2}),  # what fc alone can answer, once
}
CYCLE = sum(count for count, _ in QUESTIONS.values())


@dataclass(frozen=True)
class Canary:
    """The pair: `cycle` [N] token ids in their order, `kinds` [N] the class of each, `layers` that the draft reads."""

    cycle: list[int]
    kinds: list[str]
    layers: list[int]

    @property
    def map(self) -> np.ndarray:
        """int64 [Vd] ascending target ids: the specials, the cycle, and a dummy that stands for "no answer"."""
        return np.array(sorted({0, 1, 2, VOCAB - 1, *self.cycle}))

    def place(self, token: int) -> int:
        return self.cycle.index(token) if token in self.cycle else 0


def make(layers: list[int]) -> Canary:
    """The canary of a draft that reads these layers; always the same one."""
    random = np.random.default_rng(5)
    ids = [*range(3, 17), *range(18, 18 + 2 * (CYCLE - 14), 2)]  # the first keep their number in the draft vocabulary
    kinds = [name for name, (count, _) in QUESTIONS.items() for _ in range(count)]
    hidden, own = ("low", "mid", "high", "bus", "fc", "tokens in step"), ("token", "order", "later", "earlier", "layer")
    before = {"fc": hidden, "layer": own}  # what may stand before these: a neighbour that would not outvote them
    while True:
        order = [kinds[i] for i in random.permutation(CYCLE)]
        if all(order[place - 1] in before.get(order[place], order) for place in range(CYCLE)):
            return Canary([ids[i] for i in random.permutation(CYCLE)], order, layers)


def _bus() -> slice:
    return slice(1, 1 + CYCLE)


def _slot(layer: int) -> slice:
    """Where `out(layer)` holds the place; layer -1 is the embedding."""
    return slice(1 + (layer + 2) * CYCLE, 1 + (layer + 3) * CYCLE)


def _register(name: str) -> slice:
    first = 1 + REGISTERS.index(name) * CYCLE
    return slice(first, first + CYCLE)


def stream(canary: Canary, token: int, layer: int) -> np.ndarray:
    """float32 [WIDTH]: the target's `out(layer)` at a token, in closed form; layer -1 is its embedding."""
    found = np.zeros(WIDTH, np.float32)
    found[0] = CONSTANT
    if token in canary.cycle:
        found[_bus()][canary.place(token)] = found[_slot(layer)][canary.place(token)] = CODE
    return found


def _norm(registers: int) -> float:
    """What RMSNorm multiplies a vector by that holds the constant and so many places."""
    return float(np.sqrt(WIDTH / (CONSTANT**2 + registers * CODE**2)))


def _silu(x: float) -> float:
    return float(x / (1 + np.exp(-x)))


def fill_target(canary: Canary, state: "State") -> None:
    """Write the canary into the tensors of a target whose blocks are pre-norm with a SwiGLU, in place."""
    eye, norm = torch.eye(CYCLE), _norm(2)
    for name, tensor in state.items():
        layer = int(name.split(".layers.")[1].split(".")[0]) if ".layers." in name else -1
        if "norm" in name:
            tensor.fill_(1)
        elif name.endswith("embed_tokens.weight"):
            tensor.copy_(torch.tensor(np.stack([stream(canary, token, -1) for token in range(VOCAB)])))
        elif name.endswith("lm_head.weight"):
            tensor.zero_()
            for place, token in enumerate(canary.cycle):
                tensor[token, 1 + (place - 1) % CYCLE] = 4
        elif ".mlp.gate_proj." in name:
            tensor.zero_()[:CYCLE, 0] = GATE / (CONSTANT * norm)
        elif ".mlp.up_proj." in name:
            tensor.zero_()[:CYCLE, _slot(layer - 1)] = eye
        elif ".mlp.down_proj." in name:
            tensor.zero_()[_slot(layer), :CYCLE] = eye / (_silu(GATE) * norm)
            tensor[_slot(layer - 1), :CYCLE] = -eye / (_silu(GATE) * norm)
        elif "o_proj" in name or name.endswith(".bias"):
            tensor.zero_()


def draft_of(canary: Canary) -> "State":
    """The draft's tensors, float32, by internal name."""
    eye, at = torch.eye(CYCLE), "layers.0."
    on = torch.roll(eye, 1, 0)  # a place moves on to the next
    fc = torch.zeros(WIDTH, 3, WIDTH)
    fc[0, :, 0] = 1 / 3
    for block, layer in enumerate(canary.layers):
        fc[_register(REGISTERS[block]), block, _slot(layer)] = on
        for name in ("bus", "stale"):
            fc[_register(name), block, _bus()] = on / 3
        for other in set(canary.layers) - {layer}:
            fc[_register("swapped"), block, _slot(other)] = on
        for name, there in (("later", layer + 1), ("earlier", layer - 1)):
            if there not in canary.layers:
                fc[_register(name), block, _slot(there)] = on
    moved = [name for name in REGISTERS if name != "stale"]
    inner = len(moved) * CYCLE
    queries, values = torch.zeros(HEADS * HEAD, 2 * WIDTH), torch.zeros(KV * HEAD, 2 * WIDTH)
    queries[:, 0] = PEAK / (CONSTANT * _norm(2))  # constant queries and keys: a row attends to its own position
    token = _register("token")
    values[:CYCLE, _bus()] = eye / _norm(2)
    values[:CYCLE, _slot(-1)] = -2 * eye / _norm(2)  # silenced by the weights of input_layernorm
    values[:CYCLE, WIDTH:][:, token] = -2 * eye / _norm(6)  # takes the place of the token before away
    output = torch.zeros(WIDTH, HEADS * HEAD)
    for row in range(CYCLE):  # of each pair of heads that share values the first one speaks
        output[token.start + row, (row // HEAD) * (HEADS // KV) * HEAD + row % HEAD] = 1
    gate, up, down = torch.zeros(inner, WIDTH), torch.zeros(inner, WIDTH), torch.zeros(WIDTH, inner)
    gate[:, 0] = GATE / (CONSTANT * _norm(6))
    for index, name in enumerate(moved):
        unit = slice(index * CYCLE, (index + 1) * CYCLE)
        up[unit, _register(name)] = -eye if name == "bus" else eye
        down[_register(name), unit] = (on - eye) / (_silu(GATE) * _norm(6))
    norms = {name: torch.ones(WIDTH) for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm", "norm")}
    norms["input_layernorm"][_slot(-1)] = 0
    norms["hidden_norm"][token] = 0.5
    norms["post_attention_layernorm"][_register("bus")] = -1
    norms["norm"][_register("bus")] = norms["norm"][token] = -1
    map_ = canary.map
    head = torch.zeros(len(map_), WIDTH)
    head[-1, 0] = CODE / CONSTANT
    for place, (answer, kind) in enumerate(zip(canary.cycle, canary.kinds, strict=True)):
        for (name, behind), weight in QUESTIONS[kind][1].items():
            sign = -1 if name in ("bus", "token") else 1
            head[np.searchsorted(map_, answer), _register(name).start + (place - behind) % CYCLE] = sign * weight
    return {
        "embed_tokens.weight": torch.tensor(np.stack([stream(canary, token, -1) for token in range(VOCAB)])),
        "fc.weight": fc.reshape(WIDTH, -1),
        "norm.weight": norms.pop("norm"),
        "lm_head.weight": head,
        **{f"{at}{name}.weight": weight for name, weight in norms.items()},
        f"{at}self_attn.q_proj.weight": queries,
        f"{at}self_attn.k_proj.weight": queries[: KV * HEAD].clone(),
        f"{at}self_attn.v_proj.weight": values,
        f"{at}self_attn.o_proj.weight": output,
        f"{at}mlp.gate_proj.weight": gate,
        f"{at}mlp.up_proj.weight": up,
        f"{at}mlp.down_proj.weight": down,
        "d2t": torch.from_numpy(map_ - np.arange(len(map_))),
        "t2d": torch.zeros(VOCAB, dtype=torch.bool).index_fill_(0, torch.from_numpy(map_), True),
    }


# ---- the figures of broken wires -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Wire:
    """One fault: what it does to the draft's tensors, its flags, the layers and their places, and the states' shift."""

    name: str
    says: str
    tensors: Callable[["State"], Any] = lambda state: None
    flags: Json = field(default_factory=dict)
    layer: int = 0  # every captured layer so much later
    blocks: tuple[int, ...] = (0, 1, 2)  # which layer's states stand in each block
    late: int = 0  # the states come from so many positions before


def _set(name: str, value: float) -> Callable[["State"], Any]:
    return lambda s: s[name].fill_(value)


def _noise(name: str, scale: float) -> Callable[["State"], Any]:
    def change(state: "State") -> None:
        random = np.random.default_rng(1).standard_normal(state[name].shape) * scale
        state[name].copy_(state[name].new_tensor(random))

    return change


def _without(register: str) -> Callable[["State"], Any]:
    return lambda s: s["fc.weight"][_register(register)].zero_()


def _other_token(by: int) -> Callable[["State"], Any]:
    def change(state: "State") -> None:
        cycle, table = make([]).cycle, state["embed_tokens.weight"]
        table[cycle] = table[np.roll(cycle, by)].clone()

    return change


# fmt: off
WIRES = [
    Wire("right", "every wire is right"),
    *(Wire("layers", f"the layer in fc's {which} block is another one", _without(name))
      for which, name in (("first", "low"), ("second", "mid"), ("third", "high"))),
    Wire("layers", "every layer is captured one later: ids of inputs read as outputs, or other defaults", layer=1),
    Wire("layers", "every layer is captured one earlier: ids of outputs read as inputs", layer=-1),
    Wire("order", "the layers are concatenated in descending order", blocks=(2, 1, 0)),
    Wire("order", "the layers are concatenated in another order", blocks=(1, 2, 0)),
    Wire("fc", "fc was not loaded", _set("fc.weight", 0)),
    Wire("fc", "fc was not loaded and is random", _noise("fc.weight", 0.0126)),
    Wire("shift", "the target's states come one position late", late=1),
    Wire("shift", "the target's states come one position early", late=-1),
    Wire("shift", "the draft reads the token of its own position, not the next one", _other_token(1)),
    Wire("shift", "the draft reads the token after the next", _other_token(-1)),
    Wire("map", "d2t is missing or zeros: draft ids are taken for target ids", _set("d2t", 0)),
    Wire("head", "nothing is ever right: the head or the MLP was not loaded, d2t holds target ids, or weights are NaN; "
         "eyas check on the folder that was served tells them apart", _set("lm_head.weight", 0)),
    Wire("embedding", "the draft has another token embedding than the target's", _noise("embed_tokens.weight", 0.02)),
    Wire("layer", "the decoder layer's matrices were not loaded",
         lambda s: [s[name].zero_() for name in s if "_proj" in name]),
    *(Wire("norms", f"{name} was not loaded", _set(f"layers.0.{name}.weight", 1))
      for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")),
    Wire("norms", "the final norm was not loaded", _set("norm.weight", 1)),
    Wire("norms", "norm_before_residual is taken for true", flags={"norm_before_residual": True}),
    Wire("norms", "norm_output is taken for true", flags={"norm_output": True}),
]
# fmt: on


def draft_config(canary: Canary, **options: Any) -> DraftConfig:
    return DraftConfig(
        hidden_size=WIDTH, target_hidden_size=WIDTH, vocab_size=VOCAB, draft_vocab_size=len(canary.map),
        num_attention_heads=HEADS, num_key_value_heads=KV, head_dim=HEAD, intermediate_size=(len(REGISTERS) - 1) * CYCLE,
        aux_layers=tuple(canary.layers), target_num_layers=LAYERS, **options,
    )  # fmt: skip


def sample(canary: Canary, layers: list[int], tokens: int, late: int = 0) -> "Sample":
    """The cycle as the feature store would hold it, `tokens` long, four of them the prompt; amplitudes are exact in bf16."""
    text, supervised = np.resize(canary.cycle, tokens).astype(np.int32), np.arange(tokens) > 3
    aux = np.stack([[stream(canary, token, layer) for layer in layers] for token in np.roll(text, late).tolist()])
    final = np.zeros((len(teacher_positions(supervised)), WIDTH), np.uint16)
    return Sample("cycle", text, supervised, (aux.view(np.uint32) >> 16).astype(np.uint16), final, text[-len(final) :])


def expected(canary: Canary, wire: Wire, k: int, tokens: int = 400) -> list[float]:
    """[k]: the acceptance per position that this fault gives, by replay of the draft on the target's closed form."""
    config = draft_config(canary, **wire.flags)
    state = draft_of(canary)
    wire.tensors(state)
    network = Draft(config)
    network.load_state_dict(state)
    text = sample(canary, [canary.layers[block] + wire.layer for block in wire.blocks], tokens, wire.late)
    ids = torch.arange(config.draft_vocab_size)
    table = torch.full((VOCAB,), -1).index_copy_(0, network.target_ids(ids), ids)
    return accept(network, [text], k, table, torch.float32).per_position


@cache
def figures(layers: tuple[int, ...], k: int) -> list[tuple[Wire, list[float]]]:
    """Every wire with its acceptance per position."""
    canary = make(list(layers))
    return [(wire, expected(canary, wire, k)) for wire in WIRES]


def diagnose(per_position: list[float], layers: list[int]) -> tuple[Wire, float]:
    """(the wire whose figures lie nearest, how far: the largest difference at a position) of a measured acceptance."""
    found = figures(tuple(layers), len(per_position))
    distance = [max(abs(a - b) for a, b in zip(per_position, figure, strict=True)) for _, figure in found]
    best = int(np.argmin(distance))
    return found[best][0], distance[best]


def _unwind(number: int) -> None:
    raise SystemExit(128 + number)


@contextmanager
def serving(said: Json, program: str, log: Path) -> Iterator[str]:
    """The address of a server that holds the pair which `said` (canary.json) tells of, stopped at the end.

    program: what to start, in the place of the engine's usual program. Raises EyasError when it ends before it answers.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    usual = PROGRAMS.get(said["engine"], "")
    if not usual:
        raise UsageError(f"--run: {ENGINES[said['engine']].title} has no server. Give its figures with --measured.")
    command = [*shlex.split(said["serve"].replace(usual, program, 1)), "--port", str(port)]
    with on_signals(
        (signal.SIGTERM, signal.SIGHUP), _unwind
    ):  # the server leads its own process group: whatever ends this process would leave it running
        with open(log, "wb") as output:
            try:
                server = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
            except OSError as error:
                raise UsageError(f"--run {program!r}: cannot be started ({error}).") from None
        try:
            while True:
                time.sleep(1)
                if server.poll() is not None:
                    last = (log.read_text(errors="replace").strip().splitlines() or ["nothing"])[-1]
                    raise EyasError(f"the server ended before it answered; it said: {last}. All of it is in {log}.")
                with suppress(httpx.HTTPError):
                    if httpx.get(f"http://127.0.0.1:{port}/health", timeout=5).status_code == 200:
                        break
            yield f"http://127.0.0.1:{port}"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGTERM)  # its workers too
            try:
                server.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(server.pid, signal.SIGKILL)
                server.wait()


def _rounds(client: Any, body: Json) -> list[float]:
    """llama-server's acceptance per position, from its stream: it counts up once a round. [] when it drafts nothing."""
    told = 0, 0  # drafted and accepted so far
    rounds: list[tuple[int, int]] = []
    with client.stream("POST", "/completion", json=body | {"stream": True, "timings_per_token": True}) as answer:
        for line in answer.raise_for_status().iter_lines():
            timings = json.loads(line[6:]).get("timings", {}) if line.startswith("data: {") else {}
            now = timings.get("draft_n", 0), timings.get("draft_n_accepted", 0)
            if now[0] > told[0]:
                rounds.append((now[0] - told[0], now[1] - told[1]))
                told = now
    k = max((drafted for drafted, _ in rounds), default=0)
    whole = [accepted for drafted, accepted in rounds if drafted == k]  # an answer's last round is shorter
    return [sum(accepted > position for accepted in whole) / len(whole) for position in range(k)]


def ask(engine: str, url: str, prompt: list[int], new: int = 4 * CYCLE) -> list[float]:
    """The acceptance per position of a server that holds the canary, from one greedy answer to the canary's prompt.

    Raises EyasError when the server drafts nothing.
    """
    greedy = {"temperature": 0, "ignore_eos": True}
    paths: dict[str, tuple[str, Json]] = {
        "vllm": ("/v1/completions", {"prompt": prompt, "max_tokens": new} | greedy),
        "sglang": ("/generate", {"input_ids": prompt, "sampling_params": {"max_new_tokens": new} | greedy}),
        "llamacpp": ("/completion", {"prompt": prompt, "n_predict": new, "top_k": 1, "cache_prompt": False} | greedy),
    }
    if engine not in paths:
        raise UsageError(f"--url: the figures of {engine} are not read from a server. Give them with --measured.")
    path, body = paths[engine]
    try:
        with httpx.Client(base_url=url, timeout=300) as client:
            if engine == "vllm":
                body["model"] = client.get("/v1/models").json()["data"][0]["id"]
            if engine == "llamacpp" and (rates := _rounds(client, body)):
                return rates
            before = read_metrics(client.get("/metrics").text)
            value = client.post(path, json=body).raise_for_status().json()
            after = read_metrics(client.get("/metrics").text)
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError) as error:
        raise EyasError(f"{url}: does not answer as {ENGINES[engine].title} does ({error}).") from None
    counts = COUNTERS[engine](Served(url, [Asked(prompt, [0] * new, value)], [], before, after, 0.0), 1)
    if not counts.drafted:
        raise EyasError(f"{url}: drafted nothing. Start it with the canary's draft, out/draft beside out/target.")
    return counts.per_position or [counts.accepted / counts.rounds]


# ---- on disk -------------------------------------------------------------------------------------------------------------

_SMALL: Json = {
    "num_hidden_layers": LAYERS, "hidden_size": WIDTH, "intermediate_size": 64, "num_attention_heads": HEADS,
    "num_key_value_heads": KV, "head_dim": HEAD, "vocab_size": VOCAB, "max_position_embeddings": 2048,
    "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 1, "dtype": "float32",
}  # fmt: skip
_DENSE: Json = {  # only where the config has the key: no experts, no windows, small latent attention
    "first_k_dense_replace": LAYERS, "mlp_only_layers": list(range(LAYERS)), "n_routed_experts": 4, "num_experts": 4,
    "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 64, "sliding_window": None,
    "use_sliding_window": False, "layer_types": ["full_attention"] * LAYERS, "num_nextn_predict_layers": 0,
    "max_window_layers": LAYERS, "attention_bias": False,
}  # fmt: skip
_DROP = ("quantization_config", "rope_scaling", "rope_parameters", "auto_map", "transformers_version", "torch_dtype")


def small_config(config: Json | None) -> Json:
    """A user's config with the canary's sizes, its wrapper and class kept; a plain Llama when there is none."""
    config = config or {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    inner = next((key for key in TEXT_CONFIG_KEYS if isinstance(config.get(key), dict)), None)
    text = config[inner] if inner else config
    small = {key: value for key, value in text.items() if key not in _DROP} | _SMALL
    small |= {key: value for key, value in _DENSE.items() if key in text}
    if text.get("kv_lora_rank"):  # latent attention has no head_dim of its own
        small |= {"num_key_value_heads": HEADS, "q_lora_rank": text.get("q_lora_rank") and 64}
        del small["head_dim"]
    small["rope_parameters"] = {"rope_type": "default", "rope_theta": rope_parameters(text)["rope_theta"]}
    if not inner:
        return small
    vision = {key: _VISION.get(key, value) for key, value in (config.get("vision_config") or {}).items()}
    outer = {key: value for key, value in config.items() if key not in (*_DROP, "vision_config")}
    return outer | {inner: small, "tie_word_embeddings": False} | ({"vision_config": vision} if vision else {})


_VISION: Json = {
    "depth": 1, "num_hidden_layers": 1, "vt_num_hidden_layers": 1, "out_hidden_size": WIDTH, "mm_hidden_size": WIDTH,
    "text_hidden_size": WIDTH,
}  # fmt: skip


def write(out: Path, engine: str, like: Json | None = None, dtype: str = "float32") -> Json:
    """Write out/target, out/draft and out/canary.json for an engine's default layers; returns what canary.json says.

    like: a config.json whose architecture the target takes. Raises EyasError where that class is not made of pre-norm
    blocks with a SwiGLU, so that no canary can live in it.
    """
    if engine not in ENGINES:
        raise UsageError(f"--engine {engine}: expected one of {', '.join(ENGINES)}.")
    raw = small_config(like)
    layers = ENGINES[engine].default_layers(LAYERS)
    canary = make(layers)
    folder = Path(out) / "target"
    config = transformers.AutoConfig.for_model(**raw)
    kind = "ImageTextToText" if "vision_config" in raw else "CausalLM"
    family = getattr(transformers, f"AutoModelFor{kind}")
    try:
        with torch.random.fork_rng():
            model = family.from_config(config).eval()
        elsewhere = ("visi", "visual", "projector")
        fill_target(canary, {n: t for n, t in model.state_dict().items() if not any(w in n for w in elsewhere)})
        _prove(canary, model)
    except (ValueError, KeyError, RuntimeError, IndexError) as error:
        raise EyasError(f"{raw['architectures'][0]}: no canary for this class yet ({first_line(error)}).") from None
    transformers.logging.disable_progress_bar()
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    _as_published(folder, raw["architectures"])
    words_tokenizer(folder, VOCAB)
    target = read_target(folder)
    shape = replace(
        draft_config(canary),
        rope_parameters=rope_parameters(target.text),
        max_position_embeddings=target.max_positions,
        rms_norm_eps=target.rms_norm_eps,
    )
    export(draft_of(canary), shape, target, Path(out) / "draft", provenance={"canary": layers}, dtype=dtype)
    said: Json = {"engine": engine, "architecture": target.architecture, "layers": layers, "prompt": canary.cycle[:4]}
    said |= {"text": canary.cycle, "right": "every drafted token is accepted"}
    said["serve"] = serve_command(engine, str(folder), str(Path(out) / "draft"), 3)
    if engine == "vllm":
        said["serve"] += " --enforce-eager"  # compiling takes longer than everything else
    write_json(Path(out) / "canary.json", said)
    return said


def _as_published(folder: Path, architectures: list[str]) -> None:
    """Undo Transformers' own spelling: of the class, and of Kimi-K2.5's decoder, which it saves as "blocks"."""
    write_json(folder / "config.json", read_json(folder / "config.json") | {"architectures": architectures})
    for file in folder.glob("*.safetensors"):
        state = load_file(file)
        old, new = (f"language_model.model.{part}." for part in ("blocks", "layers"))
        named = {name.replace(old, new): tensor for name, tensor in state.items()}
        if named.keys() != state.keys():
            save_file(named, file, metadata={"format": "pt"})


def _prove(canary: Canary, model: Any) -> None:
    """The target's states and choices are those of the closed form, or no canary lives in this class."""
    with torch.no_grad():
        found = model(input_ids=torch.tensor([canary.cycle]), output_hidden_states=True, use_cache=False)
    wanted = torch.tensor(canary.cycle).roll(-1)
    if not torch.equal(found.logits[0].argmax(-1), wanted):
        raise ValueError("its text is not the cycle")
    for layer in canary.layers:
        formula = np.stack([stream(canary, token, layer) for token in canary.cycle])
        if np.abs(found.hidden_states[layer + 1][0].numpy() - formula).max() > 0.05:
            raise ValueError(f"its layer {layer} does not hold what was written")


def words_tokenizer(folder: Path, vocab: int) -> None:
    """A tokenizer of `vocab` made-up words: servers and converters want one, a canary speaks in ids."""
    words = ["<unk>", "<s>", "</s>", *(f"w{i}" for i in range(3, vocab))]
    made = Tokenizer(BPE({word: i for i, word in enumerate(words)}, [], unk_token="<unk>", byte_fallback=True))
    made.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    fast = PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    fast.save_pretrained(folder)
