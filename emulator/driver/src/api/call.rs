//! What every call into the driver goes through: is it allowed now, and how its end is told.

use std::cell::Cell;

use crate::context::current;
use crate::device::devices;
use crate::status::{Result, Status, caught, explain};

/// Exports functions of the driver. A body gives `Result<()>`, which becomes the status. The macro also makes
/// `function`, which finds their addresses by name. Those under `@always` answer in any state; the others need an
/// initialised driver, and a current context that is not lost if there is one.
macro_rules! export {
    ($(@always { $(fn $plain:ident($($parg:ident: $ptype:ty),* $(,)?) $pbody:block)* })?
     $(fn $name:ident($($arg:ident: $type:ty),* $(,)?) $body:block)*) => {
        phalanx_emulator_link::export! {
            $($(fn $plain($($parg: $ptype),*) -> i32 {
                crate::api::call::answer(stringify!($plain), false, || $pbody)
            })*)?
            $(fn $name($($arg: $type),*) -> i32 { crate::api::call::answer(stringify!($name), true, || $body) })*
        }

        /// The address of the function of this name.
        pub(crate) fn function(name: &str) -> Option<usize> {
            match name {
                $($(stringify!($plain) => Some($plain as *const () as usize),)*)?
                $(stringify!($name) => Some($name as *const () as usize),)*
                _ => None,
            }
        }
    };
}

/// Writes a result to where the caller wants it.
macro_rules! set {
    ($out:ident, $value:expr) => {
        crate::status::present($out.set($value), stringify!($out))
    };
}

thread_local! {
    static IN_HOST_FUNCTION: Cell<bool> = const { Cell::new(false) };
}

/// Runs a host function of a stream, which must not call the driver.
pub(crate) fn as_host_function(run: impl FnOnce()) {
    let outer = IN_HOST_FUNCTION.replace(true);
    run();
    IN_HOST_FUNCTION.set(outer);
}

/// Calls `body` if calls are allowed, and gives the status of its result.
pub(crate) fn answer(name: &str, checked: bool, body: impl FnOnce() -> Result<()>) -> i32 {
    let allowed = if checked { allowed() } else { Ok(()) };
    match allowed.and_then(|()| caught(body)) {
        Ok(()) => 0,
        Err(failure) => {
            explain(name, &failure);
            failure.status.0
        }
    }
}

fn allowed() -> Result<()> {
    if IN_HOST_FUNCTION.get() {
        return Err(Status::NOT_PERMITTED.because("a host function of a stream must not call the driver"));
    }
    devices()?;
    match current().and_then(|context| context.lost()) {
        // It was explained when it happened.
        Some(status) => Err(status.into()),
        None => Ok(()),
    }
}
