// A product of many rows on Hopper: out [rows, outputs] = x [rows, inputs] @ weight [outputs, inputs].T (+ residual), or,
// with a GATE, out [rows, outputs / 2] = act(first half of the outputs) * second half.
//
// As many clusters of two blocks as run at a time take tiles in turn. A tile is OUTPUTS outputs of two boxes of up to 128
// tokens (rows), one a block. Each block asks for its own tokens' inputs, and for half of the weights, which the copy
// engine puts into both:
//
//               64 inputs at a time                     a stage of a block, rows of 128 bytes, swizzled
//      tokens   | block 0's 128 | block 1's 128 |       x       [128][64]
//      weights  | OUTPUTS / 2, asked for by 0   |       weight  [OUTPUTS][64]
//               | OUTPUTS / 2, asked for by 1   |
//
// Weights of a GATE lie there in turns, eight outputs of the first half and the eight of the second half that they let
// through, so that a thread has the sums of both.
//
// Tiles come in bands of BAND pairs of boxes, all outputs of a band before the next one: what the clusters read at a time
// is about as much of x as of the weights, and they find it in the L2. While a block's multipliers write a tile, its
// loader fills the stages of the next one.
//
// Macros: OUTPUTS (multiple of 16; of a GATE, of 32), STAGES, BAND, GATE (0, or which), BF16. multiply() is generated
// (wgmma.py).

#include "gates.h"
#include "products.h"

#define TOKENS 128
#define MULTIPLIERS 256
#define LOADERS 128  // a whole warpgroup, as only one can give registers back: 40 + 2 * 232 <= 3 * 168
#define X_BYTES (TOKENS * 128)
#define W_BYTES (OUTPUTS * 128)
#define STAGE (X_BYTES + W_BYTES)
#define GIVEN (GATE == NO_GATE ? OUTPUTS : OUTPUTS / 2)
#define PASSES ((GIVEN + 127) / 128)  // in which a tile is written
#define WIDTH (GIVEN / PASSES)
#define PITCH (2 * WIDTH + 16)  // bytes of a token: those of eight tokens go to different banks

INLINE void load_shared_box(u32 to, const TensorMap* map, int column, int group, u32 barrier, u64 policy) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint"
      " [%0], [%1, {%2, %3, %3, %4}], [%5], %6, %7;" ::"r"(to),
      "l"(map), "r"(column), "r"(0), "r"(group), "r"(barrier), "h"(static_cast<u16>(3)), "l"(policy)
      : "memory");
}

INLINE void copy_16_bytes(u32 to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

extern "C" __global__ void __launch_bounds__(MULTIPLIERS + LOADERS, 1)
product_waves(const __grid_constant__ TensorMap weight, const __grid_constant__ TensorMap x, const u16* residual, u16* out,
              int rows, int box, int width, int steps) {  // width: of out
  extern __shared__ __align__(1024) unsigned char memory[];
  const u32 stages = shared_address(memory), full = stages + STAGES * STAGE, empty = full + 8 * STAGES;
  unsigned char* written = memory + STAGES * (STAGE + 16);  // tiles on their way out: [8 warps][16 tokens][PITCH]
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, part = blockIdx.x % 2;
  const int pairs = (rows + 2 * box - 1) / (2 * box), columns = (width + GIVEN - 1) / GIVEN, tiles = pairs * columns;

  struct Tile { int token, output; };
  auto place = [&](int tile) {
    const int band = tile / (BAND * columns) * BAND, high = min(BAND, pairs - band), within = tile - band * columns;
    return Tile{((band + within % high) * 2 + part) * box, within / high * GIVEN};
  };

  if (threadIdx.x == MULTIPLIERS) {
    for (int i = 0; i < STAGES; i++) {
      barrier_init(full + 8 * i, 1);
      barrier_init(empty + 8 * i, 16);
    }
    barriers_ready();
  }
  __syncthreads();
  cluster_arrive();
  cluster_wait();

  if (warp >= 8) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x == MULTIPLIERS) {
      auto load_weights = [&](int n, int k, Tile tile) {
        const u32 to = stages + n % STAGES * STAGE, filled = full + n % STAGES * 8;
        arrive_expecting(filled, box * 128 + W_BYTES);
        load_shared_box(to + X_BYTES + part * (W_BYTES / 2), &weight, k * 64, tile.output / 8 + part * (GIVEN / 16), filled,
                        READ_AGAIN);
      };
      auto load_inputs = [&](int n, int k, Tile tile) {
        load_box(stages + n % STAGES * STAGE, &x, k * 64, tile.token, full + n % STAGES * 8, READ_OFTEN);
      };
      int n = 0;
      for (int tile = blockIdx.x / 2; tile < tiles; tile += gridDim.x / 2) {
        const Tile here = place(tile);
        int k = 0;
        if (n == 0) {
          const int early = min(STAGES, steps);
          for (int i = 0; i < early; i++) load_weights(i, i, here);
          wait_for_earlier_kernels();
          let_next_kernel_start();
          for (; k < early; k++, n++) load_inputs(n, k, here);
        }
        for (; k < steps; k++, n++) {
          if (n >= STAGES) wait(empty + n % STAGES * 8, (n / STAGES & 1) ^ 1);
          load_weights(n, k, here);
          load_inputs(n, k, here);
        }
      }
    }
    __syncwarp();
    cluster_arrive();
    cluster_wait();  // nobody leaves before what others put in here
    return;
  }

  asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
  wait_for_earlier_kernels();
  let_next_kernel_start();
  const u32 others = in_block(empty, part ^ 1);
  auto release = [&](int n) {  // to both loaders, for weights go to both blocks
    if (lane == 0) {
      arrive(empty + n % STAGES * 8);
      asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(others + n % STAGES * 8) : "memory");
    }
  };
  unsigned char* own = written + warp * 16 * PITCH;
  int n = 0;
  for (int tile = blockIdx.x / 2; tile < tiles; tile += gridDim.x / 2) {
    const Tile here = place(tile);
    const int token = here.token + warp * 16, valid = min(min(box - warp * 16, rows - token), 16);
    // Pieces of 16 bytes of what a pass writes, by warp: [16 tokens][WIDTH / 8].
    auto pieces = [&](int pass, auto&& each) {
#pragma unroll
      for (int i = lane; i < 2 * WIDTH; i += 32) {
        const int row = i / (WIDTH / 8), piece = i % (WIDTH / 8), output = here.output + pass * WIDTH + piece * 8;
        if (row < valid && output < width)
          each(own + row * PITCH + piece * 16, static_cast<long long>(token + row) * width + output);
      }
    };
    auto fetch_residual = [&](int pass) {
      if (GATE == NO_GATE && residual)
        pieces(pass, [&](unsigned char* to, long long from) { copy_16_bytes(shared_address(to), residual + from); });
    };
    fetch_residual(0);

    float sums[OUTPUTS / 2];
    for (int k = 0; k < steps; k++, n++) {
      const u32 in = stages + n % STAGES * STAGE, w = in + X_BYTES;
      wait(full + n % STAGES * 8, n / STAGES & 1);
      asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
      for (int i = 0; i < 4; i++) multiply(sums, matrix(in + warp / 4 * 8192) + 2 * i, matrix(w) + 2 * i, k > 0 || i > 0);
      asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
      if (k > 0) {
        asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
        release(n - 1);
      }
    }
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    release(n - 1);

#pragma unroll
    for (int pass = 0; pass < PASSES; pass++) {
      if (pass > 0) fetch_residual(pass);
      if (GATE == NO_GATE && residual) asm volatile("cp.async.wait_all;" ::: "memory");
      __syncwarp();
#pragma unroll
      for (int i = 0; i < WIDTH / 4; i++) {  // two numbers of a token at a time, of two tokens in turn
        u32* to = reinterpret_cast<u32*>(own + (lane / 4 + i % 2 * 8) * PITCH + i / 2 * 16 + lane % 4 * 4);
        const int at = GATE == NO_GATE ? pass * (WIDTH / 2) + 2 * i : i / 2 * 8 + i % 2 * 2;
        float2 sum = make_float2(sums[at], sums[at + 1]);
        if (GATE != NO_GATE) {
          *to = gated(sum, make_float2(sums[at + 4], sums[at + 5]));
          continue;
        }
        if (residual) {
          const float2 more = pair(*to);
          sum = make_float2(sum.x + more.x, sum.y + more.y);
        }
        *to = narrow(sum.x, sum.y);
      }
      __syncwarp();
      pieces(pass, [&](unsigned char* from, long long to) {
        *reinterpret_cast<uint4*>(out + to) = *reinterpret_cast<const uint4*>(from);
      });
      __syncwarp();
    }
  }
  cluster_arrive();
  cluster_wait();
}
