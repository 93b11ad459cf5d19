"""What the words mean, lane by lane, in plain Python: float32 are their bits, arithmetic is exact and rounded once."""

from __future__ import annotations

import struct
from collections.abc import Callable
from fractions import Fraction

from tests.simd.support import INF, NAN, SIGN, is_nan

SIGNIFICANT = 23  # bits of a float32 after the point
SMALLEST_EXPONENT = -126


def value(bits: int) -> Fraction:
    """The exact value of a finite float32."""
    return Fraction(struct.unpack("<f", struct.pack("<I", bits))[0])


def is_infinite(bits: int) -> bool:
    return bits & ~SIGN == INF


def rounded(x: Fraction, zero: int = 0) -> int:
    """The bits of the float32 nearest to x, ties to even; `zero` are the bits where x is 0."""
    if not x:
        return zero
    sign, x = (SIGN if x < 0 else 0), abs(x)
    exponent = x.numerator.bit_length() - x.denominator.bit_length()
    exponent -= x < Fraction(2) ** exponent
    exponent = max(exponent, SMALLEST_EXPONENT)
    if exponent > 127:
        return sign | INF
    significand = round(
        x / Fraction(2) ** (exponent - SIGNIFICANT)
    )  # to even; past 24 bits it carries into the exponent
    return sign | ((exponent - SMALLEST_EXPONENT) << SIGNIFICANT) + significand


def add(x: int, y: int) -> int:
    if is_nan(x) or is_nan(y) or (is_infinite(x) and is_infinite(y) and x != y):
        return NAN
    if is_infinite(x) or is_infinite(y):
        return x if is_infinite(x) else y
    return rounded(value(x) + value(y), zero=x & y & SIGN)


def sub(x: int, y: int) -> int:
    return add(x, y ^ SIGN)


def mul(x: int, y: int) -> int:
    return fma(x, y, (x ^ y) & SIGN)  # a zero of the product's sign changes nothing


def div(x: int, y: int) -> int:
    sign = (x ^ y) & SIGN
    if is_nan(x) or is_nan(y) or (is_infinite(x) and is_infinite(y)) or not (x | y) & ~SIGN:
        return NAN
    if is_infinite(x) or not y & ~SIGN:
        return sign | INF
    return sign if is_infinite(y) else rounded(value(x) / value(y), zero=sign)


def fma(x: int, y: int, z: int) -> int:
    sign = (x ^ y) & SIGN
    infinite = is_infinite(x) or is_infinite(y)
    if is_nan(x) or is_nan(y) or is_nan(z) or (infinite and not (x & ~SIGN and y & ~SIGN)):
        return NAN
    if infinite:
        return NAN if is_infinite(z) and z != sign | INF else sign | INF
    if is_infinite(z):
        return z
    product = value(x) * value(y)
    zero = sign & z if not product and not value(z) else 0
    return rounded(product + value(z), zero)


def fraction(x: int) -> int:
    """x - round(x), ties to even."""
    return NAN if is_nan(x) else rounded(value(x) - round(value(x)))


def ldexp(x: int, y: int) -> int:
    """x * 2^round(y), ties to even."""
    if is_nan(x) or is_infinite(x):
        return x
    return rounded(value(x) * Fraction(2) ** round(value(y)), zero=x & SIGN)


def comparison(compare: Callable[[Fraction | float, Fraction | float], bool]) -> Callable[[int, int], bool]:
    """An ordered comparison: false where either is NaN, -0 equal to +0."""

    def ordered(bits: int) -> Fraction | float:
        return struct.unpack("<f", struct.pack("<I", bits))[0]

    return lambda x, y: not is_nan(x) and not is_nan(y) and compare(ordered(x), ordered(y))


greater = comparison(lambda x, y: x > y)


def maximum(x: int, y: int) -> int:
    return x if greater(x, y) else y


def quotient(x: int, y: int) -> int:
    """x / y of int32 towards zero; 0 where y is 0."""
    if y == 0:
        return 0
    size = abs(x) // abs(y)
    return int32(size if (x < 0) == (y < 0) else -size)


def rest(x: int, y: int) -> int:
    """What that division leaves; 0 where y is 0."""
    return int32(x - y * quotient(x, y)) if y else 0


def int32(x: int) -> int:
    """x reduced to 32 bits, signed."""
    return (x + (1 << 31)) % (1 << 32) - (1 << 31)
