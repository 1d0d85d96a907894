"""`python -m fedloom`."""

from fedloom.cli import main

main()
