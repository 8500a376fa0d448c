//! bf16 and f16 in vectors of f32: widened when read, rounded to the nearest (of two, the even one) when written.
//!
//! What is provided here works lane by lane, on the formulas for one number below; instruction sets that have better
//! ways give the same bits, those of a NaN too: its upper bits, made quiet.

use half::{bf16, f16};

use super::vector::{LANES_MAX, PARTS_MAX, Vector};

/// What a vector of f32 does with half types. Slices may be shorter than the vector: missing lanes read as zero and
/// are not written.
pub(crate) trait Halves: Vector<Elem = f32> {
    /// Whether [`Halves::load_neighbours`] and [`Halves::split_neighbours`] are a few instructions.
    const SPLITS_NEIGHBOURS: bool = false;

    /// The first elements of `src`, widened.
    #[inline(always)]
    fn load_bf16(src: &[bf16]) -> Self {
        load(src, widen_bf16)
    }

    /// Writes the lanes, rounded.
    #[inline(always)]
    fn store_bf16(self, dst: &mut [bf16]) {
        store(self, dst, narrow_bf16);
    }

    /// Each lane's nearest bf16.
    #[inline(always)]
    fn round_bf16(self) -> Self {
        let mut near = [bf16::ZERO; LANES_MAX];
        self.store_bf16(&mut near);
        Self::load_bf16(&near)
    }

    /// [`Halves::load_bf16`] for f16.
    #[inline(always)]
    fn load_f16(src: &[f16]) -> Self {
        load(src, widen_f16)
    }

    /// [`Halves::store_bf16`] for f16.
    #[inline(always)]
    fn store_f16(self, dst: &mut [f16]) {
        store(self, dst, narrow_f16);
    }

    /// [`Halves::round_bf16`] for f16.
    #[inline(always)]
    fn round_f16(self) -> Self {
        let mut near = [f16::ZERO; LANES_MAX];
        self.store_f16(&mut near);
        Self::load_f16(&near)
    }

    /// Lanes that hold two bf16 each: those of `first` in the upper halves, those of `next` in the lower.
    #[inline(always)]
    fn load_pairs_of(first: &[bf16], next: &[bf16]) -> Self {
        let mut lanes = [0.0; LANES_MAX];
        for ((lane, &first), &next) in lanes[..Self::LANES].iter_mut().zip(first).zip(next) {
            *lane = pair(first, next);
        }
        Self::load(&lanes)
    }

    /// Each of [`Vector::PARTS`] lines is read as a vector whose lanes hold two neighbours each, the first in the lower half; then
    /// [`Vector::transpose_parts`] of these vectors. A line has two elements for each lane.
    #[inline(always)]
    fn load_neighbours(lines: [&[bf16]; PARTS_MAX]) -> [Self; PARTS_MAX] {
        let mut rows = [Self::zero(); PARTS_MAX];
        for (row, line) in rows.iter_mut().zip(lines) {
            *row = Self::load_twos(line);
        }
        Self::transpose_parts(rows)
    }

    /// The two neighbours of each lane, widened: the first ones, and the others.
    #[inline(always)]
    fn split_neighbours(self) -> [Self; 2] {
        let mut lanes = [0.0; LANES_MAX];
        self.store(&mut lanes);
        let upper = lanes.map(|lane| f32::from_bits(lane.to_bits() & 0xffff_0000));
        [Self::load(&lanes.map(|lane| f32::from_bits(lane.to_bits() << 16))), Self::load(&upper)]
    }

    /// Lanes that hold two neighbours of `src` each as they lie, the first in the lower half.
    #[inline(always)]
    fn load_twos(src: &[bf16]) -> Self {
        let mut lanes = [0.0; LANES_MAX];
        for (lane, two) in lanes[..Self::LANES].iter_mut().zip(src.chunks_exact(2)) {
            *lane = pair(two[1], two[0]);
        }
        Self::load(&lanes)
    }

    /// Lanes that hold two neighbours of `src` each, the first in the upper half; `beyond` stands for what is missing.
    #[inline(always)]
    fn load_pairs(src: &[bf16], beyond: bf16) -> Self {
        let src: [bf16; 2 * LANES_MAX] = padded(src, beyond);
        let mut lanes = [0.0; LANES_MAX];
        for (lane, src) in lanes[..Self::LANES].iter_mut().zip(src.chunks_exact(2)) {
            *lane = pair(src[0], src[1]);
        }
        Self::load(&lanes)
    }
}

#[inline(always)]
fn load<V: Vector<Elem = f32>, T: Copy>(src: &[T], widen: impl Fn(T) -> f32) -> V {
    let mut lanes = [0.0; LANES_MAX];
    for (lane, &x) in lanes[..V::LANES].iter_mut().zip(src) {
        *lane = widen(x);
    }
    V::load(&lanes)
}

#[inline(always)]
fn store<V: Vector<Elem = f32>, T>(x: V, dst: &mut [T], narrow: impl Fn(f32) -> T) {
    let mut lanes = [0.0; LANES_MAX];
    x.store(&mut lanes);
    for (to, &lane) in dst.iter_mut().zip(&lanes[..V::LANES]) {
        *to = narrow(lane);
    }
}

/// The first N elements of `src`, then `fill`.
#[inline(always)]
pub(super) fn padded<T: Copy, const N: usize>(src: &[T], fill: T) -> [T; N] {
    let mut all = [fill; N];
    let len = src.len().min(N);
    all[..len].copy_from_slice(&src[..len]);
    all
}

/// Two bf16 in the place of an f32, the first in the upper half.
#[inline(always)]
pub(crate) fn pair(first: bf16, next: bf16) -> f32 {
    f32::from_bits(u32::from(first.to_bits()) << 16 | u32::from(next.to_bits()))
}

/// A bf16 is the upper half of an f32.
#[inline(always)]
pub(crate) fn widen_bf16(x: bf16) -> f32 {
    f32::from_bits(u32::from(x.to_bits()) << 16)
}

/// Adds half of the last place kept, less one for an even result, and cuts.
#[inline(always)]
pub(crate) fn narrow_bf16(x: f32) -> bf16 {
    let bits = x.to_bits();
    let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
    let nan = (bits >> 16) | 0x40;
    bf16::from_bits(if x.is_nan() { nan } else { rounded } as u16)
}

/// The exponent is moved by a product, which makes subnormals right too.
#[inline(always)]
pub(crate) fn widen_f16(x: f16) -> f32 {
    let bits = u32::from(x.to_bits());
    let shifted = (bits & 0x7fff) << 13;
    let value = f32::from_bits(shifted) * f32::from_bits((127 + 112) << 23); // 2^112
    // Infinity and NaN became numbers from 2^16 up.
    let quiet = if bits & 0x7fff > 0x7c00 { 0x7fc0_0000 } else { 0x7f80_0000 };
    let magnitude = if value >= 65536.0 { shifted | quiet } else { value.to_bits() };
    f32::from_bits(magnitude | ((bits & 0x8000) << 16))
}

/// To nearest even.
#[inline(always)]
pub(crate) fn narrow_f16(x: f32) -> f16 {
    let (sign, magnitude) = ((x.to_bits() >> 16) & 0x8000, x.to_bits() & 0x7fff_ffff);
    // Normal: as for bf16, with the exponent moved from bias 127 to 15.
    let normal = magnitude.wrapping_sub(112 << 23).wrapping_add(0xfff + ((magnitude >> 13) & 1)) >> 13;
    // Subnormal: the last place of 1/2 is 2^-24, which is f16's smallest step, so the sum rounds there.
    let subnormal = (x.abs() + 0.5).to_bits().wrapping_sub(0.5f32.to_bits());
    let finite = if magnitude < 113 << 23 { subnormal } else { normal };
    let infinite = if x.is_nan() { 0x7e00 | ((magnitude >> 13) & 0x3ff) } else { 0x7c00 };
    f16::from_bits((sign | if magnitude >= 143 << 23 { infinite } else { finite }) as u16)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::{Isa, Kernel, available_isas, dispatch_on, each};

    /// The elements read in pieces of `len`, at most a vector.
    struct Load<'a, T> {
        src: &'a [T],
        len: usize,
    }

    /// The numbers written in pieces of `len` between zeros, at most a vector; and rounded in place.
    struct Store<'a> {
        src: &'a [f32],
        len: usize,
    }

    macro_rules! kernels {
        ($type:ident $load:ident $store:ident $round:ident $name:ident) => {
            impl Kernel for Load<'_, $type> {
                type Output = Vec<u32>;

                #[inline(always)]
                fn run<S: Isa>(self) -> Vec<u32> {
                    let len = self.len.min(S::F32::LANES);
                    let mut got = Vec::new();
                    for src in self.src.chunks(len) {
                        let mut lanes = [1.0; LANES_MAX];
                        S::F32::$load(src).store(&mut lanes);
                        assert!(lanes[src.len()..S::F32::LANES].iter().all(|lane| lane.to_bits() == 0));
                        got.extend(lanes[..src.len()].iter().map(|lane| lane.to_bits()));
                    }
                    got
                }
            }

            struct $name<'a>(Store<'a>);

            impl Kernel for $name<'_> {
                type Output = Vec<(u16, u32)>;

                #[inline(always)]
                fn run<S: Isa>(self) -> Vec<(u16, u32)> {
                    let len = self.0.len.min(S::F32::LANES);
                    let mut got = Vec::new();
                    for src in self.0.src.chunks(len) {
                        let x = S::F32::load_partial(src, 1.0);
                        let (mut near, mut rounded) = ([$type::NAN; LANES_MAX + 1], [0.0; LANES_MAX]);
                        x.$store(&mut near[..src.len()]);
                        assert!(near[src.len()..].iter().all(|x| x.to_bits() == $type::NAN.to_bits()));
                        x.$round().store(&mut rounded);
                        got.extend(
                            near.iter().zip(rounded).take(src.len()).map(|(x, y)| (x.to_bits(), y.to_bits())),
                        );
                    }
                    got
                }
            }
        };
    }
    kernels!(bf16 load_bf16 store_bf16 round_bf16 StoreBf16);
    kernels!(f16 load_f16 store_f16 round_f16 StoreF16);

    #[test]
    fn every_half_widens_to_its_bits() {
        let bf16s: Vec<_> = (0..=u16::MAX).map(bf16::from_bits).collect();
        let f16s: Vec<_> = (0..=u16::MAX).map(f16::from_bits).collect();
        let of_bf16s: Vec<_> = (0..=u16::MAX).map(|bits| u32::from(bits) << 16).collect();
        let of_f16s: Vec<_> = f16s.iter().map(|x| x.to_f32_const().to_bits()).collect();
        assert!(bf16s.iter().zip(&of_bf16s).all(|(x, &bits)| widen_bf16(*x).to_bits() == bits));
        assert!(f16s.iter().zip(&of_f16s).all(|(x, &bits)| widen_f16(*x).to_bits() == bits));
        for isa in available_isas() {
            for len in [LANES_MAX, 7] {
                let got = dispatch_on(isa, Load { src: &bf16s, len }).expect("available");
                assert!(got == of_bf16s, "{isa}: bf16");
                let got = dispatch_on(isa, Load { src: &f16s, len }).expect("available");
                assert!(got == of_f16s, "{isa}: f16");
            }
        }
    }

    /// All upper halves, with lower ones around the roundings, and any bits.
    fn numbers() -> Vec<f32> {
        let lows =
            [0, 1, 0x7ff, 0xfff, 0x1000, 0x1001, 0x1fff, 0x3000, 0x7fff, 0x8000, 0x8001, 0xefff, 0xffff];
        let edges = (0..1 << 16).flat_map(|high: u32| lows.map(|low| high << 16 | low));
        let mut state = 1u64;
        let any = std::iter::repeat_with(|| {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 32) as u32
        });
        edges.chain(any.take(200_003)).map(f32::from_bits).collect()
    }

    #[test]
    fn numbers_narrow_to_the_bits_of_the_nearest_half() {
        let numbers = numbers();
        let of = |narrow: &dyn Fn(f32) -> (u16, u32)| numbers.iter().map(|&x| narrow(x)).collect::<Vec<_>>();
        let bf16s = of(&|x| {
            let near = bf16::from_f32_const(x);
            (near.to_bits(), u32::from(near.to_bits()) << 16)
        });
        let f16s = of(&|x| {
            let near = f16::from_f32_const(x);
            (near.to_bits(), near.to_f32_const().to_bits())
        });
        assert!(of(&|x| (narrow_bf16(x).to_bits(), widen_bf16(narrow_bf16(x)).to_bits())) == bf16s);
        assert!(of(&|x| (narrow_f16(x).to_bits(), widen_f16(narrow_f16(x)).to_bits())) == f16s);
        for isa in available_isas() {
            for len in [LANES_MAX, 7] {
                let src = || Store { src: &numbers, len };
                let bad = |got: Vec<(u16, u32)>, want: &[(u16, u32)]| {
                    got.iter().zip(want).position(|(got, want)| got != want).map(|at| (numbers[at], got[at]))
                };
                let got = dispatch_on(isa, StoreBf16(src())).expect("available");
                assert_eq!(bad(got, &bf16s), None, "{isa}: bf16");
                let got = dispatch_on(isa, StoreF16(src())).expect("available");
                assert_eq!(bad(got, &f16s), None, "{isa}: f16");
            }
        }
    }

    /// Neighbours as pairs, and pairs of two slices' elements, for every number of them; neighbours of several lines.
    struct Pairs<'a>(&'a [bf16]);

    impl Kernel for Pairs<'_> {
        type Output = ();

        #[inline(always)]
        fn run<S: Isa>(self) {
            let bits = |x: S::F32| {
                let mut lanes = [0.0; LANES_MAX];
                x.store(&mut lanes);
                lanes.map(f32::to_bits)
            };
            let (lanes, beyond) = (S::F32::LANES, bf16::NEG_ZERO);
            for len in 0..=2 * lanes {
                let pairs = bits(S::F32::load_pairs(&self.0[..len], beyond));
                for (lane, &pair) in pairs[..lanes].iter().enumerate() {
                    let [first, next] = [0, 1].map(|i| {
                        let at = 2 * lane + i;
                        u32::from((if at < len { self.0[at] } else { beyond }).to_bits())
                    });
                    assert_eq!(pair, first << 16 | next);
                }
                let len = len / 2;
                let (first, next) = (&self.0[..len], &self.0[lanes..][..len]);
                let pairs = bits(S::F32::load_pairs_of(first, next));
                for (lane, &pair) in pairs[..lanes].iter().enumerate() {
                    let word = |of: &[bf16]| of.get(lane).map_or(0, |x| u32::from(x.to_bits()));
                    assert_eq!(pair, word(first) << 16 | word(next));
                }
            }
            let in_part = lanes / S::F32::PARTS;
            let lines: [&[bf16]; PARTS_MAX] = each(|i| &self.0[3 * i..][..2 * lanes]);
            for (part, row) in S::F32::load_neighbours(lines)[..S::F32::PARTS].iter().enumerate() {
                let [first, other] = row.split_neighbours().map(bits);
                for lane in 0..lanes {
                    let at = 2 * (part * in_part + lane % in_part);
                    let want = [at, at + 1].map(|at| u32::from(lines[lane / in_part][at].to_bits()) << 16);
                    assert_eq!([first[lane], other[lane]], want, "part {part}, lane {lane}");
                }
            }
        }
    }

    #[test]
    fn pairs_hold_the_first_in_the_upper_half_and_neighbours_in_the_lower() {
        let words: Vec<_> =
            (1..=4 * LANES_MAX as u16).map(|i| bf16::from_bits(i.wrapping_mul(0x1357))).collect();
        for isa in available_isas() {
            dispatch_on(isa, Pairs(&words)).expect("available");
        }
    }
}
