"""Instruments that look on while sparse methods choose (``octavo.core.interfaces.AttentionProbe``)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo.core.interfaces import AttentionProbe

if TYPE_CHECKING:
    from octavo.core.engine import Engine


def attach(engine: Engine, probe: AttentionProbe | None) -> None:
    """Let a probe look on from now on; None lets nobody. Steps at which it looks run eagerly, whatever the execution,
    and give the same tokens."""
    engine._runner.probe = probe
