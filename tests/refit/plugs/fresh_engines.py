"""In vLLM's environment: engines that are started from files, and what they say to the prompts.

    python -m tests.refit.plugs.fresh_engines TP

reads orders, one a line: `[FOLDER, [OTHER, ...], PUSHED]`. It starts an engine from FOLDER, lets it load each OTHER by
vLLM's own reload, and pushes PUSHED into it from this process. It prints one line of JSON: what the engine says each
time.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from tests.refit.plugs.servers import PROMPTS, TOKENS


def _answers(llm: Any) -> list[list[int]]:
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
    # One at a time, as the servers are asked: sums in another order decide near ties.
    found = [llm.generate({"prompt_token_ids": list(p)}, sampling, use_tqdm=False)[0] for p in PROMPTS]
    return [list(each.outputs[0].token_ids) for each in found]


def _source(model: Any) -> bool:
    """Tell whether our source gives vLLM's trainer engine what its own source does."""
    import torch
    from vllm.distributed.weight_transfer import ModuleSource, WeightSource
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerWeightTransferEngine

    import transaxle as tx

    ours, theirs = tx.refit.VllmSource(model, bucket="100KB"), ModuleSource(model)
    checked = NCCLTrainerWeightTransferEngine._checked_iter
    found, usual = (dict(checked(each, each.metadata())) for each in (ours, theirs))
    assert found.keys() == usual.keys()
    assert ours.groups() == WeightSource.groups(ours)
    assert len(ours.groups()) > len(model.model.layers)
    for first, second in zip(ours.iter_groups(), WeightSource.iter_groups(ours), strict=True):
        assert first[0] == second[0]
        assert all(map(torch.equal, first[1], second[1]))
    return all(torch.equal(tensor, usual[name]) for name, tensor in found.items())


def _pushed(llm: Any, folder: str) -> tuple[str, bool, list[list[int]]]:
    """Push a model of this process into an engine of this process."""
    import torch
    from transformers import AutoModelForCausalLM

    import transaxle as tx

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    same = _source(model)
    with tx.refit.VllmRefit(model, llm, dtype="bf16") as refit:
        llm.llm_engine.add_request("held", {"prompt_token_ids": [3]}, _one_token())
        try:
            refit.push()
            said = ""
        except tx.TransaxleError as error:
            said = str(error)
        while llm.llm_engine.has_unfinished_requests():
            llm.llm_engine.step()
        refit.push()
    return said, same, _answers(llm)


def _one_token() -> Any:
    from vllm import SamplingParams

    return SamplingParams(max_tokens=1, detokenize=False)


def _engine(folder: str, tp: int) -> Any:
    from vllm import LLM

    return LLM(
        model=folder, skip_tokenizer_init=True, dtype="bfloat16", enforce_eager=True, max_model_len=128,
        tensor_parallel_size=tp, disable_custom_all_reduce=True, weight_transfer_config={"backend": "transaxle"},
    )  # fmt: skip


def main(tp: int) -> None:
    """Take orders until there are no more."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what vLLM prints is no answer
    import vllm  # noqa: F401 - while nobody waits

    for line in sys.stdin:
        folder, others, pushed = json.loads(line)
        llm = _engine(folder, tp)
        said: list[Any] = [_answers(llm)]
        for other in others:
            llm.collective_rpc("reload_weights", kwargs={"weights_path": other})
            llm.reset_prefix_cache()
            said.append(_answers(llm))
        if pushed:
            said.append(_pushed(llm, pushed))
        del llm
        answers.write(json.dumps(said) + "\n")
        answers.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]))
