"""SIGTERM is a notice where the script has no handler of its own, and ends the process where there is no notice."""

import os
import signal
import threading

import pytest

from ring_plugins.core.members.preemption_notice import PreemptionNotice


@pytest.fixture(autouse=True)
def handler():
    """SIGTERM's handler, as Python sets it."""
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, before)


def test_the_first_signal_is_noted_and_the_second_ends_the_process():
    child = os.fork()
    if not child:
        notice = PreemptionNotice()
        notice.install()
        os.kill(os.getpid(), signal.SIGTERM)
        if not notice.given:
            os._exit(1)
        os.kill(os.getpid(), signal.SIGTERM)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM


def test_a_forked_child_is_ended_by_its_first_signal():
    notice = PreemptionNotice()
    notice.install()
    child = os.fork()
    if not child:
        os.kill(os.getpid(), signal.SIGTERM)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
    assert not notice.given
    notice.close()


def test_a_handler_of_the_script_stays():
    def own(*_):
        pass

    signal.signal(signal.SIGTERM, own)
    notice = PreemptionNotice()
    notice.install()
    notice.close()
    assert signal.getsignal(signal.SIGTERM) is own and not notice.is_installed


def test_a_handler_that_the_script_sets_later_stays():
    def own(*_):
        pass

    notice = PreemptionNotice()
    notice.install()
    signal.signal(signal.SIGTERM, own)
    notice.close()
    assert signal.getsignal(signal.SIGTERM) is own


def test_a_thread_installs_nothing():
    notice = PreemptionNotice()
    thread = threading.Thread(target=notice.install)
    thread.start()
    thread.join()
    assert not notice.is_installed and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_the_signal_ends_the_process_again_after_close():
    notice = PreemptionNotice()
    notice.install()
    notice.close()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
