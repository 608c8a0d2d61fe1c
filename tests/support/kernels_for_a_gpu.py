"""Compiles the kernels of a fused step for an H200, which takes no GPU, and prints their readings of four at a time."""

import re

POINTERS = {"blocks": "*i32", "sizes": "*i64", "rows": "*i64", "ahead": "*i64", "n": "i32"}
POINTERS |= {"before": "*i64", "stride": "i32", "seed": "i32"}
POINTERS |= dict.fromkeys(("sums", "reached", "limit", "shrink", "lr"), "*fp32") | {"healthy": "*i8"}
FIXED = {"FIRST": True, "DAMPED": True, "BLOCK": 2048, "AGAIN": False, "KEPT": True, "MOMENTUM": True, "NESTEROV": True}
FIXED |= {"WHOLE": True, "CLIPPED": True, "GUARDED": True, "LIMITED": True, "AWAY": True, "BACK": False}


def compiled(kernel, **kind):
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    wanted = FIXED | kind | {"RATE": not kind["ADAM"]}
    fixed = {name: value for name, value in wanted.items() if name in kernel.arg_names}
    types = POINTERS | ({"lr": "fp32"} if fixed.get("RATE") else {})
    signature = {
        name: "constexpr" if name in fixed else types.get(name, "fp32")  # numbers
        for name in kernel.arg_names
    }
    places = {(kernel.arg_names.index(name),): value for name, value in fixed.items()}
    source = ASTSource(fn=kernel, signature=signature, constexprs=places)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]


if __name__ == "__main__":
    from gtracer.optim import triton_kernels

    for name in ("reach", "displace", "total", "finish"):
        kernel = getattr(triton_kernels, f"{name}_kernel")
        for adam, aligned in ((True, True), (False, True), (True, False)):
            code = compiled(kernel, ADAM=adam, ALIGNED=aligned, NARROW=False, LOW=False)
            print(name, "adam" if adam else "sgd", aligned, len(re.findall(r"ld\.global\.v4", code)))
        for low in (False, True):
            code = compiled(kernel, ADAM=True, ALIGNED=True, NARROW=True, LOW=low)
            print(name, "low" if low else "masters", len(re.findall(r"ld\.global\.v4", code)))
