"""The structures and functions of `cpu/infer_cpu.h` for ctypes; what they mean is written there."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_char_p, c_float, c_int32, c_int64, c_uint64, c_void_p
from pathlib import Path
from typing import Any

from infer.quant.kernels.build import LIBRARY

ABI = 6
STRIP = 16
BLOCK = 32
SUPER = 256
SCALE_F16, SCALE_F32, SCALE_SUPER = range(3)
ELEM_CODES, ELEM_F32, ELEM_F16, ELEM_BF16, ELEM_TABLE = range(5)
KV_F16, KV_BF16, KV_F32, KV_INT8 = range(4)
OP_EMBED, OP_NORM, OP_QUANTIZE, OP_MATMUL, OP_ROPE_STORE, OP_ATTENTION = range(1, 7)
OP_GLU, OP_ADD, OP_GATHER, OP_ROUTE, OP_EXPERTS, OP_HEADS = range(7, 13)
ACT_SILU, ACT_GELU_TANH, ACT_SWIGLU_OAI = range(3)
GATE_SOFTMAX, GATE_SIGMOID, GATE_CHOSEN_SOFTMAX = range(3)


def _fields(*runs: tuple[Any, str]) -> list[tuple[str, Any]]:
    """(type, names separated by blanks) in the order of the C struct."""
    return [(name, kind) for kind, names in runs for name in names.split()]


class Weight(Structure):
    _fields_ = _fields(
        (c_int32, "n k elem bits group zero scale signed_scales"),
        (c_void_p, "codes high scales mins super_scales super_mins table"),
    )


class Acts(Structure):
    _fields_ = _fields((c_int32, "capacity k"), (c_void_p, "codes scales sums"))


class Kv(Structure):
    _fields_ = _fields(
        (c_void_p, "k v k_scale v_scale"), (c_int32, "type kv_heads head_dim value_dim blocks"), (c_int64, "stride"),
    )  # fmt: skip


class Batch(Structure):
    _fields_ = _fields(
        (c_int32, "tokens sequences max_blocks outputs"),
        (c_void_p, "ids positions slots query_start context_len block_tables output_rows"),
    )


class Stored(Structure):
    _fields_ = _fields(
        (c_char_p, "type"),
        (POINTER(Weight), "w"),
        (c_void_p, "grid"),
        (c_int64, "offset row_bytes"),
        (c_int32, "file failed"),
    )


class Packing(Structure):
    _fields_ = _fields((POINTER(Stored), "matrices"), (c_int32, "count stop"), (c_int64, "next done"))


class Head(Structure):
    _fields_ = _fields((c_int32, "kind bytes rows reserved"))


class EmbedOp(Structure):
    KIND = OP_EMBED
    _fields_ = _fields((Head, "head"), (POINTER(Weight), "table"), (c_void_p, "out"), (c_float, "scale"))


class NormOp(Structure):
    KIND = OP_NORM
    _fields_ = _fields(
        (Head, "head"), (c_void_p, "x weight out"), (POINTER(Acts), "acts"), (c_float, "eps"), (c_int32, "width")
    )  # fmt: skip


class QuantizeOp(Structure):
    KIND = OP_QUANTIZE
    _fields_ = _fields((Head, "head"), (c_void_p, "x"), (POINTER(Acts), "acts"), (c_int32, "width"))


class MatmulOp(Structure):
    KIND = OP_MATMUL
    _fields_ = _fields(
        (Head, "head"), (POINTER(Acts), "acts"), (c_void_p, "x"), (POINTER(Weight) * 4, "w"),
        (c_void_p * 4, "bias out"), (c_int32, "count accumulate"), (c_float, "softcap"),
    )  # fmt: skip


class RopeStoreOp(Structure):
    KIND = OP_ROPE_STORE
    _fields_ = _fields(
        (Head, "head"), (c_void_p, "q k v q_norm k_norm cos sin"), (POINTER(Kv), "kv"), (c_float, "eps"),
        (c_int32, "heads norm_dim rope_at rope_dim pairing"),
    )  # fmt: skip


class AttentionOp(Structure):
    KIND = OP_ATTENTION
    _fields_ = _fields(
        (Head, "head"), (c_void_p, "q sinks out"), (POINTER(Acts), "acts"), (POINTER(Kv), "kv"),
        (c_float, "scale softcap"), (c_int32, "heads window"),
    )  # fmt: skip


class GluOp(Structure):
    KIND = OP_GLU
    _fields_ = _fields(
        (Head, "head"), (c_void_p, "gate up out"), (POINTER(Acts), "acts"), (c_int32, "width act")
    )


class AddOp(Structure):
    KIND = OP_ADD
    _fields_ = _fields((Head, "head"), (c_void_p, "x y"), (c_int32, "width"))


class GatherOp(Structure):
    KIND = OP_GATHER
    _fields_ = _fields((Head, "head"), (c_void_p, "x out"), (c_int32, "width"))


class Choice(Structure):
    _fields_ = _fields((c_int32, "expert"), (c_float, "weight"))


class RouteOp(Structure):
    KIND = OP_ROUTE
    _fields_ = _fields(
        (Head, "head"), (c_void_p, "logits bias out"), (c_int32, "experts used groups groups_used gate normalize"),
        (c_float, "scale"),
    )  # fmt: skip


class ExpertsOp(Structure):
    KIND = OP_EXPERTS
    _fields_ = _fields(
        (Head, "head"), (c_void_p, "choices"), (POINTER(Acts), "acts"), (c_void_p, "x"),
        (POINTER(Weight), "gate up down"), (c_void_p, "gate_bias up_bias down_bias out"), (c_int32, "experts used act"),
    )  # fmt: skip


class HeadsOp(Structure):
    KIND = OP_HEADS
    _fields_ = _fields(
        (Head, "head"), (c_void_p, "x"), (POINTER(Weight), "w"), (c_void_p, "out"), (c_int32, "heads width")
    )


Op = (
    EmbedOp | NormOp | QuantizeOp | MatmulOp | RopeStoreOp | AttentionOp | GluOp | AddOp | GatherOp | RouteOp
    | ExpertsOp | HeadsOp
)  # fmt: skip

#: struct name in C → its mirror
MIRRORS: dict[str, type[Structure]] = {
    "infer_weight": Weight, "infer_acts": Acts, "infer_kv": Kv, "infer_batch": Batch,
    "infer_stored": Stored, "infer_packing": Packing, "op_embed": EmbedOp, "op_norm": NormOp,
    "op_quantize": QuantizeOp, "op_matmul": MatmulOp, "op_rope_store": RopeStoreOp, "op_attention": AttentionOp,
    "op_glu": GluOp, "op_add": AddOp, "op_gather": GatherOp, "op_route": RouteOp, "op_experts": ExpertsOp,
    "op_heads": HeadsOp,
}  # fmt: skip


def program(*ops: Op, output_rows: bool = False) -> bytes:
    """The bytes that infer_run takes; fills in each head. output_rows: the operations work on batch.outputs rows.

    Buffers and structures that the operations point to must outlive every run."""
    for op in ops:
        op.head = Head(op.KIND, ctypes.sizeof(op), int(output_rows), 0)
    return b"".join(bytes(op) for op in ops)


def library_path() -> Path:
    return Path(__file__).resolve().with_name(LIBRARY)


def open_library(path: Path) -> ctypes.CDLL:
    """The library with its functions' signatures. Raises OSError when it cannot be loaded or is another version."""
    library = ctypes.CDLL(str(path))
    signatures: dict[str, tuple[Any, list[Any]]] = {
        "infer_abi": (c_int32, []),
        "infer_isa": (c_char_p, []),
        "infer_set_isa": (c_int32, [c_char_p]),
        "infer_sizeof": (c_int64, [c_char_p]),
        "infer_pool_new": (c_void_p, [c_int32]),
        "infer_pool_free": (None, [c_void_p]),
        "infer_pack": (c_int32, [c_void_p, c_char_p, c_void_p, POINTER(Weight), c_int32, c_int32, c_void_p]),
        "infer_pack_codes": (c_int32, [c_void_p] * 6 + [POINTER(Weight), c_int32, c_int32]),
        "infer_pack_files": (None, [POINTER(Packing)]),
        "infer_read": (c_uint64, [c_void_p, c_void_p, c_int64]),
        "infer_row_sums": (None, [c_void_p, c_int64, c_int64, c_void_p, c_void_p, c_void_p]),
        "infer_run": (c_int32, [c_void_p, c_char_p, c_int64, POINTER(Batch)]),
    }
    try:
        for name, (result, arguments) in signatures.items():
            function = getattr(library, name)
            function.restype = result
            function.argtypes = arguments
        found = library.infer_abi()
    except AttributeError as e:
        raise OSError(f"{path} is not the library of this version: {e}") from e
    sizes = {name: library.infer_sizeof(name.encode()) for name in MIRRORS}
    if found != ABI or any(sizes[name] != ctypes.sizeof(mirror) for name, mirror in MIRRORS.items()):
        raise OSError(
            f"{path} was built from other sources; rebuild it (python -m infer.quant.kernels.build)"
        )
    return library
