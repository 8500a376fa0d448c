//! Modules: PTX text that is loaded into a context's memory.

use std::fs;
use std::sync::{Arc, RwLock};

use phalanx_emulator_link::Bytes;
use phalanx_emulator_link::pointer::{self, Host, Out, Text};
use phalanx_ptx::{Loaded, Module};

use crate::context::{Context, here};
use crate::function::Function;
use crate::status::{Result, Status, present};
use crate::world::world;

/// The most bytes that a PTX text may have: what has no end is none.
const TEXT_MAX: usize = 1 << 30;

/// A loaded module.
#[derive(Debug)]
pub(crate) struct Library {
    pub context: Arc<Context>,
    /// `None` once it is unloaded.
    pub loaded: RwLock<Option<Arc<Loaded>>>,
}

impl Library {
    /// The module, which is not unloaded while somebody has it.
    pub(crate) fn loaded(&self) -> Result<Arc<Loaded>> {
        let loaded = self.loaded.read().unwrap_or_else(std::sync::PoisonError::into_inner).clone();
        loaded.ok_or_else(|| Status::INVALID_HANDLE.because("the module was unloaded"))
    }
}

fn load(module: Out<usize>, image: &[u8]) -> Result<()> {
    let binary = |what: &str| {
        let why = format!(
            "{what} cannot be run here: load PTX text (with NVRTC, compile for compute_90, not sm_90)"
        );
        Err(Status::NO_BINARY_FOR_GPU.because(why))
    };
    if image.starts_with(b"\x7fELF") {
        return binary("a CUBIN");
    }
    if image.starts_with(&[0x50, 0xed, 0x55, 0xba]) {
        return binary("a fat binary");
    }
    let Ok(text) = std::str::from_utf8(image) else {
        return Err(
            Status::INVALID_IMAGE.because("the image is neither PTX text nor anything else that is known")
        );
    };
    let parsed = Module::parse(text).map_err(|error| Status::INVALID_PTX.because(error.to_string()))?;
    let context = here()?;
    let loaded = Loaded::new(Arc::new(parsed), &context.device().memory);
    let loaded = loaded.map_err(|error| Status::OUT_OF_MEMORY.because(error.to_string()))?;
    let library = Library { context, loaded: RwLock::new(Some(Arc::new(loaded))) };
    set!(module, world()?.modules.add(Arc::new(library)))
}

/// The bytes of an image in memory: a text ends with a zero, and of anything else the beginning is enough to refuse.
fn image(at: Host) -> Result<Vec<u8>> {
    if at.is_null() {
        return Err(Status::INVALID_VALUE.because("the image is null"));
    }
    let is_binary = |magic: &[u8]| Bytes::at(at.address(), 1).read(|b| b[0] == magic[0]);
    if is_binary(b"\x7fELF") || is_binary(&[0x50]) {
        return Ok(Bytes::at(at.address(), 4).to_vec());
    }
    let text = pointer::text_at(at, TEXT_MAX);
    text.ok_or_else(|| Status::INVALID_IMAGE.because("the text has no end"))
}

fn unload(module: usize) -> Result<()> {
    let library = world()?.modules.remove(module)?;
    crate::stream::synchronize_all(library.context.world(), library.context.id);
    let loaded = library.loaded.write().unwrap_or_else(std::sync::PoisonError::into_inner).take();
    if let Some(loaded) = loaded.and_then(Arc::into_inner) {
        loaded.unload(&library.context.device().memory);
    }
    Ok(())
}

export! {
    fn cuModuleLoadData(module: Out<usize>, at: Host) { load(module, &image(at)?) }
    fn cuModuleLoadDataEx(module: Out<usize>, at: Host, count: u32, options: Host, values: Host) {
        load(module, &image(at)?)
    }
    fn cuModuleLoadFatBinary(module: Out<usize>, at: Host) { load(module, &[0x50, 0xed, 0x55, 0xba]) }
    fn cuModuleLoad(module: Out<usize>, file: Text) {
        let file = present(file.string(), "file")?;
        let image = fs::read(&file).map_err(|error| Status::FILE_NOT_FOUND.because(format!("{file}: {error}")))?;
        load(module, image.strip_suffix(&[0]).unwrap_or(&image))
    }
    fn cuModuleUnload(module: usize) { unload(module) }
    fn cuModuleGetLoadingMode(mode: Out<i32>) { set!(mode, 1) }
    fn cuModuleGetFunction(function: Out<usize>, module: usize, name: Text) {
        let library = world()?.modules.get(module)?;
        let name = present(name.string(), "name")?;
        let found = Function::new(library, module, &name)?;
        set!(function, world()?.functions.add(Arc::new(found)))
    }
    fn cuModuleGetFunctionCount(count: Out<u32>, module: usize) {
        let loaded = world()?.modules.get(module)?.loaded()?;
        set!(count, loaded.module().kernels().count() as u32)
    }
    fn cuModuleGetGlobal_v2(address: Out<u64>, bytes: Out<usize>, module: usize, name: Text) {
        let loaded = world()?.modules.get(module)?.loaded()?;
        let name = present(name.string(), "name")?;
        let found = loaded.variable(&name);
        let (start, size) = found.ok_or_else(|| Status::NOT_FOUND.because(format!("no variable {name:?}")))?;
        if !address.is_null() {
            set!(address, start)?;
        }
        if bytes.is_null() { Ok(()) } else { set!(bytes, size as usize) }
    }
}
