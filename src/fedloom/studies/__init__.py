"""Studies: the comparisons of the sources, declared as runs, tables and figures."""

from __future__ import annotations

from fedloom.errors import unknown
from fedloom.experiment.study import Study
from fedloom.studies.s1 import S1
from fedloom.studies.s4 import S4Alpha, S4DomSet, S4Similarity, S4Table

STUDIES: dict[str, Study] = {
    study.name: study for study in (S1(), S4Table(), S4Alpha(), S4DomSet(), S4Similarity())
}


def find(name: str) -> Study:
    if name not in STUDIES:
        raise unknown("study", name, STUDIES)
    return STUDIES[name]
