"""The Triton kernel, run by Triton's interpreter where there is no card, against float64 arithmetic."""

import numpy as np
import pytest
import torch

kernels = pytest.importorskip(
    "hubplugin.compute.kernels",
    reason="needs triton, which comes with torch's CUDA build",
)
from hubplugin.compute.device import split  # noqa: E402
from tests.core.formulas import logsumexp  # noqa: E402
from tests.galleries import assert_near  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("tau", [0.05, 0.01])
@pytest.mark.parametrize(
    ("n", "m", "d"), [(130, 300, 48), (1, 5, 8), (128, 128, 32), (77, 129, 33)]
)
def test_a_weighted_log_sum_is_that_of_float64(n, m, d, tau, rng):
    vectors = rng.normal(size=(n + m, d)) + 0.5
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    unit = torch.from_numpy(vectors.astype(np.float32))
    targets, bank = unit[:n], unit[n:]
    bias = rng.normal(size=m)
    halves = [split(part.to(DEVICE)) for part in (targets, bank)]
    ours = kernels.log_sum_exp(*halves, torch.from_numpy(bias).to(DEVICE), 1 / tau)
    x = bank.double().numpy() @ targets.double().numpy().T / tau + bias[:, None]
    exact = tau * logsumexp(x, axis=0)
    assert_near(tau * ours.cpu().numpy(), exact, 1e-6)
