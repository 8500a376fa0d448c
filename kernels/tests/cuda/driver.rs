//! The driver for a test program that needs a GPU: a GPU's own, else the emulator, else none.

use std::process::{Command, ExitCode};

use phalanx_tensor::{Device, cuda};

/// Set in the run that is to use the emulator.
pub const EMULATOR: (&str, &str) = ("PHALANX_CUDA", "emulator");

/// Runs `run` with the filter given on the command line, under a GPU's driver where there is one, else as a process of its
/// own under the emulator. `name` is the program's, `tests` how many it has: they are reported as skipped, with the
/// reason, where there is neither driver nor compiler.
pub fn serve(name: &str, tests: usize, run: impl Fn(Option<&str>) -> bool) -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    // The protocol of test runners that list a binary's tests before they run them.
    if args.iter().any(|a| a == "--list") {
        if !args.iter().any(|a| a == "--ignored") {
            println!("{name}: test");
        }
        return ExitCode::SUCCESS;
    }
    let skip = |why: &str| {
        println!("{name}: {tests} tests skipped: {why}");
        ExitCode::SUCCESS
    };
    let gpu = match Device::Cuda(0).gpu() {
        Ok(gpu) => gpu,
        // By the variable itself: without the feature `cuda` nothing is emulated, and this would start itself without end.
        Err(error) if std::env::var_os(EMULATOR.0).is_some_and(|v| v == EMULATOR.1) => {
            return skip(&error.to_string());
        }
        Err(_) => return again_emulated(&args).unwrap_or_else(|e| skip(&format!("cannot start again: {e}"))),
    };
    if let Err(why) = cuda::require(cuda::Library::Nvrtc) {
        return skip(&why);
    }
    println!("{name}: {gpu:?} by {}", cuda::driver_name().unwrap_or("?"));
    let filter = args.iter().find(|a| !a.starts_with('-') && *a != name);
    if run(filter.map(String::as_str)) { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// This very program, with the emulator.
fn again_emulated(args: &[String]) -> std::io::Result<ExitCode> {
    let exe = std::env::current_exe()?;
    let status = Command::new(exe).args(args).env(EMULATOR.0, EMULATOR.1).status()?;
    Ok(if status.success() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
