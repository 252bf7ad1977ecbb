from octavo.scripts.tasks.mining import Candidate, candidates, import_lines, parse_project, related_files


def test_only_the_whole_line_that_uses_a_foreign_name_is_chosen(toy_files):
    project = parse_project(toy_files)
    # Not chosen: a rebound name (line 14), a comment (18), the head of a compound (19), a line of several (20-22).
    assert candidates(project["toy/draw.py"], project) == [
        Candidate(
            path="toy/draw.py",
            line=9,
            gold="    box = Box(scale(box))",
            name="Square",  # behind its alias and the package's re-export
            defined_in="toy/shapes.py",
            definition_line=8,
            first_use=True,
        )
    ]


def test_a_second_use_is_not_the_first():
    project = parse_project(
        {
            "p/a.py": "VALUE = 1\n",
            "p/b.py": "from .a import VALUE\n\n\ndef f():\n    one = VALUE + 1\n    two = VALUE + 2\n",
        }
    )
    assert [(c.line, c.first_use) for c in candidates(project["p/b.py"], project)] == [(5, True), (6, False)]


def test_names_of_other_projects_and_of_the_file_itself_are_not_foreign():
    project = parse_project(
        {
            "p/a.py": "from json import dumps\nfrom .b import lost\n",
            "p/b.py": "from .a import dumps, lost\n\n\ndef f():\n    own = f() + 1\n    return dumps(own, lost)\n",
        }
    )
    assert candidates(project["p/b.py"], project) == []


def test_length_bounds_are_12_and_100_characters():
    def chosen(statement):
        files = {"a.py": "V = 1\n", "b.py": f"from a import V\n\n\ndef f():\n    {statement}\n"}
        project = parse_project(files)
        return len(candidates(project["b.py"], project)) == 1

    assert [chosen("x" * n + " = V") for n in (7, 8, 96, 97)] == [False, True, True, False]


def test_decorators_belong_to_the_definition():
    project = parse_project({"a.py": "import functools\n\n\n@functools.cache\ndef f():\n    pass\n"})
    assert project["a.py"].defines == {"f": 4}


def test_imports_under_try_and_if_count():
    text = "try:\n    from .a import one\nexcept ImportError:\n    from .a import two as one\nif one:\n    import os\n"
    project = parse_project({"p/a.py": "", "p/b.py": text})
    assert import_lines(project["p/b.py"], before=7) == [
        "from .a import one",
        "from .a import two as one",
        "import os",
    ]
    assert import_lines(project["p/b.py"], before=4) == ["from .a import one"]
    assert project["p/b.py"].imports["one"] == ("p/a.py", "two")


def test_related_files_start_with_the_definition_and_follow_the_imports(toy_files):
    project = parse_project(toy_files)
    assert related_files("toy/draw.py", "toy/shapes.py", project) == [
        "toy/shapes.py",
        "toy/__init__.py",
        "toy/config.py",
    ]
