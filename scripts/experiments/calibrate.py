"""Learn the few dimensions of a model's keys that a calibrated method reads, and write them to a file."""

from __future__ import annotations

import hashlib
import platform
from typing import TYPE_CHECKING, Any

from octavo.scripts import build, quality_plots, report
from octavo.scripts.progress import waiting
from octavo.scripts.refusal import ConfigError
from octavo.scripts.run import Run, Sample
from octavo.scripts.schema import Calibrate
from octavo.scripts.tasks import documents
from octavo.scripts.tasks.documents import Document

if TYPE_CHECKING:
    from torch import Tensor, nn

KEPT = {
    "loki": "kept: share of the keys' variance that lies in the basis, here on the texts that it was learnt from.",
    "double_sparsity": "kept: share of the mean |q k| that lies in the chosen channels, on the texts they come from.",
}


def run(config: Calibrate, run: Run) -> None:
    """The file, one sample a layer, and one row. An interrupted calibration begins anew."""
    from octavo.sparse import basis_files

    with waiting(f"loading {config.model.path}"):
        model, tokenizer = build.load_model(config.model)
    texts = chosen_texts(config, tokenizer)
    with waiting(f"reading {sum(len(ids) for _, ids in texts)} tokens"):
        basis, kept = learn(config, model, [ids for _, ids in texts])
    file = run.folder / f"{config.method}.npz"
    basis_files.write(file, basis, provenance(config, model, texts))

    done = run.done("item")
    percent = (100 * kept.mean(1)).tolist()
    for layer, value in enumerate(percent):
        if (layer,) not in done:
            run.add({"item": layer, "method": config.method, "kept_percent": value})
    row = {
        "name": "octavo",
        "method": config.method,
        "rank": config.rank,
        "tokens": sum(len(ids) for _, ids in texts),
        "kept_percent": sum(percent) / len(percent),
        "kept_percent_min": min(percent),
        "file_bytes": file.stat().st_size,
        "sha256": hashlib.sha256(file.read_bytes()).hexdigest(),
    }
    notes = [KEPT[config.method], f"Use it: sparse.overrides.{config.method}.digest.file={file}"]
    report.publish(run, config, [row], plots={"kept": quality_plots.kept_by_layer(percent)}, notes=notes)


def chosen_texts(config: Calibrate, tokenizer: Any) -> list[tuple[Document, list[int]]]:
    """The beginnings of documents of Python's own, each of ``text_tokens`` tokens, ``tokens`` together.

    Raises:
        ConfigError: there are not so many documents.
    """
    wanted = max(1, config.tokens // config.text_tokens)
    found: list[tuple[Document, list[int]]] = []
    for document in documents.of_python(config.seed):
        if len(found) == wanted:
            break
        # Encoding whole documents would take long; one with over 16 characters a token is passed over.
        ids = tokenizer.encode(document.text[: 16 * config.text_tokens])[: config.text_tokens]
        if len(ids) == config.text_tokens:
            found.append((document, ids))
    if len(found) < wanted:
        raise ConfigError(
            f"tokens={config.tokens}: only {len(found)} documents have text_tokens={config.text_tokens} tokens, which "
            f"makes {len(found) * config.text_tokens}; ask for fewer tokens, or longer texts"
        )
    return found[: config.limit]


def learn(config: Calibrate, model: nn.Module, texts: list[list[int]]) -> tuple[Tensor, Tensor]:
    """The basis [layers, Hkv, D, rank], and the share of what matters to the method that it keeps, [layers, Hkv].

    Raises:
        ConfigError: a model that cannot be calibrated, or not with this rank or these texts.
    """
    from octavo.sparse import calibration

    try:
        queries, keys = calibration.queries_and_keys(model, texts)
        if config.method == "loki":
            basis = calibration.principal_directions(keys, config.rank)
            return basis, calibration.variance_kept(keys, basis)
        basis = calibration.heavy_channels(queries, keys, config.rank)
        return basis, calibration.products_kept(queries, keys, basis)
    except ValueError as error:
        raise ConfigError(f"{config.method}: {error}") from error


def provenance(config: Calibrate, model: nn.Module, texts: list[tuple[Document, list[int]]]) -> Sample:
    """All that makes the file: equal provenance on equal hardware is an equal file."""
    from octavo.core.hf_model import HFModel
    from octavo.sparse import basis_files, calibration

    return {
        "method": config.method,
        "rank": config.rank,
        "model": basis_files.model_identity(HFModel(model).spec),
        "weights_sha256": calibration.weights_sha256(model),
        "tokens": sum(len(ids) for _, ids in texts),
        "text_tokens": config.text_tokens,
        "seed": config.seed,
        "python": platform.python_version(),
        "documents": {document.name: document.sha256 for document, _ in texts},
    }
