"""A rehearsal: the stages themselves, run on a scale model and a made-up corpus, and every tensor compared.

    evidence → scale model → extract → parity of every tensor → train → export → decode with the draft in the engine

What fails is a row of the table, with the error as the user would have met it in the real run; what comes after it is
not begun.
"""

from __future__ import annotations

import json
import random
import re
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from draftsmith.corpus import write_corpus
from draftsmith.errors import CheckFailed, DraftsmithError, RequestError
from draftsmith.probe.checks import Check, verdict
from draftsmith.probe.facts import facts_from_evidence, read_facts
from draftsmith.recipe import Recipe, parse
from draftsmith.records import Sample, TargetFacts
from draftsmith.rehearse.decode import EngineFailed, decode_in_vllm
from draftsmith.rehearse.scale_config import ORDINARY_TOKENS
from draftsmith.rehearse.scale_model import ScaleModel, build_scale_model
from draftsmith.rehearse.stand_in import build_stand_in
from draftsmith.rundir import RunPaths, write_json

REPORT = "rehearsal.json"
SEQUENCES, HELD_OUT, LONGEST_TOKENS = 48, 8, 200
STEP_TOKENS = LONGEST_TOKENS + 8  # of the engine: sequences are cut wherever it can compute a prompt in pieces
PROMPTS, NEW_TOKENS = 6, 12
TRAINING_STEPS = 6
CACHE_BYTES = 256 << 20
MEMORY_SHARE = 0.1  # of a device, which may be in use: vLLM refuses to start where its whole share is not free
WIDTHS = ("num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size", "initial")


@dataclass
class Rehearsal:
    """What is rehearsed, where, and what was found so far."""

    recipe: Recipe  # of the real run
    evidence: dict[str, Any]
    folder: Path
    checks: list[Check] = field(default_factory=list)

    def run(self) -> dict[str, Any]:
        """Rehearse as far as it goes. Returns the report, which `rehearsal.json` in the folder also has."""
        self._refuse_missing_engine()
        _empty(self.folder)
        started, failure = time.monotonic(), None
        try:
            for step in (self.build, self.capture, self.compare, self.train, self.export, self.decode):
                self._timed(step)
        except DraftsmithError as error:
            failure = error
        report: dict[str, Any] = {
            "verdict": verdict(self.checks),
            "checks": [check.to_json() for check in self.checks],
            "folder": str(self.folder),
            "seconds": round(time.monotonic() - started, 1),
        }
        if failure is not None:
            report["failure"] = str(failure)
        write_json(self.folder / REPORT, report)
        return {**report, "summary": self._summary(report)}

    def _timed(self, step: Callable[[], list[Check]]) -> None:
        name, started = step.__name__, time.monotonic()
        print(f"rehearse: {name} …", file=sys.stderr, flush=True)
        try:
            found = step()
        except DraftsmithError as error:
            self.checks.append(Check(name, "fail", error.what.splitlines()[0], error.hint))
            raise
        seconds = f" ({time.monotonic() - started:.1f} s)"
        self.checks += [Check(c.name, c.status, c.detail + seconds * (c is found[0]), c.hint) for c in found]

    def _refuse_missing_engine(self) -> None:
        if self.recipe.extract.engine == "vllm":
            from draftsmith.extract.engine_settings import engine_version

            engine_version()

    # ---- the steps, in order -------------------------------------------------------------------------------------

    def build(self) -> list[Check]:
        """The scale model, and the settings of the run on it."""
        target = facts_from_evidence(self.evidence)
        self.scale: ScaleModel = build_scale_model(self.evidence, self.folder / "model", dtype=_dtype(self.recipe))
        self.quantised = self.scale.folder != self.scale.plain
        self.plain: TargetFacts = read_facts(str(self.scale.plain))
        on_device = torch.cuda.is_available() or not self.quantised
        self.facts = read_facts(str(self.scale.folder)) if on_device else self.plain
        self.paths = RunPaths(self.folder / "run")
        self.scaled, changes = scale_recipe(self.recipe, target, self.facts, self.paths.root)
        write_json(self.paths.facts, self.facts.to_json())
        self.samples = make_samples(self.facts, self.recipe.seed)
        write_corpus(self.paths.corpus, self.samples, {"template_sha256": target.template_sha256})
        _write_draft_vocab(self.paths, self.samples, self.facts)
        layers = f"{self.facts.num_hidden_layers} of {target.num_hidden_layers} layers"
        checks = [Check("scale model", "ok", f"{target.architecture}: {layers}, {self.scale.parameters:,} weights")]
        if self.quantised and not on_device:
            detail = "the engine is given the unquantised weights: a CPU has no kernels for the quantised ones"
            hint = "rehearse once on a machine with a GPU before the real run"
            checks.append(Check("quantized weights", "warn", f"built, not run; {detail}", hint))
        checks += [Check("as in the recipe", "warn", change) for change in changes]
        return checks

    def capture(self) -> list[Check]:
        """The extract stage itself, with the engine and settings of the recipe."""
        from draftsmith import extract

        report = extract.run(self.scaled, self.paths)
        if report["samples"] != len(self.samples):
            raise CheckFailed(f"{report['samples']} of {len(self.samples)} sequences came back", where="rehearse")
        detail = f"{report['samples']} sequences of 1 to {LONGEST_TOKENS} tokens, {report['tokens']:,} in all"
        by = (
            f"vLLM, {extract.CAPTURED[report['parity']['capture']]}"
            if "capture" in report["parity"]
            else self.scaled.extract.engine
        )
        return [Check("capture", "ok", f"{by}: {detail}, none lost, ids as sent")]

    def compare(self) -> list[Check]:
        """Every tensor of the store against transformers."""
        from draftsmith.extract.parity import compare, expect
        from draftsmith.store.shards import Store
        from draftsmith.target import DTYPES, pick_device

        store = Store.open(self.paths.store)
        layer_ids = (*store.manifest.aux_layer_ids, store.manifest.num_hidden_layers)
        dtype, device = DTYPES[store.manifest.dtype], pick_device(self.scaled.target.device)
        target = self.scaled.target.model_copy(update={"model": self.plain.path})
        factors = store.manifest.rope_factors
        expected = expect(self.plain, target, layer_ids, device, dtype, self.samples, factors)
        if isinstance(expected, str):
            return [Check("parity", "warn", f"not compared: {expected}")]
        figures = compare(
            list(store), expected, layer_ids, dtype, bool(self.facts.num_experts), store.manifest.codec, stored=True
        )
        return [
            Check(
                f"layer id {id}",
                "ok",
                f"differs from transformers by {of['median']:.1e} in the median of tokens, {of['max']:.1e} in the "
                f"worst; rounding explains {of['explained']:.0e}",
            )
            for id, of in figures["by_layer"].items()
        ]

    def train(self) -> list[Check]:
        """A few steps of the train stage."""
        from draftsmith import train

        report = train.run(self.scaled, self.paths)
        loss = report["validation"]["loss"]
        return [Check("training", "ok", f"{report['steps']} steps; held-out loss {loss:.3f}")]

    def export(self) -> list[Check]:
        """The export stage: each format written, read back and compared."""
        from draftsmith import export

        report = export.run(self.scaled, self.paths)
        return [
            *(Check(f"draft for {format}", "ok", "read back, bit for bit") for format in report["formats"]),
            *(Check(f"draft for {format}", "ok", f"left out: {why}") for format, why in report["left_out"].items()),
        ]

    def decode(self) -> list[Check]:
        """The draft loaded by the engine beside the scale model; what they say is the model's own greedy text."""
        if self.scaled.extract.engine != "vllm" or not self.paths.export("vllm").exists():
            why = "no vLLM is asked for" if self.scaled.extract.engine != "vllm" else "there is none in its format"
            return [Check("draft in the engine", "warn", f"not loaded: {why}")]
        if self.facts.attention != "mla" or torch.cuda.is_available():
            return [Check("draft in the engine", "ok", self._decode_beside(self.facts, self.plain))]
        folder = build_stand_in(self.facts, self.folder / "stand-in", _dtype(self.recipe))
        said = self._decode_beside(facts := read_facts(str(folder)), facts)
        return [
            Check(
                "draft in the engine",
                "warn",
                f"beside a Llama of the same width: {said}",
                "the CPU kernels for MLA and for the draft share no block size: rehearse on a GPU to see them together",
            )
        ]

    def _decode_beside(self, facts: TargetFacts, plain: TargetFacts) -> str:
        """Decode with the draft; says what came of it.

        Args:
            facts: of the model that the engine is given.
            plain: of the same without quantisation, for transformers.

        Raises:
            CheckFailed: the engine does not run the draft, or writes what the model would not have written.
        """
        from draftsmith.extract.longrope import served_factors
        from draftsmith.rehearse.judge import judge
        from draftsmith.target import DTYPES, pick_device

        prompts = [sample.input_ids for sample in self.samples if 8 <= len(sample.input_ids) <= 64][:PROMPTS]
        answer = self._decode_with_draft(facts, prompts)
        target = self.scaled.target.model_copy(update={"model": plain.path})
        device, dtype = pick_device(self.scaled.target.device), DTYPES[_dtype(self.recipe)]
        factors = served_factors(self.scaled, plain)
        found = judge(plain, target, device, dtype, prompts, answer["token_ids"], factors)
        explained = f", where rounding explains {found.explained:.1f}" if found.explained else ""
        if not found.own:
            raise CheckFailed(
                f"{found.others} of {found.tokens} tokens that the engine wrote with the draft are not the model's own "
                f"choice{explained}",
                where="decode",
                hint=f"{self.folder} has prompts, answers and the engine's log; please report this architecture",
            )
        said = f"{answer['drafts']} rounds, {answer['accepted']} of {answer['draft_tokens']} draft tokens accepted"
        if not found.others:
            return f"{said}; all {found.tokens} tokens are the model's own choice"
        return f"{said}; {found.others} of {found.tokens} tokens are not the model's own choice{explained}"

    def _decode_with_draft(self, facts: TargetFacts, prompts: list[list[int]]) -> dict[str, Any]:
        from draftsmith.extract.engine_settings import engine_args, environment

        longest = LONGEST_TOKENS + NEW_TOKENS + self.recipe.num_speculative_tokens
        speculative = {
            "method": "eagle3",
            "model": str(self.paths.export("vllm")),
            "num_speculative_tokens": self.recipe.num_speculative_tokens,
        }
        args = engine_args(self.scaled, facts, _dtype(self.recipe), longest)
        args |= {"speculative_config": speculative, "max_num_batched_tokens": 2 * STEP_TOKENS}
        env = environment(facts, longest)
        try:
            return decode_in_vllm(args, prompts, NEW_TOKENS, [], folder=self.folder, environment=env)
        except EngineFailed as error:
            log = (self.folder / "decode.log").read_text(encoding="utf-8", errors="replace")
            raise CheckFailed(
                f"the engine does not run the draft: {_last_error(log) or error}",
                where="decode",
                hint=f"{self.folder / 'decode.log'} is all that it wrote; probe says what this vLLM serves drafts for",
            ) from error

    def _summary(self, report: dict[str, Any]) -> list[str]:
        """The table, with a remedy below the row that needs it, and the whole of what failed below all."""
        width = max(len(check.name) for check in self.checks)
        lines = [f"rehearsal of {self.evidence['path']} in {self.folder}"]
        for check in self.checks:
            mark = "FAIL" if check.status == "fail" else check.status
            lines.append(f"  {mark:<4}  {check.name:<{width}}  {check.detail}")
            if check.hint and check.status != "ok":
                lines.append(f"  {'':<{width + 8}}hint: {check.hint}")
        if hasattr(self, "scale"):
            shrunk = [f"{name} {_short(old)} → {_short(new)}" for name, (old, new) in self.scale.shrunk.items()]
            lines += [f"shrunk: {', '.join(shrunk)}", *(f"note: {note}" for note in self.scale.notes)]
        if "failure" in report:
            lines += ["", report["failure"], ""]
        return [*lines, f"verdict: {report['verdict']} in {report['seconds']} s"]


def _empty(folder: Path) -> None:
    """Make the folder new; only what an earlier rehearsal left is deleted."""
    if folder.exists() and any(folder.iterdir()) and not (folder / REPORT).exists():
        raise RequestError(
            "is not empty, and not of an earlier rehearsal", where=str(folder), hint="give another folder with --dir"
        )
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    write_json(folder / REPORT, {"verdict": None})


def _dtype(recipe: Recipe) -> str:
    """On a CPU float32, in which rounding hides no fault; on a GPU, whose kernels take no other, the recipe's own."""
    if not torch.cuda.is_available():
        return "float32"
    return "bfloat16" if recipe.target.dtype == "auto" else recipe.target.dtype


def scale_recipe(recipe: Recipe, target: TargetFacts, facts: TargetFacts, run_dir: Path) -> tuple[Recipe, list[str]]:
    """The recipe for a scale model: settings that do not depend on size are kept.

    Returns:
        The recipe; and, for people, what is not as in the real run though it has nothing to do with size.
    """
    tree, changes = json.loads(recipe.model_dump_json()), []
    dtype = _dtype(recipe)
    tree |= {"name": "rehearsal", "run_dir": str(run_dir)}
    tree["target"] |= {"model": facts.path, "revision": None, "trust_remote_code": False, "dtype": dtype}
    extract = tree["extract"]
    needed = recipe.extract.tensor_parallel_size * recipe.extract.pipeline_parallel_size
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 1
    if needed > devices:
        changes.append(f"one device instead of {needed}: this machine has {devices}")
        extract |= {"tensor_parallel_size": 1, "pipeline_parallel_size": 1}
        needed = 1
    engines = min(recipe.extract.data_parallel_size, devices // needed)
    if engines < recipe.extract.data_parallel_size:
        changes.append(f"{engines} of {recipe.extract.data_parallel_size} engines: this machine has {devices}")
        extract["data_parallel_size"] = engines
    if recipe.extract.aux_layer_ids and target.num_hidden_layers and facts.num_hidden_layers:
        ids = scaled_ids(recipe.extract.aux_layer_ids, target.num_hidden_layers, facts.num_hidden_layers)
        extract["aux_layer_ids"] = ids
    extract |= {
        "codec": "fp32" if dtype == "float32" else recipe.extract.codec,
        "max_num_batched_tokens": STEP_TOKENS,
        "max_num_seqs": min(16, recipe.extract.max_num_seqs),
        "kv_cache_memory_bytes": CACHE_BYTES,
        "gpu_memory_utilization": min(MEMORY_SHARE, recipe.extract.gpu_memory_utilization),
        "shard_mib": 1,
        "max_quarantined": 0.0,
    }
    tree["train"] |= {"max_steps": TRAINING_STEPS, "batch_tokens": 512, "validate_every_steps": TRAINING_STEPS}
    tree["train"]["draft"] |= dict.fromkeys(WIDTHS)
    tree["export"] |= {"dtype": dtype}
    return parse(tree), changes


def scaled_ids(ids: list[int], layers: int, scaled_layers: int) -> list[int]:
    """Chosen layer ids in a model of fewer layers: as far along, in the same order, and distinct.

    Raises:
        RequestError: there are more of them than the scale model has layers.
    """
    if len(ids) >= scaled_layers:
        raise RequestError(
            f"{len(ids)} layer ids do not fit a scale model of {scaled_layers} layers", where="extract.aux_layer_ids"
        )
    scaled: list[int] = []
    for place, id in enumerate(ids):
        lowest, highest = scaled[-1] + 1 if scaled else 1, scaled_layers - (len(ids) - place)
        scaled.append(min(max(lowest, round(id * scaled_layers / layers)), highest))
    return scaled


def make_samples(facts: TargetFacts, seed: int) -> list[Sample]:
    """Sequences of 1 to `LONGEST_TOKENS` random tokens, most of them short; every third begins alike, two are the same.

    No token is special.
    """
    chance = random.Random(seed)
    special = {facts.bos_token_id, facts.pad_token_id, *facts.eos_token_ids}
    ordinary = [id for id in range(ORDINARY_TOKENS // 8, ORDINARY_TOKENS) if id not in special]

    def tokens(length: int) -> list[int]:
        return chance.choices(ordinary, k=length)

    lengths = [1, 2, LONGEST_TOKENS, *(int(LONGEST_TOKENS ** chance.random()) for _ in range(SEQUENCES - 4))]
    prefix, sequences = tokens(LONGEST_TOKENS), []
    for number, length in enumerate(lengths):
        shared = length * 3 // 4 if number % 3 == 0 else 0
        sequences.append([*prefix[:shared], *tokens(length - shared)])
    return [
        Sample(
            id=f"rehearsal-{number}",
            conversation_id=f"rehearsal-{number}",
            domain="rehearsal",
            split="train" if number < SEQUENCES - HELD_OUT else "validation",
            input_ids=ids,
            loss_mask=[int(place >= len(ids) // 4) for place in range(len(ids))],
        )
        for number, ids in enumerate([*sequences, sequences[2]])
    ]


def _write_draft_vocab(paths: RunPaths, samples: list[Sample], facts: TargetFacts) -> None:
    """Half of the target's vocabulary, so that the map between the two is rehearsed too."""
    from draftsmith.prepare.vocab import TokenCounts, write_draft_vocab

    assert facts.vocab_size is not None
    counts = TokenCounts(facts.vocab_size)
    for sample in samples:
        counts.add(sample)
    write_draft_vocab(paths.draft_vocab, counts, facts.vocab_size // 2, set(), facts.tokenizer_sha256)


def _short(value: Any) -> str:
    return f"{len(value)} entries" if isinstance(value, list | dict) and len(value) > 8 else str(value)


def _last_error(log: str) -> str:
    """The message of the last exception in a log."""
    found = re.findall(r"(?:^|\s)([\w.]+(?:Error|Exception): .+)$", log, flags=re.MULTILINE)
    return found[-1] if found else ""
