"""What must go out once a second also while the executor is busy: a configure keeps it for as long as weights load."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from pi05_ros.robot.ticks import ticks


class Heartbeat:
    """Calls ``beat`` once a period, of a steady clock, on a thread of its own, until it is stopped."""

    def __init__(self, period: float, beat: Callable[[], None]) -> None:
        """period in seconds. beat must not raise."""
        self._period, self._beat = period, beat
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pi05-heartbeat", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """The last beat has ended when this returns. Idempotent; not for ``beat`` itself."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        for _ in ticks(self._period, time.monotonic, self._stop, simulated=False):
            self._beat()
