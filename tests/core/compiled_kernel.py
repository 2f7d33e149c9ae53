"""Compiles the kernel for a card that need not be there: python -m tests.core.compiled_kernel 90

Prints shared memory, registers and what is spilled, and fails where the card has no room
for it, or Triton gave up on it and left a trap.
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import triton.backends.nvidia
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from hubplugin.compute import kernels

SHARED = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227}
"""KiB of shared memory that a program may have, by compute capability."""

TYPES = {
    **dict.fromkeys(("t_high", "t_low", "b_high", "b_low"), "*fp16"),
    **dict.fromkeys(("bias", "out"), "*fp32"),
    **dict.fromkeys(("n", "m"), "i32"),
    "scale": "fp32",
}


def compile_for(capability):
    kernel = kernels._log_sum_exp
    constants = {
        "d": 384,
        "bm": kernels.ROWS,
        "bn": kernels.COLUMNS[capability // 10],
        "bk": kernels.DEPTH,
    }
    names = kernel.arg_names
    source = ASTSource(
        fn=kernel,
        signature={name: TYPES.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={
            (number,): [["tt.divisibility", 16]]
            for number, name in enumerate(names)
            if TYPES.get(name, "").startswith("*")
        },
    )
    options = {"num_warps": 8, "num_stages": 3}
    return compile(source, GPUTarget("cuda", capability, 32), options)


def resources(cubin):
    """Return what cuobjdump says of registers and STACK, which is what is spilled."""
    tools = Path(triton.backends.nvidia.__file__).parent / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [tools / "cuobjdump", "--dump-resource-usage", file.name]
        shown = subprocess.run(command, capture_output=True, text=True).stdout
    found = re.search(r"REG:\d+ STACK:\d+", shown)
    return found.group() if found else "registers not shown"


def main():
    capability = int(sys.argv[1])
    os.environ.setdefault("TRITON_CACHE_DIR", tempfile.mkdtemp())
    compiled = compile_for(capability)
    shared = compiled.metadata.shared
    print(f"sm_{capability}: shared {shared}, {resources(compiled.asm['cubin'])}")
    if shared > SHARED[capability] * 1024:
        sys.exit(f"shared memory: {shared} of {SHARED[capability]} KiB")
    if "mma" not in compiled.asm["ptx"]:
        sys.exit("no instruction of a tensor core: Triton left a trap")


if __name__ == "__main__":
    main()
