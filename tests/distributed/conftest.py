import pytest

from tests.examples.conftest import compiled_once  # noqa: F401 (a fixture)


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    file = tmp_path_factory.mktemp("text") / "a.txt"
    file.write_text("".join(f"{n * n % 7919} low bits of a block\n" for n in range(4000)))
    return file
