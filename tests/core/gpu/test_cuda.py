"""The calls of the CUDA driver, on the stand-in."""

import threading

import pytest

from ring_plugins.core.base.errors import DeviceError
from ring_plugins.core.gpu.cuda import Driver
from tests.gpu_stand_in import StandInDriver


@pytest.fixture
def driver():
    return Driver(StandInDriver(card="0000:5e:00.0", devices=1))


def test_a_gpu_that_is_not_there_is_named(driver):
    assert driver.bus_id(0) == "0000:5e:00.0"
    with pytest.raises(DeviceError, match="there is no GPU 1: this process sees 1"):
        driver.bus_id(1)


def test_communicators_share_one_stream_per_gpu(driver):
    assert driver.stream(0) == driver.stream(0)
    assert driver.new_stream(0) != driver.stream(0)


def test_a_device_is_current_only_inside_its_context():
    library = StandInDriver()
    driver = Driver(library)
    with driver.device(0):
        library.in_context()
    with pytest.raises(AssertionError):
        library.in_context()


def test_an_event_passes_after_the_work_before_it():
    library, gate = StandInDriver(), threading.Event()
    driver = Driver(library)
    with driver.device(0):
        first, second = driver.new_stream(0), driver.new_stream(0)
        library.streams[first].work.put(gate.wait)
        driver.wait_event(second, driver.record_event(first))
        event = driver.record_event(second)
        assert not driver.query_event(event)
        gate.set()
        library.streams[first].drain()
        library.streams[second].drain()
        assert driver.query_event(event)
