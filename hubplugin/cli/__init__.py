"""The command line: each module registers its commands with the frame."""

from hubplugin.cli import correcting, evaluating, looking, searching
from hubplugin.cli.frame import app, main

__all__ = ["app", "correcting", "evaluating", "looking", "main", "searching"]
