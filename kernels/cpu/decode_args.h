// What decode() is told. The fields of Args in native.py, in the same order; `element` and `query` are void to who does
// not look into them. Strides are in elements; no table has a layer axis here.
typedef struct {
    const query *q;          // [batch, kv_heads * GROUP, DIM], the last axis side by side
    const element *k, *v;    // [batch, kv_heads, DIM], the last axis side by side: written to the pool first; or NULL
    const int64_t *slots;    // [batch]: where they are written
    element *pool;           // [units, layers, 2, kv_heads, unit_tokens, DIM]
    const int32_t *table;    // [batch, 1 or kv_heads, entries]
    const int32_t *lengths;  // [batch, 1 or kv_heads]
    const int32_t *unit_pos; // as table, or NULL
    const int32_t *q_pos;    // [batch]
    const float *sinks;      // [kv_heads, GROUP] or NULL
    query *out;              // [batch, kv_heads, GROUP, DIM]
    float *lse;              // [batch, kv_heads, GROUP] or NULL
    float *mass;             // [batch, kv_heads, entries], zeros, or NULL
    int64_t batch, units, layers, layer, kv_heads, unit_tokens, entries, window;
    int64_t table_row, table_head, lengths_row, lengths_head, unit_pos_row, unit_pos_head;
    int64_t q_row, q_head, k_row, k_head, v_row, v_head;
    double scale, softcap;
} Args;
