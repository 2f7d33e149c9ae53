"""The life of a corrected gallery: what its owner, other programs and our jobs do to it, in random order.

Beside the store lies what must be in it: the vector and the offset of every target, the
model by which searches rank, and the one before. Searches are compared with arithmetic
in float64.
"""

from contextlib import nullcontext

import numpy as np
import pytest

import hubplugin
from hubplugin import StoreError
from hubplugin.jobs.write import write
from hubplugin.metric import Metric
from tests.core.formulas import similarity
from tests.galleries import assert_near, normal, with_map
from tests.keepers import DIM
from tests.refusals import refused

COUNT = 60
METHODS = ("is", "nnn", "csls", "dn", "sn", "blend")
STEPS = (
    *("put", "put", "put_by_hubplugin", "delete", "come_back", "entitle"),
    *("apply", "apply_again", "refit", "rollback", "refresh", "remove"),
    *("cut_off", "restart"),
)


def fingerprint(model):
    return model and model.fingerprint


def without_zeros(vectors):
    return vectors[vectors.any(axis=1)]


def refused_without(model, said):
    return nullcontext() if model else refused(StoreError, said)


class Life:
    """The life of a gallery that `keeper` keeps. told: what was done."""

    def __init__(self, keeper, seed):
        self.rng = np.random.default_rng(seed)
        self.keeper = keeper
        self.metric = keeper.metric
        self.centres = self.rng.normal(size=(5, DIM))
        self.told = []
        self.vectors = {}
        self.gone = {}
        self.offsets = {}
        self.active = None
        self.previous = None
        self.half = None
        self.written = {}
        keeper.create()
        ids = [keeper.key(number) for number in range(COUNT)]
        self.next = COUNT
        self.store_vectors(ids, self.draw(COUNT))
        self.restart()

    def run(self, steps):
        for step in steps:
            self.store = self.held
            if self.rng.random() < 0.5:
                self.store = self.keeper.open()
            self.told.append(step)
            getattr(self, step)()
            self.check()
        hubplugin.remove(self.store)
        self.forget()
        self.check()
        assert self.keeper.left() == []

    # What can be done to it

    def draw(self, count):
        """Return vectors near the centres, one of ten of length 0 where these may be."""
        places = self.rng.integers(len(self.centres), size=count)
        vectors = self.centres[places] + 0.7 * self.rng.normal(size=(count, DIM))
        if self.metric is Metric.COSINE:
            vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
            if self.keeper.has_zeros:
                vectors[self.rng.random(count) < 0.1] = 0
        return vectors.astype(self.keeper.holds).astype(np.float32)

    def store_vectors(self, ids, vectors):
        """Put vectors past hubplugin."""
        self.keeper.put(ids, vectors)
        self.vectors.update(zip(ids, vectors, strict=True))
        for key in ids:
            self.gone.pop(key, None)
            if not self.keeper.keeps:
                self.offsets.pop(key, None)

    def choose(self):
        """Return ids, of which some are there and some are new, and vectors for them."""
        count = int(self.rng.integers(1, 6))
        ids = self.some(count // 2)
        while len(ids) < count:
            ids.append(self.keeper.key(self.next))
            self.next += 1
        return ids, self.draw(count)

    def some(self, count):
        """Return ids of targets that are there."""
        rows = self.rng.permutation(len(self.vectors))[:count]
        ids = list(self.vectors)
        return [ids[row] for row in rows]

    def put(self):
        self.store_vectors(*self.choose())

    def put_by_hubplugin(self):
        ids, vectors = self.choose()
        if not self.keeper.put_by_hubplugin(ids, vectors):
            return
        self.vectors.update(zip(ids, vectors, strict=True))
        if self.active is not None:
            self.give_offsets(self.active, ids)

    def delete(self):
        if len(self.vectors) < COUNT // 2:
            return
        ids = self.some(int(self.rng.integers(1, 9)))
        self.keeper.delete(ids)
        for key in ids:
            self.gone[key] = self.vectors.pop(key)
            if not self.keeper.remembers:
                self.offsets.pop(key, None)

    def come_back(self):
        """Put what was deleted, as it was or with other vectors."""
        back = dict(list(self.gone.items())[-3:])
        if not back:
            return
        vectors = np.stack(list(back.values()))
        if self.rng.random() < 0.5:
            vectors = self.draw(len(back))
        self.store_vectors(list(back), vectors)

    def entitle(self):
        for key in self.some(4):
            self.keeper.entitle(key, "a photo")

    def restart(self):
        """End, and begin as a program that holds the store open from here on."""
        self.keeper.restart()
        self.held = self.keeper.open()
        self.store = self.held

    def fit(self):
        """Return a model of what is there now; at every third step with a query map."""
        method = str(self.rng.choice(METHODS))
        model = hubplugin.fit(self.seen(), self.bank(), method, metric=self.metric)
        may_map = self.store.maps_queries and self.metric is not Metric.EUCLIDEAN
        if may_map and len(self.told) % 3 == 1:
            step = 0.2 * normal(self.rng, DIM, DIM)
            model = with_map(model, step).centre_on(self.seen())
        return model

    def rows(self):
        """Return the vectors that are there [n, d]."""
        return np.stack(list(self.vectors.values()))

    def seen(self):
        """Return the vectors that a model can judge [n, d]."""
        return without_zeros(self.rows())

    def bank(self):
        return without_zeros(self.draw(60))

    def apply(self):
        self.write(self.fit())

    def apply_again(self):
        """Write the model that is active, or half-written, once more."""
        model = self.half or self.active
        if model is not None:
            self.write(model)

    def write(self, model):
        write(self.store, model, force=True)
        self.activate(model)

    def refit(self):
        with refused_without(self.active, "no active correction"):
            fit = {"method": "nnn", "k": 5, "learn": False, "force": True}
            self.activate(hubplugin.refit(self.store, self.bank(), **fit).model)

    def rollback(self):
        model = self.previous
        with refused_without(model, "nothing to roll back to"):
            done = hubplugin.rollback(self.store)
            assert done.model.fingerprint == model.fingerprint
            self.activate(model)

    def refresh(self):
        wrong = self.count_wrong()
        with refused_without(self.active, "correction"):
            done = hubplugin.refresh(self.store)
            assert done.missing + done.stale == wrong
            self.give_offsets(self.active, list(self.vectors))

    def remove(self):
        if self.rng.random() < 0.7:  # or most of a life is without a correction
            return
        hubplugin.remove(self.store)
        self.forget()

    def cut_off(self):
        """Begin another model, and stop in the middle."""
        model = self.fit()
        self.store.require_writable()  # as each job does first
        writing = self.store.begin(model)
        batch = next(iter(writing.scan()))
        part = batch.take(np.arange(len(batch.ids) // 2))
        offsets = model.offsets(part.vectors)
        writing.write(part, offsets)
        writing.close()
        self.half = model
        pairs = zip(offsets.tolist(), part.vectors, strict=True)
        self.written = dict(zip(part.ids, pairs, strict=True))

    # What must be there

    def forget(self):
        self.active = None
        self.previous = None
        self.half = None
        self.offsets.clear()

    def activate(self, model):
        if fingerprint(self.active) not in (None, model.fingerprint):
            self.previous = self.active
        if fingerprint(self.active) != model.fingerprint:
            goes_on = fingerprint(self.half) == model.fingerprint
            is_kept = goes_on and self.keeper.remembers
            self.offsets = dict(self.written) if is_kept else {}
            self.half = None
        self.active = model
        self.give_offsets(model, list(self.vectors))

    def give_offsets(self, model, ids):
        """Note that these targets have the offsets of their vectors of now."""
        vectors = np.stack([self.vectors[key] for key in ids])
        offsets = model.offsets(np.where(vectors.any(axis=1)[:, None], vectors, 1.0))
        if self.metric is Metric.COSINE:
            offsets = np.where(vectors.any(axis=1), offsets, 0.0)
        for key, vector, offset in zip(ids, vectors, offsets.tolist(), strict=True):
            self.offsets[key] = offset, vector

    def offset(self, key):
        """Return what the store must hold for a target, NaN for nothing."""
        if self.keeper.checks and self.has_changed(key):
            return np.nan
        return self.offsets[key][0] if key in self.offsets else np.nan

    def has_changed(self, key):
        """Return True if a target has another vector than its offset was made for."""
        if key not in self.offsets:
            return False
        return not np.array_equal(self.offsets[key][1], self.vectors[key])

    def count_wrong(self):
        """Return how many targets have no offset, or another than the model's."""
        if self.active is None:
            return 0
        held = np.array([self.offset(key) for key in self.vectors])
        before = dict(self.offsets)
        self.give_offsets(self.active, list(self.vectors))
        right = np.array([self.offsets[key][0] for key in self.vectors])
        self.offsets = before
        return (~(np.abs(held - right) <= 1e-4 * (1 + np.abs(right)))).sum()

    def similarities(self, queries, model, zero):
        """Return [q, n] in float64; `zero` is that of vectors of length 0 by cosine."""
        targets = self.rows()
        query_map = model and model.query_map
        found = similarity(queries, targets, self.metric.value, query_map)
        if self.metric is Metric.COSINE:
            found[:, ~targets.any(axis=1)] = zero
        return found

    def check(self):
        """Compare everything that the store tells with what must be there."""
        store = self.store
        assert store.count() == len(self.vectors)
        correction = store.correction()
        active = correction.model if correction and correction.active else None
        assert fingerprint(active) == fingerprint(self.active)
        assert fingerprint(store.previous()) == fingerprint(self.previous)
        self.check_offsets()
        queries = self.bank()[:4]
        k = int(self.rng.choice([1, 10, 40]))
        self.check_ranking(queries, k, raw=True)
        self.check_ranking(queries, k, raw=False)

    def check_offsets(self):
        if self.active is None:
            return
        seen = []
        for batch in self.store.scan():
            seen += batch.ids
            for key, offset in zip(batch.ids, batch.offsets.tolist(), strict=True):
                if np.isinf(offset):
                    assert self.has_changed(key)
                else:
                    found, expected = np.nan_to_num([offset, self.offset(key)])
                    assert found == pytest.approx(expected, abs=1e-4)
        assert sorted(seen, key=str) == sorted(self.vectors, key=str)
        report = hubplugin.inspect(self.store, queries=0)
        assert report.missing + report.stale == self.count_wrong()

    def check_ranking(self, queries, k, *, raw):
        model = None if raw else self.active
        zero = self.keeper.zero[self.active is not None and not raw]
        scores = self.similarities(queries, model, zero)
        row = {key: place for place, key in enumerate(self.vectors)}
        if model is not None:
            offsets = np.array([self.offset(key) for key in row])
            scores = scores + np.nan_to_num(offsets)
            if not self.keeper.maps_all:
                plain = self.similarities(queries, None, zero)
                scores = np.where(np.isnan(offsets), plain, scores)
        hits = self.store.search(queries, k, raw=raw)
        shares = []
        for ids, told, line in zip(hits.ids, hits.scores, scores, strict=True):
            best = np.sort(line[~np.isnan(line)])[::-1][:k]
            assert len(set(ids)) == len(ids) == len(best)
            found = line[[row[key] for key in ids]]
            room = self.keeper.room * (1 + np.abs(line[np.isfinite(line)]).max())
            shares.append((found >= best[-1] - room).mean())
            gains = self.keeper.gains(told)
            seen = np.isfinite(found)
            assert_near((gains - gains[0])[seen], (found - found[0])[seen], room)
        assert np.mean(shares) >= self.keeper.recall
