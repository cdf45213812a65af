"""DeepSpeed's own mixtures of experts over expert-parallel ranks.

Each of these ranks counts its experts from zero. Their module tensors are in files of their own, numbered over the
whole model. In the optimizer's files a group of expert parameters is cut only over the ranks that hold the same
experts, under each rank's own numbers; `partition_count` states their number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from transaxle.errors import Faults, refuse
from transaxle.formats.catalog import Entry
from transaxle.formats.deepspeed import keys
from transaxle.formats.deepspeed.zero.ranks import RankModel, RankState


class ExpertShares:
    """Which data-parallel ranks share each group of parameters, and what its parameters are called in the whole model.

    Args:
        model: the model file.
        states: the optimizer files, in the order of data-parallel ranks.
    """

    def __init__(self, model: RankModel, states: Sequence[RankState]) -> None:
        self._model, self._states = model, states
        self._strided = _strided(model)
        self._local: dict[str, int] = {}
        for shapes in model.shapes:
            for name in shapes:
                head, number, _ = _split(name)
                if number is not None:
                    self._local[head] = max(self._local.get(head, 0), number + 1)

    def of(self, group: int) -> list[Sequence[RankState]]:
        """Return, for each expert-parallel rank, the optimizer files that share its group; one list for a dense group.

        Raises:
            Refused: CORRUPT where the counts do not fit; UNSUPPORTED for parameters that are not known to be experts'.
        """
        total = len(self._states)
        counts = self._states[0].root.get(keys.PARTITION_COUNT)
        listed = [] if counts is None or not counts.is_list else counts.list()
        sharing = listed[group].natural() if group < len(listed) else total
        if sharing == total:
            return [self._states]
        if not 0 < sharing < total or total % sharing:
            message = (
                f"group {group} is cut over {sharing} ranks, which does not divide the {total} ranks that have files"
            )
            raise refuse("CORRUPT", message, file=self._states[0].file)
        for name in self._model.shapes[group]:
            if _split(name)[1] is None:
                message = f"it is cut over {sharing} of {total} ranks, but is not an expert of DeepSpeed's MoE layer"
                raise refuse("UNSUPPORTED", message, file=self._model.file, tensor=name)
        # Number of expert-parallel ranks; each has `sharing` data-parallel ranks with the same experts.
        ranks = total // sharing
        # By default expert-parallel ranks are neighbours, so ranks with the same experts are `ranks` apart; with data
        # parallelism first they are neighbours themselves.
        if self._strided:
            return [self._states[rank::ranks] for rank in range(ranks)]
        return [self._states[rank * sharing : (rank + 1) * sharing] for rank in range(ranks)]

    def name(self, name: str, rank: int) -> str:
        """Return a parameter's name in the whole model.

        Args:
            name: its name on its own rank.
            rank: the expert-parallel rank.
        """
        head, number, tail = _split(name)
        return name if number is None else f"{head}{number + rank * self._local[head]}{tail}"

    def named(self) -> RankModel:
        """Return the model file with the experts of all ranks in its groups."""
        shapes = tuple(
            {
                self.name(name, rank): shape
                for rank in range(len(self.of(group)))
                for name, shape in shapes_of_group.items()
            }
            for group, shapes_of_group in enumerate(self._model.shapes)
        )
        return replace(self._model, shapes=shapes)


def _strided(model: RankModel) -> bool:
    """Tell whether neighbouring ranks hold different experts, which is the default."""
    config = model.root.get(keys.CONFIG)
    data_first = None if config is None else config.get(keys.DATA_BEFORE_EXPERTS)
    return data_first is None or not data_first.flag()


def _split(name: str) -> tuple[str, int | None, str]:
    """Split an expert's parameter name into the text before its number, the number, and the text after it."""
    head, mark, tail = name.partition(keys.EXPERTS)
    number = tail.partition(".")[0]
    if not mark or not number.isdecimal() or not number.isascii() or len(number) > len(str(1 << 20)):
        return name, None, ""
    return head + mark, int(number), tail[len(number) :]


def with_experts(
    model: RankModel, files: Mapping[tuple[int, int], str], read: Mapping[str, Mapping[str, Entry]], faults: Faults
) -> RankModel:
    """Return a model file with the tensors of its experts.

    Args:
        model: the model file.
        files: (layer, expert) -> its file.
        read: file -> its tensors.
        faults: experts without a file, and tensors that are there twice, are added.
    """
    counts = model.root.get(keys.NUM_EXPERTS)
    wanted = [] if counts is None or not counts.is_list else list(enumerate(counts.naturals()))
    if any(layer < 0 for layer, _ in files):  # earlier versions: one file per expert, of all layers
        wanted = [(-1, max(count for _, count in wanted))] if wanted else []
    for layer, count in wanted:
        missing = [expert for expert in range(min(count, 1 << 16)) if (layer, expert) not in files]
        if missing:
            message = f"the files of the experts {missing[:8]} of mixture {layer} are missing"
            faults.add("INCOMPLETE", message, model.file)
    module = dict(model.module)
    for file in files.values():
        for name, entry in read.get(file, {}).items():
            if module.setdefault(name, entry) is not entry:
                faults.add("NAME_COLLISION", "another file has the same tensor", file, name)
    return replace(model, module=module)
