"""What ``compute-sanitizer`` runs on a GPU is right by itself, and leaves no op out."""

import pytest
import sanitizer_case
import torch

interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU, the script itself is run")


@interpreted
@pytest.mark.parametrize("op", sanitizer_case.CASES)
def test_a_case(op):
    sanitizer_case.CASES[op]("cpu")


def test_every_op_has_a_case():
    from octavo.kernels.triton import backend

    assert set(sanitizer_case.CASES) == {*backend.__all__, "product"}
