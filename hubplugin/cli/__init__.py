"""The command line: each module registers its commands with the frame."""

from hubplugin.cli import correct, look, manage
from hubplugin.cli.frame import app, main

__all__ = ["app", "correct", "look", "main", "manage"]
