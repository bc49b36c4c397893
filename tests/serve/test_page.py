"""The web page in a real browser: chat, the live view, the key, and what keeps a model's words from being a program.

Skipped where there is no Chromium with its driver (Debian: apt install chromium-driver). With MLXKV_TEST_IMAGES set to
a folder, pictures of the page are left there.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from mlxkv.config import EMBEDDED
from mlxkv.decode.engine import Engine
from mlxkv.serve.safety import Keys, Safety
from tests.serve.conftest import Running, running

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed: pip install '.[test]'")
By = pytest.importorskip("selenium.webdriver.common.by").By
KEYS = pytest.importorskip("selenium.webdriver.common.keys").Keys

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(
    not (CHROMIUM and DRIVER), reason="no Chromium with chromedriver here: apt install chromium-driver"
)
IMAGES = os.environ.get("MLXKV_TEST_IMAGES")
WIDE, NARROW = (1440, 1180), (420, 860)


class Page:
    """The page as a person uses it."""

    def __init__(self, driver, url: str) -> None:
        self.driver, self.url = driver, url

    def open(self) -> None:
        self.driver.set_window_size(*WIDE)
        self.driver.get(self.url + "/web/icon.svg")  # a place of the same origin where nothing runs
        self.driver.execute_script("sessionStorage.clear(); localStorage.clear()")
        self.driver.get(self.url + "/")

    def __getitem__(self, id: str):
        return self.driver.find_element(By.ID, id)

    def all(self, selector: str) -> list:
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def texts(self, selector: str) -> list[str]:
        """What they say, at one moment: the live view puts others in their place."""
        script = "return [...document.querySelectorAll(arguments[0])].map((found) => found.innerText)"
        return self.driver.execute_script(script, selector)

    def until(self, test: Callable[[], object], seconds: float = 20.0):
        end = time.monotonic() + seconds
        while not (found := test()):
            assert time.monotonic() < end, self.driver.find_element(By.TAG_NAME, "body").text
            time.sleep(0.03)
        return found

    def run(self, script: str, *args):
        return self.driver.execute_async_script(
            f"const done = arguments[arguments.length - 1];"
            f"(async () => {{ {script} }})().then(done, (error) => done(`failed: ${{error}}`))",
            *args,
        )

    def ready(self) -> None:
        self.until(lambda: self["health-text"].text == "ready")

    def send(self, text: str) -> None:
        """Type a message's last letter and send it; the others are pasted."""
        self.driver.execute_script("arguments[0].value = arguments[1]", self["prompt"], text[:-1])
        self["prompt"].send_keys(KEYS.END + text[-1] + KEYS.ENTER)
        self.until(lambda: not self["prompt"].get_property("value"))

    def answered(self, n: int) -> str:
        """The n-th answer's text, once it is whole."""
        self.until(lambda: len(self.all(".turn.assistant:not([aria-busy]) .note")) >= n)
        return self.texts(".turn.assistant .body")[n - 1]

    def complaints(self) -> list[str]:
        """What the browser's console has, but for answers of 4xx and 5xx that were asked for."""
        return [e["message"] for e in self.driver.get_log("browser") if "the server responded with" not in e["message"]]

    def picture(self, name: str) -> None:
        if IMAGES:
            Path(IMAGES).mkdir(parents=True, exist_ok=True)
            self.driver.save_screenshot(str(Path(IMAGES, f"{name}.png")))


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server of the embedded demo model."""
    with Engine(EMBEDDED, cache_dir=tmp_path_factory.mktemp("page") / "cache") as engine, running(engine) as found:
        yield found


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory):
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    profile = tmp_path_factory.mktemp("profile")
    for flag in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--no-first-run"):
        options.add_argument(flag)
    options.add_argument("--disable-background-networking")
    options.add_argument(f"--user-data-dir={profile}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    made = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    made.set_page_load_timeout(30)
    made.set_script_timeout(20)
    yield made
    made.quit()


@pytest.fixture
def page(driver, demo: Running) -> Iterator[Page]:
    made = Page(driver, demo.url)
    made.open()
    made.ready()
    yield made
    assert made.complaints() == []


def test_a_conversation_and_what_is_remembered_of_it(page, demo):
    system = "You are a patient teacher. Answer in short sentences, and say so when you do not know something."
    page["live-toggle"].click()
    page.all(".settings summary")[0].click()
    page["system"].send_keys(system)
    page.all(".settings summary")[0].click()
    page.send("What does mlxkv keep?")
    said = page.answered(1)
    messages = [{"role": "system", "content": system}, {"role": "user", "content": "What does mlxkv keep?"}]
    asked = {"model": EMBEDDED.name, "messages": messages}
    whole = httpx.post(f"{demo.url}/v1/chat/completions", json=asked, timeout=60).json()
    assert said == whole["choices"][0]["message"]["content"]
    page.send("Why does that help?")
    page.answered(2)
    note = page.texts(".note")[1]
    assert "prompt tokens from RAM" in note and "tokens/s" in note
    # a reload keeps the conversation
    page.driver.refresh()
    page.ready()
    assert page.texts(".turn.assistant .body")[0] == said
    # another one begins anew, and finds what they have in common
    page["new-chat"].click()
    assert page.all(".turn") == [] and page["welcome"].is_displayed()
    page.send("What is a state?")
    page.answered(1)
    assert "prompt tokens from RAM" in page.texts(".note")[0]
    # the live view knows all of them, and why they were not there to their ends
    page.until(lambda: len(page.all("#recent tbody tr")) >= 4)
    page.until(lambda: "empty" in page["misses"].text and "from RAM" in page["hits"].text)
    page.until(lambda: "What does mlxkv keep?" in page["tree"].text and "What is a state?" in page["tree"].text)
    assert page.all("#tree .track .tick") and "weights" in page["memory"].text
    # what a next message would find is said beforehand
    page["prompt"].send_keys("What is a miss?")
    page["explain"].click()
    page.until(lambda: "would be restored" in page["explained"].text)
    page.driver.execute_script("document.getElementById('store-title').scrollIntoView()")
    page.picture("page")


def test_stop_keeps_what_was_said_and_frees_the_engine(page, demo):
    page["live-toggle"].click()
    page.send("Tell me a long story about " + "the sea and the wind and " * 80)
    page.until(lambda: page["stop"].is_displayed() and demo.engine.health().active)
    assert "Reading the prompt" in page.texts(".turn.assistant .wait")[0]
    page.until(lambda: "reading" in page["running"].text)
    page.driver.switch_to.active_element.send_keys(KEYS.ESCAPE)
    page.until(lambda: page["send"].is_displayed())
    assert "stopped after" in page.texts(".turn.assistant .note")[0]
    assert demo.idle(20)
    page.all(".again")[0].click()
    page.until(lambda: page["stop"].is_displayed())
    page["stop"].click()
    page.until(lambda: page["send"].is_displayed())
    assert demo.idle(20)


def test_what_the_server_refuses_is_shown_and_can_be_tried_again(page):
    page.all(".settings summary")[0].click()
    page["temperature"].send_keys("1000")
    page.send("Hello")
    page.until(lambda: page.all(".turn.assistant .error"))
    assert "temperature" in page.texts(".turn.assistant .error")[0]
    page["temperature"].clear()
    page["max-tokens"].send_keys("3")
    page.all(".again")[0].click()
    page.answered(1)
    assert page.all(".turn.assistant .error") == []
    assert "cut at the longest length" in page.texts(".note")[0]


def test_a_models_words_are_text(page):
    """Marks of a program in an answer stay what they are: words."""
    text = "<img src=x onerror=alert(1)> **bold** `a<b` \n```html\n<script>alert(2)</script>\n```\nend"
    made = page.run(
        "const { prose } = await import('/web/format.js');"
        "const box = document.createElement('div'); box.append(prose(arguments[0])); document.body.append(box);"
        "return [box.querySelectorAll('img, script').length, box.querySelector('pre').textContent,"
        " box.querySelector('strong').textContent, box.querySelector('.prose code').textContent, box.textContent];",
        text,
    )
    assert made[:4] == [0, "<script>alert(2)</script>", "bold", "a<b"]
    assert "<img src=x onerror=alert(1)>" in made[4] and made[4].rstrip().endswith("end")
    answer = httpx.get(page.url + "/")
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "frame-ancestors 'none'" in policy
    # nothing came from elsewhere
    loaded = page.run("return performance.getEntriesByType('resource').map((entry) => entry.name)")
    assert loaded and all(name.startswith(page.url + "/") for name in loaded)


STREAM = """
const { events } = await import('/web/api.js');
const [text, size] = arguments;
const bytes = new TextEncoder().encode(text);
const real = window.fetch;
window.fetch = async () => new Response(new ReadableStream({
  start(to) {
    for (let at = 0; at < bytes.length; at += size) to.enqueue(bytes.slice(at, at + size));
    to.close();
  },
}));
const seen = [];
try {
  for await (const one of events('/nowhere', {})) seen.push(one.text);
} catch (error) {
  seen.push(`${error.code}: ${error.message}`);
} finally {
  window.fetch = real;
}
return seen;
"""


def test_a_stream_is_read_however_it_is_cut(page):
    """Comments, both line ends, letters of several bytes; an error in the middle, and an end that does not come."""
    text = ': waiting\n\ndata: {"text": "größe 🌊"}\r\n\r\n: still\n\n'
    text += 'data: {"text":\ndata: "two lines"}\n\ndata: [DONE]\n\n'
    for size in (1, 2, 3, 7, 1000):
        assert page.run(STREAM, text, size) == ["größe 🌊", "two lines"]
    failed = 'data: {"text": "a"}\n\ndata: {"error": {"message": "It failed.", "code": "bad"}}\n\ndata: [DONE]\n\n'
    assert page.run(STREAM, failed, 5) == ["a", "bad: It failed."]
    assert page.run(STREAM, 'data: {"text": "a"}\n\ndata: {"te', 5) == ["a", "cut_off: The answer was cut off."]


def test_thinking_is_shown_apart_and_folds_when_the_answer_begins(page):
    deltas = [{"reasoning_content": "Let me "}, {"reasoning_content": "see."}, {"content": "It is\n```py\nx = 1\n```"}]
    chunks = [{"id": "c", "choices": [{"delta": delta, "finish_reason": None}]} for delta in deltas]
    text = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
    page.driver.execute_script(
        "const [text] = arguments, real = window.fetch;"
        "window.fetch = (path, more) => (more?.method === 'POST' ? new Response(text) : real(path, more));",
        text,
    )
    page.send("What is it?")
    page.until(lambda: page.all(".turn.assistant .foot .acts"))
    (thought,) = page.all(".turn.assistant details.thought")
    assert not thought.get_property("open") and page.all(".turn.assistant figure.code pre")[0].text == "x = 1"
    thought.find_element(By.TAG_NAME, "summary").click()
    assert thought.find_element(By.CLASS_NAME, "prose").text == "Let me see."


def test_a_key_is_asked_for_until_it_is_right(driver, demo):
    with running(demo.engine, safety=Safety(Keys(["open sesame"]))) as guarded:
        page = Page(driver, guarded.url)
        page.open()
        page.until(lambda: page["key-dialog"].get_property("open"))
        page["key"].send_keys("wrong" + KEYS.ENTER)
        page.until(lambda: "not right" in page["key-why"].text and page["key-dialog"].get_property("open"))
        page["key"].send_keys("open sesame" + KEYS.ENTER)
        page.ready()
        assert not page["key-dialog"].get_property("open")
        page.send("Hello")
        assert page.answered(1)
        page["live-toggle"].click()
        page.until(lambda: page.all("#tree .said"))
        assert not any("Hello" in said for said in page.texts("#tree .said"))
        assert page.complaints() == []


def test_light_dark_and_narrow(page):
    def background() -> str:
        return page.run("return getComputedStyle(document.body).backgroundColor")

    page.send("What is a state?")
    page.answered(1)
    page["theme"].click()
    light = background()
    page["theme"].click()
    assert background() != light and page["theme"].text == "Theme: dark"
    page["live-toggle"].click()
    page.until(lambda: page.all("#tree .said"))
    page.picture("page-dark")
    page.driver.set_window_size(*NARROW)
    try:
        for name in ("page-narrow-live", "page-narrow"):
            wide = page.run("return document.documentElement.scrollWidth - window.innerWidth")
            assert wide <= 0, f"{name} is {wide} pixels too wide"
            page.picture(name)
            page["live-toggle"].click()
    finally:
        page.driver.set_window_size(*WIDE)


def test_all_of_it_by_keyboard(page):
    """From the top, Tab comes by everything that can be used, and what has the focus can be seen."""
    page["live-toggle"].click()
    page.until(lambda: page.all("#tree summary, #tree .leaf"))
    page.driver.execute_script("document.querySelector('.skip').focus()")
    look = (
        "const at = document.activeElement, outline = getComputedStyle(at).outlineStyle;"
        "const name = at.id || at.className || at.localName;"
        "return [name, outline !== 'none' || ['body', 'skip'].includes(name)]"
    )
    seen = []
    while "recent" not in seen:
        name, visible = page.driver.execute_script(look)
        seen.append(name)
        assert visible and len(seen) < 40, seen
        page.driver.switch_to.active_element.send_keys(KEYS.TAB)
    for wanted in ("skip", "model", "new-chat", "live-toggle", "theme", "prompt", "send", "explain", "recent"):
        assert wanted in seen, seen


def test_files_are_looked_up_never_opened(demo):
    for name in ("style.css", "app.js", "icon.svg"):
        answer = httpx.get(f"{demo.url}/web/{name}")
        assert answer.status_code == 200 and answer.headers["x-content-type-options"] == "nosniff"
        same = httpx.get(f"{demo.url}/web/{name}", headers={"If-None-Match": answer.headers["etag"]})
        assert same.status_code == 304 and not same.content
    assert httpx.head(demo.url).status_code == 200
    for name in ("..%2fapp.py", "%2e%2e/app.py", "nothing.js", "__init__.py", ""):
        assert httpx.get(f"{demo.url}/web/{name}").status_code == 404
