"""Who may ask the console for what, without a server: names, methods, sites, and logins."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

import pytest

from tailrace.cli.web.guard import HEADERS, Guard, HostNames
from tailrace.cli.web.login import FAILURES_MAX, Logins
from tailrace.cli.web.server import ConsoleOptions
from tailrace.errors import SourceError, UsageError

HERE = HostNames.of("127.0.0.1")


@pytest.mark.parametrize("host", ["127.0.0.1:8099", "localhost", "LOCALHOST:1", "[::1]:8099", "127.0.0.1"])
def test_a_console_of_this_machine_has_its_names(host: str) -> None:
    assert host in HERE


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:8099", "127.0.0.1.evil.example", "localhost.evil.example", "", "[", "10.0.0.5"],
)
def test_a_name_that_another_site_has_made_lead_here_is_none(host: str) -> None:
    assert host not in HERE


def test_beyond_this_machine_addresses_are_names_and_other_names_are_given() -> None:
    names = HostNames.of("0.0.0.0", ["console.example"])
    assert "192.168.1.4:8099" in names
    assert "console.example:443" in names
    assert "evil.example" not in names


def asked(guard: Guard, method: str = "GET", path: str = "/api/state", **headers: str) -> tuple[int, dict[str, str]]:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    given = [
        (name.replace("_", "-").encode(), text.encode()) for name, text in {"host": "localhost", **headers}.items()
    ]
    scope = {"type": "http", "method": method, "path": path, "headers": given, "client": ("127.0.0.1", 5)}
    asyncio.run(guard(scope, receive, send))
    return sent[0]["status"], {name.decode(): text.decode() for name, text in sent[0]["headers"]}


async def answering(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"a secret"})


def test_only_reading_is_answered_and_every_answer_has_the_headers() -> None:
    guard = Guard(answering, HERE, None)
    assert asked(guard)[0] == 200
    assert {name: text for name, text in asked(guard)[1].items() if name in HEADERS} == HEADERS
    for method in ("POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT"):
        status, headers = asked(guard, method)
        assert (status, headers["allow"]) == (405, "GET, HEAD")
        assert HEADERS.items() <= headers.items()


def test_other_names_and_other_sites_are_refused() -> None:
    guard = Guard(answering, HERE, None)
    assert asked(guard, host="evil.example")[0] == 421
    assert asked(guard, sec_fetch_site="cross-site")[0] == 403
    assert asked(guard, sec_fetch_site="same-site")[0] == 403
    assert asked(guard, sec_fetch_site="cross-site", path="/")[0] == 200, "a link to the console"
    assert asked(guard, sec_fetch_site="same-origin")[0] == 200


# -- logins ----------------------------------------------------------------------------------------------------------


class Users:
    """Knows one user, counts the attempts, and has a clock that the test moves."""

    def __init__(self) -> None:
        self.asked = 0
        self.now = 1000.0
        self.password = "good"
        self.is_away = False
        self.logins = Logins(self.check, lambda: self.now)

    def check(self, name: str, password: str) -> str | None:
        self.asked += 1
        if self.is_away:
            raise SourceError("away")
        return None if (name, password) == ("ada", self.password) else "wrong"

    def admit(self, pair: str = "ada:good", address: str = "10.0.0.1") -> int:
        """0 if admitted, -1 if not, otherwise the seconds to wait."""
        found = self.logins.admit(address, b"Basic " + base64.b64encode(pair.encode()))
        return 0 if found.is_admitted else found.retry_s or -1


def test_a_good_login_is_remembered_for_a_minute() -> None:
    users = Users()
    assert users.admit() == 0
    users.now += 59
    assert (users.admit(), users.asked) == (0, 1)
    users.password, users.now = "another", users.now + 2
    assert (users.admit(), users.asked) == (-1, 2), "a removed user, or an old password"


def test_the_password_alone_or_the_name_alone_is_not_the_login() -> None:
    users = Users()
    assert users.admit() == 0
    assert users.admit("ada:goo") == -1
    assert users.admit("eve:good") == -1
    assert users.admit("ada\0good:") == -1, "a name that ends where the password begins"


@pytest.mark.parametrize(
    "header", [None, b"", b"Basic", b"Basic !", b"Basic YWRh", b"Bearer YWRhOmdvb2Q=", b"x" * 9000]
)
def test_what_is_no_header_of_a_login_asks_nobody(header: bytes | None) -> None:
    users = Users()
    assert not users.logins.admit("10.0.0.1", header).is_admitted
    assert users.asked == 0


def test_failures_are_limited_for_each_address_and_for_all() -> None:
    users = Users()
    for _ in range(FAILURES_MAX):
        assert users.admit("ada:guess") == -1
    assert users.admit("ada:guess") > 0
    assert users.admit() > 0, "the right password is not looked at either, or guessing would go on"
    assert users.asked == FAILURES_MAX
    assert users.admit(address="10.0.0.2") == 0, "another address"
    users.now += 61
    assert users.admit() == 0
    for number in range(100):
        users.admit("ada:guess", f"10.1.0.{number}")
    assert users.asked < 80, "many addresses"


def test_a_deployment_that_is_away_is_no_failure() -> None:
    users = Users()
    users.is_away = True
    for _ in range(FAILURES_MAX + 1):
        assert users.admit() == 5
    users.is_away = False
    assert users.admit() == 0


def test_the_guard_asks_for_a_login() -> None:
    users = Users()
    guard = Guard(answering, HERE, users.logins)
    status, headers = asked(guard)
    assert (status, headers["www-authenticate"]) == (401, 'Basic realm="tailrace console", charset="UTF-8"')
    assert asked(guard, authorization="Basic YWRhOmdvb2Q=")[0] == 200
    for _ in range(FAILURES_MAX):
        asked(guard, authorization="Basic YWRhOmJhZA==")
    status, headers = asked(guard, authorization="Basic YWRhOmJhZA==")
    assert status == 429
    assert int(headers["retry-after"]) > 0


def test_nothing_goes_over_a_network_unencrypted() -> None:
    for host in ("0.0.0.0", "::", "192.168.1.4", "console.example"):
        with pytest.raises(UsageError, match="unencrypted"):
            ConsoleOptions(host=host).check()
    for host in ("127.0.0.1", "localhost", "::1"):
        ConsoleOptions(host=host).check()
