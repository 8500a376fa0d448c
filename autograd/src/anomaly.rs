//! Anomaly mode: finds the operation whose backward made the first NaN.

use std::backtrace::Backtrace;
use std::cell::Cell;

thread_local! {
    static DETECT: Cell<bool> = const { Cell::new(false) };
}

/// Until the guard is dropped, operations of this thread note where they were recorded, and a backward pass that
/// it starts ends with [`crate::Error::Nan`] at the first operation that makes a NaN. Slow; for debugging.
pub fn detect_anomaly() -> AnomalyGuard {
    set(true)
}

/// Ends anomaly mode.
#[must_use = "anomaly mode lasts until the guard is dropped"]
pub struct AnomalyGuard {
    before: bool,
    thread: std::marker::PhantomData<*const ()>,
}

impl Drop for AnomalyGuard {
    fn drop(&mut self) {
        DETECT.set(self.before);
    }
}

/// Whether this thread is in anomaly mode.
pub fn is_detecting_anomaly() -> bool {
    DETECT.get()
}

pub(crate) fn set(on: bool) -> AnomalyGuard {
    AnomalyGuard { before: DETECT.replace(on), thread: std::marker::PhantomData }
}

#[inline]
pub(crate) fn recorded_here() -> Option<Box<str>> {
    #[cold]
    fn here() -> Box<str> {
        users_frames(&Backtrace::force_capture().to_string()).into_boxed_str()
    }
    is_detecting_anomaly().then(here)
}

/// Crates whose frames say nothing of where the user called.
const OTHERS: [&str; 12] = [
    "phalanx",
    "phalanx_tensor",
    "phalanx_kernels",
    "phalanx_autograd",
    "phalanx_nn",
    "phalanx_parallel",
    "std",
    "core",
    "alloc",
    "test",
    "backtrace",
    "rustc_demangle",
];

/// Folders of crates that lie beside this one in the workspace.
const BESIDE: [&str; 5] = ["tensor", "kernels", "autograd", "nn", "parallel"];

/// The frames of a backtrace that are the user's own, the latest call first; all of it if none is.
fn users_frames(trace: &str) -> String {
    // A frame is `  12: name`, and then, where it is known, `at file:line:column`.
    let is_name =
        |line: &str| line.trim_start().split_once(": ").is_some_and(|(n, _)| n.parse::<u32>().is_ok());
    let lines: Vec<&str> = trace.lines().collect();
    let frames = lines.chunk_by(|_, next| !is_name(next)).filter_map(|frame| {
        let (_, name) = frame[0].trim_start().split_once(": ")?;
        let place = frame.get(1).map(|line| line.trim_start());
        let kept = place.map_or(String::new(), |place| format!("\n      {place}"));
        is_users(name, place).then(|| format!("  {name}{kept}"))
    });
    let kept: Vec<String> = frames.collect();
    if kept.is_empty() { trace.into() } else { kept.join("\n") }
}

/// Whether a function is the user's. One that was compiled into another has its bare name, and only its file tells.
fn is_users(name: &str, place: Option<&str>) -> bool {
    let path =
        name.trim_start_matches(['<', '&', '(', '*']).trim_start_matches("mut ").trim_start_matches("dyn ");
    let end = path.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(path.len());
    // What is C has neither.
    let known = name.contains("::") || place.is_some();
    known && !path.starts_with("__rust") && !OTHERS.contains(&&path[..end]) && place.is_none_or(is_users_file)
}

fn is_users_file(place: &str) -> bool {
    let file = place.trim_start_matches("at ");
    let here = std::env::current_dir().unwrap_or_default();
    let file = file.strip_prefix("./").map_or_else(|| file.into(), |file| here.join(file));
    let workspace =
        std::path::Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap_or(std::path::Path::new("/"));
    let ours = BESIDE.iter().any(|name| file.starts_with(workspace.join(name).join("src")));
    // As published, crates lie in folders such as `phalanx-nn-0.1.0`.
    let names = |part: &std::ffi::OsStr| {
        let part = part.to_string_lossy();
        part.strip_prefix("phalanx-")
            .is_some_and(|rest| BESIDE.iter().any(|name| rest.starts_with(&format!("{name}-"))))
    };
    let published = file.iter().any(names);
    !ours && !published && !file.starts_with("/rustc")
}

#[cfg(test)]
mod tests {
    use super::users_frames;

    #[test]
    fn only_the_users_frames_are_kept() {
        let trace = "   0: phalanx_autograd::anomaly::recorded_here::here\n             at /x/anomaly.rs:42:9\n   \
                     1: <phalanx_nn::modules::Linear as phalanx_nn::Module>::forward\n   2: shop::net::forward\n             \
                     at ./app/net.rs:7:5\n   3: core::ops::function::FnOnce::call_once\n   4: <shop::Net as \
                     phalanx_nn::Module>::forward\n   5: main\n   6: __libc_start_main";
        let wanted =
            "  shop::net::forward\n      at ./app/net.rs:7:5\n  <shop::Net as phalanx_nn::Module>::forward";
        assert_eq!(users_frames(trace), wanted);
        assert_eq!(users_frames("   0: main"), "   0: main");
    }

    #[test]
    fn functions_compiled_into_others_are_known_by_their_files() {
        let own = concat!("at ", env!("CARGO_MANIFEST_DIR"), "/src/record.rs:178:5");
        let trace = format!(
            "   0: new_node<shop::Net>\n             {own}\n   1: call_once<shop::net, ()>\n             \
             at /rustc/5980/library/core/src/ops/function.rs:250:5\n   2: forward\n             at ./app/net.rs:7:5\n   3: main"
        );
        assert_eq!(users_frames(&trace), "  forward\n      at ./app/net.rs:7:5");
    }
}
