"""How often the ICU that is installed here and mongod's ICU 57.1 put two strings in different orders.

Random pairs of short strings, many of which differ only in case, accents or one letter: in the letters of each language
that mongod knows, in the characters of Unicode 8, which is what 57.1 knows, and in all that Python knows. The server
compares them with ``$cmp`` under the collation, and our expression does.

    python bench/collation.py --pairs 500
"""

from __future__ import annotations

import argparse
import random
import unicodedata
from collections import Counter
from typing import Any

import bson
import icu
import pymongo

from tailrace.core.expression import compile_stages, parse_collation
from tailrace.core.expression.values.collation import LOCALES
from tailrace.embedded import ReplicaSet

_EVERYWHERE = "aAbBcCzZ019 -_.,!$éèêäöüßñøåÆ"
_STAGE = {"$project": {"_id": 0, "order": {"$cmp": ["$left", "$right"]}}}
_UNASSIGNED = {"Cn", "Cs", "Co"}


def pair(rng: random.Random, alphabet: str) -> tuple[str, str]:
    """Two strings of one to four characters; half of the time the second is a variant of the first."""
    word = "".join(rng.choice(alphabet) for _ in range(rng.randint(1, 4)))
    roll = rng.random()
    if roll < 0.25:
        return word, word.swapcase()
    if roll < 0.4:
        return word, unicodedata.normalize("NFD", word)
    if roll < 0.6:
        place = rng.randrange(len(word))
        return word, word[:place] + rng.choice(alphabet) + word[place + 1 :]
    return word, "".join(rng.choice(alphabet) for _ in range(rng.randint(1, 4)))


def differing(database: Any, pairs: list[tuple[str, str]], collation: dict[str, Any]) -> int:
    """How many of the pairs the two sides put in different orders."""
    documents = [{"_id": number, "left": left, "right": right} for number, (left, right) in enumerate(pairs)]
    database.pairs.drop()
    database.pairs.insert_many(documents)
    found = database.pairs.aggregate([{"$sort": {"_id": 1}}, _STAGE], collation=collation)
    ours = compile_stages([bson.encode(_STAGE)], collation=parse_collation(bson.encode(collation)))
    same = (ours.apply(bson.encode(each)) == bson.encode(other) for each, other in zip(documents, found, strict=True))
    return sum(not equal for equal in same)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=500, help="pairs a language; ten times as many for the others")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    rng = random.Random(options.seed)
    known = [chr(code) for code in range(0x20, 0x30000) if unicodedata.category(chr(code)) not in _UNASSIGNED]
    old = [letter for letter in known if float(str(icu.Char.charAge(ord(letter))).rsplit(".", 2)[0]) <= 8]
    kinds = {
        "own letters": {
            locale: _EVERYWHERE + "".join(icu.LocaleData(locale).getExemplarSet()) * 3 for locale in sorted(LOCALES)
        },
        "Unicode 8": dict.fromkeys(("en", "de", "ja"), "".join(old)),
        "all of Unicode": dict.fromkeys(("en", "de", "ja"), "".join(known)),
    }
    print(f"ICU {icu.ICU_VERSION} here, 57.1 in mongod 6.0.27; pairs of strings in another order")
    with ReplicaSet(1) as replica_set, pymongo.MongoClient[Any](replica_set.uri) as client:
        for kind, alphabets in kinds.items():
            count = options.pairs if len(alphabets) > 3 else 10 * options.pairs
            for strength in (1, 3):
                by_locale: Counter[str] = Counter()
                asked = 0
                for locale, alphabet in alphabets.items():
                    if strength == 1 and locale in ("da", "mt", "fr_CA"):
                        continue  # their own defaults contradict it
                    asked += count
                    pairs = [pair(rng, alphabet) for _ in range(count)]
                    by_locale[locale] = differing(
                        client.bench_collation, pairs, {"locale": locale, "strength": strength}
                    )
                most = ", ".join(f"{locale} {number}" for locale, number in by_locale.most_common(4) if number)
                print(f"{kind:15} strength {strength}: {by_locale.total():5} of {asked} ({most or 'none'})", flush=True)


if __name__ == "__main__":
    main()
