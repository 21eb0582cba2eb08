"""Compile every Triton kernel for two architectures and print the SHA-256 of its PTX, as JSON; no device is needed.

    TRITON_DISABLE_LINE_INFO=1 python tests/cuda/compile_kernels.py MODULE...

Each kernel is compiled once, with the constants of one of its launches and pointers aligned to 16 bytes, down to the binary by
Triton's own ptxas. A launch may specialise it further, for sizes that are 1 or multiples of 16. Without line information the
PTX does not change when lines move.
"""

import hashlib
import importlib
import json
import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

ARCHITECTURES = (80, 90)

_MARGINAL = {"logits": "*fp32", "x": "*fp32", "base": "*fp32"}
_ADAM = dict.fromkeys(("parameter", "gradient", "mean", "square", "rate", "step"), "*fp32")
_RATES = {"beta1": "fp32", "beta2": "fp32", "eps": "fp32", "decay": "fp32"}
_SIZES = {"rows": "i32", "width": "i32"}

# by kernel: types of its arguments, its constants, options of its launch
KERNELS: dict[str, tuple[dict[str, str], dict[str, object], dict[str, int]]] = {
    "_marginal_forward": (_MARGINAL | {"out": "*fp32", "width": "i32"}, {"BLOCK": 1024}, {}),
    "_marginal_backward": (
        {"g": "*fp32"} | _MARGINAL | {"g_logits": "*fp32", "g_base": "*fp32"} | _SIZES,
        {"ROWS": 128, "COLS": 8},
        {"num_warps": 4},
    ),
    "_walk_made": (
        dict.fromkeys(("y", "e", "into", "bias", "out", "out_bias", "x"), "*fp32")
        | {"samples": "i32", "features": "i32", "hidden": "i32"},
        {"ROWS": 8, "HIDDEN": 1024},
        {"num_warps": 8},
    ),
    "_philox_launch": (
        {"out": "*fp32", "key": "*i64", "first": "i64", "stride": "i32", "count": "i32"}, {"BLOCK": 256}, {}
    ),
    "_binarise_once": ({"intensities": "*u8", "out": "*u8", "key": "*i64", "count": "i32"}, {"BLOCK": 256}, {}),
    "_column_sums": ({"values": "*fp32", "out": "*fp32"} | _SIZES, {"ROWS": 128, "COLS": 8}, {"num_warps": 4}),
    "_zero_beyond": ({"values": "*fp32", "seen": "*i32", "width": "i32"}, {"BLOCK": 1024}, {"num_warps": 4}),
    "_draw_rows": (
        {"intensities": "*u8", "rows": "*i64", "seed": "*i64", "counter": "*i64", "ahead": "i32", "out": "*fp32"}
        | {"width": "i32"},
        {"BLOCK": 256},
        {"num_warps": 4},
    ),
    "_adam": (_ADAM | {"size": "i32"} | _RATES, {"DECOUPLED": False, "BLOCK": 1024}, {"num_warps": 4}),
    "_adam_masked": (
        _ADAM | {"seen": "*i32", "width": "i32"} | _RATES, {"DECOUPLED": True, "BLOCK": 1024}, {"num_warps": 4}
    ),
}  # fmt: skip


def ptx_hash(kernel: triton.JITFunction, architecture: int) -> str:
    """The SHA-256 of a kernel's PTX; the binary is made too."""
    types, constants, options = KERNELS[kernel.__name__]
    signature = {
        name: "constexpr" if name in constants else types[name] for name in kernel.arg_names
    }  # every argument is named, in order
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(kernel.arg_names)
        if signature[name].startswith("*")
    }
    source = ASTSource(kernel, signature, constants, aligned)
    compiled = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
    assert compiled.asm["cubin"]
    return hashlib.sha256(compiled.asm["ptx"].encode()).hexdigest()


def kernels_of(*modules: str) -> list[triton.JITFunction]:
    """The kernels that are launched, not those that others call."""
    members = [member for module in modules for member in vars(importlib.import_module(module)).values()]
    return [m for m in members if isinstance(m, triton.JITFunction) and m.__name__ in KERNELS]


if __name__ == "__main__":
    hashes = {
        kernel.__name__: {f"sm_{a}": ptx_hash(kernel, a) for a in ARCHITECTURES}
        for kernel in kernels_of(*sys.argv[1:])
    }
    json.dump({"triton": triton.__version__, "ptx": hashes}, sys.stdout, indent=1)
