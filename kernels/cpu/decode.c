// One decode query a sequence, straight out of the pages: every K and V is read once, nothing is gathered.
//
// native.py compiles this file for one element type, head size and group size, with
//
//   TYPE of the pool and QUERY of queries and results: 0 fp32, 1 fp16, 2 bf16;  DIM, GROUP;  ID_SHIFT, VALID_MASK
//   (layout.py)
//
// A row is one (sequence, KV head). Its table is cut into pieces of at most about PIECE slots, all of one size so that
// threads share them evenly; a piece gives the maximum, the sum and the weighted values of its own softmax, and the pieces
// of a row are then combined (split-KV decoding). Scores and sums are fp32. Shapes and semantics as in
// reference/attention.py.
//
// Runs lie apart, so the hardware cannot foresee the next one. A thread asks for every slot DISTANCE slots before it
// comes to it, through all of its pieces (Ahead), so that memory is read at one rate whatever is computed meanwhile.

#ifdef __AVX512BF16__
#include <immintrin.h>
#endif
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "exponential.h"

int omp_get_num_threads(void), omp_get_thread_num(void); // a compiler may have OpenMP without its header

#define PIECE 256
#define DISTANCE 64
#define LINE 64 // bytes of the cache
#define MAX_UNIT 64
#define MIN(a, b) ((a) < (b) ? (a) : (b))
#define MAX(a, b) ((a) > (b) ? (a) : (b))

typedef uint16_t bf16;
typedef _Float16 fp16;
typedef float fp32;
static inline float from_fp32(fp32 x) { return x; }
static inline float from_fp16(fp16 x) { return (float)x; }
static inline float from_bf16(bf16 x) {
    union { uint32_t bits; float value; } word = {(uint32_t)x << 16};
    return word.value;
}
static inline fp32 to_fp32(float x) { return x; }
static inline fp16 to_fp16(float x) { return (fp16)x; }
static inline bf16 to_bf16(float x) { // to the nearest, ties to even
    union { float value; uint32_t bits; } word = {x};
    return x != x ? 0x7fc0 : (word.bits + 0x7fff + (word.bits >> 16 & 1)) >> 16;
}

#if TYPE == 0
typedef fp32 element;
#define widen from_fp32
#elif TYPE == 1
typedef fp16 element;
#define widen from_fp16
#else
typedef bf16 element;
#define widen from_bf16
#endif
#if QUERY == 0
typedef fp32 query;
#define widen_query from_fp32
#define narrow_query to_fp32
#elif QUERY == 1
typedef fp16 query;
#define widen_query from_fp16
#define narrow_query to_fp16
#else
typedef bf16 query;
#define widen_query from_bf16
#define narrow_query to_bf16
#endif

#include "decode_args.h"

typedef struct {
    const int32_t *table, *unit_pos;
    const element *pool; // K of this layer and head in unit 0
    int64_t length, q_pos;
    int64_t begin, end; // entries that the query can see at most
    int64_t piece, per_piece; // the first of its pieces, and the entries of each
    int64_t share;            // the first of its entries among those of all rows
} Row;

typedef struct {
    float top[GROUP], total[GROUP], value[GROUP][DIM];
} Partial;

typedef struct {
    const element *k, *v; // the runs of one entry, [unit_tokens, DIM]
    int64_t first, last;  // slots that the query sees
} Seen;

static inline Seen seen(const Args *a, const Row *row, int64_t entry) {
    int64_t run = a->unit_tokens * DIM, unit = row->table[entry] >> ID_SHIFT;
    int64_t start = row->unit_pos ? row->unit_pos[entry] : entry * a->unit_tokens;
    int64_t valid = MIN(row->table[entry] & VALID_MASK, a->unit_tokens);
    int64_t filled = MIN(valid, row->length - entry * a->unit_tokens);
    Seen s;
    s.k = row->pool + unit * a->layers * 2 * a->kv_heads * run;
    s.v = s.k + a->kv_heads * run;
    s.first = a->window ? MAX(0, row->q_pos - start - a->window + 1) : 0;
    s.last = MIN(filled, row->q_pos - start + 1);
    return s;
}

// Where a thread is with asking: in a piece the keys of all entries come first, then the values.
typedef struct {
    const Row *row;
    int64_t piece, stop; // it has the pieces in front of `stop`
    int64_t entry;
    int values;          // whether it is at the values
    const element *slot; // the next one
    int64_t left, step;  // so many before another run comes, and from one to the next
} Ahead;

static inline int64_t first_entry(const Row *row, int64_t piece) {
    return row->begin + (piece - row->piece) * row->per_piece;
}

static inline int64_t last_entry(const Row *row, int64_t piece) {
    return MIN(first_entry(row, piece) + row->per_piece, row->end);
}

static void find_run(const Args *a, Ahead *ahead) {
    for (ahead->left = 0; ahead->left <= 0;) {
        if (ahead->piece == ahead->stop) { // the last slot again, so that who asks need not know
            ahead->slot -= ahead->step;
            ahead->left = INT64_MAX;
            ahead->step = 0;
            return;
        }
        while (ahead->piece >= ahead->row[1].piece) ahead->row++;
        int64_t entry = first_entry(ahead->row, ahead->piece) + ahead->entry++;
        Seen s = seen(a, ahead->row, entry);
        ahead->slot = (ahead->values ? s.v : s.k) + s.first * DIM;
        ahead->left = s.last - s.first;
        if (entry + 1 < last_entry(ahead->row, ahead->piece)) continue;
        ahead->entry = 0;
        ahead->piece += ahead->values;
        ahead->values = !ahead->values;
    }
}

static inline void ask(const Args *a, Ahead *ahead) {
    for (size_t byte = 0; byte < DIM * sizeof(element); byte += LINE) __builtin_prefetch((const char *)ahead->slot + byte);
    ahead->slot += ahead->step;
    if (--ahead->left == 0) find_run(a, ahead);
}

#if TYPE == 2 && QUERY == 2 && defined(__AVX512BF16__) && DIM % 32 == 0
typedef struct {
    __m512bh parts[GROUP][DIM / 32];
} Queries;

static inline Queries queries(const Args *a, const query *given) {
    Queries q;
    for (int g = 0; g < GROUP; g++)
        for (int i = 0; i < DIM / 32; i++)
            q.parts[g][i] = (__m512bh)_mm512_loadu_si512(given + g * a->q_head + 32 * i);
    return q;
}

static inline __m512 partial(const Queries *q, int g, const element *k) {
    __m512 sum = _mm512_setzero_ps();
    for (int i = 0; i < DIM / 32; i++)
        sum = _mm512_dpbf16_ps(sum, q->parts[g][i], (__m512bh)_mm512_loadu_si512(k + 32 * i));
    return sum;
}

// The scores of `count` slots that lie side by side. Adding up a register costs more than what is in it, so four are
// added up together.
static inline void score(const Args *a, const Queries *q, const element *k, int64_t count, float *p, int64_t stride,
                         Ahead *ahead) {
    float scale = (float)a->scale;
    int64_t slot = 0;
    for (; slot + 4 <= count; slot += 4, k += 4 * DIM) {
        for (int i = 0; i < 4; i++) ask(a, ahead);
        for (int g = 0; g < GROUP; g++) {
            __m512 s0 = partial(q, g, k), s1 = partial(q, g, k + DIM);
            __m512 s2 = partial(q, g, k + 2 * DIM), s3 = partial(q, g, k + 3 * DIM);
            __m512 s01 = _mm512_unpacklo_ps(s0, s1) + _mm512_unpackhi_ps(s0, s1);
            __m512 s23 = _mm512_unpacklo_ps(s2, s3) + _mm512_unpackhi_ps(s2, s3);
            __m512 all = (__m512)(_mm512_unpacklo_pd((__m512d)s01, (__m512d)s23));
            all += (__m512)(_mm512_unpackhi_pd((__m512d)s01, (__m512d)s23));
            __m256 half = _mm512_castps512_ps256(all) + _mm512_extractf32x8_ps(all, 1);
            __m128 four = _mm256_castps256_ps128(half) + _mm256_extractf128_ps(half, 1);
            _mm_storeu_ps(p + g * stride + slot, four * scale);
        }
    }
    for (; slot < count; slot++, k += DIM) {
        ask(a, ahead);
        for (int g = 0; g < GROUP; g++) p[g * stride + slot] = _mm512_reduce_add_ps(partial(q, g, k)) * scale;
    }
}
#else
typedef struct {
    float parts[GROUP][DIM];
} Queries;

static inline Queries queries(const Args *a, const query *given) {
    Queries q;
    for (int g = 0; g < GROUP; g++)
        for (int d = 0; d < DIM; d++) q.parts[g][d] = widen_query(given[g * a->q_head + d]) * (float)a->scale;
    return q;
}

// The scores of `count` slots that lie side by side.
static inline void score(const Args *a, const Queries *q, const element *k, int64_t count, float *p, int64_t stride,
                         Ahead *ahead) {
    for (int64_t slot = 0; slot < count; slot++, k += DIM) {
        ask(a, ahead);
        float wide[DIM];
        for (int d = 0; d < DIM; d++) wide[d] = widen(k[d]);
        for (int g = 0; g < GROUP; g++) {
            float sum = 0;
#pragma omp simd reduction(+ : sum)
            for (int d = 0; d < DIM; d++) sum += q->parts[g][d] * wide[d];
            p[g * stride + slot] = sum;
        }
    }
}
#endif

static void attend(const Args *a, const Row *row, const query *given, int64_t begin, int64_t end, Partial *out,
                   float *shares, Ahead *ahead) {
    float p[GROUP][PIECE + MAX_UNIT], value[GROUP][DIM] = {0};
    Queries q = queries(a, given);
    int64_t n = 0;
    for (int64_t entry = begin; entry < end; entry++) {
        Seen s = seen(a, row, entry);
        if (s.first >= s.last) continue;
        score(a, &q, s.k + s.first * DIM, s.last - s.first, &p[0][n], PIECE + MAX_UNIT, ahead);
        n += s.last - s.first;
    }
    for (int g = 0; g < GROUP; g++) {
        float top = -INFINITY, total = 0, cap = (float)a->softcap;
        if (cap > 0)
            for (int64_t i = 0; i < n; i++) p[g][i] = cap * tanhf(p[g][i] / cap);
#pragma omp simd reduction(max : top)
        for (int64_t i = 0; i < n; i++) top = MAX(top, p[g][i]);
        float base = top > -INFINITY ? top : 0; // minus infinity less itself is NaN, which only NaN shall give
#pragma omp simd
        for (int64_t i = 0; i < n; i++) p[g][i] = exponential(p[g][i] - base);
#pragma omp simd reduction(+ : total)
        for (int64_t i = 0; i < n; i++) total += p[g][i];
        out->top[g] = top;
        out->total[g] = total;
    }
    n = 0;
    for (int64_t entry = begin; entry < end; entry++) {
        Seen s = seen(a, row, entry);
        for (int64_t slot = s.first; slot < s.last; slot++, n++) {
            ask(a, ahead);
            for (int d = 0; d < DIM; d++) {
                float v = widen(s.v[slot * DIM + d]);
                for (int g = 0; g < GROUP; g++) value[g][d] += p[g][n] * v;
            }
            if (shares)
                for (int g = 0; g < GROUP; g++) shares[(entry - begin) * GROUP + g] += p[g][n];
        }
    }
    memcpy(out->value, value, sizeof value);
}

// A thread's pieces: those from `piece` to `stop` - 1.
static void attend_pieces(const Args *a, const Row *row, int64_t rows, int64_t piece, int64_t stop, Partial *parts,
                          float *shares) {
    int64_t r = 0, after = rows; // the row that holds the first piece, by bisection
    while (after - r > 1) {
        int64_t middle = (r + after) / 2;
        if (row[middle].piece <= piece) r = middle;
        else after = middle;
    }
    Ahead ahead = {.row = row + r, .piece = piece, .stop = stop, .slot = a->pool, .step = DIM};
    find_run(a, &ahead);
    for (int i = 0; i < DISTANCE; i++) ask(a, &ahead);
    for (; piece < stop; piece++) {
        while (piece >= row[r + 1].piece) r++;
        const query *q = a->q + r / a->kv_heads * a->q_row + r % a->kv_heads * GROUP * a->q_head;
        int64_t begin = first_entry(&row[r], piece);
        attend(a, &row[r], q, begin, last_entry(&row[r], piece), &parts[piece],
               shares ? shares + (row[r].share + begin - row[r].begin) * GROUP : NULL, &ahead);
    }
}

// Combine the pieces of a row: every sum is brought to the row's maximum, the sink's logit joins the denominator.
static void combine(const Args *a, int64_t r, const Row *row, int64_t pieces, const Partial *parts,
                    const float *shares) {
    for (int g = 0; g < GROUP; g++) {
        float out[DIM] = {0};
        float sink = a->sinks ? a->sinks[r % a->kv_heads * GROUP + g] : -INFINITY, top = sink;
        for (int64_t i = 0; i < pieces; i++) top = MAX(top, parts[i].top[g]);
        float base = top > -INFINITY ? top : 0, total = expf(sink - base);
        for (int64_t i = 0; i < pieces; i++) {
            float weight = expf(parts[i].top[g] - base);
            total += weight * parts[i].total[g];
            for (int d = 0; d < DIM; d++) out[d] += weight * parts[i].value[g][d];
        }
        if (total != 0) { // so too where it is NaN, whatever the maximum of NaN came to
            for (int d = 0; d < DIM; d++) out[d] /= total;
            if (a->mass)
                for (int64_t entry = row->begin; entry < row->end; entry++) {
                    int64_t i = (entry - row->begin) / row->per_piece;
                    a->mass[r * a->entries + entry] +=
                        expf(parts[i].top[g] - base) / total * shares[(entry - row->begin) * GROUP + g] / GROUP;
                }
        }
        for (int d = 0; d < DIM; d++) a->out[(r * GROUP + g) * DIM + d] = narrow_query(out[d]);
        if (a->lse) a->lse[r * GROUP + g] = base + logf(total);
    }
}

// Write K and V of one token a sequence; a slot past the pool is told before anything is written.
static int append(const Args *a) {
    int64_t run = a->unit_tokens * DIM, heads = a->kv_heads;
    for (int64_t b = 0; b < a->batch; b++)
        if ((uint64_t)a->slots[b] >= (uint64_t)(a->units * a->unit_tokens)) return -2;
    for (int64_t b = 0; b < a->batch; b++) {
        int64_t unit = a->slots[b] / a->unit_tokens, offset = a->slots[b] % a->unit_tokens;
        element *to = a->pool + (unit * a->layers + a->layer) * 2 * heads * run + offset * DIM;
        for (int64_t h = 0; h < heads; h++) {
            memcpy(to + h * run, a->k + b * a->k_row + h * a->k_head, DIM * sizeof *to);
            memcpy(to + (heads + h) * run, a->v + b * a->v_row + h * a->v_head, DIM * sizeof *to);
        }
    }
    return 0;
}

// 0; -1 where there is no memory for the partial sums; -2 where a length reaches past its table, or an entry or a
// slot past the pool.
int decode(const Args *a) {
    if (a->k && append(a)) return -2;
    int64_t rows = a->batch * a->kv_heads, pieces = 0, entries = 0;
    Row *row = malloc((rows + 1) * sizeof *row);
    if (!row) return -1;
    for (int64_t r = 0; r < rows; r++) {
        int64_t b = r / a->kv_heads, h = r % a->kv_heads, unit = a->unit_tokens;
        Row x = {.table = a->table + b * a->table_row + h * a->table_head, .q_pos = a->q_pos[b]};
        x.unit_pos = a->unit_pos ? a->unit_pos + b * a->unit_pos_row + h * a->unit_pos_head : NULL;
        x.length = a->lengths[b * a->lengths_row + h * a->lengths_head];
        x.pool = a->pool + (a->layer * 2 * a->kv_heads + h) * unit * DIM;
        int outside = x.length < 0 || x.length > a->entries * unit;
        x.end = (x.length + unit - 1) / unit;
        if (!x.unit_pos) { // stored order is logical order
            x.end = x.q_pos < 0 ? 0 : MIN(x.end, x.q_pos / unit + 1);
            x.begin = a->window ? MIN(x.end, MAX(0, x.q_pos - a->window + 1) / unit) : 0;
        }
        for (int64_t entry = x.begin; !outside && entry < x.end; entry++)
            outside = (x.table[entry] & VALID_MASK) && (uint64_t)(x.table[entry] >> ID_SHIFT) >= (uint64_t)a->units;
        if (outside) {
            free(row);
            return -2;
        }
        int64_t most = PIECE / unit, count = (x.end - x.begin + most - 1) / most;
        x.per_piece = count ? (x.end - x.begin + count - 1) / count : 0;
        x.piece = pieces;
        x.share = entries;
        pieces += count;
        entries += x.end - x.begin;
        row[r] = x;
    }
    row[rows].piece = pieces;
    Partial *parts = malloc(MAX(1, pieces) * sizeof *parts);
    float *shares = a->mass ? calloc(MAX(1, entries) * GROUP, sizeof *shares) : NULL;
    int failed = !parts || (a->mass && !shares);
    if (!failed) {
#pragma omp parallel
        {
            int64_t threads = omp_get_num_threads(), thread = omp_get_thread_num();
            attend_pieces(a, row, rows, pieces * thread / threads, pieces * (thread + 1) / threads, parts, shares);
#pragma omp barrier
#pragma omp for schedule(static)
            for (int64_t r = 0; r < rows; r++) {
                int64_t p = row[r].piece;
                combine(a, r, &row[r], row[r + 1].piece - p, parts + p, shares ? shares + row[r].share * GROUP : NULL);
            }
        }
    }
    free(shares);
    free(parts);
    free(row);
    return failed ? -1 : 0;
}
