"""A module runs other code for the length of a block, and its own before and after, whatever ends the block."""

import pytest
from torch import nn

from octavo.kernels.lending import lent


@pytest.mark.parametrize("fails", [False, True])
def test_a_module_gets_back_what_it_had(fails):
    plain, hooked = nn.Identity(), nn.Identity()
    hooked.forward = own = lambda x: x + 1  # somebody's own

    def block():
        with lent([(plain, lambda x: 2 * x), (hooked, lambda x: 3 * x)]):
            assert (plain(1), hooked(1)) == (2, 3)
            if fails:
                raise RuntimeError("on purpose")

    if fails:
        with pytest.raises(RuntimeError, match="on purpose"):
            block()
    else:
        block()
    assert "forward" not in plain.__dict__ and hooked.forward is own
    assert (plain(1), hooked(1)) == (1, 2)


def test_what_was_lent_before_an_error_is_taken_back():
    module = nn.Identity()

    def forwards():
        yield module, lambda x: 2 * x
        raise ValueError("no more")

    with pytest.raises(ValueError, match="no more"), lent(forwards()):
        pass
    assert "forward" not in module.__dict__
