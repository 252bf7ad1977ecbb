// The largest logit of each row, the first among equals. NaN counts as minus infinity; a row of nothing else gives 0.
//
// sampling.py compiles this file with TYPE: 0 fp32, 2 bf16. A row is searched in stretches, so that only the one that
// holds the largest is looked at twice.

#include <math.h>
#include <stdint.h>

#define STRETCH 1024

#if TYPE == 0
typedef float element;
static inline float widen(element x) { return x; }
#else
typedef uint16_t element;
static inline float widen(element x) {
    union { uint32_t bits; float value; } word = {(uint32_t)x << 16};
    return word.value;
}
#endif

// logits [rows, columns], `stride` elements from row to row; chosen [rows].
void argmax(const element *logits, int64_t rows, int64_t columns, int64_t stride, int64_t *chosen) {
#pragma omp parallel for schedule(static)
    for (int64_t r = 0; r < rows; r++) {
        const element *row = logits + r * stride;
        float largest = -INFINITY;
        int64_t first = 0;
        for (int64_t start = 0; start < columns; start += STRETCH) {
            int64_t stop = start + STRETCH < columns ? start + STRETCH : columns;
            float top = -INFINITY;
#pragma omp simd reduction(max : top)
            for (int64_t i = start; i < stop; i++) top = widen(row[i]) > top ? widen(row[i]) : top; // not if it is NaN
            if (top > largest) largest = top, first = start;
        }
        while (largest > -INFINITY && widen(row[first]) != largest) first++;
        chosen[r] = first;
    }
}
