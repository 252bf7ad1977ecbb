"""What a step does on the device: table entries by difference, few kernel calls, and the counters."""

import random
from collections import Counter

import numpy as np
import pytest
import torch

from octavo.core import SamplingParams
from octavo.core.execution.device_tables import DeviceTables
from octavo.core.memory.page_layout import PageLayout, Segment
from octavo.core.memory.prefix_cache import root_key
from octavo.core.policies import FixedPages
from octavo.core.shared_list import SharedList
from octavo.kernels import ops
from octavo.kernels.layout import entry_units, entry_valid
from octavo.kernels.reference import backend as reference

GREEDY = {"ignore_eos": True}


def tokens(n, seed=0):
    return random.Random(seed).choices(range(3, 128), k=n)


ASKED = []
"""Pages that somebody was told of, by number."""


class Table:
    """A table of pages that are given by their units, [entries of the page] a slice."""

    def __init__(self, *pages):
        self.units, self.stale_from = [np.array(page, np.int32) for page in pages], 0

    @property
    def slices(self):
        return len(self.units[0])

    @property
    def n_pages(self):
        return len(self.units)

    def pages(self, start):
        ASKED.extend(self.units[start:])
        return np.arange(len(ASKED) - len(self.units[start:]), len(ASKED))

    def listed(self, pages, size):
        return np.concatenate([np.empty((self.slices, 0), np.int32), *(ASKED[page] for page in pages)], axis=1)

    def entries(self, start, stop, layout):
        return np.concatenate(self.units[start:stop], axis=1)


TEXT = PageLayout([], {"text": FixedPages(8)}, 4)


class Holder:
    def __init__(self, *tables, layout=TEXT):
        self.tables, self.layout = list(tables), layout

    @property
    def table(self):
        return self.tables[0]


def holder(*pages):
    """One group of one slice; pages of two units."""
    return Holder(Table(*([page] for page in pages)))


class TestDeviceTables:
    def tables(self, rows=2, slices=1):
        return DeviceTables(rows, slices, 10, torch.device("cpu"))

    def row(self, tables, holder, at=0):
        entries = tables.entries[at, tables.rows([holder])[0]]
        return entry_units(entries).tolist(), entry_valid(entries).tolist()

    def test_entries_of_a_page_of_two_units(self):
        tables, a, b = self.tables(), holder([1, 2], [7, 8]), holder([5, 6])
        tables.sync([a, b])
        assert self.row(tables, a) == ([1, 2, 7, 8, 0, 0, 0, 0, 0, 0], [4] * 4 + [0] * 6)
        assert self.row(tables, b) == ([5, 6] + [0] * 8, [4] * 2 + [0] * 8)

    def test_only_what_differs_is_written(self):
        tables, a = self.tables(), holder([1, 2], [7, 8])
        tables.sync([a])
        tables.entries.fill_(-1)
        tables.sync([a])
        assert (tables.entries == -1).all()
        a.table.units.append(np.array([[3, 4]], np.int32))
        tables.sync([a])
        assert (tables.entries != -1).sum() == 2 and self.row(tables, a)[0][4:6] == [3, 4]
        a.table.units[1], a.table.stale_from = np.array([[9, 10]], np.int32), 1
        tables.sync([a])
        assert self.row(tables, a)[0][:6] == [-1, -1, 9, 10, 3, 4] and a.table.stale_from == 3

    def test_rows_are_given_back_and_written_afresh(self):
        tables, a, b, c = self.tables(), holder([1, 2]), holder([3, 4]), holder([5, 6])
        tables.sync([a, b])
        tables.sync([b, c])
        assert self.row(tables, b)[0][:2] == [3, 4] and self.row(tables, c)[0][:2] == [5, 6]
        assert len({int(row) for row in tables.rows([b, c])}) == 2
        tables.sync([])
        a.table.stale_from = 1
        tables.sync([a])
        assert self.row(tables, a)[0][:2] == [1, 2]

    def test_each_slice_of_each_group_has_a_row_and_holes_have_no_tokens(self):
        tables = self.tables(slices=3)
        full, window = Table([[1, 2]], [[3, 4]]), Table([[0, 0], [0, 0]], [[5, 6], [7, 8]])
        a = Holder(full, window)
        tables.sync([a])
        assert [self.row(tables, a, at)[0][:4] for at in range(3)] == [[1, 2, 3, 4], [0, 0, 5, 6], [0, 0, 7, 8]]
        assert [self.row(tables, a, at)[1][:4] for at in range(3)] == [[4] * 4, [0, 0, 4, 4], [0, 0, 4, 4]]
        tables.entries.fill_(-1)
        window.units[1], window.stale_from = np.array([[9, 10], [11, 12]], np.int32), 1
        tables.sync([a])
        assert (tables.entries != -1).sum() == 4 and self.row(tables, a, 2)[0][2:4] == [11, 12]

    def test_sealed_pages_bring_positions_for_all_rows(self):
        """A text of 5 tokens on pages of 8 is sealed: its last unit holds one token, and the next page is token 5."""
        sealed = PageLayout(
            [Segment("text", 5), Segment("image", 8)], {"text": FixedPages(8), "image": FixedPages(8)}, 4
        )
        tables, plain = self.tables(rows=3), holder([1, 2])
        tables.sync([plain])
        assert tables.unit_pos is None
        a = Holder(Table([[3, 4]], [[5, 6]], [[7, 8]]), layout=sealed)
        tables.sync([plain, a])
        assert self.row(tables, a) == ([3, 4, 5, 6, 7, 8, 0, 0, 0, 0], [4, 1, 4, 4, 4, 4, 0, 0, 0, 0])
        assert tables.unit_pos[tables.rows([a])[0], :6].tolist() == [0, 4, 5, 9, 13, 17]
        assert tables.unit_pos[tables.rows([plain])[0]].tolist() == list(range(0, 40, 4))
        row = int(tables.rows([a])[0])
        tables.sync([plain])
        later = holder([9, 10])
        tables.sync([plain, later])
        assert int(tables.rows([later])[0]) == row
        assert tables.unit_pos[row].tolist() == list(range(0, 40, 4))


class TestWork:
    @pytest.fixture
    def calls(self, monkeypatch):
        counted = Counter()
        for name in ("append", "append_decode", "copy_units", "decode", "prefill"):
            real = getattr(reference, name)

            def counting(*args, name=name, real=real, **named):
                counted[name] += 1
                return real(*args, **named)

            monkeypatch.setattr(reference, name, counting)
        return counted

    def test_kernel_calls_of_a_step(self, t_model, engine_for, calls):
        engine = engine_for(t_model)
        for number in range(4):
            engine.submit(tokens(5, number), SamplingParams(max_tokens=4, **GREEDY))
        engine.submit(tokens(1), SamplingParams(max_tokens=4, **GREEDY))
        engine.step()
        assert calls == {"append": 2, "prefill": 2, "decode": 2}  # one a layer, whatever the number of sequences
        calls.clear()
        engine.step()
        assert calls == {"append_decode": 2}

    def test_copies_of_a_step_go_in_one_launch(self, t_model, engine_for, calls):
        engine = engine_for(t_model)
        engine.submit(tokens(6), SamplingParams(n=5, temperature=1.0, seed=1, max_tokens=4, **GREEDY))
        engine.step()
        calls.clear()
        engine.step()
        assert calls["copy_units"] == 1 and engine.stats().copies == 4

    @pytest.mark.parametrize(
        "pairs, launches, holds",
        [
            ([(1, 2), (3, 4)], 1, {2: 1, 4: 3}),
            ([(1, 2), (1, 3)], 1, {2: 1, 3: 1}),
            ([(1, 2), (2, 3)], 2, {2: 1, 3: 1}),
            ([(1, 2), (3, 1)], 2, {2: 1, 1: 3}),
            ([(1, 2), (3, 2)], 2, {2: 3}),
        ],
        ids=["apart", "one_source", "chain", "target_was_source", "target_twice"],
    )
    def test_copies_are_carried_out_in_order(self, t_model, engine_for, calls, pairs, launches, holds):
        engine = engine_for(t_model)
        runner = engine._runner
        runner.kv.copy_(torch.arange(len(runner.kv)).view(-1, 1, 1, 1, 1, 1).expand_as(runner.kv))
        runner.copies.queue([np.array([pair], np.int32) for pair in pairs])
        runner.copies.carry_out(None)
        assert {page: int(runner.kv[page].max()) for page in holds} == holds
        assert calls["copy_units"] == launches and engine.stats().copies == 2 and not runner.copies.pending

    def test_a_page_of_several_units_is_one_copy(self, t_model, engine_for, calls):
        engine = engine_for(t_model, page_tokens=24)
        runner = engine._runner
        runner.kv.copy_(torch.arange(len(runner.kv)).view(-1, 1, 1, 1, 1, 1).expand_as(runner.kv))
        runner.copies.queue([np.array([[1, 4], [2, 5], [3, 6]], np.int32), np.array([[7, 8]], np.int32)])
        runner.copies.carry_out(None)
        assert [int(runner.kv[unit].max()) for unit in (4, 5, 6, 8)] == [1, 2, 3, 7]
        assert calls["copy_units"] == 1 and engine.stats().copies == 2

    def test_a_decode_step_looks_at_few_pages(self, make_llama, engine_for, monkeypatch):
        engine = engine_for(make_llama(max_position_embeddings=2048), page_tokens=1, pool_tokens=2000)
        engine.submit(tokens(1500), SamplingParams(max_tokens=9, **GREEDY))
        engine.step()
        engine.step()
        (sequence,) = engine._scheduler.running
        asked, pages = [], type(sequence.table).pages

        def counting(table, start=0, stop=None):
            found = pages(table, start, stop)
            asked.append(len(found))
            return found

        monkeypatch.setattr(type(sequence.table), "pages", counting)
        engine.step()
        assert 0 < sum(asked) <= 4 and sequence.table.n_pages == 1502

    def test_the_ops_take_the_whole_pool(self):
        schema = ops.decode.default._schema
        assert [argument.name for argument in schema.arguments][:4] == ["q", "pool", "layer", "table"]
        assert [a.name for a in ops.append.default._schema.arguments if a.alias_info and a.alias_info.is_write] == [
            "pool"
        ]


class TestStats:
    def test_counters_of_a_small_story(self, t_model, engine_for):
        engine = engine_for(t_model, pool_tokens=48)
        assert engine.stats().units_total == 12 and engine.stats().steps == 0
        engine.generate([tokens(9)], SamplingParams(max_tokens=3, **GREEDY))
        engine.generate([tokens(9)], SamplingParams(n=2, seed=1, temperature=1.0, max_tokens=3, **GREEDY))
        stats = engine.stats()
        assert (stats.query_tokens, stats.hit_tokens, stats.copies, stats.preemptions) == (18, 8, 1, 0)
        assert (stats.running_peak, stats.steps, stats.evictions) == (2, 6, 0)
        assert stats.units_held_peak == 4 and stats.units_held == 0
        engine.generate([tokens(40, 1)], SamplingParams(max_tokens=3, **GREEDY))
        stats = engine.stats()
        assert stats.units_held_peak == 11 and stats.evictions == 1
        assert stats.pages_cached == 10 + 1 and stats.pages_free == 1
        assert (stats.host_units_total, stats.host_units_free, stats.host_units_held) == (0, 0, 0)
        assert stats.device_bytes_peak == 11 * engine._runner.kv[0].nbytes

    def test_waiting_and_running(self, t_model, engine_for):
        engine = engine_for(t_model, max_seqs=2)
        for number in range(3):
            engine.submit(tokens(5, number))
        assert (engine.stats().waiting, engine.stats().running) == (3, 0)
        engine.step()
        assert (engine.stats().waiting, engine.stats().running) == (1, 2)


def stranger(engine, sequence):
    """A sequence that is in no queue."""
    return type(sequence)(sequence.request, 1, [5], engine._pool, engine._plan)


def publish(engine, page):
    engine._pool.publish(int(page), engine._pool.index.enter(root_key([("any", "")]), root_key(), np.array([1]), ""))


class TestCheck:
    """``Engine.check`` finds what is broken on purpose."""

    @pytest.mark.parametrize(
        "break_it, message",
        [
            (lambda e, s: e._pool.refs.__setitem__(s.table.pages()[0], 2), r"pages \[1\] count \[2\] leaves, \[1\]"),
            (lambda e, s: s.table._root[0].__setattr__("tables", 2), "a leaf counts 2 tables, 1 hold it"),
            (lambda e, s: e._scheduler.waiting.append(s), "in two queues"),
            (lambda e, s: e._scheduler.running.remove(s), "count .* leaves"),
            (lambda e, s: setattr(s, "computed", 99), "99 tokens are computed in 3 pages"),
            (lambda e, s: e._pool.index.node(1).pages[0].append(9), r"pages of nodes \[1, 2, 9\] differ from"),
            (lambda e, s: setattr(s, "nodes", SharedList([*s.nodes][::-1])), "indexed for another prefix"),
            (lambda e, s: e._requests.clear(), "0 sequences are live, 1 are queued"),
            (lambda e, s: e._scheduler._computing.update({b"key": stranger(e, s)}), "do not run"),
            (lambda e, s: e._pool._allocator._stack.__setitem__(-1, 1), "units are listed as free"),
            (lambda e, s: e._pool._allocator._is_free.__setitem__(4, False), "units are listed as free"),
            (lambda e, s: publish(e, s.table.pages()[-1]), "is about to write to a findable page"),
        ],
        ids=[
            "refs", "leaf", "queues", "lost", "computed", "index", "node", "requests", "computing", "allocator", "free",
            "written",
        ],
    )  # fmt: skip
    def test_finds(self, t_model, engine_for, break_it, message):
        engine = engine_for(t_model)
        engine.submit(tokens(9), SamplingParams(max_tokens=4, **GREEDY))
        engine.step()
        engine.check()
        break_it(engine, engine._scheduler.running[0])
        with pytest.raises(AssertionError, match=message):
            engine.check()
