"""Page policies: their sizes, what they refuse, and the contract that they share."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.core.interfaces import PagePolicy
from octavo.core.policies.page_divisors import DivisorPages, RowPages, WholePages
from octavo.core.policies.page_policies import PAGE_POLICIES
from octavo.core.policies.page_size import FixedPages, RatioPages
from octavo.core.policies.page_sqrt import QuotedPages, SqrtPages

KIB = 1024

SIZES = [  # policy, segment length, tokens of a page
    (FixedPages(20), None, 20),
    (FixedPages(20), 7, 20),
    (RatioPages(), None, 24),
    (RatioPages(), 576, 24),
    (RatioPages(of=32, grain=16), 576, 48),
    (RatioPages(ratio=1.25), 576, 24),  # 20 lies between 16 and 24
    (RatioPages(ratio=0.1), 576, 8),
    (DivisorPages(), 576, 32),
    (DivisorPages(cap=48), 576, 48),
    (DivisorPages(cap=31), 576, 24),
    (DivisorPages(), 144, 24),
    (DivisorPages(cap=48), 144, 48),
    (DivisorPages(), 64, 32),
    (DivisorPages(), 49, 8),  # wastes 7; 16 and 32 waste 15, 24 wastes 23
    (DivisorPages(cap=64), 729, 32),  # 8, 16 and 32 waste 7
    (DivisorPages(grain=16), 49, 32),  # both waste 15
    (RowPages(), 576, 24),
    (RowPages(rows=2), 576, 48),
    (RowPages(), 256, 16),
    (RowPages(), 144, 24),  # a row of 12 is no multiple of 8, two are
    (RowPages(rows=3), 144, 48),  # nor are three
    (RowPages(grain=16), 144, 48),
    (RowPages(), 49, 56),  # eight rows of 7: more than there are
    (RowPages(rows=9), 64, 64),
    (RowPages(columns=32), 576, 32),
    (WholePages(), 576, 576),
    (WholePages(), 49, 56),
    (WholePages(grain=16), 49, 64),
    # The examples of the derivation: b = 128 KiB and m = 64 KiB, b = 128 KiB and m = 16 KiB, b = 24 KiB and m = 16 KiB.
    (SqrtPages.from_bytes(64 * KIB, 128 * KIB), 576, 24),
    (SqrtPages.from_bytes(16 * KIB, 128 * KIB), 1024, 16),
    (SqrtPages.from_bytes(16 * KIB, 24 * KIB, grain=1), 576, 28),
    (SqrtPages.from_bytes(16 * KIB, 24 * KIB), 576, 24),
    (SqrtPages(0.5, mean_tokens=576), None, 24),
    (SqrtPages(0.5, mean_tokens=4), 576, 24),  # a length that is known is the one that counts
    (SqrtPages(1e-9), 576, 8),
    (SqrtPages(1e9), 576, 256),
    (SqrtPages(1e9, largest=100), 576, 96),
    (SqrtPages(1e9), 49, 56),  # no larger than its segment takes
    (QuotedPages(24 * KIB, 32), 576, 256),
    (QuotedPages(24 * KIB, 32, calibration=24 / math.sqrt(2 * 576 * 24 * KIB * 32)), 576, 24),
    (QuotedPages(24 * KIB, 32, calibration=1 / (24 * KIB), mean_tokens=576), None, 8),
]


@pytest.mark.parametrize("policy, tokens, page", SIZES, ids=str)
def test_sizes(policy, tokens, page):
    assert policy.page_tokens(tokens) == page


def test_the_registry_holds_every_policy():
    assert {type(policy) for policy, _, _ in SIZES} == set(PAGE_POLICIES.values())


POLICIES = st.one_of(
    st.builds(FixedPages, st.integers(1, 300)),
    st.builds(RatioPages, st.floats(0.01, 20), st.integers(1, 300), st.sampled_from([1, 4, 8, 16])),
    st.builds(DivisorPages, st.integers(16, 300), st.sampled_from([1, 4, 8, 16])),
    st.builds(RowPages, st.integers(1, 30), st.sampled_from([None, 1, 3, 7, 8]), st.sampled_from([1, 4, 8, 16])),
    st.builds(WholePages, st.sampled_from([1, 4, 8, 16])),
    st.builds(SqrtPages, st.floats(1e-6, 1e6), st.none(), st.sampled_from([1, 4, 8, 16]), st.integers(16, 300)),
    st.builds(QuotedPages, st.floats(1, 1e6), st.integers(1, 1000), st.floats(1e-9, 10)),
)


@given(policy=POLICIES, side=st.integers(1, 40))
def test_every_page_is_a_multiple_of_the_grain(policy, side):
    assert isinstance(policy, PagePolicy)
    tokens = side * side
    if isinstance(policy, RowPages) and policy.columns is not None:
        tokens = side * policy.columns
    page = policy.page_tokens(tokens)
    assert page >= policy.grain and page % policy.grain == 0
    cap = {DivisorPages: "cap", SqrtPages: "largest", QuotedPages: "largest"}.get(type(policy))
    assert cap is None or page <= getattr(policy, cap)


@given(tokens=st.integers(1, 2000), cap=st.integers(8, 200))
def test_no_size_under_the_cap_wastes_less_than_the_divisor_policy(tokens, cap):
    page = DivisorPages(cap).page_tokens(tokens)
    wastes = {size: -(-tokens // size) * size - tokens for size in range(8, cap + 1, 8)}
    assert wastes[page] == min(wastes.values())
    assert all(size <= page for size, waste in wastes.items() if waste == wastes[page])
    divisors = [size for size in wastes if tokens % size == 0]
    assert not divisors or page == max(divisors)


@given(columns=st.integers(1, 60), rows=st.integers(1, 60), least=st.integers(1, 5))
def test_pages_of_rows_hold_whole_rows(columns, rows, least):
    tokens = columns * rows
    page = RowPages(least, columns).page_tokens(tokens)
    if page < tokens:
        assert page % columns == 0 and page // columns >= least


@given(overhead=st.floats(0.01, 100), tokens=st.integers(10, 100_000))
def test_the_square_root_is_where_waste_and_overhead_cost_least(overhead, tokens):
    def cost(page):
        return page / 2 + tokens / page * overhead

    best = SqrtPages(overhead).optimum(tokens)
    assert cost(best) <= min(cost(best * 0.9), cost(best * 1.1))
    assert best / 2 == pytest.approx(tokens / best * overhead)  # both terms are equal there


@given(token_bytes=st.floats(1, 1e6), page_bytes=st.floats(1, 1e6), concurrency=st.integers(1, 500))
def test_calibrated_the_quoted_rule_is_the_square_root_rule(token_bytes, page_bytes, concurrency):
    quoted = QuotedPages(token_bytes, concurrency, calibration=math.sqrt(page_bytes / concurrency) / token_bytes)
    assert quoted.optimum(700) == pytest.approx(SqrtPages.from_bytes(page_bytes, token_bytes).optimum(700))


def test_a_plain_number_as_calibration_moves_the_wrong_way():
    quoted = QuotedPages(24 * KIB, 32, calibration=1e-3)
    assert QuotedPages(48 * KIB, 32, calibration=1e-3).optimum(576) > quoted.optimum(576)
    assert QuotedPages(24 * KIB, 64, calibration=1e-3).optimum(576) > quoted.optimum(576)
    assert SqrtPages.from_bytes(KIB, 48 * KIB).optimum(576) < SqrtPages.from_bytes(KIB, 24 * KIB).optimum(576)


REFUSED = [
    (lambda: FixedPages(0), "tokens of FixedPages must be an integer of at least 1, got 0"),
    (lambda: FixedPages(True), "got True"),
    (lambda: RatioPages(ratio=0), "ratio of RatioPages must be a finite number above 0, got 0"),
    (lambda: RatioPages(ratio=math.inf), "got inf"),
    (lambda: RatioPages(of=-16), "of of RatioPages .* got -16"),
    (lambda: RatioPages(grain=0), "grain of RatioPages .* got 0"),
    (lambda: DivisorPages(cap=4), "cap=4 is below grain=8"),
    (lambda: DivisorPages(cap=16.0), "cap of DivisorPages .* got 16.0"),
    (lambda: RowPages(rows=0), "rows of RowPages .* got 0"),
    (lambda: RowPages(columns=0), "columns of RowPages .* got 0"),
    (lambda: WholePages(grain=-1), "grain of WholePages .* got -1"),
    (lambda: SqrtPages(0), "overhead_tokens of SqrtPages .* got 0"),
    (lambda: SqrtPages(math.nan), "got nan"),
    (lambda: SqrtPages(1, mean_tokens=0), "mean_tokens of SqrtPages .* got 0"),
    (lambda: SqrtPages(1, largest=4), "largest=4 is below grain=8"),
    (lambda: SqrtPages.from_bytes(1, 0), "token_bytes of SqrtPages .* got 0"),
    (lambda: QuotedPages(0, 1), "token_bytes of QuotedPages .* got 0"),
    (lambda: QuotedPages(1, -1), "concurrency of QuotedPages .* got -1"),
    (lambda: QuotedPages(1, 1, calibration=0), "calibration of QuotedPages .* got 0"),
    (lambda: RowPages().page_tokens(50), r"50 tokens are no square grid \(7 x 7 are 49, 8 x 8 are 64\); give columns"),
    (lambda: RowPages(columns=24).page_tokens(100), "100 tokens are no whole rows of columns=24"),
    *(
        (lambda policy=policy: policy.page_tokens(None), f"{type(policy).__name__} needs a segment's length")
        for policy in (DivisorPages(), RowPages(), WholePages())
    ),
    *(
        (lambda policy=policy: policy.page_tokens(None), f"{type(policy).__name__} needs a length.*give mean_tokens")
        for policy in (SqrtPages(1), QuotedPages(1, 1))
    ),
]


@pytest.mark.parametrize("make, message", REFUSED, ids=[message for _, message in REFUSED])
def test_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
