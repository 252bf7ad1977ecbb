"""Documents that are on any machine with Python."""

from __future__ import annotations

import hashlib

import pytest

from octavo.scripts.schema_quality import DOCUMENT_KINDS
from octavo.scripts.tasks import documents


class Bytes:
    def encode(self, text: str, add_special_tokens: bool, verbose: bool) -> list[int]:
        assert not add_special_tokens and not verbose
        return list(text.encode())


@pytest.mark.parametrize("kind", DOCUMENT_KINDS)
def test_kinds_have_long_documents(kind: str) -> None:
    found = documents.shuffled(kind, 0)
    assert len(found) >= 5 and len({document.name for document in found}) == len(found)
    assert all(len(document.text) >= documents.LEAST_CHARACTERS for document in found)
    assert all(document.source and document.licence for document in found)
    assert found[0].sha256 == hashlib.sha256(found[0].text.encode()).hexdigest()
    assert found == documents.shuffled(kind, 0) != documents.shuffled(kind, 1)


def test_sources_and_prose_are_told_apart() -> None:
    code, prose = ({document.name for document in documents.shuffled(kind, 0)} for kind in DOCUMENT_KINDS)
    assert "argparse.py" in code and "specialnames" in prose and not code & prose
    assert {document.name for document in documents.of_python(0)} >= code | {"specialnames"}


def test_only_long_enough_ones_are_taken() -> None:
    found = documents.long_enough("code", 0, Bytes(), 50_000, 3)
    assert len(found) == 3 and all(len(ids) >= 50_000 for _, ids in found)
    assert len(documents.long_enough("code", 0, Bytes(), 50_000, 10_000)) < 10_000
    with pytest.raises(ValueError, match=r"no document of the kind 'code' has 100000000 tokens; the longest has \d+"):
        documents.long_enough("code", 0, Bytes(), 100_000_000, 3)
