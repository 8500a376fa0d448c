//! Rematerialization: results that backward computes again instead of keeping them.
//!
//! A norm or an activation saves its input for its own derivative. An operation behind it that would save the result
//! too, as a linear map does for its weight's gradient, keeps the input and the kernel that computes the result from it:
//!
//! ```text
//! x --- gelu --- y --- linear --- z        saved: x (by gelu), x and gelu's kernel (by linear), not y
//! ```
//!
//! The first backward function that asks for the result computes it. It is kept until all operations that saved it have
//! run. Its bits are the forward pass's, as the kernel is the same. Source: what llm.c's `recompute` and selective
//! recomputation (Korthikanti et al., Reducing activation recomputation, 2022) do by hand for certain layers.

use std::sync::{Arc, Mutex};

use phalanx_tensor::{Result as TensorResult, Tensor, unpoisoned};
use smallvec::SmallVec;

use crate::{Error, Result, no_grad};

/// How a result is computed again. [`crate::SaveContext::rematerialized`] makes one, [`crate::Backward::rematerialized`]
/// offers it.
pub struct Rematerialized {
    op: &'static str,
    /// The version of the result when it was computed. If it was modified since, it is saved instead of recomputed.
    pub(crate) version: u64,
    sources: SmallVec<[Source; 3]>,
    compute: Compute,
    computed: Mutex<Option<Tensor>>,
}

/// Computes the result of its sources.
type Compute = Box<dyn Fn(&[Tensor]) -> TensorResult<Tensor> + Send + Sync>;

/// An input of the recomputation: a tensor with the version that it must still have, or a result that is itself
/// recomputed.
pub(crate) enum Source {
    Tensor(Tensor, u64),
    Rematerialized(Arc<Rematerialized>),
}

impl Source {
    pub(crate) fn of(tensor: &Tensor) -> Source {
        Source::Tensor(tensor.clone(), tensor.version())
    }

    fn tensor(&self, op: &'static str) -> Result<Tensor> {
        match self {
            Source::Rematerialized(source) => source.tensor(),
            Source::Tensor(tensor, saved) if tensor.version() == *saved => Ok(tensor.clone()),
            Source::Tensor(tensor, saved) => {
                Err(Error::modified(op, "what its result is made of".into(), *saved, tensor.version()))
            }
        }
    }
}

impl Rematerialized {
    pub(crate) fn new(
        op: &'static str,
        output: &Tensor,
        sources: SmallVec<[Source; 3]>,
        compute: impl Fn(&[Tensor]) -> TensorResult<Tensor> + Send + Sync + 'static,
    ) -> Arc<Rematerialized> {
        Arc::new(Rematerialized {
            op,
            version: output.version(),
            sources,
            compute: Box::new(compute),
            computed: Mutex::default(),
        })
    }

    /// Whether one of its inputs is itself rematerialized.
    pub(crate) fn is_nested(&self) -> bool {
        self.sources.iter().any(|source| matches!(source, Source::Rematerialized(_)))
    }

    /// The result, kept for the other saved variables that share this.
    pub(crate) fn tensor(self: &Arc<Rematerialized>) -> Result<Tensor> {
        let mut computed = unpoisoned(self.computed.lock());
        let tensor = match computed.take() {
            Some(tensor) => tensor,
            None => {
                let _plain = no_grad();
                let sources = self.sources.iter().map(|s| s.tensor(self.op));
                (self.compute)(&sources.collect::<Result<SmallVec<[Tensor; 3]>>>()?)?
            }
        };
        if Arc::strong_count(self) > 2 {
            *computed = Some(tensor.clone());
        }
        Ok(tensor)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use phalanx_kernels::Gelu;
    use phalanx_tensor::{DType, Device, Result as TensorResult, Tensor};

    use super::{Rematerialized, Source};
    use crate::ops::testing::check_twice;
    use crate::{Leaf, Options, Result, SavedHooks, Var, backward, grad, saved_hooks};

    fn tensor(shape: &[usize], device: Device) -> Tensor {
        let values: Vec<f32> = (0..shape.iter().product()).map(|i: usize| (i as f32 * 0.7).sin()).collect();
        Tensor::from_slice(&values, shape, device).unwrap()
    }

    fn now(device: Device) -> usize {
        device.ledger().unwrap().total().now
    }

    type Function = fn(&Var) -> Result<Var>;

    const FUNCTIONS: [(&str, Function); 10] = [
        ("gelu", |x| x.gelu(Gelu::Exact)),
        ("gelu by tanh", |x| x.gelu(Gelu::Tanh)),
        ("silu", Var::silu),
        ("layer_norm", |x| x.layer_norm(&[64], None, None, 1e-5)),
        ("rms_norm", |x| x.rms_norm(&[64], None, 1e-5)),
        ("silu_mul", |x| x.silu_mul(&x.mul_scalar(0.5)?)),
        ("silu, gated", |x| x.silu()?.mul(&x.mul_scalar(0.5)?)),
        ("a product of two", |x| x.gelu(Gelu::Tanh)?.mul(&x.silu()?)),
        ("add_layer_norm", |x| Ok(x.add_layer_norm(x, &[64], None, None, 1e-5)?.1)),
        ("add_rms_norm", |x| Ok(x.add_rms_norm(x, &[64], None, 1e-5)?.1)),
    ];

    #[test]
    fn what_a_linear_map_reads_is_not_kept() {
        for (at, (name, f)) in FUNCTIONS.into_iter().enumerate() {
            let device = Device::Cpu(40 + at as u16);
            let x = Var::leaf(tensor(&[32, 64], device)).unwrap();
            let w = Leaf::new(tensor(&[1, 64], device), true).unwrap();
            let before = now(device);
            let made = f(&x).unwrap();
            let kept = now(device) - before;
            let y = made.linear(&w.var(), None).unwrap();
            drop(made);
            let after = now(device) - before;
            assert!(after + 32 * 64 * 4 <= kept + 32 * 4 + 256, "{name}: {kept} bytes, then {after}");
            backward(&[(y.sum_all().unwrap(), None)], Options::default()).unwrap();
            drop(y);
            x.as_leaf().unwrap().zero_grad().unwrap();
            w.zero_grad().unwrap();
            assert_eq!(now(device), before, "{name}: bytes that stay");
        }
    }

    /// Keeps values as they are.
    struct Keep;

    impl SavedHooks for Keep {
        fn pack(&self, tensor: &Tensor) -> Result<Box<dyn std::any::Any + Send + Sync>> {
            Ok(Box::new(tensor.clone()))
        }

        fn unpack(&self, packed: &(dyn std::any::Any + Send + Sync)) -> Result<Tensor> {
            Ok(packed.downcast_ref::<Tensor>().unwrap().clone())
        }
    }

    #[test]
    fn gradients_have_the_bits_of_kept_values() {
        for (name, f) in FUNCTIONS {
            for dtype in [DType::F32, DType::BF16] {
                let run = |keep: bool| {
                    let _hooks = keep.then(|| saved_hooks(Arc::new(Keep)));
                    let x = Var::leaf(tensor(&[7, 64], Device::CPU)).unwrap();
                    let w = Var::leaf(tensor(&[3, 64], Device::CPU)).unwrap();
                    let (made, w2) = (f(&x).unwrap().to(dtype).unwrap(), w.to(dtype).unwrap());
                    // Two linear maps share what is made again.
                    let sum = made.linear(&w2, None).unwrap().mul(&made.linear(&w2, None).unwrap()).unwrap();
                    let grads =
                        grad(&[(sum.sum_all().unwrap(), None)], &[&x, &w], Options::default()).unwrap();
                    grads.into_iter().map(|g| g.unwrap().to_vec::<f32>().unwrap()).collect::<Vec<_>>()
                };
                assert_eq!(run(false), run(true), "{name}, {dtype}");
            }
        }
    }

    #[test]
    fn derivatives_have_derivatives() {
        check_twice(&[&[3, 4], &[2, 4]], |v| v[0].gelu(Gelu::Tanh)?.linear(&v[1], None));
        check_twice(&[&[3, 4], &[3, 1], &[2, 4]], |v| v[0].silu()?.mul(&v[1])?.linear(&v[2], None));
        let (x, w): (&[usize], &[usize]) = (&[3, 4], &[4]);
        check_twice(&[x, w, w, &[2, 4]], |v| {
            let (sum, y) = v[0].add_layer_norm(&v[0], &[4], Some(&v[1]), Some(&v[2]), 1e-2)?;
            y.linear(&v[3], None)?.mul(&sum.linear(&v[3], None)?)
        });
    }

    #[test]
    fn a_value_written_before_it_is_saved_is_kept_and_a_source_written_later_is_found() {
        let x = Var::leaf(tensor(&[2, 3], Device::CPU)).unwrap().mul_scalar(1.0).unwrap();
        let w = Var::leaf(tensor(&[1, 3], Device::CPU)).unwrap();
        let y = x.silu().unwrap();
        fill(y.tensor(), 2.0).unwrap();
        let z = y.linear(&w, None).unwrap().sum_all().unwrap();
        let dw = grad(&[(z, None)], &[&w], Options::default()).unwrap().remove(0).unwrap();
        assert_eq!(dw.to_vec::<f32>().unwrap(), [4.0; 3]);
        let z = x.silu().unwrap().linear(&w, None).unwrap().sum_all().unwrap();
        fill(x.tensor(), 2.0).unwrap();
        let error = grad(&[(z, None)], &[&w], Options::default()).unwrap_err().to_string();
        assert!(error.contains("silu") && error.contains("modified in place"), "{error}");
    }

    fn fill(tensor: &Tensor, value: f32) -> TensorResult<()> {
        phalanx_kernels::fill_(&mut tensor.clone(), value)
    }

    #[test]
    fn a_branch_outlives_the_freed_operation() {
        let x = Var::leaf(tensor(&[2, 3], Device::CPU)).unwrap();
        let w = Var::leaf(tensor(&[1, 3], Device::CPU)).unwrap();
        let y = x.silu().unwrap();
        let (a, b) = (y.sum_all().unwrap(), y.linear(&w, None).unwrap().sum_all().unwrap());
        a.backward().unwrap();
        let dw = grad(&[(b, None)], &[&w], Options::default()).unwrap().remove(0).unwrap();
        let wanted = y.sum(&[0], false).unwrap().to_vec::<f32>().unwrap();
        assert_eq!(dw.to_vec::<f32>().unwrap(), wanted);
    }

    #[test]
    fn a_norm_whose_weight_comes_and_goes_is_kept() {
        let x = Var::leaf(tensor(&[4, 64], Device::CPU)).unwrap();
        let [g, w] = [0, 1].map(|_| Leaf::new(tensor(&[64], Device::CPU), true).unwrap());
        let full = g.tensor();
        let nothing = || Tensor::from_slice::<f32>(&[], &[0], Device::CPU).unwrap();
        g.set_tensor(nothing()).unwrap();
        g.set_tensor(full.clone()).unwrap();
        let y = x.layer_norm(&[64], Some(&g.var()), None, 1e-5).unwrap();
        let z = y.linear(&w.var().unsqueeze(0).unwrap(), None).unwrap().sum_all().unwrap();
        g.set_tensor(nothing()).unwrap();
        let dw = grad(&[(z, None)], &[&w.var()], Options::default()).unwrap().remove(0).unwrap();
        let (dw, wanted) = [dw, y.sum(&[0], false).unwrap()].map(|v| v.to_vec::<f32>().unwrap()).into();
        assert_eq!((dw.len(), wanted.len()), (64, 64));
        assert!(dw.iter().zip(wanted).all(|(a, b)| (a - b).abs() < 1e-5));
    }
    /// Counts what it keeps.
    struct Count(Arc<AtomicUsize>);

    impl SavedHooks for Count {
        fn pack(&self, tensor: &Tensor) -> Result<Box<dyn std::any::Any + Send + Sync>> {
            self.0.fetch_add(1, Ordering::Relaxed);
            Keep.pack(tensor)
        }

        fn unpack(&self, packed: &(dyn std::any::Any + Send + Sync)) -> Result<Tensor> {
            Keep.unpack(packed)
        }
    }

    #[test]
    fn hooks_of_saved_values_get_the_result_too() {
        let packed = Arc::new(AtomicUsize::new(0));
        let _hooks = saved_hooks(Arc::new(Count(packed.clone())));
        let x = Var::leaf(tensor(&[2, 3], Device::CPU)).unwrap().mul_scalar(2.0).unwrap();
        let w = Var::leaf(tensor(&[1, 3], Device::CPU)).unwrap();
        x.silu().unwrap().linear(&w, None).unwrap();
        assert_eq!(packed.load(Ordering::Relaxed), 2); // silu's input and the linear map's
    }

    #[test]
    fn it_is_made_once_for_all_that_hold_it_and_then_let_go() {
        let (times, x) = (Arc::new(AtomicUsize::new(0)), tensor(&[2], Device::CPU));
        let counted = times.clone();
        let make = move |of: &[Tensor]| {
            counted.fetch_add(1, Ordering::Relaxed);
            Ok(of[0].clone())
        };
        let producer = Rematerialized::new("test", &x, [Source::of(&x)].into_iter().collect(), make);
        let (first, second) = (producer.clone(), producer.clone());
        first.tensor().unwrap();
        drop(first);
        second.tensor().unwrap();
        assert_eq!(times.load(Ordering::Relaxed), 1);
        assert!(producer.computed.lock().unwrap().is_none());
    }
}
