"""A rank's part of a quantized tensor that tensor parallelism has cut: taken from the whole, and copied into."""

from __future__ import annotations

from transaxle.errors import refuse
from transaxle.quant.frame.buffers import COMPONENTS, ORIGIN, STATE
from transaxle.quant.frame.frame import Frame, framed
from transaxle.quant.frame.tp_share import Share
from transaxle.quant.tensor.tensor import QuantizedTensor, same_buffers


def part_of(tensor: QuantizedTensor, share: Share) -> QuantizedTensor:
    """Return a rank's part of a whole tensor, raw, as a copy."""
    frame = tensor.frame
    buffers = {n: share.part(frame.quantizer, n, buffer) for n, buffer in (frame.cut | frame.shared).items()}
    origin = buffers.pop(ORIGIN, None)
    made = framed(frame.quantizer, buffers, share.local, blank=frame.blank)
    if origin is not None:
        made.cut[ORIGIN] = origin
    made.share = share
    return QuantizedTensor(made, 0, share.local[0], tensor.dtype)


def check_common(target: QuantizedTensor, source: QuantizedTensor) -> None:
    """Refuse a copy into a part of a matrix that would replace the scale, amax or history it shares with other ranks.

    Raises:
        Refused: `UNEQUAL_COPIES`: the other ranks would keep the old ones.
    """
    frame, share = target.frame, target.frame.share
    if target.is_meta or source.is_meta:
        return
    if share is None:
        rows = frame.rows if frame.used is None else frame.used
        known = frame.blank or rows >= frame.whole or source.frame.whole == frame.whole
        common = [name for name in frame.shared if not known]
        band = frame.band
        if band is not None and source.frame.band != band and not frame.blank:
            common = [name for name in (*COMPONENTS, *STATE) if not band.step(target.quantizer, name)]
    else:
        known = _is_of(share, source.frame)
        common = [name for name in (*COMPONENTS, *STATE) if not known and not share.step(target.quantizer, name)]
    mine, given = ({**one.components, **one.state} for one in (target, source))
    names = [name for name in common if name in mine and name in given]
    if not same_buffers({name: mine[name] for name in names}, {name: given[name] for name in names}):
        raise refuse(
            "UNEQUAL_COPIES",
            f"the source {list(source.shape)} has its own {', '.join(names)}, which the parts on all ranks must share",
            hint="Call copy_() with values on every rank that has a part, or use load_state_dict().",
        )


def _is_of(share: Share, frame: Frame) -> bool:
    """Whether a frame is of the same part, or of the whole that the part is of."""
    other = frame.share
    if other is None:
        band = frame.band
        width = band.whole if band is not None and band.dim == 1 and band.dims == 2 else frame.columns
        return (frame.whole, width) == share.shape
    return (other.shape, other.dim, other.held) == (share.shape, share.dim, share.held)
