"""Clients for serve_load.py: what they ask, over which protocol, and many of them at once."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import queue
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import psutil
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from pi05_ros.client import ActionClient, ServerRefusal, ServerUnavailable
from pi05_ros.errors import Pi05Error
from pi05_ros.server.codec import pack, unpack

PATIENCE = 120.0  # s, for processes to start, and for a reply in a crowd
PROCESSES = 4
PROTOCOLS = ("realtime", "http", "openpi")
PROMPT = "pick up the cube and hand it over"
SIZE = (224, 224)
CLOSER = 0.1


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Server:
    url: str
    token: str
    pid: int | None  # None: of somebody else

    def memory(self) -> float | None:
        """MiB that are resident."""
        return None if self.pid is None else psutil.Process(self.pid).memory_info().rss / 2**20


@dataclass(frozen=True)
class Task:
    """What the server wants to be asked."""

    model: str
    device: str
    cameras: tuple[str, ...]
    state_dim: int
    noise_shape: tuple[int, int]

    @classmethod
    def of(cls, server: Server) -> Task:
        with ActionClient(server.url, server.token) as client:
            found = client.metadata()
        output = found["output"]
        shape = (output["action_horizon"], output["padded_action_dim"])
        return cls(
            found["model"],
            found["runtime"]["device"],
            tuple(found["input"]["image_keys"]),
            found["input"]["state_dim"],
            shape,
        )

    def observation(self, number: int, size: tuple[int, int] = SIZE, jpeg: bool = False) -> dict[str, Any]:
        """Of client ``number``, always the same: images, state, noise."""
        random = np.random.default_rng(number)
        images = {camera: _image(random, size) for camera in self.cameras}
        return {
            "images": {camera: _jpeg(image) for camera, image in images.items()} if jpeg else images,
            "state": random.uniform(-0.5, 0.5, self.state_dim).astype(np.float32),
            "noise": random.standard_normal(self.noise_shape, dtype=np.float32),
        }


def _image(random: np.random.Generator, size: tuple[int, int]) -> np.ndarray:
    """uint8 [height, width, 3]: coarse squares, so that a JPEG of it has the size of a camera's."""
    coarse = random.integers(0, 256, (size[0] // 16, size[1] // 16, 3), dtype=np.uint8)
    return np.kron(coarse, np.ones((16, 16, 1), np.uint8))


def _jpeg(image: np.ndarray) -> bytes:
    import cv2

    return cv2.imencode(".jpg", image[..., ::-1])[1].tobytes()


class Caller(Protocol):
    def __call__(self, observation: dict[str, Any]) -> tuple[np.ndarray, float]:
        """The chunk, and the engine's milliseconds for it."""


@contextlib.contextmanager
def caller(server: Server, protocol: str) -> Iterator[Caller]:
    if protocol == "openpi":
        headers = {"Authorization": f"Api-Key {server.token}"} if server.token else None
        address = server.url.replace("http", "ws", 1) + "/openpi/policy"
        with connect(address, compression=None, max_size=None, proxy=None, additional_headers=headers) as socket:
            socket.recv(PATIENCE)

            def ask(observation: dict[str, Any]) -> tuple[np.ndarray, float]:
                try:
                    socket.send(pack({**observation, "prompt": PROMPT, "enable_prefix_cache": False}))
                    data = socket.recv(PATIENCE)
                except ConnectionClosed as error:
                    raise ServerUnavailable(f"The connection broke: {error}") from error
                if isinstance(data, str):
                    raise ServerRefusal(None, "", "", data)
                reply = unpack(data)
                return reply["actions"], reply["timings"]["total_ms"]

            yield ask
        return
    with ActionClient(server.url, server.token, transport=protocol, timeout=PATIENCE) as client:

        def infer(observation: dict[str, Any]) -> tuple[np.ndarray, float]:
            found = client.infer(prompt=PROMPT, prefix_cache=False, **observation)
            return found.actions, found.timings["total_ms"]

        yield infer


# --- many of them ---


@dataclass
class Account:
    """What a client experienced. ms: by answered request. errors: sentences."""

    protocol: str
    ms: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    lost: int = 0
    crossed: int = 0


@dataclass(frozen=True)
class Crowd:
    """memory: of the server in MiB: at first, after a quarter of the time, in the end; empty if it cannot be known."""

    seconds: float
    accounts: list[Account]
    memory: list[float]

    def total(self, name: str) -> int:
        counts = (getattr(account, name) for account in self.accounts)
        return sum(count if isinstance(count, int) else len(count) for count in counts)

    @property
    def rate(self) -> float:
        """Answers a second."""
        return self.total("ms") / self.seconds

    @property
    def means(self) -> list[float]:
        """Milliseconds by client, fastest first; a client without any answer waited for ever."""
        return sorted(float(np.mean(account.ms)) if account.ms else float("inf") for account in self.accounts)


def alone(server: Server, task: Task, clients: int) -> np.ndarray:
    """float32 [clients, horizon, action_dim]: the chunk of each, inferred by itself."""
    with caller(server, "realtime") as call:
        return np.stack([call(task.observation(number))[0] for number in range(clients)])


def crowd(server: Server, task: Task, expected: np.ndarray, seconds: float, protocols: Sequence[str]) -> Crowd:
    clients = len(expected)
    say(f"{clients} clients for {seconds:g} s ...")
    context = multiprocessing.get_context("spawn")  # no state of this process, and no threads
    shares = [range(clients)[first::PROCESSES] for first in range(min(PROCESSES, clients))]
    start, results = context.Barrier(len(shares) + 1), context.Queue()
    processes = [
        context.Process(
            target=work, args=(server, task, expected, share, seconds, protocols, start, results), daemon=True
        )
        for share in shares
    ]
    for process in processes:
        process.start()
    try:
        start.wait(PATIENCE)
        began = time.monotonic()
        memory = [server.memory()]
        time.sleep(seconds / 4)
        memory.append(server.memory())
        accounts = list(itertools.chain.from_iterable(results.get(timeout=seconds + PATIENCE) for _ in processes))
        took = time.monotonic() - began
        memory.append(server.memory())
    except (threading.BrokenBarrierError, queue.Empty, psutil.Error) as error:
        raise Pi05Error("A process of clients ended early; what it wrote stands above.") from error
    finally:
        for process in processes:
            process.join(5.0)
            process.kill()
    return Crowd(took, accounts, [one for one in memory if one is not None])


def work(
    server: Server,
    task: Task,
    expected: np.ndarray,
    share: Sequence[int],
    seconds: float,
    protocols: Sequence[str],
    start: Any,
    results: Any,
) -> None:
    """A process with some of the clients, a thread for each."""
    accounts = [Account(protocols[number % len(protocols)]) for number in share]
    with contextlib.ExitStack() as stack:
        try:
            calls = [stack.enter_context(caller(server, account.protocol)) for account in accounts]
            observations = [task.observation(number) for number in share]
            start.wait(PATIENCE)
        except BaseException:
            start.abort()  # the others would wait for this one
            raise
        end = time.monotonic() + seconds
        threads = [
            threading.Thread(target=ask_until, args=(end, call, observation, expected, number, account))
            for call, observation, number, account in zip(calls, observations, share, accounts, strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    results.put(accounts)


def ask_until(
    end: float, call: Caller, observation: dict[str, Any], expected: np.ndarray, number: int, account: Account
) -> None:
    """One client, request after request. end: time.monotonic()."""
    others = np.delete(expected, number, axis=0)
    apart = min((float(np.linalg.norm(other - expected[number])) for other in others), default=float("inf"))
    while (began := time.monotonic()) < end:
        try:
            actions, _ = call(observation)
        except Exception as error:
            account.errors.append(f"{account.protocol}: {error or type(error).__name__}")
            if not isinstance(
                error, ServerRefusal
            ):  # OpenPI's protocol has no ids: a late reply would pass for the next
                account.lost += 1
                return
        else:
            account.ms.append((time.monotonic() - began) * 1e3)
            account.crossed += not np.linalg.norm(actions - expected[number]) < CLOSER * apart
