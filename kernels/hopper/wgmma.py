"""The tensor cores' instruction for products: every number of columns needs a text of its own."""

from __future__ import annotations


def multiplication(columns: int, bf16: bool) -> str:
    """``multiply(sums, a, b, more)``: ``sums [64, columns] (more? += : =) a [64, 16] @ b [columns, 16].T`` of matrices
    in shared memory (PTX ISA, "wgmma.mma_async"); sums in fp32, half of ``columns`` a thread."""
    kind = "bf16" if bf16 else "f16"
    sums = ", ".join(f"%{i}" for i in range(columns // 2))
    bound = ", ".join(f'"+f"(sums[{i}])' for i in range(columns // 2))
    a, b, more = (f"%{columns // 2 + i}" for i in range(3))
    instruction = (
        f"wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{kind}.{kind} {{{sums}}}, {a}, {b}, add, 1, 1, 0, 0;"
    )
    return (
        f"INLINE void multiply(float (&sums)[{columns // 2}], u64 a, u64 b, int more) {{\n"
        f'  asm volatile("{{\\n .reg .pred add;\\n setp.ne.b32 add, {more}, 0;\\n {instruction}\\n}}"\n'
        f'    : {bound} : "l"(a), "l"(b), "r"(more));\n}}\n'
    )
