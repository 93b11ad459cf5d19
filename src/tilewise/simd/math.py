"""exp2, log2 and tanh in words: polynomials in fma, no libm, the same bits on every target."""

from __future__ import annotations

from tilewise.simd.builder import LANES, Builder, Vec

NEG_INF = float("-inf")
NAN = float("nan")
LOG2E = 1.4426950408889634  # log2(e), rounded to float32 where it is used
LN2 = 0.6931471805599453

# exp2(f) = 1 + c1 f + ... + c6 f^6 on [-1/2, 1/2]: minimax in relative error (2^-28.3) with the constant 1 fixed, so
# that exp2(0) is 1 exactly; each coefficient is rounded to float32 in turn and the higher ones fitted again.
EXP2 = (0.6931472, 0.24022648, 0.0555036, 0.009618506, 0.0013390806, 0.00015326464)
# log2(1 + f) = f (c0 + c1 f + ... + c9 f^9) on [sqrt(1/2) - 1, sqrt(2) - 1], fitted the same way (2^-26.1)
LOG2 = (
    1.442695, -0.7213475, 0.48090377, -0.3606826, 0.28830373,
    -0.23978908, 0.208884, -0.19332503, 0.16333768, -0.07966424,
)  # fmt: skip
EXPONENT_BITS = 23  # where the exponent of a float32 begins
EXPONENT_BIAS = 127
# x + ROUND has a last place of 1, so it holds round(x) (ties to even), and its low bits hold round(x) + 127
ROUND = 1.5 * 2.0**EXPONENT_BITS + EXPONENT_BIAS
# r coth(r) = 1 + c0 r^2 + c1 r^4: by least squares, then moved to where the largest error of tanh over every float32 is
# small. Relative error 2^-26.7 for |r| <= 0.2; beyond, which only n > 0 reaches, tanh is flat and forgives more.
TANH = (0.33333245, -0.02212)
TANH_STEPS = 2.7  # multiples of ln(2) / 2 are chosen a little late, for the error is largest just after the first
TANH_ONE = 9.02  # tanh is 1 from here on: 1 - tanh(x) < 2^-25
MAGNITUDE, SIGN = 0x7FFFFFFF, -(1 << 31)  # the bits of a float32 without its sign, and the sign's
SQRT_HALF_BITS = 0x3F3504F3  # the float32 at or below sqrt(1/2)
EXP2_SMALLEST = -126.0  # below it 2^x is subnormal; exp2 gives 0
EXP2_INFINITE = 127.5  # from here on 2^round(x) is infinite
# Lanes of two vectors x and y (LANES further on). In every quarter of a vector: x0 y0 x1 y1, x2 y2 x3 y3, x0 x1 y0 y1,
# x2 x3 y2 y3. And whole quarters: 0 and 2 of x, then of y; 1 and 3.
QUARTER = LANES // 4
SINGLES_LOW, SINGLES_HIGH, PAIRS_LOW, PAIRS_HIGH = (
    [first + lane for first in range(0, LANES, QUARTER) for lane in lanes]
    for lanes in ((0, 16, 1, 17), (2, 18, 3, 19), (0, 1, 16, 17), (2, 3, 18, 19))
)
EVEN_QUARTERS, ODD_QUARTERS = (
    [q + lane for q in range(first, 2 * LANES, 2 * QUARTER) for lane in range(QUARTER)] for first in (0, QUARTER)
)


def polynomial(b: Builder, coefficients: tuple[float, ...], x: Vec) -> Vec:
    """c[0] + c[1] x + ... by Horner's rule in fma."""
    return polynomial_each(b, coefficients, [x])[0]


def polynomial_each(b: Builder, coefficients: tuple[float, ...], xs: list[Vec]) -> list[Vec]:
    """The polynomial of several vectors, a step of all before the next one."""
    y = [b.vec(coefficients[-1])] * len(xs)
    for c in reversed(coefficients[:-1]):
        y = [b.fma(z, x, b.vec(c)) for z, x in zip(y, xs, strict=True)]
    return y


def exp2(b: Builder, x: Vec) -> Vec:
    """2^x: at most 0.80 ULP from the true value on [-126, 127.5); 0 for x < -126; exp2(0) = 1; NaN for NaN.

    Not above 1 for x <= 0. inf from 127.5 on: half a power of two early, as 2^round(x) is.
    """
    return b.where(b.vec(EXP2_INFINITE) <= x, b.vec(float("inf")), exp2_each(b, [x])[0])


def exp2_each(b: Builder, xs: list[Vec]) -> list[Vec]:
    """exp2 of several vectors of x < 127.5, a step of all before the next one: their chains fill each other's latency.

    2^x = 2^n 2^f with n = round(x). 2^f is multiplied by the power, never added to its exponent: a NaN stays one
    whatever its payload.
    """
    y = polynomial_each(b, (1.0, *EXP2), [b.fraction(x) for x in xs])
    return [b.where(x < b.vec(EXP2_SMALLEST), b.vec(0.0), b.ldexp(z, x)) for x, z in zip(xs, y, strict=True)]


def log2(b: Builder, x: Vec) -> Vec:
    """log2(x) for normal x > 0: at most 1.67 ULP from the true value; -inf for 0; inf for inf; NaN for NaN and x < 0.

    x = 2^n (1 + f) with 1 + f in [sqrt(1/2), sqrt(2)); log2(x) = n + f P(f), the sum rounded once.
    """
    bits = b.bits(x)
    offset = bits - b.ivec(SQRT_HALF_BITS)
    # an arithmetic shift of offset, made of a logical one: add 128 to it, shift, take it away
    n = ((offset + b.ivec(1 << 30)) >> EXPONENT_BITS) - b.ivec(1 << (30 - EXPONENT_BITS))
    f = b.floats(bits - (n << EXPONENT_BITS)) - b.vec(1.0)
    y = b.fma(f, polynomial(b, LOG2, f), b.to_float(n))
    finite = b.where(x.equals(b.vec(0.0)), b.vec(NEG_INF), y)
    return b.where(b.vec(0.0) <= x, b.where(x.equals(b.vec(float("inf"))), x, finite), b.vec(NAN))


def tanh(b: Builder, x: Vec) -> Vec:
    """tanh(x): at most 1.96 ULP from the true value, for every x; exactly odd; x for small x; NaN for NaN.

    Not above 1 in magnitude; 1 from TANH_ONE on. |x| = n ln(2) / 2 + r with n = round(TANH_STEPS |x|). With t = 2^n,
    A = r coth(r) and M = A - r: tanh|x| = N / (N + M) where N = (t - 1) / 2 M + t r. N is a part of the divisor, so
    that its rounding hardly matters where the quotient is near 1; and for n = 0 the divisor is A again, exactly.
    """
    size = b.floats(b.bits(x) & b.ivec(MAGNITUDE))
    size = b.where(b.vec(TANH_ONE) < size, b.vec(TANH_ONE), size)  # a NaN stays
    rounded = b.fma(size, b.vec(TANH_STEPS), b.vec(ROUND))
    r = b.fma(rounded - b.vec(ROUND), b.vec(-LN2 / 2), size)
    power = b.floats(b.bits(rounded) << EXPONENT_BITS)
    M = polynomial(b, (1.0, *TANH), r * r) - r
    N = b.fma(b.fma(power, b.vec(0.5), b.vec(-0.5)), M, power * r)
    y = b.bits(N / (N + M))
    return b.floats((y & b.ivec(MAGNITUDE)) + (b.bits(x) & b.ivec(SIGN)))


def fold(b: Builder, rows: list[Vec], operation: str) -> Vec:
    """Lane r of the result is the fold of rows[r] by halves (8, 4, 2, 1): "add" or "max", for 16 rows at once.

    Each step folds pairs of vectors into one that holds both, so 16 rows take 15 operations and 30 shuffles, and every
    row meets its own lanes in the order that it would meet alone.
    """
    for half in (8, 4, 2, 1):
        starts = range(0, LANES, 2 * half)
        low = [s + x + side for s in starts for side in (0, LANES) for x in range(half)]
        high = [lane + half for lane in low]
        pairs = [(rows[r], rows[r + half]) for r in range(half)]
        halves = [(b.shuffle(x, y, low), b.shuffle(x, y, high)) for x, y in pairs]
        rows = [x + y if operation == "add" else b.max(x, y) for x, y in halves]
    return rows[0]


def transpose(b: Builder, rows: list[Vec]) -> list[Vec]:
    """The columns of 16 rows of 16 floats, or of 16 rows of 8, two in a vector: x and x + 4 of each 8 rows.

    Four rows are interleaved in quarters of a vector, which every instruction set does in one instruction; then the
    quarters of four (or of two) are put together.
    """
    columns: list[Vec] = [rows[0]] * len(rows)
    quads = []
    for r in range(0, len(rows), QUARTER):
        x, y, z, w = rows[r : r + QUARTER]
        pairs = [(b.shuffle(x, y, lanes), b.shuffle(z, w, lanes)) for lanes in (SINGLES_LOW, SINGLES_HIGH)]
        quads.append([b.shuffle(*pair, lanes) for pair in pairs for lanes in (PAIRS_LOW, PAIRS_HIGH)])
    for c, vectors in enumerate(zip(*quads, strict=True)):
        columns[c::QUARTER] = _quarters(b, list(vectors))
    return columns


def _quarters(b: Builder, vectors: list[Vec]) -> list[Vec]:
    """Vector i of the result: quarter i of each of these; of two, their quarters i and i + 2."""
    if len(vectors) == 1:
        return vectors
    pairs = list(zip(vectors[::2], vectors[1::2], strict=True))
    even, odd = (_quarters(b, [b.shuffle(x, y, lanes) for x, y in pairs]) for lanes in (EVEN_QUARTERS, ODD_QUARTERS))
    return [vector for two in zip(even, odd, strict=True) for vector in two]
