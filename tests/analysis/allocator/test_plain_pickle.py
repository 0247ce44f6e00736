"""Pickles of plain data are read as Python reads them, and nothing else is."""

from __future__ import annotations

import pickle
from collections import OrderedDict
from pathlib import PurePosixPath
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphopt.analysis.allocator.plain_pickle import read_plain_pickle
from graphopt.errors import GraphoptError

LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(allow_nan=False), st.text(max_size=300),
    st.binary(max_size=300),
)  # fmt: skip
PLAIN_DATA: st.SearchStrategy[Any] = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=5),
        st.lists(inner, max_size=5).map(tuple),
        st.dictionaries(st.one_of(st.text(max_size=5), st.integers(0, 9)), inner, max_size=5),
    ),
    max_leaves=30,
)


@settings(max_examples=80, deadline=None)
@given(PLAIN_DATA, st.integers(3, 5))
def test_plain_data_is_read_as_python_reads_it(data: Any, protocol: int) -> None:
    found = read_plain_pickle(pickle.dumps(data, protocol))
    assert found == data
    assert type(found) is type(data)


def test_what_a_pickle_holds_several_times_is_one_object() -> None:
    frames = ["a", "b"]
    first, second = read_plain_pickle(pickle.dumps([{"frames": frames}, {"frames": frames}], 2))
    assert first["frames"] == frames
    assert first["frames"] is second["frames"]


def test_a_list_that_holds_itself_is_read() -> None:
    data: list[Any] = []
    data.append(data)
    found = read_plain_pickle(pickle.dumps(data, 4))
    assert found[0] is found


class Calls:
    """Its pickle would make a folder."""

    def __reduce__(self) -> Any:
        return (PurePosixPath.joinpath, (PurePosixPath("a"), "b"))


@pytest.mark.parametrize("value", [Calls(), OrderedDict(a=1), {1, 2}, PurePosixPath("a"), len, object(), [1, 1j]])
@pytest.mark.parametrize("protocol", [2, 4])
def test_what_is_no_plain_data_is_refused_with_its_place(value: Any, protocol: int) -> None:
    with pytest.raises(GraphoptError, match=r"byte \d+ of the pickle, instruction .*: only numbers, texts, lists"):
        read_plain_pickle(pickle.dumps({"segments": [value]}, protocol))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "the pickle ends after 0 bytes"),
        (b"\x80\x00.", "protocol 0; those from 2 to 5 are read"),
        (b"\x80\x04.", "byte 2 .* malformed"),
        (b"\x80\x04]]a", "the pickle ends"),
        (b"\x80\x04]].", "1 values are left over"),
        (b"\x80\x04Na.", "malformed"),
        (b"\x80\x04K\x01K\x02a.", "a list is missing"),
        (b"\x80\x04}(K\x01u.", "the names in a dict are texts"),
        (b"\x80\x04}(]K\x01u.", "the names in a dict are texts"),
        (b"\x80\x04(h\x05.", "value 5 is not remembered"),
        (b"\x80\x04e.", "malformed"),
        (b"\x80\x04K\x01e.", "no mark is before this"),
        (b"\x80\x04(.", "a value is missing"),
        (b"\x80\x04(\x94.", "a value is missing"),
        (b"\x80\x04\x8d\xff\xff\xff\xff\xff\xff\xff\x7f.", "the pickle ends"),
        (b"\x80\x04\x8b\x00\x01\x00\x00" + b"\x01" * 256 + b".", "a whole number of 256 bytes"),
        (b"\x80\x04N\x01.", "does nothing that makes plain data"),
        (b"\x80\x04\x8c\x01\xff.", "malformed"),
    ],
)
def test_malformed_pickles_are_refused_with_their_place(data: bytes, message: str) -> None:
    with pytest.raises(GraphoptError, match=message):
        read_plain_pickle(data)


def test_an_entry_far_away_in_the_memo_takes_no_memory() -> None:
    assert read_plain_pickle(b"\x80\x02Nr\xff\xff\xff\x7fj\xff\xff\xff\x7f\x86.") == (None, None)


def read_or_refuse(data: bytes) -> bool:
    """Whether bytes are read, or refused with an error of graphopt's; any other error leaves this."""
    try:
        read_plain_pickle(data)
    except GraphoptError as error:
        return "pickle" in str(error)
    return True


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=60), st.integers(0, 400), st.integers(0, 255))
def test_any_bytes_are_data_or_an_error(tail: bytes, place: int, byte: int) -> None:
    good = bytearray(pickle.dumps({"segments": [{"address": 2**40, "blocks": [{"size": 512}] * 3}]}, 4))
    good[place % len(good)] = byte
    for data in (bytes(good), b"\x80\x04" + tail, bytes(good)[:place]):
        assert read_or_refuse(data)
