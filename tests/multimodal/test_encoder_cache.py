"""The encoder cache: pins, the budget, the order of eviction, verified hits, and no byte more than it says."""

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from octavo.multimodal.encoder_cache import EncoderCache

WITNESS = b"witness"


def rows(tokens, value=0.0):
    """4 bytes a token."""
    return torch.full((tokens, 1), float(value))


def test_a_hit_is_the_tensor_that_was_put_there():
    cache = EncoderCache(100)
    embeddings = rows(5)
    assert cache.insert(b"a", WITNESS, embeddings, "me")
    assert cache.acquire(b"a", WITNESS, "you") is embeddings
    assert (cache.bytes_used, cache.bytes_pinned, cache.bytes_available, len(cache)) == (20, 20, 80, 1)


def test_a_hit_is_verified():
    """Equal identities, other images: neither serves the other, and the newcomer stays outside."""
    cache = EncoderCache(100)
    cache.insert(b"a", b"one", rows(1, 1), "me")
    assert cache.acquire(b"a", b"two", "you") is None
    assert not cache.insert(b"a", b"two", rows(1, 2), "you")
    assert (cache.hits, cache.misses, cache.collisions, cache.refusals) == (0, 1, 1, 1)
    cache.release(b"a", "me")
    assert cache.acquire(b"a", b"one", "me").item() == 1
    cache.check()


def test_idle_entries_go_in_the_order_in_which_they_became_idle():
    cache = EncoderCache(12)
    for name in (b"a", b"b", b"c"):
        cache.insert(name, WITNESS, rows(1), "me")
    for name in (b"b", b"c", b"a"):
        cache.release(name, "me")
    cache.acquire(b"b", WITNESS, "me")
    cache.release(b"b", "me")  # used again: now behind the others
    gone = []
    for new in (b"d", b"e", b"f"):
        before = set(cache._entries)
        cache.insert(new, WITNESS, rows(1), "me")
        gone += before - set(cache._entries)
        cache.check()
    assert gone == [b"c", b"a", b"b"] and cache.evictions == 3


def test_pinned_entries_stay_whatever_comes():
    """The entry of a preempted request is there when it comes back; what does not fit beside it is refused whole."""
    cache = EncoderCache(12)
    cache.insert(b"a", WITNESS, rows(2), "me")
    cache.insert(b"b", WITNESS, rows(1), "you")
    cache.release(b"b", "you")
    assert not cache.insert(b"c", WITNESS, rows(2), "you")
    assert set(cache._entries) == {b"a", b"b"} and (cache.evictions, cache.refusals) == (0, 1), (
        "a refusal evicts nothing"
    )
    assert cache.insert(b"c", WITNESS, rows(1), "you")
    assert set(cache._entries) == {b"a", b"c"}
    cache.check()


def test_users_are_counted_once_each():
    cache = EncoderCache(100)
    cache.insert(b"a", WITNESS, rows(1), "me")
    cache.acquire(b"a", WITNESS, "me")
    cache.acquire(b"a", WITNESS, "you")
    cache.release(b"a", "me")
    assert cache.bytes_pinned == 4
    cache.release(b"a", "you")
    assert cache.bytes_pinned == 0
    with pytest.raises(AssertionError, match="'you' does not use this entry"):
        cache.release(b"a", "you")
    with pytest.raises(AssertionError, match="'you' does not use this entry"):
        cache.release(b"unknown", "you")


def test_a_second_insert_keeps_the_first():
    cache = EncoderCache(100)
    first = rows(2)
    cache.insert(b"a", WITNESS, first, "me")
    assert cache.insert(b"a", WITNESS, rows(2, 1), "you")
    assert cache.acquire(b"a", WITNESS, "you") is first and cache.bytes_used == 8
    cache.release(b"a", "me")
    assert cache.bytes_pinned == 8, "the second one pinned it too"


def test_a_row_of_a_batch_does_not_keep_the_batch():
    cache = EncoderCache(100)
    batch = torch.arange(30.0).view(3, 10, 1)
    cache.insert(b"a", WITNESS, batch[1], "me")
    kept = cache.acquire(b"a", WITNESS, "me")
    assert torch.equal(kept, batch[1]) and kept.untyped_storage().nbytes() == 40 == cache.bytes_used
    cache.check()


def test_memory_is_bounded_without_pressure():
    cache = EncoderCache(100)
    for number in range(1000):
        name = number.to_bytes(4, "little")
        cache.insert(name, WITNESS, rows(3), number)
        cache.release(name, number)
        assert cache.bytes_used <= 100
    cache.clear()
    assert len(cache) == cache.bytes_used == 0 and cache.bytes_peak == 96 and cache.evictions == 1000
    cache.check()


def test_the_peak_stays():
    cache = EncoderCache(12)
    cache.insert(b"a", WITNESS, rows(3), "me")
    cache.release(b"a", "me")
    cache.insert(b"d", WITNESS, rows(1), "me")
    assert (cache.bytes_used, cache.bytes_peak) == (4, 12)


def test_sizes_that_cannot_be():
    with pytest.raises(ValueError, match="capacity_bytes must not be negative, got -1; 0 keeps nothing"):
        EncoderCache(-1)
    cache = EncoderCache(0)
    assert not cache.insert(b"a", WITNESS, rows(1), "me")
    assert not EncoderCache(7).insert(b"a", WITNESS, rows(2), "me")


@pytest.mark.parametrize(
    "harm",
    [
        lambda cache: cache._idle.clear(),
        lambda cache: cache._entries.pop(b"idle"),
        lambda cache: cache._entries[b"pinned"].users.clear(),
        lambda cache: setattr(cache, "bytes_used", 7),
        lambda cache: setattr(cache, "bytes_pinned", 7),
        lambda cache: setattr(cache, "bytes_peak", 0),
        lambda cache: setattr(cache, "capacity_bytes", 11),
        lambda cache: setattr(cache._entries[b"idle"], "embeddings", rows(9)[:2]),
    ],
)
def test_check_sees_what_is_broken(harm):
    cache = EncoderCache(100)
    cache.insert(b"idle", WITNESS, rows(2), "me")
    cache.insert(b"pinned", WITNESS, rows(1), "me")
    cache.release(b"idle", "me")
    cache.check()
    harm(cache)
    with pytest.raises(AssertionError):
        cache.check()


images = st.integers(0, 5)
users = st.integers(0, 2)


class Traffic(RuleBasedStateMachine):
    """Against a model: what is held by whom, and the others in the order of their last release."""

    CAPACITY = 40

    def __init__(self):
        super().__init__()
        self.cache = EncoderCache(self.CAPACITY)
        self.users, self.idle, self.hits, self.misses = {}, [], 0, 0

    @staticmethod
    def name(image):
        return bytes([image])

    @staticmethod
    def size(image):
        return 4 * (image + 1)

    def pin(self, image, user):
        if image in self.idle:
            self.idle.remove(image)
        self.users.setdefault(image, set()).add(user)

    @rule(image=images, user=users)
    def acquire(self, image, user):
        found = self.cache.acquire(self.name(image), WITNESS, user)
        if image in self.users or image in self.idle:
            assert torch.equal(found, rows(image + 1, image))
            self.pin(image, user)
            self.hits += 1
        else:
            assert found is None
            self.misses += 1

    @rule(image=images, user=users)
    def insert(self, image, user):
        kept = self.cache.insert(self.name(image), WITNESS, rows(image + 1, image), user)
        if image not in self.users and image not in self.idle:
            room = self.CAPACITY - sum(map(self.size, self.users))
            assert kept == (self.size(image) <= room)
            if not kept:
                return
            while self.size(image) + sum(map(self.size, (*self.users, *self.idle))) > self.CAPACITY:
                self.idle.pop(0)
        assert kept
        self.pin(image, user)

    @rule(image=images, user=users)
    def release(self, image, user):
        if user in self.users.get(image, ()):
            self.cache.release(self.name(image), user)
            self.users[image].remove(user)
            if not self.users[image]:
                del self.users[image]
                self.idle.append(image)

    @rule()
    def clear(self):
        self.cache.clear()
        self.idle.clear()

    @invariant()
    def agrees(self):
        self.cache.check()
        assert list(self.cache._idle) == list(map(self.name, self.idle))
        assert {name[0]: entry.users for name, entry in self.cache._entries.items() if entry.users} == self.users
        assert self.cache.bytes_pinned == sum(map(self.size, self.users))
        assert (self.cache.hits, self.cache.misses) == (self.hits, self.misses)


def test_any_traffic():
    run_state_machine_as_test(Traffic, settings=settings(max_examples=60, stateful_step_count=40))
