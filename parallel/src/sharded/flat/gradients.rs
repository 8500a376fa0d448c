//! Where [`Flat`]'s gradients are collected, and where they go.
//!
//! Most parameters have one site. A table that is tied to a head has two, whose gradients are added to each other only
//! after the ranks, so that ranks are what micro-batches of one device are: they travel apart.

use std::ops::Range;

use phalanx_kernels as kernels;
use phalanx_nn::Parameter;
use phalanx_nn::autograd::{Leaf, Slot, Var};
use phalanx_tensor::{Category, Tensor};

use super::{Flat, Ranks};
use crate::Result;
use crate::comm::{Call, Pending, Reduction};
use crate::data_parallel::Average;

/// The gradients at one site.
pub(super) struct Gradients {
    site: usize,
    /// The members that have the site, and their places here.
    places: Vec<(usize, Range<usize>)>,
    /// How many elements each rank owns.
    counts: Vec<usize>,
    /// All of them, while they come.
    full: Option<Tensor>,
}

/// Gradients on their way to the ranks that own them.
pub(in crate::sharded) struct Sent {
    site: usize,
    pending: Pending,
    /// The sums that this rank owns.
    sums: Tensor,
    full: Tensor,
}

impl Gradients {
    /// Those of every site that any of a buffer's parameters has.
    pub(super) fn of(flat: &Flat) -> Vec<Gradients> {
        let sites = flat.members.iter().map(|m| m.parameter.leaves().len()).max().unwrap_or(0);
        (0..sites).map(|site| Gradients::at(flat, site)).collect()
    }

    fn at(flat: &Flat, site: usize) -> Gradients {
        let (mut places, mut counts, mut end) = (Vec::new(), vec![0; flat.cuts.bounds.len() - 1], 0);
        let members = flat.members.iter().enumerate();
        for (number, member) in members.filter(|(_, m)| m.parameter.leaves().len() > site) {
            places.push((number, end..end + member.range.len()));
            end += member.range.len();
            for (rank, count) in counts.iter_mut().enumerate() {
                *count += member.inside(&flat.cuts.range(rank)).map_or(0, |inside| inside.len());
            }
        }
        Gradients { site, places, counts, full: None }
    }

    fn leaf<'a>(&self, flat: &'a Flat, member: usize) -> &'a Leaf {
        &flat.members[member].parameter.leaves()[self.site]
    }

    /// Makes room, unless there is, and lets gradients come there.
    fn open(&mut self, flat: &Flat) -> Result<Tensor> {
        if let Some(full) = &self.full {
            return Ok(full.clone());
        }
        // What changes nothing that is added to it; 0 would make 0 of -0.
        let zeros = kernels::full(&[self.counts.iter().sum()], -0.0, flat.grad_dtype, flat.device)?;
        let zeros = zeros.tagged(Category::Gradients);
        for (member, place) in &self.places {
            let shape = &flat.members[*member].shape;
            let mut view = zeros.narrow(0, place.start, place.len())?.with_shape(shape)?;
            let leaf = self.leaf(flat, *member);
            if let Some(grad) = leaf.grad() {
                kernels::copy_(&mut view, grad.tensor())?;
            }
            leaf.set_slot(Slot::Into(view))?;
        }
        self.full = Some(zeros.clone());
        Ok(zeros)
    }

    /// Forgets what has come and was not sent: every slot is the leaf's own, and empty.
    fn close(&mut self, flat: &Flat) -> Result<()> {
        self.full = None;
        let own = || Slot::Owned(Some(flat.grad_dtype));
        self.places.iter().try_for_each(|(member, _)| Ok(self.leaf(flat, *member).set_slot(own())?))
    }

    fn send(&mut self, flat: &Flat, ranks: &Ranks, average: Average) -> Result<Sent> {
        let mut full = self.open(flat)?;
        self.close(flat)?;
        if average == Average::Mean {
            kernels::scale_(&mut full, 1.0 / ranks.all.size() as f64)?;
        }
        let sums = Tensor::empty(&[self.counts[ranks.shard.rank()]], flat.grad_dtype, flat.device)?;
        let sums = sums.tagged(Category::Gradients);
        let call = Call::reduce_scatter_uneven(sums.clone(), full.clone(), &self.counts, Reduction::Sum);
        Ok(Sent { site: self.site, pending: ranks.shard.start(call), sums, full })
    }
}

impl Flat {
    /// Makes room for gradients, unless there is.
    pub(in crate::sharded) fn open(&mut self) -> Result<()> {
        self.each_site(|gradients, flat| gradients.open(flat).map(drop)).map(drop)
    }

    /// Forgets what has come and was not sent.
    pub(in crate::sharded) fn close(&mut self) -> Result<()> {
        self.each_site(|gradients, flat| gradients.close(flat)).map(drop)
    }

    /// Sends gradients to the ranks that own them.
    pub(in crate::sharded) fn send(&mut self, ranks: &Ranks, average: Average) -> Result<Vec<Sent>> {
        self.each_site(|gradients, flat| gradients.send(flat, ranks, average))
    }

    /// Nothing for frozen parameters, which have no gradients.
    fn each_site<T>(&mut self, f: impl Fn(&mut Gradients, &Flat) -> Result<T>) -> Result<Vec<T>> {
        let mut gradients = std::mem::take(&mut self.gradients);
        let done = gradients.iter_mut().map(|gradients| f(gradients, self)).collect();
        self.gradients = gradients;
        done
    }

    /// Waits for the sums and gives them to the pieces, added to what these have.
    pub(in crate::sharded) fn receive(&mut self, sent: Sent, ranks: &Ranks) -> Result<()> {
        let Sent { site, pending, mut sums, full } = sent;
        pending.wait()?;
        if ranks.replicas.size() > 1 {
            ranks.replicas.all_reduce(&mut sums, Reduction::Sum)?;
        }
        if self.shard.dtype() != self.dtype {
            sums = kernels::cast(&sums, self.shard.dtype())?;
        }
        sums = sums.to_device(self.shard.device(), false)?;
        let same = full.dtype() == sums.dtype() && full.device() == sums.device();
        if self.keeps_grads && site == 0 && same {
            let mut part = full.narrow(0, self.own.start, self.own.len())?;
            kernels::copy_(&mut part, &sums)?;
            sums = part;
        }
        drop(full);
        if site == 0 {
            self.first_grads.clear();
        }
        let (mut start, mut first) = (0, Vec::new());
        for (number, piece) in self.pieces.iter().enumerate().filter(|(_, p)| p.leaves().len() > site) {
            let count = piece.tensor().numel();
            if give(&piece.leaves()[site], sums.narrow(0, start, count)?)? && site == 0 {
                first.push(number);
            }
            start += count;
        }
        self.first_grads.extend(first);
        Ok(())
    }

    /// The pieces whose gradients are the last pass's alone.
    pub(in crate::sharded) fn first_grads(&self) -> impl Iterator<Item = &Parameter> {
        self.first_grads.iter().map(|&number| &self.pieces[number])
    }
}

/// Adds a sum to what a leaf has; true if it had nothing.
fn give(leaf: &Leaf, sum: Tensor) -> Result<bool> {
    if let Some(earlier) = leaf.grad() {
        kernels::accumulate_(&mut earlier.into_tensor(), &sum)?;
        return Ok(false);
    }
    sum.storage().set_category(Category::Gradients);
    leaf.set_grad(Some(Var::new(sum)));
    Ok(true)
}
