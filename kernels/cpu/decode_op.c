// Attention of compiled layers, called from their C++ code: without Python where a step is told (decode_op.py), which it
// is once for all layers, and through octavo::attend_layer elsewhere.

#include <string.h>

#include "torch_abi.h"

typedef void element, query;

#include "decode_args.h"

#define DIMS 3 // of q, k and v

// The fields of Told in decode_op.py, in the same order.
typedef struct {
    Args *args;                     // what layers have in common; the rest is filled in
    int (*decode)(const Args *);    // decode.c, for queries of the pool's type
    const int32_t *tables;          // [slices, ...], `table_slice` elements each
    const int64_t *slots;           // [slices, ...], `slots_slice` elements each
    const int64_t *unit_layers, *slices; // [layers]: where a layer keeps its KV
    int64_t *windows;               // [layers]: of those that were served, written here
    int64_t table_slice, slots_slice, count, q_heads, dim;
    int64_t type;                   // of the pool: TYPE in decode.c
} Told;

static Told *told;
static int64_t layer;

// A forward pass begins; its step is plain and told, or NULL.
void begin(Told *step) {
    told = step;
    layer = 0;
}

static int32_t dtype_of_pool(void) {
    if (told->type == 0) return aoti_torch_dtype_float32();
    return told->type == 1 ? aoti_torch_dtype_float16() : aoti_torch_dtype_bfloat16();
}

// [batch, heads, dim] of the pool's type, the last axis side by side.
static bool fits(Tensor x, int64_t heads, void **address, int64_t *row, int64_t *head) {
    int64_t dim, *sizes, *strides;
    int32_t dtype;
    aoti_torch_get_dim(x, &dim);
    aoti_torch_get_sizes(x, &sizes);
    aoti_torch_get_strides(x, &strides);
    aoti_torch_get_dtype(x, &dtype);
    aoti_torch_get_data_ptr(x, address);
    if (dim != DIMS || dtype != dtype_of_pool() || strides[2] != 1) return false;
    if (sizes[0] != told->args->batch || sizes[1] != heads || sizes[2] != told->dim) return false;
    *row = strides[0];
    *head = strides[1];
    return true;
}

// The result for the layer `number`; NULL where it is for Python to compute, or to say what is wrong.
static Tensor served(Value *stack, int64_t number) {
    Args *a = told->args;
    Tensor q = (Tensor)stack[0], k = (Tensor)stack[1], v = (Tensor)stack[2], out;
    if (number >= told->count || stack[3] || !fits(q, told->q_heads, (void **)&a->q, &a->q_row, &a->q_head)) return NULL;
    if (!fits(k, a->kv_heads, (void **)&a->k, &a->k_row, &a->k_head)) return NULL;
    if (!fits(v, a->kv_heads, (void **)&a->v, &a->v_row, &a->v_head)) return NULL;
    int64_t sizes[DIMS] = {a->batch, told->q_heads, told->dim}, strides[DIMS] = {sizes[1] * sizes[2], sizes[2], 1};
    if (aoti_torch_empty_strided(DIMS, sizes, strides, dtype_of_pool(), aoti_torch_device_type_cpu(), 0, &out))
        return NULL;
    aoti_torch_get_data_ptr(out, (void **)&a->out);
    a->table = told->tables + told->slices[number] * told->table_slice;
    a->slots = told->slots + told->slices[number] * told->slots_slice;
    a->layer = told->unit_layers[number];
    a->sinks = NULL;
    memcpy(&a->scale, &stack[4], sizeof a->scale);
    a->window = (int64_t)stack[5];
    memcpy(&a->softcap, &stack[6], sizeof a->softcap);
    if (told->decode(a)) {
        aoti_torch_delete_tensor_object(out);
        return NULL;
    }
    told->windows[number] = a->window;
    for (int i = 0; i < 3; i++) aoti_torch_delete_tensor_object((Tensor)stack[i]);
    return out;
}

// octavo::attend_in_step(Tensor q, Tensor k, Tensor v, Tensor? sinks, float scale, int window, float softcap) -> Tensor
static void attend_in_step(Value *stack, uint64_t arguments, uint64_t results) {
    int64_t number = layer++;
    Tensor out = told ? served(stack, number) : NULL;
    if (out) {
        stack[0] = (Value)out;
        return;
    }
    Value call[8] = {(Value)number};
    memcpy(call + 1, stack, 7 * sizeof *call);
    CHECK(!aoti_torch_call_dispatcher("octavo::attend_layer", "", call), "the attention of a layer has failed");
    stack[0] = call[0];
}

// Make torch call the above. 0, or what torch said.
int register_ops(void) {
    static Library library; // for good: torch forgets what is registered when a library is deleted
    int32_t failed = aoti_torch_library_init_impl("octavo", "CPU", __FILE__, __LINE__, &library);
    return failed ? failed : aoti_torch_library_impl(library, "attend_in_step", attend_in_step);
}
