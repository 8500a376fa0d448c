//! The backward engine.
//!
//! [`plan`] counts, for every node that will run, how many gradients it waits for. Then ready nodes run, the one
//! recorded last first, and pass gradients on along their edges: on the calling thread if the graph lives on one
//! device ([`inline`]), else on one worker per device ([`workers`]). Gradients that meet at a node are summed in
//! the order of the nodes they come from, latest first, not in the order of arrival, so both give the same bits.

mod inline;
mod job;
mod meeting;
mod numbers;
mod pending;
mod plan;
mod task;
mod workers;

use std::sync::Arc;

use phalanx_kernels as kernels;
use phalanx_tensor::{Context, Scalar};

use crate::node::{Meta, Node};
use crate::{Error, Result, Var};
use job::{Job, Mode};
use pending::Pending;
pub(crate) use task::Place;
use task::{NodeGrads, Root};

/// How a backward pass treats the graph.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Options {
    /// Keep saved values, so that the graph can be run backward again.
    pub retain_graph: bool,
    /// Record the gradients' own graph, so that they can be differentiated; implies `retain_graph`.
    pub create_graph: bool,
}

/// Computes the gradients of `roots` with respect to every leaf behind them and adds them to the leaves' slots.
/// Each root comes with its own gradient; `None` stands for 1 and is for roots of one element. Ends the step whose random
/// draws are counted ([`phalanx_tensor::RngKey`]).
///
/// # Errors
/// If no root has a graph, a gradient does not fit its root, a saved value was freed or modified, or a backward
/// function or hook fails or panics.
pub fn backward(roots: &[(Var, Option<Var>)], options: Options) -> Result<()> {
    let job = Job::new(options, Mode::All, &[]);
    run(&job, root_grads(roots, options)?)?;
    Context::end_pass();
    Ok(())
}

/// [`backward`] from one root, whose gradient is let go as soon as it is used.
pub(crate) fn backward_from(root: &Var, grad: Option<Var>, options: Options) -> Result<()> {
    let job = Job::new(options, Mode::All, &[]);
    let tasks = root_grads(&[(root.clone(), grad)], options)?;
    run(&job, tasks)?;
    Context::end_pass();
    Ok(())
}

/// The gradients of the sum of `outputs` (each with its own gradient, as in [`backward`]) with respect to
/// `inputs`, which may be any values of the graph; `None` for an input that the outputs do not depend on. Slots
/// are left alone.
///
/// # Errors
/// As [`backward`].
pub fn grad(outputs: &[(Var, Option<Var>)], inputs: &[&Var], options: Options) -> Result<Vec<Option<Var>>> {
    let job = Job::new(options, Mode::Capture, inputs);
    run(&job, root_grads(outputs, options)?)?;
    Ok(job.into_captured())
}

/// Computes gradients with respect to activations now, and leaves those of parameters (leaves made with
/// `parameter`, and views and casts of them) for later. Together both give exactly [`backward`]'s bits.
///
/// # Errors
/// As [`backward`].
pub fn backward_inputs(roots: &[(Var, Option<Var>)]) -> Result<WeightWork> {
    let options = Options::default();
    let job = Job::new(options, Mode::Inputs, &[]);
    run(&job, root_grads(roots, options)?)?;
    Context::end_pass();
    Ok(WeightWork { deferred: job.into_deferred() })
}

/// The parameters' part of a split backward pass, to be run when there is time for it.
#[must_use = "the parameters' gradients are computed by `run`"]
pub struct WeightWork {
    deferred: Vec<Root>,
}

impl WeightWork {
    /// Computes the parameters' gradients and adds them to their slots.
    ///
    /// # Errors
    /// As [`backward`].
    pub fn run(self) -> Result<()> {
        let job = Job::new(Options::default(), Mode::Weights, &[]);
        run(&job, self.deferred)
    }

    /// Operations whose weight gradients are waiting.
    pub fn len(&self) -> usize {
        self.deferred.len()
    }

    /// Whether nothing is waiting.
    pub fn is_empty(&self) -> bool {
        self.deferred.is_empty()
    }
}

fn run(job: &Job, roots: Vec<Root>) -> Result<()> {
    let (nodes, grads): (Vec<Arc<Node>>, Vec<NodeGrads>) =
        roots.into_iter().map(|r| (r.node, r.grads)).unzip();
    let mut plan = plan::Plan::new(job, &nodes);
    let places = (0..).map(Place::at);
    let ready = places.zip(grads).filter_map(|(place, grads)| plan.begin(place, grads)).collect();
    if plan.devices.len() > 1 && !workers::on_worker() {
        workers::run(job, plan, ready)
    } else {
        inline::run(job, plan, ready)
    }
}

/// The nodes of the roots with their gradients, merged where two roots are outputs of one node.
fn root_grads(roots: &[(Var, Option<Var>)], options: Options) -> Result<Vec<Root>> {
    let mut found: Vec<(&Arc<Node>, Pending)> = Vec::with_capacity(roots.len());
    for (root, grad) in roots {
        let Some(edge) = root.edge() else { continue };
        let grad = match grad {
            Some(grad) => grad.clone(),
            None if root.numel() == 1 => {
                Var::new(kernels::full(root.shape(), Scalar::Float(1.0), root.dtype(), root.device())?)
            }
            None => return Err(Error::NotScalar { shape: root.shape().to_vec() }),
        };
        check_gradient(&edge.node, edge.output(), &grad)?;
        let node = &*edge.node;
        let i = found.iter().position(|(other, _)| Arc::ptr_eq(other, node)).unwrap_or(found.len());
        if i == found.len() {
            found.push((node, Pending::new(node.outputs.len())));
        }
        found[i].1.add(edge.output(), grad, options.create_graph)?;
    }
    let root = |(node, pending): (&Arc<Node>, Pending)| Root { node: node.clone(), grads: pending.grads };
    if found.is_empty() { Err(Error::NoGraph) } else { Ok(found.into_iter().map(root).collect()) }
}

/// Refuses a gradient whose shape, dtype or device is not that of the node's output.
pub(crate) fn check_gradient(node: &Node, output: usize, grad: &Var) -> Result<()> {
    let wanted = &node.outputs[output];
    if wanted.is_of(grad.tensor()) { Ok(()) } else { Err(misfit(node.name, grad, wanted)) }
}

#[cold]
fn misfit(op: &'static str, grad: &Var, wanted: &Meta) -> Error {
    Error::Gradient { op, got: Meta::of(grad.tensor()).to_string(), wanted: wanted.to_string() }
}

/// `sum + part`, recorded if asked, else in `sum`'s place where nobody else sees it.
fn add(sum: Var, part: Var, create_graph: bool) -> Result<Var> {
    if create_graph { sum.add(&part) } else { crate::leaf::add_in_place(sum, part) }
}

#[cfg(test)]
mod tests {
    use phalanx_tensor::{Device, Tensor};

    use crate::{Options, Var};

    fn leaf(values: &[f64]) -> Var {
        Var::leaf(Tensor::from_slice(values, &[values.len()], Device::CPU).unwrap()).unwrap()
    }

    #[test]
    fn gradients_of_gradients() {
        let x = leaf(&[0.5, -1.0]);
        let y = x.tanh().unwrap().mul(&x).unwrap().sum_all().unwrap();
        let options = Options { create_graph: true, ..Options::default() };
        let dx = crate::grad(&[(y, None)], &[&x], options).unwrap()[0].clone().unwrap();
        let ddx =
            crate::grad(&[(dx.sum_all().unwrap(), None)], &[&x], Options::default()).unwrap()[0].clone();
        for (x, ddx) in [0.5f64, -1.0].into_iter().zip(ddx.unwrap().to_vec::<f64>().unwrap()) {
            let (t, s) = (x.tanh(), 1.0 - x.tanh().powi(2));
            assert!((ddx - (2.0 * s - 2.0 * x * t * s)).abs() < 1e-12);
        }
    }

    #[test]
    fn leaves_accumulate_over_passes() {
        let (x, b) = (leaf(&[1.0, 2.0, 3.0]), leaf(&[2.0]));
        for _ in 0..2 {
            x.mul(&b).unwrap().sum_all().unwrap().backward().unwrap();
        }
        assert_eq!(x.grad().unwrap().to_vec::<f64>().unwrap(), [4.0; 3]);
        assert_eq!(b.grad().unwrap().to_vec::<f64>().unwrap(), [12.0]);
    }
}
