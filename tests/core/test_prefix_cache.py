"""Keys, hits and their verification. BR numbers are those of public bug reports."""

import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from octavo.core import SamplingParams
from octavo.core.memory import prefix_cache
from octavo.core.memory.prefix_cache import PageKey, PrefixCache, digest256, page_key, root_key

GREEDY = {"ignore_eos": True}


def array(*tokens):
    return np.array(tokens, np.int32)


def tokens(n, seed=0, low=3, high=128):
    return random.Random(seed).choices(range(low, high), k=n)


def distinct(*keys):
    return len(set(keys)) == len(keys)


class TestKeys:
    def test_256_bits(self):
        assert len(root_key()) == len(page_key(root_key(), array(1))) == 32

    def test_br18_parts_are_tagged_and_delimited(self):
        assert distinct(
            digest256(("ab", b"c")),
            digest256(("a", b"bc")),
            digest256(("a", b"b"), ("", b"c")),
            digest256(("a", b"b"), ("c", b"")),
            digest256(("a", b""), ("b", b"c")),
        )
        assert distinct(root_key(), root_key([("salt", "")]), root_key([("salt", "x")]), root_key([("adapter", "x")]))

    def test_br18_neighbouring_ids_do_not_run_together(self):
        root = root_key()
        assert distinct(
            page_key(root, array(1, 23)), page_key(root, array(12, 3)), page_key(root, array(123)),
            page_key(root, array(1, 23, 0)), page_key(root, array(0, 1, 23)),
        )  # fmt: skip

    def test_provenance_is_part_of_the_key(self):
        root = root_key()
        assert distinct(page_key(root, array(1)), page_key(root, array(1), "quest"), page_key(root, array(1), "quest2"))
        assert distinct(root_key([("salt", "quest")]), page_key(root, array(1), "quest"))

    def test_position_in_the_chain_is_part_of_the_key(self):
        root, page = root_key(), array(7, 7, 7, 7)
        first = page_key(root, page)
        assert distinct(first, page_key(first, page), page_key(page_key(first, page), page))

    def test_the_dtype_and_layout_of_the_ids_are_not(self):
        root = root_key()
        strided = np.arange(8, dtype=np.int32)[::2]
        assert page_key(root, strided) == page_key(root, array(0, 2, 4, 6)) == page_key(root, np.array([0, 2, 4, 6]))

    def test_br17_keys_are_the_same_in_every_process(self):
        script = (
            "import importlib.util as u, sys, numpy as np\n"
            "s = u.spec_from_file_location('keys', sys.argv[1]); m = u.module_from_spec(s); s.loader.exec_module(m)\n"
            "key = m.root_key([('salt', 'tenant')])\n"
            "for page in range(4):\n"
            "    key = m.page_key(key, np.arange(16 * page, 16 * page + 16, dtype=np.int32), 'p' * (page // 2))\n"
            "    print(key.hex())\n"
        )
        lists = [
            subprocess.run(
                [sys.executable, "-P", "-c", script, str(Path(prefix_cache.__file__))],
                env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True,
            ).stdout.split()
            for seed in ("0", "1")
        ]  # fmt: skip
        key, here = root_key([("salt", "tenant")]), []
        for page in range(4):
            key = page_key(key, np.arange(16 * page, 16 * page + 16, dtype=np.int32), "p" * (page // 2))
            here.append(key.hex())
        assert lists == [here, here]


def enter(index, parent, *page, provenance=""):
    """The node of a page after ``parent``, a node or the root key."""
    key = parent if isinstance(parent, bytes) else parent.key
    return index.enter(page_key(key, array(*page), provenance), parent, array(*page), provenance)


class TestIndex:
    def test_publish_find_forget(self):
        index, root = PrefixCache(), root_key()
        key = page_key(root, array(1, 2))
        assert index.find(key, root, array(1, 2), "") is None
        node = enter(index, root, 1, 2)
        index.attach(5, node)
        assert index.find(key, root, array(1, 2), "") is node and node.page(0) == 5
        assert index.node(5) is node and index.group(5) == 0 and 5 in index and len(index) == 1
        index.check()
        index.forget(5)
        assert index.find(key, root, array(1, 2), "") is None and 5 not in index and len(index) == 0
        index.check()

    @pytest.mark.parametrize(
        "parent, page, provenance", [("other", (1, 2), ""), ("root", (1, 3), ""), ("root", (1, 2), "other")],
        ids=["another_parent", "other_tokens", "another_provenance"],
    )  # fmt: skip
    def test_br20_a_key_that_collides_is_a_miss(self, parent, page, provenance):
        index, key = PrefixCache(), PageKey(b"k")
        parents = {"root": root_key(), "other": enter(index, root_key(), 7)}
        index.attach(5, index.enter(key, parents["root"], array(1, 2), ""))
        assert index.find(key, parents["root"], array(1, 2), "").page(0) == 5
        assert index.find(key, parents[parent], array(*page), provenance) is None
        twin = index.enter(key, parents[parent], array(*page), provenance)
        index.attach(6, twin)
        index.forget(5)
        assert index.find(key, parents[parent], array(*page), provenance) is twin
        assert index.find(key, parents["root"], array(1, 2), "") is None

    def test_twins_are_tracked_apart(self):
        index, root = PrefixCache(), root_key()
        node = enter(index, root, 1, 2)
        for page in (5, 3):
            assert enter(index, root, 1, 2) is node
            index.attach(page, node)
        assert node.pages == [[5, 3]] and len(index) == 2
        index.forget(5)
        assert index.find(node.key, root, array(1, 2), "") is node and node.page(0) == 3
        index.check()
        index.forget(3)
        assert index.find(node.key, root, array(1, 2), "") is None and node.page(0) == 0

    def test_each_group_of_layers_has_its_pages(self):
        index = PrefixCache(2)
        node = enter(index, root_key(), 1)
        index.attach(5, node, 1)
        assert (node.page(0), node.page(1), index.group(5)) == (0, 5, 1)
        index.attach(3, node, 0)
        index.forget(5)
        assert node.pages == [[3], []] and index.find(node.key, root_key(), array(1), "") is node
        index.check()

    def test_a_node_stays_while_longer_prefixes_lead_through_it(self):
        index = PrefixCache()
        first = enter(index, root_key(), 1)
        second = enter(index, first, 2)
        third = enter(index, second, 3)
        for page, node in [(1, first), (2, second), (3, third)]:
            index.attach(page, node)
        index.forget(1)
        index.forget(2)
        index.check()
        assert index.find(second.key, first, array(2), "") is second and second.page(0) == 0
        index.forget(3)
        index.check()
        assert not index._nodes and first.children == second.children == 0

    def test_a_page_that_comes_after_forgotten_ones_lists_them_again(self):
        """A sequence whose window has passed its pages may be the last to know them."""
        index = PrefixCache()
        first = enter(index, root_key(), 1)
        second = enter(index, first, 2)
        index.attach(1, first)
        index.attach(2, second)
        index.forget(1)
        index.forget(2)
        third = enter(index, second, 3)
        index.attach(3, third)
        index.check()
        assert index.find(first.key, root_key(), array(1), "") is first and first.children == 1
        assert index.find(second.key, first, array(2), "") is second
        assert index.find(third.key, second, array(3), "") is third

    def test_a_child_of_a_forgotten_parent_is_not_found_through_a_new_one(self):
        index, root = PrefixCache(), root_key()
        first = enter(index, root, 1)
        second = page_key(first.key, array(2))
        index.attach(1, first)
        index.forget(1)
        again = enter(index, root, 1)
        index.attach(3, again)
        index.attach(2, enter(index, first, 2))
        assert again is not first and again.id != first.id and index.find(second, again, array(2), "") is None
        index.check()

    def test_a_page_is_published_once(self):
        index = PrefixCache()
        index.attach(1, enter(index, root_key(), 1))
        with pytest.raises(AssertionError, match="page 1 is published already"):
            index.attach(1, enter(index, root_key(), 2))

    @pytest.mark.parametrize(
        "break_it, message",
        [
            (lambda index, node: setattr(node, "key", PageKey(b"b")), "node 1 is listed under another key"),
            (lambda index, node: setattr(node, "children", 5), "node 1 counts 5 children, not 1"),
            (lambda index, node: index._of_page.pop(1), "differ from nodes of pages"),
            (lambda index, node: enter(index, node, 9), "node 3 is kept and nothing needs it"),
            (lambda index, node: index._of_page.update({1: index.node(2)}), "page 1 is not listed by its own"),
        ],
        ids=["key", "children", "page", "idle_node", "node"],
    )
    def test_check_finds(self, break_it, message):
        index = PrefixCache()
        node = enter(index, root_key(), 1)
        index.attach(1, node)
        index.attach(2, enter(index, node, 2))
        index.check()
        break_it(index, node)
        with pytest.raises(AssertionError, match=message):
            index.check()


class TestHits:
    def test_br13_a_reused_page_is_not_found_for_its_old_content(self, t_model, engine_for, assert_idle):
        engine = engine_for(t_model, pool_tokens=20)
        x, y = tokens(16, 1), tokens(16, 2)
        first, other, again = (
            engine.generate([prompt], SamplingParams(max_tokens=4, **GREEDY))[0] for prompt in (x, y, x)
        )
        assert again.samples[0].token_ids == first.samples[0].token_ids != other.samples[0].token_ids
        assert engine.stats().evictions >= 4
        assert_idle(engine)

    def test_br13_the_index_does_not_grow(self, make_chain, engine_for, assert_idle):
        engine = engine_for(make_chain(64), pool_tokens=20)
        for number in range(200):
            engine.submit(tokens(16, number, 0, 64), SamplingParams(max_tokens=1), salt=str(number % 60))
            engine.step()
        index = engine._pool.index
        sizes = [len(held) for held in vars(index).values() if isinstance(held, dict)]
        assert len(sizes) == 2 and max(sizes) <= 5
        assert_idle(engine)

    @pytest.mark.parametrize("length, hits", [(3, 0), (4, 0), (5, 4), (8, 4), (9, 8), (16, 12)])
    def test_br15_never_the_whole_prompt(self, t_model, engine_for, assert_idle, length, hits):
        engine = engine_for(t_model)
        params = SamplingParams(max_tokens=4, **GREEDY)
        first, second = (engine.generate([tokens(length)], params)[0] for _ in range(2))
        assert (first.cached_tokens, second.cached_tokens) == (0, hits)
        assert first.samples[0].token_ids == second.samples[0].token_ids
        longer = tokens(length) + tokens(3, 9)
        third = engine.generate([longer], params)[0]
        assert third.cached_tokens == length // 4 * 4
        assert third.samples[0].token_ids == engine_for(t_model).generate([longer], params)[0].samples[0].token_ids
        assert_idle(engine)

    def test_generated_tokens_are_found_too(self, t_model, engine_for):
        engine = engine_for(t_model)
        first = engine.generate([tokens(6)], SamplingParams(max_tokens=11, **GREEDY))[0]
        longer = tokens(6) + first.samples[0].token_ids
        second = engine.generate([longer], SamplingParams(max_tokens=5, **GREEDY))[0]
        assert second.cached_tokens == 16  # of 17; the KV of the last one was never computed
        expected = engine_for(t_model).generate([longer], SamplingParams(max_tokens=5, **GREEDY))[0]
        assert second.samples[0].token_ids == expected.samples[0].token_ids

    def test_a_hit_while_the_owner_lives_shares_its_pages(self, t_model, engine_for, drain, assert_idle):
        engine = engine_for(t_model)
        engine.submit(tokens(10), SamplingParams(max_tokens=8, **GREEDY), request_id="owner")
        engine.step()
        engine.submit(tokens(8) + tokens(5, 1), SamplingParams(max_tokens=4, **GREEDY), request_id="guest")
        engine.step()
        owner, guest = engine._scheduler.running
        assert guest.table.pages()[:2].tolist() == owner.table.pages()[:2].tolist() == [1, 2]
        assert engine._pool.refs[[1, 2, 3]].tolist() == [2, 2, 1]
        assert drain(engine).completions["guest"].cached_tokens == 8
        assert_idle(engine)

    @pytest.mark.parametrize("after, hits", [(1, 0), (2, 4), (3, 8), (4, 12)])
    def test_only_computed_pages_are_found(self, t_model, engine_for, drain, after, hits):
        engine = engine_for(t_model, step_tokens=4)
        prompt = tokens(18)
        engine.submit(prompt, SamplingParams(max_tokens=1), request_id="a")
        for _ in range(after - 1):
            engine.step()
        engine.abort("a")
        engine.submit(prompt, SamplingParams(max_tokens=3, **GREEDY), request_id="b")
        drained = drain(engine)
        assert drained.completions["b"].cached_tokens == hits
        expected = engine_for(t_model).generate([prompt], SamplingParams(max_tokens=3, **GREEDY))[0]
        assert drained.tokens_of("b") == expected.samples[0].token_ids

    def test_br18_salts_are_apart(self, t_model, engine_for, drain):
        engine = engine_for(t_model)
        hits = []
        for salt in (None, "a", "b", "a", None, "", "b"):
            request_id = engine.submit(tokens(9), SamplingParams(max_tokens=1), salt=salt)
            hits.append(drain(engine).completions[request_id].cached_tokens)
        assert hits == [0, 0, 0, 8, 8, 0, 8]

    def test_br20_an_8_bit_hash_gives_no_wrong_hit(self, make_llama, engine_for, monkeypatch, assert_idle):
        model = make_llama(num_hidden_layers=1)
        prompts = [tokens(16, number, 3, 6) for number in range(300)]
        params = SamplingParams(max_tokens=2, **GREEDY)
        expected = engine_for(model, prefix_cache=False, pool_tokens=2000, max_seqs=64).generate(prompts, params)
        strong = prefix_cache.digest256
        monkeypatch.setattr(prefix_cache, "digest256", lambda *parts: PageKey(strong(*parts)[:1]))
        engine = engine_for(model, pool_tokens=2000, max_seqs=64)
        got = engine.generate(prompts, params)
        assert max(len(nodes) for nodes in engine._pool.index._nodes.values()) > 1  # keys did collide
        assert [c.samples[0].token_ids for c in got] == [c.samples[0].token_ids for c in expected]
        assert engine.stats().hit_tokens > 0
        assert_idle(engine)

    def test_without_a_cache_there_are_no_hits(self, t_model, engine_for, assert_idle):
        engine = engine_for(t_model, prefix_cache=False)
        for _ in range(2):
            assert engine.generate([tokens(9)], SamplingParams(max_tokens=2))[0].cached_tokens == 0
        stats = engine.stats()
        assert (stats.hit_tokens, stats.pages_cached, stats.pages_free) == (0, 0, 100)
        assert_idle(engine)

    def test_prompt_logprobs_skip_hits_and_still_register_pages(self, t_model, engine_for):
        engine = engine_for(t_model)
        plain, scored, again = (
            engine.generate([tokens(13)], SamplingParams(max_tokens=2, prompt_logprobs=k, **GREEDY))[0]
            for k in (0, 0, None)
        )
        assert (plain.cached_tokens, scored.cached_tokens, again.cached_tokens) == (0, 0, 12)
        assert len(scored.prompt_logprobs) == 13 and scored.prompt_logprobs[0] is None
        assert again.prompt_logprobs is None

    def test_hits_are_counted_at_every_admission(self, t_model, engine_for, drain):
        engine = engine_for(t_model)
        engine.generate([tokens(9)], SamplingParams(max_tokens=1))
        engine.generate([tokens(9), tokens(9)], SamplingParams(max_tokens=1))
        stats = engine.stats()
        assert (stats.hit_tokens, stats.query_tokens) == (16, 27)
