//! [`BucketScheduler`]: pushes each full bucket's work (divide, the hook's collective) as operations of an engine. The reducer calls it.
//!
//! ```text
//! on a serial engine (default)  "bucket i"          mutates its buffer and the communicator: divide, start
//!                               "rest of bucket i"  mutates its buffer: wait, the hook's rest; pushed at the end of the pass
//! on an engine with threads     "bucket i"          all of that in one operation, as soon as its gradients are there
//! ```
//!
//! The communicator is a variable of the engine, so calls start in the order of the pushes. A bucket that fails poisons it and
//! its own buffer. The buckets after it are skipped, and the wait at the end returns the cause.

use std::sync::Arc;

use phalanx_kernels as kernels;

use phalanx_tensor::unpoisoned;

use super::DdpConfig;
use super::buckets::BucketBuffer;
use super::hook::BucketHook;
use crate::Result;
use crate::comm::Comm;
use crate::engine::{Cause, Engine, Lane, Op, Resource, Variable};

/// Runs buckets on an engine, in the order in which they are scheduled.
pub(super) struct BucketScheduler {
    pub(super) engine: Arc<Engine>,
    /// Whether the operation that starts a bucket waits for it.
    waits: bool,
    /// The communicator's variable.
    order: Variable,
    hook: Arc<dyn BucketHook>,
    comm: Comm,
}

impl BucketScheduler {
    /// A scheduler on the config's engine, or on a serial engine of its own.
    ///
    /// # Errors
    /// If the engine has no priority lane.
    pub(super) fn new(config: &DdpConfig, comm: Comm) -> Result<BucketScheduler> {
        let waits = config.engine.is_some();
        let engine = config.engine.clone().unwrap_or_else(|| Arc::new(Engine::serial()));
        let order = engine.new_variable();
        // Reports an engine without the lane now.
        engine.push(Op::new("ddp").mutates(&[&order]).on(Lane::Priority), || Ok(()))?;
        let hook = config.hook.fresh().unwrap_or_else(|| config.hook.clone());
        Ok(BucketScheduler { engine, waits, order, hook, comm })
    }

    /// Adds a bucket over the ranks, its gradients divided by `divisor` first.
    pub(super) fn schedule(
        &self,
        buffer: &Resource<BucketBuffer>,
        index: usize,
        divisor: Option<f64>,
    ) -> Result<()> {
        let (hook, comm, waits, held) = (self.hook.clone(), self.comm.clone(), self.waits, buffer.clone());
        let work = move || -> Result<(), Cause> {
            let mut buffer = held.write()?;
            if let Some(divisor) = divisor {
                kernels::scale_(&mut buffer.gradients, 1.0 / divisor)?;
            }
            let pending = hook.start(&buffer.bucket(divisor), &comm)?;
            if waits {
                return Ok(pending()?);
            }
            *unpoisoned(buffer.pending.get_mut()) = Some(pending);
            Ok(())
        };
        let op = Op::new(format!("bucket {index}")).on(Lane::Priority);
        Ok(self.engine.push(op.mutates(&[buffer.variable(), &self.order]), work)?)
    }

    /// Waits until all buckets have ended, failed ones too.
    ///
    /// # Errors
    /// The error of the first bucket that failed.
    pub(super) fn wait_all(&self, buffers: &[Resource<BucketBuffer>]) -> Result<()> {
        for (index, buffer) in buffers.iter().enumerate().filter(|_| !self.waits) {
            let held = buffer.clone();
            let work = move || -> Result<(), Cause> {
                let pending = unpoisoned(held.write()?.pending.get_mut()).take();
                Ok(pending.map_or(Ok(()), |pending| pending())?)
            };
            let op = Op::new(format!("rest of bucket {index}")).on(Lane::Priority);
            self.engine.push(op.mutates(&[buffer.variable()]), work)?;
        }
        let variables = buffers.iter().map(Resource::variable).chain([&self.order]);
        // Waits for all of them even after an error, so that no operation is under way any more.
        let outcomes: Vec<_> = variables.map(|variable| self.engine.wait_for_var(variable)).collect();
        Ok(outcomes.into_iter().collect::<Result<(), _>>()?)
    }
}
