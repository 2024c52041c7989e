"""The events of the status page, spoken to as uvicorn does, and the page's own files."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import anyio
import pytest
from starlette.applications import Starlette

from pi05_ros.policy import Policy
from pi05_ros.server import status
from pi05_ros.server.errors import RequestError
from pi05_ros.server.host import PolicyHost
from pi05_ros.server.limits import Limits
from pi05_ros.server.monitor import Monitor
from pi05_ros.server.status import page_files, status_routes
from server.serving import observation


@pytest.fixture
def host(policy: Policy) -> PolicyHost:
    host = PolicyHost()
    host.serve(policy)
    return host


@pytest.fixture
def monitor(host: PolicyHost) -> Monitor:
    return Monitor(host)


class Reader:
    """One client of /status/events. reads: False for one that takes nothing any more."""

    def __init__(self, app: Starlette, reads: bool = True) -> None:
        self.app, self.reads = app, reads
        self.said: list[bytes] = []
        self.changed = asyncio.Condition()
        self.gone = asyncio.Event()
        self.ended = False

    async def run(self) -> None:
        scope = {"type": "http", "method": "GET", "path": "/status/events", "query_string": b"", "headers": []}
        await self.app(scope, self._receive, self._send)

    async def _receive(self) -> dict[str, Any]:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        if not self.reads and message["type"] == "http.response.body":
            await asyncio.Event().wait()
        async with self.changed:
            self.ended = message.get("more_body") is False
            self.said.append(message.get("body", b""))
            self.changed.notify_all()

    async def event(self, holds: Any) -> dict[str, Any]:
        """The first event for which that is true."""
        async with self.changed:
            while True:
                for text in self.said:
                    if text.startswith(b"data: ") and holds(event := json.loads(text[6:])):
                        return event
                await self.changed.wait()

    async def says(self, text: bytes) -> None:
        async with self.changed:
            await self.changed.wait_for(lambda: text in self.said)


def told(test: Any) -> None:
    """Run it; what never comes fails it."""

    async def bounded() -> None:
        with anyio.fail_after(30):
            await test()

    asyncio.run(bounded())


def test_events_follow_what_happens_and_are_made_once_for_all(monitor: Monitor, policy: Policy) -> None:
    app = Starlette(routes=status_routes(monitor))

    async def follow() -> None:
        readers = [Reader(app) for _ in range(5)]
        async with anyio.create_task_group() as group:
            for reader in readers:
                group.start_soon(reader.run)
            for reader in readers:
                await reader.event(lambda event: event["last"] is None)
            policy.submit(observation())
            events = [await reader.event(lambda event: event["counts"]["answered"] == 1) for reader in readers]
            assert len({event["now"] for event in events}) == 1
            monitor.close()
        assert all(reader.ended for reader in readers)

    told(follow)


@pytest.mark.parametrize("how", ["monitor", "host"])
def test_a_server_that_closes_ends_its_events(monitor: Monitor, host: PolicyHost, how: str) -> None:
    async def follow() -> None:
        reader = Reader(Starlette(routes=status_routes(monitor)))
        async with anyio.create_task_group() as group:
            group.start_soon(reader.run)
            await reader.event(lambda event: True)
            monitor.close() if how == "monitor" else host.tell("closed")

    told(follow)


def test_a_reader_that_leaves_is_forgotten(monitor: Monitor) -> None:
    async def follow() -> None:
        reader = Reader(Starlette(routes=status_routes(monitor)))
        async with anyio.create_task_group() as group:
            group.start_soon(reader.run)
            await reader.event(lambda event: True)
            reader.gone.set()

    told(follow)


def test_a_reader_that_does_not_read_is_let_go_and_no_other_waits_for_it(monitor: Monitor) -> None:
    app = Starlette(routes=status_routes(monitor, replace(Limits(), send_seconds=0.1)))

    async def follow() -> None:
        await Reader(app, reads=False).run()

    told(follow)


def test_a_connection_without_news_says_that_it_lives(monitor: Monitor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "SIGN_OF_LIFE", 0.0)

    async def follow() -> None:
        reader = Reader(Starlette(routes=status_routes(monitor)))
        async with anyio.create_task_group() as group:
            group.start_soon(reader.run)
            await reader.says(b": nothing new\n\n")
            reader.gone.set()

    told(follow)


def test_the_page_needs_nothing_from_elsewhere_and_puts_text_in_as_text() -> None:
    files = page_files()
    assert {"/", "/docs", "/page/page.js", "/page/style.css"} <= set(files)
    for path, file in files.items():
        text = file.read_text()
        assert "://" not in text.replace("http://www.w3.org/2000/svg", ""), path
        for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "onclick=", "style="):
            assert word not in text, f"{path}: {word}"


def test_however_much_changes_only_so_much_is_serialised(monitor: Monitor, monkeypatch: pytest.MonkeyPatch) -> None:
    async def follow() -> None:
        monkeypatch.setattr(status, "PERIOD", 1e6)
        events = status._Events(monitor, 10.0)
        first, _ = await events.newest()
        monitor.refused("/openpi/policy", RequestError(503, "busy"))
        assert (await events.newest())[0] == first, "too early"
        monkeypatch.setattr(status, "PERIOD", 0.0)
        assert (await events.newest())[0] == first + 1
        assert (await events.newest())[0] == first + 1, "nothing has changed"

    told(follow)
