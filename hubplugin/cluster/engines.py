"""Executors on engines that exist: Dask, and Ray. `concurrent.futures` brings its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from typing import Any, TypeVar

from hubplugin.cluster.work import Order
from hubplugin.errors import ClusterError
from hubplugin.vectors import Shard, one_line

Result = TypeVar("Result")

RETRIES = 2
"""How often Ray itself does a task again whose worker was lost."""


GIVEN_UP = ("error", "lost", "cancelled")
"""Where Dask no longer does a task: it gives up what several workers died with."""


class DaskExecutor(Executor):
    """The workers of a `dask.distributed.Client`. Orders for one shard go to the worker that had it before, as long as
    it lives, so that each shard is fetched once; `client.get_executor(pure=False)` serves as well, and fetches more
    often."""

    def __init__(self, client: Any):
        self._client, self._executor = client, client.get_executor(pure=False)
        self._homes: dict[str, Any] = {}

    def submit(self, fn: Callable[..., Result], /, *args: Any, **kwargs: Any) -> Future[Result]:
        home = next((self._home(each.shard) for each in args if isinstance(each, Order)), None)
        future: Future[Result] = self._executor.submit(_beside, home, fn, *args, **kwargs)
        return future

    def has_workers(self) -> bool:
        return bool(self._client.scheduler_info()["workers"])

    def _home(self, shard: Shard) -> Any:
        """Where a shard lies, as Dask's scheduler sees it: at whatever is cheap to send nowhere else. Binding work to a
        worker by its address would have it wait for ever once all workers were lost at one time."""
        home = self._homes.get(shard.identity)
        if home is None or home.status in GIVEN_UP:
            home = self._homes[shard.identity] = self._client.submit(_Heavy, pure=False)
        return home

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """The client and its cluster stay."""
        self._homes.clear()
        self._executor.shutdown(wait=wait and not cancel_futures)


class _Heavy:
    """Stands for a shard that lies with a worker: Dask asks for its size."""

    def __sizeof__(self) -> int:
        return 1 << 30


def _beside(home: object, fn: Callable[..., Result], /, *args: Any, **kwargs: Any) -> Result:
    return fn(*args, **kwargs)


@contextmanager
def dask_cluster(address: str, seconds: float = 10) -> Iterator[Executor]:
    """The workers of the Dask cluster whose scheduler is at `address`, as tcp://scheduler:8786.

    Raises ClusterError if nobody answers there within some `seconds`, or there is no worker.
    """
    try:
        from distributed import Client
    except ImportError:
        raise ClusterError("Dask needs dask.distributed: pip install 'hubplugin[cluster]'") from None
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
    `ray.remote`, such as num_gpus=1 or num_cpus=4."""

    def __init__(self, **options: Any):
        import ray

        self._remote: Any = ray.remote(**({"max_retries": RETRIES} | options))(_call)
        self._cancel = ray.cancel

    def submit(self, fn: Callable[..., Result], /, *args: Any, **kwargs: Any) -> Future[Result]:
        reference = self._remote.remote(fn, args, kwargs)
        future: Future[Result] = reference.future()
        future.add_done_callback(lambda done: self._cancel(reference) if done.cancelled() else None)
        return future


def _call(fn: Callable[..., Result], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Result:
    return fn(*args, **kwargs)
