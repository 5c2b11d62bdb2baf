"""Random regular expressions: what people write, and every odd construct of PCRE."""

from __future__ import annotations

import random


def _words(text: str) -> list[str]:
    return text.split()


_LETTERS = [*_words("a b ab c . - # é É ß ſ K Σ 😀 0 7 x \\- \\."), " ", "\n"]
_ESCAPES = _words(
    r"""
    \d \D \w \W \s \S \h \H \v \V \N \R \X \b \B \A \Z \z \G \K \e \f \n \r \t \a \y \i \j \x41 \x4 \x \x{e9}
    \x{1F600} \x{} \o{101} \101 \0 \07 \1 \2 \8 \10 \11 \81 \g1 \g{1} \g{-1} \g{2} \g{n} \g<1> \g'1' \g<n> \k<n> \k{n}
    \k'n' \p{L} \p{Lu} \P{Lu} \p{^Lu} \p{Greek} \p{Latin} \p{L&} \pL \p{Xwd} \cA \cz \Q.*\E \Qa \E \u0041 \U \l \M
    """
)
_CLASSES = _words(
    r"""
    [ab] [^ab] [a-c] []a] [^]a] [a-] [-a] [\d-z] [\w-] [a-\d] [[:alpha:]] [[:^alpha:]b] [^[:space:]] [[:upper:]]
    [[:<:]] [[:>:]] [[:foo:]] [é-ü] [^é] [\x41-\x5a] [\b\t] [\Q]\E] [a\Q-\Ec] [\p{L}\d] [^\p{Lu}] [\R\X] [a&&b] [a--b]
    [a[b] [ [c-a] [\h\V] [K-S] [[.a.]] [[:word:]-x] [\\] [\E]a] [\N]
    """
)
_QUANTIFIERS = _words("* + ? *? +? ?? *+ ++ ?+ {2} {0} {1,2} {2,} {,2} {1,2}? {2}+ {")
_OPENERS = _words(
    """
    ( ( ( (?: (?: (?> (?| (?= (?! (?<= (?<! (?<n> (?P<m> (?'o' (?i: (?s-i: (?x: (?(1) (?(?=a) (?(?<!b) (?(R) (?(<n>)
    (?(DEFINE) (?(-1) (?J: (?mU: (?^: (*pla:
    """
)
_ALONE = _words(
    """
    (?i) (?x) (?s) (?m) (?-i) (?U) (?J) (?n) (?R) (?0) (?1) (?-1) (?+1) (?2) (?&n) (?P>m) (?P=n) (?C) (?C7) (?#c) (*F)
    (*ACCEPT) (*COMMIT) (*PRUNE) (*SKIP) (*THEN) (*MARK:m) (*SKIP:m) (*PRUNE:) (*F:x) (*foo) ( ) (? (?<
    """
)
_STARTS = _words(
    "(*UTF8) (*UCP) (*UTF) (*CR) (*CRLF) (*ANYCRLF) (*ANY) (*BSR_ANYCRLF) (*NO_START_OPT) (*LIMIT_MATCH=50) (*NUL)"
)
#: Without letters whose properties changed after Unicode 7, which the server's library holds.
SUBJECTS = [
    *_words("a b ab abc aab aaab abab abcabc ABC Aa a.b éÉ σςΣ İıiI åÅÅ ǄǅǆǇ A-[]{}^$ éx Αα۵一 aabba 01780 sſSkKK"),
    *["", "a b c", "a\nb", "a\r\nb\n", "xyz 123", "a\0b", "straße ẞ", "😀 a😀", "\u2028b\x85c", "\x01\x07\x1b\x7f"],
    *["*+?|\\E Q", "aca bcb"],
]


def pattern(rng: random.Random) -> str:
    """A pattern; about half of them compile."""
    start = rng.choice(_STARTS) if rng.random() < 0.08 else ""
    return start + _branches(rng, rng.randrange(4))


def options(rng: random.Random) -> str:
    return "".join(letter for letter in "imsx" if rng.random() < 0.25)


def subject(rng: random.Random) -> str:
    if rng.random() < 0.7:
        return rng.choice(SUBJECTS)
    return "".join(rng.choice(_LETTERS) for _ in range(rng.randrange(12)))


def _branches(rng: random.Random, depth: int) -> str:
    count = rng.choices([1, 2, 3], [6, 3, 1])[0]
    return "|".join("".join(_piece(rng, depth) for _ in range(rng.randrange(1, 4))) for _ in range(count))


def _piece(rng: random.Random, depth: int) -> str:
    choice = rng.random()
    if choice < 0.4:
        text = rng.choice(_LETTERS)
    elif choice < 0.58:
        text = rng.choice(_ESCAPES)
    elif choice < 0.68:
        text = rng.choice(_CLASSES)
    elif choice < 0.74:
        text = rng.choice("^$")
    elif choice < 0.8:
        text = rng.choice(_ALONE)
    elif depth:
        text = rng.choice(_OPENERS) + _branches(rng, depth - 1) + ")"
    else:
        text = "(" + rng.choice("abc") + ")"
    return text + (rng.choice(_QUANTIFIERS) if rng.random() < 0.3 else "")
