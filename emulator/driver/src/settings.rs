//! What the environment says about the emulated machine. Read once, at `cuInit`.

use std::env;
use std::sync::OnceLock;

/// How many devices there are; 1 if unset, as on a machine with a single GPU.
pub(crate) const DEVICES: &str = "PHALANX_EMULATED_DEVICES";
/// Bytes of memory of each device; 16 GiB if unset.
pub(crate) const MEMORY: &str = "PHALANX_EMULATED_MEMORY_BYTES";
/// When queued work runs: `eager` (the default), `deferred` or `deferred:SEED`.
pub(crate) const STREAMS: &str = "PHALANX_EMULATOR_STREAMS";
/// What becomes of two unordered operations that touch the same bytes: `error` (the default), `warn` or `off`.
pub(crate) const RACES: &str = "PHALANX_EMULATOR_RACES";

/// When work that is queued on streams runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Schedule {
    /// As soon as what it waits for has run; most of the time before the call that queues it returns.
    Eager,
    /// When something waits for it, in a random order that respects only what CUDA guarantees.
    Deferred { seed: u64 },
}

/// What is done about a missing wait.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Races {
    /// It is reported, and the context is lost as after a kernel's fault.
    Error,
    /// It is reported.
    Warn,
    /// Missing waits are not looked for.
    Off,
}

/// The emulated machine.
#[derive(Debug, Clone)]
pub(crate) struct Settings {
    pub devices: usize,
    pub memory_bytes: u64,
    pub schedule: Schedule,
    pub races: Races,
}

impl Settings {
    /// From the environment. A value that cannot be understood is reported and taken as unset.
    fn from_environment() -> Settings {
        Settings {
            devices: parsed(DEVICES, 1, |text| text.parse().ok().filter(|n| (1..=64).contains(n))),
            memory_bytes: parsed(MEMORY, 16 << 30, |text| text.parse().ok()),
            schedule: parsed(STREAMS, Schedule::Eager, schedule),
            races: parsed(RACES, Races::Error, races),
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

fn races(text: &str) -> Option<Races> {
    match text {
        "error" => Some(Races::Error),
        "warn" => Some(Races::Warn),
        "off" => Some(Races::Off),
        _ => None,
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
