// Causal attention of packed chunks of queries, straight out of bf16 pages, with products in AVX512-BF16.
//
// native.py compiles this file for one head size (a multiple of 16) and group size, with DIM, GROUP, ID_SHIFT and
// VALID_MASK (layout.py). An item of work is a block of queries of one (sequence, KV head). Its keys and values pass by
// in tiles; the softmax is kept as in flash attention: a maximum, a sum and weighted values a row, brought to the new
// maximum with each tile. Scores and sums are fp32; probabilities are rounded to bf16 for the product with the values.
//
// A value that is NaN shows in all rows of its tile, as a probability of zero does not hide it.
//
// A row of a block is (query, head of the group). The instruction multiplies pairs of bf16, so the right-hand side of a
// product is packed as pairs along the axis that is summed over:
//
//   keys    [DIM / 2][TILE] pairs (k[2i], k[2i + 1]) of one slot        scores [rows, TILE] = queries x keys
//   values  [TILE / 2][DIM] pairs (v of slot 2i, v of slot 2i + 1)      out    [rows, DIM]  = probabilities x values

#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "exponential.h"

#define TILE 64
#define ROWS 4 // rows of a product that share what is loaded of the right-hand side
#define QUERIES (GROUP < 192 ? 192 / GROUP : 1)
#define BLOCK ((QUERIES * GROUP + ROWS - 1) / ROWS * ROWS)
#define MIN(a, b) ((a) < (b) ? (a) : (b))
#define MAX(a, b) ((a) > (b) ? (a) : (b))

typedef uint16_t element;

// The fields of PrefillArgs in native.py, in the same order. Strides are in elements; no table has a layer axis here.
typedef struct {
    const element *q;       // [tokens, kv_heads, GROUP, DIM]
    const element *pool;    // [units, layers, 2, kv_heads, unit_tokens, DIM]
    const int32_t *table;   // [batch, 1 or kv_heads, entries]
    const int32_t *lengths; // [batch, 1 or kv_heads]
    const int32_t *cu_q;    // [batch + 1]
    const int32_t *q_pos;   // [tokens]
    const float *sinks;     // [kv_heads, GROUP] or NULL
    element *out;           // [tokens, kv_heads, GROUP, DIM]
    float *lse;             // [tokens, kv_heads, GROUP] or NULL
    int64_t batch, units, layers, layer, kv_heads, unit_tokens, entries, window;
    int64_t table_row, table_head, lengths_row, lengths_head;
    double scale, softcap;
} Args;

typedef struct {
    int64_t sequence, head, first, last; // queries first to last - 1 of the packed row
} Item;

// c [ROWS, n] = a [ROWS, 2 * pairs] x b [pairs, n] pairs, added to what c holds; 16 * WIDE columns at a time.
#define PRODUCT(WIDE)                                                                                                  \
    for (; j + 16 * WIDE <= n; j += 16 * WIDE) {                                                                       \
        __m512 sum[ROWS][WIDE];                                                                                        \
        for (int r = 0; r < ROWS; r++)                                                                                 \
            for (int w = 0; w < WIDE; w++) sum[r][w] = _mm512_loadu_ps(c + r * n + j + 16 * w);                        \
        for (int p = 0; p < pairs; p++)                                                                                \
            for (int w = 0; w < WIDE; w++) {                                                                           \
                __m512bh right = (__m512bh)_mm512_loadu_si512(b + p * n + j + 16 * w);                                 \
                for (int r = 0; r < ROWS; r++) {                                                                       \
                    int32_t pair;                                                                                      \
                    memcpy(&pair, a + r * 2 * pairs + 2 * p, sizeof pair);                                             \
                    sum[r][w] = _mm512_dpbf16_ps(sum[r][w], (__m512bh)_mm512_set1_epi32(pair), right);                 \
                }                                                                                                      \
            }                                                                                                          \
        for (int r = 0; r < ROWS; r++)                                                                                 \
            for (int w = 0; w < WIDE; w++) _mm512_storeu_ps(c + r * n + j + 16 * w, sum[r][w]);                        \
    }

static void multiply(const element *a, const uint32_t *b, float *c, int pairs, int n) {
    int j = 0;
    PRODUCT(4)
    PRODUCT(1)
}

typedef struct {
    uint32_t keys[DIM / 2][TILE], values[TILE / 2][DIM];
    int32_t held[TILE]; // whether a slot holds a token
} Tile;

// Slots first to first + TILE - 1 of a sequence and KV head; those that hold no token, whatever is in them, are zero.
static void pack(const Args *a, const Item *item, int64_t first, Tile *tile) {
    static const element nothing[DIM];
    const int32_t *table = a->table + item->sequence * a->table_row + item->head * a->table_head;
    int64_t length = a->lengths[item->sequence * a->lengths_row + item->head * a->lengths_head];
    int64_t run = a->unit_tokens * DIM;
    const element *value[2];
    for (int i = 0; i < TILE; i++) {
        int64_t slot = first + i, entry = slot / a->unit_tokens, offset = slot % a->unit_tokens;
        const element *key = nothing;
        value[i % 2] = nothing;
        tile->held[i] = slot < length && offset < (table[entry] & VALID_MASK);
        if (tile->held[i]) {
            int64_t unit = table[entry] >> ID_SHIFT;
            key = a->pool + (((unit * a->layers + a->layer) * 2) * a->kv_heads + item->head) * run + offset * DIM;
            value[i % 2] = key + a->kv_heads * run;
        }
        for (int d = 0; d < DIM / 2; d++) tile->keys[d][i] = key[2 * d] | (uint32_t)key[2 * d + 1] << 16;
        if (i % 2)
            for (int d = 0; d < DIM; d++) tile->values[i / 2][d] = value[0][d] | (uint32_t)value[1][d] << 16;
    }
}

// The state of a block's rows; a row that has seen nothing has a total of zero.
typedef struct {
    element q[BLOCK][DIM];
    float top[BLOCK], total[BLOCK], value[BLOCK][DIM];
} Block;

// Turn the scores of one row into probabilities relative to its maximum so far. The row sees slots from..to - 1.
static void softmax(const Args *a, const Tile *tile, int64_t from, int64_t to, float *s, float *top, float *total,
                    float *value, element *p) {
    float highest = *top, sum = 0, scale = (float)a->scale, cap = (float)a->softcap;
    if (cap > 0)
        for (int i = 0; i < TILE; i++) s[i] = cap * tanhf(s[i] * scale / cap) / scale;
#pragma omp simd reduction(max : highest)
    for (int i = 0; i < TILE; i++) {
        s[i] = i >= from && i < to && tile->held[i] ? s[i] * scale : -INFINITY;
        highest = MAX(highest, s[i]);
    }
    float base = highest > -INFINITY ? highest : 0; // minus infinity less itself is NaN, which only NaN shall give
#pragma omp simd reduction(+ : sum)
    for (int i = 0; i < TILE; i++) {
        s[i] = i >= from && i < to && tile->held[i] ? exponential(s[i] - base) : 0;
        sum += s[i];
    }
    for (int i = 0; i < TILE; i += 32) {
        __m512bh rounded = _mm512_cvtne2ps_pbh(_mm512_loadu_ps(s + i + 16), _mm512_loadu_ps(s + i));
        memcpy(p + i, &rounded, sizeof rounded);
    }
    float before = expf(*top - base);
    *total = *total * before + sum;
    *top = highest;
    for (int d = 0; d < DIM; d++) value[d] *= before;
}

static void attend(const Args *a, const Item *item, Block *block, Tile *tile) {
    int64_t stride = a->kv_heads * GROUP * DIM, rows = (item->last - item->first) * GROUP;
    memset(block, 0, sizeof *block);
    for (int r = 0; r < BLOCK; r++) block->top[r] = -INFINITY;
    for (int64_t t = item->first; t < item->last; t++)
        memcpy(block->q[(t - item->first) * GROUP], a->q + t * stride + item->head * GROUP * DIM,
               sizeof(element) * GROUP * DIM);

    int64_t lowest = a->q_pos[item->first], last = a->q_pos[item->last - 1]; // positions of a chunk ascend
    int64_t length = a->lengths[item->sequence * a->lengths_row + item->head * a->lengths_head];
    int64_t begin = a->window ? MAX(0, lowest - a->window + 1) / TILE * TILE : 0, end = MIN(length, last + 1);
    for (int64_t slot = begin; slot < end; slot += TILE) {
        pack(a, item, slot, tile);
        for (int64_t r = 0; r < rows; r += ROWS) {
            int64_t last_row = MIN(r + ROWS, rows) - 1;
            if (a->q_pos[item->first + last_row / GROUP] < slot) continue; // all of the tile is in its future
            float s[ROWS][TILE] = {0};
            element p[ROWS][TILE] = {0};
            multiply(block->q[r], tile->keys[0], s[0], DIM / 2, TILE);
            for (int64_t i = r; i <= last_row; i++) {
                int64_t position = a->q_pos[item->first + i / GROUP] - slot;
                int64_t from = a->window ? MAX(0, position - a->window + 1) : 0;
                softmax(a, tile, from, MIN(TILE, position + 1), s[i - r], &block->top[i], &block->total[i],
                        block->value[i], p[i - r]);
            }
            multiply(p[0], tile->values[0], block->value[r], TILE / 2, DIM);
        }
    }
    for (int64_t r = 0; r < rows; r++) {
        int64_t head = item->head * GROUP + r % GROUP, row = (item->first + r / GROUP) * a->kv_heads * GROUP + head;
        element *out = a->out + row * DIM;
        float sink = a->sinks ? a->sinks[head] : -INFINITY, highest = MAX(sink, block->top[r]);
        float base = highest > -INFINITY ? highest : 0, before = expf(block->top[r] - base);
        float total = block->total[r] * before + expf(sink - base);
        float share = total == 0 ? 0 : before / total;
        if (a->lse) a->lse[row] = base + logf(total);
        for (int d = 0; d < DIM; d += 16) {
            __m256bh rounded = _mm512_cvtneps_pbh(_mm512_loadu_ps(block->value[r] + d) * share);
            memcpy(out + d, &rounded, sizeof rounded);
        }
    }
}

// 0; -1 where there is no memory for the blocks; -2 where a length reaches past its table, or an entry past the pool.
int prefill(const Args *a) {
    int64_t count = 0;
    for (int64_t b = 0; b < a->batch; b++) {
        count += (a->cu_q[b + 1] - a->cu_q[b] + QUERIES - 1) / QUERIES * a->kv_heads;
        for (int64_t h = 0; h < a->kv_heads; h++) {
            const int32_t *table = a->table + b * a->table_row + h * a->table_head;
            int64_t length = a->lengths[b * a->lengths_row + h * a->lengths_head];
            if (length < 0 || length > a->entries * a->unit_tokens) return -2;
            for (int64_t entry = 0; entry * a->unit_tokens < length; entry++)
                if ((table[entry] & VALID_MASK) && (uint64_t)(table[entry] >> ID_SHIFT) >= (uint64_t)a->units)
                    return -2;
        }
    }
    Item *items = malloc(MAX(1, count) * sizeof *items);
    if (!items) return -1;
    int64_t n = 0, failed = 0;
    for (int64_t b = 0; b < a->batch; b++)
        for (int64_t first = a->cu_q[b]; first < a->cu_q[b + 1]; first += QUERIES)
            for (int64_t h = 0; h < a->kv_heads; h++)
                items[n++] = (Item){b, h, first, MIN(first + QUERIES, a->cu_q[b + 1])};
#pragma omp parallel reduction(| : failed)
    {
        Block *block = malloc(sizeof *block);
        Tile *tile = malloc(sizeof *tile);
        failed = !block || !tile;
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < count; i++)
            if (block && tile) attend(a, &items[i], block, tile);
        free(tile);
        free(block);
    }
    free(items);
    return failed ? -1 : 0;
}
