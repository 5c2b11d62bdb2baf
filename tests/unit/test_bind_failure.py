"""The messages of a program that cannot listen: each cause has its own remedy."""

import errno
import socket

import pytest

from tailrace.base.bind_failure import bind_failure


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            OSError(errno.EADDRINUSE, "error while attempting to bind on address ('::1', 80): address already in use"),
            "Address already in use. Another program listens there: stop it, or name another address",
        ),
        (
            PermissionError(errno.EACCES, "permission denied"),
            "Permission denied. Ports below 1024 are for programs that have the right CAP_NET_BIND_SERVICE: grant it, "
            "or name another address",
        ),
        (
            OSError(errno.EADDRNOTAVAIL, "cannot assign requested address"),
            "Cannot assign requested address. This machine has no such address (0.0.0.0 stands for all that it has): "
            "name another address",
        ),
        (
            socket.gaierror(socket.EAI_NONAME, "Name or service not known"),
            "Name or service not known. No such name is known here: name another address",
        ),
        (OSError("odd"), "odd. Name another address"),
    ],
)
def test_each_cause_has_its_way_out(error: OSError, said: str) -> None:
    assert (
        str(bind_failure("cannot listen at", "h", 80, error, "name another address"))
        == f"cannot listen at h:80: {said}"
    )
