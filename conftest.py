import pytest


@pytest.fixture(autouse=True)
def _examples_run_in_a_directory_of_their_own(request, tmp_path, monkeypatch):
    if isinstance(request.node, pytest.DoctestItem):
        monkeypatch.chdir(tmp_path)
