"""The Triton kernel, run by Triton's interpreter where there is no card, against float64 arithmetic."""

import numpy as np
import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
kernels = pytest.importorskip(
    "hubplugin.compute.kernels",
    reason="needs triton, which comes with torch's CUDA build",
)
from hubplugin.compute.device import split  # noqa: E402
from tests.core.formulas import logsumexp, without_answers  # noqa: E402


def unit(rng, rows, d):
    x = rng.standard_normal((rows, d)) + 0.5
    return torch.from_numpy(
        (x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float32)
    )


def log_sum_exp(targets, bank, bias, *more):
    """The kernel's, of tensors on the host."""
    halves = (split(part.to(DEVICE)) for part in (targets, bank))
    more = [
        value.to(DEVICE) if isinstance(value, torch.Tensor) else value for value in more
    ]
    return kernels.log_sum_exp(*halves, bias.to(DEVICE), *more).cpu().numpy()


@pytest.mark.parametrize("tau", [0.05, 0.01])
@pytest.mark.parametrize(
    ("n", "m", "d"), [(130, 300, 48), (1, 5, 8), (128, 128, 32), (77, 129, 33)]
)
def test_a_weighted_log_sum_is_that_of_float64(n, m, d, tau, rng):
    targets, bank, bias = (
        unit(rng, n, d),
        unit(rng, m, d),
        torch.from_numpy(rng.standard_normal(m)),
    )
    ours = log_sum_exp(targets, bank, bias, 1 / tau)
    exact = logsumexp(
        bank.double().numpy() @ targets.double().numpy().T / tau
        + bias.numpy()[:, None],
        axis=0,
    )
    np.testing.assert_allclose(tau * ours, tau * exact, rtol=0, atol=1e-6)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("popular", [0, 20, 60])
def test_answers_and_the_largest_are_left_out_as_float64_leaves_them_out(
    popular, biased, rng
):
    """popular: how many of 300 queries ask for one target: of more than 30 it is a hub and keeps its entries."""
    targets, tau = unit(rng, 90, 24), 0.05
    answers = rng.integers(0, 90, 300)
    answers[:popular] = 7
    bank = targets[answers] + 0.1 * torch.from_numpy(
        rng.standard_normal((300, 24)).astype(np.float32)
    )
    bank /= bank.norm(dim=1, keepdim=True)
    s = bank.double().numpy() @ targets.double().numpy().T
    bias = rng.standard_normal(300) if biased else np.zeros(300)
    thresholds = torch.from_numpy(s.max(axis=1) - 1e-5)
    ours = log_sum_exp(
        targets, bank, torch.from_numpy(bias), 1 / tau, thresholds, 0.1 * 300
    )
    left, _ = without_answers(s)
    exact = logsumexp(left / tau + bias[:, None], axis=0)
    np.testing.assert_allclose(tau * ours, tau * exact, rtol=0, atol=1e-6)
