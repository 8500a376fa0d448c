//! Functions of modules: their attributes, and what a launch of them needs.

use std::ffi::c_char;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use phalanx_emulator_link::pointer::Out;
use phalanx_ptx::{Loaded, Parameter};

use crate::attribute::{SHARED_BYTES, SHARED_BYTES_OPTIN, THREADS_BLOCK};
use crate::module::Library;
use crate::report;
use crate::status::{Result, Status, present};
use crate::world::world;

/// A kernel of a loaded module.
#[derive(Debug)]
pub(crate) struct Function {
    pub library: Arc<Library>,
    pub module: usize,
    pub name: String,
    pub parameters: Vec<Parameter>,
    pub parameter_bytes: usize,
    pub shared_bytes: u32,
    pub threads_max: u32,
    registers: u32,
    /// The most dynamic shared memory that a launch may ask for.
    dynamic_shared_bytes: AtomicU32,
    cluster: Mutex<[u32; 3]>,
    big_clusters: AtomicU32,
}

impl Function {
    /// The kernel `name` of a module.
    ///
    /// # Errors
    /// It has none of that name.
    pub(crate) fn new(library: Arc<Library>, module: usize, name: &str) -> Result<Function> {
        let loaded = library.loaded()?;
        let Some(kernel) = loaded.module().kernel(name) else {
            let names: Vec<_> = loaded.module().kernels().map(phalanx_ptx::Kernel::name).collect();
            return Err(Status::NOT_FOUND.because(format!("no kernel {name:?}; there are {names:?}")));
        };
        let threads_max = kernel.max_threads().unwrap_or(THREADS_BLOCK).min(THREADS_BLOCK);
        let shared_bytes = kernel.shared_bytes();
        Ok(Function {
            name: name.into(),
            parameters: kernel.parameters().to_vec(),
            parameter_bytes: kernel.parameter_bytes() as usize,
            shared_bytes,
            threads_max,
            // Registers here are virtual, one a value. A compiler shares them out; this is a bound, not a count.
            registers: kernel.registers().clamp(16, 255).min(65_536 / threads_max),
            dynamic_shared_bytes: AtomicU32::new(SHARED_BYTES.saturating_sub(shared_bytes)),
            cluster: Mutex::default(),
            big_clusters: AtomicU32::new(0),
            library,
            module,
        })
    }

    pub(crate) fn loaded(&self) -> Result<Arc<Loaded>> {
        self.library.loaded()
    }

    pub(crate) fn dynamic_shared_bytes(&self) -> u32 {
        self.dynamic_shared_bytes.load(Ordering::Relaxed)
    }

    /// The cluster that the function must be launched with; zeros for any.
    pub(crate) fn cluster(&self) -> [u32; 3] {
        *self.cluster.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether clusters of more blocks than every device has are allowed.
    pub(crate) fn has_big_clusters(&self) -> bool {
        self.big_clusters.load(Ordering::Relaxed) != 0
    }

    pub(crate) fn registers(&self) -> u32 {
        self.registers
    }

    fn get(&self, attribute: i32) -> Option<i32> {
        let value = match attribute {
            0 => self.threads_max,
            1 => self.shared_bytes,
            2 | 3 => 0, // constant, local
            4 => self.registers,
            5 | 6 => 90, // PTX and binary version
            7 => 0,
            8 => self.dynamic_shared_bytes(),
            9 => return Some(-1),
            10 => u32::from(self.cluster() != [0; 3]),
            11..=13 => self.cluster()[attribute as usize - 11],
            14 => self.big_clusters.load(Ordering::Relaxed),
            15 => 0,
            _ => return None,
        };
        i32::try_from(value).ok()
    }

    fn set(&self, attribute: i32, value: i32) -> Result<()> {
        let wrong = |why: String| Err(Status::INVALID_VALUE.because(why));
        let Ok(amount) = u32::try_from(value) else {
            return if attribute == 9 {
                Ok(())
            } else {
                wrong(format!("attribute {attribute} cannot be {value}"))
            };
        };
        match attribute {
            8 => {
                let most = SHARED_BYTES_OPTIN - self.shared_bytes.min(SHARED_BYTES_OPTIN);
                if amount > most {
                    return wrong(format!(
                        "{amount} bytes of dynamic shared memory: there are {most} at most"
                    ));
                }
                self.dynamic_shared_bytes.store(amount, Ordering::Relaxed);
            }
            9 | 15 => {}
            11..=13 => {
                self.cluster.lock().unwrap_or_else(PoisonError::into_inner)[attribute as usize - 11] = amount
            }
            14 => self.big_clusters.store(amount, Ordering::Relaxed),
            _ => return wrong(format!("attribute {attribute} cannot be set")),
        }
        Ok(())
    }
}

export! {
    fn cuFuncGetAttribute(value: Out<i32>, attribute: i32, function: usize) {
        let function = world()?.functions.get(function)?;
        let unknown = || Status::INVALID_VALUE.because(format!("function attribute {attribute}"));
        set!(value, function.get(attribute).ok_or_else(unknown)?)
    }
    fn cuFuncSetAttribute(function: usize, attribute: i32, value: i32) {
        world()?.functions.get(function)?.set(attribute, value)
    }
    fn cuFuncSetCacheConfig(function: usize, config: i32) { world()?.functions.get(function).map(|_| ()) }
    fn cuFuncGetModule(module: Out<usize>, function: usize) { set!(module, world()?.functions.get(function)?.module) }
    fn cuFuncGetName(name: Out<*const c_char>, function: usize) {
        set!(name, report::kept(&world()?.functions.get(function)?.name))
    }
    fn cuFuncIsLoaded(state: Out<i32>, function: usize) {
        world()?.functions.get(function)?;
        set!(state, 1)
    }
    fn cuFuncLoad(function: usize) { world()?.functions.get(function).map(|_| ()) }
    fn cuFuncGetParamCount(function: usize, count: Out<usize>) {
        set!(count, world()?.functions.get(function)?.parameters.len())
    }
    fn cuFuncGetParamInfo(function: usize, index: usize, offset: Out<usize>, bytes: Out<usize>) {
        let function = world()?.functions.get(function)?;
        let found = function.parameters.get(index).ok_or(Status::INVALID_VALUE)?;
        set!(offset, found.offset as usize)?;
        if bytes.is_null() { Ok(()) } else { present(bytes.set(found.bytes as usize), "bytes") }
    }
}
