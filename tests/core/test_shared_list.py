"""A list in all that the engine asks of it, with beginnings that forks share."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.core.execution.token_list import TokenList
from octavo.core.shared_list import SharedList

ids = st.lists(st.integers(0, 9), max_size=6)


@pytest.mark.parametrize("kind", [SharedList, TokenList])
@given(st.lists(ids, max_size=4), st.integers(-14, 14), st.integers(-14, 14))
def test_it_reads_like_a_list_after_any_forks(kind, pieces, start, stop):
    items, want = kind(pieces[0] if pieces else []), list(pieces[0] if pieces else [])
    for piece in pieces[1:]:
        items = items.fork()
        for item in piece:
            items.append(item)
        want += piece
    assert len(items) == len(want) and list(items) == want and set(items) == set(want)
    assert items[start:stop] == want[start:stop] and items[start:] == want[start:] and items[:stop] == want[:stop]
    for index in range(-len(want), len(want)):
        assert items[index] == want[index]


@pytest.mark.parametrize("kind", [SharedList, TokenList])
def test_forks_go_their_own_ways_and_share_the_rest(kind):
    begin = [1, 2, 3]
    first = kind(begin, [4])
    second = first.fork()
    first.append(5)
    second.append(6)
    third = first.fork()
    third.append(7)
    first.append(8)
    assert list(first) == [1, 2, 3, 4, 5, 8] and list(second) == [1, 2, 3, 4, 6] and list(third) == [1, 2, 3, 4, 5, 7]
    assert begin == [1, 2, 3] and first._pieces[0] is second._pieces[0] is third._pieces[0] is begin
    assert first._pieces[:2] == second._pieces and first._pieces[1] is second._pieces[1]
