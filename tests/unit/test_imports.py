"""Who may import whom: `loaderd → shared ← inferd`, and decisions know no sockets, clocks or torch.

Imports are read from the source, so that lazy ones inside functions count.  Those under
`if TYPE_CHECKING:` count for the direction and not for purity: nothing is imported at run time.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]

MAY_IMPORT = {
    "loaderd": {"loaderd", "shared"},
    "inferd": {"inferd", "shared"},
    "shared": {"shared"},
}
"""What each package may import of the project."""

PURE = (
    "inferd.api.admission",
    "inferd.api.errors",
    "inferd.api.sampling",
    "inferd.api.schemas",
    "inferd.api.settings",
    "inferd.engine.blocks",
    "inferd.engine.detokenize",
    "inferd.engine.protocol",
    "inferd.engine.scheduler",
    "inferd.slot_states",
    "loaderd.authorisation",
    "loaderd.checkpoint.header",
    "loaderd.checkpoint.index",
    "loaderd.checkpoint.names",
    "loaderd.checkpoint.strict_json",
    "loaderd.compatibility",
    "loaderd.ctl.exit_codes",
    "loaderd.gpu_reading",
    "loaderd.lifecycle",
    "loaderd.placement",
    "loaderd.plan",
    "loaderd.proof",
    "loaderd.read_schedule",
    "loaderd.remedy",
    "loaderd.residents",
    "loaderd.rollout",
    "loaderd.seal.document",
    "loaderd.seal.leaves",
    "loaderd.signature.bundle",
    "loaderd.signature.statement",
    "loaderd.slab_table",
    "loaderd.throttle",
    "shared.asset_bundle",
    "shared.codec",
    "shared.control",
    "shared.digest",
    "shared.errors",
    "shared.handoff",
    "shared.ids",
    "shared.layout",
    "shared.layout_table",
    "shared.life",
    "shared.memory.backend",
    "shared.memory.dtypes",
    "shared.memory.pool",
    "shared.memory.ranges",
    "shared.memory.usage",
    "shared.messages",
    "shared.packed_format",
    "shared.progress",
    "shared.tensor_size",
    "shared.verdict",
)
"""The modules that decide.  A new decision is added here when it lands."""

IMPURE = frozenset(
    {
        *("asyncio", "concurrent", "contextvars", "multiprocessing", "queue", "threading", "uvloop", "anyio"),
        *(
            "os",
            "io",
            "fcntl",
            "mmap",
            "resource",
            "shutil",
            "signal",
            "subprocess",
            "sys",
            "tempfile",
            "ctypes",
        ),
        *("socket", "select", "selectors", "ssl", "http", "urllib", "zmq", "httpx", "starlette", "uvicorn"),
        *("time", "datetime", "random", "secrets", "uuid"),
        *("torch", "transformers", "numpy", "safetensors"),
        *("logging", "structlog", "prometheus_client"),
    }
)
"""Libraries that act, wait, look at a clock or hold tensors."""


@dataclass(frozen=True, slots=True)
class Import:
    """`importer` imports `name` (a module, or something inside one)."""

    importer: str
    line: int
    name: str
    is_for_types: bool


# --- reading the source --------------------------------------------------------------------------


def _sources(root: Path) -> dict[str, Path]:
    """Every module of the three packages, by dotted name; a package is its `__init__`."""
    found = {}
    for package in MAY_IMPORT:
        for path in sorted((root / package).rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def _imports(module: str, path: Path) -> Iterator[Import]:
    """All imports of a module, nested ones included."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    pending: list[tuple[ast.AST, bool]] = [(ast.parse(path.read_text(), str(path)), False)]
    while pending:
        node, is_for_types = pending.pop()
        for name in _imported_names(node, package):
            yield Import(module, getattr(node, "lineno", 0), name, is_for_types)
        if isinstance(node, ast.If) and _is_type_checking(node.test):
            pending += [(child, True) for child in node.body]
            pending += [(child, is_for_types) for child in node.orelse]
        else:
            pending += [(child, is_for_types) for child in ast.iter_child_nodes(node)]


def _imported_names(node: ast.AST, package: str) -> list[str]:
    match node:
        case ast.Import(names=names):
            return [alias.name for alias in names]
        case ast.ImportFrom(module=module, names=names, level=level):
            parts = package.split(".")[: len(package.split(".")) - level + 1] if level else []
            origin = ".".join([*parts, *([module] if module else [])])
            return [f"{origin}.{alias.name}" for alias in names]
        case ast.Call(
            func=ast.Name(id="__import__" | "import_module") | ast.Attribute(attr="import_module"),
            args=[ast.Constant(value=str(name)), *_],
        ):
            return [name]
        case _:
            return []


def _is_type_checking(test: ast.expr) -> bool:
    match test:
        case ast.Name(id="TYPE_CHECKING") | ast.Attribute(attr="TYPE_CHECKING"):
            return True
        case _:
            return False


def _module_of(name: str, sources: dict[str, Path]) -> str | None:
    """The project's module that importing `name` loads, e.g. `shared.ids` for `shared.ids.Digest`."""
    while name:
        if name in sources:
            return name
        name = name.rpartition(".")[0]
    return None


# --- the rules -----------------------------------------------------------------------------------


def wrong_directions(root: Path) -> list[str]:
    """Imports across the daemons, or from `shared` into a daemon."""
    faults = []
    for module, path in _sources(root).items():
        allowed = MAY_IMPORT[module.partition(".")[0]]
        for each in _imports(module, path):
            target = each.name.partition(".")[0]
            if target in MAY_IMPORT and target not in allowed:
                faults.append(f"{module}:{each.line} imports {each.name}")
    return sorted(faults)


def impurities(root: Path, pure: tuple[str, ...]) -> list[str]:
    """Pure modules (and the packages around them) that load something impure, or a module that is
    not known to be pure; pure modules that do not exist."""
    sources = _sources(root)
    faults = [f"{module} does not exist" for module in pure if module not in sources]
    around = {name for module in pure for name in _packages_of(module)}
    for module in sorted({*pure, *around} & set(sources)):
        for each in _imports(module, sources[module]):
            if each.is_for_types:
                continue
            known = _module_of(each.name, sources)
            if each.name.partition(".")[0] in IMPURE or (known is not None and known not in {*pure, *around}):
                faults.append(f"{module}:{each.line} imports {each.name}")
    return sorted(faults)


def _packages_of(module: str) -> Iterator[str]:
    while "." in module:
        module = module.rpartition(".")[0]
        yield module


def test_the_daemons_meet_only_in_shared() -> None:
    assert wrong_directions(_ROOT) == []


def test_decisions_are_pure() -> None:
    assert impurities(_ROOT, PURE) == []


def test_the_list_of_pure_modules_is_sorted_and_without_doubles() -> None:
    assert sorted(set(PURE)) == list(PURE)


# --- planted violations --------------------------------------------------------------------------


def _plant(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.mark.parametrize(
    ("file", "text", "imported"),
    [
        ("loaderd/a.py", "import inferd.slots", "inferd.slots"),
        ("loaderd/a.py", "import inferd", "inferd"),
        ("inferd/a.py", "from loaderd import plan as decisions", "loaderd.plan"),
        ("inferd/deep/er/a.py", "from loaderd.plan import decide", "loaderd.plan.decide"),
        ("shared/a.py", "import os, loaderd", "loaderd"),
        ("shared/memory/a.py", "def f():\n    from inferd import slots", "inferd.slots"),
        ("shared/__init__.py", "from inferd import slots", "inferd.slots"),
        (
            "shared/a.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import inferd.slots",
            "inferd.slots",
        ),
        (
            "shared/a.py",
            "try:\n    pass\nexcept ImportError:\n    from ..inferd import slots",
            "inferd.slots",
        ),
        ("shared/a.py", "import importlib\nimportlib.import_module('loaderd.plan')", "loaderd.plan"),
        ("shared/a.py", "x = __import__('loaderd')", "loaderd"),
    ],
)
def test_a_planted_wrong_direction_is_found(tmp_path: Path, file: str, text: str, imported: str) -> None:
    _plant(tmp_path, {"loaderd/plan.py": "", "inferd/slots.py": "", "shared/ids.py": ""})
    assert wrong_directions(tmp_path) == []
    _plant(tmp_path, {file: text})
    (fault,) = wrong_directions(tmp_path)
    assert fault.endswith(f" imports {imported}")


_CLEAN = {
    "shared/__init__.py": "",
    "shared/ids.py": "import re",
    "shared/clock.py": "import time",
    "loaderd/__init__.py": "",
    "loaderd/plan.py": "from __future__ import annotations\nfrom shared.ids import Digest, Epoch",
}


@pytest.mark.parametrize(
    ("file", "text", "imported"),
    [
        ("loaderd/plan.py", "import time", "time"),
        ("loaderd/plan.py", "import os.path as path", "os.path"),
        ("loaderd/plan.py", "from asyncio import sleep", "asyncio.sleep"),
        ("loaderd/plan.py", "def f():\n    import torch.nn", "torch.nn"),
        ("loaderd/plan.py", "class A:\n    from zmq import Context", "zmq.Context"),
        ("loaderd/plan.py", "__import__('socket')", "socket"),
        ("loaderd/plan.py", "from shared.clock import now", "shared.clock.now"),
        ("loaderd/plan.py", "from shared import clock", "shared.clock"),
        ("loaderd/__init__.py", "import threading", "threading"),
        ("shared/__init__.py", "from shared import clock", "shared.clock"),
        ("loaderd/plan.py", "from typing import TYPE_CHECKING\nif not TYPE_CHECKING:\n    import os", "os"),
        (
            "loaderd/plan.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    pass\nelse:\n    import os",
            "os",
        ),
    ],
)
def test_a_planted_impurity_is_found(tmp_path: Path, file: str, text: str, imported: str) -> None:
    pure = ("loaderd.plan", "shared.ids")
    _plant(tmp_path, _CLEAN)
    assert impurities(tmp_path, pure) == []
    _plant(tmp_path, {file: text})
    (fault,) = impurities(tmp_path, pure)
    assert fault.endswith(f" imports {imported}")


def test_types_alone_are_no_impurity(tmp_path: Path) -> None:
    text = (
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch\n    from shared import clock"
    )
    _plant(tmp_path, {**_CLEAN, "loaderd/plan.py": text})
    assert impurities(tmp_path, ("loaderd.plan", "shared.ids")) == []


def test_a_pure_module_that_is_gone_is_found(tmp_path: Path) -> None:
    _plant(tmp_path, _CLEAN)
    assert impurities(tmp_path, ("loaderd.gone", "shared.ids")) == ["loaderd.gone does not exist"]
