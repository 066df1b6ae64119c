"""A thread starts later where the machine has none left for a moment, and ends nothing."""

from __future__ import annotations

from tests.processes import run_python

# Where memory for their stacks is limited, a process can't have many threads, whoever runs it.
WITHOUT_THREADS = """
import resource, threading
from cerebro_hydra import threads

pages = int(open("/proc/self/statm").read().split()[0])
most = pages * resource.getpagesize() + (1 << 30)
resource.setrlimit(resource.RLIMIT_AS, (most, resource.RLIM_INFINITY))
executor, release, hung = threads.own_thread("journal"), threading.Event(), []
try:
    while True:
        hung.append(threading.Thread(target=release.wait, daemon=True))
        hung[-1].start()
except RuntimeError:
    hung.pop()
assert executor.submit(int).result() == 0, "it is there already"
threads.time.sleep = lambda seconds: release.set() or [each.join() for each in hung]
late = threading.Thread(target=print, args=("it ran",))
threads.start(late)
late.join()
"""


def test_a_thread_waits_for_its_turn_and_one_that_is_there_needs_none() -> None:
    assert run_python("-c", WITHOUT_THREADS).stdout == "it ran\n"
