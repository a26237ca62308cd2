"""The report: one self-contained page that shows a run from its artifacts. No script, no network, light and dark."""

import functools
import json
import math
import re
import statistics
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from eyas import __version__
from eyas.errors import UsageError
from eyas.files import write_text
from eyas.report import words
from eyas.report.figures import Row, Series, bar_chart, line_chart, row_chart, smooth

Json = dict[str, Any]
SHOWN_TOKENS, SHOWN_PROMPT = 600, 60  # a long conversation is cut, and the page says so


def write_report(run: Path) -> Path:
    """Write RUN/report.html, whole or not at all, from whatever stages have run; returns its path.

    Raises UsageError where `run` is no folder or one of its files is damaged.
    """
    run = Path(run)
    if not run.is_dir():
        raise UsageError(f"{run}: no such run folder. Expected the folder that `eyas run` writes.")
    path = run / "report.html"
    write_text(path, _template().render(read_run(run)))
    return path


@functools.cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.ChainableUndefined,  # a figure that a stage did not write is shown as a dash
    )
    filters = {"value": _value, "duration": words.duration, "engine": words.engine, "continued": words.continued}
    environment.filters |= filters
    return environment.get_template("page.html.j2")


def _value(key: str, found: Any) -> str:
    return words.value(key, None if isinstance(found, jinja2.Undefined) else found)


def read_run(run: Path) -> Json:
    """Everything the template shows; a stage that has not run leaves its part empty."""

    def read(name: str, empty: Any) -> Any:
        return words.read_json(run / name, empty)

    stages = [_stage(run / name, verb) for name, verb in words.STAGES.items()]
    steps, validations = read_log(run / "train" / "log.jsonl")
    replay, vocab, summary = (read(name, {}) for name in ("replay/replay.json", "vocab/vocab.json", "summary.json"))
    recipe = run / "recipe.yaml"
    recipe_text = recipe.read_text("utf-8", "replace") if recipe.exists() else ""
    target = re.search(r"^target: *['\"]?([^'\"\n]+)", recipe_text, re.MULTILINE)
    measurements = [
        (name, figures | {"protocol_text": words.protocol_text(figures.get("protocol"))})
        for name in ("replay", "decode", "measure")
        if (figures := read(f"{name}/{name}.json", {}))
    ]
    protocols = {"replay": replay.get("protocol")}
    if validations:
        protocols["train"] = validations[-1]["validation"].get("protocol")
    for stage in stages:
        stage["figures"] = list(_figures(stage["figures"], protocols.get(stage["name"])))
    return {
        "name": run.resolve().name,
        "target": Path(target[1]).name if target else "",
        "written": datetime.now().astimezone().strftime("%d %B %Y, %H:%M %Z"),
        "version": __version__,
        "stages": stages,
        "time_figure": _time_figure(stages),
        "replay": replay,
        "protocol": words.protocol_text(replay.get("protocol")),
        "measurements": measurements,
        "slots": _slots(replay),
        "acceptance_figures": _acceptance_figures(measurements, replay),
        "worst": [_conversation(entry) for entry in replay.get("worst") or []],
        "training": _training_facts(steps),
        "training_figures": _training_figures(steps, validations, words.protocol_text(protocols.get("train"))),
        "more_training_figures": _more_training_figures(steps),
        "vocab": vocab,
        "vocab_facts": list(_figures({k: v for k, v in vocab.items() if k != "curve"}, _ceiling_protocol(vocab))),
        "vocab_figure": _vocab_figure(vocab),
        "audit": words.read_audit(run),
        "check": read("check/check.json", {}),
        "preview": [_conversation(entry) for entry in read("preview.json", [])],
        "serve": summary.get("serve") or {},
        "draft": summary.get("draft"),
        "provenance": list(_flat(read("draft/eyas.json", {}))),
        "recipe": recipe_text,
    }


def read_log(path: Path) -> tuple[list[Json], list[Json]]:
    """(training lines, validation lines) of a training log by step; a step written twice (a resume) counts once.

    A last line cut off by a kill is passed over; any other damage raises UsageError.
    """
    lines = path.read_text("utf-8", "replace").splitlines() if path.exists() else []
    steps: dict[int, Json] = {}
    validations: dict[int, Json] = {}
    for index, line in enumerate(lines):
        try:
            entry = json.loads(line)
            (validations if "validation" in entry else steps)[int(entry["step"])] = entry
        except (ValueError, KeyError, TypeError):
            if index < len(lines) - 1:
                text = f"{path}: line {index + 1} is not a JSON object with a step. Remove it or train again."
                raise UsageError(text) from None
    ordered = [steps[step] for step in sorted(steps)]
    for step, entry in validations.items():  # a validation belongs to the epoch of the training step before it
        before = [line["epoch"] for line in ordered if line["step"] <= step and "epoch" in line]
        entry.setdefault("epoch", before[-1] if before else None)
    return ordered, [validations[step] for step in sorted(validations)]


def _stage(folder: Path, verb: str) -> Json:
    manifest = words.read_json(folder / "manifest.json", {})
    state = "done" if manifest else "unfinished" if folder.is_dir() and any(folder.iterdir()) else "not run yet"
    return {
        "name": folder.name,
        "verb": verb,
        "state": state,
        "figures": manifest.get("figures") or {},
        "seconds": float(manifest.get("seconds") or 0),
    }


def _figures(figures: Mapping[str, Any], protocol: Mapping[str, Any] | str | None) -> Iterator[tuple[str, str, str]]:
    """(label, value, protocol): a tau brings its protocol along, or is withheld."""
    said = words.protocol_text(figures.get("protocol") or protocol)
    for key, found in figures.items():
        is_tau = "tau" in key.split("_")
        if key not in ("protocol", "curve") and found != "":  # the curve has a chart of its own
            text = words.WITHHELD if is_tau and not said else words.value(key, found)
            yield words.label(key), text, said if is_tau else ""


def _flat(found: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str, str]]:
    """Nested provenance as rows (name, value, protocol)."""
    plain = {key: entry for key, entry in found.items() if not isinstance(entry, Mapping) or key == "protocol"}
    for name, text, protocol in _figures(plain, None):
        yield prefix + name, text, protocol
    for key, entry in found.items():
        if key not in plain:
            yield from _flat(entry, f"{prefix}{words.label(key)} · ")


# figures


def _time_figure(stages: list[Json]) -> Markup:
    """The stages laid end to end, as they ran."""
    total = sum(stage["seconds"] for stage in stages)
    unit, per = ("minutes", 60.0) if total >= 120 else ("seconds", 1.0)
    rows, clock = [], 0.0
    for stage in stages:
        if stage["state"] == "done":
            text = f"{words.duration(stage['seconds'])} · {100 * stage['seconds'] / total if total else 0:.0f} %"
            rows.append(Row(stage["name"], clock / per, (clock + stage["seconds"]) / per, text))
            clock += stage["seconds"]
    note = f"{words.duration(total)} in all; each stage begins where the one before it ended"
    return row_chart("Where the time went", f"time since the first stage ({unit})", rows, note=note, y_label="stage")


def _joint(figures: Mapping[str, Any]) -> bool:
    """Whether per_position are joint prefixes, which make tau = 1 + their sum."""
    return abs(1 + sum(figures.get("per_position") or []) - figures.get("tau", math.inf)) < 0.02


def _slots(replay: Json) -> list[Json]:
    """tau as a sum: the target's own token, then what each draft position adds."""
    if not (replay.get("protocol") and replay.get("per_position") and _joint(replay)):
        return []
    parts = {"target’s own": 1.0} | {f"draft {i}": share for i, share in enumerate(replay["per_position"], 1)}
    return [{"name": name, "value": share} for name, share in parts.items()]


def _acceptance_figures(measurements: list[tuple[str, Json]], replay: Json) -> list[Markup]:
    bars = {name: m["per_position"] for name, m in measurements if m.get("per_position") and m["protocol_text"]}
    joint = all(_joint(m) for name, m in measurements if name in bars)
    note = "joint prefixes: a draft counts where all before it were accepted; their sum + 1 is tau" if joint else ""
    y_label = "share of rounds accepted up to here" if joint else "share accepted"
    positions = [str(position + 1) for position in range(max(map(len, bars.values()), default=0))]
    bars = bars if len(bars) != 1 else {"": next(iter(bars.values()))}
    categories = {name: c for name, c in (replay.get("by_category") or {}).items() if "tau" in c}
    rows = [
        Row(name, c.get("low", c["tau"]), c.get("high", c["tau"]), f"{c['tau']:.2f}", c["tau"])
        for name, c in sorted(categories.items(), key=lambda item: -item[1]["tau"])
        if replay.get("protocol")
    ]
    shape, x_label = words.protocol_text(replay.get("protocol")), "tau (tokens per round of the target)"
    how = {"note": f"dot: estimate, bar: bootstrap interval; {shape}", "y_label": "category"}
    figures = [
        bar_chart("Acceptance per position", "draft position", y_label, positions, bars, note=note),
        row_chart("Acceptance length per category", x_label, rows, start=1.0, **how),
    ]
    return [figure for figure in figures if figure]


def _line(steps: list[Json], key: str) -> Series:
    points = [(line["step"], line[key]) for line in steps if isinstance(line.get(key), int | float)]
    return smooth(points)


def _training_figures(steps: list[Json], validations: list[Json], protocol: str) -> list[Markup]:
    accuracy = []
    for k in range(max((len(line.get("acc") or []) for line in steps), default=0)):
        points = [(line["step"], line["acc"][k]) for line in steps if len(line.get("acc") or []) > k]
        accuracy.append(Series(f"step {k}", smooth(points).points))
    by_epoch = all(v["epoch"] is not None for v in validations)
    found = [(v["epoch"] if by_epoch else v["step"], v["validation"]) for v in validations]
    categories = sorted({name for _, validation in found for name in validation.get("by_category") or {}})
    lines = [Series("all", [(x, validation.get("tau", math.nan)) for x, validation in found], main=bool(categories))]
    for name in categories[:7]:
        parts = [(x, validation.get("by_category") or {}) for x, validation in found]
        lines.append(Series(name, [(x, part[name]) for x, part in parts if name in part]))
    step, note = "training step", "of the chains still alive; a token outside the draft vocabulary is a miss"
    shares: Json = {"shares": True, "from_zero": True, "note": note}
    equal, tau = "share equal to the target’s argmax", "validation tau (tokens per round)"
    x_label = "epoch" if by_epoch else step
    figures = [
        line_chart("Loss", step, "cross-entropy (nats per token)", [_line(steps, "loss")]),
        line_chart("Accuracy per step of the unroll", step, equal, accuracy, **shares),
        line_chart("Acceptance length over training", x_label, tau, lines if protocol else [], note=protocol),
    ]
    return [figure for figure in figures if figure]


def _more_training_figures(steps: list[Json]) -> list[Markup]:
    wanted = {
        "lr": ("Learning rate", "learning rate"),
        "grad_norm": ("Gradient norm", "gradient norm before clipping"),
        "tokens_per_s": ("Throughput", "tokens/s"),
        "oov": ("Outside the draft vocabulary", "share of supervised rows"),
    }
    figures = [
        line_chart(title, "training step", y, [_line(steps, key)], from_zero=True, shares=key == "oov")
        for key, (title, y) in wanted.items()
    ]
    return [figure for figure in figures if figure]


def _training_facts(steps: list[Json]) -> list[tuple[str, str]]:
    def column(key: str) -> list[float]:
        return [line[key] for line in steps if isinstance(line.get(key), int | float) and math.isfinite(line[key])]

    if not steps:
        return []
    facts = [("steps", f"{steps[-1]['step']:,}")]
    if epochs := column("epoch"):
        facts.append(("epochs", words.number(epochs[-1])))
    if losses := column("loss"):
        tail = losses[-max(1, len(losses) // 20) :]
        facts.append(("final loss (mean of the last 5 %)", f"{statistics.fmean(tail):.3f} nats/token"))
    if speed := column("tokens_per_s"):
        facts.append(("median throughput", f"{words.number(statistics.median(speed))} tokens/s"))
    if wait := column("data_wait"):
        facts.append(("waiting for data, mean", words.value("data_wait", statistics.fmean(wait))))
    if skipped := sum(bool(line.get("skipped")) for line in steps):
        facts.append(("steps left out (loss or gradient not finite)", f"{skipped:,}"))
    return facts


def _ceiling_protocol(vocab: Json) -> Json | str | None:
    """The ceiling is a bound that only a perfect draft would reach; it depends on K."""
    if "protocol" in vocab or "k" not in vocab:
        return vocab.get("protocol")
    return f"chain, K = {vocab['k']}, temperature 0, a perfect draft over the supervised tokens"


def _vocab_figure(vocab: Json) -> Markup:
    curve, mark = [(float(x), float(y)) for x, y in vocab.get("curve") or []], None
    if "size" in vocab and "coverage" in vocab:
        mark = (vocab["size"], vocab["coverage"], f"{vocab['size']:,}: {words.percent(vocab['coverage'])}")
    title, y_label = "Coverage of the draft vocabulary", "share of supervised tokens covered"
    how: Json = {"shares": True, "doubling": True, "mark": mark}
    return line_chart(title, "draft vocabulary (tokens)", y_label, [Series("", sorted(curve))], **how)


def _conversation(entry: Json) -> Json:
    """A conversation's tokens in at most SHOWN_TOKENS pieces; of a long prompt its end is shown."""
    tokens = entry.get("tokens") or []
    prompt = next((i for i, token in enumerate(tokens) if token.get("state", "prompt") != "prompt"), 0)
    first = max(0, prompt - SHOWN_PROMPT)
    shown = tokens[first : first + SHOWN_TOKENS]
    drafted = [token["state"] for token in tokens if token.get("state") in ("accepted", "rejected")]
    return {
        "id": str(entry.get("id", "")),
        "category": entry.get("category") or "",
        "tau": entry.get("tau"),
        "tokens": [{"text": ""} | token for token in shown],
        "before": first,
        "after": len(tokens) - first - len(shown),
        "accepted": drafted.count("accepted"),
        "drafted": len(drafted),
    }
