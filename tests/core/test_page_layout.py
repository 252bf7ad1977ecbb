"""Where tokens lie: an example to the slot, an oracle that lays out token by token, and the kernels' reading of it."""

import zlib

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from octavo.core.memory.page_layout import PageLayout, Segment, predicted_waste
from octavo.core.policies.page_divisors import DivisorPages, RowPages, WholePages
from octavo.core.policies.page_size import FixedPages, RatioPages
from octavo.core.policies.page_sqrt import SqrtPages
from octavo.kernels.layout import SCRATCH_UNIT, pack_entries, pool_shape
from octavo.kernels.reference import backend as reference

TEXT16 = {"text": FixedPages(16), "image": FixedPages(24)}


def text(tokens):
    return Segment("text", tokens)


def image(tokens):
    return Segment("image", tokens)


class TestExample:
    """The drawing of the docstring."""

    layout = PageLayout([text(20), image(25), text(1)], TEXT16, 8)

    def test_entries(self):
        assert self.layout.valid(61).tolist() == [8, 8, 4, 0, 8, 8, 8, 1, 0, 0, 8, 8]
        assert self.layout.unit_pos(61).tolist() == [0, 8, 16, 20, 20, 28, 36, 44, 45, 45, 45, 53]
        assert self.layout.valid(61).dtype == self.layout.unit_pos(61).dtype == np.int32
        assert self.layout.valid(0).tolist() == self.layout.unit_pos(0).tolist() == []

    def test_entries_do_not_change_as_tokens_come(self):
        for tokens in range(62):
            entries = self.layout.entries_for(tokens)
            assert self.layout.valid(tokens).tolist() == self.layout.valid(61)[:entries].tolist()
            assert self.layout.unit_pos(tokens).tolist() == self.layout.unit_pos(61)[:entries].tolist()

    def test_slots(self):
        slots = self.layout.slots(0, 61)
        assert slots.tolist() == [*range(20), *range(32, 57), *range(80, 96)] and slots.dtype == np.int64
        assert self.layout.slots(18, 22).tolist() == [18, 19, 32, 33]
        assert self.layout.slots(22, 24).tolist() == [34, 35]
        assert self.layout.slots(20, 20).tolist() == []

    def test_pages(self):
        layout = self.layout
        assert [layout.first_token(page) for page in range(6)] == [0, 16, 20, 44, 45, 61]
        assert [layout.end_token(page) for page in range(6)] == [16, 20, 44, 45, 61, 77]
        assert [layout.page_slots(page) for page in range(5)] == [16, 16, 24, 24, 16]
        assert [layout.page_entries(page) for page in range(5)] == [2, 2, 3, 3, 2]
        assert [layout.first_entry(page) for page in range(6)] == [0, 2, 4, 7, 10, 12]
        assert [layout.page_of(token) for token in (0, 15, 16, 19, 20, 43, 44, 45, 60, 61)] == [
            0, 0, 1, 1, 2, 2, 3, 4, 4, 5,
        ]  # fmt: skip

    def test_counts(self):
        layout = self.layout
        tokens = (0, 1, 16, 17, 20, 21, 44, 45, 46)
        assert [layout.pages_for(n) for n in tokens] == [0, 1, 1, 2, 2, 3, 3, 4, 5]
        assert [layout.entries_for(n) for n in tokens] == [0, 2, 2, 4, 4, 7, 7, 10, 12]
        assert [layout.stored_slots(n) for n in tokens] == [0, 1, 16, 17, 20, 33, 56, 57, 81]
        assert [layout.waste(n) for n in tokens] == [0, 15, 0, 15, 12, 35, 12, 35, 50]

    def test_a_page_is_published_when_nothing_can_join_it(self):
        assert [page for page in range(5) if self.layout.is_sealed_full(page, 45)] == [0, 1, 2, 3]
        assert not self.layout.is_sealed_full(1, 19) and self.layout.is_sealed_full(1, 20)  # sealed with 4 tokens
        assert not self.layout.is_sealed_full(4, 60) and self.layout.is_sealed_full(4, 61)  # open: only when full

    def test_an_image_at_the_end_is_followed_by_open_text(self):
        layout = PageLayout([text(20), image(25)], TEXT16, 8)
        assert layout.pages_for(45) == 4 and layout.is_sealed_full(3, 45)
        assert layout.slots(0, 61).tolist() == self.layout.slots(0, 61).tolist()

    def test_adjacent_texts_are_apart_if_they_are_given_apart(self):
        assert PageLayout([text(20), text(4)], TEXT16, 8).first_token(2) == 20
        assert PageLayout([text(24)], TEXT16, 8).first_token(2) == 32


KINDS = {"image": FixedPages(24), "thumb": DivisorPages(), "whole": WholePages(), "rows": RowPages(columns=1)}
SEGMENTS = st.lists(
    st.builds(Segment, st.sampled_from(["text", *KINDS, "sqrt"]), st.integers(1, 90)), min_size=0, max_size=6
)
POLICIES = st.builds(
    lambda page, overhead: {"text": FixedPages(page), "sqrt": SqrtPages(overhead), **KINDS},
    st.sampled_from([8, 16, 24, 32]),
    st.floats(0.01, 10),
)


def laid_out(segments, policies, more):
    """The rules, token by token: for each page its first token, its tokens and its slots. ``more`` tokens of open text
    come after the last text, or after what else is last."""
    lengths = [[s, s.tokens] for s in segments]
    if not segments or segments[-1].kind != "text":
        lengths.append([text(0), 0])
    lengths[-1][1] += more
    pages, token = [], 0
    for number, (segment, tokens) in enumerate(lengths):
        is_open = number == len(lengths) - 1
        size = policies[segment.kind].page_tokens(None if is_open else segment.tokens)
        for _ in range(tokens):
            if not pages or pages[-1]["segment"] != number or pages[-1]["tokens"] == size:
                pages.append({"segment": number, "first": token, "tokens": 0, "slots": size, "open": is_open})
            pages[-1]["tokens"] += 1
            token += 1
    return pages


@given(segments=SEGMENTS, policies=POLICIES, more=st.integers(0, 40))
def test_the_layout_is_the_one_of_token_by_token(segments, policies, more):
    unit = 8
    layout = PageLayout(segments, policies, unit)
    pages = laid_out(segments, policies, more)
    total = sum(page["tokens"] for page in pages)
    slots, valid, unit_pos, slot = [], [], [], 0
    for number, page in enumerate(pages):
        assert layout.first_token(number) == page["first"]
        assert layout.page_slots(number) == page["slots"] == layout.page_entries(number) * unit
        assert layout.first_entry(number) * unit == slot
        end = page["first"] + page["tokens"]
        for token in range(page["first"], end):
            assert layout.page_of(token) == number
            slots.append(slot + token - page["first"])
        for offset in range(0, page["slots"], unit):
            valid.append(unit if page["open"] else min(max(page["tokens"] - offset, 0), unit))
            unit_pos.append(page["first"] + (offset if page["open"] else min(offset, page["tokens"])))
        slot += page["slots"]
        full = not page["open"] or page["tokens"] == page["slots"]
        assert layout.is_sealed_full(number, total) == full and not layout.is_sealed_full(number, end - 1)
    assert layout.slots(0, total).tolist() == slots
    assert layout.valid(total).tolist() == valid and layout.unit_pos(total).tolist() == unit_pos
    assert layout.pages_for(total) == len(pages) and layout.entries_for(total) == len(valid)
    assert layout.stored_slots(total) == (slots[-1] + 1 if slots else 0)
    assert layout.waste(total) == slot - total
    for start in range(0, total, 7):
        stop = min(start + 11, total)
        assert layout.slots(start, stop).tolist() == slots[start:stop]
    assert layout.uniform == ([segment.kind for segment in segments] in ([], ["text"]))


@given(segments=SEGMENTS, policies=POLICIES)
def test_every_token_has_a_slot_of_its_own_that_a_kernel_counts_as_filled(segments, policies):
    layout = PageLayout(segments, policies, 8)
    total = sum(segment.tokens for segment in segments) + 13
    valid, positions = layout.valid(total), layout.unit_pos(total)
    stored = np.arange(layout.stored_slots(total))
    entry, offset = stored // 8, stored % 8
    filled = offset < valid[entry]
    assert layout.slots(0, total).tolist() == stored[filled].tolist()
    assert (positions[entry] + offset)[filled].tolist() == list(range(total))


@given(segments=SEGMENTS, policies=POLICIES, aligned=st.booleans())
def test_predicted_waste_is_measured_waste(segments, policies, aligned):
    layout = PageLayout(segments, policies, 8, aligned=aligned)
    total = sum(segment.tokens for segment in segments)
    held = sum(layout.page_slots(page) for page in range(layout.pages_for(total)))
    assert predicted_waste(segments, policies, aligned=aligned) == held - total == layout.waste(total)


@given(page=st.sampled_from([1, 5, 8, 16, 24]), tokens=st.integers(0, 100), start=st.integers(0, 100))
def test_one_open_text_is_plain_arithmetic(page, tokens, start):
    unit = {5: 1, 24: 8}.get(page, page)
    one = PageLayout([text(9)], {"text": FixedPages(page)}, unit)
    off = PageLayout([text(9), image(30), text(4)], {"text": FixedPages(page)}, unit, aligned=False)
    start = min(start, tokens)
    for layout in (one, off):
        assert layout.uniform
        pages = -(-tokens // page)
        assert layout.pages_for(tokens) == pages and layout.page_of(tokens) == tokens // page
        assert layout.entries_for(tokens) == pages * page // unit and layout.stored_slots(tokens) == tokens
        assert layout.slots(start, tokens).tolist() == list(range(start, tokens))
        assert layout.unit_pos(tokens).tolist() == list(range(0, pages * page, unit))
        assert set(layout.valid(tokens).tolist()) <= {unit}
        assert layout.first_token(pages) == pages * page and layout.end_token(pages) == (pages + 1) * page


class TestExtended:
    def test_open_text_is_sealed_where_it_ends(self):
        layout = PageLayout([text(20)], TEXT16, 8)
        longer = layout.extended(26, [image(25)])  # six tokens were generated
        assert layout.uniform and not longer.uniform
        assert longer.slots(0, 60).tolist() == PageLayout([text(26), image(25)], TEXT16, 8).slots(0, 60).tolist()
        assert longer.is_sealed_full(1, 26)

    def test_text_goes_on(self):
        layout = PageLayout([text(20), image(25), text(3)], TEXT16, 8)
        assert layout.extended(50, [text(9)]) is layout.extended(50, []) is layout
        longer = layout.extended(50, [text(9), image(64), text(2)])
        assert longer.valid(123).tolist() == PageLayout(
            [text(20), image(25), text(14), image(64)], TEXT16, 8
        ).valid(123).tolist()  # fmt: skip

    def test_an_open_text_without_tokens_leaves_nothing(self):
        longer = PageLayout([image(25)], TEXT16, 8).extended(25, [image(64)])
        assert longer.unit_pos(120).tolist() == PageLayout([image(25), image(64)], TEXT16, 8).unit_pos(120).tolist()

    def test_pages_that_are_there_keep_their_size(self):
        policies = {"text": SqrtPages(8.0, mean_tokens=64), "image": FixedPages(24)}
        longer = PageLayout([], policies, 8).extended(4, [image(24), text(4), image(24)])
        assert [longer.page_slots(page) for page in range(5)] == [32, 24, 8, 24, 32]

    def test_without_alignment_nothing_changes(self):
        layout = PageLayout([image(25)], TEXT16, 8, aligned=False)
        assert layout.extended(30, [image(25)]) is layout

    def test_a_refused_extension_changes_nothing(self):
        layout = PageLayout([image(25)], TEXT16, 8)
        with pytest.raises(ValueError, match="'audio'"):
            layout.extended(30, [image(25), Segment("audio", 4)])
        assert layout.slots(24, 27).tolist() == [24, 48, 49]


REFUSED = [
    (lambda: PageLayout([Segment("imgae", 4)], TEXT16, 8), "'imgae' has no page policy; did you mean 'image'"),
    (lambda: PageLayout([image(0)], TEXT16, 8), "kind 'image' has 0 tokens; the least is 1"),
    (lambda: PageLayout([image(5)], TEXT16, 16), "page of 24 tokens is no whole number of units of 16"),
    (lambda: PageLayout([], {"image": FixedPages(8)}, 8), "'text' has no page policy"),
    (lambda: PageLayout([], {"text": FixedPages(20)}, 8), "page of 20 tokens is no whole number of units of 8"),
    (lambda: PageLayout([], {"text": WholePages()}, 8), "WholePages needs a segment's length"),
    (lambda: predicted_waste([Segment("audio", 4)], TEXT16), "'audio' has no page policy"),
]


@pytest.mark.parametrize("make, message", REFUSED, ids=[message for _, message in REFUSED])
def test_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


SIZES = (8, 16, 24, 32, 48, 64, 96, 128)
WASTE = {  # image tokens -> slots wasted with pages of each of SIZES
    49: (7, 15, 23, 15, 47, 15, 47, 79),
    64: (0, 0, 8, 0, 32, 0, 32, 64),
    144: (0, 0, 0, 16, 0, 48, 48, 112),
    196: (4, 12, 20, 28, 44, 60, 92, 60),
    256: (0, 0, 8, 0, 32, 0, 32, 0),
    576: (0, 0, 0, 0, 0, 0, 0, 64),
    729: (7, 7, 15, 7, 39, 39, 39, 39),
}


@pytest.mark.parametrize("tokens, wastes", WASTE.items())
def test_waste_of_one_image(tokens, wastes):
    for size, waste in zip(SIZES, wastes, strict=True):
        policies = {"text": FixedPages(16), "image": FixedPages(size)}
        layout = PageLayout([image(tokens)], policies, 8)
        assert layout.waste(tokens) == waste == predicted_waste([image(tokens)], policies)
        assert layout.entries_for(tokens) * 8 == tokens + waste
        assert layout.pages_for(tokens) == (tokens + waste) // size


PROMPTS = {
    "text-image-text": [text(20), image(49), text(13)],
    "image-first": [image(64), text(5)],
    "images-in-a-row": [image(49), image(144), image(64)],
    "image-last": [text(3), image(144)],
    "texts-apart": [text(9), text(17), image(49), text(31), image(64), text(1)],
    "text": [text(77)],
}
HEADS, KV_HEADS, HEAD_DIM, UNIT = 4, 2, 16, 8


def stored(segments, decoded):
    """K and V [n, Hkv, D] and queries [n, Hq, D] of a sequence, and a NaN pool whose table has them by its layout."""
    layout = PageLayout(segments, {"text": FixedPages(16), "image": RatioPages()}, UNIT)
    total = sum(segment.tokens for segment in segments) + decoded
    random = torch.Generator().manual_seed(zlib.crc32(str((segments, decoded)).encode()))
    k, v = torch.randn((2, total, KV_HEADS, HEAD_DIM), generator=random)
    q = torch.randn((total, HEADS, HEAD_DIM), generator=random)
    entries = layout.entries_for(total)
    units = torch.randperm(entries + 3, generator=random)[:entries] + 1
    pool = torch.full(pool_shape(entries + 3, 1, KV_HEADS, UNIT, HEAD_DIM), torch.nan)
    slot = torch.from_numpy(layout.slots(0, total))
    reference.append(k, v, pool, 0, units[slot // UNIT] * UNIT + slot % UNIT)
    table = pack_entries(units, torch.from_numpy(layout.valid(total)))
    table = torch.cat([table, pack_entries(torch.tensor([SCRATCH_UNIT]), UNIT)])[None, None, None]
    unit_pos = torch.cat([torch.from_numpy(layout.unit_pos(total)), torch.zeros(1, dtype=torch.int32)])[
        None, None, None
    ]
    lengths = torch.tensor([[[layout.stored_slots(total)]]], dtype=torch.int32)
    return layout, k, v, q, (pool, 0, table, lengths), unit_pos


def dense(q, k, v, positions):
    """Causal softmax attention in fp64 for the queries ``q [n, Hq, D]`` at ``positions``."""
    k, v = (x.double().repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * HEAD_DIM**-0.5
    late = torch.arange(len(k))[None] > positions[:, None]
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(late, -torch.inf).softmax(-1), v).float()


@pytest.mark.parametrize("name", PROMPTS)
@pytest.mark.parametrize("decoded", [0, 1, 16, 21])
def test_decoding_over_a_layout_is_dense_attention(name, decoded):
    layout, k, v, q, where, unit_pos = stored(PROMPTS[name], decoded)
    last = torch.tensor([len(k) - 1], dtype=torch.int32)
    out, _, mass = reference.decode(q[-1:], *where, last, unit_pos, None, HEAD_DIM**-0.5, 0, 0.0, True, False)
    torch.testing.assert_close(out, dense(q[-1:], k, v, last), rtol=1e-5, atol=1e-6)
    assert (mass[0].sum(-1) - 1).abs().max() < 1e-5
    if layout.uniform:
        plain, _, _ = reference.decode(q[-1:], *where, last, None, None, HEAD_DIM**-0.5, 0, 0.0, False, False)
        assert torch.equal(plain, out)


@pytest.mark.parametrize("name", PROMPTS)
@pytest.mark.parametrize("queries", [1, 30, None])
def test_prefilling_over_a_layout_is_dense_attention(name, queries):
    _, k, v, q, where, unit_pos = stored(PROMPTS[name], 5)
    count = min(queries or len(k), len(k))
    positions = torch.arange(len(k) - count, len(k), dtype=torch.int32)
    cu_q = torch.tensor([0, count], dtype=torch.int32)
    scale = HEAD_DIM**-0.5
    out, _ = reference.prefill(q[-count:], *where, cu_q, positions, unit_pos, None, scale, 0, 0.0, count, False)
    torch.testing.assert_close(out, dense(q[-count:], k, v, positions), rtol=1e-5, atol=1e-6)
