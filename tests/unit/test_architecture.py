"""The design rules of the repository, held by reading its files: who may import whom, how long things get,
what never gets in."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Collection, Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]

# Who may import which of our own packages. Imports point one way: down this list. A module obeys its longest
# prefix.
LAYERS = {
    "common": {"common"},
    "config": {"common", "config"},
    "data": {"common", "config", "data"},
    "models": {"common", "config", "data", "models"},
    "trainers.losses": {"trainers.losses"},  # pure functions of tensors
    "trainers": {"common", "config", "data", "models", "trainers"},
    "reports": {"common", "config", "reports"},  # what people look at: made of files and numbers
    "rollouts": {"common", "config", "data", "models", "reports", "rollouts"},
    "jobs": {"common", "config", "data", "models", "trainers", "reports", "rollouts", "jobs"},
    "evals": {"common", "config", "data", "models", "reports", "rollouts", "evals"},
    "launch": {"common", "config", "reports", "launch"},  # knows schema, command line, what runs leave
}
# Third-party packages that stay where they are; entry points are the .py files of the root.
CONFINED = {
    "hydra": ("config.arguments", "config.load", "config.cli", "config.composing", "launch", "entry point"),
    "omegaconf": ("config", "launch", "entry point"),
    "wandb": ("reports.tracking",),
    "vllm": ("rollouts.vllm.worker", "rollouts.vllm.transfer"),
}
MOST_LINES = 600
MOST_LINES_OF_A_FUNCTION = 60
MOST_BRANCHES = 20
# What has more, and how many: these may only fall.
# Lines that a room may have; only a reviewed change raises one.
BUDGETS = {
    "common": 1_475,
    "config": 3_185,
    "data": 6_644,
    "models": 4_753,
    "trainers": 2_694,
    "reports": 1_948,
    "rollouts": 6_306,
    "jobs": 4_270,
    "evals": 1_618,
    "launch": 2_804,
    "benchmarks": 1_055,
    "tools": 762,
    "tests": 23_619,
}


def tracked(*patterns: str) -> list[Path]:
    """Files that git has or would add, of the project itself."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--"]
    command += [*(patterns or ["."]), ":!.venv*"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [ROOT / name for name in listed.splitlines() if (ROOT / name).is_file()]


@cache
def sources() -> dict[str, ast.Module]:
    """Module name -> syntax tree of every .py file but tests, benchmarks and tools."""
    packages = {name.split(".")[0] for name in LAYERS}
    files = [*ROOT.glob("*.py"), *(path for name in sorted(packages) for path in (ROOT / name).rglob("*.py"))]
    return {module_name(path): ast.parse(path.read_text(), str(path)) for path in files}


@cache
def every_source() -> dict[str, ast.Module]:
    """``sources``, and those of tests, benchmarks and tools."""
    return {module_name(path): ast.parse(path.read_text(), str(path)) for path in tracked("*.py")}


def nodes(*kinds: type[ast.AST]) -> Iterator[tuple[str, Any]]:
    """(module, node) of every node of these kinds in ``sources``."""
    for module, tree in sources().items():
        yield from ((module, node) for node in ast.walk(tree) if isinstance(node, kinds))


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imports(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """(dotted name, line) of everything that a file imports, wherever in the file. ``from a import b`` gives
    a.b."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import; write the name in full"
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


def within(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix + ".")


def is_entry_point(module: str) -> bool:
    return "." not in module and (ROOT / f"{module}.py").exists()


def layer_of(module: str) -> str:
    return max((layer for layer in LAYERS if within(module, layer)), key=len)


def breaches(module: str, tree: ast.Module) -> list[str]:
    """What ``module`` imports and must not."""
    if is_entry_point(module):
        return []
    layer = layer_of(module)
    ours = {name.split(".")[0] for name in LAYERS} | {m for m in sources() if is_entry_point(m)}
    allowed = ", ".join(sorted(LAYERS[layer]))
    return [
        f"{module}:{line} imports {name}; {layer} may import {allowed}"
        for name, line in imports(tree)
        if name.split(".")[0] in ours and not any(within(name, allowed) for allowed in LAYERS[layer])
    ]


# -- imports ---------------------------------------------------------------------------------------


def test_every_package_has_its_layer_and_imports_point_one_way():
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"tests", "benchmarks", "tools"}
    assert packages == {name.split(".")[0] for name in LAYERS}
    assert [line for module, tree in sources().items() for line in breaches(module, tree)] == []


def resolved(name: str, modules: Collection[str]) -> str:
    """The module that ``name`` is, or is defined in; empty for what is not ours."""
    while name and name not in modules:
        name = name.rpartition(".")[0]
    return name


def arrows(trees: dict[str, ast.Module]) -> dict[str, set[str]]:
    """Module -> the others of ``trees`` that it imports, at any place of the file, for type checking too."""
    return {
        module: {resolved(name, trees) for name, _ in imports(tree)} - {"", module}
        for module, tree in trees.items()
    }


def folder_arrows(trees: dict[str, ast.Module]) -> dict[str, set[str]]:
    """Folder -> the other folders that its own files import from; a folder within another is a folder of its
    own."""
    packages = {module.rpartition(".")[0] for module in trees}
    home = {module: module if module in packages else module.rpartition(".")[0] for module in trees}
    found: dict[str, set[str]] = {folder: set() for folder in home.values()}
    for module, targets in arrows(trees).items():
        found[home[module]] |= {home[target] for target in targets} - {home[module]}
    return found


def circle(graph: dict[str, set[str]]) -> list[str]:
    """One way round through ``graph``, if there is one."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_no_circle_between_files_or_folders():
    assert circle(arrows(every_source())) == []
    assert circle(folder_arrows(every_source())) == []


def test_losses_need_torch_alone():
    standard = sys.stdlib_module_names | {"torch", "trainers"}
    losses = {m: tree for m, tree in sources().items() if within(m, "trainers.losses")}
    found = [(m, *of) for m, tree in losses.items() for of in imports(tree)]
    assert [one for one in found if one[1].split(".")[0] not in standard] == []


def test_third_parties_stay_in_their_place():
    for package, homes in CONFINED.items():
        every = sources().items()
        users = {m for m, tree in every if any(within(name, package) for name, _ in imports(tree))}
        outside = {m for m in users if not any(within(m, home) for home in homes)}
        assert {m for m in outside if not (is_entry_point(m) and "entry point" in homes)} == set(), package


def test_collectives_live_in_one_module():
    """torch.distributed stays in models; beside models.distributed only what shards and saves, which calls
    its own collectives."""
    harmless = tuple(f"torch.distributed.{part}" for part in ("checkpoint", "fsdp", "tensor", "device_mesh"))
    named = [(m, ast.unparse(node)) for m, node in nodes(ast.Attribute)]
    named += [(m, name) for m, tree in sources().items() for name, _ in imports(tree)]
    assert [
        (module, name)
        for module, name in named
        if within(name, "torch.distributed")
        and module != "models.distributed"
        and not (within(module, "models") and any(within(name, part) for part in harmless))
    ] == []


# -- size and habits -------------------------------------------------------------------------------


def test_no_room_grows_beyond_its_budget():
    lines = dict.fromkeys(BUDGETS, 0)
    for module in every_source():
        if (room := module.split(".")[0]) in lines:
            lines[room] += len(path_of(module).read_text().splitlines())
    assert {room: n for room, n in lines.items() if n > BUDGETS[room]} == {}


def test_no_file_and_no_function_is_too_long_to_read():
    assert {m: n for m in sources() if (n := len(path_of(m).read_text().splitlines())) > MOST_LINES} == {}
    functions = nodes(ast.FunctionDef, ast.AsyncFunctionDef)
    lengths = {f"{m}.{f.name}": (f.end_lineno or f.lineno) - f.lineno + 1 for m, f in functions}
    assert {name: lines for name, lines in lengths.items() if lines > MOST_LINES_OF_A_FUNCTION} == {}


DECISIONS = (ast.If, ast.IfExp, ast.For, ast.AsyncFor, ast.While, ast.ExceptHandler, ast.match_case)


def branches(function: ast.AST) -> int:
    """The decisions in a function, without those of functions in it: McCabe's complexity (1976) less 1. Each
    part of a compound condition is a decision of its own, and so is what filters a comprehension."""
    found, waiting = 0, list(ast.iter_child_nodes(function))
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        found += isinstance(node, DECISIONS)
        found += len(node.ifs) if isinstance(node, ast.comprehension) else 0
        found += len(node.values) - 1 if isinstance(node, ast.BoolOp) else 0
        waiting += ast.iter_child_nodes(node)
    return found


def test_no_function_has_too_many_branches():
    functions = nodes(ast.FunctionDef, ast.AsyncFunctionDef)
    counts = {f"{m}.{node.name}": branches(node) for m, node in functions}
    assert {name: n for name, n in counts.items() if n > MOST_BRANCHES} == {}


def path_of(module: str) -> Path:
    path = ROOT / Path(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def swallows(handler: ast.ExceptHandler) -> bool:
    """A bare except, or one for everything that does nothing about it."""
    name = getattr(handler.type, "id", None)
    idle = all(isinstance(statement, ast.Pass | ast.Continue) for statement in handler.body)
    return handler.type is None or (name in ("Exception", "BaseException") and idle)


def test_no_error_is_swallowed_and_nothing_left_for_later():
    assert [f"{m}:{node.lineno}" for m, node in nodes(ast.ExceptHandler) if swallows(node)] == []
    later = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b|NotImplementedError\(\)")
    assert [f"{m}: {found[0]}" for m in sources() if (found := later.search(path_of(m).read_text()))] == []


# -- what never gets in ----------------------------------------------------------------------------

NEVER = {
    "a secret": re.compile(
        rb"\bhf_[A-Za-z0-9]{30,}|\bsk-[A-Za-z0-9_\-]{20,}|\bgh[pousr]_[A-Za-z0-9]{30,}|\bwandb_v\d_\w{20,}"
        rb"|-----BEGIN [A-Z ]*PRIVATE KEY|\bAKIA[0-9A-Z]{16}\b"
    ),
    "somebody's folder": re.compile(rb"/(?:home|Users)/\w+/|(?<![\w.])/(?:roo[t]|wor[k])/[\w.]"),
}


def test_no_file_holds_a_secret_or_an_absolute_path_of_somebody():
    texts = {path.relative_to(ROOT): path.read_bytes() for path in tracked()}
    assert [
        f"{path}: {what}: {hit[0][:40]!r}"
        for path, content in texts.items()
        if b"\0" not in content[:8192]
        for what, rule in NEVER.items()
        if (hit := rule.search(content))
    ] == []
