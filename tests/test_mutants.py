"""The list of deliberate errors fits the source, and its runner tells noticed from survived."""

from dataclasses import replace

import pytest

from mutants.__main__ import main
from mutants.entries import Mutant, entries, faults
from mutants.runner import Outcome, Unsound, enough, run

DOUBLES = Mutant(
    name="doubles",
    group="core",
    promise="Twice is twice.",
    file="twice.py",
    old="2 * x",
    new="3 * x",
    tests=("tests/test_twice.py::test_two",),
)


@pytest.fixture
def fake(tmp_path):
    """A project of one function and tests that look at it more or less closely."""
    package, tests = tmp_path / "src" / "fedloom", tmp_path / "tests"
    package.mkdir(parents=True)
    tests.mkdir()
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (package / "__init__.py").touch()
    (package / "twice.py").write_text("def twice(x):\n    return 2 * x\n")
    (tests / "test_twice.py").write_text(
        "from fedloom.twice import twice\n"
        "def test_two(): assert twice(2) == 4\n"
        "def test_zero(): assert twice(0) == 0\n"
        "def test_wrong(): assert twice(2) == 5\n"
    )
    return tmp_path


def test_every_entry_applies_and_names_tests_that_exist():
    assert not faults(entries())


def test_the_runner_tells_noticed_from_survived_and_broken(fake):
    mutants = [
        DOUBLES,
        replace(DOUBLES, name="survives", tests=("tests/test_twice.py::test_zero",)),
        replace(DOUBLES, name="breaks", new="2 * x\nimport nowhere"),
    ]
    outcomes = run(mutants, root=fake, jobs=1)
    assert [o.fate for o in outcomes] == ["noticed", "survived", "broken"]
    assert (fake / "src/fedloom/twice.py").read_text().endswith("2 * x\n")


def test_tests_that_fail_without_an_error_stop_the_runner(fake):
    with pytest.raises(Unsound, match="test_wrong"):
        run([replace(DOUBLES, tests=("tests/test_twice.py::test_wrong",))], root=fake, jobs=1)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"old": "4 * x"}, "0 times"),
        ({"old": "x"}, "2 times"),
        ({"new": "2 * x"}, "'new' is 'old'"),
        ({"new": "2 *"}, "does not parse"),
        ({"file": "thrice.py"}, "no thrice.py"),
        ({"group": "other"}, "no group"),
        ({"tests": ("tests/test_twice.py::test_tw",)}, "no tests/test_twice.py::test_tw"),
        ({"tests": ()}, "no tests"),
    ],
)
def test_an_entry_that_does_not_fit_is_told(fake, change, said):
    assert not faults([DOUBLES], fake)
    (fault,) = faults([replace(DOUBLES, **change)], fake)
    assert said in fault


def test_a_name_is_given_once(fake):
    assert faults([DOUBLES, DOUBLES], fake) == ["doubles: the name is taken"]


@pytest.mark.parametrize(
    ("noticed", "survived", "group", "ok"),
    [(9, 1, "also", True), (8, 2, "also", False), (9, 1, "randomness", False)],
)
def test_nine_of_ten_must_be_noticed_and_all_of_the_strict_groups(noticed, survived, group, ok):
    mutant = replace(DOUBLES, group=group)
    seen = [Outcome(mutant, "noticed", 0.0)] * noticed
    assert enough(seen + [Outcome(mutant, "survived", 0.0)] * survived) == ok


def test_harmless_errors_must_survive_and_do_not_count():
    noticed, harmless = Outcome(DOUBLES, "noticed", 0.0), replace(DOUBLES, harmless="no effect")
    assert enough([noticed] + [Outcome(harmless, "survived", 0.0)] * 5)
    assert not enough([noticed] * 20 + [Outcome(harmless, "noticed", 0.0)])
    assert not enough([noticed] * 20 + [Outcome(DOUBLES, "broken", 0.0)])


def test_a_name_that_is_not_on_the_list_is_told(capsys):
    assert main(["no-such-*"]) == 2
    assert "--list" in capsys.readouterr().out
