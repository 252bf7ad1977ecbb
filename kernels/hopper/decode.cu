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
// has ended. Without, who knows what it writes. The next kernel may start when our own K and V are stored.
//
// Macros: D, GROUP (at most 8), KV_HEADS, HEADS (of the table), U (slots of a unit), STAGES, DIRECT, WINDOW, CAPPED,
// SINKS, FRESH, ROTARY, WIDE_ANGLES and WIDE_SINKS (they are fp32), BF16.

#define HALVES (D / 64)
#define STEPS (D / 16)
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
  int* arrivals;
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

#if WIDE_ANGLES
typedef float2 Angles;
INLINE float2 pair(float2 numbers) { return numbers; }
#else
typedef u32 Angles;
#endif

// Numbers d and d + 1 (d is even) of a row, and what they are turned by: asked for, long before it is known.
struct Unturned {
  u32 numbers, partners;
  Angles cosines, sines;
};

INLINE Unturned fetch(const u16* row, const Arguments& a, int b, int d) {
  Unturned x;
  x.numbers = *reinterpret_cast<const u32*>(row + d);
#if ROTARY
  if (d < ROTARY) {
    x.partners = *reinterpret_cast<const u32*>(row + (d < ROTARY / 2 ? d + ROTARY / 2 : d - ROTARY / 2));
    x.cosines = static_cast<const Angles*>(a.cos)[(b * a.angle_row + d) / 2];
    x.sines = static_cast<const Angles*>(a.sin)[(b * a.angle_row + d) / 2];
  }
#endif
  return x;
}

// Turned as kernels/triton/rotary.py turns them, and rounded to their type.
INLINE u32 turned(const Unturned& x, int d) {
#if ROTARY
  if (d < ROTARY) {
    float2 numbers = pair(x.numbers), partners = pair(x.partners), cosines = pair(x.cosines), sines = pair(x.sines);
    float sign = d < ROTARY / 2 ? -1.0f : 1.0f;
    return narrow(fmaf(numbers.x, cosines.x, partners.x * (sign * sines.x)),
                  fmaf(numbers.y, cosines.y, partners.y * (sign * sines.y)));
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

// The program whose share holds a tile.
INLINE int program_of(int tile, int total, int used) {
  return static_cast<int>((static_cast<long long>(tile + 1) * used - 1) / total);
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
    const float sink = number(a.sinks, head) * LOG2E, higher = fmaxf(all, sink);
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
        Joined().finish(a, item / HEADS, (item % HEADS * LANES + table_lane) * GROUP + row);
}

// Join the parts that blocks have left of one item.
INLINE void join_parts(const Arguments& a, const Walk& share, int head, int total, int used) {
  const int first = program_of(share.begin, total, used), last = program_of(share.begin + share.tiles - 1, total, used);
  const bool second = share_begin(first, total, used) != share.begin;
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
  const int each = (a.items + 127) / 128;
  const int from = min(static_cast<int>(threadIdx.x) * each, a.items), to = min(from + each, a.items);
  int mine = 0;
  for (int i = from; i < to; i++) mine += span_of(a, i).tiles;
  int upto = mine, total = 0;
  for (int lanes = 1; lanes < 32; lanes *= 2) {
    int other = __shfl_up_sync(~0u, upto, lanes);
    if (lane >= lanes) upto += other;
  }
  if (lane == 31) plan[warp] = upto;
  __syncthreads();
  for (int w = 0; w < 4; w++) {
    if (w < warp) upto += plan[w];
    total += plan[w];
  }
  const int used = min(max(total / a.min_tiles, 1), a.most);
  share.now = share_begin(program, total, used);
  share.stop = program < used ? share_begin(program + 1, total, used) : share.now;
  if (share.now < share.stop && upto - mine <= share.now && share.now < upto) {
    int begin = upto - mine, i = from;
    for (;; i++) {
      int tiles = span_of(a, i).tiles;
      if (share.now < begin + tiles) break;
      begin += tiles;
    }
    plan[4] = i;
    plan[5] = begin;
  }
  __syncthreads();
  if (share.now == share.stop) {
    wait_for_earlier_kernels();
    if (program < used) finish_empty(a, table_lane, program, used);
    return;
  }
  share.item = share.origin = plan[4];
  share.begin = plan[5];
  const int other = share.item + threadIdx.x;
  if (threadIdx.x < SPANS && other < a.items) spans[threadIdx.x] = span_of(a, other);
  __syncthreads();
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
#if FRESH  // the kernel before may be one of these, and store the token before ours
  while (more && filled < STAGES && !(loading.has_end && slot + 16 >= loading.last)) load();
  wait_for_earlier_kernels();
#endif
  let_next_kernel_start();
  while (more && filled < STAGES) load();

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
      __syncwarp();
      load();

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
        int parts = program_of(share.begin + share.tiles - 1, total, used) - program_of(share.begin, total, used) + 1;
        plan[0] = atomicAdd(arrived, 1) == parts - 1;
      }
      __syncthreads();
      if (plan[0]) {
        __threadfence();
        join_parts(a, share, head, total, used);
        if (threadIdx.x == 0) *arrived = 0;
      }
    }
#endif
    part = 2 * program + 1;
    share = following;
  } while (again);
#if !DIRECT
  finish_empty(a, table_lane, program, used);
#endif
}
