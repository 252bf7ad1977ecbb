// Softmaxes out of parts: those of a block's warps, and those that blocks have left of one item.
#pragma once

#include "decode_plan.h"

INLINE float sink_of(const void* of, int at) {
#if WIDE_SINKS
  return static_cast<const float*>(of)[at];
#else
  return widen(static_cast<const u16*>(of)[at]);
#endif
}

// The softmax of a query head, out of parts: first the highest of their tops, then the parts. A warp has two of every
// 64 numbers in each lane.
struct Joined {
  float highest = -INFINITE, weights = 0;
  float2 out[D / 64];

  INLINE Joined() {
#pragma unroll
    for (int i = 0; i < D / 64; i++) out[i] = make_float2(0, 0);
  }

  INLINE void raise(float top) { highest = fmaxf(highest, top); }

  INLINE void add(float top, float total, const float2 (&numbers)[D / 64]) {
    const float weight = exp2f(top - (highest == -INFINITE ? 0 : highest));
    weights += weight * total;
#pragma unroll
    for (int i = 0; i < D / 64; i++) {
      out[i].x += weight * numbers[i].x;
      out[i].y += weight * numbers[i].y;
    }
  }

  INLINE float lse() const { return weights == 0 ? -INFINITE : highest + log2f(weights); }
  INLINE float shrink() const { return weights == 0 ? 0 : 1 / weights; }

  INLINE void finish(const Arguments& a, int b, int head) const {
    const int lane = threadIdx.x % 32;
    float all = lse(), scale = shrink();
#if SINKS
    const float sink = sink_of(a.sinks, head) * LOG2E, higher = fmaxf(all, sink);
    const float base = higher == -INFINITE ? 0 : higher;
    const float with_sink = base + log2f(exp2f(all - base) + exp2f(sink - base));
    scale *= all == -INFINITE ? 0 : exp2f(all - with_sink);
    all = with_sink;
#endif
#pragma unroll
    for (int i = 0; i < D / 64; i++)
      *reinterpret_cast<u32*>(a.out + b * a.out_batch + head * a.out_head + 2 * lane + 64 * i) =
          narrow(out[i].x * scale, out[i].y * scale);
    if (lane == 0) a.lse[b * (KV_HEADS * GROUP) + head] = all * LN2;
  }

  INLINE void leave(const Arguments& a, long long place) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < D / 64; i++)
      *reinterpret_cast<float2*>(a.part_out + place * D + 2 * lane + 64 * i) =
          make_float2(out[i].x * shrink(), out[i].y * shrink());
    if (lane == 0) a.part_lse[place] = lse();
  }
};

// Items in which there is nothing to see are nobody's share, and dealt out in turn.
INLINE void finish_empty(const Arguments& a, int table_lane, int program, int used) {
  for (int item = program; item < a.items; item += used)
    if (span_of(a, item).tiles == 0)
      for (int row = threadIdx.x / 32; row < GROUP; row += 4)
        Joined().finish(a, item / HEADS, head_of(item, table_lane) * GROUP + row);
}

// Join the parts that blocks have left of one item.
INLINE void join_parts(const Arguments& a, const Walk& share, int head, const Plan& plan) {
  const int first = plan.program_of(share.begin), last = plan.program_of(share.begin + share.tiles - 1);
  const bool second = plan.begin_of(first) != share.begin;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int row = warp; row < GROUP; row += 4) {
    const int asking = head * GROUP + row;
    auto place = [&](int p) { return (2ll * p + (p == first && second)) * (KV_HEADS * GROUP) + asking; };
    Joined joined;
    for (int p = first; p <= last; p++) joined.raise(__ldcg(a.part_lse + place(p)));
    for (int p = first; p <= last; p++) {
      float2 more[D / 64];
#pragma unroll
      for (int i = 0; i < D / 64; i++)
        more[i] = __ldcg(reinterpret_cast<const float2*>(a.part_out + place(p) * D + 2 * lane + 64 * i));
      joined.add(__ldcg(a.part_lse + place(p)), 1, more);
    }
    joined.finish(a, share.item / HEADS, asking);
  }
}
