"""The encode worker: batches within a budget, failures that stay alone, and an end that leaves nothing behind."""

import subprocess
import sys
import threading
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.multimodal.encode_worker import EncodeWorker


class Numbers:
    """Item i becomes the embeddings i and i + 1; the ``bad`` cannot be encoded. Waits at the gate if there is one.

    ``batches`` are the items of every call.
    """

    bidirectional = False

    def __init__(self, bad=(), tokens=lambda item: 2, error=ValueError, gate=None):
        self.bad, self.n_tokens, self.error, self.gate = set(bad), tokens, error, gate
        self.batches, self.started = [], threading.Event()

    def identity(self, item):
        raise AssertionError("the worker has no business with identities")

    def encode(self, items):
        self.batches.append(list(items))
        self.started.set()
        if self.gate is not None:
            assert self.gate.wait(10)
        for item in items:
            if item in self.bad:
                raise self.error(f"{item} is bad")
        return torch.tensor([[[item], [item + 1]] for item in items], dtype=torch.float64)


def queued(encoder, items, **limits):
    """Submits the first item alone, and the rest while it is being encoded, so that the batches are certain."""
    encoder.gate = threading.Event()
    with EncodeWorker(encoder, **limits) as worker:
        futures = worker.submit(items[:1])
        if items:
            assert encoder.started.wait(10)
        futures += worker.submit(items[1:])
        encoder.gate.set()
    return worker, futures


def expected(item, encoder):
    return f"{item} is bad" if item in encoder.bad else [[item], [item + 1]]


def outcome(future):
    assert future.done()
    return str(future.exception()) if future.exception() else future.result().tolist()


@settings(max_examples=60)
@given(
    items=st.lists(st.integers(0, 20), max_size=12),
    bad=st.sets(st.integers(0, 20), max_size=8),
    max_images=st.integers(1, 5),
    max_tokens=st.none() | st.integers(1, 12),
)
def test_every_item_gets_its_own_result_whatever_the_batches(items, bad, max_images, max_tokens):
    encoder = Numbers(bad, tokens=lambda item: 1 + item % 4)
    worker, futures = queued(encoder, items, max_images=max_images, max_tokens=max_tokens)
    assert [outcome(future) for future in futures] == [expected(item, encoder) for item in items]
    assert worker.failed == sum(item in bad for item in items) and worker.encoded + worker.failed == len(items)
    assert worker.batches == len(encoder.batches)
    for batch in encoder.batches:
        assert len(batch) <= max_images and len(set(map(encoder.n_tokens, batch))) == 1
        assert max_tokens is None or len(batch) == 1 or sum(map(encoder.n_tokens, batch)) <= max_tokens


@pytest.mark.parametrize(
    ("limits", "batches"),
    [
        ({"max_images": 3}, [[0], [1, 2, 3], [4, 5, 6], [7]]),
        ({"max_images": 8}, [[0], [1, 2, 3, 4, 5, 6, 7]]),
        ({"max_images": 8, "max_tokens": 4}, [[0], [1, 2], [3, 4], [5, 6], [7]]),
        ({"max_images": 8, "max_tokens": 1}, [[0], [1], [2], [3], [4], [5], [6], [7]]),
    ],
    ids=str,
)
def test_batches_fill_their_budget_in_order(limits, batches):
    encoder = Numbers()
    queued(encoder, list(range(8)), **limits)
    assert encoder.batches == batches


def test_a_failure_costs_its_batch_mates_one_more_call_each_and_nothing_else():
    encoder = Numbers(bad=[2])
    _, futures = queued(encoder, [0, 1, 2, 3])
    assert encoder.batches == [[0], [1, 2, 3], [1], [2], [3]]
    assert [outcome(future) for future in futures] == [expected(item, encoder) for item in (0, 1, 2, 3)]


@pytest.mark.parametrize("error", [ValueError, MemoryError, KeyboardInterrupt, SystemExit])
def test_no_failure_leaves_anybody_waiting(error):
    with EncodeWorker(Numbers(bad=[1], error=error)) as worker:
        future, good = worker.submit([1, 2])
        with pytest.raises(error):
            future.result(10)
        assert good.result(10).tolist() == [[2], [3]]
        assert worker.submit([3])[0].result(10).tolist() == [[3], [4]], "and the worker goes on"


def test_an_encoder_that_gives_too_few_rows_fails_them_all():
    encoder = Numbers()
    encoder.encode = lambda items: torch.zeros(0, 2, 1)
    with EncodeWorker(encoder) as worker:
        futures = worker.submit([1, 2])
    assert all(isinstance(future.exception(), AssertionError) for future in futures)


def test_results_own_their_memory():
    _, futures = queued(Numbers(), [0, 1, 2, 3])
    assert [future.result().untyped_storage().nbytes() for future in futures] == [16] * 4


@pytest.mark.parametrize("limits", [{"max_images": 2}, {"max_tokens": 4}], ids=str)
def test_what_is_cancelled_in_time_is_not_encoded(limits):
    encoder = Numbers(gate=threading.Event())
    with EncodeWorker(encoder, **limits) as worker:
        running, *waiting = worker.submit([0]) + worker.submit([1, 2, 3])
        assert encoder.started.wait(10)
        assert waiting[0].cancel() and not running.cancel()
        encoder.gate.set()
    assert encoder.batches == [[0], [2, 3]] and running.result().tolist() == [[0], [1]]


def test_leaving_by_an_exception_drops_what_waits():
    encoder = Numbers(gate=threading.Event())
    with pytest.raises(KeyError), EncodeWorker(encoder) as worker:
        running, *waiting = worker.submit([0]) + worker.submit([1, 2])
        assert encoder.started.wait(10)
        threading.Timer(0.05, encoder.gate.set).start()
        raise KeyError
    assert encoder.batches == [[0]] and running.done() and all(future.cancelled() for future in waiting)


def test_the_thread_begins_with_the_first_item_and_ends_with_the_worker():
    def threads():
        return [thread for thread in threading.enumerate() if thread.name.startswith("octavo-encode")]

    worker = EncodeWorker(Numbers())
    worker.submit([])
    assert not threads()
    worker.submit([1])
    assert len(threads()) == 1
    worker.close()
    worker.close()
    assert not threads()
    with pytest.raises(RuntimeError, match="the encode worker is closed"):
        worker.submit([2])


def test_a_worker_that_nobody_keeps_ends_its_thread():
    before = threading.active_count()
    EncodeWorker(Numbers()).submit([1])[0].result(10)
    deadline = time.monotonic() + 10
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() == before


def test_a_program_ends_with_an_open_worker_and_importing_it_starts_nothing():
    program = """
import threading
from octavo.multimodal.encode_worker import EncodeWorker
assert threading.active_count() == 1
import torch
class Encoder:
    bidirectional, identity = False, bytes
    n_tokens = staticmethod(lambda item: 1)
    encode = staticmethod(lambda items: torch.zeros(len(items), 1, 1))
worker = EncodeWorker(Encoder())
print(worker.submit([1])[0].result().shape)
"""
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stdout == "torch.Size([1, 1])\n", done.stderr


def test_a_call_that_is_refused_submits_nothing():
    def tokens(item):
        if item == 2:
            raise ValueError("2 has no tokens")
        return 1

    encoder = Numbers(tokens=tokens)
    with EncodeWorker(encoder) as worker, pytest.raises(ValueError, match="2 has no tokens"):
        worker.submit([1, 2])
    assert not encoder.batches


def test_many_threads_may_submit():
    encoder, results = Numbers(), {}

    def submit(start):
        for item in range(start, start + 50):
            results[item] = worker.submit([item])[0]

    with EncodeWorker(encoder, max_images=4) as worker:
        threads = [threading.Thread(target=submit, args=(100 * number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert all(future.result().tolist() == [[item], [item + 1]] for item, future in results.items())
    assert len(results) == 200 == worker.encoded


@pytest.mark.parametrize("limits", [{"max_images": 0}, {"max_tokens": 0}, {"max_images": -1}])
def test_budgets_of_nothing(limits):
    ((name, value),) = limits.items()
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got {value}"):
        EncodeWorker(Numbers(), **limits)


class Pictured(Numbers):
    """An encoder that can do all that one can."""

    bidirectional = True

    def identity(self, item):
        return bytes([item] * 32)

    def read(self, item):
        return item + 1

    def witness(self, item):
        return b"w"


def test_it_is_an_encoder_itself():
    with EncodeWorker(Pictured()) as worker:
        assert worker.bidirectional and worker.n_tokens(5) == 2 and worker.identity(1) == bytes([1] * 32)
        assert worker.read(3) == 4 and worker.witness(3) == b"w"
        assert worker.encode([4]).tolist() == [[[4], [5]]]
    plain = EncodeWorker(Numbers())
    assert not plain.bidirectional and not hasattr(plain, "read") and not hasattr(plain, "witness")


def test_nothing_is_recorded_for_gradients():
    weight = torch.ones(1, requires_grad=True)
    encoder = Numbers()
    encoder.encode = lambda items: torch.ones(len(items), 2, 1) * weight
    with EncodeWorker(encoder) as worker:
        assert not worker.submit([1])[0].result(10).requires_grad


@pytest.mark.gpu
def test_on_a_gpu_it_works_beside_the_other_stream():
    """From the second batch on, which need not wait for what the other stream has queued."""
    weight = torch.randn(64, 64, device="cuda")

    class OnDevice(Numbers):
        def encode(self, items):
            self.streams = [*getattr(self, "streams", []), torch.cuda.current_stream()]
            return torch.stack([weight * item for item in items])

    encoder = OnDevice()
    with EncodeWorker(encoder) as worker:
        for item in (1, 2, 3):
            torch.cuda._sleep(1_000_000)
            (rows,) = worker.submit([item])
            assert torch.equal(rows.result(30), weight * item)
    assert encoder.streams[0] != encoder.streams[1] == encoder.streams[2]
