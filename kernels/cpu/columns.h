// Products of rows of x by one block of a weight, in bf16 with fp32 sums, by AVX512-BF16.
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

#define WIDE 32
#define ROWS 12      // of a tile: two sums for each, two words of W and the pairs of x fill the 32 registers
#define AHEAD 4096   // bytes of W that are asked for in front of those that are multiplied, where there is one tile
#define LINE 64      // bytes of the cache

typedef uint16_t element;

// What x [rows, 2 * pairs] is multiplied by, and where that goes.
typedef struct {
    const uint32_t *blocks;
    element *y;           // [rows, outputs]
    const element *added; // to the product, as y; or NULL
    int64_t outputs;
} Product;

static inline int64_t count_blocks(const Product *product) { return (product->outputs + WIDE - 1) / WIDE; }

static inline const uint32_t *find_block(const Product *product, int64_t block, int64_t pairs) {
    return product->blocks + block * (pairs + 1) * WIDE;
}

// Which of a block's columns there are, if so many are left.
static inline __mmask32 mask(int64_t columns) { return columns >= WIDE ? ~0u : (1u << columns) - 1; }

static inline void store(element *y, __m512 low, __m512 high, __mmask32 kept) {
    _mm512_mask_storeu_epi16(y, kept, (__m512i)_mm512_cvtne2ps_pbh(high, low));
}

static inline __m512 load(const element *x, __mmask16 kept) {
    return (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(kept, x)), 16);
}

// Exactly `rows` rows, a constant where this is inlined, so that all sums are registers. With each pair `lines` lines of
// what lies at `next` are asked for, a constant too.
static inline __attribute__((always_inline)) void tile(int rows, const element *x, const uint32_t *w, element *y,
                                                       const element *added, int64_t pairs, int64_t outputs,
                                                       int64_t columns, const char *next, int lines) {
    __m512 sum[ROWS][2];
    for (int r = 0; added && r < rows; r++) _mm_prefetch((const char *)(added + r * outputs), _MM_HINT_T0);
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
    __mmask32 kept = mask(columns);
    for (int r = 0; r < rows; r++) {
        if (added) {
            sum[r][0] += load(added + r * outputs, (__mmask16)kept);
            sum[r][1] += load(added + r * outputs + 16, (__mmask16)(kept >> 16));
        }
        store(y + r * outputs, sum[r][0], sum[r][1], kept);
    }
}

// Rows `row` to `last` - 1 of a block's columns; at `next` is what is multiplied by then.
static void multiply(const element *x, const Product *product, int64_t block, int64_t row, int64_t last, int64_t pairs,
                     const uint32_t *next) {
    int64_t outputs = product->outputs, column = block * WIDE, tiles = (last - row + ROWS - 1) / ROWS;
    const uint32_t *w = find_block(product, block, pairs);
    int alone = tiles == 1;
    for (; tiles > 0; tiles--) {
        int n = (int)((last - row + tiles - 1) / tiles);
        int64_t first = row * outputs + column;
        const element *added = product->added ? product->added + first : NULL;
#define CALL(n, next, lines)                                                                                           \
    tile(n, x + row * 2 * pairs, w, product->y + first, added, pairs, outputs, outputs - column, next, lines)
#define TILE(n)                                                                                                        \
    case n:                                                                                                            \
        if (alone) CALL(n, (const char *)(w + WIDE) + AHEAD, 2);                                                       \
        else CALL(n, (const char *)next + (tiles & 1) * pairs * LINE, 1);                                              \
        break;
        switch (n) {
            TILE(1) TILE(2) TILE(3) TILE(4) TILE(5) TILE(6) TILE(7) TILE(8) TILE(9) TILE(10) TILE(11) TILE(12)
        }
        row += n;
    }
}
