// Decode on Hopper: K1 of docs/kernels/decode.md, its plan (kernels/triton/plan.py) and its parts, by the copy engine.
//
// A block is one share of a lane's tiles, as a program of the Triton kernel is. Its four warps take the groups of 16
// slots of each tile in turn, and each is a pipeline of its own: a ring of STAGES groups in shared memory that its first
// lane has filled by the copy engine, so that nothing but the end of an item brings the warps together:
//
//     tile of 64 slots   | group 0 | group 1 | group 2 | group 3 |         warp w:  ring | K V | K V |
//                          warp 0    warp 1    warp 2    warp 3
//     K or V of a group  [16 slots][D / 64][64 numbers], as in the pool, but for the 16-byte pieces of each 128 bytes,
//                        which are swizzled, so that eight slots' pieces lie in four banks and not in one
//
// A group's scores are K Q^T, [16 slots, 8 heads], and its output is V^T P^T, [D, 8 heads]: the slots are the rows of
// what the tensor cores multiply, which costs half of what heads as rows would. P^T is turned from the one layout to the
// other in registers (movmatrix). At the end of an item the warps' softmaxes are joined, and with FRESH the new token's,
// which is a part of one slot. Of an item in several blocks each leaves a part, and whoever comes last joins them, in
// the order of the blocks, so that a step is always rounded alike; ``arrivals`` says who, and is left at 0.
//
// With FRESH, K and V of the other tokens were written by earlier steps: the rings are filled before the kernel before
// has ended. Without, who knows what it writes. The next kernel may start as soon as all before us have ended, while our
// own K and V are still under way.
//
// Macros: D, GROUP (at most 8), KV_HEADS, HEADS (of the table), U (slots of a unit), STAGES, DIRECT, WINDOW, CAPPED,
// SINKS, FRESH, ROTARY (numbers of a row that are turned), WIDE_ANGLES and WIDE_SINKS (they are fp32), BF16, and
// ID_SHIFT and VALID_MASK of a table entry.

#include "decode_arguments.h"
#include "decode_joined.h"
#include "decode_plan.h"
#include "decode_ring.h"
#include "matrices.h"
#include "rotary.h"

#define PAIRS ((GROUP * D / 2 + 127) / 128)  // of queries, that a thread turns

extern "C" __global__ void __launch_bounds__(128, 2)
decode(const __grid_constant__ TensorMap pool_map, const __grid_constant__ Arguments a) {
  extern __shared__ __align__(1024) unsigned char memory[];
  float* accs = reinterpret_cast<float*>(memory + 4 * STAGES * 2 * GROUP_BYTES);  // [4, GROUP, D]
  float* tops = accs + 4 * GROUP * D;                                             // [5, GROUP], the last the new token's
  float* totals = tops + 5 * GROUP;                                               // [4, GROUP]
  u32* queries = reinterpret_cast<u32*>(totals + 4 * GROUP);                      // [GROUP, D / 2] pairs, turned
  u64* barriers = reinterpret_cast<u64*>(queries + GROUP * D / 2 + GROUP % 2);    // [4, STAGES]
  Span* spans = reinterpret_cast<Span*>(barriers + 4 * STAGES);                   // [SPANS]
  int* valid = reinterpret_cast<int*>(spans + SPANS);                             // [4, STAGES, ENTRIES]
  int* scratch = valid + 4 * STAGES * ENTRIES;                                    // [6]

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int table_lane = blockIdx.x, program = blockIdx.y;
  Ring ring;
  ring.pool = &pool_map;
  ring.memory = shared_address(memory) + warp * STAGES * 2 * GROUP_BYTES;
  ring.barriers = shared_address(barriers + warp * STAGES);
  ring.valid = valid + warp * STAGES * ENTRIES;
  ring.table_lane = table_lane;
  if (lane == 0) {
    for (int i = 0; i < STAGES; i++) barrier_init(ring.barriers + 8 * i, ENTRIES);
    barriers_ready();
  }
  __syncwarp();

#if !FRESH
  wait_for_earlier_kernels();
#endif
  Plan plan;
  Walk share;
  if (!find_share(a, program, spans, scratch, plan, share)) {
    wait_for_earlier_kernels();
    if (program < plan.used) finish_empty(a, table_lane, program, plan.used);
    return;
  }
  ring.begin(a, share);
#if FRESH  // the kernel before may be one of these, and store the token before ours
  while (ring.more && ring.filled < STAGES && !(ring.walk.has_end && ring.slot + 16 >= ring.walk.last_slot)) ring.load(a);
  wait_for_earlier_kernels();
#endif
  let_next_kernel_start();
  while (ring.more && ring.filled < STAGES) ring.load(a);

  // The queries of an item: asked for while the one before is attended to, turned behind it.
  Unturned coming[PAIRS];
  auto fetch_queries = [&](const Walk& of) {
    const int b = of.item / HEADS, head = head_of(of.item, table_lane);
#pragma unroll
    for (int i = 0; i < PAIRS; i++) {
      int at = 2 * (threadIdx.x + 128 * i), row = at / D;
      if (row < GROUP) coming[i] = fetch(a.q + b * a.q_batch + (head * GROUP + row) * a.q_head, a, b, at % D);
    }
  };
  auto turn_queries = [&] {
#pragma unroll
    for (int i = 0; i < PAIRS; i++) {
      int at = 2 * (threadIdx.x + 128 * i);
      if (at / D < GROUP) queries[at / 2] = turned(coming[i], at % D);
    }
  };
  fetch_queries(share);
  turn_queries();
  __syncthreads();

  int taken = 0, part = 2 * program;
  bool again;
  do {
    const int b = share.item / HEADS, head = head_of(share.item, table_lane), position = a.q_pos[b];
    Walk following = share;
    again = following.next(a);

    u32 asked[STEPS][2];  // Q^T: numbers 16 i + 8 j + 2 (lane % 4) + {0, 1} of head lane / 4
#pragma unroll
    for (int i = 0; i < STEPS; i++)
#pragma unroll
      for (int j = 0; j < 2; j++)
        asked[i][j] = lane / 4 < GROUP ? queries[lane / 4 * (D / 2) + 8 * i + 4 * j + lane % 4] : 0;

    if (again) fetch_queries(following);
#if FRESH
    Unturned key[D / 64];
    float2 value[D / 64];
    if (share.has_end)
#pragma unroll
      for (int i = 0; i < D / 64; i++) {
        key[i] = fetch(a.k + b * a.k_batch + head * a.k_head, a, b, 2 * lane + 64 * i);
        value[i] = pair(*reinterpret_cast<const u32*>(a.v + b * a.v_batch + head * a.v_head + 2 * lane + 64 * i));
      }
#endif

    // Of heads 2 (lane % 4) + {0, 1}; weights are this lane's slots' only, until they are summed over lanes.
    float top[2] = {-INFINITE, -INFINITE}, weights[2] = {0, 0}, acc[STEPS][4];
#pragma unroll
    for (int i = 0; i < STEPS; i++) acc[i][0] = acc[i][1] = acc[i][2] = acc[i][3] = 0;

    for (int start = share.first_slot + 16 * warp; start < share.last_slot; start += TILE, taken++) {
      const int stage = taken % STAGES;
      const u32 keys = ring.memory + stage * 2 * GROUP_BYTES;
      wait(ring.barriers + 8 * stage, taken / STAGES & 1);
      const int slot0 = lane / 4, slot1 = slot0 + 8;
      const int valid0 = ring.valid[stage * ENTRIES];
      const int valid1 = ring.valid[stage * ENTRIES + ENTRIES - 1] + (ENTRIES - 1) * ROWS;

      // Out of shared memory at once, so that the copy engine can fill it again while we count.
      u32 k[STEPS][4], v[STEPS][4];
#pragma unroll
      for (int i = 0; i < STEPS; i++) {
        int line = lane % 16 * HALVES + i / 4, piece = i % 4 * 2 + lane / 16;
        load_matrices(k[i], keys + line * 128 + ((piece ^ line % 8) << 4));
      }
#pragma unroll
      for (int i = 0; i < STEPS; i++) {
        int line = (lane / 16 * 8 + lane % 8) * HALVES + i / 4, piece = i % 4 * 2 + lane / 8 % 2;
        load_turned_matrices(v[i], keys + GROUP_BYTES + line * 128 + ((piece ^ line % 8) << 4));
      }

      float scores[4] = {0, 0, 0, 0}, odd[4] = {0, 0, 0, 0};  // slots lane / 4 and lane / 4 + 8 of two heads each
#pragma unroll
      for (int i = 0; i < STEPS; i += 2) {
        multiply(scores, k[i], asked[i][0], asked[i][1]);
        multiply(odd, k[i + 1], asked[i + 1][0], asked[i + 1][1]);
      }

      const int pair0 = lane % 4 * 2, pair1 = pair0 + 8;  // a slot that holds no token may hold NaN
      const u32 mask0 = (pair0 < valid0 ? 0xffffu : 0) | (pair0 + 1 < valid0 ? 0xffff0000u : 0);
      const u32 mask1 = (pair1 < valid1 ? 0xffffu : 0) | (pair1 + 1 < valid1 ? 0xffff0000u : 0);
#pragma unroll
      for (int i = 0; i < STEPS; i++) {
        v[i][0] &= mask0;
        v[i][1] &= mask0;
        v[i][2] &= mask1;
        v[i][3] &= mask1;
      }
      __syncwarp();  // all have what they need in registers: the masks above have waited for it
      ring.load(a);

      bool seen0 = slot0 < valid0, seen1 = slot1 < valid1;
#if WINDOW
      seen0 = seen0 && position - (start + slot0) < WINDOW;
      seen1 = seen1 && position - (start + slot1) < WINDOW;
#endif
#pragma unroll
      for (int j = 0; j < 2; j++) {
        float low = seen0 ? scaled(scores[j] + odd[j], a.scale, a.cap) : -INFINITE;
        float high = seen1 ? scaled(scores[2 + j] + odd[2 + j], a.scale, a.cap) : -INFINITE;
        float new_top = fmaxf(top[j], greatest_of_slots(fmaxf(low, high)));
        float pivot = new_top == -INFINITE ? 0 : new_top;
        float decay = exp2f(top[j] - pivot);
        scores[j] = exp2f(low - pivot);
        scores[2 + j] = exp2f(high - pivot);
        weights[j] = weights[j] * decay + scores[j] + scores[2 + j];
        top[j] = new_top;
#pragma unroll
        for (int i = 0; i < STEPS; i++) {
          acc[i][j] *= decay;
          acc[i][2 + j] *= decay;
        }
      }
      const u32 probs0 = turned_matrix(narrow(scores[0], scores[1])), probs1 = turned_matrix(narrow(scores[2], scores[3]));
#pragma unroll
      for (int i = 0; i < STEPS; i++) multiply(acc[i], v[i], probs0, probs1);
    }

#if FRESH
    if (share.has_end) {  // every warp has the new key, and asks it for its rows; the first one stores it
      long long at = a.slots[b];
      u16* to = a.pool + (at / U) * a.unit_stride + static_cast<long long>(a.layer_row + head * U + at % U) * D;
      float2 numbers[D / 64];
#pragma unroll
      for (int i = 0; i < D / 64; i++) {
        u32 bits = turned(key[i], 2 * lane + 64 * i);
        numbers[i] = pair(bits);
        if (warp == 0) {
          *reinterpret_cast<u32*>(to + 2 * lane + 64 * i) = bits;
          *reinterpret_cast<u32*>(to + KV_HEADS * U * D + 2 * lane + 64 * i) = narrow(value[i].x, value[i].y);
        }
      }
      for (int row = warp; row < GROUP; row += 4) {
        float dots = 0;
#pragma unroll
        for (int i = 0; i < D / 64; i++) {
          float2 query = pair(queries[row * (D / 2) + lane + 32 * i]);
          dots += query.x * numbers[i].x + query.y * numbers[i].y;
        }
        dots = sum_over_lanes(dots);
        if (lane == 0) tops[4 * GROUP + row] = scaled(dots, a.scale, a.cap);
      }
    }
#endif

    // Join the warps: each leaves what it has, and then takes a query head.
#pragma unroll
    for (int j = 0; j < 2; j++) {
      const float all = sum_over_slots(weights[j]);
      const int row = lane % 4 * 2 + j;
      if (row < GROUP) {
        if (lane < 4) {
          tops[warp * GROUP + row] = top[j];
          totals[warp * GROUP + row] = all;
        }
#pragma unroll
        for (int i = 0; i < STEPS; i++) {
          accs[(warp * GROUP + row) * D + 16 * i + lane / 4] = acc[i][j];
          accs[(warp * GROUP + row) * D + 16 * i + 8 + lane / 4] = acc[i][2 + j];
        }
      }
    }
    __syncthreads();
    for (int row = warp; row < GROUP; row += 4) {
      Joined joined;
#pragma unroll
      for (int w = 0; w < 4; w++) joined.raise(tops[w * GROUP + row]);
#if FRESH
      if (share.has_end) {
        joined.raise(tops[4 * GROUP + row]);
        joined.add(tops[4 * GROUP + row], 1, value);
      }
#endif
#pragma unroll
      for (int w = 0; w < 4; w++) {
        float2 more[D / 64];
#pragma unroll
        for (int i = 0; i < D / 64; i++)
          more[i] = *reinterpret_cast<const float2*>(accs + (w * GROUP + row) * D + 2 * lane + 64 * i);
        joined.add(tops[w * GROUP + row], totals[w * GROUP + row], more);
      }
      if (share.whole) joined.finish(a, b, head * GROUP + row);
      else joined.leave(a, static_cast<long long>(part) * (KV_HEADS * GROUP) + head * GROUP + row);
    }
    if (again) turn_queries();
    if (!share.whole) __threadfence();
    __syncthreads();
#if !DIRECT
    if (!share.whole) {
      int* arrived = a.arrivals + share.item * LANES + table_lane;
      if (threadIdx.x == 0) {
        int others = plan.program_of(share.begin + share.tiles - 1) - plan.program_of(share.begin);
        scratch[0] = atomicAdd(arrived, 1) == others;
      }
      __syncthreads();
      if (scratch[0]) {
        __threadfence();
        join_parts(a, share, head, plan);
        if (threadIdx.x == 0) *arrived = 0;
      }
    }
#endif
    part = 2 * program + 1;
    share = following;
  } while (again);
#if !DIRECT
  finish_empty(a, table_lane, program, plan.used);
#endif
}
