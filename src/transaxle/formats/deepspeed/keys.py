"""The dict keys in DeepSpeed's checkpoints and universal metadata, as constants, and checked access to the values.

The keys are those of DeepSpeed 0.19.8 (`checkpoint/constants.py`, `module_inject/layers.py`); the code that reads a key
describes the key's value.

`CheckedValue` wraps a value of an untrusted dict. Code that reads a value from such a dict calls the method for the
type that it expects; a value of any other type is refused, with the file's name and the path to the value.
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

# Names and endings of DeepSpeed's files.
LATEST: Final = registry.LATEST
LATEST_UNIVERSAL: Final = registry.LATEST_UNIVERSAL
MODEL_END: Final = registry.MODEL_END
OPTIM_END: Final = "_optim_states.pt"
ZERO_FOLDER: Final = registry.DEEPSPEED_ZERO
OPTIMIZER_FILE: Final = "optimizer_state.pt"
STATE_END: Final = ".pt"

# Keys in a rank's model file.
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
EXPERT_PARALLEL: Final = "expert_parallel"
"""Key of AutoEP's settings in DeepSpeed's config."""
FOLDING: Final = "folding"
NUM_EXPERTS: Final = "num_experts"
EXPERTS: Final = ".deepspeed_experts."
"""Text before the expert's number in parameter names of DeepSpeed's own MoE layers."""
CONFIG: Final = "ds_config"
DATA_BEFORE_EXPERTS: Final = "use_data_before_expert_parallelism"
ZERO_CONFIG: Final = "zero_optimization"
ROUND_ROBIN: Final = "round_robin_gradients"
VERSION: Final = "ds_version"

# Keys in a rank's optimizer file.
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

# Keys in the file of one optimizer state of one parameter in a universal checkpoint.
PARAM: Final = "param"
CAT_DIM: Final = "cat_dim"
SUB_COUNT: Final = "param_n_sub_params"
SUB_SHAPE: Final = "sub_param_shape"
VOCABULARY: Final = "vocab_tensor"
EXPERT: Final = "is_expert_param"

# Keys of the universal-checkpoint metadata, which every model file and every optimizer file contains.
INFO: Final = "universal_checkpoint_info"
INFO_VERSION: Final = "universal_checkpoint_version"
INFO_CURRENT: Final = 0.4
"""Newest version of the universal-checkpoint metadata, which records every sub-parameter's width on every rank."""
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

# Keys of universal-checkpoint metadata in the affine form (see `spread`).
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

# Keys of the record that AutoTP attaches to a parameter in memory.
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
_MAX_SHOWN = 6


class CheckedValue:
    """A value from a pickle file, whose type is checked when the value is read.

    Args:
        value: the unpickled value.
        file: name of the pickle file, for error messages.
        path: dict keys and list indices that lead to the value inside the file.
    """

    __slots__ = ("file", "path", "value")

    def __init__(self, value: Any, file: str, path: tuple[str, ...] = ()) -> None:
        self.value = value
        self.file = file
        self.path = path

    def fault(self, message: str) -> TransaxleError:
        """Return a CORRUPT error that names the file and the path to this value."""
        way = " > ".join(self.path) or "the file"
        return refuse("CORRUPT", f"{way}: {message}", file=self.file)

    def get(self, key: str | int) -> CheckedValue | None:
        """Return the value of a key in this dict; None if the key is missing or its value is None.

        Raises:
            Refused: with the code CORRUPT if this `CheckedValue` is not a dict.
        """
        value = self._dict().get(key)
        return None if value is None else CheckedValue(value, self.file, (*self.path, str(key)))

    def __getitem__(self, key: str | int) -> CheckedValue:
        member = self.get(key)
        if member is None:
            raise self.fault(f"{key!r} is missing")
        return member

    def items(self) -> Iterator[tuple[Any, CheckedValue]]:
        """Yield the keys and values of this dict.

        Raises:
            Refused: with the code CORRUPT if this `CheckedValue` is not a dict.
        """
        for key, value in self._dict().items():
            yield key, CheckedValue(value, self.file, (*self.path, str(key)))

    def string_items(self) -> Iterator[tuple[str, CheckedValue]]:
        """Yield the keys and values of this dict; all keys must be strings.

        Raises:
            Refused: with the code CORRUPT if this `CheckedValue` is not a dict, or a key is not a string.
        """
        for key, node in self.items():
            if not isinstance(key, str):
                raise self.fault("the keys must be names")
            yield key, node

    def list(self) -> list[CheckedValue]:
        """Return the elements of this list or tuple.

        Raises:
            Refused: with the code CORRUPT if this `CheckedValue` is neither a list nor a tuple.
        """
        if not isinstance(self.value, list | tuple):
            raise self.fault(f"expected a list, not {_summary(self.value)}")
        return [CheckedValue(value, self.file, (*self.path, str(index))) for index, value in enumerate(self.value)]

    @property
    def is_dict(self) -> bool:
        """Whether the value is a dict."""
        return isinstance(self.value, dict)

    @property
    def is_list(self) -> bool:
        """Whether the value is a list or a tuple."""
        return isinstance(self.value, list | tuple)

    def natural(self) -> int:
        """Return the value as a non-negative int.

        Raises:
            Refused: with the code CORRUPT if the value is not a non-negative int.
        """
        value = self.value
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < _LARGEST:
            raise self.fault(f"expected a count, not {_summary(value)}")
        return value

    def real(self) -> float:
        """Return the value as a finite float.

        Raises:
            Refused: with the code CORRUPT if the value is not a finite number.
        """
        value = self.value
        if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
            raise self.fault(f"expected a finite number, not {_summary(value)}")
        return float(value)

    def text(self) -> str:
        """Return the value, which must be a string.

        Raises:
            Refused: with the code CORRUPT if the value is not a string.
        """
        if not isinstance(self.value, str):
            raise self.fault(f"expected a text, not {_summary(self.value)}")
        return self.value

    def flag(self) -> bool:
        """Return the value, which must be a bool.

        Raises:
            Refused: with the code CORRUPT if the value is not a bool.
        """
        if not isinstance(self.value, bool):
            raise self.fault(f"expected True or False, not {_summary(self.value)}")
        return self.value

    def naturals(self) -> tuple[int, ...]:
        """Return the value as a tuple of non-negative ints, such as a shape.

        Raises:
            Refused: with the code CORRUPT if the value is not a list of non-negative ints.
        """
        return tuple(item.natural() for item in self.list())

    def texts(self) -> tuple[str, ...]:
        """Return the value as a tuple of strings.

        Raises:
            Refused: with the code CORRUPT if the value is not a list of strings.
        """
        return tuple(item.text() for item in self.list())

    def _dict(self) -> dict[Any, Any]:
        if not isinstance(self.value, dict):
            raise self.fault(f"expected a dict, not {_summary(self.value)}")
        return self.value


def _summary(value: object) -> str:
    """Return a short description of a value; it is safe for values that are huge or contain themselves."""
    if isinstance(value, str | int | float) or value is None:
        text = repr(value) if not isinstance(value, int) or abs(value) < _LARGEST else "a very large number"
        return text if len(text) <= 10 * _MAX_SHOWN else f"{text[: 10 * _MAX_SHOWN]}…"
    return f"a {type(value).__name__}"
