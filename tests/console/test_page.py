"""The page in a real Chromium: what people see, and that no document can make the page act."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pymongo
import pytest

from tailrace.embedded import ReplicaSet
from tests.console.chromium import Page, opened_page
from tests.console.serving import ServedConsole, served

pytestmark = [pytest.mark.mongod, pytest.mark.chromium]
DATABASE = "console_page"
HOSTILE = '<script>window.pwned = 1</script><img src=x onerror="window.pwned = 1">'


@pytest.fixture(scope="module")
def console(replica_set: ReplicaSet) -> Iterator[ServedConsole]:
    with served(replica_set.uri) as found:
        found.wait_until_it_follows()
        yield found


@pytest.fixture(scope="module")
def browser() -> Iterator[Page]:
    with opened_page() as found:
        found.size(1360, 900)
        yield found


def open_anew(browser: Page, console: ServedConsole) -> None:
    browser.open("about:blank#anew")  # errors of the page before arrive until then
    browser.problems.clear()
    browser.open(console.url)
    browser.wait("document.getElementById('connection').textContent === 'live'")


@pytest.fixture
def page(browser: Page, console: ServedConsole) -> Iterator[Page]:
    open_anew(browser, console)
    yield browser
    assert browser.problems == []


@pytest.fixture
def shop(replica_set: ReplicaSet) -> Iterator[Any]:
    with pymongo.MongoClient[dict[str, Any]](replica_set.uri) as client:
        yield client[DATABASE]


def row_of(collection: str, operation: str) -> str:
    """Finds the newest row of such a change, in the page's language."""
    tests = f"row.textContent.includes('{DATABASE}.{collection}') && row.textContent.includes('{operation}')"
    return f"[...document.querySelectorAll('details.row')].find((row) => {tests})"


def go(page: Page, section: str) -> None:
    page.ask(f"location.hash = {section!r}")
    page.wait(f"document.querySelector('nav [aria-current=page]')?.hash === '#{section}'")


def test_every_section_opens(page: Page) -> None:
    page.wait("document.querySelectorAll('.tile').length === 5")
    page.wait("document.querySelector('svg.chart') !== null")
    names = page.ask("[...document.querySelectorAll('nav a')].map((one) => one.hash.slice(1))")
    assert names == ["overview", "tail", "streams", "leases", "letters", "kept", "syncs", "doctor", "token"]
    for name in names:
        go(page, name)
        page.wait("document.getElementById('content').textContent.trim().length > 20")
        page.wait("!document.getElementById('content').textContent.includes('looking…')")
        assert "[object" not in page.ask("document.getElementById('content').textContent"), name
    assert "MongoDB" in page.ask("document.getElementById('deployment').textContent")


def test_what_a_document_holds_is_text(page: Page, shop: Any) -> None:
    go(page, "tail")
    shop.hostile.insert_one({"_id": HOSTILE, HOSTILE: HOSTILE, "turned": "a\u202eb"})
    row = row_of("hostile", "insert")
    page.wait(f"{row} !== undefined")
    page.ask(f"{row}.querySelector('summary').click()")
    page.wait(f"{row}.querySelector('.diff') !== null")
    cells = page.ask(
        f"[...{row}.querySelectorAll('.diff tbody tr')].map((row) => [...row.cells].map((cell) => cell.textContent))"
    )
    quoted = '"' + HOSTILE.replace('"', '\\"') + '"'
    assert cells == [["_id", "", quoted], [HOSTILE, "", quoted], ["turned", "", '"a\\u202eb"']]
    assert page.ask("window.pwned") is None
    assert page.ask("document.querySelectorAll('#content script, #content img').length") == 0


def test_the_policy_runs_no_script_but_our_own(browser: Page, console: ServedConsole) -> None:
    open_anew(page := browser, console)
    # Beside the content: the page writes that anew each time it has asked the server, and the image would be gone.
    image = "<img id=planted src=data:, onerror='window.pwned = 1'>"
    page.ask(f'document.body.insertAdjacentHTML("beforeend", "{image}")')
    page.wait("document.getElementById('planted')?.complete")
    page.ask("new Promise((done) => setTimeout(done, 100))")
    assert page.ask("window.pwned") is None
    assert page.ask("fetch('http://127.0.0.1:9/').then(() => 'sent', () => 'refused')") == "refused"
    assert any("Content Security Policy" in one for one in browser.problems), browser.problems


def test_a_change_is_shown_as_what_was_and_what_is(page: Page, shop: Any) -> None:
    go(page, "tail")
    shop.drop_collection("orders")
    images = int(shop.client.server_info()["version"].partition(".")[0]) >= 6
    shop.create_collection("orders", **({"changeStreamPreAndPostImages": {"enabled": True}} if images else {}))
    shop.orders.insert_one({"_id": 1, "status": "new", "total": 5})
    shop.orders.update_one({"_id": 1}, {"$set": {"status": "paid"}})
    row = row_of("orders", "update")
    page.wait(f"{row} !== undefined")
    page.ask(f"{row}.querySelector('summary').click()")
    page.wait(f"{row}.querySelector('.diff') !== null")
    changed = page.ask(f"[...{row}.querySelectorAll('tr.changed td')].map((cell) => cell.textContent)")
    assert changed == ["status", '"new"' if images else "not kept", '"paid"']
    page.ask("document.getElementById('filter').value = 'no such thing'")
    page.ask("document.getElementById('filter').dispatchEvent(new Event('input'))")
    assert page.ask("document.querySelectorAll('details.row').length") == 0


def test_a_paused_tail_stays_as_it_is(page: Page, shop: Any) -> None:
    go(page, "tail")
    page.ask("document.getElementById('pause').click()")
    before = page.ask("document.getElementById('tail').textContent")
    shop.paused.insert_one({"_id": "while it was paused"})
    page.ask("fetch('/api/state').then((answer) => answer.text())")
    page.ask("new Promise((done) => setTimeout(done, 1500))")
    assert page.ask("document.getElementById('tail').textContent") == before
    page.ask("document.getElementById('pause').click()")
    page.wait("document.getElementById('tail').textContent.includes('while it was paused')")


def test_a_token_is_decoded(page: Page) -> None:
    go(page, "token")
    page.ask("document.querySelector('input#token').value = '8265000000000000012B0429296E1404'")
    page.ask("document.querySelector('.token button').click()")
    page.wait("document.getElementById('decoded').textContent.includes('Timestamp(1694498816, 1)')")
    page.ask("document.querySelector('input#token').value = '<b>none</b>'")
    page.ask("document.querySelector('.token button').click()")
    page.wait("document.querySelector('#decoded .error') !== null")
    assert page.ask("document.querySelectorAll('#decoded b').length") == 0


def test_dark_light_and_narrow(page: Page, tmp_path: Path) -> None:
    page.wait("document.querySelectorAll('.tile').length === 5")
    colour = "getComputedStyle(document.body).backgroundColor"
    light = page.ask(colour)
    page.size(1360, 900, dark=True)
    assert page.ask(colour) != light
    page.ask("document.getElementById('theme').click()")
    assert page.ask(colour) == light, "chosen, whatever the system has"
    page.ask("document.getElementById('theme').click(); document.getElementById('theme').click()")
    page.size(460, 900)
    page.wait("document.documentElement.scrollWidth <= 460")
    page.screenshot(tmp_path / "narrow.png")
    assert (tmp_path / "narrow.png").read_bytes().startswith(b"\x89PNG")
    page.size(1360, 900)


def test_a_console_that_has_gone_is_told(browser: Page, replica_set: ReplicaSet) -> None:
    with served(replica_set.uri) as console:
        browser.open(console.url)
        browser.wait("document.getElementById('connection').textContent === 'live'")
    browser.wait("document.getElementById('connection').textContent.startsWith('not connected')")
