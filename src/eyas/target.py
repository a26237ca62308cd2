"""What we know of a target: sizes, where its embedding, final norm and head live, what it does to its logits.

Reading a target needs its `config.json` (and, for tensors, the safetensors headers) only; torch is imported when a
target is loaded. Layers are always physical outputs: `out(v)` is the residual stream after layer v, 0-based.
"""

import hashlib
import json
import math
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from eyas.errors import EyasError, UsageError, first_line
from eyas.files import fingerprint, inside, read_json

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

TEXT_CONFIG_KEYS = ("text_config", "llm_config", "language_config")
EMBEDDING_SUFFIXES = ("embed_tokens.weight", "word_embeddings.weight", "wte.weight", "tok_embeddings.weight")
NORM_SUFFIXES = ("model.norm.weight", "language_model.norm.weight", "final_layernorm.weight", "ln_f.weight")
HEAD_SUFFIXES = ("lm_head.weight", "output_layer.weight")
ELSEWHERE = ("visual", "vision", "audio", "mtp")  # in names of tensors that a decoding step does not read
LOADING = (ValueError, OSError, KeyError, ImportError)  # what Transformers raises for a folder that it cannot use


def default_aux_layers(num_layers: int) -> list[int]:
    """The EAGLE-3 default, as physical outputs: out(1), out(n//2 - 1), out(n-4); fewer where some coincide."""
    return sorted({max(0, layer) for layer in (1, num_layers // 2 - 1, num_layers - 4)})


@dataclass(frozen=True)
class LogitRule:
    """What the target does between its head and its softmax: logits * scale, then softcap * tanh(logits / softcap)."""

    scale: float = 1.0
    softcap: float | None = None

    def apply(self, logits: "torch.Tensor") -> "torch.Tensor":
        """logits [..., V] of any float dtype, as the head gives them; returns the target's own logits."""
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.softcap is not None:
            logits = (logits / self.softcap).tanh() * self.softcap
        return logits


@dataclass(frozen=True)
class Target:
    """A target known by its config. `text` is the language model's part of it (wrappers unfolded)."""

    path: Path
    config: dict[str, Any]
    text: dict[str, Any]

    @property
    def architecture(self) -> str:
        return (self.config.get("architectures") or ["unknown"])[0]

    @property
    def model_type(self) -> str:
        return self.text.get("model_type") or self.config.get("model_type") or "unknown"

    def _size(self, *names: str) -> int:
        for name in names:
            if self.text.get(name) is not None:
                return int(self.text[name])
        raise UsageError(f"{self.path}/config.json: no {names[0]!r}. Expected the config of a causal language model.")

    @property
    def num_layers(self) -> int:
        return self._size("num_hidden_layers", "n_layer", "num_layers")

    @property
    def hidden_size(self) -> int:
        return self._size("hidden_size", "n_embd", "d_model")

    @property
    def vocab_size(self) -> int:
        return self._size("vocab_size", "padded_vocab_size")

    @property
    def max_positions(self) -> int:
        """The context length in tokens (RoPE scaling included, where the config counts it)."""
        return int(self.text.get("max_position_embeddings") or self.text.get("n_positions") or 2048)

    @property
    def rms_norm_eps(self) -> float:
        return float(self.text.get("rms_norm_eps") or self.text.get("layer_norm_eps") or 1e-6)

    @property
    def tied(self) -> bool:
        own = self.text.get("tie_word_embeddings", self.config.get("tie_word_embeddings"))
        # Transformers' own default, which Gemma relies on
        return self.model_type.startswith(("gemma", "cohere")) if own is None else bool(own)

    @property
    def logit_rule(self) -> LogitRule:
        scale = float(self.text.get("logit_scale") or (0.0625 if "cohere" in self.model_type else 1.0))
        if self.text.get("logits_scaling"):  # Granite divides, Cohere multiplies
            scale = 1.0 / float(self.text["logits_scaling"])
        softcap = self.text.get("final_logit_softcapping")
        return LogitRule(scale, float(softcap) if softcap else None)

    @property
    def eos_ids(self) -> list[int]:
        """Every id that ends an answer, from generation_config.json and config.json."""
        ids: set[int] = set()
        generation = self.path / "generation_config.json"
        sources = [self.config, self.text] + ([read_json(generation)] if generation.exists() else [])
        for source in sources:
            value = source.get("eos_token_id")
            ids.update([value] if isinstance(value, int) else value or [])
        return sorted(ids)

    # tensors on disk

    @cached_property
    def tensor_files(self) -> dict[str, str]:
        """Tensor name -> file name, from the index or the single file's header."""
        index = self.path / "model.safetensors.index.json"
        if index.exists():
            return dict(read_json(index)["weight_map"])
        files = sorted(self.path.glob("*.safetensors"))
        return {name: file.name for file in files for name in read_header(file) if name != "__metadata__"}

    def tensor_name(self, part: str) -> str | None:
        """The name on disk of "embedding", "norm" or "head"; a tied head is the embedding. None when there is none."""
        suffixes = {"embedding": EMBEDDING_SUFFIXES, "norm": NORM_SUFFIXES, "head": HEAD_SUFFIXES}[part]
        not_in = (*ELSEWHERE, ".layers.")
        names = [n for n in self.tensor_files if n.endswith(suffixes) and not any(word in n for word in not_in)]
        if names:
            return min(names, key=len)
        return self.tensor_name("embedding") if part == "head" else None

    def read_tensor(self, name: str) -> "torch.Tensor":
        """One tensor from disk, in its stored dtype, without loading the model."""
        from safetensors import safe_open

        file = inside(self.path, self.tensor_files[name])
        with safe_open(str(file), framework="pt") as handle:
            return handle.get_tensor(name)

    @property
    def step_parameters(self) -> int:
        """Parameters that one decoding step of a dense target reads (a tied head counts once)."""
        unread = {"__metadata__"} if self.tied else {"__metadata__", self.tensor_name("embedding")}
        return sum(
            math.prod(entry["shape"])
            for file in sorted(set(self.tensor_files.values()))
            for name, entry in read_header(self.path / file).items()
            if name not in unread and not any(word in name for word in ELSEWHERE)
        )

    # fingerprints

    @cached_property
    def fingerprints(self) -> dict[str, str]:
        """sha256 of config, weights (names, sizes, headers and a sample of every file), tokenizer and chat template."""
        weights = []
        for file in sorted(self.path.glob("*.safetensors")):
            digest = hashlib.sha256()
            size = file.stat().st_size
            with open(file, "rb") as handle:
                for offset in {0, max(0, size // 2), max(0, size - (1 << 20))}:
                    handle.seek(offset)
                    digest.update(handle.read(1 << 20))
            weights.append([file.name, size, digest.hexdigest()])
        tokenizer = [
            [name, hashlib.sha256((self.path / name).read_bytes()).hexdigest()]
            for name in ("tokenizer.json", "tokenizer.model", "tiktoken.model", "vocab.json", "merges.txt")
            if (self.path / name).exists()
        ]
        config = {key: v for key, v in self.config.items() if key not in ("transformers_version", "_name_or_path")}
        parts = {"config": config, "weights": weights, "tokenizer": tokenizer, "chat_template": self.chat_template}
        return {name: fingerprint(value) for name, value in parts.items()}

    @property
    def fingerprint(self) -> str:
        return fingerprint(self.fingerprints)

    @property
    def chat_template(self) -> str | None:
        """The template's text, as Transformers would find it."""
        file = self.path / "chat_template.jinja"
        if file.exists():
            return file.read_text("utf-8")
        for name in ("chat_template.json", "tokenizer_config.json"):
            if (self.path / name).exists():
                template = read_json(self.path / name).get("chat_template")
                if isinstance(template, list):
                    return next((entry["template"] for entry in template if entry.get("name") == "default"), None)
                if template:
                    return template
        return None


def read_header(file: Path) -> dict[str, Any]:
    """The JSON header of a safetensors file: name -> {dtype, shape, data_offsets}."""
    with open(file, "rb") as handle:
        prefix = handle.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 0 < length <= min(100 << 20, file.stat().st_size):
            raise UsageError(f"{file}: not a safetensors file, or cut off in its header. Download or save it again.")
        try:
            return json.loads(handle.read(length))
        except ValueError:
            raise UsageError(f"{file}: its safetensors header is not valid JSON. Download or save it again.") from None


def read_target(name: str | Path) -> Target:
    """Read a target's config from a folder or, failing that, a hub name."""
    path = Path(name)
    if not path.is_dir():
        path = _from_hub(str(name))
    config = read_json(path / "config.json")
    text = next((config[key] for key in TEXT_CONFIG_KEYS if isinstance(config.get(key), dict)), config)
    target = Target(path, config, text)
    _ = target.num_layers, target.hidden_size, target.vocab_size
    return target


def _from_hub(name: str) -> Path:
    if name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise UsageError(
            f"{name}: no such folder. Expected a Hugging Face model folder or a hub name like 'org/model'."
        )
    try:
        from huggingface_hub import snapshot_download

        patterns = ["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt", "*.tiktoken"]
        return Path(snapshot_download(name, allow_patterns=patterns))
    except Exception as error:
        raise UsageError(f"{name}: neither a folder here nor reachable on the hub ({first_line(error)}).") from None


class LoadedTarget:
    """A target in memory. `body` is its decoder stack (embed_tokens, layers, norm); `model` adds the head."""

    def __init__(self, target: Target, model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase | None") -> None:
        self.target, self.model, self.tokenizer = target, model, tokenizer
        self.body = _find_body(model, target.num_layers)

    @property
    def device(self) -> "torch.device":
        return next(self.body.parameters()).device

    @property
    def dtype(self) -> "torch.dtype":
        return self.body.embed_tokens.weight.dtype

    @property
    def embedding(self) -> "torch.Tensor":
        """[V, H]"""
        return cast("torch.Tensor", self.model.get_input_embeddings().weight)

    @property
    def head(self) -> "torch.Tensor":
        """[V, H]"""
        return self.model.get_output_embeddings().weight

    def logits(self, final: "torch.Tensor") -> "torch.Tensor":
        """The target's own logits [..., V] from its post-norm final states [..., H]."""
        return self.target.logit_rule.apply(self.model.get_output_embeddings()(final))

    @contextmanager
    def capturing(self, layers: list[int]) -> "Iterator[dict[int | str, torch.Tensor]]":
        """Within the context each forward leaves out(v) under v and the post-norm state under "final", [B, T, H]."""
        caught: dict[int | str, torch.Tensor] = {}

        def keep(key: int | str) -> Any:
            def hook(_module: Any, _inputs: Any, output: Any) -> None:
                caught[key] = output[0] if isinstance(output, tuple) else output

            return hook

        handles = [self.body.layers[layer].register_forward_hook(keep(layer)) for layer in layers]
        handles.append(self.body.norm.register_forward_hook(keep("final")))
        try:
            yield caught
        finally:
            for handle in handles:
                handle.remove()


def _find_body(model: Any, num_layers: int) -> Any:
    for module in model.modules():
        if all(hasattr(module, n) for n in ("embed_tokens", "norm", "layers")) and len(module.layers) == num_layers:
            return module
    raise EyasError(
        f"{type(model).__name__}: no decoder stack with embed_tokens, {num_layers} layers and norm was found in it. "
        "This architecture is not supported yet."
    )


def load_target(
    name: str | Path | Target, dtype: str = "auto", device: str | None = None, trust_remote_code: bool = False
) -> LoadedTarget:
    """Load weights and tokenizer. `dtype` is "auto" (as stored), "bfloat16", "float16" or "float32".

    `device`: a GPU where there is one, when left out.
    """
    import torch
    import transformers

    transformers.logging.disable_progress_bar()
    target = name if isinstance(name, Target) else read_target(name)
    loaders: list[Any] = [transformers.AutoModelForCausalLM]
    if target.text is not target.config:  # a wrapper of several kinds of model
        loaders.append(transformers.AutoModelForImageTextToText)
    model, failure = None, ""
    for loader in loaders:
        try:
            kind = dtype if dtype == "auto" else getattr(torch, dtype)
            options = {"trust_remote_code": trust_remote_code, "local_files_only": True}
            model = loader.from_pretrained(target.path, dtype=kind, **options)
            break
        except LOADING as error:
            failure = first_line(error)
    if model is None:
        raise UsageError(f"{target.path}: Transformers cannot load this target ({failure}).")
    model.eval().requires_grad_(False)
    if device or torch.cuda.is_available():
        cast(Any, model).to(device or "cuda")
    return LoadedTarget(target, model, load_tokenizer(target, trust_remote_code))


def load_tokenizer(target: Target, trust_remote_code: bool = False) -> "PreTrainedTokenizerBase":
    import transformers

    try:
        return transformers.AutoTokenizer.from_pretrained(
            target.path, trust_remote_code=trust_remote_code, local_files_only=True
        )
    except LOADING as error:
        raise UsageError(f"{target.path}: no tokenizer could be loaded ({first_line(error)}).") from None
