"""The errors that hubplugin raises: one line each, naming what was given, what was expected, and what to do."""

from __future__ import annotations


class HubpluginError(Exception):
    """Any error that hubplugin raises on purpose.

    Input that cannot be used is refused before anything is written. A job on a store that is stopped while it writes
    leaves what it wrote by then, and takes it up when it is run again.
    """


class InputError(HubpluginError, ValueError):
    """Vectors, parameters or ground truth that cannot be used as given."""


class ModelFileError(HubpluginError):
    """A model file that is damaged, or that another version wrote."""


class StoreError(HubpluginError):
    """A store that is missing, unreachable, in the wrong state, or of a kind that cannot carry offsets."""


class CorrectionRefused(HubpluginError):
    """The guard tried the correction on held-out bank queries and it did not help. Nothing was written."""
