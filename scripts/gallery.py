"""Conversations about images for a report: thumbnails, questions, answers, and a square for every page."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from octavo.scripts.conversations import Conversation, Page, Turn

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STYLE = """
.talk { border: 1px solid #8884; border-radius: 8px; padding: .6rem 1rem; margin: 1rem 0 }
.talk h3 { margin: .2rem 0 } .talk .flow { display: flex; flex-wrap: wrap; gap: .5rem; align-items: center }
.talk .flow img { margin: 0; width: 72px; height: 72px; image-rendering: pixelated; border-radius: 4px }
.talk .turn { margin: .6rem 0 } .talk .good { color: #1f8f63 } .talk .bad { color: #c22 }
.pages { display: flex; flex-wrap: wrap; gap: 2px; margin: .2rem 0 }
.pages i { display: block; height: 12px; border-radius: 2px; border: 1px solid transparent; box-sizing: border-box }
.pages .text { background: #2466c9 } .pages .image { background: #d97900 }
.pages .found { opacity: .35; border-color: currentColor }
"""
PIXELS_A_TOKEN = 0.6
PALE = 0.35
COLOURS = {"text": "#2466c9", "image": "#d97900"}
LEGEND = (
    "A bar is a page, as wide as it has tokens: <b style='color:#2466c9'>text</b>, <b style='color:#d97900'>image</b>; "
    "pale and framed: shared, since an earlier question had it computed."
)


def gallery(talks: Sequence[Conversation]) -> str:
    """A ``<section>`` with all conversations."""
    return f"<section><style>{STYLE}</style><h2>Conversations</h2><p>{LEGEND}</p>{''.join(map(_talk, talks))}</section>"


def conversation_figure(talks: Sequence[Conversation]) -> Figure:
    """The same as a picture: a row of images a conversation, with its questions and pages below."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    heights = [1.4 + 0.55 * len(talk.turns) for talk in talks]
    figure = Figure(figsize=(10, 0.4 + sum(heights)), layout="constrained")
    names = {"text": "page of text", "image": "page of an image"}
    keys = [Patch(fc=COLOURS[kind], alpha=shade, label=f"{names[kind]}{shared}")
            for kind in COLOURS for shade, shared in ((1.0, ""), (PALE, ", shared"))]  # fmt: skip
    figure.legend(handles=keys, ncols=4, loc="outside upper center", frameon=False, fontsize=8)
    grid = figure.add_gridspec(len(talks), 1, height_ratios=heights)
    for number, talk in enumerate(talks):
        rows = grid[number, 0].subgridspec(2, 8, height_ratios=[1.4, 0.55 * len(talk.turns)])
        for column in range(8):
            axes = figure.add_subplot(rows[0, column])
            axes.axis("off")
            if column < len(talk.images):
                axes.imshow(talk.images[column], interpolation="nearest")
                axes.set_title(f"image {column + 1}", fontsize=7, pad=2)
            if column == len(talk.images) and column < 7:
                axes.text(0, 0.5, talk.title, fontsize=9, weight="bold", va="center", in_layout=False)
        _draw_turns(figure.add_subplot(rows[1, :]), talk)
    return figure


def _draw_turns(axes: Axes, talk: Conversation) -> None:
    """A line of text and a bar of pages a turn."""
    from matplotlib.patches import Rectangle

    longest = max(sum(page.tokens for page in turn.pages) for turn in talk.turns)
    for number, turn in enumerate(talk.turns):
        ink = "#1f8f63" if turn.right else "#cc2222"
        line = axes.get_yaxis_transform()
        answer = turn.output if turn.right else f"{turn.output}   (right: {turn.gold})"
        style: dict[str, Any] = {"fontsize": 8, "va": "center", "in_layout": False}  # long words shrink no bar
        axes.text(0, number + 0.28, turn.question, **style)
        axes.text(0.42, number + 0.28, _short(answer), transform=line, color=ink, **style)
        at = 0.0
        for page in turn.pages:
            width, shade = page.tokens / longest, PALE if page.found else 1.0
            bar = Rectangle((at, number + 0.55), width, 0.28, lw=0.5, ec="white", fc=COLOURS[page.kind], alpha=shade)
            axes.add_patch(bar)
            at += width
    axes.set(xlim=(0, 1), ylim=(len(talk.turns), 0))
    axes.axis("off")


def _talk(talk: Conversation) -> str:
    images = iter(talk.images)
    flow = "".join(
        f"<span>{html.escape(part)}</span>" if isinstance(part, str) else _thumbnail(next(images))
        for part in talk.about
    )
    return (
        f'<div class="talk"><h3>{html.escape(talk.title)}</h3><div class="flow">{flow}</div>'
        f"{''.join(map(_turn, talk.turns))}</div>"
    )


def _turn(turn: Turn) -> str:
    verdict = "good" if turn.right else "bad"
    right = "" if turn.right else f" (right: {html.escape(turn.gold)})"
    said = html.escape(turn.output) or "nothing said"
    return (
        f'<div class="turn">{html.escape(turn.question)} <b class="{verdict}">{said}</b>{right} '
        f"<small>{turn.cached_tokens} of {turn.prompt_tokens} tokens found</small>"
        f'<div class="pages">{"".join(_bar(number, page) for number, page in enumerate(turn.pages))}</div></div>'
    )


def _bar(number: int, page: Page) -> str:
    found = " found" if page.found else ""
    says = f"page {number}: {page.kind}, {page.tokens} tokens{', shared' * page.found}"
    width = max(4, round(page.tokens * PIXELS_A_TOKEN))
    return f'<i class="{page.kind}{found}" style="width:{width}px" title="{says}"></i>'


def _thumbnail(pixels: np.ndarray) -> str:
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return f'<img alt="image" src="data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}">'


def _short(text: str, most: int = 70) -> str:
    return text if len(text) <= most else f"{text[: most - 3]}..."
