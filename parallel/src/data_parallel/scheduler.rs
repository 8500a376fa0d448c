//! (data_parallel/courier.rs)
//! [`Courier`]: the buckets' work as operations of an engine.
//!
//! ```text
//! on an engine of the caller   bucket i        (changes its buffer, and the communicator): divide, start
//!   that runs at once          rest of bucket i (changes its buffer): wait, what the hook leaves; pushed at the end
//! on an engine with threads    bucket i        all of that in one operation, as soon as its gradients are there
//! ```
//!
//! The communicator is a variable, so calls are started in the order of the pushes. A bucket that fails poisons it and
//! its buffer; those that come after are skipped, and the wait at the end returns the cause.

use std::sync::Arc;

use phalanx_kernels as kernels;

use super::DdpConfig;
use super::buckets::Slot;
use super::hook::BucketHook;
use crate::Result;
use crate::comm::Comm;
use crate::engine::{Cause, Engine, Lane, Op, Resource, Variable};
use crate::panics::unpoisoned;

pub(super) struct Courier {
    pub(super) engine: Arc<Engine>,
    /// Whether the operation that starts a bucket waits for it.
    waits: bool,
    /// Stands for the communicator.
    order: Variable,
    hook: Arc<dyn BucketHook>,
    comm: Comm,
}

impl Courier {
    /// # Errors
    /// If the engine has no priority lane.
    pub(super) fn new(config: &DdpConfig, comm: Comm) -> Result<Courier> {
        let waits = config.engine.is_some();
        let engine = config.engine.clone().unwrap_or_else(|| Arc::new(Engine::serial()));
        let order = engine.new_variable();
        // Reports an engine without the lane now.
        engine.push(Op::new("ddp").mutates(&[&order]).on(Lane::Priority), || Ok(()))?;
        let hook = config.hook.fresh().unwrap_or_else(|| config.hook.clone());
        Ok(Courier { engine, waits, order, hook, comm })
    }

    /// Adds a bucket over the ranks, its gradients divided by `divisor` first.
    pub(super) fn send(&self, slot: &Resource<Slot>, index: usize, divisor: Option<f64>) -> Result<()> {
        let (hook, comm, waits, held) = (self.hook.clone(), self.comm.clone(), self.waits, slot.clone());
        let work = move || -> Result<(), Cause> {
            let mut slot = held.write()?;
            if let Some(divisor) = divisor {
                kernels::scale_(&mut slot.gradients, 1.0 / divisor)?;
            }
            let rest = hook.start(&slot.bucket(), &comm)?;
            if waits {
                return Ok(rest()?);
            }
            *unpoisoned(slot.rest.get_mut()) = Some(rest);
            Ok(())
        };
        let op = Op::new(format!("bucket {index}")).on(Lane::Priority);
        Ok(self.engine.push(op.mutates(&[slot.variable(), &self.order]), work)?)
    }

    /// Waits until all buckets are done, failed ones too.
    ///
    /// # Errors
    /// What the first of them failed with.
    pub(super) fn settle(&self, slots: &[Resource<Slot>]) -> Result<()> {
        for (index, slot) in slots.iter().enumerate().filter(|_| !self.waits) {
            let held = slot.clone();
            let work = move || -> Result<(), Cause> {
                let rest = unpoisoned(held.write()?.rest.get_mut()).take();
                Ok(rest.map_or(Ok(()), |rest| rest())?)
            };
            let op = Op::new(format!("rest of bucket {index}")).on(Lane::Priority);
            self.engine.push(op.mutates(&[slot.variable()]), work)?;
        }
        let variables = slots.iter().map(Resource::variable).chain([&self.order]);
        // All of them, so that nothing is under way any more.
        let outcomes: Vec<_> = variables.map(|variable| self.engine.wait_for_var(variable)).collect();
        Ok(outcomes.into_iter().collect::<Result<(), _>>()?)
    }
}
