"""Why the figures disagree: causes, ranked, with their evidence and the fix.

Works from the top down (what was trained, what was exported, what the engine loads, what it feeds, what is measured) and
says which links were proved sound. A cause is certain only where the fault itself was seen: in the bytes of the file, in
the launch line, or in two replays of the same conversations that differ. What merely fits the figures is possible.
"""

import json
import shlex
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from eyas.artifact import read_manifest
from eyas.errors import EyasError, UsageError
from eyas.files import fingerprint, read_json
from eyas.serving.check import check, read_draft
from eyas.serving.contract import ENGINES
from eyas.target import Target, read_target

Json = dict[str, Any]
CERTAIN, LIKELY, POSSIBLE = "certain", "likely", "possible"
OVERFIT = 0.12  # training accuracy of the first drafted token over the held-out one, from which data are short
MANY = 50_000  # training conversations beyond which a gap is not put down to their number
OUTSIDE = 0.05  # share of teacher tokens outside the draft vocabulary that a training accuracy may not hide

# Rules of `check`, by what their fault is called here. The first prefix that fits counts.
NAMES = {
    "NAME_": "weights dropped by name",
    "MISSING": "weights dropped by name",
    "ADAPTER": "weights dropped by name",
    "TWICE": "weights dropped by name",
    "NAUX": "fc bypassed",
    "USE_AUX_FALSE": "fc bypassed",
    "AUX": "auxiliary layers differ",
    "D2T": "vocabulary map",
    "DVOCAB": "vocabulary map",
    "LMHEAD": "head replaced",
    "TIE": "head replaced",
    "EMBED": "embedding",
    "NBR": "norm placement",
    "NBFC": "norm placement",
    "FCNORM": "norm placement",
    "NORMOUT": "norm placement",
    "FLAG_TENSOR": "norm placement",
    "LAYERS_NORM": "norm placement",
    "ROPE": "RoPE differs",
    "MROPE": "RoPE differs",
    "TARGET_QUANT": "quantised target",
    "TARGET_ROTATED": "quantised target",
}
# Keys of a draft's config (or parts of them), by what is wrong when they are not those of training.
KEYS = {
    "rope": "RoPE differs",
    "norm_before": "norm placement",
    "fc_norm": "norm placement",
    "norm_output": "norm placement",
    "layer_ids": "auxiliary layers differ",
    "draft_vocab_size": "vocabulary map",
    "tie_word_embeddings": "head replaced",
}
ORDER = (CERTAIN, LIKELY, POSSIBLE)


@dataclass
class Cause:
    cause: str
    confidence: str
    evidence: list[str]
    fix: str


@dataclass
class Case:
    """Whatever there is of a drafter that disappoints. `measured` is the JSON of `eyas measure`, decode or replay."""

    draft: Path
    target: Target | None
    run: Path | None = None
    engine: str | None = None
    launch: str = ""
    log: str = ""
    measured: Json | None = None
    checked: list[str] = field(default_factory=list)

    @cached_property
    def provenance(self) -> Json:
        """What eyas.json says of the draft's origin: the target's fingerprints, the recipe."""
        file = self.draft / "eyas.json"
        return (read_json(file).get("provenance") or {}) if file.exists() else {}

    @cached_property
    def tensors(self) -> dict[str, Any]:
        """Stored tensors by internal name; empty where the folder cannot be read."""
        draft, _ = read_draft(self.draft)
        return {} if draft is None else draft.internal

    @cached_property
    def findings(self) -> list[Json]:
        if self.engine is None:
            return []
        found = check(self.draft, self.target, [self.engine])["verdicts"][self.engine]["findings"]
        return [f for f in found if f["severity"] != "info" or f["outcome"] != "harmless"]

    def replayed(self, engine: str | None) -> Json | None:
        """Replay over the run's held-out conversations, as eyas or as an engine loads the draft; None without a store."""
        if self.run is None or self.target is None or not (self.run / "store" / "manifest.json").exists():
            return None
        from eyas.data.split import load_split
        from eyas.features.store import Store
        from eyas.run import replay_draft

        store = Store(self.run / "store")
        have = set(store.ids)
        ids = [i for i in load_split(self.run / "conversations" / "split.json")["heldout"] if i in have]
        k = int((self.measured or {}).get("protocol", {}).get("k") or self.recipe.get("replay", {}).get("k") or 4)
        return replay_draft(self.draft, self.target, store, k, ids, "held-out conversations", engine)[1]

    @cached_property
    def own(self) -> Json | None:
        try:
            return self.replayed(None)
        except EyasError:
            return None

    @cached_property
    def recipe(self) -> Json:
        import yaml

        file = self.run / "recipe.yaml" if self.run else None
        return yaml.safe_load(file.read_text("utf-8")) if file and file.exists() else {}


def examine(case: Case) -> Json:
    """The contract's object: causes, best supported first, and the links that were proved sound."""
    causes: list[Cause] = []
    links: tuple[Callable[[Case], Iterator[Cause]], ...] = (_trained, _exported, _loaded, _fed, _data, _measured)
    for link in links:
        causes += link(case)
    merged: dict[str, Cause] = {}
    for cause in causes:
        known = merged.setdefault(cause.cause, cause)
        if known is not cause:
            known.evidence += [e for e in cause.evidence if e not in known.evidence]
            known.confidence = min(known.confidence, cause.confidence, key=ORDER.index)
    ranked = sorted(merged.values(), key=lambda cause: ORDER.index(cause.confidence))
    if not ranked:
        case.checked.append("nothing that was looked at is wrong")
    return {"causes": [asdict(cause) for cause in ranked], "checked": case.checked}


# ---- what was trained --------------------------------------------------------------------------------------------------


def _trained(case: Case) -> Iterator[Cause]:
    if case.run is None:
        return
    for name, words in (("audit.json", "before training"), ("after.json", "after training")):
        file = case.run / "audit" / name
        if not file.exists():
            continue
        audit = read_json(file)
        if audit["verdict"] == "go":
            case.checked.append(f"audit {words}: GO")
        else:
            yield Cause("trained wrongly", CERTAIN, audit["reasons"], "Mend what the audit names and train again.")


def _lines(case: Case) -> list[Json]:
    file = case.run / "train" / "log.jsonl" if case.run else None
    if not file or not file.exists():
        return []
    return [json.loads(line) for line in file.read_text("utf-8").splitlines()]


def _data(case: Case) -> Iterator[Cause]:
    """What the training log says of the data: too little of it, or accuracy that leaves tokens out."""
    lines = _lines(case)
    steps = [line for line in lines if line.get("acc")]
    checks = [line["validation"] for line in lines if "validation" in line]
    if not steps or not checks:
        return
    last = steps[-max(1, len(steps) // 10) :]
    outside = float(np.mean([line["oov"] for line in last]))
    first = float(np.mean([line["acc"][0] for line in last if line["acc"][0] is not None]))
    held = checks[-1]["per_position"][0]
    if outside >= OUTSIDE:
        yield Cause(
            "accuracy counted inside the draft vocabulary",
            LIKELY,
            [
                f"{outside:.1%} of the teacher's tokens lie outside the draft vocabulary, which the engine counts as misses"
            ],
            "Choose a larger draft vocabulary (vocab.size: auto) from what the target really writes.",
        )
    manifest = read_manifest(case.run / "train", "train") if case.run else None
    documents = int(manifest.figures.get("documents", 0)) if manifest else 0
    if first - held > OVERFIT and documents < MANY:
        yield Cause(
            "little data",
            LIKELY,
            [f"the first drafted token is right {first:.0%} of the time in training and {held:.0%} on held-out conversations, after {documents:,} conversations"],
            "More on-policy conversations of the kind you serve; more epochs on these will not help.",
        )  # fmt: skip


# ---- what was exported -------------------------------------------------------------------------------------------------


def _exported(case: Case) -> Iterator[Cause]:
    if not case.tensors:
        yield Cause("weights cannot be read", CERTAIN, [f"{case.draft} holds no readable draft"], "Export it again.")
        return
    yield from _embedding_and_head(case)
    reference = case.run / "draft" if case.run else None
    if reference is None or not reference.is_dir() or reference.resolve() == case.draft.resolve():
        return
    there, _ = read_draft(reference)
    if there is None:
        return
    differs = [
        name
        for name, tensor in there.internal.items()
        if name not in case.tensors or not _same(tensor, case.tensors[name])
    ]
    if not differs:
        case.checked.append("every tensor is the run's export, bit for bit")
    if "d2t" in differs and "lm_head.weight" not in differs:
        yield Cause(
            "vocabulary map",
            CERTAIN,
            ["d2t is not the one that the head was trained with (the run's export has another)"],
            f"Take d2t and t2d from {reference}; a map may never be made anew for a trained head.",
        )
    elif differs:
        yield Cause(
            "not the draft that was trained",
            CERTAIN,
            [f"differs from {reference} in {', '.join(differs[:6])}"],
            f"Serve {reference}, or export again.",
        )
    ours, theirs = (_flat(read_json(folder / "config.json")) for folder in (reference, case.draft))
    for key in sorted(ours.keys() | theirs.keys()):
        name = next((word for part, word in KEYS.items() if part in key), None)
        if name and ours.get(key) != theirs.get(key):
            yield Cause(
                name,
                CERTAIN,
                [f"config.json says {key} = {theirs.get(key)}, it was trained with {ours.get(key)}"],
                f"Restore {key} from {reference / 'config.json'}.",
            )


def _flat(config: Json, prefix: str = "") -> Json:
    """Nested keys joined with dots."""
    found: Json = {}
    for key, value in config.items():
        found |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return found


def _embedding_and_head(case: Case) -> Iterator[Cause]:
    target = case.target
    if target is None or not target.tensor_files:
        return
    trained = (case.provenance.get("target") or {}).get("weights")
    if trained and trained != target.fingerprints["weights"]:
        return  # another target's embedding would prove nothing
    names = {part: target.tensor_name(part) for part in ("embedding", "head")}
    own = case.tensors.get("embed_tokens.weight")
    if own is not None and names["embedding"]:
        wanted = _floats(target, str(names["embedding"]), own.dtype)
        found = own.floats().reshape(own.shape)
        if found.shape == wanted.shape and not np.array_equal(found, wanted):
            cosine = float(np.mean(_cosines(found, wanted)))
            word = "random" if cosine < 0.5 else "trained away from the target's"
            yield Cause(
                "embedding",
                CERTAIN if cosine < 0.5 else LIKELY,
                [f"its embedding is {word} (mean cosine with the target's {cosine:.2f})"],
                "Leave embed_tokens out of the file, and train with the target's, frozen.",
            )
        elif found.shape == wanted.shape:
            case.checked.append("embedding: the target's, bit for bit")
    head = case.tensors.get("lm_head.weight")
    frozen = bool(case.recipe.get("train", {}).get("freeze_head"))
    if head is not None and names["head"] and case.recipe and not frozen:
        rows = _floats(target, str(names["head"]), head.dtype)
        offsets = case.tensors.get("d2t")
        ids = np.arange(head.shape[0]) + (0 if offsets is None else offsets.read().astype(np.int64).reshape(-1))
        inside = (ids >= 0) & (ids < len(rows))
        found = head.floats().reshape(head.shape)
        if found.shape[1] == rows.shape[1] and np.array_equal(found[inside], rows[ids[inside]]):
            yield Cause(
                "head replaced",
                CERTAIN,
                ["lm_head is the target's own rows bit for bit, though the recipe trained it"],
                "Export the trained head again.",
            )


def _floats(target: Target, name: str, dtype: str) -> np.ndarray:
    """A tensor of the target, rounded to the dtype that the draft stores it in."""
    import torch

    tensor = target.read_tensor(name)
    return tensor.to({"BF16": torch.bfloat16, "F16": torch.float16}.get(dtype, torch.float32)).float().numpy()


def _cosines(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return (a * b).sum(1) / np.maximum(np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1), 1e-12)


def _same(a: Any, b: Any) -> bool:
    return a.shape == b.shape and np.array_equal(a.floats() if "F" in a.dtype else a.read(), b.floats() if "F" in b.dtype else b.read())  # fmt: skip


# ---- what the engine loads ---------------------------------------------------------------------------------------------


def _loaded(case: Case) -> Iterator[Cause]:
    if case.engine is None:
        return
    title = ENGINES[case.engine].title
    verdict = f"as {title} loads it"
    tau: float | None = None
    sentence = ""
    try:
        again = case.replayed(case.engine)
        tau = again["tau"] if again else None
    except EyasError as error:
        sentence = str(error)
    own = case.own["tau"] if case.own else None
    proved = tau is not None and own is not None
    worse = proved and tau < case.own["interval"][0]  # type: ignore[index]
    compared = (
        [f"replayed {verdict} tau is {tau:.2f}, as trained {own:.2f}, on the same conversations"] if proved else []
    )
    serious = [f for f in case.findings if f["severity"] == "error" or f["outcome"] not in ("harmless",)]
    for finding in serious:
        name = next((word for prefix, word in NAMES.items() if finding["rule"].startswith(prefix)), "engine contract")
        if finding["outcome"].startswith("raises"):
            confidence = CERTAIN if finding["severity"] == "error" else POSSIBLE
        elif proved:
            confidence = (CERTAIN if finding["severity"] == "error" else LIKELY) if worse else POSSIBLE
        else:
            confidence = LIKELY if finding["severity"] == "error" else POSSIBLE
        if proved and not worse and finding["severity"] != "error":
            continue  # the replay shows that it does not matter here
        yield Cause(
            name, confidence, [finding["message"], *compared], finding["fix"] or f"See `eyas check {case.draft}`."
        )
    if worse and not serious:
        yield Cause("engine contract", LIKELY, compared, f"Run `eyas check {case.draft} --engine {case.engine}`.")
    if proved and not worse:
        case.checked.append(f"{verdict}: tau {tau:.2f}, as trained {own:.2f}: nothing is lost in loading")
    elif not serious and not sentence:
        case.checked.append(f"{verdict}: nothing is dropped, replaced or read otherwise")


# ---- what the engine feeds ---------------------------------------------------------------------------------------------


def _fed(case: Case) -> Iterator[Cause]:
    yield from _same_target(case)
    words = shlex.split(case.launch) if case.launch else []
    yield from _algorithm(case, words)
    yield from _template(case, words)
    if "NAUX" not in case.log and "mat1 and mat2 shapes" in case.log:
        yield Cause(
            "fc bypassed", LIKELY, ["the log shows a matrix of another width than fc expects"], "Serve it with EAGLE3."
        )


def _same_target(case: Case) -> Iterator[Cause]:
    trained = case.provenance.get("target") or {}
    if not trained or case.target is None:
        return
    now = case.target.fingerprints
    quantised = case.target.config.get("quantization_config") or case.target.text.get("quantization_config")
    if trained.get("weights") != now["weights"]:
        name = "quantised target" if quantised else "another target"
        evidence = [f"the target's weights in {case.target.path} are not those that the draft was trained for"]
        if quantised:
            evidence.append(f"they are quantised ({quantised.get('quant_method', 'unnamed method')})")
        yield Cause(
            name, CERTAIN, evidence, "Train on states of the very target that is served, or serve the trained one."
        )
    else:
        case.checked.append("target: the weights that the draft was trained for")
    if trained.get("chat_template") != now["chat_template"]:
        yield Cause(
            "chat template differs",
            CERTAIN,
            [f"the chat template in {case.target.path} is not the one that the draft was trained with"],
            "Serve with the template of training, or generate, extract and train with this one.",
        )
    if trained.get("tokenizer") != now["tokenizer"]:
        yield Cause("another target", CERTAIN, ["the tokenizer differs from training"], "Serve the trained target.")


def _option(words: list[str], *names: str) -> str | None:
    """The value of a command-line option, written `--name value` or `--name=value`."""
    for at, word in enumerate(words):
        name, _, value = word.partition("=")
        if name in names:
            return value or (words[at + 1] if at + 1 < len(words) else "")
    return None


def _algorithm(case: Case, words: list[str]) -> Iterator[Cause]:
    sglang = _option(words, "--speculative-algorithm", "--speculative-algo")
    vllm = _option(words, "--speculative-config", "--speculative_config", "-sc")
    found = sglang
    if vllm:
        try:
            found = str(json.loads(vllm).get("method") or "")
        except ValueError:
            yield Cause("wrong algorithm flag", LIKELY, [f"--speculative-config is not JSON: {vllm}"], "Quote it.")
            return
    if found is not None and found.lower() not in ("eagle3", ""):
        yield Cause(
            "wrong algorithm flag",
            CERTAIN,
            [f"the server was started for {found!r}: one hidden state is fed where fc expects several"],
            "Start it with EAGLE3 (SGLang: --speculative-algorithm EAGLE3, vLLM: method eagle3).",
        )
    elif words and found is None and not any("spec" in word or word in ("-md", "--model-draft") for word in words):
        yield Cause(
            "wrong algorithm flag", CERTAIN, ["the launch line names no draft at all"], "Add the draft's options."
        )
    elif found:
        case.checked.append(f"launch line: {found}")
    quantised = _option(words, "--quantization", "-q")
    if quantised:
        yield Cause(
            "quantised target",
            LIKELY,
            [f"the server quantises the target ({quantised}); the draft was trained on its plain states"],
            "Measure without it, or extract states from the quantised target and train on these.",
        )


def _template(case: Case, words: list[str]) -> Iterator[Cause]:
    other = _option(words, "--chat-template")
    trained = (case.provenance.get("target") or {}).get("chat_template")
    if other and trained and (not Path(other).is_file() or fingerprint(Path(other).read_text("utf-8")) != trained):
        yield Cause(
            "chat template differs",
            CERTAIN if Path(other).is_file() else LIKELY,
            [f"the server is started with --chat-template {other}, not with the template of training"],
            "Leave the option out, or train with that template.",
        )
    recipe = case.provenance.get("recipe") or case.recipe
    ours = (recipe.get("generate") or {}).get("template") or {}
    served = _option(words, "--default-chat-template-kwargs", "--chat-template-kwargs")
    theirs = json.loads(served) if served else {}
    for key in ("enable_thinking", "thinking", "reasoning_effort"):
        if key in ours or key in theirs:
            a, b = ours.get(key, "the template's default"), theirs.get(key, "the template's default")
            if a != b:
                yield Cause(
                    "thinking mode differs",
                    CERTAIN if key in ours and key in theirs else LIKELY,
                    [f"trained with {key} = {a}, served with {b}"],
                    "Generate the training answers in the mode that is served, or in both.",
                )


# ---- what is measured --------------------------------------------------------------------------------------------------


def _measured(case: Case) -> Iterator[Cause]:
    measured, own = case.measured, case.own
    if measured is None or own is None:
        return
    protocol, tau, wanted = measured.get("protocol") or {}, float(measured["tau"]), own["tau"]
    low, high = own["interval"]
    parts = {name: part["tau"] for name, part in own["by_category"].items()}
    text = f"measured tau {tau:.2f}, replayed {wanted:.2f} [{low:.2f}, {high:.2f}] on held-out conversations"
    if tau >= low - (high - low) / 2:
        case.checked.append(f"{text}: they agree")
        return
    data, prompts = str(protocol.get("data", "")), int(protocol.get("prompts") or 0)
    if data != "held-out conversations":
        span = f"by category the replay goes from {min(parts.values()):.2f} to {max(parts.values()):.2f}"
        fits = min(parts.values()) <= tau + (high - low)
        yield Cause(
            "the benchmark asks for something else",
            LIKELY if fits else POSSIBLE,
            [text, f"it was measured on {data or 'unnamed prompts'} ({prompts} prompts); {span}"],
            "Measure on held-out conversations of the kind you serve, or train on the kind you measure.",
        )
    if prompts and prompts < 8:
        yield Cause("the benchmark asks for something else", POSSIBLE, [f"only {prompts} prompts"], "Use 30 or more.")


def case_from(
    run: Path | None,
    draft: Path | None,
    target: str | None,
    engine: str | None,
    launch: str | None,
    log: Path | None,
    measured: Path | Json | None,
) -> Case:
    """A case from the command's options; what a run folder knows is taken from there."""
    if run is None and draft is None:
        raise UsageError("eyas doctor: give --run RUN or --draft D, better both, and --target T.")
    if run is not None and not (run / "recipe.yaml").exists():
        raise UsageError(f"{run}: no recipe.yaml in it. --run names the folder that `eyas run` wrote.")
    if engine is not None and engine not in ENGINES:
        raise UsageError(f"--engine {engine}: expected one of {', '.join(ENGINES)}.")
    where = draft or (run / "draft" if run else None)
    assert where is not None
    if not where.is_dir():
        raise UsageError(f"{where}: no such folder. Expected a draft: config.json and model.safetensors.")
    if launch and engine is None:
        engine = next((e for e, mark in (("vllm", "vllm"), ("sglang", "sglang"), ("llamacpp", "llama-")) if mark in launch), None)  # fmt: skip
    case = Case(where, None, run, engine, launch or "", log.read_text("utf-8", "replace") if log else "")
    name = target or case.recipe.get("target")
    case.target = read_target(name) if name else None
    case.measured = read_json(measured) if isinstance(measured, Path) else measured
    return case


def measure_now(case: Case, url: str) -> Json:
    """What a live server reaches on the run's held-out conversations."""
    from eyas.measure import measure

    if case.run is None or case.engine is None:
        raise UsageError("eyas doctor --url: give --run RUN and --engine E too, to know the prompts and whom to ask.")
    target = str(case.target.path) if case.target else None
    return measure(
        case.engine, url, case.run / "conversations" / "conversations.jsonl", target=target, draft=case.draft
    )
