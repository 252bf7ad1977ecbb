"""Sampling: the noise is noise, the kept set is that of the exact thresholds, and a token depends on its row alone."""

import math
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from kernel_cases import in_turn

from octavo.kernels import ops
from octavo.kernels.cpu import sampling
from octavo.kernels.reference.sampling import exponentials, row_keys
from octavo.kernels.triton import settings

pytestmark = [
    pytest.mark.usefixtures("poisoned_memory"),
    # Rows of infinities make NaN, as they do on a GPU; numpy, under the interpreter, remarks on it.
    pytest.mark.filterwarnings("ignore:invalid value|overflow encountered|divide by zero|All-NaN slice:RuntimeWarning"),
]
interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU, the gpu tests run the compiled kernels")
TARGETS = [
    ("reference", "cpu"),
    ("cpu", "cpu"),
    pytest.param(("triton", "cpu"), marks=interpreted),
    pytest.param(("triton", "cuda"), marks=pytest.mark.gpu),
]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
INF, NAN = math.inf, math.nan


@dataclass
class Rows:
    """Inputs of the op; a filter is one value for all rows or a list."""

    logits: torch.Tensor
    temperature: float | list = 1.0
    top_k: int | list = 0
    top_p: float | list = 1.0
    min_p: float | list = 0.0
    seeds: torch.Tensor | None = None
    draws: torch.Tensor | None = None
    filters: tuple = field(init=False)

    def __post_init__(self):
        batch = len(self.logits)

        def column(value, dtype):
            value = torch.tensor(value, dtype=dtype)
            return value.expand(batch).contiguous()

        if self.seeds is None:
            self.seeds = torch.randint(-(2**63), 2**63 - 1, (batch,), generator=torch.Generator().manual_seed(batch))
        if self.draws is None:
            self.draws = torch.arange(batch)
        self.filters = (
            column(self.temperature, torch.float32),
            column(self.top_k, torch.int32),
            column(self.top_p, torch.float32),
            column(self.min_p, torch.float32),
            self.seeds,
            self.draws,
        )

    def sample(self, target, rows=slice(None)):
        backend, device = target
        return ops.sample(self.logits[rows].to(device), *(x[rows].to(device) for x in self.filters), backend).cpu()


def kept(x, temperature, k, p, m, slack):
    """Which tokens of one row fp64 [V] are kept, by a sort; a threshold is moved by the relative ``slack``."""
    ordered, ids = x.sort(descending=True, stable=True)
    weights = torch.exp((ordered - ordered[0]) / temperature)
    weights[k or len(x) :] = 0
    keep = (weights > 0) & ((weights.cumsum(0) - weights < p * weights.sum() * (1 + slack)) | (p >= 1))
    keep &= weights >= m * (1 - slack)
    keep[0] = True
    return torch.zeros_like(keep).scatter(0, ids, keep)


def check(tokens, rows):
    """Tokens against the definition in fp64: each is kept, and no token that is kept has a higher noisy score."""
    assert tokens.dtype == torch.int64 and tokens.shape == (len(rows.logits),)
    vocabulary = rows.logits.shape[1]
    noise = -exponentials(row_keys(rows.seeds, rows.draws), torch.arange(vocabulary, dtype=torch.int32)).double().log()
    columns = (column.tolist() for column in rows.filters[:4])
    for b, (token, t, k, p, m) in enumerate(zip(tokens.tolist(), *columns, strict=True)):
        x = rows.logits[b].double().nan_to_num(nan=-INF, posinf=INF, neginf=-INF)
        top = x.max()
        assert 0 <= token < vocabulary
        if t == 0 or top.isinf():
            assert token == x.argmax()
            continue
        scores = (x - top) / t + noise[b]
        slack = 1e-4 + 2e-6 * abs(top.item()) / t  # log, and the product with 1 / temperature, in fp32
        assert kept(x, t, k, p, m, 1e-5)[token], (b, token)
        assert scores[token] >= scores[kept(x, t, k, p, m, -1e-5)].max() - slack, (b, token)


def random_rows(batch, vocabulary, dtype, seed=0, **filters):
    generator = torch.Generator().manual_seed(seed)
    spread = torch.rand(batch, 1, generator=generator) * 4 + 0.1
    return Rows((torch.randn(batch, vocabulary, generator=generator) * spread).to(dtype), **filters)


@pytest.fixture
def small_blocks():
    """Rows of a hundred tokens have several blocks and parts, and lists overflow."""
    with (
        settings.trial("sample_survey", BLOCK=16, CELL=4, STAGES=1, num_warps=1, programs_per_sm=4),
        settings.trial("sample_settle", BLOCK=32, CAPACITY=16, STAGES=1, num_warps=1, programs_per_sm=3),
    ):
        yield


FILTERS = {
    "greedy": {"temperature": 0.0, "top_k": 3, "top_p": 0.1},
    "plain": {},
    "hot": {"temperature": 3.0},
    "k = 1": {"top_k": 1},
    "k = 5": {"top_k": 5, "temperature": 2.0},
    "k = 30, more than is listed": {"top_k": 30},
    "k = V": {"top_k": 101},
    "p": {"top_p": 0.9},
    "small p, hot": {"top_p": 0.2, "temperature": 5.0},
    "tiny p": {"top_p": 1e-9},
    "min p": {"min_p": 0.3},
    "min p = 1": {"min_p": 1.0},
    "k and p": {"top_k": 7, "top_p": 0.5, "temperature": 2.0},
    "all": {"top_k": 9, "top_p": 0.8, "min_p": 0.1, "temperature": 1.5},
    "large k and p": {"top_k": 40, "top_p": 0.8, "temperature": 4.0},
}


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("target", TARGETS, ids="-".join)
@pytest.mark.parametrize(("filters", "dtype"), in_turn(FILTERS, DTYPES), ids=str)
def test_random_rows(target, dtype, filters):
    rows = random_rows(3, 101, dtype, **FILTERS[filters])
    check(rows.sample(target), rows)


ROWS = {
    "equal": [0.5] * 40,
    "equal, and one above": [0.5] * 33 + [0.75] + [0.5] * 6,
    "few values": [float(i * 7 % 4) for i in range(40)],
    "negative": [-float(i * 7 % 40) for i in range(40)],
    "both zeros": [0.0, -0.0] * 20,
    "nothing": [-INF] * 40,
    "one finite": [-INF] * 37 + [-3.0, -INF, -INF],
    "three finite": [-INF] * 20 + [1.0, -INF, 1.0, 0.0] + [-INF] * 16,
    "some NaN": [NAN, 1.0, NAN, 2.0] + [0.0] * 35 + [NAN],
    "all NaN": [NAN] * 40,
    "plus infinity": [0.0] * 25 + [INF, 3.0, INF] + [0.0] * 12,
    "plus infinity and NaN": [NAN, 2.0, INF] + [-INF] * 37,
    "huge": [6e4, -6e4, 5.9e4] + [0.0] * 37,
}


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("target", TARGETS, ids="-".join)
@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_adversarial_rows(target, row):
    rows = Rows(
        torch.tensor([row] * 7),
        temperature=[0.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1e-30],
        top_k=[0, 0, 5, 0, 0, 20, 0],
        top_p=[1.0, 1.0, 1.0, 0.5, 1.0, 0.5, 0.9],
        min_p=[0.0, 0.0, 0.0, 0.0, 0.5, 0.1, 0.0],
    )
    check(rows.sample(target), rows)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("target", TARGETS, ids="-".join)
def test_ties_at_a_threshold_are_broken_by_id(target):
    count = 20 if target == ("triton", "cpu") else 600
    rows = Rows(torch.tensor([[1.0, 2.0, 1.0, 1.0, 2.0, 1.0]] * count), top_k=3, seeds=torch.arange(count))
    assert set(rows.sample(target).tolist()) == {0, 1, 4}
    rows = Rows(torch.zeros(count, 8), top_p=0.3, seeds=torch.arange(count))  # shares of 1/8: three pass 0.3
    assert set(rows.sample(target).tolist()) == {0, 1, 2}


@pytest.mark.parametrize("target", TARGETS, ids="-".join)
@pytest.mark.parametrize("vocabulary", [1, 2, 1000, 49_152, 262_144])
def test_vocabularies(target, vocabulary):
    several = {"temperature": [0.0, 1.0, 1.0], "top_k": [0, 50, 0], "top_p": [1.0, 0.95, 0.9]}
    rows = random_rows(3, vocabulary, torch.bfloat16, seed=1, **several)
    check(rows.sample(target), rows)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("target", TARGETS, ids="-".join)
def test_a_token_depends_on_its_row_alone(target):
    rows = random_rows(6, 90, torch.float32, top_k=[0, 4, 0, 0, 20, 3], top_p=[1.0, 1.0, 0.7, 0.9, 1.0, 0.5])
    together = rows.sample(target)
    order = [3, 1, 5, 0, 4, 2]
    assert torch.equal(rows.sample(target, order), together[order])
    assert torch.equal(torch.cat([rows.sample(target, [b]) for b in range(6)]), together)
    padded = torch.full((6, 128), NAN)
    padded[:, :90] = rows.logits
    rows.logits = padded[:, :90]  # rows with a stride
    assert torch.equal(rows.sample(target), together)


@pytest.mark.parametrize("target", TARGETS[2:], ids="-".join)
def test_how_a_row_is_divided_leaves_no_trace(target):
    rows = random_rows(4, 200, torch.float32, top_p=[0.9, 0.5] * 2, top_k=[0, 0, 0, 60], temperature=3.0)
    drawn = []
    for programs in (1, 8, 64):
        with (
            settings.trial("sample_survey", BLOCK=16, CELL=4, STAGES=1, num_warps=1, programs_per_sm=programs),
            settings.trial("sample_settle", BLOCK=32, CAPACITY=32, STAGES=1, num_warps=1, programs_per_sm=programs),
        ):
            drawn.append(rows.sample(target))
    assert torch.equal(drawn[0], drawn[1]) and torch.equal(drawn[0], drawn[2])
    check(drawn[0], rows)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("target", TARGETS, ids="-".join)
def test_a_long_walk(target):
    """Flat logits and a small top-p: most winners lie outside, again and again; some rows end at the very first."""
    rows = random_rows(6, 700, torch.float32, seed=3, top_p=[0.05, 0.1, 0.3, 0.0, 0.05, 0.6], temperature=20.0)
    check(rows.sample(target), rows)


def test_no_rows():
    for backend in ("reference", "cpu", "triton"):
        assert random_rows(0, 8, torch.float32).sample((backend, "cpu")).shape == (0,)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("compiled", [True, False])
def test_the_largest_in_c(monkeypatch, dtype, compiled):
    """In rows of several stretches, the last one a short one, with NaN and equals in many places."""
    if not compiled:
        monkeypatch.setattr(sampling, "_argmax", lambda dtype: None)
    x = torch.randint(-40, 40, (9, 2500), generator=torch.Generator().manual_seed(0)).to(dtype)
    x[0], x[1], x[2, :2400], x[3, 1024], x[4, 1023] = NAN, -INF, -INF, INF, INF
    x[5, ::2] = NAN
    expected = x.float().nan_to_num(nan=-INF, posinf=INF, neginf=-INF).argmax(1)
    assert torch.equal(sampling.largest(x), expected)
    assert torch.equal(sampling.largest(x.T.contiguous().T), expected)  # a row does not lie side by side


@pytest.mark.parametrize("backend", ["reference", "cpu", pytest.param("triton", marks=interpreted)])
def test_opcheck(backend):
    rows = random_rows(2, 40, torch.float32, top_k=[0, 3], top_p=0.9)
    torch.library.opcheck(torch.ops.octavo.sample.default, (rows.logits, *rows.filters, backend))


class TestDistribution:
    LOGITS = (2.0, 1.0, 0.0, -1.0, 1.5, 0.5)
    CASES = ({}, {"temperature": 2.0}, {"top_k": 3}, {"top_p": 0.8}, {"min_p": 0.2}, {"top_k": 5, "top_p": 0.9})

    @pytest.mark.parametrize("target", [TARGETS[0], TARGETS[1], TARGETS[3]], ids="-".join)
    @pytest.mark.parametrize(("filters", "stream"), in_turn(CASES, ["seeds", "draws"]), ids=str)
    def test_draws_follow_the_filtered_softmax(self, target, filters, stream):
        count = 4000
        streams = {"seeds": torch.full((count,), 11), "draws": torch.zeros(count, dtype=torch.int64)}
        streams[stream] = torch.arange(count)
        rows = Rows(torch.tensor(self.LOGITS).expand(count, -1).contiguous(), **filters, **streams)
        given = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **filters}
        x = torch.tensor(self.LOGITS).double()
        keep = kept(x, given["temperature"], given["top_k"], given["top_p"], given["min_p"], 0.0)
        expected = (x / given["temperature"]).where(keep, -INF).softmax(0).numpy() * count
        counts = np.bincount(rows.sample(target), minlength=len(x))
        assert counts[expected == 0].sum() == 0
        inside = expected > 0
        statistic = ((counts - expected)[inside] ** 2 / expected[inside]).sum()
        assert statistic < 20.5  # chi-square, at most 5 degrees of freedom, p = 0.001

    @pytest.mark.parametrize("lag", [1, 2, 64])
    def test_successive_tokens_are_independent(self, lag):
        count = 9000
        for streams in (
            (torch.arange(count), torch.zeros(count).long()),
            (torch.full((count,), 5), torch.arange(count)),
        ):
            tokens = (
                Rows(torch.zeros(count, 3), seeds=streams[0], draws=streams[1]).sample(("reference", "cpu")).numpy()
            )
            pairs = np.bincount(tokens[:-lag] * 3 + tokens[lag:], minlength=9)
            expected = pairs.sum() / 9
            assert ((pairs - expected) ** 2 / expected).sum() < 26.1  # 8 degrees of freedom, p = 0.001


class TestNoise:
    def test_the_stream_is_fixed(self):
        """The numbers of a seed are part of what a user may rely on."""
        keys = row_keys(torch.tensor([0, 1, -1]), torch.tensor([0, 7, 2**40]))
        assert keys.tolist() == [splitmix_key(0, 0), splitmix_key(1, 7), splitmix_key(-1, 2**40)]
        assert keys.tolist() == PINNED_KEYS
        drawn = exponentials(keys, torch.tensor([0, 1, 50_000], dtype=torch.int32))
        torch.testing.assert_close(drawn, torch.tensor(PINNED_NOISE), rtol=1e-6, atol=0)

    @pytest.mark.parametrize("axis", ["tokens", "seeds", "draws"])
    def test_exponentials_are_exponential(self, axis):
        count = 100_000
        ids, zeros, many = torch.zeros(1, dtype=torch.int32), torch.zeros(1).long(), torch.arange(count)
        if axis == "tokens":
            noise = exponentials(row_keys(zeros, zeros), many.int())[0]
        else:
            streams = (many, zeros) if axis == "seeds" else (zeros, many)
            noise = exponentials(row_keys(*streams), ids)[:, 0]
        assert noise.min() > 0 and noise.isfinite().all()
        uniform = torch.exp(-noise.double()).numpy()
        for cells in (16, 1000):
            counts = np.histogram(uniform, cells, (0, 1))[0]
            statistic = ((counts - count / cells) ** 2 / (count / cells)).sum()
            assert abs(statistic - cells) < 3.3 * math.sqrt(2 * cells)
        assert abs(np.corrcoef(uniform[1:], uniform[:-1])[0, 1]) < 3.3 / math.sqrt(count)

    def test_the_smallest_are_as_fine_as_the_rest(self):
        """The winner of a large vocabulary has E near 1 / V: there, too, no two are equal and all sizes are met."""
        keys = row_keys(torch.arange(64), torch.zeros(64).long())
        least = exponentials(keys, torch.arange(2**17, dtype=torch.int32)).min(1).values * 2**17
        assert len(least.unique()) == 64
        assert 0.6 < least.mean() < 1.5  # 1 in expectation, 1/8 the standard error

    def test_every_bit_of_seed_and_draw_reaches_every_bit_of_the_noise(self):
        base = torch.zeros(1).long()
        flips = torch.tensor([1 << bit if bit < 63 else -(2**63) for bit in range(64)])
        tokens = torch.arange(512, dtype=torch.int32)
        for changed in (row_keys(flips, base), row_keys(base, flips)):
            apart = exponentials(changed, tokens) < math.log(2)
            share = (apart != (exponentials(row_keys(base, base), tokens) < math.log(2))).float().mean(1)
            assert (share - 0.5).abs().max() < 0.11  # 5 standard errors


def splitmix_key(seed, draw):
    """The key of a (seed, draw) in Python's own integers."""
    mask, golden = 2**64 - 1, 0x9E3779B97F4A7C15

    def mix(x):
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & mask
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB & mask
        return x ^ (x >> 31)

    key = mix((mix((seed + golden) & mask) + (draw + 1) * golden) & mask)
    return key - 2**64 if key >= 2**63 else key


PINNED_KEYS = [-6411193824288604561, 4555703879086989499, -8411638957507971348]
PINNED_NOISE = [
    [1.3219934, 0.36485234, 0.65278012],
    [0.98335093, 0.19934914, 0.04099476],
    [0.11470109, 2.8414855, 0.34745175],
]


@pytest.mark.gpu
class TestOnTheGpu:
    TARGET = ("triton", "cuda")

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize(
        "batch, vocabulary", [(1, 131_072), (32, 49_152), (256, 131_072), (3, 262_144), (5, 50_257)]
    )
    def test_real_shapes(self, dtype, batch, vocabulary):
        choices = {
            "temperature": (0.0, 1.0, 0.7, 1.0, 1.5, 1.0, 0.8),
            "top_k": (0, 0, 50, 0, 500, 0, 5000),
            "top_p": (1.0, 1.0, 0.9, 0.9, 1.0, 0.5, 0.9),
            "min_p": (0.0, 0.0, 0.0, 0.0, 0.0, 0.1, 0.0),
        }
        filters = {name: [values[b % 7] for b in range(batch)] for name, values in choices.items()}
        rows = random_rows(batch, vocabulary, dtype, **filters)
        if batch > 8:
            rows.logits[7:9] = 0.25
        check(rows.sample(self.TARGET), rows)

    def test_splits_leave_no_trace(self):
        rows = random_rows(64, 100_003, torch.bfloat16, top_p=0.9)
        together = rows.sample(self.TARGET)
        assert torch.equal(torch.cat([rows.sample(self.TARGET, [b]) for b in range(64)]), together)

    def test_calls_agree(self):
        """Programs of a row finish in any order, and lists are in the order of chance."""
        rows = random_rows(256, 131_072, torch.bfloat16, top_p=[0.9, 0.5, 0.99, 0.9] * 64, top_k=[0, 0, 0, 100] * 64)
        inputs = [x.cuda() for x in (rows.logits, *rows.filters)]
        first = ops.sample(*inputs, "triton")
        assert all(torch.equal(ops.sample(*inputs, "triton"), first) for _ in range(50))
        check(first.cpu(), rows)

    def test_a_graph_replays_with_other_logits_and_filters(self):
        first = random_rows(8, 20_000, torch.float32, top_p=0.9)
        second = random_rows(8, 20_000, torch.float32, seed=1, top_k=[0, 40] * 4, temperature=[0.0, 0.5, 1.0, 2.0] * 2)
        inputs = [x.cuda() for x in (first.logits, *first.filters)]
        ops.sample(*inputs, "triton")
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = ops.sample(*inputs, "triton")
        for rows in (second, first):
            for static, fresh in zip(inputs, (rows.logits, *rows.filters), strict=True):
                static.copy_(fresh)
            graph.replay()
            check(out.cpu(), rows)
