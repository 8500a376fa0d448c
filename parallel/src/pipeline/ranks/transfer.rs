//! Sends and receives of activations and gradients, and the header that tells a receiver the shape that it does not know.

use std::sync::Arc;

use phalanx_nn::autograd::waiting;
use phalanx_tensor::{Category, Context, DType, Device, Dims, Tensor};

use super::executor::{Executor, ScheduleRun, missing};
use super::parts::Parts;
use super::{Executed, Spec, Stages};
use crate::comm::{Call, Comm, Pending};
use crate::pipeline::schedule::Action;
use crate::{Error, Result};

impl<S: Stages> ScheduleRun<'_, S> {
    pub(super) fn send_forward(&mut self, action: Action) -> Result<()> {
        let Action { stage, micro_batch, .. } = action;
        let output = take(&mut self.cell(stage, micro_batch).output, "output")?;
        let to = self.neighbour(stage.checked_add(1), micro_batch)?;
        let specs: Vec<Spec> = output.iter().map(Spec::of).collect();
        match self.input_specs(stage + 1, micro_batch) {
            None => {
                for (i, spec) in specs.iter().enumerate() {
                    let header = header(spec, specs.len() - 1 - i, self.executor.device)?;
                    self.sent.push((action, self.executor.comm.start(Call::send(header, to))));
                }
            }
            Some(said) if said == specs => {}
            Some(said) => {
                let why = format!("got an output of {specs:?}, and the next stage's input is to be {said:?}");
                return Err(Error::Config(why));
            }
        }
        self.send(action, output, to)
    }

    pub(super) fn send_backward(&mut self, action: Action) -> Result<()> {
        let Action { stage, micro_batch, .. } = action;
        let grads = take(&mut self.cell(stage, micro_batch).input_grad, "gradient of the input")?;
        let to = self.neighbour(stage.checked_sub(1), micro_batch)?;
        self.send(action, grads, to)
    }

    /// Sends the tensors of an action, or this rank's parts of them. The observer gets the last of them, by which all have been sent.
    fn send(&mut self, action: Action, mut tensors: Vec<Tensor>, to: usize) -> Result<()> {
        if let Some(parts) = &self.executor.parts {
            tensors = tensors.iter().map(|tensor| parts.own(tensor)).collect::<Result<_>>()?;
        }
        if let Some(acknowledgements) = &self.executor.acknowledgements {
            let by = acknowledgements.get(&action).copied().flatten();
            self.held.entry(by).or_default().extend(tensors.iter().cloned());
        }
        let last = tensors.len() - 1;
        for (i, tensor) in tensors.into_iter().enumerate() {
            let mut call = Call::send(tensor, to);
            if let Some(observer) = self.executor.observer.clone().filter(|_| i == last) {
                call = call.observed(Arc::new(move |call| {
                    observer(Executed { action, started: call.started, ended: call.ended });
                }));
            }
            self.sent.push((action, self.executor.comm.start(call)));
        }
        Ok(())
    }

    pub(super) fn receive_forward(&mut self, Action { stage, micro_batch, .. }: Action) -> Result<()> {
        let Executor { comm, device, parts, .. } = self.executor;
        let from = self.neighbour(stage.checked_sub(1), micro_batch)?;
        let specs = match self.input_specs(stage, micro_batch) {
            Some(specs) => specs,
            None => receive_specs(comm, from, *device)?,
        };
        let mut inputs = Vec::with_capacity(specs.len());
        for spec in specs {
            let input = Tensor::empty(&spec.shape, spec.dtype, *device)?;
            let call = Call::recv(received(parts, &input)?, from);
            waiting("receive input", || comm.run(call))?;
            inputs.push(input);
        }
        gather(parts, &inputs)?;
        self.cell(stage, micro_batch).input = inputs;
        Ok(())
    }

    /// Receives the gradients of the outputs. Meanwhile the stage is recomputed, if its values were not kept and the next action
    /// uses them.
    pub(super) fn receive_backward(&mut self, Action { stage, micro_batch, .. }: Action) -> Result<()> {
        let Executor { comm, device, parts, .. } = self.executor;
        let from = self.neighbour(stage.checked_add(1), micro_batch)?;
        let used_next =
            self.following.is_some_and(|next| (next.stage, next.micro_batch) == (stage, micro_batch));
        let cell = self.cell(stage, micro_batch);
        let graph =
            cell.graph.as_ref().ok_or_else(|| missing("output that this would be the gradient of"))?;
        let floats = graph.sent.iter().filter(|spec| spec.dtype.is_float());
        let grads = floats.map(|spec| Ok(Tensor::empty(&spec.shape, spec.dtype, *device)?));
        let grads: Vec<Tensor> = grads.collect::<Result<_>>()?;
        let calls = grads.iter().map(|grad| Ok(Call::recv(received(parts, grad)?, from)));
        let calls: Vec<Call> = calls.collect::<Result<_>>()?;
        match graph.recompute.as_ref().filter(|_| used_next) {
            None => calls.into_iter().try_for_each(|call| waiting("receive gradient", || comm.run(call)))?,
            Some(recompute) => {
                let coming: Vec<Pending> = calls.into_iter().map(|call| comm.start(call)).collect();
                recompute.now()?;
                coming.into_iter().try_for_each(|call| waiting("receive gradient", || call.wait()))?;
            }
        }
        gather(parts, &grads)?;
        cell.output_grad = grads;
        Ok(())
    }
}

/// The tensors that an action uses, which are not kept any longer.
pub(super) fn take(tensors: &mut Vec<Tensor>, what: &str) -> Result<Vec<Tensor>> {
    let taken = std::mem::take(tensors);
    if taken.is_empty() { Err(missing(what)) } else { Ok(taken) }
}

impl<S> ScheduleRun<'_, S> {
    /// The rank of a neighbouring stage, for a micro-batch.
    fn neighbour(&self, stage: Option<usize>, micro_batch: usize) -> Result<usize> {
        let rank = stage.and_then(|stage| self.rank_of(stage, micro_batch));
        rank.ok_or_else(|| Error::Config("there is no stage on that side".into()))
    }
}

/// What is received of a tensor: all of it, or this rank's part.
fn received(parts: &Option<Parts>, tensor: &Tensor) -> Result<Tensor> {
    parts.as_ref().map_or_else(|| Ok(tensor.clone()), |parts| parts.own(tensor))
}

/// Completes tensors of which this rank has received its parts.
fn gather(parts: &Option<Parts>, tensors: &[Tensor]) -> Result<()> {
    let gather = |parts: &Parts| tensors.iter().try_for_each(|tensor| parts.gather(tensor));
    parts.as_ref().map_or(Ok(()), |parts| waiting("gather parts", || gather(parts)))
}

/// Length of a header: how many tensors follow this one, the dtype, the number of dimensions, and a size for each dimension that
/// there may be.
const HEADER: usize = 3 + MAX_DIMS;
const MAX_DIMS: usize = 8;

/// The header that is sent before tensors, one for each: how many follow, dtype and shape.
fn header(spec: &Spec, follow: usize, device: Device) -> Result<Tensor> {
    if spec.shape.len() > MAX_DIMS {
        let why = format!("got an output of shape {:?}, wanted at most {MAX_DIMS} dimensions", spec.shape);
        return Err(Error::Config(why));
    }
    let dtype = DType::ALL.iter().position(|&d| d == spec.dtype).unwrap_or_default();
    let mut numbers = [0; HEADER];
    (numbers[0], numbers[1], numbers[2]) = (follow as i64, dtype as i64, spec.shape.len() as i64);
    numbers[3..].iter_mut().zip(&spec.shape).for_each(|(number, &size)| *number = size as i64);
    let _category = Context::with(|c| c.category = Category::Buffers);
    Ok(Tensor::from_slice(&numbers, &[HEADER], device.host())?)
}

/// Receives the headers of a list of tensors.
fn receive_specs(comm: &Comm, from: usize, device: Device) -> Result<Vec<Spec>> {
    let mut specs = Vec::new();
    loop {
        let (spec, follow) = receive_spec(comm, from, device)?;
        specs.push(spec);
        if follow == 0 {
            return Ok(specs);
        }
    }
}

/// Receives a header: a tensor's shape and dtype, and how many tensors follow it.
fn receive_spec(comm: &Comm, from: usize, device: Device) -> Result<(Spec, usize)> {
    let _category = Context::with(|c| c.category = Category::Buffers);
    let mut header = Tensor::empty(&[HEADER], DType::I64, device.host())?;
    comm.recv(&mut header, from)?;
    let numbers = header.to_vec::<i64>()?;
    let spec = || {
        let numbers: Vec<usize> = numbers.iter().map(|&n| usize::try_from(n).ok()).collect::<Option<_>>()?;
        let dtype = *DType::ALL.get(numbers[1])?;
        let shape = Dims::from_slice(numbers[3..].get(..numbers[2])?);
        Some((Spec { shape, dtype }, numbers[0]))
    };
    let wanted = "a number of tensors, a dtype, a number of sizes and sizes";
    spec().ok_or_else(|| Error::Config(format!("got {numbers:?}, wanted {wanted}")))
}

#[cfg(test)]
mod tests {
    use crate::launch;

    use super::*;

    #[test]
    fn shapes_and_dtypes_come_as_they_were() {
        let got = launch::threads(2, |rank| -> Result<_> {
            let (comm, device) = (rank.comm(), rank.device());
            let of = |(shape, dtype): (&[usize], _)| Spec { shape: Dims::from_slice(shape), dtype };
            let specs =
                [(&[][..], DType::F64), (&[2, 0, 3], DType::BF16), (&[5; 8], DType::I32)].map(of).to_vec();
            if rank.rank() == 1 {
                return Ok(receive_specs(comm, 0, device)? == specs);
            }
            for (i, spec) in specs.iter().enumerate() {
                comm.send(&header(spec, 2 - i, device)?, 1)?;
            }
            Ok(true)
        });
        assert_eq!(got.unwrap(), [true, true]);
        let nine = Spec { shape: Dims::from_slice(&[1; 9]), dtype: DType::F32 };
        let error = header(&nine, 0, Device::CPU).unwrap_err().to_string();
        assert!(error.contains("[1, 1, 1, 1, 1, 1, 1, 1, 1], wanted at most 8 dimensions"), "{error}");
    }
}
