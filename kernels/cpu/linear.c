// y = x W^T + b in bf16 with fp32 sums, by AVX512-BF16, for any number of rows of x.
//
// The instruction multiplies pairs of bf16. W [outputs, 2 * pairs] is laid out so that a thread reads it as one stream:
//
//   blocks [outputs / 32][pairs + 1][32]   word 0 of a column: its bias, fp32;  word 1 + p: (W[c][2p], W[c][2p + 1])
//
// A few rows are bound by that stream, many by the products. Columns past `outputs` are zero and not stored. The sum of
// one output goes over the pairs in order, however many rows there are.
//
// Rows that need more than one tile read a block from memory once, and then from the cache. So that memory is not idle
// then, a tile asks for half of the next block, line by line.

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#include "torch_abi.h"

#define WIDE 32
#define ROWS 12      // of a tile: two sums for each, two words of W and the pairs of x fill the 32 registers
#define CHUNK 240    // rows whose x stays in the second-level cache while blocks pass by
#define AHEAD 4096   // bytes of W that are asked for in front of those that are multiplied, where there is one tile
#define LINE 64      // bytes of the cache
#define MAX_DIM 8

typedef uint16_t element;

// Exactly `rows` rows, a constant where this is inlined, so that all sums are registers. With each pair `lines` lines of
// what lies at `next` are asked for, a constant too.
static inline __attribute__((always_inline)) void tile(int rows, const element *x, const uint32_t *w, element *y,
                                                       int64_t pairs, int64_t outputs, int64_t columns,
                                                       const char *next, int lines) {
    __m512 sum[ROWS][2];
    for (int r = 0; r < rows; r++)
        for (int h = 0; h < 2; h++) sum[r][h] = _mm512_loadu_ps(w + 16 * h);
    for (int64_t p = 0; p < pairs; p++) {
        w += WIDE;
        for (int i = 0; i < lines; i++, next += LINE) _mm_prefetch(next, _MM_HINT_T0);
        __m512bh low = (__m512bh)_mm512_loadu_si512(w), high = (__m512bh)_mm512_loadu_si512(w + 16);
        for (int r = 0; r < rows; r++) {
            int32_t pair;
            memcpy(&pair, x + (r * pairs + p) * 2, sizeof pair);
            __m512bh both = (__m512bh)_mm512_set1_epi32(pair);
            sum[r][0] = _mm512_dpbf16_ps(sum[r][0], low, both);
            sum[r][1] = _mm512_dpbf16_ps(sum[r][1], high, both);
        }
    }
    __mmask32 kept = columns >= WIDE ? ~0u : (1u << columns) - 1;
    for (int r = 0; r < rows; r++)
        _mm512_mask_storeu_epi16(y + r * outputs, kept, (__m512i)_mm512_cvtne2ps_pbh(sum[r][1], sum[r][0]));
}

// x [rows, 2 * pairs], y [rows, outputs].
void linear(const element *x, const uint32_t *blocks, element *y, int64_t rows, int64_t pairs, int64_t outputs) {
    int64_t count = (outputs + WIDE - 1) / WIDE, chunks = (rows + CHUNK - 1) / CHUNK;
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < count * chunks; i++) {
        int64_t block = i % count, chunk = i / count, column = block * WIDE;
        int64_t row = rows * chunk / chunks, last = rows * (chunk + 1) / chunks, tiles = (last - row + ROWS - 1) / ROWS;
        const uint32_t *w = blocks + block * (pairs + 1) * WIDE;
        const char *next = (const char *)(w + (pairs + 1) * WIDE);
        int alone = tiles == 1;
        for (; tiles > 0; tiles--) {
            int n = (int)((last - row + tiles - 1) / tiles);
#define CALL(n, next, lines)                                                                                           \
    tile(n, x + row * 2 * pairs, w, y + row * outputs + column, pairs, outputs, outputs - column, next, lines)
#define TILE(n)                                                                                                        \
    case n:                                                                                                            \
        if (alone) CALL(n, (const char *)(w + WIDE) + AHEAD, 2);                                                       \
        else CALL(n, next + (tiles & 1) * pairs * LINE, 1);                                                            \
        break;
            switch (n) {
                TILE(1) TILE(2) TILE(3) TILE(4) TILE(5) TILE(6) TILE(7) TILE(8) TILE(9) TILE(10) TILE(11) TILE(12)
            }
            row += n;
        }
    }
}

// octavo::linear_blocks(Tensor x, Tensor blocks, int outputs) -> Tensor: x [..., 2 * pairs], blocks as above, int32.
static void linear_blocks(Value *stack, uint64_t arguments, uint64_t results) {
    Tensor x = (Tensor)stack[0], blocks = (Tensor)stack[1], y = 0;
    int64_t dim, *shape, *of_blocks, outputs = (int64_t)stack[2], sizes[MAX_DIM], strides[MAX_DIM], rows = 1;
    void *from, *with, *to;
    bool contiguous;
    aoti_torch_get_dim(x, &dim);
    aoti_torch_get_sizes(x, &shape);
    aoti_torch_get_sizes(blocks, &of_blocks);
    aoti_torch_is_contiguous(x, &contiguous);
    int64_t pairs = of_blocks[1] - 1;
    CHECK(dim >= 1 && dim <= MAX_DIM && contiguous && shape[dim - 1] == 2 * pairs, "x is not [..., inputs], contiguous");
    for (int64_t i = dim - 1, stride = 1; i >= 0; i--) {
        sizes[i] = i == dim - 1 ? outputs : shape[i];
        strides[i] = stride;
        stride *= sizes[i];
        rows *= i == dim - 1 ? 1 : shape[i];
    }
    int32_t failed = aoti_torch_empty_strided(dim, sizes, strides, aoti_torch_dtype_bfloat16(),
                                              aoti_torch_device_type_cpu(), 0, &y);
    CHECK(!failed, "no memory for the product");
    aoti_torch_get_data_ptr(x, &from);
    aoti_torch_get_data_ptr(blocks, &with);
    aoti_torch_get_data_ptr(y, &to);
    linear(from, with, to, rows, pairs, outputs);
    aoti_torch_delete_tensor_object(x);
    aoti_torch_delete_tensor_object(blocks);
    stack[0] = (Value)y;
}

// Make torch call the above; what Python has defined is implemented here. 0, or what torch said.
int register_ops(void) {
    static Library library; // for good: torch forgets what is registered when a library is deleted
    int32_t failed = aoti_torch_library_init_impl("octavo", "CPU", __FILE__, __LINE__, &library);
    return failed ? failed : aoti_torch_library_impl(library, "linear_blocks", linear_blocks);
}
