// What the kernels of this folder share: barriers in shared memory, the copy engine, and numbers of 16 bits.
// All of it is PTX (PTX ISA 8.0, sections "mbarrier", "cp.async.bulk.tensor", "griddepcontrol"), for NVRTC has no headers.
#pragma once

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

struct alignas(64) TensorMap { u64 opaque[16]; };

#define INLINE __device__ __forceinline__

INLINE u32 shared_address(const void* pointer) { return static_cast<u32>(__cvta_generic_to_shared(pointer)); }

// Barriers. A phase is over when all arrivals and all announced bytes have come; phases are told apart by their parity.

INLINE void barrier_init(u32 barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}

INLINE void barriers_ready() {  // for the copy engine and for other blocks of the cluster
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

INLINE void arrive(u32 barrier) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory"); }

INLINE void arrive_expecting(u32 barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

INLINE void wait(u32 barrier, u32 parity) {
  asm volatile(
      "{\n .reg .pred over;\n"
      " again:\n mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 over, [%0], %1;\n @!over bra again;\n}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// Programmatic dependent launch: what other kernels wrote may be read after the one, the next kernel may start after
// the other.

INLINE void wait_for_earlier_kernels() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
INLINE void let_next_kernel_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

#define READ_ONCE 0x12F0000000000000ull  // leaves the L2 first
#define READ_AGAIN 0x1000000000000000ull
#define READ_OFTEN 0x14F0000000000000ull

// Numbers of the pool's and the weights' type, two in a register, the first in its low half.

INLINE u32 narrow(float first, float second) {
  u32 pair;
#if BF16
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
#else
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
#endif
  return pair;
}

INLINE float widen(u16 bits) {
#if BF16
  return __uint_as_float(static_cast<u32>(bits) << 16);
#else
  float number;
  asm("cvt.f32.f16 %0, %1;" : "=f"(number) : "h"(bits));
  return number;
#endif
}

INLINE float2 pair(u32 bits) {
  return make_float2(widen(static_cast<u16>(bits & 0xffff)), widen(static_cast<u16>(bits >> 16)));
}
