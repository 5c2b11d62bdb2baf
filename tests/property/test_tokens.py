"""Properties of keys and resume tokens, over random values of every type and random bytes."""

from __future__ import annotations

import math
import random
import struct
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction

import bson
from bson.decimal128 import Decimal128
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.core import raw_bson
from tailrace.core.event import keystring
from tailrace.core.event.change_event import ChangeEvent
from tailrace.core.event.resume_token import ResumeToken
from tailrace.core.stage.check_resumability import ResumeStatus, compare_with_token
from tailrace.errors import InvalidResumeToken
from tests.amounts import amount
from tests.property import random_values

RANDOM = st.randoms(use_true_random=False)


def decode(key: bytes, bits: str) -> tuple[int, bytes]:
    reader = keystring.KeyReader(key, keystring.pack_type_bits(bits) or b"")
    result = reader.value(reader.take_byte())
    assert reader.pos == len(key)
    return result


def has_lost_payload(type_: int, value: bytes) -> bool:
    """Whether a number is a NaN, or an infinity with digits: a key keeps their kind only."""
    if type_ == raw_bson.DOUBLE:
        return math.isnan(struct.unpack("<d", value)[0])
    return type_ == raw_bson.DECIMAL128 and not Decimal128.from_bid(value).to_decimal().is_finite()


def number_of(type_: int, value: bytes) -> Fraction:
    if type_ == raw_bson.DOUBLE:
        return Fraction(struct.unpack("<d", value)[0])
    if type_ == raw_bson.DECIMAL128:
        return Fraction(Decimal128.from_bid(value).to_decimal())
    return Fraction(int.from_bytes(value, "little", signed=True))


def finite_number(rng: random.Random) -> tuple[int, bytes]:
    makers = (random_values.double, random_values.decimal, random_values.int32, random_values.int64)
    while True:
        type_, value = rng.choice(makers)(rng)
        finite = type_ != raw_bson.DOUBLE or math.isfinite(struct.unpack("<d", value)[0])
        if finite and not has_lost_payload(type_, value):
            return type_, value


@settings(max_examples=amount(250, 1500))
@given(RANDOM)
def test_a_number_comes_back_from_its_key_byte_for_byte(rng: random.Random) -> None:
    type_, value = finite_number(rng)
    assert decode(*keystring.encode(type_, value)) == (type_, value)


@settings(max_examples=amount(100, 500))
@given(RANDOM)
def test_keys_of_numbers_are_ordered_like_the_numbers_across_all_four_types(rng: random.Random) -> None:
    numbers = [finite_number(rng) for _ in range(6)]
    close = Decimal128(Decimal(rng.choice((1, -1)) * rng.randint(1, 10**17)) / 10**15)
    numbers.append((raw_bson.DECIMAL128, close.bid))
    numbers.append((raw_bson.DOUBLE, struct.pack("<d", float(close.to_decimal()))))
    for left in numbers:
        for right in numbers:
            left_key, right_key = keystring.encode(*left)[0], keystring.encode(*right)[0]
            assert (left_key < right_key) == (number_of(*left) < number_of(*right))
            assert (left_key == right_key) == (number_of(*left) == number_of(*right))


@settings(max_examples=amount(60, 300))
@given(RANDOM)
def test_a_document_with_all_types_comes_back_from_its_token(rng: random.Random) -> None:
    document = random_values.document(rng)
    token = ResumeToken(7 << 32, uuid=bytes(16), event_identifier=document)
    again = ResumeToken.parse(token.to_bson())
    decoded = again.event_identifier
    assert decoded is not None
    once_more = ResumeToken(7 << 32, uuid=bytes(16), event_identifier=decoded)
    assert once_more.to_bson() == token.to_bson()
    if not contains_lost_payload(document):
        assert decoded == document


def contains_lost_payload(document: bytes) -> bool:
    for element in raw_bson.elements(document):
        value = raw_bson.value(document, element)
        if element.type in (raw_bson.OBJECT, raw_bson.ARRAY) and contains_lost_payload(value):
            return True
        if element.type == raw_bson.CODE_WITH_SCOPE:
            scope = 8 + raw_bson.read_int32(value, 4)
            if contains_lost_payload(value[scope:]):
                return True
        if has_lost_payload(element.type, value):
            return True
    return False


def is_token_or_refused(read: Callable[[], ResumeToken]) -> bool:
    try:
        return read().parts is not None
    except InvalidResumeToken as error:
        return error.code is not None


@given(st.binary(max_size=80), st.one_of(st.none(), st.binary(max_size=12)))
def test_random_bytes_are_a_token_or_an_invalid_resume_token(key: bytes, type_bits: bytes | None) -> None:
    assert is_token_or_refused(lambda: ResumeToken.from_hex(key.hex(), type_bits))


@settings(max_examples=amount(100, 500))
@given(RANDOM)
def test_a_damaged_token_is_a_token_or_an_invalid_resume_token(rng: random.Random) -> None:
    token = ResumeToken(
        rng.randrange(2**64),
        version=rng.choice((1, 2)),
        txn_op_index=rng.randrange(3),
        uuid=rng.choice((None, bytes(16))),
        event_identifier=random_values.document(rng),
    )
    key, bits = bytearray(token.sort_key), bytearray(token.type_bits or b"\x80\x01")
    for _ in range(rng.randint(1, 3)):
        damaged = rng.choice((key, key, bits))
        damaged[rng.randrange(len(damaged))] = rng.randrange(256)
    assert is_token_or_refused(lambda: ResumeToken.from_hex(key.hex(), bytes(bits)))


@given(st.text(max_size=40))
def test_random_text_is_a_token_or_an_invalid_resume_token(text: str) -> None:
    assert is_token_or_refused(lambda: ResumeToken.parse({"_data": text}))


def resume_search(token: ResumeToken, wanted: ResumeToken) -> ResumeStatus:
    """What the search for ``wanted`` says about an event with ``token``."""
    return compare_with_token(ChangeEvent("insert", token.cluster_time, token.to_bson()), wanted)


@given(st.integers(-(2**31), 2**31 - 1), st.integers(1, 2))
def test_the_resume_search_takes_equal_numbers_of_different_types_for_equal(number: int, version: int) -> None:
    as_int, as_double, as_decimal = (
        ResumeToken(5, version=version, uuid=bytes(16), event_identifier=bson.encode({"_id": value}))
        for value in (number, float(number), Decimal128(str(number)))
    )
    assert resume_search(as_int, as_double) is resume_search(as_int, as_decimal) is ResumeStatus.FOUND
    larger = ResumeToken(5, version=version, uuid=bytes(16), event_identifier=bson.encode({"_id": number + 0.5}))
    assert resume_search(as_decimal, larger) is ResumeStatus.CHECK_NEXT
    assert resume_search(larger, as_decimal) is ResumeStatus.SURPASSED
    assert as_int < larger
