"""What is said of an engine comes from its source; the marked test holds it against the classes themselves."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from draftsmith.probe import engine_source
from draftsmith.probe.checks import Check
from draftsmith.probe.engine import check_engine
from draftsmith.probe.engine_source import Source, describe_architecture, find_engine, inspect_engine
from draftsmith.probe.facts import facts_from_evidence
from draftsmith.records import TargetFacts

CONFIGS = Path(__file__).parent / "configs"
needs_vllm = pytest.mark.skipif(find_engine() is None, reason="no vLLM is installed")


def facts_of(config: dict[str, Any]) -> TargetFacts:
    return facts_from_evidence({"path": "/models/x", "config": config, "problems": []})


def verdicts(architecture: str, found: dict[str, Any] | None) -> dict[str, Check]:
    checks = check_engine(facts_of({"architectures": [architecture]}), {"engine": found})
    return {check.name: check for check in checks}


# ---- The installed engine ----

LLAMA = "(positions, hidden_states, residual)"
LAYERS = {  # model -> text model, decoder layer, its call, whether a draft can be served (vLLM 0.24 and 0.32)
    "kimi-k2.5": ("DeepseekV2ForCausalLM", "DeepseekV2DecoderLayer", LLAMA[:-1] + ", llama_4_scaling=None)", True),
    "kimi-k2": ("DeepseekV3ForCausalLM", "DeepseekV2DecoderLayer", LLAMA[:-1] + ", llama_4_scaling=None)", True),
    "llama-3.1-8b": ("LlamaForCausalLM", "LlamaDecoderLayer", LLAMA, True),
    "llama-4-scout": ("Llama4ForCausalLM", "Llama4DecoderLayer", LLAMA, True),
    "mistral-7b-v0.3": ("MistralForCausalLM", "MistralDecoderLayer", LLAMA[:-1] + ", t_cond=None)", True),
    "qwen3-30b-a3b": ("Qwen3MoeForCausalLM", "Qwen3MoeDecoderLayer", LLAMA, True),
    "qwen2.5-vl-7b": ("Qwen2ForCausalLM", "Qwen2DecoderLayer", LLAMA, True),
    "gemma-3-4b": ("Gemma3ForCausalLM", "Gemma3DecoderLayer", LLAMA[:-1] + ", **kwargs)", False),
    "gpt-oss-20b": ("GptOssForCausalLM", "TransformerBlock", "(hidden_states, positions, residual)", True),
    "gpt2": ("GPT2LMHeadModel", "GPT2Block", "(hidden_states)", False),
    "phi-3-mini-4k": ("Phi3ForCausalLM", "LlamaDecoderLayer", LLAMA, True),
}


@needs_vllm
@pytest.mark.parametrize("model", LAYERS)
def test_the_layer_that_a_model_builds_is_found_with_its_call(model: str) -> None:
    text_class, layer, signature, eagle3 = LAYERS[model]
    facts = facts_of(json.loads((CONFIGS / f"{model}.json").read_text()))
    found = inspect_engine(facts.architecture, facts.text_model_type)
    assert found is not None
    assert found["text_class"] == text_class
    assert [(one["class"], one["signature"]) for one in found["decoder_layers"]] == [(layer, signature)]
    assert found["supports_eagle3"] is eagle3
    assert found["embedding_method"] == "embed_input_ids"
    checks = {check.name: check.status for check in check_engine(facts)}
    assert checks["engine EAGLE-3"] == ("ok" if eagle3 else "fail")
    assert all(status == "ok" for name, status in checks.items() if name != "engine EAGLE-3")


@needs_vllm
def test_a_hybrid_model_has_a_layer_of_each_kind() -> None:
    found = inspect_engine("NemotronHForCausalLM")
    assert found is not None
    called = {layer["class"]: layer["parameters"] for layer in found["decoder_layers"]}
    assert called["NemotronHAttentionDecoderLayer"][:2] == ["positions", "hidden_states"]
    assert called["NemotronHMambaDecoderLayer"][0] == "hidden_states"


@needs_vllm
def test_an_architecture_that_the_engine_lacks_is_said_to_be_unknown() -> None:
    [engine, architecture] = check_engine(facts_of({"architectures": ["FooForCausalLM"]}))
    assert engine.status == "ok"
    assert architecture.status == "warn"
    assert architecture.detail.startswith("serving support not known: FooForCausalLM is not in the registry of vllm")


@needs_vllm
def test_an_architecture_that_the_engine_dropped_is_dated() -> None:
    [_, architecture] = check_engine(facts_of({"architectures": ["Phi3SmallForCausalLM"]}))
    assert architecture.status == "warn"
    assert architecture.detail.endswith("which dropped it after 0.9.2")


@needs_vllm
def test_the_engine_and_torch_are_not_imported() -> None:
    code = """
    import sys
    from draftsmith.probe.engine_source import inspect_engine
    assert inspect_engine("KimiK25ForConditionalGeneration", "kimi_k2")["decoder_layers"]
    print([name for name in ("vllm", "torch") if name in sys.modules])
    """
    assert run_python(code) == "[]"


@needs_vllm
@pytest.mark.vllm
def test_what_the_source_says_is_what_the_imported_classes_are() -> None:
    """For every architecture of the registry whose module can be imported here, 150 layers or so."""
    code = """
    import importlib, inspect, json, sys
    from draftsmith.probe.engine_source import Source, describe_architecture, find_engine, read_registry
    root, distribution, _ = find_engine()
    source = Source(root, "cpu" if "cpu" in distribution else "cuda")
    from vllm.model_executor.models.interfaces import supports_eagle3

    def parameters(layer):
        named = list(inspect.signature(layer.forward).parameters.values())[1:]
        return [p.name for p in named if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]

    compared, differing = [], []
    for architecture, (module, name) in read_registry(source)[0].items():
        try:
            cls = getattr(importlib.import_module(module), name)
        except ImportError:  # needs torchvision and the like
            continue
        said = describe_architecture(source, architecture, None)
        if said["supports_eagle3"] is not None and said["supports_eagle3"] != supports_eagle3(cls):
            differing.append([architecture, "supports_eagle3", said["supports_eagle3"]])
        if not hasattr(cls, said["embedding_method"] or "forward"):
            differing.append([architecture, "embedding_method", said["embedding_method"]])
        for layer in said["decoder_layers"]:
            real = getattr(importlib.import_module(layer["module"]), layer["class"])
            compared.append(layer["class"])
            if parameters(real) != layer["parameters"]:
                differing.append([architecture, layer["class"], layer["parameters"], parameters(real)])
    print(json.dumps([compared, differing]))
    """
    compared, differing = json.loads(run_python(code).splitlines()[-1])
    assert differing == []
    asked = {"DeepseekV2DecoderLayer", "LlamaDecoderLayer", "Qwen3MoeDecoderLayer", "TransformerBlock", "GPT2Block"}
    assert asked <= set(compared)
    assert len(compared) > 100


def run_python(code: str, *options: str, cwd: Path | None = None) -> str:
    command = [sys.executable, *options, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


# ---- No engine, or one that will not do ----


def test_without_an_engine_the_extra_and_its_range_are_named() -> None:
    [check] = check_engine(facts_of({"architectures": ["LlamaForCausalLM"]}), {"engine": None})
    assert (check.name, check.status) == ("engine", "warn")
    assert check.detail.startswith("no vLLM is installed")
    assert "draftsmith[vllm]" in str(check.hint)
    assert "vllm>=0.24" in str(check.hint)


@pytest.mark.parametrize("other", ["vllm/vllm/__init__.py", "vllm.py"])  # a clone of the repository, a script
def test_the_inspection_stands_alone_and_takes_no_other_vllm_for_the_engine(tmp_path: Path, other: str) -> None:
    """Isolated from every installed package, as on a machine that has none of ours."""
    (tmp_path / other).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / other).touch()
    code = f"""
    import sys
    sys.path.insert(0, "")
    exec(open({engine_source.__file__!r}).read())
    print(inspect_engine("LlamaForCausalLM"))
    """
    assert run_python(code, "-I", "-S", cwd=tmp_path) == "None"


def install_engine(site: Path, version: str, files: dict[str, str], distribution: str = "vllm") -> Path:
    """Lay out a package as pip would: its source and its metadata. Returns the package's folder."""
    root = site / "vllm"
    for name, text in {"__init__.py": "raise RuntimeError('imported')", **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(textwrap.dedent(text))
    metadata = site / f"{distribution.replace('-', '_')}-{version}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
    return root


METHODS = 'METHODS = ["eagle3", "extract_hidden_states"]'
REGISTRY = """
    _TEXT_GENERATION_MODELS = {"LlamaForCausalLM": ("llama", "LlamaForCausalLM")}
    _PREVIOUSLY_SUPPORTED_MODELS = {"OldForCausalLM": "0.20.0"}
"""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder that is searched for packages before all others."""
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_an_engine_that_is_too_old_fails_with_the_version_that_is_needed(site: Path) -> None:
    install_engine(site, "0.17.0", {"config/speculative.py": 'METHODS = ["eagle3"]'})
    check = check_engine(facts_of({"architectures": ["LlamaForCausalLM"]}))[0]
    assert (check.name, check.status) == ("engine", "fail")
    assert check.detail == "vllm 0.17.0 is installed and vllm>=0.24 is needed"
    assert "extract.engine=transformers" in str(check.hint)


def test_a_copy_that_is_not_installed_knows_no_range_and_checks_the_rest(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def requires(name: str) -> list[str]:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", requires)
    install_engine(site, "0.17.0", {"config/speculative.py": 'METHODS = ["eagle3"]'})
    check = check_engine(facts_of({"architectures": ["LlamaForCausalLM"]}))[0]
    assert (check.name, check.status) == ("engine", "fail")
    assert "has no speculative method extract_hidden_states" in check.detail


def test_a_fork_without_the_capture_method_fails(site: Path) -> None:
    install_engine(site, "0.30.0", {"config/speculative.py": 'METHODS = ["eagle3"]'})
    check = check_engine(facts_of({"architectures": ["LlamaForCausalLM"]}))[0]
    assert check.status == "fail"
    assert "extract_hidden_states" in check.detail


def test_a_release_candidate_and_a_local_build_are_in_range(site: Path) -> None:
    install_engine(site, "0.33.0rc1+cu130", {"config/speculative.py": METHODS})
    found = inspect_engine("LlamaForCausalLM")
    assert found is not None
    assert found["version"] == "0.33.0rc1+cu130"
    assert verdicts("LlamaForCausalLM", found)["engine"].status == "warn"  # no runner's file was found, only that


def test_an_engine_of_an_unknown_layout_is_not_taken_to_lack_every_model(site: Path) -> None:
    install_engine(site, "0.99.0", {"config/speculative.py": METHODS})
    checks = verdicts("LlamaForCausalLM", inspect_engine("LlamaForCausalLM"))
    assert checks["engine architecture"].status == "warn"
    assert "form that is not understood" in checks["engine architecture"].detail


# ---- How models are written ----

INTERFACES = """
    class EagleModelMixin: ...
    class SupportsEagle3(Protocol):
        supports_eagle3 = True
        def set_aux_hidden_state_layers(self, layers): ...
"""
BASE = """
    from .interfaces import EagleModelMixin, SupportsEagle3

    class Layer(nn.Module):
        def forward(self, positions: Tensor, hidden_states: Tensor, residual: Tensor | None): ...

    class Model(nn.Module, EagleModelMixin):
        def __init__(self, *, config, layer_type: type = Layer):
            super().__init__()
            self.start, self.end, self.layers = make_layers(8, lambda prefix: layer_type(config), prefix="x")

    class LlamaForCausalLM(nn.Module, SupportsEagle3):
        def __init__(self, *, config, layer_type=Layer):
            self.model = self._init_model(config=config, layer_type=layer_type)
        def _init_model(self, config, layer_type=Layer):
            return Model(config=config, layer_type=layer_type)
        def embed_input_ids(self, input_ids): ...
"""


def describe(
    tmp_path: Path, module: str | dict[str, str], name: str, text_type: str | None = None, platform: str = "cuda"
) -> dict:
    """A model written as `module`, or as the files of a package, beside the llama above."""
    registry = {"LlamaForCausalLM": ("llama", "LlamaForCausalLM"), name: ("tested", name)}
    files = {"registry.py": f"_TEXT_GENERATION_MODELS = {registry!r}", "interfaces.py": INTERFACES, "llama.py": BASE}
    files |= module if isinstance(module, dict) else {"tested.py": module}
    for file, text in files.items():
        path = tmp_path / "vllm" / "model_executor" / "models" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    return describe_architecture(Source(tmp_path / "vllm", platform), name, text_type)


def layers_of(described: dict) -> list[str]:
    return [layer["class"] + layer["signature"] for layer in described["decoder_layers"]]


def test_a_subclass_hands_its_own_layer_up(tmp_path: Path) -> None:
    module = """
        from vllm.model_executor.models.llama import Layer, LlamaForCausalLM
        class OwnLayer(Layer): ...
        class OwnForCausalLM(LlamaForCausalLM):
            def __init__(self, *, config, layer_type: type[nn.Module] = OwnLayer):
                super().__init__(config=config, layer_type=layer_type)
    """
    described = describe(tmp_path, module, "OwnForCausalLM")
    assert layers_of(described) == ["OwnLayer(positions, hidden_states, residual)"]
    assert described["supports_eagle3"] is True
    assert described["embedding_method"] == "embed_input_ids"


WRAPPER = """
    from .interfaces import SupportsEagle3
    class Tower(nn.Module):
        def __init__(self, config):
            self.layers = nn.ModuleList([TowerLayer(config) for _ in range(3)])
    class TowerLayer(nn.Module):
        def forward(self, pixels): ...
    class WrapperForConditionalGeneration(nn.Module, SupportsEagle3):
        def __init__(self, vllm_config):
            with self._mark_tower_model(vllm_config):
                self.vision_tower = Tower(vllm_config)
            with self._mark_language_model(vllm_config):
                self.language_model = init_vllm_registered_model(hf_config=config.text_config ARCHITECTURES)
        def get_input_embeddings(self, input_ids): ...
"""


def test_a_wrapper_leads_to_the_text_model_that_it_names_and_not_to_its_tower(tmp_path: Path) -> None:
    module = WRAPPER.replace(" ARCHITECTURES", ', architectures=["LlamaForCausalLM"]')
    described = describe(tmp_path, module, "WrapperForConditionalGeneration")
    assert layers_of(described) == ["Layer(positions, hidden_states, residual)"]
    assert described["text_class"] == "LlamaForCausalLM"
    assert described["embedding_method"] == "get_input_embeddings"
    assert described["supports_eagle3"] is True


def test_a_wrapper_of_any_text_model_leads_to_the_one_of_its_configuration(tmp_path: Path) -> None:
    module = WRAPPER.replace(" ARCHITECTURES", "")
    described = describe(tmp_path, module, "WrapperForConditionalGeneration", text_type="llama")
    assert described["text_class"] == "LlamaForCausalLM"


def test_a_text_model_that_was_not_found_leaves_support_open(tmp_path: Path) -> None:
    module = WRAPPER.replace(" ARCHITECTURES", "")
    described = describe(tmp_path, module, "WrapperForConditionalGeneration", text_type="unheard_of")
    assert described["decoder_layers"] == []
    assert described["supports_eagle3"] is None
    engine = {"distribution": "vllm", "version": "0.30", "extract_hidden_states": True, "layer_id_runners": ["V1"]}
    checks = verdicts("WrapperForConditionalGeneration", {**engine, **described})
    assert checks["engine decoder layer"].status == checks["engine EAGLE-3"].status == "warn"


def test_each_platform_has_its_own_branch(tmp_path: Path) -> None:
    entry = """
        if current_platform.is_cpu():
            from .cpu.model import OwnForCausalLM
        else:
            from .nvidia.model import OwnForCausalLM
    """
    cpu_model = "from ...llama import LlamaForCausalLM as OwnForCausalLM"
    module = {"tested/__init__.py": entry, "tested/cpu/model.py": cpu_model, "tested/nvidia/model.py": ""}
    cpu = describe(tmp_path / "cpu", module, "OwnForCausalLM", platform="cpu")
    assert layers_of(cpu) == ["Layer(positions, hidden_states, residual)"]
    assert describe(tmp_path / "cuda", module, "OwnForCausalLM", platform="cuda")["decoder_layers"] == []


def test_layers_chosen_from_a_table_are_all_listed(tmp_path: Path) -> None:
    module = """
        from .interfaces import SupportsEagle3
        class A(nn.Module):
            def forward(self, hidden_states, *, residual=None): ...
        class B(A): ...
        KINDS = {"a": A, "b": B}
        class OwnForCausalLM(nn.Module):
            block_cls = A
            def __init__(self, config):
                def get_layer(prefix):
                    kind = KINDS[config.kinds[0]]
                    return kind(config)
                self.start, self.end, self.layers = make_layers(8, get_layer, prefix="x")
    """
    described = describe(tmp_path, module, "OwnForCausalLM")
    assert layers_of(described) == ["A(hidden_states, *, residual=None)", "B(hidden_states, *, residual=None)"]
    assert described["decoder_layers"][0]["parameters"] == ["hidden_states", "residual"]
    assert described["supports_eagle3"] is False


def test_a_class_that_declares_support_without_the_mixin_does_not_have_it(tmp_path: Path) -> None:
    module = """
        from .interfaces import SupportsEagle3
        from .llama import Layer
        class OwnForCausalLM(nn.Module, SupportsEagle3):
            def __init__(self, config):
                self.start, self.end, self.layers = make_layers(8, lambda prefix: Layer(config), prefix="x")
    """
    assert describe(tmp_path, module, "OwnForCausalLM")["supports_eagle3"] is False


def test_a_layer_with_no_hidden_states_is_to_be_rehearsed_first(tmp_path: Path) -> None:
    module = """
        class Strange(nn.Module):
            def forward(self, x, positions): ...
        class OwnForCausalLM(nn.Module):
            def __init__(self, config):
                self.layers = nn.ModuleList([Strange(config) for _ in range(8)])
    """
    described = describe(tmp_path, module, "OwnForCausalLM")
    engine = {"distribution": "vllm", "version": "0.30", "extract_hidden_states": True, "layer_id_runners": ["V1"]}
    check = verdicts("OwnForCausalLM", {**engine, **described})["engine decoder layer"]
    assert (check.status, check.detail) == (
        "warn",
        "Strange has no parameter hidden_states: Strange.forward(x, positions)",
    )
