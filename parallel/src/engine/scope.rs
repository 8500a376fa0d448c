//! [`scope`]: plain tensor code on an engine. What an operation reads and mutates is taken from the guards that it takes on
//! tensors' elements (`phalanx_tensor::watch_guards`).
//!
//! ```text
//! first push    runs at once, on the caller; each guard on a tensor that was there before waits for the operations that
//!               were pushed and use it, and is noted        └──► the tensor's variable is read, or mutated
//! later pushes  are queued with the variables that were noted; a guard on any other tensor is an error
//! other code    of the scope's thread: each guard waits for the operations that were pushed
//! ```

use std::borrow::Cow;
use std::cell::RefCell;
use std::collections::{BTreeMap, HashSet};
use std::fmt;
use std::rc::Rc;
use std::sync::Arc;

use phalanx_tensor::{Device, GuardAccess, GuardWatch, Tensor, watch_guards};

use super::error::{Cause, Error, Result};
use super::op::{Lane, Op};
use super::sync::{Mutex, lock};
use super::variable::Variable;
use super::{Completion, Engine, Operation};

/// Plain tensor code whose operations run on an engine. See [`scope`].
pub struct Scope {
    engine: Arc<Engine>,
    tensors: Arc<Tensors>,
}

/// The variable of each storage that the scope's operations use, by the storage's address.
#[derive(Default)]
struct Tensors(Mutex<BTreeMap<usize, (Tensor, Variable)>>);

/// Plain tensor code that a [`Scope`] pushes as an operation.
pub struct TensorOp {
    name: Cow<'static, str>,
    priority: i32,
    lane: Option<Lane>,
    reads: Vec<Variable>,
    mutates: Vec<Variable>,
    work: Arc<Mutex<Work>>,
    /// Once it has run: what to push.
    operation: Mutex<Option<Operation>>,
}

type Work = Box<dyn FnMut() -> Result<(), Cause> + Send>;

/// Runs plain tensor code, of which the operations of `body` run on the engine. The results are those of calling them one after
/// another, bit for bit. Returns when all of them have run.
///
/// An operation uses the same tensors each time: it changes tensors in place, or makes new ones that do not outlive it. Tensors that
/// another thread or another scope changes meanwhile are not ordered.
///
/// ```
/// use std::sync::Arc;
/// use phalanx_parallel::engine::{self, Engine, EngineConfig, Op};
/// use phalanx_tensor::{Device, Tensor};
/// let engine = Arc::new(Engine::threaded(&EngineConfig::new())?);
/// let [a, b] = [1f32, 0.].map(|x| Tensor::from_slice(&[x; 4], &[2, 2], Device::CPU).unwrap());
/// let sums = engine::scope(&engine, |scope| {
///     let (from, mut to) = (a.clone(), b.clone());
///     let add = scope.operation(Op::new("b += a"), move || {
///         let read = from.read::<f32>("add")?;
///         to.write::<f32>("add")?.iter_mut().zip(read.iter()).for_each(|(to, from)| *to += from);
///         Ok(())
///     });
///     (0..10).try_for_each(|_| scope.push(&add))?;
///     b.to_vec::<f32>().map_err(|e| e.into()) // waits for the ten
/// })?;
/// assert_eq!(sums.unwrap_or_else(|e: Box<dyn std::error::Error>| panic!("{e}")), [10.; 4]);
/// # Ok::<(), engine::Error>(())
/// ```
///
/// # Errors
/// The failure of an operation that no guard has returned yet.
pub fn scope<R>(engine: &Arc<Engine>, body: impl FnOnce(&Scope) -> R) -> Result<R> {
    let scope = Scope { engine: engine.clone(), tensors: Arc::default() };
    let watch = Outside { engine: engine.clone(), tensors: scope.tensors.clone() };
    let watched = watch_guards(Rc::new(watch));
    let result = body(&scope);
    drop(watched);
    let variables: Vec<Variable> = lock(&scope.tensors.0).values().map(|(_, v)| v.clone()).collect();
    // All are waited for, also after an error.
    let outcomes: Vec<_> = variables.iter().map(|variable| engine.wait_for_var(variable)).collect();
    outcomes.into_iter().collect::<Result<()>>()?;
    Ok(result)
}

impl Scope {
    /// Plain tensor code as an operation, to be pushed once or often. Variables that `op` names are used besides the tensors; it
    /// may name none.
    pub fn operation(
        &self,
        op: Op<'_>,
        work: impl FnMut() -> Result<(), Cause> + Send + 'static,
    ) -> TensorOp {
        let owned = |variables: &[&Variable]| variables.iter().copied().cloned().collect();
        // The closure may change what it holds, so its runs are in order.
        let own = self.engine.new_variable();
        let mut mutates: Vec<Variable> = owned(op.mutates);
        mutates.push(own);
        TensorOp {
            name: op.name,
            priority: op.priority,
            lane: op.lane,
            reads: owned(op.reads),
            mutates,
            work: Arc::new(Mutex::new(Box::new(work))),
            operation: Mutex::new(None),
        }
    }

    /// Pushes an operation. The first push runs it at once.
    ///
    /// # Errors
    /// As [`Engine::push`]; the first push returns the operation's own error.
    pub fn push(&self, op: &TensorOp) -> Result<()> {
        let mut operation = lock(&op.operation);
        match &*operation {
            Some(operation) => self.engine.push_operation(operation),
            None => {
                *operation = Some(self.run_first(op)?);
                Ok(())
            }
        }
    }

    /// Runs an operation on this thread, and declares it with the tensors that it has used.
    fn run_first(&self, op: &TensorOp) -> Result<Operation> {
        op.reads.iter().try_for_each(|variable| self.engine.wait_to_read(variable))?;
        op.mutates.iter().try_for_each(|variable| self.engine.wait_for_var(variable))?;
        let note = Rc::new(Note {
            engine: self.engine.clone(),
            tensors: self.tensors.clone(),
            used: RefCell::default(),
            devices: RefCell::default(),
            made: RefCell::default(),
        });
        let watched = watch_guards(note.clone());
        let outcome = (lock(&op.work))();
        drop(watched);
        outcome.map_err(|cause| Error::Failed { op: op.name.to_string(), cause: cause.into() })?;
        let used = note.used.take();
        // A GPU's work may be on another stream than that of the later runs.
        let devices = note.devices.take();
        let ended = devices.iter().try_for_each(|device| device.synchronize());
        ended.map_err(|error| Error::Failed { op: op.name.to_string(), cause: Arc::new(error) })?;
        let pick = |wanted: GuardAccess, others: &[Variable]| -> Vec<Variable> {
            let used = used.values().filter(|(access, _)| *access == wanted).map(|(_, variable)| variable);
            others.iter().chain(used).cloned().collect()
        };
        let (reads, mutates) = (pick(GuardAccess::Read, &op.reads), pick(GuardAccess::Write, &op.mutates));
        let (reads, mutates): (Vec<_>, Vec<_>) = (reads.iter().collect(), mutates.iter().collect());
        let used: Arc<BTreeMap<usize, GuardAccess>> =
            Arc::new(used.iter().map(|(at, (access, _))| (*at, *access)).collect());
        let (work, name) = (op.work.clone(), op.name.clone());
        let declared = Op { lane: op.lane, ..Op::new(name.clone()).priority(op.priority) };
        self.engine.declare_async(declared.reads(&reads).mutates(&mutates), move |completion| {
            run_again(completion, &name, &used, &work)
        })
    }
}

/// Runs an operation that may use what it has used before.
fn run_again(
    completion: Completion,
    name: &str,
    used: &Arc<BTreeMap<usize, GuardAccess>>,
    work: &Mutex<Work>,
) -> Result<(), Cause> {
    let (used, made, devices) = (used.clone(), RefCell::default(), RefCell::default());
    let watch = Rc::new(Again { name: name.to_string(), used, made, devices });
    let watched = watch_guards(watch.clone());
    let outcome = (lock(work))();
    drop(watched);
    // Also after an error: what a GPU was given still runs.
    completion.after_all(&watch.devices.take());
    outcome
}

fn address(tensor: &Tensor) -> usize {
    std::ptr::from_ref(tensor.storage()).addr()
}

fn wait(
    engine: &Engine,
    variable: &Variable,
    access: GuardAccess,
    op: &'static str,
) -> phalanx_tensor::Result<()> {
    let waited = match access {
        GuardAccess::Read => engine.wait_to_read(variable),
        GuardAccess::Write => engine.wait_for_var(variable),
    };
    waited.map_err(|error| phalanx_tensor::Error::invalid(op, error.to_string()))
}

fn note_gpu(devices: &RefCell<Vec<Device>>, tensor: &Tensor) {
    let (device, mut devices) = (tensor.device(), devices.borrow_mut());
    if device.is_cuda() && !devices.contains(&device) {
        devices.push(device);
    }
}

/// The watch of a scope's thread between its pushes.
struct Outside {
    engine: Arc<Engine>,
    tensors: Arc<Tensors>,
}

impl GuardWatch for Outside {
    fn takes(&self, tensor: &Tensor, access: GuardAccess, op: &'static str) -> phalanx_tensor::Result<()> {
        if self.engine.runner.core().inside() {
            return Ok(()); // an operation of `Engine::push`, which has its variables
        }
        let variable = lock(&self.tensors.0).get(&address(tensor)).map(|(_, variable)| variable.clone());
        variable.map_or(Ok(()), |variable| wait(&self.engine, &variable, access, op))
    }

    fn makes(&self, _: &Tensor) {}
}

/// The watch of an operation's first run.
struct Note {
    engine: Arc<Engine>,
    tensors: Arc<Tensors>,
    /// By the storage's address.
    used: RefCell<BTreeMap<usize, (GuardAccess, Variable)>>,
    /// The GPUs that it has given work.
    devices: RefCell<Vec<Device>>,
    /// The storages that this run has made, which no other operation has.
    made: RefCell<HashSet<usize>>,
}

impl GuardWatch for Note {
    fn takes(&self, tensor: &Tensor, access: GuardAccess, op: &'static str) -> phalanx_tensor::Result<()> {
        let at = address(tensor);
        note_gpu(&self.devices, tensor);
        if self.made.borrow().contains(&at) {
            return Ok(());
        }
        // The scope keeps a handle, so the address stays the storage's.
        let new = || (tensor.clone(), self.engine.new_variable());
        let variable = lock(&self.tensors.0).entry(at).or_insert_with(new).1.clone();
        let mut used = self.used.borrow_mut();
        let known = used.entry(at).or_insert_with(|| (access, variable.clone()));
        if access == GuardAccess::Write {
            known.0 = access;
        }
        drop(used);
        wait(&self.engine, &variable, access, op)
    }

    fn makes(&self, tensor: &Tensor) {
        self.made.borrow_mut().insert(address(tensor));
    }
}

/// The watch of an operation's later runs.
struct Again {
    name: String,
    used: Arc<BTreeMap<usize, GuardAccess>>,
    made: RefCell<HashSet<usize>>,
    /// The GPUs that it has given work.
    devices: RefCell<Vec<Device>>,
}

impl GuardWatch for Again {
    fn takes(&self, tensor: &Tensor, access: GuardAccess, op: &'static str) -> phalanx_tensor::Result<()> {
        let at = address(tensor);
        note_gpu(&self.devices, tensor);
        let known = self.used.get(&at);
        let may =
            self.made.borrow().contains(&at) || known == Some(&access) || known == Some(&GuardAccess::Write);
        if may {
            return Ok(());
        }
        let (verb, name) = (if access == GuardAccess::Read { "read" } else { "written" }, &self.name);
        let why = format!(
            "a tensor of shape {:?} is {verb} that the first run of `{name}` has not {verb}, so its place in the order is not known",
            tensor.shape()
        );
        Err(phalanx_tensor::Error::invalid(op, why))
    }

    fn makes(&self, tensor: &Tensor) {
        self.made.borrow_mut().insert(address(tensor));
    }
}

impl fmt::Debug for Scope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Scope({:?})", self.engine)
    }
}

impl fmt::Debug for TensorOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "TensorOp({})", self.name)
    }
}
