// Gates of products (product_tiles.cu, product_waves.cu), by the macro GATE.
#pragma once

#include "hopper.h"

enum { NO_GATE, SILU, GELU_TANH };

INLINE float activated(float x) {  // x sigmoid(x), or the tanh form of x Phi(x), which is x sigmoid(2 sqrt(2 / pi) ...)
  const float inner = GATE == SILU ? x : 1.5957691216f * (x + 0.044715f * x * x * x);
  float power, share;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(-1.4426950409f * inner));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(share) : "f"(1 + power));
  return x * share;
}

INLINE u32 multiplied(u32 a, u32 b) {  // two numbers, each rounded once
  u32 product;
#if BF16
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
#else
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
#endif
  return product;
}

// act(gate) * passed of two outputs, rounded as the model does: both products, the activation, and what comes of them.
INLINE u32 gated(float2 gate, float2 passed) {
  gate = pair(narrow(gate.x, gate.y));
  return multiplied(narrow(activated(gate.x), activated(gate.y)), narrow(passed.x, passed.y));
}
