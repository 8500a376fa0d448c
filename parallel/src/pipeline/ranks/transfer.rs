//! Sends and receives of activations and gradients, and the header that tells a receiver the shape that it does not know.

use std::sync::Arc;

use phalanx_nn::autograd::waiting;
use phalanx_tensor::{Category, Context, DType, Device, Dims, Tensor};

use super::executor::{Executor, ScheduleRun, missing};
use super::parts::Parts;
use super::{Executed, Spec, Stages};
use crate::comm::{Call, Comm};
use crate::pipeline::schedule::Action;
use crate::{Error, Result};

impl<S: Stages> ScheduleRun<'_, S> {
    pub(super) fn send_forward(&mut self, action: Action) -> Result<()> {
        let Action { stage, micro_batch, .. } = action;
        let output = self.cell(stage, micro_batch).output.take().ok_or_else(|| missing("output"))?;
        let to = self.neighbour(stage.checked_add(1))?;
        let spec = Spec::of(&output);
        match self.input_spec(stage + 1, micro_batch) {
            None => {
                let header = header(&spec, self.executor.device)?;
                self.sent.push((action, self.executor.comm.start(Call::send(header, to))));
            }
            Some(said) if said == spec => {}
            Some(said) => {
                let why = format!("got an output of {spec:?}, and the next stage's input is to be {said:?}");
                return Err(Error::Config(why));
            }
        }
        self.send(action, output, to)
    }

    pub(super) fn send_backward(&mut self, action: Action) -> Result<()> {
        let Action { stage, micro_batch, .. } = action;
        let grad = self.cell(stage, micro_batch).input_grad.take();
        let to = self.neighbour(stage.checked_sub(1))?;
        self.send(action, grad.ok_or_else(|| missing("gradient of the input"))?, to)
    }

    fn send(&mut self, action: Action, tensor: Tensor, to: usize) -> Result<()> {
        let tensor = match &self.executor.parts {
            Some(parts) => parts.own(&tensor)?,
            None => tensor,
        };
        if let Some(acknowledgements) = &self.executor.acknowledgements {
            let by = acknowledgements.get(&action).copied().flatten();
            self.held.entry(by).or_default().push(tensor.clone());
        }
        let mut call = Call::send(tensor, to);
        if let Some(observer) = self.executor.observer.clone() {
            call = call.observed(Arc::new(move |call| {
                observer(Executed { action, started: call.started, ended: call.ended });
            }));
        }
        self.sent.push((action, self.executor.comm.start(call)));
        Ok(())
    }

    pub(super) fn receive_forward(&mut self, Action { stage, micro_batch, .. }: Action) -> Result<()> {
        let Executor { comm, device, parts, .. } = self.executor;
        let from = self.neighbour(stage.checked_sub(1))?;
        let spec = match self.input_spec(stage, micro_batch) {
            Some(spec) => spec,
            None => receive_spec(comm, from, *device)?,
        };
        let input = Tensor::empty(&spec.shape, spec.dtype, *device)?;
        let call = Call::recv(received(parts, &input)?, from);
        waiting("receive input", || comm.run(call))?;
        gather(parts, &input)?;
        self.cell(stage, micro_batch).input = Some(input);
        Ok(())
    }

    /// Receives a gradient. Meanwhile the stage is recomputed, if its values were not kept and the next action uses them.
    pub(super) fn receive_backward(&mut self, Action { stage, micro_batch, .. }: Action) -> Result<()> {
        let Executor { comm, device, parts, .. } = self.executor;
        let from = self.neighbour(stage.checked_add(1))?;
        let used_next =
            self.following.is_some_and(|next| (next.stage, next.micro_batch) == (stage, micro_batch));
        let cell = self.cell(stage, micro_batch);
        let graph =
            cell.graph.as_ref().ok_or_else(|| missing("output that this would be the gradient of"))?;
        let grad = Tensor::empty(&graph.output.shape, graph.output.dtype, *device)?;
        let call = Call::recv(received(parts, &grad)?, from);
        match graph.recompute.as_ref().filter(|_| used_next) {
            None => waiting("receive gradient", || comm.run(call))?,
            Some(recompute) => {
                let coming = comm.start(call);
                recompute.now()?;
                waiting("receive gradient", || coming.wait())?;
            }
        }
        gather(parts, &grad)?;
        cell.output_grad = Some(grad);
        Ok(())
    }
}

impl<S> ScheduleRun<'_, S> {
    /// The rank of a neighbouring stage.
    fn neighbour(&self, stage: Option<usize>) -> Result<usize> {
        let rank = stage.and_then(|stage| self.rank_of(stage));
        rank.ok_or_else(|| Error::Config("there is no stage on that side".into()))
    }
}

/// What is received of a tensor: all of it, or this rank's part.
fn received(parts: &Option<Parts>, tensor: &Tensor) -> Result<Tensor> {
    parts.as_ref().map_or_else(|| Ok(tensor.clone()), |parts| parts.own(tensor))
}

/// Completes a tensor of which this rank has received its part.
fn gather(parts: &Option<Parts>, tensor: &Tensor) -> Result<()> {
    parts.as_ref().map_or(Ok(()), |parts| waiting("gather parts", || parts.gather(tensor)))
}

/// Length of a header: the dtype, the number of dimensions, and a size for each dimension that there may be.
const HEADER: usize = 2 + MAX_DIMS;
const MAX_DIMS: usize = 8;

/// The header that is sent before a tensor: its dtype and shape.
pub(super) fn header(spec: &Spec, device: Device) -> Result<Tensor> {
    if spec.shape.len() > MAX_DIMS {
        let why = format!("got an output of shape {:?}, wanted at most {MAX_DIMS} dimensions", spec.shape);
        return Err(Error::Config(why));
    }
    let dtype = DType::ALL.iter().position(|&d| d == spec.dtype).unwrap_or_default();
    let mut numbers = [0; HEADER];
    (numbers[0], numbers[1]) = (dtype as i64, spec.shape.len() as i64);
    numbers[2..].iter_mut().zip(&spec.shape).for_each(|(number, &size)| *number = size as i64);
    let _category = Context::with(|c| c.category = Category::Buffers);
    Ok(Tensor::from_slice(&numbers, &[HEADER], device.host())?)
}

/// Receives a header.
pub(super) fn receive_spec(comm: &Comm, from: usize, device: Device) -> Result<Spec> {
    let _category = Context::with(|c| c.category = Category::Buffers);
    let mut header = Tensor::empty(&[HEADER], DType::I64, device.host())?;
    comm.recv(&mut header, from)?;
    let numbers = header.to_vec::<i64>()?;
    let spec = || {
        let numbers: Vec<usize> = numbers.iter().map(|&n| usize::try_from(n).ok()).collect::<Option<_>>()?;
        let dtype = *DType::ALL.get(numbers[0])?;
        Some(Spec { shape: Dims::from_slice(numbers[2..].get(..numbers[1])?), dtype })
    };
    spec()
        .ok_or_else(|| Error::Config(format!("got {numbers:?}, wanted a dtype, a number of sizes and sizes")))
}

#[cfg(test)]
mod tests {
    use crate::launch;

    use super::*;

    #[test]
    fn shapes_and_dtypes_come_as_they_were() {
        let got = launch::threads(2, |rank| -> Result<_> {
            let (comm, device) = (rank.comm(), rank.device());
            let mut specs = Vec::new();
            for (shape, dtype) in [(&[][..], DType::F64), (&[2, 0, 3], DType::BF16), (&[5; 8], DType::I32)] {
                let spec = Spec { shape: Dims::from_slice(shape), dtype };
                match rank.rank() {
                    0 => comm.send(&header(&spec, device)?, 1)?,
                    _ => {
                        assert_eq!(receive_spec(comm, 0, device)?, spec);
                        specs.push(spec);
                    }
                }
            }
            Ok(specs.len())
        });
        assert_eq!(got.unwrap(), [0, 3]);
        let nine = Spec { shape: Dims::from_slice(&[1; 9]), dtype: DType::F32 };
        let error = header(&nine, Device::CPU).unwrap_err().to_string();
        assert!(error.contains("[1, 1, 1, 1, 1, 1, 1, 1, 1], wanted at most 8 dimensions"), "{error}");
    }
}
