"""The frame of the kernel races, without a GPU: floors, fits, turns, verdicts, the search for settings, the command.

Times come from a clock of the test's own. The races themselves are in ``tests/kernels/test_races.py``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.kernels.triton import settings
from octavo.scripts.experiments import kernels
from octavo.scripts.kernel_races import contest, rates, registry, timing, tuning
from octavo.scripts.kernel_races.contest import describe, line, rows
from octavo.scripts.kernel_races.race import Field, Race, Target
from octavo.scripts.kernel_races.rates import Line, Rates, fit, floor_us
from octavo.scripts.kernel_races.search import SPACES, Space
from octavo.scripts.refusal import ConfigError

from .conftest import Command, samples

CPU = torch.device("cpu")
CARD = Rates(read=4e12, read_pieces=3.9e12, copy=3e12, product_flop_per_s=8e14, to_device=5e10, to_host=4e10)


class Timed:
    """A call that takes a known time, which may depend on the launch settings, or cannot run."""

    def __init__(self, us: float | Callable[[], float], problem: str | None = None) -> None:
        self.us, self.problem = us, problem

    def __call__(self) -> None:
        if self.problem:
            raise RuntimeError(self.problem)


class FakeClock:
    """Laps take what the calls say, one microsecond more in every round, so that medians and ranges differ."""

    def prepare(self, calls: Sequence[Timed], captured: bool) -> timing.Lap:  # type: ignore[override]
        for call in calls:
            call()
        us = [call.us() if callable(call.us) else call.us for call in calls]
        base, round_ = sum(us) / len(us), iter(range(1000))
        return lambda: base + next(round_)


def race(
    shape: str = "s",
    us: Mapping[str, Any] | None = None,
    *,
    error: float = 0.0,
    target: Target | None = None,
    **more: Any,
) -> Race:
    """A race whose contenders take ``us``; a text in place of a time is why one cannot run."""
    takes = {"octavo": 10.0, "flashinfer": 12.0} if us is None else us

    def build(device: torch.device) -> Field:
        calls = {n: [Timed(0, t) if isinstance(t, str) else Timed(t)] for n, t in takes.items()}
        return Field(calls, lambda: error, 1e-3)  # type: ignore[arg-type]

    return Race(
        **{"kernel": "K1 decode", "shape": shape, "moved_bytes": 32e6, "flops": 0, **more}, build=build, target=target
    )


def run_race(one: Race, **more: Any) -> dict[str, Any]:
    return contest.contest(one, CPU, CARD, clock=FakeClock(), rounds=3, **more)


class TestFloors:
    def test_bytes_or_operations_whichever_takes_longer(self) -> None:
        assert floor_us(race(moved_bytes=8e6), CARD) == pytest.approx(2.0)
        assert floor_us(race(moved_bytes=8e6, bound="copy"), CARD) == pytest.approx(8 / 3)
        assert floor_us(race(moved_bytes=8e6, flops=8e9), CARD) == pytest.approx(10.0)
        assert floor_us(race(moved_bytes=1e6, bound="to_host"), CARD) == pytest.approx(25.0)

    def test_the_fit_finds_the_fixed_part_and_the_rate(self) -> None:
        truth = Line(9.0, 4e12)
        found = fit([(size, truth(size)) for size in (4e6, 1e8, 1e9)])
        assert found is not None
        assert found.t0_us == pytest.approx(9.0) and found.bytes_per_s == pytest.approx(4e12)

    def test_small_shapes_count_as_much_as_large_ones(self) -> None:
        """An error of 5 % at the largest shape must not move the fixed part by as many microseconds."""
        points = [(4e6, 10.0), (8e6, 11.0), (1e9, 1.05 * 259.0)]
        found = fit(points)
        assert found is not None and abs(found.t0_us - 9) < 1

    def test_no_line_through_one_size(self) -> None:
        assert fit([]) is None and fit([(1e6, 3.0), (1e6, 4.0)]) is None


class TestTiming:
    def test_all_take_turns_and_the_first_lap_does_not_count(self) -> None:
        order: list[str] = []

        def lap(name: str) -> Callable[[], float]:
            def one() -> float:
                order.append(name)
                return float(len(order))

            return one

        taken = timing.interleave({"a": lap("a"), "b": lap("b")}, 3)
        assert "".join(order) == "ab" + "ababab"
        assert taken == {"a": [3.0, 5.0, 7.0], "b": [4.0, 6.0, 8.0]}

    def test_median(self) -> None:
        assert timing.timed([Timed(5.0)], rounds=3, clock=FakeClock()) == 7.0

    @pytest.mark.gpu
    @pytest.mark.parametrize("captured", [True, False])
    def test_gpu_a_lap_launches_at_least_twenty_times(self, captured: bool) -> None:
        counts = [torch.zeros((), device="cuda") for _ in range(3)]
        lap = timing.GraphClock().prepare([lambda c=c: c.add_(1) for c in counts], captured)  # type: ignore[misc]
        before = [float(count) for count in counts]
        assert 0 < lap() < 1e5
        assert [float(count) - old for count, old in zip(counts, before, strict=True)] == [7.0] * 3

    @pytest.mark.gpu
    def test_gpu_rates_are_those_of_a_card(self) -> None:
        found = rates.measure(torch.device("cuda"), ["read", "to_host"], timing.GraphClock())
        assert 1e11 < found.copy < 2e13 and 1e11 < found.read_pieces < 1.1 * found.read < 2e13
        assert found.to_host is not None and found.to_device is None


class TestContest:
    def test_a_race(self) -> None:
        target = Target("at most 11 µs", lambda times: times.us["octavo"] <= 11)
        sample = run_race(race(target=target))
        assert sample["us"] == {"octavo": [11.0, 12.0, 13.0], "flashinfer": [13.0, 14.0, 15.0]}
        assert (sample["floor_us"], sample["reached"], sample["failed"]) == (8.0, False, {})
        (row,) = rows([sample])
        assert (row["name"], row["kernel"], row["shape"], row["moved_bytes"]) == ("octavo", "K1 decode", "s", 32e6)
        assert (row["us"], row["us_min"], row["us_max"], row["percent_of_floor"]) == (12.0, 11.0, 13.0, 800 / 12)
        assert (row["flashinfer_us"], row["fastest_rival"], row["fastest_rival_us"]) == (14.0, "flashinfer", 14.0)
        assert list(row).index("moved_bytes") < list(row).index("percent_of_floor") < list(row).index("us")
        assert describe(sample) == (
            "K1 decode, s: 32.0 MB, floor 8.0 µs, 66.7 % of it; octavo 12.0 µs, flashinfer 14.0 µs; "
            "at most 11 µs: NOT reached"
        )

    def test_what_is_wrong_does_not_race(self) -> None:
        for error in (2e-3, float("inf"), float("nan")):
            sample = run_race(race(error=error))
            assert not contest.correct(sample) and sample["us"] == {}
            assert "WRONG: relative error" in describe(sample)

    def test_a_rival_that_fails_is_reported_and_left_out(self) -> None:
        sample = run_race(race(us={"octavo": 10.0, "flashinfer": "no kernel\nfor this card", "sdpa flash": 11.0}))
        assert contest.correct(sample) and list(sample["us"]) == ["octavo", "sdpa flash"]
        assert sample["failed"] == {"flashinfer": "RuntimeError: no kernel for this card"}
        assert "flashinfer failed: RuntimeError: no kernel for this card" in describe(sample)
        assert rows([sample])[0]["fastest_rival"] == "sdpa flash"

    def test_octavo_that_fails_is_wrong(self) -> None:
        sample = run_race(race(us={"octavo": "out of memory", "flashinfer": 3.0}))
        assert not contest.correct(sample) and sample["us"] == {}
        assert describe(sample) == "K1 decode, s: WRONG: RuntimeError: out of memory"

    def test_a_race_that_cannot_be_built_is_wrong(self) -> None:
        def build(device: torch.device) -> Field:
            raise ValueError("no such shape")

        sample = run_race(Race("K", "s", 1, 0, build))
        assert not contest.correct(sample) and sample["failed"] == {"octavo": "ValueError: no such shape"}

    def test_only_the_rivals_that_were_asked_for(self) -> None:
        everyone = race(
            us={"octavo": 1.0, "octavo page 16": 1.0, "one large copy": 2.0, "sdpa flash": 3.0, "torch": 4.0}
        )
        assert list(run_race(everyone, families=["torch"])["us"]) == [
            "octavo",
            "octavo page 16",
            "one large copy",
            "torch",
        ]
        assert list(run_race(everyone, families=[])["us"]) == ["octavo", "octavo page 16", "one large copy"]
        assert rows([run_race(everyone, families=[])])[0]["fastest_rival"] is None

    def test_a_check_takes_no_time(self) -> None:
        sample = contest.contest(race(us={"octavo": "must not run"}), CPU, None)
        assert contest.correct(sample) and sample["us"] == {} and sample["floor_us"] is None
        assert describe(sample) == "K1 decode, s: right, relative error 0.0e+00"
        assert rows([sample])[0]["percent_of_floor"] is None

    def test_a_target_that_cannot_be_judged_is_open(self) -> None:
        against = Target("faster than torch", lambda times: times.us["octavo"] < times.us["torch"])
        assert run_race(race(target=against))["reached"] is None
        assert "not judged" in describe(run_race(race(target=against)))
        fitted = race(fit="judged", target=Target("t", lambda times: times.us["octavo"] <= 1.1 * times.fit(32e6)))  # type: ignore[misc]
        assert run_race(fitted)["reached"] is None
        assert run_race(fitted, line=Line(4.0, 4e12))["reached"] is True
        assert run_race(fitted, line=Line(1.0, 4e12))["reached"] is False

    def test_the_line_is_over_the_uniform_shapes_that_ran(self) -> None:
        ran = [
            run_race(race(str(mb), {"octavo": 4.0 + mb / 4}, moved_bytes=mb * 1e6, fit="point")) for mb in (4, 40, 400)
        ]
        others = [run_race(race("ragged", {"octavo": 1.0})), run_race(race("x", error=1.0, fit="point"))]
        found = line([*ran, *others])
        assert found is not None and found.t0_us == pytest.approx(6.0) and found.bytes_per_s == pytest.approx(4e12)
        last = rows([{"item": "rates", **vars(CARD)}, *ran])[-1]
        assert (last["shape"], last["us"]) == ("t0 + bytes / rate", pytest.approx(6.0))


class TestRegistry:
    def test_names_and_order(self) -> None:
        everything = registry.races()
        assert len({one.name for one in everything}) == len(everything)
        judged = [one.fit == "judged" for one in everything]
        assert any(judged) and judged == sorted(judged)

    @pytest.mark.parametrize(
        ("only", "kernels_of"),
        [
            ("k9", {"K9 append", "K9 append_fused"}),
            ("Append", {"K9 append"}),
            ("k8", {"K6+K7+K8 sparse"}),
            ("k14", {"K14 step_decode", "K14 scatter_tokens"}),
            ("attention", {"K1 decode", "K4 pages"}),
            ("k4", {"K4 pages"}),
        ],
    )
    def test_only(self, only: str, kernels_of: set[str]) -> None:
        assert {one.kernel for one in registry.races([only])} == kernels_of

    def test_every_kernel_races(self) -> None:
        """But for the plan and the combine of decode, which race in it, and for low precision, which is not built."""
        named = {word for one in registry.races() for word in one.kernel.replace("+", " ").split() if word[0] == "K"}
        assert named == {f"K{n}" for n in range(1, 17)} - {"K2", "K10", "K15"}

    def test_what_writes_as_much_as_it_reads_is_held_against_the_copy_rate(self) -> None:
        copies = {"K9 append", "K9 append_fused", "K11 copy", "K16 rotate"}
        assert {one.kernel for one in registry.races() if one.bound == "copy"} == copies
        assert all(one.bound == "copy" for one in registry.races() if one.kernel in copies)

    def test_limit(self) -> None:
        assert [one.name for one in registry.races(["k9"], 1)] == ["K9 append, 256 tokens"]

    def test_an_unknown_name_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="only=apend: unknown; did you mean 'append'"):
            registry.races(["apend"])

    def test_a_module_that_is_not_there_is_passed_over(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(registry, "MODULES", ("pages", "no_such_module"))
        assert {one.kernel for one in registry.races()} == {"K9 append", "K11 copy", "K12 transfer"}


class TestTuning:
    SPACE = Space({"BLOCK_S": (1, 2, 4, 8), "num_warps": (1, 2, 4)}, ("K1 decode, s",))

    def search(
        self, us: Callable[[Mapping[str, int]], float], seconds: float = 1e9, tick: float = 0.0
    ) -> list[tuning.Trial]:
        def takes() -> float:
            return us(settings.launch("merge_states", "any", CPU))

        ticks = iter(range(10**6))
        one = race(us={"octavo": takes})
        now = (lambda: next(ticks) * tick) if tick else (lambda: 0.0)
        return tuning.search("merge_states", "any", self.SPACE, [one], CPU, FakeClock(), seconds, now)  # type: ignore[arg-type]

    def test_one_setting_after_another_from_the_table(self) -> None:
        trials = self.search(lambda v: 100 + abs(v["BLOCK_S"] - 4) * 10 + abs(v["num_warps"] - 2))
        assert dict(trials[0].values) == dict(settings.launch("merge_states", "any", CPU))
        assert dict(tuning.best(trials).values) == {"BLOCK_S": 4, "num_warps": 2}
        assert len(trials) <= 1 + 4 + 3 + 4 + 3
        tried = [tuple(trial.values.items()) for trial in trials]
        assert len(tried) == len(set(tried))

    def test_noise_changes_nothing(self) -> None:
        trials = self.search(lambda v: 1000 - v["num_warps"] / 10)
        assert tuning.best(trials) is trials[0]

    def test_what_does_not_run_is_passed_over(self) -> None:
        def us(values: Mapping[str, int]) -> float:
            if values["num_warps"] == 1:
                raise RuntimeError("out of resource: shared memory")
            return 10.0 * values["num_warps"]

        trials = self.search(us)
        assert dict(tuning.best(trials).values)["num_warps"] == 2
        problems = {trial.problem for trial in trials if trial.values["num_warps"] == 1}
        assert problems == {"RuntimeError: out of resource: shared memory"}

    def test_what_is_wrong_is_passed_over(self) -> None:
        one = race(error=1.0)
        (trial, *_) = tuning.search("merge_states", "any", self.SPACE, [one], CPU, FakeClock(), 1e9)  # type: ignore[arg-type]
        assert trial.problem == "wrong at K1 decode, s: relative error 1.0e+00"

    def test_no_trial_begins_after_the_time(self) -> None:
        assert len(self.search(lambda v: 1.0, seconds=3.5, tick=1.0)) == 4
        assert len(self.search(lambda v: 1.0, seconds=0.5, tick=1.0)) == 1  # the table's own, to compare with

    def test_a_mean_over_races_is_geometric(self) -> None:
        assert tuning.Trial({}, {"a": 2.0, "b": 8.0}).us_mean == pytest.approx(4.0)

    def test_a_table_is_written_as_it_is_committed(self) -> None:
        text = (settings.FOLDER / "default.json").read_text()
        assert tuning.table_text(json.loads(text)) == text

    def test_what_was_tuned_replaces_what_the_chip_had(self) -> None:
        kept = {"decode": {"64x2": {"a": 1}, "128x2": {"a": 2}}, "mass": {"any": {"b": 1}}}
        tuned = {"decode": {"128x2": {"a": 3}}, "append": {"any": {"c": 4}}}
        assert tuning.merged(kept, tuned) == {
            "decode": {"64x2": {"a": 1}, "128x2": {"a": 3}},
            "mass": {"any": {"b": 1}},
            "append": {"any": {"c": 4}},
        }

    def test_spaces_are_of_what_exists(self) -> None:
        table = json.loads((settings.FOLDER / "default.json").read_text())
        known = {one.name for one in registry.races()}
        assert set(SPACES) == set(table) - {"mass"}  # which no race runs
        for kernel, entries in SPACES.items():
            for key, space in entries.items():
                assert space.races and set(space.races) <= known, (kernel, key)
                assert set(space.values) == set(table[kernel][key]), (kernel, key)
                for setting, value in table[kernel][key].items():  # a search can end where the table is
                    assert value in space.values[setting], (kernel, key, setting)

    def test_no_race_judges_two_keys_of_a_kernel(self) -> None:
        for kernel, entries in SPACES.items():
            named = [name for space in entries.values() for name in space.races]
            assert len(named) == len(set(named)), kernel


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> dict[str, Race]:
    """A card that is none: races, rates and clock of the test's own."""
    reached = Target("at most 20 µs", lambda times: times.us["octavo"] <= 20)
    listed = {
        one.name: one
        for one in (
            race("small", fit="point", moved_bytes=4e6, target=reached),
            race("large", {"octavo": 90.0, "sdpa flash": "broken"}, fit="point", moved_bytes=320e6, target=reached),
            race("cliff", fit="judged", target=Target("by the fit", lambda times: times.fit is not None)),
        )
    }
    monkeypatch.setattr(kernels, "_device", lambda config: CPU)
    monkeypatch.setattr(kernels, "_clock", lambda config, device: None if config.check_only else FakeClock())
    monkeypatch.setattr(timing, "GraphClock", FakeClock)
    monkeypatch.setattr(rates, "measure", lambda device, bounds, clock: CARD)
    monkeypatch.setattr(registry, "races", lambda only=(), limit=None: list(listed.values())[:limit])
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    return listed


class TestCommand:
    def test_a_run(self, octavo: Command, card: dict[str, Race]) -> None:
        outcome = octavo("experiment=kernels", "rounds=3")
        assert outcome.code == 0, outcome.err
        small, large, cliff, fitted = outcome.metrics["rows"]
        assert [row["shape"] for row in (small, large, cliff)] == ["small", "large", "cliff"]
        assert (small["us"], small["flashinfer_us"], small["floor_us"], small["reached"]) == (12.0, 14.0, 1.0, True)
        assert (large["percent_of_floor"], large["reached"]) == (pytest.approx(8000 / 92), False)
        assert large["failed"] == "sdpa flash: RuntimeError: broken" and cliff["reached"] is True
        assert fitted["shape"] == "t0 + bytes / rate" and fitted["bytes_per_s"] > 1e12
        environment = outcome.metrics["environment"]
        assert environment["read_bytes_per_s"] == 4e12 and environment["settings_file"] == "default.json"
        assert {"gpu", "torch", "triton", "product_flop_per_s", "to_host_bytes_per_s"} <= set(environment)
        assert next(s["item"] for s in samples(outcome.folder)) == "rates"
        assert "read 4.000 TB/s, read pieces 3.900 TB/s, copy 3.000 TB/s" in outcome.out
        assert "2 of 3 targets reached; not: K1 decode, large" in outcome.out
        assert "% of floor" in outcome.out and "FlashInfer µs" in outcome.out
        assert (outcome.folder / "plots/kernels.png").stat().st_size > 5000
        assert "cliff" in (outcome.folder / "report.html").read_text()

    def test_a_wrong_kernel_fails_the_run_after_all_rows(self, octavo: Command, card: dict[str, Race]) -> None:
        card["K1 decode, small"] = race("small", error=0.5)
        outcome = octavo("experiment=kernels", "rounds=1")
        assert outcome.code == 1 and "1 of 3 races are not right: K1 decode, small" in outcome.err
        assert [row["correct"] for row in outcome.metrics["rows"]] == [False, True, True]
        assert outcome.metrics["complete"]

    def test_an_interrupted_run_goes_on(self, octavo: Command, card: dict[str, Race]) -> None:
        folder = octavo("experiment=kernels", "rounds=1").folder
        file = folder / "samples.jsonl"
        lines = file.read_text().splitlines(keepends=True)
        file.write_text("".join(lines[:3]))
        outcome = octavo(f"resume={folder}")
        assert outcome.code == 0, outcome.err
        assert [s["item"] for s in samples(folder)] == ["rates", *card]

    def test_only_checks(self, octavo: Command, card: dict[str, Race]) -> None:
        outcome = octavo("experiment=kernels", "check_only=true", "limit=2")
        assert outcome.code == 0, outcome.err
        assert [row["correct"] for row in outcome.metrics["rows"]] == [True, True]
        assert all(row["us"] is None for row in outcome.metrics["rows"])
        assert not list(outcome.folder.glob("plots/*"))

    def test_tuning_writes_the_chips_table(
        self, octavo: Command, card: dict[str, Race], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        space = Space({"num_warps": (1, 2, 4, 8)}, ("K1 decode, tuned",))
        one = race("tuned", {"octavo": lambda: 100.0 + settings.launch("merge_states", "any", CPU)["num_warps"]})
        card[one.name] = one
        monkeypatch.setitem(SPACES, "merge_states", {"any": space})
        outcome = octavo("experiment=kernels", "tune=true", "only=[merge_states]")
        assert outcome.code == 0, outcome.err
        written = json.loads((outcome.folder / "settings.json").read_text())
        kept = json.loads((settings.FOLDER / "default.json").read_text())  # the table of what is no GPU
        assert written == {**kept, "merge_states": {"any": {**kept["merge_states"]["any"], "num_warps": 1}}}
        table = outcome.metrics["rows"]
        assert [row["chosen"] for row in table] == [True, *[False] * (len(table) - 1)]
        assert table[0]["us_mean"] < table[-1]["us_mean"] and "num_warps 1" in table[0]["settings"]
        assert "commit it as kernels/triton/settings/default.json" in (outcome.folder / "report.html").read_text()

    def test_tuning_what_has_no_space_is_refused(self, octavo: Command, card: dict[str, Race]) -> None:
        outcome = octavo("experiment=kernels", "tune=true", "only=[mass]")
        assert outcome.code == 1 and "only=mass: unknown" in outcome.err

    @pytest.mark.skipif(torch.cuda.is_available(), reason="it has a CUDA device")
    def test_without_a_gpu_results_are_checked(self, tmp_path: Path) -> None:
        """In a process of its own, whose Triton nobody has switched to its interpreter."""
        environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        command = [sys.executable, "-P", "-m", "octavo.scripts.main", "experiment=kernels", "only=[step]", "limit=1"]
        done = subprocess.run(
            [*command, "tracking=off"], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        assert "they need a CUDA device, and this is cpu" in done.stdout.replace("\n", " ")
        (metrics,) = tmp_path.glob("runs/kernels/*/metrics.json")
        (row,) = json.loads(metrics.read_text())["rows"]
        assert row["kernel"] == "K14 step_decode" and row["correct"] is True and row["us"] is None

    @pytest.mark.skipif(torch.cuda.is_available(), reason="it has a CUDA device")
    def test_without_a_gpu_nothing_can_be_tuned(self, octavo: Command) -> None:
        outcome = octavo("experiment=kernels", "tune=true")
        assert outcome.code == 1 and "tune=true times kernels, which needs a CUDA device" in outcome.err

    @pytest.mark.parametrize(
        ("override", "message"),
        [
            ("rounds=0", "rounds=0: must be at least 1"),
            ("tune_seconds=0", "tune_seconds=0.0: must be more than 0"),
            ("tune_seconds=nan", "tune_seconds=nan: must be more than 0"),
            ("rivals=[vllm]", "rivals=vllm: unknown; "),
            ("only=[decode,decode]", "only lists 'decode' twice"),
            ("engine.page_tokens=32", "engine.page_tokens=32: no engine runs in this experiment"),
        ],
    )
    def test_refusals(self, override: str, message: str, octavo: Command) -> None:
        outcome = octavo("experiment=kernels", override)
        assert outcome.code == 1 and message in outcome.err

    def test_a_search_needs_times(self, octavo: Command) -> None:
        outcome = octavo("experiment=kernels", "tune=true", "check_only=true")
        assert outcome.code == 1 and "a search needs times" in outcome.err


def test_a_figure_of_many_contenders(tmp_path: Path) -> None:
    takes = {name: 10.0 + n for n, name in enumerate(("octavo", *(f"rival {n}" for n in range(12))))}
    drawn = kernels.figure([run_race(race(us=takes)), run_race(race("t"))])
    drawn.savefig(tmp_path / "figure.png")
    assert len(drawn.axes[0].get_yticklabels()) == 2
