"""The pipeline: which stage makes which artifact from which, in one direction only.

Every stage is a function from artifacts to an artifact. A finished artifact whose inputs agree is skipped, one that was
cut off is gone on with, and one made from other inputs is refused with what differs.
"""

import json
import os
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eyas.artifact import Manifest, differences, read_manifest
from eyas.draft.config import DraftConfig, draft_config_for
from eyas.errors import EyasError, UsageError
from eyas.files import fingerprint, fingerprint_file, read_json, write_json, write_text
from eyas.recipe import Recipe
from eyas.recipe import Train as TrainSection
from eyas.report.words import STAGES as VERB_OF
from eyas.target import LoadedTarget, Target, default_aux_layers, load_target, load_tokenizer, read_target

if TYPE_CHECKING:
    import numpy as np

    from eyas.data.template import ChatTemplate
    from eyas.draft.model import Draft
    from eyas.train.online import Online
    from eyas.train.trainer import Trainer

Figures = dict[str, Any]


class NoGo(EyasError):
    """The audit said no, and nobody accepted it."""


@dataclass
class Run:
    """A recipe at work. Heavy things are loaded when a stage asks for them, and let go when it no longer needs them."""

    recipe: Recipe
    accept: str | None = None
    loaded: LoadedTarget | None = None
    done: dict[str, Manifest] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        return Path(self.recipe.run)

    @cached_property
    def target(self) -> Target:
        return read_target(self.recipe.target)

    def load(self) -> LoadedTarget:
        if self.loaded is None:
            self.loaded = load_target(self.target, self.recipe.dtype, trust_remote_code=self.recipe.trust_remote_code)
        return self.loaded

    @cached_property
    def template(self) -> "ChatTemplate":
        from eyas.data.template import ChatTemplate

        tokenizer = load_tokenizer(self.target, self.recipe.trust_remote_code)
        return ChatTemplate(tokenizer, self.recipe.generate.template or None)

    @property
    def store(self) -> str | Path:
        """The address of the feature store."""
        return self.recipe.extract.store or self.folder / "store"

    @cached_property
    def layers(self) -> list[int]:
        return sorted(self.recipe.extract.layers or default_aux_layers(self.target.num_layers))

    def documents(self) -> list[dict[str, Any]]:
        return _read_lines(self.folder / "answers" / "answers.jsonl")

    def to_extract(self) -> list[dict[str, Any]]:
        """Documents for the store: all or, where training computes its own, those of validation and replay."""
        documents = self.documents()
        if not self.recipe.train.online:
            return documents
        heldout = set(self.parts()["heldout"])
        return [document for document in documents if document["id"] in heldout]

    def parts(self) -> dict[str, list[str]]:
        """Ids of the training and held-out documents that have an answer."""
        from eyas.data.split import load_split

        have = {document["id"] for document in self.documents()}
        parts = load_split(self.folder / "conversations" / "split.json")
        return {name: [i for i in ids if i in have] for name, ids in parts.items()}

    def draft_config(self) -> DraftConfig:
        from eyas.draft import vocab

        return self.shape(len(vocab.load(self.folder / "vocab")))

    def shape(self, size: int) -> DraftConfig:
        """The recipe's draft with a vocabulary of `size`."""
        shape = self.recipe.draft.model_dump(exclude_none=True)
        return draft_config_for(self.target, size, aux_layers=self.layers, **shape)

    def trainer(
        self,
        folder: Path | None = None,
        settings: TrainSection | None = None,
        inputs: str | None = None,
        weights: "Mapping[str, np.ndarray] | None" = None,
    ) -> "Trainer":
        """The trainer of the `train` stage, or one like it with another folder, settings and weights of its tokens."""
        from eyas.draft import vocab
        from eyas.features.store import Store
        from eyas.train.trainer import Trainer

        online = self.online
        self.loaded = None  # else the target is not needed for training: give its memory back
        parts = self.parts()
        own = replace(STAGES_BY_NAME["train"], upstream=("store", "vocab"))
        return Trainer(
            folder or self.folder / "train",
            settings or self.recipe.train,
            self.draft_config(),
            self.target,
            vocab.load(self.folder / "vocab"),
            Store(self.store),
            parts["train"],
            parts["heldout"],
            inputs or fingerprint(inputs_of(self, own)),
            self.recipe.replay.k,
            weights,
            online,
        )

    @cached_property
    def online(self) -> "Online | None":
        """What computes states while training, where the recipe asks for it."""
        how = self.recipe.train.online
        if not how:
            return None
        from eyas.train.online import Online

        train = set(self.parts()["train"])
        documents = [document for document in self.documents() if document["id"] in train]
        cache = self.folder / "states" if how == "cache" else None
        rank = os.environ.get("RANK", "0")
        return Online(documents, self.load(), self.layers, cache, self.recipe.extract.codec, rank)


# The stages. Each returns its figures; the manifest is written around it.


def conversations(run: Run) -> Figures:
    from eyas.data.conversations import prepare_conversations
    from eyas.data.split import save_split, split

    section = run.recipe.conversations
    paths = [section.path] if isinstance(section.path, str) else section.path
    out = run.folder / "conversations" / "conversations.jsonl"
    report = prepare_conversations(
        paths,
        out,
        weights=section.weights,
        answers=run.recipe.generate.answers == "keep",
        policy=section.bad_rows,
        limit=section.limit,
        seed=section.seed,
        template=run.template,
    )
    rows = _read_lines(out)
    parts = split(rows, section.heldout, section.seed)
    save_split(parts, run.folder / "conversations" / "split.json")
    write_json(run.folder / "conversations" / "report.json", report.to_dict())
    return {
        "conversations": len(rows),
        "turns": sum(len(row["turns"]) for row in rows),
        "categories": len({row["category"] for row in rows}),
        "train": len(parts["train"]),
        "heldout": len(parts["heldout"]),
        "dropped": sum(report.dropped.values()),
        "scripts": dict(report.scripts),
        "mix": [
            {"category": name, "conversations": count, "share": round(count / len(rows), 4)}
            for name, count in report.categories.most_common()
        ],
    }


def answers(run: Run) -> Figures:
    section = run.recipe.generate
    rows, out = _read_lines(run.folder / "conversations" / "conversations.jsonl"), run.folder / "answers/answers.jsonl"
    if section.answers == "keep":
        from eyas.data.documents import import_documents

        length = min(run.target.max_positions, section.max_length or run.target.max_positions)
        report = import_documents(rows, run.template, out, max_tokens=length, policy=run.recipe.conversations.bad_rows)
        return {"documents": report.kept, "engine": "answers kept as they are", **report.to_dict()}
    common: dict[str, Any] = {
        "max_new_tokens": section.max_new_tokens,
        "max_length": section.max_length,
        "temperature": section.temperature,
        "seed": section.seed,
        "on_long": section.on_long,
    }
    if section.servers:
        from eyas.data.servers import generate_from_servers

        key = os.environ.get("EYAS_API_KEY")
        asked: dict[str, Any] = {"kind": section.engine, "concurrency": section.concurrency, "api_key": key}
        return generate_from_servers(rows, run.target, run.template, section.servers, out, **common, **asked)
    from eyas.data.generate import generate

    return generate(rows, run.load(), out, slots=section.slots, template=run.template, **common)


def store(run: Run) -> Figures:
    from eyas.features.extract import extract

    section, recipe = run.recipe.extract, run.recipe
    threshold = section.self_check if section.self_check is not None else 0.9 * (recipe.generate.temperature == 0)
    options: dict[str, Any] = {
        "layers": run.layers,
        "codec": section.codec,
        "token_budget": section.token_budget,
        "threshold": threshold,
        "inputs": inputs_of(run, STAGES_BY_NAME["store"]),
    }
    if section.actors:
        from eyas.features.cluster import extract as extract_by_actors

        options |= {"dtype": recipe.dtype, "trust_remote_code": recipe.trust_remote_code}
        return extract_by_actors(run.to_extract(), run.target, run.store, section.actors, **options)
    if section.servers:
        from eyas.features.engines import ends, open_source

        target = ends(run.target, recipe.dtype)
        return extract(run.to_extract(), target, run.store, source=open_source(section.servers, target), **options)
    return extract(run.to_extract(), run.load(), run.store, **options)


def vocab(run: Run) -> Figures:
    from eyas.draft import vocab as v

    size = run.recipe.vocab.size
    train = set(run.parts()["train"])
    documents = [d for d in run.documents() if d["id"] in train]
    spans = v.supervised_spans(documents, run.target.vocab_size)
    counts = v.count_tokens(spans, run.target.vocab_size)
    always = set(run.template.special_ids()) | set(run.template.end_ids) | set(run.target.eos_ids)
    rule = "given in the recipe"
    if size == "auto":
        size, rule = v.auto_size(counts, always)
    elif size == "full":
        size, rule = run.target.vocab_size, "the target's whole vocabulary"
    if run.recipe.vocab.like:
        chosen, rule = v.like(run.recipe.vocab.like, run.target, counts), f"the map of {run.recipe.vocab.like}"
        size, always = len(chosen), set(chosen.targets.tolist())
    else:
        chosen = v.choose(counts, always, size)
    k = run.recipe.replay.k
    shape = run.shape(size)
    head = (shape.hidden_size, shape.step_parameters)
    points = v.curve(spans, counts, always, k=k, head=head)
    here = v.curve(spans, counts, always, sizes=[size], k=k)[0]
    figures = {
        "size": size,
        "rule": rule,
        "coverage": here.coverage,
        "unseen_coverage": here.unseen_coverage,
        "oov_share": 1 - here.coverage,
        "untrained_rows": here.untrained,
        "tau_ceiling": here.tau_ceiling,
        "k": k,
        "mix": v.mix(documents, chosen),
        "curve": [{name: round(value, 4) for name, value in vars(p).items()} for p in points],
    }
    write_json(run.folder / "vocab" / "vocab.json", figures | {"curve": [[p.size, p.coverage] for p in points]})
    v.save(chosen, run.folder / "vocab", inputs_of(run, STAGES_BY_NAME["vocab"]), figures)
    return figures


def audit(run: Run) -> Figures:
    from eyas.audit import audit_before
    from eyas.draft import vocab as v

    trainer = run.trainer()
    chosen = v.load(run.folder / "vocab")
    settings = run.recipe.train
    found = audit_before(
        run.target,
        trainer.draft,
        teacher_head=trainer.teacher_head,
        optimizer=trainer.optimizers,
        sources=sources(run, trainer.draft),
        store_meta=trainer.store.meta,
        store_figures=run.done["store"].figures | {"longest": int(trainer.store.lengths.max())},
        vocab=read_json(run.folder / "vocab" / "vocab.json")
        | {"always": sorted(run.template.special_ids() | set(run.target.eos_ids)), "d2t": chosen.d2t},
        policy_frozen=frozen_by(run),
        dry_step=trainer.dry_step,
        plan={"epochs": settings.epochs, "steps": settings.steps, "batch_tokens": settings.batch_tokens},
    )
    _judge(run, found, "audit", "audit")
    return {name: found[name] for name in ("verdict", "total_params", "trained_params", "frozen_params")}


def _judge(run: Run, found: dict[str, Any], title: str, name: str) -> None:
    """Write an audit; raise NoGo where it says so and nobody accepted that."""
    from eyas.audit import to_markdown

    page = run.folder / "audit" / f"{name}.md"
    bad = found["verdict"] != "go"
    if bad and run.accept:
        found["accepted"] = run.accept
    write_json(page.with_suffix(".json"), found)
    write_text(page, to_markdown(found))
    if bad and not run.accept:
        raise NoGo(
            f"{title}: NO-GO. {' '.join(found['reasons'])} See {page}; "
            "mend it, or go on all the same with `--accept REASON`."
        )


def sources(run: Run, draft: "Draft") -> dict[str, str]:
    """Where each component's first values come from, in words."""
    embedding, head = (run.target.tensor_name(part) for part in ("embedding", "head"))
    random = f"random, N(0, 0.02²), seed {run.recipe.train.seed}"
    start = f"target {head}, rows chosen by t2d"
    config = draft.config
    copied = run.recipe.train.head_from_target and config.hidden_size == config.target_hidden_size
    found = {
        "embed_tokens": f"target {embedding}",
        "verifier_lm_head": start,
        "lm_head": start if copied else random,
        "fc": f"{random}, over each channel's rms" if draft.aux_scale is not None else random,
        "fc_norm": "ones",
        "input_norm": "ones",
        "norm": "ones",
        "d2t": "draft vocabulary",
        "t2d": "draft vocabulary",
    }
    for layer in range(config.num_layers):
        found |= {f"layers.{layer}.self_attn": random, f"layers.{layer}.mlp": random, f"layers.{layer}.norms": "ones"}
    if run.recipe.train.warm:
        return found | {c: f"checkpoint {run.recipe.train.warm}" for c in found if draft_owns(c)}
    if run.recipe.train.start == "least_squares":
        found["fc"] = "least squares: the target's final states on the auxiliary states, over each channel's rms"
        found["norm"] = "the rms of the target's final states"
        found["layers.0.self_attn"] = f"least squares on the embedding in v and o; q, k and the rest {random}"
    return found


def draft_owns(component: str) -> bool:
    """Whether a draft file brings this component, rather than the target or the vocabulary."""
    return component not in ("embed_tokens", "verifier_lm_head", "d2t", "t2d")


def train(run: Run) -> Figures:
    return run.trainer().fit()


def draft(run: Run) -> Figures:
    from eyas.audit import audit_after
    from eyas.report.page import read_log
    from eyas.serving.export import export

    trainer = run.trainer()
    path = checkpoint_path(run)
    before, state = states_around(trainer, path)
    validations = read_log(run.folder / "train" / "log.jsonl")[1]
    last = [line for line in validations if line["step"] <= trainer.step][-1]["validation"]
    out = export(
        state,
        trainer.draft.config,
        run.target,
        run.folder / "draft",
        provenance={
            "target": run.target.fingerprints,
            "checkpoint": path.name,
            "recipe": run.recipe.model_dump(mode="json"),
            "tau": last["tau"],
            "protocol": last["protocol"],
        },
        embed=run.recipe.export.embed,
    )
    found = audit_after(before, state, frozen_by(run), out, run.target, trainer.draft.config)
    _judge(run, found, "audit after training", "after")
    size = sum(file.stat().st_size for file in out.glob("*.safetensors"))
    return {"bytes": size, "audit": found["verdict"], "tau": last["tau"], "protocol": last["protocol"]}


def audit_checkpoint(run: Run, name: str | None = None) -> dict[str, Any]:
    """The audit after training of a checkpoint (as `checkpoint_path` names it); beside the draft if that was made of it."""
    from eyas.audit import audit_after

    trainer, path, exported = run.trainer(), checkpoint_path(run, name), run.folder / "draft"
    before, state = states_around(trainer, path)
    told = read_json(exported / "eyas.json") if (exported / "eyas.json").exists() else {}
    beside = exported if told.get("provenance", {}).get("checkpoint") == path.name else None
    return audit_after(before, state, frozen_by(run), beside, run.target, trainer.draft.config)


def checkpoint_path(run: Run, name: str | None = None) -> Path:
    """A checkpoint of the run: "best" by validation tau, "latest", a step or a folder; else as `export.checkpoint` says."""
    from eyas.train import checkpoint

    folder = run.folder / "train" / "checkpoints"
    found = checkpoint.steps(folder)
    name = name or run.recipe.export.checkpoint
    if name == "best":
        found += [best] if (best := checkpoint.best(folder)) else []
    elif name != "latest":
        found = [path for path in found if name in (path.name, str(path), path.name[-8:].lstrip("0"))] or [Path(name)]
    if not found or not (found[-1] / "state.json").exists():
        raise UsageError(f"{folder}: no checkpoint {name} there. Run `eyas train` first, or name another.")
    return found[-1]


def states_around(trainer: "Trainer", path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The draft's state dict before training, and as the checkpoint at `path` has it."""
    before = trainer.draft.served_state()
    trainer.load(path)
    return before, trainer.draft.served_state()


def frozen_by(run: Run) -> set[str]:
    return {"embed_tokens"} | ({"lm_head"} if run.recipe.train.freeze_head else set())


def check(run: Run) -> Figures:
    from eyas.serving.check import check as check_draft

    found = check_draft(run.folder / "draft", run.target, list(run.recipe.export.engines))
    write_json(run.folder / "check" / "check.json", found)
    return {engine: verdict["verdict"] for engine, verdict in found["verdicts"].items()}


def replay(run: Run) -> Figures:
    from eyas.data.preview import pieces
    from eyas.decode.replay import replay as replay_chains
    from eyas.decode.replay import tokens_by_state
    from eyas.features.store import Store

    states = Store(run.store)
    parts = run.parts()
    k = run.recipe.replay.k
    found, result = replay_chains(
        run.folder / "draft", run.target, states, k, parts["heldout"], "held-out conversations"
    )
    worst = sorted(
        (c for c in found.conversations if len(c.accepted) >= 8), key=lambda c: sum(c.accepted) / len(c.accepted)
    )
    tokenizer = run.template.tokenizer
    result["worst"] = []
    for c in worst[:3]:
        sample = states.read(c.id)
        texts = pieces(tokenizer, sample.tokens.tolist())
        tau = 1 + sum(c.accepted) / len(c.accepted)
        result["worst"].append(
            {"id": c.id, "category": c.category, "tau": tau, "tokens": tokens_by_state(c, sample, texts, k)}
        )
    write_json(run.folder / "replay" / "replay.json", result)
    write_json(run.folder / "preview.json", _preview(run, parts["heldout"]))
    return {name: result[name] for name in ("tau", "accept_rate", "speedup", "protocol")}


def _preview(run: Run, ids: list[str]) -> list[dict[str, Any]]:
    from eyas.data.preview import runs

    chosen = {i: None for i in ids[:40]}
    documents = [d for d in run.documents() if d["id"] in chosen]
    multi = [d for d in documents if len(d["spans"]) > 1][:1]
    short = sorted((d for d in documents if len(d["spans"]) == 1), key=lambda d: len(d["tokens"]))[:2]
    tokenizer = run.template.tokenizer
    return [
        {
            "id": d["id"],
            "category": d["category"],
            "tokens": [{"text": t, "supervised": s, "special": x} for t, s, x in runs(tokenizer, d)],
        }
        for d in short + multi
    ]


# The order.


@dataclass(frozen=True)
class Stage:
    name: str
    work: Callable[[Run], Figures]
    sections: tuple[str, ...]
    upstream: tuple[str, ...]


STAGES = [
    Stage("conversations", conversations, ("conversations",), ()),
    Stage("answers", answers, ("generate",), ("conversations",)),
    Stage("store", store, ("extract",), ("answers",)),
    Stage("vocab", vocab, ("vocab",), ("conversations", "answers")),
    Stage("audit", audit, ("draft", "train"), ("store", "vocab")),
    Stage("train", train, ("draft", "train"), ("store", "vocab", "audit")),
    Stage("draft", draft, ("export",), ("train",)),
    Stage("check", check, ("export",), ("draft",)),
    Stage("replay", replay, ("replay",), ("draft", "store")),
]
STAGES_BY_NAME = {stage.name: stage for stage in STAGES}
VERBS = {verb: stage for stage, verb in VERB_OF.items()}


def inputs_of(run: Run, stage: Stage) -> dict[str, str]:
    """sha256 of everything that the stage's result depends on."""
    inputs = {f"recipe.{name}": run.recipe.section(name) for name in stage.sections}
    for name in stage.upstream:
        if name not in run.done:
            manifest = read_manifest(run.folder / name, name)
            if manifest is None:
                raise UsageError(f"{run.folder / name}: not there yet. Run `eyas {VERB_OF[name]}` or `eyas run` first.")
            run.done[name] = manifest
        inputs[name] = run.done[name].id
    inputs |= {f"target.{name}": value for name, value in run.target.fingerprints.items()}
    if stage.name == "conversations":
        path = run.recipe.conversations.path
        for file in [path] if isinstance(path, str) else path:
            inputs[f"file {file}"] = _content(Path(file))
        if run.recipe.generate.answers == "keep":
            inputs["recipe.generate.answers"] = fingerprint("keep")
    if stage.name in ("answers", "store"):
        inputs["dtype"] = fingerprint(run.recipe.dtype)
    if stage.name == "store" and run.recipe.train.online:
        inputs["recipe.train.online"] = fingerprint(True)
    return inputs


def _content(path: Path) -> str:
    if path.is_file():
        return fingerprint_file(path)
    if not path.exists():
        raise UsageError(f"{path}: no such file. `conversations.path` names the prompts or conversations to train on.")
    return fingerprint(
        [[str(f.relative_to(path)), fingerprint_file(f)] for f in sorted(path.rglob("*")) if f.is_file()]
    )


def perform(run: Run, stage: Stage) -> bool:
    """Bring one stage to its end; False when it stood already."""
    folder = run.folder / stage.name
    rank, size = (int(os.environ.get(name, default)) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1")))
    if size > 1 and stage.name != "train":
        raise UsageError(
            f"{stage.name}: runs in one process. Only `eyas train` runs under torchrun: first `eyas run --until audit`."
        )
    inputs = inputs_of(run, stage)
    manifest = read_manifest(folder, stage.name)
    begun = folder / "begun.json"
    before: Figures = read_json(begun) if begun.exists() else {"inputs": None, "seconds": 0.0}
    found = manifest.inputs if manifest else before["inputs"]
    if found is not None and found != inputs:
        names = ", ".join(differences(inputs, found))
        raise UsageError(
            f"{folder}: was made from something else ({names} differ). Mixing is refused: add `--redo {stage.name}` "
            "to make it and what follows anew, or name another `run` folder."
        )
    if manifest is not None:
        run.done[stage.name] = manifest
        return False
    if rank > 0:  # trains along; the first rank writes
        run.done[stage.name] = Manifest(stage.name, inputs, stage.work(run))
        return True
    folder.mkdir(parents=True, exist_ok=True)
    write_json(begun, {"inputs": inputs, "seconds": before["seconds"]})
    start = time.monotonic()
    try:
        figures = stage.work(run)
    except BaseException:  # time spent before an interruption counts; what SIGKILL took is lost
        if begun.exists():
            with suppress(OSError, EyasError):
                write_json(begun, {"inputs": inputs, "seconds": before["seconds"] + time.monotonic() - start})
        raise
    folder.mkdir(parents=True, exist_ok=True)
    written = read_manifest(folder, stage.name)
    seconds = before["seconds"] + time.monotonic() - start
    done = Manifest(stage.name, inputs, (written.figures if written else {}) | figures, seconds)
    done.write(folder)
    begun.unlink(missing_ok=True)
    run.done[stage.name] = done
    return True


def redo(run: Run, name: str) -> None:
    """Remove a stage's artifact and every one made from it."""
    if name not in STAGES_BY_NAME:
        raise UsageError(f"--redo {name}: expected one of {', '.join(STAGES_BY_NAME)}.")
    gone = {name}
    for stage in STAGES:
        if stage.name in gone or gone & set(stage.upstream):
            gone.add(stage.name)
            shutil.rmtree(run.folder / stage.name, ignore_errors=True)
    if "store" in gone and run.recipe.extract.store:
        from eyas.features.store import Place

        Place(run.store).clear()


def run_all(run: Run, until: str | None = None, say: Callable[[str], None] = lambda _: None) -> Path | None:
    """Every stage in order up to `until` (a stage or its verb). Returns the report's path when all were run."""
    last = VERBS.get(until or "", until or "")
    if last and last not in STAGES_BY_NAME:
        raise UsageError(f"--until {until}: expected one of {', '.join(STAGES_BY_NAME)}.")
    if run.target.chat_template is None:
        raise UsageError(
            f"{run.target.path}: this target has no chat template (chat_template.jinja or tokenizer_config.json). "
            "Use an instruct model, or add the template that it is served with."
        )
    run.folder.mkdir(parents=True, exist_ok=True)
    write_text(run.folder / "recipe.yaml", run.recipe.to_yaml())
    for stage in STAGES:
        fresh = perform(run, stage)
        say(f"{stage.name}: {'done' if fresh else 'stands'}")
        for row in run.done[stage.name].figures.get("mix", []) if fresh else []:
            say("  " + ", ".join(f"{key} {value}" for key, value in row.items()))
        if stage.name == last:
            return None
    return finish(run)


def finish(run: Run) -> Path:
    """Summary and report, made anew each time: they are cheap and read everything."""
    from eyas.report.page import write_report

    write_json(run.folder / "summary.json", {"draft": str(run.folder / "draft"), "serve": serve_commands(run)})
    return write_report(run.folder)


def serve_commands(run: Run) -> dict[str, str]:
    from eyas.serving.contract import serve_command

    target, draft, k = run.recipe.target, str(run.folder / "draft"), run.recipe.replay.k
    return {engine: serve_command(engine, target, draft, k) for engine in ("sglang", "vllm")}


def _read_lines(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        raise UsageError(f"{path}: not there yet. Run the stage before, or `eyas run`.")
    with open(path, encoding="utf-8") as file:
        return [json.loads(line) for line in file]
