//! The emulated machine: everything that `cuInit` brings into being.

use std::ffi::c_char;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use phalanx_emulator_link::pointer::{Out, Text};

use crate::context::Context;
use crate::device::Device;
use crate::event::Event;
use crate::executor::Executor;
use crate::function::Function;
use crate::graph::{Executable, Graph, Node};
use crate::handle::Handles;
use crate::host::HostMemory;
use crate::lanes::Lanes;
use crate::module::Library;
use crate::pool::Pool;
use crate::report;
use crate::settings::Settings;
use crate::status::{Result, Status, present};

/// What the driver says it is: 13.0.
const VERSION: i32 = 13_000;

/// The machine.
pub(crate) struct World {
    pub devices: Vec<Device>,
    pub executor: Executor,
    lanes: Mutex<Lanes>,
    pub contexts: Handles<Context>,
    pub events: Handles<Event>,
    pub modules: Handles<Library>,
    pub functions: Handles<Function>,
    pub graphs: Handles<Graph>,
    pub nodes: Handles<Node>,
    pub executables: Handles<Executable>,
    pub pools: Handles<Pool>,
    pub host: HostMemory,
}

impl std::fmt::Debug for World {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // Contexts know the world, so it must not show them.
        f.debug_struct("World").field("devices", &self.devices.len()).finish_non_exhaustive()
    }
}

static WORLD: OnceLock<World> = OnceLock::new();

impl World {
    fn new(settings: &Settings) -> World {
        World {
            devices: (0..settings.devices).map(|i| Device::new(i, settings.memory_bytes)).collect(),
            executor: Executor::new(settings.streams, settings.races, allocation_start),
            lanes: Mutex::default(),
            contexts: Handles::new("context", 1),
            events: Handles::new("event", 3),
            modules: Handles::new("module", 4),
            functions: Handles::new("function", 5),
            graphs: Handles::new("graph", 6),
            nodes: Handles::new("graph node", 7),
            executables: Handles::new("executable graph", 8),
            pools: Handles::new("memory pool", 9),
            host: HostMemory::default(),
        }
    }

    /// The streams.
    pub(crate) fn lanes(&self) -> MutexGuard<'_, Lanes> {
        self.lanes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The device that an address belongs to.
    pub(crate) fn device_of(&self, address: u64) -> Option<&Device> {
        self.devices.iter().find(|device| device.owns(address))
    }
}

fn allocation_start(address: u64) -> Option<u64> {
    let device = WORLD.get()?.device_of(address)?;
    device.memory.allocation(address).map(|(start, _)| start)
}

/// The machine.
///
/// # Errors
/// `cuInit` was not called.
pub(crate) fn world() -> Result<&'static World> {
    WORLD.get().ok_or_else(|| Status::NOT_INITIALIZED.because("cuInit was not called"))
}

export! {
    @always {
        fn cuInit(flags: u32) {
            if flags != 0 {
                return Err(Status::INVALID_VALUE.because(format!("flags are {flags}, but there are none")));
            }
            WORLD.get_or_init(|| World::new(&Settings::from_environment()));
            Ok(())
        }
        fn cuDriverGetVersion(version: Out<i32>) { set!(version, VERSION) }
        fn cuGetErrorName(code: i32, name: Out<*const c_char>) {
            set!(name, report::name(code).unwrap_or(std::ptr::null()))?;
            report::name(code).map(|_| ()).ok_or(Status::INVALID_VALUE.into())
        }
        fn cuGetErrorString(code: i32, text: Out<*const c_char>) {
            set!(text, report::text(code).unwrap_or(std::ptr::null()))?;
            report::text(code).map(|_| ()).ok_or(Status::INVALID_VALUE.into())
        }
        fn cuGetProcAddress_v2(symbol: Text, address: Out<usize>, version: i32, flags: u64, found: Out<i32>) {
            let name = present(symbol.string(), "symbol")?;
            let function = crate::functions::find(&name);
            // 0: found, 1: there is no such function.
            if !found.is_null() {
                set!(found, i32::from(function.is_none()))?;
            }
            set!(address, function.unwrap_or(0))?;
            function.map(|_| ()).ok_or_else(|| Status::NOT_FOUND.because(format!("{name} is not emulated")))
        }
        fn cuProfilerStart() { Ok(()) }
        fn cuProfilerStop() { Ok(()) }
    }
}
