"""The version of hubplugin, which every module can import without importing the package."""

__version__ = "0.2.0"
