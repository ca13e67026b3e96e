"""Codecs of one tensor: raw float32, bfloat16, and blocks of 8 or 4 bits.

All functions work on flat slices, in spans that fit the processor's cache. Slices to encode or to
measure begin on a block edge.

Scales are bfloat16, not the usual float16. Updates are small (1e-5 and less), so a scale of absmax
/ 127 would be a subnormal float16 (below 6e-5) and lose some or all of its digits; bfloat16 takes
the same two bytes and has the range of float32. A scale is rounded up (by 2^-7 at most), so that no
quotient exceeds 127 (or 7).

Codes are rounded to the nearest, or with a `Dither` up or down at random, so that their mean is the
number itself, and the errors of many updates cancel out.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Protocol

import numpy as np
import numpy.typing as npt

from shared.errors import InvalidFrame
from shared.tensors.slices import F32, U16, Array, aligned, bf16_from_float, float_from_bf16
from shared.tensors.spec import TensorSpec, grid

SPAN = 1 << 16  # elements: 256 KiB of float32 fit the second-level cache
SCALE = "#scale"
WORD_ELEMENTS, COUNT_ELEMENTS = 4, 16  # elements that a word, and a count, of the generator rounds
_STEP = np.float32(2.0**-16)
_INFINITE = 0x7F80  # bfloat16 bits of this value or more are infinite, NaN or negative
# Smaller numbers are subnormals, whose few digits would break the error bound: such blocks become
# zero.
_SMALLEST = 0x0080
_LARGEST = np.finfo(np.float32).max

I8 = npt.NDArray[np.int8]
U8 = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Dither:
    """Random numbers that round a tensor's elements.

    They depend on the seed, the tensor's name and the element alone, so any slice can be rounded
    by itself, with the same bytes on every machine.
    """

    seed: int
    name: str
    start: int = 0  # first element of the encoded slice, on a chunk edge

    def draw(self, start: int, stop: int, room: F32) -> F32:
        """Return a number in [0, 1) for each of the slice's elements [start, stop), in `room`;
        `start` is a multiple of 16.
        """
        stream = int.from_bytes(sha256(b"round" + self.name.encode()).digest()[:8], "little")
        key = np.array([self.seed & ((1 << 64) - 1), stream], np.uint64)
        # One count of the generator is 256 bits: 16 bits for each of 16 elements.
        random = np.random.Philox(key=key, counter=(self.start + start) // COUNT_ELEMENTS)
        words = random.random_raw(-(-(stop - start) // WORD_ELEMENTS)).astype("<u8", copy=False)
        np.multiply(words.view("<u2")[: stop - start], _STEP, out=room)
        return room


class Kernel(Protocol):
    """Arithmetic of one codec on one parameter tensor."""

    def parts(self, spec: TensorSpec) -> tuple[TensorSpec, ...]:
        """Return the specs of a parameter's tensors in the file; the first has the parameter's
        name.
        """

    def encode(self, numbers: F32, dither: Dither | None = None) -> tuple[Array, ...]:
        """Encode a slice that begins on a chunk edge; return the arrays for the tensors of `parts`.
        Raises InvalidFrame if a number is not finite.
        """

    def decode(
        self, parts: Sequence[Array], count: int, start: int, stop: int, room: F32 | None = None
    ) -> F32:
        """Return elements [start, stop) of a tensor of `count` elements from its flat parts.

        `room` is optional scratch space for the result. Raises InvalidFrame for an invalid scale.
        """

    def square(self, parts: Sequence[Array], count: int, start: int, stop: int) -> float:
        """Return the squared norm of a slice that begins on a chunk edge; it is finite if all
        numbers are. Raises InvalidFrame for an invalid scale.
        """


class SquareByDecoding:
    """Base of kernels whose `square` decodes the slice, since they have no shorter way."""

    __slots__ = ()

    def square(self: Kernel, parts: Sequence[Array], count: int, start: int, stop: int) -> float:
        total = 0.0
        for low, high in grid(stop - start, SPAN):  # the slice is never decoded as a whole
            total += sum_squares(self.decode(parts, count, start + low, start + high))
        return total


@dataclass(frozen=True, slots=True)
class Float32(SquareByDecoding):
    """Raw float32."""

    def parts(self, spec: TensorSpec) -> tuple[TensorSpec, ...]:
        return (TensorSpec(spec.name, spec.shape, "F32"),)

    def encode(self, numbers: F32, dither: Dither | None = None) -> tuple[Array, ...]:
        refuse_nonfinite(numbers)
        return (numbers,)

    def decode(
        self, parts: Sequence[Array], count: int, start: int, stop: int, room: F32 | None = None
    ) -> F32:
        return parts[0][start:stop]


@dataclass(frozen=True, slots=True)
class Bfloat16(SquareByDecoding):
    """Upper half of each float32, rounded to nearest even."""

    def parts(self, spec: TensorSpec) -> tuple[TensorSpec, ...]:
        return (TensorSpec(spec.name, spec.shape, "BF16"),)

    def encode(self, numbers: F32, dither: Dither | None = None) -> tuple[Array, ...]:
        refuse_nonfinite(numbers)
        bits = np.empty(numbers.size, np.uint16)
        for start, stop in grid(numbers.size, SPAN):
            bits[start:stop] = bf16_from_float(numbers[start:stop])
        return (bits,)

    def decode(
        self, parts: Sequence[Array], count: int, start: int, stop: int, room: F32 | None = None
    ) -> F32:
        return float_from_bf16(parts[0][start:stop], room)


@dataclass(frozen=True, slots=True)
class Blocks:
    """Symmetric blocks: one scale (absmax / limit) for each `block` elements, codes in [-limit,
    limit].

    Limit 127 stores a byte an element, limit 7 packs two elements a byte. The error is at most half
    a scale, with a dither below a whole one; more for numbers within 1 % of the largest float32.
    """

    limit: int
    block: int  # divides SPAN, and is even

    @property
    def packed(self) -> bool:
        return self.limit <= 7

    def parts(self, spec: TensorSpec) -> tuple[TensorSpec, ...]:
        codes = TensorSpec(spec.name, spec.shape, "I8")
        if self.packed:
            codes = TensorSpec(spec.name, (-(-spec.count // 2),), "U8")
        return codes, TensorSpec(spec.name + SCALE, (-(-spec.count // self.block),), "BF16")

    def encode(self, numbers: F32, dither: Dither | None = None) -> tuple[Array, ...]:
        peaks = block_peaks(numbers, self.block)
        refuse_nonfinite(peaks)
        scales, inverse = scale_blocks(peaks, self.limit)
        codes = np.empty(numbers.size, np.int8)
        for start, stop in grid(numbers.size, SPAN):
            here = inverse[start // self.block : -(-stop // self.block)]
            scaled = _spread(here, self.block)[: stop - start]
            np.multiply(numbers[start:stop], scaled, out=scaled)
            if dither is None:
                np.rint(scaled, out=scaled)
            else:
                scaled += dither.draw(start, stop, _thread_scratch.noise[: stop - start])
                np.floor(scaled, out=scaled)
                np.clip(scaled, -self.limit, self.limit, out=scaled)  # a quotient is itself rounded
            np.copyto(codes[start:stop], scaled, casting="unsafe")
        return pack_nibbles(codes) if self.packed else codes, scales

    def decode(
        self, parts: Sequence[Array], count: int, start: int, stop: int, room: F32 | None = None
    ) -> F32:
        first = start // self.block
        begin = first * self.block
        scales = read_scales(parts[1][first : -(-stop // self.block)])
        numbers = np.empty(stop - start, np.float32) if room is None else room[: stop - start]
        for low, high in grid(stop - begin, SPAN):
            skip = max(start - begin - low, 0)  # elements to skip in the first block
            into = numbers[begin + low + skip - start : begin + high - start]
            np.copyto(into, self._codes(parts[0], begin + low, begin + high)[skip:])
            here = scales[low // self.block : -(-high // self.block)]
            into *= _spread(here, self.block)[skip : high - low]
        return numbers

    def square(self, parts: Sequence[Array], count: int, start: int, stop: int) -> float:
        first = start // self.block
        scales = read_scales(parts[1][first : -(-stop // self.block)])
        if scales.size and not np.isfinite(scales.max() * np.float32(self.limit + 1)):
            return SquareByDecoding.square(self, parts, count, start, stop)
        total = 0.0
        for low, high in grid(stop - start, SPAN):
            here = scales[low // self.block : -(-high // self.block)].astype(np.float64)
            codes = _scratch(here.size * self.block)
            np.copyto(codes[: high - low], self._codes(parts[0], start + low, start + high))
            codes[high - low :] = 0
            rows = codes.reshape(-1, self.block)
            # The sums are integers below 2^24 in any order, and a scale has eight binary digits, so
            # every block's square is exact.
            sums = np.vecdot(rows, rows).astype(np.float64)
            sums *= here * here
            total += float(sums.sum())
        return total

    def _codes(self, codes: Array, start: int, stop: int) -> I8:
        if not self.packed:
            return codes[start:stop]
        return unpack_nibbles(codes[start // 2 : -(-stop // 2)])[: stop - start]


def refuse_nonfinite(numbers: Array) -> None:
    """Raise InvalidFrame for NaN and infinity, since such an update would be rejected."""
    for start, stop in grid(numbers.size, SPAN):
        if not np.isfinite(numbers[start:stop]).all():
            raise InvalidFrame(
                "it holds NaN or infinite values: the training diverged, so nothing is sent"
            )


def sum_squares(numbers: Array) -> float:
    """Return the sum of squares in float64, with the same bits on every machine and for any number
    of threads: spans are added in order, without fused operations or BLAS.

    The square of a float32 never overflows float64, so the sum is finite exactly when every number
    is.
    """
    total = 0.0
    for start, stop in grid(numbers.size, SPAN):
        wide = _thread_scratch.doubles[: stop - start]
        np.copyto(wide, numbers[start:stop])
        np.multiply(wide, wide, out=wide)
        total += float(wide.sum())
    return total


def block_peaks(numbers: F32, block: int) -> F32:
    """Return the largest magnitude of each block, which is not finite if one of its numbers is
    not.
    """
    peaks = np.empty(-(-numbers.size // block), np.int32)
    for start, stop in grid(numbers.size, SPAN):
        bits = _scratch(stop - start).view(np.int32)
        # The bits of float32 without the sign, read as integers, have the order of the numbers;
        # infinity and NaN come last.
        np.bitwise_and(numbers[start:stop].view(np.int32), np.int32(0x7FFFFFFF), out=bits)
        edges = np.arange(0, stop - start, block)
        np.maximum.reduceat(bits, edges, out=peaks[start // block : -(-stop // block)])
    return peaks.view(np.float32)


def scale_blocks(peaks: F32, limit: int) -> tuple[U16, F32]:
    """Return the bfloat16 scales of blocks from their largest magnitudes, and the inverses of the
    scales, 0 for a scale of zero.
    """
    # A scale is rounded up; the scale of numbers near the largest float32 is rounded down, so that
    # the block stays finite.
    wide = (peaks / np.float32(limit)).view(np.uint32)
    wide += np.uint32(0xFFFF)
    wide &= np.uint32(0xFFFF0000)
    wide[wide < _SMALLEST << 16] = 0
    most = (_LARGEST / np.float32(limit)).view(np.uint32) & np.uint32(0xFFFF0000)
    huge = wide > most
    wide[huge] = most
    inverse = np.zeros(wide.size, np.float32)
    np.divide(np.float32(1), wide.view(np.float32), out=inverse, where=wide > 0)
    inverse[huge] = np.float32(limit) / peaks[huge]
    return (wide >> 16).astype(np.uint16), inverse


def read_scales(bits: U16) -> F32:
    """Return scales as numbers. Raises InvalidFrame for a negative, infinite or NaN one."""
    if bits.size and int(bits.max()) >= _INFINITE:
        raise InvalidFrame(
            "a block of the update has a scale that is negative, infinite or not a number"
        )
    return float_from_bf16(bits)


class _ThreadScratch(threading.local):
    """Scratch arrays of a thread, reused: new ones would not be in the processor's cache."""

    def __init__(self) -> None:
        self.floats: F32 = aligned(SPAN)
        self.noise: F32 = aligned(SPAN)
        self.doubles: npt.NDArray[np.float64] = aligned(SPAN, dtype=np.float64)


_thread_scratch = _ThreadScratch()


def _scratch(count: int) -> F32:
    """Return a scratch array of `count` float32, valid until this thread's next call."""
    return _thread_scratch.floats[:count]


def _spread(values: F32, block: int) -> F32:
    """Return each value repeated `block` times, in scratch."""
    spread = _scratch(values.size * block)
    np.copyto(spread.reshape(-1, block), values[:, None])
    return spread


def pack_nibbles(codes: I8) -> U8:
    """Pack two codes in [-8, 7] into a byte, each plus 8, the lower half first; a code without a
    neighbour is packed with a zero.
    """
    raised = np.full(codes.size + codes.size % 2, 8, np.uint8)
    raised[: codes.size] += codes.view(np.uint8)  # two's complement: adding 8 wraps into 0..15
    pairs = raised.view("<u2")
    packed: U8 = (pairs | (pairs >> 4)).astype(np.uint8)
    return packed


def unpack_nibbles(packed: U8) -> I8:
    """Return the codes of `pack_nibbles`, always an even number."""
    pairs = packed.astype("<u2")
    pairs |= pairs << 4
    pairs &= 0x0F0F
    codes = pairs.view(np.int8)
    codes -= 8
    return codes
