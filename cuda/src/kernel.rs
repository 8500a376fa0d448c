//! [`Kernel`]: a compiled function of a [`Program`], loaded into a device at its first use. [`Grid`] and [`Arguments`]: how many threads
//! run it, and what it is given.
#![allow(unsafe_code)]

use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::{Mutex, OnceLock, PoisonError, RwLock};

use smallvec::SmallVec;

use crate::context::{Context, lock};
use crate::driver::{self, CUfunction, CUmodule};
use crate::dry::{self, Traffic};
use crate::load_gate::LoadGate;
use crate::nvrtc;
use crate::program::{KernelSource, Program, Target};
use crate::tensor_map::TensorMap;
use crate::trace::Work;
use crate::vendor::Failure;
use crate::{Error, Result};

/// The programs that a device has loaded.
#[derive(Default)]
pub(crate) struct Kernels {
    loaded: RwLock<HashMap<u64, Vec<LoadedProgram>>>,
    /// One compilation at a time, so that none is done twice.
    loading: Mutex<()>,
}

struct LoadedProgram {
    files: &'static [(&'static str, &'static str)],
    defines: Vec<(String, String)>,
    module: Module,
    /// Those of its kernels that were asked for.
    functions: Vec<Function>,
}

#[derive(Clone, Copy)]
struct Module(CUmodule);

#[derive(Clone, Copy)]
struct Function {
    handle: CUfunction,
    source: &'static KernelSource,
    /// Where its parameters begin, in bytes, if that was asked for.
    offsets: &'static OnceLock<Vec<usize>>,
}

// SAFETY: a module's handle may be used from any thread; modules are never unloaded.
unsafe impl Send for Module {}
// SAFETY: as for `Send`.
unsafe impl Sync for Module {}
// SAFETY: a function's handle may be used from any thread; modules are never unloaded.
unsafe impl Send for Function {}
// SAFETY: as for `Send`.
unsafe impl Sync for Function {}

impl LoadedProgram {
    fn is(&self, program: &Program<'_>) -> bool {
        let files = program.files.len() == self.files.len()
            && program.files.iter().zip(self.files).all(|(a, b)| std::ptr::eq(a.1, b.1));
        let defines = program.defines.len() == self.defines.len()
            && program.defines.iter().zip(&self.defines).all(|(a, b)| a.0 == b.0 && a.1 == b.1);
        files && defines
    }
}

impl Kernels {
    /// A program's kernel `entry` on a device, compiled and loaded if it is not yet.
    pub(crate) fn get(
        &self,
        context: &'static Context,
        gate: &LoadGate,
        op: &'static str,
        program: &Program<'_>,
        entry: &str,
    ) -> Result<Kernel> {
        let key = program.key();
        let function = match self.find(key, program, entry) {
            Some(function) => function,
            None => self.load(context, gate, op, (key, program), entry)?,
        };
        Ok(Kernel { context, function })
    }

    fn find(&self, key: u64, program: &Program<'_>, entry: &str) -> Option<Function> {
        let loaded = self.loaded.read().unwrap_or_else(PoisonError::into_inner);
        let known = loaded.get(&key)?.iter().find(|known| known.is(program))?;
        known.functions.iter().find(|function| function.source.entry == entry).copied()
    }

    /// The module of a program of which another kernel was asked for.
    fn module(&self, key: u64, program: &Program<'_>) -> Option<Module> {
        let loaded = self.loaded.read().unwrap_or_else(PoisonError::into_inner);
        loaded.get(&key)?.iter().find(|known| known.is(program)).map(|known| known.module)
    }

    fn keep(&self, key: u64, program: &Program<'_>, module: Module, function: Function) {
        let mut loaded = self.loaded.write().unwrap_or_else(PoisonError::into_inner);
        let all = loaded.entry(key).or_default();
        match all.iter_mut().find(|known| known.is(program)) {
            Some(known) => known.functions.push(function),
            None => {
                let defines = function.source.defines.clone();
                all.push(LoadedProgram { files: program.files, defines, module, functions: vec![function] });
            }
        }
    }

    #[cold]
    fn load(
        &self,
        context: &Context,
        gate: &LoadGate,
        op: &'static str,
        (key, program): (u64, &Program<'_>),
        entry: &str,
    ) -> Result<Function> {
        let _one = lock(&self.loading);
        if let Some(function) = self.find(key, program, entry) {
            return Ok(function);
        }
        let wrong = |what: String| Error::Failed { op, index: context.index(), what };
        let failed = |f: Failure| wrong(format!("{} of {}: {}", entry, program.name, f.text));
        context.bind(op)?;
        let module = match self.module(key, program) {
            Some(module) => module,
            None => {
                let target = Target::of(context.capability());
                let image = nvrtc::compile(program.name, &program.text(), target).map_err(wrong)?;
                Module(gate.load(|| driver::load(&image.code)).map_err(failed)?)
            }
        };
        // SAFETY: the module was loaded, and is never unloaded.
        let handle = gate.load(|| unsafe { driver::function(module.0, entry) }).map_err(failed)?;
        // Never freed, as the module is never unloaded.
        let (source, offsets) = Box::leak(Box::new((program.kernel(entry), OnceLock::new())));
        let function = Function { handle, source, offsets };
        self.keep(key, program, module, function);
        Ok(function)
    }
}

/// A compiled kernel on a device.
#[derive(Clone, Copy)]
pub struct Kernel {
    context: &'static Context,
    function: Function,
}

/// Dynamic shared memory that needs no permission, in bytes.
const SHARED_BYTES: u32 = 48 << 10;

impl Kernel {
    /// Runs it on this thread's current stream.
    ///
    /// # Errors
    /// If the grid is beyond the device's limits, or the device is lost.
    ///
    /// # Safety
    /// The arguments are those that the kernel takes, in its order. The memory that they point to is the kernel's to use, and lives
    /// until the stream has come so far.
    pub unsafe fn launch(&self, op: &'static str, grid: Grid, arguments: &mut Arguments) -> Result<()> {
        if grid.blocks.contains(&0) {
            return Ok(());
        }
        let Kernel { context, function: Function { handle, source, offsets } } = *self;
        context.bind(op)?;
        if !arguments.maps.is_empty() {
            let offsets = match offsets.get() {
                Some(known) => known,
                None => {
                    // SAFETY: the function exists.
                    let known = context.called(op, unsafe { driver::parameter_offsets(handle) })?;
                    offsets.get_or_init(|| known)
                }
            };
            arguments.place_maps(offsets).ok_or_else(|| Error::Failed {
                op,
                index: context.index(),
                what: format!("{} has parameters at {offsets:?}, none for its maps", source.entry),
            })?;
        }
        if dry::is_dry() {
            dry::note(op, arguments.traffic);
        }
        if grid.shared_bytes > SHARED_BYTES {
            // SAFETY: the function exists.
            context.called(op, unsafe { driver::allow_shared(handle, grid.shared_bytes) })?;
        }
        let (Grid { blocks, threads, shared_bytes }, stream) = (grid, context.stream());
        let (start, bytes) = (arguments.packed.as_mut_ptr(), arguments.bytes);
        // SAFETY: function and stream exist; the packed arguments are `bytes` long and copied before it returns; the rest is by the
        // caller.
        let queue = || unsafe {
            driver::launch(handle, blocks, threads, shared_bytes, stream, start.cast::<c_void>(), bytes)
        };
        let work = Work::Kernel { source, blocks, threads, shared_bytes };
        context.traced(op, work, || context.called(op, queue()))?;
        context.count_launch();
        Ok(())
    }
}

/// A kernel's arguments.
#[derive(Debug, Default)]
pub struct Arguments {
    /// Laid out as the kernel's parameters are: each aligned as its own type is.
    packed: SmallVec<[u64; 24]>,
    bytes: usize,
    /// The last parameters. Compilers align them within the device's own memory of parameters, which begins at an odd place, so that the
    /// driver alone knows how far from the others they lie.
    maps: SmallVec<[TensorMap; 4]>,
    /// What the kernel moves and computes with them.
    pub traffic: Traffic,
}

impl Arguments {
    /// Appends a number, or a structure laid out as in C. Maps come after all of them.
    pub fn push<T: bytemuck::Pod>(&mut self, value: T) {
        let start = self.bytes.next_multiple_of(align_of::<T>());
        self.bytes = start + size_of::<T>();
        self.packed.resize(self.bytes.div_ceil(8), 0);
        bytemuck::cast_slice_mut::<u64, u8>(&mut self.packed)[start..self.bytes]
            .copy_from_slice(bytemuck::bytes_of(&value));
    }

    /// Appends a map.
    pub fn push_map(&mut self, map: TensorMap) {
        self.maps.push(map);
    }

    /// Puts the maps where the last of the kernel's parameters begin. None if there are fewer, or others lie there.
    fn place_maps(&mut self, offsets: &[usize]) -> Option<()> {
        let places = &offsets[offsets.len().checked_sub(self.maps.len())?..];
        for (map, &place) in self.maps.drain(..).zip(places) {
            if place < self.bytes || !place.is_multiple_of(size_of::<u64>()) {
                return None;
            }
            self.packed.resize(place / size_of::<u64>(), 0);
            self.packed.extend_from_slice(&map.0);
            self.bytes = place + size_of_val(&map.0);
        }
        Some(())
    }

    /// Takes away the last argument, a pointer.
    pub fn pop_pointer(&mut self) -> u64 {
        self.bytes = self.bytes.saturating_sub(size_of::<u64>());
        self.packed.pop().unwrap_or(0)
    }

    /// Moves the last argument, a pointer, by so many bytes.
    pub fn advance_last(&mut self, bytes: usize) {
        if let Some(address) = self.packed.last_mut() {
            *address += bytes as u64;
        }
    }
}

/// How a kernel is spread over the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grid {
    /// Blocks along x, y and z. With a 0 nothing is launched.
    pub blocks: [u32; 3],
    /// Threads of a block along x, y and z.
    pub threads: [u32; 3],
    /// Dynamic shared memory of a block, in bytes.
    pub shared_bytes: u32,
}

impl Grid {
    /// `blocks` blocks of `threads` threads.
    pub fn new(blocks: usize, threads: u32) -> Grid {
        let blocks = u32::try_from(blocks).unwrap_or(u32::MAX).min(i32::MAX as u32);
        Grid { blocks: [blocks, 1, 1], threads: [threads, 1, 1], shared_bytes: 0 }
    }

    /// Blocks of `threads` threads, one thread for each of `items`, but no more blocks than keep the device busy: the
    /// kernel strides by the grid.
    pub fn over(gpu: &Context, items: usize, threads: u32) -> Grid {
        let enough = gpu.processors() as usize * (2048 / threads as usize).max(1) * 2;
        Grid::new(items.div_ceil(threads as usize).min(enough), threads)
    }

    /// The same with other block counts along y and z.
    pub fn by(mut self, y: usize, z: usize) -> Grid {
        let clamp = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        (self.blocks[1], self.blocks[2]) = (clamp(y), clamp(z));
        self
    }

    /// The same with as much dynamic shared memory.
    pub fn shared(mut self, bytes: usize) -> Grid {
        self.shared_bytes = u32::try_from(bytes).unwrap_or(u32::MAX);
        self
    }
}
