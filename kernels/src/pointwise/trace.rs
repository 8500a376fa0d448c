//! [`Trace`]: a vector that holds no numbers and records the operations on it, so that a body written over [`Vector`] becomes
//! the text of a CUDA function.
//!
//! ```text
//! |x, dy| dy * c(alpha) * x.exp()      k[0] = alpha
//!     -> const W v3 = vec::mul(x[1], k[0]); const W v4 = exp(x[0]); const W v5 = vec::mul(v3, v4); y[0] = v5;
//! ```
//!
//! Numbers become parameters: another learning rate is the same function. The record is the function's key, and each
//! text is made once per process; recording it again, as each launch does, allocates nothing.

use std::cell::RefCell;
use std::collections::HashMap;
use std::ops::{Add, BitAnd, BitOr, Div, Mul, Neg, Not, Sub};
use std::sync::{LazyLock, RwLock};

use phalanx_tensor::cuda::Args;
use phalanx_tensor::{DType, unpoisoned};
use smallvec::SmallVec;

use crate::cuda::File;
use crate::simd::{Mask, Vector};

/// What the texts refer to.
pub(crate) const VECTOR: File = ("vector.cuh", include_str!("vector.cuh"));

/// A function of vectors, as CUDA text.
pub(crate) struct Traced {
    /// The body of a structure: `{ W k[..]; DEVICE void operator()(const W* x, W* y) const {..} }`. To be handed to a
    /// program as a macro, which says `struct Name MACRO;` where the type `W` that is computed in is known and
    /// [`VECTOR`] was included.
    pub(crate) text: &'static str,
    /// What its `k` is to hold.
    pub(crate) numbers: SmallVec<[f64; 8]>,
}

impl Traced {
    /// Adds the structure's value to the arguments: its numbers, in the type that elements of `dtype` are computed in.
    pub(crate) fn pass<'a>(&self, mut args: Args<'a>, dtype: DType) -> Args<'a> {
        // A structure of no numbers has one all the same, since C++ knows no empty array.
        let unused = if self.numbers.is_empty() { &[0.0][..] } else { &[] };
        for &number in self.numbers.iter().chain(unused) {
            args = match dtype {
                DType::F64 => args.value(number),
                _ => args.value(number as f32),
            };
        }
        args
    }
}

/// The function of `N` vectors that `f` is, with `K` results.
pub(crate) fn function<const N: usize, const K: usize>(f: impl FnOnce([Trace; N]) -> [Trace; K]) -> Traced {
    let x = begin(N);
    end(&f(std::array::from_fn(|n| x[n])))
}

/// [`function`], of as many vectors as are only known where it is called.
pub(crate) fn function_of(inputs: usize, f: impl FnOnce(&[Trace]) -> SmallVec<[Trace; 4]>) -> Traced {
    end(&f(&begin(inputs)))
}

/// The vectors of a new function.
fn begin(inputs: usize) -> SmallVec<[Trace; 8]> {
    TAPE.with_borrow_mut(|tape| {
        tape.notes.clear();
        tape.numbers.clear();
    });
    (0..inputs).map(|n| Trace::note(Op::Input, [n as u16, 0, 0])).collect()
}

/// The function that has been noted.
fn end(results: &[Trace]) -> Traced {
    TAPE.with_borrow_mut(|tape| {
        for (k, result) in results.iter().enumerate() {
            tape.push(Op::Result, [result.0, k as u16, 0]);
        }
        Traced { text: text_of(&tape.notes), numbers: SmallVec::from_slice(&tape.numbers) }
    })
}

macro_rules! operations {
    ($($(#[$doc:meta])* $name:ident $kind:ident $text:literal;)*) => {
        /// What can be done to vectors.
        #[derive(Clone, Copy)]
        enum Op {
            $($(#[$doc])* $name,)*
        }

        /// The type of each one's result, and its text with `a`, `b` and `c` for the operands.
        const TEXTS: &[(&str, &str)] = &[$((stringify!($kind), $text),)*];
    };
}

operations! {
    /// An argument, by its place.
    Input none "";
    /// A parameter, by its place.
    Number none "";
    /// A result, and its place.
    Result none "";
    Zero W "W(0)";
    Add W "vec::add($a, $b)";
    Sub W "vec::sub($a, $b)";
    Mul W "vec::mul($a, $b)";
    Div W "vec::div($a, $b)";
    Neg W "-$a";
    MulAdd W "fma($a, $b, $c)";
    Min W "vec::min($a, $b)";
    Max W "vec::max($a, $b)";
    NanMin W "vec::nan_min($a, $b)";
    NanMax W "vec::nan_max($a, $b)";
    Abs W "fabs($a)";
    Sqrt W "vec::sqrt($a)";
    Floor W "floor($a)";
    Trunc W "trunc($a)";
    RoundEven W "rint($a)";
    Copysign W "copysign($a, $b)";
    Lt bool "$a < $b";
    Le bool "$a <= $b";
    Eq bool "$a == $b";
    And bool "$a && $b";
    Or bool "$a || $b";
    Not bool "!$a";
    Select W "$a ? $b : $c";
    Scale W "ldexp($a, (int)$b)";
    Exp W "exp($a)";
    ExpM1 W "expm1($a)";
    Ln W "log($a)";
    Ln1p W "log1p($a)";
    Tanh W "tanh($a)";
    Sigmoid W "vec::sigmoid($a)";
    Erf W "erf($a)";
    Erfc W "erfc($a)";
    Sin W "sin($a)";
    Cos W "cos($a)";
    Pow W "pow($a, $b)";
}

/// What was noted on this thread, in order. A note holds an operation and the places of its operands' notes.
#[derive(Default)]
struct Tape {
    notes: Vec<u64>,
    numbers: Vec<f64>,
}

thread_local! {
    static TAPE: RefCell<Tape> = RefCell::default();
}

impl Tape {
    fn push(&mut self, op: Op, [a, b, c]: [u16; 3]) -> u16 {
        let [a, b, c] = [a, b, c].map(u64::from);
        self.notes.push((op as u64) << 48 | a << 32 | b << 16 | c);
        (self.notes.len() - 1) as u16
    }
}

/// The text for these notes; made when they are first seen.
fn text_of(notes: &[u64]) -> &'static str {
    type Texts = HashMap<Box<[u64]>, &'static str>;
    static KNOWN: LazyLock<RwLock<Texts>> = LazyLock::new(RwLock::default);
    if let Some(text) = unpoisoned(KNOWN.read()).get(notes) {
        return text;
    }
    let mut known = unpoisoned(KNOWN.write());
    // Leaked: there are no more of them than functions in this program's source.
    known.entry(notes.into()).or_insert_with(|| write(notes).leak())
}

fn write(notes: &[u64]) -> String {
    let part = |note: u64, shift: u32| (note >> shift) as u16;
    let is = |note: u64, op: Op| part(note, 48) == op as u16;
    let name = |at: u16| match notes[usize::from(at)] {
        note if is(note, Op::Input) => format!("x[{}]", part(note, 32)),
        note if is(note, Op::Number) => format!("k[{}]", part(note, 32)),
        _ => format!("v{at}"),
    };
    let mut body = String::new();
    for (at, &note) in notes.iter().enumerate() {
        let [a, b, c] = [32, 16, 0].map(|shift| part(note, shift));
        let (kind, text) = TEXTS[usize::from(part(note, 48))];
        if is(note, Op::Result) {
            body += &format!("y[{b}] = {}; ", name(a));
        } else if kind != "none" {
            let mut text = text.to_string();
            for (operand, at) in [("$a", a), ("$b", b), ("$c", c)] {
                if text.contains(operand) {
                    text = text.replace(operand, &name(at));
                }
            }
            body += &format!("const {kind} v{at} = {text}; ");
        }
    }
    let count = notes.iter().filter(|&&note| is(note, Op::Number)).count();
    format!("{{ W k[{}]; DEVICE void operator()(const W* x, W* y) const {{ {body}}} }}", count.max(1))
}

/// A vector's place on the tape.
#[derive(Clone, Copy)]
pub(crate) struct Trace(u16);

/// A mask's place on the tape.
#[derive(Clone, Copy)]
pub(crate) struct TraceMask(u16);

impl Trace {
    fn note(op: Op, of: [u16; 3]) -> Trace {
        Trace(TAPE.with_borrow_mut(|tape| tape.push(op, of)))
    }

    fn compare(op: Op, a: Trace, b: Trace) -> TraceMask {
        TraceMask(Trace::note(op, [a.0, b.0, 0]).0)
    }
}

/// What has no meaning without elements. Bodies that become CUDA text do none of it.
fn elementless() -> ! {
    unreachable!("a trace has no elements to load, store or look at")
}

impl Mask for TraceMask {
    fn any(self) -> bool {
        elementless()
    }

    fn all(self) -> bool {
        false // not known, so nothing is left out
    }
}

impl BitAnd for TraceMask {
    type Output = TraceMask;

    fn bitand(self, o: TraceMask) -> TraceMask {
        TraceMask(Trace::note(Op::And, [self.0, o.0, 0]).0)
    }
}

impl BitOr for TraceMask {
    type Output = TraceMask;

    fn bitor(self, o: TraceMask) -> TraceMask {
        TraceMask(Trace::note(Op::Or, [self.0, o.0, 0]).0)
    }
}

impl Not for TraceMask {
    type Output = TraceMask;

    fn not(self) -> TraceMask {
        TraceMask(Trace::note(Op::Not, [self.0, 0, 0]).0)
    }
}

macro_rules! operators {
    ($($trait:ident $method:ident;)*) => {$(
        impl $trait for Trace {
            type Output = Trace;

            fn $method(self, o: Trace) -> Trace {
                Trace::note(Op::$trait, [self.0, o.0, 0])
            }
        }
    )*};
}

operators! { Add add; Sub sub; Mul mul; Div div; }

impl Neg for Trace {
    type Output = Trace;

    fn neg(self) -> Trace {
        Trace::note(Op::Neg, [self.0, 0, 0])
    }
}

macro_rules! unary {
    ($($method:ident $op:ident;)*) => {$(
        fn $method(self) -> Trace {
            Trace::note(Op::$op, [self.0, 0, 0])
        }
    )*};
}

macro_rules! binary {
    ($($method:ident $op:ident;)*) => {$(
        fn $method(self, o: Trace) -> Trace {
            Trace::note(Op::$op, [self.0, o.0, 0])
        }
    )*};
}

macro_rules! comparison {
    ($($method:ident $op:ident;)*) => {$(
        fn $method(self, o: Trace) -> TraceMask {
            Trace::compare(Op::$op, self, o)
        }
    )*};
}

impl Vector for Trace {
    /// Numbers are kept as they came; the function's type rounds them.
    type Elem = f64;
    type Mask = TraceMask;
    const LANES: usize = 1;

    fn splat(x: f64) -> Trace {
        Trace(TAPE.with_borrow_mut(|tape| {
            tape.numbers.push(x);
            let place = tape.numbers.len() - 1;
            tape.push(Op::Number, [place as u16, 0, 0])
        }))
    }

    fn zero() -> Trace {
        Trace::note(Op::Zero, [0; 3])
    }

    fn mul_add(self, b: Trace, c: Trace) -> Trace {
        Trace::note(Op::MulAdd, [self.0, b.0, c.0])
    }

    fn select(mask: TraceMask, if_true: Trace, if_false: Trace) -> Trace {
        Trace::note(Op::Select, [mask.0, if_true.0, if_false.0])
    }

    comparison! { lt Lt; le Le; eq Eq; }
    binary! {
        min Min; max Max; nan_min NanMin; nan_max NanMax; copysign Copysign; scale_by_power Scale; pow Pow;
    }
    unary! {
        abs Abs; sqrt Sqrt; floor Floor; trunc Trunc; round_even RoundEven; exp Exp; exp_m1 ExpM1; ln Ln; ln_1p Ln1p;
        tanh Tanh; sigmoid Sigmoid; erf Erf; erfc Erfc; sin Sin; cos Cos;
    }

    fn load(_: &[f64]) -> Trace {
        elementless()
    }

    fn load_partial(_: &[f64], _: f64) -> Trace {
        elementless()
    }

    fn store(self, _: &mut [f64]) {
        elementless()
    }

    fn store_partial(self, _: &mut [f64]) {
        elementless()
    }

    fn split(self) -> (Trace, Trace) {
        elementless()
    }

    fn zip_parts(self, _: Trace) -> (Trace, Trace) {
        elementless()
    }
}

#[cfg(test)]
mod tests {
    use super::{Trace, function};
    use crate::pointwise::c;
    use crate::simd::Vector;

    fn scaled(alpha: f64) -> super::Traced {
        function(|[x, dy]: [Trace; 2]| [dy * c(alpha) * x.exp()])
    }

    #[test]
    fn a_body_becomes_a_function_whose_numbers_are_parameters() {
        let one = scaled(0.5);
        assert_eq!(
            one.text,
            "{ W k[1]; DEVICE void operator()(const W* x, W* y) const { const W v3 = vec::mul(x[1], k[0]); \
             const W v4 = exp(x[0]); const W v5 = vec::mul(v3, v4); y[0] = v5; } }"
        );
        let other = scaled(2.0);
        assert!(std::ptr::eq(one.text, other.text));
        assert_eq!((&one.numbers[..], &other.numbers[..]), (&[0.5][..], &[2.0][..]));
    }

    #[test]
    fn masks_choices_and_several_results_are_noted() {
        let f = function(|[x]: [Trace; 1]| {
            [x, Trace::select(x.is_nan() | x.lt(Trace::zero()), -x, x.mul_add(x, x))]
        });
        assert_eq!(
            f.text,
            "{ W k[1]; DEVICE void operator()(const W* x, W* y) const { const bool v1 = x[0] == x[0]; \
             const bool v2 = !v1; const W v3 = W(0); const bool v4 = x[0] < v3; const bool v5 = v2 || v4; \
             const W v6 = -x[0]; const W v7 = fma(x[0], x[0], x[0]); const W v8 = v5 ? v6 : v7; y[0] = x[0]; \
             y[1] = v8; } }"
        );
        assert!(f.numbers.is_empty());
    }
}
