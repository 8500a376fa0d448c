//! Modules, which are PTX text loaded into a context's memory, and their functions: attributes, and what a launch
//! needs.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};

use phalanx_emulator_link::handle::Handles;
use phalanx_emulator_link::lock;
use phalanx_emulator_link::pointer::{self, Bytes, Host};
use phalanx_ptx::{Loaded, Parameter};

use crate::context::{Context, here};
use crate::device::{SHARED_BYTES, SHARED_BYTES_OPTIN};
use crate::ledger::{self, Kind};
use crate::settings::settings;
use crate::status::{Result, Status};
use crate::streams::synchronize_all;

/// The most bytes that a PTX text may have; one without a zero within these is refused.
const TEXT_MAX: usize = 1 << 30;

/// A loaded module.
#[derive(Debug)]
pub(crate) struct Module {
    pub context: Arc<Context>,
    /// `None` once it is unloaded.
    loaded: RwLock<Option<Arc<Loaded>>>,
}

/// All modules.
pub(crate) static MODULES: Handles<Arc<Module>> = Handles::new("module", 4);
/// All functions.
pub(crate) static FUNCTIONS: Handles<Arc<Function>> = Handles::new("function", 5);

impl Module {
    /// The module, which is not unloaded while the caller has it.
    pub(crate) fn loaded(&self) -> Result<Arc<Loaded>> {
        let loaded = self.loaded.read().unwrap_or_else(PoisonError::into_inner).clone();
        loaded.ok_or_else(|| Status::INVALID_HANDLE.because("the module was unloaded"))
    }
}

/// Loads PTX text into the current context and gives the module's handle.
pub(crate) fn load(image: &[u8]) -> Result<usize> {
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
    let parsed =
        phalanx_ptx::Module::parse(text).map_err(|error| Status::INVALID_PTX.because(error.to_string()))?;
    let context = here()?;
    let loaded = Loaded::new(Arc::new(parsed), &context.device().memory);
    let loaded = loaded.map_err(|error| Status::OUT_OF_MEMORY.because(error.to_string()))?;
    let module = Module { context, loaded: RwLock::new(Some(Arc::new(loaded))) };
    let handle = MODULES.add(Arc::new(module));
    ledger::made(Kind::Module, handle, image.len() as u64, "cuModuleLoadData");
    Ok(handle)
}

/// The bytes of an image in memory: a text ends with a zero, and of anything else the beginning is enough to refuse.
pub(crate) fn image(at: Host) -> Result<Vec<u8>> {
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

/// Unloads a module when everything queued in its context has run.
pub(crate) fn unload(handle: usize) -> Result<()> {
    let module = MODULES.remove(handle)?;
    ledger::gone(Kind::Module, handle);
    synchronize_all(module.context.id);
    let loaded = module.loaded.write().unwrap_or_else(PoisonError::into_inner).take();
    if let Some(loaded) = loaded.and_then(Arc::into_inner) {
        loaded.unload(&module.context.device().memory);
    }
    Ok(())
}

/// Where parameters begin in a device's bank of constants, as assemblers of CUDA 12.9 and 13.0 have it: 0x210 for sm_90, 0x160 for sm_80.
fn parameters_start() -> usize {
    if settings().before_hopper { 0x160 } else { 0x210 }
}

/// Where parameters begin, and where the last one ends, counted from the first. A parameter is aligned in the bank, so that one that wants
/// more than the bank's beginning has does not lie as in a structure of C.
fn offsets(parameters: &[Parameter], start: usize) -> (Vec<usize>, usize) {
    let mut end = 0;
    let place = |p: &Parameter| {
        let offset = (start + end).next_multiple_of(p.align.max(1) as usize) - start;
        end = offset + p.bytes as usize;
        offset
    };
    let offsets = parameters.iter().map(place).collect();
    (offsets, end)
}

/// A kernel of a loaded module.
#[derive(Debug)]
pub(crate) struct Function {
    /// The module, and its handle.
    pub module: Arc<Module>,
    pub module_handle: usize,
    pub name: String,
    pub parameters: Vec<Parameter>,
    pub parameter_bytes: usize,
    /// Where its parameters begin on the device, and end.
    pub offsets: Vec<usize>,
    pub offsets_end: usize,
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
    pub(crate) fn new(module: Arc<Module>, module_handle: usize, name: &str) -> Result<Function> {
        let loaded = module.loaded()?;
        let Some(kernel) = loaded.module().kernel(name) else {
            let names: Vec<_> = loaded.module().kernels().map(phalanx_ptx::Kernel::name).collect();
            return Err(Status::NOT_FOUND.because(format!("no kernel {name:?}; there are {names:?}")));
        };
        let threads_max = kernel.block_threads_max();
        let (offsets, offsets_end) = offsets(kernel.parameters(), parameters_start());
        let shared_bytes = kernel.shared_bytes();
        Ok(Function {
            name: name.into(),
            parameters: kernel.parameters().to_vec(),
            parameter_bytes: kernel.parameter_bytes() as usize,
            offsets,
            offsets_end,
            shared_bytes,
            threads_max,
            registers: kernel.device_registers(),
            dynamic_shared_bytes: AtomicU32::new(SHARED_BYTES.saturating_sub(shared_bytes)),
            cluster: Mutex::default(),
            big_clusters: AtomicU32::new(0),
            module,
            module_handle,
        })
    }

    pub(crate) fn loaded(&self) -> Result<Arc<Loaded>> {
        self.module.loaded()
    }

    pub(crate) fn dynamic_shared_bytes(&self) -> u32 {
        self.dynamic_shared_bytes.load(Ordering::Relaxed)
    }

    /// The cluster that the function must be launched with; zeros for any.
    pub(crate) fn cluster(&self) -> [u32; 3] {
        *lock(&self.cluster)
    }

    /// Whether clusters of more blocks than every device has are allowed.
    pub(crate) fn has_big_clusters(&self) -> bool {
        self.big_clusters.load(Ordering::Relaxed) != 0
    }

    /// An attribute's value, by its number in `CUfunction_attribute`.
    pub(crate) fn get(&self, attribute: i32) -> Option<i32> {
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

    /// Sets an attribute.
    pub(crate) fn set(&self, attribute: i32, value: i32) -> Result<()> {
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
            11..=13 => lock(&self.cluster)[attribute as usize - 11] = amount,
            14 => self.big_clusters.store(amount, Ordering::Relaxed),
            _ => return wrong(format!("attribute {attribute} cannot be set")),
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of a pointer, a number, 128 bytes of this alignment and a number, as `ptxas` 12.9 lays them out.
    #[test]
    fn parameters_lie_as_an_assembler_has_them() {
        let kernel = |align| {
            [(8, 8), (4, 4), (128, align), (4, 4)].map(|(bytes, align)| Parameter { offset: 0, bytes, align })
        };
        for (start, align, places, end) in [
            (0x160, 16, [0, 8, 16, 144], 148),
            (0x160, 64, [0, 8, 32, 160], 164),
            (0x210, 32, [0, 8, 16, 144], 148),
            (0x210, 64, [0, 8, 48, 176], 180),
            (0x210, 128, [0, 8, 112, 240], 244),
        ] {
            assert_eq!(offsets(&kernel(align), start), (places.to_vec(), end), "{start:#x}, {align}");
        }
    }
}
