//! Frames of elementwise functions: of one value ([`elementwise()`]), of several values broadcast ([`broadcasting()`]),
//! and those whose derivative is a formula of their inputs ([`Formula`]).

use std::sync::Arc;

use phalanx_tensor::{DType, Result as TensorResult, Tensor};
use smallvec::SmallVec;

use super::frame::{floats, named, wide};
use crate::{
    Backward, Cx, Grads, Rematerialized, Result, SaveContext, SavedVariable, Var, begins, grads1, record,
};

// The frame of functions of one value, elementwise: `y = f(x)`, `dx = dy f'(x)`.
//
// The derivative is made of the input or of the output, which is saved; in one pass by a fused kernel, or of
// differentiable operations if it is to be differentiated again.

/// Such a function's derivative.
pub(crate) trait Elementwise: Send + Sync + 'static {
    /// The operation's name.
    const NAME: &'static str;
    /// Whether the derivative is made of the output; else it is of the input.
    const OF_OUTPUT: bool;

    /// `dx` from the saved value and `dy`, by a kernel.
    fn fused(&self, saved: &Tensor, dy: &Tensor) -> TensorResult<Tensor>;

    /// `fused`, written over `dy` if that has no other owner.
    fn fused_over(&self, saved: &Tensor, dy: Tensor) -> TensorResult<Tensor> {
        self.fused(saved, &dy)
    }

    /// How backward computes the result again of the input, for functions where that is better than to save it.
    fn rematerialize(&self) -> Option<fn(&Tensor) -> TensorResult<Tensor>> {
        None
    }

    /// `fused` of differentiable operations.
    fn composed(&self, saved: &Var, dy: &Var) -> Result<Var>;
}

/// Makes `y` the function's recorded result.
pub(crate) fn elementwise<F: Elementwise>(x: &Var, y: Tensor, function: F) -> Result<Var> {
    let rematerialize = function.rematerialize();
    elementwise_by(x, y, function, rematerialize)
}

/// [`elementwise`] of a result that another kernel than the function's has computed: backward does not compute it again.
pub(super) fn elementwise_made<F: Elementwise>(x: &Var, y: Tensor, function: F) -> Result<Var> {
    elementwise_by(x, y, function, None)
}

fn elementwise_by<F: Elementwise>(
    x: &Var,
    y: Tensor,
    function: F,
    rematerialize: Option<fn(&Tensor) -> TensorResult<Tensor>>,
) -> Result<Var> {
    record(F::NAME, &[x], y, |s: &SaveContext<'_>| {
        let saved = if F::OF_OUTPUT { s.output(0)? } else { s.input(0)? };
        let rematerialized = rematerialize.and_then(|f| s.rematerialized(0, [0], move |x| f(&x[0])));
        Ok(ElementwiseNode { saved, function, rematerialized })
    })
}

pub(super) struct ElementwiseNode<F> {
    /// The input or the output.
    pub(super) saved: SavedVariable,
    pub(super) function: F,
    rematerialized: Option<Arc<Rematerialized>>,
}

impl<F: Elementwise> Backward for ElementwiseNode<F> {
    const REMATERIALIZES: bool = !F::OF_OUTPUT;

    fn backward(&self, cx: &Cx<'_>) -> Result<Grads> {
        let (saved, dy) = (cx.get(&self.saved)?, cx.dy());
        if cx.create_graph() {
            return grads1(self.function.composed(&saved, dy)?);
        }
        grads1(Var::new(self.function.fused(saved.tensor(), dy.tensor())?))
    }

    fn backward_once(self, cx: &mut Cx<'_>) -> Result<Grads> {
        let (saved, dy) = (cx.take(self.saved)?, cx.take_dy().into_tensor());
        grads1(Var::new(self.function.fused_over(&saved, dy)?))
    }

    fn rematerialized(&self, _: usize) -> Option<&Arc<Rematerialized>> {
        self.rematerialized.as_ref()
    }
}

// The frame of functions of several values, elementwise and broadcast: `y = f(a, b, ..)`.
//
// Derivative: `dy` times the partial derivative, summed over what was broadcast. All inputs are saved. Computed in
// one pass by a fused kernel, or of differentiable operations if it is to be differentiated again.

/// Such a function's derivatives.
pub(crate) trait Broadcasting: Send + Sync + 'static {
    /// The operation's name.
    const NAME: &'static str;

    /// The gradient of input `i`, of the broadcast shape, by a kernel; `None` if there is none for this input.
    fn fused(&self, i: usize, x: &[Var], dy: &Tensor) -> TensorResult<Option<Tensor>>;

    /// The same of differentiable operations.
    fn composed(&self, i: usize, x: &[Var], dy: &Var) -> Result<Var>;
}

/// Makes `y` the function's recorded result.
pub(crate) fn broadcasting<F: Broadcasting>(inputs: &[&Var], y: Tensor, function: F) -> Result<Var> {
    record(F::NAME, inputs, y, |s: &SaveContext<'_>| {
        let saved = (0..inputs.len()).map(|i| s.input(i)).collect::<Result<_>>()?;
        Ok(BroadcastNode { saved, function })
    })
}

struct BroadcastNode<F> {
    saved: SmallVec<[SavedVariable; 2]>,
    function: F,
}

impl<F: Broadcasting> Backward for BroadcastNode<F> {
    fn backward(&self, cx: &Cx<'_>) -> Result<Grads> {
        let x: SmallVec<[Var; 2]> = self.saved.iter().map(|s| cx.get(s)).collect::<Result<_>>()?;
        let grad = |i: usize| -> Result<Option<Var>> {
            if !cx.needs(i) {
                return Ok(None);
            }
            let fused = match cx.create_graph() {
                true => None,
                false => self.function.fused(i, &x, cx.dy().tensor())?,
            };
            let full = match fused {
                Some(dx) => Var::new(dx),
                None => self.function.composed(i, &x, cx.dy())?,
            };
            Ok(Some(cx.sum_to_input(i, full)?))
        };
        (0..x.len()).map(grad).collect()
    }
}

// The frame of functions whose derivative is a formula of their inputs: `y = f(a, b, ..)`, elementwise and broadcast.
//
// Derivative: given with the function, of differentiable operations, and summed over what was broadcast. The inputs are
// saved and nothing else, whatever the function is made of. bf16 and f16 are computed in f32, there and back, and rounded
// once at the end. Functions are plain pointers, so one frame is compiled for all.

/// Such a function.
pub(super) struct Formula {
    /// The public name of the operation.
    pub(super) name: &'static str,
    /// `y` of constants.
    pub(super) forward: fn(&[Var]) -> Result<Var>,
    pub(super) gradient: Gradient,
}

/// The gradient of input `i`, of `y`'s shape or one that `y` was broadcast from, given the inputs and `dy`.
type Gradient = fn(usize, &[Var], &Var) -> Result<Var>;

impl Formula {
    /// The function of floating-point inputs of one dtype.
    pub(super) fn of(&self, inputs: &[&Var]) -> Result<Var> {
        begins();
        let dtype = floats(self.name, inputs)?;
        let constants: SmallVec<[Var; 3]> =
            inputs.iter().map(|x| wide(&x.detach())).collect::<Result<_>>()?;
        let y = (self.forward)(&constants).and_then(|y| y.to(dtype));
        let y = named(self.name, y)?.into_tensor();
        let gradient = self.gradient;
        record(self.name, inputs, y, |s: &SaveContext<'_>| {
            let saved = (0..inputs.len()).map(|i| s.input(i)).collect::<Result<_>>()?;
            Ok(FormulaNode { saved, gradient, dtype })
        })
    }
}

struct FormulaNode {
    saved: SmallVec<[SavedVariable; 3]>,
    gradient: Gradient,
    dtype: DType,
}

impl Backward for FormulaNode {
    fn backward(&self, cx: &Cx<'_>) -> Result<Grads> {
        let x: SmallVec<[Var; 3]> = self.saved.iter().map(|s| wide(&cx.get(s)?)).collect::<Result<_>>()?;
        let dy = wide(cx.dy())?;
        let grad = |i: usize| -> Result<Option<Var>> {
            if !cx.needs(i) {
                return Ok(None);
            }
            let dx = (self.gradient)(i, &x, &dy)?;
            Ok(Some(dx.sum_to(x[i].shape())?.to(self.dtype)?))
        };
        (0..x.len()).map(grad).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::{Arc, Mutex};

    use phalanx_kernels::{self as kernels, Gelu, Reduction};
    use phalanx_tensor::{DType, Device, Tensor};

    use crate::ops::testing::check_twice;
    use crate::ops::{KlReduction, KlTarget};
    use crate::{
        Backward, Cx, Grads, Options, Result, SaveContext, Var, backward, enable_grad, grad, grads1, record,
    };

    type Function = fn(&Var) -> Result<Var>;

    /// The derivative of `f`, elementwise, as a function of its own.
    fn slope(f: Function, x: &Var) -> Result<Var> {
        let _recorded = enable_grad();
        let options = Options { create_graph: true, ..Options::default() };
        let made = grad(&[(f(x)?.sum_all()?, None)], &[x], options)?.remove(0);
        made.map_or_else(|| x.mul_scalar(0.0), Ok)
    }

    /// Functions on (-1, 1), none of them near a kink there.
    const SMOOTH: &[(&str, Function)] = &[
        ("cos", Var::cos),
        ("div", |x| x.add_scalar(2.0)?.rdiv_scalar(2.0)?.div_scalar(3.0)),
        ("elu", |x| x.mul_scalar(0.4)?.sub_scalar(0.5)?.elu(0.7)),
        ("erf", Var::erf),
        ("exp", Var::exp),
        ("exp_m1", Var::exp_m1),
        ("gelu", |x| x.gelu(Gelu::Exact)),
        ("gelu tanh", |x| x.gelu(Gelu::Tanh)),
        ("leaky_relu", |x| x.add_scalar(-3.0)?.leaky_relu(0.3)?.square()),
        ("ln_1p", |x| x.mul_scalar(0.5)?.ln_1p()),
        ("log", |x| x.add_scalar(1.5)?.log()),
        ("neg", Var::neg),
        ("pow 0", |x| x.pow_scalar(0.0)),
        ("pow 1", |x| x.pow_scalar(1.0)),
        ("pow 2", |x| x.pow_scalar(2.0)),
        ("pow 3", |x| x.pow_scalar(3.0)),
        ("pow 5", |x| x.pow_scalar(5)),
        ("pow 1.5", |x| x.add_scalar(1.5)?.pow_scalar(1.5)),
        ("pow -1", |x| x.add_scalar(2.5)?.pow_scalar(-1)),
        ("pow of 3", |x| x.rpow_scalar(3.0)),
        ("reciprocal", |x| x.add_scalar(2.0)?.reciprocal()),
        ("rsqrt", |x| x.square()?.add_scalar(1.0)?.rsqrt()),
        ("sigmoid", Var::sigmoid),
        ("silu", Var::silu),
        ("sin", Var::sin),
        ("softplus", |x| x.softplus(1.0, 20.0)),
        ("softplus beta", |x| x.mul_scalar(0.3)?.softplus(2.0, 1.5)),
        ("sqrt", |x| x.add_scalar(1.5)?.sqrt()),
        ("square", Var::square),
        ("tanh", Var::tanh),
    ];

    #[test]
    fn derivatives_are_right_to_the_third() {
        for &(name, f) in SMOOTH {
            println!("{name}");
            check_twice(&[&[5]], |v| f(&v[0]));
            check_twice(&[&[5]], |v| slope(f, &v[0]));
        }
    }

    #[test]
    fn gated_products_have_derivatives() {
        for n in [1, 7, 33, 129] {
            check_twice(&[&[n], &[n]], |v| v[0].silu_mul(&v[1]));
        }
        check_twice(&[&[3, 1], &[4]], |v| v[0].silu_mul(&v[1]));
        check_twice(&[&[3, 4], &[4, 3]], |v| v[0].transpose(0, 1)?.silu_mul(&v[1]));
        check_twice(&[&[0], &[0]], |v| v[0].silu_mul(&v[1]));
    }

    #[test]
    fn fused_and_composed_derivatives_agree_at_kinks_and_in_tails() {
        let kinked: [Function; 10] = [
            Var::abs,
            Var::relu,
            |x| x.leaky_relu(0.1),
            |x| x.elu(0.5),
            |x| x.softplus(1.0, 20.0),
            |x| x.clamp(Some((-1.0).into()), Some(2.0.into())),
            |x| x.clamp(None, Some(2.into())),
            |x| x.gelu(Gelu::Exact),
            |x| x.gelu(Gelu::Tanh),
            Var::silu,
        ];
        let values = [0.0f32, -0.0, -1.0, 2.0, 1e-3, -1e-3, 30.0, -30.0, 1e10, -1e10, 3e38, -3e38];
        for (i, f) in kinked.into_iter().enumerate() {
            let of = |create_graph: bool| {
                let x = Var::leaf(Var::from_slice(&values, &[12], Default::default()).unwrap().into_tensor())
                    .unwrap();
                let options = Options { create_graph, ..Options::default() };
                let roots = [(f(&x).unwrap().sum_all().unwrap(), None)];
                grad(&roots, &[&x], options).unwrap().remove(0).unwrap().to_vec::<f32>().unwrap()
            };
            for (at, (fused, composed)) in of(false).into_iter().zip(of(true)).enumerate() {
                let close = (fused - composed).abs() <= 1e-6;
                assert!(close, "function {i} at {}: {fused} and {composed}", values[at]);
            }
        }
    }

    /// An operation whose gradient is this tensor, given away at the first time.
    struct Gives(Mutex<Option<Tensor>>);

    impl Backward for Gives {
        fn backward(&self, _: &Cx<'_>) -> Result<Grads> {
            grads1(Var::new(self.0.lock().unwrap().take().unwrap()))
        }
    }

    /// `dx` of `f` at `x` for that `dy`, and whether it lies where `dy` lay; `meanwhile` gets the result of `f`.
    fn given(
        f: Function,
        x: &Tensor,
        dy: Tensor,
        options: Options,
        meanwhile: impl FnOnce(&Var),
    ) -> (Vec<f64>, bool) {
        let address = |t: &Tensor| std::ptr::from_ref(t.storage()).addr();
        let (place, seen) = (address(&dy), Arc::new(AtomicUsize::new(0)));
        let leaf = Var::leaf(x.clone()).unwrap();
        // Another operation, at whose hook the gradient comes by.
        let x = leaf.reshape_to(x.shape()).unwrap();
        let noted = seen.clone();
        x.on_grad(move |dx| {
            noted.store(address(dx.tensor()), Ordering::Relaxed);
            Ok(None)
        });
        let y = f(&x).unwrap();
        meanwhile(&y);
        let out = y.tensor().clone();
        let z = record("gives", &[&y], out, |_: &SaveContext<'_>| Ok(Gives(Mutex::new(Some(dy))))).unwrap();
        drop(y);
        backward(&[(z.sum_all().unwrap(), None)], options).unwrap();
        let dx = kernels::cast(leaf.grad().unwrap().tensor(), DType::F64).unwrap();
        (dx.to_vec::<f64>().unwrap(), seen.load(Ordering::Relaxed) == place)
    }

    #[test]
    fn a_gradient_is_written_over_where_nobody_else_has_it_and_only_there() {
        let functions: [Function; 5] = [
            |x| x.gelu(Gelu::Exact),
            |x| x.gelu(Gelu::Tanh),
            Var::silu,
            |x| x.mul(&Var::new(x.tensor().copy()?)),
            |x| Var::new(x.tensor().copy()?).mul(x),
        ];
        let once = Options::default();
        for (at, f) in functions.into_iter().enumerate() {
            for (dtype, shape) in [DType::F64, DType::F32, DType::BF16]
                .iter()
                .flat_map(|&d| [&[0][..], &[1], &[7], &[3, 11], &[129], &[5, 900]].map(|shape| (d, shape)))
            {
                let what = format!("function {at}, {dtype}, {shape:?}");
                let make = |scale: f64| {
                    let count = shape.iter().product::<usize>();
                    let values: Vec<f64> = (0..count).map(|i| scale * (i as f64 * 0.7).sin()).collect();
                    let whole = Tensor::from_slice(&values, shape, Device::CPU).unwrap();
                    kernels::cast(&whole, dtype).unwrap().copy().unwrap()
                };
                let values = |t: &Tensor| kernels::cast(t, DType::F64).unwrap().to_vec::<f64>().unwrap();
                let (x, dy) = (make(3.0), make(2.0));
                // The other owners find it unchanged.
                let (wanted, over) = given(f, &x, dy.clone(), once, |_| ());
                assert!(!over, "{what}");
                assert_eq!(values(&dy), values(&make(2.0)), "{what}");
                let alone = given(f, &x, dy.copy().unwrap(), once, |_| ());
                assert_eq!(alone, (wanted.clone(), true), "{what}");
                // Kept for another time, or watched.
                let kept = Options { retain_graph: true, ..once };
                assert_eq!(given(f, &x, dy.copy().unwrap(), kept, |_| ()), (wanted.clone(), false), "{what}");
                let hook = |y: &Var| drop(y.on_grad(|_| Ok(None)));
                assert_eq!(given(f, &x, dy.copy().unwrap(), once, hook), (wanted.clone(), false), "{what}");
                // A part of something larger, and one number at many places.
                let wide = Tensor::from_slice(&[1.0, 2.0, 3.0], &[3], Device::CPU).unwrap();
                let one = kernels::cast(&wide, dtype).unwrap();
                let spread = one.narrow(0, 1, 1).unwrap().broadcast_to(shape).unwrap();
                let (same, over) = given(f, &x, spread.copy().unwrap(), once, |_| ());
                assert!(over, "{what}");
                assert_eq!(given(f, &x, spread, once, |_| ()), (same, false), "{what}");
                assert_eq!(values(&one), [1.0, 2.0, 3.0], "{what}");
            }
        }
    }

    #[test]
    fn a_root_gradient_and_a_captured_one_stay_as_they_are() {
        let x = Var::leaf(Tensor::from_slice(&[0.5, -1.0], &[2], Device::CPU).unwrap()).unwrap();
        let root = Var::from_slice(&[2.0, 3.0], &[2], Device::CPU).unwrap();
        let y = x.silu().unwrap();
        let grads = grad(&[(y.clone(), Some(root.clone()))], &[&y, &x], Options::default()).unwrap();
        for kept in [&root, grads[0].as_ref().unwrap()] {
            assert_eq!(kept.to_vec::<f64>().unwrap(), [2.0, 3.0]);
        }
        let again = x.silu().unwrap().mul(&root).unwrap().sum_all().unwrap();
        let wanted = grad(&[(again, None)], &[&x], Options::default()).unwrap();
        let [got, wanted] = [&grads[1], &wanted[0]].map(|g| g.as_ref().unwrap().to_vec::<f64>().unwrap());
        assert_eq!(got, wanted);
    }

    const PAIRS: [[&[usize]; 2]; 3] = [[&[2, 3], &[2, 3]], [&[2, 3], &[3]], [&[2, 1], &[1, 3]]];

    #[test]
    fn first_and_second_derivatives_are_right_under_broadcasting() {
        let positive = |x: &Var| x.add_scalar(1.6);
        for shapes in PAIRS {
            let check = |f: fn(&Var, &Var) -> Result<Var>| check_twice(&shapes, |v| f(&v[0], &v[1]));
            check(Var::sub);
            check(|a, b| a.div(&b.add_scalar(1.6)?));
            check_twice(&shapes, |v| positive(&v[0])?.pow(&v[1]));
            check(|a, b| a.square()?.maximum(&b.add_scalar(0.3)?));
            check(|a, b| a.square()?.minimum(&b.add_scalar(0.3)?));
            check(|a, b| a.square()?.where_(&b.gt_scalar(0.1)?, &b.square()?));
            check(|a, b| a.add(b)?.square()?.masked_fill(&b.gt_scalar(0.1)?, 3.0));
        }
    }

    #[test]
    fn losses_have_right_first_and_second_derivatives() {
        for shapes in [PAIRS[0]] {
            for reduction in [Reduction::None, Reduction::Mean, Reduction::Sum] {
                check_twice(&shapes, |v| v[0].mse_loss(&v[1], reduction));
                check_twice(&shapes, |v| v[0].square()?.l1_loss(&v[1], reduction));
                check_twice(&shapes, |v| v[0].square()?.smooth_l1_loss(&v[1], 0.4, reduction));
                let kind = KlReduction::Elements(reduction);
                check_twice(&shapes, |v| v[0].kl_div(&v[1], KlTarget::LogProbabilities, kind));
                check_twice(&shapes, |v| v[0].kl_div(&v[1].add_scalar(1.6)?, KlTarget::Probabilities, kind));
            }
        }
        let entropy = |v: &[Var]| {
            let [x, t, w, p] = [&v[0], &v[1].sigmoid()?, &v[2], &v[3].exp()?];
            x.binary_cross_entropy_with_logits(t, Some(w), Some(p), Reduction::Mean)
        };
        check_twice(&[&[2, 3], &[2, 3], &[2, 1], &[3]], entropy);
        check_twice(&[&[2, 3], &[2, 3]], |v| {
            v[0].binary_cross_entropy_with_logits(&v[1], None, None, Reduction::Sum)
        });
    }
}
