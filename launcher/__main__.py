"""`python -m launcher` is the console script."""

from launcher.cli import main

main()
