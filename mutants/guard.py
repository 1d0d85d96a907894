"""A pytest plugin: what is tested must be the copy with the error, not the installed package."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import fedloom

WRONG_COPY = 17  # the exit code


def pytest_collection_finish() -> None:
    used, meant = Path(fedloom.__file__).resolve(), Path(os.environ["MUTANTS_COPY"]).resolve()
    if not used.is_relative_to(meant):
        pytest.exit(f"the tests import {used}, not the copy in {meant}", returncode=WRONG_COPY)
