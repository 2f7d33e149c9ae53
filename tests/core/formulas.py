"""The offsets of the table in plain float64 numpy, written from the formulas and sharing no code with hubplugin."""

import numpy as np
from scipy.spatial.distance import cdist


def logsumexp(x, axis):
    """log of the sum of exp(x); -inf where every x is."""
    top = x.max(axis=axis, keepdims=True)
    top = np.where(np.isfinite(top), top, 0.0)
    with np.errstate(divide="ignore"):
        return np.log(np.exp(x - top).sum(axis=axis)) + top.squeeze(axis)


def similarity(queries, targets, metric, query_map=None):
    """Return s(q, t) [m, n], of queries as `query_map` maps them."""
    q, t = np.asarray(queries, np.float64), np.asarray(targets, np.float64)
    if metric == "cosine":
        q = q / np.linalg.norm(q, axis=1, keepdims=True)
        t = t / np.linalg.norm(t, axis=1, keepdims=True)
    if query_map is not None:
        q = q + q @ query_map.step.T.astype(np.float64)
    if metric == "euclidean":
        # Differences first, then squares: exact far from the origin, too.
        return -cdist(q, t, "sqeuclidean") / 2
    return q @ t.T


def offsets(*given, **parameters):
    """Return the offsets of `raw_offsets`, less their mean."""
    raw = raw_offsets(*given, **parameters)
    return raw - raw.mean()


def raw_offsets(method, bank, targets, metric, target_bank=None, columns=None, **p):
    """Return offsets up to a constant. columns: the targets of a Sinkhorn fit; `targets` by default."""
    s = similarity(bank, targets, metric)
    if method in ("sn", "dbsn"):
        columns = targets if columns is None else columns
        if target_bank is not None and method == "dbsn":
            columns = np.concatenate([columns, target_bank])
        return log_of("sn", s, columns=similarity(bank, columns, metric), **p)
    if method == "dualis":
        from_targets = similarity(target_bank, targets, metric)
        first, second = p["tau_query"], p["tau_target"]
        sums = logsumexp(s / first, axis=0) + logsumexp(from_targets / second, axis=0)
        return -first * second / (first + second) * sums
    return log_of(method, s, **p)


def without_answers(s, gallery=None):
    """`s` [m, n] with -inf in the place of each query's largest, copies of it included, and then of each target's
    largest (of the first `gallery` targets); and the weights of queries: 1 over the number of those that have the same
    nearest target, the first of copies. A target nearest to more than a tenth of the queries is a hub and no answer."""
    s = np.array(s, np.float64)
    level = s.max(axis=1, keepdims=True)
    answers = s >= level - 1e-5 * np.maximum(1, np.abs(level))
    hub = answers.sum(axis=0) > 0.1 * len(s)
    nearest = answers.argmax(axis=1)
    count = np.bincount(nearest, minlength=s.shape[1])
    count[count > 0.1 * len(s)] = 1
    s[answers & ~hub] = -np.inf
    n = s.shape[1] if gallery is None else gallery
    s[s[:, :n].argmax(axis=0), np.arange(n)] = -np.inf
    return s, 1 / count[nearest]


def log_of(method, s, weights=None, columns=None, **p):
    """Raw offsets from similarities `s` [m, n] in which -inf leaves an entry out.

    weights: of the bank queries, in a Sinkhorn fit. columns: what it is over; `s` by
    default.
    """
    if method == "is":
        return -p["tau"] * logsumexp(s / p["tau"], axis=0)
    if method == "sn":
        x = (s if columns is None else columns) / p["tau"]
        m, n = x.shape
        weights = np.ones(m) if weights is None else weights
        log_beta = np.zeros(n)
        for _ in range(p["iterations"]):
            log_alpha = np.log(weights / weights.sum()) - logsumexp(x + log_beta, 1)
            log_beta = -np.log(n) - logsumexp(x + log_alpha[:, None], 0)
        last = logsumexp(s / p["tau"] + log_alpha[:, None], axis=0)
        return p["tau"] * (-np.log(n) - last)
    # A dot product with the mean of the bank is the mean of all similarities.
    scale = p["lam"] if method == "dn" else p.get("alpha", 0.5)
    largest = np.sort(s, axis=0)[::-1][: p.get("k")]
    return -scale * np.nanmean(np.where(np.isfinite(largest), largest, np.nan), axis=0)


def blend(s, tau):
    """The default, of a log: half dbsn, half nnn, weakened for a small bank."""
    m = len(s)
    s, weights = without_answers(s)
    both = log_of("sn", s, weights, tau=tau, iterations=3) + log_of("nnn", s, k=16)
    return float(f"{m / (m + 100):.4g}") * (both - both.mean()) / 2


def query_map(queries, answers, targets, tau, negatives="asked", ridge=1.0):
    """Return W of docs/query-map.md."""
    q, t = np.asarray(queries, np.float64), np.asarray(targets, np.float64)
    gram = q.T @ q
    r = ridge * np.linalg.eigvalsh(gram).mean() * np.eye(len(gram))
    expected = q
    if negatives == "asked":
        seen = t[sorted(set(answers))]
        x = q @ seen.T / tau
        expected = np.exp(x - logsumexp(x, axis=1)[:, None]) @ seen
    return (t[answers] - expected).T @ q @ np.linalg.inv(gram + r)


def whitening(queries, answers, targets):
    """Return Z of docs/query-map.md."""
    t = np.asarray(targets, np.float64)
    covariance = np.cov(
        np.asarray(queries, np.float64) - t[answers], rowvar=False, ddof=0
    )
    size = np.trace(covariance) / len(covariance)
    return size * np.linalg.inv(0.7 * size * np.eye(len(covariance)) + 0.3 * covariance)
