"""The one typed recipe: what a run is made of, with defaults. YAML on disk; unknown keys are refused."""

from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from eyas.errors import UsageError
from eyas.files import fingerprint

Share = Annotated[float, Field(gt=0, lt=1)]
Positive = Annotated[int, Field(ge=1)]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Conversations(Section):
    """Which conversations, and the share of them that is held out (by conversation, never by turn).

    weights: category or path -> the share of its rows to keep.
    """

    path: str | list[str]
    weights: dict[str, Annotated[float, Field(ge=0, le=1)]] = {}
    limit: Positive | None = None
    heldout: Share = 0.1
    seed: int = 0
    bad_rows: Literal["skip", "stop"] = "skip"


class Generate(Section):
    """On-policy answers; temperature 0 is greedy.

    servers: URLs of running engines that serve the same target; none means in this process. answers "keep" takes the
    conversations' own answers, where their boundaries can be proved, for when the target wrote them elsewhere.
    """

    max_new_tokens: Positive = 256
    slots: Positive = 64
    max_length: Positive | None = None
    temperature: Annotated[float, Field(ge=0)] = 0.0
    seed: int = 0
    on_long: Literal["error", "skip"] = "error"
    template: dict[str, Any] = Field(default_factory=dict)
    answers: Literal["generate", "keep"] = "generate"
    servers: list[str] = []
    engine: Literal["auto", "vllm", "sglang", "llamacpp", "openai"] = "auto"
    concurrency: Positive = 32


class Extract(Section):
    """Hidden states. layers are physical outputs out(v); empty means EAGLE-3's default three.

    store: where they go instead of RUN/store, such as s3://bucket/store. actors: so many Ray workers fill it together.
    servers: URLs of a running engine that gives the states, one of vLLM, two of SGLang (auxiliary, final).
    """

    store: str | None = None
    actors: Annotated[int, Field(ge=0)] = 0
    servers: Annotated[list[str], Field(max_length=2)] = []

    layers: list[int] | None = None
    codec: str = "bf16"
    token_budget: Positive = 4096
    self_check: Annotated[float, Field(ge=0, le=1)] | None = None


class Vocab(Section):
    """Draft vocabulary: a number of tokens, "auto" by coverage, or "full"."""

    size: Positive | Literal["auto", "full"] = "auto"
    like: str | None = None  # a draft whose map is kept, for a warm start


class DraftShape(Section):
    """The draft's shape; what is left out follows the target."""

    attention: Literal["llama", "latent"] = "llama"  # latent: the target's own, as DeepSeek and Kimi have it
    num_layers: Positive = 1
    hidden_size: Positive | None = None
    num_attention_heads: Positive | None = None
    num_key_value_heads: Positive | None = None
    head_dim: Positive | None = None
    intermediate_size: Positive | None = None
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False


class Train(Section):
    """Training-time test. steps is K; batch_tokens the rows of one optimizer step.

    micro_tokens: rows that go through the draft at once on a rank (gradients are added up), all of its part when left
    out. normalise: the loss's denominator, supervised rows or all rows of the global batch. shard: many GPUs share masters
    and optimizer state. online: the target in this process computes what training
    reads; "cache" keeps it.
    """

    steps: Positive = 7
    epochs: Positive = 4
    batch_tokens: Positive = 2048
    micro_tokens: Positive | None = None
    optimizer: Literal["adamw", "muon"] = "adamw"
    lr: Annotated[float, Field(gt=0)] = 1e-3
    warmup: Annotated[float, Field(ge=0, lt=1)] = 0.05
    schedule: Literal["cosine", "linear", "wsd"] = "cosine"
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    clip: Annotated[float, Field(gt=0)] = 1.0
    decay: Annotated[float, Field(gt=0, le=1)] = 0.8
    loss: Literal["ce", "kl", "reverse_kl", "tv", "lk", "lk_lambda"] = "ce"
    normalise: Literal["supervised", "positions"] = "supervised"
    survivors: bool = True
    keep_unknown: bool = False
    freeze_head: bool = False
    head_from_target: bool = True
    standardise: bool = True
    start: Literal["random", "least_squares"] = "random"
    warm: str | None = None  # a draft to go on from
    remap: bool = False
    compute_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    masters: Literal["float32", "bfloat16"] = "float32"  # bfloat16 shows why not: norms get stuck
    shard: bool = False
    online: bool | Literal["cache"] = False
    log_to: list[Literal["tensorboard", "trackio", "wandb"]] = []
    save_every: Positive = 100
    validate_every: Positive | None = None
    seed: int = 0


class Export(Section):
    """checkpoint: the one of highest validation tau, or the newest."""

    checkpoint: Literal["best", "latest"] = "best"
    embed: bool = False
    engines: list[Literal["sglang", "vllm", "llamacpp", "openvino", "trtllm"]] = [
        "sglang",
        "vllm",
        "llamacpp",
        "openvino",
    ]


class Replay(Section):
    k: Positive = 4


class Refine(Section):
    """`eyas train --refine`: a finished draft trains on, tokens at which it was rejected count `extra` more."""

    epochs: Positive = 1
    lr: Annotated[float, Field(gt=0)] = 2e-4
    extra: Annotated[float, Field(ge=0)] = 1.0


class Recipe(Section):
    """target: a Hugging Face folder or hub name. run: the folder that all artifacts go to."""

    target: str
    run: str
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    trust_remote_code: bool = False
    conversations: Conversations
    generate: Generate = Generate()
    extract: Extract = Extract()
    vocab: Vocab = Vocab()
    draft: DraftShape = DraftShape()
    train: Train = Train()
    export: Export = Export()
    replay: Replay = Replay()
    refine: Refine = Refine()

    def section(self, name: str) -> str:
        """Fingerprint of one section, without what changes how it is made and not what."""
        return fingerprint(getattr(self, name).model_dump(mode="json", exclude={"shard", "log_to"}))

    def to_yaml(self) -> str:
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def read_recipe(path: str | Path) -> Recipe:
    """Read a recipe, or say in one sentence what is wrong with it."""
    path = Path(path)
    try:
        value = yaml.safe_load(path.read_text("utf-8"))
    except FileNotFoundError:
        raise UsageError(f"{path}: no such recipe. Write one with `eyas init --target T`.") from None
    except IsADirectoryError:
        raise UsageError(f"{path}: a folder, expected a recipe file (YAML).") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: not valid YAML ({' '.join(str(error).split())}).") from None
    if not isinstance(value, dict):
        raise UsageError(
            f"{path}: holds {type(value).__name__}, expected a mapping with `target`, `run`, `conversations`."
        )
    try:
        return Recipe(**value)
    except ValidationError as error:
        raise UsageError(f"{path}: " + "; ".join(_complaint(e) for e in error.errors()[:4]) + ".") from None


def _complaint(error: Any) -> str:
    # pydantic adds the tried type of a union to the location; keys of the recipe never look like that
    where = ".".join(str(part) for part in error["loc"] if "[" not in str(part) and str(part) not in ("str", "int"))
    if error["type"] == "extra_forbidden":
        return f"unknown key {where!r}"
    if error["type"] == "missing":
        return f"key {where!r} is missing"
    return f"key {where!r} is {error['input']!r}: {error['msg'][0].lower()}{error['msg'][1:]}"
