//! Matrix products by cuBLASLt.
//!
//! The library's matrices lie by columns, Phalanx's by rows. So the transpose is asked for: `Cᵀ = Bᵀ Aᵀ`. A matrix by rows is its
//! transpose by columns and needs no flag, and a bias for C's columns is one for the rows of `Cᵀ`, which the library offers.
//!
//! For each form of product the library is asked once for algorithms, and `algorithms.rs` chooses one, so the same form has the same bits
//! each time. f32 is computed in f32, unless `PHALANX_CUDA_TF32=1` allows factors of 19 bits. 16-bit floats are summed in f32.
//! `PHALANX_CUDA_CUBLASLT=0` turns the library off.
#![allow(unsafe_code)]

mod algorithms;
mod handle;

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, RwLock};

use algorithms::Choice;
use handle::{Candidate, Handle, Plan, WORKSPACE_BYTES, is_tf32, version};

use crate::Result;
use crate::capture::is_capturing;
use crate::context::{Context, GpuEvent, lock};
use crate::dry::{self, Traffic};
use crate::library::require;
use crate::load_gate::LoadGate;
use crate::memory::DeviceBlock;
use crate::product::{Float, ProductForm, ProductPointers};
use crate::trace::Work;
use crate::vendor::Library;

/// How often a candidate is timed, and how many products are timed together.
const ROUNDS: usize = 3;
const RUNS: usize = 5;

/// A device's library context, plans and workspaces.
#[derive(Default)]
pub(crate) struct CublasLt {
    handle: OnceLock<Handle>,
    plans: RwLock<HashMap<ProductForm, Option<Arc<PlannedProduct>>>>,
    /// By stream.
    workspaces: Mutex<HashMap<usize, DeviceBlock>>,
}

/// A form of product, and how the library computes it.
pub struct PlannedProduct {
    form: ProductForm,
    plan: Plan,
    /// Whether the library has loaded its kernel.
    has_run: AtomicBool,
}

impl CublasLt {
    /// How products of a form are computed, such as the one at these addresses. None if the library is not there or does not do them.
    pub(crate) fn plan(
        &self,
        context: &'static Context,
        gate: &LoadGate,
        op: &'static str,
        form: &ProductForm,
        at: &ProductPointers,
    ) -> Result<Option<Arc<PlannedProduct>>> {
        let choice = context.called(op, Choice::asked())?;
        if choice == Choice::Own || is_refused() || require(Library::CublasLt).is_err() {
            return Ok(None);
        }
        let handle = self.handle(context, gate, op)?;
        let plans = self.plans.read().unwrap_or_else(PoisonError::into_inner);
        if let Some(planned) = plans.get(form) {
            return Ok(planned.clone());
        }
        drop(plans);
        context.bind(op)?;
        let mut plan = context.called(op, handle.plan(form, at))?;
        if let Some(plan) = plan.as_mut().filter(|_| choice != Choice::First) {
            self.choose(context, gate, op, (handle, form, at), choice, plan)?;
        }
        let planned =
            plan.map(|plan| Arc::new(PlannedProduct { form: *form, plan, has_run: AtomicBool::new(false) }));
        let mut plans = self.plans.write().unwrap_or_else(PoisonError::into_inner);
        Ok(plans.entry(*form).or_insert(planned).clone())
    }

    /// Computes a product on this thread's current stream.
    ///
    /// # Safety
    /// As [`Gpu::multiply`](crate::Gpu::multiply).
    pub(crate) unsafe fn multiply(
        &self,
        context: &'static Context,
        gate: &LoadGate,
        op: &'static str,
        planned: &PlannedProduct,
        at: ProductPointers,
    ) -> Result<()> {
        let PlannedProduct { form, plan, has_run } = planned;
        let handle = self.handle(context, gate, op)?;
        let workspace = if plan.candidate.workspace_bytes > 0 { self.workspace(context, op)? } else { 0 };
        context.bind(op)?;
        if dry::is_dry() {
            // The stand-in library knows the rest.
            dry::note(op, Traffic::default());
        }
        // SAFETY: the plan is the form's, the rest is by the caller; the workspace is this stream's, and never freed.
        let run = || unsafe { handle.run(form, plan, &at, workspace, context.stream()) };
        let queue =
            || context.called(op, if has_run.load(Ordering::Relaxed) { run() } else { gate.load(run) });
        context.traced(op, Work::Product { float: form.float, count: form.count, size: form.size }, queue)?;
        has_run.store(true, Ordering::Relaxed);
        context.count_launch();
        Ok(())
    }

    /// Puts the algorithm that is kept into a plan, in place of the heuristic's first.
    fn choose(
        &self,
        context: &'static Context,
        gate: &LoadGate,
        op: &'static str,
        (handle, form, at): (&Handle, &ProductForm, &ProductPointers),
        choice: Choice,
        plan: &mut Plan,
    ) -> Result<()> {
        let key = algorithms::key(context, version(), if is_tf32() { "tf32" } else { "f32" }, form);
        let mut kept = algorithms::kept(&key);
        // Timing waits for the device, which a capture must not.
        if kept.is_none() && choice == Choice::Timed && !is_capturing() {
            let candidates =
                context.called(op, handle.candidates(form, at, plan.layouts, algorithms::CANDIDATES))?;
            let times = self.time(context, gate, op, (handle, form), plan, &candidates)?;
            if let Some(fastest) = algorithms::fastest(&times) {
                kept = algorithms::keep(&key, candidates[fastest].algorithm());
            }
        }
        if let Some(data) = kept
            && let Some(candidate) = context.called(op, handle.check(form, at, plan.layouts, data))?
        {
            plan.candidate = candidate;
        }
        Ok(())
    }

    /// Milliseconds of each candidate, on memory of its own: a product of zeros takes the same way as any other. Infinite for one that
    /// the library refuses.
    fn time(
        &self,
        context: &'static Context,
        gate: &LoadGate,
        op: &'static str,
        (handle, form): (&Handle, &ProductForm),
        plan: &Plan,
        candidates: &[Candidate],
    ) -> Result<Vec<f32>> {
        let (form, [m, n, k]) = (ProductForm { accumulate: false, ..*form }, form.size);
        let zeros = |elements: usize, float: Float| {
            let bytes = elements * float.bytes();
            let block = context.allocate(op, bytes)?;
            // SAFETY: the block was just made.
            unsafe { context.fill(op, block.address(), 0, bytes) }?;
            Ok(block)
        };
        let blocks = [
            zeros(form.a.span(form.count, m, k), form.float)?,
            zeros(form.b.span(form.count, k, n), form.float)?,
            zeros(form.c.span(form.count, m, n), form.out_float)?,
            zeros(m.max(n), form.out_float)?,
            zeros(if form.epilogue.has_kept() { form.c.span(form.count, m, n) } else { 1 }, form.out_float)?,
        ];
        let [a, b, c, bias, kept] = blocks.each_ref().map(DeviceBlock::address);
        let at = ProductPointers { a, b, c, bias, kept };
        let workspace = self.workspace(context, op)?;
        candidates
            .iter()
            .map(|&candidate| {
                let plan = Plan { layouts: plan.layouts, candidate };
                // SAFETY: all matrices are in the blocks, which are freed in the order of the stream; the workspace is this stream's.
                let run = || unsafe { handle.run(&form, &plan, &at, workspace, context.stream()) };
                context.bind(op)?;
                // The first run loads the kernel.
                if gate.load(run).is_err() {
                    return Ok(f32::INFINITY);
                }
                let mut best = f32::INFINITY;
                for _ in 0..ROUNDS {
                    let start = GpuEvent::timed(context)?;
                    (0..RUNS).try_for_each(|_| context.called(op, run()))?;
                    let end = GpuEvent::timed(context)?;
                    end.synchronize()?;
                    best = best.min(start.milliseconds_to(&end)?);
                }
                Ok(best)
            })
            .collect()
    }

    fn handle(&self, context: &Context, gate: &LoadGate, op: &'static str) -> Result<&Handle> {
        if let Some(handle) = self.handle.get() {
            return Ok(handle);
        }
        context.bind(op)?;
        let handle = context.called(op, gate.load(Handle::new))?;
        Ok(self.handle.get_or_init(|| handle))
    }

    /// The current stream's working memory.
    fn workspace(&self, context: &'static Context, op: &'static str) -> Result<u64> {
        match lock(&self.workspaces).entry(context.stream().addr()) {
            Entry::Occupied(kept) => Ok(kept.get().address()),
            Entry::Vacant(free) => Ok(free.insert(context.allocate(op, WORKSPACE_BYTES)?).address()),
        }
    }
}

/// Whether the library shall not be used.
fn is_refused() -> bool {
    static REFUSED: OnceLock<bool> = OnceLock::new();
    is_set("PHALANX_CUDA_CUBLASLT", "0", &REFUSED)
}

/// Whether a variable of the environment has this value, looked up once.
fn is_set(name: &str, wanted: &str, known: &OnceLock<bool>) -> bool {
    *known.get_or_init(|| std::env::var_os(name).is_some_and(|value| value == wanted))
}
