"""What `make test` leaves of the longest sweeps to `make oracle`, which runs them whole.

A sweep asks the same of many cases, each of which starts ranks, workers or browsers. What is left out here is like a
case that stays, or goes through less. A new case is tried for every change, until it is named here.
What is left as a whole has the mark `oracle` where it stands.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import pytest

LEFT: Mapping[str, Mapping[str, Sequence[str]]] = {
    "engine/distribute/test_faulty_store.py": {
        "test_an_answer_to_the_last_call_that_is_lost_is_no_failure": ("late-slow down-True", "truncate-None-True"),
        "test_what_does_not_pass_ends_one_process_in_time": ("slow down", "stall"),
        "test_what_does_not_pass_is_an_error_in_time": ("reset", "slow down"),
        "test_what_passes_is_tried_again": (
            "slow down-4-by_workers", "reset-6-in_one_process", "truncate-8-by_workers", "stall-12-in_one_process",
        ),
    },
    "formats/deepspeed/universal/test_resume.py": {
        "test_deepspeed_resumes_bit_for_bit": (
            "z3-fp32-w2--z2-fp32-w4.converted", "z1-bf16-w2--z1-bf16-w4.converted", "tied-z3-w2--tied-z1-w2.converted",
            "mixtral-z1-w2--mixtral-z3-w2.converted", "tp2-z2-fp32--tp2-dp2-z3.converted",
            "tp2-dp2-fused--tp2-fused.converted", "tp4--tp4.converted", "tp2-wide--tp2-wide.converted",
            "tp2-wide--tp1-wide-z3.converted", "tp1-wide--tp1-wide.converted", "tp1-wide--tp4.converted",
            "tp4-fused--tp1-wide-fused.converted", "tp2-wide-fused--tp4-fused.converted",
            "tp4-uneven--tp1-uneven.converted", "pp2--pp2-dp2.converted",
        ),
    },
    "formats/pickled/test_hostile.py": {"test_memory_and_time_have_an_end": ("dicts", "laughs", "marks", "nothing")},
    "formats/store/test_upload.py": {
        "test_no_reader_ever_sees_a_mixture": ("bucket-1-1", "bucket-1-3", "bucket-3-1", "bucket-None-3"),
    },
    "live/conversion/test_killed_ranks.py": {"test_a_rank_is_killed_and_resume_goes_on": ("1-12",)},
    "live/load/test_experts.py": {
        "test_a_cut_through_gate_and_up_gives_one_to_each_half": (
            "4-sizes1-step3p5", "8-sizes0-step3p5", "4-sizes0-qwen3_moe", "8-sizes1-qwen3_moe",
        ),
        "test_from_the_hub": ("8-sizes0", "4-sizes1"),
        "test_experts_one_by_one_and_back": ("8-sizes0", "4-sizes1"),
        "test_to_the_hub_and_back": ("8-sizes1", "4-sizes0"),
    },
    "live/reexpress/test_state_dict_adapter.py": {
        "test_experts_keep_their_places": ("8-placements1", "8-placements2", "8-placements3", "4-placements0"),
    },
    "live/save/test_killed_saves.py": {
        "test_killed_at_any_point": ("deepspeed-universal-199", "megatron_torch-83"),
    },
    "live/save/test_lost_store.py": {
        "test_a_store_that_is_lost_is_told_on_every_rank": ("sending-False", "appearing-False"),
    },
    "live/save/test_save_failures.py": {
        "test_a_background_save_that_fails_is_told_on_every_rank": ("killed-0", "full-1"),
    },
    "live/training/test_resume.py": {"test_training_goes_on_anywhere": ("llama",)},
    "nn/linear/test_training.py": {"test_training_goes_on_in_the_other_form_elsewhere": ("apart",)},
    "parallel/cuts/test_equal.py": {
        "test_every_kind_of_model": (
            "llama-2", "qwen2-3", "qwen2-4", "qwen3-2", "qwen3-3", "gemma3-2", "gemma3-3", "phi3-2", "phi3-4",
            "mixtral-2", "mixtral-3",
        ),
    },
    "parallel/cuts/test_nvfp4_training.py": {"test_training_goes_on_at_any_degree": ("nvfp4 training, flat",)},
    "parallel/cuts/test_quantized.py": {
        "test_codes_are_those_of_the_whole": ("float8", "mxfp8"),
        "test_training_goes_on_at_any_degree": ("float8", "float8_block", "mxfp8"),
        "test_training_is_that_of_the_whole": ("float8", "mxfp8"),
    },
    "parallel/test_between.py": {"test_every_degree_to_every_degree": ("phi3",)},
    "parallel/test_resume.py": {"test_training_goes_on_at_any_degree": ("even-True", "llama-True", "phi3-True")},
    "quant/modules/test_masters.py": {
        "test_a_model_from_nothing_gives_the_same_output": (
            "async_save-float8", "async_save-float8_block", "async_save-mxfp8", "async_save-nvfp4",
        ),
    },
    "quant/modules/test_resume.py": {
        "test_runs_go_on_at_any_degree": ("float8", "float8_block", "mxfp8", "nvfp4"),
    },
    "quant/nvfp4/test_sharded.py": {"test_fsdp_trains_as_one_rank": ("2",)},
    "quant/tensor/test_bands.py": {
        "test_training_and_checkpoints_are_those_of_one_rank": (
            "float8", "float8, E5M2", "float8_block", "mxfp8", "nvfp4", "nvfp4, 16x16", "nvfp4, both ways",
            "nvfp4 training",
        ),
    },
    "quant/tensor/test_fsdp.py": {
        "test_checkpoints_reshard_bit_for_bit": (
            "async-float8", "async-float8, E5M2", "async-float8_block, 1x128", "async-mxfp8", "async-nvfp4",
            "async-nvfp4, 16x16", "async-nvfp4, both ways", "async-nvfp4, 16x16, both ways",
        ),
        "test_training_goes_on_where_it_was": (
            "float8", "float8, E5M2", "float8_block, 1x128", "mxfp8", "nvfp4, 16x16", "nvfp4, 16x16, both ways",
        ),
        "test_training_is_that_of_one_rank": (
            "2-float8", "2-float8, E5M2", "2-float8_block", "2-float8_block, 1x128", "2-mxfp8", "2-mxfp8, both ways",
            "2-nvfp4", "2-nvfp4, 16x16", "2-nvfp4, both ways", "2-nvfp4, 16x16, both ways",
        ),
    },
    "refit/test_refit.py": {"test_rounds_of_two_jobs": ("config1-fsdp-hf", "config3-hsdp-bf16")},
    "reports/test_browser.py": {
        "test_a_page_fits_and_everyone_can_use_it": tuple(
            f"{page}-{look}"
            for page in ("page", "valued", "planned", "refused", "unopened", "finished", "differing", "sharded")
            for look in ("1440-dark", "390-light")
        ),
        "test_nothing_else_may_run": ("valued", "planned", "unopened", "finished"),
    },
    "test_examples.py": {"test_training_resumes_on_the_same_and_on_other_ranks": ("hf",)},
}  # fmt: skip
"""File, from `tests` -> function -> the ids of its cases that are left to `make oracle`."""


def leave_to_oracle(items: Iterable[pytest.Item], *, all_of_them: bool) -> None:
    """Mark what is left to `make oracle`.

    Args:
        items: that were collected.
        all_of_them: nothing was chosen, so that each case of `LEFT` must be among them.

    Raises:
        pytest.UsageError: a case is not there, since a test or its cases have other names now.
    """
    left = {
        f"tests/{file}::{test}[{case}]"
        for file, tests in LEFT.items()
        for test, cases in tests.items()
        for case in cases
    }
    for item in items:
        if item.nodeid in left:
            left.remove(item.nodeid)
            item.add_marker(pytest.mark.oracle)
    if all_of_them and left:
        raise pytest.UsageError(f"tests/sampled.py leaves out what is not there: {', '.join(sorted(left))}")
