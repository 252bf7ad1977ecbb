"""Which page makes room: exact victims, policy by policy, and maps that agree whatever happens."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from octavo.sparse.replacement.belady import Belady
from octavo.sparse.replacement.decayed import DecayedShare
from octavo.sparse.replacement.policies import REPLACEMENTS
from octavo.sparse.resident_sets import FrameMaps
from octavo.sparse.resident_trace import Choice, Replayed, replay

FRAMES = 3


def maps(policy, frames=FRAMES, heads=1):
    made = FrameMaps(frames, 1, heads, policy, torch.device("cpu"))
    made.open()
    made.widen(12)
    return made


def read(made, pages, shares=None, ahead=(), row=1):
    """Read some pages in one step, fetch others ahead; gives those that were not there, and the pages in the frames."""
    listed = [*pages, *ahead]
    wanted = torch.ones(1, 1, len(listed), dtype=torch.bool)
    is_read = torch.arange(len(listed)) < torch.full((1, 1, len(listed)), len(pages))
    given = None if shares is None else torch.tensor(shares, dtype=torch.float64).view(1, 1, -1)
    frames, missing, _ = made.take(0, torch.tensor([row]), torch.tensor(listed).view(1, 1, -1), wanted, is_read, given)
    made.check(row, 12)
    held = made.page_in[row, 0, 0, :-1].tolist()
    assert [held[frame] for frame in frames.flatten().tolist()] == listed
    return [page for page, gone in zip(listed, missing.flatten().tolist(), strict=True) if gone], held


STEPS = [[0], [1], [2], [0], [0], [1], [3], [4]]
"""Three frames fill up; 0 is read three times, 1 twice and after 0, 2 once. Then 3 comes, and 4."""
VICTIMS = {
    "lru": [2, 0],
    "lfu": [2, 3],
    "fifo": [0, 1],
    "clock": [0, 1],
    "decayed": [2, 3],
}


@pytest.mark.parametrize("name", REPLACEMENTS)
def test_victims(name):
    made, victims = maps(REPLACEMENTS[name]()), []
    for pages in STEPS:
        before = set(made.page_in[1, 0, 0, :-1].tolist())
        _, held = read(made, pages, [1.0] * len(pages))
        victims += before - set(held) - {-1}
    assert victims == VICTIMS[name]


def test_clock_gives_a_second_chance():
    made = maps(REPLACEMENTS["clock"]())
    for page in (0, 1, 2):
        read(made, [page])
    assert read(made, [3])[1] == [3, 1, 2], "all were read: the hand goes round once and forgets it"
    read(made, [1])
    assert read(made, [4])[1] == [3, 1, 4], "1 was read since, 2 was not"
    assert read(made, [5])[1] == [3, 5, 4], "the hand passed 1 before, and nobody has read it since"


def test_a_share_decays_by_the_step():
    made = maps(DecayedShare(0.5))
    read(made, [0], [0.9])
    read(made, [1], [0.2])
    read(made, [2], [0.8])
    # By now 0.9 is 0.225, 0.2 is 0.1 and 0.8 is 0.8.
    assert read(made, [3], [0.3])[1] == [0, 3, 2]
    assert read(made, [4], [0.3])[1] == [4, 3, 2], "0.056 against 0.15 and 0.2"


def test_belady_looks_ahead():
    made = maps(Belady())
    for page, next_use in ((0, 9), (1, 4), (2, 6)):
        read(made, [page], [float(next_use)])
    assert read(made, [3], [5.0])[1] == [3, 1, 2]
    assert read(made, [1], [float("inf")])[1] == [3, 1, 2]
    assert read(made, [4], [8.0])[1] == [3, 4, 2]


@pytest.mark.parametrize("name", REPLACEMENTS)
def test_what_a_step_reads_stays(name):
    """However bad the policy thinks of it; empty frames go first, then frames in the policy's order."""
    made = maps(REPLACEMENTS[name]())
    assert read(made, [0, 1], [0.5, 0.5]) == ([0, 1], [0, 1, -1])
    assert read(made, [1, 2], [0.5, 0.5]) == ([2], [0, 1, 2])
    assert read(made, [5, 0, 7], [0.4, 0.3, 0.3])[1] in ([0, 5, 7], [0, 7, 5])
    assert read(made, [5, 0, 7], [0.4, 0.3, 0.3])[0] == []


def test_pages_that_come_ahead_push_out_nothing_that_is_read_and_go_first():
    made = maps(REPLACEMENTS["lru"]())
    assert read(made, [0, 1], ahead=[2]) == ([0, 1, 2], [0, 1, 2])
    assert read(made, [0]) == ([], [0, 1, 2])
    assert read(made, [3]) == ([3], [0, 1, 3]), "nobody has read 2"
    assert read(made, [2], ahead=[0]) == ([2], [0, 2, 3])


def ahead(made, pages, most=None, row=1):
    """Fetch pages ahead for a layer that reads later; gives those that come."""
    wanted = torch.ones(1, 1, len(pages), dtype=torch.bool)
    listed = torch.tensor(pages).view(1, 1, -1)
    _, missing, came = made.take(0, torch.tensor([row]), listed, wanted, None, most=most)
    made.check(row, 12)
    assert not came.any(), "nothing was read"
    return [page for page, comes in zip(pages, missing.flatten().tolist(), strict=True) if comes]


def came_ahead(made, pages, row=1):
    """Read pages; gives those that had come ahead and that nobody had read."""
    listed, all_of = torch.tensor(pages).view(1, 1, -1), torch.ones(1, 1, len(pages), dtype=torch.bool)
    _, _, came = made.take(0, torch.tensor([row]), listed, all_of, all_of)
    return listed[came].tolist()


def test_a_page_that_came_ahead_is_of_use_once():
    made = maps(REPLACEMENTS["lru"]())
    assert ahead(made, [0, 1]) == [0, 1]
    assert ahead(made, [1, 2]) == [2], "1 is there, and came for the first guess"
    assert came_ahead(made, [0, 2]) == [0, 2]
    assert came_ahead(made, [0, 2]) == []
    assert came_ahead(made, [3]) == [] and made.page_in[1, 0, 0, :-1].tolist() == [0, 3, 2], "1 came in vain"
    assert came_ahead(made, [1]) == [], "now it was fetched because it was chosen"
    made.close(1)
    assert made.open() == 1 and not made.is_ahead[1].any()


def test_no_more_come_ahead_than_may():
    made = maps(REPLACEMENTS["lru"]())
    read(made, [0, 1, 2])
    assert ahead(made, [5, 1, 6, 7], most=2) == [5, 6], "the first in the list; 1 is there"
    assert made.page_in[1, 0, 0, :-1].tolist() == [5, 1, 6]
    assert came_ahead(made, [5, 7]) == [5]
    assert ahead(made, [8, 9], most=0) == []


def test_rows_and_heads_know_nothing_of_each_other():
    made = maps(REPLACEMENTS["lru"](), heads=2)
    assert made.open() == 2
    pages = torch.tensor([[[0, 1], [2, 3]], [[4, 5], [0, 6]]])
    wanted = torch.tensor([[[True, True], [True, False]], [[False, True], [True, True]]])
    made.take(0, torch.tensor([2, 1]), pages, wanted, wanted)
    assert made.page_in[:, 0, :, :-1].tolist()[1:] == [[[5, -1, -1], [0, 6, -1]], [[0, 1, -1], [2, -1, -1]]]
    made.close(1)
    assert made.open() == 1 and made.page_in[1].max() == made.frame_of[1].max() == -1


def test_room_for_more_pages_changes_nothing():
    made = maps(REPLACEMENTS["lru"]())
    read(made, [11, 3])
    made.widen(40)
    assert made.frame_of[1, 0, 0].tolist()[:12] == [-1] * 3 + [1] + [-1] * 7 + [0]
    made.check(1, 40)


class Slowly:
    """The same policies for one head, a page at a time, in plain Python; the truth for the tensors."""

    def __init__(self, name):
        self.name, self.held, self.now, self.hand = name, [None] * FRAMES, 0, 0
        self.last, self.count, self.bit = {}, {}, {}

    def read(self, pages):
        missing = [page for page in pages if page not in self.held]
        pinned = {page for page in pages if page in self.held}
        empty = [frame for frame, page in enumerate(self.held) if page is None][: len(missing)]
        for page, frame in zip(missing, empty, strict=False):
            self.held[frame] = page
            pinned.add(page)
        for page in missing[len(empty) :]:
            frame = self.victim(pinned)
            self.last.pop(self.held[frame], None), self.count.pop(self.held[frame], None)
            self.held[frame] = page
            pinned.add(page)
        self.now += 1
        for page in pages:
            self.last[page], self.count[page] = self.now, self.count.get(page, 0) + 1
            self.bit[page] = 1
        return missing

    def victim(self, pinned):
        free = [frame for frame, page in enumerate(self.held) if page not in pinned]
        if self.name == "lru":
            return min(free, key=lambda frame: self.last.get(self.held[frame], 0))
        if self.name == "lfu":
            return min(free, key=lambda frame: (self.count[self.held[frame]], self.last[self.held[frame]]))
        while True:
            frame, self.hand = self.hand, (self.hand + 1) % FRAMES
            page = self.held[frame]
            if page in pinned:
                if self.name == "clock" and page in self.bit:
                    self.bit[page] = 0  # the hand forgets it, and the step reads it
                continue
            if self.name == "clock" and self.bit.get(page):
                self.bit[page] = 0
                continue
            return frame


@pytest.mark.parametrize("name", ["lru", "lfu", "fifo", "clock"])
@given(steps=st.lists(st.sets(st.integers(0, 7), min_size=1, max_size=FRAMES).map(sorted), max_size=25))
def test_all_heads_at_once_are_each_by_itself(name, steps):
    made, slow = maps(REPLACEMENTS[name]()), Slowly(name)
    for pages in steps:
        missing, held = read(made, pages)
        assert missing == slow.read(pages)
        assert held == [-1 if page is None else page for page in slow.held]


def test_a_policy_refuses_a_decay_that_is_none():
    with pytest.raises(ValueError, match=r"replacement.decay=1.0 must be between 0 and 1"):
        DecayedShare(1.0)


class TestReplay:
    """Choices of one head, as they are recorded."""

    @staticmethod
    def choices(steps):
        width = max(map(len, steps))
        return [
            Choice(
                0,
                np.array([1]),
                np.array([[[*pages, *[-1] * (width - len(pages))]]], np.int32),
                np.full((1, 1, width), 1 / len(pages), np.float32),
            )
            for pages in steps
        ]

    def test_counts(self):
        found = replay(self.choices(STEPS), FRAMES, REPLACEMENTS["lru"]())
        assert (found.lookups, found.misses, found.first) == (8, 5, 5) and found.hit_rate == 3 / 8

    def test_belady_by_hand(self):
        steps = [[0, 1], [2], [3], [0], [2], [1], [3]]  # at 3, page 1 is read last: it makes room, and comes back for 0
        assert replay(self.choices(steps), FRAMES, Belady()).misses == 5
        assert replay(self.choices(steps), FRAMES, REPLACEMENTS["lru"]()).misses == 7

    @given(steps=st.lists(st.sets(st.integers(0, 7), min_size=1, max_size=FRAMES).map(sorted), min_size=1, max_size=25))
    def test_nobody_misses_less_than_belady(self, steps):
        choices = self.choices(steps)
        bound = replay(choices, FRAMES, Belady())
        assert bound.first <= bound.misses
        for policy in REPLACEMENTS.values():
            assert replay(choices, FRAMES, policy()).misses >= bound.misses

    @given(steps=st.lists(st.integers(0, 4).map(lambda page: [page]), min_size=1, max_size=8))
    def test_belady_is_the_best_there_is(self, steps):
        """Against all ways to give a page up."""

        def fewest(held, at):
            if at == len(steps):
                return 0
            (page,) = steps[at]
            if page in held:
                return fewest(held, at + 1)
            if len(held) < 2:
                return 1 + fewest(held | {page}, at + 1)
            return 1 + min(fewest(held - {gone} | {page}, at + 1) for gone in held)

        assert replay(self.choices(steps), 2, Belady()).misses == fewest(frozenset(), 0)

    def test_too_few_frames(self):
        with pytest.raises(ValueError, match="a head chose 3 pages at once, and there are 2 frames"):
            replay(self.choices([[0], [1, 2, 3]]), 2, Belady())

    def test_nothing_chosen(self):
        assert replay([], 3, Belady()) == Replayed(0, 0, 0)
