"""How an adapter is found: by an entry point in the group `hubplugin.adapters`.

The entry point's name is the URL scheme, and its value is a function from a URL to a `hubplugin.store.Store`:

    [project.entry-points."hubplugin.adapters"]
    mystore = "my_package:open_url"

The built-in adapters come through the same door.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection
from difflib import get_close_matches
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import cast
from urllib.parse import urlsplit

from hubplugin.errors import HubpluginError, StoreError, install
from hubplugin.store import Store

GROUP = "hubplugin.adapters"


@cache
def adapters() -> dict[str, EntryPoint]:
    """The installed adapters by URL scheme."""
    return {entry.name: entry for entry in entry_points(group=GROUP)}


SERVERS = {"http": "qdrant", "https": "qdrant+https"}
"""The scheme of a store behind the address that people copy from a browser or from the arguments of its client."""


SHOWN = re.compile(
    "table|vector|key|metric|index|record|using|storage|grpc|tenant|database|host|port|dbname|user"
)
"""The options of URLs that messages and pages show."""


def without_secrets(url: str) -> str:
    """`url` as it is shown: without a password, and without options other than `SHOWN`: any other name may be that of a
    password, misspelt or in capitals."""
    place, _, options = url.partition("?")
    place = re.sub(r"(//[^/@:]*?)(:|%3a).*@", r"\1@", place, flags=re.IGNORECASE)
    shown = "&".join(
        option
        for option in options.split("&")
        if SHOWN.fullmatch(option.partition("=")[0])
    )
    return f"{place}?{shown}" if shown else place


def _suggest(url: str, schemes: Collection[str]) -> str | None:
    """The store URL that was probably meant by `url`, without what may be a secret in it."""
    bare = re.match(r"[\w.-]+:633[34](/|$)", url)
    try:
        parts = urlsplit(f"http://{url}" if bare else url)
        port = {None: "", 6334: ":6333"}.get(
            parts.port, f":{parts.port}"
        )  # 6334 is that of gRPC
    except ValueError:
        return None
    scheme = SERVERS.get(parts.scheme)
    if scheme in schemes and parts.hostname:
        names = [
            name
            for name in (parts.fragment or parts.path).split("/")
            if name not in ("", "collections", "dashboard")
        ]
        return f"{scheme}://{parts.hostname}{port}/{'/'.join(names) or 'COLLECTION'}"
    close = get_close_matches(url.partition(":")[0], schemes, n=1, cutoff=0.75)
    return f"{close[0]}:..." if close else None


def _way_to_install(entry: EntryPoint) -> str:
    """Of what the adapter behind `entry` needs: our adapters have an extra of their name."""
    package = entry.module.partition(".")[0]
    ours = entry.dist is not None and entry.dist.name == "hubplugin"
    return (
        install(package.removeprefix("hubplugin_"))
        if ours
        else f"install what {package} needs"
    )


def open_store(url: str) -> Store:
    """The store behind a URL such as `faiss:photos.faiss` or `qdrant://localhost:6333/photos`.

    Raises StoreError if no installed adapter knows the scheme, or its packages are missing.
    """
    scheme, colon, _ = url.partition(":")
    if (
        scheme not in adapters()
    ):  # perhaps it has been installed since they were listed, which reads every package
        adapters.cache_clear()
    installed = adapters()
    if not colon or scheme not in installed:
        schemes = (
            ", ".join(f"{name}:..." for name in sorted(installed)) or "none installed"
        )
        shown = (
            f"{scheme}:..." if colon else url
        )  # what stands behind it may hold a password
        if os.path.isfile(url):
            suffix = url.rpartition(".")[2]
            store = suffix if suffix in installed else "SCHEME"
            raise StoreError(
                f"{url!r} is a file, and a store is named by a URL: {store}:{url}; known: {schemes}"
            )
        suggestion = _suggest(url, installed)
        hint = f"; did you mean {suggestion}?" if suggestion else ""
        raise StoreError(
            f"{shown!r} is no store URL that an installed adapter knows; known: {schemes}{hint}"
        )
    try:
        opener = cast(Callable[[str], Store], installed[scheme].load())
    except HubpluginError:
        raise
    except ModuleNotFoundError as error:
        raise StoreError(
            f"{scheme}: needs {error.name}, which is not installed; {_way_to_install(installed[scheme])}"
        ) from None
    try:
        return opener(url)
    except HubpluginError:
        raise
    except ValueError as error:
        raise StoreError(f"{scheme}:... is no URL: {error}") from None
