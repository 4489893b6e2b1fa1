"""A product whose left operand stays in registers from one call to the next.

`plgpu.wgmma` fences a left operand in registers before each product, through which the compiler
copies it: what stays the same over a loop is then held twice, and spilled (0.3 KB a thread of 96
registers). Here the operand goes into the instructions as it is. Fragments and descriptors are as
the PTX ISA lays them down for `wgmma.mma_async`, m64nNk16 with bf16 operands.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from ttt_kernels import compat

_TILE = 64  # tokens, columns of the state and contracted channels of one tile
_DEPTH = 16  # channels contracted by one instruction
# Descriptor of a [64, 64] bf16 tile with the 128-byte swizzle, rows contiguous: the swizzle's code,
# 1,024 bytes between groups of eight rows, and a field that this swizzle does not read.
_DESCRIPTOR = (1 << 62) | ((1024 >> 4) << 32) | (1 << 16)


def resident_product(left: list, right):
    """`sum_i left_i right_i^T`, [64, 64] float32 in registers, when it has been computed.

    Args:
      left: arrays [64, 64] bf16 in registers (layout WGMMA), which may stay there for later calls.
      right: shared memory [len(left), 64, 64] bf16, tiled and swizzled by 128 bytes.
    """
    plgpu = compat.mosaic_gpu()
    transforms = (plgpu.TilingTransform((8, _TILE)), plgpu.SwizzleTransform(128))
    layout = plgpu.Layout.WGMMA
    call = plgpu.inline_mgpu(
        arg_types=([layout] * len(left), plgpu.RefType(transforms)),
        return_type=plgpu.ShapeDtypeStruct((_TILE, _TILE), jnp.float32, layout=layout),
    )(_emit)
    return call(list(left), right)


def _emit(_, left, right):
    """Emits the product's instructions; see `resident_product`."""
    from jax.experimental.mosaic import gpu as mgpu  # where a kernel is lowered, not before

    i32, i64, f32 = (*map(ir.IntegerType.get_signless, (32, 64)), ir.F32Type.get())
    sums = _assemble("wgmma.fence.sync.aligned;", [mgpu.c(0.0, f32)] * (_TILE // 2))
    start = llvm.ptrtoint(i64, mgpu.utils.memref_ptr(right))
    start = arith.andi(arith.shrui(start, mgpu.c(4, i64)), mgpu.c(0x3FFF, i64))
    start = arith.ori(start, mgpu.c(_DESCRIPTOR, i64))
    for i, columns in enumerate(left):
        fragments = [llvm.bitcast(i32, pair) for pair in columns.registers.flat]
        for k in range(_TILE // _DEPTH):
            offset = (i * _TILE * _TILE + k * _DEPTH) * 2 >> 4
            tokens = arith.addi(start, mgpu.c(offset, i64))
            sums = _multiply_add(sums, fragments[4 * k:4 * k + 4], tokens)
    end = "wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;"
    sums = _assemble(end, sums)
    pair = ir.VectorType.get((2,), f32)
    shape = mgpu.WGMMA_LAYOUT.registers_shape((_TILE, _TILE))
    registers = np.empty(shape, dtype=object)
    registers.flat = [vector.from_elements(pair, sums[i:i + 2]) for i in range(0, len(sums), 2)]
    return mgpu.FragmentedArray(
        _registers=registers, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None
    )


def _multiply_add(sums: list, left: list, right) -> list:
    """One instruction: a fragment of the left operand times a tile by its descriptor."""
    number = len(sums)
    names = ", ".join(f"${i}" for i in range(number))
    operands = ", ".join(f"${2 * number + i}" for i in range(len(left)))
    instruction = (
        f"wgmma.mma_async.sync.aligned.m64n{_TILE}k{_DEPTH}.f32.bf16.bf16 "
        f"{{{names}}}, {{{operands}}}, ${2 * number + len(left)}, 1, 1, 1, 0;"
    )
    return _assemble(instruction, sums, [*left, right], ["r"] * len(left) + ["l"])


def _assemble(instruction: str, sums: list, operands: list = (), kinds: list[str] = ()) -> list:
    """Inline assembly on the accumulators, in place: ahead of all that uses its results."""
    f32 = ir.F32Type.get()
    constraints = ["=f"] * len(sums) + [str(i) for i in range(len(sums))] + list(kinds)
    made = llvm.inline_asm(
        llvm.StructType.get_literal([f32] * len(sums)),
        [*sums, *operands],
        instruction,
        ",".join(constraints),
        has_side_effects=True,
    )
    return [llvm.extractvalue(f32, made, [i]) for i in range(len(sums))]
