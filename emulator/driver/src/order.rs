//! In which order the threads of kernels run: as the environment says, or as the program last said by
//! `phalanx_emulated_driver_schedule`.

use std::sync::{Mutex, MutexGuard, PoisonError};

use phalanx_ptx::Schedule;

use crate::settings::settings;

/// The order of a process's launches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum KernelOrder {
    /// The fast one.
    Fixed,
    /// Another one for each launch, drawn from this seed and the launch's number.
    Seeded(u64),
    /// This seed's for each launch: what a fault's text names.
    Exactly(u64),
}

impl KernelOrder {
    /// `fixed`, a seed, or `exactly:SEED`.
    pub(crate) fn parse(text: &str) -> Option<KernelOrder> {
        match text.split_once(':') {
            None if text == "fixed" => Some(KernelOrder::Fixed),
            None => Some(KernelOrder::Seeded(text.parse().ok()?)),
            Some(("exactly", seed)) => Some(KernelOrder::Exactly(seed.parse().ok()?)),
            Some(_) => None,
        }
    }

    /// The order of a launch of a number.
    fn of_launch(self, number: u64) -> Schedule {
        match self {
            KernelOrder::Fixed => Schedule::Fixed,
            KernelOrder::Seeded(seed) => Schedule::Seeded((seed << 24).wrapping_add(number)),
            KernelOrder::Exactly(seed) => Schedule::Seeded(seed),
        }
    }
}

/// What the program said, and how many launches there were since.
#[derive(Debug)]
struct Launches {
    order: Option<KernelOrder>,
    number: u64,
}

fn launches() -> MutexGuard<'static, Launches> {
    static LAUNCHES: Mutex<Launches> = Mutex::new(Launches { order: None, number: 0 });
    LAUNCHES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The order of launches from now on, which are numbered from 0; `None` for the environment's.
pub(crate) fn set(order: Option<KernelOrder>) {
    *launches() = Launches { order, number: 0 };
}

/// The order of the next launch.
pub(crate) fn next() -> Schedule {
    let mut launches = launches();
    let number = launches.number;
    launches.number += 1;
    launches.order.unwrap_or(settings().kernels).of_launch(number)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_launch_of_a_seed_has_an_order_that_a_text_repeats() {
        let order = KernelOrder::parse("7").unwrap();
        let Schedule::Seeded(third) = order.of_launch(3) else { panic!("it is not seeded") };
        assert_ne!(order.of_launch(2), order.of_launch(3));
        assert_ne!(KernelOrder::parse("8").unwrap().of_launch(3), order.of_launch(3));
        let again = KernelOrder::parse(&format!("exactly:{third}")).unwrap();
        assert_eq!([0, 9].map(|number| again.of_launch(number)), [order.of_launch(3); 2]);
        assert_eq!(KernelOrder::parse("fixed").map(|fixed| fixed.of_launch(5)), Some(Schedule::Fixed));
        assert_eq!([KernelOrder::parse("random"), KernelOrder::parse("only:3")], [None; 2]);
    }
}
