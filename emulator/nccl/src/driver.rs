//! What the library asks of the driver besides memory: in which context a communicator works, and that its calls on
//! several streams come one after another.
#![allow(unsafe_code)]

use phalanx_emulator_link::driver::Driver;

use crate::status::{Result, Status};

type Get = extern "C" fn(*mut usize) -> i32;
type Retain = extern "C" fn(*mut usize, i32) -> i32;
type Push = extern "C" fn(usize) -> i32;
type Device = extern "C" fn(*mut i32) -> i32;
type Create = extern "C" fn(*mut usize, u32) -> i32;
type Record = extern "C" fn(usize, usize) -> i32;
type Wait = extern "C" fn(usize, usize, u32) -> i32;
type Capturing = extern "C" fn(usize, *mut i32) -> i32;

/// An event without timing.
const UNTIMED: u32 = 2;

/// The emulated driver.
pub(crate) fn driver() -> Result<&'static Driver> {
    Driver::loaded().map_err(|why| Status::UNHANDLED_CUDA_ERROR.because(why))
}

/// A function of the driver; `F` is its type, as above.
fn function<F: Copy>(name: &str) -> Result<F> {
    // SAFETY: the callers below name functions of the CUDA driver with the types that CUDA documents for them.
    let found = unsafe { driver()?.function(name) };
    found.ok_or_else(|| Status::UNHANDLED_CUDA_ERROR.because(format!("the driver has no {name}")))
}

fn check(status: i32, what: &str) -> Result<()> {
    if status == 0 {
        Ok(())
    } else {
        Err(Status::UNHANDLED_CUDA_ERROR.because(format!("{what} gives {status}")))
    }
}

/// The current context and its device.
pub(crate) fn current() -> Result<(usize, i32)> {
    let (mut context, mut device) = (0, 0);
    check(function::<Get>("cuCtxGetCurrent")?(&mut context), "cuCtxGetCurrent")?;
    check(function::<Device>("cuCtxGetDevice")?(&mut device), "cuCtxGetDevice")?;
    Ok((context, device))
}

/// The primary context of a device.
pub(crate) fn primary(device: i32) -> Result<usize> {
    let mut context = 0;
    check(function::<Retain>("cuDevicePrimaryCtxRetain")?(&mut context, device), "cuDevicePrimaryCtxRetain")?;
    Ok(context)
}

/// Does something in a context.
pub(crate) fn within<R>(context: usize, run: impl FnOnce() -> Result<R>) -> Result<R> {
    check(function::<Push>("cuCtxPushCurrent_v2")?(context), "cuCtxPushCurrent")?;
    let result = run();
    let mut popped = 0;
    check(function::<Get>("cuCtxPopCurrent_v2")?(&mut popped), "cuCtxPopCurrent")?;
    result
}

/// Whether what is queued on a stream becomes part of a graph.
pub(crate) fn is_capturing(stream: usize) -> Result<bool> {
    let mut status = 0;
    check(function::<Capturing>("cuStreamIsCapturing")?(stream, &mut status), "cuStreamIsCapturing")?;
    Ok(status != 0)
}

/// Makes what is queued on `later` from now on come behind what is queued on `earlier` until now. Streams of which
/// one is captured are not ordered: a graph may be launched at any time.
pub(crate) fn order(earlier: usize, later: usize) -> Result<()> {
    // A stream that is gone has nothing more to be waited for.
    let Ok(captured) = is_capturing(earlier) else { return Ok(()) };
    if earlier == later || captured != is_capturing(later)? {
        return Ok(());
    }
    let mut event = 0;
    check(function::<Create>("cuEventCreate")?(&mut event, UNTIMED), "cuEventCreate")?;
    let ordered = check(function::<Record>("cuEventRecord")?(event, earlier), "cuEventRecord")
        .and_then(|()| check(function::<Wait>("cuStreamWaitEvent")?(later, event, 0), "cuStreamWaitEvent"));
    check(function::<Push>("cuEventDestroy_v2")?(event), "cuEventDestroy")?;
    ordered
}
