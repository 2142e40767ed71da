"""The first error of a device."""

from __future__ import annotations

import threading

import pytest

from gapless.base.errors import DeviceError
from gapless.device.fault import Fault


def test_a_fault_wakes_without_its_lock_so_that_others_may_set_it_meanwhile():
    fault, stuck = Fault(), []

    def wake() -> None:
        other = threading.Thread(target=fault.set, args=(ValueError("later"), "another stream"), daemon=True)
        other.start()
        other.join(5)
        stuck.append(other.is_alive())

    fault.wakes(wake)
    fault.set(RuntimeError("first"), "stream 'compute'")
    assert stuck == [False]
    with pytest.raises(DeviceError, match="stream 'compute': RuntimeError: first"):
        fault.check()
    fault.block(threading.Event())
