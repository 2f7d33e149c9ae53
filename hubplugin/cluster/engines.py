"""Executors on engines that exist: Dask, and Ray. `concurrent.futures` brings its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from typing import Any, TypeVar

from hubplugin.errors import ClusterError, install
from hubplugin.vectors import one_line

Result = TypeVar("Result")

RETRIES = 2
"""How often Ray itself does a task again whose worker was lost."""


class DaskExecutor(Executor):
    """The workers of a `dask.distributed.Client`, as `client.get_executor(pure=False)` gives them, and whether there
    are any."""

    def __init__(self, client: Any):
        self._client, self._executor = client, client.get_executor(pure=False)

    def submit(self, fn: Callable[..., Result], /, *args: Any, **kwargs: Any) -> Future[Result]:
        future: Future[Result] = self._executor.submit(fn, *args, **kwargs)
        return future

    def has_workers(self) -> bool:
        return bool(self._client.scheduler_info()["workers"])

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """The client and its cluster stay."""
        self._executor.shutdown(wait=wait and not cancel_futures)


@contextmanager
def dask_cluster(address: str, seconds: float = 10) -> Iterator[Executor]:
    """The workers of the Dask cluster whose scheduler is at `address`, as tcp://scheduler:8786.

    Raises ClusterError if nobody answers there within some `seconds`, or there is no worker.
    """
    try:
        from distributed import Client
    except ImportError:
        raise ClusterError(f"Dask needs dask.distributed; {install('cluster')}") from None
    try:
        client = Client(address, timeout=seconds, set_as_default=False)
    except (OSError, ValueError) as error:
        raise ClusterError(
            f"no Dask scheduler answers at {address!r} ({one_line(error)}); expected an address such as "
            "tcp://scheduler:8786"
        ) from None
    with client:
        try:
            client.wait_for_workers(1, timeout=seconds)
        except TimeoutError:
            raise ClusterError(f"the Dask scheduler at {address!r} has no workers; start some") from None
        yield DaskExecutor(client)


class RayExecutor(Executor):
    """The workers of the Ray cluster that this process is connected to (`ray.init`). options: those of
    `ray.remote`, such as num_gpus=1 or num_cpus=4. Raises ClusterError where ray is not installed."""

    def __init__(self, **options: Any):
        try:
            import ray
        except ImportError:
            raise ClusterError(f"RayExecutor needs ray; {install('ray')}") from None
        self._remote: Any = ray.remote(**({"max_retries": RETRIES} | options))(_call)
        self._cancel = ray.cancel

    def submit(self, fn: Callable[..., Result], /, *args: Any, **kwargs: Any) -> Future[Result]:
        reference = self._remote.remote(fn, args, kwargs)
        future: Future[Result] = reference.future()
        future.add_done_callback(lambda done: self._cancel(reference) if done.cancelled() else None)
        return future


def _call(fn: Callable[..., Result], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Result:
    return fn(*args, **kwargs)
