"""The command line: each module registers its commands with `application`."""

from hubplugin.cli import correct, manage, measure
from hubplugin.cli.application import app, main

ORDER = [
    "diagnose",
    "apply",
    "evaluate",
    "inspect",
    "refresh",
    "refit",
    "rollback",
    "remove",
    "explain",
    "bank",
]
"""The order of commands in `hubplugin --help`, in which a new user needs them."""
app.registered_commands.sort(key=lambda command: ORDER.index(str(command.name)))

__all__ = ["app", "correct", "main", "manage", "measure"]
