"""Stages of an inference recorded as CUDA graphs."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

_ONE_AT_A_TIME = threading.Lock()
"""PyTorch records one graph at a time in a process."""


class RecordingError(RuntimeError):
    """A stage could not be recorded. PyTorch's allocator may be left such that nothing can be any more."""


class Recorder:
    """Records for one path. What its graphs allocate lies in one pool: they never run at the same time.

    It records on a stream of its own: the libraries' workspaces of that stream lie in the pool as well, where nobody
    else's memory ever comes to lie.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    def record(self, stage: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Run a stage as it is, which compiles kernels and lets libraries make up their minds, then record it.

        The stage must not use its inputs up, so that a replay finds them as they were. Other threads may launch work
        meanwhile ("thread_local"); one that synchronises the whole device can spoil the recording.
        Raises RecordingError; or what the stage itself raises.
        """
        stage()
        torch.cuda.current_stream(self._device).synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            with (
                _ONE_AT_A_TIME,
                torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"),
            ):
                stage()
        except Exception as error:
            raise RecordingError(f"The stage ran, but could not be recorded as a CUDA graph: {error}") from error
        return graph
