// A product of few rows on Hopper: out [rows, outputs] = x [rows, inputs] @ weight [outputs, inputs].T (+ residual).
//
// With few rows a product is a stream of weights. A cluster of SPLIT blocks takes OUTPUTS outputs at a time, and each of
// its blocks a share of the inputs; TOKENS tokens (rows, padded) are the columns of what the tensor cores multiply, as
// the outputs are its rows, 64 at a time:
//
//              inputs  | block 0 of the cluster | block 1 |       a stage of a block's ring, 128 bytes a row, swizzled:
//     weight  OUTPUTS  | step 0 | step 1 | ...  | ...     |           weight [WIDE][OUTPUTS][64]
//             OUTPUTS  | ...                              |           x      [WIDE][TOKENS][64]
//
// A warp asks for the stages by the copy engine; one warpgroup multiplies them. The sums of a cluster's blocks are left
// in shared memory, and each block joins a part of the outputs out of all of them, in the order of the blocks, so that
// a product is always rounded alike. What does not depend on the kernel before, the first stages of weights, is asked
// for while that one still runs.
//
// Macros: TOKENS, OUTPUTS, WIDE (steps are 64 WIDE inputs), STAGES, SPLIT, BF16. multiply() is generated (product.py).

#define W_BYTES (OUTPUTS * 128)
#define X_BYTES (TOKENS * 128)
#define STAGE_BYTES (WIDE * (W_BYTES + X_BYTES))
#define PITCH (OUTPUTS + 4)  // of a token's sums, so that the threads of a warp write to different banks
#define SLICES (OUTPUTS / 64)
#define MULTIPLIERS 128

INLINE u32 in_block(u32 address, int rank) {
  u32 mapped;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(rank));
  return mapped;
}

INLINE void arrive_in_block(u32 barrier, int rank) {
  asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(in_block(barrier, rank)) : "memory");
}

INLINE void wait_for_cluster(u32 barrier, u32 parity) {
  asm volatile(
      "{\n .reg .pred over;\n"
      " again:\n mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 over, [%0], %1;\n @!over bra again;\n}" ::"r"(
          barrier),
      "r"(parity)
      : "memory");
}

INLINE void load_box(u32 to, const TensorMap* map, int column, int row, u32 barrier, u64 policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
      "l"(map), "r"(column), "r"(row), "r"(barrier), "l"(policy)
      : "memory");
}

INLINE u64 matrix(u32 address) {  // PTX ISA, "matrix descriptor": rows of 128 bytes, swizzled, 1,024 bytes every eight
  return (1ull << 62) | (64ull << 32) | (1ull << 16) | ((address & 0x3FFFF) >> 4);
}

extern "C" __global__ void __launch_bounds__(MULTIPLIERS + 32, 1)
product(const __grid_constant__ TensorMap weight, const __grid_constant__ TensorMap x, const u16* residual, u16* out,
        int rows, int outputs, int steps, int shares) {
  extern __shared__ __align__(1024) unsigned char memory[];
  float* sums_of_block = reinterpret_cast<float*>(memory + STAGES * STAGE_BYTES);  // [TOKENS, PITCH]
  u64* barriers = reinterpret_cast<u64*>(sums_of_block + TOKENS * PITCH);
  const u32 stages = shared_address(memory), full = shared_address(barriers), empty = full + 8 * STAGES;
  const u32 summed = empty + 8 * STAGES, joined = summed + 8;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  const int cluster = blockIdx.x / SPLIT, clusters = gridDim.x / SPLIT;
  const int first = steps * rank / SPLIT, last = steps * (rank + 1) / SPLIT;

  if (threadIdx.x == MULTIPLIERS) {
    for (int i = 0; i < STAGES; i++) {
      barrier_init(full + 8 * i, 1);
      barrier_init(empty + 8 * i, 4);
    }
    barrier_init(summed, SPLIT);
    barrier_init(joined, SPLIT);
    barriers_ready();
  }
  __syncwarp();
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");

  if (warp == 4) {
    if (lane == 0) {
      auto load_weight = [&](int stage, int share, int step) {
        arrive_expecting(full + 8 * stage, STAGE_BYTES);
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
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
    return;
  }

  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
  wait_for_earlier_kernels();
  let_next_kernel_start();
  int n = 0, turn = 0;
  for (int share = cluster; share < shares; share += clusters, turn++) {
    float sums[SLICES][TOKENS / 2];
    if (first == last)
#pragma unroll
      for (int i = 0; i < SLICES * TOKENS / 2; i++) sums[i / (TOKENS / 2)][i % (TOKENS / 2)] = 0;
    for (int step = first; step < last; step++, n++) {
      const u32 at = stages + n % STAGES * STAGE_BYTES;
      wait(full + 8 * (n % STAGES), (n / STAGES) & 1);
      asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
      for (int k = 0; k < 4 * WIDE; k++)
#pragma unroll
        for (int slice = 0; slice < SLICES; slice++)
          multiply(sums[slice], matrix(at + k / 4 * W_BYTES + slice * 8192) + 2 * (k % 4),
                   matrix(at + WIDE * W_BYTES + k / 4 * X_BYTES) + 2 * (k % 4), step > first || k > 0);
      asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
      if (step > first) {  // the step before this one is done with its stage
        asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
        if (lane == 0) arrive(empty + 8 * ((n - 1) % STAGES));
      }
    }
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    if (lane == 0 && first < last) arrive(empty + 8 * ((n - 1) % STAGES));

    if (turn > 0) wait_for_cluster(joined, (turn - 1) & 1);
#pragma unroll
    for (int slice = 0; slice < SLICES; slice++)
#pragma unroll
      for (int i = 0; i < TOKENS / 2; i++) {
        int output = slice * 64 + warp * 16 + lane / 4 + i % 4 / 2 * 8, token = i / 4 * 8 + lane % 4 * 2 + i % 2;
        sums_of_block[token * PITCH + output] = sums[slice][i];
      }
    asm volatile("bar.sync 1, %0;" ::"n"(MULTIPLIERS) : "memory");
    if (threadIdx.x < SPLIT) arrive_in_block(summed, threadIdx.x);
    wait_for_cluster(summed, turn & 1);
    const int fours = OUTPUTS / SPLIT / 4;
    for (int i = threadIdx.x; i < rows * fours; i += MULTIPLIERS) {
      int token = i / fours, place = rank * (OUTPUTS / SPLIT) + i % fours * 4, output = share * OUTPUTS + place;
      float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll
      for (int r = 0; r < SPLIT; r++) {
        float4 more;
        asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                     : "=f"(more.x), "=f"(more.y), "=f"(more.z), "=f"(more.w)
                     : "r"(in_block(shared_address(sums_of_block + token * PITCH + place), r))
                     : "memory");
        sum.x += more.x;
        sum.y += more.y;
        sum.z += more.z;
        sum.w += more.w;
      }
      if (output < outputs) {
        long long to = static_cast<long long>(token) * outputs + output;
        if (residual) {
          ushort4 more = *reinterpret_cast<const ushort4*>(residual + to);
          sum.x += widen(more.x);
          sum.y += widen(more.y);
          sum.z += widen(more.z);
          sum.w += widen(more.w);
        }
        *reinterpret_cast<uint2*>(out + to) = make_uint2(narrow(sum.x, sum.y), narrow(sum.z, sum.w));
      }
    }
    asm volatile("bar.sync 1, %0;" ::"n"(MULTIPLIERS) : "memory");
    if (threadIdx.x < SPLIT) arrive_in_block(joined, threadIdx.x);
  }
  if (turn > 0) wait_for_cluster(joined, (turn - 1) & 1);  // nobody reads what leaves with this block
}
