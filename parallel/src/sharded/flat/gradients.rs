//! Where [`Flat`]'s gradients are collected, and where they go.

use phalanx_kernels as kernels;
use phalanx_nn::Parameter;
use phalanx_nn::autograd::Slot;
use phalanx_tensor::{Category, Tensor};

use super::{Flat, Ranks};
use crate::Result;
use crate::comm::{Call, Pending, Reduction};
use crate::data_parallel::Average;

/// Gradients on their way to the ranks that own them.
pub(in crate::sharded) struct Sent {
    pending: Pending,
    /// The sums that this rank owns.
    sums: Tensor,
    full_grad: Tensor,
}

impl Flat {
    /// Makes room for gradients, unless there is.
    pub(in crate::sharded) fn open(&mut self) -> Result<&Tensor> {
        if self.full_grad.is_none() {
            // What changes nothing that is added to it; 0 would make 0 of -0.
            let zeros = kernels::full(&[self.elements()], -0.0, self.grad_dtype, self.device)?;
            let zeros = zeros.tagged(Category::Gradients);
            for member in &self.members {
                let (leaf, mut view) = (&member.parameter.leaves()[0], member.of(&zeros)?);
                if let Some(grad) = leaf.grad() {
                    kernels::copy_(&mut view, grad.tensor())?;
                }
                leaf.set_slot(Slot::Into(view))?;
            }
            self.full_grad = Some(zeros);
        }
        // Just made.
        self.full_grad.as_ref().ok_or_else(|| crate::Error::Config("gradients without room".into()))
    }

    /// Forgets what has come and was not sent.
    pub(in crate::sharded) fn close(&mut self) -> Result<()> {
        self.full_grad = None;
        let trained = self.members.iter().filter(|_| self.trained);
        // A slot of its own, which is empty.
        trained.map(|m| &m.parameter).try_for_each(|p| Ok(p.set_grad_dtype(self.grad_dtype)?))
    }

    /// Sends gradients to the ranks that own them.
    pub(in crate::sharded) fn send(&mut self, ranks: &Ranks, average: Average) -> Result<Sent> {
        let mut full_grad = self.open()?.clone();
        self.members.iter().try_for_each(|m| m.parameter.finish_grad().map(drop))?;
        self.close()?;
        if average == Average::Mean {
            kernels::scale_(&mut full_grad, 1.0 / ranks.all.size() as f64)?;
        }
        let sums = Tensor::empty(&[self.own.len()], self.grad_dtype, self.device)?;
        let sums = sums.tagged(Category::Gradients);
        let counts = self.cuts.counts();
        let call = Call::reduce_scatter_uneven(sums.clone(), full_grad.clone(), &counts, Reduction::Sum);
        Ok(Sent { pending: ranks.shard.start(call), sums, full_grad })
    }

    /// Waits for the sums and gives them to the pieces, added to what these have.
    pub(in crate::sharded) fn receive(&mut self, sent: Sent, ranks: &Ranks) -> Result<()> {
        let Sent { pending, mut sums, full_grad } = sent;
        pending.wait()?;
        if ranks.replicas.size() > 1 {
            ranks.replicas.all_reduce(&mut sums, Reduction::Sum)?;
        }
        if self.shard.dtype() != self.dtype {
            sums = kernels::cast(&sums, self.shard.dtype())?;
        }
        sums = sums.to_device(self.shard.device(), false)?;
        if self.keeps_grads && full_grad.dtype() == sums.dtype() && full_grad.device() == sums.device() {
            let mut part = full_grad.narrow(0, self.own.start, self.own.len())?;
            kernels::copy_(&mut part, &sums)?;
            sums = part;
        }
        drop(full_grad);
        let mut start = 0;
        self.first_grads.clear();
        for (number, piece) in self.pieces.iter().enumerate() {
            let count = piece.tensor().numel();
            let part = sums.narrow(0, start, count)?;
            start += count;
            match piece.grad()? {
                Some(mut sum) => kernels::accumulate_(&mut sum, &part)?,
                None => {
                    piece.set_grad(Some(part));
                    self.first_grads.push(number);
                }
            }
        }
        Ok(())
    }

    /// The pieces whose gradients are the last pass's alone.
    pub(in crate::sharded) fn first_grads(&self) -> impl Iterator<Item = &Parameter> {
        self.first_grads.iter().map(|&number| &self.pieces[number])
    }
}
