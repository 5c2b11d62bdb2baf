"""What may name a time zone inside a date's text: an offset, or an abbreviation (measured on mongod 6.0.27: every word
of one to four letters, and every name that the IANA database has ever used)."""

from __future__ import annotations

import re
from typing import Final

#: Seconds east of UTC, and the names that mean them.
_BY_OFFSET: Final[dict[int, str]] = {
    -43200: "y",
    -39600: "sst x",
    -36000: "ahst bdt hst w",
    -34200: "hdt hpt hwt",
    -32400: "ahdt akst v yst",
    -28800: "akdt pst u ydt ypt ywt",
    -26248: "emt",
    -25200: "mst pdt ppt pwt t yddt",
    -21600: "cst mdt mpt mwt pddt s",
    -20173: "sjmt",
    -19776: "hmt",
    -18840: "qmt",
    -18000: "cdt cpt cwt est mddt r",
    -17340: "ppmt",
    -16800: "sdmt",
    -15408: "cmt",
    -14660: "ffmt",
    -14400: "ast cddt edt ept ewt q",
    -14309: "bmt",
    -13884: "smt",
    -13840: "amt",
    -13236: "pmt",
    -12600: "nst",
    -10800: "adt apt awt eddt p",
    -9052: "ndt",
    -9000: "npt nwt",
    -7200: "addt o",
    -5400: "nddt",
    -4056: "fmt",
    -3600: "n",
    -1521: "dmt",
    0: "gmt uct utc wet z",
    3600: "a bst cet met wat west",
    5040: "wmt",
    5736: "kmt",
    5794: "rmt",
    7200: "b bdst cat cest eet ist mest sast wast wemt",
    8440: "jmt",
    9017: "mmt",
    9394: "lst",
    10751: "tbmt",
    10800: "c cemt eat eest idt msk",
    12344: "tmt",
    14400: "d iddt msd",
    16279: "mdst",
    18000: "e pkt",
    21600: "f pkst",
    25025: "imt",
    25200: "g wib",
    25590: "plmt",
    28800: "awst h hkt wita",
    30600: "kst",
    32400: "awdt hkst i jst wit",
    34200: "acst cast",
    36000: "aest chst gst jdt k kdt",
    37800: "acdt",
    39600: "aedt gdt l",
    41400: "nzmt",
    43200: "m nzst",
    46800: "nzdt",
}
ABBREVIATIONS: Final = {name: offset for offset, names in _BY_OFFSET.items() for name in names.split()}

_LEAD: Final = re.compile(r"[ \t(]*(?:GMT(?=[+-]))?")
_DIGITS: Final = re.compile(r"[0-9:]*")
_WORD: Final = re.compile(r"[A-Za-z0-9/_+-]*")
_CLOSE: Final = re.compile(r"\)*")


def read_zone(text: str, at: int) -> tuple[int | None, int]:
    """The offset in seconds that stands at ``at``, and where it ends; no offset where the server finds none."""
    at = _end(_LEAD, text, at)
    if text[at : at + 1] in ("+", "-") and at < len(text):
        end = _end(_DIGITS, text, at + 1)
        offset = _correction(text[at + 1 : end])
        if offset is not None and text[at] == "-":
            offset = -offset
    else:
        end = _end(_WORD, text, at)
        offset = ABBREVIATIONS.get(text[at:end].lower())
    return offset, _end(_CLOSE, text, end)


def _end(pattern: re.Pattern[str], text: str, at: int) -> int:
    match = pattern.match(text, at)
    return at if match is None else match.end()


def _correction(digits: str) -> int | None:
    """H, HH, H:M, HHMM, HH:MM, HHMMSS or HH:MM:SS; without a colon, three digits are an hour and minutes too."""
    parts = digits.split(":")
    if not all(parts[:1]) or len(digits) > 8:
        return None
    if len(parts) == 1 and len(digits) in (1, 2):
        return int(digits) * 3600
    if len(parts) == 1 and len(digits) in (3, 4):
        return int(digits) // 100 * 3600 + int(digits) % 100 * 60
    if len(parts) == 1 and len(digits) == 6:
        return int(digits[:2]) * 3600 + int(digits[2:4]) * 60 + int(digits[4:])
    if len(parts) == 2 and 3 <= len(digits) <= 5 and len(parts[0]) <= 2 and len(parts[1]) <= 2:
        return int(parts[0]) * 3600 + int(parts[1] or 0) * 60
    if len(parts) == 3 and len(digits) == 8 and all(len(part) == 2 for part in parts):
        return int(parts[0]) * 3600 + int(parts[1]) * 60 + int(parts[2])
    return None
