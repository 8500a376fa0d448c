//! [`Trial`]: a layout, and the faults that happen to a run under it.

use std::fmt;
use std::time::Duration;

use nix::sys::signal::Signal;

use crate::rank::{SAVE_EVERY, STEPS, TIMEOUT};
use crate::strangers::Stranger;

/// How a model is spread over processes.
pub struct Layout {
    pub flags: &'static str,
    pub ranks: usize,
}

const fn layout(flags: &'static str, ranks: usize) -> Layout {
    Layout { flags, ranks }
}

pub const LAYOUTS: [Layout; 9] = [
    layout("--dp 2", 2),
    layout("--tp 2", 2),
    layout("--pp 2 --micro-batches 4", 2),
    layout("--dp 2 --tp 2", 4),
    layout("--dp 2 --pp 2 --micro-batches 2", 4),
    layout("--dp 4 --zero 2", 4),
    layout("--dp 4 --zero 3", 4),
    layout("--pp 2 --schedule zb-v --micro-batches 4", 2),
    layout("--dp 2 --tp 2 --pp 2 --micro-batches 2", 8),
];

/// After a step has been recorded, or since the processes were started; and some time later.
#[derive(Clone, Copy, Debug)]
pub struct Moment {
    pub steps: Option<u64>,
    pub then: Duration,
}

/// What happens.
#[derive(Clone, Copy, Debug)]
pub enum Fault {
    Kill(usize),
    /// For good, or for less than the timeout.
    Stop(usize, Option<Duration>),
    /// The rank stands still for most of the time.
    Slow(usize),
    /// SIGTERM or SIGINT, to one rank or to all.
    Interrupt(Signal, Option<usize>),
    /// The connection of two ranks is shut down.
    Cut([usize; 2]),
    /// The connection swallows what comes to the first of two ranks, or to both.
    HalfOpen([usize; 2], bool),
    /// The disk with the run's folder has no room any more.
    FullDisk,
    /// The run's folder is on a disk that cannot be written to.
    ReadOnlyDisk,
    /// Files may have so many KiB.
    FileLimit(u64),
    /// A rank is given another flag or variable.
    Unlike(usize, Unlike),
    Stranger(Stranger),
}

/// What one rank is given and others are not.
#[derive(Clone, Copy, Debug)]
pub struct Unlike {
    pub flags: &'static str,
    pub variable: Option<(&'static str, &'static str)>,
    /// What the message has to name: one of these.
    pub named: &'static [&'static str],
}

const fn flag(flags: &'static str, named: &'static [&'static str]) -> Unlike {
    Unlike { flags, variable: None, named }
}

const UNLIKE: [Unlike; 9] = [
    flag("--lr 0.5", &["`lr`"]),
    flag("--seed 7", &["`seed`"]),
    flag("--batch 16", &["`batch`"]),
    flag("--dp 1 --tp 1 --pp 1 --zero 0", &["wants 1 ranks"]),
    flag("--save-every 3", &["`save-every`"]),
    flag("--resume /nowhere", &["/nowhere"]),
    flag("--no-such-flag 1", &["no-such-flag"]),
    Unlike { flags: "", variable: Some(("SHIFT", "1")), named: &["trace", "data"] },
    Unlike { flags: "", variable: Some(("PHALANX_ISA", "scalar")), named: &["instruction set"] },
];

/// Faults, each at its moment.
pub type Faults = Vec<(Fault, Moment)>;

/// Faults under a layout.
pub struct Trial {
    pub number: u64,
    pub layout: usize,
    /// Those of the run as it is begun, and those of the run as it goes on.
    pub rounds: Vec<Faults>,
}

/// Random numbers: SplitMix64.
struct Draws(u64);

impl Draws {
    fn below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut word = self.0;
        word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((word ^ (word >> 31)) % end as u64) as usize
    }

    fn one_of<T: Copy>(&mut self, all: &[T]) -> T {
        all[self.below(all.len())]
    }

    fn ms(&mut self, end: usize) -> Duration {
        Duration::from_millis(self.below(end) as u64)
    }

    fn moment(&mut self) -> Moment {
        let steps = match self.below(8) {
            0 | 1 => return Moment { steps: None, then: self.ms(1000) },
            2 | 3 => SAVE_EVERY * (1 + self.below((STEPS / SAVE_EVERY) as usize) as u64),
            4 => STEPS,
            _ => 1 + self.below(STEPS as usize - 1) as u64,
        };
        Moment { steps: Some(steps), then: self.ms(30) }
    }

    /// Two ranks, in any order.
    fn two(&mut self, ranks: usize) -> [usize; 2] {
        let first = self.below(ranks);
        [first, (first + 1 + self.below(ranks - 1)) % ranks]
    }

    /// One of the first so many kinds; those behind them cannot be combined with others.
    fn fault(&mut self, kinds: usize, ranks: usize) -> (Fault, Moment) {
        let at_start = Moment { steps: None, then: Duration::ZERO };
        let (kind, rank, moment) = (self.below(kinds), self.below(ranks), self.moment());
        let fault = match kind {
            0 => Fault::Kill(rank),
            1 => Fault::Stop(rank, None),
            2 => Fault::Stop(rank, Some(TIMEOUT / 4 + self.ms(TIMEOUT.as_millis() as usize / 4))),
            3 => Fault::Slow(rank),
            4 => Fault::Cut(self.two(ranks)),
            5 => Fault::HalfOpen(self.two(ranks), self.below(2) == 0),
            6 => {
                let early = Moment { steps: None, then: self.ms(500) };
                return (Fault::Stranger(self.one_of(&Stranger::ALL)), early);
            }
            7 => Fault::Interrupt(
                self.one_of(&[Signal::SIGTERM, Signal::SIGINT]),
                self.one_of(&[None, Some(rank)]),
            ),
            8 => match self.below(4) {
                0 => return (Fault::ReadOnlyDisk, at_start),
                1 => return (Fault::FileLimit(16 + 4 * self.below(12) as u64), at_start),
                _ => Fault::FullDisk,
            },
            _ => return (Fault::Unlike(rank, self.one_of(&UNLIKE)), at_start),
        };
        (fault, moment)
    }
}

impl Trial {
    /// The trial of this number, always the same.
    pub fn draw(number: u64) -> Trial {
        let mut draws = Draws(number);
        let layout = draws.below(LAYOUTS.len());
        let ranks = LAYOUTS[layout].ranks;
        let mut faults = vec![draws.fault(10, ranks)];
        if draws.below(4) == 0 {
            faults.push(draws.fault(7, ranks));
        }
        let mut rounds = vec![faults];
        if draws.below(3) == 0 {
            rounds.push(vec![draws.fault(9, ranks)]);
        }
        Trial { number, layout, rounds }
    }

    /// The same for a run under the launcher: one to three ranks are killed or stopped for good, or lose a connection, one after another.
    pub fn draw_launched(number: u64) -> Trial {
        let mut draws = Draws(!number);
        let layout = draws.below(LAYOUTS.len());
        let ranks = LAYOUTS[layout].ranks;
        let mut fault = |_| {
            let mut moment = draws.moment();
            let fault = match draws.below(5) {
                0 => Fault::Cut(draws.two(ranks)),
                1 => Fault::HalfOpen(draws.two(ranks), draws.below(2) == 0),
                2 => Fault::Stop(draws.below(ranks), None),
                _ => Fault::Kill(draws.below(ranks)),
            };
            if matches!(fault, Fault::Stop(..)) {
                // Without a first meeting the run does not begin.
                moment.steps = moment.steps.or(Some(1));
            }
            (fault, moment)
        };
        let count = 1 + number as usize % 3;
        Trial { number, layout, rounds: vec![(0..count).map(&mut fault).collect()] }
    }

    fn faults(&self) -> impl Iterator<Item = &Fault> {
        self.rounds.iter().flatten().map(|(fault, _)| fault)
    }

    /// Whether its disk is one of its own.
    pub fn mounts(&self) -> bool {
        self.faults().any(|fault| matches!(fault, Fault::FullDisk | Fault::ReadOnlyDisk))
    }

    /// Under which it is counted.
    pub fn names(&self) -> Vec<String> {
        let kinds = self.faults().map(|fault| fault.kind().to_string());
        kinds.chain([LAYOUTS[self.layout].flags.to_string()]).collect()
    }
}

impl Fault {
    fn kind(&self) -> &'static str {
        match self {
            Fault::Kill(_) => "kill",
            Fault::Stop(_, None) => "stop",
            Fault::Stop(..) => "stop for a while",
            Fault::Slow(_) => "slow",
            Fault::Interrupt(..) => "interrupt",
            Fault::Cut(_) => "cut",
            Fault::HalfOpen(..) => "half-open",
            Fault::FullDisk => "full disk",
            Fault::ReadOnlyDisk => "read-only disk",
            Fault::FileLimit(_) => "file limit",
            Fault::Unlike(..) => "unlike",
            Fault::Stranger(_) => "stranger",
        }
    }

    /// Whether the run may fail of it; the ranks that an error may then blame, of so many.
    pub fn guilty(&self, ranks: usize) -> Vec<usize> {
        match *self {
            Fault::Kill(rank) | Fault::Stop(rank, None) | Fault::Unlike(rank, _) => vec![rank],
            Fault::Interrupt(_, rank) => rank.map_or_else(|| (0..ranks).collect(), |rank| vec![rank]),
            Fault::Cut(ends) | Fault::HalfOpen(ends, _) => ends.to_vec(),
            Fault::FullDisk | Fault::ReadOnlyDisk | Fault::FileLimit(_) => (0..ranks).collect(),
            Fault::Stop(..) | Fault::Slow(_) | Fault::Stranger(_) => vec![],
        }
    }
}

impl fmt::Display for Moment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ms = self.then.as_millis();
        match self.steps {
            None => write!(f, "{ms} ms after the start"),
            Some(steps) => write!(f, "{ms} ms after step {steps}"),
        }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = self.kind();
        match self {
            Fault::Kill(rank) | Fault::Stop(rank, None) | Fault::Slow(rank) => {
                write!(f, "{kind} rank {rank}")
            }
            Fault::Stop(rank, Some(time)) => write!(f, "stop rank {rank} for {} ms", time.as_millis()),
            Fault::Interrupt(signal, Some(rank)) => write!(f, "{signal} to rank {rank}"),
            Fault::Interrupt(signal, None) => write!(f, "{signal} to all ranks"),
            Fault::Cut([a, b]) | Fault::HalfOpen([a, b], true) => write!(f, "{kind} link of ranks {a}, {b}"),
            Fault::HalfOpen([a, b], false) => write!(f, "{kind} link from rank {b} to rank {a}"),
            Fault::FullDisk | Fault::ReadOnlyDisk => write!(f, "{kind}"),
            Fault::FileLimit(kib) => write!(f, "{kind} of {kib} KiB"),
            Fault::Unlike(rank, Unlike { flags, variable, .. }) => {
                let variable = variable.map(|(name, value)| format!("{name}={value}")).unwrap_or_default();
                write!(f, "rank {rank} with {flags}{variable}")
            }
            Fault::Stranger(stranger) => write!(f, "{kind} {stranger:?}"),
        }
    }
}

impl fmt::Display for Trial {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.number, LAYOUTS[self.layout].flags)?;
        for (number, faults) in self.rounds.iter().enumerate() {
            f.write_str(if number == 0 { "" } else { "; then, resumed" })?;
            faults.iter().try_for_each(|(fault, moment)| write!(f, "; {fault} {moment}"))?;
        }
        Ok(())
    }
}
