"""Step preparation: what the host would have worked out, number by number, and a sequence that grows by it."""

import pytest
import torch

from octavo.kernels import ops
from octavo.kernels.layout import pack_entries, pool_shape

interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU, the gpu tests run the compiled kernels")
TARGETS = [
    ("reference", "cpu"),
    ("cpu", "cpu"),
    pytest.param(("triton", "cpu"), marks=interpreted),
    pytest.param(("triton", "cuda"), marks=pytest.mark.gpu),
]
UNUSED = -(2**30)  # in state rows that no batch row names


@pytest.fixture
def poisoned_integers(monkeypatch):
    """Integer memory that torch hands out uninitialised holds a number that nobody computes."""
    new_empty = torch.Tensor.new_empty
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda *args, **kwargs: new_empty(*args, **kwargs).fill_(-77))


class State:
    """Device state of more rows than take part, and the batch that names some of them."""

    def __init__(self, device, lengths, unit, slices=1, padding=0, entries=None, seed=0):
        torch.manual_seed(seed)
        n = len(lengths)
        rows = n + 3
        self.unit, self.device = unit, device
        entries = entries or max(lengths) // unit + 1
        order = torch.randperm(rows)[:n]
        self.units = torch.randperm(slices * rows * entries).view(slices, rows, entries) + 1
        self.tables = pack_entries(self.units, unit)
        self.lengths = torch.full((rows,), UNUSED, dtype=torch.int32)
        self.lengths[order] = torch.tensor(lengths, dtype=torch.int32)
        self.tokens = torch.full((rows,), UNUSED, dtype=torch.int64)
        self.tokens[order] = torch.randint(2**40, (n,))  # no 32 bits in between
        self.rows = torch.cat([order, torch.full((padding,), -1)])[torch.randperm(n + padding)].int()
        for name in ("tables", "lengths", "tokens", "rows"):
            setattr(self, name, getattr(self, name).to(device))

    def args(self):
        return self.rows, self.lengths, self.tokens, self.tables, self.unit

    def expected(self):
        """ids, positions, q_pos, slots, slot counts, from plain Python."""
        ids, positions, counts = [], [], []
        slots = [[] for _ in range(len(self.tables))]
        for row in self.rows.tolist():
            position = int(self.lengths[row]) if row >= 0 else 0
            ids.append(int(self.tokens[row]) if row >= 0 else 0)
            positions.append(position)
            counts.append(position + 1 if row >= 0 else 0)
            for number, of_slice in enumerate(slots):
                unit = int(self.units[number, row, position // self.unit]) if row >= 0 else 0
                of_slice.append(unit * self.unit + position % self.unit)
        return ids, positions, positions, slots, [[[count] for count in counts]]


CASES = {
    "one sequence": {"lengths": [0], "unit": 16},
    "either side of a unit's end": {"lengths": [15, 16, 17, 31, 32], "unit": 16},
    "units of one token": {"lengths": [4, 0, 9], "unit": 1},
    "padding": {"lengths": [7, 8], "unit": 8, "padding": 3},
    "only padding": {"lengths": [0], "unit": 8, "padding": 2},
    "three slices": {"lengths": [3, 4, 100], "unit": 4, "slices": 3, "padding": 1},
    "more rows than a program has": {"lengths": list(range(40)), "unit": 8, "slices": 2},
}
LARGE = {
    "256 rows": {"lengths": [31 * i + 5 for i in range(256)], "unit": 16},
    "256 rows, 18 slices": {"lengths": [7 * i for i in range(250)], "unit": 16, "slices": 18, "padding": 6},
    "far entries": {"lengths": [131071, 131000, 3], "unit": 16, "entries": 8192, "slices": 2},
}


def check(state, backend):
    before = [x.clone() for x in (state.lengths, state.tokens, state.tables)]
    results = ops.step_decode(*state.args(), backend)
    dtypes = (torch.int64, torch.int64, torch.int32, torch.int64, torch.int32)
    assert tuple(x.dtype for x in results) == dtypes
    assert tuple(x.tolist() for x in results) == state.expected()
    assert all(map(torch.equal, before, (state.lengths, state.tokens, state.tables)))


@pytest.mark.parametrize("target", TARGETS, ids="-".join)
@pytest.mark.parametrize("name", CASES)
def test_step_decode(target, name, poisoned_integers):
    backend, device = target
    state = State(device, **CASES[name])
    if name == "only padding":
        state.rows.fill_(-1)
    check(state, backend)


@pytest.mark.gpu
@pytest.mark.parametrize("name", LARGE)
def test_step_decode_at_real_sizes(name, poisoned_integers):
    check(State("cuda", **LARGE[name]), "triton")


@pytest.mark.parametrize("target", TARGETS, ids="-".join)
@pytest.mark.parametrize("name", CASES)
def test_scatter_tokens(target, name):
    backend, device = target
    state = State(device, **CASES[name])
    tokens, lengths = state.tokens.clone(), state.lengths.clone()
    drawn = torch.randint(2**40, (len(state.rows),), device=device)
    for row, token in zip(state.rows.tolist(), drawn.tolist(), strict=True):
        if row >= 0:
            tokens[row], lengths[row] = token, lengths[row] + 1
    ops.scatter_tokens(state.rows, drawn, state.tokens, state.lengths, backend)
    assert torch.equal(state.tokens, tokens) and torch.equal(state.lengths, lengths)


@pytest.mark.parametrize("target", TARGETS, ids="-".join)
def test_steps_follow_one_another(target):
    """Keys that say which token they are of end up in the order in which the tokens were drawn."""
    backend, device = target
    state = State(device, lengths=[0, 3, 6], unit=4, padding=1, entries=4)
    pool = torch.zeros(pool_shape(state.units.numel(), 1, 1, 4, 16), device=device)
    drawn = {row: [] for row in state.rows.tolist()}
    begin = state.lengths.clone()
    for step in range(7):
        ids, _, _, slots, _ = ops.step_decode(*state.args(), backend)
        k = ids.float()[:, None, None].expand(-1, 1, 16).contiguous()
        ops.append(k, k, pool, 0, slots[0], backend)
        for row, token in zip(state.rows.tolist(), ids.tolist(), strict=True):
            drawn[row].append(float(torch.tensor(token).float()))
        ops.scatter_tokens(
            state.rows, 1000 * step + torch.arange(4, device=device), state.tokens, state.lengths, backend
        )
    for row in drawn.keys() - {-1}:
        held = pool[state.units[0, row].to(device), 0, 0, 0, :, 0].flatten()
        assert held[begin[row] : state.lengths[row]].tolist() == drawn[row]


@pytest.mark.gpu
def test_a_graph_replays_at_any_length():
    state, twin = (State("cuda", lengths=[14, 0, 30], unit=16, padding=1, entries=8) for _ in range(2))

    def step(state):
        results = ops.step_decode(*state.args(), "triton")
        ops.scatter_tokens(state.rows, results[1] * 3 + 1, state.tokens, state.lengths, "triton")
        return results

    step(twin)  # compile
    twin = State("cuda", lengths=[14, 0, 30], unit=16, padding=1, entries=8)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step(state)
    for _ in range(40):
        graph.replay()
        assert tuple(x.tolist() for x in results) == twin.expected()
        step(twin)


@pytest.mark.parametrize("backend", ["reference", "cpu", pytest.param("triton", marks=interpreted)])
def test_the_ops_are_registered_as_they_behave(backend):
    state = State("cpu", lengths=[15, 16, 3], unit=16, slices=2, padding=1)
    torch.library.opcheck(torch.ops.octavo.step_decode.default, (*state.args(), backend))
    ids = torch.arange(4)
    torch.library.opcheck(
        torch.ops.octavo.scatter_tokens.default, (state.rows, ids, state.tokens, state.lengths, backend)
    )
