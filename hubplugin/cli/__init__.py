"""The command line: each module registers its commands with the frame."""

from hubplugin.cli import agents, correcting, evaluating, keeping, looking, quarantining, recording, searching
from hubplugin.cli.frame import app, main

__all__ = [
    "agents",
    "app",
    "correcting",
    "evaluating",
    "keeping",
    "looking",
    "main",
    "quarantining",
    "recording",
    "searching",
]
