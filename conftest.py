import pytest


@pytest.fixture(autouse=True)
def _examples_run_in_a_directory_of_their_own(request, tmp_path, monkeypatch):
    if isinstance(request.node, pytest.DoctestItem):
        monkeypatch.chdir(tmp_path)


@pytest.fixture(autouse=True, scope="session")
def _no_test_writes_to_the_users_home(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDLOOM_STATE", str(tmp_path_factory.mktemp("state")))
        yield
