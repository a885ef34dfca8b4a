"""Spans of time as an SVG: a lane for each stream, a colour for each kind of work, an axis. Measures nothing."""

import math
from dataclasses import dataclass

COLOURS = ("#4e79a7", "#e15759", "#76b7b2", "#f28e2b")
WIDTH, LANE, MARGIN, AXIS = 900, 40, 110, 30


@dataclass(frozen=True)
class Bar:
    lane: str
    kind: str
    begin: float
    end: float
    name: str = ""  # written into the bar if there is room


def draw(bars: list[Bar], title: str, unit: str) -> str:
    lanes, kinds = (list(dict.fromkeys(values)) for values in ((b.lane for b in bars), (b.kind for b in bars)))
    end = max(bar.end for bar in bars)
    scale, floor = (WIDTH - MARGIN - 20) / end, 30 + LANE * len(lanes)
    legend = floor + AXIS
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{legend + 40}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="100%" height="100%" fill="white"/><text x="10" y="18">{title}</text>',
    ]
    for i, lane in enumerate(lanes):
        parts.append(f'<text x="10" y="{30 + LANE * i + 22}">{lane}</text>')
    for bar in bars:
        x, y = MARGIN + bar.begin * scale, 30 + LANE * lanes.index(bar.lane) + 4
        width, colour = max(bar.end - bar.begin, 0) * scale, COLOURS[kinds.index(bar.kind)]
        what = f"{bar.kind} {bar.name}".strip()
        parts.append(
            f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{LANE - 8}" fill="{colour}" stroke="white">'
            f"<title>{what}: {bar.begin:.2f} to {bar.end:.2f} {unit}</title></rect>"
        )
        if bar.name and width > 12:
            parts.append(f'<text x="{x + 3:.1f}" y="{y + 20}" fill="white">{bar.name}</text>')
    tick = 10 ** math.floor(math.log10(end)) / 2  # 2 to 20 of them
    for i in range(int(end / tick) + 1):
        x = MARGIN + i * tick * scale
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="26" y2="{floor + 4}" stroke="#cccccc"/>')
        parts.append(f'<text x="{x:.1f}" y="{floor + 18}" text-anchor="middle" font-size="10">{i * tick:g}</text>')
    parts.append(f'<text x="10" y="{floor + 18}">time, {unit}</text>')
    for i, kind in enumerate(kinds if kinds != lanes else ()):
        x, y = MARGIN + 180 * i, legend + 12
        parts.append(f'<rect x="{x}" y="{y}" width="12" height="12" fill="{COLOURS[i]}"/>')
        parts.append(f'<text x="{x + 18}" y="{y + 11}">{kind}</text>')
    return "\n".join([*parts, "</svg>\n"])
