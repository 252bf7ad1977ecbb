// Gates of products (product_tiles.cu, product_waves.cu), by the macro GATE.
#pragma once

#include "hopper.h"

enum { NO_GATE, SILU, GELU_TANH };

INLINE float rounded(float x) { return widen(static_cast<u16>(narrow(x, 0) & 0xffff)); }

INLINE float gated(float gate, float passed) {  // rounded as the model does
  gate = rounded(gate);
  float inner = GATE == SILU ? gate : 1.5957691216f * (gate + 0.044715f * gate * gate * gate);  // 2 sqrt(2 / pi)
  return rounded(__fdividef(gate, 1 + __expf(-inner))) * rounded(passed);
}
