//! A rank's process ends with its launcher, however that ends.
#![allow(unsafe_code)]

use std::process::Command;

/// The system kills the process that this starts as soon as the calling thread, which is to be the launcher's first one, has ended.
/// Processes that the rank has started itself are not killed.
#[cfg(target_os = "linux")]
pub(crate) fn to_this_process(command: &mut Command) {
    use std::os::unix::process::CommandExt;

    use nix::sys::prctl::set_pdeathsig;
    use nix::sys::signal::Signal;
    use nix::unistd::{Pid, getppid};

    let launcher = Pid::this();
    let tie = move || {
        set_pdeathsig(Signal::SIGKILL)?;
        // A launcher that has ended before sends no signal any more.
        if getppid() == launcher { Ok(()) } else { Err(std::io::ErrorKind::NotConnected.into()) }
    };
    // SAFETY: between fork and exec the closure makes two system calls and nothing else: it takes no lock and allocates nothing.
    unsafe { command.pre_exec(tie) };
}

/// Only Linux offers it.
#[cfg(not(target_os = "linux"))]
pub(crate) fn to_this_process(_: &mut Command) {}
