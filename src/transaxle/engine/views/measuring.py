"""How far computed tensors are from the stored ones, and whether that may be."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import isinf

from transaxle.encodings.error import Error
from transaxle.encodings.value_steps import CASTING, Recoded
from transaxle.engine.number_text import plural
from transaxle.errors import Refusal, Where, gathered
from transaxle.formats.catalog import Recoding
from transaxle.move.workers import Limits, share


def measure(recoding: Recoding, steps: Iterable[Recoded], limit: Limits) -> dict[Recoded, tuple[Error, int]]:
    """Return the error of each computed tensor, and how many finite values became infinite; most are read once for it.

    Args:
        recoding: what is computed.
        steps: of the tensors to measure; those that are encoded are measured while they are written.
        limit: workers.
    """
    wanted = set(steps)
    computed = [tensor for tensor in recoding.computed.values() if tensor.step in wanted] if wanted else []
    errors: dict[Recoded, tuple[Error, int]] = {}

    def measure_one(_: object, number: int) -> None:
        errors[computed[number].step] = computed[number].measure()

    share(range(len(computed)), limit.jobs, lambda _: None, measure_one)
    return errors


def refuse_infinite(errors: Mapping[Recoded, tuple[Error, int]], dtype: str | None) -> None:
    """Refuse finite values that would become infinite: cast, merged, or decoded as the product of code and scale.

    Args:
        errors: from `measure`.
        dtype: to which plain tensors are cast; None: to their own.

    Raises:
        Refused: LOSSY, with every tensor that has such values.
    """
    what = dtype or "the type of the weight"
    hint = "Leave them out with --skip NAME, allow it with --allow-lossy, or use bf16, which has the range of fp32."
    if dtype is None:
        hint = "Cast the model first (convert with --dtype bf16), or allow it with --allow-lossy."
    decoded = "finite values (code times scale) would become infinite when decoded"
    keep = "Leave them encoded with --skip NAME, or allow it with --allow-lossy."
    problems = []
    for step, (error, count) in errors.items():
        if step.action in CASTING and count:
            message = f"{plural(count, 'finite value')} would become infinite in {what}"
            problems.append(Refusal("LOSSY", message, Where(None, step.name), hint))
        elif step.action == "decoded" and isinf(error.max):
            problems.append(Refusal("LOSSY", decoded, Where(None, step.name), keep))
    if problems:
        raise gathered(problems)
