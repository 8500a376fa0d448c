//! [`Profiler`]: which operations took a thread's time, forward and backward, what they computed and what they read and
//! wrote.
//!
//! ```text
//! forward    begins() .. kernels .. record(name, inputs, outputs)     an operation's time ends where it is recorded
//! backward   node(name, ..)                                           a node's time is that of its backward function
//! ```
//! While no thread has a profiler an operation loads one atomic number. Floating-point operations are what the kernels
//! count ([`phalanx_kernels::flops`]): products, convolutions and attention by their shapes. An operation without any
//! counts the elements that it makes. Bytes are those of inputs and outputs; in a backward pass those of the gradients
//! and of the saved values that are read. What stays in the processor's caches counts too, so small tensors may move
//! faster than memory can.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::marker::PhantomData;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use phalanx_kernels::flops;
use phalanx_tensor::{Device, Tensor};

use crate::graph::node::Meta;
use crate::mode::is_recomputing;
use crate::{Error, Result, Var};

/// Which pass an operation runs in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Pass {
    /// The forward pass.
    Forward,
    /// A forward pass that is run again, since its values were not kept.
    Recompute,
    /// The backward pass.
    Backward,
    /// No operation: waiting for another rank ([`waiting`]).
    Wait,
}

/// All calls of one operation in one pass.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct OperationTime {
    /// Which operation, such as `linear`.
    pub name: &'static str,
    /// Where it ran.
    pub pass: Pass,
    /// How often.
    pub calls: u64,
    /// How long, together. What ran inside it under its own name is not in it.
    pub time: Duration,
    /// Its floating-point operations.
    pub flops: f64,
    /// The bytes that it read and wrote.
    pub bytes: f64,
}

/// Times the operations of the thread that has made it, until [`Profiler::end`]. On a GPU the device is waited for
/// before and after each operation, so a step takes longer than without. A backward pass over several devices runs on
/// other threads, and is not seen.
///
/// ```
/// use phalanx_autograd::{Pass, Profiler, Var, tensor::{DType, Device, Tensor}};
/// let w = Var::leaf(Tensor::zeros(&[8, 4], DType::F32, Device::CPU)?)?;
/// let x = Var::new(Tensor::zeros(&[2, 4], DType::F32, Device::CPU)?);
/// let profiler = Profiler::begin(Device::CPU)?;
/// x.linear(&w, None)?.sum_all()?.backward()?;
/// let operations = profiler.end();
/// let linear = operations.iter().find(|o| o.name == "linear" && o.pass == Pass::Forward).unwrap();
/// assert_eq!((linear.calls, linear.flops), (1, 2.0 * 2.0 * 4.0 * 8.0));
/// # Ok::<(), phalanx_autograd::Error>(())
/// ```
#[derive(Debug)]
pub struct Profiler {
    /// It belongs to its thread.
    thread: PhantomData<*const ()>,
}

/// Operations that read of their first input only what they give.
const LOOKUPS: [&str; 3] = ["embedding", "gather", "index_select"];

/// How many threads have one.
static PROFILERS: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    static PROFILE: RefCell<Option<Profile>> = const { RefCell::new(None) };
}

/// What a thread's profiler has seen.
struct Profile {
    device: Device,
    seen: BTreeMap<(&'static str, Pass), OperationTime>,
    /// Where the operation under way began, if it has said so.
    begun: Option<Moment>,
    /// Where the last one ended.
    ended: Moment,
    /// The backward functions under way, the innermost last.
    open: Vec<Open>,
}

/// A time, and how many floating-point operations the thread had done.
#[derive(Clone, Copy)]
struct Moment {
    time: Instant,
    flops: f64,
}

struct Open {
    begun: Moment,
    /// What ran inside it under another name.
    within: (Duration, f64),
    /// Bytes of the gradients that it was given, and of the saved values that it has read.
    given: f64,
    read: f64,
}

impl Profiler {
    /// Begins on this thread, whose operations run on this device.
    ///
    /// # Errors
    /// If the thread has one already.
    pub fn begin(device: Device) -> Result<Profiler> {
        PROFILE.with_borrow_mut(|profile| {
            if profile.is_some() {
                return Err(Error::Custom(
                    "Profiler::begin: got a second profiler of a thread, wanted one".into(),
                ));
            }
            let (seen, open) = Default::default();
            *profile = Some(Profile { device, seen, begun: None, ended: Moment::now(device), open });
            Ok(())
        })?;
        PROFILERS.fetch_add(1, Ordering::Relaxed);
        Ok(Profiler { thread: PhantomData })
    }

    /// What was seen: by pass and name.
    pub fn end(self) -> Vec<OperationTime> {
        let profile = PROFILE.take();
        let mut seen: Vec<_> = profile.into_iter().flat_map(|profile| profile.seen.into_values()).collect();
        seen.sort_by_key(|operation| (operation.pass, operation.name));
        seen
    }
}

impl Drop for Profiler {
    fn drop(&mut self) {
        PROFILE.take();
        PROFILERS.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Moment {
    /// When the device has done what it was given.
    fn now(device: Device) -> Moment {
        if device.is_cuda() {
            // What went wrong there comes out of the next operation.
            let _ = device.synchronize();
        }
        Moment { time: Instant::now(), flops: flops() }
    }
}

/// Says that an operation's kernels run from here on until it is recorded. An operation that does not say so begins
/// where the last one ended.
#[inline(always)]
pub fn begins() {
    if PROFILERS.load(Ordering::Relaxed) != 0 {
        with(|profile| profile.begun = Some(Moment::now(profile.device)));
    }
}

/// An operation is over.
#[inline(always)]
pub(crate) fn forward(name: &'static str, inputs: &[&Var], outputs: &[Tensor]) {
    if PROFILERS.load(Ordering::Relaxed) != 0 {
        with(|profile| profile.forward(name, inputs, outputs));
    }
}

/// A backward function reads a saved value.
#[inline(always)]
pub(crate) fn reads(value: &Tensor) {
    if PROFILERS.load(Ordering::Relaxed) != 0 {
        with(|profile| profile.open.iter_mut().last().into_iter().for_each(|open| open.read += bytes(value)));
    }
}

/// Runs `work`, which waits for another rank, under a name of its own in this thread's profile.
pub fn waiting<T>(name: &'static str, work: impl FnOnce() -> T) -> T {
    let begun = node_begins(&[]);
    let done = work();
    if let Some(mut begun) = begun {
        with(|profile| profile.node(name, Pass::Wait, false, 0.0, 0.0));
        begun.has_ended = true;
    }
    done
}

/// A backward function begins, for these gradients.
#[inline(always)]
pub(crate) fn node_begins(grads: &[Option<Var>]) -> Option<Given> {
    (PROFILERS.load(Ordering::Relaxed) != 0).then(|| begun(grads))
}

/// A backward function under way, with the places of the gradients that it was given. One that fails is forgotten.
pub(crate) struct Given {
    places: Vec<usize>,
    has_ended: bool,
}

impl Drop for Given {
    fn drop(&mut self) {
        if !self.has_ended {
            with(|profile| _ = profile.open.pop());
        }
    }
}

#[cold]
#[inline(never)]
fn begun(grads: &[Option<Var>]) -> Given {
    let grads = || grads.iter().flatten().map(Var::tensor);
    let given = grads().map(bytes).sum();
    with(|profile| {
        let begun = Moment::now(profile.device);
        profile.ended = begun;
        profile.open.push(Open { begun, within: Default::default(), given, read: 0.0 });
    });
    Given { places: grads().map(place).collect(), has_ended: false }
}

fn place(tensor: &Tensor) -> usize {
    std::ptr::from_ref(tensor.storage()).addr()
}

impl Given {
    /// The backward function has made these gradients, and added those that look like `added` to buffers.
    #[cold]
    #[inline(never)]
    pub(crate) fn ends<'m>(
        mut self,
        name: &'static str,
        made: &[Option<Var>],
        added: impl Iterator<Item = &'m Meta>,
    ) {
        let made = || made.iter().flatten().map(Var::tensor);
        let is_new = made().any(|made| !self.places.contains(&place(made)));
        let mut elements: f64 = made().map(|made| made.numel() as f64).sum();
        let (mut written, mut is_added): (f64, bool) = (made().map(bytes).sum(), false);
        for meta in added {
            let count = meta.shape.iter().product::<usize>() as f64;
            // An addition reads the buffer and writes it.
            (elements, written, is_added) =
                (elements + count, written + 2.0 * count * meta.dtype.size() as f64, true);
        }
        with(|profile| profile.node(name, Pass::Backward, is_new || is_added, elements, written));
        self.has_ended = true;
    }
}

#[cold]
#[inline(never)]
fn with(f: impl FnOnce(&mut Profile)) {
    PROFILE.with_borrow_mut(|profile| profile.as_mut().map(f));
}

impl Profile {
    fn forward(&mut self, name: &'static str, inputs: &[&Var], outputs: &[Tensor]) {
        let begun = self.begun.take();
        let recomputing = is_recomputing();
        if !self.open.is_empty() && !recomputing {
            // It is part of a backward function.
            return;
        }
        let begun = begun.unwrap_or(self.ended);
        let now = Moment::now(self.device);
        self.ended = now;
        let is_view = |made: &Tensor| inputs.iter().any(|x| x.tensor().shares_storage(made));
        if outputs.iter().all(is_view) {
            // It has computed nothing.
            return;
        }
        let (time, counted) = (now.time - begun.time, now.flops - begun.flops);
        let elements: usize = outputs.iter().map(Tensor::numel).sum();
        let made: f64 = outputs.iter().map(bytes).sum();
        let read: f64 = inputs.iter().map(|x| bytes(x.tensor())).sum();
        let bytes = made + if LOOKUPS.contains(&name) { read.min(2.0 * made) } else { read };
        let pass = if recomputing { Pass::Recompute } else { Pass::Forward };
        self.add(name, pass, time, if counted > 0.0 { counted } else { elements as f64 }, bytes);
        if let Some(open) = self.open.last_mut() {
            open.within = (open.within.0 + time, open.within.1 + counted);
        }
    }

    /// A backward function that makes no tensor and reads no saved value only passes gradients on: it counts no
    /// elements.
    fn node(&mut self, name: &'static str, pass: Pass, makes: bool, elements: f64, written: f64) {
        let Some(Open { begun, within, given, read }) = self.open.pop() else { return };
        let now = Moment::now(self.device);
        (self.begun, self.ended) = (None, now);
        let (all, counted) = (now.time - begun.time, now.flops - begun.flops);
        let (time, own) = (all.saturating_sub(within.0), counted - within.1);
        let (flops, bytes) = match makes || read > 0.0 {
            true => (if own > 0.0 { own } else { elements }, given + read + written),
            false => (own, 0.0),
        };
        self.add(name, pass, time, flops, bytes);
        if let Some(open) = self.open.last_mut() {
            open.within = (open.within.0 + all, open.within.1 + counted);
        }
    }

    fn add(&mut self, name: &'static str, pass: Pass, time: Duration, flops: f64, bytes: f64) {
        let nothing = OperationTime { name, pass, calls: 0, time: Duration::ZERO, flops: 0.0, bytes: 0.0 };
        let all = self.seen.entry((name, pass)).or_insert(nothing);
        (all.calls, all.time) = (all.calls + 1, all.time + time);
        (all.flops, all.bytes) = (all.flops + flops, all.bytes + bytes);
    }
}

fn bytes(tensor: &Tensor) -> f64 {
    (tensor.numel() * tensor.dtype().size()) as f64
}

#[cfg(test)]
mod tests {
    // Profiles of small graphs whose arithmetic and bytes are known.

    use phalanx_tensor::DType;

    use super::*;
    use crate::checkpoint;

    fn leaf(shape: &[usize]) -> Var {
        Var::leaf(Tensor::zeros(shape, DType::F32, Device::CPU).unwrap()).unwrap()
    }

    fn of<'a>(seen: &'a [OperationTime], name: &str, pass: Pass) -> &'a OperationTime {
        let found = seen.iter().find(|o| o.name == name && o.pass == pass);
        found.unwrap_or_else(|| panic!("no {name} in {pass:?} of {seen:?}"))
    }

    #[test]
    fn a_product_counts_its_multiplications_and_what_it_reads_and_writes() {
        let (x, w) = (leaf(&[6, 5]), leaf(&[7, 5]));
        let profiler = Profiler::begin(Device::CPU).unwrap();
        let y = x.linear(&w, None).unwrap();
        y.sum_all().unwrap().backward().unwrap();
        let seen = profiler.end();
        let product = 2.0 * (6 * 5 * 7) as f64;
        let forward = of(&seen, "linear", Pass::Forward);
        assert_eq!((forward.calls, forward.flops), (1, product));
        assert_eq!(forward.bytes, 4.0 * (6 * 5 + 7 * 5 + 6 * 7) as f64);
        // The gradient of each input is a product; the gradient of the result and both inputs are read, two gradients
        // written.
        let backward = of(&seen, "linear", Pass::Backward);
        assert_eq!((backward.calls, backward.flops), (1, 2.0 * product));
        assert_eq!(backward.bytes, 4.0 * (6 * 7 + 2 * (6 * 5 + 7 * 5)) as f64);
    }

    #[test]
    fn an_elementwise_operation_counts_its_elements_and_a_view_nothing() {
        let x = leaf(&[8, 3]);
        let profiler = Profiler::begin(Device::CPU).unwrap();
        x.reshape_to(&[24]).unwrap().relu().unwrap().sum_all().unwrap().backward().unwrap();
        let seen = profiler.end();
        assert_eq!(of(&seen, "relu", Pass::Forward).flops, 24.0);
        assert_eq!(of(&seen, "relu", Pass::Forward).bytes, 2.0 * 24.0 * 4.0);
        assert!(!seen.iter().any(|o| o.name == "reshape" && o.pass == Pass::Forward), "{seen:?}");
        assert_eq!(of(&seen, "reshape", Pass::Backward).bytes, 0.0);
    }

    /// Recomputed operations have rows of their own: they are not in those of the forward pass, nor in that of the node
    /// that asks for them.
    #[test]
    fn recomputation_is_a_pass_of_its_own() {
        let (x, w) = (leaf(&[6, 5]), leaf(&[7, 5]));
        let profiler = Profiler::begin(Device::CPU).unwrap();
        let y = checkpoint(move |v| v[0].linear(&w, None)?.relu(), &[&x]).unwrap();
        y.sum_all().unwrap().backward().unwrap();
        let seen = profiler.end();
        for pass in [Pass::Forward, Pass::Recompute] {
            assert_eq!(of(&seen, "linear", pass).flops, 2.0 * (6 * 5 * 7) as f64);
            assert_eq!(of(&seen, "relu", pass).calls, 1);
        }
        assert_eq!(of(&seen, "linear", Pass::Backward).flops, 4.0 * (6 * 5 * 7) as f64);
        let again = of(&seen, "recompute", Pass::Backward);
        assert!(again.flops < 10.0, "{again:?}");
    }

    /// Each moment belongs to one operation at most, and large operations have most of them.
    #[test]
    fn the_times_are_parts_of_the_whole() {
        let (x, w) = (leaf(&[256, 256]), leaf(&[256, 256]));
        let profiler = Profiler::begin(Device::CPU).unwrap();
        let begin = Instant::now();
        for _ in 0..5 {
            let y = x.linear(&w, None).unwrap().gelu(phalanx_kernels::Gelu::Tanh).unwrap();
            y.log_softmax(-1).unwrap().sum_all().unwrap().backward().unwrap();
        }
        let all = begin.elapsed();
        let seen = profiler.end();
        let timed: Duration = seen.iter().map(|o| o.time).sum();
        assert!(timed <= all, "{timed:?} of {all:?}");
        assert!(timed > all.mul_f64(0.5), "{timed:?} of {all:?}: {seen:?}");
    }

    /// What runs after a backward function that fails is no part of it.
    #[test]
    fn a_failed_backward_function_is_forgotten() {
        let x = leaf(&[3]);
        let profiler = Profiler::begin(Device::CPU).unwrap();
        let w = x.exp().unwrap();
        let square = w.mul(&w).unwrap();
        phalanx_kernels::fill_(&mut w.tensor().clone(), 2.0).unwrap();
        assert!(square.sum_all().unwrap().backward().is_err(), "the saved value was modified");
        x.tanh().unwrap();
        assert!(profiler.end().iter().any(|o| o.name == "tanh" && o.pass == Pass::Forward));
    }

    #[test]
    fn a_thread_has_one_profiler_and_after_it_none() {
        let profiler = Profiler::begin(Device::CPU).unwrap();
        let refused = Profiler::begin(Device::CPU).err().unwrap().to_string();
        assert!(refused.contains("got a second profiler"), "{refused}");
        drop(profiler);
        leaf(&[2]).relu().unwrap();
        assert!(PROFILE.with_borrow(Option::is_none));
        let profiler = Profiler::begin(Device::CPU).unwrap();
        assert!(profiler.end().is_empty());
    }

    #[test]
    fn waiting_has_a_name_of_its_own() {
        let profiler = Profiler::begin(Device::CPU).unwrap();
        waiting("receive", || std::thread::sleep(Duration::from_millis(20)));
        leaf(&[2]).relu().unwrap();
        let seen = profiler.end();
        let waited = of(&seen, "receive", Pass::Wait);
        assert_eq!((waited.calls, waited.flops, waited.bytes), (1, 0.0, 0.0));
        assert!(waited.time >= Duration::from_millis(20));
        assert!(of(&seen, "relu", Pass::Forward).time < Duration::from_millis(20));
    }
}
