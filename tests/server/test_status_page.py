"""The status page: what it is made of, and what a real browser shows of it."""

from __future__ import annotations

import base64
import hashlib
import html.parser
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import sparseserve_jax
from tests.load_generator.stub_server import DONE, HEAD, Exchange, Packets, StubServer, chunked, piece, usage, whole

PAGE = Path(sparseserve_jax.__file__).parent / "server" / "static" / "index.html"
HOSTILE = "<img src=x onerror=\"document.title='broken'\">&amp;"
WAIT_S = 20


# --- without a browser -----------------------------------------------------------------------------------------------


class Elements(html.parser.HTMLParser):
    """Tags and their attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


@pytest.fixture(scope="module")
def elements() -> list[tuple[str, dict[str, str | None]]]:
    parser = Elements()
    parser.feed(PAGE.read_text())
    return parser.found


def test_nothing_comes_from_elsewhere(elements: list[tuple[str, dict[str, str | None]]]) -> None:
    links = [of[name] for _, of in elements for name in ("src", "href", "action") if name in of]
    assert sorted(filter(None, links)) == ["data:,", "metrics"]
    addresses = set(re.findall(r"https?://[^\"' )]+", PAGE.read_text()))
    assert addresses == {"http://www.w3.org/2000/svg"}  # a name, not an address


def test_no_markup_is_made_of_text_and_no_code_is_in_attributes(
    elements: list[tuple[str, dict[str, str | None]]],
) -> None:
    for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "Function("):
        assert way not in PAGE.read_text()
    assert not [name for _, of in elements for name in of if name.startswith("on") or name == "style"]
    assert len([tag for tag, _ in elements if tag == "script"]) == 1


def test_every_field_has_a_label(elements: list[tuple[str, dict[str, str | None]]]) -> None:
    fields = {of["id"] for tag, of in elements if tag in ("input", "textarea")}
    assert fields and fields == {of["for"] for tag, of in elements if tag == "label"}
    assert ("html", {"lang": "en"}) in elements


# --- in a browser ----------------------------------------------------------------------------------------------------


def content_security_policy() -> str:
    """As strict as a policy can be that runs the page's own script."""
    script = re.findall(r"<script>(.*?)</script>", PAGE.read_text(), re.DOTALL)[0]
    value = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return (
        f"default-src 'none'; script-src 'sha256-{value}'; style-src 'unsafe-inline'; img-src data:; connect-src 'self'"
    )


class Backend:
    """What the stub behind the page does: metrics that grow with every poll, and answers."""

    def __init__(self, prefix: str = "sparseserve") -> None:
        self.prefix, self.polls, self.key, self.status = prefix, 0, None, 200
        self.left = False
        self.asked: list[Exchange] = []

    def pages(self) -> dict[str, Callable[[Exchange], bytes]]:
        headers = f"Content-Security-Policy: {content_security_policy()}\r\n"
        return {
            "/": lambda exchange: whole(200, PAGE.read_bytes(), kind="text/html", headers=headers),
            "/metrics": self._metrics,
            "/health": lambda exchange: whole(self.status, {"status": "ready" if self.status == 200 else "loading"}),
            "/version": lambda exchange: whole(200, {"version": "1.2.3"}),
            "/info": lambda exchange: whole(200, {"config": {"sparse_budget_tokens": 2048, "kv_tiers": "tiered"}}),
            "/v1/models": lambda exchange: whole(200, {"data": [{"id": HOSTILE, "max_model_len": 8192}]}),
        }

    def _metrics(self, exchange: Exchange) -> bytes:
        if self.key is not None and exchange.headers.get("authorization") != f"Bearer {self.key}":
            return whole(401, {"error": {"message": "key"}})
        n = self.polls = self.polls + 1
        series = {
            'num_requests_running{model_name="m"}': 3, 'num_requests_waiting{model_name="m"}': 7,
            "num_requests_parked": 1, "kv_cache_usage_perc": 0.25, "device_kv_bytes": 3 * 2**20,
            "host_kv_bytes": 5 * 2**30, "kv_block_selections_total": 100 * n, "kv_block_hits_total": 90 * n,
            "generation_tokens_total": 500 * n, 'admission_rejections_total{reason="overload"}': 2,
            'admission_rejections_total{reason="invalid"}': 3,
        }  # fmt: skip
        for name, mean in (("time_to_first_token_seconds", 0.3), ("inter_token_latency_seconds", 0.03)):
            series |= {f"{name}_sum": mean * 10 * n, f"{name}_count": 10 * n, f'{name}_bucket{{le="+Inf"}}': 10 * n,
                       f'{name}_bucket{{le="0.01"}}': 0, f'{name}_bucket{{le="0.5"}}': 10 * n}  # fmt: skip
        lines = ["# HELP x y", *(f"{self.prefix}:{name} {number}" for name, number in series.items()), ""]
        return whole(200, "\n".join(lines).encode(), kind="text/plain; version=0.0.4")

    async def answer(self, exchange: Exchange) -> Packets:
        import asyncio

        self.asked.append(exchange)
        prompt = exchange.content["prompt"]
        if prompt == "refuse":
            yield whole(429, {"error": {"message": HOSTILE}})
            return
        yield HEAD
        if prompt == "endless":
            try:
                for _ in range(600):
                    yield chunked(piece("x "))
                    await asyncio.sleep(0.05)
            finally:
                self.left = True
            return
        text = b": ping\r\n\r\n" + piece(HOSTILE) + 'data: {"choices": [{"text": " é😀"}]}\r\n\r\n'.encode()
        cut = text.index("😀".encode()) + 2
        for part in (text[:cut], text[cut:]):
            yield chunked(part)
            await asyncio.sleep(0.05)
        yield chunked(piece("", finish_reason="length") + usage(3, 42) + DONE)
        yield b"0\r\n\r\n"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    webdriver = pytest.importorskip("selenium.webdriver")
    program, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if program is None or driver is None:
        pytest.skip("no chromium and chromedriver here: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = program
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1100,1500"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    started = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    yield started
    started.quit()


@pytest.fixture
def backend() -> Backend:
    return Backend()


@pytest.fixture
def page(browser: Any, backend: Backend) -> Iterator[Page]:
    browser.get_log("browser")
    with StubServer(backend.answer, pages=backend.pages()).running() as server:
        browser.get(server.url + "/")
        yield Page(browser)
        browser.get("about:blank")


class Page:
    """The page as a test reads and uses it."""

    def __init__(self, browser: Any) -> None:
        self.browser = browser

    def text(self, of: str) -> str:
        return self.browser.execute_script("return document.querySelector(arguments[0]).textContent", of)

    def until(self, of: str, pattern: str) -> str:
        """Waits for a text; the last one is in the error."""
        from selenium.webdriver.support.wait import WebDriverWait

        def found(_: Any) -> bool:
            return re.search(pattern, self.text(of)) is not None

        try:
            WebDriverWait(self.browser, WAIT_S, poll_frequency=0.1).until(found)
        except Exception as error:
            raise AssertionError(f"{of} is {self.text(of)!r}, not {pattern!r}") from error
        return self.text(of)

    def fill(self, of: str, text: str) -> None:
        field = self.browser.find_element("css selector", of)
        field.clear()
        field.send_keys(text)
        self.browser.execute_script("arguments[0].dispatchEvent(new Event('change'))", field)

    def click(self, of: str) -> None:
        self.browser.find_element("css selector", of).click()

    def errors(self) -> list[str]:
        return [entry["message"] for entry in self.browser.get_log("browser") if entry["level"] == "SEVERE"]


@pytest.mark.slow
@pytest.mark.parametrize("prefix", ["sparseserve", "vllm"])
def test_shows_what_the_server_does(page: Page, backend: Backend, prefix: str) -> None:
    backend.prefix = prefix
    page.until("#state", "^ready$")
    assert page.until("#facts", "budget") == (
        f"{HOSTILE} · contexts up to 8,192 tokens · budget 2,048 tokens · tiered KV · version 1.2.3"
    )
    tiles = {"running": "3", "waiting": "7", "parked": "1", "usage": "25.0 %", "device": "3.0 MiB", "host": "5.0 GiB",
             "refused": "5"}  # fmt: skip
    assert {name: page.text(f"#tile-{name}") for name in tiles} == tiles
    page.until("#tile-hits", "^90.0 %$")  # needs two polls
    assert float(page.text("#tile-tokens").replace(",", "")) > 10
    page.until("#chart-ttft figcaption", r"mean 300 ms95th percentile 476 ms")  # 0.01 + 0.95 * 0.49
    assert "mean 30 ms" in page.text("#chart-tbt figcaption")
    while backend.polls < 4:
        page.until("#state", "ready")
    page.until("#chart-ttft figcaption", "mean")
    charts = "return [...document.querySelectorAll('#charts svg')].map(s => s.querySelectorAll('polyline').length)"
    assert page.browser.execute_script(charts) == [2, 2, 2, 2, 1]
    label = "return document.querySelector('#chart-requests svg').getAttribute('aria-label')"
    assert page.browser.execute_script(label) == "Requests: running 3, waiting 7"
    assert page.errors() == []
    assert page.browser.title == "SparseServe-JAX"


@pytest.mark.slow
def test_a_prompt_is_streamed_and_stays_text(page: Page, backend: Backend) -> None:
    page.fill("#prompt", "a <b>prompt</b>")
    page.fill("#max-tokens", "7")
    page.click("#start")
    page.until("#progress", r"^length: first token after [\d.]+ m?s, 42 tokens, [\d.,]+ tokens / s$")
    assert page.text("#answer") == HOSTILE + " é😀"
    assert page.browser.execute_script("return document.querySelectorAll('#answer *, #facts *').length") == 0
    (asked,) = backend.asked
    assert asked.content | {"prompt": "a <b>prompt</b>", "max_tokens": 7, "temperature": 0} == asked.content
    assert "authorization" not in asked.headers
    assert page.errors() == []


@pytest.mark.slow
def test_stop_ends_the_request(page: Page, backend: Backend) -> None:
    page.fill("#prompt", "endless")
    page.click("#start")
    page.until("#answer", "x x x")
    page.click("#stop")
    page.until("#progress", "^stopped: first token after")
    for _ in range(100):
        if backend.left:
            break
        page.until("#state", "ready")
    assert backend.left
    before = page.text("#answer")
    page.fill("#prompt", "again")
    page.click("#start")
    page.until("#progress", "^length")
    assert before != page.text("#answer") == HOSTILE + " é😀"


@pytest.mark.slow
def test_errors_are_shown_as_text(page: Page) -> None:
    page.fill("#prompt", "refuse")
    page.click("#start")
    page.until("#progress", "^429: ")
    assert page.text("#progress") == f"429: {HOSTILE}"
    assert page.browser.find_element("css selector", "#start").is_enabled()


@pytest.mark.slow
def test_a_key_opens_the_page(page: Page, backend: Backend) -> None:
    backend.key = "sk-1"
    page.until("#state", "needs an API key")
    page.fill("#key", "sk-1")
    page.until("#state", "ready")
    page.fill("#prompt", "hi")
    page.click("#start")
    page.until("#progress", "^length")
    assert backend.asked[0].headers["authorization"] == "Bearer sk-1"


@pytest.mark.slow
def test_loading_is_shown(page: Page, backend: Backend) -> None:
    backend.status = 503
    page.until("#state", "^loading$")
    backend.status = 200
    page.until("#state", "^ready$")


@pytest.mark.slow
def test_light_and_dark(page: Page) -> None:
    colours = []
    for scheme in ("light", "dark"):
        media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        page.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
        colours.append(page.browser.execute_script("return getComputedStyle(document.body).backgroundColor"))
    page.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
    assert colours == ["rgb(246, 247, 249)", "rgb(15, 19, 23)"]
