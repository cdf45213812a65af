"""How the family's table reads the stored names of a checkpoint: its family and dialect, the sizes of its axes, and the
table line of each name.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

from transaxle.axes.layout.bind import (
    OPTIM,
    BoundNames,
    bind,
    split_slot,
    with_counts,
    with_state_of,
)
from transaxle.axes.notation.family import Family, Sizes
from transaxle.encodings.conventions.packed_methods import (
    CONV1D_TYPES,
    OF_BITSANDBYTES,
    PACKED_CODES,
    PACKED_FILES,
    PACKED_METHODS,
    QUANT_STATE,
    ROW_SCALES,
)
from transaxle.encodings.conventions.quantization import MODELOPT_CONFIG, read_packed
from transaxle.encodings.encoding import EncodedTensor
from transaxle.engine.checkpoint.manifest import Manifest, read_manifest
from transaxle.engine.checkpoint.peft_adapter import ADAPTED, adapter_config, check_model
from transaxle.engine.checkpoint.recognise import KEEP, Reading, keep_names, model_types, pick_family, recognise
from transaxle.engine.checkpoint.settings import CONFIG, Settings, read_stored_config
from transaxle.engine.views.encoded import Catalog, ForeignForm, catalog, refuse_section
from transaxle.errors import TransaxleError, refuse
from transaxle.formats.catalog import Container
from transaxle.formats.registry import ADAPTER_CONFIG

_KNOWN_TO_RUN = (
    "num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "num_experts",
    "num_local_experts", "n_routed_experts", "moe_intermediate_size", "q_lora_rank", "kv_lora_rank", "v_head_dim",
    "qk_nope_head_dim", "qk_rope_head_dim",
)  # fmt: skip
"""Config keys whose values must equal the sizes recorded in the checkpoint's own files, if these files record any. If
the sizes of two axes that are merged into one dim were swapped, the shapes would still fit.
"""
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_SAME: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(_EXPERTS, _EXPERTS),
    "moe_intermediate_size": ("moe_intermediate_size", "intermediate_size"),
}
"""Config key of a size -> all keys that may state the same size; transformers also writes keys with meaningless
defaults.
"""
_VOCABULARY, _ROWS = "vocab_size", "n"
"""Config key of the vocabulary size, and the axis of the vocabulary's rows. Rows beyond that size are padding, which is
not converted.
"""


def check_same(config: Mapping[str, Any], recorded: Mapping[str, Any], axes: Mapping[str, int]) -> None:
    """Check that a config agrees with the sizes in the checkpoint's own files, and that its vocabulary is not smaller.

    Args:
        config: the config of the model.
        recorded: the sizes that the checkpoint's own files record.
        axes: axis sizes given by the user, which take precedence over the config.

    Raises:
        Refused: with code SHAPE_MISMATCH, if the config differs from the recorded sizes.
    """
    shared_keys = [key for key in _KNOWN_TO_RUN if config.get(key) is not None and key in recorded]
    differing = [
        key for key in shared_keys if all(config.get(same) != recorded[key] for same in _SAME.get(key, (key,)))
    ]
    if differing:
        config_sizes, recorded_sizes = (
            ", ".join(f"{key} {of[key]!r}" for key in differing) for of in (config, recorded)
        )
        message = f"the config says {config_sizes}, but the run that saved the checkpoint says {recorded_sizes}"
        hint = "Give the config.json of this model, or no config: the sizes are in the checkpoint."
        raise refuse("SHAPE_MISMATCH", message, hint=hint)
    config_rows, recorded_rows = config.get(_VOCABULARY), recorded.get(_VOCABULARY)
    if (
        isinstance(config_rows, int)
        and isinstance(recorded_rows, int)
        and config_rows < recorded_rows
        and _ROWS not in axes
    ):
        message = (
            f"the config says {_VOCABULARY} {config_rows}, but the run that saved the checkpoint says {recorded_rows}; "
            f"{recorded_rows - config_rows} rows of its vocabulary would be left out"
        )
        hint = (
            f"Give the config.json of this model; if these rows only pad its vocabulary: --axis {_ROWS}={config_rows}."
        )
        raise refuse("SHAPE_MISMATCH", message, hint=hint)


def _check_axes(family: Family, axes: Mapping[str, int]) -> None:
    """Refuse sizes that the user gives for axes that a family does not have, because such sizes would have no effect.

    Raises:
        UsageError: with code UNKNOWN_AXIS, for each axis that the family does not have.
    """
    for axis in axes:
        if axis not in family.axes:
            message = f"the family {family.name} has no axis {axis!r}"
            raise refuse("UNKNOWN_AXIS", message, hint=f"Axes: {', '.join(sorted(family.axes))}.")


def show_foreign(container: Container, config: Mapping[str, Any], *, is_given: bool = False) -> ForeignForm:
    """Return a checkpoint of GPTQ, AWQ or bitsandbytes in a form in which its tensors can be read; any other as it is.

    Args:
        container: the stored tensors.
        config: the model's config.
        is_given: whether the user gave the config, whose section is then right whatever other files say.

    Raises:
        TransaxleError: one error with the refusals of all tensors that do not fit together.
    """
    names = () if is_given and read_packed(config) else PACKED_FILES.keys() & {*container.carried}
    has_codes = any(name.rpartition(".")[2] == PACKED_CODES for name in container.entries) if names else False
    files = {name: read_stored_config(container.storage, name) for name in sorted(names) if has_codes}
    method = read_packed(config, files)
    if method is not None:
        _refuse_conv1d(config, PACKED_METHODS[method.name])
        # imported inside the function, because few checkpoints need these modules
        from transaxle.engine.views.packed_integers import as_compressed_tensors

        return as_compressed_tensors(container, config, method)
    if any(QUANT_STATE in name or name.endswith(ROW_SCALES) for name in container.entries):
        from transaxle.engine.views.bitsandbytes import show_blocks

        _refuse_conv1d(config, PACKED_METHODS[OF_BITSANDBYTES])
        changed, config = show_blocks(container, config)
        return ForeignForm(changed, config, "" if changed is container else PACKED_METHODS[OF_BITSANDBYTES])
    return ForeignForm(container, config)


def _refuse_conv1d(config: Mapping[str, Any], program: str) -> None:
    """Refuse a model whose weights are stored transposed once they are quantized, and not otherwise."""
    model_type = config.get("model_type")
    if model_type in CONV1D_TYPES:
        message = f"{program} transposes the weights of {model_type}, whose layers are Conv1D; they are not read"
        raise refuse("UNSUPPORTED", message, file=CONFIG, hint=KEEP)


class StoredNames:
    """How the family's table reads a checkpoint's stored names. This object is computed once, and shared by all views
    of the files.

    Args:
        container: the files of the checkpoint.
        settings: the user's settings for reading the checkpoint.
        undecoded: the stored names of the undecoded checkpoint, if `container` is a decoded view.
    """

    def __init__(self, container: Container, settings: Settings, undecoded: StoredNames | None) -> None:
        self._container = container
        self._settings = settings
        self._undecoded = undecoded

    @cached_property
    def manifest(self) -> Manifest | None:
        """The checkpoint's `transaxle.json`; None if the file does not exist, describes files that have changed, or
        lacks tensors that are grafted.
        """
        if self._container.recoding.grafted:
            return None
        return read_manifest(self._container) if self._undecoded is None else self._undecoded.manifest

    @cached_property
    def catalog(self) -> Catalog:
        """The stored tensors as entries for the families' tables; an encoded tensor and its scales are one entry."""
        has_modelopt = MODELOPT_CONFIG in self._container.carried
        modelopt = read_stored_config(self._container.storage, MODELOPT_CONFIG) if has_modelopt else None
        try:
            form = show_foreign(self._container, self.config, is_given=self._settings.config is not None)
        except TransaxleError as error:
            refusals = refuse_section(error, self._container)
            return Catalog(self._container, self._container.entries, {}, None, refusals)
        return catalog(form.container, form.config, modelopt, form)

    @cached_property
    def is_adapter(self) -> bool:
        """Whether the tensors have the names that peft gives to the tensors of an adapter."""
        if ADAPTER_CONFIG not in self._container.carried or adapter_config(self._container) is None:
            return False
        return any(name.startswith(ADAPTED) for name in self._container.entries)

    @cached_property
    def decoded(self) -> Mapping[str, EncodedTensor]:
        """Tensor name -> stored encoding, for the tensors that this view decodes."""
        if self._undecoded is None:
            return {}
        stored_encoded = self._undecoded.catalog.encoded
        return {name: tensor for name, tensor in stored_encoded.items() if name not in self.catalog.encoded}

    @cached_property
    def encodings_in_files(self) -> Mapping[str, EncodedTensor]:
        """Tensor name -> stored encoding, for the tensors that this view shows in a different encoding."""
        if self._undecoded is None or not self._container.recoding.encodings:
            return {}
        encoded, stored = self.catalog.encoded, self._undecoded.catalog.encoded
        return {name: stored[name] for name in encoded if encoded[name].encoding.name != stored[name].encoding.name}

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """The model's config: the user's, or else the checkpoint's config.json, or else sizes from the checkpoint's own
        files.
        """
        if self._settings.config is not None:
            return self._settings.config
        if CONFIG in self._container.carried:
            return read_stored_config(self._container.storage)
        return self._container.config

    @property
    def reading(self) -> Reading:
        """Family and dialect of the stored tensor names.

        Raises:
            UsageError: with code UNKNOWN_FAMILY, if no family's table fits the names; with code AMBIGUOUS, if several
                fit.
        """
        if isinstance(self.reading_or_error, TransaxleError):
            raise self.reading_or_error
        return self.reading_or_error

    @cached_property
    def reading_or_error(self) -> Reading | TransaxleError:
        """Family and dialect of the stored tensor names, or the error that explains why they are unknown."""
        settings = self._settings
        dialect = settings.dialect
        try:
            family = settings.family and pick_family(settings.family, settings.families).name
            manifest_family = None if self.manifest is None else settings.families.get(self.manifest.family or "")
            if self.manifest is not None and manifest_family is not None:
                family = family or manifest_family.name
                if (
                    dialect is None
                    and family == manifest_family.name
                    and manifest_family.dialect(self.manifest.dialect) is not None
                ):
                    dialect = self.manifest.dialect
            if ADAPTER_CONFIG in self._container.carried:
                check_model(self._container)
            # optimizer state may have the names of a different dialect than the weights
            names = tuple(self.catalog.entries)
            weights = tuple(name for name in names if not name.startswith(OPTIM)) or names
            reading = recognise(weights, self.config, settings.families, family, dialect)
            _check_axes(reading.family, settings.axes)
        except TransaxleError as error:
            return error
        return reading

    def has_names_of(self, label: str) -> bool:
        """Return whether the names already are those of a dialect, although neither config nor user identifies the
        model.
        """
        is_specified = (
            self._settings.family or self._settings.dialect or self._settings.axes or model_types(self.config)
        )
        return not is_specified and keep_names(self.catalog.entries, label, self._settings.families)

    @cached_property
    def sizes(self) -> Sizes:
        """Axis sizes: from the user, else from the manifest (unless the user gave a config), else from the config.

        Raises:
            Refused: with code SHAPE_MISMATCH, if the user's config belongs to a different model.
        """
        check_same(self.config, self._container.config, self._settings.axes)
        trusted = self.manifest if self._settings.config is None else None
        axes = {} if trusted is None else trusted.axes
        reading, names = self.reading, self.catalog.entries
        sizes = Sizes(reading.family, self.config, {**axes, **self._settings.axes})
        return with_counts(sizes, reading.dialect, reading.prefix, names)

    @cached_property
    def bound(self) -> BoundNames:
        """The stored names, each matched with a table line of their dialect; optimizer state may have a second dialect.

        A program may save weights under the hub's names, but optimizer state under the names of its modules in memory.
        So optimizer state is read with the dialect of the family that matches most of its names.
        """
        reading = self.reading
        catalog = self.catalog
        stored_as = {name: tensor.encoding.name for name, tensor in (*catalog.encoded.items(), *self.decoded.items())}
        stored_as |= {name: tensor.encoding.name for name, tensor in self.encodings_in_files.items()}
        names = tuple(catalog.entries)
        bound = bind(names, reading.family, reading.dialect, self.sizes, reading.prefix, stored_as, catalog.entries)
        if not any(split_slot(name)[1] for name in bound.unknown):
            return bound
        state = tuple(name for name in names if split_slot(name)[1])
        families, family = self._settings.families, reading.family.name
        try:
            of_weights, of_state = (
                recognise(state, self.config, families, family, dialect) for dialect in (reading.dialect.label, None)
            )
        except TransaxleError:
            # no dialect, or more than one, fits the names of the optimizer state; it is refused later, if it is needed
            return bound
        if of_state.matched == of_weights.matched:
            return bound
        return with_state_of(bound, of_state.dialect, of_state.prefix, self.sizes, catalog.entries)
