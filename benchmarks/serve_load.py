"""What does the server cost, and does it keep its clients apart? Figures and checks, on loopback.

    source ./env.sh
    python benchmarks/serve_load.py                      # a tiny checkpoint on the CPU; about two minutes
    python benchmarks/serve_load.py --checkpoint DIR --device cuda
    python benchmarks/serve_load.py --url http://127.0.0.1:8000    # a server that runs already

1. Overhead: one client; the time from its call to its chunk, less the engine's own total_ms of that chunk.
2. Throughput: one client against four, which the engine can batch.
3. A crowd: --clients at once for --seconds, over all three protocols, in processes of their own. Each has its own
   images, state and noise, and its chunk is known, for the server was asked for it alone before. A reply counts as
   crossed unless it is ten times closer to its own chunk than that is to any other client's.

The exit code is 1 if a reply was an error, lost or crossed; with --strict also if a figure misses its target.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from load_clients import PROTOCOLS, SIZE, Crowd, Server, Task, alone, caller, crowd, say

from pi05_ros.client import ActionClient, Timeout
from pi05_ros.errors import Pi05Error
from pi05_ros.tools.child_processes import ChildProcesses
from pi05_ros.tools.command_line import run

CAMERA_SIZE = (480, 640)
WARM_UP = 10  # requests
FIRST_BATCHES_SECONDS, THROUGHPUT_SECONDS = 3.0, 10.0  # at most
START = 600.0  # s, for a server to load, and on a GPU to warm up
BATCHED = 1.8  # four clients' chunks a second / one's, on a GPU
FAIR, FLAT = 2.0, 1.05  # slowest client's mean / fastest's; memory at the end / after a quarter of the time
PUBLISHED = [
    ["server", "hardware", "what", "ms", "source"],
    ["SGLang", "GB300", "msgpack HTTP, single; batch of 4, per request", "81.46; 32.55", "its PR 30633"],
    ["SGLang", "H200", "HTTP, served; engine alone, in another run", "47.71; 43.07", "its PR 34256"],
    ["vLLM-Omni", "RTX PRO 5000", "end to end; of it outside the model", "45.55; 4.25", "its optimised branch"],
    ["mstar", "not stated", "served, p50: single; batch of 4", "73; 119", "its authors"],
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="of a server that runs already (default: start one)")
    parser.add_argument("--token", default="", help="of that server")
    parser.add_argument("--checkpoint", type=Path, metavar="DIR", help="default: a tiny one is made")
    parser.add_argument("--robot", default="aloha_sim", help="profile (default: aloha_sim)")
    parser.add_argument("--device", default="cpu", help="auto, cuda or cpu (default: cpu)")
    parser.add_argument("--requests", type=int, default=200, metavar="N", help="for each overhead (default: 200)")
    parser.add_argument("--clients", type=int, default=64, metavar="N", help="in the crowd (default: 64)")
    parser.add_argument("--seconds", type=float, default=60.0, help="for which it asks (default: 60)")
    parser.add_argument("--strict", action="store_true", help="a missed target is an error, too")
    parser.add_argument("--markdown", action="store_true", help="print Markdown instead of text")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write everything to a JSON file")
    run(parser, measure)


def measure(options: argparse.Namespace) -> None:
    for name in ("requests", "clients", "seconds"):
        if getattr(options, name) <= 0:
            raise Pi05Error(f"--{name}: expected more than 0, got {getattr(options, name):g}.")
    with _server(options) as server:
        task = Task.of(server)
        few: list[Crowd] = []
        overheads = [overhead(server, task, row, options.requests) for row in ROWS]
        say(f"Asking for the chunks of {max(options.clients, 4)} clients, one by one ...")
        expected = alone(server, task, max(options.clients, 4))
        # The first of the three pays for what a GPU compiles and captures for batches.
        for number, most in ((4, FIRST_BATCHES_SECONDS), (1, THROUGHPUT_SECONDS), (4, THROUGHPUT_SECONDS)):
            few.append(crowd(server, task, expected[:number], min(options.seconds, most), ("http",)))
        many = crowd(server, task, expected[: options.clients], options.seconds, PROTOCOLS)
    report(options, task, overheads, few, many)


# --- the server ---


@contextlib.contextmanager
def _server(options: argparse.Namespace) -> Iterator[Server]:
    if options.url:
        yield Server(options.url, options.token, None)
        return
    with tempfile.TemporaryDirectory(prefix="pi05_serve_load_") as scratch:
        checkpoint = options.checkpoint
        if checkpoint is None:
            from pi05_ros.checkpoint import make_checkpoint

            checkpoint = make_checkpoint("tiny", Path(scratch) / "tiny")
        command = [sys.executable, "-m", "pi05_ros.tools.action_server", "--checkpoint", str(checkpoint), "--port", "0"]
        command += ["--robot", options.robot, "--device", options.device]
        with ChildProcesses(command, Path(scratch) / "action_server.log") as process:
            try:
                url = _wait_until_ready(process)
            except Pi05Error as error:
                words = "\n".join(f"  {line}" for line in process.last_lines(20))
                raise Pi05Error(f"{error} The server's last words:\n{words}") from error
            yield Server(url, "", process.pid)


def _wait_until_ready(process: ChildProcesses) -> str:
    """The server's address, which its log tells."""
    deadline = time.monotonic() + START
    while time.monotonic() < deadline:
        process.check_alive()
        found = re.search(r"Serving on (\S+)", "\n".join(process.last_lines(100)))
        if found is None:
            time.sleep(0.05)
            continue
        with ActionClient(found[1]) as client, contextlib.suppress(Timeout):
            client.wait_until_ready(1.0)
            return found[1]
    raise Pi05Error(f"The server is not ready after {START:g} s.")


# --- 1. one client ---


class Row(NamedTuple):
    """What is sent, and the target of the overhead's median in ms."""

    name: str
    protocol: str
    size: tuple[int, int]
    jpeg: bool
    target: float | None


ROWS = (
    Row("msgpack HTTP, 224x224", "http", SIZE, False, 3.0),
    Row("realtime websocket, 224x224", "realtime", SIZE, False, 2.0),
    Row("OpenPI websocket, 224x224", "openpi", SIZE, False, None),
    Row("msgpack HTTP, 640x480 JPEG", "http", CAMERA_SIZE, True, 10.0),
)


class Check(NamedTuple):
    """always: whether missing it is an error without --strict, too."""

    text: str
    met: bool
    always: bool


@dataclass(frozen=True)
class Overhead:
    """ms: by request, from call to chunk, less the engine's; engine: the median of that."""

    row: Row
    ms: list[float]
    engine: float

    @property
    def median(self) -> float:
        return float(np.median(self.ms))

    def line(self) -> list[str]:
        figures = (self.median, float(np.percentile(self.ms, 95)))
        target = "-" if self.row.target is None else f"{self.row.target:g}"
        return [self.row.name, *(f"{one:.2f}" for one in figures), str(len(self.ms)), f"{self.engine:.2f}", target]

    def checks(self) -> list[Check]:
        name, target = self.row.name, self.row.target
        if target is None:
            return []
        text = f"{name}: expected a median overhead under {target:g} ms, got {self.median:.2f}"
        return [Check(text, self.median < target, always=False)]


def overhead(server: Server, task: Task, row: Row, n: int) -> Overhead:
    say(f"Overhead of {row.name} ...")
    own, engine = [], []
    observations = [task.observation(number, row.size, row.jpeg) for number in range(WARM_UP)]
    with caller(server, row.protocol) as call:
        for number in range(-WARM_UP, n):
            began = time.perf_counter()
            _, total_ms = call(observations[number % WARM_UP])
            if number >= 0:
                own.append((time.perf_counter() - began) * 1e3 - total_ms)
                engine.append(total_ms)
    return Overhead(row, own, float(np.median(engine)))


# --- what came of it ---


def report(
    options: argparse.Namespace, task: Task, overheads: Sequence[Overhead], few: Sequence[Crowd], many: Crowd
) -> None:
    """Print the tables, write the JSON file. Raises Pi05Error, as the module says."""
    import torch

    from pi05_ros.tools.benchmark_table import draw, environment, rounded

    found = environment(torch.device("cpu" if options.url else task.device))
    checks = [check for one in overheads for check in one.checks()]
    checks += [check for crowd in (*few, many) for check in kept_apart(crowd)] + fair_and_flat(many)
    one, four = few[1:]
    if task.device != "cpu":  # whose cores have their hands full with one request
        times = four.rate / one.rate
        checks.append(
            Check(f"four clients: expected {BATCHED:g} times one's chunks, got {times:.2f}", times >= BATCHED, False)
        )
    size = f"{len(task.cameras)} cameras, chunks of {task.noise_shape[0]} rows"
    parts = [
        "\n".join(f"{'- ' if options.markdown else ''}{name}: {value}" for name, value in found.items()),
        f"{task.model} on {task.device}; {size}; prefix cache off; clients on the same machine.",
        "Overhead: from call to chunk, less the engine's own time. Milliseconds.",
        draw(
            [["one client", "median", "p95", "n", "engine", "target"], *(row.line() for row in overheads)],
            options.markdown,
        ),
        f"Throughput over HTTP: {one.rate:.1f} chunks a second to one client, {four.rate:.1f} to four: "
        f"{four.rate / one.rate:.2f} times.",
        draw(crowd_table(many), options.markdown),
        "Other servers, as published and not measured here; their times are whole answers of a full-size model:",
        draw(PUBLISHED, options.markdown),
    ]
    print("\n\n".join(parts))
    missed = [check.text for check in checks if not check.met]
    if options.json is not None:
        content = {
            "environment": found,
            "overhead": [one.row._asdict() | {"ms": one.ms, "engine": one.engine} for one in overheads],
            "throughput": [one.rate, four.rate],
            "crowd": asdict(many) | {"means": many.means, "rate": many.rate},
            "missed": missed,
        }
        options.json.write_text(json.dumps(rounded(content), indent=1) + "\n", encoding="utf-8")
    failed = [check.text for check in checks if not check.met and (options.strict or check.always)]
    if failed:
        errors = [error for one in (*few, many) for account in one.accounts for error in account.errors]
        raise Pi05Error("; ".join([*failed, *errors[:3]]) + ".")


def kept_apart(crowd: Crowd) -> list[Check]:
    counts = {name: crowd.total(name) for name in ("errors", "lost", "crossed")}
    who = f"{len(crowd.accounts)} client(s)"
    checks = [Check(f"{who}: expected 0 {name}, got {count}", count == 0, True) for name, count in counts.items()]
    silent = sum(not account.ms for account in crowd.accounts)
    return [*checks, Check(f"{who}: expected answers for each, {silent} had none", silent == 0, True)]


def fair_and_flat(crowd: Crowd) -> list[Check]:
    unfair = crowd.means[-1] / crowd.means[0]
    checks = [
        Check(f"slowest client's mean: expected {FAIR:g} times the fastest's, got {unfair:.2f}", unfair <= FAIR, False)
    ]
    if crowd.memory:
        grown = crowd.memory[-1] / crowd.memory[1]
        text = f"memory: expected {FLAT:g} times that after a quarter of the time, got {grown:.3f}"
        checks.append(Check(text, grown <= FLAT, False))
    return checks


def crowd_table(crowd: Crowd) -> list[list[str]]:
    fastest, slowest = crowd.means[0], crowd.means[-1]
    memory = " / ".join(f"{one:.0f}" for one in crowd.memory) or "unknown, not our process"
    return [
        [f"{len(crowd.accounts)} clients, {crowd.seconds:.0f} s, over {', '.join(PROTOCOLS)}", ""],
        ["answers; a second", f"{crowd.total('ms')}; {crowd.rate:.1f}"],
        ["errors; lost; crossed", "; ".join(str(crowd.total(name)) for name in ("errors", "lost", "crossed"))],
        [
            "mean of the fastest and the slowest client, ms; ratio",
            f"{fastest:.0f}, {slowest:.0f}; {slowest / fastest:.2f}",
        ],
        ["server's resident memory, MiB: first / a quarter in / last", memory],
    ]


if __name__ == "__main__":
    main()
