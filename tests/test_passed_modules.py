"""The number of modules of the package in which each verb calls a function.

To follow a `save`, one reads these modules. The limits may only go down.

A module counts if a function of it, a method, a lambda or a generator, is called while the verb runs, in any thread
or worker. What runs when a module is imported does not count: everything is imported before, once. Each verb has a
process of its own, forked after that, so that no result is cached that it would compute; `__init__` methods of
dataclasses have no source and do not count.

Every verb here changes dialects: one that keeps names passes by the translation.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.checkpoints import tiny

CAPS = {"convert": 46, "load": 44, "save": 49, "work": 47, "resume": 66}
"""Verb -> modules that it passes at most."""

PROGRAM = """
import concurrent.futures, importlib, json, multiprocessing, os, pathlib, sys, threading
import torch
import transformers
from torch.distributed.fsdp import fully_shard
import transaxle as tx
from transaxle.cli import main

src, *targets = sys.argv[1:]
home = os.path.dirname(tx.__file__) + os.sep
for file in pathlib.Path(home).rglob("*.py"):
    if file.stem != "__main__":
        dotted = ".".join(("transaxle", *file.relative_to(home).with_suffix("").parts))
        importlib.import_module(dotted.removesuffix(".__init__"))
for dst in targets:
    if not (child := os.fork()):
        verb = pathlib.Path(dst).name
        break
    if os.waitpid(child, 0)[1]:
        sys.exit(f"{dst} failed")
else:
    sys.exit()
passed = set()

def watch(frame, event, _):
    code = frame.f_code
    if event == "call" and code.co_filename.startswith(home) and code.co_name != "<module>":
        passed.add(code.co_filename[len(home):])

def begin():
    threading.setprofile(watch)
    sys.setprofile(watch)

def end():
    sys.setprofile(None)
    threading.setprofile(None)
    pathlib.Path(f"{dst}.{os.getpid()}.json").write_text(json.dumps(sorted(passed)))

def begin_worker():
    begin()
    multiprocessing.util.Finalize(None, end, exitpriority=1)

def titan_state():
    with tx.open(src) as checkpoint:
        titan = checkpoint.as_dialect("torchtitan")
        return {name: torch.zeros(tensor.shape, dtype=torch.bfloat16) for name, tensor in titan.items()}

def sharded_model(store):
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(src))
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters())

def forget_caches():
    for module in list(sys.modules.values()):  # of what opening the source has cached
        if getattr(module, "__name__", "").startswith("transaxle"):
            for function in vars(module).values():
                if hasattr(function, "cache_clear"):
                    function.cache_clear()

if verb == "convert":
    work = lambda: main(["convert", src, dst, "--to", "safetensors:transformers"])
elif verb == "work":
    pool = concurrent.futures.ProcessPoolExecutor(2, multiprocessing.get_context("fork"), begin_worker)
    work = lambda: tx.convert(src, dst, to="safetensors:transformers", on=pool, items=4)
elif verb == "resume":
    other = os.fork()
    rank = 0 if other else 1
    model, optimizer = sharded_model(dst + ".store")
    model(torch.zeros(1, 4, dtype=torch.int64)).logits.sum().backward()
    optimizer.step()
    tx.save(model, dst, to="dcp:torchtitan", optimizer=optimizer)
    work = lambda: tx.load(model, dst, optimizer=optimizer)
else:
    prepared = titan_state()
    load, save = tx.load, tx.save
    work = {"load": lambda: load(prepared, src), "save": lambda: save(prepared, dst, to="hf", config=src)}[verb]
forget_caches()
begin()
result = work()
end()
if verb == "work":
    pool.shutdown()
if verb == "resume":
    torch.distributed.destroy_process_group()
    if other and os.waitpid(other, 0)[1]:
        sys.exit("the other rank failed")
sys.exit(result if isinstance(result, int) else 0)
"""


@pytest.mark.oracle
def test_each_verb_calls_few_modules(tmp_path: Path) -> None:
    """Count the modules of each verb on a tiny mixture of experts, from one dialect to another."""
    source = tiny(tmp_path / "source")
    targets = {verb: str(tmp_path / verb) for verb in CAPS}
    subprocess.run([sys.executable, "-c", PROGRAM, str(source), *targets.values()], check=True, timeout=600)
    modules: dict[str, set[str]] = {verb: set() for verb in CAPS}
    for file in tmp_path.glob("*.json"):
        modules[file.name.partition(".")[0]] |= set(json.loads(file.read_text()))
    for verb, names in modules.items():
        assert any(name.startswith("axes/translation/") for name in names), (verb, sorted(names))
        assert len(names) <= CAPS[verb], (verb, sorted(names))
