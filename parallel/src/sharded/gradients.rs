//! When gradients are sent, and where they go: [`ZeroCore`] counts the gradients that have arrived, [`Gradients`]
//! collects those of a flat parameter and reduce-scatters them.
//!
//! ```text
//! leaf hook ──► arrived ──(a unit is complete, and those after it are sent)──► send_next: FlatParameter::send, a reduce-scatter
//! Zero::finish ──► finish: sends the rest ──► receive_next: FlatParameter::receive, the sums become the pieces' gradients
//! ```
//!
//! Most parameters have one site. A table that is tied to a head has two, which travel apart: their gradients are added to each
//! other only after the ranks, so that the order of additions is that of one device with as many micro-batches as ranks.
//!
//! A parameter with a site for each replica (an expert that takes tokens of several) has the gradients of replicas 0 to N - 1 at the sites of
//! rank 0, of the next N on rank 1, and so on. They are not added site by site: each rank gets all replicas' gradients of its shard, an
//! all-to-all for each site, and adds them in the order of the replicas.

use std::cmp::Reverse;
use std::ops::Range;
use std::sync::atomic::Ordering;

use phalanx_kernels as kernels;
use phalanx_nn::Parameter;
use phalanx_nn::autograd::{Leaf, Slot, Var};
use phalanx_tensor::{Category, DType, Device, Tensor};

use super::ZeroStage;
use super::core::{ZeroCore, ZeroState};
use super::flat_parameter::{FlatParameter, Ranks};
use crate::comm::{Call, Pending, Reduction};
use crate::data_parallel::Average;
use crate::{Error, Result};

impl ZeroCore {
    /// A site of a parameter has its gradient of this pass.
    pub(super) fn arrived(&self, number: usize, synchronise: bool) -> Result<()> {
        if self.is_replaced() {
            return Ok(());
        }
        let state = &mut *self.lock();
        if !state.begun {
            state.refused = true;
            let why = "got a gradient of a backward pass that Zero does not know of: call `zero.backward(&loss)` in the \
                       place of `loss.backward()`, or `zero.begin()` before it and `zero.finish()` after it";
            return Err(phalanx_nn::Error::invalid(self.parameters[number].0.name(), why).into());
        }
        state.touched[number] = true;
        self.unreduced.store(true, Ordering::Relaxed);
        if !synchronise {
            return Ok(());
        }
        let (parameter, unit) = &self.parameters[number];
        let Some(left) = state.sites_left[number].checked_sub(1) else {
            let why = "its gradient came again after it was sent; give each use a site of its own";
            return Err(phalanx_nn::Error::invalid(parameter.name(), why).into());
        };
        state.sites_left[number] = left;
        if left == 0 {
            state.units[*unit].missing -= 1;
        }
        while self.sends_early() && state.next_to_send().is_some_and(|unit| state.units[unit].missing == 0) {
            self.send_next(state)?;
        }
        Ok(())
    }

    /// Whether gradients are sent while backward runs. It is not where units are
    /// unsharded in between and ranks may leave out different parameters: then ranks would call collectives in different orders.
    fn sends_early(&self) -> bool {
        !(self.config.find_unused && self.config.stage == ZeroStage::Parameters)
    }

    /// Sends the gradients of the next unit in order, and waits for those of the unit before: while backward computes a unit's gradients,
    /// one other unit's are here whole.
    fn send_next(&self, state: &mut ZeroState) -> Result<()> {
        let Some(unit) = state.next_to_send() else { return Ok(()) };
        state.unsent -= 1;
        for (number, flat) in state.units[unit].flats.iter_mut().enumerate().filter(|(_, f)| f.trained) {
            let sent = flat.send(&self.ranks, self.config.average)?;
            state.sent.extend(sent.into_iter().map(|sent| (unit, number, sent)));
        }
        while state.sent.front().is_some_and(|(earlier, ..)| *earlier != unit) {
            Self::receive_next(&self.ranks, state)?;
        }
        Ok(())
    }

    fn receive_next(ranks: &Ranks, state: &mut ZeroState) -> Result<()> {
        let Some((unit, flat, sent)) = state.sent.pop_front() else { return Ok(()) };
        state.units[unit].flats[flat].receive(sent, ranks)
    }

    /// Sends the gradients that are left, waits for all, and gets ready for the next pass.
    pub(super) fn finish(&self) -> Result<()> {
        let state = &mut *self.lock();
        let missing = self.parameters.iter().zip(&state.sites_left).filter(|(_, sites)| **sites > 0);
        let missing: Vec<String> = missing.map(|((p, _), _)| p.name().into()).collect();
        if !missing.is_empty() && !self.config.find_unused {
            return Err(Error::Unused { parameters: missing });
        }
        while state.unsent > 0 {
            self.send_next(state)?;
        }
        while !state.sent.is_empty() {
            Self::receive_next(&self.ranks, state)?;
        }
        // The host waits for gradients that it updates by, once all are on their way.
        state.units.iter_mut().flat_map(|unit| &mut unit.flats).try_for_each(FlatParameter::take_arriving)?;
        // The gradients of a parameter's sites are added to each other.
        for piece in state.units.iter().flat_map(|unit| &unit.flats).flat_map(|f| &f.pieces) {
            piece.finish_grad()?;
        }
        if self.config.find_unused {
            self.forget_unused(state)?;
        }
        self.agree_on_use(state)?;
        state.send_order = self.send_order(state);
        state.unsent = state.units.len();
        state.units.iter_mut().for_each(|unit| unit.missing = unit.trained);
        state.sites_left = self.parameters.iter().map(|(p, _)| p.leaves().len()).collect();
        state.touched.fill(false);
        self.unreduced.store(false, Ordering::Relaxed);
        state.reshard()
    }

    /// The order in which the next pass sends gradients, the last first: the reverse of the order in which this one has left the
    /// modules, or of registration where ranks may use modules in different orders. Units without a module, or used outside theirs,
    /// are complete at the end.
    fn send_order(&self, state: &ZeroState) -> Vec<usize> {
        let mut units: Vec<usize> = (0..state.units.len()).collect();
        if self.config.stage == ZeroStage::Parameters && self.sends_early() {
            let of_unit = |unit: usize| move |module: &usize| self.modules[*module].unit == unit;
            let left = |unit: usize| state.order.finished().iter().rposition(of_unit(unit));
            units.sort_by_cached_key(|&unit| {
                let left = left(unit).filter(|_| !state.units[unit].outside);
                (left.is_some(), Reverse(left))
            });
        }
        units
    }

    /// The pass that was announced is over.
    pub(super) fn end(&self) -> Result<()> {
        let state = &mut *self.lock();
        state.order.end();
        match std::mem::take(&mut state.begun) {
            true => Ok(()),
            false => {
                Err(Error::Config("Zero: `finish` came without the `begin` of its backward pass".into()))
            }
        }
    }

    /// Forgets all gradients, also those that no rank has sent.
    pub(super) fn zero_grad(&self) -> Result<()> {
        let state = &mut *self.lock();
        state.touched.fill(false);
        state.refused = false;
        self.unreduced.store(false, Ordering::Relaxed);
        for flat in state.units.iter_mut().flat_map(|unit| &mut unit.flats) {
            flat.pieces.iter().try_for_each(Parameter::zero_grad)?;
            flat.arriving.clear();
            flat.of_replicas.clear();
            flat.close()?;
        }
        Ok(())
    }

    /// A parameter that no rank used has no gradient, rather than one of zeros, which an optimizer would act on. One
    /// that an earlier pass has left stays.
    fn forget_unused(&self, state: &mut ZeroState) -> Result<()> {
        let device = self.parameters.first().map_or(Device::CPU, |(p, _)| p.device().host());
        let touched: Vec<i32> = state.touched.iter().map(|&t| i32::from(t)).collect();
        let mut touched = Tensor::from_slice(&touched, &[touched.len()], device)?;
        if self.ranks.all.has_peers() {
            self.ranks.all.all_reduce(&mut touched, Reduction::Max)?;
        }
        let touched = touched.to_vec::<i32>()?;
        let unused: Vec<&str> =
            self.parameters().zip(touched).filter(|(_, t)| *t == 0).map(|(p, _)| p.name()).collect();
        let pieces = state.units.iter().flat_map(|unit| &unit.flats).flat_map(FlatParameter::first_grads);
        pieces.filter(|piece| unused.contains(&piece.name())).for_each(|piece| piece.set_grad(None));
        Ok(())
    }
}

impl ZeroState {
    /// The unit whose gradients are sent next.
    fn next_to_send(&self) -> Option<usize> {
        self.send_order[..self.unsent].last().copied()
    }
}

/// The gradients at one site.
pub(super) struct Gradients {
    site: usize,
    /// The members that have the site, and their places here.
    places: Vec<(usize, Range<usize>)>,
    /// How many elements each rank owns.
    counts: Vec<usize>,
    /// The buffer of all gradients, while backward fills it.
    full: Option<Tensor>,
}

/// A reduce-scatter under way.
pub(super) struct ReduceScatter {
    site: usize,
    pending: Pending,
    /// The sums that this rank owns.
    sums: Tensor,
    full: Tensor,
}

impl Gradients {
    /// The gradients at every site that a parameter of the buffer has.
    pub(super) fn of(flat: &FlatParameter) -> Vec<Gradients> {
        let sites = flat.members.iter().map(|m| m.parameter.leaves().len()).max().unwrap_or(0);
        (0..sites).map(|site| Gradients::at(flat, site)).collect()
    }

    fn at(flat: &FlatParameter, site: usize) -> Gradients {
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

    fn leaf<'a>(&self, flat: &'a FlatParameter, member: usize) -> &'a Leaf {
        &flat.members[member].parameter.leaves()[self.site]
    }

    /// Makes the buffer unless it is there, and lets leaves accumulate into it.
    fn open(&mut self, flat: &FlatParameter) -> Result<Tensor> {
        if let Some(full) = &self.full {
            return Ok(full.clone());
        }
        // Adding -0 changes no number; 0 would turn -0 into 0.
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

    /// Drops gradients that were not sent: every leaf has a slot of its own, and no gradient.
    fn close(&mut self, flat: &FlatParameter) -> Result<()> {
        self.full = None;
        let own = || Slot::Owned(Some(flat.grad_dtype));
        self.places.iter().try_for_each(|(member, _)| Ok(self.leaf(flat, *member).set_slot(own())?))
    }

    fn send(&mut self, flat: &FlatParameter, ranks: &Ranks, average: Average) -> Result<ReduceScatter> {
        let mut full = self.open(flat)?;
        self.close(flat)?;
        let of_replicas = flat.has_replica_sites();
        if average == Average::Mean {
            let sites = if of_replicas { flat.members[0].parameter.leaves().len() } else { 1 };
            kernels::scale_(&mut full, 1.0 / (ranks.all.size() * sites) as f64)?;
        }
        let (own, shards) = (self.counts[ranks.shard.rank()], ranks.shard.size());
        if of_replicas {
            let received = Tensor::empty(&[own * shards], flat.grad_dtype, flat.device)?;
            let received = received.tagged(Category::Gradients);
            let call =
                Call::all_to_all_uneven(received.clone(), &vec![own; shards], full.clone(), &self.counts);
            return Ok(ReduceScatter {
                site: self.site,
                pending: ranks.shard.start(call),
                sums: received,
                full,
            });
        }
        if flat.offload.is_some() && flat.device.is_cuda() && shards == 1 {
            let pending = Pending::done(Call::barrier(), Ok(()));
            return Ok(ReduceScatter { site: self.site, pending, sums: full.clone(), full });
        }
        let sums = Tensor::empty(&[own], flat.grad_dtype, flat.device)?;
        let sums = sums.tagged(Category::Gradients);
        let call = Call::reduce_scatter_uneven(sums.clone(), full.clone(), &self.counts, Reduction::Sum);
        Ok(ReduceScatter { site: self.site, pending: ranks.shard.start(call), sums, full })
    }
}

impl FlatParameter {
    /// Makes the buffers of gradients, unless they are there.
    pub(super) fn open(&mut self) -> Result<()> {
        self.each_site(|gradients, flat| gradients.open(flat).map(drop)).map(drop)
    }

    /// Drops gradients that were not sent.
    pub(super) fn close(&mut self) -> Result<()> {
        self.each_site(|gradients, flat| gradients.close(flat)).map(drop)
    }

    /// Sends gradients to the ranks that own them.
    pub(super) fn send(&mut self, ranks: &Ranks, average: Average) -> Result<Vec<ReduceScatter>> {
        self.each_site(|gradients, flat| gradients.send(flat, ranks, average))
    }

    /// Calls `f` for the gradients of each site; frozen parameters have none.
    fn each_site<T>(&mut self, f: impl Fn(&mut Gradients, &FlatParameter) -> Result<T>) -> Result<Vec<T>> {
        let mut gradients = std::mem::take(&mut self.gradients);
        let done = gradients.iter_mut().map(|gradients| f(gradients, self)).collect();
        self.gradients = gradients;
        done
    }

    /// Waits for the sums and adds them to the gradients of the pieces.
    pub(super) fn receive(&mut self, sent: ReduceScatter, ranks: &Ranks) -> Result<()> {
        let ReduceScatter { mut site, pending, mut sums, full } = sent;
        pending.wait()?;
        if self.has_replica_sites() {
            self.of_replicas.push(sums);
            if self.of_replicas.len() < self.gradients.len() {
                return Ok(());
            }
            sums = add_replicas(&std::mem::take(&mut self.of_replicas), ranks.shard.size())?;
            site = 0;
        }
        if ranks.replicas.size() > 1 {
            ranks.replicas.all_reduce(&mut sums, Reduction::Sum)?;
        }
        if self.shard.dtype() != self.dtype {
            sums = kernels::cast(&sums, self.shard.dtype())?;
        }
        if let Some(offload) = &self.offload {
            self.arriving.push((site, offload.download(&sums)?));
            return Ok(());
        }
        let same = full.dtype() == sums.dtype();
        if self.keeps_grads && site == 0 && same {
            let mut part = full.narrow(0, self.own.start, self.own.len())?;
            kernels::copy_(&mut part, &sums)?;
            sums = part;
        }
        drop(full);
        self.give_sums(site, &sums)
    }

    /// Waits for offloaded sums and adds them to the gradients of the pieces.
    fn take_arriving(&mut self) -> Result<()> {
        let arriving = std::mem::take(&mut self.arriving);
        arriving.into_iter().try_for_each(|(site, copy)| self.give_sums(site, &copy.wait()?))
    }

    /// Adds sums to the gradients of the pieces.
    fn give_sums(&mut self, site: usize, sums: &Tensor) -> Result<()> {
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
    pub(super) fn first_grads(&self) -> impl Iterator<Item = &Parameter> {
        self.first_grads.iter().map(|&number| &self.pieces[number])
    }
}

/// The sum of the gradients of all replicas, which are those of `ranks` ranks at each of some sites. They are added in the order of the replicas,
/// narrow floats in f32.
fn add_replicas(sites: &[Tensor], ranks: usize) -> Result<Tensor> {
    let (own, dtype) = (sites[0].numel() / ranks, sites[0].dtype());
    let wide = if dtype.size() < 4 { DType::F32 } else { dtype };
    let mut sum: Option<Tensor> = None;
    for (rank, site) in (0..ranks).flat_map(|rank| sites.iter().map(move |site| (rank, site))) {
        let part = kernels::cast(&site.narrow(0, rank * own, own)?, wide)?;
        match &mut sum {
            Some(sum) => kernels::accumulate_(sum, &part)?,
            None => sum = Some(part.copy()?),
        }
    }
    let sum = sum.map_or_else(|| sites[0].zeros_like(), Ok)?;
    Ok(kernels::cast(&sum, dtype)?.tagged(Category::Gradients))
}

/// Adds a sum to a leaf's gradient; true if the leaf had none.
fn give(leaf: &Leaf, sum: Tensor) -> Result<bool> {
    if let Some(earlier) = leaf.grad() {
        kernels::accumulate_(&mut earlier.into_tensor(), &sum)?;
        return Ok(false);
    }
    sum.storage().set_category(Category::Gradients);
    leaf.set_grad(Some(Var::new(sum)));
    Ok(true)
}
