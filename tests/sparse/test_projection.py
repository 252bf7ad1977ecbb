"""Loki and Double Sparsity: methods that need a calibration file, and the calibration."""

from pathlib import Path

import pytest
import torch

from octavo.core import SamplingParams
from octavo.core.costs import predict_decode
from octavo.sparse import calibration
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
    calibration.save(folder / "loki.npy", calibration.principal_directions(keys, 4))
    calibration.save(folder / "double_sparsity.npy", calibration.heavy_channels(queries, keys, 4))
    return {name: str(folder / f"{name}.npy") for name in CALIBRATED}


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
    file = tmp_path / "all.npy"
    calibration.save(file, torch.eye(8).expand(3, 2, 8, 8))
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
    moved = tmp_path / "moved.npy"
    moved.write_bytes(Path(files["loki"]).read_bytes())
    one, same, other = (make("loki", digest={"file": str(f)}) for f in (files["loki"], moved, files["double_sparsity"]))
    assert one.provenance == same.provenance != other.provenance


@pytest.mark.parametrize("name", CALIBRATED)
def test_what_has_no_fitting_file_is_refused(name, files, model, t_model, engine_for, tmp_path):
    with pytest.raises(ValueError, match=r"digest.file is not set, and this method needs calibration"):
        engine_for(model).submit(PROMPT, method=make(name))
    with pytest.raises(ValueError, match=r"is of 3 layers, 2 KV heads and head size 16; LlamaForCausalLM has 2, 2"):
        engine_for(t_model).submit(PROMPT, method=make(name, digest={"file": files[name]}))
    with pytest.raises(ValueError, match="no such calibration file"):
        Projection(str(tmp_path / "absent.npy"))
    with pytest.raises(ValueError, match="rank=17 must be 1 to the head size of 16"):
        calibration.principal_directions(torch.zeros(1, 4, 2, 16), 17)
