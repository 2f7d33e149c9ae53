import os

# ranx compiles its metrics for half a minute; on the few rows of these tests plain Python is instant.
os.environ["NUMBA_DISABLE_JIT"] = "1"
