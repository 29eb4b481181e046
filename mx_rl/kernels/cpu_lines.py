"""Lines of cache in compiled code: copied past the cache, and compared on the way.

A slot is larger than any cache and is read next by someone else: ordinary stores would first read what they overwrite, as
much traffic again as the copy itself.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

LINE = 64

_VECTOR = ir.VectorType(ir.IntType(64), LINE // 8)


def _vector(builder: Any, address: Any) -> Any:
    return builder.load(builder.inttoptr(address, _VECTOR.as_pointer()), align=1)


def _stream(builder: Any, vector: Any, address: Any) -> None:
    store = builder.store(vector, builder.inttoptr(address, _VECTOR.as_pointer()), align=LINE)
    store.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)]))


def _make_copy_line(_: Any, target: Any, source: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        _stream(builder, _vector(builder, args[1]), args[0])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


def _differs(builder: Any, one: Any, other: Any) -> Any:
    word = ir.IntType(64)
    kind = ir.FunctionType(word, [_VECTOR])
    insert: Any = cgutils.get_or_insert_function
    reduce = insert(builder.module, kind, "llvm.vector.reduce.or.v8i64")
    return builder.icmp_unsigned("!=", builder.call(reduce, [builder.xor(one, other)]), ir.Constant(word, 0))


def _make_line_differs(_: Any, one: Any, other: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return _differs(builder, _vector(builder, args[0]), _vector(builder, args[1]))

    return types.boolean(types.int64, types.int64), codegen


def _make_copy_line_differs(_: Any, target: Any, source: Any, other: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        vector = _vector(builder, args[1])
        _stream(builder, vector, args[0])
        return _differs(builder, vector, _vector(builder, args[2]))

    return types.boolean(types.int64, types.int64, types.int64), codegen


def _make_settle(_: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), codegen


copy_line: Any = intrinsic(_make_copy_line)
"""(target, source): one line; the target begins at a multiple of LINE."""

copy_line_differs: Any = intrinsic(_make_copy_line_differs)
"""(target, source, other): the same, and whether the source differs from the other."""

line_differs: Any = intrinsic(_make_line_differs)
"""(one, other): without the copy."""

settle: Any = intrinsic(_make_settle)
"""What was copied past the cache is seen before any later store, such as that of a header."""
