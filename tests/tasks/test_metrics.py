import pytest

from octavo.scripts.tasks.metrics import (
    edit_similarity,
    exact_match,
    first_code_line,
    first_plain_line,
    first_statement,
    identifiers,
    metric_versions,
    remove_comments,
    score_line,
    score_similarity,
    score_statement,
)


@pytest.mark.parametrize(
    ("prediction", "gold", "points"),
    [
        ("x = 1", "x = 1", 100),
        ("  x   =  1 ", "x = 1", 100),
        ("x=1", "x = 1", 0),
        ("", "x", 0),
    ],
)
def test_exact_match_splits_at_white_space(prediction, gold, points):
    assert exact_match(prediction, gold) == points


@pytest.mark.parametrize(
    ("prediction", "gold", "points"),
    [
        ("abcd", "abcd", 100),
        ("abcd", "abxd", 100 * 2 * 3 / 8),  # LCS abd
        ("return a", "return b", 100 * 2 * 7 / 16),
        ("kitten", "sitting", 100 * 2 * 4 / 13),  # LCS ittn
        ("abc", "abcdef", 100 * 2 * 3 / 9),
        ("  a", "a", 100 * 2 * 1 / 4),  # white space counts
        ("", "abc", 0),
        ("", "", 100),
    ],
)
def test_edit_similarity_is_2_lcs_over_both_lengths(prediction, gold, points):
    assert edit_similarity(prediction, gold) == pytest.approx(points)


def test_the_backend_is_recorded():
    assert metric_versions()["edit_similarity"].startswith("rapidfuzz ")


@pytest.mark.parametrize(
    ("output", "line"),
    [
        ("x = 1\ny = 2", "x = 1"),
        ("\n\n    x = 1\n", "    x = 1"),
        ("# why\n  # more\n  x = 1 # here", "  x = 1 # here"),
        ('"""\nwords\n"""\nx = 1', "x = 1"),
        ("'''words\nmore'''\nx = 1", "x = 1"),
        ('"""closed at once"""\nx = 1\n"""\ny = 2', "y = 2"),  # the published rule misses the closing mark
        ("# only\n# comments", "# only"),
        ("", ""),
    ],
)
def test_first_code_line_in_python(output, line):
    assert first_code_line(output) == line


@pytest.mark.parametrize(
    ("output", "line"),
    [("// why\n  int x;", "  int x;"), ("/* a\n b */\nint x;", "int x;"), ("# no comment here", "# no comment here")],
)
def test_first_code_line_in_java(output, line):
    assert first_code_line(output, "java") == line


def test_a_language_without_a_rule_is_named():
    with pytest.raises(ValueError, match=r"no comment rule for 'cobol'; known: .*'java', 'python'"):
        first_code_line("x", "cobol")
    with pytest.raises(ValueError, match="no keyword list for 'cobol'"):
        score_statement("", "x", "x", "cobol")


@pytest.mark.parametrize(
    ("output", "line"),
    [
        ("\n\nx = 1\ny", "x = 1"),
        ("```python\n# c\n// d\n  x = 1", "  x = 1"),
        ("x = 1  # c\ny = 2", "y = 2"),
        ("# c\n\nx = 1", ""),  # a blank line has none of the marks
        ("# c", ""),
    ],
)
def test_first_plain_line(output, line):
    assert first_plain_line(output) == line


def test_score_similarity_takes_the_best_answer():
    assert score_similarity("# c\nabcd\nefgh", ["zzzz", "abxd"]) == {"edit_similarity": 75}


@pytest.mark.parametrize(
    ("prompt", "output", "statement"),
    [
        ("x = ", "f(1)\ny = 2", "f(1)"),
        ("x = f(1,\n", "    2)\ny = 2", "    2)"),  # the prompt's bracket is open
        ("x = ", "f(1,\n  2)\ny = 2", "f(1,\n  2)"),
        ("x = ", "'''a\nb'''\ny", "'''a\nb'''"),
        ("x = ", "1 + \\\n  2\ny", "1 + \\\n  2"),
        ("x = 1\n", "\n# c\ny = 2\nz", "\n# c\ny = 2"),
        ("x = 1\n", "y = f(  # never closed\nz", "y = f(  # never closed"),
        ("x = ", "'broken\ny", "'broken"),
        ("x = ", "f(1)", "f(1)"),
    ],
)
def test_first_statement_in_python(prompt, output, statement):
    assert first_statement(prompt, output, "python") == statement


@pytest.mark.parametrize(
    ("output", "statement"), [("f(1);\ng();", "f(1);"), ("f() {\n x;", "f() {"), ("f(1)\n", "f(1)\n")]
)
def test_first_statement_in_languages_with_brackets(output, statement):
    assert first_statement("int x = ", output, "java") == statement


def test_identifiers_are_words_without_strings_and_keywords():
    code = 'return self.f_1(True, None, "a \\" b", \'c\', 2, x2)'
    assert identifiers(code, "python") == ["self", "f_1", "True", "x2"]
    assert identifiers("final var list = new List();", "java") == ["list", "List"]


def test_comments_go_even_inside_strings():
    assert remove_comments("a  # b\nc // d\n'#e'") == "a  \nc \n'"


def test_score_line_of_repobench():
    assert score_line("# c\n  ab = cd\nrest", "  ab = cd") == {"exact_match": 100, "edit_similarity": 100}
    # Indentation: no matter to the match, one character in 2 * 7 / (8 + 7) to the similarity.
    assert score_line("  a = bc", " a = bc") == {"exact_match": 100, "edit_similarity": pytest.approx(1400 / 15)}


def test_score_statement_of_crosscodeeval():
    assert score_statement("x = ", "f(a, b)  # why\ny", "f(a, b)", "python") == {
        "exact_match": 100,
        "edit_similarity": 100,
        "identifier_exact_match": 100,
        "identifier_f1": 100,
    }
    # f, a shared of {f, a, a2} and {f, b, a}; one letter of 8 and 7 is off.
    assert score_statement("x = ", "f(a, a2)\n", "f(b, a)", "python") == {
        "exact_match": 0,
        "edit_similarity": pytest.approx(100 * 2 * 6 / 15),
        "identifier_exact_match": 0,
        "identifier_f1": pytest.approx(100 * 2 * 2 / 6),
    }
    # The published F1 of two empty sets is 0.
    assert score_statement("x = ", "1\n", "1", "python")["identifier_f1"] == 0
