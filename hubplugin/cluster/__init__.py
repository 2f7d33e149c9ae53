"""A gallery in shards, reduced by the workers of any `concurrent.futures.Executor`."""

from hubplugin.cluster.engines import DaskExecutor, RayExecutor, dask_cluster
from hubplugin.cluster.gallery import ShardedGallery
from hubplugin.cluster.work import Order, Reading
from hubplugin.cluster.workspace import Workspace

__all__ = ["DaskExecutor", "Order", "RayExecutor", "Reading", "ShardedGallery", "Workspace", "dask_cluster"]
