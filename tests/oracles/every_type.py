"""What becomes of every model type of the installed transformers: converted both ways, held against its own bytes.

    python -m tests.oracles.every_type [TYPE ...]

writes the outcomes to `docs/reference/model-types.json`, of which the documentation shows a table. A type with a
shipped table uses that; for any other one a table is derived, as `convert --derive` does.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from fcntl import LOCK_EX, flock
from pathlib import Path
from typing import Any

RECORD = Path(__file__).parents[2] / "docs/reference/model-types.json"
EXACT, UNBUILT, WRONG = "exact", "does not build", "WRONG"
PEER = "transformers: "
"""Begins what is no fault of a table: a type that transformers cannot store and load again, or not here."""
HAND, TRACED, DERIVED = "by hand", "by tracing", "derived"
_FAULTS = {
    "olmo_hybrid": "save_pretrained stores the convolutions of q, k and v as thirds of one, whatever their sizes are; "
    "what it loads from the hub is exact both ways"
}
"""Types that are refused because transformers stores another layout than it loads."""
_LARGE = 16_000_000
"""Number of parameters from which a model is large: a derivation takes 2 to 3 GB with some 50 million."""
_LONGEST = 160
_SECONDS = 240
"""Longest time for one type; a trace of the largest tiny model takes some ten seconds."""


def outcome(model_type: str) -> tuple[str, str]:
    """Return which table a type has, and `exact`, `does not build`, or why it is refused.

    Raises:
        AssertionError: something was converted, and is not the peer's.
    """
    from tests.oracles.peer_bytes import both_ways
    from tests.oracles.quiet import quiet
    from transaxle.derivation.sources import from_transformers
    from transaxle.errors import TransaxleError
    from transaxle.families import builtin

    entries = [entry for entry in builtin().entries.values() if model_type in entry.model_types]
    table = DERIVED if not entries else TRACED if all(entry.traced for entry in entries) else HAND
    with tempfile.TemporaryDirectory() as folder, quiet():
        try:
            models = built(model_type)
            if not models:
                return table, UNBUILT
            types = {each for entry in entries for each in entry.model_types}
            rules = None if entries else Path(folder, "derived.rules")
            with one_large_model(models):
                if rules is not None:
                    rules.write_text(from_transformers(model_type).text, "utf-8")
                for number, model in enumerate(models):
                    assert not entries or model.config.model_type in types
                    both_ways(model, Path(folder, str(number)), rules=rules)
        except TransaxleError as error:
            return table, PEER + _FAULTS[model_type] if model_type in _FAULTS else _short(error)
        except AssertionError as error:
            if (fault := "transformers does not load what it saved") in str(error):
                return table, f"{PEER}{fault}"  # which tensors it names is a matter of chance
            raise
        except Exception as error:  # noqa: BLE001 - of the peer: the model's class, its saving, its loading
            return table, f"{PEER}{type(error).__name__}: {_short(error)}"
    return table, EXACT


@contextmanager
def one_large_model(models: Iterable[Any]) -> Iterator[None]:
    """Let no two workers of the tests have a large model at a time: these take most of the memory of a test run."""
    if all(sum(parameter.numel() for parameter in model.parameters()) < _LARGE for model in models):
        yield
        return
    with Path(tempfile.gettempdir(), "large-model").open("a") as file:  # all workers have the same folder
        flock(file, LOCK_EX)
        yield


def built(model_type: str) -> list[Any]:
    """Two models of a type: one of sizes that no table follows from, one in the proportions of the default config."""
    from transaxle.derivation.tiny_configs import PROPORTIONED, VARIANTS
    from transaxle.derivation.transformers_models import Peer, variants
    from transaxle.errors import TransaxleError

    try:
        # The first one chooses the class of the others.
        found = [(model, number) for model, number in variants(Peer(), model_type, numbers=(0, VARIANTS - 1))]
        if [number for _, number in found] != [0, VARIANTS - 1]:
            found = list(variants(Peer(), model_type, numbers=range(VARIANTS)))
        return [
            *(model for model, _ in found[-1:]),
            *(model for model, _ in variants(Peer(), model_type, numbers=(PROPORTIONED,))),
        ]
    except TransaxleError:  # no class of models has such a config
        return []


def _short(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} …"


def recorded() -> dict[str, Any]:
    """The record: `transformers`, the version, and `types`, model type -> [table, outcome]."""
    return dict(json.loads(RECORD.read_text("utf-8")))


def installed_types() -> list[str]:
    """Every model type of the installed transformers."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    return sorted(CONFIG_MAPPING_NAMES)


def fresh_process() -> Any:
    """One process, replaced now and then: peers keep what they have made."""
    return multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=25)


def main(types: list[str]) -> int:
    """Walk the types, all where none is given, and write the record."""
    import transformers

    unknown = sorted(set(types) - set(installed_types()))
    if unknown:
        sys.exit(f"no model types of transformers {transformers.__version__}: {', '.join(unknown)}")
    found = recorded()["types"] if RECORD.exists() else {}
    pool = fresh_process()
    for model_type in types or installed_types():
        try:
            found[model_type] = list(pool.apply_async(outcome, (model_type,)).get(_SECONDS))
        except AssertionError as error:
            found[model_type] = ["", f"{WRONG}: {_short(error)}"]
        except multiprocessing.TimeoutError:
            found[model_type] = ["", f"no answer after {_SECONDS} s"]
            pool.terminate()
            pool = fresh_process()
        sys.stdout.write(f"{model_type}: {', '.join(found[model_type])}\n")
        sys.stdout.flush()
    pool.terminate()
    record = {"transformers": transformers.__version__, "types": dict(sorted(found.items()))}
    RECORD.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", "utf-8")
    return 1 if any(outcome.startswith(WRONG) for _, outcome in found.values()) else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
