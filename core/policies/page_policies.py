"""Page policies by the names that a config gives."""

from octavo.core.policies.page_divisors import DivisorPages, RowPages, WholePages
from octavo.core.policies.page_size import FixedPages, RatioPages
from octavo.core.policies.page_sqrt import QuotedPages, SqrtPages

PAGE_POLICIES = {
    "fixed": FixedPages,
    "ratio": RatioPages,
    "divisor": DivisorPages,
    "rows": RowPages,
    "whole": WholePages,
    "sqrt": SqrtPages,
    "quoted": QuotedPages,
}
"""Name -> class. ``octavo.core.interfaces.PagePolicy`` is what they have in common."""
