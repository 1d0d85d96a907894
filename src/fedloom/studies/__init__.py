"""Studies: the comparisons of the sources, declared as runs, tables and figures."""

from __future__ import annotations

from fedloom.errors import unknown
from fedloom.experiment.study import Study
from fedloom.studies.s0_swap import S0Swap
from fedloom.studies.s1 import S1
from fedloom.studies.s2 import S2

STUDIES: dict[str, Study] = {
    study.name: study for study in (S0Swap(), S1(), *(study() for study in S2))
}


def find(name: str) -> Study:
    if name not in STUDIES:
        raise unknown("study", name, STUDIES)
    return STUDIES[name]
