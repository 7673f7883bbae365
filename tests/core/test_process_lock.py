"""A process that was forked while another thread was fusing a model can fuse one itself."""

import os
import threading
import time
import traceback

import pytest
from support.kernels import NormKernel
from support.managers import manager_of
from support.models import Toy

from fuseplug.patching.replacement import _making
from fuseplug_verify import ProcessLock, neutral, rebind

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
PATIENCE = 60


def exit_code(child):
    """The exit code of *child*, run in a fork of this process; -1 if it does not end."""
    number = os.fork()
    if number == 0:
        try:
            child()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    for _ in range(PATIENCE * 10):
        done, status = os.waitpid(number, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.1)
    os.kill(number, 9)
    os.waitpid(number, 0)
    return -1


@pytest.fixture
def held():
    """A function that makes another thread hold a context until the test is over."""
    over, threads = threading.Event(), []

    def hold(context):
        inside = threading.Event()

        def run():
            with context:
                inside.set()
                over.wait()

        threads.append(threading.Thread(target=run))
        threads[-1].start()
        assert inside.wait(PATIENCE)

    yield hold
    over.set()
    for each in threads:
        each.join()


@pytest.mark.parametrize(
    "context",
    [neutral, lambda: _making, lambda: rebind._lock],
    ids=["planning", "making", "copying"],
)
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_does_not_wait_for_a_thread_that_it_has_not(held, context):
    manager = manager_of(NormKernel)
    manager.apply_all(Toy())  # so that the fork does not import or compile anything for the first time
    held(context())

    def child():
        applied = manager.apply_all(Toy())
        assert len(applied.report.fused) == 5
        applied.undo()

    assert exit_code(child) == 0


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_what_the_forking_thread_holds_it_still_holds():
    lock = ProcessLock()

    def child():
        with lock:
            pass
        taken = []

        def take():
            with lock:
                taken.append(1)

        threading.Thread(target=take, daemon=True).start()
        time.sleep(0.2)
        assert not taken

    with lock:
        assert exit_code(child) == 0
