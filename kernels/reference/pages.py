"""Truth of the ops that write and move pages: slow, obvious, any device."""

from torch import Tensor


def append(k: Tensor, v: Tensor, pool: Tensor, layer: int, slots: Tensor) -> None:
    """Write K and V of T tokens: ``k, v [T, Hkv, D]`` into ``slots`` int64 [T] (unit * u + offset) of one layer."""
    unit_tokens = pool.shape[4]
    unit, offset = slots // unit_tokens, slots % unit_tokens
    pool[unit, layer, 0, :, offset] = k.to(pool.dtype)
    pool[unit, layer, 1, :, offset] = v.to(pool.dtype)


def copy_units(pool: Tensor, pairs: Tensor) -> None:
    """Copy whole units over all layers: ``pairs`` int32 [n, 2] of (source, destination); no destination is a source."""
    pool[pairs[:, 1].long()] = pool[pairs[:, 0].long()]


def transfer(source: Tensor, target: Tensor, pairs: Tensor) -> None:
    """Copy whole units over all layers from one pool to another: ``pairs`` int32 [n, 2] of (source unit, target unit).

    The pools are two tensors ``[units, layers, 2, kv_heads, unit_tokens, head_dim]`` that differ in ``units`` at most,
    both on the CPU, or one on a device and one in host memory; ``pairs`` is where the device is. No target is listed
    twice; a source may be.
    """
    assert source.shape[1:] == target.shape[1:] and source.dtype == target.dtype
    from_units, to_units = pairs.long().unbind(1)
    target[to_units.to(target.device)] = source[from_units.to(source.device)].to(target.device)
