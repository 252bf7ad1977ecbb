"""Which lines of a project need another of its files: found by syntax, never by running the code."""

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

MIN_CHARS, MAX_CHARS = 12, 100  # of a gold line, without its indentation

_FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)
_SIMPLE = (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Return, ast.Expr, ast.Raise, ast.Assert, ast.Delete)


@dataclass(frozen=True)
class Candidate:
    """A line to complete: 1-based `line` of `path` uses `name`, which `defined_in` defines at module level."""

    path: str
    line: int
    gold: str
    name: str
    defined_in: str
    definition_line: int
    first_use: bool  # no earlier line of the file uses the name (RepoBench's cross_file_first)

    @property
    def setting(self) -> str:
        if self.defined_in == self.path:
            return "in_file"
        return "cross_file_first" if self.first_use else "cross_file_random"


@dataclass(frozen=True)
class Module:
    path: str
    text: str
    tree: ast.Module
    defines: Mapping[str, int]  # module-level name -> 1-based line, decorators included
    imports: Mapping[str, tuple[str, str]] = field(default_factory=dict)  # local name -> (path, name there)
    depends: tuple[str, ...] = ()  # paths of this project that it imports from, in order of first mention


def parse_project(files: Mapping[str, str]) -> dict[str, Module]:
    """Parses {path: text} of one project. Paths are POSIX and start at the folder of absolute imports."""
    project = {}
    for path, text in files.items():
        tree = ast.parse(text)
        imports, depends = _imports(tree, path, files)
        project[path] = Module(path, text, tree, _definitions(tree), imports, depends)
    return project


def candidates(module: Module, project: Mapping[str, Module]) -> list[Candidate]:
    """Every line of `module` that may be held out, in order.

    Such a line is one whole simple statement inside a function, of 12 to 100 characters and no comment, that reads a
    name which the file imports at module level from another file of the project, which defines it at module level.
    A name that the function rebinds is not the imported one.
    """
    return [c for c in all_candidates(module, project) if c.setting != "in_file"]


def all_candidates(module: Module, project: Mapping[str, Module]) -> list[Candidate]:
    """The same, and lines that read no such name but one that their own file defines at module level. Of several names
    of a line, those of other files come first, then the first in the line."""
    imported = {local: where for local in module.imports if (where := _resolve(project, module.path, local))}
    origins = {name: (module.path, name) for name in module.defines} | imported
    first_uses: dict[str, int] = {}
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Name):
            first_uses[node.id] = min(node.lineno, first_uses.get(node.id, node.lineno))
    lines = module.text.split("\n")  # not splitlines, which also breaks where the parser does not
    found = []
    for function in _outermost_functions(module.tree):
        visible = origins.keys() - _bound(function)
        for statement in ast.walk(function):
            if not isinstance(statement, _SIMPLE) or statement.lineno != statement.end_lineno:
                continue
            line = lines[statement.lineno - 1]
            # Unequal where the line also holds a comment, a second statement or the head of a compound one.
            if line.strip() != line.encode()[statement.col_offset : statement.end_col_offset].decode():
                continue
            reads = {n.id for n in ast.walk(statement) if isinstance(n, ast.Name) and n.id in visible}
            if not reads or not MIN_CHARS <= len(line.strip()) <= MAX_CHARS:
                continue
            place = {name: re.search(rf"\b{name}\b", line).start() for name in reads}
            name = min(reads, key=lambda n, place=place: (origins[n][0] == module.path, place[n]))
            path, original = origins[name]
            found.append(
                Candidate(
                    path=module.path,
                    line=statement.lineno,
                    gold=line.rstrip(),
                    name=original,
                    defined_in=path,
                    definition_line=project[path].defines[original],
                    first_use=first_uses[name] == statement.lineno,
                )
            )
    return sorted(found, key=lambda c: c.line)


def related_files(path: str, first: str, project: Mapping[str, Module]) -> list[str]:
    """Files of the project from most to least relevant to `path`: `first`, then breadth first along the imports."""
    order, queue = [first], [path]
    for current in queue:
        for dependency in project[current].depends:
            if dependency not in queue:
                queue.append(dependency)
    return order + [p for p in queue if p not in (path, first)]


def import_lines(module: Module, before: int) -> list[str]:
    """Module-level import statements that end before 1-based line `before`, one string each, without indentation."""
    statements = (n for n in _module_level(module.tree) if isinstance(n, ast.Import | ast.ImportFrom))
    lines = module.text.split("\n")
    return [_segment(lines, n) for n in statements if (n.end_lineno or n.lineno) < before]


def _segment(lines: list[str], node: ast.stmt) -> str:
    """The source of a statement; ``ast.get_source_segment`` splits the whole file anew each time, a sign at a time."""
    own = [line.encode() for line in lines[node.lineno - 1 : node.end_lineno]]
    own[-1] = own[-1][: node.end_col_offset]
    own[0] = own[0][node.col_offset :]
    return b"\n".join(own).decode()


def _module_level(tree: ast.Module) -> Iterator[ast.stmt]:
    """Statements that run on import outside functions and classes, also under `if` and `try`, in source order."""
    stack: list[ast.stmt] = list(reversed(tree.body))
    while stack:
        statement = stack.pop()
        yield statement
        if isinstance(statement, ast.If | ast.Try):
            handlers = [s for h in getattr(statement, "handlers", []) for s in h.body]
            final = getattr(statement, "finalbody", [])
            stack.extend(reversed([*statement.body, *handlers, *statement.orelse, *final]))


def _definitions(tree: ast.Module) -> dict[str, int]:
    defines: dict[str, int] = {}
    for statement in _module_level(tree):
        if isinstance(statement, (*_FUNCTION, ast.ClassDef)):
            line = min([statement.lineno, *(d.lineno for d in statement.decorator_list)])
            defines.setdefault(statement.name, line)
        elif isinstance(statement, ast.Assign | ast.AnnAssign):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            for target in targets:
                if isinstance(target, ast.Name):
                    defines.setdefault(target.id, statement.lineno)
    return defines


def _imports(
    tree: ast.Module, path: str, files: Mapping[str, str]
) -> tuple[dict[str, tuple[str, str]], tuple[str, ...]]:
    imports: dict[str, tuple[str, str]] = {}
    depends: dict[str, None] = {}
    for statement in _module_level(tree):
        if not isinstance(statement, ast.ImportFrom):
            continue
        parents = path.split("/")[:-1]
        base = parents[: len(parents) - statement.level + 1] if statement.level else []
        target = "/".join([*base, *(statement.module or "").split(".")]).strip("/")
        for alias in statement.names:
            submodule = _module_file(f"{target}/{alias.name}", files)
            where = submodule or _module_file(target, files)
            if where is None or where == path:
                continue
            depends.setdefault(where)
            if submodule is None:
                imports[alias.asname or alias.name] = (where, alias.name)
    return imports, tuple(depends)


def _module_file(dotted: str, files: Mapping[str, str]) -> str | None:
    return next((p for p in (f"{dotted}.py", f"{dotted}/__init__.py") if p in files), None)


def _resolve(project: Mapping[str, Module], path: str, name: str) -> tuple[str, str] | None:
    """(path, name) of the definition behind `name` of `path`, through re-exports; None outside the project."""
    seen = set()
    while name not in project[path].defines:
        if (path, name) in seen or name not in project[path].imports:
            return None
        seen.add((path, name))
        path, name = project[path].imports[name]
    return path, name


def _outermost_functions(node: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, _FUNCTION):
            yield child
        else:
            yield from _outermost_functions(child)


def _bound(function: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    """Names that the function, or one nested in it, binds itself."""
    bound = set()
    for node in ast.walk(function):
        if isinstance(node, ast.arg):
            bound.add(node.arg)
        elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            bound.add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            bound.update((alias.asname or alias.name).split(".")[0] for alias in node.names)
    return bound
