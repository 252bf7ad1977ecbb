// A warp's ring of groups of 16 slots: [STAGES][K, V][16 slots][D], and the walk that fills it ahead of who attends.
#pragma once

#include "decode_plan.h"

INLINE void load_run(u32 to, const TensorMap* pool, int row, u32 barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(to),
      "l"(pool), "r"(0), "r"(0), "r"(row), "r"(barrier), "l"(READ_ONCE)
      : "memory");
}

struct Ring {
  const TensorMap* pool;
  u32 memory, barriers;  // STAGES of them, one after the other
  int* valid;            // [STAGES, ENTRIES], slots that hold tokens
  int table_lane;
  Walk walk;
  int slot, entry, filled;  // the next group's first slot, this lane's entry of it, and groups so far
  bool more;

  INLINE void begin(const Arguments& a, const Walk& share) {
    const int warp = threadIdx.x / 32;
    walk = share;
    slot = walk.first_slot + 16 * warp;
    entry = filled = 0;
    more = true;
    settle(a);
  }

  // On the next group of this warp, whose entries are asked for: they are there when it is loaded.
  INLINE void settle(const Arguments& a) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    while (more && slot >= walk.last_slot) {
      more = walk.next(a);
      slot = walk.first_slot + 16 * warp;
    }
    if (more && lane < ENTRIES) {
      int b = walk.item / HEADS, head = head_of(walk.item, table_lane), at = slot + lane * ROWS;
      entry = at < walk.last_slot ? a.table[b * a.t_batch + head * a.t_head + at / U] : 0;
    }
  }

  INLINE void load(const Arguments& a) {
    if (!more) return;
    const int lane = threadIdx.x % 32, stage = filled % STAGES;
    if (lane < ENTRIES) {
      int head = head_of(walk.item, table_lane), at = slot + lane * ROWS, within = at % U;
      int count = min(min((entry & VALID_MASK) - within, walk.last_slot - at), ROWS);
      valid[stage * ENTRIES + lane] = count;
      if (count > 0) {
        int row = (entry >> ID_SHIFT) * a.unit_rows + a.layer_row + head * U + within;
        u32 to = memory + stage * 2 * GROUP_BYTES + lane * ROWS * D * 2;
        arrive_expecting(barriers + 8 * stage, 2 * ROWS * D * 2);
        load_run(to, pool, row, barriers + 8 * stage);
        load_run(to + GROUP_BYTES, pool, row + KV_HEADS * U, barriers + 8 * stage);
      } else {
        arrive(barriers + 8 * stage);
      }
    }
    filled++;
    slot += TILE;
    settle(a);
  }
};
