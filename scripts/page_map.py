"""The page map: a pool over time as a piece of HTML that needs nothing else.

A watch's frames (``core/inspection/page_watch.py``) travel in the page as base64 of one zlib stream, which the
browser's own ``DecompressionStream`` reads::

    uint32  bytes of the header, a multiple of 4
    JSON    header: sizes, names, and the numbers of every frame
    uint32  [frames]   changed units of each frame
    uint32  [changes]  units, each as its distance from the one before it in its frame
    int32   [changes]  first unit of the page, less the unit
    uint16  [changes]  request
    uint8   [changes]  state
    uint8   [changes]  tokens

All are little-endian. Distances are small numbers, and columns of like numbers, so a change takes about two bytes.
"""

from __future__ import annotations

import base64
import copy
import html
import json
import zlib
from pathlib import Path

import numpy as np

from octavo.core.inspection.page_census import STATES
from octavo.core.inspection.page_watch import PageWatch

TEMPLATE = Path(__file__).with_suffix(".html")

MAX_BYTES = 1_500_000
"""Of a map in a page; what is longer loses every second frame, as often as need be."""

MAX_NAME = 200
"""Characters of a request id that are shown."""


def section(watch: PageWatch, shows: str = "", max_bytes: int = MAX_BYTES) -> str:
    """A ``<section>`` with the map of a watch that has seen a step; "" if it has seen none.

    A page may have several; ``shows`` says in the heading what this one shows.
    """
    if not watch.frames:
        return ""
    data = encode(watch)
    if len(data) > max_bytes:
        watch = copy.copy(watch)
        while len(data) > max_bytes and len(watch.frames) > 2:
            watch.thin()
            data = encode(watch)
    title = html.escape(f"Page map: {shows}" if shows else "Page map")
    # The data first: base64 has no @, and a title might.
    return TEMPLATE.read_text(encoding="utf-8").replace("@DATA@", data).replace("@TITLE@", title)


def document(watch: PageWatch, title: str = "octavo: page map") -> str:
    """A whole page with nothing but the map."""
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><meta name="color-scheme" content="light dark">'
        f'<meta name="viewport" content="width=device-width"><title>{title}</title>{section(watch)}</html>\n'
    )


def encode(watch: PageWatch) -> str:
    """The data of a map, as drawn above."""
    frames, moments = watch.frames, watch.moments
    cells = np.concatenate([frame.cells for frame in frames])
    units = np.concatenate([frame.units for frame in frames])
    used = moments["units"].any(0)
    header = {
        "units": len(watch.cells_at(0)) - 1,
        "device_units": watch.device_units,
        "unit_tokens": watch.unit_tokens,
        "states": STATES,
        "used_states": np.flatnonzero(used).tolist(),
        "requests": [request if len(request) <= MAX_NAME else request[:MAX_NAME] + "..." for request in watch.requests],
        "seconds": moments["seconds"].round(3).tolist(),
        **{key: moments[key].tolist() for key in ("step", "running", "waiting", "evictions", "preemptions")},
        **{
            key: [None if np.isnan(share) else round(share, 4) for share in shares.tolist()]
            for key, shares in watch.series().items()
        },
    }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 4)
    columns = [
        np.array([len(text)], "<u4"),
        np.frombuffer(text, "u1"),
        np.array([len(frame.units) for frame in frames], "<u4"),
        np.concatenate([np.diff(frame.units, prepend=0) for frame in frames]).astype("<u4"),
        np.where(cells["state"] > 0, cells["page"] - units, 0).astype("<i4"),
        cells["request"].astype("<u2"),
        cells["state"],
        cells["tokens"],
    ]
    return base64.b64encode(zlib.compress(b"".join(column.tobytes() for column in columns), 9)).decode()
