"""What a prompt holds where it is no text, as its encoder names it when the prompt is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from octavo.core.config import EngineConfig
from octavo.core.encoding.item import IDENTITY_BYTES, Item
from octavo.core.errors import closest
from octavo.core.interfaces import SegmentEncoder
from octavo.core.policies import RatioPages

IMAGE = "image"

PAGE_RATIO = 1.5
"""Of an image's page to a text page, where the config says nothing of images."""

PLACEHOLDER_BITS = 30


@dataclass(frozen=True)
class ItemReader:
    """Asks an encoder about what a prompt holds, before anything is allocated.

    ``vocab_size`` is the first id that no text has; ``step_tokens`` the most that one step computes.
    """

    kind: str
    encoder: SegmentEncoder
    vocab_size: int
    step_tokens: int

    def read(self, value: Any) -> Item:
        """The item that ``value`` is. What is encoded later is what ``read`` of the encoder gives now, if it has one.

        Raises:
            ValueError: the encoder cannot read it (its own error, if that is a ValueError), gives it no tokens or no
                32 bytes of identity, or it sees both ways and is larger than a step.
        """
        encoder = self.encoder
        try:
            value = encoder.read(value) if hasattr(encoder, "read") else value
            tokens, identity = encoder.n_tokens(value), encoder.identity(value)
            witness = encoder.witness(value) if hasattr(encoder, "witness") else b""
        except ValueError:
            raise
        except Exception as error:  # whatever an encoder raises, it is this prompt that it cannot read
            raise ValueError(f"the {self.kind} encoder cannot read {self._named(value)}: {error!r}") from error
        if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 1:
            raise ValueError(
                f"the {self.kind} encoder gives {self._named(value)} {tokens!r} tokens; the least is 1, as an integer"
            )
        if not isinstance(identity, bytes) or len(identity) != IDENTITY_BYTES:
            size = f"{len(identity)} bytes" if isinstance(identity, bytes) else type(identity).__name__
            raise ValueError(
                f"the {self.kind} encoder's identity of {self._named(value)} is {size}, not {IDENTITY_BYTES} bytes"
            )
        if encoder.bidirectional and tokens > self.step_tokens:
            raise ValueError(
                f"the {tokens} tokens of {self._named(value)} see one another, so one step computes them all, and "
                f"step_tokens={self.step_tokens}; raise step_tokens to at least {tokens}"
            )
        digits = int.from_bytes(identity, "little") % (1 << PLACEHOLDER_BITS)
        return Item(self.kind, value, identity, witness, tokens, encoder.bidirectional, self.vocab_size + digits)

    def _named(self, value: Any) -> str:
        return f"an item of type {type(value).__name__}"


def image_encoder(encoders: Mapping[str, SegmentEncoder] | None) -> SegmentEncoder | None:
    """The encoder among ``encoders`` by kind, of which there is one at most: of images.

    Raises:
        ValueError: another kind, or something that is no encoder.
    """
    for kind, encoder in (encoders or {}).items():
        if kind != IMAGE:
            raise ValueError(f"encoders: unknown segment kind {kind!r}; {closest(str(kind), [IMAGE])}")
        missing = [name for name in ("identity", "n_tokens", "encode") if not callable(getattr(encoder, name, None))]
        if not isinstance(getattr(encoder, "bidirectional", None), bool):
            missing.append("bidirectional")
        if missing:
            raise ValueError(f"encoders[{kind!r}]={encoder!r:.80} is no SegmentEncoder: it has no {', '.join(missing)}")
    return (encoders or {}).get(IMAGE)


def with_image_pages(config: EngineConfig, encoder: SegmentEncoder | None) -> EngineConfig:
    """The config with a page policy for images, if there will be some: 1.5 text pages, in halves of one; so 24 tokens
    beside 16. Where a text page is odd, it has no halves, and images get two."""
    if encoder is None or IMAGE in config.policies:
        return config
    text = config.text_page_tokens
    pages = RatioPages(PAGE_RATIO, of=text, grain=text if text % 2 else text // 2)
    return replace(config, page_policies={**(config.page_policies or {}), IMAGE: pages})
