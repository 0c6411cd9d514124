"""Lines out of chunks, wherever the chunks are cut, in bounded memory."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from hp_tool.errors import HpToolError
from service.api.bodies import LineSplitter

LIMIT = 8


def split(chunks: list[bytes]) -> list[bytes | str]:
    splitter = LineSplitter(limit=LIMIT)
    found = [line for chunk in chunks for line in splitter.feed(chunk)] + splitter.feed(b"\n")
    return [line.code if isinstance(line, HpToolError) else line for line in found]


def test_one_bad_line_leaves_its_neighbours_alone() -> None:
    assert split([b"one\n" + b"x" * 9 + b"\ntwo\n\n  \nthree"]) == [
        b"one",
        "payload_too_large",
        b"two",
        b"three",
    ]


@given(text=st.text(alphabet="ab \n", max_size=60), cuts=st.lists(st.integers(0, 60), max_size=6))
def test_where_the_chunks_are_cut_makes_no_difference(text: str, cuts: list[int]) -> None:
    data = text.encode()
    edges = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    chunks = [data[start:end] for start, end in pairwise(edges)]
    expected = [
        line.strip() if len(line) <= LIMIT else "payload_too_large" for line in data.split(b"\n")
    ]
    assert split(chunks) == [line for line in expected if line]


def test_an_endless_line_is_not_collected() -> None:
    splitter = LineSplitter(limit=LIMIT)
    for _ in range(1000):
        assert splitter.feed(b"x" * 1000) == []
        assert len(splitter._buffer) <= LIMIT
    assert [type(line) for line in splitter.feed(b"\n")] == [HpToolError]
