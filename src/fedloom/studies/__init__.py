"""Studies: the comparisons of the sources, declared as runs, tables and figures."""

from __future__ import annotations

from fedloom.errors import unknown
from fedloom.experiment.study import Study
from fedloom.studies.s0_swap import S0Swap
from fedloom.studies.s1 import S1
from fedloom.studies.s1_when import S1When
from fedloom.studies.s2 import S2
from fedloom.studies.s4 import S4Alpha, S4DomSet, S4Mobility, S4Similarity, S4Table, S4Why

_S4 = (S4Table, S4Why, S4Alpha, S4Mobility, S4DomSet, S4Similarity)
_ALL: tuple[type[Study], ...] = (S0Swap, S1, S1When, *S2, *_S4)
STUDIES: dict[str, Study] = {study.name: study() for study in _ALL}


def find(name: str) -> Study:
    if name not in STUDIES:
        raise unknown("study", name, STUDIES)
    return STUDIES[name]
