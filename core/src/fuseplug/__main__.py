"""``python -m fuseplug``: the command line."""

from .cli import main

main()
