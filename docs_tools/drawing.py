"""A few shapes of SVG, and line plots of measured numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

INK, GREY, OURS = "#1f2430", "#5d6579", "#3949ab"
COLOURS = ("#c8d0f0", "#f6d7b0", "#cfe8cf", "#ecc9dd")
"""One colour for each rank."""
FONT = "font-family='system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif'"


class Picture:
    """An SVG of fixed size with a white background, which both colour schemes can show."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.width, self.height, self.title = width, height, title
        self.parts: list[str] = []

    def box(self, x: float, y: float, w: float, h: float, fill: str = "none", stroke: str = INK) -> None:
        self.parts.append(
            f"<rect x='{x:g}' y='{y:g}' width='{w:g}' height='{h:g}' rx='4' fill='{fill}' stroke='{stroke}' "
            "stroke-width='1.2'/>"
        )

    def text(
        self,
        x: float,
        y: float,
        words: str,
        size: int = 14,
        anchor: str = "middle",
        fill: str = INK,
        bold: bool = False,
    ) -> None:
        weight = " font-weight='600'" if bold else ""
        self.parts.append(
            f"<text x='{x:g}' y='{y:g}' font-size='{size}' text-anchor='{anchor}' fill='{fill}'{weight} {FONT}>"
            f"{escape(words)}</text>"
        )

    def arrow(self, x1: float, y1: float, x2: float, y2: float, colour: str = INK, dashed: bool = False) -> None:
        dash = " stroke-dasharray='5 4'" if dashed else ""
        self.parts.append(
            f"<line x1='{x1:g}' y1='{y1:g}' x2='{x2:g}' y2='{y2:g}' stroke='{colour}' stroke-width='1.6'{dash}/>"
        )
        angle = math.atan2(y2 - y1, x2 - x1)
        points = [
            (x2, y2),
            *((x2 - 9 * math.cos(angle + turn), y2 - 9 * math.sin(angle + turn)) for turn in (0.4, -0.4)),
        ]
        self.parts.append(f"<polygon points='{' '.join(f'{x:.1f},{y:.1f}' for x, y in points)}' fill='{colour}'/>")

    def path(self, d: str, colour: str = INK, width: float = 1.6, dashed: bool = False) -> None:
        dash = " stroke-dasharray='5 4'" if dashed else ""
        self.parts.append(f"<path d='{d}' fill='none' stroke='{colour}' stroke-width='{width:g}'{dash}/>")

    def svg(self) -> str:
        body = "\n".join(self.parts)
        return (
            f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {self.width} {self.height}' role='img'>\n"
            f"<title>{escape(self.title)}</title>\n"
            f"<rect width='{self.width}' height='{self.height}' rx='8' fill='#ffffff'/>\n{body}\n</svg>\n"
        )


class Line(NamedTuple):
    """A line of a plot; ``ours`` is drawn thick and in colour."""

    name: str
    points: Sequence[tuple[float, float]]
    ours: bool = False


def plot(
    title: str, about: str, x_title: str, y_title: str, lines: Sequence[Line], *, y_from: float, y_to: float,
    y_step: float, y_form: str, x_names: dict[float, str],
) -> str:  # fmt: skip
    """Lines over a logarithmic x axis; names stand at the right of their lines, where they cover no point."""
    picture = Picture(760, 400, f"{title}. {about}")
    left, right, top, bottom = 70, 520, 88, 345
    low, high = math.log2(min(x_names)), math.log2(max(x_names))

    def place(x: float, y: float) -> tuple[float, float]:
        across = (math.log2(x) - low) / (high - low)
        return left + 15 + across * (right - left - 30), bottom - (y - y_from) / (y_to - y_from) * (bottom - top)

    picture.text(left - 50, 28, title, 16, "start", bold=True)
    picture.text(left - 50, 48, about, 12, "start", GREY)
    y = y_from
    while y <= y_to + 1e-9:
        _, height = place(min(x_names), y)
        picture.path(f"M{left} {height:.1f}H{right}", "#e3e6ee", 1)
        picture.text(left - 8, height + 4, f"{y:{y_form}}", 12, "end", GREY)
        y += y_step
    for x, name in x_names.items():
        picture.text(place(x, y_from)[0], bottom + 20, name, 12, fill=GREY)
    picture.text((left + right) / 2, bottom + 42, x_title, 12)
    picture.text(left - 50, top - 16, y_title, 12, "start")
    taken: list[float] = []
    greys = ("#5d6579", "#a0672c", "#3f8f5f", "#a04a86", "#2f8ea3", "#777777")
    for number, line in enumerate(sorted(lines, key=lambda one: -one.points[-1][1])):
        colour = OURS if line.ours else greys[number % len(greys)]
        places = [place(*point) for point in line.points]
        path = "M" + "L".join(f"{a:.1f} {b:.1f}" for a, b in places)
        picture.path(path, colour, 3.5 if line.ours else 1.5, dashed=not line.ours)
        for a, b in places:
            picture.parts.append(f"<circle cx='{a:.1f}' cy='{b:.1f}' r='{4.5 if line.ours else 3}' fill='{colour}'/>")
        label = max(places[-1][1] + 4, taken[-1] + 17 if taken else 0)
        taken.append(label)
        picture.path(f"M{places[-1][0] + 6:.1f} {places[-1][1]:.1f}L{right + 8} {label - 4:.1f}", colour, 0.8)
        picture.text(right + 12, label, line.name, 13, "start", colour, bold=line.ours)
    return picture.svg()
