"""Deliberate errors, each of which breaks a promise that some test must notice: `make mutants`."""
