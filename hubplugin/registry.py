"""Finds adapters by their entry points in the group `hubplugin.adapters`.

The name of an entry point is the URL scheme. Its value is a function that takes a URL
and returns a `hubplugin.store.Store`:

    [project.entry-points."hubplugin.adapters"]
    mystore = "my_package:open_url"

The built-in adapters are found in the same way.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import cast

from hubplugin.errors import HubpluginError, StoreError, install
from hubplugin.store import Store

GROUP = "hubplugin.adapters"


SHOWN = re.compile(
    "table|vector|key|metric|index|record|using|storage|grpc|tenant|database|host|hostaddr"
    "|port|dbname|user|service|sslmode|connect_timeout|options"
)
"""The URL options that messages and pages show."""


def without_secrets(url: str) -> str:
    """Return `url` for display: without a password, and only with options in `SHOWN`.

    Any other option may hold a password, even under a misspelt name.
    """
    place, _, options = url.partition("?")
    # "//USER:PASSWORD@HOST" becomes "//USER@HOST".
    place = re.sub(r"(//[^/@:]*?)(:|%3a).*@", r"\1@", place, flags=re.IGNORECASE)
    shown = "&".join(
        option
        for option in options.split("&")
        if SHOWN.fullmatch(option.partition("=")[0])
    )
    return f"{place}?{shown}" if shown else place


def open_store(url: str) -> Store:
    """Open a store by its URL, as `faiss:photos.faiss` or `qdrant://HOST:6333/photos`.

    Raises StoreError if no installed adapter knows the scheme, or if the adapter lacks
    packages.
    """
    scheme, colon, _ = url.partition(":")
    adapters = {entry.name: entry for entry in entry_points(group=GROUP)}
    entry = adapters.get(scheme)
    if entry is None or not colon:
        known = ", ".join(f"{name}:..." for name in sorted(adapters))
        # The rest of the URL may hold a password.
        shown = f"{scheme}:..." if colon else url
        raise StoreError(
            f"no installed adapter can open {shown!r}; known: "
            f"{known or 'none installed'}"
        )
    try:
        opener = cast(Callable[[str], Store], entry.load())
    except HubpluginError:
        raise
    except ModuleNotFoundError as error:
        package = entry.module.partition(".")[0]
        mend = f"install what {package} needs"
        if entry.dist is not None and entry.dist.name == "hubplugin":
            mend = install(package.removeprefix("hubplugin_"))
        raise StoreError(
            f"{scheme}: needs {error.name}, which is not installed; {mend}"
        ) from None
    try:
        return opener(url)
    except HubpluginError:
        raise
    except ValueError as error:
        raise StoreError(f"{scheme}:... is not a URL: {error}") from None
