"""Whether a request may reuse images as it asks to, and what that makes of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from octavo.core.encoding.pieces import reused
from octavo.core.interfaces import PagePolicy, SegmentReuse
from octavo.core.memory.page_layout import PageLayout, Segment
from octavo.core.step_plan import Chunk

if TYPE_CHECKING:
    from octavo.core.engine import Engine
    from octavo.core.sequence import Sequence as TokenSequence


def extended(
    engine: Engine, layout: PageLayout, tokens: int, segments: list[Segment], reuse: SegmentReuse | None
) -> PageLayout:
    """The layout of a sequence of ``tokens`` tokens that gets more segments, with images reused as is said, or else as
    the engine does."""
    if reuse is not None:
        validate_reuse(reuse, engine)
    return layout.extended(tokens, _reused(segments, reuse or engine._reuse, engine.config.policies))


def _reused(segments: list[Segment], reuse: SegmentReuse | None, policies: Mapping[str, PagePolicy]) -> list[Segment]:
    """The segments of a prompt, with items that know how they are reused; those computed whole are as without."""
    if reuse is None or (reuse.exact and reuse.finds):
        return segments
    found = []
    for segment in segments:
        item = segment.item
        if item is not None and reuse.exact:
            item = replace(item, findable=False)
        elif item is not None:
            head = reuse.head(item.tokens, policies[segment.kind].page_tokens(item.tokens))
            if head < item.tokens:
                item = replace(item, reuse=reuse, anew=((0, head),) if head else ())
        found.append(replace(segment, item=item))
    return found


def validate_reuse(reuse: SegmentReuse | None, engine: Engine) -> None:
    """Refuse, with a ValueError, what is no way of reusing images, or one that this engine cannot have.

    The first that is not exact asks the model how its keys turn (``find_rotary``)."""
    if reuse is None:
        return
    if not callable(getattr(reuse, "head", None)):
        raise ValueError(f"reuse={reuse!r:.80} is no SegmentReuse; octavo.multimodal.reuse has those that there are")
    if reuse.exact:
        return
    if not engine.config.prefix_cache:
        raise ValueError(f"reuse={reuse.name!r} finds images in the prefix cache; give prefix_cache=True")
    if any(group.window for group in engine._plan.groups):
        raise ValueError(
            f"reuse={reuse.name!r} needs every page of an image in every layer, and {engine.spec.name} lets go of "
            "those behind a sliding window; give layer_groups=False"
        )
    if reuse.layer is not None and not 0 < reuse.layer < engine.spec.layers - 1:
        raise ValueError(
            f"reuse={reuse.name!r} compares KV in layer {reuse.layer}; of the {engine.spec.layers} layers of "
            f"{engine.spec.name} those from 1 to {engine.spec.layers - 2} say something and leave some to be spared"
        )
    engine._runner.learn_rotary()


def validate_reused(layout: PageLayout, prompt: int) -> None:
    """Refuse a prompt that the reuse of its images leaves without a last token, or that would cut what sees itself."""
    for span in reused(layout):
        reuse = span.item.reuse
        assert reuse is not None
        name = reuse.name
        if span.end == prompt:
            raise ValueError(
                f"the prompt ends with an image, whose last token is not computed under reuse={name!r}, and so nothing "
                "says what comes next; let text follow it that is at least one token"
            )
        if span.item.bidirectional and (span.item.anew or reuse.layer is not None):
            raise ValueError(
                f"reuse={name!r} computes some tokens of an image again, and tokens of this one see one another; use "
                "'zero_copy', or none of its tokens"
            )


def compare_images(engine: Engine, sequences: Sequence[TokenSequence]) -> None:
    """Let some sequences find out which tokens of their images are to be computed; who was preempted or ended in the
    meantime does so another time, or never. Precondition: the copies of their images are queued."""
    for sequence in sequences:
        if sequence not in engine._scheduler.running:
            continue
        start, end = sequence.computed, reused(sequence.layout)[-1].end
        chunk = Chunk(sequence, start, end - start)
        for request, error in engine._items.encode([chunk]):
            engine._abort(request, error)
        if sequence.finish_reason is not None or not engine._items.ready(chunk):  # the next step asks again
            continue
        unknown = {span.start for span in reused(sequence.layout, start) if not span.item.anew}
        engine._runner.compare(sequence, engine._scheduler)
        known = [span.item for span in reused(sequence.layout, start) if span.start in unknown]
        computed = sum(item.tokens - item.spared for item in known)  # admission counted them as found
        engine._scheduler.hit_tokens -= computed
        sequence.request.cached_tokens = (sequence.request.cached_tokens or 0) - computed
