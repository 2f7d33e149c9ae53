"""The command line."""

from hubplugin.cli.commands import app, main

__all__ = ["app", "main"]
