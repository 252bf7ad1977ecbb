"""Page policies: how many tokens a page of a segment holds."""

from dataclasses import dataclass


@dataclass(frozen=True)
class FixedPages:
    """The same page for every segment, whatever its length."""

    tokens: int

    @property
    def grain(self) -> int:
        return self.tokens

    def page_tokens(self, segment_tokens: int | None) -> int:
        return self.tokens
