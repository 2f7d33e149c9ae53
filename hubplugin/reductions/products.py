"""Products at the full precision of their type, whatever a program has allowed for its own training."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch


def squared_lengths(vectors: np.ndarray) -> np.ndarray:
    """|v|^2 of every row: float64 [b]."""
    squares: np.ndarray = np.einsum("jd,jd->j", vectors, vectors, dtype=np.float64)
    return squares


def as_tensor(array: np.ndarray) -> torch.Tensor:
    # What a memory map or a model file gives is read-only, of which torch would warn.
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def full_product(
    multiply: Callable[..., torch.Tensor], *factors: torch.Tensor, out: torch.Tensor | None = None
) -> torch.Tensor:
    """multiply(*factors) at the full precision of their type, written to `out` where there is one.

    A program may have allowed TF32 or bfloat16 products for its own training; ten bits of mantissa over tau are not
    enough here. The setting belongs to the whole process, so it is read and never changed: where it allows less than
    float32, the product is done in float64. It is read again afterwards, since another thread may have changed it.
    """
    if not reduces_precision(factors[0]):
        result = multiply(*factors, out=out)
        if not reduces_precision(factors[0]):
            return result
    exact = multiply(*(factor.double() for factor in factors)).to(factors[0].dtype)
    return exact if out is None else out.copy_(exact)


def reduces_precision(factor: torch.Tensor) -> bool:
    """Whether torch may now multiply such tensors at less than their own precision."""
    if factor.dtype is not torch.float32 or factor.device.type not in ("cpu", "cuda"):
        return False
    backend = torch.backends.cuda if factor.device.type == "cuda" else torch.backends.mkldnn
    # From torch 2.9 on each backend has a setting of its own, and to ask for the common one can be an error.
    precision = getattr(getattr(backend, "matmul", None), "fp32_precision", None)
    if precision is None:
        return torch.get_float32_matmul_precision() != "highest"
    return precision not in ("none", "ieee")
