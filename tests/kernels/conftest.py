"""What files of kernels share."""

from __future__ import annotations

from pathlib import Path

import pytest
from implementations import implementation as implementation
from implementations import new_memory_is_nan as new_memory_is_nan
from interpreter import pytest_pyfunc_call as pytest_pyfunc_call
from native_kernels import build_emulated


@pytest.fixture(scope="session")
def emulated_amx(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The kernels for AMX with emulated tiles, which take longer to build than all their tests."""
    return build_emulated(tmp_path_factory.mktemp("amx"))
