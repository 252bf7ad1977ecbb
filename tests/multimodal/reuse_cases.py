"""Images whose KV serves requests that hold them elsewhere: the modes, prompts, and what plain transformers answers."""

import pytest
import torch

from octavo.core import SamplingParams
from octavo.core.serving.prompts import TokenSegment
from octavo.multimodal.reuse import RepairReuse, ZeroCopyReuse

from ..pictures import A, B, FakeEncoder, text

LONG = [text(5), A, text(3, 1), A, B, text(4, 2)]
PROMPTS = [LONG, [A, text(4, 2)], [text(17, 3), B, text(1)], [text(2), A, B, A, text(2, 5)], [text(11, 4)]]
COPY = RepairReuse(tokens=0)
MODES = [ZeroCopyReuse(), COPY, RepairReuse(tokens=4), RepairReuse(tokens=0, pages=1), RepairReuse(tokens=0, share=0.5)]


def name(mode):
    return f"{mode.name}-{mode.head(9, 6)}"


FEW = (MODES[0], MODES[2])
modes = pytest.mark.parametrize(
    "mode", [pytest.param(mode, marks=() if mode in FEW else pytest.mark.slow) for mode in MODES], ids=name
)


def head_of(mode, picture):
    return picture.tokens if mode is None or mode.exact else mode.head(picture.tokens, 6)


@torch.no_grad()
def logits_of(model, prompt, mode, more=()):
    """[T, V] of plain transformers, and the rows that are text.

    An image that is reused stands there with its head twice: as it is when it is computed alone, which only the rest
    of the image sees, and as it is in its place, which everybody else sees.
    """
    embed, encoder = model.get_input_embeddings(), FakeEncoder()
    rows, facts, at = [], [], 0  # of each row: position, image (0: text), "place", "alone" or "rest"
    for number, part in enumerate([*prompt, TokenSegment("text", list(more))]):
        if isinstance(part, TokenSegment):
            rows.append(embed(torch.tensor(part.token_ids).long()))
            facts += [(at + i, 0, "place") for i in range(len(part.token_ids))]
            at += len(part.token_ids)
            continue
        head, image = head_of(mode, part), encoder.rows(part)
        if head < part.tokens:
            rows.append(image[:head])
            facts += [(at + i, number + 1, "alone") for i in range(head)]
        rows.append(image)
        facts += [(at + i, number + 1, "place" if i < head else "rest") for i in range(part.tokens)]
        at += part.tokens
    seen = torch.tensor(
        [
            [
                there[0] <= here[0]
                and (there[2] != "alone" if here[2] == "place" else there[1] == here[1] and there[2] != "place")
                for there in facts
            ]
            for here in facts
        ]
    )
    mask = torch.zeros(seen.shape).masked_fill(~seen, -torch.inf)[None, None]
    positions = torch.tensor([[fact[0] for fact in facts]])
    logits = model(
        inputs_embeds=torch.cat(rows)[None], attention_mask=mask, position_ids=positions, use_cache=False
    ).logits[0]
    return logits, [fact[0] for fact in facts if fact[1] == 0], [i for i, fact in enumerate(facts) if fact[1] == 0]


def params(tokens=5, **more):
    return SamplingParams(max_tokens=tokens, ignore_eos=True, **more)


def answers(engine, drain, prompts, reuse=None, **more):
    names = [engine.submit(prompt, params(**more), reuse=reuse) for prompt in prompts]
    drained = drain(engine)
    return [drained.tokens_of(name) for name in names]
