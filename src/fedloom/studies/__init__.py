"""Studies: the comparisons of the sources, declared as runs, tables and figures."""

from __future__ import annotations

from fedloom.errors import unknown
from fedloom.experiment.study import Study
from fedloom.studies.s0_swap import S0Swap
from fedloom.studies.s1 import S1

STUDIES: dict[str, Study] = {study.name: study for study in (S1(), S0Swap())}


def find(name: str) -> Study:
    if name not in STUDIES:
        raise unknown("study", name, STUDIES)
    return STUDIES[name]
