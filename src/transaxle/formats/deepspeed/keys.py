"""The words of DeepSpeed's checkpoints, and values under them that are checked.

Every word of DeepSpeed's checkpoints and of their universal-checkpoint metadata, each spelled once.

The names are DeepSpeed's own (0.19.8: `checkpoint/constants.py`, `module_inject/layers.py`); the forms they stand for
are described where they are read.

**Checked values**: members of a stranger's dicts, each of which must exist and have the right type.

A checkpoint's dicts are read in many places. With this class each place states its expectation in one line, and a file
that holds something else is refused with its name and the path inside it.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import isfinite
from typing import Any, Final

from transaxle.errors import TransaxleError, refuse
from transaxle.formats import registry
from transaxle.formats import training_state as groups

FORMAT: Final = registry.DEEPSPEED.name
UNIVERSAL: Final = registry.UNIVERSAL.name

# Files.
LATEST: Final = registry.LATEST
LATEST_UNIVERSAL: Final = registry.LATEST_UNIVERSAL
MODEL_END: Final = registry.MODEL_END
OPTIM_END: Final = "_optim_states.pt"
ZERO_FOLDER: Final = registry.DEEPSPEED_ZERO
OPTIMIZER_FILE: Final = "optimizer_state.pt"
STATE_END: Final = ".pt"

# A rank's model file.
MODULE: Final = "module"
BUFFER_NAMES: Final = "buffer_names"
OPTIMIZER: Final = "optimizer"
PARAM_SHAPES: Final = "param_shapes"
FROZEN_SHAPES: Final = "frozen_param_shapes"
FROZEN_FRAGMENTS: Final = "frozen_param_fragments"
SHARED: Final = "shared_params"
DIMENSIONS: Final = "checkpoint_parallel_dimensions"
PP_DEGREE: Final = "pp_degree"
TP_DEGREE: Final = "tp_degree"
DP_WORLD: Final = "dp_world_size"
MP_WORLD: Final = "mp_world_size"
GLOBAL_STEPS: Final = "global_steps"
GLOBAL_SAMPLES: Final = "global_samples"
SKIPPED_STEPS: Final = "skipped_steps"
SCHEDULER: Final = "lr_scheduler"
EXPERT_LAYERS: Final = ("ds_autoep_layers", "autoep_layers")
NUM_EXPERTS: Final = "num_experts"
EXPERTS: Final = ".deepspeed_experts."
"""Stands before an expert's number in the names of DeepSpeed's own mixtures."""
CONFIG: Final = "ds_config"
DATA_BEFORE_EXPERTS: Final = "use_data_before_expert_parallelism"
ZERO_CONFIG: Final = "zero_optimization"
ROUND_ROBIN: Final = "round_robin_gradients"
VERSION: Final = "ds_version"

# A rank's optimizer file.
STATE: Final = "optimizer_state_dict"
BASE_STATE: Final = "base_optimizer_state"
BASE_STEP: Final = "base_optimizer_state_step"
MASTER: Final = "single_partition_of_fp32_groups"
MASTER_ZERO3: Final = "fp32_flat_groups"
MASTERS: Final = "fp32_groups"
MASTERS_FLAT: Final = "fp32_groups_flat"
PARTITION_GROUPS: Final = "ds_zero_partition_groups"
GROUP_PADDINGS: Final = "group_paddings"
PARAM_PADDINGS: Final = "param_alignment_paddings"
PARTITION_COUNT: Final = "partition_count"
MAPPINGS: Final = "param_slice_mappings"
ZERO_STAGE: Final = "zero_stage"
LOSS_SCALER: Final = "loss_scaler"
DYNAMIC_SCALE: Final = "dynamic_loss_scale"
OVERFLOW: Final = "overflow"
CLIP: Final = "clip_grad"
STATES: Final = "state"
GROUPS: Final = groups.GROUPS
PARAMS: Final = groups.PARAMS
STEP: Final = "step"
FP32: Final = "fp32"

# One state of a parameter in a universal checkpoint.
PARAM: Final = "param"
CAT_DIM: Final = "cat_dim"
SUB_COUNT: Final = "param_n_sub_params"
SUB_SHAPE: Final = "sub_param_shape"
VOCABULARY: Final = "vocab_tensor"
EXPERT: Final = "is_expert_param"

# Universal-checkpoint metadata of a model, in every model and optimizer file.
INFO: Final = "universal_checkpoint_info"
INFO_VERSION: Final = "universal_checkpoint_version"
INFO_CURRENT: Final = 0.4
"""From this version on, sub-parameters come with the width of every rank's part."""
REPLICATED_PATTERNS: Final = "tp_replicated_parameter_patterns"
AVERAGED_PATTERNS: Final = "parameter_to_average_patterns"
ROW_PATTERNS: Final = "parameter_with_row_parallelism_patterns"
VOCABULARY_PATTERNS: Final = "vocabulary_parameter_patterns"
PIPELINE_PATTERNS: Final = "pipeline_replicated_parameter_patterns"
HALVES_PATTERNS: Final = "parameter_with_2_sub_params_cat_dim_0"
SUB_PARAMS: Final = "parameter_with_sub_params"
SHARD_WIDTHS: Final = "sub_param_shard_widths"
UNSUPPORTED_PATTERNS: Final = "autotp_unsupported_parameter_patterns"
TRUE_VOCABULARY: Final = "original_vocab_size"
PADDED_VOCABULARY: Final = "padded_vocab_size"
PATTERNS: Final = "patterns"
SHAPE: Final = "shape"

# The affine form.
AFFINE: Final = "affine_map"
AFFINE_VERSION: Final = "version"
AFFINE_CURRENT: Final = 1
AFFINE_PARAMS: Final = "params"
RANKS: Final = "ranks"
SHARD_SHAPE: Final = "shard_shape"
PIECES: Final = "pieces"
SOURCE: Final = "source"
DEST: Final = "dest"
LOCATIONS: Final = "locations"
SCALE: Final = "scale"

# The record that a live parameter carries.
RECORD: Final = "ds_autotp_universal_checkpoint_meta"
PARTITION_TYPE: Final = "partition_type"
PARTITION_DIM: Final = "partition_dim"
LOGICAL_SHAPE: Final = "logical_shape"
OUTPUT_SHAPE: Final = "output_shape"
ORIGINAL_SHAPE: Final = "original_shape"
SUB_SIZES: Final = "sub_param_sizes"
PARTITION_SIZES: Final = "partition_sizes"
TARGET_SHAPE: Final = "target_partition_shape"
IS_BIAS: Final = "is_bias"
REPLICATED: Final = "replicated"
CONVERSION: Final = "conversion"
REASON: Final = "unsupported_reason"
COLUMN: Final = "column"
ROW: Final = "row"


_LARGEST = 1 << 62
_SHOWN = 6


class CheckedValue:
    """A value with its path.

    Args:
        value: as a pickle described it.
        file: the file that holds it.
        path: keys and indices that lead to it.
    """

    __slots__ = ("file", "path", "value")

    def __init__(self, value: Any, file: str, path: tuple[str, ...] = ()) -> None:
        self.value = value
        self.file = file
        self.path = path

    def fault(self, message: str) -> TransaxleError:
        """Build the refusal of a file whose content is not what it must be."""
        way = " > ".join(self.path) or "the file"
        return refuse("CORRUPT", f"{way}: {message}", file=self.file)

    def get(self, key: str | int) -> CheckedValue | None:
        """Return a member of a dict; None where it is missing or None.

        Raises:
            Refused: CORRUPT where this is no dict.
        """
        value = self._dict().get(key)
        return None if value is None else CheckedValue(value, self.file, (*self.path, str(key)))

    def __getitem__(self, key: str | int) -> CheckedValue:
        member = self.get(key)
        if member is None:
            raise self.fault(f"{key!r} is missing")
        return member

    def items(self) -> Iterator[tuple[Any, CheckedValue]]:
        """Yield the members of a dict.

        Raises:
            Refused: CORRUPT where this is no dict.
        """
        for key, value in self._dict().items():
            yield key, CheckedValue(value, self.file, (*self.path, str(key)))

    def named(self) -> Iterator[tuple[str, CheckedValue]]:
        """Yield the members of a dict whose keys are texts.

        Raises:
            Refused: CORRUPT where this is no such dict.
        """
        for key, node in self.items():
            if not isinstance(key, str):
                raise self.fault("the keys must be names")
            yield key, node

    def list(self) -> list[CheckedValue]:
        """Return the items of a list or a tuple.

        Raises:
            Refused: CORRUPT where this is neither.
        """
        if not isinstance(self.value, list | tuple):
            raise self.fault(f"expected a list, not {_shown(self.value)}")
        return [CheckedValue(value, self.file, (*self.path, str(index))) for index, value in enumerate(self.value)]

    @property
    def is_dict(self) -> bool:
        """Whether this is a dict."""
        return isinstance(self.value, dict)

    @property
    def is_list(self) -> bool:
        """Whether this is a list or a tuple."""
        return isinstance(self.value, list | tuple)

    def natural(self) -> int:
        """Return a number that counts something.

        Raises:
            Refused: CORRUPT for anything else.
        """
        value = self.value
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < _LARGEST:
            raise self.fault(f"expected a count, not {_shown(value)}")
        return value

    def real(self) -> float:
        """Return a finite number.

        Raises:
            Refused: CORRUPT for anything else.
        """
        value = self.value
        if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
            raise self.fault(f"expected a finite number, not {_shown(value)}")
        return float(value)

    def text(self) -> str:
        """Return a text.

        Raises:
            Refused: CORRUPT for anything else.
        """
        if not isinstance(self.value, str):
            raise self.fault(f"expected a text, not {_shown(self.value)}")
        return self.value

    def flag(self) -> bool:
        """Return True or False.

        Raises:
            Refused: CORRUPT for anything else.
        """
        if not isinstance(self.value, bool):
            raise self.fault(f"expected True or False, not {_shown(self.value)}")
        return self.value

    def naturals(self) -> tuple[int, ...]:
        """Return a list of counts: a shape, or widths.

        Raises:
            Refused: CORRUPT for anything else.
        """
        return tuple(item.natural() for item in self.list())

    def texts(self) -> tuple[str, ...]:
        """Return a list of texts.

        Raises:
            Refused: CORRUPT for anything else.
        """
        return tuple(item.text() for item in self.list())

    def _dict(self) -> dict[Any, Any]:
        if not isinstance(self.value, dict):
            raise self.fault(f"expected a dict, not {_shown(self.value)}")
        return self.value


def _shown(value: object) -> str:
    """Return a short text about a value; it may be large, or hold itself."""
    if isinstance(value, str | int | float) or value is None:
        text = repr(value) if not isinstance(value, int) or abs(value) < _LARGEST else "a very large number"
        return text if len(text) <= 10 * _SHOWN else f"{text[: 10 * _SHOWN]}…"
    return f"a {type(value).__name__}"
