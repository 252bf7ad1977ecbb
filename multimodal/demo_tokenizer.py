"""The demo model's tokenizer: a word is a token."""

from __future__ import annotations

from typing import Any

from octavo.multimodal.scenes_prompts import words

PAD, BOS, EOS, UNKNOWN, IMAGE = "<pad>", "<s>", "</s>", "<unk>", "<image>"
SPECIAL = (PAD, BOS, EOS, UNKNOWN, IMAGE)
VOCABULARY = {word: number for number, word in enumerate((*SPECIAL, *words()))}

IGNORED = -100
"""The label of a token that is not learnt."""


def token_ids(text: str) -> list[int]:
    """Ids of words with spaces between them, without ``BOS``: what the tokenizer gives, but faster. All must be
    known."""
    return [VOCABULARY[word] for word in text.split()]


def build_tokenizer() -> Any:
    """A ``PreTrainedTokenizerFast``: lower case, split at spaces and punctuation, ``BOS`` in front; any other word is
    ``UNKNOWN``."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel(VOCABULARY, unk_token=UNKNOWN))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, VOCABULARY[BOS])]
    )
    tokenizer.add_special_tokens(list(SPECIAL))
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        unk_token=UNKNOWN,
        clean_up_tokenization_spaces=False,
    )
