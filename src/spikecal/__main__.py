"""`python -m spikecal` is the command `spikecal`."""

from .cli import main

main()
