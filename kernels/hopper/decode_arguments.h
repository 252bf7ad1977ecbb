// What decode.cu is launched with, and the sizes that follow from its macros.
#pragma once

#include "hopper.h"

#define HALVES (D / 64)  // of a row, 128 bytes each
#define STEPS (D / 16)
#define LANES (KV_HEADS / HEADS)
#define TILE 64
#define ROWS (U < 16 ? U : 16)  // of a group of 16 slots that lie in one unit
#define ENTRIES (16 / ROWS)
#define GROUP_BYTES (16 * D * 2)
#define INFINITE __int_as_float(0x7f800000)
#define LN2 0.6931471805599453f
#define LOG2E 1.4426950408889634f

struct Arguments {
  const u16 *q, *k, *v;
  u16* pool;
  const int *table, *lengths, *q_pos;
  const long long* slots;
  const void *cos, *sin, *sinks;
  u16* out;
  float *lse, *part_out, *part_lse;
  int* arrivals;
  long long t_batch, t_head, l_batch, l_head, k_batch, k_head, v_batch, v_head, angle_row, q_batch, q_head, out_batch,
      out_head, unit_stride;
  int items, most, min_tiles, unit_rows, layer_row;
  float scale, cap;
};

INLINE float scaled(float dots, float scale, float cap) {  // kernels/triton/tiles.py
  float score = dots * scale;
#if CAPPED
  score = cap - 2 * cap / (exp2f(score) + 1);
#endif
  return score;
}

INLINE int head_of(int item, int lane) { return item % HEADS * LANES + lane; }  // the KV head
