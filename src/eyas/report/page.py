"""The report: one self-contained page that shows a run from its artifacts. No script, no network, light and dark."""

import functools
import json
import math
import statistics
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import yaml
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
    stages = [_stage(run / name, verb) for name, verb in words.STAGES.items()]
    steps, validations = read_log(run / "train" / "log.jsonl")
    replay = words.read_json(run / "replay" / "replay.json", {})
    recipe_file = run / "recipe.yaml"
    recipe_text = recipe_file.read_text("utf-8", "replace") if recipe_file.exists() else ""
    provenance = words.read_json(run / "draft" / "eyas.json", {})
    measurements = [
        (name, figures | {"protocol_text": words.protocol_text(figures.get("protocol"))})
        for name in ("replay", "decode", "measure")
        if (figures := words.read_json(run / name / f"{name}.json", {}))
    ]
    protocols = {"replay": replay.get("protocol"), "train": _validation_protocol(validations)}
    for stage in stages:
        stage["figures"] = list(_figures(stage["figures"], protocols.get(stage["name"])))
    return {
        "name": run.resolve().name,
        "target": _target_name(recipe_text, provenance),
        "written": datetime.now().astimezone().strftime("%d %B %Y, %H:%M %Z"),
        "version": __version__,
        "stages": stages,
        "total_seconds": sum(stage["seconds"] for stage in stages),
        "time_figure": _time_figure(stages),
        "replay": replay,
        "protocol": words.protocol_text(replay.get("protocol")),
        "measurements": measurements,
        "slots": _slots(replay),
        "acceptance_figures": _acceptance_figures(measurements, replay),
        "worst": [_conversation(entry) for entry in replay.get("worst") or []],
        "training": _training_facts(steps),
        "training_figures": _training_figures(steps, validations),
        "more_training_figures": _more_training_figures(steps),
        "vocab": (vocab := words.read_json(run / "vocab" / "vocab.json", {})),
        "vocab_facts": list(_figures({k: v for k, v in vocab.items() if k != "curve"}, _ceiling_protocol(vocab))),
        "vocab_figure": _vocab_figure(vocab),
        "audit": words.read_json(run / "audit" / "audit.json", {}),
        "check": words.read_json(run / "check" / "check.json", {}),
        "preview": [_conversation(entry) for entry in words.read_json(run / "preview.json", [])],
        "serve": words.read_json(run / "summary.json", {}).get("serve") or {},
        "draft": words.read_json(run / "summary.json", {}).get("draft"),
        "provenance": list(_flat(provenance)),
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
                raise UsageError(
                    f"{path}: line {index + 1} is not a JSON object with a step. Remove it or train again."
                ) from None
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
    protocol = figures.get("protocol") or protocol
    for key, found in figures.items():
        if key == "protocol":
            continue
        if "tau" not in key.split("_"):
            yield words.label(key), words.value(key, found), ""
        elif said := words.protocol_text(protocol):
            yield words.label(key), words.value(key, found), said
        else:
            yield words.label(key), words.WITHHELD, ""


def _flat(found: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str, str]]:
    """Nested provenance as rows (name, value, protocol)."""
    plain = {key: entry for key, entry in found.items() if not isinstance(entry, Mapping) or key == "protocol"}
    for name, text, protocol in _figures(plain, None):
        yield prefix + name, text, protocol
    for key, entry in found.items():
        if key not in plain:
            yield from _flat(entry, f"{prefix}{words.label(key)} · ")


def _target_name(recipe_text: str, provenance: Json) -> str:
    try:
        recipe = yaml.safe_load(recipe_text)
    except yaml.YAMLError:
        recipe = None
    for source in (recipe, provenance):
        target = source.get("target") if isinstance(source, dict) else None
        if isinstance(target, dict):
            target = target.get("name") or target.get("path") or target.get("model")
        if isinstance(target, str) and target:
            return Path(target).name
    return ""


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
    return [{"name": "target’s own", "value": 1.0}] + [
        {"name": f"draft {position}", "value": share} for position, share in enumerate(replay["per_position"], 1)
    ]


def _acceptance_figures(measurements: list[tuple[str, Json]], replay: Json) -> list[Markup]:
    bars = {name: m["per_position"] for name, m in measurements if m.get("per_position") and m["protocol_text"]}
    figures = []
    if bars:
        longest = max(map(len, bars.values()))
        joint = all(_joint(m) for name, m in measurements if name in bars)
        note = "joint prefixes: a draft counts where all before it were accepted; their sum + 1 is tau" if joint else ""
        figures.append(
            bar_chart(
                "Acceptance per position",
                "draft position",
                "share of rounds accepted up to here" if joint else "share accepted",
                [str(position + 1) for position in range(longest)],
                bars if len(bars) > 1 else {"": next(iter(bars.values()))},
                note=note,
            )
        )
    categories = {name: c for name, c in (replay.get("by_category") or {}).items() if "tau" in c}
    if categories and replay.get("protocol"):
        rows = [
            Row(name, c.get("low", c["tau"]), c.get("high", c["tau"]), f"{c['tau']:.2f}", c["tau"])
            for name, c in sorted(categories.items(), key=lambda item: -item[1]["tau"])
        ]
        shape = words.protocol_text(replay["protocol"])
        figures.append(
            row_chart(
                "Acceptance length per category",
                "tau (tokens per round of the target)",
                rows,
                note=f"dot: estimate, bar: bootstrap interval; {shape}",
                start=1.0,
                y_label="category",
            )
        )
    return [figure for figure in figures if figure]


def _validation_protocol(validations: list[Json]) -> Json | None:
    """The protocol of the trainer's own validation: a teacher-forced chain; it says the rest in its log, if it does."""
    if not validations:
        return None
    last = validations[-1]["validation"]
    depth = len(last.get("per_position") or last.get("acc") or [])
    known: Json = {"shape": "chain", "data": "validation split, teacher-forced", "loaded_as": "own"}
    return known | ({"k": depth} if depth else {}) | {"temperature": 0} | (last.get("protocol") or {})


def _line(steps: list[Json], key: str) -> Series:
    points = [(line["step"], line[key]) for line in steps if isinstance(line.get(key), int | float)]
    return smooth(points)


def _training_figures(steps: list[Json], validations: list[Json]) -> list[Markup]:
    depth = max((len(line.get("acc") or []) for line in steps), default=0)
    accuracy = []
    for k in range(depth):
        points = [(line["step"], line["acc"][k]) for line in steps if len(line.get("acc") or []) > k]
        accuracy.append(Series(f"step {k}", smooth(points).points))
    by_epoch = all(v["epoch"] is not None for v in validations)
    trend = [(v["epoch"] if by_epoch else v["step"], v["validation"].get("tau", math.nan)) for v in validations]
    categories = sorted({name for v in validations for name in v["validation"].get("by_category") or {}})
    lines = [Series("all", trend, main=bool(categories))] if trend else []
    lines += [
        Series(
            name,
            [
                (x, v["validation"]["by_category"][name])
                for (x, _), v in zip(trend, validations, strict=True)
                if name in (v["validation"].get("by_category") or {})
            ],
        )
        for name in categories[:7]
    ]
    figures = [
        line_chart("Loss", "training step", "cross-entropy (nats per token)", [_line(steps, "loss")]) if steps else "",
        line_chart(
            "Accuracy per step of the unroll",
            "training step",
            "share equal to the target’s argmax",
            accuracy,
            shares=True,
            from_zero=True,
            note="of the chains still alive; a token outside the draft vocabulary is a miss",
        ),
        line_chart(
            "Acceptance length over training",
            "epoch" if by_epoch else "training step",
            "validation tau (tokens per round)",
            lines,
            note=words.protocol_text(_validation_protocol(validations)),
        ),
    ]
    return [Markup(figure) for figure in figures if figure]


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
    if broken := sum(1 for line in steps if not math.isfinite(line.get("loss") or 0)):
        facts.append(("steps whose loss is not finite", f"{broken:,}"))
    return facts


def _ceiling_protocol(vocab: Json) -> Json | str | None:
    """The ceiling is a bound that only a perfect draft would reach; it depends on K."""
    if "protocol" in vocab or "k" not in vocab:
        return vocab.get("protocol")
    return f"chain, K = {vocab['k']}, temperature 0, a perfect draft over the supervised tokens"


def _vocab_figure(vocab: Json) -> Markup:
    curve = [(float(x), float(y)) for x, y in vocab.get("curve") or []]
    if not curve:
        return Markup("")
    mark = None
    if "size" in vocab and "coverage" in vocab:
        mark = (vocab["size"], vocab["coverage"], f"{vocab['size']:,}: {words.percent(vocab['coverage'])}")
    return line_chart(
        "Coverage of the draft vocabulary",
        "draft vocabulary (tokens)",
        "share of supervised tokens covered",
        [Series("", sorted(curve))],
        shares=True,
        doubling=True,
        mark=mark,
    )


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
        "tokens": [token | _written(str(token.get("text", ""))) for token in shown],
        "before": first,
        "after": len(tokens) - first - len(shown),
        "accepted": drafted.count("accepted"),
        "drafted": len(drafted),
    }


def _written(text: str) -> Json:
    """A token's text with its line breaks visible, and whether the line ends after it."""
    return {"text": text.replace("\n", "↵"), "breaks": "\n" in text}
