"""What a method that keeps its pages in host memory asks of an engine, refused before anything is held."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo.core.hosting.interfaces import Hosting
from octavo.core.interfaces import SparseMethod
from octavo.core.memory.page_layout import PageLayout
from octavo.kernels.layout import MAX_UNITS

if TYPE_CHECKING:
    from octavo.core.engine import Engine


def hosting_of(method: SparseMethod, engine: Engine) -> Hosting | None:
    """How a method's pages lie in the host tier; None if they stay in the pool."""
    ask = getattr(method, "hosting", None)
    hosting: Hosting | None = ask(engine.spec, engine.config.text_page_tokens) if ask is not None else None
    return hosting


def require_host_tier(method: SparseMethod, engine: Engine) -> None:
    """Refuse, with a ValueError, a method whose pages the engine cannot keep in host memory."""
    hosting = hosting_of(method, engine)
    if hosting is None:
        return
    if engine._host is None:
        raise ValueError(
            f"{method.name} keeps its pages in host memory, and host_tokens=0 gives it none; set host_tokens to what "
            f"the requests that run at once have together, at least {engine._max_tokens} for the longest"
        )
    if hosting.foresees:
        engine._model.foresight()
    if any(engine.spec.windows) and not engine.config.layer_groups:
        raise ValueError(
            f"{method.name} keeps its pages in host memory, and layers of {engine.spec.name} with a window would miss "
            "them there; set layer_groups=True, so that those have tables of their own"
        )
    runs = engine._pool.most_units * engine._plan.unit_layers
    if hosting.whole_layers and runs >= MAX_UNITS:
        raise ValueError(
            f"{method.name} keeps dense layers apart from the others, so the pool counts as {runs} units of one layer, "
            f"more than the {MAX_UNITS - 1} that a table entry can name; set a smaller pool, or dense_layers=[]"
        )


def require_host_room(
    method: SparseMethod, engine: Engine, layout: PageLayout, prompt_tokens: int, new_tokens: int
) -> None:
    """Refuse, with a ValueError, a request whose pages the whole host tier cannot hold."""
    if engine._host is None or hosting_of(method, engine) is None:
        return
    pages = layout.full_pages(prompt_tokens + new_tokens - 1)
    units = pages * layout.page_entries(0) * engine._plan.groups[0].slices
    if units > engine._host.units_total:
        raise ValueError(
            f"{method.name} keeps {pages} pages of a request of {prompt_tokens} + {new_tokens} tokens in host memory: "
            f"{units} units, and the host tier has {engine._host.units_total}; raise host_tokens"
        )
