"""hubplugin beside other packages that know hubs, on one set: `python -m benchmarks.peers --write docs/comparison.md`.

Their dependencies exclude each other, so each peer runs under an interpreter of its own, as `NAME=PATH`:

    python -m venv kiez && kiez/bin/python -m pip install kiez==0.5.0 'numpy<2'
    python3.8 -m venv skhubness && ... pip install scikit-learn==0.22.2.post1 scikit-hubness==0.21.2
    python -m benchmarks.peers --python kiez=kiez/bin/python --python scikit-hubness=skhubness/bin/python

This file is also the program that such an interpreter runs, so the peers' part imports numpy and the peer alone.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

import numpy as np

K = 10


def nnn_retrieval(given, k=128, alpha=0.75):
    """The ranking of nnn-retrieval, from the query bank; a retriever of torch, as its page shows."""
    from nnn import NNNRanker, NNNRetriever

    retriever = NNNRetriever(given["queries"].shape[1])
    ranker = NNNRanker(retriever, given["targets"], given["bank"], alternate_ks=k, alternate_weight=alpha)
    return ranker.search(given["queries"], top_k=K)[1]


def kiez(given, hubness):
    """The ranking of kiez; its hubness comes from the very queries that are asked, for it takes no bank."""
    from kiez import Kiez

    metric = {"metric": "sqeuclidean" if hubness == "DisSimLocal" else "cosine"}  # of unit vectors: the same order
    searched = Kiez(n_candidates=100, algorithm="SklearnNN", algorithm_kwargs=metric, hubness=hubness)
    return searched.fit(given["queries"], given["targets"]).kneighbors(K)[1]


def scikit_hubness(given, hubness):
    """The ranking of scikit-hubness; its hubness comes from the targets among themselves."""
    from skhubness.neighbors import NearestNeighbors

    searched = NearestNeighbors(K, algorithm_params={"n_candidates": 100}, hubness=hubness, metric="cosine")
    return searched.fit(given["targets"]).kneighbors(given["queries"], return_distance=False)


PEERS = {
    "nnn-retrieval": {"nnn k=128 alpha=0.75": nnn_retrieval, "nnn k=16 alpha=0.5": lambda g: nnn_retrieval(g, 16, 0.5)},
    "kiez": {name: lambda g, name=name: kiez(g, name) for name in ("CSLS", "LocalScaling", "DisSimLocal")},
    "scikit-hubness": {
        name: lambda g, name=name: scikit_hubness(g, name) for name in ("mutual_proximity", "local_scaling")
    },
}


def rank(peer, data, result):
    """What a peer's interpreter does: every ranking and its seconds into one file."""
    given, found = dict(np.load(data)), {}
    for name, ranking in PEERS[peer].items():
        ranking(given)  # imports and first use are not timed
        started = time.perf_counter()
        found[name] = np.asarray(ranking(given))
        found[name + " seconds"] = np.array(time.perf_counter() - started)
    np.savez(result, version=np.array(version(peer)), **found)


def ours(given):
    """The rankings of hubplugin: the default with one bank and with both, and the paper's `nnn`."""
    import hubplugin

    both = hubplugin.Bank(given["bank"], given["target_bank"])
    asked = {
        "blend, the default": {},
        "blend, with a target bank": {"bank": both},
        "dbsn, with a target bank": {"bank": both, "method": "dbsn"},
        "nnn k=16 alpha=0.5": {"method": "nnn", "k": 16, "alpha": 0.5},
        "nnn k=128 alpha=0.75": {"method": "nnn", "k": 128, "alpha": 0.75},
    }
    similarities = given["queries"] @ given["targets"].T
    for name, arguments in asked.items():
        started = time.perf_counter()
        offsets = hubplugin.fit(given["targets"], **({"bank": given["bank"]} | arguments)).offsets(given["targets"])
        yield name, np.argsort(-(similarities + offsets), axis=1)[:, :K], time.perf_counter() - started


def data():
    """Functions of the standard library, asked by docstrings; all rows of unit length."""
    from benchmarks.tables import EXAMPLES

    files = {
        "queries": "test_queries",
        "targets": "test_targets",
        "bank": "bank_queries",
        "target_bank": "bank_targets",
    }
    given = {name: np.load(EXAMPLES / f"{file}.npy").astype(np.float32) for name, file in files.items()}
    return {name: rows / np.linalg.norm(rows, axis=1, keepdims=True) for name, rows in given.items()}


def row(package, name, found, seconds):
    from hubplugin.measures.hubness import k_occurrence, skewness

    right = found == np.arange(len(found))[:, None]
    often = k_occurrence(found, len(found))
    first, tenth = 100 * right[:, 0].mean(), 100 * right.any(axis=1).mean()
    figures = [f"{first:.1f}", f"{tenth:.1f}", f"{skewness(often):.2f}", str(often.max()), f"{seconds:.1f}"]
    return [package, name, *figures]


def table(interpreters):
    from benchmarks.tables import markdown

    given = data()
    raw = np.argsort(-(given["queries"] @ given["targets"].T), axis=1)[:, :K]
    rows = [row("none", "raw", raw, 0.0)]
    rows += [row(f"hubplugin {version('hubplugin')}", *each) for each in ours(given)]
    with tempfile.TemporaryDirectory() as folder:
        np.savez(f"{folder}/given.npz", **given)
        for peer in PEERS:
            command = [interpreters.get(peer, sys.executable), __file__, "rank", peer, f"{folder}/given.npz"]
            subprocess.run([*command, f"{folder}/{peer}.npz"], check=True)
            found = dict(np.load(f"{folder}/{peer}.npz"))
            label = f"{peer} {found['version']}"
            rows += [row(label, name, found[name], float(found[f"{name} seconds"])) for name in PEERS[peer]]
    return markdown(["package", "correction", "R@1", "R@10", "skewness", "largest N10", "seconds"], rows)


if __name__ == "__main__":
    if sys.argv[1:2] == ["rank"]:
        rank(*sys.argv[2:])
        raise SystemExit
    from benchmarks.tables import write_table

    asked = argparse.ArgumentParser()
    asked.add_argument("--python", action="append", default=[], metavar="PEER=PATH")
    asked.add_argument("--write", type=Path)
    options = asked.parse_args()
    text = table(dict(each.split("=", 1) for each in options.python))
    print(text)
    if options.write:
        write_table(options.write, "peers", text)
