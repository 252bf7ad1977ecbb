"""Numbers that go to the device through the same few buffers again and again."""

import numpy as np
import pytest
import torch

from octavo.core.execution.staged_writes import TURNS, StagedWrites


@pytest.mark.parametrize("most", [1, 2, 5])
def test_each_write_is_what_it_says_and_nothing_else(most):
    rng = np.random.default_rng(most)
    staged, target = StagedWrites(most, torch.device("cpu")), torch.full((12,), -1, dtype=torch.int32)
    expected = np.full(12, -1, np.int32)
    for turn in range(3 * TURNS):
        count = 1 + turn % most
        places, values = rng.permutation(12)[:count], rng.integers(-(2**31), 2**31, count)
        staged.write(target, places, values)
        expected[places] = values
        assert np.array_equal(target.numpy(), expected)


def test_what_was_written_stays_as_it_was_when_its_buffer_is_used_again():
    staged, target = StagedWrites(2, torch.device("cpu")), torch.zeros(2 * TURNS, dtype=torch.int32)
    for at in range(2 * TURNS):
        staged.write(target, np.array([at]), np.array([at + 1]))
    assert target.tolist() == list(range(1, 2 * TURNS + 1))
