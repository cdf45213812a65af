"""Every word of DeepSpeed's checkpoints and of their universal-checkpoint metadata, each spelled once.

The names are DeepSpeed's own (0.19.8: `checkpoint/constants.py`, `module_inject/layers.py`); the forms they stand for
are described where they are read.
"""

from __future__ import annotations

from typing import Final

from transaxle.formats import builtin_formats
from transaxle.formats.training_state import state_groups as groups

FORMAT: Final = builtin_formats.DEEPSPEED.name
UNIVERSAL: Final = builtin_formats.UNIVERSAL.name

# Files.
LATEST: Final = builtin_formats.LATEST
LATEST_UNIVERSAL: Final = builtin_formats.LATEST_UNIVERSAL
MODEL_END: Final = builtin_formats.MODEL_END
OPTIM_END: Final = "_optim_states.pt"
ZERO_FOLDER: Final = builtin_formats.DEEPSPEED_ZERO
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
