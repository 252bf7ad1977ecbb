// What the two products (product_streams.cu, product_tiles.cu) share: boxes of a tensor by the copy engine, the descriptor of a
// matrix for the tensor cores (wgmma), and other blocks of a cluster (PTX ISA 8.0, "cp.async.bulk.tensor", "mapa").
#pragma once

#include "hopper.h"

INLINE u32 in_block(u32 address, int rank) {
  u32 mapped;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(rank));
  return mapped;
}

// Says that something may be overwritten, and publishes nothing: a release to the block is enough, as whoever arrives has
// the numbers that were read in registers by then, behind a bar.sync of all who read.
INLINE void arrive_in_block(u32 barrier, int rank) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(in_block(barrier, rank)) : "memory");
}

// Numbers go to another block by the copy engine, whose barrier says there that they have come: publishing them by a
// release to the cluster, for the other one to load, would make the device's whole memory agree each time.
INLINE void copy_to_block(u32 to, u32 from, int bytes, u32 barrier, int rank) {
  asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   in_block(to, rank)),
               "r"(from), "r"(bytes), "r"(in_block(barrier, rank))
               : "memory");
}

INLINE void written_for_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

INLINE void cluster_arrive() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
INLINE void cluster_wait() { asm volatile("barrier.cluster.wait.aligned;" ::: "memory"); }

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

INLINE void add(float4& sum, float4 more) {
  sum.x += more.x;
  sum.y += more.y;
  sum.z += more.z;
  sum.w += more.w;
}

INLINE void add(float4& sum, const u16* more) {  // four numbers
  const ushort4 bits = *reinterpret_cast<const ushort4*>(more);
  add(sum, make_float4(widen(bits.x), widen(bits.y), widen(bits.z), widen(bits.w)));
}

INLINE void store(u16* to, float4 numbers) {
  *reinterpret_cast<uint2*>(to) = make_uint2(narrow(numbers.x, numbers.y), narrow(numbers.z, numbers.w));
}
