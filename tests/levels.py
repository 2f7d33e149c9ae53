"""Runs a part of the numerical tests under each instruction set that this machine has: `make levels`.

torch, oneDNN and Faiss each choose their kernels by CPU, and round differently in each. Every level runs in a process
of its own, two at a time, which first shows that the level is in force. Exits with 1 if a test fails or a level cannot
be forced.
"""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

TESTS = (
    "tests/core/test_numerical_truth.py::test_random_vectors",
    "tests/core/test_numerical_truth.py::test_unnormalised_vectors_whose_similarities_are_in_the_hundreds",
    "tests/core/test_numerical_truth.py::test_offsets_that_would_be_no_numbers_are_refused",
    "tests/core/test_numerical_truth.py::test_a_temperature_below_the_rounding_of_similarities_is_refused",
    "tests/core/test_numerical_truth.py::test_a_program_that_allows_reduced_precision_products_gets_true_offsets",
    "tests/faiss/test_types.py::test_scores_are_similarity_plus_offset",
)


@dataclass(frozen=True)
class Level:
    """needs: flags of the CPU in /proc/cpuinfo. torch, faiss: what each says of itself when the level is in force."""

    name: str
    needs: frozenset[str]
    torch: str
    onednn: str
    faiss: str

    @property
    def environment(self) -> dict[str, str]:
        chosen = {"ATEN_CPU_CAPABILITY": self.torch.lower(), "ONEDNN_MAX_CPU_ISA": self.onednn}
        # Faiss reads the second before 1.14, whose wheels have a library for each level.
        older = "generic" if self.faiss == "NONE" else self.faiss.lower()
        return chosen | {"FAISS_SIMD_LEVEL": self.faiss, "FAISS_OPT_LEVEL": older}


AVX512 = frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl"})
LEVELS = (
    Level("generic", frozenset(), "DEFAULT", "SSE41", "NONE"),
    Level("AVX2", frozenset({"avx2", "fma"}), "AVX2", "AVX2", "AVX2"),
    Level("AVX-512", AVX512, "AVX512", "AVX512_CORE", "AVX512"),
    Level("AVX-512 and AMX", AVX512 | {"avx512_fp16", "amx_bf16"}, "AVX512", "AVX512_CORE_AMX", "AVX512_SPR"),
)

PROGRAM = """
import sys, faiss, pytest, torch
seen = torch.backends.cpu.get_cpu_capability(), faiss.SIMDConfig.get_level_name()
print(f"in force: torch {seen[0]}, Faiss {seen[1]}", flush=True)
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", *sys.argv[3:]]) if seen == tuple(sys.argv[1:3]) else 1)
"""


def flags() -> frozenset[str]:
    """What this CPU can do; nothing beyond the generic level where there is no /proc/cpuinfo."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line for line in lines if line.startswith("flags")), "").split())


def run(level: Level) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", PROGRAM, level.torch, level.faiss, *TESTS]
    chosen = level.environment | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=os.environ | chosen, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def main() -> int:
    has, failed = flags(), []
    here = [level for level in LEVELS if level.needs <= has]
    with ThreadPoolExecutor(max_workers=2) as pool:
        for level, done in zip(here, pool.map(run, here), strict=True):
            print(f"== {level.name}\n{done.stdout}", end="", flush=True)
            if done.returncode:
                failed.append(level.name)
    lacking = [level.name for level in LEVELS if level not in here]
    print(f"ran: {', '.join(level.name for level in here)}; this machine lacks: {', '.join(lacking) or 'none'}")
    if failed:
        print(f"failed: {', '.join(failed)}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
