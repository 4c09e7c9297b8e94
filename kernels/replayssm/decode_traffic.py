"""Bytes that a decode step has to move, counted from what it reads and writes."""

from dataclasses import dataclass

from replayssm.policy import CheckpointSharing, Policy
from replayssm.records import Recurrence
from replayssm.slots import LayerShape

FLOAT = 4


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Bytes of one layer, one token and one sequence.

    Attributes:
        read: Bytes read from memory; what several programs read (keys of a group of heads) counts once.
        written: Bytes written.
    """

    read: float
    written: float


def state_bytes(shape: LayerShape, policy: Policy) -> tuple[float, float]:
    """Bytes of one state: in the copy that carries the recurrence, and in the copy that outputs read."""
    heads, d_v, d_k = shape.state
    elements = heads * d_v * d_k
    sizes = [f.bits_per_element(heads=heads, d_v=d_v, d_k=d_k) * elements / 8 for f in policy.copies]
    return sizes[0], sizes[-1]


@dataclass(frozen=True, kw_only=True)
class RecordBytes:
    """Bytes of one record of a layer and a sequence.

    Attributes:
        written: All of it.
        read: What a step that does not flush reads of it.
        flushed: What a flush reads of it.
    """

    written: int
    read: int
    flushed: int


def record_bytes(shape: LayerShape, policy: Policy, *, input_bytes: int = 2, normalise: bool = True) -> RecordBytes:
    """Bytes of one record."""
    keys = shape.key_heads * shape.d_k * input_bytes
    values = shape.heads * shape.d_v * input_bytes
    if shape.recurrence is Recurrence.MAMBA2:
        whole = keys + values + shape.heads * 2 * FLOAT
        return RecordBytes(written=whole, read=whole, flushed=whole)
    channels = shape.recurrence is Recurrence.KDA
    common = keys + shape.heads * FLOAT * (shape.d_k if channels else 1)
    if normalise:
        common += shape.key_heads * FLOAT
    writes = shape.heads * shape.d_v * FLOAT
    if policy.sharing is not CheckpointSharing.SEPARATE:
        return RecordBytes(written=common + writes, read=common + writes, flushed=common + writes)
    # A row of the solution is read on the way to the next one.
    solution = 0 if channels else shape.heads * policy.window_tokens * FLOAT
    anew = values + shape.heads * FLOAT + solution
    return RecordBytes(written=common + writes + anew, read=common + writes + solution, flushed=common + anew)


def step_traffic(shape: LayerShape, policy: Policy, cursor: int, *, input_bytes: int = 2) -> Traffic:
    """Bytes of the step that finds `cursor` records.

    Args:
        shape: The layer.
        policy: How its states are stored.
        cursor: Records since the last store, below the window.
        input_bytes: Width of keys, values and outputs.
    """
    main, read = state_bytes(shape, policy)
    record = record_bytes(shape, policy, input_bytes=input_bytes)
    inputs = (2 * shape.key_heads * shape.d_k + shape.heads * shape.d_v) * input_bytes + 2 * shape.heads * FLOAT
    if shape.recurrence is Recurrence.KDA:
        inputs += shape.heads * (shape.d_k - 1) * FLOAT
    outputs = shape.heads * shape.d_v * input_bytes
    separate = policy.sharing is CheckpointSharing.SEPARATE
    if cursor < policy.window_tokens - 1:
        return Traffic(read=read + cursor * record.read + inputs, written=float(record.written + outputs))
    return Traffic(read=main + cursor * record.flushed + inputs, written=main + (read if separate else 0) + outputs)


def cycle_traffic(shape: LayerShape, policy: Policy, *, input_bytes: int = 2) -> Traffic:
    """Mean bytes per step over a whole window."""
    steps = [step_traffic(shape, policy, c, input_bytes=input_bytes) for c in range(policy.window_tokens)]
    return Traffic(read=sum(s.read for s in steps) / len(steps), written=sum(s.written for s in steps) / len(steps))


def floor_seconds(traffic: Traffic, *, batch: int, read_only: float, mixed: float) -> float:
    """Time that the bytes take at the card's own speed.

    Args:
        traffic: Per sequence.
        batch: Sequences.
        read_only: Bytes per second of a stream that only reads.
        mixed: Bytes per second, read and written together, of a stream that updates in place.
    """
    paired = 2 * traffic.written
    return batch * (max(traffic.read - traffic.written, 0.0) / read_only + paired / mixed)
