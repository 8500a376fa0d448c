//! What a kernel's body computes with: a [`Vector`] of floats, the type of its elements ([`Float`]), and the
//! instruction set that both belong to ([`Isa`]).

#![allow(unsafe_code)]

use std::mem::MaybeUninit;
use std::ops::{Add, AddAssign, BitAnd, BitOr, Div, Mul, Neg, Not, Sub};

use half::{bf16, f16};

use super::halves::Halves;
use super::math;
use super::tables::Tables;
use super::truncate::small_integer;

/// The most lanes any instruction set has (16 x f32 in 512 bits).
pub(crate) const LANES_MAX: usize = 16;
/// The most parts a register has, see [`Vector::PARTS`].
pub(crate) const PARTS_MAX: usize = 4;

/// One truth value per lane.
pub(crate) trait Mask:
    Copy + BitAnd<Output = Self> + BitOr<Output = Self> + Not<Output = Self>
{
    /// Whether any lane is true.
    fn any(self) -> bool;
    /// Whether every lane is true.
    fn all(self) -> bool;
}

/// A register of [`Vector::LANES`] floats.
pub(crate) trait Vector:
    Copy + Add<Output = Self> + Sub<Output = Self> + Mul<Output = Self> + Div<Output = Self> + Neg<Output = Self>
{
    /// What a lane holds.
    type Elem: Float;
    /// The outcome of a comparison.
    type Mask: Mask;
    /// How many lanes there are; a power of two, at most [`LANES_MAX`].
    const LANES: usize;

    /// Whether an arithmetic instruction takes an element of memory in every lane of an operand.
    const SPLATS_MEMORY: bool = false;

    /// `x` in every lane.
    fn splat(x: Self::Elem) -> Self;
    /// The same vector, computed before memory is read again: the compiler cannot put it off, and keep its operands in registers meanwhile. Where
    /// [`Vector::SPLATS_MEMORY`].
    #[inline(always)]
    fn pinned(self) -> Self {
        self
    }
    /// The first [`Vector::LANES`] elements of `src`, which must have as many.
    fn load(src: &[Self::Elem]) -> Self;
    /// The elements of `src` (at most [`Vector::LANES`] of them are read), then `fill`.
    fn load_partial(src: &[Self::Elem], fill: Self::Elem) -> Self;
    /// Lane i from `src + i` where bit i of `lanes` is set, zero elsewhere.
    ///
    /// # Safety
    /// The elements of those lanes must be valid to read; no bit beyond [`Vector::LANES`] is set.
    #[inline(always)]
    unsafe fn load_where(src: *const Self::Elem, lanes: u32) -> Self {
        let mut found = [Self::Elem::ZERO; LANES_MAX];
        for (i, lane) in found[..Self::LANES].iter_mut().enumerate() {
            if lanes >> i & 1 == 1 {
                // SAFETY: the caller's.
                *lane = unsafe { *src.wrapping_add(i) };
            }
        }
        Self::load(&found)
    }

    /// Writes every lane to the front of `dst`, which must have room.
    fn store(self, dst: &mut [Self::Elem]);
    /// Writes as many leading lanes as `dst` has room for.
    fn store_partial(self, dst: &mut [Self::Elem]);

    /// `self * b + c`, rounded once.
    fn mul_add(self, b: Self, c: Self) -> Self;
    /// `if self < o { self } else { o }`: with a NaN on either side (and for two zeros) the result is `o`.
    fn min(self, o: Self) -> Self;
    /// `if self > o { self } else { o }`: with a NaN on either side (and for two zeros) the result is `o`.
    fn max(self, o: Self) -> Self;
    /// Clears the sign, a NaN's too.
    fn abs(self) -> Self;
    /// The square root, correctly rounded.
    fn sqrt(self) -> Self;
    /// The largest integer not above.
    fn floor(self) -> Self;
    /// Rounds towards zero.
    fn trunc(self) -> Self;
    /// The nearest integer, ties to even.
    fn round_even(self) -> Self;
    /// The magnitude of `self` with the sign of `sign`.
    fn copysign(self, sign: Self) -> Self;

    /// `self < o`; false where either is NaN.
    fn lt(self, o: Self) -> Self::Mask;
    /// `self <= o`; false where either is NaN.
    fn le(self, o: Self) -> Self::Mask;
    /// `self == o`; false where either is NaN.
    fn eq(self, o: Self) -> Self::Mask;
    /// Lane by lane `if mask { if_true } else { if_false }`.
    fn select(mask: Self::Mask, if_true: Self, if_false: Self) -> Self;

    /// `self * 2^n`, rounded once, for an integral `n` of magnitude up to twice the largest exponent.
    fn scale_by_power(self, n: Self) -> Self;
    /// `(m, e)` with `self = m * 2^e` and `1 <= m < 2`, for positive finite lanes (subnormal ones too); what other
    /// lanes give is unspecified.
    fn split(self) -> (Self, Self);
    /// Into how many parts a register falls between which [`Vector::zip_parts`] moves no lanes.
    const PARTS: usize = 1;

    /// Interleaves: `(a0, b0, a1, b1, ..)` of each part, the lower half first.
    fn zip_parts(self, b: Self) -> (Self, Self);

    /// Part j of row i becomes part i of row j, in as many rows as there are parts.
    #[inline(always)]
    fn transpose_parts(rows: [Self; PARTS_MAX]) -> [Self; PARTS_MAX] {
        rows
    }

    /// Transposes the square of the first LANES vectors: parts among each other, then the square in each part of as many
    /// rows as it has lanes.
    #[inline(always)]
    fn transpose(square: &mut [Self; LANES_MAX]) {
        let part = Self::LANES / Self::PARTS;
        for i in 0..part {
            let mut rows = [square[i]; PARTS_MAX];
            for j in 1..Self::PARTS {
                rows[j] = square[j * part + i];
            }
            rows = Self::transpose_parts(rows);
            for j in 0..Self::PARTS {
                square[j * part + i] = rows[j];
            }
        }
        Self::transpose_in_parts(square);
    }

    /// Transposes the square in each part of the first rows, as many as a part has lanes, and those of each so many rows after them. Zipping row i
    /// with row i + half moves a bit of the row number into the lane number and one of the lane's into the row's; after log2(rows) rounds all have
    /// moved.
    #[inline(always)]
    fn transpose_in_parts<const N: usize>(square: &mut [Self; N]) {
        let part = Self::LANES / Self::PARTS;
        let mut rounds = part;
        while rounds > 1 {
            let rows = *square;
            for first in (0..N.min(Self::LANES)).step_by(part) {
                for i in 0..part / 2 {
                    let (low, high) = rows[first + i].zip_parts(rows[first + i + part / 2]);
                    (square[first + 2 * i], square[first + 2 * i + 1]) = (low, high);
                }
            }
            rounds /= 2;
        }
    }

    /// Of half as many vectors as they have lanes: lane 0 of each, then lane 1 of each, and so on, in as many vectors. For vectors of
    /// [`LANES_MAX`] lanes in [`PARTS_MAX`] parts.
    #[inline(always)]
    fn interleave(mut rows: [Self; LANES_MAX / 2]) -> [Self; LANES_MAX / 2] {
        Self::transpose_in_parts(&mut rows);
        // Part p of row i has lane 4 p + i of the first four rows, that of row 4 + i the same lane of the others.
        let even = Self::transpose_parts([rows[0], rows[4], rows[1], rows[5]]);
        let odd = Self::transpose_parts([rows[2], rows[6], rows[3], rows[7]]);
        each(|i| if i % 2 == 0 { even[i / 2] } else { odd[i / 2] })
    }

    /// Lane i from lane i - 1; what the first lane gets is unspecified.
    #[inline(always)]
    fn one_on(self) -> Self {
        let mut lanes = [Self::Elem::ZERO; LANES_MAX + 1];
        self.store(&mut lanes[1..]);
        Self::load(&lanes)
    }

    /// Prefetches the cache line at `address`, which need not be valid. A hint: it may do nothing.
    #[inline(always)]
    fn prefetch(_address: *const Self::Elem) {}

    /// As [`Vector::prefetch`], but into the L2 cache at most: for many lines that fall into one set of the L1 cache.
    #[inline(always)]
    fn prefetch_far(_address: *const Self::Elem) {}

    /// Zero in every lane.
    #[inline(always)]
    fn zero() -> Self {
        Self::splat(Self::Elem::ZERO)
    }

    /// The smaller one; NaN where either is NaN.
    #[inline(always)]
    fn nan_min(self, o: Self) -> Self {
        Self::select(self.is_nan(), self, self.min(o))
    }

    /// The larger one; NaN where either is NaN.
    #[inline(always)]
    fn nan_max(self, o: Self) -> Self {
        Self::select(self.is_nan(), self, self.max(o))
    }

    /// [`Vector::select`] whose second value is computed only if some lane needs it.
    #[inline(always)]
    fn select_or(mask: Self::Mask, if_true: Self, if_false: impl FnOnce() -> Self) -> Self {
        if mask.all() { if_true } else { Self::select(mask, if_true, if_false()) }
    }

    /// `self > o`; false where either is NaN.
    #[inline(always)]
    fn gt(self, o: Self) -> Self::Mask {
        o.lt(self)
    }

    /// `self >= o`; false where either is NaN.
    #[inline(always)]
    fn ge(self, o: Self) -> Self::Mask {
        o.le(self)
    }

    /// `self != o`; true where either is NaN.
    #[inline(always)]
    fn ne(self, o: Self) -> Self::Mask {
        !self.eq(o)
    }

    /// Which lanes are NaN.
    #[inline(always)]
    fn is_nan(self) -> Self::Mask {
        self.ne(self)
    }

    /// Merges the lanes, always by the same tree: lane i with lane i + half, halving.
    #[inline(always)]
    fn reduce(self, join: impl Fn(Self, Self) -> Self) -> Self::Elem {
        fold_halves(self, join)
    }

    /// The sum of the lanes, see [`Vector::reduce`].
    #[inline(always)]
    fn reduce_sum(self) -> Self::Elem {
        fold_halves(self, |a, b| a + b)
    }

    /// The largest lane; NaN if any lane is.
    #[inline(always)]
    fn reduce_max(self) -> Self::Elem {
        fold_halves(self, |a, b| Self::select(a.gt(b) | a.is_nan(), a, b))
    }

    /// `f` of every lane where `mask` is true, the lane itself elsewhere. Slow: for lanes that are rare.
    #[inline(always)]
    fn map_where(self, mask: Self::Mask, f: impl Fn(usize) -> Self::Elem) -> Self {
        let mut wanted = [Self::Elem::ZERO; LANES_MAX];
        Self::select(mask, Self::splat(Self::Elem::ONE), Self::zero()).store(&mut wanted);
        let mut lanes = [Self::Elem::ZERO; LANES_MAX];
        self.store(&mut lanes);
        for i in 0..Self::LANES {
            if wanted[i] != Self::Elem::ZERO {
                lanes[i] = f(i);
            }
        }
        Self::load(&lanes)
    }

    /// `e^self`.
    #[inline(always)]
    fn exp(self) -> Self {
        math::exp(self)
    }

    /// `e^self - 1`, accurate near zero.
    #[inline(always)]
    fn exp_m1(self) -> Self {
        math::exp_m1(self)
    }

    /// The natural logarithm; NaN below zero.
    #[inline(always)]
    fn ln(self) -> Self {
        math::ln(self)
    }

    /// `ln(1 + self)`, accurate near zero.
    #[inline(always)]
    fn ln_1p(self) -> Self {
        math::ln_1p(self)
    }

    /// The hyperbolic tangent.
    #[inline(always)]
    fn tanh(self) -> Self {
        math::tanh(self)
    }

    /// `1 / (1 + e^-self)`, accurate in both tails.
    #[inline(always)]
    fn sigmoid(self) -> Self {
        math::sigmoid(self)
    }

    /// The error function.
    #[inline(always)]
    fn erf(self) -> Self {
        math::erf(self)
    }

    /// `1 - erf(self)`, accurate in the right tail.
    #[inline(always)]
    fn erfc(self) -> Self {
        math::erfc(self)
    }

    /// The sine of an angle in radians, of any size.
    #[inline(always)]
    fn sin(self) -> Self {
        math::sin(self)
    }

    /// The cosine of an angle in radians, of any size.
    #[inline(always)]
    fn cos(self) -> Self {
        math::cos(self)
    }

    /// `self^e` with IEEE 754 `pow`'s special cases.
    #[inline(always)]
    fn pow(self, e: Self) -> Self {
        math::pow(self, e)
    }
}

/// Combines lane i with lane i + half until one is left: parts with parts, then the lanes of a part, which zipping with
/// itself makes neighbours.
#[inline(always)]
fn fold_halves<V: Vector>(v: V, f: impl Fn(V, V) -> V) -> V::Elem {
    let mut parts = V::transpose_parts([v; PARTS_MAX]);
    let mut half = V::PARTS / 2;
    while half > 0 {
        for i in 0..half {
            parts[i] = f(parts[i], parts[i + half]);
        }
        half /= 2;
    }
    let (mut v, mut lanes) = (parts[0], V::LANES / V::PARTS);
    while lanes > 1 {
        let (low, high) = v.zip_parts(v);
        v = f(low, high);
        lanes /= 2;
    }
    let mut lanes = [V::Elem::ZERO; LANES_MAX];
    v.store(&mut lanes);
    lanes[0]
}

/// f32 or f64.
pub(crate) trait Float:
    Copy
    + Default
    + Send
    + Sync
    + PartialEq
    + PartialOrd
    + std::fmt::Debug
    + Add<Output = Self>
    + AddAssign
    + Sub<Output = Self>
    + Mul<Output = Self>
    + Div<Output = Self>
    + Neg<Output = Self>
    + Tables
    + 'static
{
    /// The vector of this element in an instruction set.
    type Vec<S: Isa>: Vector<Elem = Self>;

    /// 0
    const ZERO: Self;
    /// 1
    const ONE: Self;
    /// Positive infinity.
    const INFINITY: Self;
    /// A quiet NaN.
    const NAN: Self;
    /// The largest finite value.
    const MAX: Self;

    /// The nearest value of this type.
    fn from_f64(x: f64) -> Self;
    /// The value as f64, exactly.
    fn to_f64(self) -> f64;
    /// `self * b + c`, rounded once. A call of the C library: for few numbers.
    fn mul_add(self, b: Self, c: Self) -> Self;
    /// Whether this is a NaN.
    fn is_nan(self) -> bool;

    /// An integer from 0 to 2^24 as i32; any other value gives some integer of that range.
    fn small_integer(self) -> i32;

    /// At most a vector's lanes, widened; zeros beyond. Only f32 is what halves are computed in: f64 gives zeros.
    fn load_bf16<S: Isa>(from: &[bf16]) -> Self::Vec<S>;
    /// [`Float::load_bf16`] for f16.
    fn load_f16<S: Isa>(from: &[f16]) -> Self::Vec<S>;
    /// Rounds as many leading lanes as there is room for. f64 leaves what is there.
    fn store_bf16<S: Isa>(x: Self::Vec<S>, to: &mut [bf16]);
    /// [`Float::store_bf16`] for f16.
    fn store_f16<S: Isa>(x: Self::Vec<S>, to: &mut [f16]);
}

macro_rules! float {
    ($elem:ident: $vector:ident $($halves:item)*) => {
        impl Float for $elem {
            type Vec<S: Isa> = S::$vector;

            const ZERO: Self = 0.0;
            const ONE: Self = 1.0;
            const INFINITY: Self = $elem::INFINITY;
            const NAN: Self = $elem::NAN;
            const MAX: Self = $elem::MAX;

            #[inline(always)]
            fn from_f64(x: f64) -> Self {
                x as $elem
            }

            #[inline(always)]
            fn to_f64(self) -> f64 {
                f64::from(self)
            }

            fn mul_add(self, b: Self, c: Self) -> Self {
                $elem::mul_add(self, b, c)
            }

            #[inline(always)]
            fn is_nan(self) -> bool {
                $elem::is_nan(self)
            }

            $($halves)*
        }
    };
}

float! {
    f32: F32

    #[inline(always)]
    fn small_integer(self) -> i32 {
        small_integer(self)
    }

    #[inline(always)]
    fn load_bf16<S: Isa>(from: &[bf16]) -> S::F32 {
        S::F32::load_bf16(from)
    }

    #[inline(always)]
    fn load_f16<S: Isa>(from: &[f16]) -> S::F32 {
        S::F32::load_f16(from)
    }

    #[inline(always)]
    fn store_bf16<S: Isa>(x: S::F32, to: &mut [bf16]) {
        x.store_bf16(to);
    }

    #[inline(always)]
    fn store_f16<S: Isa>(x: S::F32, to: &mut [f16]) {
        x.store_f16(to);
    }
}

float! {
    f64: F64

    #[inline(always)]
    fn small_integer(self) -> i32 {
        small_integer(self as f32)
    }

    #[inline(always)]
    fn load_bf16<S: Isa>(_: &[bf16]) -> S::F64 {
        S::F64::zero()
    }

    #[inline(always)]
    fn load_f16<S: Isa>(_: &[f16]) -> S::F64 {
        S::F64::zero()
    }

    #[inline(always)]
    fn store_bf16<S: Isa>(_: S::F64, _: &mut [bf16]) {}

    #[inline(always)]
    fn store_f16<S: Isa>(_: S::F64, _: &mut [f16]) {}
}

/// `[f(0), .., f(N - 1)]`. [`std::array::from_fn`] wraps `f` in functions of its own, which are not compiled with the
/// instruction set's features unless the compiler happens to inline them; vectors then go by way of memory.
#[inline(always)]
pub(crate) fn each<T: Copy, const N: usize>(mut f: impl FnMut(usize) -> T) -> [T; N] {
    let mut array = MaybeUninit::<[T; N]>::uninit();
    for i in 0..N {
        // SAFETY: the array has N places. One whose `f` panics is left without a value, and never read.
        unsafe { array.as_mut_ptr().cast::<T>().add(i).write(f(i)) };
    }
    // SAFETY: all places were written.
    unsafe { array.assume_init() }
}

/// An instruction set: the vectors a kernel's body is instantiated with.
pub(crate) trait Isa {
    /// Vectors of f32.
    type F32: Halves;
    /// Vectors of f64.
    type F64: Vector<Elem = f64>;
    /// How many vector registers there are.
    const REGISTERS: usize;
    /// How many of them a tile of a matrix product uses for factors; the others hold its sums.
    const FACTORS: usize = 4;

    /// How many bf16 a lane holds for [`Isa::dot_bf16`]: one, widened, or a pair, the first in the upper half.
    const BF16_IN_LANE: usize = 1;

    /// `sum` plus the products of the lanes' bf16, one after the other, each rounded once.
    #[inline(always)]
    fn dot_bf16(a: Self::F32, b: Self::F32, sum: Self::F32) -> Self::F32 {
        a.mul_add(b, sum)
    }

    /// The first elements of `from` in f64, and `fill` if there are fewer than lanes.
    #[inline(always)]
    fn in_f64(from: &[f32], fill: f64) -> Self::F64 {
        let mut lanes = [fill; LANES_MAX];
        lanes.iter_mut().zip(from).for_each(|(lane, &x)| *lane = f64::from(x));
        Self::F64::load(&lanes)
    }
}

/// A computation with one generic body. Its `run`, and all it calls down to the arithmetic, is `#[inline(always)]`.
pub(crate) trait Kernel {
    /// What it returns.
    type Output;

    /// The body, for one instruction set.
    fn run<S: Isa>(self) -> Self::Output;
}
