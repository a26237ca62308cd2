"""The closing summary of a run: one screen of the terminal."""

import textwrap
from pathlib import Path

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from eyas.report import words

COLOURS = {"pass": "green", "go": "green", "warn": "yellow", "error": "red", "no-go": "red"}


def summary_lines(run: Path) -> RenderableType:
    """tau with its protocol, expected speed-up, verdicts, where the draft lies, how to serve it, time per stage.

    Print it with `console.print(summary, soft_wrap=True)`, so that commands can be copied whole from any terminal.
    """
    run = Path(run)
    replay = words.read_json(run / "replay" / "replay.json", {})
    summary = words.read_json(run / "summary.json", {})
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("tau", _tau(replay))
    speedup = replay.get("speedup")
    expected = Text(f"×{speedup:.2f} expected", style="bold") if speedup is not None else Text("not estimated")
    if speedup is not None and replay.get("speedup_note"):
        expected.append(f"  {replay['speedup_note']}", style="not bold dim")
    table.add_row("speed-up", expected)
    verdict = words.read_audit(run).get("verdict")
    table.add_row("audit", _verdict(verdict.upper(), verdict) if verdict else "not run yet")
    verdicts = words.read_json(run / "check" / "check.json", {}).get("verdicts") or {}
    badges = [
        _verdict(f"{words.engine(n)} {v['verdict']}", v["verdict"]) for n, v in verdicts.items() if "verdict" in v
    ]
    table.add_row("check", Text("  ").join(badges) if badges else "not run yet")
    draft = summary.get("draft") or (run / "draft" if (run / "draft" / "manifest.json").exists() else None)
    table.add_row("draft", Text(str(draft)) if draft else "not exported yet")
    table.add_row("time", _time(run))
    if (run / "report.html").exists():
        table.add_row("report", Text(str(run / "report.html")))
    parts: list[RenderableType] = [Text(f"\n{run.resolve().name}", style="bold"), Padding(table, (0, 0, 0, 2))]
    for engine, command in (summary.get("serve") or {}).items():
        parts.append(Text(f"\n  serve with {words.engine(engine)}", style="dim"))
        parts.append(Text(words.continued(command), no_wrap=True, overflow="ignore"))
    return Group(*parts)


def _tau(replay: dict) -> RenderableType:
    if not replay:
        return "not run yet"
    protocol = words.protocol_text(replay.get("protocol"))
    if not protocol or "tau" not in replay:
        return words.WITHHELD
    text = Text(f"{replay['tau']:.2f}", style="bold")
    if low_high := replay.get("interval"):
        text.append(f" ({low_high[0]:.2f} to {low_high[1]:.2f})", style="not bold")
    return text.append(f"  {protocol}", style="not bold dim")


def _verdict(text: str, verdict: str) -> Text:
    return Text(text, style=COLOURS.get(verdict, ""))


def _time(run: Path) -> str:
    taken = {name: words.read_json(run / name / "manifest.json", {}).get("seconds") for name in words.STAGES}
    done = {name: float(seconds) for name, seconds in taken.items() if seconds is not None}
    if not done:
        return "no stage has finished yet"
    each = [f"{name} {words.duration(seconds)}".replace(" ", "\u00a0") for name, seconds in done.items()]
    return textwrap.fill(f"{words.duration(sum(done.values()))}: {', '.join(each)}", 66)
