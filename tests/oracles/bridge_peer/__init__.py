"""Megatron-Bridge 0.6.2 as a peer: what it makes of the hub's tensors in real megatron-core 0.19.2 models, on a CPU.

It needs another transformers and megatron-core than the other peers, so that it runs in an environment of its own:
`make megatron` installs `requirements.txt` into `.venv-megatron` and runs the tests that are marked `megatron`.
"""

from __future__ import annotations

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

_PROBES = Path(__file__).parents[3] / "src/transaxle/readers/probes"


def _probe_module(name: str) -> ModuleType:
    """Return a module beside the probes; Megatron's environment has no Transaxle to import it from."""
    spec = spec_from_file_location(name, _PROBES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


without_cuda, without_kernels = map(_probe_module, ("without_cuda", "without_kernels"))
