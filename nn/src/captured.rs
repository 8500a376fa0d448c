//! [`CapturedStep`]: a training step on a GPU, captured once and launched whole from then on.
//!
//! What changes from step to step is in the device's memory, where each launch finds it: the batch, the optimizer's numbers
//! (learning rate, bias corrections), the number of the step that random draws depend on. The gradients' norm never comes to
//! the host: the factor that clips is computed where it is used.
//!
//! ```text
//! run 0:  upload batch, numbers    forward .. backward .. clip .. update    as ever: kernels are compiled on the way
//! run 1:  upload batch, numbers    the same, captured, and launched
//! run 2:  upload batch, numbers    launch
//! ```

use phalanx_autograd::Var;
use phalanx_kernels as kernels;
use phalanx_tensor::cuda::Graph;
use phalanx_tensor::{Category, Context, DType, Device, Tensor};

use crate::{Error, Optimizer, Result, Rule};

/// A step of one GPU over batches of one shape. Between runs gradients are gone: the update has used them.
///
/// The parameters, the optimizer's state and the tensors given as the first batch's shapes must not be exchanged for others
/// while it is used; their values may be read and set between runs.
pub struct CapturedStep {
    device: Device,
    /// Largest norm of the gradients; infinite for none.
    max_norm: f64,
    inputs: Vec<Tensor>,
    numbers: Vec<Tensor>,
    /// The loss and the gradients' norm, f64.
    results: Tensor,
    graph: Option<Graph>,
    runs: u64,
}

impl CapturedStep {
    /// For batches of tensors like `inputs`, all on one GPU, and gradients clipped to `max_norm`.
    ///
    /// # Errors
    /// If there are no inputs, they are not on one GPU, or the bound is not positive.
    pub fn new(inputs: &[Tensor], max_norm: Option<f64>) -> Result<CapturedStep> {
        const OP: &str = "captured_step";
        let Some(device) = inputs.first().map(Tensor::device) else {
            return Err(Error::invalid(OP, "got no inputs, wanted at least one"));
        };
        if let Some(other) = inputs.iter().find(|t| t.device() != device || !t.device().is_cuda()) {
            let got = format!("inputs on {device} and {}", other.device());
            return Err(Error::invalid(OP, format!("got {got}, wanted all on one CUDA device")));
        }
        let max_norm = max_norm.unwrap_or(f64::INFINITY);
        if max_norm.is_nan() || max_norm <= 0.0 {
            return Err(Error::invalid(OP, format!("got a bound of {max_norm}, wanted more than 0")));
        }
        let _category = Context::with(|c| c.category = Category::Buffers);
        let inputs = inputs.iter().map(Tensor::copy).collect::<phalanx_tensor::Result<_>>()?;
        let results = Tensor::zeros(&[2], DType::F64, device)?;
        Ok(CapturedStep { device, max_norm, inputs, numbers: Vec::new(), results, graph: None, runs: 0 })
    }

    /// One step: `loss` of the batch (a scalar), its gradients, clipping, the optimizer's update. Nothing is waited for.
    ///
    /// `loss` is called for the first two batches only and must do the same for every batch. It is the context's step
    /// ([`Context::rng`]) whose draws are made.
    ///
    /// # Errors
    /// If the batch has other shapes, a parameter gets no gradient, or `loss` fails or waits for the device.
    pub fn run<R: Rule>(
        &mut self,
        optimizer: &mut Optimizer<R>,
        batch: &[Tensor],
        loss: impl Fn(&[Var]) -> Result<Var>,
    ) -> Result<()> {
        if batch.len() != self.inputs.len() {
            let got = format!("got {} inputs, wanted {}", batch.len(), self.inputs.len());
            return Err(Error::invalid("captured_step", got));
        }
        for (to, from) in self.inputs.iter_mut().zip(batch) {
            kernels::copy_(to, &from.to_device(self.device, false)?)?;
        }
        self.upload(optimizer.advance()?)?;
        if self.runs == 0 {
            self.work(optimizer, &loss)?;
        } else {
            if self.graph.is_none() {
                self.graph = Some(Graph::capture(self.device, || {
                    self.work(optimizer, &loss)
                        .map_err(|e| phalanx_tensor::Error::invalid("capture", e.to_string()))
                })?);
            }
            if let Some(graph) = &mut self.graph {
                graph.launch(Context::current().rng.step)?;
            }
        }
        self.runs += 1;
        Ok(())
    }

    /// The last run's loss and the norm of its gradients before clipping. Waits for it.
    ///
    /// # Errors
    /// What the run's kernels have found wrong.
    pub fn results(&self) -> Result<[f64; 2]> {
        let both = self.results.to_vec::<f64>()?;
        Ok([both[0], both[1]])
    }

    /// Puts each group's numbers where the kernels read them.
    fn upload(&mut self, numbers: Vec<Vec<f64>>) -> Result<()> {
        for (group, numbers) in numbers.iter().enumerate() {
            let given = Tensor::from_slice(numbers, &[numbers.len()], self.device)?;
            match self.numbers.get_mut(group) {
                Some(held) => kernels::copy_(held, &given)?,
                None => self.numbers.push(given),
            }
        }
        Ok(())
    }

    fn work<R: Rule>(
        &self,
        optimizer: &mut Optimizer<R>,
        loss: impl Fn(&[Var]) -> Result<Var>,
    ) -> Result<()> {
        let inputs: Vec<Var> = self.inputs.iter().cloned().map(Var::new).collect();
        optimizer.zero_grad()?;
        let loss = loss(&inputs)?;
        loss.backward()?;
        let norm = optimizer.device_norm()?;
        // min(1, bound / (norm + 1e-6)), NaN for NaN, as `Clip` has it.
        let ratio = kernels::rdiv_scalar(&kernels::add_scalar(&norm, 1e-6.into())?, self.max_norm.into())?;
        let factor = kernels::clamp(&ratio, None, Some(1.0.into()))?;
        optimizer.update_by(&self.numbers, &factor)?;
        let loss = kernels::cast(loss.tensor(), DType::F64)?;
        for (at, number) in [loss, norm].iter().enumerate() {
            kernels::copy_(&mut self.results.select(0, at)?, &number.with_shape(&[])?)?;
        }
        optimizer.parameters().iter().for_each(|parameter| parameter.set_grad(None));
        Ok(())
    }
}
