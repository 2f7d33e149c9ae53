"""torch, imported when it is first used: fits need it, and a process that only serves need not have it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hubplugin.errors import InputError

if TYPE_CHECKING:
    import torch as torch
else:

    class _Torch:
        """Stands for the module. Raises InputError, one line, where it is not installed."""

        def __getattr__(self, name: str) -> Any:
            try:
                import torch
            except ImportError:
                raise InputError(
                    "this computes with torch, which is not installed: pip install 'hubplugin[fit]'"
                ) from None
            value = getattr(torch, name)
            setattr(self, name, value)  # the next look finds it without this method
            return value

    torch = _Torch()
