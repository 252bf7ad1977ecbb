"""Verification of drafts as one program that the device replays, beside decode steps (``decode_program.py``).

::

    DecodeState, told -> ids, positions, slots -> layers, with short chunks over the tables -> logits -> sample
                          of all places                                                         at all places

Every row of the state that decodes has as many places as the longest round, and rows with fewer drafts fill them up
with token 0 at the last position, whose K and V go to the scratch unit::

    told    drafts | tokens at the places     row 0   4 | t d d d .      . is in the state: the last token drawn
                                              row 1   2 | t d . 0 0
                                              row 2   0 | . 0 0 0 0      decodes without drafts

Each row is a chunk for the prefill kernels, which share a long context out over programs by what they read on the
device (``kernels/triton/prefill_short.py``); no launch depends on a length. The state is left as it was: the host says
how many drafts stand (``DecodeState.resume``).
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.core.execution.attention import PagedStep, PrefillGroup
from octavo.core.execution.decode_state import DecodeState
from octavo.core.execution.device_tables import DeviceTables
from octavo.core.hf_model import HFModel
from octavo.core.memory.layer_groups import LayerPlan
from octavo.core.uploads import upload
from octavo.kernels import ops
from octavo.kernels.layout import entry_units


class VerifyProgram:
    """Computes the places of the rows that decode, and draws a token at each. What it is told lies where it always
    lies, so that it can be captured."""

    def __init__(
        self, model: HFModel, kv: Tensor, plan: LayerPlan, backend: str, tables: DeviceTables, state: DecodeState
    ) -> None:
        self._model = model
        self._kv = kv
        self._plan = plan
        self._backend = backend
        self._tables = tables
        self._state = state
        self._told: dict[int, Tensor] = {}

    def tell(self, rows: NDArray[np.int64], drafts: NDArray[np.int64], asked: NDArray[np.int64]) -> None:
        """Say how many drafts are verified in ``rows`` int64 [n], and the tokens at their places int64 [n, places]: the
        last of each is in the state, and what is behind it is not looked at."""
        places = asked.shape[1]
        if places not in self._told:
            self._told[places] = torch.zeros(
                (len(self._state.rows), 1 + places), dtype=torch.int64, device=self._kv.device
            )
        told = np.zeros((int(rows.max()) + 1, 1 + places), np.int64)
        told[rows] = np.column_stack([drafts, asked])
        self._told[places][: len(told)] = upload(told, self._kv.device)

    def run(self, batch: int, places: int) -> Tensor:
        """One pass over the first ``batch`` rows of the state; news int64 [2 * places, batch]: the tokens drawn at each
        place, above the tokens that stood there."""
        fields, entries, unit_tokens = self._state.fields, self._tables.entries[:, :batch], self._kv.shape[4]
        used, told = self._state.rows[:batch] >= 0, self._told[places][:batch]
        drafts, last = told[:, :1], torch.where(used, fields["lengths"][:batch], 0)
        place = torch.arange(places, device=told.device)
        position = torch.minimum((last[:, None] - drafts + place).clamp(min=0), last[:, None])  # int64 [batch, places]
        asked = used[:, None] & (place <= drafts)
        ids = torch.where(place == drafts, fields["tokens"][:batch, None], told[:, 1:]).where(asked, 0)
        at = (position // unit_tokens).expand(len(entries), -1, -1)
        slots = (entry_units(entries.gather(2, at)) * unit_tokens + position % unit_tokens).where(asked, 0)
        group = PrefillGroup(
            start=0,
            stop=batch * places,
            tables=entries,
            slots=torch.where(used, last + 1, 0)[None, :, None],
            cu_q=torch.arange(0, batch * places + 1, places, dtype=torch.int32, device=told.device),
            q_pos=position.int().flatten(),
            max_q=places,
        )
        step = PagedStep(self._kv, self._plan, self._backend, slots.flatten(1), prefills=[group])
        logits = self._model.forward(ids.flatten(), position.flatten(), None, step)
        *filters, draws = (field[:, None].expand(-1, places).contiguous() for field in self._state.filters(batch))
        draws = draws - drafts + place
        drawn: Tensor = ops.sample(logits, *(field.flatten() for field in (*filters, draws)), self._backend)
        return torch.cat([drawn.view(batch, places).T, ids.T])
