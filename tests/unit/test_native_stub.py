"""The type stub of the extension names exactly what the extension has."""

from __future__ import annotations

import ast
from pathlib import Path

import shared
from shared import _native

STUB = ast.parse(Path(shared.__file__).with_name("_native.pyi").read_text())
ONLY_FOR_TYPES = {"DlpackCapsule"}


def public(names: set[str]) -> set[str]:
    return {name for name in names if not name.startswith("_")}


def declared(body: list[ast.stmt]) -> set[str]:
    names = set()
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
    return names


def test_the_stub_names_what_the_module_has() -> None:
    assert public(declared(STUB.body)) - ONLY_FOR_TYPES == public(set(dir(_native)))


def test_the_stub_names_what_the_classes_have() -> None:
    classes = [node for node in STUB.body if isinstance(node, ast.ClassDef)]
    for node in classes:
        if node.name not in ONLY_FOR_TYPES:
            assert public(declared(node.body)) == public(set(dir(getattr(_native, node.name)))), node.name
