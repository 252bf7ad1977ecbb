// e^x for x <= 0 to fp32 rounding, in a form that compilers vectorise: 2^whole times the Taylor series of 2^part. NaN
// stays NaN.

#include <stdint.h>

static inline float exponential(float x) {
    static const float series[] = {1.f,           0.69314718f,   0.24022651f,    0.055504109f,
                                   0.0096181291f, 0.0013333558f, 0.00015403530f, 1.5252734e-05f};
    x *= 1.44269504f;
    x = x < -126.f ? -126.f : x;
    union { float value; uint32_t bits; } whole = {x + 0x1.8p23f}; // so large that its last bit counts ones
    float part = x - (whole.value - 0x1.8p23f), power = series[7];
    for (int i = 6; i >= 0; i--) power = power * part + series[i];
    union { uint32_t bits; float value; } scale = {(whole.bits + 127) << 23};
    return power * scale.value;
}
