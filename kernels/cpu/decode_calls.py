"""Decoding of one step, layer after layer: K and V are appended and attended to in one call, with no op in between.

What all layers share, the tables, lengths and slots, is laid out for C once a step, so that a layer costs the host
less than two ops do.
"""

from __future__ import annotations

import ctypes

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.kernels import log
from octavo.kernels.cpu import native
from octavo.kernels.cpu.decode_op import Told


class DecodeCalls:
    """One query a sequence, dense, in stored order that is logical order.

    Args:
        pool: as in ``reference/attention.py``.
        tables: int32 [slices, B, M]. ``slots`` int64 [slices, B] are where K and V of the step go, ``lengths`` int32
            [B] and ``q_pos`` int32 [B] hold for all slices.
    """

    def __init__(self, pool: Tensor, tables: Tensor, slots: Tensor, lengths: Tensor, q_pos: Tensor) -> None:
        self._pool, self._tables, self._slots = pool, native.side_by_side(tables), native.side_by_side(slots)
        self._lengths, self._q_pos = lengths.contiguous(), q_pos.contiguous()  # C is told where they are, so they stay
        units, layers, _, kv_heads, unit_tokens, _ = pool.shape
        self._args = native.Args(
            pool=pool.data_ptr(),
            lengths=self._lengths.data_ptr(),
            q_pos=self._q_pos.data_ptr(),
            batch=len(q_pos),
            units=units,
            layers=layers,
            kv_heads=kv_heads,
            unit_tokens=unit_tokens,
            entries=tables.shape[2],
            table_row=self._tables.stride(1),
            lengths_row=1,
        )
        self._reference = ctypes.byref(self._args)

    def attend(
        self, layer: int, part: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, scale: float, window: int,
        softcap: float,
    ) -> Tensor | None:  # fmt: skip
        """Store ``k, v [B, Hkv, D]`` and give the attention of ``q [B, Hq, D]``, contiguous, in a layer of the pool
        whose tables are slice ``part``; None, and nothing is stored, where this machine cannot compile it."""
        pool = self._pool
        if k.dtype != pool.dtype or v.dtype != pool.dtype or not native.is_plain(q, pool, layer):
            return None
        function = native.decode_function(q, pool)
        if function is None:
            return None
        if log.KERNELS:
            log.chosen("decode", "cpu", "compiled C, appends too", pool, query_heads=q.shape[1], rows=len(q))
        q, k, v = native.side_by_side(q), native.side_by_side(k), native.side_by_side(v)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        sinks = None if sinks is None else sinks.float().contiguous()
        args = self._args
        args.q, args.k, args.v, args.out = q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr()
        (args.q_row, args.q_head, _), (args.k_row, args.k_head, _), (args.v_row, args.v_head, _) = (
            q.stride(), k.stride(), v.stride(),
        )  # fmt: skip
        args.table, args.slots = self._tables[part].data_ptr(), self._slots[part].data_ptr()
        args.sinks = None if sinks is None else sinks.data_ptr()
        args.layer, args.scale, args.window, args.softcap = layer, scale, window, softcap
        failed = function(self._reference)
        if failed:
            raise native.failure(failed, args)
        return out

    def told(self, places: NDArray[np.int64], q_heads: int) -> tuple[Told, NDArray[np.int64]] | None:
        """The same for ``decode_op.c``, and int64 [layers], -1, where it writes the window of each layer that it has
        served; None where the step is for ``attend`` alone.

        ``places`` int64 [2, layers], contiguous: the layer in a unit and the slice of each of the model's layers.
        """
        pool = self._pool
        dim = pool.shape[5]
        q = pool.new_empty(0, q_heads, dim)
        function = native.decode_function(q, pool) if native.is_plain(q, pool, 0) else None
        if log.KERNELS or function is None:
            return None
        windows = np.full(places.shape[1], -1, np.int64)
        told = Told(
            args=ctypes.addressof(self._args),
            decode=ctypes.cast(function, ctypes.c_void_p).value,
            tables=self._tables.data_ptr(),
            slots=self._slots.data_ptr(),
            unit_layers=places[0].ctypes.data,
            slices=places[1].ctypes.data,
            windows=windows.ctypes.data,
            table_slice=self._tables.stride(0),
            slots_slice=self._slots.stride(0),
            count=places.shape[1],
            q_heads=q_heads,
            dim=dim,
            type=native.TYPES.index(pool.dtype),
        )
        return told, windows
