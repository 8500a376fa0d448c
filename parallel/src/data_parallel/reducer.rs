//! [`Reducer`]: the gradients of a [`Ddp`](super::Ddp), pass by pass.
//!
//! ```text
//! Ddp::begin    begin      gradients that are already sums of all ranks stay on one rank alone
//!               expect     the leaves that the graph of the loss leads to; the others count as arrived
//! leaf hooks    arrived    counts the leaf's gradient; a bucket that is full, and first in order, goes to the scheduler
//! Ddp::finish   finish     schedules the buckets that are left, waits for all; after the first pass fills buckets anew
//! Ddp::join     shadow     the same on a rank without a batch, which adds zeros
//! ```

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use phalanx_kernels as kernels;
use phalanx_nn::Parameter;
use phalanx_nn::autograd::{Leaf, Slot};
use phalanx_tensor::{Device, Tensor, unpoisoned};

use super::arrivals::ArrivalCounts;
use super::buckets::BucketStore;
use super::scheduler::BucketScheduler;
use super::{Average, BucketTracker, Buckets, DdpConfig, GradSize};
use crate::comm::{Comm, Reduction};
use crate::{Error, Result};

/// The end of an error that finds the model changed since it was wrapped.
const AGAIN: &str = "`Ddp` was made; make it anew";

/// Of a leaf of a static graph.
const UNUSED_IN_FIRST: &str = "got a gradient, and no rank's first pass gave it one: the graph has changed; set \
    `DdpConfig::static_graph` to false, and `find_unused` if parameters may get none";

/// The gradients of a `Ddp`: which have arrived, and the buckets that they lie in.
pub(super) struct Reducer {
    /// The leaves whose gradients are all-reduced, one for each site (use in the model) of each parameter. Sites
    /// are added to each other only after the ranks, so that the order of additions is that of one device with as
    /// many micro-batches as ranks.
    leaves: Vec<(Parameter, Leaf)>,
    /// For each leaf, the leaves that are sent with it, once all of them have arrived: itself alone, or, where
    /// another rank computes some of the parameter's gradients (see `is_local` of [`Reducer::new`]), all leaves of
    /// the parameter.
    together: Vec<Range<usize>>,
    sizes: Vec<GradSize>,
    comm: Comm,
    config: DdpConfig,
    scheduler: BucketScheduler,
    /// Whether this rank has gradients that were not added to the others'.
    unreduced: AtomicBool,
    /// Whether another wrapper has the parameters.
    replaced: AtomicBool,
    /// Whether a pass has ever begun.
    used: AtomicBool,
    state: Mutex<ReducerState>,
}

/// The roles of the ranks in a pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Roles {
    /// The first rank that computes.
    pub(super) first: usize,
    /// The divisor of a mean.
    pub(super) divisor: usize,
}

/// What changes in a pass.
struct ReducerState {
    store: BucketStore,
    /// Whether a pass was announced that is not over.
    begun: bool,
    /// If a pass was refused, which may have added to any leaf: how often each was zeroed by then.
    refused: Option<Vec<u64>>,
    /// How often each leaf was zeroed by the end of the last synchronised pass.
    zeroed: Vec<u64>,
    /// Whether the buckets were rebuilt in the order of arrival.
    rebuilt: bool,
    launcher: BucketTracker,
    roles: Roles,
    /// How many gradients of this pass each leaf has.
    counts: ArrivalCounts,
    /// Whether the leaves that get no gradient in this pass were counted as arrived.
    unused_completed: bool,
    /// Whether one got a gradient since the last synchronisation.
    touched: Vec<bool>,
    /// Leaves that got a gradient on no rank (`find_unused`, `static_graph`). Their gradient is outside the buckets until
    /// they get one.
    unused: Vec<bool>,
    /// The leaves to which the last synchronised pass gave the sum of all ranks. None from the beginning of the next pass on.
    reduced: Vec<bool>,
}

impl Reducer {
    /// `is_local`: whether this rank's backward pass computes the gradients of all sites of a parameter, so that
    /// each may be sent when it has arrived. It is false for a table whose other site is on another rank: that
    /// rank's gradients are added later, and it needs this rank's as they are
    /// ([`TiedTable`](crate::pipeline::ranks::TiedTable)).
    pub(super) fn new(
        parameters: Vec<Parameter>,
        is_local: impl Fn(&Parameter) -> bool,
        comm: Comm,
        config: DdpConfig,
    ) -> Result<Reducer> {
        let size = |p: &Parameter| GradSize {
            elements: p.tensor().numel(),
            dtype: config.grad_dtype.unwrap_or(p.dtype()),
            device: p.device(),
        };
        let (mut leaves, mut together) = (Vec::new(), Vec::new());
        for p in parameters {
            let sites = leaves.len()..leaves.len() + p.leaves().len();
            let alone = is_local(&p);
            together.extend(sites.clone().map(|site| if alone { site..site + 1 } else { sites.clone() }));
            leaves.extend(p.leaves().iter().map(|leaf| (p.clone(), leaf.clone())));
        }
        let sizes: Vec<GradSize> = leaves.iter().map(|(p, _)| size(p)).collect();
        let order: Vec<usize> = (0..sizes.len()).rev().collect();
        let buckets = Buckets::fill(&order, &sizes, config.first_bucket_bytes, config.bucket_bytes);
        let scheduler = BucketScheduler::new(&config, Arc::clone(&comm))?;
        let store = BucketStore::new(buckets, &sizes, &leaves, &scheduler.engine)?;
        for ((_, leaf), view) in leaves.iter().zip(&store.views) {
            leaf.set_slot(Slot::Into(view.clone()))?;
        }
        let state = ReducerState {
            launcher: BucketTracker::new(&store.buckets),
            store,
            begun: false,
            refused: None,
            zeroed: vec![0; sizes.len()],
            rebuilt: false,
            roles: Roles { first: 0, divisor: comm.size() },
            counts: ArrivalCounts::new(sizes.len(), config.static_graph),
            unused_completed: false,
            touched: vec![false; sizes.len()],
            unused: vec![false; sizes.len()],
            reduced: vec![false; sizes.len()],
        };
        let ([unreduced, replaced, used], state) = ([false; 3].map(AtomicBool::new), Mutex::new(state));
        Ok(Reducer { leaves, together, sizes, comm, config, scheduler, unreduced, replaced, used, state })
    }

    pub(super) fn leaves(&self) -> &[(Parameter, Leaf)] {
        &self.leaves
    }

    /// Where numbers that ranks exchange about their work are kept.
    pub(super) fn host(&self) -> Device {
        self.sizes.first().map_or(Device::CPU, |size| size.device.host())
    }

    fn name(&self, number: usize) -> &str {
        self.leaves[number].0.name()
    }

    pub(super) fn buckets(&self) -> Vec<Vec<String>> {
        let name = |&number: &usize| self.name(number).to_string();
        let members = |members: &Vec<usize>| members.iter().map(name).collect();
        self.lock().store.buckets.members().iter().map(members).collect()
    }

    fn lock(&self) -> MutexGuard<'_, ReducerState> {
        unpoisoned(self.state.lock())
    }

    /// The number by which gradients are divided, if they are.
    fn divisor(&self, roles: Roles) -> Option<f64> {
        (self.config.average == Average::Mean).then_some(roles.divisor as f64)
    }

    /// Whether this rank has gradients that were not added to the others'.
    pub(super) fn has_unreduced(&self) -> bool {
        self.unreduced.load(Ordering::Relaxed)
    }

    /// Another wrapper has the parameters.
    pub(super) fn mark_replaced(&self) {
        self.replaced.store(true, Ordering::Relaxed);
    }

    pub(super) fn is_replaced(&self) -> bool {
        self.replaced.load(Ordering::Relaxed)
    }

    /// Whether a pass has ever begun.
    pub(super) fn was_used(&self) -> bool {
        self.used.load(Ordering::Relaxed)
    }

    /// How often each leaf was zeroed.
    fn times_zeroed(&self) -> Vec<u64> {
        self.leaves.iter().map(|(_, leaf)| leaf.times_zeroed()).collect()
    }

    /// Drops the gradients that a refused pass has added, where there were no others; elsewhere asks for `zero_grad`.
    pub(super) fn clear_refused_pass(&self) -> Result<()> {
        let state = &mut *self.lock();
        let Some(then) = &state.refused else { return Ok(()) };
        let was_empty = |number: usize| {
            !state.touched[number] && (!state.reduced.contains(&true) || then[number] > state.zeroed[number])
        };
        let now = self.times_zeroed();
        let spoiled = (0..now.len()).find(|&number| !was_empty(number) && now[number] == then[number]);
        if let Some(number) = spoiled {
            let why =
                "its gradient may have a part of a backward pass that was refused; call `zero_grad` first";
            return Err(phalanx_nn::Error::invalid(self.name(number), why).into());
        }
        let added = (0..now.len()).filter(|&number| now[number] == then[number]);
        added.for_each(|number| self.leaves[number].1.set_grad(None));
        state.refused = None;
        Ok(())
    }

    /// Refuses leaves that have changed since the buckets were made.
    fn check_leaves(&self, state: &ReducerState) -> Result<()> {
        for (number, (parameter, leaf)) in self.leaves.iter().enumerate() {
            let view = &state.store.views[number];
            let wrong = |why: String| Err(phalanx_nn::Error::invalid(parameter.name(), why).into());
            let held = leaf.tensor();
            if held.shape() != view.shape() {
                let (got, wanted) = (held.shape(), view.shape());
                return wrong(format!("holds a tensor of shape {got:?}, and held {wanted:?} when {AGAIN}"));
            }
            if !state.unused[number] && !matches!(leaf.slot(), Slot::Into(to) if to.shares_storage(view)) {
                return wrong(format!("its gradients do not go where they went when {AGAIN}"));
            }
        }
        Ok(())
    }

    /// A pass begins, synchronised or not. A gradient that is already the sum of all ranks, and that was not zeroed since,
    /// is carried over on one rank alone: the other ranks zero theirs, so that the next sum counts it once. The sum of both
    /// passes comes out, the earlier one first, as on one device. (The sum travels again: a mean is multiplied by its
    /// divisor here and divided anew, and a hook that rounds rounds it once more.)
    pub(super) fn begin(&self, roles: Roles) -> Result<()> {
        self.clear_refused_pass()?;
        let state = &mut *self.lock();
        self.check_leaves(state)?;
        state.begun = true;
        state.counts.begin();
        state.unused_completed = false;
        self.used.store(true, Ordering::Relaxed);
        state.roles = roles;
        for number in self.carried_over(state) {
            let view = &mut state.store.views[number];
            match (self.comm.rank() == roles.first, self.divisor(roles)) {
                (true, None) => {}
                (true, Some(divisor)) => kernels::scale_(view, divisor)?,
                (false, _) => kernels::fill_(view, -0.0)?,
            }
            state.touched[number] = true;
            self.unreduced.store(true, Ordering::Relaxed);
        }
        state.reduced.fill(false);
        Ok(())
    }

    /// The pass that has begun, or the last of several, gives gradients to `reached` alone (torch: `prepare_for_backward`).
    pub(super) fn expect(&self, reached: &[Leaf]) {
        if self.config.find_unused {
            self.lock().counts.expect(&self.leaves, reached);
        }
    }

    /// The leaves that still hold the sum of all ranks: it was not zeroed since the last synchronised pass. If a caller
    /// writes zeros into a gradient instead, zeros are carried over.
    fn carried_over(&self, state: &ReducerState) -> Vec<usize> {
        let holds = |number: &usize| {
            state.reduced[*number] && self.leaves[*number].1.times_zeroed() == state.zeroed[*number]
        };
        (0..self.leaves.len()).filter(holds).collect()
    }

    /// The pass that was announced is over.
    pub(super) fn end(&self) -> Result<()> {
        match std::mem::take(&mut self.lock().begun) {
            true => Ok(()),
            false => Err(Error::Config("Ddp: `finish` came without the `begin` of its backward pass".into())),
        }
    }

    /// A leaf has its gradient of this pass.
    pub(super) fn arrived(&self, number: usize, synchronise: bool) -> Result<()> {
        let mut state = self.lock();
        let wrong = |why| Err(phalanx_nn::Error::invalid(self.name(number), why).into());
        if self.is_replaced() {
            return Ok(());
        }
        if !state.begun {
            state.refused = Some(self.times_zeroed());
            return wrong(
                "got a gradient of a backward pass that Ddp does not know of: call `ddp.backward(&loss)` in the place \
                 of `loss.backward()`, or `ddp.begin()` before it and `ddp.finish()` after it",
            );
        }
        state.touched[number] = true;
        self.unreduced.store(true, Ordering::Relaxed);
        if state.unused[number] {
            if self.config.static_graph {
                return wrong(UNUSED_IN_FIRST);
            }
            self.rejoin(&mut state, number)?;
        }
        if !synchronise {
            return Ok(());
        }
        // Not earlier: passes that do not synchronise may have given gradients to these until now.
        if !std::mem::replace(&mut state.unused_completed, true) {
            let unused = state.counts.unused();
            unused.into_iter().try_for_each(|number| self.launch_complete(&mut state, number))?;
        }
        if let Err(why) = state.counts.arrive(number) {
            return Err(phalanx_nn::Error::invalid(self.name(number), why).into());
        }
        self.launch_complete(&mut state, number)
    }

    /// Starts the buckets that may go if a leaf, and those that are sent with it, have all their gradients of this pass.
    fn launch_complete(&self, state: &mut ReducerState, number: usize) -> Result<()> {
        let mut together = self.together[number].clone();
        match together.clone().all(|number| state.counts.is_complete(number)) {
            true => together.try_for_each(|number| self.launch(state, number)),
            false => Ok(()),
        }
    }

    /// Moves a gradient of a leaf that had none on any rank back into its bucket.
    fn rejoin(&self, state: &mut ReducerState, number: usize) -> Result<()> {
        let (leaf, view) = (&self.leaves[number].1, &mut state.store.views[number]);
        if let Some(grad) = leaf.grad() {
            kernels::copy_(view, grad.tensor())?;
        }
        leaf.set_slot(Slot::Into(view.clone()))?;
        state.unused[number] = false;
        Ok(())
    }

    /// Starts the buckets that may go now that a leaf's gradient is complete.
    fn launch(&self, state: &mut ReducerState, number: usize) -> Result<()> {
        for bucket in state.launcher.arrive(number) {
            let short = || Error::Config("Ddp: memory was short for its buckets; make it anew".into());
            let buffer = state.store.buffers.get(bucket).ok_or_else(short)?;
            self.scheduler.schedule(buffer, bucket, self.divisor(state.roles))?;
        }
        Ok(())
    }

    /// Starts the buckets that are left, waits for all, and gets ready for the next pass.
    pub(super) fn finish(&self) -> Result<()> {
        let state = &mut *self.lock();
        if let Err((number, why)) = state.counts.end() {
            return Err(phalanx_nn::Error::invalid(self.name(number), why).into());
        }
        let missing = state.launcher.missing();
        if !missing.is_empty() && !self.config.find_unused && !self.config.static_graph {
            let mut parameters: Vec<String> = missing.iter().map(|&n| self.name(n).into()).collect();
            parameters.dedup();
            return Err(Error::Unused { parameters });
        }
        if self.config.static_graph && !state.rebuilt {
            let order = state.counts.order().to_vec();
            order.into_iter().try_for_each(|number| self.launch(state, number))?;
        }
        self.end_pass(state)
    }

    /// A synchronised pass of a rank without a batch (torch: a shadow all-reduce). It adds -0, which changes no
    /// number, and the gradients that passes without synchronisation have left.
    pub(super) fn shadow(&self, roles: Roles) -> Result<()> {
        let state = &mut *self.lock();
        self.used.store(true, Ordering::Relaxed);
        state.roles = roles;
        for (view, _) in state.store.views.iter_mut().zip(&state.touched).filter(|(_, touched)| !**touched) {
            kernels::fill_(view, -0.0)?;
        }
        self.end_pass(state)
    }

    /// Ends a pass: starts the buckets that are left, and waits for all.
    fn end_pass(&self, state: &mut ReducerState) -> Result<()> {
        let mut arrivals = state.launcher.arrivals().to_vec();
        arrivals.retain(|&number| state.counts.has_arrived(number));
        let missing = state.launcher.missing();
        missing.into_iter().try_for_each(|number| self.launch(state, number))?;
        self.scheduler.wait_all(&state.store.buffers)?;
        let marks = if self.config.static_graph { !state.rebuilt } else { self.config.find_unused };
        if marks {
            self.mark_unused(state)?;
        }
        if !state.rebuilt {
            self.rebuild(state, arrivals)?;
        }
        state.launcher = BucketTracker::new(&state.store.buckets);
        state.counts.clear();
        state.touched.fill(false);
        // A leaf that no rank used has no gradient to carry over, and one on meta no values.
        state.reduced = (0..self.leaves.len())
            .map(|number| !state.unused[number] && !self.sizes[number].device.is_meta())
            .collect();
        state.zeroed = self.times_zeroed();
        self.unreduced.store(false, Ordering::Relaxed);
        Ok(())
    }

    /// Gives all ranks zeros where `root` has zeroed its gradients.
    pub(super) fn broadcast_zeroed(&self, root: usize) -> Result<()> {
        let state = &mut *self.lock();
        let mut mine = vec![0i32; self.sizes.len()];
        self.carried_over(state).into_iter().for_each(|number| mine[number] = 1);
        let mut flags = Tensor::from_slice(&mine, &[mine.len()], self.host())?;
        self.comm.broadcast(&mut flags, root)?;
        let held = flags.to_vec::<i32>()?;
        let mut forgotten = state.store.views.iter_mut().zip(held).filter(|(_, held)| *held == 0);
        Ok(forgotten.try_for_each(|(view, _)| kernels::fill_(view, -0.0))?)
    }

    /// A leaf that no rank used has no gradient, rather than one of zeros, which an optimizer would act on.
    fn mark_unused(&self, state: &mut ReducerState) -> Result<()> {
        let touched: Vec<i32> = state.touched.iter().map(|&t| i32::from(t)).collect();
        let mut touched = Tensor::from_slice(&touched, &[touched.len()], self.host())?;
        if self.comm.has_peers() {
            self.comm.all_reduce(&mut touched, Reduction::Max)?;
        }
        for (number, touched) in touched.to_vec::<i32>()?.into_iter().enumerate() {
            let leaf = &self.leaves[number].1;
            if touched == 0 {
                leaf.set_slot(Slot::Owned(Some(self.sizes[number].dtype)))?;
                // A hook with a memory may have written there.
                kernels::fill_(&mut state.store.views[number], 0.0)?;
            } else if state.unused[number] {
                leaf.set_slot(Slot::Into(state.store.views[number].clone()))?;
            }
            state.unused[number] = touched == 0;
        }
        Ok(())
    }

    /// Fills buckets anew, once, in the order in which the first rank's gradients came.
    fn rebuild(&self, state: &mut ReducerState, mut order: Vec<usize>) -> Result<()> {
        let late: Vec<usize> = (0..self.leaves.len()).filter(|number| !order.contains(number)).collect();
        order.extend(late);
        let mine: Vec<i64> = order.iter().map(|&number| number as i64).collect();
        let mut first = Tensor::from_slice(&mine, &[mine.len()], self.host())?;
        if self.comm.has_peers() {
            self.comm.broadcast(&mut first, state.roles.first)?;
        }
        let order: Vec<usize> = first.to_vec::<i64>()?.into_iter().map(|number| number as usize).collect();
        let sizes = (self.config.first_bucket_bytes, self.config.bucket_bytes);
        let buckets = Buckets::fill(&order, &self.sizes, sizes.0, sizes.1);
        state.rebuilt = true;
        if buckets == state.store.buckets {
            return Ok(());
        }
        let ReducerState { store, unused, .. } = state;
        store.rebuild(buckets, &self.sizes, &self.leaves, &self.scheduler.engine, |number, view| {
            if unused[number] {
                return Ok(());
            }
            Ok(self.leaves[number].1.set_slot(Slot::Into(view.clone()))?)
        })
    }
}
