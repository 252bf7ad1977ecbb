"""Calls that a GPU replays do what calls do."""

import pytest
import torch

from octavo.core.execution import captured_calls
from octavo.core.execution.captured_calls import CapturedCalls


class Counter:
    """Adds to what it holds, and gives two results; ``runs`` counts how often Python ran it."""

    def __init__(self, device):
        self.held = torch.zeros(3, device=device)
        self.runs = 0

    def __call__(self, x, y):
        self.runs += 1
        self.held += x
        return self.held * y, x + y


def numbers(*values, device):
    return torch.tensor(values, dtype=torch.float32, device=device)


def five_calls(device, key=lambda i: "a", before=lambda i, calls: None):
    """The counter, and what five calls with 1, 2, ... gave."""
    calls, counter, got = CapturedCalls(torch.device(device)), Counter(device), []
    for i in range(1, 6):
        before(i, calls)
        x, y = numbers(i, 0, 1, device=device), numbers(2, 2, i, device=device)
        got.append([found.tolist() for found in calls(key(i), counter, x, y)])
    return counter, got


EXPECTED = [[[i * (i + 1.0), 0.0, 1.0 * i * i], [i + 2.0, 2.0, i + 1.0]] for i in range(1, 6)]


def test_a_cpu_calls_each_time():
    counter, got = five_calls("cpu")
    assert got == EXPECTED and counter.runs == 5 and counter.held.tolist() == [15, 0, 5]


@pytest.mark.gpu
class TestOnAGpu:
    def test_two_runs_and_then_replays(self):
        counter, got = five_calls("cuda")
        assert got == EXPECTED and counter.runs == 2 and counter.held.tolist() == [15, 0, 5]

    def test_each_key_is_captured(self):
        counter, got = five_calls("cuda", key=lambda i: i % 2)
        assert got == EXPECTED and counter.runs == 4

    def test_what_is_cleared_is_called_again(self):
        counter, got = five_calls("cuda", before=lambda i, calls: calls.clear() if i == 4 else None)
        assert got == EXPECTED and counter.runs == 4

    def test_too_many_keys_are_forgotten(self, monkeypatch):
        monkeypatch.setattr(captured_calls, "MOST", 2)
        counter, got = five_calls("cuda", key=lambda i: i % 3)
        assert got == EXPECTED and counter.runs == 5

    def test_a_call_that_fails_leaves_nothing_behind(self):
        calls = CapturedCalls(torch.device("cuda"))
        x = numbers(1, device="cuda")

        def waits(x):
            return (x + x.item(),)

        calls("a", waits, x)
        with pytest.raises(RuntimeError):
            calls("a", waits, x)
        assert calls("b", lambda x: (x + 1,), x)[0].tolist() == [2]
