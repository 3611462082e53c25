"""Habits of the code base that no linter knows: read from the source, nothing is imported."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MODULES = sorted((ROOT / "fourfold").rglob("*.py"))


def each(paths: list[Path]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("path", paths, ids=lambda path: str(path.relative_to(ROOT)))


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def imported_names(node: ast.AST) -> list[str]:
    """`from a import b` counts as a.b, since b may be a module; a relative import counts as one of fourfold."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        package = "fourfold" if node.level else node.module
        return [f"{package}.{alias.name}" for alias in node.names]
    return []


def imports_inside_functions(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            for node in ast.walk(function):
                for name in imported_names(node):
                    yield node.lineno, name


def is_within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


@each([path for path in MODULES if path.name == "__init__.py"])
def test_init_files_hold_a_docstring_alone(path: Path) -> None:
    tree = parse(path)
    assert ast.get_docstring(tree), "an __init__.py says what its folder is for"
    rest = tree.body[1:]
    if path.parent == ROOT / "fourfold":
        rest = [node for node in rest if not ast.unparse(node).startswith("__version__ = ")]
    assert not rest, f"line {rest[0].lineno}: code belongs in a module, not in __init__.py"


@each(MODULES)
def test_imports_of_fourfold_stand_at_the_top_of_the_file(path: Path) -> None:
    lazy = [
        f"line {line}: {name}" for line, name in imports_inside_functions(parse(path)) if is_within(name, "fourfold")
    ]
    assert not lazy, f"import at the top, or move the code to a layer that may: {lazy}"


@each(MODULES)
def test_type_checking_hides_no_imports(path: Path) -> None:
    assert "TYPE_CHECKING" not in path.read_text(encoding="utf-8")


# import-linter knows other packages by their first name only, so this one cannot be a contract.
@each([path for path in MODULES if path.is_relative_to(ROOT / "fourfold" / "model")])
def test_the_model_does_not_know_that_other_processes_exist(path: Path) -> None:
    tree = parse(path)
    used = [name for node in ast.walk(tree) for name in imported_names(node) if is_within(name, "torch.distributed")]
    used += [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    used = [name for name in used if is_within(name, "torch.distributed")]
    assert not used, f"torch.distributed is applied from outside, in fourfold/parallelize: {used}"
