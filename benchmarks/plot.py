"""The results as a picture: bars, in plain SVG."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple
from xml.sax.saxutils import escape


class Bar(NamedTuple):
    """One bar of a chart."""

    label: str
    value: float
    text: str
    ours: bool


class Chart(NamedTuple):
    """Some bars under a title."""

    title: str
    bars: Sequence[Bar]


_WIDTH = 760
_LABELS = 210
_LINE = 24
_STYLE = """
  text { font: 13px system-ui, sans-serif; fill: #1f2933; }
  .title { font-weight: 600; font-size: 14px; }
  .faint { fill: #697586; font-size: 12px; }
  .ours { fill: #2f6feb; } .theirs { fill: #b6c0cc; }
  .one { stroke: #697586; stroke-dasharray: 3 3; }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3; } .faint { fill: #9aa7b4; } .theirs { fill: #57626e; }
  }"""


def plot(summary: dict[str, Any]) -> str:
    """An SVG document with one chart for each thing that is worth a picture."""
    charts = [chart for chart in _charts(summary["results"]) if chart.bars]
    pieces, top = [], 12
    for chart in charts:
        pieces.append(_draw(chart, top))
        top += _LINE * (len(chart.bars) + 2) + 10
    footer = escape(f"{summary['machine']}; {summary['measured_at']}")
    pieces.append(f'<text class="faint" x="12" y="{top + 8}">{footer}</text>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {top + 22}" role="img">\n'
        f"<title>Benchmarks of romancy</title>\n<style>{_STYLE}\n</style>\n" + "\n".join(pieces) + "\n</svg>\n"
    )


def _charts(results: Sequence[dict[str, Any]]) -> list[Chart]:
    beside_others = [result for result in results if "other libraries" in result["section"]]
    charts = []
    for database in dict.fromkeys(result["database"] for result in beside_others):
        bars = [
            Bar(result["what"], 1 / result["median"], f"{_short(1 / result['median'])}", ours=False)
            for result in beside_others
            if result["database"] == database
        ]
        bars.append(Bar("romancy", 1.0, "1", ours=True))
        by_speed = sorted(bars, key=lambda bar: -bar.value)
        charts.append(Chart(f"Workflows of five steps per second, 32 at once, {database} (romancy = 1)", by_speed))
    bars = [
        Bar(f"{result['database']}, {result['what']}", result["median"], f"{_short(result['median'])}×", ours=True)
        for result in results
        if "beside a hand-written loop" in result["section"]
    ]
    charts.append(Chart("Workflows of five steps per second (seven commits written by hand = 1)", bars))
    together = [result for result in results if "one commit at a time" in result["section"]]
    for database in dict.fromkeys(result["database"] for result in together):
        bars = [
            Bar(result["what"], result["median"], f"{_short(result['median'])}×", ours=True)
            for result in together
            if result["database"] == database
        ]
        charts.append(Chart(f"Many callers beside one commit at a time, {database} (one by one = 1)", bars))
    return charts


def _draw(chart: Chart, top: int) -> str:
    scale = (_WIDTH - _LABELS - 90) / max(1.0, *(bar.value for bar in chart.bars))
    lines = [f'<text class="title" x="12" y="{top + 14}">{escape(chart.title)}</text>']
    at_one = _LABELS + scale
    bottom = top + _LINE * (len(chart.bars) + 1) + 4
    lines.append(f'<line class="one" x1="{at_one:.0f}" y1="{top + 22}" x2="{at_one:.0f}" y2="{bottom}"/>')
    for number, bar in enumerate(chart.bars, 1):
        y = top + _LINE * number + 4
        length = bar.value * scale
        kind = "ours" if bar.ours else "theirs"
        lines.append(f'<text x="{_LABELS - 10}" y="{y + 13}" text-anchor="end">{escape(bar.label)}</text>')
        lines.append(f'<rect class="{kind}" x="{_LABELS}" y="{y}" width="{length:.1f}" height="{_LINE - 7}" rx="2"/>')
        lines.append(f'<text x="{_LABELS + length + 8:.1f}" y="{y + 13}">{bar.text}</text>')
    return "\n".join(lines)


def _short(value: float) -> str:
    return f"{value:.3f}" if value < 0.1 else f"{value:.2g}" if value < 10 else f"{value:.0f}"
