"""Loki and Double Sparsity: methods that need a calibration file, and the calibration."""

import dataclasses
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from octavo.core import SamplingParams
from octavo.core.costs import predict_decode
from octavo.core.hf_model import load
from octavo.core.interfaces import ModelSpec
from octavo.scripts.build import method
from octavo.scripts.embedded_models import MODELS
from octavo.scripts.experiments import calibrate
from octavo.scripts.schema import Calibrate
from octavo.sparse import basis_files, calibration
from octavo.sparse.projection import Projection

from .method_cases import CALIBRATED, PROMPT, View, make

SAMPLING = SamplingParams(max_tokens=12, ignore_eos=True, logprobs=1)


@pytest.fixture(scope="module")
def model(make_llama):
    return make_llama(num_hidden_layers=3)


@pytest.fixture(scope="module")
def files(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("calibration")
    queries, keys = calibration.queries_and_keys(model, [PROMPT, PROMPT[::-1]])
    basis_files.write(folder / "loki.npz", calibration.principal_directions(keys, 4), {})
    basis_files.write(folder / "double_sparsity.npz", calibration.heavy_channels(queries, keys, 4), {})
    return {name: str(folder / f"{name}.npz") for name in CALIBRATED}


def complete(engine, **requests):
    ids = [engine.submit(PROMPT, SAMPLING, method=method, request_id=name) for name, method in requests.items()]
    return {name: completion.samples[0] for name, completion in engine.finish(ids).items()}


@pytest.mark.parametrize("name", CALIBRATED)
def test_the_contract(name, files, model, engine_for):
    full, small = (make(name, tokens, digest={"file": files[name]}) for tokens in (2000, 12))
    dense = complete(engine_for(model), a=None)["a"]
    assert complete(engine_for(model), a=full)["a"].logprobs == dense.logprobs
    engine = engine_for(model)
    alone = complete(engine, a=small)["a"]
    cost = predict_decode(
        engine.spec, small, prompt_tokens=len(PROMPT), new_tokens=12, page_tokens=4, unit_tokens=4, itemsize=4
    )
    assert (alone.kv_bytes_read, alone.digest_bytes_read) == (cost.kv_bytes, cost.digest_bytes)
    assert alone.kv_bytes_read < 0.6 * dense.kv_bytes_read and alone.logprobs != dense.logprobs
    together = complete(engine_for(model), a=small, b=None, c=full)
    assert together["a"].token_ids == alone.token_ids
    assert together["b"].token_ids == together["c"].token_ids == dense.token_ids
    assert complete(engine, after=None)["after"].token_ids == dense.token_ids


def test_all_dimensions_give_the_exact_shares_of_full_pages(tmp_path):
    file = tmp_path / "all.npz"
    basis_files.write(file, torch.eye(8).expand(3, 2, 8, 8), {})
    projection = Projection(str(file))
    view = View(1, projection)
    logits = view.dots() * view.traits.scale  # [b, Hkv, g, P, p]
    for b, full in enumerate((8, 5)):
        exact = logits[b, :, :, :full].flatten(2).softmax(-1).unflatten(2, (full, 4)).sum(3).mean(1)
        torch.testing.assert_close(projection.score(view.q, view)[b, :, :full], exact)


def test_bases_find_what_was_planted():
    generator = torch.Generator().manual_seed(0)
    keys = 0.01 * torch.randn(2, 50, 2, 8, generator=generator) + 7.0  # a common part, which says nothing
    direction = torch.nn.functional.normalize(torch.randn(8, generator=generator), dim=0)
    keys[1, :, 1] += torch.randn(50, 1, generator=generator) * direction
    found = calibration.principal_directions(keys, 1)
    assert found.shape == (2, 2, 8, 1)
    assert (found[1, 1, :, 0] @ direction).abs() > 0.999
    queries = torch.ones(2, 50, 4, 8)
    queries[:, :, :2, 3] = 9.0
    queries[:, :, 2:, 5] = 9.0
    channels = calibration.heavy_channels(queries, torch.ones(2, 50, 2, 8), 1)
    assert channels.argmax(2).squeeze(-1).tolist() == [[3, 5]] * 2


def test_recorded_keys_are_those_that_the_engine_writes(model, engine_for):
    engine = engine_for(model)
    engine.submit(PROMPT, SAMPLING)
    engine.step()
    (sequence,) = engine._scheduler.running
    pages = torch.from_numpy(sequence.table.pages(0, 11)).long()
    written = engine._runner.kv[pages][:, :, 0].permute(1, 0, 3, 2, 4).flatten(1, 2)  # [layers, tokens, Hkv, D]
    torch.testing.assert_close(calibration.queries_and_keys(model, [PROMPT])[1][:, :44], written, atol=1e-4, rtol=1e-4)


def test_another_calibration_is_another_provenance(files, tmp_path):
    moved = tmp_path / "moved.npz"
    moved.write_bytes(Path(files["loki"]).read_bytes())
    one, same, other = (make("loki", digest={"file": str(f)}) for f in (files["loki"], moved, files["double_sparsity"]))
    assert one.provenance == same.provenance != other.provenance


@pytest.mark.parametrize("name", CALIBRATED)
def test_what_has_no_fitting_file_is_refused(name, files, model, t_model, engine_for, tmp_path):
    with pytest.raises(ValueError, match=r"digest.file is not set.* none comes with octavo .* of 3 layers"):
        engine_for(model).submit(PROMPT, method=make(name))
    with pytest.raises(ValueError, match=r"is of 3 layers, 2 KV heads and head size 16; LlamaForCausalLM has 2, 2"):
        engine_for(t_model).submit(PROMPT, method=make(name, digest={"file": files[name]}))
    with pytest.raises(ValueError, match="no such calibration file"):
        Projection(str(tmp_path / "absent.npz"))
    with pytest.raises(ValueError, match="rank=17 must be 1 to the head size of 16"):
        calibration.principal_directions(torch.zeros(1, 4, 2, 16), 17)


def test_what_is_kept_is_measured():
    keys = torch.zeros(1, 4, 1, 3)
    keys[0, :, 0, 0], keys[0, :, 0, 2] = torch.tensor([1.0, -1, 1, -1]), torch.tensor([5.0, 5, 3, 3])
    basis = torch.eye(3)[:, :1].expand(1, 1, 3, 1)  # the first channel has half of the variance
    torch.testing.assert_close(calibration.variance_kept(keys, basis), torch.tensor([[0.5]]))
    queries = torch.ones(1, 4, 2, 3)
    torch.testing.assert_close(calibration.products_kept(queries, keys, basis), torch.tensor([[1 / 5]]))


def test_weights_are_known_by_their_values(make_llama):
    model = make_llama(num_hidden_layers=1).bfloat16()
    rounded = calibration.weights_sha256(model)
    assert calibration.weights_sha256(model.float()) == rounded
    with torch.no_grad():
        model.lm_head.weight[3, 3] += 1
    assert calibration.weights_sha256(model) != rounded


def test_a_file_gives_back_what_was_written(tmp_path):
    basis = torch.randn(2, 1, 8, 3).half()
    basis_files.write(tmp_path / "a.npz", basis, {"method": "loki", "rank": 3})
    basis_files.write(tmp_path / "b.npz", basis, {"rank": 3, "method": "loki"})
    data = (tmp_path / "a.npz").read_bytes()
    assert data == (tmp_path / "b.npz").read_bytes()
    found = basis_files.read(data, "a.npz")
    assert torch.equal(found.basis, basis.float()) and found.provenance == {"method": "loki", "rank": 3}
    for damaged in (b"", b"none", data[: len(data) // 2]):
        with pytest.raises(ValueError, match=r"a\.npz is no calibration file, or it is damaged"):
            basis_files.read(damaged, "a.npz")


class TestShipped:
    SPEC = ModelSpec("LlamaForCausalLM", 30, 9, 3, 64, torch.bfloat16, 49152, 8192, (0,) * 30)
    SPECS: ClassVar = {
        "smollm2": SPEC,
        "gemma3": ModelSpec(
            "Gemma3ForCausalLM", 18, 4, 1, 256, torch.bfloat16, 262144, 32768, (512, 512, 512, 512, 512, 0) * 3
        ),
    }

    @pytest.mark.parametrize("model", MODELS)
    @pytest.mark.parametrize("name", CALIBRATED)
    def test_a_method_finds_the_file_of_an_embedded_model(self, name, model):
        made, spec = method(name), self.SPECS[model]
        made.validate(spec, 16)
        assert made.digest.spec(16, spec) == {"reduced": (spec.kv_heads, 16, 16)}
        keys = torch.randn(1, 2, spec.kv_heads, 16, spec.head_dim)
        file = basis_files.SHIPPED / f"{name}-{model}.npz"
        basis = basis_files.read(file.read_bytes(), str(file)).basis
        torch.testing.assert_close(made.digest.compute(keys, keys, [5, 17])["reduced"], keys @ basis[[5, 17]])

    @pytest.mark.parametrize(
        "change", [{"layers": 29}, {"vocab_size": 3}, {"head_dim": 32}, {"name": "Qwen3ForCausalLM"}]
    )
    def test_no_other_model_gets_it(self, change):
        with pytest.raises(ValueError, match=r"digest.file is not set, and this method needs calibration"):
            method("loki").validate(dataclasses.replace(self.SPEC, **change), 16)

    def test_heads_say_whose_file_it_is(self):
        for name in CALIBRATED:
            shapes = [basis_files.read(path.read_bytes(), "").basis.shape[1:3] for path in basis_files.shipped(name)]
            assert len(set(shapes)) == len(shapes) > 0

    def test_bases_are_orthonormal(self):
        for name in CALIBRATED:
            for path in basis_files.shipped(name):
                basis = basis_files.read(path.read_bytes(), "").basis
                torch.testing.assert_close(
                    basis.mT @ basis, torch.eye(basis.shape[3]).expand(*basis.shape[:2], -1, -1), atol=3e-3, rtol=0
                )

    @pytest.mark.slow
    @pytest.mark.parametrize("embedded", MODELS.values(), ids=MODELS)
    @pytest.mark.parametrize("name", CALIBRATED)
    def test_it_is_what_the_model_gives(self, name, embedded):
        """The same texts give the same file, but for rounding; other texts, as of another Python, nearly so."""
        if not embedded.path.is_dir():
            pytest.skip(f"no {embedded.path}; {embedded.command} makes it")
        file = basis_files.SHIPPED / f"{name}-{embedded.name}.npz"
        there = basis_files.read(file.read_bytes(), str(file))
        config = Calibrate(experiment="calibrate", method=name)
        model, tokenizer = load(str(embedded.path), "auto", "cpu")
        texts = calibrate.chosen_texts(config, tokenizer)
        assert calibration.weights_sha256(model) == there.provenance["weights_sha256"]
        queries, keys = calibration.queries_and_keys(model, [ids for _, ids in texts])
        if name == "loki":
            best = calibration.variance_kept(keys, calibration.principal_directions(keys, config.rank))
            kept = calibration.variance_kept(keys, there.basis)
        else:
            best = calibration.products_kept(queries, keys, calibration.heavy_channels(queries, keys, config.rank))
            kept = calibration.products_kept(queries, keys, there.basis)
        same_texts = there.provenance["documents"] == {document.name: document.sha256 for document, _ in texts}
        assert (kept / best).min() > (0.999 if same_texts else 0.95)
