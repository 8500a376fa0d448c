//! The flags of a pipeline's schedule, and which go with which.

use phalanx::train::Asynchronous;

use crate::args::TrainArgs;
use crate::choices::Schedule;

impl TrainArgs {
    /// How updates are made without flushes, if they are.
    pub fn scheme(&self) -> Option<Asynchronous> {
        self.schedule.and_then(Schedule::scheme)
    }

    /// The schedule; of one without flushes, the one that it is but for its updates.
    pub fn flushed(&self) -> Schedule {
        self.schedule.filter(|schedule| schedule.scheme().is_none()).unwrap_or(Schedule::OneFOneB)
    }

    /// Refuses what a schedule without flushes cannot do.
    fn check_scheme(&self) -> Result<(), String> {
        let (Some(schedule), Some(scheme)) = (self.schedule, self.scheme()) else { return Ok(()) };
        let (name, layout, pieces) = (schedule.name(), self.layout(), self.micro_batches);
        let refuse = |why: String| Err(format!("--schedule {name} {why}"));
        match scheme {
            _ if layout.dp > 1 || self.zero > 0 || self.emulate_dp > 1 => refuse(format!(
                "has one replica: got --dp {}, --zero {}",
                layout.dp.max(self.emulate_dp),
                self.zero
            )),
            _ if self.device.is_meta() => refuse("is not measured on --device meta".into()),
            Asynchronous::WeightStashing if pieces > 1 => {
                refuse(format!("updates after every micro-batch: got --micro-batches {pieces}, wanted 1"))
            }
            Asynchronous::DoubleBuffered if pieces < layout.pp => {
                refuse(format!("wants as many --micro-batches as --pp {}, got {pieces}", layout.pp))
            }
            _ => Ok(()),
        }
    }

    /// Refuses flags of a pipeline that would do nothing.
    pub fn check_schedule(&self) -> Result<(), String> {
        self.check_scheme()?;
        if let (Some(schedule), None) = (self.schedule, self.pp) {
            return Err(format!("--schedule {} goes with --pp, which is not given", schedule.name()));
        }
        let (schedule, stages) = (self.schedule.unwrap_or(Schedule::OneFOneB), self.virtual_stages);
        match (schedule, stages) {
            (_, None) | (Schedule::Interleaved, _) | (Schedule::ZbV, Some(2)) => Ok(()),
            (Schedule::ZbV, Some(n)) => Err(format!("--virtual-stages is {n}, and zb-v always has 2")),
            (other, Some(n)) => {
                let name = other.name();
                Err(format!(
                    "--virtual-stages {n} goes with --schedule interleaved, and the schedule is {name}"
                ))
            }
        }
    }
}
