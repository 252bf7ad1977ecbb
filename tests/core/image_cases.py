"""Prompts with images, and what plain transformers makes of them with ``inputs_embeds``."""

import torch

from octavo.core import SamplingParams
from octavo.core.serving.prompts import TokenSegment

from ..pictures import A, B, C, FakeEncoder, Picture, text

LONG = [text(5), A, text(3, 1), A, B]
PROMPTS = [LONG, [A, text(4, 2)], [text(17, 3), C], [C, C], [text(11, 4)]]


def length(prompt):
    return sum(part.tokens if isinstance(part, Picture) else len(part.token_ids) for part in prompt)


def spans(prompt):
    start, found = 0, []
    for part in prompt:
        size = length([part])
        if isinstance(part, Picture):
            found.append((start, start + size))
        start += size
    return found


def masks(model, tokens, spans):
    """What transformers takes instead of its own masks: by kind of layer where there are two kinds."""
    at = torch.arange(tokens)
    distance = at[:, None] - at[None, :]
    together = torch.zeros(tokens, tokens, dtype=torch.bool)
    for start, end in spans:
        together[start:end, start:end] = True

    def additive(seen):
        return torch.zeros(1, 1, tokens, tokens).masked_fill(~(seen | together), -torch.inf)

    full = additive(distance >= 0)
    window = getattr(model.config, "sliding_window", None)
    if not window:
        return full
    return {"full_attention": full, "sliding_attention": additive((distance >= 0) & (distance < window))}


@torch.no_grad()
def logits_of(model, prompt, bidirectional=False, more=()):
    """[T, V] of plain transformers, for a prompt and ``more`` token ids."""
    embed, encoder = model.get_input_embeddings(), FakeEncoder()
    parts = [*prompt, TokenSegment("text", list(more))]
    rows = [encoder.rows(p) if isinstance(p, Picture) else embed(torch.tensor(p.token_ids).long()) for p in parts]
    embeds = torch.cat(rows)[None]
    mask = masks(model, embeds.shape[1], spans(prompt) if bidirectional else [])
    return model(inputs_embeds=embeds, attention_mask=mask, use_cache=False).logits[0]


def params(tokens=6, **more):
    return SamplingParams(max_tokens=tokens, ignore_eos=True, **more)


def answers(engine, drain, prompts, **more):
    names = [engine.submit(prompt, params(**more)) for prompt in prompts]
    drained = drain(engine)
    return [drained.tokens_of(name) for name in names]
