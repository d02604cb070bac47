import pytest

from tests.scripts.stand_ins import make_repository


@pytest.fixture
def repository(tmp_path):
    return make_repository(tmp_path)
