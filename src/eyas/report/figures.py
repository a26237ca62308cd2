"""Small SVG charts that take their colours from the page (CSS variables): one drawing for light, dark and print."""

import itertools
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from html import escape

from markupsafe import Markup

WIDTH, HEIGHT = 420, 250
LEFT, RIGHT, TOP, BOTTOM = 46, 14, 26, 42  # the plot's margins inside the drawing

Point = tuple[float, float]


@dataclass(frozen=True)
class Series:
    """One line of a chart. `raw` is drawn faintly behind it (before smoothing); `main` sets it apart from its parts."""

    name: str
    points: Sequence[Point]
    raw: Sequence[Point] = ()
    main: bool = False


@dataclass(frozen=True)
class Row:
    """One row of a row chart: a bar from `low` to `high`, an optional dot, and the value in words."""

    label: str
    low: float
    high: float
    text: str
    dot: float | None = None


def palette(n: int) -> list[str]:
    """n colours in order; `--l` (the page's lightness for marks) makes them fit either theme."""
    return [f"oklch(var(--l) 0.115 {225 - 165 * i / max(n - 1, 1):.0f})" for i in range(n)]


def number(value: float) -> str:
    """A tick or a value in as few digits as it needs: 1,520, 2.91, 0.0004."""
    if value == 0:
        return "0"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    text = f"{value:.3g}"
    return text if "e" not in text else f"{value:.0e}".replace("e-0", "e-")


def percent(value: float) -> str:
    return f"{100 * value:.3g} %"


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round values from low to high, at most `about` + 1 of them."""
    if not high > low:
        return [low]
    raw = (high - low) / about
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [i * step for i in range(first, last + 1)]


def smooth(points: Sequence[Point], width: int = 120) -> Series:
    """At most `width` averaged bins as the faint line, and their moving mean as the line proper."""
    finite = [(x, y) for x, y in points if y is not None and math.isfinite(x) and math.isfinite(y)]
    size = max(1, math.ceil(len(finite) / width))
    raw = [_mean(finite[i : i + size]) for i in range(0, len(finite), size)]
    reach = len(raw) // 30
    line = [(x, _mean(raw[max(0, i - reach) : i + reach + 1])[1]) for i, (x, _) in enumerate(raw)]
    return Series("", line, raw if reach else ())


def _mean(points: Sequence[Point]) -> Point:
    return sum(x for x, _ in points) / len(points), sum(y for _, y in points) / len(points)


def _figure(title: str, description: str, body: list[str], note: str, height: float) -> Markup:
    key = "fig-" + re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")
    caption = f'<span class="note">{escape(note)}</span>' if note else ""
    return Markup(
        f'<figure id="{key}"><figcaption><strong>{escape(title)}</strong>{caption}</figcaption>'
        f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-labelledby="{key}-t {key}-d">'
        f'<title id="{key}-t">{escape(title)}</title><desc id="{key}-d">{escape(description)}</desc>'
        f"{''.join(body)}</svg></figure>"
    )


def _text(x: float, y: float, text: str, anchor: str = "start", css: str = "", style: str = "") -> str:
    extra = (f' class="{css}"' if css else "") + (f' style="{style}"' if style else "")
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{extra}>{escape(text)}</text>'


def _rule(x1: float, y1: float, x2: float, y2: float, css: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{css}"/>'


def _path(points: Sequence[Point], css: str, style: str) -> str:
    return f'<path d="M{"L".join(f"{x:.1f} {y:.1f}" for x, y in points)}" class="{css}" style="{style}"/>'


def _apart(heights: list[float], gap: float = 13.5) -> list[float]:
    """The same heights, pushed apart (down, then up from the floor) until labels written there do not overlap."""
    order = sorted(range(len(heights)), key=lambda i: heights[i])
    placed = list(heights)
    for before, after in itertools.pairwise(order):
        placed[after] = max(placed[after], placed[before] + gap)
    floor = HEIGHT - BOTTOM + 4.0
    for i in reversed(order):
        placed[i] = min(placed[i], floor)
        floor = placed[i] - gap
    return placed


def line_chart(
    title: str,
    x_label: str,
    y_label: str,
    lines: Sequence[Series],
    *,
    note: str = "",
    shares: bool = False,
    from_zero: bool = False,
    doubling: bool = False,
    mark: tuple[float, float, str] | None = None,
) -> Markup:
    """Lines over a common x, which `doubling` lays out by powers of two. `shares` writes y in per cent; `mark` is a
    point (x, y, words) to set apart."""
    lines = [replace(s, points=[p for p in s.points if all(map(math.isfinite, p))]) for s in lines]
    lines = [s for s in lines if s.points]
    if not lines:
        return Markup("")
    write = percent if shares else number
    drawn = [p for s in lines for p in (*s.points, *s.raw)] + ([mark[:2]] if mark else [])
    x0, x1 = min(x for x, _ in drawn), max(x for x, _ in drawn)
    y0, y1 = min(y for _, y in drawn), max(y for _, y in drawn)
    y0 = min(0.0, y0) if from_zero else y0 - 0.06 * (y1 - y0)
    x0, x1 = (x0, x1) if x1 > x0 else (x0 - 0.5, x1 + 0.5)
    y1 = y1 + 0.06 * (y1 - y0) if y1 > y0 else y0 + 1
    named = len(lines) > 1
    right = WIDTH - RIGHT - (max(len(s.name) for s in lines) * 6.4 + 6 if named else 0)

    across: Callable[[float], float] = math.log2 if doubling else float
    span = across(x1) - across(x0)

    def at(point: Point) -> Point:
        x, y = point
        right_by, up_by = (across(x) - across(x0)) / span, (y - y0) / (y1 - y0)
        return LEFT + right_by * (right - LEFT), HEIGHT - BOTTOM - up_by * (HEIGHT - BOTTOM - TOP)

    body = [_text(0, 11, y_label, css="axis"), _text((LEFT + right) / 2, HEIGHT - 5, x_label, "middle", "axis")]
    for y in ticks(y0, y1):
        height = at((x0, y))[1]
        body += [_rule(LEFT, height, right, height, "grid"), _text(LEFT - 6, height + 4, write(y), "end")]
    marks = [2.0**e for e in ticks(math.ceil(across(x0)), across(x1), 6) if e == int(e)] if doubling else ticks(x0, x1)
    for x in marks:
        body.append(_text(at((x, y0))[0], HEIGHT - BOTTOM + 16, number(x), "middle"))
    ends = _apart([at(s.points[-1])[1] + 4 for s in lines])
    colours = iter(palette(sum(not s.main for s in lines)))
    for series, end in zip(lines, ends, strict=True):
        colour = "var(--ink)" if series.main else next(colours)
        if series.raw:
            body.append(_path([at(p) for p in series.raw], "line raw", f"stroke:{colour}"))
        body.append(_path([at(p) for p in series.points], "line main" if series.main else "line", f"stroke:{colour}"))
        if len(series.points) <= 24:
            for point in series.points:
                (cx, cy), words = at(point), f"{series.name} {x_label} {number(point[0])}: {write(point[1])}".strip()
                body.append(
                    f'<circle cx="{cx:.1f}" cy="{cy:.1f}" r="4" style="fill:{colour}"><title>{escape(words)}</title></circle>'
                )
        if named:
            body.append(_text(right + 6, end, series.name, style=f"fill:{colour}"))
    if mark:
        cx, cy = at(mark[:2])
        body += [
            _rule(cx, cy, cx, HEIGHT - BOTTOM, "mark"),
            f'<circle cx="{cx:.1f}" cy="{cy:.1f}" r="5" class="mark"/>',
        ]
        fits = cx + 9 + 6.8 * len(mark[2]) < WIDTH
        body.append(_text(cx + 9 if fits else WIDTH, cy + 19, mark[2], "start" if fits else "end", "strong halo"))
    story = "; ".join(
        f"{s.name + ' ' if s.name else ''}from {write(s.points[0][1])} at {number(s.points[0][0])} to "
        f"{write(s.points[-1][1])} at {number(s.points[-1][0])}, lowest {write(min(y for _, y in s.points))}, "
        f"highest {write(max(y for _, y in s.points))}"
        for s in lines
    )
    marked = f" Marked: {mark[2]}." if mark else ""
    return _figure(title, f"{y_label} over {x_label}: {story}.{marked}", body, note, HEIGHT)


def bar_chart(
    title: str, x_label: str, y_label: str, labels: Sequence[str], bars: dict[str, Sequence[float]], *, note: str = ""
) -> Markup:
    """Shares (0 to 1) as bars from zero, side by side where there are several series."""
    if not labels or not bars:
        return Markup("")
    floor, span = HEIGHT - BOTTOM, HEIGHT - BOTTOM - TOP - 8
    body = [_text(0, 11, y_label, css="axis"), _text((LEFT + WIDTH) / 2, HEIGHT - 5, x_label, "middle", "axis")]
    for y in (0, 0.25, 0.5, 0.75, 1):
        height = floor - y * span
        body += [_rule(LEFT, height, WIDTH - RIGHT, height, "grid"), _text(LEFT - 6, height + 4, percent(y), "end")]
    slot = (WIDTH - RIGHT - LEFT) / len(labels)
    thick = min(58.0, 0.66 * slot / len(bars))
    legend = float(WIDTH - RIGHT)
    for index, (name, colour) in enumerate(zip(bars, palette(len(bars)), strict=True)):
        for column, value in enumerate(bars[name]):
            x = LEFT + (column + 0.5) * slot + (index - len(bars) / 2) * thick
            top = floor - min(max(value, 0.0), 1.0) * span
            words = escape(f"{name} {x_label} {labels[column]}: {percent(value)}".strip())
            body.append(
                f'<rect x="{x + 1:.1f}" y="{top:.1f}" width="{thick - 2:.1f}" height="{floor - top:.1f}" rx="3" '
                f'style="fill:{colour}"><title>{words}</title></rect>'
            )
            if len(bars) == 1:
                body.append(_text(x + thick / 2, top - 5, percent(value), "middle", "strong"))
    for name, colour in reversed(list(zip(bars, palette(len(bars)), strict=True))) if len(bars) > 1 else ():
        body.append(_text(legend, 11, name, "end", style=f"fill:{colour}"))
        legend -= len(name) * 6.6 + 14
    for column, label in enumerate(labels):
        body.append(_text(LEFT + (column + 0.5) * slot, floor + 16, label, "middle"))
    story = "; ".join(
        f"{name + ' ' if name else ''}" + ", ".join(f"{labels[i]}: {percent(v)}" for i, v in enumerate(values))
        for name, values in bars.items()
    )
    return _figure(title, f"{y_label} by {x_label}: {story}.", body, note, HEIGHT)


def row_chart(
    title: str, x_label: str, rows: Sequence[Row], *, note: str = "", start: float = 0.0, y_label: str = ""
) -> Markup:
    """One row per thing: intervals with a dot at the estimate, or plain bars (a timeline)."""
    if not rows:
        return Markup("")
    step, top = 27, 22
    left = 12 + 6.9 * max(len(row.label) for row in rows)
    right = WIDTH - 10 - 6.9 * max(len(row.text) for row in rows)
    floor = top + step * len(rows)
    end = max(max(row.high, row.dot or row.high) for row in rows)
    scale = (right - left) / max(end - start, 1e-9)
    body = [_text(0, 11, y_label, css="axis"), _text((left + right) / 2, floor + 36, x_label, "middle", "axis")]
    for x in ticks(start, end, 4):
        at = left + (x - start) * scale
        body += [_rule(at, top, at, floor, "grid"), _text(at, floor + 17, number(x), "middle")]
    for index, row in enumerate(rows):
        y = top + step * (index + 0.5)
        x, width = left + (row.low - start) * scale, max((row.high - row.low) * scale, 1.5)
        thick = 13 if row.dot is None else 7
        body += [
            _text(left - 8, y + 4, row.label, "end"),
            f'<rect x="{x:.1f}" y="{y - thick / 2:.1f}" width="{width:.1f}" height="{thick}" rx="2.5" '
            f'class="{"bar" if row.dot is None else "interval"}"><title>{escape(f"{row.label}: {row.text}")}</title></rect>',
            _text(WIDTH, y + 4, row.text, "end", "strong"),
        ]
        if row.dot is not None:
            body.append(f'<circle cx="{left + (row.dot - start) * scale:.1f}" cy="{y:.1f}" r="5" class="dot"/>')
    story = "; ".join(f"{row.label}: {row.text}" for row in rows)
    return _figure(title, f"{x_label} by {y_label or 'row'}: {story}.", body, note, floor + 42)
