// A product of few rows on Hopper: out [rows, outputs] = x [rows, inputs] @ weight [outputs, inputs].T (+ residual).
//
// With few rows a product is a stream of weights. A cluster of SPLIT blocks takes OUTPUTS outputs at a time, and each of
// its blocks a share of the inputs; outputs are the rows of what the tensor cores multiply, TOKENS tokens (rows, padded)
// its columns:
//
//              inputs  | block 0 of the cluster | block 1 |       a stage of a block's ring, 128 bytes a row, swizzled:
//     weight  OUTPUTS  | step 0 | step 1 | ...  | ...     |           weight [WIDE][OUTPUTS][64]
//             OUTPUTS  | ...                              |           x      [WIDE][TOKENS][64]
//
// A warp asks for the stages by the copy engine; one warpgroup multiplies them. What does not depend on the kernel
// before, the first stages of weights, is asked for while that one still runs. A box of x holds as many rows as there
// are: filling it up with zeros is slow, and what lies behind them is multiplied for sums that nobody reads. Each block
// of a cluster joins a part of the outputs: the others' sums of it are copied over, and added up in the order of the
// blocks, so that a product is always rounded alike.
//
// Macros: TOKENS, WIDE (steps are 64 WIDE inputs), STAGES, SPLIT, BF16. multiply() is generated (wgmma.py).

#include "products.h"

#define OUTPUTS 64
#define W_BYTES (OUTPUTS * 128)
#define X_BYTES (TOKENS * 128)
#define STAGE_BYTES (WIDE * (W_BYTES + X_BYTES))
#define OWN_OUTPUTS (OUTPUTS / SPLIT)  // outputs that a block joins
#define PITCH (OWN_OUTPUTS + 4)  // of a token's sums, so that the threads of a warp write to different banks
#define MULTIPLIERS 128

extern "C" __global__ void __launch_bounds__(MULTIPLIERS + 32, 1)
product_streams(const __grid_constant__ TensorMap weight, const __grid_constant__ TensorMap x, const u16* residual, u16* out,
                int rows, int outputs, int steps, int shares) {
  extern __shared__ __align__(1024) unsigned char memory[];
  float* own = reinterpret_cast<float*>(memory + STAGES * STAGE_BYTES);  // sums [SPLIT, TOKENS, PITCH], by who joins them
  float* others = own + SPLIT * TOKENS * PITCH;  // [SPLIT - 1, TOKENS, PITCH], what this block joins of the others' sums
  u64* barriers = reinterpret_cast<u64*>(others + (SPLIT - 1) * TOKENS * PITCH);
  const u32 stages = shared_address(memory), full = shared_address(barriers), empty = full + 8 * STAGES;
  const u32 received = empty + 8 * STAGES, free = received + 8;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int part;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(part));
  const int cluster = blockIdx.x / SPLIT, clusters = gridDim.x / SPLIT;
  const int first = steps * part / SPLIT, last = steps * (part + 1) / SPLIT;

  if (threadIdx.x == MULTIPLIERS) {
    for (int i = 0; i < STAGES; i++) {
      barrier_init(full + 8 * i, 1);
      barrier_init(empty + 8 * i, 4);
    }
    barrier_init(received, 1);
    barrier_init(free, SPLIT);
    barriers_ready();
  }
  __syncwarp();
  cluster_arrive();

  if (warp == 4) {
    if (lane == 0) {
      auto load_weight = [&](int stage, int share, int step) {
        arrive_expecting(full + 8 * stage, WIDE * (W_BYTES + rows * 128));
        for (int k = 0; k < WIDE; k++)
          load_box(stages + stage * STAGE_BYTES + k * W_BYTES, &weight, (step * WIDE + k) * 64, share * OUTPUTS,
                   full + 8 * stage, READ_ONCE);
      };
      int ahead = 0;
      for (int share = cluster; share < shares && ahead < STAGES; share += clusters)
        for (int step = first; step < last && ahead < STAGES; step++) load_weight(ahead++, share, step);
      wait_for_earlier_kernels();
      let_next_kernel_start();
      int n = 0;
      for (int share = cluster; share < shares; share += clusters)
        for (int step = first; step < last; step++, n++) {
          const int stage = n % STAGES;
          if (n >= STAGES) {
            wait(empty + 8 * stage, (n / STAGES - 1) & 1);
            load_weight(stage, share, step);
          }
          for (int k = 0; k < WIDE; k++)
            load_box(stages + stage * STAGE_BYTES + WIDE * W_BYTES + k * X_BYTES, &x, (step * WIDE + k) * 64, 0,
                     full + 8 * stage, READ_OFTEN);
        }
    }
    __syncwarp();
    cluster_wait();
    return;
  }

  cluster_wait();
  wait_for_earlier_kernels();
  let_next_kernel_start();
  int n = 0, turn = 0;
  for (int share = cluster; share < shares; share += clusters, turn++) {
    float sums[TOKENS / 2];
    if (first == last)
#pragma unroll
      for (int i = 0; i < TOKENS / 2; i++) sums[i] = 0;
    for (int step = first; step < last; step++, n++) {
      const u32 at = stages + n % STAGES * STAGE_BYTES;
      wait(full + 8 * (n % STAGES), (n / STAGES) & 1);
      asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
      for (int k = 0; k < 4 * WIDE; k++)
        multiply(sums, matrix(at + k / 4 * W_BYTES) + 2 * (k % 4),
                 matrix(at + WIDE * W_BYTES + k / 4 * X_BYTES) + 2 * (k % 4), step > first || k > 0);
      asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
      if (step > first) {  // the step before this one is done with its stage
        asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
        if (lane == 0) arrive(empty + 8 * ((n - 1) % STAGES));
      }
    }
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    if (lane == 0 && first < last) arrive(empty + 8 * ((n - 1) % STAGES));

    if (turn > 0) wait(free, (turn - 1) & 1);
#pragma unroll
    for (int i = 0; i < TOKENS / 2; i++) {
      int output = warp * 16 + lane / 4 + i % 4 / 2 * 8, token = i / 4 * 8 + lane % 4 * 2 + i % 2;
      own[(output / OWN_OUTPUTS * TOKENS + token) * PITCH + output % OWN_OUTPUTS] = sums[i];
    }
    if (SPLIT > 1) written_for_copies();
    asm volatile("bar.sync 1, %0;" ::"n"(MULTIPLIERS) : "memory");
    if (SPLIT > 1) {
      if (threadIdx.x == 0) {
        const int bytes = rows * PITCH * 4;
        arrive_expecting(received, (SPLIT - 1) * bytes);
        for (int r = 0; r < SPLIT; r++)
          if (r != part)
            copy_to_block(shared_address(others + (part - (part > r)) * TOKENS * PITCH),
                          shared_address(own + r * TOKENS * PITCH), bytes, received, r);
      }
      wait(received, turn & 1);
    }
    const int fours = OWN_OUTPUTS / 4;
    for (int i = threadIdx.x; i < rows * fours; i += MULTIPLIERS) {
      int token = i / fours, place = i % fours * 4, output = share * OUTPUTS + part * OWN_OUTPUTS + place;
      float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll
      for (int r = 0; r < SPLIT; r++) {
        const float* from = r == part ? own + r * TOKENS * PITCH : others + (r - (r > part)) * TOKENS * PITCH;
        add(sum, *reinterpret_cast<const float4*>(from + token * PITCH + place));
      }
      if (output < outputs) {
        long long to = static_cast<long long>(token) * outputs + output;
        if (residual) add(sum, residual + to);
        store(out + to, sum);
      }
    }
    __syncwarp();
    asm volatile("bar.sync 1, %0;" ::"n"(MULTIPLIERS) : "memory");
    if (threadIdx.x < SPLIT) arrive_in_block(free, threadIdx.x);
  }
  if (turn > 0) wait(free, (turn - 1) & 1);  // nobody copies any more what leaves with this block
}
