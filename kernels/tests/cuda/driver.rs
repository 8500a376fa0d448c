//! The driver for a test program that needs a GPU: a GPU's own, else the emulator, else none.

use std::process::{Child, Command, ExitCode};

use phalanx_tensor::{Device, cuda};

/// A variable of the environment.
pub type Setting = (&'static str, &'static str);

/// Set in the run that is to use the emulator.
pub const EMULATOR: Setting = ("PHALANX_CUDA", "emulator");

/// Runs `run` with the filter given on the command line, under a GPU's driver where there is one, else as a process of its
/// own under the emulator. `name` is the program's, `tests` how many it has: they are reported as skipped, with the
/// reason, where there is neither driver nor compiler. The tests run with `settings`, such as the number of logical devices
/// that they need: where the environment lacks one, the program starts itself again with them.
pub fn serve(name: &str, tests: usize, settings: &[Setting], run: impl Fn(Option<&str>) -> bool) -> ExitCode {
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
    let again =
        |settings| again(&args, settings).unwrap_or_else(|e| skip(&format!("cannot start again: {e}")));
    let lacking: Vec<Setting> =
        settings.iter().copied().filter(|(name, _)| std::env::var_os(name).is_none()).collect();
    if !lacking.is_empty() {
        return again(&lacking);
    }
    let gpu = match Device::Cuda(0).gpu() {
        Ok(gpu) => gpu,
        // By the variable itself: without the feature `cuda` nothing is emulated, and this would start itself without end.
        Err(error) if std::env::var_os(EMULATOR.0).is_some_and(|v| v == EMULATOR.1) => {
            return skip(&error.to_string());
        }
        Err(_) => return again(&[EMULATOR]),
    };
    if let Err(why) = cuda::require(cuda::Library::Nvrtc) {
        return skip(&why);
    }
    println!("{name}: {gpu:?} by {}", cuda::driver_name().unwrap_or("?"));
    let filter = args.iter().find(|a| !a.starts_with('-') && *a != name);
    let passed = run(filter.map(String::as_str));
    // The reason was printed.
    if passed && gpu.refused_free().is_none() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// This very program, with further settings.
pub fn again(args: &[String], settings: &[Setting]) -> std::io::Result<ExitCode> {
    let status = beside(args, settings)?.wait()?;
    Ok(if status.success() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// The same, while this process goes on.
pub fn beside(args: &[String], settings: &[Setting]) -> std::io::Result<Child> {
    Command::new(std::env::current_exe()?).args(args).envs(settings.iter().copied()).spawn()
}
