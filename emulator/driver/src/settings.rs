//! What the environment says about the emulated machine. Read once, at `cuInit`.

use std::env;
use std::path::PathBuf;
use std::sync::OnceLock;

use phalanx_ptx::{AllowedRace, Checks, Placement};

use crate::order::{self, KernelOrder};

/// `dry`: no kernel, product or copy is executed.
pub(crate) const MODE: &str = "PHALANX_CUDA";
/// How many devices there are; 1 if unset, as on a machine with a single GPU.
pub(crate) const DEVICES: &str = "PHALANX_EMULATED_DEVICES";
/// Bytes of memory of each device; if unset 16 GiB, and 80 GiB where nothing is executed.
pub(crate) const MEMORY: &str = "PHALANX_EMULATED_MEMORY_BYTES";
/// The devices' compute capability: `90` (an H100's, the default) or `80` (an A100's).
pub(crate) const CAPABILITY: &str = "PHALANX_EMULATED_CAPABILITY";
/// When queued work runs: `eager` (the default), `deferred` or `deferred:SEED`.
pub(crate) const STREAMS: &str = "PHALANX_EMULATOR_STREAMS";
/// What becomes of two unordered operations that touch the same bytes: `error` (the default), `warn` or `off`.
pub(crate) const RACES: &str = "PHALANX_EMULATOR_RACES";
/// The order in which threads of kernels run: `fixed` (the default), `SEED` or `exactly:SEED`.
pub(crate) const SCHEDULE: &str = "PHALANX_EMULATOR_SCHEDULE";
/// Races within kernels that are not reported: kernels and lines, see [`AllowedRace`].
pub(crate) const ALLOW_RACES: &str = "PHALANX_EMULATOR_ALLOW_RACES";
/// What a barrier of all threads is that some skip by exiting: fine (`volta`, the default) or a fault (`strict`).
pub(crate) const BARRIERS: &str = "PHALANX_EMULATOR_BARRIERS";

/// Where allocations lie: `ascending` (the default), or `random:SEED`.
pub(crate) const ADDRESSES: &str = "PHALANX_EMULATOR_ADDRESSES";
/// What becomes of a copy to the host of bytes that nothing has written: `error` (the default), `warn` or `off`.
pub(crate) const UNWRITTEN: &str = "PHALANX_EMULATOR_UNWRITTEN";
/// `report`: what is left when a context or the process ends is listed. `off` is the default.
pub(crate) const LEAKS: &str = "PHALANX_EMULATOR_LEAKS";
/// Where the counters of kernels go: `off` (the default), `print`, or a file.
pub(crate) const COUNTERS: &str = "PHALANX_EMULATOR_COUNTERS";
/// The seed of the errors of approximate instructions; they are exact if unset.
pub(crate) const APPROXIMATE: &str = "PHALANX_EMULATOR_APPROXIMATE";
/// The number, from 1, of the allocation that is to fail.
pub(crate) const FAIL_ALLOCATION: &str = "PHALANX_EMULATOR_FAIL_ALLOCATION";
/// What becomes of a free that is refused: `error` (the default), `strict` or `status`.
pub(crate) const FREES: &str = "PHALANX_EMULATOR_FREES";

/// When work that is queued on streams runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Schedule {
    /// As soon as what it waits for has run; most of the time before the call that queues it returns.
    Eager,
    /// When something waits for it, in a random order that respects only what CUDA guarantees.
    Deferred { seed: u64 },
}

/// What is done about a mistake.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Report {
    /// It is reported, and the context is lost as after a kernel's fault.
    Error,
    /// It is reported.
    Warn,
    /// It is not looked for.
    Off,
}

/// What becomes of a free that is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Frees {
    /// It ends the context, but in a capture that was broken before.
    Error,
    /// It ends the context wherever it is.
    Strict,
    /// The call gives its status, as on a GPU.
    Status,
}

/// Where counters of kernels go.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum CountersTo {
    Nowhere,
    /// stderr, with each line of the source.
    Print,
    /// A file, a kernel a line.
    File(PathBuf),
}

/// The emulated machine.
#[derive(Debug, Clone)]
pub(crate) struct Settings {
    pub devices: usize,
    pub memory_bytes: u64,
    /// Without clusters and tensor maps, and with less shared memory.
    pub before_hopper: bool,
    pub schedule: Schedule,
    pub races: Report,
    /// The driver executes nothing: memory has no contents, and every operation on a stream is logged.
    pub dry: bool,
    pub addresses: Placement,
    pub unwritten: Report,
    pub leaks: bool,
    pub counters: CountersTo,
    pub approximate: Option<u64>,
    pub fail_allocation: u64,
    pub frees: Frees,
    pub kernels: KernelOrder,
    pub allowed_races: Vec<AllowedRace>,
    pub strict_barriers: bool,
}

impl Settings {
    /// From the environment. A value that cannot be understood is reported and taken as unset.
    fn from_environment() -> Settings {
        let dry = env::var(MODE).is_ok_and(|mode| mode == "dry");
        Settings {
            devices: parsed(DEVICES, 1, |text| text.parse().ok().filter(|n| (1..=64).contains(n))),
            memory_bytes: parsed(MEMORY, if dry { 80 << 30 } else { 16 << 30 }, |text| text.parse().ok()),
            before_hopper: parsed(CAPABILITY, false, |text| one_of(text, [("90", false), ("80", true)])),
            schedule: parsed(STREAMS, Schedule::Eager, schedule),
            races: parsed(RACES, Report::Error, report),
            dry,
            addresses: parsed(ADDRESSES, Placement::Ascending, addresses),
            unwritten: parsed(UNWRITTEN, Report::Error, report),
            leaks: parsed(LEAKS, false, |text| one_of(text, [("off", false), ("report", true)])),
            counters: parsed(COUNTERS, CountersTo::Nowhere, |text| Some(counters(text))),
            approximate: parsed(APPROXIMATE, None, |text| text.parse().ok().map(Some)),
            fail_allocation: parsed(FAIL_ALLOCATION, 0, |text| text.parse().ok()),
            frees: parsed(FREES, Frees::Error, frees),
            kernels: parsed(SCHEDULE, KernelOrder::Fixed, KernelOrder::parse),
            allowed_races: parsed(ALLOW_RACES, Vec::new(), |text| AllowedRace::list(text).ok()),
            strict_barriers: parsed(BARRIERS, false, |text| {
                one_of(text, [("volta", false), ("strict", true)])
            }),
        }
    }

    /// The checks and options of a launch.
    pub(crate) fn checks(&self) -> Checks {
        let counters = self.counters != CountersTo::Nowhere;
        Checks {
            counters,
            approximate: self.approximate,
            schedule: order::next(),
            allowed: self.allowed_races.clone(),
            strict_barriers: self.strict_barriers,
            ..Checks::default()
        }
    }
}

/// The settings of this process: the environment is read at the first call.
pub(crate) fn settings() -> &'static Settings {
    static SETTINGS: OnceLock<Settings> = OnceLock::new();
    SETTINGS.get_or_init(Settings::from_environment)
}

fn parsed<T>(name: &str, default: T, parse: impl Fn(&str) -> Option<T>) -> T {
    let Ok(text) = env::var(name) else { return default };
    parse(text.trim()).unwrap_or_else(|| {
        eprintln!("phalanx emulated driver: {name}={text} is not understood, so it is left out of account");
        default
    })
}

fn schedule(text: &str) -> Option<Schedule> {
    match text.split_once(':') {
        None if text == "eager" => Some(Schedule::Eager),
        None if text == "deferred" => Some(Schedule::Deferred { seed: 0 }),
        Some(("deferred", seed)) => Some(Schedule::Deferred { seed: seed.parse().ok()? }),
        _ => None,
    }
}

fn one_of<T, const N: usize>(text: &str, known: [(&str, T); N]) -> Option<T> {
    known.into_iter().find(|(name, _)| *name == text).map(|(_, value)| value)
}

fn report(text: &str) -> Option<Report> {
    one_of(text, [("error", Report::Error), ("warn", Report::Warn), ("off", Report::Off)])
}

fn frees(text: &str) -> Option<Frees> {
    one_of(text, [("error", Frees::Error), ("strict", Frees::Strict), ("status", Frees::Status)])
}

fn addresses(text: &str) -> Option<Placement> {
    match text.split_once(':') {
        None if text == "ascending" => Some(Placement::Ascending),
        Some(("random", seed)) => Some(Placement::Random { seed: seed.parse().ok()? }),
        _ => None,
    }
}

fn counters(text: &str) -> CountersTo {
    match text {
        "off" | "" => CountersTo::Nowhere,
        "print" => CountersTo::Print,
        file => CountersTo::File(file.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_emulated_machine_has_one_device_unless_more_are_asked_for() {
        // Nothing in this crate's unit tests sets the variable; where the caller has, its number counts.
        let named = env::var(DEVICES).ok().and_then(|text| text.parse().ok());
        assert_eq!(Settings::from_environment().devices, named.unwrap_or(1));
    }

    #[test]
    fn modes_are_read_with_and_without_a_seed() {
        assert_eq!(schedule("eager"), Some(Schedule::Eager));
        assert_eq!(schedule("deferred"), Some(Schedule::Deferred { seed: 0 }));
        assert_eq!(schedule("deferred:17"), Some(Schedule::Deferred { seed: 17 }));
        assert_eq!(schedule("deferred:x"), None);
        assert_eq!(schedule("lazy"), None);
    }
}
