"""Who may come in."""

from __future__ import annotations

import logging
import socket
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import urllib3
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from pi05_ros.errors import Pi05Error
from pi05_ros.policy import Policy
from pi05_ros.server.access import read_token
from pi05_ros.server.codec import unpack
from pi05_ros.server.host import PolicyHost
from pi05_ros.server.sidecar import ServerSettings, Sidecar
from server.serving import GENERATIONS, answer, flat, post, serving

TOKEN = "a secret of some length"
GUARDED = ("/v1/actions/metadata", "/metrics", "/openapi.json", "/status/snapshot")


@pytest.fixture(scope="module")
def guarded(policy: Policy) -> Iterator[str]:
    with serving(policy, token=TOKEN) as sidecar:
        yield sidecar.url


@pytest.fixture(scope="module")
def open_url(policy: Policy) -> Iterator[str]:
    with serving(policy, origins=("https://lab.example",)) as sidecar:
        yield sidecar.url


def get(url: str, **headers: str) -> urllib3.BaseHTTPResponse:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return urllib3.request("GET", url, headers=named, retries=False, timeout=10.0)


@pytest.mark.parametrize(
    "given", ["", "Bearer wrong", TOKEN, f"Basic {TOKEN}", "Bearer", f"Bearer {TOKEN}x", "Bearer \xff"]
)
def test_without_the_token_nothing_is_told(guarded: str, given: str) -> None:
    headers = {"Authorization": given} if given else {}
    for path in GUARDED:
        response = get(guarded + path, **headers)
        assert (response.status, response.json()["error"]["code"]) == (401, "unauthorized")
        assert response.headers["WWW-Authenticate"] == "Bearer"
    assert post(guarded + GENERATIONS, flat(), headers=headers).status == 401
    for path in ("/v1/actions/realtime", "/openpi/policy", "/"):
        with pytest.raises(InvalidStatus) as caught:
            connect(guarded.replace("http", "ws") + path, additional_headers=headers)
        assert caught.value.response.status_code == 401
        assert b"token is needed" in caught.value.response.body


@pytest.mark.parametrize("kind", ["Bearer", "bearer", "Api-Key"])
def test_with_it_everything_answers(guarded: str, kind: str) -> None:
    headers = {"Authorization": f"{kind} {TOKEN}"}
    assert {get(guarded + path, **headers).status for path in GUARDED} == {200}
    assert post(guarded + GENERATIONS, flat(), headers=headers).status == 200
    with connect(guarded.replace("http", "ws"), additional_headers=headers) as socket_:
        assert unpack(socket_.recv())["object"] == "action.metadata"


def test_a_token_may_be_any_text(policy: Policy) -> None:
    token = "Schlüssel für alle"
    with serving(policy, token=token) as sidecar:
        for given, status in ((token, 200), (token.replace("ü", "u"), 401)):
            with socket.create_connection(("127.0.0.1", urllib3.util.parse_url(sidecar.url).port)) as raw:
                request = f"GET /metrics HTTP/1.0\r\nHost: localhost\r\nAuthorization: Bearer {given}\r\n\r\n"
                raw.sendall(request.encode())
                assert raw.makefile("rb").readline().split()[1] == str(status).encode()


@pytest.mark.parametrize("path", ["/", "/docs", "/healthz", "/readyz"])
def test_what_tells_nothing_needs_no_token(guarded: str, path: str) -> None:
    assert get(guarded + path).status == 200


def test_pages_of_others_may_not_call(open_url: str) -> None:
    address = open_url.removeprefix("http://")
    for origin, status in (
        ("https://evil.example", 403),
        ("null", 403),
        ("http://[", 403),
        ("https://lab.example", 200),
        (open_url, 200),
    ):
        assert get(open_url + "/v1/actions/metadata", Origin=origin).status == status
        assert post(open_url + GENERATIONS, flat(), headers={"Origin": origin}).status == status
    with pytest.raises(InvalidStatus) as caught:
        connect(f"ws://{address}/v1/actions/realtime", origin="https://evil.example")
    assert caught.value.response.status_code == 403
    with connect(f"ws://{address}/v1/actions/realtime", origin="https://lab.example") as socket_:
        socket_.recv()


@pytest.mark.parametrize("origin", ["lab.example", "https://lab.example/", "https://Lab.example", "https://", "*", ""])
def test_an_origin_that_no_browser_sends_is_said_at_once(origin: str) -> None:
    with pytest.raises(Pi05Error, match="origins: expected"):
        Sidecar(PolicyHost(), ServerSettings(port=0, origins=("http://127.0.0.1:3000", origin)))


def test_no_reply_lets_other_origins_read_it(open_url: str) -> None:
    response = get(open_url + "/v1/actions/metadata", Origin="https://lab.example")
    assert not [name for name in response.headers if name.lower().startswith("access-control")]


@pytest.mark.parametrize("name", ["evil.example", "evil.example:8000", "", "127.0.0.1.evil.example", "[", "[x]"])
def test_a_name_that_was_made_to_point_here_is_refused(open_url: str, name: str) -> None:
    assert get(open_url + "/status/snapshot", Host=name).status == 403


@pytest.mark.parametrize("name", ["localhost:80", "127.0.0.1", "[::1]:8000", "robot.localhost"])
def test_names_of_this_machine_are_fine(open_url: str, name: str) -> None:
    assert get(open_url + "/healthz", Host=name).status == 200


def test_too_many_connections_are_told_to_come_back(policy: Policy) -> None:
    with serving(policy, limits={"connections": 2}) as sidecar:
        url = sidecar.url.replace("http", "ws")
        with connect(url) as first, connect(url) as second:
            first.recv(), second.recv()
            response = post(sidecar.url + GENERATIONS, flat())
            assert (response.status, response.json()["error"]["code"]) == (503, "busy")
            assert int(response.headers["Retry-After"]) > 0
            assert get(sidecar.url + "/healthz").status == 200, "who watches over it is let in"
            with pytest.raises(InvalidStatus):
                connect(url)
        for _ in range(100):  # a place is free when the server has seen a socket close
            if (status := post(sidecar.url + GENERATIONS, flat()).status) == 200:
                break
        assert status == 200


def test_a_port_that_is_taken_is_said_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(Pi05Error, match=f"cannot listen on 127.0.0.1, port {port}: .*in use"):
            Sidecar(PolicyHost(), ServerSettings(port=port))


@pytest.mark.parametrize(("host", "port"), [("no.such.host.invalid", 0), ("127.0.0.1", 70000), ("192.0.2.1", 0)])
def test_an_address_that_cannot_be_is_said_at_once(host: str, port: int) -> None:
    with pytest.raises(Pi05Error, match="cannot listen on"):
        Sidecar(PolicyHost(), ServerSettings(host=host, port=port))


@pytest.mark.parametrize(
    ("host", "token", "warns"), [("0.0.0.0", "", True), ("0.0.0.0", "x", False), ("127.0.0.1", "", False)]
)
def test_an_open_door_is_warned_of(host: str, token: str, warns: bool, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        Sidecar(PolicyHost(), ServerSettings(host=host, port=0, token=token)).close()
    assert ("without a token" in caplog.text) is warns


def test_the_token_is_not_shown() -> None:
    assert TOKEN not in repr(ServerSettings(token=TOKEN))


def test_where_a_token_comes_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "token"
    file.write_text(f"{TOKEN}\n")
    monkeypatch.setenv("PI05_ROS_TOKEN", "of the environment")
    assert read_token(file, "--token-file") == TOKEN
    assert read_token("", "--token-file") == "of the environment"
    file.write_text("\n")
    for wrong in (file, tmp_path / "none"):
        with pytest.raises(Pi05Error, match=f"http_token_file: {wrong}"):
            read_token(wrong, "http_token_file")


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("tls")
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True)
    return certificate, key


def test_tls(policy: Policy, certificate: tuple[Path, Path]) -> None:
    with serving(policy, certificate=str(certificate[0]), key=str(certificate[1])) as sidecar:
        assert sidecar.url.startswith("https://")
        with urllib3.PoolManager(ca_certs=str(certificate[0])) as trusting:
            reply = trusting.request("GET", sidecar.url + "/v1/actions/metadata")
            assert answer(reply)["status"] == "ready"
        context = ssl.create_default_context(cafile=str(certificate[0]))
        with connect(sidecar.url.replace("https", "wss"), ssl=context) as socket_:
            assert unpack(socket_.recv())["status"] == "ready"


def test_tls_files_that_do_not_fit_are_said_at_once(certificate: tuple[Path, Path], tmp_path: Path) -> None:
    other = tmp_path / "other.pem"
    other.write_text("no key")
    for files in ((str(certificate[0]), ""), (str(certificate[0]), str(other)), ("/none", str(certificate[1]))):
        with pytest.raises(Pi05Error, match=r"certificate|key"):
            Sidecar(PolicyHost(), ServerSettings(port=0, certificate=files[0], key=files[1]))
