//! The driver's C interface: each file exports the functions of its nouns, which are safe code over the pointer types
//! of `phalanx-emulator-link`. It knows all other modules; none of them knows it.

use std::ffi::c_char;

use phalanx_emulator_link::pointer::{Out, Text};

use crate::status::{self, Status, present};

#[macro_use]
pub(crate) mod call;

mod context;
mod launch;
mod libraries;
mod memory;
mod stream;

/// The version that the driver reports: 13.0.
const VERSION: i32 = 13_000;

/// The newest version of a function: programs ask for names without a version.
pub(crate) fn find(name: &str) -> Option<usize> {
    let versions = ["_v4", "_v3", "_v2", ""];
    versions.iter().find_map(|version| exported(&format!("{name}{version}")))
}

fn exported(name: &str) -> Option<usize> {
    let files = [function, context::function, memory::function, stream::function, launch::function];
    files.iter().find_map(|function| function(name))
}

export! {
    @always {
        fn cuInit(flags: u32) {
            if flags != 0 {
                return Err(Status::INVALID_VALUE.because(format!("flags are {flags}, but there are none")));
            }
            crate::device::initialize();
            Ok(())
        }
        fn cuDriverGetVersion(version: Out<i32>) { set!(version, VERSION) }
        fn cuGetErrorName(code: i32, name: Out<*const c_char>) {
            set!(name, status::name(code).unwrap_or(std::ptr::null()))?;
            status::name(code).map(|_| ()).ok_or(Status::INVALID_VALUE.into())
        }
        fn cuGetErrorString(code: i32, text: Out<*const c_char>) {
            set!(text, status::text(code).unwrap_or(std::ptr::null()))?;
            status::text(code).map(|_| ()).ok_or(Status::INVALID_VALUE.into())
        }
        fn cuGetProcAddress_v2(symbol: Text, address: Out<usize>, version: i32, flags: u64, found: Out<i32>) {
            let name = present(symbol.string(), "symbol")?;
            let function = find(&name);
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
