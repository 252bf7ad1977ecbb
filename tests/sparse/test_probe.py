"""What the instruments say of a choice of pages, against plain arithmetic on the pages."""

import pytest
import torch

from octavo.core import SamplingParams
from octavo.core.inspection import probing
from octavo.core.interfaces import LayerTraits, Selection
from octavo.scripts.build import method
from octavo.sparse.probe import METRICS, Probe

from .method_cases import NAMES, PROMPT, View, make

PARAMS = SamplingParams(max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def model(make_llama):
    return make_llama(num_hidden_layers=3)


class WholeView(View):
    """Pages that can be attended to one by one. The values are other numbers than the keys."""

    def __init__(self, seed=0, digest=None, sinks=None):
        super().__init__(seed, digest)
        self.v = torch.randn(self.k.shape, generator=torch.Generator().manual_seed(seed + 100))
        self.traits = LayerTraits(8**-0.5, sinks=sinks)

    def attend(self, row, pages):
        """Output [Hq, D] and log-sum-exp [Hq] over the tokens of some pages of each KV head, by plain arithmetic."""
        out, lse = torch.zeros(4, 8), torch.zeros(4)
        for head in range(4):
            own = torch.as_tensor(pages[head // 2])
            at = (own[:, None] * 4 + torch.arange(4)).flatten()
            at = at[at < self.lengths[row]]
            keys, values = (x[row].transpose(0, 1)[head // 2].flatten(0, 1)[at] for x in (self.k, self.v))
            logits = keys @ self.q[row, head] * self.traits.scale
            if self.traits.sinks is not None:
                logits = torch.cat([logits, self.traits.sinks[head : head + 1]])
                values = torch.cat([values, torch.zeros(1, 8)])
            out[head], lse[head] = logits.softmax(0) @ values, logits.logsumexp(0)
        return out, lse

    def apart(self, q, row):
        sinks, self.traits = self.traits.sinks, LayerTraits(self.traits.scale)
        outs, lses = zip(*(self.attend(row, [[p], [p]]) for p in range(int(self.n_pages[row]))), strict=True)
        self.traits = LayerTraits(self.traits.scale, sinks=sinks)
        return torch.stack(outs), torch.stack(lses)


def observed(view, pages, row=0, name="quest", every=1):
    """What is measured where row 0 or 1 reads ``pages``, a list a KV head."""
    width = max(map(len, pages))
    counts = torch.ones(2, len(pages), dtype=torch.int32)
    listed = torch.full((2, len(pages), width), 3)  # past a count may stand any page
    for head, own in enumerate(pages):
        listed[row, head, : len(own)], counts[row, head] = torch.tensor(own), len(own)
    out = torch.full((2, 4, 8), float("nan"))
    out[row], _ = view.attend(row, pages if len(pages) == 2 else pages * 2)
    probe, chosen = Probe(every), make(name)
    probe.observe(chosen, view.q, out, Selection(listed, counts), view, [row])
    return probe.take(chosen)


@pytest.mark.parametrize("sinks", [None, torch.tensor([0.3, -1.0, 2.0, 0.0])], ids=["plain", "sinks"])
@pytest.mark.parametrize("row", [0, 1])
def test_mass_and_errors_are_those_of_plain_attention(row, sinks):
    view = WholeView(row, sinks=sinks)
    last = int(view.n_pages[row]) - 1
    pages = [[0, 2, last - 1, last], [0, 1, last]]
    found = observed(view, pages, row)
    everything = [list(range(last + 1))] * 2
    dense, _ = view.attend(row, everything)
    sparse, _ = view.attend(row, pages)
    error = ((sparse - dense).norm(dim=-1) / dense.norm(dim=-1)).view(2, 2).mean(1)
    assert found["output_error"][1] == pytest.approx(error.tolist(), rel=1e-5)
    plain = LayerTraits(view.traits.scale)
    view.traits = plain
    inside = (view.attend(row, pages)[1] - view.attend(row, everything)[1]).exp().view(2, 2).mean(1)
    assert found["captured_mass"][1] == pytest.approx(inside.tolist(), rel=1e-5)
    assert found["rows"] == [0, 1, 0] and found["output_error"][0] is None


@pytest.mark.parametrize("sinks", [None, torch.tensor([0.3, -1.0, 2.0, 0.0])], ids=["plain", "sinks"])
def test_leaving_one_page_out_changes_what_its_removal_error_says(sinks):
    view = WholeView(sinks=sinks)
    for left_out in range(8):
        pages = [[page for page in range(9) if page != left_out]] * 2
        found = observed(view, pages)
        assert found["removal_error"][1] == pytest.approx(found["output_error"][1], rel=1e-4)


def test_the_removal_error_is_that_of_the_worst_page():
    view = WholeView()
    alone = [observed(view, [[p for p in range(9) if p != left_out]] * 2) for left_out in (1, 2, 3)]
    together = observed(view, [[0, 4, 5, 6, 7, 8]] * 2)
    for head in range(2):  # two query heads each: the mean of maxima is at least the maximum of means
        assert together["removal_error"][1][head] >= max(one["removal_error"][1][head] for one in alone) - 1e-6


@pytest.mark.parametrize("seed", range(3))
def test_the_oracle_recalls_everything_and_the_worst_pages_nothing(seed):
    view = WholeView(seed)
    chosen = make("oracle").select(view.q, view)
    best = [chosen.pages[0, head].tolist() for head in range(2)]
    found = observed(view, best, name="oracle")
    assert found["page_recall"][1] == [1.0, 1.0]
    mass = view.mass(view.q)[0]
    kept = {0, 7, 8}
    for head in range(2):  # as many as the oracle reads, the worst ones
        free = sorted(set(range(9)) - kept, key=lambda p: mass[head, p].item())
        best[head] = sorted([*kept, *free[:2]])
    assert observed(view, best, name="oracle")["page_recall"][1] == [0.0, 0.0]


def test_pages_that_are_kept_anyway_are_no_merit():
    found = observed(WholeView(), [[0, 7, 8]] * 2)
    assert found["page_recall"][1] == [1.0, 1.0]  # nothing was free to choose
    assert found["captured_mass"][1][0] < 1


def test_one_list_for_all_heads_is_measured_head_by_head():
    view = WholeView()
    found, again = observed(view, [[0, 3, 7, 8]]), observed(view, [[0, 3, 7, 8]] * 2)
    assert all(found[name] == again[name] for name in METRICS)


def test_what_is_read_whole_is_passed_over_and_what_was_taken_is_forgotten():
    assert observed(WholeView(), [list(range(9))] * 2) is None
    probe, view = Probe(1), WholeView()
    selection = make("oracle").select(view.q, view)
    probe.observe(make("oracle"), view.q, torch.zeros(2, 4, 8), selection, view, [0, 1])
    assert probe.take(make("quest")) is None and probe.take(None) is None
    assert probe.take(make("oracle"))["rows"] == [0, 2, 0] and probe.take(make("oracle")) is None
    with pytest.raises(ValueError, match="every=0 must be at least 1"):
        Probe(0)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("name", [name for name in NAMES if name != "oracle_token"])  # it chooses no pages
def test_an_engine_s_steps_are_measured(name, backend, model, engine_for, drain):
    """In the layers that choose, the steps that are due; the tokens and the counted bytes stay what they are."""
    chosen, probe = make(name, 12), Probe(4)
    samples = []
    for one in (None, probe):
        engine = engine_for(model, backend=backend)
        probing.attach(engine, one)
        engine.submit(PROMPT, PARAMS, method=chosen, request_id="a")
        samples.append(drain(engine).completions["a"].samples[0])
    assert samples[0] == samples[1]
    found = probe.take(chosen)
    assert found["rows"] == [0, 3, 3]  # 11 decode steps; layer 0 is dense
    assert found["bytes_read"] == 2 * sum(2 * 2 * 16 * 4 * (46 + step) for step in (0, 4, 8)) and found["seconds"] > 0
    for layer in (1, 2):
        for head in range(2):
            recall, mass, removal, error = (found[metric][layer][head] for metric in METRICS)
            assert 0 <= recall <= 1 and 0 < mass < 1 and removal > 0 and error > 0
    if name in ("oracle", "tidal"):
        assert found["page_recall"][1] == [1.0, 1.0]  # tidal's later layer reads what layer 1 has chosen


@pytest.mark.parametrize("name", ["quest", "oracle", "random"])
def test_replayed_steps_are_left_out_where_the_probe_looks(name, model, engine_for, drain, monkeypatch):
    chosen, got = make(name, 12), []
    for execution in ("eager", "graph"):
        engine, probe = engine_for(model, execution=execution), Probe(5)
        replayed = []
        if engine._runner._program is not None:
            program, step = engine._runner._program, engine._runner._program.sparse_step
            monkeypatch.setattr(program, "sparse_step", lambda *args, f=step, seen=replayed: seen.append(1) or f(*args))
        probing.attach(engine, probe)
        engine.submit(PROMPT, PARAMS, method=chosen, request_id="a")
        completion = drain(engine).completions["a"]
        got.append((completion.samples[0].token_ids, completion.samples[0].kv_bytes_read, probe.take(chosen)))
        assert len(replayed) == (8 if execution == "graph" else 0)  # 11 steps, of which 0, 5 and 10 are measured
    (tokens, read, eager), (again, counted, graph) = got
    assert tokens == again and read == counted
    assert all(torch.tensor(eager[m][1]).allclose(torch.tensor(graph[m][1]), rtol=1e-4) for m in METRICS)


def test_scored_tokens_are_measured_too(model, engine_for):
    engine, chosen, probe = engine_for(model), make("quest", 12), Probe(2)
    probing.attach(engine, probe)
    engine.score(PROMPT, list(range(5, 12)), method=chosen)
    assert probe.take(chosen)["rows"] == [0, 3, 3]  # six of the seven tokens are fed: 0, 2 and 4 are due


@pytest.mark.parametrize("name", ["dense", "quest"])
def test_what_a_request_holds_at_its_end(name, model, engine_for, drain):
    engine = engine_for(model)
    engine.submit(PROMPT, PARAMS, method=None if name == "dense" else make(name, 12), request_id="a")
    sample = drain(engine).completions["a"].samples[0]
    pages = -(-(45 + 12 - 1) // 4)  # the last token's KV is never stored
    assert sample.kv_bytes_resident == pages * 4 * engine.spec.kv_bytes_per_token(4)


def test_what_drops_tokens_holds_less(model, engine_for, drain):
    engine, chosen = engine_for(model), method("snapkv", budget_tokens=20, keep={"sink_tokens": 4, "recent_tokens": 4})
    engine.submit(PROMPT, PARAMS, method=chosen, request_id="a")
    sample = drain(engine).completions["a"].samples[0]
    assert sample.kv_bytes_resident < 0.8 * 14 * 4 * engine.spec.kv_bytes_per_token(4)
