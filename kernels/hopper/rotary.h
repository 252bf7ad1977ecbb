// RoPE on the way from memory into a kernel, as kernels/triton/rotary.py has it: "rotate half", two numbers at a time.
#pragma once

#include "decode_arguments.h"

#if WIDE_ANGLES
typedef float2 Angles;
INLINE float2 pair(float2 numbers) { return numbers; }
#else
typedef u32 Angles;
#endif

// Numbers d and d + 1 (d is even) of a row, and what they are turned by, as loads that nobody has waited for yet.
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
