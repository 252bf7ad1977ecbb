// The part of torch's stable C interface (torch/csrc/inductor/aoti_torch/c/shim.h) that ops registered from C need, as
// its header is C++.

#include <stdbool.h>
#include <stdint.h>

typedef struct AtenTensorOpaque *Tensor;
typedef struct TorchLibraryOpaque *Library;
typedef uint64_t Value; // an argument or result of an op: a Tensor that the receiver owns (Tensor?: 0 is none), an int64_t,
                        // the bits of a double

int32_t aoti_torch_library_init_impl(const char *ns, const char *key, const char *file, uint32_t line, Library *made);
int32_t aoti_torch_library_impl(Library library, const char *op, void (*kernel)(Value *, uint64_t, uint64_t));
int32_t aoti_torch_get_data_ptr(Tensor tensor, void **address);
int32_t aoti_torch_get_dim(Tensor tensor, int64_t *dim);
int32_t aoti_torch_get_sizes(Tensor tensor, int64_t **sizes);
int32_t aoti_torch_get_strides(Tensor tensor, int64_t **strides);
int32_t aoti_torch_get_dtype(Tensor tensor, int32_t *dtype);
int32_t aoti_torch_is_contiguous(Tensor tensor, bool *contiguous);
int32_t aoti_torch_delete_tensor_object(Tensor tensor);
int32_t aoti_torch_dtype_bfloat16(void);
int32_t aoti_torch_dtype_float16(void);
int32_t aoti_torch_dtype_float32(void);
int32_t aoti_torch_device_type_cpu(void);
int32_t aoti_torch_empty_strided(int64_t dim, const int64_t *sizes, const int64_t *strides, int32_t dtype,
                                 int32_t device_type, int32_t device, Tensor *made);
int32_t aoti_torch_call_dispatcher(const char *op, const char *overload, Value *stack);
void aoti_torch_check(bool holds, const char *function, const char *file, uint32_t line, const char *message);

#define CHECK(holds, message) aoti_torch_check(holds, __func__, __FILE__, __LINE__, message)
