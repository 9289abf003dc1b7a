"""The shape of the code: who may import whom, how long things may be, what loading a layer costs."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted(path for folder in ("rlhpc", "launch", "scripts") for path in (ROOT / folder).rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
MAX_FILE_LINES, MAX_FUNCTION_LINES = 400, 80

# The only places from which a package may be imported at all, inside functions included.
CONFINED = {
    "vllm": ("rlhpc/backends/vllm/", "scripts/bench/rollout.py"),  # the latter compares with vLLM alone
    "megatron": ("rlhpc/backends/megatron/",),
    "ray": ("rlhpc/cluster/", "rlhpc/train/ray_ranks.py"),
    "hydra": ("launch/", "rlhpc/cluster/job.py"),
    "submitit": ("launch/", "rlhpc/cluster/job.py"),
    "omegaconf": ("launch/", "rlhpc/config/load.py"),
    "pyarrow": ("rlhpc/data/readers.py",),
    "wandb": ("rlhpc/metrics/wandb.py",),
    "rlhpc.backends": ("rlhpc/backends/", "rlhpc/train/builder.py", "scripts/bench/"),  # a benchmark measures one part
}
# What a pure layer may import beside the standard library and rlhpc's own pure layers.
PURE = {
    "rlhpc/layout/": set(),
    "rlhpc/errors.py": set(),
    "rlhpc/checkpoint/durable.py": set(),
    "rlhpc/checkpoint/writer.py": set(),
    "rlhpc/checkpoint/identity.py": set(),
    "rlhpc/checkpoint/pieces.py": set(),
    "rlhpc/checkpoint/chunks.py": {"xxhash"},
    "rlhpc/checkpoint/manifest.py": {"xxhash"},
    "rlhpc/checkpoint/reader.py": {"xxhash"},
    "rlhpc/checkpoint/": {"torch"},
    "rlhpc/reshard/families/": set(),
    "rlhpc/reshard/flat.py": {"torch"},
    "rlhpc/reshard/fp8.py": {"torch"},
    "rlhpc/reshard/hf_files.py": {"safetensors"},
    "rlhpc/reshard/in_place.py": set(),
    "rlhpc/reshard/plan.py": {"numpy", "torch", "xxhash"},
    "rlhpc/algorithms/": {"numpy", "torch"},
    "rlhpc/data/readers.py": {"pyarrow"},
    "rlhpc/data/": {"numpy", "torch"},
    "rlhpc/rewards/": {"math_verify", "numpy", "torch"},
}
PURE_OWN = (
    "algorithms", "checkpoint", "config.schema", "config.tree", "data", "errors", "layout", "reshard.families",
    "reshard.plan", "rewards",
)  # fmt: skip
HEAVY = {"vllm", "megatron", "ray", "submitit", "hydra", "transformers"}
# The boundary to code that users write: whatever it raises becomes a score of 0 and a count in the metrics.
RUNS_FOREIGN_CODE = {"rlhpc/rewards/worker.py"}


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imports(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Every absolute import below a node: module and line. `from a import b` counts as a.b too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import"
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


def under(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


@pytest.fixture(scope="module")
def trees() -> dict[str, ast.Module]:
    return {relative(path): ast.parse(path.read_text()) for path in SOURCES}


def test_packages_stay_where_they_belong(trees: dict[str, ast.Module]) -> None:
    wrong = [
        f"{path}:{line} imports {module}; only {', '.join(places)} may"
        for path, tree in trees.items()
        for module, line in imports(tree)
        for package, places in CONFINED.items()
        if under(module, package) and not path.startswith(places)
    ]
    assert not wrong, "\n".join(wrong)


def test_pure_layers_import_nothing_else(trees: dict[str, ast.Module]) -> None:
    wrong = []
    for path, tree in trees.items():
        layer = next((layer for layer in PURE if path.startswith(layer)), None)
        if layer is None:
            continue
        for module, line in imports(tree):
            top = module.partition(".")[0]
            own = module == "rlhpc" or any(under(module, f"rlhpc.{name}") for name in PURE_OWN)
            if not (own or top in sys.stdlib_module_names or top in PURE[layer]):
                wrong.append(f"{path}:{line} imports {module}; {layer} may import {sorted(PURE[layer])}")
    assert not wrong, "\n".join(wrong)


def test_transformers_is_imported_inside_functions_only(trees: dict[str, ast.Module]) -> None:
    for path, tree in trees.items():
        if path.startswith("scripts/bench/peers/"):  # run by peers that are built on it
            continue
        functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
        guards = [n for n in ast.walk(tree) if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING"]
        lazy = {line for node in functions + guards for module, line in imports(node)}
        for module, line in imports(tree):
            assert not under(module, "transformers") or line in lazy, f"{path}:{line} imports {module} at load time"


@pytest.mark.parametrize("path", SOURCES + TESTS, ids=relative)
def test_sizes(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= MAX_FILE_LINES, f"{relative(path)} is too long; split it by subject"
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            assert length <= MAX_FUNCTION_LINES, f"{relative(path)}:{node.lineno} {node.name} has {length} lines"


def test_names_say_what_things_are(trees: dict[str, ast.Module]) -> None:
    vague = {"common", "helper", "helpers", "misc", "util", "utils"}
    for path, tree in trees.items():
        assert not vague & set(Path(path).with_suffix("").parts), path
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                assert not node.name.endswith(("Manager", "Handler", "Helper")), f"{path}:{node.lineno} {node.name}"


def test_exceptions_are_named(trees: dict[str, ast.Module]) -> None:
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ExceptHandler) and path not in RUNS_FOREIGN_CODE:
                caught = ast.unparse(node.type) if node.type else ""
                broad = not caught or {"Exception", "BaseException"} & set(caught.strip("()").split(", "))
                assert not broad, f"{path}:{node.lineno} catches {caught or 'everything'}"


def loaded_by(*modules: str) -> set[str]:
    """Top-level packages that a fresh interpreter holds after importing the modules."""
    code = "import sys\n" + "".join(f"import {module}\n" for module in modules)
    code += "print(*{name.partition('.')[0] for name in sys.modules})"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(result.stdout.split())


def modules_of(*prefixes: str) -> list[str]:
    names = [relative(path).removesuffix(".py").removesuffix("/__init__").replace("/", ".") for path in SOURCES]
    return [name for name in names if any(under(name, prefix) for prefix in prefixes)]


def test_loading_rlhpc_loads_nothing_else() -> None:
    assert not loaded_by("rlhpc") - sys.stdlib_module_names - loaded_by("sys") - {"rlhpc"}


def test_stdlib_layers_load_without_numpy_and_torch() -> None:
    modules = ["rlhpc.config.schema", "rlhpc.checkpoint.reader", "rlhpc.checkpoint.identity", "rlhpc.cli.main"]
    modules += ["rlhpc.cluster.batch", "rlhpc.cluster.node", "rlhpc.cluster.session"]
    assert not loaded_by(*modules, *modules_of("rlhpc.layout")) & (HEAVY | {"numpy", "torch"})


def test_pure_layers_load_no_backend() -> None:
    layers = ["algorithms", "checkpoint", "config", "data", "layout", "reshard", "rewards", "train.loop"]
    assert not loaded_by(*modules_of(*(f"rlhpc.{layer}" for layer in layers))) & HEAVY


def test_the_licence_is_apache_2() -> None:
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text and "Version 2.0, January 2004" in text
