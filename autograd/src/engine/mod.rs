//! The backward engine.
//!
//! The [plan](plan) counts, for every node that will run, how many gradients it waits for. Then ready nodes run, the one
//! recorded last first, and send gradients along their edges: on the calling thread if the graph lives on one device, else
//! on one worker a device ([`workers`]). The gradients of a node are summed in the order of the nodes they come from, the
//! latest first, and not in the order of arrival ([`input_buffer`]), so both give the same bits.
//!
//! ```text
//! roots -> Plan: indices, targets, counts
//!            |
//!            v                       GraphTask::run_node
//!          ready queue --NodeTask--> hooks, grad_fn.apply --Arrival--> input buffers --complete--> ready queue
//! ```

mod graph_task;
mod input_buffer;
mod plan;
mod workers;

use std::sync::Arc;

use phalanx_kernels as kernels;
use phalanx_tensor::{Context, Scalar};

use crate::graph::node::{Node, NodeGrads};
use crate::{Error, Result, Var};
pub use graph_task::Options;
use graph_task::{GraphTask, Mode, NodeIndex, Root};
use input_buffer::InputBuffer;
use plan::Plan;

/// Computes the gradients of `roots` with respect to every leaf behind them and adds them to the leaves' slots.
/// Each root comes with its own gradient; `None` stands for 1 and is for roots of one element. Ends the step whose random
/// draws are counted ([`phalanx_tensor::RngKey`]).
///
/// # Errors
/// If no root has a graph, a gradient does not fit its root, a saved value was freed or modified, or a backward
/// function or hook fails or panics.
pub fn backward(roots: &[(Var, Option<Var>)], options: Options) -> Result<()> {
    let task = GraphTask::new(options, Mode::All, &[]);
    run(&task, root_grads(roots, options)?)?;
    Context::end_pass();
    Ok(())
}

/// [`backward`] from one root, whose gradient is dropped as soon as it is used.
fn backward_from(root: &Var, grad: Option<Var>, options: Options) -> Result<()> {
    let task = GraphTask::new(options, Mode::All, &[]);
    let roots = root_grads(&[(root.clone(), grad)], options)?;
    run(&task, roots)?;
    Context::end_pass();
    Ok(())
}

impl Var {
    /// Computes the gradient of this one-element value with respect to every leaf behind it, and adds it to the
    /// leaves' slots. The graph can be run once, unless [`Var::backward_options`] says otherwise.
    ///
    /// # Errors
    /// If it has several elements or no graph, or a backward function fails.
    pub fn backward(&self) -> Result<()> {
        backward_from(self, None, Options::default())
    }

    /// [`Var::backward`] for a value of any shape, given the gradient that it has itself.
    ///
    /// # Errors
    /// If the gradient does not fit, there is no graph, or a backward function fails.
    pub fn backward_with(&self, grad: Var) -> Result<()> {
        backward_from(self, Some(grad), Options::default())
    }

    /// [`Var::backward`] that treats the graph as the options say: keeps it for another pass, or records the gradients'
    /// own.
    ///
    /// ```
    /// use phalanx_autograd::{Options, Var, tensor::{Device, Tensor}};
    /// let x = Var::leaf(Tensor::scalar(3f64, Device::CPU)?)?;
    /// let loss = x.square()?;
    /// loss.backward_options(Options { retain_graph: true, ..Options::default() })?;
    /// loss.backward()?; // adds to the first pass's gradient
    /// assert_eq!(x.grad().unwrap().item::<f64>()?, 12.0);
    /// # Ok::<(), phalanx_autograd::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Var::backward`].
    pub fn backward_options(&self, options: Options) -> Result<()> {
        backward_from(self, None, options)
    }
}

/// The gradients of the sum of `outputs` (each with its own gradient, as in [`backward`]) with respect to
/// `inputs`, which may be any values of the graph; `None` for an input that the outputs do not depend on. Slots
/// are left alone.
///
/// # Errors
/// As [`backward`].
pub fn grad(outputs: &[(Var, Option<Var>)], inputs: &[&Var], options: Options) -> Result<Vec<Option<Var>>> {
    let task = GraphTask::new(options, Mode::Capture, inputs);
    run(&task, root_grads(outputs, options)?)?;
    Ok(task.into_captured())
}

/// Computes gradients with respect to activations now, and leaves those of parameters (leaves made with
/// `parameter`, and views and casts of them) for later, but for those that need the parameters' values, which may be gone by then
/// ([`crate::Backward::SPLITS`]). Together both give exactly [`backward`]'s bits.
///
/// # Errors
/// As [`backward`].
pub fn backward_inputs(roots: &[(Var, Option<Var>)]) -> Result<WeightWork> {
    let options = Options::default();
    let task = GraphTask::new(options, Mode::Inputs, &[]);
    run(&task, root_grads(roots, options)?)?;
    Context::end_pass();
    Ok(WeightWork { deferred: task.into_deferred() })
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
        let task = GraphTask::new(Options::default(), Mode::Weights, &[]);
        run(&task, self.deferred)
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

fn run(task: &GraphTask, roots: Vec<Root>) -> Result<()> {
    let (nodes, grads): (Vec<Arc<Node>>, Vec<NodeGrads>) =
        roots.into_iter().map(|r| (r.node, r.grads)).unzip();
    let mut plan = Plan::new(task, &nodes);
    let indices = (0..).map(NodeIndex::at);
    let ready = indices.zip(grads).filter_map(|(index, grads)| plan.begin(index, grads)).collect();
    workers::run(task, plan, ready)
}

/// The nodes of the roots with their gradients, merged where two roots are outputs of one node.
fn root_grads(roots: &[(Var, Option<Var>)], options: Options) -> Result<Vec<Root>> {
    let mut found: Vec<(&Arc<Node>, InputBuffer)> = Vec::with_capacity(roots.len());
    for (root, grad) in roots {
        let Some(edge) = root.edge() else { continue };
        let grad = match grad {
            Some(grad) => grad.clone(),
            None if root.numel() == 1 => {
                Var::new(kernels::full(root.shape(), Scalar::Float(1.0), root.dtype(), root.device())?)
            }
            None => return Err(Error::NotScalar { shape: root.shape().to_vec() }),
        };
        edge.meta().check(edge.node.name, &grad)?;
        let node = &*edge.node;
        let i = found.iter().position(|(other, _)| Arc::ptr_eq(other, node)).unwrap_or(found.len());
        if i == found.len() {
            found.push((node, InputBuffer::new(node.outputs.len())));
        }
        found[i].1.add(edge.output(), grad, options.create_graph)?;
    }
    let root = |(node, buffer): (&Arc<Node>, InputBuffer)| Root { node: node.clone(), grads: buffer.grads };
    if found.is_empty() { Err(Error::NoGraph) } else { Ok(found.into_iter().map(root).collect()) }
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
