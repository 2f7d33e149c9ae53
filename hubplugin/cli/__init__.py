"""The command line: each module registers its commands with the frame."""

from hubplugin.cli import correct, manage, measure
from hubplugin.cli.application import app, main

__all__ = ["app", "correct", "main", "manage", "measure"]
