// Decode on Hopper: K1 of docs/kernels/decode.md, its plan (kernels/triton/plan.py) and its parts, by the copy engine.
//
// A block is one share of a lane's tiles, as a program of the Triton kernel is. Its four warps take the groups of 16
// slots of each tile in turn, and each is a pipeline of its own: a ring of STAGES groups in shared memory that its first
// lane has filled by the copy engine, so that nothing but the end of an item brings the warps together:
//
//     tile of 64 slots   | group 0 | group 1 | group 2 | group 3 |         warp w:  ring | K V | K V | K V |
//                          warp 0    warp 1    warp 2    warp 3
//     K or V of a group  [16 slots][D / 64][64 numbers], as in the pool, but for the 16-byte pieces of each 128 bytes,
//                        which are swizzled, so that eight slots' pieces lie in four banks and not in one
//
// A group's scores are K Q^T, [16 slots, 8 heads], and its output is V^T P^T, [D, 8 heads]: the slots are the rows of
// what the tensor cores multiply, so that a group of up to 8 query heads costs half of what heads as rows would. P^T is
// turned from the one layout to the other in registers (movmatrix). At the end of an item the warps' softmaxes are
// joined, and the new token's (FRESH), which is a warp of one slot.
//
// With FRESH, K and V of the other tokens were written by earlier steps: the rings are filled before the kernel before
// has ended. Without, who knows what it writes.
//
// Macros: D, GROUP, KV_HEADS, HEADS (of the table), U (slots of a unit), STAGES, DIRECT, WINDOW, CAPPED, SINKS, FRESH,
// ROTARY, WIDE_ANGLES and WIDE_SINKS (they are fp32), BF16.

#define HALVES (D / 64)
#define STEPS (D / 16)
#define COLUMNS ((GROUP + 7) / 8)
#define LANES (KV_HEADS / HEADS)
#define TILE 64
#define ROWS (U < 16 ? U : 16)
#define ENTRIES (16 / ROWS)
#define GROUP_BYTES (16 * D * 2)
#define INFINITE __int_as_float(0x7f800000)
#define SPANS 64
#define PAIRS ((GROUP * D / 2 + 127) / 128)  // of queries, that a thread turns
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
  long long t_batch, t_head, l_batch, l_head, k_batch, k_head, v_batch, v_head, angle_row, q_batch, q_head, out_batch,
      out_head, unit_stride;
  int items, most, min_tiles, unit_rows, layer_row;
  float scale, cap;
};

INLINE void load_run(u32 to, const TensorMap* pool, int row, u32 barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(to),
      "l"(pool), "r"(0), "r"(0), "r"(row), "r"(barrier), "l"(READ_ONCE)
      : "memory");
}

INLINE void load_matrices(u32 (&to)[4], u32 from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(from)
               : "memory");
}

INLINE void load_turned_matrices(u32 (&to)[4], u32 from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(from)
               : "memory");
}

INLINE u32 turned_matrix(u32 from) {
  u32 to;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(to) : "r"(from));
  return to;
}

INLINE void multiply(float (&sum)[4], const u32 (&a)[4], u32 b0, u32 b1) {
#if BF16
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
#else
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
#endif
               " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

INLINE float greatest_of_slots(float x) {  // over the lanes that hold other slots of the same head
  for (int lanes = 4; lanes < 32; lanes *= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, lanes));
  return x;
}

INLINE float sum_over_slots(float x) {
  for (int lanes = 4; lanes < 32; lanes *= 2) x += __shfl_xor_sync(~0u, x, lanes);
  return x;
}

INLINE float sum_over_lanes(float x) {
  for (int lanes = 1; lanes < 32; lanes *= 2) x += __shfl_xor_sync(~0u, x, lanes);
  return x;
}

INLINE float scaled(float dots, float scale, float cap) {  // kernels/triton/tiles.py
  float score = dots * scale;
#if CAPPED
  score = cap - 2 * cap / (exp2f(score) + 1);
#endif
  return score;
}

INLINE float2 pair(u32 bits) {
  return make_float2(widen(static_cast<u16>(bits & 0xffff)), widen(static_cast<u16>(bits >> 16)));
}

INLINE float2 angles(const void* of, long long at) {
#if WIDE_ANGLES
  return *reinterpret_cast<const float2*>(static_cast<const float*>(of) + at);
#else
  return pair(*reinterpret_cast<const u32*>(static_cast<const u16*>(of) + at));
#endif
}

// Numbers d and d + 1 (d is even) of a row, and what they are turned by: asked for, long before it is known.
struct Unturned {
  u32 numbers, partners;
  float2 cosines, sines;
};

INLINE Unturned fetch(const u16* row, const Arguments& a, int b, int d) {
  Unturned x;
  x.numbers = *reinterpret_cast<const u32*>(row + d);
#if ROTARY
  if (d < ROTARY) {
    x.partners = *reinterpret_cast<const u32*>(row + (d < ROTARY / 2 ? d + ROTARY / 2 : d - ROTARY / 2));
    x.cosines = angles(a.cos, b * a.angle_row + d);
    x.sines = angles(a.sin, b * a.angle_row + d);
  }
#endif
  return x;
}

// Turned as kernels/triton/rotary.py turns them, and rounded to their type.
INLINE u32 turned(const Unturned& x, int d) {
#if ROTARY
  if (d < ROTARY) {
    float2 numbers = pair(x.numbers), partners = pair(x.partners);
    float sign = d < ROTARY / 2 ? -1.0f : 1.0f;
    return narrow(fmaf(numbers.x, x.cosines.x, partners.x * (sign * x.sines.x)),
                  fmaf(numbers.y, x.cosines.y, partners.y * (sign * x.sines.y)));
  }
#endif
  return x.numbers;
}

INLINE float number(const void* of, int at) {
#if WIDE_SINKS
  return static_cast<const float*>(of)[at];
#else
  return widen(static_cast<const u16*>(of)[at]);
#endif
}

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

INLINE int share_begin(int program, int total, int used) {
  return static_cast<int>(static_cast<long long>(program) * total / used);
}

// A walk through a share: from item to item, each with the slots [first, last) of it that are ours.
struct Walk {
  const Span* spans;  // of SPANS items from ``origin`` on
  int origin;
  int item, begin, tiles, now, stop;  // the item, its tiles [begin, begin + tiles) of the lane, our tiles [now, stop)
  int first, last;
  bool has_end, whole;

  INLINE void enter(const Arguments& a) {
    Span span = item - origin < SPANS ? spans[item - origin] : span_of(a, item);
    tiles = span.tiles;
    int until = min(stop, begin + tiles);
    has_end = until == begin + tiles && tiles > 0;
    whole = now == begin && until == begin + tiles;
    first = span.first + (now - begin) * TILE;
    last = min(span.first + (until - begin) * TILE, span.end) - (FRESH && has_end);
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
  int* plan = valid + 4 * STAGES * ENTRIES;                                       // sums of 4 warps, item, its begin

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int table_lane = blockIdx.x, program = blockIdx.y;
  const u32 ring = shared_address(memory) + warp * STAGES * 2 * GROUP_BYTES;
  const u32 barrier = shared_address(barriers + warp * STAGES);
  valid += warp * STAGES * ENTRIES;
  if (lane == 0) {
    for (int i = 0; i < STAGES; i++) barrier_init(barrier + 8 * i, ENTRIES);
    barriers_ready();
  }
  __syncwarp();
#if !FRESH
  wait_for_earlier_kernels();
#endif

  // Which tiles of which items are ours.
  Walk share;
  share.spans = spans;
#if DIRECT
  share.item = share.origin = program;
  share.begin = share.now = 0;
  if (threadIdx.x == 0) spans[0] = span_of(a, program);
  __syncthreads();
  share.stop = spans[0].tiles;
#else
  {
    int each = (a.items + 127) / 128, mine = 0;
    int from = min(static_cast<int>(threadIdx.x) * each, a.items), to = min(from + each, a.items);
    for (int i = from; i < to; i++) mine += span_of(a, i).tiles;
    int upto = mine;
    for (int lanes = 1; lanes < 32; lanes *= 2) {
      int other = __shfl_up_sync(~0u, upto, lanes);
      if (lane >= lanes) upto += other;
    }
    if (lane == 31) plan[warp] = upto;
    __syncthreads();
    int total = 0;
    for (int w = 0; w < 4; w++) {
      if (w < warp) upto += plan[w];
      total += plan[w];
    }
    int used = min(max(total / a.min_tiles, 1), a.most);
    if (program >= used || total == 0) {
      wait_for_earlier_kernels();
      return;
    }
    share.now = share_begin(program, total, used);
    share.stop = share_begin(program + 1, total, used);
    int begin = upto - mine;
    if (begin <= share.now && share.now < upto) {
      int i = from;
      for (;; i++) {
        int tiles = span_of(a, i).tiles;
        if (share.now < begin + tiles) break;
        begin += tiles;
      }
      plan[4] = i;
      plan[5] = begin;
    }
    __syncthreads();
    share.item = share.origin = plan[4];
    share.begin = plan[5];
    int other = share.item + threadIdx.x;
    if (threadIdx.x < SPANS && other < a.items) spans[threadIdx.x] = span_of(a, other);
    __syncthreads();
  }
#endif
  share.enter(a);

  // The loading end of this warp's ring: where it stands, and the entries of the group that it loads next.
  Walk loading = share;
  int slot = loading.first + 16 * warp, entry = 0, filled = 0;
  bool more = true;
  auto settle = [&] {  // on the next group of ours, whose entries are asked for
    while (more && slot >= loading.last) {
      more = loading.next(a);
      slot = loading.first + 16 * warp;
    }
    if (more && lane < ENTRIES) {
      int b = loading.item / HEADS, head = loading.item % HEADS * LANES + table_lane, at = slot + lane * ROWS;
      entry = at < loading.last ? a.table[b * a.t_batch + head * a.t_head + at / U] : 0;
    }
  };
  auto load = [&] {
    if (!more) return;
    int stage = filled % STAGES;
    if (lane < ENTRIES) {
      int head = loading.item % HEADS * LANES + table_lane, at = slot + lane * ROWS, within = at % U;
      int count = min(min((entry & 127) - within, loading.last - at), ROWS);
      valid[stage * ENTRIES + lane] = count;
      if (count > 0) {
        int row = (entry >> 9) * a.unit_rows + a.layer_row + head * U + within;
        u32 to = ring + stage * 2 * GROUP_BYTES + lane * ROWS * D * 2;
        arrive_expecting(barrier + 8 * stage, 2 * ROWS * D * 2);
        load_run(to, &pool_map, row, barrier + 8 * stage);
        load_run(to + GROUP_BYTES, &pool_map, row + KV_HEADS * U, barrier + 8 * stage);
      } else {
        arrive(barrier + 8 * stage);
      }
    }
    filled++;
    slot += TILE;
    settle();
  };
  settle();
  for (int i = 0; i < STAGES; i++) load();

#if FRESH
  wait_for_earlier_kernels();
#endif
#if !DIRECT  // whoever comes behind combine finds stored what it loads before it waits
  let_next_kernel_start();
#endif

  // The queries of an item: asked for while the one before is attended to, turned behind it.
  Unturned coming[PAIRS];
  auto fetch_queries = [&](const Walk& of) {
    const int b = of.item / HEADS, head = of.item % HEADS * LANES + table_lane;
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
    const int b = share.item / HEADS, head = share.item % HEADS * LANES + table_lane, position = a.q_pos[b];
    Walk following = share;
    again = following.next(a);

    u32 asked[COLUMNS][STEPS][2];  // Q^T: numbers 16 i + 2 (lane % 4) + {0, 1} (+ 8) of head lane / 4
#pragma unroll
    for (int c = 0; c < COLUMNS; c++)
#pragma unroll
      for (int i = 0; i < STEPS; i++)
#pragma unroll
        for (int j = 0; j < 2; j++) {
          int row = 8 * c + lane / 4;
          asked[c][i][j] = row < GROUP ? queries[row * (D / 2) + 8 * i + 4 * j + lane % 4] : 0;
        }

    if (again) fetch_queries(following);
#if FRESH
    Unturned key[D / 64];
    u32 value[D / 64];
    if (share.has_end)
#pragma unroll
      for (int i = 0; i < D / 64; i++) {
        key[i] = fetch(a.k + b * a.k_batch + head * a.k_head, a, b, 2 * lane + 64 * i);
        value[i] = *reinterpret_cast<const u32*>(a.v + b * a.v_batch + head * a.v_head + 2 * lane + 64 * i);
      }
#endif

    float top[COLUMNS][2], total[COLUMNS][2], acc[COLUMNS][STEPS][4];
#pragma unroll
    for (int c = 0; c < COLUMNS; c++) {
      top[c][0] = top[c][1] = -INFINITE;
      total[c][0] = total[c][1] = 0;
#pragma unroll
      for (int i = 0; i < STEPS; i++) acc[c][i][0] = acc[c][i][1] = acc[c][i][2] = acc[c][i][3] = 0;
    }

    for (int start = share.first + 16 * warp; start < share.last; start += TILE, taken++) {
      const int stage = taken % STAGES;
      const u32 keys = ring + stage * 2 * GROUP_BYTES;
      wait(barrier + 8 * stage, taken / STAGES & 1);
      const int slot0 = lane / 4, slot1 = slot0 + 8;
      const int valid0 = valid[stage * ENTRIES], valid1 = valid[stage * ENTRIES + ENTRIES - 1] + (ENTRIES - 1) * ROWS;

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

      float scores[COLUMNS][4];
#pragma unroll
      for (int c = 0; c < COLUMNS; c++) {
        float odd[4] = {0, 0, 0, 0};
        scores[c][0] = scores[c][1] = scores[c][2] = scores[c][3] = 0;
#pragma unroll
        for (int i = 0; i < STEPS; i += 2) {
          multiply(scores[c], k[i], asked[c][i][0], asked[c][i][1]);
          multiply(odd, k[i + 1], asked[c][i + 1][0], asked[c][i + 1][1]);
        }
#pragma unroll
        for (int i = 0; i < 4; i++) scores[c][i] += odd[i];
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
      __syncwarp();
      load();

      bool seen0 = slot0 < valid0, seen1 = slot1 < valid1;
#if WINDOW
      seen0 = seen0 && position - (start + slot0) < WINDOW;
      seen1 = seen1 && position - (start + slot1) < WINDOW;
#endif
#pragma unroll
      for (int c = 0; c < COLUMNS; c++) {
#pragma unroll
        for (int j = 0; j < 2; j++) {
          float low = seen0 ? scaled(scores[c][j], a.scale, a.cap) : -INFINITE;
          float high = seen1 ? scaled(scores[c][2 + j], a.scale, a.cap) : -INFINITE;
          float new_top = fmaxf(top[c][j], greatest_of_slots(fmaxf(low, high)));
          float pivot = new_top == -INFINITE ? 0 : new_top;
          float decay = exp2f(top[c][j] - pivot);
          scores[c][j] = exp2f(low - pivot);
          scores[c][2 + j] = exp2f(high - pivot);
          total[c][j] = total[c][j] * decay + scores[c][j] + scores[c][2 + j];
          top[c][j] = new_top;
#pragma unroll
          for (int i = 0; i < STEPS; i++) {
            acc[c][i][j] *= decay;
            acc[c][i][2 + j] *= decay;
          }
        }
        const u32 probs0 = turned_matrix(narrow(scores[c][0], scores[c][1]));
        const u32 probs1 = turned_matrix(narrow(scores[c][2], scores[c][3]));
#pragma unroll
        for (int i = 0; i < STEPS; i++) multiply(acc[c][i], v[i], probs0, probs1);
      }
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
          *reinterpret_cast<u32*>(to + KV_HEADS * U * D + 2 * lane + 64 * i) = value[i];
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

    // Join the warps.
#pragma unroll
    for (int c = 0; c < COLUMNS; c++)
#pragma unroll
      for (int j = 0; j < 2; j++) {
        float all = sum_over_slots(total[c][j]);
        int row = 8 * c + lane % 4 * 2 + j;
        if (row < GROUP) {
          if (lane < 4) {
            tops[warp * GROUP + row] = top[c][j];
            totals[warp * GROUP + row] = all;
          }
#pragma unroll
          for (int i = 0; i < STEPS; i++) {
            accs[(warp * GROUP + row) * D + 16 * i + lane / 4] = acc[c][i][j];
            accs[(warp * GROUP + row) * D + 16 * i + 8 + lane / 4] = acc[c][i][2 + j];
          }
        }
      }
    __syncthreads();
#pragma unroll
    for (int row = warp; row < GROUP; row += 4) {
      const bool fresh = FRESH && share.has_end;
      float highest = fresh ? tops[4 * GROUP + row] : -INFINITE;
#pragma unroll
      for (int w = 0; w < 4; w++) highest = fmaxf(highest, tops[w * GROUP + row]);
      const float pivot = highest == -INFINITE ? 0 : highest;
      float weights[5], sum = 0;
#pragma unroll
      for (int w = 0; w < 4; w++) {
        weights[w] = exp2f(tops[w * GROUP + row] - pivot);
        sum += weights[w] * totals[w * GROUP + row];
      }
      weights[4] = fresh ? exp2f(tops[4 * GROUP + row] - pivot) : 0;
      sum += weights[4];
      float lse = sum == 0 ? -INFINITE : highest + log2f(sum), shrink = sum == 0 ? 0 : 1 / sum;
      const int asking = head * GROUP + row;
#if SINKS
      if (share.whole) {
        float sink = number(a.sinks, asking) * LOG2E, higher = fmaxf(lse, sink), base = higher == -INFINITE ? 0 : higher;
        float joined = base + log2f(exp2f(lse - base) + exp2f(sink - base));
        shrink *= lse == -INFINITE ? 0 : exp2f(lse - joined);
        lse = joined;
      }
#endif
      const long long place = static_cast<long long>(part) * (KV_HEADS * GROUP) + asking;
      if (lane == 0) {
        if (share.whole) a.lse[b * (KV_HEADS * GROUP) + asking] = lse * LN2;
        else a.part_lse[place] = lse;
      }
#pragma unroll
      for (int i = 0; i < D / 64; i++) {
        const int d = 2 * lane + 64 * i;
        float2 out = make_float2(0, 0);
#if FRESH
        if (fresh) {
          out = pair(value[i]);
          out = make_float2(out.x * weights[4], out.y * weights[4]);
        }
#endif
#pragma unroll
        for (int w = 0; w < 4; w++) {
          float2 more = *reinterpret_cast<const float2*>(accs + (w * GROUP + row) * D + d);
          out.x += weights[w] * more.x;
          out.y += weights[w] * more.y;
        }
        out = make_float2(out.x * shrink, out.y * shrink);
        if (share.whole)
          *reinterpret_cast<u32*>(a.out + b * a.out_batch + asking * a.out_head + d) = narrow(out.x, out.y);
        else
          *reinterpret_cast<float2*>(a.part_out + place * D + d) = out;
      }
    }
    if (again) turn_queries();
    __syncthreads();
    part = 2 * program + 1;
    share = following;
  } while (again);
}
