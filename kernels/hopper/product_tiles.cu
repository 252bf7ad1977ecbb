// A product of up to 256 rows on Hopper: out [rows, outputs] = x [rows, inputs] @ weight [outputs, inputs].T
// (+ residual), or, with a GATE, out [rows, outputs / 2] = act(first half of the outputs) * second half.
//
// One tile a block: a cluster of SPLIT blocks takes OUTPUTS outputs of TOKENS tokens (rows, padded), each of its blocks a
// share of the inputs, and OUTPUTS are so many that the clusters of one wave take them all, or of as few waves as can.
// Tokens are the rows of what the tensor cores multiply, 64 to a warpgroup; outputs are its columns, any multiple of 8:
//
//                 inputs  | block 0 of the cluster | block 1 |    two rings, 128 bytes a row, swizzled:
//      weight    OUTPUTS  | step 0 | step 1 | ...  | ...     |       weights  W_STAGES of [WIDE][OUTPUTS][64]
//      of a GATE: half of them gates, half what they let through     inputs   X_STAGES of [WIDE][TOKENS][64]
//
// A box of inputs holds as many rows as there are: filling it up with zeros is slow, and what lies in the rows behind it
// is multiplied for sums that nobody reads.
//
// Weights come from memory, and the first of them are asked for while the kernel before still runs; inputs come from the
// L2, later and sooner: that is why each has a ring. At the end sums lie where the rings were, those of other blocks of
// the cluster are copied over, and a block joins a part of the tokens in the order of the blocks, so that a product is
// always rounded alike.
//
// Macros: GROUPS, OUTPUTS, WIDE (steps are 64 WIDE inputs), W_STAGES, X_STAGES, BURST (steps of weights that are asked for
// together), SPLIT, HALVES (instructions that outputs take), ROOM (bytes of rings and sums), GATE (0, or which), BF16.
// multiply() is generated (wgmma.py).

#include "gates.h"
#include "products.h"

#define TOKENS (64 * GROUPS)
#define MULTIPLIERS (128 * GROUPS)
// Of three and four groups a thread begins with 128 and 96 registers. Those who load give some back, of which those who
// multiply take as many as there are: 40 + 3 * 152 <= 4 * 128, 24 + 4 * 112 <= 5 * 96. Only a whole warpgroup can.
#define LOADERS (GROUPS > 2 ? 128 : 32)
#define LOADER_REGISTERS (GROUPS == 3 ? 40 : 24)
#define MULTIPLIER_REGISTERS (GROUPS == 3 ? 152 : 112)
#define W_BYTES (OUTPUTS * 128)
#define X_BYTES (TOKENS * 128)
#define W_STAGE (WIDE * W_BYTES)
#define X_STAGE (WIDE * X_BYTES)
#define SUMS (OUTPUTS / 2 / HALVES)           // of a thread, for an instruction
#define PITCH ((OUTPUTS + 23) / 32 * 32 + 8)  // of a token's sums: pairs of a half warp go to different banks

extern "C" __global__ void __launch_bounds__(MULTIPLIERS + LOADERS, 1)
product_tiles(const __grid_constant__ TensorMap weight, const __grid_constant__ TensorMap x, const u16* residual, u16* out,
              int rows, int box, int outputs, int steps) {
  extern __shared__ __align__(1024) unsigned char memory[];
  u64* barriers = reinterpret_cast<u64*>(memory + ROOM);
  const u32 weights = shared_address(memory), inputs = weights + W_STAGES * W_STAGE;
  const u32 w_full = shared_address(barriers), x_full = w_full + 8 * W_STAGES, done = x_full + 8 * X_STAGES;
  const u32 free = done + 8 * X_STAGES, received = free + 8;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, part = blockIdx.x % SPLIT;
  const int tiles_of_rows = (rows + box - 1) / box;  // side by side, so that they find the weights in the L2
  const int tile = blockIdx.x / SPLIT / tiles_of_rows, before = blockIdx.x / SPLIT % tiles_of_rows * box;
  rows = min(rows - before, box);
  const int first = steps * part / SPLIT, count = steps * (part + 1) / SPLIT - first;

  if (threadIdx.x == MULTIPLIERS) {
    for (int i = 0; i < W_STAGES; i++) barrier_init(w_full + 8 * i, 1);
    for (int i = 0; i < X_STAGES; i++) {
      barrier_init(x_full + 8 * i, 1);
      barrier_init(done + 8 * i, 4 * GROUPS);
    }
    barrier_init(free, SPLIT);
    barrier_init(received, 1);
    barriers_ready();
  }
  __syncthreads();
  cluster_arrive();

  if (warp >= 4 * GROUPS) {
#if GROUPS > 2
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(LOADER_REGISTERS));
#endif
    if (threadIdx.x == MULTIPLIERS) {
      auto load_weights = [&](int n) {
        const u32 to = weights + n % W_STAGES * W_STAGE, full = w_full + n % W_STAGES * 8;
        arrive_expecting(full, W_STAGE);
#pragma unroll
        for (int k = 0; k < WIDE; k++) {
          const int column = ((first + n) * WIDE + k) * 64;
          if (GATE == NO_GATE)
            load_box(to + k * W_BYTES, &weight, column, tile * OUTPUTS, full, READ_ONCE);
          else
            for (int half = 0; half < 2; half++)
              load_box(to + k * W_BYTES + half * (W_BYTES / 2), &weight, column, half * (outputs / 2) + tile * (OUTPUTS / 2),
                       full, READ_ONCE);
        }
      };
      auto load_inputs = [&](int n) {
        const u32 to = inputs + n % X_STAGES * X_STAGE, full = x_full + n % X_STAGES * 8;
        arrive_expecting(full, WIDE * box * 128);
#pragma unroll
        for (int k = 0; k < WIDE; k++) load_box(to + k * X_BYTES, &x, ((first + n) * WIDE + k) * 64, before, full, READ_OFTEN);
      };
      for (int n = 0; n < min(W_STAGES, count); n++) load_weights(n);
      wait_for_earlier_kernels();
      let_next_kernel_start();
      for (int n = 0; n < min(X_STAGES, count); n++) load_inputs(n);
      for (int n = 0; n + X_STAGES < count; n++) {
        wait(done + n % X_STAGES * 8, n / X_STAGES & 1);
        load_inputs(n + X_STAGES);
        if (n % BURST == BURST - 1)
          for (int i = n - BURST + 1; i <= n; i++)
            if (i + W_STAGES < count) load_weights(i + W_STAGES);
      }
    }
    __syncwarp();
    cluster_wait();
    cluster_arrive();
    cluster_wait();  // nobody leaves before what others copy from here, or to here
    return;
  }

#if GROUPS > 2
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(MULTIPLIER_REGISTERS));
#endif
  cluster_wait();
  wait_for_earlier_kernels();
  let_next_kernel_start();
  const int group = warp / 4;
  float sums[HALVES][SUMS];
  if (count == 0)
#pragma unroll
    for (int i = 0; i < HALVES * SUMS; i++) sums[i / SUMS][i % SUMS] = 0;
  for (int n = 0; n < count; n++) {
    const u32 w = weights + n % W_STAGES * W_STAGE, in = inputs + n % X_STAGES * X_STAGE + group * 8192;
    wait(w_full + n % W_STAGES * 8, n / W_STAGES & 1);
    wait(x_full + n % X_STAGES * 8, n / X_STAGES & 1);
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
    for (int k = 0; k < 4 * WIDE; k++)
#pragma unroll
      for (int half = 0; half < HALVES; half++)
        multiply(sums[half], matrix(in + k / 4 * X_BYTES) + 2 * (k % 4),
                 matrix(w + k / 4 * W_BYTES + half * (W_BYTES / 2)) + 2 * (k % 4), n > 0 || k > 0);
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    if (n > 0) {  // the step before this one is done with its stages
      asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
      if (lane == 0) arrive(done + (n - 1) % X_STAGES * 8);
    }
  }
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
  asm volatile("bar.sync 1, %0;" ::"n"(MULTIPLIERS) : "memory");  // nobody reads the rings any more

  const int tokens = (rows + SPLIT - 1) / SPLIT, bytes = tokens * PITCH * 4;  // that a block joins
  float* own = reinterpret_cast<float*>(memory);  // sums [SPLIT, tokens, PITCH], by who joins them
  float* others = own + SPLIT * tokens * PITCH;   // [SPLIT - 1, tokens, PITCH], what this block joins of the others' sums
  if (SPLIT > 1 && threadIdx.x < SPLIT) arrive_in_block(free, threadIdx.x);
#pragma unroll
  for (int i = 0; i < HALVES * SUMS; i += 2) {
    const int token = group * 64 + warp % 4 * 16 + lane / 4 + i % 4 / 2 * 8, place = i / 4 * 8 + lane % 4 * 2;
    if (token < tokens * SPLIT)
      *reinterpret_cast<float2*>(own + token * PITCH + place) =
          make_float2(sums[i / SUMS][i % SUMS], sums[i / SUMS][i % SUMS + 1]);
  }
  if (SPLIT > 1) written_for_copies();
  asm volatile("bar.sync 1, %0;" ::"n"(MULTIPLIERS) : "memory");
  if (SPLIT > 1) {
    if (threadIdx.x == 0) {
      arrive_expecting(received, (SPLIT - 1) * bytes);
      wait(free, 0);
      for (int p = 0; p < SPLIT; p++)
        if (p != part)
          copy_to_block(shared_address(others + (part - (part > p)) * tokens * PITCH),
                        shared_address(own + p * tokens * PITCH), bytes, received, p);
    }
    wait(received, 0);
  }

  auto joined = [&](int token, int place) {
    float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll
    for (int p = 0; p < SPLIT; p++) {
      const float* from = p == part ? own + p * tokens * PITCH : others + (p - (p > part)) * tokens * PITCH;
      add(sum, *reinterpret_cast<const float4*>(from + token * PITCH + place));
    }
    return sum;
  };
  constexpr int GIVEN = GATE == NO_GATE ? OUTPUTS : OUTPUTS / 2, FOURS = GIVEN / 4;
  const int width = GATE == NO_GATE ? outputs : outputs / 2, mine = min(tokens, rows - part * tokens);
  for (int i = threadIdx.x; i < mine * FOURS; i += MULTIPLIERS) {
    const int token = i / FOURS, place = i % FOURS * 4, output = tile * GIVEN + place;
    if (output >= width) continue;
    const long long to = static_cast<long long>(before + part * tokens + token) * width + output;
    float4 sum = joined(token, place);
    if (GATE != NO_GATE) {
      const float4 passed = joined(token, OUTPUTS / 2 + place);
      *reinterpret_cast<uint2*>(out + to) =
          make_uint2(gated(make_float2(sum.x, sum.y), make_float2(passed.x, passed.y)),
                     gated(make_float2(sum.z, sum.w), make_float2(passed.z, passed.w)));
    } else {
      if (residual) add(sum, residual + to);
      store(out + to, sum);
    }
  }
  __syncwarp();
  cluster_arrive();
  cluster_wait();
}
