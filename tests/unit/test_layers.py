"""The package as a whole: who may import whom, what an import costs, what is public, what errors are made of."""

import ast
import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

import mx_rl
from mx_rl import errors

ROOT = Path(mx_rl.__file__).parent

# From the bottom up; within a layer, files of one folder may import one another (no circle: see below). A contract
# (base.py) lies below what implements it, and below the arena, which hands its regions to transports.
LAYERS = [
    "__init__ errors",
    "config columns copies deadline patience zstd",
    "kernels kernels.*",
    "records replica holds reports target prefetch",
    "twins",
    "transport.base registry.base",
    "tensors arena runs seat",
    "table digest",
    "patterns",
    "layout",
    "pieces shares trailer",
    "plan",
    "parcels addresses windows movable proof",
    "lattice blocks",
    "blob",
    "packed",
    "delta",
    "transport transport.place transport.runs transport.wire transport.flow",
    "transport.agent transport.lanes transport.requested",
    "transport.service",
    "transport.memory transport.nixl",
    "transport.near",
    "registry.policy",
    "registry.worlds registry.replicas registry.view registry.partners registry.trainer registry.sweep",
    "registry.offers",
    "registry.state",
    "registry registry.memory registry.ray_actor",
    "endpoint status",
    "claim ring landing ranks install feed partners",
    "commits fetch live stage",
    "direct swap in_place doubt",
    "staging",
    "membership borrow staged",
    "streaming",
    "standing",
    "switch",
    "intake",
    "publisher subscriber",
    "ray ray.*",
    "clusters loopback",
    "doctor",
    "display",
    "cli",
]


def module_name(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    name = ".".join(parts)
    return name.removesuffix(".__init__") if len(parts) > 1 else name


MODULES = {module_name(path): path for path in sorted(ROOT.rglob("*.py"))}


def layer_of(name):
    for index, line in enumerate(LAYERS):
        for pattern in line.split():
            if pattern == name or (pattern.endswith(".*") and name.startswith(pattern[:-1])):
                return index
    return None


def imports_of(path, *, everywhere=False):
    """Modules of mx_rl that a file imports when it is imported (or, ``everywhere``, ever)."""
    tree = ast.parse(path.read_text())
    found = set()

    def visit(node):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            return
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and not everywhere:
            return
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "mx_rl":
            inside = (node.module or "").removeprefix("mx_rl").lstrip(".")
            for alias in node.names:
                full = f"{inside}.{alias.name}".lstrip(".")
                found.add(full if full in MODULES else inside or "__init__")
        elif isinstance(node, ast.Import):
            found.update(a.name.removeprefix("mx_rl.") for a in node.names if a.name.startswith("mx_rl."))
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(tree)
    return found


def test_every_module_has_a_layer():
    unlisted = [name for name in MODULES if layer_of(name) is None]
    assert not unlisted, f"write these into LAYERS: {unlisted}"
    listed = [name for line in LAYERS for name in line.split() if not name.endswith("*")]
    assert not [name for name in listed if name not in MODULES], "LAYERS names modules that are gone"


def test_imports_run_downwards_only():
    wrong = [
        f"{name} imports {other}"
        for name, path in MODULES.items()
        for other in imports_of(path)
        if layer_of(other) > layer_of(name)
    ]
    assert not wrong, wrong


def test_imports_make_no_circle():
    graph = {name: imports_of(path) for name, path in MODULES.items()}
    done, path = set(), []

    def visit(name):
        assert name not in path, " -> ".join([*path, name])
        if name in done:
            return
        path.append(name)
        for other in graph[name]:
            visit(other)
        path.pop()
        done.add(name)

    for name in graph:
        visit(name)


def test_ray_and_nixl_are_imported_by_their_own_files_only():
    for name, path in MODULES.items():
        for node in ast.walk(ast.parse(path.read_text())):
            found = []
            if isinstance(node, ast.Import):
                found = [alias.name.split(".")[0] for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                found = [(node.module or "").split(".")[0]]
            if "ray" in found:
                assert name.startswith("ray") or name in ("registry.ray_actor", "clusters", "doctor"), name
            if {"nixl", "nixl_cu12", "nixl_cu13"}.intersection(found):
                assert name == "transport.agent", name


def test_the_import_is_light():
    script = (
        "import sys, time, json; begun = time.process_time(); import mx_rl; "
        "print(json.dumps([time.process_time() - begun, sorted({'torch', 'ray', 'nixl', 'numpy'} & set(sys.modules))]))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    seconds, heavy = json.loads(done.stdout)
    assert not heavy
    assert seconds < 0.3


def test_all_is_sorted_and_is_what_is_exported():
    assert mx_rl.__all__ == sorted(mx_rl.__all__)
    assert set(mx_rl._HOMES) == set(mx_rl.__all__)
    for name in mx_rl.__all__:
        assert getattr(mx_rl, name).__name__.split(".")[-1] == name
    assert set(mx_rl.__all__) <= set(dir(mx_rl))
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = mx_rl.no_such_name


ERRORS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.MxRLError)]


@pytest.mark.parametrize("kind", ERRORS, ids=lambda kind: kind.__name__)
def test_an_error_survives_pickling_with_its_fields_and_stands_in_the_drawn_tree(kind):
    error = kind("what broke, and what to do", peer="p", version=3, missing=[1, 2])
    again = pickle.loads(pickle.dumps(error))  # noqa: S301 - our own bytes: Ray does the same
    assert type(again) is kind
    assert str(again) == "what broke, and what to do"
    assert (again.peer, again.version, again.missing) == ("p", 3, [1, 2])
    assert again.as_dict() == error.as_dict()
    assert kind.__name__ in errors.__doc__.replace(",", " ").split()
    assert kind.__doc__
    with pytest.raises(AttributeError):
        _ = again.no_such_field


def test_the_drawn_tree_names_no_error_that_is_gone():
    tree = errors.__doc__[errors.__doc__.index("MxRLError") :]
    words = {word for word in tree.replace(",", " ").split() if word[0].isupper()}
    assert words == {kind.__name__ for kind in ERRORS}
