"""The Triton kernel, run by Triton's interpreter where there is no card, against float64 arithmetic."""

import os

import numpy as np
import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ.setdefault("TRITON_INTERPRET", "1")  # which is read when the kernel is made

kernels = pytest.importorskip("hubplugin.compute.kernels", reason="needs triton, which comes with torch's CUDA build")
from tests.core.formulas import logsumexp  # noqa: E402


def unit(rng, rows, d):
    x = rng.standard_normal((rows, d)) + 0.5
    return torch.from_numpy((x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float32))


@pytest.mark.parametrize("tau", [0.05, 0.01])
@pytest.mark.parametrize(("n", "m", "d"), [(130, 300, 48), (1, 5, 8), (128, 128, 32), (77, 129, 33)])
def test_a_weighted_log_sum_is_that_of_float64(n, m, d, tau, rng):
    targets, bank, bias = unit(rng, n, d), unit(rng, m, d), torch.from_numpy(rng.standard_normal(m))
    halves = [kernels.halves(part.to(DEVICE)) for part in (targets, bank)]
    ours = kernels.log_sum_exp(*halves, bias.to(DEVICE), 1 / tau).cpu().numpy()
    exact = logsumexp(bank.double().numpy() @ targets.double().numpy().T / tau + bias.numpy()[:, None], axis=0)
    np.testing.assert_allclose(tau * ours, tau * exact, rtol=0, atol=1e-6)
