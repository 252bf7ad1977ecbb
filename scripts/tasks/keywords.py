"""Words that CrossCodeEval does not count as identifiers. True and False count, as there."""

import keyword

_WORDS = {
    "java": """
        abstract assert boolean break byte case catch char class const continue default do double else enum extends
        final finally float for goto if implements import instanceof int interface long native new package private
        protected public return short static strictfp super switch synchronized this throw throws transient try var
        void volatile while""",
    "csharp": """
        abstract as base bool break byte case catch char checked class const continue decimal default delegate do
        double else enum event explicit extern finally fixed float for foreach goto if implicit in int interface
        internal is lock long namespace new null object operator out override params private protected public readonly
        ref return sbyte sealed short sizeof stackalloc static string struct switch this throw try typeof uint ulong
        unchecked unsafe ushort using virtual void volatile while""",
    "typescript": """
        break case catch class const continue debugger default delete do else enum export extends finally for function
        if implements import in instanceof interface let new package private protected public return static super
        switch this throw try typeof var void while with yield""",
}
KEYWORDS = {
    "python": frozenset(keyword.kwlist) - {"True", "False"},
    **{language: frozenset(words.split()) for language, words in _WORDS.items()},
}
