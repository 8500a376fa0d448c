//! [`Program`] and [`Kernel`]: CUDA sources, compiled when they are first used on a device.
#![allow(unsafe_code)]

use std::collections::HashMap;
use std::ffi::c_void;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::{Mutex, PoisonError, RwLock};

use super::driver::{self, CUfunction, CUmodule};
use super::{Args, Gpu, Grid, Target, nvrtc};
use crate::{Error, Result};

/// The source of one or more kernels.
#[derive(Clone, Copy, Debug)]
pub struct Program<'a> {
    /// Its name, for messages and the cache.
    pub name: &'a str,
    /// Files, as `(name, text)`, one after the other: lines in messages are theirs.
    pub files: &'static [(&'static str, &'static str)],
    /// Macros: name and text. A program is compiled once for each set of them.
    pub defines: &'a [(&'a str, &'a str)],
}

impl Program<'_> {
    /// What is compiled.
    pub fn text(&self) -> String {
        let mut text = String::new();
        for (name, value) in self.defines {
            text += &format!("#define {name} {value}\n");
        }
        for (name, file) in self.files {
            text += &format!("#line 1 \"{name}\"\n{file}\n");
        }
        text
    }

    /// Everything by which two programs can differ; files by their place in this binary.
    fn key(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        for (_, file) in self.files {
            (file.as_ptr().addr(), file.len()).hash(&mut hasher);
        }
        self.defines.hash(&mut hasher);
        hasher.finish()
    }

    fn is(&self, other: &Known) -> bool {
        let files = self.files.len() == other.files.len()
            && self.files.iter().zip(other.files).all(|(a, b)| std::ptr::eq(a.1, b.1));
        let defines = self.defines.len() == other.defines.len()
            && self.defines.iter().zip(&other.defines).all(|(a, b)| a.0 == b.0 && a.1 == b.1);
        files && defines
    }
}

/// The programs that a device has loaded.
#[derive(Default)]
pub(super) struct Kernels {
    loaded: RwLock<HashMap<u64, Vec<Known>>>,
    /// One compilation at a time, so that none is done twice.
    loading: Mutex<()>,
}

struct Known {
    files: &'static [(&'static str, &'static str)],
    defines: Vec<(String, String)>,
    module: Module,
    /// Those of its kernels that were asked for.
    functions: Vec<(String, Function)>,
}

#[derive(Clone, Copy)]
struct Module(CUmodule);

#[derive(Clone, Copy)]
struct Function(CUfunction);

// SAFETY: a module's handle may be used from any thread; modules are never unloaded.
unsafe impl Send for Module {}
// SAFETY: as for `Send`.
unsafe impl Sync for Module {}
// SAFETY: a function's handle may be used from any thread; modules are never unloaded.
unsafe impl Send for Function {}
// SAFETY: as for `Send`.
unsafe impl Sync for Function {}

impl Kernels {
    fn find(&self, key: u64, program: &Program<'_>, entry: &str) -> Option<Function> {
        let loaded = self.loaded.read().unwrap_or_else(PoisonError::into_inner);
        let known = loaded.get(&key)?.iter().find(|known| program.is(known))?;
        known.functions.iter().find(|(name, _)| name == entry).map(|&(_, function)| function)
    }

    /// The module of a program of which another kernel was asked for.
    fn module(&self, key: u64, program: &Program<'_>) -> Option<Module> {
        let loaded = self.loaded.read().unwrap_or_else(PoisonError::into_inner);
        loaded.get(&key)?.iter().find(|known| program.is(known)).map(|known| known.module)
    }

    fn keep(&self, key: u64, program: &Program<'_>, module: Module, (entry, function): (&str, Function)) {
        let mut loaded = self.loaded.write().unwrap_or_else(PoisonError::into_inner);
        let all = loaded.entry(key).or_default();
        let named = (entry.to_string(), function);
        match all.iter_mut().find(|known| program.is(known)) {
            Some(known) => known.functions.push(named),
            None => {
                let own = |(name, value): &(&str, &str)| ((*name).to_string(), (*value).to_string());
                let defines = program.defines.iter().map(own).collect();
                all.push(Known { files: program.files, defines, module, functions: vec![named] });
            }
        }
    }
}

/// A compiled kernel on a device.
#[derive(Clone, Copy)]
pub struct Kernel {
    gpu: &'static Gpu,
    function: Function,
}

impl Gpu {
    /// A program's kernel `entry`, compiled for this device and loaded if it is not yet.
    ///
    /// # Errors
    /// If there is no compiler, or the program is wrong: what the compiler says.
    pub fn kernel(&'static self, op: &'static str, program: &Program<'_>, entry: &str) -> Result<Kernel> {
        let key = program.key();
        let function = match self.kernels.find(key, program, entry) {
            Some(function) => function,
            None => self.load(op, key, program, entry)?,
        };
        Ok(Kernel { gpu: self, function })
    }

    #[cold]
    fn load(&self, op: &'static str, key: u64, program: &Program<'_>, entry: &str) -> Result<Function> {
        let _one = self.kernels.loading.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(function) = self.kernels.find(key, program, entry) {
            return Ok(function);
        }
        let wrong = |why: String| Error::Gpu { op, device: self.device(), what: why };
        let failed = |f: driver::Failure| wrong(format!("{} of {}: {}", entry, program.name, f.text));
        self.bind(op)?;
        let module = match self.kernels.module(key, program) {
            Some(module) => module,
            None => {
                let image = nvrtc::compile(program.name, &program.text(), Target::of(self)).map_err(wrong)?;
                Module(self.quietly(|| driver::load(&image.code)).map_err(failed)?)
            }
        };
        // SAFETY: the module was loaded, and is never unloaded.
        let function = self.quietly(|| unsafe { driver::function(module.0, entry) }).map_err(failed)?;
        self.kernels.keep(key, program, module, (entry, Function(function)));
        Ok(Function(function))
    }
}

/// Dynamic shared memory that needs no permission, in bytes.
const SHARED_BYTES: u32 = 48 << 10;

impl Kernel {
    /// Runs it on this thread's current stream. The arguments must be those that the kernel takes, in its order.
    ///
    /// # Errors
    /// If the grid is beyond the device's limits, or the device is lost.
    pub fn launch(&self, grid: Grid, mut args: Args<'_>) -> Result<()> {
        let op = args.op();
        if grid.blocks.contains(&0) {
            return Ok(());
        }
        self.gpu.bind(op)?;
        let function = self.function.0;
        if grid.shared_bytes > SHARED_BYTES {
            // SAFETY: the function exists.
            self.gpu.called(op, unsafe { driver::allow_shared(function, grid.shared_bytes) })?;
        }
        let (Grid { blocks, threads, shared_bytes }, stream) = (grid, self.gpu.stream());
        let (start, bytes) = args.packed();
        // SAFETY: function and stream exist; the packed arguments are `bytes` long and copied before it returns; the
        // tensors that they point to are locked until then, and freed in the order of their stream.
        self.gpu.called(op, unsafe {
            driver::launch(function, blocks, threads, shared_bytes, stream, start.cast::<c_void>(), bytes)
        })?;
        self.gpu.count_launch();
        Ok(())
    }
}
