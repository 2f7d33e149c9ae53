"""`python -m hubplugin` is the command `hubplugin`."""

from hubplugin.cli import main

main()
