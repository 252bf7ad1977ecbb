// y = x W^T + b in bf16 with fp32 sums, for any number of rows of x; and what a layer does around it: a residual added,
// three products of one x, or one that is let through a gate.

#include <math.h>
#include <stdint.h>

#include "columns.h"
#include "exponential.h"
#include "torch_abi.h"

#define CHUNK 240    // rows whose x stays in the second-level cache while blocks pass by
#define MAX_DIM 8

// y = y / (1 + e^-y) * up, with up [rows, WIDE].
static void gate(element *y, const element *up, int64_t rows, int64_t outputs, int64_t columns) {
    __mmask32 kept = mask(columns);
    for (int64_t r = 0; r < rows; r++, y += outputs, up += WIDE) {
        float g[WIDE];
        _mm512_storeu_ps(g, load(y, (__mmask16)kept));
        _mm512_storeu_ps(g + 16, load(y + 16, (__mmask16)(kept >> 16)));
        for (int c = 0; c < WIDE; c++) {
            float power = exponential(-fabsf(g[c]));
            g[c] *= (g[c] < 0 ? power : 1.f) / (1.f + power);
        }
        store(y, _mm512_loadu_ps(g) * load(up, ~0), _mm512_loadu_ps(g + 16) * load(up + 16, ~0), kept);
    }
}

// All products of x [rows, 2 * pairs]; or, `gated`, two of them, of which the first takes in what the second gives.
static void products(const element *x, const Product *all, int number, int gated, int64_t rows, int64_t pairs) {
    int64_t count = 0, chunks = (rows + CHUNK - 1) / CHUNK;
    for (int i = 0; i < (gated ? 1 : number); i++) count += count_blocks(&all[i]);
#pragma omp parallel for schedule(static)
    for (int64_t i = 0; i < count * chunks; i++) {
        int64_t block = i % count, chunk = i / count;
        int64_t row = rows * chunk / chunks, last = rows * (chunk + 1) / chunks;
        const Product *product = all;
        for (; block >= count_blocks(product); product++) block -= count_blocks(product);
        int turns = !gated && block + 1 == count_blocks(product) && product + 1 < all + number;
        const uint32_t *next = turns ? product[1].blocks : find_block(product, block + 1, pairs);
        if (!gated) {
            multiply(x, product, block, row, last, pairs, next);
            continue;
        }
        element up[CHUNK * WIDE];
        Product beside = {find_block(&all[1], block, pairs), up, NULL, WIDE};
        multiply(x, product, block, row, last, pairs, beside.blocks);
        multiply(x + row * 2 * pairs, &beside, 0, 0, last - row, pairs, next);
        gate(product->y + row * product->outputs + block * WIDE, up, last - row, product->outputs,
             product->outputs - block * WIDE);
    }
}

// The address and the rows of x [..., 2 * pairs], which must fit a weight.
static const element *rows_of(Tensor x, Tensor blocks, int64_t *rows, int64_t *pairs) {
    int64_t dim, *shape, *of_blocks;
    void *address;
    bool contiguous;
    aoti_torch_get_dim(x, &dim);
    aoti_torch_get_sizes(x, &shape);
    aoti_torch_get_sizes(blocks, &of_blocks);
    aoti_torch_is_contiguous(x, &contiguous);
    aoti_torch_get_data_ptr(x, &address);
    *pairs = of_blocks[1] - 1;
    CHECK(dim >= 1 && dim <= MAX_DIM && contiguous && shape[dim - 1] == 2 * *pairs, "x is not [..., inputs], contiguous");
    *rows = 1;
    for (int64_t i = 0; i < dim - 1; i++) *rows *= shape[i];
    return address;
}

static void check_blocks(Tensor blocks, int64_t outputs) {
    int64_t *shape;
    aoti_torch_get_sizes(blocks, &shape);
    CHECK(shape[0] == (outputs + WIDE - 1) / WIDE, "a weight has not as many blocks as its outputs take");
}

// A product by a weight of so many outputs, whose result is made like x.
static Product prepare(Tensor x, Tensor blocks, int64_t outputs, Tensor *y) {
    int64_t dim, *shape, sizes[MAX_DIM], strides[MAX_DIM];
    Product product = {.outputs = outputs};
    check_blocks(blocks, outputs);
    aoti_torch_get_dim(x, &dim);
    aoti_torch_get_sizes(x, &shape);
    for (int64_t i = dim - 1, stride = 1; i >= 0; i--) {
        sizes[i] = i == dim - 1 ? outputs : shape[i];
        strides[i] = stride;
        stride *= sizes[i];
    }
    int32_t failed = aoti_torch_empty_strided(dim, sizes, strides, aoti_torch_dtype_bfloat16(),
                                              aoti_torch_device_type_cpu(), 0, y);
    CHECK(!failed, "no memory for the product");
    aoti_torch_get_data_ptr(blocks, (void **)&product.blocks);
    aoti_torch_get_data_ptr(*y, (void **)&product.y);
    return product;
}

static void let_go(Value tensor) { aoti_torch_delete_tensor_object((Tensor)tensor); }

// The ops of blocks.py: x [..., 2 * pairs], weights in blocks, int32.

// linear_blocks(Tensor x, Tensor blocks, int outputs) -> Tensor
static void linear_blocks(Value *stack, uint64_t arguments, uint64_t results) {
    Tensor x = (Tensor)stack[0], blocks = (Tensor)stack[1], y;
    int64_t rows, pairs;
    const element *from = rows_of(x, blocks, &rows, &pairs);
    Product product = prepare(x, blocks, (int64_t)stack[2], &y);
    products(from, &product, 1, 0, rows, pairs);
    let_go(stack[0]);
    let_go(stack[1]);
    stack[0] = (Value)y;
}

// linear_blocks_added(Tensor x, Tensor blocks, int outputs, Tensor added) -> Tensor
static void linear_blocks_added(Value *stack, uint64_t arguments, uint64_t results) {
    Tensor x = (Tensor)stack[0], blocks = (Tensor)stack[1], added = (Tensor)stack[3], y;
    int64_t rows, pairs, dim, dim_added, *shape, *shape_added;
    bool contiguous;
    const element *from = rows_of(x, blocks, &rows, &pairs);
    aoti_torch_get_dim(x, &dim);
    aoti_torch_get_dim(added, &dim_added);
    aoti_torch_get_sizes(x, &shape);
    aoti_torch_get_sizes(added, &shape_added);
    aoti_torch_is_contiguous(added, &contiguous);
    int fits = contiguous && dim == dim_added && shape_added[dim - 1] == (int64_t)stack[2];
    for (int64_t i = 0; fits && i < dim - 1; i++) fits = shape[i] == shape_added[i];
    CHECK(fits, "what is added is not [..., outputs], contiguous");
    Product product = prepare(x, blocks, (int64_t)stack[2], &y);
    aoti_torch_get_data_ptr(added, (void **)&product.added);
    products(from, &product, 1, 0, rows, pairs);
    let_go(stack[0]);
    let_go(stack[1]);
    let_go(stack[3]);
    stack[0] = (Value)y;
}

// linear_blocks_gated(Tensor x, Tensor gate, Tensor up, int outputs) -> Tensor
static void linear_blocks_gated(Value *stack, uint64_t arguments, uint64_t results) {
    Tensor x = (Tensor)stack[0], blocks = (Tensor)stack[1], y;
    int64_t rows, pairs, pairs_up;
    const element *from = rows_of(x, (Tensor)stack[2], &rows, &pairs_up);
    from = rows_of(x, blocks, &rows, &pairs);
    Product both[2] = {prepare(x, blocks, (int64_t)stack[3], &y)};
    check_blocks((Tensor)stack[2], (int64_t)stack[3]);
    both[1] = both[0];
    aoti_torch_get_data_ptr((Tensor)stack[2], (void **)&both[1].blocks);
    products(from, both, 2, 1, rows, pairs);
    for (int i = 0; i < 3; i++) let_go(stack[i]);
    stack[0] = (Value)y;
}

// linear_blocks_3(Tensor x, Tensor a, int a_outputs, Tensor b, int b_outputs, Tensor c, int c_outputs)
//   -> (Tensor, Tensor, Tensor)
static void linear_blocks_3(Value *stack, uint64_t arguments, uint64_t results) {
    Tensor x = (Tensor)stack[0], y[3];
    Product all[3];
    int64_t rows, pairs;
    const element *from = NULL;
    for (int i = 0; i < 3; i++) from = rows_of(x, (Tensor)stack[1 + 2 * i], &rows, &pairs);
    for (int i = 0; i < 3; i++) all[i] = prepare(x, (Tensor)stack[1 + 2 * i], (int64_t)stack[2 + 2 * i], &y[i]);
    products(from, all, 3, 0, rows, pairs);
    let_go(stack[0]);
    for (int i = 0; i < 3; i++) let_go(stack[1 + 2 * i]);
    for (int i = 0; i < 3; i++) stack[i] = (Value)y[i];
}

// Make torch call the above; what Python has defined is implemented here. 0, or what torch said.
int register_ops(void) {
    static Library library; // for good: torch forgets what is registered when a library is deleted
    int32_t failed = aoti_torch_library_init_impl("octavo", "CPU", __FILE__, __LINE__, &library);
    if (!failed) failed = aoti_torch_library_impl(library, "linear_blocks", linear_blocks);
    if (!failed) failed = aoti_torch_library_impl(library, "linear_blocks_added", linear_blocks_added);
    if (!failed) failed = aoti_torch_library_impl(library, "linear_blocks_gated", linear_blocks_gated);
    return failed ? failed : aoti_torch_library_impl(library, "linear_blocks_3", linear_blocks_3);
}
