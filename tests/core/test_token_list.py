"""Tokens of a sequence: a list in all that the engine asks of it, with a beginning that forks share."""

from hypothesis import given
from hypothesis import strategies as st

from octavo.core.token_list import TokenList

ids = st.lists(st.integers(0, 9), max_size=6)


@given(ids, ids, st.integers(-14, 14), st.integers(-14, 14))
def test_it_reads_like_a_list(begin, end, start, stop):
    tokens, want = TokenList(begin, end), begin + end
    assert len(tokens) == len(want) and list(tokens) == want and set(tokens) == set(want)
    assert tokens[start:stop] == want[start:stop] and tokens[start:] == want[start:] and tokens[:stop] == want[:stop]
    for index in range(-len(want), len(want)):
        assert tokens[index] == want[index]


def test_a_fork_shares_the_beginning_and_nothing_else():
    begin = [1, 2, 3]
    first = TokenList(begin, [4])
    second = first.fork()
    first.append(5)
    second.append(6)
    assert list(first) == [1, 2, 3, 4, 5] and list(second) == [1, 2, 3, 4, 6] and begin == [1, 2, 3]
    assert first._begin is second._begin is begin
