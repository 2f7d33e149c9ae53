"""How much memory a program takes."""

import subprocess
import sys

LAST = "\nimport resource; print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"


def peak_memory(program, *arguments):
    """Return the most MB that a program takes, in a process of its own."""
    command = [sys.executable, "-c", program + LAST, *map(str, arguments)]
    unit = 1e-6 if sys.platform == "darwin" else 1e-3
    return unit * int(subprocess.check_output(command))
