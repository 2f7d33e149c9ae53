"""The offsets of the table in plain float64 numpy, written from the formulas and sharing no code with hubplugin."""

import numpy as np
from scipy.spatial.distance import cdist


def logsumexp(x, axis):
    """log of the sum of exp(x); -inf where every x is."""
    top = x.max(axis=axis, keepdims=True)
    top = np.where(np.isfinite(top), top, 0.0)
    with np.errstate(divide="ignore"):
        return np.log(np.exp(x - top).sum(axis=axis)) + top.squeeze(axis)


def similarity(queries, targets, metric):
    q, t = np.asarray(queries, np.float64), np.asarray(targets, np.float64)
    if metric == "euclidean":
        return (
            -cdist(q, t, "sqeuclidean") / 2
        )  # differences first, then squares: exact far from the origin, too
    if metric == "cosine":
        q = q / np.linalg.norm(q, axis=1, keepdims=True)
        t = t / np.linalg.norm(t, axis=1, keepdims=True)
    return q @ t.T


def inverted_softmax(bank, targets, metric, tau):
    return -tau * logsumexp(similarity(bank, targets, metric) / tau, axis=0)


def sinkhorn(bank, targets, metric, tau, iterations, target_bank=None):
    columns = targets if target_bank is None else np.concatenate([targets, target_bank])
    return last_half_step(bank, columns, targets, metric, tau, iterations)


def last_half_step(bank, columns, targets, metric, tau, iterations):
    """tau log beta of `targets`, which may be others than the columns that log alpha was sought over."""
    x = similarity(bank, columns, metric) / tau
    m, n = x.shape
    log_beta = np.zeros(n)
    for _ in range(iterations):
        log_alpha = -np.log(m) - logsumexp(x + log_beta[None, :], axis=1)
        log_beta = -np.log(n) - logsumexp(x + log_alpha[:, None], axis=0)
    return tau * (
        -np.log(n)
        - logsumexp(
            similarity(bank, targets, metric) / tau + log_alpha[:, None], axis=0
        )
    )


def dual_inverted_softmax(bank, targets, metric, tau_query, tau_target, target_bank):
    scale = tau_query * tau_target / (tau_query + tau_target)
    from_queries = logsumexp(similarity(bank, targets, metric) / tau_query, axis=0)
    from_targets = logsumexp(
        similarity(target_bank, targets, metric) / tau_target, axis=0
    )
    return -scale * (from_queries + from_targets)


def nearest(bank, targets, metric, k, alpha):
    return -alpha * np.sort(similarity(bank, targets, metric), axis=0)[::-1][:k].mean(
        axis=0
    )


def distribution(bank, targets, metric, lam):
    b = np.asarray(bank, np.float64)
    if metric == "cosine":
        b = b / np.linalg.norm(b, axis=1, keepdims=True)
        t = np.asarray(targets, np.float64)
        return -lam * (t / np.linalg.norm(t, axis=1, keepdims=True)) @ b.mean(axis=0)
    return -lam * similarity(b.mean(axis=0, keepdims=True), targets, metric)[0]


def offsets(method, bank, targets, metric, target_bank=None, **p):
    """The offsets of `method`, less their mean."""
    raw = raw_offsets(method, bank, targets, metric, target_bank, **p)
    return raw - raw.mean()


def raw_offsets(method, bank, targets, metric, target_bank=None, **p):
    if method == "is":
        return inverted_softmax(bank, targets, metric, p["tau"])
    if method == "sn":
        return sinkhorn(bank, targets, metric, p["tau"], p["iterations"])
    if method == "dbsn":
        return sinkhorn(bank, targets, metric, p["tau"], p["iterations"], target_bank)
    if method == "dualis":
        return dual_inverted_softmax(
            bank, targets, metric, p["tau_query"], p["tau_target"], target_bank
        )
    if method == "nnn":
        return nearest(bank, targets, metric, p["k"], p["alpha"])
    if method == "csls":
        return nearest(bank, targets, metric, p["k"], 0.5)
    if method == "dn":
        return distribution(bank, targets, metric, p["lam"])
    raise ValueError(f"no formula for {method}")


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


def log_of(method, s, weights, **p):
    """Raw offsets from similarities `s` [m, n] in which -inf leaves an entry out."""
    if method == "is":
        return -p["tau"] * logsumexp(s / p["tau"], axis=0)
    if method == "sn":
        x, log_beta = s / p["tau"], np.zeros(s.shape[1])
        for _ in range(p["iterations"]):
            log_alpha = np.log(weights / weights.sum()) - logsumexp(
                x + log_beta[None, :], axis=1
            )
            log_beta = -np.log(s.shape[1]) - logsumexp(x + log_alpha[:, None], axis=0)
        return p["tau"] * log_beta
    if method == "dn":
        return -p["lam"] * np.nanmean(np.where(np.isfinite(s), s, np.nan), axis=0)
    return -p.get("alpha", 0.5) * np.sort(s, axis=0)[::-1][: p["k"]].mean(axis=0)


def blend(s, leave_out, tau=None):
    """The default: half dbsn, half nnn, weakened for a small bank. tau: half the spread of `s` [m, n] by default."""
    m, tau = len(s), float(f"{0.5 * s.std():.4g}") if tau is None else tau
    weights = np.ones(m)
    if leave_out:
        s, weights = without_answers(s)
    both = log_of("sn", s, weights, tau=tau, iterations=3) + log_of(
        "nnn", s, weights, k=16
    )
    return float(f"{m / (m + 100):.4g}") * (both - both.mean()) / 2


def query_map(queries, answers, targets, tau, apart_from="asked", gallery=None):
    """Return W of docs/query-map.md; the gallery is `targets` unless it is given."""
    q, t = np.asarray(queries, np.float64), np.asarray(targets, np.float64)
    seen = t[sorted(set(answers))]
    if apart_from == "gallery":
        both = [seen, t if gallery is None else gallery]
        seen = np.unique(np.concatenate(both), axis=0)
    x = q @ seen.T / tau
    expected = np.exp(x - logsumexp(x, axis=1)[:, None]) @ seen
    if apart_from == "answer":
        expected = q
    gram = q.T @ q
    ridge = np.linalg.eigvalsh(gram).mean() * np.eye(len(gram))
    return (t[answers] - expected).T @ q @ np.linalg.inv(gram + ridge)


def whitening(bank, targets, kept=0.9):
    """Z of docs/learning.md: of the covariance of bank and targets, each about its own mean."""
    b, t = np.asarray(bank, np.float64), np.asarray(targets, np.float64)
    centred = np.concatenate([t - t.mean(axis=0), b - b.mean(axis=0)])
    covariance = centred.T @ centred / len(centred)
    size = np.trace(covariance) / len(covariance)
    return size * np.linalg.inv(
        kept * size * np.eye(len(covariance)) + (1 - kept) * covariance
    )
