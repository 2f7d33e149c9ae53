"""Sinkhorn normalisation over the targets (`sn`), and over the targets and a target bank (`dbsn`)."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from hubplugin.methods.base import FitInput, Method
from hubplugin.model import LogSumExp, Term
from hubplugin.reductions import sinkhorn


class SinkhornNormalisation(Method):
    """offset(t) = tau * log beta(t), after `iterations` of Sinkhorn between the query bank and the targets.

    DBSN eq. 7-9, algorithm A1 (there hubness = -offset). The last half-step reads only log alpha, which
    belongs to the bank, so the fit is a weighted inverted softmax, -tau * LSE_u( s(b_u, t)/tau + log alpha_u ),
    and extends to targets it never saw. The paper uses tau = 0.01 and 10 iterations; the default tau is 0.05,
    which on docstring-to-function pairs gains where 0.01 loses.
    """

    name: ClassVar[str] = "sn"
    tau: float = Field(0.05, gt=0)
    iterations: int = Field(10, ge=1)

    def terms(self, given: FitInput) -> tuple[Term, ...]:
        similarities = given.compute.similarities(given.query_bank, given.metric)
        columns = [given.require_targets(self.name)]
        if self.name == "dbsn" and given.target_bank is not None:
            columns.append(given.target_bank_vectors)
        log_alpha = sinkhorn(similarities, columns, self.tau, self.iterations)
        return (LogSumExp(given.query_bank, self.tau, -self.tau, log_alpha),)


class DualBankSinkhorn(SinkhornNormalisation):
    """As `sn`, with the columns [targets ; target bank]: DBSN algorithm A2.

    The target bank narrows the gap between the bank's queries and the gallery (DBSN fig. 7). Without one it
    is `sn`.
    """

    name: ClassVar[str] = "dbsn"
