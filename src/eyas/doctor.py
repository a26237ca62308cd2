"""Why the figures disagree: causes, ranked, with their evidence and the fix.

Works from the top down (what was trained, what was exported, what the engine loads, what it feeds, what is measured)
and says which links were proved sound. A cause is certain only where the fault itself was seen: in the bytes of the
file, in the launch line, or in two replays of the same conversations that differ. What merely fits is possible.
"""

import json
import shlex
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from eyas.artifact import read_manifest
from eyas.errors import EyasError, UsageError
from eyas.files import fingerprint, read_json
from eyas.serving.check import Draft, check, read_draft
from eyas.serving.contract import ENGINES
from eyas.serving.names import draft_config_from, flatten
from eyas.serving.tensors import FLOATS, StoredTensor
from eyas.target import Target, read_target

Json = dict[str, Any]
CERTAIN, LIKELY, POSSIBLE = ORDER = ("certain", "likely", "possible")
OVERFIT = 0.12  # training accuracy of the first drafted token over the held-out one, from which data are short
MANY = 50_000  # training conversations beyond which a gap is not put down to their number
ASKED = 32  # held-out conversations that a live server answers
OUTSIDE = 0.05  # share of teacher tokens outside the draft vocabulary that a training accuracy may not hide

# What a fault is called here, by how the names of `check`'s rules for it begin. Others: the engine's contract.
RULES = {
    "weights dropped by name": ("NAME_", "MISSING", "ADAPTER", "TWICE"),
    "fc bypassed": ("NAUX", "USE_AUX_FALSE"),
    "auxiliary layers differ": ("AUX",),
    "vocabulary map": ("D2T", "DVOCAB"),
    "head replaced": ("LMHEAD", "TIE"),
    "embedding": ("EMBED",),
    "norm placement": ("NBR", "NBFC", "FCNORM", "NORMOUT", "FLAG_TENSOR", "LAYERS_NORM"),
    "RoPE differs": ("ROPE", "MROPE"),
    "quantised target": ("TARGET_QUANT", "TARGET_ROTATED"),
}
# The same by what of a draft's config is not as it was in training.
KEYS = {
    "RoPE differs": ("rope_parameters",),
    "norm placement": ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"),
    "auxiliary layers differ": ("aux_layers",),
    "vocabulary map": ("draft_vocab_size",),
    "head replaced": ("tie_word_embeddings",),
}
FIXES = {
    "trained wrongly": "Mend what the audit names and train again.",
    "weights cannot be read": "Export it again.",
    "embedding": "Leave embed_tokens out of the file, and train with the target's, frozen.",
    "head replaced": "Export the trained head again.",
    "fc bypassed": "Serve it with EAGLE3.",
    "another target": "Train on states of the very target that is served, or serve the trained one.",
    "quantised target": "Serve the plain target, or train on states of the quantised one.",
    "chat template differs": "Serve with the template of training, or generate, extract and train with this one.",
    "thinking mode differs": "Generate the training answers in the mode that is served, or in both.",
    "wrong algorithm flag": "Start it with EAGLE3 (SGLang: --speculative-algorithm EAGLE3, vLLM: method eagle3).",
    "accuracy counted inside the draft vocabulary": "Choose a larger draft vocabulary (vocab.size: auto).",
    "little data": "More on-policy conversations of the kind you serve; more epochs on these will not help.",
    "the benchmark asks for something else": "Measure on 30 or more held-out conversations of the kind you serve, or "
    "train on the kind you measure.",
    "not explained": "Serve a pair of `eyas canary` in the same way: it tells whether the engine's wiring is right.",
}


@dataclass
class Cause:
    cause: str
    confidence: str
    evidence: list[str]
    fix: str = ""

    def __post_init__(self) -> None:
        self.fix = self.fix or FIXES[self.cause]


@dataclass
class Case:
    """Whatever there is of a drafter that disappoints: `launch` in words, `measured` the JSON of `eyas measure`, decode
    or replay. `checked` collects what was proved sound."""

    draft: Path
    target: Target | None
    run: Path | None = None
    engine: str | None = None
    launch: list[str] = field(default_factory=list)
    log: str = ""
    measured: Json | None = None
    checked: list[str] = field(default_factory=list)

    @cached_property
    def provenance(self) -> Json:
        """What eyas.json says of the draft's origin: the target's fingerprints, the recipe."""
        file = self.draft / "eyas.json"
        return (read_json(file).get("provenance") or {}) if file.exists() else {}

    @property
    def trained_with(self) -> Json:
        """Fingerprints of the target that the draft was trained with; empty where they are not known."""
        return self.provenance.get("target") or {}

    @cached_property
    def recipe(self) -> Json:
        import yaml

        if self.run is None:
            return self.provenance.get("recipe") or {}
        return yaml.safe_load((self.run / "recipe.yaml").read_text("utf-8"))

    @cached_property
    def stored(self) -> Draft | None:
        """What the draft's folder holds; None where it cannot be read."""
        return read_draft(self.draft)[0]

    @cached_property
    def own(self) -> Json | None:
        """Replay of the draft as it was trained; None without a store, or where it cannot be read so."""
        try:
            return self.replayed(None)
        except EyasError:
            return None

    def replayed(self, engine: str | None) -> Json | None:
        """Replay over the run's held-out conversations, as eyas or as an engine loads the draft; None without any."""
        if self.run is None or self.target is None or not (self.run / "store" / "manifest.json").exists():
            return None
        from eyas.data.split import load_split
        from eyas.decode.replay import replay
        from eyas.decode.tree import Tree
        from eyas.features.store import Store

        store = Store(self.recipe.get("extract", {}).get("store") or self.run / "store")
        have = set(store.ids)
        ids = [i for i in load_split(self.run / "conversations" / "split.json")["heldout"] if i in have]
        protocol = (self.measured or {}).get("protocol") or {}
        if protocol.get("data") == "held-out conversations":
            ids = ids[: protocol.get("prompts")]  # the same as were measured: those in front
        k, tree = protocol.get("k") or self.recipe.get("replay", {}).get("k") or 4, protocol.get("tree")
        shape = Tree(**tree) if tree else int(k)
        found = replay(self.draft, self.target, store, shape, ids, "held-out conversations", engine)[1]
        return found if found["rounds"] else None


def examine(case: Case) -> Json:
    """The contract's object: causes, best supported first, and the links that were proved sound."""
    merged: dict[str, Cause] = {}
    for link in (_trained, _exported, _loaded, _same_target, _algorithm, _template, _data, _measured):
        for cause in link(case):
            known = merged.setdefault(cause.cause, cause)
            if known is not cause:
                known.evidence += [e for e in cause.evidence if e not in known.evidence]
                known.confidence = min(known.confidence, cause.confidence, key=ORDER.index)
    ranked = sorted(merged.values(), key=lambda cause: ORDER.index(cause.confidence))
    if not ranked:
        case.checked.append("nothing that was looked at is wrong")
    return {"causes": [asdict(cause) for cause in ranked], "checked": case.checked}


# ---- what was trained ------------------------------------------------------------------------------------------------


def _trained(case: Case) -> Iterator[Cause]:
    for name, words in (("audit.json", "before training"), ("after.json", "after training")):
        file = case.run / "audit" / name if case.run else None
        if file and file.exists():
            audit = read_json(file)
            if audit["verdict"] == "go":
                case.checked.append(f"audit {words}: GO")
            else:
                yield Cause("trained wrongly", CERTAIN, audit["reasons"])


def _data(case: Case) -> Iterator[Cause]:
    """What the log of a finished training says of the data: too little of it, or accuracy that leaves tokens out."""
    from eyas.report.page import read_log

    manifest = read_manifest(case.run / "train", "train") if case.run else None
    if case.run is None or manifest is None:
        return
    steps, checks = read_log(case.run / "train" / "log.jsonl")
    steps = [line for line in steps if line.get("acc")]
    if not steps or not checks:
        return
    last = steps[-max(1, len(steps) // 10) :]
    outside = float(np.mean([line["oov"] for line in last]))
    first = float(np.mean([line["acc"][0] for line in last]))
    held, documents = checks[-1]["validation"]["per_position"][0], manifest.figures["documents"]
    if outside >= OUTSIDE:
        text = f"{outside:.1%} of the teacher's tokens lie outside the draft vocabulary: misses in the engine"
        yield Cause("accuracy counted inside the draft vocabulary", LIKELY, [text])
    if first - held > OVERFIT and documents < MANY:
        text = f"the first drafted token is right {first:.0%} of the time in training and {held:.0%} on held-out"
        yield Cause("little data", LIKELY, [f"{text} conversations, after {documents:,} conversations"])


# ---- what was exported -----------------------------------------------------------------------------------------------


def _exported(case: Case) -> Iterator[Cause]:
    draft = case.stored
    if draft is None:
        yield Cause("weights cannot be read", CERTAIN, [f"{case.draft} holds no readable draft"])
        return
    yield from _embedding_and_head(case, draft)
    reference = case.run / "draft" if case.run else None
    if reference is None or not reference.is_dir() or reference.resolve() == case.draft.resolve():
        return
    there, _ = read_draft(reference)
    if there is None:
        return
    differs = [n for n, t in there.internal.items() if n not in draft.internal or not _same(t, draft.internal[n])]
    if not differs:
        case.checked.append("every tensor is the run's export, bit for bit")
    elif "d2t" in differs and "lm_head.weight" not in differs:
        fix = f"Take d2t and t2d from {reference}; a map may never be made anew for a trained head."
        text = "d2t is not the one that the head was trained with (the run's export has another)"
        yield Cause("vocabulary map", CERTAIN, [text], fix)
    else:
        text = f"differs from {reference} in {', '.join(differs[:6])}"
        yield Cause("not the draft that was trained", CERTAIN, [text], f"Serve {reference}, or export again.")
    try:
        ours = _config(there, case.target)
    except UsageError:
        return  # not even the run's own goes with this target, so nothing follows from it
    fix = f"Restore {reference / 'config.json'}."
    try:
        theirs = _config(draft, case.target)
    except UsageError as error:
        yield Cause("config cannot be read", CERTAIN, [str(error)], fix)
        return
    for name, keys in KEYS.items():
        for key in (key for key in keys if ours[key] != theirs[key]):
            text = f"config.json says {key} = {theirs[key]}, it was trained with {ours[key]}"
            yield Cause(name, CERTAIN, [text], fix)


def _config(draft: Draft, target: Target | None) -> Json:
    """A draft's config in eyas' own terms, the same for every layout of it."""
    tied = bool(flatten(draft.raw).get("tie_word_embeddings"))
    return asdict(draft_config_from(draft.raw, target)) | {"tie_word_embeddings": tied}


def _embedding_and_head(case: Case, draft: Draft) -> Iterator[Cause]:
    if case.target is None or not case.target.tensor_files:
        return
    if case.trained_with and case.trained_with["weights"] != case.target.fingerprints["weights"]:
        return  # another target's embedding would prove nothing
    import torch

    mine, theirs = _beside(draft, "embed_tokens.weight", case.target, "embedding")
    if mine.shape == theirs.shape and torch.equal(mine, theirs):
        case.checked.append("embedding: the target's, bit for bit")
    elif mine.shape == theirs.shape:
        cosine = float(torch.cosine_similarity(mine, theirs).mean())
        word = "random" if cosine < 0.5 else "trained away from the target's"
        text = f"its embedding is {word} (mean cosine with the target's {cosine:.2f})"
        yield Cause("embedding", CERTAIN if cosine < 0.5 else LIKELY, [text])
    if case.recipe and not case.recipe.get("train", {}).get("freeze_head"):
        mine, theirs = _beside(draft, "lm_head.weight", case.target, "head")
        ids = np.arange(len(mine)) if draft.map is None else np.arange(len(draft.map)) + draft.map
        inside = (ids >= 0) & (ids < len(theirs))
        if len(ids) == len(mine) and inside.any() and torch.equal(mine[inside], theirs[ids[inside]]):
            text = "lm_head is the target's own rows bit for bit, though the recipe trained it"
            yield Cause("head replaced", CERTAIN, [text])


def _beside(draft: Draft, name: str, target: Target, part: str) -> Any:
    """Tensors in float32: of the draft, and the target's own rounded to its dtype; no rows where one is not there."""
    import torch

    stored, other = draft.internal.get(name), target.tensor_name(part)
    if stored is None or other is None:
        return torch.empty(0, 0), torch.empty(1, 1)
    mine = stored.torch()
    return mine.float(), target.read_tensor(other).to(mine.dtype).float()


def _same(a: StoredTensor, b: StoredTensor) -> bool:
    mine, theirs = (t.floats() if t.dtype in FLOATS else t.read() for t in (a, b))
    return a.shape == b.shape and np.array_equal(mine, theirs)


# ---- what the engine loads -------------------------------------------------------------------------------------------


def _loaded(case: Case) -> Iterator[Cause]:
    if case.engine is None:
        return
    again, refused, own = None, "", case.own
    try:
        again = case.replayed(case.engine)
    except EyasError as error:
        refused = str(error)
    look = f"See `eyas check {case.draft} --engine {case.engine}`."
    loaded, worse, taus, compared = f"as {ENGINES[case.engine].title} loads it", False, "", []
    if own and again:
        worse = again["tau"] < own["interval"][0]
        taus = f"tau is {again['tau']:.2f}, as trained {own['tau']:.2f}"
        compared = [f"replayed {loaded} {taus}, on the same conversations"]
    findings = check(case.draft, case.target, [case.engine])["verdicts"][case.engine]["findings"]
    serious = [f for f in findings if f["severity"] == "error" or f["outcome"] != "harmless"]
    for finding in serious:
        rule, grave = finding["rule"], finding["severity"] == "error"
        if compared and not worse and not grave:
            continue  # the replay shows that it does not matter here
        if finding["outcome"].startswith("raises"):
            confidence = CERTAIN if grave else POSSIBLE
        elif worse:
            confidence = CERTAIN if grave else LIKELY
        else:
            confidence = LIKELY if grave and not compared else POSSIBLE
        name = next((name for name, begins in RULES.items() if rule.startswith(begins)), "engine contract")
        yield Cause(name, confidence, [finding["message"], *compared], finding["fix"] or look)
    if not serious and (worse or (own and refused)):
        yield Cause("engine contract", LIKELY if worse else POSSIBLE, compared or [refused], look)
    elif own and again and not worse:
        case.checked.append(f"{loaded} {taus}: nothing is lost in loading")
    elif not serious and not refused:
        case.checked.append(f"{loaded}: nothing is dropped, replaced or read otherwise")


# ---- what the engine feeds -------------------------------------------------------------------------------------------


def _same_target(case: Case) -> Iterator[Cause]:
    if not case.trained_with or case.target is None:
        return
    now, path = case.target.fingerprints, case.target.path
    differs = {name for name, value in now.items() if case.trained_with.get(name) != value}
    quantised = case.target.config.get("quantization_config") or case.target.text.get("quantization_config")
    if "weights" in differs:
        evidence = [f"the target's weights in {path} are not those that the draft was trained for"]
        if quantised:
            evidence.append(f"they are quantised ({quantised.get('quant_method', 'unnamed method')})")
        yield Cause("quantised target" if quantised else "another target", CERTAIN, evidence)
    else:
        case.checked.append("target: the weights that the draft was trained for")
    if "chat_template" in differs:
        text = f"the chat template in {path} is not the one that the draft was trained with"
        yield Cause("chat template differs", CERTAIN, [text])
    if "tokenizer" in differs:
        yield Cause("another target", CERTAIN, ["the tokenizer differs from training"])


def _option(case: Case, *names: str) -> str | None:
    """The value of a command-line option of the launch line, written `--name value` or `--name=value`."""
    for at, word in enumerate(case.launch):
        name, _, value = word.partition("=")
        if name in names:
            return value or (case.launch[at + 1] if at + 1 < len(case.launch) else "")
    return None


def _object(text: str) -> Json | None:
    """A JSON object, or None where it is none."""
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _algorithm(case: Case) -> Iterator[Cause]:
    if "mat1 and mat2 shapes" in case.log:
        yield Cause("fc bypassed", LIKELY, ["the log shows a matrix of another width than fc expects"])
    found = _option(case, "--speculative-algorithm", "--speculative-algo")
    if vllm := _option(case, "--speculative-config", "--speculative_config", "-sc"):
        config = _object(vllm)
        if config is None:
            text = f"--speculative-config is no JSON object: {vllm}"
            yield Cause("wrong algorithm flag", LIKELY, [text], "Quote it.")
            return
        found = str(config.get("method") or "")
    if found and found.lower() != "eagle3":
        text = f"the server was started for {found!r}: one hidden state is fed where fc expects several"
        yield Cause("wrong algorithm flag", CERTAIN, [text])
    elif found:
        case.checked.append(f"launch line: {found}")
    elif found is None and case.launch and not any("spec" in w or w in ("-md", "--model-draft") for w in case.launch):
        text = "the launch line names no draft at all"
        yield Cause("wrong algorithm flag", CERTAIN, [text], "Add the draft's options.")
    if quantised := _option(case, "--quantization", "-q"):
        text = f"the server quantises the target ({quantised}); the draft was trained on its plain states"
        yield Cause("quantised target", LIKELY, [text])


def _template(case: Case) -> Iterator[Cause]:
    other, trained = _option(case, "--chat-template"), case.trained_with.get("chat_template")
    file = Path(other or "")
    if other and trained and (not file.is_file() or fingerprint(file.read_text("utf-8")) != trained):
        text = f"the server is started with --chat-template {other}, not with the template of training"
        yield Cause("chat template differs", CERTAIN if file.is_file() else LIKELY, [text])
    ours = (case.recipe.get("generate") or {}).get("template") or {}
    served = _option(case, "--default-chat-template-kwargs", "--chat-template-kwargs") or "{}"
    theirs = _object(served)
    if theirs is None:
        text = f"the launch line's --chat-template-kwargs is no JSON object: {served}"
        yield Cause("thinking mode differs", POSSIBLE, [text], "Quote it.")
        return
    for key in ("enable_thinking", "thinking", "reasoning_effort"):
        a, b = (options.get(key, "the template's default") for options in (ours, theirs))
        if a != b:
            confidence = CERTAIN if key in ours and key in theirs else LIKELY
            yield Cause("thinking mode differs", confidence, [f"trained with {key} = {a}, served with {b}"])


# ---- what is measured ------------------------------------------------------------------------------------------------


def _measured(case: Case) -> Iterator[Cause]:
    if case.measured is None or case.own is None:
        return
    tau, protocol, (low, high) = case.measured["tau"], case.measured.get("protocol") or {}, case.own["interval"]
    text = f"measured tau {tau:.2f}, replayed {case.own['tau']:.2f} [{low:.2f}, {high:.2f}] on held-out conversations"
    if tau >= low - (high - low) / 2:
        fits = tau <= high + (high - low) / 2
        case.checked.append(f"{text}: {'they agree' if fits else 'it is no less'}")
        return
    data, prompts, warm = protocol.get("data"), protocol.get("prompts") or 0, protocol.get("temperature")
    if data == "held-out conversations" and not warm:
        yield Cause("not explained", POSSIBLE, [text])
    else:
        parts = [part["tau"] for part in case.own["by_category"].values()]
        span = f"by category the replay goes from {min(parts):.2f} to {max(parts):.2f}"
        evidence = [text, f"it was measured on {data or 'unnamed prompts'} ({prompts} prompts); {span}"]
        evidence += [f"it was measured at temperature {warm:g}, the replay is greedy"] if warm else []
        confidence = LIKELY if min(parts) <= tau + (high - low) else POSSIBLE
        yield Cause("the benchmark asks for something else", confidence, evidence)
    if 0 < prompts < 8:
        yield Cause("the benchmark asks for something else", POSSIBLE, [f"only {prompts} prompts"])


# ---- the case --------------------------------------------------------------------------------------------------------


def case_from(
    run: Path | None,
    draft: Path | None,
    target: str | None,
    engine: str | None,
    launch: str | None,
    log: Path | None,
    measured: Path | None,
) -> Case:
    """A case from the command's options; what a run folder knows is taken from there."""
    where = draft or (run / "draft" if run else None)
    if where is None:
        raise UsageError("eyas doctor: give --run RUN or --draft D, better both, and --target T.")
    if run is not None and not (run / "recipe.yaml").exists():
        raise UsageError(f"{run}: no recipe.yaml in it. --run names the folder that `eyas run` wrote.")
    if engine is not None and engine not in ENGINES:
        raise UsageError(f"--engine {engine}: expected one of {', '.join(ENGINES)}.")
    if not where.is_dir():
        raise UsageError(f"{where}: no such folder. Expected a draft: config.json and model.safetensors.")
    if log and not log.is_file():
        raise UsageError(f"--log {log}: no such file.")
    try:
        words = shlex.split(launch or "")
    except ValueError as error:
        raise UsageError(f"--launch {launch}: not a shell command ({error}).") from None
    marks = {"vllm": "vllm", "sglang": "sglang", "llama-": "llamacpp"}
    engine = engine or next((name for mark, name in marks.items() if mark in (launch or "")), None)
    case = Case(where, None, run, engine, words, log.read_text("utf-8", "replace") if log else "")
    if name := target or (case.recipe["target"] if run else None):
        case.target = read_target(name)
    if measured:
        case.measured = read_json(measured)
        if not isinstance(case.measured, dict) or not isinstance(case.measured.get("tau"), int | float):
            raise UsageError(f"{measured}: no tau in it. Expected what `eyas measure --json` or decode printed.")
    return case


def measure_now(case: Case, url: str) -> Json:
    """What a live server reaches on the first `ASKED` of the run's held-out conversations."""
    from eyas.measure import measure

    if case.run is None or case.engine is None:
        raise UsageError("eyas doctor --url: give --run RUN and --engine E too, to know the prompts and whom to ask.")
    prompts, target = case.run / "conversations" / "conversations.jsonl", str(case.target.path) if case.target else None
    told = _option(case, "--spec-draft-n-max", "--speculative-num-steps")
    k = int(told) if told and told.isdigit() else None
    if case.engine == "llamacpp":  # which does not say it
        k = k or case.recipe.get("replay", {}).get("k")
    return measure(case.engine, url, prompts, target=target, draft=case.draft, k=k, limit=ASKED)
