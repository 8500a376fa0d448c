//! What every exported function goes through: whether a call is allowed now, and the status that it returns.

use std::cell::Cell;

use phalanx_emulator_link::status;

use crate::context::current;
use crate::device::devices;
use crate::status::{Result, Status, explain};

/// Exports functions of the driver. A body gives `Result<()>`, which becomes the status. The macro also makes
/// `function`, which finds their addresses by name. Those under `@always` answer in any state; the others need an
/// initialised driver, and a current context that is not lost if there is one.
macro_rules! export {
    ($(@always { $(fn $plain:ident($($parg:ident: $ptype:ty),* $(,)?) $pbody:block)* })?
     $(fn $name:ident($($arg:ident: $type:ty),* $(,)?) $body:block)*) => {
        phalanx_emulator_link::export! {
            answered by crate::api::call::answer_always;
            $($(fn $plain($($parg: $ptype),*) $pbody)*)?
        }
        phalanx_emulator_link::export! {
            answered by crate::api::call::answer;
            $(fn $name($($arg: $type),*) $body)*
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

/// Runs the body of the exported function `name` if calls are allowed now, and gives its status.
pub(crate) fn answer(name: &str, body: impl FnOnce() -> Result<()>) -> i32 {
    answer_always(name, || allowed().and_then(|()| body()))
}

/// As [`answer`], in any state of the driver and the context.
pub(crate) fn answer_always(name: &str, body: impl FnOnce() -> Result<()>) -> i32 {
    status::answer(body, |failure| drop(explain(name, failure)))
}

fn allowed() -> Result<()> {
    if IN_HOST_FUNCTION.get() {
        return Err(Status::NOT_PERMITTED.because("a host function of a stream must not call the driver"));
    }
    devices()?;
    current().map_or(Ok(()), |context| context.check())
}
