"""The status page in a real browser, from a real server, with a real policy."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest
from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Page, Playwright, expect, sync_playwright
from websockets.sync.client import connect

from pi05_ros.policy import Policy
from pi05_ros.server import status
from pi05_ros.server.host import PolicyHost
from pi05_ros.server.openapi import openapi_document
from pi05_ros.server.sidecar import ServerSettings, Sidecar
from server.serving import CAMERAS, GENERATIONS, STATE, answer, flat, observation, post, serving

ATTACK = '<img src=x onerror="window.hurt=1"><script>window.hurt=1</script>'
FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update")
FLAGS += ("--disable-sync", "--no-first-run")

expect.set_options(timeout=20_000)  # two busy cores


def chromium(playwright: Playwright) -> str:
    """The path of a Chromium: the system's, else the one that playwright fetched."""
    found = (shutil.which(name) for name in ("chromium", "google-chrome"))
    path = next(filter(None, found), playwright.chromium.executable_path)
    if not Path(path).exists():
        pytest.fail(
            "There is no Chromium, which shows the status page to these tests. `make setup` brings one; by hand it is "
            "`apt-get install chromium` on Debian, `python -m playwright install --with-deps chromium` elsewhere.",
            pytrace=False,
        )
    return path


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(playwright), args=list(FLAGS))
        yield browser
        browser.close()


Serve = Callable[..., Sidecar]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """``serving``, until the test ends."""
    with ExitStack() as running:
        yield lambda *arguments, **options: running.enter_context(serving(*arguments, **options))


class Watch:
    """What a page may not do: complain, fail, or ask another host."""

    def __init__(self) -> None:
        self.complaints: list[str] = []
        self.hosts: set[str | None] = set()

    def over(self, context: BrowserContext) -> None:
        def heard(message: ConsoleMessage) -> None:
            if message.type in ("error", "warning"):
                self.complaints.append(message.text)

        context.on("console", heard)
        context.on("weberror", lambda error: self.complaints.append(str(error.error)))
        context.on("request", lambda request: self.hosts.add(urlsplit(request.url).hostname))


@pytest.fixture
def watch() -> Watch:
    return Watch()


@pytest.fixture
def page(browser: Browser, watch: Watch) -> Iterator[Page]:
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    watch.over(context)
    page = context.new_page()
    yield page
    context.close()
    assert watch.complaints == []
    assert watch.hosts - {None} == {"127.0.0.1"}, "nothing is asked of another host"


def test_an_inference_is_drawn(page: Page, serve: Serve, policy: Policy) -> None:
    policy.reset()
    page.goto(serve(policy).url)
    expect(page.locator("#stage")).to_have_text("ready")
    expect(page.locator("#link")).to_have_text("live")
    expect(page.locator("#nothing")).to_contain_text("Nothing has been inferred yet")
    expect(page.locator(".chunk")).to_be_hidden()
    chunk = policy.infer(observation(image_masks={"cam_left_wrist": False}), seed=1)
    expect(page.locator(".joint b").first).to_have_text("left_waist")
    names = page.locator(".joint b").all_text_contents()
    assert names == list(policy.binding.action_names)
    assert page.locator(".joint figcaption span").nth(6).text_content() == "0..1"
    lines = page.locator(".joint .line").evaluate_all("lines => lines.map(line => line.getAttribute('points'))")
    for index, line in enumerate(lines):
        drawn = np.array([point.split(",") for point in line.split()], dtype=float)
        joint = chunk.actions[:, index]
        assert np.allclose(np.diff(drawn[:, 0]), 4.0), "200 wide, 50 rows"
        assert np.corrcoef(drawn[:, 1], joint)[0, 1] == pytest.approx(-1.0, abs=1e-2), "y points down"
    assert page.locator(".joint .axis").first.text_content() == "01 s"
    expect(page.locator("#state p")).to_have_text([re.compile(rf"^{name}") for name in policy.binding.state_names])
    expect(page.locator("#state p").nth(1)).to_have_text("left_shoulder\u22120.96rad")
    expect(page.locator("#prompt")).to_have_text("“pick up the cube”")
    expect(page.locator("#nothing")).to_be_hidden()
    expect(page.locator("#latency tbody tr")).to_have_count(7)
    assert page.locator("#latency .denoise_ms.fill").get_attribute("d")
    expect(page.locator("#tiles")).to_contain_text("0 of 1")
    size = policy.checkpoint.config.vision.image_size
    picture = page.locator("#cameras img").first
    expect(picture).to_be_visible()
    assert (
        picture.evaluate("image => image.decode().then(() => [image.naturalWidth, image.naturalHeight])") == [size] * 2
    )
    expect(page.locator("#cameras figure").nth(1)).to_contain_text("masked")
    expect(page.locator("#cameras img").nth(1)).to_be_hidden()


def test_pictures_and_numbers_follow(page: Page, serve: Serve, policy: Policy) -> None:
    url = serve(policy).url
    policy.infer(observation())
    page.goto(url)
    picture = page.locator("#cameras img").first
    expect(picture).to_be_visible()
    before = picture.get_attribute("src")
    policy.infer(observation(state=STATE + 1.0, images=dict.fromkeys(CAMERAS, np.full((48, 64, 3), 200, np.uint8))))
    expect(page.locator("#state p").first).to_have_text("left_waist1.00rad")
    expect(picture).not_to_have_attribute("src", before or "")
    expect(page.locator("#tiles div").first).to_contain_text("2")


def test_before_there_is_a_policy_the_page_says_why(page: Page, serve: Serve, policy: Policy) -> None:
    host = PolicyHost(lambda: {"state": "unconfigured", "reason": "Not configured yet."})
    host.tell("loading", "Loading: 3 of 8 tensors.")
    page.goto(serve(None, host).url)
    expect(page.locator("#stage")).to_have_text("loading")
    expect(page.locator("#banner")).to_have_text("Loading: 3 of 8 tensors.")
    expect(page.locator("#robot-state")).to_have_text("unconfigured")
    expect(page.locator("#robot-reason")).to_have_text("Not configured yet.")
    expect(page.locator("#nothing")).to_be_hidden()
    host.tell("warming_up")
    expect(page.locator("#stage")).to_have_text("warming up")
    expect(page.locator("#banner")).to_have_text("The policy is being warmed up.")
    host.serve(policy)
    expect(page.locator("#stage")).to_have_text("ready")
    expect(page.locator("#banner")).to_be_hidden()
    host.tell("error", "checkpoint: there is no model.safetensors.")
    expect(page.locator("#stage")).to_have_text("error")
    expect(page.locator("#banner")).to_have_text("checkpoint: there is no model.safetensors.")


def test_what_is_refused_is_said_with_its_reason_and_clients_are_counted(
    page: Page, serve: Serve, policy: Policy
) -> None:
    url = serve(policy).url
    page.goto(url)
    expect(page.locator("#refusals")).to_have_text("No request has been refused.")
    reply = answer(post(url + GENERATIONS, flat(state=np.zeros(7))))
    expect(page.locator("#refusals li")).to_have_count(1)
    expect(page.locator("#refusals li")).to_contain_text(GENERATIONS)
    expect(page.locator("#refusals .pill")).to_have_text("400 invalid_value")
    field, message = reply["error"]["field"], reply["error"]["message"]
    expect(page.locator("#refusals p code")).to_have_text(field)
    expect(page.locator("#refusals p span")).to_have_text(message.removeprefix(f"{field}: "))
    with connect(url.replace("http", "ws") + "/openpi/policy"):
        expect(page.locator("#traffic")).to_contain_text("0 HTTP, 0 realtime, 1 OpenPI")
    expect(page.locator("#traffic")).to_contain_text("0 HTTP, 0 realtime, 0 OpenPI")


def test_what_clients_write_stays_text(page: Page, serve: Serve, policy: Policy) -> None:
    host = PolicyHost(lambda: {"state": ATTACK, "reason": ATTACK, "prompt": ATTACK})
    url = serve(policy, host).url
    assert post(url + GENERATIONS, flat(prompt=ATTACK, id=ATTACK)).status == 200
    assert post(url + GENERATIONS, flat(images={ATTACK: flat()["images"][CAMERAS[0]]})).status == 400
    page.goto(url)
    expect(page.locator("#prompt")).to_have_text(f"“{ATTACK}”")
    expect(page.locator("#refusals p code")).to_contain_text(ATTACK)
    for place in ("#robot-state", "#robot-reason"):
        expect(page.locator(place)).to_have_text(ATTACK)
    assert page.locator("[onerror], main script").count() == 0
    assert page.evaluate("window.hurt") is None
    headers = page.request.get(url).headers
    assert headers["content-security-policy"].startswith("default-src 'none'; script-src 'self'; style-src 'self';")


LUMINANCES = """(place) => {
  const light = (color) => {
    const [r, g, b] = color.match(/\\d+/g).map((c) => c / 255)
      .map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const node = document.querySelector(place);
  return [light(getComputedStyle(node).color), light(getComputedStyle(node.closest(".card, body")).backgroundColor)];
}"""
INSIDE = "[...document.querySelectorAll('main *')].every(node => node.getBoundingClientRect().right <= innerWidth)"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_it_fits_and_can_be_read(page: Page, serve: Serve, policy: Policy, scheme: Any, width: int) -> None:
    page.emulate_media(color_scheme=scheme)
    page.set_viewport_size({"width": width, "height": 844})
    url = serve(policy).url
    post(url + GENERATIONS, flat(prompt="z" * 60))
    post(url + GENERATIONS, flat(images={"x" * 200: np.zeros((8, 8, 3), np.uint8)}))
    page.goto(url)
    expect(page.locator("#refusals .pill")).to_be_visible()
    expect(page.locator("#cameras img").first).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate(INSIDE)
    for place in (
        "#model",
        ".joint b",
        ".joint figcaption span",
        "#refusals .pill",
        "#stage",
        "#tiles dt",
        ".plot .low",
    ):
        ink, paper = page.evaluate(LUMINANCES, place)
        assert (ink > paper) == (scheme == "dark")
        assert (max(ink, paper) + 0.05) / (min(ink, paper) + 0.05) >= 4.5, place


def test_a_token_is_asked_for_and_kept(page: Page, serve: Serve, policy: Policy, watch: Watch) -> None:
    url = serve(policy, token="secret").url
    page.goto(url)
    expect(page.locator("#token")).to_be_focused()
    expect(page.locator("main")).to_be_hidden()
    page.keyboard.type("wrong")
    page.keyboard.press("Enter")
    expect(page.locator("#token-refused")).to_have_text("That is not the token.")
    page.keyboard.type("secret")
    page.keyboard.press("Enter")
    expect(page.locator("#link")).to_have_text("live")
    policy.infer(observation())
    expect(page.locator("#cameras img").first).to_be_visible()
    page.reload()
    expect(page.locator("#link")).to_have_text("live")
    page.goto(f"{url}/docs")
    expect(page.locator("#contents")).to_contain_text(GENERATIONS)
    assert len(watch.complaints) == 2, "the browser notes each 401"
    assert all("401" in complaint for complaint in watch.complaints)
    watch.complaints.clear()


def test_a_server_that_comes_back_is_found_again(page: Page, policy: Policy, watch: Watch) -> None:
    with serving(policy) as first:
        page.goto(first.url)
        expect(page.locator("#link")).to_have_text("live")
    expect(page.locator("#link")).to_have_text("disconnected")
    expect(page.locator("#banner")).to_contain_text("trying again")
    host = PolicyHost()
    host.serve(policy)
    again = Sidecar(host, ServerSettings(port=urlsplit(first.url).port or 0))
    again.start()
    try:
        policy.infer(observation(prompt="after the restart"))
        expect(page.locator("#link")).to_have_text("live")
        expect(page.locator("#prompt")).to_have_text("“after the restart”")
        expect(page.locator("#banner")).to_be_hidden()
    finally:
        again.close()
    assert all("net::ERR_" in complaint for complaint in watch.complaints), watch.complaints
    watch.complaints.clear()


def test_silence_is_said_and_ended(page: Page, serve: Serve, policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "SIGN_OF_LIFE", 1e6)
    page.clock.install()
    page.goto(serve(policy).url)
    expect(page.locator("#link")).to_have_text("live")
    page.clock.pause_at(page.evaluate("Date.now()") / 1000 + 7)
    expect(page.locator("#link")).to_have_text("disconnected")
    expect(page.locator("#banner")).to_have_text(
        re.compile(r"^No answer for [67] s; trying again\. What you see is old\.$")
    )
    page.clock.fast_forward(6_000)
    page.clock.resume()
    expect(page.locator("#link")).to_have_text("live")


def test_the_documents_page_shows_the_api(page: Page, serve: Serve, policy: Policy) -> None:
    page.goto(f"{serve(policy).url}/docs")
    expect(page.locator("#contents")).to_contain_text("/v1/actions/generations")
    content = openapi_document()
    operations = [method for path in content["paths"].values() for method in path]
    expect(page.locator("#operations section")).to_have_count(
        1 + len(operations) + len(content["components"]["schemas"])
    )
    generations = page.locator("#post-v1-actions-generations")
    expect(generations.locator("h2")).to_contain_text("POST")
    expect(generations.locator("pre").first).to_contain_text('"prompt"')
    for code in content["paths"]["/v1/actions/generations"]["post"]["responses"]:
        expect(generations.get_by_text(code, exact=True)).to_have_count(1)
    generations.get_by_role("link", name="GenerationRequest").click()
    expect(page.locator("#GenerationRequest")).to_be_in_viewport()
    page.set_viewport_size({"width": 390, "height": 844})
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    page.get_by_role("link", name="Status").click()
    expect(page.locator("#stage")).to_have_text("ready")
