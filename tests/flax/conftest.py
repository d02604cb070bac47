import pytest

from tests.flax.libraries import LIBRARIES


@pytest.fixture(scope="module", params=LIBRARIES.values(), ids=LIBRARIES)
def library(request):
    """Linen, then NNX."""
    return request.param
