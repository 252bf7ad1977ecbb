// The plan of kernels/triton/plan.py: which tiles of which items are a block's share.
#pragma once

#include "decode_arguments.h"

#define SPANS 64  // items whose spans a block keeps

struct Span {  // what the query of an item may see
  int first, end, tiles;
};

INLINE Span span_of(const Arguments& a, int item) {
  int b = item / HEADS, position = a.q_pos[b];
  Span span;
  span.first = 0;
  span.end = max(min(a.lengths[b * a.l_batch + item % HEADS * a.l_head], position + 1), 0);
#if WINDOW
  span.first = max(position + 1 - WINDOW, 0) / TILE * TILE;
#endif
  span.tiles = max((span.end - span.first + TILE - 1) / TILE, 0);
  return span;
}

// All tiles of a lane, and the programs that share them: at most as many as the grid has, and none where a program has a
// whole item.
struct Plan {
  int total, used;

  INLINE int begin_of(int program) const { return static_cast<int>(static_cast<long long>(program) * total / used); }
  INLINE int program_of(int tile) const {
    return static_cast<int>((static_cast<long long>(tile + 1) * used - 1) / total);
  }
};

// A walk through a share: from item to item, each with the slots of it that are ours.
struct Walk {
  const Span* spans;  // of SPANS items from ``origin`` on
  int origin;
  int item, begin, tiles, now, stop;  // the item, its tiles [begin, begin + tiles) of the lane, our tiles [now, stop)
  int first_slot, last_slot;          // of the item, ours: [first_slot, last_slot)
  bool has_end, whole;

  INLINE void enter(const Arguments& a) {
    Span span = item - origin < SPANS ? spans[item - origin] : span_of(a, item);
    tiles = span.tiles;
    int until = min(stop, begin + tiles);
    has_end = until == begin + tiles && tiles > 0;
    whole = now == begin && until == begin + tiles;
    first_slot = span.first + (now - begin) * TILE;
    last_slot = min(span.first + (until - begin) * TILE, span.end) - (FRESH && has_end);
  }

  INLINE bool next(const Arguments& a) {
    now = min(stop, begin + tiles);
    if (now >= stop) return false;
    do {
      begin += tiles;
      item++;
      enter(a);
    } while (tiles == 0);
    return true;
  }
};

// The share of a program, and the plan that it is one of; false if it has none. ``spans`` and ``scratch`` (6 numbers)
// lie in shared memory, and all of the block's threads come here.
INLINE bool find_share(const Arguments& a, int program, Span* spans, int* scratch, Plan& plan, Walk& share) {
  share.spans = spans;
#if DIRECT
  plan = {0, 0};
  share.item = share.origin = program;
  share.begin = share.now = 0;
  if (threadIdx.x == 0) spans[0] = span_of(a, program);
  __syncthreads();
  share.stop = spans[0].tiles;
#else
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int each = (a.items + 127) / 128;
  const int from = min(static_cast<int>(threadIdx.x) * each, a.items), to = min(from + each, a.items);
  int mine = 0;
  for (int i = from; i < to; i++) mine += span_of(a, i).tiles;
  int upto = mine;
  for (int lanes = 1; lanes < 32; lanes *= 2) {
    int other = __shfl_up_sync(~0u, upto, lanes);
    if (lane >= lanes) upto += other;
  }
  if (lane == 31) scratch[warp] = upto;
  __syncthreads();
  plan.total = 0;
  for (int w = 0; w < 4; w++) {
    if (w < warp) upto += scratch[w];
    plan.total += scratch[w];
  }
  plan.used = min(max(plan.total / a.min_tiles, 1), a.most);
  share.now = plan.begin_of(program);
  share.stop = program < plan.used ? plan.begin_of(program + 1) : share.now;
  if (share.now < share.stop && upto - mine <= share.now && share.now < upto) {
    int begin = upto - mine, i = from;
    for (;; i++) {
      int tiles = span_of(a, i).tiles;
      if (share.now < begin + tiles) break;
      begin += tiles;
    }
    scratch[4] = i;
    scratch[5] = begin;
  }
  __syncthreads();
  if (share.now == share.stop) return false;
  share.item = share.origin = scratch[4];
  share.begin = scratch[5];
  const int other = share.item + threadIdx.x;
  if (threadIdx.x < SPANS && other < a.items) spans[threadIdx.x] = span_of(a, other);
  __syncthreads();
#endif
  share.enter(a);
  return true;
}
